"""What every script does at its edges: read options, tell errors in one line, stop cleanly on Ctrl-C."""

import argparse
import difflib
import json
import logging
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
import transformers
from huggingface_hub.errors import HTTPError, StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, HfArgumentParser, TrainingArguments

from .generation.line_files import replacing_file


# The exit status of a program that Ctrl-C has ended.
INTERRUPTED = 130


# What the errors of `torch.save` say where it can't write; those of small files come from the last flush.
CANT_WRITE = ("inline_container", "PytorchStreamWriter", "iostream error")

# Options of transformers' trainer that no script reads: each does all of its work.
WITHOUT_EFFECT = ("do_train", "do_eval", "do_predict")


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the line breaks of the examples, tells the defaults that there are, and puts a script's own options first.

    Args:
        *args (`Any`): As argparse's.
        own (`Collection[str]`): Names of the script's own options.
        **kwargs (`Any`): As argparse's.
    """

    def __init__(self, *args: Any, own: Collection[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own = ("help", *own)

    def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
        """List options: the script's own ones, and behind them those of transformers' trainer.

        Args:
            actions (`Iterable[argparse.Action]`): The options.
        """
        shown = [action for action in actions if action.dest not in WITHOUT_EFFECT]
        super().add_arguments([action for action in shown if action.dest in self.own])
        others = [action for action in shown if action.dest not in self.own]
        if others:
            self.end_section()
            self.start_section("options of transformers' trainer")
            super().add_arguments(others)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parse_arguments(*dataclass_types: Any, description: str | None) -> tuple[Any, ...]:
    """Read options into dataclasses, from the command line or from one JSON file that is the only argument.

    Args:
        *dataclass_types (`Any`): Dataclasses whose fields are the options, with their help in `metadata`.
        description (`str`, *optional*): What stands above the options in the help: what the script does, and examples.

    Returns:
        `tuple[Any, ...]`: one instance of each dataclass. A wrong option ends the program with status 2.
    """
    own = [
        name
        for dataclass_type in dataclass_types
        for each in dataclass_type.__mro__
        if not each.__module__.startswith("transformers.")
        for name in vars(each).get("__annotations__", ())
    ]
    parser = HfArgumentParser(
        dataclass_types,
        # argparse would list all options here, and transformers' training arguments alone fill a screen.
        usage="%(prog)s --option value ... | options.json",
        description=description,
        formatter_class=partial(HelpFormatter, own=own),
        allow_abbrev=False,
    )
    try:
        if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
            options = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
            _check_types(options, dataclass_types, sys.argv[1])
            return parser.parse_dict(options)
        return _parse_words(parser)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n--help lists all options.\n")
        sys.exit(2)


def _parse_words(parser: HfArgumentParser) -> tuple[Any, ...]:
    """Parse the command line, the names of options first: argparse would tell what is missing for a mistyped one."""
    known = [name for action in parser._actions for name in action.option_strings]
    for word in sys.argv[1:]:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known and " " not in name:  # with a space it is the value of another
            raise ValueError(f"unknown option {name}{_nearest(name, known)}")
    *parsed, left_over = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if left_over:
        raise ValueError(
            f"no option takes {' '.join(left_over)!r}; names begin with --, values with spaces need quotes."
        )
    return tuple(parsed)


def _nearest(name: str, known: Collection[str]) -> str:
    """End a sentence about a name that is not known with the one that was meant, if there is one like it."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else "."


def set_up_logging(training_args: TrainingArguments) -> None:
    """Tell messages as they are; of other processes than the first, and of requests to the Hub, warnings alone.

    Args:
        training_args (`TrainingArguments`): Which process this is, and `log_level`.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO if training_args.should_log else logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells every request that a push consists of
    transformers.utils.logging.set_verbosity(training_args.get_process_log_level())


def _check_types(options: Any, dataclass_types: tuple[Any, ...], path: str) -> None:
    """Check the values of a JSON file, which nothing else converts or checks, where the type is a simple one."""
    if not isinstance(options, dict):
        raise ValueError(f"{path} must hold one JSON object of options, got a {type(options).__name__}.")
    types = {name: hint for each in dataclass_types for name, hint in get_type_hints(each).items()}
    for name, value in options.items():
        if name not in types:
            raise ValueError(f"{path}: there is no option called {name!r}{_nearest(name, types)}")
        type_ = types[name]
        allowed = get_args(type_) if get_origin(type_) in (Union, UnionType) else (type_,)
        if value is not None and not any(_is_of(value, each) for each in allowed):
            told = " or ".join(
                each.__name__ if isinstance(each, type) else str(each) for each in allowed if each is not NoneType
            )
            raise ValueError(f"{path}: `{name}` must be {told}, got {value!r}.")


def _is_of(value: Any, type_: Any) -> bool:
    """Tell whether a JSON value has a type; of types that are not simple ones it always has."""
    if get_origin(type_) is Literal:
        return value in get_args(type_)
    if get_origin(type_) is list:
        return isinstance(value, list) and all(_is_of(each, *get_args(type_)) for each in value)
    if type_ in (bool, int, float, str):
        expected = (int, float) if type_ is float else type_
        return isinstance(value, expected) and isinstance(value, bool) == (type_ is bool)
    return type_ is not NoneType


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


def describe_environment(*packages: str) -> dict[str, dict[str, Any]]:
    """Describe what results were obtained with, for a file that records them.

    Args:
        *packages (`str`): Further packages whose versions count.

    Returns:
        `dict[str, dict[str, Any]]`: `versions` of Python and packages, and the `machine`.
    """
    names = ("hf_vanilla", "torch", "transformers", "tokenizers", *packages)
    machine: dict[str, Any] = {"architecture": platform.machine(), "cores": os.cpu_count() or 0}
    machine["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    machine["processor"] = _processor_name()
    if os.environ.get("LD_PRELOAD"):  # another `malloc`, say
        machine["preloaded"] = [Path(each).name for each in re.split("[ :]+", os.environ["LD_PRELOAD"]) if each]
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    versions = {"python": platform.python_version(), **{name: version(name) for name in names}}
    return {"versions": versions, "machine": machine}


def _processor_name() -> str:
    """Name the processor's model as Linux knows it, or else whatever Python knows."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", file.read_text(), flags=re.MULTILINE) if file.exists() else None
    return found[1] if found else platform.processor()


def show_report(report: dict[str, Any]) -> None:
    """Print the main score of a fine-tuning, one line for each evaluation set.

    Args:
        report (`dict[str, Any]`): As `hf_vanilla.training.seeds_report` gives it.
    """
    for name, figures in report["summary"].items():
        told = ", ".join(f"{which} {value:.4f}" for which, value in figures.items())
        sys.stderr.write(f"{name} {report['main_score']} over {len(report['seeds'])} seed(s): {told}\n")


def write_report(path: str, report: dict[str, Any], *packages: str) -> None:
    """Write results to a JSON file, with the versions and the machine that they were obtained with.

    Args:
        path (`str`): The file, which appears when it is complete; its folder is made if there is none.
        report (`dict[str, Any]`): What to write.
        *packages (`str`): Further packages whose versions count.

    Raises:
        ValueError: if the file can't be written.
    """
    Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(path) as file:
        file.write(json.dumps({**report, **describe_environment(*packages)}, indent=2, ensure_ascii=False) + "\n")


def run(main: Callable[[], None]) -> int:
    """Call the script's main function, and turn what ends it into an exit status.

    Args:
        main (`Callable[[], None]`): The function.

    Returns:
        `int`: 0 for success, 1 for an error, which is told in one line, 130 for Ctrl-C.

    Raises:
        RuntimeError: if there is one that does not come from a full disk.
    """
    try:
        main()
    except (ValueError, TypeError, OSError, ImportError, HTTPError, SafetensorError, StrictDataclassError) as error:
        sys.stderr.write("\n".join([f"error: {error}", *getattr(error, "__notes__", ()), ""]))
        return 1
    except RuntimeError as error:
        if not any(words in str(error) for words in CANT_WRITE):
            raise
        first = str(error).strip().partition("\n")[0]
        sys.stderr.write(f"error: a file could not be written, most likely because the disk is full: {first}\n")
        return 1
    except KeyboardInterrupt as interrupt:
        sys.stderr.write("\n".join(["", "interrupted", *getattr(interrupt, "__notes__", ()), ""]))
        return INTERRUPTED
    return 0
