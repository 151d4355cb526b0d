"""The script that publishes, and the README's section about it."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN
from hub_testing import REPO, assert_published, run_as_user
from huggingface_hub import constants

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.data.tokenization import train_tokenizer
from hf_vanilla.hub import publish


# huggingface_hub uses its HTTP library in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def run_here(monkeypatch, capsys, script, *options):
    """Run a script in this process, since a new one takes seconds to import everything."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, options)])
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(script, run_name="__main__")
    return subprocess.CompletedProcess(sys.argv, ending.value.code, *capsys.readouterr())


def test_script_publishes_and_goes_back(hub, folder, tmp_path, monkeypatch, capsys):
    script = str(Path(__file__).parents[2] / "scripts" / "push_to_hub.py")
    options = ["--repo_id", "tiny", "--folder", folder]
    planned = run_here(monkeypatch, capsys, script, *options, "--dry_run")
    assert planned.returncode == 0, planned.stderr
    assert "+ model.safetensors\n" in planned.stdout
    assert "Nothing was done" in planned.stdout
    assert "README.md would be:" in planned.stdout
    assert "The card lacks language, license, datasets, training_data, limits; add them with --card" in planned.stdout
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        down = run_here(monkeypatch, capsys, script, *options, "--dry_run")
    assert down.returncode == 0, down.stderr
    assert "+ model.safetensors\n" in down.stdout
    assert "The Hub could not be read completely: " in down.stdout
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


def test_commands_of_the_readme_run(hub, tmp_path, monkeypatch, capsys):
    root = Path(__file__).parents[2]
    section = (root / "scripts" / "README.md").read_text("utf-8").partition("## Publish")[2].partition("\n## ")[0]
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
        options = command.removeprefix("hf-vanilla push-to-hub ").split()
        if "--roll_back_to" in options:
            before = hub.files("my-name/en-de")
            (tmp_path / "runs" / "en-de" / "notes.txt").write_text("new")
            publish(tmp_path / "runs" / "en-de", "my-name/en-de")
            assert "notes.txt" in hub.files("my-name/en-de")
        finished = run_here(monkeypatch, capsys, "scripts/push_to_hub.py", *options)
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
