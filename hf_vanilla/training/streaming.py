"""Training on a [`~hf_vanilla.data.TokenBudgetStream`]: its batches, and its state in the checkpoints.

    stream -> rows -> collator -> batch + state -> trainer
                                            `---> checkpoint-500/stream_state.json, one of each process

Batches are made ahead of the training. So the state travels with its batch, and a checkpoint gets that of the last
batch that was learnt from.
"""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers.utils import logging

from ..data.files import replacing_file
from ..data.streams import TokenBudgetStream
from .arguments import VanillaTrainingArguments
from .manifest import order_seed


logger = logging.get_logger(__name__)

STREAM_STATE = "stream_state"  # in a batch; text, which loaders pass on as it is


class StreamedTraining:
    """The batches of a stream for one call of `Trainer.train`, and the state after the last one that it got.

    Args:
        stream (`TokenBudgetStream`): The share of this process.
        collator (`Callable`): Makes a batch out of rows.
        args (`VanillaTrainingArguments`): The training arguments.
        checkpoint (`str`, *optional*): The checkpoint that the training resumes from.
    """

    def __init__(
        self,
        stream: TokenBudgetStream,
        collator: Callable[[list[dict[str, Any]]], Any],
        args: VanillaTrainingArguments,
        checkpoint: str | None,
    ) -> None:
        self.args = args
        self.rows = 0
        self.state: str | None = None
        self.batches = _BatchesWithState(copy.copy(stream), collator)  # another training begins anew
        if checkpoint is not None:
            self._resume(checkpoint)

    def dataloader(self, accelerator: Accelerator) -> DataLoader:
        """Return the loader of the batches.

        Args:
            accelerator (`Accelerator`): That of the trainer.

        Returns:
            `DataLoader`: which moves batches to the device. It does not divide them, as each process has its stream.
        """
        args = self.args
        loader = DataLoader(
            self.batches,
            batch_size=None,
            collate_fn=dict,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
            # Starting a loader draws a random number, on which the training must not depend.
            generator=torch.Generator().manual_seed(args.seed),
        )
        return prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,
            non_blocking=accelerator.non_blocking,
        )

    def take_states(self, batches: list[dict[str, Any]]) -> None:
        """Take the states out of the batches of an update, and keep the last.

        Args:
            batches (`list[dict]`): The batches, which are changed.
        """
        for batch in batches:
            self.state = batch.pop(STREAM_STATE)
            self.rows += len(batch["input_ids"])

    def save(self, folder: str, global_step: int) -> None:
        """Save the state in a checkpoint.

        Args:
            folder (`str`): The checkpoint.
            global_step (`int`): Its number of updates.
        """
        if self.state is not None:
            content = {"global_step": global_step, "stream": json.loads(self.state)}
            with replacing_file(str(self._path(folder))) as file:
                json.dump(content, file)

    def summary(self, accelerator: Accelerator, seconds: float) -> dict[str, float]:
        """Count what was read and skipped, over all processes, which must all call this.

        Args:
            accelerator (`Accelerator`): That of the trainer.
            seconds (`float`): Duration of the training.

        Returns:
            `dict[str, float]`: `train_samples_per_second` of this call; bad records and lost shards of the whole run.
        """
        state = {} if self.state is None else json.loads(self.state)
        counts = [self.rows, state.get("bad_records", 0), len(state.get("lost_shards", ()))]
        totals = torch.tensor(counts, device=accelerator.device)
        rows, bad, lost = accelerator.reduce(totals, reduction="sum").tolist()
        return {
            "train_samples_per_second": round(rows / max(seconds, 1e-9), 3),
            "train_bad_records": bad,
            "train_lost_shards": lost,
        }

    def _path(self, folder: str) -> Path:
        """Return the file of this process in a checkpoint."""
        number = f"_{self.args.process_index}" if self.args.world_size > 1 else ""
        return Path(folder, f"{STREAM_STATE}{number}.json")

    def _resume(self, checkpoint: str) -> None:
        """Begin after the last batch of a checkpoint; without its state, the trainer skips what it reads again."""
        path = self._path(checkpoint)
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            self.batches.stream.load_state_dict(saved["stream"])
        except (FileNotFoundError, ValueError) as error:
            if isinstance(error, ValueError) and not self.args.force_resume:
                raise ValueError(f"The training can't be resumed with the stream's state in {path}: {error}") from None
            logger.warning(f"Without {path}, the stream is read from its beginning up to the checkpoint: {error}")
            return
        self.state = json.dumps(saved["stream"])
        if not self.args.ignore_data_skip:
            updates = saved["global_step"] % self.args.max_steps
            self.batches.num_placeholders = updates * self.args.gradient_accumulation_steps


class _BatchesWithState(torch.utils.data.IterableDataset):
    """The collated batches of a stream, each with the state after it.

    A resumed trainer skips as many batches as were learnt from. It gets empty ones for these, as the stream begins
    after them.
    """

    def __init__(self, stream: TokenBudgetStream, collator: Callable[[list[dict[str, Any]]], Any]) -> None:
        self.stream = stream
        self.collator = collator
        self.num_placeholders = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self.num_placeholders):
            yield {}
        for rows in self.stream:
            yield {**self.collator(rows), STREAM_STATE: json.dumps(self.stream.state_dict())}


def stream_of_tokens(dataset: datasets.IterableDataset, args: VanillaTrainingArguments) -> TokenBudgetStream:
    """Make the token-budget batches that training arguments ask for.

    Args:
        dataset (`datasets.IterableDataset`): The stream of all processes.
        args (`VanillaTrainingArguments`): The training arguments, with `max_tokens_per_batch`.

    Returns:
        `TokenBudgetStream`: the share of this process.
    """
    stream = TokenBudgetStream(
        dataset,
        int(args.max_tokens_per_batch or 0),
        buffer_size=args.stream_buffer,
        seed=order_seed(args),
        batches_per_step=args.gradient_accumulation_steps,
        num_processes=args.world_size,
        process_index=args.process_index,
        on_bad_record=args.on_bad_record,
        on_lost_shard=args.on_lost_shard,
    )
    check_stream(stream, args)
    return stream


def check_stream(stream: TokenBudgetStream, args: VanillaTrainingArguments) -> None:
    """Check that a stream fits a training.

    Args:
        stream (`TokenBudgetStream`): The training data.
        args (`VanillaTrainingArguments`): The training arguments.

    Raises:
        ValueError: if it is not the share of this process, or is read by several workers.
    """
    expected = {"num_processes": args.world_size, "process_index": args.process_index}
    for name, value in expected.items():
        if stream.settings[name] != value:
            raise ValueError(
                f"`{name}` of the stream must be {value} in this process, got {stream.settings[name]}; take it from "
                "`args.world_size` and `args.process_index`."
            )
    if args.dataloader_num_workers > 1:
        raise ValueError(
            f"`dataloader_num_workers` must be 0 or 1 for token-budget batches of a stream, got "
            f"{args.dataloader_num_workers}: one reads ahead, and the order of several could not be resumed."
        )
