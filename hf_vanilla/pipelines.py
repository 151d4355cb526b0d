"""Pipelines that transformers 5 no longer has: translation and question answering.

`hf_vanilla.data` is imported where it is needed and not here: it takes a second, and whoever imports the package
imports this file.

```python
translator = pipeline("vanilla-translation", model="runs/en-de")
translator("A man runs.", n_best=2)  # [{"translation_text": "Ein Mann rennt.", "score": -0.3}, ...]
```
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForQuestionAnswering, AutoModelForSeq2SeqLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from .generation import Translation, translate
from .tokenization import load_tokenizers


TRANSLATION = "vanilla-translation"
QUESTION_ANSWERING = "vanilla-question-answering"


class TranslationPipeline(Pipeline):
    """Translate texts, with all that [`~hf_vanilla.generation.translate`] can do.

    Called with a text or a list of texts, and these options, which may also be given when it is made:

    - `n_best`: translations of each text; with it, or without, each has its `score`.
    - `num_beams`, `length_penalty`, `length_penalty_type`: the search; by default the paper's, 4 beams and GNMT's 0.6.
    - `return_alignments`: whether each has an `alignment`, the pairs of source and target words that belong together.
    - `split_into_sentences`: whether a long text is translated sentence by sentence, and its lines stay lines.
    - any other argument of `translate`, such as `max_tokens_per_batch`.

    Returns for each text a list of `{"translation_text": ..., "score": ...}`, best first; for a single text that list.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True
    _pipeline_calls_generate = False  # otherwise it would take options such as `num_beams` away

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.target_tokenizer = self.tokenizer
        if self.tokenizer.name_or_path:  # not one that was just trained
            _, self.target_tokenizer = load_tokenizers(self.tokenizer.name_or_path)

    def _sanitize_parameters(self, **options: Any) -> tuple[dict, dict, dict]:
        return {}, options, {}

    def __call__(self, texts: str | Sequence[str], **options: Any) -> list:
        """Translate.

        Args:
            texts (`str` or `Sequence[str]`): One text or several, which are sorted into batches by their lengths.
            **options (`Any`): As in the class.

        Returns:
            `list`: as in the class.
        """
        found = self.forward([texts] if isinstance(texts, str) else list(texts), **{**self._forward_params, **options})
        return found[0] if isinstance(texts, str) else found

    def preprocess(self, inputs: Any, **options: Any) -> Any:
        """Return the inputs: tokenizing is part of batching, which needs all texts at once.

        Args:
            inputs (`Any`): Texts.
            **options (`Any`): None.

        Returns:
            `Any`: the same.
        """
        return inputs

    def postprocess(self, outputs: Any, **options: Any) -> Any:
        """Return the outputs as they are.

        Args:
            outputs (`Any`): Translations.
            **options (`Any`): None.

        Returns:
            `Any`: the same.
        """
        return outputs

    def _forward(
        self,
        texts: list[str],
        return_alignments: bool = False,
        split_into_sentences: bool = False,
        **options: Any,
    ) -> list[list[dict[str, Any]]]:
        """Translate all texts."""
        if split_into_sentences:
            if return_alignments or options.get("n_best", 1) > 1:
                raise ValueError(
                    "`split_into_sentences` gives one translation without alignments; leave out `n_best` and "
                    "`return_alignments`, or pass single sentences."
                )
            return [[self._as_dict(each)] for each in self._translate_by_sentences(texts, options)]
        found = self._translate(texts, with_alignments=return_alignments, **options)
        return [[self._as_dict(each) for each in row] for row in found]

    def _translate(self, texts: list[str], **options: Any) -> list[list[Translation]]:
        return translate(self.model, self.tokenizer, texts, target_tokenizer=self.target_tokenizer, **options)

    def _translate_by_sentences(self, texts: list[str], options: dict[str, Any]) -> list[Translation]:
        """Translate every sentence of every line of every text in one go, and put them together again."""
        from .data.documents import split_sentences

        lines = [[split_sentences(line) for line in text.split("\n")] for text in texts]
        sentences = [sentence for text in lines for line in text for sentence in line]
        translated = iter(self._translate(sentences, **options))
        found = []
        for text in lines:
            rows = [[next(translated)[0] for _ in line] for line in text]
            scores = [each.score for row in rows for each in row]
            whole = "\n".join(" ".join(each.text for each in row) for row in rows)
            found.append(Translation(whole, float(np.mean(scores)) if scores else 0.0))
        return found

    @staticmethod
    def _as_dict(translation: Translation) -> dict[str, Any]:
        found: dict[str, Any] = {"translation_text": translation.text, "score": translation.score}
        if translation.alignment is not None:
            found["alignment"] = translation.alignment.pairs
        return found


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
            ValueError: if questions and contexts differ in number, or one of them is empty.
        """
        from datasets import Dataset

        questions, contexts = ([each] if isinstance(each, str) else list(each) for each in (question, context))
        if len(questions) != len(contexts):
            raise ValueError(f"`question` ({len(questions)}) and `context` ({len(contexts)}) must be equal in number.")
        for number, pair in enumerate(zip(questions, contexts, strict=True), start=1):
            for name, text in zip(("question", "context"), pair, strict=True):
                if not text.strip():
                    raise ValueError(f"`{name}` must have words, but number {number} is empty.")
        asked = Dataset.from_dict(
            {
                "id": [str(number) for number in range(len(questions))],
                "question": questions,
                "context": contexts,
                "answers": [{"text": [], "answer_start": []}] * len(questions),
            }
        )
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
        asked: Any,
        top_k: int = 1,
        handle_impossible_answer: bool = False,
        max_answer_length: int = 30,
        max_length: int = 384,
        doc_stride: int = 128,
        batch_size: int = 16,
    ) -> list:
        """Answer all questions."""
        from .data.question_answering import find_answers, tokenize_questions

        longest = min(max_length, self.model.config.max_position_embeddings)
        windows = tokenize_questions(
            asked, self.tokenizer, max_length=longest, doc_stride=min(doc_stride, longest // 3)
        )
        inputs = windows.select_columns(
            [name for name in self.tokenizer.model_input_names if name in windows.features]
        )
        logits: tuple[list, list] = ([], [])
        for start in range(0, len(windows), batch_size):
            batch = self.tokenizer.pad(inputs[start : start + batch_size], return_tensors="pt").to(self.device)
            outputs = self.model(**batch)
            for kept, each in zip(logits, (outputs.start_logits, outputs.end_logits), strict=True):
                kept.extend(each.float().cpu().numpy())
        answers = find_answers(
            asked,
            windows,
            logits[0],  # type: ignore[arg-type]
            logits[1],  # type: ignore[arg-type]
            n_best=max(top_k, 20),
            max_answer_length=max_answer_length,
            with_no_answer=handle_impossible_answer,
        )
        found = []
        for best in answers.values():
            probabilities = torch.tensor([answer.score for answer in best]).softmax(0).tolist()
            rows = [
                {"answer": answer.text, "start": answer.start, "end": answer.end, "score": probability}
                for answer, probability in zip(best, probabilities, strict=True)
            ]
            found.append(rows[:top_k] if top_k > 1 else rows[0])
        return found


def register_pipelines() -> None:
    """Make `pipeline("vanilla-translation")` and `pipeline("vanilla-question-answering")` known."""
    for task, pipeline_class, auto_class in (
        (TRANSLATION, TranslationPipeline, AutoModelForSeq2SeqLM),
        (QUESTION_ANSWERING, QuestionAnsweringPipeline, AutoModelForQuestionAnswering),
    ):
        if task not in PIPELINE_REGISTRY.get_supported_tasks():
            PIPELINE_REGISTRY.register_pipeline(task, pipeline_class=pipeline_class, pt_model=(auto_class,))
