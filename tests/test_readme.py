"""All READMEs are correct: programs run, commands have their options, numbers are those of the results."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import hf_vanilla
from hf_vanilla import VanillaBertConfig, VanillaTransformerConfig
from hf_vanilla.data.tokenization import train_tokenizer, train_wordpiece_tokenizer
from hf_vanilla.training import noam_learning_rate
from hf_vanilla.training.recipes import HIGHEST_PEAK
from hf_vanilla_cli.options import answer, load_table


ROOT = Path(__file__).parents[1]
FOLDERS = (
    ".",
    "hf_vanilla/models",
    "model_cards",
    "scripts",
    "scripts/benchmark",
    "scripts/launch",
    "scripts/recipes",
)
TEXTS = {folder: (ROOT / folder / "README.md").read_text(encoding="utf-8") for folder in FOLDERS}
README, SCRIPTS, SCORES, SPEEDS = (TEXTS[name] for name in (".", "scripts", "model_cards", "scripts/benchmark"))
TEXTS["CONTRIBUTING"] = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
TABLE = load_table()
RESULTS = sorted((ROOT / "model_cards" / "results").glob("*.json"))
BENCHMARKS = sorted((ROOT / "scripts" / "benchmark" / "results").glob("*.json"))
WIDTH = 12
BERTS = {
    "bert": "VanillaBertForPreTraining",
    "reviews/seed-1": "VanillaBertForSequenceClassification",
    "squad/seed-42": "VanillaBertForQuestionAnswering",
}


def blocks(python):
    """The code blocks of all texts, programs or commands, with names for their tests."""
    for name, text in TEXTS.items():
        for number, (language, code) in enumerate(re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)):
            assert language in ("", "bash", "python")
            if (language == "python") == python:
                yield pytest.param(code, id=f"{name}-{number}")


def commands():
    """The command lines of all texts, each with the commands of a block joined."""
    for block in blocks(python=False):
        for line in block.values[0].replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield pytest.param(words, id=" ".join(words)[:60])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with the files and models that the programs name, all tiny."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "train.en").write_text("the dog likes the cat\n" * 3)
    (folder / "train.de").write_text("der hund mag die katze\n" * 3)
    tokenizer = train_tokenizer(["the dog likes the cat"] * 3, 280, show_progress=False)
    sizes = dict(d_model=WIDTH, d_ff=20, num_heads=3, encoder_layers=1, decoder_layers=1)
    translator = hf_vanilla.VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(vocab_size=280, **sizes)
    )
    for name in ("runs/en-de", "demo_output", "my-name/en-de"):  # the last one in place of a repository
        translator.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    tokenizer = train_wordpiece_tokenizer(["the dog and the cat", "Ben has two dogs ."] * 3, 60, show_progress=False)
    sizes = dict(hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20)
    config = VanillaBertConfig(vocab_size=len(tokenizer), initializer_range=0.5, **sizes)
    for name, model_class in BERTS.items():
        getattr(hf_vanilla, model_class)(config).save_pretrained(folder / "runs" / name)
        tokenizer.save_pretrained(folder / "runs" / name)
    return folder


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT uses an earlier name
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")  # torch, without a GPU
@pytest.mark.parametrize("code", list(blocks(python=True)))
def test_programs_run(code, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    missing = [name for name in re.findall(r"^(?:from|import) (\w+)", code, flags=re.M) if find_spec(name) is None]
    assert not missing
    if "trust_remote_code" not in code:
        exec(compile(code, "README.md", "exec"), {})
        assert capsys.readouterr().out
        return
    program = 'import sys; sys.modules["hf_vanilla"] = None\n' + code  # without the package, and nothing is asked
    finished = subprocess.run(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert [sorted(each) for each in ast.literal_eval(finished.stdout)] == [["score", "translation_text"]] * 2
    assert "Do you wish to run the custom code?" not in finished.stdout + finished.stderr


def options_of_script(name, arguments):
    """Check the options of a benchmark, which has no entry in the table, against its source and its helpers."""
    path = ROOT / "scripts" / "benchmark" / name
    source = path.read_text(encoding="utf-8") + path.with_name("measuring.py").read_text(encoding="utf-8")
    for option in arguments:
        assert not option.startswith("--") or f"\n    {option[2:]}: " in source


@pytest.mark.parametrize("words", list(commands()))
def test_commands_are_right(words, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    words = [word.replace(".venv/bin/python", "python") for word in words]
    while re.match("[A-Z]+=", words[0]):  # variables of the environment
        words = words[1:]
    program, *arguments = words
    if program in ("accelerate", "torchrun", "scripts/launch/torchrun.sh", "sbatch"):
        program, arguments = "hf-vanilla", arguments[arguments.index("-m") + 1 :]
        arguments[0] = arguments[0].removeprefix("hf_vanilla.scripts.").replace("_", "-")
    if program == "hf-vanilla" and arguments != ["--help"]:
        answer(TABLE["commands"][arguments[0]], arguments[1:], "hf-vanilla", TABLE["trainers"])
    elif program == "make":
        targets = [argument for argument in arguments if "=" not in argument]
        assert all(re.search(rf"^{target}:", MAKEFILE, flags=re.M) for target in targets)
    elif arguments[:1] and arguments[0].startswith("scripts/benchmark/"):
        options_of_script(Path(arguments[0]).name, arguments[1:])
    elif "pip" in words and "install" in words:
        assert set(re.findall(r"\w+", "".join(re.findall(r"\[([\w,]+)\]", " ".join(words))))) <= EXTRAS.keys()
    else:
        assert words in (["hf-vanilla", "--help"], ["python3", "-m", "venv", ".venv"])


def test_wrong_option_is_found(capsys):
    with pytest.raises(SystemExit):
        answer(TABLE["commands"]["translate"], ["--model", "x", "--beams", "4"], "hf-vanilla", TABLE["trainers"])
    with pytest.raises(AssertionError):
        options_of_script("growth.py", ["--no_such_option"])


@pytest.mark.slow
def test_first_training_and_translation_run(workplace, monkeypatch):
    """The commands of the first block of "Train on your own two text files", with three updates."""
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shutil.copy("train.en", "test.en")
    shutil.copy("train.de", "test.de")
    block = re.search(r"```\n(hf-vanilla train-translation.*?)```", README, flags=re.S)[1]
    for line in block.replace("\\\n", " ").replace("--max_steps 600", "--max_steps 3").splitlines():
        command = [sys.executable, "-m", "hf_vanilla_cli", *shlex.split(line)[1:]]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert finished.returncode == 0, finished.stderr
    assert len(Path("test.out").read_text(encoding="utf-8").splitlines()) == 3


def options_of_trainings():
    """Return the options of the commands that train a translator: a small one, and the base model."""
    commands = README.split("\nhf-vanilla train-translation")[1:]
    return [dict(re.findall(r"--(\w+) ([\w./-]+)", re.split("```|\nhf-", command)[0])) for command in commands]


def test_small_training_has_a_sound_learning_rate():
    options, _ = options_of_trainings()
    d_model, warmup = int(options["d_model"]), int(options["warmup_steps"])
    assert 3 * warmup == int(options["max_steps"])
    assert noam_learning_rate(warmup, d_model, warmup) < HIGHEST_PEAK < noam_learning_rate(133, d_model, 133)


def test_best_checkpoints_of_the_training_can_be_averaged():
    _, options = options_of_trainings()
    best = int(re.search(r"average-checkpoints --run_dir runs/en-de --best (\d+)", SCRIPTS).group(1))
    assert (options["eval_strategy"], options["eval_steps"]) == ("steps", options["save_steps"])
    assert best < int(options["save_total_limit"]) <= int(options["max_steps"]) / int(options["save_steps"])


def cells_of(result):
    """Return the cells that the row of a result must have, for any kind of result."""
    if "bleu" in result:
        return [f"{result['bleu']}", f"{result['chrf']}", f"{result['notes']['training_minutes']} min"]
    if "files" in result:
        shown = {"mlm_accuracy": "{:.1%}", "nsp_accuracy": "{:.1%}", "mlm_loss": "{:.2f}"}
        shown |= {"perplexity_per_word": "{:.1f}", "bits_per_byte": "{:.3f}"}
        rows = result["files"].values()
        return [form.format(row[name]) for row in rows for name, form in shown.items() if name in row]
    if "scores" in result:
        return [f"{percent(figures['accuracy']):.1f}" for figures in result["scores"].values()]
    if "ratios" in result:
        return [f"{ratio['median']:.2f}" for ratio in result["ratios"].values()]
    return [f"{percent(figures['median']):.1f}" for figures in result["summary"].values()]


def percent(score):
    """SQuAD's scores are published from 0 to 100, all others are from 0 to 1."""
    return score if score > 1 else 100 * score


def rows_of(text, name):
    """Return the cells of each row that names a result."""
    return [
        [cell.strip() for cell in line.split("|")]
        for line in text.splitlines()
        if f"`{name}`" in line and line.startswith("|")
    ]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_scores_match_the_results(path):
    cells = [cell for row in rows_of(SCORES, path.name) for cell in row]
    expected = cells_of(json.loads(path.read_text(encoding="utf-8")))
    assert expected
    for cell in expected:
        assert cell in cells


def test_headline_numbers_match_the_results():
    paths = {path.name: path for path in [*RESULTS, *BENCHMARKS]}
    rows = [line.split("|")[1:-1] for line in README.splitlines() if re.search(r"`\w+\.json` \|$", line)]
    assert len(rows) > 8
    for _, figures, _, names in rows:
        results = [json.loads(paths[name].read_text(encoding="utf-8")) for name in re.findall(r"`(\S+?)`", names)]
        known = {cell for result in results for cell in cells_of(result)}
        assert {figure.strip() for figure in figures.split(",")} <= known
    for paragraph in re.split(r"\n\n", README):
        if "multi30k_try_out.json" in paragraph:
            bleu, _, minutes = cells_of(json.loads(paths["multi30k_try_out.json"].read_text(encoding="utf-8")))
            assert f"{bleu} BLEU" in paragraph
            assert minutes in paragraph


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_ratios_match_the_benchmarks(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    assert f"`{path.name}`" in SPEEDS
    with_tcmalloc = path.parent / "tcmalloc" / path.name
    others = json.loads(with_tcmalloc.read_text(encoding="utf-8"))["ratios"] if with_tcmalloc.exists() else {}
    assert result.get("ratios", {}).keys() >= others.keys()
    for name, ratio in result.get("ratios", {}).items():
        figures = [f"{ratio['median']:.2f}", f"{ratio['lowest']:.2f} to {ratio['highest']:.2f}"]
        figures.append(f"{ratio['target']:g}" if "target" in ratio else "–")
        [row] = [row for row in rows_of(SPEEDS, path.name) if row[3:6] == figures]
        assert row[7] == (f"{others[name]['median']:.2f}" if name in others else "–")
        medians = [side["median"] for side in result["sides"].values()]
        assert row[6] == "–" or any(
            row[6].startswith(f"{median:,.{0 if median >= 100 else 1}f} ") for median in medians
        )


@pytest.mark.parametrize("name", ["search_agreement.json", "search_agreement_greedy.json"])
def test_agreement_matches_the_searches(name):
    compared = json.loads((BENCHMARKS[0].parent / name).read_text(encoding="utf-8"))["compared"]
    [paragraph] = [part for part in SPEEDS.split("\n\n") if f"(`{name}`)" in part]
    counts = [compared[name]["hypotheses_that_differ"] for name in compared]
    assert [int(number) for number in re.findall(r" (\d+) (?:differ|in|of)", paragraph)] == counts


def test_costs_of_types_are_those_of_the_file():
    types = json.loads((BENCHMARKS[0].parent / "translation_types.json").read_text(encoding="utf-8"))["types"]
    bleu = {name: f"{figures['bleu']:.2f}" for name, figures in types.items()}
    changed = {name: figures["translations_that_differ_from_float32"] for name, figures in types.items()}
    text = " ".join(SPEEDS.split())
    assert (
        f"in int8 translates {changed['ours, int8']} otherwise than in float32 "
        f"(bfloat16 {changed['ours, bfloat16']}), CTranslate2 {changed['CTranslate2, int8']}; "
        f"BLEU is {bleu['ours, int8']} (int8), "
        f"{bleu['ours, bfloat16']} (bfloat16) and {bleu['ours, float32']} (float32), "
        f"CTranslate2's {bleu['CTranslate2, int8']} (int8) and {bleu['CTranslate2, float32']} (float32)"
    ) in text


def test_ceilings_match_the_profiles():
    results = BENCHMARKS[0].parent
    text = SPEEDS.partition("## What is left\n")[2]
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


def test_named_files_and_links_exist():
    visible = {name: re.sub("<!--.*?-->", "", text, flags=re.S) for name, text in TEXTS.items()}
    named = set(re.findall(r"`((?:hf_vanilla|scripts)/[\w/]+\.py)`", " ".join(visible.values())))
    in_makefile = set(re.findall(r"\b(?:scripts|tests)/[\w/]+(?:\.py)?", MAKEFILE))
    assert len(named) > 8
    assert {"tests/models", "tests/test_pipelines.py"} <= in_makefile
    links = {(ROOT / name, link) for name in FOLDERS for link in re.findall(r"\]\((?!http)([^)#]+)", visible[name])}
    assert len(links) > 8
    paths = [ROOT / path for path in named | in_makefile] + [folder / link for folder, link in links]
    assert [path for path in paths if not path.exists()] == []
    results = {path.name for path in [*RESULTS, *BENCHMARKS]}
    assert set(re.findall(r"`(\w+\.json)`", " ".join(visible[name] for name in FOLDERS))) <= results


def test_front_page_is_short_and_names_every_extra():
    assert len(README.splitlines()) <= 200
    table = README.partition("| extra | for |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == EXTRAS.keys()
