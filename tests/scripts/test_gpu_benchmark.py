"""The benchmark of one GPU: its rows with tiny models on a CPU, what it keeps, and its check of dropout."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hf_vanilla.command_line.options import run


FOLDER = Path(__file__).parents[2] / "scripts" / "benchmark"
QUICK = ["--device", "cpu", "--quick", "--threads", "1"]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    import gpu

    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    return gpu


def start(gpu, monkeypatch, file, *options):
    monkeypatch.setattr("sys.argv", ["gpu.py", *QUICK, "--output_file", str(file), *options])
    return run(gpu.main)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's reasons why a kernel does not run
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, where it compiles
def test_rows_are_written_and_kept(gpu, monkeypatch, tmp_path, capsys):
    file = tmp_path / "gpu.json"
    names = ["kernels", "ceilings", "bert_large_real_lengths", "beam_search"]
    assert start(gpu, monkeypatch, file, "--rows", *names) == 0
    rows = json.loads(file.read_text())["rows"]
    assert rows["kernels"]["kernels"]["sdpa, math, float32"]["passed"] is True
    assert "missing" in rows["kernels"]["kernels"]["varlen, flash, bfloat16"]
    losses = [rows["kernels"]["kernels"][f"loss, {dtype}"] for dtype in ("bfloat16", "float16", "float32")]
    assert [loss["passed"] for loss in losses] == [True] * 3
    assert rows["kernels"]["wrong"] == []
    assert rows["ceilings"]["products"].keys() == {"bfloat16", "float32", "float32 by TF32"}
    bert = rows["bert_large_real_lengths"]
    ours = {"ours", "ours, compiled", "ours, layers compiled"}
    assert bert["sides"].keys() == {"BertForPreTraining, sdpa", *ours}
    assert bert["left_out"] == {"BertForPreTraining, flash_attention_2": "ImportError: flash-attn is not installed"}
    assert bert["ratios"]["against sdpa"]["median"] > 0
    assert bert["settings"]["padding"] > 0
    search = rows["beam_search"]
    assert search["same_translations_as_ours"] == {"ours, generate() as it is": search["settings"]["sentences"]}
    assert list(search["left_out"]) == ["ours, CUDA graphs"]
    assert search["left_out"]["ours, CUDA graphs"].startswith("ValueError: `step_graphs` needs a model on a CUDA")
    monkeypatch.setattr(gpu, "ROWS", {name: gpu.Row(1, lambda setting: {"is_new": True}) for name in gpu.ROWS})
    assert start(gpu, monkeypatch, file, "--rows", "kernels", "bert_base") == 0
    again = json.loads(file.read_text())["rows"]
    assert {name: again.pop(name) for name in rows} == rows
    assert again == {"bert_base": {"is_new": True}}
    monkeypatch.setattr(gpu, "describe_device", lambda: {"name": "another"})
    assert start(gpu, monkeypatch, file) == 1
    assert "has rows of another run: `gpu` is {'name': 'cpu'}" in capsys.readouterr().err


def test_rows_that_take_too_long_are_left_and_failures_are_recorded(gpu, monkeypatch, tmp_path):
    def fail(setting):
        raise AttributeError("no such kernel\nin this version")

    rows = {"first": gpu.Row(20, lambda setting: {}), "long": gpu.Row(11, fail), "short": gpu.Row(9, fail)}
    monkeypatch.setattr(gpu, "ROWS", rows)
    arguments = gpu.GpuArguments(minutes=10, output_file=str(tmp_path / "gpu.json"))
    measured = {}
    assert gpu.measure_rows(arguments, list(rows), measured) == ["long"]
    assert measured == {"first": {}, "short": {"failed": "AttributeError: no such kernel"}}


def test_peak_memory_of_a_failed_row_is_not_that_of_the_next(gpu, monkeypatch):
    peak = [0.0]

    def allocate(gigabytes, reason):
        peak[0] = max(peak[0], 1e9 * gigabytes)
        if reason:
            raise AttributeError(reason)
        return {}

    for name, function in (
        ("is_available", lambda: True),
        ("max_memory_allocated", lambda: peak[0]),
        ("reset_peak_memory_stats", lambda: peak.__setitem__(0, 0.0)),
        ("empty_cache", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    for name in ("describe_device", "set_seed", "write_results"):
        monkeypatch.setattr(gpu, name, lambda *arguments, **options: {})
    rows = {"large": lambda setting: allocate(80, "no kernel"), "small": lambda setting: allocate(2, None)}
    monkeypatch.setattr(gpu, "ROWS", {name: gpu.Row(1, measure) for name, measure in rows.items()})
    measured = {}
    gpu.measure_rows(gpu.GpuArguments(), list(rows), measured)
    assert measured == {"large": {"failed": "AttributeError: no kernel"}, "small": {"peak_memory_gb": 2.0}}


def test_a_side_that_fails_later_is_left_out(gpu):
    def failing(share):
        speeds = iter([1.0, 1.0])  # of the warm-up and the first turn
        return lambda: next(speeds)

    sides = {"sound": lambda share: lambda: 2.0, "failing": failing}
    ratios = {"against itself": gpu.Ratio("sound", "sound"), "against failing": gpu.Ratio("sound", "failing")}
    row = gpu.compare(gpu.Setting(True, 3, time.monotonic() + 60), sides, ratios, "tokens/s")
    assert row["sides"].keys() == {"sound"}
    assert row["left_out"] == {"failing": "StopIteration: "}
    assert row["ratios"].keys() == {"against itself"}


def test_a_side_gets_smaller_batches_until_they_fit(gpu):
    def build(share):
        if share > 0.25:
            raise torch.OutOfMemoryError("too large")
        return lambda: share

    setting = gpu.Setting(quick=True, repeats=3, deadline=float("inf"))
    sides = {"fits": build, "never": lambda share: build(1), "plain": lambda share: lambda: 2.0 * share}
    ratios = {"one": gpu.Ratio("plain", "fits", 1.5), "other": gpu.Ratio("plain", "never")}
    row = gpu.compare(setting, sides, ratios, "pieces", {"plain": 3.0})
    assert row["share_of_the_batch"] == {"fits": 0.25, "plain": 1.0}
    assert row["left_out"] == {"never": "ValueError: out of memory with 0.0156 of a batch"}
    assert row["ratios"] == {"one": {"median": 8.0, "lowest": 8.0, "highest": 8.0}}
    assert row["turns"] == 3
    assert row["utilisation"]["plain"]["operations_per_second"] == 6.0


def attend(query, key, value, rate, is_kept):
    weights = (query @ key.transpose(2, 3) / 8).softmax(-1)
    return (weights * is_kept / (1 - rate)) @ value


def other_gradient(query, key, value, rate):
    """Drops other weights in the backward pass than in the forward pass."""
    shape = (*query.shape[:3], key.shape[2])
    one, other = (attend(query, key, value, rate, torch.rand(shape) > rate) for _ in range(2))
    return one.detach() + other - other.detach()


def other_rate(query, key, value, rate):
    return F.scaled_dot_product_attention(query, key, value, dropout_p=1.2 * rate)


@pytest.mark.parametrize(
    ("kernel", "passes"),
    [(F.scaled_dot_product_attention, True), (other_gradient, False), (other_rate, False)],
    ids=["right", "another gradient", "another rate"],
)
def test_dropout_check_finds_wrong_kernels(gpu, kernel, passes):
    def call(query, key, value, rate):
        if kernel is F.scaled_dot_product_attention:
            return kernel(query, key, value, dropout_p=rate)
        return kernel(query, key, value, rate)

    found = sys.modules["kernel_checks"].check_dropout(call, torch.device("cpu"), torch.float32, batch=4)
    assert found["passed"] is passes, found


def test_loss_check_finds_a_wrong_gradient(gpu, monkeypatch):
    checks = sys.modules["kernel_checks"]
    assert checks.check_loss(torch.device("cpu"), torch.bfloat16, 300)["passed"] is True
    loss_and_gradients = checks.loss_and_gradients

    def without_the_last_chunk(hidden_states, weight, bias, labels, target):
        total, grad_hidden, *_ = loss_and_gradients(hidden_states, weight, bias, labels, target)
        return total, grad_hidden, *loss_and_gradients(hidden_states[:256], weight, bias, labels[:256], target)[2:]

    monkeypatch.setattr(checks, "loss_and_gradients", without_the_last_chunk)
    assert checks.check_loss(torch.device("cpu"), torch.bfloat16, 300)["passed"] is False


def by_sequence(module, query, key, value, dropout, scaling, *, cu_seq_lens_q, cu_seq_lens_k, **lengths):
    """Attend from each sequence to that of the same number."""
    lengths = [offsets.diff().tolist() for offsets in (cu_seq_lens_q, cu_seq_lens_k, cu_seq_lens_k)]
    heads = [states.transpose(1, 2) for states in (query, key, value)]
    parts = (states.split(each, 2) for states, each in zip(heads, lengths, strict=True))
    outputs = [
        F.scaled_dot_product_attention(*each, is_causal=module.is_causal, scale=scaling)
        for each in zip(*parts, strict=True)
    ]
    return torch.cat(outputs, 2).transpose(1, 2)


def across_sequences(module, query, key, value, dropout, scaling, **offsets):
    """Attend as if all sequences were one."""
    heads = (states.transpose(1, 2) for states in (query, key, value))
    return F.scaled_dot_product_attention(*heads, is_causal=module.is_causal, scale=scaling).transpose(1, 2)


@pytest.mark.parametrize("kind", ["self", "causal", "cross"])
def test_check_of_sequences_finds_wrong_attention(gpu, kind):
    checked = [
        sys.modules["kernel_checks"].check_sequences(attend, kind, torch.device("cpu"), torch.bfloat16)["passed"]
        for attend in (by_sequence, across_sequences)
    ]
    assert checked == [True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "bert_huge"], "--rows must be some of kernels,"),
        (["--minutes", "0"], "--minutes must be above 0, got 0.0."),
        (["--no_quick"], "--device cpu is for --quick only"),
        (["--device", "cuda"], "There is no GPU here"),
    ],
)
def test_options_are_checked_before_work(gpu, monkeypatch, tmp_path, capsys, options, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = [word for word in QUICK if word != "--quick"] if options == ["--no_quick"] else [*QUICK, *options]
    monkeypatch.setattr("sys.argv", ["gpu.py", *words, "--output_file", str(tmp_path / "gpu.json")])
    assert run(gpu.main) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_all_rows_run_with_tiny_models(tmp_path):
    file = tmp_path / "gpu.json"
    command = [sys.executable, str(FOLDER / "gpu.py"), *QUICK, "--output_file", str(file)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 9
    for name, row in rows.items():
        assert "failed" not in row, name
        assert set(row.get("left_out", {})) <= {"BertForPreTraining, flash_attention_2"}
        assert all(side["median"] > 0 for side in row.get("sides", {}).values())
