"""The benchmarks' own arithmetic, and one of them from end to end."""

import importlib
import itertools
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainingArguments

from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForPreTraining,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_vanilla.command_line.options import run
from hf_vanilla.data.tokenization import train_gpt_tokenizer


FOLDER = Path(__file__).parents[2] / "scripts" / "benchmark"


@pytest.fixture
def script(monkeypatch):
    """Import a benchmark as its own process would."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_ratios_are_computed_by_turn(script, tmp_path, capsys):
    measuring = script("measuring")
    turns = iter([10.0, 5.0, 30.0, 10.0, 40.0, 10.0])
    figures = measuring.take_turns({"ours": lambda: next(turns), "theirs": lambda: next(turns)}, 3)
    assert figures == {"ours": [10.0, 30.0, 40.0], "theirs": [5.0, 10.0, 10.0]}
    arguments = measuring.BenchmarkArguments(repeats=3, threads=1, output_file=str(tmp_path / "row.json"))
    measuring.report(arguments, "some work", "pieces", figures, {"against them": ("ours", "theirs", 2.5)}, sizes="odd")
    written = json.loads((tmp_path / "row.json").read_text())
    assert written["sides"]["ours"] == {"median": 30.0, "lowest": 10.0, "highest": 40.0}
    assert written["ratios"]["against them"] == {"median": 3.0, "lowest": 2.0, "highest": 4.0, "target": 2.5}
    assert written["settings"] == {"sizes": "odd"}
    assert {"versions", "machine", "date", "command"} <= written.keys()
    assert written["machine"]["processor"]
    assert written["quick"] is False
    assert "against them: 3.00 x   (2.00 to 4.00, target 2.5)" in capsys.readouterr().out


def test_quick_run_has_no_targets(script, tmp_path, capsys):
    measuring = script("measuring")
    arguments = measuring.BenchmarkArguments(quick=True, output_file=str(tmp_path / "row.json"))
    figures = {"ours": [10.0, 40.0], "theirs": [5.0, 10.0]}
    measuring.report(arguments, "some work", "pieces", figures, {"against them": ("ours", "theirs", 2.5)})
    written = json.loads((tmp_path / "row.json").read_text())
    assert written["quick"] is True
    assert written["ratios"]["against them"] == {"median": 3.0, "lowest": 2.0, "highest": 4.0}
    assert capsys.readouterr().out.splitlines()[1:] == [
        "some work, quick, pieces:",
        "  ours: 25   (10 to 40)",
        "  theirs: 7.5   (5 to 10)",
        "  against them: 3.00 x   (2.00 to 4.00)",
    ]


@pytest.mark.parametrize(("quick", "repeats"), [(True, 2), (False, 4)])
def test_results_have_a_default_file_with_the_number_of_turns(script, tmp_path, monkeypatch, quick, repeats):
    measuring = script("measuring")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["scripts/some_row.py"])
    monkeypatch.setattr(measuring.torch, "set_num_threads", lambda threads: None)
    arguments = measuring.BenchmarkArguments(repeats=4, quick=quick)
    measuring.prepare(arguments)
    measuring.write_results(arguments, "some work", pieces=7)
    written = json.loads((tmp_path / "benchmark_output" / "some_row.json").read_text())
    assert (written["pieces"], written["repeats"]) == (7, repeats)


def test_operations_of_a_step_match_torch(script):
    measuring = script("measuring")
    torch.manual_seed(0)
    ids = torch.randint(5, 29, (3, 8))
    rest = {"vocab_size": 31, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = VanillaBertConfig(hidden_size=12, num_hidden_layers=3, num_attention_heads=2, intermediate_size=20, **rest)
    is_masked = torch.arange(24).reshape(3, 8) % 5 == 2
    nsp = {"next_sentence_label": torch.tensor([1, 0, 1])}
    labels = ids.masked_fill(~is_masked, -100)
    assert counted(VanillaBertForPreTraining(bert), input_ids=ids, labels=labels, **nsp) == pytest.approx(
        measuring.training_operations(bert, torch.full((3,), 8), is_masked.sum(dim=1))
    )
    pairs = VanillaTransformerConfig(
        vocab_size=31, d_model=12, d_ff=20, num_heads=3, encoder_layers=2, decoder_layers=1, dropout=0.0
    )
    labels = torch.randint(5, 29, (3, 6))
    assert counted(VanillaTransformerForConditionalGeneration(pairs), input_ids=ids, labels=labels) == pytest.approx(
        measuring.training_operations(pairs, torch.full((3,), 8), torch.full((3,), 6))
    )


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_both_gpts_compute_the_same(script, norm):
    ours, native = script("measuring").gpt_pair("tiny", norm)
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():  # float32, products of other shapes
        torch.testing.assert_close(ours(ids).logits, native(ids).logits, rtol=1e-4, atol=1e-5)


def counted(model, **inputs):
    with FlopCounterMode(display=False) as counter:
        model.train()(**inputs).loss.backward()
    return counter.get_total_flops()


def test_operations_of_a_training_are_those_of_its_batches(script, tmp_path, monkeypatch):
    measuring = script("measuring")
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(measuring, "now", lambda: next(clock))
    config = VanillaTransformerConfig(
        vocab_size=31, d_model=12, d_ff=20, num_heads=3, encoder_layers=1, decoder_layers=1, pad_token_id=0
    )
    rows = [
        {"input_ids": [5] * 4 + [0] * 3, "attention_mask": [1] * 4 + [0] * 3, "labels": [7] * 5 + [-100]},
        {"input_ids": [9] * 7, "attention_mask": [1] * 7, "labels": [8] * 3 + [-100] * 3},
    ]
    args = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True, report_to="none"
    )
    trainer = Trainer(VanillaTransformerForConditionalGeneration(config), args, train_dataset=rows)
    speedometer = measuring.train_and_clock(trainer, "labels", -100, 1)  # of three updates, two count
    of_a_batch = 3 * float(config.forward_flops(torch.tensor([4, 7]), torch.tensor([5, 3])).sum())
    assert speedometer.rate() == 2 * 8 / 4
    assert speedometer.operations_per_second() == 2 * of_a_batch / 4


def test_utilisation_is_printed_and_written(script, tmp_path, capsys):
    measuring = script("measuring")
    arguments = measuring.BenchmarkArguments(output_file=str(tmp_path / "row.json"))
    turns = [(30e9, 100e9), (30e9, 120e9), (60e9, 110e9)]
    measuring.report(arguments, "some work", "pieces", {"ours": [3.0]}, {}, turns)
    written = json.loads((tmp_path / "row.json").read_text())["utilisation"]
    assert written == {
        "operations_per_second": {"median": 30e9, "lowest": 30e9, "highest": 60e9},
        "product_ceiling": {"median": 110e9, "lowest": 100e9, "highest": 120e9},
        "share": {"median": 0.3, "lowest": 0.25, "highest": 0.5455},
    }
    line = "  ours computes 30 GFLOP/s, 30% of the 110 of one large product   (25% to 55%)"
    assert line in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("used", [["accelerate"], ["accelerate", "ctranslate2"]])
def test_versions_of_used_packages_are_written(script, tmp_path, monkeypatch, used):
    measuring = script("measuring")
    for name in measuring.PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in used:
        monkeypatch.setitem(sys.modules, name, None)
    arguments = measuring.BenchmarkArguments(output_file=str(tmp_path / "row.json"))
    measuring.write_results(arguments, "some work")
    versions = json.loads((tmp_path / "row.json").read_text())["versions"]
    assert {name: versions.get(name) for name in measuring.PACKAGES} == {
        name: version(name) if name in used else None for name in measuring.PACKAGES
    }


@pytest.mark.parametrize(
    ("benchmark", "name"),
    [("growth", "repeats"), ("growth", "threads"), ("bert_pretraining", "length"), ("search_agreement", "num_beams")],
)
def test_options_below_one_end_in_one_line(script, capsys, monkeypatch, benchmark, name):
    monkeypatch.setattr("sys.argv", [f"{benchmark}.py", f"--{name}", "0"])
    assert run(script(benchmark).main) == 1
    assert capsys.readouterr().err == f"error: --{name} must be at least 1, got 0.\n"


def test_pairs_come_from_a_file_or_documentation(script, tmp_path):
    measuring = script("measuring")
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"en": "a b", "de": "c"}\n{"en": "d", "de": "e f"}\n')
    assert measuring.sentence_pairs(str(file), ["en", "de"], 1) == {"source": ["a b"], "target": ["c"]}
    made = measuring.sentence_pairs(None, [], 50)
    assert len(made["source"]) == 50
    assert all(one.split() == two.split()[::-1] for one, two in zip(made["source"], made["target"], strict=True))


def test_fit_finds_line_and_exponent(script):
    growth = script("growth")
    found = growth.fit((2, 4, 8, 16), [3.0, 5.0, 9.0, 17.0])
    assert found["seconds_per_unit"] == pytest.approx(1.0)
    assert found["seconds_at_zero"] == pytest.approx(1.0)
    assert found["largest_error_of_the_line"] == 0.0
    square = growth.fit((1, 10, 100, 1000), [1.0, 100.0, 10_000.0, 1_000_000.0])
    assert square["exponent_of_the_upper_half"] == pytest.approx(2.0)


def test_growth_is_written_before_it_is_drawn(script, tmp_path, monkeypatch, capsys):
    growth, file, seen = script("growth"), tmp_path / "growth.json", []
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(growth, "measure", lambda repeats, name, size: [0.5 + size])
    monkeypatch.setattr(growth, "draw", lambda curves, picture: seen.append(file.exists()))
    for picture, code in (("curves.jpgg", 1), ("curves.png", 0)):
        options = ["--quick", "--output_file", str(file), "--picture", str(tmp_path / "new" / picture)]
        monkeypatch.setattr("sys.argv", ["growth.py", *options])
        assert run(growth.main) == code
        assert file.exists() == (code == 0)
    assert "`picture` must end in one of " in capsys.readouterr().err
    assert seen == [True]


def test_difference_counts_hypotheses_and_scores(script):
    agreement = script("search_agreement")
    one = [([5, 6], -1.0), ([7], -2.0), ([8, 9], -0.5)]
    other = [([5, 6], -1.25), ([7, 7], -2.125), ([9, 8], -0.5)]
    assert agreement.difference(one, other) == {"hypotheses_that_differ": 2, "largest_score_difference": 0.25}


def test_greedy_scores_end_at_eos(script):
    model = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(vocab_size=5, d_model=4, d_ff=4, num_heads=1, encoder_layers=1, decoder_layers=1)
    )
    end, padding, steps = 2, 0, 3
    sequences = torch.tensor([[1, 4, end, padding], [1, 3, 4, 3], [1, end, padding, padding]])
    logits = torch.arange(steps * 3 * 5).reshape(steps, 3, 5).sin() * 3
    of_tokens = logits.log_softmax(-1)
    found = script("search_agreement").greedy_scores(model, sequences, tuple(logits), end)
    expected = [
        (of_tokens[0, 0, 4] + of_tokens[1, 0, 2]) / 2**0.6,
        (of_tokens[0, 1, 3] + of_tokens[1, 1, 4] + of_tokens[2, 1, 3]) / 3**0.6,
        of_tokens[0, 2, 2],
    ]
    assert found == pytest.approx(torch.stack(expected).tolist(), rel=1e-5)


@pytest.mark.parametrize("beams", [1, 2])
def test_best_hypotheses_are_in_the_order_of_the_sources(script, beams):
    agreement = script("search_agreement")
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(vocab_size=40, d_model=12, d_ff=20, num_heads=3, encoder_layers=1, decoder_layers=1)
    ).eval()
    sources = [[7, 9, 2], [11, 5, 6, 30, 8, 2], [13, 21, 2]]  # in batches of one and two
    plain, fast = (agreement.best_hypotheses(model, sources, 6, beams, is_fast) for is_fast in (False, True))
    alone = [agreement.best_hypotheses(model, [source], 6, beams, True)[0] for source in sources]
    assert [tokens for tokens, _ in plain] == [tokens for tokens, _ in fast]
    assert agreement.difference(plain, fast)["largest_score_difference"] < 1e-4
    assert [score for _, score in fast] == pytest.approx([score for _, score in alone], abs=1e-4)
    assert len({score for _, score in fast}) == 3


def test_types_are_compared_at_their_best_and_alike(script):
    ordered = {
        "MarianMTModel.generate": ["float32", "bfloat16"],
        "CTranslate2": ["int8_float32", "bfloat16", "float32"],
        "ours, generate() as it is": ["bfloat16", "float32"],
        "ours": ["bfloat16", "int8_bfloat16", "int8_float32", "float32"],
    }
    pairs_of = script("translation_decoding").pairs_of
    assert list(pairs_of(ordered, has_targets=True).values()) == [
        ("ours, bfloat16", "MarianMTModel.generate, float32", 3.0),
        ("ours, bfloat16", "CTranslate2, int8_float32", 2.0),
        ("ours, generate() as it is, bfloat16", "MarianMTModel.generate, float32", None),
        ("ours, float32", "MarianMTModel.generate, float32", None),
        ("ours, float32", "CTranslate2, float32", None),
        ("ours, int8_bfloat16", "CTranslate2, int8_float32", 1.2),
    ]
    without = pairs_of({**ordered, "CTranslate2": []}, has_targets=False)
    assert {other for _, other, _ in without.values()} == {"MarianMTModel.generate, float32"}
    assert {target for *_, target in without.values()} == {None}


def test_failure_of_ctranslate2_leaves_the_other_sides(script, tmp_path, monkeypatch, capsys):
    decoding, file = script("translation_decoding"), tmp_path / "row.json"

    def fail(*arguments):
        raise RuntimeError("Library libcublas.so is not found\nor cannot be loaded")

    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(decoding, "ctranslate2_sides", fail)
    (tmp_path / "pairs.jsonl").write_text('{"source": "a b", "target": "c"}\n{"source": "d", "target": "e f"}\n')
    options = ["--quick", "--repeats", "1", "--parallel_file", tmp_path / "pairs.jsonl", "--output_file", file]
    monkeypatch.setattr("sys.argv", ["translation_decoding.py", *map(str, options)])
    assert run(decoding.main) == 0
    written, reason = json.loads(file.read_text()), "RuntimeError: Library libcublas.so is not found"
    assert written["work"] == "beam-4 translation of 2 sentences"
    assert {side.partition(", ")[0] for side in written["sides"]} == {"MarianMTModel.generate", "ours"}
    assert written["settings"]["left_out"] == {"CTranslate2": reason}
    assert f"CTranslate2 is left out, {reason}\n" in capsys.readouterr().out


def test_shares_of_a_step_add_up(script):
    times = {
        "aten::addmm": 2e6,
        "mkldnn::_linear_pointwise": 1e6,
        "aten::baddbmm_": 5e5,
        "aten::_scaled_dot_product_flash_attention_for_cpu": 25e4,
        "aten::copy_": 1e6,
        "aten::add": 2e6,
        "aten::view": 3e4,
        "aten::slice": 2e4,
        "autograd::engine::evaluate_function: AddmmBackward0": 7e5,
        "AddmmBackward0": 5e5,
    }
    events = [
        SimpleNamespace(key=key, self_cpu_time_total=time, device_type=DeviceType.CPU, self_device_time_total=time)
        for key, time in times.items()
    ]
    events.append(SimpleNamespace(key="void ns::kernel", device_type=DeviceType.CUDA, self_cpu_time_total=9e9))
    assert list(script("step_profile").shares_of(events, 10.0).items()) == [
        ("products", 0.3),
        ("attention's products", 0.075),
        ("add", 0.2),
        ("copy_", 0.1),
        ("all others", 0.005),
        ("outside of operations", 0.32),
    ]


@pytest.mark.parametrize("name", ["bert_mini", "encoder_decoder", "decoding"])
def test_step_profile_is_written(script, tmp_path, monkeypatch, name):
    file = tmp_path / "row.json"
    monkeypatch.setattr(
        "sys.argv", ["step_profile.py", "--quick", "--only", name, "--repeats", "1", "--output_file", str(file)]
    )
    benchmark = script("step_profile")
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setitem(benchmark.BATCHES, "bert_mini", 3)
    assert run(benchmark.main) == 0
    [profile] = json.loads(file.read_text())["profiles"].values()
    shares = profile["shares"]
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.01)
    assert min(shares["products"], shares["attention's products"], shares["outside of operations"]) > 0
    assert profile["ceiling"] == pytest.approx(1 / (shares["products"] + shares["attention's products"]), abs=0.01)
    assert profile["seconds"]["median"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["translation_training", "bert_pretraining", "gpt_training"])
def test_quick_training_writes_its_utilisation(tmp_path, name):
    file = tmp_path / "row.json"
    options = ["--tokens_per_turn", "3000"] if name == "translation_training" else ["--steps", "2", "--length", "32"]
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--threads", "1", "--output_file", str(file)]
    subprocess.run([*command, *options], check=True, cwd=tmp_path, capture_output=True)
    written = json.loads(file.read_text())
    assert 0 < written["utilisation"]["share"]["median"] < 1.2
    assert written["quick"] is True


@pytest.mark.slow
@pytest.mark.parametrize("name", ["training_memory", "text_encoding", "translation_decoding", "gpt_decoding"])
def test_quick_run_writes_its_figures(tmp_path, name):
    file = tmp_path / "row.json"
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--threads", "1", "--output_file", str(file)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    written = json.loads(file.read_text())
    assert all(side["median"] > 0 for side in written["sides"].values())
    assert len(written["sides"]) >= 2


def test_ngram_baseline_scores_documents(script, tmp_path, monkeypatch, capsys):
    """With programs that give each document, a line of its ids, as many decades as it has tokens and an end."""
    for name, code in (("lmplz", "cat"), ("query", 'awk \'{print "Total: -" NF + 1 " OOV: 0"}\'')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    texts = ["the cat\n\nsat", "a <|endoftext|>"]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_gpt_tokenizer(texts, 270, show_progress=False)
    tokenizer.save_pretrained(tmp_path)
    options = {"kenlm": tmp_path, "tokenizer": tmp_path, "output_file": tmp_path / "out.json"}
    options |= {"train_files": tmp_path / "text.jsonl", "files": tmp_path / "text.jsonl"}
    monkeypatch.setattr(sys, "argv", ["x", *(str(word) for name in options for word in (f"--{name}", options[name]))])
    assert run(script("ngram_baseline").main) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    tokens = sum(len(tokenizer(text, split_special_tokens=True)["input_ids"]) + 1 for text in texts)
    (scores,) = report["files"].values()
    assert (report["training_tokens"], scores["tokens"], scores["words"]) == (tokens, tokens, 5)
    assert scores["perplexity_per_token"] == pytest.approx(10)
    assert scores["perplexity_per_word"] == pytest.approx(10 ** (tokens / 5), rel=1e-4)
    (tmp_path / "lmplz").write_text("#!/bin/sh\necho reading >&2\necho no discounts >&2\nexit 1\n")
    assert run(script("ngram_baseline").main) == 1
    assert capsys.readouterr().err.endswith("/sorting failed: no discounts\n")


def test_choices_are_kept_apart_by_options_and_data(script, tmp_path, monkeypatch, capsys):
    """With trainings that only write what is read of them."""
    choices, files, commands = script("pretraining_choices"), [tmp_path / name for name in ("one", "other")], []
    for file in files:
        file.write_text(file.name)

    def run_child(command):
        value = dict(itertools.pairwise(command))
        if command[1].endswith("pretrain_bert.py"):
            commands.append(" ".join(command))
            (Path(value["--output_dir"]) / "checkpoint-4").mkdir(parents=True, exist_ok=True)
            (Path(value["--output_dir"]) / "train_results.json").write_text('{"train_runtime": 90}')
        else:
            scores = {"pairs": 2, **dict.fromkeys(choices.SCORES, 0.5)}
            written = {f"{value['--files']}, {length} tokens": scores for length in choices.LENGTHS}
            Path(value["--results_file"]).write_text(json.dumps({"files": written}))

    def minutes(output_file, data, options):
        places = ["--output_dir", tmp_path / "runs", "--output_file", tmp_path / output_file]
        words = [*places, "--train_files", data, "--validation_files", data, "--only", "another seed"]
        monkeypatch.setattr(sys, "argv", ["x", *map(str, words), "--options", options])
        if run(choices.main):
            return capsys.readouterr().err
        return json.loads((tmp_path / output_file).read_text())["choices"]["another seed"]["minutes"]

    monkeypatch.setattr(choices, "run_child", run_child)
    assert minutes("a.json", files[0], "--seed 5 --max_steps 900") == 1.5
    assert commands[0].index("--seed 5") < commands[0].index("--seed 2")  # the choice's is the last
    assert "has results of other data; give another file" in minutes("a.json", files[1], "--seed 5 --max_steps 900")
    assert "has results of other base options" in minutes("a.json", files[0], "--seed 5 --max_steps 300")
    assert minutes("b.json", files[0], "--seed 5 --max_steps 300") == 1.5  # in a folder of its own
    assert minutes("c.json", files[0], "--seed 5 --max_steps 900") is None  # in that of the first, and so resumed
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.slow
def test_choices_of_pretraining_are_measured_once(script, tmp_path, monkeypatch, capsys):
    files = []
    for number in range(2):
        texts = [" ".join(f"w{number} w{word * number % 7}." for word in range(60)) for number in range(40)]
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tiny = "--preset tiny --vocab_size 60 --phase_lengths 16 32 64 --max_tokens_per_batch 256 --max_steps 4"
    tiny += " --warmup_steps 1 --hidden_size 16 --num_attention_heads 4 --intermediate_size 24"
    folders = ["--output_dir", tmp_path / "runs", "--output_file", tmp_path / "choices.json"]
    options = ["--train_files", files[0], "--validation_files", files[1], *folders, "--options", tiny]

    def measured(*names):
        monkeypatch.setattr(sys, "argv", ["x", *map(str, options), "--only", *names])
        return run(script("pretraining_choices").main)

    assert measured("base", "25 % masked") == 0
    capsys.readouterr()
    assert measured("25 % masked", "float32") == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["float32"]  # the other is known
    report = json.loads((tmp_path / "choices.json").read_text())
    assert list(report["choices"]) == ["base", "25 % masked", "float32"]
    assert all(each["mlm_loss_128"] > 0 < each["mlm_loss_512"] for each in report["choices"].values())
    assert len({path.read_bytes() for path in tmp_path.glob("runs/*/model.safetensors")}) == 3
    assert report["choices"]["float32"]["options"] == "--precision float32"
    assert report["base"].endswith(tiny)
    options[-1] = tiny + " --seed 3"
    assert measured("base") == 1
    assert "has results of other base options" in capsys.readouterr().err
