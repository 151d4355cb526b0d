"""Stopping a diverged training before anything is saved."""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy


# How advice on settings can be followed.
IN_NEW_RUN = "in a new run, which can start from the model of a checkpoint: a resumed run keeps its settings"


class DivergedError(ValueError):
    """The error of a training that has diverged: what it computes is nan or infinite, or its loss rose far."""


class StopOnNaNCallback(TrainerCallback):
    """Stops a training of any `Trainer` whose loss, gradient norm or weights are nan or infinite.

    Loss and gradient norm are checked in each log, the weights before each checkpoint and at the end of the training,
    where the trainer waits for the accelerator anyway. So neither a checkpoint nor a model saved after `train()` has
    such weights. With the loss scaling of fp16, infinite gradients are normal (their update is skipped), and so the
    gradient norm is not checked. Add it after callbacks that set `control.should_save`.

    ```python
    Trainer(model, TrainingArguments("run", logging_nan_inf_filter=False), callbacks=[StopOnNaNCallback()])
    ```

    `logging_nan_inf_filter`, on by default in `TrainingArguments`, replaces such losses in the log by others; the
    training then stops at the gradient norm or the weights.

    Raises:
        DivergedError: from `Trainer.train`, with the step and what is nan or infinite.
    """

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check loss and gradient norm."""
        logs = logs or {}
        watched = {"training loss": logs.get("loss", logs.get("train_loss"))}
        has_loss_scaling = args.fp16 or getattr(kwargs.get("optimizer"), "scaler", None) is not None
        if not has_loss_scaling:
            watched["gradient norm"] = logs.get("grad_norm")
        for name, value in watched.items():
            if isinstance(value, int | float) and not math.isfinite(value):
                raise DivergedError(
                    f"The {name} is {value} at step {state.global_step} (or at a step since the log before it); "
                    f"{advice_after_nan(args)}"
                )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the weights if a checkpoint is saved next."""
        if control.should_save:
            check_finite_weights(kwargs["model"], state.global_step)

    on_epoch_end = on_step_end

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the weights if a checkpoint may be saved next, such as that of the best model so far."""
        if control.should_save or args.save_strategy == SaveStrategy.BEST:
            check_finite_weights(kwargs["model"], state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the weights of the trained model."""
        check_finite_weights(kwargs["model"], state.global_step)


def advice_after_nan(args: TrainingArguments) -> str:
    """Return the second half of a message on a training that stops.

    Args:
        args (`TrainingArguments`): The learning rate.

    Returns:
        `str`: what is sound, and what to change.
    """
    return (
        f"checkpoints already saved are sound. Lower the learning rate ({args.learning_rate:g}), warm up longer, or "
        f"train in float32, {IN_NEW_RUN}."
    )


def check_finite_weights(model: torch.nn.Module, step: int) -> None:
    """Check that all parameters are finite; of sharded ones, the part of this process.

    Reads all parameters and waits for each device once.

    Args:
        model (`torch.nn.Module`): The model, wrapped or not.
        step (`int`): Number of updates so far, for the message.

    Raises:
        DivergedError: if a parameter holds nan or infinity; the message names the first one.
    """
    parameters = dict(model.named_parameters())
    # Only the local part of a sharded parameter: a collective would hang if one process saves alone.
    local = (each.to_local() if isinstance(each, DTensor) else each for each in parameters.values())
    is_finite = [torch.isfinite(each).all() for each in local]
    # The layers of one model may be spread over several devices.
    if not is_finite or torch.stack([each.to(is_finite[0].device) for each in is_finite]).all():
        return
    name = next(name for name, finite in zip(parameters, is_finite, strict=True) if not finite)
    raise DivergedError(
        f"The weights `{name}` hold nan or infinity at step {step}, and so they are not saved. Lower the learning "
        f"rate or warm up longer, {IN_NEW_RUN}."
    )


__all__ = ["StopOnNaNCallback", "check_finite_weights"]
