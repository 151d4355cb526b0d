"""Fine-tuning on own files: several seeds, reports, resuming, searches, bad input."""

import json
import os
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from script_runner import SCRIPTS, run, run_here
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    pipeline,
)

from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForPreTraining,
    VanillaBertForSequenceClassification,
    VanillaGptConfig,
    VanillaGptForCausalLM,
)
from hf_vanilla.data.tokenization import train_gpt_tokenizer, train_wordpiece_tokenizer
from hf_vanilla.training import FinetuningArguments


SCRIPT = "finetune_classification.py"
OPTIONS = [
    "--num_train_epochs", "8", "--learning_rate", "0.01", "--per_device_train_batch_size", "8",
    "--disable_tqdm", "true", "--use_cpu",
]  # fmt: skip
GOOD, BAD = ("good fine nice", "bad poor dull")


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


def test_classification_learns_and_reports_every_seed(folder, tmp_path):
    results = tmp_path / "results.json"
    options = ["--seeds", 1, 2, "--results_file", results, "--output_dir", tmp_path / "run"]
    finished = run(SCRIPT, *files(folder), *OPTIONS, *options)
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
    assert finished.stderr.count("New in the model, with random weights: classifier; all others are from") == 1
    assert finished.stderr.count("This fine-tuning has 72 updates") == 1
    assert "UNEXPECTED" not in finished.stderr
    assert "sharded" not in finished.stderr
    assert (
        finished.stderr.count("'loss':") + finished.stdout.count("'loss':") == 2 * 18
    )  # each twentieth of the updates, rounded up


@pytest.mark.parametrize("kind", ["ours", "gpt2"])
def test_gpt_is_fine_tuned_as_bert_is(folder, tmp_path, monkeypatch, kind):
    texts = [f"the film is {word}" for word in (*GOOD.split(), *BAD.split())]
    tokenizer = train_gpt_tokenizer(texts * 3, 300, show_progress=False)
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.2}
    if kind == "ours":
        config = VanillaGptConfig(**sizes, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, pad_token_id=0)
        VanillaGptForCausalLM(config).save_pretrained(tmp_path / "gpt")
    else:
        tokenizer._pad_token = tokenizer.pad_token = None  # as published
        GPT2LMHeadModel(GPT2Config(**sizes, n_embd=16, n_layer=1, n_head=4)).save_pretrained(tmp_path / "gpt")
    tokenizer.save_pretrained(tmp_path / "gpt")
    options = [
        *files(folder)[2:],
        *OPTIONS,
        "--model_name_or_path",
        tmp_path / "gpt",
        "--output_dir",
        tmp_path / "run",
    ]
    weight = ["--lm_loss_weight", "0.25"] if kind == "ours" else []
    assert run_here(monkeypatch, SCRIPT, *options, *weight) == 0
    scores = json.loads((tmp_path / "run" / "seed-42" / "scores.json").read_text())
    assert scores["validation"]["accuracy"] == 1.0
    classify = pipeline("text-classification", model=str(tmp_path / "run" / "seed-42"))
    assert getattr(classify.model.config, "lm_loss_weight", 0.25) == 0.25
    assert classify.tokenizer("the")["input_ids"][-1] == tokenizer.eos_token_id
    assert [each["label"] for each in classify(["the film is nice", "the film is dull"], batch_size=2)] == [
        "liked",
        "disliked",
    ]


KILLED = """
import os, runpy, signal, sys
import transformers.trainer


class Kill(transformers.TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        if args.output_dir.endswith("seed-3") and state.global_step == 12:
            os.kill(os.getpid(), signal.SIGKILL)


transformers.trainer.DEFAULT_CALLBACKS.append(Kill)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_killed_fine_tuning_resumes(folder, tmp_path):
    options = [
        *files(folder), *OPTIONS, "--num_train_epochs", 2, "--save_strategy", "steps", "--save_steps", 6,
        "--seeds", 1, 2, 3, "--results_file", tmp_path / "results.json", "--output_dir", tmp_path / "run",
    ]  # fmt: skip
    command = list(map(str, [sys.executable, "-c", KILLED, SCRIPTS / SCRIPT, *options]))
    killed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "results.json").exists()
    weights = (tmp_path / "run" / "seed-2" / "model.safetensors").stat().st_mtime_ns
    again = run(SCRIPT, *options)
    assert again.returncode == 0, again.stderr
    last = tmp_path / "run" / "seed-3"  # killed before checkpoint-12 had its manifest
    for message in ("Seed 1 is done", "Seed 2 is done", f"Skipped {last}/checkpoint-12", f"from {last}/checkpoint-6"):
        assert message in again.stderr
    assert (tmp_path / "run" / "seed-2" / "model.safetensors").stat().st_mtime_ns == weights
    report = json.loads((tmp_path / "results.json").read_text())
    for seed in ("1", "2", "3"):
        assert json.loads((tmp_path / "run" / f"seed-{seed}" / "scores.json").read_text()) == report["seeds"][seed]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--label_column", "stars"], "which has 'review', 'verdict'; got 'stars'"),
        (["--validation_file", "nowhere.csv"], "`validation_file` must be an existing file"),
        (
            ["--task_name", "sst2"],
            "Pass either `task_name` or `train_file` or `dataset_name`, got task_name and",
        ),
        (["--regression"], "a label for regression must be a number, got 'liked'"),
    ],
    ids=["column", "file", "both", "regression"],
)
def test_bad_input_ends_in_one_line(folder, tmp_path, options, message):
    finished = run(SCRIPT, *files(folder), *OPTIONS, "--output_dir", tmp_path / "run", *options)
    assert finished.returncode in (1, 2)
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--main_score", "nonsense"], "`main_score` must be one of accuracy, f1, matthews, loss; got 'nonsense'."),
        (["--seed", 7, "--seeds", 1], "`seed` (7) and `seeds` ([1]) differ; give one of them."),
        (["--max_length", 513], "`max_length` (513) must be at most 512, the positions of the model"),
        (["--model_name_or_path", "runs/none"], "`model_name_or_path` (runs/none) is no folder, and no model of the"),
    ],
    ids=["score", "seed", "length", "model"],
)
def test_unfit_options_end_before_any_training(folder, tmp_path, monkeypatch, capsys, options, message):
    given = [*files(folder), *OPTIONS, "--output_dir", tmp_path / "run", *options]
    assert run_here(monkeypatch, SCRIPT, *given) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {message}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("column", ["text", "text_pair"])
@pytest.mark.parametrize("value", [["good", "film"], {"en": "good film"}])
def test_column_of_lists_or_objects_is_no_text(folder, tmp_path, monkeypatch, capsys, column, value):
    row = {"text": "fine", "text_pair": 1, column: value}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, "label": label}) + "\n" for label in ("a", "b")))
    options = [
        "--model_name_or_path", folder / "bert", "--train_file", tmp_path / "rows.jsonl", "--text_column", "text",
        "--text_pair_column", "text_pair", *OPTIONS, "--output_dir", tmp_path / "run",
    ]  # fmt: skip
    assert run_here(monkeypatch, SCRIPT, *options) == 1
    assert f"the train data, row 1: `{column}_column` must be a text, not a list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('["a"]', "must hold one mapping of names to options, got a list."),
        ('{"max_steps": "abc"}', "`max_steps` must be int, got 'abc'."),
        ('{"seeds": [1, "two"]}', "`seeds` must be list[int], got [1, 'two']."),
        ('{"from_scratch": 1}', "`from_scratch` must be bool, got 1."),
        ('{"max_stepz": 3}', "unknown option 'max_stepz'; did you mean max_steps?"),
    ],
    ids=["list", "string", "strings", "number", "name"],
)
def test_types_of_options_in_a_file_are_checked(tmp_path, monkeypatch, capsys, content, message):
    (tmp_path / "options.json").write_text(content)
    assert run_here(monkeypatch, SCRIPT, tmp_path / "options.json") == 2
    assert message in capsys.readouterr().err


def test_model_with_other_labels_gets_a_new_head(folder, tmp_path, monkeypatch, caplog):
    """Like a model for MNLI, with three labels, on RTE, with two."""
    config = VanillaBertConfig.from_pretrained(folder / "bert", num_labels=3)
    three = VanillaBertForSequenceClassification(config)
    three.save_pretrained(tmp_path / "three")
    AutoTokenizer.from_pretrained(folder / "bert").save_pretrained(tmp_path / "three")
    options = [
        *files(folder), *OPTIONS, "--model_name_or_path", tmp_path / "three", "--learning_rate", "1e-9",
        "--num_train_epochs", 1, "--output_dir", tmp_path / "run",
    ]  # fmt: skip
    assert run_here(monkeypatch, SCRIPT, *options) == 0
    assert f"The head of {tmp_path}/three has another number of labels than this task" in caplog.text
    two = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "seed-42")
    assert two.classifier.weight.shape == (2, 16)
    name = "bert.embeddings.word_embeddings.weight"
    assert (two.state_dict()[name] - three.state_dict()[name]).abs().max() < 1e-5


def test_search_ranks_the_grid_and_is_not_repeated(folder, tmp_path):
    options = [
        "classification", *files(folder), "--disable_tqdm", "true", "--use_cpu", "--seeds", 1, 2,
        "--batch_sizes", 8, 16,
        "--learning_rates", "1e-2", "1e-9", "--epochs", 6, "--output_dir", tmp_path / "search",
    ]  # fmt: skip
    finished = run("sweep.py", *options, "--results_file", tmp_path / "sweep.json")
    assert finished.returncode == 0, finished.stderr
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert found["main_score"] == "accuracy"
    assert [each["learning_rate"] for each in found["settings"]] == [1e-2, 1e-2, 1e-9, 1e-9]
    assert [sorted(each["scores"]) for each in found["settings"]] == [["1", "2"]] * 4
    assert "1. accuracy median 1.0000" in finished.stderr
    assert "--per_device_train_batch_size 8 --learning_rate 0.01 --num_train_epochs 6" in finished.stderr
    assert "sweep.py classification" in found["command"]
    again = run("sweep.py", *options, "--results_file", tmp_path / "again.json")
    assert "Trial" not in again.stderr
    assert json.loads((tmp_path / "again.json").read_text())["settings"] == found["settings"]


def test_results_of_a_search_do_not_make_it_another(tmp_path):
    fingerprint = runpy.run_path(str(SCRIPTS / "sweep.py"))["fingerprint"]
    paths = [tmp_path / name for name in ("train.jsonl", "sweep.json")]
    for path in paths:
        path.write_text("nothing")
    options = SimpleNamespace(train_file=str(paths[0]), results_file=str(paths[1]), seeds=[1, 2])

    def found(workers=0, rates=(1e-3,)):
        arguments = FinetuningArguments(str(tmp_path), use_cpu=True, dataloader_num_workers=workers)
        return fingerprint(options, arguments, {"learning_rate": list(rates)}, "accuracy")

    first = found()
    paths[1].write_text("written")
    os.utime(paths[0])  # copied again, say
    assert found(workers=1) == first
    assert found(rates=(1e-3, 1e-4)) != first
    paths[0].write_text("written")
    assert found() != first


def test_label_names_of_a_table_are_kept(folder, tmp_path):
    """Like those of GLUE on the Hub: numbers in the rows, names in the features."""
    features = Features({"review": Value("string"), "verdict": ClassLabel(names=["awful", "lovely"])})
    rows = [{"review": f"the film is {word}", "verdict": word in GOOD} for word in (GOOD + " " + BAD).split()]
    for split in ("train", "validation"):
        columns = {name: [row[name] if name == "review" else int(row[name]) for row in rows] for name in features}
        Dataset.from_dict(columns, features=features).to_parquet(tmp_path / f"{split}.parquet")
    finished = run(
        SCRIPT, "--model_name_or_path", folder / "bert", "--train_file", tmp_path / "train.parquet",
        "--validation_file", tmp_path / "validation.parquet", "--text_column", "review", "--label_column", "verdict",
        "--num_train_epochs", 1, "--eval_strategy", "epoch", "--seed", 7, "--use_cpu",
        "--output_dir", tmp_path / "run",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    config = json.loads((tmp_path / "run" / "seed-7" / "config.json").read_text())
    assert config["id2label"] == {"0": "awful", "1": "lovely"}


def test_single_value_of_a_searched_option_is_refused(folder, tmp_path):
    finished = run("sweep.py", "classification", *files(folder), *OPTIONS, "--output_dir", tmp_path)
    assert finished.returncode == 1
    assert "`per_device_train_batch_size` is what is searched for" in finished.stderr


@pytest.mark.parametrize("options", [{"learning_rate": 0.5}, {"num_train_epochs": 9}])
def test_value_of_a_searched_option_in_a_file_is_refused(folder, tmp_path, monkeypatch, capsys, options):
    monkeypatch.syspath_prepend(SCRIPTS)  # as Python does for a script, which imports that of the task
    path = tmp_path / "options.json"
    path.write_text(json.dumps({**options, "output_dir": str(tmp_path / "search")}))
    assert run_here(monkeypatch, "sweep.py", "classification", path, *files(folder), "--use_cpu") == 1
    assert f"`{next(iter(options))}` is what is searched for" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["validation_file", "label_column"])
def test_options_of_other_data_are_refused_for_glue(folder, option):
    arguments = runpy.run_path(str(SCRIPTS / SCRIPT))["TaskArguments"]
    with pytest.raises(ValueError, match=f"`{option}` is not for `task_name`"):
        arguments(model_name_or_path=str(folder / "bert"), task_name="sst2", **{option: "x"})


def test_search_needs_a_task():
    finished = run("sweep.py", "regression")
    assert finished.returncode == 2
    assert "the first argument must be one of classification, token_classification" in finished.stderr
