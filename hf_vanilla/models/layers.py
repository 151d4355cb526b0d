"""The paper's bricks, in the order of its sections 3.1 to 3.5 (Vaswani et al. 2017).

Read it from the top: the layers come before their parts.

    3.1    residual connections with norm, encoder layer, decoder layer
    3.2.1  scaled dot-product attention
    3.2.2  multi-head attention
    3.2.3  attention of a sequence to itself, and of a target to its source
    3.3    position-wise feed-forward network
    3.5    positional encoding; 3.4, embeddings and softmax, is each model's own

Every brick takes the model's config and reads these names of it, most of them transformers' aliases:
`hidden_size`, `num_attention_heads`, `d_k`, `d_v`, `attention_scale`, `intermediate_size`, `hidden_act`,
`layer_norm_eps`, `hidden_dropout_prob`, `attention_probs_dropout_prob`, `activation_dropout`, `norm_position`,
`_attn_implementation`.

Shapes are written with these words: batch, src_len, tgt_len, query_len, key_len, heads, d_k, d_v, d_model, d_ff,
vocab; length where it may be either. d_k and d_v are the widths of one head's keys and values.

An attention mask says which positions see each other. It is what transformers' mask helpers make for the kernel that
the config names; or, for a packed batch, a `Packing`, in cross-attention a `CrossPacking`: hidden states then have
shape `(1, tokens, d_model)`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .dropout import Dropout, attention_dropout_rate
from .dropout import dropout as drop  # kernels have an argument of that name
from .packing import CrossPacking, Mask, Packing, gather_outputs
from .varlen_attention import unpad_source


# Up to this many keys, in training on a CPU, two matrix products and a softmax are faster than
# `scaled_dot_product_attention`, whose backward pass is made for long sequences. In 16 bits with dropout, which no
# fused kernel of a CPU has, they are faster at any length.
SHORT_SEQUENCE = 256


class PostNormResidual(nn.Module):
    """Residual connection and norm around a sub-layer as the paper has them: LayerNorm(x + Dropout(Sublayer(x))).

    ```python
    hidden_states = residual.after(hidden_states, sublayer(residual.before(hidden_states)))
    ```

    Args:
        config (`PreTrainedConfig`): The model's config.

    Source: Vaswani et al. 2017, 3.1 and 5.4.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def before(self, hidden_states: Tensor) -> Tensor:
        """Return the input of the sub-layer, of shape `(batch, length, d_model)`."""
        return hidden_states

    def after(self, hidden_states: Tensor, output: Tensor) -> Tensor:
        """Add the dropped-out output to the input, both of shape `(batch, length, d_model)`, and normalise."""
        return self.layer_norm(hidden_states + self.dropout(output))


class PreNormResidual(PostNormResidual):
    """Residual connection with the norm before the sub-layer: x + Dropout(Sublayer(LayerNorm(x))).

    Args:
        config (`PreTrainedConfig`): The model's config.

    Source: Tensor2Tensor's `transformer_base_v2`; the Annotated Transformer. A stack of these needs a norm at its end.
    """

    def before(self, hidden_states: Tensor) -> Tensor:
        """Return the input of the sub-layer, of shape `(batch, length, d_model)`."""
        return self.layer_norm(hidden_states)

    def after(self, hidden_states: Tensor, output: Tensor) -> Tensor:
        """Add the dropped-out output to the residual stream, both of shape `(batch, length, d_model)`."""
        return hidden_states + self.dropout(output)


RESIDUALS = {"post": PostNormResidual, "pre": PreNormResidual}


class EncoderLayer(GradientCheckpointingLayer):
    """Self-attention and a feed-forward network, each inside a residual connection with norm.

    Args:
        config (`PreTrainedConfig`): The model's config.
        layer_idx (`int`, defaults to 0): The layer's number, under which a cache keeps its keys and values.
        is_causal (`bool`, defaults to `False`): Whether no position sees a later one.

    Source: Vaswani et al. 2017, 3.1. With `is_causal` it is the layer of a decoder-only model, which has no source to
    attend to.
    """

    accepts_packing = True

    def __init__(self, config: PreTrainedConfig, layer_idx: int = 0, is_causal: bool = False):
        super().__init__()
        residual = RESIDUALS[config.norm_position]
        self.self_attn = SelfAttention(config, layer_idx, is_causal)
        self.self_attn_residual = residual(config)
        self.feed_forward = PositionwiseFeedForward(config)
        self.feed_forward_residual = residual(config)

    def forward(
        self, hidden_states: Tensor, attention_mask: Mask = None, past_key_values: Cache | None = None, **kwargs: Any
    ) -> Tensor:
        """Run the layer.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): The sequence.
            attention_mask (`Mask`, *optional*): Which positions see each other.
            past_key_values (`Cache`, *optional*): Keys and values of the positions before.
            **kwargs: Passed on to the attention kernel.

        Returns:
            `torch.Tensor` of shape `(batch, length, d_model)`: the output; `(1, outputs, d_model)` for a `Packing`
            that names outputs.
        """
        # 1. self-attention
        inner = self.self_attn_residual.before(hidden_states)
        attended, _ = self.self_attn(inner, attention_mask, past_key_values, **kwargs)
        hidden_states = self.self_attn_residual.after(gather_outputs(hidden_states, attention_mask), attended)
        # 2. feed-forward
        inner = self.feed_forward_residual.before(hidden_states)
        return self.feed_forward_residual.after(hidden_states, self.feed_forward(inner))


class DecoderLayer(GradientCheckpointingLayer):
    """Causal self-attention, cross-attention and a feed-forward network, each inside a residual connection with norm.

    Args:
        config (`PreTrainedConfig`): The model's config.
        layer_idx (`int`): The layer's number, under which a cache keeps its keys and values.

    Source: Vaswani et al. 2017, 3.1.
    """

    accepts_packing = True

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        residual = RESIDUALS[config.norm_position]
        self.self_attn = SelfAttention(config, layer_idx, is_causal=True)
        self.self_attn_residual = residual(config)
        self.cross_attn = CrossAttention(config, layer_idx)
        self.cross_attn_residual = residual(config)
        self.feed_forward = PositionwiseFeedForward(config)
        self.feed_forward_residual = residual(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Mask,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Mask = None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run the layer.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, tgt_len, d_model)`): The target.
            attention_mask (`Mask`): Which target positions see each other; `None`: all earlier ones.
            encoder_hidden_states (`torch.Tensor` of shape `(batch, src_len, d_model)`): The encoder's output.
            encoder_attention_mask (`Mask`, *optional*): Which source positions the target sees.
            past_key_values (`EncoderDecoderCache`, *optional*): Keys and values of earlier calls.
            **kwargs: Passed on to the attention kernel.

        Returns:
            `torch.Tensor` of shape `(batch, tgt_len, d_model)`: the output.
        """
        # 1. self-attention; no outputs are left out here: instead, `run_decoder` leaves out the ends of rows
        inner = self.self_attn_residual.before(hidden_states)
        attended, _ = self.self_attn(inner, attention_mask, past_key_values, **kwargs)
        hidden_states = self.self_attn_residual.after(hidden_states, attended)
        # 2. cross-attention
        inner = self.cross_attn_residual.before(hidden_states)
        attended, _ = self.cross_attn(inner, encoder_hidden_states, encoder_attention_mask, past_key_values, **kwargs)
        hidden_states = self.cross_attn_residual.after(hidden_states, attended)
        # 3. feed-forward
        inner = self.feed_forward_residual.before(hidden_states)
        return self.feed_forward_residual.after(hidden_states, self.feed_forward(inner))


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(Q K^T * scaling) V as the formula says, and return the weights too.

    Args:
        module (`nn.Module`): The attention module; its `is_causal` counts if there is no mask.
        query (`torch.Tensor` of shape `(batch, heads, query_len, d_k)`): Queries.
        key (`torch.Tensor` of shape `(batch, heads, key_len, d_k)`): Keys.
        value (`torch.Tensor` of shape `(batch, heads, key_len, d_v)`): Values.
        attention_mask (`torch.Tensor` of shape `(batch or 1, heads or 1, query_len or 1, key_len)`, *optional*):
            Boolean, true where a query may attend; or of another type, added to the scores.
        scaling (`float`): What the scores are multiplied with.
        dropout (`float`, defaults to 0.0): Probability that a weight is dropped.
        is_causal (`bool`, *optional*): In place of the module's.
        **kwargs: Not used.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: the output of shape `(batch, query_len, heads, d_v)`, and the weights of
        shape `(batch, heads, query_len, key_len)`.

    Source: Vaswani et al. 2017, 3.2.1. A fully masked query attends uniformly: the result is finite.
    """
    scores = torch.matmul(query * scaling, key.transpose(2, 3))  # (batch, heads, query_len, key_len)
    if attention_mask is None and query.shape[2] > 1 and (module.is_causal if is_causal is None else is_causal):
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        attention_mask = attention_mask.tril(key.shape[2] - query.shape[2])
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        # keeps rows finite: a mask may hold -inf, and float16 overflows
        scores = (scores + attention_mask).clamp(min=torch.finfo(scores.dtype).min)
    weights = nn.functional.softmax(scores, dim=-1)
    kept = drop(weights, dropout, training=True).to(value.dtype)
    return torch.matmul(kept, value).transpose(1, 2), weights  # the output as (batch, query_len, heads, d_v)


class MultiHeadAttention(nn.Module):
    """What self-attention and cross-attention have in common: heads side by side, concatenated and projected.

    MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W_O with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    Args:
        config (`PreTrainedConfig`): The model's config.
        layer_idx (`int`, defaults to 0): The layer's number, under which a cache keeps its keys and values.
        is_causal (`bool`, defaults to `False`): Whether no position sees a later one.

    Source: Vaswani et al. 2017, 3.2.2. Differs from the formula by biases, and from `nn.MultiheadAttention` by free
    d_k and d_v.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int = 0, is_causal: bool = False):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.heads, self.d_k, self.d_v = config.num_attention_heads, config.d_k, config.d_v
        self.scaling = self.d_k**-0.5 if config.attention_scale is None else config.attention_scale
        self.dropout = Dropout(config.attention_probs_dropout_prob)
        self.out_proj = nn.Linear(self.heads * self.d_v, config.hidden_size)

    def split_heads(self, projected: Tensor) -> Tensor:
        """Split projections (batch, length, heads * width) into heads: (batch, heads, length, width)."""
        return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run the attention kernel that the config names, or, in place of `sdpa`, the eager one where that is faster.

        In training on a CPU, plain products are faster with at most `SHORT_SEQUENCE` keys, and in 16 bits with dropout
        with any number. Empty tensors go there too, as not all of torch's kernels take them. Weights are returned only
        where the config names `eager`, so that their presence never depends on lengths.

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
        # Asks for training, not for gradients: a checkpointed layer runs once without them and once with them, and
        # must draw the same dropout both times.
        rate = attention_dropout_rate(self)
        is_short = key.shape[2] <= SHORT_SEQUENCE or (rate > 0 and key.dtype.itemsize < 4)
        products_are_faster = is_short and self.training and key.device.type == "cpu"
        if implementation == "sdpa" and (products_are_faster or 0 in query.shape or 0 in key.shape):
            kernel = eager_attention_forward
        output, weights = kernel(self, query, key, value, attention_mask, dropout=rate, scaling=self.scaling, **kwargs)
        return output, weights if implementation == "eager" else None


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


class SelfAttention(MultiHeadAttention):
    """Attention of a sequence to itself, with one matrix product for queries, keys and values.

    Args:
        config (`PreTrainedConfig`): The model's config.
        layer_idx (`int`, defaults to 0): The layer's number, under which a cache keeps its keys and values.
        is_causal (`bool`, defaults to `False`): Whether no position sees a later one.

    Source: Vaswani et al. 2017, 3.2.3.
    """

    accepts_packing = True

    def __init__(self, config: PreTrainedConfig, layer_idx: int = 0, is_causal: bool = False):
        super().__init__(config, layer_idx, is_causal)
        self.qkv_sizes = (self.heads * self.d_k, self.heads * self.d_k, self.heads * self.d_v)
        self.qkv_proj = FusedLinear(config.hidden_size, self.qkv_sizes)

    def forward(
        self, hidden_states: Tensor, attention_mask: Mask = None, past_key_values: Cache | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from every position to every position that the mask allows.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, query_len, d_model)`): The sequence, or its new part.
            attention_mask (`Mask`, *optional*): Which positions see each other.
            past_key_values (`Cache`, *optional*): Keys and values of the positions before; the new ones are added.
                Not used with a `Packing`.
            **kwargs: Passed on to the attention kernel.

        Returns:
            `tuple[torch.Tensor, torch.Tensor | None]`: the output of shape `(batch, query_len, d_model)`, or `(1,
            outputs, d_model)` for a `Packing` that names outputs; and the weights of shape `(batch, heads, query_len,
            key_len)` if the kernel is `eager`.
        """
        projected = self.qkv_proj(hidden_states)
        if isinstance(attention_mask, Packing):
            return self.out_proj(attention_mask.attend(self, self._attend_rows, projected, **kwargs)), None
        output, weights = self._attend_rows(projected, attention_mask, past_key_values, **kwargs)
        return self.out_proj(output), weights

    def _attend_rows(
        self, projected: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with queries, keys and values side by side: (batch, query_len, heads * d_v), and weights."""
        query, key, value = map(self.split_heads, projected.split(self.qkv_sizes, dim=-1))
        if past_key_values is not None:
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            key, value = past_key_values.update(key, value, self.layer_idx)  # (batch, heads, key_len, ...)
        output, weights = self.attend(query, key, value, attention_mask, **kwargs)
        return output.flatten(2), weights


class CrossAttention(MultiHeadAttention):
    """Attention of a target to its source, with one matrix product for keys and values.

    Several consecutive rows of the target may belong to one row of the source, as the beams of a sentence do. Such
    rows line up as one longer query, so that the keys and values of a source are computed and stored once.

    Args:
        config (`PreTrainedConfig`): The model's config.
        layer_idx (`int`, defaults to 0): The layer's number, under which a cache keeps its keys and values.

    Source: Vaswani et al. 2017, 3.2.3.
    """

    accepts_packing = True

    def __init__(self, config: PreTrainedConfig, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.d_k)
        self.kv_sizes = (self.heads * self.d_k, self.heads * self.d_v)
        self.kv_proj = FusedLinear(config.hidden_size, self.kv_sizes)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Mask = None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from every target position to every source position that the mask allows.

        Args:
            hidden_states (`torch.Tensor` of shape `(target batch, query_len, d_model)`): The target.
            encoder_hidden_states (`torch.Tensor` of shape `(batch, key_len, d_model)`): The source. The target's batch
                is this batch or a multiple of it.
            attention_mask (`Mask`, *optional*): Which source positions the target sees.
            past_key_values (`EncoderDecoderCache`, *optional*): Stores the source's keys and values at the first call
                and returns them at all others. Not used with a `CrossPacking`.
            **kwargs: Passed on to the attention kernel.

        Returns:
            `tuple[torch.Tensor, torch.Tensor | None]`: the output of the shape of `hidden_states`, and the weights of
            shape `(target batch, heads, query_len, key_len)` if the kernel is `eager`, padding included.
        """
        if isinstance(attention_mask, CrossPacking):
            states = (hidden_states, encoder_hidden_states)
            return self.out_proj(attention_mask.attend(self, self._attend_shared, *states, **kwargs)), None
        query = self.q_proj(hidden_states)  # (target batch, query_len, heads * d_k)
        key, value = self._keys_and_values(encoder_hidden_states, past_key_values)
        output, weights = self._attend_shared(query, key, value, attention_mask, **kwargs)
        return self.out_proj(output), weights

    def _keys_and_values(
        self, encoder_hidden_states: Tensor, past_key_values: EncoderDecoderCache | None
    ) -> tuple[Tensor, Tensor]:
        """Project the source, or take the projections from the cache: (batch, heads, key_len, d_k), (..., d_v)."""
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            layer = past_key_values.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values
        projected = self.kv_proj(encoder_hidden_states)  # (batch, key_len, heads * (d_k + d_v))
        key, value = map(self.split_heads, projected.split(self.kv_sizes, dim=-1))
        if past_key_values is not None:
            key, value = past_key_values.cross_attention_cache.update(key, value, self.layer_idx)
            past_key_values.is_updated[self.layer_idx] = True
        return key, value

    def _attend_shared(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with target rows that share a source row lined up as one query: (target batch, query_len, ...)."""
        target_batch, query_len, _ = query.shape
        batch = key.shape[0]
        rows = target_batch // batch if batch else 1
        query = self.split_heads(query.reshape(batch, rows * query_len, query.shape[2]))
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:  # flash attention
            key, value, lengths = unpad_source(query, key, value, attention_mask)
            attention_mask, kwargs = None, {**kwargs, **lengths}
        elif rows > 1 and isinstance(attention_mask, Tensor):
            attention_mask = attention_mask[:, :, :1]  # padding is the same to every query
        output, weights = self.attend(query, key, value, attention_mask, **kwargs)
        if weights is not None and rows > 1:
            weights = weights.unflatten(2, (rows, query_len)).transpose(1, 2).flatten(0, 1)
        return output.reshape(target_batch, query_len, self.heads * self.d_v), weights


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
        # the same function in one pass, which takes less than half of the time
        self.activation = ACT2FN["gelu_pytorch_tanh" if config.hidden_act == "gelu_new" else config.hidden_act]
        self.dropout = Dropout(config.activation_dropout)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the network.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): The input.

        Returns:
            `torch.Tensor` of shape `(batch, length, d_model)`: the output.
        """
        inner = self.activation(self.fc1(hidden_states))  # (batch, length, d_ff)
        return self.fc2(self.dropout(inner))  # (batch, length, d_model)


def sinusoidal_positions(position_ids: Tensor, d_model: int, position_type: str) -> Tensor:
    """Encode positions as sines and cosines of geometrically spaced wavelengths.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos(the same), in float32. Nothing is stored, so
    no position is too far.

    Args:
        position_ids (`torch.Tensor` of shape `(..., length)`): Positions, from 0.
        d_model (`int`): Width, an even number.
        position_type (`str`): `"sinusoidal"` interleaves sine and cosine as the paper does; `"sinusoidal_split"` puts
            all sines first, then all cosines; `"sinusoidal_t2t"` does so with Tensor2Tensor's wavelengths,
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
