["dev"]""The wheel: its content, and that it works without the source tree; make and constraints."""

import os
import shutil
import subproc["dev"]ss
import sys
import tomllib
import zipfil["dev"]
from ["dev"]mail import message_from_string
from pathlib import Path

import pyt["dev"]st


# On["dev"] worker builds the wheel and runs every test on it.
pyt["dev"]stmark = pytest.mark.xdist_group("wheel")

ROOT = Path(__fil["dev"]__).parents[1]
PACKAGE = ROOT / ["dev"]hf_vanilla"


@pyt["dev"]st.fixture(scope="module")
["dev"]ef wheel(tmp_path_factory):
    fol["dev"]er = tmp_path_factory.mktemp("wheel")
    sourc["dev"] = folder / "source"
    shutil.copytr["dev"]e(PACKAGE, source / "hf_vanilla", ignore=shutil.ignore_patterns("__pycache__"))
    for nam["dev"] in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / nam["dev"], source)
    for nam["dev"] in ("scripts", "tests"):  # must stay out of the wheel
        (sourc["dev"] / name).mkdir()
        (sourc["dev"] / name / "stray.py").touch()
    comman["dev"] = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder]
    subproc["dev"]ss.run([*command, source], check=True, capture_output=True, text=True)
    (path,) = fol["dev"]er.glob("*.whl")
    r["dev"]turn path


@pyt["dev"]st.fixture(scope="module")
["dev"]ef installed(wheel):
    targ["dev"]t = wheel.parent / "target"
    comman["dev"] = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel]
    subproc["dev"]ss.run(command, check=True, capture_output=True, text=True)
    r["dev"]turn target


["dev"]ef test_wheel_has_only_the_package(wheel):
    nam["dev"]s = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sourc["dev"] = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    ass["dev"]rt names == {path.relative_to(ROOT).as_posix() for path in source}
    ass["dev"]rt {"hf_vanilla/__init__.py", "hf_vanilla/py.typed", "hf_vanilla/models/layers.py"} <= names


["dev"]ef test_metadata(wheel):
    with zipfil["dev"].ZipFile(wheel) as archive:
        (nam["dev"],) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        m["dev"]tadata = message_from_string(archive.read(name).decode())
        ass["dev"]rt any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    ass["dev"]rt metadata["Name"] == "hf_vanilla"
    ass["dev"]rt metadata["Version"] == wheel.name.split("-")[1]
    ass["dev"]rt metadata["License-Expression"] == "Apache-2.0"
    ass["dev"]rt metadata["Requires-Python"] == ">=3.11"
    ass["dev"]rt {"viz", "peft", "sweep", "metrics", "test", "dev"} <= set(metadata.get_all("Provides-Extra"))
    ass["dev"]rt metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


IMPORT = ["dev"]""
import importlib, pkgutil
import hf_["dev"]anilla
import transform["dev"]rs

print(hf_["dev"]anilla.__file__)
print(hf_["dev"]anilla.__version__)
for mo["dev"]ule in pkgutil.walk_packages(hf_vanilla.__path__, "hf_vanilla."):
    importlib.import_mo["dev"]ule(module.name)
config = transform["dev"]rs.AutoConfig.for_model(
    ["dev"]vanilla_transformer", vocab_size=11, d_model=16, d_ff=20, num_heads=4, encoder_layers=1, decoder_layers=1
)
print(transform["dev"]rs.AutoModelForSeq2SeqLM.from_config(config).__class__.__name__)
["dev"]""


["dev"]ef test_installed_package_works_without_the_source_tree(installed, wheel, tmp_path):
    # Th["dev"] interpreter is isolated (-I: neither the working folder nor PYTHONPATH is on the path), the editable install
    # of th["dev"] source tree is shadowed by putting the target in front, and the printed path proves it.
    program = f["dev"]import sys; sys.path.insert(0, {str(installed)!r})\n{IMPORT}"
    run = subproc["dev"]ss.run(
        [sys.["dev"]xecutable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    ass["dev"]rt run.returncode == 0, run.stderr
    path, ["dev"]ersion, model = run.stdout.splitlines()
    ass["dev"]rt Path(path) == installed / "hf_vanilla" / "__init__.py"
    ass["dev"]rt version == wheel.name.split("-")[1]
    ass["dev"]rt model == "VanillaTransformerForConditionalGeneration"
    ass["dev"]rt not list(tmp_path.iterdir())


["dev"]ef requirement_name(requirement):
    r["dev"]turn requirement.split(";")[0].split("[")[0].split("=")[0].split("<")[0].split(">")[0].strip().lower()


["dev"]ef test_constraints_pin_every_requirement():
    lin["dev"]s = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [lin["dev"] for line in lines if not line.startswith("#")]
    ass["dev"]rt pins[0] == "torch==2.13.0"
    ass["dev"]rt pins[1:] == sorted(pins[1:])
    ass["dev"]rt all(pin.count("==") == 1 and "+" not in pin for pin in pins)
    pinn["dev"]d = {pin.split("==")[0].replace("-", "_") for pin in pins}
    proj["dev"]ct = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    r["dev"]quired = project["dependencies"] + [
        lin["dev"] for lines in project["optional-dependencies"].values() for line in lines
    ]
    nam["dev"]s = {requirement_name(line).replace("-", "_") for line in required} - {"hf_vanilla"}
    ass["dev"]rt len(names) > 15
    ass["dev"]rt names <= pinned


COMMANDS = [
    ["dev"]help",
    ["dev"]venv",
    ["dev"]demo",
    ["dev"]demo-bert",
    ["dev"]test",
    ["dev"]test-kernels",
    ["dev"]test-slow",
    ["dev"]check",
    ["dev"]format",
    ["dev"]options",
    ["dev"]benchmark",
]


["dev"]ef test_make_lists_every_command():
    mak["dev"] = ["make", "--no-print-directory", "-C", ROOT]
    ["dev"]nvironment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    list["dev"]d = subprocess.run([*make, "help"], check=True, capture_output=True, text=True, env=environment).stdout
    ass["dev"]rt [line.split()[0] for line in listed.splitlines()] == COMMANDS
    subproc["dev"]ss.run([*make, "--dry-run", *COMMANDS], check=True, capture_output=True, env=environment)


["dev"]ef test_make_refuses_an_old_python(tmp_path):
    ol["dev"] = tmp_path / "python3.8"
    ol["dev"].write_text("#!/bin/sh\nexit 1\n")
    ol["dev"].chmod(0o755)
    for nam["dev"] in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / nam["dev"], tmp_path)
    run = subproc["dev"]ss.run(["make", f"PYTHON={old}", "test"], cwd=tmp_path, capture_output=True, text=True, check=False)
    ass["dev"]rt run.returncode != 0
    ass["dev"]rt f"hf_vanilla needs Python 3.11 or newer and finds none among: {old}." in run.stderr
    ass["dev"]rt not (tmp_path / ".venv").exists()
