"""The translation pipeline of the package: with the faster search, and sentence by sentence on request.

```python
translator = pipeline("vanilla-translation", model="runs/en-de")
translator("A man runs.", n_best=2)  # [{"translation_text": "Ein Mann rennt.", "score": -0.3}, ...]
```

Checkpoints carry a pipeline of their own, `models/pipeline_vanilla_transformer.py`, which searches with `generate()`.
"""

from typing import Any

import numpy as np

from ..models import pipeline_vanilla_transformer
from ..models.translating import Translation
from .translation import translate


class TranslationPipeline(pipeline_vanilla_transformer.TranslationPipeline):
    """Translate texts, with all that [`~hf_vanilla.generation.translate`] can do.

    Called with a text or a list of texts, and these options, which may also be given when it is made:

    - `n_best`: translations of each text; with it, or without, each has its `score`.
    - `num_beams`, `length_penalty`, `length_penalty_type`: the search; by default the paper's, 4 beams and GNMT's 0.6.
    - `return_alignments`: whether each has an `alignment`, the pairs of source and target words that belong together.
    - `target_tokenizer`, when it is made: as in the base class.
    - `split_into_sentences`: whether a long text is translated sentence by sentence, and its lines stay lines.
    - any other argument of `translate`, such as `max_tokens_per_batch`, and those of `generate()` that it does not set
      itself: for `max_new_tokens` and `max_length` give `max_length_offset`, for `num_return_sequences` `n_best`.

    Returns for each text a list of `{"translation_text": ..., "score": ...}`, best first. For a single text it is that
    list alone, and for a `list` of texts with one translation each one flat list, as transformers 4 gave it.
    """

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

    def _translate(self, texts: list[str], **options: Any) -> list[list[Translation]]:
        return translate(self.model, self.tokenizer, texts, target_tokenizer=self.target_tokenizer, **options)

    def _translate_by_sentences(self, texts: list[str], options: dict[str, Any]) -> list[Translation]:
        """Translate every sentence of every line of every text in one go, and put them together again.

        The splitter is imported here: it takes a second, and whoever imports the package imports this file.
        """
        from ..data.documents import split_sentences

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
