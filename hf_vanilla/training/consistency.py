"""R-Drop: an encoder-decoder that gives like predictions whatever its dropout drops (Liang et al. 2021).

each pair twice -> model -> two predictions of each token: mean of their cross-entropies + weight / 2 * divergence
"""

from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from ..models.checks import has_label
from ..models.chunked_loss import CHUNK_LOGITS, SmoothedTarget
from ..models.configuration_vanilla_transformer import VanillaTransformerConfig
from ..models.loss import cross_entropy_sum, expected_under, mean_loss, smoothed_target


# Number of logits of a prediction that are worked on at once on a CPU: 256 KiB in float32.
BLOCK_SIZE = 2**16


class ConsistencyLoss:
    """Cross-entropy and divergence of two predictions, as `compute_loss_func` of transformers' trainer takes it.

    The model must get every pair of the labels twice, in two halves of the batch ([`twice`]), and no labels. A batch
    without a second half, as in evaluation, gives the mean cross-entropy without label smoothing.

    Args:
        config (`VanillaTransformerConfig`): The model's config, for its label smoothing.
        weight (`float`): The paper's alpha. The divergence is the mean of those from one prediction to the other, in
            both directions; half of it is added for a weight of 1.

    Raises:
        ValueError: if the config is another model's.

    Source: Liang et al. 2021, "R-Drop: Regularized Dropout for Neural Networks", equations 2 and 3, divided by 2.
    """

    def __init__(self, config: PreTrainedConfig, weight: float):
        if not isinstance(config, VanillaTransformerConfig):
            raise ValueError(
                f"`consistency_weight` ({weight}) is for a `VanillaTransformerForConditionalGeneration`, got a "
                f"{config.model_type}; leave it at 0."
            )
        self.config = config
        self.weight = weight

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Compute the loss.

        Args:
            outputs (`ModelOutput`): With `logits` of shape `(2 * batch, tgt_len, vocab)`.
            labels (`torch.Tensor` of shape `(batch, tgt_len)`): True tokens; -100 where there is none.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): Labels of the whole update.

        Returns:
            `torch.Tensor` of shape `()`: the loss in nats.
        """
        config, is_labelled = self.config, has_label(labels)
        is_twice = len(outputs.logits) == 2 * len(labels) > 0
        smoothing = config.label_smoothing if is_twice else 0.0
        target = smoothed_target(smoothing, config.label_smoothing_type, config.vocab_size, config.pad_token_id)
        if is_twice:
            rows = is_labelled.flatten().nonzero()[:, 0]  # once: an accelerator is waited for to count them
            token_ids = labels.flatten().index_select(0, rows)
            # (2, batch * tgt_len, vocab)
            predictions = outputs.logits.unflatten(0, (2, len(labels))).flatten(1, 2)
            loss_sum = _ConsistencySum.apply(predictions, rows, token_ids, target, self.weight)
        else:
            loss_sum = cross_entropy_sum(outputs.logits, labels, target)
        return mean_loss(loss_sum, is_labelled.sum(), num_items_in_batch)


def twice(inputs: dict[str, Any]) -> dict[str, Any]:
    """Repeat each row of a batch, in a second half of it.

    Args:
        inputs (`dict[str, Any]`): Tensors of shape `(batch, ...)`, and others, which stay as they are.

    Returns:
        `dict[str, Any]`: tensors of shape `(2 * batch, ...)`, but for `labels`; without a collator's `mask_sizes`.
    """
    return {
        name: torch.cat((value, value)) if isinstance(value, torch.Tensor) and name != "labels" else value
        for name, value in inputs.items()
        if name != "mask_sizes"
    }


class _ConsistencySum(torch.autograd.Function):
    """Sum the loss of tokens, and compute its gradient on the way, some tokens at a time.

    With p and q the predictions, t the target, D = KL(p, q) + KL(q, p) and w the weight, the loss of a token is
    (H(t, p) + H(t, q)) / 2 + w / 4 * D. D's gradient with respect to p's logits is
    p - q + p * (log p - log q - KL(p, q)), and the same with p and q exchanged.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
        target: SmoothedTarget,
        weight: float,
    ) -> torch.Tensor:
        loss_sum = torch.zeros((), dtype=torch.float32, device=logits.device)
        gradients, share = torch.zeros_like(logits), weight / 4  # (2, tokens of the batch, vocab)
        step = max(1, (BLOCK_SIZE if logits.device.type == "cpu" else CHUNK_LOGITS) // logits.shape[2])
        for block, ids in zip(rows.split(step), token_ids.split(step), strict=True):
            log_p, log_q = (half.index_select(0, block).float().log_softmax(-1) for half in logits)  # (rows, vocab)
            p, q, difference = log_p.exp(), log_q.exp(), log_p - log_q
            from_p, from_q = torch.linalg.vecdot(p, difference), -torch.linalg.vecdot(q, difference)  # KL
            loss_sum += share * (from_p + from_q).sum() - len(block) * target.entropy
            loss_sum -= sum(expected_under(target, each, ids).sum() for each in (log_p, log_q)) / 2
            difference *= share
            for half, probabilities, other, divergence, signed in (
                (0, p, q, from_p, difference),
                (1, q, p, from_q, -difference),
            ):
                gradient = (signed + (0.5 + share * (1 - divergence))[:, None]).mul_(probabilities)
                gradient.sub_(other, alpha=share)
                _subtract_target(gradient, ids, target)
                gradients[half].index_copy_(0, block, gradient.to(gradients.dtype))
        ctx.save_for_backward(gradients)
        return loss_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.saved_tensors[0] * grad_output, None, None, None, None


def _subtract_target(gradient: torch.Tensor, ids: torch.Tensor, target: SmoothedTarget) -> None:
    """Subtract half of the target from rows (rows, vocab) with the true tokens (rows,), in place."""
    if target.other_probability > 0:
        gradient.sub_(target.other_probability / 2)
    if target.excluded_id >= 0:
        gradient[:, target.excluded_id] += target.other_probability / 2
    rest = (target.true_probability - target.other_probability) / 2
    gradient.scatter_add_(1, ids[:, None], gradient.new_full((len(ids), 1), -rest))
