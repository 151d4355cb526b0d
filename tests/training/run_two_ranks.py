"""One process of a distributed run: trains with both trainers, and saves its results.

Run by test_distributed.py, with `torchrun` or `accelerate launch`, as `run_two_ranks.py <folder>`; also imported by it
to make the same runs in one process.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import transformers
from packaging.version import Version
from tiny_translation import Recorder, tiny_collator, tiny_model, tiny_pairs, tiny_tokenizer, weights_of
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Seq2SeqTrainer, TrainerCallback

from hf_vanilla import VanillaBertConfig, VanillaBertForPreTraining
from hf_vanilla.command_line.options import leave_process_group
from hf_vanilla.training import VanillaTrainer, VanillaTrainingArguments


NUM_PAIRS = 48  # the stock batches fill an epoch without a remainder
NUM_EVAL_PAIRS = 9  # an odd number: two processes can't share it evenly
SETTINGS = {"stock": {"per_device_train_batch_size": 4}, "vanilla": {"max_tokens_per_batch": 30}}
SAVED_STEP = 7  # in the middle of the second epoch
# Before, several processes on CPU can't load an optimiser: it asks torch for the device "cpu:0".
CAN_RESUME = Version(transformers.__version__) >= Version("5.18")


def make_trainer(kind: str, folder: Path, recorder: Recorder, pairs: Any = None, **changes: Any) -> Seq2SeqTrainer:
    """Return a trainer whose global batches do not depend on the numbers of processes and accumulated batches."""
    quiet = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False}
    schedule = {"num_train_epochs": 2, "learning_rate": 0.01, "logging_steps": 1, **SETTINGS[kind]}
    arguments = VanillaTrainingArguments(str(folder / kind), **{**quiet, **schedule, **changes})
    model, pairs = tiny_model(), tiny_pairs(NUM_PAIRS) if pairs is None else pairs
    if kind == "stock":
        return Seq2SeqTrainer(model, arguments, tiny_collator(model), train_dataset=pairs, callbacks=[recorder])
    return VanillaTrainer(
        model, arguments, train_dataset=pairs, processing_class=tiny_tokenizer(), callbacks=[recorder]
    )


def train(kind: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """Train, and return gradients, losses and weights."""
    recorder = Recorder()
    trainer = make_trainer(kind, folder, recorder, **changes)
    trainer.train()
    return {"gradients": recorder.gradients, "losses": recorder.losses, "weights": weights_of(trainer)}


def resume(folder: Path) -> dict[str, torch.Tensor]:
    """Train with `VanillaTrainer`, resume in the middle of an epoch, and return the final weights."""
    output_dir = folder / "resumed"
    saving = {"save_strategy": "steps", "save_steps": SAVED_STEP}
    make_trainer("vanilla", output_dir, Recorder(), **saving).train()
    trainer = make_trainer("vanilla", output_dir, Recorder(), **saving)
    trainer.train(resume_from_checkpoint=str(output_dir / "vanilla" / f"checkpoint-{SAVED_STEP}"))
    return weights_of(trainer)


def train_on_stream(folder: Path) -> dict[str, Any]:
    """Train on a stream, which the processes share, and again from a checkpoint."""
    weights = []
    checkpoint = str(folder / "streamed" / "vanilla" / f"checkpoint-{SAVED_STEP}")
    for resumed in (None, checkpoint):
        stream = tiny_pairs(NUM_PAIRS - 1).to_iterable_dataset()  # an odd number: the shares differ in size
        saving = {"save_strategy": "steps", "save_steps": SAVED_STEP, "max_steps": 16, "stream_buffer": 9}
        trainer = make_trainer("vanilla", folder / "streamed", Recorder(), stream, **saving)
        trainer.train(resume_from_checkpoint=resumed)
        weights.append(weights_of(trainer))
    number = f"_{trainer.args.process_index}" if trainer.args.world_size > 1 else ""
    state = Path(checkpoint, f"stream_state{number}.json")
    buffer = json.loads(state.read_text())["stream"]["buffer_start"]["buffer"]
    return {"whole": weights[0], "resumed": weights[1], "buffer": buffer}


def predict(folder: Path) -> dict[str, Any]:
    """Evaluate an untrained model with token-budget batches."""
    trainer = make_trainer("vanilla", folder, Recorder())
    output = trainer.predict(tiny_pairs(NUM_EVAL_PAIRS, seed=6))
    return {
        "loss": (output.metrics or {})["test_loss"],
        "labels": torch.from_numpy(output.label_ids),
        "logits": torch.from_numpy(output.predictions[0]),
    }


class Reductions(TrainerCallback):
    """Counts the reductions of gradients between processes; small models have a single bucket of them."""

    def __init__(self, trainer: Seq2SeqTrainer) -> None:
        self.trainer = trainer
        self.count = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.model_wrapped.register_comm_hook(self, Reductions.add)

    @staticmethod
    def add(counter: "Reductions", bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        counter.count += 1
        return allreduce_hook(None, bucket)


def count_reductions(folder: Path, accumulation: int) -> dict[str, Any]:
    """Train with `VanillaTrainer` between processes, and count."""
    trainer = make_trainer("vanilla", folder, Recorder(), gradient_accumulation_steps=accumulation)
    counter = Reductions(trainer)
    trainer.add_callback(counter)
    trainer.train()
    return {
        "reductions": counter.count,
        "updates": trainer.state.global_step,
        "find_unused_parameters": trainer.model_wrapped.find_unused_parameters,
    }


def tiny_bert() -> VanillaBertForPreTraining:
    """Return a BERT with always the same weights."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20)
    no_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return VanillaBertForPreTraining(VanillaBertConfig(**sizes, **no_dropout, initializer_range=0.2))


SHARDED = {"transformer": tiny_model, "bert": tiny_bert}
ACCUMULATED = 4  # batches of an update, over all processes


def train_sharded(kind: str, rank: int = 0, world_size: int = 1) -> dict[str, torch.Tensor]:
    """Make three updates, each of four batches with different numbers of labels, sharded over several processes."""
    model: Any = SHARDED[kind]().train()
    if world_size > 1:
        layers = [each for each in model.modules() if type(each).__name__ in ("EncoderLayer", "DecoderLayer")]
        for module in [*layers, model]:
            fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        batches = []
        for number in range(ACCUMULATED):
            ids, labels = torch.randint(4, 29, (2, 3, 5 + number), generator=generator)
            labels[0, : 2 + number] = -100
            pairs = {} if kind == "transformer" else {"next_sentence_label": torch.tensor([0, 1, 1])}
            batches.append({"input_ids": ids, "labels": labels, **pairs})
        labels_of_update = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        own = batches[rank::world_size]
        for number, batch in enumerate(own):
            if world_size > 1:
                model.set_requires_gradient_sync(number == len(own) - 1)
            loss = model(**batch, num_items_in_batch=labels_of_update).loss
            (loss * world_size).backward()  # the processes take the mean of their gradients
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach()
        for name, each in model.named_parameters()
    }


def main() -> None:
    """Make all runs, and save the results of this process to a file."""
    folder = Path(sys.argv[1])
    seen: dict[str, Any] = {kind: train(kind, folder) for kind in SETTINGS}
    if CAN_RESUME:
        seen["resumed"] = resume(folder)
        seen["streamed"] = train_on_stream(folder)
    seen["predicted"] = predict(folder)
    is_distributed = torch.distributed.is_initialized()
    seen["world_size"] = torch.distributed.get_world_size() if is_distributed else 1
    rank = torch.distributed.get_rank() if is_distributed else 0
    if is_distributed:
        seen["reductions"] = {accumulation: count_reductions(folder, accumulation) for accumulation in (1, 3)}
        seen["sharded"] = {kind: train_sharded(kind, rank, seen["world_size"]) for kind in SHARDED}
    torch.save(seen, folder / f"rank-{rank}.pt")
    leave_process_group()


if __name__ == "__main__":
    main()
