"""Plots of attention, position encodings and training; needs matplotlib, `pip install "hf_vanilla[viz]"`.

Every function returns a `matplotlib.figure.Figure` that pyplot does not manage: save it with
`figure.savefig("attention.png")`. A notebook displays it as the last value of a cell.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tokenizers import decoders
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


logger = logging.get_logger(__name__)

# Distinct for colour-blind readers (Okabe and Ito 2008).
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Entries of a training log that are drawn, beside evaluations.
_DRAWN_FIELDS = ("step", "loss", "learning_rate", "sequence_length")
# Evaluation entries of a training log that are not metrics.
_SPEED_FIELDS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
# An evaluation of one of several lengths of sequences.
_OF_LENGTH = re.compile(r"(\d+)_tokens_(.+)")
# Fields of a training log in words; the underscores of other names become spaces.
_WORDS = {
    "mlm": "masked tokens",
    "nsp": "next sentences",
    "mlm_accuracy": "masked tokens right",
    "nsp_accuracy": "next sentences right",
    "accuracy": "accuracy (share right)",
    "bleu": "BLEU",
    "chrf": "chrF",
    "f1": "F1",
    "gen_len": "tokens per translation",
    "matthews": "Matthews correlation",
    "mse": "mean squared error",
    "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
}
_MAX_LABEL_LENGTH = 20  # characters
_MAX_SIDE = 40.0  # inches of the cells of all panels in a row or column
_LABEL_HEIGHT = 0.13  # inches: 6 points, ascenders and descenders, and a gap
_CJK_NAMES = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO")
_ZERO_WIDTH_JOINERS = "\u200c\u200d"


def plot_attention(
    weights: Any,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    *,
    layer: int = -1,
    heads: Sequence[int] | None = None,
    example: int = 0,
    title: str | None = None,
) -> "Figure":
    """Plot which source tokens each target token attends to.

    For self-attention, pass the same tokens twice. Tokens are shown as given, so decode byte-level ones first, with
    [`readable_tokens`]. Leading and trailing spaces and unprintable characters are made visible; characters that no
    installed font has are shown as code points.

    Args:
        weights (`Any`): Attention weights as in a model's `cross_attentions`, a tensor of shape `(batch, heads,
            tgt_len, src_len)`, or of the last two or three of these dimensions, for each layer; or for one layer.
        source_tokens (`Sequence[str]`): The `src_len` tokens that are attended to, padding included.
        target_tokens (`Sequence[str]`): The `tgt_len` tokens that attend, padding included.
        layer (`int`, *optional*, defaults to -1): Layer to plot, if `weights` has several.
        heads (`Sequence[int]`, *optional*): Heads to plot, one panel each; by default one panel with the mean of all.
        example (`int`, *optional*, defaults to 0): Row of the batch to plot, if `weights` has several.
        title (`str`, *optional*): Title of the figure.

    Returns:
        `matplotlib.figure.Figure`: target tokens from top to bottom, source tokens from left to right.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if `weights` is missing, has another shape or does not fit the numbers of tokens, or a layer, head
            or example does not exist.
    """
    by_head = _one_example(_one_layer(weights, layer), example)  # (heads, tgt_len, src_len)
    _check_token_counts(by_head, source_tokens, target_tokens)
    panels = _panels_of_heads(by_head, heads)
    columns = _columns(len(panels), most=4)
    rows = math.ceil(len(panels) / columns)
    cell = _cell_size(columns * len(source_tokens), rows * len(target_tokens), largest=0.34 if rows == 1 else 0.24)
    width, height = len(source_tokens) * cell, len(target_tokens) * cell  # inches of one panel
    beside, below = _label_room(target_tokens, cell), _label_room(source_tokens, cell)
    figure = _new_figure(columns * (width + 0.2) + beside + 1.2, rows * (height + 0.4) + below + 0.5, title)
    figure.set_layout_engine("compressed")  # keeps panels of square cells together
    grid = figure.subplots(rows, columns, squeeze=False)
    brightest = max(panel.max() for panel in panels.values())
    shown = list(grid.flat[: len(panels)])
    is_self_attention = list(source_tokens) == list(target_tokens)
    across, down = ("token attended to", "token") if is_self_attention else ("source", "target")
    for index, (axes, (name, panel)) in enumerate(zip(shown, panels.items(), strict=True)):
        image = axes.imshow(panel, cmap="Blues", vmin=0.0, vmax=brightest)
        axes.set_title(name, fontsize="medium")
        at_bottom, at_left = index + columns >= len(panels), index % columns == 0
        _label_tokens(axes.xaxis, source_tokens if at_bottom else (), cell)
        _label_tokens(axes.yaxis, target_tokens if at_left else (), cell)
        axes.set(xlabel=across if at_bottom else None, ylabel=down if at_left else None)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    figure.colorbar(image, ax=shown, label="attention weight", shrink=min(1.0, 3.0 / (rows * height)), aspect=20)
    return figure


def readable_tokens(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> list[str]:
    """Decode each token alone, with the space before it, to label the cells of [`plot_attention`].

    `tokenizer.decode` would drop the space, and with it every token that is nothing else.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): A tokenizer.
        ids (`Iterable[int]`): Token ids.

    Returns:
        `list[str]`: text of each token of a byte-level vocabulary, with U+FFFD for a part of a character; of any other
        vocabulary the tokens as they are.
    """
    tokens = tokenizer.convert_ids_to_tokens([int(token_id) for token_id in ids])
    if not _is_byte_level(tokenizer):
        return tokens
    decoder = decoders.ByteLevel()
    return [decoder.decode([token]) for token in tokens]


def plot_image_attention(
    weights: Any,
    images: Sequence[Any],
    grid: tuple[int, int],
    *,
    layer: int = -1,
    head: int | None = None,
    titles: Sequence[str] | None = None,
    title: str | None = None,
) -> "Figure":
    """Plot images, and below each how much the class token of a ViT attends to its patches.

    Args:
        weights (`Any`): Attention weights as in a model's `attentions`, for each layer a tensor of shape `(batch,
            heads, 1 + patches, 1 + patches)`, with the class token first; or those of one layer. Of one image the
            first dimensions may be missing.
        images (`Sequence[Any]`): The images of the batch, of Pillow or as arrays of shape `(height, width)` or
            `(height, width, 3)`. Those of Pillow are shown upright, as their EXIF data say, and in RGB.
        grid (`tuple[int, int]`): Rows and columns of patches, as `grid` of a [`VanillaVitConfig`].
        layer (`int`, *optional*, defaults to -1): Layer to plot, if `weights` has several.
        head (`int`, *optional*): Head to plot; the mean of all by default.
        titles (`Sequence[str]`, *optional*): Titles of the images.
        title (`str`, *optional*): Title of the figure.

    Returns:
        `matplotlib.figure.Figure`: images above, attention below.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if there are no images, `weights`, `titles` or `grid` do not fit them, or a layer or head does not
            exist.
    """
    if len(images) == 0 or (titles is not None and len(titles) != len(images)):
        raise ValueError(
            f"`images` must be one or more, with as many `titles` if there are any, got {len(images)} and "
            f"{'none' if titles is None else len(titles)}."
        )
    array = _one_layer(weights, layer)
    if (len(array) if array.ndim == 4 else 1) != len(images):
        raise ValueError(
            "`weights` must have shape (batch, heads, 1 + patches, 1 + patches), and a row for each of the "
            f"{len(images)} `images`, got {array.shape}; cut both to the same rows."
        )
    maps = []
    for example in range(len(images)):
        by_head = _one_example(array, example)  # (heads, 1 + patches, 1 + patches)
        if by_head.shape[1:] != (1 + math.prod(grid), 1 + math.prod(grid)):
            raise ValueError(
                f"`weights` must be of a class token and {grid[0]} x {grid[1]} patches (`grid`), got "
                f"{by_head.shape[1]} rows and {by_head.shape[2]} columns."
            )
        panel = _panels_of_heads(by_head, None if head is None else [head]).popitem()[1]
        maps.append(panel[0, 1:].reshape(grid))
    figure = _new_figure(1.3 * len(images) + 1.2, 3.4, title)
    shown = figure.subplots(2, len(images), squeeze=False)
    brightest = max(each.max() for each in maps)
    for number, (above, below) in enumerate(shown.T):
        above.imshow(_pixels(images[number]), cmap="gray")
        drawn = below.imshow(maps[number], cmap="Blues", vmin=0.0, vmax=brightest)
        above.set_title("" if titles is None else titles[number], fontsize="small")
        for axes in (above, below):
            axes.set(xticks=[], yticks=[])
    figure.colorbar(drawn, ax=list(shown[1]), label="attention weight")
    return figure


def plot_position_encodings(
    encodings: Any, *, dimensions: Sequence[int] | None = None, title: str | None = None
) -> "Figure":
    """Plot position encodings as a heat map, and some of their dimensions as curves over positions.

    Args:
        encodings (`Any`): Array or tensor of shape `(positions, d_model)`, sinusoidal or learned.
        dimensions (`Sequence[int]`, *optional*): Dimensions to plot as curves; by default four, spread over the
            wavelengths of the paper's sinusoids.
        title (`str`, *optional*): Title of the figure.

    Returns:
        `matplotlib.figure.Figure`: the heat map on the left, the curves on the right.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if `encodings` has another shape or is empty, or a dimension does not exist.
    """
    table = _array(encodings)  # (positions, d_model)
    _check_table(table)
    d_model = table.shape[1]
    if dimensions is None:
        dimensions = sorted({0, d_model // 8, d_model // 4, d_model // 2})
    _check_indices("dimensions", dimensions, d_model)
    figure = _new_figure(11.0, 4.2, title)
    left, right = figure.subplots(1, 2)
    limit = np.abs(table).max() or 1.0
    image = left.imshow(table, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    left.set(xlabel="dimension", ylabel="position")
    figure.colorbar(image, ax=left)
    for dimension, color in zip(dimensions, _cycle_colors(len(dimensions)), strict=True):
        right.plot(table[:, dimension], color=color, label=f"dimension {dimension}")
    right.set(xlabel="position", ylabel="value")
    _finish_curves(right, legend=False)
    right.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, columnspacing=1, frameon=False, fontsize="small"
    )
    return figure


def plot_learning_rate(schedules: Mapping[str, Sequence[float]], *, title: str | None = None) -> "Figure":
    """Plot learning rates over training steps, with the peak of each.

    Args:
        schedules (`Mapping[str, Sequence[float]]`): For each curve its label and its learning rates at step 1, 2 and
            so on.
        title (`str`, *optional*): Title of the figure.

    Returns:
        `matplotlib.figure.Figure`: one panel with all curves.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if there is no curve, or one is empty or not a list of numbers.
    """
    curves = _checked_curves(schedules)
    figure = _new_figure(7.0, 4.0, title)
    axes = figure.subplots()
    for (label, rates), color in zip(curves.items(), _cycle_colors(len(curves)), strict=True):
        peak = int(rates.argmax())
        axes.plot(
            np.arange(1, len(rates) + 1),
            rates,
            color=color,
            marker="o",
            markersize=4,
            markevery=[peak],
            label=f"{label} (peak {rates[peak]:.2e} at update {peak + 1})",
        )
    axes.set(xlabel="update", ylabel="learning rate")
    axes.set_ylim(bottom=0.0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    _finish_curves(axes)
    return figure


def plot_training_curve(log_history: Sequence[Mapping[str, Any]], *, title: str | None = None) -> "Figure":
    """Plot the losses of a training run over its steps, and each metric of its evaluations.

    The learning rate is a grey line with an axis of its own. Evaluations of several lengths of sequences, logged as
    `eval_128_tokens_...`, are curves of the same panel. Dotted lines separate phases of different
    `sequence_length`, which [`~hf_vanilla.training.PretrainingTrainer`] logs. An evaluation after the training, such
    as that of averaged checkpoints, is a star: it is not of the weights that the line follows.

    Args:
        log_history (`Sequence[Mapping[str, Any]]`): `trainer.state.log_history`, or the list of that name in a
            checkpoint's `trainer_state.json`.
        title (`str`, *optional*): Title of the figure.

    Returns:
        `matplotlib.figure.Figure`: one panel with the losses of training and evaluation, and one for each other
        metric; panels with a single point are left out if another one has more.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if the log has nothing to plot, or what is plotted of an entry, or its step, is no number.
    """
    _check_log(log_history)
    panels = _logged_curves(log_history)
    phases = _logged_phases(log_history)
    last = max(entry.get("step", 0) for entry in log_history) or 1
    columns = _columns(len(panels), most=3)
    rows = math.ceil(len(panels) / columns)
    figure = _new_figure(max(4.6 * columns, 6.0), 3.6 * rows, title)
    from matplotlib.ticker import PercentFormatter

    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (name, curves) in zip(grid.flat, panels.items(), strict=False):
        for (label, curve), color in zip(curves.items(), _cycle_colors(len(curves)), strict=True):
            _draw_curve(axes, label, curve, color)
        axes.set(xlabel="update", ylabel=_WORDS.get(name, name.replace("_", " ")))
        if name.endswith("accuracy"):
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlim(0, 1.03 * last)
        _draw_phases(axes, phases)
        if name == "loss":
            _draw_learning_rate(axes, log_history)
        has_legend = name == "loss" or len(curves) > 1 or any(curve.final for curve in curves.values())
        _finish_curves(axes, legend=has_legend)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    return figure


def plot_position_losses(curves: Mapping[str, Mapping[str, Any]], *, title: str | None = None) -> "Figure":
    """Plot the loss of masked tokens over their positions, a curve for each model, text or length.

    Args:
        curves (`Mapping[str, Mapping[str, Any]]`): For each label, what [`~hf_vanilla.metrics.loss_by_position`]
            returns.
        title (`str`, *optional*): Title of the figure.

    Returns:
        `matplotlib.figure.Figure`: one panel with all curves; a point is the mean over `width` positions, at their
        middle.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if there is no curve, or one has no loss, or is not what `loss_by_position` returns.
    """
    if len(curves) == 0:
        raise ValueError("`curves` must have at least one list of losses, got none.")
    for label, curve in curves.items():
        check_position_losses(curve, f"`curves`, {label!r}:")
    figure = _new_figure(7.5, 4.2, title)
    axes = figure.subplots()
    for (label, curve), color in zip(curves.items(), _cycle_colors(len(curves)), strict=True):
        width = curve["width"]
        points = [
            (number * width + (width - 1) / 2, loss) for number, loss in enumerate(curve["loss"]) if loss is not None
        ]
        if not points:
            raise ValueError(f"`curves` must have losses, got none for {label!r}.")
        mean = np.average([loss for _, loss in points], weights=[each for each in curve["tokens"] if each])
        axes.plot(*zip(*points, strict=True), color=color, linewidth=1.2, label=f"{label} (mean {mean:.2f})")
    axes.set(xlabel="position", ylabel="loss of masked tokens, nats")
    axes.set_xlim(left=0)
    _finish_curves(axes)
    return figure


def check_position_losses(curve: Any, where: str) -> None:
    """Check that a value is as what [`~hf_vanilla.metrics.loss_by_position`] returns.

    Args:
        curve (`Any`): The value, such as one read from a file.
        where (`str`): Its place, for messages.

    Raises:
        ValueError: if it is no mapping, lacks `width`, `loss` or `tokens`, or these are other than numbers.
    """
    for name in ("width", "loss", "tokens"):
        if not isinstance(curve, Mapping) or name not in curve:
            raise ValueError(
                f"{where} losses by position must have `width`, `loss` and `tokens`, but have no `{name}`."
            )
    width, losses, tokens = curve["width"], curve["loss"], curve["tokens"]
    if not (_is_number(width) and width >= 1):
        raise ValueError(f"{where} `width` must be a number of positions, at least 1, got {width!r:.80}.")
    for name, values in (("loss", losses), ("tokens", tokens)):
        if not isinstance(values, Sequence) or not all(each is None or _is_number(each) for each in values):
            raise ValueError(f"{where} `{name}` must be a list of numbers, got {values!r:.80}.")
    if [each is not None for each in losses] != [(each or 0) > 0 for each in tokens]:
        raise ValueError(f"{where} `loss` must have a number wherever `tokens` has more than 0, and else none.")


def _new_figure(width: float, height: float, title: str | None) -> "Figure":
    """Create a figure, its size in inches, without pyplot, which would keep it and need a display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('The plots of hf_vanilla need matplotlib: pip install "hf_vanilla[viz]"') from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    if title:
        figure.suptitle(title)
    return figure


def _finish_curves(axes: "Axes", legend: bool = True) -> None:
    """Add grid, frame and legend to a panel of curves."""
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize="small")


def _draw_curve(axes: "Axes", label: str, curve: "_Curve", color: str) -> None:
    """Draw a line of points, and a star for an evaluation after the training."""
    if curve.points:
        marker = "o" if len(curve.points) <= 40 else None  # markers show single points
        axes.plot(*zip(*curve.points, strict=True), color=color, marker=marker, markersize=3.5, label=label)
    if curve.final:
        label = f"{label}, final model"
        axes.plot(*zip(*curve.final, strict=True), color=color, marker="*", markersize=10, linestyle="", label=label)


def _draw_phases(axes: "Axes", phases: Sequence[tuple[float, int]]) -> None:
    """Separate phases by dotted lines, with the length of their sequences above, side by side where they are short."""
    place = -math.inf
    for number, (start, length) in enumerate(phases):
        if number > 0:
            axes.axvline(start, color="0.4", linestyle=":", linewidth=1)
        place = max(start, place + 0.08 * axes.get_xlim()[1])
        turned: dict[str, Any] = dict(transform=axes.get_xaxis_transform(), rotation=30, rotation_mode="anchor")
        axes.text(place, 1.02, f"up to {length} tokens", fontsize="x-small", **turned)


def _draw_learning_rate(axes: "Axes", log_history: Sequence[Mapping[str, Any]]) -> None:
    """Draw the learning rate in the background of a panel, with an axis on the right."""
    rates = [(entry["step"], entry["learning_rate"]) for entry in log_history if "learning_rate" in entry]
    if len(rates) < 2:
        return
    right = axes.twinx()
    right.set_label("<learning rate>")
    right.plot(*zip(*rates, strict=True), color="0.7", linewidth=1)
    right.set_ylabel("learning rate (grey)", color="0.5")
    right.set_ylim(bottom=0.0)
    right.yaxis.set_major_formatter("{x:.2e}")
    right.tick_params(axis="y", colors="0.5")
    right.spines[["top", "left"]].set_visible(False)
    axes.set_zorder(right.get_zorder() + 1)
    axes.patch.set_visible(False)


def _columns(count: int, most: int) -> int:
    """Choose the number of columns of panels: one less than `most` if that leaves fewer places empty."""
    return count if count < most else min((most, most - 1), key=lambda columns: -count % columns)


def _cycle_colors(count: int) -> list[str]:
    return [_COLORS[index % len(_COLORS)] for index in range(count)]


def _array(values: Any) -> np.ndarray:
    """Convert a tensor of any dtype and device, or anything that NumPy takes, to an array of floats."""
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float32).numpy()
    return np.asarray(values, dtype=np.float64)


def _check_indices(name: str, indices: Iterable[int], count: int) -> None:
    for index in indices:
        if not -count <= index < count:
            raise ValueError(f"`{name}` must be in [{-count}, {count}), got {index}.")


def _pixels(image: Any) -> np.ndarray:
    """Convert an image of Pillow, or anything that NumPy takes, to an array that matplotlib shows as it is meant."""
    from PIL import Image, ImageOps  # comes with matplotlib

    if isinstance(image, Image.Image):
        image = ImageOps.exif_transpose(image)
        if not image.mode.startswith(("I", "F")):  # RGB has 8 bits for each channel, these have more
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    return np.asarray(image)


def _is_byte_level(tokenizer: Any) -> bool:
    """Ask whether the letters of a tokenizer's vocabulary stand for bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python
        return hasattr(tokenizer, "byte_decoder")
    return "ByteLevel(" in repr(backend.decoder)  # alone, or one of several steps


def _one_layer(weights: Any, layer: int) -> np.ndarray:
    """Select one layer, as an array of shape `(batch, heads, tgt_len, src_len)` or of fewer dimensions."""
    if weights is None or (isinstance(weights, (tuple, list)) and (len(weights) == 0 or weights[0] is None)):
        raise ValueError(
            f"`weights` must be tensors, got {weights}: the attention kernel of the model returns none. Call "
            '`model.set_attn_implementation("eager")` before the forward pass.'
        )
    if isinstance(weights, (tuple, list)) and getattr(weights[0], "ndim", 0) in (2, 3, 4):
        _check_indices("layer", [layer], len(weights))
        weights = weights[layer]
    return _array(weights)


def _one_example(array: np.ndarray, example: int) -> np.ndarray:
    """Select one row of a batch, as an array of shape `(heads, tgt_len, src_len)`."""
    if array.ndim == 4:
        _check_indices("example", [example], len(array))
        array = array[example]
    elif array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or array.size == 0:
        raise ValueError(
            "`weights` must be a tuple of tensors of shape (batch, heads, tgt_len, src_len), or one array of the last "
            f"two, three or four of these dimensions, none of them 0; got shape {array.shape}."
        )
    return array


def _check_token_counts(by_head: np.ndarray, source_tokens: Sequence[str], target_tokens: Sequence[str]) -> None:
    if by_head.shape[1:] != (len(target_tokens), len(source_tokens)):
        raise ValueError(
            f"`weights` must have a row for each of the {len(target_tokens)} `target_tokens` and a column for each of "
            f"the {len(source_tokens)} `source_tokens`, got {by_head.shape[1]} rows and {by_head.shape[2]} columns."
        )


def _panels_of_heads(by_head: np.ndarray, heads: Sequence[int] | None) -> dict[str, np.ndarray]:
    """Return the panels with their titles: the mean of all heads, or the chosen heads."""
    if heads is None:
        name = "" if len(by_head) == 1 else f"mean of {len(by_head)} heads"
        return {name: by_head.mean(axis=0)}
    if len(heads) == 0:
        raise ValueError("`heads` must have at least one head, got none; leave it out for the mean of all.")
    _check_indices("heads", heads, len(by_head))
    return {f"head {head % len(by_head)}": by_head[head] for head in heads}


def _check_table(table: np.ndarray) -> None:
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"`encodings` must have shape (positions, d_model), neither of them 0, got {table.shape}.")


def _checked_curves(schedules: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    if len(schedules) == 0:
        raise ValueError("`schedules` must have at least one list of learning rates, got none.")
    curves = {label: _array(rates) for label, rates in schedules.items()}
    for label, rates in curves.items():
        if rates.ndim != 1 or rates.size == 0:
            raise ValueError(
                f"`schedules` must be lists of learning rates of steps 1, 2..., got shape {rates.shape} for {label!r}."
            )
    return curves


class _Curve(NamedTuple):
    """Points `(step, value)` of a line; and of the final model, if it was evaluated after the training."""

    points: list[tuple[float, float]]
    final: list[tuple[float, float]]


def _is_number(value: Any) -> bool:
    """Whether a value can be drawn: a number, and no integer that is too large for matplotlib."""
    return isinstance(value, Real) and not (isinstance(value, int) and abs(value) >= 2**63)


def _check_log(log_history: Any) -> None:
    """Check that a log is a list of mappings in which everything that is drawn is a number."""
    if not isinstance(log_history, Sequence):
        raise ValueError(f"`log_history` must be a list of entries, got {log_history!r:.80}.")
    for number, entry in enumerate(log_history, start=1):
        if not isinstance(entry, Mapping):
            raise ValueError(f"`log_history` must have mappings as entries, but entry {number} is {entry!r:.80}.")
        drawn = [
            name
            for name in entry
            if name in _DRAWN_FIELDS or (name.startswith("eval_") and not name.endswith(_SPEED_FIELDS))
        ]
        if drawn and "step" not in entry:
            raise ValueError(f"`log_history` must have a `step` in each entry, but entry {number} has none.")
        for name in drawn:
            if not _is_number(entry[name]):
                raise ValueError(
                    f"`log_history` must have numbers as `{name}`, but entry {number} has {entry[name]!r:.80}."
                )


def _logged_curves(log_history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, _Curve]]:
    """Group a training log into panels and curves; losses share the first panel."""
    panels: dict[str, dict[str, _Curve]] = {"loss": {}}
    is_over = False
    for entry in log_history:
        is_over = is_over or "train_runtime" in entry
        for name, value in entry.items():
            panel, label = name.removeprefix("eval_"), "evaluation"
            if name == "loss":
                label = "training"
            elif not name.startswith("eval_") or name.endswith(_SPEED_FIELDS):
                continue
            else:
                panel, label = _panel_and_label(panel)
            curve = panels.setdefault(panel, {}).setdefault(label, _Curve([], []))
            _add_point(curve, (entry["step"], value), is_over)
    panels = {name: curves for name, curves in panels.items() if curves}
    if not panels:
        raise ValueError(
            "`log_history` must have entries with `loss` or `eval_...`, as `trainer.state.log_history` does; "
            f"got none in {len(log_history)} entries."
        )
    # A panel with a single point is dropped if another one has more.
    with_several_points = {
        name: curves
        for name, curves in panels.items()
        if any(len(curve.points) + len(curve.final) > 1 for curve in curves.values())
    }
    return with_several_points or panels


def _panel_and_label(name: str) -> tuple[str, str]:
    """Return the panel and the label of a metric of evaluations: losses share a panel, and so do lengths."""
    found = _OF_LENGTH.fullmatch(name)
    length, name = (f", {found[1]} tokens", found[2]) if found else ("", name)
    if not name.endswith("loss"):
        return name, f"evaluation{length}"
    data = name.removesuffix("loss").strip("_")
    return "loss", f"evaluation ({_WORDS.get(data, data)}){length}" if data else f"evaluation{length}"


def _add_point(curve: _Curve, point: tuple[float, float], is_over: bool) -> None:
    """Add a point to the line, or as the final model's; a repeated evaluation of the same weights is dropped."""
    is_repeated = bool(curve.points) and curve.points[-1][0] == point[0]
    if is_repeated and math.isclose(curve.points[-1][1], point[1], rel_tol=1e-5):
        return
    if is_repeated or is_over:
        curve.final[:] = [point]
    else:
        curve.points.append(point)


def _logged_phases(log_history: Sequence[Mapping[str, Any]]) -> list[tuple[float, int]]:
    """Return the first step and the sequence length of each phase, if there are several."""
    phases: list[tuple[float, int]] = []
    previous = 0.0
    for entry in log_history:
        length = entry.get("sequence_length")
        if length is not None and (not phases or phases[-1][1] != length):
            phases.append((previous, int(length)))
        previous = entry.get("step", previous)
    return phases if len(phases) > 1 else []


def _cell_size(across: int, down: int, largest: float) -> float:
    """Choose the side of a cell in inches: smaller for many cells, but not smaller than its label if that fits."""
    longest = max(across, down)
    return min(largest, max(12.0 / longest, _LABEL_HEIGHT), _MAX_SIDE / longest)


def _font_size(cell: float) -> float:
    """Choose the font size in points for cells of that many inches."""
    return min(10.0, max(6.0, 45.0 * cell))


def _label_room(tokens: Sequence[str], cell: float) -> float:
    """Estimate the inches of the longest label: wide characters are square, others a little over half as wide."""
    longest = max(
        sum(2 if unicodedata.east_asian_width(character) in "WF" else 1.2 for character in token[:_MAX_LABEL_LENGTH])
        for token in tokens
    )
    return min(longest, 1.2 * _MAX_LABEL_LENGTH) * _font_size(cell) / 2 / 72 + 0.4


def _label_tokens(axis: "Axis", tokens: Sequence[str], cell: float) -> None:
    """Label the cells of an axis, `cell` inches wide, with all tokens, or as many as are readable."""
    step = math.ceil(_LABEL_HEIGHT / cell)
    shown = tokens[::step]
    families, missing = _fonts_for("".join(shown))
    axis.set_ticks(range(0, len(tokens), step), [_visible(token, missing) for token in shown])
    across = axis is axis.axes.xaxis
    for label in axis.get_ticklabels():
        label.set(fontfamily=families, fontsize=_font_size(cell), parse_math=False)
        if across and cell >= 0.2:
            label.set(rotation=45, ha="right", rotation_mode="anchor")
        elif across:
            label.set(rotation=90)


def _visible(token: str, missing: set[str]) -> str:
    """Make a token readable: mark leading and trailing spaces, escape unprintable characters, and shorten it."""
    inner = token.strip(" ")
    before = len(token) - len(token.lstrip(" "))
    after = len(token) - before - len(inner)
    inner = "".join(
        character
        if (character.isprintable() or character in _ZERO_WIDTH_JOINERS) and character not in missing
        else character.encode("unicode_escape").decode()
        for character in inner
    )
    text = "␣" * before + inner + "␣" * after
    return text if len(text) <= _MAX_LABEL_LENGTH else text[: _MAX_LABEL_LENGTH - 1] + "…"


def _fonts_for(text: str) -> tuple[list[str], set[str]]:
    """Choose installed font families that together show `text`; also return the characters that none of them has."""
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    default = font_manager.FontProperties()
    families = [FT2Font(font_manager.findfont(default)).family_name]
    font = FT2Font(font_manager.findfont(default))
    printable = set(filter(str.isprintable, text))
    missing = {character for character in printable if not font.get_char_index(ord(character))}
    for entry in font_manager.fontManager.ttflist:
        if not missing:
            break
        if entry.name.startswith("Last Resort"):  # has a box for every character
            continue
        font = FT2Font(entry.fname)
        found = {character for character in missing if font.get_char_index(ord(character))}
        if found:
            families.append(entry.name)
            missing -= found
    if missing:
        examples = " ".join(f"U+{ord(character):04X}" for character in sorted(missing)[:5])
        is_cjk = any(unicodedata.name(character, "").startswith(_CJK_NAMES) for character in missing)
        advice = "Noto Sans CJK (on Debian: apt install fonts-noto-cjk)" if is_cjk else "one that does"
        logger.warning(
            f"No installed font has {len(missing)} characters of the tokens ({examples}), which are shown as code "
            f"points; install {advice}."
        )
    return families, missing
