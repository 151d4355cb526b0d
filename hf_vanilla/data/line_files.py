"""Texts that stand in files line by line: read strictly, written whole or not at all."""

import codecs
import gzip
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, TypeVar


STANDARD_STREAM = "-"


Result = TypeVar("Result")


def read_lines(path: str) -> list[str]:
    """Read a UTF-8 text.

    Only a newline character ends a line; a carriage return before it and a byte order mark at the start are dropped.

    Args:
        path (`str`): A file, packed if it ends in .gz; or `-` for standard input.

    Returns:
        `list[str]`: the lines, without their ends.

    Raises:
        ValueError: if there is no such file, it is not UTF-8, or it is no whole gzip file.
    """
    name = "standard input" if path == STANDARD_STREAM else path
    try:
        content = _read_bytes(path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{name} must be a whole gzip file: {error}.") from None
    except OSError as error:
        raise ValueError(f"{name} can't be read: {error.strerror}.") from None
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if lines[-1] == b"":  # what follows the last line's end is no line
        lines.pop()
    texts = []
    for number, line in enumerate(lines, start=1):
        try:
            texts.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            advice = "for it is UTF-16: `iconv -f UTF-16" if is_utf16 else "if it is Latin-1: `iconv -f LATIN1"
            raise ValueError(
                f"{name} must be UTF-8, but line {number} is not: {error.reason} at byte {error.start} of the line "
                f"(0x{line[error.start]:02x}). Convert it, {advice} -t UTF-8`."
            ) from None
    return texts


def _read_bytes(path: str) -> bytes:
    """Read all of a file."""
    if path == STANDARD_STREAM:
        return sys.stdin.buffer.read()
    with gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb") as file:
        return file.read()


@contextmanager
def replacing_file(path: str) -> Iterator[TextIO]:
    """Open a UTF-8 text to write, which appears under its name only when it is complete.

    It is written beside its place under another name. If an exception ends the block, an interruption too, nothing is
    left of it, and a file that was there before stays as it was.

    Args:
        path (`str`): The file; `-` is standard output, which is written at once, as are devices and pipes.

    Yields:
        `TextIO`: where to write. Lines end in a newline character alone.

    Raises:
        ValueError: if the file can't be written, which is known before the block starts.
    """
    if path == STANDARD_STREAM:
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
        yield sys.stdout
        _flush_standard_output()
        return
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target) and not os.path.isdir(target):
        with open(target, "w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    temporary = f"{target}.{os.getpid()}.tmp"
    _check_writable(path, target, temporary)
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _check_writable(path: str, target: str, temporary: str) -> None:
    """Create the temporary file, or say why the target can't be written."""
    try:
        if os.path.exists(target):
            with open(target, "ab"):
                pass
        with open(temporary, "xb"):
            pass
    except OSError as error:
        raise ValueError(f"{path} can't be written: {error.strerror}.") from None


def _flush_standard_output() -> None:
    """Flush, and if nobody reads any more, keep Python from trying again when it exits."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


__all__ = ["STANDARD_STREAM", "read_lines", "replacing_file"]
