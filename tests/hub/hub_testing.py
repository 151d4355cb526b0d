"""What the tests of the Hub share: the server's process, a tiny model, and programs run as a user would."""

import hashlib
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import torch
from hub_server import TOKEN, git_hash
from huggingface_hub import HfApi

from hf_vanilla import VanillaBertConfig, VanillaBertForPreTraining
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer


REPO = "alice/tiny"
SIZES = dict(hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20)


class Hub:
    """The server in a process of its own, and requests of a test."""

    def __init__(self, folder, port=0):
        # Without `site`, which the server does not need, it starts in half the time.
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


def save_model(folder, seed=0):
    torch.manual_seed(seed)
    tokenizer = train_wordpiece_tokenizer(["the dog likes the cat and the bird"] * 3, 60, show_progress=False)
    tokenizer.save_pretrained(folder)
    VanillaBertForPreTraining(VanillaBertConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(folder)
    return folder


def assert_published(hub, folder, commits=1, repo=REPO):
    """Check that the Hub has the folder's files, after this number of commits besides the first empty one."""
    local = {path.name for path in folder.iterdir() if path.is_file()}
    remote = hub.files(repo)
    assert local | {".gitattributes"} == remote.keys()
    for path in folder.iterdir():
        content = path.read_bytes()
        assert remote[path.name] in (hashlib.sha256(content).hexdigest(), git_hash(content)), path.name
    assert len(hub.titles(repo)) == commits + 1


def lie_about_weights(monkeypatch, hub, *titles):
    """Make the Hub report a wrong hash of the weights once its last commit has one of these titles."""
    real = HfApi.list_repo_tree

    def lying(api, *arguments, **options):
        entries = list(real(api, *arguments, **options))
        for entry in entries:
            if entry.path == "model.safetensors" and hub.titles()[0] in titles:
                entry.lfs.sha256 = "0" * 64
        return entries

    monkeypatch.setattr(HfApi, "list_repo_tree", lying)


def run_as_user(hub, program, *arguments, home, offline=False, settings=None, **options):
    """Run a program in a process that has only the Hub and an empty cache."""
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": str(int(offline)), "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(home), **(settings or {}),
    }  # fmt: skip
    command = [sys.executable, *(["-c", program] if "\n" in program else [program]), *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False, **options
    )
