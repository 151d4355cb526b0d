"""Early check that local files have the columns that options name, from their first row."""

import csv
import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


FILE_OPTIONS = ("train_file", "validation_file", "test_file", "train_files", "validation_files", "files")
NESTED = "translation"  # the column of {language: sentence} of many translation datasets


def check_columns(options: Mapping[str, Any]) -> None:
    """Check the columns that are given against each local file with columns.

    Files that are missing or broken, Parquet files, and all files whose bad records are skipped, are left to the
    command itself.

    Args:
        options (`Mapping[str, Any]`): Values of the given options.

    Raises:
        ValueError: if a file lacks a column.
    """
    if options.get("on_bad_record") == "skip":
        return
    given = {name: value for name, value in options.items() if name.endswith("_column") and isinstance(value, str)}
    paths = [options[name] for name in FILE_OPTIONS if name in options]
    for path in [each for value in paths for each in (value if isinstance(value, list) else [value])]:
        found = given and _columns_of(Path(path))
        for name, column in given.items():
            if found and column not in found:
                there = ", ".join(sorted(map(repr, found)))
                raise ValueError(f"`{name}` must be a column of {path}, which has {there}; got {column!r}.")


def _columns_of(path: Path) -> set[str] | None:
    """Return the names of a file's columns, or `None` if its first line doesn't tell."""
    name = path.name.removesuffix(".gz")
    try:
        with _open(path) as file:
            if name.endswith((".csv", ".tsv")):
                return set(next(csv.reader(file, delimiter="\t" if name.endswith(".tsv") else ",")))
            if name.endswith((".json", ".jsonl")):
                row = json.loads(file.readline())
                if isinstance(row.get("data", row.get("paragraphs")), list):  # SQuAD's articles, with questions inside
                    return None
                nested = row.get(NESTED)
                return {*row, *(nested if isinstance(nested, dict) else ())}
    except (OSError, EOFError, zlib.error, ValueError, AttributeError, TypeError, StopIteration, csv.Error):
        pass  # the command itself says what is wrong
    return None


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")
