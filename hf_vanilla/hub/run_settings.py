"""The settings of a training, which it saves next to its model for the model card."""

import json
import os
import platform
import re
from collections.abc import Sized
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from ..data.files import replacing_file


RUN_SETTINGS_FILE = "_run_settings.json"


def describe_run(trainer: Trainer) -> dict[str, Any]:
    """Describe a training: settings, sizes of the data, versions, machine and signatures of scores.

    Args:
        trainer (`Trainer`): The trainer, after its training.

    Returns:
        `dict[str, Any]`: `notes`, text by name; `versions` and `machine` as from [`describe_environment`].
    """
    args = trainer.args
    devices = f" on each of {args.world_size} devices" if args.world_size > 1 else ""
    max_tokens = getattr(args, "max_tokens_per_batch", None)
    batch = f"{max_tokens:,} tokens" if max_tokens else f"{args.train_batch_size:,} examples"
    accumulated = args.gradient_accumulation_steps
    optimizer = getattr(args.optim, "value", args.optim)
    if getattr(args, "muon", False):
        optimizer = f"Muon for the matrices of the layers, for all else {optimizer}"
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    notes = {
        "learning rate": f"{args.learning_rate:.4g} at its peak",
        "schedule": f"{schedule}, warm-up over {args.get_warmup_steps(trainer.state.max_steps):,} updates",
        "batch": batch + devices + (f", {accumulated} accumulated" if accumulated > 1 else ""),
        "optimizer": f"{optimizer}, betas {args.adam_beta1:g} and {args.adam_beta2:g}, epsilon {args.adam_epsilon:g}, "
        f"weight decay {args.weight_decay:g}",
        "gradient norm": f"at most {args.max_grad_norm:g}" if args.max_grad_norm else "not clipped",
        "precision": "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
        "seed": str(args.seed),
    }
    averaged = getattr(args, "average_last", 0)  # an option of train_translation.py
    if averaged:
        notes["weights"] = f"the mean of the last {averaged} checkpoints"
    elif args.load_best_model_at_end:
        notes["weights"] = f"those of the checkpoint with the best {args.metric_for_best_model}"
    for name, dataset in (("training", trainer.train_dataset), ("validation", trainer.eval_dataset)):
        if isinstance(dataset, Sized) and not isinstance(dataset, dict):
            notes[f"{name} examples"] = f"{len(dataset):,}"
    signatures = getattr(trainer.compute_metrics, "signatures", {})
    notes |= {f"{name} signature": signature for name, signature in signatures.items()}
    return {"notes": notes, **describe_environment()}


def save_run_settings(trainer: Trainer, folder: Path) -> None:
    """Write [`describe_run`] to a folder.

    Args:
        trainer (`Trainer`): The trainer, after its training.
        folder (`Path`): The folder of the model.
    """
    with replacing_file(str(folder / RUN_SETTINGS_FILE)) as file:
        file.write(json.dumps(describe_run(trainer), indent=1, ensure_ascii=False) + "\n")


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
