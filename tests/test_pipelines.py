"""transformers' own pipelines with our models, without warnings, and the question answering pipeline."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import pipeline
from transformers.utils import logging

from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForMaskedLM,
    VanillaBertForQuestionAnswering,
    VanillaBertForSequenceClassification,
    VanillaBertForTokenClassification,
    VanillaBertModel,
)
from hf_vanilla.data.question_answering import find_answers, tokenize_questions
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer
from hf_vanilla.models.pipeline_vanilla_bert import QuestionAnsweringPipeline


TEXT = "the dog likes the cat"
TOKENIZER = train_wordpiece_tokenizer([TEXT, "a bird and a fish ."] * 3, 80, show_progress=False)
LABELS = {0: "contradiction", 1: "neutral", 2: "entailment"}
# Model class, fields of its config, and how the pipeline is called.
TASKS = {
    "fill-mask": (VanillaBertForMaskedLM, {}, ("the [MASK] likes the cat",), {}),
    "text-classification": (VanillaBertForSequenceClassification, {}, (TEXT,), {}),
    "token-classification": (VanillaBertForTokenClassification, {}, (TEXT,), {}),
    "feature-extraction": (VanillaBertModel, {}, (TEXT,), {}),
    "zero-shot-classification": (
        VanillaBertForSequenceClassification,
        {"id2label": LABELS, "label2id": {name: number for number, name in LABELS.items()}},
        (TEXT,),
        {"candidate_labels": ["bird", "fish", "cat"]},
    ),
}


def build(task):
    model_class, fields, arguments, options = TASKS[task]
    torch.manual_seed(0)
    config = VanillaBertConfig(
        vocab_size=len(TOKENIZER), hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20,
        initializer_range=0.5, **fields,
    )  # fmt: skip
    return model_class(config).eval(), arguments, options


@pytest.mark.parametrize("task", TASKS)
def test_task_works_without_a_warning(task, tmp_path, caplog, monkeypatch):
    model, arguments, options = build(task)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    pipe = pipeline(task, model=str(tmp_path), device=-1)
    found = pipe(*arguments, **options)
    assert "not supported" not in caplog.text
    assert type(pipe.model) is type(model)
    encoded = TOKENIZER(TEXT if task != "fill-mask" else arguments[0], return_tensors="pt")
    if task == "zero-shot-classification":
        assert sum(found["scores"]) == pytest.approx(1)
        assert found["labels"] == sorted(
            found["labels"], key=lambda label: -found["scores"][found["labels"].index(label)]
        )
        return
    with torch.no_grad():
        outputs = model(**encoded)
    if task == "fill-mask":
        place = encoded["input_ids"][0].tolist().index(TOKENIZER.mask_token_id)
        probability, best = outputs.logits[0, place].softmax(-1).max(-1)
        assert (found[0]["token"], found[0]["score"]) == (int(best), pytest.approx(float(probability), abs=1e-6))
    elif task == "text-classification":
        assert found[0]["score"] == pytest.approx(float(outputs.logits.softmax(-1).max()), abs=1e-6)
    elif task == "token-classification":
        assert len(found) == len(TEXT.split())
        expected = outputs.logits[0, 1:-1].softmax(-1).max(-1).values.tolist()
        assert [each["score"] for each in found] == pytest.approx(expected, abs=1e-6)
    else:
        torch.testing.assert_close(torch.tensor(found), outputs.last_hidden_state)


def test_model_without_the_head_is_warned_of(caplog, monkeypatch):
    """Shows that the test above can fail."""
    model, *_ = build("feature-extraction")
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    pipeline("text-classification", model=model, tokenizer=TOKENIZER, device=-1)
    assert "not supported" in caplog.text


CONTEXT = "the dog likes the cat . a bird and a fish like the dog . " * 6
QUESTIONS = ["a bird likes ?", "the dog likes ?"]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    torch.manual_seed(0)
    config = VanillaBertConfig(
        vocab_size=len(TOKENIZER), hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20,
        initializer_range=0.7, max_position_embeddings=40,
    )  # fmt: skip
    VanillaBertForQuestionAnswering(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return pipeline("vanilla-question-answering", model=str(folder), device=-1)


def test_answer_in_a_long_context_is_the_best_of_all_windows(reader):
    found = reader(QUESTIONS[0], CONTEXT, top_k=5, max_answer_length=4)
    asked = Dataset.from_dict(
        {"id": ["0"], "question": QUESTIONS[:1], "context": [CONTEXT], "answers": [{"text": [], "answer_start": []}]}
    )
    windows = tokenize_questions(asked, TOKENIZER, max_length=40, doc_stride=13)
    assert len(windows) > 3
    best = {}
    for window in windows:
        inputs = {name: torch.tensor([window[name]]) for name in TOKENIZER.model_input_names}
        with torch.no_grad():
            outputs = reader.model(**inputs)
        start, end = outputs.start_logits[0].tolist(), outputs.end_logits[0].tolist()
        spans = window["offset_mapping"]
        for first in range(len(spans)):
            for last in range(first, min(first + 4, len(spans))):
                if min(spans[first][0], spans[last][0]) >= 0:
                    place = spans[first][0], spans[last][1]
                    best[place] = max(best.get(place, -99.0), start[first] + end[last])
    (start, end), _ = max(best.items(), key=lambda item: item[1])
    assert (found[0]["start"], found[0]["end"]) == (start, end)
    assert found[0]["answer"] == CONTEXT[start:end]
    assert [each["score"] for each in found] == sorted((each["score"] for each in found), reverse=True)
    assert 0 < found[0]["score"] <= 1


@pytest.mark.promise("odd text")
def test_lone_surrogates_keep_their_positions(reader):
    odd = "\ud83d\ude00 \udfff the cat \ud800 likes the dog"
    found = reader("\ud800 a bird likes ?", odd, top_k=20)
    assert found == [
        {**each, "answer": odd[each["start"] : each["end"]]}
        for each in reader("\ufffd a bird likes ?", re.sub("[\ud800-\udfff]", "\ufffd", odd), top_k=20)
    ]
    assert "the dog" in [each["answer"] for each in found]


def test_batch_size_of_call_and_constructor(reader):
    sizes = []
    hook = reader.model.register_forward_pre_hook(
        lambda model, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    made_with = QuestionAnsweringPipeline(model=reader.model, tokenizer=reader.tokenizer, batch_size=2)
    made_with(QUESTIONS[0], CONTEXT)
    assert max(sizes) == 2
    sizes.clear()
    made_with(QUESTIONS[0], CONTEXT, batch_size=3)
    hook.remove()
    assert max(sizes) == 3


def test_no_questions_have_no_answers(reader):
    assert reader([], []) == []


def test_answers_do_not_depend_on_the_side_of_padding(reader, monkeypatch):
    expected = reader(QUESTIONS, [CONTEXT, "the cat likes the dog"], batch_size=1)  # no padding
    monkeypatch.setattr(reader.tokenizer, "padding_side", "left")
    found = reader(QUESTIONS, [CONTEXT, "the cat likes the dog"])
    assert [each["answer"] for each in found] == [each["answer"] for each in expected]
    assert [each["score"] for each in found] == pytest.approx([each["score"] for each in expected], rel=1e-4)


def test_pipeline_answers_one_question_and_several(reader):
    several = reader(QUESTIONS, [CONTEXT, "the cat ."])
    one_by_one = [reader(QUESTIONS[0], CONTEXT), reader(QUESTIONS[1], "the cat .")]
    # Products of other shapes add in another order, so scores differ by the rounding of float32.
    assert several == [each | {"score": pytest.approx(each["score"], rel=1e-5)} for each in one_by_one]
    texts = [each["answer"] for each in reader(QUESTIONS[1], "the cat .", top_k=20, handle_impossible_answer=True)]
    assert texts.count("") == 1
    assert "" not in [each["answer"] for each in reader(QUESTIONS[1], "the cat .", top_k=20)]
    by_class = QuestionAnsweringPipeline(model=reader.model, tokenizer=reader.tokenizer)
    assert by_class(QUESTIONS[0], CONTEXT) == one_by_one[0]


@pytest.mark.parametrize("with_no_answer", [False, True])
def test_answers_equal_those_of_the_evaluation(reader, with_no_answer):
    contexts = [CONTEXT, "the cat ."]
    asked = Dataset.from_dict(
        {
            "id": ["a", "b"],
            "question": QUESTIONS,
            "context": contexts,
            "answers": [{"text": [], "answer_start": []}] * 2,
        }
    )
    windows = tokenize_questions(asked, TOKENIZER, max_length=40, doc_stride=13)
    logits = np.zeros((2, len(windows), 40))
    for number, window in enumerate(windows):
        with torch.no_grad():
            outputs = reader.model(**{name: torch.tensor([window[name]]) for name in TOKENIZER.model_input_names})
        logits[0, number, : len(window["input_ids"])] = outputs.start_logits[0]
        logits[1, number, : len(window["input_ids"])] = outputs.end_logits[0]
    wanted = find_answers(asked, windows, *logits, max_answer_length=6, with_no_answer=with_no_answer)
    for options in ({}, {"batch_size": 1}):
        found = reader(
            QUESTIONS, contexts, top_k=20, max_answer_length=6, handle_impossible_answer=with_no_answer, **options
        )
        assert any("" in [answer.text for answer in best] for best in wanted.values()) is with_no_answer
        for row, best in zip(found, wanted.values(), strict=True):
            probabilities = torch.tensor([answer.score for answer in best]).softmax(0).tolist()
            assert row == [
                {"answer": each.text, "start": each.start, "end": each.end, "score": pytest.approx(score, abs=1e-5)}
                for each, score in zip(best, probabilities, strict=True)
            ]


@pytest.mark.parametrize("task", ["question-answering", ""], ids=["named", "found"])
def test_questions_are_answered_without_the_package(task, reader, tmp_path):
    reader.save_pretrained(tmp_path / "model")
    calls = [([QUESTIONS, [CONTEXT, "the cat ."]], {"top_k": 3, "handle_impossible_answer": True})]
    (tmp_path / "calls.json").write_text(json.dumps(calls))
    program = Path(__file__).with_name("pipeline_without_package.py")
    command = [sys.executable, program, task, *(tmp_path / name for name in ("model", "saved", "calls.json", "found"))]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    found = json.loads((tmp_path / "found").read_text("utf-8"))
    assert found["class"] == "pipeline_vanilla_bert.QuestionAnsweringPipeline"
    assert found["first"] == [reader(*arguments, **options) for arguments, options in calls]
    assert found["again"] == found["first"]


@pytest.mark.parametrize(
    ("question", "context", "message"),
    [
        (["a", "b"], ["c"], "must be equal in number"),
        ("  ", CONTEXT, "`question` must have words, but number 1 is empty"),
        (["a", "b"], [CONTEXT, ""], "`context` must have words, but number 2 is empty"),
        (CONTEXT, CONTEXT, "`max_length` .40. must be more than"),
    ],
    ids=["number", "question", "context", "length"],
)
def test_bad_questions_are_named(reader, question, context, message):
    with pytest.raises(ValueError, match=message):
        reader(question, context)


@pytest.mark.parametrize(
    ("question", "context", "message"),
    [
        (None, CONTEXT, "`question` must be a string or a list of strings, got NoneType"),
        ("a", 7, "`context` must be a string or a list of strings, got int"),
        ({"a": "b"}, CONTEXT, "`question` must be a string or a list of strings, got dict"),
        (["a", "b"], ["c", None], "`context` must contain only strings, but number 2 is NoneType"),
        ([1.5], ["c"], "`question` must contain only strings, but number 1 is float"),
    ],
    ids=["none", "number", "dict", "none inside", "number inside"],
)
def test_bad_types_of_questions_are_named(reader, question, context, message):
    with pytest.raises(TypeError, match=message):
        reader(question, context)


@pytest.mark.parametrize("option", ["top_k", "batch_size"])
def test_options_out_of_range_are_named(reader, option):
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"`{option}` must be at least 1, got {value}"):
            reader(QUESTIONS[0], CONTEXT, **{option: value})


def test_model_in_training_mode_is_rejected(reader):
    made = QuestionAnsweringPipeline(model=copy.deepcopy(reader.model).train(), tokenizer=reader.tokenizer)
    with pytest.raises(ValueError, match="`model` must be in evaluation mode"):
        made(QUESTIONS[0], CONTEXT)
