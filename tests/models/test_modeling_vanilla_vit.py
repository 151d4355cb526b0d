"""ViT's config and presets, the class token's fast path, bad input, training, pipelines and generic features."""

import json

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from huggingface_hub.errors import StrictDataclassError
from packaging.version import parse
from peft import LoraConfig, get_peft_model
from PIL import Image
from tiny_vits import IMAGES, OTHER_SIZE, SIZES, TASKS, tiny_vit
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTImageProcessorPil,
    pipeline,
)
from transformers.utils import is_torchvision_available

from hf_vanilla import VanillaVitConfig, VanillaVitForImageClassification, VanillaVitModel


# Values of size 1 in float32 (2 ** -24), after some dozen operations that add in another order on each side.
TOLERANCE = dict(rtol=1e-5, atol=5e-6)
# With the classifier of 1,000 classes, without a pooler, at 224 x 224 pixels. Dosovitskiy et al. 2020, Table 1, rounds
# base, large and huge to 86, 307 and 632 million.
PARAMETERS = {
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
    "S/16": 22_050_664,
    "S/32": 22_878_952,
    "Ti/16": 5_717_416,
}
LABELS = torch.tensor([4, 1])
# transformers 5.17 loads image processors with torchvision alone.
NEEDS_IMAGE_PROCESSOR = pytest.mark.skipif(
    parse(transformers.__version__) < parse("5.23") and not is_torchvision_available(), reason="needs torchvision"
)


def results(model, inputs):
    """Compute outputs and gradients."""
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    return {**outputs, **{name: parameter.grad for name, parameter in model.named_parameters()}}


def test_fields_and_defaults_are_those_of_vit_config():
    ours, theirs = VanillaVitConfig().to_dict(), ViTConfig().to_dict()
    assert (ours.pop("model_type"), theirs.pop("model_type")) == ("vanilla_vit", "vit")
    assert ours == theirs


def test_parameter_counts_of_all_presets_are_exact():
    counts = {}
    for name in VanillaVitConfig.preset_names():
        with torch.device("meta"):
            model = VanillaVitForImageClassification(VanillaVitConfig.preset(name, num_labels=1000))
        counts[name] = model.num_parameters()
    assert counts == PARAMETERS


def test_config_round_trip(tmp_path):
    config = VanillaVitConfig.preset("S/16", image_size=(32, 48), num_channels=1, num_labels=7)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert not {"norm_position", "activation_dropout", "attention_scale", "d_k", "d_v", "grid"} & saved.keys()
    again = AutoConfig.from_pretrained(tmp_path)
    assert (type(again), again.grid, again.num_channels) == (VanillaVitConfig, (2, 3), 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 225}, r"`image_size` \(225\) must be a multiple of `patch_size` \(16\)"),
        ({"image_size": (224, 100)}, r"`image_size` \(\(224, 100\)\) must be a multiple of `patch_size`"),
        ({"image_size": [224, 224, 3]}, r"`image_size` must be a number of pixels of at least 1, or two of them"),
        ({"patch_size": 0}, r"`patch_size` must be a number of pixels of at least 1.*got 0"),
        ({"num_channels": 0}, r"`num_channels` must be at least 1, got 0"),
        ({"num_channels": 2**40}, "The sizes make at least 2.2e[+]17 parameters"),
        ({"image_size": 2**40}, "The sizes make at least 3.6e[+]24 parameters"),
        ({"qkv_bias": False}, r"`qkv_bias` must be true"),
        ({"pooler_act": "tan"}, r"`pooler_act` must be a name of transformers' ACT2FN.*'tan'"),
        ({"hidden_dropout_prob": 1.0}, r"`hidden_dropout_prob` must be in \[0, 1\), got 1.0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_fields_are_named_in_the_error(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        VanillaVitConfig(**fields)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match=r"`hidden_size` \(32\) must be divisible by `num_attention_heads` \(12\)"):
        VanillaVitModel(VanillaVitConfig(hidden_size=32))


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"pixel_values": IMAGES[:, :1]}, ValueError, r"shape \(batch, channels = 2, height, width\), got \(2, 1, 12"),
        ({"pixel_values": IMAGES[0]}, ValueError, r"`pixel_values` must have shape .*, got \(2, 12, 12\)"),
        ({"pixel_values": OTHER_SIZE}, ValueError, r"`image_size`, \(12, 12\), got \(8, 20\).*`interpolate_pos_enc"),
        (
            {"pixel_values": IMAGES[..., :10], "interpolate_pos_encoding": True},
            ValueError,
            r"multiples of `patch_size`, \(4, 4\), got \(12, 10\)",
        ),
        ({"pixel_values": IMAGES.byte()}, TypeError, r"`pixel_values` must be a tensor of floats.*torch.uint8"),
        (
            {"pixel_values": IMAGES, "interpolate_pos_encoding": IMAGES},
            TypeError,
            "`interpolate_pos_encoding` must be",
        ),
        ({"pixel_values": [[0.5]]}, TypeError, r"`pixel_values` must be a tensor of floats.*got list"),
        ({"pixel_values": IMAGES, "labels": torch.tensor([5, 1])}, ValueError, r"`labels` must be in \[0, 5\).*got 5"),
        ({"pixel_values": IMAGES, "labels": LABELS[:1]}, ValueError, r"`labels` must have shape \(2,\), got \(1,\)"),
        (
            {"pixel_values": IMAGES, "bool_masked_pos": torch.ones(2, 9, dtype=torch.bool)},
            ValueError,
            "`bool_masked_pos` must not be given: the model has no mask token",
        ),
        (
            {"pixel_values": IMAGES, "attention_mask": torch.ones(2, 10)},
            ValueError,
            "`attention_mask` must not be given: images have no padding",
        ),
    ],
    ids=[
        "channels",
        "dimensions",
        "size",
        "part of a patch",
        "integers",
        "tensor for a switch",
        "list",
        "label",
        "labels",
        "masked patches",
        "padding",
    ],
)
def test_bad_input_is_named_in_the_error(inputs, error, message):
    with pytest.raises(error, match=message):
        tiny_vit()(**inputs)


def test_masks_of_transformers_may_be_unset():
    model = tiny_vit()
    assert torch.equal(model(IMAGES, attention_mask=None, bool_masked_pos=None).logits, model(IMAGES).logits)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("task", ["classes", "regression", "multi-label"])
def test_class_token_alone_gives_the_same_results(task, checkpointing, fed_positions, no_shortcuts):
    model, inputs = tiny_vit(task).train(), {"pixel_values": IMAGES, **TASKS[task][3]}
    if checkpointing:
        model.gradient_checkpointing_enable()
    actual = results(model, inputs)
    assert fed_positions[:2] == [2 * 10, 2]
    no_shortcuts()
    expected = results(model, inputs)
    assert fed_positions[-1] == 2 * 10
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_outputs_of_each_layer_have_all_patches(name, fed_positions):
    model = tiny_vit(attn_implementation="eager")
    plain = model(IMAGES).logits
    outputs = model(IMAGES, **{name: True})
    assert fed_positions[-2:] == [20, 20]
    torch.testing.assert_close(outputs.logits, plain, **TOLERANCE)
    shapes = [tuple(each.shape) for each in outputs["attentions" if "attentions" in name else "hidden_states"]]
    assert shapes == ([(2, 3, 10, 10)] * 2 if "attentions" in name else [(2, 10, 12)] * 3)


def test_config_may_ask_for_tuples():
    model = tiny_vit("classes", return_dict=False).eval()
    assert torch.equal(model(IMAGES)[0], model(IMAGES, return_dict=True).logits)


def test_accumulated_batches_add_up_to_one():
    model, labels = tiny_vit().train(), torch.tensor([4, -100])
    expected = results(model, {"pixel_values": IMAGES, "labels": LABELS})
    model.zero_grad()
    for row in range(2):
        model(IMAGES[row : row + 1], labels=LABELS[row : row + 1], num_items_in_batch=2).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], **TOLERANCE)
    torch.testing.assert_close(model(IMAGES, labels=labels).loss, model(IMAGES[:1], labels=labels[:1]).loss)


@pytest.mark.parametrize("images", [IMAGES, OTHER_SIZE], ids=["own-size", "interpolated"])
def test_compiled_and_exported_models_have_the_same_logits(images):
    model, options = tiny_vit(), {"interpolate_pos_encoding": images is OTHER_SIZE}
    with torch.no_grad():
        expected = model(images, **options).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")(images, **options).logits
        program = torch.export.export(model, (images,), options).module()
    torch.testing.assert_close(compiled, expected, **TOLERANCE)
    torch.testing.assert_close(program(images, **options).logits, expected, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lora_trains_only_adapters():
    model = get_peft_model(
        tiny_vit(), LoraConfig(target_modules=["qkv_proj", "fc1"], r=2, modules_to_save=["classifier"])
    )
    model(pixel_values=IMAGES, labels=LABELS).loss.backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient
    assert all("lora" in name or "classifier" in name for name in with_gradient)


def saved_with_processor(folder, channels):
    """Save a model and an image processor with one mean and one deviation for each channel."""
    classes = {"id2label": {0: "dark", 1: "bright"}, "label2id": {"dark": 0, "bright": 1}}
    tiny_vit(num_channels=channels, num_labels=2, **classes).save_pretrained(folder)
    processor = ViTImageProcessorPil(
        size={"height": 12, "width": 12}, image_mean=[0.5] * channels, image_std=[0.25] * channels
    )
    processor.save_pretrained(folder)
    return processor


@NEEDS_IMAGE_PROCESSOR
@pytest.mark.parametrize("channels", [1, 3], ids=["grey", "colours"])
def test_pipeline_classifies_images(channels, tmp_path):
    processor = saved_with_processor(tmp_path, channels)
    picture = Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 10, 3)).convert(
        "L" if channels == 1 else "RGB"
    )
    picture.save(tmp_path / "picture.png")
    # transformers' pipeline makes colours of pictures, and takes arrays as they are
    given = np.asarray(picture)[..., None] if channels == 1 else str(tmp_path / "picture.png")
    found = pipeline("image-classification", model=str(tmp_path))(given)
    pixels = processor(picture, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, channels, 12, 12)
    assert type(AutoImageProcessor.from_pretrained(tmp_path)) is ViTImageProcessorPil
    with torch.no_grad():
        expected = AutoModelForImageClassification.from_pretrained(tmp_path)(pixels).logits.softmax(-1)[0]
    assert {each["label"]: each["score"] for each in found} == pytest.approx(
        dict(zip(("dark", "bright"), expected.tolist(), strict=True)), rel=1e-5
    )


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_stock_trainer_learns_and_resumes_bit_equal(tmp_path):
    bright = torch.arange(16) % 2
    images = torch.randn(16, 2, 12, 12) + 2.0 * bright[:, None, None, None]
    rows = Dataset.from_dict({"pixel_values": images.tolist(), "labels": bright.tolist()}).with_format("torch")

    def train(resume=None):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=12, save_steps=6, per_device_train_batch_size=4, learning_rate=0.01,
            logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            tiny_vit(num_labels=2, hidden_dropout_prob=0.1), arguments, train_dataset=rows, eval_dataset=rows
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    trainer = train()
    assert trainer.evaluate()["eval_loss"] < 0.3  # ln 2 = 0.69 without training
    resumed = train(resume=str(tmp_path / "checkpoint-6")).model.state_dict()
    for name, tensor in (
        AutoModelForImageClassification.from_pretrained(tmp_path / "checkpoint-12").state_dict().items()
    ):
        assert torch.equal(tensor, resumed[name]), name


def test_initial_weights_have_the_spread_of_the_config():
    torch.manual_seed(0)
    model = AutoModel.from_config(VanillaVitConfig(**{**SIZES, "hidden_size": 60, "initializer_range": 0.02}))
    drawn = {name: each for name, each in model.named_parameters() if each.dim() > 1}
    assert {"embeddings.cls_token", "embeddings.position_embeddings"} < drawn.keys()
    for name, parameter in drawn.items():
        # a normal distribution that is cut at two standard deviations has 0.88 of its spread; 60 numbers or more
        assert 0.6 < parameter.std() / 0.02 < 1.1, name
        assert parameter.abs().max() <= 0.04, name
    assert not model.embeddings.patch_embeddings["projection"].bias.any()
