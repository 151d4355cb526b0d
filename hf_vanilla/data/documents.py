"""Documents for pre-training: from the Hub, or from local files, one document per row.

BERT needs running text, not shuffled sentences (Devlin et al. 2018, 3.1), as it predicts whether sentences follow one
another. In plain text, blank lines separate documents; in JSON, CSV and Parquet files each row is one.
"""

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import nupunkt
from datasets import Dataset, Features, IterableDataset, Value, load_dataset
from transformers.utils import logging

from .files import (
    TABLES,
    BadRecords,
    check_text,
    dataset_from_files,
    existing_path,
    find_column,
    iterate_lines,
    read_json_objects,
    read_parquet,
    read_table,
    suffix_of,
)


logger = logging.get_logger(__name__)

# Usual names of the column of texts, tried in this order.
TEXT_COLUMNS = ("text", "content", "document")
_FEATURES = Features({"text": Value("string")})
# Chinese and Japanese sentences end without a space.
_IDEOGRAPHIC_END = re.compile(r"(?<=[。！？])(?![。！？」』”’）])")


def load_documents(
    dataset_name: str | None = None,
    config_name: str | None = None,
    *,
    data_files: str | Sequence[str] | None = None,
    split: str = "train",
    text_column: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
    on_bad_record: str = "stop",
) -> Dataset | IterableDataset:
    """Load documents, either a dataset of the Hub by name or local files.

    ```python
    load_documents("wikimedia/wikipedia", "20231101.simple", streaming=True)
    load_documents(data_files=["encyclopedia.jsonl.gz", "novels.txt"])
    ```

    Documents without text are left out, and a warning counts them. Local files are first read completely, streaming or
    not, so that an error in the last line is raised at the start.

    Args:
        dataset_name (`str`, *optional*): Name on the Hub, or anything else that `datasets.load_dataset` takes.
        config_name (`str`, *optional*): Configuration of that dataset.
        data_files (`str` or `Sequence[str]`, *optional*): One file or several: `.json`, `.jsonl`, `.csv`, `.tsv` or
            `.parquet` with one document per row, any other suffix for plain text with blank lines between documents;
            all but `.parquet` may end in `.gz`.
        split (`str`): Split of the dataset of the Hub.
        text_column (`str`, *optional*): Column of the text; by default `text`, `content` or `document`. Plain text has
            no columns.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        streaming (`bool`): Whether to read during iteration, for data larger than the disk.
        on_bad_record (`str`): What to do with a row of a local file that is not UTF-8, not of the file's format, or
            has no column of text: `"stop"` raises its error, `"skip"` leaves it out; a warning counts them. In plain
            text a line that is not UTF-8 becomes an empty one, and in a table a quote that is not closed takes what
            follows into its row.

    Returns:
        `Dataset`, or `IterableDataset` when streaming: one column, `text`.

    Raises:
        ValueError: if both or neither of `dataset_name` and `data_files` are given, an option of a dataset comes with
            files, a column is missing, a file is not UTF-8 or not of the format of its suffix, no document has text,
            or `on_bad_record` is another word.
        TypeError: if the column contains anything but strings.
        FileNotFoundError: if a file does not exist.
    """
    if (dataset_name is None) == (not data_files):
        raise ValueError(f"Pass either `dataset_name` or `data_files`, got {'both' if data_files else 'neither'}.")
    if dataset_name is None and (config_name is not None or revision is not None or split != "train"):
        raise ValueError(
            "`config_name`, `revision` and `split` belong to `dataset_name`; leave them out for local files."
        )
    if dataset_name is not None:
        table = load_dataset(dataset_name, config_name, split=split, revision=revision, streaming=streaming)
        return texts_of_table(table, text_column, dataset_name)
    given = [data_files] if isinstance(data_files, str | os.PathLike) else list(data_files or ())
    paths = tuple(existing_path(path, "data_files") for path in given)
    _check_documents(paths, text_column, BadRecords(on_bad_record))
    return dataset_from_files(
        _generate_documents,
        paths,
        _FEATURES,
        streaming=streaming,
        text_column=text_column,
        on_bad_record=on_bad_record,
    )


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences with Punkt (Kiss & Strunk 2006); the end of a line always ends one.

    Args:
        text (`str`): Any text.

    Returns:
        `list[str]`: the sentences, without surrounding white space; none is empty.
    """
    sentences: list[str] = []
    for line in text.splitlines():
        if line.strip():
            for sentence in nupunkt.sent_tokenize(line):
                sentences.extend(part.strip() for part in _IDEOGRAPHIC_END.split(str(sentence)))
    return [sentence for sentence in sentences if sentence]


def _check_documents(paths: tuple[str, ...], text_column: str | None, bad: BadRecords) -> None:
    """Read all files once; warn of empty documents and bad ones, and raise if there are no others."""
    for path in paths:
        counts = Counter(_has_text(text) for text in _read_documents(path, text_column, bad))
        if not counts[True]:
            bad.report()
            raise ValueError(f"{path} must have at least one document with text, but has none.")
        if counts[False]:
            _warn_of_empty(path, counts[False], counts.total())
    bad.report()


def _generate_documents(
    paths: tuple[str, ...], text_column: str | None, on_bad_record: str, stamps: tuple[Any, ...]
) -> Iterator[dict[str, str | None]]:
    """Yield the documents of all files that have text."""
    bad = BadRecords(on_bad_record)
    for text in itertools.chain.from_iterable(_read_documents(path, text_column, bad) for path in paths):
        if _has_text(text):
            yield {"text": text}


def _read_documents(path: str, text_column: str | None, bad: BadRecords) -> Iterator[str | None]:
    """Yield the documents of one file."""
    suffix = suffix_of(path)
    find = partial(find_column, "text_column", text_column, TEXT_COLUMNS)
    if suffix not in TABLES:
        for is_text, lines in itertools.groupby(iterate_lines(path, bad), key=_has_text):
            if is_text:
                yield "".join(lines).replace("\r\n", "\n")
    elif suffix == ".parquet":
        table = read_parquet(path, streaming=True)
        yield from (row["text"] for row in _only_text(table, text_column, path))
    elif suffix in (".csv", ".tsv"):
        yield from (row[find(list(row), where)] for _, where, row in read_table(path, find, bad))
    else:
        for _, where, row in read_json_objects(path, bad):
            try:
                column = find(list(row), where)
                check_text(row[column], f"{where}: `text_column` ({column!r})")
            except (TypeError, ValueError) as error:
                bad(error)
                continue
            yield row[column]


def texts_of_table(table: Any, text_column: str | None, where: str) -> Any:
    """Reduce a dataset to the column `text`, without empty rows; a warning counts those of a table.

    Args:
        table (`Dataset` or `IterableDataset`): The dataset.
        text_column (`str`, *optional*): Column of the text; by default one of a usual name.
        where (`str`): Name of the dataset, for messages.

    Returns:
        The same kind of dataset.

    Raises:
        ValueError: if there is no such column.
        TypeError: if it does not contain strings.
    """
    table = _only_text(table, text_column, where)
    found = table.filter(_has_text, input_columns="text")
    if isinstance(found, Dataset) and len(found) < len(table):
        _warn_of_empty(where, len(table) - len(found), len(table))
    return found


def _only_text(table: Any, text_column: str | None, where: str) -> Any:
    """Reduce a dataset to the column `text`."""
    names = table.column_names or list(next(iter(table), {}))
    column = find_column("text_column", text_column, TEXT_COLUMNS, names, where)
    dtype = getattr(table.features[column], "dtype", None) if table.features else "string"
    if dtype not in ("string", "large_string"):
        raise TypeError(f"{where}: `text_column` ({column!r}) must contain strings, got {dtype}.")
    table = table.select_columns([column])
    return table if column == "text" else table.rename_column(column, "text")


def _warn_of_empty(where: str, count: int, documents: int) -> None:
    """Warn of documents that are left out."""
    logger.warning(f"{where}: left out {count} of {documents} documents because they have no text.")


def _has_text(text: str | None) -> bool:
    """Return whether a text has more than white space."""
    return text is not None and bool(text.strip())
