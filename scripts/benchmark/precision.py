#!/usr/bin/env python
r"""float32 against bfloat16 on this machine, in training and in translation, and the probe that chooses between them.

Both sides are ours: a small encoder-decoder and the base one train with `VanillaTrainer`, optimizer step included,
dropout on, and the base one translates with beam search and packed weights. The probe is that of --precision fastest
and --dtype fastest, timed on its own.

    python scripts/benchmark/precision.py --parallel_file train.jsonl --columns en de

Without a file the pairs are made from Python's own documentation.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from measuring import (
    BenchmarkArguments,
    clocked_training,
    device,
    now,
    prepare,
    report,
    sentence_pairs,
    spread,
    take_turns,
    train_and_clock,
)
from transformers import DataCollatorForSeq2Seq, set_seed

import hf_vanilla.precision
from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data import tokenize_parallel_dataset
from hf_vanilla.data.tokenization import train_tokenizer
from hf_vanilla.generation import translate
from hf_vanilla.models.checks import IGNORED_LABEL
from hf_vanilla.training import VanillaTrainer, VanillaTrainingArguments


VOCAB_SIZE = 10_000
SMALL = {"d_model": 128, "d_ff": 256, "num_heads": 4, "encoder_layers": 4, "decoder_layers": 4}
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class PrecisionBenchmarkArguments(BenchmarkArguments):
    """Options of this benchmark."""

    parallel_file: str | None = field(default=None, metadata={"help": "Pairs: JSON lines, CSV or Parquet."})
    columns: list[str] = field(default_factory=lambda: ["source", "target"], metadata={"help": "Its two columns."})
    max_tokens_per_batch: int = field(default=2048, metadata={"help": "Size of the batches."})
    tokens_per_turn: int = field(default=12_000, metadata={"help": "Approximate number of tokens of a training."})
    sentences: int = field(default=64, metadata={"help": "Sentences of a translation."})


def time_probe(repeats: int) -> tuple[list[float], list[str]]:
    """Return the seconds of each probe, and what it chose."""
    seconds, choices = [], []
    for _ in range(repeats):
        hf_vanilla.precision.forget()
        started = time.perf_counter()
        choice = hf_vanilla.precision.fastest_precision(device())
        seconds.append(time.perf_counter() - started)
        choices.append(str(choice))
    return seconds, choices


def main() -> None:
    """Time the probe, train and translate in both types in turn, report."""
    (arguments,) = parse_arguments(PrecisionBenchmarkArguments, description=__doc__)
    prepare(arguments)
    pairs = sentence_pairs(arguments.parallel_file, arguments.columns, 29_000)
    tokenizer = train_tokenizer(pairs["source"] + pairs["target"], VOCAB_SIZE, show_progress=False)
    data = tokenize_parallel_dataset(Dataset.from_dict(pairs), tokenizer, max_source_length=128, max_target_length=128)
    sentences = pairs["source"][: 16 if arguments.quick else arguments.sentences]
    tokens = sum(map(len, tokenizer(sentences)["input_ids"]))
    steps = max(3, arguments.tokens_per_turn // arguments.max_tokens_per_batch)
    configs = {"small": VanillaTransformerConfig(vocab_size=VOCAB_SIZE, **SMALL)}
    if not arguments.quick:
        configs["base"] = VanillaTransformerConfig.preset("base", vocab_size=VOCAB_SIZE)

    def training(config: VanillaTransformerConfig, dtype: torch.dtype) -> Callable[[], float]:
        precision: Any = str(dtype).removeprefix("torch.")

        def measure() -> float:
            set_seed(0)
            model = VanillaTransformerForConditionalGeneration(config)
            args = VanillaTrainingArguments(
                max_tokens_per_batch=arguments.max_tokens_per_batch,
                precision=precision,
                **clocked_training(steps),
            )
            trainer = VanillaTrainer(model, args, DataCollatorForSeq2Seq(tokenizer, model=model), train_dataset=data)
            return train_and_clock(trainer, "labels", IGNORED_LABEL).rate()

        return measure

    def translation(config: VanillaTransformerConfig, dtype: torch.dtype) -> Callable[[], float]:
        set_seed(0)
        model = VanillaTransformerForConditionalGeneration(config).eval().to(device(), dtype)

        def measure() -> float:
            started = now()
            translate(model, tokenizer, sentences, max_length_offset=0)
            return tokens / (now() - started)

        return measure

    sides: dict[str, Callable[[], float]] = {}
    ratios: dict[str, Any] = {}
    for name, config in configs.items():
        for work, make in (("training", training), ("translation", translation)):
            float32, bfloat16 = (f"{work}, {name}, {str(dtype).removeprefix('torch.')}" for dtype in DTYPES)
            sides |= {float32: make(config, DTYPES[0]), bfloat16: make(config, DTYPES[1])}
            ratios[f"{work}, {name}"] = (bfloat16, float32, None)
    probe_seconds, choices = time_probe(5)
    print(f"The probe took {spread(probe_seconds)['median']:.2f} s, and chose {choices[-1]}.")
    report(
        arguments,
        "bfloat16 against float32",
        "target tokens per second of training, source tokens per second of translation",
        take_turns(sides, arguments.repeats),
        ratios,
        probe_seconds=spread(probe_seconds),
        choices=choices,
        vocab_size=VOCAB_SIZE,
        max_tokens_per_batch=arguments.max_tokens_per_batch,
        sentences=len(sentences),
        text=arguments.parallel_file or "Python's documentation",
    )


if __name__ == "__main__":
    sys.exit(run(main))
