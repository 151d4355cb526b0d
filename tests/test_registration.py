"""Importing the package registers our models with the Auto classes, and changes no others."""

import importlib
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertModel,
    MarianConfig,
    MarianMTModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import hf_vanilla
from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForPreTraining,
    VanillaBertModel,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from hf_vanilla.registration import AUTO_CLASSES, register


SIZES = dict(vocab_size=13, d_model=16, d_ff=24, num_heads=4, encoder_layers=1, decoder_layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**SIZES)).save_pretrained(path)
    return path


def test_auto_config_loads_our_classes(folder):
    assert type(AutoConfig.for_model("vanilla_transformer", **SIZES)) is VanillaTransformerConfig
    assert type(AutoConfig.from_pretrained(folder)) is VanillaTransformerConfig


@pytest.mark.parametrize(
    ("auto_class", "model_class"),
    [(AutoModel, VanillaTransformerModel), (AutoModelForSeq2SeqLM, VanillaTransformerForConditionalGeneration)],
    ids=["model", "seq2seq"],
)
def test_auto_models_load_our_classes(folder, auto_class, model_class):
    assert type(auto_class.from_config(VanillaTransformerConfig(**SIZES))) is model_class
    model, info = auto_class.from_pretrained(folder, output_loading_info=True)
    assert type(model) is model_class
    assert not info["missing_keys"]
    saved = VanillaTransformerForConditionalGeneration.from_pretrained(folder).state_dict()
    prefix = "" if model_class is VanillaTransformerForConditionalGeneration else "model."
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[prefix + name]), name


BERT = VanillaBertConfig(
    vocab_size=13, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24
)


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert")
    VanillaBertForPreTraining(BERT).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", AUTO_CLASSES[VanillaBertConfig])
def test_auto_models_load_every_bert(bert_folder, name):
    auto_class, model_class = getattr(transformers, name), AUTO_CLASSES[VanillaBertConfig][name]
    assert type(auto_class.from_config(BERT)) is model_class
    model, info = auto_class.from_pretrained(bert_folder, output_loading_info=True)
    assert type(model) is model_class
    heads = ("classifier", "qa_outputs")
    assert all(name.startswith(heads) for name in info["missing_keys"])
    saved = VanillaBertForPreTraining.from_pretrained(bert_folder).state_dict()
    prefix = "bert." if model_class is VanillaBertModel else ""
    for key, tensor in model.state_dict().items():
        assert key.startswith(heads) or torch.equal(tensor, saved[prefix + key]), key


def test_every_bert_model_has_an_auto_class():
    registered = set(AUTO_CLASSES[VanillaBertConfig].values())
    public = {getattr(hf_vanilla, name) for name in hf_vanilla.__all__ if name.startswith("VanillaBertFor")}
    assert public | {VanillaBertModel} == registered


def test_native_models_are_untouched():
    bert = BertConfig(vocab_size=13, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24)
    marian = MarianConfig(
        vocab_size=13,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        pad_token_id=0,
        decoder_start_token_id=1,
    )
    assert type(AutoConfig.for_model("bert")) is BertConfig
    assert type(AutoModel.from_config(bert)) is BertModel
    assert type(AutoModelForSeq2SeqLM.from_config(marian)) is MarianMTModel


def test_no_native_model_type_is_taken():
    assert "bert" in CONFIG_MAPPING_NAMES
    assert not set(CONFIG_MAPPING_NAMES) & {config_class.model_type for config_class in AUTO_CLASSES}


def test_registering_twice_has_no_effect(folder):
    register()
    importlib.reload(hf_vanilla.registration).register()
    importlib.reload(hf_vanilla)
    assert type(AutoModelForSeq2SeqLM.from_pretrained(folder)) is VanillaTransformerForConditionalGeneration


def test_import_registers_the_model_type(folder):
    script = f"""
from transformers import AutoConfig
try:
    AutoConfig.from_pretrained({str(folder)!r}, trust_remote_code=False)
except ValueError as error:
    print("trust_remote_code=True" in str(error))
import hf_vanilla
print(type(AutoConfig.from_pretrained({str(folder)!r})).__name__)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["True", "VanillaTransformerConfig"]


def test_public_names_exist():
    for name in hf_vanilla.__all__:
        assert hasattr(hf_vanilla, name), name
    assert {"VanillaTransformerConfig", "VanillaTransformerModel", "__version__"} <= set(hf_vanilla.__all__)
