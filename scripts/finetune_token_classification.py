#!/usr/bin/env python
r"""Fine-tune BERT to tag words, such as the names in a sentence, from a checkpoint or from scratch.

    python scripts/finetune_token_classification.py --model_name_or_path runs/bert \
        --train_file train.jsonl --validation_file val.jsonl --tags_column ner_tags --output_dir runs/names

Each row of the files (.json, .jsonl, .parquet, also as .gz) has a list of words and a list of their BIO tags. With
--seeds the training is repeated, and the median, best and worst F1 are printed. --from_scratch starts from random
weights of the same size, to measure the effect of pre-training. Run the same command again to resume an interrupted
one. All options can also be in a JSON or YAML file.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("finetune_token_classification")

import logging
import sys
from dataclasses import dataclass, field

from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
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
from hf_vanilla.data.labelled import Labels, load_rows
from hf_vanilla.data.token_classification import check_tagged_words, tag_names, tokenize_tagged_words
from hf_vanilla.metrics import EntityMetrics
from hf_vanilla.training import FinetuningArguments, FinetuningTask, VerifiedCheckpointTrainer


logger = logging.getLogger("finetune_token_classification")


@dataclass
class TaskArguments(TestedTaskArguments):
    """The model, the data and the seeds."""

    tokens_column: str = field(default="tokens", metadata={"help": "Column of the words."})
    tags_column: str = field(default="tags", metadata={"help": "Column of their tags."})
    max_length: int = field(default=128, metadata={"help": "Most tokens of a sentence; longer ones are truncated."})
    label_all_pieces: bool = field(
        default=False, metadata={"help": "Train on all pieces of a word instead of only the first."}
    )


def prepare(arguments: TaskArguments, training_args: FinetuningArguments) -> FinetuningTask:
    """Load the data, and define how to make the trainer."""
    files = given_files(arguments)
    check_output_dir(training_args.output_dir)

    # 1. data
    columns = [arguments.tokens_column, arguments.tags_column]
    rows = {name: load_rows(path, columns) for name, path in files.items()}
    for name, split in rows.items():
        check_tagged_words(split, arguments.tokens_column, arguments.tags_column, f"the {name} data")
    names = tag_names(rows["train"][arguments.tags_column][:])
    labels = Labels("single_label_classification", names)
    tokenizer = load_tokenizer(arguments)
    data = {
        name: tokenize_tagged_words(
            split,
            tokenizer,
            names,
            tokens_column=arguments.tokens_column,
            tags_column=arguments.tags_column,
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
