"""The report of a run: its environment, and its results."""

import json
import os
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..data.files import replacing_file


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
