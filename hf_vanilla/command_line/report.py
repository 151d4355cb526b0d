"""The report of a run: its environment, and its results."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

from ..data.files import replacing_file
from ..hub.run_settings import describe_environment
from ..precision import fastest_precision


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


def describe_measured_environment(*packages: str) -> dict[str, dict[str, Any]]:
    """Describe versions and machine, and how fast its processor multiplies with the threads of this process.

    Args:
        *packages (`str`): Further packages whose versions to record.

    Returns:
        `dict[str, dict[str, Any]]`: as from [`~hf_vanilla.hub.run_settings.describe_environment`]; on a processor with
        bfloat16 products, `machine` has `cpu_threads` and `cpu_gflops` too, the 10^9 operations a second of products
        in float32 and bfloat16.
    """
    environment = describe_environment(*packages)
    speeds = fastest_precision().gflops
    if speeds is not None:
        gflops = {str(dtype).removeprefix("torch."): round(speed) for dtype, speed in speeds.items()}
        environment["machine"] |= {"cpu_threads": torch.get_num_threads(), "cpu_gflops": gflops}
    return environment


def write_report(path: str, report: dict[str, Any], *packages: str) -> None:
    """Write results to a JSON file, with versions, machine and the speed of its products.

    Args:
        path (`str`): The file, which appears when it is complete; its folder is created if necessary.
        report (`dict[str, Any]`): The results.
        *packages (`str`): Further packages whose versions to record.

    Raises:
        ValueError: if the file can't be written.
    """
    Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    report = {**report, **describe_measured_environment(*packages)}
    with replacing_file(path) as file:
        file.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


__all__ = ["ReadableProgress", "describe_environment", "describe_measured_environment", "show_report", "write_report"]
