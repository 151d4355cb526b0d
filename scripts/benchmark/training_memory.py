#!/usr/bin/env python
r"""Memory of one training step with a vocabulary of 37,000, against transformers' MarianMTModel of the same sizes.

Each side trains in a process of its own, in bfloat16; the figure is the peak memory of the process, or of a GPU,
beyond that of the built model. A third side is the prediction of `hf_vanilla.training.estimate` for our model. Batches
have 4,096 tokens and, closer to the paper's 25,000, 16,384: with those MarianMTModel takes 14 GB.

    python scripts/benchmark/training_memory.py
"""

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from measuring import BenchmarkArguments, device, marian_like, prepare, report, run_child, take_turns
from transformers import set_seed

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.training import estimate


VOCAB_SIZE = 37_000


@dataclass
class MemoryBenchmarkArguments(BenchmarkArguments):
    """Options of this benchmark."""

    sentences: list[int] = field(default_factory=lambda: [128, 512], metadata={"help": "Sentences of a batch."})
    length: int = field(default=32, metadata={"help": "Tokens of a sentence, on both sides."})
    side: str | None = field(
        default=None,
        metadata={"help": "Only measure this side, MarianMTModel, ours or estimate, and print its megabytes."},
    )


def peak_megabytes() -> float:
    """Return the peak memory of this process, or of a GPU if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def measure(arguments: MemoryBenchmarkArguments, sentences: int) -> float:
    """Train two steps with a number of sentences, or estimate them, and return the rise of the peak in megabytes."""
    set_seed(0)
    sizes = {"d_model": 128, "encoder_layers": 2, "decoder_layers": 2} if arguments.quick else {}
    config = VanillaTransformerConfig.preset("base", vocab_size=VOCAB_SIZE, **sizes)
    ids = torch.randint(3, VOCAB_SIZE, (sentences, arguments.length), device=device())
    if arguments.side == "estimate":
        data = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
        cost = estimate(config, data, updates=1, max_tokens_per_batch=ids.numel(), bf16=True, probes=1)
        return (cost.memory - 4 * cost.parameters) / 2**20  # without the float32 weights, which are there before
    model = VanillaTransformerForConditionalGeneration(config) if arguments.side == "ours" else marian_like(config)
    optimizer = torch.optim.AdamW(model.to(device()).train().parameters(), fused=True)
    before = peak_megabytes()
    for _ in range(2):
        with torch.autocast(device().type, torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    return peak_megabytes() - before


def main() -> None:
    """Start both sides in turn, report."""
    (arguments,) = parse_arguments(MemoryBenchmarkArguments, description=__doc__)
    prepare(arguments)
    if arguments.side is not None:
        print(measure(arguments, arguments.sentences[0]))
        return

    def side(name: str, sentences: int):
        command = [sys.executable, __file__, "--side", name, "--threads", str(arguments.threads)]
        command += ["--sentences", str(sentences), "--length", str(arguments.length)]
        command += ["--quick"] if arguments.quick else []
        return lambda: float(run_child(command).split()[-1])

    sides: dict[str, Callable[[], float]] = {}
    ratios: dict[str, tuple[str, str, float | None]] = {}
    for sentences in [8, 32] if arguments.quick else arguments.sentences:
        batch = f"{sentences * arguments.length:,} tokens"
        sides |= {f"{name}, {batch}": side(name, sentences) for name in ("MarianMTModel", "ours", "estimate")}
        ratios[f"MarianMTModel needs as much, {batch}"] = (f"MarianMTModel, {batch}", f"ours, {batch}", 2.0)
        ratios[f"memory that `estimate` predicts, {batch}"] = (f"estimate, {batch}", f"ours, {batch}", 1.0)
    report(
        arguments,
        "peak memory of a training step, vocabulary of 37,000, bfloat16",
        "megabytes beyond model and libraries",
        take_turns(sides, arguments.repeats),
        ratios,
        length=arguments.length,
        vocab_size=VOCAB_SIZE,
    )


if __name__ == "__main__":
    sys.exit(run(main))
