"""The cost of a training: operations by formula, time and memory from a few updates on this machine."""

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import datasets
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.batching import TokenBudgetBatchSampler, measure_pair_lengths
from ..models.checks import IGNORED_LABEL, check_integer
from ..models.text_batches import padded


MASKED_SHARE = 0.15  # of the tokens of BERT's pre-training
# What glibc's allocator leaves unused between the tensors of a forward pass, as a share of them: about a third in
# scripts/benchmark/training_memory.py, half with small batches.
CPU_HOLES = 0.3


@dataclass
class Estimate:
    """The cost of a training; `print` shows it in the usual units.

    Args:
        parameters (`int`): Parameters of the model.
        tokens_per_update (`float`): Mean number of real tokens of an update; of pairs, those of the target.
        flops (`float`): Operations of all matrix products of the run on real tokens, as this machine computes them:
            two for each multiplication with its addition, forward and twice that backward.
        memory (`float`): Peak memory of an update in bytes: weights, gradients, the optimizer's state, and what the
            forward pass keeps for the backward pass, on a CPU with the holes between its tensors. The memory of the
            libraries is not included, and with `flops_per_second` that of the forward pass is not either.
        seconds (`float`): Time of all updates, without evaluation and saving.
    """

    parameters: int
    tokens_per_update: float
    flops: float
    memory: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.parameters:,} parameters, {self.tokens_per_update:,.0f} tokens an update, {self.flops:.2e} "
            f"operations, {self.memory / 1e9:.3g} GB of memory, {timedelta(seconds=round(self.seconds))} (h:mm:ss)"
        )


def estimate(
    config: PreTrainedConfig,
    dataset: Any,
    *,
    updates: int,
    max_tokens_per_batch: int,
    bf16: bool = False,
    probes: int = 8,
    seed: int = 0,
    flops_per_second: float | None = None,
) -> Estimate:
    """Predict the cost of training a model on a corpus: on this machine from a few updates, or at a given speed.

    ```python
    estimate(VanillaTransformerConfig.preset("base"), pairs, updates=100_000, max_tokens_per_batch=25_000)
    ```

    The optimizer is AdamW: an update with `muon` takes longer, and needs less memory. Nothing is saved, and torch's
    random state is restored.

    Args:
        config (`PreTrainedConfig`): Config of a model of this package: an encoder-decoder is trained on pairs, an
            encoder is pre-trained on both tasks, a causal model on its rows as they are.
        dataset (`datasets.Dataset`): Tokenized, with `input_ids` and, for an encoder-decoder, `labels`: a split of the
            result of [`~hf_vanilla.data.tokenize_parallel_dataset`] or
            [`~hf_vanilla.data.build_pretraining_dataset`].
        updates (`int`): Length of the run.
        max_tokens_per_batch (`int`): Budget of a batch, as in [`VanillaTrainingArguments`].
        bf16 (`bool`): Whether products are computed in bfloat16.
        probes (`int`): Updates to measure, after one to warm up.
        seed (`int`): Seed of weights and batches.
        flops_per_second (`float`, *optional*): Operations per second that a training reaches on other GPUs, of all of
            them together: the time then follows from the operations, and nothing is measured. As an example, 40 % of
            what one H200 computes at most is 396e12.

    Returns:
        `Estimate`: the cost.

    Raises:
        TypeError: if `config` is of another kind, `dataset` is no `datasets.Dataset` or has other columns than lists
            of integers, a number is no integer, `flops_per_second` is no number, or `bf16` is no truth value.
        ValueError: if a number is out of its range, or the dataset is empty, lacks a column or has an empty row or one
            that is longer than `max_tokens_per_batch`.
    """
    numbers = {"updates": updates, "max_tokens_per_batch": max_tokens_per_batch, "probes": probes, "seed": seed}
    _check_options(config, numbers, bf16)
    _check_speed(flops_per_second)
    lengths = _row_lengths(dataset, ("input_ids", "labels") if config.is_encoder_decoder else ("input_ids",))
    tokens = lengths[-1]
    is_measured = flops_per_second is None
    flops = _forward_flops(config, lengths)
    longer = np.maximum(lengths[0], tokens)
    if longer.max() > max_tokens_per_batch:
        raise ValueError(
            f"`max_tokens_per_batch` must be at least {longer.max()}, the length of row {longer.argmax()}, got "
            f"{max_tokens_per_batch}; raise it, or truncate or drop long rows."
        )
    sampler = TokenBudgetBatchSampler(longer, longer, max_tokens_per_batch, seed=seed)
    batches = [batch for batch, _ in zip(sampler, range(probes + 1 if is_measured else 0), strict=False)]
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        probe = _Probe(config, bf16, _device() if is_measured else torch.device("meta"))
        for number, batch in enumerate(batches):
            probe.update(dataset[batch], counts=number > 0 or len(batches) == 1)
    examples_per_update = len(longer) / len(sampler)
    all_flops = 3 * float(flops.mean()) * examples_per_update * updates
    return Estimate(
        parameters=probe.model.num_parameters(),
        tokens_per_update=float(tokens.mean()) * examples_per_update,
        flops=all_flops,
        memory=probe.memory(),
        seconds=sum(probe.seconds) / len(probe.seconds) * updates
        if flops_per_second is None
        else all_flops / flops_per_second,
    )


def _check_options(config: Any, numbers: dict[str, Any], bf16: Any) -> None:
    """Check the arguments of `estimate` but for the dataset."""
    for name, value in numbers.items():
        check_integer(name, value, 0 if name == "seed" else 1)
    if not isinstance(bf16, bool):
        raise TypeError(f"`bf16` must be True or False, got {bf16!r}.")
    if not hasattr(config, "forward_flops"):
        raise TypeError(
            f"`config` must be the config of a model of hf_vanilla that reads tokens, got a {type(config).__name__}."
        )


def _check_speed(flops_per_second: Any) -> None:
    """Check the speed that `estimate` is given."""
    if flops_per_second is None:
        return
    if isinstance(flops_per_second, bool) or not isinstance(flops_per_second, int | float):
        raise TypeError(f"`flops_per_second` must be a number, got {flops_per_second!r}.")
    if not 0 < flops_per_second < math.inf:
        raise ValueError(f"`flops_per_second` must be finite and above 0, got {flops_per_second}.")


def _row_lengths(dataset: Any, columns: Sequence[str]) -> list[np.ndarray]:
    """Check the columns that are trained on, and return the row lengths of each: `int64` of shape `(rows,)`."""
    if not isinstance(dataset, datasets.Dataset):
        raise TypeError(
            f"`dataset` must be a `datasets.Dataset`, got {type(dataset).__name__}; of several splits give one, "
            "and load a stream first."
        )
    if not len(dataset):
        raise ValueError("`dataset` must have at least one row, got none.")
    for name in columns:
        if name not in dataset.column_names:
            raise ValueError(f"`dataset` must have a column `{name}`, got {dataset.column_names}; tokenize it first.")
        kind = dataset.features[name]
        is_list = isinstance(kind, datasets.List | datasets.LargeList)
        if not is_list or not getattr(kind.feature, "dtype", "").startswith(("int", "uint")):
            raise TypeError(f"`dataset` must have lists of integers in `{name}`, got {kind}; tokenize it first.")
    measured = measure_pair_lengths(dataset.select_columns(list(columns)))
    lengths = [side.astype(np.int64) for side in (measured.source, measured.target) if side is not None]
    for name, side in zip(columns, lengths, strict=True):
        if side.min() < 1:
            raise ValueError(
                f"`dataset` must have at least one token in each row of `{name}`, got none in row {side.argmin()}; "
                "drop such rows."
            )
    return lengths


def _forward_flops(config: Any, lengths: list[np.ndarray]) -> torch.Tensor:
    """Count the operations of a forward pass of each row; a causal model predicts all tokens but the first."""
    inputs, *labels = (torch.from_numpy(side).double() for side in lengths)
    is_causal = "AutoModelForCausalLM" in config.auto_classes()
    label_counts = labels[0] if labels else inputs - 1 if is_causal else inputs * MASKED_SHARE
    return config.forward_flops(inputs, label_counts)


def _device() -> torch.device:
    """Return the device to measure on: an accelerator if there is one."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


class _Probe:
    """Measures updates of a new model."""

    def __init__(self, config: Any, bf16: bool, device: torch.device) -> None:
        names = ("AutoModelForSeq2SeqLM", "AutoModelForCausalLM", "AutoModelForPreTraining")
        auto_class = next(name for name in names if name in config.auto_classes())
        self.is_causal = auto_class == "AutoModelForCausalLM"
        with device if device.type == "meta" else nullcontext():
            self.model: PreTrainedModel = config.auto_classes()[auto_class](config).to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.bf16 = bf16
        self.seconds: list[float] = []
        self.kept_bytes: list[int] = []

    def update(self, rows: dict[str, list[list[int]]], *, counts: bool) -> None:
        """Run one update, and record its time and memory if it counts."""
        inputs = self._inputs(rows)
        started = time.perf_counter()
        kept: dict[int, int] = {}
        own = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        watched = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with watched, torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.bf16):
            loss = self.model(**inputs, return_dict=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()  # waits for an accelerator
        if counts:
            self.seconds.append(time.perf_counter() - started)
            self.kept_bytes.append(sum(kept.values()))

    def memory(self) -> float:
        """Return the bytes of weights, gradients and two moments, and of the largest forward pass."""
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        holes = CPU_HOLES if self.model.device.type == "cpu" else 0.0
        return 4 * weights + (1 + holes) * max(self.kept_bytes, default=0)

    def _inputs(self, rows: dict[str, list[list[int]]]) -> dict[str, torch.Tensor]:
        """Make a batch; for an encoder, draw masked tokens and next sentences."""
        device = self.model.device
        inputs = {
            "input_ids": padded(rows["input_ids"], self.model.config.pad_token_id or 0, device),
            "attention_mask": padded([[1] * len(ids) for ids in rows["input_ids"]], 0, device),
        }
        if self.model.config.is_encoder_decoder:
            return {**inputs, "labels": padded(rows["labels"], IGNORED_LABEL, device)}
        if self.is_causal:
            return {**inputs, "labels": padded(rows["input_ids"], IGNORED_LABEL, device)}
        is_masked = (torch.rand(inputs["input_ids"].shape, device=device) < MASKED_SHARE) & (
            inputs["attention_mask"] == 1
        )
        labels = inputs["input_ids"].masked_fill(~is_masked, IGNORED_LABEL)
        next_sentence_label = torch.arange(len(rows["input_ids"]), device=device) % 2
        return {**inputs, "labels": labels, "next_sentence_label": next_sentence_label}


__all__ = ["Estimate", "estimate"]
