"""What several tests of models look at."""

import pytest

from hf_vanilla.models.layers import PositionwiseFeedForward


@pytest.fixture
def fed_positions(monkeypatch):
    """Count the positions that every feed-forward network sees, one number a call."""
    counts = []
    forward = PositionwiseFeedForward.forward

    def counted(self, hidden_states):
        counts.append(hidden_states.shape[0] * hidden_states.shape[1])
        return forward(self, hidden_states)

    monkeypatch.setattr(PositionwiseFeedForward, "forward", counted)
    return counts
