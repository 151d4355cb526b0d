#!/usr/bin/env python
r"""Fine-tune BERT to choose the right ending, from a checkpoint or from scratch.

    python scripts/finetune_multiple_choice.py --model_name_or_path runs/bert \
        --train_file train.jsonl --validation_file val.jsonl --output_dir runs/endings

Each row of the files (.json, .jsonl, also as .gz; .parquet) has a beginning (`sent1` or `question`), a list of
`endings` or `choices`, and as `label` the index of the right one, from 0. So has each of a dataset of the Hub
(--dataset_name); of SWAG's columns, `sent2` is the start of each of `ending0` to `ending3`, and of those of ARC,
`answerKey` is one of the labels of `choices`. Rows with another number of endings than most are left out and counted.
Without validation data a share of the training data is held out. With --seeds the training is repeated, and the
median, best and worst accuracy are printed. --from_scratch starts from random weights of the same size, to measure the
effect of pre-training. Run the same command again to resume an interrupted one. All options can also be in a JSON or
YAML file.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("finetune_multiple_choice")

import logging
import sys
from collections import Counter
from dataclasses import dataclass, field

from datasets import Dataset
from transformers import (
    AutoModelForMultipleChoice,
    DataCollatorForMultipleChoice,
)

import hf_vanilla  # noqa: F401  (registers the models)
from hf_vanilla.command_line.checks import check_output_dir
from hf_vanilla.command_line.finetuning import (
    Table,
    TestedTaskArguments,
    build_model,
    find_columns,
    given_tables,
    load_splits,
    load_tokenizer,
    parse_task_arguments,
    train_and_report,
    with_validation,
)
from hf_vanilla.command_line.options import run
from hf_vanilla.metrics import ClassificationMetrics
from hf_vanilla.training import FinetuningArguments, FinetuningTask, VerifiedCheckpointTrainer


logger = logging.getLogger("finetune_multiple_choice")


# Usual names of the columns.
COLUMNS = {
    "text_column": ("sent1", "question", "ctx", "premise", "text"),
    "endings_column": ("endings", "choices", "options"),
    "label_column": ("label", "labels", "answer", "answerKey"),
}


@dataclass
class TaskArguments(TestedTaskArguments):
    """The model, the data and the seeds."""

    text_column: str | None = field(
        default=None, metadata={"help": f"Column of the beginning. Default: {', '.join(COLUMNS['text_column'])}."}
    )
    endings_column: str | None = field(
        default=None, metadata={"help": f"Column of the endings. Default: {', '.join(COLUMNS['endings_column'])}."}
    )
    label_column: str | None = field(
        default=None, metadata={"help": f"Column of the right one. Default: {', '.join(COLUMNS['label_column'])}."}
    )
    max_length: int = field(
        default=128, metadata={"help": "Most tokens of beginning and ending; longer ones are truncated."}
    )


def with_endings(table: Table) -> Table:
    """Make a list of SWAG's columns of endings."""
    rows = table.source
    names = table.column_names()
    ending = [name for name in names if name.startswith("ending") and name[6:].isdecimal()]
    if not isinstance(rows, Dataset) or not ending or "sent2" not in names or "endings" in names:
        return table

    def join(row: dict) -> dict:
        return {"endings": [f"{row['sent2']} {row[name]}" for name in sorted(ending, key=lambda name: int(name[6:]))]}

    return Table(rows.map(join), table.where)


def indexed(beginning: str, endings, label) -> tuple:
    """Return beginning, endings and the index of the right one, of what datasets have as choices and label."""
    if isinstance(endings, dict) and {"text", "label"} <= endings.keys():  # ARC, CommonsenseQA
        endings, keys = endings["text"], endings["label"]
        label = keys.index(label) if label in keys else label
    if isinstance(label, str) and label.isdecimal():
        label = int(label)
    return beginning, endings, label


def encode(name: str, rows: Dataset, arguments: TaskArguments, tokenizer) -> Dataset:
    """Pair the beginning with each ending."""
    columns: dict[str, list] = {"labels": []}
    examples = []
    for number, row in enumerate(rows, start=1):
        beginning, endings, label = indexed(row["text"], row["endings"], row["label"])
        if not isinstance(endings, list) or not all(isinstance(each, str) for each in endings):
            raise ValueError(f"{name}, row {number}: `endings_column` must be a list of strings, got {endings!r}.")
        if not isinstance(label, int) or not 0 <= label < len(endings):
            raise ValueError(
                f"{name}, row {number}: `label_column` must be a whole number in [0, {len(endings)}), got {label!r}."
            )
        examples.append((beginning, endings, label))
    choices, count = Counter(len(endings) for _, endings, _ in examples).most_common(1)[0]  # a batch has one number
    if count < len(examples):
        logger.warning(
            f"{name}: {len(examples) - count:,} of {len(examples):,} rows do not have {choices} endings, as most do: "
            "they are left out, neither trained on nor scored."
        )
    for beginning, endings, label in examples:
        if len(endings) != choices:
            continue
        encoded = tokenizer([beginning] * choices, endings, truncation=True, max_length=arguments.max_length)
        columns["labels"].append(int(label))
        for column, values in encoded.items():
            columns.setdefault(column, []).append(values)
    return Dataset.from_dict(columns)


def prepare(arguments: TaskArguments, training_args: FinetuningArguments) -> FinetuningTask:
    """Load the data, and define how to make the trainer."""
    tables = {name: with_endings(table) for name, table in given_tables(arguments).items()}
    check_output_dir(training_args.output_dir)

    # 1. data
    tokenizer = load_tokenizer(arguments)
    columns = find_columns(arguments, tables["train"], COLUMNS)
    loaded = load_splits(tables, {option: columns[option] for option in COLUMNS})
    encoded = {name: encode(f"the {name} data", rows, arguments, tokenizer) for name, rows in loaded.items()}
    data = with_validation(encoded, arguments)
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
