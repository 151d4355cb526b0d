"""What every test runs under: no network, own caches, fixed seeds, and one thread unless the environment says more."""

import atexit
import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest


# The libraries read these when they are imported, so they are set before any of them is; the processes that a test
# starts inherit them.
_CACHE = tempfile.mkdtemp(prefix="hf_vanilla_tests_")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ["HF_HOME"] = _CACHE
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402
import transformers  # noqa: E402


# Also fills memory that is not initialised with NaN, so a test that reads it fails every time.
torch.use_deterministic_algorithms(True)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker for each core that this process may use, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pytest_collection_finish() -> None:
    """Have the garbage collector leave out what is imported: every training collects, which would take a second."""
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start every test from the same seeds of Python, NumPy and torch."""
    transformers.set_seed(0)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Leave the loggers as they were: a script that runs in the tests' process changes the log output."""
    loggers = [logging.getLogger(name) for name in (None, "transformers", "httpx")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (level, propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture
def no_shortcuts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that has layers compute every position, padding and positions that no head reads included."""
    from hf_vanilla.models import packing

    def switch_off(padding: bool = True, outputs: bool = True) -> None:
        if padding:
            monkeypatch.setattr(packing, "MIN_PADDING_SHARE", 1.0)
        if outputs:
            monkeypatch.setattr(packing, "MAX_OUTPUT_SHARE", 0.0)

    return switch_off


@pytest.fixture
def fed_positions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the positions that every feed-forward network sees, one number a call."""
    from hf_vanilla.models.layers import PositionwiseFeedForward

    counts = []
    forward = PositionwiseFeedForward.forward

    def counted(self, hidden_states):
        counts.append(hidden_states.shape[0] * hidden_states.shape[1])
        return forward(self, hidden_states)

    monkeypatch.setattr(PositionwiseFeedForward, "forward", counted)
    return counts


@pytest.fixture
def assert_invariant(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Return a function that compares results and records the greatest difference, for the table of invariances.

    A difference is in parts of the greatest value of its tensor, or of 1 where all are smaller. Float32 rounds at
    1.2e-7 of a value: some hundred operations in another order are within the tolerance.
    """

    def check(what: str, family: str, actual: object, expected: object, tolerance: float = 1e-5) -> None:
        actual, expected = flat("", actual), flat("", expected)
        assert actual.keys() == expected.keys()
        seen = 0.0
        for name, wanted in expected.items():
            assert actual[name].shape == wanted.shape
            if wanted.numel():
                difference = (actual[name] - wanted).abs().max() / wanted.abs().max().clamp(min=1)
                seen = max(seen, difference.item())
        record_property("invariance", [what, family, tolerance, seen])
        assert seen <= tolerance

    def flat(name: str, value: object) -> dict[str, torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return {name: value.detach()}
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: each for inner, part in items for key, each in flat(f"{name}/{inner}", part).items()}

    return check
