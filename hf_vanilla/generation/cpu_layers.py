"""Layers as a CPU decodes fastest with them: packed weights, and attention without the set-up of a fused kernel.

A step of beam search multiplies the same weights with a few hundred rows, again and again. oneDNN multiplies weights that
it has laid out for itself two to three times faster than `torch.nn.Linear`, which hands it, or MKL, plain ones. And a
handful of queries are attended to sooner by two matrix products and a softmax than by `scaled_dot_product_attention`.
"""

import copy

import torch
from torch import nn

from ..models.layers import FusedLinear, MultiHeadAttention


# Below this many rows a step costs about as much as packing, so it is not worth while.
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
    """Tell whether packing such weights is possible and worth while.

    Args:
        weight (`torch.Tensor`): One of the weights.
        rows (`int`): About how many rows they will be applied to at a time.

    Returns:
        `bool`: true if so.
    """
    return (
        rows >= FEWEST_ROWS
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def for_cpu(module: nn.Module, rows: int) -> nn.Module:
    """Copy a module for inference on a CPU. The copy shares all weights but the packed ones, and the module stays as is.

    Args:
        module (`nn.Module`): The module, on a CPU.
        rows (`int`): About how many rows its linear maps will be applied to at a time.

    Returns:
        `nn.Module`: the copy. Linear maps of other classes (adapters, quantised ones) and those with hooks are as they
        were.
    """
    if type(module) in (nn.Linear, FusedLinear):
        has_hooks = module._forward_hooks or module._forward_pre_hooks
        return PackedLinear(module, rows) if can_pack(module.weight, rows) and not has_hooks else module
    twin = copy.copy(module)
    twin._modules = {name: child if child is None else for_cpu(child, rows) for name, child in module._modules.items()}
    if isinstance(twin, MultiHeadAttention):
        twin.config = copy.copy(twin.config)
        twin.config._attn_implementation = "eager"
    return twin


__all__ = ["PackedLinear", "can_pack", "for_cpu"]
