"""Model cards have the scores of the results, their code runs, and those of this repository are up to date."""

import ast
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from transformers import Trainer, TrainingArguments

from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForMaskedLM,
    VanillaBertForMultipleChoice,
    VanillaBertForNextSentencePrediction,
    VanillaBertForPreTraining,
    VanillaBertForQuestionAnswering,
    VanillaBertForSequenceClassification,
    VanillaBertForTokenClassification,
    VanillaBertModel,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaVitConfig,
    VanillaVitForImageClassification,
    VanillaVitModel,
)
from hf_vanilla.data.images import build_image_processor
from hf_vanilla.data.tokenization import train_tokenizer, train_wordpiece_tokenizer
from hf_vanilla.hub.card import (
    CURVE,
    CardFacts,
    card_of_folder,
    draw_curve,
    missing_facts,
    model_card,
    strip_local_paths,
)
from hf_vanilla.hub.results import list_scores


ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "scripts"))

from script_runner import run, run_here  # noqa: E402


TOKENIZER = train_wordpiece_tokenizer(["the dog and the cat"] * 3, 40, show_progress=False)
SIZES = dict(
    vocab_size=len(TOKENIZER), hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20
)
RESULTS = sorted((ROOT / "model_cards" / "results").glob("*.json"))
SEEDS = {
    "main_score": "accuracy",
    "summary": {"validation": {"median": 0.81234, "best": 0.9, "worst": 0.5}},
    "seeds": {
        seed: {"validation": {"loss": 0.3, "accuracy": value}}
        for seed, value in (("1", 0.81234), ("2", 0.9), ("3", 0.5))
    },
    "command": "python scripts/finetune_classification.py",
}
PRETRAINING = {"files": {"held_out": {"mlm_loss": 2.5, "mlm_accuracy": 0.25, "nsp_accuracy": 0.82}}}


def card(results, **options):
    given = {"model_type": "vanilla_bert", "auto_class": "AutoModelForMaskedLM", **options}
    return model_card(
        CardFacts(title="Tiny", license="apache-2.0", language=["en"]), "me/tiny", results=results, **given
    )


# Metrics of the library `evaluate`, which the Hub uses; it lacks the last two.
KNOWN_METRICS = [
    "bleu",
    "chrf",
    "loss",
    "accuracy",
    "f1",
    "exact_match",
    "matthews_correlation",
    "pearsonr",
    "spearmanr",
    "perplexity",
    "bits_per_byte",
    "perplexity_per_token",
]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_score_is_in_table_and_metadata(path):
    results = json.loads(path.read_text(encoding="utf-8"))
    made = card(results)
    scores = list_scores(results)
    assert scores
    in_metadata = [
        (each.dataset_name, each.metric_type, each.metric_name, each.metric_value) for each in made.data.eval_results
    ]
    assert sorted(in_metadata) == sorted(map(tuple, scores))
    for dataset, metric, name, value in scores:
        assert f"| {dataset} | {name} | {value} |" in made.text
        assert metric in KNOWN_METRICS
    for command in results.get("commands", []):
        assert command.strip() in made.text


def test_every_kind_of_results_has_scores():
    assert list_scores(SEEDS) == [("validation", "accuracy", "accuracy (median of 3 seeds)", 0.8123)]
    assert list_scores(SEEDS, "2") == [("validation", "accuracy", "accuracy", 0.9)]
    assert list_scores(SEEDS, "7") == list_scores(SEEDS)
    assert [score.value for score in list_scores(PRETRAINING)] == [2.5, 0.25, 0.82]
    assert [score.metric for score in list_scores(PRETRAINING)] == ["loss", "accuracy", "accuracy"]
    assert [score.name for score in list_scores({"chrf": 40.0, "ter": 30.0})] == ["chrF", "TER"]
    assert list_scores({}) == []


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"limits": ["Captions only."]}, "`limits` of the card must be a string, got"),
        ({"language": "en"}, "`language` of the card must be a list of strings, got 'en'"),
    ],
)
def test_facts_of_other_types_are_named(facts, message):
    with pytest.raises(TypeError, match=message):
        CardFacts(**facts)


@pytest.mark.parametrize(
    ("name", "identifier"),
    [
        ("data/Heldout-2.test.jsonl.gz", "data_heldout_2_test"),
        ("newstest2014.en", "newstest2014_en"),
        ("---", "unnamed"),
        ("数据.txt", "数据"),
    ],
)
def test_data_sets_get_identifiers(name, identifier):
    made = card({"bleu": 12.5, "chrf": 30.0, "notes": {"test_set": name}})
    assert {(each.dataset_name, each.dataset_type) for each in made.data.eval_results} == {(name, identifier)}


def test_card_has_no_empty_sections():
    made = card(None)
    headings = re.findall(r"^#+ .*", made.text, flags=re.MULTILINE)
    assert headings == ["# Tiny", "## How to use it"]
    assert made.data.eval_results is None
    assert str(made).endswith("again.\n")
    facts = CardFacts(training_data="Ten words.", limits="All.", language=["en"], license="mit", datasets=["a/b"])
    made = model_card(facts, "me/tiny", model_type="vanilla_bert", auto_class="AutoModel", results=SEEDS)
    headings = re.findall(r"^#+ .*", made.text, flags=re.MULTILINE)
    assert headings == [
        "# tiny", "## How to use it", "## Training data", "## How it was trained", "## Results", "## Limits"
    ]  # fmt: skip
    assert "\n\n\n" not in str(made)
    assert str(made).endswith("All.\n")
    assert missing_facts(facts) == []
    assert missing_facts(None) == missing_facts(CardFacts()) == [
        "language", "license", "datasets", "training_data", "limits"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "python train.py --file /home/me/data/a.txt --out=/srv/runs/b/ ~/c",
            "python train.py --file a.txt --out=b c",
        ),
        ("python /opt/x/train.py --file '/my home/a b.txt'", "python train.py --file 'a b.txt'"),
        ("zcat a/b.gz | awk '/^ = [^=]/ {print}' > c/d.txt", "zcat a/b.gz | awk '/^ = [^=]/ {print}' > c/d.txt"),
        ('echo "open /home/me/a', 'echo "open a'),
    ],
    ids=["options", "spaces", "no paths", "open quotation mark"],
)
def test_local_paths_are_not_published(command, expected):
    assert strip_local_paths(command) == expected
    assert expected in card({**SEEDS, "command": command}).text


def test_metadata_survives_a_round_trip(tmp_path):
    card(PRETRAINING).save(tmp_path / "README.md")
    loaded = ModelCard.load(tmp_path / "README.md").data
    assert (loaded.license, loaded.language, loaded.pipeline_tag) == ("apache-2.0", ["en"], "fill-mask")
    assert [each.metric_value for each in loaded.eval_results] == [2.5, 0.25, 0.82]
    assert loaded.tags == ["hf_vanilla", "vanilla_bert"]


@pytest.mark.promise("hostile text")
def test_hostile_facts_do_not_break_the_metadata(tmp_path):
    evil = CardFacts(
        title="x\n---\nlicense: mit\n---", license="apache-2.0", training_data="{{ 7 * 7 }} \x1b[31m<script>"
    )
    made = model_card(evil, "me/tiny", model_type="vanilla_bert", auto_class="AutoModel")
    made.save(tmp_path / "README.md")
    assert ModelCard.load(tmp_path / "README.md").data.license == "apache-2.0"
    assert "49" not in made.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "bert"}, "`model_type` must be one of vanilla_transformer, vanilla_bert, .*; got 'bert'"),
        ({"auto_class": "AutoModelForObjectDetection"}, "`auto_class` must be one of"),
    ],
    ids=["family", "class"],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        card(None, **options)


def test_code_of_a_card_runs_and_the_curve_is_drawn(tmp_path, capsys):
    folder = tmp_path / "model"
    config = VanillaBertConfig(**SIZES)
    args = TrainingArguments(
        output_dir=str(folder), max_steps=3, logging_steps=1, save_strategy="no", use_cpu=True, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": [2, 5, 6, 3], "labels": [-100, 6, -100, -100]}] * 8
    trainer = Trainer(VanillaBertForMaskedLM(config), args, train_dataset=rows, processing_class=TOKENIZER)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    (folder / CURVE).write_bytes(draw_curve(folder))
    assert (folder / CURVE).stat().st_size > 5000
    made = card_of_folder(folder, str(folder))
    assert "![Loss over the steps of the training](training_curve.png)" in made.text
    assert f" {trainer.model.num_parameters():,} parameters: " in made.text
    assert "- updates: 3\n" in made.text
    blocks = re.findall(r"```python\n(.*?)```", made.text, flags=re.DOTALL)
    assert len(blocks) == 2
    capsys.readouterr()
    for block in blocks:
        names = {}
        exec(compile(block, "card", "exec"), names)
        weight = names["pipe"].model.get_input_embeddings().weight
        assert torch.equal(weight, trainer.model.get_input_embeddings().weight)
        assert len(capsys.readouterr().out.splitlines()) == 5
    assert type(names["pipe"].model) is VanillaBertForMaskedLM


@pytest.mark.parametrize(
    "model_class",
    [
        VanillaBertForMultipleChoice, VanillaBertForNextSentencePrediction, VanillaBertForPreTraining,
        VanillaBertForQuestionAnswering, VanillaBertForSequenceClassification, VanillaBertForTokenClassification,
        VanillaBertModel,
    ],
    ids=lambda each: each.__name__,
)  # fmt: skip
def test_code_of_every_head_runs(tmp_path, capsys, model_class):
    model_class(VanillaBertConfig(**SIZES)).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    text = card_of_folder(tmp_path, str(tmp_path)).text
    with_package, without = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for block in (with_package, without):
        exec(compile(block, "card", "exec"), {})
        assert bool(capsys.readouterr().out) is (model_class is not VanillaBertModel)
    assert "trust_remote_code=True" in without
    assert "trust_remote_code" not in with_package
    assert "\n\n\n" not in text


def test_code_of_a_translator_runs_with_its_example(tmp_path, capsys):
    config = VanillaTransformerConfig(
        vocab_size=280, d_model=12, d_ff=20, num_heads=3, encoder_layers=1, decoder_layers=1
    )
    VanillaTransformerForConditionalGeneration(config).save_pretrained(tmp_path)
    train_tokenizer(["the dog likes the cat"] * 3, 280, show_progress=False).save_pretrained(tmp_path)
    text = card_of_folder(tmp_path, str(tmp_path), CardFacts(example='the "dog"\nlikes')).text
    assert ": 1+1 layers of width 12, 3 heads, feed-forward networks of width 20, vocabulary of 280.\n" in text
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for block, task in zip(blocks, ("vanilla-translation", "translation"), strict=True):
        assert f'pipeline("{task}", ' in block
        assert r'"the \"dog\"\nlikes"' in block
        exec(compile(block, "card", "exec"), {})
        assert capsys.readouterr().out
    # Without a pipeline in the checkpoint, the card loads the model instead.
    config = json.loads((tmp_path / "config.json").read_text())
    del config["custom_pipelines"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = card_of_folder(tmp_path, "me/tiny").text
    assert 'pipeline("translation"' not in text
    assert 'AutoModelForSeq2SeqLM.from_pretrained("me/tiny", trust_remote_code=True)' in text


def test_scores_come_from_the_folder_without_a_results_file(tmp_path):
    folder = tmp_path / "seed-2"
    VanillaBertForSequenceClassification(VanillaBertConfig(**SIZES)).save_pretrained(folder)
    (folder / "eval_results.json").write_text('{"eval_loss": 3.5, "eval_bleu": 9.591, "eval_runtime": 0.8}')
    (folder / "trainer_state.json").write_text('{"global_step": 1200}')
    (folder / "train_results.json").write_text('{"epoch": 2.50, "train_runtime": 90.0}')
    made = card_of_folder(folder, "me/tiny")
    assert [(each.metric_type, each.metric_value) for each in made.data.eval_results] == [("bleu", 9.59)]
    assert "- updates: 1,200\n- epochs: 2.5\n- minutes since the last start: 1.5\n" in made.text
    assert " parameters: 1 layers of width 12, 3 heads, " in made.text
    (folder / "eval_results.json").write_text(
        '{"eval_128_tokens_mlm_accuracy": 0.5, "eval_512_tokens_mlm_accuracy": 0.25}'
    )
    text = card_of_folder(folder, "me/tiny").text
    assert "| validation, 128 tokens | accuracy of masked tokens | 0.5 |\n| validation, 512 tokens |" in text
    (folder / "eval_results.json").unlink()
    (folder / "scores.json").write_text('{"test": {"loss": 0.5, "f1": 0.25}}')
    assert "| test | f1 | 0.25 |" in card_of_folder(folder, "me/tiny").text
    # A results file takes precedence, with the scores of the folder's seed.
    made = card_of_folder(folder, "me/tiny", results=SEEDS)
    assert [(each.metric_name, each.metric_value) for each in made.data.eval_results] == [("accuracy", 0.9)]
    assert "- updates: 1,200\n" in made.text


def test_curve_needs_two_losses(tmp_path):
    assert draw_curve(tmp_path) is None
    log = [{"step": 10, "loss": 2.0}, {"step": 20, "eval_loss": 2.0, "eval_accuracy": 0.5}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    assert draw_curve(tmp_path) is None


FACTS = json.loads((ROOT / "model_cards" / "facts.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FACTS)
def test_cards_of_the_recipes_are_up_to_date(name, tmp_path):
    # So every number in a card is that of its JSON file.
    copied = tmp_path / "model_cards"
    shutil.copytree(ROOT / "model_cards", copied)
    (copied / f"{name}.md").unlink()
    finished = run("write_model_cards.py", "--folder", copied)
    assert finished.returncode == 0, finished.stderr
    assert (copied / f"{name}.md").read_text("utf-8") == (ROOT / "model_cards" / f"{name}.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("file", "content", "options", "message"),
    [
        ("facts.json", '{"multi', [], r"facts\.json must be JSON in UTF-8"),
        ("results/multi30k_en_de_tok.json", "", [], r"multi30k_en_de_tok\.json must be JSON in UTF-8"),
        ("results/multi30k_en_de_tok.json", "[]", [], r"multi30k_en_de_tok\.json must hold a JSON object, got list"),
        (None, None, ["--namespace", "../../<b>"], r"`namespace` must be an account on the Hub, got '\.\./\.\./<b>'"),
    ],
    ids=["cut facts", "empty results", "list", "namespace"],
)
def test_script_names_what_is_wrong_with_its_input(tmp_path, monkeypatch, capsys, file, content, options, message):
    copied = tmp_path / "model_cards"
    shutil.copytree(ROOT / "model_cards", copied)
    if file is not None:
        (copied / file).write_text(content)
    assert run_here(monkeypatch, "write_model_cards.py", "--folder", copied, *options) == 1
    assert re.search(message, capsys.readouterr().err)


HOSTILE = "<img src=x onerror=alert(1)> \x1b[31mred\x1b[0m | cell\n# heading\n[link](http://x) ```"


def test_facts_of_an_author_load_and_run_nothing():
    evil = "[Here](http://x).\n\n- <script>alert(1)</script>\n- ![seen](http://x/y.png) \x1b[31mred\x9b\u202e\x07"
    facts = CardFacts(training_data=evil, limits=evil, example=f'A "dog"\n```\n{evil}')
    text = str(model_card(facts, "me/tiny", model_type="vanilla_bert", auto_class="AutoModelForMaskedLM"))
    body = text[text.index("\n---\n", 3) :]
    assert all(sign.isprintable() or sign == "\n" for sign in body)
    parts = re.split("^```.*$", body, flags=re.MULTILINE)
    programs, prose = parts[1::2], "".join(parts[::2])
    assert "<script>" not in prose
    assert prose.count("[Here](http://x).\n\n- &lt;script>") == prose.count("\n- \\![seen](http://x/y.png)") == 2
    for program in programs:
        (call,) = re.findall(r"pipe\((.*)\)", program)
        assert ast.literal_eval(call) == facts.example


@pytest.mark.promise("hostile text")
def test_text_from_files_is_escaped():
    results = {
        "bleu": 12.5,
        "chrf": 30.0,
        "notes": {"test_set": HOSTILE, HOSTILE: HOSTILE},
        "commands": [f"python train.py --x '{HOSTILE}'"],
    }
    text = str(card(results))
    body = text[text.index("\n---\n", 3) :]
    assert "\x1b" not in text
    outside, commands = body.split("## How it was trained")[0] + body.split("```")[-1], body.split("```")[-2]
    assert "onerror=alert(1)" in commands
    assert "<img" not in outside
    assert "&lt;img" in outside
    assert "\n# heading" not in body
    assert "[link](" not in outside
    row = next(line for line in body.splitlines() if line.endswith("| BLEU | 12.5 |"))
    assert row.replace("\\|", "").count("|") == 4
    assert not any(line.startswith("```") for line in commands.splitlines())


@pytest.mark.parametrize("head", ["classifier", "none"])
def test_code_of_an_image_model_runs_with_its_example(tmp_path, capsys, head):
    sizes = dict(hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20)
    config = VanillaVitConfig(**sizes, image_size=(8, 12), patch_size=4)
    (VanillaVitForImageClassification if head == "classifier" else VanillaVitModel)(config).save_pretrained(tmp_path)
    build_image_processor(config).save_pretrained(tmp_path)
    Image.new("L", (9, 5)).save(tmp_path / "picture.png")
    made = card_of_folder(tmp_path, str(tmp_path), CardFacts(example=str(tmp_path / "picture.png")))
    assert "width 20, images of [8, 12] pixels, patches of 4.\n" in made.text.replace("\\", "")
    assert made.data.pipeline_tag == ("image-classification" if head == "classifier" else "image-feature-extraction")
    for block in re.findall(r"```python\n(.*?)```", made.text, flags=re.DOTALL):
        names = {}
        exec(compile(block, "card", "exec"), names)
        assert ("LABEL_0" in capsys.readouterr().out) == (head == "classifier")
        assert head == "classifier" or "AutoImageProcessor" in block


def test_code_of_a_grey_image_model_runs(tmp_path, capsys):
    sizes = dict(hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20)
    config = VanillaVitConfig(**sizes, image_size=8, patch_size=4, num_channels=1)
    VanillaVitForImageClassification(config).save_pretrained(tmp_path)
    build_image_processor(config).save_pretrained(tmp_path)
    Image.new("RGB", (9, 5)).save(tmp_path / "picture.png")
    made = card_of_folder(tmp_path, str(tmp_path), CardFacts(example=str(tmp_path / "picture.png")))
    blocks = re.findall(r"```python\n(.*?)```", made.text, flags=re.DOTALL)
    assert len(blocks) > 1
    for block in blocks:
        exec(compile(block, "card", "exec"), {})
        assert "LABEL_" in capsys.readouterr().out
