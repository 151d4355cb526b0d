import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_two_ranks
import torch
from tiny_translation import Recorder, tiny_collator, tiny_model, tiny_pairs, tiny_tokenizer
from transformers import Seq2SeqTrainer

from hf_vanilla.training import VanillaTrainer, VanillaTrainingArguments


SCRIPT = Path(run_two_ranks.__file__)
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ACCELERATE = ("accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1")


def launch(launcher, folder):
    """Run the script under a launcher, and return the results of each rank."""
    command = [sys.executable, "-m", *launcher, str(SCRIPT), str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=dict(os.environ))
    assert finished.returncode == 0, finished.stderr[-4000:]
    return {path.stem: torch.load(path) for path in sorted(folder.glob("rank-*.pt"))}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch(TORCHRUN, tmp_path_factory.mktemp("two_ranks"))


def assert_close(actual, expected, tolerance=1e-5):
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert (actual[name] - tensor).abs().max() <= tolerance, name


def without_key_biases(weights):
    """Leave out the biases of keys: their gradients are rounding errors, which Adam scales to full updates."""
    kept = dict(weights)
    for name, tensor in weights.items():
        if name.endswith("kv_proj.bias"):
            parts = tensor.split(16)  # the d_model of the tiny model: queries, where they are here, keys and values
            kept[name] = torch.cat((*parts[:-2], parts[-1]))
    return kept


def test_two_ranks_ran(ranks):
    assert sorted(ranks) == ["rank-0", "rank-1"]
    assert [rank["world_size"] for rank in ranks.values()] == [2, 2]


@pytest.mark.promise("other ways to compute")
@pytest.mark.parametrize("kind", ["stock", "vanilla"])
def test_two_ranks_train_as_one_process_with_the_same_global_batch(ranks, kind, tmp_path, assert_invariant):
    alone = run_two_ranks.train(kind, tmp_path, gradient_accumulation_steps=2)
    assert len(alone["losses"]) >= 10
    assert max(each.abs().max() for each in alone["gradients"].values()) > 0.05
    for rank in ranks.values():
        assert_invariant(
            "one process or two (DDP), gradients", "encoder-decoder", rank[kind]["gradients"], alone["gradients"]
        )
        assert rank[kind]["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        assert_close(without_key_biases(rank[kind]["weights"]), without_key_biases(alone["weights"]), 1e-4)


@pytest.mark.skipif(not run_two_ranks.CAN_RESUME, reason="transformers 5.17 can't resume several processes on CPU")
def test_two_ranks_resume_within_an_epoch_to_the_same_bits(ranks):
    for rank in ranks.values():
        updates_per_epoch = len(rank["vanilla"]["losses"]) / 2
        assert updates_per_epoch < run_two_ranks.SAVED_STEP < 2 * updates_per_epoch
        assert_close(rank["resumed"], rank["vanilla"]["weights"], 0)


@pytest.mark.skipif(not run_two_ranks.CAN_RESUME, reason="transformers 5.17 can't resume several processes on CPU")
def test_two_ranks_train_on_a_stream_and_resume_to_the_same_bits(ranks):
    start = dict(tiny_model().named_parameters())
    for rank in ranks.values():
        streamed = rank["streamed"]
        assert streamed["buffer"] >= 1
        assert_close(streamed["resumed"], streamed["whole"], 0)
        assert_close(streamed["whole"], ranks["rank-0"]["streamed"]["whole"], 0)
        assert max((streamed["whole"][name] - start[name]).abs().max() for name in start) > 0.05


def test_two_ranks_predict_every_row_once_and_in_order(ranks, tmp_path):
    alone = run_two_ranks.predict(tmp_path)
    for rank in ranks.values():
        assert rank["predicted"]["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert torch.equal(rank["predicted"]["labels"], alone["labels"])
        is_target = alone["labels"] != -100
        torch.testing.assert_close(rank["predicted"]["logits"][is_target], alone["logits"][is_target])


@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_ranks_reduce_gradients_once_per_update(ranks, accumulation):
    for rank in ranks.values():
        seen = rank["reductions"][accumulation]
        assert seen["reductions"] == seen["updates"] >= 3
        assert not seen["find_unused_parameters"]


@pytest.mark.parametrize("kind", run_two_ranks.SHARDED)
def test_two_ranks_with_sharded_parameters_train_as_one_process(ranks, kind):
    alone = run_two_ranks.train_sharded(kind)
    start = dict(run_two_ranks.SHARDED[kind]().named_parameters())
    assert max((alone[name] - start[name]).abs().max() for name in start) > 0.05
    for rank in ranks.values():
        assert_close(rank["sharded"][kind], alone)


def gradients(trainer_class, output_dir, batch_size, accumulation):
    """Return the gradients of the first update over the first 8 pairs, and its loss."""
    arguments = VanillaTrainingArguments(
        str(output_dir),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        logging_steps=1,
        train_sampling_strategy="sequential",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    recorder, model = Recorder(), tiny_model()
    trainer_class(
        model,
        arguments,
        tiny_collator(model),
        train_dataset=tiny_pairs(8),
        processing_class=tiny_tokenizer(),
        callbacks=[recorder],
    ).train()
    return recorder.gradients, recorder.losses


@pytest.mark.parametrize("accumulation", [2, 8])
@pytest.mark.parametrize("trainer_class", [Seq2SeqTrainer, VanillaTrainer])
def test_accumulated_batches_are_one_large_batch(tmp_path, trainer_class, accumulation):
    lengths = [len(row["labels"]) for row in tiny_pairs(8)]
    size = 8 // accumulation
    assert len({sum(lengths[start : start + size]) for start in range(0, 8, size)}) > 1
    expected, expected_loss = gradients(trainer_class, tmp_path, 8, 1)
    actual, loss = gradients(trainer_class, tmp_path, size, accumulation)
    assert_close(actual, expected)
    assert loss == pytest.approx(expected_loss, abs=1e-5)


@pytest.mark.slow
def test_accelerate_launch_trains_as_a_plain_process(tmp_path):
    launched = launch(ACCELERATE, tmp_path)
    assert sorted(launched) == ["rank-0"]
    for kind in run_two_ranks.SETTINGS:
        alone = run_two_ranks.train(kind, tmp_path / "alone")
        assert_close(launched["rank-0"][kind]["weights"], alone["weights"], 1e-6)
