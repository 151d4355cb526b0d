#!/usr/bin/env python
r"""What safe checkpoints and guards cost: the time of a training with them, over that of the stock trainer.

Both sides train the same masked-language BERT on the same batches of 8 rows of 128 tokens in bfloat16 and save a
checkpoint at the end of `--steps` updates, 500 by default. Ours has staging, manifests with hashes, the watch over
loss and weights and that for signals, as the training scripts have; the other is transformers' `Trainer`. Each turn
gives the time on the clock, start to end, and the CPU time of the process, which other work on the machine changes
less.

    python scripts/benchmark/checkpoint_overhead.py
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from measuring import BenchmarkArguments, now, prepare, report, take_turns
from transformers import Trainer, TrainingArguments, set_seed

from hf_vanilla import VanillaBertConfig, VanillaBertForMaskedLM
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.training import StopOnNaNCallback, VerifiedCheckpointTrainer, train_to_end


VOCAB_SIZE, ROWS, LENGTH = 30_522, 8, 128
TARGET = 1.02


@dataclass
class OverheadArguments(BenchmarkArguments):
    """Options of this benchmark."""

    steps: int = field(default=500, metadata={"help": "Updates of a turn, after which it saves a checkpoint."})


def random_examples(count: int) -> Dataset:
    """Make rows of random tokens, each seventh of them to predict."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCAB_SIZE, (count, LENGTH), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 1 / 7, ids, -100)
    return Dataset.from_dict({"input_ids": ids.numpy(), "labels": labels.numpy()})


def main() -> None:
    """Train with both sides in turn, and report."""
    (arguments,) = parse_arguments(OverheadArguments, description=__doc__)
    prepare(arguments)
    steps = min(arguments.steps, 4) if arguments.quick else arguments.steps
    examples = random_examples(ROWS * steps)
    config = VanillaBertConfig.preset("tiny" if arguments.quick else "mini", vocab_size=VOCAB_SIZE)
    seconds_of_cpu: dict[str, list[float]] = {"with, CPU time": [], "without, CPU time": []}

    def side(name: str, trainer_class: type[Trainer]) -> Callable[[], float]:
        def measure() -> float:
            folder = tempfile.mkdtemp(prefix="checkpoint_overhead_")
            args = TrainingArguments(
                folder, max_steps=steps, save_steps=steps, per_device_train_batch_size=ROWS, bf16=True,
                save_total_limit=2, logging_steps=50, report_to="none", disable_tqdm=True,
                use_cpu=not torch.accelerator.is_available(),
            )  # fmt: skip
            set_seed(0)
            trainer = trainer_class(VanillaBertForMaskedLM(config), args, train_dataset=examples)
            started, started_cpu = now(), time.process_time()
            if isinstance(trainer, VerifiedCheckpointTrainer):
                trainer.add_callback(StopOnNaNCallback())
                train_to_end(trainer)
            else:
                trainer.train()
            seconds = now() - started
            seconds_of_cpu[f"{name}, CPU time"].append(time.process_time() - started_cpu)
            shutil.rmtree(folder)
            return seconds

        return measure

    figures = take_turns(
        {"with": side("with", VerifiedCheckpointTrainer), "without": side("without", Trainer)}, arguments.repeats
    )
    report(
        arguments,
        "train BERT mini with safe checkpoints and guards, and with the stock trainer",
        "seconds",
        {**figures, **seconds_of_cpu},
        {
            "time on the clock, with over without": ("with", "without", TARGET),
            "CPU time, with over without": ("with, CPU time", "without, CPU time", TARGET),
        },
        steps=steps,
        rows=ROWS,
        length=LENGTH,
        vocab_size=VOCAB_SIZE,
    )


if __name__ == "__main__":
    sys.exit(run(main))
