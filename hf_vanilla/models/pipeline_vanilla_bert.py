"""Question answering, which transformers 5 has no pipeline for any more: every saved reader brings this one along.

```python
reader = pipeline("question-answering", model="my-name/squad", trust_remote_code=True)
reader("Who has dogs?", "Ben has two dogs.")  # {"answer": "Ben", "start": 0, "end": 3, "score": 0.9}
```
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import Pipeline, PreTrainedTokenizerBase

from .checks import check_evaluation_mode
from .text_batches import as_texts


# The official script of SQuAD 2.0 has these defaults too.
N_BEST = 20
MAX_ANSWER_LENGTH = 30
OUTSIDE = (-1, -1)  # the characters of a token that is not in the context
SURROGATE = re.compile(r"[\ud800-\udfff]")


class Answer(NamedTuple):
    """A part of a context, or that there is none.

    Attributes:
        text: The answer as it stands in the context; empty for no answer.
        start: Index of its first character in the context.
        end: Index behind its last character.
        score: Sum of the start and the end logit; higher is likelier.
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
    """Pair each question with its context, a long one cut into windows that overlap.

    Args:
        questions (`Sequence[str]`):
            The questions; surrogates in them and in the contexts, which no tokenizer takes, are read as U+FFFD.
        contexts (`Sequence[str]`):
            The text of each.
        tokenizer (`PreTrainedTokenizerBase`):
            A fast tokenizer.
        max_length (`int`):
            Most tokens of question and window.
        doc_stride (`int`):
            Tokens that neighbouring windows have in common, as transformers' `stride`.
        names (`Sequence[str]`, *optional*):
            What errors call the questions; their numbers by default.

    Returns:
        `dict[str, list]`: columns with a row for each window: what the model reads; `example`, the index of its
        question; `offset_mapping`, the characters of each token of the context, -1 for all other tokens.

    Raises:
        ValueError: if a question and the overlap leave no room for a context; the question is named.
    """
    # One character for one, so that the offsets are those of the context as it was given.
    asked, contexts = ([SURROGATE.sub("\ufffd", text) for text in texts] for texts in (questions, contexts))
    asked = [question.strip() for question in asked]
    if doc_stride < 0:
        raise ValueError(f"`doc_stride` must not be negative, got {doc_stride}.")
    special = tokenizer.num_special_tokens_to_add(pair=True)
    for row, ids in enumerate(tokenizer(asked, add_special_tokens=False, verbose=False)["input_ids"]):
        if len(ids) + special + doc_stride >= max_length:
            raise ValueError(
                f"`max_length` ({max_length}) must be more than `doc_stride` ({doc_stride}), the question and the "
                f"special tokens together, but question {row + 1 if names is None else repr(names[row])} has "
                f"{len(ids)} tokens."
            )
    windows = tokenizer(
        asked,
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
    """Turn the model's scores into the best answers of one question, over all windows of its context.

    Args:
        context (`str`):
            The text.
        windows (`Iterable[tuple]`):
            For each window the start logits and the end logits of shape `(length,)`, and the characters of each token
            of shape `(length, 2)`, as [`tokenize_windows`] gives them; all arrays, tensors or lists. Logits behind
            the window's end don't count.
        n_best (`int`):
            Most answers.
        max_answer_length (`int`):
            Most tokens of an answer.
        with_no_answer (`bool`):
            Whether "no answer" is one of the answers. Its score is that of `[CLS]` in the window where it is lowest.
        no_answer_threshold (`float`):
            How much higher than the best answer's the score of "no answer" must be for it to come first.

    Returns:
        `list[Answer]`: at least one, the best first.

    Raises:
        ValueError: if a limit is below 1.

    Source: Devlin et al. 2018, 4.2 and 4.3.
    """
    for name, value in (("n_best", n_best), ("max_answer_length", max_answer_length)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    found: dict[tuple[int, int], float] = {}
    no_answer = math.inf
    for start_logits, end_logits, offsets in windows:
        spans = torch.as_tensor(offsets)
        start, end = (torch.as_tensor(each, dtype=torch.float64)[: len(spans)] for each in (start_logits, end_logits))
        no_answer = min(no_answer, float(start[0] + end[0]))
        for first, last, score in _best_spans(start, end, spans[:, 0] >= 0, max(n_best, N_BEST), max_answer_length):
            characters = int(spans[first, 0]), int(spans[last, 1])
            # Neighbouring windows share tokens: the better view of the same answer counts.
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
    """Return the (first token, last token, score) of a window's best answers, all within the context."""
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


class QuestionAnsweringPipeline(Pipeline):
    """Find the answer to a question in a context of any length.

    Called with `question` and `context`, or lists of both, and these options, which may also be given when it is made:

    - `top_k`: answers of each question, by default 1.
    - `handle_impossible_answer`: whether "no answer", an empty text, is one of the answers.
    - `max_answer_length`: most tokens of an answer.
    - `max_length`, `doc_stride`: tokens of a window, and those that neighbours share.
    - `batch_size`: windows at once.

    Returns for each question `{"answer", "start", "end", "score"}`, or with `top_k` above 1 a list of them, best
    first. The scores are probabilities among the answers that were looked at.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def _sanitize_parameters(self, **options: Any) -> tuple[dict, dict, dict]:
        return {}, options, {}

    def __call__(self, question: str | Sequence[str], context: str | Sequence[str], **options: Any) -> Any:
        """Answer.

        Args:
            question (`str` or `Sequence[str]`): One question or several.
            context (`str` or `Sequence[str]`): The text of each question.
            **options (`Any`): As in the class.

        Returns:
            `dict` or `list`: as in the class.

        Raises:
            TypeError: if questions or contexts are no texts.
            ValueError: if questions and contexts differ in number, one of them is empty, an option is out of its
                range, or the model is in training mode.
        """
        questions, contexts = as_texts("question", question), as_texts("context", context)
        if len(questions) != len(contexts):
            raise ValueError(f"`question` ({len(questions)}) and `context` ({len(contexts)}) must be equal in number.")
        for number, pair in enumerate(zip(questions, contexts, strict=True), start=1):
            for name, text in zip(("question", "context"), pair, strict=True):
                if not text.strip():
                    raise ValueError(f"`{name}` must have words, but number {number} is empty.")
        asked = {"questions": questions, "contexts": contexts}
        if self._batch_size is not None:  # transformers takes it from the options that the pipeline is made with
            options = {"batch_size": self._batch_size, **options}
        found = self.forward(asked, **{**self._forward_params, **options})
        return found[0] if isinstance(question, str) else found

    def preprocess(self, inputs: Any, **options: Any) -> Any:
        """Return the inputs: windows of several questions are made at once.

        Args:
            inputs (`Any`): Questions.
            **options (`Any`): None.

        Returns:
            `Any`: the same.
        """
        return inputs

    def postprocess(self, outputs: Any, **options: Any) -> Any:
        """Return the outputs as they are.

        Args:
            outputs (`Any`): Answers.
            **options (`Any`): None.

        Returns:
            `Any`: the same.
        """
        return outputs

    def _forward(
        self,
        asked: dict[str, list[str]],
        top_k: int = 1,
        handle_impossible_answer: bool = False,
        max_answer_length: int = MAX_ANSWER_LENGTH,
        max_length: int = 384,
        doc_stride: int = 128,
        batch_size: int = 16,
    ) -> list:
        """Answer all questions."""
        check_evaluation_mode(self.model)
        for name, value in (("top_k", top_k), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if not asked["questions"]:
            return []
        longest = min(max_length, self.model.config.max_position_embeddings)
        windows = tokenize_windows(
            **asked, tokenizer=self.tokenizer, max_length=longest, doc_stride=min(doc_stride, longest // 3)
        )
        of_each: list[list[tuple[Any, Any, Any]]] = [[] for _ in asked["contexts"]]
        for window, logits in enumerate(self._logits(windows, batch_size)):
            of_each[windows["example"][window]].append((*logits, windows["offset_mapping"][window]))
        found = []
        for context, views in zip(asked["contexts"], of_each, strict=True):
            best = best_answers(
                context,
                views,
                n_best=max(top_k, N_BEST),
                max_answer_length=max_answer_length,
                with_no_answer=handle_impossible_answer,
            )
            probabilities = torch.tensor([answer.score for answer in best]).softmax(0).tolist()
            rows = [
                {"answer": answer.text, "start": answer.start, "end": answer.end, "score": probability}
                for answer, probability in zip(best, probabilities, strict=True)
            ]
            found.append(rows[:top_k] if top_k > 1 else rows[0])
        return found

    def _logits(self, windows: dict[str, list[Any]], batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the start and the end logits (length,) of each window."""
        names = [name for name in self.tokenizer.model_input_names if name in windows]
        for start in range(0, len(windows["example"]), batch_size):
            inputs = {name: windows[name][start : start + batch_size] for name in names}
            outputs = self.model(**self.tokenizer.pad(inputs, return_tensors="pt").to(self.device))
            yield from zip(outputs.start_logits.float().cpu(), outputs.end_logits.float().cpu(), strict=True)


__all__ = ["Answer", "QuestionAnsweringPipeline", "best_answers", "tokenize_windows"]
