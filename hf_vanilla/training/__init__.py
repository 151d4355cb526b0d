"""The papers' recipes as training arguments, the trainer, and checkpoints."""

from .checkpoints import (
    average_checkpoints,
    best_checkpoints,
    checkpoint_to_resume,
    folder_of_tokenizer,
    last_checkpoints,
    last_complete_checkpoint,
    save_final_model,
    told_how_to_go_on,
)
from .cost import Estimate, bert_flops, estimate, transformer_flops
from .divergence import StopOnNaNCallback, check_finite_weights
from .finetuning import (
    FinetuningArguments,
    FinetuningTask,
    OrderedEvaluationTrainer,
    command_of_process,
    seeds_report,
    summarise_seeds,
    train_with_seeds,
)
from .hub_pushes import PatientPushes
from .pretraining import Phase, PhasedBatchSampler, PretrainingTrainer, RepeatableCollator, bert_training_arguments
from .recipe import paper_optimizers, paper_training_arguments
from .run_folder import (
    begin_run,
    decisive_options,
    has_all_updates,
    hold_folder,
    is_finished,
    keep_options,
    train_to_end,
)
from .schedule import WarmupWarning, inverse_sqrt_schedule_from_one, noam_learning_rate
from .search import PAPER_GRID, search_settings
from .trainer import VanillaTrainer, VanillaTrainingArguments


__all__ = [
    "PAPER_GRID",
    "Estimate",
    "FinetuningArguments",
    "FinetuningTask",
    "OrderedEvaluationTrainer",
    "PatientPushes",
    "Phase",
    "PhasedBatchSampler",
    "PretrainingTrainer",
    "RepeatableCollator",
    "StopOnNaNCallback",
    "VanillaTrainer",
    "VanillaTrainingArguments",
    "WarmupWarning",
    "average_checkpoints",
    "begin_run",
    "bert_flops",
    "bert_training_arguments",
    "best_checkpoints",
    "check_finite_weights",
    "checkpoint_to_resume",
    "command_of_process",
    "decisive_options",
    "estimate",
    "folder_of_tokenizer",
    "has_all_updates",
    "hold_folder",
    "inverse_sqrt_schedule_from_one",
    "is_finished",
    "keep_options",
    "last_checkpoints",
    "last_complete_checkpoint",
    "noam_learning_rate",
    "paper_optimizers",
    "paper_training_arguments",
    "save_final_model",
    "search_settings",
    "seeds_report",
    "summarise_seeds",
    "told_how_to_go_on",
    "train_to_end",
    "train_with_seeds",
    "transformer_flops",
]
