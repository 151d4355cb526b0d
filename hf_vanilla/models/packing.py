"""Which tokens the layers see: the tokens of a padded batch alone, and of the last layer those that a head reads.

      rows (batch, length)      tokens (1, tokens)         buckets, for attention
        a a a a                                              a a a a      c .
        b b b .          ->     a a a a b b b c      ->      b b b .
        c . . .

Everything that works on each token by itself (projections, norms, feed-forward networks, dropout) runs on tokens.
Attention runs on a CPU on rows of like length, padded to the longest of their bucket; on a GPU on the tokens, by a
kernel that is given the offsets of the sequences:

    tokens    a a a a b b b c        offsets    0 4 7 8        max_length    4

To self-attention, a `Packing` is its mask; to cross-attention, a `CrossPacking`: they say which tokens see each other.
They are planned once for each batch; a batch without padding gets none. A layer or attention takes one if its own
class declares `accepts_packing`: a subclass with a `forward` of its own has to declare it again.

A GPU has to be waited for to know how many tokens a mask has. In training all masks of a step are counted at once, or
by the collator ([`host_sizes`]): then nothing waits.

Packing is a fast path; everything has the same value without it. It is off with a cache, and where results would
differ visibly: if a layer is hooked, traced or replaced, the whole model is compiled, or outputs of single layers are
requested. Where layers are compiled one by one, there is a single bucket, as every number of them would be compiled
anew, and batches without padding are packed too.

In this file: attention over sequences on a GPU; the layout of packed tokens; sizes of masks; what heads read;
positions and planning; running the layers.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    packed_sequence_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import logging
from transformers.utils.output_capturing import capture_outputs

from .cache_names import CACHE_NAME
from .checks import check_shape, has_label, hides_values
from .dropout import attention_dropout_rate


logger = logging.get_logger(__name__)


# From this share of padding on, working on tokens alone is faster, moving them included.
MIN_PADDING_SHARE = 0.05
# Up to this share of tokens that a head reads, computing the last layer for them alone is faster.
MAX_OUTPUT_SHARE = 0.75
# The attention kernels that take rows of a packing, on a CPU.
PACKED_KERNELS = ("eager", "sdpa")
# One bucket per 64 positions of the longest row, at most 8.
BUCKET_LENGTH = 64
MAX_BUCKETS = 8
# Where hooks are from that see no difference: transformers' recording, and FSDP2, which gathers a layer's parameters.
HARMLESS_HOOK_MODULES = (capture_outputs.__module__, "torch.distributed.fsdp")
# Devices with kernels for sequences of varying lengths; "meta" has their shapes alone.
VARLEN_DEVICES = ("cuda", "meta")
# Compiled layers are compiled again for another bound of the lengths: one of these, or a multiple of the last.
LENGTH_BOUNDS = (64, 128, 256, 512)
# Flash attention is for these types, on GPUs of compute capability 8 (A100) or more, and for heads up to this width.
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_CAPABILITY, FLASH_WIDTH = 8, 256
# What every head is padded to a multiple of, so that both kernels can read 16 bytes at a time.
WIDTH_MULTIPLE = 8
FLASH, EFFICIENT = "_flash_attention_forward", "_efficient_attention_forward"
# Their arguments in order, the last by name.
KERNEL_ARGUMENTS = {
    FLASH: "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale",
    EFFICIENT: "query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p custom_mask_type "
    "compute_log_sumexp scale",
}


# Attention over sequences on a GPU


def gather_tokens(hidden_states: Tensor, tokens: Tensor | None) -> Tensor:
    """Gather tokens of a batch.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): All of them.
        tokens (`torch.LongTensor` of shape `(tokens,)`, *optional*): Their indices in `(batch * length)`; all by
            default.

    Returns:
        `torch.Tensor` of shape `(1, tokens, d_model)`: the tokens, or `hidden_states` itself by default.
    """
    return hidden_states if tokens is None else hidden_states.flatten(0, 1)[None].index_select(1, tokens)


class Sequences(NamedTuple):
    """Where sequences lie that follow each other without padding.

    Attributes:
        offsets: First token of each, and the number of tokens, in int32, of shape `(sequences + 1,)`.
        max_length: At least the length of the longest, on the host.
    """

    offsets: Tensor
    max_length: int

    @classmethod
    def of_lengths(cls, lengths: Tensor, max_length: int) -> "Sequences":
        """Build those of these lengths, of shape `(sequences,)`."""
        return cls(nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), max_length)

    @classmethod
    def of_rows(cls, rows: int, length: int, device: torch.device) -> "Sequences":
        """Build those of rows without padding."""
        return cls(length * torch.arange(rows + 1, dtype=torch.int32, device=device), length)


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
    if device.type not in VARLEN_DEVICES or torch.version.hip is not None:
        return None
    is_recent = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= FLASH_CAPABILITY
    if is_recent and (dtype in FLASH_DTYPES or device.type == "meta") and has_operator(FLASH):
        return FLASH
    is_known = dtype in (torch.float32, torch.float16) or (dtype == torch.bfloat16 and is_recent)
    return EFFICIENT if is_known and has_operator(EFFICIENT) else None


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float,
    scaling: float,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from each sequence of queries to the sequence of keys of the same number, as a kernel of transformers.

    Args:
        module (`nn.Module`): The attention; with `is_causal`, queries and keys are of equal lengths.
        query (`torch.Tensor` of shape `(1, heads, query_len, d_k)`): Queries of a type that [`varlen_kernel`] knows.
        key (`torch.Tensor` of shape `(1, heads, key_len, d_k)`): Keys.
        value (`torch.Tensor` of shape `(1, heads, key_len, d_v)`): Values.
        attention_mask (`None`): The sequences are the mask.
        dropout (`float`): Probability that a weight is dropped.
        scaling (`float`): What scores are multiplied with.
        cu_seq_lens_q (`torch.Tensor` of shape `(sequences + 1,)`): Offsets of the sequences of queries, in int32.
        cu_seq_lens_k (`torch.Tensor` of shape `(sequences + 1,)`): Offsets of the sequences of keys, in int32.
        max_length_q (`int`): At least the most queries of a sequence.
        max_length_k (`int`): At least the most keys of a sequence.
        **kwargs: Not used.

    Returns:
        `tuple[torch.Tensor, None]`: the heads' outputs of shape `(1, query_len, heads, d_v)`, and no weights.

    Source: Vaswani et al. 2017, 3.2.1; Dao 2023, FlashAttention-2; Rabe & Staats 2021.
    """
    d_v = value.shape[3]
    width = -(-max(query.shape[3], d_v) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    query, key, value = (
        (states if states.shape[3] == width else nn.functional.pad(states, (0, width - states.shape[3])))
        for states in (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    )
    sequences = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, dropout)
    if varlen_kernel(query.device, query.dtype) == FLASH and width <= FLASH_WIDTH:
        states = (query[0], key[0], value[0])  # strided: rows of one product hold queries, keys and values
        output = getattr(torch.ops.aten, FLASH)(*states, *sequences, module.is_causal, False, scale=scaling)[0][None]
    else:
        options = (int(module.is_causal), torch.is_grad_enabled())  # gradients need the log-sum-exp of each query
        output = getattr(torch.ops.aten, EFFICIENT)(query, key, value, None, *sequences, *options, scale=scaling)[0]
    return output[..., :d_v], None


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
    kernel: Callable = varlen_attention
    if is_flash(implementation):
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, varlen_attention)
    options = {"dropout": attention_dropout_rate(attention), "scaling": attention.scaling}
    options |= {**kwargs, **kernel_arguments(queries, keys)}
    return kernel(attention, *map(attention.split_heads, projected), None, **options)[0].flatten(2)


# The layout of packed tokens


class Packing(NamedTuple):
    """The tokens of padded rows without their padding: of a batch, or of one of its buckets of rows of like length.

    Layers take that of a batch in place of an attention mask, and attention computes bucket after bucket.

    Attributes:
        rows: Number of rows, padded to one length.
        length: This length.
        positions: Indices of the tokens in `(rows * length)`, bucket after bucket, of shape `(tokens,)`; `None` if
            every position is one.
        buckets: Of a batch on a CPU, its rows by length, each bucket padded to its longest, for attention.
        sequences: Of a batch on a GPU, where the tokens of each row lie, for attention.
        outputs: Indices of the tokens whose output is computed, of shape `(outputs,)`; `None` for all. All are
            attended to.
        attention_mask: Of a bucket, the mask that the attention kernel gets, true for tokens, of shape `(rows, 1, 1,
            length)`; `None` if every position is a token. Of an unpacked batch, what transformers' mask helpers make.
    """

    rows: int
    length: int
    positions: Tensor | None
    buckets: tuple["Packing", ...] = ()
    outputs: Tensor | None = None
    attention_mask: Any = None
    sequences: Sequences | None = None

    @classmethod
    def of_lengths(cls, lengths: Tensor) -> "Packing":
        """Build the bucket of rows of these lengths, of shape `(rows,)`, each with its tokens first."""
        rows, length = lengths.shape[0], int(lengths.max())
        if bool((lengths == length).all()):
            return cls(rows, length, None)
        is_token = torch.arange(length, device=lengths.device) < lengths[:, None]  # (rows, length)
        return cls(rows, length, is_token.flatten().nonzero()[:, 0], attention_mask=is_token[:, None, None])

    @classmethod
    def of_rows(cls, states: Tensor, is_compiled: bool) -> "Packing":
        """Describe rows without padding, of shape `(rows, length, width)`, on a GPU, for layers compiled or not."""
        rows, length = states.shape[:2]
        packing = cls(rows, length, None, sequences=Sequences.of_rows(rows, length, states.device))
        return _for_compiled_layers(packing) if is_compiled else packing

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.rows * self.length if self.positions is None else self.positions.shape[0]

    def pack(self, rows: Tensor) -> Tensor:
        """Gather the tokens `(1, tokens, width)` of rows `(rows, length, width)`."""
        return rows.flatten(0, 1)[None] if self.positions is None else gather_tokens(rows, self.positions)

    def unpack(self, tokens: Tensor) -> Tensor:
        """Put tokens or outputs `(1, tokens, width)` back to `(rows, length, width)`, zero elsewhere."""
        positions = self.positions
        if self.outputs is not None:
            positions = self.outputs if positions is None else positions[self.outputs]
        if positions is not None:
            cells = tokens.new_zeros(self.rows * self.length, tokens.shape[2])
            # the layers of a model on several GPUs end on another one
            tokens = cells.index_copy_(0, positions.to(tokens.device), tokens.squeeze(0))
        return tokens.view(self.rows, self.length, -1)

    def attend(
        self, attention: Any, attend_rows: Callable[..., tuple[Tensor, Any]], tokens: Tensor, **kwargs: Any
    ) -> Tensor:
        """Apply self-attention: on a GPU to all sequences at once, on a CPU to each bucket's rows.

        Args:
            attention (`SelfAttention`): The attention; if it is causal, padding at the end of a row is masked anyway.
            attend_rows (`Callable`): From rows `(rows, length, width)` and a mask to outputs of the same rows.
            tokens (`torch.Tensor` of shape `(1, tokens, width)`): Queries, keys and values of the tokens.
            **kwargs: Passed on to the kernel.

        Returns:
            `torch.Tensor` of shape `(1, tokens or outputs, width)`: the outputs.
        """
        if self.sequences is not None:
            projected = tokens.split(attention.qkv_sizes, dim=-1)
            return gather_tokens(
                attend_sequences(attention, projected, self.sequences, self.sequences, **kwargs), self.outputs
            )
        outputs = []
        parts = tokens.split([bucket.tokens for bucket in self.buckets], dim=1)
        for bucket, part in zip(self.buckets, parts, strict=True):
            mask = None if attention.is_causal and bucket.positions is not None else bucket.attention_mask
            outputs.append(bucket.pack(attend_rows(bucket.unpack(part), mask, **kwargs)[0]))
        return gather_tokens(torch.cat(outputs, dim=1), self.outputs)


class CrossPacking(NamedTuple):
    """How the tokens of a target and those of its source lie, for cross-attention. It takes the place of a mask.

    Attributes:
        target: Packing of the target, if it is packed.
        source: Packing of the source, if it is packed.
        attention_mask: The mask over the source in rows.
        sequences: On a GPU, the sequences of both if either is packed.
    """

    target: Packing | None
    source: Packing | None
    attention_mask: Any
    sequences: tuple[Any, ...] = ()

    def attend(self, attention: Any, attend_rows: Callable, target: Tensor, source: Tensor, **kwargs: Any) -> Tensor:
        """Apply cross-attention: on a GPU to all sequences at once, on a CPU to rows.

        Args:
            attention (`CrossAttention`): The attention.
            attend_rows (`Callable`): From rows of queries, heads of keys and values, and a mask to outputs in rows.
            target (`torch.Tensor` of shape `(batch, length, d_model)`): The target, as tokens of one row or as rows.
            source (`torch.Tensor` of shape `(batch, length, d_model)`): The source, the same.
            **kwargs: Passed on to the kernel.

        Returns:
            `torch.Tensor` of shape `(batch, length, heads * d_v)`: the outputs, as the target lies.
        """
        query, keys_and_values = attention.q_proj(target), attention.kv_proj(source)
        if self.sequences:
            projected = (query.flatten(0, 1)[None], *keys_and_values.split(attention.kv_sizes, dim=-1))
            return attend_sequences(attention, projected, *self.sequences, **kwargs).view(*target.shape[:2], -1)
        rows = to_rows(keys_and_values, self.source).split(attention.kv_sizes, dim=-1)
        heads = map(attention.split_heads, rows)  # (batch, heads, key_len, ...) of keys and of values
        output, _ = attend_rows(to_rows(query, self.target), *heads, self.attention_mask, **kwargs)
        return to_tokens(output, self.target)


# Which positions see each other: what transformers' mask helpers make, of any kind, or a `Packing`.
Mask = Any


def to_rows(tokens: Tensor, packing: Packing | None) -> Tensor:
    """Unpack tokens `(1, tokens, width)` to rows `(batch, length, width)`; without a packing they are rows already."""
    return tokens if packing is None else packing.unpack(tokens)


def to_tokens(rows: Tensor, packing: Packing | None) -> Tensor:
    """Pack rows `(batch, length, width)` to tokens `(1, tokens, width)` if there is a packing."""
    return rows if packing is None else packing.pack(rows)


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


def gather_outputs(hidden_states: Tensor, attention_mask: Mask) -> Tensor:
    """Keep the tokens whose output a layer computes: all of them, unless its mask is a `Packing` that names some.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): The input of the layer.
        attention_mask (`Mask`, *optional*): Its mask.

    Returns:
        `torch.Tensor` of shape `(1, outputs, d_model)`, or `hidden_states`.
    """
    return gather_tokens(hidden_states, attention_mask.outputs if isinstance(attention_mask, Packing) else None)


# Sizes of masks


class MaskSizes(NamedTuple):
    """What the host needs to know of a mask of shape `(batch, length)`.

    Attributes:
        total: Number of positions that are marked.
        longest: Largest number in one row.
        shortest: Smallest number in one row.
        firsts: Number of rows whose first position is marked.
    """

    total: int
    longest: int
    shortest: int
    firsts: int


# Of the masks of a training step, by name.
Sizes = Mapping[str, MaskSizes]


def count_masks(*masks: Tensor) -> list[MaskSizes]:
    """Count the marked positions of masks. A GPU is waited for once.

    Args:
        *masks (`torch.BoolTensor` of shape `(batch, length)`): Masks on one device.

    Returns:
        `list[MaskSizes]`: the sizes of each.
    """
    rows = [mask.sum(1) for mask in masks]
    counts = [
        torch.stack((row.sum(), row.max(), row.min(), mask[:, :1].sum()))
        for row, mask in zip(rows, masks, strict=True)
    ]
    return [MaskSizes(*sizes) for sizes in torch.stack(counts).tolist()]


def host_sizes(attention_mask: Tensor | None, labels: Tensor | None) -> dict[str, MaskSizes]:
    """Count all that a training step needs to know on the host: in a collator, or on a GPU with one wait.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding.
        labels (`torch.Tensor` of shape `(batch, length)`, *optional*): Labels; -100 where there is none.

    Returns:
        `dict[str, MaskSizes]`: the sizes of `attention_mask`, and of the positions with a label (`labels`), of those
        that a causal layer computes for them (`needed`), of those before one (`next_labels`) and of padding with one
        (`padding_labels`).
    """
    masks = {}
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        device = attention_mask.device if labels is None else labels.device
        masks["attention_mask"] = is_token = attention_mask.to(device) != 0
    if labels is not None and labels.dim() == 2:
        masks["labels"] = labelled = has_label(labels)
        masks["needed"] = up_to_last(labelled)
        if attention_mask is None:
            masks["next_labels"] = labelled[:, 1:]
        elif "attention_mask" in masks and is_token.shape == labels.shape:
            masks["next_labels"] = labelled[:, 1:] & is_token[:, :-1]
            masks["padding_labels"] = labelled & ~is_token
    if any(0 in mask.shape for mask in masks.values()):
        return {}
    return dict(zip(masks, count_masks(*masks.values()), strict=True)) if masks else {}


def step_sizes(arguments: Any, attention_mask: Tensor | None, labels: Tensor | None) -> tuple[Sizes, Any]:
    """Find the sizes of a step's masks: those of the collator, or on a GPU counted here.

    Args:
        arguments (`dict[str, Any]`): The keyword arguments of `forward`, with `mask_sizes` if the collator counted.
        attention_mask (`torch.Tensor`, *optional*): As in [`host_sizes`].
        labels (`torch.Tensor`, *optional*): As in [`host_sizes`].

    Returns:
        `tuple[Mapping[str, MaskSizes], dict[str, Any]]`: the sizes by name, none where nothing is waited for, as on a
        CPU; and the arguments with these `mask_sizes`.
    """
    sizes = arguments.get("mask_sizes")
    if sizes is None and labels is not None and labels.device.type in VARLEN_DEVICES and _can_read(labels):
        sizes = host_sizes(attention_mask, labels)
    if not sizes:
        return {}, arguments
    sizes = {name: MaskSizes(*each) for name, each in sizes.items()}  # collators give plain tuples, which loaders keep
    return sizes, {**arguments, "mask_sizes": sizes}


def up_to_last(is_read: Tensor) -> Tensor:
    """Mark the positions up to the last that is marked, which is what a causal layer has to compute.

    Args:
        is_read (`torch.BoolTensor` of shape `(batch, length)`): The positions that are read.

    Returns:
        `torch.BoolTensor` of the same shape.
    """
    return is_read.flip(1).cummax(1).values.flip(1)


def _can_read(tensor: Tensor) -> bool:
    """Whether code may depend on the values of a tensor, on a GPU by waiting for it."""
    return not hides_values() and tensor.device.type != "meta"


# What heads read


class Reads(NamedTuple):
    """What a head reads of an encoder, in place of `read_positions` alone.

    Attributes:
        positions: Not 0 where the output is read, of shape `(batch, length)`; `None` for everywhere.
        total: Number of these positions, none of which is padding that is left out; `None` if it is not known.
        firsts: How many of them are the first of their row.
    """

    positions: Tensor | None
    total: int | None = None
    firsts: int = 0


# What a head that reads padding too asks of an encoder.
WITH_PADDING: dict[str, Any] = {"keep_padding": True}


def read_first(inputs: Tensor | None, *_: Any) -> dict[str, Any]:
    """Name what a head on top of the pooler reads of an encoder: each row's first position.

    Args:
        inputs (`torch.Tensor` of shape `(batch, length)` or `(batch, length, d_model)`, *optional*): Ids or
            embeddings.

    Returns:
        `dict[str, Any]`: arguments of the encoder.
    """
    if inputs is None or inputs.dim() < 2:
        return {}
    is_read = torch.zeros(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    is_read[:, :1] = True
    return {"read_positions": Reads(is_read, inputs.shape[0], inputs.shape[0])}


def read_all(
    inputs: Any, attention_mask: Tensor | None, labels: Tensor | None, training: bool, sizes: Sizes
) -> dict[str, Any]:
    """Name what a head for all tokens reads of an encoder: in training padding only where it has a label.

    Args:
        inputs (`Any`): Not used.
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding.
        labels (`torch.Tensor` of shape `(batch, length)`, *optional*): Labels; -100 where there is none.
        training (`bool`): Whether the model is in training mode.
        sizes (`Mapping[str, MaskSizes]`): What [`step_sizes`] returns.

    Returns:
        `dict[str, Any]`: arguments of the encoder. Padding is computed, too, where checking would synchronize: in
        compiled or transformed code, and off the CPU without sizes.
    """
    if labels is None or not training or hides_values():
        return WITH_PADDING
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != labels.shape:
        return {}
    if "padding_labels" in sizes:
        return WITH_PADDING if sizes["padding_labels"].total else {}
    if attention_mask.device.type == "cpu" and not (has_label(labels) & (attention_mask == 0).to(labels.device)).any():
        return {}
    return WITH_PADDING


def read_labelled(
    inputs: Tensor | None, attention_mask: Tensor | None, labels: Tensor | None, training: bool, sizes: Sizes
) -> dict[str, Any]:
    """Name what a head for labelled tokens reads of an encoder: in training these, otherwise all, padding included.

    Args:
        inputs (`torch.Tensor`, *optional*): As in [`labelled_positions`].
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding.
        labels (`torch.Tensor` of shape `(batch, length)`, *optional*): Labels; -100 where there is none.
        training (`bool`): Whether the model is in training mode.
        sizes (`Mapping[str, MaskSizes]`): What [`step_sizes`] returns.

    Returns:
        `dict[str, Any]`: arguments of the encoder.
    """
    read = labelled_positions(inputs, labels, training)
    reads, kept = Reads(read), read_all(inputs, attention_mask, labels, training, sizes)
    if "labels" in sizes and not kept:  # otherwise labels at padding may be among them
        reads = Reads(read, sizes["labels"].total, sizes["labels"].firsts)
    return {"read_positions": reads, **kept}


def labelled_positions(inputs: Tensor | None, labels: Tensor | None, training: bool) -> Tensor | None:
    """Mark the positions that a head for labelled tokens reads in training.

    Args:
        inputs (`torch.Tensor` of shape `(batch, length)` or `(batch, length, d_model)`, *optional*): Ids or
            embeddings.
        labels (`torch.Tensor` of shape `(batch, length)`, *optional*): Labels; -100 where there is none.
        training (`bool`): Whether the model is in training mode; otherwise the head reads all positions.

    Returns:
        `torch.BoolTensor` of shape `(batch, length)`; `None` for all positions.
    """
    if labels is None or inputs is None or not training or labels.shape != inputs.shape[:2]:
        return None
    return has_label(labels)


# Positions and planning


def positions_of(
    attention_mask: Tensor | None, length: int, past_length: int | Tensor, device: torch.device
) -> Tensor:
    """Number the tokens of each row from 0, whichever side its padding is on.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch, past_length + length)`, *optional*): Not 0 for tokens, 0 for
            padding.
        length (`int`): Number of positions wanted: the last ones.
        past_length (`int` or `torch.Tensor`): Number of positions before these; of a static cache, a tensor.
        device (`torch.device`): Device of the result.

    Returns:
        `torch.Tensor` of shape `(batch, length)`, or `(1, length)` without a mask: the positions. Padding has any
        valid position.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return torch.arange(length, device=device)[None] + past_length
    is_token = attention_mask != 0  # as transformers reads masks of any type
    return (is_token.long().cumsum(-1) - 1).clamp(min=0)[:, attention_mask.shape[1] - length :]


def flattened_rows(
    position_ids: Tensor | None, offsets: Tensor | None, length: int, from_zero: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Find positions and sequences where a row may hold several, as of transformers' `DataCollatorWithFlattening`.

    Args:
        position_ids (`torch.LongTensor` of shape `(batch or 1, length)`, *optional*): Positions given by the caller. A
            sequence begins wherever one is not the one before plus 1.
        offsets (`torch.Tensor` of shape `(sequences + 1,)`, *optional*): Where the sequences of one row begin instead,
            as transformers' `cu_seq_lens_q`; checked.
        length (`int`): Length of the rows.
        from_zero (`bool`, defaults to `False`): Whether every sequence has to begin at position 0; if one does not,
            the row is one sequence.

    Returns:
        `tuple[torch.LongTensor | None, torch.LongTensor | None]`: the positions, by default counted from the offsets;
        and for each position the number of its sequence in the row, both of shape `(batch or 1, length)`.
    """
    if offsets is not None:
        cells = torch.arange(length, device=offsets.device)
        numbers = torch.searchsorted(offsets[1:].contiguous(), cells, right=True)
        return ((cells - offsets.long()[numbers])[None] if position_ids is None else position_ids), numbers[None]
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.numel() == 0:
        return position_ids, None  # what is no position is refused elsewhere
    begins = nn.functional.pad((position_ids.diff() != 1).long(), (1, 0))
    if from_zero:
        begins = begins * ((begins == 0) | (position_ids == 0)).all()
    return position_ids, begins.cumsum(1)


def holds_several(sequence_ids: Tensor | None) -> bool:
    """Return whether a row is known to hold several sequences. A GPU is waited for.

    Args:
        sequence_ids (`torch.LongTensor` of shape `(batch or 1, length)`, *optional*): What [`flattened_rows`] returns.

    Returns:
        `bool`: whether one does; false in code that may not read values.
    """
    if sequence_ids is None or sequence_ids.numel() == 0 or not _can_read(sequence_ids):
        return False
    return bool((sequence_ids[:, -1] != sequence_ids[:, 0]).any())


def find_sequences(sequence_ids: Tensor, batch: int, arguments: Mapping[str, Any]) -> Sequences | None:
    """Find where the sequences of a batch lie. Without transformers' arguments, a GPU is waited for.

    Args:
        sequence_ids (`torch.LongTensor` of shape `(batch or 1, length)`): The number of each position's sequence.
        batch (`int`): Number of rows.
        arguments (`Mapping[str, Any]`): The arguments of `forward`, with `cu_seq_lens_q` and `max_length_q` or not.

    Returns:
        `Sequences`: those of the two arguments if both are given; otherwise those found, `None` if each row is one.
    """
    offsets, longest = (arguments.get(name) for name in ("cu_seq_lens_q", "max_length_q"))
    if offsets is not None and isinstance(longest, int):
        return Sequences(offsets.int(), longest)
    begins = nn.functional.pad(sequence_ids.diff() != 0, (1, 0), value=True).expand(batch, -1).flatten()
    cells = torch.arange(begins.numel(), device=begins.device)
    numbers = cells - torch.where(begins, cells, 0).cummax(0).values  # in each sequence
    count, last = torch.stack((begins.sum(), numbers.max())).tolist()
    starts = begins.nonzero_static(size=count)[:, 0]
    offsets = nn.functional.pad(starts, (0, 1), value=begins.numel())
    return None if count == batch else Sequences(offsets.int(), last + 1)


def plan_packing(
    model: PreTrainedModel,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    *,
    outputs: Tensor | None = None,
    reads_first: bool = False,
    max_buckets: int = 1,
    sequences: Sequences | None = None,
    sizes: MaskSizes | None = None,
    output_count: int | None = None,
    **kwargs: Any,
) -> Packing | None:
    """Find the tokens that a model's layers have to work on, if leaving out the others pays.

    Args:
        model (`PreTrainedModel`): The model, with `layers`.
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): What the layers are given.
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding
            anywhere. Other masks are not packed.
        outputs (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 where the last layer's output is read;
            everywhere by default.
        reads_first (`bool`, defaults to `False`): Whether each row's first position is read. If one is padding,
            padding is not left out.
        max_buckets (`int`, defaults to 1): Into how many buckets the rows may be sorted by length. With one bucket
            they keep their order.
        sequences (`Sequences`, *optional*): Of rows without a mask that hold several sequences, where these lie.
        sizes (`MaskSizes`, *optional*): The sizes of `attention_mask`; counted by default.
        output_count (`int`, *optional*): Number of tokens among `outputs`; counted by default.
        **kwargs: The arguments of `forward`: with `output_attentions` or `output_hidden_states` nothing is left out.

    Returns:
        `Packing`, or `None` where all positions are computed.
    """
    layers: Any = model.layers
    device, is_varlen = hidden_states.device, runs_varlen(model, hidden_states)
    if not _can_skip_positions(model, kwargs) or not (is_varlen or device.type == "cpu"):
        return None
    batch, length = hidden_states.shape[:2]
    takes_tokens = is_varlen or model.config._attn_implementation in PACKED_KERNELS
    # compiled layers always get tokens, or they would be compiled again for rows
    is_compiled = (attention_mask is not None or sequences is not None) and _has_compiled_layers(model)
    min_padding = 0 if is_compiled else 1 if is_varlen else MIN_PADDING_SHARE * batch * length
    sizes = _worth_packing(attention_mask, reads_first, sizes, min_padding) if takes_tokens else None
    if attention_mask is not None or not takes_tokens:
        sequences = None
    has_outputs = outputs is not None and (output_count is not None or _can_read(outputs)) and len(layers) > 0
    if (sizes is None and sequences is None and not has_outputs) or not all(map(_accepts_packing, layers)):
        return None
    packing = Packing(batch, length, None)
    if attention_mask is not None and sizes is not None:
        is_token = (attention_mask != 0).to(device)
        sequences = Sequences.of_lengths(is_token.sum(1), sizes.longest)
        packing = packing._replace(positions=is_token.flatten().nonzero_static(size=sizes.total)[:, 0])
    elif sequences is not None:
        packing = packing._replace(positions=torch.arange(batch * length, device=device))
    if sequences is not None:
        number = 1 if is_compiled else min(max_buckets, sequences.max_length // BUCKET_LENGTH)
        packing = packing._replace(sequences=sequences) if is_varlen else _in_buckets(packing, sequences, number)
    if outputs is not None and has_outputs and not has_hooks(model):
        is_read = (outputs.flatten() != 0).to(device)
        is_read = is_read if packing.positions is None else is_read[packing.positions]
        count = int(is_read.sum()) if output_count is None else output_count
        if 0 < count <= MAX_OUTPUT_SHARE * is_read.shape[0]:
            packing = packing._replace(outputs=is_read.nonzero_static(size=count)[:, 0])
    if packing.positions is None and packing.outputs is None:
        return None
    return _for_compiled_layers(packing) if is_compiled and is_varlen else packing


def _rows_for_compiled_layers(model: PreTrainedModel, hidden_states: Tensor) -> Sequences | None:
    """Take rows for sequences where compiled layers get those of other batches, or they would be compiled again."""
    if not (runs_varlen(model, hidden_states) and _has_compiled_layers(model)):  # the first is false on a CPU at once
        return None
    rows, length, _ = hidden_states.shape
    return Sequences.of_rows(rows, length, hidden_states.device)


def _for_compiled_layers(packing: Packing) -> Packing:
    """Have layers that are compiled one by one take any number of tokens, and few bounds of lengths."""
    if packing.sequences is not None:
        offsets, longest = packing.sequences
        bounds = (each for each in LENGTH_BOUNDS if each >= longest)
        longest = next(bounds, -(-longest // LENGTH_BOUNDS[-1]) * LENGTH_BOUNDS[-1])
        maybe_mark_dynamic(offsets, 0)
        packing = packing._replace(sequences=Sequences(offsets, longest))
    if packing.outputs is not None:
        maybe_mark_dynamic(packing.outputs, 0)
    return packing


def _in_buckets(packing: Packing, sequences: Sequences, num_buckets: int) -> Packing:
    """Sort the sequences of tokens into buckets of like lengths."""
    tokens: Any = packing.positions
    lengths = sequences.offsets.diff().long()
    if num_buckets <= 1:
        return packing._replace(buckets=(Packing.of_lengths(lengths),))
    rows = tokens.split(lengths.tolist())
    lengths, order = lengths.sort()
    tokens = torch.cat([rows[number] for number in order.tolist()])
    parts = [part for part in lengths.tensor_split(num_buckets) if part.numel()]
    return packing._replace(positions=tokens, buckets=tuple(map(Packing.of_lengths, parts)))


def _worth_packing(mask: Any, reads_first: bool, sizes: MaskSizes | None, min_padding: float) -> MaskSizes | None:
    """Return the sizes of a mask (batch, length) if there is enough padding, and a token in each row."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.numel() == 0 or (sizes is None and not _can_read(mask)):
        return None
    sizes = sizes or count_masks(mask != 0)[0]
    if (reads_first and sizes.firsts < len(mask)) or sizes.shortest == 0:
        return None
    return sizes if mask.numel() - sizes.total >= min_padding else None


def runs_varlen(model: PreTrainedModel, hidden_states: Tensor) -> bool:
    """Whether attention of packed tokens runs by a kernel for GPUs.

    Args:
        model (`PreTrainedModel`): The model.
        hidden_states (`torch.Tensor`): What its layers are given.

    Returns:
        `bool`: the answer.
    """
    device, dtype = hidden_states.device, hidden_states.dtype
    if device.type not in VARLEN_DEVICES or is_flash(model.config._attn_implementation):
        return device.type in VARLEN_DEVICES
    if device.type != "meta" and torch.is_autocast_enabled(device.type):  # meta has no autocast
        dtype = torch.get_autocast_dtype(device.type)
    kernel = varlen_kernel(device, dtype) if model.config._attn_implementation == "sdpa" else None
    # compiled layers can't have the gradient of the other kernel, which is also that of wide heads
    return kernel is not None and (not _has_compiled_layers(model) or (kernel == FLASH and _has_narrow_heads(model)))


def _has_narrow_heads(model: PreTrainedModel) -> bool:
    """Whether the heads of all attentions are within flash attention's width."""
    layers: Any = model.layers
    widths = [getattr(each, name, 0) for each in layers.modules() for name in ("d_k", "d_v")]
    return max(widths, default=0) <= FLASH_WIDTH


def is_flash(implementation: str) -> bool:
    """Whether an attention implementation is transformers' interface to a flash attention package."""
    return "flash" in implementation and "paged" not in implementation


def _can_skip_positions(model: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    """Whether positions may be left out: by plain code, without outputs of single layers."""
    if hides_values() or torch.jit.is_tracing():
        return False
    if kwargs.get("is_causal") is not None or kwargs.get("past_key_values") is not None:
        return False  # a packing knows the causality that layers declare, and no positions before it
    names = ("output_attentions", "output_hidden_states")
    return not any(kwargs.get(name, getattr(model.config, name)) for name in names)


def _accepts_packing(layer: nn.Module) -> bool:
    """Whether the class of a layer's `forward`, and of each attention's, declares so, and nothing in it is hooked."""
    layer = getattr(layer, "_orig_mod", layer)
    attentions = [child for name, child in layer.named_children() if name.endswith("_attn")]
    for module in (layer, *attentions):
        # without the class that FSDP2 adds
        classes = (each for each in type(module).__mro__ if not each.__module__.startswith(HARMLESS_HOOK_MODULES))
        if "accepts_packing" not in vars(next(each for each in classes if "forward" in vars(each))):
            return False
    return not any(map(has_hooks, layer.modules()))


def _has_compiled_layers(model: PreTrainedModel) -> bool:
    """Whether a layer, or a part of one, is compiled by itself."""
    layers: Any = model.layers
    return any(each._compiled_call_impl is not None or hasattr(each, "_orig_mod") for each in layers.modules())


def has_hooks(module: nn.Module) -> bool:
    """Tell whether a module is patched, or has hooks other than those of recording, sharding and offloading.

    Args:
        module (`nn.Module`): The module.

    Returns:
        `bool`: whether.
    """
    is_placed = hasattr(module, "_hf_hook") or hasattr(module, "_is_hooked")  # by accelerate or tensor parallelism
    if "forward" in vars(module) and not is_placed:
        return True
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(not hook.__module__.startswith(HARMLESS_HOOK_MODULES) for each in hooks for hook in each.values())


# Running the layers


def run_layers(
    model: PreTrainedModel,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    create_mask: Callable[..., Any],
    *source: Any,
    packing: Packing | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run a model's layers, and its final norm if it has one, on all positions or on those of a packing.

    Args:
        model (`PreTrainedModel`): The model, with `layers` and, after pre-norm layers, `norm`.
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): The embeddings.
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding.
        create_mask (`Callable`): transformers' helper that makes the layers' mask: causal or bidirectional.
        *source: What a decoder's layers take of the source, after the mask.
        packing (`Packing`, *optional*): What `plan_packing` found.
        **kwargs: Passed on to the layers.

    Returns:
        `torch.Tensor` of shape `(batch, length, d_model)`: the output, zero where it was not computed.
    """
    kernel = model.config._attn_implementation
    # taken out of the arguments, because transformers' kernels would warn too
    if kernel != "eager" and kwargs.pop("output_attentions", None) and not torch.compiler.is_compiling():
        logger.warning_once(
            f"`output_attentions` has no effect with {kernel} attention, which returns no weights; call "
            '`model.set_attn_implementation("eager")` first.'
        )
    layers: Any = model.layers
    norm: Callable = getattr(model, "norm", nn.Identity())
    mask: Any = None
    if attention_mask is None and is_flash(kernel):
        attention_mask = filled_slots(hidden_states, kwargs.get("past_key_values"))
    if packing is None or packing.positions is None:
        mask = create_mask(config=model.config, inputs_embeds=hidden_states, attention_mask=attention_mask)
    last = mask
    if packing is not None:
        if packing.positions is None:  # nothing is padding: all rows are one bucket, with the mask that they have
            packing = packing._replace(buckets=(packing._replace(outputs=None, attention_mask=mask),))
        hidden_states = packing.pack(hidden_states)  # (1, tokens, d_model)
        mask, last = packing._replace(outputs=None), packing
    is_compiled = packing is not None and packing.sequences is not None and _has_compiled_layers(model)
    for number, layer in enumerate(layers, start=1):
        if is_compiled:
            maybe_mark_dynamic(hidden_states, 1)
        hidden_states = layer(hidden_states, last if number == len(layers) else mask, *source, **kwargs)
    return to_rows(norm(hidden_states), packing)


def filled_slots(hidden_states: Tensor, cache: Cache | EncoderDecoderCache | None) -> Tensor | None:
    """Mark the positions of a static cache that are in use: flash attention would see its empty slots, too.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): What the layers are given.
        cache (`Cache`, *optional*): The keys and values of the positions before.

    Returns:
        `torch.Tensor` of shape `(batch, past_length + length)`: a mask; `None` for other caches, and in compiled
            code, as in transformers' models.
    """
    if cache is None or not cache.is_compileable or torch.compiler.is_compiling():
        return None
    batch, length, _ = hidden_states.shape
    return torch.ones(batch, int(cache.get_seq_length()) + length, dtype=torch.long, device=hidden_states.device)


def run_encoder(
    model: PreTrainedModel,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    keep_padding: bool = False,
    read_positions: Tensor | Reads | None = None,
    *,
    create_mask: Callable[..., Any] = create_bidirectional_mask,
    reads_first: bool = False,
    sequence_ids: Tensor | None = None,
    mask_sizes: Sizes | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Run the layers of an encoder, or with a causal mask those of a decoder that has no source.

    Args:
        model (`PreTrainedModel`): The encoder, as in [`run_layers`].
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): The embeddings.
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding. With a
            cache, of shape `(batch, past_length + length)`.
        keep_padding (`bool`, defaults to `False`): Whether the output at padding is computed, too; otherwise it is 0,
            in eager, compiled and exported code alike.
        read_positions (`torch.Tensor` of shape `(batch, length)` or `Reads`, *optional*): Not 0 where the output is
            read.
        create_mask (`Callable`, *optional*): As in [`run_layers`]; bidirectional by default.
        reads_first (`bool`, defaults to `False`): Whether each row's first position is read in any case, even if it is
            padding.
        sequence_ids (`torch.LongTensor` of shape `(batch or 1, length)`, *optional*): Without a mask, the number of
            each position's sequence in its row ([`flattened_rows`]); one sequence a row by default.
        mask_sizes (`Mapping[str, MaskSizes]`, *optional*): What [`step_sizes`] returns.
        **kwargs: Passed on to the layers.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: the output of shape `(batch, length, d_model)`; and that of each row's
        first position, `(batch, 1, d_model)`, which a pooler reads even where it is padding.

    Raises:
        ValueError: if `read_positions` has another shape, or sequences are cut across devices.
        TypeError: if `keep_padding` is no bool.
    """
    if not isinstance(keep_padding, bool):
        raise TypeError(f"`keep_padding` must be a bool, got {type(keep_padding).__name__}.")
    if kwargs.get("shift_labels") is not None:  # accelerate gives them where it has cut sequences across devices
        raise ValueError(
            "`shift_labels` must not be given: context parallelism, which cuts sequences across devices, knows causal "
            "attention only. Use DDP, FSDP2 or tensor parallelism (`DistributedConfig`)."
        )
    batch, length = hidden_states.shape[:2]
    read, count, firsts = read_positions if isinstance(read_positions, Reads) else Reads(read_positions)
    if read is not None:
        check_shape("read_positions", read, batch, length)
        if reads_first:
            read = torch.cat((torch.ones_like(read[:, :1]), read[:, 1:]), dim=1)
            count = None if count is None else count + batch - firsts
    sequences, sizes = None, (mask_sizes or {}).get("attention_mask")
    if kwargs.get("position_ids") is None:
        attention_mask = without_full_mask(model, attention_mask, sizes)
    if sequence_ids is not None and _can_read(sequence_ids):
        sequences = find_sequences(sequence_ids, batch, kwargs)
        sequence_ids = None if sequences is None else sequence_ids
    if sequences is not None:
        kwargs.update(kernel_arguments(sequences, sequences))  # for flash attention, which has no such mask
    if sequence_ids is not None and create_mask is create_bidirectional_mask:
        overlay = packed_sequence_mask_function(sequence_ids.expand(batch, -1))
        create_mask = partial(create_bidirectional_mask, and_mask_function=overlay)
    mask = None if keep_padding else attention_mask
    if sequences is None and attention_mask is None:
        sequences = _rows_for_compiled_layers(model, hidden_states)
    packing = plan_packing(
        model,
        hidden_states,
        mask,
        outputs=read,
        reads_first=reads_first,
        max_buckets=MAX_BUCKETS,
        sequences=sequences,
        sizes=sizes,
        output_count=count,
        **kwargs,
    )
    hidden_states = run_layers(model, hidden_states, attention_mask, create_mask, packing=packing, **kwargs)
    first = hidden_states[:, :1]
    is_packed = packing is not None and packing.positions is not None  # then padding is zero already
    if isinstance(mask, Tensor) and mask.dim() == 2 and not is_packed:
        is_padding = (mask == 0).to(hidden_states.device)[:, mask.shape[1] - hidden_states.shape[1] :]
        hidden_states = hidden_states.masked_fill(is_padding[..., None], 0)
    return hidden_states, first


def without_full_mask(model: PreTrainedModel, attention_mask: Tensor | None, sizes: MaskSizes | None) -> Tensor | None:
    """Drop a mask without padding if it is known to have none: transformers' helpers would wait for a GPU to find out.

    Compiled layers keep it, to get tokens as they do of other batches.

    Args:
        model (`PreTrainedModel`): The model, with `layers`.
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): The mask.
        sizes (`MaskSizes`, *optional*): Its sizes.

    Returns:
        `torch.Tensor`: the mask, or `None`.
    """
    is_full = sizes is not None and attention_mask is not None and sizes.total == attention_mask.numel()
    return None if is_full and not _has_compiled_layers(model) else attention_mask


def run_decoder(
    model: PreTrainedModel,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    encoder_hidden_states: Tensor,
    encoder_attention_mask: Tensor | None,
    past_key_values: EncoderDecoderCache | None = None,
    read_positions: Tensor | None = None,
    *,
    mask_sizes: Sizes | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run the layers of a decoder with cross-attention.

    Args:
        model (`PreTrainedModel`): The decoder, as in [`run_layers`].
        hidden_states (`torch.Tensor` of shape `(batch, tgt_len, d_model)`): The embeddings.
        attention_mask (`torch.Tensor` of shape `(batch, past_len + tgt_len)`, *optional*): Not 0 for tokens, 0 for
            padding. With one, all positions of the target are computed.
        encoder_hidden_states (`torch.Tensor` of shape `(batch or fewer, src_len, d_model)`): The encoder's output.
        encoder_attention_mask (`torch.Tensor` of shape `(batch or fewer, src_len)`, *optional*): Not 0 for tokens, 0
            for padding.
        past_key_values (`EncoderDecoderCache`, *optional*): Keys and values of the positions before.
        read_positions (`torch.Tensor` of shape `(batch, tgt_len)`, *optional*): Not 0 where the output is read.
        mask_sizes (`Mapping[str, MaskSizes]`, *optional*): What [`step_sizes`] returns.
        **kwargs: Passed on to the layers.

    Returns:
        `torch.Tensor` of shape `(batch, tgt_len, d_model)`: the output.

    Raises:
        ValueError: if `read_positions` has another shape.
    """
    if read_positions is not None:
        check_shape("read_positions", read_positions, *hidden_states.shape[:2])
    target = source = cross_mask = None
    sequences: tuple[Any, ...] = ()
    sizes = mask_sizes or {}
    source_sizes = sizes.get("attention_mask")
    encoder_attention_mask = without_full_mask(model, encoder_attention_mask, source_sizes)
    # one bucket each: the rows of target and source must keep their order
    if past_key_values is None and encoder_hidden_states.shape[0] == hidden_states.shape[0]:
        source = plan_packing(model, encoder_hidden_states, encoder_attention_mask, sizes=source_sizes, **kwargs)
        # attention over sequences on a GPU has no mask for a source that keeps its padding
        is_masked = source is None and encoder_attention_mask is not None and runs_varlen(model, hidden_states)
        if read_positions is not None and attention_mask is None and not is_masked:
            needed = up_to_last(read_positions != 0)  # to causal layers, what follows is like padding
            target = plan_packing(model, hidden_states, needed, sizes=sizes.get("needed"), **kwargs)
    packing = target
    if any(each is not None and each.sequences is not None for each in (target, source)):
        is_compiled = _has_compiled_layers(model)
        source = source or Packing.of_rows(encoder_hidden_states, is_compiled)
        target = target or Packing.of_rows(hidden_states, is_compiled)
        sequences = (target.sequences, source.sequences)
    else:
        cross_mask = create_bidirectional_mask(
            config=model.config,
            inputs_embeds=hidden_states,
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
        )
    if source is not None or target is not None:
        encoder_hidden_states = to_tokens(encoder_hidden_states, source)
        if sequences and is_compiled:
            maybe_mark_dynamic(encoder_hidden_states, 1)
        cross_mask = CrossPacking(target, source, cross_mask, sequences)
    cache = None if past_key_values is None else past_key_values.self_attention_cache
    return run_layers(
        model,
        hidden_states,
        attention_mask,
        partial(create_causal_mask, **{CACHE_NAME: cache}),
        *(encoder_hidden_states, cross_mask),
        packing=packing,
        past_key_values=past_key_values,
        **kwargs,
    )
