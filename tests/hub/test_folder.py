"""Which files of a folder are published, and what makes a folder unfit."""

import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from hub_server import git_hash
from hub_testing import REPO, save_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from hf_vanilla.data.tokenization import train_wordpiece_tokenizer
from hf_vanilla.hub import check_folder, publish


# huggingface_hub uses its HTTP library in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.pt",
        "trainer_state.json",
        "stream_state_1.json",
        "zero_to_fp32.py",
        "global_step5/model_states.pt",
        "optimizer_0/a.distcp",
    ],
)
def test_training_state_is_published_on_request(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"state")
    assert name not in check_folder(folder)
    assert name in check_folder(folder, with_training_state=True)


@pytest.mark.parametrize(
    "name", ["training_args.bin", "checkpoint-5/model.safetensors", "_pushing/a.pt", "_run_earlier/a.pt", ".secret"]
)
def test_private_files_are_never_published(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"private")
    assert name not in check_folder(folder, with_training_state=True)


def test_folder_of_several_seeds_lists_them(tmp_path):
    for seed in (2, 1):
        save_model(tmp_path / f"seed-{seed}")
    with pytest.raises(ValueError, match=f"These have one: {tmp_path}/seed-1, {tmp_path}/seed-2; give the one"):
        check_folder(tmp_path)


def break_config(folder):
    (folder / "config.json").unlink()


def drop_a_tensor(folder):
    replace(folder, lambda weights: weights.pop("bert.pooler.dense.weight"))


def truncate(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-9])


def replace(folder, change):
    """Change the weights of a folder, which `change` gets by name."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def rename_a_tensor(folder):
    replace(folder, lambda weights: weights.update({"bert.pooler.weight": weights.pop("bert.pooler.dense.weight")}))


def add_a_tensor(folder):
    replace(folder, lambda weights: weights.update({"bert.extra.weight": torch.ones(2, 3)}))


def put_nan(folder):
    replace(folder, lambda weights: weights["bert.pooler.dense.bias"][3].fill_(float("nan")))


def put_integers(folder):
    name = "bert.pooler.dense.bias"
    replace(folder, lambda weights: weights.update({name: weights[name].long()}))


def point_outside(folder, shard="../outside.safetensors"):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": {name: str(shard) for name in weights}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def point_to_the_root(folder):
    point_outside(folder, folder.parent / "outside.safetensors")


def break_the_index(folder):
    point_outside(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')


def deepen(folder, name="config.json"):
    (folder / name).write_text('{"\\"[{": ' + "[" * 100 + "]" * 100 + "}")


def deepen_the_tokenizer(folder):
    deepen(folder, "tokenizer.json")


def enlarge(folder):
    with (folder / "config.json").open("ab") as file:
        file.truncate((16 << 20) + 1)


def replace_config(folder):
    (folder / "config.json").write_text("[]")


def add_a_pickle(folder):
    (folder / "pytorch_model.bin").write_bytes(b"x")


def add_a_token(folder):
    (folder / "notes.txt").write_text("login with " + "hf_" + "Z" * 35)


def add_another_tokenizer(folder):
    texts = ["some quite different words, and many more of them than before"] * 3
    train_wordpiece_tokenizer(texts, 90, show_progress=False).save_pretrained(folder)


def add_a_tokenizer_with_another_end(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "[CLS]"
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 3}))


@pytest.mark.promise("hostile weights", "absurd sizes", "tensor missing", "pickle")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (break_config, "must be a folder with a config.json"),
        (drop_a_tensor, "with its config.json: it lacks bert.pooler.dense.weight"),
        (truncate, "does not load"),
        (rename_a_tensor, "with its config.json: it lacks bert.pooler.dense.weight"),
        (add_a_tensor, "it has also bert.extra.weight"),
        (deepen, "config.json must not nest brackets deeper than 100 levels"),
        (deepen_the_tokenizer, "tokenizer.json must not nest brackets deeper than 100 levels"),
        (enlarge, "config.json must have at most 16,777,216 bytes, got 16,777,217"),
        (put_nan, "`bert.pooler.dense.bias` in .* hold nan or infinity"),
        (put_integers, "`bert.pooler.dense.bias` in .* must be floating-point numbers, got I64"),
        (
            point_outside,
            r"model.safetensors.index.json in .* names \.\./outside.safetensors, which is not in",
        ),
        (point_to_the_root, "names .*/outside.safetensors, which is not in the folder"),
        (break_the_index, "model.safetensors.index.json in .* must map names of weights to files"),
        (replace_config, "config.json must hold a JSON object"),
        (add_a_pickle, "pytorch_model.bin may be a pickle"),
        (add_a_token, "notes.txt contains a token of the Hub"),
        (add_another_tokenizer, "but the model only"),
        (
            add_a_tokenizer_with_another_end,
            "`eos_token_id` of the model .3. and of the tokenizer .2, '.CLS.'.",
        ),
    ],
    ids=lambda each: each.__name__ if callable(each) else None,
)
def test_unfit_folder_is_not_published(hub, folder, change, message):
    change(folder)
    with pytest.raises(ValueError, match=message) as error:
        publish(folder, REPO)
    assert "Z" * 35 not in str(error.value)
    assert hub.ask("/test/log") == []


@pytest.mark.promise("pickle")
@pytest.mark.parametrize("name", ["old.PKL", "raw-2.dat", "raw-3.dat", "raw-4.dat", "raw-5", "zip.tar", "legacy.tar"])
def test_pickle_is_recognized_by_its_content(folder, name):
    path = folder / name
    if name.startswith("raw"):
        path.write_bytes(pickle.dumps({"a": 1}, protocol=int(name[4])))
    elif name == "old.PKL":
        path.write_bytes(b"x")
    else:
        torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=name == "zip.tar")
    with pytest.raises(ValueError, match=f"{name} may be a pickle"):
        check_folder(folder)


def test_other_files_are_not_taken_for_pickles(folder):
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


@pytest.mark.promise("token of the Hub")
@pytest.mark.parametrize("before", [0, (1 << 20) - 20, (2 << 20) - 1], ids=["start", "boundary", "next boundary"])
@pytest.mark.parametrize(
    "token",
    ["hf_" + "b" * 34, "api_org_" + "b" * 34, "hf_oauth_eyJhbGciOi.eyJh-bGci_Oi.0123456789", "secret-" + "s" * 500],
    ids=["user", "organization", "oauth", "in use"],
)
def test_every_kind_of_token_is_found_anywhere(folder, token, before):
    in_use = token if token.startswith("secret") else None
    (folder / "notes.txt").write_text("x" * before + token + " and more")
    with pytest.raises(ValueError, match="notes.txt contains a token of the Hub"):
        check_folder(folder, token=in_use)
    (folder / "notes.txt").write_text("hf_oauth_is_short api_org_too " + "secret-" + "x" * 50)
    assert "notes.txt" in check_folder(folder, token=in_use)


def test_link_to_a_file_outside_is_refused(folder, tmp_path):
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


def test_snapshot_of_the_cache_is_published(hub, folder, tmp_path):
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
