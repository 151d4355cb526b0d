"""Cards say what the results say, load what they show, and the cards of this repository are what the code makes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForMaskedLM, AutoTokenizer, Trainer, TrainingArguments

from hf_vanilla import VanillaBertConfig, VanillaBertForMaskedLM, VanillaBertForQuestionAnswering
from hf_vanilla.model_card import CardFacts, card_of_folder, figures_of, model_card
from hf_vanilla.tokenization import train_wordpiece_tokenizer


ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "model_cards" / "results").glob("*.json"))
SEEDS = {
    "main_score": "accuracy",
    "summary": {"validation": {"median": 0.81234, "best": 0.9, "worst": 0.5}},
    "seeds": {"1": {}, "2": {}, "3": {}},
    "command": "python scripts/finetune_classification.py",
}
PRETRAINING = {"files": {"held_out": {"mlm_loss": 2.5, "mlm_accuracy": 0.25, "nsp_accuracy": 0.82}}}


def card(results, **options):
    given = {"model_type": "vanilla_bert", "auto_class": "AutoModelForMaskedLM", **options}
    return model_card(
        CardFacts(title="Tiny", license="apache-2.0", language=["en"]), "me/tiny", results=results, **given
    )


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_figure_stands_in_table_and_metadata(path):
    results = json.loads(path.read_text(encoding="utf-8"))
    made = card(results)
    figures = figures_of(results)
    assert figures
    in_metadata = {(each.dataset_name, each.metric_name): each.metric_value for each in made.data.eval_results}
    assert in_metadata == {(dataset, score): value for dataset, score, value in figures}
    for dataset, score, value in figures:
        assert f"| {dataset} | {score} | {value} |" in made.text
    for command in results.get("commands", []):
        assert command in made.text


def test_the_three_kinds_of_results():
    assert figures_of(SEEDS) == [("validation", "accuracy, median of 3 seeds", 0.8123)]
    assert [value for _, _, value in figures_of(PRETRAINING)] == [2.5, 0.25, 0.82]
    assert figures_of({}) == []


def test_a_card_without_results_has_no_table():
    made = card(None)
    assert "## Results" not in made.text
    assert made.data.eval_results is None
    assert "Nobody has said yet." in made.text


def test_metadata_survives_a_round_trip(tmp_path):
    card(PRETRAINING).save(tmp_path / "README.md")
    loaded = ModelCard.load(tmp_path / "README.md").data
    assert (loaded.license, loaded.language, loaded.pipeline_tag) == ("apache-2.0", ["en"], "fill-mask")
    assert [each.metric_value for each in loaded.eval_results] == [2.5, 0.25, 0.82]
    assert loaded.tags == ["hf_vanilla", "vanilla_bert"]


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
        ({"model_type": "bert"}, "`model_type` must be one of vanilla_transformer, vanilla_bert; got 'bert'"),
        ({"auto_class": "AutoModelForCausalLM"}, "`auto_class` must be one of"),
    ],
    ids=["family", "class"],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        card(None, **options)


def test_the_code_of_a_card_runs_and_the_curve_is_drawn(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    tokenizer = train_wordpiece_tokenizer(["the dog and the cat"] * 3, 40, show_progress=False)
    config = VanillaBertConfig(
        vocab_size=len(tokenizer), hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20
    )
    args = TrainingArguments(
        output_dir=str(folder), max_steps=3, logging_steps=1, save_strategy="no", use_cpu=True, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": [2, 5, 6, 3], "labels": [-100, 6, -100, -100]}] * 8
    trainer = Trainer(VanillaBertForMaskedLM(config), args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    made = card_of_folder(folder, str(folder))
    assert "![Loss over the steps of the training](training_curve.png)" in made.text
    assert (folder / "training_curve.png").stat().st_size > 5000
    blocks = re.findall(r"```python\n(.*?)```", made.text, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        names = {}
        exec(compile(block, "card", "exec"), names)
        assert torch.equal(names["model"].get_input_embeddings().weight, trainer.model.get_input_embeddings().weight)
        assert type(names["tokenizer"]) is type(AutoTokenizer.from_pretrained(folder))
    assert type(names["model"]) is type(AutoModelForMaskedLM.from_pretrained(folder))


def test_a_card_tells_of_the_pipeline_that_the_model_brings(tmp_path):
    config = VanillaBertConfig(
        vocab_size=11, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20
    )
    for model_class, told in ((VanillaBertForQuestionAnswering, True), (VanillaBertForMaskedLM, False)):
        model_class(config).save_pretrained(tmp_path)
        text = card_of_folder(tmp_path, "me/tiny").text
        line = '`pipeline("question-answering", model="me/tiny", trust_remote_code=True)`'
        assert (line in text) is told
        assert "\n\n\n" not in text


FACTS = json.loads((ROOT / "model_cards" / "facts.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FACTS)
def test_the_cards_of_the_recipes_are_what_their_results_make(name, tmp_path):
    """So every number in a card is that of its JSON file."""
    copied = tmp_path / "model_cards"
    shutil.copytree(ROOT / "model_cards", copied)
    (copied / f"{name}.md").unlink()
    script = ROOT / "scripts" / "write_model_cards.py"
    subprocess.run([sys.executable, script, "--folder", copied], check=True, timeout=120)
    assert (copied / f"{name}.md").read_text("utf-8") == (ROOT / "model_cards" / f"{name}.md").read_text("utf-8")
