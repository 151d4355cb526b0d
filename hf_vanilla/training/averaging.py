"""Averages of checkpoints."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from ..hub.folder import is_training_state
from .checkpoints import _as_folders, _put_in_place, _read_json, _temporary_folder_beside, logger


_WEIGHT_FILES = re.compile(r".*\.safetensors(\.index\.json)?|pytorch_model.*\.bin(\.index\.json)?")


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
        # The average has weights of its own, and a training's state and arguments belong to none of them.
        if _WEIGHT_FILES.fullmatch(path.name) or is_training_state(path.name) or path.name == TRAINING_ARGS_NAME:
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copy2(path, folder)
