"""Training arguments of the trainers and of fine-tuning."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Seq2SeqTrainingArguments, TrainingArguments


# Of both classes of training arguments.
FORCE_RESUME: Any = {
    "help": "Resume although configuration, tokenizer, data, order of examples or number of processes changed.",
    "aliases": ["--force"],
}
STOP_GRACE: Any = {
    "help": "Seconds from SIGTERM or Ctrl-C until the training has saved and ended. torchrun kills after 30."
}


@dataclass
class VanillaTrainingArguments(Seq2SeqTrainingArguments):
    """The arguments of `Seq2SeqTrainingArguments`, and those of [`VanillaTrainer`].

    Args:
        max_tokens_per_batch (`int`, *optional*): Size of a batch of one device in tokens, padding included, the larger
            of source and target side. Replaces `per_device_train_batch_size` and `per_device_eval_batch_size`. `None`
            keeps the stock batches, as does the stock `Seq2SeqTrainer`, which ignores this argument and the next.
        teacher_forcing_ratio (`float`, *optional*, defaults to 1.0): Share of the decoder inputs that are the gold
            tokens; the rest are the model's own predictions from a first pass without gradient. The paper always feeds
            the gold tokens (1.0).
        logging_nan_inf_filter (`bool`, *optional*, defaults to `False`): As in `TrainingArguments`, but off:
            [`~hf_vanilla.training.StopOnNaNCallback`], which is part of [`VanillaTrainer`], stops at a loss that is
            not finite, and does not see a filtered one. Off also saves a device synchronisation per step.
        ddp_find_unused_parameters (`bool`, *optional*, defaults to `False`): As in `TrainingArguments`, but off: every
            parameter takes part in every update of these models, and looking for others costs a walk over each graph.
            Set it for a model with frozen parts.
        force_resume (`bool`, *optional*, defaults to `False`): Resume from a checkpoint although configuration,
            tokenizer, training data, order of the examples or number of processes are not those that it was saved
            with.
        stop_grace (`float`, *optional*, defaults to 25.0): Seconds from SIGTERM or Ctrl-C within which a training of
            the scripts saves a checkpoint and ends ([`~hf_vanilla.training.StopOnSignalCallback`]).

    Raises:
        ValueError: if a value is out of its range, or if `max_tokens_per_batch` is combined with another argument that
            shapes batches.

    Source: scheduled sampling in two passes is Mihaylova & Martins 2019, "Scheduled Sampling for Transformers".
    """

    max_tokens_per_batch: int | None = field(
        default=None,
        metadata={
            "help": "Size of a batch of one device in tokens, padding included, the larger of source and target side. "
            "Replaces the per_device batch sizes. Unset: the stock batches of a fixed number of sentences."
        },
    )
    teacher_forcing_ratio: float = field(
        default=1.0,
        metadata={
            "help": "Share of the decoder inputs that are the gold tokens; the rest are the model's own predictions "
            "(scheduled sampling, a second pass per step). The paper's is 1.0."
        },
    )
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={"help": "Hide losses that are nan or inf from the log. Off: they show, and the run stops."},
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False,
        metadata={"help": "Look for parameters without a gradient. Off: every parameter must have one."},
    )
    force_resume: bool = field(default=False, metadata=FORCE_RESUME)
    stop_grace: float = field(default=25.0, metadata=STOP_GRACE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.teacher_forcing_ratio <= 1.0:
            raise ValueError(f"`teacher_forcing_ratio` must be between 0 and 1, got {self.teacher_forcing_ratio}.")
        if self.max_tokens_per_batch is None:
            return
        if self.max_tokens_per_batch < 1:
            raise ValueError(f"`max_tokens_per_batch` must be at least 1 token, got {self.max_tokens_per_batch}.")
        for name, is_set in self._conflicting_arguments().items():
            if is_set:
                raise ValueError(
                    f"`{name}` can't be combined with `max_tokens_per_batch` ({self.max_tokens_per_batch}), which "
                    "makes batches of its own; leave one of the two at its default."
                )

    def _conflicting_arguments(self) -> dict[str, bool]:
        """Map each conflicting batch argument to whether it is set."""
        accelerator_config: Any = self.accelerator_config
        return {
            "train_sampling_strategy": self.train_sampling_strategy != "random",
            "auto_find_batch_size": bool(self.auto_find_batch_size),
            "eval_do_concat_batches=False": not self.eval_do_concat_batches,
            "accelerator_config.split_batches": bool(accelerator_config.split_batches),
            "accelerator_config.dispatch_batches": bool(accelerator_config.dispatch_batches),
        }


# Scores of which lower is better.
LOSSES = ("loss", "mse")


@dataclass
class FinetuningArguments(TrainingArguments):
    """`TrainingArguments` with defaults from the paper's grid.

    Args:
        output_dir (`str`): Folder of the models, with a subfolder for each seed.
        learning_rate (`float`): Peak learning rate.
        num_train_epochs (`float`): Epochs.
        per_device_train_batch_size (`int`): Batch size.
        per_device_eval_batch_size (`int`): Batch size of evaluation.
        warmup_steps (`float`): Warm-up in updates, or below 1 as a share of them.
        weight_decay (`float`): Weight decay, except for biases and norms.
        train_sampling_strategy (`str`): Order of the examples.
        logging_steps (`float`): Interval of the log in updates, or below 1 as a share of them.
        logging_nan_inf_filter (`bool`): Whether to hide losses that are nan or infinite from the log; the run then
            stops later.
        save_strategy (`str`): When to save checkpoints while training.
        force_resume (`bool`): As in [`VanillaTrainingArguments`].
        stop_grace (`float`): Likewise.

    Raises:
        ValueError: if `output_dir` is missing, or a checkpoint to resume from is given.

    Source: Devlin et al. 2018, A.3.
    """

    output_dir: str | None = field(
        default=None, metadata={"help": "Folder of the models, with a subfolder for each seed."}
    )
    learning_rate: float = field(
        default=3e-5,
        metadata={"help": "Peak learning rate; the paper tries 2e-5 to 5e-5. Small models need more, such as 3e-4."},
    )
    num_train_epochs: float = field(
        default=3.0, metadata={"help": "Epochs; the paper tries 2 to 4. Few rows need more, such as 20."}
    )
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Batch size; the paper tries 16 and 32."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Batch size of evaluation."})
    warmup_steps: float = field(default=0.1, metadata={"help": "Warm-up in updates, or below 1 as a share of them."})
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay, except for biases and norms."})
    train_sampling_strategy: str = field(
        default="group_by_length", metadata={"help": "group_by_length pads least; random is the stock order."}
    )
    logging_steps: float = field(
        default=0.05, metadata={"help": "Log the loss every this many updates, or below 1 every such share."}
    )
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={"help": "Hide losses that are nan or inf from the log. Off: they show, and the run stops."},
    )
    save_strategy: str = field(default="no", metadata={"help": "Checkpoints while training: no, epoch or steps."})
    force_resume: bool = field(default=False, metadata=FORCE_RESUME)
    stop_grace: float = field(default=25.0, metadata=STOP_GRACE)

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise ValueError("`output_dir` is missing; give a folder for the models, as in --output_dir runs/task.")
        if self.resume_from_checkpoint is not None:
            raise ValueError(
                "`resume_from_checkpoint` has no effect on a fine-tuning, which resumes from the checkpoints in its "
                "`output_dir`; leave it out."
            )
        # Without an accelerator, transformers accepts bf16 only with `use_cpu`.
        if not torch.accelerator.is_available():
            self.use_cpu = True
            self.dataloader_pin_memory = False
        super().__post_init__()
