"""Dropout with random bits that are cheap on a CPU."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .checks import hides_values


logger = logging.get_logger(__name__)

# Names of flash attention packages whose kernels have no dropout.
_KERNELS_WITHOUT_DROPOUT = re.compile(r"flash[-_]att(entio)?n[-_]?[34]")


def dropout_noise(shape: torch.Size, rate: float, device: torch.device) -> Tensor:
    """Draw a tensor that is 1 where dropout keeps and 0 where it drops.

    One 64-bit random number serves four elements, with the rate rounded to 2^-16. That is several times faster than
    `torch.nn.functional.dropout` on a CPU, whose random bits can cost more than the layer they follow.

    Args:
        shape (`torch.Size`): Its shape.
        rate (`float`): Probability of a 0.
        device (`torch.device`): Device of the result.

    Returns:
        `torch.Tensor`: the noise, one byte (`torch.int8`) for each element.
    """
    count = shape.numel()
    bits = torch.empty((count + 3) // 4, dtype=torch.int64, device=device).random_(-(2**63), None)
    drawn = bits.view(torch.int16)[:count].view(shape)
    threshold = min(round(rate * 2**16), 2**16 - 1) - 2**15  # 16 bits hold no larger one
    return torch.ge(drawn, threshold, out=torch.empty(shape, dtype=torch.int8, device=device))


def _scaled_noise(noise: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """Return noise / (1 - rate); in 16 bits, by a product of integers, which is four times as fast."""
    scale = 1 / (1 - rate)
    if dtype.itemsize != 2:
        return noise.to(dtype).mul_(scale)
    bits = torch.tensor(scale, dtype=dtype, device="cpu").view(torch.int16).item()
    return noise.to(torch.int16).mul_(bits).view(dtype)


class _Dropout(torch.autograd.Function):
    """Multiply by noise / (1 - rate), and keep no more than the noise's bytes for the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden_states: Tensor, noise: Tensor, rate: float) -> Tensor:
        return hidden_states * _scaled_noise(noise, rate, hidden_states.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, noise, ctx.rate = inputs
        ctx.save_for_backward(noise)
        ctx.save_for_forward(noise)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (noise,) = ctx.saved_tensors
        return _Dropout.apply(grad_output, noise, ctx.rate), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (noise,) = ctx.saved_tensors
        return _Dropout.apply(tangent, noise, ctx.rate)


def dropout(hidden_states: Tensor, rate: float, training: bool) -> Tensor:
    """Apply inverted dropout: in training, zero elements with probability `rate` and scale the rest by 1 / (1 - rate).

    Args:
        hidden_states (`torch.Tensor`): Any shape.
        rate (`float`): Probability of zero.
        training (`bool`): Whether to drop at all.

    Returns:
        `torch.Tensor`: a tensor of the same shape.
    """
    if not training or rate == 0:
        return hidden_states
    if hidden_states.device.type != "cpu" or hides_values(hidden_states):
        return nn.functional.dropout(hidden_states, rate)
    return _Dropout.apply(hidden_states, dropout_noise(hidden_states.shape, rate, hidden_states.device), rate)


class Dropout(nn.Dropout):
    """torch's dropout with the random bits of [`dropout`].

    As a module, so that its rate can be changed, or dropout switched on in evaluation, as with any other model.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Drop elements in training.

        Args:
            hidden_states (`torch.Tensor`): Any shape.

        Returns:
            `torch.Tensor`: a tensor of the same shape.
        """
        return dropout(hidden_states, self.p, self.training)


def attention_dropout_rate(attention: Any) -> float:
    """Return the rate at which attention weights are dropped, and warn once of a kernel that drops none.

    Args:
        attention (`nn.Module`): The attention, with `config` and a [`Dropout`].

    Returns:
        `float`: the rate; 0 in evaluation.
    """
    rate, kernel = attention.dropout.p if attention.dropout.training else 0.0, attention.config._attn_implementation
    if rate > 0 and _KERNELS_WITHOUT_DROPOUT.search(kernel) and not torch.compiler.is_compiling():
        logger.warning_once(
            f"No attention weight is dropped although the rate is {rate}: {kernel} has no dropout. Set the rate to 0, "
            'or call `model.set_attn_implementation("sdpa")`.'
        )
    return rate
