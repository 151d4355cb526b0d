"""Token-budget batches of streamed data, whose order can be continued exactly from a small state.

    stream     row row row row ...              shard after shard, pass after pass, without an end
    buffer     |---- buffer_size rows ----|     planned like a small dataset
    batches    |  |    |   |     | |      |     of similar lengths, in random order

The state is the place in the stream where the buffer begins, and how many of its batches were given. A continued
stream reads at most one buffer again, and its batches are the same as without the interruption.
"""

import time
import zlib
from collections.abc import Iterator
from typing import Any, Literal

import datasets
import numpy as np
import torch
from huggingface_hub.errors import HTTPError
from pyarrow import ArrowInvalid
from transformers.utils import logging

from ..models.checks import check_integer
from .batching import TokenBudgetBatchSampler
from .files import BadRecords, check_choice


logger = logging.get_logger(__name__)

# What reading a shard raises when it is away or damaged, or the network is away; `datasets` retries some of them by
# itself first.
_UNREADABLE = (OSError, HTTPError, EOFError, zlib.error, ArrowInvalid, UnicodeDecodeError)


class TokenBudgetStream(torch.utils.data.IterableDataset):
    """Batches of approximately equal numbers of tokens of a stream, without an end, and with a state.

    The rows are read shard after shard, the shards in a new order in each pass. Every `buffer_size` rows are batched
    as [`TokenBudgetBatchSampler`] does it: by length, then in random order. A buffer ends with its pass, so each row
    is given once a pass. With several processes each reads its share: its own shards if their number is a multiple of
    the processes, else every n-th row. No process runs out of batches, so none waits for another for ever.

    [`~hf_vanilla.training.VanillaTrainer`] makes one of a `datasets.IterableDataset` if `max_tokens_per_batch` is set,
    and keeps its state in the checkpoints. Anywhere else it is a dataset that makes its own batches:

    ```python
    stream = TokenBudgetStream(tokenized, 4096, buffer_size=20_000)
    for batch in DataLoader(stream, batch_size=None, collate_fn=collator):
        ...
    state = stream.state_dict()  # after the last batch; of small numbers and strings
    ```

    Args:
        dataset (`datasets.IterableDataset`): Tokenized rows with `input_ids`, and `labels` if there is a target side.
            It must not be shuffled with a buffer, whose rows are not in its state, nor divided among processes.
        max_tokens (`int`): Budget of a batch: rows times the longest side, padding included.
        buffer_size (`int`): Rows that are batched together. More means less padding and a better mixture, but more to
            hold, and to read again by a continued stream.
        seed (`int`): Seed of the order of shards and batches.
        batches_per_step (`int`): Batches of one optimizer step of this process, which get similar lengths.
        num_processes (`int`): Number of processes that share the stream.
        process_index (`int`): Number of this process, from 0.
        on_bad_record (`str`): What to do with a row without tokens or longer than the budget: `"stop"` raises an
            error, `"skip"` counts it in the state.
        on_lost_shard (`str`): What to do with a shard that can't be read even after `retries`: `"stop"` raises an
            error, `"skip"` leaves out the rest of it in this pass and notes it in the state.
        retries (`int`): How often a failed read is tried again, from the row where it failed.
        retry_wait (`float`): Seconds before the first retry; before each further one it is twice as long.

    Raises:
        TypeError: if `dataset` is no `datasets.IterableDataset`, or a number is not an integer.
        ValueError: if a number is out of its range, or `dataset` is shuffled with a buffer; while reading, if a row
            has no `input_ids`, a record is bad, or a process finds none in a whole pass.
        OSError: while reading, if a shard is lost.

    Source: Vaswani et al. 2017, 5.1.
    """

    def __init__(
        self,
        dataset: datasets.IterableDataset,
        max_tokens: int,
        *,
        buffer_size: int = 10_000,
        seed: int = 0,
        batches_per_step: int = 1,
        num_processes: int = 1,
        process_index: int = 0,
        on_bad_record: Literal["stop", "skip"] = "stop",
        on_lost_shard: Literal["stop", "skip"] = "stop",
        retries: int = 5,
        retry_wait: float = 1.0,
    ) -> None:
        _check_dataset(dataset)
        check_choice("on_lost_shard", on_lost_shard)
        check_choice("on_bad_record", on_bad_record)
        settings = {
            "max_tokens": max_tokens,
            "buffer_size": buffer_size,
            "seed": seed,
            "batches_per_step": batches_per_step,
            "num_processes": num_processes,
            "process_index": process_index,
        }
        for name, value in {**settings, "retries": retries}.items():
            check_integer(name, value, 0 if name in ("seed", "process_index", "retries") else 1)
        if process_index >= num_processes:
            raise ValueError(f"`process_index` ({process_index}) must be below `num_processes` ({num_processes}).")
        self.dataset = dataset
        self.settings = settings
        self.on_bad_record: Literal["stop", "skip"] = on_bad_record
        self.on_lost_shard = on_lost_shard
        self.retries = retries
        self.retry_wait = retry_wait
        begin = {"buffer": 0, "bad_records": 0, "source": _ShardReader.BEGIN}
        self._begin: dict[str, Any] = {"buffer_start": begin, "batches_given": 0, "bad_records": 0, "lost_shards": {}}
        self._state = self._begin

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that was given.

        Returns:
            `dict[str, Any]`: values that JSON can hold. `bad_records` is how many were skipped so far, and
            `lost_shards` maps `<pass>.<shard in it>` to how many rows of a lost shard were read.
        """
        return {"settings": {**self.settings, "num_shards": self.dataset.num_shards}, **self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration after the batch that a state is of.

        Args:
            state (`dict[str, Any]`): As [`state_dict`] returns it, of a stream of the same data and settings.

        Raises:
            ValueError: if the state is of a stream with other settings.
        """
        state = dict(state)
        before, now = state.pop("settings"), self.state_dict()["settings"]
        differing = [
            f"`{name}` is {value}, not {before.get(name)}" for name, value in now.items() if value != before.get(name)
        ]
        if differing:
            raise ValueError(
                f"The state is that of another stream: {', '.join(differing)}. Give the same settings to continue it."
            )
        self._begin = self._state = state

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        """Yield batches of rows, from the beginning or the loaded state on."""
        start, given = self._begin["buffer_start"], self._begin["batches_given"]
        reader = _ShardReader(self, start["source"], self._begin["lost_shards"])
        rows = iter(reader)
        while True:
            bad = BadRecords(self.on_bad_record, live=True)
            examples = self._fill(rows, bad)
            seen = start["bad_records"] + bad.count
            for index, batch in enumerate(self._plan(examples, start["buffer"])):
                if index < given:
                    continue
                self._state = {
                    "buffer_start": start,
                    "batches_given": index + 1,
                    "bad_records": seen,
                    "lost_shards": dict(reader.lost),
                }
                yield [examples[row] for row in batch]
            start = {"buffer": start["buffer"] + 1, "bad_records": seen, "source": reader.position}
            given = 0

    def _fill(self, rows: Iterator[dict[str, Any] | None], bad: BadRecords) -> list[dict[str, Any]]:
        """Read a buffer: a multiple of `batches_per_step` rows, which can be batched so that none is left over."""
        batches_per_step = self.settings["batches_per_step"]
        most = -(-self.settings["buffer_size"] // batches_per_step) * batches_per_step
        examples: list[dict[str, Any]] = []
        is_past_end = False
        ends_in_a_row = 0
        for row in rows:
            if row is None:
                ends_in_a_row += 1
                is_past_end = is_past_end or bool(examples)
            elif (reason := self._why_bad(row)) is not None:
                bad(
                    ValueError(f"The stream has a record {reason}; drop such records, or skip them (`on_bad_record`).")
                )
            else:
                examples.append(row)
                ends_in_a_row = 0
            if ends_in_a_row > 1:
                raise ValueError(
                    f"`dataset` must have at least one record for each of the {self.settings['num_processes']} "
                    f"processes, but process {self.settings['process_index']} found none in a pass."
                )
            if len(examples) == most or (is_past_end and len(examples) % batches_per_step == 0):
                break
        return examples

    def _why_bad(self, row: dict[str, Any]) -> str | None:
        """Say why a row can't be in a batch."""
        if "input_ids" not in row:
            raise ValueError(f"`dataset` must have a column `input_ids`, it has {list(row)}; tokenize it first.")
        sides = _lengths_of(row)
        if min(sides) < 1:
            return f"of {sides[0]} source and {sides[1]} target tokens"
        if max(sides) > self.settings["max_tokens"]:
            return (
                f"of {sides[0]} source and {sides[1]} target tokens, more than `max_tokens` "
                f"({self.settings['max_tokens']}) even in a batch of its own"
            )
        return None

    def _plan(self, examples: list[dict[str, Any]], buffer: int) -> TokenBudgetBatchSampler:
        """Batch the rows of a buffer."""
        lengths = np.array([_lengths_of(row) for row in examples])
        plan = TokenBudgetBatchSampler(
            lengths[:, 0],
            lengths[:, 1],
            self.settings["max_tokens"],
            seed=self.settings["seed"],
            batches_per_step=self.settings["batches_per_step"],
        )
        plan.set_epoch(buffer)
        return plan


class _ShardReader:
    """Reads the rows of one process, shard after shard, and `None` at the end of each pass.

    `position` is where the last row was: pass, shard in its order, rows of that shard, and the state of its dataset.
    """

    BEGIN = {"pass": 0, "shard": 0, "rows": 0, "state": None}

    def __init__(self, stream: TokenBudgetStream, position: dict[str, Any], lost: dict[str, int]) -> None:
        self.stream = stream
        self.position = dict(position)
        self.lost = dict(lost)
        self.num_shards = stream.dataset.num_shards
        self.num_processes = stream.settings["num_processes"]
        self.process_index = stream.settings["process_index"]
        self.has_own_shards = self.num_shards % self.num_processes == 0

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        while True:
            number = self.position["pass"]
            order = np.random.default_rng((self.stream.settings["seed"], number)).permutation(self.num_shards)
            if self.has_own_shards:
                order = order[self.process_index :: self.num_processes]
            while self.position["shard"] < len(order):
                yield from self._rows_of(int(order[self.position["shard"]]))
                self.position = {**self.BEGIN, "pass": number, "shard": self.position["shard"] + 1}
            self.position = {**self.BEGIN, "pass": number + 1}
            yield None

    def _rows_of(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield this process's rows of a shard, from the position on."""
        shard = self.stream.dataset.shard(self.num_shards, index)
        key = f"{self.position['pass']}.{self.position['shard']}"
        rows = self._open(shard)
        failures = 0
        # A shard that was lost once ends at the same row when the stream is continued.
        while self.lost.get(key) != self.position["rows"]:
            try:
                row = next(rows, None)
            except _UNREADABLE as error:
                failures += 1
                if self._give_up(index, failures, error):
                    self.lost[key] = self.position["rows"]
                rows = self._open(shard)
                continue
            if row is None:
                return
            failures = 0
            number = self.position["rows"]
            self.position = {**self.position, "rows": number + 1, "state": shard.state_dict()}
            if self.has_own_shards or number % self.num_processes == self.process_index:
                yield row

    def _open(self, shard: datasets.IterableDataset) -> Iterator[dict[str, Any]]:
        """Read a shard from the position on."""
        if self.position["state"] is not None:
            shard.load_state_dict(self.position["state"])
        return iter(shard)

    def _give_up(self, index: int, failures: int, error: Exception) -> bool:
        """Wait before the next retry; after the last one raise, or return true to skip the shard."""
        what = f"Shard {index} of {self.num_shards} can't be read after row {self.position['rows']}: {error}"
        if failures <= self.stream.retries:
            wait = self.stream.retry_wait * 2 ** (failures - 1)
            logger.warning(f"{what}. Retry {failures} of {self.stream.retries} in {wait:g} seconds.")
            time.sleep(wait)
            return False
        if self.stream.on_lost_shard == "stop":
            raise OSError(
                f"{what}. {self.stream.retries} retries failed. Restore it and resume, or leave out the rest of lost "
                "shards with `on_lost_shard` as skip."
            ) from error
        logger.warning(f"{what}. The rest of it is left out in this pass.")
        return True


def _lengths_of(row: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of both sides of a row; without labels both are the source."""
    source = len(row["input_ids"])
    return source, source if row.get("labels") is None else len(row["labels"])


def _check_dataset(dataset: Any) -> None:
    """Raise unless a dataset is a stream whose state is complete."""
    if not isinstance(dataset, datasets.IterableDataset):
        raise TypeError(
            f"`dataset` must be a `datasets.IterableDataset`, got a `{type(dataset).__name__}`; "
            "`IterableDataset.from_generator` makes one of any generator."
        )
    if _has_shuffle_buffer(dataset._ex_iterable):
        raise ValueError(
            "`dataset` must not be shuffled with a buffer, whose rows are lost when it is continued; leave out "
            "`shuffle`: `buffer_size` rows are mixed here."
        )


def _has_shuffle_buffer(examples: Any) -> bool:
    """Look for a shuffle buffer in the steps that a stream is made of."""
    if type(examples).__name__ == "BufferShuffledExamplesIterable" and examples.buffer_size > 1:
        return True
    inner = [examples.ex_iterable] if hasattr(examples, "ex_iterable") else getattr(examples, "ex_iterables", [])
    return any(map(_has_shuffle_buffer, inner))
