"""Ways to run a script."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file


SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(script, *arguments, stdin=None):
    """Run a script in a new process."""
    command = [sys.executable, SCRIPTS / script, *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, check=False)


def run_here(monkeypatch, script, *arguments):
    """Run a script in this process, which is quicker, and return its exit status."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / script), *map(str, arguments)])
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return ending.value.code


def write_documents(folder):
    """Write short documents to learn from and others to evaluate on, and return their folder."""
    animals = ("dog", "cat", "bird", "horse")
    for split, count in (("train", 40), ("held_out", 8)):
        documents = [
            "\n".join(f"the {animals[number % 4]} has {legs} legs ." for legs in range(number % 3 + 2, 9))
            for number in range(count)
        ]
        (folder / f"{split}.txt").write_text("\n\n".join(documents), encoding="utf-8")
    return folder


def train_and_resume(script, arguments, output_dir):
    """Pre-train with a checkpoint after 6 of 10 updates, and again from it: to the same bits."""
    first = run(script, *arguments)
    assert first.returncode == 0, first.stderr
    weights = load_file(output_dir / "model.safetensors")
    (output_dir / "checkpoint-10").rename(output_dir.parent / "away")  # as if it had been killed after checkpoint-6
    (output_dir / "trainer_state.json").unlink()
    again = run(script, *arguments)
    assert again.returncode == 0, again.stderr
    assert f"Resuming from {output_dir}/checkpoint-6" in again.stderr
    resumed = load_file(output_dir / "model.safetensors")
    assert all(tensor.equal(resumed[name]) for name, tensor in weights.items())
