"""Write the table of options that `hf-vanilla` answers --help from; `make options` runs this."""

import contextlib
import io
import json
import re
import runpy
import sys
from importlib.metadata import version
from pathlib import Path


ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
TABLE = ROOT / "hf_vanilla_cli" / "options.json"
# Groups of the listing, by the first word of a command's name.
GROUPS = {
    "Try": ("demo",),
    "Train": ("train", "pretrain", "estimate"),
    "Fine-tune": ("finetune", "sweep"),
    "Use": ("translate", "generate", "score", "extract"),
    "Evaluate": ("evaluate", "plot"),
    "Models": ("average", "export", "verify", "push", "write"),
    "Others": (),
}


def describe(script, *task):
    """Return what a script says about its options."""
    before = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *task, "--describe_options"], [str(SCRIPTS), *sys.path]
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path = before
    return json.loads(shown.getvalue())


def describe_all():
    """Return the table: each command, and the options of each class of transformers' training arguments."""
    trainers = {}

    def without_trainer(command):
        if "trainer" in command:
            names = ("name", "type", "nargs", "choices", "negation", "aliases")
            short = [{name: option[name] for name in names if name in option} for option in command["trainer"]]
            command["trainer"] = command.pop("trainer_class")
            trainers[command["trainer"]] = short
        return command

    commands = {}
    for script in SCRIPTS.glob("[a-z]*.py"):
        module = runpy.run_path(str(script), run_name=script.stem)
        text = module["__doc__"].strip()
        name = script.stem.replace("_", "-")
        if "TASKS" in module:
            tasks = {task: without_trainer(describe(script, task)) for task in module["TASKS"]}
            commands[name] = {"description": text, "tasks": tasks}
        else:
            commands[name] = without_trainer(describe(script))
        group = next((group for group, words in GROUPS.items() if name.split("-")[0] in words), "Others")
        commands[name] = {"group": group, "summary": re.split("[,:.]", text)[0], **commands[name]}
    order = list(GROUPS)
    names = sorted(commands, key=lambda name: (order.index(commands[name]["group"]), name))
    return {
        "transformers": version("transformers"),
        "trainers": dict(sorted(trainers.items())),
        "commands": {name: commands[name] for name in names},
    }


def written(table):
    """Return the text of the file, with each option on a line of its own."""
    text = json.dumps(table, indent=1, ensure_ascii=False)
    for innermost in (r"\[\n[^][{}]*?\n\s*\]", r"\{\n[^{}]*?\n\s*\}"):
        text = re.sub(innermost, lambda found: re.sub(r"\s*\n\s*", " ", found[0]), text)
    return text + "\n"


if __name__ == "__main__":
    TABLE.write_text(written(describe_all()), encoding="utf-8")
