import csv
import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict, Translation, Value
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, PreTrainedTokenizerFast

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.data import parallel
from hf_vanilla.data.parallel import load_parallel_dataset, tokenize_parallel_dataset
from hf_vanilla.data.tokenization import train_tokenizer


# What readers of text, JSON and CSV trip over: other line ends, quotes, dates, missing-value words, numerals.
PAIRS = [
    ("A dog.", "Ein Hund."),
    ("one\u2028line\x0cstill\x85one\x1c", "eine\u2029Zeile\x0b"),
    ('say "hi", you', "sag „hallo“, du"),
    ("3 March 1998", "1998-03-03"),
    ("NA", "null"),
    ("007", "1e5"),
    ("  spaces \t kept ", "e\u0301 我们 👩\u200d🚀"),
    ("carriage\rreturn", "x"),
]
ROWS = [{"source": source, "target": target} for source, target in PAIRS]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(parallel.logger, "warning", messages.append)
    return messages


def write(path: Path, content: bytes | str) -> str:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def write_text_files(folder: Path, ending: str = "", line_end: str = "\n", start: str = "") -> tuple[str, str]:
    source, target = ("".join(text + line_end for text in side) for side in zip(*PAIRS, strict=True))
    return write(folder / f"train.en{ending}", start + source), write(folder / f"train.de{ending}", start + target)


def write_table(folder: Path, ending: str, source: str = "en", target: str = "de") -> str:
    path = folder / f"train{ending}"
    rows = [{"id": number, source: pair[0], target: pair[1]} for number, pair in enumerate(PAIRS)]
    kind = ending.removesuffix(".gz")
    if kind == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
        return str(path)
    if kind == ".csv":
        with open(folder / "plain.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["id", source, target], quoting=csv.QUOTE_NONNUMERIC)
            writer.writeheader()
            writer.writerows(rows)
        return write(path, (folder / "plain.csv").read_bytes())
    if kind == ".json":
        return write(path, json.dumps(rows, indent=2))
    return write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def load_train(files, streaming: bool = False, source_column: str = "en", target_column: str = "de"):
    loaded = load_parallel_dataset(
        data_files={"train": files}, source_column=source_column, target_column=target_column, streaming=streaming
    )
    assert isinstance(loaded, IterableDatasetDict if streaming else DatasetDict)
    assert list(loaded) == ["train"]
    assert isinstance(loaded["train"], IterableDataset if streaming else Dataset)
    return loaded["train"]


streamed_or_not = pytest.mark.parametrize("streaming", [False, True], ids=["mapped", "streamed"])


@streamed_or_not
@pytest.mark.parametrize("ending", ["", ".gz"], ids=["plain", "gz"])
@pytest.mark.parametrize(("line_end", "start"), [("\n", ""), ("\r\n", "\ufeff")], ids=["unix", "windows"])
def test_two_text_files(tmp_path: Path, streaming: bool, ending: str, line_end: str, start: str, warnings) -> None:
    train = load_train(write_text_files(tmp_path, ending, line_end, start), streaming)
    assert list(train) == ROWS
    assert train.column_names == ["source", "target"]
    assert warnings == []


def test_last_line_needs_no_line_end(tmp_path: Path) -> None:
    files = (write(tmp_path / "a", "one\ntwo"), write(tmp_path / "b", "eins\nzwei\n"))
    assert list(load_train(files)) == [{"source": "one", "target": "eins"}, {"source": "two", "target": "zwei"}]


@streamed_or_not
@pytest.mark.parametrize("ending", [".json", ".jsonl", ".csv", ".parquet", ".json.gz", ".jsonl.gz", ".csv.gz"])
def test_tables(tmp_path: Path, ending: str, streaming: bool) -> None:
    train = load_train(write_table(tmp_path, ending), streaming)
    assert list(train) == ROWS
    assert train.column_names == ["source", "target"]


def test_columns_may_be_named_target_and_source(tmp_path: Path) -> None:
    path = write_table(tmp_path, ".parquet", source="target", target="source")
    assert list(load_train(path, source_column="target", target_column="source")) == ROWS


@pytest.mark.parametrize("ending", [".json", ".jsonl"])
def test_translation_objects_of_a_json_file(tmp_path: Path, ending: str) -> None:
    rows = [{"translation": {"en": source, "de": target}} for source, target in PAIRS]
    lines = json.dumps(rows) if ending == ".json" else "\n".join(map(json.dumps, rows)) + "\n\n"
    assert list(load_train(write(tmp_path / f"train{ending}", lines))) == ROWS


@streamed_or_not
def test_dataset_by_name_with_a_translation_column(tmp_path: Path, streaming: bool) -> None:
    features = Features({"id": Value("int32"), "translation": Translation(["de", "en"])})
    rows = [{"id": 1, "translation": {"en": source, "de": target}} for source, target in PAIRS]
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        Dataset.from_list(rows, features=features).to_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    loaded = load_parallel_dataset(str(tmp_path), source_column="en", target_column="de", streaming=streaming)
    assert set(loaded) == {"train", "test"}
    assert list(loaded["test"]) == ROWS
    with pytest.raises(
        ValueError, match=r"`target_column` must name a column.*'translation'.*no 'fr'; it has 'de', 'en'"
    ):
        load_parallel_dataset(str(tmp_path), source_column="en", target_column="fr", streaming=streaming)


def test_several_splits_of_different_kinds(tmp_path: Path) -> None:
    files = {"train": write_text_files(tmp_path), "validation": write_table(tmp_path, ".csv", "source", "target")}
    loaded = load_parallel_dataset(data_files=files)
    assert list(loaded["train"]) == list(loaded["validation"]) == ROWS


def test_changed_pair_of_files_is_read_again(tmp_path: Path) -> None:
    files = write_text_files(tmp_path)
    assert len(load_train(files)) == len(PAIRS)
    for path in files:
        Path(path).write_text("new\n", encoding="utf-8")
    assert list(load_train(files)) == [{"source": "new", "target": "new"}]


@streamed_or_not
def test_empty_lines_are_named_and_left_out(tmp_path: Path, streaming: bool, warnings: list[str]) -> None:
    source = "".join("\n" if number % 2 else f"s{number}\n" for number in range(24)) + "last\n"
    target = "".join(f"t{number}\n" for number in range(24)) + " \t\r\n"
    files = (write(tmp_path / "a.en", source), write(tmp_path / "a.de", target))
    rows = list(load_train(files, streaming))
    assert [row["source"] for row in rows] == [f"s{number}" for number in range(0, 24, 2)]
    assert [row["target"] for row in rows] == [f"t{number}" for number in range(0, 24, 2)]
    assert warnings == [
        f"{files[0]} and {files[1]}: left out 13 of 25 pairs because a side is empty "
        "(number 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, ...)."
    ]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_empty_fields_of_a_table_are_named_and_left_out(tmp_path: Path, ending: str, warnings: list[str]) -> None:
    rows = [{"en": "a", "de": "b"}, {"en": None, "de": "c"}, {"en": "d", "de": " "}, {"en": "e", "de": "f"}]
    path = tmp_path / f"train{ending}"
    Dataset.from_list(rows).to_parquet(path) if ending == ".parquet" else Dataset.from_list(rows).to_json(path)
    assert list(load_train(str(path))) == [{"source": "a", "target": "b"}, {"source": "e", "target": "f"}]
    assert warnings == [f"{path}: left out 2 of 4 pairs because a side is empty (number 2, 3)."]


def test_empty_fields_of_a_stream_are_named_as_they_come(tmp_path: Path, warnings: list[str]) -> None:
    rows = [{"en": None if number % 2 else "a", "de": str(number)} for number in range(30)]
    Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    train = load_train(str(tmp_path / "train.parquet"), streaming=True)
    assert [row["target"] for row in train] == [str(number) for number in range(0, 30, 2)]
    assert len(warnings) == 10
    assert warnings[0].endswith("left out pair 2 because a side is empty.")
    assert warnings[9].endswith("left out pair 20 because a side is empty; further ones are not named.")


@pytest.mark.parametrize(("more_source", "more_target"), [(0, 3), (2, 0)], ids=["target", "source"])
@streamed_or_not
def test_unequal_line_counts_are_named(tmp_path: Path, streaming: bool, more_source: int, more_target: int) -> None:
    source = write(tmp_path / "a.en", "s\n" * (5 + more_source))
    target = write(tmp_path / "a.de.gz", "t\n" * (5 + more_target))
    message = f"{source} has {5 + more_source} and {target} has {5 + more_target};"
    with pytest.raises(ValueError, match=message):
        load_train((source, target), streaming)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"en": "a", "de": "b"}\n{"en": "\xff"}\n', r"must be UTF-8, but line 2 is not: .*\(0xff\)"),
        ("a.csv", b"en,de\na,b\nc,\xe4\n", r"must be UTF-8, but line 3 is not: .* at byte 2 of the line \(0xe4\)"),
        ("a.jsonl.gz", b'\n\n\xc3\n', r"a\.jsonl\.gz must be UTF-8, but line 3 is not"),
        ("a.jsonl", '{"en": "a", "de": "b"}\n{"en": "a" "de"}', r"one JSON object a line, but line 2: Expecting ','"),
        ("a.jsonl", '{"en": "a", "de": "b"}\n"text"\n', r"a\.jsonl, line 2: must be a JSON object, got str"),
        ("a.jsonl", '{"en": "a", "de": "b"}\n{"en": "a", "fr": "b"}\n', r"line 2 has no 'de'; it has 'en', 'fr'"),
        ("a.jsonl", '{"en": "a", "de": "\\ud800"}\n', r"line 1: 'de' must be valid Unicode, but has a lone surrogate"),
        ("a.json", '[{"en": "a"},\n {"en": ]', r"a\.json must be valid JSON, but line 2: Expecting value"),
        ("a.json", '[\n{"en": "a", "de": "b"},\n{"fr": "a"}]', r"a\.json, item 2 has no 'en'; it has 'fr'"),
        ("a.json", '[{"en": "\\ud800", "de": "b"}]', r"a\.json, item 1: 'en' must be valid Unicode"),
        ("a.json", '[{"en": "a", "de": "b"}, 5]', r"a\.json, item 2: must be a JSON object, got int"),
        ("a.csv", "en,fr\na,b\n", r"`target_column` must name a column, but .*a\.csv has no 'de'; it has 'en', 'fr'"),
        ("a.csv", "en,de\na,b\nc\n", r"a\.csv, line 3: must have 2 fields as the header"),
        ("a.csv", 'en,de\na,"b\nc', r"a\.csv must be a valid table, but line 3: unexpected end of data"),
        ("a.jsonl", '{"en": "", "de": "b"}\n', r"must have at least one pair with text on both sides"),
        ("a.jsonl", "", r"a\.jsonl must have at least one pair"),
        ("a.txt", "text\n", r"`data_files` must end in \.json, .*a\.txt; for plain text give two files"),
    ],
    ids=[
        "json_bytes", "csv_bytes", "gz_bytes", "json_syntax", "json_text", "json_field", "json_surrogate",
        "array_syntax", "array_field", "array_surrogate", "array_item", "csv_column", "csv_fields", "csv_quote",
        "all_empty", "no_line", "ending",
    ],
)  # fmt: skip
@streamed_or_not
def test_bad_file_is_named(tmp_path: Path, streaming: bool, name: str, content: bytes | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_train(write(tmp_path / name, content), streaming)


def test_bad_bytes_of_a_text_file_are_named(tmp_path: Path) -> None:
    files = (write(tmp_path / "a.en", "s\n" * 4), write(tmp_path / "a.de", b"t\nt\nGr\xfc\xdfe\nt\n"))
    message = r"a\.de must be UTF-8, but line 3 is not: invalid start byte at byte 2 of the line \(0xfc\)"
    with pytest.raises(ValueError, match=message):
        load_train(files)


@streamed_or_not
@pytest.mark.parametrize(
    ("name", "content", "first"),
    [
        (
            "a.jsonl",
            b'{"en": "a", "de": "b"}\n{"en": \n[7]\n{"en": "c"}\n{"en": 3, "de": "d"}\n{"en": "e", "de": "f"}\n',
            "one JSON object a line, but line 2",
        ),
        (
            "a.json",
            b'[{"en": "a", "de": "b"}, 5, {"en": "x"}, {"en": "e", "de": "f"}, 6, 7]',
            "item 2: must be a JSON",
        ),
        ("a.csv", b"en,de\na,b\nc\nd\n\xff,g\nh,i,j\ne,f\n", "line 3: must have 2 fields"),
        ("a.en", b"a\n\xff\n\xfe\n\xe4\n\xfc\ne\n", "must be UTF-8, but line 2 is not"),
    ],
    ids=["lines", "array", "table", "text"],
)
def test_bad_records_are_skipped_and_counted(tmp_path, caplog, streaming, name, content, first) -> None:
    files = write(tmp_path / name, content)
    if name == "a.en":
        files = (files, write(tmp_path / "a.de", "b\n1\n2\n3\n4\nf\n"))
    loaded = load_parallel_dataset(
        data_files={"train": files},
        source_column="en",
        target_column="de",
        streaming=streaming,
        on_bad_record="skip",
    )
    assert list(loaded["train"]) == [{"source": "a", "target": "b"}, {"source": "e", "target": "f"}]
    (warning,) = [text for text in caplog.messages if "bad records" in text]
    assert warning.startswith("Skipped 4 bad records, the first one because: ")
    assert first in warning


def test_bad_rows_of_a_streamed_table_are_skipped(tmp_path: Path, caplog) -> None:
    rows = [{"en": "a", "de": "b"}, {"en": 5, "de": "c"}, {"en": "\ud800", "de": "d"}, {"en": "e"}]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    pairs = parallel.pairs_of_table(stream, ("en", "de"), "the table", "skip")
    assert list(pairs) == [{"source": "a", "target": "b"}]
    assert "the table, pair 2: 'en' must be a string, got 5" in caplog.text
    with pytest.raises(ValueError, match="the table, pair 4 has no 'de'"):
        list(
            parallel.pairs_of_table(
                IterableDataset.from_generator(lambda: iter([rows[0]] * 3 + [rows[3]])), ("en", "de"), "the table"
            )
        )
    with pytest.raises(TypeError, match="pair 2"):
        list(parallel.pairs_of_table(stream, ("en", "de"), "the table"))


@streamed_or_not
@pytest.mark.parametrize("rows", [None, []], ids=["no parquet", "no rows"])
def test_bad_parquet_files_are_named(tmp_path: Path, rows: list | None, streaming: bool) -> None:
    path = write(tmp_path / "a.parquet", "no table")
    if rows is not None:
        Dataset.from_dict({"en": rows, "de": rows}).to_parquet(path)
    with pytest.raises(ValueError, match=r"a\.parquet must be a Parquet file with rows"):
        load_train(path, streaming)


@streamed_or_not
def test_rows_without_a_translation_are_left_out(tmp_path: Path, streaming: bool, caplog) -> None:
    rows = [{"translation": row} for row in (None, {"en": "a", "de": "b"}, None)]
    Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    pairs = load_train(str(tmp_path / "train.parquet"), streaming)
    assert list(pairs) == [{"source": "a", "target": "b"}]
    assert "because a side is empty" in caplog.text


def test_other_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="`on_bad_record` must be stop or skip, got 'ignore'"):
        load_parallel_dataset("nothing", on_bad_record="ignore")


def test_incomplete_gzip_file_is_named(tmp_path: Path) -> None:
    source, target = write_text_files(tmp_path, ".gz")
    Path(target).write_bytes(Path(target).read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"train\.de\.gz must be a complete gzip file, but after line \d+: "):
        load_train((source, target))
    Path(target).write_text("no gzip at all", encoding="utf-8")
    with pytest.raises(ValueError, match=r"train\.de\.gz must be a complete gzip file, .* line 0: Not a gzipped"):
        load_train((source, target))


@streamed_or_not
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_column_of_numbers_is_rejected(tmp_path: Path, ending: str, streaming: bool) -> None:
    path = tmp_path / f"train{ending}"
    rows = Dataset.from_list([{"en": "a", "de": 5}])
    rows.to_parquet(path) if ending == ".parquet" else rows.to_json(path)
    with pytest.raises(TypeError, match=r"'de'\)? must (be a string, got 5|contain strings, got int64)"):
        list(load_train(str(path), streaming))


@streamed_or_not
def test_missing_column_of_a_table_is_named(tmp_path: Path, streaming: bool) -> None:
    path = write_table(tmp_path, ".parquet")
    with pytest.raises(ValueError, match=r"`source_column` must name a column.*no 'english'; it has 'id', 'en', 'de'"):
        load_train(path, streaming, source_column="english")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "Pass either `dataset_name` or `data_files`, got neither"),
        ({"data_files": {}}, ValueError, "got neither"),
        ({"data_files": "train.jsonl"}, TypeError, "`data_files` must map names of splits to files, .*'train.jsonl'"),
        ({"dataset_name": "a", "data_files": {"train": "b"}}, ValueError, "got both"),
        ({"data_files": {"train": "b"}, "revision": "main"}, ValueError, "`config_name` and `revision` belong to"),
        ({"data_files": {"train": "b"}, "config_name": "de-en"}, ValueError, "`config_name` and `revision` belong to"),
        ({"dataset_name": "a", "source_column": "x", "target_column": "x"}, ValueError, "must differ, both are 'x'"),
        ({"data_files": {"train": "/no/such.jsonl"}}, FileNotFoundError, r"data_files\['train'\].*no file /no/such"),
        (
            {"data_files": {"test": ("a", "b", "c")}},
            TypeError,
            r"`data_files\['test'\]` must be one file, or a source",
        ),
        ({"data_files": {"test": ["a.csv", "b.csv"]}}, ValueError, "two files must be .* but a.csv is a table"),
        ({"data_files": {"test": 5}}, TypeError, r"must be one file, or a source file and a target file, got 5"),
    ],
    ids=["neither", "no_files", "a_file", "both", "revision", "config", "columns", "absent", "three", "tables", "int"],
)
def test_bad_sources_of_data_are_named(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_parallel_dataset(**arguments)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([text for pair in PAIRS for text in pair] * 3, 300, show_progress=False)


@pytest.fixture
def pairs() -> DatasetDict:
    return DatasetDict(train=Dataset.from_list(ROWS), validation=Dataset.from_list(ROWS[:2]))


def expected_columns(tokenizer: PreTrainedTokenizerFast, source: str, target: str) -> dict[str, list[int]]:
    input_ids = tokenizer(source)["input_ids"]
    return {
        "input_ids": input_ids,
        "attention_mask": [1] * len(input_ids),
        "labels": tokenizer(target)["input_ids"],
    }


@streamed_or_not
def test_tokenized_columns(tokenizer: PreTrainedTokenizerFast, pairs: DatasetDict, streaming: bool, warnings) -> None:
    if streaming:
        pairs = IterableDatasetDict({name: split.to_iterable_dataset() for name, split in pairs.items()})
    tokenized = tokenize_parallel_dataset(pairs, tokenizer)
    assert type(tokenized) is type(pairs)
    assert list(tokenized) == ["train", "validation"]
    for name, rows in (("train", PAIRS), ("validation", PAIRS[:2])):
        assert list(tokenized[name]) == [expected_columns(tokenizer, *pair) for pair in rows]
        assert tokenized[name].column_names == ["input_ids", "attention_mask", "labels"]
    assert warnings == []


def test_single_split_and_other_columns(tokenizer: PreTrainedTokenizerFast, pairs: DatasetDict) -> None:
    split = pairs["train"].add_column("id", list(range(len(PAIRS))))
    tokenized = tokenize_parallel_dataset(split, tokenizer)
    assert isinstance(tokenized, Dataset)
    assert list(tokenized) == [expected_columns(tokenizer, *pair) for pair in PAIRS]


def test_target_can_have_its_own_tokenizer(tokenizer: PreTrainedTokenizerFast, pairs: DatasetDict) -> None:
    other = train_tokenizer([target for _, target in PAIRS] * 5, 310, algorithm="unigram", show_progress=False)
    tokenized = tokenize_parallel_dataset(pairs["train"], tokenizer, other)
    assert tokenized["labels"][:] == [other(target)["input_ids"] for _, target in PAIRS]
    assert tokenized["labels"][:] != [tokenizer(target)["input_ids"] for _, target in PAIRS]
    assert tokenized["input_ids"][:] == [tokenizer(source)["input_ids"] for source, _ in PAIRS]


def test_truncated_sides_keep_their_left_part_and_are_counted(
    tokenizer: PreTrainedTokenizerFast, pairs: DatasetDict, warnings: list[str]
) -> None:
    whole = [expected_columns(tokenizer, *pair) for pair in PAIRS]
    for _ in range(2):
        # The second result comes from the cache, with the same warnings.
        warnings.clear()
        tokenized = tokenize_parallel_dataset(pairs, tokenizer, max_source_length=6, max_target_length=9)
        for column, limit in (("input_ids", 6), ("labels", 9)):
            for row, uncut in zip(tokenized["train"][column], whole, strict=True):
                ids = uncut[column]
                assert row == (ids if len(ids) <= limit else [*ids[: limit - 1], 2])
        assert all(len(row["attention_mask"]) == len(row["input_ids"]) for row in tokenized["train"])
        sources = sum(len(row["input_ids"]) > 6 for row in whole)
        targets = sum(len(row["labels"]) > 9 for row in whole)
        assert 0 < sources < len(PAIRS)
        assert 0 < targets < len(PAIRS)
        assert len(warnings) == 2
        assert warnings[0] == (
            f"train: of {len(PAIRS)} pairs, truncated {sources} sources to `max_source_length` (6 tokens) and "
            f"{targets} targets to `max_target_length` (9 tokens); the left part is kept."
        )
        assert warnings[1].startswith("validation: of 2 pairs, truncated ")


def test_only_the_truncated_side_is_named(tokenizer: PreTrainedTokenizerFast, pairs: DatasetDict, warnings) -> None:
    tokenize_parallel_dataset(pairs["validation"], tokenizer, max_target_length=3)
    assert warnings == [
        "the dataset: of 2 pairs, truncated 2 targets to `max_target_length` (3 tokens); the left part is kept."
    ]


def test_streamed_truncation_is_logged_at_powers_of_ten(
    tokenizer: PreTrainedTokenizerFast, warnings: list[str]
) -> None:
    rows = [{"source": "too long a text" if number % 1000 == 7 else "ok", "target": "ok"} for number in range(12_000)]
    tokenized = tokenize_parallel_dataset(
        Dataset.from_list(rows).to_iterable_dataset(), tokenizer, max_source_length=5
    )
    assert sum(len(row["input_ids"]) == 5 and row["input_ids"][-1] == 2 for row in tokenized) == 12
    assert warnings == [
        f"the dataset so far: of {pairs} pairs, truncated {count} sources to `max_source_length` (5 tokens); "
        "the left part is kept."
        for pairs, count in ((1000, 1), (10_000, 10))
    ]


def test_number_of_processes_does_not_matter(tokenizer: PreTrainedTokenizerFast, pairs: DatasetDict, warnings) -> None:
    alone = tokenize_parallel_dataset(pairs["train"], tokenizer, max_source_length=6)
    shared = tokenize_parallel_dataset(pairs["train"], tokenizer, max_source_length=6, num_proc=2)
    assert list(shared) == list(alone)
    assert len(warnings) == 2
    assert warnings[0] == warnings[1]


def test_collator_of_transformers_takes_the_result(tokenizer: PreTrainedTokenizerFast, pairs: DatasetDict) -> None:
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer), d_model=8, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1
    )
    model = VanillaTransformerForConditionalGeneration(config)
    tokenized = tokenize_parallel_dataset(pairs["train"], tokenizer)
    batch = DataCollatorForSeq2Seq(tokenizer, model=model)([tokenized[0], tokenized[2]])
    rows = [expected_columns(tokenizer, *PAIRS[0]), expected_columns(tokenizer, *PAIRS[2])]
    for column, padding in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        longest = max(len(row[column]) for row in rows)
        assert batch[column].tolist() == [row[column] + [padding] * (longest - len(row[column])) for row in rows]
    shifted = [[1, *row["labels"][:-1]] for row in rows]
    for ids, decoder_ids in zip(shifted, batch["decoder_input_ids"].tolist(), strict=True):
        assert decoder_ids[: len(ids)] == ids
    assert torch.isfinite(model(**batch).loss)


TOKENIZE = """
import sys
from datasets import load_from_disk
from transformers import AutoTokenizer
from hf_vanilla.data import tokenize_parallel_dataset
tokenized = tokenize_parallel_dataset(
    load_from_disk("pairs"), AutoTokenizer.from_pretrained("tokenizer"), max_source_length=6
)
print(tokenized.cache_files[0]["filename"])
"""


def test_cache_is_found_by_another_process(tokenizer, pairs: DatasetDict, tmp_path: Path, monkeypatch) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    pairs["train"].save_to_disk(tmp_path / "pairs")
    command = [sys.executable, "-c", TOKENIZE]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    monkeypatch.chdir(tmp_path)
    reloaded = AutoTokenizer.from_pretrained("tokenizer")
    tokenized = tokenize_parallel_dataset(Dataset.load_from_disk("pairs"), reloaded, max_source_length=6)
    assert tokenized.cache_files == [{"filename": finished.stdout.strip()}]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_source_length": 1}, ValueError, r"`max_source_length` must be at least 2 \(1 special tokens and one"),
        ({"max_target_length": 0}, ValueError, r"`max_target_length` must be at least 2 .*, got 0"),
        ({"max_target_length": 8.0}, TypeError, r"`max_target_length` must be an integer or `None`, got 8\.0"),
    ],
    ids=["source", "target", "float"],
)
def test_bad_length_is_named(tokenizer, pairs: DatasetDict, arguments: dict, error, message: str) -> None:
    with pytest.raises(error, match=message):
        tokenize_parallel_dataset(pairs, tokenizer, **arguments)


def test_bad_datasets_are_named(tokenizer: PreTrainedTokenizerFast, pairs: DatasetDict) -> None:
    with pytest.raises(
        ValueError, match=r"\(train\) must have the columns 'source' and 'target', but has 'en', 'target'"
    ):
        tokenize_parallel_dataset(DatasetDict(train=pairs["train"].rename_column("source", "en")), tokenizer)
    with pytest.raises(ValueError, match="must have at least one pair, but is empty"):
        tokenize_parallel_dataset(pairs["train"].select([]), tokenizer)
    with pytest.raises(ValueError, match="text on both sides, but 'target' of row 1 is None"):
        tokenize_parallel_dataset(Dataset.from_dict({"source": ["a", "b"], "target": ["c", None]}), tokenizer)
    with pytest.raises(ValueError, match="`num_proc` is not for streaming data"):
        tokenize_parallel_dataset(pairs["train"].to_iterable_dataset(), tokenizer, num_proc=2)
    with pytest.raises(TypeError, match="`dataset` must come from `datasets`, got list"):
        tokenize_parallel_dataset(ROWS, tokenizer)
