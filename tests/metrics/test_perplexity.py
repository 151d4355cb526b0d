"""Scores of language models on documents: the definition as a loop, windows, bad input."""

import copy
import math

import pytest
import torch

from hf_vanilla import VanillaGptConfig, VanillaGptForCausalLM
from hf_vanilla.data.tokenization import train_gpt_tokenizer
from hf_vanilla.metrics import evaluate_documents


TEXTS = ["the cat sat on the mat, ünder it", "a", "dogs\n\nbark <|endoftext|> at the cat and at the other dogs"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_gpt_tokenizer(TEXTS, 280, show_progress=False)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = VanillaGptConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3,
        max_position_embeddings=64,
    )  # fmt: skip
    return VanillaGptForCausalLM(config).eval()


@torch.no_grad()
def looped(model, tokenizer, context_length, stride):
    """Nats of each token on its own, from the window that predicts it first."""
    nats, tokens = 0.0, 0
    for text in TEXTS:
        ids = [1, *tokenizer(text, split_special_tokens=True)["input_ids"], 1]
        for position in range(1, len(ids)):
            late = max(0, position + 1 - context_length)
            stop = min(len(ids), context_length + -(-late // stride) * stride)
            context = ids[max(0, stop - context_length) : position]
            log_probs = model(input_ids=torch.tensor([context])).logits[0, -1].log_softmax(-1)
            nats, tokens = nats - log_probs[ids[position]].item(), tokens + 1
    return nats, tokens


@pytest.mark.parametrize(("context_length", "stride"), [(None, None), (8, None), (7, 1), (9, 8), (2, 1)])
def test_scores_are_those_of_the_definition(model, tokenizer, context_length, stride):
    found = evaluate_documents(model, tokenizer, TEXTS, context_length=context_length, stride=stride, batch_size=3)
    length = context_length or 64
    nats, tokens = looped(model, tokenizer, length, stride or length // 2)
    words, size = sum(len(text.split()) for text in TEXTS), sum(len(text.encode()) for text in TEXTS)
    assert (found["documents"], found["words"], found["bytes"], found["tokens"]) == (3, words, size, tokens)
    expected = {
        "perplexity_per_word": math.exp(nats / words),
        "bits_per_byte": nats / math.log(2) / size,
        "perplexity_per_token": math.exp(nats / tokens),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4)  # float32, in batches of other shapes


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([" "], {}, "`texts` must have at least one word"),
        (TEXTS, {"context_length": 65}, r"`context_length` must be between 2 and .* \(64\), got 65"),
        (TEXTS, {"context_length": 0}, r"`context_length` must be between 2 and .* \(64\), got 0"),
        (TEXTS, {"context_length": 8, "stride": 8}, r"`stride` must be at least 1 and below .* \(8\), got 8"),
        (TEXTS, {"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
    ],
)
def test_bad_input_is_named(model, tokenizer, texts, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate_documents(model, tokenizer, texts, **options)


def test_infinite_loss_is_refused(model, tokenizer):
    overflowing = copy.deepcopy(model)
    with torch.no_grad():
        overflowing.transformer.embed_tokens.weight.mul_(1e30)
    with pytest.raises(ValueError, match="The loss of texts is (nan|inf)"):
        evaluate_documents(overflowing, tokenizer, TEXTS)


def test_training_mode_and_missing_end_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match="`model` must be in evaluation mode"):
        evaluate_documents(VanillaGptForCausalLM(model.config), tokenizer, TEXTS)
    without_end = train_gpt_tokenizer(TEXTS, 280, show_progress=False)
    without_end.eos_token = None
    with pytest.raises(ValueError, match="`tokenizer` must have an `eos_token`"):
        evaluate_documents(model, without_end, TEXTS)
