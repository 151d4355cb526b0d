"""The benchmarks' own arithmetic, and one of them from end to end."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_vanilla.command_line import run


FOLDER = Path(__file__).parents[2] / "scripts" / "benchmark"


@pytest.fixture
def script(monkeypatch):
    """Import a benchmark as its own process would."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_ratios_are_taken_turn_by_turn(script, tmp_path, capsys):
    measuring = script("measuring")
    turns = iter([10.0, 5.0, 30.0, 10.0, 40.0, 10.0])
    figures = measuring.take_turns({"ours": lambda: next(turns), "theirs": lambda: next(turns)}, 3)
    assert figures == {"ours": [10.0, 30.0, 40.0], "theirs": [5.0, 10.0, 10.0]}
    arguments = measuring.BenchmarkArguments(repeats=3, threads=1, output_file=str(tmp_path / "row.json"))
    measuring.report(arguments, "some work", "pieces", figures, {"against them": ("ours", "theirs", 2.5)}, sizes="odd")
    written = json.loads((tmp_path / "row.json").read_text())
    assert written["sides"]["ours"] == {"median": 30.0, "lowest": 10.0, "highest": 40.0}
    assert written["ratios"]["against them"] == {"median": 3.0, "lowest": 2.0, "highest": 4.0, "target": 2.5}
    assert written["settings"] == {"sizes": "odd"}
    assert {"versions", "machine", "date", "command"} <= written.keys()
    assert "against them: 3.00 x   (2.00 to 4.00, target 2.5)" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["repeats", "threads"])
def test_options_below_one_are_told_in_one_line(script, capsys, monkeypatch, name):
    monkeypatch.setattr("sys.argv", ["growth.py", f"--{name}", "0"])
    assert run(script("growth").main) == 1
    assert capsys.readouterr().err == f"error: --{name} must be at least 1, got 0.\n"


def test_pairs_of_a_file_and_pairs_of_nothing(script, tmp_path):
    measuring = script("measuring")
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"en": "a b", "de": "c"}\n{"en": "d", "de": "e f"}\n')
    assert measuring.sentence_pairs(str(file), ["en", "de"], 1) == {"source": ["a b"], "target": ["c"]}
    made = measuring.sentence_pairs(None, [], 50)
    assert len(made["source"]) == 50
    assert all(one.split() == two.split()[::-1] for one, two in zip(made["source"], made["target"], strict=True))


def test_a_straight_line_is_found(script):
    growth = script("growth")
    found = growth.fit((2, 4, 8, 16), [3.0, 5.0, 9.0, 17.0])
    assert found["seconds_per_unit"] == pytest.approx(1.0)
    assert found["seconds_at_zero"] == pytest.approx(1.0)
    assert found["largest_error_of_the_line"] == 0.0
    square = growth.fit((1, 10, 100, 1000), [1.0, 100.0, 10_000.0, 1_000_000.0])
    assert square["exponent_of_the_upper_half"] == pytest.approx(2.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["training_memory", "text_encoding", "translation_decoding"])
def test_a_quick_run_writes_its_figures(tmp_path, name):
    file = tmp_path / "row.json"
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--threads", "1", "--output_file", str(file)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    written = json.loads(file.read_text())
    assert all(side["median"] > 0 for side in written["sides"].values())
    assert len(written["sides"]) >= 2
