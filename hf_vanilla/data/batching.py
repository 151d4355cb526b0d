"""Batches of approximately equal numbers of tokens: many short pairs, or few long ones.

The paper batches "sentence pairs together by approximate sequence length", about 25,000 source and 25,000 target
tokens per batch (section 5.1). The size of a batch includes padding, as in Tensor2Tensor, fairseq (`--max-tokens`) and
the Annotated Transformer (`batch_size_fn`): time and memory depend on it.

    cost of a batch = pairs x tokens of the longest side of its longest pair
"""

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.compute
import torch

from ..models.checks import check_integer


# Range, in tokens, of the noise on the source-target balance that orders pairs of the same length.
_BALANCE_NOISE = 2.0


class TokenBudgetBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Yield batches of similar length within a budget of tokens, in a new order each epoch.

    Pairs are sorted by their longer side and split greedily into batches, so the sizes and the number of batches are
    the same in every epoch, and `len()` is exact. Which pairs of the same length share a batch changes with the epoch:
    they are sorted by the difference between their sides (this saves padding on the shorter side), with noise, and
    ties are broken at random. Then the batches are shuffled.

    The number of batches is a multiple of `batches_per_step`: batches with the most pairs are halved until it is. So
    every index occurs exactly once per epoch for any number of ranks; none is dropped or repeated.

    The `batches_per_step` batches of each step have similar lengths, so that ranks that take them in turn (as in
    `accelerate`) do not wait for each other.

    Batches of different sizes need `even_batches=False` in `accelerate`; nothing is lost, as all ranks get the same
    number of batches anyway.

    Args:
        source_lengths (`Sequence[int]` of length `pairs`): Tokens of each source.
        target_lengths (`Sequence[int]` of length `pairs`): Tokens of each target.
        max_tokens (`int`): Budget of a batch: pairs times the longest side, padding included.
        seed (`int`): Seed, together with the epoch, of all random choices.
        batches_per_step (`int`): Batches of one optimizer step: ranks times accumulation steps.

    Raises:
        ValueError: if the two sides have different numbers of lengths, a length is below 1, a pair alone exceeds
            `max_tokens`, `max_tokens`, `seed` or `batches_per_step` is out of range, or there are too few pairs to
            make the number of batches a multiple of `batches_per_step`.
        TypeError: if a length, `max_tokens`, `seed` or `batches_per_step` is not an integer.

    Source: Vaswani et al. 2017, 5.1.
    """

    def __init__(
        self,
        source_lengths: Sequence[int] | np.ndarray,
        target_lengths: Sequence[int] | np.ndarray,
        max_tokens: int,
        *,
        seed: int = 0,
        batches_per_step: int = 1,
    ) -> None:
        self._lengths = _longest_side(source_lengths, target_lengths)
        _check_budget(source_lengths, target_lengths, self._lengths, max_tokens)
        check_integer("seed", seed, 0)
        check_integer("batches_per_step", batches_per_step)
        balance = np.asarray(source_lengths, dtype=np.int64) - np.asarray(target_lengths, dtype=np.int64)
        self._balance = _zigzag(balance, self._lengths)
        self._cuts = _even_out(_cuts(np.sort(self._lengths), max_tokens), batches_per_step)
        self.max_tokens = max_tokens
        self.seed = seed
        self.batches_per_step = batches_per_step
        self.epoch = 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch, over all ranks."""
        return self._cuts.size - 1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; without a call, all iterations are the same.

        Args:
            epoch (`int`): Number of the epoch, from 0.

        Raises:
            TypeError: if `epoch` is not an integer.
            ValueError: if `epoch` is negative.
        """
        check_integer("epoch", epoch, 0)
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each batch."""
        generator = np.random.default_rng((self.seed, self.epoch))
        noise = generator.random(self._lengths.size, dtype=np.float32) * _BALANCE_NOISE
        order = np.lexsort((self._balance + noise, self._lengths))
        steps = np.arange(len(self)).reshape(-1, self.batches_per_step)
        generator.shuffle(steps, axis=0)
        # Also within each step, or the last rank would always get the longest batch.
        for batch in generator.permuted(steps, axis=1).ravel():
            yield order[self._cuts[batch] : self._cuts[batch + 1]].tolist()


class LengthSortedBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Yield batches of at most `max_tokens` tokens in order of length, longest first, for evaluation.

    Processes can gather their predictions: the `num_processes` batches of each step have the same number of rows, and
    the number of batches is a multiple of `num_processes`. Where the number of rows is not such a multiple, the last
    row is repeated at the end. A row longer than the budget gets a batch of its own.

    Args:
        lengths (`np.ndarray` of shape `(rows,)`): Number of tokens of the longer side of each row.
        max_tokens (`int`): Budget of a batch, padding included.
        num_processes (`int`, *optional*, defaults to 1): Number of processes that share the batches.

    Raises:
        ValueError: if `max_tokens` or `num_processes` is below 1.
        TypeError: if `max_tokens` or `num_processes` is not an integer.
    """

    def __init__(self, lengths: np.ndarray, max_tokens: int, *, num_processes: int = 1) -> None:
        check_integer("max_tokens", max_tokens)
        check_integer("num_processes", num_processes)
        order = np.argsort(-lengths, kind="stable")
        self.num_rows = len(order)
        self.num_repeated = -self.num_rows % num_processes
        order = np.concatenate((order, order[-1:].repeat(self.num_repeated)))
        self.batches: list[np.ndarray] = []
        start = 0
        while start < len(order):
            rows = max(1, int(max_tokens // max(1, lengths[order[start]])))
            stop = min(start + rows * num_processes, len(order))
            self.batches.extend(np.split(order[start:stop], num_processes))
            start = stop
        self.num_processes = num_processes
        # The first position of each row of the dataset in the concatenated batches.
        self.positions = np.zeros(self.num_rows, dtype=np.int64)
        self.positions[order[: self.num_rows]] = np.arange(self.num_rows)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            yield batch.tolist()

    def repeated_rows(self, step: int, process_index: int) -> int:
        """Count the rows at the end of a batch that repeat an earlier row.

        Args:
            step (`int`): Number of the step, from 0.
            process_index (`int`): The process of the batch.

        Returns:
            `int`: their number; 0 except in the last step.
        """
        if step < len(self.batches) // self.num_processes - 1:
            return 0
        rows = len(self.batches[-1])
        repeated_after = (self.num_processes - 1 - process_index) * rows
        return min(rows, max(0, self.num_repeated - repeated_after))

    def restore(self, gathered: Any) -> Any:
        """Restore the order of the dataset in gathered rows, and drop repeated ones.

        Args:
            gathered (`np.ndarray`, or a tuple, list or dict of such): Rows in the order of the batches. Arrays with
                another number of rows are returned unchanged.

        Returns:
            The same, with one row per row of the dataset.
        """
        if isinstance(gathered, tuple | list):
            return type(gathered)(self.restore(part) for part in gathered)
        if isinstance(gathered, dict):
            return {name: self.restore(part) for name, part in gathered.items()}
        if getattr(gathered, "ndim", 0) and len(gathered) == self.num_rows + self.num_repeated:
            return gathered[self.positions]
        return gathered


@dataclass
class PairLengths:
    """Number of tokens of each row of a tokenized dataset.

    Args:
        source (`np.ndarray` of shape `(pairs,)`): Lengths of `input_ids`.
        target (`np.ndarray` of shape `(pairs,)`, *optional*): Lengths of `labels`; `None` where there are none.
    """

    source: np.ndarray
    target: np.ndarray | None

    def longer_side(self) -> np.ndarray:
        """Return the larger of the two lengths of each row.

        Returns:
            `np.ndarray` of shape `(pairs,)`: the lengths.
        """
        return self.source if self.target is None else np.maximum(self.source, self.target)


def measure_pair_lengths(dataset: Any) -> PairLengths:
    """Compute the lengths of `input_ids` and `labels`; of a `datasets.Dataset`, without creating Python objects.

    Args:
        dataset (`datasets.Dataset` or `torch.utils.data.Dataset`): Tokenized pairs.

    Returns:
        `PairLengths`: the lengths of both sides.

    Raises:
        ValueError: if a `datasets.Dataset` has no column `input_ids`.
    """
    if not isinstance(dataset, datasets.Dataset):
        pairs = [_lengths_of_row(dataset[index]) for index in range(len(dataset))]
        sides = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return PairLengths(sides[:, 0], sides[:, 1] if sides[:, 1].any() else None)
    if "input_ids" not in dataset.column_names:
        raise ValueError(
            f"The dataset must have a column `input_ids`, it has {dataset.column_names}; tokenize it first."
        )
    # labels that are no lists, as of classes, are no target side
    kind = dataset.data.column("labels").type if "labels" in dataset.column_names else pyarrow.null()
    types = pyarrow.types
    has_target = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    target = _lengths_of_column(dataset, "labels") if has_target else None
    return PairLengths(_lengths_of_column(dataset, "input_ids"), target)


def _longest_side(
    source_lengths: Sequence[int] | np.ndarray, target_lengths: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Return the longer side of each pair, `int64` of shape `(pairs,)`."""
    sides = {"source_lengths": np.asarray(source_lengths), "target_lengths": np.asarray(target_lengths)}
    for name, side in sides.items():
        if side.size and not np.issubdtype(side.dtype, np.integer):
            raise TypeError(f"`{name}` must be integers, got {side.dtype}.")
        if side.ndim != 1:
            raise ValueError(f"`{name}` must have one dimension, got shape {side.shape}.")
        if side.size and side.min() < 1:
            index = int(side.argmin())
            raise ValueError(f"`{name}` must be at least 1, got {side[index]} at index {index}; drop empty pairs.")
    source, target = sides.values()
    if source.size != target.size:
        raise ValueError(
            f"`source_lengths` ({source.size}) and `target_lengths` ({target.size}) must be equal in number."
        )
    return np.maximum(source, target).astype(np.int64)


def _check_budget(
    source_lengths: Sequence[int] | np.ndarray,
    target_lengths: Sequence[int] | np.ndarray,
    lengths: np.ndarray,
    max_tokens: int,
) -> None:
    """Raise if the budget is invalid or the longest pair does not fit."""
    check_integer("max_tokens", max_tokens)
    if lengths.size and lengths.max() > max_tokens:
        index = int(lengths.argmax())
        raise ValueError(
            f"Pair {index} has {source_lengths[index]} source and {target_lengths[index]} target tokens, more than "
            f"`max_tokens` ({max_tokens}) even in a batch of its own; truncate or drop such pairs "
            f"({int((lengths > max_tokens).sum())} in all), or raise the budget."
        )


def _zigzag(balance: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Reverse the order of source-target balance at every other length, so that it is continuous across lengths."""
    return np.where(lengths % 2 == 0, balance, -balance)


def _cuts(sorted_lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return the start of each batch in ascending lengths; the last entry is the number of pairs."""
    cuts = [0]
    while cuts[-1] < sorted_lengths.size:
        start = cuts[-1]
        # The shortest pair of the batch limits its number of pairs.
        candidates = sorted_lengths[start : start + max_tokens // sorted_lengths[start]]
        costs = candidates * np.arange(1, candidates.size + 1)
        cuts.append(start + int(np.searchsorted(costs, max_tokens, side="right")))
    return np.array(cuts, dtype=np.int64)


def _even_out(cuts: np.ndarray, batches_per_step: int) -> np.ndarray:
    """Halve the batches with the most pairs until their number is a multiple of `batches_per_step`."""
    pairs = int(cuts[-1])
    batches = max(-(-(cuts.size - 1) // batches_per_step), 1) * batches_per_step
    if pairs < batches:
        raise ValueError(
            f"{pairs} pairs can't fill {batches} batches, the next multiple of `batches_per_step` "
            f"({batches_per_step}); use fewer ranks, fewer accumulation steps or more data."
        )
    for _ in range(batches - cuts.size + 1):
        largest = int(np.diff(cuts).argmax())
        cuts = np.insert(cuts, largest + 1, (cuts[largest] + cuts[largest + 1]) // 2)
    return cuts


def _lengths_of_column(dataset: datasets.Dataset, name: str) -> np.ndarray:
    """Compute the lengths of the lists of one column from its Arrow table."""
    # A null row has no tokens.
    lengths = pyarrow.compute.list_value_length(dataset.data.column(name)).fill_null(0).to_numpy()
    # The table of a shuffled or selected dataset has its rows in the original order. Reading them through the dataset
    # would take a thousand times as long.
    rows = dataset._indices
    return lengths if rows is None else lengths[rows.column(0).to_numpy()]


def _lengths_of_row(row: Any) -> tuple[int, int]:
    """Return the lengths of both sides of a row, 0 for a missing side."""
    labels = row.get("labels")
    has_target = isinstance(labels, Sized) and getattr(labels, "ndim", 1) > 0  # not the number of a class
    return len(row["input_ids"]), len(labels) if has_target else 0
