"""A hostile checkpoint or row does nothing: none of its code runs, no request is made, no message is forged."""

import contextlib
import json
import pickle
import socket

import pytest
import torch
from datasets import Dataset
from transformers import AutoModel, AutoModelForMaskedLM, Trainer, TrainingArguments, pipeline

from hf_vanilla import VanillaBertConfig, VanillaBertForMaskedLM
from hf_vanilla.data.labelled import infer_labels, load_rows
from hf_vanilla.data.parallel import load_parallel_dataset
from hf_vanilla.data.question_answering import load_questions
from hf_vanilla.data.token_classification import check_tagged_words, tokenize_tagged_words
from hf_vanilla.hub.folder import check_folder, check_model


SIZES = dict(vocab_size=13, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20)
ROWS = [{"input_ids": [2, 5, 6, 3], "labels": [-100, 6, -100, -100]}] * 8


class Canary:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def folder(tmp_path):
    VanillaBertForMaskedLM(VanillaBertConfig(**SIZES)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def no_network(monkeypatch):
    """Fail every attempt to look up or reach another machine, and return the list of attempts."""
    asked = []

    def refuse(*arguments, **options):
        asked.append(arguments)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return asked


def write_canary(path, canary):
    with path.open("wb") as file:
        pickle.dump(Canary(canary), file, protocol=2)


@pytest.mark.promise("pickle")
@pytest.mark.parametrize("with_zip", [False, True], ids=["pickle", "torch"])
def test_pickled_weights_are_not_run(folder, tmp_path, with_zip):
    canary = tmp_path / "canary"
    (folder / "model.safetensors").unlink()
    if with_zip:
        torch.save({"weight": Canary(canary)}, folder / "pytorch_model.bin")
    else:
        write_canary(folder / "pytorch_model.bin", canary)
    with pytest.raises((OSError, ValueError, pickle.UnpicklingError)):
        AutoModelForMaskedLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="does not load"):
        check_model(folder)
    assert not canary.exists()


@pytest.mark.promise("pickle")
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_pickle_in_a_training_state_is_not_run(tmp_path, name):
    canary = tmp_path / "canary"
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=2, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    Trainer(VanillaBertForMaskedLM(VanillaBertConfig(**SIZES)), args, train_dataset=ROWS).train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    torch.save({"state": Canary(canary)}, checkpoint / name)
    trainer = Trainer(VanillaBertForMaskedLM(VanillaBertConfig(**SIZES)), args, train_dataset=ROWS)
    if name == "training_args.bin":  # never read
        trainer.train(resume_from_checkpoint=str(checkpoint))
    else:
        with pytest.raises((ValueError, RuntimeError, pickle.UnpicklingError)):
            trainer.train(resume_from_checkpoint=str(checkpoint))
    assert not canary.exists()


@pytest.mark.promise("config that names code")
@pytest.mark.parametrize(
    "evil",
    [
        {"_attn_implementation_internal": "evil/kernel"},
        {"attn_implementation": "evil/kernel"},
        {"auto_map": {"AutoConfig": "evil/repo--configuration.Evil", "AutoModel": "evil/repo--modeling.Evil"}},
        {"trust_remote_code": True, "auto_map": {"AutoModel": "evil/repo--modeling.Evil"}},
        {"custom_pipelines": {"fill-mask": {"impl": "evil.Pipeline", "pt": ["AutoModel"]}}},
        {"quantization_config": {"quant_method": "evil"}},
        {"__class__": "evil.Config", "_commit_hash": "../../evil"},
    ],
    ids=lambda evil: "-".join(evil),
)
def test_hostile_config_makes_no_request_and_runs_nothing(folder, tmp_path, no_network, evil):
    canary = tmp_path / "canary"
    for name in ("evil.py", "modeling.py", "configuration.py", "modeling_vanilla_bert.py"):
        (folder / name).write_text(f"open({str(canary)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **evil}))
    try:
        model = AutoModel.from_pretrained(folder)
    except (ValueError, ImportError, TypeError):  # refused
        model = None
    assert no_network == []
    assert not canary.exists()
    if model is not None:
        assert model.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.promise("config that names code")
@pytest.mark.parametrize("trust", [False, True], ids=["not trusted", "trusted"])
def test_hostile_pipeline_runs_only_if_trusted(folder, tmp_path, no_network, trust):
    canary = tmp_path / "canary"
    (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(canary)!r}).touch()\nclass Pipeline: ...\n")
    config = json.loads((folder / "config.json").read_text())
    offered = {"fill-mask": {"impl": "evil.Pipeline", "pt": ["AutoModelForMaskedLM"]}}
    (folder / "config.json").write_text(json.dumps({**config, "custom_pipelines": offered}))
    with contextlib.suppress(ValueError, TypeError, OSError, AttributeError):  # refused, or not a pipeline
        pipeline("fill-mask", model=str(folder), trust_remote_code=trust, device=-1)
    assert no_network == []
    assert canary.exists() == trust  # trusted code does run


@pytest.mark.promise("config that names code")
def test_check_of_a_hostile_folder_runs_nothing(folder, tmp_path, no_network):
    canary = tmp_path / "canary"
    (folder / "modeling.py").write_text(f"from pathlib import Path\nPath({str(canary)!r}).touch()\n")
    config = json.loads((folder / "config.json").read_text())
    evil = {"auto_map": {"AutoModel": "modeling.Evil", "AutoModelForMaskedLM": "modeling.Evil"}}
    (folder / "config.json").write_text(json.dumps({**config, **evil}))
    with contextlib.suppress(ValueError):
        check_folder(folder)
    assert no_network == []
    assert not canary.exists()


# Clears the screen, forges a line of the log, and is very long.
FORGED = "\x1b[2J\x1b[1m\r\n\u2028error: all is well\x07" + "x" * 9000


def read_question(path, **changed):
    question = {"id": "1", "question": "who?", "context": "a dog", "answers": {"text": ["a"], "answer_start": [0]}}
    rows = [{**question, "id": FORGED, **changed}] * 2
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    load_questions(path)


def read_rows(path, *values):
    path.write_text("".join(json.dumps({"label": value}) + "\n" for value in values))
    return load_rows(path, ["label"])


def read_pairs(path):
    path.write_text(json.dumps({"source": "a", "target": FORGED + "\ud800"}))
    load_parallel_dataset(data_files={"train": str(path)})


def tagged(words, tags):
    rows = Dataset.from_dict({"words": [words], "tags": [tags]})
    check_tagged_words(rows, "words", "tags", "rows")
    tokenize_tagged_words(rows, None, ["O", FORGED], tokens_column="words", tags_column="tags", max_length=9)


@pytest.mark.promise("hostile text")
@pytest.mark.parametrize(
    "read",
    [
        lambda path: read_question(path),
        lambda path: read_question(path, answers=FORGED),
        lambda path: read_question(path, answers={"text": [FORGED], "answer_start": [0]}),
        lambda path: read_question(path, answers={"text": ["a dog"], "answer_start": [FORGED]}),
        lambda path: read_question(path, context=FORGED),
        lambda path: read_rows(path, 1, FORGED),
        lambda path: read_rows(path, [1], {FORGED: 1}),
        lambda path: infer_labels(read_rows(path, FORGED, FORGED)["label"]),
        lambda path: infer_labels(read_rows(path, FORGED, "b")["label"]).encode(["c"], "rows"),
        lambda path: infer_labels(["a", "b"]).encode([FORGED], "rows"),
        lambda path: infer_labels(["a", "b"]).encode([[FORGED]], "rows"),
        lambda path: infer_labels(["1", FORGED], regression=True),
        read_pairs,
        lambda path: tagged(["a"], [FORGED * 2]),
        lambda path: tagged(FORGED, ["O"]),
    ],
)
def test_hostile_row_forges_no_message(tmp_path, read):
    with pytest.raises((ValueError, TypeError)) as error:
        read(tmp_path / "rows.jsonl")
    message = str(error.value)
    assert message.isprintable()
    assert len(message) < 1500
