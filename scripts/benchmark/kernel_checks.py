"""What `gpu.py` checks of attention kernels: that they are there, how much they drop, and that gradients know what."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


# Queries, keys, values of shape (batch, heads, length, width) and a rate of dropout, to outputs of that shape.
Kernel = Callable[[Tensor, Tensor, Tensor, float], Tensor]
# One-hot values of this width show the weights themselves.
LENGTH = 64
RATE = 0.1
# Largest distance of rounded outputs and gradients from the exact ones, of their norm. bfloat16 rounds by 0.4 %;
# another pattern of dropout in the backward pass moves the gradients by 40 %.
MAX_ERROR = 0.03
# Flash attention's rates are multiples of 1/256; five standard deviations of the sample come on top.
RATE_STEP = 1 / 255


def offsets_of(states: Tensor) -> Tensor:
    """Return where the rows begin that follow each other in a batch of shape `(batch, heads, length, width)`."""
    batch, _, length, _ = states.shape
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=states.device)


def to_sequence(states: Tensor) -> Tensor:
    """Lay the rows one after another: `(batch * length, heads, width)`."""
    return states.transpose(1, 2).flatten(0, 1)


def to_batch(states: Tensor, like: Tensor) -> Tensor:
    """Undo `to_sequence`."""
    return states.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)


def varlen_flash(query: Tensor, key: Tensor, value: Tensor, rate: float) -> Tensor:
    """Attend by torch's flash operator for sequences of varying lengths."""
    offsets, length = offsets_of(query), query.shape[2]
    rows = map(to_sequence, (query, key, value))
    operator = torch.ops.aten._flash_attention_forward
    return to_batch(operator(*rows, offsets, offsets, length, length, rate, False, False)[0], query)


def varlen_efficient(query: Tensor, key: Tensor, value: Tensor, rate: float) -> Tensor:
    """Attend by torch's memory-efficient operator for sequences of varying lengths."""
    offsets, length = offsets_of(query), query.shape[2]
    rows = (to_sequence(states)[None] for states in (query, key, value))
    operator = torch.ops.aten._efficient_attention_forward
    return to_batch(operator(*rows, None, offsets, offsets, length, length, rate, 0, True)[0][0], query)


def by_sdpa(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, rate: float) -> Tensor:
    """Attend by one backend of `scaled_dot_product_attention`."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, dropout_p=rate)


KERNELS: dict[str, tuple[Kernel, tuple[torch.dtype, ...]]] = {
    "varlen, flash": (varlen_flash, (torch.bfloat16,)),
    "varlen, efficient": (varlen_efficient, (torch.bfloat16, torch.float32)),
    "sdpa, flash": (partial(by_sdpa, SDPBackend.FLASH_ATTENTION), (torch.bfloat16,)),
    "sdpa, cuDNN": (partial(by_sdpa, SDPBackend.CUDNN_ATTENTION), (torch.bfloat16,)),
    "sdpa, efficient": (partial(by_sdpa, SDPBackend.EFFICIENT_ATTENTION), (torch.bfloat16, torch.float32)),
    "sdpa, math": (partial(by_sdpa, SDPBackend.MATH), (torch.bfloat16, torch.float32)),
}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of a difference, of the norm of what is expected."""
    return float((found.float() - expected).norm() / expected.norm())


def check_dropout(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, batch: int = 16
) -> dict[str, float | bool]:
    """Compare a kernel with attention that drops what the kernel has dropped.

    Values are one-hot, so that the outputs are the weights, and 0 where one was dropped. With this pattern, outputs
    and gradients are computed again by plain operations in float32.

    Args:
        kernel (`Callable`): The kernel.
        device (`torch.device`): Where to run it.
        dtype (`torch.dtype`): Type of its inputs.
        batch (`int`): Number of rows, of four heads each.

    Returns:
        `dict[str, float | bool]`: the share that was dropped, the errors of outputs and gradients, and whether all is
        as it should be (`passed`).
    """
    generator = torch.Generator().manual_seed(0)
    shape = (batch, 4, LENGTH, LENGTH)
    query, key, outer = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
    value = torch.eye(LENGTH, device=device, dtype=dtype).expand(shape).contiguous()
    inputs = [states.detach().requires_grad_() for states in (query, key, value)]
    output = kernel(inputs[0], inputs[1], inputs[2], RATE)
    gradients = torch.autograd.grad(output, inputs, outer)
    kept = output.detach() != 0
    exact = [states.detach().float().requires_grad_() for states in (query, key, value)]
    weights = (exact[0] @ exact[1].transpose(2, 3) / LENGTH**0.5).softmax(dim=-1)
    expected = (weights * kept / (1 - RATE)) @ exact[2]
    exact_gradients = torch.autograd.grad(expected, exact, outer.float())
    dropped = 1 - float(kept.float().mean())
    errors = [relative_error(*pair) for pair in zip(gradients, exact_gradients, strict=True)]
    output_error = relative_error(output.detach(), expected.detach())
    deviation = (RATE * (1 - RATE) / kept.numel()) ** 0.5
    return {
        "dropped": round(dropped, 5),
        "output_error": round(output_error, 5),
        "gradient_error": round(max(errors), 5),
        "passed": abs(dropped - RATE) <= RATE_STEP + 5 * deviation and max(output_error, *errors) <= MAX_ERROR,
    }


def check_kernels(device: torch.device, batch: int = 16) -> dict[str, dict[str, float | bool | str]]:
    """Check all kernels that run on a device.

    Args:
        device (`torch.device`): The device.
        batch (`int`): As in [`check_dropout`].

    Returns:
        `dict[str, dict]`: what was found, by kernel and type; `missing` says why one does not run.

    Raises:
        AcceleratorError: if the device can't be used any more.
    """
    found: dict[str, dict[str, float | bool | str]] = {}
    for name, (kernel, dtypes) in KERNELS.items():
        for dtype in dtypes:
            key = f"{name}, {str(dtype).removeprefix('torch.')}"
            try:
                found[key] = {**check_dropout(kernel, device, dtype, batch)}
            except torch.AcceleratorError:
                raise
            except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
                found[key] = {"missing": str(error).strip().partition("\n")[0][:200]}
    return found
