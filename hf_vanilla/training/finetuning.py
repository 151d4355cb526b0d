"""Fine-tuning as the paper does it: a few epochs over labelled data, several seeds, and what came of them."""

import json
import math
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..data.files import replacing_file
from ..hub.pushing_trainer import PatientPushes
from .arguments import LOSSES, FinetuningArguments
from .checkpoints import last_complete_checkpoint
from .runs import decisive_options, keep_options, save_final_model, train_to_end


logger = logging.get_logger(__name__)


SCORES_FILE = "scores.json"


HUB_TOKEN = re.compile(r"--?hub[-_]token")


HUB_TOKEN_VALUE = re.compile(r"^(--?hub[-_]token)=.*", flags=re.DOTALL)


FEW_UPDATES = 100


_NO_SCORES = ("runtime", "per_second", "epoch")


class OrderedEvaluationTrainer(PatientPushes):
    """`Trainer` that evaluates rows in their own order, also where it groups training rows by length.

    The stock one groups the rows of an evaluation too, and `compute_metrics` can't tell which row is which.
    """

    def _get_eval_sampler(self, eval_dataset: Any) -> SequentialSampler:
        """Return the sampler of an evaluation, whose batches accelerate deals out to the processes."""
        return SequentialSampler(eval_dataset)


class FewUpdatesWarning(TrainerCallback):
    """Says once that a fine-tuning has too few updates for a new head to learn much."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at the length of the run, which is known now.

        Args:
            args (`TrainingArguments`):
                How to train.
            state (`TrainerState`):
                The length of the run.
            control (`TrainerControl`):
                Not used.
            **kwargs (`Any`):
                Not used.
        """
        if state.is_world_process_zero and state.max_steps < FEW_UPDATES:
            logger.warning_once(
                f"This fine-tuning has {state.max_steps} updates, which is mostly too few: on little data raise "
                "--num_train_epochs or lower --per_device_train_batch_size; a small model wants a higher "
                "--learning_rate too, such as 3e-4."
            )


class FinetuningTask(NamedTuple):
    """What is to be learnt: all that a fine-tuning needs but its settings.

    Attributes:
        make_trainer: Makes a trainer that makes its model itself, with `model_init`, so that a seed decides the new
            head's weights.
        evaluation_sets: What to score on, by name; the first, `validation`, is the one to choose settings on.
        main_score: The score that counts.
    """

    make_trainer: Callable[[FinetuningArguments], Trainer]
    evaluation_sets: dict[str, Any]
    main_score: str


def train_with_seeds(
    task: FinetuningTask,
    args: FinetuningArguments,
    seeds: Sequence[int],
    task_options: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Train once with each seed, save each model, and score it.

    With `task_options` a fine-tuning that was stopped goes on: a seed that has its scores keeps them, and another one
    goes on from its last checkpoint, if `save_strategy` has left one. Scores that can't be read don't count.

    Args:
        task (`FinetuningTask`):
            What to learn.
        args (`FinetuningArguments`):
            How to train; the seed and the subfolder of `output_dir` are filled in.
        seeds (`Sequence[int]`):
            The seeds.
        task_options (`Mapping[str, Any]`, *optional*):
            What decides the scores beside `args`: model, data and the like. The default trains all seeds anew.

    Returns:
        `dict[str, dict[str, dict[str, float]]]`: for each seed, for each set, its scores.

    Raises:
        ValueError: if `args` or `task_options` are others than those of the run that would be gone on with.
    """
    runs: dict[int, tuple[FinetuningArguments, str | None]] = {}
    for seed in seeds:
        folder = Path(str(args.output_dir)) / f"seed-{seed}"
        changes: dict[str, Any] = {"output_dir": str(folder), "seed": seed}
        seed_args = replace(args, **changes)
        checkpoint = None
        if task_options is not None:
            checkpoint = last_complete_checkpoint(folder)
            if args.should_save:
                keep_options(folder, decisive_options({**task_options, **seed_args.to_dict()}), checkpoint)
        runs[seed] = (seed_args, checkpoint)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for seed, (seed_args, checkpoint) in runs.items():
        path = Path(str(seed_args.output_dir)) / SCORES_FILE
        scores = None if task_options is None else _kept_scores(path, task)
        if scores is not None:
            logger.warning(f"Seed {seed} is done; its scores are those of {path}.")
            results[str(seed)] = scores
            continue
        if checkpoint is not None:
            logger.warning(f"Seed {seed} goes on from {checkpoint}.")
        results[str(seed)] = _train_and_score(task, seed_args, checkpoint)
        if task_options is not None and args.should_save:
            with replacing_file(str(path)) as file:
                file.write(json.dumps(results[str(seed)], indent=1) + "\n")
    return results


def _kept_scores(path: Path, task: FinetuningTask) -> dict[str, dict[str, float]] | None:
    """Read the scores of a seed; `None`, with a warning, if the main one is missing on some set."""
    if not path.is_file():
        return None
    try:
        scores = json.loads(path.read_text(encoding="utf-8"))
        if all(math.isfinite(scores[name][task.main_score]) for name in task.evaluation_sets):
            return scores
    except (ValueError, TypeError, KeyError):
        pass
    logger.warning(f"Passed over {path}: it has no {task.main_score} for each evaluation set. The seed is trained.")
    return None


def _train_and_score(
    task: FinetuningTask, args: FinetuningArguments, checkpoint: str | None
) -> dict[str, dict[str, float]]:
    """Train with one seed, save the model, and return its scores on each set."""
    trainer = task.make_trainer(args)
    trainer.add_callback(FewUpdatesWarning())
    train_to_end(trainer, checkpoint)
    save_final_model(trainer)  # before it is scored, so that no error there loses it
    return {
        name: {
            score.removeprefix("eval_"): value
            for score, value in trainer.evaluate(dataset).items()
            if not score.endswith(_NO_SCORES)
        }
        for name, dataset in task.evaluation_sets.items()
    }


def summarise_seeds(results: dict[str, dict[str, dict[str, float]]], main_score: str) -> dict[str, dict[str, float]]:
    """Tell the median, the best and the worst of one score.

    Args:
        results (`dict[str, dict[str, dict[str, float]]]`):
            As [`train_with_seeds`] gives them.
        main_score (`str`):
            Name of the score.

    Returns:
        `dict[str, dict[str, float]]`: for each evaluation set `median`, `best` and `worst`.

    Raises:
        ValueError: if there is no such score, or no result.
    """
    if not results:
        raise ValueError("`results` must have those of at least one seed, got none.")
    summary = {}
    for name, scores in next(iter(results.values())).items():
        if main_score not in scores:
            raise ValueError(f"`main_score` must be one of {', '.join(scores)}; got {main_score!r}.")
        values = [each[name][main_score] for each in results.values()]
        best, worst = (min, max) if main_score in LOSSES else (max, min)
        summary[name] = {"median": statistics.median(values), "best": best(values), "worst": worst(values)}
    return summary


def command_of_process() -> str:
    """Return the command that started this process, for a file of results; a token of the Hub is left out.

    Returns:
        `str`: as it can be typed again.
    """
    words = (
        ["python", *sys.orig_argv[sys.orig_argv.index(sys.argv[0]) :]] if sys.argv[0] in sys.orig_argv else sys.argv
    )
    hidden = {number + 1 for number, word in enumerate(words) if HUB_TOKEN.fullmatch(word)}
    words = ["..." if number in hidden else HUB_TOKEN_VALUE.sub(r"\1=...", word) for number, word in enumerate(words)]
    return shlex.join(words)


def seeds_report(results: dict[str, dict[str, dict[str, float]]], main_score: str) -> dict[str, Any]:
    """Put together what a file of results says.

    Args:
        results (`dict[str, dict[str, dict[str, float]]]`):
            As [`train_with_seeds`] gives them.
        main_score (`str`):
            The score that counts.

    Returns:
        `dict[str, Any]`: `main_score`, `summary`, `seeds` and the `command` of this process.
    """
    return {
        "main_score": main_score,
        "summary": summarise_seeds(results, main_score),
        "seeds": results,
        "command": command_of_process(),
    }
