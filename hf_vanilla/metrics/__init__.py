"""Scores of translations, as `evaluate.Metric` classes that need no network."""

from .bleu import Bleu
from .chrf import ChrF
from .translation import TranslationMetrics


__all__ = ["Bleu", "ChrF", "TranslationMetrics"]
