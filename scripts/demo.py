#!/usr/bin/env python
"""Train a small Transformer to read dates as people write them, and look at the results. Takes about two minutes.

    python scripts/demo.py --output_dir demo_output

The corpus ("Tuesday, the 3rd of March 1998" -> "1998-03-03") is generated, a tokenizer is trained on it, and
transformers' own Seq2SeqTrainer trains the model. Then a second Python process loads the model with
AutoModelForSeq2SeqLM and must give the same translations.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("demo")

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    ProgressCallback,
    Seq2SeqTrainer,
    set_seed,
)

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.command_line.report import ReadableProgress
from hf_vanilla.data import date_corpus, tokenize_parallel_dataset
from hf_vanilla.data.tokenization import train_tokenizer
from hf_vanilla.training import StopOnNaNCallback, paper_training_arguments
from hf_vanilla.visualization import plot_attention, plot_training_curve, readable_tokens


EXPECTED_ACCURACY = 0.99
SHOWN_EXAMPLES = 8


@dataclass
class DemoArguments:
    """Options of the demo."""

    output_dir: str = field(default="demo_output", metadata={"help": "Folder of the model and the pictures."})
    train_size: int = field(default=20_000, metadata={"help": "Number of dates to learn from."})
    test_size: int = field(default=1_000, metadata={"help": "Number of other dates to test with."})
    epochs: int = field(default=8, metadata={"help": "Passes over them."})
    seed: int = field(default=0, metadata={"help": "Seed of the dates, the initial weights and the order."})
    reload_from: str | None = field(
        default=None, metadata={"help": "Only translate standard input with the model in this folder, to a JSON list."}
    )


def build_model(tokenizer) -> VanillaTransformerForConditionalGeneration:
    """Build the paper's model, much smaller."""
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer), d_model=96, d_ff=384, num_heads=4, encoder_layers=2, decoder_layers=2, dropout=0.0
    )
    return VanillaTransformerForConditionalGeneration(config)


def train(model, tokenizer, dataset, arguments: DemoArguments) -> Seq2SeqTrainer:
    """Train with the stock trainer and the paper's optimizer; a linear decay suits so short a run better."""
    training_args = paper_training_arguments(
        model.config,
        arguments.output_dir,
        learning_rate=2e-3,
        lr_scheduler_type="linear",
        warmup_steps=100,
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=128,
        train_sampling_strategy="group_by_length",
        logging_steps=0.02,
        save_strategy="no",
        dataloader_pin_memory=torch.accelerator.is_available(),
        seed=arguments.seed,
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        callbacks=[StopOnNaNCallback()],
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ReadableProgress)
    trainer.train()
    return trainer


@torch.no_grad()
def translate(model, tokenizer, texts: list[str], batch_size: int = 250) -> list[str]:
    """Translate greedily."""
    model.eval()
    translations = []
    for start in range(0, len(texts), batch_size):
        batch = tokenizer(texts[start : start + batch_size], padding=True, return_tensors="pt").to(model.device)
        translations += tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)
    return translations


def translate_in_new_process(folder: Path, texts: list[str]) -> list[str]:
    """Load the folder and translate in a new Python process."""
    command = [sys.executable, __file__, "--reload_from", str(folder)]
    result = subprocess.run(command, input="\n".join(texts), capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


@torch.no_grad()
def draw_attention(model, tokenizer, text: str):
    """Draw the attention of each target token to the source."""
    source = tokenizer(text, return_tensors="pt").to(model.device)
    target = model.generate(**source)
    model.set_attn_implementation("eager")
    outputs = model(**source, decoder_input_ids=target[:, :-1], output_attentions=True)
    return plot_attention(
        outputs.cross_attentions,
        readable_tokens(tokenizer, source["input_ids"][0]),
        readable_tokens(tokenizer, target[0, 1:]),
        title=f"{text}  →  {tokenizer.decode(target[0], skip_special_tokens=True)}",
    )


def save_side_by_side(figures, path: Path, dpi: int = 100) -> None:
    """Save figures in one picture, of the height of the highest."""
    import matplotlib.image
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    pictures = []
    for figure in figures:
        figure.set_dpi(dpi)
        figure.canvas = FigureCanvasAgg(figure)
        figure.canvas.draw()
        pictures.append(np.asarray(figure.canvas.buffer_rgba()))
    height = max(len(picture) for picture in pictures)
    margins = [divmod(height - len(picture), 2) for picture in pictures]
    padded = [
        np.pad(picture, ((half, half + odd), (0, 0), (0, 0)), constant_values=255)
        for picture, (half, odd) in zip(pictures, margins, strict=True)
    ]
    matplotlib.image.imsave(path, np.concatenate(padded, axis=1))


def show_results(test, translations: list[str]) -> float:
    """Print a few examples, and return the share of exact matches."""
    for source, expected, got in list(zip(test["source"], test["target"], translations, strict=True))[:SHOWN_EXAMPLES]:
        print(f"  {source:<40} {got}{'' if got == expected else f'   (expected {expected})'}")
    right = sum(got == expected for got, expected in zip(translations, test["target"], strict=True))
    print(f"\n{right} of {len(translations)} unseen dates are right: {right / len(translations):.1%}")
    return right / len(translations)


def main() -> None:
    """Generate the corpus, train, show results, save, reload and draw."""
    (arguments,) = parse_arguments(DemoArguments, description=__doc__)
    torch.set_num_threads(1)  # two are half as fast again on a quiet machine, and far slower where a core is busy
    if arguments.reload_from is not None:
        model = AutoModelForSeq2SeqLM.from_pretrained(arguments.reload_from)
        tokenizer = AutoTokenizer.from_pretrained(arguments.reload_from)
        print(json.dumps(translate(model, tokenizer, sys.stdin.read().split("\n"))))
        return

    set_seed(arguments.seed)
    output_dir = Path(arguments.output_dir)
    pairs = date_corpus(arguments.train_size, seed=arguments.seed)
    test = date_corpus(arguments.test_size, seed=arguments.seed + 1, exclude=pairs["source"])
    tokenizer = train_tokenizer([*pairs["source"], *pairs["target"]], vocab_size=400, show_progress=False)
    model = build_model(tokenizer)
    print(f"\nTraining {model.num_parameters():,} parameters on {len(pairs):,} dates.\n")
    trainer = train(model, tokenizer, tokenize_parallel_dataset(pairs, tokenizer), arguments)

    print("\nUnseen dates:\n")
    translations = translate(model, tokenizer, test["source"])
    accuracy = show_results(test, translations)

    trainer.save_model()
    same = translate_in_new_process(output_dir, test["source"]) == translations
    print(f"Saved to {output_dir}/; a new process that loads it gives {'the same' if same else 'OTHER'} translations.")
    trainer.save_state()
    attention = draw_attention(model, tokenizer, "Tuesday, the 3rd of March 1998")
    curve = plot_training_curve(trainer.state.log_history, title="training")
    save_side_by_side([attention, curve], output_dir / "demo.png")
    print(f"Picture: {output_dir / 'demo.png'}; hf-vanilla plot draws others.")
    if not same or accuracy < EXPECTED_ACCURACY:
        sys.exit(
            f"Expected the same translations and at least {EXPECTED_ACCURACY:.0%} of the dates right; with fewer "
            "dates or epochs than the defaults it learns less."
        )


if __name__ == "__main__":
    sys.exit(run(main))
