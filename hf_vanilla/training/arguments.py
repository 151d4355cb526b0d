"""Training arguments of the trainers and of fine-tuning."""

import math
import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import EarlyStoppingCallback, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from ..data.files import check_choice
from ..models.checks import check_integer
from ..precision import FASTEST, fastest_precision
from .checkpoints import lower_is_better
from .policies import MAX_ROLLBACKS, MAX_SKIPS_IN_A_ROW, StopOnDivergenceCallback, check_on_nan
from .runs import saved_option


logger = logging.get_logger(__name__)


@dataclass
class PrecisionArguments(TrainingArguments):
    """Training arguments with a precision that can be chosen by the machine.

    Args:
        precision (`str`, *optional*): `"fastest"` is the faster of float32 and bfloat16 on this machine
            ([`~hf_vanilla.precision.fastest_precision`]), and becomes that name; a run that is resumed keeps its
            choice. `"bfloat16"` is what `bf16` of `TrainingArguments` is: products in bfloat16, weights in float32.
            By default, and if `bf16` or `fp16` is set, those decide.

    Raises:
        ValueError: if it is another name, or `max_steps` is 0.
    """

    precision: Literal["fastest", "float32", "bfloat16"] | None = field(
        default=None,
        metadata={
            "help": "Type of the matrix products: fastest measures which is faster on this machine. --bf16 and --fp16 "
            "decide if they are given. Default: float32."
        },
    )

    def __post_init__(self) -> None:
        if self.precision not in (None, FASTEST, "float32", "bfloat16"):
            raise ValueError(f"`precision` must be fastest, float32 or bfloat16, got {self.precision!r}.")
        if self.max_steps == 0:
            raise ValueError("`max_steps` must be at least 1 update, or -1 for all `num_train_epochs`, got 0.")
        if not torch.accelerator.is_available():
            self.use_cpu: bool = True  # transformers accepts bf16 with it only
            self.dataloader_pin_memory: bool = False
        if self.fp16 or (self.bf16 and self.precision != "bfloat16"):
            self.precision = None
        if self.precision == "bfloat16":
            self._use_bfloat16()
        if self.use_cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # transformers sets `ddp_timeout` on GPUs alone: on CPUs, the others would wait half an hour for a process
            # that hangs
            PartialState(cpu=True, backend=self.ddp_backend, timeout=timedelta(seconds=self.ddp_timeout))
        super().__post_init__()
        if self.precision == FASTEST:
            self._choose_precision()
        if self.precision == "float32":
            self.mixed_precision = "no"  # whatever `accelerate launch` says

    def _choose_precision(self) -> None:
        """Take the choice of the run in the folder, or the faster one here; the first process chooses for all."""
        chosen: list[Any] = [None]
        if self.process_index == 0:
            folder = Path(str(self.output_dir))
            if isinstance(self.resume_from_checkpoint, str):
                folder = Path(self.resume_from_checkpoint).absolute().parent
            is_bfloat16 = saved_option(folder, "bf16")
            if is_bfloat16 is None:
                choice = fastest_precision(self.device)
                chosen[0] = choice.name
                logger.warning(f"Precision {choice}.")
            else:
                chosen[0] = "bfloat16" if is_bfloat16 else "float32"
                logger.warning(f"Precision {chosen[0]}, as the run in {folder} has it.")
        broadcast_object_list(chosen)
        self.precision = chosen[0]
        if self.precision == "bfloat16":
            self._use_bfloat16()

    def _use_bfloat16(self) -> None:
        self.bf16: bool = True
        self.mixed_precision = "bf16"


@dataclass
class PolicyArguments(PrecisionArguments):
    """[`PrecisionArguments`] with what a training does if something fails.

    Args:
        on_nan (`str`, defaults to `"stop"`): What to do at an update whose loss or gradient is nan or infinite:
            `"stop"`, `"skip"` or `"rollback"` ([`~hf_vanilla.training.NaNPolicyCallback`]).
        stop_on_divergence (`list[float]`, *optional*): Stop once the loss has diverged, by these numbers of
            [`~hf_vanilla.training.StopOnDivergenceCallback`]: `before`, `recent` and `sigmas`.
        on_disk_full (`str`, defaults to `"stop"`): What to do if the disk is full at a checkpoint: `"stop"`, or
            `"continue"` without it ([`~hf_vanilla.training.VerifiedCheckpointTrainer`]).
        force_resume (`bool`, defaults to `False`): Resume from a checkpoint although configuration, tokenizer,
            training data, order of the examples or number of processes are not those that it was saved with.
        stop_grace (`float`, defaults to 25.0): Seconds from SIGTERM or Ctrl-C within which a training of the scripts
            saves a checkpoint and ends ([`~hf_vanilla.training.StopOnSignalCallback`]).
        ddp_timeout (`int`, defaults to 300): As in `TrainingArguments`, but five minutes: so long do processes wait
            for one that hangs, or whose machine is lost. One that dies ends the job sooner.
        logging_nan_inf_filter (`bool`, defaults to `False`): As in `TrainingArguments`, but off:
            [`~hf_vanilla.training.NaNPolicyCallback`] does not see a filtered loss. Off also saves a device
            synchronisation per step. Always on if `on_nan` is not `"stop"`.

    Raises:
        ValueError: if a value is out of its range, `on_nan` is combined with fp16 or DeepSpeed, or `"rollback"` with
            `save_only_model`.
    """

    on_nan: Literal["stop", "skip", "rollback"] = field(
        default="stop",
        metadata={
            "help": "What to do if loss or gradient of an update are nan or infinite: stop; skip that update, up to "
            f"{MAX_SKIPS_IN_A_ROW} in a row; or rollback, up to {MAX_ROLLBACKS} times: return to the last checkpoint, "
            "and leave that update out."
        },
    )
    stop_on_divergence: list[float] | None = field(
        default=None,
        metadata={
            "help": "Three numbers, such as 1000 10 5: stop if the mean loss of the last 10 updates is above that of "
            "the 1000 before by more than 5 standard deviations. Default: train on."
        },
    )
    on_disk_full: Literal["stop", "continue"] = field(
        default="stop",
        metadata={
            "help": "What to do if the disk is full at a checkpoint: stop, or continue without it and try again at "
            "the next one. Without its final model no run succeeds."
        },
    )
    force_resume: bool = field(
        default=False,
        metadata={
            "help": "Resume although configuration, tokenizer, data, order of examples or number of processes "
            "changed.",
            "aliases": ["--force"],
        },
    )
    stop_grace: float = field(
        default=25.0,
        metadata={
            "help": "Seconds from SIGTERM or Ctrl-C until the training has saved and ended. torchrun kills after 30."
        },
    )
    ddp_timeout: int = field(
        default=300,
        metadata={
            "help": "Seconds that processes wait for one that hangs, or whose machine is lost, before the job ends. A "
            "save must take less; preparing the data may take more."
        },
    )
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={"help": "Hide losses that are nan or inf from the log. Off: they show, and the run stops."},
    )

    def __post_init__(self) -> None:
        check_on_nan(self.on_nan, fp16=self.fp16, deepspeed=bool(self.deepspeed))
        if self.stop_on_divergence is not None:
            if len(self.stop_on_divergence) != 3:
                raise ValueError(
                    f"`stop_on_divergence` must be three numbers, such as 1000 10 5, got {self.stop_on_divergence}."
                )
            StopOnDivergenceCallback(*self.stop_on_divergence)
        if self.on_nan == "rollback" and self.save_only_model:
            raise ValueError(
                "`on_nan` (rollback) can't be combined with `save_only_model`, whose checkpoints have no state to "
                "return to; leave one out."
            )
        if self.on_disk_full not in ("stop", "continue"):
            raise ValueError(f"`on_disk_full` must be stop or continue, got {self.on_disk_full!r}.")
        super().__post_init__()
        if self.on_nan != "stop":
            self.logging_nan_inf_filter = True  # a log has the mean of the updates that were made


@dataclass
class MuonArguments(PolicyArguments):
    """[`PolicyArguments`] with the choice of the optimizer.

    Args:
        muon (`bool`, defaults to `False`): Whether Muon updates the matrices of the layers, and AdamW
            all else ([`~hf_vanilla.training.muon.MuonWithAdamW`]).

    Raises:
        ValueError: if `muon` is combined with another optimizer than AdamW, or with FSDP or DeepSpeed.
    """

    muon: bool = field(
        default=False,
        metadata={
            "help": "Update the matrices of the layers by Muon, which learns more from each update, and all else by "
            "AdamW. The larger the batch, the less it costs. Try more weight decay with it, such as "
            "--weight_decay 0.3."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        optim = OptimizerNames(self.optim).value
        if self.muon and optim not in ("adamw_torch", "adamw_torch_fused"):
            raise ValueError(f"`optim` must be adamw_torch or adamw_torch_fused with `muon`, got {optim}.")
        if self.muon and (self.deepspeed or self.fsdp):
            raise ValueError("`muon` needs whole parameters; leave it out with `fsdp` or `deepspeed`.")


@dataclass
class EarlyStoppingArguments(MuonArguments):
    """[`MuonArguments`] with early stopping.

    Args:
        early_stopping_patience (`int`, defaults to 0): Stop after so many evaluations in a row without a better
            `metric_for_best_model`, by default the validation loss, and keep the best checkpoint; each evaluation then
            saves one. 0 trains to the end.

    Raises:
        ValueError: if it is negative, or no evaluations are set.
    """

    early_stopping_patience: int = field(
        default=0,
        metadata={
            "help": "Stop after this many evaluations in a row without a better --metric_for_best_model (the loss "
            "unless given), and take the best checkpoint; each evaluation saves one. Needs --eval_strategy. "
            "0 trains to the end."
        },
    )

    def __post_init__(self) -> None:
        if self.early_stopping_patience < 0:
            raise ValueError(f"`early_stopping_patience` must not be negative, got {self.early_stopping_patience}.")
        if self.early_stopping_patience > 0:
            strategy = IntervalStrategy(self.eval_strategy)
            if strategy == IntervalStrategy.NO:
                raise ValueError(
                    f"`early_stopping_patience` ({self.early_stopping_patience}) needs evaluations while training; "
                    "give `eval_strategy` as epoch, or as steps together with `eval_steps`."
                )
            self.load_best_model_at_end: bool = True
            if SaveStrategy(self.save_strategy) != SaveStrategy.BEST:
                self.save_strategy: Any = strategy.value
                self.save_steps: float = self.eval_steps or self.logging_steps
        if self.greater_is_better is None and lower_is_better(self.metric_for_best_model or ""):
            self.greater_is_better: bool | None = False  # transformers knows names that end in loss alone
        super().__post_init__()


@dataclass
class VanillaTrainingArguments(EarlyStoppingArguments, Seq2SeqTrainingArguments):
    """The arguments of `Seq2SeqTrainingArguments`, those of [`VanillaTrainer`], and [`EarlyStoppingArguments`].

    Args:
        max_tokens_per_batch (`int`, *optional*): Size of a batch of one device in tokens, padding included, the larger
            of source and target side. Replaces `per_device_train_batch_size` and `per_device_eval_batch_size`. `None`
            keeps the stock batches, as does the stock `Seq2SeqTrainer`, which ignores the arguments of this class.
        stream_buffer (`int`, *optional*, defaults to 10000): Rows of streamed training data that are read and batched
            together with `max_tokens_per_batch` ([`~hf_vanilla.data.TokenBudgetStream`]). A resumed run reads them
            again.
        on_bad_record (`str`, *optional*, defaults to `"stop"`): What a stream does with a row without tokens or longer
            than the budget, and the scripts with a record that they can't read: `"stop"` or `"skip"`, which counts it.
        on_lost_shard (`str`, *optional*, defaults to `"stop"`): What a stream does with a shard that can't be read
            after several retries: `"stop"`, or `"skip"`, which leaves out the rest of it in this pass.
        teacher_forcing_ratio (`float`, *optional*, defaults to 1.0): Share of the decoder inputs that are the gold
            tokens; the rest are the model's own predictions from a first pass without gradient. The paper always feeds
            the gold tokens (1.0).
        consistency_weight (`float`, *optional*, defaults to 0.0): Weight of the divergence between two predictions of
            each token under different dropout ([`~hf_vanilla.training.consistency.ConsistencyLoss`]). Above 0, each
            pair is computed twice. Of encoder-decoders.
        ddp_find_unused_parameters (`bool`, *optional*, defaults to `False`): As in `TrainingArguments`, but off: every
            parameter takes part in every update of these models, and looking for others costs a walk over each graph.
            Set it for a model with frozen parts.

    Raises:
        ValueError: if a value is out of its range, or if `max_tokens_per_batch` is combined with another argument that
            shapes batches.

    Source: scheduled sampling in two passes is Mihaylova & Martins 2019, "Scheduled Sampling for Transformers"; R-Drop
    is Liang et al. 2021.
    """

    max_tokens_per_batch: int | None = field(
        default=None,
        metadata={
            "help": "Size of a batch of one device in tokens, padding included, the larger of source and target side. "
            "Replaces the per_device batch sizes. Unset: the stock batches of a fixed number of sentences."
        },
    )
    stream_buffer: int = field(
        default=10_000,
        metadata={
            "help": "Rows of streamed data that are batched together with max_tokens_per_batch. More means less "
            "padding and a better mixture; a resumed run reads them again."
        },
    )
    on_bad_record: Literal["stop", "skip"] = field(
        default="stop",
        metadata={
            "help": "What to do with a record that can't be read or, in a stream, is longer than "
            "max_tokens_per_batch: stop with an error, or skip and count it."
        },
    )
    on_lost_shard: Literal["stop", "skip"] = field(
        default="stop",
        metadata={
            "help": "What to do with a shard of streamed data that can't be read after five retries: stop with an "
            "error, or skip the rest of it in this pass over the data."
        },
    )
    teacher_forcing_ratio: float = field(
        default=1.0,
        metadata={
            "help": "Share of the decoder inputs that are the gold tokens; the rest are the model's own predictions "
            "(scheduled sampling, a second pass per step). The paper's is 1.0."
        },
    )
    consistency_weight: float = field(
        default=0.0,
        metadata={
            "help": "R-Drop: compute each pair twice, and add the divergence of both predictions with this weight, "
            "such as 5, as the paper does for translation."
        },
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False,
        metadata={"help": "Look for parameters without a gradient. Off: every parameter must have one."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.teacher_forcing_ratio <= 1.0:
            raise ValueError(f"`teacher_forcing_ratio` must be between 0 and 1, got {self.teacher_forcing_ratio}.")
        if not 0.0 <= self.consistency_weight < math.inf:
            raise ValueError(f"`consistency_weight` must be finite and not negative, got {self.consistency_weight}.")
        check_integer("stream_buffer", self.stream_buffer)
        for name in ("on_bad_record", "on_lost_shard"):
            check_choice(name, getattr(self, name))
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
            "include_for_metrics=loss": "loss" in self.include_for_metrics,
            "accelerator_config.split_batches": bool(accelerator_config.split_batches),
            "accelerator_config.dispatch_batches": bool(accelerator_config.dispatch_batches),
        }


def add_early_stopping(trainer: Trainer) -> None:
    """Add transformers' `EarlyStoppingCallback` to a trainer, if its arguments ask for it.

    Args:
        trainer (`Trainer`): The trainer.
    """
    patience = getattr(trainer.args, "early_stopping_patience", 0)
    if patience > 0:
        trainer.add_callback(EarlyStoppingCallback(patience))


@dataclass
class FinetuningArguments(EarlyStoppingArguments):
    """Training arguments of a fine-tuning; the defaults are near those of BERT's paper.

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
        save_strategy (`str`): When to save checkpoints while training.

    Raises:
        ValueError: if `output_dir` is missing, or a checkpoint to resume from is given.

    Source: Devlin et al. 2018, A.3.
    """

    output_dir: str | None = field(
        default=None, metadata={"help": "Folder of the models, with a subfolder for each seed."}
    )
    learning_rate: float = field(
        default=3e-5,
        metadata={"help": "Peak learning rate; BERT's paper has 2e-5 to 5e-5. Small models need more, such as 3e-4."},
    )
    num_train_epochs: float = field(
        default=3.0, metadata={"help": "Epochs; BERT's paper has 2 to 4. Few rows need more, such as 20."}
    )
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Batch size; BERT's paper has 16 and 32."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Batch size of evaluation."})
    warmup_steps: float = field(default=0.1, metadata={"help": "Warm-up in updates, or below 1 as a share of them."})
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay, except for biases and norms."})
    train_sampling_strategy: str = field(
        default="group_by_length", metadata={"help": "group_by_length pads least; random is the stock order."}
    )
    logging_steps: float = field(
        default=0.05, metadata={"help": "Log the loss every this many updates, or below 1 every such share."}
    )
    save_strategy: Literal["no", "epoch", "steps", "best"] = field(
        default="no", metadata={"help": "When to save checkpoints while training."}
    )

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise ValueError("`output_dir` is missing; give a folder for the models, as in --output_dir runs/task.")
        if self.resume_from_checkpoint is not None:
            raise ValueError(
                "`resume_from_checkpoint` has no effect on a fine-tuning, which resumes from the checkpoints in its "
                "`output_dir`; leave it out."
            )
        super().__post_init__()
