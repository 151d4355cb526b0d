"""One process of a training in which one process after the other is killed: `run_with_deaths.py FOLDER DEATHS`.

DEATHS names the rank and the place of a death in each attempt, as `1-start,1-step,0-save`, and `1-hang` for a process
that hangs. In the second attempt the first process prepares its data for longer than `ddp_timeout`. The training
resumes from the newest checkpoint, and saves the final weights. The file `times` has the times of deaths and starts.
"""

import os
import sys
import time


if __name__ == "__main__":  # before the imports, which take seconds
    with open(f"{sys.argv[1]}/times", "a") as times:
        times.write(f"start {time.time()}\n")

import signal
from pathlib import Path

import torch
from tiny_translation import tiny_collator, tiny_model, tiny_pairs, tiny_tokenizer, weights_of
from transformers import TrainerCallback

from hf_vanilla.training import (
    VanillaTrainer,
    VanillaTrainingArguments,
    checkpoint_to_resume,
    lock_run_folder,
    main_process_first,
    train_to_end,
)


STEPS = 9
SAVED_EVERY = 2
KILLED_STEP = 6
TIMEOUT = 30
RANK, ATTEMPT = (int(os.environ.get(name, "0")) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))


def die(place: str) -> None:
    """Kill this process or have it hang, if this is the place of its death in this attempt."""
    deaths = sys.argv[2].split(",")
    if deaths[ATTEMPT : ATTEMPT + 1] == [f"{RANK}-{place}"]:
        with open(f"{sys.argv[1]}/times", "a") as times:
            times.write(f"death {time.time()}\n")
        if place == "hang":
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)


class DieInStep(TrainerCallback):
    """Kills a process before the update of a step."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        if state.global_step == KILLED_STEP - 1:
            die("step")
            die("hang")


class DyingTrainer(VanillaTrainer):
    """Kills a process that has saved the weights of a checkpoint, but not its other files."""

    def save_model(self, *args, **kwargs) -> None:
        super().save_model(*args, **kwargs)
        if self.state.global_step == KILLED_STEP:
            die("save")


def main() -> None:
    """Train in the folder, and write the weights to a file in it."""
    folder = Path(sys.argv[1])
    die("start")
    arguments = VanillaTrainingArguments(
        str(folder), max_steps=STEPS, save_steps=SAVED_EVERY, use_cpu=True, disable_tqdm=True, report_to="none",
        dataloader_pin_memory=False, ddp_timeout=TIMEOUT, stop_grace=3.0,
    )  # fmt: skip
    with main_process_first(arguments):
        time.sleep(TIMEOUT + 2 if (RANK, ATTEMPT) == (0, 1) else 0)
    model = tiny_model(dropout=0.1)
    trainer = DyingTrainer(
        model, arguments, tiny_collator(model), train_dataset=tiny_pairs(24), processing_class=tiny_tokenizer(),
        callbacks=[DieInStep()],
    )  # fmt: skip
    with lock_run_folder(folder, is_main_process=arguments.should_save):
        train_to_end(trainer, checkpoint_to_resume(folder))
    if arguments.should_save:
        torch.save(weights_of(trainer), folder / "weights.pt")


if __name__ == "__main__":
    main()
