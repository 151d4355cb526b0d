"""Metrics computed by hand."""

import math

import numpy as np
import pytest
from transformers import EvalPrediction

from hf_vanilla.metrics import ClassificationMetrics, classification


def logits_of(classes, count):
    return np.eye(count)[classes] * 3 - 1


def test_metrics_of_two_classes():
    # predicted 1 1 1 0 0, true 1 0 1 0 1: tp 2, fp 1, fn 1, tn 1
    scores = ClassificationMetrics("single_label_classification")(
        EvalPrediction((logits_of([1, 1, 1, 0, 0], 2), "hidden states"), np.array([1, 0, 1, 0, 1]))
    )
    assert scores["accuracy"] == pytest.approx(3 / 5)
    assert scores["f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert scores["matthews"] == pytest.approx((2 * 1 - 1 * 1) / math.sqrt(3 * 3 * 2 * 2))


def test_three_classes_average_f1():
    # class 0: tp 1 fp 1 fn 0; class 1: tp 1 fp 0 fn 1; class 2: tp 1
    scores = ClassificationMetrics("single_label_classification")(
        EvalPrediction(logits_of([0, 0, 1, 2], 3), np.array([0, 1, 1, 2]))
    )
    assert scores["f1"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)


@pytest.mark.parametrize(
    ("predicted", "labels", "warned"),
    [([1, 1, 1], [0, 1, 1], True), ([0, 1], [1, 1], False)],
)
def test_one_class_predicted_alone_is_a_warning(predicted, labels, warned, monkeypatch):
    messages = []
    monkeypatch.setattr(classification.logger, "warning", messages.append)
    ClassificationMetrics("single_label_classification")(EvalPrediction(np.eye(2)[predicted], np.array(labels)))
    assert [f"All {len(labels)} predictions are class 1" in each for each in messages] == [True] * warned


def test_shape_of_labels_makes_no_difference():
    classes, logits = np.array([1, 0, 1, 0, 1]), logits_of([1, 1, 1, 0, 0], 2)
    for problem_type, shape in (("single_label_classification", (5, 2)), ("multi_label_classification", (5, 1))):
        metrics, given = ClassificationMetrics(problem_type), logits[:, -shape[1] :]
        flat, column = (metrics(EvalPrediction(given, each)) for each in (classes, classes[:, None]))
        assert flat == column
        assert flat["accuracy"] == pytest.approx(3 / 5)
        with pytest.raises(ValueError, match=r"`label_ids` must have shape \(5,.*got \(4,\)"):
            metrics(EvalPrediction(given, classes[:4]))


@pytest.mark.parametrize("problem_type", ["single_label_classification", "multi_label_classification"])
def test_labels_of_another_shape_are_refused(problem_type):
    logits = np.zeros((6, 2) if problem_type.startswith("single") else (2, 3))
    with pytest.raises(ValueError, match=r"`label_ids` must have shape .* got \(3, 2\)"):
        ClassificationMetrics(problem_type)(EvalPrediction(logits, np.zeros((3, 2), dtype=int)))


@pytest.mark.parametrize("count", [2, 3])
def test_ignored_labels_do_not_count(count):
    metrics, labels = ClassificationMetrics("single_label_classification"), np.array([1, 0, 1, -100])
    scores = metrics(EvalPrediction(logits_of([1, 1, 1, 0], count), labels))
    assert scores == metrics(EvalPrediction(logits_of([1, 1, 1], count), labels[:3]))
    with pytest.raises(ValueError, match="`label_ids` must have at least one class that is not -100"):
        metrics(EvalPrediction(logits_of([1], count), labels[3:]))


def test_metrics_of_several_labels():
    logits = np.array([[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])
    labels = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    scores = ClassificationMetrics("multi_label_classification")(EvalPrediction(logits, labels))
    assert scores["accuracy"] == pytest.approx(1 / 3)
    assert scores["f1_micro"] == pytest.approx(4 / (4 + 1 + 1))  # tp 2, fp 1, fn 1
    assert scores["f1_macro"] == pytest.approx((2 / 3 + 2 / 3) / 2)


def test_one_label_has_one_f1():
    logits, labels = np.array([[1.0], [1.0], [-1.0], [-1.0], [-1.0]]), np.array([[1.0], [0.0], [1.0], [0.0], [0.0]])
    scores = ClassificationMetrics("multi_label_classification")(EvalPrediction(logits, labels))
    assert scores == pytest.approx({"f1_micro": 1 / 2, "f1_macro": 1 / 2, "accuracy": 3 / 5})  # tp 1, fp 1, fn 1
    scores = ClassificationMetrics("multi_label_classification")(EvalPrediction(-abs(logits), np.zeros((5, 1))))
    assert (scores["f1_micro"], scores["f1_macro"]) == (0, 0)


def test_metrics_of_regression():
    predicted, labels = np.array([[1.0], [2.0], [4.0], [3.0]]), np.array([1.0, 2.0, 3.0, 9.0])
    scores = ClassificationMetrics("regression")(EvalPrediction(predicted, labels))
    assert scores["mse"] == pytest.approx((0 + 0 + 1 + 36) / 4)
    assert scores["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert scores["pearson"] == pytest.approx(np.corrcoef(predicted[:, 0], labels)[0, 1])


def test_constants_have_no_correlation():
    scores = ClassificationMetrics("regression")(EvalPrediction(np.ones((3, 1)), np.array([1.0, 2.0, 3.0])))
    assert (scores["pearson"], scores["spearman"]) == (0.0, 0.0)


def test_other_problem_types_are_rejected():
    with pytest.raises(ValueError, match="`problem_type` must be one of single_label.*got 'ranking'"):
        ClassificationMetrics("ranking")
