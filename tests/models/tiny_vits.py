"""Small ViTs, ours and transformers' own, and one batch of images. Sizes differ, so that a swapped axis fails."""

import torch
from tiny_berts import perturbed
from transformers import ViTConfig, ViTForImageClassification, ViTModel

from hf_vanilla import VanillaVitConfig, VanillaVitForImageClassification, VanillaVitModel


SIZES = dict(
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=20,
    image_size=12,
    patch_size=4,
    num_channels=2,
    initializer_range=0.3,
)
IMAGES = torch.randn(2, 2, 12, 12, generator=torch.Generator().manual_seed(0))  # 9 patches
OTHER_SIZE = torch.randn(2, 2, 8, 20, generator=torch.Generator().manual_seed(1))  # 10 patches

# Our class, transformers' class, extra fields of the config, inputs with labels. One entry for each task.
TASKS = {
    "model": (VanillaVitModel, ViTModel, {"pooler_output_size": 7}, {}),
    "classes": (
        VanillaVitForImageClassification,
        ViTForImageClassification,
        {"num_labels": 5},
        {"labels": torch.tensor([4, 1])},
    ),
    "regression": (
        VanillaVitForImageClassification,
        ViTForImageClassification,
        {"num_labels": 1},
        {"labels": torch.tensor([0.5, -2.0])},
    ),
    "multi-label": (
        VanillaVitForImageClassification,
        ViTForImageClassification,
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        {"labels": torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])},
    ),
}


def tiny_vit(task: str = "classes", attn_implementation: str = "sdpa", **overrides):
    """Build one of our models, in evaluation mode, with biases and norms that are not trivial."""
    model_class, _, fields, _ = TASKS[task]
    torch.manual_seed(0)
    config = VanillaVitConfig(**{**SIZES, **fields, **overrides})
    return perturbed(model_class._from_config(config, attn_implementation=attn_implementation))


def native_vit(task: str = "classes", **overrides):
    """Build transformers' own model for the task."""
    _, model_class, fields, _ = TASKS[task]
    torch.manual_seed(0)
    return perturbed(model_class(ViTConfig(**{**SIZES, **fields, **overrides})))
