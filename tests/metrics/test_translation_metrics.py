import json
import subprocess
import sys

import evaluate_ranks
import numpy as np
import pytest
import torch
from evaluate_ranks import END, PAD, START, word_tokenizer
from transformers import EvalPrediction

from hf_vanilla.metrics import Bleu, ChrF, TranslationMetrics


GENERATED = np.array(
    [
        [START, 4, 5, 6, 7, END, PAD, PAD],
        [START, 8, 9, 4, 5, 10, END, PAD],
        [START, END, PAD, PAD, PAD, PAD, PAD, PAD],
    ]
)
TEXTS = ["a b c d", "e f a b G", ""]
LABELS = np.array([[4, 5, 6, 7, END, -100], [8, 9, 4, 5, 6, END], [4, END, -100, -100, -100, -100]])
REFERENCES = ["a b c d", "e f a b c", "a"]


@pytest.fixture
def tokenizer():
    return word_tokenizer()


def expected(texts=TEXTS, references=REFERENCES, gen_len=3.0, word_order=0, lowercase=False, **settings):
    bleu = Bleu().compute(predictions=texts, references=references, lowercase=lowercase, **settings)
    chrf = ChrF().compute(predictions=texts, references=references, word_order=word_order, lowercase=lowercase)
    return {"bleu": bleu["score"], "chrf": chrf["score"], "gen_len": gen_len}


def test_decoded_text_is_scored(tokenizer):
    scores = TranslationMetrics(tokenizer)(EvalPrediction(predictions=GENERATED, label_ids=LABELS))
    assert scores == expected()
    assert 0 < scores["bleu"] < 100


@pytest.mark.parametrize(
    "filled_up",
    [
        np.where(GENERATED == PAD, -100, GENERATED),
        np.pad(GENERATED, ((0, 0), (0, 3)), constant_values=-100),
        (GENERATED, np.zeros((3, 2, 5), dtype=np.float32)),
        torch.from_numpy(GENERATED),
    ],
    ids=["-100 for padding", "-100 after padding", "tuple", "tensor"],
)
def test_padding_and_form_of_predictions_do_not_matter(tokenizer, filled_up):
    scores = TranslationMetrics(tokenizer)(EvalPrediction(predictions=filled_up, label_ids=LABELS))
    assert scores == expected()


def test_arrays_of_ranks_can_have_different_lengths(tokenizer):
    # The trainer fills the shorter arrays of each rank up with -100, in predictions and labels.
    gathered = np.concatenate([GENERATED, np.full((1, 8), -100)])
    gathered[3, :5] = [START, 4, 5, 6, END]
    labels = np.concatenate([np.pad(LABELS, ((0, 0), (0, 2)), constant_values=-100), np.full((1, 8), -100)])
    labels[3] = [4, 5, 6, 7, 8, 9, 10, END]
    scores = TranslationMetrics(tokenizer)(EvalPrediction(predictions=gathered, label_ids=labels))
    assert scores == expected([*TEXTS, "a b c"], [*REFERENCES, "a b c d e f G"], gen_len=12 / 4)


def test_settings_change_the_metrics(tokenizer):
    prediction = EvalPrediction(predictions=GENERATED[1:2], label_ids=np.array([[8, 9, 4, 5, 10, END]]))
    metrics = TranslationMetrics(tokenizer, tokenize="char", lowercase=True, word_order=2)
    assert metrics(prediction) == expected(
        ["e f a b G"], ["e f a b g"], gen_len=5.0, tokenize="char", lowercase=True, word_order=2
    )


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        (np.zeros((3, 8, 11), dtype=np.float32), LABELS, r"`predictions` .* got float32 of shape \(3, 8, 11\)"),
        (GENERATED.astype(np.float32), LABELS, r"`predictions` .* set `predict_with_generate=True`"),
        (GENERATED, None, "`label_ids` must be token ids, got None"),
        (GENERATED, LABELS[0], r"`label_ids` .* got int64 of shape \(6,\)"),
        (GENERATED, LABELS[:2], "equal in number, got 3 and 2"),
    ],
    ids=["logits", "floats", "no labels", "one row", "counts differ"],
)
def test_bad_predictions_are_named(tokenizer, predictions, labels, message):
    with pytest.raises(ValueError, match=message):
        TranslationMetrics(tokenizer)(EvalPrediction(predictions=predictions, label_ids=labels))


def test_rows_after_num_examples_are_not_scored(tokenizer):
    repeated = EvalPrediction(predictions=GENERATED[[0, 1, 2, 0, 1]], label_ids=LABELS[[0, 1, 2, 0, 1]])
    assert TranslationMetrics(tokenizer, num_examples=3)(repeated) == expected()
    assert TranslationMetrics(tokenizer)(repeated) != expected()


def test_missing_rows_are_named(tokenizer):
    with pytest.raises(ValueError, match="`predictions` must have at least `num_examples` = 4 rows, got 3"):
        TranslationMetrics(tokenizer, num_examples=4)(EvalPrediction(predictions=GENERATED, label_ids=LABELS))


def test_unknown_bleu_tokenizer_is_rejected_before_training(tokenizer):
    with pytest.raises(ValueError, match="`tokenize` must be one of 13a, .* got 'moses'"):
        TranslationMetrics(tokenizer, tokenize="moses")


def test_tokenizer_without_padding_is_rejected(tokenizer):
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="`tokenizer` must have a pad token"):
        TranslationMetrics(tokenizer)


def test_metrics_in_the_trainer_of_transformers(tokenizer, tmp_path):
    scores, _ = evaluate_ranks.evaluate(tmp_path)
    generated = evaluate_ranks.generate_one_by_one(evaluate_ranks.model_of_many_words())
    assert len(set(map(tuple, generated))) > 2
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in generated]
    references = [tokenizer.decode(ids, skip_special_tokens=True) for ids in evaluate_ranks.labels_for(generated)]
    lengths = [len([token for token in ids if token not in (PAD, START, END)]) for ids in generated]
    assert scores == expected(texts, references, gen_len=sum(lengths) / len(generated))
    assert 10 < scores["bleu"] < 95


@pytest.mark.slow
def test_two_ranks_score_as_one_process(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, evaluate_ranks.__file__, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*.json"))]
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    alone, _ = evaluate_ranks.evaluate(tmp_path)
    assert [rank["scores"] for rank in ranks] == [alone, alone]
