"""Old names of `hf_vanilla.training`, until 0.3."""

from typing import Any

import torch

from ..hub.pushing_trainer import ResilientPushTrainer
from .cost import MASKED_SHARE
from .runs import check_and_save_options, lock_run_folder, resume_hint_on_interrupt


def _transformer_flops(config: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return config.forward_flops(source, target)


def _bert_flops(
    config: Any, length: torch.Tensor, masked_share: float = MASKED_SHARE, *, whole_last_layer: bool = False
) -> torch.Tensor:
    return config.forward_flops(length, length * masked_share, whole_last_layer=whole_last_layer)


# For each old name the new one, and the object.
NAMES: dict[str, tuple[str, Any]] = {
    "PatientPushes": ("hf_vanilla.training.ResilientPushTrainer", ResilientPushTrainer),
    "bert_flops": ("config.forward_flops", _bert_flops),
    "transformer_flops": ("config.forward_flops", _transformer_flops),
    "hold_folder": ("lock_run_folder", lock_run_folder),
    "keep_options": ("check_and_save_options", check_and_save_options),
    "told_how_to_go_on": ("resume_hint_on_interrupt", resume_hint_on_interrupt),
}
