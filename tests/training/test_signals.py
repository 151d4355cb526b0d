"""Trainings that get SIGTERM or Ctrl-C: saved, ended in time with the right code, and resumed to the same bits."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_with_signals
import torch
import transformers
from packaging.version import Version

from hf_vanilla.training import StopOnSignalCallback, checkpoint_to_resume, why_not_resumable


SCRIPT = Path(run_with_signals.__file__)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def start(folder, place="nowhere", kind="vanilla", launcher=()):
    command = [sys.executable, *launcher, SCRIPT, kind, folder, place]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=dict(os.environ), **streams)


def end(process):
    output, errors = process.communicate(timeout=180)
    return process.returncode, output + errors


def weights_after(folder, **options):
    code, output = end(start(folder, **options))
    assert code == 0, output[-4000:]
    return torch.load(folder / "weights.pt")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return {kind: weights_after(tmp_path_factory.mktemp(kind), kind=kind) for kind in ("vanilla", "stock")}


@pytest.mark.parametrize(
    ("number", "place", "kind", "code", "step"),
    [
        (signal.SIGTERM, "step", "vanilla", 143, 3),
        (signal.SIGTERM, "step", "stock", 143, 3),
        (signal.SIGINT, "step", "vanilla", 130, 3),
        (signal.SIGTERM, "save", "vanilla", 143, 3),
        (signal.SIGINT, "evaluation", "vanilla", 130, 3),
        (signal.SIGTERM, "long step", "vanilla", 143, None),  # the grace is over before the step
        (signal.SIGTERM, "data", "vanilla", 143, None),
    ],
)
def test_signal_saves_and_ends_within_the_grace(tmp_path, expected, number, place, kind, code, step):
    process = start(tmp_path, place, kind)
    assert process.stdout.readline() == f"{place}\n"
    process.send_signal(number)
    since = time.monotonic()
    ended = end(process)
    # Python ends an uncaught KeyboardInterrupt with the signal itself, which a shell reports as 130.
    assert (ended[0] if ended[0] > 0 else 128 - ended[0]) == code, ended[1][-4000:]
    assert time.monotonic() - since < 20  # the grace of 3 s, and a busy machine
    found = checkpoint_to_resume(tmp_path)
    assert found == (None if step is None else str(tmp_path / f"checkpoint-{step}"))
    actual = weights_after(tmp_path, kind=kind)
    assert all(torch.equal(actual[name], weight) for name, weight in expected[kind].items())


def test_second_signal_ends_at_once(tmp_path):
    process = start(tmp_path, "long step")
    assert process.stdout.readline() == "long step\n"
    process.send_signal(signal.SIGINT)
    while "once more ends at once" not in process.stderr.readline():
        pass
    since = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, output = end(process)
    assert (code, checkpoint_to_resume(tmp_path)) == (143, None)
    assert time.monotonic() - since < 2.5  # the grace is 3 s
    assert "SIGTERM: second signal; ended without saving this step." in output


@pytest.mark.slow
@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="transformers 5.17 can't resume several processes on CPU",
)
def test_two_processes_stop_at_the_same_step(tmp_path):
    expected = weights_after(tmp_path / "whole", launcher=TORCHRUN)
    process = start(tmp_path / "run", "step", launcher=TORCHRUN)
    assert process.stdout.readline() == "step\n"
    process.send_signal(signal.SIGTERM)  # torchrun passes it on
    code, output = end(process)
    assert code != 0
    assert output.count("SIGTERM: saved the state of step 3") == 2
    assert why_not_resumable(tmp_path / "run" / "checkpoint-3") is None
    code, output = end(start(tmp_path / "run"))
    assert code == 1
    assert "the number of processes is 1, not 2" in output
    actual = weights_after(tmp_path / "run", launcher=TORCHRUN)
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())


def test_handlers_are_restored():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    callback = StopOnSignalCallback()
    args = transformers.TrainingArguments(use_cpu=True, report_to="none")
    callback.on_train_begin(args, transformers.TrainerState(), transformers.TrainerControl())
    assert signal.getsignal(signal.SIGTERM) == callback._receive
    callback.on_train_end(args, transformers.TrainerState(), transformers.TrainerControl())
    assert {number: signal.getsignal(number) for number in before} == before
    with pytest.raises(ValueError, match="`grace` must be a positive number of seconds, got 0"):
        StopOnSignalCallback(grace=0)
