"""Training a translator from two text files: resuming, translation, evaluation, bad input."""

import json
import shutil

import pytest
from script_runner import run, run_here, train_and_resume
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla.data import date_corpus
from hf_vanilla.hub.card import card_of_folder


TINY = [
    "--vocab_size", "300", "--d_model", "16", "--d_ff", "24", "--num_heads", "4", "--encoder_layers", "1",
    "--decoder_layers", "2", "--warmup_steps", "10", "--max_tokens_per_batch", "512", "--save_steps", "4",
    "--logging_steps", "4", "--disable_tqdm", "true", "--use_cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    pairs = date_corpus(300)
    for split, rows in (("train", range(260)), ("val", range(260, 300))):
        for side, column in (("src", "source"), ("tgt", "target")):
            text = "".join(f"{pairs[row][column]}\n" for row in rows)
            (folder / f"{split}.{side}").write_text(text, encoding="utf-8")
    return folder


def text_files(corpus):
    return [
        "--train_source_file", corpus / "train.src", "--train_target_file", corpus / "train.tgt",
        "--validation_source_file", corpus / "val.src", "--validation_target_file", corpus / "val.tgt",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(corpus, tmp_path_factory):
    """A run that is resumed after 7 of 12 steps."""
    output_dir = tmp_path_factory.mktemp("runs") / "dates"
    options = ["--output_dir", output_dir, "--average_last", 2, "--generation_max_length", 14]
    arguments = [*text_files(corpus), *TINY, *options]
    first = run("train_translation.py", *arguments, "--max_steps", 7)  # two checkpoints: the last step has one
    assert first.returncode == 0, first.stderr
    refused = run("train_translation.py", *arguments, "--max_steps", 12, "--learning_rate", 0.1)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: `learning_rate` is 0.1, not the default that the run in")
    second = run("train_translation.py", *arguments, "--max_steps", 12)
    assert second.returncode == 0, second.stderr
    assert f"Resuming from {output_dir}/checkpoint-7" in second.stderr
    return output_dir


@pytest.mark.slow
def test_resumed_training_ends_with_an_averaged_model(run_dir):
    state = json.loads((run_dir / "trainer_state.json").read_text())
    assert state["global_step"] == 12
    results = json.loads((run_dir / "all_results.json").read_text())
    assert 0 < results["eval_loss"] < 10
    assert {"eval_bleu", "eval_chrf", "eval_perplexity"} <= results.keys()
    model = AutoModelForSeq2SeqLM.from_pretrained(run_dir)
    averaged = AutoModelForSeq2SeqLM.from_pretrained(run_dir / "averaged")
    checkpoints = [AutoModelForSeq2SeqLM.from_pretrained(run_dir / f"checkpoint-{step}") for step in (8, 12)]
    for name, weight in model.state_dict().items():
        mean = sum(each.state_dict()[name] for each in checkpoints) / 2
        assert weight.equal(averaged.state_dict()[name])
        assert (weight - mean).abs().max() < 1e-6
    assert len(AutoTokenizer.from_pretrained(run_dir)) == model.config.vocab_size
    assert "weights: the mean of the last 2 checkpoints" in str(card_of_folder(run_dir, "someone/model"))


@pytest.mark.slow
def test_trained_model_translates_a_file(run_dir, corpus, tmp_path):
    translated = run("translate.py", "--model", run_dir, "--input", corpus / "val.src", "--output", tmp_path / "out")
    assert translated.returncode == 0, translated.stderr
    assert (tmp_path / "out").read_text().count("\n") == 40
    files = ["--hypotheses", tmp_path / "out", "--references", corpus / "val.tgt"]
    files += ["--output_file", tmp_path / "r.json"]
    evaluated = run("evaluate_translation.py", *files, "--notes", "seed=1", "--commands", "python train.py")
    assert evaluated.returncode == 0, evaluated.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["sentences"] == 40
    assert (result["notes"], result["commands"]) == ({"seed": "1"}, ["python train.py"])
    assert 0 <= result["bleu"] <= 100


@pytest.mark.promise("odd text")
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["a\nb\n", "a\n"],
            "`hypotheses` and `references` must have equally many lines, but {0} has 2 and {1} has 1; ",
        ),
        (["", ""], "`hypotheses` must have at least one line, but {0} is empty."),
    ],
    ids=["unequal", "empty"],
)
def test_unequal_or_empty_files_end_in_one_line(tmp_path, lines, message):
    files = [tmp_path / "out.de", tmp_path / "test.de"]
    for file, text in zip(files, lines, strict=True):
        file.write_text(text)
    evaluated = run("evaluate_translation.py", "--hypotheses", files[0], "--references", files[1])
    assert evaluated.returncode == 1
    assert evaluated.stderr.startswith(f"error: {message.format(*files)}")


def test_inputs_are_not_overwritten(tmp_path, monkeypatch, capsys):
    for name in ("out.de", "test.de"):
        (tmp_path / name).write_text("a\n")
    given = ["--hypotheses", tmp_path / "out.de", "--references", tmp_path / "test.de"]
    assert run_here(monkeypatch, "evaluate_translation.py", *given, "--output_file", tmp_path / "test.de") == 2
    assert "error: `output_file` must be another file than `references`" in capsys.readouterr().err
    assert (tmp_path / "test.de").read_text() == "a\n"
    assert (
        run_here(monkeypatch, "evaluate_translation.py", *given, "--output_file", tmp_path / "new" / "bleu.json") == 0
    )
    assert json.loads((tmp_path / "new" / "bleu.json").read_text())["sentences"] == 1


def test_too_few_checkpoints_to_average_are_found_before_the_training(corpus, tmp_path):
    options = [
        "--num_train_epochs",
        2,
        "--save_strategy",
        "epoch",
        "--average_last",
        3,
        "--output_dir",
        tmp_path / "run",
    ]
    finished = run("train_translation.py", *text_files(corpus), *TINY, *options)
    assert finished.returncode == 1
    assert "error: `average_last` (3) checkpoints can't be averaged: this run of" in finished.stderr
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_metrics_are_chosen(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text("a b c d\n")
    given = ["--hypotheses", tmp_path / "text", "--references", tmp_path / "text", "--metrics"]
    assert run_here(monkeypatch, "evaluate_translation.py", *given, "chrf++", "ter") == 0
    scores = json.loads(capsys.readouterr().out)
    assert (scores["chrf++"], scores["ter"]) == (100, 0)
    assert "bleu" not in scores
    assert run_here(monkeypatch, "evaluate_translation.py", *given, "rouge") == 2
    assert "error: `metrics` must be among bleu, chrf, chrf++, ter, comet; got 'rouge'" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--baseline", "b"], ["--bootstrap_samples", 9], ["--lowercase"]])
def test_options_without_effect_on_comet_are_refused(monkeypatch, capsys, options):
    given = ["--hypotheses", "h", "--references", "r", "--sources", "s", "--metrics", "comet", *options]
    assert run_here(monkeypatch, "evaluate_translation.py", *given) == 2
    assert f"error: `{options[0][2:]}` has no effect on comet" in capsys.readouterr().err


@pytest.mark.slow
def test_separate_vocabularies(corpus, tmp_path, monkeypatch):
    output_dir = tmp_path / "run"
    trained = run(
        "train_translation.py", *text_files(corpus), *TINY, "--output_dir", output_dir, "--max_steps", 2,
        "--separate_vocabularies", "--no_predict_with_generate",
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    model = AutoModelForSeq2SeqLM.from_pretrained(output_dir)
    assert model.config.source_vocab_size == len(AutoTokenizer.from_pretrained(output_dir))
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(output_dir, subfolder="target_tokenizer"))
    assert model.model.encoder.embed_tokens.weight is not model.model.decoder.embed_tokens.weight
    translated = run("translate.py", "--model", output_dir, stdin="March 3rd, 1998\n\n1998/3/3\n")
    assert translated.returncode == 0, translated.stderr
    lines = translated.stdout.split("\n")
    assert len(lines) == 4
    assert lines[1] == ""
    for path in (*output_dir.glob("*.json"), *output_dir.glob("*.safetensors"), *output_dir.glob("checkpoint-*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()  # as if killed before the first checkpoint
    options = [*text_files(corpus), *TINY, "--output_dir", output_dir, "--max_steps", 2, "--no_predict_with_generate"]
    assert run_here(monkeypatch, "train_translation.py", *options) == 0
    assert not (output_dir / "target_tokenizer").exists()


@pytest.mark.slow
def test_streamed_training_is_resumed_to_the_same_bits(corpus, tmp_path):
    arguments = [*text_files(corpus), *TINY, "--streaming", "--stream_buffer", 100, "--output_dir", tmp_path / "run"]
    train_and_resume("train_translation.py", [*arguments, "--save_steps", 6, "--max_steps", 10], tmp_path / "run")
    assert "eval_bleu" in json.loads((tmp_path / "run" / "all_results.json").read_text())


def test_streams_need_a_number_of_updates(corpus, tmp_path, monkeypatch, capsys):
    options = [*text_files(corpus), *TINY, "--streaming", "--output_dir", tmp_path / "run"]
    assert run_here(monkeypatch, "train_translation.py", *options) == 1
    assert "error: `max_steps` is missing; `streaming` data has no known length" in capsys.readouterr().err


def test_help_has_every_group_of_options():
    shown = run("train_translation.py", "--help")
    assert shown.returncode == 0
    options = ["train_source_file", "max_tokens_per_batch", "average_last", "norm_position", "output_dir"]
    assert [option for option in options if f"--{option}" not in shown.stdout] == []


@pytest.mark.promise("NaN")
def test_diverging_training_with_stock_batches_saves_nothing(corpus, tmp_path):
    sizes = TINY[: TINY.index("--max_tokens_per_batch")]
    options = ["--use_cpu", "--max_steps", 6, "--save_steps", 4, "--learning_rate", "1e38"]
    result = run("train_translation.py", *text_files(corpus), *sizes, *options, "--output_dir", tmp_path / "run")
    assert result.returncode == 1
    assert "error: The training loss is nan at step 2 (rows 1 " in result.stderr
    assert not list((tmp_path / "run").rglob("*.safetensors"))


@pytest.mark.promise("folder not writable")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output_dir", "/proc/nothing"], "`output_dir` (/proc/nothing) must be a folder that can be written to"),
        (["--train_source_file", "a"], "Pass both of `train_source_file` and `train_target_file`, or neither"),
        (["--norm_position", "middle"], "invalid choice: 'middle'"),
        (["--preset", "bsae"], "`preset` must be one of base, A_heads_1, "),
        (["--d_model", "18"], "`d_model` (18) must be divisible by `num_heads` (4)"),
        (
            ["--train_source_file", "a", "--train_target_file", "b"],
            "`train_source_file` must be an existing file, but there is no file a",
        ),
        (
            ["--average_last", "2", "--eval_strategy", "steps", "--eval_steps", "4", "--load_best_model_at_end"],
            "`average_last` can't be combined with `load_best_model_at_end`",
        ),
        (
            ["--average_last", "2", "--save_strategy", "best", "--metric_for_best_model", "loss"],
            "`average_last` (2) needs checkpoints of all intervals",
        ),
        (
            ["--position_type", "learned", "--max_source_length", "513"],
            "`max_source_length` (513) must be at most 512, the learned positions of the model",
        ),
        (
            ["--tokenizer_name_or_path", "x", "--lowercase"],
            "`lowercase` (True) is for a tokenizer to train, and has no effect beside",
        ),
    ],
    ids=[
        *("unwritable", "one side", "nonsense", "preset", "sizes", "missing", "average of the best", "best ones"),
        *("positions", "unused"),
    ],
)
def test_bad_options_end_before_any_work(corpus, tmp_path, arguments, message):
    files = [] if "--train_source_file" in arguments else text_files(corpus)
    result = run("train_translation.py", *files, *TINY, "--max_steps", 2, "--output_dir", tmp_path / "run", *arguments)
    assert result.returncode != 0
    assert message in result.stderr
    assert not (tmp_path / "run").exists()
