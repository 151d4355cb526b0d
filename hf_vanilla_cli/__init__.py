"""The command `hf-vanilla`. It answers --help and wrong options without torch and transformers.

It is no part of the package `hf_vanilla`, because importing any part of that imports both.
"""

import os
import runpy
import signal
import sys
from importlib.metadata import version
from importlib.util import find_spec

from .options import answer, list_commands, load_table, suggestion


MODULE = "hf_vanilla.scripts"
INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended
# The modules without which a command ends in an error, each with the extra that installs it.
_PICTURES = {"matplotlib": "viz"}
_SCORES = {"scipy": "metrics", "sklearn": "metrics"}
NEEDED_MODULES = {
    "demo": _PICTURES,
    "demo-vit": {**_PICTURES, **_SCORES, "PIL": "vision"},
    "export-ctranslate2": {"ctranslate2": "export"},
    "finetune-classification": _SCORES,
    "finetune-image-classification": {**_SCORES, "PIL": "vision"},
    "finetune-multiple-choice": _SCORES,
    "finetune-token-classification": {"seqeval": "metrics"},
    "plot": _PICTURES,
    "sweep": {"optuna": "sweep"},
}


def main() -> int:
    """Run the command that the first argument names: one for each script.

    Returns:
        `int`: 0 for help, 2 for an unknown command; the status of a command that runs is its script's.
    """
    arguments = sys.argv[1:]
    commands = load_table()["commands"]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(list_commands(commands))
        return 0
    if arguments[0] == "--version":
        sys.stdout.write(f"{version('hf_vanilla')}\n")
        return 0
    name = arguments[0].replace("_", "-")
    if name not in commands:
        sys.stderr.write(f"error: unknown command {arguments[0]}{suggestion(name, commands)}\n")
        sys.stderr.write("hf-vanilla --help lists all commands.\n")
        return 2
    answer_from_table(name, arguments[1:], f"hf-vanilla {name}")
    end_at_once()
    sys.argv = sys.argv[1:]
    runpy.run_module(f"{MODULE}.{name.replace('-', '_')}", run_name="__main__", alter_sys=True)
    return 0


def answer_early(name: str) -> None:
    """Answer --help and wrong options of a script before its slow imports.

    Args:
        name (`str`): Name of the script, without `.py`.
    """
    answer_from_table(name.replace("_", "-"), sys.argv[1:], program_name())
    end_at_once()


def end_at_once() -> None:
    """Let Ctrl-C end the program at once, while it imports: nothing is lost, and imports would end in a long error."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def restore_interrupts() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    """End with the message and the exit status of an interrupted program."""
    sys.stderr.write("\ninterrupted\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def program_name() -> str:
    """Return the name of the running script for messages.

    Returns:
        `str`: such as `hf-vanilla translate` or, if it was started as a file, `translate.py`.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    parent, _, name = spec.name.rpartition(".") if spec is not None else ("", "", "")
    if parent == MODULE:
        return f"hf-vanilla {name.replace('_', '-')}"
    return sys.argv[0].replace("\\", "/").rpartition("/")[2]


def command_of_script(name: str) -> str:
    """Return the command of another script, for messages: as the running one was started.

    Args:
        name (`str`): Name of the script, without `.py`.

    Returns:
        `str`: such as `hf-vanilla translate` or `python scripts/translate.py`.
    """
    if program_name().startswith("hf-vanilla "):
        return f"hf-vanilla {name.replace('_', '-')}"
    return f"python scripts/{name}.py"


def answer_from_table(name: str, arguments: list[str], program: str) -> None:
    """Answer as far as the table of options suffices. Help and errors end the program.

    Of the options of transformers' trainer it has names and types, of one version of transformers. If another one is
    installed, the script itself checks them.

    Args:
        name (`str`): Name of the command, such as `train-translation`.
        arguments (`list[str]`): Its arguments.
        program (`str`): Name of the program for messages.
    """
    table = load_table()
    command = table["commands"].get(name)
    if command is None:
        return
    trainer = None
    if version("transformers") == table["transformers"]:
        trainer = table["trainers"]
    answer(command, arguments, program, trainer)
    _check_modules(name, program)


def _check_modules(name: str, program: str) -> None:
    """End the program if a command lacks packages, which it would else need after minutes of work."""
    missing = {extra: None for module, extra in NEEDED_MODULES.get(name, {}).items() if find_spec(module) is None}
    if missing:
        package = f'"hf_vanilla[{",".join(missing)}]"'
        sys.stderr.write(f"error: {program} needs packages that are not installed: pip install {package}\n")
        sys.exit(1)
