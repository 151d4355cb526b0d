"""Documents for pre-training: from the Hub, or from local files, one document a row.

BERT needs running text, not shuffled sentences (Devlin et al. 2018, 3.1): the next sentence must be known. Plain text
holds documents with blank lines between them; in JSON, CSV and Parquet files each row is one.
"""

import csv
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import nupunkt
from datasets import Dataset, Features, IterableDataset, Value, load_dataset
from transformers.utils import logging

from .files import check_text, csv_reader, kind_of_file, read_json_objects, read_lines


logger = logging.get_logger(__name__)

_FEATURES = Features({"text": Value("string")})
_TABLES = (".json", ".jsonl", ".csv", ".parquet")
# Chinese and Japanese sentences end without a space behind.
_IDEOGRAPHIC_END = re.compile(r"(?<=[。！？])(?![。！？」』”’）])")


def load_documents(
    dataset_name: str | None = None,
    config_name: str | None = None,
    *,
    data_files: str | Sequence[str] | None = None,
    split: str = "train",
    text_column: str = "text",
    revision: str | None = None,
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """Load documents, either a data set of the Hub by name or local files.

    ```python
    load_documents("wikimedia/wikipedia", "20231101.simple", streaming=True)
    load_documents(data_files=["encyclopedia.jsonl.gz", "novels.txt"])
    ```

    Documents without text are left out, and a warning counts them. Local files are read once to the end before
    anything else happens, so that an error in the last line shows at the start, streaming or not.

    Args:
        dataset_name (`str`, *optional*): Name on the Hub, or whatever else `datasets.load_dataset` takes.
        config_name (`str`, *optional*): Configuration of that data set.
        data_files (`str` or `Sequence[str]`, *optional*): One file or several: `.json`, `.jsonl`, `.csv` or `.parquet`
            with a document a row, any other ending for plain text with blank lines between documents; all may end in
            `.gz`.
        split (`str`): Split of the data set of the Hub.
        text_column (`str`): Column of the text. Plain text has no columns.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        streaming (`bool`): Whether to read while training, for what is larger than the disk.

    Returns:
        `Dataset`, or `IterableDataset` when streaming: one column, `text`.

    Raises:
        ValueError: if both or neither of `dataset_name` and `data_files` are given, a column is missing, a file is
            not UTF-8 or not what its name says, or no document has text.
        TypeError: if the column holds something else than strings.
        FileNotFoundError: if a file does not exist.
    """
    if (dataset_name is None) == (not data_files):
        raise ValueError(f"Pass either `dataset_name` or `data_files`, got {'both' if data_files else 'neither'}.")
    if dataset_name is not None:
        table = load_dataset(dataset_name, config_name, split=split, revision=revision, streaming=streaming)
        return _texts_of_table(table, text_column, dataset_name)
    given = [data_files] if isinstance(data_files, str | os.PathLike) else list(data_files or ())
    paths = tuple(os.path.abspath(path) for path in given)
    for path in paths:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"`data_files` must name existing files, but there is no file {path}.")
    _check_documents(paths, text_column)
    # The cache must notice a file that was changed in place.
    stamps = tuple((os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths)
    arguments = {"paths": paths, "text_column": text_column, "stamps": stamps}
    kind = IterableDataset if streaming else Dataset
    return kind.from_generator(_generate_documents, features=_FEATURES, gen_kwargs=arguments)


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences with Punkt (Kiss & Strunk 2006); a line always ends one.

    Args:
        text (`str`): Any text.

    Returns:
        `list[str]`: the sentences, without white space around them; none of white space alone.
    """
    sentences: list[str] = []
    for line in text.splitlines():
        if line.strip():
            for sentence in nupunkt.sent_tokenize(line):
                sentences.extend(part.strip() for part in _IDEOGRAPHIC_END.split(str(sentence)))
    return [sentence for sentence in sentences if sentence]


def _check_documents(paths: tuple[str, ...], text_column: str) -> None:
    """Read all files once; warn of empty documents, and raise if there are no others."""
    for path in paths:
        filled = empty = 0
        for text in _read_documents(path, text_column):
            if text is not None and text.strip():
                filled += 1
            else:
                empty += 1
        if not filled:
            raise ValueError(f"{path} must have at least one document with text, but has none.")
        if empty:
            logger.warning(f"{path}: left out {empty} of {filled + empty} documents because they have no text.")


def _generate_documents(
    paths: tuple[str, ...], text_column: str, stamps: tuple[tuple[int, int], ...]
) -> Iterator[dict[str, str]]:
    """Yield the documents of all files that have text."""
    for text in itertools.chain.from_iterable(_read_documents(path, text_column) for path in paths):
        if text is not None and text.strip():
            yield {"text": text}


def _read_documents(path: str, text_column: str) -> Iterator[str | None]:
    """Yield the documents of one file."""
    kind = kind_of_file(path)
    if kind not in _TABLES:
        yield from _read_plain_text(path)
    elif kind == ".parquet":
        table = load_dataset("parquet", data_files=path, split="train", streaming=True)
        yield from (row["text"] for row in _texts_of_table(table, text_column, path))
    elif kind == ".csv":
        yield from _read_csv(path, text_column)
    else:
        for _, where, row in read_json_objects(path):
            _check_column(text_column, list(row), where)
            check_text(row[text_column], f"{where}: {text_column!r}")
            yield row[text_column]


def _read_plain_text(path: str) -> Iterator[str]:
    """Yield what stands between blank lines."""
    for is_text, lines in itertools.groupby(read_lines(path), key=lambda line: bool(line.strip())):
        if is_text:
            yield "".join(lines)


def _read_csv(path: str, text_column: str) -> Iterator[str]:
    """Yield one column of a CSV file with a header."""
    reader = csv_reader(path)
    try:
        _check_column(text_column, list(reader.fieldnames or ()), path)
        for row in reader:
            if None in row or None in row.values():
                fields = len(reader.fieldnames or ())
                raise ValueError(f"{path}, line {reader.line_num}: must have {fields} fields as the header.")
            yield row[text_column]
    except csv.Error as error:
        raise ValueError(f"{path} must be valid CSV, but line {reader.reader.line_num}: {error}.") from None


def _texts_of_table(table: Any, text_column: str, where: str) -> Any:
    """Reduce a table of `datasets` to a column `text` without empty rows."""
    names = table.column_names or list(next(iter(table), {}))
    _check_column(text_column, names, where)
    dtype = getattr(table.features[text_column], "dtype", None) if table.features else "string"
    if dtype not in ("string", "large_string"):
        raise TypeError(f"{where}: column {text_column!r} must hold strings, got {dtype}.")
    table = table.select_columns([text_column])
    if text_column != "text":
        table = table.rename_column(text_column, "text")
    return table.filter(_has_text, input_columns="text")


def _has_text(text: str | None) -> bool:
    """Tell whether there is more than white space."""
    return text is not None and bool(text.strip())


def _check_column(text_column: str, existing: list[str], where: str) -> None:
    """Raise if the column does not exist, and name those that do."""
    if text_column not in existing:
        raise ValueError(
            f"`text_column` must name a column, but {where} has no {text_column!r}; "
            f"it has {', '.join(map(repr, existing))}."
        )
