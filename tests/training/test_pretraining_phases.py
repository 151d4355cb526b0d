"""Pre-training in phases: order of the batches, and resuming to the same bits in either phase."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from run_bert_ranks import SIZES, tiny_tokenizer
from tiny_translation import step_without_values
from transformers import DataCollatorForLanguageModeling, EvalPrediction, TrainerCallback

from hf_vanilla import VanillaBertConfig, VanillaBertForMaskedLM, VanillaBertForPreTraining
from hf_vanilla.metrics import PretrainingMetrics
from hf_vanilla.training import (
    Phase,
    PhasedBatchSampler,
    PretrainingTrainer,
    RepeatableCollator,
    bert_training_arguments,
)


SHORT, LONG = 9, 20
MAX_TOKENS = 60


def examples(count, longest, seed=0, **columns):
    generator = np.random.default_rng(seed)
    rows = [[2, *generator.integers(5, 31, generator.integers(3, longest - 1)).tolist(), 3] for _ in range(count)]
    rows[0] = [2, *[5] * (longest - 2), 3]
    return Dataset.from_dict(
        {
            "input_ids": rows,
            "token_type_ids": [[0] * len(row) for row in rows],
            "special_tokens_mask": [[1, *[0] * (len(row) - 2), 1] for row in rows],
            "next_sentence_label": [number % 2 for number in range(count)],
            **columns,
        }
    )


def phases():
    return [Phase(examples(25, SHORT), 0.75), Phase(examples(10, LONG, seed=1), 0.25)]


class Shapes(TrainerCallback):
    """Records the shapes of the batches."""

    def __init__(self, model):
        self.seen = []
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module, args, kwargs):
        if module.training:
            self.seen.append(tuple(kwargs["input_ids"].shape))


def make_trainer(folder, parts=None, **changes):
    arguments = bert_training_arguments(
        str(folder),
        **{
            "max_steps": 12,
            "warmup_steps": 3,
            "learning_rate": 0.01,
            "max_tokens_per_batch": MAX_TOKENS,
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **changes,
        },
    )
    torch.manual_seed(0)
    model = VanillaBertForPreTraining(VanillaBertConfig(**SIZES))
    shapes = Shapes(model)
    trainer = PretrainingTrainer(
        model,
        arguments,
        DataCollatorForLanguageModeling(tiny_tokenizer()),
        phases=phases() if parts is None else parts,
        processing_class=tiny_tokenizer(),
        callbacks=[shapes],
    )
    return trainer, shapes


def test_batches_of_each_phase_are_within_the_budget():
    lengths = [np.array([3, 9, 4, 5, 9, 7, 3]), np.array([20, 12, 15])]
    sampler = PhasedBatchSampler(lengths, [6, 4], MAX_TOKENS, seed=3, batches_per_step=2)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 20
    everything = np.concatenate(lengths)
    for number, batch in enumerate(batches):
        assert (max(batch) < 7) == (number < 12)
        assert (min(batch) < 7) == (number < 12)
        assert len(batch) * everything[batch].max() <= MAX_TOKENS
    assert batches == list(sampler)
    assert batches != list(PhasedBatchSampler(lengths, [6, 4], MAX_TOKENS, seed=4, batches_per_step=2))


def test_phase_repeats_no_example_within_an_epoch():
    sampler = PhasedBatchSampler([np.full(24, 10)], [12], 60)
    order = [index for batch in sampler for index in batch]
    assert sorted(order[:24]) == sorted(order[24:48]) == sorted(order[48:]) == list(range(24))
    assert order[:24] != order[24:48]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_both_phases_share_one_schedule(tmp_path, accumulation):
    trainer, shapes = make_trainer(tmp_path, gradient_accumulation_steps=accumulation)
    trainer.train()
    assert trainer.state.global_step == 12
    assert len(shapes.seen) == 12 * accumulation
    lengths = [length for _, length in shapes.seen]
    assert max(lengths[: 9 * accumulation]) <= SHORT
    assert max(lengths[9 * accumulation :]) == LONG
    assert all(rows * length <= MAX_TOKENS for rows, length in shapes.seen)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    expected = [0.01 * min(step / 3, (12 - step) / 9) for step in range(12)]
    assert rates == pytest.approx(expected, abs=1e-9)
    logged = [entry["sequence_length"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [SHORT] * 9 + [LONG] * 3


@pytest.mark.parametrize("stop", [5, 11], ids=["first-phase", "second-phase"])
def test_resumed_run_ends_with_the_same_bits(tmp_path, stop):
    trainer, _ = make_trainer(tmp_path / "whole")
    trainer.train()
    expected = trainer.model.state_dict()
    saving = {"save_strategy": "steps", "save_steps": stop}
    make_trainer(tmp_path / "stopped", **saving)[0].train()
    resumed, shapes = make_trainer(tmp_path / "stopped", **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / f"checkpoint-{stop}"))
    assert len(shapes.seen) == 12 - stop
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_step_on_a_gpu_waits_for_nothing(tmp_path, monkeypatch):
    batch = step_without_values(make_trainer(tmp_path)[0], monkeypatch)
    assert batch["mask_sizes"]["labels"][0] == (batch["labels"] != -100).sum()


def test_masks_depend_on_the_batch_alone():
    collator = RepeatableCollator(DataCollatorForLanguageModeling(tiny_tokenizer(), mlm_probability=0.5), seed=1)
    rows = [{"input_ids": row} for row in examples(6, LONG)["input_ids"]]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = collator(rows)["labels"]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(collator(rows)["labels"], first)
    assert not torch.equal(collator(rows[::-1])["labels"].flip(0), first)
    collator.seed = 2
    assert not torch.equal(collator(rows)["labels"], first)


def test_biases_and_norms_have_no_decay(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    optimizer = trainer.create_optimizer()
    decayed, others = ([id(each) for each in group["params"]] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    for name, parameter in trainer.model.named_parameters():
        is_free = name.endswith("bias") or "norm" in name.lower()
        assert id(parameter) in (others if is_free else decayed), name


def test_evaluation_keeps_given_masks(tmp_path):
    trainer, _ = make_trainer(tmp_path, per_device_eval_batch_size=3)
    labels = [[-100, *row[1:3], *[-100] * (len(row) - 3)] for row in examples(7, SHORT)["input_ids"]]
    held_out = examples(7, SHORT, labels=labels)
    metrics = PretrainingMetrics()
    trainer.compute_metrics = metrics
    trainer.preprocess_logits_for_metrics = metrics.preprocess_logits
    first, second = (trainer.evaluate(held_out) for _ in range(2))
    names = ("eval_loss", "eval_mlm_loss", "eval_mlm_accuracy", "eval_nsp_accuracy")
    assert [first[name] for name in names] == [second[name] for name in names]
    losses, right, total, following = [], 0, 0, 0
    trainer.model.eval()
    for row in held_out:
        output = trainer.model(torch.tensor([row["input_ids"]]), token_type_ids=torch.tensor([row["token_type_ids"]]))
        wanted = torch.tensor(row["labels"])
        chosen = wanted != -100
        logits = output.prediction_logits[0][chosen]
        losses.append(torch.nn.functional.cross_entropy(logits, wanted[chosen], reduction="sum").item())
        right += (logits.argmax(-1) == wanted[chosen]).sum().item()
        total += chosen.sum().item()
        following += int(output.seq_relationship_logits.argmax().item() == row["next_sentence_label"])
    assert first["eval_mlm_loss"] == pytest.approx(sum(losses) / total, rel=1e-5)
    assert first["eval_mlm_accuracy"] == pytest.approx(right / total)
    assert first["eval_nsp_accuracy"] == pytest.approx(following / 7)


def test_metrics_of_masked_tokens_alone():
    metrics = PretrainingMetrics()
    torch.manual_seed(0)
    model = VanillaBertForMaskedLM(VanillaBertConfig(**SIZES)).eval()
    labels = torch.tensor([[-100, 7, 9], [-100, -100, 8]])
    with torch.no_grad():
        logits = model(torch.tensor([[2, 4, 4], [2, 6, 4]])).logits
    reduced = metrics.preprocess_logits(logits, labels)
    scores = metrics(EvalPrediction(tuple(each.numpy() for each in reduced), labels.numpy()))
    assert set(scores) == {"mlm_loss", "mlm_accuracy"}
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert scores["mlm_loss"] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "shares", "message"),
    [
        ({"max_steps": -1, "warmup_steps": -1}, None, r"`warmup_steps` must be between 0 and"),
        ({"max_tokens_per_batch": None}, None, r"`max_tokens_per_batch` must be at least 1 .* got None"),
        ({}, [], r"`phases` must hold at least one phase"),
        ({}, [0.5, 0.4], r"`phases` must have shares .* add up to 1, got 0.5, 0.4"),
        ({}, [1.5, -0.5], r"`phases` must have shares .*got 1.5, -0.5"),
    ],
    ids=["steps", "budget", "none", "shares", "negative"],
)
def test_bad_input_raises(tmp_path, changes, shares, message):
    parts = None if shares is None else [Phase(examples(4, SHORT), share) for share in shares]
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, parts, **changes)
