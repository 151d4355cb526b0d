#!/usr/bin/env python
r"""Score translations with a model: the log probability of each line of a text, given the same line of the source.

Examples:
  the log probability of each line:
    python scripts/score.py --model runs/en-de --source test.en --target test.de --output test.scores
  scores as those of scripts/translate.py:
    python scripts/score.py --model runs/en-de --source test.en --target test.de --length_penalty 0.6

One line of output for each pair of lines: the sum of log p(token | tokens before it, source) over the tokens of the
translation and its end, in nats, divided by the length penalty if there is one. Higher is better; 0 is certain. Text
is UTF-8. The output file appears when it is complete.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("score")

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from hf_vanilla.command_line.checks import (
    check_device,
    check_models,
    check_output_is_no_input,
    explained_model_loading,
)
from hf_vanilla.command_line.options import on_first_process, parse_arguments, run
from hf_vanilla.data.files import STANDARD_STREAM, read_lines, replacing_file
from hf_vanilla.generation import load_translator, score_texts


@dataclass
class ScoreArguments:
    """Input, output, model and length penalty."""

    model: str = field(metadata={"help": "Folder of a trained model, or its name on the Hub."})
    source: str = field(metadata={"help": "Text file, one source sentence per line, also .gz; - is standard input."})
    target: str = field(metadata={"help": "Text file with the translation of each line; also .gz or -."})
    output: str = field(default="-", metadata={"help": "File to write; - is standard output."})
    length_penalty: float = field(
        default=0.0, metadata={"help": "Exponent alpha of the length penalty; 0 gives plain log probabilities."}
    )
    length_penalty_type: Literal["gnmt", "power"] = field(
        default="gnmt",
        metadata={"help": "gnmt: ((5 + length) / 6)^alpha, the paper's; power: length^alpha, transformers'."},
    )
    max_length: int | None = field(
        default=None,
        metadata={"help": "Most tokens of a line; longer ones are truncated. Unset: the model's limit."},
    )
    max_tokens_per_batch: int = field(
        default=4096,
        metadata={"help": "Most tokens of a batch: source, target and padding together."},
    )
    dtype: Literal["auto", "fastest", "float32", "bfloat16", "float16", "int8"] = field(
        default="auto",
        metadata={
            "help": "Type of the weights: auto is the one they were saved in, fastest the faster one of float32 and "
            "bfloat16 on the device, measured; int8 rounds linear maps to 8 bits, which is faster on most CPUs and "
            "changes scores a little."
        },
    )
    device: str = field(
        default="auto",
        metadata={"help": "Where to run: cpu, cuda, cuda:1 ..., or auto, an accelerator if there is one."},
    )

    def __post_init__(self) -> None:
        if self.source == self.target == STANDARD_STREAM:
            raise ValueError("--source and --target can't both be standard input (-).")
        if self.max_tokens_per_batch < 1:
            raise ValueError(f"--max_tokens_per_batch must be at least 1, got {self.max_tokens_per_batch}.")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"--max_length must be at least 1, got {self.max_length}.")
        check_device(self.device)


def read_pairs(arguments: ScoreArguments) -> tuple[list[str], list[str]]:
    """Read both files, which must have equally many lines."""
    sources, targets = read_lines(arguments.source), read_lines(arguments.target)
    if len(sources) != len(targets):
        raise ValueError(
            f"Source and target must have equally many lines, but {arguments.source} has {len(sources)} and "
            f"{arguments.target} has {len(targets)}; line N of one must be the translation of line N of the other."
        )
    return sources, targets


def score_lines(
    sources: list[str], targets: list[str], arguments: ScoreArguments, processes: PartialState
) -> list[float]:
    """Score the pairs, each process a part of them, and return the scores in order."""
    device = processes.device if arguments.device == "auto" else torch.device(arguments.device)
    with explained_model_loading("model", arguments.model):
        model, tokenizer, target_tokenizer = load_translator(arguments.model, dtype=arguments.dtype, device=device)
    numbers = range(processes.process_index, len(sources), processes.num_processes)
    scores = score_texts(
        model,
        tokenizer,
        [sources[number] for number in numbers],
        [targets[number] for number in numbers],
        target_tokenizer=target_tokenizer,
        length_penalty=arguments.length_penalty,
        length_penalty_type=arguments.length_penalty_type,
        max_length=arguments.max_length,
        max_tokens_per_batch=arguments.max_tokens_per_batch,
        show_progress=processes.is_main_process,
    )
    numbered = [(number, score.score) for number, score in zip(numbers, scores, strict=True)]
    return [score for _, score in sorted(gather_object(numbered))]


def main() -> None:
    """Read, score, write: the first process reads and writes, all score."""
    (arguments,) = parse_arguments(ScoreArguments, description=__doc__)
    check_models(model=arguments.model)
    check_output_is_no_input(arguments.output, source=arguments.source, target=arguments.target)
    processes = PartialState(cpu=arguments.device == "cpu" or not torch.accelerator.is_available())
    with replacing_file(arguments.output) if processes.is_main_process else nullcontext() as file:
        sources, targets = on_first_process(partial(read_pairs, arguments))
        scores = score_lines(sources, targets, arguments, processes)
        if file is not None:
            file.writelines(f"{score:.4f}\n" for score in scores)


if __name__ == "__main__":
    sys.exit(run(main))
