"""The question answering pipeline that comes with every checkpoint."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .answering import MAX_ANSWER_LENGTH, N_BEST, best_answers, tokenize_windows
from .checks import as_texts, check_evaluation_mode, check_integer
from .self_contained import SelfContainedPipeline


class QuestionAnsweringPipeline(SelfContainedPipeline):
    """Find the answer to a question in a context of any length.

    Called with `question` and `context`, or lists of both, and these options, which can also be given to the
    constructor:

    - `top_k`: answers per question, by default 1.
    - `handle_impossible_answer`: whether "no answer", an empty text, is a possible answer.
    - `max_answer_length`: most tokens of an answer.
    - `max_length`, `doc_stride`: tokens of a window, and of the overlap of neighbouring windows.
    - `batch_size`: windows per batch.

    Returns for each question `{"answer", "start", "end", "score"}`, or with `top_k` above 1 a list of them, best
    first. The scores are probabilities among the answers that were considered.
    """

    def __call__(self, question: str | Sequence[str], context: str | Sequence[str], **options: Any) -> Any:
        """Answer questions.

        Args:
            question (`str` or `Sequence[str]`): One question or several.
            context (`str` or `Sequence[str]`): The context of each question.
            **options (`Any`): As for the class.

        Returns:
            `dict` or `list`: as for the class.

        Raises:
            TypeError: if questions or contexts are not strings.
            ValueError: if questions and contexts differ in number, one of them is empty, an option is out of its
                range, or the model is in training mode.
        """
        questions, contexts = as_texts("question", question), as_texts("context", context)
        if len(questions) != len(contexts):
            raise ValueError(f"`question` ({len(questions)}) and `context` ({len(contexts)}) must be equal in number.")
        for name, texts in (("question", questions), ("context", contexts)):
            for number, text in enumerate(texts, start=1):
                if not text.strip():
                    raise ValueError(f"`{name}` must have words, but number {number} is empty.")
        if self._batch_size is not None:  # transformers takes it from the options of the constructor
            options = {"batch_size": self._batch_size, **options}
        inputs = {"questions": questions, "contexts": contexts}
        found = self.forward(inputs, **{**self._forward_params, **options})
        return found[0] if isinstance(question, str) else found

    def _forward(
        self,
        inputs: dict[str, list[str]],
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
            check_integer(name, value)
        if not inputs["questions"]:
            return []
        longest = min(max_length, self.model.config.max_position_embeddings)
        windows = tokenize_windows(
            **inputs, tokenizer=self.tokenizer, max_length=longest, doc_stride=min(doc_stride, longest // 3)
        )
        scores: list[list[tuple[Any, Any, Any]]] = [[] for _ in inputs["contexts"]]
        for window, logits in enumerate(self._logits(windows, batch_size)):
            scores[windows["example"][window]].append((*logits, windows["offset_mapping"][window]))
        found = []
        for context, of_windows in zip(inputs["contexts"], scores, strict=True):
            best = best_answers(
                context,
                of_windows,
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
            padded = self.tokenizer.pad(inputs, padding_side="right", return_tensors="pt").to(self.device)
            outputs = self.model(**padded, return_dict=True)
            yield from zip(outputs.start_logits.float().cpu(), outputs.end_logits.float().cpu(), strict=True)


__all__ = ["QuestionAnsweringPipeline"]
