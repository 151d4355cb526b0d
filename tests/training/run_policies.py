"""One process of two whose second has a loss that is nan, and whose first has a full disk.

Run by test_policies.py with `torchrun`, as `run_policies.py <folder>`. That test imports the training too.
"""

import math
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tiny_translation import tiny_collator, tiny_model, tiny_pairs, tiny_tokenizer, weights_of
from torch import distributed
from transformers import Seq2SeqTrainer, TrainerCallback

from hf_vanilla.command_line.options import leave_process_group
from hf_vanilla.training import NaNPolicyCallback, VanillaTrainer, VanillaTrainingArguments


POISON = 3  # a token that no other row has: the loss of its row is nan
BATCH = 4


def make_loss_nan(model, args, kwargs, output):
    """Hook of the model: spoil the loss of a batch with the token."""
    if output.loss is not None and (kwargs["input_ids"] == POISON).any():
        output.loss = output.loss * math.nan
    return output


def make_pairs(count: int, *poisoned: int) -> Dataset:
    """Return pairs, some of them with the token."""
    rows = tiny_pairs(count).to_list()
    for index in poisoned:
        rows[index]["input_ids"][0] = POISON
    return Dataset.from_list(rows)


def make_trainer(folder: Path, pairs: Dataset, kind: str = "vanilla", *callbacks: Any, **changes: Any) -> Any:
    """Return a trainer that takes the pairs in their order, with learning rates that do not depend on their number."""
    on_nan = changes.pop("on_nan", "stop")
    dropout = changes.pop("dropout", 0.0)
    settings = {
        "use_cpu": True, "disable_tqdm": True, "report_to": "none", "dataloader_pin_memory": False,
        "save_strategy": "no", "logging_steps": 1, "num_train_epochs": 1, "per_device_train_batch_size": BATCH,
        "train_sampling_strategy": "sequential", "lr_scheduler_type": "inverse_sqrt", "warmup_steps": 3,
        "learning_rate": 0.01,
    }  # fmt: skip
    if kind == "vanilla":
        settings["on_nan"] = on_nan
    arguments = VanillaTrainingArguments(str(folder), **{**settings, **changes})
    model = tiny_model(dropout=dropout)
    model.register_forward_hook(make_loss_nan, with_kwargs=True)
    trainer_class = VanillaTrainer if kind == "vanilla" else Seq2SeqTrainer
    policies = [] if kind == "vanilla" else [NaNPolicyCallback(on_nan)]
    return trainer_class(
        model, arguments, tiny_collator(model), train_dataset=pairs, eval_dataset=make_pairs(4),
        processing_class=tiny_tokenizer(), callbacks=[*callbacks, *policies],
    )  # fmt: skip


class SmallFilesAt(TrainerCallback):
    """Fails as a full disk does, at one step of this process: no file grows beyond some bytes."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        import resource

        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000 if state.global_step == self.step else most, most))


def outcome(trainer: Any) -> dict[str, Any]:
    """Train, and return the weights and the error."""
    try:
        trainer.train()
    except (ValueError, OSError) as error:
        return {"error": str(error), "weights": weights_of(trainer)}
    return {"error": None, "weights": weights_of(trainer)}


def main(folder: Path) -> None:
    """Make all runs, and save the results of this process."""
    rank = int(torch.distributed.get_rank()) if distributed.is_initialized() else 0
    # Rows of an update: the first four of the first process, the others of the second.
    whole = make_pairs(5 * 2 * BATCH, 2 * 2 * BATCH + BATCH + 1)
    rows = [index for index in range(len(whole)) if index // (2 * BATCH) != 2]
    seen = {
        "skip": outcome(make_trainer(folder / "skip", whole, on_nan="skip")),
        "expected": outcome(make_trainer(folder / "expected", whole.select(rows))),
        "stop": outcome(make_trainer(folder / "stop", whole)),
    }
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for policy in ("continue", "stop"):
        full = [SmallFilesAt(2)] if rank == 0 else []
        saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "on_disk_full": policy}
        trainer = make_trainer(folder / policy, whole.select(rows), "vanilla", *full, **saving)
        seen[policy + " when full"] = outcome(trainer)
        if full:
            full[0].step = 0
            full[0].on_step_end(None, trainer.state, None)
    torch.save(seen, folder / f"rank-{rank}.pt")
    leave_process_group()


if __name__ == "__main__":
    from accelerate import PartialState

    PartialState(cpu=True)
    main(Path(sys.argv[1]))
