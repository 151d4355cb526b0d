"""Run the core of the tests with the lowest and the newest versions that pyproject.toml allows: `make test-versions`.

    python tests/versions.py [lowest] [newest] [tests ...]

Each gets a new environment in versions_output/, which is removed afterwards. What was installed and how the tests
ended goes to versions.json. Packages come from pip's index; on Linux without a GPU, PIP_EXTRA_INDEX_URL with PyTorch's
index of CPU builds saves several GB. What the dependencies need themselves is the newest that fits.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path


ROOT = Path(__file__).parents[1]
RECORD, OUTPUT = ROOT / "tests" / "versions.json", ROOT / "versions_output"
CORE = [
    "tests/models/test_modeling_vanilla_bert.py",
    "tests/models/test_modeling_vanilla_gpt.py",
    "tests/models/test_modeling_vanilla_transformer.py",
    "tests/models/test_modeling_vanilla_vit.py",
    "tests/models/test_generation.py",
    "tests/models/test_saving.py",
    "tests/models/test_varlen.py",
    "tests/models/test_ecosystem.py",
    "tests/models/test_sharing.py",
    "tests/generation/test_causal_search.py",
    "tests/generation/test_translation.py",
    "tests/training/test_checkpoints.py",
    "tests/training/test_trainer.py",
    "tests/scripts/test_train_translation.py",
    "tests/scripts/test_gpu_benchmark.py",
    "tests/test_registration.py",
]
SHOWN = ("torch", "transformers", "accelerate", "datasets", "huggingface_hub", "numpy", "tokenizers", "safetensors")


def lower_bounds():
    """Return a pin of every direct dependency, but those for work on the package itself, to its lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + [
        line for name in extras if name not in ("docs", "release", "dev") for line in extras[name]
    ]
    found = (re.match(r"([\w-]+)>=([\w.]+)", line) for line in lines if not line.startswith("hf_vanilla["))
    return sorted({f"{match[1]}=={match[2]}" for match in found})


def pip(python, *arguments):
    """Run pip of an environment; its output is shown only if it fails."""
    command = [python, "-m", "pip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def install(folder, pins):
    """Make an environment, torch first and alone, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / Path(sysconfig.get_path("scripts")).name / Path(sys.executable).name
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n", encoding="utf-8")
    pip(python, "install", "--no-cache-dir", "-c", constraints, "torch")
    pip(python, "install", "--no-cache-dir", "-c", constraints, "-e", f"{ROOT}[test]")
    return python


def run_tests(python, tests):
    """Run the tests in an environment, and return what pytest counted and the names of what failed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-m", "pytest", "-q", "-n", "0", "--no-showlocals", "--tb=short", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    sys.stdout.write(done.stdout)
    counts = {
        name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", done.stdout)
    }
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.M)
    return {"exit_code": done.returncode, **counts, "tests_that_failed": sorted(failed)}


def main():
    """Install, test and record each of the given ends, both by default."""
    ends = [each for each in sys.argv[1:] if each in ("lowest", "newest")] or ["lowest", "newest"]
    tests = [each for each in sys.argv[1:] if each not in ends] or CORE
    exit_codes = []
    for end in ends:
        folder = OUTPUT / end
        shutil.rmtree(folder, ignore_errors=True)
        try:
            python = install(folder, lower_bounds() if end == "lowest" else [])
            installed = {
                each["name"].lower().replace("-", "_"): each["version"]
                for each in json.loads(pip(python, "list", "--format", "json"))
            }
            versions = {
                "python": ".".join(map(str, sys.version_info[:3])),
                **{name: installed[name] for name in SHOWN},
            }
            result = {"versions": versions, "tests": tests, **run_tests(python, tests)}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        record[end] = result
        exit_codes.append(result["exit_code"])
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return max(exit_codes)


if __name__ == "__main__":
    sys.exit(main())
