#!/usr/bin/env python
"""Average checkpoints of a training run, as the paper does with the last 5 (base) or 20 (big).

The mean of the weights of several checkpoints usually translates better than any one of them. The result is a folder
like any checkpoint: `AutoModelForSeq2SeqLM.from_pretrained("averaged")` loads it.

For example, the last five checkpoints of the run in the folder `out`:
    python scripts/average_checkpoints.py --run_dir out --last 5 --output_dir averaged
the five with the highest BLEU on the validation data, of a run with --eval_strategy steps and --eval_steps equal to
its --save_steps:
    python scripts/average_checkpoints.py --run_dir out --best 5 --metric eval_bleu --output_dir averaged
or these two:
    python scripts/average_checkpoints.py --checkpoints out/checkpoint-900 out/checkpoint-1000 --output_dir averaged
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("average_checkpoints")

import sys
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import PartialState

from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.training import average_checkpoints, best_checkpoints, last_checkpoints


@dataclass
class AverageArguments:
    """The checkpoints, selected by one of `last`, `best` and `checkpoints`, and where to write their average."""

    output_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder to write the averaged model to; it must be new or empty. Default: a subfolder of "
            "--run_dir, as averaged-best-5."
        },
    )
    run_dir: str | None = field(
        default=None,
        metadata={"help": "Folder of a training run (its --output_dir), with checkpoint-1000, checkpoint-2000 ..."},
    )
    last: int | None = field(default=None, metadata={"help": "Average this many last checkpoints of the run."})
    best: int | None = field(
        default=None, metadata={"help": "Average this many checkpoints with the best values of --metric."}
    )
    metric: str | None = field(
        default=None,
        metadata={
            "help": "Metric of the run's evaluations that --best compares, such as eval_bleu. Default: eval_loss."
        },
    )
    checkpoints: list[str] | None = field(
        default=None,
        metadata={"help": "Folders to average, instead of --run_dir. The config is that of the last one."},
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace --output_dir if there is a model in it."})

    def __post_init__(self) -> None:
        selections = [name for name in ("last", "best", "checkpoints") if getattr(self, name) is not None]
        if len(selections) != 1:
            given = " and ".join(f"--{name}" for name in selections) or "none"
            raise ValueError(f"Select checkpoints with one of --last, --best and --checkpoints; got {given}.")
        if (self.run_dir is None) != (selections == ["checkpoints"]):
            raise ValueError("--last and --best need --run_dir; --checkpoints can't be combined with it.")
        if self.output_dir is None and self.run_dir is None:
            raise ValueError("--checkpoints needs --output_dir, the folder to write to.")
        if self.output_dir is None:
            self.output_dir = str(Path(str(self.run_dir)) / f"averaged-{selections[0]}-{getattr(self, selections[0])}")
        if self.metric is not None and self.best is None:
            raise ValueError("--metric needs --best.")


def choose_checkpoints(arguments: AverageArguments) -> list[Path]:
    """Return the folders that the arguments select."""
    if arguments.run_dir is None:
        return [Path(checkpoint) for checkpoint in arguments.checkpoints or []]
    if arguments.best is not None:
        return best_checkpoints(arguments.run_dir, arguments.best, arguments.metric or "eval_loss")
    return last_checkpoints(arguments.run_dir, arguments.last or 0)


def main() -> None:
    """Average on the first process; the others wait for it."""
    (arguments,) = parse_arguments(AverageArguments, description=__doc__)
    processes = PartialState(cpu=True)
    try:
        if processes.is_main_process:
            checkpoints = choose_checkpoints(arguments)
            print("Averaging", *checkpoints, sep="\n  ")
            print("Written to", average_checkpoints(checkpoints, arguments.output_dir, overwrite=arguments.overwrite))
    finally:
        processes.wait_for_everyone()


if __name__ == "__main__":
    sys.exit(run(main))
