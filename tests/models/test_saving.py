"""Saving and loading, and the golden checkpoint of an earlier version."""

import copy
import json
import pathlib
import pickle

import accelerate
import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from tiny_models import BATCH, SOURCE, SOURCE_MASK, TARGET, assert_same, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, VanillaTransformerModel


GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
INPUTS = {"input_ids": SOURCE, "attention_mask": SOURCE_MASK, "decoder_input_ids": TARGET}


@pytest.fixture(scope="module")
def model():
    return tiny_model(position_type="learned", norm_position="pre", attention_scale=0.4)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    model.save_pretrained(path)
    return path


def same_outputs(one, other):
    return torch.equal(one(**INPUTS).logits, other(**INPUTS).logits)


def test_loaded_model_is_bit_equal(model, folder):
    reloaded = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    assert not reloaded.training
    assert_same(reloaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert dict(reloaded.named_buffers()) == dict(model.named_buffers()) == {}
    assert same_outputs(reloaded, model)
    assert reloaded.generation_config.to_dict() == model.generation_config.to_dict()
    for key, value in model.config.to_dict().items():
        if key not in ("architectures", "dtype", "_name_or_path"):
            assert getattr(reloaded.config, key) == value, key


ON_DISK = {
    "everything": {"": "disk"},
    "layers": {
        "model.encoder.embed_tokens": "cpu",
        "model.encoder.embed_positions": "cpu",
        "model.decoder.embed_tokens": "cpu",
        "model.decoder.embed_positions": "cpu",
        "lm_head": "cpu",
        "model.encoder.layers": "disk",
        "model.encoder.norm": "cpu",
        "model.decoder.layers": "disk",
        "model.decoder.norm": "cpu",
    },
}


# transformers 5.17 takes the device of parameters that are on disk for that of the model.
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids` being on a device:UserWarning")
@pytest.mark.skipif(Version(accelerate.__version__) < Version("1.15"), reason="accelerate mixes up weights on disk")
@pytest.mark.parametrize("place", ON_DISK)
def test_offloaded_weights_are_read_from_disk(model, folder, tmp_path, place):
    offloaded = VanillaTransformerForConditionalGeneration.from_pretrained(
        folder, device_map=ON_DISK[place], offload_folder=tmp_path
    )
    assert next(offloaded.model.encoder.layers.parameters()).device.type == "meta"
    inputs = {"input_ids": SOURCE, "attention_mask": SOURCE_MASK}
    assert torch.equal(
        offloaded(**inputs, decoder_input_ids=TARGET).logits, model(**inputs, decoder_input_ids=TARGET).logits
    )
    options = {"num_beams": 2, "max_new_tokens": 4}
    assert torch.equal(offloaded.generate(**inputs, **options), model.generate(**inputs, **options))


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_device_map_loads_the_same_model(model, folder, device_map):
    reloaded = VanillaTransformerForConditionalGeneration.from_pretrained(folder, device_map=device_map)
    assert same_outputs(reloaded, model)
    assert reloaded.lm_head.weight is reloaded.model.decoder.embed_tokens.weight
    assert reloaded.get_input_embeddings().weight is reloaded.lm_head.weight


def test_layers_work_with_accelerate_hooks(model):
    # as they do when layers are spread over several devices
    device_map = {"model.encoder": "cpu", "model.decoder": "cpu", "lm_head": "cpu"}
    dispatched = accelerate.dispatch_model(copy.deepcopy(model), device_map, main_device="cpu", force_hooks=True)
    assert hasattr(dispatched.lm_head, "_hf_hook")
    assert same_outputs(dispatched, model)
    assert torch.equal(dispatched.generate(SOURCE, num_beams=3), model.generate(SOURCE, num_beams=3))
    dispatched.train()(**BATCH).loss.backward()
    assert (dispatched.lm_head.weight.grad[0] == 0).all()
    assert (dispatched.lm_head.weight.grad[5] != 0).all()


def test_loading_leaves_nothing_on_the_meta_device(model, folder):
    with torch.device("meta"):
        empty = VanillaTransformerForConditionalGeneration(tiny_config(position_type="learned", norm_position="pre"))
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    reloaded = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    assert {tensor.device.type for tensor in reloaded.state_dict().values()} == {"cpu"}
    assert all(tensor.isfinite().all() for tensor in reloaded.state_dict().values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_saved_dtype_is_loaded(model, tmp_path, dtype):
    half = copy.deepcopy(model).to(dtype)
    half.save_pretrained(tmp_path)
    reloaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in reloaded.parameters()} == {dtype}
    assert same_outputs(reloaded, half)
    single = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in single.parameters()} == {torch.float32}


def test_missing_tensors_are_initialised_and_the_others_loaded(model, folder, tmp_path):
    """Among others, a bias is missing whose weight is in the file, and the other way round."""
    missing = (
        "model.encoder.layers.0.self_attn.qkv_proj.bias",
        "model.decoder.layers.1.cross_attn.kv_proj.weight",
        "model.decoder.layers.2.feed_forward.fc1.weight",
        "model.decoder.layers.0.self_attn_residual.layer_norm.weight",
        "model.encoder.embed_positions.weight",
    )
    tensors = load_file(folder / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    kept = {name: tensor for name, tensor in tensors.items() if name not in missing}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reloaded, info = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == set(missing)
    state = reloaded.state_dict()
    assert_same({name: state[name] for name in kept}, kept, rtol=0, atol=0)
    assert (state[missing[0]] == 0).all()
    assert (state[missing[3]] == 1).all()
    bound = (6 / (16 + 12)) ** 0.5  # Xavier, of the keys alone
    keys = state[missing[1]][:12]
    assert 0.8 * bound < keys.abs().max() <= bound
    assert state[missing[4]].std().item() == pytest.approx(16**-0.5, rel=0.05)


def test_nonzero_padding_row_of_a_checkpoint_is_kept(model, tmp_path):
    foreign = copy.deepcopy(model)
    with torch.no_grad():
        foreign.get_input_embeddings().weight[0] = 0.5
    foreign.save_pretrained(tmp_path)
    reloaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert (reloaded.get_input_embeddings().weight[0] == 0.5).all()
    assert same_outputs(reloaded, foreign)


def test_missing_embedding_is_initialised_with_padding_zero(model, folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.decoder.embed_tokens.weight"]
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reloaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert (reloaded.get_input_embeddings().weight[0] == 0).all()
    assert (reloaded.get_input_embeddings().weight[1:] != 0).all()
    assert reloaded.lm_head.weight is reloaded.get_input_embeddings().weight


def test_base_model_and_head_load_from_each_other(model, folder, tmp_path):
    base = VanillaTransformerModel.from_pretrained(folder)
    expected = model.model(**INPUTS).last_hidden_state
    assert torch.equal(base(**INPUTS).last_hidden_state, expected)
    base.save_pretrained(tmp_path)
    assert same_outputs(VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path), model)


def test_copied_and_pickled_models_stay_tied(model):
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same_outputs(duplicate, model)
        assert duplicate.lm_head.weight is duplicate.model.encoder.embed_tokens.weight
        assert duplicate.lm_head.weight is duplicate.model.decoder.embed_tokens.weight
        with torch.no_grad():
            duplicate.lm_head.weight[5] += 1
        assert not same_outputs(duplicate, model)


def test_state_dict_loads_strictly_into_a_fresh_model(model):
    fresh = VanillaTransformerForConditionalGeneration(model.config).eval()
    fresh.load_state_dict(model.state_dict())
    assert same_outputs(fresh, model)


@pytest.mark.parametrize("kind", ["base", "pre_learned_separate"])
def test_parameter_names_are_unchanged(kind):
    overrides = (
        {}
        if kind == "base"
        else dict(
            norm_position="pre",
            position_type="learned",
            share_encoder_decoder_embeddings=False,
            tie_word_embeddings=False,
        )
    )
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(
            VanillaTransformerConfig(encoder_layers=1, decoder_layers=1, **overrides)
        )
    names = [f"{name} {tuple(tensor.shape)}" for name, tensor in model.state_dict().items()]
    assert names == (GOLDEN / f"state_dict_keys_{kind}.txt").read_text().splitlines()


@pytest.mark.parametrize("auto_class", [AutoModelForSeq2SeqLM, AutoModelForCausalLM], ids=["transformer", "gpt"])
def test_golden_checkpoint_is_unchanged(auto_class):
    folder = GOLDEN / ("vanilla_gpt" if auto_class is AutoModelForCausalLM else "vanilla_transformer")
    expected = json.loads((folder / "expected.json").read_text())
    model = auto_class.from_pretrained(folder)
    inputs = {name: torch.tensor(expected[name]) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        outputs = model(**inputs, labels=torch.tensor(expected["labels"]))
    torch.testing.assert_close(outputs.logits, torch.tensor(expected["logits"]), rtol=0, atol=expected["tolerance"])
    assert outputs.loss.item() == pytest.approx(expected["loss"], abs=expected["tolerance"])
    for num_beams, sequences in expected["sequences"].items():
        assert model.generate(**inputs, num_beams=int(num_beams), max_new_tokens=8).tolist() == sequences
