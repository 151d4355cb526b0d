"""What stock `generate()` lacks: the paper's beam search, and translating many texts at once."""

from .beam_search import beam_search, length_penalty_of
from .translation import Hypothesis, translate


__all__ = ["Hypothesis", "beam_search", "length_penalty_of", "translate"]
