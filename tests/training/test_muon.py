import copy
import pathlib

import pytest
import torch
from tiny_translation import tiny_collator, tiny_model, tiny_pairs

from hf_vanilla.training import (
    FinetuningArguments,
    MuonWithAdamW,
    VanillaTrainer,
    VanillaTrainingArguments,
    VerifiedCheckpointTrainer,
)


def make_trainer(folder, model, **changes):
    options = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "muon": True}
    options |= {"max_steps": 6, "learning_rate": 0.01, "weight_decay": 0.1, "lr_scheduler_type": "linear", **changes}
    arguments = VanillaTrainingArguments(str(folder), max_tokens_per_batch=40, **options)
    return VanillaTrainer(model, arguments, tiny_collator(tiny_model()), train_dataset=tiny_pairs())


def test_layers_are_updated_by_muon_and_the_rest_by_adamw(tmp_path):
    model = tiny_model()
    expected = copy.deepcopy(model)
    optimizer = make_trainer(tmp_path, model).create_optimizer()
    matrices = {
        name: weight for name, weight in expected.named_parameters() if ".layers." in name and weight.dim() == 2
    }
    others = [weight for name, weight in expected.named_parameters() if name not in matrices]
    assert matrices
    assert others
    decayed = [weight for weight in others if weight.dim() == 2]
    vectors = [weight for weight in others if weight.dim() == 1]
    muon = torch.optim.Muon(matrices.values(), 0.02, 0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}], 0.01)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for ours, plain in zip(model.parameters(), expected.parameters(), strict=True):
            ours.grad = torch.randn(ours.shape, generator=generator)
            plain.grad = ours.grad.clone()
        optimizer.step()
        muon.step()
        adamw.step()
    for ours, plain in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_resumed_run_has_the_same_weights(tmp_path):
    weights = []
    for folder, steps in ((tmp_path / "a", None), (tmp_path / "b", 3)):
        torch.manual_seed(1)
        trainer = make_trainer(folder, tiny_model(), save_strategy="steps", save_steps=3)
        trainer.train()
        if steps:
            torch.manual_seed(9)
            trainer = make_trainer(folder, tiny_model(), save_strategy="steps", save_steps=3)
            trainer.train(resume_from_checkpoint=str(pathlib.Path(folder) / f"checkpoint-{steps}"))
        assert trainer.state.global_step == 6
        weights.append(trainer.model.state_dict())
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [("polynomial", {}), ("cosine_with_min_lr", {"min_lr": 0.001}), ("inverse_sqrt", {})],
    ids=["polynomial", "minimum", "paper"],
)
def test_schedules_keep_the_rates_of_matrices_and_all_else_apart(tmp_path, schedule, settings):
    options = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": settings, "warmup_steps": 2}
    trainer = make_trainer(tmp_path, tiny_model(), **options)
    trainer.create_optimizer_and_scheduler(6)
    logged = []
    for _ in range(6):
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        decayed, vectors, matrices = (group["lr"] for group in trainer.optimizer.param_groups)
        assert decayed == vectors == matrices / 2
        logged.append(decayed)
    assert logged[1] > logged[-1] == pytest.approx(settings.get("min_lr", logged[-1]))


def test_copy_of_the_optimizer_updates_the_copied_model(tmp_path):
    model = tiny_model()
    pair = model, make_trainer(tmp_path, model).create_optimizer()
    for each, optimizer in (pair, copied := copy.deepcopy(pair)):
        for step in (1, 2):
            for weight in each.parameters():
                weight.grad = torch.full_like(weight, step)
            optimizer.step()
    for ours, theirs in zip(model.parameters(), copied[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_more_parameters_are_refused(tmp_path):
    optimizer = make_trainer(tmp_path, tiny_model()).create_optimizer()
    with pytest.raises(ValueError, match="can't be added to a `MuonWithAdamW`; make one of all of them"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


def test_fine_tuning_has_the_option_too(tmp_path):
    arguments = FinetuningArguments(str(tmp_path), muon=True, report_to="none")
    assert isinstance(VerifiedCheckpointTrainer(tiny_model(), arguments).create_optimizer(), MuonWithAdamW)


@pytest.mark.parametrize("muon", [True, False])
def test_checkpoint_of_the_other_optimizer_is_refused(tmp_path, muon):
    make_trainer(tmp_path, tiny_model(), muon=not muon, save_strategy="steps", save_steps=3, max_steps=3).train()
    with pytest.raises(ValueError, match=r"can't continue from .*checkpoint-3.* Give `muon` as the run that saved it"):
        make_trainer(tmp_path, tiny_model(), muon=muon).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_checkpoint_of_other_parameters_is_refused(tmp_path):
    make_trainer(tmp_path, tiny_model(), save_strategy="steps", save_steps=3, max_steps=3).train()
    model = tiny_model()
    model.get_input_embeddings().weight.requires_grad = False
    with pytest.raises(ValueError, match=r"checkpoint-3: .*group\. Train the same parameters as the run"):
        make_trainer(tmp_path, model).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_closure_gives_its_loss(tmp_path):
    model = tiny_model()
    optimizer = make_trainer(tmp_path, model).create_optimizer()

    def closure():
        loss = sum(weight.square().sum() for weight in model.parameters())
        loss.backward()
        return loss

    assert optimizer.step(closure) > sum(weight.square().sum() for weight in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": "adafactor"}, "`optim` must be adamw_torch or adamw_torch_fused with `muon`, got adafactor"),
        ({"fsdp": "full_shard"}, "`muon` needs whole parameters; leave it out with `fsdp`"),
    ],
    ids=["optim", "fsdp"],
)
def test_other_optimizers_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, tiny_model(), **changes)


def test_given_optimizer_is_refused(tmp_path):
    model = tiny_model()
    given = torch.optim.SGD(model.parameters()), None
    with pytest.raises(ValueError, match="`optimizers` must not be given with `muon`"):
        VanillaTrainer(model, VanillaTrainingArguments(str(tmp_path), muon=True, use_cpu=True), optimizers=given)


def test_frozen_layers_are_refused(tmp_path):
    model = tiny_model()
    for name, weight in model.named_parameters():
        weight.requires_grad = ".layers." not in name
    with pytest.raises(ValueError, match="no matrix of a layer is trained"):
        make_trainer(tmp_path, model).create_optimizer()
