"""How well masked tokens and next sentences are predicted."""

from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction

from ..models.checks import IGNORED_LABEL


class PretrainingMetrics:
    """`compute_metrics` of a pre-training, with what it needs of each batch as `preprocess_logits_for_metrics`.

    ```python
    metrics = PretrainingMetrics()
    Trainer(..., compute_metrics=metrics, preprocess_logits_for_metrics=metrics.preprocess_logits)
    ```

    For models with both heads, and for those of masked tokens alone. The logits of the whole vocabulary are reduced
    batch by batch, so that memory does not grow with the evaluation set.
    """

    def preprocess_logits(self, logits: Any, labels: Any) -> tuple[torch.Tensor, ...]:
        """Reduce the outputs for one batch.

        Args:
            logits (`torch.Tensor` or `tuple`): Logits `(batch, length, vocab)`; of a model with both heads also
                `(batch, 2)`.
            labels (`torch.Tensor` or `tuple`): True tokens `(batch, length)`, -100 where there is none; also
                next-sentence labels `(batch,)`.

        Returns:
            `tuple[torch.Tensor, ...]`: loss of each token in nats and whether it is right, both `(batch, length)`, and
            whether the next sentence is right, `(batch,)`.
        """
        token_logits, *next_logits = logits if isinstance(logits, tuple | list) else (logits,)
        token_labels, *next_labels = labels if isinstance(labels, tuple | list) else (labels,)
        is_masked = token_labels != IGNORED_LABEL
        wanted, scores = token_labels[is_masked], token_logits[is_masked].float()  # (masked,), (masked, vocab)
        losses, is_right = (torch.zeros(token_labels.shape, device=scores.device) for _ in range(2))
        losses[is_masked] = torch.nn.functional.cross_entropy(scores, wanted, reduction="none")
        is_right[is_masked] = (scores.argmax(-1) == wanted).float()
        reduced = losses, is_right
        if not next_logits or not next_labels:
            return reduced
        return (*reduced, (next_logits[0].argmax(-1) == next_labels[0].flatten()).float())

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        """Average over tokens and over pairs.

        Args:
            prediction (`EvalPrediction`): What `preprocess_logits` gave, and the labels.

        Returns:
            `dict[str, float]`: `mlm_loss` in nats per masked token, `mlm_accuracy`, and where there are next-sentence
            labels `nsp_accuracy`, both from 0 to 1.
        """
        losses, is_right, *next_is_right = prediction.predictions
        labels = prediction.label_ids
        is_masked = (labels[0] if isinstance(labels, tuple | list) else labels) != IGNORED_LABEL
        metrics = {
            "mlm_loss": float(np.mean(losses[is_masked], dtype=np.float64)),
            "mlm_accuracy": float(np.mean(is_right[is_masked], dtype=np.float64)),
        }
        if next_is_right:
            metrics["nsp_accuracy"] = float(np.mean(next_is_right[0], dtype=np.float64))
        return metrics
