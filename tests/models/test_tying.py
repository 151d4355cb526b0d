"""Embeddings stay tied in training, resizing and saving, and the padding row stays zero."""

import itertools

import pytest
import torch
from safetensors import safe_open
from tiny_models import BATCH, LABELS, SOURCE, SOURCE_MASK, TARGET, VOCAB, assert_same, gradients, tiny_model
from torch import nn

from hf_vanilla import VanillaTransformerForConditionalGeneration, VanillaTransformerModel


TYINGS = {
    f"{'shared' if shared else 'separate'} {'tied' if tied else 'untied'}": dict(
        share_encoder_decoder_embeddings=shared, tie_word_embeddings=tied
    )
    for shared, tied in itertools.product((True, False), repeat=2)
}
ENCODER, DECODER, HEAD = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(params=TYINGS)
def tying(request):
    return TYINGS[request.param]


def groups(model):
    """Group the names of the three embeddings by parameter."""
    parameters = {}
    for name in (ENCODER, DECODER, HEAD):
        parameters.setdefault(id(model.get_parameter(name)), []).append(name)
    return sorted(parameters.values())


def expected_groups(share_encoder_decoder_embeddings, tie_word_embeddings):
    if share_encoder_decoder_embeddings:
        return [[ENCODER, DECODER, HEAD]] if tie_word_embeddings else [[HEAD], [ENCODER, DECODER]]
    return [[DECODER, HEAD], [ENCODER]] if tie_word_embeddings else [[HEAD], [DECODER], [ENCODER]]


def reload(model, folder):
    model.save_pretrained(folder)
    return VanillaTransformerForConditionalGeneration.from_pretrained(folder)


def test_embeddings_are_tied_as_configured(tying):
    assert groups(tiny_model(**tying)) == sorted(expected_groups(**tying))


def test_saved_model_is_bit_equal_and_has_each_tensor_once(tying, tmp_path):
    model = tiny_model(**tying)
    reloaded = reload(model, tmp_path)
    assert groups(reloaded) == sorted(expected_groups(**tying))
    assert_same(reloaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert torch.equal(reloaded(**BATCH).logits, model(**BATCH).logits)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = set(file.keys())
    assert len(saved) == len(list(model.parameters()))
    assert saved & {ENCODER, DECODER, HEAD} == {
        group[0] if DECODER not in group else DECODER for group in groups(model)
    }


def test_base_model_ties_source_and_target_embeddings(tmp_path):
    for shared in (True, False):
        model = tiny_model(share_encoder_decoder_embeddings=shared).model
        assert (model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight) == shared
        model.save_pretrained(tmp_path)
        reloaded = VanillaTransformerModel.from_pretrained(tmp_path)
        assert (reloaded.encoder.embed_tokens.weight is reloaded.decoder.embed_tokens.weight) == shared
        inputs = dict(input_ids=SOURCE, attention_mask=SOURCE_MASK, decoder_input_ids=TARGET)
        assert torch.equal(reloaded(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_gradient_of_a_tied_embedding_is_the_sum_of_its_uses(training):
    untied = tiny_model(**TYINGS["separate untied"], dropout=0.0).train(training)
    with torch.no_grad():
        for name in (ENCODER, HEAD):
            untied.get_parameter(name).copy_(untied.get_parameter(DECODER))
    untied(**BATCH).loss.backward()
    separate = gradients(untied)
    separate[HEAD][0] = 0  # a projection tied to an embedding does not train its padding row
    for tying in TYINGS.values():
        model = tiny_model(dropout=0.0, **tying).train(training)
        model.load_state_dict(untied.state_dict())
        model(**BATCH).loss.backward()
        for group in groups(model):
            expected = sum(separate[name] for name in group)
            actual = model.get_parameter(group[0]).grad.clone()
            actual[0] = 0
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def loss_of_logits(model):
    """Compute the loss outside of the model from its logits, as the Trainer's own label smoother does."""
    logits = model(input_ids=SOURCE, attention_mask=SOURCE_MASK, decoder_input_ids=TARGET).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), label_smoothing=0.1)


LOSSES = {
    "training": lambda model: model.train()(**BATCH).loss,
    "evaluation": lambda model: model.eval()(**BATCH).loss,
    "logits": lambda model: loss_of_logits(model.train()),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("pad_token_id", [0, 4])
def test_padding_row_stays_zero_in_training(tying, loss, pad_token_id, tmp_path):
    model = tiny_model(**tying, pad_token_id=pad_token_id, label_smoothing_type="t2t")
    before = model.model.decoder.embed_tokens.weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.9, 0.98), eps=1e-9)
    for _ in range(3):
        optimizer.zero_grad()
        LOSSES[loss](model).backward()
        optimizer.step()
    for embedding in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens):
        assert (embedding.weight[pad_token_id] == 0).all()
        assert embedding.padding_idx == pad_token_id
    moved = (model.model.decoder.embed_tokens.weight != before).any(1)
    assert moved[[5, 6, 7]].all()
    reloaded = reload(model, tmp_path)
    assert (reloaded.model.encoder.embed_tokens.weight[pad_token_id] == 0).all()


def test_padding_row_of_an_untied_projection_is_trained():
    model = tiny_model(**TYINGS["separate untied"])
    LOSSES["training"](model).backward()
    assert (model.lm_head.weight.grad[0] != 0).any()


@pytest.mark.filterwarnings("ignore:.*multivariate normal.*")
@pytest.mark.parametrize("size", [9, 17])
def test_resizing_keeps_tying_tokens_and_padding(tying, size, tmp_path):
    model = tiny_model(**tying)
    inputs = dict(input_ids=SOURCE, attention_mask=SOURCE_MASK, decoder_input_ids=TARGET.clamp(max=8))
    before, weights = (
        model(**inputs).logits,
        {name: model.get_parameter(name).clone() for name in (ENCODER, DECODER, HEAD)},
    )
    returned = model.resize_token_embeddings(size)
    assert returned is model.get_input_embeddings()
    assert groups(model) == sorted(expected_groups(**tying))
    assert model.config.vocab_size == size
    kept = min(size, VOCAB)
    for name, weight in weights.items():
        assert model.get_parameter(name).shape == (size, 16)
        assert torch.equal(model.get_parameter(name)[:kept], weight[:kept])
    for embedding in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens):
        assert (embedding.num_embeddings, embedding.padding_idx) == (size, 0)
        assert (embedding.weight[0] == 0).all()
    after = model(**inputs).logits
    assert after.shape == (2, 7, size)
    torch.testing.assert_close(after[..., :kept], before[..., :kept])

    highest = torch.full_like(LABELS, size - 1)
    assert model.train()(torch.full_like(SOURCE, size - 1), labels=highest).loss.isfinite()
    reloaded = reload(model.eval(), tmp_path)
    assert torch.equal(reloaded(**inputs).logits, after)


def test_resizing_to_a_multiple_resizes_all_embeddings(tying):
    model = tiny_model(**tying)
    model.resize_token_embeddings(pad_to_multiple_of=8, mean_resizing=False)
    assert {tuple(model.get_parameter(name).shape) for name in (ENCODER, DECODER, HEAD)} == {(16, 16)}
    assert groups(model) == sorted(expected_groups(**tying))


def test_resizing_includes_a_source_vocabulary_of_the_same_size(tmp_path):
    model = tiny_model(source_vocab_size=VOCAB, share_encoder_decoder_embeddings=False)
    model.resize_token_embeddings(9)
    assert (model.config.vocab_size, model.config.source_vocab_size) == (9, 9)
    assert reload(model, tmp_path).model.encoder.embed_tokens.num_embeddings == 9


def test_vocabularies_of_different_sizes_are_not_resized_to_one_size():
    model = tiny_model(source_vocab_size=9, share_encoder_decoder_embeddings=False)
    with pytest.raises(
        ValueError, match=r"`source_vocab_size` \(9\) and `vocab_size` \(13\), to one size; build a model"
    ):
        model.resize_token_embeddings(17)
    assert (model.config.vocab_size, model.config.source_vocab_size) == (VOCAB, 9)
    assert model.get_parameter(ENCODER).shape == (9, 16)
    assert model.get_parameter(DECODER).shape == model.get_parameter(HEAD).shape == (VOCAB, 16)


def test_input_embeddings_can_be_replaced(tying):
    model = tiny_model(**tying)
    replacement = nn.Embedding.from_pretrained(torch.randn(VOCAB, 16), freeze=True, padding_idx=0)
    model.set_input_embeddings(replacement)
    assert model.get_input_embeddings() is replacement
    shared = tying["share_encoder_decoder_embeddings"]
    assert (model.model.decoder.embed_tokens is replacement) == shared
