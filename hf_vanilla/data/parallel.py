"""Parallel text from the Hub or from local files, and its tokenization.

The result always has the string columns `source` and `target`. Local text, JSON and CSV files are read here and not by
`datasets`, whose readers parse ISO dates as timestamps, the string "NA" as a missing value, and U+2028 as the end of a
line; errors name the file and the line. All data is in a memory-mapped cache, or streamed.
"""

import itertools
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    IterableDatasetDict,
    List,
    Value,
    load_dataset,
)
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .files import (
    TABLES,
    BadRecords,
    check_column,
    check_text,
    dataset_from_files,
    existing_path,
    iterate_lines,
    read_json_objects,
    read_parquet,
    read_table,
    suffix_of,
    without_line_end,
)


logger = logging.get_logger(__name__)

AnyDataset = TypeVar("AnyDataset", Dataset, DatasetDict, IterableDataset, IterableDatasetDict)
Files = str | os.PathLike[str] | tuple[str | os.PathLike[str], str | os.PathLike[str]]
NumberedPair = tuple[int, Any, Any]

_PAIR_FEATURES = Features({"source": Value("string"), "target": Value("string")})
# WMT and other translation datasets of the Hub have one column of {language: sentence}.
_TRANSLATION = "translation"
_NAMED_EMPTY_LINES = 10
_ROWS_AT_ONCE = 10_000
_CUT_COLUMNS = ("source_is_cut", "target_is_cut")
_TOKENIZED_FEATURES = Features(
    {"input_ids": List(Value("int32")), "attention_mask": List(Value("int8")), "labels": List(Value("int32"))}
)
_COUNTED_FEATURES = Features({**_TOKENIZED_FEATURES, **{name: Value("bool") for name in _CUT_COLUMNS}})


def load_parallel_dataset(
    dataset_name: str | None = None,
    config_name: str | None = None,
    *,
    data_files: Mapping[str, Files] | None = None,
    source_column: str = "source",
    target_column: str = "target",
    revision: str | None = None,
    streaming: bool = False,
    on_bad_record: str = "stop",
) -> DatasetDict | IterableDatasetDict:
    """Load sentence pairs, either a dataset of the Hub by name or local files.

    ```python
    load_parallel_dataset("wmt/wmt14", "de-en", source_column="en", target_column="de")
    load_parallel_dataset(data_files={"train": ("train.en.gz", "train.de.gz"), "validation": ("val.en", "val.de")})
    load_parallel_dataset(data_files={"train": "train.jsonl"}, source_column="en", target_column="de")
    ```

    Pairs with an empty side (nothing but white space) are left out, and a warning lists their numbers.

    Text files have one sentence per line; line N of one file is the translation of line N of the other. Only the
    newline character ends a line, with or without a carriage return before it; a byte order mark is dropped. Text,
    JSON and CSV files are first read completely, streaming or not, so that an error in the last line is raised at the
    start.

    Args:
        dataset_name (`str`, *optional*): Name on the Hub, or anything else that `datasets.load_dataset` takes.
        config_name (`str`, *optional*): Configuration of that dataset, for example `"de-en"`.
        data_files (`Mapping[str, str | tuple[str, str]]`, *optional*): Split name to file, or to (source file, target
            file) for plain text. One file may be `.json` (one object per line, or one array of objects), `.jsonl`,
            `.csv` or `.tsv` (with a header) or `.parquet`; all but the last may end in `.gz`.
        source_column (`str`): Column of the source, or its language code in a `translation` column. Text files have no
            columns.
        target_column (`str`): The same for the target.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        streaming (`bool`): Whether to read during iteration, for data larger than the disk.
        on_bad_record (`str`): What to do with a record that is not UTF-8, not of the file's format, or has a column
            missing or no strings in it: `"stop"` raises its error, `"skip"` leaves it out; a warning counts them. Not
            for Parquet files and the Hub's tables, whose columns have types, unless they are streamed.

    Returns:
        `DatasetDict`, or `IterableDatasetDict` when streaming: splits with the columns `source` and `target`.

    Raises:
        ValueError: if both or neither of `dataset_name` and `data_files` are given, a column is missing, line counts
            are unequal, a file is not UTF-8 or not of the format of its suffix, one of two files is a table, no pair
            is left, or `on_bad_record` is another word.
        TypeError: if a column contains anything but strings, `data_files` does not map splits to files, or a split has
            neither one file nor two.
        FileNotFoundError: if a file does not exist.
    """
    columns = (source_column, target_column)
    _check_request(dataset_name, config_name, data_files, revision, columns)
    BadRecords(on_bad_record)  # checks it
    if dataset_name is not None:
        loaded = load_dataset(dataset_name, config_name, revision=revision, streaming=streaming)
        splits = {
            name: pairs_of_table(split, columns, f"{dataset_name} ({name})", on_bad_record)
            for name, split in loaded.items()
        }
    else:
        paths = {name: _checked_paths(name, files) for name, files in (data_files or {}).items()}
        splits = {name: _load_files(name, files, columns, streaming, on_bad_record) for name, files in paths.items()}
    return IterableDatasetDict(splits) if streaming else DatasetDict(splits)


def tokenize_parallel_dataset(
    dataset: AnyDataset,
    tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_source_length: int | None = None,
    max_target_length: int | None = None,
    num_proc: int | None = None,
) -> AnyDataset:
    """Tokenize `source` and `target` into `input_ids`, `attention_mask` and `labels`.

    A side that is too long keeps its left part and still ends in `</s>`. One warning counts truncated texts; for
    streaming data a warning comes at 1, 10, 100... of them.

    `DataCollatorForSeq2Seq(tokenizer, model=model)` pads batches of the result.

    Args:
        dataset (`Dataset`, `DatasetDict`, `IterableDataset` or `IterableDatasetDict`): With the string columns
            `source` and `target`; other columns are dropped.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the source, and of the target unless `target_tokenizer`
            is given.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): The tokenizer of the target, for separate
            vocabularies.
        max_source_length (`int`, *optional*): Most tokens of a source, `</s>` included; unlimited by default.
        max_target_length (`int`, *optional*): Most tokens of a target, `</s>` included; unlimited by default.
        num_proc (`int`, *optional*): Number of processes; not for streaming data.

    Returns:
        The same kind of dataset, with the columns `input_ids`, `attention_mask` and `labels`.

    Raises:
        ValueError: if a column is missing, a split is empty, a text is `None`, a maximum leaves no room for text, or
            `num_proc` is given for streaming data.
        TypeError: if `dataset` is of another class or a maximum is not an integer.
    """
    target_tokenizer = tokenizer if target_tokenizer is None else target_tokenizer
    _check_max_length("max_source_length", max_source_length, tokenizer)
    _check_max_length("max_target_length", max_target_length, target_tokenizer)
    pair_tokenizer = _PairTokenizer(tokenizer, target_tokenizer, max_source_length, max_target_length)
    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        return type(dataset)(
            {name: _tokenize_split(split, pair_tokenizer, num_proc, name) for name, split in dataset.items()}
        )
    return _tokenize_split(dataset, pair_tokenizer, num_proc, "the dataset")


def _check_request(
    dataset_name: str | None,
    config_name: str | None,
    data_files: Mapping[str, Files] | None,
    revision: str | None,
    columns: tuple[str, str],
) -> None:
    """Raise unless exactly one source of pairs is given."""
    if data_files is not None and not isinstance(data_files, Mapping):
        raise TypeError(
            f"`data_files` must map names of splits to files, such as {{'train': 'train.jsonl'}}, got {data_files!r}."
        )
    if (dataset_name is None) == (not data_files):
        given = "both" if data_files else "neither"
        raise ValueError(f"Pass either `dataset_name` or `data_files`, got {given}.")
    if dataset_name is None and (config_name is not None or revision is not None):
        raise ValueError("`config_name` and `revision` belong to `dataset_name`; leave them out for local files.")
    if columns[0] == columns[1]:
        raise ValueError(f"`source_column` and `target_column` must differ, both are {columns[0]!r}.")


def _checked_paths(split: str, files: Files) -> tuple[str, ...]:
    """Return one or two absolute paths of files that exist."""
    paths = tuple(files) if isinstance(files, tuple | list) else (files,)
    if len(paths) not in (1, 2) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError(
            f"`data_files[{split!r}]` must be one file, or a source file and a target file, got {files!r}."
        )
    tables = [os.fspath(path) for path in paths if suffix_of(os.fspath(path)) in TABLES]
    if len(paths) == 2 and tables:
        raise ValueError(
            f"`data_files[{split!r}]`: two files must be plain text, source and target, but {tables[0]} is a table; "
            "give one table, with both sides."
        )
    return tuple(existing_path(path, f"data_files[{split!r}]") for path in paths)


def _load_files(
    split: str, paths: tuple[str, ...], columns: tuple[str, str], streaming: bool, on_bad_record: str
) -> Dataset | IterableDataset:
    """Check all of one split's files, then load or stream them."""
    if len(paths) == 1 and suffix_of(paths[0]) == ".parquet":
        table = read_parquet(paths[0], streaming=streaming)
        return pairs_of_table(table, columns, paths[0], on_bad_record)
    pairs = 0
    empty = []
    bad = BadRecords(on_bad_record)
    for number, source, target in _read_pairs(paths, columns, bad):
        if _has_both_sides(source, target):
            pairs += 1
        else:
            empty.append(number)
    bad.report()
    _report_empty(empty, pairs, " and ".join(paths))
    return dataset_from_files(
        _generate_pairs,
        paths,
        _PAIR_FEATURES,
        streaming=streaming,
        split=split,
        columns=columns,
        on_bad_record=on_bad_record,
    )


def _generate_pairs(
    paths: tuple[str, ...], columns: tuple[str, str], on_bad_record: str, stamps: tuple[Any, ...]
) -> Iterator[dict[str, str]]:
    """Yield the rows of one split, without the pairs that have an empty side."""
    for _, source, target in _read_pairs(paths, columns, BadRecords(on_bad_record)):
        if _has_both_sides(source, target):
            yield {"source": source, "target": target}


def _read_pairs(paths: tuple[str, ...], columns: tuple[str, str], bad: BadRecords) -> Iterator[NumberedPair]:
    """Yield (number of the line or item from 1, source, target) of one split, empty ones included."""
    if len(paths) == 2:
        yield from _read_text_files(*paths, bad)
        return
    suffix = suffix_of(paths[0])
    if suffix in (".csv", ".tsv"):
        for number, _, row in read_table(paths[0], partial(_check_columns, columns), bad):
            yield number, row[columns[0]], row[columns[1]]
    elif suffix in (".json", ".jsonl"):
        yield from _read_json(paths[0], columns, bad)
    else:
        raise ValueError(
            f"`data_files` must end in .json, .jsonl, .csv, .tsv (or these and .gz) or .parquet, got {paths[0]}; for "
            "plain text give two files, source and target."
        )


def _read_text_files(source_file: str, target_file: str, bad: BadRecords) -> Iterator[NumberedPair]:
    """Yield the line pairs of two files; raise at the end of the shorter one."""
    files = (source_file, target_file)
    sides = [iterate_lines(path, bad) for path in files]
    for number, pair in enumerate(itertools.zip_longest(*sides), start=1):
        if None in pair:
            counts = [number - 1 if line is None else number for line in pair]
            counts = [count + sum(1 for _ in side) for count, side in zip(counts, sides, strict=True)]
            raise ValueError(
                "Source and target file must have equally many lines, but "
                + " and ".join(f"{path} has {count}" for path, count in zip(files, counts, strict=True))
                + "; line N of one must be the translation of line N of the other."
            )
        yield number, without_line_end(pair[0]), without_line_end(pair[1])


def _read_json(path: str, columns: tuple[str, str], bad: BadRecords) -> Iterator[NumberedPair]:
    """Yield two fields of each object."""
    for number, where, row in read_json_objects(path, bad):
        nested = row.get(_TRANSLATION)
        fields = nested if isinstance(nested, dict) and columns[0] not in row else row
        try:
            _check_columns(columns, list(fields), where)
            for column in columns:
                check_text(fields[column], f"{where}: {column!r}")
        except (TypeError, ValueError) as error:
            bad(error)
            continue
        yield number, fields[columns[0]], fields[columns[1]]


def _check_columns(columns: tuple[str, str], existing: list[str], where: str) -> None:
    """Raise if a column does not exist."""
    for name, column in zip(("source_column", "target_column"), columns, strict=True):
        check_column(name, column, existing, where)


def _has_both_sides(source: str | None, target: str | None) -> bool:
    """Return whether both sides have more than white space."""
    return source is not None and target is not None and bool(source.strip()) and bool(target.strip())


def _report_empty(numbers: list[int], pairs: int, where: str) -> None:
    """Warn of pairs that are left out, and raise if no others exist."""
    if not pairs:
        raise ValueError(f"{where} must have at least one pair with text on both sides, but has none.")
    if numbers:
        named = ", ".join(map(str, numbers[:_NAMED_EMPTY_LINES]))
        more = ", ..." if len(numbers) > _NAMED_EMPTY_LINES else ""
        logger.warning(
            f"{where}: left out {len(numbers)} of {len(numbers) + pairs} pairs because a side is empty "
            f"(number {named}{more})."
        )


def pairs_of_table(
    table: Dataset | IterableDataset, columns: tuple[str, str], where: str, on_bad_record: str = "stop"
) -> Dataset | IterableDataset:
    """Reduce a dataset to the columns `source` and `target`, without pairs that have an empty side.

    Args:
        table (`Dataset` or `IterableDataset`): The dataset.
        columns (`tuple[str, str]`): Columns of source and target, or their language codes in a `translation` column.
        where (`str`): Name of the dataset, for messages.
        on_bad_record (`str`): What to do with a row of a stream that has something else than strings: `"stop"` raises
            an error, `"skip"` leaves it out, with a warning.

    Returns:
        The same kind of dataset.

    Raises:
        ValueError: if a column is missing, or no pair is left.
        TypeError: if a column contains anything but strings.
    """
    if isinstance(table, IterableDataset):
        return _pairs_of_stream(table, columns, where, BadRecords(on_bad_record, live=True))
    if columns[0] not in table.column_names and _TRANSLATION in table.column_names:
        first: dict[str, Any] = next((row for row in table[_TRANSLATION] if row is not None), {})
        _check_columns(columns, list(first), f"the column {_TRANSLATION!r} of {where}")
        table = table.select_columns([_TRANSLATION]).flatten()
        columns = (f"{_TRANSLATION}.{columns[0]}", f"{_TRANSLATION}.{columns[1]}")
    _check_columns(columns, table.column_names, where)
    for option, column in zip(("source_column", "target_column"), columns, strict=True):
        dtype = getattr(table.features[column], "dtype", None)
        if dtype not in ("string", "large_string"):
            given = dtype or table.features[column]
            raise TypeError(f"{where}: `{option}` ({column!r}) must contain strings, got {given}.")
    table = table.select_columns(list(columns)).rename_columns(dict(zip(columns, _PAIR_FEATURES, strict=True)))
    kept: list[int] = []
    empty: list[int] = []
    rows = itertools.chain.from_iterable(
        zip(*batch.values(), strict=True) for batch in table.iter(batch_size=_ROWS_AT_ONCE)
    )
    for index, pair in enumerate(rows):
        if _has_both_sides(*pair):
            kept.append(index)
        else:
            empty.append(index + 1)
    _report_empty(empty, len(kept), where)
    return table.select(kept) if empty else table


def _pairs_of_stream(table: IterableDataset, columns: tuple[str, str], where: str, bad: BadRecords) -> IterableDataset:
    """Do the same for a stream, where each row is checked when it is read."""
    names = table.column_names or list(next(iter(table), {}))
    nested = columns[0] not in names and _TRANSLATION in names
    if nested:
        first: dict[str, Any] = next((row[_TRANSLATION] for row in table if row[_TRANSLATION] is not None), {})
        _check_columns(columns, list(first), f"the column {_TRANSLATION!r} of {where}")
    else:
        _check_columns(columns, names, where)
    pick = _ColumnPicker(columns, nested, where, bad)
    pairs = table.map(pick, with_indices=True, remove_columns=names, features=_PAIR_FEATURES)
    return pairs.filter(_has_both_sides, input_columns=list(_PAIR_FEATURES))


class _ColumnPicker:
    """Take source and target from a row of a stream, and warn of the first pairs that have an empty side."""

    def __init__(self, columns: tuple[str, str], nested: bool, where: str, bad: BadRecords) -> None:
        self.columns = columns
        self.nested = nested
        self.where = where
        self.bad = bad
        self.empty = 0

    def __call__(self, row: Mapping[str, Any], index: int) -> dict[str, str | None]:
        fields = row.get(_TRANSLATION) if self.nested else row
        if fields is None:
            fields = dict.fromkeys(self.columns)
        place = f"{self.where}, pair {index + 1}"
        try:
            _check_columns(self.columns, list(fields), place)
            source, target = (fields[column] for column in self.columns)
            for column, text in zip(self.columns, (source, target), strict=True):
                check_text(text, f"{place}: {column!r}")
        except (TypeError, ValueError) as error:
            self.bad(error)
            return dict.fromkeys(_PAIR_FEATURES)  # which has no text, and so is left out
        if not _has_both_sides(source, target) and self.empty < _NAMED_EMPTY_LINES:
            self.empty += 1
            last = "; further ones are not named" if self.empty == _NAMED_EMPTY_LINES else ""
            logger.warning(f"{self.where}: left out pair {index + 1} because a side is empty{last}.")
        return {"source": source, "target": target}


def _check_max_length(name: str, max_length: int | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise unless `max_length` leaves room for a token in addition to the special ones."""
    if max_length is None:
        return
    if not isinstance(max_length, int) or isinstance(max_length, bool):
        raise TypeError(f"`{name}` must be an integer or `None`, got {max_length!r}.")
    special = tokenizer.num_special_tokens_to_add()
    if max_length <= special:
        raise ValueError(
            f"`{name}` must be at least {special + 1} ({special} special tokens and one of text), got {max_length}."
        )


def _tokenize_split(split: Any, pair_tokenizer: "_PairTokenizer", num_proc: int | None, name: str) -> Any:
    """Tokenize one split and warn of truncated texts."""
    if not isinstance(split, Dataset | IterableDataset):
        raise TypeError(f"`dataset` must come from `datasets`, got {type(split).__name__}.")
    names = split.column_names or list(next(iter(split), {}))
    missing = [column for column in _PAIR_FEATURES if column not in names]
    if missing:
        raise ValueError(
            f"`dataset` ({name}) must have the columns 'source' and 'target', but has {', '.join(map(repr, names))}; "
            "`load_parallel_dataset` makes them."
        )
    if isinstance(split, IterableDataset):
        if num_proc is not None:
            raise ValueError("`num_proc` is not for streaming data; use `dataloader_num_workers` in training.")
        counting = _CountingPairTokenizer(pair_tokenizer, name)
        return split.map(counting, batched=True, with_indices=True, remove_columns=names, features=_TOKENIZED_FEATURES)
    if not len(split):
        raise ValueError(f"`dataset` ({name}) must have at least one pair, but is empty.")
    tokenized = split.map(
        pair_tokenizer,
        batched=True,
        with_indices=True,
        remove_columns=names,
        features=_COUNTED_FEATURES,
        num_proc=num_proc,
        desc=f"Tokenizing {name}",
    )
    # Counted from columns and not during mapping, as a cached result is not mapped again.
    counts = [sum(tokenized[column][:]) for column in _CUT_COLUMNS]
    if any(counts):
        pair_tokenizer.warn_of_truncation(name, counts, len(tokenized))
    return tokenized.remove_columns(list(_CUT_COLUMNS))


class _PairTokenizer:
    """Tokenizes a batch of pairs, and marks truncated texts."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        max_source_length: int | None,
        max_target_length: int | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.target_tokenizer = target_tokenizer
        self.max_source_length = max_source_length
        self.max_target_length = max_target_length

    def __call__(self, rows: Mapping[str, list[str]], indices: list[int]) -> dict[str, list[Any]]:
        for side in _PAIR_FEATURES:
            for index, text in zip(indices, rows[side], strict=True):
                if not isinstance(text, str):
                    raise ValueError(
                        f"`dataset` must have text on both sides, but {side!r} of row {index} is {text!r}."
                    )
        source_ids, source_cut = _encode(self.tokenizer, "text", rows["source"], self.max_source_length)
        target_ids, target_cut = _encode(self.target_tokenizer, "text_target", rows["target"], self.max_target_length)
        return {
            "input_ids": source_ids,
            "attention_mask": [[1] * len(ids) for ids in source_ids],
            "labels": target_ids,
            **dict(zip(_CUT_COLUMNS, (source_cut, target_cut), strict=True)),
        }

    def warn_of_truncation(self, name: str, counts: list[int], pairs: int) -> None:
        """Log how many sources and targets of `pairs` pairs were truncated."""
        sides = (
            ("sources", counts[0], "max_source_length", self.max_source_length),
            ("targets", counts[1], "max_target_length", self.max_target_length),
        )
        cut = " and ".join(
            f"{count} {side} to `{argument}` ({limit} tokens)" for side, count, argument, limit in sides if count
        )
        logger.warning(f"{name}: of {pairs} pairs, truncated {cut}; the left part is kept.")


def _encode(
    tokenizer: PreTrainedTokenizerBase, argument: str, texts: list[str], max_length: int | None
) -> tuple[list[list[int]], list[bool]]:
    """Return the ids of each text, truncated to `max_length`, and whether it was truncated."""
    ids = tokenizer(**{argument: texts}, verbose=False)["input_ids"]
    is_cut = [max_length is not None and len(sequence) > max_length for sequence in ids]
    # The tokenizer itself truncates, so that texts still end in their special tokens.
    too_long = [text for text, cut in zip(texts, is_cut, strict=True) if cut]
    if too_long:
        shortened = iter(tokenizer(**{argument: too_long}, truncation=True, max_length=max_length)["input_ids"])
        ids = [next(shortened) if cut else sequence for sequence, cut in zip(ids, is_cut, strict=True)]
    return ids, is_cut


class _CountingPairTokenizer:
    """Tokenizes a stream, and warns when 1, 10, 100... of its texts were truncated."""

    def __init__(self, pair_tokenizer: _PairTokenizer, name: str) -> None:
        self.pair_tokenizer = pair_tokenizer
        self.name = name
        self.pairs = 0
        self.counts = [0, 0]
        self.next_warning = 1

    def __call__(self, rows: Mapping[str, list[str]], indices: list[int]) -> dict[str, list[Any]]:
        columns = self.pair_tokenizer(rows, indices)
        self.pairs += len(indices)
        for side, column in enumerate(_CUT_COLUMNS):
            self.counts[side] += sum(columns.pop(column))
        if sum(self.counts) >= self.next_warning:
            self.pair_tokenizer.warn_of_truncation(f"{self.name} so far", self.counts, self.pairs)
            self.next_warning = 10 ** len(str(sum(self.counts)))
        return columns
