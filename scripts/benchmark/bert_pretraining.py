#!/usr/bin/env python
r"""Pre-training BERT on both tasks: real tokens per second, against transformers' BertForPreTraining.

Both sides train through a Trainer with `DataCollatorForLanguageModeling`, optimizer step included, dropout on, in
bfloat16: BertForPreTraining and our model with the stock `Trainer` and batches of 32 shuffled pairs of 128 tokens, and
our model with `PretrainingTrainer` and batches of a number of tokens. For the last, the report also has
the speed of its products as a share of that of one large product.

    python scripts/benchmark/bert_pretraining.py --size mini --text_file documents.jsonl
    python scripts/benchmark/bert_pretraining.py --size large --length 512 --batch_size 64 --steps 30  # on a GPU

Without a file the text is Python's own documentation.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from measuring import (
    FOLDER,
    BenchmarkArguments,
    language_documents,
    prepare,
    product_ceiling,
    report,
    take_turns,
    train_and_clock,
)
from transformers import (
    BertConfig,
    BertForPreTraining,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_vanilla import VanillaBertConfig, VanillaBertForPreTraining
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data import build_pretraining_dataset
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer
from hf_vanilla.training import Phase, PretrainingTrainer, bert_training_arguments


VOCAB_SIZE = 30_522
WARMUP_STEPS = 2
# By size and length; the last is for a GPU.
TARGETS = {("mini", 128): 8.0, ("base", 128): 3.0, ("large", 512): 2.0}


@dataclass
class PretrainingBenchmarkArguments(BenchmarkArguments):
    """Options of this benchmark."""

    size: str = field(default="mini", metadata={"help": "mini (4 x 256), base (12 x 768), large (24 x 1024) ..."})
    length: int = field(default=128, metadata={"help": "Most tokens of a pair."})
    text_file: str | None = field(default=None, metadata={"help": "Documents: JSON lines, CSV, Parquet or text."})
    batch_size: int = field(
        default=32, metadata={"help": "Pairs of a stock batch; ours has an equal number of tokens."}
    )
    steps: int = field(default=8, metadata={"help": "Updates of a turn."})


def main() -> None:
    """Prepare text and models, take turns, report."""
    (arguments,) = parse_arguments(PretrainingBenchmarkArguments, description=__doc__)
    size, length = "tiny" if arguments.quick else arguments.size, arguments.length
    arguments.output_file = arguments.output_file or str(FOLDER / f"bert_pretraining_{arguments.size}_{length}.json")
    prepare(arguments)
    documents = language_documents(arguments.text_file, 2000)
    tokenizer = train_wordpiece_tokenizer(documents["text"][:], 8000, show_progress=False)
    data = build_pretraining_dataset(documents, tokenizer, max_length=length)
    mean_length = sum(map(len, data["input_ids"][:])) / len(data)
    set_seed(0)
    config = VanillaBertConfig.preset(size, vocab_size=VOCAB_SIZE)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    native = BertConfig(vocab_size=VOCAB_SIZE, pad_token_id=0, **{name: getattr(config, name) for name in sizes})
    models: dict[str, PreTrainedModel] = {
        "BertForPreTraining": BertForPreTraining(native),
        "ours": VanillaBertForPreTraining(config),
    }
    common = {
        "max_steps": arguments.steps + WARMUP_STEPS,
        "bf16": True,
        "use_cpu": not torch.accelerator.is_available(),
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    collator = DataCollatorForLanguageModeling(tokenizer)
    operations: list[tuple[float, float]] = []

    def stock(name: str) -> Callable[[], float]:
        def measure() -> float:
            args = TrainingArguments("benchmark_output", per_device_train_batch_size=arguments.batch_size, **common)
            trainer = Trainer(models[name], args, collator, data.remove_columns("offset_mapping"))
            return train_and_clock(trainer, "attention_mask", 0, WARMUP_STEPS).rate()

        return measure

    def by_tokens() -> float:
        args = bert_training_arguments(
            "benchmark_output", warmup_steps=1, max_tokens_per_batch=arguments.batch_size * length, **common
        )
        trainer = PretrainingTrainer(
            models["ours"], args, collator, phases=[Phase(data, 1.0)], processing_class=tokenizer
        )
        speedometer = train_and_clock(trainer, "attention_mask", 0, WARMUP_STEPS)
        operations.append((speedometer.operations_per_second(), product_ceiling(torch.bfloat16)))
        return speedometer.rate()

    native_name, stock_name, name = "BertForPreTraining, Trainer", "ours, Trainer", "ours, PretrainingTrainer"
    sides = {native_name: stock("BertForPreTraining"), stock_name: stock("ours"), name: by_tokens}
    report(
        arguments,
        f"pre-train BERT {size}, bfloat16",
        "real tokens per second",
        take_turns(sides, arguments.repeats),
        {
            "against the stock trainer": (name, native_name, TARGETS.get((size, length))),
            "stock trainer and batches on both sides": (stock_name, native_name, None),
        },
        operations,
        vocab_size=VOCAB_SIZE,
        batch_size=arguments.batch_size,
        max_length=length,
        mean_length=round(mean_length, 1),
        text=arguments.text_file or "Python's documentation",
    )


if __name__ == "__main__":
    sys.exit(run(main))
