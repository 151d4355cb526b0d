"""Metrics of masked language modeling and next-sentence prediction."""

from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction

from ..models.checks import IGNORED_LABEL


def loss_by_position(prediction: EvalPrediction, width: int = 1) -> dict[str, Any]:
    """Average the loss of masked tokens over each position, or over several positions in a row.

    Args:
        prediction (`EvalPrediction`): Outputs of `PretrainingMetrics.preprocess_logits`, and the labels.
        width (`int`): Number of positions that are averaged together.

    Returns:
        `dict[str, Any]`: `width`; `loss`, a list of the mean losses in nats, for positions 0 to `width` - 1 and so on,
        `None` where no token was masked; and `tokens`, a list of the numbers of masked tokens.

    Raises:
        ValueError: if `width` is below 1.
    """
    if width < 1:
        raise ValueError(f"`width` must be at least 1 position, got {width}.")
    losses, labels = prediction.predictions[0], prediction.label_ids
    is_masked = (labels[0] if isinstance(labels, tuple | list) else labels) != IGNORED_LABEL
    numbers = np.arange(losses.shape[1]) // width
    tokens = np.bincount(numbers, is_masked.sum(axis=0))
    totals = np.bincount(numbers, np.where(is_masked, losses, 0).sum(axis=0, dtype=np.float64))
    means = [float(total / count) if count else None for total, count in zip(totals, tokens, strict=True)]
    return {"width": width, "loss": means, "tokens": tokens.astype(int).tolist()}


class PretrainingMetrics:
    """`compute_metrics` for pre-training, with its `preprocess_logits_for_metrics`.

    ```python
    metrics = PretrainingMetrics()
    Trainer(..., compute_metrics=metrics, preprocess_logits_for_metrics=metrics.preprocess_logits)
    ```

    For models with both heads, or with the masked language modeling head alone. Logits of the whole vocabulary are
    reduced batch by batch, so that the memory of an evaluation stays small.
    """

    def preprocess_logits(self, logits: Any, labels: Any) -> tuple[torch.Tensor, ...]:
        """Reduce the outputs of one batch.

        Args:
            logits (`torch.Tensor` or `tuple`): Logits of shape `(batch, length, vocab)`; with both heads also of shape
                `(batch, 2)`.
            labels (`torch.Tensor` or `tuple`): Masked tokens of shape `(batch, length)`, -100 elsewhere; with both
                heads also next-sentence labels of shape `(batch,)`.

        Returns:
            `tuple[torch.Tensor, ...]`: loss of each token in nats and whether its prediction is correct, both of shape
            `(batch, length)`, and with both heads whether the next-sentence prediction is correct, of shape
            `(batch,)`.
        """
        token_logits, *next_logits = logits if isinstance(logits, tuple | list) else (logits,)
        token_labels, *next_labels = labels if isinstance(labels, tuple | list) else (labels,)
        is_masked = token_labels != IGNORED_LABEL
        target_ids, logits = token_labels[is_masked], token_logits[is_masked].float()  # (masked,), (masked, vocab)
        losses, is_correct = (torch.zeros(token_labels.shape, device=logits.device) for _ in range(2))
        losses[is_masked] = torch.nn.functional.cross_entropy(logits, target_ids, reduction="none")
        is_correct[is_masked] = (logits.argmax(-1) == target_ids).float()
        reduced = losses, is_correct
        if not next_logits or not next_labels:
            return reduced
        return (*reduced, (next_logits[0].argmax(-1) == next_labels[0].flatten()).float())

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        """Average over tokens and pairs.

        Args:
            prediction (`EvalPrediction`): Outputs of `preprocess_logits`, and the labels.

        Returns:
            `dict[str, float]`: `mlm_loss` in nats per masked token, `mlm_accuracy`, and with both heads, unless all
            next-sentence labels are -100, `nsp_accuracy`, both from 0 to 1.

        Raises:
            ValueError: if no token is masked.
        """
        losses, is_correct, *next_is_correct = prediction.predictions
        labels = prediction.label_ids
        is_masked = (labels[0] if isinstance(labels, tuple | list) else labels) != IGNORED_LABEL
        if not is_masked.any():
            raise ValueError("`labels` of the evaluation data must have masked tokens, but all of them are -100.")
        metrics = {
            "mlm_loss": float(np.mean(losses[is_masked], dtype=np.float64)),
            "mlm_accuracy": float(np.mean(is_correct[is_masked], dtype=np.float64)),
        }
        has_label = np.ravel(labels[1]) != IGNORED_LABEL if next_is_correct else np.zeros(0, dtype=bool)
        if has_label.any():
            metrics["nsp_accuracy"] = float(np.mean(next_is_correct[0][has_label], dtype=np.float64))
        return metrics
