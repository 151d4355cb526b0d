#!/usr/bin/env python
r"""Training an encoder-decoder: real target tokens per second, against transformers' MarianMTModel of the same sizes.

Both sides train through a Trainer, optimizer step included, dropout on: MarianMTModel with the stock
`Seq2SeqTrainer` and batches of 64 shuffled sentences, and again with batches equal to ours; our model with the same
stock trainer and batches, and with `VanillaTrainer` and batches of a number of tokens. All are measured in float32 and
in bfloat16: ratios are of each side in its faster type, and of both in float32. For the last, the report also has the
speed of its products as a share of that of one large product.

    python scripts/benchmark/translation_training.py --parallel_file train.jsonl --columns en de
    python scripts/benchmark/translation_training.py --preset big --max_tokens_per_batch 25000 \
        --tokens_per_turn 2000000  # on a GPU

Without a file the pairs are made from Python's own documentation.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from measuring import (
    FLOAT_TYPES,
    FOLDER,
    BenchmarkArguments,
    clocked_training,
    fresh_copy,
    in_each_type,
    marian_like,
    pairs_of_types,
    prepare,
    product_ceiling,
    report,
    sentence_pairs,
    take_turns,
    train_and_clock,
)
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, Seq2SeqTrainer, set_seed

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data import tokenize_parallel_dataset
from hf_vanilla.data.tokenization import train_tokenizer
from hf_vanilla.models.checks import IGNORED_LABEL
from hf_vanilla.training import VanillaTrainer, VanillaTrainingArguments


VOCAB_SIZE = 10_000


@dataclass
class TrainingBenchmarkArguments(BenchmarkArguments):
    """Options of this benchmark."""

    preset: str = field(default="base", metadata={"help": "base, big, or another row of the paper's Table 3."})
    parallel_file: str | None = field(default=None, metadata={"help": "Pairs: JSON lines, CSV or Parquet."})
    columns: list[str] = field(default_factory=lambda: ["source", "target"], metadata={"help": "Its two columns."})
    max_tokens_per_batch: int = field(default=4096, metadata={"help": "Size of our batches."})
    tokens_per_turn: int = field(default=25_000, metadata={"help": "Approximate number of target tokens of a turn."})


def build_models(preset: str, quick: bool) -> dict[str, PreTrainedModel]:
    """Build both models with the same sizes, tied embeddings and dropouts."""
    sizes = {"d_model": 128, "d_ff": 512, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2} if quick else {}
    config = VanillaTransformerConfig.preset(preset, vocab_size=VOCAB_SIZE, **sizes)
    set_seed(0)
    return {"MarianMTModel": marian_like(config), "ours": VanillaTransformerForConditionalGeneration(config)}


def main() -> None:
    """Prepare text and models, take turns, report."""
    (arguments,) = parse_arguments(TrainingBenchmarkArguments, description=__doc__)
    arguments.output_file = arguments.output_file or str(FOLDER / f"translation_training_{arguments.preset}.json")
    prepare(arguments)
    pairs = sentence_pairs(arguments.parallel_file, arguments.columns, 29_000)
    tokenizer = train_tokenizer(pairs["source"] + pairs["target"], VOCAB_SIZE, show_progress=False)
    data = tokenize_parallel_dataset(Dataset.from_dict(pairs), tokenizer, max_source_length=128, max_target_length=128)
    mean_target = sum(map(len, data["labels"][:])) / len(data)
    operations: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in FLOAT_TYPES}
    models = build_models(arguments.preset, arguments.quick)

    def side(model_name: str, trainer_class: type, *, dtype: str, **batches: Any) -> Callable[[], float]:
        tokens = batches.get("max_tokens_per_batch") or batches["per_device_train_batch_size"] * mean_target
        steps = max(3, round(arguments.tokens_per_turn / tokens))

        def measure() -> float:
            args = VanillaTrainingArguments(bf16=dtype == "bfloat16", **clocked_training(steps), **batches)
            model = fresh_copy(models[model_name])
            collator = DataCollatorForSeq2Seq(tokenizer, model=model)
            trainer = trainer_class(model, args, collator, train_dataset=data)
            speedometer = train_and_clock(trainer, "labels", IGNORED_LABEL)
            if trainer_class is VanillaTrainer and model_name == "ours":
                operations[dtype].append((speedometer.operations_per_second(), product_ceiling(getattr(torch, dtype))))
            return speedometer.rate()

        return measure

    stock: dict[str, Any] = {"per_device_train_batch_size": 64}
    by_tokens: dict[str, Any] = {"max_tokens_per_batch": arguments.max_tokens_per_batch}
    sides = {
        "MarianMTModel, Seq2SeqTrainer, 64 sentences": partial(side, "MarianMTModel", Seq2SeqTrainer, **stock),
        "MarianMTModel, our batches": partial(side, "MarianMTModel", VanillaTrainer, **by_tokens),
        "ours, Seq2SeqTrainer, 64 sentences": partial(side, "ours", Seq2SeqTrainer, **stock),
        "ours, VanillaTrainer": partial(side, "ours", VanillaTrainer, **by_tokens),
    }
    default, equal, stock_ours, ours = sides
    has_targets = arguments.preset == "base"
    figures = take_turns(in_each_type(sides), arguments.repeats)
    compared: dict[str, tuple[str, str, float | None]] = {
        "against the stock trainer's default batches": (ours, default, 6.0 if has_targets else None),
        "against equal batches": (ours, equal, 2.5 if has_targets else None),
        "stock trainer and batches on both sides": (stock_ours, default, None),
    }
    ratios = pairs_of_types(figures, compared)
    report(
        arguments,
        f"train an encoder-decoder ({'2+2 layers of 128' if arguments.quick else arguments.preset})",
        "real target tokens per second",
        figures,
        ratios,
        operations[ratios["against equal batches"][0].rpartition(" ")[2]],
        vocab_size=VOCAB_SIZE,
        max_tokens_per_batch=arguments.max_tokens_per_batch,
        mean_target_tokens=round(mean_target, 1),
        text=arguments.parallel_file or "Python's documentation",
    )


if __name__ == "__main__":
    sys.exit(run(main))
