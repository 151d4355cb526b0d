"""Vectors against the hidden states of single texts."""

import os
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from hf_vanilla import VanillaBertConfig, VanillaBertModel
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer
from hf_vanilla.generation.features import extract_features


sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from script_runner import run, run_here


TEXTS = ["the dog runs in the park", "a cat", "", "the cat and the dog run", "park"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece_tokenizer(TEXTS * 3, 60, show_progress=False)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = VanillaBertConfig(
        vocab_size=len(tokenizer), hidden_size=12, num_hidden_layers=3, num_attention_heads=4, intermediate_size=20,
        initializer_range=0.3,
    )  # fmt: skip
    return VanillaBertModel(config).eval()


def hidden_states(model, tokenizer, text):
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "tokens"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("budget", [8, 4096], ids=["small-batches", "one-batch"])
def test_pooling_ignores_padding(model, tokenizer, pooling, budget, side, monkeypatch):
    monkeypatch.setattr(tokenizer, "padding_side", side)
    found = extract_features(model, tokenizer, TEXTS, pooling=pooling, max_tokens_per_batch=budget)
    for text, vector in zip(TEXTS, found, strict=True):
        states = hidden_states(model, tokenizer, text)[-1][0]
        expected = {"mean": states.mean(0), "cls": states[0], "max": states.amax(0), "tokens": states}[pooling]
        torch.testing.assert_close(torch.from_numpy(vector), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "tokens"])
def test_features_keep_no_batch_alive(model, tokenizer, pooling):
    assert all(found.base is None for found in extract_features(model, tokenizer, TEXTS, pooling=pooling))


@pytest.mark.parametrize("mix", ["mean", "concatenate"])
def test_layers_are_combined(model, tokenizer, mix):
    (found,) = extract_features(model, tokenizer, TEXTS[:1], layers=(0, 2, -1), mix=mix, pooling="cls")
    states = hidden_states(model, tokenizer, TEXTS[0])
    chosen = [states[layer][0, 0] for layer in (0, 2, 3)]
    expected = torch.cat(chosen) if mix == "concatenate" else sum(chosen) / 3
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-5)


def test_no_texts_have_no_vectors(model, tokenizer):
    assert extract_features(model, tokenizer, []) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": (4,)}, r"`layers` must be in \[-4, 3\], got 4"),
        ({"layers": ()}, r"`layers` must name at least one"),
        ({"mix": "sum"}, r"`mix` must be one of mean, concatenate; got 'sum'"),
        ({"max_length": 0}, r"`max_length` must be in \[3, .* got 0"),
        ({"max_length": 2}, r"`max_length` must be in \[3, .* got 2"),
        ({"max_length": -5}, r"`max_length` must be in \[3, .* got -5"),
        ({"max_length": 100_000}, r"`max_length` must be in .* to the model's limit; got 100000"),
        ({"pooling": "last"}, r"`pooling` must be one of mean, cls, max, tokens; got 'last'"),
    ],
    ids=["layer", "no-layer", "mix", "no-length", "short", "negative", "long", "pooling"],
)
def test_bad_input_is_named(model, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        extract_features(model, tokenizer, TEXTS, **options)


def test_text_without_tokens_is_named(model):
    tokenizer = train_wordpiece_tokenizer(TEXTS * 3, 60, show_progress=False)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A")
    assert [len(each) for each in extract_features(model, tokenizer, ["park", ""], pooling="tokens")] == [1, 0]
    with pytest.raises(ValueError, match="`texts` must have tokens, but text 2 has none"):
        extract_features(model, tokenizer, ["park", ""])


def test_lone_surrogate_is_read_as_a_replacement_character(model, tokenizer):
    vectors = extract_features(model, tokenizer, ["a \ud800 b", "a \ufffd b"])
    np.testing.assert_allclose(*vectors, rtol=1e-5, atol=1e-6)  # the rounding of float32


def test_single_string_and_training_mode_are_rejected(model, tokenizer):
    with pytest.raises(TypeError, match="`texts` must be a list of strings"):
        extract_features(model, tokenizer, "text")
    with pytest.raises(TypeError, match="`texts` must contain only strings, but number 2 is int"):
        extract_features(model, tokenizer, ["text", 5])
    with pytest.raises(ValueError, match="evaluation mode"):
        extract_features(VanillaBertModel(model.config).train(), tokenizer, TEXTS)


def test_script_writes_arrays(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    options = ["extract_features.py", "--model", tmp_path / "bert", "--input", tmp_path / "texts.txt", "--output"]
    output = tmp_path / "new" / "v.npy"
    finished = run(*options, output)
    assert finished.returncode == 0, finished.stderr
    expected = np.stack(extract_features(model, tokenizer, TEXTS))
    np.testing.assert_allclose(np.load(output), expected, rtol=1e-5, atol=1e-6)
    refused = run(*options, tmp_path / "v.npy", "--pooling", "tokens")
    assert refused.returncode == 2
    assert "--output must end in .npz" in refused.stderr
    (tmp_path / "link.npy").symlink_to(tmp_path / "texts.txt")
    refused = run(*options, tmp_path / "link.npy")
    assert refused.returncode == 1
    assert "`output` must be another file than `input`" in refused.stderr


def test_interrupted_script_leaves_nothing(model, tokenizer, tmp_path, monkeypatch):
    def save_half(file, array):
        array.tofile(file)
        raise KeyboardInterrupt

    model.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    (tmp_path / "texts.txt").write_text("park\n")
    monkeypatch.setattr(np, "save", save_half)
    options = ["--model", tmp_path / "bert", "--input", tmp_path / "texts.txt", "--output", tmp_path / "v.npy"]
    assert run_here(monkeypatch, "extract_features.py", *options) == 130
    assert sorted(os.listdir(tmp_path)) == ["bert", "texts.txt"]


def test_script_refuses_vectors_of_nan(model, tokenizer, tmp_path, monkeypatch, capsys):
    broken = VanillaBertModel(model.config)
    broken.layers[0].feed_forward.fc1.weight.data[0, 0] = float("nan")
    broken.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    (tmp_path / "texts.txt").write_text("park\n")
    options = ["--model", tmp_path / "bert", "--input", tmp_path / "texts.txt", "--output", tmp_path / "v.npy"]
    assert run_here(monkeypatch, "extract_features.py", *options) == 1
    assert re.search("error: .*bert.* nan", capsys.readouterr().err)
    assert sorted(os.listdir(tmp_path)) == ["bert", "texts.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--input .*empty.txt. must have at least one line"),
        (
            {"--model": "runs/nothing"},
            "`model` .runs/nothing. is no folder, and no model of the Hub",
        ),
        ({"--output": "folder.npy"}, "folder.npy can't be written: Is a directory"),
    ],
    ids=["empty", "no-model", "folder"],
)
def test_script_names_bad_input(tmp_path, monkeypatch, capsys, options, message):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder.npy").mkdir()
    monkeypatch.chdir(tmp_path)
    script = str(Path(__file__).parents[2] / "scripts" / "extract_features.py")
    given = {"--model": tmp_path, "--input": tmp_path / "empty.txt", "--output": tmp_path / "v.npy", **options}
    if options:
        (tmp_path / "empty.txt").write_text("a text\n")
    monkeypatch.setattr(sys, "argv", [script, *(str(word) for option in given.items() for word in option)])
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(script, run_name="__main__")
    assert ending.value.code == 1
    assert re.search(f"^error: {message}", capsys.readouterr().err)
