"""Ending a training on SIGTERM or Ctrl-C: with a checkpoint, in a stated time, all processes at the same step."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import distributed
from transformers import (
    DefaultFlowCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, SaveStrategy
from transformers.utils import logging

from .checkpointing import EvaluationStopped, VerifiedCheckpointTrainer, wait_for_manifests


logger = logging.get_logger(__name__)


EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
# A launcher passes on a signal that the process may have got itself: within so many seconds it is the same one.
REPEATED_WITHIN = 2.0
_OVERDUE = 100  # added to the number of a signal: half of the grace is over
_END = 0  # written to the pipe when the training has ended


class StopOnSignalCallback(TrainerCallback):
    """Has any `Trainer` save a checkpoint on SIGTERM or Ctrl-C, and end with exit code 143 or 130.

    The checkpoint is saved at the end of the step in which the signal comes, and of several processes that get it, or
    of which one gets it, all stop at the same step. In an evaluation it is saved after that, or by
    [`VanillaTrainer`] once half of the grace is over; an evaluation due at that step is skipped by other trainers. A
    second signal ends the process at once, and so does the end of the grace, without a checkpoint of the current step;
    no earlier checkpoint is affected. After the training the signals do again what they did before. The training
    scripts have this callback.

    ```python
    Trainer(model, args, callbacks=[StopOnSignalCallback()])
    ```

    Args:
        grace (`float`, *optional*, defaults to 25.0): Seconds; below the 30 of torchrun and of Kubernetes.

    Raises:
        ValueError: if `grace` is not positive.
        KeyboardInterrupt: from `Trainer.train`, after Ctrl-C; after SIGTERM it is `SystemExit`.
    """

    def __init__(self, grace: float = 25.0) -> None:
        if not grace > 0:
            raise ValueError(f"`grace` must be a positive number of seconds, got {grace}.")
        self.grace = grace
        self.stops_evaluation = False  # set where the trainer saves then
        self.saves_out_of_turn = False  # whether the checkpoint of the stop is one that nothing else asks for
        self._received = 0  # number of the signal; 0 before
        self._received_at = 0.0
        self._is_stopping = False
        self._has_updated = False  # whether there is anything to save
        self._handlers: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._group: Any = None
        self._process = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Handle the signals from now on; a training that returns to a checkpoint handles them already."""
        self._has_updated = False
        if self._handlers:
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Signals are not handled, because the training is not in the main thread.")
            return
        self._received, self._is_stopping, self._process = 0, False, os.getpid()
        self.saves_out_of_turn = False
        if args.world_size > 1 and distributed.is_initialized():
            # Tensors of this group stay on the CPU, so no step waits for a GPU.
            self._group = distributed.new_group(backend="gloo", timeout=args.ddp_timeout_delta)
        if os.name == "posix":
            self._watch(REPEATED_WITHIN if args.world_size > 1 else 0.0)
        # A shell has its background jobs ignore Ctrl-C.
        handled = [number for number in EXIT_CODES if signal.getsignal(number) is not signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._receive) for number in handled}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Have the trainer save and stop; if it evaluates next, as the epoch ends, that comes first."""
        self._has_updated = True
        if not self._ends_evaluated_epoch(args, state) and self._is_requested():
            self._note_turn(args, state, control)
            self._stop(control)
            if not self.stops_evaluation or args.save_strategy == SaveStrategy.BEST:
                control.should_evaluate = False

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Have the trainer save and stop after an evaluation, unless that decides what is saved."""
        if self._has_updated and args.save_strategy != SaveStrategy.BEST and self._is_requested():
            self._note_turn(args, state, control)
            self._stop(control)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop an evaluation of the training that takes too long."""
        if self._has_updated and self.stops_evaluation and self._is_requested(overdue=True):
            self._note_turn(args, state, control)
            self._is_stopping = True
            raise EvaluationStopped

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop after a checkpoint that was being saved when the signal came."""
        if self._is_requested():
            self._stop(control)
            control.should_save = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the training, which has just saved."""
        if self._is_stopping:
            self._end(args, state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """End a training that an evaluation or a checkpoint after an epoch has stopped, before it looks finished."""
        if self._is_stopping and "train_runtime" in (logs or {}):
            self._end(args, state)

    def _end(self, args: TrainingArguments, state: TrainerState) -> NoReturn:
        """Say what was saved, and end the process."""
        wait_for_manifests()
        if self._group is not None:
            distributed.barrier(self._group)  # a launcher kills the others once one has ended
        number = signal.Signals(self._received)
        self.restore()
        folder = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        done = "saved" if folder.is_dir() else "could not save"
        logger.warning(f"{number.name}: {done} the state of step {state.global_step} in {args.output_dir}, and ended.")
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(EXIT_CODES[number])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore what the signals did before."""
        self.restore()

    def restore(self) -> None:
        """Restore what the signals did before the training."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            os.write(self._pipe[1], bytes([_END]))
            os.close(self._pipe[1])
            self._pipe = None
        self._group = None

    def _note_turn(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Note whether nothing else asks for a checkpoint here, unless the stop itself has asked for one."""
        if self._is_stopping:
            return
        is_end_of_epoch = args.save_strategy == SaveStrategy.EPOCH and float(state.epoch or 0).is_integer()
        self.saves_out_of_turn = not control.should_save and not is_end_of_epoch

    def _ends_evaluated_epoch(self, args: TrainingArguments, state: TrainerState) -> bool:
        """Return whether an epoch ends whose evaluation can be stopped, and does not decide what is saved."""
        epoch = float(state.epoch or 0)
        is_evaluated = args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay <= epoch
        return (
            self.stops_evaluation and is_evaluated and args.save_strategy != SaveStrategy.BEST and epoch.is_integer()
        )

    def _stop(self, control: TrainerControl) -> None:
        """Have the trainer save and leave its loop."""
        self._is_stopping = control.should_save = control.should_training_stop = True

    def _is_requested(self, overdue: bool = False) -> bool:
        """Return whether any process has got a signal; with `overdue`, whether half of its grace is over too."""
        if not self._handlers:
            return False
        is_overdue = self._received and time.monotonic() - self._received_at > self.grace / 2
        request = self._received + (_OVERDUE if is_overdue else 0)
        if self._group is not None:
            shared = torch.tensor(request)
            distributed.all_reduce(shared, distributed.ReduceOp.MAX, group=self._group)
            request = int(shared)
        received = request % _OVERDUE
        if received and not self._received:  # by another process; one that came in the meantime is kept
            self._received, self._received_at = received, time.monotonic()
        return request >= _OVERDUE if overdue else request > 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; the worker processes of a loader leave the first one to their parent."""
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
        elif not self._received:
            self._received_at = time.monotonic()
            self._received = number

    def _watch(self, repeated_within: float) -> None:
        """Start the thread that ends the process; the system writes to its pipe even while torch computes."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        arguments = (self._pipe[0], self.grace, repeated_within)
        threading.Thread(target=_end_in_time, args=arguments, name="signals", daemon=True).start()


def _end_in_time(pipe: int, grace: float, repeated_within: float) -> None:
    """Wait for a first signal, and end the process at a second one, or when the grace is over."""
    first, received_at = 0, 0.0
    while True:
        remaining = received_at + grace - time.monotonic() if first else None
        if not select.select([pipe], [], [], remaining if remaining is None else max(0.0, remaining))[0]:
            _leave(first, f"no step has ended within {grace:g} s")
        for number in os.read(pipe, 1):
            if number == _END:
                os.close(pipe)
                return
            if number not in EXIT_CODES:
                continue
            if not first:
                first, received_at = number, time.monotonic()
                _say(f"{signal.Signals(number).name}: saving at the end of this step; once more ends at once.")
            elif time.monotonic() - received_at >= repeated_within:
                _leave(number, "second signal")


def _leave(number: int, reason: str) -> NoReturn:
    """End the process at once."""
    _say(f"{signal.Signals(number).name}: {reason}; ended without saving this step.")
    os._exit(EXIT_CODES[signal.Signals(number)])


def _say(message: str) -> None:
    """Write to standard error without the locks that the main thread may have."""
    with suppress(OSError):
        os.write(2, f"{message}\n".encode())


def _forget_pipe() -> None:
    """Keep signals of a forked process out of its parent's pipe."""
    with suppress(ValueError, OSError):
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pipe)


@contextmanager
def stopping_on_signals(trainer: Trainer, grace: float) -> Iterator[None]:
    """Have the trainings of a trainer in this block end as [`StopOnSignalCallback`] says.

    Args:
        trainer (`Trainer`): The trainer.
        grace (`float`): Seconds from the signal to the end.

    Yields:
        Nothing: the block trains.
    """
    callback = StopOnSignalCallback(grace)
    callback.stops_evaluation = isinstance(trainer, VerifiedCheckpointTrainer)
    # Directly after the one that knows what is due at a step, so that others see that a checkpoint is saved next.
    callbacks = trainer.callback_handler.callbacks
    flows = [place for place, each in enumerate(callbacks, start=1) if isinstance(each, DefaultFlowCallback)]
    callbacks.insert(min(flows, default=0), callback)
    try:
        yield
    finally:
        callback.restore()
        trainer.remove_callback(callback)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Have SIGTERM end this block with `SystemExit(143)`, so that files and locks are cleaned up.

    Yields:
        Nothing.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(EXIT_CODES[signal.SIGTERM])

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


__all__ = ["StopOnSignalCallback"]
