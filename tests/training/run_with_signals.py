"""A training to send signals to, run by test_signals.py: `run_with_signals.py <trainer> <folder> <slow place>`.

It trains, from the newest checkpoint if there is one, and saves the final weights. Where it is slow it makes a file
`slow`, and sleeps. Its output is in the file `log`.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from tiny_translation import tiny_collator, tiny_model, tiny_pairs, tiny_tokenizer, weights_of
from transformers import Seq2SeqTrainer, TrainerCallback

from hf_vanilla.command_line.options import run
from hf_vanilla.training import (
    VanillaTrainer,
    VanillaTrainingArguments,
    checkpoint_to_resume,
    lock_run_folder,
    train_to_end,
)


STEPS = 8
SLOW_STEP = 3
EVALUATED_STEP = 4


class SlowAt(TrainerCallback):
    """Sleeps in one of the places."""

    def __init__(self, place: str, folder: Path) -> None:
        self.place = place
        self.file = folder / "slow"

    def sleep(self, place: str, seconds: float) -> None:
        if place == self.place:
            self.file.touch()
            for _ in range(round(seconds * 10)):
                time.sleep(0.1)

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        if state.global_step == SLOW_STEP - 1:
            self.sleep("step", 1.0)
            self.sleep("long step", 60.0)

    def on_prediction_step(self, args, state, control, **kwargs) -> None:
        if state.global_step in (0, EVALUATED_STEP):
            self.sleep("evaluation" if state.global_step else "first evaluation", 0.4)

    def on_save(self, args, state, control, **kwargs) -> None:
        if state.global_step == SLOW_STEP:
            self.sleep("save", 1.0)


def main(kind: str, folder: Path, place: str) -> None:
    """Train in the folder, and write the weights to a file in it."""
    folder.mkdir(exist_ok=True)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would ignore it
    sys.exit(run(lambda: train(kind, folder, place)))


def train(kind: str, folder: Path, place: str) -> None:
    """Train in the folder, and write the weights to a file in it."""
    arguments = VanillaTrainingArguments(
        str(folder), max_steps=STEPS, save_steps=SLOW_STEP, eval_steps=EVALUATED_STEP, stop_grace=3.0,
        eval_strategy="steps", save_total_limit=2, use_cpu=True, disable_tqdm=True, report_to="none",
        per_device_eval_batch_size=1, dataloader_pin_memory=False, logging_steps=100,
        eval_on_start=place == "first evaluation",
    )  # fmt: skip
    slow = SlowAt(place, folder)
    model, pairs = tiny_model(dropout=0.1), tiny_pairs(24)
    trainer = {"vanilla": VanillaTrainer, "stock": Seq2SeqTrainer}[kind](
        model, arguments, tiny_collator(model), train_dataset=pairs, eval_dataset=tiny_pairs(12, seed=6),
        processing_class=tiny_tokenizer(), callbacks=[slow],
    )  # fmt: skip
    with lock_run_folder(folder, is_main_process=arguments.should_save):
        if place == "data":
            slow.sleep(place, 60.0)
        train_to_end(trainer, checkpoint_to_resume(folder))
    if arguments.should_save:
        torch.save(weights_of(trainer), folder / "weights.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
