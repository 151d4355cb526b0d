"""Forced scoring: the probability of given translations.

The log probability of a pair is the sum over the tokens of the target, `</s>` included, of log p(token | previous
tokens, source), without label smoothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.generation import GenerateBeamEncoderDecoderOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput

from ..models.checks import (
    IGNORED_LABEL,
    as_texts,
    check_arguments,
    check_evaluation_mode,
    check_input_ids,
    check_not_nan,
)
from ..models.text_batches import batches_by_length, default_max_length, padded, padded_inputs, token_ids
from ..models.translating import length_penalty_of
from .beam_search import log_sum_exp
from .cpu_layers import fast_model


@dataclass
class ScoreOutput(ModelOutput):
    """Output of [`score`].

    Args:
        scores (`torch.Tensor` of shape `(batch,)`): Log probabilities of the targets in nats, divided by the length
            penalty if there is one.
        token_counts (`torch.LongTensor` of shape `(batch,)`): Number of scored tokens, `</s>` included.
        token_log_probs (`torch.Tensor` of shape `(batch, tgt_len)`): Log probability of each token; 0 where the label
            is -100.
    """

    scores: torch.Tensor = None  # type: ignore[assignment]  # ModelOutput needs defaults
    token_counts: torch.Tensor = None  # type: ignore[assignment]
    token_log_probs: torch.Tensor = None  # type: ignore[assignment]


@torch.no_grad()
def score(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    length_penalty: float = 0.0,
    length_penalty_type: str = "gnmt",
) -> ScoreOutput:
    """Score given targets.

    With the length penalty of a beam search, the scores are those of its hypotheses.

    Args:
        model (`PreTrainedModel`): An encoder-decoder model, in evaluation mode.
        input_ids (`torch.LongTensor` of shape `(batch, src_len)`): Source tokens.
        attention_mask (`torch.Tensor` of shape `(batch, src_len)`, *optional*): Not 0 for tokens, 0 for padding.
        labels (`torch.LongTensor` of shape `(batch, tgt_len)`): Target tokens without the start token; -100 is
            padding.
        length_penalty (`float`, defaults to 0.0): Exponent of the length penalty; 0 means none.
        length_penalty_type (`str`, defaults to `"gnmt"`): `"gnmt"` or `"power"`, as in [`length_penalty_of`].

    Returns:
        `ScoreOutput`: `scores` and `token_counts` of shape `(batch,)`, `token_log_probs` of shape `(batch, tgt_len)`.
        A target without tokens has score 0.

    Raises:
        ValueError: if the model is in training mode or gives nan, `labels` and `input_ids` have different batch sizes,
            a label is outside the vocabulary, or `length_penalty_type` is unknown.
        TypeError: if the model is no encoder-decoder.
    """
    length_penalty_of(1, length_penalty, length_penalty_type)
    check_evaluation_mode(model)
    if not model.config.is_encoder_decoder:
        raise TypeError(f"`model` must be an encoder-decoder, which reads a source; got a {type(model).__name__}.")
    check_arguments(input_ids=input_ids, labels=labels)
    if len(labels) != len(input_ids):
        raise ValueError(f"`labels` must have as many rows as `input_ids` ({len(input_ids)}), got {len(labels)}.")
    is_scored = labels != IGNORED_LABEL
    targets = labels.masked_fill(~is_scored, 0)
    check_input_ids("labels", targets, model.config.vocab_size)
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(labels)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids}
    logits = model(**inputs, return_dict=True).logits  # (batch, tgt_len, vocab)
    token_log_probs = logits.gather(2, targets[..., None]).squeeze(2) - log_sum_exp(logits)  # (batch, tgt_len)
    token_log_probs = token_log_probs.masked_fill(~is_scored, 0.0)
    check_not_nan(token_log_probs)
    token_counts = is_scored.sum(1)
    penalty = length_penalty_of(token_counts.clamp(min=1), length_penalty, length_penalty_type)
    return ScoreOutput(token_log_probs.sum(1) / penalty, token_counts, token_log_probs)


def labels_of_beams(outputs: GenerateBeamEncoderDecoderOutput) -> torch.LongTensor:
    """Convert the hypotheses of a beam search to labels, for `score` or `forced_attention`.

    Args:
        outputs (`GenerateBeamEncoderDecoderOutput`): Output of `generate()` with `return_dict_in_generate=True`.

    Returns:
        `torch.LongTensor` of shape `(batch * num_return_sequences, tgt_len)`: the generated tokens, padded with -100.
    """
    generated = outputs.sequences[:, -outputs.beam_indices.shape[1] :]
    return generated.masked_fill(outputs.beam_indices < 0, IGNORED_LABEL)


@dataclass
class TextScore:
    """Log probability of a text.

    Args:
        score (`float`): Log probability in nats, divided by the length penalty if there is one.
        tokens (`int`): Number of scored tokens, `</s>` included.
    """

    score: float
    tokens: int


def score_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    length_penalty: float = 0.0,
    length_penalty_type: str = "gnmt",
    max_length: int | None = None,
    max_tokens_per_batch: int = 4096,
    show_progress: bool = False,
) -> list[TextScore]:
    """Score pairs of texts, in batches of similar length.

    ```python
    model = AutoModelForSeq2SeqLM.from_pretrained("runs/en-de")
    tokenizer, target_tokenizer = load_tokenizers("runs/en-de")
    [found] = score_texts(model, tokenizer, ["a man runs ."], ["ein mann rennt ."], target_tokenizer=target_tokenizer)
    found.score / found.tokens  # nats per token
    ```

    Args:
        model (`PreTrainedModel`): An encoder-decoder model, in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer, of the source and, unless another is given, the target.
        sources (`Sequence[str]`): Sentences.
        targets (`Sequence[str]`): Their translations.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer, if it is another one.
        length_penalty (`float`, defaults to 0.0): Exponent of the length penalty; 0 means none.
        length_penalty_type (`str`, defaults to `"gnmt"`): `"gnmt"` or `"power"`, as in [`length_penalty_of`].
        max_length (`int`, *optional*): Most tokens of a text; longer ones are truncated, with a warning that counts
            them. The model's limit by default.
        max_tokens_per_batch (`int`, defaults to 4096): Most tokens of a batch, padding included, source and target
            together.
        show_progress (`bool`, defaults to `False`): Whether to draw a progress bar on standard error.

    Returns:
        `list[TextScore]`: one for each pair, in order.

    Raises:
        ValueError: if there are not as many targets as sources, the model is in training mode or gives nan,
            `max_length` is below 1, or `length_penalty_type` is unknown.
        TypeError: if sources or targets are a single string, or contain anything but strings, or the model is no
            encoder-decoder.
    """
    sources = as_texts("sources", sources, allows_one=False)
    targets = as_texts("targets", targets, allows_one=False)
    if len(sources) != len(targets):
        raise ValueError(f"`targets` must be as many as `sources` ({len(sources)}), got {len(targets)}: one for each.")
    check_evaluation_mode(model)
    max_length = default_max_length(model, tokenizer) if max_length is None else max_length
    source_ids = token_ids(tokenizer, sources, max_length, "sources")
    target_ids = token_ids(target_tokenizer or tokenizer, targets, max_length, "targets")
    lengths = [len(source) + len(target) for source, target in zip(source_ids, target_ids, strict=True)]
    fast = fast_model(model, sum(lengths))
    scores: dict[int, TextScore] = {}
    with tqdm(total=len(sources), unit="pair", disable=not show_progress) as progress:
        for batch in batches_by_length(lengths, max_tokens_per_batch):
            outputs = score(
                fast,
                **padded_inputs(model, [source_ids[number] for number in batch]),
                labels=padded([target_ids[number] for number in batch], IGNORED_LABEL, model.device),
                length_penalty=length_penalty,
                length_penalty_type=length_penalty_type,
            )
            for number, value, count in zip(batch, outputs.scores, outputs.token_counts, strict=True):
                scores[number] = TextScore(float(value), int(count))
            progress.update(len(batch))
    return [scores[number] for number in range(len(sources))]


__all__ = ["ScoreOutput", "TextScore", "labels_of_beams", "score", "score_texts"]
