#!/usr/bin/env python
r"""One GPU: kernels, ceilings, training and decoding against transformers' models, in commands of ten minutes.

    python scripts/benchmark/gpu.py
    python scripts/benchmark/gpu.py --rows kernels ceilings bert_large
    python scripts/benchmark/gpu.py --device cpu --quick

The file of the results keeps the rows that are measured, so the same command again measures those that are left. Both
sides of a row have the same sizes, dropout 0.1 (the big Transformer 0.3), bfloat16 products, and the optimizer's step;
they take turns, and the report has medians. A side that runs out of memory gets batches of half the size until it
fits. With `--device cpu --quick` tiny models run through every row, without figures that mean anything.

A row that fails is recorded with the reason; --again --rows NAME measures it again.

Batches are made before the clock starts and hold random tokens. Their lengths are those of Python's documentation, cut
to the row's, or of sentences drawn from a log-normal distribution with a mean of 28 tokens.
"""

import gc
import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal, NamedTuple

import torch
from accelerate.utils import compile_regions
from kernel_checks import check_kernels, chosen_kernels
from measuring import (
    FOLDER,
    BenchmarkArguments,
    device,
    marian_like,
    now,
    prepare,
    product_ceiling,
    reason_of,
    spread,
    training_operations,
    write_results,
)
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining, PreTrainedModel, set_seed
from transformers.utils import is_flash_attn_2_available

from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForPreTraining,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.command_line.report import describe_environment
from hf_vanilla.data import python_documentation
from hf_vanilla.data.batching import TokenBudgetBatchSampler
from hf_vanilla.generation import StepGraphs, beam_search, fast_model
from hf_vanilla.models.checks import IGNORED_LABEL
from hf_vanilla.models.text_batches import batches_by_length, padded


RESULTS = Path(__file__).with_name("results") / "gpu.json"
Batch = dict[str, Tensor]
# A side of a row: for a share of the full batch, it makes what measures one turn.
Build = Callable[[float], Callable[[], float]]
SMALLEST_SHARE = 1 / 64
MASKED_SHARE = 0.15
MEAN_SENTENCE, SENTENCE_SPREAD, PAIR_SPREAD = 28, 0.55, 0.15
SMALL = {"d_model": 32, "d_ff": 48, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 2}


@dataclass
class GpuArguments(BenchmarkArguments):
    """Options of this benchmark."""

    repeats: int = field(default=5, metadata={"help": "Turns of each side, as far as the row's time allows."})
    rows: list[str] | None = field(default=None, metadata={"help": "Rows to measure. Default: all that are left."})
    minutes: float = field(default=8, metadata={"help": "Begin no row that would end after so many minutes."})
    threads: int = field(default=os.cpu_count() or 1, metadata={"help": "Threads of the CPU."})
    again: bool = field(default=False, metadata={"help": "Measure rows again that the file of the results has."})
    device: Literal["cuda", "cpu"] = field(default="cuda", metadata={"help": "cuda, or cpu with --quick."})


class Setting(NamedTuple):
    """How a row is measured: with tiny models or full ones, how often, and until when by `time.monotonic`."""

    quick: bool
    repeats: int
    deadline: float


class Ratio(NamedTuple):
    """Two sides to compare, and what is wanted: `target` at least, `aim` if it can be had."""

    ours: str
    other: str
    target: float | None = None
    aim: float | None = None


class Row(NamedTuple):
    """A row: the minutes planned for it on an H200, and what measures it."""

    minutes: float
    measure: Callable[[Setting], dict[str, Any]]


def warmed_up(build: Build) -> tuple[Callable[[], float], float]:
    """Build a side and run its first turn, with batches of half the size as long as memory does not suffice.

    Args:
        build (`Callable`): The side.

    Returns:
        `tuple[Callable, float]`: what measures a turn, and the share of the full batch.

    Raises:
        ValueError: if the smallest batch does not fit.
    """
    share = 1.0
    while share >= SMALLEST_SHARE:
        if (measure := first_turn(build, share)) is not None:
            return measure, share
        free_memory()
        share /= 2
    raise ValueError(f"out of memory with {SMALLEST_SHARE:.3g} of a batch")


def first_turn(build: Build, share: float) -> Callable[[], float] | None:
    """Build a side and run two turns, in which compilers and allocators settle; `None` if memory does not suffice."""
    try:
        measure = build(share)
        for _ in range(2):
            measure()
    except torch.OutOfMemoryError:
        return None
    return measure


@contextmanager
def leaving_out(name: str, reasons: dict[str, str]) -> Iterator[None]:
    """Write down why a side fails: a compiler's error, say, must not cost the other sides. A lost device is raised."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, torch.AcceleratorError):
            now()  # raises again if the device is lost, and not if a kernel alone could not be started
        reasons[name] = reason_of(error)


def free_memory() -> None:
    """Give back what is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare(
    setting: Setting,
    sides: Mapping[str, Build],
    ratios: Mapping[str, Ratio],
    unit: str,
    operations: Mapping[str, float] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Measure the sides of a row in turn.

    Args:
        setting (`Setting`): How often, and until when.
        sides (`Mapping[str, Callable]`): The sides. One that fails is left out, with the reason.
        ratios (`Mapping[str, Ratio]`): What to compare.
        unit (`str`): Unit of the figures.
        operations (`Mapping[str, float]`, *optional*): For some sides, operations of the products for each unit.
        **settings (`Any`): Recorded with the row.

    Returns:
        `dict[str, Any]`: the row.

    Raises:
        AcceleratorError: if the device can't be used any more.
    """
    ready, shares, left_out = dict[str, Callable[[], float]](), dict[str, float](), dict[str, str]()
    prepared, compilers = dict[str, float](), dict[str, dict[str, int]]()
    for name, build in sides.items():
        started = now()
        if len(ready) > 1 and not setting.quick and time.monotonic() > setting.deadline:
            left_out[name] = "no time was left"
            continue
        torch._dynamo.utils.counters.clear()
        with leaving_out(name, left_out):
            ready[name], shares[name] = warmed_up(build)
        prepared[name], compilers[name] = round(now() - started, 1), compiler_counts()
        if name in left_out:
            free_memory()
    retries = allocation_retries()
    ceiling = product_ceiling(torch.bfloat16, 256 if setting.quick else None)
    figures: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(setting.repeats):
        if turn and time.monotonic() > setting.deadline:
            break
        for name in list(ready):
            with leaving_out(name, left_out):
                figures[name].append(with_second_try(ready[name]))
            if name in left_out:  # its optimizer makes room for the others
                del ready[name], shares[name], figures[name]
                free_memory()
    compared = {}
    for name, ratio in ratios.items():
        if ratio.ours in figures and ratio.other in figures:
            quotients = [a / b for a, b in zip(figures[ratio.ours], figures[ratio.other], strict=True)]
            wanted = {key: value for key, value in (("target", ratio.target), ("aim", ratio.aim)) if value is not None}
            compared[name] = {**spread(quotients), **({} if setting.quick else wanted)}
    reached = {
        name: {"operations_per_second": each * spread(figures[name])["median"], "product_ceiling": ceiling}
        for name, each in (operations or {}).items()
        if name in figures
    }
    row = {"unit": unit, "turns": len(next(iter(figures.values()), []))}
    row["sides"] = {name: spread(values) for name, values in figures.items()}
    row |= {"ratios": compared, "utilisation": reached, "share_of_the_batch": shares, "left_out": left_out}
    row |= {"seconds_to_prepare": prepared, "compilers": {name: found for name, found in compilers.items() if found}}
    return {**row, "allocation_retries": allocation_retries() - retries, "settings": settings}


def with_second_try(measure: Callable[[], float]) -> float:
    """Measure a turn; once more if memory was missing that the turns of other sides held."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        free_memory()
        return measure()


def allocation_retries() -> int:
    """Count how often memory was so short that all that was kept had to be given back: turns with any are too slow."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if torch.cuda.is_available() else 0


def compiler_counts() -> dict[str, int]:
    """Return how often dynamo compiled and broke, and how often CUDA graphs were skipped."""
    counters = torch._dynamo.utils.counters
    found = {name: counters["stats"].get(name, 0) for name in ("unique_graphs", "calls_captured")}
    found["graph_breaks"] = sum(counters["graph_break"].values())
    found["cudagraph_skips"] = counters["inductor"].get("cudagraph_skips", 0)
    return {name: int(count) for name, count in found.items() if count}


def training(model: nn.Module, make_batches: Callable[[float], list[Batch]], counted: str, padding: int) -> Build:
    """Make a side that trains.

    Args:
        model (`nn.Module`): The model, perhaps compiled.
        make_batches (`Callable`): The batches of a turn, for a share of their full size.
        counted (`str`): The model's argument whose tokens are counted.
        padding (`int`): Its value at padding.

    Returns:
        `Callable`: the side, which measures real tokens per second.
    """

    def build(share: float) -> Callable[[], float]:
        batches = make_batches(share)
        tokens = sum(int((batch[counted] != padding).sum()) for batch in batches)
        model.train().to(device())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def measure() -> float:
            started, loss = now(), torch.zeros(())
            for batch in batches:
                if hasattr(model, "_orig_mod"):  # compiled
                    torch.compiler.cudagraph_mark_step_begin()
                with torch.autocast(device().type, torch.bfloat16):
                    loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            seconds = now() - started
            if not loss.isfinite():
                raise ValueError(f"the loss is {float(loss)}")
            return tokens / seconds

        return measure

    return build


def compiled(model: nn.Module, setting: Setting, *, by_layer: bool = False, **options: Any) -> nn.Module:
    """Compile a model as a whole, or its layers one by one; a quick run only traces."""
    options = {"backend": "eager"} if setting.quick else options
    made: Any = compile_regions(model, **options) if by_layer else torch.compile(model, **options)
    return made


def document_lengths(quick: bool) -> Tensor:
    """Count words and punctuation marks of Python's documentation, by document or line: of shape `(texts,)`."""
    texts = "\n".join(topics.values()).splitlines() if quick else python_documentation()
    return torch.tensor([len(re.findall(r"\w+|[^\w\s]", text)) for text in texts])


def sentence_lengths(count: int) -> tuple[Tensor, Tensor]:
    """Draw lengths of sentences and of their translations, each a tensor of shape `(count,)`."""
    logs = torch.randn(count) * SENTENCE_SPREAD + math.log(MEAN_SENTENCE) - SENTENCE_SPREAD**2 / 2
    pairs = (logs, logs + torch.randn(count) * PAIR_SPREAD)
    return pairs[0].exp().round().clamp(3, 250).long(), pairs[1].exp().round().clamp(3, 250).long()


def random_rows(lengths: Tensor, vocab_size: int, padding: int) -> Tensor:
    """Make rows of random tokens, padded at the end: a tensor of shape `(rows, length)` on the device."""
    is_token = torch.arange(int(lengths.max())) < lengths[:, None]
    return torch.randint(5, vocab_size, is_token.shape).masked_fill(~is_token, padding).to(device())


def bert_batches(config: VanillaBertConfig, lengths: Tensor, rows: int, count: int, share: float) -> list[Batch]:
    """Make batches of both tasks of BERT's pre-training, rows of these lengths one after another."""
    batches = []
    rows = max(2, round(rows * share))
    for number in range(count):
        some = lengths[(torch.arange(rows) + number * rows) % len(lengths)]
        ids = random_rows(some, config.vocab_size, config.pad_token_id or 0)
        is_token = (torch.arange(ids.shape[1]) < some[:, None]).to(device())
        is_masked = (torch.rand(ids.shape, device=device()) < MASKED_SHARE) & is_token
        batches.append(
            {
                "input_ids": ids,
                "attention_mask": is_token.long(),
                "labels": ids.masked_fill(~is_masked, IGNORED_LABEL),
                "next_sentence_label": torch.arange(rows, device=device()) % 2,
            }
        )
    return batches


def native_bert(config: VanillaBertConfig, attention: str = "sdpa") -> PreTrainedModel:
    """Build transformers' BERT with the sizes of ours."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    native = BertConfig(pad_token_id=0, **{name: getattr(config, name) for name in names})
    native._attn_implementation = attention
    return BertForPreTraining(native)


def bert_sides(
    config: VanillaBertConfig, setting: Setting, kind: str, targets: Sequence[float | None]
) -> tuple[dict[str, Callable[[], nn.Module]], dict[str, Ratio]]:
    """Return what builds the model of each side, and the ratios with their targets."""

    def ours(**options: Any) -> nn.Module:
        return compiled(VanillaBertForPreTraining(config), setting, **options)

    stock, eager = "BertForPreTraining, sdpa", "ours"
    plain = {stock: lambda: native_bert(config), eager: lambda: VanillaBertForPreTraining(config)}
    if kind == "compiled":
        stock, whole, by_layer = f"{stock}, compiled", "ours, compiled", "ours, layers compiled"
        return {
            stock: lambda: compiled(native_bert(config), setting),
            whole: ours,
            by_layer: lambda: ours(by_layer=True),
        }, {"compiled": Ratio(whole, stock, *targets), "layers compiled": Ratio(by_layer, stock, *targets)}
    if kind == "CUDA graphs":
        stock, fast, mode = f"{stock}, CUDA graphs", "ours, CUDA graphs", "reduce-overhead"
        return {
            stock: lambda: compiled(native_bert(config), setting, mode=mode),
            eager: plain[eager],
            fast: lambda: ours(mode=mode),
        }, {"against eager": Ratio(fast, eager, *targets), "against the stock model": Ratio(fast, stock)}
    ratios = {"against sdpa": Ratio(eager, stock, *targets[:2])}
    if kind == "eager":
        return plain, ratios
    flash, whole, by_layer = "BertForPreTraining, flash_attention_2", "ours, compiled", "ours, layers compiled"
    missing = partial(not_installed, "flash-attn")
    with_flash = partial(native_bert, config, "flash_attention_2") if is_flash_attn_2_available() else missing
    return {**plain, flash: with_flash, whole: ours, by_layer: lambda: ours(by_layer=True)}, {
        **ratios,
        "against flash": Ratio(eager, flash, *targets[2:4]),
        "compiled, against not": Ratio(whole, eager, *targets[4:]),
        "layers compiled, against not": Ratio(by_layer, eager, *targets[4:]),
    }


def measure_bert(
    setting: Setting,
    *,
    size: str,
    length: int,
    tokens: int,
    kind: Literal["eager", "compiled", "real lengths", "CUDA graphs"],
    targets: tuple[float | None, ...],
    **settings: Any,
) -> dict[str, Any]:
    """Pre-train BERT on both sides.

    Args:
        setting (`Setting`): How.
        size (`str`): Preset of the model.
        length (`int`): Most tokens of a row.
        tokens (`int`): Positions of a batch.
        kind (`str`): Which sides, and whether rows are full.
        targets (`tuple[float, ...]`): Target and aim of each ratio in turn.
        **settings (`Any`): Recorded with the row.

    Returns:
        `dict[str, Any]`: the row.
    """
    if setting.quick:
        size, length, tokens = "tiny", 32, 128
    config = VanillaBertConfig.preset(size, vocab_size=300 if setting.quick else 30_522)
    lengths = torch.full((tokens // length,), length)
    if kind == "real lengths":
        lengths = document_lengths(setting.quick).clamp(5, length)
        lengths = lengths[torch.randperm(len(lengths))]
    make = partial(bert_batches, config, lengths, tokens // length, 2 if setting.quick else 8)
    models, ratios = bert_sides(config, setting, kind, targets)
    sides = {name: lazily(model, make) for name, model in models.items()}
    batches = make(1.0)
    counts = torch.cat([each["attention_mask"].sum(1) for each in batches])
    labelled = torch.cat([(each["labels"] != IGNORED_LABEL).sum(1) for each in batches])
    each_token, each_of_compiled = (
        training_operations(config, counts, labelled, **options) / int(counts.sum())
        for options in ({}, {"whole_last_layer": True})
    )
    padding = 1 - int(counts.sum()) / sum(each["input_ids"].numel() for each in batches)
    is_whole = {name: "compiled" in name or "CUDA graphs" in name for name in sides if name.startswith("ours")}
    operations = {name: each_of_compiled if whole else each_token for name, whole in is_whole.items()}
    settings |= {"size": size, "length": length, "batch_tokens": tokens, "padding": round(padding, 3)}
    return compare(setting, sides, ratios, "real tokens per second", operations, **settings)


def not_installed(name: str) -> nn.Module:
    """Take the place of a model whose package is missing.

    Args:
        name (`str`): The package.

    Returns:
        `nn.Module`: never.

    Raises:
        ImportError: always.
    """
    raise ImportError(f"{name} is not installed")


def lazily(model: Callable[[], nn.Module], make: Callable[[float], list[Batch]]) -> Build:
    """Make a side that trains a BERT, which is built with the first batch, so that its failure is the side's alone."""
    built: list[nn.Module] = []

    def build(share: float) -> Callable[[], float]:
        if not built:
            set_seed(0)
            with device():  # a large model is drawn there much faster
                built.append(model())
        return training(built[0], make, "attention_mask", 0)(share)

    return build


def pairs_batches(
    config: VanillaTransformerConfig, tokens: int, count: int, by_tokens: bool, share: float
) -> list[Batch]:
    """Make batches of pairs: of like length and of a number of tokens, or of random pairs that fit it with padding."""
    tokens = max(256, round(tokens * share))
    set_seed(0)  # the same sentences for each side
    source, target = sentence_lengths(max(4 * count * tokens // MEAN_SENTENCE, 64))
    places = random_places(torch.maximum(source, target), tokens, count)
    if by_tokens:
        sampler = TokenBudgetBatchSampler(source.numpy(), target.numpy(), tokens)
        places = [torch.tensor(each) for each, _ in zip(sampler, range(count), strict=False)]
    padding = int(config.pad_token_id)
    batches = []
    for some in places:
        ids = random_rows(source[some], config.vocab_size, padding)
        mask = (torch.arange(ids.shape[1]) < source[some][:, None]).long().to(device())
        labels = random_rows(target[some], config.vocab_size, IGNORED_LABEL)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def random_places(lengths: Tensor, tokens: int, count: int) -> list[Tensor]:
    """Cut sentences, in their order, into batches of at most so many positions, padding included."""
    places, start = [], 0
    for _ in range(count):
        longest = lengths[start:].cummax(0).values
        rows = max(2, int((longest * torch.arange(1, len(longest) + 1) <= tokens).sum()))
        places.append(torch.arange(start, start + rows))
        start += rows
    return places


def measure_translation(setting: Setting) -> dict[str, Any]:
    """Train the big Transformer on both sides."""
    tokens, count, vocab_size = (256, 2, 300) if setting.quick else (25_000, 8, 37_000)
    config = VanillaTransformerConfig.preset("big", vocab_size=vocab_size, **(SMALL if setting.quick else {}))
    models: dict[str, nn.Module] = {
        "MarianMTModel": marian_like(config),
        "ours": VanillaTransformerForConditionalGeneration(config),
    }
    stock, equal, ours = "MarianMTModel, random batches", "MarianMTModel, our batches", "ours"
    sides = {
        name: training(
            models[name.partition(",")[0]],
            partial(pairs_batches, config, tokens, count, name != stock),
            "labels",
            IGNORED_LABEL,
        )
        for name in (stock, equal, ours)
    }
    ratios = {
        "against random batches": Ratio(ours, stock, 2.5),
        "against equal batches": Ratio(ours, equal, 1.3),
    }
    batches = pairs_batches(config, tokens, count, True, 1.0)
    lengths = torch.cat([each["attention_mask"].sum(1) for each in batches])
    labelled = torch.cat([(each["labels"] != IGNORED_LABEL).sum(1) for each in batches])
    operations = {ours: training_operations(config, lengths, labelled) / int(labelled.sum())}
    details: dict[str, Any] = {
        "preset": "big",
        "batch_tokens": tokens,
        "vocab_size": vocab_size,
        "target_on_an_h200": 254_000,
    }
    return compare(setting, sides, ratios, "real target tokens per second", operations, **details)


def measure_beam_search(setting: Setting) -> dict[str, Any]:
    """Translate with four beams on both sides, in bfloat16; no sentence ends early."""
    count, most = (6, 64) if setting.quick else (1024, 8192)
    vocab_size = 300 if setting.quick else 37_000
    config = VanillaTransformerConfig.preset("base", vocab_size=vocab_size, **(SMALL if setting.quick else {}))
    models: dict[str, PreTrainedModel] = {
        "MarianMTModel": marian_like(config),
        "ours": VanillaTransformerForConditionalGeneration(config),
    }
    lengths = sentence_lengths(count)[0].clamp(max=8 if setting.quick else 250).sort().values.tolist()
    sources = [torch.randint(5, vocab_size, (length,)).tolist() for length in lengths]

    found: dict[str, dict[int, list[int]]] = {}  # the translations of a side's last turn, by sentence

    def side(label: str, name: str, **options: Any) -> Build:
        def build(share: float) -> Callable[[], float]:
            model = models[name].eval().to(device(), torch.bfloat16)
            budget = max(lengths[-1], round(most * share))
            if options:
                model = fast_model(model, budget)

            def measure() -> float:
                outputs, started = [], now()  # fetched after the clock has stopped
                for places in batches_by_length(lengths, budget):
                    batch = [sources[place] for place in places]
                    sequences = model.generate(
                        input_ids=padded(batch, int(config.pad_token_id), model.device),
                        attention_mask=padded([[1] * len(each) for each in batch], 0, model.device),
                        num_beams=4,
                        do_sample=False,
                        max_new_tokens=max(map(len, batch)),
                        suppress_tokens=[config.pad_token_id, config.eos_token_id],
                        **options,
                    )
                    outputs.append((places, sequences))
                seconds = now() - started
                found[label] = {
                    place: row for places, rows in outputs for place, row in zip(places, rows.tolist(), strict=True)
                }
                return sum(lengths) / seconds

            return measure

        return build

    options: dict[str, dict[str, Any]] = {
        "ours, generate() as it is": {},
        "ours": {"custom_generate": beam_search},
        "ours, CUDA graphs": {"custom_generate": beam_search, "step_graphs": StepGraphs()},
    }
    sides = {"MarianMTModel.generate": side("MarianMTModel.generate", "MarianMTModel")}
    sides |= {label: side(label, "ours", **chosen) for label, chosen in options.items()}
    ratios = {
        "against MarianMTModel.generate": Ratio("ours", "MarianMTModel.generate", 3.0),
        "with CUDA graphs, against MarianMTModel.generate": Ratio(
            "ours, CUDA graphs", "MarianMTModel.generate", 3.0, 6.0
        ),
        "with CUDA graphs, against without": Ratio("ours, CUDA graphs", "ours"),
        "generate() as it is on both sides": Ratio("ours, generate() as it is", "MarianMTModel.generate"),
    }
    details: dict[str, Any] = {"preset": "base", "sentences": count, "batch_tokens": most, "vocab_size": vocab_size}
    row = compare(setting, sides, ratios, "source tokens per second", **details)
    same = {
        label: sum(row == found["ours"][place] for place, row in rows.items())
        for label, rows in found.items()
        if label.startswith("ours, ") and "ours" in found
    }
    return {**row, "same_translations_as_ours": same}


def measure_kernels(setting: Setting) -> dict[str, Any]:
    """Check which attention kernels there are, and their dropout."""
    kernels = check_kernels(device(), 4 if setting.quick else 16)
    wrong = [name for name, found in kernels.items() if found.get("passed") is False]
    return {"kernels": kernels, "wrong": wrong, "chosen": chosen_kernels(device())}


def measure_ceilings(setting: Setting) -> dict[str, Any]:
    """Measure one large product in each precision, in operations per second, and a copy, in bytes per second."""
    size = 128 if setting.quick else None
    ceilings = {"bfloat16": product_ceiling(torch.bfloat16, size), "float32": product_ceiling(torch.float32, size)}
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    ceilings["float32 by TF32"] = product_ceiling(torch.float32, size)
    torch.set_float32_matmul_precision(before)
    numbers = 2**16
    if not setting.quick:
        numbers = min(2**28, torch.cuda.mem_get_info()[0] // 16)
    source = torch.empty(numbers, device=device())
    target = torch.empty_like(source)
    seconds = []
    for _ in range(8):
        started = now()
        target.copy_(source)
        seconds.append(now() - started)
    copied = 2 * source.nbytes / sorted(seconds)[len(seconds) // 2]
    return {
        "products": {name: float(f"{each:.4g}") for name, each in ceilings.items()},
        "copy": float(f"{copied:.4g}"),
    }


LARGE: dict[str, Any] = {"size": "large", "length": 512, "tokens": 32_768}
ROWS = {
    "kernels": Row(0.5, measure_kernels),
    "ceilings": Row(0.5, measure_ceilings),
    "bert_large": Row(4, partial(measure_bert, **LARGE, kind="eager", targets=(1.2, 1.3))),
    "bert_large_compiled": Row(
        5, partial(measure_bert, **LARGE, kind="compiled", targets=(1.1, None), target_on_an_h200=223_000)
    ),
    "bert_large_real_lengths": Row(
        5.5, partial(measure_bert, **LARGE, kind="real lengths", targets=(1.5, None, 1.3, None, 1.0))
    ),
    "bert_base": Row(
        3, partial(measure_bert, size="base", length=128, tokens=32_768, kind="eager", targets=(1.5, None))
    ),
    "transformer_big": Row(5, measure_translation),
    "bert_mini_graphs": Row(
        2, partial(measure_bert, size="mini", length=128, tokens=8192, kind="CUDA graphs", targets=(2.0, None))
    ),
    "beam_search": Row(4, measure_beam_search),
}


def check_arguments(arguments: GpuArguments) -> None:
    """Check the options, and hide a GPU from a run on the CPU.

    Args:
        arguments (`GpuArguments`): The options.

    Raises:
        ValueError: if they do not fit each other or the machine.
    """
    for name in arguments.rows or ():
        if name not in ROWS:
            raise ValueError(f"--rows must be some of {', '.join(ROWS)}, got {name}.")
    if not arguments.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {arguments.minutes}.")
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if not arguments.quick:
            raise ValueError("--device cpu is for --quick only: models of full size take hours there.")
        if torch.cuda.is_available():
            raise ValueError("--device cpu needs the environment variable CUDA_VISIBLE_DEVICES= here.")
    elif not torch.cuda.is_available():
        raise ValueError("There is no GPU here; --device cpu --quick sees that all rows run.")


def describe_device() -> dict[str, Any]:
    """Name the device and its memory in GB."""
    if not torch.cuda.is_available():
        return {"name": "cpu"}
    found = torch.cuda.get_device_properties(0)
    memory = round(found.total_memory / 1e9, 1)
    return {"name": found.name, "memory_gb": memory, "capability": f"{found.major}.{found.minor}"}


def measured_rows(path: Path, gpu: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Read the rows of an earlier command.

    Args:
        path (`Path`): The file, which may be missing.
        gpu (`dict[str, Any]`): This device.
        quick (`bool`): Whether this is a quick run.

    Returns:
        `dict[str, Any]`: the rows.

    Raises:
        ValueError: if they are of another device, of other versions, or of the other kind of run.
    """
    if not path.exists():
        return {}
    before = json.loads(path.read_text(encoding="utf-8"))
    versions = describe_environment("accelerate")["versions"]
    now_there = {"gpu": gpu, "quick": quick, "versions": versions}
    known = {**before, "versions": {name: before["versions"].get(name) for name in versions}}
    for name, value in now_there.items():
        if known.get(name) != value:
            raise ValueError(
                f"{path} has rows of another run: `{name}` is {known.get(name)}, and now {value}. Move it away, or "
                "give another --output_file."
            )
    return before["rows"]


def show(name: str, row: dict[str, Any]) -> None:
    """Print a row."""
    print(f"\n{name}:")
    for side, figures in row.get("sides", {}).items():
        print(
            f"  {side}: {figures['median']:,.0f} {row['unit']} ({figures['lowest']:,.0f} to {figures['highest']:,.0f})"
        )
    for side, found in row.get("utilisation", {}).items():
        share = found["operations_per_second"] / found["product_ceiling"]
        print(f"  {side}: {found['operations_per_second'] / 1e12:.4g} TFLOP/s, {share:.0%} of one large product")
    for ratio, found in row.get("ratios", {}).items():
        wanted = f", target {found['target']:g}" if "target" in found else ""
        print(f"  {ratio}: {found['median']:.2f} x ({found['lowest']:.2f} to {found['highest']:.2f}{wanted})")
    for side, reason in row.get("left_out", {}).items():
        print(f"  {side}: left out, {reason}")
    for each in ("kernels", "products", "copy", "failed"):
        if each in row:
            print(f"  {each}: {json.dumps(row[each])}")


def measure_rows(arguments: GpuArguments, wanted: list[str], rows: dict[str, Any]) -> list[str]:
    """Measure rows as far as the time allows, and write the file after each.

    Args:
        arguments (`GpuArguments`): The options, with an `output_file`.
        wanted (`list[str]`): Names of the rows.
        rows (`dict[str, Any]`): The measured rows, to which new ones are added.

    Returns:
        `list[str]`: the rows that are left.
    """
    started, gpu, left = time.monotonic(), describe_device(), list(wanted)
    for name in wanted:
        end = time.monotonic() + (0 if arguments.quick else 60 * ROWS[name].minutes)
        if len(left) < len(wanted) and end > started + 60 * arguments.minutes:
            continue
        left.remove(name)
        set_seed(0)
        is_usable = True
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        try:
            rows[name] = ROWS[name].measure(Setting(arguments.quick, arguments.repeats, end))
            if torch.cuda.is_available():
                rows[name]["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        except Exception as error:  # one row must not cost the others
            rows[name] = {"failed": reason_of(error)}
            traceback.print_exc()
            is_usable = not isinstance(error, torch.AcceleratorError)
        # after a capture that failed, allocator and streams of this process are in doubt
        is_usable = is_usable and "AcceleratorError" not in str(rows[name].get("left_out"))
        show(name, rows[name])
        write_results(arguments, "speed on one GPU", gpu=gpu, rows=rows)
        if not is_usable:  # in this process
            break
        torch.compiler.reset()
        free_memory()
    return left


def main() -> None:
    """Measure the rows that are left."""
    (arguments,) = parse_arguments(GpuArguments, description=__doc__)
    check_arguments(arguments)
    prepare(arguments)
    default = RESULTS if arguments.device == "cuda" and not arguments.quick else FOLDER / "gpu.json"
    arguments.output_file = arguments.output_file or str(default)
    rows = measured_rows(Path(arguments.output_file), describe_device(), arguments.quick)
    wanted = [name for name in ROWS if name in (arguments.rows or ROWS) and (arguments.again or name not in rows)]
    if left := measure_rows(arguments, wanted, rows):
        print(f"\nLeft: {', '.join(left)}. The same command again measures them.")


if __name__ == "__main__":
    sys.exit(run(main))
