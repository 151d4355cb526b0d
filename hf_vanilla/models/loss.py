"""The losses of all models: of tokens, with label smoothing, and of classes.

hidden states -> those with a label -> transform -> projection onto the vocabulary -> cross-entropy
hidden states ------------------------> classifier ---------------------------------> cross-entropy, or another
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig

from .checks import IGNORED_LABEL, VOCABULARY_HINT, check_labels, has_label, hides_values, in_function_transform
from .chunked_loss import SmoothedTarget, positions_with_label, projected_cross_entropy_sum


LossAndLogits = tuple[Tensor | None, Tensor | None]
NO_SMOOTHING = SmoothedTarget(true_probability=1.0, other_probability=0.0, excluded_id=-1, entropy=0.0)


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
        return NO_SMOOTHING
    if smoothing_type == "uniform":
        other_probability = smoothing / vocab_size
        return SmoothedTarget(1 - smoothing + other_probability, other_probability, -1, 0.0)
    others = vocab_size - (2 if smoothing_type == "annotated" else 1)
    if others < 1:
        raise ValueError(f"`vocab_size` ({vocab_size}) leaves no other token for `label_smoothing` ({smoothing}).")
    other_probability = smoothing / others
    entropy = -((1 - smoothing) * math.log(1 - smoothing) + smoothing * math.log(other_probability))
    excluded_id = pad_token_id if smoothing_type == "annotated" else -1
    return SmoothedTarget(1 - smoothing, other_probability, excluded_id, entropy)


def token_loss(
    projection: Any,
    hidden_states: Tensor,
    labels: Tensor | None,
    *,
    training: bool,
    target: SmoothedTarget = NO_SMOOTHING,
    transform: Any = None,
    frozen_row: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    weights: Tensor | None = None,
    count: int | None = None,
) -> LossAndLogits:
    """Compute the loss of tokens, and their logits unless this is training with labels.

    In training, labelled tokens alone are projected, in chunks: their logits never exist whole. A projection that is
    more than a matrix product, as with an adapter, a hook or offloaded weights, is called as it is; so is every one
    under `torch.func`'s transforms, which can differentiate twice.

    Args:
        projection (`nn.Linear`): The projection onto the vocabulary.
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): The last layer's output.
        labels (`torch.Tensor` of shape `(batch, length)`, *optional*): True tokens; -100 where there is none.
        training (`bool`): Whether the model is in training mode.
        target (`SmoothedTarget`, *optional*): The distribution around the true token; no smoothing by default.
        transform (`Callable`, *optional*): What hidden states pass before the projection.
        frozen_row (`int`, *optional*): Row of the projection's weight, and of an adapter's, that gets no gradient.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): As in [`mean_loss`].
        weights (`torch.Tensor` of shape `(batch, length)`, *optional*): In training, what each token's loss is
            multiplied with; the loss is then their sum divided by `num_items_in_batch`.
        count (`int`, *optional*): The number of tokens with a label, if it is known; otherwise a GPU is waited for.

    Returns:
        `tuple[torch.Tensor | None, torch.Tensor | None]`: the loss of shape `()` in nats if there are labels, and the
        logits of shape `(batch, length, vocab)` unless this is training with labels.

    Raises:
        ValueError: if a label is outside the vocabulary, or `labels` has another shape than the tokens.
        TypeError: if labels are no integers.
    """
    transform = transform or nn.Identity()
    if labels is None:
        return None, _project(projection, transform(hidden_states), frozen_row)
    check_labels("labels", labels, tuple(hidden_states.shape[:2]), _outputs_of(projection), VOCABULARY_HINT)
    labels, logits = labels.long().to(hidden_states.device), None
    weights = None if weights is None else weights.to(hidden_states.device)
    if not training:
        logits = _project(projection, transform(hidden_states), frozen_row)
        loss_sum = cross_entropy_sum(logits, labels, target)
    else:
        states = (hidden_states,) if weights is None else (hidden_states, weights)
        ids, hidden_states, *rest = select_labelled(labels, *states, count=count)  # (tokens,), (tokens, d_model)
        hidden_states, terms = transform(hidden_states), (ids, target, rest[0] if rest else None)
        is_double = hidden_states.dtype == torch.float64  # which the chunks would round to float32
        if _is_plain(projection) and not is_double and not in_function_transform():
            weight = projection.weight if frozen_row is None else freeze_row(projection.weight, frozen_row)
            loss_sum = projected_cross_entropy_sum(hidden_states, weight, projection.bias, *terms, count=count)
        else:
            loss_sum = cross_entropy_sum(_project(projection, hidden_states, frozen_row), *terms)
    return mean_loss(loss_sum, has_label(labels).sum(), num_items_in_batch), logits


def at_least_float32(logits: Tensor) -> Tensor:
    """Convert numbers of fewer bits to float32, in which losses are computed.

    Args:
        logits (`torch.Tensor`): Any shape.

    Returns:
        `torch.Tensor` of the same shape: in float32, or as it is in float64.
    """
    return logits if logits.dtype == torch.float64 else logits.float()


def select_labelled(labels: Tensor, *states: Tensor, count: int | None = None) -> list[Tensor]:
    """Take out the tokens with a label. Compiled and transformed code keeps all, whatever their number.

    Args:
        labels (`torch.Tensor` of shape `(batch, length)`): True tokens; -100 where there is none.
        *states (`torch.Tensor` of shape `(batch, length, ...)`): What is known of each token.
        count (`int`, *optional*): The number of tokens with a label.

    Returns:
        `list[torch.Tensor]`: the labels of shape `(tokens,)` and the states of shape `(tokens, ...)`.
    """
    flat = [each.flatten(0, 1) for each in (labels, *states)]
    if hides_values(labels):
        return flat
    labelled = positions_with_label(flat[0], count)
    return [each.index_select(0, labelled) for each in flat]


def cross_entropy_sum(logits: Tensor, labels: Tensor, target: SmoothedTarget, weights: Tensor | None = None) -> Tensor:
    """Sum the cross-entropy of tokens with given logits.

    Args:
        logits (`torch.Tensor` of shape `(..., vocab)`): Logits.
        labels (`torch.Tensor` of shape `(...)`): True tokens; -100 where there is none.
        target (`SmoothedTarget`): The distribution around the true token.
        weights (`torch.Tensor` of shape `(...)`, *optional*): What each token's loss is multiplied with.

    Returns:
        `torch.Tensor` of shape `()`: the sum over all labelled tokens, in float32 or float64 and nats.
    """
    logits, labels = at_least_float32(logits), labels.to(logits.device)  # a model may be on several devices
    weights = None if weights is None else weights.to(logits.device)
    wanted = labels != IGNORED_LABEL
    losses = torch.logsumexp(logits, dim=-1) - expected_under(target, logits, labels.clamp(min=0)) - target.entropy
    losses = torch.where(wanted, losses, 0.0)
    return (losses if weights is None else losses * weights).sum()


def expected_under(target: SmoothedTarget, scores: Tensor, ids: Tensor) -> Tensor:
    """Average the scores of each token's vocabulary under its target: sum_v t_v s_v.

    Args:
        target (`SmoothedTarget`): The distribution t around the true token.
        scores (`torch.Tensor` of shape `(..., vocab)`): Scores s, such as logits.
        ids (`torch.LongTensor` of shape `(...)`): True tokens.

    Returns:
        `torch.Tensor` of shape `(...)`: the averages.
    """
    expected = (target.true_probability - target.other_probability) * scores.gather(-1, ids[..., None]).squeeze(-1)
    if target.other_probability > 0:
        expected = expected + target.other_probability * scores.sum(-1)
    if target.excluded_id >= 0:
        expected = expected - target.other_probability * scores[..., target.excluded_id]
    return expected


def freeze_row(matrix: Tensor, row: int, dim: int = 0) -> Tensor:
    """Keep one row of a matrix as it is: no gradient reaches it through the result.

    Args:
        matrix (`torch.Tensor`): The matrix.
        row (`int`): The row.
        dim (`int`, defaults to 0): The dimension that counts rows.

    Returns:
        `torch.Tensor` of the same shape: the same numbers.
    """

    def without_row(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.select(dim, row).zero_()  # `index_fill` would copy the row's number to the device
        return gradient

    matrix = matrix.view_as(matrix)
    if matrix.requires_grad:
        matrix.register_hook(without_row)
    return matrix


def _outputs_of(projection: Any) -> int:
    """Count the outputs of a projection, or of one inside of an adapter."""
    return projection.out_features if hasattr(projection, "out_features") else projection.weight.shape[0]


def _is_plain(projection: nn.Module) -> bool:
    """Whether a product with its weight is all that a projection does: no adapter, no hook, no offloaded weights."""
    projection = getattr(projection, "_orig_mod", projection)  # compiled by itself
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # pruning has one
    has_hooks = any(getattr(projection, kind) for kind in kinds)
    return type(projection) is nn.Linear and "forward" not in vars(projection) and not has_hooks


def _project(projection: Any, hidden_states: Tensor, frozen_row: int | None) -> Tensor:
    """Compute the logits (..., vocab)."""
    if frozen_row is None or not torch.is_grad_enabled():
        return projection(hidden_states)
    if _is_plain(projection):
        return nn.functional.linear(hidden_states, freeze_row(projection.weight, frozen_row), projection.bias)
    # An adapter's weights are frozen from outside. That is exact for a row of zeros, as that of padding.
    return freeze_row(projection(hidden_states), frozen_row, dim=-1)


def mean_loss(loss_sum: Tensor, count: Tensor | int, num_items_in_batch: Tensor | int | None) -> Tensor:
    """Divide a sum of losses by its number of labels, or by that of the whole optimizer step where it is given.

    Args:
        loss_sum (`torch.Tensor` of shape `()`): Sum over the labels of this batch.
        count (`torch.Tensor` or `int`): Number of these labels; a mean over none is 0.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): Labels of the whole step, from transformers' Trainer:
            accumulated batches and several processes then add up to the gradient of one large batch.

    Returns:
        `torch.Tensor` of shape `()`: the loss.
    """
    divisor = count if num_items_in_batch is None else num_items_in_batch
    if isinstance(divisor, Tensor):
        return loss_sum / divisor.to(loss_sum.device).clamp(min=1).view_as(loss_sum)
    return loss_sum / max(divisor, 1)


def label_loss(
    config: PreTrainedConfig, logits: Tensor, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
) -> Tensor | None:
    """Compute the loss of a classifier of whole inputs, by the config's problem type or one that fits the labels.

    Args:
        config (`PreTrainedConfig`): The model's config. If its `problem_type` is unset, one output is regression,
            integers are classes, and other numbers are several labels at once; it is then set.
        logits (`torch.Tensor` of shape `(batch, num_labels)`): Scores.
        labels (`torch.Tensor` of shape `(batch,)` or `(batch, num_labels)`, *optional*): Classes, or one number for
            each score.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): As in [`mean_loss`].

    Returns:
        `torch.Tensor` of shape `()`: the loss, as in [`classification_loss`], or the mean of squared errors or of each
        label's binary cross-entropy; `None` without labels.

    Raises:
        ValueError: if a label is no class, the shapes don't fit, or there is no classifier.
        TypeError: if classes are no integers.
    """
    if labels is None:
        return None
    labels = labels.to(logits.device)
    if config.num_labels == 0:
        raise ValueError("`labels` must not be given: the model has no classifier, as the config's `num_labels` is 0.")
    problem_type = config.problem_type or "regression"
    if config.problem_type is None and config.num_labels > 1:
        is_several = labels.is_floating_point() or labels.dtype == torch.bool
        problem_type = "multi_label_classification" if is_several else "single_label_classification"
    is_flat = logits.shape[-1] == 1 and labels.shape == logits.shape[:-1]
    if problem_type == "single_label_classification":
        loss = classification_loss(logits, labels, num_items_in_batch)
    elif labels.shape == logits.shape or is_flat:
        is_regression = problem_type == "regression"
        terms = nn.functional.mse_loss if is_regression else nn.functional.binary_cross_entropy_with_logits
        logits = at_least_float32(logits)
        loss_sum = terms(logits, labels.view_as(logits).to(logits.dtype), reduction="sum")
        loss = mean_loss(loss_sum, labels.numel(), num_items_in_batch)
    else:
        raise ValueError(
            f"`labels` must have shape {tuple(logits.shape)} for {problem_type}, got {tuple(labels.shape)}."
        )
    if config.problem_type is None and not hides_values(labels):
        config.problem_type = problem_type  # what is saved tells a pipeline how to read the logits
    return loss


def classification_loss(
    logits: Tensor, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
) -> Tensor | None:
    """Compute the cross-entropy of a classifier.

    Args:
        logits (`torch.Tensor` of shape `(..., num_labels)`): Scores.
        labels (`torch.Tensor` of shape `(...)`, *optional*): Classes, -100 is ignored. For logits of shape `(batch,
            num_labels)`, those of the batch in any shape.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): As in [`mean_loss`].

    Returns:
        `torch.Tensor` of shape `()`: the loss in nats; `None` without labels.

    Raises:
        ValueError: if a label is no class, or the shapes don't fit.
        TypeError: if classes are no integers.
    """
    if labels is None:
        return None
    labels = (labels.flatten() if logits.dim() == 2 else labels).to(logits.device)
    check_labels("labels", labels, tuple(logits.shape[:-1]), logits.shape[-1])
    labels = labels.long()
    loss_sum = nn.functional.cross_entropy(
        at_least_float32(logits.flatten(0, -2)), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return mean_loss(loss_sum, has_label(labels).sum(), num_items_in_batch)
