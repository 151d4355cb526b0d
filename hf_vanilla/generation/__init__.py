"""What stock `generate()` lacks: the paper's beam search, forced scoring, word alignments, translating whole texts."""

from .alignment import WordAlignment, beam_attention, forced_attention, word_alignments
from .beam_search import beam_search, length_penalty_of
from .scoring import ScoreOutput, TextScore, labels_of_beams, score, score_texts
from .translation import Translation, load_translator, translate


__all__ = [
    "ScoreOutput",
    "TextScore",
    "Translation",
    "WordAlignment",
    "beam_attention",
    "beam_search",
    "forced_attention",
    "labels_of_beams",
    "length_penalty_of",
    "load_translator",
    "score",
    "score_texts",
    "translate",
    "word_alignments",
]
