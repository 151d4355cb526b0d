"""Forced scoring against the formula and against the scores of beam search."""

import copy

import pytest
import torch
from tiny_translator import EOS, reversal_batch, sources, trained_model

from hf_vanilla import VanillaGptConfig, VanillaGptForCausalLM
from hf_vanilla.generation import beam_search, labels_of_beams, score


@pytest.fixture(scope="module")
def model():
    return trained_model(dropout=0.3)


@pytest.fixture
def pairs():
    return reversal_batch(5)


def naive_log_probs(model, source, target):
    """Log probability of each token of one pair without padding, one step at a time."""
    log_probs = []
    for position, token in enumerate(target):
        start = torch.tensor([[model.config.decoder_start_token_id, *target[:position]]])
        with torch.no_grad():
            logits = model(torch.tensor([source]), decoder_input_ids=start).logits[0, -1].double()
        log_probs.append((logits[token] - logits.exp().sum().log()).item())
    return log_probs


def test_score_is_the_sum_of_log_probabilities(model, pairs):
    outputs = score(model, *pairs.values())
    for row in range(5):
        source = pairs["input_ids"][row][pairs["attention_mask"][row] == 1].tolist()
        target = pairs["labels"][row][pairs["labels"][row] != -100].tolist()
        expected = naive_log_probs(model, source, target)
        assert outputs.token_counts[row] == len(expected)
        torch.testing.assert_close(outputs.token_log_probs[row, : len(expected)], torch.tensor(expected))
        assert (outputs.token_log_probs[row, len(expected) :] == 0).all()
        assert outputs.scores[row].item() == pytest.approx(sum(expected), abs=1e-4)


def test_score_does_not_depend_on_padding(model, pairs):
    expected = score(model, *pairs.values())
    wider = {
        "input_ids": torch.nn.functional.pad(pairs["input_ids"], (0, 3)),
        "attention_mask": torch.nn.functional.pad(pairs["attention_mask"], (0, 3)),
        "labels": torch.nn.functional.pad(pairs["labels"], (0, 2), value=-100),
    }
    torch.testing.assert_close(score(model, *wider.values()).scores, expected.scores)
    flipped = {"input_ids": pairs["input_ids"].flip(1), "attention_mask": pairs["attention_mask"].flip(1)}
    backwards = torch.cat([source[mask == 1].flip(0) for source, mask in zip(*flipped.values(), strict=True)])
    flipped["input_ids"][flipped["attention_mask"] == 1] = backwards  # the same words, padded on the left
    torch.testing.assert_close(score(model, *flipped.values(), pairs["labels"]).scores, expected.scores)


@pytest.mark.parametrize("length_penalty_type", ["gnmt", "power"])
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.7])
def test_scores_equal_those_of_beam_search(model, length_penalty, length_penalty_type):
    inputs = sources(batch=4)
    penalty = {"length_penalty": length_penalty, "length_penalty_type": length_penalty_type}
    outputs = model.generate(
        **inputs,
        **penalty,
        num_beams=5,
        num_return_sequences=5,
        max_new_tokens=15,
        max_length_offset=0,
        min_length=5,
        return_dict_in_generate=True,
        custom_generate=beam_search,
    )
    repeated = {name: tensor.repeat_interleave(5, 0) for name, tensor in inputs.items()}
    labels = labels_of_beams(outputs)
    assert ((labels == EOS).sum(1) == 0).any()  # one that was cut off
    scores = score(model, *repeated.values(), labels, **penalty).scores
    torch.testing.assert_close(scores, outputs.sequences_scores, rtol=0, atol=1e-4)


def test_scores_without_tokens_are_0(model, pairs):
    pairs["labels"][2] = -100
    outputs = score(model, *pairs.values(), length_penalty=1.0, length_penalty_type="power")
    assert outputs.scores[2] == 0
    assert outputs.token_counts[2] == 0
    assert torch.isfinite(outputs.scores).all()


def test_half_precision_is_summed_in_full(model, pairs):
    full = score(model, *pairs.values())
    half = score(copy.deepcopy(model).bfloat16(), *pairs.values())
    assert half.scores.dtype == torch.float32
    torch.testing.assert_close(half.scores, full.scores, rtol=0.02, atol=0.1)


def test_scoring_needs_an_encoder(pairs):
    with pytest.raises(TypeError, match="`model` must be an encoder-decoder, which reads a source; got a VanillaGpt"):
        score(VanillaGptForCausalLM(VanillaGptConfig.preset("tiny", vocab_size=20)).eval(), *pairs.values())


def test_scoring_rejects_training_mode(model, pairs):
    model.train()
    try:
        with pytest.raises(ValueError, match="`model` must be in evaluation mode"):
            score(model, *pairs.values())
    finally:
        model.eval()


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"labels": torch.ones(4, 3, dtype=torch.long)}, {}, r"as many rows as `input_ids` \(5\), got 4"),
        ({"labels": torch.full((5, 2), 30)}, {}, r"`labels` must be in \[0, 30\); got 30 at row 0"),
        ({"labels": torch.full((5, 2), -7)}, {}, r"`labels` must be in \[0, 30\).* got -7"),
        ({}, {"length_penalty_type": "mean"}, '`length_penalty_type` must be "gnmt" or "power"'),
        ({}, {"length_penalty": -1000}, r"`length_penalty` must be in \[-10, 10\], got -1000"),
    ],
    ids=["rows", "large", "negative", "penalty", "exponent"],
)
def test_bad_scoring_input_is_named(model, pairs, changes, options, message):
    with pytest.raises(ValueError, match=message):
        score(model, *{**pairs, **changes}.values(), **options)
