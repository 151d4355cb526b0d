#!/usr/bin/env python
"""Pre-train a tiny BERT on English text that comes with Python, in minutes on a CPU, and fill masks with it.

The text are the help topics of the interpreter and the docstrings of the standard library. At the end the model is
loaded with `AutoModelForMaskedLM` and fills masks in unseen sentences.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("demo_bert")

import sys
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, ProgressCallback, pipeline, set_seed
from transformers.utils import logging

from hf_vanilla import VanillaBertConfig, VanillaBertForPreTraining
from hf_vanilla.command_line.checks import without_load_report
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.command_line.report import ReadableProgress
from hf_vanilla.data import build_pretraining_dataset, mask_statically, python_documentation
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer
from hf_vanilla.metrics import PretrainingMetrics
from hf_vanilla.training import Phase, PretrainingTrainer, bert_training_arguments


HELD_OUT_EVERY = 20  # one of this many documents is kept for the test
VOCAB_SIZE = 4000
# Length and share of the updates. Short sequences teach the context of words much sooner.
PHASES = ((32, 0.8), (128, 0.2))
# Not from the documents; each mask can be inferred from the rest of its sentence.
QUESTIONS = (
    "if the file does not exist , an exception is [MASK] .",
    "return [MASK] if the two objects are equal , false otherwise .",
    "the first [MASK] of the function is a string .",
    "this method is called [MASK] the object is created .",
)


@dataclass
class DemoArguments:
    """Options of the demo."""

    output_dir: str = field(default="demo_bert_output", metadata={"help": "Folder of the model."})
    max_steps: int = field(default=2600, metadata={"help": "Number of updates."})
    documents: int = field(default=3000, metadata={"help": "Most documents to train on."})
    seed: int = field(default=0, metadata={"help": "Seed of the initial weights, the order and the masks."})


def train(model, tokenizer, phases, held_out, arguments: DemoArguments) -> PretrainingTrainer:
    """Pre-train in two phases, as the paper does but shorter."""
    has_accelerator = torch.accelerator.is_available()
    training_args = bert_training_arguments(
        arguments.output_dir,
        max_steps=arguments.max_steps,
        warmup_steps=min(100, arguments.max_steps // 5),
        learning_rate=1.5e-3,
        max_tokens_per_batch=2048,
        precision="fastest",
        use_cpu=not has_accelerator,
        dataloader_pin_memory=has_accelerator,
        logging_steps=0.05,
        save_strategy="no",
        disable_tqdm=False,
        seed=arguments.seed,
    )
    metrics = PretrainingMetrics()
    trainer = PretrainingTrainer(
        model,
        training_args,
        DataCollatorForLanguageModeling(tokenizer),
        phases=phases,
        eval_dataset=held_out,
        processing_class=tokenizer,
        compute_metrics=metrics,
        preprocess_logits_for_metrics=metrics.preprocess_logits,
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ReadableProgress)
    trainer.train()
    return trainer


def main() -> None:
    """Read the text, train, evaluate, save, reload and fill masks."""
    (arguments,) = parse_arguments(DemoArguments, description=__doc__)
    torch.set_num_threads(1)  # two are half as fast again on a quiet machine, and far slower where a core is busy
    logging.set_verbosity_error()
    set_seed(arguments.seed)
    texts = python_documentation(arguments.documents)
    test = Dataset.from_dict({"text": texts[::HELD_OUT_EVERY]})
    corpus = Dataset.from_dict({"text": [text for number, text in enumerate(texts) if number % HELD_OUT_EVERY]})
    tokenizer = train_wordpiece_tokenizer(corpus["text"][:], VOCAB_SIZE, show_progress=False)
    phases = [
        Phase(build_pretraining_dataset(corpus, tokenizer, max_length=length), share) for length, share in PHASES
    ]
    held_out = mask_statically(build_pretraining_dataset(test, tokenizer, max_length=64), tokenizer)
    held_out = held_out.remove_columns(["special_tokens_mask", "offset_mapping"])
    config = VanillaBertConfig.preset(
        "tiny", vocab_size=len(tokenizer), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model = VanillaBertForPreTraining(config)
    print(f"\nTraining {model.num_parameters():,} parameters on {len(corpus):,} documents of Python's text.\n")
    trainer = train(model, tokenizer, phases, held_out, arguments)

    measured = trainer.evaluate()
    print(
        f"\nOn {len(test)} unseen documents {measured['eval_mlm_accuracy']:.1%} of the masked tokens "
        f"and {measured['eval_nsp_accuracy']:.1%} of the next sentences are right.\n"
    )
    trainer.save_model()
    with without_load_report():  # it lists the next-sentence head as unused
        fill = pipeline("fill-mask", model=arguments.output_dir, device=-1)  # through AutoModelForMaskedLM
    for question in QUESTIONS:
        words = ", ".join(f"{guess['token_str']} {guess['score']:.0%}" for guess in fill(question, top_k=4))
        print(f"  {question}\n      {words}")
    print(f"\nThe model is in {arguments.output_dir}/; AutoModelForMaskedLM loads it.")


if __name__ == "__main__":
    sys.exit(run(main))
