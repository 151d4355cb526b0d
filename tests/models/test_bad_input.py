"""Bad input is refused with an error that names the argument, the rule, the value and its position."""

import re

import pytest
import torch
from tiny_berts import tiny_bert
from tiny_models import BATCH, LABELS, SOURCE, SOURCE_MASK, TARGET, tiny_model
from tiny_vits import IMAGES, tiny_vit
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from hf_vanilla.models.checks import check_attention_mask, check_input_ids


INPUTS = {"input_ids": SOURCE, "attention_mask": SOURCE_MASK, "decoder_input_ids": TARGET}
TARGET_MASK = (TARGET != 0).long()


@pytest.fixture(params=["training", "evaluation"])
def model(request):
    return tiny_model().train(request.param == "training")


def with_value(ids, row, column, value):
    changed = ids.clone()
    changed[row, column] = value
    return changed


@pytest.mark.promise("id outside the vocabulary")
@pytest.mark.parametrize("value", [13, 14, 10**9, -1, -100])
@pytest.mark.parametrize("name", ["input_ids", "decoder_input_ids"])
def test_id_outside_the_vocabulary_is_refused(model, name, value):
    inputs = {**INPUTS, name: with_value(INPUTS[name], 1, 3, value)}
    message = rf"`{name}` must be in \[0, 13\); got {value} at row 1, position 3\. .*do tokenizer and model"
    with pytest.raises(ValueError, match=message):
        model(**inputs)


@pytest.mark.promise("id outside the vocabulary")
@pytest.mark.parametrize("num_beams", [1, 3])
def test_id_outside_the_vocabulary_is_refused_by_generate(model, num_beams):
    with pytest.raises(ValueError, match=r"`input_ids` must be in \[0, 13\); got 13 at row 0, position 2"):
        model.generate(with_value(SOURCE, 0, 2, 13), attention_mask=SOURCE_MASK, num_beams=num_beams)
    prompt = torch.tensor([[1, 20], [1, 3]])
    with pytest.raises(ValueError, match=r"`decoder_input_ids` must be in \[0, 13\).*got 20 at row 0, position 1"):
        model.generate(SOURCE, attention_mask=SOURCE_MASK, decoder_input_ids=prompt, num_beams=num_beams)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (tiny_bert, {"input_ids": SOURCE}),
        (tiny_vit, {"pixel_values": IMAGES}),
        (lambda: tiny_model().model.encoder, {"input_ids": SOURCE}),
    ],
    ids=["bert", "vit", "encoder"],
)
def test_cache_is_refused_by_encoders(make, inputs):
    with pytest.raises(ValueError, match="`past_key_values` must not be given to an encoder"):
        make()(**inputs, past_key_values=DynamicCache())


def test_source_and_target_ids_are_checked_against_their_own_vocabularies():
    model = tiny_model(source_vocab_size=9, share_encoder_decoder_embeddings=False)
    model(SOURCE, labels=LABELS)  # source ids end at 8, target ids at 12
    with pytest.raises(ValueError, match=r"`input_ids` must be in \[0, 9\); got 9 at row 0, position 0"):
        model(with_value(SOURCE, 0, 0, 9), labels=LABELS)
    with pytest.raises(ValueError, match=r"`labels` must be in \[0, 13\), or -100 .*; got 13 at row 0, position 0"):
        model(SOURCE, labels=with_value(LABELS, 0, 0, 13))


@pytest.mark.promise("id outside the vocabulary")
@pytest.mark.parametrize("value", [13, -1, -5, -99, -101])
@pytest.mark.parametrize("column", [0, 6])
@pytest.mark.parametrize("explicit", [True, False], ids=["decoder input given", "decoder input made"])
def test_label_outside_the_vocabulary_is_refused(model, value, column, explicit):
    inputs = {**BATCH, "labels": with_value(LABELS, 0, column, value)}
    if explicit:
        inputs["decoder_input_ids"] = TARGET
    with pytest.raises(ValueError, match=rf"`labels` must be in \[0, 13\).*got {value} at row 0, position {column}"):
        model(**inputs)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (SOURCE.float(), TypeError, r"`input_ids` must be integers \(torch.long\), got torch.float32"),
        (SOURCE.bool(), TypeError, r"`input_ids` must be integers \(torch.long\), got torch.bool"),
        (SOURCE[0], ValueError, r"`input_ids` must have shape \(batch, length\), got \(5,\)"),
        (SOURCE[None], ValueError, r"`input_ids` must have shape \(batch, length\), got \(1, 2, 5\)"),
    ],
    ids=["float", "bool", "one dimension", "three dimensions"],
)
def test_ids_of_another_dtype_or_shape_are_refused(model, ids, error, message):
    with pytest.raises(error, match=message):
        model(input_ids=ids, decoder_input_ids=TARGET)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (LABELS.float(), TypeError, r"`labels` must be integers \(torch.long\), got torch.float32"),
        (LABELS[0], ValueError, r"`labels` must have shape \(batch, length\), got \(7,\)"),
    ],
    ids=["float", "one dimension"],
)
def test_labels_of_another_dtype_or_shape_are_refused(model, labels, error, message):
    with pytest.raises(error, match=message):
        model(**{**BATCH, "labels": labels})


def test_labels_of_another_length_than_the_decoder_input_are_refused(model):
    message = r"`labels` must have shape \(2, 7\), got \(2, 6\)"
    with pytest.raises(ValueError, match=message):
        model(**INPUTS, labels=LABELS[:, :6])


def test_int32_ids_are_accepted(model):
    assert model.eval()(**{**INPUTS, "input_ids": SOURCE.int()}).logits.shape == (2, 7, 13)


@pytest.mark.promise("mask of another shape")
@pytest.mark.parametrize("shape", [(2, 4), (2, 6), (1, 5), (3, 5), (5, 2), (5,), (2, 1, 5)], ids=str)
def test_attention_mask_of_another_shape_is_refused(model, shape):
    message = f"`attention_mask` must have shape (batch, length) = (2, 5), got {shape}."
    with pytest.raises(ValueError, match=re.escape(message)):
        model(**{**INPUTS, "attention_mask": torch.ones(shape, dtype=torch.long)})


@pytest.mark.parametrize("num_beams", [1, 3])
def test_attention_mask_of_another_shape_is_refused_by_generate(model, num_beams):
    message = r"`attention_mask` must have shape \(batch, length\) = \(2, 5\), got \(2, 6\)"
    with pytest.raises(ValueError, match=message):
        model.generate(SOURCE, attention_mask=torch.ones(2, 6, dtype=torch.long), num_beams=num_beams)


@pytest.mark.promise("mask of another shape")
@pytest.mark.parametrize("shape", [(2, 5), (2, 8), (1, 7)], ids=str)
def test_decoder_attention_mask_of_another_shape_is_refused(model, shape):
    message = rf"`decoder_attention_mask` must have shape \(batch, length\) = \(2, 7\), got \({shape[0]}, {shape[1]}\)"
    with pytest.raises(ValueError, match=message):
        model(**INPUTS, decoder_attention_mask=torch.ones(shape, dtype=torch.long))


def test_decoder_attention_mask_must_cover_the_cache(model):
    model.eval()
    cache = model(**INPUTS).past_key_values
    message = r"`decoder_attention_mask` must have shape \(batch, length\) = \(2, 8\), got \(2, 1\)"
    with pytest.raises(ValueError, match=message):
        model(
            input_ids=SOURCE,
            decoder_input_ids=TARGET[:, :1],
            decoder_attention_mask=TARGET_MASK[:, :1],
            past_key_values=cache,
        )


def test_attention_mask_must_fit_given_encoder_outputs(model):
    encoder_outputs = model.get_encoder()(SOURCE)
    with pytest.raises(ValueError, match=r"`attention_mask` must have shape .* = \(2, 5\), got \(2, 4\)"):
        model(encoder_outputs=encoder_outputs, attention_mask=SOURCE_MASK[:, :4], decoder_input_ids=TARGET)


def test_four_dimensional_mask_is_accepted(model):
    model.eval()
    four = SOURCE_MASK.bool()[:, None, None].expand(2, 1, 5, 5)
    with torch.no_grad():
        expected = model.get_encoder()(SOURCE, attention_mask=SOURCE_MASK).last_hidden_state
        actual = model.get_encoder()(SOURCE, attention_mask=four).last_hidden_state
    torch.testing.assert_close(actual[SOURCE_MASK.bool()], expected[SOURCE_MASK.bool()])


def test_ids_and_embeddings_exclude_each_other(model):
    embedded = torch.zeros(2, 5, 16)
    with pytest.raises(ValueError, match="Pass either `input_ids` or `inputs_embeds`: exactly one"):
        model(**INPUTS, inputs_embeds=embedded)
    with pytest.raises(ValueError, match="Pass either `input_ids` or `inputs_embeds`: exactly one"):
        model(decoder_input_ids=TARGET)
    with pytest.raises(ValueError, match="Pass either `decoder_input_ids` or `decoder_inputs_embeds`: exactly one"):
        model(input_ids=SOURCE)
    with pytest.raises(ValueError, match="Pass either `decoder_input_ids` or `decoder_inputs_embeds`: exactly one"):
        model(**INPUTS, decoder_inputs_embeds=torch.zeros(2, 7, 16))


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_source_and_target_must_have_the_same_number_of_rows(model, rows):
    labels = LABELS[:1].expand(rows, 7)
    message = rf"the same number of rows, got 2 rows of `input_ids` and {rows} of `decoder_input_ids` or `labels`"
    with pytest.raises(ValueError, match=message):
        model(SOURCE, attention_mask=SOURCE_MASK, labels=labels)
    with pytest.raises(ValueError, match=message):
        model(SOURCE, decoder_inputs_embeds=torch.zeros(rows, 7, 16))


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_target_rows_must_share_encoder_outputs_evenly(model, rows):
    encoder_outputs = model.get_encoder()(SOURCE)
    with pytest.raises(ValueError, match=rf"`encoder_hidden_states` must have as many rows as .*\({rows}\).*; got 2"):
        model(encoder_outputs=encoder_outputs, decoder_input_ids=TARGET[:1].expand(rows, 7))


def test_decoder_needs_encoder_hidden_states(model):
    with pytest.raises(ValueError, match="`encoder_hidden_states` is missing"):
        model.get_decoder()(TARGET)


def test_cache_without_cross_attention_is_refused(model):
    with pytest.raises(TypeError, match="` must be an `EncoderDecoderCache`.*, got DynamicCache"):
        model(**INPUTS, past_key_values=DynamicCache(config=model.config))
    cache = model(**INPUTS).past_key_values
    with pytest.raises(ValueError, match="`cache` and `past_key_values` are two names of one argument"):
        model(**INPUTS, past_key_values=cache, cache=cache)


@pytest.mark.promise("too long")
def test_exceeding_learned_positions_is_refused():
    model = tiny_model(position_type="learned", max_position_embeddings=6)
    short = torch.full((2, 6), 3)
    model(short, decoder_input_ids=short)
    message = r"A sequence of 7 tokens exceeds `max_position_embeddings` \(6\)"
    with pytest.raises(ValueError, match=message):
        model(short, decoder_input_ids=TARGET)
    with pytest.raises(ValueError, match=message):
        model(TARGET, decoder_input_ids=short)
    with pytest.raises(ValueError, match=message):
        model.generate(TARGET, max_new_tokens=2)


@pytest.mark.parametrize("static", [True, False], ids=["static cache", "dynamic cache"])
def test_exceeding_learned_positions_with_a_cache_is_refused(static):
    model = tiny_model(position_type="learned", max_position_embeddings=8)
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    if static:
        config = model.config.get_text_config(decoder=True)
        cache = EncoderDecoderCache(
            StaticCache(config=config, max_cache_len=9), StaticCache(config=config, max_cache_len=5)
        )
    model(**INPUTS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"A sequence of 9 tokens exceeds `max_position_embeddings` \(8\)"):
        model(input_ids=SOURCE, decoder_input_ids=TARGET[:, :2], past_key_values=cache)


def test_first_of_several_bad_ids_is_named():
    ids = torch.tensor([[1, 2, 3], [4, -7, 99]])
    with pytest.raises(ValueError, match=r"`ids` must be in \[0, 50\); got -7 at row 1, position 1"):
        check_input_ids("ids", ids, 50)
    check_input_ids("ids", ids.clamp(0, 49), 50)
    check_input_ids("ids", ids[:0], 50)


def test_mask_is_checked_against_batch_and_length():
    check_attention_mask("mask", None, 2, 5)
    check_attention_mask("mask", torch.ones(2, 5), 2, 5)
    with pytest.raises(ValueError, match=r"`mask` must have shape \(batch, length\) = \(2, 5\), got \(2, 50\)"):
        check_attention_mask("mask", torch.ones(2, 50), 2, 5)
