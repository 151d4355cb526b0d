"""The command `hf-vanilla`: its table of options, and what it answers before torch is imported."""

import gzip
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from regenerate_options import describe_all

import hf_vanilla_cli
from hf_vanilla_cli.columns import check_columns
from hf_vanilla_cli.options import load_table


ROOT = Path(__file__).parents[2]
ANSWER = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        import hf_vanilla_cli
        sys.exit(hf_vanilla_cli.main())
finally:
    print("imported", *sorted({"torch", "transformers", "hf_vanilla"} & set(sys.modules)))
"""


def answered(*arguments):
    """Run the command or a script in a new process: status, standard output and error; nothing slow is imported."""
    run = subprocess.run(
        [sys.executable, "-c", ANSWER, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    *lines, last = run.stdout.splitlines(keepends=True)
    assert last == "imported\n"
    return run.returncode, "".join(lines), run.stderr


def test_table_describes_the_parsers():
    """`make options` writes the table anew. Another version of transformers has other options of its own."""
    made, table = describe_all(), load_table()
    assert made["commands"] == table["commands"]
    if version("transformers") == table["transformers"]:
        assert made["trainers"] == table["trainers"]


def test_every_script_is_a_command():
    scripts = {path.stem.replace("_", "-") for path in (ROOT / "scripts").glob("[a-z]*.py")}
    assert set(load_table()["commands"]) == scripts
    status, shown, _ = answered("hf-vanilla")
    assert status == 0
    assert {line.split()[0] for line in shown.splitlines() if line.startswith("  ")} == scripts


@pytest.mark.parametrize(
    ("program", "example"),
    [
        ("hf-vanilla", "accelerate launch -m hf_vanilla.scripts.translate --model runs/en-de"),
        ("scripts/translate.py", "accelerate launch scripts/translate.py --model runs/en-de"),
    ],
)
def test_help_needs_no_torch(program, example):
    status, shown, _ = answered(program, *["translate"][: program == "hf-vanilla"], "--help")
    assert status == 0
    assert example in shown
    assert "--num_beams INT" in shown
    assert ("python scripts/" in shown) == (program != "hf-vanilla")


@pytest.mark.promise("disk full")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_help_that_cannot_be_written_ends_in_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, ROOT / "scripts" / "translate.py", "--help"]
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trnslate"], "unknown command trnslate; did you mean translate?"),
        (["translate", "--modle", "x"], "unknown option --modle; did you mean --model?"),
        (["translate"], "the following arguments are required: --model"),
        (
            ["score", "--model", "x", "--source", "a", "--target", "b", "--max_length", "ten"],
            "--max_length: invalid int",
        ),
        (["translate", "--model", "x", "--dtype", "bf16"], "--dtype: invalid choice: 'bf16'"),
        (["translate", "--model", "x", "--scores", "maybe"], "--scores: must be true or false, got 'maybe'"),
        (["sweep", "clasification"], "the first argument must be one of classification, "),
        (["sweep", "classification", "--epoch", "3"], "unknown option --epoch; did you mean --epochs?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_need_no_torch(arguments, message):
    status, _, error = answered("hf-vanilla", *arguments)
    assert status == 2
    assert error.startswith(f"error: {message}")


@pytest.mark.parametrize("installed", [True, False], ids=["version of the table", "another version"])
def test_options_of_the_trainer_are_checked_for_the_version_of_the_table(monkeypatch, capsys, installed):
    found = load_table()["transformers"] if installed else "5.99.0"
    monkeypatch.setattr(hf_vanilla_cli, "version", lambda name: found)

    def check(*arguments):
        hf_vanilla_cli.answer_from_table("pretrain-bert", list(arguments), "hf-vanilla pretrain-bert")

    check("--max_steps", "10", "--no-eval-do-concat-batches", "--preset=mini", "--eval_on_start", "--bf16", "True")
    check("--force", "--dataset_split", "train")  # other names of options
    check("options.json")
    check("--help_all")  # the script itself shows it
    if installed:
        with pytest.raises(SystemExit):
            check("--a_new_option", "3")
        assert "unknown option --a_new_option" in capsys.readouterr().err
    else:
        check("--a_new_option", "3")


def write(path, text):
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", '\ufeffen,"de"\nx,y\n'),
        ("a.tsv.gz", "en\tde\nx\ty\n"),
        ("a.jsonl", json.dumps({"en": "x", "de": "y"}) + "\n"),
        ("a.json", json.dumps({"id": 3, "translation": {"en": "x", "de": "y"}}) + "\n"),
    ],
)
def test_missing_columns_are_named(tmp_path, name, text):
    path = write(tmp_path / name, text)
    check_columns({"train_file": path, "source_column": "en", "target_column": "de"})
    check_columns({"validation_files": [path]})
    with pytest.raises(ValueError, match=r"`target_column` must be a column of .*, which has 'de', 'en'.*; got 'fr'."):
        check_columns({"validation_files": [path], "source_column": "en", "target_column": "fr"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "x"),
        ("a.json", '[{"en": 1}]'),
        ("a.json", "["),
        ("a.csv", ""),
        ("a.parquet", "x"),
        ("a.jsonl", "\n{}"),
        ("a.json", '{"version": 1, "data": [{"paragraphs": []}]}'),
        ("a.jsonl", '{"paragraphs": []}\n'),
    ],
)
def test_files_that_tell_nothing_are_left_to_the_command(tmp_path, name, text):
    check_columns({"train_file": write(tmp_path / name, text), "text_column": "de"})
    check_columns({"train_file": str(tmp_path / "missing.csv"), "text_column": "de"})


def test_missing_columns_of_bad_records_are_left_to_the_command(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"en": "x"}\n{"en": "x", "de": "y"}\n')
    check_columns({"train_file": path, "target_column": "de", "on_bad_record": "skip"})


def test_missing_column_needs_no_torch(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"sentence": "x", "label": 1}\n')
    _, _, error = answered(
        "hf-vanilla", "finetune-classification", "--train_file", path, "--text_column", "text", "--output_dir", "x"
    )
    assert error.startswith(f"error: `text_column` must be a column of {path}, which has 'label', 'sentence'; got")


def test_missing_packages_are_named_before_any_work(monkeypatch, capsys):
    monkeypatch.setattr(hf_vanilla_cli, "find_spec", lambda name: name if name == "matplotlib" else None)
    hf_vanilla_cli.answer_from_table("plot", ["curve", "--run", "x"], "hf-vanilla plot")
    with pytest.raises(SystemExit) as ending:
        hf_vanilla_cli.answer_from_table("demo-vit", [], "demo_vit.py")
    assert ending.value.code == 1
    assert capsys.readouterr().err == (
        'error: demo_vit.py needs packages that are not installed: pip install "hf_vanilla[metrics,vision]"\n'
    )


def test_readme_lists_the_commands_that_need_an_extra():
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = {extra: set(re.findall(r"`([a-z-]+)`", commands)) for extra, commands in rows}
    for extra in ("viz", "metrics", "vision", "sweep"):
        needing = {name for name, modules in hf_vanilla_cli.NEEDED_MODULES.items() if extra in modules.values()}
        assert listed[extra] == needing


@pytest.mark.parametrize(
    ("spec", "commands"),
    [
        ("hf_vanilla.scripts.train_translation", ("hf-vanilla train-translation", "hf-vanilla push-to-hub")),
        (None, ("train.py", "python scripts/push_to_hub.py")),
        ("somebody.train", ("train.py", "python scripts/push_to_hub.py")),
    ],
)
def test_messages_name_commands_as_they_were_started(monkeypatch, spec, commands):
    module = SimpleNamespace(__spec__=spec and SimpleNamespace(name=spec))
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr("sys.argv", ["some/train.py"])
    assert (hf_vanilla_cli.program_name(), hf_vanilla_cli.command_of_script("push_to_hub")) == commands
