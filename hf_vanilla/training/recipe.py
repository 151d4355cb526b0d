"""The training recipe of Vaswani et al. 2017, section 5.3, as Hugging Face training arguments."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.trainer_pt_utils import get_parameter_names
from transformers.trainer_utils import SchedulerType

from .schedule import inverse_sqrt_schedule_from_one, noam_learning_rate
from .trainer import VanillaTrainingArguments


# Patterns of the names of parameters that `Trainer` does not decay, whatever the class of their layer.
NAMES_WITHOUT_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def paper_training_arguments(
    config: PreTrainedConfig,
    output_dir: str,
    *,
    warmup_steps: int = 4000,
    factor: float = 1.0,
    **overrides: Any,
) -> VanillaTrainingArguments:
    """Return training arguments with the paper's optimiser and schedule for a model of `config`.

    Adam with beta1 0.9, beta2 0.98 and epsilon 1e-9, no weight decay, and the schedule of [`noam_learning_rate`], as
    transformers' `inverse_sqrt`. Gradients are not clipped (`max_grad_norm=0`), because the paper does not clip;
    transformers would clip at 1. Label smoothing and dropout belong to the model's config. What the paper's hardware
    decided is left at transformers' defaults: it took batches of about 25,000 source and 25,000 target tokens
    (`max_tokens_per_batch` times processes times accumulated batches) and 100,000 steps (300,000 for the big model).

    With [`VanillaTrainer`] the learning rate of every update equals the formula. The stock trainer counts the steps of
    the schedule from 0, which makes it one update late; hand it [`paper_optimizers`] to get the formula there too.

    Args:
        config (`PreTrainedConfig`):
            Config of the model; its `d_model` sets the scale of the learning rate.
        output_dir (`str`):
            Folder of the checkpoints.
        warmup_steps (`int`, *optional*, defaults to 4000):
            Number of updates over which the learning rate grows.
        factor (`float`, *optional*, defaults to 1.0):
            Scales the learning rate; 1.0 is the paper's.
        **overrides (`Any`):
            Any other training argument, or another value of one that is set here.

    Returns:
        `VanillaTrainingArguments`: for [`VanillaTrainer`] and for the stock `Seq2SeqTrainer`.

    Raises:
        ValueError: if `warmup_steps` is below 1, `factor` is not positive, or `config` has no `d_model`.

    Source: Vaswani et al. 2017, 5.1 to 5.3.
    """
    d_model = getattr(config, "d_model", None)
    if d_model is None:
        raise ValueError(f"`config` must have a `d_model`, which a `{type(config).__name__}` has not.")
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
        model (`PreTrainedModel`):
            The model, on the device it will be trained on.
        args (`Seq2SeqTrainingArguments`):
            From [`paper_training_arguments`].

    Returns:
        The optimizer and its schedule.

    Raises:
        ValueError: if `args` name another schedule than `inverse_sqrt`, or a warm-up as a share of the run.
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
    """Return the parameters to train in two groups, with and without decay, as `Trainer.create_optimizer` does."""
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], NAMES_WITHOUT_DECAY))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in trained if name in decayed], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in trained if name not in decayed], "weight_decay": 0.0},
    ]
