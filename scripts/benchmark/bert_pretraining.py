#!/usr/bin/env python
r"""Pre-training BERT on both tasks: real tokens per second, against transformers' BertForPreTraining.

Both sides train through a Trainer with `DataCollatorForLanguageModeling`, optimizer step included, dropout on:
BertForPreTraining and our model with the stock `Trainer` and batches of 32 shuffled pairs of 128 tokens, and our model
with `PretrainingTrainer` and batches of a number of tokens. All are measured in float32 and in bfloat16: ratios are of
each side in its faster type, and of both in float32. For the last, the report also has the speed of its products as a
share of that of one large product.

    python scripts/benchmark/bert_pretraining.py --size mini --text_file documents.jsonl
    python scripts/benchmark/bert_pretraining.py --size large --length 512 --batch_size 64 --steps 30  # on a GPU

Without a file the text is Python's own documentation.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from measuring import (
    FLOAT_TYPES,
    FOLDER,
    BenchmarkArguments,
    clocked_training,
    fresh_copy,
    in_each_type,
    language_documents,
    pairs_of_types,
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
    common = clocked_training(arguments.steps)
    collator = DataCollatorForLanguageModeling(tokenizer)
    operations: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in FLOAT_TYPES}

    def stock(name: str, dtype: str) -> Callable[[], float]:
        def measure() -> float:
            batches = {"per_device_train_batch_size": arguments.batch_size, "bf16": dtype == "bfloat16"}
            args = TrainingArguments(**batches, **common)
            trainer = Trainer(fresh_copy(models[name]), args, collator, data.remove_columns("offset_mapping"))
            return train_and_clock(trainer, "attention_mask", 0).rate()

        return measure

    def by_tokens(dtype: str) -> Callable[[], float]:
        def measure() -> float:
            batches = {"max_tokens_per_batch": arguments.batch_size * length, "bf16": dtype == "bfloat16"}
            args = bert_training_arguments(warmup_steps=1, **batches, **common)
            trainer = PretrainingTrainer(
                fresh_copy(models["ours"]), args, collator, phases=[Phase(data, 1.0)], processing_class=tokenizer
            )
            speedometer = train_and_clock(trainer, "attention_mask", 0)
            operations[dtype].append((speedometer.operations_per_second(), product_ceiling(getattr(torch, dtype))))
            return speedometer.rate()

        return measure

    native_name, stock_name, name = "BertForPreTraining, Trainer", "ours, Trainer", "ours, PretrainingTrainer"
    sides: dict[str, Callable[..., Callable[[], float]]] = {
        native_name: partial(stock, "BertForPreTraining"),
        stock_name: partial(stock, "ours"),
        name: by_tokens,
    }
    figures = take_turns(in_each_type(sides), arguments.repeats)
    compared: dict[str, tuple[str, str, float | None]] = {
        "against the stock trainer": (name, native_name, TARGETS.get((size, length))),
        "stock trainer and batches on both sides": (stock_name, native_name, None),
    }
    pairs = pairs_of_types(figures, compared)
    report(
        arguments,
        f"pre-train BERT {size}",
        "real tokens per second",
        figures,
        pairs,
        operations[pairs["against the stock trainer"][0].rpartition(" ")[2]],
        vocab_size=VOCAB_SIZE,
        batch_size=arguments.batch_size,
        max_length=length,
        mean_length=round(mean_length, 1),
        text=arguments.text_file or "Python's documentation",
    )


if __name__ == "__main__":
    sys.exit(run(main))
