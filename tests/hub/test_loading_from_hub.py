"""Loading what was published: by a user without the package, amid faults, and by revision."""

import itertools
import json
import shutil
import threading

import pytest
import torch
import transformers
from datasets import Dataset
from hub_testing import REPO, SIZES, assert_published, run_as_user, save_model
from huggingface_hub import constants, file_download
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
from hf_vanilla.hub import publish


# huggingface_hub uses its HTTP library in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


ROWS = Dataset.from_dict({"input_ids": [[2, 5, 6, 3]] * 8, "labels": [[-100, 6, -100, -100]] * 8})


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


def test_every_head_loads_by_name_without_the_package(hub, folder, tmp_path):
    first = publish(folder, REPO)
    model, tokenizer = (
        VanillaBertForPreTraining.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    # The stock ways to push, of a model and of a training.
    model.push_to_hub("alice/pushed")
    tokenizer.push_to_hub("alice/pushed")
    trained = VanillaBertForMaskedLM.from_pretrained(folder)
    args = TrainingArguments(
        str(tmp_path / "run"), hub_model_id="alice/trained", push_to_hub=True, hub_strategy="end", max_steps=4,
        use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
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


def test_pipelines_load_by_name_and_revision_without_the_package(hub, tmp_path):
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


def test_trained_model_loads_through_every_auto_class_and_is_saved_completely(hub, tmp_path):
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


@pytest.mark.promise("broken download")
def test_interrupted_download_is_completed(hub, folder, tmp_path):
    publish(folder, REPO)
    expected = (folder / "model.safetensors").read_bytes()
    hub.fail({"method": "GET", "path": "/resolve/.*/model.safetensors", "truncate": 1000})
    model = VanillaBertForPreTraining.from_pretrained(REPO, cache_dir=tmp_path / "cache")
    assert len(hub.requests("GET", "/model.safetensors")) == 2
    (cached,) = (tmp_path / "cache").rglob("snapshots/*/model.safetensors")
    assert cached.read_bytes() == expected
    weights = VanillaBertForPreTraining.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.promise("broken download")
def test_corrupt_download_is_found(hub, folder, tmp_path):
    publish(folder, REPO)
    hub.fail({"method": "GET", "path": "/resolve/.*/layers.py", "corrupt": True})
    hub.api.snapshot_download(REPO, cache_dir=tmp_path / "cache")
    found = hub.api.verify_repo_checksums(REPO, cache_dir=tmp_path / "cache")
    assert [each.path if hasattr(each, "path") else each["path"] for each in found.mismatches] == ["layers.py"]


def test_slow_hub_changes_nothing(hub, folder, tmp_path, waits, monkeypatch):
    slow = ("GET", "/tree/"), ("PUT", "/lfs/"), ("POST", "/commit/")
    hub.fail(*({"method": method, "path": path, "wait": 0.3} for method, path in slow))
    publish(folder, REPO)
    assert waits == []
    assert_published(hub, folder)
    # Slower than the client's time-out, amid the weights.
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.fail({"method": "GET", "path": "/model.safetensors", "wait": 1})
    found = VanillaBertForPreTraining.from_pretrained(REPO, cache_dir=tmp_path / "cache").state_dict()
    assert len(hub.requests("GET", "/model.safetensors")) == 2
    weights = VanillaBertForPreTraining.from_pretrained(folder).state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


@pytest.mark.promise("broken download")
def test_commit_amid_a_download_gives_no_mixture(hub, folder, tmp_path, monkeypatch):
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


@pytest.mark.promise("broken download")
def test_missing_revision_is_named(hub, folder, tmp_path, waits):
    publish(folder, REPO)
    with pytest.raises(OSError, match="v9 is not a valid git identifier"):
        VanillaBertForPreTraining.from_pretrained(REPO, revision="v9", cache_dir=tmp_path / "cache")
    assert waits == []
