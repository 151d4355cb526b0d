"""Checks of files, folders and models before a script's long work."""

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoConfig


# What the errors of `torch.save` say where it can't write; those of small files come from the last flush.
CANT_WRITE = ("inline_container", "PytorchStreamWriter", "iostream error")


def check_output_dir(output_dir: str | None) -> None:
    """Fail now rather than after hours if a folder can't be made or written to. Leaves nothing behind.

    Args:
        output_dir (`str`): The folder, which need not exist yet.

    Raises:
        ValueError: if there is none, it is a link to nothing, or nothing can be written there.
    """
    if not output_dir:
        raise ValueError("`output_dir` is missing; give a folder as --output_dir.")
    _check_folder(Path(output_dir).absolute(), f"`output_dir` ({output_dir}) must be a folder")


def _check_folder(folder: Path, rule: str) -> None:
    """Check that a folder can be made and written to; otherwise the error begins with the rule."""
    for each in (folder, *folder.parents):
        if each.is_symlink() and not each.exists():
            raise ValueError(f"{rule}, but {each} is a link to nothing; remove it.")
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"{rule} that can be written to: {error}.") from error


def check_results_file(path: str | None) -> None:
    """Fail now rather than after hours if a file of results can't be written. Leaves nothing behind.

    Args:
        path (`str`, *optional*): The file. Neither it nor its folder need exist yet.

    Raises:
        ValueError: if it is a folder, or its folder can't be made or written to.
    """
    if path is None:
        return
    if Path(path).is_dir():
        raise ValueError(f"`results_file` must be a file, but {path} is a folder; give a file in it.")
    _check_folder(Path(path).absolute().parent, f"`results_file` ({path}) must be in a folder")


def check_files(**files: str | list[str] | None) -> None:
    """Check that the files of options exist, before anything is done with them.

    Args:
        **files (`str`, `list[str]` or `None`): Name of the option, and what was given.

    Raises:
        ValueError: if a file does not exist.
    """
    for name, given in files.items():
        for path in [given] if isinstance(given, str) else given or []:
            if not Path(path).is_file():
                raise ValueError(f"`{name}` must name an existing file, but there is no file {path}.")


@contextmanager
def without_load_report() -> Iterator[None]:
    """Keep transformers from listing which weights are new and which are left over, where that is what is wanted.

    Yields:
        Nothing: the block loads a model.
    """
    reporter = logging.getLogger("transformers.modeling_utils")
    reporter.addFilter(_is_no_load_report)  # a level of its own would make it tell something else
    try:
        yield
    finally:
        reporter.removeFilter(_is_no_load_report)


def _is_no_load_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def check_models(**models: str | None) -> None:
    """Find out now, and not from the Hub, that a folder of a model does not exist.

    Args:
        **models (`str`, *optional*): Name of the option, and the folder or name on the Hub that was given.

    Raises:
        ValueError: if what was given can only be a folder, as its beginning or a folder above it tells, and there is
            none.
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
    """Say in one line that a model is not there or of the wrong kind, where transformers tells much else.

    Args:
        option (`str`): Name of the option.
        name_or_path (`str`, *optional*): What was given: a folder or a name on the Hub.

    Yields:
        Nothing: the block loads it.

    Raises:
        ValueError: if there is no such folder, and loading from the Hub fails, or the model is of the wrong kind.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        wrong_kind = re.match(r"Unrecognized configuration class .* for this kind of AutoModel: (\w+)", str(error))
        if wrong_kind:
            auto_class, model_type = wrong_kind[1], AutoConfig.from_pretrained(name_or_path).model_type
            example = "a translator" if auto_class == "AutoModelForSeq2SeqLM" else "a BERT"
            raise ValueError(
                f"`{option}` ({name_or_path}) is a {model_type}; a model of {auto_class} is needed, such as {example}."
            ) from None
        if name_or_path is None or Path(name_or_path).is_dir():
            raise
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"`{option}` ({name_or_path}) is no folder, and no model of the Hub that can be reached: {first}"
        ) from error
