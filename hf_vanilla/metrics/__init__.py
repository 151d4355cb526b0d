"""Metrics of translation, pre-training and fine-tuning, computed without a network."""

from .bleu import Bleu
from .chrf import ChrF
from .classification import ClassificationMetrics
from .corpus_scores import comet_score, corpus_scores
from .perplexity import evaluate_documents
from .pretraining import PretrainingMetrics, loss_by_position
from .token_classification import EntityMetrics
from .translation import TranslationMetrics


__all__ = [
    "Bleu",
    "ChrF",
    "ClassificationMetrics",
    "EntityMetrics",
    "PretrainingMetrics",
    "TranslationMetrics",
    "comet_score",
    "corpus_scores",
    "evaluate_documents",
    "loss_by_position",
]
