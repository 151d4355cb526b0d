"""Help and checks of options, from descriptions of them: options.json, or what a running script says of its parser.

A command is a dictionary of `summary` (one line), `description` (purpose and examples), `groups` (each with `title`
and `options`) and, if it trains, `trainer`: the options of transformers' trainer, or the name of their class. A
command that has `tasks` in place of options takes the name of one as its first argument, and then that task's options.
"""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from .columns import check_columns


TABLE = Path(__file__).with_name("options.json")
LISTING = "--help lists all options."
# Endings of files of options.
OPTION_FILES = (".json", ".yaml", ".yml")
# Prints the options as JSON; from these the table is made.
DESCRIBE = "--describe_options"
# Of the options of transformers' trainer, those that --help names.
OFTEN_USED = (
    "max_steps",
    "num_train_epochs",
    "eval_strategy",
    "eval_steps",
    "save_steps",
    "seed",
    "resume_from_checkpoint",
)
HELP = ("-h", "--help")
HELP_ALL = "--help_all"


def truth_value(text: str) -> bool:
    """Read a truth value as `HfArgumentParser` does.

    Args:
        text (`str`): The value.

    Returns:
        `bool`: the value.

    Raises:
        ArgumentTypeError: if it is another word.
    """
    if text.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")


TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "bool": truth_value}
# Examples of a script: under a launcher, which takes modules, and plain.
LAUNCHED = re.compile(r"\b((?:accelerate launch|torchrun)(?: -\S+(?: \d+)?)*) scripts/(\w+)\.py")
SCRIPT = re.compile(r"(?:\bpython )?\bscripts/(\w+)\.py")
PLACEHOLDERS = {"int": "INT", "float": "NUMBER", "str": "TEXT"}


def load_table() -> dict[str, Any]:
    """Load the table of all commands.

    Returns:
        `dict[str, Any]`: `transformers`, the version that `trainers` describes; `trainers`, the options of each of its
        classes of training arguments; `commands`, by name.
    """
    return json.loads(TABLE.read_text(encoding="utf-8"))


def suggestion(name: str, known: Collection[str]) -> str:
    """Return the end of a sentence on an unknown name: the closest known one, if there is one.

    Args:
        name (`str`): The unknown name.
        known (`Collection[str]`): The names that there are.

    Returns:
        `str`: the end, with a full stop or question mark.
    """
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else "."


def list_commands(commands: Mapping[str, Mapping[str, Any]]) -> str:
    """List all commands by group, with one line each.

    Args:
        commands (`Mapping[str, Mapping[str, Any]]`): The commands, those of a group in a row.

    Returns:
        `str`: the help of `hf-vanilla`.
    """
    lines = ["hf-vanilla COMMAND --option value ... | COMMAND --help | --version"]
    group = None
    for name, command in commands.items():
        if command["group"] != group:
            group = command["group"]
            lines += ["", f"{group}:"]
        lines.append(f"  {name:<30}{command['summary']}")
    return "\n".join([*lines, ""])


def answer(
    command: Mapping[str, Any],
    arguments: list[str],
    program: str,
    trainers: Mapping[str, list[dict[str, Any]]] | None = None,
) -> None:
    """Print help if it is asked for, and refuse wrong options and columns. Both end the program, with status 0 or 2.

    Args:
        command (`Mapping[str, Any]`): Description of the command.
        arguments (`list[str]`): Its arguments.
        program (`str`): Name of the program, such as `hf-vanilla translate`.
        trainers (`Mapping[str, list[dict[str, Any]]]`, *optional*): Options of each class of the trainer's, if
            `command` names the class alone. Without, a command that trains is not checked.
    """
    if arguments[-1:] == [DESCRIBE]:  # also of a task that the table does not have yet
        return
    if "tasks" in command:
        first = "".join(arguments[:1])
        task = first.replace("-", "_")
        if task in command["tasks"]:
            return answer(command["tasks"][task], arguments[1:], f"{program} {task}", trainers)
        names = ", ".join(command["tasks"])
        if first in (*HELP, HELP_ALL):
            _show(f"{program} TASK --option value ...\n\n{command['description']}\n\nTasks: {names}.", program)
        _refuse(f"the first argument must be one of {names}.", "--help says more.")
    trainer = command.get("trainer", [])
    has_help = not isinstance(trainer, str)
    if not has_help:
        trainer = (trainers or {}).get(trainer)
    if set(arguments) & {*HELP}:
        _show(_help_parser(command, program, None).format_help(), program)
    if HELP_ALL in arguments:
        if has_help:
            _show(_help_parser(command, program, trainer).format_help(), program)
        return
    is_file = is_file_of_options(arguments)
    options = [*_own_options(command), *(trainer or [])]
    only = arguments[0] if len(arguments) == 1 else "-"
    is_folder = (
        not is_file
        and not only.startswith("-")
        and any(each["name"] == "folder" and each.get("required") for each in options)
    )
    if trainer is not None and not is_folder:
        try:
            if is_file:  # which has options that are not known here
                _parse([{**option, "required": False} for option in options], arguments[1:])
            else:
                check_columns(vars(_parse(options, arguments)))
        except ValueError as error:
            _refuse(str(error), LISTING)


def is_file_of_options(arguments: Sequence[str]) -> bool:
    """Whether the first argument is a file of options.

    Args:
        arguments (`Sequence[str]`): The arguments.

    Returns:
        `bool`: whether.
    """
    return bool(arguments) and arguments[0].endswith(OPTION_FILES) and not arguments[0].startswith("-")


def _own_options(command: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [option for group in command["groups"] for option in group["options"]]


def _show(text: str, program: str) -> None:
    """Print help, with the examples for the command if it runs as one, and end."""
    if program.startswith("hf-vanilla "):
        text = LAUNCHED.sub(r"\1 -m hf_vanilla.scripts.\2", text)
        text = SCRIPT.sub(lambda found: f"hf-vanilla {found[1].replace('_', '-')}", text)
    try:
        sys.stdout.write(text.rstrip() + "\n")
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    sys.exit(0)


def _refuse(message: str, hint: str) -> None:
    sys.stderr.write(f"error: {message}\n{hint}\n")
    sys.exit(2)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are exceptions."""

    def error(self, message: str) -> Any:
        raise ValueError(re.sub(r"^argument (--\w+)[^:]*: ", r"\1: ", message))


def _flags(option: Mapping[str, Any]) -> list[str]:
    """Return all spellings of an option."""
    names = [option["name"], *(["no_" + option["name"]] if option.get("negation") else [])]
    return list(dict.fromkeys(f"--{each}" for name in names for each in (name, name.replace("_", "-"))))


def _parse(options: Sequence[Mapping[str, Any]], arguments: list[str]) -> argparse.Namespace:
    """Check names and types of options; unknown names come first, as argparse would report missing options instead."""
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for option in {option["name"]: option for option in reversed(options)}.values():
        spellings: dict[str, Any] = {"dest": option["name"], "required": option.get("required", False)}
        if option["type"] == "bool":
            spellings |= {"nargs": "?", "const": True}
        elif "nargs" in option:
            spellings["nargs"] = option["nargs"]
        parser.add_argument(
            *_flags({"name": option["name"]}),
            *option.get("aliases", ()),
            type=TYPES[option["type"]],
            choices=option.get("choices"),
            **spellings,
        )
        if option.get("negation"):
            parser.add_argument(*_flags({"name": f"no_{option['name']}"}), dest=option["name"], action="store_false")
    known = list(parser._option_string_actions)
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in known and " " not in name:  # with a space it is a value
            raise ValueError(f"unknown option {name}{suggestion(name, known)}")
    parsed, rest = parser.parse_known_args(arguments)
    if rest:
        raise ValueError(f"no option takes {' '.join(rest)!r}; names begin with --, values with spaces need quotes.")
    return parsed


def _help_parser(
    command: Mapping[str, Any], program: str, trainer: list[dict[str, Any]] | None
) -> argparse.ArgumentParser:
    """Make a parser whose help is that of a command, with the trainer's options if they are given."""
    own = {option["name"] for option in _own_options(command)}
    epilog = None
    if command.get("trainer") and trainer is None:
        without = {"seed", "resume_from_checkpoint"} if "seeds" in own else set()  # of no use beside it
        names = [f"--{name}" for name in OFTEN_USED if name not in own | without]
        epilog = f"Options of transformers' trainer too, such as {', '.join(names)}: --help_all lists them."
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [options.yaml | options.json] --option value ...",
        description=command["description"],  # in which argparse leaves % alone
        epilog=epilog,
        formatter_class=_HelpFormatter,
        add_help=False,
    )
    groups = list(command["groups"])
    if trainer:
        others = [option for option in trainer if option["name"] not in own and not option.get("hidden")]
        groups.append({"title": "options of transformers' trainer", "options": others})
    for each in groups:
        group = parser.add_argument_group(each["title"])
        for option in each["options"]:
            names = [f"--{option['name']}", *([f"--no_{option['name']}"] if option.get("negation") else [])]
            shape: dict[str, Any] = {"nargs": option.get("nargs"), "choices": option.get("choices")}
            if option["type"] == "bool":
                shape = {"action": "store_true"}
            elif "choices" not in option:
                shape["metavar"] = PLACEHOLDERS[option["type"]]
            group.add_argument(*names, help=_help_of(option), **shape)
    return parser


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of examples, and gives names of options room."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # The end of the help is one sentence, which wraps; the description has line breaks of its own.
        return super()._fill_text(text, width, indent) if "\n" in text else argparse.HelpFormatter._fill_text(
            self, text, width, indent
        )  # fmt: skip


def _help_of(option: Mapping[str, Any]) -> str:
    """Return the help of an option, with its default unless the text names one."""
    text = option.get("help", "")
    if option.get("required"):
        text += " (required)"
    elif "default" in option and "Default: " not in text:
        text += f" (default: {option['default']})"
    return text.strip().replace("%", "%%")
