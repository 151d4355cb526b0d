"""Translate many texts: sorted by length, batched by tokens, and given back in their order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .beam_search import beam_search


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a text.

    Args:
        text (`str`): The translation.
        score (`float`): Its log probability in nats, divided by the length penalty; larger is better.
        token_ids (`tuple[int, ...]`): Its tokens, the decoder's start left out, `</s>` included.
    """

    text: str
    score: float
    token_ids: tuple[int, ...]


NOTHING = Hypothesis("", 0.0, ())


@torch.inference_mode()
def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    num_beams: int = 4,
    n_best: int = 1,
    length_penalty: float = 0.6,
    length_penalty_type: str = "gnmt",
    max_length_offset: int = 50,
    max_source_length: int = 1024,
    max_tokens_per_batch: int = 4096,
    show_progress: bool = False,
) -> list[list[Hypothesis]]:
    """Translate texts with beam search; the defaults are the paper's.

    Args:
        model (`PreTrainedModel`): An encoder-decoder model. It is put into evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Of the source.
        texts (`Sequence[str]`): What to translate. A text of white space alone has an empty translation.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): Of the target, if it has a vocabulary of its own.
        num_beams (`int`, defaults to 4): Beams; 1 is greedy search.
        n_best (`int`, defaults to 1): Translations of each text, at most `num_beams`.
        length_penalty (`float`, defaults to 0.6): The exponent alpha of the length penalty; 0 means none.
        length_penalty_type (`str`, defaults to `"gnmt"`): `"gnmt"`, the paper's
            ((5 + length) / 6)^alpha, or `"power"`, transformers' length^alpha.
        max_length_offset (`int`, defaults to 50): How many tokens longer than the longest source of its batch a
            translation may be.
        max_source_length (`int`, defaults to 1024): Tokens of a source; more are cut off on the right, and a warning
            tells how often.
        max_tokens_per_batch (`int`, defaults to 4096): Size of a batch in source tokens, padding counted.
        show_progress (`bool`, defaults to `False`): Whether to draw a progress bar.

    Returns:
        `list[list[Hypothesis]]`: for each text, in the order of `texts`, its `n_best` translations, best first.

    Raises:
        TypeError: if `texts` is one string.
        ValueError: if a number is out of its range.

    Source: Vaswani et al. 2017, 6.1: beam 4, alpha 0.6, maximum length input + 50.
    """
    if isinstance(texts, str):
        raise TypeError("`texts` must be a list of strings, got a single string; put it into a list.")
    limits = {"num_beams": num_beams, "n_best": n_best, "max_tokens_per_batch": max_tokens_per_batch}
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    if n_best > num_beams:
        raise ValueError(f"`n_best` ({n_best}) must not exceed `num_beams` ({num_beams}): take more beams.")
    if max_length_offset < 0:
        raise ValueError(f"`max_length_offset` must not be negative, got {max_length_offset}.")
    target_tokenizer = tokenizer if target_tokenizer is None else target_tokenizer
    sources = _encode(model, tokenizer, texts, max_source_length)
    translations = [[NOTHING] * n_best for _ in texts]
    model.eval()
    with tqdm(total=len(sources), unit="text", disable=not show_progress) as progress:
        for numbers in _batches(sources, max_tokens_per_batch):
            batch = tokenizer.pad({"input_ids": [sources[number] for number in numbers]}, return_tensors="pt")
            outputs = model.generate(
                **batch.to(model.device),
                custom_generate=beam_search,
                num_beams=num_beams,
                num_return_sequences=n_best,
                length_penalty=length_penalty,
                length_penalty_type=length_penalty_type,
                max_new_tokens=_max_new_tokens(model, batch["input_ids"].shape[1] + max_length_offset),
                do_sample=False,
                return_dict_in_generate=True,
            )
            hypotheses = _decode(model, target_tokenizer, outputs)
            for index, number in enumerate(numbers):
                translations[number] = hypotheses[index * n_best : (index + 1) * n_best]
            progress.update(len(numbers))
    return translations


def _encode(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_source_length: int
) -> dict[int, list[int]]:
    """Return the tokens of each text that has any, under its number, cut to what the model can read."""
    if getattr(model.config, "position_type", None) == "learned":
        max_source_length = min(max_source_length, model.config.max_position_embeddings)
    written = {number: text for number, text in enumerate(texts) if text.strip()}
    if not written:
        return {}
    ids = tokenizer(list(written.values()), verbose=False)["input_ids"]
    too_long = [number for number, tokens in zip(written, ids, strict=True) if len(tokens) > max_source_length]
    sources = dict(zip(written, ids, strict=True))
    if too_long:
        cut = tokenizer([texts[number] for number in too_long], truncation=True, max_length=max_source_length)
        sources.update(zip(too_long, cut["input_ids"], strict=True))
        logger.warning(
            f"Cut {len(too_long)} of {len(texts)} texts to {max_source_length} tokens (`max_source_length`), the "
            f"first is number {too_long[0] + 1}."
        )
    return sources


def _batches(sources: dict[int, list[int]], max_tokens: int) -> Iterator[list[int]]:
    """Yield the numbers of texts of similar length, longest first, so that a batch that is too large fails early."""
    batch: list[int] = []
    for number in sorted(sources, key=lambda number: -len(sources[number])):
        if batch and (len(batch) + 1) * len(sources[batch[0]]) > max_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _max_new_tokens(model: PreTrainedModel, wanted: int) -> int:
    """Return how many tokens may be written, which learned positions limit."""
    if getattr(model.config, "position_type", None) == "learned":
        return min(wanted, model.config.max_position_embeddings)
    return wanted


def _decode(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, outputs) -> list[Hypothesis]:
    """Turn what `generate()` returned into text, a hypothesis a row. Newlines become spaces: a text stays one line."""
    hypotheses = []
    end = model.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end])
    for row, score in zip(outputs.sequences[:, 1:].tolist(), outputs.sequences_scores.tolist(), strict=True):
        length = next((position + 1 for position, token in enumerate(row) if token in ends), len(row))
        text = tokenizer.decode(row[:length], skip_special_tokens=True)
        text = text.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")
        hypotheses.append(Hypothesis(text, score, tuple(row[:length])))
    return hypotheses
