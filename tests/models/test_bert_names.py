"""Checkpoints always have the parameter names of BERT's own; both kinds of names can be loaded."""

import copy
import re

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_berts import IDS, MASK, MASKED_LABELS, native_bert, tiny_bert
from transformers import Trainer, TrainingArguments
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_vanilla import VanillaBertForMaskedLM


WEIGHTS = "model.safetensors"
ROWS = [{"input_ids": IDS[row], "attention_mask": MASK[row], "labels": MASKED_LABELS[row]} for row in (0, 1, 1, 0)]
QUIET = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def assert_same(model, other):
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def old_names(folder):
    """Rewrite a checkpoint with the names of BERT's first files: gamma, beta, and a buffer of position ids."""
    state = load_file(folder / WEIGHTS)
    for new, old in (("weight", "gamma"), ("bias", "beta")):
        state = {name.replace(f"LayerNorm.{new}", f"LayerNorm.{old}"): tensor for name, tensor in state.items()}
    save_file({**state, "bert.embeddings.position_ids": torch.arange(11)[None]}, folder / WEIGHTS, {"format": "pt"})


def train(folder, resume=None, **options):
    """Train four steps with dropout, from a checkpoint or from fixed weights."""
    arguments = TrainingArguments(
        **{"output_dir": str(folder), "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, **options},
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(tiny_bert("masked-lm", seed=7), arguments, train_dataset=ROWS, eval_dataset=ROWS)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_saved_names_do_not_depend_on_the_loaded_names(tmp_path):
    model = tiny_bert("masked-lm")
    model.save_pretrained(tmp_path / "bert")
    model.save_pretrained(tmp_path / "own", save_original_format=False)
    model.save_pretrained(tmp_path / "old")
    old_names(tmp_path / "old")
    wanted = load_file(tmp_path / "bert" / WEIGHTS).keys()
    native_bert("masked-lm").save_pretrained(tmp_path / "native")
    assert wanted == load_file(tmp_path / "native" / WEIGHTS).keys()
    for kind in ("bert", "own", "old"):
        loaded, info = VanillaBertForMaskedLM.from_pretrained(tmp_path / kind, output_loading_info=True)
        assert not any(info.values()), kind
        assert_same(loaded, model)
        for each in (loaded, copy.deepcopy(loaded)):
            each.save_pretrained(tmp_path / "again")
            assert load_file(tmp_path / "again" / WEIGHTS).keys() == wanted


@QUIET
@pytest.mark.parametrize("kind", ["bert", "own", "old", "sharded"])
def test_training_resumes_bit_equal_from_either_names(kind, tmp_path):
    finished = train(tmp_path / "run").model
    checkpoint = tmp_path / "run" / "checkpoint-2"
    halfway = VanillaBertForMaskedLM.from_pretrained(checkpoint)
    if kind == "own":
        halfway.save_pretrained(checkpoint, save_original_format=False)
    elif kind == "old":
        old_names(checkpoint)
    elif kind == "sharded":
        (checkpoint / WEIGHTS).unlink()
        halfway.save_pretrained(checkpoint, max_shard_size="2KB")
        assert len(list(checkpoint.glob("model-*.safetensors"))) > 3
    assert_same(train(tmp_path / "run", resume=str(checkpoint)).model, finished)


@QUIET
def test_best_model_is_loaded_at_the_end(tmp_path):
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "greater_is_better": True}
    trainer = train(tmp_path / "run", metric_for_best_model="eval_loss", **options)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")  # the highest loss
    assert_same(trainer.model, VanillaBertForMaskedLM.from_pretrained(trainer.state.best_model_checkpoint))


@QUIET
def test_adapters_keep_parameter_names(tmp_path):
    adapted = get_peft_model(tiny_bert("masked-lm"), LoraConfig(target_modules=["qkv_proj"], r=2))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(tiny_bert("masked-lm"), tmp_path / "adapter")
    assert_same(again, adapted)
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert_same(VanillaBertForMaskedLM.from_pretrained(tmp_path / "merged"), merged)


def test_load_state_dict_accepts_bert_names_and_reports_missing_ones(tmp_path):
    model = tiny_bert("masked-lm")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / WEIGHTS)
    wrapped = torch.nn.Sequential(tiny_bert("masked-lm", seed=5))
    result = wrapped.load_state_dict({f"0.{name}": tensor for name, tensor in state.items()}, strict=False)
    assert not result.unexpected_keys
    assert_same(wrapped[0], model)
    del state["bert.encoder.layer.0.attention.self.key.weight"]
    state["bert.encoder.layer.2.attention.self.key.weight"] = torch.ones(12, 12)  # there are two layers
    result = tiny_bert("masked-lm").load_state_dict(state, strict=False)
    assert "bert.layers.0.self_attn.qkv_proj.weight" in result.missing_keys
    assert result.unexpected_keys == ["bert.layers.2.self_attn.qkv_proj.weight"]


class WithParts(VanillaBertForMaskedLM):
    """Has parameters of its own whose names look like those in files."""

    def __init__(self, config):
        super().__init__(config)
        self.attention, self.output = (torch.nn.ModuleDict({"dense": torch.nn.Linear(12, 5)}) for _ in range(2))
        self.post_init()


def test_own_names_of_a_subclass_are_not_those_of_files():
    model, other = (WithParts(tiny_bert("masked-lm").config) for _ in range(2))
    assert str(other.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    assert_same(other, model)


@pytest.mark.parametrize("older_first", [True, False])
def test_code_of_another_checkpoint_does_not_change_names(older_first, tmp_path):
    """transformers keeps one list of names for each model type; both copies of the code register theirs."""
    native_bert("masked-lm").save_pretrained(tmp_path / "gamma")
    old_names(tmp_path / "gamma")
    folders = {name: tmp_path / f"{name}_{older_first}" for name in ("newer", "older")}
    for folder in folders.values():
        tiny_bert("masked-lm").save_pretrained(folder)
    code = folders["older"] / "conversion_vanilla_bert.py"
    code.write_text(re.sub(r'\(\("gamma", "weight"\), .*\)\)', "()", code.read_text()))
    order = sorted(folders, reverse=older_first)
    place = "modeling_vanilla_bert.VanillaBertForMaskedLM"
    classes = {name: get_class_from_dynamic_module(place, str(folders[name])) for name in order}
    for model_class in (classes["newer"], VanillaBertForMaskedLM):
        _, info = model_class.from_pretrained(tmp_path / "gamma", output_loading_info=True)
        assert not any(info.values())
    _, info = classes["older"].from_pretrained(folders["older"], output_loading_info=True)
    assert not any(info.values())
