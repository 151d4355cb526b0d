"""The bricks of the models: attention, feed-forward network, residual connection with norm, positions, dropout.

Every brick takes the model's config and reads these names of it, most of them transformers' aliases:
`hidden_size`, `num_attention_heads`, `d_k`, `d_v`, `attention_scale`, `intermediate_size`, `hidden_act`,
`layer_norm_eps`, `hidden_dropout_prob`, `attention_probs_dropout_prob`, `activation_dropout`, `norm_position`,
`_attn_implementation`.

Shapes are written with these words: batch, src_len, tgt_len, query_len, key_len, heads, d_k, d_v, d_model, d_ff,
vocab. d_k and d_v are the widths of one head's keys and values.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .dropout import dropout
from .packing import Frame, Packing, take_tokens


# Up to this many keys, in training on a CPU, two matrix products and a softmax are faster than
# `scaled_dot_product_attention`, whose backward pass is made for long sequences.
SHORT_SEQUENCE = 256


def sinusoidal_positions(position_ids: torch.Tensor, d_model: int, position_type: str) -> torch.Tensor:
    """Encode positions as sines and cosines of geometrically spaced wavelengths.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos(the same), in float32. Nothing is stored, so
    no position is too far.

    Args:
        position_ids (`torch.Tensor` of shape `(..., length)`): Positions, from 0.
        d_model (`int`): Width, an even number.
        position_type (`str`): `"sinusoidal"` interleaves sine and cosine as the paper does; `"sinusoidal_split"` puts
            the same sines first and the cosines behind; `"sinusoidal_t2t"` does so with Tensor2Tensor's wavelengths,
            whose exponents end at 1 instead of just below it.

    Returns:
        `torch.Tensor` of shape `(..., length, d_model)`: the encodings.

    Source: Vaswani et al. 2017, 3.5; `get_timing_signal_1d` of Tensor2Tensor.
    """
    half = d_model // 2
    steps = max(half - 1, 1) if position_type == "sinusoidal_t2t" else half
    exponents = torch.arange(half, device=position_ids.device, dtype=torch.float32) / steps
    angles = position_ids[..., None].float() * torch.exp(exponents * -math.log(10000.0))  # (..., length, d_model / 2)
    if position_type == "sinusoidal":
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # (..., length, d_model)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)  # (..., length, d_model)


def positions_of(
    attention_mask: torch.Tensor | None, length: int, past_length: int | torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Number the tokens of each row from 0, whichever side its padding is on.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch, past_length + length)`, *optional*): Not 0 for tokens, 0 for
            padding.
        length (`int`): How many positions are asked for: the last ones.
        past_length (`int` or `torch.Tensor`): How many came before them; of a static cache, a tensor.
        device (`torch.device`): Where the result shall be.

    Returns:
        `torch.Tensor` of shape `(batch, length)`, or `(1, length)` without a mask: the positions. Padding has some
        valid position.
    """
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        return torch.arange(length, device=device)[None] + past_length
    is_token = attention_mask != 0  # as transformers reads masks of any type
    return (is_token.long().cumsum(-1) - 1).clamp_(min=0)[:, attention_mask.shape[1] - length :]


def _drop_weights(weights: torch.Tensor, rate: float, training: bool) -> torch.Tensor:
    """Drop attention weights; `eager_attention_forward` has an argument that hides the name of `dropout`."""
    return dropout(weights, rate, training)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(Q K^T * scaling) V as the formula says, and return the weights too.

    Args:
        module (`nn.Module`): The attention module; its `is_causal` counts if there is no mask, its `training` for
            dropout.
        query (`torch.Tensor` of shape `(batch, heads, query_len, d_k)`): Queries.
        key (`torch.Tensor` of shape `(batch, heads, key_len, d_k)`): Keys.
        value (`torch.Tensor` of shape `(batch, heads, key_len, d_v)`): Values.
        attention_mask (`torch.Tensor` of shape `(batch or 1, 1, query_len or 1, key_len)`, *optional*): Boolean, true
            where a query may look; or of another type, added to the scores.
        scaling (`float`): What the scores are multiplied with.
        dropout (`float`, defaults to 0.0): Probability that a weight is dropped.
        **kwargs: Not used.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: the output of shape `(batch, query_len, heads, d_v)`, and the weights of
        shape `(batch, heads, query_len, key_len)`.

    Source: Vaswani et al. 2017, 3.2.1. A query that may look nowhere spreads its weight evenly: the result is finite.
    """
    scores = torch.matmul(query * scaling, key.transpose(2, 3))  # (batch, heads, query_len, key_len)
    if attention_mask is None and module.is_causal and query.shape[2] > 1:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1)
    kept = _drop_weights(weights, dropout, module.training).to(value.dtype)
    output = torch.matmul(kept, value).transpose(1, 2)  # (batch, query_len, heads, d_v)
    return output, weights


class FusedLinear(nn.Linear):
    """Several linear maps of one input as one matrix product; the output holds theirs side by side.

    Args:
        in_features (`int`): Width of the input.
        sizes (`tuple[int, ...]`): Widths of the outputs.
    """

    def __init__(self, in_features: int, sizes: tuple[int, ...]):
        super().__init__(in_features, sum(sizes))
        self.sizes = sizes

    def init_xavier_uniform(self) -> None:
        """Initialise each of the maps by itself, as if it were a matrix of its own (Glorot & Bengio 2010)."""
        parts = [nn.init.xavier_uniform_(torch.empty(size, self.in_features)) for size in self.sizes]
        init.copy_(self.weight, torch.cat(parts))


class MultiHeadAttention(nn.Module):
    """What self-attention and cross-attention have in common: heads side by side, concatenated and projected.

    MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W_O with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    Args:
        config (`PreTrainedConfig`): The model's config.
        layer_idx (`int`, defaults to 0): The layer's number, under which a cache keeps its keys and values.
        is_causal (`bool`, defaults to `False`): Whether a query sees no key behind its own position.

    Source: Vaswani et al. 2017, 3.2.2. Differs from `nn.MultiheadAttention`: batch first, free d_k and d_v.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int = 0, is_causal: bool = False):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.heads, self.d_k, self.d_v = config.num_attention_heads, config.d_k, config.d_v
        self.scaling = self.d_k**-0.5 if config.attention_scale is None else config.attention_scale
        self.dropout = config.attention_probs_dropout_prob
        self.out_proj = nn.Linear(self.heads * self.d_v, config.hidden_size)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the attention kernel that the config names.

        Args:
            query (`torch.Tensor` of shape `(batch, heads, query_len, d_k)`): Queries.
            key (`torch.Tensor` of shape `(batch, heads, key_len, d_k)`): Keys.
            value (`torch.Tensor` of shape `(batch, heads, key_len, d_v)`): Values.
            attention_mask (`torch.Tensor`, *optional*): The mask, of the kind that this kernel takes.
            **kwargs: Passed on to the kernel.

        Returns:
            `tuple[torch.Tensor, torch.Tensor | None]`: the heads' outputs of shape `(batch, query_len, heads, d_v)`,
            and the weights of shape `(batch, heads, query_len, key_len)` if the kernel is `eager`.
        """
        implementation = self.config._attn_implementation
        kernel: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        if implementation == "sdpa" and (self._is_short_training(key) or 0 in query.shape or 0 in key.shape):
            kernel = eager_attention_forward
        rate = self.dropout if self.training else 0.0
        output, weights = kernel(self, query, key, value, attention_mask, dropout=rate, scaling=self.scaling, **kwargs)
        return output, weights if implementation == "eager" else None

    def _is_short_training(self, key: torch.Tensor) -> bool:
        """Whether plain products beat `scaled_dot_product_attention` here.

        Asks for training, not for gradients: a checkpointed layer runs once without them and once with them, and must
        draw the same dropout both times.
        """
        return self.training and key.device.type == "cpu" and key.shape[2] <= SHORT_SEQUENCE


class SelfAttention(MultiHeadAttention):
    """Attention of a sequence to itself, with one matrix product for queries, keys and values.

    Args:
        config (`PreTrainedConfig`): The model's config.
        layer_idx (`int`, defaults to 0): The layer's number, under which a cache keeps its keys and values.
        is_causal (`bool`, defaults to `False`): Whether a query sees no key behind its own position.

    Source: Vaswani et al. 2017, 3.2.3.
    """

    accepts_packing = True

    def __init__(self, config: PreTrainedConfig, layer_idx: int = 0, is_causal: bool = False):
        super().__init__(config, layer_idx, is_causal)
        self.qkv_sizes = (self.heads * self.d_k, self.heads * self.d_k, self.heads * self.d_v)
        self.qkv_proj = FusedLinear(config.hidden_size, self.qkv_sizes)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        packing: Packing | None = None,
        read_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from every position to every position that the mask allows.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, query_len, d_model)`): The sequence, or its new part; with
                `packing`, its tokens `(1, tokens, d_model)`.
            attention_mask (`torch.Tensor`, *optional*): A mask made by transformers' mask helpers.
            past_key_values (`Cache`, *optional*): Keys and values of the positions before; takes in the new ones.
            packing (`Packing`, *optional*): Where the tokens belong, if padding is left out; takes the place of mask
                and cache.
            read_tokens (`torch.LongTensor` of shape `(read,)`, *optional*): Indices of the tokens whose output will be
                read, row after row; all by default.
            **kwargs: Passed on to the attention kernel.

        Returns:
            `tuple[torch.Tensor, torch.Tensor | None]`: the output of the shape of `hidden_states`, or `(1, read,
            d_model)`, and the weights of shape `(batch, heads, query_len, key_len)` if the kernel is `eager`.
        """
        projected = self.qkv_proj(hidden_states)
        if packing is None:
            output, weights = self._attend_within(projected, attention_mask, past_key_values, **kwargs)
            return self.out_proj(take_tokens(output, read_tokens)), weights
        outputs = [
            frame.pack(self._attend_within(frame.unpack(tokens), self._frame_mask(frame), None, **kwargs)[0])
            for frame, tokens in packing.split(projected)
        ]
        return self.out_proj(take_tokens(torch.cat(outputs)[None], read_tokens)), None

    def _frame_mask(self, frame: Frame) -> torch.Tensor | None:
        """Return the mask of a frame's padding. Behind its end, a causal query never looks."""
        return None if self.is_causal else frame.attention_mask

    def _attend_within(
        self,
        projected: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with queries, keys and values that lie side by side: (batch, query_len, heads * d_v), and weights."""
        batch, query_len, _ = projected.shape
        query, key, value = projected.split(self.qkv_sizes, dim=-1)
        query = query.view(batch, query_len, self.heads, self.d_k).transpose(1, 2)  # (batch, heads, query_len, d_k)
        key = key.view(batch, query_len, self.heads, self.d_k).transpose(1, 2)  # (batch, heads, query_len, d_k)
        value = value.view(batch, query_len, self.heads, self.d_v).transpose(1, 2)  # (batch, heads, query_len, d_v)
        if past_key_values is not None:
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            key, value = past_key_values.update(key, value, self.layer_idx)  # (batch, heads, key_len, ...)
        output, weights = self.attend(query, key, value, attention_mask, **kwargs)
        return output.reshape(batch, query_len, self.heads * self.d_v), weights


def _unpad_source(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Drop the padding of a source for flash attention, and give the lengths of queries and keys apart.

    Left to itself, transformers drops queries by the source's mask.
    """
    batch, _, query_len, _ = query.shape
    key, value = (states[:, :, : mask.shape[1]].transpose(1, 2)[mask != 0] for states in (key, value))
    ends = nn.functional.pad((mask != 0).sum(1).cumsum(0, dtype=torch.int32), (1, 0))  # (batch + 1,)
    lengths = {
        "cu_seq_lens_q": torch.arange(0, (batch + 1) * query_len, query_len, dtype=torch.int32, device=query.device),
        "cu_seq_lens_k": ends,
        "max_length_q": query_len,
        "max_length_k": mask.shape[1],
    }
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None], lengths  # (1, heads, tokens, ...)


class CrossAttention(MultiHeadAttention):
    """Attention of a target to its source, with one matrix product for keys and values.

    Several consecutive rows of the target may belong to one row of the source, as the beams of a sentence do: there
    may be any whole number of times as many target rows. Such rows line up as one longer query, so that the source is
    stored, and its keys and values are computed, once.

    Args:
        config (`PreTrainedConfig`): The model's config.
        layer_idx (`int`, defaults to 0): The layer's number, under which a cache keeps its keys and values.

    Source: Vaswani et al. 2017, 3.2.3.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.d_k)
        self.kv_sizes = (self.heads * self.d_k, self.heads * self.d_v)
        self.kv_proj = FusedLinear(config.hidden_size, self.kv_sizes)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        packing: Packing | None = None,
        source_packing: Packing | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from every target position to every source position that the mask allows.

        Args:
            hidden_states (`torch.Tensor` of shape `(target batch, query_len, d_model)`): The target; with `packing`,
                its tokens `(1, tokens, d_model)`.
            encoder_hidden_states (`torch.Tensor` of shape `(batch, key_len, d_model)`): The source; with
                `source_packing`, its tokens. The target's batch is this batch or a multiple of it.
            attention_mask (`torch.Tensor`, *optional*): A mask over the source made by transformers' mask helpers.
            past_key_values (`EncoderDecoderCache`, *optional*): Takes in the source's keys and values at the first
                call and gives them back at all others.
            packing (`Packing`, *optional*): Where target tokens `(1, tokens, d_model)` belong, if padding is left out.
            source_packing (`Packing`, *optional*): The same for source tokens.
            **kwargs: Passed on to the attention kernel.

        Returns:
            `tuple[torch.Tensor, torch.Tensor | None]`: the output of the shape of `hidden_states`, and the weights of
            shape `(target batch, heads, query_len, key_len)` if the kernel is `eager`, padding included.
        """
        query = self.q_proj(hidden_states)
        if packing is not None:
            query = packing.unpack(query)  # (target batch, query_len, heads * d_k)
        target_batch, query_len, _ = query.shape
        key, value = self._keys_and_values(encoder_hidden_states, past_key_values, source_packing)
        batch, _, key_len, _ = key.shape
        rows = target_batch // batch if batch else 1
        query = query.view(batch, rows * query_len, self.heads, self.d_k).transpose(1, 2)
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:  # flash attention
            key, value, lengths = _unpad_source(query, key, value, attention_mask)
            attention_mask, kwargs = None, {**kwargs, **lengths}
        elif rows > 1 and isinstance(attention_mask, torch.Tensor):
            attention_mask = attention_mask[:, :, :1]  # padding is the same to every query
        output, weights = self.attend(query, key, value, attention_mask, **kwargs)
        if weights is not None and rows > 1:
            weights = weights.view(batch, self.heads, rows, query_len, key_len).transpose(1, 2).flatten(0, 1)
        output = output.reshape(target_batch, query_len, self.heads * self.d_v)
        return self.out_proj(output if packing is None else packing.pack(output)), weights

    def _keys_and_values(
        self,
        encoder_hidden_states: torch.Tensor,
        past_key_values: EncoderDecoderCache | None,
        source_packing: Packing | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project the source, or take the projections from the cache: (batch, heads, key_len, d_k), (..., d_v)."""
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            layer = past_key_values.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values
        projected = self.kv_proj(encoder_hidden_states)
        if source_packing is not None:
            projected = source_packing.unpack(projected)  # (batch, key_len, heads * (d_k + d_v))
        batch, key_len, _ = projected.shape
        key, value = projected.split(self.kv_sizes, dim=-1)
        key = key.view(batch, key_len, self.heads, self.d_k).transpose(1, 2)  # (batch, heads, key_len, d_k)
        value = value.view(batch, key_len, self.heads, self.d_v).transpose(1, 2)  # (batch, heads, key_len, d_v)
        if past_key_values is not None:
            key, value = past_key_values.cross_attention_cache.update(key, value, self.layer_idx)
            past_key_values.is_updated[self.layer_idx] = True
        return key, value


class PositionwiseFeedForward(nn.Module):
    """Two linear maps with an activation in between, the same at every position: max(0, x W_1 + b_1) W_2 + b_2.

    Args:
        config (`PreTrainedConfig`): The model's config.

    Source: Vaswani et al. 2017, 3.3.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = config.activation_dropout

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the network.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): The input.

        Returns:
            `torch.Tensor` of shape `(batch, length, d_model)`: the output.
        """
        inner = self.activation(self.fc1(hidden_states))  # (batch, length, d_ff)
        return self.fc2(dropout(inner, self.dropout, self.training))  # (batch, length, d_model)


class PostNormResidual(nn.Module):
    """Residual connection and norm around a sub-layer as the paper has them: LayerNorm(x + Dropout(Sublayer(x))).

    Args:
        config (`PreTrainedConfig`): The model's config.

    Source: Vaswani et al. 2017, 3.1 and 5.4.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = config.hidden_dropout_prob

    def forward(
        self,
        hidden_states: torch.Tensor,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        read_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the sub-layer inside the connection.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): The input.
            sublayer (`Callable`): Maps it to a tensor of its shape, or to `read_tokens` of it. Not a module:
                accelerate, which offloads modules, moves those that it finds among arguments.
            read_tokens (`torch.LongTensor` of shape `(read,)`, *optional*): Indices of the tokens whose output will be
                read, row after row; all by default.

        Returns:
            `torch.Tensor` of shape `(batch, length, d_model)` or `(1, read, d_model)`: the output.
        """
        return self._connect(take_tokens(hidden_states, read_tokens), hidden_states, sublayer)

    def _connect(
        self, residual: torch.Tensor, hidden_states: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        return self.layer_norm(residual + dropout(sublayer(hidden_states), self.dropout, self.training))


class PreNormResidual(PostNormResidual):
    """Residual connection with the norm before the sub-layer: x + Dropout(Sublayer(LayerNorm(x))).

    Args:
        config (`PreTrainedConfig`): The model's config.

    Source: Tensor2Tensor's `transformer_base_v2`; the Annotated Transformer. A stack of these needs a norm at its end.
    """

    def _connect(
        self, residual: torch.Tensor, hidden_states: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        return residual + dropout(sublayer(self.layer_norm(hidden_states)), self.dropout, self.training)


RESIDUALS = {"post": PostNormResidual, "pre": PreNormResidual}


class EncoderLayer(GradientCheckpointingLayer):
    """Self-attention and a feed-forward network, each inside a residual connection with norm.

    Args:
        config (`PreTrainedConfig`): The model's config.

    Source: Vaswani et al. 2017, 3.1.
    """

    accepts_packing = True

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        residual = RESIDUALS[config.norm_position]
        self.self_attn = SelfAttention(config)
        self.self_attn_residual = residual(config)
        self.feed_forward = PositionwiseFeedForward(config)
        self.feed_forward_residual = residual(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packing: Packing | None = None,
        read_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the layer.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): The sequence; with `packing`, its
                tokens `(1, tokens, d_model)`.
            attention_mask (`torch.Tensor`, *optional*): A mask made by transformers' mask helpers.
            packing (`Packing`, *optional*): Where the tokens belong, if padding is left out.
            read_tokens (`torch.LongTensor` of shape `(read,)`, *optional*): Indices of the tokens whose output will be
                read, row after row; all by default. All are attended to.
            **kwargs: Passed on to the attention kernel.

        Returns:
            `torch.Tensor`: the output, of the shape of `hidden_states` or `(1, read, d_model)`.
        """
        # 1. self-attention
        hidden_states = self.self_attn_residual(
            hidden_states,
            lambda inner: self.self_attn(inner, attention_mask, None, packing, read_tokens=read_tokens, **kwargs)[0],
            read_tokens,
        )
        # 2. feed-forward
        return self.feed_forward_residual(hidden_states, lambda inner: self.feed_forward(inner))
