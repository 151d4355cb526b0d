"""Fine-tuning with several seeds: scores, resuming, reports."""

import json

import pytest
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from hf_vanilla import VanillaBertConfig, VanillaBertForSequenceClassification
from hf_vanilla.training import (
    FinetuningArguments,
    FinetuningTask,
    command_of_process,
    seeds_report,
    summarise_seeds,
    train_with_seeds,
)
from hf_vanilla.training.finetuning import FewUpdatesWarning


RESULTS = {
    "1": {"validation": {"accuracy": 0.5, "loss": 0.3}},
    "2": {"validation": {"accuracy": 0.9, "loss": 0.1}},
    "3": {"validation": {"accuracy": 0.6, "loss": 0.7}},
}


def test_summary_has_median_best_and_worst():
    assert summarise_seeds(RESULTS, "accuracy") == {"validation": {"median": 0.6, "best": 0.9, "worst": 0.5}}
    assert summarise_seeds(RESULTS, "loss") == {"validation": {"median": 0.3, "best": 0.1, "worst": 0.7}}
    assert seeds_report(RESULTS, "accuracy")["seeds"] == RESULTS


def test_bad_input_raises():
    with pytest.raises(ValueError, match="`main_score` must be one of accuracy, loss; got 'f1'"):
        summarise_seeds(RESULTS, "f1")
    with pytest.raises(ValueError, match="`output_dir` is missing"):
        FinetuningArguments()


def test_defaults_are_in_the_paper_s_grid(tmp_path):
    args = FinetuningArguments(output_dir=str(tmp_path))
    assert args.per_device_train_batch_size in (16, 32)
    assert args.learning_rate in (5e-5, 3e-5, 2e-5)
    assert args.num_train_epochs in (2, 3, 4)


def test_few_updates_are_warned_of_once(tmp_path, caplog):
    args = FinetuningArguments(output_dir=str(tmp_path))
    for updates in (100, 21, 21):
        FewUpdatesWarning().on_train_begin(args, TrainerState(max_steps=updates), TrainerControl())
    (message,) = caplog.messages
    assert message.startswith("This fine-tuning has 21 updates, which are usually too few")
    assert "--num_train_epochs" in message


ROWS = Dataset.from_dict({"input_ids": [[2, 5 + n % 4, 3] for n in range(12)], "labels": [n % 2 for n in range(12)]})


def bert():
    config = VanillaBertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=4, intermediate_size=12
    )
    return VanillaBertForSequenceClassification(config)


class Steps(TrainerCallback):
    """Records the steps of each seed, and stops at one of them like Ctrl-C."""

    def __init__(self, stop_at=None):
        self.taken = []
        self.stop_at = stop_at

    def on_step_end(self, args, state, control, **kwargs):
        self.taken.append((args.seed, state.global_step))
        if self.taken[-1] == self.stop_at:
            raise KeyboardInterrupt


def arguments(folder, **options):
    given = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "save_strategy": "epoch", **options}
    return FinetuningArguments(output_dir=str(folder), use_cpu=True, disable_tqdm=True, report_to=[], **given)


def train(folder, steps, seeds=(1, 2, 3), task_options=None, **options):
    def make_trainer(args):
        return Trainer(args=args, model_init=bert, train_dataset=ROWS, callbacks=[steps])

    task = FinetuningTask(make_trainer, {"validation": ROWS}, "loss")
    return train_with_seeds(task, arguments(folder, **options), seeds, task_options)


def test_finished_seeds_keep_their_scores_and_others_resume(tmp_path):
    expected = train(tmp_path / "whole", whole := Steps())
    assert whole.taken == [(seed, step) for seed in (1, 2, 3) for step in range(1, 7)]
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", Steps(stop_at=(2, 5)), task_options={"max_length": 7})
    assert json.loads((tmp_path / "run" / "seed-1" / "scores.json").read_text()) == expected["1"]
    assert not (tmp_path / "run" / "seed-2" / "scores.json").exists()
    found = train(tmp_path / "run", rest := Steps(), task_options={"max_length": 7}, logging_steps=2)
    assert rest.taken == [(2, step) for step in (4, 5, 6)] + [(3, step) for step in range(1, 7)]
    assert found == expected
    train(tmp_path / "run", more := Steps(), seeds=(1, 7), task_options={"max_length": 7})
    assert {seed for seed, _ in more.taken} == {7}


def test_diverging_fine_tuning_stops_before_it_is_saved_or_scored(tmp_path):
    with pytest.raises(
        ValueError, match="The gradient is nan or infinite at step .; .* the learning rate [(]1e[+]38[)]"
    ):
        train(tmp_path, Steps(), learning_rate=1e38, logging_steps=6, save_strategy="no")
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".json")]


BROKEN_SCORES = [b"[]", b"null", b"{}", b'{"validation": {}}', b'{"validation": {"loss": NaN}}', b"NaN", b"", b"\xff"]


@pytest.mark.parametrize("broken", BROKEN_SCORES)
def test_seed_with_broken_scores_is_trained_again(tmp_path, caplog, broken):
    options = {"seeds": (1, 2), "task_options": {"max_length": 7}, "save_strategy": "no"}
    expected = train(tmp_path, Steps(), **options)
    scores = tmp_path / "seed-2" / "scores.json"
    scores.write_bytes(broken)
    assert train(tmp_path, again := Steps(), **options) == expected
    assert again.taken == [(2, step) for step in range(1, 7)]
    assert f"Ignored {scores}: it lacks loss for an evaluation set. The seed is trained again." in caplog.messages
    assert json.loads(scores.read_text()) == expected["2"]


def test_changed_options_are_refused_before_any_training(tmp_path):
    train(tmp_path, Steps(), seeds=(2,), task_options={"max_length": 7})
    for name, options in (
        ("max_length", {"task_options": {"max_length": 8}}),
        ("learning_rate", {"task_options": {"max_length": 7}, "learning_rate": 0.5}),
    ):
        with pytest.raises(ValueError, match=f"`{name}` is .*seed-2 was started with"):
            train(tmp_path, steps := Steps(), **options)
        assert steps.taken == []


@pytest.mark.parametrize("words", [["--hub_token", "hf_x"], ["--hub-token=hf_x"], ["--hub_token=hf_x\n"]], ids=str)
def test_command_has_no_token(monkeypatch, words):
    command = ["train.py", "--seed", "1", *words, "--bf16"]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python3", *command])
    shown = command_of_process()
    assert shown.startswith("python train.py --seed 1 --hub")
    assert shown.endswith("... --bf16")
    assert "hf_x" not in shown


def test_command_is_hf_vanilla_if_that_has_started_it(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/lib/hf_vanilla/scripts/sweep.py", "--seeds", "1"])
    monkeypatch.setattr("sys.orig_argv", ["python3", "/bin/hf-vanilla", "sweep", "classification", "--seeds", "1"])
    assert command_of_process() == "hf-vanilla sweep classification --seeds 1"
