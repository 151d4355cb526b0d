"""Searches that replay captured steps, with a tape of operations in place of a CUDA graph, against plain searches."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from searching import assert_same, search
from tiny_translator import PAD, sources, trained_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_vanilla.generation import StepGraphs, step_graphs


sys.path.append(str(Path(__file__).parents[1] / "models"))

from tiny_gpts import tiny_gpt


class Recorder(TorchDispatchMode):
    """Records operations, and refuses what a CUDA graph can't hold: questions of values, and values of Python."""

    refused = {"item", "is_nonzero", "_local_scalar_dense", "nonzero", "masked_select", "lift_fresh"}

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.refused:
            raise AssertionError(f"a graph can't hold {name}")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class Tape:
    """Runs recorded operations again, on the memory that they had: what a CUDA graph does, without a GPU."""

    made, replays = 0, 0

    def __init__(self, prepare, step, device, place):
        prepare()
        step()
        prepare()
        self.calls = []
        with Recorder(self.calls):
            step()
        Tape.made += 1

    check = new_place = staticmethod(lambda *args: None)

    @torch.inference_mode()
    def run(self):
        Tape.replays += 1
        for func, args, kwargs, recorded in self.calls:
            result = func(*args, **kwargs)
            for new, old in zip(tree_leaves(result), tree_leaves(recorded), strict=True):
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


@pytest.fixture(autouse=True)
def tape(monkeypatch):
    monkeypatch.setattr(step_graphs, "CapturedStep", Tape)
    monkeypatch.setattr("hf_vanilla.models.checks.reads_values", lambda tensor: False)  # as on a GPU
    Tape.made = Tape.replays = 0
    return Tape


OPTIONS = {
    "sentences leave": {},
    "one beam": {"num_beams": 1},
    "n-best": {"num_return_sequences": 3},
    "none leaves": {"eos_token_id": None, "suppress_tokens": [PAD]},
    "processors": {"no_repeat_ngram_size": 2},
    "scores": {"output_scores": True},
    "length of the source": {"max_length_offset": 2, "length_penalty_type": "gnmt"},
}
CONFIGS = {
    "sinusoidal": {},
    "learned, pre-norm": {"position_type": "learned", "max_position_embeddings": 21, "norm_position": "pre"},
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_search_with_graphs_finds_the_same(config, attention, tape):
    model = trained_model(**config)
    model.set_attn_implementation(attention)
    graphs = StepGraphs()
    for batch in (9, 13, 2, 9):  # other sizes, and sizes that are known
        torch.manual_seed(batch)
        inputs = sources(batch)
        for options in OPTIONS.values():
            options = {"num_beams": 4, "max_new_tokens": 20, **options}
            assert_same(search(model, inputs, step_graphs=graphs, **options), search(model, inputs, **options))
        unmasked = {"input_ids": inputs["input_ids"].clamp(min=3)}
        options = {"num_beams": 4, "max_new_tokens": 20}
        assert_same(search(model, unmasked, step_graphs=graphs, **options), search(model, unmasked, **options))
    assert tape.made == len(graphs) < 20 < 200 < tape.replays


@pytest.mark.parametrize("num_beams", [1, 4])
def test_decoder_only_models_have_graphs_too(num_beams, tape):
    torch.manual_seed(1)
    model = tiny_gpt(vocab_size=23, max_position_embeddings=40, pad_token_id=1, eos_token_id=[2, 4])
    ids = torch.randint(5, 23, (9, 7))
    is_token = torch.arange(7) >= torch.arange(9)[:, None] % 7
    inputs = {"input_ids": ids.masked_fill(~is_token, 1), "attention_mask": is_token.long()}
    graphs, options = StepGraphs(), {"num_beams": num_beams, "max_new_tokens": 25}
    for _ in range(2):
        assert_same(search(model, inputs, step_graphs=graphs, **options), search(model, inputs, **options))
    assert 0 < tape.made == len(graphs) < 10 < 40 < tape.replays


def test_other_weights_are_captured_again(tape):
    model, inputs, graphs = trained_model(), sources(), StepGraphs()
    options = {"num_beams": 4, "max_new_tokens": 12}
    search(model, inputs, step_graphs=graphs, **options)
    made = tape.made
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)  # the graphs read it where it is
    assert_same(search(model, inputs, step_graphs=graphs, **options), search(model, inputs, **options))
    assert tape.made == made
    other = copy.deepcopy(model)
    other.model.decoder.layers[0].feed_forward.fc1.weight.data = torch.randn(24, 16)
    assert_same(search(other, inputs, step_graphs=graphs, **options), search(other, inputs, **options))
    assert tape.made > made
    assert len(graphs) == tape.made - made


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT uses an earlier name
def test_switched_adapters_are_captured_again(tape):
    targets = ["qkv_proj", "fc1"]
    adapted = get_peft_model(trained_model(), LoraConfig(target_modules=targets, init_lora_weights=False)).eval()
    model, inputs, graphs = adapted.base_model.model, sources(), StepGraphs()
    options = {"num_beams": 4, "max_new_tokens": 12}
    assert_same(search(model, inputs, step_graphs=graphs, **options), search(model, inputs, **options))
    with adapted.disable_adapter():
        assert_same(search(model, inputs, step_graphs=graphs, **options), search(model, inputs, **options))
    assert len(graphs) == tape.made > 0


def test_graphs_used_longest_ago_are_dropped(tape):
    model, graphs, options = trained_model(), StepGraphs(max_graphs=2), {"num_beams": 4, "max_new_tokens": 20}
    for batch in (9, 13, 2, 9):
        inputs = sources(batch)
        assert_same(search(model, inputs, step_graphs=graphs, **options), search(model, inputs, **options))
        assert len(graphs) <= 2
    assert tape.made > 2
    with pytest.raises(ValueError, match="`max_graphs` must be at least 1, got 0"):
        StepGraphs(0)


def test_plain_steps_need_no_graphs(tape):
    model, inputs, graphs = trained_model(), sources(), StepGraphs()
    options = {"num_beams": 4, "max_new_tokens": 9, "use_cache": False}
    assert_same(search(model, inputs, step_graphs=graphs, **options), search(model, inputs, **options))
    assert len(graphs) == 0


@pytest.mark.parametrize("use_cache", [True, False])
def test_cpu_is_refused(monkeypatch, use_cache):
    monkeypatch.undo()
    options = {"num_beams": 4, "max_new_tokens": 9, "use_cache": use_cache}
    with pytest.raises(ValueError, match="`step_graphs` needs a model on a CUDA device, got one on cpu"):
        search(trained_model(steps=1), sources(), step_graphs=StepGraphs(), **options)
