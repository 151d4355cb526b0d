"""Windows and answers, compared with the characters of the context."""

import gzip
import json

import numpy as np
import pytest
from datasets import Dataset

from hf_vanilla.data.question_answering import find_answers, load_questions, tokenize_questions
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer


CONTEXT = "Anna has a red cat . Ben has two blue dogs and a bird . Carla has nothing at all ."
QUESTIONS = [("q1", "Who has dogs ?", ["Ben"]), ("q2", "What has Ben ?", ["two blue dogs", "a bird"])]


def rows(questions=QUESTIONS, context=CONTEXT):
    return [
        {
            "id": identity,
            "question": question,
            "context": context,
            "answers": {"text": answers, "answer_start": [context.index(answer) for answer in answers]},
        }
        for identity, question, answers in questions
    ]


def official(questions=QUESTIONS, context=CONTEXT):
    answers = rows(questions, context)
    return {
        "title": "Pets",
        "paragraphs": [
            {
                "context": context,
                "qas": [
                    {
                        "id": row["id"],
                        "question": row["question"],
                        "answers": [
                            {"text": text, "answer_start": start}
                            for text, start in zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
                        ],
                    }
                    for row in answers
                ],
            }
        ],
    }


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece_tokenizer([CONTEXT, "who what dog cats ?"] * 5, 80, show_progress=False)


def logits_of(windows, *spans):
    """Logits that prefer the given (window, first token, last token), in this order."""
    shape = len(windows), max(map(len, windows["input_ids"]))
    start, end = np.full(shape, -5.0), np.full(shape, -5.0)
    for rank, (window, first, last) in enumerate(spans):
        start[window, first] = end[window, last] = 9.0 - rank
    return start, end


@pytest.mark.parametrize("form", ["official.json", "articles.jsonl.gz", "rows.jsonl", "rows.json", "rows.parquet"])
def test_every_file_format_has_the_same_questions(tmp_path, form):
    path = tmp_path / form
    if form == "official.json":
        path.write_text(json.dumps({"version": "1.1", "data": [official()]}, indent=1))
    elif form == "articles.jsonl.gz":
        path.write_bytes(gzip.compress(json.dumps(official()).encode()))
    elif form == "rows.parquet":
        Dataset.from_list(rows()).to_parquet(path)
    elif form == "rows.json":
        path.write_text(json.dumps(rows()))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    assert load_questions(path).to_list() == rows()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row["answers"].update(answer_start=[3]), r"line 1: an answer must be .* 'Ben' is not at 3"),
        (lambda row: row["answers"].update(text=[""]), "an answer must be in its context"),
        (lambda row: row["answers"].update(answer_start=[]), "two lists"),
        (lambda row: row.pop("context"), "line 1: .*'context' is missing"),
        (lambda row: row.update(id="q2"), "line 2: the ids .* 'q2' occurs twice"),
    ],
    ids=["elsewhere", "empty", "unequal", "column", "id"],
)
def test_bad_questions_are_named(tmp_path, change, message):
    given = rows()
    change(given[0])
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    with pytest.raises(ValueError, match=message):
        load_questions(path)


def test_bad_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.json"):
        load_questions(tmp_path / "nothing.json")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="must end in"):
        load_questions(tmp_path / "a.txt")
    (tmp_path / "b.json").write_text('{"data": [{"paragraphs": [{"qas": []}, {"context": "x"}]}]}')
    with pytest.raises(ValueError, match=r"b\.json, article 1: an article must have"):
        load_questions(tmp_path / "b.json")
    (tmp_path / "a.json").write_text('{"data": []}')
    with pytest.raises(ValueError, match="at least one question"):
        load_questions(tmp_path / "a.json")


@pytest.mark.parametrize(("max_length", "several"), [(64, False), (20, True)])
def test_positions_are_those_of_the_first_answer(tokenizer, max_length, several):
    questions = Dataset.from_list(rows())
    windows = tokenize_questions(questions, tokenizer, max_length=max_length, doc_stride=4)
    assert (len(windows) > len(questions)) is several
    seen = set()
    for window in windows:
        start, end = window["start_positions"], window["end_positions"]
        assert len(window["input_ids"]) <= max_length
        if (start, end) != (0, 0):
            first, last = window["offset_mapping"][start][0], window["offset_mapping"][end][1]
            assert CONTEXT[first:last] == QUESTIONS[window["example"]][2][0]
            seen.add(window["example"])
    assert seen == {0, 1}
    covered = {tuple(span) for window in windows for span in window["offset_mapping"] if span[0] >= 0}
    text = "".join(CONTEXT[start:end] for start, end in sorted(covered))
    assert text == CONTEXT.replace(" ", "")


def test_split_answer_has_no_positions(tokenizer):
    questions = Dataset.from_list(rows())
    windows = tokenize_questions(questions, tokenizer, max_length=20, doc_stride=4)
    answer = CONTEXT.index("two blue dogs")
    for window in windows:
        spans = [span for span in window["offset_mapping"] if span[0] >= 0]
        whole = spans[0][0] <= answer and spans[-1][1] >= answer + len("two blue dogs")
        if window["example"] == 1:
            assert (window["start_positions"] > 0) is whole


@pytest.mark.parametrize(
    ("context", "answer", "found"),
    [
        (" Ben has two dogs ", " Ben", "Ben"),
        (" Ben has two dogs ", "dogs ", "dogs"),
        ("\u200eBen has two dogs\u200b", "\u200eBen", "Ben"),  # marks of format
        ("Ben has two dogs\u200b", "two dogs\u200b", "two dogs"),
        ("Ben has two dogs\ufffd", "two dogs\ufffd", "two dogs"),
        ("\ue000Ben has two dogs\uf8ff", "two dogs\uf8ff", "two dogs"),  # private letters
        ("two dogs has Bén\u0301", "Bén\u0301", "Bén"),
    ],
)
def test_letters_without_a_token_at_the_edge_of_a_context(tokenizer, context, answer, found):
    start = context.index(answer)
    row = {"id": "1", "question": "who?", "context": context, "answers": {"text": [answer], "answer_start": [start]}}
    (window,) = tokenize_questions(Dataset.from_list([row]), tokenizer, max_length=64, doc_stride=4)
    spans = window["offset_mapping"]
    assert window["start_positions"] > 0
    assert context[spans[window["start_positions"]][0] : spans[window["end_positions"]][1]].rstrip("\u0301") == found


def test_question_without_room_for_context_is_named(tokenizer):
    with pytest.raises(ValueError, match="question 'q1' has 4 tokens"):
        tokenize_questions(Dataset.from_list(rows()), tokenizer, max_length=10, doc_stride=4)


def test_best_answer_comes_first(tokenizer):
    questions = Dataset.from_list(rows())
    windows = tokenize_questions(questions, tokenizer, max_length=64, doc_stride=4)
    right = [(row, windows[row]["start_positions"], windows[row]["end_positions"]) for row in (1, 0)]
    answers = find_answers(questions, windows, *logits_of(windows, *right), n_best=3)
    assert [answers[name][0].text for name in ("q1", "q2")] == ["Ben", "two blue dogs"]
    assert answers["q2"][0].score == 18.0
    assert CONTEXT[answers["q2"][0].start : answers["q2"][0].end] == "two blue dogs"
    for best in answers.values():
        assert len(best) == 3
        assert [answer.score for answer in best] == sorted((answer.score for answer in best), reverse=True)


def test_n_best_equals_exhaustive_search(tokenizer):
    questions = Dataset.from_list(rows())
    windows = tokenize_questions(questions, tokenizer, max_length=20, doc_stride=4)
    noise = np.random.default_rng(0)
    shape = len(windows), 20
    start, end = noise.normal(size=shape), noise.normal(size=shape)
    found = find_answers(questions, windows, start, end, n_best=1000, max_answer_length=3)
    for example, (identity, *_) in enumerate(QUESTIONS):
        every = {}
        for number, window in enumerate(windows):
            if window["example"] != example:
                continue
            spans = window["offset_mapping"]
            for first in range(len(spans)):
                for last in range(first, min(first + 3, len(spans))):
                    if spans[first][0] < 0 or spans[last][0] < 0:
                        continue
                    characters = spans[first][0], spans[last][1]
                    every[characters] = max(every.get(characters, -99), start[number, first] + end[number, last])
        assert {(answer.start, answer.end): answer.score for answer in found[identity]} == pytest.approx(every)
        assert found[identity][0].score == pytest.approx(max(every.values()))


@pytest.mark.parametrize(("threshold", "first"), [(0.0, ""), (100.0, "Ben")])
def test_no_answer_is_ranked_by_its_threshold(tokenizer, threshold, first):
    questions = Dataset.from_list(rows(QUESTIONS[:1]))
    windows = tokenize_questions(questions, tokenizer, max_length=20, doc_stride=4)
    window = next(row for row in range(len(windows)) if windows[row]["start_positions"])
    position = windows[window]["start_positions"]
    start, end = logits_of(windows, (window, position, position))
    start[:, 0] = end[:, 0] = 20.0
    start[-1, 0] = end[-1, 0] = 15.0
    answers = find_answers(
        questions, windows, start, end, with_no_answer=True, no_answer_threshold=threshold, n_best=5
    )["q1"]
    assert answers[0].text == first
    assert [answer.score for answer in answers if not answer.text] == [30.0]  # that of the window where it is lowest
    assert len(answers) == 5
    without = find_answers(questions, windows, start, end)["q1"]
    assert all(answer.text for answer in without)


def test_bad_limits_are_rejected(tokenizer):
    questions = Dataset.from_list(rows())
    windows = tokenize_questions(questions, tokenizer, max_length=64, doc_stride=4)
    start, end = logits_of(windows)
    with pytest.raises(ValueError, match="`start_logits` must have a row for each of the 2 windows, got 1"):
        find_answers(questions, windows, start[:1], end)
    with pytest.raises(ValueError, match="`n_best` must be at least 1, got 0"):
        find_answers(questions, windows, start, end, n_best=0)
