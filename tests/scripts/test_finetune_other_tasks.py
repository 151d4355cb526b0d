"""Fine-tuning for tagging, multiple choice and question answering on own files, and bad input."""

import json

import pytest
from script_runner import run
from transformers import AutoModelForMultipleChoice, AutoModelForQuestionAnswering, pipeline

from hf_vanilla import VanillaBertConfig, VanillaBertForPreTraining
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer


OPTIONS = [
    "--num_train_epochs", "12", "--learning_rate", "0.01", "--per_device_train_batch_size", "8",
    "--disable_tqdm", "true", "--use_cpu",
]  # fmt: skip
NAMES, THINGS = ("anna", "bert", "carla"), ("dogs", "trees", "books")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert")
    texts = [f"{name} likes {thing} a lot" for name in NAMES for thing in THINGS]
    tokenizer = train_wordpiece_tokenizer(texts * 3, 80, show_progress=False)
    tokenizer.save_pretrained(path)
    config = VanillaBertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24,
        initializer_range=0.2, hidden_dropout_prob=0.0,
    )  # fmt: skip
    VanillaBertForPreTraining(config).save_pretrained(path)
    return path


def test_tagging_finds_names(bert, tmp_path):
    rows = [{"tokens": [name, "likes", thing], "tags": ["B-person", "O", "O"]} for name in NAMES for thing in THINGS]
    train, held_out = write(tmp_path / "train.jsonl", rows * 6), write(tmp_path / "val.jsonl", rows)
    finished = run(
        "finetune_token_classification.py", "--model_name_or_path", bert, "--train_file", train,
        "--validation_file", held_out, *OPTIONS, "--results_file", tmp_path / "r.json",
        "--output_dir", tmp_path / "run",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "r.json").read_text())["summary"]["validation"]["median"] == 1.0
    tag = pipeline("token-classification", model=str(tmp_path / "run" / "seed-42"), aggregation_strategy="simple")
    assert [(found["entity_group"], found["word"]) for found in tag("anna likes books")] == [("person", "anna")]


def test_multiple_choice_finds_endings(bert, tmp_path):
    rows = [
        {"sent1": f"{name} likes", "endings": [thing, "a lot"] if place == 0 else ["a lot", thing], "label": place}
        for name in NAMES
        for thing in THINGS
        for place in (0, 1)
    ]
    train, held_out = write(tmp_path / "train.jsonl", rows * 4), write(tmp_path / "val.jsonl", rows)
    finished = run(
        "finetune_multiple_choice.py", "--model_name_or_path", bert, "--train_file", train,
        "--validation_file", held_out, *OPTIONS, "--results_file", tmp_path / "r.json",
        "--output_dir", tmp_path / "run",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "r.json").read_text())["summary"]["validation"]["median"] == 1.0
    AutoModelForMultipleChoice.from_pretrained(tmp_path / "run" / "seed-42")


def test_question_answering_finds_answers(bert, tmp_path):
    """With contexts of many lengths, an evaluation in another order would give wrong answers."""
    rows = []
    for number, (name, thing) in enumerate((name, thing) for name in NAMES for thing in THINGS):
        context = "a lot " * (number % 5) + f"{name} likes {thing}" + " a lot" * (number % 3)
        answers = {"text": [thing], "answer_start": [context.index(thing)]}
        rows.append({"id": str(number), "question": f"{name} likes", "context": context, "answers": answers})
    several = [{**row, "id": f"{row['id']}-{copy}"} for copy in range(8) for row in rows]
    train, held_out = write(tmp_path / "train.jsonl", several), write(tmp_path / "val.jsonl", rows)
    finished = run(
        "finetune_question_answering.py", "--model_name_or_path", bert, "--train_file", train,
        "--validation_file", held_out, "--max_length", 24, "--doc_stride", 4, *OPTIONS, "--n_best", 3,
        "--eval_strategy", "epoch", "--results_file", tmp_path / "r.json", "--output_dir", tmp_path / "run",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["summary"]["validation"]["median"] == 100.0
    assert report["seeds"]["42"]["validation"]["exact_match"] == 100.0
    folder = tmp_path / "run" / "seed-42"
    predictions = json.loads((folder / "predictions.json").read_text())
    assert predictions == {row["id"]: row["answers"]["text"][0] for row in rows}
    best = json.loads((folder / "nbest_predictions.json").read_text())
    for row in rows:
        assert len(best[row["id"]]) == 3
        assert row["context"][best[row["id"]][0]["start"] : best[row["id"]][0]["end"]] == predictions[row["id"]]
    AutoModelForQuestionAnswering.from_pretrained(folder)


@pytest.mark.parametrize(
    ("script", "row", "message"),
    [
        (
            "finetune_token_classification.py",
            {"tokens": ["a", "b"], "tags": ["O"]},
            "the train data, row 1: `tags_column` must have",
        ),
        (
            "finetune_multiple_choice.py",
            {"sent1": "a", "endings": ["b", "c"], "label": 2},
            "must be a whole number in [0, 2), got 2",
        ),
        (
            "finetune_multiple_choice.py",
            {"sent1": "a", "endings": 5, "label": 0},
            "the train data, row 1: `endings_column` must be a list of strings, got 5",
        ),
        (
            "finetune_token_classification.py",
            {"tokens": ["a", "b"], "tags": [0, 1]},
            "the train data, row 1: `tags_column` must contain only strings, or",
        ),
        (
            "finetune_question_answering.py",
            {"id": "7", "question": "a", "context": "b c", "answers": {"text": ["c"], "answer_start": [1]}},
            "'c' is not at 1; there is ' '",
        ),
    ],
    ids=["tags", "choice", "endings", "numbers", "answer"],
)
def test_bad_rows_end_in_one_line(bert, tmp_path, script, row, message):
    file = write(tmp_path / "bad.jsonl", [row])
    finished = run(
        script, "--model_name_or_path", bert, "--train_file", file, "--validation_file", file, *OPTIONS,
        "--output_dir", tmp_path / "run",
    )  # fmt: skip
    assert finished.returncode == 1
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr
