import itertools
import time

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset, Features, List, Value, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hf_vanilla.data.batching import (
    LengthSortedBatchSampler,
    PairLengths,
    TokenBudgetBatchSampler,
    measure_pair_lengths,
)


def lengths(pairs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    source = np.clip(generator.lognormal(2.5, 0.6, pairs).astype(int), 1, 60)
    target = np.clip((source * generator.normal(1.1, 0.25, pairs)).astype(int), 1, 60)
    return source, target


def cost(batch: list[int], source: np.ndarray, target: np.ndarray) -> int:
    return len(batch) * max(max(source[index], target[index]) for index in batch)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """Lengths of both sides, a budget that the longest pair fits, and batches of a step."""
    pairs = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=60))
    budget = draw(st.integers(max(map(max, pairs)), 80))
    source, target = (list(side) for side in zip(*pairs, strict=True))
    return source, target, budget, draw(st.integers(1, 6))


@settings(max_examples=300, deadline=None, database=None)
@given(case=cases(), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_every_pair_occurs_once_within_the_budget(case: tuple, seed: int, epoch: int) -> None:
    source, target, budget, batches_per_step = case
    plain = len(TokenBudgetBatchSampler(source, target, budget))
    batches = -(-plain // batches_per_step) * batches_per_step
    if batches > len(source):
        with pytest.raises(ValueError, match=rf"{len(source)} pairs can't fill {batches} batches"):
            TokenBudgetBatchSampler(source, target, budget, batches_per_step=batches_per_step)
        return
    sampler = TokenBudgetBatchSampler(source, target, budget, seed=seed, batches_per_step=batches_per_step)
    sampler.set_epoch(epoch)
    drawn = list(sampler)
    assert len(drawn) == len(sampler) == batches
    assert sorted(index for batch in drawn for index in batch) == list(range(len(source)))
    assert all(batch and cost(batch, source, target) <= budget for batch in drawn)
    assert drawn == list(sampler)
    assert all(isinstance(index, int) for index in drawn[0])


@settings(max_examples=200, deadline=None, database=None)
@given(case=cases())
def test_batches_are_as_few_as_the_budget_allows(case: tuple) -> None:
    source, target, budget, _ = case
    longest = [
        sorted(max(source[i], target[i]) for i in batch) for batch in TokenBudgetBatchSampler(source, target, budget)
    ]
    longest.sort(key=lambda batch: (batch[0], batch[-1], -len(batch)))
    flat = [length for batch in longest for length in batch]
    assert flat == sorted(flat)
    # No batch could have taken the next pair too.
    assert all((len(here) + 1) * after[0] > budget for here, after in itertools.pairwise(longest))


def test_batches_depend_on_seed_and_epoch_alone() -> None:
    source, target = lengths(500)

    def draw(seed: int, epoch: int) -> list[list[int]]:
        sampler = TokenBudgetBatchSampler(source, target, 200, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert draw(3, 1) == draw(3, 1)
    different = [draw(3, 0), draw(3, 1), draw(4, 0), draw(4, 1)]
    # Not the order alone: what shares a batch differs too.
    contents = [frozenset(map(frozenset, batches)) for batches in different]
    assert len(set(contents)) == 4
    assert len({len(batches) for batches in different}) == 1


def test_batches_have_random_order_of_length() -> None:
    source, target = lengths(2000)
    sizes = [len(batch) for batch in TokenBudgetBatchSampler(source, target, 300)]
    assert sizes != sorted(sizes)
    assert sizes != sorted(sizes, reverse=True)
    assert abs(np.corrcoef(np.arange(len(sizes)), sizes)[0, 1]) < 0.3


def test_batches_of_a_step_are_of_similar_length() -> None:
    source, target = lengths(3000)
    sampler = TokenBudgetBatchSampler(source, target, 400, batches_per_step=4)
    longest = np.array([max(np.maximum(source, target)[batch]) for batch in sampler]).reshape(-1, 4)
    assert np.median(np.ptp(longest, axis=1)) <= 1
    assert np.ptp(longest) > 40
    # The first rank is not always the one with the shortest pairs.
    assert len(set(longest.argmin(axis=1))) > 1


def test_ranks_share_the_epoch_through_accelerate() -> None:
    source, target = lengths(700)
    ranks = [
        BatchSamplerShard(
            TokenBudgetBatchSampler(source, target, 150, batches_per_step=6),
            num_processes=3,
            process_index=rank,
            even_batches=False,
        )
        for rank in range(3)
    ]
    drawn = [list(rank) for rank in ranks]
    assert len({len(batches) for batches in drawn}) == 1
    assert len(drawn[0]) % 2 == 0
    assert sorted(index for batches in drawn for batch in batches for index in batch) == list(range(700))


def test_sampler_drives_a_data_loader() -> None:
    source, target = lengths(50)
    sampler = TokenBudgetBatchSampler(source, target, 100)
    loader = DataLoader(range(50), batch_sampler=sampler, collate_fn=list)
    assert len(loader) == len(sampler)
    assert list(loader) == list(sampler)


def test_largest_batches_are_halved_to_fill_steps() -> None:
    # Batches of 4, 2 and 1 pairs; the fourth is made of the first.
    sampler = TokenBudgetBatchSampler([1, 1, 1, 1, 2, 2, 4], [1, 1, 1, 1, 2, 2, 4], 4, batches_per_step=4)
    assert sorted(len(batch) for batch in sampler) == [1, 2, 2, 2]


def share_of_real_tokens(batches: list, source: np.ndarray, target: np.ndarray) -> float:
    """Real tokens over positions, where each side is padded to its own longest sequence."""
    positions = sum(len(batch) * (source[batch].max() + target[batch].max()) for batch in batches)
    return (source.sum() + target.sum()) / positions


def test_padding_is_small() -> None:
    source, target = lengths(20_000)
    batches = list(TokenBudgetBatchSampler(source, target, 2048))
    random_batches = np.array_split(np.random.default_rng(0).permutation(20_000), len(batches))
    assert share_of_real_tokens(batches, source, target) > 0.93
    assert share_of_real_tokens(random_batches, source, target) < 0.5
    longer_side = np.maximum(source, target)
    assert np.mean([len(batch) * longer_side[batch].max() / 2048 for batch in batches]) > 0.95


@pytest.mark.slow
def test_sampler_is_fast_for_five_million_pairs() -> None:
    source, target = lengths(5_000_000)
    start = time.process_time()
    batches = iter(TokenBudgetBatchSampler(source, target, 25_000, batches_per_step=8))
    next(batches)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("source", "target", "max_tokens", "error", "message"),
    [
        (
            [1, 9, 12],
            [1, 11, 3],
            8,
            ValueError,
            r"Pair 2 has 12 source and 3 target tokens.*`max_tokens` \(8\).*2 in all",
        ),
        ([1, 2], [1], 8, ValueError, r"`source_lengths` \(2\) and `target_lengths` \(1\) must be equal in number"),
        ([1, 0], [1, 1], 8, ValueError, "`source_lengths` must be at least 1, got 0 at index 1; drop empty pairs"),
        ([1, 1], [-3, 1], 8, ValueError, "`target_lengths` must be at least 1, got -3 at index 0"),
        ([1.5], [1], 8, TypeError, "`source_lengths` must be integers, got float64"),
        ([[1, 2]], [1], 8, ValueError, r"`source_lengths` must have one dimension, got shape \(1, 2\)"),
        ([1], [1], 0, ValueError, "`max_tokens` must be at least 1, got 0"),
        ([1], [1], 8.0, TypeError, "`max_tokens` must be an integer, got 8.0"),
    ],
    ids=["too_long", "unequal", "empty_source", "negative", "float", "nested", "no_budget", "float_budget"],
)
def test_bad_lengths_are_named(source, target, max_tokens, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TokenBudgetBatchSampler(source, target, max_tokens)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"seed": -1}, ValueError, "`seed` must be at least 0, got -1"),
        ({"batches_per_step": 0}, ValueError, "`batches_per_step` must be at least 1, got 0"),
        ({"batches_per_step": 2.0}, TypeError, "`batches_per_step` must be an integer, got 2.0"),
        (
            {"batches_per_step": 4},
            ValueError,
            r"3 pairs can't fill 4 batches.*`batches_per_step` \(4\); use fewer ranks",
        ),
    ],
    ids=["seed", "no_batches", "float_batches", "too_few_pairs"],
)
def test_bad_sampler_arguments_are_named(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TokenBudgetBatchSampler([1, 2, 3], [1, 2, 3], 8, **arguments)


def test_sampler_rejects_empty_data() -> None:
    with pytest.raises(ValueError, match="0 pairs can't fill 1 batches"):
        TokenBudgetBatchSampler([], [], 8)


def test_bad_epoch_is_named() -> None:
    sampler = TokenBudgetBatchSampler([1, 2, 3], [1, 2, 3], 8)
    with pytest.raises(ValueError, match="`epoch` must be at least 0, got -1"):
        sampler.set_epoch(-1)
    with pytest.raises(TypeError, match=r"`epoch` must be an integer, got 1\.5"):
        sampler.set_epoch(1.5)


@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 4, 7, 40])
def test_sorted_batches_can_be_gathered_and_restored(num_rows: int, num_processes: int) -> None:
    longer = np.random.default_rng(num_rows).integers(1, 30, num_rows)
    sampler = LengthSortedBatchSampler(longer, 28, num_processes=num_processes)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert len(batches) % num_processes == 0
    steps = [batches[start : start + num_processes] for start in range(0, len(batches), num_processes)]
    for step in steps:
        assert len({len(batch) for batch in step}) == 1
    assert all(len(batch) == 1 or len(batch) * longer[batch].max() <= 28 for batch in batches)
    gathered = np.concatenate(batches)
    assert sorted(set(gathered)) == list(range(num_rows))
    assert len(gathered) - num_rows == -num_rows % num_processes
    assert longer[gathered].tolist() == sorted(longer[gathered], reverse=True)
    assert sampler.restore((gathered, {"twice": 2 * gathered}))[0].tolist() == list(range(num_rows))
    assert sampler.restore((gathered, {"twice": 2 * gathered}))[1]["twice"].tolist() == list(range(0, 2 * num_rows, 2))
    seen: list[int] = []
    for number, step in enumerate(steps):
        for process_index, batch in enumerate(step):
            kept = len(batch) - sampler.repeated_rows(number, process_index)
            seen.extend(batch[:kept])
    assert sorted(seen) == list(range(num_rows))


def test_restore_keeps_arrays_of_other_lengths() -> None:
    sampler = LengthSortedBatchSampler(np.array([3, 9, 5]), 10)
    assert sampler.restore(None) is None
    assert sampler.restore(np.arange(2)).tolist() == [0, 1]
    assert sampler.restore(np.arange(3)).tolist() == [2, 0, 1]


def test_empty_data_has_no_sorted_batches() -> None:
    assert list(LengthSortedBatchSampler(np.zeros(0, dtype=np.int64), 10, num_processes=2)) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_tokens": 0}, ValueError, "`max_tokens` must be at least 1, got 0"),
        ({"max_tokens": 9.5}, TypeError, r"`max_tokens` must be an integer, got 9\.5"),
        ({"max_tokens": 9, "num_processes": 0}, ValueError, "`num_processes` must be at least 1, got 0"),
        ({"max_tokens": 9, "num_processes": "2"}, TypeError, "`num_processes` must be an integer, got '2'"),
    ],
    ids=["no_budget", "float_budget", "no_processes", "text_processes"],
)
def test_bad_sorted_sampler_arguments_are_named(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LengthSortedBatchSampler(np.array([3, 9, 5]), **arguments)


ROWS = {"input_ids": [[4, 5], [], [6, 7, 8]], "labels": [[9], [4, 5, 6, 7], None]}


@pytest.mark.parametrize("kind", ["table", "chunks", "shuffled", "rows"])
def test_lengths_are_those_of_the_rows(kind: str) -> None:
    order = [2, 0, 1, 1] if kind == "shuffled" else [0, 1, 2]
    table = Dataset.from_dict(ROWS)
    if kind == "chunks":
        table = concatenate_datasets([table.select([0]), table.select([1, 2])])
        assert table.data.column("labels").num_chunks == 2
    dataset = list(table) if kind == "rows" else table.select(order) if kind == "shuffled" else table
    measured = measure_pair_lengths(dataset)
    assert measured.source.tolist() == [[2, 0, 3][row] for row in order]
    assert measured.target is not None
    assert measured.target.tolist() == [[1, 4, 0][row] for row in order]
    assert measured.longer_side().tolist() == [[2, 4, 3][row] for row in order]


@pytest.mark.parametrize("labels", [{}, {"labels": [1, 0, 2]}], ids=["no labels", "classes"])
@pytest.mark.parametrize("kind", ["table", "rows"])
def test_lengths_without_a_target_have_one_side(kind: str, labels: dict) -> None:
    table = Dataset.from_dict({"input_ids": ROWS["input_ids"], **labels})
    measured = measure_pair_lengths(table if kind == "table" else list(table))
    assert measured.target is None
    assert measured.longer_side().tolist() == [2, 0, 3]
    assert PairLengths(measured.source, None).longer_side() is measured.source


def test_lengths_of_lists_of_a_fixed_size() -> None:
    features = Features({"input_ids": List(Value("int32")), "labels": List(Value("float32"), length=2)})
    table = Dataset.from_dict({"input_ids": ROWS["input_ids"], "labels": [[1.0, 0.0]] * 3}, features=features)
    assert measure_pair_lengths(table.select([2, 1])).longer_side().tolist() == [3, 2]


def test_dataset_without_input_ids_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"must have a column `input_ids`, it has \['labels'\]; tokenize it first"):
        measure_pair_lengths(Dataset.from_dict({"labels": ROWS["labels"]}))
