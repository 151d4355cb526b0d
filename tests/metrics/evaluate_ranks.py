"""Evaluate a tiny model with `TranslationMetrics`, in one process or under `torchrun`: `evaluate_ranks.py FOLDER`."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.metrics import TranslationMetrics


PAD, START, END, UNKNOWN = range(4)
WORDS = ["a", "b", "c", "d", "e", "f", "G"]
SOURCES = [[4, 5, END], [6, 7, 8, 9, END], [5, END], [10, 9, 8, END], [4, 4, 7, 10, 6, 5, END]]


def word_tokenizer():
    vocab = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def model_of_many_words():
    """An untrained model, with weights so large that its output depends on its input."""
    torch.manual_seed(3)
    config = VanillaTransformerConfig(
        vocab_size=11, d_model=16, d_ff=20, num_heads=4, encoder_layers=1, decoder_layers=1
    )
    model = VanillaTransformerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def generate_one_by_one(model):
    return [model.generate(torch.tensor([source]), max_length=7)[0, 1:].tolist() for source in SOURCES]


def labels_for(generated):
    """Labels of many lengths: the model's output, a part of it, or others."""
    return [[*generated[0], END], [6, 7, END], generated[2][:4], [4, 5, 6, 7, 8, 9, 10, END], generated[4][1:]]


def evaluate(folder):
    tokenizer, model = word_tokenizer(), model_of_many_words()
    rows = {"input_ids": SOURCES, "labels": labels_for(generate_one_by_one(model))}
    arguments = Seq2SeqTrainingArguments(
        str(folder),
        predict_with_generate=True,
        generation_max_length=7,
        per_device_eval_batch_size=2,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        eval_dataset=Dataset.from_dict(rows),
        compute_metrics=TranslationMetrics(tokenizer, num_examples=len(SOURCES)),
    )
    metrics = trainer.evaluate()
    return {name: metrics[f"eval_{name}"] for name in ("bleu", "chrf", "gen_len")}, arguments


if __name__ == "__main__":
    scores, arguments = evaluate(sys.argv[1])
    result = {"world_size": arguments.world_size, "scores": scores}
    (Path(sys.argv[1]) / f"rank-{arguments.process_index}.json").write_text(json.dumps(result))
