"""The papers' recipes as training arguments, the trainer, and checkpoints."""

from hf_vanilla.training.checkpoints import (
    average_checkpoints,
    best_checkpoints,
    last_checkpoints,
    last_complete_checkpoint,
)
from hf_vanilla.training.recipe import noam_learning_rate, paper_optimizers, paper_training_arguments
from hf_vanilla.training.trainer import (
    VanillaTrainer,
    VanillaTrainingArguments,
    inverse_sqrt_schedule_from_one,
)


__all__ = [
    "VanillaTrainer",
    "VanillaTrainingArguments",
    "average_checkpoints",
    "best_checkpoints",
    "inverse_sqrt_schedule_from_one",
    "last_checkpoints",
    "last_complete_checkpoint",
    "noam_learning_rate",
    "paper_optimizers",
    "paper_training_arguments",
]
