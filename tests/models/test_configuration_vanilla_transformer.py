"""The config has the paper's numbers, is saved and loaded unchanged, and every field of it is used."""

import ast
import dataclasses
import json
import pathlib

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from reference import parameter_count
from tiny_models import tiny_config
from transformers import PreTrainedConfig

import hf_vanilla.models
from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration


# Vaswani et al. 2017, Table 3, copied from the paper: N, d_model, d_ff, h, d_k, d_v, P_drop, epsilon_ls
TABLE_3 = {
    "base": (6, 512, 2048, 8, 64, 64, 0.1, 0.1),
    "A_heads_1": (6, 512, 2048, 1, 512, 512, 0.1, 0.1),
    "A_heads_4": (6, 512, 2048, 4, 128, 128, 0.1, 0.1),
    "A_heads_16": (6, 512, 2048, 16, 32, 32, 0.1, 0.1),
    "A_heads_32": (6, 512, 2048, 32, 16, 16, 0.1, 0.1),
    "B_d_k_16": (6, 512, 2048, 8, 16, 64, 0.1, 0.1),
    "B_d_k_32": (6, 512, 2048, 8, 32, 64, 0.1, 0.1),
    "C_layers_2": (2, 512, 2048, 8, 64, 64, 0.1, 0.1),
    "C_layers_4": (4, 512, 2048, 8, 64, 64, 0.1, 0.1),
    "C_layers_8": (8, 512, 2048, 8, 64, 64, 0.1, 0.1),
    "C_d_model_256": (6, 256, 2048, 8, 32, 32, 0.1, 0.1),
    "C_d_model_1024": (6, 1024, 2048, 8, 128, 128, 0.1, 0.1),
    "C_d_ff_1024": (6, 512, 1024, 8, 64, 64, 0.1, 0.1),
    "C_d_ff_4096": (6, 512, 4096, 8, 64, 64, 0.1, 0.1),
    "D_dropout_0.0": (6, 512, 2048, 8, 64, 64, 0.0, 0.1),
    "D_dropout_0.2": (6, 512, 2048, 8, 64, 64, 0.2, 0.1),
    "D_label_smoothing_0.0": (6, 512, 2048, 8, 64, 64, 0.1, 0.0),
    "D_label_smoothing_0.2": (6, 512, 2048, 8, 64, 64, 0.1, 0.2),
    "E_learned_positions": (6, 512, 2048, 8, 64, 64, 0.1, 0.1),
    "big": (6, 1024, 4096, 16, 64, 64, 0.3, 0.1),
}


def count_parameters(config: VanillaTransformerConfig) -> int:
    with torch.device("meta"):
        return VanillaTransformerForConditionalGeneration(config).num_parameters()


def test_presets_are_the_rows_of_table_3():
    assert VanillaTransformerConfig.preset_names() == tuple(TABLE_3)


@pytest.mark.parametrize("name", TABLE_3)
def test_preset_has_the_numbers_of_its_row(name):
    config = VanillaTransformerConfig.preset(name)
    numbers = (
        config.encoder_layers,
        config.d_model,
        config.d_ff,
        config.num_heads,
        config.d_k,
        config.d_v,
        config.dropout,
        config.label_smoothing,
    )
    assert numbers == TABLE_3[name]
    assert config.decoder_layers == config.encoder_layers
    assert config.position_type == ("learned" if name == "E_learned_positions" else "sinusoidal")
    assert (config.norm_position, config.activation_function) == ("post", "relu")
    assert (config.attention_dropout, config.activation_dropout) == (0.0, 0.0)
    assert config.tie_word_embeddings
    assert config.share_encoder_decoder_embeddings


@pytest.mark.parametrize("name", TABLE_3)
def test_parameter_count_of_every_row_with_37000_tokens(name):
    layers, d_model, d_ff, heads, d_k, d_v, _, _ = TABLE_3[name]
    learned_positions = 512 if name == "E_learned_positions" else 0
    expected = parameter_count(37000, d_model, d_ff, heads, d_k, d_v, layers, learned_positions)
    assert count_parameters(VanillaTransformerConfig.preset(name)) == expected


@pytest.mark.parametrize(("name", "expected"), [("base", 63_082_496), ("big", 214_245_376)])
def test_parameter_count_of_base_and_big(name, expected):
    assert count_parameters(VanillaTransformerConfig.preset(name)) == expected


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        (dict(tie_word_embeddings=False), 37000 * 512),
        (dict(share_encoder_decoder_embeddings=False), 37000 * 512),
        (dict(share_encoder_decoder_embeddings=False, tie_word_embeddings=False), 2 * 37000 * 512),
        (dict(share_encoder_decoder_embeddings=False, source_vocab_size=1000), 1000 * 512),
        (dict(norm_position="pre"), 2 * 2 * 512),
    ],
    ids=["untied", "unshared", "neither", "two vocabularies", "pre-norm"],
)
def test_parameter_count_of_variants(overrides, more):
    assert count_parameters(VanillaTransformerConfig(**overrides)) == 63_082_496 + more


def test_preset_accepts_overrides():
    config = VanillaTransformerConfig.preset("big", vocab_size=32000, dropout=0.1)
    assert (config.vocab_size, config.dropout, config.d_model) == (32000, 0.1, 1024)


def test_unknown_preset_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match=r"`name` must be one of base, A_heads_1.*big; got 'small'"):
        VanillaTransformerConfig.preset("small")


def test_names_of_transformers_are_aliases_in_both_directions():
    config = VanillaTransformerConfig(
        hidden_size=32, intermediate_size=40, num_attention_heads=2, num_hidden_layers=3, hidden_dropout_prob=0.2
    )
    assert (config.d_model, config.d_ff, config.num_heads, config.encoder_layers, config.dropout) == (
        32,
        40,
        2,
        3,
        0.2,
    )
    assert (config.d_k, config.d_v) == (16, 16)
    with pytest.raises(ValueError, match=r"`d_model` \(50\) must be divisible by `num_heads` \(4\)"):
        VanillaTransformerConfig(hidden_size=50, num_attention_heads=4)
    config.dropout, config.attention_dropout, config.activation_function = 0.3, 0.4, "gelu"
    assert config.hidden_dropout_prob == 0.3
    assert config.attention_probs_dropout_prob == 0.4
    assert config.hidden_act == "gelu"


def test_defaults_are_derived_as_in_the_paper():
    config = VanillaTransformerConfig(d_model=48, num_heads=6, bos_token_id=5)
    assert (config.d_k, config.d_v, config.decoder_start_token_id) == (8, 8, 5)
    assert VanillaTransformerConfig(d_model=50, num_heads=4, d_k=3, d_v=7).d_v == 7


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        dict(
            d_k=3, d_v=5, attention_scale=1.0, norm_position="pre", position_type="learned", activation_function="gelu"
        ),
        dict(source_vocab_size=7, share_encoder_decoder_embeddings=False, tie_word_embeddings=False),
        dict(eos_token_id=[2, 3], decoder_start_token_id=2, pad_token_id=4, label_smoothing_type="t2t"),
    ],
    ids=["defaults", "sizes", "vocabularies", "ids"],
)
def test_json_round_trip_keeps_every_field(tmp_path, overrides):
    config = tiny_config(**overrides)
    config.save_pretrained(tmp_path)
    reloaded = VanillaTransformerConfig.from_pretrained(tmp_path)
    for field in dataclasses.fields(VanillaTransformerConfig):
        if field.name not in ("transformers_version", "architectures"):
            assert getattr(reloaded, field.name) == getattr(config, field.name), field.name
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "vanilla_transformer"
    assert saved["d_k"] == config.d_k


def test_every_field_is_used():
    folder = pathlib.Path(hf_vanilla.models.__file__).parent
    sources = [folder / name for name in ("layers.py", "modeling_vanilla_transformer.py")]
    read = {
        node.attr
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    read |= {VanillaTransformerConfig.attribute_map.get(name, name) for name in read}
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = {field.name for field in dataclasses.fields(VanillaTransformerConfig)} - inherited
    # transformers reads these, in generate() and in the decorators of forward()
    assert own - read <= {"bos_token_id", "eos_token_id", "use_cache"}


@pytest.mark.promise("nonsense in a config")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(num_heads="4"), "Field 'num_heads' expected int, got str"),
        (dict(d_model=16.0), "Field 'd_model' expected int, got float"),
        (dict(dropout="0.1"), "'dropout'.*expected float, got str"),
        (dict(encoder_layers=1.5), "'encoder_layers' expected int, got float"),
        (dict(norm_position=None), "'norm_position' expected str, got NoneType"),
        (dict(tie_word_embeddings="yes"), "'tie_word_embeddings' expected bool, got str"),
        (dict(pad_token_id=None), "'pad_token_id' expected int, got NoneType"),
        (dict(eos_token_id="</s>"), "'eos_token_id'.*expected int, got str"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_type_is_refused(overrides, message):
    with pytest.raises(StrictDataclassFieldValidationError, match=message):
        tiny_config(**overrides)


def test_wrong_type_is_refused_on_assignment():
    config = tiny_config()
    with pytest.raises(StrictDataclassFieldValidationError, match="Field 'd_model' expected int, got str"):
        config.d_model = "16"
    assert config.d_model == 16


def test_rates_may_be_integers():
    config = tiny_config(dropout=0, label_smoothing=0, attention_scale=1)
    assert (config.dropout, config.label_smoothing, config.attention_scale) == (0, 0, 1)


@pytest.mark.promise("nonsense in a config")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(vocab_size=0), "`vocab_size` must be at least 1, got 0"),
        (dict(d_model=-16), "`d_model` must be at least 1, got -16"),
        (dict(d_ff=0), "`d_ff` must be at least 1, got 0"),
        (dict(num_heads=0), "`num_heads` must be at least 1, got 0"),
        (dict(d_k=0), "`d_k` must be at least 1, got 0"),
        (dict(d_v=-1), "`d_v` must be at least 1, got -1"),
        (dict(max_position_embeddings=0), "`max_position_embeddings` must be at least 1, got 0"),
        (dict(encoder_layers=5000, d_model=9000, d_k=9000, d_v=9000), r"make at least 6\.5e\+12 parameters"),
        (dict(decoder_layers=10**7), "`decoder_layers` must be at most 10,000, got 10000000"),
        (dict(encoder_layers=-1), "`encoder_layers` must not be negative, got -1"),
        (dict(decoder_layers=-2), "`decoder_layers` must not be negative, got -2"),
        (dict(d_model=15), "`d_model` must be even for sinusoidal positions, got 15"),
        (dict(dropout=1.0), r"`dropout` must be in \[0, 1\), got 1.0"),
        (dict(attention_dropout=-0.1), r"`attention_dropout` must be in \[0, 1\), got -0.1"),
        (dict(activation_dropout=float("nan")), r"`activation_dropout` must be in \[0, 1\), got nan"),
        (dict(label_smoothing=1.5), r"`label_smoothing` must be in \[0, 1\), got 1.5"),
        (dict(layer_norm_eps=0.0), "`layer_norm_eps` must be positive and finite, got 0.0"),
        (dict(layer_norm_eps=float("inf")), "`layer_norm_eps` must be positive and finite, got inf"),
        (dict(attention_scale=0.0), "`attention_scale` must be positive and finite, got 0.0"),
        (dict(attention_scale=float("nan")), "`attention_scale` must be positive and finite, got nan"),
        (dict(norm_position="middle"), "`norm_position` must be one of post, pre; got 'middle'"),
        (dict(position_type="rotary"), "`position_type` must be one of sinusoidal, .*learned; got 'rotary'"),
        (dict(label_smoothing_type="kl"), "`label_smoothing_type` must be one of uniform, t2t, annotated; got 'kl'"),
        (dict(activation_function="relux"), "`activation_function` must be a name of .*ACT2FN.*got 'relux'"),
        (dict(source_vocab_size=20), r"`source_vocab_size` \(20\) differs from `vocab_size` \(13\).*embeddings=False"),
        (
            dict(source_vocab_size=0, share_encoder_decoder_embeddings=False),
            "`source_vocab_size` must be at least 1, got 0",
        ),
        (
            dict(source_vocab_size=5, pad_token_id=7, share_encoder_decoder_embeddings=False),
            r"`pad_token_id` \(7\) must be in both vocabularies.*`source_vocab_size` \(5\)",
        ),
        (dict(pad_token_id=13), r"`pad_token_id` must be in \[0, `vocab_size` = 13\), got 13"),
        (dict(bos_token_id=-1), r"`bos_token_id` must be in \[0, `vocab_size` = 13\), got -1"),
        (dict(eos_token_id=[2, 99]), r"`eos_token_id` must be in \[0, `vocab_size` = 13\), got 99"),
        (dict(decoder_start_token_id=14), r"`decoder_start_token_id` must be in \[0, `vocab_size` = 13\), got 14"),
        (dict(bos_token_id=None), "`decoder_start_token_id` or `bos_token_id` must be given"),
    ],
    ids=lambda value: " ".join(f"{name}={given}" for name, given in value.items()) if isinstance(value, dict) else "",
)
def test_invalid_value_is_refused(overrides, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        tiny_config(**overrides)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match=r"`d_model` \(16\) must be divisible by `num_heads` \(3\); or give both"):
        tiny_config(num_heads=3, d_k=None)
    assert tiny_config(num_heads=3, d_k=2, d_v=7).d_v == 7


def test_invalid_value_set_later_is_refused_on_saving(tmp_path):
    config = tiny_config()
    config.dropout = 1.0
    with pytest.raises(StrictDataclassClassValidationError, match=r"`dropout` must be in \[0, 1\), got 1.0"):
        config.save_pretrained(tmp_path)
