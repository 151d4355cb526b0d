"""Trainings that get SIGTERM or Ctrl-C: saved, ended in time with the right code, and resumed to the same bits."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver

import pytest
import run_with_signals
import torch
import transformers
from packaging.version import Version
from run_policies import make_pairs, make_trainer
from tiny_translation import tiny_collator, tiny_model, tiny_pairs

from hf_vanilla.training import (
    StopOnSignalCallback,
    VanillaTrainer,
    VanillaTrainingArguments,
    checkpoint_to_resume,
    train_to_end,
    why_not_resumable,
)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", run_with_signals.__file__)
# Forks of a process that has imported all: they start at once.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["hf_vanilla.training", "hf_vanilla.command_line", "run_with_signals"])


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    """Start the server with this process's path: before Python 3.13 it does not get it, and imports nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def start(folder, place="nowhere", kind="vanilla"):
    process = PROCESSES.Process(target=run_with_signals.main, args=(kind, folder, place))
    process.start()
    return process


def wait_for(condition):
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def code_of(process):
    process.join(120)
    return process.exitcode


def weights_after(folder, **options):
    code = code_of(start(folder, **options))
    assert code == 0, (folder / "log").read_text()[-4000:]
    return torch.load(folder / "weights.pt")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return {kind: weights_after(tmp_path_factory.mktemp(kind), kind=kind) for kind in ("vanilla", "stock")}


@pytest.mark.promise("SIGTERM or Ctrl-C")
@pytest.mark.parametrize(
    ("number", "place", "kind", "code", "step"),
    [
        (signal.SIGTERM, "step", "vanilla", 143, 3),
        (signal.SIGTERM, "step", "stock", 143, 3),
        (signal.SIGINT, "step", "vanilla", 130, 3),
        (signal.SIGTERM, "save", "vanilla", 143, 4),
        (signal.SIGINT, "evaluation", "vanilla", 130, 4),
        (signal.SIGTERM, "long step", "vanilla", 143, None),  # the grace is over before the step
        (signal.SIGTERM, "data", "vanilla", 143, None),
        (signal.SIGTERM, "first evaluation", "vanilla", 143, None),
    ],
)
def test_signal_saves_and_ends_within_the_grace(tmp_path, expected, number, place, kind, code, step):
    process = start(tmp_path, place, kind)
    wait_for((tmp_path / "slow").exists)
    os.kill(process.pid, number)
    since = time.monotonic()
    assert code_of(process) == code, (tmp_path / "log").read_text()[-4000:]
    assert time.monotonic() - since < 20  # the grace of 3 s, and a busy machine
    found = checkpoint_to_resume(tmp_path)
    assert found == (None if step is None else str(tmp_path / f"checkpoint-{step}"))
    actual = weights_after(tmp_path, kind=kind)
    assert all(torch.equal(actual[name], weight) for name, weight in expected[kind].items())


@pytest.mark.promise("SIGTERM or Ctrl-C")
@pytest.mark.parametrize(("hook", "step"), [("on_evaluate", 2), ("on_pre_optimizer_step", 1)])
def test_signal_after_an_epoch_ends_the_training(tmp_path, hook, step):
    """The trainer leaves its loop there as at the end of all epochs, and has evaluated it."""

    def send_once(args, state, control, **kwargs):
        if state.global_step == step:
            delattr(callback, hook)
            os.kill(os.getpid(), signal.SIGTERM)

    callback = transformers.TrainerCallback()
    setattr(callback, hook, send_once)
    arguments = VanillaTrainingArguments(
        str(tmp_path), num_train_epochs=3, save_strategy="epoch", eval_strategy="epoch", save_total_limit=1,
        use_cpu=True, disable_tqdm=True, report_to="none", dataloader_pin_memory=False,
    )  # fmt: skip
    model, pairs = tiny_model(), tiny_pairs(9)
    trainer = VanillaTrainer(
        model, arguments, tiny_collator(model), train_dataset=pairs, eval_dataset=pairs, callbacks=[callback]
    )
    with pytest.raises(SystemExit, match="143"):
        train_to_end(trainer)
    assert checkpoint_to_resume(tmp_path) == str(tmp_path / "checkpoint-2")
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [2]


def test_signal_before_a_rollback_ends_the_training(tmp_path):
    callback = transformers.TrainerCallback()
    callback.on_pre_optimizer_step = lambda args, state, control, **kwargs: (
        os.kill(os.getpid(), signal.SIGTERM) if state.global_step == 3 else None
    )
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tmp_path, make_pairs(24, 13), "vanilla", callback, on_nan="rollback", **saving)
    with pytest.raises(SystemExit, match="143"):
        train_to_end(trainer)
    assert checkpoint_to_resume(tmp_path) == str(tmp_path / "checkpoint-3")  # after the return to that of step 2


@pytest.mark.promise("SIGTERM or Ctrl-C")
@pytest.mark.parametrize("options", [{}, {"save_total_limit": 2}, {"load_best_model_at_end": True}])
def test_stopped_run_ends_with_the_checkpoints_of_one_that_was_not(tmp_path, options):
    def make_trainer(callback):
        arguments = VanillaTrainingArguments(
            str(tmp_path), max_steps=7, save_steps=2, eval_strategy="steps", eval_steps=1,
            metric_for_best_model="rank", greater_is_better=True,
            use_cpu=True, disable_tqdm=True, report_to="none", dataloader_pin_memory=False,
            save_strategy="steps", **options,
        )  # fmt: skip
        model, pairs = tiny_model(), tiny_pairs(9)
        ranks = {"compute_metrics": lambda prediction: {"rank": float(trainer.state.global_step == 5)}}
        data = {"train_dataset": pairs, "eval_dataset": pairs}
        trainer = VanillaTrainer(model, arguments, tiny_collator(model), callbacks=[callback], **data, **ranks)
        return trainer

    def checkpoints():
        return [path.name for path in sorted(tmp_path.glob("*checkpoint*"))]

    callback = transformers.TrainerCallback()
    callback.on_pre_optimizer_step = lambda args, state, control, **kwargs: (
        os.kill(os.getpid(), signal.SIGTERM) if state.global_step == 4 else None
    )
    with pytest.raises(SystemExit, match="143"):
        train_to_end(make_trainer(callback))
    assert checkpoints() == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    trainer = make_trainer(transformers.TrainerCallback())
    train_to_end(trainer, checkpoint_to_resume(tmp_path))
    expected = ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-7"]
    assert checkpoints() == expected[-options.get("save_total_limit", 4) :]
    assert not str(trainer.state.best_model_checkpoint).endswith("checkpoint-5")


def checkpoints_after_a_signal(folder, step, hook, **options):
    """Train with a signal in a callback at a step, train on, and return the names of the checkpoints."""

    def trainer_with(callback):
        arguments = VanillaTrainingArguments(
            str(folder), max_steps=6, save_steps=2, use_cpu=True, disable_tqdm=True, report_to="none",
            dataloader_pin_memory=False, save_strategy="steps", **options,
        )  # fmt: skip
        model, pairs = tiny_model(), tiny_pairs(9)
        data = {"train_dataset": pairs, "eval_dataset": pairs}
        return VanillaTrainer(model, arguments, tiny_collator(model), callbacks=[callback], **data)

    def send_once(args, state, control, **kwargs):
        if state.global_step == step:
            delattr(callback, hook)
            os.kill(os.getpid(), signal.SIGTERM)

    callback = transformers.TrainerCallback()
    setattr(callback, hook, send_once)
    with pytest.raises(SystemExit, match="143"):
        train_to_end(trainer_with(callback))
    train_to_end(trainer_with(transformers.TrainerCallback()), checkpoint_to_resume(folder))
    return [path.name for path in sorted(folder.glob("checkpoint*"))]


def test_signal_in_a_step_that_saves_anyway_keeps_its_checkpoint(tmp_path):
    found = checkpoints_after_a_signal(tmp_path, 3, "on_pre_optimizer_step")  # the fourth step
    assert found == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_checkpoint_of_a_signal_in_an_evaluation_is_an_extra_one(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1}
    found = checkpoints_after_a_signal(tmp_path, 3, "on_prediction_step", **options)
    assert found == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


@pytest.mark.promise("SIGTERM or Ctrl-C")
def test_second_signal_ends_at_once(tmp_path):
    process = start(tmp_path, "long step")
    wait_for((tmp_path / "slow").exists)
    os.kill(process.pid, signal.SIGINT)
    wait_for(lambda: "SIGINT: saving at the end of this step" in (tmp_path / "log").read_text())
    os.kill(process.pid, signal.SIGTERM)
    assert (code_of(process), checkpoint_to_resume(tmp_path)) == (143, None)
    assert "SIGTERM: second signal; ended without saving this step." in (tmp_path / "log").read_text()


@pytest.mark.promise("SIGTERM or Ctrl-C")
@pytest.mark.slow
@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="5.17 can't resume several processes on CPU"
)
def test_two_processes_stop_at_the_same_step(tmp_path):
    def launch(folder, place="nowhere"):
        return subprocess.Popen([sys.executable, *TORCHRUN, "vanilla", str(folder), place])

    whole, run = tmp_path / "whole", tmp_path / "run"
    assert launch(whole).wait(300) == 0
    process = launch(run, "step")
    wait_for((run / "slow").exists)
    process.send_signal(signal.SIGTERM)  # torchrun passes it on
    assert process.wait(60) != 0
    assert (run / "log").read_text().count("SIGTERM: saved the state of step 3") == 2
    assert why_not_resumable(run / "checkpoint-3") is None
    assert code_of(start(run)) == 1
    assert "the number of processes is 1, not 2" in (run / "log").read_text()
    assert launch(run).wait(300) == 0
    expected = torch.load(whole / "weights.pt")
    actual = torch.load(run / "weights.pt")
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())


def test_handlers_are_restored():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    callback = StopOnSignalCallback()
    args = transformers.TrainingArguments(use_cpu=True, report_to="none")
    callback.on_train_begin(args, transformers.TrainerState(), transformers.TrainerControl())
    assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    callback.on_train_end(args, transformers.TrainerState(), transformers.TrainerControl())
    assert {number: signal.getsignal(number) for number in before} == before
    with pytest.raises(ValueError, match="`grace` must be a positive number of seconds, got 0"):
        StopOnSignalCallback(grace=0)
