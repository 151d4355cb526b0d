"""Search over the paper's grid of settings, each with several seeds, through the Trainer and optuna."""

import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging

from .arguments import LOSSES, FinetuningArguments
from .divergence import StopOnNaNCallback
from .finetuning import FinetuningTask


logger = logging.get_logger(__name__)


# Devlin et al. 2018, A.3.
PAPER_GRID: dict[str, tuple[float, ...]] = {
    "per_device_train_batch_size": (16, 32),
    "learning_rate": (5e-5, 3e-5, 2e-5),
    "num_train_epochs": (2, 3, 4),
}


def search_settings(
    task: FinetuningTask,
    args: FinetuningArguments,
    seeds: Sequence[int],
    journal: str | os.PathLike[str],
    *,
    grid: Mapping[str, Sequence[float]] = PAPER_GRID,
    study_name: str = "search",
) -> list[dict[str, Any]]:
    """Train with all settings of a grid and all seeds, and rank the settings by their median score.

    What is done is kept in a journal, so a search that was stopped goes on where it was, also if it was stopped while
    it wrote there.

    Args:
        task (`FinetuningTask`):
            What to learn; `validation` is what the settings are scored on.
        args (`FinetuningArguments`):
            All other settings.
        seeds (`Sequence[int]`):
            The seeds.
        journal (`str`):
            File of the finished trainings; made if it does not exist.
        grid (`Mapping[str, Sequence[float]]`):
            The values of each training argument.
        study_name (`str`):
            Which of the searches of the journal this is: give another name when task, model, grid or seeds are others.

    Returns:
        `list[dict[str, Any]]`: for each setting its values, `median`, `best` and `worst` score and `scores` by seed,
        best median first.

    Raises:
        ValueError: if the grid is empty or names no training argument, or there is no such score.
        ImportError: if optuna is not installed.

    Source: Devlin et al. 2018, A.3.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError('The search needs one more package: pip install "hf_vanilla[sweep]"') from error
    for name, values in grid.items():
        if not hasattr(args, name):
            raise ValueError(f"`grid` must name training arguments, but there is none called {name!r}.")
        if not values:
            raise ValueError(f"`grid` must have at least one value for {name!r}.")
    if not seeds:
        raise ValueError("`seeds` must name at least one seed.")
    choices: dict[str, list[Any]] = {**{name: list(values) for name, values in grid.items()}, "seed": list(seeds)}
    is_loss = task.main_score in LOSSES
    storage = optuna.storages.JournalStorage(_open_journal(Path(journal), is_main_process=args.should_save))
    with args.main_process_first(local=False, desc="reading the journal"):
        study = optuna.create_study(
            study_name=study_name,
            storage=storage,
            load_if_exists=True,
            direction="minimize" if is_loss else "maximize",
        )
        done = _finished(study)
        combinations = (dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))
        left = [each for each in combinations if tuple(each.items()) not in done]
        # Optuna's own grid sampler takes a training that was stopped for done, so the grid is queued here.
        waiting = study.get_trials(states=(optuna.trial.TrialState.WAITING,))
        queued = [trial.system_attrs["fixed_params"] for trial in waiting]
        for each in left:
            if each not in queued:
                study.enqueue_trial(each)
    logger.info(f"{len(left)} trainings to do, {len(done)} done.")

    def objective(scores: dict[str, float]) -> float:
        if f"eval_{task.main_score}" not in scores:
            names = ", ".join(name.removeprefix("eval_") for name in scores)
            raise ValueError(f"`main_score` must be one of {names}; got {task.main_score!r}.")
        return scores[f"eval_{task.main_score}"]

    if left:
        trainer = task.make_trainer(args)
        trainer.add_callback(StopOnNaNCallback())
        trainer.eval_dataset = task.evaluation_sets["validation"]  # whatever else it evaluates on
        trainer.hyperparameter_search(
            hp_space=lambda trial: {name: trial.suggest_categorical(name, each) for name, each in choices.items()},
            compute_objective=objective,
            n_trials=len(left),
            direction="minimize" if is_loss else "maximize",
            backend="optuna",
            storage=storage,
            study_name=study_name,
            load_if_exists=True,
        )
    return _ranking(study, is_loss)


def _open_journal(path: Path, *, is_main_process: bool) -> Any:
    """Open the journal, without a last line that was not written to its end: optuna would append to it and then fail.

    Other processes may find a line there that the main one is just writing, and leave it alone.
    """
    from optuna.storages.journal import JournalFileBackend

    content = path.read_bytes() if path.is_file() else b""
    whole = content.rfind(b"\n") + 1
    if is_main_process and whole < len(content):
        logger.warning(f"The last line of {path} is not complete, and so it is left out.")
        os.truncate(path, whole)
    return JournalFileBackend(os.fspath(path))


def _finished(study: Any) -> dict[tuple[tuple[str, float], ...], float]:
    """Return the score of each setting and seed that is done."""
    return {
        tuple(trial.params.items()): trial.value
        for trial in study.get_trials(deepcopy=False)
        if trial.state.name == "COMPLETE"
    }


def _ranking(study: Any, is_loss: bool) -> list[dict[str, Any]]:
    """Put the seeds of a setting together."""
    scores: dict[tuple[tuple[str, float], ...], dict[str, float]] = {}
    for params, score in _finished(study).items():
        setting = {name: value for name, value in params if name != "seed"}
        scores.setdefault(tuple(setting.items()), {})[str(dict(params)["seed"])] = score
    best, worst = (min, max) if is_loss else (max, min)
    ranking: list[dict[str, Any]] = [
        {
            **dict(setting),
            "median": statistics.median(each.values()),
            "best": best(each.values()),
            "worst": worst(each.values()),
            "scores": dict(sorted(each.items())),
        }
        for setting, each in scores.items()
    ]
    return sorted(ranking, key=lambda each: each["median"], reverse=not is_loss)
