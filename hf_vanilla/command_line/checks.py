"""Checks of files, folders and models before a script's long work."""

import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ..data.files import STANDARD_STREAM
from ..hub.folder import check_json_files, check_weights
from ..registration import AUTO_CLASSES


def check_output_dir(output_dir: str | None) -> None:
    """Check early that a folder can be created and written to. Leaves no files.

    Args:
        output_dir (`str`): The folder, which need not exist yet.

    Raises:
        ValueError: if it is missing, a broken link, or not writable.
    """
    if not output_dir:
        raise ValueError("`output_dir` is missing; give a folder as --output_dir.")
    _check_folder(Path(output_dir).absolute(), f"`output_dir` ({output_dir}) must be a folder")


def _check_folder(folder: Path, rule: str) -> None:
    """Check that a folder can be created and written to; an error starts with `rule`."""
    for each in (folder, *folder.parents):
        if each.is_symlink() and not each.exists():
            raise ValueError(f"{rule}, but {each} is a broken link; remove it.")
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"{rule} that can be written to: {error}.") from error


def check_results_file(path: str | None, option: str = "results_file", /, **inputs: str | None) -> None:
    """Check early that a file of results can be written. Leaves no files.

    Args:
        path (`str`, *optional*): The file. Neither it nor its folder need exist yet.
        option (`str`, defaults to `"results_file"`): Name of the option.
        **inputs (`str`, *optional*): Files to read, by the name of the option, which the file may not be.

    Raises:
        ValueError: if it is a folder or an input, or its folder can't be created or written to.
    """
    if path is None:
        return
    if Path(path).is_dir():
        raise ValueError(f"`{option}` must be a file, but {path} is a folder; give a file in it.")
    _check_folder(Path(path).absolute().parent, f"`{option}` ({path}) must be in a folder")
    check_output_is_no_input(path, option, **inputs)


def check_files_exist(**files: str | list[str] | None) -> None:
    """Check early that the files of options exist.

    Args:
        **files (`str`, `list[str]` or `None`): Path or paths by the name of the option.

    Raises:
        ValueError: if a file does not exist.
    """
    for name, given in files.items():
        for path in [given] if isinstance(given, str) else given or []:
            if not Path(path).is_file():
                raise ValueError(f"`{name}` must be an existing file, but there is no file {path}.")


def check_output_is_no_input(output: str, option: str = "output", /, **inputs: str | None) -> None:
    """Check early that a file to write is none of the files to read, also by another path or a link.

    Args:
        output (`str`): Value of the option; `-` and devices are accepted.
        option (`str`, defaults to `"output"`): Name of the option.
        **inputs (`str`, *optional*): Paths by the name of the option.

    Raises:
        ValueError: if the output would replace an input.
    """
    if not Path(output).is_file():
        return
    for name, path in inputs.items():
        if path is None:
            continue
        with suppress(OSError):  # of a file that is missing, of which others tell
            read = os.stat(0 if path == STANDARD_STREAM else path)
            if os.path.samestat(os.stat(output), read):
                raise ValueError(f"`{option}` must be another file than `{name}`, but {output} is that file itself.")


def check_unused(arguments: Any, names: Sequence[str]) -> None:
    """Check that options of a tokenizer to train have their defaults, where a trained one is given.

    Args:
        arguments (`Any`): A dataclass of options.
        names (`Sequence[str]`): Names of the options.

    Raises:
        ValueError: if one has another value.
    """
    for name in names:
        given = getattr(arguments, name)
        if given != getattr(type(arguments), name):
            raise ValueError(
                f"`{name}` ({given}) is for a tokenizer to train, and has no effect beside `model_name_or_path` or "
                "`tokenizer_name_or_path`; leave it out."
            )


def check_device(device: str) -> None:
    """Check early that a device exists here.

    Args:
        device (`str`): Such as `cpu` or `cuda:1`, or `auto`.

    Raises:
        ValueError: if torch does not know it, was built without it, or this machine has none.
    """
    if device == "auto":
        return
    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        rule = f"--device must be auto or a device of this machine, such as cpu, got {device!r}"
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"{rule}: {first}") from None


@contextmanager
def without_load_report() -> Iterator[None]:
    """Silence transformers' list of new and unused weights, for a block that expects some.

    Yields:
        Nothing: the block loads a model.
    """
    reporter = logging.getLogger("transformers.modeling_utils")
    reporter.addFilter(_is_no_load_report)  # a higher level would hide other warnings
    try:
        yield
    finally:
        reporter.removeFilter(_is_no_load_report)


def _is_no_load_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def check_models(**models: str | None) -> None:
    """Check early, without the Hub, that the folders of models exist.

    Args:
        **models (`str`, *optional*): Folder or name on the Hub by the name of the option.

    Raises:
        ValueError: if a value can only be a folder, by its first character or its parent, and does not exist.
    """
    for option, given in models.items():
        if given is None or Path(given).is_dir():
            continue
        path = Path(given)
        has_parent = path.parent != Path() and path.parent.is_dir()
        if path.is_absolute() or given.startswith((".", "~")) or has_parent or len(path.parts) > 2:
            raise ValueError(f"`{option}` must name a folder or a model of the Hub, but there is no folder {given}.")


@contextmanager
def explained_loading(option: str, name_or_path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Raise one-line errors for a model that is missing or of the wrong kind, in place of transformers' long ones.

    Args:
        option (`str`): Name of the option.
        name_or_path (`str`, *optional*): Its value: a folder or a name on the Hub.

    Yields:
        Nothing: the block loads the model.

    Raises:
        ValueError: if there is no such folder, and loading from the Hub fails; if the model is of the wrong kind; or
            if a file of config or tokenizer has an absurd size or depth.
    """
    if name_or_path is not None and Path(name_or_path).is_dir():
        check_json_files(name_or_path)
    try:
        yield
    except KeyError as error:
        raise ValueError(f"`{option}` ({name_or_path}) has a file of tokenizer or config without {error}.") from None
    except (OSError, ValueError) as error:
        wrong_kind = re.match(r"Unrecognized configuration class .* for this kind of AutoModel: (\w+)", str(error))
        if wrong_kind:
            auto_class, model_type = wrong_kind[1], AutoConfig.from_pretrained(name_or_path).model_type
            fits = [config.model_type for config, models in AUTO_CLASSES.items() if auto_class in models]
            needed = ", such as a ".join((f"a model for {auto_class}", *fits[:1]))
            raise ValueError(f"`{option}` ({name_or_path}) must be {needed}, got a {model_type}.") from None
        if name_or_path is None:
            raise
        folder = Path(name_or_path)
        models = [] if (folder / "config.json").exists() else sorted(folder.glob("*/config.json"))
        if models:
            rule = f"`{option}` must be the folder of a model, but {folder} has no config.json"
            raise ValueError(f"{rule}; give one of its subfolders, such as {models[0].parent}.") from None
        if isinstance(error, json.JSONDecodeError):
            raise ValueError(f"`{option}` ({folder}) has a JSON file that is cut or damaged: {error}.") from None
        if folder.is_dir():
            raise
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"`{option}` ({name_or_path}) is no folder, and no model of the Hub that can be reached: {first}"
        ) from error


@contextmanager
def explained_model_loading(option: str, name_or_path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Like [`explained_loading`], for weights too: transformers draws those that are missing at random.

    Args:
        option (`str`): Name of the option.
        name_or_path (`str`, *optional*): Its value: a folder or a name on the Hub.

    Yields:
        Nothing: the block loads the model.

    Raises:
        ValueError: as by [`explained_loading`]; or if weights of this package's models in a folder are not those of
            their config, or hold nan or infinity.
    """
    with explained_loading(option, name_or_path):
        if name_or_path is not None and Path(name_or_path).is_dir():
            with without_load_report():
                check_weights(name_or_path)
        yield
