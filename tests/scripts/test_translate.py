"""The command line of scripts/translate.py."""

import gzip
import importlib.util
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import HfArgumentParser

from hf_vanilla.generation import Translation, WordAlignment, load_translator, translate


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "generation"))

from text_translator import SENTENCES, save_translator  # noqa: E402


SCRIPT = ROOT / "scripts" / "translate.py"
INPUT = [SENTENCES[1], "", "x", " ", SENTENCES[0], "unbekannt </s> \x00"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_translator(tmp_path_factory.mktemp("model"))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes("".join(f"{line}\n" for line in INPUT).encode())
    return str(path)


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("translate_script", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules["translate_script"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def run(script, monkeypatch, capfd, folder):
    """Call the script's main function; return status, standard output and standard error."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["translate.py", "--model", folder, "--device", "cpu", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            status = script.run(script.main)
        except SystemExit as exit:
            status = exit.code
        return status, *capfd.readouterr()

    return run


def expected(folder, **options):
    model, tokenizer, _ = load_translator(folder)
    return translate(model, tokenizer, INPUT, **options)


def test_every_line_has_a_translation(run, folder, source, tmp_path):
    status, out, err = run("--input", source, "--output", tmp_path / "out")
    assert (status, out) == (0, "")
    assert "4/4" in err  # the progress bar: two lines have no words
    lines = (tmp_path / "out").read_bytes().decode().split("\n")
    assert lines == [*(row[0].text for row in expected(folder)), ""]
    assert lines[:5] == [SENTENCES[1], "", "x", "", SENTENCES[0]]


def test_standard_input_is_translated_to_standard_output(run):
    status, out, _ = run(stdin=b"\xef\xbb\xbfx\r\n\r\nein mann rennt .")
    assert (status, out) == (0, "x\n\nein mann rennt .\n")
    assert run(stdin=b"")[:2] == (0, "")


def test_gzip_input_is_decompressed(run, tmp_path):
    (tmp_path / "source.gz").write_bytes(gzip.compress(b"x\n"))
    assert run("--input", tmp_path / "source.gz")[:2] == (0, "x\n")


def test_n_best_lists_are_like_those_of_moses(run, folder, source):
    status, out, _ = run("--input", source, "--n_best", 3, "--num_beams", 5)
    rows = [line.split(" ||| ") for line in out.removesuffix("\n").split("\n")]
    assert status == 0
    flat = [
        (str(number), each.text, each.score)
        for number, row in enumerate(expected(folder, n_best=3, num_beams=5))
        for each in row
    ]
    assert [tuple(row[:2]) for row in rows] == [row[:2] for row in flat]
    assert [float(row[2]) for row in rows] == pytest.approx([row[2] for row in flat], abs=2e-4)
    assert [row[0] for row in rows] == list("0001222344455 5".replace(" ", ""))


def test_scores_and_alignments_are_columns(run, folder, source):
    status, out, _ = run("--input", source, "--scores", "--alignments")
    assert status == 0
    rows = [line.split("\t") for line in out.removesuffix("\n").split("\n")]
    wanted = [row[0] for row in expected(folder, with_alignments=True)]
    assert [row[0] for row in rows] == [each.text for each in wanted]
    assert [float(row[1]) for row in rows] == pytest.approx([each.score for each in wanted], abs=2e-4)
    assert [row[2] for row in rows] == [str(each.alignment) for each in wanted]
    assert rows[1] == ["", "0.0000", ""]
    assert rows[2][2] == "0-0"


def test_options_reach_the_search(run, script, folder, source, caplog, monkeypatch):
    spy = Mock(wraps=translate)
    monkeypatch.setattr(script, "translate", spy)
    options = {
        "num_beams": 2,
        "length_penalty": 2.0,
        "length_penalty_type": "power",
        "max_length_offset": 1,
        "max_source_length": 5,
        "max_tokens_per_batch": 6,
    }
    arguments = [argument for name, value in options.items() for argument in (f"--{name}", value)]
    status, out, _ = run("--input", source, *arguments, "--scores")
    assert status == 0
    assert options.items() <= spy.call_args.kwargs.items()
    wanted = [row[0] for row in expected(folder, **options)]
    rows = [line.split("\t") for line in out.removesuffix("\n").split("\n")]
    assert [row[0] for row in rows] == [each.text for each in wanted]
    assert [float(row[1]) for row in rows] == pytest.approx([each.score for each in wanted], abs=2e-4)
    assert wanted != [row[0] for row in expected(folder)]
    assert "3 of 4 texts were truncated to 5 tokens" in caplog.text


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], "a b c\td\n"),
        (["--scores"], "a b c d\t-1.5000\n"),
        (["--alignments"], "a b c d\t0-0 1-2\n"),
        (["--n_best", "2"], "7 ||| a b c\td ||| -1.5000\n"),
        (["--n_best", "2", "--alignments"], "7 ||| a b c\td ||| -1.5000 ||| 0-0 1-2\n"),
    ],
)
def test_translation_is_one_line(script, options, wanted):
    (arguments,) = HfArgumentParser(script.TranslateArguments).parse_args_into_dataclasses(["--model", "m", *options])
    translation = Translation("a\r\nb\u2028c\td\n", -1.5, WordAlignment([(0, 0), (1, 2)], None))
    assert script.format_translations(7, [translation], arguments) == wanted


def test_separators_in_an_n_best_list_are_escaped(script):
    arguments = script.TranslateArguments("m", n_best=2)
    line = script.format_translations(0, [Translation("a ||| b | c", -1.5, None)], arguments)
    assert line == "0 ||| a &#124;&#124;&#124; b | c ||| -1.5000\n"
    alone = script.format_translations(0, [Translation("a ||| b", -1.5, None)], script.TranslateArguments("m"))
    assert alone == "a ||| b\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--input", "{}/missing"], 1, "missing can't be read: No such file"),
        (["--input", "{}/latin"], 1, "latin must be UTF-8, but line 2 is not"),
        (["--output", "{}/missing/out"], 1, "out can't be written: No such file"),
        (
            ["--model", "{}/missing"],
            1,
            "error: `model` must name a folder or a model of the Hub, but there is no folder",
        ),
        (["--n_best", "5"], 2, "`n_best` must be in [1, `num_beams` = 4], got 5"),
        (["--num_beams", "0"], 2, "`num_beams` must be at least 1, got 0"),
        (["--max_tokens_per_batch", "0"], 2, "`max_tokens_per_batch` must be at least 1, got 0"),
        (["--max_length_offset", "-1"], 2, "`max_length_offset` must be at least 0, got -1"),
        (["--max_source_length", "0"], 2, "`max_source_length` must be at least 1, got 0"),
        (["--dtype", "float"], 2, "error: --dtype: invalid choice: 'float'"),
        (["--device", "tpu9"], 2, "--device must be auto or a device of this machine, such as cpu, got 'tpu9': "),
        (["--device", "cuda:99"], 2, "such as cpu, got 'cuda:99': "),
        (["--length_penalty_type", "wu"], 2, "invalid choice: 'wu'"),
        (["--beams", "4"], 2, "error: unknown option --beams; did you mean --num_beams?"),
    ],
)
def test_translate_names_bad_input(run, tmp_path, arguments, status, message):
    (tmp_path / "latin").write_bytes(b"a\n\xe4\n")
    got, out, err = run(*(argument.format(tmp_path) for argument in arguments), stdin=b"x\n")
    assert (got, out) == (status, "")
    assert message in err
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == ["latin"]


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to", None])
def test_output_never_replaces_the_source(run, source, tmp_path, link):
    before, output = Path(source).read_bytes(), tmp_path / ".." / tmp_path.name / "source"
    if link is not None:
        output = tmp_path / "link"
        getattr(output, link)(source)
    status, _, err = run("--input", source, "--output", output)
    assert status == 1
    assert f"`output` must be another file than `input`, but {output} is that file itself" in err
    assert Path(source).read_bytes() == before


def test_interrupted_translation_leaves_nothing(run, script, source, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "translate", interrupted)
    status, _, err = run("--input", source, "--output", tmp_path / "out")
    assert status == 130
    assert "interrupted" in err
    assert os.listdir(tmp_path) == ["source"]


def test_translate_help_lists_options(run):
    status, out, _ = run("--help")
    assert status == 0
    assert "python scripts/translate.py --model runs/en-de --input test.en --output test.de" in out
    assert out.count("(default:") == 10


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_bfloat16_without_packed_kernels(folder, source):
    command = [sys.executable, SCRIPT, "--model", folder, "--input", source, "--device", "cpu", "--dtype", "bfloat16"]
    # The kernels of an AVX2 machine. A CPU that is not x86-64 uses its own.
    kernels = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(command, env=environment() | kernels, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # The model knows these texts so well that it repeats them in any precision.
    assert done.stdout.split("\n")[:5] == [SENTENCES[1], "", "x", "", SENTENCES[0]]


@pytest.mark.slow
def test_two_processes_share_the_lines(folder, source, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", SCRIPT]
    arguments = [
        "--model",
        folder,
        "--input",
        source,
        "--output",
        tmp_path / "out",
        "--device",
        "cpu",
        "--n_best",
        "2",
    ]
    done = subprocess.run([*command, *arguments], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "3/3" in done.stderr  # of the four lines with words, the first process has three
    rows = [line.split(" ||| ") for line in (tmp_path / "out").read_text().removesuffix("\n").split("\n")]
    flat = [(str(number), each.text) for number, row in enumerate(expected(folder, n_best=2)) for each in row]
    assert [tuple(row[:2]) for row in rows] == flat


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(folder, tmp_path):
    (tmp_path / "source").write_text("ein mann und eine katze\n" * 20_000)
    command = [sys.executable, SCRIPT, "--model", folder, "--input", tmp_path / "source", "--output", tmp_path / "out"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("out.*.tmp")):  # the output is open: the work has begun
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == ["source"]
