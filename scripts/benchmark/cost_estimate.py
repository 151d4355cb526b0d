#!/usr/bin/env python
r"""`hf_vanilla.training.estimate` against real trainings: predicted and measured tokens per second.

There are three trainings: a small encoder-decoder, one of the base size, and BERT 4 x 256 on both tasks. Each is
predicted from a few updates, and then run with its trainer, optimizer step included, dropout on, in bfloat16.

    python scripts/benchmark/cost_estimate.py --parallel_file train.jsonl --columns en de --text_file documents.jsonl

Without files the text is Python's own documentation.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from measuring import (
    BenchmarkArguments,
    clocked_training,
    language_documents,
    prepare,
    report,
    sentence_pairs,
    take_turns,
    train_and_clock,
)
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, Trainer, set_seed

from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForPreTraining,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data import build_pretraining_dataset, tokenize_parallel_dataset
from hf_vanilla.data.tokenization import train_tokenizer, train_wordpiece_tokenizer
from hf_vanilla.models.checks import IGNORED_LABEL
from hf_vanilla.training import (
    Phase,
    PretrainingTrainer,
    VanillaTrainer,
    VanillaTrainingArguments,
    bert_training_arguments,
    estimate,
)


VOCAB_SIZE = 10_000
SMALL = {"d_model": 128, "d_ff": 256, "num_heads": 4, "encoder_layers": 4, "decoder_layers": 4}


@dataclass
class EstimateBenchmarkArguments(BenchmarkArguments):
    """Options of this benchmark."""

    parallel_file: str | None = field(default=None, metadata={"help": "Pairs: JSON lines, CSV or Parquet."})
    columns: list[str] = field(default_factory=lambda: ["source", "target"], metadata={"help": "Its two columns."})
    text_file: str | None = field(default=None, metadata={"help": "Documents: JSON lines, CSV, Parquet or text."})
    max_tokens_per_batch: int = field(default=2048, metadata={"help": "Size of the batches."})
    tokens_per_turn: int = field(default=40_000, metadata={"help": "Approximate number of tokens of a training."})


def main() -> None:
    """Prepare text, predict and train in turns, report."""
    (arguments,) = parse_arguments(EstimateBenchmarkArguments, description=__doc__)
    prepare(arguments)
    texts = sentence_pairs(arguments.parallel_file, arguments.columns, 29_000)
    tokenizer = train_tokenizer(texts["source"] + texts["target"], VOCAB_SIZE, show_progress=False)
    pairs = tokenize_parallel_dataset(
        Dataset.from_dict(texts), tokenizer, max_source_length=128, max_target_length=128
    )
    documents = language_documents(arguments.text_file, 2000)
    word_pieces = train_wordpiece_tokenizer(documents["text"][:], VOCAB_SIZE, show_progress=False)
    sequences = build_pretraining_dataset(documents, word_pieces, max_length=128)
    steps = max(8, arguments.tokens_per_turn // arguments.max_tokens_per_batch)
    common: dict[str, Any] = {
        **clocked_training(steps),
        "max_tokens_per_batch": arguments.max_tokens_per_batch,
        "bf16": True,
    }

    def predicted(config: Any, data: Dataset) -> Callable[[], float]:
        def measure() -> float:
            cost = estimate(
                config, data, updates=steps, max_tokens_per_batch=arguments.max_tokens_per_batch, bf16=True
            )
            return cost.tokens_per_update * steps / cost.seconds

        return measure

    def reached(build: Callable[[], Trainer], name: str, padding: int) -> Callable[[], float]:
        return lambda: train_and_clock(build(), name, padding).rate()

    def pairs_trainer(config: VanillaTransformerConfig) -> Callable[[], Trainer]:
        def build() -> Trainer:
            set_seed(0)
            model = VanillaTransformerForConditionalGeneration(config)
            collator = DataCollatorForSeq2Seq(tokenizer, model=model)
            args = VanillaTrainingArguments(**common)
            return VanillaTrainer(model, args, collator, train_dataset=pairs)

        return build

    def bert_trainer() -> Trainer:
        set_seed(0)
        return PretrainingTrainer(
            VanillaBertForPreTraining(bert),
            bert_training_arguments(warmup_steps=1, **common),
            DataCollatorForLanguageModeling(word_pieces),
            phases=[Phase(sequences, 1.0)],
            processing_class=word_pieces,
        )

    small = VanillaTransformerConfig(vocab_size=VOCAB_SIZE, **SMALL)
    base = VanillaTransformerConfig.preset("base", vocab_size=VOCAB_SIZE, **(SMALL if arguments.quick else {}))
    bert = VanillaBertConfig.preset("tiny" if arguments.quick else "mini", vocab_size=VOCAB_SIZE)
    sides: dict[str, Callable[[], float]] = {}
    ratios: dict[str, tuple[str, str, float | None]] = {}
    for name, config, data, training in (
        ("Transformer 4+4 x 128", small, pairs, reached(pairs_trainer(small), "labels", IGNORED_LABEL)),
        ("Transformer base", base, pairs, reached(pairs_trainer(base), "labels", IGNORED_LABEL)),
        ("BERT 4 x 256", bert, sequences, reached(bert_trainer, "attention_mask", 0)),
    ):
        sides[f"{name}, predicted"] = predicted(config, data)
        sides[f"{name}, reached"] = training
        ratios[f"{name}: predicted time, of the real one"] = (f"{name}, reached", f"{name}, predicted", 1.0)
    report(
        arguments,
        "predict the time of a training, bfloat16",
        "real tokens per second",
        take_turns(sides, arguments.repeats),
        ratios,
        vocab_size=VOCAB_SIZE,
        max_tokens_per_batch=arguments.max_tokens_per_batch,
        updates=steps,
        text=[arguments.parallel_file or "Python's documentation", arguments.text_file or "Python's documentation"],
    )


if __name__ == "__main__":
    sys.exit(run(main))
