"""Batches of about equally many tokens: many short pairs, or few long ones.

The paper batches "sentence pairs together by approximate sequence length", about 25,000 source and 25,000 target
tokens a batch (section 5.1). The size of a batch is counted with its padding, as Tensor2Tensor, fairseq
(`--max-tokens`) and the Annotated Transformer (`batch_size_fn`) do: that is what it costs in time and memory.

    cost of a batch = pairs x tokens of the longest side of its longest pair
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch


# Width, in tokens, of the noise on the source-target balance by which pairs of one length are ordered.
_BALANCE_NOISE = 2.0


def batch_cost(source_lengths: Sequence[int] | np.ndarray, target_lengths: Sequence[int] | np.ndarray) -> int:
    """Count the tokens of one batch, padding included: its number of pairs times its longest side.

    Args:
        source_lengths (`Sequence[int]` of length `pairs`):
            Tokens of each source.
        target_lengths (`Sequence[int]` of length `pairs`):
            Tokens of each target.

    Returns:
        `int`: what the batch takes of a budget; 0 for an empty batch.

    Raises:
        ValueError: if the two sides have different numbers of lengths, or a length is below 1.
        TypeError: if a length is no integer.
    """
    lengths = _longest_side(source_lengths, target_lengths)
    return int(lengths.size * lengths.max(initial=0))


def padding_efficiency(
    source_lengths: Sequence[int] | np.ndarray,
    target_lengths: Sequence[int] | np.ndarray,
    batches: Sequence[Sequence[int] | np.ndarray],
) -> float:
    """Compute the share of real tokens among all positions of padded batches, for logs.

    Each side is padded to its own longest sequence, as `DataCollatorForSeq2Seq` does.

    Args:
        source_lengths (`Sequence[int]` of length `pairs`):
            Tokens of each source.
        target_lengths (`Sequence[int]` of length `pairs`):
            Tokens of each target.
        batches (`Sequence[Sequence[int]]`):
            The indices of each batch; for example `list(sampler)`.

    Returns:
        `float`: real tokens of both sides over positions of both sides, in (0, 1]; 1.0 where there is no batch.

    Raises:
        ValueError: if the two sides have different numbers of lengths, or a length is below 1.
        TypeError: if a length is no integer.
    """
    _longest_side(source_lengths, target_lengths)
    real = positions = 0
    for side in (np.asarray(source_lengths), np.asarray(target_lengths)):
        for batch in batches:
            lengths = side[np.asarray(batch, dtype=np.int64)]
            real += int(lengths.sum())
            positions += int(lengths.size * lengths.max(initial=0))
    return real / positions if positions else 1.0


def token_budget_batches(
    source_lengths: Sequence[int] | np.ndarray, target_lengths: Sequence[int] | np.ndarray, max_tokens: int
) -> list[np.ndarray]:
    """Cut all pairs, shortest first, into as few batches as the budget allows; nothing is random.

    For evaluation and translation, where the order of the batches does not matter.

    Args:
        source_lengths (`Sequence[int]` of length `pairs`):
            Tokens of each source.
        target_lengths (`Sequence[int]` of length `pairs`):
            Tokens of each target; pass `source_lengths` again where there is no target.
        max_tokens (`int`):
            Budget of a batch, see `batch_cost`.

    Returns:
        `list[np.ndarray]`: indices of each batch, `int64`. Every index is in exactly one of them.

    Raises:
        ValueError: if the two sides have different numbers of lengths, a length is below 1, `max_tokens` is below 1,
            or a pair alone exceeds `max_tokens`.
        TypeError: if a length or `max_tokens` is no integer.
    """
    lengths = _longest_side(source_lengths, target_lengths)
    _check_budget(source_lengths, target_lengths, lengths, max_tokens)
    balance = np.asarray(source_lengths, dtype=np.int64) - np.asarray(target_lengths, dtype=np.int64)
    order = np.lexsort((_zigzag(balance, lengths), lengths))
    return np.split(order, _cuts(lengths[order], max_tokens)[1:-1]) if lengths.size else []


class TokenBudgetBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Give batches of similar length that never cost more than a budget of tokens, in a new order each epoch.

    Pairs are sorted by their longer side and cut greedily into batches, so the sizes of the batches, and with them
    their number, are the same in every epoch and `len()` holds. Which of the pairs of one length share a batch is
    drawn anew each epoch: pairs of one length are ordered by how much longer one side is than the other (it saves
    padding on the shorter side), with noise, and equals at random. Then the batches are shuffled.

    The number of batches is a multiple of `batches_per_step`: the batches with the most pairs are halved until it is.
    So every index comes exactly once in an epoch, whatever the number of ranks; nothing is dropped or repeated.

    Each run of `batches_per_step` batches, counted from the start of the epoch, is of similar length, so that ranks
    that take them in turn (as `accelerate` deals them out) do not wait for each other.

    `accelerate` needs `even_batches=False` for batches that differ in size; it loses nothing, for the batches of all
    ranks are equal in number already.

    Args:
        source_lengths (`Sequence[int]` of length `pairs`):
            Tokens of each source.
        target_lengths (`Sequence[int]` of length `pairs`):
            Tokens of each target.
        max_tokens (`int`):
            Budget of a batch: pairs times the longest side, padding counted (`batch_cost`).
        seed (`int`):
            With the epoch, it alone decides all that is random.
        batches_per_step (`int`):
            Batches of one optimizer step: ranks times accumulation.

    Raises:
        ValueError: if the two sides have different numbers of lengths, a length is below 1, a pair alone exceeds
            `max_tokens`, `max_tokens`, `seed` or `batches_per_step` is out of range, or there are too few pairs to
            make the number of batches a multiple of `batches_per_step`.
        TypeError: if a length, `max_tokens`, `seed` or `batches_per_step` is no integer.

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
        _check_integer("seed", seed, minimum=0)
        _check_integer("batches_per_step", batches_per_step, minimum=1)
        balance = np.asarray(source_lengths, dtype=np.int64) - np.asarray(target_lengths, dtype=np.int64)
        self._balance = _zigzag(balance, self._lengths)
        self._cuts = _even_out(_cuts(np.sort(self._lengths), max_tokens), batches_per_step)
        self.max_tokens = max_tokens
        self.seed = seed
        self.batches_per_step = batches_per_step
        self.epoch = 0

    def __len__(self) -> int:
        """Number of batches of any epoch, over all ranks."""
        return self._cuts.size - 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration draws; without a call, every iteration is the same.

        Args:
            epoch (`int`):
                Number of the epoch, from 0.

        Raises:
            TypeError: if `epoch` is no integer.
            ValueError: if `epoch` is negative.
        """
        _check_integer("epoch", epoch, minimum=0)
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of one batch after the other."""
        generator = np.random.default_rng((self.seed, self.epoch))
        noise = generator.random(self._lengths.size, dtype=np.float32) * _BALANCE_NOISE
        order = np.lexsort((self._balance + noise, self._lengths))
        steps = np.arange(len(self)).reshape(-1, self.batches_per_step)
        generator.shuffle(steps, axis=0)
        # Within a step too, or the last rank would always have the longest batch.
        for batch in generator.permuted(steps, axis=1).ravel():
            yield order[self._cuts[batch] : self._cuts[batch + 1]].tolist()


def _longest_side(
    source_lengths: Sequence[int] | np.ndarray, target_lengths: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Return the longer side of each pair, `int64` of shape `(pairs,)`."""
    sides = {"source_lengths": np.asarray(source_lengths), "target_lengths": np.asarray(target_lengths)}
    for name, side in sides.items():
        if side.size and not np.issubdtype(side.dtype, np.integer):
            raise TypeError(f"`{name}` must hold integers, got {side.dtype}.")
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


def _check_integer(name: str, value: int, minimum: int) -> None:
    """Raise unless `value` is an integer of at least `minimum`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an integer, got {value!r}.")
    if value < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {value}.")


def _check_budget(
    source_lengths: Sequence[int] | np.ndarray,
    target_lengths: Sequence[int] | np.ndarray,
    lengths: np.ndarray,
    max_tokens: int,
) -> None:
    """Raise if the budget is nonsense or the longest pair does not fit."""
    _check_integer("max_tokens", max_tokens, minimum=1)
    if lengths.size and lengths.max() > max_tokens:
        index = int(lengths.argmax())
        raise ValueError(
            f"Pair {index} has {source_lengths[index]} source and {target_lengths[index]} target tokens, more than "
            f"`max_tokens` ({max_tokens}) in a batch of its own; truncate or drop such pairs "
            f"({int((lengths > max_tokens).sum())} in all), or raise the budget."
        )


def _zigzag(balance: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Turn the order of source-target balance round at every other length, so that it has no jump between lengths."""
    return np.where(lengths % 2 == 0, balance, -balance)


def _cuts(sorted_lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """Find where each batch starts in lengths that ascend; the last entry is the number of pairs."""
    cuts = [0]
    while cuts[-1] < sorted_lengths.size:
        start = cuts[-1]
        # The shortest pair of the batch bounds how many pairs can be in it.
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
