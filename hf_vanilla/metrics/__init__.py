"""Scores of translations and of pre-training, without a network."""

from .bleu import Bleu
from .chrf import ChrF
from .pretraining import PretrainingMetrics
from .translation import TranslationMetrics


__all__ = ["Bleu", "ChrF", "PretrainingMetrics", "TranslationMetrics"]
