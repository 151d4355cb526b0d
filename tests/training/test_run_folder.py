"""One run at a time in a folder, and the options that a run goes on with."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from datasets import Dataset
from transformers import AutoTokenizer, Trainer, TrainingArguments

from hf_vanilla import VanillaBertConfig, VanillaBertForSequenceClassification
from hf_vanilla.tokenization import train_wordpiece_tokenizer
from hf_vanilla.training import decisive_options, hold_folder, keep_options, save_final_model


HOLD = """
import sys
from hf_vanilla.training import hold_folder
with hold_folder(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_folder_of_a_living_run_is_refused_and_that_of_a_dead_one_is_not(tmp_path):
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="`output_dir` .* is in use by another run"), hold_folder(folder):
            pass
        with hold_folder(folder, is_main_process=False):
            pass
        other.send_signal(signal.SIGKILL)
    assert folder.is_dir()
    with hold_folder(folder):
        (folder / "result").write_text("7")
    with hold_folder(folder):
        assert (folder / "result").read_text() == "7"


def test_a_folder_that_nothing_was_written_to_goes(tmp_path):
    with pytest.raises(KeyError), hold_folder(tmp_path / "run"):
        raise KeyError
    assert not (tmp_path / "run").exists()


@pytest.fixture
def options(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    return {
        "hidden_size": 16, "train_files": [str(tmp_path / "a.txt")], "model_name_or_path": str(tmp_path / "bert"),
        "tokenizer_name_or_path": "google-bert/bert-base-uncased", "validation_file": None, "logging_steps": 5,
        "phase_lengths": (16, 32),
    }  # fmt: skip


def kept(folder, options, checkpoint=None):
    keep_options(folder, decisive_options(options), checkpoint)


def test_a_run_goes_on_with_its_own_options_alone(tmp_path, options):
    run = tmp_path / "run"
    kept(run, options)
    kept(run, {**options, "hidden_size": 24})  # nothing has come of the first
    kept(run, options)
    (run / "config.json").write_text("{}")
    (tmp_path / "b.txt").write_text("text")
    kept(run, {**options, "logging_steps": 6, "train_files": [tmp_path / "b.txt"], "of_a_later_version": 1})
    with pytest.raises(
        ValueError, match=r"`hidden_size` is 24, not the 16 that the run in .*run was started with\. G"
    ):
        kept(run, {**options, "hidden_size": 24})
    (tmp_path / "b.txt").write_text("TEXT")
    with pytest.raises(ValueError, match=r"`hidden_size` is 24, .* with \(and so train_files\)\. Give the same"):
        kept(run, {**options, "hidden_size": 24, "train_files": [tmp_path / "b.txt"]})
    (tmp_path / "bert" / "config.json").write_text('{"hidden_size": 7}')
    with pytest.raises(ValueError, match="`model_name_or_path` has other contents than those that the run in"):
        kept(run, options)
    with pytest.raises(ValueError, match="`model_name_or_path` has other contents"):
        kept(tmp_path / "elsewhere", options, run / "checkpoint-4")
    assert not (tmp_path / "elsewhere").exists()


def trainer(folder, weight):
    config = VanillaBertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=4, intermediate_size=12
    )
    model = VanillaBertForSequenceClassification(config)
    torch.nn.init.constant_(model.classifier.weight, weight)
    tokenizer = train_wordpiece_tokenizer(["a b c d"] * 9, 9, show_progress=False)
    rows = Dataset.from_dict({"input_ids": [[2, 5, 3]], "labels": [0]})
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])
    return Trainer(model, args, train_dataset=rows, processing_class=tokenizer)


def test_a_full_disk_leaves_the_model_that_was_there(tmp_path, monkeypatch):
    save_final_model(trainer(tmp_path, 1.0))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= before.keys()

    def write_half(tensors, filename, **kwargs):
        with open(filename, "wb") as file:
            file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", write_half)
        patch.setattr("transformers.modeling_utils.safe_save_file", write_half)
        with pytest.raises(OSError, match="No space left"):
            save_final_model(trainer(tmp_path, 2.0))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"old")
    save_final_model(trainer(tmp_path, 2.0))
    assert {path.name for path in tmp_path.iterdir()} == before.keys()
    loaded = VanillaBertForSequenceClassification.from_pretrained(tmp_path)
    assert (loaded.classifier.weight == 2.0).all()
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == json.loads(before["config.json"])["vocab_size"] == 9
