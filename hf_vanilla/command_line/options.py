"""Options of the scripts: parsing, help, logging and how a script ends."""

import argparse
import difflib
import json
import logging
import sys
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from huggingface_hub.errors import HTTPError, StrictDataclassError
from safetensors import SafetensorError
from transformers import HfArgumentParser, TrainingArguments

from .checks import is_full_disk


Result = TypeVar("Result")
# Exit status of a program that Ctrl-C has ended.
INTERRUPTED = 130


# Options of transformers' `TrainingArguments` that no script reads.
WITHOUT_EFFECT = ("do_train", "do_eval", "do_predict")


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the line breaks of examples, shows defaults other than None, and lists a script's own options first.

    Args:
        *args (`Any`): As in argparse.
        own (`Collection[str]`): Names of the script's own options.
        **kwargs (`Any`): As in argparse.
    """

    def __init__(self, *args: Any, own: Collection[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own = ("help", *own)

    def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
        """List the script's own options, and then those of transformers' trainer.

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
    """Read options into dataclasses, from the command line or from a JSON file as the only argument.

    Args:
        *dataclass_types (`Any`): Dataclasses whose fields are the options, with their help in `metadata`.
        description (`str`, *optional*): Text above the options in the help: purpose and examples.

    Returns:
        `tuple[Any, ...]`: one instance of each dataclass. A bad option ends the program with status 2.
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
        # argparse would list all options here, and transformers' training arguments fill a screen.
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
        return _parse_command_line(parser)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n--help lists all options.\n")
        sys.exit(2)


def _parse_command_line(parser: HfArgumentParser) -> tuple[Any, ...]:
    """Parse the command line; unknown options come first, as argparse would report missing ones instead."""
    known = [name for action in parser._actions for name in action.option_strings]
    for word in sys.argv[1:]:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known and " " not in name:  # with a space it is a value
            raise ValueError(f"unknown option {name}{_suggestion(name, known)}")
    *parsed, unparsed = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unparsed:
        raise ValueError(
            f"no option takes {' '.join(unparsed)!r}; names begin with --, values with spaces need quotes."
        )
    return tuple(parsed)


def _suggestion(name: str, known: Collection[str]) -> str:
    """Return the end of a sentence on an unknown name: the closest known one, if there is one."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else "."


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
        raise ValueError(f"{path} must hold one JSON object of options, got a {type(options).__name__}.")
    types = {name: hint for each in dataclass_types for name, hint in get_type_hints(each).items()}
    for name, value in options.items():
        if name not in types:
            raise ValueError(f"{path}: unknown option {name!r}{_suggestion(name, types)}")
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
        `int`: 0 for success, 1 for an error, which is printed in one line, 130 for Ctrl-C.

    Raises:
        Exception: if one of a class that is not listed here is raised for another reason than a full disk.
    """
    try:
        main()
    except (ValueError, TypeError, OSError, ImportError, HTTPError, SafetensorError, StrictDataclassError) as error:
        sys.stderr.write("\n".join([f"error: {error}", *getattr(error, "__notes__", ()), ""]))
        return 1
    except Exception as error:
        if not is_full_disk(error):
            raise
        first = str(error).strip().partition("\n")[0]
        sys.stderr.write(f"error: a file could not be written, most likely because the disk is full: {first}\n")
        return 1
    except KeyboardInterrupt as interrupt:
        sys.stderr.write("\n".join(["", "interrupted", *getattr(interrupt, "__notes__", ()), ""]))
        return INTERRUPTED
    return 0


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


__all__ = ["on_first_process"]
