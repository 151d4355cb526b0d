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
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

from ..data.files import replacing_file


class ReadableProgress(ProgressCallback):
    """The stock progress bar, with a readable line for the loss in place of a dictionary."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write step and loss above the bar."""
        if state.is_world_process_zero and self.training_bar is not None and logs is not None and "loss" in logs:
            self.training_bar.write(f"step {state.global_step:>5}   loss {float(logs['loss']):.3f}")


def describe_environment(*packages: str) -> dict[str, dict[str, Any]]:
    """Describe versions and machine, for a file of results.

    Args:
        *packages (`str`): Further packages whose versions to record.

    Returns:
        `dict[str, dict[str, Any]]`: `versions` of Python and packages, and the `machine`.
    """
    names = ("hf_vanilla", "torch", "transformers", "tokenizers", *packages)
    machine: dict[str, Any] = {"architecture": platform.machine(), "cores": os.cpu_count() or 0}
    machine["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    machine["processor"] = _processor_name()
    if os.environ.get("LD_PRELOAD"):  # such as another `malloc`
        machine["preloaded"] = [Path(each).name for each in re.split("[ :]+", os.environ["LD_PRELOAD"]) if each]
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    versions = {"python": platform.python_version(), **{name: version(name) for name in names}}
    return {"versions": versions, "machine": machine}


def _processor_name() -> str:
    """Return the model of the processor, from Linux or else from Python."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", file.read_text(), flags=re.MULTILINE) if file.exists() else None
    return found[1] if found else platform.processor()


def show_report(report: dict[str, Any]) -> None:
    """Print the main score of a fine-tuning, one line for each evaluation set.

    Args:
        report (`dict[str, Any]`): From `hf_vanilla.training.seeds_report`.
    """
    for name, figures in report["summary"].items():
        scores = ", ".join(f"{which} {value:.4f}" for which, value in figures.items())
        sys.stderr.write(f"{name} {report['main_score']} over {len(report['seeds'])} seed(s): {scores}\n")


def write_report(path: str, report: dict[str, Any], *packages: str) -> None:
    """Write results to a JSON file, with versions and machine.

    Args:
        path (`str`): The file, which appears when it is complete; its folder is created if necessary.
        report (`dict[str, Any]`): The results.
        *packages (`str`): Further packages whose versions to record.

    Raises:
        ValueError: if the file can't be written.
    """
    Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(path) as file:
        file.write(json.dumps({**report, **describe_environment(*packages)}, indent=2, ensure_ascii=False) + "\n")
