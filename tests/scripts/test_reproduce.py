"""Reproducing recorded scores: the recipes are those of the results, and a run continues where it was stopped."""

import gzip
import json
import shlex
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import reproduce  # noqa: E402


RESULTS = sorted((ROOT / "model_cards" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_recipe_has_the_commands_of_the_results(path):
    results = json.loads(path.read_text(encoding="utf-8"))
    recorded = results.get("commands") or [results["command"]] if {"command", "commands"} & results.keys() else []
    recipe = reproduce.RECIPES[path.stem]
    unrecorded = path.stem in ("multi30k_try_out", "ngram_enwiki_novels")  # the last command of each
    assert recipe.commands[: len(recipe.commands) - unrecorded] == [command.strip() for command in recorded]
    assert recipe.notes == () or results["notes"].items() >= dict(note.split("=") for note in recipe.notes).items()


def test_every_recipe_has_results():
    assert reproduce.RECIPES.keys() == {path.stem for path in RESULTS}
    assert all(recipe.after is None or reproduce.RECIPES[recipe.after] for recipe in reproduce.RECIPES.values())


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *map(str, arguments)])
    return reproduce.run(reproduce.main)


def test_dry_run_shows_the_commands_of_the_model_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "bert_mini_squad", "--data_dir", "my data", "--dry_run") == 0
    change, copy, *commands = capsys.readouterr().out.splitlines()
    folder = tmp_path / "reproduced" / "bert_mini_pretraining"
    assert change == f"mkdir -p {folder}/runs && cd {folder}"
    assert copy == f"# enwiki_sample.test.jsonl.gz: a copy of {tmp_path}/my data/enwiki_sample/test.jsonl.gz"
    training, text, evaluation, finetuning = commands
    start = (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2 {ROOT}/scripts/pretrain_bert.py "
        "--train_files "
    )
    assert training.startswith(f"{start}'{tmp_path}/my data/enwiki_sample/train.jsonl.gz' ")
    assert text.startswith(f"zcat '{tmp_path}/my data/wikitext2_eval/test.raw.txt.gz' | awk ")
    assert " --results_file runs/bert_mini_pretraining.json --commands 'torchrun " in evaluation
    assert f"--train_file '{tmp_path}/my data/squad_v1.1/train.jsonl.gz' " in finetuning
    assert finetuning.endswith(" --output_dir runs/squad --results_file runs/bert_mini_squad.json")
    assert not folder.exists()


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_processes_without_a_gpu_each_run_on_the_cpu(monkeypatch, tmp_path, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(reproduce.torch.cuda, "device_count", lambda: gpus)
    program = "import os; open('seen', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    reproduce.run_line(shlex.join([sys.executable, "-c", program, "--nproc_per_node", "2", "script.py"]), tmp_path)
    assert (tmp_path / "seen").read_text() == ("" if gpus == 1 else "0,1")


def test_missing_data_is_named(tmp_path, monkeypatch, capsys):
    assert call(monkeypatch, "tatoeba_zh_en", "--data_dir", tmp_path, "--output_dir", tmp_path / "out") == 1
    assert "must have tatoeba_en_zh/test.jsonl.gz, tatoeba_en_zh/train.jsonl.gz, " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_missing_results_and_damaged_data_are_named(tmp_path, monkeypatch, capsys):
    name, data, folder = "multi30k_en_de_tok", tmp_path / "multi30k", tmp_path / "out" / "multi30k_en_de_tok"
    data.mkdir()
    folder.mkdir(parents=True)
    for each in ("tok_train", "tok_val", "tok_test_2016_flickr"):
        (data / f"{each}.jsonl.gz").write_bytes(gzip.compress(b'{"en": "a"}\n')[:-9])
    options = (name, "--data_dir", tmp_path, "--output_dir", tmp_path / "out")
    assert call(monkeypatch, *options) == 1
    assert (
        "tok_test_2016_flickr.jsonl.gz must be gzipped lines of JSON, each with a text `en`" in capsys.readouterr().err
    )
    (folder / "reproduced.json").write_text(json.dumps({"done": {name: reproduce.RECIPES[name].commands}}))
    assert call(monkeypatch, *options) == 1
    assert f"{name}.json is missing, though" in capsys.readouterr().err


def test_stopped_run_continues_to_the_row_of_scores(tmp_path, monkeypatch, capsys):
    data = tmp_path / "data" / "glue"
    data.mkdir(parents=True)
    (data / "a.txt").write_text("nothing\nat all\n")
    sentences = ["ein hund mag die katze", "die katze mag den hund", "nicht mehr"]
    with gzip.open(data / "test.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"de": sentence, "en": "x"}) + "\n" for sentence in sentences)
    recipe = reproduce.Recipe(
        [
            "cat glue/a.txt | tr a-z A-Z > out.de",
            "cat go.txt | tr a-z A-Z > train_went.txt",
            "python scripts/evaluate_translation.py --hypotheses out.de --references test.de",
        ],
        {"test.de": reproduce.Extract("glue/test.jsonl.gz", "de", 2)},
        results_option="output_file",
        notes=("test_set=tiny",),
    )
    monkeypatch.setitem(reproduce.RECIPES, "tiny", recipe)
    monkeypatch.setattr(reproduce, "TASKS", ("tiny",))
    options = ["--data_dir", tmp_path / "data", "--output_dir", tmp_path / "out"]
    assert call(monkeypatch, "tiny", *options) == 1
    assert "has ended with status 1; run the script again to continue" in capsys.readouterr().err
    folder = tmp_path / "out" / "tiny"
    assert (folder / "out.de").read_text() == "NOTHING\nAT ALL\n"
    (folder / "out.de").write_text("\n".join(sentences[:2]) + "\n")  # kept: its command is done
    (folder / "go.txt").write_text("train_")
    assert call(monkeypatch, "tiny", *options) == 0
    assert "| tiny | BLEU | – | 100.0 |" in capsys.readouterr().out
    results = json.loads((folder / "runs" / "tiny.json").read_text())
    assert results["commands"] == recipe.commands
    assert results["notes"].keys() == {"test_set", "training_minutes"}
    assert call(monkeypatch, "tiny", *options) == 0  # nothing is left to do
    assert "| tiny | BLEU | – | 100.0 |" in capsys.readouterr().out
    for letters, score in (("A-Z", "0.0"), ("a-z", "100.0"), ("A-Z", "0.0")):  # what follows a changed command is old
        changed = recipe._replace(commands=[f"cat test.de | tr a-z {letters} > out.de", *recipe.commands[1:]])
        monkeypatch.setitem(reproduce.RECIPES, "tiny", changed)
        assert call(monkeypatch, "tiny", *options) == 0
        assert f"| tiny | BLEU | – | {score} |" in capsys.readouterr().out
