"""Continuing prompts: streams, batches, searches, bad input."""

import io
import sys

import pytest
import torch
from script_runner import run_here
from transformers import AutoTokenizer

from hf_vanilla import VanillaGptConfig, VanillaGptForCausalLM
from hf_vanilla.data.tokenization import train_gpt_tokenizer


SCRIPT = "generate.py"
PROMPTS = ["the cat", "a dog sat on the mat", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt")
    tokenizer = train_gpt_tokenizer(PROMPTS, 290, show_progress=False)
    tokenizer.save_pretrained(path)
    torch.manual_seed(3)
    config = VanillaGptConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.4,
        max_position_embeddings=40, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    VanillaGptForCausalLM(config).save_pretrained(path)
    return path


def continued(folder, prompt, **options):
    """The prompt with what `generate` adds to it alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), VanillaGptForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt)["input_ids"] or [1]])
    (output,) = model.generate(ids, max_new_tokens=5, pad_token_id=0, **options)
    return tokenizer.decode(output, skip_special_tokens=True)


def test_one_prompt_is_streamed(folder, monkeypatch, capsys):
    status = run_here(
        monkeypatch, SCRIPT, "--model", folder, "--prompt", PROMPTS[0], "--greedy", "--max_new_tokens", 5
    )
    assert status == 0
    assert capsys.readouterr().out == continued(folder, PROMPTS[0], do_sample=False) + "\n"


@pytest.mark.parametrize("beams", [1, 3])
def test_lines_of_standard_input_are_continued_together(folder, monkeypatch, capsys, beams):
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(f"{prompt}\n" for prompt in PROMPTS).encode()))
    )
    options = ["--greedy", "--num_beams", beams, "--max_new_tokens", 5, "--batch_size", 2]
    assert run_here(monkeypatch, SCRIPT, "--model", folder, *options) == 0
    expected = [continued(folder, prompt, do_sample=False, num_beams=beams) for prompt in PROMPTS]
    assert capsys.readouterr().out == "".join(f"--- {i}.1 ---\n{text}\n" for i, text in enumerate(expected, start=1))


def test_default_length_fits_the_positions(folder, monkeypatch, capsys):
    assert run_here(monkeypatch, SCRIPT, "--model", folder, "--prompt", "the cat") == 0  # 40 positions, 100 new tokens
    assert capsys.readouterr().out


def test_samples_depend_on_the_seed(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompts.txt").write_text("the cat\na dog\n")
    options = ["--input", tmp_path / "prompts.txt", "--num_return_sequences", 2, "--max_new_tokens", 9]
    outputs = []
    for seed in (1, 1, 2):
        assert run_here(monkeypatch, SCRIPT, "--model", folder, *options, "--seed", seed) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    assert [line for line in outputs[0].splitlines() if line.startswith("--- ")] == [
        "--- 1.1 ---", "--- 1.2 ---", "--- 2.1 ---", "--- 2.2 ---",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--max_new_tokens", 60], 1, "tokens of prompt 1 must be at most 41 together"),
        (["--max_new_tokens", 0], 2, "`max_new_tokens` must be at least 1, got 0"),
        (["--top_p", 0], 2, "`top_p` in (0, 1], got 0 and 0.0"),
        (["--greedy", "--num_return_sequences", 2], 2, "`num_return_sequences` (2) must be at most `num_beams` (1)"),
        (["--greedy", "--top_p", 0.5], 2, "`top_p` has no effect without sampling"),
        (["--num_beams", 4, "--temperature", 1.0], 2, "`temperature` has no effect without sampling"),
        (["--prompt", "cat", "--input", "file"], 2, "`input` must be left out where `prompt` is given, got both"),
        (["--model", "./nowhere"], 1, "there is no folder ./nowhere"),
        (["--device", "gpu"], 2, "--device must be auto or a device of this machine, such as cpu, got 'gpu': "),
        (["--device", "cuda:99"], 2, "such as cpu, got 'cuda:99': "),
        (["--input", "nowhere.txt"], 1, "nowhere.txt can't be read"),
    ],
    ids=["long", "none", "range", "sequences", "greedy", "beams", "both", "model", "device", "no-device", "file"],
)
def test_bad_input_is_named(folder, monkeypatch, capsys, options, status, message):
    given = [] if "--input" in options else ["--prompt", "cat"]
    assert run_here(monkeypatch, SCRIPT, "--model", folder, *given, *options) == status
    assert message in capsys.readouterr().err
