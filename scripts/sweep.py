#!/usr/bin/env python
r"""Find the best settings of a fine-tuning: the paper's grid of batch size, learning rate and epochs, over seeds.

The first argument is the task, and the options of its script follow:

    python scripts/sweep.py classification --model_name_or_path runs/bert --task_name rte \
        --seeds 1 2 3 --results_file sweep.json --output_dir runs/sweep

    python scripts/sweep.py token_classification --help
    python scripts/sweep.py multiple_choice --help
    python scripts/sweep.py question_answering --help

The grid is the paper's (A.3): --batch_sizes 16 32 --learning_rates 5e-5 3e-5 2e-5 --epochs 2 3 4, 18
trainings for each seed. The settings are ranked by the median of their seeds on the validation data, and printed as
options of the fine-tuning script. Run the same command again to resume an interrupted search.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("sweep")

import dataclasses
import hashlib
import importlib
import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hf_vanilla.command_line.finetuning import parse_task_arguments
from hf_vanilla.command_line.options import run, take_task
from hf_vanilla.command_line.report import write_report
from hf_vanilla.training import (
    PAPER_GRID,
    check_and_save_options,
    command_of_process,
    decisive_options,
    lock_run_folder,
    search_settings,
)


logger = logging.getLogger("sweep")

TASKS = ("classification", "token_classification", "multiple_choice", "question_answering")
SUMMARY = ("median", "best", "worst")
SETTINGS = {
    "per_device_train_batch_size": "batch_sizes",
    "learning_rate": "learning_rates",
    "num_train_epochs": "epochs",
}


@dataclass
class GridArguments:
    """The grid."""

    batch_sizes: list[int] = field(
        default_factory=lambda: list(map(int, PAPER_GRID["per_device_train_batch_size"])),
        metadata={"help": "Batch sizes."},
    )
    learning_rates: list[float] = field(
        default_factory=lambda: list(PAPER_GRID["learning_rate"]), metadata={"help": "Peak learning rates."}
    )
    epochs: list[float] = field(
        default_factory=lambda: list(PAPER_GRID["num_train_epochs"]), metadata={"help": "Numbers of epochs."}
    )


def import_script(task: str):
    """Import the script of a task, from the installed package or from the folder of this file."""
    name = f"finetune_{task}"
    return importlib.import_module(f".{name}", __package__) if __package__ else importlib.import_module(name)


def fingerprint(arguments, training_args, grid, main_score: str) -> str:
    """Return a checksum of all that decides the scores, so that another search in the same folder starts anew.

    It includes the grid, the seeds, and the content of files and models.
    """
    options = decisive_options({**vars(arguments), **training_args.to_dict()})
    decisive = {**options, **grid, "seeds": arguments.seeds, "main_score": main_score}
    text = json.dumps(decisive, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> None:
    """Prepare the task like its script, search, report."""
    script = import_script(take_task(TASKS))
    arguments, training_args, grid_args = parse_task_arguments(
        script.TaskArguments, GridArguments, description=__doc__
    )
    given = {word.partition("=")[0].strip("-").replace("-", "_") for word in sys.argv if word.startswith("--")}
    usual = {each.name: each.default for each in dataclasses.fields(training_args)}  # a file can have options, too
    for single, several in SETTINGS.items():
        if single in given or getattr(training_args, single) != usual[single]:
            raise ValueError(f"`{single}` is what is searched for; give its values as --{several}.")
    task = script.prepare(arguments, training_args)
    grid = {single: getattr(grid_args, several) for single, several in SETTINGS.items()}
    folder = Path(training_args.output_dir)
    with lock_run_folder(folder, is_main_process=training_args.should_save):
        if training_args.should_save:
            check_and_save_options(folder, {"bf16": training_args.bf16})  # so that a resumed search keeps it
        ranking = search_settings(
            task,
            training_args,
            arguments.seeds,
            folder / "search.journal",
            grid=grid,
            study_name=fingerprint(arguments, training_args, grid, task.main_score),
        )
    if not training_args.should_save:
        return
    for place, found in enumerate(ranking, start=1):
        options = " ".join(f"--{name} {found[name]:g}" for name in grid)
        shown = {which: "diverged" if found[which] is None else f"{found[which]:.4f}" for which in SUMMARY}
        scores = ", ".join(f"{which} {value}" for which, value in shown.items())
        sys.stderr.write(f"{place}. {task.main_score} {scores}: {options}\n")
    if arguments.results_file is not None:
        report = {"main_score": task.main_score, "settings": ranking, "command": command_of_process()}
        write_report(arguments.results_file, report)


if __name__ == "__main__":
    sys.exit(run(main))
