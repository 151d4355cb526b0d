"""Checkpoints of a run: the last ones, the best ones, and the one to resume from."""

import json
import math
import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.trainer import OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging


logger = logging.get_logger(__name__)


_EVALUATION_HINT = (
    "Only checkpoints that were evaluated when they were saved can be compared: train with validation data, "
    "--eval_strategy steps and --eval_steps equal to --save_steps; or take the last ones."
)


def last_checkpoints(run_dir: str | os.PathLike, count: int) -> list[Path]:
    """Find the last checkpoints of a run.

    Args:
        run_dir (`str`): The `output_dir` of a `Trainer`, with folders `checkpoint-<step>`.
        count (`int`): Number of checkpoints.

    Returns:
        `list[Path]`: `count` folders, by ascending step.

    Raises:
        ValueError: if `count` is below 1, or `run_dir` does not exist or has fewer checkpoints with safetensors
            weights.
    """
    return list(_checkpoints_by_step(Path(run_dir), count).values())[-count:]


def best_checkpoints(
    run_dir: str | os.PathLike, count: int, metric: str = "eval_loss", *, greater_is_better: bool | None = None
) -> list[Path]:
    """Find the best checkpoints of a run by a metric of its evaluations.

    Args:
        run_dir (`str`): The `output_dir` of a `Trainer`, with folders `checkpoint-<step>`.
        count (`int`): Number of checkpoints.
        metric (`str`, *optional*, defaults to `"eval_loss"`): Name of the metric, with or without `eval_`.
        greater_is_better (`bool`, *optional*): Whether higher values are better. The default is the rule of
            `TrainingArguments`: yes, unless the name ends in `loss`.

    Returns:
        `list[Path]`: `count` folders, by ascending step. Of two equal values, that of the later checkpoint is better.

    Raises:
        ValueError: if `count` is below 1, `run_dir` does not exist, there is no such metric, or fewer checkpoints
            have it.
    """
    checkpoints = _checkpoints_by_step(Path(run_dir), count)
    if not metric.startswith("eval_"):
        metric = f"eval_{metric}"
    if greater_is_better is None:
        greater_is_better = not metric.endswith("loss")
    state = read_json_object(list(checkpoints.values())[-1] / TRAINER_STATE_NAME)
    values = _metric_by_step(state, metric)
    measured = [step for step in checkpoints if math.isfinite(values.get(step, math.nan))]
    if len(measured) < count:
        raise ValueError(
            f"`{metric}` was measured for {len(measured)} checkpoints, fewer than `count` ({count}): of the "
            f"checkpoints at steps {sorted(checkpoints)} those at {measured}. {_EVALUATION_HINT}"
        )
    sign = 1 if greater_is_better else -1
    best = sorted(measured, key=lambda step: (sign * values[step], step))[-count:]
    return [checkpoints[step] for step in sorted(best)]


def last_complete_checkpoint(run_dir: str | os.PathLike) -> str | None:
    """Find the newest checkpoint that a run can be resumed from.

    It must have the trainer's state, which `Trainer` writes last, and the states of optimizer and schedule, which
    `save_only_model` leaves out; and no file may be truncated. Incomplete ones are skipped with a warning.

    Args:
        run_dir (`str`): The `output_dir` of a `Trainer`, with folders `checkpoint-<step>`; it need not exist.

    Returns:
        `str`: the folder, for `Trainer.train(resume_from_checkpoint=...)`; `None` if there is none.
    """
    folders = _folders_by_step(Path(run_dir)) if Path(run_dir).is_dir() else {}
    for folder in reversed(folders.values()):
        reason = _why_not_resumable(folder)
        if reason is None:
            return str(folder)
        logger.warning(f"Skipped {folder}: a run can't be resumed from it, because it has {reason}.")
    return None


def checkpoint_to_resume(run_dir: str | os.PathLike, given: str | None = None) -> str | None:
    """Find the checkpoint that a run resumes from: a given one, or else its own newest complete one.

    Args:
        run_dir (`str`): The `output_dir` of a `Trainer`.
        given (`str`, *optional*): `resume_from_checkpoint`: a checkpoint, of this or another run.

    Returns:
        `str`: the folder; `None` if none is given and there is none.

    Raises:
        ValueError: if no run can be resumed from the given one.
    """
    if given is None:
        return last_complete_checkpoint(run_dir)
    if not Path(given).is_dir():
        raise ValueError(
            f"`resume_from_checkpoint` must be the folder of a checkpoint, but there is no folder {given}."
        )
    reason = _why_not_resumable(Path(given))
    if reason is not None:
        raise ValueError(
            f"`resume_from_checkpoint` must be a complete checkpoint, but {given} has {reason}; give another."
        )
    return given


def folder_of_tokenizer(checkpoint: str | os.PathLike) -> Path:
    """Find the folder of a checkpoint's tokenizer: that of its run, or the checkpoint itself.

    Args:
        checkpoint (`str`): The checkpoint.

    Returns:
        `Path`: the folder.
    """
    run_dir = Path(checkpoint).parent
    return run_dir if (run_dir / TOKENIZER_CONFIG_FILE).is_file() else Path(checkpoint)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file of a checkpoint.

    Args:
        path (`Path`): The file.

    Returns:
        `dict[str, Any]`: its content.

    Raises:
        ValueError: if the file can't be read or holds no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"`checkpoints`: {path} can't be read: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"`checkpoints`: {path} must hold a JSON object, got {type(found).__name__}.")
    return found


def _folders_by_step(run_dir: Path) -> dict[int, Path]:
    """Return the folders `checkpoint-<step>` of a run, by ascending step."""
    matches = {path: re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name) for path in run_dir.iterdir()}
    found = {int(match.group(1)): path for path, match in matches.items() if match and path.is_dir()}
    return dict(sorted(found.items()))


def _checkpoints_by_step(run_dir: Path, count: int) -> dict[int, Path]:
    """Return the checkpoints of a run that have weights, by ascending step; at least `count` of them."""
    if not run_dir.is_dir():
        raise ValueError(f"`run_dir` ({run_dir}) must be a folder, but there is none of that name.")
    found = {}
    for step, folder in _folders_by_step(run_dir).items():
        # The trainer writes its state last: without it, the checkpoint is incomplete.
        has_weights = any((folder / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
        if has_weights and (folder / TRAINER_STATE_NAME).is_file():
            found[step] = folder
        else:
            logger.warning(f"Skipped {folder}: it has no safetensors weights or no {TRAINER_STATE_NAME}.")
    if count < 1:
        raise ValueError(f"`count` must be at least 1, got {count}.")
    if len(found) < count:
        raise ValueError(
            f"`run_dir` ({run_dir}) has {len(found)} checkpoints, fewer than `count` ({count}): steps "
            f"{sorted(found)}. Lower `count`, or keep more while training (`save_total_limit`, `save_steps`)."
        )
    return found


def _metric_by_step(state: dict[str, Any], metric: str) -> dict[int, float]:
    """Return the values of a metric in the log of a run; the last one of each step."""
    history = state.get("log_history", [])
    values = {entry["step"]: entry[metric] for entry in history if metric in entry}
    if not values:
        names = sorted({name for entry in history for name in entry if name.startswith("eval_")})
        if not names:
            raise ValueError(f"`metric` ({metric}): the run was not evaluated while training. {_EVALUATION_HINT}")
        raise ValueError(f"`metric` must be one that the run has logged, {', '.join(names)}; got {metric}.")
    return values


def _why_not_resumable(folder: Path) -> str | None:
    """Say what a checkpoint lacks for resuming a run; `None` if nothing."""
    try:
        state = read_json_object(folder / TRAINER_STATE_NAME)
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
    truncated = next((path for path in _files_to_check(folder) if not _is_complete(path)), None)
    return None if truncated is None else f"a truncated or broken {truncated.name}"


def _files_to_check(folder: Path) -> Iterable[Path]:
    """Yield the files of a checkpoint that `_is_complete` can check."""
    for pattern in ("*.safetensors", OPTIMIZER_NAME, SCHEDULER_NAME, "rng_state*.pth"):
        yield from sorted(folder.glob(pattern))


def _is_complete(path: Path) -> bool:
    """Check that a file is not truncated, without reading all: safetensors name their length, torch's are zips."""
    if path.suffix != ".safetensors":
        return zipfile.is_zipfile(path)
    try:
        with safe_open(path, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False
