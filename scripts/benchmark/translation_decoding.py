#!/usr/bin/env python
r"""Beam search or greedy search: source tokens per second, against MarianMTModel.generate and CTranslate2.

Models of the base size with random weights: speed does not depend on them. All sides translate the same sentences,
sorted by length, each batch to the length of its longest source. MarianMTModel and CTranslate2 get batches of 64
sentences; ours has token-budget batches. Ours is also measured with transformers' own search and batches of 64, the
plain use of `generate()`. With `--num_beams 1` all searches are greedy.

A first round with few sentences finds the fastest type of each side on this machine. The others compare the sides in
these, and like for like: in float32, and in int8 (linear maps of 8-bit integers, and the faster type for all else).
Without CTranslate2, or where it fails, its rows are left out.

    python scripts/benchmark/translation_decoding.py --parallel_file test.jsonl --columns en de

Without a file the sentences are those of Python's own documentation.
"""

import copy
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from measuring import (
    FLOAT_TYPES,
    FOLDER,
    BenchmarkArguments,
    ctranslate2_is_installed,
    device,
    marian_like,
    now,
    prepare,
    reason_of,
    report,
    sentence_pairs,
    take_turns,
)
from transformers import MarianMTModel, PreTrainedModel, set_seed

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data.tokenization import train_tokenizer
from hf_vanilla.generation import beam_search, fast_model
from hf_vanilla.generation.int8_products import weight_levels
from hf_vanilla.models.text_batches import batches_by_length, padded


VOCAB_SIZE = 10_000
BEAMS_OF_TARGETS = 4
BATCH_SIZE = 64
INT8_TYPES = ("int8_float32", "int8_bfloat16")  # as CTranslate2 calls them: the second type is that of all else
MARIAN, CTRANSLATE2, OURS, PLAIN = "MarianMTModel.generate", "CTranslate2", "ours", "ours, generate() as it is"

# A function that translates sorted sentences, and throws the translations away.
Translate = Callable[[list[list[int]]], None]


@dataclass
class DecodingBenchmarkArguments(BenchmarkArguments):
    """Options of this benchmark."""

    parallel_file: str | None = field(default=None, metadata={"help": "Pairs: JSON lines, CSV or Parquet."})
    columns: list[str] = field(default_factory=lambda: ["source", "target"], metadata={"help": "Its two columns."})
    num_beams: int = field(default=4, metadata={"help": "Beams of all sides; 1 is greedy search."})
    sentences: int = field(default=1000, metadata={"help": "Number of sentences of a turn."})
    max_tokens_per_batch: int = field(default=2048, metadata={"help": "Source tokens of our batches."})


def to_ctranslate2(model: MarianMTModel) -> str:
    """Convert a MarianMTModel with CTranslate2's own loader; the vocabulary is synthetic, with padding at the end."""
    from ctranslate2.converters.transformers import MarianMTLoader

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


def in_batches(sources: list[list[int]]) -> list[list[list[int]]]:
    """Split sorted sentences into batches of 64."""
    return [sources[start : start + BATCH_SIZE] for start in range(0, len(sources), BATCH_SIZE)]


def ctranslate2_sides(
    model: MarianMTModel, arguments: DecodingBenchmarkArguments, trial: list[list[int]]
) -> dict[str, Translate]:
    """Return CTranslate2 in each type that it supports here, or nothing if it is not installed.

    Args:
        model (`MarianMTModel`): The model.
        arguments (`DecodingBenchmarkArguments`): The options.
        trial (`list[list[int]]`): Sentences to translate in each type.

    Returns:
        `dict[str, Translate]`: its translation by type.

    Raises:
        RuntimeError: if it can't translate, as where it does not find a library of the GPU.
        ValueError: if it was built without this device.
    """
    if not ctranslate2_is_installed():
        return {}
    import ctranslate2

    folder = to_ctranslate2(model)

    def side(kind: str) -> Translate:
        translator = ctranslate2.Translator(folder, device().type, compute_type=kind, intra_threads=arguments.threads)

        def translate_all(sources: list[list[int]]) -> None:
            for batch in in_batches(sources):
                longest = len(batch[-1])
                translator.translate_batch(
                    [[f"word{number}" for number in each] for each in batch],
                    beam_size=arguments.num_beams,
                    min_decoding_length=longest,
                    max_decoding_length=longest,
                )

        translate_all(trial)
        return translate_all

    kinds = {*FLOAT_TYPES, *INT8_TYPES, "float16", "int8_float16"}
    return {kind: side(kind) for kind in sorted(ctranslate2.get_supported_compute_types(device().type) & kinds)}


def generate(model: PreTrainedModel, batch: list[list[int]], beams: int, **options: Any) -> None:
    """Translate sorted sentences to the length of the longest."""
    config = model.config
    model.generate(
        input_ids=padded(batch, config.pad_token_id, model.device),
        attention_mask=padded([[1] * len(each) for each in batch], 0, model.device),
        num_beams=beams,
        do_sample=False,
        max_new_tokens=max(map(len, batch)),
        suppress_tokens=[config.pad_token_id, config.eos_token_id],  # no sentence ends early
        **options,
    )


def plain_sides(model: PreTrainedModel, beams: int) -> dict[str, Translate]:
    """Return transformers' own search for a model, in each float type."""

    def side(kind: str) -> Translate:
        converted = copy.deepcopy(model).to(device(), getattr(torch, kind))

        def translate_all(sources: list[list[int]]) -> None:
            for batch in in_batches(sources):
                generate(converted, batch, beams)

        return translate_all

    return {kind: side(kind) for kind in FLOAT_TYPES}


def our_sides(model: PreTrainedModel, arguments: DecodingBenchmarkArguments) -> dict[str, Translate]:
    """Return our search in each type that this machine has."""

    def side(kind: str) -> Translate:
        prefix, _, float_type = kind.rpartition("_")
        converted = copy.deepcopy(model).to(device(), getattr(torch, float_type))
        if prefix:
            converted = fast_model(converted, arguments.max_tokens_per_batch, prefix)

        def translate_all(sources: list[list[int]]) -> None:
            fast = fast_model(converted, sum(map(len, sources)))
            for places in batches_by_length([len(each) for each in sources], arguments.max_tokens_per_batch):
                batch = [sources[place] for place in places]
                generate(fast, batch, arguments.num_beams, custom_generate=beam_search)

        return translate_all

    has_int8 = device().type == "cpu" and weight_levels() > 0
    return {kind: side(kind) for kind in (*FLOAT_TYPES, *(INT8_TYPES if has_int8 else ()))}


def clocked(translate_all: Translate, sources: list[list[int]]) -> Callable[[], float]:
    """Return a function that translates the sentences and returns the source tokens per second."""

    def measure() -> float:
        started = now()
        translate_all(sources)
        return sum(map(len, sources)) / (now() - started)

    return measure


def fastest_types(sides: dict[str, dict[str, Translate]], sources: list[list[int]]) -> dict[str, list[str]]:
    """Return the types of each side from the fastest to the slowest, by one round that follows one to prepare."""
    trials = {(side, kind): clocked(run, sources) for side, kinds in sides.items() for kind, run in kinds.items()}
    for measure in trials.values():
        measure()
    speeds = {trial: measure() for trial, measure in trials.items()}
    return {side: sorted(kinds, key=lambda kind: -speeds[side, kind]) for side, kinds in sides.items()}


def pairs_of(ordered: dict[str, list[str]], has_targets: bool) -> dict[str, tuple[str, str, float | None]]:
    """Return the ratios to report: each side in its fastest type, then float32 and int8 on both sides.

    Args:
        ordered (`dict[str, list[str]]`): The types of each side, the fastest first.
        has_targets (`bool`): Whether the targets are those of this work.

    Returns:
        `dict[str, tuple[str, str, float | None]]`: name of each ratio: our side, the other one, and the target.
    """
    compared = [
        ("against MarianMTModel.generate", OURS, MARIAN, "", 3.0),
        ("against the fastest CTranslate2", OURS, CTRANSLATE2, "", 2.0),
        ("generate() as it is on both sides", PLAIN, MARIAN, "", None),
        ("float32 on both sides, against MarianMTModel.generate", OURS, MARIAN, "float32", None),
        ("float32 on both sides, against CTranslate2", OURS, CTRANSLATE2, "float32", None),
        ("int8 on both sides, against CTranslate2", OURS, CTRANSLATE2, "int8", 1.2),
    ]
    pairs: dict[str, tuple[str, str, float | None]] = {}
    for name, ours, other, prefix, target in compared:
        of_ours, of_other = (
            [f"{side}, {kind}" for kind in ordered[side] if kind.startswith(prefix)] for side in (ours, other)
        )
        if of_ours and of_other:
            pairs[name] = of_ours[0], of_other[0], target if has_targets else None
    return pairs


def main() -> None:
    """Prepare sentences and models, find the fastest types, take turns, report."""
    (arguments,) = parse_arguments(DecodingBenchmarkArguments, description=__doc__)
    beams = arguments.num_beams
    arguments.output_file = arguments.output_file or str(FOLDER / f"translation_decoding_beam_{beams}.json")
    prepare(arguments)
    count = BATCH_SIZE if arguments.quick else arguments.sentences
    sentences = sentence_pairs(arguments.parallel_file, arguments.columns, 29_000)["source"]
    tokenizer = train_tokenizer(sentences, VOCAB_SIZE, show_progress=False)
    sources = sorted(tokenizer(sentences[:count])["input_ids"], key=len)
    count = len(sources)  # a file may have fewer
    set_seed(0)
    sizes = {"d_model": 128, "d_ff": 512, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2}
    config = VanillaTransformerConfig.preset("base", vocab_size=VOCAB_SIZE, **(sizes if arguments.quick else {}))
    native, ours = marian_like(config).eval(), VanillaTransformerForConditionalGeneration(config).eval()
    theirs: dict[str, Translate] = {}
    left_out: dict[str, str] = {}
    try:
        theirs = ctranslate2_sides(native, arguments, sources[:1])
    except (RuntimeError, ValueError) as error:  # must not cost the other sides
        left_out[CTRANSLATE2] = reason_of(error)
        print(f"{CTRANSLATE2} is left out, {left_out[CTRANSLATE2]}")
    sides = {
        MARIAN: plain_sides(native, beams),
        CTRANSLATE2: theirs,
        PLAIN: plain_sides(ours, beams),
        OURS: our_sides(ours, arguments),
    }
    ordered = fastest_types(sides, sources[:: max(1, count // BATCH_SIZE)])
    pairs = pairs_of(ordered, has_targets=beams == BEAMS_OF_TARGETS)
    measured = {name for ours_name, other, _ in pairs.values() for name in (ours_name, other)}
    figures = take_turns(
        {
            f"{side}, {kind}": clocked(translate_all, sources)
            for side, kinds in sides.items()
            for kind, translate_all in kinds.items()
            if f"{side}, {kind}" in measured
        },
        arguments.repeats,
    )
    report(
        arguments,
        f"beam-{beams} translation of {count} sentences",
        "source tokens per second",
        figures,
        pairs,
        num_beams=beams,
        mean_tokens=round(sum(map(len, sources)) / count, 1),
        vocab_size=VOCAB_SIZE,
        types_fastest_first=ordered,
        left_out=left_out,
        text=arguments.parallel_file or "Python's documentation",
    )


if __name__ == "__main__":
    sys.exit(run(main))
