"""The script that averages checkpoints: selections, bad options, launchers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from script_runner import SCRIPTS, run_here

from hf_vanilla.training import average_checkpoints, last_checkpoints


sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from checkpoint_folders import WEIGHTS, write_run


@pytest.fixture
def run_script(monkeypatch, capsys):
    """Run the script in this process, and return status, output and errors."""

    def run_script(*arguments):
        return run_here(monkeypatch, "average_checkpoints.py", *arguments), *capsys.readouterr()

    return run_script


def weights_in(folder):
    return (folder / WEIGHTS).read_bytes()


def test_script_averages_the_last(tmp_path, run_script):
    run = write_run(tmp_path / "out", [1.0, 2.0, 3.0])
    status, output, _ = run_script("--run_dir", run, "--last", 2, "--output_dir", tmp_path / "averaged")
    assert status == 0
    average_checkpoints(last_checkpoints(run, 2), tmp_path / "expected")
    assert weights_in(tmp_path / "averaged") == weights_in(tmp_path / "expected")
    assert "checkpoint-200" in output
    assert "checkpoint-100" not in output


def test_script_averages_the_best_and_given_checkpoints(tmp_path, run_script):
    run = write_run(tmp_path / "out", [1.0, 4.0, 3.0, 2.0], metric="eval_bleu")
    given = [run / "checkpoint-200", run / "checkpoint-300"]
    best = ("--run_dir", run, "--best", 2, "--metric", "bleu", "--output_dir", tmp_path / "best")
    assert run_script(*best)[0] == 0
    assert run_script("--checkpoints", *given, "--output_dir", tmp_path / "given")[0] == 0
    assert weights_in(tmp_path / "best") == weights_in(tmp_path / "given") != weights_in(given[0])
    assert run_script("--checkpoints", given[0], "--output_dir", tmp_path / "given", "--overwrite")[0] == 0
    assert weights_in(tmp_path / "given") == weights_in(given[0])
    assert run_script("--run_dir", run, "--best", 2, "--metric", "bleu")[0] == 0
    assert weights_in(run / "averaged-best-2") == weights_in(tmp_path / "best")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--output_dir", "x"], 2, "Select checkpoints with one of --last, --best and --checkpoints; got none."),
        (["--output_dir", "x", "--last", "2"], 2, "--last and --best need --run_dir"),
        (["--output_dir", "x", "--checkpoints", "a", "--run_dir", "y"], 2, "--checkpoints can't be combined"),
        (["--output_dir", "x", "--last", "2", "--best", "3"], 2, "got --last and --best."),
        (
            ["--output_dir", "x", "--last", "2", "--run_dir", "nowhere"],
            1,
            "error: `run_dir` (nowhere) must be",
        ),
        (["--output_dir", "x", "--last", "0", "--run_dir", "."], 1, "error: `count` must be at least 1, got 0."),
        (["--output_dir", "x", "--last", "2", "--run_dir", "y", "--metric", "z"], 2, "--metric needs --best"),
        (["--checkpoints", "a", "b"], 2, "--checkpoints needs --output_dir"),
        (["--output_dir", "x", "--las", "2", "--run_dir", "y"], 2, "unknown option --las; did you mean --last?"),
    ],
)
def test_bad_options_end_in_one_line(run_script, arguments, status, message):
    actual, _, errors = run_script(*arguments)
    assert actual == status
    assert message in errors


def test_help_has_examples(run_script):
    status, output, _ = run_script("--help")
    assert status == 0
    assert "python scripts/average_checkpoints.py --run_dir out --last 5 --output_dir averaged" in output
    assert "None" not in output


def test_script_reads_options_from_a_file(tmp_path, run_script):
    run = write_run(tmp_path / "out", [1.0, 2.0, 3.0])
    options = {"run_dir": str(run), "last": 1, "output_dir": str(tmp_path / "averaged")}
    (tmp_path / "options.json").write_text(json.dumps(options))
    assert run_script(tmp_path / "options.json")[0] == 0
    assert weights_in(tmp_path / "averaged") == weights_in(run / "checkpoint-300")


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        (),
        ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"),
    ],
    ids=["python", "torchrun", "accelerate"],
)
def test_script_runs_under_launchers(tmp_path, launcher):
    run = write_run(tmp_path / "out", [1.0, 2.0, 3.0])
    arguments = ("--run_dir", run, "--last", 2, "--output_dir", tmp_path / "averaged")
    command = [sys.executable, *launcher, str(SCRIPTS / "average_checkpoints.py"), *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("Written to") == 1
    assert (tmp_path / "averaged" / WEIGHTS).is_file()
