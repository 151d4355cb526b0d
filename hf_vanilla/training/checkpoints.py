"""Averages of checkpoints: the paper's models are the mean of the last 5 (base) or 20 (big) checkpoints of a run."""

import json
import math
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import Trainer
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.trainer import OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME, logging

from .divergence import check_finite_weights
from .hub_pushes import PatientPushes


logger = logging.get_logger(__name__)

# Weights, which the average replaces, and the state of a moment of training, which fits none of the averaged weights.
SAVING_FOLDER = "_saving"  # of a run, while its final model is written
LEFT_OUT_FILES = re.compile(
    r".*\.safetensors(\.index\.json)?"
    r"|pytorch_model.*\.bin(\.index\.json)?"
    r"|(optimizer|scheduler|scaler|rng_state).*\.(pt|pth|bin)"
    r"|trainer_state\.json|training_args\.bin"
    r"|latest|zero_to_fp32\.py|(global_step|optimizer_|pytorch_model_fsdp_)\d+"  # DeepSpeed, FSDP
)

_TO_CHOOSE_THE_BEST = (
    "The best can be chosen among checkpoints that were evaluated when they were saved: train with validation data, "
    "--eval_strategy steps and --eval_steps equal to --save_steps; or take the last ones."
)


def average_checkpoints(
    checkpoints: Sequence[str | os.PathLike], output_dir: str | os.PathLike, *, overwrite: bool = False
) -> Path:
    """Write the mean of the weights of several checkpoints of one model as a new checkpoint.

    Sums are kept in float64 and stored in the dtype of the checkpoints. Tensors that are not of floating point must be
    equal. Config, generation config, tokenizer and every other file of the model come from the last checkpoint; the
    state of the training (optimiser, schedule, random numbers) is left out. The folder appears whole or not at all.

    Args:
        checkpoints (`Sequence[str]`):
            Folders with `model.safetensors`, or with shards and their index.
        output_dir (`str`):
            The folder to write.
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether to replace `output_dir` if there is a model in it.

    Returns:
        `Path`: `output_dir`.

    Raises:
        TypeError: if `checkpoints` is one folder instead of several.
        ValueError: if there are no checkpoints, one is given twice, one has no safetensors weights or broken ones,
            their configs, tensors, shapes or dtypes differ, a weight is nan or infinite, or `output_dir` is one of the
            checkpoints or holds one, is not empty (with `overwrite`: holds something else than a model), or can't be
            written.

    Source: Vaswani et al. 2017, 6.1.
    """
    folders = _as_folders(checkpoints)
    target = Path(output_dir)
    _check_folders(folders, target, overwrite)
    weights = [_Weights(folder) for folder in folders]
    _check_configs(folders)
    _check_tensors(weights)
    temporary = _temporary_folder_beside(target)
    try:
        _write_average(weights, temporary)
        _copy_model_files(folders[-1], temporary)
        _put_in_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    logger.info(f"Averaged {len(folders)} checkpoints into {target}: {', '.join(str(folder) for folder in folders)}")
    return target


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


def save_final_model(trainer: Trainer) -> None:
    """Save model, tokenizer and state in the folder of the run, and push it if that is asked for.

    They are written to a folder in it, and then moved file by file, so that an error on the way leaves what was there
    whole.

    Args:
        trainer (`Trainer`):
            The trainer; all processes must call this.

    Raises:
        ValueError: if a weight is nan or infinite; nothing is written then.
    """
    check_finite_weights(trainer.model, trainer.state.global_step)
    folder = Path(str(trainer.args.output_dir))
    temporary = folder / SAVING_FOLDER
    if trainer.args.should_save:
        shutil.rmtree(temporary, ignore_errors=True)
    try:
        trainer.save_model(str(temporary), _internal_call=True)  # not yet to the Hub
        if trainer.args.should_save:
            _move_files(temporary, folder)
    finally:
        if trainer.args.should_save:
            shutil.rmtree(temporary, ignore_errors=True)
    trainer.save_state()
    if not trainer.args.push_to_hub:
        return
    if isinstance(trainer, PatientPushes):
        trainer.push_folder("Model save")
    else:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


@contextmanager
def told_how_to_go_on(run_dir: str | os.PathLike) -> Iterator[None]:
    """Add to a Ctrl-C in this block how the run can be gone on with.

    Args:
        run_dir (`str`):
            The `output_dir` of a `Trainer`.

    Yields:
        Nothing: the block trains.

    Raises:
        KeyboardInterrupt: the one of the block, with a note.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        checkpoint = last_complete_checkpoint(run_dir)
        interrupt.add_note(
            f"The same command again goes on from {checkpoint}."
            if checkpoint is not None
            else "There is no checkpoint yet (--save_steps), so the same command begins anew."
        )
        raise


class _Weights:
    """The tensors of one checkpoint, in one safetensors file or in several."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        if index.is_file():
            self.file_of = dict(_read_json(index)["weight_map"])
        elif (folder / SAFE_WEIGHTS_NAME).is_file():
            with self._open(SAFE_WEIGHTS_NAME) as file:
                self.file_of = dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
        else:
            hint = "give folders of the kind that `save_pretrained` writes"
            if (folder / WEIGHTS_NAME).is_file():
                hint = f"load its {WEIGHTS_NAME} with `from_pretrained` and save it again"
            raise ValueError(f"`checkpoints`: {folder} has no {SAFE_WEIGHTS_NAME}; {hint}.")
        self.names = sorted(self.file_of)

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"`checkpoints`: {self.folder / file} can't be read: {error}.") from error

    def forms(self) -> dict[str, tuple[list[int], str]]:
        """Return shape and dtype of each tensor without reading it."""
        forms = {}
        for file_name in sorted(set(self.file_of.values())):
            with self._open(file_name) as file:
                for name in file.keys():  # noqa: SIM118 (a safetensors file is no dict)
                    tensor = file.get_slice(name)
                    forms[name] = (tensor.get_shape(), tensor.get_dtype())
        missing = sorted(set(self.file_of) - set(forms))
        if missing:
            raise ValueError(f"`checkpoints`: the index of {self.folder} names `{missing[0]}`, which no file holds.")
        return forms

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        with self._open(self.file_of[name]) as file:
            return file.get_tensor(name)


def _as_folders(checkpoints: Any) -> list[Path]:
    """Return the checkpoints as paths; one string would otherwise be taken for a list of letters."""
    if isinstance(checkpoints, str | os.PathLike):
        raise TypeError(f"`checkpoints` must be a list of folders, got one folder ({checkpoints}); put it in a list.")
    return [Path(checkpoint) for checkpoint in checkpoints]


def _check_folders(folders: list[Path], target: Path, overwrite: bool) -> None:
    """Check what can be known from names alone."""
    if not folders:
        raise ValueError("`checkpoints` must name at least one folder, got none.")
    resolved = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, resolved, strict=True):
        if not folder.is_dir():
            raise ValueError(f"`checkpoints`: {folder} is no folder.")
        if resolved.count(path) > 1:
            raise ValueError(f"`checkpoints` must differ, {folder} is given {resolved.count(path)} times.")
        if path.is_relative_to(target.resolve()):
            raise ValueError(
                f"`output_dir` ({target}) must not be one of `checkpoints` or hold one, but it is or holds {folder}; "
                "choose a folder of its own."
            )
    _check_target(target, overwrite)


def _check_target(target: Path, overwrite: bool) -> None:
    """Check that nothing is lost where the average is going to be."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"`output_dir` ({target}) must be a folder, there is a file of that name.")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"`output_dir` ({target}) is not empty; choose another, or allow it with `overwrite`.")
    if not (target / CONFIG_NAME).is_file():
        raise ValueError(
            f"`output_dir` ({target}) must hold a model to be overwritten, but it has no {CONFIG_NAME}; choose "
            "another."
        )
    if any(target.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
        raise ValueError(f"`output_dir` ({target}) must not be the folder of a run, with checkpoints in it.")


def _check_configs(folders: list[Path]) -> None:
    """Check that all checkpoints are of one model."""
    configs = [_read_json(folder / CONFIG_NAME) for folder in folders]
    for folder, config in zip(folders, configs, strict=True):
        names = sorted(set(config) | set(configs[-1]))
        differing = [name for name in names if config.get(name) != configs[-1].get(name)]
        differing = [name for name in differing if name not in ("transformers_version", "_name_or_path")]
        if differing:
            name = differing[0]
            raise ValueError(
                f"`checkpoints` must have one config, but `{name}` is {config.get(name)!r} in {folder} and "
                f"{configs[-1].get(name)!r} in {folders[-1]} ({len(differing)} differences: {', '.join(differing)})."
            )


def _check_tensors(weights: list[_Weights]) -> None:
    """Check that all checkpoints have the same tensors, of the same shapes and dtypes."""
    last = weights[-1]
    expected = last.forms()
    for other in weights[:-1]:
        forms = other.forms()
        if set(forms) != set(expected):
            odd = sorted(set(forms) ^ set(expected))
            raise ValueError(
                f"`checkpoints` must have the same tensors, but {len(odd)} are only in one of {other.folder} and "
                f"{last.folder}: {', '.join(odd[:5])}."
            )
        for name, form in forms.items():
            if form != expected[name]:
                raise ValueError(
                    f"`checkpoints` must have tensors of the same shape and dtype, but `{name}` is {form[1]} "
                    f"{form[0]} in {other.folder} and {expected[name][1]} {expected[name][0]} in {last.folder}."
                )


def _average(name: str, weights: list[_Weights]) -> torch.Tensor:
    """Return the mean of one tensor, or the tensor itself where it holds integers."""
    first = weights[0].tensor(name)
    if not first.is_floating_point():
        for other in weights[1:]:
            if not torch.equal(first, other.tensor(name)):
                raise ValueError(
                    f"`checkpoints`: `{name}` holds {first.dtype} and has no mean, but it differs between "
                    f"{weights[0].folder} and {other.folder}."
                )
        return first
    total = first.to(torch.float64)
    for other in weights[1:]:
        total += other.tensor(name)
    mean = (total / len(weights)).to(first.dtype)
    if not torch.isfinite(mean).all():
        raise ValueError(
            f"`checkpoints`: `{name}` is nan or infinite in {_first_not_finite(name, weights)}; leave that one out."
        )
    return mean


def _first_not_finite(name: str, weights: list[_Weights]) -> Path:
    """Return the folder of the first checkpoint in which a tensor is not finite."""
    broken = [each.folder for each in weights if not torch.isfinite(each.tensor(name)).all()]
    return broken[0] if broken else weights[-1].folder


def _write_average(weights: list[_Weights], folder: Path) -> None:
    """Write the mean of all tensors into `folder`, in the same files as the last checkpoint, one after the other."""
    last = weights[-1]
    for file_name in sorted(set(last.file_of.values())):
        names = [name for name in last.names if last.file_of[name] == file_name]
        save_file({name: _average(name, weights) for name in names}, folder / file_name, metadata={"format": "pt"})
    index = last.folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        shutil.copy2(index, folder)


def _copy_model_files(source: Path, folder: Path) -> None:
    """Copy what belongs to the model and not to the weights or the training."""
    for path in sorted(source.iterdir()):
        if LEFT_OUT_FILES.fullmatch(path.name):
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copy2(path, folder)


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
