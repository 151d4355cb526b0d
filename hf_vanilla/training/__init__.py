"""The papers' recipes as training arguments, the trainer, and checkpoints."""

from .checkpoints import (
    average_checkpoints,
    best_checkpoints,
    last_checkpoints,
    last_complete_checkpoint,
    told_how_to_go_on,
)
from .finetuning import (
    FinetuningArguments,
    FinetuningTask,
    OrderedEvaluationTrainer,
    command_of_process,
    seeds_report,
    summarise_seeds,
    train_with_seeds,
)
from .pretraining import Phase, PhasedBatchSampler, PretrainingTrainer, RepeatableCollator, bert_training_arguments
from .recipe import paper_optimizers, paper_training_arguments
from .schedule import LongWarmupWarning, inverse_sqrt_schedule_from_one, noam_learning_rate
from .search import PAPER_GRID, search_settings
from .trainer import VanillaTrainer, VanillaTrainingArguments


__all__ = [
    "PAPER_GRID",
    "FinetuningArguments",
    "FinetuningTask",
    "LongWarmupWarning",
    "OrderedEvaluationTrainer",
    "Phase",
    "PhasedBatchSampler",
    "PretrainingTrainer",
    "RepeatableCollator",
    "VanillaTrainer",
    "VanillaTrainingArguments",
    "average_checkpoints",
    "bert_training_arguments",
    "best_checkpoints",
    "command_of_process",
    "inverse_sqrt_schedule_from_one",
    "last_checkpoints",
    "last_complete_checkpoint",
    "noam_learning_rate",
    "paper_optimizers",
    "paper_training_arguments",
    "search_settings",
    "seeds_report",
    "summarise_seeds",
    "told_how_to_go_on",
    "train_with_seeds",
]
