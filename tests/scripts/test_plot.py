"""The command line of scripts/plot.py."""

import json
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
        "a.txt, 4 tokens": {"by_position": {**losses, "loss": [3.1]}},
    }
    (root / "old.json").write_text(json.dumps({"files": files}))
    (root / "new.json").write_text(json.dumps({"files": {"a.txt": files["a.txt, 12 tokens"]}}))
    return root


@pytest.mark.parametrize(
    "options",
    [
        ["attention", "--model", "translator", "--source", SENTENCES[0], "--heads", 0, 3],
        ["attention", "--model", "translator", "--source", SENTENCES[0], "--target", "x", "--title", "forced"],
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
    shorter = {**losses, "loss": [3.2, 3.1]}
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
        (["schedule", "--dpi", 0], "`dpi` must be at least 1, got 0."),
    ],
)
def test_bad_options_are_named(options, message, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    assert run_here(monkeypatch, "plot.py", *options) in (1, 2)
    assert message in capfd.readouterr().err
