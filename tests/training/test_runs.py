"""The folder of a run: lock, options, resuming, final model."""

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import pytest
import torch
from datasets import Dataset
from tiny_translation import tiny_collator, tiny_model, tiny_pairs, weights_of
from transformers import AutoTokenizer, Seq2SeqTrainer, Trainer, TrainerCallback, TrainerState, TrainingArguments

from hf_vanilla import VanillaBertConfig, VanillaBertForSequenceClassification, training
from hf_vanilla.command_line.options import run
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer
from hf_vanilla.training import (
    VanillaTrainer,
    VanillaTrainingArguments,
    begin_run,
    check_and_save_options,
    decisive_options,
    is_finished,
    last_complete_checkpoint,
    lock_run_folder,
    resume_hint_on_interrupt,
    save_final_model,
    save_metrics,
    train_to_end,
)


LOCK = """
import sys
from hf_vanilla.training import lock_run_folder
with lock_run_folder(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.promise("two runs in one folder")
def test_lock_ends_with_its_process(tmp_path):
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", LOCK, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match="`output_dir` .* is in use by another run"), lock_run_folder(folder):
            pass
        with lock_run_folder(folder, is_main_process=False):
            pass
        other.send_signal(signal.SIGKILL)
    assert folder.is_dir()
    with lock_run_folder(folder):
        (folder / "result").write_text("7")
    assert [path.name for path in folder.iterdir()] == ["result"]  # no lock
    with lock_run_folder(folder):
        assert (folder / "result").read_text() == "7"


def test_lock_removes_an_unused_folder(tmp_path):
    with pytest.raises(KeyError), lock_run_folder(tmp_path / "run"):
        raise KeyError
    assert not (tmp_path / "run").exists()


@pytest.fixture
def options(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    return {
        "hidden_size": 16, "train_files": [str(tmp_path / "a.txt")], "model_name_or_path": str(tmp_path / "bert"),
        "tokenizer_name_or_path": "google-bert/bert-base-uncased", "validation_file": None, "logging_steps": 5,
        "phase_lengths": (16, 32),
    }  # fmt: skip


def begin(folder, options, checkpoint=None):
    check_and_save_options(folder, decisive_options(options), checkpoint)


@pytest.mark.promise("other config, tokenizer or data")
def test_changed_options_are_refused(tmp_path, options):
    run = tmp_path / "run"
    begin(run, options)
    begin(run, {**options, "hidden_size": 24})  # there is no model yet
    begin(run, options)
    (run / "config.json").write_text("{}")
    (tmp_path / "b.txt").write_text("text")
    begin(run, {**options, "logging_steps": 6, "train_files": [tmp_path / "b.txt"], "of_a_later_version": 1})
    with pytest.raises(
        ValueError, match=r"`hidden_size` is 24, not the 16 that the run in .*run was started with\. G"
    ):
        begin(run, {**options, "hidden_size": 24})
    (tmp_path / "b.txt").write_text("TEXT")
    with pytest.raises(ValueError, match=r"`hidden_size` is 24, .* with \(and so train_files\)\. Give the same"):
        begin(run, {**options, "hidden_size": 24, "train_files": [tmp_path / "b.txt"]})
    (tmp_path / "bert" / "config.json").write_text('{"hidden_size": 7}')
    with pytest.raises(ValueError, match="`model_name_or_path` has other contents than those that the run in"):
        begin(run, options)
    with pytest.raises(ValueError, match="`model_name_or_path` has other contents"):
        begin(tmp_path / "elsewhere", options, run / "checkpoint-4")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["train_file", "dataset_name"])
def test_other_folder_of_data_is_refused(tmp_path, name):
    for image in ("cat/1.png", "dog/1.png"):
        (tmp_path / "images" / image).parent.mkdir(parents=True)
        (tmp_path / "images" / image).write_bytes(b"pixels")
    run, options = tmp_path / "run", {name: str(tmp_path / "images")}
    begin(run, options)
    (run / "config.json").write_text("{}")
    begin(run, options)
    (tmp_path / "images" / "dog" / "1.png").rename(tmp_path / "images" / "cat" / "2.png")
    with pytest.raises(ValueError, match=f"`{name}` has other contents than those that the run in"):
        begin(run, options)
    nothing = f"sha256 {hashlib.sha256().hexdigest()}"  # of an earlier version, which did not read such folders
    (run / "_run_options.json").write_text(json.dumps({name: nothing}))
    begin(run, options)


@pytest.mark.promise("other config, tokenizer or data")
@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 3e-4},
        {"warmup_steps": 7},
        {"lr_scheduler_type": "cosine"},
        {"weight_decay": 0.1},
        {"max_grad_norm": 0.5},
        {"consistency_weight": 5.0},
        {"teacher_forcing_ratio": 0.5},
        {"label_smoothing_factor": 0.1},
        {"bf16": True},
        {"dataloader_drop_last": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_run_is_resumed_with_its_optimizer_schedule_and_precision(tmp_path, change):
    def arguments(**changes):
        return VanillaTrainingArguments(tmp_path, use_cpu=True, **changes)

    begin_run(arguments())
    (tmp_path / "config.json").write_text("{}")
    (name, value), *_ = change.items()
    with pytest.raises(ValueError, match=rf"`{name}` is {value!r}, not the .* which a checkpoint as `model_name_or_"):
        begin_run(arguments(**change))
    begin_run(arguments(max_steps=9, logging_steps=1, eval_steps=4))


@pytest.mark.promise("other config, tokenizer or data")
@pytest.mark.parametrize("folder", ["", "target_tokenizer"], ids=["source", "target"])
def test_run_is_resumed_with_its_tokenizer(tmp_path, folder):
    checkpoint = tmp_path / "run" / "checkpoint-2"
    tokenizer = train_wordpiece_tokenizer(["a b c d"] * 9, 9, show_progress=False)
    tokenizer.save_pretrained(tmp_path / "run" / folder)
    tokenizer(["a b c"], truncation=True, max_length=2)  # its file remembers this
    tokenizer.save_pretrained(checkpoint / folder)
    (checkpoint / "trainer_state.json").write_text('{"global_step": 2}')
    (checkpoint / "global_step2").touch()
    for name in ("scheduler.pt", "rng_state.pth"):
        torch.save({}, checkpoint / name)
    args = VanillaTrainingArguments(tmp_path / "run", use_cpu=True)
    assert begin_run(args)[0] == str(checkpoint)
    path = tmp_path / "run" / folder / "tokenizer.json"
    for changed in (path.read_text().replace('"b":', '"x":'), path.read_text()[:-30], "[]"):
        path.write_text(changed)
        with pytest.raises(ValueError, match=r"tokenizer\.json differs from .*checkpoint-2.* Restore it"):
            begin_run(args)


@pytest.mark.parametrize(("column", "is_default"), [("label", True), ("stars", False)])
def test_columns_of_earlier_defaults_may_be_found_instead(tmp_path, options, column, is_default):
    begin(tmp_path, {**options, "label_column": column})
    (tmp_path / "config.json").write_text("{}")
    refused = pytest.raises(ValueError, match="`label_column` is None, not the 'stars'")
    with nullcontext() if is_default else refused:
        begin(tmp_path, {**options, "label_column": None})


@pytest.mark.parametrize(
    "broken", [b"", b"{", b"null", b"3", b"[]", b"\xff\xfe"], ids=["empty", "half", "null", "number", "list", "binary"]
)
def test_broken_options_file_is_named_and_can_be_removed(tmp_path, options, broken):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "_run_options.json").write_bytes(broken)
    with pytest.raises(ValueError, match=r"_run_options\.json must hold .* Remove it .* or give another `output_dir`"):
        begin(tmp_path, options)
    assert (tmp_path / "_run_options.json").read_bytes() == broken
    (tmp_path / "_run_options.json").unlink()
    begin(tmp_path, options)
    with pytest.raises(ValueError, match="`hidden_size` is 24"):
        begin(tmp_path, {**options, "hidden_size": 24})


def trainer(folder, weight, more_words=0):
    config = VanillaBertConfig(
        vocab_size=9 + more_words, hidden_size=8, num_hidden_layers=1, num_attention_heads=4, intermediate_size=12
    )
    model = VanillaBertForSequenceClassification(config)
    torch.nn.init.constant_(model.classifier.weight, weight)
    tokenizer = train_wordpiece_tokenizer(["a b c d"] * 9, 9, show_progress=False)
    tokenizer.add_tokens([f"word{number}" for number in range(more_words)])
    rows = Dataset.from_dict({"input_ids": [[2, 5, 3]], "labels": [0]})
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])
    return Trainer(model, args, train_dataset=rows, processing_class=tokenizer)


@pytest.fixture
def small_files():
    """Return a context in which no file grows beyond a number of bytes, which fails as a full disk does."""
    resource = pytest.importorskip("resource", reason="needs limits of Unix")

    @contextmanager
    def limited(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.promise("disk full")
def test_full_disk_keeps_the_earlier_model(tmp_path, small_files, capsys):
    def save(weight):
        saving = trainer(tmp_path, weight, more_words=300)  # so that the tokenizer is the largest file
        saving.state.log_history = [{"loss": weight}] * 50
        save_metrics(saving, "train", {"loss": weight, "notes": "long " * 50})
        save_final_model(saving)

    save(1.0)
    before = files_in(tmp_path)
    assert {"model.safetensors", "config.json", "tokenizer.json", "trainer_state.json"} <= before.keys()
    metrics = [name for name in before if name.endswith("_results.json")]
    stopped = (metrics[0], "config.json", "model.safetensors", "packing.py", "tokenizer.json")
    assert sorted(stopped, key=lambda name: len(before[name])) == list(stopped)
    for name in stopped:
        with small_files(len(before[name]) - 1):
            assert run(lambda: save(2.0)) == 1
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert re.search("File too large|could not be written", line), line
        after = files_in(tmp_path)
        for each in metrics:  # saved before the model
            assert after.pop(each) == before[each] or b"2.0" in (tmp_path / each).read_bytes()
        assert after == {each: content for each, content in before.items() if each not in metrics}
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"old")
    save(2.0)
    assert files_in(tmp_path).keys() == before.keys()
    loaded = VanillaBertForSequenceClassification.from_pretrained(tmp_path)
    assert (loaded.classifier.weight == 2.0).all()
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == json.loads(before["config.json"])["vocab_size"] == 309


def test_broken_files_of_an_earlier_crash_do_no_harm(tmp_path):
    saving = trainer(tmp_path, 1.0)
    save_final_model(saving)
    for name in ("trainer_state.json", "all_results.json"):
        (tmp_path / name).write_text('{"global_step": 7, "lo')
    assert begin_run(saving.args) == (None, False)
    save_metrics(saving, "eval", {"eval_loss": 0.5})
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"eval_loss": 0.5}


@pytest.mark.parametrize("length", [{"max_steps": 3}, {"num_train_epochs": 1}], ids=["updates", "epochs"])
@pytest.mark.parametrize("trainer_class", [Seq2SeqTrainer, VanillaTrainer])
def test_run_with_all_updates_trains_no_more(tmp_path, trainer_class, length):
    def start(**changes):
        arguments = VanillaTrainingArguments(
            tmp_path,
            save_steps=1,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            per_device_train_batch_size=4,
            **{**length, **changes},
        )
        model = tiny_model()
        return trainer_class(model, arguments, tiny_collator(model), train_dataset=tiny_pairs(12))

    first = start()
    train_to_end(first)
    checkpoint = last_complete_checkpoint(tmp_path)
    assert checkpoint.endswith("checkpoint-3")
    first.save_state()
    assert not is_finished(first.args)  # its model is not saved yet

    again = start()
    train_to_end(again, checkpoint)
    assert again.state.global_step == 3
    for name, weight in weights_of(first).items():
        assert torch.equal(weights_of(again)[name], weight), name
    save_final_model(again)
    again.save_state()
    assert is_finished(again.args)
    assert begin_run(again.args) == (checkpoint, True)
    (tmp_path / "_saving").mkdir()
    assert not is_finished(again.args)  # killed while a later model was moved there
    (tmp_path / "_saving").rmdir()

    longer = start(max_steps=5)
    assert begin_run(longer.args) == (checkpoint, False)
    train_to_end(longer, checkpoint)
    assert longer.state.global_step == 5
    assert not is_finished(longer.args)  # the saved model is that of the third update


def begin_and_train(folder, stop=None, **options):
    """Train as a script does, until an error after an update if that is given; return the trainer."""

    class Interrupt(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == stop:
                raise KeyError("interrupted")

    settings = {"max_steps": 6, "save_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    arguments = VanillaTrainingArguments(folder, **settings, **options)
    checkpoint, finished = begin_run(arguments)
    model = tiny_model()
    trainer = VanillaTrainer(
        model, arguments, tiny_collator(model), train_dataset=tiny_pairs(12), callbacks=[Interrupt()]
    )
    if not finished:
        with nullcontext() if stop is None else pytest.raises(KeyError, match="interrupted"):
            train_to_end(trainer, checkpoint)
    if stop is None and not finished:
        save_final_model(trainer)
    return trainer


def steps_in(folder):
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


def test_checkpoints_of_an_earlier_attempt_are_set_aside(tmp_path, caplog):
    earlier = tmp_path / "_run_earlier" / "1"
    begin_and_train(tmp_path, 5, save_only_model=True)
    begin_and_train(tmp_path, 3)  # from the start
    assert (steps_in(tmp_path), steps_in(earlier)) == ([2], [2, 4])
    assert f"Moved to {earlier}, as the run does not continue from them: checkpoint-2, che" in caplog.text
    begin_and_train(tmp_path)
    assert (steps_in(tmp_path), steps_in(earlier)) == ([2, 4, 6], [2, 4])
    begin_and_train(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    begin_and_train(tmp_path, resume_from_checkpoint=str(tmp_path / "_run_earlier" / "2" / "checkpoint-4"))
    assert [steps_in(tmp_path / "_run_earlier" / name) for name in "123"] == [[2, 4], [4, 6], [2, 4, 6]]


@pytest.mark.parametrize("other", [False, True], ids=["own", "of another run"])
def test_run_returns_to_a_checkpoint_once(tmp_path, other):
    begin_and_train(tmp_path / "first")
    run = tmp_path / ("second" if other else "first")
    options = {"resume_from_checkpoint": str(tmp_path / "first" / "checkpoint-2"), "save_total_limit": 1}
    begin_and_train(run, 5, **options)
    assert steps_in(run) == [4]  # the earlier run's are moved or elsewhere
    assert not is_finished(VanillaTrainingArguments(run, max_steps=6, use_cpu=True))
    shutil.rmtree(tmp_path / "first" / "checkpoint-2", ignore_errors=True)
    assert begin_and_train(run, **options).state.global_step == 6
    assert begin_run(VanillaTrainingArguments(run, max_steps=6, use_cpu=True, **options))[1]


def test_fractions_of_epochs_are_counted(tmp_path):
    TrainerState(epoch=1 + 2 / 3).save_to_json(str(tmp_path / "trainer_state.json"))  # below 5 / 3, as rounded
    (tmp_path / "model.safetensors").touch()
    assert is_finished(VanillaTrainingArguments(tmp_path, num_train_epochs=5 / 3, use_cpu=True))
    assert not is_finished(VanillaTrainingArguments(tmp_path, num_train_epochs=1.7, use_cpu=True))


def test_no_updates_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`max_steps` must be at least 1 update, or -1 .* got 0"):
        VanillaTrainingArguments(tmp_path, max_steps=0, use_cpu=True)


def test_finished_run_loads_the_best_checkpoint(tmp_path):
    def start():
        arguments = VanillaTrainingArguments(
            tmp_path,
            max_steps=4,
            save_steps=1,
            eval_steps=1,
            eval_strategy="steps",
            load_best_model_at_end=True,
            greater_is_better=True,  # the first one, then
            learning_rate=0.1,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        model, pairs = tiny_model(), tiny_pairs(12)
        return Seq2SeqTrainer(model, arguments, tiny_collator(model), train_dataset=pairs, eval_dataset=pairs)

    first = start()
    train_to_end(first)
    again = start()
    train_to_end(again, last_complete_checkpoint(tmp_path))
    assert again.state.best_model_checkpoint != last_complete_checkpoint(tmp_path)
    for name, weight in weights_of(first).items():
        assert torch.equal(weights_of(again)[name], weight), name


def test_run_that_has_moved_keeps_its_best_checkpoint(tmp_path):
    def start(folder, max_steps):
        arguments = VanillaTrainingArguments(
            folder,
            max_steps=max_steps,
            save_steps=1,
            save_total_limit=2,  # the best one and the last one
            eval_steps=1,
            eval_strategy="steps",
            load_best_model_at_end=True,
            greater_is_better=True,  # the first one, then
            learning_rate=1e-3,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        model, pairs = tiny_model(), tiny_pairs(12)
        return VanillaTrainer(model, arguments, tiny_collator(model), train_dataset=pairs, eval_dataset=pairs)

    first = start(tmp_path / "run", 3)
    train_to_end(first)
    assert first.state.best_global_step == 1
    folder = (tmp_path / "run").rename(tmp_path / "moved")
    shutil.copytree(folder / "checkpoint-3", tmp_path / "run" / "checkpoint-1")  # another run, in its former place
    for max_steps in (3, 5):
        again = start(folder, max_steps)
        train_to_end(again, last_complete_checkpoint(folder))
        for name, weight in weights_of(first).items():
            assert torch.equal(weights_of(again)[name], weight), name
    assert again.state.best_model_checkpoint == str(folder / "checkpoint-1")
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-5"]


def test_finished_run_without_checkpoints_is_not_repeated(tmp_path):
    arguments = VanillaTrainingArguments(
        tmp_path, max_steps=1, save_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True
    )
    model = tiny_model()
    trainer = Seq2SeqTrainer(model, arguments, tiny_collator(model), train_dataset=tiny_pairs(12))
    assert begin_run(arguments) == (None, False)
    train_to_end(trainer)
    save_final_model(trainer)
    trainer.save_state()
    assert begin_run(arguments) == (None, True)
    arguments.seed += 1
    with pytest.raises(ValueError, match="`seed` is 43, not the 42"):
        begin_run(arguments)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hold_folder", lock_run_folder),
        ("keep_options", check_and_save_options),
        ("told_how_to_go_on", resume_hint_on_interrupt),
    ],
)
def test_old_names_warn(old, new):
    with pytest.warns(FutureWarning, match=f"`{old}` is now called `{new.__name__}`; .* removed in 0.3"):
        assert getattr(training, old) is new
