"""Fine-tuning as in the paper: a few epochs over labelled data, with several seeds, and their scores."""

import json
import math
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..data.files import replacing_file
from .arguments import FinetuningArguments, add_early_stopping
from .checkpointing import VerifiedCheckpointTrainer
from .checkpoints import checkpoint_to_resume, lower_is_better
from .policies import add_policies
from .runs import check_and_save_options, decisive_options, save_final_model, train_to_end


logger = logging.get_logger(__name__)


SCORES_FILE = "scores.json"
FEW_UPDATES = 100
HUB_TOKEN = re.compile(r"--?hub[-_]token")
HUB_TOKEN_VALUE = re.compile(r"^(--?hub[-_]token)=.*", flags=re.DOTALL)
# Metrics of an evaluation that are no scores.
NO_SCORES = ("runtime", "per_second", "epoch")


# For each seed, for each evaluation set, its scores by name.
SeedScores = dict[str, dict[str, dict[str, float]]]


class OrderedEvaluationTrainer(VerifiedCheckpointTrainer):
    """`Trainer` that evaluates rows in their own order, also if it groups training rows by length.

    The stock trainer groups the rows of an evaluation too, and `compute_metrics` can't know their order.
    """

    def _get_eval_sampler(self, eval_dataset: Any) -> SequentialSampler:
        """Return the sampler of an evaluation; accelerate distributes its batches over the processes."""
        return SequentialSampler(eval_dataset)


class FewUpdatesWarning(TrainerCallback):
    """Warns once of a fine-tuning with too few updates to train a new head."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the length of the run, which is known now.

        Args:
            args (`TrainingArguments`): Not used.
            state (`TrainerState`): The length of the run.
            control (`TrainerControl`): Not used.
            **kwargs (`Any`): Not used.
        """
        if state.is_world_process_zero and state.max_steps < FEW_UPDATES:
            logger.warning_once(
                f"This fine-tuning has {state.max_steps} updates, which are usually too few: on little data raise "
                "--num_train_epochs or lower --per_device_train_batch_size; a small model needs a higher "
                "--learning_rate too, such as 3e-4."
            )


class EpochOfDataCallback(TrainerCallback):
    """Calls `set_epoch` of training data that has it.

    accelerate does so in one process alone, and not after batches that a resumed run skips.
    """

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Call `set_epoch`; the first epoch is 0.

        Args:
            args (`TrainingArguments`): Not used.
            state (`TrainerState`): The progress.
            control (`TrainerControl`): Not used.
            **kwargs (`Any`): `train_dataloader`.
        """
        kwargs["train_dataloader"].dataset.set_epoch(int(state.epoch or 0))


class FinetuningTask(NamedTuple):
    """A fine-tuning but for its settings.

    Attributes:
        make_trainer: Makes a trainer that makes its model itself, with `model_init`, so that the seed decides the
            initial weights of the new head.
        evaluation_sets: Datasets to score on, by name; the first, `validation`, is the one to choose settings on.
        main_score: Name of the score to compare by.
    """

    make_trainer: Callable[[FinetuningArguments], Trainer]
    evaluation_sets: dict[str, Any]
    main_score: str


def train_with_seeds(
    task: FinetuningTask,
    args: FinetuningArguments,
    seeds: Sequence[int],
    task_options: Mapping[str, Any] | None = None,
) -> SeedScores:
    """Train once with each seed, save each model, and score it.

    With `task_options` an interrupted fine-tuning resumes: a seed that has its scores keeps them, and any other
    resumes from its last checkpoint, if `save_strategy` has left one. Scores that can't be read are computed again.

    Args:
        task (`FinetuningTask`): What to train.
        args (`FinetuningArguments`): The training arguments; the seed and its subfolder of `output_dir` are filled in.
            With `push_to_hub` the repository is `hub_model_id`, by default of the name of `output_dir`; of several
            seeds each has one of its own, as `my-model-seed-1`.
        seeds (`Sequence[int]`): The seeds.
        task_options (`Mapping[str, Any]`, *optional*): What decides the scores in addition to `args`: model, data and
            so on. The default trains all seeds anew.

    Returns:
        `dict[str, dict[str, dict[str, float]]]`: for each seed, for each evaluation set, its scores.

    Raises:
        ValueError: if `args` or `task_options` differ from those of the run to resume, or its checkpoints are damaged.
    """
    runs: dict[int, tuple[FinetuningArguments, str | None]] = {}
    for seed in seeds:
        folder = Path(str(args.output_dir)) / f"seed-{seed}"
        changes: dict[str, Any] = {"output_dir": str(folder), "seed": seed}
        if args.push_to_hub:  # by default all would be pushed to a repository of the folder's name, seed-1
            name = args.hub_model_id or folder.parent.absolute().name
            changes["hub_model_id"] = name if len(seeds) == 1 else f"{name}-seed-{seed}"
        seed_args = replace(args, **changes)
        checkpoint = None
        if task_options is not None:
            checkpoint = checkpoint_to_resume(folder)
            if args.should_save:
                options = decisive_options({**task_options, **seed_args.to_dict()})
                check_and_save_options(folder, options, checkpoint)
        runs[seed] = (seed_args, checkpoint)
    results: SeedScores = {}
    for seed, (seed_args, checkpoint) in runs.items():
        path = Path(str(seed_args.output_dir)) / SCORES_FILE
        scores = None if task_options is None else _read_scores(path, task)
        if scores is not None:
            logger.warning(f"Seed {seed} is done; its scores are those of {path}.")
            results[str(seed)] = scores
            continue
        if checkpoint is not None:
            logger.warning(f"Seed {seed} resumes from {checkpoint}.")
        results[str(seed)] = _train_and_score(task, seed_args, checkpoint)
        if task_options is not None and args.should_save:
            with replacing_file(str(path)) as file:
                file.write(json.dumps(results[str(seed)], indent=1) + "\n")
    return results


def _read_scores(path: Path, task: FinetuningTask) -> dict[str, dict[str, float]] | None:
    """Read the scores of a seed; `None`, with a warning, if the main score is missing for an evaluation set."""
    if not path.is_file():
        return None
    try:
        scores = json.loads(path.read_text(encoding="utf-8"))
        if all(math.isfinite(scores[name][task.main_score]) for name in task.evaluation_sets):
            return scores
    except (ValueError, TypeError, KeyError):
        pass
    logger.warning(f"Ignored {path}: it lacks {task.main_score} for an evaluation set. The seed is trained again.")
    return None


def _train_and_score(
    task: FinetuningTask, args: FinetuningArguments, checkpoint: str | None
) -> dict[str, dict[str, float]]:
    """Train with one seed, save the model, and return its scores on each set."""
    trainer = task.make_trainer(args)
    trainer.add_callback(FewUpdatesWarning())
    add_policies(trainer)
    add_early_stopping(trainer)
    train_to_end(trainer, checkpoint)
    save_final_model(trainer)  # first, so that no error while scoring loses it
    return {
        name: {
            score.removeprefix("eval_"): value
            for score, value in trainer.evaluate(dataset).items()
            if not score.endswith(NO_SCORES)
        }
        for name, dataset in task.evaluation_sets.items()
    }


def median_best_worst(values: Collection[float], score: str) -> dict[str, float]:
    """Summarise the values of one score over several seeds.

    Args:
        values (`Collection[float]`): One value for each seed.
        score (`str`): Name of the score, which decides whether lower is better.

    Returns:
        `dict[str, float]`: `median`, `best` and `worst`.
    """
    best, worst = (min, max) if lower_is_better(score) else (max, min)
    return {"median": statistics.median(values), "best": best(values), "worst": worst(values)}


def summarise_seeds(results: SeedScores, main_score: str) -> dict[str, dict[str, float]]:
    """Return the median, the best and the worst value of one score.

    Args:
        results (`dict[str, dict[str, dict[str, float]]]`): Scores as returned by [`train_with_seeds`].
        main_score (`str`): Name of the score.

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
        summary[name] = median_best_worst([each[name][main_score] for each in results.values()], main_score)
    return summary


def seeds_report(results: SeedScores, main_score: str) -> dict[str, Any]:
    """Build the report of a fine-tuning with several seeds, for a file of results.

    Args:
        results (`dict[str, dict[str, dict[str, float]]]`): Scores as returned by [`train_with_seeds`].
        main_score (`str`): Name of the score to compare by.

    Returns:
        `dict[str, Any]`: `main_score`, `summary`, `seeds` and the `command` of this process.
    """
    return {
        "main_score": main_score,
        "summary": summarise_seeds(results, main_score),
        "seeds": results,
        "command": command_of_process(),
    }


def command_of_process() -> str:
    """Return the command that started this process, for a file of results, without the value of a Hub token.

    Returns:
        `str`: the command, quoted for a shell.
    """
    words = sys.argv
    for place, word in enumerate(sys.orig_argv):
        if Path(word).stem == "hf-vanilla":
            words = ["hf-vanilla", *sys.orig_argv[place + 1 :]]
            break
        if word == sys.argv[0]:
            words = ["python", *sys.orig_argv[place:]]
            break
    hidden = {number + 1 for number, word in enumerate(words) if HUB_TOKEN.fullmatch(word)}
    words = ["..." if number in hidden else HUB_TOKEN_VALUE.sub(r"\1=...", word) for number, word in enumerate(words)]
    return shlex.join(words)
