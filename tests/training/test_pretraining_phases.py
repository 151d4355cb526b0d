"""Pre-training in phases: order of the batches, and resuming to the same bits in either phase."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from datasets import Dataset
from run_bert_ranks import SIZES, tiny_tokenizer
from tiny_translation import step_without_values
from transformers import DataCollatorForLanguageModeling, EvalPrediction, TrainerCallback

from hf_vanilla import VanillaBertConfig, VanillaBertForMaskedLM, VanillaBertForPreTraining
from hf_vanilla.metrics import PretrainingMetrics, loss_by_position
from hf_vanilla.training import (
    Phase,
    PhasedBatchSampler,
    PretrainingTrainer,
    RepeatableCollator,
    bert_training_arguments,
    fill_new_positions,
    phased_learning_rate,
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


def phases(*rates):
    first, second = rates or ((), ())
    return [Phase(examples(25, SHORT), 0.75, *first), Phase(examples(10, LONG, seed=1), 0.25, *second)]


class Shapes(TrainerCallback):
    """Records the shapes of the batches, and the position embeddings with each."""

    def __init__(self, model):
        self.seen = []
        self.tables = []
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module, args, kwargs):
        if module.training:
            self.seen.append(tuple(kwargs["input_ids"].shape))
            self.tables.append(module.bert.embeddings.position_embeddings.weight.detach().clone())


def make_trainer(folder, parts=None, options=None, **changes):
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
        **(options or {}),
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


def test_mixed_phases_come_in_random_order():
    lengths = [np.full(24, 10), np.full(9, 20), np.full(6, 30)]
    sampler = PhasedBatchSampler(lengths, [3, 6, 6], MAX_TOKENS, seed=3, batches_per_step=2, mixed_phases=2)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 30
    phase_of = [np.searchsorted([24, 33], batch, side="right") for batch in batches]
    assert all((each == each[0]).all() for each in phase_of)
    numbers = [each[0] for each in phase_of]
    assert numbers[::2] == numbers[1::2]  # of both batches of an update
    assert numbers[:6] == [0] * 6
    assert sorted(numbers[6:]) == [1] * 12 + [2] * 12 != numbers[6:]
    assert batches == list(sampler)
    others = PhasedBatchSampler(lengths, [3, 6, 6], MAX_TOKENS, seed=4, batches_per_step=2, mixed_phases=2)
    assert [batch[0] >= 33 for batch in others] != [batch[0] >= 33 for batch in batches]


@pytest.mark.parametrize(
    ("peaks", "warmups", "expected"),
    [
        ([0.9, None], [2, 0], {0: 0, 1: 0.45, 2: 0.9, 10: 0.5, 11: 0.45, 20: 0}),
        ([0.9, 0.6], [2, 4], {1: 0.45, 2: 0.9, 10: 0.5, 12: 0.55, 14: 0.6, 17: 0.3, 20: 0}),
        ([1.0, 0.5], [0, 0], {0: 1, 9: 0.55, 10: 0.5, 15: 0.25}),
    ],
    ids=["one peak", "two peaks", "no warm-up"],
)
def test_learning_rate_of_phases(peaks, warmups, expected):
    found = {step: phased_learning_rate(step, [10, 10], peaks, warmups) for step in expected}
    assert found == pytest.approx(expected, abs=1e-12)


def test_phase_has_a_warmup_of_its_own(tmp_path):
    trainer, _ = make_trainer(tmp_path, phases((), (0.02, 2)))
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    expected = [0.01 * min(step / 3, (12 - step) / 9) for step in range(10)]
    assert rates == pytest.approx([*expected, (expected[9] + 0.02) / 2, 0.02], abs=1e-9)


@pytest.mark.parametrize(("method", "rows"), [("repeat", [1, 2, 3, 1, 2]), ("interpolate", [1, 1.5, 2, 2.5, 3])])
def test_new_positions_are_filled_from_learned_ones(method, rows):
    table = torch.arange(11.0)[:, None].repeat(1, 2) ** 2
    straight = torch.arange(11.0)[:, None].repeat(1, 2)
    fill_new_positions(straight, 4, 9, method)
    torch.testing.assert_close(straight[:, 1], torch.tensor([0.0, 1, 2, 3, *rows, 9, 10]))
    fill_new_positions(table, 4, 9, method)
    assert table[[3, 4, 8, 9], 0].tolist() == [9, 1, {"repeat": 4, "interpolate": 9}[method], 81]


@pytest.mark.parametrize("mixed", [False, True])
def test_longer_phase_starts_from_learned_positions(tmp_path, mixed):
    parts = phases()
    if mixed:
        parts = [parts[0], *(phase._replace(share=0.125) for phase in phases())]
    trainer, shapes = make_trainer(tmp_path, parts, {"new_positions": "repeat", "mixed_phases": 2 if mixed else 0})
    trainer.train()
    before, after = shapes.tables[8], shapes.tables[9]
    assert torch.equal(after[SHORT:LONG], after[[1 + number % (SHORT - 1) for number in range(LONG - SHORT)]])
    assert not torch.equal(before[SHORT:LONG], after[SHORT:LONG])
    torch.testing.assert_close(after[LONG:], before[LONG:], rtol=1e-3, atol=0)  # they only decay
    assert not torch.equal(shapes.tables[-1][SHORT], shapes.tables[-1][1])


@pytest.mark.parametrize(
    ("losses", "warns"),
    [([5.4, 5.3, 5.3, 5.3], True), ([5.4, 4.2, 3.9, 3.8], False), ([3.7, 3.7, 3.7, 3.7], False)],
    ids=["stays", "comes down", "small jump"],
)
def test_lasting_jump_of_the_loss_is_warned_of(tmp_path, caplog, losses, warns):
    trainer, _ = make_trainer(tmp_path, max_steps=24)
    trainer.get_train_dataloader()
    for step, loss in enumerate([*[3.6, 3.5, 3.4] * 5, 3.5, *losses], start=3):  # the second phase starts after 18
        trainer.state.global_step = step
        trainer.log({"loss": loss})
    assert sum("the training loss rose" in each for each in caplog.messages) == warns
    assert not warns or "With sequences of 20 tokens the training loss rose from 3.47 to 5.40" in caplog.text


@pytest.mark.parametrize("longer_than", [SHORT, 0])
def test_new_phase_is_no_divergence(tmp_path, longer_than):
    trainer, shapes = make_trainer(tmp_path, stop_on_divergence=[4, 1, 9])

    def add(model, args, kwargs, output):
        rises = len(shapes.seen) > 6 and kwargs["input_ids"].shape[1] > longer_than
        output.loss = output.loss + 90.0 * rises
        return output

    trainer.model.register_forward_hook(add, with_kwargs=True)
    with nullcontext() if longer_than else pytest.raises(ValueError, match="The loss has diverged at step 7"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "stop"),
    [({}, 5), ({}, 11), ({"new_positions": "interpolate"}, 9), ({"mixed_phases": 2}, 7)],
    ids=["first-phase", "second-phase", "new-positions", "mixed"],
)
def test_resumed_run_ends_with_the_same_bits(tmp_path, options, stop):
    trainer, _ = make_trainer(tmp_path / "whole", None, options)
    trainer.train()
    expected = trainer.model.state_dict()
    saving = {"save_strategy": "steps", "save_steps": stop}
    make_trainer(tmp_path / "stopped", None, options, **saving)[0].train()
    resumed, shapes = make_trainer(tmp_path / "stopped", None, options, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / f"checkpoint-{stop}"))
    assert len(shapes.seen) == 12 - stop
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_step_on_a_gpu_waits_for_nothing(tmp_path, monkeypatch):
    batch = step_without_values(make_trainer(tmp_path)[0], monkeypatch)
    assert batch["mask_sizes"]["labels"][0] == (batch["labels"] != -100).sum()


def test_masks_depend_on_the_batch_alone(monkeypatch):
    gpus = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", gpus.append)
    collator = RepeatableCollator(DataCollatorForLanguageModeling(tiny_tokenizer(), mlm_probability=0.5), seed=1)
    rows = [{"input_ids": row} for row in examples(6, LONG)["input_ids"]]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = collator(rows)["labels"]
    assert torch.equal(torch.get_rng_state(), before)
    assert gpus == [5]  # a batch is collated in the middle of the step before
    torch.manual_seed(6)
    assert torch.equal(collator(rows)["labels"], first)
    assert not torch.equal(collator(rows[::-1])["labels"].flip(0), first)
    collator.seed = 2
    assert not torch.equal(collator(rows)["labels"], first)


def test_masks_of_single_sequences_differ_in_each_epoch(tmp_path):
    parts = [Phase(examples(3, LONG), 1.0)]
    masks = {}
    trainer, _ = make_trainer(tmp_path, parts, max_steps=9, warmup_steps=1, max_tokens_per_batch=LONG)
    for batch in trainer.get_train_dataloader():
        is_masked = batch["labels"] != -100
        text = torch.where(is_masked, batch["labels"], batch["input_ids"])
        masks.setdefault(tuple(text[0].tolist()), []).append(tuple(is_masked[0].tolist()))
    assert len(masks) == 3
    assert all(len(set(each)) == 3 for each in masks.values())


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


def test_loss_by_position_is_averaged_over_masked_tokens():
    losses = np.array([[0, 2, 4, 0, 0], [1, 0, 6, 3, 0]], dtype=np.float32)
    labels = np.array([[-100, 7, 8, -100, -100], [5, -100, 6, 9, -100]])
    prediction = EvalPrediction((losses, losses), (labels, np.zeros(2)))
    assert loss_by_position(prediction, 2) == {
        "width": 2,
        "loss": [1.5, pytest.approx(13 / 3), None],
        "tokens": [2, 3, 0],
    }
    assert loss_by_position(prediction)["loss"] == [1, 2, 5, 3, None]
    with pytest.raises(ValueError, match="`width` must be at least 1 position, got 0"):
        loss_by_position(prediction, 0)


def test_pairs_without_a_label_are_not_counted():
    metrics = PretrainingMetrics()
    labels = torch.tensor([[-100, 7], [8, -100], [9, -100]]), torch.tensor([0, -100, 1])
    logits = torch.zeros(3, 2, 10), torch.tensor([[1.0, 0.0]] * 3)
    reduced = tuple(each.numpy() for each in metrics.preprocess_logits(logits, labels))
    assert metrics(EvalPrediction(reduced, tuple(map(np.asarray, labels))))["nsp_accuracy"] == 0.5
    without = (np.asarray(labels[0]), np.full(3, -100))
    assert "nsp_accuracy" not in metrics(EvalPrediction(reduced, without))


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
        ({"max_steps": 3}, [0.5, 0.5, 0], r"`max_steps` \(3\) is too few to divide among 3 phases"),
        ({"ignore_data_skip": True}, None, "`ignore_data_skip` would have a resumed run repeat the first phase"),
    ],
    ids=["steps", "budget", "none", "shares", "negative", "few", "skip"],
)
def test_bad_input_raises(tmp_path, changes, shares, message):
    parts = None if shares is None else [Phase(examples(4, SHORT), share) for share in shares]
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, parts, **changes)


@pytest.mark.parametrize(
    ("rates", "options", "changes", "message"),
    [
        (((), (0.1, 4)), {}, {}, r"warm-ups from 0 to their numbers of updates, got 4 of 3"),
        (((), (-0.1, 0)), {}, {}, r"learning rates above 0, got -0.1"),
        (((), (0.1, 1)), {}, {"lr_scheduler_type": "cosine"}, r"`lr_scheduler_type` must be linear .* got cosine"),
        (((), (0.1, 1)), {"mixed_phases": 2}, {}, r"`mixed_phases` \(2\) and learning rates of phases"),
        (((), ()), {"mixed_phases": 3}, {}, r"`mixed_phases` must be 0, or from 2 to .*\(2\), got 3"),
        (((), ()), {"new_positions": "mirror"}, {}, r"`new_positions` must be random, .* got 'mirror'"),
    ],
    ids=["warm-up", "rate", "schedule", "mixed rates", "mixed", "positions"],
)
def test_bad_phases_are_named(tmp_path, rates, options, changes, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, phases(*rates), options, **changes)
