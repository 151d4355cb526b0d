"""Checks of input: ids, masks, labels and texts."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel


# What is told to whoever has ids that a model does not know.
OF_VOCABULARY = "These are the ids of the vocabulary: do tokenizer and model belong together?"


def check_evaluation_mode(model: PreTrainedModel) -> None:
    """Check that dropout is off.

    Args:
        model (`PreTrainedModel`): The model.

    Raises:
        ValueError: if it is in training mode.
    """
    if model.training:
        raise ValueError("`model` must be in evaluation mode, or dropout changes what it says; call `model.eval()`.")


def check_input_ids(name: str, input_ids: torch.Tensor, size: int, advice: str = OF_VOCABULARY) -> None:
    """Check that every id is in its table, where looking is free: on a CPU, outside of compiled code.

    Args:
        name (`str`): What the caller's argument is called.
        input_ids (`torch.Tensor` of shape `(batch, length)`): The ids.
        size (`int`): Number of ids that there are, such as that of the words.
        advice (`str`, *optional*): What is told to whoever has other ids.

    Raises:
        ValueError: if an id is negative or not below `size`, or `input_ids` has not two dimensions.
        TypeError: if `input_ids` are no integers.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"`{name}` must have shape (batch, length), got {tuple(input_ids.shape)}.")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"`{name}` must be integers (torch.long), got {input_ids.dtype}.")
    if torch.compiler.is_compiling() or input_ids.device.type != "cpu" or input_ids.numel() == 0:
        return
    lowest, highest = torch.aminmax(input_ids)
    if lowest < 0 or highest >= size:
        row, column = ((input_ids < 0) | (input_ids >= size)).nonzero()[0].tolist()
        raise ValueError(
            f"`{name}` must be in [0, {size}); got {input_ids[row, column].item()} at row {row}, position {column}. "
            f"{advice}"
        )


def check_attention_mask(name: str, attention_mask: torch.Tensor | None, batch: int, length: int) -> None:
    """Check that a padding mask has the shape of what it masks.

    Args:
        name (`str`): What the caller's argument is called.
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 1 for tokens, 0 for padding. A mask of
            four dimensions is transformers' own and passes.
        batch (`int`): Rows that it must have.
        length (`int`): Columns that it must have.

    Raises:
        ValueError: if it has another shape.
    """
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() == 4:
        return
    if tuple(attention_mask.shape) != (batch, length):
        raise ValueError(
            f"`{name}` must have shape (batch, length) = ({batch}, {length}), got {tuple(attention_mask.shape)}."
        )


# The label of a position without a loss, everywhere in transformers.
IGNORED_LABEL = -100


def check_labels(
    name: str,
    labels: torch.Tensor,
    shape: tuple[int, ...],
    size: int,
    advice: str = "`num_labels` of the config sets the number of classes.",
) -> None:
    """Check the shape of labels, and their values where looking is free: on a CPU, outside of compiled code.

    Args:
        name (`str`): What the caller's argument is called.
        labels (`torch.Tensor`): Class numbers; -100 is ignored.
        shape (`tuple[int, ...]`): The shape that they must have.
        size (`int`): Number of classes.
        advice (`str`, *optional*): What is told to whoever has other labels.

    Raises:
        ValueError: if the shape is another one, or a label is neither -100 nor in [0, size).
        TypeError: if the labels are no integers.
    """
    if tuple(labels.shape) != shape:
        raise ValueError(f"`{name}` must have shape {shape}, got {tuple(labels.shape)}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"`{name}` must be integers (torch.long), got {labels.dtype}.")
    if torch.compiler.is_compiling() or labels.device.type != "cpu" or labels.numel() == 0:
        return
    labels = labels.long()  # of small integers, -100 would be another number
    wrong = labels[((labels < 0) | (labels >= size)) & (labels != IGNORED_LABEL)]
    if wrong.numel():
        raise ValueError(
            f"`{name}` must be in [0, {size}), or {IGNORED_LABEL} where there is none; got {wrong[0].item()}. {advice}"
        )


def as_texts(name: str, given: Any) -> list[str]:
    """Return one text or several as a list.

    Args:
        name (`str`): Name of the argument, for messages.
        given (`str` or `Iterable[str]`): Its value.

    Returns:
        `list[str]`: the texts.

    Raises:
        TypeError: if it is anything else.
    """
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise TypeError(f"`{name}` must be a string or a list of strings, got {type(given).__name__}.")
    texts = list(given)
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise TypeError(f"`{name}` must contain only strings, but number {number} is {type(text).__name__}.")
    return texts
