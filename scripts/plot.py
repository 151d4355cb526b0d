#!/usr/bin/env python
r"""Draw a picture of attention or of a training: the first argument says of what.

    python scripts/plot.py attention --model runs/en-de --source "A dog runs." --output attention.png
    python scripts/plot.py alignment --model runs/en-de --source "A dog runs ." --target "Ein Hund läuft ."
    python scripts/plot.py positions --d_model 512 --length 100
    python scripts/plot.py schedule --d_model 512 --warmup_steps 4000 8000 --max_steps 20000
    python scripts/plot.py curve --run runs/en-de
    python scripts/plot.py position-losses --results old.json new.json --labels before after

attention: which tokens each token attends to: of a translation to its source, or of a text to itself (BERT and GPT).
    Without --target the model translates; --heads draws single heads in place of their mean.
alignment: the same for words, as word alignments use it.
positions: the position encodings of --model, or the paper's sinusoids.
schedule: the paper's learning rate, a curve for each --d_model and --warmup_steps.
curve: losses, scores and learning rate of a training, from the trainer_state.json of its folder or a checkpoint.
position-losses: BERT's loss of masked tokens by position, from the results of evaluate-bert with --by_position; of
    several lengths the largest one.

Needs matplotlib: pip install "hf_vanilla[viz]".
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("plot")

import io
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

from hf_vanilla.command_line.checks import (
    check_files_exist,
    check_models,
    explained_model_loading,
    without_load_report,
)
from hf_vanilla.command_line.options import parse_arguments, run, take_task
from hf_vanilla.data.files import check_text, read_json_object, replacing_binary_file
from hf_vanilla.generation import load_translator, translate, word_alignments
from hf_vanilla.models.layers import sinusoidal_positions
from hf_vanilla.training import noam_learning_rate
from hf_vanilla.visualization import (
    check_position_losses,
    plot_attention,
    plot_learning_rate,
    plot_position_encodings,
    plot_position_losses,
    plot_training_curve,
    readable_tokens,
)


# What evaluate-bert adds to the name of a file when it evaluates several lengths.
LENGTH = re.compile(r", \d+ tokens$")
# The largest values of options; above them a picture takes gigabytes.
LARGEST = {"dpi": 1_200, "length": 100_000, "d_model": 100_000, "max_steps": 10_000_000, "warmup_steps": 10_000_000}
LARGEST_TABLE = 60_000_000  # numbers
LARGEST_PICTURE = 250_000_000  # pixels


@dataclass
class PlotArguments:
    """What to draw, and where to."""

    output: str | None = field(
        default=None, metadata={"help": "File of the picture: .png, .svg or .pdf. Default: named after the picture."}
    )
    title: str | None = field(default=None, metadata={"help": "Title above the picture."})
    dpi: int = field(default=150, metadata={"help": "Pixels per inch."})
    model: str | None = field(
        default=None,
        metadata={"help": "Trained model (attention, alignment, positions): folder or name on the Hub."},
    )
    source: str | None = field(default=None, metadata={"help": "The sentence (attention, alignment)."})
    target: str | None = field(default=None, metadata={"help": "Its translation (attention, alignment)."})
    layer: int | None = field(
        default=None,
        metadata={"help": "Layer, from 0. Default: the last one; of alignments the penultimate one, of two the last."},
    )
    heads: list[int] | None = field(
        default=None, metadata={"help": "Heads, from 0: one panel each for attention. Default: the mean of all."}
    )
    d_model: list[int] = field(
        default_factory=lambda: [512], metadata={"help": "Width of the model (positions), or several (schedule)."}
    )
    warmup_steps: list[int] = field(
        default_factory=lambda: [4000], metadata={"help": "Updates over which the learning rate grows (schedule)."}
    )
    max_steps: int = field(default=20_000, metadata={"help": "Last update of the curves (schedule)."})
    length: int = field(default=100, metadata={"help": "Number of positions (positions)."})
    run: str | None = field(
        default=None, metadata={"help": "Folder of a training or a checkpoint, or its trainer_state.json (curve)."}
    )

    results: list[str] | None = field(
        default=None, metadata={"help": "Results files of evaluate-bert with --by_position (position-losses)."}
    )
    labels: list[str] | None = field(
        default=None, metadata={"help": "A label for each of the results. Default: their names (position-losses)."}
    )

    def __post_init__(self):
        for name, largest in LARGEST.items():
            given = getattr(self, name)
            for value in given if isinstance(given, list) else [given]:
                if not 1 <= value <= largest:
                    raise ValueError(f"`{name}` must be from 1 to {largest:,}, got {value:,}.")
        for name in ("source", "target", "title"):
            check_text(getattr(self, name), f"`{name}`")
        for name in ("source", "target"):
            text = getattr(self, name)
            if text is not None and not text.strip():
                raise ValueError(f"`{name}` must have at least one word, got {text!r}.")
        check_models(model=self.model)


def require(arguments: PlotArguments, *names: str) -> None:
    """Raise if an option is missing that the picture needs."""
    for name in names:
        if getattr(arguments, name) is None:
            raise ValueError(f"`{name}` is missing; give it as --{name}.")


def picture_path(output: str) -> Path:
    """Return the file to write: `output`, with .png if it has no suffix."""
    if os.path.basename(output) in ("", ".", "..") or Path(output).is_dir():
        raise ValueError(f"`output` must be a file, but {output} is a folder; give a file in it.")
    path = Path(output)
    return path if path.suffix[1:] else path.with_name(f"{path.name}.png")


def draw_attention(arguments: PlotArguments) -> Any:
    """Draw the cross-attention of a translation, or the self-attention of a text."""
    require(arguments, "model", "source")
    layer = -1 if arguments.layer is None else arguments.layer
    with explained_model_loading("model", arguments.model):
        is_translator = AutoConfig.from_pretrained(arguments.model).is_encoder_decoder
        if not is_translator:
            tokenizer = AutoTokenizer.from_pretrained(arguments.model)
            with without_load_report():  # of heads, which are not used
                model = AutoModel.from_pretrained(arguments.model, attn_implementation="eager").eval()
    if is_translator:
        return draw_cross_attention(arguments, layer)
    inputs = tokenizer(arguments.source, return_tensors="pt")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    tokens = readable_tokens(tokenizer, inputs["input_ids"][0])
    return plot_attention(weights, tokens, tokens, layer=layer, heads=arguments.heads, title=arguments.title)


def draw_cross_attention(arguments: PlotArguments, layer: int) -> Any:
    """Draw the attention of each token of a translation to the source."""
    model, tokenizer, target_tokenizer, target = load_pair(arguments)
    model.set_attn_implementation("eager")
    sentences = f"{arguments.source}  →  {target}".replace("$", r"\$")  # not the signs of mathematics
    source_ids, target_ids = tokenizer(arguments.source)["input_ids"], target_tokenizer(target)["input_ids"]
    with torch.no_grad():
        outputs = model(torch.tensor([source_ids]), labels=torch.tensor([target_ids]), output_attentions=True)
    return plot_attention(
        outputs.cross_attentions,
        readable_tokens(tokenizer, source_ids),
        readable_tokens(target_tokenizer, target_ids),
        layer=layer,
        heads=arguments.heads,
        title=arguments.title or sentences,
    )


def draw_alignment(arguments: PlotArguments) -> Any:
    """Draw the attention of each word of a translation to the words of the source."""
    require(arguments, "model", "source")
    source = str(arguments.source)
    model, tokenizer, target_tokenizer, target = load_pair(arguments)
    if not target.split():
        raise ValueError("`target` is missing, and the model's own translation is empty; give one as --target.")
    [alignment] = word_alignments(
        model,
        tokenizer,
        [source],
        [target],
        target_tokenizer=target_tokenizer,
        layer=arguments.layer,
        heads=arguments.heads,
    )
    title = arguments.title or f"word alignment {alignment}"
    return plot_attention(alignment.matrix, source.split(), target.split(), title=title)


def load_pair(arguments: PlotArguments) -> tuple[Any, Any, Any, str]:
    """Load a translator, and translate the source unless a target is given."""
    with explained_model_loading("model", arguments.model):
        model, tokenizer, target_tokenizer = load_translator(str(arguments.model), dtype=torch.float32)
    target = arguments.target
    if target is None:
        [[best]] = translate(model, tokenizer, [str(arguments.source)], target_tokenizer=target_tokenizer)
        target = best.text
    return model, tokenizer, target_tokenizer, target


def draw_positions(arguments: PlotArguments) -> Any:
    """Draw the position encodings of a model, or those of the paper."""
    [d_model, *_] = arguments.d_model
    kind = "sinusoidal"
    if arguments.model is not None:
        with explained_model_loading("model", arguments.model):
            model = AutoModel.from_pretrained(arguments.model)
        tables = ("embed_positions", "position_embeddings")
        learned = [each for name, each in model.named_parameters() if name.removesuffix(".weight").endswith(tables)]
        if learned:
            table = learned[0].flatten(0, -2)[: arguments.length]  # ViT's has a dimension for the batch, too
            return plot_position_encodings(table, title=arguments.title or "learned position embeddings")
        if not hasattr(model.config, "position_type"):
            raise ValueError(f"`model` must have position encodings, but {arguments.model} has none that are known.")
        d_model, kind = model.config.d_model, model.config.position_type
    if d_model % 2 or arguments.length * d_model > LARGEST_TABLE:
        raise ValueError(
            f"`d_model` must be even, and with `length` give at most {LARGEST_TABLE:,} numbers, got width {d_model:,} "
            f"and length {arguments.length:,}."
        )
    table = sinusoidal_positions(torch.arange(arguments.length), d_model, kind)
    return plot_position_encodings(table, title=arguments.title or f"{kind} position encodings, width {d_model}")


def draw_schedule(arguments: PlotArguments) -> Any:
    """Draw the paper's learning rate."""
    steps = range(1, arguments.max_steps + 1)
    rates = {
        f"width {d_model}, warm-up {warmup}": [noam_learning_rate(step, d_model, warmup) for step in steps]
        for d_model in arguments.d_model
        for warmup in arguments.warmup_steps
    }
    return plot_learning_rate(rates, title=arguments.title or "learning rate of the paper")


def draw_curve(arguments: PlotArguments) -> Any:
    """Draw the log of a training."""
    require(arguments, "run")
    path = Path(str(arguments.run))
    path = path / "trainer_state.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"`run` must be the folder of a training, but there is no {path}.")
    history = read_json_object(path, "run").get("log_history", [])
    try:
        return plot_training_curve(history, title=arguments.title or f"training of {path.absolute().parent.name}")
    except ValueError as error:
        raise ValueError(f"`run` ({path}): {error}") from None


def draw_position_losses(arguments: PlotArguments) -> Any:
    """Draw the loss of masked tokens by position, of each file of each results file."""
    require(arguments, "results")
    paths = [Path(each) for each in arguments.results or ()]
    labels = arguments.labels or [path.stem for path in paths]
    if len(labels) != len(paths):
        raise ValueError(f"`labels` must be as many as `results` ({len(paths)}), got {len(labels)}.")
    check_files_exist(results=arguments.results)
    curves = {}
    for path, label in zip(paths, labels, strict=True):
        files = read_json_object(path, "results").get("files")
        measured = files if isinstance(files, dict) else {}
        found = {
            name: each["by_position"]
            for name, each in measured.items()
            if isinstance(each, dict) and "by_position" in each
        }
        if not found:
            raise ValueError(
                f"`results` must be files of evaluate-bert with --by_position, but {path} has no losses by position."
            )
        for name, each in found.items():
            check_position_losses(each, f"`results` ({path}), {name!r}:")
        reach = {name: len(each["loss"]) * each["width"] for name, each in found.items()}
        longest: dict[str, str] = {}  # of each file, by its name without the length
        for name in sorted(found, key=lambda name: reach[name]):
            longest[LENGTH.sub("", name)] = name
        for name in (each for each in found if each in longest.values()):
            shown = label if len(longest) == 1 else f"{label}: {Path(name).name}"
            curves[f"{path}: {name}" if shown in curves else shown] = found[name]
    return plot_position_losses(curves, title=arguments.title or "loss of masked tokens by position")


PICTURES = {
    "attention": draw_attention,
    "alignment": draw_alignment,
    "positions": draw_positions,
    "schedule": draw_schedule,
    "curve": draw_curve,
    "position_losses": draw_position_losses,
}
TASKS = tuple(PICTURES)


def main() -> None:
    """Draw one picture."""
    kind = take_task(TASKS)
    (arguments,) = parse_arguments(PlotArguments, description=__doc__)
    path = picture_path(arguments.output or f"{kind}.png")
    figure = PICTURES[kind](arguments)
    width, height = figure.get_size_inches() * arguments.dpi
    if width * height > LARGEST_PICTURE:
        raise ValueError(
            f"`dpi` must give at most {LARGEST_PICTURE:,} pixels, but {arguments.dpi} gives {width:,.0f} x "
            f"{height:,.0f}; lower it."
        )
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:], dpi=arguments.dpi, bbox_inches="tight")
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing_binary_file(str(path)) as file:
            file.write(picture.getbuffer())
    except OSError as error:
        raise ValueError(f"{path} can't be written: {error.strerror}.") from None
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    sys.exit(run(main))
