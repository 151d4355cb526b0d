"""Ways to run a script."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest


SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(script, *arguments, stdin=None):
    """Run a script in a new process."""
    command = [sys.executable, SCRIPTS / script, *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, check=False)


def run_here(monkeypatch, script, *arguments):
    """Run a script in this process, which is quicker, and return its exit status."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / script), *map(str, arguments)])
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return ending.value.code
