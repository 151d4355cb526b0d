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
from transformers import TrainerState
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.trainer import OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from ..data.files import read_json_object
from ..hub.folder import check_model, find_model_class
from ..models.checks import check_integer
from .manifest import MANIFEST_FILE, damage_of_files, read_manifest


logger = logging.get_logger(__name__)


# Files and folders that a checkpoint has for resuming, in addition to the trainer's state.
_TO_RESUME = re.compile(r"optimizer|rng_state|global_step")
# In the state of a trainer whose checkpoints are complete with their manifests only.
MANIFEST_MARK = "ManifestCallback"
_EVALUATION_HINT = (
    "Only checkpoints that were evaluated when they were saved can be compared: train with validation data, "
    "--eval_strategy steps and --eval_steps equal to --save_steps; or take the last ones."
)


def lower_is_better(metric: str) -> bool:
    """Whether a lower value of a metric is better.

    Args:
        metric (`str`): Its name, with or without `eval_`.

    Returns:
        `bool`: true for `mse` and names that end in `loss`, as transformers' `TrainingArguments` has it.
    """
    return metric.endswith("loss") or metric.removeprefix("eval_") == "mse"


def last_checkpoints(run_dir: str | os.PathLike, count: int, *, until: int | None = None) -> list[Path]:
    """Find the last checkpoints of a run.

    Args:
        run_dir (`str`): The `output_dir` of a `Trainer`, with folders `checkpoint-<step>`.
        count (`int`): Number of checkpoints.
        until (`int`, *optional*): Step of the last one, where the folder has later ones of an earlier attempt.

    Returns:
        `list[Path]`: `count` folders, by ascending step.

    Raises:
        ValueError: if `count` is below 1, or `run_dir` does not exist or has fewer checkpoints with safetensors
            weights.
    """
    return list(_checkpoints_by_step(Path(run_dir), count, until).values())[-count:]


def best_checkpoints(
    run_dir: str | os.PathLike, count: int, metric: str = "eval_loss", *, greater_is_better: bool | None = None
) -> list[Path]:
    """Find the best checkpoints of a run by a metric of its evaluations.

    Args:
        run_dir (`str`): The `output_dir` of a `Trainer`, with folders `checkpoint-<step>`.
        count (`int`): Number of checkpoints.
        metric (`str`, *optional*, defaults to `"eval_loss"`): Name of the metric, with or without `eval_`.
        greater_is_better (`bool`, *optional*): Whether higher values are better. By default, unless the name ends
            in `loss` or `mse`.

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
        greater_is_better = not lower_is_better(metric)
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

    One with a manifest must have all its files as they were written. One without, of an earlier version or of the
    stock trainer, must have the states of trainer, optimizer, schedule and random numbers, all tensors of its model,
    and no file that is truncated, zero, or damaged as far as that shows. Others are skipped with a warning.

    Args:
        run_dir (`str`): The `output_dir` of a `Trainer`, with folders `checkpoint-<step>`; it need not exist.

    Returns:
        `str`: the folder, for `Trainer.train(resume_from_checkpoint=...)`; `None` if there is none.
    """
    return _newest_good(run_dir)[0]


def checkpoint_to_resume(run_dir: str | os.PathLike, given: str | None = None) -> str | None:
    """Find the checkpoint that a run resumes from: a given one, or else its own newest good one.

    Args:
        run_dir (`str`): The `output_dir` of a `Trainer`.
        given (`str`, *optional*): `resume_from_checkpoint`: a checkpoint, of this or another run.

    Returns:
        `str`: the folder; `None` if none is given and there is none, or none that was finished.

    Raises:
        ValueError: if no run can be resumed from the given one; or if a checkpoint of the run is damaged and no other
            is good.
    """
    if given is None:
        found, damaged = _newest_good(run_dir)
        if found is None and damaged:
            raise ValueError(
                f"`output_dir` ({run_dir}) has no checkpoint to resume from but damaged ones: "
                f"{'; '.join(damaged)}. Restore one from a copy, or remove them to start the run anew."
            )
        return found
    if not Path(given).is_dir():
        raise ValueError(
            f"`resume_from_checkpoint` must be the folder of a checkpoint, but there is no folder {given}."
        )
    reason = why_not_resumable(given)
    if reason is not None:
        raise ValueError(
            f"`resume_from_checkpoint` must be a complete checkpoint, but {given} has {reason}; give another."
        )
    return given


def why_not_resumable(folder: str | os.PathLike) -> str | None:
    """Verify a checkpoint, by its manifest if it has one.

    Args:
        folder (`str`): The checkpoint.

    Returns:
        `str`: what it lacks for resuming a run, or what is damaged; `None` if nothing.
    """
    return _unfinished(Path(folder)) or _damage(Path(folder))


def _newest_good(run_dir: str | os.PathLike) -> tuple[str | None, list[str]]:
    """Return the newest good checkpoint of a run, and each newer one that is damaged, with the reason."""
    damaged = []
    folders = folders_by_step(Path(run_dir)) if Path(run_dir).is_dir() else {}
    for folder in reversed(folders.values()):
        reason = _unfinished(folder)
        if reason is None and (reason := _damage(folder)) is not None:
            damaged.append(f"{folder.name} has {reason}")
        if reason is None:
            return str(folder), damaged
        logger.warning(f"Skipped {folder}: a run can't be resumed from it, because it has {reason}.")
    return None, damaged


def find_best_checkpoint(state: TrainerState, run_dir: str | os.PathLike) -> str | None:
    """Find the best checkpoint that a state names, also if the folder of the run has moved since then.

    Args:
        state (`TrainerState`): The state.
        run_dir (`str`): Where the folder of its run is now.

    Returns:
        `str`: the folder; `None` if there is none.
    """
    best = state.best_model_checkpoint
    own = Path(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
    is_there = best is not None and Path(best).is_dir()
    if state.best_global_step and own.is_dir() and not (is_there and own.samefile(str(best))) and was_scheduled(own):
        return str(own)  # first: the folder's former place may be that of another run by now
    return best if is_there else None


def was_scheduled(folder: Path) -> bool:
    """Say whether a checkpoint would be there if the run had not been stopped, by its manifest.

    Args:
        folder (`Path`): The checkpoint.

    Returns:
        `bool`: whether; `True` also if no manifest tells.
    """
    try:
        return bool((read_manifest(folder) or {}).get("scheduled", True))
    except ValueError:
        return True


def folder_of_tokenizer(checkpoint: str | os.PathLike) -> Path:
    """Find the folder of a checkpoint's tokenizer: that of its run, or the checkpoint itself.

    Args:
        checkpoint (`str`): The checkpoint.

    Returns:
        `Path`: the folder.
    """
    run_dir = Path(checkpoint).parent
    return run_dir if (run_dir / TOKENIZER_CONFIG_FILE).is_file() else Path(checkpoint)


def folders_by_step(run_dir: Path) -> dict[int, Path]:
    """Find the folders `checkpoint-<step>` of a run.

    Args:
        run_dir (`Path`): The `output_dir` of a `Trainer`.

    Returns:
        `dict[int, Path]`: the folders by ascending step.
    """
    matches = {path: re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name) for path in run_dir.iterdir()}
    found = {int(match.group(1)): path for path, match in matches.items() if match and path.is_dir()}
    return dict(sorted(found.items()))


def _checkpoints_by_step(run_dir: Path, count: int, until: int | None = None) -> dict[int, Path]:
    """Return the checkpoints of a run that have weights, by ascending step; at least `count` of them."""
    if not run_dir.is_dir():
        raise ValueError(f"`run_dir` ({run_dir}) must be a folder, but there is none of that name.")
    found = {}
    for step, folder in folders_by_step(run_dir).items():
        if until is not None and step > until:
            continue
        # The trainer writes its state last: without it, the checkpoint is incomplete.
        has_weights = any((folder / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
        if has_weights and (folder / TRAINER_STATE_NAME).is_file():
            found[step] = folder
        else:
            logger.warning(f"Skipped {folder}: it has no safetensors weights or no {TRAINER_STATE_NAME}.")
    check_integer("count", count)
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


def _unfinished(folder: Path) -> str | None:
    """Say what a checkpoint lacks that was killed while it was saved, or was never meant for resuming."""
    if (folder / MANIFEST_FILE).exists():
        try:
            names = set((read_manifest(folder) or {"files": ()})["files"])
        except ValueError:
            return None
        return None if any(map(_TO_RESUME.match, names)) else "no state of the optimizer"
    if not (folder / TRAINER_STATE_NAME).exists():  # the trainer writes it last
        return f"no {TRAINER_STATE_NAME}"
    if not any(_TO_RESUME.match(path.name) for path in folder.iterdir()):
        return "no state of the optimizer"
    try:
        marks = read_json_object(folder / TRAINER_STATE_NAME).get("stateful_callbacks") or {}
    except ValueError:
        return None
    return f"no {MANIFEST_FILE}, which is written last" if MANIFEST_MARK in marks else None


def _damage(folder: Path) -> str | None:
    """Say what is damaged in a checkpoint: by its manifest, or else as far as its files show it."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error)
    if manifest is not None:
        return damage_of_files(folder, manifest)
    try:
        state = read_json_object(folder / TRAINER_STATE_NAME)
    except ValueError:
        return f"no readable {TRAINER_STATE_NAME}"
    if not isinstance(state.get("global_step"), int):
        return f"no step in its {TRAINER_STATE_NAME}"
    # DeepSpeed keeps the optimizer, and its own schedules too, in a folder of its own.
    is_deepspeed = any(folder.glob("global_step*"))
    has_optimizer_file = any((folder / name).is_file() for name in (OPTIMIZER_NAME, OPTIMIZER_NAME_BIN))
    if not is_deepspeed and not has_optimizer_file and not any(path.is_dir() for path in folder.glob("optimizer*")):
        return "no state of the optimizer"
    if not is_deepspeed and not (folder / SCHEDULER_NAME).is_file():
        return f"no {SCHEDULER_NAME}"
    random_states = {path.name for path in folder.glob("rng_state*.pth")}
    numbered = {f"rng_state_{number}.pth" for number in range(max(1, len(random_states)))}
    if random_states not in ({"rng_state.pth"}, numbered):
        return f"no {min(numbered - random_states) if random_states else 'rng_state.pth'}"
    broken = next((path for path in _files_to_check(folder) if not _is_complete(path)), None)
    if broken is not None:
        return f"a truncated or broken {broken.name}"
    return None if is_deepspeed else _damage_of_weights(folder)


def _files_to_check(folder: Path) -> Iterable[Path]:
    """Yield the files of a checkpoint that `_is_complete` can check."""
    for pattern in ("*.json", "*.safetensors", OPTIMIZER_NAME, SCHEDULER_NAME, "rng_state*.pth"):
        yield from sorted(folder.glob(pattern))


def _is_complete(path: Path) -> bool:
    """Check that a file is not damaged: safetensors name their length, torch's are zips with checksums."""
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8")) is not None
        if path.suffix != ".safetensors":
            with zipfile.ZipFile(path) as archive:
                return archive.testzip() is None
        with safe_open(path, framework="pt"):
            return True
    except (SafetensorError, OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


def _damage_of_weights(folder: Path) -> str | None:
    """Say which weights of a model are missing or all zero; adapters and models of other code are not checked."""
    paths = sorted(folder.glob("model*.safetensors"))
    for path in paths:
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no dictionary
                tensor = weights.get_tensor(name)
                if tensor.ndim > 1 and tensor.is_floating_point() and not tensor.any():
                    return f"a {path.name} with nothing but zeros in `{name}`"
    model_class = find_model_class(folder) if (folder / CONFIG_NAME).exists() else None
    if model_class is None or any(folder.glob("pytorch_model*")):  # FSDP, and pickled weights
        return None
    if not paths:
        return f"no {SAFE_WEIGHTS_NAME}"
    try:
        check_model(folder, model_class)
    except (ValueError, OSError) as error:
        return f"weights that do not load: {error}"
    return None
