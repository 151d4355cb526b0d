"""Faster layers for decoding on a CPU: packed weights, and attention without the overhead of a fused kernel.

Decoding repeatedly multiplies the same weights with a few hundred rows. With weights in oneDNN's own layout this is up
to three times faster than `torch.nn.Linear`, which uses plain weights, and with 8-bit integers faster still, but no
longer the same. For a few queries, two matrix products and a softmax are faster than `scaled_dot_product_attention`.
"""

import copy
import functools
import time
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from ..models.checks import check_integer
from ..models.layers import CrossAttention, FusedLinear, SelfAttention
from ..precision import INPUTS, OUTPUTS, ROWS, Precision, choose_faster, is_int8
from .int8_products import FLOAT_TYPES, can_quantize, int8_linear, quantize_weight, weight_levels


logger = logging.get_logger(__name__)

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
        self._packed: Any = _reorder(self.weight.detach(), self.rows) if packs else None

    def _multiply(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the map with the kernel, which has one dtype, unless autocast has made inputs of another one."""
        if hidden_states.dtype != self.weight.dtype:
            return nn.functional.linear(hidden_states, self.weight, self.bias)
        return _multiply(hidden_states, self._packed, self.bias)

    @property
    def has_kernel(self) -> bool:
        """Whether this CPU has a kernel for the weight: without it, the layer is a plain linear map."""
        return self._packed is not None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the map.

        Args:
            hidden_states (`torch.Tensor` of shape `(..., in_features)`): The input.

        Returns:
            `torch.Tensor` of shape `(..., out_features)`: the output.
        """
        if not self.has_kernel:  # the module has been moved or converted
            return nn.functional.linear(hidden_states, self.weight, self.bias)
        return self._multiply(hidden_states)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        self._pack()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_packed": None}  # can't be copied or pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack()


class Int8Linear(PackedLinear):
    """A linear map for inference with products of 8-bit integers.

    The weight is quantized for each output, once, the inputs for each row. What is saved, copied or converted is the
    weight itself, which is kept.

    Args:
        linear (`nn.Linear`): The linear map, whose parameters are shared; a `FusedLinear` keeps its `sizes`.
        rows (`int`): Not used: all numbers of rows are rounded alike.
    """

    def _pack(self) -> None:
        self._packed = quantize_weight(self.weight) if can_quantize(self.weight) else None

    def _multiply(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return int8_linear(hidden_states, self._packed, self.bias)


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


def fast_model(model: PreTrainedModel, rows: int, dtype: str | torch.dtype | None = None) -> PreTrainedModel:
    """Copy a model for faster inference. The copy can be saved, copied, pickled and converted, but not trained.

    It shares the memory of the model's weights: after they change, make a new copy. What is saved are these weights,
    with the dtype `"int8"` too.

    Args:
        model (`PreTrainedModel`): The model.
        rows (`int`): Approximate number of rows of the inputs of linear maps, such as the tokens of a batch.
        dtype (`str` or `torch.dtype`, *optional*): `"int8"` computes linear maps with 8-bit integers, which is faster
            and changes the outputs a little; all else keeps the model's type. By default linear maps keep it too.

    Returns:
        `PreTrainedModel`: the copy, or, without `dtype`, the model itself if its class does not declare
        `supports_fast_search`, it is not on a CPU, or FSDP2 shards it.

    Raises:
        ValueError: if `rows` is negative, `dtype` is another one, or the model or the machine does not support it.
        TypeError: if `rows` is no integer.
    """
    check_integer("rows", rows, 0)
    if dtype is not None:
        _check_int8(model, dtype)
    if not supports_fast_model(model):
        return model
    fast = for_cpu(model, rows, linear=PackedLinear if dtype is None else Int8Linear)
    fast.register_load_state_dict_pre_hook(_refuse_to_load)
    return fast


def supports_fast_model(model: PreTrainedModel) -> bool:
    """Return whether `fast_model` makes a copy of a model.

    Args:
        model (`PreTrainedModel`): The model.

    Returns:
        `bool`: whether its class declares `supports_fast_search`, and it is on a CPU, and whole.
    """
    is_fast = getattr(type(model), "supports_fast_search", False) and model.device.type == "cpu"
    return is_fast and not is_sharded(model)


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 shards a model: its modules gather their weights when they are called, as no copy does.

    Args:
        model (`nn.Module`): The model.

    Returns:
        `bool`: whether one of its modules is sharded.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule  # torch without its distributed package lacks it

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _check_int8(model: PreTrainedModel, dtype: str | torch.dtype) -> None:
    """Check that a model can be computed with 8-bit integers on this machine."""
    if not is_int8(dtype):
        raise ValueError(
            f"`dtype` must be 'int8' or None, got {dtype!r}; to compute in a float type, convert the model itself: "
            "`model.to(dtype)`."
        )
    if not supports_fast_model(model):
        raise ValueError(
            "`dtype` can be 'int8' only for models whose class declares `supports_fast_search`, on a CPU, got a "
            f"{type(model).__name__} on {model.device}; use a CPU, or a float type."
        )
    if model.dtype not in FLOAT_TYPES:
        raise ValueError(
            "`dtype` can be 'int8' only for models in float32, bfloat16 and float16, got a model in "
            f"{str(model.dtype).removeprefix('torch.')}; convert it first: `model.float()`."
        )
    if not weight_levels():
        raise ValueError(
            "`dtype` can't be 'int8' here: this build of torch has no products of 8-bit integers for this CPU; use "
            "'float32' or 'bfloat16'."
        )


def _refuse_to_load(*args: Any) -> None:
    """Keep a copy from writing into the weights that it shares."""
    raise ValueError(
        "A copy made by `fast_model` can't load weights, which it shares with its model: load them into the model and "
        "make a new copy."
    )


def for_cpu(
    module: nn.Module,
    rows: int,
    copies: dict[int, Any] | None = None,
    linear: type[PackedLinear] = PackedLinear,
) -> Any:
    """Copy a module for inference on a CPU. The copy's parameters share memory with the module's, which is unchanged.

    Args:
        module (`nn.Module`): The module, on a CPU.
        rows (`int`): Approximate number of rows of the inputs of linear maps.
        copies (`dict[int, Any]`, *optional*): What has been copied, by the `id` of the original, so that what is tied
            stays tied.
        linear (`type[PackedLinear]`, defaults to `PackedLinear`): What replaces linear maps.

    Returns:
        `nn.Module`: the copy. Linear maps of other classes (such as adapters and quantized ones), and those with hooks
        or a `forward` of their own, are not replaced.
    """
    copies = {} if copies is None else copies
    if id(module) in copies:
        return copies[id(module)]
    # Not `copy.copy`, which would pack weights again, and which parametrized modules refuse.
    twin: Any = object.__new__(type(module))
    vars(twin).update(vars(module))
    copies[id(module)] = twin
    for name, value in vars(module).items():
        if isinstance(value, dict | PreTrainedConfig | GenerationConfig):  # parameters, modules, hooks, configs
            vars(twin)[name] = copies.setdefault(id(value), copy.copy(value))
    for name, parameter in module._parameters.items():
        if parameter is not None:
            twin._parameters[name] = copies.setdefault(id(parameter), copy.copy(parameter).requires_grad_(False))
    if type(module) in (nn.Linear, FusedLinear, PackedLinear) and type(module) is not linear:
        is_changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        packed = None if is_changed else linear(twin, rows)
        if packed is not None and packed.has_kernel:
            twin = copies[id(module)] = packed
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else for_cpu(child, rows, copies, linear)
    is_of_decoder = isinstance(twin, CrossAttention) or (isinstance(twin, SelfAttention) and twin.is_causal)
    if is_of_decoder and twin.config._attn_implementation == "sdpa":  # others, such as one's own, stay
        twin.config = copy.copy(twin.config)
        twin.config._attn_implementation = "eager"
    return twin


@functools.cache
def fastest_products(dtype: torch.dtype, threads: int) -> Precision:
    """Choose between packed products of a float type and products of 8-bit integers, by a measurement.

    Args:
        dtype (`torch.dtype`): The float type.
        threads (`int`): The current number of threads, which is an argument for the cache.

    Returns:
        `Precision`: the choice.
    """
    if not weight_levels():
        return Precision(dtype, "this CPU has no products of 8-bit integers")
    linear = nn.utils.skip_init(nn.Linear, INPUTS, OUTPUTS, device="cpu", dtype=dtype).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.fill_(1.0)
    layers = {dtype: PackedLinear(linear, ROWS), torch.int8: Int8Linear(linear, ROWS)}
    inputs = torch.ones(ROWS, INPUTS, dtype=dtype, device="cpu")

    def measure(kind: torch.dtype) -> float:
        started = time.perf_counter()
        layers[kind](inputs)
        return time.perf_counter() - started

    return choose_faster(measure, dtype, torch.int8)


def is_faster_with_int8(model: PreTrainedModel) -> bool:
    """Return whether a model is faster with products of 8-bit integers, and log the measurement.

    Args:
        model (`PreTrainedModel`): The model.

    Returns:
        `bool`: whether it is; never for a model that does not support them.
    """
    if not supports_fast_model(model):
        return False
    choice = fastest_products(model.dtype, torch.get_num_threads())
    logger.warning(f"Linear maps in {choice}.")
    return choice.dtype == torch.int8


__all__ = [
    "Int8Linear",
    "PackedLinear",
    "can_pack",
    "fast_model",
    "fastest_products",
    "for_cpu",
    "is_faster_with_int8",
    "is_sharded",
    "supports_fast_model",
]
