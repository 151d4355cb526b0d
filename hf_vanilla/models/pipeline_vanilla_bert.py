"""TODO."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import Pipeline

from .answering import MAX_ANSWER_LENGTH, N_BEST, best_answers, tokenize_windows
from .checks import check_evaluation_mode
from .text_batches import as_texts


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


__all__ = ["QuestionAnsweringPipeline"]
