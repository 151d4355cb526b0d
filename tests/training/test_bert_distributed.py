"""Pre-training with the stock trainer and collator: batches, accumulation and processes make no difference."""

import os
import subprocess
import sys

import pytest
import run_bert_ranks
import torch


LAUNCHER = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    command = [sys.executable, "-m", *LAUNCHER, run_bert_ranks.__file__, str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=dict(os.environ))
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [torch.load(path) for path in sorted(folder.glob("rank-*.pt"))]


def assert_same_run(actual, expected):
    assert len(expected["losses"]) == 3
    assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert max(each.abs().max() for each in expected["gradients"].values()) > 0.01
    for kind, tolerance in (("gradients", 1e-5), ("weights", 1e-4)):
        assert actual[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            assert (actual[kind][name] - tensor).abs().max() <= tolerance, (kind, name)


@pytest.mark.parametrize("kind", run_bert_ranks.MODELS)
def test_accumulated_batches_are_one_large_batch(kind, tmp_path):
    expected = run_bert_ranks.train(kind, tmp_path, batch_size=8)
    assert_same_run(run_bert_ranks.train(kind, tmp_path, batch_size=2, accumulation=4), expected)


@pytest.mark.promise("other ways to compute")
@pytest.mark.parametrize("kind", run_bert_ranks.MODELS)
def test_two_ranks_train_as_one_process_with_one_large_batch(ranks, kind, tmp_path, assert_invariant):
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    expected = run_bert_ranks.train(kind, tmp_path, batch_size=8)
    for rank in ranks:
        assert_same_run(rank[kind], expected)
        gradients = rank[kind]["gradients"], expected["gradients"]
        assert_invariant("one process or two (DDP), gradients", "BERT", *gradients)
