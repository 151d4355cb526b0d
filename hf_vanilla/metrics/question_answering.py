"""Exact match and F1 of answers, as the official script of SQuAD computes them."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """Lower-case, and take off punctuation, articles and superfluous white space.

    Args:
        text (`str`): An answer.

    Returns:
        `str`: what is compared.

    Source: Rajpurkar et al. 2016, 6.1.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """Tell whether two answers are the same once normalised.

    Args:
        prediction (`str`): The answer that was given.
        answer (`str`): A right one.

    Returns:
        `float`: 1.0 or 0.0.
    """
    return float(normalise_answer(prediction) == normalise_answer(answer))


def token_f1(prediction: str, answer: str) -> float:
    """Compute the harmonic mean of precision and recall of an answer's words.

    Args:
        prediction (`str`): The answer that was given; empty for none.
        answer (`str`): A right one; empty if the question has none.

    Returns:
        `float`: from 0 to 1. Where either is empty, 1 if both are.
    """
    given, wanted = normalise_answer(prediction).split(), normalise_answer(answer).split()
    if not given or not wanted:
        return float(given == wanted)
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted))


def squad_scores(predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Score answers; of several right ones the nearest counts, and a question without any wants an empty answer.

    Args:
        predictions (`Mapping[str, str]`): For each question's id the answer that was given.
        answers (`Mapping[str, Sequence[str]]`): For each question's id the right answers, none for v2's unanswerable.

    Returns:
        `dict[str, float]`: `exact_match` and `f1`, from 0 to 100, as they are published.

    Raises:
        ValueError: if there is no question, or a question has no prediction.

    Source: Rajpurkar et al. 2016, 6.1; 2018 for questions without an answer.
    """
    missing = [question for question in answers if question not in predictions]
    if missing or not answers:
        what = f"{len(missing)} have none, the first being {missing[0]!r}" if missing else "there is no question"
        raise ValueError(f"`predictions` must have an answer for every question of `answers`, but {what}.")
    totals = {"exact_match": 0.0, "f1": 0.0}
    for question, right in answers.items():
        # What normalises to nothing is no right answer, unless there is no other.
        accepted = [answer for answer in right if normalise_answer(answer)] or [""]
        totals["exact_match"] += max(exact_match(predictions[question], answer) for answer in accepted)
        totals["f1"] += max(token_f1(predictions[question], answer) for answer in accepted)
    return {name: 100 * total / len(answers) for name, total in totals.items()}
