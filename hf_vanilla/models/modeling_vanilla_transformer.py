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
- In the defaults: the projections of attention have biases, which the formulas of 3.2.2 do not show; the embedding of
  padding is zero and stays zero, and padding is never generated; the length limit of `generate()` is relative to the
  longest source of a batch.
- Where the paper is silent, the authors' Tensor2Tensor code decides: the epsilon of LayerNorm (1e-6), embeddings of
  standard deviation d_model^-0.5, Xavier's initialisation for all matrices.
- On request only: pre-norm, learned or Tensor2Tensor positions, dropout at other places, untied embeddings, other
  attention scales, and two other kinds of label smoothing.
- In training, labelled tokens alone pass through the projection onto the vocabulary; the loss is the same.
- The encoder's output at padding is 0 unless it is asked for. Where a batch has padding, the layers work on its tokens
  alone.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import (
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
    GenerationConfig,
)
from transformers.generation.utils import GenerateOutput
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils.generic import ModelOutput, TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .cache_names import CACHE_NAME, takes_both_cache_names
from .checks import (
    IGNORED_LABEL,
    VOCABULARY_HINT,
    check_arguments,
    check_attention_mask,
    check_input_ids,
    check_labels,
    check_length,
    check_shape,
    check_states,
    checked_embeddings,
    embedding_sizes,
    position_limit,
)
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .dropout import Dropout
from .layers import CrossAttention, DecoderLayer, EncoderLayer, FusedLinear, SelfAttention, sinusoidal_positions
from .loss import smoothed_target, token_loss
from .packing import run_decoder, run_encoder
from .read_positions import labelled_positions, step_sizes
from .self_contained import StreamingGenerationMixin, VanillaPreTrainedModel, final_norm
from .sequences import positions_of


# The maximum that `Seq2SeqTrainer` writes into a `generation_config` without one: it counts as unset.
TRANSFORMERS_MAX_LENGTH = 20


class VanillaTransformerPreTrainedModel(VanillaPreTrainedModel):
    """What all models of the family share: initialisation, and what transformers may do with them."""

    config: VanillaTransformerConfig
    base_model_prefix = "model"
    _no_split_modules = ["EncoderLayer", "DecoderLayer"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as Tensor2Tensor does: Xavier for matrices, standard deviation d_model^-0.5 for embeddings."""
        if isinstance(module, FusedLinear):
            module.init_xavier_uniform()
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        super()._init_weights(module)

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


class VanillaTransformerStack(VanillaTransformerPreTrainedModel):
    """What both stacks share: embeddings with positions, layers, and with pre-norm one more norm.

    Args:
        config (`VanillaTransformerConfig`): The model's config.
        vocab_size (`int`): Rows of the embedding.
        layer_class (`type`): Class of the layers.
        num_layers (`int`): Number of layers.
    """

    def __init__(self, config: VanillaTransformerConfig, vocab_size: int, layer_class: Any, num_layers: int):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model, padding_idx=config.pad_token_id)
        if config.position_type == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList([layer_class(config, number) for number in range(num_layers)])
        self.norm = final_norm(config)  # applied by `run_encoder` and `run_decoder`
        self.post_init()

    def embed(self, inputs_embeds: Tensor, position_ids: Tensor) -> Tensor:
        """Scale embeddings by sqrt(d_model), add positions, drop.

        Args:
            inputs_embeds (`torch.Tensor` of shape `(batch, length, d_model)`): Embeddings.
            position_ids (`torch.LongTensor` of shape `(batch or 1, length)`): Their positions.

        Returns:
            `torch.Tensor` of shape `(batch, length, d_model)`: the input of the first layer.

        Source: Vaswani et al. 2017, 3.4 and 3.5.
        """
        hidden_states = inputs_embeds * math.sqrt(self.config.d_model)
        if self.config.position_type == "learned":
            positions = self.embed_positions(position_ids)  # (batch or 1, length, d_model)
        else:
            positions = sinusoidal_positions(position_ids, self.config.d_model, self.config.position_type)
        return self.dropout(hidden_states + positions.to(hidden_states.dtype))


def refuse_flattened(arguments: dict[str, Any]) -> None:
    """Refuse what transformers' `DataCollatorWithFlattening` gives for rows of several sequences.

    Args:
        arguments (`dict[str, Any]`): Arguments of an encoder or decoder by name.

    Raises:
        ValueError: if positions or offsets are among them.
    """
    for name in ("cu_seq_lens_q", "position_ids"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"`{name}` must not be given: a row of source or target holds one sequence, with positions from 0; "
                "pad instead, as with `DataCollatorForSeq2Seq`. Padding is left out of the computation."
            )


class VanillaTransformerEncoder(VanillaTransformerStack):
    """The encoder stack: `encoder_layers` layers, and with pre-norm one more norm.

    Args:
        config (`VanillaTransformerConfig`): The model's config.
    """

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, config.source_vocab_size or config.vocab_size, EncoderLayer, config.encoder_layers)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        keep_padding: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode the source.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, src_len)`, *optional*): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch, src_len)`, *optional*): Not 0 for tokens, 0 for
                padding on either side.
            inputs_embeds (`torch.Tensor` of shape `(batch, src_len, d_model)`, *optional*): Embeddings in place of
                `input_ids`, before they are scaled by sqrt(d_model).
            keep_padding (`bool`, defaults to `False`): Whether the output at padding is computed, too.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `BaseModelOutput`: `last_hidden_state` of shape `(batch, src_len, d_model)`, zero at padding in eager,
            compiled and exported code alike unless it is kept, and what was asked for.

        Raises:
            ValueError: if not exactly one of `input_ids` and `inputs_embeds` is given, an id is outside the
                vocabulary, the mask has another shape, learned positions don't reach, or a row is to hold several
                sequences.
            TypeError: if `input_ids` are no integers.
        """
        refuse_flattened(cast(dict, kwargs))
        inputs_embeds = checked_embeddings(self.embed_tokens, input_ids, inputs_embeds)
        batch, src_len, _ = inputs_embeds.shape
        check_attention_mask("attention_mask", attention_mask, batch, src_len)
        check_length(src_len, position_limit(self.config))

        hidden_states = self.embed(inputs_embeds, positions_of(attention_mask, src_len, 0, inputs_embeds.device))
        # the layers, and after them the norm of pre-norm
        return BaseModelOutput(run_encoder(self, hidden_states, attention_mask, keep_padding, **kwargs)[0])


class VanillaTransformerDecoder(VanillaTransformerStack):
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
        super().__init__(config, config.vocab_size, DecoderLayer, config.decoder_layers)

    @takes_both_cache_names
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        read_positions: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode the target against the encoded source.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, tgt_len)`, *optional*): Target tokens, shifted right; with
                a cache those that are new.
            attention_mask (`torch.Tensor` of shape `(batch, past_length + tgt_len)`, *optional*): Not 0 for tokens, 0
                for padding.
            encoder_hidden_states (`torch.Tensor` of shape `(batch, src_len, d_model)`): The encoder's output. Where
                several consecutive target rows share a source, as beams do, one row for all of them (attention `eager`
                or `sdpa`, no mask of four dimensions).
            encoder_attention_mask (`torch.Tensor` of shape `(batch, src_len)`, *optional*): Not 0 for tokens, 0
                for padding.
            past_key_values (`EncoderDecoderCache`, *optional*): Keys and values of the positions before.
            inputs_embeds (`torch.Tensor` of shape `(batch, tgt_len, d_model)`, *optional*): Embeddings in place of
                `input_ids`, before they are scaled by sqrt(d_model).
            use_cache (`bool`, *optional*): Whether to return keys and values; the config's `use_cache` by default.
            read_positions (`torch.Tensor` of shape `(batch, tgt_len)`, *optional*): Not 0 where `last_hidden_state`
                is read, by default everywhere. After a row's last such position it may be 0.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `BaseModelOutputWithPastAndCrossAttentions`: `last_hidden_state` of shape `(batch, tgt_len, d_model)`, and
            what was asked for.

        Raises:
            ValueError: if not exactly one of `input_ids` and `inputs_embeds` is given, `encoder_hidden_states` are
                missing or don't fit the batch, an id is outside the vocabulary, a mask has another shape, or learned
                positions don't reach, a row is to hold several sequences, or a cache is given by both its names.
            TypeError: if `input_ids` are no integers, or `past_key_values` is another kind of cache.
        """
        refuse_flattened(cast(dict, kwargs))
        inputs_embeds = checked_embeddings(self.embed_tokens, input_ids, inputs_embeds, "decoder_")
        if encoder_hidden_states is None:
            raise ValueError("`encoder_hidden_states` is missing: the decoder needs the encoder's output.")
        check_states("encoder_hidden_states", encoder_hidden_states, self.config.d_model)
        if past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache):
            raise TypeError(
                f"`{CACHE_NAME}` must be an `EncoderDecoderCache`, which has a cache for the source too, "
                f"got {type(past_key_values).__name__}."
            )
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        batch, tgt_len, _ = inputs_embeds.shape
        sources, src_len, _ = encoder_hidden_states.shape
        if sources != batch and (sources == 0 or batch % sources):
            raise ValueError(
                f"`encoder_hidden_states` must have as many rows as `decoder_input_ids` ({batch}), or a whole number "
                f"of target rows for each; got {sources}."
            )
        if sources != batch and isinstance(encoder_attention_mask, Tensor) and encoder_attention_mask.dim() == 4:
            raise ValueError("`encoder_attention_mask` must have shape (batch, src_len) where targets share a source.")
        check_attention_mask("attention_mask", encoder_attention_mask, sources, src_len)
        if isinstance(past_length, int) or not torch.compiler.is_compiling():  # compiled code can't ask a static cache
            check_attention_mask("decoder_attention_mask", attention_mask, batch, past_length + tgt_len)
            check_length(past_length + tgt_len, position_limit(self.config))

        position_ids = positions_of(attention_mask, tgt_len, past_length, inputs_embeds.device)
        hidden_states = self.embed(inputs_embeds, position_ids)
        # the layers, and after them the norm of pre-norm
        hidden_states = run_decoder(
            self,
            hidden_states,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            past_key_values,
            read_positions,
            **kwargs,
        )
        return BaseModelOutputWithPastAndCrossAttentions(hidden_states, past_key_values)


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

    @takes_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        decoder_read_positions: Tensor | None = None,
        keep_padding: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode the source and decode the target.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, src_len)`, *optional*): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch, src_len)`, *optional*): Not 0 for tokens, 0 for
                padding.
            decoder_input_ids (`torch.LongTensor` of shape `(batch, tgt_len)`, *optional*): Target tokens, shifted
                right.
            decoder_attention_mask (`torch.Tensor` of shape `(batch, tgt_len)`, *optional*): Not 0 for tokens, 0
                for padding.
            encoder_outputs (`BaseModelOutput` or `tuple`, *optional*): What the encoder returned, if it has run.
            past_key_values (`EncoderDecoderCache`, *optional*): Keys and values of earlier calls.
            inputs_embeds (`torch.Tensor` of shape `(batch, src_len, d_model)`, *optional*): In place of `input_ids`.
            decoder_inputs_embeds (`torch.Tensor` of shape `(batch, tgt_len, d_model)`, *optional*): In place of
                `decoder_input_ids`.
            use_cache (`bool`, *optional*): Whether to return keys and values.
            decoder_read_positions (`torch.Tensor` of shape `(batch, tgt_len)`, *optional*): Not 0 where
                `last_hidden_state` is read, by default everywhere. After a row's last such position it may be 0.
            keep_padding (`bool`, defaults to `False`): As for the encoder.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `Seq2SeqModelOutput`: `last_hidden_state` of shape `(batch, tgt_len, d_model)` and
            `encoder_last_hidden_state` of shape `(batch, src_len, d_model)`, and what was asked for.

        Raises:
            ValueError: if source and target have not the same number of rows, or a row is to hold several pairs; or as
                encoder and decoder do.
            TypeError: as encoder and decoder do, or if `encoder_outputs` are none.
        """
        check_arguments(decoder_input_ids=decoder_input_ids, decoder_inputs_embeds=decoder_inputs_embeds)
        target = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
        if encoder_outputs is None:
            inputs = (input_ids, attention_mask, inputs_embeds, keep_padding)
            encoder_outputs = self.encoder(*inputs, return_dict=True, **kwargs)
            rows = encoder_outputs.last_hidden_state.shape[0]
            # targets share a source only through `encoder_outputs`
            if target is not None and target.dim() > 0 and target.shape[0] != rows:
                raise ValueError(
                    f"Source and target must have the same number of rows, got {rows} rows of `input_ids` and "
                    f"{target.shape[0]} of `decoder_input_ids` or `labels`."
                )
        elif not isinstance(encoder_outputs, tuple | list | ModelOutput):
            raise TypeError(
                f"`encoder_outputs` must be what the encoder returned, got {type(encoder_outputs).__name__}."
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs[:3])
        outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            read_positions=decoder_read_positions,
            return_dict=True,
            **kwargs,
        )
        names = {"hidden_states": "decoder_hidden_states", "attentions": "decoder_attentions"}
        decoded = {names.get(name, name): value for name, value in outputs.items()}
        return Seq2SeqModelOutput(**decoded, **{f"encoder_{name}": value for name, value in encoder_outputs.items()})


def _repeat_sources_for_beams(outputs: Any) -> Any:
    """Repeat the keys and values of a source for each of its beams, as transformers returns them."""
    cache = getattr(outputs, CACHE_NAME, None)
    if isinstance(cache, EncoderDecoderCache) and any(cache.is_updated.values()):
        rows = cache.self_attention_cache.layers[0].keys.shape[0]
        for layer in cache.cross_attention_cache.layers:
            beams = rows // layer.keys.shape[0]
            layer.keys = layer.keys.repeat_interleave(beams, dim=0)
            layer.values = layer.values.repeat_interleave(beams, dim=0)
    return outputs


class Seq2SeqGenerationMixin(StreamingGenerationMixin):
    """`generate()` of an encoder-decoder: up to 50 tokens longer than the longest source, each stored once."""

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> GenerateOutput | torch.LongTensor:
        """Generate targets: transformers' `generate`, which documents all arguments, with defaults of our own.

        By default, the maximum length is that of the longest source of the batch plus 50 tokens (6.1). A `max_length`
        of 20 in `model.generation_config`, which `Seq2SeqTrainer` writes there, counts as none. Empty input gives
        empty output: a batch without sentences gives no sequences, sentences of length 0 give sequences that end at
        once, after the prompt, with a score of 0.

        Args:
            inputs (`torch.Tensor` of shape `(batch, src_len)`, *optional*): Source tokens; may also be given as
                `input_ids` or, embedded, as `inputs_embeds`.
            generation_config (`GenerationConfig`, *optional*): Options; single ones can be given as keyword arguments.
            *args: Passed on.
            **kwargs: Passed on.

        Returns:
            `torch.LongTensor` of shape `(batch * num_return_sequences, tgt_len)`: the sequences, from
            `decoder_start_token_id`; or, with `return_dict_in_generate`, transformers' output classes.

        Raises:
            ValueError: if ids are outside the vocabulary, shapes don't fit, or an option is out of its range.
            TypeError: if source, mask or prompt are no tensors of the right kind.
        """
        if self.generation_config.max_length == TRANSFORMERS_MAX_LENGTH:
            self.generation_config.max_length = None  # a checkpoint has kept it
        sources = (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        source = next((given for given in sources if given is not None), None)
        self._check_generation_inputs(source, kwargs)
        if source is None or 0 not in source.shape[:2]:
            return _repeat_sources_for_beams(super().generate(inputs, generation_config, *args, **kwargs))
        options, _ = self._prepare_generation_config(generation_config, **kwargs)
        end = options.eos_token_id[0] if isinstance(options.eos_token_id, list) else options.eos_token_id
        prompt, start = kwargs.get("decoder_input_ids"), torch.tensor(options.decoder_start_token_id).to(source.device)
        given = {} if prompt is None else {"decoder_input_ids": prompt}
        prepared = (source.shape[0], self.main_input_name, given, start, source.device)
        sequences, _ = self._prepare_decoder_input_ids_for_generation(*prepared)
        sequences = sequences if end is None else nn.functional.pad(sequences, (0, 1), value=end)
        sequences = sequences.repeat_interleave(options.num_return_sequences, dim=0)
        if (streamer := kwargs.get("streamer")) is not None:
            streamer.end()
        if not options.return_dict_in_generate:
            return sequences
        if options.num_beams == 1 and kwargs.get("custom_generate") is None:
            return GenerateEncoderDecoderOutput(sequences=sequences)
        scores = torch.zeros(len(sequences), device=source.device)
        return GenerateBeamEncoderDecoderOutput(sequences=sequences, sequences_scores=scores)

    def _check_generation_inputs(self, source: Any, options: dict[str, Any]) -> None:
        """Refuse what transformers' preparation of inputs would stumble over, before it does."""
        embedding: Any = self.get_input_embeddings()
        if source is not None and source is options.get("inputs_embeds"):
            check_states("inputs_embeds", source, self.config.d_model)
        elif source is not None:
            check_input_ids("input_ids", source, embedding_sizes(embedding)[0])
        check_arguments(attention_mask=options.get("attention_mask"))
        if (prompt := options.get("decoder_input_ids")) is not None:
            check_input_ids("decoder_input_ids", prompt, self.config.vocab_size)
            if source is not None:
                check_shape("decoder_input_ids", prompt, source.shape[0], prompt.shape[1])

    def _reorder_cache(self, past_key_values: EncoderDecoderCache, beam_idx: Tensor) -> EncoderDecoderCache:
        """Let the beams' pasts follow them. Beams of a sentence share their source, so that stays where it is."""
        past_key_values.self_attention_cache.reorder_cache(beam_idx)
        return past_key_values

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Give each sentence `expand_size` target rows; they share one source where attention can do so."""
        is_fresh = kwargs.get(CACHE_NAME) is None  # a cache from outside has a source for each row
        shared: dict[str, Any] = {}
        if self.config._attn_implementation in ("eager", "sdpa") and is_fresh:
            names = ("encoder_outputs", "attention_mask")
            shared = {name: kwargs.pop(name) for name in names if name in kwargs}
            kwargs["is_encoder_decoder"] = False  # no source to repeat
        input_ids, model_kwargs = super()._expand_inputs_for_generation(expand_size, *args, **kwargs)
        return input_ids, {**model_kwargs, **shared}

    def _prepare_generated_length(
        self, generation_config: GenerationConfig, has_default_max_length: bool, *args: Any, **kwargs: Any
    ) -> GenerationConfig:
        """Let a translation be up to 50 tokens longer than its source unless the user says otherwise (paper, 6.1)."""
        if has_default_max_length and generation_config.max_new_tokens is None:
            longest, limit = kwargs["inputs_tensor"].shape[1] + 50, position_limit(self.config)
            longest = longest if limit is None else min(longest, limit + 1 - kwargs["input_ids_length"])
            generation_config.max_new_tokens = longest
        return super()._prepare_generated_length(generation_config, has_default_max_length, *args, **kwargs)


class VanillaTransformerForConditionalGeneration(VanillaTransformerPreTrainedModel, Seq2SeqGenerationMixin):
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

    @takes_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Predict the target, and with `labels` compute the loss.

        The loss is the mean over labelled tokens; or, if `num_items_in_batch` is given as transformers' Trainer does,
        their sum divided by it, so that accumulated batches and several processes give the gradient of one large
        batch. Labels are smoothed in training mode only; there, with `labels`, only labelled positions are projected
        onto the vocabulary, and `logits` is `None`.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, src_len)`, *optional*): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch, src_len)`, *optional*): Not 0 for tokens, 0 for
                padding.
            decoder_input_ids (`torch.LongTensor` of shape `(batch, tgt_len)`, *optional*): Target tokens, shifted
                right; made from `labels` by default.
            decoder_attention_mask (`torch.Tensor` of shape `(batch, tgt_len)`, *optional*): Not 0 for tokens, 0
                for padding.
            encoder_outputs (`BaseModelOutput` or `tuple`, *optional*): What the encoder returned, if it has run.
            past_key_values (`EncoderDecoderCache`, *optional*): Keys and values of earlier calls.
            inputs_embeds (`torch.Tensor` of shape `(batch, src_len, d_model)`, *optional*): In place of `input_ids`.
            decoder_inputs_embeds (`torch.Tensor` of shape `(batch, tgt_len, d_model)`, *optional*): In place of
                `decoder_input_ids`.
            labels (`torch.LongTensor` of shape `(batch, tgt_len)`, *optional*): Target tokens, not shifted; -100 is
                ignored.
            use_cache (`bool`, *optional*): Whether to return keys and values.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): Labelled tokens of the whole optimizer step.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`; and `mask_sizes`, the
                counts of a collator (`host_sizes`).

        Returns:
            `Seq2SeqLMOutput`: `loss` of shape `()` in nats, `logits` of shape `(batch, tgt_len, vocab)`, and what was
            asked for.

        Raises:
            ValueError: if a label is outside the vocabulary, `labels` has another shape than the decoder's input, or
                `num_items_in_batch` is no number of labels.
            TypeError: if an argument is no tensor.
        """
        given = {"decoder_input_ids": decoder_input_ids, "decoder_inputs_embeds": decoder_inputs_embeds}
        check_arguments(num_items_in_batch, labels=labels, **given)
        read = None
        if labels is not None:
            use_cache = False
            check_labels("labels", labels, None, self.config.vocab_size, VOCABULARY_HINT)
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            target = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
            read = labelled_positions(target, labels, self.training)
        sizes, kwargs = step_sizes(kwargs, attention_mask, labels)
        inputs = (input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs)
        options: Any = {"use_cache": use_cache, "decoder_read_positions": read, "return_dict": True}
        outputs = self.model(*inputs, past_key_values, inputs_embeds, decoder_inputs_embeds, **options, **kwargs)
        config = self.config
        smoothing = config.label_smoothing if self.training else 0.0
        loss, logits = token_loss(
            self.lm_head,
            outputs.last_hidden_state,
            labels,
            training=self.training,
            target=smoothed_target(smoothing, config.label_smoothing_type, config.vocab_size, config.pad_token_id),
            frozen_row=config.pad_token_id if config.tie_word_embeddings else None,
            num_items_in_batch=num_items_in_batch,
            count=sizes["labels"].total if "labels" in sizes else None,
        )
        shown = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss, logits, **shown)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift labels right: what the decoder reads when it is to write them (`DataCollatorForSeq2Seq` calls this).

        Args:
            labels (`torch.LongTensor` of shape `(batch, tgt_len)`): Target tokens; -100 becomes padding.

        Returns:
            `torch.LongTensor` of shape `(batch, tgt_len)`: `decoder_start_token_id` and all labels but the last.
        """
        start = torch.full_like(labels[:, :1], cast(int, self.config.decoder_start_token_id))
        shifted = torch.cat((start, labels[:, :-1]), dim=1).long()
        return shifted.masked_fill(shifted == IGNORED_LABEL, self.config.pad_token_id)


# The model class of each Auto class, here and in a checkpoint that carries this file.
AUTO_CLASSES: dict[str, type[VanillaTransformerPreTrainedModel]] = {
    "AutoModel": VanillaTransformerModel,
    "AutoModelForSeq2SeqLM": VanillaTransformerForConditionalGeneration,
}

__all__ = [
    "AUTO_CLASSES",
    "VanillaTransformerDecoder",
    "VanillaTransformerEncoder",
    "VanillaTransformerPreTrainedModel",
    *(model_class.__name__ for model_class in AUTO_CLASSES.values()),
]
