"""The search over settings: the whole grid with all seeds, ranked, interrupted and resumed."""

import itertools
import os

import pytest
from datasets import Dataset
from transformers import Trainer

from hf_vanilla import VanillaBertConfig, VanillaBertForSequenceClassification
from hf_vanilla.metrics import ClassificationMetrics
from hf_vanilla.training import FinetuningArguments, FinetuningTask, search_settings


GRID = {"per_device_train_batch_size": (4, 8), "learning_rate": (1e-2, 1e-9)}
ROWS = Dataset.from_dict(
    {"input_ids": [[2, 5 + n % 4, 6, 3] for n in range(16)], "labels": [n % 2 for n in range(16)]}
)


def bert():
    config = VanillaBertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=4, intermediate_size=12,
        initializer_range=0.3,
    )  # fmt: skip
    return VanillaBertForSequenceClassification(config)


@pytest.fixture
def args(tmp_path):
    return FinetuningArguments(
        output_dir=str(tmp_path / "run"), num_train_epochs=20, use_cpu=True, disable_tqdm=True, report_to=[]
    )


def task(trained, stop_after=99, main_score="accuracy"):
    """A task whose trainers record their settings, and can stop like with Ctrl-C."""

    class Recorder(Trainer):
        def train(self, *arguments, **options):
            if len(trained) == stop_after:
                raise KeyboardInterrupt
            result = super().train(*arguments, **options)
            trained.append((self.args.per_device_train_batch_size, self.args.learning_rate, self.args.seed))
            return result

    def make_trainer(args):
        metrics = ClassificationMetrics("single_label_classification")
        return Recorder(args=args, model_init=bert, train_dataset=ROWS, compute_metrics=metrics)

    return FinetuningTask(make_trainer, {"validation": ROWS}, main_score)


ALL = sorted(itertools.product(*GRID.values(), (1, 2, 3)))


def test_search_trains_every_setting_with_every_seed(tmp_path, args):
    trained = []
    ranking = search_settings(task(trained), args, [1, 2, 3], tmp_path / "journal", grid=GRID)
    assert sorted(trained) == ALL
    assert [each["learning_rate"] for each in ranking] == [1e-2, 1e-2, 1e-9, 1e-9]
    for each in ranking:
        scores = sorted(each["scores"].values())
        assert (each["worst"], each["median"], each["best"]) == tuple(scores)
        assert list(each["scores"]) == ["1", "2", "3"]
    assert ranking[0]["median"] >= ranking[1]["median"] > ranking[2]["median"]
    assert not list((tmp_path / "run").glob("**/*.safetensors"))


def test_search_gives_the_score_of_a_single_training(tmp_path, args):
    args.num_train_epochs, grid = 2, {"learning_rate": [1e-2]}
    [found] = search_settings(task([], main_score="loss"), args, [6, 7], tmp_path / "journal", grid=grid)
    args.learning_rate = 1e-2
    for seed in (6, 7):
        args.seed = seed
        trainer = task([]).make_trainer(args)
        trainer.train()
        assert trainer.evaluate(ROWS)["eval_loss"] == found["scores"][str(seed)]


def test_search_resumes(tmp_path, args):
    first, second = [], []
    with pytest.raises(KeyboardInterrupt):
        search_settings(task(first, stop_after=5), args, [1, 2, 3], tmp_path / "journal", grid=GRID)
    ranking = search_settings(task(second), args, [1, 2, 3], tmp_path / "journal", grid=GRID)
    assert len(first) == 5
    assert sorted(first + second) == ALL
    third = []
    assert search_settings(task(third), args, [1, 2, 3], tmp_path / "journal", grid=GRID) == ranking
    assert third == []
    search_settings(task(third), args, [1], tmp_path / "journal", grid=GRID, study_name="another")
    assert len(third) == 4


def test_search_resumes_with_an_incomplete_line_in_the_journal(tmp_path, args):
    """Twice, because later lines must not follow the incomplete one."""
    first, rest = [], []
    with pytest.raises(KeyboardInterrupt):
        search_settings(task(first, stop_after=3), args, [1, 2], tmp_path / "journal", grid=GRID)
    with (tmp_path / "journal").open("a") as file:
        file.write('{"op_code":6,"worker_id":"7-7","trial_')
    with pytest.raises(KeyboardInterrupt):
        search_settings(task(rest, stop_after=2), args, [1, 2], tmp_path / "journal", grid=GRID)
    last = []
    ranking = search_settings(task(last), args, [1, 2], tmp_path / "journal", grid=GRID)
    assert sorted(first + rest + last) == sorted(itertools.product(*GRID.values(), (1, 2)))
    assert [sorted(each["scores"]) for each in ranking] == [["1", "2"]] * 4


def test_search_resumes_after_one_that_was_killed_with_the_lock(tmp_path, args, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("runs/journal", tmp_path / "journal.lock")  # as an earlier version with the journal runs/journal
    args.num_train_epochs, trained = 1, []
    search_settings(task(trained), args, [1], "journal", grid={"learning_rate": [1e-2]})
    assert len(trained) == 1
    assert not os.path.lexists("journal.lock")


def test_search_refuses_evaluations_before_the_end(tmp_path, args):
    args.eval_strategy, args.num_train_epochs = "epoch", 1
    with pytest.raises(ValueError, match="`eval_strategy` must be no in a search, .* got epoch"):
        search_settings(task([]), args, [1], tmp_path / "journal", grid={"learning_rate": [1e-2]})


@pytest.mark.parametrize("main_score", ["accuracy", "loss"])
def test_diverging_settings_rank_last(tmp_path, args, caplog, main_score):
    trained, grid = [], {"learning_rate": [1e38, 1e-2]}
    given = task(trained, main_score=main_score), args, [1, 2], tmp_path / "journal"
    best, last = ranking = search_settings(*given, grid=grid)
    assert best["learning_rate"] == 1e-2
    nothing = dict.fromkeys(("median", "best", "worst"))
    assert last == {"learning_rate": 1e38, **nothing, "scores": {"1": None, "2": None}}
    assert "The gradient is nan" in caplog.text
    assert "Lower the learning rate (1e+38)" in caplog.text
    assert search_settings(*given, grid=grid) == ranking
    assert [rate for _, rate, _ in trained] == [1e-2, 1e-2]


def test_search_ranks_the_lowest_loss_first(tmp_path, args):
    ranking = search_settings(task([], main_score="loss"), args, [1, 2, 3], tmp_path / "journal", grid=GRID)
    medians = [each["median"] for each in ranking]
    assert medians == sorted(medians)
    assert ranking[0]["best"] <= ranking[0]["median"] <= ranking[0]["worst"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": {"lerning_rate": [1.0]}}, "`grid` must name training arguments, .* 'lerning_rate'"),
        ({"grid": {"learning_rate": []}}, "at least one value for 'learning_rate'"),
        ({"seeds": []}, "at least one seed"),
        ({"task": task([], main_score="f2")}, "`main_score` must be one of .*accuracy.*; got 'f2'"),
    ],
    ids=["name", "values", "seeds", "score"],
)
def test_bad_search_raises(tmp_path, args, options, message):
    given = {"task": task([]), "seeds": [1], "grid": GRID, **options}
    with pytest.raises(ValueError, match=message):
        search_settings(given["task"], args, given["seeds"], tmp_path / "journal", grid=given["grid"])
