"""The papers' recipes as training arguments, the trainers, checkpoints and runs."""

import warnings
from typing import Any

from ..hub.pushing_trainer import ResilientPushTrainer
from . import deprecated
from .arguments import FinetuningArguments, VanillaTrainingArguments, add_early_stopping
from .averaging import average_checkpoints
from .checkpointing import ManifestCallback, VerifiedCheckpointTrainer
from .checkpoints import (
    best_checkpoints,
    checkpoint_to_resume,
    folder_of_tokenizer,
    last_checkpoints,
    last_complete_checkpoint,
    why_not_resumable,
)
from .cost import Estimate, estimate
from .divergence import StopOnNaNCallback, check_finite_weights
from .finetuning import (
    FinetuningTask,
    OrderedEvaluationTrainer,
    command_of_process,
    seeds_report,
    summarise_seeds,
    train_with_seeds,
)
from .grid_search import PAPER_GRID, search_settings
from .initialization import initialize_from_examples
from .memory import ReleaseMemoryCallback
from .muon import MuonWithAdamW
from .policies import BatchWatcher, NaNPolicyCallback, StopOnDivergenceCallback, add_policies
from .pretraining import (
    Phase,
    PhasedBatchSampler,
    PretrainingTrainer,
    RepeatableCollator,
    fill_new_positions,
    phased_learning_rate,
    plan_phases,
)
from .recipes import (
    GPT_RECIPE,
    WarmupWarning,
    bert_training_arguments,
    gpt_training_arguments,
    inverse_sqrt_schedule_from_one,
    noam_learning_rate,
    paper_optimizers,
    paper_training_arguments,
)
from .runs import (
    begin_run,
    check_and_save_options,
    decisive_options,
    is_finished,
    lock_run_folder,
    main_process_first,
    resume_hint_on_interrupt,
    save_final_model,
    save_metrics,
    train_to_end,
)
from .signals import StopOnSignalCallback
from .trainer import VanillaTrainer


def __getattr__(name: str) -> Any:
    """Return the new object of a deprecated name, with a warning."""
    if name not in deprecated.NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new_name, value = deprecated.NAMES[name]
    message = f"`{name}` is now called `{new_name}`; the old name will be removed in 0.3."
    warnings.warn(message, FutureWarning, stacklevel=2)
    return value


__all__ = [
    "GPT_RECIPE",
    "PAPER_GRID",
    "BatchWatcher",
    "Estimate",
    "FinetuningArguments",
    "FinetuningTask",
    "ManifestCallback",
    "MuonWithAdamW",
    "NaNPolicyCallback",
    "OrderedEvaluationTrainer",
    "Phase",
    "PhasedBatchSampler",
    "PretrainingTrainer",
    "ReleaseMemoryCallback",
    "RepeatableCollator",
    "ResilientPushTrainer",
    "StopOnDivergenceCallback",
    "StopOnNaNCallback",
    "StopOnSignalCallback",
    "VanillaTrainer",
    "VanillaTrainingArguments",
    "VerifiedCheckpointTrainer",
    "WarmupWarning",
    "add_early_stopping",
    "add_policies",
    "average_checkpoints",
    "begin_run",
    "bert_training_arguments",
    "best_checkpoints",
    "check_and_save_options",
    "check_finite_weights",
    "checkpoint_to_resume",
    "command_of_process",
    "decisive_options",
    "estimate",
    "fill_new_positions",
    "folder_of_tokenizer",
    "gpt_training_arguments",
    "initialize_from_examples",
    "inverse_sqrt_schedule_from_one",
    "is_finished",
    "last_checkpoints",
    "last_complete_checkpoint",
    "lock_run_folder",
    "main_process_first",
    "noam_learning_rate",
    "paper_optimizers",
    "paper_training_arguments",
    "phased_learning_rate",
    "plan_phases",
    "resume_hint_on_interrupt",
    "save_final_model",
    "save_metrics",
    "search_settings",
    "seeds_report",
    "summarise_seeds",
    "train_to_end",
    "train_with_seeds",
    "why_not_resumable",
]
