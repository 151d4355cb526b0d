"""Token-budget batches of streams: every row once a pass, states that continue exactly, bad records, lost shards."""

import itertools
import json
import zlib
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset, List, Value
from datasets import Features as Columns
from pyarrow import ArrowInvalid
from torch.utils.data import DataLoader

from hf_vanilla.data import TokenBudgetStream


ROWS = 43  # no multiple of buffers, shards or processes
BUDGET = 24
COLUMNS = Columns({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})


def rows_of(numbers):
    """Yield rows whose first token is their number, of 1 to 9 tokens."""
    for number in numbers:
        yield {"input_ids": [number] * (number % 7 + 1), "labels": [number] * (number * 5 % 9 + 1)}


def read_files(paths):
    """Yield the rows of text files with a number in each line."""
    for path in paths:
        yield from rows_of(map(int, Path(path).read_text().split()))


def stream_of(kind, folder):
    """Return the same rows from one generator, through a batched map, from three shards, or from parquet files."""
    table = Dataset.from_list(list(rows_of(range(ROWS))), features=COLUMNS)
    if kind == "shards":
        return table.to_iterable_dataset(num_shards=3)
    if kind == "parquet":
        paths = [str(folder / f"{shard}.parquet") for shard in range(3)]
        for shard, path in enumerate(paths):
            if not Path(path).exists():
                table.shard(3, shard).to_parquet(path)
        return IterableDataset.from_parquet(paths)
    one = IterableDataset.from_generator(rows_of, features=COLUMNS, gen_kwargs={"numbers": range(ROWS)})
    if kind == "generator":
        return one
    mapped = one.map(lambda batch: {"labels": [ids[::-1] for ids in batch["labels"]]}, batched=True, batch_size=8)
    return mapped.filter(lambda row: row["input_ids"][0] >= 0)


KINDS = ("generator", "map", "shards", "parquet")


def make(dataset, **settings):
    return TokenBudgetStream(dataset, BUDGET, **{"buffer_size": 17, "seed": 3, **settings})


def numbers_of(batch):
    return [row["input_ids"][0] for row in batch]


def take(stream, count):
    return [numbers_of(batch) for batch in itertools.islice(stream, count)]


def numbers_of_a_pass(stream, rows):
    """Return the numbers of the first `rows` rows, which must end with a batch."""
    found = []
    for batch in stream:
        found += numbers_of(batch)
        if len(found) >= rows:
            return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_given_once_a_pass_within_the_budget(tmp_path, kind):
    stream = make(stream_of(kind, tmp_path))
    found, batches = [], []
    for batch in itertools.islice(stream, 60):
        longest = max(max(len(row["input_ids"]), len(row["labels"])) for row in batch)
        assert longest * len(batch) <= BUDGET
        found += numbers_of(batch)
        batches.append(len(batch))
    assert sorted(found[:ROWS]) == sorted(found[ROWS : 2 * ROWS]) == list(range(ROWS))
    assert found[:ROWS] != found[ROWS : 2 * ROWS]
    assert max(batches) > 1


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_continued_stream_gives_the_same_batches(tmp_path, kind, num_workers):
    settings = {"batches_per_step": 2}
    expected = take(make(stream_of(kind, tmp_path), **settings), 50)
    for stop in (1, 7, 20, 33):
        stream = make(stream_of(kind, tmp_path), **settings)
        assert take(stream, stop) == expected[:stop]
        state = json.loads(json.dumps(stream.state_dict()))
        continued = make(stream_of(kind, tmp_path), **settings)
        continued.load_state_dict(state)
        loader = DataLoader(continued, batch_size=None, collate_fn=numbers_of, num_workers=num_workers)
        assert list(itertools.islice(loader, 50 - stop)) == expected[stop:]
        if num_workers:
            break


def test_larger_buffers_give_other_batches_with_less_padding(tmp_path):
    padding = {}
    for buffer_size in (5, 43):
        batches = itertools.islice(make(stream_of("shards", tmp_path), buffer_size=buffer_size), 60)
        sides = [[max(len(row["input_ids"]), len(row["labels"])) for row in batch] for batch in batches]
        padding[buffer_size] = sum(len(each) * max(each) - sum(each) for each in sides) / sum(map(sum, sides))
    assert padding[43] < 0.5 * padding[5]


@pytest.mark.parametrize(("kind", "num_processes"), [("shards", 3), ("shards", 2), ("generator", 2)])
def test_processes_share_the_rows_of_a_pass(tmp_path, kind, num_processes):
    shares = []
    for index in range(num_processes):
        stream = make(stream_of(kind, tmp_path), num_processes=num_processes, process_index=index)
        share = []
        for batch in itertools.islice(stream, 200):  # of many passes: no process ends
            if stream.state_dict()["buffer_start"]["source"]["pass"] == 0:
                share += numbers_of(batch)
        shares.append(share)
    assert sorted(itertools.chain(*shares)) == list(range(ROWS))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert stream.state_dict()["buffer_start"]["source"]["pass"] > 2


@pytest.mark.promise("bad rows and lost shards")
def test_bad_records_are_refused_or_counted(tmp_path, caplog):
    rows = [*rows_of(range(5)), {"input_ids": [5] * 30, "labels": [5]}, {"input_ids": [6], "labels": []}]
    dataset = Dataset.from_list(rows).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"record of 30 source and 1 target tokens, more than `max_tokens` \(24\)"):
        take(make(dataset), 1)
    stream = make(dataset, on_bad_record="skip")
    assert sorted(numbers_of_a_pass(stream, 5)) == list(range(5))
    assert stream.state_dict()["bad_records"] == 2
    assert "Skipped 1 bad records so far" in caplog.text
    continued = make(dataset, on_bad_record="skip")
    continued.load_state_dict(stream.state_dict())
    numbers_of_a_pass(continued, 5)
    assert continued.state_dict()["bad_records"] == 4
    with pytest.raises(ValueError, match="at least one record for each of the 1 processes, but process 0 found none"):
        take(make(Dataset.from_list(rows[5:]).to_iterable_dataset(), on_bad_record="skip"), 1)


def stream_of_files(folder):
    """Return a stream of four files of five rows, and a generator function that one can make fail."""
    paths = [folder / f"{shard}.txt" for shard in range(4)]
    for shard, path in enumerate(paths):
        path.write_text("\n".join(map(str, range(5 * shard, 5 * shard + 5))))
    names = [str(path) for path in paths]
    return paths, IterableDataset.from_generator(read_files, features=COLUMNS, gen_kwargs={"paths": names})


@pytest.mark.promise("bad rows and lost shards")
def test_lost_shard_stops_after_its_retries_or_is_skipped(tmp_path, caplog):
    paths, dataset = stream_of_files(tmp_path)
    expected = take(make(dataset), 30)
    paths[2].rename(tmp_path / "away")
    lost = {"retries": 2, "retry_wait": 0.0}
    with pytest.raises(OSError, match=r"Shard 2 of 4 can't be read after row 0: .*2 retries failed. Restore it"):
        take(make(dataset, **lost), 30)
    assert "Retry 2 of 2 in 0 seconds" in caplog.text
    stream = make(dataset, **lost, on_lost_shard="skip")
    skipping = take(stream, 30)
    assert set(itertools.chain(*skipping)) == {*range(10), *range(15, 20)}
    assert set(stream.state_dict()["lost_shards"].values()) == {0}
    # A continued stream leaves out the same rows of the buffer although they are there again; the next pass has them.
    take(stream, 1)
    (tmp_path / "away").rename(paths[2])
    continued = make(dataset, **lost, on_lost_shard="skip")
    continued.load_state_dict(stream.state_dict())
    batches = take(continued, 30)
    of_the_pass = next(index for index in range(30) if sum(map(len, batches[:index])) == 15 - len(skipping[0]))
    assert batches[:of_the_pass] == skipping[1 : 1 + of_the_pass]
    assert set(range(10, 15)) < set(itertools.chain(*batches))
    assert take(make(dataset), 30) == expected


@pytest.mark.promise("bad rows and lost shards")
@pytest.mark.parametrize(
    "error",
    [EOFError("cut"), zlib.error("damaged"), ArrowInvalid("damaged"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x")],
    ids=["cut", "gzip", "parquet", "bytes"],
)
def test_damaged_shard_is_skipped(error):
    def read(numbers):
        if 3 in numbers:
            raise error
        yield from rows_of(numbers)

    dataset = IterableDataset.from_generator(read, features=COLUMNS, gen_kwargs={"numbers": list(range(6))})
    assert sorted(numbers_of_a_pass(make(dataset, retries=0, on_lost_shard="skip"), 5)) == [0, 1, 2, 4, 5]


class FlakyRows:
    """Rows of which some fail when they are read the first time, as over a bad network."""

    def __init__(self):
        self.failed = set()

    def __call__(self, numbers):
        for number, row in zip(numbers, rows_of(numbers), strict=True):
            if number % 10 == 9 and number not in self.failed:
                self.failed.add(number)
                raise ConnectionError("the network is away")
            yield row


@pytest.mark.promise("bad rows and lost shards")
@pytest.mark.parametrize("num_processes", [1, 2])
def test_failed_reads_are_retried_where_they_failed(num_processes):
    def stream(generator):
        dataset = IterableDataset.from_generator(generator, features=COLUMNS, gen_kwargs={"numbers": range(ROWS)})
        return make(
            dataset.map(lambda batch: batch, batched=True, batch_size=4), retry_wait=0.0, num_processes=num_processes
        )

    assert take(stream(FlakyRows()), 30) == take(stream(rows_of), 30)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_tokens": 0}, ValueError, "`max_tokens` must be at least 1, got 0"),
        ({"buffer_size": 2.5}, TypeError, r"`buffer_size` must be an integer, got 2\.5"),
        ({"process_index": 2, "num_processes": 2}, ValueError, r"`process_index` \(2\) must be below `num_processes`"),
        ({"on_bad_record": "ignore"}, ValueError, "`on_bad_record` must be stop or skip, got 'ignore'"),
        ({"on_lost_shard": "ignore"}, ValueError, "`on_lost_shard` must be stop or skip, got 'ignore'"),
        ({"dataset": [1]}, TypeError, r"`dataset` must be a `datasets\.IterableDataset`, got a `list`"),
        ({"dataset": "shuffled"}, ValueError, "`dataset` must not be shuffled with a buffer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_settings_raise(settings, error, message):
    dataset = Dataset.from_list(list(rows_of(range(4)))).to_iterable_dataset()
    if settings.get("dataset") == "shuffled":
        settings = {"dataset": dataset.shuffle(seed=1, buffer_size=10).select_columns(["input_ids"])}
    with pytest.raises(error, match=message):
        TokenBudgetStream(**{"dataset": dataset, "max_tokens": BUDGET, **settings})


def test_state_of_another_stream_and_missing_column_raise():
    dataset = Dataset.from_list(list(rows_of(range(4)))).to_iterable_dataset()
    with pytest.raises(ValueError, match="another stream: `buffer_size` is 17, not 16.* same settings"):
        make(dataset).load_state_dict(make(dataset, buffer_size=16).state_dict())
    with pytest.raises(ValueError, match=r"must have a column `input_ids`, it has \['labels'\]"):
        take(make(dataset.select_columns(["labels"])), 1)
