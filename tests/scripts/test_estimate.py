"""The estimate of a training's cost, from the options of the training's own script."""

import re

import pytest
from script_runner import SCRIPTS, run_here

from hf_vanilla import precision


SIZES = {
    "train_translation": "--d_model 16 --d_ff 24 --num_heads 4 --encoder_layers 1 --decoder_layers 2",
    "pretrain_bert": "--preset tiny --hidden_size 12 --intermediate_size 20 --alphabet_size 40 --phase_lengths 16 24",
}


@pytest.mark.parametrize("has_bfloat16", [True, False])
@pytest.mark.parametrize("task", SIZES)
def test_estimate_in_both_precisions(tmp_path, monkeypatch, capsys, task, has_bfloat16):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: has_bfloat16)
    precision.forget()
    lines = [f"the dog number {number} likes a cat" for number in range(30)]
    (tmp_path / "a").write_text("\n".join(lines))
    (tmp_path / "b").write_text("\n\n".join("\n".join(lines[start:]) for start in range(5)))
    files = {"train_translation": "--train_source_file a --train_target_file a", "pretrain_bert": "--train_files b"}
    options = f"{files[task]} {SIZES[task]} --vocab_size 280 --max_tokens_per_batch 128 --output_dir run".split()
    try:
        assert run_here(monkeypatch, "estimate.py", task.replace("_", "-"), *options, "--max_steps", "20") == 0
    finally:
        precision.forget()
    *estimates, choice = capsys.readouterr().out.splitlines()
    figures = r"[\d,]+ parameters, \d+ tokens an update, \S+ operations, \S+ GB of memory, \d+:\d\d:\d\d \(h:mm:ss\)"
    assert [re.sub(figures, "...", line) for line in estimates] == ["float32: ...", "bfloat16: ..."][
        : 1 + has_bfloat16
    ]
    assert choice.startswith("--precision fastest chooses ")
    assert not (tmp_path / "run").exists()


def test_accumulated_batches_count(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: False)
    (tmp_path / "a").write_text("\n".join(f"the dog number {number} likes a cat" for number in range(30)))
    options = (
        "--train_source_file a --train_target_file a --vocab_size 280 --max_tokens_per_batch 128 --output_dir run"
    )
    options = [*options.split(), *SIZES["train_translation"].split(), "--max_steps", "20"]
    tokens, operations = [], []
    for accumulated in ("1", "4"):
        more = ("--gradient_accumulation_steps", accumulated)
        precision.forget()
        try:
            assert run_here(monkeypatch, "estimate.py", "train_translation", *options, *more) == 0
        finally:
            precision.forget()
        found = re.search(r"(\d+) tokens an update, (\S+) operations", capsys.readouterr().out)
        tokens.append(int(found[1]))
        operations.append(float(found[2]))
    assert tokens[1] == pytest.approx(4 * tokens[0], abs=3)  # they are rounded
    assert operations[1] == pytest.approx(4 * operations[0], rel=0.02)


def test_estimate_needs_the_length_of_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    assert run_here(monkeypatch, "estimate.py", "train_translation", "--output_dir", str(tmp_path / "run")) == 1
    assert "error: `max_steps` is missing; give it as --max_steps." in capsys.readouterr().err
