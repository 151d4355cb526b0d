"""Word alignments: beams against forced decoding, and subwords combined into words."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_translator import reversal_batch, sources, trained_model

from hf_vanilla.data.tokenization import train_tokenizer
from hf_vanilla.generation import (
    WordAlignment,
    beam_attention,
    beam_search,
    forced_attention,
    labels_of_beams,
    score_texts,
    word_alignments,
)
from hf_vanilla.models.alignment import combine_subwords, word_numbers


SENTENCES = ["ein mann rennt .", "größe, 世界 und 12 hüte", "eine 😀 katze"]


@pytest.fixture(scope="module")
def model():
    return trained_model()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(SENTENCES * 3, 275, show_progress=False)


@pytest.fixture(scope="module")
def text_model():
    return trained_model(steps=1, vocab_size=275)


def searched(model, inputs, **options):
    options = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 9, **options}
    model.set_attn_implementation("eager")
    outputs = model.generate(**inputs, output_attentions=True, return_dict_in_generate=True, **options)
    model.set_attn_implementation("sdpa")
    return outputs


CHOICES = {
    "penultimate layer": {},
    "first layer": {"layer": 0},
    "last layer": {"layer": -1},
    "some heads": {"heads": [3, 1]},
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("search", [{}, {"custom_generate": beam_search}], ids=["transformers", "ours"])
def test_beams_and_forced_decoding_agree(model, search, choice):
    inputs = sources(batch=5)
    outputs = searched(model, inputs, **search)
    followed = beam_attention(outputs, **choice)
    labels = labels_of_beams(outputs)
    repeated = [tensor.repeat_interleave(3, 0) for tensor in inputs.values()]
    forced = forced_attention(model, *repeated, labels, **choice)
    assert followed.shape == (15, labels.shape[1], 7)
    torch.testing.assert_close(followed, forced)
    expected = (labels != -100).float()
    torch.testing.assert_close(forced.sum(2), expected)  # the attention of a token sums to 1, that of padding is 0
    assert (forced[repeated[1][:, None].expand_as(forced) == 0] == 0).all()  # none of it is on padding
    assert (labels == -100).any()


def test_attention_depends_on_layer_and_heads(model):
    batch = reversal_batch(2).values()
    every = [forced_attention(model, *batch, **choice) for choice in CHOICES.values()]
    for one in range(4):
        for other in range(one):
            assert (every[one] - every[other]).abs().max() > 1e-4
    torch.testing.assert_close(forced_attention(model, *batch, layer=-2), every[0])
    torch.testing.assert_close(forced_attention(model, *batch, layer=1, heads=[0, 1, 2, 3]), every[0])


def test_only_layer_is_the_penultimate_one():
    model = trained_model(steps=1, decoder_layers=1)
    batch = reversal_batch(2).values()
    torch.testing.assert_close(forced_attention(model, *batch), forced_attention(model, *batch, layer=0))


def test_attention_kernel_is_restored(model):
    assert model.config._attn_implementation == "sdpa"
    forced_attention(model, *reversal_batch(2).values())
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="must be in"):
        forced_attention(model, torch.full((2, 7), 99), *list(reversal_batch(2).values())[1:])
    assert model.config._attn_implementation == "sdpa"


def test_threads_can_share_a_model(model):
    batches = [reversal_batch(2).values() for _ in range(30)]
    expected = [forced_attention(model, *batch) for batch in batches]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda batch: forced_attention(model, *batch), batches))
    finally:
        sys.setswitchinterval(interval)
    assert model.config._attn_implementation == "sdpa"
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other)


def test_subwords_are_combined_into_words():
    attention = torch.tensor(
        [
            [0.4, 0.3, 0.2, 0.1],  # first subword of target word 0
            [0.0, 0.5, 0.5, 0.0],  # second subword of target word 0
            [0.1, 0.1, 0.1, 0.7],  # target word 1
            [0.9, 0.0, 0.0, 0.1],  # </s>
        ]
    )
    matrix = combine_subwords(attention, [0, 0, 1, -1], [0, 1, 1, -1], (2, 3))
    torch.testing.assert_close(matrix, torch.tensor([[0.2, 0.75, 0.0], [0.1, 0.2, 0.0]]))
    assert WordAlignment.from_matrix(matrix).pairs == [(1, 0), (1, 1)]
    assert WordAlignment.from_matrix(matrix, 0.2).pairs == [(0, 0), (1, 0), (1, 1)]
    assert WordAlignment.from_matrix(matrix, 0.0).pairs == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]  # word 2 gets none
    assert str(WordAlignment([(0, 1), (2, 0)], matrix)) == "0-1 2-0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ein mann", [0, 1]),
        ("  ein\tmann ", [0, 1]),
        ("größe, 世界", [0, 1]),
        ("12 hüte .", [0, 1, 2]),
        ("</s> ein", [0, 1]),
        ("", []),
        ("   ", []),
    ],
)
def test_tokens_belong_to_words(tokenizer, text, expected):
    encoded = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    numbers = word_numbers(text, encoded)
    assert len(numbers) == len(encoded["input_ids"])
    assert numbers[-1] == -1  # </s>
    assert list(dict.fromkeys(number for number in numbers if number >= 0)) == expected
    for word in expected:
        ids = [token for token, number in zip(encoded["input_ids"], numbers, strict=True) if number == word]
        assert tokenizer.decode(ids).strip() == text.split()[word]


def test_words_of_texts_are_aligned(text_model, tokenizer):
    translations = ["a man", "", "size , world and twelve hats"]
    found = word_alignments(text_model, tokenizer, SENTENCES, translations)
    assert [alignment.matrix.shape for alignment in found] == [(2, 4), (0, 5), (6, 3)]
    for alignment in found:
        assert (alignment.matrix.sum(1) <= 1 + 1e-5).all()
        assert [pair[1] for pair in sorted(alignment.pairs, key=lambda pair: pair[1])] == list(
            range(len(alignment.matrix))
        )
        for source, target in alignment.pairs:
            assert alignment.matrix[target, source] == alignment.matrix[target].max()
    assert found[1].pairs == []
    linked = word_alignments(text_model, tokenizer, SENTENCES, translations, threshold=0.1)
    assert linked[0].pairs == [
        (source, target) for source in range(4) for target in range(2) if linked[0].matrix[target, source] >= 0.1
    ]


def test_alignments_do_not_depend_on_the_batch(text_model, tokenizer):
    translations = ["a man runs", "size", "a cat"]
    together = word_alignments(text_model, tokenizer, SENTENCES, translations)
    alone = word_alignments(text_model, tokenizer, SENTENCES, translations, max_tokens_per_batch=1)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one.matrix, other.matrix)


def test_words_after_the_limit_are_not_aligned(text_model, tokenizer):
    [alignment] = word_alignments(text_model, tokenizer, ["ein mann rennt"], ["ein mann rennt"], max_length=2)
    assert alignment.matrix.shape == (3, 3)
    assert {number for pair in alignment.pairs for number in pair} == {0}


def test_target_tokenizer_changes_the_alignment(text_model, tokenizer):
    other = train_tokenizer(["kurz und gut", "lang und schlecht"], 270, show_progress=False)
    pair = ["ein mann"], ["kurz und gut"]
    [same] = word_alignments(text_model, tokenizer, *pair)
    [different] = word_alignments(text_model, tokenizer, *pair, target_tokenizer=other)
    assert same.matrix.shape == different.matrix.shape == (3, 2)
    assert not torch.allclose(same.matrix, different.matrix)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layer": 3}, r"`layer` must be in \[-3, 3\), as the decoder has 3 layers; got 3"),
        ({"heads": [4]}, r"`heads` must be a non-empty list of numbers in \[0, 4\), got \[4\]"),
        ({"heads": []}, r"`heads` must be a non-empty list of numbers in \[0, 4\), got \[\]"),
    ],
    ids=["layer", "head", "no head"],
)
def test_layers_and_heads_that_do_not_exist_are_named(model, choice, message):
    with pytest.raises(ValueError, match=message):
        forced_attention(model, *reversal_batch(2).values(), **choice)


def test_outputs_without_attention_are_rejected(model):
    outputs = model.generate(**sources(), num_beams=2, max_new_tokens=3, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="`outputs` must have `cross_attentions` and `beam_indices`"):
        beam_attention(outputs)


def test_unequal_numbers_of_translations_are_rejected(text_model, tokenizer):
    with pytest.raises(ValueError, match=r"`translations` must be as many as `sources` \(3\), got 1"):
        word_alignments(text_model, tokenizer, SENTENCES, ["a man"])


@pytest.mark.parametrize("function", [word_alignments, score_texts])
def test_what_is_no_list_of_texts_is_named(text_model, tokenizer, function):
    with pytest.raises(TypeError, match="`sources` must be a list of strings, got a single string"):
        function(text_model, tokenizer, "a man", "a dog")
    with pytest.raises(TypeError, match="`t.*s` must contain only strings, but number 1 is NoneType"):
        function(text_model, tokenizer, ["a man"], [None])


def test_alignment_rejects_training_mode(model):
    model.train()
    try:
        with pytest.raises(ValueError, match="`model` must be in evaluation mode"):
            forced_attention(model, *reversal_batch(2).values())
    finally:
        model.eval()
