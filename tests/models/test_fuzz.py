"""Random configs, inputs, options and files: only named errors come out, and what is accepted gives numbers."""

import os

import pytest
from hostile_inputs import KINDS, outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


# `make fuzz` asks for thousands of cases of each kind.
CASES = int(os.environ.get("FUZZ_CASES", "25"))
fuzz = settings(
    max_examples=CASES,
    deadline=None,
    derandomize="FUZZ_CASES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.promise("anything at random")
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@fuzz
def test_hostile_input_is_refused_or_computes(kind, data):
    assert outcome(data.draw(KINDS[kind]))
