#!/usr/bin/env python
r"""Profile of a step: shares of the time of matrix products and of all other operations.

Training steps of BERT and of the encoder-decoder, optimizer step included, dropout on, in bfloat16, and the beam-4
translation of a batch with packed weights, run under torch's profiler. The time of an operation excludes the
operations that it calls (on a GPU: it is that of its kernels). The rest is outside of operations: Python, autograd and
dispatch. The ceiling is the speed-up of a step whose products alone take time.

    python scripts/benchmark/step_profile.py --only bert_mini

Token ids are random, with the lengths of Multi30k: speed does not depend on the ids.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from measuring import BenchmarkArguments, device, now, prepare, spread, write_results
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel, set_seed

from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForPreTraining,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data import TokenBudgetBatchSampler
from hf_vanilla.generation import beam_search, fast_model
from hf_vanilla.models.checks import IGNORED_LABEL
from hf_vanilla.models.text_batches import padded


VOCAB_SIZE = 10_000
SMALL = {"d_model": 128, "d_ff": 512, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2}
BATCHES = {"bert_mini": 32, "bert_base": 16}  # sentence pairs, as in bert_pretraining.py
MIN_SHARE = 0.005
# Prefixes of the names of products; attention's fused kernels count as products.
PRODUCTS = ("aten::mm", "aten::addmm", "aten::_addmm", "mkldnn::_linear")
ATTENTION = ("aten::bmm", "aten::baddbmm", "aten::_scaled_dot", "aten::_flash", "aten::_efficient", "aten::_cudnn_att")

Step = Callable[[], Any]


@dataclass
class ProfileArguments(BenchmarkArguments):
    """Options of this benchmark."""

    only: Literal["bert_mini", "bert_base", "encoder_decoder", "decoding"] | None = field(
        default=None, metadata={"help": "One kind of step. Default: all."}
    )


def training_step(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> Step:
    """Return a function that updates a model on a batch, as a `Trainer` does."""
    model = model.train().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        with torch.autocast(device().type, torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def random_batch(lengths: list[int], vocab_size: int, padding: int = 0) -> dict[str, torch.Tensor]:
    """Make a batch of rows of random tokens."""
    rows = [torch.randint(5, vocab_size, (length,)).tolist() for length in lengths]
    mask = padded([[1] * length for length in lengths], 0, device())
    return {"input_ids": padded(rows, padding, device()), "attention_mask": mask}


def bert_step(name: str, quick: bool) -> Step:
    """Make a pre-training step: rows of up to 128 tokens, 15 % of them masked."""
    config = VanillaBertConfig.preset("tiny" if quick else name.removeprefix("bert_"))
    inputs = random_batch(torch.randint(100, 129, (BATCHES[name],)).tolist(), config.vocab_size)
    is_masked = (torch.rand(inputs["input_ids"].shape, device=device()) < 0.15) & (inputs["attention_mask"] == 1)
    labels = inputs["input_ids"].masked_fill(~is_masked, IGNORED_LABEL)
    next_sentence_label = torch.arange(BATCHES[name], device=device()) % 2
    model = VanillaBertForPreTraining(config)
    return training_step(model, {**inputs, "labels": labels, "next_sentence_label": next_sentence_label})


def pairs_step(name: str, quick: bool) -> Step:
    """Make a training step of the base model, or a beam-4 translation, on a token-budget batch."""
    config = VanillaTransformerConfig.preset("base", vocab_size=VOCAB_SIZE, **(SMALL if quick else {}))
    model = VanillaTransformerForConditionalGeneration(config)
    source = torch.normal(15.0, 5.0, (29_000,)).round().clamp(5, 45).long()
    target = (source + torch.normal(0.0, 2.0, (29_000,)).round().long()).clamp(min=3)
    budget = 256 if quick else 4096 if name == "encoder_decoder" else 2048
    batches = list(TokenBudgetBatchSampler(source.numpy(), target.numpy(), budget))
    places = sorted(batches, key=lambda batch: int(source[batch].max()))[len(batches) // 2]  # of middle length
    inputs = random_batch(source[places].tolist(), VOCAB_SIZE)
    if name == "encoder_decoder":
        labels = random_batch(target[places].tolist(), VOCAB_SIZE, IGNORED_LABEL)["input_ids"]
        return training_step(model, {**inputs, "labels": labels})
    fast = fast_model(model.eval().to(device(), torch.bfloat16), int(source[places].sum()))
    ends = [config.pad_token_id, config.eos_token_id]  # suppressed: no sentence ends early
    options = {"do_sample": False, "max_new_tokens": int(source[places].max()), "suppress_tokens": ends}
    return lambda: fast.generate(**inputs, **options, num_beams=4, custom_generate=beam_search)


def timed(step: Step) -> float:
    """Time one step."""
    started = now()
    step()
    return now() - started


def shares_of(events: list[Any], seconds: float) -> dict[str, float]:
    """Divide the time of the profiled steps among the operations.

    Args:
        events (`list[Any]`): Averages of the profiler.
        seconds (`float`): Their total time.

    Returns:
        `dict[str, float]`: the shares, which add up to 1: products, other operations by size, the rest.
    """
    shares = {"products": 0.0, "attention's products": 0.0}
    named: dict[str, float] = {}
    rest = 0.0
    for event in events:
        if "::" not in event.key or event.key.startswith("autograd::") or event.device_type != DeviceType.CPU:
            continue  # autograd's nodes are Python and dispatch; kernels are part of operations
        time = event.self_device_time_total if device().type == "cuda" else event.self_cpu_time_total  # microseconds
        share = time / 1e6 / seconds
        if event.key.startswith(PRODUCTS):
            shares["products"] += share
        elif event.key.startswith(ATTENTION):
            shares["attention's products"] += share
        elif share >= MIN_SHARE:
            named[event.key.removeprefix("aten::")] = share
        else:
            rest += share
    shares |= sorted(named.items(), key=lambda each: -each[1])
    shares["all others"] = rest
    shares["outside of operations"] = 1 - sum(shares.values())
    return {name: round(share, 4) for name, share in shares.items()}


def main() -> None:
    """Run and profile each kind of step, report."""
    (arguments,) = parse_arguments(ProfileArguments, description=__doc__)
    prepare(arguments)
    profiles = {}
    for name in [arguments.only] if arguments.only else [*BATCHES, "encoder_decoder", "decoding"]:
        set_seed(0)
        step = (bert_step if name in BATCHES else pairs_step)(name, arguments.quick)
        step()  # warms up
        unwatched = [timed(step) for _ in range(arguments.repeats)]
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device().type == "cuda" else [])]
        with profile(activities=activities) as profiler:
            watched = [timed(step) for _ in range(arguments.repeats)]
        shares = shares_of(profiler.key_averages(), sum(watched))
        ceiling = round(1 / (shares["products"] + shares["attention's products"]), 2)
        seconds = {"seconds": spread(unwatched), "seconds_under_the_profiler": spread(watched)}
        profiles[name] = {**seconds, "shares": shares, "ceiling": ceiling}
        print(f"\n{name}, {seconds['seconds']['median']:.3g} s a step, at most {ceiling:g} times faster:")
        for operation, share in shares.items():
            print(f"  {share:6.1%}  {operation}")
    write_results(arguments, "what a step consists of, bfloat16", profiles=profiles)


if __name__ == "__main__":
    sys.exit(run(main))
