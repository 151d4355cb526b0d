"""Two processes that share a model compute what one computes: tensor parallelism and FSDP2, by transformers' plans."""

import os
import subprocess
import sys

import pytest
import run_sharing
import torch
from run_sharing import MODELS, PLANS, compute, search
from tiny_models import assert_same


FAMILIES = {"transformer": "encoder-decoder", "bert": "BERT", "gpt": "GPT", "vit": "ViT"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Let two processes share all models; the folder has the models and what each process saw."""
    folder = tmp_path_factory.mktemp("shared")
    for kind, (make, _) in MODELS.items():
        make().save_pretrained(folder / kind)
    launcher = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    command = [sys.executable, "-m", *launcher, run_sharing.__file__, str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=dict(os.environ))
    assert finished.returncode == 0, finished.stderr[-4000:]
    return folder, [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]


@pytest.mark.promise("other ways to compute")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("plan", PLANS)
def test_two_processes_compute_what_one_computes(shared, plan, kind, assert_invariant):
    make, inputs = MODELS[kind]
    expected = compute(make(), inputs)
    assert max(each.abs().max() for each in expected["gradients"].values()) > 0.01
    for rank in shared[1]:
        actual = rank[plan][kind]
        seen = {name: actual[name] for name in expected}
        assert_invariant(f"one process or two ({plan}), with gradients", FAMILIES[kind], seen, expected)
        assert actual["own_share"] < 0.75


def test_shared_layers_work_on_packed_tokens(shared):
    assert all(rank[plan]["bert"]["is_packed"] for rank in shared[1] for plan in PLANS)


@pytest.mark.parametrize("kind", ["transformer", "gpt"])
def test_tensor_parallel_model_generates_as_one_process(shared, kind):
    make, inputs = MODELS[kind]
    prompts = {name: each for name, each in inputs.items() if name != "labels"}
    expected = make().generate(**prompts, max_new_tokens=5, do_sample=False)
    for rank in shared[1]:
        assert rank["tensor parallel"][kind]["generated"].tolist() == expected.tolist()


def test_sharded_model_finds_what_one_process_finds(shared):
    make, inputs = MODELS["gpt"]
    for rank, seen in enumerate(shared[1]):
        assert torch.equal(seen["FSDP2"]["gpt"]["searched"], search(make(), inputs, rank))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("plan", PLANS)
def test_shared_model_is_saved_whole(shared, plan, kind):
    expected = MODELS[kind][0]()
    loaded = type(expected).from_pretrained(shared[0] / plan / kind)
    assert_same(loaded.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_earlier_arguments_of_tensor_parallelism_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`tp_plan` and `tp_size` must be fields of `distributed_config`"):
        type(MODELS["bert"][0]()).from_pretrained(tmp_path, tp_plan="auto")


@pytest.mark.parametrize("kind", ["transformer", "bert"])
def test_labels_of_context_parallelism_are_refused(kind):
    make, inputs = MODELS[kind]
    with pytest.raises(ValueError, match="context parallelism.* Use DDP"):
        make()(**inputs, shift_labels=inputs["labels"])
