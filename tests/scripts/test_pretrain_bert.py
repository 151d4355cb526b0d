"""Pre-training from documents: resuming, evaluation, further pre-training, bad input."""

import json
import os
import re
import runpy
import shutil

import pytest
from safetensors.torch import load_file, save_file
from script_runner import SCRIPTS, run, run_here, train_and_resume, write_documents
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

import hf_vanilla
from hf_vanilla.data import load_documents
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer


SCRIPT = "pretrain_bert.py"
TINY = [
    "--preset", "tiny", "--hidden_size", "16", "--num_attention_heads", "4", "--intermediate_size", "24",
    "--vocab_size", "90", "--max_tokens_per_batch", "256", "--phase_lengths", "16", "32", "--warmup_steps", "2",
    "--validation_length", "16", "--learning_rate", "0.01", "--logging_steps", "2", "--disable_tqdm", "true",
    "--use_cpu",
]  # fmt: skip


def files_and_steps(corpus):
    return [
        "--train_files", corpus / "train.txt", "--validation_files", corpus / "held_out.txt", *TINY,
        "--max_steps", 10, "--save_steps", 6,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run_dir(corpus, tmp_path_factory):
    """A run that is resumed after 6 of 10 updates."""
    output_dir = tmp_path_factory.mktemp("runs") / "bert"
    arguments = [*files_and_steps(corpus), "--output_dir", output_dir]
    train_and_resume(SCRIPT, arguments, output_dir)
    return output_dir


def test_model_fills_masks(run_dir):
    model = AutoModelForMaskedLM.from_pretrained(run_dir)
    assert type(model) is hf_vanilla.VanillaBertForMaskedLM
    tokenizer = AutoTokenizer.from_pretrained(run_dir)
    assert model.config.vocab_size == len(tokenizer)
    found = pipeline("fill-mask", model=model, tokenizer=tokenizer)("the [MASK] has 4 legs .")
    assert len(found) == 5


def test_metrics_are_saved(run_dir):
    measured = json.loads((run_dir / "eval_results.json").read_text())
    assert {"eval_mlm_loss", "eval_mlm_accuracy", "eval_nsp_accuracy"} <= measured.keys()
    assert measured["eval_mlm_loss"] > 0
    state = json.loads((run_dir / "trainer_state.json").read_text())
    assert state["global_step"] == 10


def test_evaluation_script_gives_the_same_metrics(run_dir, corpus, tmp_path):
    finished = run(
        "evaluate_bert.py", "--model", run_dir, "--files", corpus / "held_out.txt", corpus / "train.txt",
        "--max_length", 16, 32, "--by_position", 5, "--seed", 42, "--results_file", tmp_path / "result.json",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    report = json.loads((tmp_path / "result.json").read_text())
    found = report["files"][f"{corpus / 'held_out.txt'}, 16 tokens"]
    assert (found["documents"], report["files"][f"{corpus / 'train.txt'}, 16 tokens"]["documents"]) == (8, 40)
    for each, bins in ((found, 4), (report["files"][f"{corpus / 'held_out.txt'}, 32 tokens"], 7)):
        losses, tokens = each["by_position"]["loss"], each["by_position"]["tokens"]
        total = sum(loss * count for loss, count in zip(losses, tokens, strict=True) if count)
        assert len(losses) == bins
        assert total / sum(tokens) == pytest.approx(each["mlm_loss"], abs=1e-3)  # both are rounded
    assert report["vocabulary"] == len(AutoTokenizer.from_pretrained(run_dir))
    expected = json.loads((run_dir / "eval_results.json").read_text())
    assert found["nsp_accuracy"] == pytest.approx(expected["eval_nsp_accuracy"], abs=1e-4)  # the same pairs
    assert found["mlm_loss"] == pytest.approx(expected["eval_mlm_loss"], rel=0.2)  # other masks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--hidden_size", 24], "error: `hidden_size` is 24, not the 16 that the run in"),
        (["--vocab_size", 80], "error: `vocab_size` is 80, not the 90 that the run in"),
        (["--train_files", "held_out.txt"], "error: `train_files` has other contents than those that the run in"),
    ],
    ids=["size", "vocabulary", "corpus"],
)
def test_changed_options_are_refused(run_dir, corpus, monkeypatch, capsys, change, message):
    monkeypatch.chdir(corpus)
    before = {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    options = [*files_and_steps(corpus), "--output_dir", run_dir, *change]
    assert run_here(monkeypatch, SCRIPT, *options) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(message)
    assert error.endswith("as `model_name_or_path` can start from.")
    assert {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()} == before


def test_checkpoint_of_another_run_is_resumed_with_its_tokenizer(run_dir, corpus, tmp_path, monkeypatch):
    options = [*files_and_steps(corpus), "--resume_from_checkpoint", run_dir / "checkpoint-6"]
    assert run_here(monkeypatch, SCRIPT, *options, "--output_dir", tmp_path / "other") == 0
    expected, found = (load_file(folder / "model.safetensors") for folder in (run_dir, tmp_path / "other"))
    assert all(tensor.equal(found[name]) for name, tensor in expected.items())
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (run_dir, tmp_path / "other")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()


def test_model_without_next_sentence_head_is_evaluated_on_masked_tokens(
    run_dir, corpus, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "mlm"
    AutoModelForMaskedLM.from_pretrained(run_dir).save_pretrained(folder)
    AutoTokenizer.from_pretrained(run_dir).save_pretrained(folder)
    options = ["--model", folder, "--files", corpus / "held_out.txt", "--max_length", 16]
    monkeypatch.chdir(tmp_path)
    assert run_here(monkeypatch, "evaluate_bert.py", *options) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    assert found.keys() == {"mlm_loss", "mlm_accuracy", "documents", "segments"}
    assert os.listdir(tmp_path) == ["mlm"]
    lines = (corpus / "held_out.txt").read_text().splitlines()
    rows = [json.dumps({"content": line}) for line in lines if line.strip()]  # no document has two sentences
    (tmp_path / "sentences.jsonl").write_text("\n".join(rows))
    assert run_here(monkeypatch, "evaluate_bert.py", *options[:2], "--files", "sentences.jsonl", *options[4:]) == 0


def test_evaluation_refuses_nan_and_an_empty_batch(run_dir, corpus, tmp_path, monkeypatch, capsys):
    shutil.copytree(run_dir, tmp_path / "broken")
    weights = load_file(run_dir / "model.safetensors")
    save_file({name: each * float("nan") for name, each in weights.items()}, tmp_path / "broken" / "model.safetensors")
    options = ["--model", tmp_path / "broken", "--files", corpus / "held_out.txt", "--max_length", 16]
    options += ["--results_file", tmp_path / "result.json"]
    assert run_here(monkeypatch, "evaluate_bert.py", *options) == 1
    assert re.search("broken.* nan", capsys.readouterr().err)
    assert run_here(monkeypatch, "evaluate_bert.py", *options, "--batch_size", 0) == 2
    assert "`batch_size` must be at least 1 example, got 0" in capsys.readouterr().err
    assert run_here(monkeypatch, "evaluate_bert.py", *options, "--mlm_probability", 0) == 2
    assert "`mlm_probability` must be above 0 and below 1, got 0" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["broken"]


def test_phases_have_rates_new_positions_and_validation_of_their_own(corpus, tmp_path, monkeypatch):
    options = [*files_and_steps(corpus), "--phase_shares", 0.6, 0.4, "--phase_learning_rates", 0.01, 0.02]
    options += ["--phase_warmup_steps", 2, 3, "--new_positions", "repeat", "--validation_lengths", 16, 32]
    options += ["--logging_steps", 1, "--eval_strategy", "steps", "--eval_steps", 5, "--output_dir", tmp_path / "run"]
    assert run_here(monkeypatch, SCRIPT, *options) == 0
    measured = json.loads((tmp_path / "run" / "eval_results.json").read_text())
    assert {f"eval_{length}_tokens_{name}" for length in (16, 32) for name in ("mlm_loss", "nsp_accuracy")} < set(
        measured
    )
    log = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "eval_32_tokens_mlm_loss" in entry][:2] == [5, 10]
    rates = [entry["learning_rate"] for entry in log if "learning_rate" in entry]
    expected = [0, 0.005, 0.01, 0.00875, 0.0075, 0.00625, 0.005, 0.01, 0.015, 0.02]  # the second phase starts at 6
    assert rates == pytest.approx(expected, abs=1e-9)


def test_embeddings_from_the_examples_and_muon(run_dir, corpus, tmp_path):
    plain = [*files_and_steps(corpus), "--max_steps", 1, "--learning_rate", 1e-9, "--output_dir"]
    options = ["--initial_embeddings", "examples", "--muon"]
    train_and_resume(SCRIPT, [*files_and_steps(corpus), *options, "--output_dir", tmp_path / "run"], tmp_path / "run")
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == 10
    assert run(SCRIPT, *plain, tmp_path / "start", *options).returncode == 0
    measured = [json.loads((tmp_path / name / "eval_results.json").read_text()) for name in ("start", "run")]
    assert measured[1]["eval_mlm_loss"] < measured[0]["eval_mlm_loss"]
    bias = load_file(tmp_path / "start" / "model.safetensors")["cls.predictions.bias"]
    assert bias.exp().sum() == pytest.approx(1, abs=0.1)  # frequencies


def test_short_examples_teach_late_positions_when_shifted(corpus, tmp_path):
    options = [*files_and_steps(corpus), "--weight_decay", 0, "--phase_shares", 1, 0, "--output_dir"]
    shifted = ["--shifted_positions", 0.5]
    train_and_resume(SCRIPT, [*options, tmp_path / "run", *shifted], tmp_path / "run")
    positions = {}
    for name, changes in (("plain", []), ("start", ["--learning_rate", 1e-9]), ("shifted", shifted)):
        folder = tmp_path / name
        assert run(SCRIPT, *options, folder, *changes).returncode == 0
        positions[name] = load_file(folder / "model.safetensors")["bert.embeddings.position_embeddings.weight"]
    changed = {name: (each - positions["start"]).abs().amax(1) > 1e-6 for name, each in positions.items()}
    assert changed["plain"].nonzero().flatten().tolist() == list(range(16))
    assert changed["shifted"][:16].all()
    assert changed["shifted"].float().mean() > 0.5
    resumed = load_file(tmp_path / "run" / "model.safetensors")["bert.embeddings.position_embeddings.weight"]
    assert resumed.equal(positions["shifted"])


def test_validation_has_the_given_share_of_masks(corpus):
    module = runpy.run_path(str(SCRIPTS / SCRIPT))
    documents = load_documents(data_files=str(corpus / "held_out.txt"))
    tokenizer = train_wordpiece_tokenizer(documents["text"][:], 90, show_progress=False)
    data_args = module["DataArguments"](
        phase_lengths=[16], phase_shares=[1.0], validation_lengths=[16], mlm_probability=0.5
    )
    _, held_out = module["build_examples"](
        module["ModelArguments"](), data_args, {"train": documents, "validation": documents}, tokenizer, 0
    )
    for row in held_out:
        assert sum(label != -100 for label in row["labels"]) == round(len(row["labels"]) * 0.5)


def test_further_pretraining_without_next_sentences(run_dir, corpus, tmp_path):
    output_dir = tmp_path / "domain"
    options = [option for option in TINY[8:] if option not in ("--vocab_size", "90")]
    finished = run(
        SCRIPT, "--model_name_or_path", run_dir, "--train_files", corpus / "held_out.txt",
        "--no_next_sentence_prediction", "--whole_word_mask", *options, "--max_steps", 4, "--output_dir", output_dir,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    before, after = (load_file(folder / "model.safetensors") for folder in (run_dir, output_dir))
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert 0 < (before[name] - after[name]).abs().max() < 0.5
    assert not any("seq_relationship" in name for name in after)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Pass either `dataset_name` or `train_files`, got neither"),
        (["--train_files", "nowhere.txt"], "there is no file"),
        (["--phase_shares", "0.5", "0.4"], "`phase_shares` must add up to 1"),
        (["--phase_lengths", "16"], "must be equal in number"),
        (["--shifted_positions", "-0.1"], "`shifted_positions` must be from 0 to 1, got -0.1"),
        (["--mlm_probability", "1"], "`mlm_probability` must be above 0 and below 1, got 1"),
        (["--hidden_size", "13"], "`hidden_size` (13) must be"),
        (["--phase_warmup_steps", "2", "1"], "`phase_learning_rates` and `phase_warmup_steps` go together"),
        (
            ["--phase_warmup_steps", "2", "--phase_learning_rates", "1", "1"],
            "`phase_warmup_steps` ([2]) must have a number for each of [16, 32]",
        ),
        (
            ["--early_stopping_patience", "2", "--eval_strategy", "steps", "--validation_lengths", "16", "32"],
            "`validation_lengths` must be one length",
        ),
        (
            ["--phase_warmup_steps", "2", "3", "--phase_learning_rates", "1", "1"],
            "`phases` must have warm-ups from 0 to their numbers of updates, got 3 of 0",
        ),
        (["--new_positions", "repeat", "--model_name_or_path", "bert"], "`new_positions` (repeat) is for a new model"),
        (
            ["--new_positions", "repeat", "--shifted_positions", "0.5"],
            "`new_positions` (repeat) would replace what `shifted_positions` (0.5) has taught",
        ),
        (["--no_next_sentence_prediction", "--repeats", "2"], "`repeats` (2) is for pairs of segments"),
        (
            ["--initial_embeddings", "examples", "--model_name_or_path", "bert"],
            "`initial_embeddings` (examples) is for a new model",
        ),
    ],
    ids=[
        "nothing",
        "file",
        "shares",
        "lengths",
        "shifted",
        "percent",
        "sizes",
        "warm-up alone",
        "rates",
        "best",
        "long warm-up",
        "positions",
        "positions learned",
        "repeats",
        "embeddings",
    ],
)
def test_bad_input_ends_in_one_line(corpus, tmp_path, monkeypatch, capsys, options, message):
    given = [] if not options or "--train_files" in options else ["--train_files", corpus / "train.txt"]
    options = [*given, *TINY, *options, "--max_steps", 4, "--output_dir", tmp_path / "run"]
    assert run_here(monkeypatch, SCRIPT, *options) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_preset_is_checked_first(corpus, tmp_path):
    finished = run(SCRIPT, "--train_files", corpus / "train.txt", "--preset", "huge", "--output_dir", tmp_path / "run")
    assert finished.returncode == 2
    assert "error: `preset` must be one of base, large, tiny, " in finished.stderr
    assert not (tmp_path / "run").exists()


def test_help_shows_examples_and_options():
    finished = run(SCRIPT, "--help")
    assert finished.returncode == 0
    assert "--train_files encyclopedia.jsonl.gz novels.txt" in finished.stdout
    for option in ("--phase_lengths", "--whole_word_mask", "--max_tokens_per_batch"):
        assert option in finished.stdout
