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
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from ..models.layers import CrossAttention, FusedLinear, SelfAttention


# With fewer rows, packing takes longer than it saves.
MIN_ROWS = 32


class PackedLinear(nn.Module):
    """A linear map for inference, with its weight in oneDNN's own layout too, which is never saved.

    Args:
        linear (`nn.Linear`): The linear map, whose parameters are shared; a `FusedLinear` keeps its `sizes`.
        rows (`int`): Approximate number of rows of its inputs.
    """

    def __init__(self, linear: nn.Linear, rows: int):
        super().__init__()
        self.in_features, self.out_features, self.rows = linear.in_features, linear.out_features, rows
        self.sizes = getattr(linear, "sizes", None)
        self.weight, self.bias = linear.weight, linear.bias
        self._pack()

    def _pack(self) -> None:
        """Lay the weight out for the kernel, if this CPU has one for its dtype."""
        packs = can_pack(self.weight, self.rows)
        self._packed = _reorder(self.weight.detach(), self.rows) if packs else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the map.

        Args:
            hidden_states (`torch.Tensor` of shape `(..., in_features)`): The input.

        Returns:
            `torch.Tensor` of shape `(..., out_features)`: the output.
        """
        if self._packed is None:  # the module has been moved or converted
            return nn.functional.linear(hidden_states, self.weight, self.bias)
        return _multiply(hidden_states, self._packed, self.bias)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        self._pack()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_packed": None}  # can't be copied or pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack()


def _reorder(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a weight in oneDNN's own layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def _multiply(hidden_states: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Apply a linear map whose weight is in that layout."""
    return torch.ops.mkldnn._linear_pointwise(hidden_states, packed, bias, "none", [], "")


def can_pack(weight: torch.Tensor, rows: int) -> bool:
    """Return whether this CPU can pack such weights, and gains from it.

    Args:
        weight (`torch.Tensor`): One of the weights.
        rows (`int`): Approximate number of rows of the inputs.

    Returns:
        `bool`: whether it does.
    """
    has_kernel = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    return rows >= MIN_ROWS and has_kernel and _has_packed_kernel(weight.dtype)


@functools.cache
def _has_packed_kernel(dtype: torch.dtype) -> bool:
    """Test a packed product: which dtypes oneDNN packs depends on the CPU, torch's build and the environment.

    Args:
        dtype (`torch.dtype`): The dtype of the weights.

    Returns:
        `bool`: whether it works.
    """
    zeros = torch.zeros(MIN_ROWS, 16, device="cpu", dtype=dtype)
    try:
        _multiply(zeros, _reorder(zeros[:16], MIN_ROWS), None)
    except (AttributeError, RuntimeError):  # torch lacks the operator, or the CPU lacks the instructions
        return False
    return True


def fast_model(model: PreTrainedModel, rows: int) -> PreTrainedModel:
    """Copy a model for faster inference. The copy can be saved, copied, pickled and converted, but not trained.

    It shares the memory of the model's weights: after they change, make a new copy.

    Args:
        model (`PreTrainedModel`): The model.
        rows (`int`): Approximate number of rows of the inputs of linear maps, such as the tokens of a batch.

    Returns:
        `PreTrainedModel`: the copy, or the model itself if its class does not declare `supports_fast_search` or it is
        not on a CPU.
    """
    if not getattr(type(model), "supports_fast_search", False) or model.device.type != "cpu":
        return model
    fast = for_cpu(model, rows)
    fast.register_load_state_dict_pre_hook(_refuse_to_load)
    return fast


def _refuse_to_load(*args: Any) -> None:
    """Keep a copy from writing into the weights that it shares."""
    raise ValueError(
        "A copy made by `fast_model` can't load weights, which it shares with its model: load them into the model and "
        "make a new copy."
    )


def for_cpu(module: nn.Module, rows: int, copies: dict[int, Any] | None = None) -> Any:
    """Copy a module for inference on a CPU. The copy's parameters share memory with the module's, which is unchanged.

    Args:
        module (`nn.Module`): The module, on a CPU.
        rows (`int`): Approximate number of rows of the inputs of linear maps.
        copies (`dict[int, Any]`, *optional*): What has been copied, by the `id` of the original, so that what is tied
            stays tied.

    Returns:
        `nn.Module`: the copy. Linear maps of other classes (such as adapters and quantized ones) and those with hooks
        are not replaced.
    """
    copies = {} if copies is None else copies
    if id(module) in copies:
        return copies[id(module)]
    twin: Any = copy.copy(module)
    copies[id(module)] = twin
    for name, value in vars(module).items():
        if isinstance(value, dict | PreTrainedConfig):  # of its own: parameters, buffers, modules, hooks, config
            vars(twin)[name] = copies.setdefault(id(value), copy.copy(value))
    for name, parameter in module._parameters.items():
        if parameter is not None:
            twin._parameters[name] = copies.setdefault(id(parameter), copy.copy(parameter).requires_grad_(False))
    if type(module) in (nn.Linear, FusedLinear):
        has_hooks = module._forward_hooks or module._forward_pre_hooks
        if can_pack(twin.weight, rows) and not has_hooks:
            twin = copies[id(module)] = PackedLinear(twin, rows)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else for_cpu(child, rows, copies)
    if isinstance(twin, CrossAttention) or (isinstance(twin, SelfAttention) and twin.is_causal):
        twin.config = copy.copy(twin.config)
        twin.config._attn_implementation = "eager"
    return twin


__all__ = ["PackedLinear", "can_pack", "fast_model", "for_cpu"]
