"""The faster of float32 and bfloat16 on a device, by a measurement of less than a second.

CPUs with matrix units for bfloat16 (AMX) multiply it four to six times faster than float32, some with vector
instructions for it only half as fast, and others not at all.
"""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers.utils import logging


logger = logging.get_logger(__name__)


FASTEST = "fastest"
INT8 = "int8"
# Rows, inputs and outputs of the product that is measured: a small batch in the first half of a base model's
# feed-forward network.
ROWS, INPUTS, OUTPUTS = 256, 512, 2048
MAX_TURNS = 15
MAX_SECONDS = 0.3  # no turn begins after so much measured time
# A smaller gain of the product alone is lost again to the casts and to what is not a product.
MIN_SPEEDUP = 1.2


@dataclass(frozen=True)
class Precision:
    """A choice between two types of products, such as float32 and bfloat16.

    Args:
        dtype (`torch.dtype`): The choice.
        reason (`str`): Why.
        gflops (`dict[torch.dtype, float]`, *optional*): Measured speed of products of each type, in 10^9 operations a
            second; `None` if nothing was measured.
    """

    dtype: torch.dtype
    reason: str
    gflops: dict[torch.dtype, float] | None = None

    @property
    def name(self) -> str:
        """Name of the choice, such as `"bfloat16"`."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def fastest_precision(device: str | torch.device = "cpu") -> Precision:
    """Choose the faster of float32 and bfloat16.

    On a CPU products of both types are measured, once for each number of threads in a process. CUDA devices with
    bfloat16 instructions are faster with it. Other devices are not measured and keep float32.

    Args:
        device (`str` or `torch.device`): The device.

    Returns:
        `Precision`: the choice.

    Raises:
        ValueError: if it is a CUDA device that PyTorch does not find.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        if (torch.device(device).index or 0) >= torch.cuda.device_count():
            raise ValueError(f"`device` must be one of the {torch.cuda.device_count()} GPUs or cpu, got {device}.")
        with torch.cuda.device(device):  # the question is about the current one
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if has_bfloat16:
            return Precision(torch.bfloat16, f"{torch.cuda.get_device_name(device)} has bfloat16 products")
        return Precision(torch.float32, f"{torch.cuda.get_device_name(device)} has no bfloat16 products")
    if kind != "cpu":
        return Precision(torch.float32, f"devices of the kind {kind} are not measured")
    return _fastest_on_cpu(torch.get_num_threads())


def forget() -> None:
    """Forget what was measured, so that the next question measures anew."""
    _fastest_on_cpu.cache_clear()


@functools.cache
def _fastest_on_cpu(threads: int) -> Precision:
    """Choose on the CPU with the current number of threads, which is an argument for the cache."""
    if not cpu_has_bfloat16():
        return Precision(torch.float32, "this CPU has no bfloat16 products")
    return choose_faster(_seconds_of_product)


def choose_faster(
    measure: Callable[[torch.dtype], float],
    plain: torch.dtype = torch.float32,
    lower: torch.dtype = torch.bfloat16,
) -> Precision:
    """Choose by the median of several turns, in each of which both types are measured.

    Args:
        measure (`Callable[[torch.dtype], float]`): Returns the seconds of one product of such a type.
        plain (`torch.dtype`, defaults to `torch.float32`): The type of higher precision.
        lower (`torch.dtype`, defaults to `torch.bfloat16`): The type of lower precision.

    Returns:
        `Precision`: the lower one if it is faster by a margin that conversions need, or else the plain one.
    """
    seconds: dict[torch.dtype, list[float]] = {plain: [], lower: []}
    for dtype in seconds:
        measure(dtype)  # the first product prepares the kernel
    while len(seconds[plain]) < MAX_TURNS and sum(map(sum, seconds.values())) < MAX_SECONDS:
        for dtype, values in seconds.items():
            values.append(measure(dtype))
    operations = 2 * ROWS * INPUTS * OUTPUTS
    gflops = {dtype: operations / statistics.median(values) / 1e9 for dtype, values in seconds.items()}
    faster = gflops[lower] >= MIN_SPEEDUP * gflops[plain]
    names = [str(dtype).removeprefix("torch.") for dtype in (lower, plain)]
    return Precision(
        lower if faster else plain,
        f"products of {names[0]} run at {gflops[lower]:.3g} GFLOP/s, of {names[1]} at {gflops[plain]:.3g}",
        gflops,
    )


@functools.cache
def cpu_has_bfloat16() -> bool:
    """Ask torch whether oneDNN has bfloat16 products on this CPU, and try a small one.

    Returns:
        `bool`: the answer.
    """
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        small = torch.ones(16, 16, dtype=torch.bfloat16, device="cpu")
        F.linear(small, small)
    except (AttributeError, RuntimeError):
        return False
    return True


@torch.no_grad()
def _seconds_of_product(dtype: torch.dtype) -> float:
    inputs = torch.ones(ROWS, INPUTS, dtype=dtype, device="cpu")
    weight = torch.ones(OUTPUTS, INPUTS, dtype=dtype, device="cpu")
    started = time.perf_counter()
    F.linear(inputs, weight)
    return time.perf_counter() - started


def resolve_dtype(dtype: str | torch.dtype, device: str | torch.device = "cpu") -> str | torch.dtype:
    """Replace `"fastest"` by the faster type of a device, and log the choice.

    Args:
        dtype (`str` or `torch.dtype`): A type as for `from_pretrained`, or `"fastest"`.
        device (`str` or `torch.device`): The device.

    Returns:
        `str` or `torch.dtype`: the chosen type; any other is returned as it is.
    """
    if dtype != FASTEST:
        return dtype
    choice = fastest_precision(device)
    logger.warning(f"Precision {choice}.")
    return choice.dtype


def is_int8(dtype: str | torch.dtype) -> bool:
    """Return whether a type is that of 8-bit integers, by itself or by its name.

    Args:
        dtype (`str` or `torch.dtype`): The type.

    Returns:
        `bool`: whether it is.
    """
    return str(dtype).removeprefix("torch.") == INT8


__all__ = ["Precision", "choose_faster", "fastest_precision", "is_int8", "resolve_dtype"]
