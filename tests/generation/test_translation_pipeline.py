"""The translation pipelines against `translate`, and the one that comes with a checkpoint without the package."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from text_translator import SENTENCES, save_translator
from transformers import pipeline

from hf_vanilla.data.tokenization import train_tokenizer
from hf_vanilla.generation import labels_of_beams, load_translator, score, translate, translation_pipeline
from hf_vanilla.generation.translation_pipeline import TranslationPipeline
from hf_vanilla.models import pipeline_vanilla_transformer
from hf_vanilla.models.text_batches import load_target_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_translator(tmp_path_factory.mktemp("translator"))


@pytest.fixture(scope="module")
def translator(folder):
    return pipeline("vanilla-translation", model=folder, device=-1)


def expected(folder, texts, **options):
    model, tokenizer, target_tokenizer = load_translator(folder)
    return translate(model, tokenizer, texts, target_tokenizer=target_tokenizer, **options)


def test_pipeline_translates_one_text_and_several(folder, translator):
    assert type(translator) is TranslationPipeline
    [single] = translator(SENTENCES[0])
    [[wanted]] = expected(folder, SENTENCES[:1])
    assert single == {"translation_text": wanted.text, "score": pytest.approx(wanted.score)}
    assert single["translation_text"] == SENTENCES[0]
    rows = [
        [{"translation_text": row[0].text, "score": pytest.approx(row[0].score, abs=1e-5)}]
        for row in expected(folder, SENTENCES)
    ]
    assert translator(SENTENCES) == [row[0] for row in rows]  # flat, as transformers 4 gave it
    for iterable in (tuple(SENTENCES), iter(SENTENCES), Dataset.from_dict({"text": SENTENCES})["text"]):
        assert translator(iterable) == rows
    assert translator(SENTENCES[:1]) == rows[0]
    assert translator([]) == []


def test_fastest_type_leaves_the_callers_model(folder, monkeypatch):
    monkeypatch.setattr(translation_pipeline, "resolve_dtype", lambda *args: torch.bfloat16)
    model, tokenizer, _ = load_translator(folder, dtype="float32")
    found = TranslationPipeline(model=model, tokenizer=tokenizer, device=-1, dtype="fastest")
    assert (found.model.dtype, model.dtype) == (torch.bfloat16, torch.float32)


def test_n_best_stays_nested_where_only_one_translation_exists(own, translator):
    empty = {"translation_text": "", "score": 0.0}
    for each in (own, translator):
        assert each(["", " "], n_best=2) == [[empty], [empty]]
        assert each(["", " "]) == [empty, empty]


def test_options_of_call_and_constructor(folder, translator):
    options = {"num_beams": 3, "n_best": 3, "length_penalty": 1.0, "length_penalty_type": "power"}
    wanted = [
        [(each.text, pytest.approx(each.score)) for each in row] for row in expected(folder, SENTENCES, **options)
    ]
    made_with = pipeline("vanilla-translation", model=folder, device=-1, **options)
    for found in (translator(SENTENCES, **options), made_with(SENTENCES)):
        assert [[(each["translation_text"], each["score"]) for each in row] for row in found] == wanted
    assert len(translator(SENTENCES[0])) == 1  # the options of one call are not kept


def test_pipeline_returns_alignments(folder, translator):
    [found] = translator([SENTENCES[0]], return_alignments=True)
    [[wanted]] = expected(folder, [SENTENCES[0]], with_alignments=True)
    assert found["alignment"] == wanted.alignment.pairs
    assert found["alignment"]


def test_long_text_is_translated_by_sentences_and_keeps_its_lines(folder, translator):
    text = "Ein mann rennt. Eine katze rennt.\n\nEin mann."
    parts = ["Ein mann rennt.", "Eine katze rennt.", "Ein mann."]
    one, two, three = (row[0].text for row in expected(folder, parts))
    [found] = translator(text, split_into_sentences=True)
    assert found["translation_text"] == f"{one} {two}\n\n{three}"
    with pytest.raises(ValueError, match="leave out `n_best`"):
        translator(text, split_into_sentences=True, n_best=2)


def test_pipeline_is_made_by_its_class(folder, translator):
    model, tokenizer, _ = load_translator(folder)
    by_class = TranslationPipeline(model=model, tokenizer=tokenizer)
    assert by_class(SENTENCES[1]) == translator(SENTENCES[1])


@pytest.fixture(scope="module")
def own(folder):
    """The pipeline that comes with a checkpoint, with the search of transformers."""
    model, tokenizer, _ = load_translator(folder)
    return pipeline_vanilla_transformer.TranslationPipeline(model=model, tokenizer=tokenizer, device=-1)


@pytest.mark.parametrize(
    "options",
    [
        {"length_penalty_type": "power", "length_penalty": 0.8, "n_best": 3},
        {"num_beams": 1},
        {"n_best": 4, "length_penalty": 0.0},
        {"return_alignments": True},
        {"num_beams": 1, "max_length_offset": 0, "max_source_length": 4},
    ],
    ids=["power", "greedy", "no penalty", "alignments", "cut"],
)
def test_checkpoint_pipeline_equals_that_of_the_package(own, translator, options):
    texts = [*SENTENCES, " "]
    wanted = [
        [{**each, "score": pytest.approx(each["score"], abs=1e-5)} for each in row]
        for row in translator(iter(texts), **options)
    ]
    assert own(iter(texts), **options) == wanted
    assert own(iter(texts), **options, max_tokens_per_batch=1) == wanted
    assert own(SENTENCES[1], **options) == wanted[1]


@pytest.mark.parametrize(("max_tokens_per_batch", "sizes"), [(1, [1, 1, 1]), (50, [2, 1]), (2048, [3])])
def test_checkpoint_pipeline_makes_batches_of_a_number_of_tokens(own, monkeypatch, max_tokens_per_batch, sizes):
    generate = Mock(wraps=own.model.generate)
    monkeypatch.setattr(own.model, "generate", generate)
    own(SENTENCES, max_tokens_per_batch=max_tokens_per_batch)
    assert [len(call.kwargs["input_ids"]) for call in generate.call_args_list] == sizes


def test_checkpoint_pipeline_bounds_the_memory_of_scores(own, monkeypatch):
    wanted = own(SENTENCES)
    generate = Mock(wraps=own.model.generate)
    monkeypatch.setattr(own.model, "generate", generate)
    monkeypatch.setattr(pipeline_vanilla_transformer, "MAX_SCORES_MEMORY", 2 * 4 * 4 * 275 * 80)
    found = own(SENTENCES)
    assert [each["translation_text"] for each in found] == [each["translation_text"] for each in wanted]
    assert [len(call.kwargs["input_ids"]) for call in generate.call_args_list] == [2, 1]


def test_checkpoint_pipeline_saves_without_pushing(own, tmp_path):
    with pytest.raises(ValueError, match=r"`push_to_hub` must not be given here; `pipeline.push_to_hub\(repo_id\)`"):
        own.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="me/translator")
    assert not (tmp_path / "saved").exists()


@torch.no_grad()
def test_checkpoint_pipeline_ranks_by_the_gnmt_penalty(own, folder):
    model, tokenizer = own.model, own.tokenizer
    found = own(SENTENCES, n_best=3, num_beams=6, length_penalty=2.0)
    reordered = 0
    for text, row in zip(SENTENCES, found, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        outputs = model.generate(
            **inputs, num_beams=6, num_return_sequences=6, length_penalty=2.0, return_dict_in_generate=True,
            output_scores=True, max_new_tokens=inputs["input_ids"].shape[1] + 50,
        )  # fmt: skip
        sources = {name: tensor.expand(6, -1) for name, tensor in inputs.items()}
        scores = score(model, **sources, labels=labels_of_beams(outputs), length_penalty=2.0).scores
        texts = tokenizer.batch_decode(outputs.sequences, skip_special_tokens=True)
        order = scores.argsort(descending=True).tolist()
        reordered += order != sorted(order)
        assert [(each["translation_text"], each["score"]) for each in row] == [
            (texts[place], pytest.approx(scores[place].item(), abs=1e-4)) for place in order[:3]
        ]
    assert reordered


@pytest.mark.parametrize("task", ["translation", ""], ids=["named", "found"])
def test_checkpoint_pipeline_works_without_the_package(task, own, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    calls = [([SENTENCES], {"n_best": 2, "return_alignments": True}), ([SENTENCES[0]], {"num_beams": 1})]
    (tmp_path / "calls.json").write_text(json.dumps(calls))
    program = Path(__file__).parents[1] / "pipeline_without_package.py"
    command = [sys.executable, program, task, *(tmp_path / name for name in ("model", "saved", "calls.json", "found"))]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    found = json.loads((tmp_path / "found").read_text("utf-8"))
    assert found["class"] == "pipeline_vanilla_transformer.TranslationPipeline"
    assert found["first"] == json.loads(json.dumps([own(*arguments, **options) for arguments, options in calls]))
    assert found["again"] == found["first"]


def test_two_tokenizers_are_saved_and_used(tmp_path):
    other = train_tokenizer(["kurz und gut", "lang und gut"], 265, show_progress=False)
    config = {"source_vocab_size": 275, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    folder = save_translator(tmp_path / "two", steps=0, **config, vocab_size=265)
    other.save_pretrained(f"{folder}/target_tokenizer")
    made = pipeline("vanilla-translation", model=folder, device=-1)
    made.save_pretrained(tmp_path / "again")
    model, tokenizer, _ = load_translator(str(tmp_path / "again"))
    own = pipeline_vanilla_transformer.TranslationPipeline(model=model, tokenizer=tokenizer, device=-1)
    inputs = tokenizer("ein mann", return_tensors="pt")
    ids = model.generate(**inputs, num_beams=1, max_new_tokens=inputs["input_ids"].shape[1] + 2)
    for each in (own, made):
        [found] = each("ein mann", num_beams=1, max_length_offset=2)
        assert found["translation_text"] == other.decode(ids[0], skip_special_tokens=True)


def test_code_of_a_checkpoint_runs_only_if_trusted_and_requested(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    canary = tmp_path / "canary"
    for path in (tmp_path / "model").glob("*.py"):
        path.write_text(f"open({str(canary)!r}, 'w')\n")
    model = str(tmp_path / "model")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        pipeline("translation", model=model, device=-1)
    # With the package's names and classes nothing of it runs, trusted or not.
    for task, options in (("vanilla-translation", {}), ("translation", {"pipeline_class": TranslationPipeline})):
        made = pipeline(task, model=model, device=-1, trust_remote_code=True, **options)
        assert type(made) is TranslationPipeline
    assert not canary.exists()


def test_unknown_options_are_named_with_the_known_ones(own, translator):
    for each in (own, translator):
        with pytest.raises(ValueError, match="`n_bets` is not an option of translations; these are num_beams, "):
            each(SENTENCES[0], n_bets=2)
        with pytest.raises(ValueError, match="`n_best` must be in"):
            each(SENTENCES[0], n_best=5)


def test_target_tokenizer_is_looked_up_once(folder, monkeypatch):
    model, tokenizer, _ = load_translator(folder)
    places = []
    monkeypatch.setattr(pipeline_vanilla_transformer, "load_target_tokenizer", places.append)
    pipeline_vanilla_transformer.TranslationPipeline(model=model, tokenizer=tokenizer, device=-1)
    assert places == [folder]


def test_missing_folder_has_no_target_tokenizer(tmp_path):
    assert load_target_tokenizer(tmp_path / "gone") is None


SET_BY_TRANSLATING = {
    "max_new_tokens": "give `max_length_offset`",
    "max_length": "give `max_length_offset`",
    "num_return_sequences": "give `n_best`",
    "batch_size": "give `max_tokens_per_batch`",
    "do_sample": "leave it out",
    "output_scores": "leave it out",
    "output_logits": "leave it out",
    "return_dict_in_generate": "leave it out",
}


@pytest.mark.parametrize("name", SET_BY_TRANSLATING)
def test_fixed_options_are_rejected_with_advice(own, translator, name):
    message = f"`{name}` is not an option of translations; {SET_BY_TRANSLATING[name]}"
    for each in (own, translator):
        with pytest.raises(ValueError, match=message):
            each(SENTENCES[0], **{name: 3})
        with pytest.raises(ValueError, match=message):
            type(each)(model=each.model, tokenizer=each.tokenizer, **{name: 3})


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (None, "`texts` must be a string or a list of strings, got NoneType"),
        (7, "`texts` must be a string or a list of strings, got int"),
        ({"a": "b"}, "`texts` must be a string or a list of strings, got dict"),
        (["x", None], "`texts` must contain only strings, but number 2 is NoneType"),
    ],
    ids=["none", "number", "dict", "none inside"],
)
def test_pipeline_names_bad_texts(own, translator, texts, message):
    for each in (own, translator):
        with pytest.raises(TypeError, match=message):
            each(texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_penalty": float("nan")}, r"`length_penalty` must be in \[-10, 10\], got nan"),
        ({"length_penalty": float("-inf")}, r"`length_penalty` must be in \[-10, 10\], got -inf"),
        ({"pad_token_id": 3}, "`pad_token_id` is not an option of translations; leave it out"),
        ({"max_source_length": 0}, "`max_source_length` must be at least 1, got 0"),
    ],
    ids=["nan", "inf", "padding", "length"],
)
def test_pipeline_names_options_out_of_range(own, translator, options, message):
    for each in (own, translator):
        with pytest.raises(ValueError, match=message):
            each(SENTENCES[0], **options)
