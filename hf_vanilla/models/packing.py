"""Which tokens the layers see: the tokens of a padded batch alone, and of the last layer those that a head reads.

      rows (batch, length)      tokens (1, tokens)         buckets, for attention
        a a a a                                              a a a a      c .
        b b b .          ->     a a a a b b b c      ->      b b b .
        c . . .

Everything that works on each token by itself (projections, norms, feed-forward networks, dropout) runs on tokens;
attention runs on rows of like length, padded to the longest of their bucket. To a layer, a `Packing` is its attention
mask: it says which tokens see each other. It is planned once for each batch; a batch without padding gets none. A
layer or attention takes one if its own class declares `accepts_packing`: a subclass with a `forward` of its own has to
declare it again.

Packing is a fast path of CPUs; everything has the same value without it. It is off where results would differ visibly:
if a layer is hooked, traced or replaced, the whole model is compiled, or outputs of single layers are requested. Where
layers are compiled one by one, there is a single bucket, as every number of them would be compiled anew.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging
from transformers.utils.output_capturing import capture_outputs

from .checks import check_shape, has_label, hides_values


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
HARMLESS = (capture_outputs.__module__, "torch.distributed.fsdp")


def gather_tokens(hidden_states: Tensor, tokens: Tensor | None) -> Tensor:
    """Gather tokens of a batch.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): All of them.
        tokens (`torch.LongTensor` of shape `(tokens,)`, *optional*): Their indices in `(batch * length)`; all by
            default.

    Returns:
        `torch.Tensor` of shape `(1, tokens, d_model)`: the tokens, or `hidden_states` itself by default.
    """
    return hidden_states if tokens is None else hidden_states.flatten(0, 1).index_select(0, tokens)[None]


def scatter_tokens(tokens: Tensor, positions: Tensor, batch: int, length: int) -> Tensor:
    """Scatter tokens to their positions, with zeros elsewhere.

    Args:
        tokens (`torch.Tensor` of shape `(tokens, width)`): The tokens.
        positions (`torch.LongTensor` of shape `(tokens,)`): Their indices in `(batch * length)`.
        batch (`int`): Number of rows.
        length (`int`): Length of a row.

    Returns:
        `torch.Tensor` of shape `(batch, length, width)`: all positions.
    """
    rows = tokens.new_zeros(batch * length, tokens.shape[1]).index_copy_(0, positions, tokens)
    return rows.view(batch, length, -1)


class Packing(NamedTuple):
    """The tokens of padded rows without their padding. Layers take that of a batch in place of an attention mask.

    Attributes:
        rows: Number of rows, padded to one length.
        length: This length.
        positions: Indices of the tokens in `(rows * length)`, bucket after bucket, of shape `(tokens,)`; `None` if
            every position is one.
        buckets: Of a batch, its rows by length, each bucket padded to its longest, for attention.
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

    @classmethod
    def of_lengths(cls, lengths: Tensor) -> "Packing":
        """Build the bucket of rows of these lengths, of shape `(rows,)`, each with its tokens first."""
        rows, length = lengths.shape[0], int(lengths.max())
        if bool((lengths == length).all()):
            return cls(rows, length, None)
        is_token = torch.arange(length, device=lengths.device) < lengths[:, None]  # (rows, length)
        return cls(rows, length, is_token.flatten().nonzero()[:, 0], attention_mask=is_token[:, None, None])

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
        if positions is None:
            return tokens.view(self.rows, self.length, -1)
        return scatter_tokens(tokens.squeeze(0), positions, self.rows, self.length)

    def map_rows(
        self, attend: Callable[..., tuple[Tensor, Any]], tokens: Tensor, is_causal: bool, **kwargs: Any
    ) -> Tensor:
        """Apply attention to each bucket's rows.

        Args:
            attend (`Callable`): From rows `(rows, length, width)` and a mask to outputs of the same rows.
            tokens (`torch.Tensor` of shape `(1, tokens, width)`): The tokens.
            is_causal (`bool`): Whether padding at the end of a row is masked by causality anyway.
            **kwargs: Passed on to `attend`.

        Returns:
            `torch.Tensor` of shape `(1, tokens or outputs, width)`: the outputs.
        """
        outputs = []
        parts = tokens.split([bucket.tokens for bucket in self.buckets], dim=1)
        for bucket, part in zip(self.buckets, parts, strict=True):
            mask = None if is_causal and bucket.positions is not None else bucket.attention_mask
            outputs.append(bucket.pack(attend(bucket.unpack(part), mask, **kwargs)[0]))
        return gather_tokens(torch.cat(outputs, dim=1), self.outputs)


class CrossPacking(NamedTuple):
    """How the tokens of a target and those of its source lie, for cross-attention. It takes the place of a mask.

    Attributes:
        target: Packing of the target, if it is packed.
        source: Packing of the source, if it is packed.
        attention_mask: The mask over the source in rows.
    """

    target: Packing | None
    source: Packing | None
    attention_mask: Any


# Which positions see each other: what transformers' mask helpers make, of any kind, or a `Packing`.
Mask = Any


def to_rows(tokens: Tensor, packing: Packing | None) -> Tensor:
    """Unpack tokens `(1, tokens, width)` to rows `(batch, length, width)`; without a packing they are rows already."""
    return tokens if packing is None else packing.unpack(tokens)


def to_tokens(rows: Tensor, packing: Packing | None) -> Tensor:
    """Pack rows `(batch, length, width)` to tokens `(1, tokens, width)` if there is a packing."""
    return rows if packing is None else packing.pack(rows)


def cross_packing(attention_mask: Mask) -> CrossPacking:
    """Return how target and source lie: the mask itself, or for any other mask two batches of rows."""
    return attention_mask if isinstance(attention_mask, CrossPacking) else CrossPacking(None, None, attention_mask)


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
    lengths = {
        "cu_seq_lens_q": torch.arange(0, (batch + 1) * query_len, query_len, dtype=torch.int32, device=query.device),
        "cu_seq_lens_k": nn.functional.pad((mask != 0).sum(1).cumsum(0, dtype=torch.int32), (1, 0)),
        "max_length_q": query_len,
        "max_length_k": src_len,
    }
    return key, value, lengths


def gather_outputs(hidden_states: Tensor, attention_mask: Mask) -> Tensor:
    """Keep the tokens whose output a layer computes: all of them, unless its mask is a `Packing` that names some.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): The input of the layer.
        attention_mask (`Mask`, *optional*): Its mask.

    Returns:
        `torch.Tensor` of shape `(1, outputs, d_model)`, or `hidden_states`.
    """
    return gather_tokens(hidden_states, attention_mask.outputs if isinstance(attention_mask, Packing) else None)


def plan_packing(
    model: PreTrainedModel,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    *,
    outputs: Tensor | None = None,
    needs_first: bool = False,
    max_buckets: int = 1,
    position_ids: Tensor | None = None,
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
        needs_first (`bool`, defaults to `False`): Whether each row's first position is read even if it is padding.
        max_buckets (`int`, defaults to 1): Into how many buckets the rows may be sorted by length. With one bucket
            they keep their order.
        position_ids (`torch.LongTensor` of shape `(batch or 1, length)`, *optional*): Positions given by the caller.
            Without a mask, a sequence begins wherever a position is not the one before plus 1.
        **kwargs: The arguments of `forward`: with `output_attentions` or `output_hidden_states` nothing is left out.

    Returns:
        `Packing`, or `None` where all positions are computed.
    """
    layers: Any = model.layers
    if not _may_leave_out(model, hidden_states, kwargs):
        return None
    batch, length = hidden_states.shape[:2]
    is_token = _worth_packing(model, attention_mask, needs_first)
    sequences = None if attention_mask is not None else _sequence_lengths(model, position_ids, batch)
    has_outputs = outputs is not None and outputs.device.type == "cpu" and len(layers) > 0
    if (is_token is None and sequences is None and not has_outputs) or not all(map(_accepts_packing, layers)):
        return None
    max_buckets = 1 if any(map(_is_compiled, layers)) else max_buckets
    packing, cells = Packing(batch, length, None), torch.arange(batch * length)
    if is_token is not None:
        packing = _pack(packing, cells[is_token.flatten()], is_token.sum(1), min(max_buckets, length // BUCKET_LENGTH))
    elif sequences is not None:
        packing = _pack(packing, cells, sequences, min(max_buckets, int(sequences.max()) // BUCKET_LENGTH))
    if outputs is not None and has_outputs and not _has_hooks(model):
        is_read = outputs.flatten() != 0
        is_read = is_read if packing.positions is None else is_read[packing.positions]
        read = is_read.nonzero()[:, 0]
        if 0 < read.shape[0] <= MAX_OUTPUT_SHARE * is_read.shape[0]:
            packing = packing._replace(outputs=read)
    return None if packing.positions is None and packing.outputs is None else packing


def _pack(packing: Packing, tokens: Tensor, lengths: Tensor, num_buckets: int) -> Packing:
    """Pack tokens (tokens,), sequence after sequence, into buckets of sequences of like lengths (sequences,)."""
    if num_buckets <= 1:
        return packing._replace(positions=tokens, buckets=(Packing.of_lengths(lengths),))
    sequences = tokens.split(lengths.tolist())
    lengths, order = lengths.sort()
    tokens = torch.cat([sequences[number] for number in order.tolist()])
    parts = [part for part in lengths.tensor_split(num_buckets) if part.numel()]
    return packing._replace(positions=tokens, buckets=tuple(map(Packing.of_lengths, parts)))


def _sequence_lengths(model: PreTrainedModel, position_ids: Tensor | None, batch: int) -> Tensor | None:
    """Return the lengths of the sequences of a batch if there are several in a row: (sequences,)."""
    if position_ids is None or position_ids.numel() == 0 or model.config._attn_implementation not in PACKED_KERNELS:
        return None
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff() != 1
    starts = begins.expand(batch, -1).flatten().nonzero()[:, 0]
    if len(starts) == batch:
        return None
    return starts.diff(append=starts.new_tensor([batch * position_ids.shape[1]]))


def _worth_packing(model: PreTrainedModel, attention_mask: Any, needs_first: bool) -> Tensor | None:
    """Return a mask (batch, length) as booleans if there is enough padding, and a token in each row."""
    mask = attention_mask
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.numel() == 0 or mask.device.type != "cpu":
        return None
    if model.config._attn_implementation not in PACKED_KERNELS:
        return None
    is_token = mask.bool()
    lengths = is_token.sum(1)  # (batch,)
    if (needs_first and not is_token[:, 0].all()) or int(lengths.min()) == 0:
        return None
    return is_token if int(lengths.sum()) <= (1 - MIN_PADDING_SHARE) * mask.numel() else None


def _may_leave_out(model: PreTrainedModel, hidden_states: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether positions may be left out: on a CPU, by plain code, without outputs of single layers."""
    if hides_values() or torch.jit.is_tracing() or hidden_states.device.type != "cpu":
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
        classes = (each for each in type(module).__mro__ if not each.__module__.startswith(HARMLESS))  # FSDP2 adds one
        if "accepts_packing" not in vars(next(each for each in classes if "forward" in vars(each))):
            return False
    return not any(map(_has_hooks, layer.modules()))


def _is_compiled(layer: nn.Module) -> bool:
    """Whether a layer, or a part of it, is compiled by itself."""
    return any(each._compiled_call_impl is not None or hasattr(each, "_orig_mod") for each in layer.modules())


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module is patched, or has hooks other than those of recording, sharding and offloading."""
    is_placed = hasattr(module, "_hf_hook") or hasattr(module, "_is_hooked")  # by accelerate or tensor parallelism
    if "forward" in vars(module) and not is_placed:
        return True
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(not hook.__module__.startswith(HARMLESS) for each in hooks for hook in each.values())


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
    mask: Any = packing
    if packing is None or packing.positions is None:
        mask = create_mask(config=model.config, inputs_embeds=hidden_states, attention_mask=attention_mask)
    if packing is None:
        for layer in layers:
            hidden_states = layer(hidden_states, mask, *source, **kwargs)
        return norm(hidden_states)
    if packing.positions is None:
        packing = packing._replace(buckets=(packing._replace(outputs=None, attention_mask=mask),))
    hidden_states = packing.pack(hidden_states)  # (1, tokens, d_model)
    inner = packing._replace(outputs=None)
    for layer in layers[:-1]:
        hidden_states = layer(hidden_states, inner, *source, **kwargs)
    for layer in layers[-1:]:
        hidden_states = layer(hidden_states, packing, *source, **kwargs)
    return packing.unpack(norm(hidden_states))


def run_encoder(
    model: PreTrainedModel,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    *,
    create_mask: Callable[..., Any] = create_bidirectional_mask,
    keep_padding: bool = False,
    read_positions: Tensor | None = None,
    reads_first: bool = False,
    needs_first: bool = False,
    max_buckets: int = 1,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Run the layers of an encoder, or with a causal mask those of a decoder that has no source.

    Args:
        model (`PreTrainedModel`): The encoder, as in [`run_layers`].
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): The embeddings.
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding. With a
            cache, of shape `(batch, past_length + length)`.
        create_mask (`Callable`, *optional*): As in [`run_layers`]; bidirectional by default.
        keep_padding (`bool`, defaults to `False`): Whether the output at padding is computed, too; otherwise it is 0,
            in eager, compiled and exported code alike.
        read_positions (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 where the output is read.
        reads_first (`bool`, defaults to `False`): Whether each row's first position is read in any case.
        needs_first (`bool`, defaults to `False`): As in [`plan_packing`].
        max_buckets (`int`, defaults to 1): As in [`plan_packing`].
        **kwargs: Passed on to the layers.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: the output of shape `(batch, length, d_model)`; and that of each row's
        first position, `(batch, 1, d_model)`, which a pooler reads even where it is padding.

    Raises:
        ValueError: if `read_positions` has another shape, or sequences are cut across devices.
    """
    if kwargs.get("shift_labels") is not None:
        raise ValueError(
            "`shift_labels` must not be given: context parallelism, which cuts sequences across devices, knows causal "
            "attention only. Use DDP, FSDP2 or tensor parallelism (`DistributedConfig`)."
        )
    if read_positions is not None:
        check_shape("read_positions", read_positions, *hidden_states.shape[:2])
        if reads_first:
            read_positions = torch.cat((torch.ones_like(read_positions[:, :1]), read_positions[:, 1:]), dim=1)
    mask = None if keep_padding else attention_mask
    packing = plan_packing(
        model,
        hidden_states,
        mask,
        outputs=read_positions,
        needs_first=needs_first,
        max_buckets=max_buckets,
        **kwargs,
    )
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
    *,
    past_key_values: EncoderDecoderCache | None = None,
    read_positions: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run the layers of a decoder with cross-attention.

    Args:
        model (`PreTrainedModel`): The decoder, as in [`run_layers`].
        hidden_states (`torch.Tensor` of shape `(batch, tgt_len, d_model)`): The embeddings.
        attention_mask (`torch.Tensor` of shape `(batch, past_len + tgt_len)`, *optional*): Not 0 for tokens.
        encoder_hidden_states (`torch.Tensor` of shape `(batch or fewer, src_len, d_model)`): The encoder's output.
        encoder_attention_mask (`torch.Tensor` of shape `(batch or fewer, src_len)`, *optional*): Not 0 for tokens.
        past_key_values (`EncoderDecoderCache`, *optional*): Keys and values of the positions before.
        read_positions (`torch.Tensor` of shape `(batch, tgt_len)`, *optional*): Not 0 where the output is read.
        **kwargs: Passed on to the layers.

    Returns:
        `torch.Tensor` of shape `(batch, tgt_len, d_model)`: the output.

    Raises:
        ValueError: if `read_positions` has another shape.
    """
    if read_positions is not None:
        check_shape("read_positions", read_positions, *hidden_states.shape[:2])
    target = source = None
    if past_key_values is None and encoder_hidden_states.shape[0] == hidden_states.shape[0]:
        source = plan_packing(model, encoder_hidden_states, encoder_attention_mask, **kwargs)
        if read_positions is not None and attention_mask is None:
            # no causal layer needs more than the positions up to the last that is read
            needed = (read_positions != 0).flip(1).cummax(1).values.flip(1)
            target = plan_packing(model, hidden_states, needed, **kwargs)
    cross_mask: Mask = create_bidirectional_mask(
        config=model.config,
        inputs_embeds=hidden_states,
        attention_mask=encoder_attention_mask,
        encoder_hidden_states=encoder_hidden_states,
    )
    if source is not None or target is not None:
        encoder_hidden_states = to_tokens(encoder_hidden_states, source)
        cross_mask = CrossPacking(target, source, cross_mask)
    cache = None if past_key_values is None else past_key_values.self_attention_cache
    return run_layers(
        model,
        hidden_states,
        attention_mask,
        partial(create_causal_mask, past_key_values=cache),
        *(encoder_hidden_states, cross_mask),
        packing=target,
        past_key_values=past_key_values,
        **kwargs,
    )


def first_position(inputs: Tensor | None) -> dict[str, Any]:
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
    return {"read_positions": is_read}


def all_positions(attention_mask: Tensor | None, labels: Tensor | None, training: bool) -> dict[str, Any]:
    """Name what a head for all tokens reads of an encoder: in training padding only where it has a label.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding.
        labels (`torch.Tensor` of shape `(batch, length)`, *optional*): Labels; -100 where there is none.
        training (`bool`): Whether the model is in training mode.

    Returns:
        `dict[str, Any]`: arguments of the encoder. Padding is computed, too, where checking would synchronize: in
        compiled or transformed code, and off the CPU.
    """
    if labels is None or not training or hides_values():
        return {"keep_padding": True}
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != labels.shape:
        return {}
    if attention_mask.device.type != "cpu":
        return {"keep_padding": True}
    return {"keep_padding": bool((has_label(labels) & (attention_mask == 0).to(labels.device)).any())}


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
