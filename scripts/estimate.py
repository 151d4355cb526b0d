#!/usr/bin/env python
r"""Estimate what a training costs on this machine: time, memory and operations, in float32 and in bfloat16.

The first argument is the training, and the options of its script follow:

    python scripts/estimate.py train_translation \
        --train_source_file train.en --train_target_file train.de --vocab_size 10000 \
        --max_tokens_per_batch 4096 --max_steps 10000 --output_dir runs/en-de

    python scripts/estimate.py pretrain_bert --help

The tokenizer is trained and the text tokenized as in the training; then a few updates are measured. Nothing is kept,
and nothing is written to --output_dir. The time is that of the updates of one process, without evaluation and saving.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("estimate")

import dataclasses
import importlib
import inspect
import sys
import tempfile
from pathlib import Path

import torch
from transformers import TrainingArguments

from hf_vanilla.command_line.options import parse_arguments, run, take_task
from hf_vanilla.precision import fastest_precision
from hf_vanilla.training import Estimate, estimate


TASKS = ("train_translation", "pretrain_bert")


def import_script(name: str):
    """Import a script, from the installed package or from the folder of this file."""
    return importlib.import_module(f".{name}", __package__) if __package__ else importlib.import_module(name)


def training_arguments_of(script) -> type[TrainingArguments]:
    """Return the class of a script's training arguments."""
    (found,) = (
        each
        for each in vars(script).values()
        if inspect.isclass(each) and issubclass(each, TrainingArguments) and each.__module__ == script.__name__
    )
    return found


def total(phases: list[tuple[Estimate, float]]) -> Estimate:
    """Add up the estimates of phases with these shares of the updates."""
    estimates = [each for each, _ in phases]
    return dataclasses.replace(
        estimates[0],
        tokens_per_update=sum(each.tokens_per_update * share for each, share in phases),
        flops=sum(each.flops for each in estimates),
        memory=max(each.memory for each in estimates),
        seconds=sum(each.seconds for each in estimates),
    )


def main() -> None:
    """Prepare the data like the training's script, and measure."""
    script = import_script(take_task(TASKS))
    model_args, data_args, training_args = parse_arguments(
        script.ModelArguments, script.DataArguments, training_arguments_of(script), description=__doc__
    )
    for name in ("max_steps", "max_tokens_per_batch"):
        if (getattr(training_args, name) or 0) < 1:
            raise ValueError(f"`{name}` is missing; give it as --{name}.")
    if getattr(training_args, "consistency_weight", 0) > 0 or getattr(training_args, "teacher_forcing_ratio", 1) < 1:
        raise ValueError("`consistency_weight` and `teacher_forcing_ratio` can't be estimated; leave them out.")
    if getattr(data_args, "streaming", False):
        raise ValueError("`streaming` can't be estimated, as the number of examples is not known; leave it out.")
    accumulated = training_args.gradient_accumulation_steps  # batches of an update
    choice = fastest_precision(training_args.device)
    has_bfloat16 = choice.dtype == torch.bfloat16 or choice.gflops is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Windows keeps mapped files
        phases = script.plan(model_args, data_args, training_args, Path(folder))
        for name in ("float32", "bfloat16")[: 1 + has_bfloat16]:
            estimates = []
            for config, examples, share in phases:
                cost = estimate(
                    config,
                    examples,
                    updates=max(1, round(training_args.max_steps * share)) * accumulated,
                    max_tokens_per_batch=training_args.max_tokens_per_batch,
                    bf16=name == "bfloat16",
                )
                cost.tokens_per_update *= accumulated
                estimates.append((cost, share))
            print(f"{name}: {total(estimates)}")
    print(f"--precision fastest chooses {choice}.")


if __name__ == "__main__":
    sys.exit(run(main))
