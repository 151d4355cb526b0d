"""The command line of scripts/score.py."""

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_vanilla.generation import load_translator, score_texts, translate


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "generation"))

from text_translator import SENTENCES, save_translator  # noqa: E402


SCRIPT = ROOT / "scripts" / "score.py"
SOURCES = [SENTENCES[1], "x", "", SENTENCES[0]]
TARGETS = [SENTENCES[1], "12", "x", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_translator(tmp_path_factory.mktemp("model"))


@pytest.fixture
def files(tmp_path):
    (tmp_path / "source").write_text("".join(f"{line}\n" for line in SOURCES))
    (tmp_path / "target").write_bytes("\r\n".join(TARGETS).encode() + b"\r\n")
    return ["--source", str(tmp_path / "source"), "--target", str(tmp_path / "target")]


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("score_script", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules["score_script"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def run(script, monkeypatch, capfd, folder):
    """Call the script's main function; return status, standard output and standard error."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["score.py", "--model", folder, "--device", "cpu", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            status = script.run(script.main)
        except SystemExit as exit:
            status = exit.code
        return status, *capfd.readouterr()

    return run


def expected(folder, **options):
    model, tokenizer, _ = load_translator(folder)
    return [each.score for each in score_texts(model, tokenizer, SOURCES, TARGETS, **options)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"length_penalty": 0.6},
        {"length_penalty": 1.0, "length_penalty_type": "power"},
        {"max_length": 4, "max_tokens_per_batch": 1},
    ],
    ids=["log probabilities", "gnmt", "power", "cut"],
)
def test_every_pair_has_a_score(run, folder, files, tmp_path, options):
    arguments = [argument for name, value in options.items() for argument in (f"--{name}", value)]
    status, out, err = run(*files, "--output", tmp_path / "out", *arguments)
    assert (status, out) == (0, "")
    assert "4/4" in err
    scores = [float(line) for line in (tmp_path / "out").read_text().removesuffix("\n").split("\n")]
    assert scores == pytest.approx(expected(folder, **options), abs=1e-4)
    assert len({round(score, 2) for score in scores}) == 4


def test_scores_equal_those_of_translations(run, folder, tmp_path):
    model, tokenizer, _ = load_translator(folder)
    [[translation]] = translate(model, tokenizer, [SENTENCES[0]])
    (tmp_path / "target").write_text(translation.text)
    arguments = ["--source", "-", "--target", tmp_path / "target", "--length_penalty", "0.6"]
    status, out, _ = run(*arguments, stdin=SENTENCES[0].encode())
    assert status == 0
    assert float(out) == pytest.approx(translation.score, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 1, "Source and target must have equally many lines, but {0}/source has 4 and {0}/short has 3;"),
        (["--target", "{0}/latin"], 1, "latin must be UTF-8, but line 1 is not"),
        (["--source", "{0}/missing"], 1, "missing can't be read: No such file"),
        (["--output", "{0}/latin", "--target", "{0}/latin"], 1, "`output` must be another file than `target`, but"),
        (["--output", "{0}/missing/out"], 1, "out can't be written: No such file"),
        (["--source", "-", "--target", "-"], 2, "--source and --target can't both be standard input (-)"),
        (["--max_length", "0"], 2, "--max_length must be at least 1, got 0"),
        (["--max_tokens_per_batch", "0"], 2, "--max_tokens_per_batch must be at least 1, got 0"),
        (["--device", "tpu9"], 2, "--device must be auto or a device of this machine, such as cpu, got 'tpu9': "),
        (["--device", "cuda:99"], 2, "such as cpu, got 'cuda:99': "),
    ],
)
def test_score_names_bad_input(run, files, tmp_path, arguments, status, message):
    (tmp_path / "latin").write_bytes(b"\xe4\n")
    (tmp_path / "short").write_text("a\nb\nc\n")
    given = [*files, "--target", tmp_path / "short", *(argument.format(tmp_path) for argument in arguments)]
    got, out, err = run(*given)
    assert (got, out) == (status, "")
    assert message.format(tmp_path) in err
    assert "Traceback" not in err
    assert sorted(os.listdir(tmp_path)) == ["latin", "short", "source", "target"]


def test_score_help_lists_options(run):
    status, out, _ = run("--help")
    assert status == 0
    assert "python scripts/score.py --model runs/en-de --source test.en --target test.de --output test.scores" in out
    assert out.count("(default:") == 6


@pytest.mark.slow
def test_two_processes_share_the_pairs(folder, files, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", SCRIPT]
    arguments = ["--model", folder, *files, "--output", tmp_path / "out", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2/2" in done.stderr
    scores = [float(line) for line in (tmp_path / "out").read_text().removesuffix("\n").split("\n")]
    assert scores == pytest.approx(expected(folder), abs=1e-4)
