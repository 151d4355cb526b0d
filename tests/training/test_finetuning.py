"""What is told of several seeds."""

import pytest
from transformers import TrainerControl, TrainerState
from transformers.utils import logging

from hf_vanilla.training import FinetuningArguments, seeds_report, summarise_seeds
from hf_vanilla.training.finetuning import FewUpdatesWarning


RESULTS = {
    "1": {"validation": {"accuracy": 0.5, "loss": 0.3}},
    "2": {"validation": {"accuracy": 0.9, "loss": 0.1}},
    "3": {"validation": {"accuracy": 0.6, "loss": 0.7}},
}


def test_median_best_and_worst():
    assert summarise_seeds(RESULTS, "accuracy") == {"validation": {"median": 0.6, "best": 0.9, "worst": 0.5}}
    assert summarise_seeds(RESULTS, "loss") == {"validation": {"median": 0.3, "best": 0.1, "worst": 0.7}}
    assert seeds_report(RESULTS, "accuracy")["seeds"] == RESULTS


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ValueError, match="`main_score` must be one of accuracy, loss; got 'f1'"):
        summarise_seeds(RESULTS, "f1")
    with pytest.raises(ValueError, match="`output_dir` is missing"):
        FinetuningArguments()


def test_defaults_are_in_the_grid_of_the_paper(tmp_path):
    args = FinetuningArguments(output_dir=str(tmp_path))
    assert args.per_device_train_batch_size in (16, 32)
    assert args.learning_rate in (5e-5, 3e-5, 2e-5)
    assert args.num_train_epochs in (2, 3, 4)


def test_a_fine_tuning_of_few_updates_is_told_of_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.get_logger("hf_vanilla"), "propagate", True)
    args = FinetuningArguments(output_dir=str(tmp_path))
    for updates in (100, 21, 21):
        FewUpdatesWarning().on_train_begin(args, TrainerState(max_steps=updates), TrainerControl())
    (told,) = caplog.messages
    assert told.startswith("This fine-tuning has 21 updates, which is mostly too few")
    assert "--num_train_epochs" in told
