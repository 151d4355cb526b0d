"""Documents of every source and file format, and their sentences."""

import csv
import gzip
import json

import pytest
from datasets import Dataset, IterableDataset

from hf_vanilla.data import files, load_documents, split_sentences


TEXTS = ["First document.\nIts second line.", "2018-01-01", "Third, with NA."]


def write(folder, kind):
    path = folder / f"documents.{kind}"
    if kind == "txt":
        path.write_text("\ufeff" + "\n \n\n".join(TEXTS) + "\n", encoding="utf-8")
    elif kind == "jsonl.gz":
        with gzip.open(path, "wt") as file:
            file.writelines(json.dumps({"text": text, "id": 3}) + "\n" for text in TEXTS)
    elif kind == "json":
        path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["id", "text"], *((number, text) for number, text in enumerate(TEXTS))])
    else:
        Dataset.from_dict({"text": TEXTS}).to_parquet(path)
    return str(path)


@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
@pytest.mark.parametrize("kind", ["txt", "jsonl.gz", "json", "csv", "parquet"])
def test_documents_of_every_file_format(tmp_path, kind, streaming):
    documents = load_documents(data_files=write(tmp_path, kind), streaming=streaming)
    assert isinstance(documents, IterableDataset if streaming else Dataset)
    assert [row["text"].strip() for row in documents] == TEXTS
    assert documents.column_names == ["text"]


def test_names_of_files_are_no_patterns(tmp_path):
    for name in ("part[1]", "part1"):
        Dataset.from_dict({"text": [name]}).to_parquet(tmp_path / f"{name}.parquet")
    for streaming in (False, True):
        documents = load_documents(data_files=str(tmp_path / "part[1].parquet"), streaming=streaming)
        assert [row["text"] for row in documents] == ["part[1]"]


def test_tabs_separate_columns_without_quotes(tmp_path):
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"x, y\n')
    assert load_documents(data_files=str(tmp_path / "a.tsv"))["text"][:] == ['"x, y']


def test_ends_of_lines_do_not_matter(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\r\n\r\nc\r\n")
    assert load_documents(data_files=str(tmp_path / "a.txt"))["text"][:] == ["a\nb\n", "c\n"]


def test_several_files_form_one_corpus(tmp_path):
    files = [write(tmp_path, kind) for kind in ("json", "txt")]
    assert len(load_documents(data_files=files)) == 6


def test_dataset_is_loaded_by_name(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    Dataset.from_dict({"body": [*TEXTS, " ", None]}).to_parquet(folder / "train.parquet")
    documents = load_documents(str(folder), text_column="body")
    assert documents["text"][:] == TEXTS


def test_changed_file_or_reader_is_read_again(tmp_path, monkeypatch):
    path = write(tmp_path, "json")
    before = load_documents(data_files=path)
    assert len(before) == 3
    monkeypatch.setattr(files, "READER_VERSION", 0)
    assert load_documents(data_files=path).cache_files != before.cache_files
    (tmp_path / "documents.json").write_text('[{"text": "only one, and longer than anything before it"}]')
    assert len(load_documents(data_files=path)) == 1


def test_empty_documents_are_left_out_and_counted(tmp_path, caplog):
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": "a b"}\n{"text": " \\n"}\n{"text": null}\n')
    assert load_documents(data_files=str(path))["text"][:] == ["a b"]
    assert "left out 2 of 3 documents" in caplog.text


@pytest.mark.parametrize("name", [None, "data_files"], ids=["dataset", "file"])
def test_empty_documents_of_a_table_are_counted(tmp_path, caplog, name):
    path = tmp_path / "corpus" / "train.parquet"
    path.parent.mkdir()
    Dataset.from_dict({"text": ["a b", " \n", None]}).to_parquet(path)
    documents = load_documents(str(path.parent)) if name is None else load_documents(data_files=str(path))
    assert documents["text"][:] == ["a b"]
    assert "left out 2 of 3 documents" in caplog.text


def test_sentences_are_not_split_at_abbreviations():
    text = 'Dr. Smith went to Washington, D.C. on Jan. 5. "Is it so?" he asked.\n\nA title\nThen he left.'
    assert split_sentences(text) == [
        "Dr. Smith went to Washington, D.C. on Jan. 5.",
        '"Is it so?" he asked.',
        "A title",
        "Then he left.",
    ]


def test_chinese_sentences_are_split():
    assert split_sentences("我爱中国。“好！”他说。是吗？") == ["我爱中国。", "“好！”他说。", "是吗？"]
    assert split_sentences(" \n\t ") == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"body": "x"}\n', r"`text_column` is missing, and .*line 1 has no column .*; it has 'body'"),
        ("a.jsonl", '{"text": "x"}\n{"text"\n', r"one JSON object a line, but line 2"),
        ("a.csv", "id\n1\n", r"`text_column` is missing, and .* has no column .*; it has 'id'"),
        ("a.csv", "id,text\n1\n", r"line 2: must have 2 fields"),
        ("a.txt", " \n\n", r"must have at least one document with text"),
        ("a.parquet", "text", r"a\.parquet must be a Parquet file with rows"),
        ("a.parquet.gz", "text", r"a\.parquet\.gz must not be compressed by gzip"),
        ("a::b.parquet", "text", "a::b.parquet must not have :: in its path"),
        ("a.csv", "\n", r"a\.csv must begin with the names of its columns, but is empty"),
    ],
    ids=["column", "json", "csv-column", "csv-fields", "empty", "parquet", "packed", "colons", "csv-empty"],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_documents(data_files=str(tmp_path / name))


@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
@pytest.mark.parametrize(
    ("name", "content", "bad"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text"\n{"body": "y"}\n{"text": 5}\n{"text": "z"}\n', 3),
        ("a.csv", b"id,text\n1,x\n2\n3,z\n", 1),
        ("a.csv", b'id,text\n1,x\n2,"y\xff\n3,y"\n4,"y\n\xff5,y"\n6,"y" y\n7,z\n8,"y\n', 4),
        ("a.txt", b"x\n\n\xff\n\xfe\n\nz\n", 2),
    ],
    ids=["json", "csv", "quotes", "text"],
)
def test_bad_records_are_skipped_and_counted(tmp_path, caplog, streaming, name, content, bad):
    (tmp_path / name).write_bytes(content)
    documents = load_documents(data_files=str(tmp_path / name), streaming=streaming, on_bad_record="skip")
    assert [row["text"].strip() for row in documents] == ["x", "z"]
    assert f"Skipped {bad} bad records, the first one because" in caplog.text


def test_other_bad_input_is_named(tmp_path):
    with pytest.raises(ValueError, match="either `dataset_name` or `data_files`, got neither"):
        load_documents()
    for options in ({"config_name": "a"}, {"revision": "a"}, {"split": "test"}):
        with pytest.raises(ValueError, match="`config_name`, `revision` and `split` belong to `dataset_name`"):
            load_documents(data_files="nowhere.txt", **options)
    with pytest.raises(FileNotFoundError, match="there is no file .*nowhere.txt"):
        load_documents(data_files="nowhere.txt")
    (tmp_path / "a.jsonl").write_text('{"text": 5}\n')
    with pytest.raises(TypeError, match="line 1: .*'text'.* must be a string, got 5"):
        load_documents(data_files=str(tmp_path / "a.jsonl"))
    (tmp_path / "a.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(ValueError, match="must be UTF-8, but line 2 is not"):
        load_documents(data_files=str(tmp_path / "a.txt"))
