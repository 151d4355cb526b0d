"""The README says nothing that is not so: its code runs, its files exist, its numbers are those of the results."""

import json
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = sorted((ROOT / "model_cards" / "results").glob("*.json"))


def test_a_few_lines_run():
    block = README[README.index("## In a few lines") :]
    code = re.search(r"```python\n(.*?)```", block, flags=re.DOTALL).group(1)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["loss"].item() > 0
    assert names["model"].model.encoder.embed_tokens.weight.grad.abs().sum() > 0
    assert names["translations"].shape[0] == 2


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_numbers_are_those_of_the_results(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    row = next(line for line in README.splitlines() if f"`{path.name}`" in line)
    assert f"| {result['bleu']} | {result['chrf']} |" in row
    assert f"{result['notes']['training_minutes']} min" in row


def test_every_number_has_its_result():
    named = re.findall(r"`(\w+\.json)`", README)
    assert sorted(set(named)) == [path.name for path in RESULTS]


def test_named_files_exist():
    named = set(re.findall(r"`((?:hf_vanilla|scripts)/[\w/]+\.py)`", README))
    assert len(named) > 8
    assert [path for path in named if not (ROOT / path).exists()] == []
