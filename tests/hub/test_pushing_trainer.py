"""Pushes of a training: as safe as `publish`, and never the end of the training."""

import copy
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from hub_server import TOKEN, git_hash
from hub_testing import REPO, lie_about_weights, run_as_user
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments

import hf_vanilla.training
from hf_vanilla import VanillaBertForMaskedLM
from hf_vanilla.hub import check_folder, publish
from hf_vanilla.training import (
    FinetuningArguments,
    FinetuningTask,
    OrderedEvaluationTrainer,
    ResilientPushTrainer,
    VanillaTrainer,
    VanillaTrainingArguments,
    save_final_model,
    train_with_seeds,
)


# huggingface_hub uses its HTTP library in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


ROWS = Dataset.from_dict({"input_ids": [[2, 5, 6, 3]] * 8, "labels": [[-100, 6, -100, -100]] * 8})


class WaitForPush(transformers.TrainerCallback):
    """Wait for each push, so that none is skipped."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_save(self, *args, **kwargs):
        push = getattr(self.trainer, "push_in_progress", None)
        if push is not None:
            push.wait_until_done()


def training_args(tmp_path, cls=VanillaTrainingArguments, **options):
    defaults = dict(hub_model_id="tiny", push_to_hub=True, max_steps=4, save_strategy="steps", save_steps=2)
    options = {**defaults, "use_cpu": True, "report_to": [], "disable_tqdm": True, **options}
    return cls(output_dir=str(tmp_path / "run"), **options)


def make_trainer(folder, tmp_path, classes=(VanillaTrainer, VanillaTrainingArguments), model=None, **options):
    trainer_class, arguments_class = classes
    model = model or VanillaBertForMaskedLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    args = training_args(tmp_path, arguments_class, **options)
    trainer = trainer_class(model, args, train_dataset=ROWS, processing_class=tokenizer)
    trainer.add_callback(WaitForPush(trainer))
    return trainer


def translation_trainer():
    """The stock trainer as train_translation.py makes it."""
    path = Path(__file__).parents[2] / "scripts" / "train_translation.py"
    specification = importlib.util.spec_from_file_location("train_translation_script", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module.VerifiedSeq2SeqTrainer, transformers.Seq2SeqTrainingArguments


def failures(caplog):
    return [message for message in caplog.messages if "Training continues" in message]


@pytest.mark.promise("Hub down in training")
@pytest.mark.parametrize(
    "make_classes",
    [
        lambda: (VanillaTrainer, VanillaTrainingArguments),
        translation_trainer,
        lambda: (ResilientPushTrainer, FinetuningArguments),
        lambda: (OrderedEvaluationTrainer, FinetuningArguments),
    ],
    ids=["ours", "translation", "fine-tuning", "question answering"],
)
def test_training_survives_hub_outage(hub, folder, tmp_path, caplog, make_classes):
    hub.fail(*({"method": method, "path": "/api/", "status": 503, "times": 9999} for method in ("GET", "POST")))
    trainer = make_trainer(folder, tmp_path, make_classes())
    trainer.train()
    assert trainer.state.global_step == 4
    assert (tmp_path / "run" / "checkpoint-4" / "model.safetensors").exists()
    assert failures(caplog)
    assert hub.requests("POST", "/api/repos/create")
    hub.fail()
    trainer.push_to_hub()
    assert hub.titles() == ["End of training", "initial commit"]
    names = hub.files().keys()
    assert {"config.json", "layers.py", "model.safetensors", "modeling_vanilla_bert.py", "tokenizer.json"} <= names
    assert "training_args.bin" not in names


@pytest.mark.parametrize(
    ("strategy", "folders"),
    [("every_save", []), ("checkpoint", ["last-checkpoint"]), ("all_checkpoints", ["checkpoint-2", "checkpoint-4"])],
)
def test_checkpoint_is_pushed_in_one_commit(hub, folder, tmp_path, strategy, folders):
    (tmp_path / "run" / "target_tokenizer").mkdir(parents=True)
    (tmp_path / "run" / "target_tokenizer" / "vocab.txt").write_text("of the run")
    trainer = make_trainer(folder, tmp_path, hub_strategy=strategy, save_total_limit=1, hub_always_push=True)
    trainer.remove_callback(WaitForPush)
    hub.fail({"method": "POST", "path": "/preupload/", "wait": 2})  # the first checkpoint is removed before its upload
    trainer.train()
    assert hub.titles() == ["Training in progress, step 4", "Training in progress, step 2", "initial commit"]
    files = hub.files()
    assert {"config.json", "layers.py", "modeling_vanilla_bert.py", "target_tokenizer/vocab.txt"} <= files.keys()
    states = {name for name in files if name.endswith(("optimizer.pt", "scheduler.pt", "trainer_state.json"))}
    assert {name.rpartition("/")[0] for name in states} == set(folders)
    assert len(states) == 3 * len(folders)
    assert not any(name.endswith("training_args.bin") for name in files)
    pushed = VanillaBertForMaskedLM.from_pretrained(REPO, cache_dir=tmp_path / "cache").state_dict()
    assert not (tmp_path / "run" / "_pushing").exists()
    # The checks of a push draw no random numbers: training with dropout gives the same weights without pushes.
    transformers.set_seed(0)
    alone = make_trainer(folder, tmp_path / "alone", push_to_hub=False, hub_model_id=None)
    alone.train()
    assert all(torch.equal(value, pushed[name]) for name, value in alone.model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("notes.txt", "hf_" + "Z" * 35, "notes.txt contains a token of the Hub"),
        ("cache.pkl", "x", "cache.pkl may be a pickle"),
        ("link.txt", Path("/etc/hostname"), "link.txt is a link to /etc/hostname"),
    ],
)
def test_unfit_folder_is_not_pushed(hub, folder, tmp_path, caplog, name, content, message):
    unfit = tmp_path / "run" / name
    unfit.parent.mkdir()
    if isinstance(content, Path):
        unfit.symlink_to(content)
    else:
        unfit.write_text(content)
    trainer = make_trainer(folder, tmp_path)
    trainer.train()
    assert trainer.push_to_hub() is None
    assert [message in each for each in failures(caplog)] == [True, True]
    assert message in caplog.messages[-1]
    assert "to push it later: python scripts/push_to_hub.py" in caplog.messages[-1]
    assert hub.titles() == ["initial commit"]
    assert hub.requests("PUT", "/lfs/") == []
    assert "Z" * 35 not in caplog.text
    unfit.unlink()
    assert trainer.push_to_hub().oid == hub.api.repo_info(REPO).sha


def test_broken_checkpoint_is_not_pushed(hub, folder, tmp_path, caplog):
    trainer = make_trainer(folder, tmp_path)

    class BreakWeights(transformers.TrainerCallback):
        def on_push_begin(self, *args, **kwargs):
            path = tmp_path / "run" / "checkpoint-2" / "model.safetensors"
            path.write_bytes(path.read_bytes()[:-9])

    trainer.add_callback(BreakWeights())
    trainer.train()
    assert ["does not load" in message for message in failures(caplog)] == [True]
    assert hub.titles() == ["Training in progress, step 4", "initial commit"]


def test_push_of_a_training_is_verified(hub, folder, tmp_path, monkeypatch, caplog):
    titles = ["End of training", "Training in progress, step 2"]
    lie_about_weights(monkeypatch, hub, *titles)
    trainer = make_trainer(folder, tmp_path, max_steps=2)
    trainer.train()
    assert trainer.push_to_hub() is None
    assert "is not what was sent: model.safetensors" in failures(caplog)[0]
    assert "is not what was sent: model.safetensors" in caplog.messages[-1]
    assert hub.titles() == [*titles, "initial commit"]


class OwnHead(VanillaBertForMaskedLM):
    """A class that neither the package nor transformers knows."""


def lora(folder):
    return get_peft_model(VanillaBertForMaskedLM.from_pretrained(folder), LoraConfig(target_modules=["fc1"]))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("load", "name"),
    [(OwnHead.from_pretrained, "model.safetensors"), (lora, "adapter_model.safetensors")],
    ids=["own class", "adapter"],
)
def test_other_models_are_pushed(hub, folder, tmp_path, caplog, load, name):
    trainer = make_trainer(folder, tmp_path, model=load(folder))
    trainer.train()
    assert trainer.push_to_hub().oid == hub.api.repo_info(REPO).sha
    assert failures(caplog) == []
    assert "Training in progress, step 4" in hub.titles()
    assert name in hub.files()


@pytest.mark.promise("Hub down in training")
def test_refusal_ends_the_run_before_the_first_step(hub, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "B" * 37)
    with pytest.raises(HfHubHTTPError, match="401"):
        make_trainer(folder, tmp_path)


DOWN = [{"method": method, "path": "/", "status": 503, "times": 9999} for method in ("GET", "POST", "PUT", "HEAD")]


REFUSES = [{"method": "POST", "path": "/commit/", "status": 403, "times": 9999}]


@pytest.mark.parametrize("faults", [DOWN, REFUSES], ids=["down", "refuses"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_final_push_reports_a_failure(hub, folder, tmp_path, waits, caplog, faults, when):
    if when == "before":
        hub.fail(*faults)
    trainer = make_trainer(folder, tmp_path, hub_strategy="end", hub_revision="main")
    trainer.train()
    hub.fail(*faults)
    waits.clear()
    save_final_model(trainer)
    repo = "alice/tiny" if (when, faults) != ("before", DOWN) else "tiny"
    command = f"python scripts/push_to_hub.py --folder {tmp_path}/run --repo_id {repo} --revision main"
    assert [message.rpartition("later: ")[2] for message in caplog.messages if "later" in message] == [command]
    assert waits == ([1, 2, 4, 8, 16] if faults is DOWN else [])
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["global_step"] == 4
    check_folder(tmp_path / "run")
    hub.fail()
    save_final_model(trainer)
    assert "model.safetensors" in hub.files()
    assert "training_args.bin" not in hub.files()


@pytest.mark.parametrize("status", [401, 403, 503])
def test_failed_push_of_a_checkpoint_is_reported_once(hub, folder, tmp_path, waits, caplog, status):
    trainer = make_trainer(folder, tmp_path, save_steps=1)
    hub.fail({"method": "POST", "path": "/commit/", "status": status, "skip": 1, "times": 2})
    trainer.train()
    assert trainer.state.global_step == 4
    pushed, failed = ((4, 3, 2, 1), 0) if status == 503 else ((4, 1), 2)  # 503 is transient, so it is retried
    assert [str(status) in message for message in failures(caplog)] == [True] * failed
    assert waits == ([1, 2] if status == 503 else [])
    assert hub.titles() == [f"Training in progress, step {step}" for step in pushed] + ["initial commit"]


@pytest.mark.promise("Hub down in training")
def test_training_survives_the_end_of_the_hub(hub, folder, tmp_path, caplog):
    trainer = make_trainer(folder, tmp_path)
    hub.process.kill()
    hub.process.wait()
    trainer.train()
    assert trainer.state.global_step == 4
    assert len(failures(caplog)) == 2


@pytest.mark.promise("Hub down in training")
@pytest.mark.parametrize("status", [401, 403])
def test_training_survives_a_late_refusal(hub, folder, tmp_path, caplog, status):
    hub.fail({"method": "POST", "path": "/repos/create", "status": 503, "times": 9999})
    trainer = make_trainer(folder, tmp_path)
    hub.fail({"method": "POST", "path": "/repos/create", "status": status, "times": 9999})
    trainer.train()
    assert trainer.state.global_step == 4
    codes = ("503", str(status), str(status))
    assert [code in message for message, code in zip(failures(caplog), codes, strict=True)] == [True] * 3
    assert hub.requests("POST", "/commit/") == []


def test_training_pushes_the_card_of_publish(hub, folder, tmp_path):
    trainer = make_trainer(folder, tmp_path, hub_strategy="end", logging_steps=1)
    trainer.train()
    save_final_model(trainer)
    card = (tmp_path / "run" / "README.md").read_text()
    assert hub.files()["README.md"] == git_hash(card.encode())
    assert "training_curve.png" in hub.files()
    assert 'model="alice/tiny", trust_remote_code=True' in card
    assert "- updates: 4" in card
    assert "More information needed" not in card
    trainer.push_to_hub(language="en", license="mit", dataset_tags=["a/b"], finetuned_from="c/d", tags="e")
    data = ModelCard.load(tmp_path / "run" / "README.md").data
    assert (data.language, data.license, data.datasets, data.base_model) == (["en"], "mit", ["a/b"], "c/d")
    assert publish(tmp_path / "run", REPO).card is None


def test_edited_card_is_kept(hub, folder, tmp_path, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "README.md").write_text("# Mine\n")
    make_trainer(folder, tmp_path, hub_strategy="end").push_to_hub()
    assert hub.files()["README.md"] == git_hash(b"# Mine\n")
    assert "README.md is kept as it is" in caplog.text


def test_error_in_a_card_is_a_warning(hub, folder, tmp_path, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eval_results.json").write_text("{")
    make_trainer(folder, tmp_path, hub_strategy="end").push_to_hub()
    assert "No model card was written" in caplog.text
    assert {"model.safetensors", "README.md"} & hub.files().keys() == {"model.safetensors"}


def test_model_of_another_family_gets_the_stock_card(hub, tmp_path):
    sizes = dict(vocab_size=12, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    trainer = ResilientPushTrainer(model, training_args(tmp_path, TrainingArguments), train_dataset=ROWS)
    trainer.push_to_hub(license="mit", tags="small", dataset_tags="a/b")
    card = ModelCard.load(tmp_path / "run" / "README.md")
    assert "generated_from_trainer" in card.data.tags
    assert "model.safetensors" in hub.files()
    assert (card.data.license, card.data.datasets) == ("mit", ["a/b"])


def test_final_push_waits_for_the_hub(hub, folder, tmp_path, waits):
    trainer = make_trainer(folder, tmp_path, hub_strategy="end")
    trainer.train()
    hub.fail({"method": "POST", "path": "/commit/", "status": 503, "times": 2})
    assert trainer.push_to_hub().oid == hub.api.repo_info(REPO).sha
    assert waits == [1, 2]
    assert hub.titles() == ["End of training", "initial commit"]
    (tmp_path / "run" / "notes.txt").write_text("new")
    assert trainer.push_to_hub("again", blocking=False).result().oid == hub.api.repo_info(REPO).sha
    assert hub.titles()[0] == "again"


@pytest.mark.parametrize(
    ("seeds", "given", "names"), [((1, 2), "tiny", ["tiny-seed-1", "tiny-seed-2"]), ((3,), None, ["run"])]
)
def test_each_seed_has_a_repository_of_its_own(hub, folder, tmp_path, seeds, given, names):
    def trainer(args):
        return ResilientPushTrainer(VanillaBertForMaskedLM.from_pretrained(folder), args, train_dataset=ROWS)

    args = training_args(tmp_path, FinetuningArguments, hub_model_id=given, max_steps=1)
    train_with_seeds(FinetuningTask(trainer, {"validation": ROWS}, "runtime"), args, seeds)
    for name in names:
        assert hub.api.file_exists(f"alice/{name}", "model.safetensors")


def test_a_private_repository_stays_private_when_it_is_pushed_later(hub, folder, tmp_path, caplog):
    hub.fail(*({"method": method, "path": "/api/", "status": 503, "times": 9999} for method in ("GET", "POST")))
    trainer = make_trainer(folder, tmp_path, max_steps=1, hub_private_repo=True)
    trainer.train()
    trainer.push_to_hub()
    assert caplog.messages[-1].endswith("--private true")


@pytest.mark.slow
def test_script_survives_hub_outage(hub, folder, tmp_path):
    hub.fail(*({**fault, "headers": {"Retry-After": "0"}} for fault in DOWN))
    rows = [{"en": f"dog {number}", "de": f"Hund {number}", "label": number % 2} for number in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    translation = (
        "train_translation.py --train_file rows.jsonl --source_column en --target_column de --vocab_size 270 "
        "--d_model 16 --d_ff 24 --num_heads 2 --encoder_layers 1 --decoder_layers 1 --max_steps 2 --save_steps 1 "
        "--use_cpu --warmup_steps 2"
    )
    finetuning = (
        f"finetune_classification.py --model_name_or_path {folder} --train_file rows.jsonl "
        "--validation_file rows.jsonl --text_column en --label_column label --max_steps 2"
    )
    for number, command in enumerate((translation, finetuning)):
        script, *options = command.split()
        script = str(Path(__file__).parents[2] / "scripts" / script)
        options += ["--push_to_hub", "--hub_model_id", "tiny", "--output_dir", f"out-{number}", "--hub_token", TOKEN]
        finished = run_as_user(hub, script, *options, home=tmp_path / "home", cwd=tmp_path)
        assert finished.returncode == 0, finished.stderr
        assert "to push it later" in finished.stderr
        assert TOKEN not in finished.stdout + finished.stderr
    files = [path for number in (0, 1) for path in (tmp_path / f"out-{number}").rglob("*") if path.is_file()]
    assert len([path for path in files if path.name == "model.safetensors"]) >= 4
    assert "scores.json" in [path.name for path in files]
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []


@pytest.mark.promise("token of the Hub")
def test_token_of_the_arguments_is_not_saved(hub, folder, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.delenv("HF_TOKEN")
    trainer = make_trainer(folder, tmp_path, hub_token=TOKEN, hub_always_push=True, hub_strategy="checkpoint")
    trainer.train()
    trainer.push_to_hub()
    assert trainer.args.hub_token == copy.deepcopy(trainer.args).hub_token == TOKEN
    run = tmp_path / "run"
    for each in (run, run / "checkpoint-2", run / "checkpoint-4"):
        saved = torch.load(each / "training_args.bin", weights_only=False)
        assert (saved.hub_token, saved.hub_model_id) == (None, "tiny")
    assert "last-checkpoint/optimizer.pt" in hub.files()
    stored = [path for path in hub.folder.rglob("*") if path.is_file()]
    found = [path for path in [*stored, *run.rglob("*")] if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert found == []
    assert TOKEN not in caplog.text + "".join(capfd.readouterr())


def test_old_name_of_the_trainer_warns():
    with pytest.warns(FutureWarning, match="`PatientPushes` is now called `hf_vanilla.training.ResilientPushTrainer`"):
        assert hf_vanilla.training.PatientPushes is ResilientPushTrainer
