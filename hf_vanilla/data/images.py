"""Labelled images for classification, from folders and tables, and what a model is given of them."""

import io
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Image
from transformers import BaseImageProcessor, PreTrainedConfig

from ..models.self_contained import height_and_width
from .files import existing_path, quoted, suffix_of
from .labelled import load_rows


try:
    import PIL.Image
    import PIL.ImageOps
except ImportError as error:
    raise ImportError('Images need more packages: pip install "hf_vanilla[vision]"') from error


# Pillow's name of pictures with so many channels.
MODES = {1: "L", 3: "RGB"}
# Width to height of random crops, from the narrowest to the widest.
CROP_RATIOS = (3 / 4, 4 / 3)


def load_images(
    path: str | os.PathLike[str], image_column: str = "image", label_column: str = "label", **others: str
) -> Dataset:
    """Load labelled images.

    Args:
        path (`str`): A folder with one folder of images for each class, whose name is the label; or a table as
            [`~hf_vanilla.data.labelled.load_rows`] reads it, with images or, relative to its folder, their paths.
        image_column (`str`): Column of a table's images.
        label_column (`str`): Column of its labels.
        **others (`str`): Further columns of a table by their new names.

    Returns:
        `Dataset`: rows with an `image` and a `label`.

    Raises:
        ValueError: if a folder has no classes, a class no images, or a file is no image; it is named. Only the first
            bytes of an image are read, so that a truncated one is found when it is decoded.
        FileNotFoundError: if there is neither such a folder nor such a file.
    """
    if os.path.isdir(path):
        rows = Dataset.from_dict(_read_folder(Path(path)))
    else:
        path = existing_path(path, "path")
        rows = load_rows(path, {"image_column": image_column, "label_column": label_column, **others})
        are_paths = getattr(rows.features["image"], "dtype", None) in ("string", "large_string")
        if are_paths or suffix_of(path) != ".parquet":
            paths = [os.path.join(os.path.dirname(path), str(each)) for each in rows["image"][:]]
            rows = rows.remove_columns("image").add_column("image", paths)
    check_images(rows, str(path))
    return rows.cast_column("image", Image())


def _read_folder(folder: Path) -> dict[str, list[str]]:
    """List the images of a folder's folders, and the names of these as labels."""
    suffixes = PIL.Image.registered_extensions()
    rows: dict[str, list[str]] = {"image": [], "label": []}
    for each in sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith(".")):
        images = sorted(file for file in each.rglob("*") if file.suffix.lower() in suffixes and file.is_file())
        if not images:
            raise ValueError(f"{each} must have at least one image, but has none.")
        rows["image"] += map(str, images)
        rows["label"] += [each.name] * len(images)
    if not rows["image"]:
        raise ValueError(f"{folder} must have one folder of images for each class, but has no folders.")
    return rows


def check_images(rows: Dataset, where: str) -> None:
    """Check from its first bytes that each image is one, of 8 bits for each channel.

    Args:
        rows (`Dataset`): Rows with an `image`: a path, or bytes with or without one.
        where (`str`): Name of the dataset, for messages.

    Raises:
        ValueError: if one can't be opened, or has more bits; its row is named.
    """
    for row, value in enumerate(rows.cast_column("image", Image(decode=False))["image"], start=1):
        place = f"{where}, row {row}: {_name_of(value)}"
        try:
            with PIL.Image.open(io.BytesIO(value["bytes"]) if value["bytes"] is not None else value["path"]) as image:
                mode = image.mode
        except Exception as error:  # Pillow's errors are of many kinds
            raise ValueError(f"{place} must be an image that Pillow can read: {error}.") from None
        _check_depth(mode, place)


def _name_of(value: Any) -> str:
    """Name an image of a dataset by its path, if it has one."""
    return quoted(value["path"]) if isinstance(value, dict) and value["path"] else "the image"


def _decode(value: Any) -> "PIL.Image.Image":
    """Decode an image of Pillow, or what `Image(decode=False)` gives, and turn it upright."""
    name = _name_of(value)
    try:
        opened = value if isinstance(value, PIL.Image.Image) else Image().decode_example(value)
        upright = PIL.ImageOps.exif_transpose(opened)
    except Exception as error:  # Pillow's errors are of many kinds
        raise ValueError(f"{name} must be an image that Pillow can read to its end: {error}.") from None
    _check_depth(upright.mode, name)
    return upright


def _check_depth(mode: str, where: str) -> None:
    """Raise unless an image has 8 bits a channel: of others Pillow makes white what is brighter than 255."""
    if mode.startswith(("I", "F")):
        raise ValueError(
            f"{where} must have 8 bits for each channel, but has more (Pillow's mode {mode}); convert it first."
        )


def build_image_processor(config: PreTrainedConfig) -> BaseImageProcessor:
    """Build transformers' processor of images for a new ViT, which maps brightness from 0 to 255 to -1 to 1.

    Args:
        config (`PreTrainedConfig`): The model's config; `image_size` and `num_channels` count.

    Returns:
        `BaseImageProcessor`: a `ViTImageProcessor` on Pillow, with one mean and one deviation for each channel.
    """
    from transformers import ViTImageProcessorPil

    height, width = height_and_width(config.image_size)
    return ViTImageProcessorPil(
        size={"height": height, "width": width},
        image_mean=[0.5] * config.num_channels,
        image_std=[0.5] * config.num_channels,
    )


class ImageTransform:
    """Turns rows with images into what a classifier is given: `rows.with_transform(ImageTransform(processor))`.

    Args:
        processor (`BaseImageProcessor`): transformers' processor of the model.
        num_channels (`int`): Channels of the model: 3 for colours, 1 for grey.
        min_crop (`float`): Smallest share of an image's area that a random crop keeps, in training, but for rounding
            to whole pixels; 1 crops nothing.
        flip (`bool`): Whether to mirror every second image, at random.

    Raises:
        ValueError: if a value is out of its range.

    Source: crops as of Szegedy et al. 2015, "Going Deeper with Convolutions", section 6, which ViT's authors use.
    """

    def __init__(
        self, processor: BaseImageProcessor, num_channels: int = 3, *, min_crop: float = 1.0, flip: bool = False
    ) -> None:
        if num_channels not in MODES:
            raise ValueError(f"`num_channels` must be 1 (grey) or 3 (colours), got {num_channels}.")
        if not 0 < min_crop <= 1:
            raise ValueError(f"`min_crop` must be above 0 and at most 1, got {min_crop}.")
        self.processor, self.mode, self.min_crop, self.flip = processor, MODES[num_channels], min_crop, flip

    def __call__(
        self, rows: dict[str, Sequence[Any]], generators: Iterable[torch.Generator | None] = itertools.repeat(None)
    ) -> dict[str, Sequence[Any]]:
        """Process a batch of rows.

        Args:
            rows (`dict[str, Sequence]`): Columns; `image` holds Pillow's images, or what
                `datasets.Image(decode=False)` gives, from which an image that can't be read is named.
            generators (`Iterable[torch.Generator]`, *optional*): Source of each image's random numbers; torch's own by
                default.

        Returns:
            `dict[str, Sequence]`: `pixel_values`, tensors of shape `(channels, height, width)`, and the columns but
            for `image`.

        Raises:
            ValueError: if an image has more than 8 bits for a channel, or can't be read, such as a truncated one.
        """
        images = [
            self.augment(_decode(each).convert(self.mode), generator)
            for each, generator in zip(rows["image"], generators, strict=False)
        ]
        pixel_values = list(self.processor(images, return_tensors="pt")["pixel_values"])
        return {"pixel_values": pixel_values, **{name: rows[name] for name in rows if name != "image"}}

    def augment(self, image: "PIL.Image.Image", generator: torch.Generator | None = None) -> "PIL.Image.Image":
        """Crop and mirror an image as random numbers say.

        Args:
            image (`PIL.Image.Image`): The image.
            generator (`torch.Generator`, *optional*): Source of the random numbers; torch's own by default.

        Returns:
            `PIL.Image.Image`: the part, of another size.
        """
        if self.min_crop < 1:
            area, ratio, across, down = torch.rand(4, generator=generator).tolist()
            area = image.width * image.height * (self.min_crop + area * (1 - self.min_crop))
            ratio = math.exp(math.log(CROP_RATIOS[0]) + ratio * math.log(CROP_RATIOS[1] / CROP_RATIOS[0]))
            # The narrowest and the widest part of so large an area that the image has.
            ratio = min(max(ratio, area / image.height**2), image.width**2 / area)
            width = max(1, min(image.width, round(math.sqrt(area * ratio))))
            height = max(1, min(image.height, round(math.sqrt(area / ratio))))
            left, top = round(across * (image.width - width)), round(down * (image.height - height))
            image = image.crop((left, top, left + width, top + height))
        if self.flip and torch.rand((), generator=generator) < 0.5:
            image = PIL.ImageOps.mirror(image)
        return image


class AugmentedImages(torch.utils.data.Dataset):
    """Images whose random changes depend on seed, epoch and row alone.

    So a training that resumes amid an epoch sees the same ones, with any number of workers and processes.

    Args:
        dataset (`Dataset`): Rows with an `image`.
        transform (`ImageTransform`): Changes the images.
        seed (`int`): Seed of the training.
    """

    def __init__(self, dataset: Dataset, transform: ImageTransform, seed: int) -> None:
        self.dataset, self.transform, self.seed = dataset, transform, seed
        self.epoch = torch.tensor(0).share_memory_()  # with workers that outlive an epoch

    def set_epoch(self, epoch: int) -> None:
        """Change the random numbers; [`~hf_vanilla.training.finetuning.EpochOfDataCallback`] calls this.

        Args:
            epoch (`int`): Epoch from 0.
        """
        self.epoch.fill_(epoch)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return what a classifier is given of a row."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """Return what a classifier is given of rows, which are processed as one batch."""
        columns = self.transform(self.dataset[indices], map(self._generator, indices))
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _generator(self, index: int) -> torch.Generator:
        """Return the source of a row's random numbers."""
        state = np.random.SeedSequence((self.seed, int(self.epoch), index)).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(state[0]))
