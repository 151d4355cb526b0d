"""The command line of scripts/plot.py."""

import errno
import json
import os
import re
import sys
from pathlib import Path

import pytest
from script_runner import run_here


sys.path[:0] = [str(Path(__file__).parents[1] / "generation"), str(Path(__file__).parents[1] / "models")]

from text_translator import SENTENCES, save_translator  # noqa: E402
from tiny_berts import tiny_bert  # noqa: E402

from hf_vanilla import VanillaVitConfig, VanillaVitModel  # noqa: E402
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_translator(root / "translator")
    tiny_bert("masked-lm").save_pretrained(root / "bert")
    train_wordpiece_tokenizer(["a b c"] * 2, 11, show_progress=False).save_pretrained(root / "bert")
    vit = dict(
        image_size=8, patch_size=2, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=9
    )
    VanillaVitModel(VanillaVitConfig(**vit)).save_pretrained(root / "vit")
    log = [{"loss": 3.0 - step, "learning_rate": 0.1, "step": step} for step in (1, 2)]
    (root / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    losses = {"width": 4, "loss": [3.0, None, 2.5], "tokens": [5, 0, 7]}
    files = {
        "a.txt, 12 tokens": {"by_position": losses},
        "a.txt, 4 tokens": {"by_position": {**losses, "loss": [3.1], "tokens": [5]}},
    }
    (root / "old.json").write_text(json.dumps({"files": files}))
    (root / "new.json").write_text(json.dumps({"files": {"a.txt": files["a.txt, 12 tokens"]}}))
    return root


@pytest.mark.parametrize(
    "options",
    [
        ["attention", "--model", "translator", "--source", SENTENCES[0], "--heads", 0, 3],
        ["attention", "--model", "translator", "--source", SENTENCES[0], "--target", "x", "--title", "forced"],
        ["attention", "--model", "translator", "--source", "$x_{ b$", "--target", "x"],
        ["attention", "--model", "bert", "--source", "a b"],
        ["alignment", "--model", "translator", "--source", SENTENCES[0]],
        ["positions", "--length", 9, "--d_model", 6],
        ["positions", "--model", "translator"],
        ["positions", "--model", "bert"],
        ["positions", "--model", "vit"],
        ["schedule", "--max_steps", 9, "--warmup_steps", 2, 4],
        ["curve", "--run", "."],
        ["position-losses", "--results", "old.json", "new.json", "--labels", "old", "new"],
    ],
    ids=lambda options: " ".join(map(str, options[:3])),
)
def test_every_picture_is_drawn(options, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    path = tmp_path / "new" / "picture.svg"
    assert run_here(monkeypatch, "plot.py", *options, "--output", path) == 0
    assert path.stat().st_size > 5_000


def test_no_curve_is_lost(folder, tmp_path, monkeypatch):
    """Neither of a file whose longest pair is shorter, nor of results and files of the same name."""
    losses = json.loads((folder / "new.json").read_text())["files"]["a.txt"]["by_position"]
    shorter = {**losses, "loss": [3.2, 3.1], "tokens": [5, 7]}
    files = {
        "x/a.txt": {"by_position": losses},
        "y/a.txt": {"by_position": shorter},
        "b.txt": {"by_position": shorter},
    }
    paths = [tmp_path / name / "results.json" for name in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(json.dumps({"files": files}))
    picture = tmp_path / "picture.svg"
    assert run_here(monkeypatch, "plot.py", "position-losses", "--results", *paths, "--output", picture) == 0
    labels = re.findall(r"<!-- (.*\.txt) \(mean .*-->", picture.read_text())
    assert len(set(labels)) == len(labels) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--dpi", 50],
            "the first argument must be one of attention, alignment, positions, schedule, curve, position_losses.",
        ),
        (["position-losses", "--results", "trainer_state.json"], "trainer_state.json has no losses by position"),
        (
            ["position-losses", "--results", "old.json", "--labels", "a", "b"],
            "`labels` must be as many as `results` (1)",
        ),
        (["attention", "--model", "translator"], "`source` is missing; give it as --source."),
        (["curve", "--run", "bert"], "there is no bert/trainer_state.json"),
        (["schedule", "--dpi", 0], "`dpi` must be from 1 to 1,200, got 0."),
        (["schedule", "--dpi", 100_000], "`dpi` must be from 1 to 1,200, got 100,000."),
        (["positions", "--length", 2_000_000_000], "`length` must be from 1 to 100,000, got 2,000,000,000."),
        (["positions", "--d_model", -4], "`d_model` must be from 1 to 100,000, got -4."),
        (["positions", "--d_model", 100_000, "--length", 100_000], "give at most 60,000,000 numbers, got width 100,"),
        (
            ["alignment", "--model", "translator", "--source", "a " * 99, "--target", "a " * 99, "--dpi", 1200],
            "`dpi` must give at most 250,000,000 pixels, but 1200 gives ",
        ),
        (["schedule", "--output", "bert"], "`output` must be a file, but bert is a folder"),
        (["schedule", "--output", "new/"], "`output` must be a file, but new/ is a folder"),
        (["alignment", "--model", "translator", "--source", "a", "--target", ""], "`target` must have at least one w"),
        (["attention", "--model", "bert", "--source", "a \ud800"], "`source` must be valid Unicode"),
    ],
)
def test_bad_options_are_named(options, message, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    assert run_here(monkeypatch, "plot.py", *options) in (1, 2)
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "bad.json must hold a JSON object, got list."),
        (b'{"log_history": [', "bad.json must be JSON in UTF-8: "),
        (b'{"run": "\xe4"}', "bad.json must be JSON in UTF-8: "),
        (
            b'{"log_history": 3, "files": []}',
            ("(bad.json): `log_history` must be a list", "bad.json has no losses by"),
        ),
        (
            b'{"log_history": [{"loss": 1}], "files": {"a": {"by_position": {"width": 4, "loss": [1]}}}}',
            ("entry 1 has none.", "(bad.json), 'a': losses by position must have `width`, `loss` and `tokens`, but"),
        ),
    ],
)
def test_bad_files_are_named(content, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_bytes(content)
    messages = (message, message) if isinstance(message, str) else message
    for options, wanted in zip((["curve", "--run"], ["position-losses", "--results"]), messages, strict=True):
        assert run_here(monkeypatch, "plot.py", *options, "bad.json") == 1
        assert wanted in capfd.readouterr().err


def test_path_of_the_picture_is_printed(tmp_path, monkeypatch, capfd):
    assert run_here(monkeypatch, "plot.py", "schedule", "--max_steps", 9, "--output", tmp_path / "rates") == 0
    assert capfd.readouterr().out == f"{tmp_path / 'rates.png'}\n"
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.promise("disk full")
def test_full_disk_keeps_the_old_picture(tmp_path, monkeypatch, capfd):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "rates.png"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    assert run_here(monkeypatch, "plot.py", "schedule", "--max_steps", 9, "--output", path) == 1
    assert f"error: {path} can't be written: No space left on device." in capfd.readouterr().err
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
