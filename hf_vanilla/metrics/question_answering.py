"""Exact match and F1 of answers, as the official script of SQuAD computes them."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """Lower-case an answer, and remove punctuation, articles and extra white space.

    Args:
        text (`str`): An answer.

    Returns:
        `str`: the normalized answer.

    Source: Rajpurkar et al. 2016, 6.1.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """Compare two answers after normalization.

    Args:
        prediction (`str`): The predicted answer.
        answer (`str`): A correct answer.

    Returns:
        `float`: 1.0 if they are equal, else 0.0.
    """
    return float(normalise_answer(prediction) == normalise_answer(answer))


def token_f1(prediction: str, answer: str) -> float:
    """Compute the harmonic mean of precision and recall of an answer's words.

    Args:
        prediction (`str`): The predicted answer; empty for none.
        answer (`str`): A correct answer; empty if the question has none.

    Returns:
        `float`: from 0 to 1. If either is empty, 1 if both are.
    """
    predicted, expected = normalise_answer(prediction).split(), normalise_answer(answer).split()
    if not predicted or not expected:
        return float(predicted == expected)
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected))


def squad_scores(predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Score answers by the best match among a question's correct answers; unanswerable questions expect an empty one.

    Args:
        predictions (`Mapping[str, str]`): For each question's id the predicted answer.
        answers (`Mapping[str, Sequence[str]]`): For each question's id the correct answers; none for the unanswerable
            questions of SQuAD 2.0.

    Returns:
        `dict[str, float]`: `exact_match` and `f1`, from 0 to 100.

    Raises:
        ValueError: if there is no question, or a question has no prediction.

    Source: Rajpurkar et al. 2016, 6.1; 2018 for questions without an answer.
    """
    missing = [question for question in answers if question not in predictions]
    if missing or not answers:
        what = f"{len(missing)} have none, the first being {missing[0]!r}" if missing else "there is no question"
        raise ValueError(f"`predictions` must have an answer for every question of `answers`, but {what}.")
    totals = {"exact_match": 0.0, "f1": 0.0}
    for question, correct in answers.items():
        # Answers that are empty after normalization don't count, unless there are no others.
        accepted = [answer for answer in correct if normalise_answer(answer)] or [""]
        totals["exact_match"] += max(exact_match(predictions[question], answer) for answer in accepted)
        totals["f1"] += max(token_f1(predictions[question], answer) for answer in accepted)
    return {name: 100 * total / len(answers) for name, total in totals.items()}
