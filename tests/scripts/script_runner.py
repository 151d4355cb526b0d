"""Ways to run a script."""

import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from safetensors.torch import load_file


SCRIPTS = Path(__file__).parents[2] / "scripts"
# On Linux new processes are forked from one that has imported the package, which takes each of them seconds.
PROCESSES = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
PROCESSES.set_forkserver_preload(
    ["hf_vanilla.training", "hf_vanilla.command_line", "run_with_signals"]
)  # of another test


def _be_script(arguments, folder):
    """Do what Python does for a script, in a process that was made for it."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(os.open(folder / name, os.O_RDWR | os.O_CREAT), descriptor)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.argv[:], sys.orig_argv[:] = arguments, [sys.executable, *arguments]
    sys.path.insert(0, str(SCRIPTS))
    runpy.run_path(arguments[0], run_name="__main__")


def run(script, *arguments, stdin=""):
    """Run a script in a new process."""
    command = [str(SCRIPTS / script), *map(str, arguments)]
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stdin").write_text(stdin, encoding="utf-8")
        process = PROCESSES.Process(target=_be_script, args=(command, folder))
        process.start()
        process.join(timeout=300)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{script} takes longer than 300 seconds.")
        output = [(folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(command, process.exitcode, *output)


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
