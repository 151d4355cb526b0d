#!/usr/bin/env python
r"""Encoding texts of mixed length with BERT: texts per second, against transformers' BertModel in batches of 32.

Both sides get the texts in the same order, padded to the longest of their batch, and have the same weights; the
vectors of the real tokens of the first two batches are compared.

    python scripts/benchmark/text_encoding.py --text_file documents.jsonl

Without a file the texts are pieces of Python's own documentation.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from measuring import FOLDER, BenchmarkArguments, device, now, prepare, report, take_turns
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
    bf16: bool = field(default=True, metadata={"help": "Weights in bfloat16 instead of float32."})


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
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    config = VanillaBertConfig.preset(size, vocab_size=len(tokenizer))
    ours = VanillaBertModel(config).eval()
    ours.save_pretrained(FOLDER / "bert")
    native = BertModel(BertConfig.from_pretrained(FOLDER / "bert")).eval()
    native.load_state_dict(BertModel.from_pretrained(FOLDER / "bert").state_dict())
    ours, native = ours.to(device(), dtype), native.to(device(), dtype)

    @torch.inference_mode()
    def encode(model: torch.nn.Module, batch) -> torch.Tensor:
        return model(**batch).last_hidden_state

    difference = max(
        ((encode(ours, batch) - encode(native, batch)).float() * batch["attention_mask"][..., None]).abs().max().item()
        for batch in batches[:2]
    )

    def side(model: torch.nn.Module) -> Callable[[], float]:
        def measure() -> float:
            started = now()
            for batch in batches:
                encode(model, batch)
            return count / (now() - started)

        return measure

    figures = take_turns({"BertModel": side(native), "ours": side(ours)}, arguments.repeats)
    report(
        arguments,
        f"encode {count} texts of mixed length with BERT {size}, {str(dtype).removeprefix('torch.')}",
        "texts per second",
        figures,
        {"against BertModel": ("ours", "BertModel", 2.0)},
        batch_size=arguments.batch_size,
        share_of_real_tokens=round(share, 3),
        mean_tokens=round(real / count, 1),
        largest_difference=float(f"{difference:.3g}"),
        text=arguments.text_file or "Python's documentation",
    )


if __name__ == "__main__":
    sys.exit(run(main))
