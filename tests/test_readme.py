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


def told_of(result):
    """The cells that the README's row of a result must have, whichever kind of result it is."""
    if "bleu" in result:
        return [f"{result['bleu']}", f"{result['chrf']}", f"{result['notes']['training_minutes']} min"]
    if "files" in result:
        names = ("mlm_accuracy", "nsp_accuracy")
        cells = [f"{figures[name]:.1%}" for figures in result["files"].values() for name in names]
        return [*cells, *(f"{figures['mlm_loss']:.2f}" for figures in result["files"].values())]
    return [f"{percent(figures['median']):.1f}" for figures in result["summary"].values()]


def percent(score):
    """SQuAD's scores are published from 0 to 100, all others are from 0 to 1."""
    return score if score > 1 else 100 * score


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_numbers_are_those_of_the_results(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = [line for line in README.splitlines() if f"`{path.name}`" in line]
    assert rows
    cells = [cell.strip() for row in rows for cell in row.split("|")]
    for told in told_of(result):
        assert told in cells


def test_every_number_has_its_result():
    named = re.findall(r"`(\w+\.json)`", README)
    assert sorted(set(named)) == [path.name for path in RESULTS]


def test_named_files_exist():
    named = set(re.findall(r"`((?:hf_vanilla|scripts)/[\w/]+\.py)`", README))
    assert len(named) > 8
    assert [path for path in named if not (ROOT / path).exists()] == []
