import pytest
import torch
from tiny_translation import Recorder, tiny_collator, tiny_config, tiny_model, tiny_pairs, tiny_tokenizer
from transformers import MarianConfig, PreTrainedConfig, Seq2SeqTrainer, TrainerControl, TrainerState

from hf_vanilla.training import (
    VanillaTrainer,
    VanillaTrainingArguments,
    WarmupWarning,
    gpt_training_arguments,
    noam_learning_rate,
    paper_optimizers,
    paper_training_arguments,
)


WARMUP_STEPS = 7
NUM_STEPS = 60


def make_arguments(output_dir, **overrides):
    quiet = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False}
    defaults = {"warmup_steps": WARMUP_STEPS, "max_steps": NUM_STEPS, "logging_steps": 20, **quiet}
    return paper_training_arguments(tiny_config(), str(output_dir), **{**defaults, **overrides})


def make_trainer(kind, arguments, recorder):
    model = tiny_model()
    if kind == "vanilla":
        return VanillaTrainer(
            model, arguments, train_dataset=tiny_pairs(), processing_class=tiny_tokenizer(), callbacks=[recorder]
        )
    return Seq2SeqTrainer(
        model,
        arguments,
        data_collator=tiny_collator(model),
        train_dataset=tiny_pairs(),
        callbacks=[recorder],
        optimizers=paper_optimizers(model, arguments),
    )


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 512**-0.5 * 4000**-1.5), (4000, (512 * 4000) ** -0.5), (16000, (512 * 16000) ** -0.5)],
    ids=["first", "peak", "decay"],
)
def test_learning_rate_is_the_papers_formula(step, expected):
    assert noam_learning_rate(step, 512, 4000) == pytest.approx(expected, rel=1e-12)
    assert noam_learning_rate(step, 512, 4000, factor=3.0) == pytest.approx(3 * expected, rel=1e-12)


@pytest.mark.parametrize("argument", ["step", "d_model", "warmup_steps"])
def test_bad_learning_rate_arguments_raise(argument):
    arguments = {"step": 3, "d_model": 16, "warmup_steps": 5, argument: 0}
    with pytest.raises(ValueError, match=f"`{argument}` must be at least 1, got 0"):
        noam_learning_rate(**arguments)


def test_arguments_are_the_papers(tmp_path):
    arguments = paper_training_arguments(tiny_config(d_model=512, num_heads=8), str(tmp_path), use_cpu=True)
    assert (arguments.adam_beta1, arguments.adam_beta2, arguments.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert arguments.weight_decay == 0.0
    assert arguments.max_grad_norm == 0.0
    assert arguments.warmup_steps == 4000
    assert arguments.learning_rate == pytest.approx((512 * 4000) ** -0.5, rel=1e-12)


def test_overrides_reach_the_arguments(tmp_path):
    arguments = make_arguments(tmp_path, max_grad_norm=2.5, num_train_epochs=3, max_tokens_per_batch=40)
    assert arguments.max_grad_norm == 2.5
    assert arguments.num_train_epochs == 3
    assert arguments.max_tokens_per_batch == 40


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (PreTrainedConfig(), {}, "`config` must have a `d_model`, but a `PreTrainedConfig` has none"),
        (MarianConfig(d_model=16), {"factor": 0.0}, r"`factor` must be positive, got 0\.0"),
        (MarianConfig(d_model=16), {"warmup_steps": 0}, "`warmup_steps` must be at least 1, got 0"),
    ],
    ids=["no d_model", "factor", "warmup_steps"],
)
def test_bad_training_arguments_raise(tmp_path, config, arguments, message):
    with pytest.raises(ValueError, match=message):
        paper_training_arguments(config, str(tmp_path), **arguments)


@pytest.mark.parametrize("factor", [1.0, 0.3], ids=["paper", "scaled"])
@pytest.mark.parametrize("kind", ["stock", "vanilla"])
def test_every_update_has_the_learning_rate_of_the_formula(tmp_path, kind, factor):
    recorder = Recorder()
    make_trainer(kind, make_arguments(tmp_path, factor=factor), recorder).train()
    expected = [noam_learning_rate(step, 16, WARMUP_STEPS, factor) for step in range(1, NUM_STEPS + 1)]
    assert len(recorder.learning_rates) == NUM_STEPS
    assert recorder.learning_rates == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("kind", ["stock", "vanilla"])
def test_learning_rate_continues_after_resuming(tmp_path, kind):
    saving = {"save_strategy": "steps", "save_steps": 5}
    make_trainer(kind, make_arguments(tmp_path, max_steps=5, **saving), Recorder()).train()
    recorder = Recorder()
    make_trainer(kind, make_arguments(tmp_path, max_steps=11, **saving), recorder).train(resume_from_checkpoint=True)
    expected = [noam_learning_rate(step, 16, WARMUP_STEPS) for step in range(6, 12)]
    assert recorder.learning_rates == pytest.approx(expected, rel=1e-7)


def test_second_training_restarts_the_schedule(tmp_path):
    recorder = Recorder()
    trainer = make_trainer("vanilla", make_arguments(tmp_path, max_steps=3), recorder)
    trainer.train()
    trainer.train()
    once = [noam_learning_rate(step, 16, WARMUP_STEPS) for step in range(1, 4)]
    assert recorder.learning_rates == pytest.approx(once + once, rel=1e-7)


def test_vanilla_trainer_keeps_other_schedules(tmp_path):
    recorder = Recorder()
    arguments = make_arguments(tmp_path, lr_scheduler_type="constant", learning_rate=0.25, max_steps=2)
    make_trainer("vanilla", arguments, recorder).train()
    assert recorder.learning_rates == [0.25, 0.25]


def test_paper_optimizers_are_adam_without_decay(tmp_path):
    model = tiny_model()
    optimizer, _ = paper_optimizers(model, make_arguments(tmp_path))
    assert isinstance(optimizer, torch.optim.AdamW | torch.optim.Adam)
    for group in optimizer.param_groups:
        assert group["betas"] == (0.9, 0.98)
        assert group["eps"] == 1e-9
        assert group["weight_decay"] == 0.0
    optimized = [id(each) for group in optimizer.param_groups for each in group["params"]]
    assert sorted(optimized) == sorted(id(each) for each in model.parameters())


def test_paper_optimizers_decay_the_same_parameters_as_the_trainer(tmp_path):
    model = tiny_model()
    model.model.encoder.embed_tokens.weight.requires_grad_(False)
    arguments = make_arguments(tmp_path, weight_decay=0.25)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for optimizer in (
        paper_optimizers(model, arguments)[0],
        Seq2SeqTrainer(model, arguments, tiny_collator(model)).create_optimizer(),
    ):
        groups.append(
            [(each["weight_decay"], [names[id(one)] for one in each["params"]]) for each in optimizer.param_groups]
        )
    assert groups[0] == groups[1]
    (_, decayed), (_, spared) = groups[0]
    assert [decay for decay, _ in groups[0]] == [0.25, 0.0]
    assert any("bias" in name for name in spared)
    assert any("norm" in name for name in spared)
    assert any("proj" in name for name in decayed)
    assert not any("bias" in name or "norm" in name for name in decayed)


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "message"),
    [
        ("linear", 7, "`lr_scheduler_type` must be 'inverse_sqrt', got 'linear'"),
        ("inverse_sqrt", 0.1, r"`warmup_steps` must be a number of steps, 1 or more, got 0\.1"),
    ],
    ids=["schedule", "share"],
)
def test_paper_optimizers_refuse_other_schedules(tmp_path, schedule, warmup_steps, message):
    arguments = VanillaTrainingArguments(str(tmp_path), lr_scheduler_type=schedule, warmup_steps=warmup_steps)
    with pytest.raises(ValueError, match=message):
        paper_optimizers(tiny_model(), arguments)


@pytest.mark.parametrize(
    ("warmup", "updates", "warns"),
    [(4000, 400, True), (31, 60, True), (30, 60, False), (0.6, 60, True), (0.1, 60, False)],
    ids=["beyond the end", "over half", "half", "large share", "share"],
)
def test_long_warmup_is_warned_of(tmp_path, caplog, warmup, updates, warns):
    arguments = VanillaTrainingArguments(str(tmp_path), warmup_steps=warmup, max_steps=updates, use_cpu=True)
    WarmupWarning().on_train_begin(arguments, TrainerState(max_steps=updates), TrainerControl())
    assert bool(caplog.messages) is warns
    if warns:
        assert "(--warmup_steps)" in caplog.text
        assert f"{updates} (--max_steps)" in caplog.text


@pytest.mark.parametrize(
    ("d_model", "warmup", "warns"),
    [(128, 133, True), (128, 200, False), (512, 40, False), (512, 36, True), (512, 4000, False)],
    ids=["too short", "short", "wide", "wide, too short", "base"],
)
def test_high_peak_is_warned_of(tmp_path, caplog, d_model, warmup, warns):
    arguments = paper_training_arguments(MarianConfig(d_model=d_model), str(tmp_path), warmup_steps=warmup)
    WarmupWarning().on_train_begin(arguments, TrainerState(max_steps=20_000), TrainerControl())
    assert [message.partition(",")[0] for message in caplog.messages] == (
        [f"The learning rate peaks at {(d_model * warmup) ** -0.5:.1e}"] if warns else []
    )
    assert ("raise --warmup_steps, or give a lower --learning_rate." in caplog.text) is warns


def test_high_peak_of_another_schedule_is_accepted(tmp_path, caplog):
    arguments = VanillaTrainingArguments(str(tmp_path), learning_rate=0.1, lr_scheduler_type="linear", use_cpu=True)
    WarmupWarning().on_train_begin(arguments, TrainerState(max_steps=60), TrainerControl())
    assert caplog.messages == []


def test_gpt_warms_up_and_decays_to_zero(tmp_path):
    arguments = gpt_training_arguments(str(tmp_path), use_cpu=True, dataloader_pin_memory=False, adam_beta2=0.98)
    assert (arguments.weight_decay, arguments.max_grad_norm, arguments.adam_beta2) == (0.01, 1.0, 0.98)
    trainer = VanillaTrainer(tiny_model(), arguments, processing_class=tiny_tokenizer())
    trainer.create_optimizer_and_scheduler(num_training_steps=6000)
    rate = trainer.lr_scheduler.lr_lambdas[0]
    found = [2.5e-4 * rate(step) for step in (0, 500, 2000, 4000, 6000)]
    assert found == pytest.approx([0, 0.625e-4, 2.5e-4, 1.25e-4, 0], abs=1e-12)
