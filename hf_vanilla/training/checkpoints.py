"""Averages of checkpoints: the paper's models are the mean of the last 5 (base) or 20 (big) checkpoints of a run."""

import json
import math
import os
import re
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.trainer import OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging


logger = logging.get_logger(__name__)


SAVING_FOLDER = "_saving"  # of a run, while its final model is written


_TO_CHOOSE_THE_BEST = (
    "The best can be chosen among checkpoints that were evaluated when they were saved: train with validation data, "
    "--eval_strategy steps and --eval_steps equal to --save_steps; or take the last ones."
)


def last_checkpoints(run_dir: str | os.PathLike, count: int) -> list[Path]:
    """Find the last checkpoints of a run.

    Args:
        run_dir (`str`):
            The `output_dir` of a `Trainer`, with folders `checkpoint-<step>`.
        count (`int`):
            How many.

    Returns:
        `list[Path]`: `count` folders in order of their steps.

    Raises:
        ValueError: if `count` is below 1, or `run_dir` does not exist or holds fewer checkpoints with safetensors
            weights.
    """
    checkpoints = _checkpoints_by_step(Path(run_dir))
    _check_enough(count, len(checkpoints), f"`run_dir` ({run_dir}) holds", checkpoints)
    return list(checkpoints.values())[-count:]


def best_checkpoints(
    run_dir: str | os.PathLike, count: int, metric: str = "eval_loss", *, greater_is_better: bool | None = None
) -> list[Path]:
    """Find the checkpoints of a run that its evaluations found best.

    Args:
        run_dir (`str`):
            The `output_dir` of a `Trainer`, with folders `checkpoint-<step>`.
        count (`int`):
            How many.
        metric (`str`, *optional*, defaults to `"eval_loss"`):
            Name of the metric, with or without `eval_`.
        greater_is_better (`bool`, *optional*):
            Whether more is better. The default is the rule of `TrainingArguments`: yes, unless the name ends in
            `loss`.

    Returns:
        `list[Path]`: `count` folders in order of their steps. Of two equally good ones the later counts as better.

    Raises:
        ValueError: if `count` is below 1, `run_dir` does not exist, there is no such metric, or fewer checkpoints
            have it.
    """
    checkpoints = _checkpoints_by_step(Path(run_dir))
    _check_enough(count, len(checkpoints), f"`run_dir` ({run_dir}) holds", checkpoints)
    if not metric.startswith("eval_"):
        metric = f"eval_{metric}"
    if greater_is_better is None:
        greater_is_better = not metric.endswith("loss")
    state = _read_json(list(checkpoints.values())[-1] / TRAINER_STATE_NAME)
    values = _metric_by_step(state, metric)
    measured = [step for step in checkpoints if math.isfinite(values.get(step, math.nan))]
    if len(measured) < count:
        raise ValueError(
            f"`{metric}` was measured for {len(measured)} checkpoints, fewer than `count` ({count}): of the "
            f"checkpoints at steps {sorted(checkpoints)} those at {measured}. {_TO_CHOOSE_THE_BEST}"
        )
    sign = 1 if greater_is_better else -1
    best = sorted(measured, key=lambda step: (sign * values[step], step))[-count:]
    return [checkpoints[step] for step in sorted(best)]


def last_complete_checkpoint(run_dir: str | os.PathLike) -> str | None:
    """Find the newest checkpoint from which a run can be resumed.

    It must have the state of the run, which `Trainer` writes last, and so not where the writing was cut off, and the
    state of the optimizer and of the schedule, which `save_only_model` leaves out, and none of its files may be cut
    off. What is newer is passed over with a warning.

    Args:
        run_dir (`str`):
            The `output_dir` of a `Trainer`, with folders `checkpoint-<step>`, or a folder that does not exist.

    Returns:
        `str`: the folder, for `Trainer.train(resume_from_checkpoint=...)`; `None` if there is none.
    """
    folders = _folders_by_step(Path(run_dir)) if Path(run_dir).is_dir() else {}
    for folder in reversed(folders.values()):
        trouble = _trouble_for_resuming(folder)
        if trouble is None:
            return str(folder)
        logger.warning(f"Passed over {folder}: no run can be resumed from it, because it has {trouble}.")
    return None


def checkpoint_to_resume(run_dir: str | os.PathLike, given: str | None = None) -> str | None:
    """Find the checkpoint that a run goes on from: the one that is named, or else its own newest complete one.

    Args:
        run_dir (`str`):
            The `output_dir` of a `Trainer`.
        given (`str`, *optional*):
            `resume_from_checkpoint`: a checkpoint, also one of another run.

    Returns:
        `str`: the folder, or `None` if none is named and there is none.

    Raises:
        ValueError: if no run can be resumed from the one that is named.
    """
    if given is None:
        return last_complete_checkpoint(run_dir)
    if not Path(given).is_dir():
        raise ValueError(f"`resume_from_checkpoint` must name the folder of a checkpoint, but {given} is none.")
    trouble = _trouble_for_resuming(Path(given))
    if trouble is not None:
        raise ValueError(f"`resume_from_checkpoint` ({given}) can't be resumed from: it has {trouble}; name another.")
    return given


def folder_of_tokenizer(checkpoint: str | os.PathLike) -> Path:
    """Find the tokenizer of a checkpoint: in the folder of its run, or in the checkpoint where that stands alone.

    Args:
        checkpoint (`str`):
            The checkpoint.

    Returns:
        `Path`: the folder.
    """
    run_dir = Path(checkpoint).parent
    return run_dir if (run_dir / TOKENIZER_CONFIG_FILE).is_file() else Path(checkpoint)


def _as_folders(checkpoints: Any) -> list[Path]:
    """Return the checkpoints as paths; one string would otherwise be taken for a list of letters."""
    if isinstance(checkpoints, str | os.PathLike):
        raise TypeError(f"`checkpoints` must be a list of folders, got one folder ({checkpoints}); put it in a list.")
    return [Path(checkpoint) for checkpoint in checkpoints]


def _temporary_folder_beside(target: Path) -> Path:
    """Make a folder on the file system of `target`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ValueError(f"`output_dir` ({target}) can't be written: {error.strerror}.") from error
    # `mkdtemp` shuts out all others, which is not what a folder of a model should do.
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    return folder


def _put_in_place(folder: Path, target: Path) -> None:
    """Move `folder` to `target`, and away with what is there."""
    if not target.exists():
        os.replace(folder, target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    os.replace(target, old / target.name)
    try:
        os.replace(folder, target)
    except OSError:
        os.replace(old / target.name, target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _folders_by_step(run_dir: Path) -> dict[int, Path]:
    """Return the folders `checkpoint-<step>` of a run, by ascending step."""
    matches = {path: re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name) for path in run_dir.iterdir()}
    found = {int(match.group(1)): path for path, match in matches.items() if match and path.is_dir()}
    return dict(sorted(found.items()))


def _trouble_for_resuming(folder: Path) -> str | None:
    """Return what keeps a run from being resumed from `folder`, or `None`."""
    try:
        state = _read_json(folder / TRAINER_STATE_NAME)
    except ValueError:
        return f"no readable {TRAINER_STATE_NAME}"
    if not isinstance(state.get("global_step"), int):
        return f"no step in its {TRAINER_STATE_NAME}"
    # DeepSpeed keeps the optimizer, and its own schedules too, in a folder of this name.
    if any(folder.glob("global_step*")):
        return None
    has_optimizer_file = any((folder / name).is_file() for name in (OPTIMIZER_NAME, OPTIMIZER_NAME_BIN))
    if not has_optimizer_file and not any(path.is_dir() for path in folder.glob("optimizer*")):
        return "no state of the optimizer"
    if not (folder / SCHEDULER_NAME).is_file():
        return f"no {SCHEDULER_NAME}"
    broken = next((path for path in _files_to_check(folder) if not _is_whole(path)), None)
    return None if broken is None else f"a cut-off or broken {broken.name}"


def _files_to_check(folder: Path) -> list[Path]:
    """Return the files of a checkpoint of which it can be told without reading them whether they are whole."""
    patterns = ("*.safetensors", OPTIMIZER_NAME, SCHEDULER_NAME, "rng_state*.pth")
    return [path for pattern in patterns for path in sorted(folder.glob(pattern))]


def _is_whole(path: Path) -> bool:
    """Tell whether a file has its end: safetensors files say how long they are, and torch's are zip archives."""
    if path.suffix != ".safetensors":
        return zipfile.is_zipfile(path)
    try:
        with safe_open(path, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False


def _move_files(source: Path, folder: Path) -> None:
    """Move all files of `source`; of weights that are in other files now, the old ones go."""
    moved = [path.relative_to(source) for path in sorted(source.rglob("*")) if path.is_file()]
    moved.sort(key=lambda name: name.suffix == ".safetensors")  # weights last: with them the model is complete
    for name in moved:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, folder / name)
    for path in folder.glob("model*.safetensors*"):
        if path.relative_to(folder) not in moved:
            path.unlink()


def _checkpoints_by_step(run_dir: Path) -> dict[int, Path]:
    """Return the checkpoints of a run that have weights, by ascending step."""
    if not run_dir.is_dir():
        raise ValueError(f"`run_dir` ({run_dir}) is no folder.")
    found = {}
    for step, folder in _folders_by_step(run_dir).items():
        # The trainer writes its state last: without it, the checkpoint was not finished.
        has_weights = any((folder / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
        if has_weights and (folder / TRAINER_STATE_NAME).is_file():
            found[step] = folder
        else:
            logger.warning(f"Left out {folder}: it has no safetensors weights or no {TRAINER_STATE_NAME}.")
    return found


def _check_enough(count: int, available: int, subject: str, steps: Any) -> None:
    """Check that there are `count` checkpoints."""
    if count < 1:
        raise ValueError(f"`count` must be at least 1, got {count}.")
    if available < count:
        raise ValueError(
            f"{subject} {available} checkpoints, fewer than `count` ({count}): steps {sorted(steps)}. Ask for fewer, "
            "or keep more while training (`save_total_limit`, `save_steps`)."
        )


def _metric_by_step(state: dict[str, Any], metric: str) -> dict[int, float]:
    """Return the values of one metric in a log; of two at one step, the later."""
    history = state.get("log_history", [])
    values = {entry["step"]: entry[metric] for entry in history if metric in entry}
    if not values:
        names = sorted({name for entry in history for name in entry if name.startswith("eval_")})
        if not names:
            raise ValueError(f"`metric` ({metric}): the run was not evaluated on its way. {_TO_CHOOSE_THE_BEST}")
        raise ValueError(f"`metric` must be one that the run has logged, {', '.join(names)}; got {metric}.")
    return values


def _read_json(path: Path) -> dict[str, Any]:
    """Read one JSON file of a checkpoint."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"`checkpoints`: {path} can't be read: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"`checkpoints`: {path} must hold a JSON object, got {type(found).__name__}.")
    return found
