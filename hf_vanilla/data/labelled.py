"""Labelled rows for fine-tuning, from local files or datasets, and their labels."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset

from .files import (
    check_column,
    check_text,
    existing_path,
    quoted,
    read_json_objects,
    read_parquet,
    read_table,
    suffix_of,
)


REGRESSION = "regression"
SINGLE_LABEL = "single_label_classification"
MULTI_LABEL = "multi_label_classification"
_WHOLE_NUMBER = re.compile(r"-?\d+")
# All values of a list that has a 0 or 1 for every label, and what is said of it.
_MULTI_HOT_VALUES = {0, 1, "0", "1", "0.0", "1.0"}
_MULTI_HOT_RULE = "a list of labels must name those that apply, each once, not have a 0 or 1 for every label"


def column_names(source: str | os.PathLike[str] | Dataset) -> list[str]:
    """Return the names of the columns of a local file, by its first row, or of a dataset.

    Args:
        source (`str` or `Dataset`): A file as [`load_rows`] reads it, or a dataset.

    Returns:
        `list[str]`: the names.

    Raises:
        ValueError: if the file is not of the format of its suffix, or has no rows.
        FileNotFoundError: if there is no such file.
    """
    if isinstance(source, Dataset):
        return list(source.column_names)
    path = existing_path(source, "path")
    if suffix_of(path) == ".parquet":
        return list(read_parquet(path).column_names or ())
    first = next(_read_file(path, lambda header, where: None), None)
    if first is None:
        raise ValueError(f"{path} must have at least one row, but has none.")
    return list(first[2])


def load_rows(
    source: str | os.PathLike[str] | Dataset, columns: Sequence[str] | Mapping[str, str], where: str | None = None
) -> Dataset:
    """Load some columns of a local file or a dataset.

    Args:
        source (`str` or `Dataset`): A `.json` (one object per line, or one array of objects), `.jsonl`, `.csv`, `.tsv`
            or `.parquet` file; the text formats may end in `.gz`. In `.csv` and `.tsv` files numbers are strings. Or a
            dataset.
        columns (`Sequence[str]` or `Mapping[str, str]`): Names of the columns, or for each option its column, which
            is renamed: that of `label_column` to `label`.
        where (`str`, *optional*): Name of a dataset, for messages.

    Returns:
        `Dataset`: the rows, with these columns.

    Raises:
        ValueError: if the file is not of the format of its suffix, has no rows, or a row lacks a column; the row is
            named.
        FileNotFoundError: if there is no such file.
    """
    options = columns if isinstance(columns, Mapping) else {column: column for column in columns}
    shown = {column: f"`{option}` ({column!r})" for option, column in options.items() if option != column}
    names = list(options.values())
    for option, column in options.items():
        if names.count(column) > 1:
            raise ValueError(f"`{option}` must name a column that no other option names, got {column!r}.")
    if isinstance(source, Dataset):
        rows = _rows_of_table(source, options, shown, where or "the dataset")
    else:
        path = existing_path(source, "path")
        if suffix_of(path) == ".parquet":
            rows = _rows_of_table(read_parquet(path), options, shown, path)
        else:
            rows = _rows_of_file(path, options, shown)
    rows = rows.select_columns(names)
    return rows.rename_columns({name: option.removesuffix("_column") for option, name in options.items()})


def _rows_of_table(table: Dataset, options: Mapping[str, str], shown: Mapping[str, str], where: str) -> Dataset:
    """Check the columns of a table."""
    _check_columns(options, table.column_names, where)
    if not len(table):
        raise ValueError(f"{where} must have at least one row, but has none.")
    for column in options.values():
        if not table.data.column(column).null_count:
            continue
        number = next((place for place, value in enumerate(table[column], start=1) if value is None), None)
        if number is not None:
            raise ValueError(
                f"{where}, row {number}: {shown.get(column, repr(column))} must have a value, but has none."
            )
    return table


def _rows_of_file(path: str, options: Mapping[str, str], shown: Mapping[str, str]) -> Dataset:
    """Read columns of a text file."""
    found: dict[str, list[Any]] = {column: [] for column in options.values()}
    check = partial(_check_columns, options)
    for _, where, row in _read_file(path, check):
        check(list(row), where)
        for column, values in found.items():
            place = f"{where}: {shown.get(column, repr(column))}"
            if row[column] is None:
                raise ValueError(f"{place} must have a value, but has none.")
            if isinstance(row[column], str):
                check_text(row[column], place)
            values.append(row[column])
    if not all(found.values()):
        raise ValueError(f"{path} must have at least one row, but has none.")
    try:
        return Dataset.from_dict(found)
    except (TypeError, ValueError, OverflowError) as error:  # pyarrow's errors are all of these
        for column, values in found.items():
            for number, value in enumerate(values, start=1):
                if isinstance(value, int) and not -(2**63) <= value < 2**63:
                    where = f"{path}, row {number}: {shown.get(column, repr(column))}"
                    raise ValueError(f"{where} must be a number of at most 64 bits, got {quoted(value)}.") from None
        raise ValueError(f"{path}: the values of a column must be of one type: {quoted(str(error))}.") from None


def _read_file(
    path: str, check_header: Callable[[list[str], str], object]
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield (number, place, row) of a text file."""
    suffix = suffix_of(path)
    if suffix in (".csv", ".tsv"):
        return read_table(path, check_header)
    if suffix in (".json", ".jsonl"):
        return read_json_objects(path)
    raise ValueError(f"{path} must end in .json, .jsonl, .csv, .tsv (or these and .gz) or .parquet.")


def with_class_names(rows: Dataset, column: str, where: str) -> tuple[list[Any], list[str] | None]:
    """Read a column, with the names of classes in place of the ids of a `ClassLabel` feature or of lists of it.

    Args:
        rows (`Dataset`): The rows.
        column (`str`): A column.
        where (`str`): Name of the dataset, for messages.

    Returns:
        `tuple[list, list[str] | None]`: the values, and the names in the order of their ids; `None`, and the values as
        they are, if the column has another feature.

    Raises:
        ValueError: if an id has no name; the row is named.
    """
    feature = rows.features[column]
    names = getattr(getattr(feature, "feature", feature), "names", None)
    if names is None:
        return rows[column][:], None
    values: list[Any] = []
    for number, value in enumerate(rows[column], start=1):
        ids = value if isinstance(value, list) else [value]
        unknown = [each for each in ids if each is None or not 0 <= each < len(names)]
        if unknown:
            raise ValueError(
                f"{where}, row {number}: {column!r} must be one of the classes 0 to {len(names) - 1}, got "
                f"{unknown[0]}; -1 often means that there are no labels."
            )
        named = [names[each] for each in ids]
        values.append(named if isinstance(value, list) else named[0])
    return values, list(names)


def encode_labels(splits: Mapping[str, Dataset], *, regression: bool = False) -> tuple["Labels", dict[str, list[Any]]]:
    """Find the meaning of the column `label`, and encode it.

    The names of classes are those of a `ClassLabel` feature, those of a column `label_name`, or the labels. Beside
    fractions or lists of labels, strings in `label_name` are ignored; lists of names replace lists of labels.

    Args:
        splits (`Mapping[str, Dataset]`): Rows with a `label` by name of the split, `train` among them.
        regression (`bool`): Whether labels are numbers to predict, even if they look like classes.

    Returns:
        `tuple[Labels, dict[str, list]]`: the meaning of the labels, and each split's labels for the model's loss.

    Raises:
        ValueError: if a label is unknown, a list has a 0 or 1 for every label, or there is only one class.
    """
    if regression:
        labels = infer_labels(splits["train"]["label"][:], regression=True)
        return labels, {name: labels.encode(rows["label"][:], f"the {name} data") for name, rows in splits.items()}
    named = {name: with_class_names(rows, "label", f"the {name} data") for name, rows in splits.items()}
    names = named["train"][1]
    values = {name: given for name, (given, _) in named.items()}
    if names is None and all("label_name" in rows.column_names for rows in splits.values()):
        texts = {name: rows["label_name"][:] for name, rows in splits.items()}
        train = values["train"]
        if isinstance(train[0], list):
            values = texts if isinstance(texts["train"][0], list) else values
        elif not _are_fractions(train) or all(float(label).is_integer() for label in train):  # 1.0 can have a name
            names, values = _names_of_ids(splits["train"]), texts
    if names is None:
        labels = infer_labels(values["train"])
    else:
        labels = Labels(MULTI_LABEL if isinstance(values["train"][0], list) else SINGLE_LABEL, names)
    return labels, {name: labels.encode(given, f"the {name} data") for name, given in values.items()}


def _names_of_ids(rows: Dataset) -> list[str]:
    """Return the names of a column `label_name` in the order of the labels."""
    names: dict[Any, str] = {}
    for number, (label, name) in enumerate(zip(rows["label"], rows["label_name"], strict=True), start=1):
        if names.setdefault(label, str(name)) != str(name):
            raise ValueError(
                f"The train data, row {number}: a label must have one name, but {quoted(label)} is {quoted(name)} "
                f"here and {quoted(names[label])} before."
            )
    if len(set(names.values())) < max(len(names), 2):
        raise ValueError(f"There must be at least two classes with different names, got {quoted(names)}.")
    return [names[label] for label in sorted(names, key=_natural_order)]


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
            ValueError: if a label is unknown, or twice in a list; its row is named.
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
            if len(set(given)) < len(given):
                raise ValueError(f"{where}, row {row}: {_MULTI_HOT_RULE}; got {quoted(label)}.")
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
    """Infer the problem type: numbers with fractions among them mean regression, lists several labels, else classes.

    Args:
        labels (`Sequence`): The labels of the training data.
        regression (`bool`): Whether they are numbers to predict, even if they look like classes.

    Returns:
        `Labels`: classes in sorted order, numbers by value.

    Raises:
        ValueError: if there is only one class, all lists of labels are empty, all have a 0 or 1 for every label,
            or a label for regression is not a number.
    """
    if regression or _are_fractions(labels):
        for row, label in enumerate(labels, start=1):
            _number(label, f"Training data, row {row}")
        return Labels(REGRESSION, ["score"])
    for row, label in enumerate(labels, start=1):
        if any(each in ("", None) for each in (label if isinstance(label, list) else [label])):
            raise ValueError(f"Training data, row {row}: a label must not be empty; name the class.")
    is_multi = isinstance(labels[0], list)
    values = {each for label in labels for each in label} if is_multi else set(labels)
    names = [str(value) for value in sorted(values, key=_natural_order)]
    if len(names) < 2 and not is_multi:
        raise ValueError(f"There must be at least two classes, got only {quoted(names)}.")
    if not names:
        raise ValueError("There must be at least one label, but all lists of labels are empty.")
    if is_multi and len(labels[0]) > 1 and values <= _MULTI_HOT_VALUES and len({len(label) for label in labels}) == 1:
        raise ValueError(f"Training data, row 1: {_MULTI_HOT_RULE}; got {quoted(labels[0])}.")
    return Labels(MULTI_LABEL if is_multi else SINGLE_LABEL, names)


def _are_fractions(labels: Sequence[Any]) -> bool:
    """Return whether labels are numbers, also as strings, with a decimal point in one of them: 2.5 or "2.0"."""
    try:
        list(map(float, labels))
    except (TypeError, ValueError):
        return False
    return any(isinstance(label, float) or "." in str(label) for label in labels)


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
    # Of equal values, such as 1 and 01, the text decides, as the order of a set differs from process to process.
    is_number = isinstance(value, float) or _WHOLE_NUMBER.fullmatch(text)
    return (0, float(text), text) if is_number else (1, 0.0, text)


def _check_columns(options: Mapping[str, str], existing: Sequence[str], where: str) -> None:
    """Raise if a column does not exist."""
    for option, column in options.items():
        check_column("columns" if option == column else option, column, existing, where)
