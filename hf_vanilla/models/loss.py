"""Losses of all models: cross-entropy of tokens, with label smoothing, and of classes."""

import math
from typing import Any

import torch
from torch import nn

from .checks import IGNORED_LABEL, check_labels
from .chunked_loss import SmoothedTarget, _cross_entropy_and_gradients


def smoothed_target(smoothing: float, smoothing_type: str, vocab_size: int, pad_token_id: int) -> SmoothedTarget:
    """Build the target distribution of one of the three kinds of label smoothing.

    Args:
        smoothing (`float`): The paper's epsilon_ls: probability taken from the true token.
        smoothing_type (`str`): `"uniform"` gives it to all V tokens, the true one too (torch's `cross_entropy`);
            `"t2t"` to the V - 1 others (Tensor2Tensor); `"annotated"` to the V - 2 that are neither true nor padding
            (the Annotated Transformer's KL divergence). The last two subtract the target's entropy.
        vocab_size (`int`): Number of tokens, V.
        pad_token_id (`int`): Id of padding.

    Returns:
        `SmoothedTarget`: the distribution.

    Raises:
        ValueError: if the vocabulary has no other token.

    Source: Vaswani et al. 2017, 5.4; Szegedy et al. 2016.
    """
    if smoothing == 0:
        return SmoothedTarget(1.0, 0.0, -1, 0.0)
    if smoothing_type == "uniform":
        share = smoothing / vocab_size
        return SmoothedTarget(1 - smoothing + share, share, -1, 0.0)
    others = vocab_size - (2 if smoothing_type == "annotated" else 1)
    if others < 1:
        raise ValueError(f"`vocab_size` ({vocab_size}) leaves no other token for `label_smoothing` ({smoothing}).")
    share = smoothing / others
    entropy = -((1 - smoothing) * math.log(1 - smoothing) + smoothing * math.log(share))
    return SmoothedTarget(1 - smoothing, share, pad_token_id if smoothing_type == "annotated" else -1, entropy)


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor, target: SmoothedTarget) -> torch.Tensor:
    """Sum the cross-entropy of tokens whose logits are at hand.

    Args:
        logits (`torch.Tensor` of shape `(..., vocab)`): Logits.
        labels (`torch.Tensor` of shape `(...)`): True tokens; -100 where there is none.
        target (`SmoothedTarget`): The distribution around the true token.

    Returns:
        `torch.Tensor` of shape `()`: the sum over all labelled tokens, in float32 and nats.
    """
    logits = logits.float()
    wanted = labels != IGNORED_LABEL
    true_logits = logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    expected = (target.confidence - target.share) * true_logits
    if target.share > 0:
        expected = expected + target.share * logits.sum(-1)
    if target.excluded_id >= 0:
        expected = expected - target.share * logits[..., target.excluded_id]
    losses = torch.logsumexp(logits, dim=-1) - expected - target.entropy
    return torch.where(wanted, losses, 0.0).sum()


@_cross_entropy_and_gradients.register_fake
def _(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, *target: Any
) -> tuple[torch.Tensor, ...]:
    return (
        hidden_states.new_empty((), dtype=torch.float32),
        torch.empty_like(hidden_states),
        torch.empty_like(weight, dtype=torch.float32),
        hidden_states.new_empty(0) if bias is None else torch.empty_like(bias, dtype=torch.float32),
    )


class _FrozenRow(torch.autograd.Function):
    """The matrix itself, with a gradient of zero in one of its rows."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, row: int) -> torch.Tensor:
        ctx.row = row
        return matrix.view_as(matrix)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_matrix = grad_output.clone()
        grad_matrix[ctx.row] = 0  # `index_fill` would carry the row's number to the device
        return grad_matrix, None


def freeze_row(matrix: torch.Tensor, row: int) -> torch.Tensor:
    """Keep one row of a matrix as it is: no gradient reaches it through the result.

    Args:
        matrix (`torch.Tensor` of shape `(rows, columns)`): The matrix.
        row (`int`): The row.

    Returns:
        `torch.Tensor` of shape `(rows, columns)`: the same numbers.
    """
    return _FrozenRow.apply(matrix, row)


def select_labelled(hidden_states: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take out the tokens with a label. Compiled code keeps all: its graph can't depend on how many these are.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): What is known of each token.
        labels (`torch.Tensor` of shape `(batch, length)`): True tokens; -100 where there is none.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: the hidden states `(tokens, d_model)` and the labels `(tokens,)`.
    """
    hidden_states, labels = hidden_states.flatten(0, 1), labels.flatten()
    if torch.compiler.is_compiling():
        return hidden_states, labels
    labelled = (labels != IGNORED_LABEL).nonzero()[:, 0]  # once: an accelerator is waited for to count them
    return hidden_states.index_select(0, labelled), labels.index_select(0, labelled)


def mean_loss(
    loss_sum: torch.Tensor, count: torch.Tensor | int, num_items_in_batch: torch.Tensor | int | None
) -> torch.Tensor:
    """Divide a sum of losses by its number of labels, or by that of the whole optimizer step where it is given.

    Args:
        loss_sum (`torch.Tensor` of shape `()`): Sum over the labels of this batch.
        count (`torch.Tensor` or `int`): How many these are; a mean over none is 0.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): Labels of the whole step, from transformers' Trainer.

    Returns:
        `torch.Tensor` of shape `()`: the loss.
    """
    divisor = count if num_items_in_batch is None else num_items_in_batch
    if isinstance(divisor, torch.Tensor):
        return loss_sum / divisor.to(loss_sum.device).clamp(min=1)
    return loss_sum / max(divisor, 1)


def has_label(labels: torch.Tensor) -> torch.Tensor:
    """Find the positions with a label.

    Args:
        labels (`torch.Tensor`): Integers of any kind; -100 where there is none.

    Returns:
        `torch.BoolTensor` of their shape.
    """
    return labels.long() != IGNORED_LABEL  # among small integers, -100 may be another number


def classification_loss(
    logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Compute the cross-entropy of classes.

    Args:
        logits (`torch.Tensor` of shape `(..., num_labels)`): Scores.
        labels (`torch.LongTensor` of shape `(...)`): Classes; -100 is ignored.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): As in [`mean_loss`].

    Returns:
        `torch.Tensor` of shape `()`: the loss in nats.

    Raises:
        ValueError: if a label is no class.
    """
    check_labels("labels", labels, tuple(logits.shape[:-1]), logits.shape[-1])
    labels = labels.long()
    loss_sum = nn.functional.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return mean_loss(loss_sum, has_label(labels).sum(), num_items_in_batch)
