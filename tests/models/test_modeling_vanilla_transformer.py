"""The whole model: its outputs, what they do not depend on, its loss and its gradients."""

import itertools
import math

import pytest
import torch
from reference import paper_positions
from tiny_models import (
    BATCH,
    LABELS,
    SOURCE,
    SOURCE_MASK,
    TARGET,
    VOCAB,
    assert_same,
    gradients,
    tiny_config,
    tiny_model,
)
from torch import nn
from transformers.cache_utils import EncoderDecoderCache

from hf_vanilla import VanillaTransformerForConditionalGeneration
from hf_vanilla.models import layers
from hf_vanilla.models.cache_names import CACHE_NAME


INPUTS = {"input_ids": SOURCE, "attention_mask": SOURCE_MASK, "decoder_input_ids": TARGET}
KINDS = {
    "post-norm": {},
    "pre-norm": dict(norm_position="pre"),
    "learned positions": dict(position_type="learned", max_position_embeddings=9),
    "untied": dict(tie_word_embeddings=False),
    "two vocabularies": dict(source_vocab_size=9, share_encoder_decoder_embeddings=False),
    "all dropouts": dict(attention_dropout=0.2, activation_dropout=0.3),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def model():
    """A model for tests that do not change it."""
    return tiny_model()


@pytest.fixture(scope="module")
def eager_model():
    """The same model with eager attention, which returns its weights."""
    return tiny_model(attn_implementation="eager")


def test_outputs_have_the_lengths_and_shapes_of_transformers(eager_model):
    outputs = eager_model(**INPUTS, output_attentions=True, output_hidden_states=True)
    assert outputs.logits.shape == (2, 7, VOCAB)
    assert [weights.shape for weights in outputs.encoder_attentions] == [(2, 4, 5, 5)] * 2
    assert [weights.shape for weights in outputs.decoder_attentions] == [(2, 4, 7, 7)] * 3
    assert [weights.shape for weights in outputs.cross_attentions] == [(2, 4, 7, 5)] * 3
    assert [states.shape for states in outputs.encoder_hidden_states] == [(2, 5, 16)] * 3
    assert [states.shape for states in outputs.decoder_hidden_states] == [(2, 7, 16)] * 4
    assert torch.equal(outputs.encoder_hidden_states[-1], outputs.encoder_last_hidden_state)
    for weights in (*outputs.encoder_attentions, *outputs.decoder_attentions, *outputs.cross_attentions):
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    for weights in outputs.cross_attentions:
        assert (weights[1, :, :, 3:] == 0).all()
    for weights in outputs.decoder_attentions:
        assert (weights.triu(1) == 0).all()


@torch.no_grad()
def test_first_hidden_state_is_the_scaled_embedding_plus_the_position(model):
    states = model(**INPUTS, output_hidden_states=True).decoder_hidden_states[0]
    embedded = model.get_input_embeddings().weight[TARGET] * math.sqrt(16)
    torch.testing.assert_close(states, embedded + paper_positions(7, 16).float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("asked", [{}, dict(output_hidden_states=True, labels=LABELS)], ids=["plain", "all"])
def test_tuple_output_equals_dictionary_output(model, asked):
    as_dict, as_tuple = model(**INPUTS, **asked), model(**INPUTS, **asked, return_dict=False)
    assert isinstance(as_tuple, tuple)
    for name, ours, theirs in zip(as_dict.keys(), as_tuple, as_dict.to_tuple(), strict=True):
        if isinstance(ours, EncoderDecoderCache):
            continue
        for one, other in zip(*(item if isinstance(item, tuple) else (item,) for item in (ours, theirs)), strict=True):
            assert torch.equal(one, other), name


def test_only_requested_outputs_are_returned(model):
    assert set(model(**INPUTS).keys()) == {"logits", CACHE_NAME, "encoder_last_hidden_state"}
    assert CACHE_NAME not in model(**INPUTS, use_cache=False)
    assert CACHE_NAME not in model(**BATCH)


def test_encoder_outputs_may_replace_ids(model):
    encoder_outputs = model.get_encoder()(SOURCE, attention_mask=SOURCE_MASK)
    expected = model(**INPUTS).logits
    for given in (encoder_outputs, encoder_outputs.to_tuple()):
        actual = model(encoder_outputs=given, attention_mask=SOURCE_MASK, decoder_input_ids=TARGET).logits
        assert torch.equal(actual, expected)


def test_embeddings_may_replace_ids(model):
    embedding = model.get_input_embeddings()
    actual = model(
        inputs_embeds=embedding(SOURCE), attention_mask=SOURCE_MASK, decoder_inputs_embeds=embedding(TARGET)
    ).logits
    assert torch.equal(actual, model(**INPUTS).logits)


def test_labels_shifted_right_are_the_decoder_input(model):
    shifted = model.prepare_decoder_input_ids_from_labels(LABELS)
    assert shifted.tolist() == [[1, 5, 6, 7, 8, 9, 10], [1, 5, 11, 2, 0, 0, 0]]
    assert torch.equal(model(**BATCH).logits, model(**INPUTS).logits)
    starting_with_end = tiny_model(decoder_start_token_id=2)
    assert starting_with_end.prepare_decoder_input_ids_from_labels(LABELS)[:, 0].tolist() == [2, 2]


@pytest.mark.parametrize("sizes", [{}, dict(d_k=None, d_v=None)], ids=["free widths", "equal widths"])
def test_eager_and_sdpa_agree_in_values_and_gradients(monkeypatch, sizes):
    results = {}
    for kernel, short in (("eager", 128), ("sdpa", 128), ("sdpa", -1)):
        monkeypatch.setattr(layers, "SHORT_SEQUENCE", short)
        model = tiny_model(attn_implementation=kernel, dropout=0.0, **sizes).train()
        model.double()(**BATCH, decoder_attention_mask=(TARGET != 0).long()).loss.backward()
        with torch.no_grad():
            logits = model(**INPUTS).logits
        results[kernel, short] = {"logits": logits, **gradients(model)}
    assert_same(results["sdpa", 128], results["eager", 128], rtol=1e-7, atol=1e-9)
    assert_same(results["sdpa", -1], results["eager", 128], rtol=1e-7, atol=1e-9)


@torch.no_grad()
def test_row_of_a_batch_equals_the_row_alone(kind):
    model = tiny_model(**kind)
    together = model(**INPUTS).logits
    for row, (source_len, target_len) in enumerate([(5, 7), (3, 4)]):
        alone = model(SOURCE[[row], :source_len], decoder_input_ids=TARGET[[row], :target_len]).logits
        torch.testing.assert_close(together[[row], :target_len], alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("position_type", ["sinusoidal", "sinusoidal_split", "sinusoidal_t2t", "learned"])
def test_padding_on_the_left_equals_padding_on_the_right(kernel, position_type):
    model = tiny_model(attn_implementation=kernel, position_type=position_type)
    right = model(**INPUTS, decoder_attention_mask=(TARGET != 0).long()).logits
    sides = [torch.stack((ids[0], ids[1].roll((ids[1] == 0).sum().item()))) for ids in (SOURCE, TARGET)]
    assert sides[0][1].tolist() == [0, 0, 7, 8, 2]
    left = model(
        input_ids=sides[0],
        attention_mask=(sides[0] != 0).long(),
        decoder_input_ids=sides[1],
        decoder_attention_mask=(sides[1] != 0).long(),
    ).logits
    torch.testing.assert_close(left[0], right[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(left[1, 3:], right[1, :4], rtol=1e-5, atol=1e-5)


@pytest.mark.promise("row of padding")
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("differentiable", [True, False], ids=["gradients", "no gradients"])
def test_row_of_padding_is_finite_and_does_not_change_the_others(kernel, differentiable):
    model = tiny_model(attn_implementation=kernel)
    source = torch.cat((SOURCE, torch.zeros(1, 5, dtype=torch.long)))
    target = torch.cat((TARGET, torch.zeros(1, 7, dtype=torch.long)))
    # the first two rows with a sentence as the third, and with padding only
    neighbours = [torch.cat((SOURCE, SOURCE[:1])), source]
    results = []
    with torch.set_grad_enabled(differentiable):
        for ids in neighbours:
            inputs = dict(input_ids=ids, attention_mask=(ids != 0).long(), decoder_input_ids=target)
            results.append(model(**inputs, decoder_attention_mask=(target != 0).long()).logits)
    assert results[1].isfinite().all()
    assert torch.equal(results[0][:2], results[1][:2])
    assert not torch.equal(results[0][2], results[1][2])


def test_gradients_are_finite_with_a_row_of_padding():
    model = tiny_model().train()
    source = torch.cat((SOURCE, torch.zeros(1, 5, dtype=torch.long)))
    labels = torch.cat((LABELS, torch.full((1, 7), -100)))
    loss = model(source, attention_mask=(source != 0).long(), labels=labels).loss
    loss.backward()
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_half_precision_is_finite_and_close_to_single_precision(dtype, kernel):
    model = tiny_model(attn_implementation=kernel)
    source = torch.cat((SOURCE, torch.zeros(1, 5, dtype=torch.long)))
    inputs = dict(input_ids=source, attention_mask=(source != 0).long(), labels=torch.cat((LABELS, LABELS[:1])))
    expected = model(**inputs)
    half = model.to(dtype)
    for differentiable in (True, False):
        with torch.set_grad_enabled(differentiable):
            actual = half(**inputs)
        assert actual.logits.dtype == dtype
        assert actual.logits.isfinite().all()
        torch.testing.assert_close(actual.logits[:2].float(), expected.logits[:2], rtol=0, atol=0.2)
        assert actual.loss.item() == pytest.approx(expected.loss.item(), abs=0.1)
    loss = half.train()(**inputs).loss
    loss.backward()
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(half).values())


def test_autocast_gradients_are_close_to_single_precision():
    model = tiny_model(dropout=0.0).train()
    model(**BATCH).loss.backward()
    expected = torch.cat([gradient.flatten() for gradient in gradients(model).values()])
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(**BATCH)
    outputs.loss.backward()
    actual = torch.cat([gradient.flatten() for gradient in gradients(model).values()])
    assert outputs.loss.dtype == torch.float32
    assert (actual - expected).norm() < 0.05 * expected.norm()


def test_evaluation_is_deterministic_and_training_depends_on_the_seed(model):
    assert torch.equal(model(**INPUTS).logits, model(**INPUTS).logits)
    training, losses = tiny_model(dropout=0.5).train(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(training(**BATCH).loss.item())
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


@pytest.mark.promise("empty batch or sentence")
@pytest.mark.parametrize("differentiable", [True, False], ids=["gradients", "no gradients"])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_empty_batch_and_empty_sequences_are_accepted(kernel, differentiable):
    model = tiny_model(attn_implementation=kernel)
    with torch.set_grad_enabled(differentiable):
        outputs = model(input_ids=SOURCE[:0], attention_mask=SOURCE_MASK[:0], labels=LABELS[:0])
        assert outputs.logits.shape == (0, 7, VOCAB)
        assert outputs.loss == 0
        outputs = model(input_ids=SOURCE, attention_mask=SOURCE_MASK, labels=LABELS[:, :0])
        assert outputs.logits.shape == (2, 0, VOCAB)
        assert outputs.loss == 0
        logits = model(input_ids=SOURCE[:, :0], attention_mask=SOURCE_MASK[:, :0], decoder_input_ids=TARGET).logits
        assert logits.shape == (2, 7, VOCAB)
        assert logits.isfinite().all()


def test_empty_batch_has_zero_loss_and_gradients():
    model = tiny_model().train()
    loss = model(input_ids=SOURCE[:0], attention_mask=SOURCE_MASK[:0], labels=LABELS[:0]).loss
    loss.backward()
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients(model).values())


def test_position_types_differ_in_values_only():
    logits = [
        tiny_model(position_type=position_type)(**INPUTS).logits
        for position_type in ("sinusoidal", "sinusoidal_split", "sinusoidal_t2t", "learned")
    ]
    for one, other in itertools.combinations(logits, 2):
        assert one.shape == other.shape
        assert not torch.allclose(one, other, atol=1e-3)


def test_learned_positions_train_the_rows_in_use():
    model = tiny_model(position_type="learned", max_position_embeddings=7)
    model(**BATCH).loss.backward()
    assert (model.model.decoder.embed_positions.weight.grad != 0).any(1).all()
    assert (model.model.encoder.embed_positions.weight.grad != 0).any(1).tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize("depths", [(1, 3), (3, 1), (0, 2), (2, 0)], ids=str)
def test_encoder_and_decoder_depths_may_differ(depths):
    model = tiny_model(encoder_layers=depths[0], decoder_layers=depths[1], attn_implementation="eager")
    outputs = model(**INPUTS, output_attentions=True)
    assert len(outputs.encoder_attentions) == depths[0]
    assert len(outputs.decoder_attentions) == len(outputs.cross_attentions) == depths[1]
    cached = model(input_ids=SOURCE, attention_mask=SOURCE_MASK, decoder_input_ids=TARGET[:, :1])
    assert len(cached.past_key_values.self_attention_cache.layers) == depths[1]


@pytest.mark.parametrize("smoothing_type", ["uniform", "t2t", "annotated"])
def test_evaluation_loss_is_the_cross_entropy(smoothing_type):
    outputs = tiny_model(label_smoothing=0.3, label_smoothing_type=smoothing_type)(**BATCH)
    expected = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), LABELS.flatten())
    torch.testing.assert_close(outputs.loss, expected)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_training_loss_is_smoothed_and_returns_no_logits(tied):
    model = tiny_model(label_smoothing=0.3, dropout=0.0, tie_word_embeddings=tied)
    logits = model(**INPUTS).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), label_smoothing=0.3)
    outputs = model.train()(**BATCH)
    torch.testing.assert_close(outputs.loss, expected)
    assert outputs.logits is None
    torch.testing.assert_close(model(**INPUTS).logits, logits)


@pytest.mark.parametrize("smoothing_type", ["uniform", "t2t", "annotated"])
def test_gradients_of_the_chunked_loss_equal_those_of_the_logits(smoothing_type):
    model = tiny_model(label_smoothing_type=smoothing_type, label_smoothing=0.0, dropout=0.0)
    model(**BATCH).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    model.train()(**BATCH).loss.backward()
    assert_same(gradients(model), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("items", [int, torch.tensor], ids=["int", "tensor"])
def test_accumulated_batches_give_the_gradient_of_one_large_batch(training, parts, items):
    source = torch.randint(3, VOCAB, (6, 5))
    labels = torch.randint(3, VOCAB, (6, 7))
    labels[1, 2:] = labels[2, 1:] = labels[5, 4:] = -100  # parts with different numbers of tokens
    model = tiny_model(dropout=0.0).train(training)
    whole = model(source, labels=labels).loss
    whole.backward()
    expected = gradients(model)
    model.zero_grad()
    count, total = items((labels != -100).sum().item()), 0.0
    for rows in torch.arange(6).chunk(parts):
        loss = model(source[rows], labels=labels[rows], num_items_in_batch=count).loss
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(whole.item(), rel=1e-6)
    # The sums over tokens add in another order: some roundings of float32 at values below 1.
    assert_same(gradients(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8], ids=str)
def test_labels_may_have_any_integer_dtype(dtype):
    model = tiny_model()
    assert torch.equal(model(SOURCE, labels=LABELS.to(dtype)).loss, model(SOURCE, labels=LABELS).loss)


@pytest.mark.promise("no labels")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("items", [None, 0, torch.tensor(0), 14], ids=["none", "zero", "zero as a tensor", "others'"])
def test_no_labels_give_zero_loss_and_gradients(training, items):
    model = tiny_model().train(training)
    loss = model(SOURCE, labels=torch.full_like(LABELS, -100), num_items_in_batch=items).loss
    loss.backward()
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients(model).values())


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_every_parameter_gets_a_gradient(kind, training):
    model = tiny_model(**kind).train(training)
    source = SOURCE.clamp(max=8)
    model(source, attention_mask=(source != 0).long(), labels=LABELS).loss.backward()
    for name, gradient in gradients(model).items():
        assert (gradient != 0).any(), name


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*deprecated:FutureWarning")  # 5.17 has no other name
def test_gradient_checkpointing_keeps_loss_and_gradients(kind):
    results, calls = [], []
    for checkpointing in (False, True):
        model = tiny_model(**kind).train()
        model.config.use_cache = False
        model.model.decoder.layers[2].feed_forward.register_forward_hook(lambda *_: calls.append(_))
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(3)
        source = SOURCE.clamp(max=8)
        loss = model(source, attention_mask=(source != 0).long(), labels=LABELS).loss
        loss.backward()
        results.append({"loss": loss.detach(), **gradients(model)})
    assert_same(results[1], results[0], rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("steps", [(1,) * 7, (3, 1, 3), (1, 6), (6, 1)], ids=str)
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_decoding_in_steps_equals_decoding_at_once(kernel, steps, name):
    model = tiny_model(attn_implementation=kernel)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])
    target = torch.where(mask.bool(), torch.tensor([[1, 5, 6, 7, 8, 9, 10], [0, 0, 1, 11, 4, 5, 6]]), 0)
    inputs = dict(input_ids=SOURCE, attention_mask=SOURCE_MASK)
    expected = model(**inputs, decoder_input_ids=target, decoder_attention_mask=mask).logits
    cache, logits, start = None, [], 0
    for step in steps:
        outputs = model(
            **inputs,
            decoder_input_ids=target[:, start : start + step],
            decoder_attention_mask=mask[:, : start + step],
            **{name: cache},
        )
        cache, start = outputs.past_key_values, start + step
        logits.append(outputs.logits)
    assert cache.get_seq_length() == 7
    actual = torch.cat(logits, dim=1)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


def test_cached_decoding_works_with_gradients():
    model = tiny_model()
    expected = model(**INPUTS).logits
    first = model(input_ids=SOURCE, attention_mask=SOURCE_MASK, decoder_input_ids=TARGET[:, :4])
    second = model(
        encoder_outputs=(first.encoder_last_hidden_state,),
        attention_mask=SOURCE_MASK,
        decoder_input_ids=TARGET[:, 4:],
        past_key_values=first.past_key_values,
    )
    torch.testing.assert_close(torch.cat((first.logits, second.logits), dim=1), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_targets_may_share_encoder_outputs(model):
    encoder_outputs = model.get_encoder()(SOURCE, attention_mask=SOURCE_MASK)
    targets = torch.randint(3, VOCAB, (6, 7))
    shared = model(encoder_outputs=encoder_outputs, attention_mask=SOURCE_MASK, decoder_input_ids=targets).logits
    repeated = model(
        SOURCE.repeat_interleave(3, dim=0),
        attention_mask=SOURCE_MASK.repeat_interleave(3, dim=0),
        decoder_input_ids=targets,
    ).logits
    torch.testing.assert_close(shared, repeated, rtol=1e-5, atol=1e-5)


@pytest.mark.promise("too long")
def test_sinusoidal_positions_have_no_maximum_length():
    model = tiny_model(max_position_embeddings=3, encoder_layers=1, decoder_layers=1)
    source, target = torch.randint(3, VOCAB, (1, 600)), torch.randint(3, VOCAB, (1, 700))
    assert model(source, decoder_input_ids=target).logits.isfinite().all()


def test_config_can_request_hidden_states():
    config = tiny_config(output_hidden_states=True)
    model = VanillaTransformerForConditionalGeneration(config).eval()
    assert len(model(**INPUTS).decoder_hidden_states) == 4
