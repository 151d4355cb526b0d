"""The decoding steps of a beam search: one implementation for any model, and a faster one for those of this package.

Shapes: `rows` is the number of beams per sentence that a step computes: 1 at the first step, where all beams are the
same, otherwise `num_beams`.
"""

import copy
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache
from transformers.generation import GenerationConfig
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput

from ..models.cache_names import CACHE_NAME
from ..models.checks import check_attention_mask, check_length, position_limit
from ..models.packing import has_hooks
from .cpu_layers import for_cpu, is_sharded


# Number of steps after which slots without descendants are reused.
SPARE_STEPS = 8


def _is_as_its_class(model: PreTrainedModel) -> bool:
    """Tell whether a model computes what the class that declares `supports_fast_search` does.

    A subclass, of the model or of one inside, may have another `forward`, an instance may have hooks or patches, and
    PEFT puts a prompt before inputs.
    """
    owner, prepares = _owner(model, "forward"), _owner(model, "prepare_inputs_for_generation")
    if "supports_fast_search" not in vars(owner) or "prepare_inputs_for_generation" in vars(model):
        return False
    inside = {model.base_model, model.get_decoder()}
    modules = {each.__module__ for each in (owner, *(_owner(part, "forward") for part in inside))}
    if not issubclass(owner, prepares) or len(modules) > 1:
        return False
    is_prepared = hasattr(model, "_original_forward")  # by accelerate, which patches `forward` for mixed precision
    return not any(map(has_hooks, inside if is_prepared else {model, *inside}))


def _owner(module: nn.Module, name: str) -> type:
    """Return the class that defines a method of a module."""
    return next(each for each in type(module).__mro__ if name in vars(each))


def check_source_mask(model_kwargs: dict[str, Any]) -> None:
    """Check that the source's mask has the shape of the source.

    Args:
        model_kwargs (`dict[str, Any]`): With `encoder_outputs`, of shape `(batch, src_len, d_model)`, and perhaps
            `attention_mask`.

    Raises:
        ValueError: if it has another shape.
    """
    batch, length = model_kwargs["encoder_outputs"][0].shape[:2]
    check_attention_mask("attention_mask", model_kwargs.get("attention_mask"), batch, length)


class BeamDecoder(Protocol):
    """The interface between a beam search and a model."""

    can_drop: bool  # whether sentences can be dropped, which only the side-by-side decoders do
    recorded: dict[str, tuple]

    @property
    def past_key_values(self) -> Cache | None:
        """The model's cache, if it has transformers' layout."""

    def start(self) -> torch.Tensor:
        """Process the prompt: the logits of the first token, of shape `(batch, rows, vocab)`."""

    def step(self, sequences: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Process the last token of each beam: the logits of the next, of shape `(batch, num_beams, vocab)`."""

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop all sentences except these."""


class PlainDecoder:
    """Calls a model's `forward`, as transformers' beam search does.

    Args:
        model (`PreTrainedModel`): An encoder-decoder or a decoder-only model.
        input_ids (`torch.LongTensor` of shape `(batch * num_beams, tgt_len)`): The decoder's prompt.
        generation_config (`GenerationConfig`): The options, with those of what to record in addition to the logits.
        model_kwargs (`dict[str, Any]`): The model's inputs as prepared by `generate()`.
    """

    can_drop = False

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ):
        self.model = model
        self.input_ids = input_ids
        self.generation_config = generation_config
        self.model_kwargs = model_kwargs
        self.is_encoder_decoder = model.config.is_encoder_decoder
        self.recorded: dict[str, tuple] = {}
        prefix = "decoder_" if self.is_encoder_decoder else ""
        if generation_config.return_dict_in_generate and generation_config.output_attentions:
            self.recorded |= {f"{prefix}attentions": ()} | ({"cross_attentions": ()} if prefix else {})
        if generation_config.return_dict_in_generate and generation_config.output_hidden_states:
            self.recorded |= {f"{prefix}hidden_states": ()}

    @property
    def cache_name(self) -> str | None:
        """What the model calls its cache, if it has one: of a state-space model it is `cache_params`."""
        names = (CACHE_NAME, *ALL_CACHE_NAMES)
        return next((name for name in names if self.model_kwargs.get(name) is not None), None)

    @property
    def past_key_values(self) -> Any:
        """The model's cache."""
        return None if self.cache_name is None else self.model_kwargs[self.cache_name]

    def start(self) -> torch.Tensor:
        """Process the prompt.

        Returns:
            `torch.Tensor` of shape `(batch, num_beams, vocab)`: the logits of the first token.
        """
        outputs = self.model._prefill(
            self.input_ids, self.generation_config, self.model_kwargs, is_first_iteration=True
        )
        return self._take(outputs)

    def step(self, sequences: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Reorder the cache, and process the last token of each beam.

        Args:
            sequences (`torch.LongTensor` of shape `(batch, num_beams, tgt_len)`): The beams.
            parents (`torch.LongTensor` of shape `(batch, num_beams)`): The beam of the previous step that each
                continues.

        Returns:
            `torch.Tensor` of shape `(batch, num_beams, vocab)`: the logits of the next token.

        Raises:
            ValueError: if there are several beams, and the model has a cache that can't be reordered.
        """
        batch, num_beams = parents.shape
        if (name := self.cache_name) is not None and num_beams > 1:
            cache = self.model_kwargs[name]
            rows = (parents + num_beams * torch.arange(batch, device=parents.device)[:, None]).flatten()
            if hasattr(self.model, "_reorder_cache"):
                self.model_kwargs[name] = self.model._reorder_cache(cache, rows)
            elif hasattr(cache, "reorder_cache"):
                cache.reorder_cache(rows)
            else:
                raise ValueError(
                    f"`num_beams` must be 1 with the cache of a {type(self.model).__name__}, which can't follow "
                    f"several beams, got {num_beams}; pass `use_cache=False`."
                )
        inputs = self.model.prepare_inputs_for_generation(
            sequences.flatten(0, 1),
            next_sequence_length=1 if self.model_kwargs["use_cache"] else None,
            **self.model_kwargs,
        )
        return self._take(self.model(**inputs, return_dict=True))

    def keep(self, sentences: torch.Tensor) -> None:
        """Do nothing: recorded outputs need all sentences at all steps.

        Args:
            sentences (`torch.LongTensor`): Not used.
        """

    def _take(self, outputs: ModelOutput) -> torch.Tensor:
        """Record outputs, and return the logits of the last position: (batch, num_beams, vocab)."""
        self.model_kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.model_kwargs, is_encoder_decoder=self.is_encoder_decoder
        )
        for name in self.recorded:
            self.recorded[name] += (outputs[name],)
        return outputs.logits[:, -1].unflatten(0, (-1, self.generation_config.num_beams))


class SideBySideDecoder:
    """Runs a decoder's layers on the beams of a sentence side by side, in one row of the batch.

    Each step writes the keys and values of all beams into new slots, where they stay when beams are reordered: a mask
    marks the ancestors of each beam. When no slots are left, those without descendants are reused, which are most, as
    beams share most of their past.

    ```
                       step 1     step 2     step 3
        slots        a1 b1 c1   a2 b2 c2   a3 b3 c3
        beam a sees   x            x        x           a3 continues b2, b2 continues a1
        beam b sees   x            x           x
        beam c sees      x   x                    x     only c descends from b1 and a2, no beam from c1 and c2
    ```

    Subclasses run the layers, and set `position_ids` to those of the prompt, of shape `(batch or 1, tgt_len)`.

    Args:
        decoder (`nn.Module`): The model's decoder.
        lm_head (`nn.Module`): The projection onto the vocabulary.
        input_ids (`torch.LongTensor` of shape `(batch * num_beams, tgt_len)`): The decoder's prompt, the same for all
            beams of a sentence.
        num_beams (`int`): Beams of a sentence.
        dtype (`torch.dtype`): Type of the hidden states.
    """

    can_drop = True
    past_key_values: Cache | None = None
    supported_inputs: set[str]  # of those that `generate()` prepares
    position_ids: torch.Tensor
    cache: Cache | EncoderDecoderCache

    def __init__(
        self, decoder: nn.Module, lm_head: nn.Module, input_ids: torch.Tensor, num_beams: int, dtype: torch.dtype
    ):
        self.decoder: Any = decoder
        self.lm_head = lm_head
        if input_ids.device.type == "cpu":
            rows = len(input_ids)
            self.decoder, self.lm_head = for_cpu(decoder, rows), for_cpu(lm_head, rows)
        self.num_beams = num_beams
        self.recorded: dict[str, tuple] = {}
        self.prompt = input_ids[::num_beams]
        self.used = self.prompt.shape[1]  # slots in use per sentence; the mask hides the others
        self.capacity = self.used + SPARE_STEPS * num_beams
        self.slot_layers: list[Any] = [_SlotLayer(self.capacity) for _ in self.decoder.layers]
        self.hides = torch.finfo(dtype).min  # added to the scores of hidden slots
        shape = (len(self.prompt), num_beams, self.capacity)
        self.mask = torch.full(shape, self.hides, dtype=dtype, device=input_ids.device)
        self.mask[:, :, : self.used] = 0
        self.own_slot = self.mask.new_full((num_beams, num_beams), self.hides).fill_diagonal_(0)
        self.kept: torch.Tensor | None = None

    @classmethod
    def fits(
        cls,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> bool:
        """Return whether this decoder supports the model and the options.

        Args:
            model (`PreTrainedModel`): The model.
            input_ids (`torch.LongTensor` of shape `(batch * num_beams, tgt_len)`): The decoder's prompt.
            generation_config (`GenerationConfig`): The options.
            model_kwargs (`dict[str, Any]`): The model's inputs as prepared by `generate()`.

        Returns:
            `bool`: whether it does.
        """
        cache = model_kwargs.get(CACHE_NAME)
        return (
            _is_as_its_class(model)
            and not is_sharded(model)
            and model.config._attn_implementation in ("eager", "sdpa")
            and model_kwargs.keys() <= cls.supported_inputs
            and cache is not None
            and cache.get_seq_length() == 0
            and not (generation_config.output_attentions or generation_config.output_hidden_states)
            and len(set(getattr(model, "hf_device_map", {}).values())) < 2
            and cls._fits_inputs(input_ids, generation_config, model_kwargs)
        )

    @staticmethod
    def _fits_inputs(
        input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> bool:
        """Return whether inputs of the supported names have the supported form."""
        return True

    def start(self) -> torch.Tensor:
        """Process the prompt, once for all beams of a sentence.

        Returns:
            `torch.Tensor` of shape `(batch, 1, vocab)`: the logits of the first token.
        """
        causal_mask = self.mask.new_full((self.prompt.shape[1], self.capacity), self.hides).triu(1)
        mask = causal_mask.minimum(self.mask[:, :1, None])  # (batch, 1, tgt_len, slots)
        return self.lm_head(self._decode(self.prompt, mask)[:, -1:])

    def step(self, sequences: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Reorder the mask, and process the last token of each beam.

        Args:
            sequences (`torch.LongTensor` of shape `(batch, num_beams, tgt_len)`): The beams.
            parents (`torch.LongTensor` of shape `(batch, num_beams)`): The beam of the previous step that each
                continues.

        Returns:
            `torch.Tensor` of shape `(batch, num_beams, vocab)`: the logits of the next token.
        """
        self.make_room(parents)
        self.mask[:, :, self.used : self.used + self.num_beams] = self.own_slot
        self.advance()
        return self.logits_of(sequences[..., -1])

    @property
    def is_full(self) -> bool:
        """Whether slots must be moved before the next step: none are left, or sentences have left."""
        return self.kept is not None or self.used + self.num_beams > self.capacity

    def make_room(self, parents: torch.Tensor) -> None:
        """Reorder the mask for the beams that continue, and see to it that there are slots for them.

        Args:
            parents (`torch.LongTensor` of shape `(batch, num_beams)`): The beam of the previous step that each
                continues.
        """
        self.mask = self.mask[torch.arange(len(parents), device=parents.device)[:, None], parents]
        if self.is_full:
            self.reuse_slots()

    def advance(self) -> None:
        """Count one more token of each beam."""
        self.used += self.num_beams
        self.position_ids = self.position_ids[:, -1:] + 1

    def logits_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Process a token of each beam, whose slot the mask already has.

        Args:
            tokens (`torch.LongTensor` of shape `(batch, num_beams)`): The tokens, at `position_ids`.

        Returns:
            `torch.Tensor` of shape `(batch, num_beams, vocab)`: the logits of the next token.
        """
        return self.lm_head(self._decode(tokens, self.mask[:, None]))

    def state(self) -> dict[str, torch.Tensor]:
        """Return what the next step reads and writes besides tokens, once the prompt is read.

        Returns:
            `dict[str, torch.Tensor]`: of masks, `(batch, ..., keys)`; of keys and values, `(batch, heads, keys,
            width)`; and `position_ids` of the last token, `(batch, 1)`.
        """
        position_ids = self.position_ids[:, -1:].expand(len(self.mask), 1)
        return {"mask": self.mask, "position_ids": position_ids, **_tensors_of("slot", self.slot_layers)}

    def on_buffers(self, buffers: dict[str, torch.Tensor], slots: torch.Tensor) -> "SideBySideDecoder":
        """Return a decoder whose `logits_of` reads and writes other tensors: a step that can be captured.

        Args:
            buffers (`dict[str, torch.Tensor]`): Tensors of the names that `state` gives.
            slots (`torch.LongTensor` of shape `(num_beams,)`): The slots for the keys and values of the next tokens.

        Returns:
            `SideBySideDecoder`: the decoder, with the same weights.
        """
        twin = copy.copy(self)
        twin.mask, twin.position_ids = buffers["mask"], buffers["position_ids"]
        twin.slot_layers = _fixed_layers("slot", buffers, slots)
        twin.cache = Cache(layers=twin.slot_layers)
        return twin

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop all sentences except these.

        Args:
            sentences (`torch.LongTensor`): Their indices in the current batch.
        """
        self.mask = self.mask[sentences]
        if len(self.position_ids) > 1:
            self.position_ids = self.position_ids[sentences]
        self.kept = sentences  # their slots are moved in the next step

    def _decode(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run the layers on tokens (batch, length) at `position_ids`: (batch, length, d_model)."""
        raise NotImplementedError(f"{type(self).__name__} must run the layers.")

    def reuse_slots(self) -> None:
        """Keep the slots that have descendants, of the remaining sentences, and replace the others by free ones."""
        has_descendants = (self.mask == 0).any(1)  # (batch, slots)
        self.used = int(has_descendants.sum(1).max())
        self.capacity = self.used + SPARE_STEPS * self.num_beams
        slots = has_descendants.byte().argsort(dim=1, descending=True, stable=True)[:, : self.used]  # (batch, used)
        mask = self.mask.gather(2, slots[:, None].expand(-1, self.num_beams, -1))  # (batch, num_beams, used)
        self.mask = nn.functional.pad(mask, (0, self.capacity - self.used), value=self.hides)
        sentences = torch.arange(len(slots), device=slots.device) if self.kept is None else self.kept
        self.kept = None
        for layer in self.slot_layers:
            layer.move(sentences, slots, self.capacity)


class Seq2SeqDecoder(SideBySideDecoder):
    """The decoder of an encoder-decoder, with the source's keys and values computed and stored once per sentence.

    Args:
        model (`PreTrainedModel`): A model whose class declares `supports_fast_search`.
        input_ids (`torch.LongTensor` of shape `(batch * num_beams, tgt_len)`): The decoder's prompt, the same for all
            beams of a sentence.
        generation_config (`GenerationConfig`): The options, with the number of beams.
        model_kwargs (`dict[str, Any]`): `encoder_outputs` and `attention_mask`, with one row for each sentence.
    """

    supported_inputs = {"encoder_outputs", "attention_mask", CACHE_NAME, "use_cache"}

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ):
        self.encoder_hidden_states = model_kwargs["encoder_outputs"][0]
        check_source_mask(model_kwargs)
        dtype = self.encoder_hidden_states.dtype
        super().__init__(model.model.decoder, model.lm_head, input_ids, generation_config.num_beams, dtype)
        self.encoder_mask = create_bidirectional_mask(
            config=model.config,
            inputs_embeds=self.encoder_hidden_states[:, :1],
            attention_mask=model_kwargs.get("attention_mask"),
            encoder_hidden_states=self.encoder_hidden_states,
        )
        self.length = self.used
        check_length(self.length, position_limit(self.decoder.config))
        self.position_ids = torch.arange(self.used, device=input_ids.device)[None]
        self.source_layers: list[DynamicLayer] = [DynamicLayer() for _ in self.slot_layers]
        self.cache = EncoderDecoderCache(Cache(layers=self.slot_layers), Cache(layers=self.source_layers))

    @staticmethod
    def _fits_inputs(
        input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> bool:
        return len(model_kwargs["encoder_outputs"][0]) * generation_config.num_beams == len(input_ids)

    def advance(self) -> None:
        """Count one more token of each beam."""
        super().advance()
        self.length += 1
        check_length(self.length, position_limit(self.decoder.config))

    def state(self) -> dict[str, torch.Tensor]:
        """Return what the next step reads and writes besides tokens, with keys, values and mask of the source.

        Returns:
            `dict[str, torch.Tensor]`: of masks, `(batch, ..., keys)`; of keys and values, `(batch, heads, keys,
            width)`; and `position_ids` of the last token, `(batch, 1)`.
        """
        mask = self.encoder_mask
        if mask is None:  # all is seen
            mask = self.mask.new_ones(len(self.mask), 1, 1, self.encoder_hidden_states.shape[1], dtype=torch.bool)
            if self.decoder.config._attn_implementation == "eager":
                mask = self.mask.new_zeros(mask.shape)
        return {**super().state(), **_tensors_of("source", self.source_layers), "source_mask": mask}

    def on_buffers(self, buffers: dict[str, torch.Tensor], slots: torch.Tensor) -> "Seq2SeqDecoder":
        """Return a decoder whose `logits_of` reads and writes other tensors: a step that can be captured.

        Args:
            buffers (`dict[str, torch.Tensor]`): Tensors of the names that `state` gives.
            slots (`torch.LongTensor` of shape `(num_beams,)`): The slots for the keys and values of the next tokens.

        Returns:
            `Seq2SeqDecoder`: the decoder, with the same weights.
        """
        twin = cast(Seq2SeqDecoder, super().on_buffers(buffers, slots))
        twin.encoder_mask = buffers["source_mask"]
        twin.encoder_hidden_states = self.encoder_hidden_states.new_empty(0)  # its keys and values are known
        twin.source_layers = _fixed_layers("source", buffers, slots)
        twin.cache = EncoderDecoderCache(Cache(layers=twin.slot_layers), Cache(layers=twin.source_layers))
        return twin

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop all sentences except these.

        Args:
            sentences (`torch.LongTensor`): Their indices in the current batch.
        """
        super().keep(sentences)
        self.encoder_hidden_states = self.encoder_hidden_states[sentences]
        if isinstance(self.encoder_mask, torch.Tensor):
            self.encoder_mask = self.encoder_mask[sentences]
        for layer in self.source_layers:
            layer.batch_select_indices(sentences)

    def _decode(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden_states = self.decoder.embed(self.decoder.embed_tokens(tokens), self.position_ids)
        for layer in self.decoder.layers:
            hidden_states = layer(hidden_states, mask, self.encoder_hidden_states, self.encoder_mask, self.cache)
        return self.decoder.norm(hidden_states)


class CausalDecoder(SideBySideDecoder):
    """A decoder-only model, which reads each prompt once for all its beams.

    Padding of the prompts is hidden, and leaves the cache when slots are reused.

    Args:
        model (`PreTrainedModel`): A model whose class declares `supports_fast_search`. Its base model has `layers`,
            and takes positions, a cache, and a mask of four dimensions.
        input_ids (`torch.LongTensor` of shape `(batch * num_beams, length)`): The prompts, the same for all beams of
            one; padding on either side.
        generation_config (`GenerationConfig`): The options, with the number of beams.
        model_kwargs (`dict[str, Any]`): `position_ids`, and `attention_mask` if there is padding.
    """

    supported_inputs = {"attention_mask", "position_ids", CACHE_NAME, "use_cache", "logits_to_keep"}

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ):
        num_beams = generation_config.num_beams
        super().__init__(model.base_model, model.get_output_embeddings(), input_ids, num_beams, model.dtype)
        self.position_ids = model_kwargs["position_ids"][::num_beams]
        self.length = int(self.position_ids.max()) + 1  # of the longest prompt: counted here, not on a GPU
        attention_mask = model_kwargs.get("attention_mask")
        if attention_mask is not None:
            is_padding = (attention_mask[::num_beams] == 0)[:, None]  # (batch, 1, length)
            self.mask[:, :, : self.used].masked_fill_(is_padding, self.hides)
        self.cache = Cache(layers=self.slot_layers)

    @staticmethod
    def _fits_inputs(
        input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> bool:
        return "position_ids" in model_kwargs and generation_config.prefill_chunk_size is None

    def advance(self) -> None:
        """Count one more token of each beam."""
        super().advance()
        self.length += 1
        check_length(self.length, position_limit(self.decoder.config))

    def _decode(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.decoder(
            tokens,
            attention_mask=mask,
            position_ids=self.position_ids.expand(-1, tokens.shape[1]),
            past_key_values=self.cache,
            return_dict=True,
        ).last_hidden_state


class _SlotLayer(DynamicLayer):
    """A cache layer with free slots after those in use: new keys and values are written without copying the old.

    Attention gets all slots, with zeros in the free ones, which its mask hides: products of contiguous tensors need no
    copy.
    """

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.used = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = (
            states.new_zeros(*states.shape[:2], self.capacity, states.shape[3])
            for states in (key_states, value_states)
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.used = self.used, self.used + key_states.shape[2]
        self.keys[:, :, start : self.used] = key_states
        self.values[:, :, start : self.used] = value_states
        return self.keys, self.values

    def move(self, sentences: torch.Tensor, slots: torch.Tensor, capacity: int) -> None:
        """Copy these slots (batch, used) of these sentences (batch,) to the front of `capacity` others."""
        heads, old_capacity = self.keys.shape[1:3]
        head = sentences[:, None] * heads + torch.arange(heads, device=slots.device)  # (batch, heads)
        rows = (head[..., None] * old_capacity + slots[:, None]).flatten()
        self.used = slots.shape[1]
        self.keys, self.values = (
            nn.functional.pad(
                states.flatten(0, 2).index_select(0, rows).view(len(slots), heads, self.used, -1),
                (0, 0, 0, capacity - self.used),
            )
            for states in (self.keys, self.values)
        )


class _FixedLayer(DynamicLayer):
    """A cache layer of tensors that stay where they are: new keys and values are written into the slots given."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.slots = keys, values, slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys.index_copy_(2, self.slots, key_states), self.values.index_copy_(2, self.slots, value_states)


def _tensors_of(name: str, layers: Sequence[DynamicLayer]) -> dict[str, torch.Tensor]:
    """Name the keys and values of all layers."""
    tensors: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(layers):
        tensors |= {f"{name}_keys_{number}": layer.keys, f"{name}_values_{number}": layer.values}
    return tensors


def _fixed_layers(name: str, buffers: dict[str, torch.Tensor], slots: torch.Tensor) -> list[DynamicLayer]:
    """Make layers of keys and values with such names."""
    keys = [each for key, each in buffers.items() if key.startswith(f"{name}_keys_")]
    values = [each for key, each in buffers.items() if key.startswith(f"{name}_values_")]
    return [_FixedLayer(*each, slots) for each in zip(keys, values, strict=True)]


def decoder_for(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    fills_cache: bool = False,
) -> BeamDecoder:
    """Return the fastest decoder that supports the model and the options.

    Args:
        model (`PreTrainedModel`): The model.
        input_ids (`torch.LongTensor` of shape `(batch * num_beams, tgt_len)`): The decoder's prompt.
        generation_config (`GenerationConfig`): The options.
        model_kwargs (`dict[str, Any]`): The model's inputs as prepared by `generate()`.
        fills_cache (`bool`, defaults to `False`): Whether the cache among them is to be used, as by the plain decoder.

    Returns:
        `BeamDecoder`: the decoder.
    """
    inputs = (model, input_ids, generation_config, model_kwargs)
    side_by_side = Seq2SeqDecoder if model.config.is_encoder_decoder else CausalDecoder
    is_fast = not fills_cache and side_by_side.fits(*inputs)
    return side_by_side(*inputs) if is_fast else PlainDecoder(*inputs)
