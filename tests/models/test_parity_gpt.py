"""Every head equals transformers' own GPT and GPT-2 with the same weights: outputs, loss, gradients, generation."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_gpts import CHOICES, IDS, LABELS, LEFT, MASK, NATIVE, TEXT, native_config, native_gpt, tiny_gpt

import hf_vanilla


TOLERANCE = dict(rtol=1e-5, atol=1e-5)  # float32, products of other shapes
EXACT = dict(rtol=1e-6, atol=1e-6, check_dtype=False)  # float64, of which transformers' losses are float32
pytestmark = pytest.mark.parametrize("norm", NATIVE)


def saved(norm, folder, head="LMHeadModel", **overrides):
    native = native_gpt(norm, head, **overrides)
    native.save_pretrained(folder)
    return native


@pytest.mark.parametrize(
    "sizes",
    [{}, {"n_embd": 20, "n_head": 5, "n_layer": 3, "vocab_size": 29}, {"n_embd": 9, "n_head": 1, "n_positions": 7}],
    ids=["even", "odd", "one head"],
)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_logits_loss_and_gradients_equal_those_of_transformers(norm, sizes, kernel, tmp_path):
    native = saved(norm, tmp_path / "native", **sizes).double().train()
    model_class = hf_vanilla.VanillaGptForCausalLM
    model = model_class.from_pretrained(tmp_path / "native", attn_implementation=kernel, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**TEXT).logits[MASK != 0], native(**TEXT).logits[MASK != 0], **EXACT)
    actual, expected = model.train()(**TEXT, labels=LABELS).loss, native(**TEXT, labels=LABELS).loss
    torch.testing.assert_close(actual, expected, **EXACT)
    for each, loss in ((model, actual), (native, expected)):
        loss.backward()
        for parameter in each.parameters():  # saved as weights, gradients get the names of checkpoints
            parameter.data = parameter.grad
        each.save_pretrained(tmp_path / type(each).__name__)
    ours, theirs = (load_file(tmp_path / type(each).__name__ / "model.safetensors") for each in (model, native))
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    "fields", [{"hidden_act": "relu"}, {"layer_norm_eps": 0.1}, {"hidden_dropout_prob": 0.3}], ids=str
)
def test_settings_are_saved_under_the_names_of_transformers(norm, fields, tmp_path):
    model = tiny_gpt(norm_position=norm, **fields)
    model.save_pretrained(tmp_path)
    native = type(native_gpt(norm)).from_pretrained(tmp_path).eval()
    assert native.config.resid_pdrop == native.config.embd_pdrop == model.config.hidden_dropout_prob
    torch.testing.assert_close(native(IDS).logits, model(IDS).logits, **TOLERANCE)
    config = type(model.config).from_pretrained(tmp_path, layer_norm_eps=0.2)
    assert (config.hidden_act, config.layer_norm_eps) == (model.config.hidden_act, 0.2)
    assert not hasattr(config, "layer_norm_epsilon")


@pytest.mark.parametrize("num_beams", [1, 4])
def test_generated_ids_equal_those_of_transformers(norm, num_beams, tmp_path):
    native = saved(norm, tmp_path, eos_token_id=None)
    model = hf_vanilla.VanillaGptForCausalLM.from_pretrained(tmp_path)
    prompts = torch.tensor([[5, 6, 7, 8], [10, 3, 11, 4], [4, 4, 9, 12]])
    options = dict(attention_mask=torch.ones_like(prompts), num_beams=num_beams, max_new_tokens=9, do_sample=False)
    assert torch.equal(model.generate(prompts, **options), native.generate(prompts, **options))


@pytest.mark.parametrize("padded", [TEXT, LEFT], ids=["right", "left"])
def test_classes_equal_those_of_transformers(norm, padded, tmp_path):
    native = saved(norm, tmp_path, "ForSequenceClassification", num_labels=5)
    model_class = hf_vanilla.VanillaGptForSequenceClassification
    model, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    labels, single = torch.tensor([4, 1]), IDS[1:, :5]
    model.eval(), native.eval()
    if padded is TEXT:
        torch.testing.assert_close(model(IDS).logits, native(IDS).logits, **TOLERANCE)  # without a mask, by the id
        expected = native(**padded, labels=labels)
        torch.testing.assert_close(model(**padded, labels=labels).loss, expected.loss, **TOLERANCE)
    torch.testing.assert_close(model(**padded).logits[1:], native(single).logits, **TOLERANCE)


def test_scores_of_choices_equal_those_of_transformers(norm, tmp_path):
    native = saved(norm, tmp_path, "DoubleHeadsModel")
    model, info = hf_vanilla.VanillaGptForMultipleChoice.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    last = CHOICES["attention_mask"].sum(-1) - 1
    expected = native(CHOICES["input_ids"].clamp(min=1), mc_token_ids=last).mc_logits
    torch.testing.assert_close(model.eval()(**CHOICES).logits, expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ("LMHeadModel", "VanillaGptForCausalLM"),
        ("ForSequenceClassification", "VanillaGptForSequenceClassification"),
        ("DoubleHeadsModel", "VanillaGptForMultipleChoice"),
        ("Model", "VanillaGptModel"),
    ],
)
def test_saved_weights_are_bit_equal_in_transformers(norm, head, name, tmp_path):
    native = saved(norm, tmp_path / "native", head)
    getattr(hf_vanilla, name).from_pretrained(tmp_path / "native").save_pretrained(tmp_path / "ours")
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "native")]
    if "lm_head.weight" in files[1]:  # that class ties the other way round
        files[1]["transformer.tokens_embed.weight"] = files[1].pop("lm_head.weight")
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[1])
    again, info = type(native).from_pretrained(tmp_path / "ours", config=native_config(norm), output_loading_info=True)
    assert not any(info.values())
    for key, tensor in native.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


def test_load_state_dict_takes_both_kinds_of_names(norm, tmp_path):
    native = saved(norm, tmp_path)
    first = hf_vanilla.VanillaGptForCausalLM.from_pretrained(tmp_path)
    for state in (native.state_dict(), first.state_dict()):
        model = hf_vanilla.VanillaGptForCausalLM(first.config).eval()
        buffers = {"transformer.h.0.attn.bias": torch.ones(1), "transformer.h.1.attn.masked_bias": torch.ones(1)}
        model.load_state_dict({**state, **buffers})  # old files hold these too
        torch.testing.assert_close(model(IDS).logits, native(IDS).logits, **TOLERANCE)
    first.save_pretrained(tmp_path / "own-names", save_original_format=False)
    again = hf_vanilla.VanillaGptForCausalLM.from_pretrained(tmp_path / "own-names")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in first.state_dict().items())


def test_fields_of_transformers_configs_are_read(norm, tmp_path):
    native = native_config(norm, attn_pdrop=0.3, summary_first_dropout=0.2, layer_norm_epsilon=1e-3, n_positions=19)
    native.save_pretrained(tmp_path)
    config = hf_vanilla.VanillaGptConfig.from_pretrained(tmp_path)
    assert config.norm_position == norm
    assert (config.attention_probs_dropout_prob, config.hidden_dropout_prob) == (0.3, 0.0)
    assert (config.classifier_dropout, config.layer_norm_eps, config.max_position_embeddings) == (0.2, 1e-3, 19)
    assert (config.hidden_act, config.intermediate_size) == ("gelu_new", 48 if norm == "post" else 20)
    fields = json.loads((tmp_path / "config.json").read_text())
    others = {"embd_pdrop": 0.5, "scale_attn_by_inverse_layer_idx": True, "add_cross_attention": True}
    for name, value in others.items():
        (tmp_path / "config.json").write_text(json.dumps({**fields, name: value}))
        with pytest.raises(ValueError, match=f"`{name}` of .* must be .*, as in the published models; load it with"):
            hf_vanilla.VanillaGptConfig.from_pretrained(tmp_path)


def test_activations_of_openai_checkpoints_are_those_of_transformers(norm, tmp_path):
    for number, name in enumerate(("gelu", "relu", "silu", "swish")):
        field = "afn" if norm == "post" else "activation_function"
        native = saved(norm, tmp_path / str(number), **{field: name})
        model = hf_vanilla.VanillaGptForCausalLM.from_pretrained(tmp_path / str(number)).eval()
        torch.testing.assert_close(model(IDS).logits, native(IDS).logits, **TOLERANCE)


def test_token_types_are_added(norm, tmp_path):
    native = saved(norm, tmp_path, "ForSequenceClassification", num_labels=5)
    types = {"token_type_ids": IDS.flip(1)}
    model = hf_vanilla.VanillaGptForSequenceClassification.from_pretrained(tmp_path)
    padded = {**TEXT, **types}
    torch.testing.assert_close(model(**padded, use_cache=False).logits, native(**padded).logits, **TOLERANCE)
    assert not torch.allclose(model(**TEXT).logits, native(**padded).logits)
    model.transformer(**TEXT, **types)
    with pytest.raises(ValueError, match="`token_type_ids`"):
        model(**TEXT, token_type_ids=IDS + 1000)


@pytest.mark.parametrize("kept", [torch.tensor([[2, 4], [1, 3]]), torch.arange(2 * IDS.shape[1]).view(2, -1) % 3 == 1])
def test_logits_to_keep_of_each_row(norm, kept, tmp_path):
    native = saved(norm, tmp_path)
    model = hf_vanilla.VanillaGptForCausalLM.from_pretrained(tmp_path)
    logits = native(IDS).logits
    expected = logits[kept] if kept.dtype == torch.bool else logits[torch.arange(2)[:, None], kept]
    torch.testing.assert_close(model(IDS, logits_to_keep=kept).logits, expected, **TOLERANCE)
