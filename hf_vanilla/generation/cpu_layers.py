"""Faster layers for decoding on a CPU: packed weights, and attention without the overhead of a fused kernel.

Decoding repeatedly multiplies the same weights with a few hundred rows. With weights in oneDNN's own layout this is up
to three times faster than `torch.nn.Linear`, which uses plain weights. For a few queries, two matrix products and a
softmax are faster than `scaled_dot_product_attention`.
"""

import copy
import functools
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from ..models.layers import CrossAttention, FusedLinear, SelfAttention


# With fewer rows, packing takes longer than it saves.
MIN_ROWS = 32


class PackedLinear(nn.Module):
    """A linear map for inference, with its weight in oneDNN's own layout.

    Args:
        linear (`nn.Linear`): The linear map; a `FusedLinear` keeps its `sizes`.
        rows (`int`): Approximate number of rows of its inputs.
    """

    def __init__(self, linear: nn.Linear, rows: int):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
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
    """Return whether this CPU can pack such weights, and gains from it.

    Args:
        weight (`torch.Tensor`): One of the weights.
        rows (`int`): Approximate number of rows of the inputs.

    Returns:
        `bool`: whether it does.
    """
    return rows >= MIN_ROWS and weight.dtype in (torch.float32, torch.bfloat16) and _has_packed_kernel(weight.dtype)


@functools.cache
def _has_packed_kernel(dtype: torch.dtype) -> bool:
    """Test a packed product: which dtypes oneDNN packs depends on the CPU, torch's build and the environment.

    Args:
        dtype (`torch.dtype`): The dtype of the weights.

    Returns:
        `bool`: whether it works.
    """
    linear = nn.utils.skip_init(nn.Linear, 16, 16, device="cpu", dtype=dtype)
    try:
        PackedLinear(linear, MIN_ROWS)(torch.zeros(MIN_ROWS, 16, device="cpu", dtype=dtype))
    except (AttributeError, RuntimeError):  # torch lacks the operator, or the CPU lacks the instructions
        return False
    return True


def fast_model(model: PreTrainedModel, rows: int) -> PreTrainedModel:
    """Copy a model for faster inference. After changes of the model's weights, make a new copy.

    Args:
        model (`PreTrainedModel`): The model.
        rows (`int`): Approximate number of rows of the inputs of linear maps, such as the tokens of a batch.

    Returns:
        `PreTrainedModel`: the copy, or the model itself if its class does not declare `supports_fast_search` or it is
        not on a CPU.
    """
    if getattr(type(model), "supports_fast_search", False) and model.device.type == "cpu":
        return for_cpu(model, rows)
    return model


def for_cpu(module: nn.Module, rows: int) -> Any:
    """Copy a module for inference on a CPU. The copy shares all weights except packed ones; the module is unchanged.

    Args:
        module (`nn.Module`): The module, on a CPU.
        rows (`int`): Approximate number of rows of the inputs of linear maps.

    Returns:
        `nn.Module`: the copy. Linear maps of other classes (such as adapters and quantized ones) and those with hooks
        are not replaced.
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
