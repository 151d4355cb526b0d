"""R-Drop: an encoder-decoder that gives like predictions whatever its dropout drops (Liang et al. 2021).

each pair twice -> model -> two predictions of each token: mean of their cross-entropies + weight / 2 * divergence
"""

from typing import Any

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from ..models.checks import has_label
from ..models.configuration_vanilla_transformer import VanillaTransformerConfig
from ..models.loss import cross_entropy_sum, mean_loss, smoothed_target


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
        halves = outputs.logits.split(len(labels))
        predictions = [half[is_labelled].float().log_softmax(-1) for half in halves]  # (tokens, vocab) each
        smoothing = config.label_smoothing if len(halves) == 2 else 0.0
        target = smoothed_target(smoothing, config.label_smoothing_type, config.vocab_size, config.pad_token_id)
        losses = [cross_entropy_sum(each, labels[is_labelled], target) for each in predictions]
        loss_sum = torch.stack(losses).mean()
        if len(halves) == 2:
            loss_sum = loss_sum + self.weight / 2 * _divergence(*predictions)
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


def _divergence(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Sum the Kullback-Leibler divergence of log-probabilities (tokens, vocab): the mean of both directions."""
    there, back = (
        nn.functional.kl_div(one, other, reduction="sum", log_target=True)
        for one, other in ((first, second), (second, first))
    )
    return (there + back) / 2
