"""`on_nan`, `stop_on_divergence` and `on_disk_full`: what is trained, what is saved, and what is said."""

import math
import os
import re
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
import run_policies
import torch
from run_policies import make_pairs, make_trainer
from tiny_translation import weights_of
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_vanilla.command_line.options import run
from hf_vanilla.training import (
    NaNPolicyCallback,
    StopOnDivergenceCallback,
    VanillaTrainingArguments,
    save_final_model,
    why_not_resumable,
)
from hf_vanilla.training.trainer import CountingCollator


FAILING = make_pairs(24, 9)  # row 2 of the third of six batches
TEXT = " ".join(map(str, FAILING[9]["input_ids"][1:-1]))


def are_equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# on_nan


@pytest.mark.promise("NaN")
@pytest.mark.parametrize("kind", ["vanilla", "stock"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_skipped_update_changes_nothing(tmp_path, caplog, kind, accumulation):
    skipping = make_trainer(
        tmp_path, FAILING, kind, on_nan="skip", gradient_accumulation_steps=accumulation, logging_nan_inf_filter=True
    )
    metrics = skipping.train().metrics
    update = 3 if accumulation == 1 else 2
    rest = [index for index in range(24) if index // (4 * accumulation) != update - 1]
    expected = make_trainer(tmp_path, FAILING.select(rest), kind, gradient_accumulation_steps=accumulation)
    expected.train()
    assert are_equal(weights_of(skipping), weights_of(expected))
    moments = [list(trainer.optimizer.state_dict()["state"].values()) for trainer in (skipping, expected)]
    assert all(are_equal(*states) for states in zip(*moments, strict=True))
    assert skipping.lr_scheduler.get_last_lr() == expected.lr_scheduler.get_last_lr()
    assert (skipping.state.global_step, metrics["skipped_updates"]) == (6 // accumulation, 1)
    assert math.isfinite(metrics["train_loss"])
    where = f" (row 2 '{TEXT}' of a batch of 4)"
    what = f"training loss is nan at step {update}{where}" if kind == "vanilla" else "gradient is nan or infinite at"
    assert f"The {what}" in caplog.text
    assert "Its update is skipped: 1 in a row, 1 in all." in caplog.text


@pytest.mark.promise("NaN")
def test_stop_names_the_rows_and_saves_nothing(tmp_path):
    trainer = make_trainer(tmp_path, FAILING, save_strategy="steps", save_steps=3, logging_steps=100)
    with pytest.raises(ValueError, match=re.escape(f"nan at step 3 (row 2 '{TEXT}' of a batch of 4); checkpoints")):
        trainer.train()
    assert os.listdir(tmp_path) == []
    assert all(weight.isfinite().all() for weight in weights_of(trainer).values())


def test_rows_of_a_batch_that_was_counted_are_named(tmp_path):
    trainer = make_trainer(tmp_path, FAILING)

    def collate(rows):
        batch = CountingCollator(collator)(rows)
        padding = {"input_ids": 0, "attention_mask": 0}  # more of it than all tokens of a row
        return batch | {
            name: torch.nn.functional.pad(batch[name], (0, 50), value=fill) for name, fill in padding.items()
        }

    collator, trainer.data_collator = trainer.data_collator, collate
    with pytest.raises(ValueError, match=re.escape(f"nan at step 3 (row 2 '{TEXT}' of a batch of 4)")):
        trainer.train()


@pytest.mark.promise("NaN")
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_gradient_alone_is_found(tmp_path, max_grad_norm):
    trainer = make_trainer(tmp_path, FAILING, max_grad_norm=max_grad_norm)
    bias = trainer.model.model.encoder.layers[0].feed_forward.fc1.bias
    bias.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor(5), math.inf))
    with pytest.raises(ValueError, match=r"The gradient is nan or infinite at step 1 \(rows 1 .*, 3 .* and 1 more of"):
        trainer.train()


def test_too_many_skipped_in_a_row_stop(tmp_path):
    callbacks = [NaNPolicyCallback("skip", max_skips_in_a_row=2)]
    trainer = make_trainer(tmp_path, make_pairs(24, 1, 9, 13, 17), "vanilla", *callbacks)
    with pytest.raises(ValueError, match="nan at step 5 .*, as at 2 steps before it; checkpoints .*, in a new run"):
        trainer.train()


SAVING = {"save_strategy": "steps", "save_steps": 2, "dropout": 0.1}


class SpoilOnce(TrainerCallback):
    """Sets a weight to nan after step 3 of the first attempt, as a fault of the machine would."""

    def __init__(self):
        self.done = False

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3 and not self.done:
            self.done = True
            next(model.parameters()).data[3] = math.nan


@pytest.mark.promise("NaN")
@pytest.mark.parametrize(("failing_row", "callbacks"), [(13, []), (13, [SpoilOnce])], ids=["batch", "state"])
def test_rollback_leaves_out_the_update_that_failed(tmp_path, caplog, failing_row, callbacks):
    skipping = make_trainer(tmp_path / "skip", make_pairs(24, failing_row), on_nan="skip", **SAVING)
    skipping.train()
    pairs = make_pairs(24) if callbacks else make_pairs(24, failing_row)
    spoil = [each() for each in callbacks]
    trainer = make_trainer(tmp_path / "run", pairs, "vanilla", *spoil, on_nan="rollback", **SAVING)
    metrics = trainer.train().metrics
    assert are_equal(weights_of(trainer), weights_of(skipping))
    assert metrics["skipped_updates"] == 1
    assert f"Returning to {tmp_path / 'run' / 'checkpoint-2'}, and then leaving out step 4." in caplog.text


def test_rollback_restores_what_callbacks_count(tmp_path):
    patience = EarlyStoppingCallback(9)
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "learning_rate": 0.0}
    trainer = make_trainer(tmp_path, make_pairs(24, 13), "vanilla", patience, on_nan="rollback", **SAVING, **evaluated)
    trainer.train()
    assert patience.early_stopping_patience_counter == 5  # of six evaluations; that of step 3, made twice, counts once


def test_rollback_ends(tmp_path):
    make_trainer(tmp_path, make_pairs(24), save_strategy="steps", save_steps=2).train()  # of another attempt
    trainer = make_trainer(tmp_path, FAILING, on_nan="rollback")
    with pytest.raises(ValueError, match="nan at step 3 .* There is no checkpoint to return to"):
        trainer.train()
    pairs = make_pairs(24, *range(9, 24))
    trainer = make_trainer(tmp_path, pairs, on_nan="rollback", save_strategy="steps", save_steps=2)
    with pytest.raises(ValueError, match="nan at step 6 .* It has been tried with 3 rollbacks"):
        trainer.train()
    trainer = make_trainer(tmp_path / "stock", FAILING, "stock", on_nan="rollback")
    with pytest.raises(ValueError, match="The gradient is nan or infinite at step 3"):
        trainer.train()


@pytest.mark.promise("NaN", "disk full")
@pytest.mark.slow
def test_processes_decide_the_same(tmp_path):
    pytest.importorskip("resource", reason="needs limits of Unix")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launch, run_policies.__file__, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2)]
    for seen in ranks:
        assert seen["skip"]["error"] is None
        assert are_equal(seen["skip"]["weights"], seen["expected"]["weights"])
        assert re.match(
            r"The training loss is nan at step 3 \(process 1, row 2 '.*' of a batch of 4\)", seen["stop"]["error"]
        )
        assert seen["continue when full"]["error"] is None
        assert "checkpoint-2 could not be written" in seen["stop when full"]["error"]
    assert sorted(os.listdir(tmp_path / "continue")) == ["checkpoint-1", "checkpoint-3"]
    assert os.listdir(tmp_path / "stop") == ["checkpoint-1"]


# stop_on_divergence


def first_alarm(losses, *numbers):
    callback = StopOnDivergenceCallback(*numbers)
    for step, loss in enumerate(losses, start=1):
        with suppress(ValueError):
            callback.check(loss, step)
            continue
        return step
    return None


def training_losses(seed, updates=2500, warmup=1000):
    """Losses as of our recipes: high while the learning rate is low, a fast fall, a slow one, some hard batches."""
    generator = np.random.default_rng(seed)
    steps = np.arange(1, updates + 1)
    falling = 2.0 + 7.0 / (1 + np.exp((steps - warmup / 2) / 120)) + 60.0 / (steps + 60)
    noise = generator.normal(0.0, 0.15, updates) + 1.5 * (generator.random(updates) < 0.002)
    return falling + noise


@pytest.mark.promise("divergence")
def test_ordinary_training_raises_no_alarm_and_a_spike_does():
    for seed in range(3):
        losses = training_losses(seed)
        assert first_alarm(losses, 1000, 10, 5) is None
        losses[2000:] += np.minimum(np.arange(500) * 0.2, 5.0)  # 0.2 more at each update
        assert 2000 < first_alarm(losses, 1000, 10, 5) < 2030


def test_limit_of_divergence_is_the_one_documented():
    before = [1.0, 2.0, 1.0, 2.0]  # mean 1.5, standard deviation 0.5
    assert first_alarm([*before, 2.0, 3.0], 4, 2, 2) is None  # exactly at the limit
    assert first_alarm([*before, 2.0, 3.01], 4, 2, 2) == 6
    assert first_alarm([9.0, *before[:3], math.nan, 2.0, 2.0, 3.01], 4, 2, 2) == 8
    assert first_alarm([*before, 9.0], 4, 2, 2) is None  # too few yet


@pytest.mark.promise("divergence")
@pytest.mark.parametrize(("kind", "accumulation"), [("vanilla", 1), ("vanilla", 3), ("stock", 1)])
def test_divergence_stops_a_training(tmp_path, kind, accumulation):
    calls = []

    def add(model, args, kwargs, output):
        calls.append(1)
        output.loss = output.loss + 0.1 * (len(calls) % 2) + 7.0 * (len(calls) > 9 * accumulation)
        return output

    numbers = [5, 2, 5]
    callbacks = [StopOnDivergenceCallback(*numbers)] if kind == "stock" else []
    pairs = make_pairs(4 * 12 * accumulation)
    changes = {} if kind == "stock" else {"stop_on_divergence": numbers, "logging_steps": 100}
    trainer = make_trainer(
        tmp_path, pairs, kind, *callbacks, gradient_accumulation_steps=accumulation, learning_rate=0.0, **changes
    )
    trainer.model.register_forward_hook(add, with_kwargs=True)
    with pytest.raises(ValueError, match=r"diverged at step 1[01]: .* last 2, after .* in the 5 .*, in a new run"):
        trainer.train()


# Arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on_nan": "ignore"}, "`on_nan` must be one of stop, skip, rollback, got 'ignore'"),
        ({"on_nan": "skip", "fp16": True}, r"`on_nan` \(skip\) can't be combined with fp16"),
        (
            {"on_nan": "rollback", "save_only_model": True},
            r"`on_nan` \(rollback\) can't be combined with `save_only_m",
        ),
        ({"stop_on_divergence": [1000, 5]}, "`stop_on_divergence` must be three numbers, such as 1000 10 5"),
        ({"stop_on_divergence": [1000, 0.5, 5]}, "at least 1 recent one .* got 1000 0.5 5"),
        ({"stop_on_divergence": [math.inf, 1, 5]}, "at least 2 updates before, .* got inf 1 5"),
        ({"on_disk_full": "ignore"}, "`on_disk_full` must be stop or continue, got 'ignore'"),
    ],
)
def test_bad_arguments_raise(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        VanillaTrainingArguments(str(tmp_path), use_cpu=True, **changes)


# on_disk_full


@pytest.fixture
def small_disk(tmp_path):
    """Return the folder of a file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except OSError:
        pytest.skip("needs the command mount")
    if done.returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


class FullAt(TrainerCallback):
    """Fills the disk but for some bytes before the checkpoint of a step, and frees it at the next step."""

    def __init__(self, folder, step, free):
        self.filler, self.step, self.free = folder / "filler", step, free

    def fill(self):
        with self.filler.open("wb", buffering=0) as file:
            file.write(bytes(max(0, os.statvfs(self.filler.parent).f_bavail * 4096 - self.free)))

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.fill()
        elif state.global_step == self.step + 1:
            self.filler.unlink()


@pytest.mark.promise("disk full")
@pytest.mark.parametrize("free", [0, 20_000, 150_000])
@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_full_disk(small_disk, tmp_path, caplog, capsys, policy, free):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    run_dir = small_disk / "run"
    filling = FullAt(small_disk, 2, free)
    trainer = make_trainer(run_dir, make_pairs(12), "vanilla", filling, on_disk_full=policy, **saving)
    code = run(lambda: trainer.train() and None)
    message = f"The disk is full: {run_dir / 'checkpoint-2'} could not be written"
    last = f"the last checkpoint is {run_dir / 'checkpoint-1'}"
    saved = sorted(os.listdir(run_dir))
    assert all(why_not_resumable(run_dir / each) is None for each in saved)
    if policy == "stop":
        assert (code, saved) == (1, ["checkpoint-1"])
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert message in line
        assert last in line
        return
    assert (code, saved) == (0, ["checkpoint-1", "checkpoint-3"])
    assert message in caplog.text
    assert last in caplog.text
    assert "Training continues, and tries again at the next checkpoint." in caplog.text
    expected = make_trainer(tmp_path / "whole", make_pairs(12), **saving)
    expected.train()
    assert are_equal(weights_of(trainer), weights_of(expected))
    filling.fill()
    assert run(lambda: save_final_model(trainer)) == 1  # never left out
    assert "error: " in capsys.readouterr().err
    assert sorted(os.listdir(run_dir)) == saved
    filling.filler.unlink()
