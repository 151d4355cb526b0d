"""TODO."""

from collections.abc import Sequence
from typing import Any

from transformers import Pipeline, PreTrainedTokenizerBase

from .text_batches import TARGET_TOKENIZER, as_texts, default_max_length, load_target_tokenizer, map_batches, token_ids
from .translating import (
    Translation,
    align_translations,
    check_not_set_here,
    check_search,
    decode_n_best,
    search_and_rank,
)


class TranslationPipeline(Pipeline):
    """Translate texts.

    Called with a text or a list of texts, and these options, which may also be given when it is made:

    - `n_best`: translations of each text; with it, or without, each has its `score`.
    - `num_beams`, `length_penalty`, `length_penalty_type`: the search; by default the paper's, 4 beams and GNMT's 0.6.
      `generate()` searches with transformers' own penalty, length^alpha, and GNMT's ranks the `num_beams` hypotheses
      that it finds: the scores are exact, but a hypothesis that only GNMT's penalty would have kept is not among them.
    - `return_alignments`: whether each has an `alignment`, the pairs of source and target words that belong together.
    - `target_tokenizer`, when it is made: the target's tokenizer, if it is another one. By default the one beside the
      model's files, on the Hub that of the main branch, as transformers does not tell a pipeline the revision.
    - `max_length_offset`: how many tokens longer than its source a translation may be, by default 50.
    - `max_source_length`, `max_tokens_per_batch`: tokens of a text, and of a batch.
    - any other argument of `generate()`, such as `early_stopping`, but those that are set here: `max_new_tokens` and
      `max_length` (give `max_length_offset`), `num_return_sequences` (`n_best`), `do_sample`, `output_scores`,
      `output_logits` and `return_dict_in_generate`. For the `batch_size` of other pipelines give
      `max_tokens_per_batch`.

    Returns for each text a list of `{"translation_text": ..., "score": ...}`, best first. For a single text it is that
    list alone, and for a `list` of texts with one translation each one flat list, as transformers 4 gave it.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True
    _pipeline_calls_generate = False  # otherwise it would take options such as `num_beams` away

    def __init__(
        self, *arguments: Any, target_tokenizer: PreTrainedTokenizerBase | None = None, **options: Any
    ) -> None:
        check_not_set_here(options)
        super().__init__(*arguments, **options)
        if target_tokenizer is None and self.tokenizer.name_or_path:  # not one that was just trained
            target_tokenizer = load_target_tokenizer(self.tokenizer.name_or_path)
        self.target_tokenizer = self.tokenizer if target_tokenizer is None else target_tokenizer

    def _sanitize_parameters(self, **options: Any) -> tuple[dict, dict, dict]:
        return {}, options, {}

    def __call__(self, texts: str | Sequence[str], **options: Any) -> list:
        """Translate.

        Args:
            texts (`str` or `Sequence[str]`): One text or several, which are sorted into batches by their lengths.
            **options (`Any`): As in the class.

        Returns:
            `list`: as in the class.

        Raises:
            TypeError: if `texts` are no texts.
            ValueError: if an option is out of its range or set here, or the model is in training mode.
        """
        options = {**self._forward_params, **options}
        found = self.forward(as_texts("texts", texts), **options)
        if isinstance(texts, str):
            return found[0]
        is_flat = isinstance(texts, list) and options.get("n_best", 1) == 1
        return [row[0] for row in found] if is_flat else found

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

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Save the model, which brings its code and its pipeline, and the tokenizers of source and target.

        Args:
            save_directory (`str`): Folder to write to.
            **kwargs: Passed on.
        """
        self.model.save_pretrained(save_directory, **kwargs)
        self.tokenizer.save_pretrained(save_directory)
        if self.target_tokenizer is not self.tokenizer:
            self.target_tokenizer.save_pretrained(f"{save_directory}/{TARGET_TOKENIZER}")

    def _forward(
        self, texts: list[str], return_alignments: bool = False, **options: Any
    ) -> list[list[dict[str, Any]]]:
        """Translate all texts."""
        found = self._translate(texts, **options)
        if return_alignments:
            tokenizers = self.tokenizer, self.target_tokenizer
            align_translations(self.model, *tokenizers, texts, found, options.get("max_source_length"))
        return [[self._as_dict(each) for each in row] for row in found]

    def _translate(
        self,
        texts: list[str],
        *,
        num_beams: int = 4,
        length_penalty: float = 0.6,
        length_penalty_type: str = "gnmt",
        max_length_offset: int = 50,
        n_best: int = 1,
        max_source_length: int | None = None,
        max_tokens_per_batch: int = 2048,
        **generate_kwargs: Any,
    ) -> list[list[Translation]]:
        """Translate in batches; a text without words becomes an empty text."""
        options: dict[str, Any] = dict(
            num_beams=num_beams,
            n_best=n_best,
            max_length_offset=max_length_offset,
            length_penalty=length_penalty,
            length_penalty_type=length_penalty_type,
        )
        check_search(self.model, **options, max_source_length=max_source_length, generate_kwargs=generate_kwargs)
        limit = default_max_length(self.model, self.tokenizer) if max_source_length is None else max_source_length

        def translate_batch(batch: list[list[int]]) -> list[list[Translation]]:
            found = search_and_rank(self.model, batch, **options, **generate_kwargs)
            return decode_n_best(self.target_tokenizer, *found, n_best)

        ids = token_ids(self.tokenizer, [text for text in texts if text.strip()], limit, "texts")
        translated = iter(map_batches(translate_batch, ids, max_tokens_per_batch))
        return [next(translated) if text.strip() else [Translation("", 0.0)] for text in texts]

    @staticmethod
    def _as_dict(translation: Translation) -> dict[str, Any]:
        found: dict[str, Any] = {"translation_text": translation.text, "score": translation.score}
        if translation.alignment is not None:
            found["alignment"] = translation.alignment.pairs
        return found


__all__ = ["TranslationPipeline"]
