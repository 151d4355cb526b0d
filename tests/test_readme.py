"""The README is correct: its code runs, its files exist, its numbers are those of the results."""

import ast
import json
import re
import subprocess
import sys
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
from hf_vanilla.data.tokenization import train_tokenizer, train_wordpiece_tokenizer
from hf_vanilla.training import noam_learning_rate
from hf_vanilla.training.recipes import HIGHEST_PEAK


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOKENIZER = train_wordpiece_tokenizer(["the dog and the cat", "Ben has two dogs ."] * 3, 60, show_progress=False)
RESULTS = sorted((ROOT / "model_cards" / "results").glob("*.json"))
BENCHMARKS = sorted((ROOT / "scripts" / "benchmark" / "results").glob("*.json"))


def code_of(heading):
    """Return the first program below a heading."""
    block = README[README.index(f"## {heading}\n") :]
    return re.search(r"```python\n(.*?)```", block, flags=re.DOTALL).group(1)


def program_of(heading):
    """Return the first program below a heading, compiled."""
    return compile(code_of(heading), "README.md", "exec")


def test_first_lines_run(capsys):
    names = {}
    exec(program_of("In a few lines"), names)
    assert re.fullmatch(r"loss \d\.\d\d, translations \[\[.*\]\]\n", capsys.readouterr().out)
    assert names["loss"].item() > 0
    assert names["model"].model.encoder.embed_tokens.weight.grad.abs().sum() > 0
    assert names["translations"].shape[0] == 2


def save_translator(folder):
    config = VanillaTransformerConfig(
        vocab_size=280, d_model=12, d_ff=20, num_heads=3, encoder_layers=1, decoder_layers=1
    )
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    train_tokenizer(["the dog likes the cat"] * 3, 280, show_progress=False).save_pretrained(folder)


def test_published_model_works_without_the_package_and_asks_nothing(tmp_path):
    """A folder of the same name replaces the repository."""
    save_translator(tmp_path / "my-name" / "en-de")
    program = 'import sys; sys.modules["hf_vanilla"] = None\n' + code_of("Publish on the Hub")
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert [sorted(each) for each in ast.literal_eval(finished.stdout)] == [["score", "translation_text"]] * 2
    assert "Do you wish to run the custom code?" not in finished.stdout + finished.stderr


def test_pipelines_run(tmp_path, monkeypatch, capsys):
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
    save_translator("runs/en-de")
    exec(program_of("Pipelines"), {})
    translations, guesses, classes, answer = map(ast.literal_eval, capsys.readouterr().out.splitlines())
    assert [sorted(each) for each in translations] == [["score", "translation_text"]] * 2
    assert len(guesses) == 5
    assert classes[0]["label"] in ("LABEL_0", "LABEL_1")
    assert answer["answer"] in "Ben has two dogs and a cat."


def test_estimate_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.en").write_text("the dog likes the cat\n" * 3)
    Path("train.de").write_text("der hund mag die katze\n" * 3)
    names = {}
    exec(program_of("Speed"), names)
    shown = capsys.readouterr().out
    model = VanillaTransformerForConditionalGeneration(names["config"])
    assert shown.startswith(f"{model.num_parameters():,} parameters, ")
    assert re.search(r"[\d.]+ GB of memory, \d+:\d\d:\d\d \(h:mm:ss\)\n$", shown)


def options_of_trainings():
    """Return the options of the commands that train a translator: a small one, and the base model."""
    commands = README.split("python scripts/train_translation.py")[1:]
    return [dict(re.findall(r"--(\w+) ([\w./-]+)", command.partition("```")[0])) for command in commands]


def test_small_training_has_a_sound_learning_rate():
    options, _ = options_of_trainings()
    d_model, warmup = int(options["d_model"]), int(options["warmup_steps"])
    assert 3 * warmup == int(options["max_steps"])
    assert noam_learning_rate(warmup, d_model, warmup) < HIGHEST_PEAK < noam_learning_rate(133, d_model, 133)


def test_best_checkpoints_of_the_training_can_be_averaged():
    _, options = options_of_trainings()
    best = int(re.search(r"average_checkpoints.py --run_dir runs/en-de --best (\d+)", README).group(1))
    assert (options["eval_strategy"], options["eval_steps"]) == ("steps", options["save_steps"])
    assert best < int(options["save_total_limit"]) <= int(options["max_steps"]) / int(options["save_steps"])


def cells_of(result):
    """Return the cells that the README's row of a result must have, for any kind of result."""
    if "bleu" in result:
        return [f"{result['bleu']}", f"{result['chrf']}", f"{result['notes']['training_minutes']} min"]
    if "files" in result:
        names = ("mlm_accuracy", "nsp_accuracy")
        cells = [f"{figures[name]:.1%}" for figures in result["files"].values() for name in names]
        return [*cells, *(f"{figures['mlm_loss']:.2f}" for figures in result["files"].values())]
    if "scores" in result:
        return [f"{percent(figures['accuracy']):.1f}" for figures in result["scores"].values()]
    return [f"{percent(figures['median']):.1f}" for figures in result["summary"].values()]


def percent(score):
    """SQuAD's scores are published from 0 to 100, all others are from 0 to 1."""
    return score if score > 1 else 100 * score


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_numbers_match_the_results(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = [line for line in README.splitlines() if f"`{path.name}`" in line]
    assert rows
    cells = [cell.strip() for row in rows for cell in row.split("|")]
    for cell in cells_of(result):
        assert cell in cells


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_ratios_match_the_benchmarks(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = [[cell.strip() for cell in line.split("|")] for line in README.splitlines() if f"`{path.name}`" in line]
    assert rows or f"`{path.name}`" in README
    with_tcmalloc = path.parent / "tcmalloc" / path.name
    others = json.loads(with_tcmalloc.read_text(encoding="utf-8"))["ratios"] if with_tcmalloc.exists() else {}
    assert result.get("ratios", {}).keys() >= others.keys()
    for name, ratio in result.get("ratios", {}).items():
        figures = [f"{ratio['median']:.2f}", f"{ratio['lowest']:.2f} to {ratio['highest']:.2f}"]
        figures.append(f"{ratio['target']:g}" if "target" in ratio else "–")
        [row] = [row for row in rows if row[3:6] == figures]
        assert row[7] == (f"{others[name]['median']:.2f}" if name in others else "–")
        medians = [side["median"] for side in result["sides"].values()]
        assert row[6] == "–" or any(
            row[6].startswith(f"{median:,.{0 if median >= 100 else 1}f} ") for median in medians
        )


@pytest.mark.parametrize("name", ["search_agreement.json", "search_agreement_greedy.json"])
def test_agreement_matches_the_searches(name):
    compared = json.loads((BENCHMARKS[0].parent / name).read_text(encoding="utf-8"))["compared"]
    [paragraph] = [part for part in README.split("\n\n") if f"`{name}`" in part]
    counts = [compared[name]["hypotheses_that_differ"] for name in compared]
    assert [int(number) for number in re.findall(r" (\d+) (?:differ|in|of)", paragraph)] == counts


def test_named_results_are_the_recorded_ones():
    named = re.findall(r"`(\w+\.json)`", README)
    assert sorted(set(named)) == sorted(path.name for path in [*RESULTS, *BENCHMARKS])


def test_named_files_exist():
    named = set(re.findall(r"`((?:hf_vanilla|scripts)/[\w/]+\.py)`", README))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    in_makefile = set(re.findall(r"\b(?:scripts|tests)/[\w/]+(?:\.py)?", makefile))
    assert len(named) > 8
    assert {"tests/models", "tests/test_pipelines.py"} <= in_makefile
    assert [path for path in sorted(named | in_makefile) if not (ROOT / path).exists()] == []


def test_ceilings_match_the_profiles():
    results = BENCHMARKS[0].parent
    text = (results.parent / "README.md").read_text(encoding="utf-8").partition("## What is left\n")[2]
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")][2:8]
    profiles = json.loads((results / "step_profile.json").read_text(encoding="utf-8"))["profiles"]
    named = ["encoder_decoder"] * 2 + ["bert_mini", "bert_base"] + ["decoding"] * 2
    files = ["translation_training"] * 2 + ["bert_pretraining_mini", "bert_pretraining_base"]
    files += ["translation_decoding"] * 2
    for row, name, file, place in zip(rows, named, files, (0, 1, 0, 0, 0, 1), strict=True):
        ratio = list(json.loads((results / f"{file}.json").read_text(encoding="utf-8"))["ratios"].values())[place]
        profile, shares = profiles[name], profiles[name]["shares"]
        parts = [shares["products"], shares["attention's products"], shares["outside of operations"]]
        expected = [parts[0], parts[1], 1 - sum(parts), parts[2]]
        assert row[2:5] == [
            f"{ratio['target']:g}",
            f"{ratio['median']:.2f}",
            f"{ratio['median'] * profile['ceiling']:.1f}",
        ]
        assert row[5:9] == [f"{share:.0%}" for share in expected]
