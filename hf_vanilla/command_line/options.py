"""Options of the scripts: parsing, help, logging and how a script ends."""

import argparse
import dataclasses
import inspect
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import transformers
import yaml
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets.exceptions import DatasetGenerationError
from huggingface_hub.errors import HTTPError, StrictDataclassError
from safetensors import SafetensorError
from torch import distributed
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool

from hf_vanilla_cli import INTERRUPTED, program_name, restore_interrupts
from hf_vanilla_cli.options import DESCRIBE, LISTING, answer, is_file_of_options, suggestion

from ..data.files import is_full_disk


Result = TypeVar("Result")
# Folder of files of options that come with the scripts, beside them.
RECIPES = "recipes"
_HOME = re.compile(r"\A(--[\w-]+=)?~(?=/)")
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
GLOO_SECONDS = 0.2  # more than a thread of gloo needs to let go of the tensors of the last collective operation


# Options of transformers' `TrainingArguments` that no script reads.
WITHOUT_EFFECT = ("do_train", "do_eval", "do_predict")


def parse_arguments(*dataclass_types: Any, description: str | None) -> tuple[Any, ...]:
    """Read options into dataclasses, from the command line, or from a JSON or YAML file as the first argument.

    Options after a file replace those in it. A file that does not exist may be one of the recipes beside the script.

    Args:
        *dataclass_types (`Any`): Dataclasses whose fields are the options, with their help in `metadata`; the first
            line of their docstrings is the title above their options.
        description (`str`, *optional*): Text above the options in the help: purpose and examples.

    Returns:
        `tuple[Any, ...]`: one instance of each dataclass. A bad option ends the program with status 2.
    """
    parser = HfArgumentParser(dataclass_types, allow_abbrev=False)
    command = describe_options(dataclass_types, parser, description)
    if sys.argv[1:] == [DESCRIBE]:
        sys.stdout.write(json.dumps(command) + "\n")
        sys.exit(0)
    answer(command, sys.argv[1:], program_name())
    arguments = _expand_home(sys.argv[1:])
    try:
        if is_file_of_options(arguments):
            path = arguments.pop(0)
            options = _read_options(_find_file(path))
            if isinstance(options, dict):
                options = {name: _expand_home(value) for name, value in options.items()}
                _restore_no(parser, options)
            _check_types(options, dataclass_types, path)
            _set_defaults(parser, options)
        return tuple(parser.parse_args_into_dataclasses(arguments))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n{LISTING}\n")
        sys.exit(2)


def _find_file(path: str) -> Path:
    """Return the path of a file, or that of the recipe with this name."""
    recipe = Path(sys.argv[0]).with_name(RECIPES) / path
    return recipe if not Path(path).exists() and recipe.exists() else Path(path)


def _set_defaults(parser: argparse.ArgumentParser, options: dict[str, Any]) -> None:
    """Have a parser return these options where the command line has none."""
    parser.set_defaults(**options)
    for action in parser._actions:
        action.required = action.required and action.dest not in options


def _restore_no(parser: argparse.ArgumentParser, options: dict[str, Any]) -> None:
    """Restore the choice `no`, which YAML 1.1, and so PyYAML, reads as false."""
    for action in parser._actions:
        if options.get(action.dest) is False and "no" in (action.choices or ()):
            options[action.dest] = "no"


def _expand_home(value: Any) -> Any:
    """Replace the ~ of ~/file, also in --option=~/file, where a shell leaves it, and in lists of texts."""
    if isinstance(value, list):
        return [_expand_home(each) for each in value]
    return _HOME.sub(lambda found: (found[1] or "") + str(Path.home()), value) if isinstance(value, str) else value


def _read_options(path: Path) -> Any:
    """Read a JSON file, or a YAML file as YAML 1.2 has it: 3e-4 is a number."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            return json.loads(text)
        options = yaml.safe_load(text)
    except (UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ValueError(f"{path} is no {kind} file in UTF-8: {' '.join(str(error).split())}") from None
    if not isinstance(options, dict):
        return options
    lists = {name: [_as_number(each) for each in value] for name, value in options.items() if isinstance(value, list)}
    return {name: _as_number(value) for name, value in options.items()} | lists


def _as_number(value: Any) -> Any:
    """Convert text such as 3e-4, which PyYAML leaves as it is."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def take_task(tasks: Sequence[str]) -> str:
    """Remove the first argument from the command line: the task of a script that has several.

    Args:
        tasks (`Sequence[str]`): The names of the tasks.

    Returns:
        `str`: the task. Anything else ends the program with status 2.
    """
    if len(sys.argv) > 1 and sys.argv[1].replace("-", "_") in tasks:
        return sys.argv.pop(1).replace("-", "_")
    sys.stderr.write(f"error: the first argument must be one of {', '.join(tasks)}.\n--help says more.\n")
    sys.exit(2)


def describe_options(
    dataclass_types: Sequence[Any], parser: HfArgumentParser, description: str | None
) -> dict[str, Any]:
    """Describe the options of a script for `hf_vanilla_cli`: its own by dataclass, and those of transformers' trainer.

    Args:
        dataclass_types (`Sequence[Any]`): Dataclasses of the options.
        parser (`HfArgumentParser`): Their parser.
        description (`str`, *optional*): Purpose and examples.

    Returns:
        `dict[str, Any]`: as [`hf_vanilla_cli.options.answer`] takes it. `trainer_class` names the class of
        transformers' training arguments, if one of the dataclasses is derived from it.
    """
    described = {action.dest: _describe(action) for action in parser._actions if action.nargs != 0}
    for action in parser._actions:
        if action.nargs == 0 and action.dest in described:  # --no_... of an option that is on by default
            described[action.dest]["negation"] = True
    groups: list[dict[str, Any]] = []
    for dataclass_type in dataclass_types:
        own = {
            name
            for each in dataclass_type.__mro__
            if not each.__module__.startswith("transformers.")
            for name in vars(each).get("__annotations__", ())
        }
        title = (inspect.getdoc(dataclass_type) or "").partition("\n")[0].rstrip(".")
        if title.startswith(f"{dataclass_type.__name__}("):  # what `dataclass` makes of a class without a docstring
            title = "Options"
        groups.append({"title": title, "options": [described[each] for each in described if each in own]})
    own = {option["name"] for group in groups for option in group["options"]}
    command: dict[str, Any] = {
        "description": (description or "").strip(),
        "groups": [group for group in groups if group["options"]],
    }
    for each in (each for dataclass_type in dataclass_types for each in dataclass_type.__mro__):
        if each.__module__.startswith("transformers."):
            command["trainer_class"] = each.__name__
            fields = [each.name for each in dataclasses.fields(each) if each.init]
            command["trainer"] = [described[name] for name in fields if name in described]
            break
    return command


def _describe(action: argparse.Action) -> dict[str, Any]:
    """Describe one option."""
    option: dict[str, Any] = {"name": action.dest, "type": "str", "help": action.help or ""}
    if action.type in (int, float):
        option["type"] = action.type.__name__
    elif action.type is string_to_bool:
        option["type"] = "bool"
    if action.nargs is not None and option["type"] != "bool":
        option["nargs"] = action.nargs
    if action.choices is not None:
        option["choices"] = [str(each) for each in action.choices]
    spellings = {f"--{action.dest}", f"--{action.dest.replace('_', '-')}"}
    if aliases := [each for each in action.option_strings if each not in spellings]:
        option["aliases"] = aliases
    if action.dest in WITHOUT_EFFECT:
        option["hidden"] = True
    if action.required:
        option["required"] = True
    default = action.default
    if isinstance(default, bool):
        default = "on" if default else None
    if default not in (None, [], "", argparse.SUPPRESS):
        option["default"] = " ".join(map(str, default)) if isinstance(default, list) else str(default)
    return option


def set_up_logging(training_args: TrainingArguments) -> None:
    """Log plain messages; from other processes than the first, and on requests to the Hub, warnings only.

    Args:
        training_args (`TrainingArguments`): The process, and `log_level`.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO if training_args.should_log else logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request of a push
    transformers.utils.logging.set_verbosity(training_args.get_process_log_level())


def _check_types(options: Any, dataclass_types: tuple[Any, ...], path: str) -> None:
    """Check the values of a JSON file for simple types, which `parse_dict` neither converts nor checks."""
    if not isinstance(options, dict):
        raise ValueError(f"{path} must hold one mapping of names to options, got a {type(options).__name__}.")
    types = {name: hint for each in dataclass_types for name, hint in get_type_hints(each).items()}
    for name, value in options.items():
        if name not in types:
            raise ValueError(f"{path}: unknown option {name!r}{suggestion(name, types)}")
        type_ = types[name]
        allowed = get_args(type_) if get_origin(type_) in (Union, UnionType) else (type_,)
        if value is not None and not any(_has_type(value, each) for each in allowed):
            expected = " or ".join(
                each.__name__ if isinstance(each, type) else str(each) for each in allowed if each is not NoneType
            )
            raise ValueError(f"{path}: `{name}` must be {expected}, got {value!r}.")


def _has_type(value: Any, type_: Any) -> bool:
    """Check a JSON value against a type; types that are not simple accept every value."""
    if get_origin(type_) is Literal:
        return value in get_args(type_)
    if get_origin(type_) is list:
        return isinstance(value, list) and all(_has_type(each, *get_args(type_)) for each in value)
    if type_ in (bool, int, float, str):
        expected = (int, float) if type_ is float else type_
        return isinstance(value, expected) and isinstance(value, bool) == (type_ is bool)
    return type_ is not NoneType


def run(main: Callable[[], None]) -> int:
    """Call a script's main function, and return its exit status.

    Args:
        main (`Callable[[], None]`): The function.

    Returns:
        `int`: 0 for success, 1 for an error, which is printed in one line, 130 for Ctrl-C. After a success the process
        has left its process group.

    Raises:
        Exception: if one of a class that is not listed here is raised for another reason than a full disk.
    """
    restore_interrupts()
    try:
        main()
    except (ValueError, TypeError, OSError, ImportError, HTTPError, SafetensorError, StrictDataclassError) as error:
        sys.stderr.write("\n".join([f"error: {error}", *getattr(error, "__notes__", ()), ""]))
        return 1
    except Exception as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        if not is_full_disk(cause):
            raise
        first = str(cause).strip().partition("\n")[0]
        sys.stderr.write(f"error: a file could not be written, most likely because the disk is full: {first}\n")
        return 1
    except KeyboardInterrupt as interrupt:
        sys.stderr.write("\n".join(["", "interrupted", *getattr(interrupt, "__notes__", ()), ""]))
        return INTERRUPTED
    leave_process_group()
    return 0


def leave_process_group() -> None:
    """Destroy the process group, if there is one, before Python ends.

    A thread of gloo that lets go of a tensor while Python ends aborts the process (pytorch#179291), so this waits.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        time.sleep(GLOO_SECONDS)


def on_first_process(function: Callable[[], Result]) -> Result:
    """Call a function on the first of several processes, and return its result on all of them.

    Args:
        function (`Callable[[], Result]`): The function, such as a reader of standard input.

    Returns:
        `Result`: the function's result.

    Raises:
        ValueError: on all processes, if the function raises one.
    """
    shared: list = [None, None]  # result, message of an error
    if PartialState().is_main_process:
        try:
            shared[0] = function()
        except ValueError as error:
            shared[1] = str(error)
    broadcast_object_list(shared)
    if shared[1] is not None:
        raise ValueError(shared[1])
    return shared[0]


__all__ = ["leave_process_group", "on_first_process"]
