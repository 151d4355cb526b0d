"""What an encoder-decoder adds to `generate()`: the paper's length limit, and one source for all beams."""

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import GenerateEncoderDecoderOutput, GenerationConfig, GenerationMixin
from transformers.generation.utils import GenerateOutput


# transformers' maximum for every model that sets none; not a choice for this one.
UNIVERSAL_MAX_LENGTH = 20


def _with_a_source_for_each_row(outputs: Any) -> Any:
    """Repeat the keys and values of a source for each of its beams, as transformers returns them."""
    cache = getattr(outputs, "past_key_values", None)
    if isinstance(cache, EncoderDecoderCache) and any(cache.is_updated.values()):
        rows = cache.self_attention_cache.layers[0].keys.shape[0]
        for layer in cache.cross_attention_cache.layers:
            beams = rows // layer.keys.shape[0]
            layer.keys, layer.values = (
                states.repeat_interleave(beams, dim=0) for states in (layer.keys, layer.values)
            )
    return outputs


class Seq2SeqGenerationMixin(GenerationMixin):
    """`generate()` of an encoder-decoder: up to 50 tokens longer than the source, and each source stored once."""

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
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
            return _with_a_source_for_each_row(super().generate(inputs, generation_config, *args, **kwargs))
        options, _ = self._prepare_generation_config(generation_config, **kwargs)
        end = options.eos_token_id[0] if isinstance(options.eos_token_id, list) else options.eos_token_id
        sequence = [options.decoder_start_token_id] if end is None else [options.decoder_start_token_id, end]
        rows = source.shape[0] * options.num_return_sequences
        sequences = torch.tensor(sequence, device=source.device).repeat(rows, 1)
        if (streamer := kwargs.get("streamer")) is not None:
            streamer.end()
        return GenerateEncoderDecoderOutput(sequences=sequences) if options.return_dict_in_generate else sequences

    def _extract_generation_mode_kwargs(
        self, custom_generate: Any, kwargs: dict[str, Any], synced_gpus: Any, assistant_model: Any, streamer: Any
    ) -> dict[str, Any]:
        """Pass a streamer to a `custom_generate` that takes one: transformers does not, so it would never end."""
        extracted = super()._extract_generation_mode_kwargs(
            custom_generate, kwargs, synced_gpus, assistant_model, streamer
        )
        takes_streamer = callable(custom_generate) and "streamer" in inspect.signature(custom_generate).parameters
        return {**extracted, "streamer": streamer} if takes_streamer and streamer is not None else extracted

    def _reorder_cache(self, past_key_values: EncoderDecoderCache, beam_idx: Tensor) -> EncoderDecoderCache:
        """Let the beams' pasts follow them. Beams of a sentence share their source, so that stays where it is."""
        past_key_values.self_attention_cache.reorder_cache(beam_idx)
        return past_key_values

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: Tensor | None = None,
        **model_kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Give each sentence `expand_size` target rows; they share one source where attention can do so."""
        if expand_size < 1:
            raise ValueError(f"`num_beams` or `num_return_sequences` must be at least 1, got {expand_size}.")
        is_fresh = model_kwargs.get("past_key_values") is None  # a cache from outside has a source for each row
        if self.config._attn_implementation not in ("eager", "sdpa") or not is_fresh:
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


__all__ = ["Seq2SeqGenerationMixin"]
