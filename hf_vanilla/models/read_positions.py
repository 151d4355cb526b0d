"""Which positions a head reads, and how many: the sizes of masks, counted once for each step.

A GPU has to be waited for to know how many tokens a mask has. In training all masks of a step are counted at once, or
by the collator ([`host_sizes`]): then nothing waits.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import can_read, has_label, hides_values
from .varlen_attention import has_varlen_kernels


class MaskSizes(NamedTuple):
    """What the host needs to know of a mask of shape `(batch, length)`.

    Attributes:
        total: Number of positions that are marked.
        longest: Largest number in one row.
        shortest: Smallest number in one row.
        firsts: Number of rows whose first position is marked.
    """

    total: int
    longest: int
    shortest: int
    firsts: int


# Of the masks of a training step, by name.
Sizes = Mapping[str, MaskSizes]


def count_masks(*masks: Tensor) -> list[MaskSizes]:
    """Count the marked positions of masks. A GPU is waited for once.

    Args:
        *masks (`torch.BoolTensor` of shape `(batch, length)`): Masks on one device.

    Returns:
        `list[MaskSizes]`: the sizes of each.
    """
    rows = [mask.sum(1) for mask in masks]
    counts = [
        torch.stack((row.sum(), row.max(), row.min(), mask[:, :1].sum()))
        for row, mask in zip(rows, masks, strict=True)
    ]
    return [MaskSizes(*sizes) for sizes in torch.stack(counts).tolist()]


def host_sizes(attention_mask: Tensor | None, labels: Tensor | None) -> dict[str, MaskSizes]:
    """Count all that a training step needs to know on the host: in a collator, or on a GPU with one wait.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding.
        labels (`torch.Tensor` of shape `(batch, length)`, *optional*): Labels; -100 where there is none.

    Returns:
        `dict[str, MaskSizes]`: the sizes of `attention_mask`, and of the positions with a label (`labels`), of those
        that a causal layer computes for them (`needed`), of those before one (`next_labels`) and of padding with one
        (`padding_labels`).
    """
    masks = {}
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        device = attention_mask.device if labels is None else labels.device
        masks["attention_mask"] = is_token = attention_mask.to(device) != 0
    if labels is not None and labels.dim() == 2:
        masks["labels"] = labelled = has_label(labels)
        masks["needed"] = up_to_last(labelled)
        if attention_mask is None:
            masks["next_labels"] = labelled[:, 1:]
        elif "attention_mask" in masks and is_token.shape == labels.shape:
            masks["next_labels"] = labelled[:, 1:] & is_token[:, :-1]
            masks["padding_labels"] = labelled & ~is_token
    if any(0 in mask.shape for mask in masks.values()):
        return {}
    return dict(zip(masks, count_masks(*masks.values()), strict=True)) if masks else {}


def step_sizes(arguments: Any, attention_mask: Tensor | None, labels: Tensor | None) -> tuple[Sizes, Any]:
    """Find the sizes of a step's masks: those of the collator, or on a GPU counted here.

    Args:
        arguments (`dict[str, Any]`): The keyword arguments of `forward`, with `mask_sizes` if the collator counted.
        attention_mask (`torch.Tensor`, *optional*): As in [`host_sizes`].
        labels (`torch.Tensor`, *optional*): As in [`host_sizes`].

    Returns:
        `tuple[Mapping[str, MaskSizes], dict[str, Any]]`: the sizes by name, none where nothing is waited for, as on a
        CPU; and the arguments with these `mask_sizes`.
    """
    sizes = arguments.get("mask_sizes")
    if sizes is None and labels is not None and has_varlen_kernels(labels.device) and can_read(labels):
        sizes = host_sizes(attention_mask, labels)
    if not sizes:
        return {}, arguments
    sizes = {name: MaskSizes(*each) for name, each in sizes.items()}  # collators give plain tuples, which loaders keep
    return sizes, {**arguments, "mask_sizes": sizes}


def up_to_last(is_read: Tensor) -> Tensor:
    """Mark the positions up to the last that is marked, which is what a causal layer has to compute.

    Args:
        is_read (`torch.BoolTensor` of shape `(batch, length)`): The positions that are read.

    Returns:
        `torch.BoolTensor` of the same shape.
    """
    return is_read.flip(1).cummax(1).values.flip(1)


class Reads(NamedTuple):
    """What a head reads of an encoder, in place of `read_positions` alone.

    Attributes:
        positions: Not 0 where the output is read, of shape `(batch, length)`; `None` for everywhere.
        total: Number of these positions, none of which is padding that is left out; `None` if it is not known.
        firsts: How many of them are the first of their row.
    """

    positions: Tensor | None
    total: int | None = None
    firsts: int = 0


# What a head that reads padding too asks of an encoder.
WITH_PADDING: dict[str, Any] = {"keep_padding": True}


def read_first(inputs: Tensor | None, *_: Any) -> dict[str, Any]:
    """Name what a head on top of the pooler reads of an encoder: each row's first position.

    Args:
        inputs (`torch.Tensor` of shape `(batch, length)` or `(batch, length, d_model)`, *optional*): Ids or
            embeddings.

    Returns:
        `dict[str, Any]`: arguments of the encoder.
    """
    if inputs is None or inputs.dim() < 2:
        return {}
    is_read = torch.zeros(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    is_read[:, :1] = True
    return {"read_positions": Reads(is_read, inputs.shape[0], inputs.shape[0])}


def read_all(
    inputs: Any, attention_mask: Tensor | None, labels: Tensor | None, training: bool, sizes: Sizes
) -> dict[str, Any]:
    """Name what a head for all tokens reads of an encoder: in training padding only where it has a label.

    Args:
        inputs (`Any`): Not used.
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding.
        labels (`torch.Tensor` of shape `(batch, length)`, *optional*): Labels; -100 where there is none.
        training (`bool`): Whether the model is in training mode.
        sizes (`Mapping[str, MaskSizes]`): What [`step_sizes`] returns.

    Returns:
        `dict[str, Any]`: arguments of the encoder. Padding is computed, too, where checking would synchronize: in
        compiled or transformed code, and off the CPU without sizes.
    """
    if labels is None or not training or hides_values(labels):
        return WITH_PADDING
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != labels.shape:
        return {}
    if "padding_labels" in sizes:
        return WITH_PADDING if sizes["padding_labels"].total else {}
    if attention_mask.device.type == "cpu" and not (has_label(labels) & (attention_mask == 0).to(labels.device)).any():
        return {}
    return WITH_PADDING


def read_labelled(
    inputs: Tensor | None, attention_mask: Tensor | None, labels: Tensor | None, training: bool, sizes: Sizes
) -> dict[str, Any]:
    """Name what a head for labelled tokens reads of an encoder: in training these, otherwise all, padding included.

    Args:
        inputs (`torch.Tensor`, *optional*): As in [`labelled_positions`].
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding.
        labels (`torch.Tensor` of shape `(batch, length)`, *optional*): Labels; -100 where there is none.
        training (`bool`): Whether the model is in training mode.
        sizes (`Mapping[str, MaskSizes]`): What [`step_sizes`] returns.

    Returns:
        `dict[str, Any]`: arguments of the encoder.
    """
    read = labelled_positions(inputs, labels, training)
    reads, kept = Reads(read), read_all(inputs, attention_mask, labels, training, sizes)
    if "labels" in sizes and not kept:  # otherwise labels at padding may be among them
        reads = Reads(read, sizes["labels"].total, sizes["labels"].firsts)
    return {"read_positions": reads, **kept}


def labelled_positions(inputs: Tensor | None, labels: Tensor | None, training: bool) -> Tensor | None:
    """Mark the positions that a head for labelled tokens reads in training.

    Args:
        inputs (`torch.Tensor` of shape `(batch, length)` or `(batch, length, d_model)`, *optional*): Ids or
            embeddings.
        labels (`torch.Tensor` of shape `(batch, length)`, *optional*): Labels; -100 where there is none.
        training (`bool`): Whether the model is in training mode; otherwise the head reads all positions.

    Returns:
        `torch.BoolTensor` of shape `(batch, length)`; `None` for all positions.
    """
    if labels is None or inputs is None or not training or labels.shape != inputs.shape[:2]:
        return None
    return has_label(labels)
