"""What each process of a distributed run does: train with both trainers, and write down what it saw.

Run by test_distributed.py, with `torchrun` or `accelerate launch`, as `run_two_ranks.py <folder>`; also imported by it
to make the same runs in one process.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import transformers
from packaging.version import Version
from tiny_translation import Recorder, tiny_collator, tiny_model, tiny_pairs, tiny_tokenizer, weights_of
from transformers import Seq2SeqTrainer

from hf_vanilla.training import VanillaTrainer, VanillaTrainingArguments


NUM_PAIRS = 48  # the stock batches fill an epoch without a remainder
NUM_EVAL_PAIRS = 9  # an odd number: two processes can't share it evenly
SETTINGS = {"stock": {"per_device_train_batch_size": 4}, "vanilla": {"max_tokens_per_batch": 30}}
SAVED_STEP = 7  # in the middle of the second epoch
# Before, several processes on CPU can't load an optimiser: it asks torch for the device "cpu:0".
CAN_RESUME = Version(transformers.__version__) >= Version("5.18")


def make_trainer(kind: str, folder: Path, recorder: Recorder, **changes: Any) -> Seq2SeqTrainer:
    """Return a trainer whose global batches do not depend on how many processes and accumulated batches make them."""
    quiet = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False}
    schedule = {"num_train_epochs": 2, "learning_rate": 0.01, "logging_steps": 1, **SETTINGS[kind]}
    arguments = VanillaTrainingArguments(str(folder / kind), **{**quiet, **schedule, **changes})
    model, pairs = tiny_model(), tiny_pairs(NUM_PAIRS)
    if kind == "stock":
        return Seq2SeqTrainer(model, arguments, tiny_collator(model), train_dataset=pairs, callbacks=[recorder])
    return VanillaTrainer(
        model, arguments, train_dataset=pairs, processing_class=tiny_tokenizer(), callbacks=[recorder]
    )


def train(kind: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """Train, and return what a run is compared by."""
    recorder = Recorder()
    trainer = make_trainer(kind, folder, recorder, **changes)
    trainer.train()
    return {"gradients": recorder.gradients, "losses": recorder.losses, "weights": weights_of(trainer)}


def resume(folder: Path) -> dict[str, torch.Tensor]:
    """Train with `VanillaTrainer` to the middle of an epoch, start again from there, and return the final weights."""
    output_dir = folder / "resumed"
    saving = {"save_strategy": "steps", "save_steps": SAVED_STEP}
    make_trainer("vanilla", output_dir, Recorder(), **saving).train()
    trainer = make_trainer("vanilla", output_dir, Recorder(), **saving)
    trainer.train(resume_from_checkpoint=str(output_dir / "vanilla" / f"checkpoint-{SAVED_STEP}"))
    return weights_of(trainer)


def predict(folder: Path) -> dict[str, Any]:
    """Evaluate an untrained model with token-budget batches."""
    trainer = make_trainer("vanilla", folder, Recorder())
    output = trainer.predict(tiny_pairs(NUM_EVAL_PAIRS, seed=6))
    return {
        "loss": (output.metrics or {})["test_loss"],
        "labels": torch.from_numpy(output.label_ids),
        "logits": torch.from_numpy(output.predictions[0]),
    }


def main() -> None:
    """Make all runs and write what this process saw to a file of its own."""
    folder = Path(sys.argv[1])
    seen: dict[str, Any] = {kind: train(kind, folder) for kind in SETTINGS}
    if CAN_RESUME:
        seen["resumed"] = resume(folder)
    seen["predicted"] = predict(folder)
    is_distributed = torch.distributed.is_initialized()
    seen["world_size"] = torch.distributed.get_world_size() if is_distributed else 1
    rank = torch.distributed.get_rank() if is_distributed else 0
    torch.save(seen, folder / f"rank-{rank}.pt")
    if is_distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
