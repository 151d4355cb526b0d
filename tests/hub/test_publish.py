"""Publishing, against a Hub on localhost that fails in every way that the real one can."""

import copy
import hashlib
import importlib.util
import itertools
import json
import os
import pickle
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from email.utils import formatdate
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from hub_server import TOKEN, git_hash
from huggingface_hub import HfApi, ModelCard, constants, file_download
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForMaskedLM,
    VanillaBertForPreTraining,
    VanillaBertForQuestionAnswering,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_vanilla.data.tokenization import train_tokenizer, train_wordpiece_tokenizer
from hf_vanilla.hub import publish, roll_back
from hf_vanilla.hub.card import CardFacts
from hf_vanilla.hub.client import ATTEMPTS
from hf_vanilla.hub.folder import _CHUNK as CHUNK
from hf_vanilla.hub.folder import check_folder
from hf_vanilla.training import (
    FinetuningArguments,
    OrderedEvaluationTrainer,
    PatientPushes,
    VanillaTrainer,
    VanillaTrainingArguments,
    save_final_model,
)


# huggingface_hub's own use of its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "alice/tiny"
ROWS = Dataset.from_dict({"input_ids": [[2, 5, 6, 3]] * 8, "labels": [[-100, 6, -100, -100]] * 8})
SIZES = dict(hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20)


class Hub:
    """A server in a process of its own, and what a test asks of it."""

    def __init__(self, folder, port=0):
        # Without `site`, which nothing here needs, it starts in half the time.
        command = [sys.executable, "-S", Path(__file__).with_name("hub_server.py"), folder, str(port)]
        self.folder = Path(folder)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()
        self.api = HfApi(endpoint=self.url, token=TOKEN)

    def ask(self, path, content=None):
        data = None if content is None else json.dumps(content).encode()
        with urllib.request.urlopen(f"{self.url}{path}", data=data, timeout=30) as answer:
            return json.loads(answer.read())

    def fail(self, *faults):
        self.ask("/test/faults", [{"times": 1, **fault} for fault in faults])

    def requests(self, method, part):
        return [each for each in self.ask("/test/log") if each["method"] == method and part in each["path"]]

    def titles(self, repo=REPO):
        return [commit.title for commit in self.api.list_repo_commits(repo)]

    def files(self, repo=REPO, revision="main"):
        entries = self.api.list_repo_tree(repo, recursive=True, revision=revision)
        return {entry.path: entry.lfs.sha256 if entry.lfs else entry.blob_id for entry in entries}

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def waits(monkeypatch):
    """Nobody waits; how long they would have is written down."""
    found = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


@pytest.fixture
def hub(tmp_path_factory, monkeypatch, waits):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    # The commits of several servers have the same names.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server = Hub(tmp_path_factory.mktemp("hub"))
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # made once, with the address
    yield server
    server.close()


def save_model(folder, seed=0):
    torch.manual_seed(seed)
    tokenizer = train_wordpiece_tokenizer(["the dog likes the cat and the bird"] * 3, 60, show_progress=False)
    tokenizer.save_pretrained(folder)
    VanillaBertForPreTraining(VanillaBertConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    return save_model(tmp_path / "model")


def assert_published(hub, folder, commits=1, repo=REPO):
    """The Hub has what the folder has, in so many commits after the first empty one."""
    local = {path.name for path in folder.iterdir() if path.is_file()}
    remote = hub.files(repo)
    assert local | {".gitattributes"} == remote.keys()
    for path in folder.iterdir():
        content = path.read_bytes()
        assert remote[path.name] in (hashlib.sha256(content).hexdigest(), git_hash(content)), path.name
    assert len(hub.titles(repo)) == commits + 1


def test_one_commit_holds_everything(hub, folder):
    done = publish(folder, "tiny", tag="v1", commit_message="First words")
    assert_published(hub, folder)
    assert hub.titles() == ["First words", "initial commit"]
    assert done.repo_id == REPO
    assert done.commit == hub.api.repo_info(REPO).sha == hub.api.repo_info(REPO, revision="v1").sha
    assert set(done.uploaded) == {path.name for path in folder.iterdir()}
    assert "README.md" in done.uploaded
    assert len(hub.requests("PUT", "/lfs/")) == 1
    assert {"layers.py", "modeling_vanilla_bert.py", "tokenizer.json"} <= set(done.uploaded)


def test_what_is_there_is_not_sent_again(hub, folder):
    first = publish(folder, REPO)
    again = publish(folder, REPO)
    assert (again.commit, again.uploaded, again.deleted) == (first.commit, (), ())
    assert_published(hub, folder, commits=1)
    (folder / "notes.txt").write_text("new")
    third = publish(folder, REPO)
    assert third.uploaded == ("notes.txt",)
    assert len(hub.requests("PUT", "/lfs/")) == 1
    assert_published(hub, folder, commits=2)


def test_a_dry_run_changes_nothing(hub, folder):
    before = sorted(folder.iterdir())
    plan = publish(folder, "tiny", dry_run=True)
    assert (plan.commit, plan.repo_id) == (None, REPO)
    assert {"model.safetensors", "README.md"} <= set(plan.uploaded)
    assert sorted(folder.iterdir()) == before
    assert {each["method"] for each in hub.ask("/test/log")} == {"GET"}
    publish(folder, REPO)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert publish(folder, REPO, dry_run=True).uploaded == ("config.json",)
    assert len(hub.titles()) == 2
    assert roll_back(REPO, "main", dry_run=True).uploaded == ()
    assert len(hub.titles()) == 2


def test_a_dry_run_shows_the_card_and_lists_the_picture(hub, folder):
    log = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2, "log_history": log}))
    plan = publish(folder, "tiny", dry_run=True)
    assert "training_curve.png" in plan.uploaded
    assert plan.trouble is None
    assert not (folder / "training_curve.png").exists()
    done = publish(folder, "tiny")
    assert (folder / "README.md").read_text() == plan.card == done.card
    assert done.uploaded == plan.uploaded
    assert publish(folder, REPO, dry_run=True).card is None  # it stays as it is
    assert publish(folder, REPO, dry_run=True).uploaded == ()
    assert publish(folder, REPO, facts=CardFacts(), dry_run=True).uploaded == ()


@pytest.mark.parametrize("trouble", ["offline", "down", "unknown token"])
def test_a_dry_run_needs_no_hub(hub, folder, waits, monkeypatch, trouble):
    if trouble == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif trouble == "down":
        hub.process.kill()
    token = "hf_" + "B" * 37 if trouble == "unknown token" else None
    plan = publish(folder, "tiny", dry_run=True, token=token)
    assert waits == []
    assert plan.trouble
    assert "\n" not in plan.trouble
    assert (plan.repo_id, plan.commit) == ("tiny", None)
    assert {"model.safetensors", "README.md"} <= set(plan.uploaded)
    assert 'model="tiny"' in plan.card
    add_a_pickle(folder)
    with pytest.raises(ValueError, match="may be a pickle"):
        publish(folder, "tiny", dry_run=True)


def test_the_folder_of_several_seeds_names_them(tmp_path):
    for seed in (2, 1):
        save_model(tmp_path / f"seed-{seed}")
    with pytest.raises(ValueError, match=f"These have one: {tmp_path}/seed-1, {tmp_path}/seed-2; give the one"):
        check_folder(tmp_path)


def test_weights_of_another_form_go_and_other_files_stay(hub, folder):
    publish(folder, REPO)
    hub.api.upload_file(path_or_fileobj=b"a picture", path_in_repo="curve.png", repo_id=REPO)
    model = VanillaBertForPreTraining.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="4KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    done = publish(folder, REPO)
    assert done.deleted == ("model.safetensors",)
    names = hub.files().keys()
    assert {"curve.png", "model.safetensors.index.json"} <= names
    assert "model.safetensors" not in names


def test_weights_in_a_subfolder_stay(hub, folder):
    publish(folder, REPO)
    hub.api.upload_file(path_or_fileobj=b"x" * 30, path_in_repo="lora/adapter_model.safetensors", repo_id=REPO)
    hub.api.upload_file(path_or_fileobj=b"x" * 30, path_in_repo="old.safetensors", repo_id=REPO)
    assert publish(folder, REPO).deleted == ("old.safetensors",)
    assert "lora/adapter_model.safetensors" in hub.files()


def test_a_roll_back_is_one_commit_with_the_old_files(hub, folder):
    first = publish(folder, REPO, tag="good")
    before = hub.files()
    save_model(folder, seed=1)
    (folder / "more.txt").write_text("more")
    second = publish(folder, REPO)
    assert hub.files() != before
    back = roll_back(REPO, "good")
    assert hub.files() == before
    assert len(hub.titles()) == 4
    assert back.commit not in (first.commit, second.commit)
    assert roll_back(REPO, "good").commit == back.commit  # nothing to do


def test_a_roll_back_takes_a_short_name_and_verifies(hub, folder, monkeypatch):
    publish(folder, REPO, tag="good")
    before = hub.files()
    save_model(folder, seed=1)
    (folder / "more.txt").write_text("more")
    publish(folder, REPO)
    assert roll_back("tiny", "good", dry_run=True).repo_id == REPO
    done = roll_back("tiny", "good")
    assert (done.repo_id, done.uploaded, done.deleted) == (REPO, ("model.safetensors",), ("more.txt",))
    assert hub.files() == before
    publish(folder, REPO)
    real = HfApi.list_repo_tree

    def lying(api, *arguments, **options):
        entries = list(real(api, *arguments, **options))
        if hub.titles()[0] == "Go back to good":
            next(entry for entry in entries if entry.path == "model.safetensors").lfs.sha256 = "0" * 64
        return entries

    monkeypatch.setattr(HfApi, "list_repo_tree", lying)
    with pytest.raises(ValueError, match="is not what was sent: model.safetensors"):
        roll_back(REPO, "good")


# Each request that a publication makes; a fault at any of them must not be seen in the result.
CALLS = [
    ("GET", "/api/whoami-v2"),
    ("POST", "/api/repos/create"),
    ("GET", f"/api/models/{REPO}/revision/main"),
    ("GET", f"/api/models/{REPO}/tree/"),
    ("GET", f"/api/models/{REPO}/refs"),
    ("POST", "/api/validate-yaml"),
    ("POST", f"/api/models/{REPO}/preupload/"),
    ("POST", "/info/lfs/objects/batch"),
    ("PUT", "/lfs/"),
    ("POST", "/lfs-verify"),
    ("POST", f"/api/models/{REPO}/commit/"),
    ("POST", f"/api/models/{REPO}/tag/"),
]
TROUBLE = {
    "500": {"status": 500},
    "503-twice": {"status": 503, "times": 2},
    "429": {"status": 429, "headers": {"Retry-After": "7"}},
    "drop-before": {"drop": "before"},
    "drop-after": {"drop": "after"},
}


@pytest.mark.parametrize("trouble", TROUBLE)
@pytest.mark.parametrize(("method", "path"), CALLS, ids=lambda each: each.strip("/").split("/")[-1] or each)
def test_trouble_at_any_request_leaves_no_trace(hub, folder, waits, method, path, trouble):
    hub.fail({"method": method, "path": path, **TROUBLE[trouble]})
    done = publish(folder, "tiny", tag="v1")
    assert_published(hub, folder)
    assert hub.api.repo_info(REPO, revision="v1").sha == done.commit
    assert waits
    if trouble == "429":
        assert max(waits) >= 7


# Some requests are made again: after the repository was made, before the commit, and to verify it.
@pytest.mark.parametrize("trouble", ["503-twice", "drop-after"])
@pytest.mark.parametrize(("part", "skip"), [("revision/main", 1), ("revision/main", 2), ("tree", 1), ("tree", 2)])
def test_trouble_at_a_later_request_leaves_no_trace(hub, folder, waits, part, skip, trouble):
    hub.fail({"method": "GET", "path": f"/api/models/{REPO}/{part}", "skip": skip, **TROUBLE[trouble]})
    publish(folder, REPO)
    assert_published(hub, folder)
    assert waits


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("GET", "/revision/main"), ("GET", "/revision/v1"), ("GET", "/tree/"), ("POST", "/paths-info/"),
        ("GET", "/resolve/"), ("POST", "/commit/"),
    ],
    ids=lambda each: each.strip("/"),
)  # fmt: skip
def test_trouble_at_a_roll_back_leaves_no_trace(hub, folder, waits, monkeypatch, method, part):
    publish(folder, REPO, tag="v1")
    before = hub.files()
    save_model(folder, seed=1)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    publish(folder, REPO)
    assert waits == []
    hub.fail({"method": method, "path": part, "status": 503})
    roll_back(REPO, "v1")
    assert waits
    assert hub.files() == before
    assert hub.titles() == ["Go back to v1", "Upload model", "Upload model", "initial commit"]


def test_a_hub_that_stays_down_is_told_and_gone_on_with(hub, folder, waits):
    hub.fail({"method": "POST", "path": "/commit/", "status": 503, "times": 99})
    with pytest.raises(HfHubHTTPError, match="503"):
        publish(folder, REPO)
    assert waits[-ATTEMPTS + 1 :] == [1, 2, 4, 8, 16]
    assert hub.titles() == ["initial commit"]
    hub.fail()
    publish(folder, REPO)
    assert_published(hub, folder)
    assert len(hub.requests("PUT", "/lfs/")) == 1  # the weights were there already


@pytest.mark.parametrize("status", [409, 412])
def test_a_conflict_at_the_commit_passes(hub, folder, waits, status):
    hub.fail({"method": "POST", "path": "/commit/", "status": status})
    publish(folder, REPO)
    assert waits == [1]
    assert_published(hub, folder)


@pytest.mark.parametrize("status", [409, 412])
def test_a_conflict_at_the_commit_that_stays_is_told(hub, folder, waits, status):
    hub.fail({"method": "POST", "path": "/commit/", "status": status, "times": 99})
    with pytest.raises(HfHubHTTPError, match=str(status)):
        publish(folder, REPO)
    assert waits == [1, 2, 4, 8, 16]
    assert hub.titles() == ["initial commit"]


def test_a_conflict_while_the_repository_is_made_passes(hub, folder, waits):
    hub.fail({"method": "POST", "path": "/repos/create", "status": 409})  # no "url" in it, for nothing was made
    publish(folder, REPO)
    assert waits == [1]
    assert_published(hub, folder)


def test_a_repository_that_somebody_made_meanwhile_is_as_good(hub, folder, waits, monkeypatch):
    original = HfApi.create_repo

    def create_after_another(api, *arguments, **options):
        original(hub.api, REPO)
        return original(api, *arguments, **options)

    monkeypatch.setattr(HfApi, "create_repo", create_after_another)
    hub.fail({"method": "POST", "path": "/repos/create", "status": 409, "skip": 1})
    publish(folder, REPO)
    assert waits == []
    assert_published(hub, folder)


@pytest.mark.parametrize("times", [5, 12])
def test_an_upload_that_fails_again_and_again_is_gone_on_with(hub, folder, waits, times):
    hub.fail({"method": "PUT", "path": "/lfs/", "status": 500, "times": times})
    publish(folder, REPO)
    assert len(waits) == times
    assert len(hub.requests("PUT", "/lfs/")) == times + 1
    assert_published(hub, folder)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_missing_branch_is_found_before_anything_is_done(hub, folder, waits, is_there):
    if is_there:
        hub.api.create_repo(REPO)
    for dry_run in (True, False):
        with pytest.raises(ValueError, match="`revision` must be a branch of alice/tiny, which has no 'dev'"):
            publish(folder, REPO, revision="dev", dry_run=dry_run)
    assert waits == []
    assert not (folder / "README.md").exists()
    assert hub.api.repo_exists(REPO) == is_there
    if is_there:
        hub.api.create_branch(REPO, branch="dev")
        publish(folder, REPO, revision="dev")
        assert "config.json" in hub.files(revision="dev")
        assert hub.files().keys() == {".gitattributes"}


@pytest.mark.parametrize("form", ["seconds", "date", "past", "nonsense"])
def test_what_the_hub_asks_to_wait_is_waited(hub, folder, waits, caplog, form):
    now = time.time()
    asked = {"seconds": "250", "date": formatdate(now + 250, usegmt=True), "past": formatdate(0), "nonsense": "soon"}
    fault = {"status": 503, "headers": {"Retry-After": asked[form]}}
    hub.fail({"method": "POST", "path": "/commit/", **fault})
    publish(folder, REPO)
    assert_published(hub, folder)
    (waited,) = waits
    expected = {"seconds": 250, "date": pytest.approx(250, abs=60), "past": 0, "nonsense": 1}
    assert waited == expected[form]
    assert f"Attempt 2 of {ATTEMPTS} in {waited:.0f} s" in caplog.text


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_what_the_hub_asks_to_wait_has_a_limit(hub, folder, waits, caplog, form):
    asked = "86400" if form == "seconds" else formatdate(time.time() + 86400, usegmt=True)
    hub.fail({"method": "POST", "path": "/commit/", "status": 503, "headers": {"Retry-After": asked}})
    with pytest.raises(HfHubHTTPError, match="503"):
        publish(folder, REPO)
    assert waits == []
    assert re.search(r"The Hub asks to wait for 86[34]\d\d s, which is too long; try again then", caplog.text)
    publish(folder, REPO)
    assert_published(hub, folder)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/preupload/", 401), ("POST", "/preupload/", 403), ("POST", "/preupload/", 404), ("PUT", "/lfs/", 403)],
)
def test_a_refusal_is_not_tried_again(hub, folder, waits, method, path, status):
    hub.fail({"method": method, "path": path, "status": status, "times": 99})
    with pytest.raises(HfHubHTTPError, match=str(status)):
        publish(folder, REPO)
    assert waits == []
    assert hub.titles() == ["initial commit"]


def test_a_wrong_token_is_refused_and_not_told(hub, folder, monkeypatch, caplog):
    wrong = "hf_" + "B" * 37
    with pytest.raises(HfHubHTTPError, match="401") as error:
        publish(folder, REPO, token=wrong)
    assert wrong not in str(error.value) + caplog.text
    assert REPO not in hub.ask("/test/log")


def test_somebody_else_in_between_is_not_overwritten(hub, folder, monkeypatch):
    publish(folder, REPO)
    (folder / "notes.txt").write_text("ours")
    original = HfApi.create_commit

    def commit_after_another(api, *arguments, **options):
        monkeypatch.setattr(HfApi, "create_commit", original)
        hub.api.upload_file(path_or_fileobj=b"theirs", path_in_repo="notes.txt", repo_id=REPO)
        return original(api, *arguments, **options)

    monkeypatch.setattr(HfApi, "create_commit", commit_after_another)
    with pytest.raises(ValueError, match="Somebody else has pushed to alice/tiny"):
        publish(folder, REPO)
    assert len(hub.titles()) == 3


def test_a_tag_is_not_moved(hub, folder):
    first = publish(folder, REPO, tag="v1")
    (folder / "notes.txt").write_text("new")
    with pytest.raises(ValueError, match="`tag` 'v1' names the commit .* already"):
        publish(folder, REPO, tag="v1")
    assert hub.api.repo_info(REPO, revision="v1").sha == first.commit
    assert len(hub.titles()) == 2  # it was found out before the commit
    assert publish(folder, REPO, tag="v2").uploaded == ("notes.txt",)


def test_a_card_with_a_token_is_not_written(hub, folder):
    results = {"summary": {}, "command": "python train.py --hub_token " + "hf_" + "Z" * 35}
    with pytest.raises(ValueError, match="The model card would have a token"):
        publish(folder, REPO, results=results)
    assert not (folder / "README.md").exists()
    assert hub.ask("/test/log") == []


def test_the_card_names_the_whole_repository(hub, folder):
    publish(folder, "tiny")
    assert f'model="{REPO}"' in (folder / "README.md").read_text()
    publish(folder, "tiny", facts=CardFacts(title="Other words"))
    assert "# Other words" in (folder / "README.md").read_text()


def test_a_card_is_renewed_until_somebody_edits_it(hub, folder, caplog):
    card = folder / "README.md"
    (folder / "eval_results.json").write_text('{"eval_mlm_accuracy": 0.25}')
    publish(folder, REPO)
    assert "| validation | accuracy of masked tokens | 0.25 |" in card.read_text()
    (folder / "eval_results.json").write_text('{"eval_mlm_accuracy": 0.5}')
    assert set(publish(folder, REPO).uploaded) == {"README.md", "eval_results.json"}
    assert "| validation | accuracy of masked tokens | 0.5 |" in card.read_text()
    publish(folder, "other")
    assert 'model="alice/other"' in card.read_text()
    assert "stays as it is" not in caplog.text

    card.write_text(card.read_text().replace("# other", "# My own words"))
    edited = card.read_text()
    assert publish(folder, "other").uploaded == ("README.md",)
    assert "stays as it is" not in caplog.text
    publish(folder, REPO)
    assert "README.md stays as it is, but does not name alice/tiny" in caplog.text
    for words in ({"facts": CardFacts(title="No")}, {"results": {"bleu": 1.0, "chrf": 2.0}}):
        with pytest.raises(
            ValueError, match=r"README.md was written or edited by hand, and `facts` or `results` would"
        ):
            publish(folder, REPO, **words)
    assert card.read_text() == edited


def test_a_card_with_facts_is_renewed_with_facts(hub, folder):
    publish(folder, REPO, facts=CardFacts(limits="Knows no verbs."))
    (folder / "eval_results.json").write_text('{"eval_mlm_accuracy": 0.5}')
    assert publish(folder, REPO).uploaded == ("eval_results.json",)
    assert "Knows no verbs." in (folder / "README.md").read_text()
    assert publish(folder, REPO, facts=CardFacts(limits="Knows few verbs.")).uploaded == ("README.md",)
    assert "| validation | accuracy of masked tokens | 0.5 |" in (folder / "README.md").read_text()


def test_the_line_ends_of_facts_are_no_edit(hub, folder):
    publish(folder, REPO, facts=CardFacts(training_data="one\r\ntwo\rthree"))
    assert publish(folder, REPO, facts=CardFacts(limits="None.")).uploaded == ("README.md",)


def test_trouble_with_the_type_of_the_model_there_is_waited_for(hub, folder, waits):
    publish(folder, REPO)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    hub.fail({"method": "HEAD", "path": "/resolve/", "status": 503, "times": 99})
    with pytest.raises(HfHubHTTPError, match="503"):
        publish(folder, REPO)
    assert [wait for wait in waits if isinstance(wait, float)] == [1.0, 2.0, 4.0, 8.0, 16.0]  # the client waits too
    assert "503" in publish(folder, REPO, dry_run=True).trouble
    hub.fail()
    assert publish(folder, REPO).uploaded == ("config.json",)
    hub.api.upload_file(path_or_fileobj=b"{}", path_in_repo="config.json", repo_id=REPO)
    assert publish(folder, REPO).uploaded == ("config.json",)


def test_a_model_of_another_type_stays_alone(hub, folder, tmp_path):
    publish(folder, REPO)
    config = VanillaTransformerConfig(
        vocab_size=60, d_model=8, num_heads=4, d_ff=12, encoder_layers=1, decoder_layers=1
    )
    VanillaTransformerForConditionalGeneration(config).save_pretrained(tmp_path / "translator")
    for dry_run in (True, False):
        with pytest.raises(
            ValueError, match="alice/tiny has a model of type vanilla_bert, and .* vanilla_transformer"
        ):
            publish(tmp_path / "translator", REPO, dry_run=dry_run)
    assert len(hub.titles()) == 2
    assert not (tmp_path / "translator" / "README.md").exists()


def test_what_is_odd_is_told(hub, folder, caplog):
    publish(folder, REPO)
    assert "has no tokenizer" not in caplog.text
    publish(folder, REPO, private=True)
    assert "alice/tiny exists already, so `private` has no effect" in caplog.text
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    publish(folder, REPO)
    assert "has no tokenizer: nobody can use the model with text" in caplog.text


def test_without_a_token_nothing_is_asked(hub, folder, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "none"))
    for push in (lambda: publish(folder, REPO), lambda: roll_back(REPO, "v1")):
        with pytest.raises(ValueError, match="no token for the Hub. Log in with `hf auth login`, or set HF_TOKEN"):
            push()
    assert hub.ask("/test/log") == []


@pytest.mark.parametrize(
    ("status", "advice"), [(401, "Log in with `hf auth login`"), (403, "no right to write there")]
)
def test_a_refusal_comes_with_advice(hub, folder, status, advice):
    hub.fail({"method": "POST", "path": "/commit/", "status": status})
    with pytest.raises(HfHubHTTPError) as refusal:
        publish(folder, REPO)
    assert advice in refusal.value.__notes__[0]


def test_offline_is_told_at_once(hub, folder, waits, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OfflineModeIsEnabled):
        publish(folder, REPO)
    assert waits == []


def test_a_wrong_hash_is_found(hub, folder):
    # The Hub says that it has other weights than were sent.
    real = HfApi.list_repo_tree
    calls = []

    def lying(api, *arguments, **options):
        entries = list(real(api, *arguments, **options))
        calls.append(len(entries))
        for entry in entries:
            if entry.path == "model.safetensors":
                entry.lfs.sha256 = "0" * 64
        return entries

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HfApi, "list_repo_tree", lying)
        with pytest.raises(ValueError, match="is not what was sent: model.safetensors"):
            publish(folder, REPO)
    assert len(calls) >= 2


# Imports once, and forks a process for each push.
PUSH = """
import os, sys
from hf_vanilla.hub import publish
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        publish(*line.split())
        os._exit(0)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


def test_a_push_that_was_killed_is_gone_on_with(hub, folder):
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", PUSH]
    kills = {
        "alice/amid-the-weights": {"method": "PUT", "path": "/lfs/", "cut": 1000},
        "alice/before-the-commit": {"method": "POST", "path": "/commit/", "drop": "before"},
        "alice/after-the-commit": {"method": "POST", "path": "/commit/"},  # which the process does not hear of
    }
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with subprocess.Popen(command, env=environment, **pipes) as pushes:
        for number, (repo, fault) in enumerate(kills.items()):
            save_model(folder, seed=number)  # other weights, for the Hub keeps those that it has
            (folder / "README.md").unlink(missing_ok=True)
            hub.fail({**fault, "wait": 600})
            requests = len(hub.requests(fault["method"], fault["path"]))
            print(folder, repo, file=pushes.stdin, flush=True)
            pid = int(pushes.stdout.readline())
            for _ in range(1200):
                if len(hub.requests(fault["method"], fault["path"])) > requests:
                    break
                threading.Event().wait(0.1)
            os.kill(pid, signal.SIGKILL)
            assert int(pushes.stdout.readline()) == signal.SIGKILL
            hub.fail()
            done = publish(folder, repo)
            assert_published(hub, folder, repo=repo)
            assert ("model.safetensors" in done.uploaded) == (repo != "alice/after-the-commit")
        pushes.kill()
    whole = (folder / "model.safetensors").stat().st_size
    # Those of the first were sent again, and the others were whole.
    assert [each["size"] for each in hub.requests("PUT", "/lfs/")] == [1000, whole, whole, whole]


def test_an_upload_that_breaks_off_is_made_again(hub, folder, waits):
    hub.fail({"method": "PUT", "path": "/lfs/", "cut": 1000, "times": 2})
    publish(folder, REPO)
    whole = (folder / "model.safetensors").stat().st_size
    assert [each["size"] for each in hub.requests("PUT", "/lfs/")] == [1000, 1000, whole]
    assert len(waits) == 2
    assert_published(hub, folder)


PUSH_ALL = """
import sys, time
time.sleep = lambda seconds: None
from hf_vanilla import publish
for folder in sys.argv[1:]:
    try:
        print(publish(folder, "tiny").commit)
    except OSError as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.skipif(importlib.util.find_spec("hf_xet") is None, reason="hf_xet is not installed")
def test_xet_sends_large_files_and_its_errors_are_told_at_once(hub, folder, tmp_path):
    save_model(tmp_path / "second", seed=1)
    settings = {
        "HF_HUB_DISABLE_XET": "0", "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "0", "HF_XET_XORB_COMPRESSION_POLICY": "none",
    }  # fmt: skip
    nowhere = {"method": "GET", "path": "/xet-write-token/", "cas": "http://127.0.0.1:9"}
    refused = {"method": "GET", "path": "/xet-write-token/", "status": 403}
    hub.fail({**nowhere, "skip": 1}, {**refused, "skip": 1})
    folders = [folder, tmp_path / "second", tmp_path / "second", folder, tmp_path / "second"]
    finished = run_as_user(hub, PUSH_ALL, *folders, home=tmp_path / "home", settings=settings)
    assert finished.returncode == 0, finished.stderr
    first, away, refusal, again, second = finished.stdout.splitlines()
    assert re.match("ConnectionError: .*http://127.0.0.1:9/", away)
    assert re.match("ConnectionError: .*403", refusal)
    assert again == first  # nothing is half done
    assert second == hub.api.repo_info(REPO).sha
    assert_published(hub, tmp_path / "second", commits=2)
    assert len(hub.requests("GET", "/xet-write-token/")) == 4  # the client of xet tries again, so we don't
    assert hub.requests("POST", "/lfs/") + hub.requests("PUT", "/lfs/") == []


def test_what_a_training_leaves_stays_here(hub, folder):
    (folder / "checkpoint-5").mkdir()
    for name in (
        "optimizer.pt",
        "training_args.bin",
        "trainer_state.json",
        "checkpoint-5/model.safetensors",
        ".secret",
    ):
        (folder / name).write_bytes(b"state")
    assert not {"optimizer.pt", "training_args.bin", "trainer_state.json"} & set(check_folder(folder))
    assert not any("checkpoint" in name or "secret" in name for name in check_folder(folder))
    with_state = check_folder(folder, with_training_state=True)
    assert "optimizer.pt" in with_state
    assert "training_args.bin" not in with_state


def break_config(folder):
    (folder / "config.json").unlink()


def drop_a_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    weights.pop("bert.pooler.dense.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-9])


def add_a_pickle(folder):
    (folder / "pytorch_model.bin").write_bytes(b"x")


@pytest.mark.parametrize("name", ["old.PKL", "raw-2.dat", "raw-3.dat", "raw-4.dat", "raw-5", "zip.tar", "legacy.tar"])
def test_a_pickle_is_known_by_its_content(folder, name):
    path = folder / name
    if name.startswith("raw"):
        path.write_bytes(pickle.dumps({"a": 1}, protocol=int(name[4])))
    elif name == "old.PKL":
        path.write_bytes(b"x")
    else:
        torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=name == "zip.tar")
    with pytest.raises(ValueError, match=f"{name} may be a pickle"):
        check_folder(folder)


def test_a_link_that_leads_out_is_refused(folder, tmp_path):
    (tmp_path / "secret.txt").write_text("not to be seen")
    (folder / "more").mkdir()
    (folder / "more" / "link.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(
        ValueError, match=f"more/link.txt is a link to {tmp_path}/secret.txt, which is not in the folder"
    ):
        check_folder(folder)
    (folder / "more" / "link.txt").unlink()
    (folder / "more" / "link.txt").symlink_to("../config.json")
    assert "more/link.txt" in check_folder(folder)
    (tmp_path / "other").symlink_to(folder)
    assert "more/link.txt" in check_folder(tmp_path / "other")


def test_a_snapshot_of_the_cache_may_go(hub, folder, tmp_path):
    first = publish(folder, REPO)
    snapshot = Path(hub.api.snapshot_download(REPO, cache_dir=tmp_path / "cache"))
    assert snapshot.parent.name == "snapshots"
    assert (snapshot / "model.safetensors").is_symlink()
    blob = (snapshot / "README.md").resolve()
    card = blob.read_text()
    assert (publish(snapshot, REPO).commit, publish(snapshot, "copy").unchanged) == (first.commit, ())
    assert hub.files("alice/copy") == hub.files() | {"README.md": git_hash((snapshot / "README.md").read_bytes())}
    assert 'model="alice/copy"' in (snapshot / "README.md").read_text()
    assert blob.read_text() == card
    (snapshot / "secret.txt").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="secret.txt is a link to /etc/passwd"):
        publish(snapshot, REPO)


def test_what_is_no_pickle_may_go(folder):
    with zipfile.ZipFile(folder / "texts.zip", "w") as archive:
        archive.writestr("texts/data.txt", "the dog likes the cat")
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "zip.txt").write_bytes(b"PK\x03\x04 is how a zip begins")
    # The length of a safetensors header comes first, and 640 is 0x80 0x02.
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).ljust(640).encode()
    (folder / "more").mkdir()
    (folder / "more" / "values.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert load_file(folder / "more" / "values.safetensors")["a"].tolist() == [0.0]
    assert {"texts.zip", "picture.png", "empty.txt", "zip.txt", "more/values.safetensors"} <= set(check_folder(folder))


def add_a_token(folder):
    (folder / "notes.txt").write_text("login with " + "hf_" + "Z" * 35)


@pytest.mark.parametrize(
    "token", ["hf_" + "b" * 34, "api_org_" + "b" * 34, "hf_oauth_eyJhbGciOi.eyJh-bGci_Oi.0123456789"]
)
@pytest.mark.parametrize("before", [0, CHUNK - 20, 2 * CHUNK - 1], ids=["start", "boundary", "next boundary"])
def test_every_kind_of_token_is_found_anywhere(folder, token, before):
    (folder / "notes.txt").write_text("x" * before + token + " and more")
    with pytest.raises(ValueError, match="notes.txt has a token of the Hub in it"):
        check_folder(folder)
    (folder / "notes.txt").write_text("hf_oauth_is_short api_org_too " + "x" * 50)
    assert "notes.txt" in check_folder(folder)


@pytest.mark.parametrize("before", [0, CHUNK - 20], ids=["start", "boundary"])
def test_the_token_in_use_is_found_whatever_its_form(folder, before):
    secret = "secret-" + "s" * 500
    (folder / "notes.txt").write_text("x" * before + secret)
    with pytest.raises(ValueError, match="notes.txt has a token of the Hub in it"):
        check_folder(folder, token=secret)
    assert "notes.txt" in check_folder(folder)


def add_another_tokenizer(folder):
    texts = ["some quite different words, and many more of them than before"] * 3
    train_wordpiece_tokenizer(texts, 90, show_progress=False).save_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (break_config, "must be a folder with a config.json"),
        (drop_a_tensor, "missing_keys bert.pooler.dense.weight"),
        (truncate, "does not load"),
        (add_a_pickle, "pytorch_model.bin may be a pickle"),
        (add_a_token, "notes.txt has a token of the Hub in it"),
        (add_another_tokenizer, "but the model only"),
    ],
    ids=lambda each: each.__name__ if callable(each) else None,
)
def test_what_is_not_fit_is_not_published(hub, folder, change, message):
    change(folder)
    with pytest.raises(ValueError, match=message) as error:
        publish(folder, REPO)
    assert "Z" * 35 not in str(error.value)
    assert hub.ask("/test/log") == []


def test_no_token_leaves_its_header(hub, folder, caplog):
    publish(folder, REPO)
    for path in folder.iterdir():
        assert TOKEN.encode() not in path.read_bytes()
    for each in hub.ask("/test/log"):
        assert TOKEN not in each["path"]
    assert TOKEN not in caplog.text


LOAD = """
import sys
sys.modules["hf_vanilla"] = None
import torch, transformers
file, *places = sys.argv[1:]
inputs = {"input_ids": torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]])}
found = {}
for place in places:
    repo, revision = place.split("@")
    config = transformers.AutoConfig.from_pretrained(repo, revision=revision, trust_remote_code=True)
    outputs = {}
    names = sorted(set(config.auto_map) - {"AutoConfig"})
    if place != places[0]:  # the head that was saved
        names = [name for name in names if config.auto_map[name].endswith("." + config.architectures[0])]
    for name in names:
        torch.manual_seed(0)
        model = getattr(transformers, name).from_pretrained(repo, revision=revision, trust_remote_code=True)
        each = {key: torch.stack((ids, ids), dim=1) if "Choice" in name else ids for key, ids in inputs.items()}
        with torch.no_grad():
            outputs[name] = model(**each).to_tuple()[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(repo, revision=revision)
    found[place] = {"outputs": outputs, "ids": tokenizer("the dog likes").input_ids}
torch.save(found, file)
"""


def run_as_user(hub, program, *arguments, home, offline=False, settings=None, **options):
    """Run a program as somebody does who has only the Hub and an empty cache."""
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": str(int(offline)), "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(home), **(settings or {}),
    }  # fmt: skip
    command = [sys.executable, *(["-c", program] if "\n" in program else [program]), *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False, **options
    )


def run_here(monkeypatch, capsys, script, *options):
    """Run a script in this process, for a new one takes seconds to import everything."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, options)])
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(script, run_name="__main__")
    return subprocess.CompletedProcess(sys.argv, ending.value.code, *capsys.readouterr())


def test_a_user_without_the_package_loads_every_head_by_name(hub, folder, tmp_path):
    first = publish(folder, REPO)
    model, tokenizer = (
        VanillaBertForPreTraining.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    # The stock ways to push, of a model and of a training.
    model.push_to_hub("alice/pushed")
    tokenizer.push_to_hub("alice/pushed")
    trained = VanillaBertForMaskedLM.from_pretrained(folder)
    args = training_args(tmp_path, hub_strategy="end")
    args.hub_model_id = "alice/trained"
    trainer = Trainer(trained, args, train_dataset=ROWS, processing_class=tokenizer)
    trainer.train()
    trainer.push_to_hub()
    # A large model has several files of weights.
    shutil.copytree(folder, tmp_path / "large")
    (tmp_path / "large" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "large", max_shard_size="8KB")
    shards = {path.name for path in (tmp_path / "large").glob("model-*.safetensors")}
    assert len(shards) > 2
    assert shards <= set(publish(tmp_path / "large", "alice/large").uploaded)

    places = {
        f"{REPO}@{first.commit}": folder, "alice/pushed@main": folder, "alice/large@main": folder,
        "alice/trained@main": tmp_path / "run",
    }  # fmt: skip
    arguments = [tmp_path / "found.pt", *places]
    finished = run_as_user(hub, LOAD, *arguments, home=tmp_path / "home")
    assert finished.returncode == 0, finished.stderr
    found = torch.load(tmp_path / "found.pt")
    inputs = torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]])
    assert [len(each["outputs"]) for each in found.values()] == [9, 1, 1, 1]
    for place, local in places.items():
        for name, tensor in found[place]["outputs"].items():
            torch.manual_seed(0)
            loaded = getattr(transformers, name).from_pretrained(local)
            ids = torch.stack((inputs, inputs), dim=1) if "Choice" in name else inputs
            with torch.no_grad():
                assert torch.equal(loaded(input_ids=ids).to_tuple()[0], tensor), (place, name)
        assert found[place]["ids"] == tokenizer("the dog likes").input_ids
    with torch.no_grad():
        logits = trained.eval()(input_ids=inputs).logits
    assert torch.equal(found["alice/trained@main"]["outputs"]["AutoModelForMaskedLM"], logits)
    # A revision that was pinned stays what it was, and a complete cache needs no Hub.
    save_model(folder, seed=1)
    assert publish(folder, REPO).commit != first.commit
    requests = len(hub.ask("/test/log"))
    again = run_as_user(hub, LOAD, *arguments, home=tmp_path / "home", offline=True)
    assert again.returncode == 0, again.stderr
    assert len(hub.ask("/test/log")) == requests
    found_again = torch.load(tmp_path / "found.pt")
    for place in places:
        for name, tensor in found_again[place]["outputs"].items():
            assert torch.equal(tensor, found[place]["outputs"][name]), (place, name)


PIPE = """
import sys
sys.modules["hf_vanilla"] = None
import json
from transformers import AutoTokenizer, pipeline
file, asked = sys.argv[1:]
found = []
for task, repo, revision, target_tokenizer, inputs in json.loads(asked):
    options = {}
    if target_tokenizer:
        options["target_tokenizer"] = AutoTokenizer.from_pretrained(
            repo, subfolder=target_tokenizer, revision=revision
        )
    pipe = pipeline(task, model=repo, revision=revision, trust_remote_code=True, device=-1, **options)
    found.append([type(pipe).__name__, pipe(*inputs)])
json.dump(found, open(file, "w"))
"""


def test_a_user_without_the_package_asks_by_name_and_translates_by_name_and_revision(hub, tmp_path):
    torch.manual_seed(2)
    reader = save_model(tmp_path / "reader")
    config = VanillaBertConfig(vocab_size=60, initializer_range=0.5, **SIZES)
    VanillaBertForQuestionAnswering(config).save_pretrained(reader)
    asked = "the dog likes the bird", "the bird likes the cat and the dog"
    answer = transformers.pipeline("vanilla-question-answering", model=str(reader), device=-1)(*asked)
    assert answer["answer"] in asked[1]
    commit = publish(reader, "alice/reader").commit
    calls = [(task, "alice/reader", commit, None, asked) for task in ("question-answering", None)]
    wanted = [["QuestionAnsweringPipeline", answer]] * 2

    translator, text = tmp_path / "translator", "the dog likes"
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        vocab_size=320, source_vocab_size=268, d_model=16, d_ff=24, num_heads=4, encoder_layers=1, decoder_layers=1,
        share_encoder_decoder_embeddings=False, tie_word_embeddings=False,
    )  # fmt: skip
    VanillaTransformerForConditionalGeneration(config).save_pretrained(translator)
    train_tokenizer(["the dog likes the cat"] * 3, 268, show_progress=False).save_pretrained(translator)
    for letters in ("abcd", "efgh"):
        words = map("".join, itertools.product(letters, repeat=4))
        train_tokenizer([" ".join(words)], 320, show_progress=False).save_pretrained(translator / "target_tokenizer")
        commit = publish(translator, REPO).commit
        calls.append(("translation", REPO, commit, "target_tokenizer", [text]))
        pipe = transformers.pipeline("translation", model=str(translator), trust_remote_code=True, device=-1)
        wanted.append(["TranslationPipeline", pipe(text)])
    assert wanted[2][1][0]["translation_text"] != wanted[3][1][0]["translation_text"]

    arguments = [tmp_path / "found.json", json.dumps(calls)]
    finished = run_as_user(hub, PIPE, *arguments, home=tmp_path / "home")
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "found.json").read_text()) == wanted


def test_the_script_publishes_and_goes_back(hub, folder, tmp_path, monkeypatch, capsys):
    script = str(Path(__file__).parents[2] / "scripts" / "push_to_hub.py")
    options = ["--repo_id", "tiny", "--folder", folder]
    planned = run_here(monkeypatch, capsys, script, *options, "--dry_run")
    assert planned.returncode == 0, planned.stderr
    assert "+ model.safetensors\n" in planned.stdout
    assert "Nothing was done" in planned.stdout
    assert "README.md would be:" in planned.stdout
    assert "The card does not tell language, license, datasets, training_data, limits; --card does" in planned.stdout
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        down = run_here(monkeypatch, capsys, script, *options, "--dry_run")
    assert down.returncode == 0, down.stderr
    assert "+ model.safetensors\n" in down.stdout
    assert "The Hub could not be asked everything: " in down.stdout
    done = run_as_user(hub, script, *options, "--tag", "v1", home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert_published(hub, folder)
    assert f"alice/tiny (main) is at {hub.api.repo_info(REPO).sha}." in done.stdout
    (folder / "notes.txt").write_text("new")
    assert run_here(monkeypatch, capsys, script, *options).returncode == 0
    back = run_here(monkeypatch, capsys, script, "--repo_id", REPO, "--roll_back_to", "v1")
    assert back.returncode == 0, back.stderr
    assert "- notes.txt\n" in back.stdout
    (folder / "broken.pkl").write_bytes(b"x")
    refused = run_here(monkeypatch, capsys, script, *options)
    assert refused.returncode == 1
    assert "broken.pkl may be a pickle" in refused.stderr
    assert TOKEN not in refused.stderr + done.stdout + done.stderr


def training_args(tmp_path, cls=TrainingArguments, **options):
    return cls(
        output_dir=str(tmp_path / "run"), hub_model_id="tiny", push_to_hub=True, max_steps=4, save_steps=2,
        use_cpu=True, report_to=[], disable_tqdm=True, **options,
    )  # fmt: skip


def trained_model(folder):
    return VanillaBertForMaskedLM.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)


def translation_trainer():
    """The stock trainer as train_translation.py makes it."""
    path = Path(__file__).parents[2] / "scripts" / "train_translation.py"
    specification = importlib.util.spec_from_file_location("train_translation_script", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module.StockTrainer, transformers.Seq2SeqTrainingArguments


@pytest.mark.parametrize(
    "make_classes",
    [
        lambda: (VanillaTrainer, VanillaTrainingArguments),
        translation_trainer,
        lambda: (PatientPushes, FinetuningArguments),
        lambda: (OrderedEvaluationTrainer, FinetuningArguments),
    ],
    ids=["ours", "translation", "fine-tuning", "question answering"],
)
def test_a_hub_that_is_down_does_not_end_a_training(hub, folder, tmp_path, caplog, make_classes):
    trainer_class, arguments_class = make_classes()
    hub.fail(*({"method": method, "path": "/api/", "status": 503, "times": 9999} for method in ("GET", "POST")))
    model, tokenizer = trained_model(folder)
    args = training_args(tmp_path, arguments_class, save_strategy="steps")
    trainer = trainer_class(model, args, train_dataset=ROWS, processing_class=tokenizer)
    trainer.train()
    assert trainer.state.global_step == 4
    assert (tmp_path / "run" / "checkpoint-4" / "model.safetensors").exists()
    assert "Training goes on" in caplog.text
    assert hub.requests("POST", "/api/repos/create")
    hub.fail()
    trainer.push_to_hub()
    assert "training_args.bin" not in hub.files()
    names = hub.files().keys()
    assert {"config.json", "layers.py", "model.safetensors", "modeling_vanilla_bert.py", "tokenizer.json"} <= names


def test_checkpoints_are_pushed_on_the_way_with_their_code(hub, folder, tmp_path):
    model, tokenizer = trained_model(folder)
    args = training_args(tmp_path, VanillaTrainingArguments)
    trainer = VanillaTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer)
    trainer.train()
    assert any("Training in progress" in title for title in hub.titles())
    assert {"layers.py", "modeling_vanilla_bert.py", "self_contained.py"} <= hub.files().keys()


def test_a_refusal_ends_the_run_before_it_starts(hub, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "B" * 37)
    model, tokenizer = trained_model(folder)
    args = training_args(tmp_path, VanillaTrainingArguments)
    with pytest.raises(HfHubHTTPError, match="401"):
        VanillaTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer)


DOWN = [{"method": method, "path": "/", "status": 503, "times": 9999} for method in ("GET", "POST", "PUT", "HEAD")]
REFUSES = [{"method": "POST", "path": "/commit/", "status": 403, "times": 9999}]


@pytest.mark.parametrize("faults", [DOWN, REFUSES], ids=["down", "refuses"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hub_that_fails_at_the_end_costs_nothing(hub, folder, tmp_path, waits, caplog, faults, when):
    model, tokenizer = trained_model(folder)
    args = training_args(tmp_path, VanillaTrainingArguments, hub_strategy="end", hub_revision="main")
    if when == "before":
        hub.fail(*faults)
    trainer = VanillaTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer)
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


class WaitForPush(transformers.TrainerCallback):
    """So that each push has what it was made for."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_save(self, *args, **kwargs):
        self.trainer.push_in_progress.wait_until_done()


@pytest.mark.parametrize("status", [401, 403, 503])
def test_each_push_that_fails_on_the_way_is_told_of_once(hub, folder, tmp_path, caplog, status):
    model, tokenizer = trained_model(folder)
    args = training_args(tmp_path, VanillaTrainingArguments)
    args.set_save("steps", 1)
    trainer = VanillaTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer)
    trainer.add_callback(WaitForPush(trainer))
    hub.fail({"method": "POST", "path": "/commit/", "status": status, "skip": 1, "times": 2})  # of four checkpoints
    trainer.train()
    assert trainer.state.global_step == 4
    told = [message for message in caplog.messages if "Training goes on" in message]
    assert [str(status) in message for message in told] == [True, True]
    assert hub.titles() == [f"Training in progress, step {step}" for step in (4, 1)] + ["initial commit"]


def test_a_hub_that_dies_on_the_way_does_not_end_the_training(hub, folder, tmp_path, caplog):
    model, tokenizer = trained_model(folder)
    args = training_args(tmp_path, VanillaTrainingArguments)
    trainer = VanillaTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer)
    trainer.add_callback(WaitForPush(trainer))
    hub.process.kill()
    hub.process.wait()
    trainer.train()
    assert trainer.state.global_step == 4
    assert len([message for message in caplog.messages if "Training goes on" in message]) == 2


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_that_comes_late_does_not_end_the_training(hub, folder, tmp_path, caplog, status):
    hub.fail({"method": "POST", "path": "/repos/create", "status": 503, "times": 9999})
    model, tokenizer = trained_model(folder)
    args = training_args(tmp_path, VanillaTrainingArguments)
    trainer = VanillaTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer)
    hub.fail({"method": "POST", "path": "/repos/create", "status": status, "times": 9999})
    trainer.train()
    assert trainer.state.global_step == 4
    told = [message for message in caplog.messages if "Training goes on" in message]
    assert [code in message for message, code in zip(told, ("503", str(status), str(status)), strict=True)] == [
        True
    ] * 3
    assert hub.requests("POST", "/commit/") == []


def test_a_training_pushes_our_card(hub, folder, tmp_path):
    model, tokenizer = trained_model(folder)
    args = training_args(tmp_path, VanillaTrainingArguments, hub_strategy="end", logging_steps=1)
    trainer = VanillaTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer)
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


def test_a_training_keeps_a_card_that_somebody_wrote(hub, folder, tmp_path, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "README.md").write_text("# Mine\n")
    model, tokenizer = trained_model(folder)
    args = training_args(tmp_path, VanillaTrainingArguments, hub_strategy="end")
    VanillaTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer).push_to_hub()
    assert hub.files()["README.md"] == git_hash(b"# Mine\n")
    assert "README.md stays as it is" in caplog.text


def test_a_card_that_fails_costs_nothing(hub, folder, tmp_path, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise KeyError("no such score")

    monkeypatch.setattr("hf_vanilla.hub.pushing_trainer.card_of_folder", broken)
    model, tokenizer = trained_model(folder)
    args = training_args(tmp_path, VanillaTrainingArguments, hub_strategy="end")
    trainer = VanillaTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer)
    trainer.train()
    trainer.push_to_hub()
    assert "No model card was written" in caplog.text
    assert {"model.safetensors", "README.md"} & hub.files().keys() == {"model.safetensors"}


def test_a_model_of_another_family_has_the_stock_card(hub, tmp_path):
    sizes = dict(vocab_size=12, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    trainer = PatientPushes(model, training_args(tmp_path), train_dataset=ROWS)
    trainer.push_to_hub(license="mit", tags="small", dataset_tags="a/b")
    card = ModelCard.load(tmp_path / "run" / "README.md")
    assert "generated_from_trainer" in card.data.tags
    assert (card.data.license, card.data.datasets) == ("mit", ["a/b"])


def test_a_push_in_the_end_waits_for_a_hub_that_comes_back(hub, folder, tmp_path, waits):
    model, tokenizer = trained_model(folder)
    args = training_args(tmp_path, VanillaTrainingArguments, hub_strategy="end")
    trainer = VanillaTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer)
    trainer.train()
    hub.fail({"method": "POST", "path": "/commit/", "status": 503, "times": 2})
    assert trainer.push_to_hub().oid == hub.api.repo_info(REPO).sha
    assert waits == [1, 2]
    assert hub.titles() == ["End of training", "initial commit"]
    (tmp_path / "run" / "config.json").write_text("{}")
    assert trainer.push_to_hub("again", blocking=False).result().oid == hub.api.repo_info(REPO).sha


@pytest.mark.slow
def test_a_script_ends_well_while_the_hub_is_down(hub, folder, tmp_path):
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


def test_the_token_of_the_arguments_is_written_nowhere(hub, folder, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.delenv("HF_TOKEN")
    model, tokenizer = trained_model(folder)
    args = training_args(
        tmp_path, VanillaTrainingArguments, hub_token=TOKEN, hub_always_push=True, hub_strategy="checkpoint"
    )
    trainer = VanillaTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer)
    trainer.train()
    trainer.push_to_hub()
    assert args.hub_token == copy.deepcopy(args).hub_token == TOKEN
    run = tmp_path / "run"
    for each in (run, run / "checkpoint-2", run / "checkpoint-4"):
        saved = torch.load(each / "training_args.bin", weights_only=False)
        assert (saved.hub_token, saved.hub_model_id) == (None, "tiny")
    assert "last-checkpoint/training_args.bin" in hub.files()
    stored = [path for path in hub.folder.rglob("*") if path.is_file()]
    found = [path for path in [*stored, *run.rglob("*")] if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert found == []
    assert TOKEN not in caplog.text + "".join(capfd.readouterr())


def test_a_download_that_breaks_off_is_made_whole(hub, folder, tmp_path):
    publish(folder, REPO)
    expected = (folder / "model.safetensors").read_bytes()
    hub.fail({"method": "GET", "path": "/resolve/.*/model.safetensors", "truncate": 1000})
    model = VanillaBertForPreTraining.from_pretrained(REPO, cache_dir=tmp_path / "cache")
    assert len(hub.requests("GET", "/model.safetensors")) == 2
    (cached,) = (tmp_path / "cache").rglob("snapshots/*/model.safetensors")
    assert cached.read_bytes() == expected
    weights = VanillaBertForPreTraining.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_download_of_the_right_length_and_wrong_content_is_found(hub, folder, tmp_path):
    publish(folder, REPO)
    hub.fail({"method": "GET", "path": "/resolve/.*/layers.py", "corrupt": True})
    hub.api.snapshot_download(REPO, cache_dir=tmp_path / "cache")
    found = hub.api.verify_repo_checksums(REPO, cache_dir=tmp_path / "cache")
    assert [each.path if hasattr(each, "path") else each["path"] for each in found.mismatches] == ["layers.py"]


def test_a_slow_hub_breaks_nothing(hub, folder, tmp_path, waits, monkeypatch):
    slow = ("GET", "/tree/"), ("PUT", "/lfs/"), ("POST", "/commit/")
    hub.fail(*({"method": method, "path": path, "wait": 0.3} for method, path in slow))
    publish(folder, REPO)
    assert waits == []
    assert_published(hub, folder)
    # Slower than the client waits for, at the question what there is and amid the weights.
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.fail({"method": "GET", "path": "/model.safetensors", "wait": 1})
    found = VanillaBertForPreTraining.from_pretrained(REPO, cache_dir=tmp_path / "cache").state_dict()
    assert len(hub.requests("GET", "/model.safetensors")) == 2
    weights = VanillaBertForPreTraining.from_pretrained(folder).state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_a_branch_that_moves_amid_a_download_gives_no_mixture(hub, folder, tmp_path, monkeypatch):
    models = []
    for seed in (0, 1):
        save_model(tmp_path / "single", seed)
        models.append(VanillaBertForPreTraining.from_pretrained(tmp_path / "single"))
    (folder / "model.safetensors").unlink()
    models[0].save_pretrained(folder, max_shard_size="8KB")
    publish(folder, REPO)
    models[1].save_pretrained(folder, max_shard_size="8KB")
    real = file_download.http_get
    first = threading.Lock()

    def move_and_fetch(url, *arguments, **options):
        if "/model-0000" in url and first.acquire(blocking=False):
            publish(folder, REPO)
        real(url, *arguments, **options)

    monkeypatch.setattr(file_download, "http_get", move_and_fetch)
    found = VanillaBertForPreTraining.from_pretrained(REPO, cache_dir=tmp_path / "cache").state_dict()
    assert len(hub.titles()) == 3
    assert len(hub.requests("GET", "/model-0000")) > 2
    for name, value in models[0].state_dict().items():
        assert torch.equal(found[name], value), name


def test_a_revision_that_is_not_there_is_told(hub, folder, tmp_path, waits):
    publish(folder, REPO)
    with pytest.raises(OSError, match="v9 is not a valid git identifier"):
        VanillaBertForPreTraining.from_pretrained(REPO, revision="v9", cache_dir=tmp_path / "cache")
    publish(folder, REPO, tag="v1.0")
    with pytest.raises(ValueError, match="`to_revision` must be .* which has no 'v9'; its tags are v1.0"):
        roll_back(REPO, "v9")
    assert waits == []
    assert len(hub.titles()) == 2


def test_the_section_of_the_readme_is_true(hub, tmp_path, monkeypatch, capsys):
    root = Path(__file__).parents[2]
    section = (root / "README.md").read_text("utf-8").partition("## Publish on the Hub")[2].partition("\n## ")[0]
    commands, program = re.findall(r"```(?:python)?\n(.*?)```", section, flags=re.DOTALL)
    (tmp_path / "scripts").symlink_to(root / "scripts")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        vocab_size=300, d_model=16, d_ff=24, num_heads=4, encoder_layers=1, decoder_layers=1
    )
    model = VanillaTransformerForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "runs" / "en-de")
    texts = ["the dog likes the cat and the bird"] * 3
    train_tokenizer(texts, 300, show_progress=False).save_pretrained(tmp_path / "runs" / "en-de")
    for command in commands.strip().splitlines():
        script, *options = command.removeprefix("python ").split()
        if "--roll_back_to" in options:
            before = hub.files("my-name/en-de")
            (tmp_path / "runs" / "en-de" / "notes.txt").write_text("new")
            publish(tmp_path / "runs" / "en-de", "my-name/en-de")
            assert "notes.txt" in hub.files("my-name/en-de")
        finished = run_here(monkeypatch, capsys, script, *options)
        assert finished.returncode == 0, finished.stderr
    assert hub.titles("my-name/en-de") == ["Go back to v1.0", "Upload model", "Upload model", "initial commit"]
    assert hub.files("my-name/en-de") == before
    program = f"""import sys
sys.modules["hf_vanilla"] = None
import torch
{program}
torch.save([model.lm_head.weight, translator.model.lm_head.weight], {str(tmp_path / "weights.pt")!r})
"""
    finished = run_as_user(hub, program, home=tmp_path / "home", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    for weight in torch.load(tmp_path / "weights.pt"):
        assert torch.equal(weight, model.lm_head.weight)
    assert finished.stdout.count("'translation_text'") == 2


LOAD_AND_SAVE = """
import sys
sys.modules["hf_vanilla"] = None
import torch, transformers
jobs, file = sys.argv[1:]
found = []
for repo, saved, inputs in torch.load(jobs):
    for place in (repo, saved):
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=True)
        for name in sorted(set(config.auto_map) - {"AutoConfig"}):
            torch.manual_seed(0)
            model = getattr(transformers, name).from_pretrained(place, trust_remote_code=True)
            with torch.no_grad():
                found.append((place, name, model(**inputs[name]).to_tuple()[0]))
        if place == repo:
            head = config.architectures[0]
            (name,) = [name for name, where in config.auto_map.items() if where.endswith("." + head)]
            getattr(transformers, name).from_pretrained(repo, trust_remote_code=True).save_pretrained(saved)
torch.save(found, file)
"""


def bert_to_train(tokenizer):
    model = VanillaBertForMaskedLM(VanillaBertConfig(vocab_size=len(tokenizer), **SIZES))
    return model, ROWS, {"input_ids": torch.tensor([[2, 5, 6, 3, 7], [2, 7, 3, 0, 0]])}


def transformer_to_train(tokenizer):
    sizes = {"d_model": 16, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 2, "d_ff": 24}
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(vocab_size=len(tokenizer), **sizes))
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7, 2]] * 8, "labels": [[7, 6, 2]] * 8})
    ids = {"input_ids": torch.tensor([[5, 6, 7, 8, 2]]), "decoder_input_ids": torch.tensor([[1, 8, 7]])}
    return model, rows, ids


def test_what_was_trained_loads_by_name_through_every_auto_class_and_is_complete_again(hub, tmp_path):
    tokenizer = train_wordpiece_tokenizer(["the dog likes the cat and the bird"] * 3, 60, show_progress=False)
    jobs, wanted = [], []
    for build in (bert_to_train, transformer_to_train):
        torch.manual_seed(3)
        model, rows, inputs = build(tokenizer)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        args = TrainingArguments(str(tmp_path / "run"), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True)
        trainer = Trainer(model, args, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
        folder = tmp_path / build.__name__
        trainer.save_model(str(folder))
        (folder / "training_args.bin").unlink()
        repo, saved = f"alice/{build.__name__}", str(tmp_path / f"{build.__name__}_saved")
        publish(folder, repo)
        names = sorted(set(model.config.auto_map) - {"AutoConfig"})
        asked = {
            name: {key: torch.stack((ids, ids), dim=1) if "Choice" in name else ids for key, ids in inputs.items()}
            for name in names
        }
        jobs.append((repo, saved, asked))
        for place in (repo, saved):
            for name in names:
                torch.manual_seed(0)
                loaded = getattr(transformers, name).from_pretrained(folder)
                with torch.no_grad():
                    wanted.append((place, name, loaded(**asked[name]).to_tuple()[0]))
    torch.save(jobs, tmp_path / "jobs.pt")
    finished = run_as_user(hub, LOAD_AND_SAVE, tmp_path / "jobs.pt", tmp_path / "found.pt", home=tmp_path / "home")
    assert finished.returncode == 0, finished.stderr
    for (place, name, tensor), expected in zip(torch.load(tmp_path / "found.pt"), wanted, strict=True):
        assert (place, name) == expected[:2]
        assert torch.equal(tensor, expected[2]), (place, name)
