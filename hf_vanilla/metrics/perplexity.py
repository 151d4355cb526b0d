"""How well a language model predicts held-out documents, in units that do not depend on its vocabulary.

The nats of a document are the sum of -log p over all of its tokens and the end-of-text token that closes it, each
given the end-of-text token before the document and all tokens since. Over all documents:

    perplexity per word     exp(nats / words)            words are separated by white space
    bits per byte           nats / log(2) / bytes        bytes of the text in UTF-8
    perplexity per token    exp(nats / tokens)           end-of-text tokens counted

Only the last depends on the tokenizer.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..models.checks import IGNORED_LABEL, check_evaluation_mode, check_integer


MINIMUM_LENGTH = 2  # a token and the one that it predicts


def evaluate_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    *,
    context_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 16,
) -> dict[str, float]:
    """Measure a causal language model on documents; every token of each document is predicted once.

    A document longer than the context is read in windows, each `stride` tokens after the one before it. A window
    predicts the tokens that no earlier one has, so they have `context_length - stride` tokens or more before them.

    Args:
        model (`PreTrainedModel`): A causal language model, in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer, with an `eos_token`.
        texts (`Iterable[str]`): The documents.
        context_length (`int`, *optional*): Tokens of a window; by default the model's positions.
        stride (`int`, *optional*): Tokens from window to window; by default half of `context_length`. Smaller is
            slower and gives every token more context.
        batch_size (`int`): Windows of a batch.

    Returns:
        `dict[str, float]`: `perplexity_per_word`, `bits_per_byte` and `perplexity_per_token`, and the numbers of
        `documents`, `words`, `bytes` and `tokens`.

    Raises:
        ValueError: if the model is in training mode, the tokenizer has no end-of-text token, a number is out of its
            range, or the documents have no word.
    """
    check_evaluation_mode(model)
    positions = getattr(model.config, "max_position_embeddings", None)
    context_length = positions if context_length is None else context_length
    if context_length is None or not MINIMUM_LENGTH <= context_length <= (positions or context_length):
        raise ValueError(
            f"`context_length` must be between {MINIMUM_LENGTH} and the model's positions ({positions}), got "
            f"{context_length}."
        )
    stride = max(1, context_length // 2) if stride is None else stride
    if not 1 <= stride < context_length:
        raise ValueError(f"`stride` must be at least 1 and below `context_length` ({context_length}), got {stride}.")
    check_integer("batch_size", batch_size)
    texts = list(texts)
    documents = encode_documents(tokenizer, texts)
    windows = [each for document in documents for each in _windows(document, context_length, stride)]
    windows.sort(key=lambda window: len(window[0]), reverse=True)
    nats = sum(_batch_nats(model, windows[start : start + batch_size]) for start in range(0, len(windows), batch_size))
    return corpus_scores(nats, sum(len(document) - 1 for document in documents), texts)


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize documents, with the end-of-text token before and after each; special tokens in them are plain text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): A tokenizer with an `eos_token`.
        texts (`Sequence[str]`): The documents.

    Returns:
        `list[list[int]]`: the ids of each document.

    Raises:
        ValueError: if the tokenizer has no end-of-text token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("`tokenizer` must have an `eos_token`, the end-of-text token.")
    if not texts:
        return []
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        split_special_tokens=True,
        verbose=False,
    )
    return [[end, *ids, end] for ids in encoded["input_ids"]]


def corpus_scores(nats: float, tokens: int, texts: Iterable[str]) -> dict[str, float]:
    """Turn the nats of documents into scores.

    Args:
        nats (`float`): Sum of -log p of all tokens, end-of-text tokens included.
        tokens (`int`): Their number.
        texts (`Iterable[str]`): The documents.

    Returns:
        `dict[str, float]`: `perplexity_per_word`, `bits_per_byte` and `perplexity_per_token`, and the numbers of
        `documents`, `words`, `bytes` and `tokens`.

    Raises:
        ValueError: if the documents have no word, or `nats` is nan or infinite.
    """
    if not math.isfinite(nats):
        raise ValueError(
            f"The loss of texts is {nats}. Either the model's weights are nan (train it again), or values overflow "
            'in its dtype (load it with `dtype="float32"`).'
        )
    texts = list(texts)
    words, size = sum(len(text.split()) for text in texts), sum(len(text.encode()) for text in texts)
    if not words:
        raise ValueError("`texts` must have at least one word, but have none.")
    return {
        "perplexity_per_word": math.exp(min(nats / words, 700.0)),
        "bits_per_byte": nats / math.log(2) / size,
        "perplexity_per_token": math.exp(min(nats / tokens, 700.0)),
        "documents": len(texts),
        "words": words,
        "bytes": size,
        "tokens": tokens,
    }


def _windows(document: list[int], length: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Yield (tokens, number of tokens at the end to predict) of each window of a document."""
    predicted, stop = 1, min(length, len(document))
    while True:
        yield document[max(0, stop - length) : stop], stop - predicted
        if stop == len(document):
            return
        predicted, stop = stop, min(stop + stride, len(document))


@torch.no_grad()
def _batch_nats(model: Any, windows: list[tuple[list[int], int]]) -> float:
    """Sum -log p of the tokens to predict; padding at the right, which no token sees, needs no mask."""
    longest = len(windows[0][0])
    input_ids = torch.zeros(len(windows), longest, dtype=torch.long)  # (batch, length)
    labels = torch.full_like(input_ids, IGNORED_LABEL)
    for row, (tokens, count) in enumerate(windows):
        input_ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, len(tokens) - count : len(tokens)] = torch.tensor(tokens[-count:])
    logits = model(input_ids=input_ids.to(model.device), use_cache=False).logits[:, :-1]  # (batch, length - 1, vocab)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(),
        labels[:, 1:].flatten().to(logits.device),
        ignore_index=IGNORED_LABEL,
        reduction="none",
    )
    return float(losses.cpu().double().sum())  # Apple's GPUs have no float64
