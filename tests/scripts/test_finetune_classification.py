"""Fine-tuning as a user does it: own files, several seeds, a report; and what bad input gets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from transformers import AutoModelForSequenceClassification, pipeline

from hf_vanilla import VanillaBertConfig, VanillaBertForPreTraining
from hf_vanilla.tokenization import train_wordpiece_tokenizer


SCRIPTS = Path(__file__).parents[2] / "scripts"
OPTIONS = [
    "--num_train_epochs",
    "8",
    "--learning_rate",
    "0.01",
    "--per_device_train_batch_size",
    "8",
    "--disable_tqdm",
    "true",
    "--use_cpu",
]
GOOD, BAD = ("good fine nice", "bad poor dull")


def run(*arguments, script="finetune_classification.py"):
    command = [sys.executable, SCRIPTS / script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("task")
    rows = [
        {"review": f"the film is {word}", "verdict": verdict}
        for verdict, words in (("liked", GOOD), ("disliked", BAD))
        for word in words.split()
    ]
    for split, repeats in (("train", 12), ("validation", 2)):
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * repeats))
    tokenizer = train_wordpiece_tokenizer([row["review"] for row in rows] * 3, 80, show_progress=False)
    tokenizer.save_pretrained(path / "bert")
    config = VanillaBertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24,
        initializer_range=0.2, hidden_dropout_prob=0.0,
    )  # fmt: skip
    VanillaBertForPreTraining(config).save_pretrained(path / "bert")
    return path


def files(folder):
    return [
        "--model_name_or_path", folder / "bert", "--train_file", folder / "train.jsonl",
        "--validation_file", folder / "validation.jsonl", "--text_column", "review", "--label_column", "verdict",
    ]  # fmt: skip


def test_it_learns_and_reports_every_seed(folder, tmp_path):
    results = tmp_path / "results.json"
    finished = run(
        *files(folder), *OPTIONS, "--seeds", 1, 2, "--results_file", results, "--output_dir", tmp_path / "run"
    )
    assert finished.returncode == 0, finished.stderr
    report = json.loads(results.read_text())
    assert report["main_score"] == "accuracy"
    assert report["summary"]["validation"] == {"median": 1.0, "best": 1.0, "worst": 1.0}
    assert set(report["seeds"]) == {"1", "2"}
    assert report["versions"]["transformers"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "seed-2")
    assert model.config.id2label == {0: "disliked", 1: "liked"}
    classify = pipeline("text-classification", model=str(tmp_path / "run" / "seed-1"))
    assert classify("the film is nice")[0]["label"] == "liked"
    for seed in (1, 2):
        assert f"The model is in {tmp_path}/run/seed-{seed} (validation accuracy 1.0000)." in finished.stderr
    assert f"The best on the validation data is {tmp_path}/run/seed-1." in finished.stderr
    assert finished.stderr.count("New in the model, with random weights: classifier; all else comes from") == 1
    assert finished.stderr.count("This fine-tuning has 72 updates") == 1
    assert "UNEXPECTED" not in finished.stderr
    assert "sharded" not in finished.stderr
    assert (
        finished.stderr.count("'loss':") + finished.stdout.count("'loss':") == 2 * 18
    )  # every twentieth part, rounded up


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--label_column", "stars"], "line 1 has no column 'stars'; it has 'review', 'verdict'"),
        (["--validation_file", "nowhere.csv"], "`validation_file` must name an existing file"),
        (["--task_name", "sst2"], "Pass either `task_name` or `train_file`"),
        (["--regression"], "a label of a regression must be a number, got 'liked'"),
    ],
    ids=["column", "file", "both", "regression"],
)
def test_bad_input_ends_in_one_line(folder, tmp_path, options, message):
    finished = run(*files(folder), *OPTIONS, "--output_dir", tmp_path / "run", *options)
    assert finished.returncode in (1, 2)
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "run").exists()


def test_a_search_ranks_the_grid_and_is_not_done_twice(folder, tmp_path):
    options = [
        "classification", *files(folder), "--disable_tqdm", "true", "--use_cpu", "--seeds", 1, 2,
        "--batch_sizes", 8, 16,
        "--learning_rates", "1e-2", "1e-9", "--epochs", 6, "--output_dir", tmp_path / "search",
    ]  # fmt: skip
    finished = run(*options, "--results_file", tmp_path / "sweep.json", script="sweep.py")
    assert finished.returncode == 0, finished.stderr
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert found["main_score"] == "accuracy"
    assert [each["learning_rate"] for each in found["settings"]] == [1e-2, 1e-2, 1e-9, 1e-9]
    assert [sorted(each["scores"]) for each in found["settings"]] == [["1", "2"]] * 4
    assert "1. accuracy median 1.0000" in finished.stderr
    assert "--per_device_train_batch_size 8 --learning_rate 0.01 --num_train_epochs 6" in finished.stderr
    assert "sweep.py classification" in found["command"]
    again = run(*options, "--results_file", tmp_path / "again.json", script="sweep.py")
    assert "Trial" not in again.stderr
    assert json.loads((tmp_path / "again.json").read_text())["settings"] == found["settings"]


def test_the_names_of_a_table_s_labels_are_kept(folder, tmp_path):
    """As GLUE's data sets on the Hub have them: numbers in the rows, names in the features."""
    features = Features({"review": Value("string"), "verdict": ClassLabel(names=["awful", "lovely"])})
    rows = [{"review": f"the film is {word}", "verdict": word in GOOD} for word in (GOOD + " " + BAD).split()]
    for split in ("train", "validation"):
        columns = {name: [row[name] if name == "review" else int(row[name]) for row in rows] for name in features}
        Dataset.from_dict(columns, features=features).to_parquet(tmp_path / f"{split}.parquet")
    finished = run(
        "--model_name_or_path", folder / "bert", "--train_file", tmp_path / "train.parquet",
        "--validation_file", tmp_path / "validation.parquet", "--text_column", "review", "--label_column", "verdict",
        "--num_train_epochs", 1, "--eval_strategy", "epoch", "--use_cpu", "--output_dir", tmp_path / "run",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    config = json.loads((tmp_path / "run" / "seed-42" / "config.json").read_text())
    assert config["id2label"] == {"0": "awful", "1": "lovely"}


def test_what_is_searched_for_is_not_given_once(folder, tmp_path):
    finished = run("classification", *files(folder), *OPTIONS, "--output_dir", tmp_path, script="sweep.py")
    assert finished.returncode == 1
    assert "`per_device_train_batch_size` is what is searched for" in finished.stderr


def test_a_search_needs_a_task():
    finished = run("regression", script="sweep.py")
    assert finished.returncode == 2
    assert "the first word must be one of classification, token_classification" in finished.stderr
