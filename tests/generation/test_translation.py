"""Translation of lists of texts: order, lengths, unusual texts, two vocabularies, and bad options."""

from functools import partial

import numpy as np
import pytest
import torch
from text_translator import SENTENCES, save_translator, text_model, text_tokenizer
from transformers import AutoTokenizer, pipeline

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.data.tokenization import train_tokenizer
from hf_vanilla.generation import beam_search, load_translator, score_texts, translate, word_alignments
from hf_vanilla.generation.cpu_layers import PackedLinear, can_pack
from hf_vanilla.models import text_batches
from hf_vanilla.models.pipeline_vanilla_transformer import TranslationPipeline
from hf_vanilla.models.text_batches import batches_by_length, default_max_length, encode_texts


@pytest.fixture(scope="module")
def model():
    return text_model()


@pytest.fixture(scope="module")
def tokenizer():
    return text_tokenizer()


def texts_of(found):
    return [[translation.text for translation in row] for row in found]


def test_translate_equals_generate_with_beam_search(model, tokenizer):
    found = translate(model, tokenizer, [SENTENCES[1]], n_best=2, max_length_offset=3)
    inputs = tokenizer(SENTENCES[1], return_tensors="pt")
    outputs = model.generate(
        **inputs,
        custom_generate=beam_search,
        num_beams=4,
        num_return_sequences=2,
        length_penalty=0.6,
        length_penalty_type="gnmt",
        max_new_tokens=inputs["input_ids"].shape[1] + 3,
        return_dict_in_generate=True,
    )
    assert texts_of(found) == [tokenizer.batch_decode(outputs.sequences, skip_special_tokens=True)]
    assert [translation.score for translation in found[0]] == pytest.approx(
        outputs.sequences_scores.tolist(), abs=1e-4
    )
    assert all(translation.text for translation in found[0])


@pytest.mark.parametrize("max_tokens_per_batch", [1, 20, 10_000])
def test_translations_do_not_depend_on_order_and_batches(model, tokenizer, max_tokens_per_batch):
    texts = [*SENTENCES, SENTENCES[0] * 4, "x", SENTENCES[2] * 2]
    together = translate(model, tokenizer, texts, max_length_offset=2, max_tokens_per_batch=max_tokens_per_batch)
    alone = [translate(model, tokenizer, [text], max_length_offset=2)[0] for text in texts]
    assert texts_of(together) == texts_of(alone)
    for one, other in zip(together, alone, strict=True):
        assert one[0].score == pytest.approx(other[0].score, abs=1e-4)
    assert {*SENTENCES, "x"} <= {row[0].text for row in alone}


@pytest.fixture
def searches(monkeypatch):
    """The model and the number of sources of each search."""
    seen = []
    generate = VanillaTransformerForConditionalGeneration.generate

    def spy(self, **inputs):
        seen.append((self, len(inputs["input_ids"])))
        return generate(self, **inputs)

    monkeypatch.setattr(VanillaTransformerForConditionalGeneration, "generate", spy)
    return seen


def test_translate_uses_the_fast_copy(model, tokenizer, searches):
    translate(model, tokenizer, SENTENCES, max_length_offset=1)
    [(twin, _)] = searches
    assert twin is not model
    packs = can_pack(model.lm_head.weight, sum(len(ids) for ids in tokenizer(SENTENCES)["input_ids"]))
    assert isinstance(twin.lm_head, PackedLinear) == packs


@pytest.mark.parametrize(("max_tokens_per_batch", "sizes"), [(1, [1, 1, 1]), (50, [2, 1]), (2048, [3])])
def test_batches_have_a_number_of_tokens(model, tokenizer, searches, max_tokens_per_batch, sizes):
    assert sorted(len(ids) for ids in tokenizer(SENTENCES)["input_ids"]) == [9, 12, 25]
    translate(model, tokenizer, SENTENCES, max_length_offset=1, max_tokens_per_batch=max_tokens_per_batch)
    assert [size for _, size in searches] == sizes


def test_stop_strings_end_a_translation(model, tokenizer):
    options = dict(num_beams=1, max_length_offset=9)
    assert translate(model, tokenizer, SENTENCES[:1], **options)[0][0].text == "ein mann rennt ."
    [[ended]] = translate(model, tokenizer, SENTENCES[:1], stop_strings=["mann"], **options)
    assert ended.text == "ein mann"


@pytest.mark.promise("empty batch or sentence")
def test_texts_without_words_have_empty_translations(model, tokenizer):
    found = translate(model, tokenizer, ["", "x", " \t\u3000", "\n"], max_length_offset=1, n_best=2)
    assert texts_of([found[0], found[2], found[3]]) == [[""], [""], [""]]
    assert [found[0][0].score, found[2][0].score] == [0.0, 0.0]
    assert len(found[1]) == 2
    assert translate(model, tokenizer, []) == []


@pytest.mark.promise("odd text")
def test_odd_texts_are_translated(model, tokenizer):
    odd = ["\x00", "a\ud800b", "</s>", "\u202eabc", "e\u0301" * 5, "\ufeff", "a\r\nb"]
    found = translate(model, tokenizer, odd, max_length_offset=1)
    assert len(found) == 7
    assert all(isinstance(row[0].text, str) for row in found)
    replaced = translate(model, tokenizer, ["a\ufffdb"], max_length_offset=1)
    assert found[1][0].text == replaced[0][0].text


@pytest.mark.promise("special tokens in a text")
def test_special_tokens_in_texts_are_plain_text(model, tokenizer):
    reading = train_tokenizer(SENTENCES * 3, 275, show_progress=False, split_special_tokens=False)
    assert reading("</s>")["input_ids"] == [2, 2]
    [encoded], _ = encode_texts(reading, ["</s>"], 10)
    assert encoded["input_ids"] == tokenizer("</s>")["input_ids"] != [2, 2]


@pytest.mark.promise("too long")
def test_long_texts_are_truncated_and_counted(model, tokenizer, caplog):
    texts = [SENTENCES[0] * 20, "x", "y " * 50_000]
    options = {"max_length_offset": 0, "max_source_length": 9}
    with caplog.at_level("WARNING", logger="hf_vanilla"):
        found = translate(model, tokenizer, texts, **options)
    assert "2 of 3 texts were truncated to 9 tokens; the left part is kept." in caplog.text
    cut = tokenizer.decode(tokenizer(texts[2])["input_ids"][:8])
    assert len(tokenizer(cut)["input_ids"]) == 9
    assert found[2][0].text == translate(model, tokenizer, [cut], **options)[0][0].text


def test_default_max_length_is_the_smaller_limit(tokenizer):
    limited = text_tokenizer()
    limited.model_max_length = 40
    sinusoidal, learned = text_model(0), text_model(0, position_type="learned", max_position_embeddings=50)
    assert default_max_length(sinusoidal, tokenizer) == 1024
    assert default_max_length(sinusoidal, limited) == 40
    assert default_max_length(learned, limited) == 40
    assert default_max_length(learned, tokenizer) == 50


def test_learned_positions_limit_input_and_output(tokenizer):
    learned = text_model(0, position_type="learned", max_position_embeddings=9)
    assert len(tokenizer(SENTENCES[1])["input_ids"]) > 9
    steps = []
    hook = learned.lm_head.register_forward_hook(lambda *_: steps.append(1))
    found = translate(learned, tokenizer, [SENTENCES[1], "x"], eos_token_id=None, suppress_tokens=[0, 1, 2, 3])
    hook.remove()
    assert len(steps) == 9
    assert all(row[0].text for row in found)


def test_alignments_are_those_of_the_texts(model, tokenizer):
    found = translate(model, tokenizer, [*SENTENCES, ""], n_best=2, max_length_offset=1, with_alignments=True)
    translations = [translation for row in found for translation in row]
    sources = [SENTENCES[0]] * 2 + [SENTENCES[1]] * 2 + [SENTENCES[2]] * 2 + [""]
    expected = word_alignments(model, tokenizer, sources, [translation.text for translation in translations])
    assert [str(translation.alignment) for translation in translations] == [str(alignment) for alignment in expected]
    assert any(alignment.pairs for alignment in expected)
    assert translate(model, tokenizer, ["x"], max_length_offset=1)[0][0].alignment is None


def test_text_scores_equal_token_scores(model, tokenizer):
    targets = ["a man", "", "x"]
    scores = score_texts(model, tokenizer, SENTENCES, targets, length_penalty=0.6, max_tokens_per_batch=30)
    for source, target, scored in zip(SENTENCES, targets, scores, strict=True):
        inputs, labels = tokenizer(source, return_tensors="pt"), tokenizer(target)["input_ids"]
        with torch.no_grad():
            loss = model(**inputs, labels=torch.tensor([labels])).loss.item()
        assert scored.tokens == len(labels)
        assert scored.score == pytest.approx(-loss * len(labels) / ((5 + len(labels)) / 6) ** 0.6, abs=1e-4)


def test_saved_translator_is_loaded(tmp_path):
    folder = save_translator(tmp_path / "joint")
    model, tokenizer, target_tokenizer = load_translator(folder)
    assert target_tokenizer is tokenizer
    assert texts_of(translate(model, tokenizer, SENTENCES)) == [[text] for text in SENTENCES]
    half, _, _ = load_translator(folder, dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    assert texts_of(translate(half, tokenizer, SENTENCES)) == [[text] for text in SENTENCES]


def test_two_vocabularies_have_two_tokenizers(tmp_path):
    other = train_tokenizer(["kurz und gut", "lang und gut"], 265, show_progress=False)
    config = {"source_vocab_size": 275, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    folder = save_translator(tmp_path / "two", steps=0, **config, vocab_size=265)
    other.save_pretrained(f"{folder}/target_tokenizer")
    model, tokenizer, target_tokenizer = load_translator(folder)
    assert (len(tokenizer), len(target_tokenizer)) == (275, 265)
    options = {"target_tokenizer": target_tokenizer, "max_length_offset": 5}
    [[translation]] = translate(model, tokenizer, ["ein mann"], **options)
    inputs = tokenizer("ein mann", return_tensors="pt")
    length = inputs["input_ids"].shape[1] + 5
    search = {"custom_generate": beam_search, "length_penalty_type": "gnmt", "length_penalty": 0.6, "num_beams": 4}
    sequences = model.generate(**inputs, **search, max_new_tokens=length)
    assert translation.text == other.decode(sequences[0], skip_special_tokens=True)


def test_tokenizer_of_another_model_is_refused(tmp_path):
    folder = save_translator(tmp_path / "model", steps=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.bos_token
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="`eos_token_id` of the model .* and of the tokenizer .*, '<s>'. must be"):
        load_translator(folder)


def test_batches_have_similar_lengths():
    lengths = [3, 9, 1, 4, 9, 2]
    assert batches_by_length(lengths, 18) == [[1, 4], [3, 0, 5, 2]]
    assert batches_by_length(lengths, 1) == [[1], [4], [3], [0], [5], [2]]
    assert batches_by_length([], 5) == []
    assert batches_by_length([0, 0], 1) == [[0], [1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_best": 5}, r"`n_best` must be in \[1, `num_beams` = 4\], got 5"),
        ({"n_best": 0}, r"`n_best` must be in \[1, `num_beams` = 4\], got 0"),
        ({"max_length_offset": -1}, "`max_length_offset` must be at least 0, got -1"),
        ({"max_tokens_per_batch": 0}, "`max_tokens_per_batch` must be at least 1, got 0"),
        ({"length_penalty": float("nan")}, r"`length_penalty` must be in \[-10, 10\], got nan"),
        ({"length_penalty": 1000}, r"`length_penalty` must be in \[-10, 10\], got 1000"),
        ({"prefix_allowed_tokens_fn": len}, "`prefix_allowed_tokens_fn` is not an option .*that of another text"),
        ({"decoder_start_token_id": [1, 1, 1]}, r"`decoder_start_token_id` must be one id.* got \[1, 1, 1\]"),
        ({"pad_token_id": 3}, "`pad_token_id` is not an option of translations; leave it out"),
        ({"max_source_length": 0}, "`max_source_length` must be at least 1, got 0"),
        ({"max_new_tokens": 9}, "`max_new_tokens` is not an option of translations; give `max_length_offset`"),
        ({"generation_config": None}, "`generation_config` is not an option of translations; give its options"),
        ({"custom_generate": None}, "`custom_generate` is not an option of translations; leave it out"),
        ({"kwargs": 1}, "`kwargs` is not an option of translations; these are num_beams"),
        ({"length_penalty_type": "wu"}, '`length_penalty_type` must be "gnmt" or "power", got \'wu\''),
    ],
)
def test_bad_options_of_translate_are_named(model, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        translate(model, tokenizer, SENTENCES, **options)


def test_translate_rejects_a_single_string(model, tokenizer):
    with pytest.raises(TypeError, match="`texts` must be a list of strings"):
        translate(model, tokenizer, "ein mann")


def test_translate_rejects_other_types(model, tokenizer):
    for texts, kind in ((None, "NoneType"), (7, "int"), ({"a": "b"}, "dict")):
        with pytest.raises(TypeError, match=f"`texts` must be a string or a list of strings, got {kind}"):
            translate(model, tokenizer, texts)
    with pytest.raises(TypeError, match="`texts` must contain only strings, but number 2 is NoneType"):
        translate(model, tokenizer, ["x", None])
    for options in ({"num_beams": "4"}, {"n_best": 1.0}, {"max_tokens_per_batch": None}, {"length_penalty": "a"}):
        with pytest.raises(TypeError, match=f"`{next(iter(options))}` must be an? (integer|number), got"):
            translate(model, tokenizer, SENTENCES, **options)


def test_unequal_numbers_of_targets_are_rejected(model, tokenizer):
    with pytest.raises(ValueError, match=r"`targets` must be as many as `sources` \(3\), got 1"):
        score_texts(model, tokenizer, SENTENCES, ["x"])


def test_translate_rejects_training_mode(tokenizer):
    with pytest.raises(ValueError, match="`model` must be in evaluation mode"):
        translate(text_model(0).train(), tokenizer, SENTENCES)


@pytest.mark.parametrize("source_size", [290, 300])
def test_two_vocabularies_need_two_tokenizers(tmp_path, source_size):
    config = VanillaTransformerConfig(
        vocab_size=300, source_vocab_size=source_size, d_model=16, d_ff=24, num_heads=4, encoder_layers=1,
        decoder_layers=1, share_encoder_decoder_embeddings=False,
    )  # fmt: skip
    VanillaTransformerForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer = train_tokenizer(["a b c"], 265, show_progress=False)
    tokenizer.save_pretrained(tmp_path)
    sizes = f"two vocabularies, of {source_size} and 300 entries, .*subfolder target_tokenizer"
    with pytest.raises(ValueError, match=sizes):
        load_translator(str(tmp_path))
    for task in ("translation", "vanilla-translation"):
        with pytest.raises(ValueError, match=sizes):
            pipeline(task, model=str(tmp_path), trust_remote_code=True, device=-1)
    tokenizer.save_pretrained(tmp_path / "target_tokenizer")
    own = TranslationPipeline(model=load_translator(str(tmp_path))[0], tokenizer=text_tokenizer(), device=-1)
    assert len(own.target_tokenizer) == len(tokenizer)  # in the folder of the model


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_model_that_gives_nan_finds_nothing_and_says_so(tokenizer, num_beams):
    broken = text_model(0)
    with torch.no_grad():
        broken.model.decoder.layers[1].feed_forward.fc1.bias[3] = float("nan")
    own = TranslationPipeline(model=broken, tokenizer=tokenizer, device=-1)
    for search in (partial(translate, broken, tokenizer), own):
        with pytest.raises(ValueError, match="log probabilities are nan"):
            search(SENTENCES, num_beams=num_beams)
    for compare in (score_texts, word_alignments):
        with pytest.raises(ValueError, match="log probabilities are nan"):
            compare(broken, tokenizer, SENTENCES, SENTENCES)


def test_limit_of_the_source_does_not_cut_the_target(model, tokenizer):
    options = {"max_source_length": 5, "min_new_tokens": 15}
    [[found]] = translate(model, tokenizer, SENTENCES[:1], with_alignments=True, **options)
    assert len(tokenizer(found.text)["input_ids"]) > 9
    [wanted] = word_alignments(model, tokenizer, SENTENCES[:1], [found.text], max_length=5, max_target_length=99)
    torch.testing.assert_close(found.alignment.matrix, wanted.matrix)
    assert (found.alignment.matrix.sum(1) > 0).all()


def test_length_of_texts_is_checked(model, tokenizer):
    for length, error in ((0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="`max_length` must be"):
            score_texts(model, tokenizer, SENTENCES, SENTENCES, max_length=length)
        for name in ("max_length", "max_target_length"):
            with pytest.raises(error, match=f"`{name}` must be"):
                word_alignments(model, tokenizer, SENTENCES, SENTENCES, **{name: length})
    limits = {"max_length": np.int64(5), "max_target_length": np.int64(4)}
    assert word_alignments(model, tokenizer, SENTENCES, SENTENCES, **limits)


def test_many_texts_are_tokenized_in_parts(tokenizer, monkeypatch):
    texts = [*SENTENCES, "x", ""]
    wanted = encode_texts(tokenizer, texts, 9, with_offsets=True)
    monkeypatch.setattr(text_batches, "TEXTS_AT_ONCE", 2)
    assert encode_texts(tokenizer, texts, 9, with_offsets=True) == wanted
