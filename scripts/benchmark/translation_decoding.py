#!/usr/bin/env python
r"""Beam search or greedy search: source tokens per second, against MarianMTModel.generate and CTranslate2.

Models of the base size with random weights: speed does not depend on them. All sides translate the same sentences,
sorted by length, each batch to the length of its longest source. MarianMTModel and CTranslate2 get batches of 64
sentences, CTranslate2 in its fastest data type on this machine; ours has token-budget batches. Ours is also measured
with transformers' own search and batches of 64, the plain use of `generate()`. With `--num_beams 1` all searches are
greedy.

    python scripts/benchmark/translation_decoding.py --parallel_file test.jsonl --columns en de

Without a file the sentences are those of Python's own documentation.
"""

import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import ctranslate2
import torch
from ctranslate2.converters.transformers import MarianMTLoader
from measuring import (
    FOLDER,
    BenchmarkArguments,
    device,
    marian_like,
    now,
    prepare,
    report,
    sentence_pairs,
    take_turns,
)
from transformers import MarianMTModel, PreTrainedModel, set_seed

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data.tokenization import train_tokenizer
from hf_vanilla.generation import beam_search, fast_model
from hf_vanilla.models.text_batches import batches_by_length, padded


VOCAB_SIZE = 10_000
BEAMS_OF_TARGETS = 4


@dataclass
class DecodingBenchmarkArguments(BenchmarkArguments):
    """Options of this benchmark."""

    parallel_file: str | None = field(default=None, metadata={"help": "Pairs: JSON lines, CSV or Parquet."})
    columns: list[str] = field(default_factory=lambda: ["source", "target"], metadata={"help": "Its two columns."})
    num_beams: int = field(default=4, metadata={"help": "Beams of all sides; 1 is greedy search."})
    sentences: int = field(default=1000, metadata={"help": "Number of sentences of a turn."})
    max_tokens_per_batch: int = field(default=2048, metadata={"help": "Source tokens of our batches."})
    bf16: bool = field(default=True, metadata={"help": "Ours and MarianMTModel in bfloat16 instead of float32."})


def to_ctranslate2(model: MarianMTModel) -> str:
    """Convert a MarianMTModel with CTranslate2's own loader; the vocabulary is synthetic, with padding at the end."""
    tokens = ["</s>", "<unk>", *(f"word{number}" for number in range(VOCAB_SIZE - 3)), "<pad>"]
    vocabulary = SimpleNamespace(
        eos_token="</s>", unk_token="<unk>", get_vocab=lambda: {token: number for number, token in enumerate(tokens)}
    )
    folder = FOLDER / "ctranslate2"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    spec = MarianMTLoader()(model, vocabulary)
    spec.validate()
    spec.save(str(folder))
    return str(folder)


def main() -> None:
    """Prepare sentences and models, take turns, report."""
    (arguments,) = parse_arguments(DecodingBenchmarkArguments, description=__doc__)
    beams = arguments.num_beams
    arguments.output_file = arguments.output_file or str(FOLDER / f"translation_decoding_beam_{beams}.json")
    prepare(arguments)
    count = 64 if arguments.quick else arguments.sentences
    sentences = sentence_pairs(arguments.parallel_file, arguments.columns, 29_000)["source"]
    tokenizer = train_tokenizer(sentences, VOCAB_SIZE, show_progress=False)
    sources = sorted(tokenizer(sentences[:count])["input_ids"], key=len)
    tokens = sum(map(len, sources))
    set_seed(0)
    sizes = {"d_model": 128, "d_ff": 512, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2}
    config = VanillaTransformerConfig.preset("base", vocab_size=VOCAB_SIZE, **(sizes if arguments.quick else {}))
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    native = marian_like(config).eval()
    translator_folder = to_ctranslate2(native)
    native = native.to(device(), dtype)
    ours = VanillaTransformerForConditionalGeneration(config).eval().to(device(), dtype)
    batches = [sources[start : start + 64] for start in range(0, count, 64)]

    def clocked(translate_all: Callable[[], None]) -> Callable[[], float]:
        def measure() -> float:
            started = now()
            translate_all()
            return tokens / (now() - started)

        return measure

    def generate(model: PreTrainedModel, batch: list[list[int]], **options) -> None:
        model.generate(
            input_ids=padded(batch, config.pad_token_id, model.device),
            attention_mask=padded([[1] * len(each) for each in batch], 0, model.device),
            num_beams=beams,
            do_sample=False,
            max_new_tokens=max(map(len, batch)),
            suppress_tokens=[config.pad_token_id, config.eos_token_id],  # no sentence ends early
            **options,
        )

    def as_it_is(model: PreTrainedModel) -> Callable[[], None]:
        def translate_all() -> None:
            for batch in batches:
                generate(model, batch)

        return translate_all

    def by_ours() -> None:
        fast = fast_model(ours, tokens)
        for places in batches_by_length([len(each) for each in sources], arguments.max_tokens_per_batch):
            generate(fast, [sources[place] for place in places], custom_generate=beam_search)

    def by_ctranslate2(translator: ctranslate2.Translator) -> Callable[[], None]:
        def translate_all() -> None:
            for batch in batches:
                longest = len(batch[-1])
                translator.translate_batch(
                    [[f"word{number}" for number in each] for each in batch],
                    beam_size=beams,
                    min_decoding_length=longest,
                    max_decoding_length=longest,
                )

        return translate_all

    sides = {"MarianMTModel.generate": clocked(as_it_is(native))}
    for kind in sorted(ctranslate2.get_supported_compute_types(device().type)):
        if kind in ("float32", "bfloat16", "float16", "int8_float32", "int8_bfloat16", "int8_float16"):
            translator = ctranslate2.Translator(
                translator_folder, device().type, compute_type=kind, intra_threads=arguments.threads
            )
            sides[f"CTranslate2, {kind}"] = clocked(by_ctranslate2(translator))
    sides["ours, generate() as it is"] = clocked(as_it_is(ours))
    sides["ours"] = clocked(by_ours)
    figures = take_turns(sides, arguments.repeats)
    fastest = max((name for name in sides if name.startswith("CT")), key=lambda name: statistics.median(figures[name]))
    has_targets = beams == BEAMS_OF_TARGETS
    report(
        arguments,
        f"beam-{beams} translation of {count} sentences, {str(dtype).removeprefix('torch.')}",
        "source tokens per second",
        figures,
        {
            "against MarianMTModel.generate": ("ours", "MarianMTModel.generate", 3.0 if has_targets else None),
            "against the fastest CTranslate2": ("ours", fastest, 2.0 if has_targets else None),
            "generate() as it is on both sides": ("ours, generate() as it is", "MarianMTModel.generate", None),
        },
        num_beams=beams,
        mean_tokens=round(tokens / count, 1),
        vocab_size=VOCAB_SIZE,
        text=arguments.parallel_file or "Python's documentation",
    )


if __name__ == "__main__":
    sys.exit(run(main))
