#!/usr/bin/env python
r"""Fine-tune BERT to tag words, such as the names in a sentence, from a checkpoint or from scratch.

    python scripts/finetune_token_classification.py --model_name_or_path runs/bert \
        --train_file train.jsonl --validation_file val.jsonl --tags_column ner_tags --output_dir runs/names

Each row of the files (.json, .jsonl, also as .gz; .parquet) has a list of words and a list of their BIO tags; so has
each of a dataset of the Hub (--dataset_name), where tags may be numbers with names. Of other tags, such as parts of
speech, each word counts by itself. Columns of usual names are found. Without validation data a share of the training
data is held out. With --seeds the training is repeated, and the median, best and worst F1 are printed. --from_scratch
starts from random weights of the same size, to measure the effect of pre-training. Run the same command again to
resume an interrupted one. All options can also be in a JSON or YAML file.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("finetune_token_classification")

import logging
import sys
from dataclasses import dataclass, field

from datasets import Dataset
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
)

import hf_vanilla  # noqa: F401  (registers the models)
from hf_vanilla.command_line.checks import check_output_dir
from hf_vanilla.command_line.finetuning import (
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
from hf_vanilla.data.labelled import Labels, with_class_names
from hf_vanilla.data.token_classification import check_tagged_words, tag_names, tokenize_tagged_words
from hf_vanilla.metrics import EntityMetrics
from hf_vanilla.training import FinetuningArguments, FinetuningTask, VerifiedCheckpointTrainer


logger = logging.getLogger("finetune_token_classification")


# Usual names of the columns.
COLUMNS = {"tokens_column": ("tokens", "words"), "tags_column": ("tags", "ner_tags", "labels", "pos_tags")}


@dataclass
class TaskArguments(TestedTaskArguments):
    """The model, the data and the seeds."""

    tokens_column: str | None = field(
        default=None, metadata={"help": f"Column of the words. Default: {' or '.join(COLUMNS['tokens_column'])}."}
    )
    tags_column: str | None = field(
        default=None, metadata={"help": f"Column of their tags. Default: {' or '.join(COLUMNS['tags_column'])}."}
    )
    max_length: int = field(default=128, metadata={"help": "Most tokens of a sentence; longer ones are truncated."})
    label_all_pieces: bool = field(
        default=False, metadata={"help": "Train on all pieces of a word instead of only the first."}
    )


def prepare(arguments: TaskArguments, training_args: FinetuningArguments) -> FinetuningTask:
    """Load the data, and define how to make the trainer."""
    tables = given_tables(arguments)
    check_output_dir(training_args.output_dir)

    # 1. data
    loaded = load_splits(tables, find_columns(arguments, tables["train"], COLUMNS))
    rows = {}
    for name, split in loaded.items():
        tags, class_names = with_class_names(split, "tags", f"the {name} data")
        rows[name] = Dataset.from_dict({"tokens": split["tokens"][:], "tags": tags})
        check_tagged_words(rows[name], "tokens", "tags", f"the {name} data")
        if name == "train":
            names = class_names or tag_names(tags)
    rows = with_validation(rows, arguments)
    labels = Labels("single_label_classification", names)
    tokenizer = load_tokenizer(arguments)
    data = {
        name: tokenize_tagged_words(
            split,
            tokenizer,
            names,
            max_length=arguments.max_length,
            label_all_pieces=arguments.label_all_pieces and name == "train",
        )
        for name, split in rows.items()
    }
    logger.info(f"tags: {', '.join(map(repr, names))}; {len(data['train']):,} training sentences")

    # 2. model and trainer
    def make_trainer(args: FinetuningArguments) -> VerifiedCheckpointTrainer:
        return VerifiedCheckpointTrainer(
            args=args,
            model_init=lambda: build_model(AutoModelForTokenClassification, arguments, **labels.config_fields()),
            data_collator=DataCollatorForTokenClassification(tokenizer),
            train_dataset=data["train"],
            eval_dataset=data["validation"],
            processing_class=tokenizer,
            compute_metrics=EntityMetrics(names),
        )

    held_out = {name: split for name, split in data.items() if name != "train"}
    return FinetuningTask(make_trainer, held_out, "f1")


def main() -> None:
    """Prepare the task, train once with each seed, report."""
    arguments, training_args = parse_task_arguments(TaskArguments, description=__doc__)
    train_and_report(prepare(arguments, training_args), arguments, training_args)


if __name__ == "__main__":
    sys.exit(run(main))
