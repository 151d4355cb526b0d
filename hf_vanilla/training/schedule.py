"""The learning rate of Vaswani et al. 2017, section 5.3: the formula, and the schedule that follows it."""

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, get_inverse_sqrt_schedule
from transformers.utils import logging


logger = logging.get_logger(__name__)


def noam_learning_rate(step: int, d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """Return the paper's learning rate at one update.

    factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)

    Args:
        step (`int`):
            Number of the update; the first is 1.
        d_model (`int`):
            Width of the model.
        warmup_steps (`int`):
            Number of updates over which the rate grows.
        factor (`float`, *optional*, defaults to 1.0):
            Scales the whole schedule; 1.0 is the paper's.

    Returns:
        `float`: the learning rate.

    Raises:
        ValueError: if `step`, `d_model` or `warmup_steps` is below 1.

    Source: Vaswani et al. 2017, 5.3, equation 3.
    """
    for name, value in (("warmup_steps", warmup_steps), ("d_model", d_model), ("step", step)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    return factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def inverse_sqrt_schedule_from_one(
    optimizer: torch.optim.Optimizer, num_warmup_steps: int, timescale: int | None = None
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return transformers' `inverse_sqrt` schedule with the steps counted from 1.

    The first update is step 1 as in the paper's formula; stock, it is step 0, with a learning rate of 0.

    Args:
        optimizer (`torch.optim.Optimizer`):
            The optimizer; its learning rate is that of the last warm-up step, the largest.
        num_warmup_steps (`int`):
            Number of warm-up steps.
        timescale (`int`, *optional*):
            Time scale of the decay; the default is `num_warmup_steps`.

    Returns:
        `LambdaLR`: the schedule.

    Source: Vaswani et al. 2017, 5.3.
    """
    # `last_epoch=0` says that step 0 is over. torch then asks for the base learning rate by this name.
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return get_inverse_sqrt_schedule(optimizer, num_warmup_steps, timescale=timescale, last_epoch=0)


class LongWarmupWarning(TrainerCallback):
    """Warns when a run is to end soon after its warm-up or within it, where a model has hardly begun to learn."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare warm-up and length of the run, which are both known now.

        Args:
            args (`TrainingArguments`):
                How to train.
            state (`TrainerState`):
                The length of the run.
            control (`TrainerControl`):
                Not used.
            **kwargs (`Any`):
                Not used.
        """
        warmup = args.get_warmup_steps(state.max_steps)
        if state.is_world_process_zero and warmup > state.max_steps / 2:
            logger.warning(
                f"The learning rate grows over {warmup:,} updates (--warmup_steps), more than half of this run's "
                f"{state.max_steps:,} (--max_steps), so the model will hardly learn: warm up over a third of them or "
                "fewer, or train for longer."
            )
