"""`VanillaTrainer` on streams: the same weights after a resumption, what is refused, what is counted."""

import json

import pytest
import torch
from datasets import IterableDataset
from test_trainer import are_equal, make_trainer
from tiny_translation import tiny_model, tiny_pairs, weights_of

from hf_vanilla.data import TokenBudgetStream
from hf_vanilla.training import ManifestCallback


PAIRS = 45
ROWS = tiny_pairs(PAIRS).to_list()


class Rows:
    """The pairs, which count how often each is read; on request with one that is too long."""

    def __init__(self, too_long=False):
        self.read = [0] * PAIRS
        self.too_long = too_long

    def __call__(self, start):
        for index in range(start, PAIRS):
            self.read[index] += 1
            row = ROWS[index]
            yield {**row, "input_ids": [5] * 50} if self.too_long and index == 7 else row

    def stream(self):
        return IterableDataset.from_generator(self, gen_kwargs={"start": 0})


def make(folder, rows=None, **changes):
    """Return a trainer of ten updates of two batches, with dropout, that saves after the sixth: in the second pass."""
    saving = {"max_steps": 10, "save_strategy": "steps", "save_steps": 6, "stream_buffer": 20}
    model = tiny_model(dropout=0.1)
    return make_trainer(
        folder, model, pairs=(rows or Rows()).stream(), **{**saving, "gradient_accumulation_steps": 2, **changes}
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streamed")
    rows = Rows()
    trainer = make(folder, rows)
    metrics = trainer.train().metrics
    assert min(rows.read) >= 2
    return folder, weights_of(trainer), metrics, trainer.state.log_history


@pytest.mark.promise("killed inside a save")
@pytest.mark.parametrize(
    "changes", [{}, {"dataloader_num_workers": 1}, {"ignore_data_skip": True}], ids=["plain", "worker", "no skip"]
)
def test_resumed_training_ends_with_the_same_weights(run, changes):
    folder, weights, _, history = run
    rows = Rows()
    trainer = make(folder, rows, **changes)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    assert are_equal(weights_of(trainer), weights)
    if not changes:
        assert [entry["epoch"] for entry in trainer.state.log_history] == [entry["epoch"] for entry in history]
        saved = json.loads((folder / "checkpoint-6" / "stream_state.json").read_text())
        place = saved["stream"]["buffer_start"]["source"]
        assert (saved["global_step"], place["pass"]) == (6, 1)  # the fault would be invisible in the first buffer
    again = make(folder, save_strategy="no")
    again.train()
    assert are_equal(weights_of(again), weights)


def test_checkpoint_without_the_state_of_the_stream_is_continued_by_reading_again(tmp_path, caplog):
    weights = []
    for checkpoint in (None, str(tmp_path / "checkpoint-6")):
        trainer = make(tmp_path)
        trainer.remove_callback(ManifestCallback)
        trainer.train(resume_from_checkpoint=checkpoint)
        weights.append(weights_of(trainer))
        (tmp_path / "checkpoint-6" / "stream_state.json").unlink(missing_ok=True)
    assert are_equal(*weights)
    assert "the stream is read from its beginning up to the checkpoint" in caplog.text


def test_stream_with_settings_of_its_own_is_trained_on(tmp_path):
    stream = TokenBudgetStream(Rows(too_long=True).stream(), 30, buffer_size=9, seed=7, on_bad_record="skip")
    before = stream.state_dict()
    trainer = make_trainer(tmp_path, pairs=stream, max_tokens_per_batch=None, max_steps=12)
    metrics = trainer.train().metrics
    assert metrics["train_bad_records"] == 1
    assert stream.state_dict() == before  # another training begins anew


def test_metrics_count_what_was_read_and_skipped(run, tmp_path):
    _, _, metrics, _ = run
    assert (metrics["train_bad_records"], metrics["train_lost_shards"]) == (0, 0)
    rows = metrics["train_samples_per_second"] * metrics["train_runtime"]
    assert 2 * PAIRS * 0.5 < rows < 4 * PAIRS  # speed and time are rounded
    with pytest.raises(ValueError, match=r"record of 50 source and \d target tokens, more than `max_tokens` \(40\)"):
        make(tmp_path, Rows(too_long=True)).train()
    metrics = make(tmp_path, Rows(too_long=True), on_bad_record="skip").train().metrics
    assert metrics["train_bad_records"] >= 2


@pytest.mark.promise("other processes or batches")
def test_resumption_with_another_buffer_is_refused(run):
    folder = run[0]
    message = "can't be resumed with the stream's state .*: `buffer_size` is 21, not 20.* same settings"
    with pytest.raises(ValueError, match=message):
        make(folder, stream_buffer=21).train(resume_from_checkpoint=str(folder / "checkpoint-6"))


class EndlessRows(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize(
    ("pairs", "changes", "message"),
    [
        (EndlessRows(), {}, r"needs a `train_dataset` with a length or a `datasets\.IterableDataset`, got a `Endless"),
        (Rows().stream(), {"dataloader_num_workers": 2}, "`dataloader_num_workers` must be 0 or 1 for .*, got 2"),
        (
            TokenBudgetStream(Rows().stream(), 40, num_processes=2),
            {},
            "`num_processes` of the stream must be 1 in this process, got 2",
        ),
        (Rows().stream(), {"max_steps": -1}, "max_steps has to be specified"),
        (Rows().stream(), {"stream_buffer": 0}, "`stream_buffer` must be at least 1, got 0"),
        (Rows().stream(), {"on_lost_shard": "wait"}, "`on_lost_shard` must be stop or skip, got 'wait'"),
    ],
    ids=["torch", "workers", "processes", "endless", "buffer", "policy"],
)
def test_what_does_not_work_with_streams_raises(tmp_path, pairs, changes, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, pairs=pairs, **{"max_steps": 2, **changes})
