#!/usr/bin/env python
r"""Growth of costs: a training step against tokens, length, layers and vocabulary; decoding against length.

Each curve varies one size and keeps the others in the middle. A straight line is fitted to the lowest times, because
other load on the machine only adds to them, and the report has the largest error of the line. For decoding, a line is
also fitted to the time of one token, which is linear in the length because of the cache.

    python scripts/benchmark/growth.py --picture growth.png
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import BenchmarkArguments, device, now, prepare, spread, write_results
from tqdm.auto import tqdm
from transformers import set_seed

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.generation import beam_search, fast_model


MIDDLE = {"sentences": 64, "length": 32, "layers": 2, "vocab_size": 8000}
CURVES = {
    "sentences": (16, 32, 64, 128, 256),
    "length": (8, 16, 32, 64, 128, 256),
    "layers": (1, 2, 4, 6, 8),
    "vocab_size": (2000, 4000, 8000, 16000, 32000),
    "decoded_length": (16, 32, 64, 128, 256),
}
# A token of a translation attends to all earlier ones: the time of one token is linear in the length.
COST_OF_ONE = "decoded_length"
UNITS = {
    "length": "tokens of a sentence",
    "vocab_size": "entries of the vocabulary",
    "decoded_length": "tokens of a translation",
}
WIDTH = 256


@dataclass
class GrowthArguments(BenchmarkArguments):
    """Options of this benchmark."""

    picture: str | None = field(default=None, metadata={"help": "File for a picture of all curves (.png, .svg)."})


def build(layers: int, vocab_size: int) -> VanillaTransformerForConditionalGeneration:
    """Build a model of half the base width."""
    set_seed(0)
    return VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(
            vocab_size=vocab_size,
            d_model=WIDTH,
            d_ff=4 * WIDTH,
            num_heads=4,
            encoder_layers=layers,
            decoder_layers=layers,
        )
    )


def step_seconds(repeats: int, sentences: int, length: int, layers: int, vocab_size: int) -> list[float]:
    """Time training steps in bfloat16."""
    model = build(layers, vocab_size).train().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(3, vocab_size, (sentences, length), device=device())
    seconds = []
    for _ in range(repeats + 1):
        started = now()
        with torch.autocast(device().type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(now() - started)
    return seconds[1:]


def decoding_seconds(repeats: int, length: int) -> list[float]:
    """Time beam search for `length` tokens from short sources, encoding included."""
    config = MIDDLE["layers"], MIDDLE["vocab_size"]
    model = fast_model(build(*config).eval().to(device(), torch.bfloat16), 64)
    ids = torch.randint(3, MIDDLE["vocab_size"], (16, 16), device=device())
    seconds = []
    for _ in range(repeats + 1):
        started = now()
        model.generate(
            input_ids=ids,
            custom_generate=beam_search,
            num_beams=4,
            do_sample=False,
            max_new_tokens=length,
            suppress_tokens=[model.config.pad_token_id, model.config.eos_token_id],
        )
        seconds.append(now() - started)
    return seconds[1:]


def measure(repeats: int, name: str, size: int) -> list[float]:
    """Time one point of a curve."""
    if name == "decoded_length":
        return decoding_seconds(repeats, size)
    return step_seconds(repeats, **{**MIDDLE, name: size})


def fit(sizes: tuple[int, ...], seconds: list[float]) -> dict[str, Any]:
    """Fit a line to the times by relative errors, and find the exponent of the upper half."""
    x, y = np.array(sizes, dtype=float), np.array(seconds)
    slope, start = np.polyfit(x, y, 1, w=1 / y)
    errors = (slope * x + start) / y - 1
    half = len(x) // 2
    exponent = np.polyfit(np.log(x[half:]), np.log(y[half:]), 1)[0]
    return {
        "seconds_per_unit": float(f"{slope:.4g}"),
        "seconds_at_zero": float(f"{start:.4g}"),
        "largest_error_of_the_line": round(float(np.abs(errors).max()), 3),
        "exponent_of_the_upper_half": round(float(exponent), 2),
    }


def check_picture(picture: str) -> None:
    """Check early that a picture can be drawn, and make its folder.

    Args:
        picture (`str`): Its file.

    Raises:
        ValueError: if matplotlib does not know its kind.
    """
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if Path(picture).suffix.removeprefix(".").lower() not in kinds:
        raise ValueError(f"`picture` must end in one of {', '.join(f'.{kind}' for kind in kinds)}; got {picture!r}.")
    Path(picture).absolute().parent.mkdir(parents=True, exist_ok=True)


def draw(curves: dict[str, Any], picture: str) -> None:
    """Draw all curves with their lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(curves), 3.2), layout="constrained")
    for axes, (name, curve) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        sizes = np.array(curve["sizes"])
        lowest = [point["lowest"] for point in curve["seconds"]]
        axes.plot(sizes, lowest, "o", color="#0072B2")
        axes.plot(sizes, curve["seconds_per_unit"] * sizes + curve["seconds_at_zero"], "-", color="#999999")
        axes.set(xlabel=UNITS.get(name, name), ylabel="seconds, fastest turn", xlim=(0, None), ylim=(0, None))
    figure.savefig(picture, dpi=120)


def main() -> None:
    """Measure all curves, fit lines, report, draw."""
    (arguments,) = parse_arguments(GrowthArguments, description=__doc__)
    prepare(arguments)
    if arguments.picture is not None:
        check_picture(arguments.picture)
    wanted = {name: sizes[:3] if arguments.quick else sizes for name, sizes in CURVES.items()}
    curves = {}
    progress = tqdm([(name, size) for name, sizes in wanted.items() for size in sizes], unit="point")
    measured = {(name, size): spread(measure(arguments.repeats, name, size)) for name, size in progress}
    for name, sizes in wanted.items():
        seconds = [measured[name, size] for size in sizes]
        lowest = [each["lowest"] for each in seconds]
        curves[name] = {"sizes": sizes, "seconds": seconds, **fit(sizes, lowest)}
        times = "  ".join(f"{size}: {each:.3g} s" for size, each in zip(sizes, lowest, strict=True))
        print(f"{name}: {times}; within {curves[name]['largest_error_of_the_line']:.0%} of a line")
        if name == COST_OF_ONE:
            of_one = fit(sizes, [each / size for size, each in zip(sizes, lowest, strict=True)])
            curves[name]["of_one"] = of_one
            print(f"  of one token: within {of_one['largest_error_of_the_line']:.0%} of a line")
    write_results(arguments, "growth of costs, bfloat16", curves=curves, others=MIDDLE, d_model=WIDTH)
    if arguments.picture is not None:
        draw(curves, arguments.picture)


if __name__ == "__main__":
    sys.exit(run(main))
