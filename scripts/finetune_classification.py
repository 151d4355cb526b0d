#!/usr/bin/env python
r"""Fine-tune BERT or GPT to classify texts or pairs of texts, or for regression, from a checkpoint or from scratch.

A task of GLUE, from the Hub:

    python scripts/finetune_classification.py --model_name_or_path runs/bert --task_name sst2 --output_dir runs/sst2

A dataset of the Hub, whose columns are found if they have usual names:

    python scripts/finetune_classification.py --model_name_or_path runs/bert --dataset_name stanfordnlp/imdb \
        --output_dir runs/imdb

Your own files (.json, .jsonl, .csv, .tsv, .parquet), with the names of their columns:

    python scripts/finetune_classification.py --model_name_or_path runs/bert \
        --train_file train.csv --validation_file val.csv --text_column review --label_column stars \
        --seeds 1 2 3 --results_file results.json --output_dir runs/reviews

Labels can be names or numbers, with a column `label_name` for their names; lists of them mean several labels of one
text; numbers with fractions among them mean a regression. Without validation data a share of the training data is held
out. With --seeds the training is repeated, and the median, best and worst of the main score are printed.
--from_scratch starts from random weights of the same size, to measure the effect of pre-training. A GPT learns to
predict the text too, with --lm_loss_weight. Run the same command again to resume an interrupted one. All options can
also be in a JSON or YAML file.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("finetune_classification")

import logging
import sys
from dataclasses import dataclass, field

from datasets import Dataset, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
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
from hf_vanilla.data.files import quoted
from hf_vanilla.data.labelled import encode_labels
from hf_vanilla.data.tokenization import add_text_ends
from hf_vanilla.metrics import ClassificationMetrics
from hf_vanilla.training import FinetuningArguments, FinetuningTask, VerifiedCheckpointTrainer


logger = logging.getLogger("finetune_classification")

# Wang et al. 2019: the columns of each task's texts, and its main score.
GLUE: dict[str, tuple[tuple[str, ...], str]] = {
    "cola": (("sentence",), "matthews"),
    "mnli": (("premise", "hypothesis"), "accuracy"),
    "mrpc": (("sentence1", "sentence2"), "f1"),
    "qnli": (("question", "sentence"), "accuracy"),
    "qqp": (("question1", "question2"), "f1"),
    "rte": (("sentence1", "sentence2"), "accuracy"),
    "sst2": (("sentence",), "accuracy"),
    "stsb": (("sentence1", "sentence2"), "spearman"),
    "wnli": (("sentence1", "sentence2"), "accuracy"),
}
# Options of splits and columns, which GLUE has of its own.
NOT_OF_GLUE = (
    "validation_file",
    "test_file",
    "validation_share",
    "text_column",
    "text_pair_column",
    "label_column",
)
# Usual columns of texts and pairs of texts, tried in this order.
TEXTS = (
    ("text",),
    *dict.fromkeys(columns for columns, _ in GLUE.values() if len(columns) == 2),
    ("text1", "text2"),
    ("question", "passage"),
    *((name,) for name in ("sentence", "content", "review", "document")),
)
# The scores of `ClassificationMetrics`, the main one first.
SCORES = {
    "single_label_classification": ("accuracy", "f1", "matthews"),
    "multi_label_classification": ("f1_micro", "f1_macro", "accuracy"),
    "regression": ("spearman", "pearson", "mse"),
}


@dataclass
class TaskArguments(TestedTaskArguments):
    """The model, the data and the seeds."""

    task_name: str | None = field(default=None, metadata={"help": f"A task of GLUE: {', '.join(GLUE)}."})
    text_column: str | None = field(
        default=None, metadata={"help": "Column of the text. Default: text, sentence, or the columns of a pair."}
    )
    text_pair_column: str | None = field(
        default=None, metadata={"help": "Column of the second text of a pair. Default: see text_column."}
    )
    label_column: str | None = field(default=None, metadata={"help": "Column of the label. Default: label or labels."})
    regression: bool = field(
        default=False, metadata={"help": "Predict the labels as numbers, even if they are integers."}
    )
    max_length: int = field(
        default=128, metadata={"help": "Most tokens of a text or pair; longer ones are truncated."}
    )
    lm_loss_weight: float | None = field(
        default=None,
        metadata={"help": "Weight of GPT's loss on the text itself; 0 is none, the paper's 0.5 the default."},
    )
    main_score: str | None = field(
        default=None, metadata={"help": "The score to compare by: accuracy, f1, matthews, pearson, spearman, ..."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.task_name is not None and self.task_name not in GLUE:
            raise ValueError(f"`task_name` must be one of {', '.join(GLUE)}; got {self.task_name!r}.")
        ignored = [name for name in NOT_OF_GLUE if self.task_name is not None and getattr(self, name) is not None]
        if ignored:
            raise ValueError(
                f"`{ignored[0]}` is not for `task_name`, whose splits and columns are known; leave it out, or give "
                "--dataset_name nyu-mll/glue and --dataset_config_name."
            )
        if self.lm_loss_weight is not None and self.lm_loss_weight < 0:
            raise ValueError(f"`lm_loss_weight` must be 0 or more, got {self.lm_loss_weight}.")

    def sources(self):
        """Return the names of the options of which one must say what to train on; GLUE's files are on the Hub."""
        return ("task_name", *super().sources())


def open_data(arguments: TaskArguments) -> tuple[dict[str, Table], dict[str, str]]:
    """Open the splits, and find their columns of texts and labels."""
    task = arguments.task_name
    if task is not None:
        loaded = load_dataset("nyu-mll/glue", task)
        names = {"train": "train", "validation": "validation_matched" if task == "mnli" else "validation"}
        tables = {name: Table(loaded[split], f"{task} ({split})") for name, split in names.items()}
        texts = dict(zip(("text_column", "text_pair_column"), GLUE[task][0], strict=False))
        return tables, {**texts, "label_column": "label"}
    tables = given_tables(arguments)
    usual = {"text_column": [names[0] for names in TEXTS], "label_column": ("label", "labels")}
    if arguments.text_pair_column is not None:
        usual["text_pair_column"] = ()
    columns = find_columns(arguments, tables["train"], usual)
    if arguments.text_column is None and arguments.text_pair_column is None:
        existing = tables["train"].column_names()
        found = next((names for names in TEXTS if set(names) <= set(existing)), (columns["text_column"],))
        columns |= dict(zip(("text_column", "text_pair_column"), found, strict=False))
    return tables, columns


def texts_of(rows: Dataset, column: str, split: str) -> list[str]:
    """Read a column of texts; numbers are texts, too."""
    values = rows[column][:]
    for number, value in enumerate(values, start=1):
        if isinstance(value, list | dict):
            raise ValueError(
                f"the {split} data, row {number}: `{column}_column` must be a text, not a list or an object; got "
                f"{quoted(value)}."
            )
    return [str(value) for value in values]


def encode(splits: dict[str, Dataset], labels: dict[str, list], tokenizer, max_length: int) -> dict[str, Dataset]:
    """Tokenize texts, and join the encoded labels."""
    encoded = {}
    for name, split in splits.items():
        texts = [texts_of(split, column, name) for column in ("text", "text_pair") if column in split.column_names]
        rows = tokenizer(*texts, truncation=True, max_length=max_length)
        truncated = sum(len(ids) == max_length for ids in rows["input_ids"])
        if truncated:
            logger.info(
                f"{name}: {truncated} of {len(split)} inputs reach --max_length ({max_length}) and may be truncated."
            )
        encoded[name] = Dataset.from_dict({**rows, "labels": labels[name]})
    return encoded


def get_tokenizer(arguments: TaskArguments):
    """Load the tokenizer; that of a language model gets tokens around texts."""
    tokenizer = load_tokenizer(arguments)
    config = AutoConfig.from_pretrained(arguments.model_name_or_path)
    if arguments.lm_loss_weight is not None and not hasattr(config, "lm_loss_weight"):
        raise ValueError(f"`lm_loss_weight` is for GPT, not for a {config.model_type}; leave it out.")
    return add_text_ends(tokenizer)


def prepare(arguments: TaskArguments, training_args: FinetuningArguments) -> FinetuningTask:
    """Load the data, and define how to make the trainer."""
    check_output_dir(training_args.output_dir)

    # 1. data
    splits = load_splits(*open_data(arguments))
    labels, encoded = encode_labels(splits, regression=arguments.regression)
    scores = [*SCORES[labels.problem_type], "loss"]
    main_score = arguments.main_score or (GLUE[arguments.task_name][1] if arguments.task_name else scores[0])
    if main_score not in scores:
        raise ValueError(f"`main_score` must be one of {', '.join(scores)}; got {main_score!r}.")
    tokenizer = get_tokenizer(arguments)
    data = with_validation(encode(splits, encoded, tokenizer, arguments.max_length), arguments)
    named = ", ".join(map(repr, labels.names[:10]))
    logger.info(f"{labels.problem_type}, labels: {named}; {len(data['train']):,} training rows")

    # 2. model and trainer
    fields = labels.config_fields()
    if arguments.lm_loss_weight is not None:
        fields["lm_loss_weight"] = arguments.lm_loss_weight

    def make_model():
        model = build_model(AutoModelForSequenceClassification, arguments, **fields)
        if model.config.pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
        if len(tokenizer) > model.config.vocab_size:
            model.resize_token_embeddings(len(tokenizer))
        return model

    def make_trainer(args: FinetuningArguments) -> VerifiedCheckpointTrainer:
        return VerifiedCheckpointTrainer(
            args=args,
            model_init=make_model,
            data_collator=DataCollatorWithPadding(tokenizer),
            train_dataset=data["train"],
            eval_dataset=data["validation"],
            processing_class=tokenizer,
            compute_metrics=ClassificationMetrics(labels.problem_type),
        )

    held_out = {name: split for name, split in data.items() if name != "train"}
    return FinetuningTask(make_trainer, held_out, main_score)


def main() -> None:
    """Prepare the task, train once with each seed, report."""
    arguments, training_args = parse_task_arguments(TaskArguments, description=__doc__)
    train_and_report(prepare(arguments, training_args), arguments, training_args)


if __name__ == "__main__":
    sys.exit(run(main))
