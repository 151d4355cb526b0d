import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_translation import tiny_model, tiny_pairs, tiny_tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla.training import (
    VanillaTrainer,
    VanillaTrainingArguments,
    average_checkpoints,
    best_checkpoints,
    checkpoint_to_resume,
    last_checkpoints,
    last_complete_checkpoint,
)


SCRIPT = Path(__file__).parents[2] / "scripts" / "average_checkpoints.py"
WEIGHTS = "model.safetensors"


def write_checkpoint(folder, *, seed=0, dtype=torch.float32, num_shards=1, **changes):
    """Write a checkpoint of three tensors, in one file or in several."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "embedding": torch.randn(5, 4, generator=generator).to(dtype),
        "projection": torch.randn(3, 4, generator=generator).to(dtype),
        "position_ids": torch.arange(7),
        **changes,
    }
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    folder.mkdir(parents=True)
    if num_shards == 1:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    else:
        files = {name: f"model-{1 + number % num_shards}.safetensors" for number, name in enumerate(sorted(tensors))}
        for file in set(files.values()):
            save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps({"d_model": 4, "transformers_version": str(seed)}))
    return tensors


def write_run(folder, values, *, metric="eval_loss"):
    """Write the folder of a run with one checkpoint and one value of the metric for each hundred steps."""
    history = []
    for number, value in enumerate(values, start=1):
        write_checkpoint(folder / f"checkpoint-{100 * number}", seed=number)
        history += [{"step": 100 * number, "loss": 1.0}, {"step": 100 * number, metric: value, "eval_runtime": 1.0}]
        state = {"log_history": list(history)}
        (folder / f"checkpoint-{100 * number}" / "trainer_state.json").write_text(json.dumps(state))
    return folder


def steps_of(folders):
    return [int(folder.name.removeprefix("checkpoint-")) for folder in folders]


# The average


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_the_mean(tmp_path, dtype):
    written = [write_checkpoint(tmp_path / str(seed), seed=seed, dtype=dtype) for seed in range(3)]
    folder = average_checkpoints([tmp_path / str(seed) for seed in range(3)], tmp_path / "averaged")
    averaged = load_file(folder / WEIGHTS)
    assert set(averaged) == {"embedding", "projection", "position_ids"}
    for name in ("embedding", "projection"):
        mean = torch.stack([tensors[name].to(torch.float64) for tensors in written]).mean(dim=0)
        assert averaged[name].dtype == dtype
        assert torch.equal(averaged[name], mean.to(dtype))
    assert torch.equal(averaged["position_ids"], torch.arange(7))


def test_mean_of_half_precision_weights_is_not_taken_in_half_precision(tmp_path):
    # 256 + 1 is 256 in bfloat16, so sums of bfloat16 would give 256 / 3.
    for number, value in enumerate((256.0, 1.0, 1.0)):
        write_checkpoint(
            tmp_path / str(number), embedding=torch.full((2,), value, dtype=torch.bfloat16), projection=None
        )
    folder = average_checkpoints([tmp_path / str(number) for number in range(3)], tmp_path / "averaged")
    assert load_file(folder / WEIGHTS)["embedding"].tolist() == [86.0, 86.0]


def test_mean_of_equal_checkpoints_has_the_same_bits(tmp_path):
    for number in range(7):
        written = write_checkpoint(tmp_path / str(number), seed=3)
    folder = average_checkpoints([tmp_path / str(number) for number in range(7)], tmp_path / "averaged")
    averaged = load_file(folder / WEIGHTS)
    assert all(torch.equal(averaged[name], written[name]) for name in written)


def test_shards_may_differ_and_are_those_of_the_last(tmp_path):
    written = [write_checkpoint(tmp_path / str(shards), seed=shards, num_shards=shards) for shards in (1, 3, 2)]
    folder = average_checkpoints([tmp_path / str(shards) for shards in (1, 3, 2)], tmp_path / "averaged")
    index = json.loads((folder / f"{WEIGHTS}.index.json").read_text())
    assert index == json.loads((tmp_path / "2" / f"{WEIGHTS}.index.json").read_text())
    assert not (folder / WEIGHTS).exists()
    for name, file in index["weight_map"].items():
        mean = torch.stack([tensors[name].to(torch.float64) for tensors in written]).mean(dim=0)
        assert torch.equal(load_file(folder / file)[name].to(torch.float64), mean.to(torch.float32).to(torch.float64))


def test_files_of_the_model_come_from_the_last_and_the_state_of_training_stays_behind(tmp_path):
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name, seed=ord(name))
        for file in ("tokenizer.json", "generation_config.json", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
            (tmp_path / name / file).write_text(name)
        for file in ("trainer_state.json", "training_args.bin", "modeling_own.py", "pytorch_model.bin"):
            (tmp_path / name / file).write_text(name)
        (tmp_path / name / "additional_chat_templates").mkdir()
        (tmp_path / name / "additional_chat_templates" / "x.jinja").write_text(name)
        (tmp_path / name / "global_step7").mkdir()
    folder = average_checkpoints([tmp_path / "a", tmp_path / "b"], tmp_path / "averaged")
    kept = {"additional_chat_templates", "config.json", "generation_config.json", "modeling_own.py", "tokenizer.json"}
    assert set(os.listdir(folder)) == kept | {WEIGHTS}
    assert (folder / "tokenizer.json").read_text() == "b"
    assert (folder / "additional_chat_templates" / "x.jinja").read_text() == "b"
    assert json.loads((folder / "config.json").read_text())["transformers_version"] == str(ord("b"))


def test_averaged_model_of_a_run_loads_and_is_tied(tmp_path):
    arguments = VanillaTrainingArguments(
        str(tmp_path / "out"),
        max_steps=4,
        save_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        learning_rate=0.01,
    )
    trainer = VanillaTrainer(tiny_model(), arguments, train_dataset=tiny_pairs(9), processing_class=tiny_tokenizer())
    trainer.train()
    folders = last_checkpoints(tmp_path / "out", 3)
    assert steps_of(folders) == [2, 3, 4]
    models = [AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in folders]
    averaged = AutoModelForSeq2SeqLM.from_pretrained(average_checkpoints(folders, tmp_path / "averaged"))
    states = [model.state_dict() for model in models]
    for name, tensor in averaged.state_dict().items():
        mean = torch.stack([state[name] for state in states]).mean(dim=0)
        torch.testing.assert_close(tensor, mean, rtol=0, atol=1e-6)
    assert averaged.lm_head.weight is averaged.model.decoder.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(tmp_path / "averaged").pad_token_id == 0


# Bad input


def cause_none(folder):
    return []


def cause_missing(folder):
    return [folder / "a", folder / "nowhere"]


def cause_twice(folder):
    return [folder / "a", folder / "b", folder / "a"]


def cause_pickle(folder):
    (folder / "c").mkdir()
    (folder / "c" / "pytorch_model.bin").write_text("")
    return [folder / "a", folder / "c"]


def cause_no_weights(folder):
    (folder / "c").mkdir()
    return [folder / "c"]


def cause_broken_weights(folder):
    (folder / "b" / WEIGHTS).write_bytes((folder / "b" / WEIGHTS).read_bytes()[:100])
    return [folder / "a", folder / "b"]


def cause_other_config(folder):
    (folder / "a" / "config.json").write_text(json.dumps({"d_model": 8, "heads": 2}))
    return [folder / "a", folder / "b"]


def cause_no_config(folder):
    (folder / "a" / "config.json").unlink()
    return [folder / "a", folder / "b"]


def cause_other_names(folder):
    write_checkpoint(folder / "c", projection=None, bias=torch.zeros(3))
    return [folder / "a", folder / "c"]


def cause_other_shape(folder):
    write_checkpoint(folder / "c", projection=torch.zeros(3, 6))
    return [folder / "c", folder / "a"]


def cause_other_dtype(folder):
    write_checkpoint(folder / "c", dtype=torch.float16)
    return [folder / "c", folder / "a"]


def cause_other_integers(folder):
    write_checkpoint(folder / "c", position_ids=torch.arange(7) + 1)
    return [folder / "a", folder / "c"]


def cause_nan(folder):
    write_checkpoint(folder / "c", projection=torch.full((3, 4), float("nan")))
    return [folder / "a", folder / "c", folder / "b"]


def cause_incomplete_index(folder):
    write_checkpoint(folder / "c", num_shards=2)
    index = folder / "c" / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": {"ghost": "model-1.safetensors"}}))
    return [folder / "c"]


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (cause_none, "`checkpoints` must name at least one folder, got none"),
        (cause_missing, "nowhere is no folder"),
        (cause_twice, "`checkpoints` must differ, .*a is given 2 times"),
        (cause_pickle, r"has no model.safetensors; load its pytorch_model.bin with `from_pretrained` and save it"),
        (cause_no_weights, r"c has no model.safetensors; give folders of the kind that `save_pretrained` writes"),
        (cause_broken_weights, r"b.model.safetensors can't be read"),
        (cause_other_config, r"`d_model` is 8 in .*a and 4 in .*b \(2 differences: d_model, heads\)"),
        (cause_no_config, r"a.config.json can't be read"),
        (cause_other_names, "must have the same tensors, but 2 are only in one of .*: bias, projection"),
        (cause_other_shape, r"`projection` is F32 \[3, 6\] in .*c and F32 \[3, 4\] in .*a"),
        (cause_other_dtype, r"`embedding` is F16 \[5, 4\] in .*c and F32 \[5, 4\] in .*a"),
        (cause_other_integers, "`position_ids` holds torch.int64 and has no mean, but it differs between .*a and .*c"),
        (cause_nan, "`projection` is nan or infinite in .*c; leave that one out"),
        (cause_incomplete_index, "the index of .*c names `ghost`, which no file holds"),
    ],
    ids=lambda value: value.__name__.removeprefix("cause_") if callable(value) else "",
)
def test_bad_checkpoints_are_named_and_nothing_is_written(tmp_path, cause, message):
    write_checkpoint(tmp_path / "a", seed=1)
    write_checkpoint(tmp_path / "b", seed=2)
    checkpoints = cause(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match=message):
        average_checkpoints(checkpoints, tmp_path / "averaged")
    assert sorted(os.listdir(tmp_path)) == before


def test_one_folder_is_no_list_of_folders(tmp_path):
    with pytest.raises(TypeError, match=r"`checkpoints` must be a list of folders, got one folder \(out\); put it in"):
        average_checkpoints("out", tmp_path / "averaged")


def test_output_is_replaced_only_when_asked(tmp_path):
    for seed in (1, 2):
        written = write_checkpoint(tmp_path / str(seed), seed=seed)
    (tmp_path / "averaged").mkdir()
    average_checkpoints([tmp_path / "1"], tmp_path / "averaged")  # an empty folder is as good as none
    (tmp_path / "averaged" / "note").write_text("of the old model")
    with pytest.raises(
        ValueError, match=r"`output_dir` \(.*averaged\) is not empty; choose another, or allow it with"
    ):
        average_checkpoints([tmp_path / "2"], tmp_path / "averaged")
    assert (tmp_path / "averaged" / "note").read_text() == "of the old model"
    average_checkpoints([tmp_path / "2"], tmp_path / "averaged", overwrite=True)
    assert torch.equal(load_file(tmp_path / "averaged" / WEIGHTS)["embedding"], written["embedding"])
    assert sorted(os.listdir(tmp_path / "averaged")) == ["config.json", WEIGHTS]
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "averaged"]


def test_output_must_be_a_folder_of_its_own(tmp_path):
    write_checkpoint(tmp_path / "a")
    with pytest.raises(ValueError, match=r"`output_dir` \(.*a\) must not be one of `checkpoints` or hold one"):
        average_checkpoints([tmp_path / "a"], tmp_path / "a", overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"`output_dir` \(.*file\) must be a folder, there is a file of that name"):
        average_checkpoints([tmp_path / "a"], tmp_path / "file", overwrite=True)
    with pytest.raises(
        ValueError, match=r"`output_dir` \(.*averaged\) can't be written: (Not a directory|File exists)"
    ):
        average_checkpoints([tmp_path / "a"], tmp_path / "file" / "averaged")


@pytest.mark.parametrize("levels", [1, 2], ids=["run folder", "folder of runs"])
def test_output_never_replaces_the_run_it_comes_from(tmp_path, levels):
    run = write_run(tmp_path / "runs" / "out", [1.0, 2.0])
    target = run if levels == 1 else run.parent
    (target / "config.json").write_text("{}")  # a finished run, whose folder holds the model too
    with pytest.raises(
        ValueError, match=r"`output_dir` .* or hold one, but it is or holds .*checkpoint-100; choose a folder of its"
    ):
        average_checkpoints(last_checkpoints(run, 2), target, overwrite=True)
    assert steps_of(last_checkpoints(run, 2)) == [100, 200]


def test_output_never_replaces_another_run(tmp_path):
    write_checkpoint(tmp_path / "a")
    other = write_run(tmp_path / "other", [1.0])
    (other / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\) must not be the folder of a run, with checkpoints in it"):
        average_checkpoints([tmp_path / "a"], other, overwrite=True)
    assert steps_of(last_checkpoints(other, 1)) == [100]


def test_output_replaces_nothing_but_a_model(tmp_path):
    write_checkpoint(tmp_path / "a")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("mine")
    with pytest.raises(
        ValueError, match=r"thesis\) must hold a model to be overwritten, but it has no config.json; choo"
    ):
        average_checkpoints([tmp_path / "a"], tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "chapter").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["a", "thesis"]


def test_a_failure_while_writing_leaves_the_old_output(tmp_path, monkeypatch):
    for seed in (1, 2):
        write_checkpoint(tmp_path / str(seed), seed=seed)
    average_checkpoints([tmp_path / "1"], tmp_path / "averaged")
    before = (tmp_path / "averaged" / WEIGHTS).read_bytes()

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("hf_vanilla.training.checkpoints.shutil.copy2", fail)
    with pytest.raises(OSError, match="No space left"):
        average_checkpoints([tmp_path / "2"], tmp_path / "averaged", overwrite=True)
    assert (tmp_path / "averaged" / WEIGHTS).read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "averaged"]


def test_a_failure_to_move_the_new_output_puts_the_old_one_back(tmp_path, monkeypatch):
    for seed in (1, 2):
        write_checkpoint(tmp_path / str(seed), seed=seed)
    average_checkpoints([tmp_path / "1"], tmp_path / "averaged")
    before = (tmp_path / "averaged" / WEIGHTS).read_bytes()
    replace, calls = os.replace, []

    def fail_at_the_second_call(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError("Disk quota exceeded")
        replace(source, target)

    monkeypatch.setattr("hf_vanilla.training.checkpoints.os.replace", fail_at_the_second_call)
    with pytest.raises(OSError, match="Disk quota exceeded"):
        average_checkpoints([tmp_path / "2"], tmp_path / "averaged", overwrite=True)
    assert (tmp_path / "averaged" / WEIGHTS).read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "averaged"]


# Choosing


def test_last_checkpoints_are_counted_by_step(tmp_path):
    run = write_run(tmp_path / "out", [1.0] * 11)  # 1000 comes after 900, not after 100
    (run / "checkpoint-1200").mkdir()
    (run / "checkpoint-final").mkdir()
    assert steps_of(last_checkpoints(run, 3)) == [900, 1000, 1100]


@pytest.mark.parametrize("choose", [last_checkpoints, best_checkpoints])
def test_choosing_refuses_what_is_not_there(tmp_path, choose):
    run = write_run(tmp_path / "out", [3.0, 2.0])
    with pytest.raises(ValueError, match="`count` must be at least 1, got 0"):
        choose(run, 0)
    with pytest.raises(
        ValueError, match=r"holds 2 checkpoints, fewer than `count` \(3\): steps \[100, 200\]. Ask for fewer"
    ):
        choose(run, 3)
    with pytest.raises(ValueError, match=r"`run_dir` \(.*nowhere\) is no folder"):
        choose(tmp_path / "nowhere", 1)


@pytest.mark.parametrize(
    ("metric", "asked", "greater_is_better", "expected"),
    [
        ("eval_loss", "eval_loss", None, [100, 400]),
        ("eval_loss", "loss", None, [100, 400]),
        ("eval_bleu", "bleu", None, [200, 300]),
        ("eval_bleu", "eval_bleu", None, [200, 300]),
        ("eval_ter", "ter", False, [100, 400]),
    ],
)
def test_best_checkpoints_are_best_by_the_metric(tmp_path, metric, asked, greater_is_better, expected):
    run = write_run(tmp_path / "out", [1.0, 9.0, 8.0, 2.0], metric=metric)
    assert steps_of(best_checkpoints(run, 2, asked, greater_is_better=greater_is_better)) == expected


def test_best_checkpoints_are_those_of_the_lowest_loss_unless_another_metric_is_named(tmp_path):
    run = write_run(tmp_path / "out", [4.0, 1.0, 3.0, 2.0])
    path = run / "checkpoint-400" / "trainer_state.json"
    state = json.loads(path.read_text())
    for entry in state["log_history"]:
        entry["eval_bleu"] = entry["step"]
    # The run itself looked for the highest BLEU.
    path.write_text(json.dumps({**state, "best_metric": 400, "best_global_step": 400}))
    assert steps_of(best_checkpoints(run, 2)) == [200, 400]
    assert steps_of(best_checkpoints(run, 2, "bleu")) == [300, 400]


def test_of_equally_good_checkpoints_the_later_is_better(tmp_path):
    run = write_run(tmp_path / "out", [1.0, 2.0, 1.0, 1.0])
    assert steps_of(best_checkpoints(run, 2)) == [300, 400]


def test_best_checkpoints_names_the_metrics_there_are(tmp_path):
    run = write_run(tmp_path / "out", [1.0, 2.0])
    with pytest.raises(
        ValueError, match="`metric` must be one that the run has logged, eval_loss, eval_runtime; got eval_bleu"
    ):
        best_checkpoints(run, 1, "bleu")
    state = run / "checkpoint-200" / "trainer_state.json"
    state.write_text(json.dumps({"log_history": [{"step": 100, "loss": 1.0}]}))
    with pytest.raises(ValueError, match="not evaluated on its way.* --eval_steps equal to --save_steps"):
        best_checkpoints(run, 1)


@pytest.mark.parametrize(
    ("state", "message"),
    [("[]", "trainer_state.json must hold a JSON object, got list"), ("{}", "the run was not evaluated on its way")],
)
def test_a_state_of_another_kind_has_no_best(tmp_path, state, message):
    run = write_run(tmp_path, [1.0, 2.0])
    (run / "checkpoint-200" / "trainer_state.json").write_text(state)
    with pytest.raises(ValueError, match=message):
        best_checkpoints(run, 1)


def test_checkpoints_without_a_value_are_not_counted(tmp_path):
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


def test_best_checkpoints_of_a_real_run_are_those_of_the_trainer(tmp_path):
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


def cut_off_before_the_state(folder):
    (folder / "trainer_state.json").unlink()


def cut_off_in_the_state(folder):
    state = folder / "trainer_state.json"
    state.write_text(state.read_text()[:100])


def lose_optimizer(folder):
    (folder / "optimizer.pt").unlink()


def lose_schedule(folder):
    (folder / "scheduler.pt").unlink()


def cut_off_weights(folder):
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 4)


def cut_off_optimizer(folder):
    os.truncate(folder / "optimizer.pt", (folder / "optimizer.pt").stat().st_size - 30)


def cut_off_random_state(folder):
    os.truncate(folder / "rng_state.pth", (folder / "rng_state.pth").stat().st_size - 30)


def another_kind_of_state(text):
    return lambda folder: (folder / "trainer_state.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "trouble"),
    [
        (cut_off_before_the_state, "no readable trainer_state.json"),
        (cut_off_in_the_state, "no readable trainer_state.json"),
        (lose_optimizer, "no state of the optimizer"),
        (lose_schedule, "no scheduler.pt"),
        (cut_off_weights, "a cut-off or broken model.safetensors"),
        (cut_off_optimizer, "a cut-off or broken optimizer.pt"),
        (cut_off_random_state, "a cut-off or broken rng_state.pth"),
        *((another_kind_of_state(text), trouble) for text, trouble in ODD_STATES.items()),
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
def test_a_run_is_resumed_from_the_last_complete_checkpoint(tmp_path, monkeypatch, damage, trouble):
    train_with_checkpoints(tmp_path)
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    warnings = []
    monkeypatch.setattr("hf_vanilla.training.checkpoints.logger.warning", warnings.append)
    damage(tmp_path / "checkpoint-4")
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")
    (warning,) = warnings
    assert "checkpoint-4: no run can be resumed from it" in warning
    assert warning.endswith(f"because it has {trouble}.")
    with pytest.raises(ValueError, match=f"`resume_from_checkpoint` .*checkpoint-4. .* has {trouble}; name"):
        checkpoint_to_resume(tmp_path, str(tmp_path / "checkpoint-4"))
    assert checkpoint_to_resume(tmp_path, str(tmp_path / "checkpoint-2")) == str(tmp_path / "checkpoint-2")
    assert checkpoint_to_resume(tmp_path) == str(tmp_path / "checkpoint-3")
    with pytest.raises(ValueError, match="must name the folder of a checkpoint, but nowhere is none"):
        checkpoint_to_resume(tmp_path, "nowhere")


def test_a_run_without_its_optimizer_is_not_resumed(tmp_path):
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
def test_checkpoints_without_safetensors_weights_can_be_resumed(tmp_path, names):
    checkpoint = tmp_path / "checkpoint-7"
    for name in (*names, "trainer_state.json"):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text('{"global_step": 7}')
    for name in {"optimizer.pt", "scheduler.pt", "adapter_model.safetensors"} & set(names):
        save = save_file if name.endswith("safetensors") else torch.save
        save({"weight": torch.ones(3)}, checkpoint / name)
    assert last_complete_checkpoint(tmp_path) == str(checkpoint)


def test_without_checkpoints_there_is_none_to_resume_from(tmp_path):
    (tmp_path / "checkpoint-final").mkdir()
    assert last_complete_checkpoint(tmp_path) is None
    assert last_complete_checkpoint(tmp_path / "nowhere") is None


# The script


@pytest.fixture
def run_script(monkeypatch, capsys):
    """Run the script as `python scripts/average_checkpoints.py ...` does; return status, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return ending.value.code, *capsys.readouterr()

    return run


def weights_in(folder):
    return (folder / WEIGHTS).read_bytes()


def test_script_averages_the_last(tmp_path, run_script):
    run = write_run(tmp_path / "out", [1.0, 2.0, 3.0])
    status, output, _ = run_script("--run_dir", run, "--last", 2, "--output_dir", tmp_path / "averaged")
    assert status == 0
    average_checkpoints(last_checkpoints(run, 2), tmp_path / "expected")
    assert weights_in(tmp_path / "averaged") == weights_in(tmp_path / "expected")
    assert "checkpoint-200" in output
    assert "checkpoint-100" not in output


def test_script_averages_the_best_and_given_ones(tmp_path, run_script):
    run = write_run(tmp_path / "out", [1.0, 4.0, 3.0, 2.0], metric="eval_bleu")
    given = [run / "checkpoint-200", run / "checkpoint-300"]
    best = ("--run_dir", run, "--best", 2, "--metric", "bleu", "--output_dir", tmp_path / "best")
    assert run_script(*best)[0] == 0
    assert run_script("--checkpoints", *given, "--output_dir", tmp_path / "given")[0] == 0
    assert weights_in(tmp_path / "best") == weights_in(tmp_path / "given") != weights_in(given[0])
    assert run_script("--checkpoints", given[0], "--output_dir", tmp_path / "given", "--overwrite")[0] == 0
    assert weights_in(tmp_path / "given") == weights_in(given[0])
    assert run_script("--run_dir", run, "--best", 2, "--metric", "bleu")[0] == 0
    assert weights_in(run / "averaged-best-2") == weights_in(tmp_path / "best")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--output_dir", "x"], 2, "Say which checkpoints with one of --last, --best and --checkpoints; got none."),
        (["--output_dir", "x", "--last", "2"], 2, "--last and --best need --run_dir"),
        (["--output_dir", "x", "--checkpoints", "a", "--run_dir", "y"], 2, "--checkpoints stands without it"),
        (["--output_dir", "x", "--last", "2", "--best", "3"], 2, "got --last and --best."),
        (["--output_dir", "x", "--last", "2", "--run_dir", "nowhere"], 1, "error: `run_dir` (nowhere) is no folder."),
        (["--output_dir", "x", "--last", "0", "--run_dir", "."], 1, "error: `count` must be at least 1, got 0."),
        (["--output_dir", "x", "--last", "2", "--run_dir", "y", "--metric", "z"], 2, "--metric is for --best"),
        (["--checkpoints", "a", "b"], 2, "--checkpoints needs --output_dir"),
        (["--output_dir", "x", "--las", "2", "--run_dir", "y"], 2, "unknown option --las; did you mean --last?"),
    ],
)
def test_script_says_what_is_wrong(run_script, arguments, status, message):
    actual, _, errors = run_script(*arguments)
    assert actual == status
    assert message in errors


def test_script_explains_itself(run_script):
    status, output, _ = run_script("--help")
    assert status == 0
    assert "python scripts/average_checkpoints.py --run_dir out --last 5 --output_dir averaged" in output
    assert "None" not in output


def test_script_reads_its_options_from_a_file(tmp_path, run_script):
    run = write_run(tmp_path / "out", [1.0, 2.0, 3.0])
    options = {"run_dir": str(run), "last": 1, "output_dir": str(tmp_path / "averaged")}
    (tmp_path / "options.json").write_text(json.dumps(options))
    assert run_script(tmp_path / "options.json")[0] == 0
    assert weights_in(tmp_path / "averaged") == weights_in(run / "checkpoint-300")


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        (),
        ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"),
    ],
    ids=["python", "torchrun", "accelerate"],
)
def test_script_runs_under_launchers(tmp_path, launcher):
    run = write_run(tmp_path / "out", [1.0, 2.0, 3.0])
    arguments = ("--run_dir", run, "--last", 2, "--output_dir", tmp_path / "averaged")
    command = [sys.executable, *launcher, str(SCRIPT), *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("Written to") == 1
    assert (tmp_path / "averaged" / WEIGHTS).is_file()
