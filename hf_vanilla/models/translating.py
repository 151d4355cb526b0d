"""From texts to ranked translations, with any encoder-decoder's `generate()`."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from .alignment import WordAlignment, word_alignments
from .checks import check_evaluation_mode
from .text_batches import padded


# The score of a hypothesis that was not found, as in transformers.
NOT_FOUND = -1e9


# Options of `generate()` and of other pipelines that translating sets itself, and what to do instead.
SET_HERE = {
    "max_new_tokens": "give `max_length_offset`, how many tokens longer than its source a translation may be",
    "max_length": "give `max_length_offset`, how many tokens longer than its source a translation may be",
    "num_return_sequences": "give `n_best`",
    "batch_size": "give `max_tokens_per_batch`",
    "do_sample": "leave it out, as translations are searched for and not drawn",
    "output_scores": "leave it out, as every translation has its score",
    "output_logits": "leave it out, as every translation has its score",
    "return_dict_in_generate": "leave it out",
}


@dataclass
class Translation:
    """One translation of a text.

    Args:
        text (`str`): The translation.
        score (`float`): Log probability in nats, divided by the length penalty; the higher, the better.
        alignment (`WordAlignment`, *optional*): Which words of the source its words come from.
    """

    text: str
    score: float
    alignment: WordAlignment | None = None


def length_penalty_of(
    length: float | torch.Tensor, length_penalty: float, length_penalty_type: str
) -> float | torch.Tensor:
    """Compute what the log probability of a hypothesis is divided by.

    Args:
        length (`float` or `torch.Tensor`): Number of generated tokens, `</s>` included, the decoder's start not.
        length_penalty (`float`): The exponent alpha. 0 means no penalty.
        length_penalty_type (`str`): `"gnmt"` for ((5 + length) / 6)^alpha, or `"power"` for length^alpha, which is
            transformers' own.

    Returns:
        `float` or `torch.Tensor`: the penalty.

    Raises:
        ValueError: if the exponent is not finite, or the type is another one.

    Source: Wu et al. 2016, equation 14; Vaswani et al. 2017, 6.1 (alpha = 0.6). Wu et al. don't say whether |Y| counts
    `</s>`; it does in Tensor2Tensor, the code of the second paper.
    """
    if not math.isfinite(length_penalty):
        raise ValueError(f"`length_penalty` must be finite, got {length_penalty}.")
    if length_penalty_type == "gnmt":
        return ((5 + length) / 6) ** length_penalty
    if length_penalty_type == "power":
        return length**length_penalty
    raise ValueError(f'`length_penalty_type` must be "gnmt" or "power", got {length_penalty_type!r}.')


def check_not_set_here(options: Iterable[str]) -> None:
    """Check that no option is one that translating sets itself.

    Args:
        options (`Iterable[str]`): Names of options.

    Raises:
        ValueError: if one is.
    """
    for name in options:
        if name in SET_HERE:
            raise ValueError(f"`{name}` is not an option of translations; {SET_HERE[name]}.")


def check_search(
    model: PreTrainedModel,
    *,
    num_beams: int,
    n_best: int,
    max_length_offset: int,
    length_penalty: float,
    length_penalty_type: str,
    max_source_length: int | None,
    generate_kwargs: Iterable[str],
) -> None:
    """Check that a model can translate, and the options of the search.

    Args:
        model (`PreTrainedModel`): The model.
        num_beams (`int`): Beams of the search.
        n_best (`int`): Translations of each text.
        max_length_offset (`int`): How many tokens longer than its source a translation may be.
        length_penalty (`float`): Exponent of the length penalty.
        length_penalty_type (`str`): Kind of the length penalty.
        max_source_length (`int`, *optional*): Most tokens of a text.
        generate_kwargs (`Iterable[str]`): Names of the options that are passed on to `generate()`.

    Raises:
        ValueError: if the model is in training mode, an option is out of its range, or one that is to be passed on is
            set here.
    """
    check_evaluation_mode(model)
    if not 1 <= n_best <= num_beams:
        raise ValueError(f"`n_best` must be in [1, `num_beams` = {num_beams}], got {n_best}.")
    if max_length_offset < 0:
        raise ValueError(f"`max_length_offset` must not be negative, got {max_length_offset}.")
    if max_source_length is not None and max_source_length < 1:
        raise ValueError(f"`max_source_length` must be at least 1, got {max_source_length}.")
    length_penalty_of(1, length_penalty, length_penalty_type)
    check_not_set_here(generate_kwargs)


def source_batch(model: PreTrainedModel, ids: list[list[int]], max_length_offset: int) -> dict[str, Any]:
    """Make what `generate()` needs to know of a batch.

    Args:
        model (`PreTrainedModel`): The model, whose learned positions limit what it writes.
        ids (`list[list[int]]`): Token ids of the sources.
        max_length_offset (`int`): How many tokens longer than the longest source a translation may be.

    Returns:
        `dict[str, Any]`: `input_ids` and `attention_mask` of shape `(batch, src_len)`, and `max_new_tokens`.
    """
    longest = max(len(sequence) for sequence in ids) + max_length_offset
    if getattr(model.config, "position_type", "learned") == "learned":
        longest = min(longest, getattr(model.config, "max_position_embeddings", longest))
    return {
        "input_ids": padded(ids, model.config.pad_token_id, model.device),
        "attention_mask": padded([[1] * len(sequence) for sequence in ids], 0, model.device),
        "max_new_tokens": longest,
    }


def decode_n_best(
    tokenizer: PreTrainedTokenizerBase, sequences: torch.Tensor, scores: torch.Tensor, n_best: int
) -> list[list[Translation]]:
    """Turn the results of a search into texts.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.
        sequences (`torch.LongTensor` of shape `(batch * n_best, tgt_len)`): Token ids, best first for each source.
        scores (`torch.Tensor` of shape `(batch * n_best,)`): Their scores; those of -1e9 and less were not found.
        n_best (`int`): Sequences of each source.

    Returns:
        `list[list[Translation]]`: for each source its translations, at least one.
    """
    texts = tokenizer.batch_decode(sequences, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    found = list(map(Translation, texts, scores.tolist()))
    rows = [found[start : start + n_best] for start in range(0, len(found), n_best)]
    return [row[:1] + [translation for translation in row[1:] if translation.score > NOT_FOUND] for row in rows]


def align_translations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    found: list[list[Translation]],
    max_length: int | None = None,
) -> None:
    """Align the words of all translations with those of their texts, in place.

    Args:
        model (`PreTrainedModel`): An encoder-decoder model.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the source.
        target_tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.
        texts (`Sequence[str]`): The texts.
        found (`list[list[Translation]]`): The translations of each.
        max_length (`int`, *optional*): Most tokens of a text; the model's limit by default.
    """
    pairs = [(text, translation) for text, row in zip(texts, found, strict=True) for translation in row]
    alignments = word_alignments(
        model,
        tokenizer,
        [text for text, _ in pairs],
        [translation.text for _, translation in pairs],
        target_tokenizer=target_tokenizer,
        max_length=max_length,
    )
    for (_, translation), alignment in zip(pairs, alignments, strict=True):
        translation.alignment = alignment


def search_and_rank(
    model: PreTrainedModel,
    ids: list[list[int]],
    *,
    num_beams: int,
    length_penalty: float,
    length_penalty_type: str,
    max_length_offset: int,
    n_best: int,
    **generate_kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Search with transformers' `generate()`, and rank what it finds by any length penalty.

    transformers' search divides log probabilities by length^alpha. GNMT's penalty is not to be had from it, so the
    search, with the same alpha, finds `num_beams` hypotheses, and only these are put into the order of GNMT's scores.

    Args:
        model (`PreTrainedModel`): An encoder-decoder model.
        ids (`list[list[int]]`): Token ids of the sources.
        num_beams (`int`): Beams of the search; 1 is greedy.
        length_penalty (`float`): Exponent alpha of the length penalty.
        length_penalty_type (`str`): `"gnmt"` or `"power"`.
        max_length_offset (`int`): How many tokens longer than the longest source a translation may be.
        n_best (`int`): Hypotheses to return for each source.
        **generate_kwargs: Passed on to `generate()`.

    Returns:
        `tuple[torch.LongTensor, torch.Tensor]`: sequences of shape `(batch * n_best, tgt_len)` and their scores of
        shape `(batch * n_best,)`, -inf for what was not found.
    """
    outputs = model.generate(
        **source_batch(model, ids, max_length_offset),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=num_beams == 1,
        **(generate_kwargs if num_beams == 1 else {"length_penalty": length_penalty, **generate_kwargs}),
    )
    if num_beams == 1:
        log_probs = model.compute_transition_scores(outputs.sequences, outputs.logits, normalize_logits=True)
        is_token = outputs.sequences[:, -log_probs.shape[1] :] != model.config.pad_token_id  # (batch, tgt_len)
        lengths = is_token.sum(1)
        sums, is_found = log_probs.masked_fill(~is_token, 0.0).sum(1), lengths > 0
    else:
        lengths = (outputs.beam_indices >= 0).sum(1)  # (batch * num_beams,)
        sums = outputs.sequences_scores * length_penalty_of(lengths.clamp(min=1), length_penalty, "power")
        is_found = torch.minimum(outputs.sequences_scores, sums) > NOT_FOUND / 2
    scores = sums / length_penalty_of(lengths.clamp(min=1), length_penalty, length_penalty_type)
    scores = scores.masked_fill(~is_found, -torch.inf).view(-1, num_beams)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    sequences = outputs.sequences.view(len(ids), num_beams, -1)
    best = order[:, :n_best, None].expand(-1, -1, sequences.shape[2])
    return sequences.gather(1, best).flatten(0, 1), scores[:, :n_best].flatten()


__all__ = [
    "Translation",
    "align_translations",
    "check_not_set_here",
    "check_search",
    "decode_n_best",
    "length_penalty_of",
    "search_and_rank",
    "source_batch",
]
