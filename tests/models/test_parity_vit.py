"""Every head equals transformers' own ViT with the same weights: outputs, loss and gradients; names of checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_vits import IMAGES, OTHER_SIZE, TASKS, native_vit, tiny_vit
from transformers import ViTConfig

from hf_vanilla import VanillaVitForImageClassification


GOLDEN = Path(__file__).parent.parent / "golden" / "vanilla_vit"
TOLERANCE = dict(rtol=1e-5, atol=1e-5)
EXACT = dict(rtol=1e-6, atol=1e-6, check_dtype=False)  # float64, but for the loss of several labels in transformers
WEIGHTS = "model.safetensors"
# image size, patch size, width, heads, inner width
ODD_SIZES = {
    "small": (12, 4, 12, 3, 20),
    "pixels": (5, 1, 16, 4, 24),
    "one patch": (7, 7, 10, 2, 14),
    "long": (33, 3, 8, 4, 36),
}


def inputs_of(task, images):
    size = {} if images is IMAGES else {"interpolate_pos_encoding": True}
    return {"pixel_values": images, **TASKS[task][3], **size}


def original_gradients(model, folder):
    """Save the gradients as weights, so that they get the names in files, and read them."""
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(folder)
    return load_file(folder / WEIGHTS)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("images", [IMAGES, OTHER_SIZE], ids=["own-size", "interpolated"])
@pytest.mark.parametrize("task", TASKS)
def test_outputs_and_gradients_equal_those_of_transformers(task, images, kernel, tmp_path):
    native, inputs = native_vit(task).double(), inputs_of(task, images.double())
    native.save_pretrained(tmp_path / "native")
    model = TASKS[task][0].from_pretrained(tmp_path / "native", attn_implementation=kernel, dtype=torch.float64)
    gradients = []
    for each in (model, native):
        outputs = each.train()(**inputs)
        loss = outputs.last_hidden_state.square().mean() + outputs.pooler_output.sum() if task == "model" else None
        (outputs.loss if loss is None else loss).backward()
        gradients.append(outputs)
    actual, expected = gradients
    assert set(actual.keys()) == set(expected.keys())
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], **EXACT)
    ours, theirs = (original_gradients(each, tmp_path / str(place)) for place, each in enumerate((model, native)))
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")
        assert gradient.abs().sum() > 0 or "key.bias" in name, name


@pytest.mark.parametrize("sizes", ODD_SIZES.values(), ids=ODD_SIZES)
def test_odd_sizes_equal_those_of_transformers(sizes, tmp_path):
    names = ("image_size", "patch_size", "hidden_size", "num_attention_heads", "intermediate_size")
    native = native_vit("model", **dict(zip(names, sizes, strict=True)))
    native.save_pretrained(tmp_path)
    model = TASKS["model"][0].from_pretrained(tmp_path).eval()
    images = torch.randn(3, 2, sizes[0], sizes[0])
    with torch.no_grad():
        actual, expected = model(images, output_hidden_states=True), native(images, output_hidden_states=True)
    for name in ("last_hidden_state", "pooler_output", "hidden_states"):
        torch.testing.assert_close(actual[name], expected[name], **TOLERANCE)


@pytest.mark.parametrize("in_memory", [False, True], ids=["names-in-files", "names-in-memory"])
@pytest.mark.parametrize("task", ["model", "classes"])
def test_both_kinds_of_names_load_and_those_in_files_are_saved(task, in_memory, tmp_path):
    native = native_vit(task)
    native.save_pretrained(tmp_path / "native", save_original_format=not in_memory)
    model, info = TASKS[task][0].from_pretrained(tmp_path / "native", output_loading_info=True)
    assert not any(info.values())
    model.save_pretrained(tmp_path / "ours")
    again, info = TASKS[task][1].from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    native.save_pretrained(tmp_path / "files")
    ours, theirs = (load_file(tmp_path / name / WEIGHTS) for name in ("ours", "files"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, native.state_dict()[name]), name


def test_load_state_dict_accepts_every_kind_of_name(tmp_path):
    native = native_vit()
    native.save_pretrained(tmp_path)
    expected = VanillaVitForImageClassification.from_pretrained(tmp_path).state_dict()
    for state in (load_file(tmp_path / WEIGHTS), native.state_dict(), expected):
        model = tiny_vit(initializer_range=0.1)
        model.load_state_dict(state)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
    del state["vit.layers.1.self_attn.qkv_proj.bias"]
    assert model.load_state_dict(state, strict=False).missing_keys == ["vit.layers.1.self_attn.qkv_proj.bias"]


def test_encoder_loads_from_a_classifier_and_a_classifier_from_an_encoder(tmp_path):
    classifier = tiny_vit()
    classifier.save_pretrained(tmp_path / "classifier")
    encoder, info = TASKS["model"][0].from_pretrained(tmp_path / "classifier", output_loading_info=True)
    assert all(name.startswith("pooler") for name in info["missing_keys"])
    encoder.save_pretrained(tmp_path / "encoder")
    again, info = TASKS["classes"][0].from_pretrained(tmp_path / "encoder", num_labels=5, output_loading_info=True)
    assert all(name.startswith("classifier") for name in info["missing_keys"])
    for name, tensor in again.vit.state_dict().items():
        assert torch.equal(tensor, classifier.vit.state_dict()[name]), name


def test_checkpoint_without_classifier_gives_the_class_token(tmp_path):
    native = native_vit("classes", num_labels=0)
    native.save_pretrained(tmp_path / "native")
    model, info = TASKS["classes"][0].from_pretrained(tmp_path / "native", output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        torch.testing.assert_close(model(IMAGES).logits, native(IMAGES).logits, **TOLERANCE)
    model.save_pretrained(tmp_path / "ours")
    assert not any(TASKS["classes"][1].from_pretrained(tmp_path / "ours", output_loading_info=True)[1].values())


def test_config_of_transformers_vit_loads_without_warnings(tmp_path, caplog):
    ViTConfig(image_size=[8, 12], patch_size=4, num_labels=7).save_pretrained(tmp_path)
    config = TASKS["model"][0].config_class.from_pretrained(tmp_path)
    assert (config.model_type, config.grid, config.num_labels) == ("vanilla_vit", (2, 3), 7)
    assert not caplog.records


def test_golden_checkpoint_is_unchanged():
    expected = json.loads((GOLDEN / "expected.json").read_text())
    model = VanillaVitForImageClassification.from_pretrained(GOLDEN)
    for name, images in expected["images"].items():
        with torch.no_grad():
            logits = model(torch.tensor(images), interpolate_pos_encoding=name == "other").logits
        torch.testing.assert_close(logits, torch.tensor(expected["logits"][name]), rtol=0, atol=expected["tolerance"])
