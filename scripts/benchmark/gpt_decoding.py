#!/usr/bin/env python
r"""Continuing 64 prompts of mixed length: new tokens per second, against OpenAIGPTLMHeadModel.generate.

Both sides have the same random weights, get the same prompts and make equally many new tokens of each; each is
measured in float32 and bfloat16, and the ratio is taken between the faster ones. OpenAIGPTLMHeadModel has no cache: it
reads the whole text again for each new token. So ours is also measured with the norms of GPT-2, against
GPT2LMHeadModel, which has one, and with transformers' own search, the plain use of `generate()`. transformers gets the
prompts in one batch, padded at the left; ours gets batches of like length. With `--num_beams 1` all searches are
greedy.

    python scripts/benchmark/gpt_decoding.py --size mini --text_file documents.jsonl
    python scripts/benchmark/gpt_decoding.py --size gpt1 --num_beams 1

Without a file the prompts are beginnings of Python's own documentation.
"""

import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from measuring import (
    FOLDER,
    GPT_VOCAB_SIZE,
    BenchmarkArguments,
    device,
    gpt_pair,
    language_documents,
    now,
    prepare,
    report,
    take_turns,
)
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data.tokenization import train_gpt_tokenizer
from hf_vanilla.generation import beam_search, fast_model
from hf_vanilla.models.text_batches import batches_by_length


PROMPTS = 64
SHORTEST, LONGEST = 8, 128
TARGET = 1.5
DTYPES = ("float32", "bfloat16")
NATIVES = {"post": "OpenAIGPTLMHeadModel", "pre": "GPT2LMHeadModel"}


@dataclass
class GptDecodingBenchmarkArguments(BenchmarkArguments):
    """Options of this benchmark."""

    size: str = field(default="mini", metadata={"help": "mini (4 x 256), gpt1 (12 x 768) or another preset of GPT."})
    text_file: str | None = field(default=None, metadata={"help": "Documents: JSON lines, CSV, Parquet or text."})
    num_beams: int = field(default=4, metadata={"help": "Beams of all sides; 1 is greedy search."})
    new_tokens: int = field(default=32, metadata={"help": "Tokens added to each prompt."})
    max_tokens_per_batch: int = field(default=2048, metadata={"help": "Tokens of the prompts of our batches."})


def draw_prompts(tokenizer: PreTrainedTokenizerBase, texts: list[str], count: int) -> list[list[int]]:
    """Take the beginnings of texts, with lengths uniform on a logarithmic scale."""
    draw = random.Random(0)
    encoded = (tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"] for text in texts)
    long_enough = [ids for ids in encoded if len(ids) == LONGEST][:count]
    return [ids[: round(SHORTEST * (LONGEST / SHORTEST) ** draw.random())] for ids in long_enough]


def main() -> None:
    """Prepare prompts and models, take turns, report."""
    (arguments,) = parse_arguments(GptDecodingBenchmarkArguments, description=__doc__)
    beams = arguments.num_beams
    arguments.output_file = arguments.output_file or str(FOLDER / f"gpt_decoding_{arguments.size}_beam_{beams}.json")
    prepare(arguments)
    size, new_tokens, count = arguments.size, arguments.new_tokens, PROMPTS
    if arguments.quick:
        size, new_tokens, count = "tiny", 4, 16
    texts = language_documents(arguments.text_file, 2000)["text"][:]
    tokenizer = train_gpt_tokenizer(texts, 8000, show_progress=False)
    tokenizer.padding_side = "left"
    prompts = draw_prompts(tokenizer, texts, count)

    def generate(model: PreTrainedModel, batch: list[list[int]], **options) -> torch.Tensor:
        inputs = tokenizer.pad({"input_ids": batch}, return_tensors="pt").to(model.device)
        return model.generate(
            **inputs, num_beams=beams, do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, **options
        )

    def as_it_is(model: PreTrainedModel) -> None:
        generate(model, prompts)

    def by_search(model: PreTrainedModel) -> None:
        fast = fast_model(model, len(prompts) * beams)
        for places in batches_by_length([len(ids) for ids in prompts], arguments.max_tokens_per_batch):
            generate(fast, [prompts[place] for place in places], custom_generate=beam_search)

    def clocked(decode: Callable[[PreTrainedModel], None], model: PreTrainedModel) -> Callable[[], float]:
        def measure() -> float:
            started = now()
            decode(model)
            return len(prompts) * new_tokens / (now() - started)

        return measure

    sides, equal = {}, {}
    for norm, native_name in NATIVES.items():
        for dtype in DTYPES:
            ours, native = (model.to(device(), getattr(torch, dtype)) for model in gpt_pair(size, norm))
            sides[f"{native_name}, {dtype}"] = clocked(as_it_is, native)
            sides[f"ours, {norm}-norm, generate() as it is, {dtype}"] = clocked(as_it_is, ours)
            sides[f"ours, {norm}-norm, {dtype}"] = clocked(by_search, ours)
            found = generate(ours, prompts[:8], custom_generate=beam_search)
            equal[f"{native_name}, {dtype}"] = int((found == generate(native, prompts[:8])).all(1).sum())
    figures = take_turns(sides, arguments.repeats)

    def fastest(name: str) -> str:
        return max((f"{name}, {dtype}" for dtype in DTYPES), key=lambda side: statistics.median(figures[side]))

    ratios: dict[str, tuple[str, str, float | None]] = {}
    for norm, native_name in NATIVES.items():
        ours_name, native_side = f"ours, {norm}-norm", fastest(native_name)
        target = TARGET if norm == "post" else None
        ratios[f"against {native_name}.generate"] = (fastest(ours_name), native_side, target)
        plain = fastest(f"{ours_name}, generate() as it is")
        ratios[f"generate() as it is, against {native_name}"] = (plain, native_side, None)
    report(
        arguments,
        f"beam-{beams} search, {len(prompts)} prompts and {new_tokens} new tokens of each, GPT {size}",
        "new tokens per second",
        figures,
        ratios,
        num_beams=beams,
        mean_prompt_tokens=round(sum(map(len, prompts)) / len(prompts), 1),
        longest_prompt=max(map(len, prompts)),
        vocab_size=GPT_VOCAB_SIZE,
        equal_sequences_of_8=equal,
        text=arguments.text_file or "Python's documentation",
    )


if __name__ == "__main__":
    sys.exit(run(main))
