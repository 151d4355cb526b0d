"""Labelled rows of every file format, and their labels."""

import csv
import gzip
import json

import pytest
from datasets import Dataset

from hf_vanilla.data.files import read_lines
from hf_vanilla.data.labelled import Labels, infer_labels, load_rows


ROWS = [{"text": "2018-01-01", "label": "no", "other": 1}, {"text": "NA", "label": "yes", "other": 2}]


def write(folder, kind):
    path = folder / f"rows.{kind}"
    if kind == "jsonl.gz":
        with gzip.open(path, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in ROWS)
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "parquet":
        Dataset.from_list(ROWS).to_parquet(path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]), delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(ROWS)
    return path


@pytest.mark.parametrize("kind", ["jsonl.gz", "json", "csv", "tsv", "parquet"])
def test_rows_of_every_file_format(tmp_path, kind):
    rows = load_rows(write(tmp_path, kind), ["text", "label"])
    assert rows.to_list() == [{"text": row["text"], "label": row["label"]} for row in ROWS]


@pytest.mark.parametrize(
    ("labels", "problem_type", "names", "encoded"),
    [
        (["no", "yes", "no"], "single_label_classification", ["no", "yes"], [0, 1, 0]),
        ([2, 10, 0], "single_label_classification", ["0", "2", "10"], [1, 2, 0]),
        (["2", "10"], "single_label_classification", ["2", "10"], [0, 1]),
        (["²", "--1", "7"], "single_label_classification", ["7", "--1", "²"], [2, 1, 0]),
        (["1", "01", "001"], "single_label_classification", ["001", "01", "1"], [2, 1, 0]),
        ([0.5, 2.0], "regression", ["score"], [0.5, 2.0]),
        (["5", "4.5", "-3"], "regression", ["score"], [5.0, 4.5, -3.0]),
        (["1.5", "2", "b"], "single_label_classification", ["2", "1.5", "b"], [1, 0, 2]),
        ([["a", "b"], [], ["b"]], "multi_label_classification", ["a", "b"], [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]),
    ],
    ids=[
        "names",
        "numbers",
        "strings",
        "odd digits",
        "equal values",
        "fractions",
        "a fraction",
        "a fraction and a name",
        "lists",
    ],
)
def test_problem_type_is_inferred(labels, problem_type, names, encoded):
    found = infer_labels(labels)
    assert (found.problem_type, found.names) == (problem_type, names)
    assert found.encode(labels, "the data") == encoded
    fields = found.config_fields()
    assert fields["num_labels"] == len(names)
    assert fields["label2id"] == {name: number for number, name in fields["id2label"].items()}


def test_whole_numbers_can_be_a_regression():
    assert infer_labels(["1", "5"], regression=True).encode(["3"], "the data") == [3.0]


@pytest.mark.parametrize(
    "labels",
    [[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], [[0, 1], [1, 0]], [["0", "1"], ["1", "0"]], [["a"], ["b", "a", "b"]]],
)
def test_lists_of_a_0_or_1_for_every_label_are_refused(labels):
    with pytest.raises(ValueError, match="a list of labels must name those that apply, each once, not have a 0 or 1"):
        infer_labels(labels).encode(labels, "the data")
    known = Labels("multi_label_classification", ["awe", "fear", "joy"])
    with pytest.raises(ValueError, match=r"the test data, row 2: a list of labels must name .*; got \[0, 1, 0\]"):
        known.encode([["joy"], [0, 1, 0]], "the test data")


def test_bad_labels_are_named():
    with pytest.raises(ValueError, match=r"at least two classes, got only \['yes'\]"):
        infer_labels(["yes", "yes"])
    for empty in ("", ["b", ""], ["b", None]):
        with pytest.raises(ValueError, match="Training data, row 2: a label must not be empty; name the class"):
            infer_labels([["a"] if isinstance(empty, list) else "a", empty])
    with pytest.raises(ValueError, match="at least one label, but all lists of labels are empty"):
        infer_labels([[], []])
    with pytest.raises(ValueError, match="Training data, row 2: a label for regression must be a number, got 'x'"):
        infer_labels([1, "x"], regression=True)
    labels = Labels("single_label_classification", ["no", "yes"])
    with pytest.raises(
        ValueError, match=r"the test data, row 2: the label must be one of \['no', 'yes'\], .*got 'maybe'"
    ):
        labels.encode(["yes", "maybe"], "the test data")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n', r"line 1 has no 'label'; it has 'text'"),
        ("a.jsonl", '{"text": "x", "label": null}\n', r"line 1: 'label' must have a value"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": "x", "label": "a"}\n', r"must be of one type"),
        (
            "a.jsonl",
            '{"text": "x", "label": 1}\n{"text": "\\ud800", "label": 1}\n',
            r"line 2: 'text' must be valid Unicode",
        ),
        (
            "a.jsonl",
            f'{{"text": "x", "label": {10**30}}}\n{{"text": "x", "label": 1}}\n',
            r"a.jsonl, row 1: 'label' must be a number of at most 64 bits, got 10{30}\.",
        ),
        ("a.jsonl", "", r"must have at least one row"),
        (
            "a.jsonl",
            '{"text": "x", "label": 1}\n{"text": ' + "9" * 5000 + "}",
            r"a.jsonl must have one JSON object a line, but line 2: E",
        ),
        ("a.jsonl", '{"text": ' + "[" * 100_000, r"a.jsonl must have one JSON object a line, but line 1: maximum rec"),
        ("a.json", "[" * 100_000, r"a.json must be valid JSON: maximum recursion"),
        ("a.csv", "text,label\nx\n", r"line 2: must have 2 fields as the header"),
        ("a.csv", "text,label,text\nx,y,z\n", r"columns of different names, but 'text' is twice in its header"),
        ("a.doc", "text", r"must end in .json, .jsonl, .csv, .tsv "),
    ],
    ids=[
        "column",
        "null",
        "types",
        "surrogate",
        "overflow",
        "empty",
        "digits",
        "depth",
        "array",
        "fields",
        "twice",
        "ending",
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_rows(tmp_path / name, ["text", "label"])
    with pytest.raises(FileNotFoundError, match="there is no file .*nowhere.csv"):
        load_rows(tmp_path / "nowhere.csv", ["text"])


def test_blank_lines_before_an_array_are_skipped(tmp_path):
    (tmp_path / "a.json").write_text("\n \n" + json.dumps(ROWS, indent=1))
    assert len(load_rows(tmp_path / "a.json", ["text", "label"])) == len(ROWS)


def test_long_fields_are_read(tmp_path):
    (tmp_path / "a.csv").write_text(f"text,label\n{'word ' * 40_000},yes\n")
    assert len(load_rows(tmp_path / "a.csv", ["text", "label"])["text"][0]) == 200_000


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_recognized(tmp_path, encoding):
    mark = "" if encoding == "utf-16" else "\ufeff"
    (tmp_path / "a.csv").write_bytes(f"{mark}text,label\nx,y\n".encode(encoding))
    with pytest.raises(ValueError, match="must be UTF-8, but line 1 .* for it is UTF-16: `iconv -f UTF-16 -t UTF-8`"):
        load_rows(tmp_path / "a.csv", ["text", "label"])
    with pytest.raises(ValueError, match="must be UTF-8, but line 1 .* for it is UTF-16: `iconv -f UTF-16 -t UTF-8`"):
        read_lines(str(tmp_path / "a.csv"))
