#!/usr/bin/env python
r"""Training GPT: real tokens per second, against transformers' OpenAIGPTLMHeadModel.

Both sides train with the stock `Trainer` and `DataCollatorForLanguageModeling`, from the same weights, on the same
batches, optimizer step included, dropout on. Fine-tuning has shuffled batches of paragraphs, padded to the longest;
pre-training has blocks of 512 tokens without padding. Each side is measured in float32 and in bfloat16: ratios are of
each side in its faster type, and of both in float32. For ours, the report also has the speed of its products as a
share of that of one large product.

    python scripts/benchmark/gpt_training.py --task finetuning --text_file documents.jsonl
    python scripts/benchmark/gpt_training.py --task pretraining --size gpt1 --batch_size 4 --steps 3

Without a file the text is Python's own documentation.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from datasets import Dataset
from measuring import (
    FLOAT_TYPES,
    FOLDER,
    GPT_VOCAB_SIZE,
    BenchmarkArguments,
    clocked_training,
    fresh_copy,
    gpt_pair,
    in_each_type,
    language_documents,
    pairs_of_types,
    prepare,
    product_ceiling,
    report,
    take_turns,
    train_and_clock,
)
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, Trainer, TrainingArguments

from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data import build_blocks
from hf_vanilla.data.tokenization import train_gpt_tokenizer


TARGETS = {"finetuning": 2.0, "pretraining": 1.3}


@dataclass
class GptTrainingBenchmarkArguments(BenchmarkArguments):
    """Options of this benchmark."""

    task: Literal["finetuning", "pretraining"] = field(
        default="finetuning", metadata={"help": "Paragraphs with padding, or full blocks."}
    )
    size: str = field(default="mini", metadata={"help": "mini (4 x 256), gpt1 (12 x 768) or another preset of GPT."})
    text_file: str | None = field(default=None, metadata={"help": "Documents: JSON lines, CSV, Parquet or text."})
    length: int = field(default=512, metadata={"help": "Tokens of a block, and most of a paragraph."})
    batch_size: int = field(default=8, metadata={"help": "Blocks of a batch; of paragraphs four times as many."})
    steps: int = field(default=8, metadata={"help": "Updates of a turn."})


def paragraphs(documents: Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
    """Cut documents at empty lines, and tokenize the paragraphs."""
    texts = [part for text in documents["text"][:] for part in text.split("\n\n") if part.strip()]
    encoded = tokenizer(texts, truncation=True, max_length=length, return_attention_mask=False)["input_ids"]
    return Dataset.from_dict({"input_ids": [ids for ids in encoded if len(ids) > 1]})


def main() -> None:
    """Prepare text and models, take turns, report."""
    (arguments,) = parse_arguments(GptTrainingBenchmarkArguments, description=__doc__)
    task, size = arguments.task, "tiny" if arguments.quick else arguments.size
    arguments.output_file = arguments.output_file or str(FOLDER / f"gpt_{task}_{arguments.size}.json")
    prepare(arguments)
    documents = language_documents(arguments.text_file, 2000)
    tokenizer = train_gpt_tokenizer(documents["text"][:], 8000, show_progress=False)
    if task == "pretraining":
        data, batch_size = build_blocks(documents, tokenizer, block_length=arguments.length), arguments.batch_size
    else:
        data, batch_size = paragraphs(documents, tokenizer, arguments.length), 4 * arguments.batch_size
    lengths = list(map(len, data["input_ids"][:]))
    models = dict(zip(("ours", "OpenAIGPTLMHeadModel"), gpt_pair(size), strict=True))
    operations: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in FLOAT_TYPES}

    def side(name: str, dtype: str) -> Callable[[], float]:
        def measure() -> float:
            args = TrainingArguments(
                per_device_train_batch_size=batch_size, bf16=dtype == "bfloat16", **clocked_training(arguments.steps)
            )
            trainer = Trainer(
                fresh_copy(models[name]), args, DataCollatorForLanguageModeling(tokenizer, mlm=False), data
            )
            speedometer = train_and_clock(trainer, "attention_mask", 0)
            if name == "ours":
                operations[dtype].append((speedometer.operations_per_second(), product_ceiling(getattr(torch, dtype))))
            return speedometer.rate()

        return measure

    figures = take_turns(in_each_type({name: partial(side, name) for name in reversed(models)}), arguments.repeats)
    pairs = pairs_of_types(figures, {"against the stock model": ("ours", "OpenAIGPTLMHeadModel", TARGETS[task])})
    report(
        arguments,
        f"{task} of GPT {size}",
        "real tokens per second",
        figures,
        pairs,
        operations[pairs["against the stock model"][0].rpartition(" ")[2]],
        vocab_size=GPT_VOCAB_SIZE,
        batch_size=batch_size,
        max_length=arguments.length,
        mean_length=round(statistics.mean(lengths), 1),
        text=arguments.text_file or "Python's documentation",
    )


if __name__ == "__main__":
    sys.exit(run(main))
