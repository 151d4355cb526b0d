"""The README says nothing that is not so: its code runs, its files exist, its numbers are those of the results."""

import ast
import json
import re
from pathlib import Path

import pytest

from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForPreTraining,
    VanillaBertForQuestionAnswering,
    VanillaBertForSequenceClassification,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_vanilla.tokenization import train_tokenizer, train_wordpiece_tokenizer
from hf_vanilla.training import noam_learning_rate
from hf_vanilla.training.schedule import HIGHEST_PEAK


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOKENIZER = train_wordpiece_tokenizer(["the dog and the cat", "Ben has two dogs ."] * 3, 60, show_progress=False)
RESULTS = sorted((ROOT / "model_cards" / "results").glob("*.json"))
BENCHMARKS = sorted((ROOT / "scripts" / "benchmark" / "results").glob("*.json"))


def program_of(heading):
    """The first program below a heading."""
    block = README[README.index(f"## {heading}\n") :]
    code = re.search(r"```python\n(.*?)```", block, flags=re.DOTALL).group(1)
    return compile(code, "README.md", "exec")


def test_a_few_lines_run(capsys):
    names = {}
    exec(program_of("In a few lines"), names)
    assert re.fullmatch(r"loss \d\.\d\d, translations \[\[.*\]\]\n", capsys.readouterr().out)
    assert names["loss"].item() > 0
    assert names["model"].model.encoder.embed_tokens.weight.grad.abs().sum() > 0
    assert names["translations"].shape[0] == 2


def test_the_pipelines_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = dict(hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20)
    for folder, model_class in (
        ("bert", VanillaBertForPreTraining),
        ("reviews/seed-1", VanillaBertForSequenceClassification),
        ("squad/seed-42", VanillaBertForQuestionAnswering),
    ):
        TOKENIZER.save_pretrained(f"runs/{folder}")
        config = VanillaBertConfig(vocab_size=len(TOKENIZER), initializer_range=0.5, **sizes)
        model_class(config).save_pretrained(f"runs/{folder}")
    config = VanillaTransformerConfig(
        vocab_size=280, d_model=12, d_ff=20, num_heads=3, encoder_layers=1, decoder_layers=1
    )
    VanillaTransformerForConditionalGeneration(config).save_pretrained("runs/en-de")
    train_tokenizer(["the dog likes the cat"] * 3, 280, show_progress=False).save_pretrained("runs/en-de")
    exec(program_of("Pipelines"), {})
    translations, guesses, classes, answer = map(ast.literal_eval, capsys.readouterr().out.splitlines())
    assert [sorted(each) for each in translations] == [["score", "translation_text"]] * 2
    assert len(guesses) == 5
    assert classes[0]["label"] in ("LABEL_0", "LABEL_1")
    assert answer["answer"] in "Ben has two dogs and a cat."


def options_of_trainings():
    """The options of the commands that train a translator: a try-out, and the base model."""
    commands = README.split("python scripts/train_translation.py")[1:]
    return [dict(re.findall(r"--(\w+) ([\w./-]+)", command.partition("```")[0])) for command in commands]


def test_the_try_out_has_a_sound_learning_rate():
    options, _ = options_of_trainings()
    d_model, warmup = int(options["d_model"]), int(options["warmup_steps"])
    assert 3 * warmup == int(options["max_steps"])
    assert noam_learning_rate(warmup, d_model, warmup) < HIGHEST_PEAK < noam_learning_rate(133, d_model, 133)


def test_the_best_of_the_training_can_be_averaged():
    """The options that `--best` needs stand in the training's command."""
    _, options = options_of_trainings()
    best = int(re.search(r"average_checkpoints.py --run_dir runs/en-de --best (\d+)", README).group(1))
    assert (options["eval_strategy"], options["eval_steps"]) == ("steps", options["save_steps"])
    assert best < int(options["save_total_limit"]) <= int(options["max_steps"]) / int(options["save_steps"])


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


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_ratios_are_those_of_the_benchmarks(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = [line for line in README.splitlines() if f"`{path.name}`" in line]
    cells = [cell.strip() for row in rows for cell in row.split("|")]
    assert rows
    for ratio in result.get("ratios", {}).values():
        assert f"{ratio['median']:.2f}" in cells
        assert f"{ratio['lowest']:.2f} to {ratio['highest']:.2f}" in cells


def test_every_number_has_its_result():
    named = re.findall(r"`(\w+\.json)`", README)
    assert sorted(set(named)) == sorted(path.name for path in [*RESULTS, *BENCHMARKS])


def test_named_files_exist():
    named = set(re.findall(r"`((?:hf_vanilla|scripts)/[\w/]+\.py)`", README))
    assert len(named) > 8
    assert [path for path in named if not (ROOT / path).exists()] == []
