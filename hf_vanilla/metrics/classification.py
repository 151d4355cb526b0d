"""Metrics of classification and regression, with those of GLUE."""

from typing import Any

import numpy as np
from transformers import EvalPrediction
from transformers.utils import logging

from ..models.checks import IGNORED_LABEL


logger = logging.get_logger(__name__)


class ClassificationMetrics:
    """Metrics of classification or regression: `Trainer(..., compute_metrics=ClassificationMetrics(problem_type))`.

    - Classes: `accuracy`, `f1` (of class 1 for two classes, else the mean over classes) and `matthews`. Labels of -100
      don't count, as in the loss. A warning is logged if all predictions are one class and the labels are not.
    - Multi-label: `f1_micro`, `f1_macro`, and `accuracy` of all labels together; a logit above 0 predicts a label.
    - Regression: `pearson`, `spearman` and `mse`.

    Args:
        problem_type (`str`): `"single_label_classification"`, `"multi_label_classification"` or `"regression"`.

    Raises:
        ValueError: if the type is unknown.
        ImportError: if scikit-learn and scipy are not installed.
    """

    def __init__(self, problem_type: str) -> None:
        try:
            import scipy.stats
            import sklearn.metrics
        except ImportError as error:
            raise ImportError('These metrics need more packages: pip install "hf_vanilla[metrics]"') from error
        scores = {
            "single_label_classification": self._score_classes,
            "multi_label_classification": self._score_several_labels,
            "regression": self._score_regression,
        }
        if problem_type not in scores:
            raise ValueError(f"`problem_type` must be one of {', '.join(scores)}; got {problem_type!r}.")
        self._score = scores[problem_type]
        self._sklearn: Any = sklearn.metrics
        self._scipy: Any = scipy.stats

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        """Compute the metrics of one evaluation.

        Args:
            prediction (`EvalPrediction`): `predictions`, logits of shape `(examples, num_labels)`, or a tuple that
                begins with them; and `label_ids`, a class for each example, or as many numbers as logits. Further
                dimensions of size 1 make no difference.

        Returns:
            `dict[str, float]`: the metrics, from 0 to 1 (correlations from -1).

        Raises:
            ValueError: if labels and logits differ in number, or all classes are -100.
        """
        logits = prediction.predictions
        logits = logits[0] if isinstance(logits, tuple) else logits
        return self._score(np.asarray(logits), np.asarray(prediction.label_ids))

    def _score_classes(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        predicted = logits.argmax(-1).reshape(-1)
        labels = _in_shape(labels, predicted.shape)
        predicted, labels = predicted[labels != IGNORED_LABEL], labels[labels != IGNORED_LABEL]
        if not labels.size:
            raise ValueError(f"`label_ids` must have at least one class that is not {IGNORED_LABEL}, but has none.")
        average = "binary" if logits.shape[-1] == 2 else "macro"
        if len(labels) > 1 and np.ptp(predicted) == 0 and np.ptp(labels) > 0:
            logger.warning(
                f"All {len(labels)} predictions are class {predicted[0]}: the model tells no classes apart. Train "
                "longer (--num_train_epochs) or with another --learning_rate: a small model needs a higher one, a "
                "large one that has diverged a lower one."
            )
        return {
            "accuracy": float((predicted == labels).mean()),
            "f1": float(self._sklearn.f1_score(labels, predicted, average=average, zero_division=0)),
            "matthews": float(self._sklearn.matthews_corrcoef(labels, predicted)),
        }

    def _score_several_labels(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        predicted, labels = (logits > 0).astype(int), (_in_shape(labels, logits.shape) > 0.5).astype(int)
        only = [1] if labels.shape[-1] == 1 else None  # else scikit-learn scores the absence of one label, too
        f1 = {
            f"f1_{average}": float(
                self._sklearn.f1_score(labels, predicted, labels=only, average=average, zero_division=0)
            )
            for average in ("micro", "macro")
        }
        return {**f1, "accuracy": float((predicted == labels).all(-1).mean())}

    def _score_regression(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        predicted, labels = logits.reshape(-1), _in_shape(labels, (logits.size,))
        if np.ptp(predicted) == 0 or np.ptp(labels) == 0:  # a constant has no correlation
            pearson = spearman = 0.0
        else:
            pearson = float(self._scipy.pearsonr(predicted, labels).statistic)
            spearman = float(self._scipy.spearmanr(predicted, labels).statistic)
        return {"pearson": pearson, "spearman": spearman, "mse": float(((predicted - labels) ** 2).mean())}


def _in_shape(labels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Give labels the shape of what is predicted, so that comparing both never broadcasts."""
    if [size for size in labels.shape if size != 1] != [size for size in shape if size != 1]:
        raise ValueError(f"`label_ids` must have shape {shape} to fit the logits, got {labels.shape}.")
    return labels.reshape(shape)
