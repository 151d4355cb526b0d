"""Local text files, read line by line, with errors that name the file and the line."""

import codecs
import csv
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any


def kind_of_file(path: str) -> str:
    """Return the ending of a file name without `.gz`, in lower case.

    Args:
        path (`str`): The file.

    Returns:
        `str`: for example `".jsonl"`.
    """
    name = path.lower()
    return os.path.splitext(name.removesuffix(".gz"))[1]


def read_lines(path: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their endings; only a newline character ends a line.

    Args:
        path (`str`): The file; `.gz` is decompressed.

    Yields:
        `str`: a line. A byte-order mark is taken off.

    Raises:
        ValueError: if the file is not UTF-8, or not a whole gzip file; the line is named.
    """
    opener = gzip.open if path.lower().endswith(".gz") else open
    number = 0
    with opener(path, "rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            is_utf16 = number == 1 and error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            advice = "for it is UTF-16: `iconv -f UTF-16" if is_utf16 else "if it is Latin-1: `iconv -f LATIN1"
            raise ValueError(
                f"{path} must be UTF-8, but line {number} is not: {error.reason} at byte {error.start} of the line "
                f"(0x{error.object[error.start]:02x}). Convert it, {advice} -t UTF-8`."
            ) from None
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} must be a whole gzip file, but after line {number}: {error}.") from None


def csv_reader(path: str, **dialect: Any) -> csv.DictReader:
    """Open a table with a header; fields may be of any length.

    Args:
        path (`str`): The file; `.gz` is decompressed.
        **dialect (`Any`): How fields are separated and quoted, as for `csv.DictReader`.

    Returns:
        `csv.DictReader`: of rows.

    Raises:
        ValueError: if two columns have one name, or the header is broken.
    """
    csv.field_size_limit(2**31 - 1)  # a text is longer than the 128 KiB that csv takes for an error
    reader = csv.DictReader(read_lines(path), strict=True, **dialect)
    try:
        names = list(reader.fieldnames or ())
    except csv.Error as error:
        raise ValueError(f"{path} must be a valid table, but line {reader.reader.line_num}: {error}.") from None
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{path} must have columns of different names, but {name!r} stands twice in its header.")
    return reader


def read_json_objects(path: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the objects of a JSON file: one a line, or one array of them.

    Args:
        path (`str`): The file; `.gz` is decompressed.

    Yields:
        `tuple[int, str, dict]`: number of the line or item from 1, a name of the place for messages, and the object.

    Raises:
        ValueError: if the file is not JSON, or an item is no object.
    """
    lines = read_lines(path)
    first = next(lines, "")
    unit = "line"
    if first.lstrip().startswith("["):
        unit = "item"  # once parsed, it does not tell its line
        try:
            rows: Iterable[tuple[int, Any]] = enumerate(json.loads(first + "".join(lines)), start=1)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} must be valid JSON, but line {error.lineno}: {error.msg}.") from None
    else:
        rows = _parse_json_lines(path, itertools.chain([first], lines))
    for number, row in rows:
        where = f"{path}, {unit} {number}"
        if not isinstance(row, dict):
            raise ValueError(f"{where}: must be a JSON object, got {type(row).__name__}.")
        yield number, where, row


def quoted(value: Any) -> str:
    """Show in a message what a file holds: in one line, without control characters, and not all of what is long.

    Args:
        value (`Any`): Anything from a file.

    Returns:
        `str`: its `repr`, cut after 200 characters.
    """
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}... ({len(shown):,} characters)"


def check_text(text: Any, where: str) -> None:
    """Raise unless it is none or a string that has a UTF-8 form.

    Args:
        text (`Any`): What is to be a text.
        where (`str`): Where it stands, for the message.

    Raises:
        TypeError: if it is something else than a string.
        ValueError: if it has a lone surrogate.
    """
    if text is None:
        return
    if not isinstance(text, str):
        raise TypeError(f"{where} must be a string, got {quoted(text)} ({type(text).__name__}).")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{where} must be valid Unicode, but has a lone surrogate: {quoted(text)}.")


def _parse_json_lines(path: str, lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) of each line that is not blank."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} must have one JSON object a line, but line {number}: {error.msg}.") from None
