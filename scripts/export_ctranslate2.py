#!/usr/bin/env python
r"""Export a translator to CTranslate2, whose programs and servers run without torch.

    python scripts/export_ctranslate2.py --model runs/en-de --output_dir runs/en-de-ct2 --quantization int8

The folder has the tokenizer too, for programs such as this one:

    import ctranslate2
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("runs/en-de-ct2")
    translator = ctranslate2.Translator("runs/en-de-ct2")
    source = tokenizer.convert_ids_to_tokens(tokenizer("A dog runs.")["input_ids"])
    [result] = translator.translate_batch([source], beam_size=4, length_penalty=0.6)
    print(tokenizer.decode(tokenizer.convert_tokens_to_ids(result.hypotheses[0])))

CTranslate2's length penalty is length^alpha, --length_penalty_type power of `translate`, and its search ends with the
first beam_size translations; with patience=4 it finds what `translate` finds. Heads whose width is not d_model /
num_heads and some activations, which it lacks, are refused. Needs ctranslate2: pip install "hf_vanilla[export]".
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("export_ctranslate2")

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hf_vanilla.command_line.checks import check_models, check_output_dir, explained_model_loading
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.generation import export_to_ctranslate2, load_translator
from hf_vanilla.training.signals import exit_on_sigterm


@dataclass
class ExportArguments:
    """The model, and how to write it."""

    model: str = field(metadata={"help": "Folder of a trained encoder-decoder, or its name on the Hub."})
    output_dir: str = field(metadata={"help": "Folder to write; it must be new or empty."})
    quantization: Literal[
        "float32", "float16", "bfloat16", "int16", "int8", "int8_float32", "int8_float16", "int8_bfloat16"
    ] = field(
        default="float32",
        metadata={
            "help": "Type of the weights. int8 makes the folder a quarter as large, is faster on most CPUs, and "
            "changes some translations."
        },
    )
    max_length: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens of a source and of a translation, up to 100,000. Default: those of learned "
            "positions, or 1024."
        },
    )


def main() -> None:
    """Export."""
    (arguments,) = parse_arguments(ExportArguments, description=__doc__)
    check_models(model=arguments.model)
    check_output_dir(arguments.output_dir)
    with explained_model_loading("model", arguments.model):
        folder = Path(arguments.model)
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise ValueError(f"`model` must be the folder of a model, but {folder} has no config.json.")
        model, tokenizer, target_tokenizer = load_translator(arguments.model)
    with exit_on_sigterm():  # without a half-written folder
        export_to_ctranslate2(
            model,
            tokenizer,
            arguments.output_dir,
            target_tokenizer=target_tokenizer,
            quantization=arguments.quantization,
            max_length=arguments.max_length,
        )
    print(f"The model for CTranslate2 is in {arguments.output_dir}.")


if __name__ == "__main__":
    sys.exit(run(main))
