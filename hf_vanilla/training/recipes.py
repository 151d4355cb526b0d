"""The papers' optimizers, schedules and training arguments."""

from typing import Any

import torch
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_inverse_sqrt_schedule,
)
from transformers.trainer_pt_utils import get_parameter_names
from transformers.trainer_utils import SchedulerType
from transformers.utils import logging

from .arguments import VanillaTrainingArguments


logger = logging.get_logger(__name__)


# Patterns of the names of parameters that `Trainer` does not decay, regardless of the class of their layer.
NAMES_WITHOUT_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


# Higher peaks of the learning rate get a warning. It is ten times that of the paper's base model (7.0e-4; big:
# 4.9e-4), and nearly twice the highest of the recorded trainings (4e-3). In 600 updates on 5,000 pairs of number words
# and digits, a model of width 128 learnt to translate with a peak of 6.3e-3 (200 updates of warm-up), and hardly with
# 7.7e-3 (133) and more.
HIGHEST_PEAK = 7e-3


# GPT's pre-training (Radford et al. 2018, 4.1; epsilon and clipping are those of the authors' code): batches of 64
# blocks of 512 tokens, 100 epochs.
GPT_RECIPE: dict[str, Any] = {
    "learning_rate": 2.5e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2000,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "num_train_epochs": 100.0,
    "per_device_train_batch_size": 64,
}


def paper_training_arguments(
    config: PreTrainedConfig,
    output_dir: str,
    *,
    warmup_steps: int = 4000,
    factor: float = 1.0,
    **overrides: Any,
) -> VanillaTrainingArguments:
    """Return training arguments with the optimizer and schedule of the Transformer's paper for a model of `config`.

    Adam with beta1 0.9, beta2 0.98 and epsilon 1e-9, no weight decay, and the schedule of [`noam_learning_rate`], as
    transformers' `inverse_sqrt`. Gradients are not clipped (`max_grad_norm=0`), because the paper does not clip;
    transformers would clip at 1. Label smoothing and dropout belong to the model's config. What depends on the
    hardware has transformers' defaults: the paper used batches of about 25,000 source and 25,000 target tokens
    (`max_tokens_per_batch` times processes times accumulated batches) and 100,000 steps (300,000 for the big model).

    With [`VanillaTrainer`] the learning rate of every update equals the formula. The stock trainer counts the steps of
    the schedule from 0, which makes it one update late; pass it [`paper_optimizers`] for the exact formula.

    Args:
        config (`PreTrainedConfig`): Config of the model; its `d_model` sets the scale of the learning rate.
        output_dir (`str`): Folder of the checkpoints.
        warmup_steps (`int`, *optional*, defaults to 4000): Number of updates over which the learning rate grows.
        factor (`float`, *optional*, defaults to 1.0): Scales the learning rate; 1.0 is the paper's.
        **overrides (`Any`): Further training arguments, which also replace those set here.

    Returns:
        `VanillaTrainingArguments`: for [`VanillaTrainer`] and for the stock `Seq2SeqTrainer`.

    Raises:
        ValueError: if `warmup_steps` is below 1, `factor` is not positive, or `config` has no `d_model`.

    Source: Vaswani et al. 2017, 5.1 to 5.3.
    """
    d_model = getattr(config, "d_model", None)
    if d_model is None:
        raise ValueError(f"`config` must have a `d_model`, but a `{type(config).__name__}` has none.")
    if factor <= 0:
        raise ValueError(f"`factor` must be positive, got {factor}.")
    arguments: dict[str, Any] = {
        "learning_rate": noam_learning_rate(warmup_steps, d_model, warmup_steps, factor),
        "lr_scheduler_type": SchedulerType.INVERSE_SQRT,
        "warmup_steps": warmup_steps,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-9,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
    }
    return VanillaTrainingArguments(output_dir=output_dir, **{**arguments, **overrides})


def bert_training_arguments(
    output_dir: str, *, max_steps: int = 1_000_000, warmup_steps: int = 10_000, **overrides: Any
) -> VanillaTrainingArguments:
    """Return training arguments with the optimizer and schedule of BERT's pre-training.

    Adam with learning rate 1e-4, beta1 0.9, beta2 0.999, weight decay 0.01 except for biases and norms, epsilon 1e-6
    (the authors' code), gradients clipped at 1, warm-up, linear decay to 0. The paper's batches have 256 sequences, of
    512 tokens at the end: `max_tokens_per_batch` times processes times accumulation is 131,072.

    Args:
        output_dir (`str`): Folder of the checkpoints.
        max_steps (`int`): Number of updates.
        warmup_steps (`int`): Number of updates over which the learning rate grows.
        **overrides (`Any`): Further training arguments, which also replace those set here.

    Returns:
        `VanillaTrainingArguments`: for [`PretrainingTrainer`] and for the stock `Trainer`.

    Raises:
        ValueError: if a value is out of its range.

    Source: Devlin et al. 2018, A.2.
    """
    if not 0 <= warmup_steps <= max_steps:
        raise ValueError(f"`warmup_steps` must be between 0 and `max_steps` ({max_steps}), got {warmup_steps}.")
    arguments: dict[str, Any] = {
        "learning_rate": 1e-4,
        "lr_scheduler_type": "linear",
        "max_steps": max_steps,
        "warmup_steps": warmup_steps,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-6,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    }
    return VanillaTrainingArguments(output_dir=output_dir, **{**arguments, **overrides})


def gpt_training_arguments(output_dir: str, **overrides: Any) -> VanillaTrainingArguments:
    """Return training arguments with the optimizer and schedule of GPT's pre-training, [`GPT_RECIPE`].

    AdamW with learning rate 2.5e-4, beta1 0.9, beta2 0.999, weight decay 0.01 except for biases and norms, gradients
    clipped at 1, 2,000 updates of linear warm-up, cosine decay to 0. The paper's 100 epochs have batches of 64 blocks
    of 512 tokens from [`~hf_vanilla.data.build_blocks`].

    Args:
        output_dir (`str`): Folder of the checkpoints.
        **overrides (`Any`): Further training arguments, which also replace those of the recipe.

    Returns:
        `VanillaTrainingArguments`: for [`VanillaTrainer`] and for the stock `Trainer`.

    Source: Radford et al. 2018, 4.1.
    """
    return VanillaTrainingArguments(output_dir=output_dir, **{**GPT_RECIPE, **overrides})


def noam_learning_rate(step: int, d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """Return the paper's learning rate at one update.

    factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)

    Args:
        step (`int`): Number of the update; the first is 1.
        d_model (`int`): Width of the model.
        warmup_steps (`int`): Number of updates over which the rate grows.
        factor (`float`, *optional*, defaults to 1.0): Scales the whole schedule; 1.0 is the paper's.

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
        optimizer (`torch.optim.Optimizer`): The optimizer; its learning rate is that of the last warm-up step, the
            largest.
        num_warmup_steps (`int`): Number of warm-up steps.
        timescale (`int`, *optional*): Time scale of the decay; the default is `num_warmup_steps`.

    Returns:
        `LambdaLR`: the schedule.

    Source: Vaswani et al. 2017, 5.3.
    """
    # `last_epoch=0` marks step 0 as done. torch then expects the base learning rate under this name.
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return get_inverse_sqrt_schedule(optimizer, num_warmup_steps, timescale=timescale, last_epoch=0)


def paper_optimizers(
    model: PreTrainedModel, args: Seq2SeqTrainingArguments
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Return the `optimizers` with which the stock `Seq2SeqTrainer` follows the paper's formula from the first update.

    ```python
    args = paper_training_arguments(model.config, "out")
    trainer = Seq2SeqTrainer(model, args, optimizers=paper_optimizers(model, args), train_dataset=...)
    ```

    [`VanillaTrainer`] does not need it. As in the trainers' own optimizer, biases and norms have no weight decay.

    Args:
        model (`PreTrainedModel`): The model, on the device it will be trained on.
        args (`Seq2SeqTrainingArguments`): From [`paper_training_arguments`].

    Returns:
        The optimizer and its schedule.

    Raises:
        ValueError: if `args` have another schedule than `inverse_sqrt`, or a warm-up as a share of the run.
    """
    schedule = SchedulerType(args.lr_scheduler_type)
    if schedule != SchedulerType.INVERSE_SQRT:
        raise ValueError(f"`lr_scheduler_type` must be 'inverse_sqrt', got '{schedule.value}'.")
    if args.warmup_steps < 1:
        raise ValueError(f"`warmup_steps` must be a number of steps, 1 or more, got {args.warmup_steps}.")
    optimizer_class, optimizer_arguments = Seq2SeqTrainer.get_optimizer_cls_and_kwargs(args, model)
    optimizer = optimizer_class(_parameter_groups(model, args.weight_decay), **optimizer_arguments)
    scheduler_arguments: Any = args.lr_scheduler_kwargs or {}
    return optimizer, inverse_sqrt_schedule_from_one(optimizer, int(args.warmup_steps), **scheduler_arguments)


def _parameter_groups(model: PreTrainedModel, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters in two groups, with and without decay, as `Trainer.create_optimizer` does."""
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], NAMES_WITHOUT_DECAY))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in trained if name in decayed], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in trained if name not in decayed], "weight_decay": 0.0},
    ]


class WarmupWarning(TrainerCallback):
    """Warns of a warm-up longer than half of the run, and of a peak of the learning rate that is too high.

    A shorter warm-up makes the peak of the paper's schedule higher: it is d_model^-0.5 * warmup_steps^-0.5.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check warm-up and peak, now that the length of the run is known.

        Args:
            args (`TrainingArguments`): The training arguments.
            state (`TrainerState`): The length of the run.
            control (`TrainerControl`): Not used.
            **kwargs (`Any`): Not used.
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
                f"above {HIGHEST_PEAK:.0e} models often learn little or nothing. The shorter the warm-up, the "
                "higher is the paper's peak: raise --warmup_steps, or give a lower --learning_rate."
            )
