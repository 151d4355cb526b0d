"""BLEU (Papineni et al. 2002) as sacreBLEU computes it (Post 2018)."""

from typing import Any

import evaluate
from sacrebleu.metrics import BLEU

from .corpus_metric import TEXT_FEATURES, CorpusMetric, reference_streams


# sacreBLEU's built-in tokenizers, and those that need a package, with its name.
TOKENIZERS = ("13a", "zh", "none", "char", "intl")
TOKENIZERS_OF_PACKAGES = {
    "ja-mecab": "sacrebleu[ja]",
    "ko-mecab": "sacrebleu[ko]",
    "flores101": "sentencepiece",
    "flores200": "sentencepiece",
    "spBLEU-1K": "sentencepiece",
}


def check_tokenize(tokenize: str) -> None:
    """Check that sacreBLEU has a tokenizer, and what it needs.

    Args:
        tokenize (`str`): Name of the tokenizer.

    Raises:
        ValueError: if there is no such tokenizer.
        ImportError: if it needs a package that is not installed.
        OSError: if it needs a model that can't be downloaded.
    """
    if tokenize in TOKENIZERS:
        return
    if tokenize not in TOKENIZERS_OF_PACKAGES:
        names = ", ".join((*TOKENIZERS, *TOKENIZERS_OF_PACKAGES))
        raise ValueError(f"`tokenize` must be one of {names}, got {tokenize!r}.")
    package = TOKENIZERS_OF_PACKAGES[tokenize]
    try:
        BLEU(tokenize=tokenize)
    except (RuntimeError, ImportError) as error:
        raise ImportError(
            f'sacreBLEU\'s tokenizer {tokenize} needs a package that is not installed: pip install "{package}"'
        ) from error
    except OSError as error:
        raise OSError(f"The model of sacreBLEU's tokenizer {tokenize} can't be downloaded: {error}") from error


class Bleu(CorpusMetric):
    """Corpus BLEU: the geometric mean of clipped n-gram precisions, times a penalty for short output.

    `compute(predictions=..., references=...)` takes detokenized text and two settings:

    - `tokenize` (`str`, defaults to `"13a"`): sacreBLEU's tokenizer. `"13a"` is WMT's for languages with spaces,
      `"zh"` the one for Chinese, `"intl"` splits on all Unicode punctuation, `"char"` into characters, and `"none"`
      takes tokenized text. `"ja-mecab"`, `"ko-mecab"`, `"flores101"`, `"flores200"` and `"spBLEU-1K"` need a package.
    - `lowercase` (`bool`, defaults to `False`): ignore case.

    It returns a `dict` with the keys of `evaluate`'s own sacrebleu metric: `score` and `precisions` (of 1- to 4-grams)
    in percent, `counts` and `totals` of matched and of all n-grams, `bp` the brevity penalty, `sys_len` and `ref_len`
    in tokens; and `signature`, sacreBLEU's list of all settings, to be published with the score.

    Example:
        >>> result = Bleu().compute(predictions=["The cat sat."], references=[["The cat sat.", "A cat sat down."]])
        >>> round(result["score"], 1), result["sys_len"]
        (100.0, 4)
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Corpus BLEU in percent, computed by sacreBLEU.",
            citation="Post, 2018. A Call for Clarity in Reporting BLEU Scores. WMT 2018.",
            inputs_description=(
                f"\nSettings: `tokenize` (one of {', '.join(TOKENIZERS)}; default 13a), `lowercase` (default False)."
            ),
            features=TEXT_FEATURES,
            reference_urls=["https://aclanthology.org/W18-6319", "https://github.com/mjpost/sacrebleu"],
        )

    def _compute(
        self, *, predictions: list[str], references: list[list[str]], tokenize: str = "13a", lowercase: bool = False
    ) -> dict[str, Any]:
        check_tokenize(tokenize)
        # `force` silences a warning of tokenized text, which "none" expects.
        bleu = BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none")
        result = bleu.corpus_score(predictions, reference_streams(references))
        return {
            "score": result.score,
            "counts": result.counts,
            "totals": result.totals,
            "precisions": result.precisions,
            "bp": result.bp,
            "sys_len": result.sys_len,
            "ref_len": result.ref_len,
            "signature": str(bleu.get_signature()),
        }
