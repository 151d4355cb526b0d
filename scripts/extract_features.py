#!/usr/bin/env python
r"""Compute vectors of texts, or of their tokens, with BERT: from one text per line to one array.

    python scripts/extract_features.py --model runs/bert --input texts.txt --output vectors.npy
    python scripts/extract_features.py --model runs/bert --input texts.txt --output tokens.npz \
        --layers -2 -1 --mix concatenate --pooling tokens

A .npy file has one matrix with a row for each line; with --pooling tokens, a .npz file has one matrix for each line,
named by its number from 0. numpy.load reads both.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("extract_features")

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from hf_vanilla.command_line.checks import (
    check_models,
    check_output_is_no_input,
    explained_model_loading,
    without_load_report,
)
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data.files import read_lines, replacing_binary_file
from hf_vanilla.generation.features import extract_features


@dataclass
class FeatureArguments:
    """Input, output, model and kind of vectors."""

    model: str = field(metadata={"help": "The BERT and its tokenizer: a folder or a name on the Hub."})
    input: str = field(metadata={"help": "Text file, one text per line; - is standard input."})
    output: str = field(metadata={"help": "File to write, .npy, or .npz for --pooling tokens."})
    layers: list[int] = field(
        default_factory=lambda: [-1], metadata={"help": "Layers to take; 0 is the embeddings, -1 the last layer."}
    )
    mix: Literal["mean", "concatenate"] = field(default="mean", metadata={"help": "How several layers are combined."})
    pooling: Literal["mean", "cls", "max", "tokens"] = field(
        default="mean", metadata={"help": "How tokens are pooled into a text's vector; tokens keeps them all."}
    )
    max_length: int | None = field(default=None, metadata={"help": "Most tokens of a text. Unset: the model's limit."})
    max_tokens_per_batch: int = field(default=4096, metadata={"help": "Most tokens of a batch, padding included."})

    def __post_init__(self):
        wanted = ".npz" if self.pooling == "tokens" else ".npy"
        if not self.output.endswith(wanted):
            raise ValueError(f"--output must end in {wanted} for --pooling {self.pooling}, got {self.output}.")


def write_vectors(file: BinaryIO, texts: list[str], arguments: FeatureArguments) -> None:
    """Load the model, and write the texts' vectors."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    with explained_model_loading("model", arguments.model), without_load_report():  # of a head that is not used
        model = AutoModel.from_pretrained(arguments.model).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    vectors = extract_features(
        model,
        tokenizer,
        texts,
        layers=arguments.layers,
        mix=arguments.mix,
        pooling=arguments.pooling,
        max_length=arguments.max_length,
        max_tokens_per_batch=arguments.max_tokens_per_batch,
        show_progress=True,
    )
    if not all(np.isfinite(each).all() for each in vectors):
        raise ValueError(
            f"The vectors of the model ({arguments.model}) are nan or infinite. Either its weights are nan (train it "
            'again), or values overflow in its dtype (save it with `dtype="float32"`).'
        )
    if arguments.pooling == "tokens":
        matrices: dict[str, Any] = {str(number): matrix for number, matrix in enumerate(vectors)}
        np.savez(file, **matrices)
    else:
        np.save(file, np.stack(vectors))


def main() -> None:
    """Read, encode, write."""
    (arguments,) = parse_arguments(FeatureArguments, description=__doc__)
    check_models(model=arguments.model)
    check_output_is_no_input(arguments.output, input=arguments.input)
    texts = read_lines(arguments.input)
    if not texts:
        raise ValueError(f"--input ({arguments.input}) must have at least one line, but is empty.")
    Path(arguments.output).absolute().parent.mkdir(parents=True, exist_ok=True)
    with replacing_binary_file(arguments.output) as file:
        write_vectors(file, texts, arguments)


if __name__ == "__main__":
    sys.exit(run(main))
