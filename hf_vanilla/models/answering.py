"""From questions and contexts to windows, and from logits to answers."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from .checks import check_integer


# Defaults of the official script of SQuAD 2.0.
N_BEST = 20
MAX_ANSWER_LENGTH = 30

OUTSIDE = (-1, -1)  # the characters of a token that is not in the context


SURROGATE = re.compile(r"[\ud800-\udfff]")


class Answer(NamedTuple):
    """A span of a context, or "no answer".

    Attributes:
        text: The answer as in the context; empty for no answer.
        start: Index of its first character in the context.
        end: Index after its last character.
        score: Sum of the start and the end logit.
    """

    text: str
    start: int
    end: int
    score: float


def tokenize_windows(
    questions: Sequence[str],
    contexts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    doc_stride: int,
    names: Sequence[str] | None = None,
) -> dict[str, list[Any]]:
    """Tokenize each question with its context; long contexts become overlapping windows.

    Args:
        questions (`Sequence[str]`): The questions. Surrogates in them and in the contexts, which tokenizers reject,
            are read as U+FFFD.
        contexts (`Sequence[str]`): The context of each.
        tokenizer (`PreTrainedTokenizerBase`): A fast tokenizer.
        max_length (`int`): Most tokens of question and window.
        doc_stride (`int`): Tokens that neighbouring windows share, as transformers' `stride`.
        names (`Sequence[str]`, *optional*): Names of the questions, for messages; their numbers by default.

    Returns:
        `dict[str, list]`: columns with a row for each window: the model's inputs; `example`, the index of its
        question; `offset_mapping`, the characters of each token of the context, -1 for all other tokens.

    Raises:
        ValueError: if a question and the overlap leave no room for the context; the question is named.
    """
    # One character replaces one, so that offsets are those of the given context.
    questions, contexts = ([SURROGATE.sub("\ufffd", text) for text in texts] for texts in (questions, contexts))
    questions = [question.strip() for question in questions]
    if doc_stride < 0:
        raise ValueError(f"`doc_stride` must not be negative, got {doc_stride}.")
    special = tokenizer.num_special_tokens_to_add(pair=True)
    for row, ids in enumerate(tokenizer(questions, add_special_tokens=False, verbose=False)["input_ids"]):
        if len(ids) + special + doc_stride >= max_length:
            raise ValueError(
                f"`max_length` ({max_length}) must be more than `doc_stride` ({doc_stride}), the question and the "
                f"special tokens together, but question {row + 1 if names is None else repr(names[row])} has "
                f"{len(ids)} tokens."
            )
    windows = tokenizer(
        questions,
        contexts,
        truncation="only_second",
        max_length=max_length,
        stride=doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    columns = dict(windows.items())
    columns["example"] = columns.pop("overflow_to_sample_mapping")
    columns["offset_mapping"] = [
        [span if part == 1 else OUTSIDE for span, part in zip(spans, windows.sequence_ids(window), strict=True)]
        for window, spans in enumerate(columns["offset_mapping"])
    ]
    return columns


def best_answers(
    context: str,
    windows: Iterable[tuple[Any, Any, Any]],
    *,
    n_best: int = N_BEST,
    max_answer_length: int = MAX_ANSWER_LENGTH,
    with_no_answer: bool = False,
    no_answer_threshold: float = 0.0,
) -> list[Answer]:
    """Find the best answers to one question over all windows of its context.

    Args:
        context (`str`): The context.
        windows (`Iterable[tuple]`): For each window the start logits and the end logits of shape `(length,)`, and the
            characters of each token of shape `(length, 2)`, as [`tokenize_windows`] returns them; all arrays, tensors
            or lists. Padding after the end of a window is ignored.
        n_best (`int`): Most answers.
        max_answer_length (`int`): Most tokens of an answer.
        with_no_answer (`bool`): Whether "no answer" is a possible answer. Its score is that of `[CLS]` in the window
            where it is lowest.
        no_answer_threshold (`float`): How much higher than the best answer's score that of "no answer" must be for it
            to come first.

    Returns:
        `list[Answer]`: at least one, best first.

    Raises:
        ValueError: if a limit is below 1.

    Source: Devlin et al. 2018, 4.2 and 4.3.
    """
    for name, value in (("n_best", n_best), ("max_answer_length", max_answer_length)):
        check_integer(name, value)
    found: dict[tuple[int, int], float] = {}
    no_answer = math.inf
    for start_logits, end_logits, offsets in windows:
        spans = torch.as_tensor(offsets)
        start, end = (torch.as_tensor(each, dtype=torch.float64)[: len(spans)] for each in (start_logits, end_logits))
        no_answer = min(no_answer, float(start[0] + end[0]))
        for first, last, score in _best_spans(start, end, spans[:, 0] >= 0, max(n_best, N_BEST), max_answer_length):
            characters = int(spans[first, 0]), int(spans[last, 1])
            # Neighbouring windows share tokens: of the same answer the higher score counts.
            found[characters] = max(score, found.get(characters, -math.inf))
    ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:n_best]
    best = [Answer(context[start:end], start, end, score) for (start, end), score in ranked]
    if with_no_answer or not best:
        nothing = Answer("", 0, 0, no_answer)
        is_first = not best or nothing.score > best[0].score + no_answer_threshold
        rest = [answer for answer in best if answer.score >= nothing.score]
        place = 0 if is_first else max(1, len(rest))
        best = [*best[:place], nothing, *best[place:]][:n_best]
    return best


def _best_spans(
    start: torch.Tensor, end: torch.Tensor, is_context: torch.Tensor, n_best: int, max_answer_length: int
) -> list[tuple[int, int, float]]:
    """Return (first token, last token, score) of a window's best answers within the context."""
    tokens = is_context.nonzero().flatten()
    firsts = tokens[(-start[tokens]).argsort(stable=True)[:n_best]]
    lasts = tokens[(-end[tokens]).argsort(stable=True)[:n_best]]
    lengths = lasts - firsts[:, None] + 1  # (firsts, lasts)
    is_answer = (lengths >= 1) & (lengths <= max_answer_length)
    scores = (start[firsts][:, None] + end[lasts]).masked_fill(~is_answer, -torch.inf).flatten()
    best = (-scores).argsort(stable=True)[:n_best]
    best = best[scores[best].isfinite()]
    rows, columns = best // max(len(lasts), 1), best % max(len(lasts), 1)
    return list(zip(firsts[rows].tolist(), lasts[columns].tolist(), scores[best].tolist(), strict=True))


__all__ = ["Answer", "best_answers", "tokenize_windows"]
