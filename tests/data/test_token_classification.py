"""Labels of subwords from tags of words, and metrics of entities."""

import numpy as np
import pytest
from datasets import Dataset
from transformers import EvalPrediction

from hf_vanilla.data.token_classification import check_tagged_words, tag_names, tokenize_tagged_words
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer
from hf_vanilla.metrics import EntityMetrics, token_classification


TAGS = ["O", "B-place", "I-place", "B-person"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece_tokenizer(["anna lives in new york city"] * 3 + ["ab"], 40, show_progress=False)


def rows(**changes):
    columns = {"tokens": [["anna", "in", "new", "york"]], "tags": [["B-person", "O", "B-place", "I-place"]]}
    return Dataset.from_dict({**columns, **changes})


def test_first_subwords_are_labelled(tokenizer):
    encoded = tokenize_tagged_words(rows(), tokenizer, TAGS)[0]
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    tagged = [(token, label) for token, label in zip(tokens, encoded["labels"], strict=True) if label != -100]
    assert [label for _, label in tagged] == [3, 0, 1, 2]
    assert not any(token.startswith(("##", "[")) for token, _ in tagged)
    assert any(token.startswith("##") for token in tokens)


def test_all_subwords_can_be_labelled(tokenizer):
    encoded = tokenize_tagged_words(rows(), tokenizer, TAGS, label_all_pieces=True)[0]
    assert encoded["labels"][0] == encoded["labels"][-1] == -100
    assert -100 not in encoded["labels"][1:-1]


def test_tags_are_in_a_fixed_order():
    assert tag_names([["I-b", "O"], ["B-a", "B-b"]]) == ["O", "B-a", "B-b", "I-b"]


def test_truncated_sentences_are_counted(tokenizer, caplog):
    last_has_no_token = rows(tokens=[["anna", "in", "new", "\u200b"]])
    tokenize_tagged_words(last_has_no_token, tokenizer, TAGS)
    assert "truncated" not in caplog.text
    tokenize_tagged_words(rows(), tokenizer, TAGS, max_length=4)
    assert "1 of 1 sentences were truncated to 4 tokens" in caplog.text


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (["O"], r"Row 1: `tags_column` must have as many entries as `tokens_column`, got 1 and 4"),
        (["O", "O", "O", "B-thing"], r"Row 1: a tag must be one of \['O', .*got 'B-thing'"),
    ],
    ids=["count", "name"],
)
def test_bad_tags_are_named(tokenizer, tags, message):
    with pytest.raises(ValueError, match=message):
        tokenize_tagged_words(rows(tags=[tags]), tokenizer, TAGS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tags": [[7], [3]]}, "the train data, row 1: `tags_column` must contain only strings, or .* but has 7"),
        (
            {"tags": [["O"], [None]]},
            "row 2: `tags_column` must contain only strings, or .* but has None",
        ),
        ({"tags": [["O"], ["O"] * 3]}, "the train data, row 2: `tags_column` must have as many .*, got 3 and 1"),
        ({"tokens": ["a b", "c"]}, "the train data, row 1: `tokens_column` must be a list of strings, got 'a b'"),
    ],
    ids=["number", "null", "string", "count"],
)
def test_bad_words_and_tags_are_named(given, message):
    table = Dataset.from_dict({"tokens": [["a"], ["b"]], "tags": [["O"], ["O"]], **given})
    with pytest.raises(ValueError, match=message):
        check_tagged_words(table, "tokens", "tags", "the train data")


def test_metrics_count_whole_entities():
    # true: person, place of two words; found: person, place of one word, and another person
    labels = np.array([[-100, 3, 0, 1, 2, 0, -100]])
    found = np.array([[0, 3, 0, 1, 0, 3, 0]])
    scores = EntityMetrics(TAGS)(EvalPrediction(np.eye(4)[found], labels))
    assert scores["precision"] == pytest.approx(1 / 3)
    assert scores["recall"] == pytest.approx(1 / 2)
    assert scores["f1"] == pytest.approx(2 / 5)
    assert scores["accuracy"] == pytest.approx(3 / 5)
    assert (scores["person_precision"], scores["person_recall"], scores["person_f1"]) == pytest.approx(
        (1 / 2, 1, 2 / 3)
    )
    assert scores["place_f1"] == 0


def test_tags_of_no_scheme_count_word_by_word():
    """Like parts of speech, whose first letters are no prefixes."""
    metrics = EntityMetrics(["IN", "NN", "NOUN"])
    with pytest.raises(ValueError, match="`label_ids` must have at least one tag that is not -100, but has none"):
        metrics(EvalPrediction(np.zeros((1, 2, 3)), np.full((1, 2), -100)))
    scores = metrics(EvalPrediction(np.eye(3)[[[1, 1, 0, 1]]], np.array([[1, 1, 0, 2]])))
    assert scores["f1"] == scores["accuracy"] == 3 / 4
    assert (scores["NN_f1"], scores["NOUN_f1"], scores["IN_f1"]) == pytest.approx((4 / 5, 0, 1))


@pytest.mark.parametrize("letters", ["BIES", "BMES", "BILU", "BMEW"])
@pytest.mark.parametrize("kind", ["-x", "_x", ""])
def test_tags_of_other_schemes_make_entities(letters, kind):
    metrics = EntityMetrics(["O", *(letter + kind for letter in letters)])
    scores = metrics(EvalPrediction(np.eye(5)[[[4, 0, 1, 2, 3]]], np.array([[4, 4, 1, 2, 3]])))
    assert (scores["precision"], scores["recall"]) == pytest.approx((1, 2 / 3))


@pytest.mark.parametrize(("found", "message"), [(0, "the model finds no entity"), (3, "none of the entities")])
def test_a_tagger_that_is_never_right_is_a_warning(found, message, monkeypatch):
    messages = []
    monkeypatch.setattr(token_classification.logger, "warning", messages.append)
    metrics = EntityMetrics(TAGS)
    metrics(EvalPrediction(np.eye(4)[np.full((1, 3), found)], np.array([[1, 2, 0]])))
    assert [message in each for each in messages] == [True]
    metrics(EvalPrediction(np.eye(4)[np.full((1, 3), 0)], np.array([[0, 0, 0]])))  # there is nothing to find
    metrics(EvalPrediction(np.eye(4)[[[0, 3, 0]]], np.array([[0, 3, 0]])))
    assert len(messages) == 1
