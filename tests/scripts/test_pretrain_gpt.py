"""Pre-training GPT from documents: resuming, perplexity, streams, further pre-training, bad input."""

import json
import math

import pytest
from safetensors.torch import load_file
from script_runner import run_here, train_and_resume, write_documents
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, pipeline

import hf_vanilla
from hf_vanilla.hub.results import list_scores, results_of_folder


SCRIPT = "pretrain_gpt.py"
TINY = [
    "--preset", "tiny", "--hidden_size", "16", "--num_attention_heads", "4", "--vocab_size", "290",
    "--per_device_train_batch_size", "4", "--block_length", "16", "--warmup_steps", "2", "--learning_rate", "0.01",
    "--logging_steps", "2", "--disable_tqdm", "true", "--use_cpu", "--max_steps", "10",
]  # fmt: skip


def files(corpus):
    return ["--train_files", corpus / "train.txt", "--validation_files", corpus / "held_out.txt", *TINY]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run_dir(corpus, tmp_path_factory):
    """A run that is resumed after 6 of 10 updates."""
    output_dir = tmp_path_factory.mktemp("runs") / "gpt"
    arguments = [*files(corpus), "--save_steps", 6, "--output_dir", output_dir]
    train_and_resume(SCRIPT, arguments, output_dir)
    return output_dir


def test_model_continues_text(run_dir):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run_dir), AutoTokenizer.from_pretrained(run_dir)
    assert type(model) is hf_vanilla.VanillaGptForCausalLM
    assert (model.config.vocab_size, tokenizer.model_max_length) == (len(tokenizer), 16)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 1)
    (found,) = pipeline("text-generation", model=model, tokenizer=tokenizer)("the dog", max_new_tokens=5)
    assert found["generated_text"].startswith("the dog")


def test_scores_are_saved(run_dir, corpus):
    measured = json.loads((run_dir / "eval_results.json").read_text())
    texts = (corpus / "held_out.txt").read_text().split("\n\n")
    assert measured["eval_words"] == sum(len(text.split()) for text in texts)
    nats = measured["eval_tokens"] * math.log(measured["eval_perplexity_per_token"])
    assert measured["eval_perplexity_per_word"] == pytest.approx(math.exp(nats / measured["eval_words"]))
    # Both are means over nearly the same tokens; their contexts differ.
    assert math.log(measured["eval_perplexity_per_token"]) == pytest.approx(measured["eval_loss"], rel=0.2)


def test_evaluation_script_gives_the_same_scores(run_dir, corpus, tmp_path, monkeypatch):
    path, results = corpus / "held_out.txt", tmp_path / "results.json"
    options = ["--model", run_dir, "--files", path, "--results_file", results, "--notes", "seed=1", "--device", "cpu"]
    assert run_here(monkeypatch, "evaluate_gpt.py", *options) == 0
    report, expected = json.loads(results.read_text()), json.loads((run_dir / "eval_results.json").read_text())
    for name, value in report["files"][str(path)].items():
        assert value == pytest.approx(expected[f"eval_{name}"], rel=1e-3)  # rounded to 4 digits
    assert (report["context_length"], report["notes"]) == (16, {"seed": "1"})
    names = {score.name for score in list_scores(report)}
    assert names == {"perplexity per word", "bits per byte", "perplexity per token"}
    assert names == {score.name for score in list_scores(results_of_folder(run_dir))}


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_evaluation_script_refuses_devices_that_are_not_here(run_dir, corpus, monkeypatch, capsys, device):
    options = ["--model", run_dir, "--files", corpus / "held_out.txt", "--device", device]
    assert run_here(monkeypatch, "evaluate_gpt.py", *options) == 2
    assert f"--device must be auto or a device of this machine, such as cpu, got {device!r}" in capsys.readouterr().err


def test_evaluation_script_refuses_an_empty_context(run_dir, corpus, monkeypatch, capsys):
    options = ["--model", run_dir, "--files", corpus / "held_out.txt", "--device", "cpu", "--context_length", 0]
    assert run_here(monkeypatch, "evaluate_gpt.py", *options) == 1
    assert "error: `context_length` must be between 2 and the model's positions (16), got 0" in capsys.readouterr().err


def test_changed_options_are_refused(run_dir, corpus, monkeypatch, capsys):
    options = [*files(corpus), "--output_dir", run_dir, "--block_length", 8]
    assert run_here(monkeypatch, SCRIPT, *options) == 1
    assert "error: `block_length` is 8, not the 16 that the run in" in capsys.readouterr().err


@pytest.mark.slow
def test_stream_is_resumed_to_the_same_bits_after_several_passes(corpus, tmp_path):
    arguments = [*files(corpus), "--save_steps", 6, "--streaming", "--output_dir", tmp_path / "run"]
    train_and_resume(SCRIPT, [*arguments, "--per_device_train_batch_size", 64], tmp_path / "run")
    state = json.loads((tmp_path / "run" / "checkpoint-6" / "stream_state.json").read_text())
    assert state["stream"]["buffer_start"]["source"]["pass"] > 0


@pytest.mark.parametrize("kind", [["--streaming"], ["--separate_documents"]], ids=["stream", "documents"])
def test_further_pretraining_of_a_foreign_model(run_dir, corpus, tmp_path, monkeypatch, kind):
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, vocab_size=290, eos_token_id=1, bos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    AutoTokenizer.from_pretrained(run_dir).save_pretrained(tmp_path / "gpt2")
    options = [*files(corpus)[:4], *TINY[8:]]  # all but sizes and vocabulary
    options += ["--model_name_or_path", tmp_path / "gpt2", *kind, "--max_steps", 4, "--output_dir", tmp_path / "run"]
    assert run_here(monkeypatch, SCRIPT, *options) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("gpt2", "run"))
    name = "transformer.wte.weight"
    assert 0 < (before[name] - after[name]).abs().max() < 0.2


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ([], 1, "Pass either `dataset_name` or `train_files`, got neither"),
        (["--train_files", "nowhere.txt"], 1, "there is no file"),
        (["--hidden_size", "13"], 1, "`hidden_size` (13) must be"),
        (["--streaming", "--max_steps", "-1"], 1, "`max_steps` is missing"),
        (["--preset", "huge"], 2, "error: `preset` must be one of gpt1, tiny, "),
        (["--model_name_or_path", "RUN"], 1, "`hidden_size` can't be changed in a trained model"),
    ],
    ids=["nothing", "file", "sizes", "stream", "preset", "trained"],
)
def test_bad_input_ends_in_one_line(run_dir, tmp_path, monkeypatch, capsys, options, status, message):
    options = [run_dir if option == "RUN" else option for option in options]
    assert run_here(monkeypatch, SCRIPT, *TINY, *options, "--output_dir", tmp_path / "run") == status
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
