"""Which tokens the layers see: the tokens of a padded batch alone, and of the last layer those that a head reads.

      rows (batch, length)      tokens (1, tokens)         buckets, for attention
        a a a a                                              a a a a      c .
        b b b .          ->     a a a a b b b c      ->      b b b .
        c . . .

Everything that works on each token by itself (projections, norms, feed-forward networks, dropout) runs on tokens.
Attention runs on a CPU on rows of like length, padded to the longest of their bucket; on a GPU on the tokens, by a
kernel that is given the offsets of the sequences (`varlen_attention.py`), or in buckets where no such kernel runs.

To self-attention, a `Packing` is its mask; to cross-attention, a `CrossPacking`: they say which tokens see each other.
They are planned once for each batch ([`PackingPlanner`]); a batch without padding gets none. A layer or attention
takes one if its own class declares `accepts_packing`: a subclass with a `forward` of its own has to declare it again.

Packing is a fast path; everything has the same value without it. It is off with a cache, and where results would
differ visibly: if a layer or the norm after the last one is hooked, a layer is traced or replaced, the whole model is
compiled, or outputs of single layers are requested. Where layers are compiled one by one, there is a single bucket, as
every number of them would be compiled anew, and batches without padding are packed too.
"""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, packed_sequence_mask_function
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging
from transformers.utils.output_capturing import capture_outputs

from .cache_names import CACHE_NAME
from .checks import can_read, check_encoder_arguments, check_shape, hides_values
from .read_positions import MaskSizes, Reads, Sizes, count_masks, up_to_last
from .sequences import Sequences, find_sequences
from .varlen_attention import attend_sequences, has_varlen_kernels, is_flash, kernel_arguments, runs_varlen


logger = logging.get_logger(__name__)


# From this share of padding on, working on tokens alone is faster, moving them included.
MIN_PADDING_SHARE = 0.05
# Up to this share of tokens that a head reads, computing the last layer for them alone is faster.
MAX_OUTPUT_SHARE = 0.75
# The attention kernels that take rows of a packing.
PACKED_KERNELS = ("eager", "sdpa")
# One bucket per 64 positions of the longest row, at most 8.
BUCKET_LENGTH = 64
MAX_BUCKETS = 8
# Where hooks are from that see no difference: transformers' recording, and FSDP2, which gathers a layer's parameters.
HARMLESS_HOOK_MODULES = (capture_outputs.__module__, "torch.distributed.fsdp")
# Compiled layers are compiled again for another bound of the lengths: one of these, or a multiple of the last.
LENGTH_BOUNDS = (64, 128, 256, 512)


def gather_tokens(hidden_states: Tensor, tokens: Tensor | None) -> Tensor:
    """Gather tokens of a batch.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): All of them.
        tokens (`torch.LongTensor` of shape `(tokens,)`, *optional*): Their indices in `(batch * length)`; all by
            default.

    Returns:
        `torch.Tensor` of shape `(1, tokens, d_model)`: the tokens.
    """
    cells = hidden_states.flatten(0, 1)[None]
    return cells if tokens is None else cells.index_select(1, tokens)


def scatter_tokens(states: Tensor, tokens: Tensor | None, batch: int, length: int) -> Tensor:
    """Put tokens back where [`gather_tokens`] found them, with zeros elsewhere.

    Args:
        states (`torch.Tensor` of shape `(1, tokens, d_model)`): The tokens, or outputs of them.
        tokens (`torch.LongTensor` of shape `(tokens,)`, *optional*): As in [`gather_tokens`].
        batch (`int`): Number of rows.
        length (`int`): Their length.

    Returns:
        `torch.Tensor` of shape `(batch, length, d_model)`: the rows.
    """
    if tokens is not None:
        cells = states.new_zeros(batch * length, states.shape[2])
        # the layers of a model on several GPUs end on another one
        states = cells.index_copy_(0, tokens.to(states.device), states.squeeze(0))
    return states.view(batch, length, -1)


class LengthBucket(NamedTuple):
    """Rows of like length, padded to the longest, for attention by the kernels of padded rows.

    Attributes:
        rows: Number of rows.
        length: Length of the longest.
        positions: Indices of the tokens in `(rows * length)`, of shape `(tokens,)`; `None` if every position is one.
        attention_mask: The mask that the attention kernel gets, true for tokens, of shape `(rows, 1, 1, length)`;
            `None` if every position is a token. Of an unpacked batch, what transformers' mask helpers make.
    """

    rows: int
    length: int
    positions: Tensor | None = None
    attention_mask: Any = None

    @classmethod
    def of_lengths(cls, lengths: Tensor) -> "LengthBucket":
        """Build the bucket of rows of these lengths, of shape `(rows,)`, each with its tokens first."""
        rows, length = lengths.shape[0], int(lengths.max())
        if bool((lengths == length).all()):
            return cls(rows, length)
        is_token = torch.arange(length, device=lengths.device) < lengths[:, None]  # (rows, length)
        return cls(rows, length, is_token.flatten().nonzero()[:, 0], is_token[:, None, None])

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.rows * self.length if self.positions is None else self.positions.shape[0]

    def to(self, device: torch.device) -> "LengthBucket":
        """Move its indices and its mask to a device."""
        tensors = (self.positions, self.attention_mask)
        return LengthBucket(self.rows, self.length, *(each if each is None else each.to(device) for each in tensors))


class Packing(NamedTuple):
    """The tokens of padded rows without their padding. Layers take it in place of an attention mask.

    Attributes:
        rows: Number of rows, padded to one length.
        length: This length.
        positions: Indices of the tokens in `(rows * length)`, bucket after bucket, of shape `(tokens,)`; `None` if
            every position is one.
        buckets: The rows by length, for attention on a CPU, or on a GPU by the kernels of padded rows.
        sequences: Where the tokens of each row lie, for attention by a kernel for sequences.
        outputs: Indices of the tokens whose output is computed, of shape `(outputs,)`; `None` for all. All are
            attended to.
        is_compiled: Whether it is for layers on a GPU that are compiled one by one.
    """

    rows: int
    length: int
    positions: Tensor | None = None
    buckets: tuple[LengthBucket, ...] = ()
    sequences: Sequences | None = None
    outputs: Tensor | None = None
    is_compiled: bool = False

    @classmethod
    def of_sequences(
        cls, rows: int, length: int, positions: Tensor | None, sequences: Sequences, is_compiled: bool
    ) -> "Packing":
        """Build that of a batch on a GPU. Compiled layers take any number of tokens, and few bounds of lengths."""
        if is_compiled:
            offsets, longest = sequences
            bounds = (each for each in LENGTH_BOUNDS if each >= longest)
            longest = next(bounds, -(-longest // LENGTH_BOUNDS[-1]) * LENGTH_BOUNDS[-1])
            maybe_mark_dynamic(offsets, 0)
            sequences = Sequences(offsets, longest)
        return cls(rows, length, positions, sequences=sequences, is_compiled=is_compiled)

    @classmethod
    def of_rows(cls, states: Tensor, is_compiled: bool) -> "Packing":
        """Build that of rows without padding, of shape `(rows, length, width)`, on a GPU."""
        rows, length = states.shape[:2]
        return cls.of_sequences(rows, length, None, Sequences.of_rows(rows, length, states.device), is_compiled)

    def pack(self, rows: Tensor) -> Tensor:
        """Gather the tokens `(1, tokens, width)` of rows `(rows, length, width)`."""
        return gather_tokens(rows, self.positions)

    def unpack(self, tokens: Tensor) -> Tensor:
        """Put tokens or outputs `(1, tokens, width)` back to `(rows, length, width)`, zero elsewhere."""
        positions = self.positions
        if self.outputs is not None:
            positions = self.outputs if positions is None else positions[self.outputs]
        return scatter_tokens(tokens, positions, self.rows, self.length)

    def attend(
        self, attention: Any, attend_rows: Callable[..., tuple[Tensor, Any]], tokens: Tensor, **kwargs: Any
    ) -> Tensor:
        """Apply self-attention: by a kernel for sequences to all at once, by others to each bucket's rows.

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
            output = attend_sequences(attention, projected, self.sequences, self.sequences, **kwargs)
            return gather_outputs(output, self)
        is_one = len(self.buckets) == 1  # then nothing is copied
        parts = [tokens] if is_one else tokens.split([bucket.tokens for bucket in self.buckets], dim=1)
        outputs = []
        for bucket, part in zip(self.buckets, parts, strict=True):
            rows = scatter_tokens(part, bucket.positions, bucket.rows, bucket.length)
            mask = None if attention.is_causal and bucket.positions is not None else bucket.attention_mask
            outputs.append(gather_tokens(attend_rows(rows, mask, **kwargs)[0], bucket.positions))
        return gather_outputs(outputs[0] if is_one else torch.cat(outputs, dim=1), self)


class CrossPacking(NamedTuple):
    """How the tokens of a target and those of its source lie, for cross-attention. It takes the place of a mask.

    Attributes:
        target: Packing of the target, if it is packed, for attention by rows.
        source: Packing of the source, likewise.
        attention_mask: The mask over the source in rows.
        sequences: The sequences of both if either is packed, for a kernel for sequences.
    """

    target: Packing | None
    source: Packing | None
    attention_mask: Any
    sequences: tuple[Any, ...] = ()

    def attend(self, attention: Any, attend_rows: Callable, target: Tensor, source: Tensor, **kwargs: Any) -> Tensor:
        """Apply cross-attention: by a kernel for sequences to all at once, by others to rows.

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


def gather_outputs(hidden_states: Tensor, attention_mask: Mask) -> Tensor:
    """Keep the tokens whose output a layer computes: all of them, unless its mask is a `Packing` that names some.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): The input of the layer.
        attention_mask (`Mask`, *optional*): Its mask.

    Returns:
        `torch.Tensor` of shape `(1, outputs, d_model)`, or `hidden_states`.
    """
    outputs = attention_mask.outputs if isinstance(attention_mask, Packing) else None
    return hidden_states if outputs is None else gather_tokens(hidden_states, outputs)


class PackingPlanner:
    """Finds the tokens that a model's layers have to work on in one forward, if leaving out the others pays.

    Args:
        model (`PreTrainedModel`): The model, with `layers`.
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): What the layers are given.
        arguments (`Mapping[str, Any]`): The arguments of `forward`: with `past_key_values`, `output_attentions` or
            `output_hidden_states` nothing is left out.

    Attributes:
        is_varlen: Whether attention of packed tokens runs by a kernel for sequences, on a GPU.
        takes_rows: Whether it can run by the model's own kernel, in buckets of rows.
        can_skip: Whether positions may be left out at all.
    """

    def __init__(self, model: PreTrainedModel, hidden_states: Tensor, arguments: Mapping[str, Any]):
        self.model = model
        self.layers: Any = model.layers
        self.device = hidden_states.device
        can_skip = _can_skip_positions(model, hidden_states, arguments)
        on_gpu = can_skip and has_varlen_kernels(self.device)
        self.is_varlen = on_gpu and runs_varlen(model, hidden_states, self.is_compiled)
        self.takes_rows = model.config._attn_implementation in PACKED_KERNELS
        # compiled layers on a GPU would be compiled again for other buckets
        has_buckets = on_gpu and self.takes_rows and not self.is_varlen and not self.is_compiled
        self.can_skip = self.is_varlen or has_buckets or (can_skip and self.device.type == "cpu")

    @cached_property
    def modules(self) -> list[nn.Module]:
        """The layers and all their parts, without what `torch.compile` puts around a layer."""
        return [module for layer in self.layers for module in getattr(layer, "_orig_mod", layer).modules()]

    @cached_property
    def is_compiled(self) -> bool:
        """Whether a layer, or a part of one, is compiled by itself."""
        parts = (*self.layers, *self.modules)
        return any(each._compiled_call_impl is not None or "_orig_mod" in each._modules for each in parts)

    @cached_property
    def accepts_packing(self) -> bool:
        """Whether all layers take a packing, and nothing in them, nor their norm, is hooked."""
        norm: Any = getattr(self.model, "norm", nn.Identity())
        hooked = map(has_hooks, (*self.modules, getattr(norm, "_orig_mod", norm)))
        return all(map(_accepts_packing, self.layers)) and not any(hooked)

    def without_full_mask(self, attention_mask: Tensor | None, sizes: MaskSizes | None) -> Tensor | None:
        """Drop a mask that is known to have no padding: transformers' helpers would wait for a GPU to find out.

        Compiled layers keep it, to get tokens as they do of other batches.

        Args:
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): The mask.
            sizes (`MaskSizes`, *optional*): Its sizes.

        Returns:
            `torch.Tensor`: the mask, or `None`.
        """
        is_full = sizes is not None and attention_mask is not None and sizes.total == attention_mask.numel()
        # compiled code can't read a cached property
        has_compiled = is_full and not torch.compiler.is_compiling() and self.is_compiled
        return None if is_full and not has_compiled else attention_mask

    def plan_tokens(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        sizes: MaskSizes | None = None,
        *,
        sequences: Sequences | None = None,
        reads_first: bool = False,
        max_buckets: int = 1,
    ) -> Packing | None:
        """Find the tokens of a batch.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): What the layers are given.
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding
                anywhere. Other masks are not packed.
            sizes (`MaskSizes`, *optional*): The sizes of `attention_mask`; counted by default.
            sequences (`Sequences`, *optional*): Of rows without a mask that hold several sequences, where these lie.
            reads_first (`bool`, defaults to `False`): Whether each row's first position is read. If one is padding,
                padding is not left out.
            max_buckets (`int`, defaults to 1): Into how many buckets the rows may be sorted by length. With one
                bucket they keep their order.

        Returns:
            `Packing`, or `None` where all positions are computed.
        """
        device, (batch, length) = hidden_states.device, hidden_states.shape[:2]
        if not self.can_skip or not (self.is_varlen or self.takes_rows):
            return None
        # buckets depend on the length of each row: a GPU is waited for, and they are planned on the host
        planned_on = device if self.is_varlen else torch.device("cpu")
        if attention_mask is not None:
            # compiled layers always get tokens, or they would be compiled again for rows
            min_padding = 0 if self.is_compiled else 1 if self.is_varlen else MIN_PADDING_SHARE * batch * length
            sizes = _sizes_if_worth_packing(attention_mask, reads_first, sizes, min_padding)
            has_lengths = self.is_varlen or can_read(attention_mask)
            if sizes is None or not has_lengths or not self.accepts_packing:
                return None
            is_token = (attention_mask != 0).to(planned_on)
            sequences = Sequences.of_lengths(is_token.sum(1), sizes.longest)
            positions = is_token.flatten().nonzero_static(size=sizes.total)[:, 0]
        elif sequences is None or not self.accepts_packing:
            return None
        elif self.is_varlen:
            return Packing.of_sequences(batch, length, None, sequences, self.is_compiled)
        else:
            positions = torch.arange(batch * length)
        if self.is_varlen:
            return Packing.of_sequences(batch, length, positions, sequences, self.is_compiled)
        number = 1 if self.is_compiled else min(max_buckets, sequences.max_length // BUCKET_LENGTH)
        positions, buckets = _in_buckets(positions, sequences.offsets.to(planned_on).diff().long(), number)
        return Packing(batch, length, positions.to(device), tuple(bucket.to(device) for bucket in buckets))

    def plan_outputs(self, packing: Packing | None, read: Tensor | None, count: int | None = None) -> Packing | None:
        """Find the tokens whose output the last layer has to compute.

        Args:
            packing (`Packing`, *optional*): What [`plan_tokens`] found.
            read (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 where the last layer's output is read;
                everywhere by default.
            count (`int`, *optional*): Number of tokens among these; counted by default.

        Returns:
            `Packing`, or `None` where all positions are computed.
        """
        if read is None or not self.can_skip or not (count is not None or can_read(read)):
            return packing
        if not len(self.layers) or not self.accepts_packing or has_hooks(self.model):
            return packing
        is_read = (read.flatten() != 0).to(self.device)
        is_read = is_read if packing is None or packing.positions is None else is_read[packing.positions]
        count = int(is_read.sum()) if count is None else count
        if not 0 < count <= MAX_OUTPUT_SHARE * is_read.shape[0]:
            return packing
        outputs = is_read.nonzero_static(size=count)[:, 0]
        if self.is_varlen and self.is_compiled:
            maybe_mark_dynamic(outputs, 0)
        return (packing or Packing(*read.shape))._replace(outputs=outputs)


def _in_buckets(tokens: Tensor, lengths: Tensor, num_buckets: int) -> tuple[Tensor, tuple[LengthBucket, ...]]:
    """Sort sequences of tokens, of these lengths, into buckets of like lengths."""
    if num_buckets <= 1:
        return tokens, (LengthBucket.of_lengths(lengths),)
    rows = tokens.split(lengths.tolist())
    lengths, order = lengths.sort()
    tokens = torch.cat([rows[number] for number in order.tolist()])
    parts = [part for part in lengths.tensor_split(num_buckets) if part.numel()]
    return tokens, tuple(map(LengthBucket.of_lengths, parts))


def _sizes_if_worth_packing(
    mask: Any, reads_first: bool, sizes: MaskSizes | None, min_padding: float
) -> MaskSizes | None:
    """Return the sizes of a mask (batch, length) if there is enough padding, and a token in each row."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.numel() == 0 or (sizes is None and not can_read(mask)):
        return None
    sizes = sizes or count_masks(mask != 0)[0]
    if (reads_first and sizes.firsts < len(mask)) or sizes.shortest == 0:
        return None
    return sizes if mask.numel() - sizes.total >= min_padding else None


def _can_skip_positions(model: PreTrainedModel, hidden_states: Tensor, arguments: Mapping[str, Any]) -> bool:
    """Whether positions may be left out: by plain code, without outputs of single layers."""
    if hides_values(hidden_states) or torch.jit.is_tracing():
        return False
    if arguments.get("is_causal") is not None or arguments.get("past_key_values") is not None:
        return False  # a packing knows the causality that layers declare, and no positions before it
    names = ("output_attentions", "output_hidden_states")
    return not any(arguments.get(name, getattr(model.config, name)) for name in names)


def _accepts_packing(layer: nn.Module) -> bool:
    """Whether the class of a layer's `forward`, and of each attention's, declares so."""
    layer = getattr(layer, "_orig_mod", layer)
    attentions = [child for name, child in layer.named_children() if name.endswith("_attn")]
    for module in (layer, *attentions):
        # without the class that FSDP2 adds
        classes = (each for each in type(module).__mro__ if not each.__module__.startswith(HARMLESS_HOOK_MODULES))
        if "accepts_packing" not in vars(next(each for each in classes if "forward" in vars(each))):
            return False
    return True


def has_hooks(module: nn.Module) -> bool:
    """Tell whether a module is patched, or has hooks other than those of recording, sharding and offloading.

    Args:
        module (`nn.Module`): The module.

    Returns:
        `bool`: whether.
    """
    # one that is placed on its device by accelerate or tensor parallelism is patched, too
    if "forward" in vars(module) and not (hasattr(module, "_hf_hook") or hasattr(module, "_is_hooked")):
        return True
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    found = [hook for each in hooks if each for hook in each.values()]
    return any(not str(hook.__module__).startswith(HARMLESS_HOOK_MODULES) for hook in found)


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
        packing (`Packing`, *optional*): What a [`PackingPlanner`] found.
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
    has_rows = packing is None or (packing.positions is None and packing.sequences is None)
    if has_rows:
        mask = create_mask(config=model.config, inputs_embeds=hidden_states, attention_mask=attention_mask)
    last = mask
    if packing is not None:
        if has_rows:  # nothing is padding: all rows are one bucket, with the mask that they have
            packing = packing._replace(buckets=(LengthBucket(packing.rows, packing.length, None, mask),))
        hidden_states = packing.pack(hidden_states)  # (1, tokens, d_model)
        last = packing._replace(positions=None)  # layers never see them: compiled ones would ask whether there are any
        mask = last._replace(outputs=None)
    for number, layer in enumerate(layers, start=1):
        if packing is not None and packing.is_compiled:
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
        ValueError: if `read_positions` has another shape, an encoder gets a cache, or sequences are cut across
            devices.
        TypeError: if `keep_padding` is no bool.
    """
    is_causal = create_mask is not create_bidirectional_mask
    caches = () if is_causal else (kwargs.get("past_key_values"), kwargs.get("cache"))
    check_encoder_arguments(keep_padding, kwargs.get("shift_labels"), *caches)
    batch, length = hidden_states.shape[:2]
    read, count, firsts = read_positions if isinstance(read_positions, Reads) else Reads(read_positions)
    if read is not None:
        check_shape("read_positions", read, batch, length)
        if reads_first:
            read = read.clone()  # a slice from the second position on would tie exported code to lengths
            read[:, 0] = 1
            count = None if count is None else count + batch - firsts
    planner = PackingPlanner(model, hidden_states, kwargs)
    sequences, sizes = None, (mask_sizes or {}).get("attention_mask")
    if kwargs.get("position_ids") is None:
        attention_mask = planner.without_full_mask(attention_mask, sizes)
    if sequence_ids is not None and can_read(sequence_ids):
        sequences = find_sequences(sequence_ids, batch, kwargs)
        sequence_ids = None if sequences is None else sequence_ids
    if sequences is not None:
        kwargs.update(kernel_arguments(sequences, sequences))  # for flash attention, which has no such mask
    if sequence_ids is not None and create_mask is create_bidirectional_mask:
        overlay = packed_sequence_mask_function(sequence_ids.expand(batch, -1))
        create_mask = partial(create_bidirectional_mask, and_mask_function=overlay)
    mask = None if keep_padding else attention_mask
    if sequences is None and attention_mask is None and planner.is_varlen and planner.is_compiled:
        # compiled layers would be compiled again for rows
        sequences = Sequences.of_rows(batch, length, hidden_states.device)
    packing = planner.plan_tokens(
        hidden_states, mask, sizes, sequences=sequences, reads_first=reads_first, max_buckets=MAX_BUCKETS
    )
    packing = planner.plan_outputs(packing, read, count)
    hidden_states = run_layers(model, hidden_states, attention_mask, create_mask, packing=packing, **kwargs)
    first = hidden_states[:, :1]
    is_packed = packing is not None and packing.positions is not None  # then padding is zero already
    if isinstance(mask, Tensor) and mask.dim() == 2 and not is_packed:
        is_padding = (mask == 0).to(hidden_states.device)[:, mask.shape[1] - hidden_states.shape[1] :]
        hidden_states = hidden_states.masked_fill(is_padding[..., None], 0)
    return hidden_states, first


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
        attention_mask (`torch.Tensor` of shape `(batch, past_length + tgt_len)`, *optional*): Not 0 for tokens, 0 for
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
    kwargs["past_key_values"] = past_key_values
    planner = PackingPlanner(model, hidden_states, kwargs)
    encoder_attention_mask = planner.without_full_mask(encoder_attention_mask, source_sizes)
    # one bucket each: the rows of target and source must keep their order
    if planner.can_skip and encoder_hidden_states.shape[0] == hidden_states.shape[0]:
        source = planner.plan_tokens(encoder_hidden_states, encoder_attention_mask, source_sizes)
        # attention over sequences on a GPU has no mask for a source that keeps its padding
        is_masked = source is None and encoder_attention_mask is not None and planner.is_varlen
        if read_positions is not None and attention_mask is None and not is_masked:
            needed = up_to_last(read_positions != 0)  # to causal layers, what follows is like padding
            target = planner.plan_tokens(hidden_states, needed, sizes.get("needed"))
    packing = target
    if planner.is_varlen and (source is not None or target is not None):
        source = source or Packing.of_rows(encoder_hidden_states, planner.is_compiled)
        target = target or Packing.of_rows(hidden_states, planner.is_compiled)
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
        if source is not None and source.is_compiled:
            maybe_mark_dynamic(encoder_hidden_states, 1)
        packings = (None, None) if sequences else (target, source)  # a kernel for sequences needs no positions
        cross_mask = CrossPacking(*packings, cross_mask, sequences)
    cache = None if past_key_values is None else past_key_values.self_attention_cache
    create_mask = partial(create_causal_mask, **{CACHE_NAME: cache})
    source_and_mask = (encoder_hidden_states, cross_mask)
    return run_layers(model, hidden_states, attention_mask, create_mask, *source_and_mask, packing=packing, **kwargs)
