#!/usr/bin/env python
r"""Training with two processes: the cost of communication, and a comparison of the gradient with one process's.

One process with one thread trains batches of B sentences; two processes under torchrun, with one thread each, train
2 B sentences per update with DDP. The figure is sentences per second; without any cost of communication it would
double. Both start from the same weights, and the first gradients are compared with those of one process that
accumulates the same 2 B sentences.

    python scripts/benchmark/two_processes.py
"""

import functools
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from measuring import BenchmarkArguments, now, prepare, report, run_child, take_turns
from transformers import set_seed

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.command_line.options import parse_arguments, run


LENGTH = 24


@dataclass
class TwoProcessesArguments(BenchmarkArguments):
    """Options of this benchmark."""

    sentences: int = field(default=64, metadata={"help": "Sentences of a batch of one process."})
    steps: int = field(default=6, metadata={"help": "Updates of a turn."})
    accumulation: int = field(default=1, metadata={"help": "Batches of an update of each process."})
    worker: str | None = field(
        default=None, metadata={"help": "Train as a worker, and write the results to this file."}
    )


def train(arguments: TwoProcessesArguments, accumulation: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Train, and return sentences per second and the gradients of the first update."""
    accelerator = Accelerator(cpu=torch.cuda.device_count() < 2, gradient_accumulation_steps=accumulation)
    set_seed(0)
    sizes = {"d_model": 64, "d_ff": 256, "num_heads": 2} if arguments.quick else {}
    config = VanillaTransformerConfig.preset("base", vocab_size=10_000, dropout=0.0, **sizes)
    model = VanillaTransformerForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = accumulation * accelerator.num_processes
    ids = torch.randint(3, 10_000, (batches, arguments.sentences, LENGTH), device=accelerator.device)
    mine = ids[accelerator.process_index * accumulation :][:accumulation]
    labelled = ids.numel() // accelerator.num_processes  # DDP averages over processes
    gradients: dict[str, torch.Tensor] = {}
    started = 0.0
    for step in range(arguments.steps + 1):
        if step == 1:
            accelerator.wait_for_everyone()
            started = now()
        for batch in mine:
            with accelerator.accumulate(model), accelerator.autocast():
                loss = model(input_ids=batch, labels=batch, num_items_in_batch=labelled).loss
                accelerator.backward(loss * accumulation)
                if accelerator.sync_gradients and step == 0:
                    inner = accelerator.unwrap_model(model)
                    gradients = {name: each.grad.clone() for name, each in inner.named_parameters()}
                optimizer.step()
                optimizer.zero_grad()
    accelerator.wait_for_everyone()
    rate = arguments.steps * batches * arguments.sentences / (now() - started)
    if accelerator.is_main_process and arguments.worker is not None:
        torch.save({"rate": rate, "gradients": gradients}, arguments.worker)
    return rate, gradients


def main() -> None:
    """Start both sides in turn, compare gradients, report."""
    (arguments,) = parse_arguments(TwoProcessesArguments, description=__doc__)
    arguments.threads = 1
    prepare(arguments)
    if arguments.worker is not None:
        train(arguments, arguments.accumulation)
        return
    own = ["--threads", "1", "--sentences", str(arguments.sentences), "--steps", str(arguments.steps)]
    own += ["--quick"] if arguments.quick else []
    launchers = {
        "one process": [sys.executable],
        "two processes": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    }
    results: dict[str, dict] = {}

    def start(name: str, *extra: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "figures.pt")
            command = [*launchers[name.split(",")[0]], __file__, *own, *extra, "--worker", file]
            run_child(command)
            results[name] = torch.load(file)
        return results[name]["rate"]

    start("one process, accumulating", "--accumulation", "2", "--steps", "1")
    figures = take_turns({name: functools.partial(start, name) for name in launchers}, arguments.repeats)
    alone, together = results["one process, accumulating"]["gradients"], results["two processes"]["gradients"]
    difference = max((alone[name] - together[name]).abs().max().item() for name in alone)
    report(
        arguments,
        "training with two processes, float32",
        "sentences per second",
        figures,
        {"two processes against one": ("two processes", "one process", 2.0)},
        largest_difference_of_gradients=float(f"{difference:.3g}"),
        largest_gradient=float(f"{max(each.abs().max().item() for each in alone.values()):.3g}"),
        sentences=arguments.sentences,
        length=LENGTH,
    )


if __name__ == "__main__":
    sys.exit(run(main))
