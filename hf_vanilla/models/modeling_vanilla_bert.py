"""BERT, the bidirectional encoder of Devlin et al. 2018, with its two pre-training and four fine-tuning heads.

      [CLS]  my  dog  [MASK]  [SEP]  he  likes  play  ##ing  [SEP]      tokens
        A     A   A     A       A    B     B     B      B      B        segments
        0     1   2     3       4    5     6     7      8      9        positions
        |     |   |     |       |    |     |     |      |      |
    +---v-----v---v-----v-------v----v-----v-----v------v------v---+
    |           sum of the three embeddings, norm, dropout         |
    +------------------------------v-------------------------------+
    |  self-attention, add & norm; feed-forward, add & norm        |  x L
    +---v---------------v-------------------v----------------------+
      pooler         transform           classifier
      (tanh)         projection          of each token
        |               |                   |
      next           masked              tags; start and
      sentence?      token               end of an answer

Departures from the paper:
- None in the defaults. Where the paper is silent (epsilon of LayerNorm 1e-12, truncated normal initialisation, a
  bias for each vocabulary entry in the projection), they follow the authors' code.
- In training, masked tokens alone pass through the projection onto the vocabulary; the loss is the same.
- The output at padding is 0 unless it is asked for (`keep_padding`).
- Where a batch has padding, the layers work on its tokens alone, and of the last layer's output only what a head reads
  is computed.

Encoder checkpoints of type `bert` with absolute positions load here; transformers' `BertFor...` read what is saved.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.core_model_loading import WeightTransform
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.processing_utils import Unpack
from transformers.utils.generic import ModelOutput, TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .checks import (
    IGNORED_LABEL,
    check_arguments,
    check_attention_mask,
    check_heads,
    check_input_ids,
    check_labels,
    check_offsets,
    check_position_ids,
    check_shape,
    checked_embeddings,
    flatten_texts,
    has_label,
)
from .configuration_vanilla_bert import VanillaBertConfig
from .conversion_vanilla_bert import BERT_NAMES
from .dropout import Dropout
from .layers import EncoderLayer
from .loss import LossAndLogits, at_least_float32, classification_loss, label_loss, mean_loss, token_loss
from .packing import run_encoder
from .read_positions import WITH_PADDING, Sizes, read_all, read_first, read_labelled, step_sizes
from .self_contained import Pooler, VanillaPreTrainedModel, classifier_dropout
from .sequences import flattened_rows


class Inputs(NamedTuple):
    """What a text is given as, in the order of the encoder's arguments; each may be missing."""

    input_ids: Tensor | None
    attention_mask: Tensor | None
    token_type_ids: Tensor | None
    position_ids: Tensor | None
    inputs_embeds: Tensor | None

    @property
    def given(self) -> Tensor | None:
        """The ids, or the embeddings in their place."""
        return self.input_ids if self.inputs_embeds is None else self.inputs_embeds


class Embeddings(nn.Module):
    """Sum of token, segment and position embeddings, then norm and dropout.

    Args:
        config (`VanillaBertConfig`): The model's config.

    Source: Devlin et al. 2018, section 3 and Figure 2.
    """

    def __init__(self, config: VanillaBertConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        inputs_embeds: Tensor,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Add segments and positions to tokens.

        Args:
            inputs_embeds (`torch.Tensor` of shape `(batch, length, d_model)`): Token embeddings.
            token_type_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Segments; 0 by default.
            position_ids (`torch.LongTensor` of shape `(batch or 1, length)`, *optional*): Positions; counted from 0
                by default.

        Returns:
            `torch.Tensor` of shape `(batch, length, d_model)`: the input of the first layer.
        """
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        if token_type_ids is None:
            token_type_ids = torch.zeros(1, 1, dtype=torch.long, device=inputs_embeds.device)
        positions = self.position_embeddings(position_ids)  # (batch or 1, length, d_model)
        segments = self.token_type_embeddings(token_type_ids)  # (batch or 1, length or 1, d_model)
        return self.dropout(self.LayerNorm(inputs_embeds + segments + positions))


class PredictionTransform(nn.Module):
    """A layer with activation and norm before the projection onto the vocabulary.

    Args:
        config (`VanillaBertConfig`): The model's config.

    Source: `get_masked_lm_output` of the authors' code.
    """

    def __init__(self, config: VanillaBertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            hidden_states (`torch.Tensor` of shape `(..., d_model)`): The last layer's output.

        Returns:
            `torch.Tensor` of shape `(..., d_model)`: what is projected.
        """
        return self.LayerNorm(self.activation(self.dense(hidden_states)))


class MaskedTokenHead(nn.Module):
    """Predicts masked tokens: transform, then a projection onto the vocabulary with a bias for each entry.

    Args:
        config (`VanillaBertConfig`): The model's config.

    Source: Devlin et al. 2018, section 3.1, task 1.
    """

    def __init__(self, config: VanillaBertConfig):
        super().__init__()
        self.transform = PredictionTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))  # the decoder's; where tied, this name is saved

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute the scores of all tokens at every position.

        Args:
            hidden_states (`torch.Tensor` of shape `(..., d_model)`): The last layer's output.

        Returns:
            `torch.Tensor` of shape `(..., vocab)`: logits.
        """
        return self.decoder(self.transform(hidden_states))


class VanillaBertPreTrainedModel(VanillaPreTrainedModel):
    """What all models of the family share: initialisation, and what transformers may do with them."""

    config: VanillaBertConfig
    base_model_prefix = "bert"
    _input_embed_layer = "word_embeddings"
    _no_split_modules = ["Embeddings", "EncoderLayer"]
    # Old files hold the numbers from 0 to 511 too.
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids$"]

    def file_names(self) -> list[WeightTransform]:
        """Return the rules from the names in BERT's own checkpoints, which transformers' `BertFor...` read."""
        return BERT_NAMES

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as the authors do: a normal distribution cut at two standard deviations, biases 0."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
        super()._init_weights(module)


class VanillaBertModel(VanillaBertPreTrainedModel):
    """The encoder: embeddings, layers and, on top of the first token, the pooler.

    Args:
        config (`VanillaBertConfig`): The model's config.
        add_pooling_layer (`bool`, defaults to `True`): Whether to have a pooler.

    Raises:
        ValueError: if `num_attention_heads` does not divide `hidden_size`.

    Source: Devlin et al. 2018, section 3.
    """

    def __init__(self, config: VanillaBertConfig, add_pooling_layer: bool = True):
        check_heads(config)
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList([EncoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.pooler = Pooler(config) if add_pooling_layer else None
        self.post_init()

    def get_position_embeddings(self) -> nn.Embedding:
        """Return the table of learned positions."""
        return self.embeddings.position_embeddings

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        keep_padding: bool = False,
        read_positions: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encode.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Tokens.
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding.
            token_type_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Segments; 0 by default.
            position_ids (`torch.LongTensor` of shape `(batch or 1, length)`, *optional*): Positions; counted from 0
                by default, padding too. Given for one row without a mask, a new sequence begins where they begin at 0
                again, and none sees another (transformers' `DataCollatorWithFlattening`).
            inputs_embeds (`torch.Tensor` of shape `(batch, length, d_model)`, *optional*): In place of `input_ids`.
            keep_padding (`bool`, *optional*, defaults to `False`): Whether padding, too, gets an output that depends
                on the tokens, as transformers' BERT gives it. It is undefined and costs time; otherwise it is 0, in
                eager, compiled and exported code alike.
            read_positions (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 where `last_hidden_state`
                is read, by default everywhere; elsewhere it may then be 0, which spares most of the last layer. The
                first position of each row is read by the pooler, if there is one.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`; without a mask,
                `cu_seq_lens_q` and `max_length_q` of a row that holds several sequences.

        Returns:
            `BaseModelOutputWithPooling`: `last_hidden_state` of shape `(batch, length, d_model)`, `pooler_output` of
            shape `(batch, d_model)`, and what was asked for.

        Raises:
            ValueError: if not exactly one of `input_ids` and `inputs_embeds` is given, an id is outside its table, a
                shape does not fit, or `cu_seq_lens_q` does not fit the row or comes with a mask.
            TypeError: if ids or `cu_seq_lens_q` are no integers.
        """
        inputs_embeds = checked_embeddings(self.embeddings.word_embeddings, input_ids, inputs_embeds)
        batch, length, _ = inputs_embeds.shape
        if self.pooler is not None and length == 0:
            raise ValueError("`input_ids` must have at least one position, the first, which the pooler reads; got 0.")
        check_attention_mask("attention_mask", attention_mask, batch, length)
        if token_type_ids is not None:
            hint = "`type_vocab_size` of the config is the number of segments."
            check_input_ids("token_type_ids", token_type_ids, self.config.type_vocab_size, hint)
            check_shape("token_type_ids", token_type_ids, batch, length)
        sequence_ids = None
        offsets = cast(dict, kwargs).get("cu_seq_lens_q")
        check_offsets(offsets, batch, length, attention_mask)
        if attention_mask is None and batch == 1:
            position_ids, sequence_ids = flattened_rows(position_ids, offsets, length, from_zero=True)
        check_position_ids(position_ids, batch, length, self.config.max_position_embeddings)

        hidden_states = self.embeddings(inputs_embeds, token_type_ids, position_ids)
        hidden_states, first = run_encoder(
            self,
            hidden_states,
            attention_mask,
            keep_padding,
            read_positions,
            reads_first=self.pooler is not None,
            sequence_ids=sequence_ids,
            **kwargs,
        )
        return BaseModelOutputWithPooling(hidden_states, None if self.pooler is None else self.pooler(first))


class VanillaBertWithHead(VanillaBertPreTrainedModel):
    """What the heads below share: a head names the positions that it reads, and makes a loss and logits of them.

    Args:
        config (`VanillaBertConfig`): The model's config.
    """

    output_class: Any
    has_pooler = True
    # From the encoder's outputs, all kinds of labels, the number of labels in a step, and the number of this batch's
    # labelled tokens if it is known, to the loss and all logits.
    _predict: Callable[..., tuple]
    # From ids or embeddings, mask, labels, whether this is training, and sizes of masks, to what the head reads of the
    # encoder: here the pooled first position.
    _reads: Callable[..., dict[str, Any]] = staticmethod(read_first)

    def __init__(self, config: VanillaBertConfig):
        super().__init__(config)
        self.bert = VanillaBertModel(config, add_pooling_layer=self.has_pooler)
        self._add_head(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ModelOutput:
        """Encode and predict, and with `labels` compute the loss, the mean over them.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Tokens.
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding.
            token_type_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Segments; 0 by default.
            position_ids (`torch.LongTensor` of shape `(batch or 1, length)`, *optional*): Positions.
            inputs_embeds (`torch.Tensor` of shape `(batch, length, d_model)`, *optional*): In place of `input_ids`.
            labels (`torch.Tensor`, *optional*): As the class describes them; among classes, -100 is ignored.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): Labels of the whole optimizer step, in place of
                those of this batch: accumulated batches and several processes then give the gradient of one large
                batch.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`; and `mask_sizes`, the
                counts of a collator (`host_sizes`).

        Returns:
            `ModelOutput`: transformers' class for the task, with `loss` of shape `()` and `logits`.

        Raises:
            ValueError: if a label is outside its range, or a shape does not fit.
            TypeError: if ids or classes are no integers.
        """
        inputs = Inputs(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        return self._run(inputs, {"labels": labels}, num_items_in_batch, **kwargs)

    def _add_head(self, config: VanillaBertConfig) -> None:
        """Add the layers on top of the encoder: here a classifier."""
        self.num_labels = config.num_labels
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def _run(
        self, inputs: Inputs, labels: dict[str, Tensor | None], items: Tensor | int | None = None, **kwargs: Any
    ) -> Any:
        """Encode ids, mask, segments, positions or embeddings, and predict."""
        check_arguments(items, input_ids=inputs.input_ids, inputs_embeds=inputs.inputs_embeds, **labels)
        first = next(iter(labels.values()))
        sizes, kwargs = step_sizes(kwargs, inputs.attention_mask, first)
        outputs = self._encode(inputs, first, sizes, **kwargs)
        count = sizes["labels"].total if "labels" in sizes else None
        loss, *logits = self._predict(outputs, *labels.values(), items, count)
        return self.output_class(loss, *logits, outputs.hidden_states, outputs.attentions)

    def _encode(self, inputs: Inputs, labels: Tensor | None, sizes: Sizes, **kwargs: Any) -> Any:
        """Run the encoder."""
        reads = self._reads(inputs.given, inputs.attention_mask, labels, self.training, sizes)
        return self.bert(*inputs, return_dict=True, **{**reads, **kwargs})


class VanillaBertWithTokenHead(VanillaBertWithHead):
    """What both models that predict masked tokens share: the head, tied to the embeddings.

    Args:
        config (`VanillaBertConfig`): The model's config.

    Source: Devlin et al. 2018, section 3.1, task 1.
    """

    _tied_weights_keys = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def get_output_embeddings(self) -> nn.Linear:
        """Return the projection onto the vocabulary."""
        return self._token_head().decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the projection onto the vocabulary, and its bias."""
        self._token_head().decoder = new_embeddings
        self._token_head().bias = new_embeddings.bias

    def _add_head(self, config: VanillaBertConfig) -> None:
        self.cls = nn.ModuleDict({"predictions": MaskedTokenHead(config)})

    def _token_head(self) -> MaskedTokenHead:
        """Return the head that predicts masked tokens."""
        return cast(MaskedTokenHead, self.cls.predictions)

    def _reads(self, inputs: Any, mask: Any, labels: Tensor | None, training: bool, sizes: Sizes) -> dict[str, Any]:
        return read_labelled(inputs, mask, labels, self._token_head().training, sizes)

    def _predict_tokens(self, outputs: Any, labels: Tensor | None, items: Any, count: int | None) -> LossAndLogits:
        """Compute loss and logits of masked tokens."""
        head = self._token_head()
        options: Any = {"training": head.training, "transform": head.transform, "num_items_in_batch": items}
        return token_loss(head.decoder, outputs.last_hidden_state, labels, count=count, **options)


class VanillaBertForPreTraining(VanillaBertWithTokenHead):
    """BERT with both pre-training heads: masked tokens, and whether B follows A.

    Args:
        config (`VanillaBertConfig`): The model's config.

    Source: Devlin et al. 2018, section 3.1.
    """

    output_class = BertForPreTrainingOutput
    takes_label_smoothing_factor = False  # transformers' trainer would compare logits with other labels

    def _add_head(self, config: VanillaBertConfig) -> None:
        super()._add_head(config)
        self.cls["seq_relationship"] = nn.Linear(config.hidden_size, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BertForPreTrainingOutput:
        """Predict masked tokens and the next sentence, and with labels compute the loss: the sum of both means.

        With `num_items_in_batch`, as transformers' Trainer gives it, both means are weighted by masked tokens: the sum
        of the masked tokens' losses is divided by it, and each pair's next-sentence loss counts by its share of these
        tokens. Accumulated batches and several processes then add up to the gradient of one large batch, exactly.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Tokens.
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding.
            token_type_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Segments; 0 by default.
            position_ids (`torch.LongTensor` of shape `(batch or 1, length)`, *optional*): Positions.
            inputs_embeds (`torch.Tensor` of shape `(batch, length, d_model)`, *optional*): In place of `input_ids`.
            labels (`torch.LongTensor` of shape `(batch, length)`, *optional*): True tokens of the masked positions,
                -100 elsewhere.
            next_sentence_label (`torch.LongTensor` of shape `(batch,)`, *optional*): 0 where B follows A, 1 where it
                is a random segment.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): Labels of the whole optimizer step.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`; and `mask_sizes`, the
                counts of a collator (`host_sizes`).

        Returns:
            `BertForPreTrainingOutput`: `loss` of shape `()` in nats over what labels there are, `prediction_logits` of
            shape `(batch, length, vocab)` (`None` in training with `labels`), `seq_relationship_logits` of shape
            `(batch, 2)`.

        Raises:
            ValueError: if a label is no token or no class, or has another shape.
            TypeError: if an argument is no tensor.
        """
        inputs = Inputs(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        labelled = {"labels": labels, "next_sentence_label": next_sentence_label}
        return self._run(inputs, labelled, num_items_in_batch, **kwargs)

    def _predict(
        self, outputs: Any, labels: Tensor | None, is_random: Tensor | None, items: Any, count: int | None
    ) -> tuple:
        loss, logits = self._predict_tokens(outputs, labels, items, count)
        next_logits = cast(nn.Linear, self.cls.seq_relationship)(outputs.pooler_output)  # (batch, 2)
        if is_random is not None:
            next_loss = self._next_sentence_loss(next_logits, is_random, labels, items)
            loss = next_loss if loss is None else loss + next_loss.to(loss.device)
        return loss, logits, next_logits

    def _next_sentence_loss(self, logits: Tensor, is_random: Tensor, labels: Tensor | None, items: Any) -> Any:
        """Average over pairs; with `items`, weigh each pair by its number of masked tokens."""
        is_random, hint = is_random.flatten(), "0 means that B follows A, and 1 that it is a random segment."
        check_labels("next_sentence_label", is_random, (logits.shape[0],), 2, hint)
        if labels is None or items is None:
            return classification_loss(logits, is_random)
        # (batch,), 0 for -100
        is_random, tokens = is_random.long().to(logits.device), has_label(labels).sum(1).to(logits.device)
        losses = nn.functional.cross_entropy(at_least_float32(logits), is_random, reduction="none")
        return mean_loss((losses * tokens).sum(), 1, items)


class VanillaBertForMaskedLM(VanillaBertWithTokenHead):
    """BERT with the head that predicts masked tokens.

    `labels` of shape `(batch, length)` are the true tokens of the masked positions, -100 elsewhere. `logits` have
    shape `(batch, length, vocab)`, and are `None` in training with `labels`; the loss is in nats.

    Args:
        config (`VanillaBertConfig`): The model's config.

    Source: Devlin et al. 2018, section 3.1, task 1.
    """

    # of a pre-trained model, which it does without; transformers adds those of `self.bert`
    _keys_to_ignore_on_load_unexpected = [r"^bert\.pooler\.", r"^cls\.seq_relationship\."]
    output_class = MaskedLMOutput
    has_pooler = False
    _predict = VanillaBertWithTokenHead._predict_tokens


class VanillaBertForNextSentencePrediction(VanillaBertWithHead):
    """BERT with the next-sentence head: does B follow A?

    `labels` of shape `(batch,)` are 0 where B follows A, 1 where it is a random segment; `logits` have shape
    `(batch, 2)`.

    Args:
        config (`VanillaBertConfig`): The model's config.

    Source: Devlin et al. 2018, section 3.1, task 2.
    """

    output_class = NextSentencePredictorOutput

    def _add_head(self, config: VanillaBertConfig) -> None:
        self.cls = nn.ModuleDict({"seq_relationship": nn.Linear(config.hidden_size, 2)})

    def _predict(self, outputs: Any, labels: Tensor | None, items: Any, count: int | None) -> LossAndLogits:
        logits = cast(nn.Linear, self.cls.seq_relationship)(outputs.pooler_output)  # (batch, 2)
        return classification_loss(logits, labels, items), logits


class VanillaBertForSequenceClassification(VanillaBertWithHead):
    """BERT with a classifier of one text or a pair: classes, several labels at once, or numbers (regression).

    `labels` of shape `(batch,)` or `(batch, num_labels)` are classes, or for several labels or numbers one value for
    each output; `logits` have shape `(batch, num_labels)`. The config's `problem_type` decides the loss:
    cross-entropy, squared error, or binary cross-entropy of each label. Unset, one output is regression, integers are
    classes, and other numbers are several labels.

    Args:
        config (`VanillaBertConfig`): The model's config.

    Source: Devlin et al. 2018, section 4.1.
    """

    output_class = SequenceClassifierOutput

    def _predict(self, outputs: Any, labels: Tensor | None, items: Any, count: int | None) -> LossAndLogits:
        logits = self.classifier(self.dropout(outputs.pooler_output))  # (batch, num_labels)
        return label_loss(self.config, logits, labels, items), logits


class VanillaBertForTokenClassification(VanillaBertWithHead):
    """BERT with a classifier of each token, as for named entities.

    `labels` of shape `(batch, length)` are classes, -100 is ignored; `logits` have shape `(batch, length,
    num_labels)`.

    Args:
        config (`VanillaBertConfig`): The model's config.

    Source: Devlin et al. 2018, section 5.3.
    """

    output_class = TokenClassifierOutput
    has_pooler = False
    _reads = staticmethod(read_all)

    def _predict(self, outputs: Any, labels: Tensor | None, items: Any, count: int | None) -> LossAndLogits:
        logits = self.classifier(self.dropout(outputs.last_hidden_state))  # (batch, length, num_labels)
        return classification_loss(logits, labels, items), logits


class VanillaBertForQuestionAnswering(VanillaBertWithHead):
    """BERT with two scores for each token: that an answer starts, and that it ends here.

    Args:
        config (`VanillaBertConfig`): The model's config.

    Source: Devlin et al. 2018, section 4.2.
    """

    output_class = QuestionAnsweringModelOutput
    has_pooler = False
    # the scores of padding enter the softmax over positions, as in transformers
    _reads = staticmethod(lambda *_: WITH_PADDING)

    def _add_head(self, config: VanillaBertConfig) -> None:
        self.num_labels = 2
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Score starts and ends, and with their positions compute the loss, the mean of both.

        A position beyond the end of the input, or of -100, is ignored; other negative ones count as 0, as in
        transformers.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Tokens.
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding.
            token_type_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Segments; 0 by default.
            position_ids (`torch.LongTensor` of shape `(batch or 1, length)`, *optional*): Positions.
            inputs_embeds (`torch.Tensor` of shape `(batch, length, d_model)`, *optional*): In place of `input_ids`.
            start_positions (`torch.LongTensor` of shape `(batch,)`, *optional*): Index of the answer's first token.
            end_positions (`torch.LongTensor` of shape `(batch,)`, *optional*): Index of the answer's last token.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`; and `mask_sizes`, the
                counts of a collator (`host_sizes`).

        Returns:
            `QuestionAnsweringModelOutput`: `loss` of shape `()` in nats, `start_logits` and `end_logits` of shape
            `(batch, length)`.

        Raises:
            ValueError: if a position has another shape.
            TypeError: if an argument is no tensor.
        """
        inputs = Inputs(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        labels = {"start_positions": start_positions, "end_positions": end_positions}
        return self._run(inputs, labels, **kwargs)

    def _predict(self, outputs: Any, start: Tensor | None, end: Tensor | None, items: None, count: None) -> tuple:
        starts, ends = self.qa_outputs(outputs.last_hidden_state).unbind(-1)  # (batch, length) each
        loss = None
        if start is not None and end is not None:
            start_loss = self._position_loss("start_positions", starts, start)
            loss = (start_loss + self._position_loss("end_positions", ends, end)) / 2
        return loss, starts.contiguous(), ends.contiguous()

    def _position_loss(self, name: str, logits: Tensor, positions: Tensor) -> Any:
        """Compute the cross-entropy over positions; those beyond the end of the input, and -100, are ignored."""
        batch, length = logits.shape
        if positions.numel() != batch:
            raise ValueError(f"`{name}` must have shape ({batch},), got {tuple(positions.shape)}.")
        positions = positions.flatten().long()
        positions = positions.clamp(min=0).masked_fill(positions == IGNORED_LABEL, IGNORED_LABEL)
        return classification_loss(logits, positions.masked_fill(positions >= length, IGNORED_LABEL))


class VanillaBertForMultipleChoice(VanillaBertWithHead):
    """BERT with one score for each choice of an ending.

    Inputs have shape `(batch, choices, length)`, and `inputs_embeds` one dimension more. `labels` of shape `(batch,)`
    are the numbers of the right choices; `logits` have shape `(batch, choices)`.

    Args:
        config (`VanillaBertConfig`): The model's config.

    Source: Devlin et al. 2018, section 4.4.
    """

    output_class = MultipleChoiceModelOutput

    def _add_head(self, config: VanillaBertConfig) -> None:
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, 1)

    def _encode(self, inputs: Inputs, labels: Tensor | None, sizes: Sizes, **kwargs: Any) -> Any:
        rows, shape = flatten_texts(inputs._asdict(), axes=2)
        outputs = super()._encode(Inputs(*rows), labels, sizes, **kwargs)
        outputs.pooler_output = outputs.pooler_output.unflatten(0, shape)  # (batch, choices, d_model)
        return outputs

    def _predict(self, outputs: Any, labels: Tensor | None, items: Any, count: int | None) -> LossAndLogits:
        logits = self.classifier(self.dropout(outputs.pooler_output)).squeeze(-1)  # (batch, choices)
        return classification_loss(logits, labels, items), logits


# The model class of each Auto class, here and in a checkpoint that carries this file.
AUTO_CLASSES: dict[str, type[VanillaBertPreTrainedModel]] = {
    "AutoModel": VanillaBertModel,
    "AutoModelForTextEncoding": VanillaBertModel,
    "AutoModelForPreTraining": VanillaBertForPreTraining,
    "AutoModelForMaskedLM": VanillaBertForMaskedLM,
    "AutoModelForNextSentencePrediction": VanillaBertForNextSentencePrediction,
    "AutoModelForSequenceClassification": VanillaBertForSequenceClassification,
    "AutoModelForTokenClassification": VanillaBertForTokenClassification,
    "AutoModelForQuestionAnswering": VanillaBertForQuestionAnswering,
    "AutoModelForMultipleChoice": VanillaBertForMultipleChoice,
}

__all__ = [
    "AUTO_CLASSES",
    "VanillaBertPreTrainedModel",
    *(model_class.__name__ for model_class in dict.fromkeys(AUTO_CLASSES.values())),
]
