#!/usr/bin/env python
r"""Evaluate a causal language model on unseen documents: perplexity per word and bits per byte.

    python scripts/evaluate_gpt.py --model runs/gpt --files held_out.jsonl.gz other.txt --results_file results.json

Each file is evaluated separately. Every token of a document is predicted once, its end too; a document longer than the
context is read in windows that overlap. Words are separated by white space, bytes are those of UTF-8, so that models
with different vocabularies can be compared, n-gram models included (in a clone, scripts/benchmark/ngram_baseline.py).
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("evaluate_gpt")

import json
import sys
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hf_vanilla  # noqa: F401  (registers the models)
from hf_vanilla.command_line.checks import (
    check_device,
    check_files_exist,
    check_models,
    check_results_file,
    explained_model_loading,
)
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.command_line.report import write_report
from hf_vanilla.data import load_documents
from hf_vanilla.metrics import evaluate_documents


@dataclass
class EvaluationArguments:
    """The model, the documents and the report."""

    model: str = field(metadata={"help": "Folder or Hub name of the model and its tokenizer."})
    files: list[str] = field(
        metadata={"help": "Documents: .json(l), .csv, .tsv or plain text, also as .gz; .parquet."}
    )
    text_column: str | None = field(
        default=None, metadata={"help": "Column of the text. Default: text, content or document."}
    )
    context_length: int | None = field(
        default=None, metadata={"help": "Tokens of a window. Default: the model's positions."}
    )
    stride: int | None = field(
        default=None, metadata={"help": "Tokens from window to window. Default: half of the context."}
    )
    batch_size: int = field(default=16, metadata={"help": "Windows of a batch."})
    device: str = field(
        default="auto",
        metadata={"help": "Where to run: cpu, cuda, cuda:1 ..., or auto, an accelerator if there is one."},
    )
    results_file: str | None = field(default=None, metadata={"help": "JSON file for scores, versions and machine."})
    commands: list[str] = field(
        default_factory=list, metadata={"help": "The commands that trained the model, for the report."}
    )
    notes: list[str] = field(default_factory=list, metadata={"help": "More facts for the report, each as name=value."})

    def __post_init__(self):
        for note in self.notes:
            if "=" not in note:
                raise ValueError(f"`notes` must be of the form name=value, got {note!r}.")
        check_device(self.device)


def main() -> None:
    """Load the model, evaluate it on each file, and report."""
    (arguments,) = parse_arguments(EvaluationArguments, description=__doc__)
    logging.set_verbosity_error()
    check_files_exist(files=arguments.files)
    for path in arguments.files:
        check_results_file(arguments.results_file, files=path)
    check_models(model=arguments.model)
    device = arguments.device
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = "cpu" if accelerator is None else accelerator.type
    with explained_model_loading("model", arguments.model):
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model = AutoModelForCausalLM.from_pretrained(arguments.model).to(device).eval()
    figures = {
        path: evaluate_documents(
            model,
            tokenizer,
            load_documents(data_files=[path], text_column=arguments.text_column)["text"][:],
            context_length=arguments.context_length,
            stride=arguments.stride,
            batch_size=arguments.batch_size,
        )
        for path in arguments.files
    }
    figures = {path: {name: round(value, 4) for name, value in measured.items()} for path, measured in figures.items()}
    print(json.dumps(figures, indent=2, ensure_ascii=False))
    if arguments.results_file is not None:
        report = {
            "files": figures,
            "parameters": model.num_parameters(),
            "vocabulary": len(tokenizer),
            "context_length": arguments.context_length or model.config.max_position_embeddings,
            "notes": dict(note.split("=", 1) for note in arguments.notes),
            "commands": arguments.commands,
        }
        write_report(arguments.results_file, report)


if __name__ == "__main__":
    sys.exit(run(main))
