"""Scores of a whole translated text against its references, with confidence intervals and paired tests."""

import importlib.util
from collections.abc import Sequence
from typing import Any

import evaluate
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.significance import PairedTest

from .bleu import check_tokenize


# Scores of sacreBLEU. Of TER lower is better.
SACREBLEU_SCORES = ("bleu", "chrf", "chrf++", "ter")
COMET_MODEL = "Unbabel/wmt22-comet-da"


def corpus_scores(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    metrics: Sequence[str] = ("bleu", "chrf"),
    tokenize: str = "13a",
    lowercase: bool = False,
    bootstrap_samples: int = 0,
    baseline: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Score translations with sacreBLEU.

    Args:
        hypotheses (`Sequence[str]`): The translations.
        references (`Sequence[str]`): Their references, one each.
        metrics (`Sequence[str]`): Some of `"bleu"`, `"chrf"`, `"chrf++"` and `"ter"`.
        tokenize (`str`, defaults to `"13a"`): sacreBLEU's tokenizer for BLEU.
        lowercase (`bool`, defaults to `False`): Whether to ignore case. TER always does, as by default in sacreBLEU.
        bootstrap_samples (`int`, defaults to 0): Number of resampled texts (Koehn 2004) for 95 % confidence intervals,
            at least 2; 0 for none.
        baseline (`Sequence[str]`, *optional*): Another system's translations, to compare with by paired bootstrap
            resampling; needs `bootstrap_samples`.

    Returns:
        `dict[str, Any]`: each score in percent under its name, and its `..._signature`, sacreBLEU's list of all
        settings; with `bootstrap_samples` also `..._mean` and `..._interval`, half the width of the interval around
        that mean; with a `baseline` also `baseline_...` of all these, and `..._p_value`: the probability of so large a
        difference from the baseline if the two were equally good.

    Raises:
        ValueError: if a metric or tokenizer is unknown, texts differ in number or there are none, `bootstrap_samples`
            is 1 or negative, or a baseline comes without them.
        ImportError: if the tokenizer needs a package that is not installed.
    """
    _check(metrics, hypotheses, references, baseline, bootstrap_samples)
    check_tokenize(tokenize)
    scorers: dict[str, Any] = {
        # `force` silences a warning of tokenized text, which "none" expects.
        "bleu": BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none"),
        "chrf": CHRF(lowercase=lowercase),
        "chrf++": CHRF(lowercase=lowercase, word_order=2),
        "ter": TER(),
    }
    scores: dict[str, Any] = {}
    for name in metrics:
        scorer = scorers[name]
        if baseline is not None:
            systems: list[Any] = [("baseline", list(baseline)), ("hypotheses", list(hypotheses))]
            signatures, tables = PairedTest(systems, {name: scorer}, [list(references)], "bs", bootstrap_samples)()
            [(title, signature)] = signatures.items()
            results: Any = tables[title]
            for prefix, result in zip(("baseline_", ""), results, strict=True):
                scores |= _named(prefix + name, result.score, result.mean, result.ci)
            # sacreBLEU counts larger differences alone: 0.001 for equal scores.
            is_equal = results[0].score == results[1].score
            scores[f"{name}_p_value"] = 1.0 if is_equal else round(results[1].p_value, 4)
        else:
            result = scorer.corpus_score(list(hypotheses), [list(references)], n_bootstrap=max(1, bootstrap_samples))
            scores |= _named(name, result.score, result._mean, result._ci)
            signature = scorer.get_signature()
        scores[f"{name}_signature"] = str(signature)
    return scores


def comet_score(sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Score translations with COMET (Rei et al. 2020) through `evaluate`, which loads its model from the Hub.

    Args:
        sources (`Sequence[str]`): The translated texts.
        hypotheses (`Sequence[str]`): Their translations.
        references (`Sequence[str]`): Their references.

    Returns:
        `dict[str, Any]`: the mean as `comet`, and the model as `comet_signature`.

    Raises:
        ImportError: if the package unbabel-comet is not installed.
    """
    if importlib.util.find_spec("comet") is None:
        raise ImportError("COMET needs a package that is not installed: pip install unbabel-comet")
    metric = evaluate.load("comet", config_name=COMET_MODEL)
    result = metric.compute(predictions=list(hypotheses), references=list(references), sources=list(sources))
    return {"comet": round(100 * float(result["mean_score"]), 2), "comet_signature": COMET_MODEL}


def _check(
    metrics: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[str],
    baseline: Sequence[str] | None,
    bootstrap_samples: int,
) -> None:
    """Raise if the arguments do not fit each other."""
    unknown = [name for name in metrics if name not in SACREBLEU_SCORES]
    if unknown:
        raise ValueError(f"`metrics` must be among {', '.join(SACREBLEU_SCORES)}; got {unknown[0]!r}.")
    for name, texts in (("hypotheses", hypotheses), ("baseline", baseline)):
        if texts is not None and len(texts) != len(references):
            raise ValueError(f"`{name}` must be as many as `references` ({len(references)}), got {len(texts)}.")
    if not references:
        raise ValueError("`references` must have at least one text, got none.")
    if bootstrap_samples < 2 and (bootstrap_samples != 0 or baseline is not None):
        rule = "at least 2" if baseline is not None else "0, for none, or at least 2"
        raise ValueError(f"`bootstrap_samples` must be {rule}, got {bootstrap_samples}; 1000 is usual.")


def _named(name: str, score: float, mean: float | None, interval: float | None) -> dict[str, float]:
    """Name a score and, if there is one, its interval."""
    values = {name: score, f"{name}_mean": mean, f"{name}_interval": interval}
    return {key: round(float(value), 2) for key, value in values.items() if value is not None and value >= 0}
