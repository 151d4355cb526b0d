import pytest
from tiny_translation import tiny_collator, tiny_model, tiny_pairs, tiny_tokenizer

from hf_vanilla.training import (
    FinetuningArguments,
    VanillaTrainer,
    VanillaTrainingArguments,
    is_finished,
    save_final_model,
    train_to_end,
)


def arguments(folder, **changes):
    options = dict(
        max_steps=20, eval_strategy="steps", eval_steps=1, early_stopping_patience=2, use_cpu=True, disable_tqdm=True,
        report_to="none", per_device_train_batch_size=9, learning_rate=1e-30, dataloader_pin_memory=False,
    )  # fmt: skip
    return VanillaTrainingArguments(str(folder), **{**options, **changes})


def trained(args, checkpoint=None):
    model = tiny_model()
    trainer = VanillaTrainer(
        model, args, tiny_collator(model), train_dataset=tiny_pairs(), eval_dataset=tiny_pairs(9, seed=6),
        processing_class=tiny_tokenizer(),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def test_a_run_without_progress_stops_and_is_finished(tmp_path):
    args = arguments(tmp_path)
    trainer = trained(args)
    assert trainer.state.global_step == 3  # the first evaluation is the best; two more in vain
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    save_final_model(trainer)
    assert is_finished(args)
    assert not is_finished(arguments(tmp_path, max_steps=30))  # a longer run
    assert not is_finished(arguments(tmp_path, early_stopping_patience=4))
    assert is_finished(arguments(tmp_path, early_stopping_patience=1))
    patient = trained(arguments(tmp_path, early_stopping_patience=4), str(tmp_path / "checkpoint-3"))
    assert patient.state.global_step == 5


def test_a_resumed_run_has_the_patience_that_was_left(tmp_path):
    trained(arguments(tmp_path))
    trainer = trained(arguments(tmp_path), str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 3


def test_a_run_killed_before_its_final_model_trains_no_more(tmp_path):
    trained(arguments(tmp_path))
    model = tiny_model()
    trainer = VanillaTrainer(
        model,
        arguments(tmp_path),
        tiny_collator(model),
        train_dataset=tiny_pairs(),
        eval_dataset=tiny_pairs(9, seed=6),
    )
    train_to_end(trainer, str(tmp_path / "checkpoint-3"))
    assert trainer.state.global_step == 3


def test_patience_can_be_added_to_a_run_and_new_intervals_count(tmp_path):
    trained(arguments(tmp_path, early_stopping_patience=0, max_steps=4, save_steps=2))
    options = dict(max_steps=12, eval_steps=3, early_stopping_patience=1)
    trainer = trained(arguments(tmp_path, **options), str(tmp_path / "checkpoint-4"))
    assert trainer.state.global_step == 9  # evaluated at 6, the best, and in vain at 9
    assert (tmp_path / "checkpoint-9" / "model.safetensors").is_file()


def test_progress_resets_the_patience(tmp_path):
    trainer = trained(
        arguments(tmp_path, learning_rate=1e-2, max_steps=6, early_stopping_patience=1, save_total_limit=2)
    )
    assert trainer.state.global_step == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"early_stopping_patience": -1}, "`early_stopping_patience` must not be negative, got -1"),
        ({"eval_strategy": "no"}, r"`early_stopping_patience` \(2\) needs evaluations"),
    ],
)
@pytest.mark.parametrize("kind", [VanillaTrainingArguments, FinetuningArguments])
def test_bad_patience_is_named(kind, changes, message, tmp_path):
    options = {"early_stopping_patience": 2, "eval_strategy": "epoch", **changes}
    with pytest.raises(ValueError, match=message):
        kind(str(tmp_path), **options)


def test_a_lower_mse_is_better(tmp_path):
    options = {"early_stopping_patience": 2, "eval_strategy": "epoch"}
    assert FinetuningArguments(str(tmp_path), metric_for_best_model="eval_mse", **options).greater_is_better is False
    assert FinetuningArguments(str(tmp_path), metric_for_best_model="f1", **options).greater_is_better is True


def test_a_metric_that_is_not_measured_is_named(tmp_path):
    with pytest.raises(ValueError, match="`metric_for_best_model` .* 'eval_blue', .* available .*'eval_loss'"):
        trained(arguments(tmp_path, metric_for_best_model="blue"))
