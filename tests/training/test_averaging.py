"""The mean of checkpoints, and that a bad request changes nothing on disk."""

import json
import os

import pytest
import torch
from checkpoint_folders import WEIGHTS, steps_of, write_checkpoint, write_run
from safetensors.torch import load_file
from tiny_translation import tiny_model, tiny_pairs, tiny_tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla.training import VanillaTrainer, VanillaTrainingArguments, average_checkpoints, last_checkpoints


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


def test_mean_of_bfloat16_weights_is_computed_in_higher_precision(tmp_path):
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


def test_average_has_the_shards_of_the_last_checkpoint(tmp_path):
    written = [write_checkpoint(tmp_path / str(shards), seed=shards, num_shards=shards) for shards in (1, 3, 2)]
    folder = average_checkpoints([tmp_path / str(shards) for shards in (1, 3, 2)], tmp_path / "averaged")
    index = json.loads((folder / f"{WEIGHTS}.index.json").read_text())
    assert index == json.loads((tmp_path / "2" / f"{WEIGHTS}.index.json").read_text())
    assert not (folder / WEIGHTS).exists()
    for name, file in index["weight_map"].items():
        mean = torch.stack([tensors[name].to(torch.float64) for tensors in written]).mean(dim=0)
        assert torch.equal(load_file(folder / file)[name].to(torch.float64), mean.to(torch.float32).to(torch.float64))


def test_other_files_come_from_the_last_checkpoint_without_training_state(tmp_path):
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


def test_average_of_a_run_loads_and_is_tied(tmp_path):
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
    content = bytearray((folders[1] / WEIGHTS).read_bytes())
    content[-3] ^= 4
    (folders[1] / WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint-3 has a broken model.safetensors: its bytes have changed"):
        average_checkpoints(folders, tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


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


def cause_broken_index(folder):
    write_checkpoint(folder / "c", num_shards=2)
    (folder / "c" / f"{WEIGHTS}.index.json").write_text("{}")
    return [folder / "c"]


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (cause_none, "`checkpoints` must name at least one folder, got none"),
        (cause_missing, "must be folders, but there is no folder .*nowhere"),
        (cause_twice, "`checkpoints` must differ, but .*a is given 2 times"),
        (cause_pickle, r"has no model.safetensors; load its pytorch_model.bin with `from_pretrained` and save it"),
        (cause_no_weights, r"c has no model.safetensors; give folders that `save_pretrained` wrote"),
        (cause_broken_weights, r"b.model.safetensors can't be read"),
        (cause_other_config, r"`d_model` is 8 in .*a and 4 in .*b \(2 differences: d_model, heads\)"),
        (cause_no_config, r"a.config.json can't be read"),
        (cause_other_names, "must have the same tensors, but 2 are only in one of .*: bias, projection"),
        (cause_other_shape, r"`projection` is F32 \[3, 6\] in .*c and F32 \[3, 4\] in .*a"),
        (cause_other_dtype, r"`embedding` is F16 \[5, 4\] in .*c and F32 \[5, 4\] in .*a"),
        (
            cause_other_integers,
            "equal integer tensors, but `position_ids` .torch.int64. differs between .*a and .*c",
        ),
        (cause_nan, "`projection` is nan or infinite in .*c; leave that one out"),
        (cause_broken_index, "c.model.safetensors.index.json must have a `weight_map`; save the model again"),
        (cause_incomplete_index, "the index of .*c lists `ghost`, which is in none of its files"),
    ],
    ids=lambda value: value.__name__.removeprefix("cause_") if callable(value) else "",
)
def test_bad_checkpoints_raise_and_nothing_is_written(tmp_path, cause, message):
    write_checkpoint(tmp_path / "a", seed=1)
    write_checkpoint(tmp_path / "b", seed=2)
    checkpoints = cause(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match=message):
        average_checkpoints(checkpoints, tmp_path / "averaged")
    assert sorted(os.listdir(tmp_path)) == before


def test_single_folder_raises(tmp_path):
    with pytest.raises(TypeError, match=r"`checkpoints` must be a list of folders, got one folder \(out\); put it in"):
        average_checkpoints("out", tmp_path / "averaged")


def test_output_is_replaced_only_with_overwrite(tmp_path):
    for seed in (1, 2):
        written = write_checkpoint(tmp_path / str(seed), seed=seed)
    (tmp_path / "averaged").mkdir()
    average_checkpoints([tmp_path / "1"], tmp_path / "averaged")  # an empty folder may be written to
    (tmp_path / "averaged" / "note").write_text("of the old model")
    with pytest.raises(
        ValueError, match=r"`output_dir` \(.*averaged\) must be empty; give another folder, or `overwrite` to"
    ):
        average_checkpoints([tmp_path / "2"], tmp_path / "averaged")
    assert (tmp_path / "averaged" / "note").read_text() == "of the old model"
    average_checkpoints([tmp_path / "2"], tmp_path / "averaged", overwrite=True)
    assert torch.equal(load_file(tmp_path / "averaged" / WEIGHTS)["embedding"], written["embedding"])
    assert sorted(os.listdir(tmp_path / "averaged")) == ["config.json", WEIGHTS]
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "averaged"]


@pytest.mark.parametrize("exists", [True, False])
def test_output_follows_a_link(tmp_path, exists):
    run = write_run(tmp_path / "out", [1.0, 3.0])
    if exists:
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    average_checkpoints(last_checkpoints(run, 2), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / WEIGHTS).is_file()
    assert len(list(tmp_path.iterdir())) == 3


def test_output_must_be_another_folder(tmp_path):
    write_checkpoint(tmp_path / "a")
    with pytest.raises(ValueError, match=r"`output_dir` \(.*a\) must not be one of `checkpoints` or contain one"):
        average_checkpoints([tmp_path / "a"], tmp_path / "a", overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"`output_dir` \(.*file\) must be a folder, but it is a file"):
        average_checkpoints([tmp_path / "a"], tmp_path / "file", overwrite=True)
    with pytest.raises(
        ValueError, match=r"`output_dir` \(.*averaged\) can't be written: (Not a directory|File exists)"
    ):
        average_checkpoints([tmp_path / "a"], tmp_path / "file" / "averaged")


@pytest.mark.parametrize("levels", [1, 2], ids=["run folder", "folder of runs"])
def test_output_never_replaces_its_own_run(tmp_path, levels):
    run = write_run(tmp_path / "runs" / "out", [1.0, 2.0])
    target = run if levels == 1 else run.parent
    (target / "config.json").write_text("{}")  # a finished run, whose folder has the model too
    with pytest.raises(
        ValueError,
        match=r"`output_dir` .* or contain one, but it is or contains .*checkpoint-100; give another",
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


def test_output_replaces_only_a_model(tmp_path):
    write_checkpoint(tmp_path / "a")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("mine")
    with pytest.raises(
        ValueError, match=r"thesis\) must contain a model to be overwritten, but it has no config.json; give"
    ):
        average_checkpoints([tmp_path / "a"], tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "chapter").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["a", "thesis"]


def test_failed_write_keeps_the_old_output(tmp_path, monkeypatch):
    for seed in (1, 2):
        write_checkpoint(tmp_path / str(seed), seed=seed)
    average_checkpoints([tmp_path / "1"], tmp_path / "averaged")
    before = (tmp_path / "averaged" / WEIGHTS).read_bytes()

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("shutil.copy2", fail)
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

    monkeypatch.setattr("os.replace", fail_at_the_second_call)
    with pytest.raises(OSError, match="Disk quota exceeded"):
        average_checkpoints([tmp_path / "2"], tmp_path / "averaged", overwrite=True)
    assert (tmp_path / "averaged" / WEIGHTS).read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "averaged"]
