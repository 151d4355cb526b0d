"""Search over the paper's grid of settings, each with several seeds, with `Trainer` and optuna."""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, set_seed
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import logging

from .arguments import FinetuningArguments
from .checkpoints import lower_is_better
from .divergence import DivergedError
from .finetuning import FinetuningTask, median_best_worst
from .policies import add_policies


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

    Finished trainings are kept in a journal, so that an interrupted search resumes, also one interrupted while it was
    writing there. No other search may use the journal at the same time. A training that diverges has the worst score.

    Args:
        task (`FinetuningTask`): What to train; `validation` is what the settings are scored on.
        args (`FinetuningArguments`): All other settings.
        seeds (`Sequence[int]`): The seeds.
        journal (`str`): File of the finished trainings, which is created if it does not exist.
        grid (`Mapping[str, Sequence[float]]`): The values of each training argument.
        study_name (`str`): Name of the search in the journal; use another one for another task, model, grid or list
            of seeds.

    Returns:
        `list[dict[str, Any]]`: for each setting its values, `median`, `best` and `worst` score and `scores` by seed,
        best median first; `None` for the score of a training that diverged.

    Raises:
        ValueError: if the grid is empty or names no training argument, there is no such score, or `args` have
            evaluations while training.
        ImportError: if optuna is not installed.

    Source: Devlin et al. 2018, A.3.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError('The search needs one more package: pip install "hf_vanilla[sweep]"') from error
    _check_grid(args, seeds, grid)
    choices: dict[str, list[Any]] = {**{name: list(values) for name, values in grid.items()}, "seed": list(seeds)}
    direction = "minimize" if lower_is_better(task.main_score) else "maximize"
    storage = optuna.storages.JournalStorage(_open_journal(Path(journal), is_main_process=args.should_save))
    shared: dict[str, Any] = {
        "storage": storage,
        "study_name": study_name,
        "direction": direction,
        "load_if_exists": True,
    }
    with args.main_process_first(local=False, desc="reading the journal"):
        study = optuna.create_study(**shared)
        remaining = _queue_remaining(study, choices)

    def setting_of(trial: Any) -> dict[str, Any]:
        return {name: trial.suggest_categorical(name, values) for name, values in choices.items()}

    worst = math.inf if direction == "minimize" else -math.inf

    def objective(scores: dict[str, float]) -> float:
        if f"eval_{task.main_score}" not in scores:
            names = ", ".join(name.removeprefix("eval_") for name in scores)
            raise ValueError(f"`main_score` must be one of {names}; got {task.main_score!r}.")
        score = scores[f"eval_{task.main_score}"]
        return worst if math.isnan(score) else score

    if remaining:
        trainer = task.make_trainer(args)
        add_policies(trainer)
        make_model = trainer.model_init

        def make_seeded_model(trial: Any) -> PreTrainedModel:
            set_seed(setting_of(trial)["seed"])  # transformers 5 does so after it made the model
            return make_model()

        trainer.model_init = make_seeded_model
        trainer.eval_dataset = task.evaluation_sets["validation"]  # settings are chosen on this set alone
        while remaining:
            try:
                trainer.hyperparameter_search(
                    hp_space=setting_of, compute_objective=objective, n_trials=remaining, backend="optuna", **shared
                )
                break
            except DivergedError as error:
                logger.warning(f"The search goes on after a training that diverged. {error}")
            with args.main_process_first(local=False, desc="recording a training that diverged"):
                if args.should_save:
                    _record_divergence(study, worst)
                remaining = _queue_remaining(study, choices)
    return _ranking(study, task.main_score)


def _check_grid(args: FinetuningArguments, seeds: Sequence[int], grid: Mapping[str, Sequence[float]]) -> None:
    """Check that there is something to train with, and that trainings are scored at their end."""
    for name, values in grid.items():
        if not hasattr(args, name):
            raise ValueError(f"`grid` must name training arguments, but there is none called {name!r}.")
        if not values:
            raise ValueError(f"`grid` must have at least one value for {name!r}.")
    strategy = IntervalStrategy(args.eval_strategy)
    if strategy != IntervalStrategy.NO:  # the last of them would be the score, and Optuna would end trainings early
        raise ValueError(
            f"`eval_strategy` must be no in a search, which scores each training at its end, got {strategy.value}; "
            "leave it out, and early stopping too."
        )
    if not seeds:
        raise ValueError("`seeds` must name at least one seed.")


def _queue_remaining(study: Any, choices: dict[str, list[Any]]) -> int:
    """Queue the trainings that are not finished, and return their number.

    Optuna's own grid sampler counts an interrupted training as finished.
    """
    from optuna.trial import TrialState

    finished = _finished(study)
    combinations = (dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))
    remaining = [each for each in combinations if tuple(each.items()) not in finished]
    waiting = study.get_trials(states=(TrialState.WAITING,))
    queued = [trial.system_attrs["fixed_params"] for trial in waiting]
    for each in remaining:
        if each not in queued:
            study.enqueue_trial(each)
    logger.info(f"{len(remaining)} trainings to do, {len(finished)} done.")
    return len(remaining)


def _record_divergence(study: Any, score: float) -> None:
    """Record the training that failed last, so that it is not tried again."""
    from optuna.trial import TrialState, create_trial

    failed = max(study.get_trials(states=(TrialState.FAIL,)), key=lambda trial: trial.datetime_complete)
    study.add_trial(create_trial(params=failed.params, distributions=failed.distributions, value=score))


def _open_journal(path: Path, *, is_main_process: bool) -> Any:
    """Open the journal, without what a killed search has left there.

    Optuna would wait for its lock, and would append to an incomplete last line and then fail. Other processes leave
    both alone, because the main one may be writing.
    """
    from optuna.storages.journal import JournalFileBackend

    path = path.absolute()  # optuna's lock is a link to this path, and it finds no age of a link that leads nowhere
    if is_main_process:
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    content = path.read_bytes() if path.is_file() else b""
    complete = content.rfind(b"\n") + 1
    if is_main_process and complete < len(content):
        logger.warning(f"Dropped the last line of {path}, which is incomplete.")
        os.truncate(path, complete)
    return JournalFileBackend(os.fspath(path))


def _finished(study: Any) -> dict[tuple[tuple[str, float], ...], float]:
    """Return the score of each finished setting and seed."""
    return {
        tuple(trial.params.items()): trial.value
        for trial in study.get_trials(deepcopy=False)
        if trial.state.name == "COMPLETE"
    }


def _ranking(study: Any, main_score: str) -> list[dict[str, Any]]:
    """Return the scores of each setting over its seeds, best median first."""
    scores: dict[tuple[tuple[str, float], ...], dict[str, float]] = {}
    for params, score in _finished(study).items():
        setting = {name: value for name, value in params if name != "seed"}
        scores.setdefault(tuple(setting.items()), {})[str(dict(params)["seed"])] = score
    figures = [
        (setting, median_best_worst(each.values(), main_score), dict(sorted(each.items())))
        for setting, each in scores.items()
    ]
    figures.sort(key=lambda each: each[1]["median"], reverse=not lower_is_better(main_score))
    return [
        {**dict(setting), **_without_infinite(summary), "scores": _without_infinite(by_seed)}
        for setting, summary, by_seed in figures
    ]


def _without_infinite(scores: Mapping[str, float]) -> dict[str, float | None]:
    """Replace the scores of trainings that diverged, which JSON does not know."""
    return {name: score if math.isfinite(score) else None for name, score in scores.items()}
