#!/usr/bin/env python
r"""Fine-tune BERT to choose the right ending, from any checkpoint or from nothing.

    python scripts/finetune_multiple_choice.py --model_name_or_path runs/bert \
        --train_file train.jsonl --validation_file val.jsonl --output_dir runs/endings

Each row of the files (.json, .jsonl, .parquet, perhaps .gz) has a beginning (`sent1`), a list of `endings`, and as
`label` the number of the right one, from 0, as SWAG and its like. With --seeds the training is repeated, and the
median, best and worst accuracy is told. --from_scratch starts from random weights of the same size, to see what
pre-training gives. All options may also stand in one JSON file.
"""

import logging
import sys
from dataclasses import dataclass, field

import transformers
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForMultipleChoice,
    AutoTokenizer,
    DataCollatorForMultipleChoice,
    Trainer,
)

import hf_vanilla  # noqa: F401  (the Auto classes learn our models)
from hf_vanilla.command_line import check_files, check_output_dir, parse_arguments, run, show_report, write_report
from hf_vanilla.data.labelled import load_rows
from hf_vanilla.metrics import ClassificationMetrics
from hf_vanilla.training import FinetuningArguments, FinetuningTask, seeds_report, train_with_seeds


logger = logging.getLogger("finetune_multiple_choice")


@dataclass
class TaskArguments:
    """Which model, which data, how often."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "The pre-trained BERT and its tokenizer: a folder or a name on the Hub."}
    )
    from_scratch: bool = field(
        default=False, metadata={"help": "Take size and tokenizer of that model, but random weights."}
    )
    train_file: str | None = field(default=None, metadata={"help": "A .json(l) or .parquet file."})
    validation_file: str | None = field(default=None, metadata={"help": "The same, for validation."})
    test_file: str | None = field(default=None, metadata={"help": "The same, scored once at the end."})
    text_column: str = field(default="sent1", metadata={"help": "Column of the beginning."})
    endings_column: str = field(default="endings", metadata={"help": "Column of the endings."})
    label_column: str = field(default="label", metadata={"help": "Column of the number of the right one."})
    max_length: int = field(default=128, metadata={"help": "Most tokens of beginning and ending; more is cut."})
    seeds: list[int] = field(default_factory=lambda: [42], metadata={"help": "Train once with each of these seeds."})
    results_file: str | None = field(default=None, metadata={"help": "JSON file for scores, versions and machine."})

    def __post_init__(self):
        for name in ("model_name_or_path", "train_file", "validation_file"):
            if getattr(self, name) is None:
                raise ValueError(f"`{name}` is missing.")
        if not self.seeds:
            raise ValueError("`seeds` must name at least one seed.")


def encode(name: str, rows: Dataset, arguments: TaskArguments, tokenizer) -> Dataset:
    """Pair the beginning with each ending."""
    columns: dict[str, list] = {"labels": []}
    choices = len(rows[0][arguments.endings_column])
    for number, row in enumerate(rows, start=1):
        beginning, endings, label = (
            row[column] for column in (arguments.text_column, arguments.endings_column, arguments.label_column)
        )
        if len(endings) != choices:
            raise ValueError(f"{name}, row {number}: there must be {choices} endings as in row 1, got {len(endings)}.")
        if not 0 <= int(label) < choices:
            raise ValueError(f"{name}, row {number}: the label must be in [0, {choices}), got {label}.")
        encoded = tokenizer([beginning] * choices, endings, truncation=True, max_length=arguments.max_length)
        columns["labels"].append(int(label))
        for column, values in encoded.items():
            columns.setdefault(column, []).append(values)
    return Dataset.from_dict(columns)


def get_model(arguments: TaskArguments):
    """Load the model with a new head, or build one of the same size with random weights."""
    if not arguments.from_scratch:
        return AutoModelForMultipleChoice.from_pretrained(arguments.model_name_or_path)
    return AutoModelForMultipleChoice.from_config(AutoConfig.from_pretrained(arguments.model_name_or_path))


def prepare(arguments: TaskArguments, training_args: FinetuningArguments) -> FinetuningTask:
    """Load the data, and say how model and trainer are made."""
    files = {name: getattr(arguments, f"{name}_file") for name in ("train", "validation", "test")}
    check_files(**{f"{name}_file": path for name, path in files.items()})
    check_output_dir(training_args.output_dir)

    # 1. data
    columns = [arguments.text_column, arguments.endings_column, arguments.label_column]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    data = {
        name: encode(f"the {name} data", load_rows(path, columns), arguments, tokenizer)
        for name, path in files.items()
        if path is not None
    }
    logger.info(f"{len(data['train']):,} training rows")

    # 2. model and trainer; the lengths of a row's choices are no length to group by
    training_args.train_sampling_strategy = "random"

    def make_trainer(args: FinetuningArguments) -> Trainer:
        return Trainer(
            args=args,
            model_init=lambda: get_model(arguments),
            data_collator=DataCollatorForMultipleChoice(tokenizer),
            train_dataset=data["train"],
            processing_class=tokenizer,
            compute_metrics=ClassificationMetrics("single_label_classification"),
        )

    held_out = {name: split for name, split in data.items() if name != "train"}
    return FinetuningTask(make_trainer, held_out, "accuracy")


def main() -> None:
    """Prepare, train once with each seed, report."""
    arguments, training_args = parse_arguments(TaskArguments, FinetuningArguments, description=__doc__)
    logging.basicConfig(format="%(message)s", level=logging.INFO if training_args.should_log else logging.WARNING)
    transformers.utils.logging.set_verbosity(training_args.get_process_log_level())
    task = prepare(arguments, training_args)
    report = seeds_report(train_with_seeds(task, training_args, arguments.seeds), task.main_score)
    show_report(report)
    if arguments.results_file is not None and training_args.should_save:
        write_report(arguments.results_file, report)


if __name__ == "__main__":
    sys.exit(run(main))
