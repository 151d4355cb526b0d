"""The encoder-decoder Transformer of Vaswani et al. 2017, "Attention Is All You Need", Figure 1.

        source ids                        target ids, shifted right
            |                                  |
    embedding * sqrt(d_model)          embedding * sqrt(d_model)
            | + positions                      | + positions
    +-------v--------+ x N             +-------v--------+ x N
    | self-attention |                 | self-attention |  masked: no position sees a later one
    |  add & norm    |                 |  add & norm    |
    | feed-forward   |                 |                |
    |  add & norm    |---- keys, ----->| cross-attention|
    +----------------+     values      |  add & norm    |
                                       | feed-forward   |
                                       |  add & norm    |
                                       +-------v--------+
                                       linear, softmax: the next token

Departures from the paper:
- None in the defaults, except where the paper is silent: the epsilon of LayerNorm (1e-6) and the initialisation
  (embeddings N(0, d_model^-0.5), Xavier for all matrices), which follow the authors' Tensor2Tensor code.
- On request only: pre-norm, learned or Tensor2Tensor positions, dropout at other places, untied embeddings, other
  attention scales, and two other kinds of label smoothing.
- In training, labelled tokens alone pass through the projection onto the vocabulary; the loss is the same.
- On a CPU, where a batch has padding, the layers work on its tokens alone; the encoder's output at padding is then 0.
"""

import inspect
import math
from typing import Any, cast

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerateEncoderDecoderOutput, GenerationConfig, GenerationMixin
from transformers.generation.utils import GenerateOutput
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .checks import IGNORED_LABEL, check_attention_mask, check_input_ids
from .chunked_loss import projected_cross_entropy_sum
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .dropout import dropout
from .layers import (
    RESIDUALS,
    CrossAttention,
    EncoderLayer,
    FusedLinear,
    PositionwiseFeedForward,
    SelfAttention,
    positions_of,
    sinusoidal_positions,
)
from .loss import cross_entropy_sum, freeze_row, select_labelled, smoothed_target
from .packing import Packing, pack_padding
from .seq2seq_generation import UNIVERSAL_MAX_LENGTH


class DecoderLayer(GradientCheckpointingLayer):
    """Causal self-attention, cross-attention and a feed-forward network, each inside a residual connection with norm.

    Args:
        config (`VanillaTransformerConfig`): The model's config.
        layer_idx (`int`): The layer's number, under which a cache keeps its keys and values.

    Source: Vaswani et al. 2017, 3.1.
    """

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
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
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        packing: Packing | None = None,
        source_packing: Packing | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the layer.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, tgt_len, d_model)`): The target; with `packing`, its tokens
                `(1, tokens, d_model)`.
            attention_mask (`torch.Tensor`, *optional*): A causal mask made by transformers' mask helpers.
            encoder_hidden_states (`torch.Tensor` of shape `(batch, src_len, d_model)`): The encoder's output; with
                `source_packing`, its tokens `(1, tokens, d_model)`.
            encoder_attention_mask (`torch.Tensor`, *optional*): A mask over the source.
            past_key_values (`EncoderDecoderCache`, *optional*): Keys and values of earlier calls.
            packing (`Packing`, *optional*): Where the target's tokens belong, if padding is left out.
            source_packing (`Packing`, *optional*): The same for the source.
            **kwargs: Passed on to the attention kernel.

        Returns:
            `torch.Tensor`: the output, of the shape of `hidden_states`.
        """
        # 1. self-attention
        hidden_states = self.self_attn_residual(
            hidden_states,
            lambda inner: self.self_attn(inner, attention_mask, past_key_values, packing, **kwargs)[0],
        )
        # 2. cross-attention
        hidden_states = self.cross_attn_residual(
            hidden_states,
            lambda inner: self.cross_attn(
                inner,
                encoder_hidden_states,
                encoder_attention_mask,
                past_key_values,
                packing,
                source_packing,
                **kwargs,
            )[0],
        )
        # 3. feed-forward
        return self.feed_forward_residual(hidden_states, lambda inner: self.feed_forward(inner))


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """What all models of the family share: initialisation, and what transformers may do with them."""

    config: VanillaTransformerConfig
    config_class = VanillaTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _no_split_modules = ["EncoderLayer", "DecoderLayer"]
    _skip_keys_device_placement = "past_key_values"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as Tensor2Tensor does: Xavier for matrices, N(0, d_model^-0.5) for embeddings, padding zero."""
        if isinstance(module, FusedLinear):
            module.init_xavier_uniform()
            init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.d_model**-0.5)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Name the tied parameters. Source and target may be one although `tie_word_embeddings` is false."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys or {})

    def _resize_token_embeddings(self, new_num_tokens: int, *args: Any) -> nn.Embedding:
        """Give source, target and projection the same new size, which two vocabularies don't have."""
        config = self.config
        if config.source_vocab_size not in (None, config.vocab_size):
            raise ValueError(
                "`resize_token_embeddings` can't resize two vocabularies, `source_vocab_size` "
                f"({config.source_vocab_size}) and `vocab_size` ({config.vocab_size}), to one size; build a model of "
                "the new sizes and copy the weights."
            )
        embeddings = super()._resize_token_embeddings(new_num_tokens, *args)
        if config.source_vocab_size is not None:
            config.source_vocab_size = embeddings.num_embeddings
        if (decoder := getattr(self.base_model, "decoder", None)) is not None:
            self._get_resized_embeddings(decoder.embed_tokens, new_num_tokens, *args)
        return embeddings

    def _look_up(
        self, prefix: str, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
    ) -> torch.Tensor:
        """Look up the embeddings (batch, length, d_model) of checked ids, or take those that are given."""
        if input_ids is not None and inputs_embeds is None:
            check_input_ids(f"{prefix}input_ids", input_ids, self.embed_tokens.num_embeddings)
            return self.embed_tokens(input_ids)
        if inputs_embeds is not None and input_ids is None:
            return inputs_embeds
        raise ValueError(f"Pass either `{prefix}input_ids` or `{prefix}inputs_embeds`: exactly one of them.")

    def _embed(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Scale embeddings by sqrt(d_model), add positions, drop: (batch, length, d_model). Paper, 3.4 and 3.5."""
        hidden_states = inputs_embeds * math.sqrt(self.config.d_model)
        if self.config.position_type == "learned":
            positions = self.embed_positions(position_ids)  # (batch or 1, length, d_model)
        else:
            positions = sinusoidal_positions(position_ids, self.config.d_model, self.config.position_type)
        return dropout(hidden_states + positions.to(hidden_states.dtype), self.config.dropout, self.training)

    def _check_length(self, length: int) -> None:
        """Refuse what a learned position table does not reach."""
        limit = self.config.max_position_embeddings
        if self.config.position_type == "learned" and length > limit:
            raise ValueError(
                f"A sequence of {length} positions exceeds `max_position_embeddings` ({limit}) of the learned "
                "positions; truncate the input or build a model with more."
            )


class VanillaTransformerEncoder(VanillaTransformerPreTrainedModel):
    """The encoder stack: `encoder_layers` layers, and with pre-norm one more norm.

    Args:
        config (`VanillaTransformerConfig`): The model's config.
    """

    _can_record_outputs = {
        "hidden_states": EncoderLayer,
        "attentions": OutputRecorder(SelfAttention, index=1),
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        vocab_size = config.vocab_size if config.source_vocab_size is None else config.source_vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model, padding_idx=config.pad_token_id)
        if config.position_type == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.d_model)
        self.layers = nn.ModuleList([EncoderLayer(config) for _ in range(config.encoder_layers)])
        is_pre = config.norm_position == "pre"
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if is_pre else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Encode the source.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, src_len)`, *optional*): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch, src_len)`, *optional*): 1 for tokens, 0 for padding on
                either side.
            inputs_embeds (`torch.Tensor` of shape `(batch, src_len, d_model)`, *optional*): Embeddings in place of
                `input_ids`, before they are scaled by sqrt(d_model).
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `BaseModelOutput`: `last_hidden_state` of shape `(batch, src_len, d_model)`, at padding zero or a number
            that means nothing, and what was asked for.

        Raises:
            ValueError: if not exactly one of `input_ids` and `inputs_embeds` is given, an id is outside the
                vocabulary, the mask has another shape, or learned positions don't reach.
            TypeError: if `input_ids` are no integers.
        """
        inputs_embeds = self._look_up("", input_ids, inputs_embeds)
        batch, src_len, _ = inputs_embeds.shape
        check_attention_mask("attention_mask", attention_mask, batch, src_len)
        self._check_length(src_len)

        hidden_states = self._embed(inputs_embeds, positions_of(attention_mask, src_len, 0, inputs_embeds.device))
        packing = pack_padding(self.layers, self.config, hidden_states, attention_mask, **kwargs)
        if packing is not None:
            hidden_states = packing.pack(hidden_states)  # (1, tokens, d_model)
        else:
            attention_mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
            )
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, packing=packing, **kwargs)
        hidden_states = self.norm(hidden_states)
        return BaseModelOutput(last_hidden_state=hidden_states if packing is None else packing.unpack(hidden_states))


class VanillaTransformerDecoder(VanillaTransformerPreTrainedModel):
    """The decoder stack: `decoder_layers` layers, and with pre-norm one more norm.

    Args:
        config (`VanillaTransformerConfig`): The model's config.
    """

    _can_record_outputs = {
        "hidden_states": DecoderLayer,
        "attentions": OutputRecorder(SelfAttention, index=1),
        "cross_attentions": OutputRecorder(CrossAttention, index=1),
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, padding_idx=config.pad_token_id)
        if config.position_type == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.d_model)
        self.layers = nn.ModuleList([DecoderLayer(config, layer_idx) for layer_idx in range(config.decoder_layers)])
        is_pre = config.norm_position == "pre"
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if is_pre else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        packing: Packing | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode the target against the encoded source.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, tgt_len)`, *optional*): Target tokens, shifted right; with
                a cache those that are new.
            attention_mask (`torch.Tensor` of shape `(batch, past_len + tgt_len)`, *optional*): 1 for tokens, 0 for
                padding.
            encoder_hidden_states (`torch.Tensor` of shape `(batch, src_len, d_model)`): The encoder's output. Where
                several consecutive target rows share a source, as beams do, one row for all of them.
            encoder_attention_mask (`torch.Tensor` of shape `(batch, src_len)`, *optional*): 1 for tokens, 0 for
                padding.
            past_key_values (`EncoderDecoderCache`, *optional*): Keys and values of the positions before.
            inputs_embeds (`torch.Tensor` of shape `(batch, tgt_len, d_model)`, *optional*): Embeddings in place of
                `input_ids`, before they are scaled by sqrt(d_model).
            use_cache (`bool`, *optional*): Whether to return keys and values; the config's `use_cache` by default.
            packing (`Packing`, *optional*): Where the target's tokens are, if that is known although there is no mask.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `BaseModelOutputWithPastAndCrossAttentions`: `last_hidden_state` of shape `(batch, tgt_len, d_model)`, and
            what was asked for.

        Raises:
            ValueError: if not exactly one of `input_ids` and `inputs_embeds` is given, `encoder_hidden_states` are
                missing or don't fit the batch, an id is outside the vocabulary, a mask has another shape, or learned
                positions don't reach.
            TypeError: if `input_ids` are no integers, or `past_key_values` is another kind of cache.
        """
        inputs_embeds = self._look_up("decoder_", input_ids, inputs_embeds)
        if encoder_hidden_states is None:
            raise ValueError("`encoder_hidden_states` is missing: the decoder needs the encoder's output.")
        if past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache):
            raise TypeError(
                "`past_key_values` must be an `EncoderDecoderCache`, which has a cache for the source too, "
                f"got {type(past_key_values).__name__}."
            )
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        self_cache = None if past_key_values is None else past_key_values.self_attention_cache
        past_len = 0 if self_cache is None else self_cache.get_seq_length()
        batch, tgt_len, _ = inputs_embeds.shape
        sources, src_len, _ = encoder_hidden_states.shape
        if sources != batch and (sources == 0 or batch % sources):
            raise ValueError(
                f"`encoder_hidden_states` must have as many rows as `decoder_input_ids` ({batch}), or a whole number "
                f"of target rows for each; got {sources}."
            )
        check_attention_mask("attention_mask", encoder_attention_mask, sources, src_len)
        if isinstance(past_len, int) or not torch.compiler.is_compiling():  # compiled code can't ask a static cache
            check_attention_mask("decoder_attention_mask", attention_mask, batch, past_len + tgt_len)
            self._check_length(past_len + tgt_len)

        position_ids = positions_of(attention_mask, tgt_len, past_len, inputs_embeds.device)
        hidden_states = self._embed(inputs_embeds, position_ids)
        source_packing = None
        if past_key_values is None and sources == batch:
            source_packing = pack_padding(
                self.layers, self.config, encoder_hidden_states, encoder_attention_mask, **kwargs
            )
        if packing is not None:
            hidden_states = packing.pack(hidden_states)  # (1, tokens, d_model)
        else:
            attention_mask = create_causal_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=attention_mask,
                past_key_values=self_cache,
            )
        encoder_attention_mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
        )
        if source_packing is not None:
            encoder_hidden_states = source_packing.pack(encoder_hidden_states)  # (1, source tokens, d_model)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                past_key_values,
                packing,
                source_packing,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states if packing is None else packing.unpack(hidden_states),
            past_key_values=past_key_values,
        )


class VanillaTransformerModel(VanillaTransformerPreTrainedModel):
    """Encoder and decoder, without the output projection.

    Args:
        config (`VanillaTransformerConfig`): The model's config.
    """

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.encoder = VanillaTransformerEncoder(config)
        self.decoder = VanillaTransformerDecoder(config)
        if config.share_encoder_decoder_embeddings:
            self._tied_weights_keys = {"encoder.embed_tokens.weight": "decoder.embed_tokens.weight"}
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the source embedding, which is the target's too where they are shared."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the source embedding, and the target's where they are shared."""
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        decoder_packing: Packing | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """Encode the source and decode the target.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, src_len)`, *optional*): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch, src_len)`, *optional*): 1 for tokens, 0 for padding.
            decoder_input_ids (`torch.LongTensor` of shape `(batch, tgt_len)`, *optional*): Target tokens, shifted
                right.
            decoder_attention_mask (`torch.Tensor` of shape `(batch, tgt_len)`, *optional*): 1 for tokens, 0 for
                padding.
            encoder_outputs (`BaseModelOutput` or `tuple`, *optional*): What the encoder returned, if it has run.
            past_key_values (`EncoderDecoderCache`, *optional*): Keys and values of earlier calls.
            inputs_embeds (`torch.Tensor` of shape `(batch, src_len, d_model)`, *optional*): In place of `input_ids`.
            decoder_inputs_embeds (`torch.Tensor` of shape `(batch, tgt_len, d_model)`, *optional*): In place of
                `decoder_input_ids`.
            use_cache (`bool`, *optional*): Whether to return keys and values.
            decoder_packing (`Packing`, *optional*): Where the target's tokens are, if that is known although there is
                no mask.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `Seq2SeqModelOutput`: `last_hidden_state` of shape `(batch, tgt_len, d_model)` and
            `encoder_last_hidden_state` of shape `(batch, src_len, d_model)`, and what was asked for.

        Raises:
            ValueError: if source and target have not the same number of rows; or as encoder and decoder do.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
            self._check_batch(encoder_outputs.last_hidden_state, decoder_input_ids, decoder_inputs_embeds)
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs[:3])
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            packing=decoder_packing,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )

    def _check_batch(
        self, source: torch.Tensor, decoder_input_ids: torch.Tensor | None, decoder_inputs_embeds: torch.Tensor | None
    ) -> None:
        """Refuse to pair sources with another number of targets. Only who brings `encoder_outputs` may share them."""
        target = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
        if target is not None and target.shape[0] != source.shape[0]:
            raise ValueError(
                f"Source and target must have the same number of rows, got {source.shape[0]} rows of `input_ids` and "
                f"{target.shape[0]} of `decoder_input_ids` or `labels`."
            )


class VanillaTransformerForConditionalGeneration(VanillaTransformerPreTrainedModel, GenerationMixin):
    """The whole model: encoder, decoder and the projection onto the vocabulary, for translation and the like.

    Args:
        config (`VanillaTransformerConfig`): The model's config.

    Example:
    ```python
    >>> import torch
    >>> from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
    >>> config = VanillaTransformerConfig(vocab_size=11, d_model=16, d_ff=32, num_heads=4, encoder_layers=1)
    >>> model = VanillaTransformerForConditionalGeneration(config).eval()
    >>> source = torch.tensor([[3, 4, 5, 2], [6, 7, 2, 0]])
    >>> outputs = model(source, attention_mask=(source != 0).long(), labels=torch.tensor([[8, 2], [9, 2]]))
    >>> outputs.logits.shape
    torch.Size([2, 2, 11])

    ```
    """

    supports_fast_search = True  # by the side-by-side decoder and the CPU layers of `hf_vanilla.generation`

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.model = VanillaTransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        tied = {}
        if config.share_encoder_decoder_embeddings:
            tied["model.encoder.embed_tokens.weight"] = "model.decoder.embed_tokens.weight"
        if config.tie_word_embeddings:
            tied["lm_head.weight"] = "model.decoder.embed_tokens.weight"
        self._tied_weights_keys = tied
        self.post_init()
        self.generation_config.suppress_tokens = [config.pad_token_id]

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Predict the target, and with `labels` compute the loss.

        The loss is the mean over labelled tokens; or, if `num_items_in_batch` is given as transformers' Trainer does,
        their sum divided by it, so that accumulated batches and several processes give the gradient of one large
        batch. Labels are smoothed in training mode only; there, with `labels`, only labelled positions are projected
        onto the vocabulary, and `logits` is `None`.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, src_len)`, *optional*): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch, src_len)`, *optional*): 1 for tokens, 0 for padding.
            decoder_input_ids (`torch.LongTensor` of shape `(batch, tgt_len)`, *optional*): Target tokens, shifted
                right; made from `labels` by default.
            decoder_attention_mask (`torch.Tensor` of shape `(batch, tgt_len)`, *optional*): 1 for tokens, 0 for
                padding.
            encoder_outputs (`BaseModelOutput` or `tuple`, *optional*): What the encoder returned, if it has run.
            past_key_values (`EncoderDecoderCache`, *optional*): Keys and values of earlier calls.
            inputs_embeds (`torch.Tensor` of shape `(batch, src_len, d_model)`, *optional*): In place of `input_ids`.
            decoder_inputs_embeds (`torch.Tensor` of shape `(batch, tgt_len, d_model)`, *optional*): In place of
                `decoder_input_ids`.
            labels (`torch.LongTensor` of shape `(batch, tgt_len)`, *optional*): Target tokens, not shifted; -100 is
                ignored.
            use_cache (`bool`, *optional*): Whether to return keys and values.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): Labelled tokens of the whole optimizer step.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `Seq2SeqLMOutput`: `loss` of shape `()` in nats, `logits` of shape `(batch, tgt_len, vocab)`, and what was
            asked for.

        Raises:
            ValueError: if a label is outside the vocabulary, or `labels` has another shape than the decoder's input.
        """
        if labels is not None:
            use_cache = False
            check_input_ids("labels", labels.masked_fill(labels == IGNORED_LABEL, 0), self.config.vocab_size)
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            target = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
            if decoder_attention_mask is None and past_key_values is None and target is not None:
                kwargs["decoder_packing"] = self._pack_labelled(labels, target, **kwargs)
        outputs: Seq2SeqModelOutput = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        loss, logits = self._loss_and_logits(outputs.last_hidden_state, labels, num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def _pack_labelled(self, labels: torch.Tensor, target: torch.Tensor, **kwargs: Any) -> Packing | None:
        """Leave out, in training, what stands behind the last label of a row: nothing depends on it."""
        if not self.training or labels.shape != target.shape[:2]:
            return None
        needed = (labels != IGNORED_LABEL).flip(1).cummax(1).values.flip(1)
        return pack_padding(self.model.decoder.layers, self.config, target, needed, **kwargs)

    def _loss_and_logits(
        self, hidden_states: torch.Tensor, labels: torch.Tensor | None, num_items_in_batch: torch.Tensor | int | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Compute the loss if there are labels, and the logits (batch, tgt_len, vocab) unless training needs none."""
        if labels is None:
            return None, self._project(hidden_states)
        if labels.shape != hidden_states.shape[:2]:
            raise ValueError(
                "`labels` must have the shape of the decoder's input, (batch, tgt_len) = "
                f"{tuple(hidden_states.shape[:2])}, got {tuple(labels.shape)}."
            )
        config, logits = self.config, None
        smoothing = config.label_smoothing if self.training else 0.0
        target = smoothed_target(smoothing, config.label_smoothing_type, config.vocab_size, config.pad_token_id)
        weight = self._differentiable_weight() if self.training else None
        if weight is not None:
            labelled, words = select_labelled(hidden_states, labels)  # (tokens, d_model), (tokens,)
            loss = projected_cross_entropy_sum(labelled, weight, self.lm_head.bias, words, target)
        else:
            logits = self._project(hidden_states)
            loss = cross_entropy_sum(logits, labels, target)
        if num_items_in_batch is None:
            num_items_in_batch = (labels != IGNORED_LABEL).sum()
        if isinstance(num_items_in_batch, torch.Tensor):
            return loss / num_items_in_batch.to(loss.device).clamp(min=1), logits
        return loss / max(num_items_in_batch, 1), logits

    def _differentiable_weight(self) -> torch.Tensor | None:
        """Return the projection's weight, its padding row frozen if it is an embedding too.

        Is `None` where a product with that weight is not all that the projection does, as with a LoRA adapter.
        """
        if type(self.lm_head) is not nn.Linear or hasattr(self.lm_head, "_hf_hook"):
            return None
        weight = self.lm_head.weight
        return freeze_row(weight, self.config.pad_token_id) if self.config.tie_word_embeddings else weight

    def _project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the logits (batch, tgt_len, vocab)."""
        weight = self._differentiable_weight() if torch.is_grad_enabled() else None
        if weight is not None:
            return nn.functional.linear(hidden_states, weight, self.lm_head.bias)
        logits = self.lm_head(hidden_states)
        if hasattr(self.lm_head, "_hf_hook") and self.config.tie_word_embeddings and logits.requires_grad:
            # accelerate moves tensors between the devices of the layers: freeze padding from the outside.
            padding = torch.tensor([self.config.pad_token_id], device=logits.device)
            logits.register_hook(lambda gradient: gradient.index_fill(-1, padding, 0.0))
        return logits

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Shift labels right: what the decoder reads when it is to write them (`DataCollatorForSeq2Seq` calls this).

        Args:
            labels (`torch.LongTensor` of shape `(batch, tgt_len)`): Target tokens; -100 becomes padding.

        Returns:
            `torch.LongTensor` of shape `(batch, tgt_len)`: `decoder_start_token_id` and all labels but the last.
        """
        start = torch.full_like(labels[:, :1], cast(int, self.config.decoder_start_token_id))
        shifted = torch.cat((start, labels[:, :-1]), dim=1)
        return shifted.masked_fill(shifted == IGNORED_LABEL, self.config.pad_token_id)

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> GenerateOutput | torch.LongTensor:
        """Generate targets: transformers' `generate`, which documents all arguments, with two things defined.

        The default maximum length is that of the source plus 50 tokens (paper, 6.1). And nothing is translated to
        nothing: a batch without sentences gives no sequences, sentences of length 0 give sequences that end at once.

        Args:
            inputs (`torch.Tensor` of shape `(batch, src_len)`, *optional*): Source tokens; may also be given as
                `input_ids` or, embedded, as `inputs_embeds`.
            generation_config (`GenerationConfig`, *optional*): Options; single ones can be given as keyword arguments.
            *args: Passed on.
            **kwargs: Passed on.

        Returns:
            `torch.LongTensor` of shape `(batch * num_return_sequences, tgt_len)`: the sequences, from
            `decoder_start_token_id`; or, with `return_dict_in_generate`, transformers' output classes.
        """
        if self.generation_config.max_length == UNIVERSAL_MAX_LENGTH:
            self.generation_config.max_length = None  # `Seq2SeqTrainer` writes it there, and a checkpoint keeps it
        sources = (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        source = next((given for given in sources if given is not None), None)
        if source is None or 0 not in source.shape[:2]:
            return super().generate(inputs, generation_config, *args, **kwargs)
        options, _ = self._prepare_generation_config(generation_config, **kwargs)
        end = options.eos_token_id[0] if isinstance(options.eos_token_id, list) else options.eos_token_id
        sequence = [options.decoder_start_token_id] if end is None else [options.decoder_start_token_id, end]
        rows = source.shape[0] * options.num_return_sequences
        sequences = torch.tensor(sequence, device=source.device).repeat(rows, 1)
        if (streamer := kwargs.get("streamer")) is not None:
            streamer.end()
        return GenerateEncoderDecoderOutput(sequences=sequences) if options.return_dict_in_generate else sequences

    def _extract_generation_mode_kwargs(
        self,
        custom_generate: Any,
        kwargs: dict[str, Any],
        synced_gpus: bool | None,
        assistant_model: Any,
        streamer: Any,
    ) -> dict[str, Any]:
        """Hand a streamer to a `custom_generate` that takes one: transformers doesn't, so its consumer never ends."""
        extracted = super()._extract_generation_mode_kwargs(
            custom_generate, kwargs, synced_gpus, assistant_model, streamer
        )
        if streamer is None or not callable(custom_generate):
            return extracted
        takes_streamer = "streamer" in inspect.signature(custom_generate).parameters
        return {**extracted, "streamer": streamer} if takes_streamer else extracted

    def _reorder_cache(self, past_key_values: EncoderDecoderCache, beam_idx: torch.Tensor) -> EncoderDecoderCache:
        """Let the beams' pasts follow them. Beams of a sentence share their source, so that stays where it is."""
        past_key_values.self_attention_cache.reorder_cache(beam_idx)
        return past_key_values

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Give each sentence `expand_size` target rows; they share one source where attention can do so."""
        if expand_size < 1:
            raise ValueError(f"`num_beams` or `num_return_sequences` must be at least 1, got {expand_size}.")
        if self.config._attn_implementation not in ("eager", "sdpa"):
            return super()._expand_inputs_for_generation(
                expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **model_kwargs
            )
        shared: dict[str, Any] = {
            name: model_kwargs.pop(name) for name in ("encoder_outputs", "attention_mask") if name in model_kwargs
        }
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size=expand_size, input_ids=input_ids, **model_kwargs
        )
        return input_ids, {**model_kwargs, **shared}

    def _prepare_generated_length(
        self, generation_config: GenerationConfig, has_default_max_length: bool, *args: Any, **kwargs: Any
    ) -> GenerationConfig:
        """Let a translation be up to 50 tokens longer than its source unless the user says otherwise (paper, 6.1)."""
        # The last token is never read, so it needs no position.
        limit = self.config.max_position_embeddings + 1 if self.config.position_type == "learned" else math.inf
        if has_default_max_length and generation_config.max_new_tokens is None:
            longest = kwargs["inputs_tensor"].shape[1] + 50
            generation_config.max_new_tokens = int(min(longest, limit - kwargs["input_ids_length"]))
        generation_config = super()._prepare_generated_length(
            generation_config, has_default_max_length, *args, **kwargs
        )
        if generation_config.max_length > limit:
            raise ValueError(
                f"`max_length` ({generation_config.max_length}, the decoder's start and `max_new_tokens`) must "
                f"not exceed {limit}: the decoder reads all but the last token, and `max_position_embeddings` of its "
                f"learned positions is {self.config.max_position_embeddings}."
            )
        return generation_config


# What each Auto class is to load, here and from a checkpoint that carries this file.
AUTO_CLASSES: dict[str, type[VanillaTransformerPreTrainedModel]] = {
    "AutoModel": VanillaTransformerModel,
    "AutoModelForSeq2SeqLM": VanillaTransformerForConditionalGeneration,
}


__all__ = [
    "AUTO_CLASSES",
    "VanillaTransformerDecoder",
    "VanillaTransformerEncoder",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
]
