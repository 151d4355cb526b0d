"""A stock trainer with `StopOnNaNCallback`: when it stops, and what is saved by then."""

import math
import os
from types import SimpleNamespace

import pytest
import torch
from tiny_translation import Poison, tiny_collator, tiny_model, tiny_pairs
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerControl, TrainerState

from hf_vanilla.training import StopOnNaNCallback, check_finite_weights, save_final_model


def stock_trainer(folder, poisoned_step, **changes):
    quiet = {"use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "report_to": []}
    arguments = Seq2SeqTrainingArguments(
        str(folder), **{**quiet, "max_steps": 6, "logging_strategy": "no", "save_strategy": "no", **changes}
    )
    model = tiny_model()
    return Seq2SeqTrainer(
        model,
        arguments,
        tiny_collator(model),
        train_dataset=tiny_pairs(),
        eval_dataset=tiny_pairs(8),
        callbacks=[Poison(poisoned_step), StopOnNaNCallback()],
    )


LOGGED = {"logging_strategy": "steps", "logging_steps": 2}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
CASES = {
    "loss": (3, {**LOGGED, "logging_nan_inf_filter": False}, "The training loss is nan at step 4 ", []),
    "gradient norm": (3, LOGGED, "The gradient norm is nan at step 4 ", []),
    "steps": (4, {"save_strategy": "steps", "save_steps": 2}, "hold nan or infinity at step 4", ["checkpoint-2"]),
    "epoch": (5, {"save_strategy": "epoch"}, "hold nan or infinity at step 6", []),
    "best": (1, {"save_strategy": "best", **EVALUATED}, "hold nan or infinity at step 2", []),
    "end": (3, {}, "hold nan or infinity at step 6", []),
}


@pytest.mark.promise("NaN")
@pytest.mark.parametrize(("poisoned_step", "changes", "message", "saved"), CASES.values(), ids=CASES)
def test_stock_trainer_stops_before_it_saves(tmp_path, poisoned_step, changes, message, saved):
    best = {"metric_for_best_model": "loss"} if changes.get("save_strategy") == "best" else {}
    trainer = stock_trainer(tmp_path, poisoned_step, **changes, **best)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert os.listdir(tmp_path) == saved


def test_finite_training_is_not_stopped(tmp_path):
    saving = {**LOGGED, **EVALUATED, "save_strategy": "steps", "save_steps": 3}
    stock_trainer(tmp_path, poisoned_step=99, **saving).train()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-3", "checkpoint-6"]


def test_infinite_gradients_are_accepted_with_loss_scaling(tmp_path):
    trainer = stock_trainer(tmp_path, poisoned_step=99)
    log = (trainer.args, TrainerState(), TrainerControl(), {"loss": 2.5, "grad_norm": math.inf})
    StopOnNaNCallback().on_log(*log, optimizer=SimpleNamespace(scaler="a GradScaler"))
    with pytest.raises(ValueError, match="The gradient norm is inf at step 0"):
        StopOnNaNCallback().on_log(*log, optimizer=SimpleNamespace(scaler=None))


@pytest.mark.promise("NaN")
def test_final_model_with_nan_is_not_saved(tmp_path):
    trainer = stock_trainer(tmp_path, poisoned_step=99)
    name, weight = list(trainer.model.named_parameters())[-1]
    weight.data.view(-1)[-1] = -math.inf
    with pytest.raises(ValueError, match=f"The weights `{name}` hold nan or infinity at step 0.*, in a new run"):
        save_final_model(trainer)
    assert not os.listdir(tmp_path)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a second device")
def test_weights_on_several_devices_are_checked():
    model = torch.nn.ModuleDict({"near": torch.nn.Linear(2, 3), "far": torch.nn.Linear(3, 5)})
    model["far"].to(torch.accelerator.current_accelerator())
    check_finite_weights(model, 7)
    model["far"].bias.data[4] = math.inf
    with pytest.raises(ValueError, match=r"`far\.bias` hold nan or infinity at step 7"):
        check_finite_weights(model, 7)
