"""Labelled rows for fine-tuning, from local files, and their labels."""

import csv
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError

from .files import check_column, existing_path, quoted, read_json_objects, read_table, suffix_of


REGRESSION = "regression"
SINGLE_LABEL = "single_label_classification"
MULTI_LABEL = "multi_label_classification"


def load_rows(path: str | os.PathLike[str], columns: Sequence[str]) -> Dataset:
    """Load some columns of a local file.

    Args:
        path (`str`): A `.json` (one object per line, or one array of objects), `.jsonl`, `.csv`, `.tsv` or `.parquet`
            file; the text formats may end in `.gz`. In `.csv` and `.tsv` files numbers are strings.
        columns (`Sequence[str]`): Names of the columns.

    Returns:
        `Dataset`: the rows, with these columns.

    Raises:
        ValueError: if the file is not of the format of its suffix, has no rows, or a row lacks a column; the row is
            named.
        FileNotFoundError: if there is no such file.
    """
    path = existing_path(path, "path")
    suffix = suffix_of(path)
    if suffix == ".parquet":
        table = _read_parquet(path)
        _check_columns(columns, table.column_names, path)
        if not len(table):
            raise ValueError(f"{path} must have at least one row, but has none.")
        for column in columns:
            if table.data.column(column).null_count:
                number = next(place for place, value in enumerate(table[column][:], start=1) if value is None)
                raise ValueError(f"{path}, row {number}: {column!r} must have a value, but has none.")
        return table.select_columns(list(columns))
    if suffix not in (".json", ".jsonl", ".csv", ".tsv"):
        raise ValueError(f"{path} must end in .json, .jsonl, .csv, .tsv (or these and .gz) or .parquet.")
    check = partial(_check_columns, columns)
    rows: Iterator[tuple[int, str, dict[str, Any]]]
    if suffix == ".csv":
        rows = read_table(path, check)
    elif suffix == ".tsv":
        rows = read_table(path, check, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        rows = read_json_objects(path)
    found: dict[str, list[Any]] = {column: [] for column in columns}
    for _, where, row in rows:
        check(list(row), where)
        for column in columns:
            if row[column] is None:
                raise ValueError(f"{where}: {column!r} must have a value, but has none.")
            found[column].append(row[column])
    if not found[columns[0]]:
        raise ValueError(f"{path} must have at least one row, but has none.")
    try:
        return Dataset.from_dict(found)
    except (TypeError, ValueError) as error:  # pyarrow's errors are both
        raise ValueError(f"{path}: the values of a column must be of one type: {quoted(str(error))}.") from None


@dataclass
class Labels:
    """The meaning of a dataset's labels.

    Args:
        problem_type (`str`): `"single_label_classification"`, `"multi_label_classification"` or `"regression"`, as in
            a config.
        names (`list[str]`): Names of the classes, in the order of their ids; for regression one name per output.
    """

    problem_type: str
    names: list[str]

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of a model's config for these labels.

        Returns:
            `dict[str, Any]`: `num_labels`, `problem_type`, `id2label` and `label2id`.
        """
        return {
            "num_labels": len(self.names),
            "problem_type": self.problem_type,
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: number for number, name in enumerate(self.names)},
        }

    def encode(self, labels: Sequence[Any], where: str) -> list[Any]:
        """Encode labels for the model's loss.

        Args:
            labels (`Sequence`): Names or ids of classes; lists of them for multi-label classification; numbers for
                regression.
            where (`str`): Name of the dataset, for messages.

        Returns:
            `list`: class ids, lists of 0.0 and 1.0, or floats.

        Raises:
            ValueError: if a label is unknown; its row is named.
        """
        if self.problem_type == REGRESSION:
            return [_number(label, f"{where}, row {row}") for row, label in enumerate(labels, start=1)]
        numbers = {name: number for number, name in enumerate(self.names)}
        encoded: list[Any] = []
        for row, label in enumerate(labels, start=1):
            if isinstance(label, list) != (self.problem_type == MULTI_LABEL):
                wanted = "a list of labels" if self.problem_type == MULTI_LABEL else "one label"
                raise ValueError(f"{where}, row {row}: must have {wanted}, as the training data, got {quoted(label)}.")
            given = [str(each) for each in (label if isinstance(label, list) else [label])]
            for name in given:
                if name not in numbers:
                    raise ValueError(
                        f"{where}, row {row}: the label must be one of {quoted(self.names)}, those of the training "
                        f"data; got {quoted(name)}."
                    )
            if self.problem_type == MULTI_LABEL:
                encoded.append([1.0 if name in given else 0.0 for name in self.names])
            else:
                encoded.append(numbers[given[0]])
        return encoded


def infer_labels(labels: Sequence[Any], *, regression: bool = False) -> Labels:
    """Infer the problem type: fractions mean regression, lists several labels, anything else classes.

    Args:
        labels (`Sequence`): The labels of the training data.
        regression (`bool`): Whether they are numbers to predict, even if they look like classes.

    Returns:
        `Labels`: classes in sorted order, numbers by value.

    Raises:
        ValueError: if there is only one class, or a label for regression is not a number.
    """
    if regression or all(_is_fraction(label) for label in labels):
        for row, label in enumerate(labels, start=1):
            _number(label, f"Row {row}")
        return Labels(REGRESSION, ["score"])
    for row, label in enumerate(labels, start=1):
        if label == "":
            raise ValueError(f"Row {row}: a label must not be empty.")
    is_multi = isinstance(labels[0], list)
    values = {each for label in labels for each in label} if is_multi else set(labels)
    names = [str(value) for value in sorted(values, key=_natural_order)]
    if len(names) < 2 and not is_multi:
        raise ValueError(f"There must be at least two classes, got only {quoted(names)}.")
    return Labels(MULTI_LABEL if is_multi else SINGLE_LABEL, names)


def _read_parquet(path: str) -> Dataset:
    """Read a Parquet file, which may have no rows."""
    try:
        return load_dataset("parquet", data_files=path, split="train")
    except DatasetGenerationError as error:
        raise ValueError(f"{path} must be a Parquet file with rows: {error.__cause__ or error}.") from None


def _is_fraction(label: Any) -> bool:
    """Return whether a label is a number with a decimal point, also as a string: 2.5 or "2.0"."""
    if isinstance(label, str) and "." in label:
        try:
            float(label)
        except ValueError:
            return False
        return True
    return isinstance(label, float)


def _number(label: Any, where: str) -> float:
    """Parse a label for regression."""
    try:
        number = float(label)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: a label for regression must be a number, got {quoted(label)}.")
    return number


def _natural_order(value: Any) -> tuple[int, float, str]:
    """Sort numbers, also as strings, by value, and before anything else."""
    text = str(value)
    is_number = text.lstrip("-").isdigit()
    return (0, float(text), "") if is_number else (1, 0.0, text)


def _check_columns(columns: Sequence[str], existing: Sequence[str], where: str) -> None:
    """Raise if a column does not exist."""
    for column in columns:
        check_column("columns", column, existing, where)
