"""Layers as a CPU decodes fastest with them: packed weights, and attention without the set-up of a fused kernel.

Decoding multiplies the same weights with a few hundred rows, again and again. oneDNN is up to three times faster with
weights that it has laid out for itself than `torch.nn.Linear`, which hands plain ones to it or to MKL. And for a few
queries, two matrix products and a softmax are faster than `scaled_dot_product_attention`.
"""

import copy
import functools
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from ..models.layers import CrossAttention, FusedLinear, SelfAttention
from ..models.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


# With fewer rows than this, packing costs more time than a translation gains by it.
FEWEST_ROWS = 32


class PackedLinear(nn.Module):
    """A linear map for inference, with its weight in oneDNN's own layout.

    Args:
        linear (`nn.Linear`): The map; a `FusedLinear` keeps its `sizes`.
        rows (`int`): About how many rows it will be applied to at a time.
    """

    def __init__(self, linear: nn.Linear, rows: int):
        super().__init__()
        self.sizes = getattr(linear, "sizes", None)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the map.

        Args:
            hidden_states (`torch.Tensor` of shape `(..., in_features)`): The input.

        Returns:
            `torch.Tensor` of shape `(..., out_features)`: the output.
        """
        return torch.ops.mkldnn._linear_pointwise(hidden_states, self.weight, self.bias, "none", [], "")


def can_pack(weight: torch.Tensor, rows: int) -> bool:
    """Tell whether this CPU can pack such weights, and gains by it.

    Args:
        weight (`torch.Tensor`): One of the weights.
        rows (`int`): About how many rows they will be applied to at a time.

    Returns:
        `bool`: true if so.
    """
    return rows >= FEWEST_ROWS and weight.dtype in (torch.float32, torch.bfloat16) and _has_packed_kernel(weight.dtype)


@functools.cache
def _has_packed_kernel(dtype: torch.dtype) -> bool:
    """Try a packed product once. Which dtypes oneDNN packs depends on the CPU, torch's build and the environment.

    Args:
        dtype (`torch.dtype`): The dtype of the weights.

    Returns:
        `bool`: true if it works.
    """
    linear = nn.utils.skip_init(nn.Linear, 16, 16, device="cpu", dtype=dtype)
    try:
        PackedLinear(linear, FEWEST_ROWS)(torch.zeros(FEWEST_ROWS, 16, device="cpu", dtype=dtype))
    except (AttributeError, RuntimeError):  # torch lacks the operator, or the CPU lacks the instructions
        return False
    return True


def fast_model(model: PreTrainedModel, rows: int) -> PreTrainedModel:
    """Copy a model for inference if there is something to gain by it. Later changes of its weights need a new copy.

    Args:
        model (`PreTrainedModel`): The model.
        rows (`int`): About how many rows its linear maps will be applied to at a time, such as the tokens of a batch.

    Returns:
        `PreTrainedModel`: the copy, or the model itself if it is not of this package or not on a CPU.
    """
    if isinstance(model, VanillaTransformerForConditionalGeneration) and model.device.type == "cpu":
        return for_cpu(model, rows)
    return model


def for_cpu(module: nn.Module, rows: int) -> Any:
    """Copy a module for inference on a CPU. The copy shares all weights but packed ones, and the module stays as is.

    Args:
        module (`nn.Module`): The module, on a CPU.
        rows (`int`): About how many rows its linear maps will be applied to at a time.

    Returns:
        `nn.Module`: the copy. Linear maps of other classes (adapters, quantised ones) and those with hooks are as they
        were.
    """
    if isinstance(module, nn.Linear) and type(module) in (nn.Linear, FusedLinear):
        has_hooks = module._forward_hooks or module._forward_pre_hooks
        return PackedLinear(module, rows) if can_pack(module.weight, rows) and not has_hooks else module
    if not module._modules:
        return module
    twin = copy.copy(module)
    twin._modules = {name: child if child is None else for_cpu(child, rows) for name, child in module._modules.items()}
    if isinstance(twin, CrossAttention) or (isinstance(twin, SelfAttention) and twin.is_causal):
        twin.config = copy.copy(twin.config)
        twin.config._attn_implementation = "eager"
    return twin


__all__ = ["PackedLinear", "can_pack", "fast_model", "for_cpu"]
