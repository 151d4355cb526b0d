"""The last and the best checkpoints of a run, and the one to resume from."""

import json
import os

import pytest
import torch
from checkpoint_folders import steps_of, write_checkpoint, write_run
from safetensors.torch import save_file
from tiny_translation import tiny_model, tiny_pairs, tiny_tokenizer

from hf_vanilla.training import (
    VanillaTrainer,
    VanillaTrainingArguments,
    best_checkpoints,
    checkpoint_to_resume,
    last_checkpoints,
    last_complete_checkpoint,
)


def test_last_checkpoints_are_ordered_by_step(tmp_path):
    run = write_run(tmp_path / "out", [1.0] * 11)  # 1000 comes after 900, not after 100
    (run / "checkpoint-1200").mkdir()
    (run / "checkpoint-final").mkdir()
    assert steps_of(last_checkpoints(run, 3)) == [900, 1000, 1100]


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


def train_with_checkpoints(folder, **changes):
    """Train four steps with a checkpoint after each."""
    quiet = {"use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    arguments = VanillaTrainingArguments(str(folder), max_steps=4, save_steps=1, **quiet, **changes)
    VanillaTrainer(tiny_model(), arguments, train_dataset=tiny_pairs(9), processing_class=tiny_tokenizer()).train()


ODD_STATES = {
    "[]": "no readable trainer_state.json",
    "null": "no readable trainer_state.json",
    "{}": "no step in its trainer_state.json",
    '{"global_step": "x"}': "no step in its trainer_state.json",
}


def delete_state(folder):
    (folder / "trainer_state.json").unlink()


def truncate_state(folder):
    state = folder / "trainer_state.json"
    state.write_text(state.read_text()[:100])


def delete_optimizer(folder):
    (folder / "optimizer.pt").unlink()


def delete_schedule(folder):
    (folder / "scheduler.pt").unlink()


def truncate_weights(folder):
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 4)


def truncate_optimizer(folder):
    os.truncate(folder / "optimizer.pt", (folder / "optimizer.pt").stat().st_size - 30)


def truncate_random_state(folder):
    os.truncate(folder / "rng_state.pth", (folder / "rng_state.pth").stat().st_size - 30)


def write_state(text):
    return lambda folder: (folder / "trainer_state.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (delete_state, "no readable trainer_state.json"),
        (truncate_state, "no readable trainer_state.json"),
        (delete_optimizer, "no state of the optimizer"),
        (delete_schedule, "no scheduler.pt"),
        (truncate_weights, "a truncated or broken model.safetensors"),
        (truncate_optimizer, "a truncated or broken optimizer.pt"),
        (truncate_random_state, "a truncated or broken rng_state.pth"),
        *((write_state(text), reason) for text, reason in ODD_STATES.items()),
    ],
    ids=[
        "no state",
        "half a state",
        "no optimizer",
        "no schedule",
        "half the weights",
        "half an optimizer",
        "half a random state",
        *ODD_STATES,
    ],
)
def test_run_resumes_from_the_last_complete_checkpoint(tmp_path, caplog, damage, reason):
    train_with_checkpoints(tmp_path)
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    damage(tmp_path / "checkpoint-4")
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")
    (warning,) = caplog.messages
    assert "checkpoint-4: a run can't be resumed from it" in warning
    assert warning.endswith(f"because it has {reason}.")
    with pytest.raises(ValueError, match=f"`resume_from_checkpoint` must be .*checkpoint-4 has {reason}; give"):
        checkpoint_to_resume(tmp_path, str(tmp_path / "checkpoint-4"))
    assert checkpoint_to_resume(tmp_path, str(tmp_path / "checkpoint-2")) == str(tmp_path / "checkpoint-2")
    assert checkpoint_to_resume(tmp_path) == str(tmp_path / "checkpoint-3")
    with pytest.raises(ValueError, match="must be the folder of a checkpoint, but there is no folder nowhere"):
        checkpoint_to_resume(tmp_path, "nowhere")


def test_checkpoints_without_optimizer_are_not_resumed(tmp_path):
    train_with_checkpoints(tmp_path, save_only_model=True)
    assert steps_of(last_checkpoints(tmp_path, 4)) == [1, 2, 3, 4]
    assert last_complete_checkpoint(tmp_path) is None


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
    for name in (*names, "trainer_state.json"):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text('{"global_step": 7}')
    for name in {"optimizer.pt", "scheduler.pt", "adapter_model.safetensors"} & set(names):
        save = save_file if name.endswith("safetensors") else torch.save
        save({"weight": torch.ones(3)}, checkpoint / name)
    assert last_complete_checkpoint(tmp_path) == str(checkpoint)


def test_run_without_checkpoints_is_not_resumed(tmp_path):
    (tmp_path / "checkpoint-final").mkdir()
    assert last_complete_checkpoint(tmp_path) is None
    assert last_complete_checkpoint(tmp_path / "nowhere") is None
