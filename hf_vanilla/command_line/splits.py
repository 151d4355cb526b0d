"""Shared by the training and fine-tuning scripts: datasets of the Hub, splits, a validation share."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset
from transformers import TrainingArguments

from ..data.documents import load_documents, texts_of_table


logger = logging.getLogger(__name__)

# Names of validation splits on the Hub, tried in this order.
VALIDATION_SPLITS = ("validation", "valid", "val", "dev", "validation_matched")
_OF_A_DATASET = ("dataset_config_name", "dataset_revision", "train_split", "validation_split", "test_split")
_VALIDATION_DATA = re.compile(r"validation_(.*_)?(files?|split)")
_HELD_OUT_SEED = 0
_EVERY_SPLIT = "all"  # the name that `datasets` has for them


@dataclass
class DatasetArguments:
    """Options of a dataset of the Hub, and of its splits.

    Args:
        dataset_name (`str`, *optional*): Name on the Hub, or a folder in the Hub's layout.
        dataset_config_name (`str`, *optional*): Its configuration.
        dataset_revision (`str`, *optional*): Its branch, tag or commit.
        train_split (`str`): Its split for training.
        validation_split (`str`, *optional*): Its split for validation.
        validation_share (`float`, *optional*): Share of the training data that is held out for validation.

    Raises:
        ValueError: if the share is not between 0 and 1, an option of the dataset is given without one, or validation
            or test data is given twice.
    """

    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the Hub, in place of files."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration, if it has several."})
    dataset_revision: str | None = field(default=None, metadata={"help": "Its branch, tag or commit."})
    train_split: str = field(
        default="train",
        metadata={"help": "Its split to train on; parts too: train[:10%].", "aliases": ["--dataset_split"]},
    )
    validation_split: str | None = field(
        default=None, metadata={"help": "Its split for validation. Default: the one with the usual name, if any."}
    )
    validation_share: float | None = field(
        default=None, metadata={"help": "Share of the training data to hold out for validation, such as 0.05."}
    )

    def __post_init__(self) -> None:
        share = self.validation_share
        if share is not None and not 0 < share < 1:
            raise ValueError(f"`validation_share` must be above 0 and below 1, got {share}.")
        for name in _OF_A_DATASET:
            default = type(self).train_split if name == "train_split" else None
            if self.dataset_name is None and getattr(self, name, None) != default:
                raise ValueError(f"`{name}` is an option of `dataset_name`, which is missing; leave it out for files.")
        for name, value in vars(self).items():
            if share is not None and value is not None and _VALIDATION_DATA.fullmatch(name):
                raise ValueError(f"Pass either `validation_share` or `{name}`.")
        for split in ("validation", "test"):
            option = f"{split}_split"
            if getattr(self, option, None) is None:
                continue
            if self.train_split == _EVERY_SPLIT:
                raise ValueError(
                    f"`train_split` (all) has the rows of `{option}`, too; name the splits to train on, such as train."
                )
            files = [name for name in (f"{split}_file", f"{split}_files") if getattr(self, name, None)]
            if files:
                raise ValueError(f"Pass either `{option}` or `{files[0]}`.")


def check_streaming(data_args: Any, training_args: TrainingArguments) -> None:
    """Check what a stream needs before it is opened.

    Args:
        data_args (`DatasetArguments`): The options of the data, with `streaming` and `preprocessing_num_workers`.
        training_args (`TrainingArguments`): The training arguments.

    Raises:
        ValueError: if the data is streamed, and `max_steps` is missing or `preprocessing_num_workers` given.
    """
    if not data_args.streaming:
        return
    if training_args.max_steps < 1:
        raise ValueError("`max_steps` is missing; `streaming` data has no known length, so give a number of updates.")
    if data_args.preprocessing_num_workers is not None:
        raise ValueError("`preprocessing_num_workers` is not for `streaming`; give `dataloader_num_workers`.")


def _names_in(split: str) -> set[str]:
    """Return the names in a split such as train+validation[:50%]."""
    return {part.partition("[")[0].strip() for part in split.split("+")}


def load_hub_splits(arguments: DatasetArguments, *, streaming: bool = False) -> dict[str, Any]:
    """Load the splits of the dataset that the options name.

    Args:
        arguments (`DatasetArguments`): The options, with a `dataset_name`; some scripts have a `test_split`, too.
        streaming (`bool`): Whether to read during iteration.

    Returns:
        `dict[str, Dataset]`, or `IterableDataset` when streaming: `train`, and `validation` and `test` if the dataset
        has them. Without options they are the splits with the usual names.

    Raises:
        ValueError: if a split of the options does not exist, or is a part of one when streaming.
    """

    def load(**split: str) -> Any:
        return load_dataset(
            str(arguments.dataset_name),
            arguments.dataset_config_name,
            revision=arguments.dataset_revision,
            streaming=streaming,
            **split,
        )

    loaded = load()
    names = {"train": arguments.train_split, "validation": arguments.validation_split}
    # What may be chosen for validation and test.
    unused = set() if arguments.train_split == _EVERY_SPLIT else loaded.keys() - _names_in(arguments.train_split)
    if arguments.validation_split is None and arguments.validation_share is None:
        names["validation"] = next((name for name in VALIDATION_SPLITS if name in unused), None)
    if hasattr(arguments, "test_split"):
        unused -= _names_in(names["validation"] or "")
        names["test"] = arguments.test_split or ("test" if "test" in unused else None)
    splits = {}
    for split, name in names.items():
        if name in loaded:
            splits[split] = loaded[name]
        elif name is not None and streaming:
            raise ValueError(
                f"`{split}_split` must be a whole split for `streaming`, got {name!r}; {arguments.dataset_name} has "
                f"{', '.join(loaded)}."
            )
        elif name is not None:
            try:
                splits[split] = load(split=name)  # such as train[:10%]
            except ValueError:
                raise ValueError(
                    f"`{split}_split` must be a split of {arguments.dataset_name} or a part of one, got {name!r}; "
                    f"there is {', '.join(loaded)}."
                ) from None
    return splits


def hold_out_validation(splits: Mapping[str, Any], share: float | None, *, shuffle: bool = True) -> dict[str, Any]:
    """Hold out a share of the training data for validation, if there is no validation data.

    It does not depend on the seed of the training.

    Args:
        splits (`Mapping[str, Dataset]`): The splits by name.
        share (`float`, *optional*): The share; `None` holds nothing out.
        shuffle (`bool`): Whether to draw the rows at random, in place of the last ones.

    Returns:
        `dict[str, Dataset]`: the splits, with `validation`.

    Raises:
        ValueError: if the data is streamed, or has one row only.
    """
    if share is None or "validation" in splits:
        return dict(splits)
    rows = splits["train"]
    if isinstance(rows, IterableDataset):
        raise ValueError("`validation_share` is not for `streaming`; give files or a split for validation.")
    if len(rows) < 2:
        raise ValueError(f"`validation_share` needs at least 2 rows of training data, got {len(rows)}.")
    count = min(max(1, round(len(rows) * share)), len(rows) - 1)
    parts = rows.train_test_split(test_size=count, seed=_HELD_OUT_SEED, shuffle=shuffle)
    drawn = "drawn at random" if shuffle else "the last ones"
    logger.warning(f"{count:,} of the {len(rows):,} training rows, {drawn}, are held out for validation.")
    return {**splits, "train": parts["train"], "validation": parts["test"]}


def load_document_splits(arguments: Any, *, streaming: bool = False, on_bad_record: str = "stop") -> dict[str, Any]:
    """Load documents to train on and, if there are any, for validation.

    Args:
        arguments (`DatasetArguments`): The options, with `train_files`, `validation_files` and `text_column`.
        streaming (`bool`): Whether to read those to train on during the training.
        on_bad_record (`str`): Whether to `"stop"` at a record of a file that can't be read, or to `"skip"` it.

    Returns:
        `dict[str, Dataset]`: `train`, an `IterableDataset` when streaming, and `validation`.

    Raises:
        ValueError: if both or neither of `dataset_name` and `train_files` are given, or they can't be read.
    """
    name, column = arguments.dataset_name, arguments.text_column
    if (name is None) == (not arguments.train_files):
        given = "both" if arguments.train_files else "neither"
        raise ValueError(f"Pass either `dataset_name` or `train_files`, got {given}.")
    if name is None:
        policy = {"text_column": column, "on_bad_record": on_bad_record}
        corpora = {"train": load_documents(data_files=arguments.train_files, streaming=streaming, **policy)}
    else:
        tables = load_hub_splits(arguments, streaming=streaming)
        if arguments.validation_files:
            tables.pop("validation", None)
        corpora = {split: texts_of_table(rows, column, f"{name} ({split})") for split, rows in tables.items()}
        if isinstance(corpora.get("validation"), IterableDataset):  # which is read several times
            corpora["validation"] = Dataset.from_list(list(corpora["validation"]))
    if arguments.validation_files:
        corpora["validation"] = load_documents(
            data_files=arguments.validation_files, text_column=column, on_bad_record=on_bad_record
        )
    return hold_out_validation(corpora, arguments.validation_share)
