#!/usr/bin/env python
r"""Fine-tune BERT to choose the right ending, from a checkpoint or from scratch.

    python scripts/finetune_multiple_choice.py --model_name_or_path runs/bert \
        --train_file train.jsonl --validation_file val.jsonl --output_dir runs/endings

Each row of the files (.json, .jsonl, .parquet, also as .gz) has a beginning (`sent1`), a list of `endings`, and as
`label` the index of the right one, from 0. With --seeds the training is repeated, and the median, best and worst
accuracy are printed. --from_scratch starts from random weights of the same size, to measure the effect of
pre-training. Run the same command again to resume an interrupted one. All options can also be in a JSON or YAML file.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("finetune_multiple_choice")

import logging
import sys
from dataclasses import dataclass, field

from datasets import Dataset
from transformers import (
    AutoModelForMultipleChoice,
    DataCollatorForMultipleChoice,
)

import hf_vanilla  # noqa: F401  (registers the models)
from hf_vanilla.command_line.checks import check_output_dir
from hf_vanilla.command_line.finetuning import (
    TestedTaskArguments,
    build_model,
    given_files,
    load_tokenizer,
    parse_task_arguments,
    train_and_report,
)
from hf_vanilla.command_line.options import run
from hf_vanilla.data.labelled import load_rows
from hf_vanilla.metrics import ClassificationMetrics
from hf_vanilla.training import FinetuningArguments, FinetuningTask, VerifiedCheckpointTrainer


logger = logging.getLogger("finetune_multiple_choice")


@dataclass
class TaskArguments(TestedTaskArguments):
    """The model, the data and the seeds."""

    text_column: str = field(default="sent1", metadata={"help": "Column of the beginning."})
    endings_column: str = field(default="endings", metadata={"help": "Column of the endings."})
    label_column: str = field(default="label", metadata={"help": "Column of the index of the right ending."})
    max_length: int = field(
        default=128, metadata={"help": "Most tokens of beginning and ending; longer ones are truncated."}
    )


def encode(name: str, rows: Dataset, arguments: TaskArguments, tokenizer) -> Dataset:
    """Pair the beginning with each ending."""
    columns: dict[str, list] = {"labels": []}
    choices = None
    for number, row in enumerate(rows, start=1):
        beginning, endings, label = (
            row[column] for column in (arguments.text_column, arguments.endings_column, arguments.label_column)
        )
        if not isinstance(endings, list) or not all(isinstance(each, str) for each in endings):
            raise ValueError(f"{name}, row {number}: the endings must be a list of strings, got {endings!r}.")
        choices = choices or len(endings)
        if len(endings) != choices:
            raise ValueError(f"{name}, row {number}: there must be {choices} endings as in row 1, got {len(endings)}.")
        if not isinstance(label, int) or not 0 <= label < choices:
            raise ValueError(
                f"{name}, row {number}: the label must be a whole number in [0, {choices}), got {label!r}."
            )
        encoded = tokenizer([beginning] * choices, endings, truncation=True, max_length=arguments.max_length)
        columns["labels"].append(int(label))
        for column, values in encoded.items():
            columns.setdefault(column, []).append(values)
    return Dataset.from_dict(columns)


def prepare(arguments: TaskArguments, training_args: FinetuningArguments) -> FinetuningTask:
    """Load the data, and define how to make the trainer."""
    files = given_files(arguments)
    check_output_dir(training_args.output_dir)

    # 1. data
    columns = [arguments.text_column, arguments.endings_column, arguments.label_column]
    tokenizer = load_tokenizer(arguments)
    data = {
        name: encode(f"the {name} data", load_rows(path, columns), arguments, tokenizer)
        for name, path in files.items()
    }
    logger.info(f"{len(data['train']):,} training rows")

    # 2. model and trainer; rows have several lengths and can't be grouped by one
    training_args.train_sampling_strategy = "random"

    def make_trainer(args: FinetuningArguments) -> VerifiedCheckpointTrainer:
        return VerifiedCheckpointTrainer(
            args=args,
            model_init=lambda: build_model(AutoModelForMultipleChoice, arguments),
            data_collator=DataCollatorForMultipleChoice(tokenizer),
            train_dataset=data["train"],
            eval_dataset=data["validation"],
            processing_class=tokenizer,
            compute_metrics=ClassificationMetrics("single_label_classification"),
        )

    held_out = {name: split for name, split in data.items() if name != "train"}
    return FinetuningTask(make_trainer, held_out, "accuracy")


def main() -> None:
    """Prepare the task, train once with each seed, report."""
    arguments, training_args = parse_task_arguments(TaskArguments, description=__doc__)
    train_and_report(prepare(arguments, training_args), arguments, training_args)


if __name__ == "__main__":
    sys.exit(run(main))
