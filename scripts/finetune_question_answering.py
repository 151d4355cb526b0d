#!/usr/bin/env python
r"""Fine-tune BERT to find the answer to a question in a text, from a checkpoint or from scratch.

    python scripts/finetune_question_answering.py --model_name_or_path runs/bert \
        --train_file train-v1.1.json --validation_file dev-v1.1.json --output_dir runs/squad

The files are in SQuAD's own format, or have one of its articles on each line (.jsonl), or one question in each row as
on the Hub: `id`, `question`, `context`, `answers` (.jsonl, .parquet). A dataset of the Hub: --dataset_name
rajpurkar/squad. Without validation data the last share of the training questions is held out. Long texts are split
into windows that overlap (--doc_stride). If some training questions have no answer, as in SQuAD 2.0, "no answer" is
one of the answers.

Each model's folder gets `predictions.json` ({id: answer}) and `nbest_predictions.json` for the validation data. With
--seeds the training is repeated, and the median, best and worst F1 are printed. --from_scratch starts from random
weights of the same size, to measure the effect of pre-training. Run the same command again to resume an interrupted
one. All options can also be in a JSON or YAML file.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("finetune_question_answering")

import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from transformers import (
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
    EvalPrediction,
)

import hf_vanilla  # noqa: F401  (registers the models)
from hf_vanilla.command_line.checks import check_output_dir
from hf_vanilla.command_line.finetuning import (
    CommonTaskArguments,
    build_model,
    given_tables,
    load_tokenizer,
    parse_task_arguments,
    train_and_report,
    with_validation,
)
from hf_vanilla.command_line.options import run
from hf_vanilla.data.files import replacing_file
from hf_vanilla.data.question_answering import find_answers, load_questions, tokenize_questions
from hf_vanilla.metrics.question_answering import squad_scores
from hf_vanilla.training import FinetuningArguments, FinetuningTask, OrderedEvaluationTrainer


logger = logging.getLogger("finetune_question_answering")


@dataclass
class TaskArguments(CommonTaskArguments):
    """The model, the data and the seeds."""

    id_column: str | None = field(
        default=None, metadata={"help": "Column of the id. Default: id, else the numbers of the rows."}
    )
    question_column: str | None = field(default=None, metadata={"help": "Column of the question. Default: question."})
    context_column: str | None = field(default=None, metadata={"help": "Column of the text. Default: context."})
    answers_column: str | None = field(default=None, metadata={"help": "Column of the answers. Default: answers."})
    max_train_questions: int | None = field(
        default=None, metadata={"help": "Train on this many questions, drawn at random, instead of all."}
    )
    max_length: int = field(default=384, metadata={"help": "Most tokens of question and window."})
    doc_stride: int = field(default=128, metadata={"help": "Tokens shared by neighbouring windows."})
    n_best: int = field(default=20, metadata={"help": "Answers of a question in nbest_predictions.json."})
    max_answer_length: int = field(default=30, metadata={"help": "Most tokens of an answer."})
    no_answer_threshold: float = field(
        default=0.0, metadata={"help": "Margin by which 'no answer' must outscore the best answer."}
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("max_train_questions", "max_length", "n_best", "max_answer_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")


def load_splits(arguments: TaskArguments) -> dict[str, Dataset]:
    """Load the questions, to train on all or a random sample that does not depend on the seed of a training."""
    names = ("id_column", "question_column", "context_column", "answers_column")
    columns = {name: getattr(arguments, name) for name in names}
    tables = given_tables(arguments)
    splits = {name: load_questions(table.source, columns, table.where) for name, table in tables.items()}
    # The last questions are of other texts than the others, where the order of SQuAD's files is kept.
    splits = with_validation(splits, arguments, shuffle=False)
    most = arguments.max_train_questions
    if most is not None and most < len(splits["train"]):
        splits["train"] = splits["train"].shuffle(seed=0).select(range(most))
    return splits


def write_answers(folder: Path, answers) -> None:
    """Write the best answer and the n best of each question, to the file names of the official script."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "predictions.json": {identity: best[0].text for identity, best in answers.items()},
        "nbest_predictions.json": {
            identity: [answer._asdict() for answer in best] for identity, best in answers.items()
        },
    }
    for name, content in contents.items():
        with replacing_file(str(folder / name)) as file:
            json.dump(content, file, ensure_ascii=False, indent=1)


def prepare(arguments: TaskArguments, training_args: FinetuningArguments) -> FinetuningTask:
    """Load the data, and define how to make the trainer."""
    check_output_dir(training_args.output_dir)

    # 1. data; windows of similar length share a batch, which saves padding
    questions = load_splits(arguments)
    with_no_answer = any(not answers["text"] for answers in questions["train"]["answers"])
    tokenizer = load_tokenizer(arguments)
    windows = {
        name: tokenize_questions(split, tokenizer, max_length=arguments.max_length, doc_stride=arguments.doc_stride)
        for name, split in questions.items()
    }
    lengths = [len(ids) for ids in windows["validation"]["input_ids"]]
    held_out = windows["validation"].select(sorted(range(len(lengths)), key=lambda row: -lengths[row]))
    logger.info(f"{len(questions['train']):,} training questions, {len(windows['train']):,} windows")

    # 2. model and trainer
    def make_trainer(args: FinetuningArguments) -> OrderedEvaluationTrainer:
        def measure(prediction: EvalPrediction) -> dict[str, float]:
            start_logits, end_logits = prediction.predictions
            answers = find_answers(
                questions["validation"],
                held_out,
                start_logits,
                end_logits,
                n_best=arguments.n_best,
                max_answer_length=arguments.max_answer_length,
                with_no_answer=with_no_answer,
                no_answer_threshold=arguments.no_answer_threshold,
            )
            if args.should_save:
                write_answers(Path(str(args.output_dir)), answers)
            right = zip(questions["validation"]["id"], questions["validation"]["answers"], strict=True)
            return squad_scores(
                {identity: best[0].text for identity, best in answers.items()},
                {identity: each["text"] for identity, each in right},
            )

        return OrderedEvaluationTrainer(
            args=args,
            model_init=lambda: build_model(AutoModelForQuestionAnswering, arguments),
            data_collator=DataCollatorWithPadding(tokenizer),
            train_dataset=windows["train"],
            eval_dataset=held_out,
            processing_class=tokenizer,
            compute_metrics=measure,
        )

    return FinetuningTask(make_trainer, {"validation": held_out}, "f1")


def main() -> None:
    """Prepare the task, train once with each seed, report."""
    arguments, training_args = parse_task_arguments(TaskArguments, description=__doc__)
    train_and_report(prepare(arguments, training_args), arguments, training_args)


if __name__ == "__main__":
    sys.exit(run(main))
