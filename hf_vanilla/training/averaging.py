"""Averages of checkpoints: the paper's models are the mean of the last 5 (base) or 20 (big) checkpoints of a run."""

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME, logging

from ..data.files import read_json_object
from ..hub.folder import is_training_state
from .manifest import damage_of_files, read_manifest


logger = logging.get_logger(__name__)


_WEIGHT_FILES = re.compile(r".*\.safetensors(\.index\.json)?|pytorch_model.*\.bin(\.index\.json)?")


def average_checkpoints(
    checkpoints: Sequence[str | os.PathLike], output_dir: str | os.PathLike, *, overwrite: bool = False
) -> Path:
    """Write the mean of the weights of several checkpoints of one model as a new checkpoint.

    Sums are kept in float64, and the mean is stored in the dtype of the checkpoints. Integer tensors must be equal.
    Config, generation config, tokenizer and every other file of the model are copied from the last checkpoint; the
    state of the training (optimizer, schedule, random numbers) is not. The folder appears when it is complete.

    Args:
        checkpoints (`Sequence[str]`): Folders with `model.safetensors`, or with shards and their index.
        output_dir (`str`): The folder to write, or a link to it.
        overwrite (`bool`, *optional*, defaults to `False`): Whether to replace a model in `output_dir`.

    Returns:
        `Path`: `output_dir`.

    Raises:
        TypeError: if `checkpoints` is one folder instead of a list.
        ValueError: if there are no checkpoints, one is given twice, one has no safetensors weights, or ones that are
            broken or other than its manifest says, their configs, tensors, shapes or dtypes differ, a weight is nan or
            infinite, or `output_dir` is one of the checkpoints or contains one, is not empty (with `overwrite`:
            contains something else than a model), or can't be written.

    Source: Vaswani et al. 2017, 6.1.
    """
    folders = _as_paths(checkpoints)
    target = Path(output_dir)
    _check_folders(folders, target)
    _check_target(target, overwrite)
    _check_undamaged(folders)
    weights = [_Weights(folder) for folder in folders]
    _check_configs(folders)
    _check_tensors(weights)
    place = target.resolve() if target.is_symlink() else target
    temporary = _make_temporary_folder(place)
    try:
        _write_average(weights, temporary)
        _copy_other_files(folders[-1], temporary)
        _replace_folder(place, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    logger.info(f"Averaged {len(folders)} checkpoints into {target}: {', '.join(str(folder) for folder in folders)}")
    return target


class _Weights:
    """The tensors of one checkpoint, in one safetensors file or in shards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        if index.is_file():
            weight_map = read_json_object(index, "checkpoints").get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"`checkpoints`: {index} must have a `weight_map`; save the model again.")
            self.file_of = weight_map
        elif (folder / SAFE_WEIGHTS_NAME).is_file():
            with self._open(SAFE_WEIGHTS_NAME) as file:
                self.file_of = dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
        else:
            hint = "give folders that `save_pretrained` wrote"
            if (folder / WEIGHTS_NAME).is_file():
                hint = f"load its {WEIGHTS_NAME} with `from_pretrained` and save it again"
            raise ValueError(f"`checkpoints`: {folder} has no {SAFE_WEIGHTS_NAME}; {hint}.")
        self.names = sorted(self.file_of)

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"`checkpoints`: {self.folder / file} can't be read: {error}.") from error

    def shapes_and_dtypes(self) -> dict[str, tuple[list[int], str]]:
        """Return shape and dtype of each tensor without reading it."""
        found = {}
        for file_name in sorted(set(self.file_of.values())):
            with self._open(file_name) as file:
                for name in file.keys():  # noqa: SIM118 (a safetensors file is no dict)
                    tensor = file.get_slice(name)
                    found[name] = (tensor.get_shape(), tensor.get_dtype())
        missing = sorted(set(self.file_of) - set(found))
        if missing:
            raise ValueError(
                f"`checkpoints`: the index of {self.folder} lists `{missing[0]}`, which is in none of its files."
            )
        return found

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        with self._open(self.file_of[name]) as file:
            return file.get_tensor(name)


def _as_paths(checkpoints: Any) -> list[Path]:
    """Return the checkpoints as paths; a single string would be iterated letter by letter."""
    if isinstance(checkpoints, str | os.PathLike):
        raise TypeError(f"`checkpoints` must be a list of folders, got one folder ({checkpoints}); put it in a list.")
    return [Path(checkpoint) for checkpoint in checkpoints]


def _check_undamaged(folders: list[Path]) -> None:
    """Compare the weights of the checkpoints that have a manifest with it."""
    for folder in folders:
        manifest = read_manifest(folder) or {"files": {}}
        files = {name: facts for name, facts in manifest["files"].items() if _WEIGHT_FILES.fullmatch(name)}
        damage = damage_of_files(folder, {"files": files})
        if damage is not None:
            raise ValueError(f"`checkpoints`: {folder} has {damage}; leave it out, or take others.")


def _check_folders(folders: list[Path], target: Path) -> None:
    """Check that the checkpoints exist, differ, and are not in `target`."""
    if not folders:
        raise ValueError("`checkpoints` must name at least one folder, got none.")
    resolved = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, resolved, strict=True):
        if not folder.is_dir():
            raise ValueError(f"`checkpoints` must be folders, but there is no folder {folder}.")
        if resolved.count(path) > 1:
            raise ValueError(f"`checkpoints` must differ, but {folder} is given {resolved.count(path)} times.")
        if path.is_relative_to(target.resolve()):
            raise ValueError(
                f"`output_dir` ({target}) must not be one of `checkpoints` or contain one, but it is or contains "
                f"{folder}; give another folder."
            )


def _check_target(target: Path, overwrite: bool) -> None:
    """Check that the average replaces nothing but a model, and that only with `overwrite`."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"`output_dir` ({target}) must be a folder, but it is a file.")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"`output_dir` ({target}) must be empty; give another folder, or `overwrite` to replace it.")
    if not (target / CONFIG_NAME).is_file():
        raise ValueError(
            f"`output_dir` ({target}) must contain a model to be overwritten, but it has no {CONFIG_NAME}; give "
            "another folder."
        )
    if any(target.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
        raise ValueError(f"`output_dir` ({target}) must not be the folder of a run, with checkpoints in it.")


def _check_configs(folders: list[Path]) -> None:
    """Check that all checkpoints have the same config."""
    configs = [read_json_object(folder / CONFIG_NAME, "checkpoints") for folder in folders]
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
    expected = last.shapes_and_dtypes()
    for other in weights[:-1]:
        found = other.shapes_and_dtypes()
        if set(found) != set(expected):
            odd = sorted(set(found) ^ set(expected))
            raise ValueError(
                f"`checkpoints` must have the same tensors, but {len(odd)} are only in one of {other.folder} and "
                f"{last.folder}: {', '.join(odd[:5])}."
            )
        for name, (shape, dtype) in found.items():
            if (shape, dtype) != expected[name]:
                raise ValueError(
                    f"`checkpoints` must have tensors of the same shape and dtype, but `{name}` is {dtype} {shape} "
                    f"in {other.folder} and {expected[name][1]} {expected[name][0]} in {last.folder}."
                )


def _average(name: str, weights: list[_Weights]) -> torch.Tensor:
    """Return the mean of one tensor, or an integer tensor itself."""
    first = weights[0].tensor(name)
    if not first.is_floating_point():
        for other in weights[1:]:
            if not torch.equal(first, other.tensor(name)):
                raise ValueError(
                    f"`checkpoints` must have equal integer tensors, but `{name}` ({first.dtype}) differs between "
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
    """Write the mean of all tensors into `folder`, file by file, with the shards of the last checkpoint."""
    last = weights[-1]
    for file_name in sorted(set(last.file_of.values())):
        names = [name for name in last.names if last.file_of[name] == file_name]
        save_file({name: _average(name, weights) for name in names}, folder / file_name, metadata={"format": "pt"})
    index = last.folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        shutil.copy2(index, folder)


def _copy_other_files(source: Path, folder: Path) -> None:
    """Copy the files of a model but for its weights and the state of its training."""
    for path in sorted(source.iterdir()):
        # The average has weights of its own, and no state or arguments of a training.
        if _WEIGHT_FILES.fullmatch(path.name) or is_training_state(path.name) or path.name == TRAINING_ARGS_NAME:
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copy2(path, folder)


def _make_temporary_folder(target: Path) -> Path:
    """Make a folder in the parent of `target`, and so on the same file system."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ValueError(f"`output_dir` ({target}) can't be written: {error.strerror}.") from error
    # `mkdtemp` gives other users no access; a model's folder gets the permissions of any new folder.
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    return folder


def _replace_folder(target: Path, folder: Path) -> None:
    """Move `folder` to `target`, and remove what was there."""
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
