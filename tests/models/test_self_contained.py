"""A checkpoint carries its code: it loads, trains and is saved again where the package is not installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tiny_berts import CHOICES, MASKED_LABELS, NO_DROPOUT, SIZES, TEXT
from tiny_gpts import CHOICES as GPT_CHOICES
from tiny_gpts import TASKS as GPT_TASKS
from tiny_gpts import TEXT as GPT_TEXT
from tiny_gpts import tiny_gpt
from tiny_models import BATCH, SOURCE, SOURCE_MASK, TARGET, tiny_model
from tiny_vits import IMAGES, tiny_vit
from transformers import AutoModel, AutoModelForMaskedLM, Trainer, TrainingArguments

import hf_vanilla
from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForMaskedLM,
    VanillaBertForPreTraining,
    VanillaBertForQuestionAnswering,
)


HERE = Path(__file__).parent
BERT_CODE = {
    "answering.py",
    "cache_names.py",
    "checks.py",
    "chunked_loss.py",
    "configuration_vanilla_bert.py",
    "conversion_vanilla_bert.py",
    "dropout.py",
    "layers.py",
    "loss.py",
    "modeling_vanilla_bert.py",
    "packing.py",
    "pipeline_vanilla_bert.py",
    "read_positions.py",
    "self_contained.py",
    "sequences.py",
    "varlen_attention.py",
}


def tiny_bert():
    torch.manual_seed(1)
    return VanillaBertForPreTraining(VanillaBertConfig(**SIZES, **NO_DROPOUT)).eval()


# How to build a model; inputs of single Auto classes; those of all others; an Auto class to train, and its batch.
FAMILIES = {
    "bert": (
        tiny_bert,
        {"AutoModelForMultipleChoice": CHOICES},
        TEXT,
        ("AutoModelForMaskedLM", {**TEXT, "labels": MASKED_LABELS}),
    ),
    "gpt": (
        lambda: tiny_gpt(**NO_DROPOUT),
        {"AutoModelForMultipleChoice": GPT_CHOICES},
        GPT_TEXT,
        ("AutoModelForCausalLM", GPT_TASKS["text"][2]),
    ),
    "transformer": (
        tiny_model,
        {},
        {"input_ids": SOURCE, "attention_mask": SOURCE_MASK, "decoder_input_ids": TARGET},
        ("AutoModelForSeq2SeqLM", BATCH),
    ),
    "vit": (
        tiny_vit,
        {},
        {"pixel_values": IMAGES},
        ("AutoModelForImageClassification", {"pixel_values": IMAGES, "labels": torch.tensor([4, 1])}),
    ),
}


def load_here(folder, names, inputs):
    """Compute the output of each Auto class with the package installed."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        model = getattr(transformers, name).from_pretrained(folder)
        with torch.no_grad():
            found[name] = model(**inputs[name]).to_tuple()[0]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_auto_class_works_without_the_package(family, tmp_path):
    make, special_inputs, inputs, (trained, batch) = FAMILIES[family]
    folder = tmp_path / "checkpoint"
    make().save_pretrained(folder)
    assert len(list(folder.glob("*.py"))) <= 17  # a reader of a checkpoint's code can still survey these
    names = [name for name in json.loads((folder / "config.json").read_text())["auto_map"] if name != "AutoConfig"]
    of_each = {name: special_inputs.get(name, inputs) for name in names}
    torch.save({"eval": of_each, "trained": trained, "train": batch}, tmp_path / "inputs.pt")
    expected = load_here(folder, names, of_each)
    command = [sys.executable, HERE / "load_without_package.py", folder]
    command += [tmp_path / "again", tmp_path / "inputs.pt", tmp_path / "outputs.pt"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    outputs = torch.load(tmp_path / "outputs.pt")
    assert outputs["first"].keys() == expected.keys()
    for name, (class_name, tensor) in outputs["first"].items():
        assert class_name == json.loads((tmp_path / "again/config.json").read_text())["auto_map"][name].split(".")[1]
        assert torch.equal(tensor, expected[name]), name
    # The model that was trained and saved there loads here too.
    again = load_here(tmp_path / "again", [trained], of_each)[trained]
    assert torch.equal(outputs["second"][trained][1], again)
    assert not torch.equal(again, expected[trained])


def test_every_head_is_saved_with_all_code_and_auto_classes(tmp_path):
    torch.manual_seed(0)
    VanillaBertForMaskedLM(VanillaBertConfig(**SIZES)).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == BERT_CODE
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map.pop("AutoConfig") == "configuration_vanilla_bert.VanillaBertConfig"
    assert len(auto_map) == 9
    for name, place in auto_map.items():
        module, class_name = place.split(".")
        assert module == "modeling_vanilla_bert"
        assert type(getattr(transformers, name).from_config(VanillaBertConfig(**SIZES))).__name__ == class_name


def test_trainer_checkpoint_has_all_code_and_auto_classes(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
    rows = [{"input_ids": [2, 5, 3], "labels": [-100, 6, -100]}] * 4
    Trainer(VanillaBertForMaskedLM(VanillaBertConfig(**SIZES)), args, train_dataset=rows).train()
    assert BERT_CODE.issubset(path.name for path in (tmp_path / "checkpoint-1").iterdir())
    assert "AutoModelForMultipleChoice" in json.loads((tmp_path / "checkpoint-1/config.json").read_text())["auto_map"]


def pipelines_of(folder):
    return json.loads((folder / "config.json").read_text()).get("custom_pipelines")


def test_pipeline_is_saved_with_its_head_only(tmp_path):
    reader = {
        "question-answering": {
            "impl": "pipeline_vanilla_bert.QuestionAnsweringPipeline",
            "pt": ["AutoModelForQuestionAnswering"],
        }
    }
    translator = {
        "translation": {"impl": "pipeline_vanilla_transformer.TranslationPipeline", "pt": ["AutoModelForSeq2SeqLM"]}
    }
    mine = {"rhyming": {"impl": "rhymes.RhymingPipeline", "pt": ["AutoModel"]}}
    config = VanillaBertConfig(**SIZES)
    config.custom_pipelines = mine
    VanillaBertForMaskedLM(config).save_pretrained(tmp_path / "masked")
    VanillaBertForQuestionAnswering.from_pretrained(tmp_path / "masked").save_pretrained(tmp_path / "reader")
    VanillaBertForMaskedLM.from_pretrained(tmp_path / "reader").save_pretrained(tmp_path / "masked_again")
    names = ("masked", "reader", "masked_again")
    assert [pipelines_of(tmp_path / name) for name in names] == [mine, mine | reader, mine]
    model = tiny_model()
    model.save_pretrained(tmp_path / "translator")
    model.model.save_pretrained(tmp_path / "body")
    model.save_pretrained(tmp_path / "translator_again")
    names = ("translator", "body", "translator_again")
    assert [pipelines_of(tmp_path / name) for name in names] == [translator, None, translator]


class MyBert(VanillaBertForMaskedLM):
    """A user's own class."""


def test_subclass_is_saved_with_the_code_of_its_family(tmp_path):
    MyBert(VanillaBertConfig(**SIZES)).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == BERT_CODE
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path)) is VanillaBertForMaskedLM


@pytest.mark.parametrize("trust", [True, False, None], ids=str)
def test_installed_package_takes_precedence_over_saved_code(tmp_path, trust):
    tiny_bert().save_pretrained(tmp_path / "model")
    canary = tmp_path / "canary"
    for path in (tmp_path / "model").glob("*.py"):
        path.write_text(f"open({str(canary)!r}, 'w')\n")
    model = AutoModel.from_pretrained(tmp_path / "model", trust_remote_code=trust)
    assert type(model) is hf_vanilla.VanillaBertModel
    assert not canary.exists()


def test_saved_code_runs_only_when_trusted(tmp_path):
    tiny_bert().save_pretrained(tmp_path / "model")
    canary = tmp_path / "canary"
    for path in (tmp_path / "model").glob("*.py"):
        path.write_text(f"open({str(canary)!r}, 'w')\n")
    program = (
        "import sys; sys.modules['hf_vanilla'] = None; from transformers import AutoModel; "
        f"AutoModel.from_pretrained({str(tmp_path / 'model')!r}, trust_remote_code=False)"
    )
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode != 0
    assert "trust_remote_code=True" in finished.stderr
    assert not canary.exists()


def test_other_entries_of_auto_map_are_kept(tmp_path):
    config = VanillaBertConfig(**SIZES)
    config.auto_map = {"AutoTokenizer": "tokenization_mine.Mine", "AutoModel": "somebody/model--modeling.Model"}
    config.save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map["AutoTokenizer"] == "tokenization_mine.Mine"
    assert auto_map["AutoModel"] == "modeling_vanilla_bert.VanillaBertModel"
