"""The command line of scripts/export_ctranslate2.py, and the program in its help."""

import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
from script_runner import SCRIPTS, run_here


sys.path.insert(0, str(Path(__file__).parents[1] / "generation"))

from text_translator import SENTENCES, save_translator


specs = pytest.importorskip("ctranslate2.specs")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ctranslate2's own imports


def test_program_in_the_help_translates_with_an_export(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_translator("runs/en-de")
    options = ["--model", "runs/en-de", "--output_dir", "runs/en-de-ct2", "--quantization", "int8"]
    assert run_here(monkeypatch, "export_ctranslate2.py", *options) == 0
    assert "The model for CTranslate2 is in runs/en-de-ct2." in capsys.readouterr().out
    text = runpy.run_path(str(SCRIPTS / "export_ctranslate2.py"))["__doc__"]
    (program,) = re.findall(r"\n    import ctranslate2\n(?:    .*\n|\n)+", text)
    exec(re.sub("^    ", "", program, flags=re.MULTILINE).replace("A dog runs.", SENTENCES[0]), {})
    assert capsys.readouterr().out == f"{SENTENCES[0]}\n"
    assert run_here(monkeypatch, "export_ctranslate2.py", *options) == 1
    assert "`output_dir` must be a new or empty folder, but runs/en-de-ct2 is not" in capsys.readouterr().err
    options[options.index("runs/en-de")] = "runs/en-de-ct2/target_tokenizer"
    Path(options[1]).mkdir()
    assert run_here(monkeypatch, "export_ctranslate2.py", *options) == 1
    assert "`model` must be the folder of a model, but runs/en-de-ct2/target_tokenizer has" in capsys.readouterr().err


def test_sigterm_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_translator("model")
    monkeypatch.setattr(specs.ModelSpec, "save", lambda spec, folder: signal.raise_signal(signal.SIGTERM))
    options = ["--model", "model", "--output_dir", "exported"]
    assert run_here(monkeypatch, "export_ctranslate2.py", *options) == 143
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
