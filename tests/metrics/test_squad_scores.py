"""Scores computed by hand from the published rules."""

import pytest

from hf_vanilla.metrics.question_answering import normalise_answer, squad_scores, token_f1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat, sat!", "cat sat"),
        ("an apple a day", "apple day"),
        ("theater", "theater"),
        ("U.S.A.", "usa"),
        ("the a an", ""),
        ("10\u20131", "10\u20131"),
    ],
    ids=["punctuation", "articles", "prefix", "dots", "nothing", "dash"],
)
def test_answers_are_normalized(text, expected):
    assert normalise_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("the big dog", "big dog", 1.0),
        ("big brown dog", "dog", 2 * 1 / (3 + 1)),
        ("dog dog", "dog", 2 / 3),
        ("cat", "dog", 0.0),
        ("", "", 1.0),
        ("the", "", 1.0),
        ("cat", "", 0.0),
    ],
)
def test_f1_of_words(prediction, answer, expected):
    assert token_f1(prediction, answer) == pytest.approx(expected)


def test_best_match_counts_and_answers_can_be_empty():
    predictions = {"q1": "Denver Broncos", "q2": "in 1066", "q3": "", "q4": "something", "q5": "x"}
    answers = {"q1": ["the Broncos", "Denver Broncos!"], "q2": ["1066"], "q3": [], "q4": [], "q5": ["the", "x y"]}
    scores = squad_scores(predictions, answers)
    assert scores["exact_match"] == pytest.approx(100 * (1 + 0 + 1 + 0 + 0) / 5)
    assert scores["f1"] == pytest.approx(100 * (1 + 2 / 3 + 1 + 0 + 2 / 3) / 5)


def test_every_question_needs_a_prediction():
    with pytest.raises(ValueError, match="1 have none, the first being 'q2'"):
        squad_scores({"q1": "a"}, {"q1": ["a"], "q2": ["b"]})
    with pytest.raises(ValueError, match="there is no question"):
        squad_scores({}, {})
