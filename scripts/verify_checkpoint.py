#!/usr/bin/env python
"""Verify checkpoints: can a run be resumed from them, byte for byte as they were written?

    python scripts/verify_checkpoint.py runs/en-de                  # all checkpoints of a run
    python scripts/verify_checkpoint.py runs/en-de/checkpoint-5000

A checkpoint with a manifest is compared with it. One without, of an earlier version or of the stock trainer, is
checked as far as its files show damage. The exit status is 1 if any is damaged or incomplete.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("verify_checkpoint")

import sys
from dataclasses import dataclass, field
from pathlib import Path

from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.training.checkpoints import folders_by_step, why_not_resumable
from hf_vanilla.training.manifest import MANIFEST_FILE


@dataclass
class VerificationArguments:
    """The checkpoints."""

    folder: str = field(metadata={"help": "A checkpoint, or the folder of a run; --folder itself may be left out."})


def main() -> None:
    """Verify each checkpoint, and print the result."""
    if len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
        sys.argv.insert(1, "--folder")
    (arguments,) = parse_arguments(VerificationArguments, description=__doc__)
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise ValueError(f"`folder` must be a checkpoint or the folder of a run, but there is no folder {folder}.")
    checkpoints = list(folders_by_step(folder).values()) or [folder]
    damaged = 0
    for checkpoint in checkpoints:
        reason = why_not_resumable(checkpoint)
        damaged += reason is not None
        checked = "as written" if (checkpoint / MANIFEST_FILE).exists() else f"complete, but has no {MANIFEST_FILE}"
        print(f"{checkpoint}: {checked if reason is None else f'NOT GOOD, it has {reason}'}")
    if damaged:
        raise ValueError(f"{damaged} of {len(checkpoints)} checkpoints can't be resumed from.")


if __name__ == "__main__":
    sys.exit(run(main))
