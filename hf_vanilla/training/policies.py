"""What a training does at an update whose loss or gradient is nan or infinite, and if its loss diverges."""

import copy
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, gather_object
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import (
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from ..data.files import quoted
from .divergence import IN_NEW_RUN, DivergedError, StopOnNaNCallback, advice_after_nan


logger = logging.get_logger(__name__)


ON_NAN = ("stop", "skip", "rollback")
MAX_SKIPS_IN_A_ROW = 10
MAX_ROLLBACKS = 3
MAX_NAMED_ROWS = 3  # in a message
MAX_NAMED_TOKENS = 16  # of each row


class BatchWatcher(TrainerCallback):
    """A callback that sees each batch of a training of [`VerifiedCheckpointTrainer`]."""

    def add_batch(self, inputs: dict[str, Any], loss: torch.Tensor) -> None:
        """Take a batch after its backward pass.

        Args:
            inputs (`dict[str, Any]`): The batch.
            loss (`torch.Tensor` of shape `()`): Its part of the loss of the update, detached.
        """


class RollbackRequested(ValueError):  # noqa: N818 - a request, and an error where nobody takes it
    """Raised by [`NaNPolicyCallback`] to have [`VerifiedCheckpointTrainer`] return to its last checkpoint.

    Args:
        message (`str`): What has happened.
        step (`int`): The update that is to be left out.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class NaNPolicyCallback(StopOnNaNCallback, BatchWatcher):
    """Stops at an update whose loss or gradient is nan or infinite, leaves it out, or returns to a checkpoint.

    The check comes before each update, and all processes decide the same. What [`StopOnNaNCallback`] checks is checked
    too. The message has the step and, with the trainers of this package, the process, rows and texts.

    - `"stop"` raises an error. On an accelerator it does not wait for the loss of each update, and so stops at the
      next log, without the rows.
    - `"skip"` leaves the update out: weights, state of the optimizer and learning rate are those of a training without
      that batch. It is logged, and counted as `skipped_updates` in the metrics of the training.
    - `"rollback"` returns to the last undamaged checkpoint, repeats the updates since then with the same batches, and
      leaves out the one that failed. That differs from `"skip"` if not the batch was at fault but the state, damaged
      by the machine, say. A stock trainer can't return to a checkpoint: its training ends.

    ```python
    Trainer(model, args, callbacks=[NaNPolicyCallback("skip")])
    ```

    Args:
        on_nan (`str`, defaults to `"stop"`): `"stop"`, `"skip"` or `"rollback"`.
        max_skips_in_a_row (`int`, defaults to 10): More updates in a row that fail stop the training.
        max_rollbacks (`int`, defaults to 3): As many returns; the next update that fails stops the training.

    Raises:
        ValueError: for another `on_nan`; from `Trainer.train` if the training stops, and before the first step with
            fp16 (which has a loss scaling that skips updates) or DeepSpeed, unless `on_nan` is `"stop"`.
    """

    def __init__(
        self, on_nan: str = "stop", max_skips_in_a_row: int = MAX_SKIPS_IN_A_ROW, max_rollbacks: int = MAX_ROLLBACKS
    ) -> None:
        check_on_nan(on_nan)
        self.on_nan = on_nan
        self.max_skips_in_a_row = max_skips_in_a_row
        self.max_rollbacks = max_rollbacks
        self.left_out: set[int] = set()  # steps of earlier rollbacks, set by the trainer
        self._checks_updates = True
        self._in_a_row = 0
        self._batches: list[tuple[dict[str, Any], torch.Tensor]] = []
        self._schedule: tuple[dict[str, Any], list[Any]] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that updates can be left out."""
        has_scaler = getattr(kwargs.get("optimizer"), "scaler", None) is not None
        is_deepspeed = AcceleratorState().distributed_type == DistributedType.DEEPSPEED
        if self.on_nan != "stop":
            check_on_nan(self.on_nan, fp16=args.fp16 or has_scaler, deepspeed=is_deepspeed)
        may_wait = self.on_nan != "stop" or args.device.type == "cpu"
        self._checks_updates = may_wait and not has_scaler and not is_deepspeed
        self._in_a_row, self._batches, self._schedule = 0, [], None

    def add_batch(self, inputs: dict[str, Any], loss: torch.Tensor) -> None:
        """Keep a batch until its update has been checked.

        Args:
            inputs (`dict[str, Any]`): The batch.
            loss (`torch.Tensor` of shape `()`): Its part of the loss of the update.
        """
        if self._checks_updates:
            self._batches.append((inputs, loss))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the next update."""
        batches, self._batches = self._batches, []
        if not self._checks_updates:
            return
        step = state.global_step + 1
        is_finite = _is_finite_update(args, kwargs["optimizer"], [loss for _, loss in batches])
        if is_finite and step not in self.left_out:
            self._in_a_row = 0
            return
        found = f"Step {step} is left out after the rollback"
        if not is_finite:
            found = _describe_update(args, step, batches, kwargs["model"], kwargs.get("processing_class"))
        self._in_a_row += 1
        if self.on_nan == "stop":
            raise DivergedError(f"{found}; {advice_after_nan(args)} --on_nan skip (`on_nan`) leaves such updates out.")
        if self.on_nan == "rollback" and step not in self.left_out:
            raise RollbackRequested(f"{found}; {advice_after_nan(args)}", step)
        if self._in_a_row > self.max_skips_in_a_row:
            raise DivergedError(f"{found}, as at {self.max_skips_in_a_row} steps before it; {advice_after_nan(args)}")
        self._skip(kwargs["optimizer"], kwargs["lr_scheduler"])
        state.log_history.append({"epoch": state.epoch, "step": step, "skipped_updates": _count_skipped(state) + 1})
        logger.warning(f"{found}. Its update is skipped: {self._in_a_row} in a row, {_count_skipped(state)} in all.")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the learning rate after an update that was skipped, and check the weights as the base class does."""
        if self._schedule is not None:
            schedule, learning_rates = self._schedule
            self._schedule = None
            kwargs["lr_scheduler"].load_state_dict(schedule)
            for group, learning_rate in zip(kwargs["optimizer"].param_groups, learning_rates, strict=True):
                group["lr"] = learning_rate
        super().on_step_end(args, state, control, **kwargs)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the log as the base class does, unless updates that fail are left out; count these at the end."""
        if self.on_nan == "stop":
            super().on_log(args, state, control, logs, **kwargs)
        elif logs is not None and "train_runtime" in logs:
            logs["skipped_updates"] = _count_skipped(state)

    def _skip(self, optimizer: Any, lr_scheduler: Any) -> None:
        """Have the trainer's next step of the optimizer do nothing: it updates no parameter without a gradient."""
        optimizer.zero_grad()
        learning_rates = [copy.deepcopy(group["lr"]) for group in optimizer.param_groups]
        self._schedule = copy.deepcopy(lr_scheduler.state_dict()), learning_rates


def check_on_nan(on_nan: str, *, fp16: bool = False, deepspeed: bool = False) -> None:
    """Check what is to be done at an update that fails.

    Args:
        on_nan (`str`): `"stop"`, `"skip"` or `"rollback"`.
        fp16 (`bool`): Whether the loss is scaled.
        deepspeed (`bool`): Whether DeepSpeed makes the updates.

    Raises:
        ValueError: if it is another name, or does not go with one of the others.
    """
    if on_nan not in ON_NAN:
        raise ValueError(f"`on_nan` must be one of {', '.join(ON_NAN)}, got {on_nan!r}.")
    if on_nan != "stop" and (fp16 or deepspeed):
        reason = "DeepSpeed, which makes the updates itself" if deepspeed else "fp16, whose loss scaling skips updates"
        raise ValueError(f"`on_nan` ({on_nan}) can't be combined with {reason}; use stop, or bf16 without DeepSpeed.")


def _count_skipped(state: TrainerState) -> int:
    """Count the updates that were skipped, in earlier parts of a resumed run too."""
    return sum("skipped_updates" in entry and "train_runtime" not in entry for entry in state.log_history)


def _is_finite_update(args: TrainingArguments, optimizer: Any, losses: Sequence[torch.Tensor]) -> bool:
    """Check the gradients and losses of an update on all processes, so that they decide the same."""
    gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    norm = torch.nn.utils.get_total_norm(local)
    values = torch.stack([each.to(args.device, torch.float32) for each in (norm, *losses)])
    is_finite = torch.isfinite(values).to(args.device, torch.int32)
    if not is_finite[0]:  # it may be too large for its type
        is_finite[0] = all(torch.isfinite(each).all() for each in local)
    is_finite = is_finite.min()
    if args.world_size > 1 and distributed.is_initialized():
        distributed.all_reduce(is_finite, distributed.ReduceOp.MIN)
    return bool(is_finite)


def _describe_update(
    args: TrainingArguments,
    step: int,
    batches: Sequence[tuple[dict[str, Any], torch.Tensor]],
    model: torch.nn.Module,
    processing_class: Any,
) -> str:
    """Name the step, and the rows of all processes whose loss is nan or infinite."""
    losses = [float(loss) for _, loss in batches]
    failing = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
    named = failing or range(len(batches))  # the gradient alone: one of all batches
    rows = [_name_rows(batches[number][0], model, processing_class, is_bad=bool(failing)) for number in named]
    own = [(args.process_index, [losses[number] for number in failing], rows)]
    gathered = gather_object(own) if args.world_size > 1 else own
    bad = [each for each in gathered if each[1]]
    what = f"training loss is {bad[0][1][0]}" if bad else "gradient is nan or infinite"
    process = "process {}, " if args.world_size > 1 else ""
    places = [process.format(index) + each for index, _, names in bad or gathered for each in names]
    return f"The {what} at step {step}" + (f" ({'; '.join(places)})" if places else "")


def _name_rows(inputs: dict[str, Any], model: torch.nn.Module, processing_class: Any, *, is_bad: bool) -> str:
    """Name the rows of a batch whose own loss is nan or infinite, or all of them, with how their texts begin."""
    tensors = {name: each for name, each in inputs.items() if isinstance(each, torch.Tensor) and each.ndim > 0}
    size = len(next(iter(tensors.values()), ()))
    rows = _failing_rows(model, inputs, size) if is_bad else []
    rows = rows or list(range(size))
    ids = inputs.get("input_ids")
    names = []
    for row in rows[:MAX_NAMED_ROWS]:
        text = ""
        if isinstance(processing_class, PreTrainedTokenizerBase) and isinstance(ids, torch.Tensor) and ids.ndim == 2:
            text = f" {quoted(processing_class.decode(ids[row, :MAX_NAMED_TOKENS], skip_special_tokens=True))}"
        names.append(f"{row + 1}{text}")
    more = f" and {len(rows) - len(names)} more" if len(rows) > len(names) else ""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(names)}{more} of a batch of {size}"


def _failing_rows(model: torch.nn.Module, inputs: dict[str, Any], size: int) -> list[int]:
    """Compute the loss of each row by itself; none fails if the model can't do that."""
    is_whole = AcceleratorState().distributed_type in (
        DistributedType.NO,
        DistributedType.MULTI_CPU,
        DistributedType.MULTI_GPU,
    )
    if not is_whole or any(isinstance(each, DTensor) for each in model.parameters()):
        return []  # of a sharded model all processes would have to take part
    rows = []
    model.eval()  # no random numbers; `training_step` switches back
    try:
        with torch.no_grad():
            for row in range(size):
                one = {name: _row_of(value, row, size) for name, value in inputs.items() if name != "mask_sizes"}
                if not torch.isfinite(model(**one).loss).all():
                    rows.append(row)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError):
        return []  # it only serves a message
    finally:
        model.train()
    return rows


def _row_of(value: Any, row: int, size: int) -> Any:
    """Return a row of a tensor that has one for each of the batch."""
    has_rows = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == size
    return value[row : row + 1] if has_rows else value


class StopOnDivergenceCallback(BatchWatcher):
    """Stops a training whose loss rises far above what it was, as Marian's `--throw-on-divergence` does.

    The loss has diverged when the mean of the last `recent` updates is above the mean of the `before` updates before
    them by more than `sigmas` times the standard deviation of these. So nothing is found in the first
    `before + recent - 1` updates of a run, also of a resumed one, and of each phase of [`PretrainingTrainer`]; nor in
    a loss that falls. A loss that is nan counts for nothing. The loss is the mean over all processes, and is read
    every `recent` updates, so that no update waits for it.

    With a stock trainer the losses are those of its logs: give it `logging_steps=1`.

    Args:
        before (`int`, defaults to 1000): Updates to compare with.
        recent (`int`, defaults to 10): Last updates.
        sigmas (`float`, defaults to 5.0): Standard deviations.

    Raises:
        ValueError: if a number is out of its range; from `Trainer.train` a `DivergedError` once the loss has diverged.
    """

    def __init__(self, before: float = 1000, recent: float = 10, sigmas: float = 5.0) -> None:
        whole = float(before).is_integer() and float(recent).is_integer()  # neither infinite nor nan
        if not (whole and before >= 2 and recent >= 1 and sigmas > 0):
            raise ValueError(
                "`stop_on_divergence` must be at least 2 updates before, at least 1 recent one and a positive number "
                f"of standard deviations, such as 1000 10 5; got {before:g} {recent:g} {sigmas:g}."
            )
        self.before, self.recent, self.sigmas = int(before), int(recent), sigmas
        self._sees_batches = False
        self._of_update: list[torch.Tensor] = []
        self._unread: list[torch.Tensor] = []
        self._values: deque[float] = deque(maxlen=self.before + self.recent)

    def reset(self) -> None:
        """Forget all losses: those to come are not comparable with them."""
        self._unread.clear()
        self._values.clear()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget the losses of an earlier training."""
        self._of_update = []
        self.reset()

    def add_batch(self, inputs: dict[str, Any], loss: torch.Tensor) -> None:
        """Take the loss of a batch.

        Args:
            inputs (`dict[str, Any]`): Not used.
            loss (`torch.Tensor` of shape `()`): Its part of the loss of the update.
        """
        self._sees_batches = True
        self._of_update.append(loss)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the losses every `recent` updates."""
        if self._of_update:
            self._unread.append(torch.stack(self._of_update).sum())
            self._of_update = []
        if len(self._unread) < self.recent:
            return
        losses = torch.stack(self._unread).float()
        self._unread = []
        if args.world_size > 1 and distributed.is_initialized():
            distributed.all_reduce(losses)
            losses /= args.world_size
        for number, loss in enumerate(losses.tolist(), start=state.global_step - len(losses) + 1):
            self.check(loss, number)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the loss of a log, if the trainer does not give that of each batch."""
        if not self._sees_batches and logs is not None and "loss" in logs:
            self.check(logs["loss"], state.global_step)

    def check(self, loss: float, step: int) -> None:
        """Check the loss of the next update.

        Args:
            loss (`float`): The loss.
            step (`int`): The update, for the message.

        Raises:
            DivergedError: if the loss has diverged.
        """
        if not math.isfinite(loss):
            return
        self._values.append(loss)
        if len(self._values) < self.before + self.recent:
            return
        values = np.asarray(self._values)
        earlier, last = values[: self.before], values[self.before :].mean()
        mean, deviation = earlier.mean(), earlier.std()
        if last > mean + self.sigmas * deviation:
            raise DivergedError(
                f"The loss has diverged at step {step}: {last:.4g} in the mean of the last {self.recent}, after "
                f"{mean:.4g} in the {self.before} before, with a standard deviation of {deviation:.2g} "
                f"(`stop_on_divergence`). Checkpoints before step {step - self.recent + 1} are sound. Lower the "
                f"learning rate or warm up longer, {IN_NEW_RUN}."
            )


def add_policies(trainer: Trainer) -> None:
    """Add the callbacks that `on_nan` and `stop_on_divergence` of a trainer's arguments ask for.

    Args:
        trainer (`Trainer`): The trainer; a callback of the same class that it has already is kept.
    """
    callbacks = trainer.callback_handler.callbacks
    if not any(isinstance(each, NaNPolicyCallback) for each in callbacks):
        trainer.add_callback(NaNPolicyCallback(getattr(trainer.args, "on_nan", "stop")))
    numbers = getattr(trainer.args, "stop_on_divergence", None)
    if numbers and not any(isinstance(each, StopOnDivergenceCallback) for each in callbacks):
        trainer.add_callback(StopOnDivergenceCallback(*numbers))


__all__ = ["BatchWatcher", "NaNPolicyCallback", "StopOnDivergenceCallback", "add_policies"]
