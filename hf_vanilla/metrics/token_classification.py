"""Metrics of named entity recognition, computed on whole entities."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import EvalPrediction
from transformers.utils import logging

from ..models.checks import IGNORED_LABEL


logger = logging.get_logger(__name__)
# seqeval's rows that are not types.
_AVERAGES = {"micro avg", "macro avg", "weighted avg"}
# Prefixes of tags as seqeval knows them, also of BMES, BILOU and BMEWO, which it does not know.
_LETTERS = {"B": "B", "I": "I", "E": "E", "S": "S", "M": "I", "L": "E", "U": "S", "W": "S"}
_TAG = re.compile(f"([{''.join(_LETTERS)}])[-_](.+)")


class EntityMetrics:
    """Metrics of BIO tags, computed by seqeval: `Trainer(..., compute_metrics=EntityMetrics(names))`.

    The prefixes of BIOES, BMES, BILOU and BMEWO are known, too. Tags without a prefix, such as parts of speech, are
    entities of one word each.

    Args:
        names (`Sequence[str]`): The tags, in the order of their ids.

    Raises:
        ImportError: if seqeval is not installed.

    Source: Tjong Kim Sang & De Meulder 2003 (CoNLL-2003): an entity is correct if its type and both ends are.
    """

    def __init__(self, names: Sequence[str]) -> None:
        try:
            import seqeval.metrics
        except ImportError as error:
            raise ImportError('These metrics need more packages: pip install "hf_vanilla[metrics]"') from error
        self.names = list(names)
        self._tags = _tags_of_seqeval(self.names)
        self._seqeval: Any = seqeval.metrics

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        """Compute the metrics of one evaluation.

        Args:
            prediction (`EvalPrediction`): `predictions`, logits of shape `(examples, length, num_labels)`; and
                `label_ids` of shape `(examples, length)`, -100 where there is no tag.

        Returns:
            `dict[str, float]`: `precision`, `recall` and `f1` of all entities, the same of each type, such as
            `PER_f1`, and `accuracy` of tags, from 0 to 1. A warning is logged if no entity is right.

        Raises:
            ValueError: if no position has a tag.
        """
        logits = prediction.predictions
        predicted = np.asarray(logits[0] if isinstance(logits, tuple) else logits).argmax(-1)
        labels = np.asarray(prediction.label_ids)
        found, wanted = (
            [
                [self._tags[tag] for tag, label in zip(row, true, strict=True) if label != IGNORED_LABEL]
                for row, true in zip(tags, labels, strict=True)
            ]
            for tags in (predicted, labels)
        )
        if not any(wanted):
            raise ValueError(f"`label_ids` must have at least one tag that is not {IGNORED_LABEL}, but has none.")
        scores = {
            "precision": float(self._seqeval.precision_score(wanted, found, zero_division=0)),
            "recall": float(self._seqeval.recall_score(wanted, found, zero_division=0)),
            "f1": float(self._seqeval.f1_score(wanted, found, zero_division=0)),
            "accuracy": float(self._seqeval.accuracy_score(wanted, found)),
        }
        is_found, is_wanted = (any(tag != "O" for row in rows for tag in row) for rows in (found, wanted))
        if is_wanted and scores["f1"] == 0:
            problem = "none of the entities that the model finds is right" if is_found else "the model finds no entity"
            logger.warning(
                f"F1 is 0: {problem}. Train longer (--num_train_epochs) or with a higher --learning_rate; a small "
                "model needs both."
            )
        if is_found or is_wanted:
            report = self._seqeval.classification_report(wanted, found, output_dict=True, zero_division=0)
            for kind in sorted(report.keys() - _AVERAGES):
                row = report[kind]
                scores |= {f"{kind}_precision": float(row["precision"]), f"{kind}_recall": float(row["recall"])}
                scores[f"{kind}_f1"] = float(row["f1-score"])
        return scores


def _tags_of_seqeval(names: Sequence[str]) -> list[str]:
    """Return the tags as seqeval reads them, which takes the first letter of any but O for that of a scheme."""
    if set(names) <= {"O", *_LETTERS}:  # tags without types
        return [_LETTERS.get(name, name) for name in names]
    tags = []
    for name in names:
        found = _TAG.fullmatch(name)
        if found:
            tags.append(f"{_LETTERS[found[1]]}-{found[2]}")
        else:
            tags.append(name if name == "O" else f"B-{name}")
    return tags
