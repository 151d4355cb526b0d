"""GPT, the language model of Radford et al. 2018, with its two ways of fine-tuning.

     <s>   the    film   was    great   <e>       tokens; <e> is the extract token of a classifier's input
      0     1      2      3       4      5        positions
      |     |      |      |       |      |
    +-v-----v------v------v-------v------v-+
    |  sum of the two embeddings, dropout  |
    +-------------------v------------------+
    |  causal self-attention, add & norm;  |  x L
    |  feed-forward, add & norm            |
    +-v-----v------v------v-------v------v-+
      |     |      |      |       |      |
     the   film   was   great    <e>   class, or score of a choice (linear)
           next tokens (tied embedding)

Departures from the paper:
- None in the defaults. Where it is silent (epsilon of LayerNorm 1e-5, GELU by its approximation with tanh, a bias in
  every layer, the mean over a text's tokens in the auxiliary loss), they follow the authors' code.
- `norm_position="pre"` is GPT-2: norms before the sub-layers, one more at the end, smaller initial weights where a
  sub-layer ends.
- A token with nothing but padding before it is not predicted: no loss.
- The output at padding is 0, except where logits are asked for without labels. In training, only tokens that have a
  label are projected onto the vocabulary.
- Where a batch has padding or several texts in a row, attention works on each text by itself.

Checkpoints of types `openai-gpt` and `gpt2` load here; transformers' classes of these names read what is saved.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.core_model_loading import WeightTransform
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MultipleChoiceModelOutput,
    SequenceClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import logging
from transformers.utils.generic import ModelOutput, TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .cache_names import CACHE_NAME, takes_both_cache_names
from .checks import (
    IGNORED_LABEL,
    VOCABULARY_HINT,
    check_arguments,
    check_attention_mask,
    check_heads,
    check_input_ids,
    check_labels,
    check_offsets,
    check_position_ids,
    check_states,
    checked_embeddings,
    flatten_texts,
    has_label,
)
from .configuration_vanilla_gpt import VanillaGptConfig
from .conversion_vanilla_gpt import GPT_NAMES
from .dropout import Dropout
from .layers import EncoderLayer
from .loss import LossAndLogits, classification_loss, label_loss, token_loss
from .packing import run_encoder
from .read_positions import Reads, labelled_positions, step_sizes
from .self_contained import StreamingGenerationMixin, VanillaPreTrainedModel, classifier_dropout, final_norm
from .sequences import flattened_rows, holds_several, positions_of


logger = logging.get_logger(__name__)


class VanillaGptPreTrainedModel(VanillaPreTrainedModel):
    """What all models of the family share: initialisation, and what transformers may do with them."""

    config: VanillaGptConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["EncoderLayer"]
    # Old files hold the causal mask too.
    _keys_to_ignore_on_load_unexpected = [r"\.attn\.(masked_)?bias$", r"position_ids$"]

    def file_names(self) -> list[WeightTransform]:
        """Return the rules from the names in checkpoints of GPT and GPT-2; saved are those of the same norms."""
        return GPT_NAMES[self.config.norm_position]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise from a normal distribution (4.1), as GPT-2 does with less where a pre-norm sub-layer ends."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, std=std)
        elif isinstance(module, EncoderLayer) and self.config.norm_position == "pre":
            for last in (module.self_attn.out_proj, module.feed_forward.fc2):
                init.normal_(last.weight, std=std / (2 * self.config.num_hidden_layers) ** 0.5)
        super()._init_weights(module)


class VanillaGptModel(VanillaGptPreTrainedModel):
    """The decoder: token and position embeddings, causal layers, and with pre-norm one more norm.

    Args:
        config (`VanillaGptConfig`): The model's config.

    Raises:
        ValueError: if `num_attention_heads` does not divide `hidden_size`.

    Source: Radford et al. 2018, 3.1 and 4.1.
    """

    def __init__(self, config: VanillaGptConfig):
        check_heads(config)
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        layers = [EncoderLayer(config, number, is_causal=True) for number in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = final_norm(config)  # applied by `run_encoder`
        self.post_init()

    @takes_both_cache_names
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        keep_padding: bool = False,
        read_positions: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Compute what is known at each token from it and those before.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Tokens; with a cache those that are
                new.
            attention_mask (`torch.Tensor` of shape `(batch, past_length + length)`, *optional*): Not 0 for tokens, 0
                for padding on either side.
            position_ids (`torch.LongTensor` of shape `(batch or 1, length)`, *optional*): Positions; by default the
                tokens of a row are counted from 0, without padding. Given without a mask and a cache, a new sequence
                begins wherever a position is not the one before plus 1 (transformers' `DataCollatorWithFlattening`).
            inputs_embeds (`torch.Tensor` of shape `(batch, length, d_model)`, *optional*): In place of `input_ids`.
            past_key_values (`Cache`, *optional*): Keys and values of the positions before.
            use_cache (`bool`, *optional*): Whether to return keys and values; the config's `use_cache` by default. Of
                rows that are seen to hold several sequences, which compiled code does not see, none are returned.
            keep_padding (`bool`, *optional*, defaults to `False`): Whether padding, too, gets an output that depends
                on the tokens, as in transformers. It is undefined and costs time; otherwise it is 0.
            read_positions (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 where `last_hidden_state` is
                read, by default everywhere; elsewhere it may be 0.
            token_type_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Tokens whose embeddings are
                added, as by transformers' GPT and GPT-2; the paper has none.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`; without a mask and a
                cache, `cu_seq_lens_q` and `max_length_q` of a row that holds several sequences.

        Returns:
            `BaseModelOutputWithPast`: `last_hidden_state` of shape `(batch, length, d_model)`, and what was asked for.

        Raises:
            ValueError: if not exactly one of `input_ids` and `inputs_embeds` is given, an id is outside its table, a
                shape does not fit, there are more positions than `max_position_embeddings`, or `cu_seq_lens_q` does
                not fit the row or comes with a mask or a cache, or a cache is given by both its names.
            TypeError: if ids or `cu_seq_lens_q` are no integers, or `past_key_values` is no cache.
        """
        if past_key_values is not None and not isinstance(past_key_values, Cache):
            raise TypeError(f"`{CACHE_NAME}` must be a `Cache`, got {type(past_key_values).__name__}.")
        inputs_embeds = checked_embeddings(self.embed_tokens, input_ids, inputs_embeds)
        batch, length, _ = inputs_embeds.shape
        if token_type_ids is not None:
            check_input_ids("token_type_ids", token_type_ids, self.config.vocab_size)
            inputs_embeds = inputs_embeds + self.embed_tokens(token_type_ids.view(batch, length))
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        sequence_ids = None
        offsets = cast(dict, kwargs).get("cu_seq_lens_q")
        check_offsets(offsets, batch, length, attention_mask, past_key_values)
        if attention_mask is None and past_key_values is None:
            position_ids, sequence_ids = flattened_rows(position_ids, offsets, length)
            # later tokens would see all sequences of a row
            use_cache = use_cache and offsets is None and not holds_several(sequence_ids)
        if isinstance(past_length, int) or not torch.compiler.is_compiling():  # compiled code can't ask a static cache
            check_attention_mask("attention_mask", attention_mask, batch, past_length + length)
            check_position_ids(position_ids, batch, length, self.config.max_position_embeddings, past_length)

        # A new cache is empty, and mask helpers would look for no sequences in `position_ids` if they knew of it.
        # To them a sequence begins where a number is not the one before plus 1; offsets may say otherwise.
        mask_positions = position_ids
        if sequence_ids is not None:
            mask_positions = sequence_ids + torch.ones_like(sequence_ids).cumsum(1)
        create_mask = partial(create_causal_mask, position_ids=mask_positions, **{CACHE_NAME: past_key_values})
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        positions = position_ids
        if positions is None:
            positions = positions_of(attention_mask, length, past_length, inputs_embeds.device)
        hidden_states = inputs_embeds + self.embed_positions(positions)  # (batch, length, d_model)
        # the layers, and after them the norm of pre-norm
        hidden_states, _ = run_encoder(
            self,
            self.dropout(hidden_states),
            attention_mask,
            keep_padding,
            read_positions,
            create_mask=create_mask,
            position_ids=position_ids,
            sequence_ids=sequence_ids,
            past_key_values=past_key_values,
            **kwargs,
        )
        return BaseModelOutputWithPast(hidden_states, past_key_values)


def next_tokens(tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Find the token that each position is to predict.

    Args:
        tokens (`torch.LongTensor` of shape `(batch, length)`): Tokens; -100 for those that are not to be predicted.
        attention_mask (`torch.Tensor` of shape `(batch, past_length + length)`, *optional*): Not 0 for tokens, 0 for
            padding, which predicts nothing.

    Returns:
        `torch.LongTensor` of shape `(batch, length)`: the next tokens; -100 where there is none.
    """
    labels = nn.functional.pad(tokens[:, 1:].long(), (0, 1), value=IGNORED_LABEL)
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        length = max(attention_mask.shape[1], tokens.shape[1])  # that of the past is not known here
        check_attention_mask("attention_mask", attention_mask, len(tokens), length)
        is_padding = (attention_mask == 0)[:, attention_mask.shape[1] - tokens.shape[1] :]
        labels = labels.masked_fill(is_padding.to(labels.device), IGNORED_LABEL)
    return labels


class VanillaGptWithProjection(VanillaGptPreTrainedModel):
    """What the models below share: the decoder, and the projection that predicts the next token.

    Args:
        config (`VanillaGptConfig`): The model's config.
    """

    _tied_weights_keys = {"lm_head.weight": "transformer.embed_tokens.weight"}

    def __init__(self, config: VanillaGptConfig):
        super().__init__(config)
        self.transformer = VanillaGptModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._add_head(config)
        self.post_init()

    def _add_head(self, config: VanillaGptConfig) -> None:
        """Add layers besides the projection: here none."""


class VanillaGptForCausalLM(VanillaGptWithProjection, StreamingGenerationMixin):
    """GPT with the projection that predicts the next token.

    Args:
        config (`VanillaGptConfig`): The model's config.

    Source: Radford et al. 2018, 3.1.

    Example:
    ```python
    >>> import torch
    >>> from hf_vanilla import VanillaGptConfig, VanillaGptForCausalLM
    >>> config = VanillaGptConfig(vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=4)
    >>> model = VanillaGptForCausalLM(config).eval()
    >>> model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False).shape
    torch.Size([1, 5])

    ```
    """

    supports_fast_search = True  # by the side-by-side decoder and the CPU layers of `hf_vanilla.generation`
    takes_label_smoothing_factor = False  # transformers' trainer would compare logits with other labels

    @takes_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: Tensor | int = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Predict the next token at each position, and with `labels` compute the loss.

        The loss is the mean over labelled tokens but the first of each row; or, if `num_items_in_batch` is given as
        transformers' Trainer does, their sum divided by it, so that accumulated batches and several processes give the
        gradient of one large batch. In training with `labels`, `logits` is `None`.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Tokens; with a cache those that are
                new.
            attention_mask (`torch.Tensor` of shape `(batch, past_length + length)`, *optional*): Not 0 for tokens, 0
                for padding.
            position_ids (`torch.LongTensor` of shape `(batch or 1, length)`, *optional*): As in [`VanillaGptModel`].
            inputs_embeds (`torch.Tensor` of shape `(batch, length, d_model)`, *optional*): In place of `input_ids`.
            past_key_values (`Cache`, *optional*): Keys and values of the positions before.
            labels (`torch.LongTensor` of shape `(batch, length)`, *optional*): The tokens themselves, not shifted;
                -100 where none is to be predicted. With `cu_seq_lens_q`, the first token of a later sequence is
                predicted from the sequence before, unless its label is -100, as transformers' collator sets it.
            use_cache (`bool`, *optional*): Whether to return keys and values; with `labels` not by default.
            logits_to_keep (`int` or `torch.Tensor`, *optional*, defaults to 0): Whose logits are computed without
                labels: the number of last positions, 0 for all; positions of shape `(positions,)`, or for each row
                `(batch, positions)`; or a boolean mask of shape `(batch, length)`.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): Labelled tokens of the whole optimizer step. Of a
                row with padding on the left, transformers' Trainer counts the first token too, which nothing predicts:
                pad training data on the right.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`; `mask_sizes`, the
                counts of a collator (`host_sizes`); and in place of `labels`, `shift_labels` of the same shape, the
                next token of each position, as where sequences are cut across devices. (As an argument of its own,
                the Trainer would ask for it in every data set.)

        Returns:
            `CausalLMOutputWithPast`: `loss` of shape `()` in nats, `logits` of shape `(batch, length, vocab)`, and
            what was asked for.

        Raises:
            ValueError: if a label is outside the vocabulary, `labels` has another shape than the tokens, or
                `num_items_in_batch` is no number of labels.
            TypeError: if an argument is no tensor.
        """
        shift_labels: Tensor | None = cast(dict, kwargs).pop("shift_labels", None)
        labelled = {"labels": labels, "shift_labels": shift_labels}
        check_arguments(num_items_in_batch, input_ids=input_ids, inputs_embeds=inputs_embeds, **labelled)
        given = input_ids if inputs_embeds is None else inputs_embeds
        for name, tensor in labelled.items():
            if tensor is not None and given is not None:
                check_labels(name, tensor, tuple(given.shape[:2]), self.config.vocab_size, VOCABULARY_HINT)
        sizes, kwargs = step_sizes(kwargs, attention_mask, labels)
        read = count = None
        if labels is not None and shift_labels is None:
            shift_labels = next_tokens(labels, attention_mask)
            count = sizes["next_labels"].total if "next_labels" in sizes else None
        if shift_labels is not None:
            use_cache, read = bool(use_cache), labelled_positions(given, shift_labels, self.training)
        inputs = (input_ids, attention_mask, position_ids, inputs_embeds, past_key_values)
        reads: dict[str, Any] = {"keep_padding": shift_labels is None, "read_positions": Reads(read, count)}
        outputs = self.transformer(*inputs, use_cache=use_cache, return_dict=True, **{**reads, **kwargs})
        hidden_states = outputs.last_hidden_state
        if shift_labels is None:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            index: Any = (slice(None), kept)
            if isinstance(kept, Tensor) and kept.dim() == 2:  # each row's, by number or mask
                numbered = (torch.arange(len(kept), device=kept.device)[:, None], kept)
                index = kept if kept.dtype == torch.bool else numbered
            hidden_states = hidden_states[index]
        options: Any = {"training": self.training, "num_items_in_batch": num_items_in_batch, "count": count}
        loss, logits = token_loss(self.lm_head, hidden_states, shift_labels, **options)
        return CausalLMOutputWithPast(loss, logits, outputs.get(CACHE_NAME), outputs.hidden_states, outputs.attentions)

    def _prepare_model_inputs(
        self, inputs: Any = None, bos_token_id: Any = None, model_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, str | None, dict[str, Any]]:
        """Refuse a prompt or mask that transformers' preparation of inputs would stumble over."""
        given = model_kwargs or {}
        check_arguments(attention_mask=(mask := given.get("attention_mask")))
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"`attention_mask` must have shape (batch, length), got {tuple(mask.shape)}.")
        if (embeddings := given.get("inputs_embeds")) is not None:
            check_states("inputs_embeds", embeddings, self.config.hidden_size)
        if (prompt := given.get("input_ids") if inputs is None else inputs) is not None:
            check_input_ids("input_ids", prompt, self.config.vocab_size)
            if 0 in prompt.shape and embeddings is None:
                raise ValueError("`input_ids` must have at least one token, to continue from; got none.")
        return super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)


class VanillaGptClassifier(VanillaGptWithProjection):
    """What both ways of fine-tuning share: they read the extract token, and keep training the language model.

    Args:
        config (`VanillaGptConfig`): The model's config.

    Source: Radford et al. 2018, 3.2 and 3.3.
    """

    output_class: Any
    text_axes = 1  # of the axes of `input_ids`, those before the tokens of a text
    # From the extract tokens' states (batch, d_model) or (batch, choices, d_model), labels and their number in a step.
    _predict: Callable[..., LossAndLogits]

    @property
    def takes_label_smoothing_factor(self) -> bool:
        """Whether the label smoothing of transformers' trainer leaves out no loss of the language model."""
        return self.config.lm_loss_weight == 0

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ModelOutput:
        """Read the last token of each text and predict, and with `labels` compute the loss, the mean over them.

        In training on `input_ids`, the loss of the language model, the mean over a text's tokens and then over the
        texts, is added with `lm_loss_weight`.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)` or `(batch, choices, length)`, *optional*):
                Tokens, the extract token last.
            attention_mask (`torch.Tensor` of that shape, *optional*): Not 0 for tokens, 0 for padding on either side.
                Without one, the last token is the last that is not `pad_token_id`.
            position_ids (`torch.LongTensor` of that shape, *optional*): Positions.
            inputs_embeds (`torch.Tensor` of that shape and d_model, *optional*): In place of `input_ids`.
            labels (`torch.Tensor`, *optional*): As the class describes them; among classes, -100 is ignored.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): Labels of the whole optimizer step, in place of
                those of this batch: accumulated batches and several processes then give the gradient of one large
                batch.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `ModelOutput`: transformers' class for the task, with `loss` of shape `()` and `logits`.

        Raises:
            ValueError: if a label is outside its range, a shape does not fit, or `mc_token_ids` or `mc_labels`, which
                transformers' models with two heads know, is given.
            TypeError: if an argument is no tensor, or ids or classes are no integers.
        """
        check_arguments(num_items_in_batch, labels=labels)
        for name in ("mc_token_ids", "mc_labels"):
            if cast(dict, kwargs).pop(name, None) is not None:
                raise ValueError(f"`{name}` must not be given: the last token of each text is read; pass `labels`.")
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        cast(dict, kwargs).pop("use_cache", None)
        inputs |= {"inputs_embeds": inputs_embeds, "token_type_ids": cast(dict, kwargs).pop("token_type_ids", None)}
        (*rows, token_type_ids), batch = flatten_texts(inputs, self.text_axes)
        input_ids, attention_mask, _, inputs_embeds = rows
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        check_attention_mask("attention_mask", attention_mask, *given.shape[:2])
        is_token = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
        if attention_mask is not None and attention_mask.dim() == 2:
            is_token = attention_mask.to(given.device) != 0
        elif input_ids is not None and self.config.pad_token_id is not None:
            is_token = input_ids != self.config.pad_token_id
        elif attention_mask is None and given.shape[0] > 1 and not torch.compiler.is_compiling():
            logger.warning_once(
                "The last position of each text is read, even if it is padding: `attention_mask` is missing, and the "
                "config has no `pad_token_id`."
            )
        last = is_token.long().cumsum(1).argmax(1)  # (texts,); the first maximum is at the last token
        is_read, next_ids = torch.arange(given.shape[1], device=last.device) == last[:, None], None
        texts = last.shape[0]
        count: int | None = 0  # of the tokens whose next is predicted
        cast(dict, kwargs).pop("mask_sizes", None)  # a collator does not know which tokens these are
        if labels is not None and input_ids is not None and self.training and self.config.lm_loss_weight > 0:
            tokens = input_ids.masked_fill(~is_token, IGNORED_LABEL)
            next_ids = next_tokens(tokens, is_token)  # (texts, length)
            is_read = is_read | has_label(next_ids)
            sizes, kwargs = step_sizes(kwargs, is_token, tokens)
            count = sizes["next_labels"].total if "next_labels" in sizes else None
        reads = Reads(is_read, None if count is None else texts + count)
        options: Any = {"use_cache": False, "return_dict": True, "token_type_ids": token_type_ids}
        outputs = self.transformer(*rows, read_positions=reads, **options, **kwargs)
        hidden_states = outputs.last_hidden_state
        numbers = torch.arange(texts, device=hidden_states.device)
        extracted = hidden_states[numbers, last.to(hidden_states.device)].unflatten(0, batch)
        loss, logits = self._predict(self.dropout(extracted), labels, num_items_in_batch)
        if labels is not None and next_ids is not None:
            lm_loss = self._lm_loss(hidden_states, next_ids, labels.reshape(batch[0], -1), num_items_in_batch, count)
            loss = loss + self.config.lm_loss_weight * lm_loss
        return self.output_class(loss, logits, outputs.hidden_states, outputs.attentions)

    def _lm_loss(
        self, hidden_states: Tensor, next_ids: Tensor, labels: Tensor, items: Tensor | int | None, count: int | None
    ) -> Any:
        """Average the language model's loss over each text's tokens, and over the texts with labels (batch, ...)."""
        labelled, choices = has_label(labels).sum(1), len(next_ids) // len(labels)
        weights = labelled.repeat_interleave(choices) / choices / has_label(next_ids).sum(1).clamp(min=1)  # (texts,)
        options: Any = {"weights": weights[:, None].expand_as(next_ids), "count": count}
        options["num_items_in_batch"] = labelled.sum() if items is None else items
        return token_loss(self.lm_head, hidden_states, next_ids, training=True, **options)[0]


class VanillaGptForSequenceClassification(VanillaGptClassifier):
    """GPT with a classifier of one text or a pair: classes, several labels at once, or numbers (regression).

    `labels` of shape `(batch,)` or `(batch, num_labels)` are classes, or for several labels or numbers one value for
    each output; `logits` have shape `(batch, num_labels)`. The config's `problem_type` decides the loss:
    cross-entropy, squared error, or binary cross-entropy of each label. Unset, one output is regression, integers are
    classes, and other numbers are several labels.

    Args:
        config (`VanillaGptConfig`): The model's config.

    Source: Radford et al. 2018, 3.2 and 3.3.
    """

    output_class = SequenceClassifierOutput

    def _add_head(self, config: VanillaGptConfig) -> None:
        self.num_labels = config.num_labels
        self.dropout = classifier_dropout(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)

    def _predict(self, extracted: Tensor, labels: Tensor | None, items: Tensor | int | None) -> LossAndLogits:
        logits = self.score(extracted)  # (batch, num_labels)
        return label_loss(self.config, logits, labels, items), logits


class VanillaGptForMultipleChoice(VanillaGptClassifier):
    """GPT with one score for each choice of an ending: each is a text with the context, a delimiter and the choice.

    Inputs have shape `(batch, choices, length)`; `labels` of shape `(batch,)` are the numbers of the right choices;
    `logits` have shape `(batch, choices)`.

    Args:
        config (`VanillaGptConfig`): The model's config.

    Source: Radford et al. 2018, 3.3 and Figure 1.
    """

    output_class = MultipleChoiceModelOutput
    text_axes = 2

    def _add_head(self, config: VanillaGptConfig) -> None:
        self.dropout = classifier_dropout(config)
        head = {"summary": nn.Linear(config.hidden_size, 1)}  # the names of checkpoints
        self.multiple_choice_head = nn.ModuleDict(head)

    def _predict(self, extracted: Tensor, labels: Tensor | None, items: Tensor | int | None) -> LossAndLogits:
        logits = self.multiple_choice_head["summary"](extracted).squeeze(-1)  # (batch, choices)
        return classification_loss(logits, labels, items), logits


# The model class of each Auto class, here and in a checkpoint that carries this file.
AUTO_CLASSES: dict[str, type[VanillaGptPreTrainedModel]] = {
    "AutoModel": VanillaGptModel,
    "AutoModelForCausalLM": VanillaGptForCausalLM,
    "AutoModelForSequenceClassification": VanillaGptForSequenceClassification,
    "AutoModelForMultipleChoice": VanillaGptForMultipleChoice,
}

__all__ = [
    "AUTO_CLASSES",
    "VanillaGptPreTrainedModel",
    *(model_class.__name__ for model_class in dict.fromkeys(AUTO_CLASSES.values())),
]
