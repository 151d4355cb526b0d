"""BERT's pre-training: short sequences for 90 % of the updates, long ones for the rest, in one job.

    updates      0 .......................... 90 % ..... 100 %
    length       128                          512
    batch        max_tokens / 128 sequences   max_tokens / 512 sequences
    rate         one warm-up, one linear decay over both

All batches of the job are one epoch of the trainer, in an order that seed and settings decide. So everything that
`Trainer` does with an epoch works: resuming in the middle of either phase, several processes, accumulation.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase

from ..data.batching import TokenBudgetBatchSampler, measure_pair_lengths
from .arguments import VanillaTrainingArguments
from .trainer import VanillaTrainer


class Phase(NamedTuple):
    """A part of the pre-training.

    Attributes:
        dataset: Examples from `build_pretraining_dataset`.
        share: Share of all updates; the shares of all phases add up to 1.
    """

    dataset: datasets.Dataset
    share: float


class PhasedBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Batches of several phases in turn, with the datasets of the phases concatenated.

    Within a phase the batches are those of [`~hf_vanilla.data.TokenBudgetBatchSampler`], each epoch in a
    new order, until the phase has all its batches.

    Args:
        lengths (`Sequence[np.ndarray]`): Tokens of each example, for each phase.
        updates (`Sequence[int]`): Number of updates of each phase.
        max_tokens (`int`): Budget of a batch, padding included.
        seed (`int`): Seed of the order.
        batches_per_step (`int`): Batches of one update: ranks times accumulation.

    Raises:
        ValueError: if `lengths` and `updates` differ in length, or as in `TokenBudgetBatchSampler`.
    """

    def __init__(
        self,
        lengths: Sequence[np.ndarray],
        updates: Sequence[int],
        max_tokens: int,
        *,
        seed: int = 0,
        batches_per_step: int = 1,
    ) -> None:
        if len(lengths) != len(updates):
            raise ValueError(
                f"`lengths` ({len(lengths)}) and `updates` ({len(updates)}) must have one entry for each phase."
            )
        self.phases = [
            TokenBudgetBatchSampler(each, each, max_tokens, seed=seed + number, batches_per_step=batches_per_step)
            for number, each in enumerate(lengths)
        ]
        self.batches = [count * batches_per_step for count in updates]
        self.starts = np.cumsum([0, *(len(each) for each in lengths)]).tolist()

    def __len__(self) -> int:
        """Number of batches of the job, over all ranks."""
        return sum(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each batch."""
        for phase, wanted, start in zip(self.phases, self.batches, self.starts[:-1], strict=True):
            given = epoch = 0
            while given < wanted:
                phase.set_epoch(epoch)
                for batch in phase:
                    yield [start + index for index in batch]
                    given += 1
                    if given == wanted:
                        break
                epoch += 1


class RepeatableCollator:
    """Makes the random choices of a collator depend on the batch alone, so that a resumed run has the same masks.

    A trainer collates ahead of its current step, so the state of torch's generator in a checkpoint is ahead too. Here
    the seed of a batch is a checksum of its tokens: different batches, as in another epoch, get different masks.

    Args:
        collator (`Callable`): Makes a batch out of rows, with torch's global generator.
        seed (`int`): Part of every batch's seed.
    """

    def __init__(self, collator: Callable[[list[dict[str, Any]]], Any], seed: int) -> None:
        self.collator = collator
        self.seed = seed

    def __call__(self, examples: list[dict[str, Any]]) -> Any:
        """Collate with random numbers of this batch's own.

        Args:
            examples (`list[dict[str, Any]]`): Rows with `input_ids`.

        Returns:
            The collator's batch.
        """
        checksum = self.seed
        for example in examples:
            checksum = zlib.crc32(np.asarray(example["input_ids"], dtype=np.int64).tobytes(), checksum & 0xFFFFFFFF)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(checksum)
            return self.collator(examples)


class PretrainingTrainer(VanillaTrainer):
    """[`VanillaTrainer`] whose training data comes in phases of different lengths.

    `max_tokens_per_batch` decides how many sequences a batch of each phase has, and `max_steps` is the length of the
    whole job. The masks depend on the batch and `seed` alone ([`RepeatableCollator`]). An evaluation set that
    has `labels` (see `mask_statically`) keeps them. A logged loss comes with the `sequence_length` of its phase,
    the tokens of the phase's longest example.

    Args:
        model (`PreTrainedModel`): The model to train.
        args (`VanillaTrainingArguments`): With `max_steps` and `max_tokens_per_batch`.
        data_collator (`Callable`): Masks and pads, like `DataCollatorForLanguageModeling(tokenizer)`.
        phases (`Sequence[Phase]`): The phases, in this order.
        processing_class (`PreTrainedTokenizerBase`): The tokenizer.
        **kwargs (`Any`): The other arguments of `Trainer`, but `train_dataset`.

    Raises:
        ValueError: if there is no phase, the shares do not add up to 1, or an argument is missing.

    Source: Devlin et al. 2018, A.2.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: VanillaTrainingArguments,
        data_collator: Any,
        *,
        phases: Sequence[Phase],
        processing_class: PreTrainedTokenizerBase,
        **kwargs: Any,
    ) -> None:
        for name, value in (("max_steps", args.max_steps), ("max_tokens_per_batch", args.max_tokens_per_batch)):
            if value is None or value < 1:
                raise ValueError(f"`{name}` must be at least 1 for training in phases, got {value}.")
        if any(isinstance(phase.dataset, datasets.IterableDataset) for phase in phases):
            raise ValueError("`phases` must not be streams, as their lengths are needed; load them without streaming.")
        self.phases = list(phases)
        self.phase_updates = _updates_of(self.phases, args.max_steps)
        self._phase_lengths: list[int] = []
        super().__init__(
            model,
            args,
            RepeatableCollator(data_collator, args.seed),
            train_dataset=datasets.concatenate_datasets([phase.dataset for phase in self.phases]),
            processing_class=processing_class,
            **kwargs,
        )

    def get_train_dataloader(self) -> DataLoader:
        """Return the batches of the whole job.

        Returns:
            `DataLoader`: prepared by accelerate, with the same number of batches on each process.
        """
        lengths = [measure_pair_lengths(phase.dataset).source for phase in self.phases]
        self._phase_lengths = [int(each.max()) for each in lengths]
        sampler = PhasedBatchSampler(
            lengths,
            self.phase_updates,
            int(self.args.max_tokens_per_batch or 0),
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
            batches_per_step=self.args.world_size * self.args.gradient_accumulation_steps,
        )
        rows = sum(len(phase) for phase in sampler.phases)
        examples = sum(len(phase.dataset) for phase in self.phases)
        self._sentences_per_update = max(1, round(examples * sampler.phases[0].batches_per_step / max(1, rows)))
        return self._dataloader(self.train_dataset, sampler, "Training", is_training=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return the evaluation dataloader; a dataset with labels is padded and not masked again.

        Args:
            eval_dataset (`str` or `Dataset`, *optional*): A dataset, or the name of one of `self.eval_dataset`; the
                default is `self.eval_dataset`.

        Returns:
            `DataLoader`: longest examples first.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str) and isinstance(self.eval_dataset, dict):
            dataset = self.eval_dataset[dataset]
        if "labels" not in getattr(dataset, "column_names", ()):
            return super().get_eval_dataloader(eval_dataset)
        collator = self.data_collator
        self.data_collator = DataCollatorForTokenClassification(self.processing_class)
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = collator

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log values; a training loss together with the `sequence_length` of its phase.

        Args:
            logs (`dict[str, float]`): The values.
            start_time (`float`, *optional*): As in `Trainer`.
        """
        if "loss" in logs and self._phase_lengths:
            phase = np.searchsorted(np.cumsum(self.phase_updates), self.state.global_step)
            logs = {**logs, "sequence_length": self._phase_lengths[min(int(phase), len(self.phases) - 1)]}
        super().log(logs, start_time)

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the column of special tokens for the collator, which is slow without it."""
        super()._set_signature_columns_if_needed()
        if "special_tokens_mask" not in self._signature_columns:
            self._signature_columns += ["special_tokens_mask"]


def _updates_of(phases: Sequence[Phase], max_steps: int) -> list[int]:
    """Divide the updates among the phases; the last one gets the rounding remainder."""
    if not phases:
        raise ValueError("`phases` must hold at least one phase.")
    total = sum(phase.share for phase in phases)
    if min(phase.share for phase in phases) < 0 or abs(total - 1) > 1e-6:
        shares = ", ".join(str(phase.share) for phase in phases)
        raise ValueError(f"`phases` must have shares from 0 to 1 that add up to 1, got {shares}.")
    updates = [round(phase.share * max_steps) for phase in phases[:-1]]
    return [*updates, max_steps - sum(updates)]
