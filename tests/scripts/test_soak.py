"""The soak, with few cases: all pass, and what it must find it does find."""

import importlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from script_runner import SCRIPTS
from transformers import __version__


FOLDER = SCRIPTS / "benchmark"


@pytest.fixture
def script(monkeypatch):
    """Import a module of the soak as its own process would."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.mark.promise("kills at random", "killed inside a save", "flipped bit", "tensor missing", "anything at random")
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="kills at system calls need strace")
@pytest.mark.skipif(Version(__version__) < Version("5.18"), reason="two processes on CPU can't resume before")
def test_quick_soak_passes_and_continues(tmp_path):
    command = [sys.executable, str(FOLDER / "soak.py"), "--folder", str(tmp_path / "soak"), "--damages", "5"]
    command += ["--hostile", "50", "--output_file", str(tmp_path / "soak.json"), "--kills"]
    for kills in (3, 5):
        finished = subprocess.run([*command, str(kills)], capture_output=True, text=True, timeout=600, check=False)
        assert finished.returncode == 0, finished.stderr[-3000:]
        report = json.loads((tmp_path / "soak.json").read_text())
        assert [report[part]["cases"] for part in ("kills", "damages", "hostile")] == [kills, 5, 50]
        assert sum(report["kills"]["outcomes"].values()) == kills
        assert report["failures"] == []
    assert report["kills"]["with two processes"] == 1
    assert (
        len((tmp_path / "soak" / "cases.jsonl").read_text().splitlines()) == 1 + 5 + 5 + report["hostile"]["batches"]
    )
    finished = subprocess.run([*command, "5", "--seed", "1"], capture_output=True, text=True, timeout=600, check=False)
    assert (finished.returncode, "is of another seed or version" in finished.stderr) == (1, True)


def test_each_damage_changes_a_file(script, tmp_path):
    faults = script("faults")
    tensors = {"weight": torch.arange(1.0, 7.0), "bias": torch.zeros(3)}
    for how, damage in {**faults.FILE_DAMAGES, **faults.TENSOR_DAMAGES}.items():
        path = tmp_path / "model.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        before = path.read_bytes()
        damage(path, random.Random(0))
        assert not path.exists() or path.read_bytes() != before, how
        if how.startswith("tensor"):
            assert load_file(path).keys() | {"weight"} >= {"weight", "bias"}


def test_other_bits_are_other_weights(script, tmp_path):
    faults = script("faults")
    for name, value in (("one", 0.0), ("same", 0.0), ("other", -0.0)):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.tensor([1.0, value])}, tmp_path / name / "model.safetensors")
    assert faults.same_weights(tmp_path / "one", tmp_path / "same")
    assert not faults.same_weights(tmp_path / "one", tmp_path / "other")
    assert not faults.same_weights(tmp_path / "one", tmp_path / "none")


def test_calls_are_counted_by_thread_and_name(script):
    trace = """\
7 write(1</run/killed.log>, ""..., 5) = 5
7 write(4</run/killed/config.json>, ""..., 5) = 5
8 write(4</run/killed/manifest.json>, ""..., 5 <unfinished ...>
7 fsync(4</run/killed/config.json>) = ?
8 <... write resumed>) = 5
7 +++ killed by SIGKILL +++
"""
    faults = script("faults")
    assert faults.recorded_calls(trace, Path("/run/killed/")) == [("write", 2), ("write", 1), ("fsync", 1)]
    assert faults.place_of_kill(trace, faults.Kill(0, "fsync", 1)) == "fsync(4</run/killed/config.json>)"


@pytest.mark.skipif(sys.platform != "linux", reason="strace and /proc are Linux's")
def test_strace_that_may_not_trace_is_named(script, tmp_path, monkeypatch):
    (tmp_path / "strace").write_text("#!/bin/sh\necho 'strace: attach: Operation not permitted' >&2\nexit 1\n")
    (tmp_path / "strace").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    faults = script("faults")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with pytest.raises(ValueError, match="strace can't trace a training; .*: attach: Operation not permitted"):
            faults.attach(process.pid, faults.Kill(0, "write", 0), tmp_path / "trace")
        process.kill()


def test_training_without_recorded_calls_is_no_reference(script, tmp_path, monkeypatch):
    soak, faults = script("soak"), script("faults")
    monkeypatch.setattr(faults, "run_training", lambda *arguments: faults.Ending([0], "", 1.0, {0: ""}))
    trainings = soak.Trainings(tmp_path, 0)
    with pytest.raises(ValueError, match="strace has recorded no calls of "):
        trainings.reference(faults.Training("BERT", 1))
    assert not list(tmp_path.glob("*.json"))


def test_resumed_checkpoint_is_found_behind_a_space(script):
    log = "Resuming from /tmp/my checkpoint-1 runs/killed/checkpoint-4; for a new run give another --output_dir."
    assert script("soak").outcome_of(script("faults").Ending([0], log, 1.0)) == ("resumed", "checkpoint-4")


def test_hostile_inputs_are_shared_among_the_kinds(script):
    soak = script("soak")
    sizes = soak.sizes_of_batches(["a", "b", "c"], 305)
    assert sum(size for _, size in sizes) == 305
    assert [kind for kind, _ in sizes[:4]] == ["a", "b", "c", "a"]
    assert {kind for kind, _ in soak.sizes_of_batches(["a", "b", "c"], 4)} == {"a", "b"}
