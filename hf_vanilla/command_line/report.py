"""The report of a run: its environment, and its results."""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

from ..data.files import replacing_file
from ..hub.run_settings import describe_environment


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


def show_report(report: dict[str, Any]) -> None:
    """Print the main score of a fine-tuning, one line for each evaluation set.

    Args:
        report (`dict[str, Any]`): From `hf_vanilla.training.seeds_report`.
    """
    count = len(report["seeds"])
    for name, figures in report["summary"].items():
        scores = ", ".join(f"{which} {value:.4f}" for which, value in figures.items())
        shown = f"over {count} seeds: {scores}" if count > 1 else f"{figures['median']:.4f}"
        sys.stderr.write(f"{name} {report['main_score']} {shown}\n")


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


__all__ = ["ReadableProgress", "describe_environment", "show_report", "write_report"]
