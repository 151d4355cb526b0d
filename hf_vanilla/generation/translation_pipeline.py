"""The translation pipeline of the package: with the faster search, and optionally sentence by sentence.

```python
translator = pipeline("vanilla-translation", model="runs/en-de")
translator("A man runs.", n_best=2)  # [{"translation_text": "Ein Mann rennt.", "score": -0.3}, ...]
```

Checkpoints come with a pipeline of their own, `models/pipeline_vanilla_transformer.py`, which uses transformers'
search.
"""

import copy
from typing import Any

import numpy as np
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from ..models import pipeline_vanilla_transformer
from ..models.translating import SearchOptions, Translation
from ..precision import FASTEST, INT8, is_int8, resolve_dtype
from .cpu_layers import fast_model
from .translation import translate


class AutoTranslator(AutoModelForSeq2SeqLM):
    """`AutoModelForSeq2SeqLM` for `pipeline()`, with the dtypes `"fastest"` and `"int8"`.

    A model is loaded in float32 for the first, in the type it was saved in for the second. The pipeline, which knows
    the device, converts it.
    """

    @classmethod
    def from_pretrained(cls, *arguments: Any, dtype: Any = "auto", **options: Any) -> PreTrainedModel:
        """Load a model.

        Args:
            *arguments (`Any`): As for `AutoModelForSeq2SeqLM`.
            dtype (`Any`): As there, or `"fastest"` or `"int8"`.
            **options (`Any`): As there.

        Returns:
            `PreTrainedModel`: the model.
        """
        float_type = "float32" if dtype == FASTEST else "auto" if is_int8(dtype) else dtype
        return AutoModelForSeq2SeqLM.from_pretrained(*arguments, dtype=float_type, **options)


class TranslationPipeline(pipeline_vanilla_transformer.TranslationPipeline):
    """Translate texts with [`~hf_vanilla.generation.translate`].

    Called with a text or a list of texts, and these options, which can also be given to the constructor:

    - those of [`~hf_vanilla.generation.SearchOptions`] and further ones of `generate()`, as for `translate`;
    - `return_alignments` and, only for the constructor, `target_tokenizer`, as in the base class;
    - `split_into_sentences`: whether to translate a long text sentence by sentence; its lines stay lines.
    - `dtype`, only for `pipeline()`: as for every pipeline, or `"fastest"`, the faster of float32 and bfloat16 on the
      device, or `"int8"`, linear maps of 8-bit integers on a CPU.

    Returns for each text a list of `{"translation_text": ..., "score": ...}`, best first. For a single text it returns
    that list, and for a `list` of texts with one translation each a flat list, as transformers 4 did.
    """

    model: PreTrainedModel

    def __init__(self, *arguments: Any, dtype: Any = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if dtype == FASTEST and (fastest := resolve_dtype(dtype, self.device)) != self.model.dtype:
            self.model = copy.deepcopy(self.model).to(fastest)  # it may be the caller's
        elif is_int8(dtype):
            self.model = fast_model(self.model, SearchOptions.max_tokens_per_batch, INT8)

    def _forward(
        self,
        texts: list[str],
        return_alignments: bool = False,
        split_into_sentences: bool = False,
        **options: Any,
    ) -> list[list[dict[str, Any]]]:
        """Translate all texts."""
        if not split_into_sentences:
            return super()._forward(texts, return_alignments, **options)
        if return_alignments or options.get("n_best", 1) > 1:
            raise ValueError(
                "`split_into_sentences` gives one translation without alignments; leave out `n_best` and "
                "`return_alignments`, or pass single sentences."
            )
        return [[self._as_dict(each)] for each in self._translate_by_sentences(texts, options)]

    def _translate(self, texts: list[str], with_alignments: bool, options: dict[str, Any]) -> list[list[Translation]]:
        """Translate with the search of the package."""
        return translate(
            self.model,
            self.tokenizer,
            texts,
            target_tokenizer=self.target_tokenizer,
            with_alignments=with_alignments,
            **options,
        )

    def _translate_by_sentences(self, texts: list[str], options: dict[str, Any]) -> list[Translation]:
        """Translate all sentences of all lines of all texts in one call, and join them again.

        The import of the sentence splitter takes a second, so it is here and not at the top of a file that the package
        itself imports.
        """
        from ..data.documents import split_sentences

        lines = [[split_sentences(line) for line in text.split("\n")] for text in texts]
        sentences = [sentence for text in lines for line in text for sentence in line]
        translated = iter(self._translate(sentences, False, options))
        found = []
        for text in lines:
            rows = [[next(translated)[0] for _ in line] for line in text]
            scores = [each.score for row in rows for each in row]
            whole = "\n".join(" ".join(each.text for each in row) for row in rows)
            found.append(Translation(whole, float(np.mean(scores)) if scores else 0.0))
        return found
