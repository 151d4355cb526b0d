"""The wheel and the editable install: their content, and that they work, commands included; make and constraints."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from hf_vanilla import __version__


# One worker builds the wheel and runs every test on it.
pytestmark = pytest.mark.xdist_group("wheel")

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_vanilla"


# Folders of the source tree, and what they are in the wheel; benchmarks and launchers stay out.
PACKAGES = {"hf_vanilla": "hf_vanilla", "hf_vanilla_cli": "hf_vanilla_cli", "scripts": "hf_vanilla/scripts"}
UNPACKAGED = shutil.ignore_patterns("__pycache__", "benchmark", "launch", "README.md")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel") / "source"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=UNPACKAGED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("scripts/benchmark", "tests"):  # must stay out of the wheel
        (folder / name).mkdir()
        (folder / name / "stray.py").touch()
    return folder


@pytest.fixture(scope="module")
def wheel(source):
    folder = source.parent
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder]
    subprocess.run([*command, source], check=True, capture_output=True, text=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel):
    target = wheel.parent / "target"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


@pytest.fixture(scope="module")
def editable(source, wheel):  # after the wheel, so that the two builds do not meet
    """A folder with what `pip install -e` puts into an environment."""
    target = source.parent / "editable"
    build = f"from setuptools import build_meta; print(build_meta.build_editable({str(source.parent / 'e')!r}))"
    (source.parent / "e").mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, text=True)
    (path,) = (source.parent / "e").glob("*.whl")
    zipfile.ZipFile(path).extractall(target)
    return target


def test_wheel_has_the_package_the_command_and_the_scripts(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = set()
    for folder, place in PACKAGES.items():
        ignored = {"__pycache__", "benchmark", "launch", "README.md"}
        files = [path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file()]
        expected |= {f"{place}/{path.as_posix()}" for path in files if not ignored & set(path.parts)}
    assert names == expected
    assert {"hf_vanilla/__init__.py", "hf_vanilla/py.typed", "hf_vanilla/models/layers.py"} <= names
    assert {"hf_vanilla/scripts/translate.py", "hf_vanilla_cli/options.json"} <= names
    assert "hf_vanilla/scripts/recipes/transformer_base.yaml" in names


def run_installed(folder, program, *arguments, cwd):
    """Run a program with the packages of a folder, and without those of this source tree."""
    # The interpreter is isolated (-I: neither the working folder nor PYTHONPATH is on the path; -S: nor what is
    # installed, which is added without its .pth files, and so without the editable install of the source tree).
    libraries = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    start = f"import site, sys; site.addsitedir({str(folder)!r}); sys.path += {libraries}\n"
    command = [sys.executable, "-I", "-S", "-c", start + program, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


COMMAND = """
(entry,) = [each for each in importlib.metadata.distribution("hf_vanilla").entry_points if each.name == "hf-vanilla"]
sys.argv[0] = "hf-vanilla"
try:
    status = entry.load()()
except SystemExit as exit:
    status = exit.code
print(sys.modules["hf_vanilla"].__file__ if "hf_vanilla" in sys.modules else None, file=sys.stderr)
sys.exit(status)
"""


def run_command(folder, *arguments, cwd):
    """Run `hf-vanilla`: status, standard output and error, and the place of the package, if it was imported."""
    run = run_installed(folder, "import importlib.metadata" + COMMAND, *arguments, cwd=cwd)
    *errors, place = run.stderr.splitlines()
    return run.returncode, run.stdout, "\n".join(errors), place


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_installed_command_knows_version_and_options(kind, request, tmp_path):
    folder = request.getfixturevalue(kind)
    assert run_command(folder, "--version", cwd=tmp_path) == (0, f"{__version__}\n", "", "None")
    status, shown, _, place = run_command(folder, "translate", "--help", cwd=tmp_path)
    assert (status, place) == (0, "None")
    assert "--num_beams" in shown


def test_installed_command_runs_the_scripts(installed, tmp_path):
    options = ["--model_name_or_path", "my-name/bert", "--train_file", "no.jsonl", "--validation_file", "no.jsonl"]
    status, _, error, place = run_command(
        installed, "sweep", "classification", *options, "--output_dir", "runs", cwd=tmp_path
    )
    assert (status, error) == (1, "error: `train_file` must be an existing file, but there is no file no.jsonl.")
    assert Path(place) == installed / "hf_vanilla" / "__init__.py"


def write_translations(folder):
    (folder / "a.de").write_text("ein hund\nein mann rennt schnell\n")
    return ["--hypotheses", "a.de", "--references", "a.de"]


def test_editable_command_runs_the_scripts(source, editable, tmp_path):
    options = write_translations(tmp_path)
    status, shown, error, place = run_command(editable, "evaluate-translation", *options, cwd=tmp_path)
    assert status == 0, error
    assert json.loads(shown)["bleu"] == 100.0
    assert Path(place) == source / "hf_vanilla" / "__init__.py"


@pytest.mark.slow
def test_torchrun_starts_an_installed_script(installed, tmp_path):
    launcher = ["torch.distributed.run", "--nproc-per-node=1", "-m", "hf_vanilla.scripts.evaluate_translation"]
    run = subprocess.run(
        [sys.executable, "-m", *launcher, *write_translations(tmp_path)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["chrf"] == 100.0


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_string(archive.read(name).decode())
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    assert metadata["Name"] == "hf_vanilla"
    assert metadata["Version"] == wheel.name.split("-")[1]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"viz", "peft", "vision", "sweep", "metrics", "test", "dev"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


IMPORT = """
import importlib, pkgutil
import hf_vanilla
import transformers

print(hf_vanilla.__file__)
print(hf_vanilla.__version__)
for module in pkgutil.walk_packages(hf_vanilla.__path__, "hf_vanilla."):  # the scripts too
    importlib.import_module(module.name)
config = transformers.AutoConfig.for_model(
    "vanilla_transformer", vocab_size=11, d_model=16, d_ff=20, num_heads=4, encoder_layers=1, decoder_layers=1
)
print(transformers.AutoModelForSeq2SeqLM.from_config(config).__class__.__name__)
"""


def test_installed_package_works_without_the_source_tree(installed, wheel, tmp_path):
    run = run_installed(installed, IMPORT, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    path, version, model = run.stdout.splitlines()
    assert Path(path) == installed / "hf_vanilla" / "__init__.py"
    assert version == wheel.name.split("-")[1]
    assert model == "VanillaTransformerForConditionalGeneration"
    assert not list(tmp_path.iterdir())


def requirement_name(requirement):
    return requirement.split(";")[0].split("[")[0].split("=")[0].split("<")[0].split(">")[0].strip().lower()


def test_constraints_pin_every_requirement():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins[0] == "torch==2.13.0"
    assert pins[1:] == sorted(pins[1:])
    assert all(pin.count("==") == 1 and "+" not in pin for pin in pins)
    pinned = {pin.split("==")[0].replace("-", "_") for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = project["dependencies"] + [
        line for lines in project["optional-dependencies"].values() for line in lines
    ]
    names = {requirement_name(line).replace("-", "_") for line in required} - {"hf_vanilla"}
    assert len(names) > 15
    assert names <= pinned


COMMANDS = [
    *("help", "venv", "demo", "demo-bert", "demo-vit", "test", "test-kernels", "test-slow", "scoreboard"),
    *("test-versions", "fuzz", "soak", "check", "format", "options", "docs", "release", "benchmark", "benchmark-gpu"),
]


def test_make_lists_every_command():
    make = ["make", "--no-print-directory", "-C", ROOT]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    listed = subprocess.run([*make, "help"], check=True, capture_output=True, text=True, env=environment).stdout
    assert [line.split()[0] for line in listed.splitlines()] == COMMANDS
    subprocess.run([*make, "--dry-run", *COMMANDS], check=True, capture_output=True, env=environment)


def test_make_refuses_an_old_python(tmp_path):
    old = tmp_path / "python3.8"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    run = subprocess.run(["make", f"PYTHON={old}", "test"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert f"hf_vanilla needs Python 3.11 or newer and finds none among: {old}." in run.stderr
    assert not (tmp_path / ".venv").exists()
