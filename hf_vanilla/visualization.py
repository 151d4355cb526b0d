"""Pictures of what a model does and of how its training went; needs matplotlib, `pip install hf_vanilla[viz]`.

Every function returns a `matplotlib.figure.Figure` that no window shows and nothing else holds on to: write it with
`figure.savefig("attention.png")`. A notebook draws it when it is the last value of a cell.
"""

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.utils import logging


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


logger = logging.get_logger(__name__)

# Distinct for colour-blind readers (Okabe and Ito 2008).
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Evaluation entries of a training log that are no scores.
_SPEED_FIELDS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
_LONGEST_LABEL = 20  # characters
_LONGEST_SIDE = 40.0  # inches that the cells of all panels in a row or column may take
_LABEL_HEIGHT = 0.13  # inches: 6 points, signs above and below the line, and a gap
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
    """Draw which source tokens each target token attends to.

    For self-attention, both lists are of the same tokens. Tokens are shown as they are given, so byte-level ones are
    better decoded first: `[tokenizer.decode([token_id]) for token_id in ids]`. Spaces at their ends and signs that do
    not print are made visible; signs that no installed font has appear as code points.

    Args:
        weights (`Any`): Attention weights as a model returns them in `cross_attentions`, for each layer a tensor of
            shape `(batch, heads, tgt_len, src_len)`; or one array of the last two, three or four of these dimensions.
        source_tokens (`Sequence[str]`): The `src_len` tokens that are attended to, padding included.
        target_tokens (`Sequence[str]`): The `tgt_len` tokens that attend, padding included.
        layer (`int`, *optional*, defaults to -1): Which layer to draw, where `weights` has several.
        heads (`Sequence[int]`, *optional*): Heads to draw, each in a panel of its own; one panel with the mean of all
            by default.
        example (`int`, *optional*, defaults to 0): Which row of the batch to draw, where `weights` has several.
        title (`str`, *optional*): Line above the picture.

    Returns:
        `matplotlib.figure.Figure`: target tokens from top to bottom, source tokens from left to right.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if the shape of `weights` is none of these or does not fit the numbers of tokens, or there is no
            such layer, head or example.
    """
    by_head = _one_example(weights, layer, example)  # (heads, tgt_len, src_len)
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
    for index, (axes, (name, panel)) in enumerate(zip(shown, panels.items(), strict=True)):
        image = axes.imshow(panel, cmap="Blues", vmin=0.0, vmax=brightest)
        axes.set_title(name, fontsize="medium")
        at_bottom, at_left = index + columns >= len(panels), index % columns == 0
        _label_tokens(axes.xaxis, source_tokens if at_bottom else (), cell)
        _label_tokens(axes.yaxis, target_tokens if at_left else (), cell)
        axes.set(xlabel="source" if at_bottom else None, ylabel="target" if at_left else None)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    figure.colorbar(image, ax=shown, label="attention weight", shrink=min(1.0, 3.0 / (rows * height)), aspect=20)
    return figure


def plot_position_encodings(
    encodings: Any, *, dimensions: Sequence[int] | None = None, title: str | None = None
) -> "Figure":
    """Draw position encodings: all of them as a map, and some of their dimensions as curves over the positions.

    Args:
        encodings (`Any`): Array or tensor of shape `(positions, d_model)`, sinusoidal or learned.
        dimensions (`Sequence[int]`, *optional*): Dimensions to draw as curves; by default four that are spread over
            the wavelengths of the paper's sinusoids.
        title (`str`, *optional*): Line above the picture.

    Returns:
        `matplotlib.figure.Figure`: the map on the left, the curves on the right.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if `encodings` has another number of dimensions or is empty, or there is no such dimension.
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
    """Draw learning rates over the steps of training, with the peak of each.

    Args:
        schedules (`Mapping[str, Sequence[float]]`): For each curve its label and its learning rates, those of step 1,
            2 and so on.
        title (`str`, *optional*): Line above the picture.

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
            label=f"{label} (peak {rates[peak]:.2e} at step {peak + 1})",
        )
    axes.set(xlabel="step", ylabel="learning rate")
    axes.set_ylim(bottom=0.0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    _finish_curves(axes)
    return figure


def plot_training_curve(log_history: Sequence[Mapping[str, Any]], *, title: str | None = None) -> "Figure":
    """Draw the losses of a training run over its steps, and each score of its evaluations.

    Args:
        log_history (`Sequence[Mapping[str, Any]]`): `trainer.state.log_history`, or the list of that name in a
            checkpoint's `trainer_state.json`.
        title (`str`, *optional*): Line above the picture.

    Returns:
        `matplotlib.figure.Figure`: one panel with the losses in training and evaluation, and one for each other score;
            a panel with one point alone is left out if another one has more.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if nothing was logged that could be drawn.
    """
    panels = _logged_curves(log_history)
    columns = _columns(len(panels), most=3)
    rows = math.ceil(len(panels) / columns)
    figure = _new_figure(max(4.6 * columns, 6.0), 3.6 * rows, title)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (name, curves) in zip(grid.flat, panels.items(), strict=False):
        for (label, points), color in zip(curves.items(), _cycle_colors(len(curves)), strict=True):
            steps, values = zip(*points, strict=True)
            marker = "o" if len(points) <= 40 else None  # a single evaluation is a point, thousands of losses a line
            axes.plot(steps, values, color=color, marker=marker, markersize=3.5, label=label)
        axes.set(xlabel="step", ylabel=name)
        _finish_curves(axes, legend=name == "loss")
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    return figure


def _new_figure(width: float, height: float, title: str | None) -> "Figure":
    """Create a figure of that many inches outside of pyplot, which would keep it and need a screen to show it on."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("The pictures of hf_vanilla need matplotlib: pip install hf_vanilla[viz].") from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    if title:
        figure.suptitle(title)
    return figure


def _finish_curves(axes: "Axes", legend: bool = True) -> None:
    """Give a panel of curves its grid, frame and legend."""
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize="small")


def _columns(count: int, most: int) -> int:
    """Choose how many panels stand side by side: one less than `most` where that leaves fewer places empty."""
    return count if count < most else min((most, most - 1), key=lambda columns: -count % columns)


def _cycle_colors(count: int) -> list[str]:
    return [_COLORS[index % len(_COLORS)] for index in range(count)]


def _array(values: Any) -> np.ndarray:
    """Turn a tensor of any dtype and device, or what NumPy takes, into an array of floats."""
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float32).numpy()
    return np.asarray(values, dtype=np.float64)


def _check_indices(name: str, indices: Iterable[int], count: int) -> None:
    for index in indices:
        if not -count <= index < count:
            raise ValueError(f"`{name}` must be in [{-count}, {count}), got {index}.")


def _one_example(weights: Any, layer: int, example: int) -> np.ndarray:
    """Take one layer and one row of a batch, as an array of shape `(heads, tgt_len, src_len)`."""
    if isinstance(weights, (tuple, list)) and len(weights) > 0 and getattr(weights[0], "ndim", 0) == 4:
        _check_indices("layer", [layer], len(weights))
        weights = weights[layer]
    array = _array(weights)
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
    """Name and choose what to draw of the heads: the mean of all, or each of those asked for."""
    if heads is None:
        name = "" if len(by_head) == 1 else f"mean of {len(by_head)} heads"
        return {name: by_head.mean(axis=0)}
    if len(heads) == 0:
        raise ValueError("`heads` must name at least one head, got none; leave it out for the mean of all.")
    _check_indices("heads", heads, len(by_head))
    return {f"head {head % len(by_head)}": by_head[head] for head in heads}


def _check_table(table: np.ndarray) -> None:
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"`encodings` must have shape (positions, d_model), neither of them 0, got {table.shape}.")


def _checked_curves(schedules: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    if len(schedules) == 0:
        raise ValueError("`schedules` must hold at least one list of learning rates, got none.")
    curves = {label: _array(rates) for label, rates in schedules.items()}
    for label, rates in curves.items():
        if rates.ndim != 1 or rates.size == 0:
            raise ValueError(
                f"`schedules` must hold the learning rates of step 1, 2, ..., got shape {rates.shape} for {label!r}."
            )
    return curves


def _logged_curves(log_history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Sort a training log into panels, curves and points `(step, value)`; losses share the first panel."""
    losses: dict[str, list[tuple[float, float]]] = {}
    scores: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for entry in log_history:
        for name, value in entry.items():
            if name == "loss":
                losses.setdefault("training", []).append((entry["step"], value))
            elif name.startswith("eval_") and name.endswith("loss"):
                data = name.removeprefix("eval_").removesuffix("loss").strip("_")
                losses.setdefault(f"evaluation {data}".strip(), []).append((entry["step"], value))
            elif name.startswith("eval_") and not name.endswith(_SPEED_FIELDS):
                score = name.removeprefix("eval_")
                scores.setdefault(score, {}).setdefault(score, []).append((entry["step"], value))
    panels = {"loss": losses, **scores} if losses else scores
    if not panels:
        raise ValueError(
            "`log_history` must hold entries with `loss` or `eval_...`, as `trainer.state.log_history` does; "
            f"got none in {len(log_history)} entries."
        )
    # A panel with one point tells less than the number would, so it goes where another one has more.
    curves_with_a_course = {
        name: curves for name, curves in panels.items() if any(len(points) > 1 for points in curves.values())
    }
    return curves_with_a_course or panels


def _cell_size(across: int, down: int, largest: float) -> float:
    """Choose the side of a cell in inches: smaller where there are many, no smaller than its label while that fits."""
    longest = max(across, down)
    return min(largest, max(12.0 / longest, _LABEL_HEIGHT), _LONGEST_SIDE / longest)


def _font_size(cell: float) -> float:
    """Fit the points of a label to cells of that many inches."""
    return min(10.0, max(6.0, 45.0 * cell))


def _label_room(tokens: Sequence[str], cell: float) -> float:
    """Estimate the inches that the longest label takes: wide signs are as wide as high, others somewhat over half."""
    longest = max(
        sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1.2 for sign in token[:_LONGEST_LABEL])
        for token in tokens
    )
    return min(longest, 1.2 * _LONGEST_LABEL) * _font_size(cell) / 2 / 72 + 0.4


def _label_tokens(axis: "Axis", tokens: Sequence[str], cell: float) -> None:
    """Write tokens along an axis of cells that are `cell` inches wide: all of them, or as many as can be read."""
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
    """Make a token readable: spaces at its ends marked, signs that cannot be shown as code points, not too long."""
    inner = token.strip(" ")
    before = len(token) - len(token.lstrip(" "))
    after = len(token) - before - len(inner)
    inner = "".join(
        sign
        if (sign.isprintable() or sign in _ZERO_WIDTH_JOINERS) and sign not in missing
        else sign.encode("unicode_escape").decode()
        for sign in inner
    )
    text = "␣" * before + inner + "␣" * after
    return text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "…"


def _fonts_for(text: str) -> tuple[list[str], set[str]]:
    """Choose installed font families that together show `text`, and tell which signs none of them has."""
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    default = font_manager.FontProperties()
    families = [FT2Font(font_manager.findfont(default)).family_name]
    font = FT2Font(font_manager.findfont(default))
    missing = {sign for sign in set(text) if sign.isprintable() and not font.get_char_index(ord(sign))}
    for entry in font_manager.fontManager.ttflist:
        if not missing:
            break
        if entry.name.startswith("Last Resort"):  # has a box for every sign
            continue
        font = FT2Font(entry.fname)
        found = {sign for sign in missing if font.get_char_index(ord(sign))}
        if found:
            families.append(entry.name)
            missing -= found
    if missing:
        examples = " ".join(f"U+{ord(sign):04X}" for sign in sorted(missing)[:5])
        logger.warning(
            f"No installed font shows {len(missing)} signs of the tokens ({examples}); install one that does."
        )
    return families, missing
