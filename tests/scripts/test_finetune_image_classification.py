"""Classifiers of images, trained from nothing and fine-tuned on folders; and bad input."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from script_runner import run, run_here
from transformers import pipeline

import hf_vanilla  # noqa: F401  (registers the models)


SIZES = [
    "--preset", "Ti/16", "--image_size", "8", "--patch_size", "4", "--hidden_size", "16", "--num_hidden_layers", "1",
    "--num_attention_heads", "4", "--intermediate_size", "24", "--initializer_range", "0.2",
]  # fmt: skip
OPTIONS = [
    "--num_train_epochs", "6", "--learning_rate", "0.01", "--per_device_train_batch_size", "8",
    "--disable_tqdm", "true", "--use_cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Folders of dark and bright pictures."""
    folder, generator = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 6)):
        for name, brightness in (("dark", 40), ("bright", 200)):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(brightness + generator.normal(0, 30, (10, 14)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


def command(pictures, output, *options):
    return [
        "finetune_image_classification.py", "--train_file", pictures / "train", "--validation_file",
        pictures / "val", *OPTIONS, "--results_file", output / "r.json", "--output_dir", output, *options,
    ]  # fmt: skip


def test_model_from_nothing_learns_and_is_fine_tuned(pictures, tmp_path):
    finished = run(*command(pictures, tmp_path / "new", *SIZES, "--random_crop", "0.5", "--random_flip"))
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "new" / "r.json").read_text())["summary"]["validation"]["median"] == 1.0
    model = tmp_path / "new" / "seed-42"
    classify = pipeline("image-classification", model=str(model))
    for name in ("dark", "bright"):
        assert classify(str(pictures / "val" / name / "0.png"))[0]["label"] == name
    again = run(*command(pictures, tmp_path / "new", *SIZES, "--random_crop", "0.5", "--random_flip"))
    assert "Seed 42 is done" in again.stderr + again.stdout
    tuned = run(*command(pictures, tmp_path / "tuned", "--model_name_or_path", model, "--max_steps", "2"))
    assert tuned.returncode == 0, tuned.stderr
    assert json.loads((tmp_path / "tuned" / "r.json").read_text())["summary"]["validation"]["median"] == 1.0
    sizes = json.loads((tmp_path / "tuned" / "seed-42" / "config.json").read_text())
    assert (sizes["image_size"], sizes["hidden_size"], sizes["id2label"]) == (8, 16, {"0": "bright", "1": "dark"})


def test_random_crops_are_the_same_in_an_epoch_that_is_resumed(pictures, tmp_path):
    def train():
        options = [
            *SIZES,
            "--random_crop",
            "0.3",
            "--random_flip",
            "--max_steps",
            "10",
            "--dataloader_drop_last",
            "true",
        ]
        saving = ["--per_device_eval_batch_size", "64", "--save_strategy", "steps", "--save_steps", "4"]
        finished = run(*command(pictures, tmp_path / "run", *options, *saving))
        assert finished.returncode == 0, finished.stderr
        return finished.stderr + finished.stdout, load_file(model / "model.safetensors")

    model = tmp_path / "run" / "seed-42"
    _, weights = train()
    assert json.loads((model / "scores.json").read_text())["validation"]["accuracy"] >= 0.5  # of all images
    for each in ("checkpoint-8", "checkpoint-10"):  # as if it had been killed in the first epoch, which has 6 updates
        shutil.rmtree(model / each)
    (model / "scores.json").unlink()
    said, resumed = train()
    assert f"{model}/checkpoint-4" in said
    assert all(tensor.equal(resumed[name]) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Pass either `model_name_or_path` or `preset`"),
        (
            [*SIZES, "--test_file", "nowhere"],
            "`test_file` must be an existing folder or file, but there is no nowhere",
        ),
        ([*SIZES, "--patch_size", "3"], "`image_size` (8) must be a multiple of `patch_size` (3)"),
        ([*SIZES, "--num_channels", "2"], "`num_channels` must be 1 (grey) or 3 (colours), got 2"),
        ([*SIZES, "--preset", "M/16"], "`name` must be one of B/16"),
        (["--model_name_or_path", ".", "--image_size", "8"], "`image_size` is for new models, which need a `preset`"),
        ([*SIZES, "--random_crop", "0"], "`random_crop` must be above 0 and at most 1, got 0.0"),
        ([*SIZES, "--remove_unused_columns", "True"], "`remove_unused_columns` must be off"),
    ],
    ids=["model", "test", "patch", "channels", "preset", "size of a checkpoint", "crop", "columns"],
)
def test_bad_options_are_explained(pictures, tmp_path, options, message, monkeypatch, capsys):
    assert run_here(monkeypatch, *command(pictures, tmp_path / "run", *options)) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # by datasets, until the error is handled
def test_truncated_picture_is_named(pictures, tmp_path, monkeypatch, capsys):
    for name in ("dark", "bright"):
        (tmp_path / "test" / name).mkdir(parents=True)
        content = (pictures / "val" / name / "0.png").read_bytes()
        (tmp_path / "test" / name / "0.png").write_bytes(content[: len(content) // 2])
    options = [*SIZES, "--max_steps", "1", "--train_file", tmp_path / "test"]
    assert run_here(monkeypatch, *command(pictures, tmp_path / "run", *options)) == 1
    assert "0.png' must be an image that Pillow can read to its end" in capsys.readouterr().err
