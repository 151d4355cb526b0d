"""The pipeline gives what `translate` gives, called as a pipeline is."""

import pytest
from text_translator import SENTENCES, save_translator
from transformers import pipeline

from hf_vanilla.generation import load_translator, translate
from hf_vanilla.pipelines import TranslationPipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_translator(tmp_path_factory.mktemp("translator"))


@pytest.fixture(scope="module")
def translator(folder):
    return pipeline("vanilla-translation", model=folder, device=-1)


def expected(folder, texts, **options):
    model, tokenizer, target_tokenizer = load_translator(folder)
    return translate(model, tokenizer, texts, target_tokenizer=target_tokenizer, **options)


def test_one_text_and_several(folder, translator):
    assert type(translator) is TranslationPipeline
    [single] = translator(SENTENCES[0])
    [[wanted]] = expected(folder, SENTENCES[:1])
    assert single == {"translation_text": wanted.text, "score": pytest.approx(wanted.score)}
    assert single["translation_text"] == SENTENCES[0]
    assert [row[0]["translation_text"] for row in translator(SENTENCES)] == [
        row[0].text for row in expected(folder, SENTENCES)
    ]
    assert translator([]) == []


def test_options_of_the_call_and_of_the_pipeline(folder, translator):
    options = {"num_beams": 3, "n_best": 3, "length_penalty": 1.0, "length_penalty_type": "power"}
    wanted = [
        [(each.text, pytest.approx(each.score)) for each in row] for row in expected(folder, SENTENCES, **options)
    ]
    made_with = pipeline("vanilla-translation", model=folder, device=-1, **options)
    for found in (translator(SENTENCES, **options), made_with(SENTENCES)):
        assert [[(each["translation_text"], each["score"]) for each in row] for row in found] == wanted
    assert len(translator(SENTENCES[0])) == 1  # the options of one call are not kept


def test_alignments(folder, translator):
    [[found]] = translator([SENTENCES[0]], return_alignments=True)
    [[wanted]] = expected(folder, [SENTENCES[0]], with_alignments=True)
    assert found["alignment"] == wanted.alignment.pairs
    assert found["alignment"]


def test_a_long_text_is_translated_by_sentences_and_keeps_its_lines(folder, translator):
    text = "Ein mann rennt. Eine katze rennt.\n\nEin mann."
    parts = ["Ein mann rennt.", "Eine katze rennt.", "Ein mann."]
    one, two, three = (row[0].text for row in expected(folder, parts))
    [found] = translator(text, split_into_sentences=True)
    assert found["translation_text"] == f"{one} {two}\n\n{three}"
    with pytest.raises(ValueError, match="leave out `n_best`"):
        translator(text, split_into_sentences=True, n_best=2)


def test_by_class(folder, translator):
    model, tokenizer, _ = load_translator(folder)
    by_class = TranslationPipeline(model=model, tokenizer=tokenizer)
    assert by_class(SENTENCES[1]) == translator(SENTENCES[1])


def test_bad_options_are_named(translator):
    with pytest.raises(ValueError, match="`n_best` must be in"):
        translator(SENTENCES[0], n_best=9)
