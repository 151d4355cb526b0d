#!/usr/bin/env python
r"""What each choice in the pre-training of a miniature BERT gives: short trainings, each with one choice changed.

    python scripts/benchmark/pretraining_choices.py --train_files encyclopedia.jsonl.gz novels.jsonl.gz \
        --validation_files held_out.jsonl.gz --output_file choices.json

Each training has 3.7 million tokens, on one core. It is scored on the validation documents by pairs of 128 and of 512
tokens with 15 % of them masked, whatever share it was trained with. The same command again trains what is not in the
file yet, and resumes a training that was stopped, whose `minutes` are null; --only names some of the choices. Two
commands with other --output_dir and --output_file share a machine.
"""

import hashlib
import json
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import run_child

from hf_vanilla.command_line.checks import check_files_exist, check_results_file
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.command_line.report import write_report
from hf_vanilla.training import decisive_options


SCRIPTS = Path(__file__).resolve().parent.parent
BASE = (
    "--preset mini --vocab_size 8000 --hidden_dropout_prob 0 --attention_probs_dropout_prob 0 "
    "--phase_lengths 32 128 512 --phase_shares 0.2 0.56 0.24 --mixed_phases 2 --shifted_positions 0.25 "
    "--max_tokens_per_batch 4096 --precision bfloat16 --muon --weight_decay 0.1 --initial_embeddings examples "
    "--learning_rate 1e-3 --warmup_steps 150 --max_steps 900 --seed 1"
)
# Options that replace those of the base and of --options.
CHOICES = {
    "base": "",
    "another seed": "--seed 2",
    "embeddings start at random": "--initial_embeddings random",
    "AdamW for the matrices, too": "--muon false",
    "both of these": "--initial_embeddings random --muon false",
    "positions not shifted": "--shifted_positions 0",
    "all positions shifted": "--shifted_positions 1",
    "one length after another": "--shifted_positions 0 --mixed_phases 0",
    "the same, new positions repeat": "--shifted_positions 0 --mixed_phases 0 --new_positions repeat",
    "no examples of 32 tokens": "--phase_lengths 128 512 --phase_shares 0.76 0.24",
    "25 % masked": "--mlm_probability 0.25",
    "40 % masked": "--mlm_probability 0.4",
    "weight decay 0.01": "--weight_decay 0.01",
    "weight decay 0.3": "--weight_decay 0.3",
    "whole words masked": "--whole_word_mask",
    "batches of 2,048 tokens": "--max_tokens_per_batch 2048 --max_steps 1800 --warmup_steps 300",
    "batches of 8,192 tokens": "--max_tokens_per_batch 8192 --max_steps 450 --warmup_steps 75",
    "half the learning rate": "--learning_rate 5e-4",
    "twice the learning rate": "--learning_rate 2e-3",
    "warm-up of 30 updates": "--warmup_steps 30",
    "6 layers of width 208": "--num_hidden_layers 6 --hidden_size 208 --intermediate_size 832",
    "2 layers of width 352": "--num_hidden_layers 2 --hidden_size 352 --intermediate_size 1408",
    "dropout 0.1": "--hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1",
    "float32": "--precision float32",
}
LENGTHS = (128, 512)
SCORES = ("mlm_loss", "mlm_accuracy", "nsp_accuracy")


@dataclass
class ChoicesArguments:
    """The documents, the choices and the report."""

    train_files: list[str] = field(metadata={"help": "Documents to train on."})
    validation_files: list[str] = field(metadata={"help": "Documents to score on."})
    only: list[str] = field(default_factory=list, metadata={"help": "Names of choices. Default: all."})
    options: str = field(
        default="",
        metadata={
            "help": "Options of pretrain-bert for all trainings; they replace those of the base, not a choice's."
        },
    )
    output_dir: str = field(
        default="benchmark_output/pretraining_choices", metadata={"help": "Folder of the trainings."}
    )
    output_file: str = field(
        default="benchmark_output/pretraining_choices.json", metadata={"help": "JSON file of results."}
    )

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in CHOICES:
                raise ValueError(f"`only` must be of {', '.join(CHOICES)}; got {name!r}.")


def folder_of(name: str, output_dir: str, setting: dict[str, Any]) -> Path:
    """Return the folder of a training, whose name has a checksum of all options and data."""
    checksum = hashlib.sha256(json.dumps([setting, CHOICES[name]]).encode()).hexdigest()[:8]
    return Path(output_dir) / f"{name.replace(' ', '_').replace('%', 'percent').replace(',', '')}_{checksum}"


def measure(name: str, arguments: ChoicesArguments, setting: dict[str, Any]) -> dict[str, Any]:
    """Train with a choice, and return its scores at both lengths."""
    folder = folder_of(name, arguments.output_dir, setting)
    is_resumed = any(folder.glob("checkpoint-*"))
    options = [*shlex.split(f"{setting['base']} {CHOICES[name]}"), "--train_files", *arguments.train_files]
    options += ["--output_dir", str(folder), *shlex.split("--save_steps 300 --save_total_limit 1 --disable_tqdm true")]
    run_child([sys.executable, str(SCRIPTS / "pretrain_bert.py"), *options])
    scores = folder / "scores.json"
    files = ["--files", *arguments.validation_files, "--max_length", *map(str, LENGTHS), "--results_file", str(scores)]
    run_child([sys.executable, str(SCRIPTS / "evaluate_bert.py"), "--model", str(folder), *files])
    measured = json.loads(scores.read_text())["files"]
    means = {}
    for length in LENGTHS:
        found = [measured[f"{file}, {length} tokens"] for file in arguments.validation_files]
        pairs = sum(each["pairs"] for each in found)
        for score in SCORES:
            means[f"{score}_{length}"] = round(sum(each[score] * each["pairs"] for each in found) / pairs, 4)
    seconds = json.loads((folder / "train_results.json").read_text())["train_runtime"]
    return {"options": CHOICES[name], **means, "minutes": None if is_resumed else round(seconds / 60, 1)}


def main() -> None:
    """Measure the choices that are not in the file yet."""
    (arguments,) = parse_arguments(ChoicesArguments, description=__doc__)
    check_files_exist(train_files=arguments.train_files, validation_files=arguments.validation_files)
    check_results_file(arguments.output_file)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    path = Path(arguments.output_file)
    files = {"train_files": arguments.train_files, "validation_files": arguments.validation_files}
    setting = {"base": f"{BASE} {arguments.options}".strip(), "data": decisive_options(files)}
    written: dict[str, Any] = json.loads(path.read_text()) if path.exists() else setting
    for key, what in (("base", "base options"), ("data", "data")):
        if written.get(key) != setting[key]:
            other = f"other {what}" if key in written else "an earlier version"
            raise ValueError(f"`output_file` ({path}) has results of {other}; give another file.")
    choices = written.get("choices", {})
    for name in arguments.only or CHOICES:
        if choices.get(name, {}).get("options") == CHOICES[name]:
            continue
        choices[name] = measure(name, arguments, setting)
        print(f"{name}: {choices[name]}", flush=True)
        write_report(str(path), {**setting, "choices": choices})


if __name__ == "__main__":
    sys.exit(run(main))
