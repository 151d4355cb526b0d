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

from .checks import CANT_WRITE


Result = TypeVar("Result")


# The exit status of a program that Ctrl-C has ended.
INTERRUPTED = 130


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


def on_first_process(function: Callable[[], Result]) -> Result:
    """Call a function on the first of several processes, and give all of them its result.

    Args:
        function (`Callable[[], Result]`): What to call, such as a reader of standard input, which only one can read.

    Returns:
        `Result`: what the function returned.

    Raises:
        ValueError: on all processes, if the function raises one.
    """
    told: list = [None, None]
    if PartialState().is_main_process:
        try:
            told[0] = function()
        except ValueError as error:
            told[1] = str(error)
    broadcast_object_list(told)
    if told[1] is not None:
        raise ValueError(told[1])
    return told[0]


__all__ = ["on_first_process"]
