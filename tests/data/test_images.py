"""Labelled images from folders and tables, and what a model is given of them."""

import json
import sys

import numpy as np
import pytest
import torch
from datasets import Dataset, Image
from PIL import Image as Pictures
from torch.utils.data import DataLoader

from hf_vanilla import VanillaVitConfig
from hf_vanilla.data.images import AugmentedImages, ImageTransform, build_image_processor, load_images


PIXELS = np.arange(6 * 10 * 3, dtype=np.uint8).reshape(6, 10, 3)
PROCESSOR = build_image_processor(VanillaVitConfig(image_size=(6, 10), patch_size=2))


@pytest.fixture
def folder(tmp_path):
    """A folder of three pictures of two classes, and other files."""
    for name in ("cat/2.png", "cat/1.jpg", "bird/nested/3.PNG"):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Pictures.fromarray(PIXELS).save(path)
    (tmp_path / "pictures" / "readme.txt").write_text("none")
    (tmp_path / "pictures" / "cat" / "notes.txt").write_text("none")
    return tmp_path / "pictures"


def test_names_of_folders_are_labels(folder):
    rows = load_images(folder)
    assert rows["label"][:] == ["bird", "cat", "cat"]
    assert np.array_equal(np.asarray(rows[0]["image"]), PIXELS)


@pytest.mark.parametrize("kind", ["paths", "paths in parquet", "parquet"])
def test_tables_have_images_or_their_paths(folder, kind):
    if kind == "paths":
        path = folder / "rows.jsonl"
        path.write_text(json.dumps({"file": "cat/2.png", "animal": "cat"}) + "\n")
    elif kind == "paths in parquet":
        path = folder / "rows.parquet"
        Dataset.from_dict({"file": ["cat/2.png"], "animal": ["cat"]}).to_parquet(path)
    else:
        path = folder / "rows.parquet"
        rows = Dataset.from_dict({"file": [str(folder / "cat/2.png")], "animal": ["cat"]}).cast_column("file", Image())
        rows = rows.map(lambda row: {"file": row["file"]})  # holds bytes in place of a path
        rows.to_parquet(path)
    (row,) = load_images(path, "file", "animal")
    assert (np.asarray(row["image"]).tolist(), row["label"]) == (PIXELS.tolist(), "cat")


def test_bad_files_are_named_in_the_error(folder):
    (folder / "cat" / "3.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"pictures, row 4: .*3\.png.* must be an image that Pillow can read"):
        load_images(folder)
    (folder / "dog").mkdir()
    with pytest.raises(ValueError, match=r"dog must have at least one image, but has none"):
        load_images(folder)
    with pytest.raises(ValueError, match=r"nested must have one folder of images for each class, but has no folders"):
        load_images(folder / "bird" / "nested")
    for name in ("cat/9.png", "cat/\0"):
        (folder / "rows.jsonl").write_text(json.dumps({"image": name, "label": 1}) + "\n")
        with pytest.raises(ValueError, match=r"rows\.jsonl.*cat/(9\.png|\\x00).* must be an image"):
            load_images(folder / "rows.jsonl")


def test_picture_of_too_many_pixels_is_named(folder, monkeypatch):
    monkeypatch.setattr(Pictures, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(ValueError, match=r"pictures, row 1: .*3\.PNG.* must be an image .*decompression bomb"):
        load_images(folder)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # by datasets, until the error is handled
@pytest.mark.parametrize("has_path", [True, False], ids=["file", "bytes"])
def test_truncated_picture_is_named_when_it_is_decoded(folder, has_path):
    path = folder / "cat" / "2.png"
    path.write_bytes(path.read_bytes()[:-30])
    rows = load_images(folder).cast_column("image", Image(decode=False))
    given = rows[2]["image"] if has_path else {"path": None, "bytes": path.read_bytes()}
    transform = ImageTransform(PROCESSOR)
    named = r".*cat/2\.png'" if has_path else "the image"
    with pytest.raises(ValueError, match=named + " must be an image that Pillow can read to its end: .*truncated"):
        transform({"image": [given]})
    with pytest.raises(ValueError, match="the image must be an image that Pillow can read to its end: .*truncated"):
        transform({"image": [Pictures.open(path)]})
    (decoded,) = transform({"image": [rows[0]["image"]]})["pixel_values"]
    assert torch.equal(decoded, transform({"image": [load_images(folder)[0]["image"]]})["pixel_values"][0])


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_images_of_more_than_8_bits_are_refused(folder, dtype):
    picture = Pictures.fromarray(np.full((6, 10), 4000, dtype))
    with pytest.raises(ValueError, match="the image must have 8 bits for each channel, but has more"):
        ImageTransform(PROCESSOR)({"image": [picture]})
    picture.save(folder / "bird" / "4.tiff")
    with pytest.raises(ValueError, match=r"pictures, row 1: .*4\.tiff.* must have 8 bits for each channel"):
        load_images(folder)


@pytest.mark.parametrize("channels", [1, 3], ids=["grey", "colours"])
def test_pixels_are_scaled_with_one_mean_for_each_channel(channels):
    processor = build_image_processor(VanillaVitConfig(image_size=(6, 10), patch_size=2, num_channels=channels))
    picture = Pictures.fromarray(PIXELS)
    rows = {"image": [picture, picture.convert("L")], "labels": [4, 0]}
    given = ImageTransform(processor, channels)(rows)
    assert given["labels"] == [4, 0]
    assert len(processor.image_mean) == len(processor.image_std) == channels
    expected = np.asarray(picture.convert("L" if channels == 1 else "RGB"), dtype=np.float32)
    expected = torch.from_numpy(expected.reshape(6, 10, channels)).permute(2, 0, 1) / 127.5 - 1
    # float32's rounding of values of size 1
    torch.testing.assert_close(given["pixel_values"][0], expected, rtol=0, atol=1e-6)
    assert given["pixel_values"][1].shape == (channels, 6, 10)


def test_augmentation_crops_and_mirrors_at_random():
    rows = {"image": [Pictures.fromarray(PIXELS)]}
    (plain,) = ImageTransform(PROCESSOR)(rows)["pixel_values"]
    flip = ImageTransform(PROCESSOR, flip=True)
    flipped = [flip(rows)["pixel_values"][0] for _ in range(40)]
    mirrored = sum(torch.equal(each, plain.flip(2)) for each in flipped)
    assert mirrored + sum(torch.equal(each, plain) for each in flipped) == 40
    assert 8 < mirrored < 32  # 20 expected; outside with a probability below 1e-3
    crop = ImageTransform(PROCESSOR, min_crop=0.3)
    crops = [crop(rows)["pixel_values"][0] for _ in range(5)]
    assert len({float(each.sum()) for each in crops}) > 1
    torch.manual_seed(3)
    first = crop(rows)["pixel_values"][0]
    torch.manual_seed(3)
    assert torch.equal(crop(rows)["pixel_values"][0], first)
    sizes = [crop.augment(rows["image"][0]).size for _ in range(50)]
    # whole pixels round the share of 0.3 down
    assert all(width * height >= 0.3 * 60 - 8 for width, height in sizes)
    assert min(sizes) < (10, 6)
    long = Pictures.new("L", (400, 40))
    for size in ((400, 40), (40, 400)):
        sizes = [ImageTransform(PROCESSOR, min_crop=0.8).augment(long.resize(size)).size for _ in range(50)]
        assert all(width * height >= 0.8 * 16_000 - 220 for width, height in sizes)


def test_changes_depend_on_seed_epoch_and_row_alone():
    rows = Dataset.from_dict({"image": [Pictures.fromarray(PIXELS)] * 3, "labels": [4, 0, 7]})
    dataset = AugmentedImages(rows, ImageTransform(PROCESSOR, min_crop=0.3), seed=5)
    assert len(dataset) == 3
    first, second = dataset[1], dataset[2]
    assert first["labels"] == 0
    assert not torch.equal(first["pixel_values"], second["pixel_values"])
    dataset.set_epoch(1)
    assert not torch.equal(dataset[1]["pixel_values"], first["pixel_values"])
    again = AugmentedImages(rows, ImageTransform(PROCESSOR, min_crop=0.3), seed=5)
    assert torch.equal(again[1]["pixel_values"], first["pixel_values"])


@pytest.mark.skipif(sys.platform == "win32", reason="workers there import this file anew, which takes long")
def test_workers_that_outlive_an_epoch_learn_the_next_one():
    rows = Dataset.from_dict({"image": [Pictures.fromarray(PIXELS)] * 3, "labels": [4, 0, 7]})
    dataset = AugmentedImages(rows, ImageTransform(PROCESSOR, min_crop=0.3), seed=5)
    loader = DataLoader(dataset, batch_size=3, num_workers=1, persistent_workers=True)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        (batch,) = loader
        expected = torch.stack([dataset[row]["pixel_values"] for row in range(3)])
        assert torch.equal(batch["pixel_values"], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_channels": 4}, r"`num_channels` must be 1 \(grey\) or 3"),
        ({"min_crop": 0.0}, r"`min_crop` must be above 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ImageTransform(PROCESSOR, **options)
