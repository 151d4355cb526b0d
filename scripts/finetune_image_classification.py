#!/usr/bin/env python
r"""Fine-tune ViT to classify images, from a checkpoint or from nothing.

A folder with one folder of images for each class:

    python scripts/finetune_image_classification.py --model_name_or_path google/vit-base-patch16-224-in21k \
        --train_file pictures/train --validation_file pictures/val --random_crop 0.5 --random_flip \
        --output_dir runs/pictures

Or a file with columns of images, or of their paths, and of labels (.parquet, .json, .jsonl, .csv, .tsv), or a data set
of the Hub:

    python scripts/finetune_image_classification.py --preset S/16 --image_size 32 --patch_size 4 \
        --dataset_name uoft-cs/cifar10 --validation_split test \
        --num_train_epochs 100 --learning_rate 5e-4 --output_dir runs/cifar10

A model from nothing has a --preset and what the options of its size change. Images become colours, or with
--num_channels 1 grey. Without validation data a share of the training data is held out. With --seeds the training is
repeated, and the median, best and worst accuracy are printed. --from_scratch takes the size of a checkpoint and random
weights. Run the same command again to resume an interrupted one. All options can also be in a JSON or YAML file.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("finetune_image_classification")

import logging
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

from hf_vanilla import VanillaVitConfig, VanillaVitForImageClassification
from hf_vanilla.command_line.checks import check_output_dir, explained_loading
from hf_vanilla.command_line.finetuning import (
    Table,
    TestedTaskArguments,
    build_model,
    find_columns,
    load_splits,
    parse_task_arguments,
    train_and_report,
    with_validation,
)
from hf_vanilla.command_line.options import run
from hf_vanilla.command_line.splits import load_hub_splits
from hf_vanilla.data.images import AugmentedImages, ImageTransform, build_image_processor, load_images
from hf_vanilla.data.labelled import Labels, encode_labels
from hf_vanilla.metrics import ClassificationMetrics
from hf_vanilla.training import FinetuningArguments, FinetuningTask, VerifiedCheckpointTrainer
from hf_vanilla.training.finetuning import EpochOfDataCallback


logger = logging.getLogger("finetune_image_classification")

# Usual names of the columns.
COLUMNS = {"image_column": ("image", "img", "picture"), "label_column": ("label", "labels", "fine_label")}
# Options of a new model's size.
SIZES = (
    "image_size",
    "patch_size",
    "num_channels",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_dropout_prob",
    "initializer_range",
)


@dataclass
class TaskArguments(TestedTaskArguments):
    """The model, the data and the seeds."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Pre-trained ViT with its image processor: a folder or a name on the Hub."}
    )
    from_scratch: bool = field(default=False, metadata={"help": "Use only its config, with random weights."})
    train_file: str | None = field(default=None, metadata={"help": "Folder or file to train on, as above."})
    image_column: str | None = field(
        default=None, metadata={"help": f"Column of the images. Default: {', '.join(COLUMNS['image_column'])}."}
    )
    label_column: str | None = field(
        default=None, metadata={"help": f"Column of the labels. Default: {', '.join(COLUMNS['label_column'])}."}
    )
    preset: str | None = field(
        default=None, metadata={"help": f"Size of a new model: {', '.join(VanillaVitConfig.preset_names())}."}
    )
    image_size: int | None = field(
        default=None, metadata={"help": "Height and width of its images in pixels. Default: the preset's, also below."}
    )
    patch_size: int | None = field(default=None, metadata={"help": "Height and width of a patch in pixels."})
    num_channels: int | None = field(
        default=None,
        metadata={
            "help": "3 for colours, 1 for grey. transformers' pipeline makes colours of all pictures and fails with "
            "1: use the processor and the model, as the model's card shows."
        },
    )
    hidden_size: int | None = field(default=None, metadata={"help": "Width of the model."})
    num_hidden_layers: int | None = field(default=None, metadata={"help": "Number of layers."})
    num_attention_heads: int | None = field(default=None, metadata={"help": "Number of attention heads."})
    intermediate_size: int | None = field(default=None, metadata={"help": "Inner width of the feed-forward networks."})
    hidden_dropout_prob: float | None = field(default=None, metadata={"help": "Dropout rate."})
    initializer_range: float | None = field(default=None, metadata={"help": "Spread of the initial weights."})
    random_crop: float = field(
        default=1.0, metadata={"help": "Smallest share of an image that a random crop keeps, in training; 1 for all."}
    )
    random_flip: bool = field(default=False, metadata={"help": "Mirror images at random, in training."})

    def __post_init__(self):
        super().__post_init__()
        if (self.model_name_or_path is None) == (self.preset is None):
            raise ValueError("Pass either `model_name_or_path` or `preset`.")
        for name in ("train_file", "validation_file", "test_file"):
            path = getattr(self, name)
            if path is not None and not os.path.exists(path):
                raise ValueError(f"`{name}` must be an existing folder or file, but there is no {path}.")
        if not 0 < self.random_crop <= 1:
            raise ValueError(f"`random_crop` must be above 0 and at most 1, got {self.random_crop}.")
        given = [name for name in SIZES if getattr(self, name) is not None]
        if given and self.preset is None:
            raise ValueError(f"`{given[0]}` is for new models, which need a `preset`; a checkpoint has its own sizes.")

    def required(self):
        """Return the names of the options that must be given."""
        return ()


@dataclass
class ImageTrainingArguments(FinetuningArguments):
    """The training."""

    learning_rate: float = field(
        default=3e-5, metadata={"help": "Peak learning rate; a model from nothing needs more, such as 5e-4."}
    )
    num_train_epochs: float = field(
        default=3.0, metadata={"help": "Epochs; a model from nothing needs more, such as 100."}
    )
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Batch size."})
    train_sampling_strategy: str = field(default="random", metadata={"help": "Order of the images."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must be off: images are processed when they are needed."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.remove_unused_columns:
            raise ValueError(
                "`remove_unused_columns` must be off, as images are processed when they are needed; leave it out."
            )


def load_all(arguments: TaskArguments) -> dict[str, Dataset]:
    """Load the splits, with columns `image` and `label`."""
    if arguments.dataset_name is not None:
        loaded = load_hub_splits(arguments)
        tables = {name: Table(rows, f"{arguments.dataset_name} ({name})") for name, rows in loaded.items()}
        splits = load_splits(tables, find_columns(arguments, tables["train"], COLUMNS))
    else:
        splits = {}
    for name in ("train", "validation", "test"):
        path = getattr(arguments, f"{name}_file")
        if path is not None:
            is_folder = os.path.isdir(path)
            columns = {} if is_folder else find_columns(arguments, Table(path, path), COLUMNS)
            splits[name] = load_images(path, **columns)
    return splits


def load_and_encode(arguments: TaskArguments) -> tuple[dict[str, Dataset], Labels]:
    """Load the images, replace the labels by what the model's loss takes, and return their meaning, too."""
    splits = load_all(arguments)
    labels, encoded = encode_labels(splits)
    data = {}
    for name, rows in splits.items():
        images = rows.select_columns(["image"]).cast_column("image", Image(decode=False))  # its path is for messages
        data[name] = images.add_column("labels", encoded[name])
    return with_validation(data, arguments), labels


def new_config(arguments: TaskArguments, **fields: Any) -> VanillaVitConfig:
    """Build the config of a new model."""
    sizes = {name: getattr(arguments, name) for name in SIZES if getattr(arguments, name) is not None}
    return VanillaVitConfig.preset(str(arguments.preset), **sizes, **fields)


def prepare(arguments: TaskArguments, training_args: FinetuningArguments) -> FinetuningTask:
    """Load the data, and define how to make the trainer."""
    check_output_dir(training_args.output_dir)

    # 1. the model's config and image processor
    if arguments.preset is not None:
        config = new_config(arguments)
        processor = build_image_processor(config)
    else:
        with explained_loading("model_name_or_path", arguments.model_name_or_path):
            config = AutoConfig.from_pretrained(arguments.model_name_or_path)
            processor = AutoImageProcessor.from_pretrained(arguments.model_name_or_path)
    channels = getattr(config, "num_channels", 3)
    unchanged = ImageTransform(processor, channels)
    augmenting = ImageTransform(processor, channels, min_crop=arguments.random_crop, flip=arguments.random_flip)

    # 2. data
    encoded, labels = load_and_encode(arguments)
    held_out = {name: split.with_transform(unchanged) for name, split in encoded.items() if name != "train"}
    scores = {"regression": "spearman", "multi_label_classification": "f1_micro"}
    named = ", ".join(map(repr, labels.names[:10]))
    logger.info(f"{labels.problem_type}, labels: {named}; {len(encoded['train']):,} training images")

    # 3. model and trainer
    def make_model():
        if arguments.preset is not None:
            return VanillaVitForImageClassification(new_config(arguments, **labels.config_fields()))
        return build_model(AutoModelForImageClassification, arguments, **labels.config_fields())

    def make_trainer(args: FinetuningArguments) -> VerifiedCheckpointTrainer:
        return VerifiedCheckpointTrainer(
            args=args,
            model_init=make_model,
            train_dataset=AugmentedImages(encoded["train"], augmenting, args.seed),
            eval_dataset=held_out["validation"],
            processing_class=processor,
            compute_metrics=ClassificationMetrics(labels.problem_type),
            callbacks=[EpochOfDataCallback()],
        )

    return FinetuningTask(make_trainer, held_out, scores.get(labels.problem_type, "accuracy"))


def main() -> None:
    """Prepare the task, train once with each seed, report."""
    arguments, training_args = parse_task_arguments(
        TaskArguments, training_arguments=ImageTrainingArguments, description=__doc__
    )
    train_and_report(prepare(arguments, training_args), arguments, training_args)


if __name__ == "__main__":
    sys.exit(run(main))
