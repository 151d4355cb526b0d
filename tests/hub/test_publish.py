"""Publishing and rolling back, against a Hub on localhost that fails in every way that the real one can."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from hub_server import TOKEN
from hub_testing import REPO, assert_published, lie_about_weights, run_as_user, save_model
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from peft import LoraConfig, get_peft_model

from hf_vanilla import (
    VanillaBertForMaskedLM,
    VanillaBertForPreTraining,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_vanilla.hub import publish, roll_back
from hf_vanilla.hub.card import CardFacts


# huggingface_hub uses its HTTP library in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def test_publish_makes_one_commit(hub, folder):
    done = publish(folder, "tiny", tag="v1", commit_message="First words")
    assert_published(hub, folder)
    assert hub.titles() == ["First words", "initial commit"]
    assert done.repo_id == REPO
    assert done.commit == hub.api.repo_info(REPO).sha == hub.api.repo_info(REPO, revision="v1").sha
    assert set(done.uploaded) == {path.name for path in folder.iterdir()}
    assert "README.md" in done.uploaded
    assert len(hub.requests("PUT", "/lfs/")) == 1
    assert {"layers.py", "modeling_vanilla_bert.py", "tokenizer.json"} <= set(done.uploaded)


def test_publish_sends_only_changes(hub, folder):
    first = publish(folder, REPO)
    again = publish(folder, REPO)
    assert (again.commit, again.uploaded, again.deleted) == (first.commit, (), ())
    assert_published(hub, folder, commits=1)
    (folder / "notes.txt").write_text("new")
    third = publish(folder, REPO)
    assert third.uploaded == ("notes.txt",)
    assert len(hub.requests("PUT", "/lfs/")) == 1
    assert_published(hub, folder, commits=2)


def test_dry_run_changes_nothing(hub, folder):
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


def test_dry_run_shows_the_card_and_lists_the_picture(hub, folder):
    log = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2, "log_history": log}))
    plan = publish(folder, "tiny", dry_run=True)
    assert "training_curve.png" in plan.uploaded
    assert plan.hub_error is None
    assert not (folder / "training_curve.png").exists()
    done = publish(folder, "tiny")
    assert (folder / "README.md").read_text() == plan.card == done.card
    assert done.uploaded == plan.uploaded
    assert publish(folder, REPO, dry_run=True).card is None  # it is kept as it is
    assert publish(folder, REPO, dry_run=True).uploaded == ()
    assert publish(folder, REPO, facts=CardFacts(), dry_run=True).uploaded == ()


@pytest.mark.promise("offline")
@pytest.mark.parametrize("failure", ["offline", "down", "unknown token"])
def test_dry_run_works_without_the_hub(hub, folder, waits, monkeypatch, failure):
    if failure == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif failure == "down":
        hub.process.kill()
    token = "hf_" + "B" * 37 if failure == "unknown token" else None
    plan = publish(folder, "tiny", dry_run=True, token=token)
    assert waits == []
    with pytest.warns(FutureWarning, match="now called `hub_error`"):
        assert plan.trouble == plan.hub_error
    assert plan.hub_error
    assert "\n" not in plan.hub_error
    assert (plan.repo_id, plan.commit) == ("tiny", None)
    assert {"model.safetensors", "README.md"} <= set(plan.uploaded)
    assert 'model="tiny"' in plan.card
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="may be a pickle"):
        publish(folder, "tiny", dry_run=True)


def test_publish_deletes_old_weights_and_nothing_else(hub, folder):
    publish(folder, REPO)
    target = "target_tokenizer/tokenizer.json"  # of an earlier model with two vocabularies
    for name in ("curve.png", "lora/adapter_model.safetensors", "old.safetensors", target):
        hub.api.upload_file(path_or_fileobj=b"x" * 30, path_in_repo=name, repo_id=REPO)
    model = VanillaBertForPreTraining.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="4KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert publish(folder, REPO).deleted == ("model.safetensors", "old.safetensors", target)
    names = hub.files().keys()
    assert {"curve.png", "lora/adapter_model.safetensors", "model.safetensors.index.json"} <= names
    assert not {"model.safetensors", "old.safetensors", target} & names


def test_roll_back_restores_files_in_one_commit(hub, folder):
    first = publish(folder, REPO, tag="good")
    before = hub.files()
    save_model(folder, seed=1)
    (folder / "more.txt").write_text("more")
    second = publish(folder, REPO)
    with pytest.raises(ValueError, match="`to_revision` .* must be .* which has no 'v9'; its tags are good"):
        roll_back(REPO, "v9")
    assert roll_back("tiny", "good", dry_run=True).repo_id == REPO
    assert hub.files() != before
    done = roll_back("tiny", "good")
    assert (done.repo_id, done.uploaded, done.deleted) == (REPO, ("model.safetensors",), ("more.txt",))
    assert hub.files() == before
    assert len(hub.titles()) == 4
    assert done.commit not in (first.commit, second.commit)
    assert roll_back(REPO, "good").commit == done.commit  # nothing to do


def test_wrong_hash_is_found(hub, folder, monkeypatch):
    publish(folder, REPO, tag="good")
    save_model(folder, seed=1)
    with monkeypatch.context() as patch:
        lie_about_weights(patch, hub, "Upload more")
        with pytest.raises(ValueError, match="is not what was sent: model.safetensors"):
            publish(folder, REPO, commit_message="Upload more")
    lie_about_weights(monkeypatch, hub, "Go back to good")
    with pytest.raises(ValueError, match="is not what was sent: model.safetensors"):
        roll_back(REPO, "good")


# Each request of a publication; a fault at any of them must not change the result.
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


FAULTS = {
    "500": {"status": 500},
    "503-twice": {"status": 503, "times": 2},
    "429": {"status": 429, "headers": {"Retry-After": "7"}},
    "drop-before": {"drop": "before"},
    "drop-after": {"drop": "after"},
}


@pytest.mark.promise("error of the Hub", "connection lost")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("method", "path"), CALLS, ids=lambda each: each.strip("/").split("/")[-1] or each)
def test_publish_survives_a_fault_at_any_request(hub, folder, waits, method, path, fault):
    hub.fail({"method": method, "path": path, **FAULTS[fault]})
    done = publish(folder, "tiny", tag="v1")
    assert_published(hub, folder)
    assert hub.api.repo_info(REPO, revision="v1").sha == done.commit
    assert waits
    if fault == "429":
        assert max(waits) >= 7


# Some requests are repeated: after the creation of the repository, before the commit, and to verify it.
@pytest.mark.parametrize("fault", ["503-twice", "drop-after"])
@pytest.mark.parametrize(("part", "skip"), [("revision/main", 1), ("revision/main", 2), ("tree", 1), ("tree", 2)])
def test_publish_survives_a_fault_at_a_later_request(hub, folder, waits, part, skip, fault):
    hub.fail({"method": "GET", "path": f"/api/models/{REPO}/{part}", "skip": skip, **FAULTS[fault]})
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
def test_roll_back_survives_a_fault_at_any_request(hub, folder, waits, method, part):
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


@pytest.mark.promise("connection lost")
def test_publish_resumes_after_an_outage(hub, folder, waits):
    hub.fail({"method": "POST", "path": "/commit/", "status": 503, "times": 99})
    with pytest.raises(HfHubHTTPError, match="503"):
        publish(folder, REPO)
    assert waits == [1, 2, 4, 8, 16]
    assert hub.titles() == ["initial commit"]
    hub.fail()
    publish(folder, REPO)
    assert_published(hub, folder)
    assert len(hub.requests("PUT", "/lfs/")) == 1  # the weights were there already


@pytest.mark.promise("two pushes at once")
@pytest.mark.parametrize("status", [409, 412])
def test_conflict_at_the_commit_is_retried(hub, folder, waits, status):
    conflict = {"method": "POST", "path": "/commit/", "status": status}
    hub.fail({**conflict, "times": 99})
    with pytest.raises(HfHubHTTPError, match=str(status)):
        publish(folder, REPO)
    assert waits == [1, 2, 4, 8, 16]
    assert hub.titles() == ["initial commit"]
    hub.fail(conflict)
    waits.clear()
    publish(folder, REPO)
    assert waits == [1]
    assert_published(hub, folder)


def test_conflict_at_the_creation_is_retried(hub, folder, waits):
    hub.fail({"method": "POST", "path": "/repos/create", "status": 409})  # without "url", since nothing was created
    publish(folder, REPO)
    assert waits == [1]
    assert_published(hub, folder)


def test_repository_created_by_another_is_used(hub, folder, waits, monkeypatch):
    original = HfApi.create_repo

    def create_after_another(api, *arguments, **options):
        original(hub.api, REPO)
        return original(api, *arguments, **options)

    monkeypatch.setattr(HfApi, "create_repo", create_after_another)
    hub.fail({"method": "POST", "path": "/repos/create", "status": 409, "skip": 1})
    publish(folder, REPO)
    assert waits == []
    assert_published(hub, folder)


@pytest.mark.parametrize(
    "fault", [{"status": 500, "times": 5}, {"status": 500, "times": 12}, {"cut": 1000, "times": 2}]
)
def test_failed_upload_is_retried(hub, folder, waits, fault):
    hub.fail({"method": "PUT", "path": "/lfs/", **fault})
    publish(folder, REPO)
    complete = (folder / "model.safetensors").stat().st_size
    sent = [each["size"] for each in hub.requests("PUT", "/lfs/")]
    assert sent == [fault.get("cut", complete)] * fault["times"] + [complete]
    assert len(waits) == fault["times"]
    assert_published(hub, folder)


@pytest.mark.parametrize("is_there", [True, False])
def test_missing_branch_is_found_before_any_change(hub, folder, waits, is_there):
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


@pytest.mark.promise("two pushes at once")
def test_commit_of_another_is_not_overwritten(hub, folder, monkeypatch):
    publish(folder, REPO)
    (folder / "notes.txt").write_text("ours")
    original = HfApi.create_commit

    def commit_after_another(api, *arguments, **options):
        monkeypatch.setattr(HfApi, "create_commit", original)
        hub.api.upload_file(path_or_fileobj=b"theirs", path_in_repo="notes.txt", repo_id=REPO)
        return original(api, *arguments, **options)

    monkeypatch.setattr(HfApi, "create_commit", commit_after_another)
    with pytest.raises(ValueError, match="Somebody else pushed to alice/tiny"):
        publish(folder, REPO)
    assert len(hub.titles()) == 3


def test_tag_is_not_moved(hub, folder):
    first = publish(folder, REPO, tag="v1")
    (folder / "notes.txt").write_text("new")
    with pytest.raises(ValueError, match="`tag` 'v1' names the commit .* already"):
        publish(folder, REPO, tag="v1")
    assert hub.api.repo_info(REPO, revision="v1").sha == first.commit
    assert len(hub.titles()) == 2  # found before the commit
    assert publish(folder, REPO, tag="v2").uploaded == ("notes.txt",)


def test_check_of_the_model_type_is_retried(hub, folder, waits):
    publish(folder, REPO)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    hub.fail({"method": "HEAD", "path": "/resolve/", "status": 503, "times": 99})
    with pytest.raises(HfHubHTTPError, match="503"):
        publish(folder, REPO)
    assert [wait for wait in waits if isinstance(wait, float)] == [1.0, 2.0, 4.0, 8.0, 16.0]  # besides its client's
    assert "503" in publish(folder, REPO, dry_run=True).hub_error
    hub.fail()
    assert publish(folder, REPO).uploaded == ("config.json",)
    hub.api.upload_file(path_or_fileobj=b"{}", path_in_repo="config.json", repo_id=REPO)
    assert publish(folder, REPO).uploaded == ("config.json",)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapter_does_not_replace_a_model(hub, folder, tmp_path):
    publish(folder, REPO)
    adapted = get_peft_model(VanillaBertForMaskedLM.from_pretrained(folder), LoraConfig(target_modules=["dense"]))
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="alice/tiny has a model, whose weights would be deleted, and .* an adapter"):
        publish(tmp_path / "adapter", REPO)
    publish(tmp_path / "adapter", "alice/adapter")
    with pytest.raises(ValueError, match="alice/adapter has an adapter, .* is a model. Give another"):
        publish(folder, "alice/adapter")


def test_results_without_scores_are_refused(hub, folder):
    with pytest.raises(ValueError, match="`results` must have scores"):
        publish(folder, REPO, results={"ranking": []})


def test_model_of_another_type_is_not_overwritten(hub, folder, tmp_path):
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


def test_publish_warns_of_odd_input(hub, folder, caplog):
    publish(folder, REPO)
    assert "has no tokenizer" not in caplog.text
    publish(folder, REPO, private=True)
    assert "alice/tiny exists already, so `private` has no effect" in caplog.text
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    publish(folder, REPO)
    assert "has no tokenizer: texts can't be encoded" in caplog.text


def test_card_with_a_token_is_not_written(hub, folder):
    results = {"summary": {}, "command": "python train.py --hub_token " + "hf_" + "Z" * 35}
    with pytest.raises(ValueError, match="The model card would contain a token"):
        publish(folder, REPO, results=results)
    assert not (folder / "README.md").exists()
    assert hub.ask("/test/log") == []


def test_card_is_renewed_until_somebody_edits_it(hub, folder, caplog):
    card = folder / "README.md"
    (folder / "eval_results.json").write_text('{"eval_mlm_accuracy": 0.25}')
    publish(folder, "tiny")
    assert f'model="{REPO}"' in card.read_text()
    assert "| validation | accuracy of masked tokens | 0.25 |" in card.read_text()
    (folder / "eval_results.json").write_text('{"eval_mlm_accuracy": 0.5}')
    assert set(publish(folder, REPO).uploaded) == {"README.md", "eval_results.json"}
    assert "| validation | accuracy of masked tokens | 0.5 |" in card.read_text()
    publish(folder, "other")
    assert 'model="alice/other"' in card.read_text()
    assert "is kept as it is" not in caplog.text

    card.write_text(card.read_text().replace("# other", "# My own words"))
    edited = card.read_text()
    assert publish(folder, "other").uploaded == ("README.md",)
    assert "is kept as it is" not in caplog.text
    publish(folder, REPO)
    assert "README.md is kept as it is, but does not name alice/tiny" in caplog.text
    for words in ({"facts": CardFacts(title="No")}, {"results": {"bleu": 1.0, "chrf": 2.0}}):
        with pytest.raises(
            ValueError, match=r"README.md was written or edited by hand, and `facts` or `results` would"
        ):
            publish(folder, REPO, **words)
    assert card.read_text() == edited


def test_card_with_facts_is_renewed_with_facts(hub, folder):
    publish(folder, REPO, facts=CardFacts(limits="Knows no verbs.", training_data="one\r\ntwo\rthree"))
    (folder / "eval_results.json").write_text('{"eval_mlm_accuracy": 0.5}')
    assert publish(folder, REPO).uploaded == ("eval_results.json",)
    assert "Knows no verbs." in (folder / "README.md").read_text()
    assert publish(folder, REPO, facts=CardFacts(limits="Knows few verbs.")).uploaded == ("README.md",)
    assert "| validation | accuracy of masked tokens | 0.5 |" in (folder / "README.md").read_text()


@pytest.mark.promise("token of the Hub")
def test_token_is_sent_in_headers_only(hub, folder, caplog):
    publish(folder, REPO)
    for path in folder.iterdir():
        assert TOKEN.encode() not in path.read_bytes()
    for each in hub.ask("/test/log"):
        assert TOKEN not in each["path"]
    assert TOKEN not in caplog.text


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


@pytest.mark.promise("killed while pushing")
def test_killed_push_is_resumed(hub, folder):
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", PUSH]
    kills = {
        "alice/amid-the-weights": {"method": "PUT", "path": "/lfs/", "cut": 1000},
        "alice/before-the-commit": {"method": "POST", "path": "/commit/", "drop": "before"},
        "alice/after-the-commit": {"method": "POST", "path": "/commit/"},  # whose answer the process does not get
    }
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with subprocess.Popen(command, env=environment, **pipes) as pushes:
        for number, (repo, fault) in enumerate(kills.items()):
            save_model(folder, seed=number)  # other weights, since the Hub keeps those that it has
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
    complete = (folder / "model.safetensors").stat().st_size
    # Those of the first were sent again, and the others were complete.
    assert [each["size"] for each in hub.requests("PUT", "/lfs/")] == [1000, complete, complete, complete]


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
def test_xet_sends_large_files_and_its_errors_are_not_retried(hub, folder, tmp_path):
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
    assert len(hub.requests("GET", "/xet-write-token/")) == 4  # the client of xet retries, so we don't
    assert hub.requests("POST", "/lfs/") + hub.requests("PUT", "/lfs/") == []
