"""Reading and replacing files, with errors that name the file and the line."""

import codecs
import csv
import errno
import glob
import gzip
import itertools
import json
import os
import secrets
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, BinaryIO, TextIO

from datasets import Dataset, Features, IterableDataset, NamedSplit, load_dataset
from datasets.exceptions import DatasetGenerationError
from pyarrow import ArrowException
from safetensors import SafetensorError
from transformers.utils import logging

from ..models.answering import SURROGATE


logger = logging.get_logger(__name__)

STANDARD_STREAM = "-"
# Parts of the error messages of `torch.save` when it can't write; for small files the last flush fails.
_TORCH_CANT_WRITE = ("inline_container", "PytorchStreamWriter", "iostream error")
TABLES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")  # suffixes of files with columns
# Part of the key of cached files: raise it when the same files give other rows.
READER_VERSION = 1
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # full, over quota, file too large


class UnreadableFileError(OSError, ValueError):
    """Raised for a file that can't be opened or read."""


class BadRecords:
    """Called with the error of a record that can't be used: raises the first one, or counts and skips all.

    Args:
        on_bad_record (`str`): `"stop"` or `"skip"`.
        live (`bool`): Whether to warn when 1, 10, 100... are skipped, for data that is read while it is used.

    Raises:
        ValueError: if `on_bad_record` is another word.
    """

    def __init__(self, on_bad_record: str = "stop", *, live: bool = False) -> None:
        check_choice("on_bad_record", on_bad_record)
        self.skips = on_bad_record == "skip"
        self.live = live
        self.count = 0
        self.first: Exception | None = None

    def __call__(self, error: Exception) -> None:
        """Raise or count the error of a record.

        Args:
            error (`Exception`): What is wrong with it.

        Raises:
            Exception: `error`, unless bad records are skipped.
        """
        if not self.skips:
            raise error from None
        self.count += 1
        self.first = self.first or error
        if self.live and str(self.count).strip("0") == "1":
            logger.warning(f"Skipped {self.count:,} bad records so far, the last one because: {error}")

    def report(self) -> None:
        """Warn of the skipped records."""
        if self.count:
            logger.warning(f"Skipped {self.count:,} bad records, the first one because: {self.first}")


def check_choice(name: str, value: str) -> None:
    """Check that a policy is one of the two that exist.

    Args:
        name (`str`): Name of the argument, for messages.
        value (`str`): Its value.

    Raises:
        ValueError: if it is neither `"stop"` nor `"skip"`.
    """
    if value not in ("stop", "skip"):
        raise ValueError(f"`{name}` must be stop or skip, got {value!r}.")


def suffix_of(path: str) -> str:
    """Return the suffix of a file name without `.gz`, in lower case.

    Args:
        path (`str`): The file.

    Returns:
        `str`: for example `".jsonl"`.
    """
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def existing_path(path: str | os.PathLike[str], name: str) -> str:
    """Check that a file exists.

    Args:
        path (`str`): The file.
        name (`str`): Name of the argument, for messages.

    Returns:
        `str`: its absolute path.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"`{name}` must name an existing file, but there is no file {os.fspath(path)}.")
    return os.path.abspath(path)


def iterate_lines(path: str, bad: BadRecords | None = None, errors: str = "strict") -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their ends; only a newline character ends a line.

    Args:
        path (`str`): A file, decompressed if its name ends in `.gz`; `-` is standard input.
        bad (`BadRecords`, *optional*): Gets the error of a line that is not UTF-8, in whose place comes an empty one
            if it is skipped; by default the error is raised.
        errors (`str`): What becomes of bytes that are not UTF-8, as for `bytes.decode`.

    Yields:
        `str`: a line. A byte order mark at the start is dropped.

    Raises:
        UnreadableFileError: if the file can't be read.
        ValueError: if it is not UTF-8, or not a complete gzip file; the line is named.
    """
    name = "standard input" if path == STANDARD_STREAM else path
    bad = bad or BadRecords()
    number = 0
    try:
        with _open_bytes(path) as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8", errors)
                except UnicodeDecodeError as error:
                    bad(_not_utf8(name, number, error))
                    text = "\n"
                yield text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{name} must be a complete gzip file, but after line {number}: {error}.") from None
    except OSError as error:
        raise UnreadableFileError(f"{name} can't be read: {error.strerror}.") from None


def _not_utf8(name: str, number: int, error: UnicodeDecodeError) -> ValueError:
    """Return the error of a line in another encoding."""
    is_utf16 = number == 1 and error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    advice = "for it is UTF-16: `iconv -f UTF-16" if is_utf16 else "if it is Latin-1: `iconv -f LATIN1"
    return ValueError(
        f"{name} must be UTF-8, but line {number} is not: {error.reason} at byte {error.start} of the line "
        f"(0x{error.object[error.start]:02x}). Convert it, {advice} -t UTF-8`."
    )


def _open_bytes(path: str) -> Any:
    """Open a file, or standard input, which stays open."""
    if path == STANDARD_STREAM:
        return nullcontext(sys.stdin.buffer)
    return gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")


def without_line_end(line: str) -> str:
    """Drop the newline character at the end of a line, and a carriage return before it.

    Args:
        line (`str`): A line, as [`iterate_lines`] yields it.

    Returns:
        `str`: the line.
    """
    return line.removesuffix("\n").removesuffix("\r")


def read_lines(path: str) -> list[str]:
    """Read the lines of a UTF-8 file, without their ends.

    Args:
        path (`str`): A file, decompressed if its name ends in `.gz`; `-` is standard input.

    Returns:
        `list[str]`: the lines.

    Raises:
        ValueError: as in [`iterate_lines`].
    """
    return [without_line_end(line) for line in iterate_lines(path)]


def read_table(
    path: str, check_header: Callable[[list[str], str], object], bad: BadRecords | None = None
) -> Iterator[tuple[int, str, dict[str, str]]]:
    """Yield the rows of a table with a header; fields can have any length, and contain newline characters.

    Args:
        path (`str`): The file, decompressed if its name ends in `.gz`. Tabs separate the fields of a `.tsv` file, in
            which quotes have no meaning; commas those of any other.
        check_header (`Callable`): Gets the names of the columns and the path, and raises if a column is missing.
        bad (`BadRecords`, *optional*): Gets the errors of rows; by default they are raised. With all lines of a row
            that is skipped, those go that an open quote has made a part of it.

    Yields:
        `tuple[int, str, dict[str, str]]`: number of the row's last line, its place for messages, and the row.

    Raises:
        ValueError: if the file is empty, two columns have the same name, a row has too few or too many fields or is
            not UTF-8, or quotes are unbalanced.
    """
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is an error for long texts
    bad = bad or BadRecords()
    # A row can have several lines, so to skip it, bytes that are not UTF-8 are looked for in rows.
    lines = iterate_lines(path, errors="surrogateescape" if bad.skips else "strict")
    dialect: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if suffix_of(path) == ".tsv" else {}
    reader = csv.reader(lines, strict=True, **dialect)
    header = next(_rows_of_table(reader, path, BadRecords()), None)
    if header is None:
        raise ValueError(f"{path} must begin with the names of its columns, but is empty.")
    for name in header:
        if header.count(name) > 1:
            raise ValueError(f"{path} must have columns of different names, but {name!r} is twice in its header.")
    check_header(header, path)
    for row in _rows_of_table(reader, path, bad):
        where = f"{path}, line {reader.line_num}"
        if len(row) != len(header):
            bad(ValueError(f"{where}: must have {len(header)} fields as the header."))
        elif bad.skips and SURROGATE.search("".join(row)):
            bad(ValueError(f"{where}: must be UTF-8."))
        else:
            yield reader.line_num, where, dict(zip(header, row, strict=True))


def _rows_of_table(reader: Any, path: str, bad: BadRecords) -> Iterator[list[str]]:
    """Yield the rows of a `csv.reader` that are not blank."""
    while True:
        first = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            begin = f", in the row that begins in line {first}" if reader.line_num > first else ""
            bad(ValueError(f"{path} must be a valid table, but line {reader.line_num}: {error}{begin}."))
            continue
        if row is None:
            return
        if row:
            yield row


def read_json_objects(path: str, bad: BadRecords | None = None) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the objects of a JSON file: one per line, or one array of them.

    Args:
        path (`str`): The file, decompressed if its name ends in `.gz`.
        bad (`BadRecords`, *optional*): Gets the errors of lines and items; by default they are raised.

    Yields:
        `tuple[int, str, dict]`: number of the line or item from 1, its place for messages, and the object.

    Raises:
        ValueError: if the file is not JSON, or an item is not an object.
    """
    bad = bad or BadRecords()
    lines = iterate_lines(path, bad)
    first: list[str] = []  # up to the first line that is not blank
    for line in lines:
        first.append(line)
        if line.strip():
            break
    unit = "line"
    if first and first[-1].lstrip().startswith("["):
        unit = "item"  # a parsed array has no line numbers
        try:
            rows: Iterable[tuple[int, Any]] = enumerate(json.loads("".join([*first, *lines])), start=1)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} must be valid JSON, but line {error.lineno}: {error.msg}.") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} must be valid JSON: {error}.") from None
    else:
        rows = _parse_json_lines(path, itertools.chain(first, lines), bad)
    for number, row in rows:
        where = f"{path}, {unit} {number}"
        if isinstance(row, dict):
            yield number, where, row
        else:
            bad(ValueError(f"{where}: must be a JSON object, got {type(row).__name__}."))


def read_json_object(path: str | os.PathLike[str], argument: str | None = None) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Args:
        path (`str`): The file.
        argument (`str`, *optional*): The argument that named it, for messages.

    Returns:
        `dict[str, Any]`: its content.

    Raises:
        UnreadableFileError: if the file can't be opened or read.
        ValueError: if it holds anything else.
    """
    named = f"{path}" if argument is None else f"`{argument}`: {path}"
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise UnreadableFileError(f"{named} can't be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{named} must be JSON in UTF-8: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{named} must hold a JSON object, got {type(content).__name__}.")
    return content


def _parse_json_lines(path: str, lines: Iterable[str], bad: BadRecords) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) of each line that is not blank."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:  # also of numbers with too many digits
            reason = getattr(error, "msg", error)
            bad(ValueError(f"{path} must have one JSON object a line, but line {number}: {reason}."))
            continue
        yield number, value


def dataset_from_files(
    generate: Callable[..., Iterator[dict[str, Any]]],
    paths: Sequence[str],
    features: Features,
    *,
    streaming: bool,
    split: str = "train",
    **arguments: Any,
) -> Dataset | IterableDataset:
    """Make a dataset of the rows that a generator reads from files.

    Args:
        generate (`Callable`): Gets `paths`, `stamps`, which it ignores, and `arguments`, and yields rows.
        paths (`Sequence[str]`): The files.
        features (`Features`): The columns.
        streaming (`bool`): Whether to read during iteration.
        split (`str`, defaults to `"train"`): Name of the split.
        **arguments (`Any`): Further arguments of the generator.

    Returns:
        `Dataset`, cached until a file or the reader changes, or `IterableDataset` when streaming.
    """
    # Size and time are part of the cache's key, so that a file changed in place is read again; so is the reader.
    stamps = (READER_VERSION, *((os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths))
    kind = IterableDataset if streaming else Dataset
    return kind.from_generator(
        generate,
        features=features,
        gen_kwargs={"paths": tuple(paths), "stamps": stamps, **arguments},
        split=NamedSplit(split),
    )


def read_parquet(path: str, *, streaming: bool = False) -> Dataset | IterableDataset:
    """Open a Parquet file.

    Args:
        path (`str`): The file, not compressed by gzip.
        streaming (`bool`): Whether to read during iteration.

    Returns:
        `Dataset`, or `IterableDataset` when streaming.

    Raises:
        ValueError: if it is no Parquet file, has no rows, or has a name that can't be opened.
    """
    if path.lower().endswith(".gz"):
        raise ValueError(f"{path} must not be compressed by gzip, as a Parquet file; unpack it with `gunzip`.")
    if "::" in path:  # which `datasets` takes for two addresses
        raise ValueError(f"{path} must not have :: in its path, as a Parquet file; rename it.")
    try:
        table = load_dataset("parquet", data_files=glob.escape(path), split="train", streaming=streaming)
        is_empty = not len(table) if isinstance(table, Dataset) else next(iter(table), None) is None
    except (DatasetGenerationError, ArrowException, ValueError) as error:
        raise ValueError(f"{path} must be a Parquet file with rows: {error.__cause__ or error}.") from None
    if is_empty:
        raise ValueError(f"{path} must be a Parquet file with rows, but has none.")
    return table


def check_column(name: str, column: str, existing: Sequence[str], where: str) -> None:
    """Check that a column exists.

    Args:
        name (`str`): Name of the argument, for messages.
        column (`str`): Its value.
        existing (`Sequence[str]`): The columns.
        where (`str`): What has these columns, for messages.

    Raises:
        ValueError: if it is not one of them.
    """
    if column not in existing:
        raise ValueError(
            f"`{name}` must name a column, but {where} has no {column!r}; it has {', '.join(map(repr, existing))}."
        )


def find_column(name: str, column: str | None, usual: Sequence[str], existing: Sequence[str], where: str) -> str:
    """Check a column that an option names, or find one with a usual name.

    Args:
        name (`str`): Name of the option, for messages.
        column (`str`, *optional*): Its value.
        usual (`Sequence[str]`): Names to try without a value, in this order.
        existing (`Sequence[str]`): The columns.
        where (`str`): What has these columns, for messages.

    Returns:
        `str`: the column.

    Raises:
        ValueError: if it does not exist, or none has a usual name.
    """
    if column is not None:
        check_column(name, column, existing, where)
        return column
    found = next((each for each in usual if each in existing), None)
    if found is None:
        raise ValueError(
            f"`{name}` is missing, and {where} has no column of a usual name ({', '.join(usual)}); it has "
            f"{', '.join(map(repr, existing))}: give one of them as --{name}."
        )
    return found


def check_text(text: Any, where: str) -> None:
    """Check that a value is `None` or a string that has a UTF-8 form.

    Args:
        text (`Any`): The value.
        where (`str`): Its place, for messages.

    Raises:
        TypeError: if it is not a string.
        ValueError: if it has a lone surrogate.
    """
    if text is None:
        return
    if not isinstance(text, str):
        raise TypeError(f"{where} must be a string, got {quoted(text)} ({type(text).__name__}).")
    if SURROGATE.search(text):
        raise ValueError(f"{where} must be valid Unicode, but has a lone surrogate: {quoted(text)}.")


def quoted(value: Any) -> str:
    """Show a value of a file in a message: on one line, without control characters, and not too long.

    Args:
        value (`Any`): The value.

    Returns:
        `str`: its `repr`, cut after 200 characters.
    """
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}... ({len(shown):,} characters)"


@contextmanager
def replacing_file(path: str) -> Iterator[TextIO]:
    """Open a UTF-8 text file for writing that appears under its name only when it is complete.

    It is written under a temporary name in the same folder. If an exception ends the block, an interruption too, the
    temporary file is removed, and a file that existed before is unchanged.

    Args:
        path (`str`): The file; `-` is standard output, which is written directly, as are devices and pipes.

    Yields:
        `TextIO`: the open file. Lines end in a newline character alone.

    Raises:
        ValueError: if the file can't be written; raised before the block starts.
    """
    if path == STANDARD_STREAM:
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
        yield sys.stdout
        _flush_standard_output()
        return
    with _replacing(path, "w", encoding="utf-8", newline="\n") as file:
        yield file


@contextmanager
def replacing_binary_file(path: str) -> Iterator[BinaryIO]:
    """Open a binary file as [`replacing_file`] opens a text file; `-` is no standard output here.

    Args:
        path (`str`): The file.

    Yields:
        `BinaryIO`: the open file.

    Raises:
        ValueError: if the file can't be written; raised before the block starts.
    """
    with _replacing(path, "wb") as file:
        yield file


@contextmanager
def _replacing(path: str, mode: str, **options: Any) -> Iterator[Any]:
    """Open a file under a temporary name, and rename it when it is complete; open devices and pipes themselves."""
    # The path as it is given: a pipe's real path, such as that of /dev/stdout, can't be opened.
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        try:
            file = open(path, mode, **options)  # noqa: SIM115 (the block's own errors are not of opening)
        except OSError as error:
            raise ValueError(f"{path} must be a file, device or pipe that can be written: {error}.") from None
        with file:
            yield file
        return
    target = os.path.realpath(path)
    # not the number of the process: in a container, one that was killed may have had the same, and left its file
    temporary = f"{target}.{secrets.token_hex(4)}.tmp"
    _check_writable(path, target, temporary)
    try:
        with open(temporary, mode, **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError) and is_full_disk(error) and error.filename is None:
            error.filename = path
        raise


def is_full_disk(error: BaseException) -> bool:
    """Recognize a full disk, also in the errors of libraries that raise no `OSError` for it.

    Args:
        error (`BaseException`): The error of a write: an `OSError`, a `RuntimeError` of torch, or one of safetensors
            or tokenizers, whose messages have the number of the system's error.

    Returns:
        `bool`: `True` if a file could not be written.
    """
    if isinstance(error, OSError):
        return error.errno in _DISK_IS_FULL
    if isinstance(error, RuntimeError):
        return any(part in str(error) for part in _TORCH_CANT_WRITE)
    is_of_rust = type(error) is Exception or isinstance(error, SafetensorError)
    return is_of_rust and any(f"(os error {number})" in str(error) for number in _DISK_IS_FULL)


def _check_writable(path: str, target: str, temporary: str) -> None:
    """Create the temporary file; raise if it or the target can't be written."""
    try:
        if os.path.exists(target):
            with open(target, "ab"):
                pass
        with open(temporary, "xb"):
            pass
    except OSError as error:
        raise ValueError(f"{path} can't be written: {error.strerror}.") from None


def _flush_standard_output() -> None:
    """Flush; if the reader has closed the pipe, keep Python from flushing again at exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
