"""transformers' own pipelines take our models as they take any other: results, and no warning."""

import pytest
import torch
from transformers import pipeline
from transformers.utils import logging

from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForMaskedLM,
    VanillaBertForSequenceClassification,
    VanillaBertForTokenClassification,
    VanillaBertModel,
)
from hf_vanilla.tokenization import train_wordpiece_tokenizer


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
def test_the_task_works_without_a_warning(task, tmp_path, caplog, monkeypatch):
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


def test_a_model_without_the_head_is_warned_of(caplog, monkeypatch):
    """So the absence of the warning above means something."""
    model, *_ = build("feature-extraction")
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    pipeline("text-classification", model=model, tokenizer=TOKENIZER, device=-1)
    assert "not supported" in caplog.text
