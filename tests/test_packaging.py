"""The wheel: its content, and that it works without the source tree; make and constraints."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest


# One worker builds the wheel and runs every test on it.
pytestmark = pytest.mark.xdist_group("wheel")

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_vanilla"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(PACKAGE, source / "hf_vanilla", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("scripts", "tests"):  # must stay out of the wheel
        (source / name).mkdir()
        (source / name / "stray.py").touch()
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


def test_wheel_has_only_the_package(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {path.relative_to(ROOT).as_posix() for path in source}
    assert {"hf_vanilla/__init__.py", "hf_vanilla/py.typed", "hf_vanilla/models/layers.py"} <= names


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_string(archive.read(name).decode())
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    assert metadata["Name"] == "hf_vanilla"
    assert metadata["Version"] == wheel.name.split("-")[1]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"viz", "export", "peft", "sweep", "test", "dev"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


IMPORT = """
import importlib, pkgutil
import hf_vanilla
import transformers

print(hf_vanilla.__file__)
print(hf_vanilla.__version__)
for module in pkgutil.walk_packages(hf_vanilla.__path__, "hf_vanilla."):
    importlib.import_module(module.name)
config = transformers.AutoConfig.for_model(
    "vanilla_transformer", vocab_size=11, d_model=16, d_ff=20, num_heads=4, encoder_layers=1, decoder_layers=1
)
print(transformers.AutoModelForSeq2SeqLM.from_config(config).__class__.__name__)
"""


def test_installed_package_works_without_the_source_tree(installed, wheel, tmp_path):
    # The interpreter is isolated (-I: neither the working folder nor PYTHONPATH is on the path), the editable install
    # of the source tree is shadowed by putting the target in front, and the printed path proves it.
    program = f"import sys; sys.path.insert(0, {str(installed)!r})\n{IMPORT}"
    run = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
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


COMMANDS = ["help", "venv", "demo", "demo-bert", "test", "test-kernels", "test-slow", "check", "format", "benchmark"]


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
