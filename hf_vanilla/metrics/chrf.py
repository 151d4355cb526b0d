"""chrF (Popović 2015) and chrF++ (Popović 2017) as sacreBLEU computes them."""

from typing import Any

import evaluate
from sacrebleu.metrics import CHRF

from .corpus_metric import TEXT_FEATURES, CorpusMetric, reference_streams


class ChrF(CorpusMetric):
    """Corpus chrF: the F-score of character n-grams, which needs no tokenizer and so suits every language.

    `compute(predictions=..., references=...)` takes detokenized text and these settings:

    - `word_order` (`int`, defaults to 0): longest word n-gram; 2 gives chrF++.
    - `char_order` (`int`, defaults to 6): longest character n-gram.
    - `beta` (`int`, defaults to 2): weight of recall relative to precision.
    - `lowercase` (`bool`, defaults to `False`): ignore case.

    It returns a `dict` of `score` in percent, the settings `char_order`, `word_order` and `beta`, and `signature`,
    sacreBLEU's list of all settings, to be published with the score.

    Example:
        >>> result = ChrF().compute(predictions=["The cat sat."], references=["The cat sits."], word_order=2)
        >>> round(result["score"], 1), result["signature"].split("|")[4]
        (55.0, 'nw:2')
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Corpus chrF and chrF++ in percent, computed by sacreBLEU.",
            citation="Popović, 2015. chrF: character n-gram F-score for automatic MT evaluation. WMT 2015.",
            inputs_description=(
                "\nSettings: `word_order` (default 0; 2 gives chrF++), `char_order` (default 6), `beta` (default 2), "
                "`lowercase` (default False)."
            ),
            features=TEXT_FEATURES,
            reference_urls=["https://aclanthology.org/W15-3049", "https://aclanthology.org/W17-4770"],
        )

    def _compute(
        self,
        *,
        predictions: list[str],
        references: list[list[str]],
        word_order: int = 0,
        char_order: int = 6,
        beta: int = 2,
        lowercase: bool = False,
    ) -> dict[str, Any]:
        for name, value, lowest in (("word_order", word_order, 0), ("char_order", char_order, 1), ("beta", beta, 1)):
            if value < lowest:
                raise ValueError(f"`{name}` must be at least {lowest}, got {value}.")
        chrf = CHRF(char_order=char_order, word_order=word_order, beta=beta, lowercase=lowercase)
        result = chrf.corpus_score(predictions, reference_streams(references))
        return {
            "score": result.score,
            "char_order": result.char_order,
            "word_order": result.word_order,
            "beta": result.beta,
            "signature": str(chrf.get_signature()),
        }
