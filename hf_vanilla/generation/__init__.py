"""Beam search of the paper, forced scoring, word alignments, and translation of whole texts."""

from ..models.alignment import WordAlignment, forced_attention, word_alignments
from ..models.translating import SearchOptions, Translation, length_penalty_of
from .beam_attention import beam_attention
from .beam_search import beam_search
from .cpu_layers import fast_model
from .export import export_to_ctranslate2
from .scoring import ScoreOutput, TextScore, labels_of_beams, score, score_texts
from .step_graphs import StepGraphs
from .translation import load_translator, translate


__all__ = [
    "ScoreOutput",
    "SearchOptions",
    "StepGraphs",
    "TextScore",
    "Translation",
    "WordAlignment",
    "beam_attention",
    "beam_search",
    "export_to_ctranslate2",
    "fast_model",
    "forced_attention",
    "labels_of_beams",
    "length_penalty_of",
    "load_translator",
    "score",
    "score_texts",
    "translate",
    "word_alignments",
]
