"""Attention over sequences that follow each other without padding ([`Sequences`]), on a GPU.

It runs by torch's own kernels for sequences of varying lengths, or by transformers' interface to a flash attention
package.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from .dropout import attention_dropout_rate
from .sequences import Sequences


# Devices with kernels for sequences of varying lengths; "meta" has their shapes alone.
VARLEN_DEVICES = ("cuda", "meta")
# Flash attention is for these types, on GPUs of compute capability 8 (A100) or more, and for heads up to this width.
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_CAPABILITY, FLASH_WIDTH = 8, 256
# What every head is padded to a multiple of, so that both kernels can read 16 bytes at a time.
WIDTH_MULTIPLE = 8
ALIGNMENT = 16  # bytes, of each row
FLASH, EFFICIENT = "_flash_attention_forward", "_efficient_attention_forward"
# Their arguments in order, the last by name.
KERNEL_ARGUMENTS = {
    FLASH: "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale",
    EFFICIENT: "query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p custom_mask_type "
    "compute_log_sumexp scale",
}


def has_varlen_kernels(device: torch.device) -> bool:
    """Whether there are kernels for sequences of varying lengths for a device.

    Args:
        device (`torch.device`): The device.

    Returns:
        `bool`: the answer.
    """
    return device.type in VARLEN_DEVICES


def is_flash(implementation: str) -> bool:
    """Whether an attention implementation is transformers' interface to a flash attention package.

    Args:
        implementation (`str`): Its name in the config.

    Returns:
        `bool`: the answer.
    """
    return "flash" in implementation and "paged" not in implementation


def kernel_arguments(queries: Sequences, keys: Sequences) -> dict[str, Any]:
    """Name where queries and keys lie as transformers' flash attention does, and [`varlen_attention`].

    Args:
        queries (`Sequences`): The sequences of queries.
        keys (`Sequences`): As many sequences of keys.

    Returns:
        `dict[str, Any]`: arguments of the kernel.
    """
    offsets = {"cu_seq_lens_q": queries.offsets, "cu_seq_lens_k": keys.offsets}
    return {**offsets, "max_length_q": queries.max_length, "max_length_k": keys.max_length}


@cache
def has_operator(name: str) -> bool:
    """Whether this version of torch has a private operator with the arguments that it is called with.

    Args:
        name (`str`): `FLASH` or `EFFICIENT`.

    Returns:
        `bool`: the answer.
    """
    operator = getattr(torch.ops.aten, name, None)
    given = [] if operator is None else [argument.name for argument in operator.default._schema.arguments]
    return " ".join(given).startswith(KERNEL_ARGUMENTS[name])


@torch.compiler.assume_constant_result  # compiled code can't read schemas
def varlen_kernel(device: torch.device, dtype: torch.dtype) -> str | None:
    """Choose the operator for queries, keys and values.

    Args:
        device (`torch.device`): Their device.
        dtype (`torch.dtype`): Their type.

    Returns:
        `str`: `FLASH`, or `EFFICIENT` for float32 and older GPUs; `None` if neither runs.
    """
    if not has_varlen_kernels(device) or torch.version.hip is not None:
        return None
    is_recent = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= FLASH_CAPABILITY
    has_flash = device.type != "cuda" or torch.backends.cuda.is_flash_attention_available()  # not in all builds
    if is_recent and has_flash and (dtype in FLASH_DTYPES or device.type == "meta") and has_operator(FLASH):
        return FLASH
    is_known = dtype in (torch.float32, torch.float16) or (dtype == torch.bfloat16 and is_recent)
    return EFFICIENT if is_known and has_operator(EFFICIENT) else None


def runs_varlen(model: PreTrainedModel, hidden_states: Tensor, is_compiled: bool) -> bool:
    """Whether attention over sequences runs for a model, on a device that has kernels.

    Args:
        model (`PreTrainedModel`): The model, with `layers`.
        hidden_states (`torch.Tensor`): What its layers are given.
        is_compiled (`bool`): Whether a layer, or a part of one, is compiled by itself.

    Returns:
        `bool`: the answer.
    """
    layers: Any = model.layers
    device, dtype, implementation = hidden_states.device, hidden_states.dtype, model.config._attn_implementation
    if is_flash(implementation):
        return True
    if device.type != "meta" and torch.is_autocast_enabled(device.type):  # meta has no autocast
        dtype = torch.get_autocast_dtype(device.type)
    kernel = varlen_kernel(device, dtype) if implementation == "sdpa" else None
    if not is_compiled:
        return kernel is not None
    # compiled layers can't have the gradient of the other kernel, which is also that of wide heads
    widths = [getattr(each, name, 0) for each in layers.modules() for name in ("d_k", "d_v")]
    return kernel == FLASH and max(widths, default=0) <= FLASH_WIDTH


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    **kwargs: Any,
) -> Tensor:
    """Attend from each sequence of queries to the sequence of keys of the same number.

    Args:
        module (`nn.Module`): The attention; with `is_causal`, queries and keys are of equal lengths.
        query (`torch.Tensor` of shape `(1, query_len, heads, d_k)`): Queries of a type that [`varlen_kernel`] knows.
        key (`torch.Tensor` of shape `(1, key_len, heads, d_k)`): Keys.
        value (`torch.Tensor` of shape `(1, key_len, heads, d_v)`): Values.
        dropout (`float`): Probability that a weight is dropped.
        scaling (`float`): What scores are multiplied with.
        cu_seq_lens_q (`torch.Tensor` of shape `(sequences + 1,)`): Offsets of the sequences of queries, in int32.
        cu_seq_lens_k (`torch.Tensor` of shape `(sequences + 1,)`): Offsets of the sequences of keys, in int32.
        max_length_q (`int`): At least the most queries of a sequence.
        max_length_k (`int`): At least the most keys of a sequence.
        **kwargs: Not used.

    Returns:
        `torch.Tensor` of shape `(1, query_len, heads, d_v)`: the heads' outputs.

    Source: Vaswani et al. 2017, 3.2.1; Dao 2023, FlashAttention-2; Rabe & Staats 2021.
    """
    d_v, alignment = value.shape[3], ALIGNMENT // value.element_size()
    width = -(-max(query.shape[3], d_v) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    query, key, value = (
        (states if states.shape[3] == width else nn.functional.pad(states, (0, width - states.shape[3])))
        for states in (query, key, value)
    )
    query, key, value = (
        states if states.stride(1) % alignment == 0 else states.contiguous() for states in (query, key, value)
    )
    sequences = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, dropout)
    if varlen_kernel(query.device, query.dtype) == FLASH and width <= FLASH_WIDTH:
        # strided: rows of one product hold queries, keys and values. Views, whose gradients are views: no index.
        states = (query.squeeze(0), key.squeeze(0), value.squeeze(0))
        output = getattr(torch.ops.aten, FLASH)(*states, *sequences, module.is_causal, False, scale=scaling)[0][None]
    else:
        options = (int(module.is_causal), torch.is_grad_enabled())  # gradients need the log-sum-exp of each query
        output = getattr(torch.ops.aten, EFFICIENT)(query, key, value, None, *sequences, *options, scale=scaling)[0]
    return output if output.shape[3] == d_v else output[..., :d_v]


def attend_sequences(
    attention: Any, projected: Iterable[Tensor], queries: Sequences, keys: Sequences, **kwargs: Any
) -> Tensor:
    """Attend from sequences to sequences on a GPU.

    Args:
        attention (`MultiHeadAttention`): The attention.
        projected (`Iterable[torch.Tensor]`): Queries, keys and values of shape `(1, length, heads * width)`.
        queries (`Sequences`): Where the sequences of queries lie.
        keys (`Sequences`): Where those of keys and values lie.
        **kwargs: Passed on to the kernel.

    Returns:
        `torch.Tensor` of shape `(1, length, heads * d_v)`: the heads' outputs.
    """
    implementation = attention.config._attn_implementation
    options = {"dropout": attention_dropout_rate(attention), "scaling": attention.scaling}
    options |= {**kwargs, **kernel_arguments(queries, keys)}
    if is_flash(implementation):
        kernel: Callable = ALL_ATTENTION_FUNCTIONS[implementation]
        output = kernel(attention, *map(attention.split_heads, projected), None, **options)[0]
    else:
        heads = (states.unflatten(-1, (attention.heads, -1)) for states in projected)
        output = varlen_attention(attention, *heads, **options)
    return output.flatten(2)


def unpad_source(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Drop the padding of a source for flash attention, and give the lengths of targets and sources apart.

    Given the mask, transformers drops queries by it too, which is right in self-attention alone.

    Args:
        query (`torch.Tensor` of shape `(batch, heads, query_len, d_k)`): Queries of the target.
        key (`torch.Tensor` of shape `(batch, heads, key_len, d_k)`): Keys of the source.
        value (`torch.Tensor` of shape `(batch, heads, key_len, d_v)`): Values of the source.
        mask (`torch.Tensor` of shape `(batch, src_len)`): Not 0 for tokens of the source, 0 for padding.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, dict[str, Any]]`: keys and values of shape `(1, heads, tokens, ...)`, and
        the arguments by which transformers' flash attention knows the lengths.
    """
    batch, _, query_len, _ = query.shape
    src_len = mask.shape[1]  # a static cache is longer
    key, value = (states[:, :, :src_len].transpose(1, 2)[mask != 0].transpose(0, 1)[None] for states in (key, value))
    queries = Sequences.of_rows(batch, query_len, query.device)
    return key, value, kernel_arguments(queries, Sequences.of_lengths((mask != 0).sum(1), src_len))
