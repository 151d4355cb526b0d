"""Datasets in the Hub's layouts: their splits, columns and names of classes, and held-out validation data."""

import json
import runpy

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from PIL import Image as Pictures
from script_runner import SCRIPTS, run_here
from transformers import AutoTokenizer

from hf_vanilla import VanillaBertConfig, VanillaBertForPreTraining
from hf_vanilla.command_line.finetuning import Table, TestedTaskArguments, load_splits
from hf_vanilla.command_line.splits import DatasetArguments, hold_out_validation, load_hub_splits
from hf_vanilla.data.labelled import encode_labels, load_rows
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer


WORDS = ("anna", "bert", "likes", "trees", "books", "a", "lot")
OPTIONS = ["--max_steps", "1", "--use_cpu", "--disable_tqdm", "true", "--per_device_train_batch_size", "2"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert")
    tokenizer = train_wordpiece_tokenizer([" ".join(WORDS)] * 3, 60, show_progress=False)
    tokenizer.save_pretrained(path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}
    VanillaBertForPreTraining(VanillaBertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(path)
    return path


def publish(folder, features=None, **splits):
    """Write a dataset as the Hub has it."""
    (folder / "data").mkdir(parents=True)
    for name, rows in splits.items():
        path = folder / "data" / f"{name}-00000-of-00001"
        if features is None:
            path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            Dataset.from_list(rows, features=features).to_parquet(path.with_suffix(".parquet"))
    return folder


def pairs():
    rows = []
    for number, word in enumerate(WORDS * 3):
        label = {"label": number % 2, "label_name": ("no", "yes")[number % 2]}
        rows.append({"sentence1": "anna likes", "sentence2": word, **label})
    return rows


def tagging(folder):
    features = Features(
        {"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=["O", "B-person", "B-thing"]))}
    )
    rows = [{"tokens": ["anna", "likes", "trees"], "ner_tags": [1, 0, 0]}] * 20
    return publish(folder, features, train=rows), {"0": "O", "1": "B-person", "2": "B-thing"}, {"validation"}


def classification(folder):
    secret = [{**row, "label": -1} for row in pairs()[:3]]
    return publish(folder, train=pairs(), dev=pairs()[:5], test=secret), {"0": "no", "1": "yes"}, {"validation"}


def multiple_choice(folder):
    swag = {"sent1": "anna", "sent2": "likes", "ending0": "trees", "ending1": "books", "ending2": "a lot"}
    rows = [{**swag, "label": label} for label in (0, 1, 2) * 10]
    return publish(folder, train=rows, validation=rows[:3], test=rows[:3]), None, {"validation", "test"}


def choices_with_keys(folder):
    choices = {"text": ["trees", "books"], "label": ["A", "B"]}
    rows = [{"question": "anna likes", "choices": choices, "answerKey": key} for key in "ABABA"]
    odd = {**rows[0], "choices": {"text": ["trees", "books", "a lot"], "label": ["A", "B", "C"]}}
    return publish(folder, train=[odd, *rows], validation=[*rows[:2], odd]), None, {"validation"}


def question_answering(folder):
    answers = {"text": ["trees"], "answer_start": [11]}
    return (
        publish(folder, train=[{"question": "likes", "context": "anna likes trees", "answers": answers}] * 9),
        None,
        {"validation"},
    )


@pytest.mark.parametrize(
    ("task", "build"),
    [
        ("token_classification", tagging),
        ("classification", classification),
        ("multiple_choice", multiple_choice),
        ("multiple_choice", choices_with_keys),
        ("question_answering", question_answering),
    ],
)
def test_usual_columns_splits_and_class_names_are_found(bert, tmp_path, monkeypatch, task, build):
    folder, names, scored = build(tmp_path / "dataset")
    options = ["--model_name_or_path", bert, "--dataset_name", folder, *OPTIONS, "--output_dir", tmp_path / "run"]
    assert run_here(monkeypatch, f"finetune_{task}.py", *options) == 0
    model = tmp_path / "run" / "seed-42"
    assert set(json.loads((model / "scores.json").read_text())) == scored
    if names is not None:
        assert json.loads((model / "config.json").read_text())["id2label"] == names


@pytest.mark.parametrize("secret", [-1, -1.0, "", None])
def test_test_split_with_secret_labels_is_left_out(secret):
    """-1.0 is that of GLUE's stsb."""
    splits = {"train": [4.5, -1.0], "test": [secret] * 2}
    tables = {name: Table(Dataset.from_dict({"label": labels}), name) for name, labels in splits.items()}
    assert set(load_splits(tables, {"label_column": "label"})) == {"train"}


def test_images_of_the_hub_keep_their_class_names(tmp_path, monkeypatch):
    features = Features({"img": Image(), "fine_label": ClassLabel(names=["owl", "ant"])})
    picture = Pictures.fromarray(np.zeros((8, 8, 3), dtype=np.uint8))
    folder = publish(tmp_path / "d", features, train=[{"img": picture, "fine_label": each % 2} for each in range(8)])
    options = ["--preset", "Ti/16", "--image_size", "8", "--patch_size", "4", "--hidden_size", "16",
               "--num_hidden_layers", "1", "--num_attention_heads", "4", "--intermediate_size", "24"]  # fmt: skip
    options += ["--dataset_name", folder, "--validation_share", "0.5", "--output_dir", tmp_path / "run", *OPTIONS]
    assert run_here(monkeypatch, "finetune_image_classification.py", *options) == 0
    config = json.loads((tmp_path / "run" / "seed-42" / "config.json").read_text())
    assert config["id2label"] == {"0": "owl", "1": "ant"}


def test_endings_are_in_the_order_of_their_numbers():
    module = runpy.run_path(str(SCRIPTS / "finetune_multiple_choice.py"))
    row = {"sent2": "it", **{f"ending{number}": f"is {number}" for number in range(12)}}
    (joined,) = module["with_endings"](module["Table"](Dataset.from_list([row]), "rows")).source
    assert joined["endings"] == [f"it is {number}" for number in range(12)]


def test_only_decimal_digits_are_the_index_of_an_ending():
    indexed = runpy.run_path(str(SCRIPTS / "finetune_multiple_choice.py"))["indexed"]
    assert [indexed("a", ["b", "c"], label)[2] for label in ("1", "²")] == [1, "²"]


def test_rows_with_another_number_of_endings_are_left_out_and_counted(bert, caplog):
    module = runpy.run_path(str(SCRIPTS / "finetune_multiple_choice.py"))
    arguments = module["TaskArguments"](model_name_or_path=str(bert), train_file="rows.jsonl")
    endings = (["trees", "books", "a lot"], ["books", "trees"], ["trees", "a lot"])
    rows = Dataset.from_list([{"text": "anna likes", "endings": each, "label": 1} for each in endings])
    encoded = module["encode"]("the test data", rows, arguments, AutoTokenizer.from_pretrained(bert))
    assert [len(each) for each in encoded["input_ids"]] == [2, 2]
    assert "the test data: 1 of 3 rows do not have 2 endings" in caplog.text


@pytest.mark.parametrize("script", ["pretrain_bert", "pretrain_gpt"])
def test_documents_have_splits_and_a_validation_share(tmp_path, script):
    rows = [{"content": word} for word in WORDS]
    arguments = runpy.run_path(str(SCRIPTS / f"{script}.py"))["DataArguments"]
    load = runpy.run_path(str(SCRIPTS / f"{script}.py"))["load_document_splits"]
    folder = str(publish(tmp_path / "a", train=rows))
    held_out = load(arguments(dataset_name=folder, validation_share=0.3))
    assert {name: len(rows) for name, rows in held_out.items()} == {"train": 5, "validation": 2}
    assert sorted([*held_out["train"]["text"], *held_out["validation"]["text"]]) == sorted(WORDS)
    assert set(load(arguments(dataset_name=folder, train_split="train[:3]"))) == {"train"}
    folder = str(publish(tmp_path / "b", train=rows, validation=rows[:2]))
    streamed = load(arguments(dataset_name=folder), streaming=True)
    assert len(list(streamed["train"])) == len(WORDS)
    assert streamed["validation"]["text"][:] == list(WORDS[:2])


def test_pairs_have_splits_and_a_validation_share(tmp_path):
    module = runpy.run_path(str(SCRIPTS / "train_translation.py"))
    rows = [{"translation": {"en": word, "de": word.upper()}} for word in WORDS]
    folder = str(publish(tmp_path / "a", train=rows, extra=rows))
    columns = {"dataset_name": folder, "source_column": "en", "target_column": "de"}
    data = module["load_data"](module["DataArguments"](**columns, validation_share=0.3))
    assert {name: len(split) for name, split in data.items()} == {"train": 5, "validation": 2}
    data = module["load_data"](module["DataArguments"](**columns, validation_split="extra[:3]"))
    assert data["validation"]["target"][:] == [word.upper() for word in WORDS[:3]]
    with pytest.raises(ValueError, match="`validation_share` is not for `streaming`"):
        module["load_data"](module["DataArguments"](**columns, validation_share=0.3, streaming=True))


@pytest.mark.parametrize("train_split", ["train+validation", "train+validation[:50%]+test", "all"])
def test_splits_in_use_are_not_chosen_for_validation_or_test(tmp_path, train_split):
    rows = [{"text": "a"}] * 2
    folder = publish(tmp_path / "a", train=rows, validation=rows, test=rows)
    arguments = DatasetArguments(dataset_name=str(folder), train_split=train_split)
    arguments.test_split = None  # of the scripts for fine-tuning
    assert set(load_hub_splits(arguments)) == {"train"} | ({"test"} if train_split == "train+validation" else set())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_split": "tran"}, "`train_split` must be a split .* got 'tran'; there is train"),
        ({"validation_split": "val[:2]"}, r"`validation_split` must be a split .* got 'val\[:2\]'; there is train"),
        ({"validation_share": 1.5}, "`validation_share` must be above 0 and below 1, got 1.5"),
        ({"validation_share": 0.5, "validation_split": "a"}, "either `validation_share` or `validation_split`"),
        ({"dataset_name": None, "dataset_revision": "x"}, "`dataset_revision` is an option of `dataset_name`"),
        ({"dataset_name": None, "train_split": "train[:9]"}, "`train_split` is an option of `dataset_name`"),
        ({"train_split": "all", "validation_split": "a"}, r"`train_split` \(all\) has the rows of `validation_split`"),
        ({"train_split": "train[:50%]", "streaming": True}, "`train_split` must be a whole split for `streaming`"),
    ],
    ids=["train", "part", "share", "both", "files", "part of files", "all", "part of a stream"],
)
def test_bad_splits_are_named(tmp_path, options, message):
    folder = publish(tmp_path / "a", train=[{"text": "a"}] * 2)
    given = {"dataset_name": str(folder), "streaming": False, **options}
    with pytest.raises(ValueError, match=message):
        load_hub_splits(streaming=given.pop("streaming"), arguments=DatasetArguments(**given))


@pytest.mark.parametrize("split", ["validation", "test"])
def test_data_to_score_on_is_given_once(split):
    given = {"model_name_or_path": ".", "dataset_name": "a", f"{split}_split": "b", f"{split}_file": "c.jsonl"}
    with pytest.raises(ValueError, match=f"Pass either `{split}_split` or `{split}_file`"):
        TestedTaskArguments(**given)


def test_held_out_rows_are_always_the_same():
    rows = Dataset.from_dict({"number": list(range(40))})
    first, again = (hold_out_validation({"train": rows}, 0.1)["validation"]["number"][:] for _ in range(2))
    assert first == again
    assert len(set(first)) == 4
    assert first != sorted(first)
    last = hold_out_validation({"train": rows}, 0.1, shuffle=False)
    assert last["validation"]["number"][:] == [36, 37, 38, 39]
    kept = hold_out_validation({"train": rows, "validation": rows}, 0.1)
    assert len(kept["train"]) == len(kept["validation"]) == 40
    with pytest.raises(ValueError, match="`validation_share` needs at least 2 rows"):
        hold_out_validation({"train": rows.select([0])}, 0.1)


def test_messages_name_the_option_of_a_column(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"stars": 1}\n{"stars": null}\n{"star": 1}\n')
    with pytest.raises(ValueError, match=r"line 2: `label_column` \('stars'\) must have a value"):
        load_rows(path, {"label_column": "stars"})
    table = Dataset.from_dict({"stars": [1, None]})
    with pytest.raises(ValueError, match=r"mine, row 2: `label_column` \('stars'\) must have a value"):
        load_rows(table, {"label_column": "stars"}, "mine")
    with pytest.raises(ValueError, match="`label_column` must name a column, but mine has no 'x'; it has 'stars'"):
        load_rows(table, {"label_column": "x"}, "mine")


def test_names_of_classes_keep_the_order_of_their_ids():
    columns = {"label": [10, 2, 10], "label_name": ["zebra", "ant", "zebra"]}
    several = Dataset.from_dict(columns)
    labels, encoded = encode_labels({"train": several, "validation": several.select([1])})
    assert (labels.names, encoded) == (["ant", "zebra"], {"train": [1, 0, 1], "validation": [0]})
    with pytest.raises(ValueError, match="row 3: a label must have one name, but 10 is 'ant' here and 'zebra' before"):
        encode_labels({"train": Dataset.from_dict({**columns, "label_name": ["zebra", "ant", "ant"]})})
    features = Features({"label": List(ClassLabel(names=["joy", "fear", "awe"]))})
    labels, encoded = encode_labels({"train": Dataset.from_dict({"label": [[2], [0, 1], []]}, features=features)})
    assert labels.problem_type == "multi_label_classification"
    assert encoded["train"] == [[0, 0, 1], [1, 1, 0], [0, 0, 0]]
    secret = Dataset.from_dict({"label": [-1]}, features=Features({"label": ClassLabel(names=["no", "yes"])}))
    with pytest.raises(ValueError, match="the train data, row 1: 'label' must be one of the classes 0 to 1, got -1"):
        encode_labels({"train": secret})


def test_names_are_for_labels_of_classes_alone():
    def encoded(**columns):
        labels, found = encode_labels({"train": Dataset.from_dict(columns)})
        return labels.names, found["train"]

    assert encoded(label=[4.5, 2.0], label_name=["4.5", "2.0"]) == (["score"], [4.5, 2.0])
    assert encoded(label=[1.0, 0.0], label_name=["yes", "no"]) == (["no", "yes"], [1, 0])
    names = [f"class {label}" for label in range(11)]
    assert encoded(label=[float(label) for label in range(11)], label_name=names)[0] == names
    lists, expected = [[0, 2], [1]], [[1, 0, 1], [0, 1, 0]]
    assert encoded(label=lists, label_name=[["joy", "awe"], ["fear"]]) == (["awe", "fear", "joy"], expected)
    assert encoded(label=lists, label_name=["joy, awe", "fear"]) == (["0", "1", "2"], expected)
