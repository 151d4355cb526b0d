"""What `gpu.py` checks of attention kernels and of the loss.

That kernels are there, how much they drop, and that gradients know what; that the models' own attention over packed
tokens is that of each sequence, and that the gradients of the loss are those of all logits at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.generation import StepGraphs, beam_search
from hf_vanilla.models.chunked_loss import SmoothedTarget, adds_in_float32, loss_and_gradients
from hf_vanilla.models.sequences import Sequences
from hf_vanilla.models.varlen_attention import kernel_arguments, varlen_attention, varlen_kernel


# Queries, keys, values of shape (batch, heads, length, width) and a rate of dropout, to outputs of that shape.
Kernel = Callable[[Tensor, Tensor, Tensor, float], Tensor]
# One-hot values of this width show the weights themselves.
LENGTH = 64
RATE = 0.1
# Largest distance of rounded outputs and gradients from the exact ones, of their norm. bfloat16 rounds by 0.4 %;
# another pattern of dropout in the backward pass moves the gradients by 40 %.
MAX_ERROR = 0.03
# Sequences of a target and of its source, of unequal lengths; kind of attention, and which lengths its keys have.
LENGTHS, SOURCE_LENGTHS = (37, 5, 64, 1), (20, 64, 9, 33)
SEQUENCES = {"self": (False, LENGTHS), "causal": (True, LENGTHS), "cross": (False, SOURCE_LENGTHS)}
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


def check_sequences(
    attend: Callable[..., Tensor], kind: str, device: torch.device, dtype: torch.dtype, width: int = 64
) -> dict[str, float | bool]:
    """Compare attention over packed sequences with attention of each of them by plain operations in float32.

    Args:
        attend (`Callable`): The attention, such as `varlen_attention`.
        kind (`str`): One of `SEQUENCES`.
        device (`torch.device`): Where to run it.
        dtype (`torch.dtype`): Type of its inputs.
        width (`int`): Width of each of four heads; keys and values are slices of one product.

    Returns:
        `dict[str, float | bool]`: the errors of outputs and gradients, and whether they are small (`passed`).
    """
    is_causal, key_lengths = SEQUENCES[kind]
    module: Any = nn.Module()
    module.is_causal = is_causal
    generator = torch.Generator().manual_seed(0)
    sizes = ((sum(LENGTHS), width), (sum(key_lengths), 2 * width), (sum(LENGTHS), width))
    products = [torch.randn(1, rows, 4 * width, generator=generator).to(device, dtype) for rows, width in sizes]
    outer = products.pop().unflatten(2, (4, width))

    def heads(query: Tensor, keys_and_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = (query, *keys_and_values.chunk(2, dim=-1))
        query, key, value = (part.unflatten(2, (4, width)) for part in parts)
        return query, key, value

    inputs = [each.detach().requires_grad_() for each in products]
    queries, keys = (
        Sequences.of_lengths(torch.tensor(each, device=device), max(each)) for each in (LENGTHS, key_lengths)
    )
    output = attend(module, *heads(*inputs), 0.0, width**-0.5, **kernel_arguments(queries, keys))
    gradients = torch.autograd.grad(output, inputs, outer)
    exact = [each.detach().float().requires_grad_() for each in products]
    query, key, value = (each.transpose(1, 2) for each in heads(*exact))
    split = zip(query.split(LENGTHS, 2), key.split(key_lengths, 2), value.split(key_lengths, 2), strict=True)
    expected = torch.cat([F.scaled_dot_product_attention(*each, is_causal=is_causal) for each in split], 2)
    expected = expected.transpose(1, 2)
    exact_gradients = torch.autograd.grad(expected, exact, outer.float())
    errors = [relative_error(*pair) for pair in zip(gradients, exact_gradients, strict=True)]
    output_error = relative_error(output.detach(), expected.detach())
    return {
        "output_error": round(output_error, 5),
        "gradient_error": round(max(errors), 5),
        "passed": max(output_error, *errors) <= MAX_ERROR,
    }


def check_loss(device: torch.device, dtype: torch.dtype, tokens: int) -> dict[str, float | bool]:
    """Compare the loss chunk by chunk, and its gradients, with those of all logits at once in float32.

    Args:
        device (`torch.device`): Where to run it.
        dtype (`torch.dtype`): Type of the hidden states.
        tokens (`int`): Number of tokens: more than one chunk of them shows how chunks are summed.

    Returns:
        `dict[str, float | bool]`: whether the weight's gradient is added up from products of 16-bit matrices by one
        operation (`adds_products`), the errors, and whether they are small (`passed`).
    """
    vocab_size, width = 32_000, 64
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, width), (vocab_size, width), (vocab_size,))
    states, weight, bias = inputs = [
        torch.randn(shape, generator=generator).to(device, dtype) / width**0.25 for shape in shapes
    ]
    labels = torch.randint(vocab_size, (tokens,), generator=generator).to(device)
    found: tuple[Any, ...] = loss_and_gradients(states, weight, bias, labels, SmoothedTarget(1.0, 0.0, -1, 0.0))
    exact = [each.float().requires_grad_() for each in inputs]
    expected = F.cross_entropy(F.linear(*exact), labels, reduction="sum")
    wanted = (expected.detach(), *torch.autograd.grad(expected, exact))
    errors = [relative_error(*pair) for pair in zip(found, wanted, strict=True)]
    return {
        "adds_products": dtype != torch.float32 and adds_in_float32(device, dtype),
        "output_error": round(errors[0], 5),
        "gradient_error": round(max(errors[1:]), 5),
        "passed": max(errors) <= MAX_ERROR,
    }


def check_kernels(device: torch.device, batch: int = 16) -> dict[str, dict[str, float | bool | str]]:
    """Check all kernels that run on a device, and the loss.

    Args:
        device (`torch.device`): The device.
        batch (`int`): As in [`check_dropout`].

    Returns:
        `dict[str, dict]`: what was found, by kernel and type; `missing` says why one does not run.

    Raises:
        AcceleratorError: if the device can't be used any more.
    """
    checks: dict[str, Callable[[], dict[str, float | bool]]] = {}
    for name, (kernel, dtypes) in KERNELS.items():
        for dtype in dtypes:
            key = f"{name}, {str(dtype).removeprefix('torch.')}"
            checks[key] = partial(check_dropout, kernel, device, dtype, batch)
    for kind in SEQUENCES:
        for dtype, width in ((torch.bfloat16, 64), (torch.float32, 20)):  # 20 is padded to a multiple of 8
            key = f"packed {kind}-attention, {str(dtype).removeprefix('torch.')}"
            checks[key] = partial(check_sequences, varlen_attention, kind, device, dtype, width)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        checks[f"loss, {str(dtype).removeprefix('torch.')}"] = partial(check_loss, device, dtype, 320 * batch)
    checks["captured search, float32"] = partial(check_graphs, device)
    found: dict[str, dict[str, float | bool | str]] = {}
    for key, check in checks.items():
        try:
            found[key] = {**check()}
        except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError) as error:
            if isinstance(error, torch.AcceleratorError):
                torch.cuda.synchronize()  # raises again if the device is lost, and not if a kernel could not start
            found[key] = {"missing": str(error).strip().partition("\n")[0][:200]}
    return found


def chosen_kernels(device: torch.device) -> dict[str, Any]:
    """Say which kernels are taken, for packed sequences and by `scaled_dot_product_attention`.

    Args:
        device (`torch.device`): The device.

    Returns:
        `dict[str, Any]`: the names of operators and the numbers of `SDPBackend`, and the version of cuDNN.
    """
    chosen: dict[str, Any] = {"cuDNN": torch.backends.cudnn.version()}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        chosen[f"packed, {name}"] = varlen_kernel(device, dtype)
        states = torch.randn(4, 8, 128, 64, device=device, dtype=dtype)
        mask = torch.ones(4, 1, 128, 128, dtype=torch.bool, device=device)
        for rate, given in ((0.0, None), (RATE, None), (0.0, mask), (RATE, mask)):
            key = f"sdpa, {name}{', dropout' if rate else ''}{'' if given is None else ', mask'}"
            chosen[key] = torch._fused_sdp_choice(states, states, states, given, rate, False)
    return chosen


def check_graphs(device: torch.device) -> dict[str, float | bool]:
    """Compare searches with captured steps, the second of them replayed, with one without, in float32.

    Args:
        device (`torch.device`): Where to run it.

    Returns:
        `dict[str, float | bool]`: the number of graphs, the largest distance of scores, and whether it is small.
    """
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 48, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 2}
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(vocab_size=50, **sizes))
    model = model.eval().to(device)
    options: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 12, "custom_generate": beam_search}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    source, graphs = torch.randint(5, 50, (5, 9), device=device), StepGraphs()
    expected = model.generate(source, **options).sequences_scores
    with torch.autocast(device.type, enabled=False):
        found = [model.generate(source, step_graphs=graphs, **options).sequences_scores for _ in range(2)]
    error = max(float((scores - expected).abs().max()) for scores in found)
    return {"graphs": len(graphs), "score_error": round(error, 6), "passed": error <= MAX_ERROR and len(graphs) > 0}
