"""The fields are those of transformers' BertConfig, the presets those of the papers."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, BertConfig, BertModel

from hf_vanilla import VanillaBertConfig, VanillaBertForPreTraining, VanillaBertModel


# Devlin et al. 2018 round them to 110 and 340 million; Turc et al. 2019, Table 1, to 4.4, 11.3, 29.1 and 41.7.
ENCODER_PARAMETERS = {
    "base": 109_482_240,
    "large": 335_141_888,
    "tiny": 4_385_920,
    "mini": 11_170_560,
    "small": 28_763_648,
    "medium": 41_373_184,
    "L-12_H-128": 6_368_640,
    "L-2_H-768": 38_603_520,
}


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_fields_and_defaults_are_those_of_bert_config():
    ours, theirs = VanillaBertConfig().to_dict(), BertConfig().to_dict()
    assert ours.pop("model_type") == "vanilla_bert"
    assert theirs.pop("model_type") == "bert"
    assert ours == theirs


@pytest.mark.parametrize(("name", "expected"), ENCODER_PARAMETERS.items(), ids=ENCODER_PARAMETERS)
def test_encoder_parameter_counts_are_exact(name, expected):
    with torch.device("meta"):
        assert parameters(VanillaBertModel(VanillaBertConfig.preset(name))) == expected


@pytest.mark.parametrize(("name", "expected"), [("base", 110_106_428), ("large", 336_226_108)], ids=["base", "large"])
def test_parameter_counts_with_both_heads_are_exact(name, expected):
    with torch.device("meta"):
        assert parameters(VanillaBertForPreTraining(VanillaBertConfig.preset(name))) == expected


def test_all_24_miniatures_are_presets():
    grid = [name for name in VanillaBertConfig.preset_names() if name.startswith("L-")]
    assert len(grid) == 24
    for name in grid:
        config = VanillaBertConfig.preset(name)
        assert name == f"L-{config.num_hidden_layers}_H-{config.hidden_size}"
        assert config.hidden_size == 64 * config.num_attention_heads == config.intermediate_size // 4


def test_preset_accepts_overrides_and_refuses_unknown_names():
    assert VanillaBertConfig.preset("tiny", vocab_size=99).vocab_size == 99
    with pytest.raises(ValueError, match=r"`name` must be one of base, large, tiny.*got 'huge'"):
        VanillaBertConfig.preset("huge")


def test_config_round_trip(tmp_path):
    config = VanillaBertConfig.preset("mini", vocab_size=77, hidden_dropout_prob=0.2)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "vanilla_bert"
    assert not {"norm_position", "activation_dropout", "attention_scale", "d_k", "d_v"} & saved.keys()
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.to_diff_dict() == config.to_diff_dict()


def test_config_of_transformers_bert_loads_without_warnings(tmp_path, caplog):
    BertConfig(vocab_size=77, num_hidden_layers=3, classifier_dropout=0.3).save_pretrained(tmp_path)
    config = VanillaBertConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.vocab_size, config.num_hidden_layers) == ("vanilla_bert", 77, 3)
    assert config.classifier_dropout == 0.3
    assert not caplog.records


def test_relative_positions_are_refused(tmp_path):
    BertConfig(position_embedding_type="relative_key").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`position_embedding_type` of .* must be 'absolute'"):
        VanillaBertConfig.from_pretrained(tmp_path)


@pytest.mark.promise("nonsense in a config")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, r"`vocab_size` must be at least 1, got 0"),
        ({"num_hidden_layers": -1}, r"`num_hidden_layers` must not be negative, got -1"),
        ({"num_hidden_layers": 10**7}, r"`num_hidden_layers` must be at most 10,000, got 10000000"),
        ({"vocab_size": 10**10}, r"make at least 7\.7e\+12 parameters, 28 TiB in float32; at most 1e\+12 are allowed"),
        ({"max_position_embeddings": 10**10}, r"make at least 7\.7e\+12 parameters"),
        ({"intermediate_size": 10**8, "num_hidden_layers": 24}, r"make at least 3\.7e\+12 parameters"),
        ({"hidden_dropout_prob": 1.0}, r"`hidden_dropout_prob` must be in \[0, 1\), got 1.0"),
        ({"classifier_dropout": -0.1}, r"`classifier_dropout` must be in \[0, 1\), got -0.1"),
        ({"layer_norm_eps": 0.0}, r"`layer_norm_eps` must be positive and finite, got 0.0"),
        ({"hidden_act": "gelo"}, r"`hidden_act` must be a name of transformers' ACT2FN.*'gelo'"),
        ({"pad_token_id": 30522}, r"`pad_token_id` must be in \[0, `vocab_size` = 30522\), got 30522"),
        ({"id2label": ["O"]}, r"`id2label` must be a dict, got \['O'\]"),
        ({"is_decoder": True}, r"`is_decoder` must be false"),
        ({"add_cross_attention": True}, r"`add_cross_attention` must be false"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_fields_are_named_in_the_error(fields, message):
    with pytest.raises((StrictDataclassError, TypeError), match=message):
        VanillaBertConfig(**fields)


def test_heads_that_do_not_divide_the_width_are_refused_by_the_model():
    for config_class, model_class in ((BertConfig, BertModel), (VanillaBertConfig, VanillaBertModel)):
        config = config_class(hidden_size=32)  # 12 heads
        with pytest.raises(ValueError, match=r"32.*12"):
            model_class(config)
