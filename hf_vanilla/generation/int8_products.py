"""Products of 8-bit integers on a CPU: weights are quantized for each output, inputs for each row, when they come.

The product is oneDNN's, which adds in 32 bits and so rounds nothing. It is fast with unsigned inputs alone, so 128 is
added to them, and 128 times the sum of the weights is taken off the output. torch's operators of quantized tensors
(`torch.ops.quantized`) have one scale for all rows, and are deprecated.
"""

import functools
from typing import Any, NamedTuple

import torch

from ..precision import cpu_has_bfloat16


FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = 127  # the largest absolute value of a quantized input or weight
# x86 CPUs without VNNI add two products in 16 bits: 2 * 255 * 63 is still below 2^15.
REDUCED_LEVELS = 63
OFFSET = 128  # of unsigned inputs
SMALLEST_SCALE = 1e-32  # a row of zeros has a scale too


class QuantizedWeight(NamedTuple):
    """A weight matrix of 8-bit integers.

    Args:
        packed (`torch.Tensor`): The integers, in oneDNN's own layout.
        scales (`torch.Tensor` of shape `(out_features,)`): The weights' unit in each row of the matrix.
        zero_points (`torch.Tensor` of shape `(out_features,)`): Zeros, which the operator asks for.
        of_offset (`torch.Tensor` of shape `(out_features,)`): What is added to products because of the inputs' offset.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor
    of_offset: torch.Tensor


def can_quantize(weight: torch.Tensor) -> bool:
    """Return whether such weights can be quantized for this CPU.

    Args:
        weight (`torch.Tensor`): One of the weights.

    Returns:
        `bool`: whether they can.
    """
    return weight.device.type == "cpu" and weight.dtype in FLOAT_TYPES and weight_levels() > 0


@functools.cache
def weight_levels() -> int:
    """Test for the largest absolute value of weights with which products are exact on this CPU.

    Returns:
        `int`: 127, or 63 if sums of 127 are cut off, or 0 if torch has no such product here.
    """
    for levels in (LEVELS, REDUCED_LEVELS):
        inputs = torch.full((3, 64), LEVELS, dtype=torch.int8, device="cpu")
        weight = torch.full((16, 64), levels, dtype=torch.int8, device="cpu")
        try:
            product = _multiply(
                inputs, _pack(weight, torch.ones(16, dtype=torch.float32, device="cpu")), torch.float32
            )
        except (AttributeError, RuntimeError, TypeError):  # torch lacks the operator, or this CPU a kernel
            return 0
        if (product == 64 * LEVELS * levels).all():
            return levels
    return 0


def quantize_weight(weight: torch.Tensor) -> QuantizedWeight:
    """Round the weights of each output to integers, of which the largest is as large as the CPU permits.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`): The weights.

    Returns:
        `QuantizedWeight`: the integers and their scales.
    """
    weight, levels = weight.detach().float(), weight_levels()
    scales = (weight.abs().amax(1) / levels).clamp_(min=SMALLEST_SCALE)
    return _pack((weight / scales[:, None]).round_().to(torch.int8), scales)


def int8_linear(hidden_states: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Apply a linear map with quantized weights to inputs that are quantized for each row.

    Args:
        hidden_states (`torch.Tensor` of shape `(..., in_features)`): The input.
        weight (`QuantizedWeight`): The weights.
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*): The bias.

    Returns:
        `torch.Tensor` of shape `(..., out_features)`: the output, of the input's type.
    """
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    dtype = torch.float32  # of the product: without instructions for bfloat16, oneDNN takes a second to write one
    if rows.dtype == torch.bfloat16 and cpu_has_bfloat16():
        dtype = torch.bfloat16
    scales = (_largest(rows).float() / LEVELS).clamp_(min=SMALLEST_SCALE).to(dtype)
    inverse = 1 / scales.float()
    scaled = rows * inverse if rows.dtype == torch.float32 else rows.float().mul_(inverse)
    output = _multiply(scaled.round_().to(torch.int8), weight, dtype)  # much faster than to unsigned ones
    output = output.mul_(scales) if bias is None else torch.addcmul(bias, output, scales)
    return output.to(hidden_states.dtype).view(*hidden_states.shape[:-1], len(weight.scales))


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """Find the largest absolute value of each row: (rows, 1)."""
    if rows.dtype != torch.bfloat16:
        return rows.abs().amax(1, keepdim=True)
    # Without their signs, such numbers are in the order of their bits, taken as integers: four times as fast.
    return rows.view(torch.int16).bitwise_and(2**15 - 1).amax(1, keepdim=True).view(torch.bfloat16)


def _pack(weight: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """Return integers (out_features, in_features) in oneDNN's layout, with their scales."""
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    zero_points = torch.zeros(len(weight), dtype=torch.long, device=weight.device)
    return QuantizedWeight(packed, scales, zero_points, weight.sum(1) * scales * -OFFSET)


def _multiply(integers: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Multiply integers (rows, in_features), which are overwritten, by weights: (rows, out_features) of this type."""
    unsigned = integers.view(torch.uint8).bitwise_xor_(OFFSET)  # adds the offset
    plain_output: tuple[Any, ...] = (1.0, 0, dtype, "none", [], "")
    return torch.ops.onednn.qlinear_pointwise(unsigned, 1.0, 0, *weight, *plain_output)


__all__ = ["QuantizedWeight", "can_quantize", "int8_linear", "quantize_weight", "weight_levels"]
