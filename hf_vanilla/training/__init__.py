"""The papers' recipes as training arguments, the trainer, and checkpoints."""

from ..hub.pushing_trainer import PatientPushes
from .arguments import FinetuningArguments, VanillaTrainingArguments
from .averaging import average_checkpoints
from .checkpoints import (
    best_checkpoints,
    checkpoint_to_resume,
    folder_of_tokenizer,
    last_checkpoints,
    last_complete_checkpoint,
)
from .cost import Estimate, bert_flops, estimate, transformer_flops
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
from .pretraining import Phase, PhasedBatchSampler, PretrainingTrainer, RepeatableCollator
from .recipes import (
    WarmupWarning,
    bert_training_arguments,
    inverse_sqrt_schedule_from_one,
    noam_learning_rate,
    paper_optimizers,
    paper_training_arguments,
)
from .runs import (
    begin_run,
    decisive_options,
    has_all_updates,
    hold_folder,
    is_finished,
    keep_options,
    save_final_model,
    told_how_to_go_on,
    train_to_end,
)
from .trainer import VanillaTrainer


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
