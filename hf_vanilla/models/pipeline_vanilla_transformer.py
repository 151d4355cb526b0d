"""The translation pipeline that comes with every checkpoint."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from .checks import as_texts
from .self_contained import SelfContainedPipeline
from .text_batches import TARGET_TOKENIZER, check_target_tokenizer, load_target_tokenizer, map_batches
from .translating import (
    MAX_SCORES_MEMORY,
    SearchOptions,
    Translation,
    check_not_fixed,
    decode_n_best,
    search_and_rank,
    translate_texts,
)


class TranslationPipeline(SelfContainedPipeline):
    """Translate texts.

    Called with a text or a list of texts, and these options, which can also be given to the constructor:

    - those of [`SearchOptions`], such as `num_beams`, `n_best` and `max_tokens_per_batch` (in place of the
      `batch_size` of other pipelines), and further ones of `generate()`, such as `early_stopping`. `generate()` has
      only its own length penalty, length^alpha, so GNMT's ranks the `num_beams` hypotheses that this search finds: the
      scores are exact, but a hypothesis that only GNMT's penalty would have kept is missing. `max_length_offset`
      counts from the longest source of a batch.
    - `return_alignments`: whether each translation has an `alignment`, pairs of numbers of a source and a target word.
    - `target_tokenizer`, only for the constructor: the tokenizer of the target, if it is another one. By default the
      one in the model's folder; on the Hub that of the main branch, as transformers does not give a pipeline the
      revision.

    Returns for each text a list of `{"translation_text": ..., "score": ...}`, best first. For a single text it returns
    that list, and for a `list` of texts with one translation each a flat list, as transformers 4 did.
    """

    def __init__(
        self, *arguments: Any, target_tokenizer: PreTrainedTokenizerBase | None = None, **options: Any
    ) -> None:
        check_not_fixed(options)
        super().__init__(*arguments, **options)
        places = (self.tokenizer.name_or_path, self.model.name_or_path)  # empty for what was never saved
        for place in dict.fromkeys(places) if target_tokenizer is None else ():
            target_tokenizer = target_tokenizer or (load_target_tokenizer(place) if place else None)
        self.target_tokenizer = self.tokenizer if target_tokenizer is None else target_tokenizer
        check_target_tokenizer(self.model.config, self.tokenizer, self.target_tokenizer)

    def __call__(self, texts: str | Sequence[str], **options: Any) -> list:
        """Translate.

        Args:
            texts (`str` or `Sequence[str]`): One text or several; they are sorted by length into batches.
            **options (`Any`): As for the class.

        Returns:
            `list`: as for the class.

        Raises:
            TypeError: if `texts` are not strings.
            ValueError: if an option is unknown, fixed or out of its range, or the model is in training mode.
        """
        options = {**self._forward_params, **options}
        found = self.forward(as_texts("texts", texts), **options)
        if isinstance(texts, str):
            return found[0]
        is_flat = isinstance(texts, list) and options.get("n_best", 1) == 1
        return [row[0] for row in found] if is_flat else found

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Save the model, with its code and pipeline, and the tokenizers of source and target.

        Args:
            save_directory (`str`): Folder to write to.
            **kwargs: Passed on to the model's `save_pretrained`.

        Raises:
            ValueError: if it is to push to the Hub, too.
        """
        if kwargs.get("push_to_hub"):
            raise ValueError("`push_to_hub` must not be given here; `pipeline.push_to_hub(repo_id)` pushes all.")
        self.model.save_pretrained(save_directory, **kwargs)
        self.tokenizer.save_pretrained(save_directory)
        if self.target_tokenizer is not self.tokenizer:
            self.target_tokenizer.save_pretrained(f"{save_directory}/{TARGET_TOKENIZER}")

    def _forward(
        self, texts: list[str], return_alignments: bool = False, **options: Any
    ) -> list[list[dict[str, Any]]]:
        """Translate all texts."""
        return [[self._as_dict(each) for each in row] for row in self._translate(texts, return_alignments, options)]

    def _translate(self, texts: list[str], with_alignments: bool, options: dict[str, Any]) -> list[list[Translation]]:
        """Translate with the search of transformers."""
        search_options = SearchOptions.from_kwargs(**options).with_tokenizer(self.target_tokenizer)

        def translate_batch(ids: list[list[int]]) -> list[list[Translation]]:  # the longest first
            steps = len(ids[0]) + search_options.max_length_offset
            memory = 4 * search_options.num_beams * self.model.config.vocab_size * steps  # of one text, in bytes
            size = max(1, MAX_SCORES_MEMORY // memory)
            found = []
            for part in (ids[start : start + size] for start in range(0, len(ids), size)):
                outputs = search_and_rank(self.model, part, search_options)
                found += decode_n_best(self.target_tokenizer, *outputs, search_options.n_best)
            return found

        return translate_texts(
            self.model,
            (self.tokenizer, self.target_tokenizer),
            texts,
            lambda ids: map_batches(translate_batch, ids, search_options.max_tokens_per_batch),
            max_source_length=search_options.max_source_length,
            with_alignments=with_alignments,
        )

    @staticmethod
    def _as_dict(translation: Translation) -> dict[str, Any]:
        found: dict[str, Any] = {"translation_text": translation.text, "score": translation.score}
        if translation.alignment is not None:
            found["alignment"] = translation.alignment.pairs
        return found


__all__ = ["TranslationPipeline"]
