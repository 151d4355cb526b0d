#!/usr/bin/env python
"""Train a small ViT on handwritten digits from nothing, in minutes on a CPU, and draw what it looks at.

The digits are scikit-learn's, 1,797 scans of 8 x 8 pixels. They are written as a folder of pictures for each digit,
two thirds to train on and one to test. At the end `pipeline("image-classification")` reads some pictures of the test,
and attention.png shows how much the class token attends to each patch of them.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("demo_vit")

import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import (
    AutoModelForImageClassification,
    ProgressCallback,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)
from transformers.utils import logging

from hf_vanilla import VanillaVitConfig, VanillaVitForImageClassification
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.command_line.report import ReadableProgress, write_report
from hf_vanilla.data.images import ImageTransform, build_image_processor, load_images
from hf_vanilla.metrics import ClassificationMetrics
from hf_vanilla.training.finetuning import command_of_process
from hf_vanilla.visualization import plot_image_attention


SHOWN = 6  # pictures of the test that are drawn
SIZES = dict(
    image_size=8,
    patch_size=2,
    hidden_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=384,
    hidden_dropout_prob=0.1,
    initializer_range=0.1,
)


@dataclass
class DemoArguments:
    """Options of the demo."""

    output_dir: str = field(default="demo_vit_output", metadata={"help": "Folder of the model and the pictures."})
    num_train_epochs: float = field(default=40.0, metadata={"help": "Number of epochs."})
    seed: int = field(default=0, metadata={"help": "Seed of the initial weights and the order."})
    results_file: str | None = field(default=None, metadata={"help": "JSON file for scores, versions and machine."})


def write_digits(folder: Path) -> None:
    """Write each digit as a picture: train/3/0017.png. The split is stratified, always the same."""
    digits = load_digits()
    numbers = np.arange(len(digits.target))
    splits = train_test_split(numbers, test_size=1 / 3, stratify=digits.target, random_state=0)
    for name, chosen in zip(("train", "test"), splits, strict=True):
        for number in chosen:
            path = folder / name / str(digits.target[number]) / f"{number:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = 255 - digits.images[number] * (255 / 16)  # 0 to 16, on white paper
            Image.fromarray(pixels.round().astype(np.uint8)).save(path)


def train(model, processor, rows, arguments: DemoArguments) -> Trainer:
    """Train with transformers' own trainer."""
    has_accelerator = torch.accelerator.is_available()
    training_args = TrainingArguments(
        arguments.output_dir,
        num_train_epochs=arguments.num_train_epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        learning_rate=1e-3,
        weight_decay=0.2,
        warmup_steps=0.1,
        use_cpu=not has_accelerator,
        dataloader_pin_memory=has_accelerator,
        remove_unused_columns=False,
        logging_steps=0.05,
        save_strategy="no",
        report_to=[],
        disable_tqdm=False,
        seed=arguments.seed,
    )
    trainer = Trainer(
        model,
        training_args,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=processor,
        compute_metrics=ClassificationMetrics("single_label_classification"),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ReadableProgress)
    trainer.train()
    return trainer


def draw_attention(paths: list[str], arguments: DemoArguments) -> str:
    """Draw how much the class token attends to the patches of some pictures, and return the picture's path."""
    model = AutoModelForImageClassification.from_pretrained(arguments.output_dir, attn_implementation="eager").eval()
    transform = ImageTransform(build_image_processor(model.config), model.config.num_channels)
    images = [Image.open(path) for path in paths]
    pixel_values = torch.stack(list(transform({"image": images})["pixel_values"]))
    with torch.no_grad():
        outputs = model(pixel_values, output_attentions=True)
    titles = [
        f"{Path(path).parent.name}, read as {number}"
        for path, number in zip(paths, outputs.logits.argmax(-1), strict=True)
    ]
    figure = plot_image_attention(outputs.attentions, images, model.config.grid, titles=titles)
    path = str(Path(arguments.output_dir, "attention.png"))
    figure.savefig(path)
    return path


def main() -> None:
    """Write the digits, train, evaluate, save, reload, read pictures and draw attention."""
    (arguments,) = parse_arguments(DemoArguments, description=__doc__)
    logging.set_verbosity_error()
    set_seed(arguments.seed)
    folder = Path(arguments.output_dir, "digits")
    write_digits(folder)
    names = {number: str(number) for number in range(10)}
    config = VanillaVitConfig(**SIZES, id2label=names, label2id={name: number for number, name in names.items()})
    processor = build_image_processor(config)
    rows = {}
    for name in ("train", "test"):
        images = load_images(folder / name)
        labelled = images.select_columns(["image"]).add_column("labels", [int(label) for label in images["label"][:]])
        rows[name] = labelled.with_transform(ImageTransform(processor, config.num_channels))
    model = VanillaVitForImageClassification(config)
    print(f"\nTraining {model.num_parameters():,} parameters on {len(rows['train']):,} pictures of digits.\n")
    trainer = train(model, processor, rows, arguments)

    measured = trainer.evaluate()
    print(f"\n{measured['eval_accuracy']:.1%} of {len(rows['test'])} other pictures are read correctly.\n")
    trainer.save_model()
    trainer.save_state()  # for the curve of a card
    classify = pipeline("image-classification", model=arguments.output_dir, device=-1)
    paths = [str(sorted((folder / "test" / str(digit)).iterdir())[0]) for digit in range(SHOWN)]
    for path in paths:
        guesses = ", ".join(f"{guess['label']} {guess['score']:.0%}" for guess in classify(path, top_k=3))
        print(f"  {path}: {guesses}")
    print(f"\n{draw_attention(paths, arguments)} shows the patches that the class token looks at.")
    print(f"The model is in {arguments.output_dir}/; AutoModelForImageClassification loads it.")
    if arguments.results_file is not None:
        report = {
            "scores": {f"digits, {len(rows['test'])} held-out pictures": {"accuracy": measured["eval_accuracy"]}},
            "parameters": model.num_parameters(),
            "notes": {
                "epochs": f"{arguments.num_train_epochs:g}",
                "updates": f"{trainer.state.global_step:,}",
                "training_pictures": f"{len(rows['train']):,}",
                "training_minutes": round(trainer.state.log_history[-2]["train_runtime"] / 60, 1),
                "training_threads": torch.get_num_threads(),
                "seed": arguments.seed,
            },
            "command": command_of_process(),
        }
        write_report(arguments.results_file, report)


if __name__ == "__main__":
    sys.exit(run(main))
