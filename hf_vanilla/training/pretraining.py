"""BERT's pre-training: short sequences for 90 % of the updates, long ones for the rest, in one job.

    updates      0 .......................... 90 % ..... 100 %
    length       128                          512
    batch        max_tokens / 128 sequences   max_tokens / 512 sequences
    rate         one warm-up, one linear decay over both

For budgets so small that the second phase would teach its new positions too little, a phase can have a learning rate
with a warm-up of its own, new positions can start from learned ones, and the last phases can be mixed.

All batches of the job are one epoch of the trainer, in an order that seed and settings decide. So everything that
`Trainer` does with an epoch works: resuming in the middle of either phase, several processes, accumulation.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import SchedulerType
from transformers.utils import logging

from ..data.batching import TokenBudgetBatchSampler, measure_pair_lengths
from .arguments import VanillaTrainingArguments
from .manifest import order_seed
from .policies import StopOnDivergenceCallback
from .trainer import VanillaTrainer


logger = logging.get_logger(__name__)

# A phase whose training loss starts more than this many nats above the end of the phase before is watched.
LARGE_JUMP = 0.3
# Logged losses whose mean is compared with another such mean.
LOSSES_IN_MEAN = 3


class Phase(NamedTuple):
    """A part of the pre-training.

    Attributes:
        dataset: Examples from `build_pretraining_dataset`.
        share: Share of all updates; the shares of all phases add up to 1.
        learning_rate: Peak learning rate of the phase, see [`phased_learning_rate`]; by default, the schedule of the
            phase before continues.
        warmup_steps: Updates from the start of the phase until that peak.
    """

    dataset: datasets.Dataset
    share: float
    learning_rate: float | None = None
    warmup_steps: int = 0


def phased_learning_rate(
    step: int, updates: Sequence[int], peaks: Sequence[float | None], warmups: Sequence[int]
) -> float:
    """Return the learning rate of one update, where phases have peaks of their own.

    The rate grows linearly to each peak, from 0 or from the rate at which the phase before ends; from a peak it falls
    on the line that reaches 0 at the end of the job. With one peak it is transformers' `linear` schedule.

    Args:
        step (`int`): Number of the update; the first is 0, as in transformers' schedules.
        updates (`Sequence[int]`): Number of updates of each phase.
        peaks (`Sequence[float | None]`): Peak of each phase; `None` continues the line of the phase before, and is not
            for the first phase.
        warmups (`Sequence[int]`): Updates from the start of each phase until its peak; ignored without a peak.

    Returns:
        `float`: the learning rate.
    """
    end, start = sum(updates), 0
    steps, rates = [0], [0.0]  # the ends of the straight lines
    for count, peak, warmup in zip(updates, peaks, warmups, strict=True):
        if peak is not None and count > 0:
            if start > 0:
                rates.append(rates[-1] * (end - start) / (end - steps[-1]))
                steps.append(start)
            rates.append(peak)
            steps.append(start + warmup)
        start += count
    return float(np.interp(step, [*steps, end], [*rates, 0.0]))


def plan_phases(phases: Sequence[Phase], args: VanillaTrainingArguments, mixed_phases: int = 0) -> list[int]:
    """Divide the updates of a job among its phases, and check the settings of the phases.

    Args:
        phases (`Sequence[Phase]`): The phases; their datasets are not read.
        args (`VanillaTrainingArguments`): With `max_steps` and `max_tokens_per_batch`.
        mixed_phases (`int`): As in [`PretrainingTrainer`].

    Returns:
        `list[int]`: number of updates of each phase; the last one gets the rounding remainder.

    Raises:
        ValueError: as [`PretrainingTrainer`].
    """
    for name, value in (("max_steps", args.max_steps), ("max_tokens_per_batch", args.max_tokens_per_batch)):
        if value is None or value < 1:
            raise ValueError(f"`{name}` must be at least 1 for training in phases, got {value}.")
    if not phases:
        raise ValueError("`phases` must hold at least one phase.")
    total = sum(phase.share for phase in phases)
    if min(phase.share for phase in phases) < 0 or abs(total - 1) > 1e-6:
        shares = ", ".join(str(phase.share) for phase in phases)
        raise ValueError(f"`phases` must have shares from 0 to 1 that add up to 1, got {shares}.")
    updates = [round(phase.share * args.max_steps) for phase in phases[:-1]]
    updates.append(args.max_steps - sum(updates))
    if updates[-1] < 0:
        raise ValueError(f"`max_steps` ({args.max_steps}) is too few to divide among {len(phases)} phases; raise it.")
    if args.ignore_data_skip and len(phases) > 1:
        raise ValueError("`ignore_data_skip` would have a resumed run repeat the first phase; leave it out.")
    if mixed_phases not in (0, *range(2, len(phases) + 1)):
        raise ValueError(
            f"`mixed_phases` must be 0, or from 2 to the number of phases ({len(phases)}), got {mixed_phases}."
        )
    if any(phase.learning_rate is not None for phase in phases):
        _check_rates(phases, updates, args, mixed_phases)
    return updates


def _check_rates(
    phases: Sequence[Phase], updates: Sequence[int], args: VanillaTrainingArguments, mixed_phases: int
) -> None:
    """Raise if the learning rates or warm-ups of phases can't be."""
    if mixed_phases:
        raise ValueError(
            f"`mixed_phases` ({mixed_phases}) and learning rates of phases can't be combined; leave one out."
        )
    if args.lr_scheduler_type != SchedulerType.LINEAR:
        raise ValueError(
            "`lr_scheduler_type` must be linear if phases have learning rates, got "
            f"{SchedulerType(args.lr_scheduler_type).value}."
        )
    warmups = [phase.warmup_steps for phase in phases]
    if phases[0].learning_rate is None:
        warmups[0] = args.get_warmup_steps(args.max_steps)
    for phase, warmup, count in zip(phases, warmups, updates, strict=True):
        if phase.learning_rate is not None and phase.learning_rate <= 0:
            raise ValueError(f"`phases` must have learning rates above 0, got {phase.learning_rate}.")
        if not 0 <= warmup <= count:
            raise ValueError(
                f"`phases` must have warm-ups from 0 to their numbers of updates, got {warmup} of {count}."
            )


def fill_new_positions(table: torch.Tensor, learned: int, longest: int, method: str) -> None:
    """Fill embeddings of positions that no example had so far with learned ones, in place.

    Position 0 is left out, because it is always [CLS].

    Args:
        table (`torch.Tensor` of shape `(positions, d_model)`): Embeddings of the positions.
        learned (`int`): Number of positions, from the first one, that examples had; at least 2.
        longest (`int`): Number of positions that examples will have.
        method (`str`): `"repeat"` copies positions 1, 2, ... as often as necessary, which keeps the distances within
            each copy; `"interpolate"` stretches them linearly over the new positions.

    Raises:
        ValueError: if `method` is another one.
    """
    new = torch.arange(longest - learned, device=table.device)
    if method == "repeat":
        rows = table[1 + new % (learned - 1)]
    elif method == "interpolate":
        places = 1 + new * (learned - 2) / max(1, len(new) - 1)
        before = places.long().clamp(max=learned - 1)
        rows = torch.lerp(
            table[before], table[(before + 1).clamp(max=learned - 1)], (places - before).to(table.dtype)[:, None]
        )
    else:
        raise ValueError(f"`method` must be repeat or interpolate, got {method!r}.")
    table[learned:longest] = rows


# Column of how often a row was read before.
PASS = "pass"


class PhasedBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Batches of several phases in turn, with the datasets of the phases concatenated.

    Within a phase the batches are those of [`~hf_vanilla.data.TokenBudgetBatchSampler`], each epoch in a
    new order, until the phase has all its batches. The last phases can be mixed: their updates come in random order,
    the batches of an update being of one phase.

    Args:
        lengths (`Sequence[np.ndarray]`): Tokens of each example, for each phase.
        updates (`Sequence[int]`): Number of updates of each phase.
        max_tokens (`int`): Budget of a batch, padding included.
        seed (`int`): Seed of the order.
        batches_per_step (`int`): Batches of one update: ranks times accumulation.
        mixed_phases (`int`): How many phases, the last ones, are mixed.

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
        mixed_phases: int = 0,
    ) -> None:
        if len(lengths) != len(updates):
            raise ValueError(
                f"`lengths` ({len(lengths)}) and `updates` ({len(updates)}) must have one entry for each phase."
            )
        self.phases = [
            TokenBudgetBatchSampler(each, each, max_tokens, seed=seed + number, batches_per_step=batches_per_step)
            for number, each in enumerate(lengths)
        ]
        self.batches_per_step = batches_per_step
        self.starts = np.cumsum([0, *(len(each) for each in lengths)]).tolist()
        order = np.repeat(np.arange(len(updates)), updates)
        first = sum(updates[: len(updates) - mixed_phases])
        order[first:] = np.random.default_rng(seed).permutation(order[first:])
        self.order = order.tolist()  # the phase of each update

    def __len__(self) -> int:
        """Number of batches of the job, over all ranks."""
        return len(self.order) * self.batches_per_step

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each batch."""
        batches = [self._batches_of(number) for number in range(len(self.phases))]
        for number in self.order:
            yield from itertools.islice(batches[number], self.batches_per_step)

    def _batches_of(self, number: int) -> Iterator[list[int]]:
        """Yield the batches of a phase without end."""
        for epoch in itertools.count():
            self.phases[number].set_epoch(epoch)
            for batch in self.phases[number]:
                yield [self.starts[number] + index for index in batch]


class _CountingSampler(torch.utils.data.Sampler[list[int]]):
    """Batches of a sampler, with row `i` of `rows` as row `i + n * rows` when it is read for the n-th time, from 0."""

    def __init__(self, sampler: PhasedBatchSampler, rows: int) -> None:
        self.sampler = sampler
        self.rows = rows

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        times = np.zeros(self.rows, dtype=np.int64)
        for batch in self.sampler:
            yield (times[batch] * self.rows + batch).tolist()
            times[batch] += 1


class _CountedRows(torch.utils.data.Dataset):
    """Rows of a dataset by the numbers of `_CountingSampler`, with how often they were read before, as `PASS`."""

    has_used_columns = True  # so that none is removed

    def __init__(self, dataset: datasets.Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        passes, indices = np.divmod(numbers, len(self.dataset))
        rows = self.dataset.__getitems__(indices.tolist())
        return [{**row, PASS: int(number)} for row, number in zip(rows, passes, strict=True)]


class RepeatableCollator:
    """Makes the random choices of a collator depend on the batch alone, so that a resumed run has the same masks.

    A trainer collates ahead of its current step, so the state of torch's generator in a checkpoint is ahead too. Here
    the seed of a batch is a checksum of its tokens, and of how often they were read before (`PASS`, if the rows have
    it): different batches, and the same in another epoch, get different masks.

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
        passes = [example.get(PASS, 0) for example in examples]
        examples = [{name: value for name, value in example.items() if name != PASS} for example in examples]
        checksum = self.seed
        for number, example in zip(passes, examples, strict=True):
            tokens = [number, *example["input_ids"]] if number > 0 else example["input_ids"]
            checksum = zlib.crc32(np.asarray(tokens, dtype=np.int64).tobytes(), checksum & 0xFFFFFFFF)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(checksum)  # not the GPUs', which are in the middle of a step
            return self.collator(examples)


class PretrainingTrainer(VanillaTrainer):
    """[`VanillaTrainer`] whose training data comes in phases of different lengths.

    `max_tokens_per_batch` decides how many sequences a batch of each phase has, and `max_steps` is the length of the
    whole job. The masks depend on the batch, `seed` and pass ([`RepeatableCollator`]). An evaluation set that
    has `labels` (see `mask_statically`) keeps them. A logged loss comes with the `sequence_length` of its phase,
    the tokens of the phase's longest example; mixed phases count as one. Halfway through a phase whose loss started
    far above that of the phase before and has not come down by half of the difference, a warning says so.

    Args:
        model (`PreTrainedModel`): The model to train.
        args (`VanillaTrainingArguments`): With `max_steps` and `max_tokens_per_batch`.
        data_collator (`Callable`): Masks and pads, like `DataCollatorForLanguageModeling(tokenizer)`.
        phases (`Sequence[Phase]`): The phases, in this order.
        processing_class (`PreTrainedTokenizerBase`): The tokenizer.
        mixed_phases (`int`): How many phases, the last ones, are one with their updates in random order, 2 or more;
            0 for none.
        new_positions (`str`): How the embeddings of positions start that no earlier phase had: `"random"`, as they
            were initialized (the paper's way), or as in [`fill_new_positions`] at the first update of a longer phase.
        **kwargs (`Any`): The other arguments of `Trainer`, but `train_dataset`.

    Raises:
        ValueError: if there is no phase, the shares do not add up to 1, a warm-up is longer than its phase, mixed
            phases have learning rates, phases with learning rates are combined with another schedule than `linear`,
            `ignore_data_skip` is set with several, or an argument is missing or out of its range.

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
        mixed_phases: int = 0,
        new_positions: Literal["random", "repeat", "interpolate"] = "random",
        **kwargs: Any,
    ) -> None:
        if any(isinstance(phase.dataset, datasets.IterableDataset) for phase in phases):
            raise ValueError("`phases` must not be streams, as their lengths are needed; load them without streaming.")
        self.phases = list(phases)
        self.phase_updates = plan_phases(self.phases, args, mixed_phases)
        self.mixed_phases = mixed_phases
        self.new_positions = new_positions
        if new_positions not in ("random", "repeat", "interpolate"):
            raise ValueError(f"`new_positions` must be random, repeat or interpolate, got {new_positions!r}.")
        # Mixed phases are one stage.
        unmixed = len(self.phases) - mixed_phases
        self._stages = [[number] for number in range(unmixed)]
        self._stages += [list(range(unmixed, len(self.phases)))] if mixed_phases else []
        self._stage_ends = np.cumsum([sum(self.phase_updates[each] for each in stage) for stage in self._stages])
        self._stage_lengths: list[int] = []
        super().__init__(
            model,
            args,
            RepeatableCollator(data_collator, args.seed),
            train_dataset=datasets.concatenate_datasets([phase.dataset for phase in self.phases]),
            processing_class=processing_class,
            **kwargs,
        )
        if new_positions != "random":
            self.add_callback(_NewPositions(self))

    def get_train_dataloader(self) -> DataLoader:
        """Return the batches of the whole job.

        Returns:
            `DataLoader`: prepared by accelerate, with the same number of batches on each process.
        """
        lengths = [measure_pair_lengths(phase.dataset).source for phase in self.phases]
        self._stage_lengths = [max(int(lengths[each].max()) for each in stage) for stage in self._stages]
        sampler = PhasedBatchSampler(
            lengths,
            self.phase_updates,
            int(self.args.max_tokens_per_batch or 0),
            seed=order_seed(self.args),
            batches_per_step=self.args.world_size * self.args.gradient_accumulation_steps,
            mixed_phases=self.mixed_phases,
        )
        batches = sum(len(phase) for phase in sampler.phases)
        examples = sum(len(phase.dataset) for phase in self.phases)
        self._sentences_per_update = max(1, round(examples * sampler.phases[0].batches_per_step / max(1, batches)))
        used = _CountedRows(self._remove_unused_columns(self.train_dataset, description="Training"))
        return self._dataloader(used, _CountingSampler(sampler, examples), "Training", is_training=True)

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

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Create the scheduler: [`phased_learning_rate`] if a phase has a learning rate, or else the stock one.

        Args:
            num_training_steps (`int`): Number of updates of the run.
            optimizer (`torch.optim.Optimizer`, *optional*): The optimizer to schedule; the default is the trainer's
                own.

        Returns:
            `LRScheduler`: the schedule.
        """
        optimizer = self.optimizer if optimizer is None else optimizer
        peaks = [phase.learning_rate for phase in self.phases]
        if self.lr_scheduler is not None or optimizer is None or not any(peaks):
            return super().create_scheduler(num_training_steps, optimizer)
        warmups = [phase.warmup_steps for phase in self.phases]
        highest = self.args.learning_rate
        if peaks[0] is None:
            peaks[0], warmups[0] = highest, self.args.get_warmup_steps(num_training_steps)

        def share_of_highest(step: int) -> float:
            return phased_learning_rate(step, self.phase_updates, peaks, warmups) / highest

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_highest)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on a batch; the losses of a new phase are not comparable with those before.

        Args:
            *args (`Any`): As in `Trainer`.
            **kwargs (`Any`): Likewise.

        Returns:
            `torch.Tensor`: the loss.
        """
        if self.state.global_step in np.cumsum(self.phase_updates):
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, StopOnDivergenceCallback):
                    callback.reset()
        return super().training_step(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log values; a training loss together with the `sequence_length` of its phase.

        Args:
            logs (`dict[str, float]`): The values.
            start_time (`float`, *optional*): As in `Trainer`.
        """
        if "loss" not in logs or not self._stage_lengths:
            super().log(logs, start_time)
            return
        stage = min(int(np.searchsorted(self._stage_ends, self.state.global_step)), len(self._stages) - 1)
        super().log({**logs, "sequence_length": self._stage_lengths[stage]}, start_time)
        if stage > 0 and self.is_world_process_zero():
            start, end = self._stage_ends[stage - 1 : stage + 1].tolist()
            self._warn_of_lasting_jump(start, end, self._stage_lengths[stage])

    def _warn_of_lasting_jump(self, start: int, end: int, length: int) -> None:
        """Warn, in one log of a stage, if its loss is still far above the end of the stage before it."""
        losses = [(entry["step"], entry["loss"]) for entry in self.state.log_history if "loss" in entry]
        before = [loss for step, loss in losses if step <= start][-LOSSES_IN_MEAN:]
        within = [(step, loss) for step, loss in losses if step > start]
        late = [number for number, (step, _) in enumerate(within) if number > 0 and 2 * step >= start + end]
        if not before or late != [len(within) - 1]:  # the first log of the second half
            return
        level = math.fsum(before) / len(before)
        first, latest = within[0][1], [loss for _, loss in within[1:]][-LOSSES_IN_MEAN:]
        now = math.fsum(latest) / len(latest)
        if first - level > LARGE_JUMP and now - level > (first - level) / 2:
            logger.warning(
                f"With sequences of {length} tokens the training loss rose from {level:.2f} to {first:.2f} nats, and "
                f"halfway through this phase it is {now:.2f}: the model hardly learns its new positions. "
                "Give the phase more of the updates (--phase_shares) or a learning rate with a warm-up of its own "
                "(--phase_learning_rates), start new positions from learned ones (--new_positions), mix lengths "
                "(--mixed_phases), or teach positions by short examples (--shifted_positions)."
            )

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the column of special tokens for the collator, which is slow without it."""
        super()._set_signature_columns_if_needed()
        if "special_tokens_mask" not in self._signature_columns:
            self._signature_columns += ["special_tokens_mask"]


class _NewPositions(TrainerCallback):
    """Fills new positions from learned ones at the first update of each longer stage."""

    def __init__(self, trainer: PretrainingTrainer) -> None:
        self.trainer = trainer

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        starts = self.trainer._stage_ends[:-1].tolist()
        if state.global_step not in starts:
            return
        lengths = self.trainer._stage_lengths
        stage = starts.index(state.global_step) + 1
        learned = max(lengths[:stage])
        if lengths[stage] > learned:
            table = kwargs["model"].base_model.get_position_embeddings().weight
            with torch.no_grad():
                fill_new_positions(table, learned, lengths[stage], self.trainer.new_positions)
