"""Shared by the fine-tuning scripts: common options, the model with its new head, and the report."""

import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..data.files import find_column
from ..data.labelled import column_names, load_rows
from ..training import FinetuningArguments, FinetuningTask, lock_run_folder, seeds_report, train_with_seeds
from ..training.checkpoints import lower_is_better
from .checks import (
    check_files_exist,
    check_models,
    check_results_file,
    explained_loading,
    explained_model_loading,
    without_load_report,
)
from .options import parse_arguments, set_up_logging
from .report import show_report, write_report
from .splits import DatasetArguments, hold_out_validation, load_hub_splits


logger = logging.getLogger(__name__)


# Share of the training data that is held out if there is no validation data.
VALIDATION_SHARE = 0.1
MIN_LENGTH = 4  # tokens: [CLS], a token, [SEP] and one more


@dataclass
class CommonTaskArguments(DatasetArguments):
    """Options of every fine-tuning script.

    Args:
        model_name_or_path (`str`): Pre-trained model and its tokenizer.
        from_scratch (`bool`): Whether to use only its config and tokenizer, with random weights.
        train_file (`str`, *optional*): File to train on.
        validation_file (`str`, *optional*): File to score on.
        validation_share (`float`, *optional*): Share of the training data to score on without such a file or split.
        seeds (`list[int]`): Seeds, one training for each.
        results_file (`str`, *optional*): File for the report.

    Raises:
        ValueError: if model, data or seeds are missing.
    """

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Pre-trained model and its tokenizer: a folder or a name on the Hub."}
    )
    from_scratch: bool = field(
        default=False, metadata={"help": "Use only config and tokenizer of that model, with random weights."}
    )
    train_file: str | None = field(default=None, metadata={"help": "File to train on, in a format named above."})
    validation_file: str | None = field(default=None, metadata={"help": "The same for validation."})
    validation_share: float | None = field(
        default=None,
        metadata={"help": "Share of the training data to hold out. Default: 0.1 if there is no validation data."},
    )
    seeds: list[int] = field(default_factory=lambda: [42], metadata={"help": "Train once with each of these seeds."})
    results_file: str | None = field(default=None, metadata={"help": "JSON file for scores, versions and machine."})

    def __post_init__(self) -> None:
        for name in self.required():
            if getattr(self, name) is None:
                raise ValueError(f"`{name}` is missing; give it as --{name}.")
        super().__post_init__()
        sources = self.sources()
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) != 1:
            listed = " or ".join(f"`{name}`" for name in sources)
            raise ValueError(f"Pass either {listed}, got {' and '.join(given) or 'neither'}.")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"`seeds` must be one or more different numbers, 0 or above, got {self.seeds}.")
        longest = getattr(self, "max_length", MIN_LENGTH)
        if longest < MIN_LENGTH:
            raise ValueError(
                f"`max_length` must be at least {MIN_LENGTH}, for a word and the special tokens; got {longest}."
            )
        data = {name: getattr(self, name, None) for name in ("train_file", "validation_file", "test_file")}
        check_results_file(self.results_file, **data)
        check_models(model_name_or_path=self.model_name_or_path)

    def required(self) -> tuple[str, ...]:
        """Return the names of the options that must be given.

        Returns:
            `tuple[str, ...]`: their names.
        """
        return ("model_name_or_path",)

    def sources(self) -> tuple[str, ...]:
        """Return the names of the options of which one must say what to train on.

        Returns:
            `tuple[str, ...]`: their names.
        """
        return ("train_file", "dataset_name")


@dataclass
class TestedTaskArguments(CommonTaskArguments):
    """Options of the fine-tuning scripts that score a test file too.

    Args:
        test_file (`str`, *optional*): File to score on at the end.
        test_split (`str`, *optional*): The same of a dataset of the Hub.
    """

    __test__ = False  # no class of tests, despite its name

    test_file: str | None = field(default=None, metadata={"help": "The same for a test, scored once at the end."})
    test_split: str | None = field(
        default=None, metadata={"help": "Split for a test. Default: test, if there is one with labels."}
    )


def given_files(arguments: CommonTaskArguments) -> dict[str, str]:
    """Check the files of the splits, and return them.

    Args:
        arguments (`CommonTaskArguments`): The options.

    Returns:
        `dict[str, str]`: path of `train`, `validation` and, if given, `test`.

    Raises:
        ValueError: if one does not exist.
    """
    files = {split: getattr(arguments, f"{split}_file", None) for split in ("train", "validation", "test")}
    check_files_exist(**{f"{split}_file": path for split, path in files.items()})
    return {split: path for split, path in files.items() if path is not None}


@dataclass(frozen=True)
class Table:
    """A split before its columns are chosen: a local file, or a dataset.

    Args:
        source (`str` or `Dataset`): The file or dataset.
        where (`str`): Its name, for messages.
    """

    source: str | Dataset
    where: str

    def column_names(self) -> list[str]:
        """Return the names of its columns.

        Returns:
            `list[str]`: the names.
        """
        return column_names(self.source)

    def load(self, columns: Mapping[str, str]) -> Dataset:
        """Load some columns.

        Args:
            columns (`Mapping[str, str]`): For each option its column, which is renamed: that of `label_column` to
                `label`.

        Returns:
            `Dataset`: the rows.
        """
        return load_rows(self.source, columns, self.where)


def given_tables(arguments: CommonTaskArguments) -> dict[str, Table]:
    """Return the splits that the options give: those of a dataset of the Hub, and files.

    Args:
        arguments (`CommonTaskArguments`): The options.

    Returns:
        `dict[str, Table]`: `train` and, if there are any, `validation` and `test`.

    Raises:
        ValueError: if a file or split does not exist.
    """
    files = {split: Table(path, path) for split, path in given_files(arguments).items()}
    if arguments.dataset_name is None:
        return files
    splits = load_hub_splits(arguments)
    return {name: Table(rows, f"{arguments.dataset_name} ({name})") for name, rows in splits.items()} | files


def find_columns(arguments: CommonTaskArguments, table: Table, usual: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Find the column of each option: the one that it names, or one of a usual name.

    Args:
        arguments (`CommonTaskArguments`): The options.
        table (`Table`): Where the columns must be.
        usual (`Mapping[str, Sequence[str]]`): For each option the names to try, in this order.

    Returns:
        `dict[str, str]`: for each option its column. If there are names of labels, in a column such as `label_name` or
        `label_text`, it is that of `label_name`.

    Raises:
        ValueError: if a column does not exist.
    """
    existing = table.column_names()
    found = {
        option: find_column(option, getattr(arguments, option), names, existing, table.where)
        for option, names in usual.items()
    }
    if "label_column" in found:
        names = [found["label_column"] + suffix for suffix in ("_name", "_text")]
        named = [name for name in names if name in existing and name not in found.values()]
        found |= {"label_name": named[0]} if named else {}
    return found


def load_splits(tables: Mapping[str, Table], columns: Mapping[str, str]) -> dict[str, Dataset]:
    """Load the columns of all splits; a test split of the Hub without labels is left out.

    Args:
        tables (`Mapping[str, Table]`): The splits.
        columns (`Mapping[str, str]`): For each option its column, as [`find_columns`] returns them.

    Returns:
        `dict[str, Dataset]`: the rows, with the columns renamed.

    Raises:
        ValueError: if a column does not exist, or a value is missing.
    """
    label = columns.get("label_column")
    named = all(columns.get("label_name") in table.column_names() for table in tables.values())
    columns = {option: column for option, column in columns.items() if named or option != "label_name"}
    _log_once(f"Columns: {', '.join(f'{option} {column!r}' for option, column in columns.items())}.")
    loaded = {}
    for name, table in tables.items():
        if name == "test" and _has_no_labels(table.source, label):
            logger.warning(f"{table.where} has no labels and is left out.")
        else:
            loaded[name] = table.load(columns)
    return loaded


def _has_no_labels(rows: str | Dataset, column: str | None) -> bool:
    """Recognize a dataset whose labels are secret, as in many benchmarks' test splits."""
    if isinstance(rows, str) or column not in rows.column_names:
        return False
    return all(label in (-1, "-1", "", None, "None") for label in rows[column])  # -1.0 is -1


def with_validation(
    splits: Mapping[str, Dataset], arguments: CommonTaskArguments, *, shuffle: bool = True
) -> dict[str, Dataset]:
    """Hold out a share of the training data if there is no validation data.

    Args:
        splits (`Mapping[str, Dataset]`): The splits.
        arguments (`CommonTaskArguments`): The share.
        shuffle (`bool`): Whether to draw the rows at random, in place of the last ones.

    Returns:
        `dict[str, Dataset]`: `train`, `validation` and, if there is one, `test`.
    """
    share = VALIDATION_SHARE if arguments.validation_share is None else arguments.validation_share
    return hold_out_validation(splits, share, shuffle=shuffle)


def load_tokenizer(arguments: CommonTaskArguments) -> PreTrainedTokenizerBase:
    """Load the tokenizer, and check `max_length` against the model.

    Args:
        arguments (`CommonTaskArguments`): The model, and for some tasks `max_length`.

    Returns:
        `PreTrainedTokenizerBase`: the tokenizer.

    Raises:
        ValueError: if there is no such model, or `max_length` is above its number of positions.
    """
    name = arguments.model_name_or_path
    with explained_loading("model_name_or_path", name):
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    positions = getattr(config, "max_position_embeddings", None)
    longest = getattr(arguments, "max_length", MIN_LENGTH)
    if positions is not None and longest > positions:
        rule = f"`max_length` ({longest}) must be at most {positions}, the positions of the model {name}"
        raise ValueError(f"{rule}; give --max_length {positions} or less.")
    return tokenizer


def build_model(auto_class: Any, arguments: CommonTaskArguments, **fields: Any) -> PreTrainedModel:
    """Load the model with a new head, or build one of the same size with random weights.

    A head with another number of labels is replaced by a new one, with a warning.

    Args:
        auto_class (`Any`): Such as `AutoModelForSequenceClassification`.
        arguments (`CommonTaskArguments`): The model, and whether to train from scratch.
        **fields (`Any`): Fields of the config that depend on the task, such as `num_labels`.

    Returns:
        `PreTrainedModel`: the model.

    Raises:
        ValueError: if the model is of the wrong kind.
    """
    name = arguments.model_name_or_path
    if arguments.from_scratch:
        with explained_loading("model_name_or_path", name):
            return auto_class.from_config(AutoConfig.from_pretrained(name, **fields))
    with explained_model_loading("model_name_or_path", name), without_load_report():
        model, loading = auto_class.from_pretrained(
            name, ignore_mismatched_sizes=True, output_loading_info=True, **fields
        )
    if loading["mismatched_keys"]:
        logger.warning(f"The head of {name} has another number of labels than this task, and so gets random weights.")
    new = sorted({key.rpartition(".")[0] for key in loading["missing_keys"]})
    if new:
        _log_once(f"New in the model, with random weights: {', '.join(new)}; all others are from {name}.")
    return model


@functools.cache
def _log_once(message: str) -> None:
    """Log a message that every training of this process would repeat."""
    logger.info(message)


def parse_task_arguments(
    *dataclass_types: Any,
    training_arguments: type[FinetuningArguments] = FinetuningArguments,
    description: str | None,
) -> tuple[Any, ...]:
    """Read options like [`~hf_vanilla.command_line.options.parse_arguments`], and set up logging.

    Args:
        *dataclass_types (`Any`): Dataclasses of options; that of the training comes second.
        training_arguments (`type[FinetuningArguments]`): The dataclass of the training.
        description (`str`, *optional*): Text above the options in the help.

    Returns:
        `tuple[Any, ...]`: one instance of each dataclass.

    Raises:
        ValueError: if both `seed` and `seeds` are given.
    """
    first, *others = dataclass_types
    parsed = parse_arguments(first, training_arguments, *others, description=description)
    arguments, training_args = parsed[:2]
    if training_args.seed != FinetuningArguments.seed:  # the trainer's option, which `seeds` replaces
        if arguments.seeds != [FinetuningArguments.seed]:
            raise ValueError(
                f"`seed` ({training_args.seed}) and `seeds` ({arguments.seeds}) differ; give one of them."
            )
        arguments.seeds = [training_args.seed]
    set_up_logging(training_args)
    return parsed


def train_and_report(
    task: FinetuningTask, arguments: CommonTaskArguments, training_args: FinetuningArguments
) -> dict[str, Any]:
    """Train once with each seed, print the scores, and write them to the file of results.

    Work that an earlier run with the same options has finished in the same folder is not repeated.

    Args:
        task (`FinetuningTask`): The task.
        arguments (`CommonTaskArguments`): The seeds, and the file of results.
        training_args (`FinetuningArguments`): The training arguments.

    Returns:
        `dict[str, Any]`: the report, without versions and machine.

    Raises:
        ValueError: if the file can't be written, the folder is in use, or contains a run with other options.
    """
    with lock_run_folder(str(training_args.output_dir), is_main_process=training_args.should_save):
        try:
            results = train_with_seeds(task, training_args, arguments.seeds, vars(arguments))
        except KeyboardInterrupt as interrupt:
            interrupt.add_note("The same command resumes; finished seeds are not trained again.")
            raise
        report = seeds_report(results, task.main_score)
        show_report(report)
        if training_args.should_save:
            _show_folders(report, Path(str(training_args.output_dir)))
        if arguments.results_file is not None and training_args.should_save:
            write_report(arguments.results_file, report)
    return report


def _show_folders(report: dict[str, Any], output_dir: Path) -> None:
    """Print the folder of each seed's model, and the best one on the validation data."""
    main_score = report["main_score"]
    scores = {seed: each["validation"][main_score] for seed, each in report["seeds"].items()}
    for seed, score in scores.items():
        sys.stderr.write(f"The model is in {output_dir / f'seed-{seed}'} (validation {main_score} {score:.4f}).\n")
    if len(scores) > 1:
        best = (min if lower_is_better(main_score) else max)(scores, key=lambda seed: scores[seed])
        sys.stderr.write(f"The best on the validation data is {output_dir / f'seed-{best}'}.\n")
