"""The last and the best checkpoints of a run, and the one to resume from."""

import json
import os
import re
import runpy
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from checkpoint_folders import steps_of, write_checkpoint, write_run
from safetensors.torch import load_file, save_file
from tiny_translation import tiny_collator, tiny_model, tiny_pairs, tiny_tokenizer, weights_of
from transformers import Seq2SeqTrainer, TrainerCallback

from hf_vanilla.training import (
    ManifestCallback,
    VanillaTrainer,
    VanillaTrainingArguments,
    VerifiedCheckpointTrainer,
    best_checkpoints,
    checkpoint_to_resume,
    last_checkpoints,
    last_complete_checkpoint,
    why_not_resumable,
)


def test_last_checkpoints_are_ordered_by_step(tmp_path):
    run = write_run(tmp_path / "out", [1.0] * 11)  # 1000 comes after 900, not after 100
    (run / "checkpoint-1200").mkdir()
    (run / "checkpoint-final").mkdir()
    assert steps_of(last_checkpoints(run, 3)) == [900, 1000, 1100]
    assert steps_of(last_checkpoints(run, 2, until=1050)) == [900, 1000]


@pytest.mark.parametrize("choose", [last_checkpoints, best_checkpoints])
def test_missing_checkpoints_raise(tmp_path, choose):
    run = write_run(tmp_path / "out", [3.0, 2.0])
    with pytest.raises(ValueError, match="`count` must be at least 1, got 0"):
        choose(run, 0)
    with pytest.raises(
        ValueError, match=r"has 2 checkpoints, fewer than `count` \(3\): steps \[100, 200\]. Lower `count`"
    ):
        choose(run, 3)
    with pytest.raises(ValueError, match=r"`run_dir` \(.*nowhere\) must be a folder"):
        choose(tmp_path / "nowhere", 1)


@pytest.mark.parametrize(
    ("metric", "given", "greater_is_better", "expected"),
    [
        ("eval_loss", "eval_loss", None, [100, 400]),
        ("eval_loss", "loss", None, [100, 400]),
        ("eval_bleu", "bleu", None, [200, 300]),
        ("eval_bleu", "eval_bleu", None, [200, 300]),
        ("eval_ter", "ter", False, [100, 400]),
        ("eval_mse", "mse", None, [100, 400]),
    ],
)
def test_best_checkpoints_are_best_by_the_metric(tmp_path, metric, given, greater_is_better, expected):
    run = write_run(tmp_path / "out", [1.0, 9.0, 8.0, 2.0], metric=metric)
    assert steps_of(best_checkpoints(run, 2, given, greater_is_better=greater_is_better)) == expected


def test_best_checkpoints_ignore_the_metric_of_the_run(tmp_path):
    run = write_run(tmp_path / "out", [4.0, 1.0, 3.0, 2.0])
    path = run / "checkpoint-400" / "trainer_state.json"
    state = json.loads(path.read_text())
    for entry in state["log_history"]:
        entry["eval_bleu"] = entry["step"]
    # The run itself looked for the highest BLEU.
    path.write_text(json.dumps({**state, "best_metric": 400, "best_global_step": 400}))
    assert steps_of(best_checkpoints(run, 2)) == [200, 400]
    assert steps_of(best_checkpoints(run, 2, "bleu")) == [300, 400]


def test_best_checkpoints_prefer_the_later_of_equal_ones(tmp_path):
    run = write_run(tmp_path / "out", [1.0, 2.0, 1.0, 1.0])
    assert steps_of(best_checkpoints(run, 2)) == [300, 400]


def test_unknown_metric_raises(tmp_path):
    run = write_run(tmp_path / "out", [1.0, 2.0])
    with pytest.raises(
        ValueError, match="`metric` must be one that the run has logged, eval_loss, eval_runtime; got eval_bleu"
    ):
        best_checkpoints(run, 1, "bleu")
    state = run / "checkpoint-200" / "trainer_state.json"
    state.write_text(json.dumps({"log_history": [{"step": 100, "loss": 1.0}]}))
    with pytest.raises(ValueError, match="not evaluated while training.* --eval_steps equal to --save_steps"):
        best_checkpoints(run, 1)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("[]", "trainer_state.json must hold a JSON object, got list"),
        ("{}", "not evaluated while training"),
    ],
)
def test_best_checkpoints_of_an_odd_state_raise(tmp_path, state, message):
    run = write_run(tmp_path, [1.0, 2.0])
    (run / "checkpoint-200" / "trainer_state.json").write_text(state)
    with pytest.raises(ValueError, match=message):
        best_checkpoints(run, 1)


def test_best_checkpoints_skip_missing_values(tmp_path):
    run = write_run(tmp_path / "out", [1.0, float("nan"), 3.0])
    write_checkpoint(run / "checkpoint-350")
    (run / "checkpoint-350" / "trainer_state.json").write_text(
        (run / "checkpoint-300" / "trainer_state.json").read_text()
    )
    with pytest.raises(
        ValueError,
        match=r"`eval_loss` was measured for 2 checkpoints, fewer than `count` \(3\): of .* those at \[100, 300\]",
    ):
        best_checkpoints(run, 3)


def test_best_checkpoint_is_that_of_the_trainer(tmp_path):
    arguments = VanillaTrainingArguments(
        str(tmp_path),
        max_steps=5,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        learning_rate=0.1,
        metric_for_best_model="loss",
        max_tokens_per_batch=40,
    )
    trainer = VanillaTrainer(
        tiny_model(),
        arguments,
        train_dataset=tiny_pairs(30),
        eval_dataset=tiny_pairs(9, seed=6),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    (best,) = best_checkpoints(tmp_path, 1)
    assert steps_of([best]) == [trainer.state.best_global_step]


QUIET = {"use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "report_to": "none"}


def make_trainer(folder, trainer_class=VanillaTrainer, model=None, callbacks=(), trainer_options=None, **changes):
    """Return a trainer for four steps with a checkpoint after each."""
    arguments = VanillaTrainingArguments(str(folder), **{"max_steps": 4, "save_steps": 1, **QUIET, **changes})
    model = tiny_model(dropout=0.1) if model is None else model
    options = {"train_dataset": tiny_pairs(9), "processing_class": tiny_tokenizer(), **(trainer_options or {})}
    return trainer_class(model, arguments, tiny_collator(model), callbacks=list(callbacks), **options)


@pytest.fixture(scope="module", params=["manifest", "none"])
def written_run(request, tmp_path_factory):
    """A run of four checkpoints: with manifests, or as an earlier version or the stock trainer leaves them."""
    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder, VanillaTrainer if request.param == "manifest" else Seq2SeqTrainer).train()
    return folder


def truncate(name, missing):
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - missing)


def delete(name):
    return lambda folder: (folder / name).unlink()


def flip(name):
    def damage(folder):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 4
        (folder / name).write_bytes(content)

    return damage


def change_weights(change):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def zero(tensors):
    tensors["model.encoder.layers.0.feed_forward.fc1.weight"].zero_()


def drop(tensors):
    del tensors["model.encoder.layers.0.feed_forward.fc1.weight"]


def write_state(text):
    return lambda folder: (folder / "trainer_state.json").write_text(text)


DAMAGES = {
    "no state": (delete("trainer_state.json"), "no trainer_state.json"),
    "half a state": (truncate("trainer_state.json", 200), "trainer_state.json"),
    "half a config": (truncate("config.json", 200), "config.json"),
    "no optimizer": (delete("optimizer.pt"), "no (optimizer.pt|state of the optimizer)"),
    "no schedule": (delete("scheduler.pt"), "no scheduler.pt"),
    "no random state": (delete("rng_state.pth"), "no rng_state.pth"),
    "no weights": (delete("model.safetensors"), "no model.safetensors"),
    "half the weights": (truncate("model.safetensors", 4), "a truncated or broken model.safetensors"),
    "half an optimizer": (truncate("optimizer.pt", 30), "a truncated or broken optimizer.pt"),
    "half a random state": (truncate("rng_state.pth", 30), "a truncated or broken rng_state.pth"),
    "a flipped bit": (flip("optimizer.pt"), "broken optimizer.pt"),
    "zero weights": (change_weights(zero), "model.safetensors.*(changed|nothing but zeros in `.*fc1.weight`)"),
    "a dropped tensor": (change_weights(drop), "model.safetensors|do not load: .*it lacks .*fc1.weight"),
    **{text: (write_state(text), "trainer_state.json") for text in ("[]", "null", "{}", '{"global_step": "x"}')},
}


@pytest.mark.promise("file missing", "file cut short", "flipped bit", "tensor missing")
@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_run_resumes_from_the_newest_good_checkpoint(written_run, tmp_path, caplog, damage, reason):
    run = tmp_path / "run"
    shutil.copytree(written_run, run)
    assert checkpoint_to_resume(run) == str(run / "checkpoint-4")
    damage(run / "checkpoint-4")
    assert checkpoint_to_resume(run) == last_complete_checkpoint(run) == str(run / "checkpoint-3")
    assert re.search(f"checkpoint-4: a run can't be resumed from it, because it has .*{reason}", caplog.messages[-1])
    with pytest.raises(ValueError, match=f"`resume_from_checkpoint` must be .*checkpoint-4 has .*{reason}.*; give"):
        checkpoint_to_resume(run, str(run / "checkpoint-4"))
    assert checkpoint_to_resume(run, str(run / "checkpoint-2")) == str(run / "checkpoint-2")


def test_unknown_checkpoint_raises(tmp_path):
    with pytest.raises(ValueError, match="must be the folder of a checkpoint, but there is no folder nowhere"):
        checkpoint_to_resume(tmp_path, "nowhere")


@pytest.mark.promise("file cut short", "flipped bit")
def test_run_with_damaged_checkpoints_alone_does_not_start_anew(written_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(written_run, run)
    for step in (1, 2, 3, 4):
        flip("optimizer.pt")(run / f"checkpoint-{step}")
    with pytest.raises(ValueError, match="but damaged ones: checkpoint-4 has .*; checkpoint-1 has .* remove them"):
        checkpoint_to_resume(run)
    assert last_complete_checkpoint(run) is None


@pytest.mark.promise("killed inside a save")
def test_unfinished_checkpoints_are_no_damage(tmp_path, caplog):
    make_trainer(tmp_path, max_steps=1).train()
    (tmp_path / "checkpoint-1" / "manifest.json").unlink()  # as if killed before it was written
    (tmp_path / ".staging" / "checkpoint-2").mkdir(parents=True)
    assert checkpoint_to_resume(tmp_path) is None
    assert "it has no manifest.json, which is written last" in caplog.messages[-1]
    with pytest.raises(ValueError, match="has no checkpoint to resume from"):
        make_trainer(tmp_path).train(resume_from_checkpoint=True)
    make_trainer(tmp_path).train()
    assert not (tmp_path / ".staging").exists()
    assert checkpoint_to_resume(tmp_path) == str(tmp_path / "checkpoint-4")


@pytest.mark.promise("killed inside a save", "other processes or batches", "other config, tokenizer or data")
@pytest.mark.parametrize("trainer_class", [VanillaTrainer, Seq2SeqTrainer])
def test_trainer_resumes_to_the_same_bits_and_refuses_another_training(tmp_path, caplog, trainer_class):
    def start(checkpoint, **changes):
        callbacks = [] if trainer_class is VanillaTrainer else [ManifestCallback(changes.get("force_resume", False))]
        trainer = make_trainer(tmp_path, trainer_class, callbacks=callbacks, **changes)
        trainer.train(resume_from_checkpoint=checkpoint)
        return weights_of(trainer)

    expected = start(None)
    assert [why_not_resumable(tmp_path / f"checkpoint-{step}") for step in (1, 2, 3, 4)] == [None] * 4
    shutil.rmtree(tmp_path / "checkpoint-4")
    shutil.rmtree(tmp_path / "checkpoint-3")
    actual = start(True)
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())
    changed = {
        "`seed` is 7, not 42": {"seed": 7},
        "`per_device_train_batch_size` is 4, not 8": {"per_device_train_batch_size": 4},
        "configuration has changed .config.json: `dropout` is 0.3, not 0.1": {"model": tiny_model(dropout=0.3)},
        "the training data has changed": {"trainer_options": {"train_dataset": tiny_pairs(9, seed=6)}},
        "the tokenizer has changed": {"trainer_options": {"processing_class": with_another_token(tiny_tokenizer())}},
    }
    checkpoint = str(tmp_path / "checkpoint-2")
    for message, changes in changed.items():
        with pytest.raises(ValueError, match=f"not the training that saved .*checkpoint-2: .*{message}.* --force"):
            start(checkpoint, **changes)
    start(checkpoint, seed=7, force_resume=True)
    assert "checkpoint-2 although `seed` is 7, not 42" in caplog.text


@pytest.mark.promise("killed inside a save")
@pytest.mark.parametrize(
    ("order", "step", "workers"),
    [
        ("group_by_length", 7, {}),  # of 9, an epoch has 5
        ("random", 7, {}),
        ("random", 4, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}),
    ],
    ids=["group_by_length", "random", "persistent worker"],
)
def test_epoch_is_resumed_with_the_order_it_had(tmp_path, order, step, workers):
    settings = {"train_sampling_strategy": order, "per_device_train_batch_size": 2, "max_steps": 9, **workers}
    options = {"train_dataset": tiny_pairs(9)}

    def start(checkpoint):
        trainer = make_trainer(tmp_path, VerifiedCheckpointTrainer, trainer_options=options, **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        return weights_of(trainer)

    expected = start(None)
    actual = start(str(tmp_path / f"checkpoint-{step}"))
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())


def with_another_token(tokenizer):
    tokenizer.add_tokens("30")
    return tokenizer


@pytest.mark.promise("other processes or batches", "other config, tokenizer or data")
def test_changed_versions_and_processes_are_named(tmp_path, caplog):
    make_trainer(tmp_path, max_steps=2).train()
    path = tmp_path / "checkpoint-2" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["versions"]["torch"] = "2.4"
    path.write_text(json.dumps(manifest))
    assert why_not_resumable(path.parent) == "a broken manifest.json: it has changed since it was written"
    manifest["format"] = 1  # which has no checksum of the manifest
    path.write_text(json.dumps(manifest))
    make_trainer(tmp_path).train(resume_from_checkpoint=True)
    assert f"was saved: torch (2.4, now {version('torch')})" in caplog.text
    path.write_text(json.dumps({**manifest, "world_size": 3}))
    with pytest.raises(ValueError, match="the number of processes is 1, not 3"):
        make_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    ranks = iter((4, 1, 2, 3))
    evaluation = {"eval_dataset": tiny_pairs(3), "compute_metrics": lambda prediction: {"rank": next(ranks)}}
    best = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "rank", "load_best_model_at_end": True}
    make_trainer(tmp_path, trainer_options=evaluation, save_total_limit=2, greater_is_better=True, **best).train()
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-1", "checkpoint-4"]
    assert not (tmp_path / ".staging").exists()
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-1")
    # Checkpoints of later steps, skipped by a resume, go first.
    flip("optimizer.pt")(tmp_path / "checkpoint-4")
    make_trainer(tmp_path, save_total_limit=2, max_steps=3).train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-1", "checkpoint-3"]


@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_checkpoints_that_a_callback_asks_for_are_kept(tmp_path, strategy):
    class SaveAt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = control.should_save or state.global_step in (1, 3)

    make_trainer(tmp_path, callbacks=[SaveAt()], save_strategy=strategy, save_steps=2).train()
    expected = [1, 3] if strategy == "no" else [1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == [f"checkpoint-{step}" for step in expected]


def test_checkpoints_without_optimizer_are_not_resumed(tmp_path):
    make_trainer(tmp_path, save_only_model=True).train()
    assert steps_of(last_checkpoints(tmp_path, 4)) == [1, 2, 3, 4]
    assert last_complete_checkpoint(tmp_path) is None


RANDOM_STATES = {"rng_state_0.pth", "rng_state_1.pth"}


@pytest.mark.parametrize(
    "names",
    [
        ("optimizer.pt", "scheduler.pt", "adapter_model.safetensors"),
        ("optimizer.bin", "scheduler.pt", "pytorch_model_fsdp.bin"),
        ("optimizer_0/part", "scheduler.pt", "pytorch_model_fsdp_0/part"),
        ("global_step7/part", "latest"),
    ],
    ids=["PEFT", "FSDP", "sharded FSDP", "DeepSpeed"],
)
def test_checkpoints_of_other_formats_can_be_resumed(tmp_path, names):
    checkpoint = tmp_path / "checkpoint-7"
    for name in (*names, "trainer_state.json", *RANDOM_STATES):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text('{"global_step": 7}')
    for name in {"optimizer.pt", "scheduler.pt", "adapter_model.safetensors"} & set(names) | RANDOM_STATES:
        save = save_file if name.endswith("safetensors") else torch.save
        save({"weight": torch.ones(3)}, checkpoint / name)
    assert last_complete_checkpoint(tmp_path) == str(checkpoint)
    (checkpoint / "rng_state_0.pth").unlink()
    assert why_not_resumable(checkpoint) == "no rng_state_0.pth"


def test_run_without_checkpoints_is_not_resumed(tmp_path):
    (tmp_path / "checkpoint-final").mkdir()
    assert last_complete_checkpoint(tmp_path) is None
    assert last_complete_checkpoint(tmp_path / "nowhere") is None


def test_script_verifies_a_run_and_a_checkpoint(written_run, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(written_run, run)

    def verify(folder):
        monkeypatch.setattr(sys, "argv", ["verify_checkpoint.py", str(folder)])
        with pytest.raises(SystemExit) as ending:
            runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "verify_checkpoint.py"), run_name="__main__")
        return ending.value.code, capsys.readouterr()

    assert verify(run)[0] == 0
    flip("optimizer.pt")(run / "checkpoint-2")
    code, output = verify(run)
    assert (code, output.out.count("NOT GOOD")) == (1, 1)
    assert "1 of 4 checkpoints can't be resumed from" in output.err
    assert verify(run / "checkpoint-3")[0] == 0
    assert verify(run / "nowhere")[0] == 1
