#!/usr/bin/env python
r"""Encoding texts of mixed length with BERT: texts per second, against transformers' BertModel in batches of 32.

Both sides get the texts in the same order, padded to the longest of their batch, and have the same weights; the
vectors of the real tokens of the first two batches are compared, in float32. Both are measured with weights in float32
and in bfloat16: ratios are of each side in its faster type, and of both in float32.

    python scripts/benchmark/text_encoding.py --text_file documents.jsonl

Without a file the texts are pieces of Python's own documentation.
"""

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from measuring import (
    FOLDER,
    BenchmarkArguments,
    device,
    in_each_type,
    now,
    pairs_of_types,
    prepare,
    report,
    take_turns,
)
from transformers import BertConfig, BertModel, set_seed

from hf_vanilla import VanillaBertConfig, VanillaBertModel
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data import load_documents, python_documentation
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer


@dataclass
class EncodingBenchmarkArguments(BenchmarkArguments):
    """Options of this benchmark."""

    size: str = field(default="base", metadata={"help": "A preset of BERT."})
    text_file: str | None = field(default=None, metadata={"help": "Documents: JSON lines, CSV, Parquet or text."})
    texts: int = field(default=1000, metadata={"help": "Number of texts of a turn."})
    batch_size: int = field(default=32, metadata={"help": "Texts of a batch."})


def pieces(documents: list[str], count: int) -> list[str]:
    """Cut documents into texts of 4 to 300 words, with lengths uniform on a logarithmic scale."""
    draw = random.Random(0)
    words = [word for text in documents for word in text.split()]
    texts: list[str] = []
    start = 0
    while len(texts) < count:
        length = round(4 * 75 ** draw.random())
        texts.append(" ".join(words[start : start + length]))
        start = (start + length) % max(1, len(words) - 300)
    return texts


def main() -> None:
    """Prepare texts and models, take turns, report."""
    (arguments,) = parse_arguments(EncodingBenchmarkArguments, description=__doc__)
    prepare(arguments)
    size, count = ("tiny", 100) if arguments.quick else (arguments.size, arguments.texts)
    if arguments.text_file is None:
        documents = python_documentation(1000)
    else:
        documents = load_documents(data_files=[arguments.text_file])["text"][:2000]
    tokenizer = train_wordpiece_tokenizer(documents, 8000, show_progress=False)
    texts = pieces(documents, count)
    batches = [
        tokenizer(texts[start : start + arguments.batch_size], padding=True, truncation=True, return_tensors="pt").to(
            device()
        )
        for start in range(0, count, arguments.batch_size)
    ]
    real = sum(int(batch["attention_mask"].sum()) for batch in batches)
    share = real / sum(batch["attention_mask"].numel() for batch in batches)

    set_seed(0)
    config = VanillaBertConfig.preset(size, vocab_size=len(tokenizer))
    ours = VanillaBertModel(config).eval()
    ours.save_pretrained(FOLDER / "bert")
    native = BertModel(BertConfig.from_pretrained(FOLDER / "bert")).eval()
    native.load_state_dict(BertModel.from_pretrained(FOLDER / "bert").state_dict())
    ours, native = ours.to(device()), native.to(device())

    @torch.inference_mode()
    def encode(model: torch.nn.Module, batch) -> torch.Tensor:
        return model(**batch).last_hidden_state

    difference = max(
        ((encode(ours, batch) - encode(native, batch)).float() * batch["attention_mask"][..., None]).abs().max().item()
        for batch in batches[:2]
    )

    def side(model: torch.nn.Module, dtype: str) -> Callable[[], float]:
        converted = copy.deepcopy(model).to(getattr(torch, dtype))

        def measure() -> float:
            started = now()
            for batch in batches:
                encode(converted, batch)
            return count / (now() - started)

        return measure

    figures = take_turns(
        in_each_type({"BertModel": partial(side, native), "ours": partial(side, ours)}), arguments.repeats
    )
    report(
        arguments,
        f"encode {count} texts of mixed length with BERT {size}",
        "texts per second",
        figures,
        pairs_of_types(figures, {"against BertModel": ("ours", "BertModel", 2.0)}),
        batch_size=arguments.batch_size,
        share_of_real_tokens=round(share, 3),
        mean_tokens=round(real / count, 1),
        largest_difference=float(f"{difference:.3g}"),
        text=arguments.text_file or "Python's documentation",
    )


if __name__ == "__main__":
    sys.exit(run(main))
