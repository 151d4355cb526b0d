import inspect
import math
import os

import numpy as np
import pytest
import torch
from accelerate import ParallelismConfig
from datasets import Dataset
from tiny_translation import (
    Poison,
    Recorder,
    step_without_values,
    tiny_collator,
    tiny_model,
    tiny_pairs,
    tiny_tokenizer,
    weights_of,
)
from torch._dynamo.utils import counters
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForPreTraining,
    VanillaBertForQuestionAnswering,
    VanillaBertForSequenceClassification,
    VanillaGptConfig,
    VanillaGptForCausalLM,
    VanillaGptForSequenceClassification,
)
from hf_vanilla.models import packing, varlen_attention
from hf_vanilla.training import VanillaTrainer, VanillaTrainingArguments, VerifiedCheckpointTrainer


BUDGET = 40


def make_arguments(output_dir, **changes):
    quiet = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False}
    budget = {"max_tokens_per_batch": BUDGET, "logging_steps": 1, "learning_rate": 0.01}
    return VanillaTrainingArguments(str(output_dir), **{**quiet, **budget, **changes})


def make_trainer(output_dir, model=None, *, pairs=None, callbacks=None, data_collator=None, **changes):
    model = tiny_model() if model is None else model
    pairs = tiny_pairs() if pairs is None else pairs
    arguments = make_arguments(output_dir, **changes)
    tokenizer = tiny_tokenizer()
    return VanillaTrainer(
        model, arguments, data_collator, train_dataset=pairs, processing_class=tokenizer, callbacks=callbacks
    )


def are_equal(left, right):
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


class SpyCollator:
    """The default collator, which records its rows."""

    def __init__(self):
        self.collate = tiny_collator(tiny_model())
        self.batches = []

    def __call__(self, rows):
        self.batches.append([tuple(row["input_ids"]) for row in rows])
        batch = self.collate(rows)
        assert batch["input_ids"].numel() <= BUDGET
        assert batch["labels"].numel() <= BUDGET
        return batch


@pytest.mark.parametrize("budget", [BUDGET, None])
def test_step_on_a_gpu_waits_for_nothing(tmp_path, budget, monkeypatch):
    trainer = make_trainer(tmp_path, max_tokens_per_batch=budget)
    assert "mask_sizes" not in next(iter(trainer.get_train_dataloader()))
    batch = step_without_values(trainer, monkeypatch)
    assert batch["mask_sizes"]["attention_mask"][0] == batch["attention_mask"].sum()


def test_batches_that_one_process_divides_are_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(varlen_attention, "VARLEN_DEVICES", ("cpu",))
    divided = {"max_tokens_per_batch": None, "accelerator_config": {"dispatch_batches": True}}
    assert "mask_sizes" not in next(iter(make_trainer(tmp_path, **divided).get_train_dataloader()))


SIZES = {"vocab_size": 29, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3}


def test_rows_without_labels_are_batched_by_their_tokens(tmp_path):
    blocks = tiny_pairs().select_columns(["input_ids"])
    arguments = VanillaTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_tokens_per_batch=20)
    model = VanillaGptForCausalLM(VanillaGptConfig(**SIZES, max_position_embeddings=9))
    collator = DataCollatorForLanguageModeling(tiny_tokenizer(), mlm=False)
    batches = list(VanillaTrainer(model, arguments, collator, train_dataset=blocks).get_train_dataloader())
    assert max(batch["labels"].numel() for batch in batches) <= 20
    assert sum(len(batch["input_ids"]) for batch in batches) == len(blocks)
    with pytest.raises(ValueError, match="`train_dataset` must have a column `labels`; tokenize the target side"):
        make_trainer(tmp_path, max_tokens_per_batch=20, pairs=blocks).get_train_dataloader()


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_loss_of_a_causal_model_is_the_mean_over_predicted_tokens(tmp_path, padding_side):
    torch.manual_seed(2)
    model = VanillaGptForCausalLM(VanillaGptConfig(**SIZES, max_position_embeddings=9, initializer_range=0.5)).eval()
    blocks = tiny_pairs(12).select_columns(["input_ids"])
    arguments = VanillaTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_tokens_per_batch=20)
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = padding_side
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    measured = VanillaTrainer(model, arguments, collator, eval_dataset=blocks).evaluate()["eval_loss"]
    rows = [torch.tensor([ids]) for ids in blocks["input_ids"][:]]
    losses = [model(ids, labels=ids).loss.item() * (ids.numel() - 1) for ids in rows]
    # float32 sums of other shapes
    assert measured == pytest.approx(sum(losses) / sum(ids.numel() - 1 for ids in rows), rel=1e-5)


@pytest.mark.parametrize(
    ("model_class", "config_class", "changes"),
    [
        (VanillaGptForCausalLM, VanillaGptConfig, {}),
        (VanillaGptForSequenceClassification, VanillaGptConfig, {"lm_loss_weight": 0.5}),
        (VanillaBertForPreTraining, VanillaBertConfig, {}),
        (VanillaBertForQuestionAnswering, VanillaBertConfig, {}),
        (VanillaBertForSequenceClassification, VanillaBertConfig, {"num_labels": 1, "problem_type": "regression"}),
    ],
)
def test_label_smoothing_of_another_loss_is_refused(tmp_path, model_class, config_class, changes):
    arguments = VanillaTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=rf"`label_smoothing_factor` \(0.1\) is not for a {model_class.__name__}"):
        VerifiedCheckpointTrainer(model_class(config_class(**SIZES, **changes)), arguments)


def test_own_predictions_are_only_for_encoder_decoders(tmp_path):
    model = VanillaGptForCausalLM(VanillaGptConfig(**SIZES))
    arguments = VanillaTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", teacher_forcing_ratio=0.5)
    with pytest.raises(ValueError, match=r"`teacher_forcing_ratio` \(0.5\) is for encoder-decoders, got a VanillaGpt"):
        VanillaTrainer(model, arguments)


# Arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens_per_batch": 0}, "`max_tokens_per_batch` must be at least 1 token, got 0"),
        ({"teacher_forcing_ratio": 1.5}, r"`teacher_forcing_ratio` must be between 0 and 1, got 1\.5"),
        ({"teacher_forcing_ratio": -0.1}, r"`teacher_forcing_ratio` must be between 0 and 1, got -0\.1"),
        (
            {"train_sampling_strategy": "group_by_length"},
            "`train_sampling_strategy` can't be combined with .* [(]40[)]",
        ),
        ({"auto_find_batch_size": True}, "`auto_find_batch_size` can't be combined"),
        ({"eval_do_concat_batches": False}, "`eval_do_concat_batches=False` can't be combined"),
        ({"include_for_metrics": ["loss"]}, "`include_for_metrics=loss` can't be combined"),
        ({"accelerator_config": {"split_batches": True}}, "`accelerator_config.split_batches` can't be combined"),
        (
            {"accelerator_config": {"dispatch_batches": True}},
            "`accelerator_config.dispatch_batches` can't be combined",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_raise(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make_arguments(tmp_path, **changes)


def test_arguments_without_a_budget_are_the_stock_ones(tmp_path):
    arguments = make_arguments(tmp_path, max_tokens_per_batch=None, train_sampling_strategy="group_by_length")
    assert arguments.teacher_forcing_ratio == 1.0
    assert arguments.accelerator_config.even_batches is True


def test_only_token_budget_batches_are_uneven(tmp_path):
    arguments = make_arguments(tmp_path)
    model = tiny_model()
    # The stock trainer would give its processes different numbers of batches.
    assert Seq2SeqTrainer(model, arguments, tiny_collator(model)).accelerator.even_batches is True
    assert VanillaTrainer(model, arguments).accelerator.even_batches is False
    without_budget = make_arguments(tmp_path, max_tokens_per_batch=None)
    assert VanillaTrainer(model, without_budget).accelerator.even_batches is True


def test_arguments_come_from_the_command_line_with_help(tmp_path):
    parser = HfArgumentParser(VanillaTrainingArguments)
    line = ["--output_dir", str(tmp_path), "--max_tokens_per_batch", "321", "--teacher_forcing_ratio", "0.5"]
    (arguments,) = parser.parse_args_into_dataclasses([*line, "--use_cpu"])
    assert (arguments.max_tokens_per_batch, arguments.teacher_forcing_ratio) == (321, 0.5)
    text = " ".join(parser.format_help().split())
    assert "padding included, the larger of source and target side" in text
    assert "the model's own predictions (scheduled sampling" in text


def test_stock_arguments_raise(tmp_path):
    arguments = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(TypeError, match="`args` must be a `VanillaTrainingArguments`, got a `Seq2SeqTrainingArg"):
        VanillaTrainer(tiny_model(), arguments)


@pytest.mark.parametrize(
    ("column", "message"),
    [("labels", "must have a column `labels`"), ("input_ids", "must have a column `input_ids`, it has")],
)
def test_missing_column_raises(tmp_path, column, message):
    trainer = make_trainer(tmp_path, pairs=tiny_pairs().remove_columns(column))
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_pair_longer_than_the_budget_raises(tmp_path):
    with pytest.raises(ValueError, match=r"more than `max_tokens` \(8\) even in a batch of its own"):
        make_trainer(tmp_path, max_tokens_per_batch=8).train()


def test_default_collator_is_that_of_translation(tmp_path):
    trainer = make_trainer(tmp_path)
    assert isinstance(trainer.data_collator, DataCollatorForSeq2Seq)
    assert trainer.data_collator.model is trainer.model
    given = SpyCollator()
    assert make_trainer(tmp_path, data_collator=given).data_collator is given


# Training batches


@pytest.mark.parametrize("accumulation", [1, 3])
def test_epoch_has_every_pair_once_within_the_budget(tmp_path, accumulation):
    collator = SpyCollator()
    trainer = make_trainer(
        tmp_path, data_collator=collator, num_train_epochs=2, gradient_accumulation_steps=accumulation
    )
    result = trainer.train()
    num_batches = len(trainer.get_train_dataloader())
    assert num_batches % accumulation == 0
    assert len(collator.batches) == 2 * num_batches
    assert result.global_step == trainer.state.max_steps == 2 * num_batches // accumulation
    assert trainer.state.epoch == 2.0
    epochs = (collator.batches[:num_batches], collator.batches[num_batches:])
    everything = sorted(tuple(row["input_ids"]) for row in tiny_pairs())
    for epoch in epochs:
        assert sorted(row for batch in epoch for row in batch) == everything
    assert epochs[0] != epochs[1]


def test_throughput_counts_sentences(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=7, gradient_accumulation_steps=2)
    metrics = trainer.train().metrics
    num_updates = len(trainer.get_train_dataloader()) // 2
    seen = metrics["train_samples_per_second"] * metrics["train_runtime"]
    assert seen == pytest.approx(7 * 45 / num_updates, rel=0.1)


def test_without_a_budget_the_batches_are_the_stock_ones(tmp_path):
    stock = Seq2SeqTrainer(
        tiny_model(), make_arguments(tmp_path, max_steps=5), tiny_collator(tiny_model()), train_dataset=tiny_pairs()
    )
    stock.train()
    vanilla = make_trainer(tmp_path, max_steps=5, max_tokens_per_batch=None)
    vanilla.train()
    assert are_equal(weights_of(stock), weights_of(vanilla))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker:UserWarning")  # on a single core
def test_training_depends_on_the_seed_alone(tmp_path):
    workers = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    runs = []
    for changes in ({}, workers, {"seed": 43}):
        trainer = make_trainer(tmp_path, num_train_epochs=2, **changes)
        trainer.train()
        runs.append(weights_of(trainer))
    assert are_equal(runs[0], runs[1])
    assert not are_equal(runs[0], runs[2])


def test_data_seed_changes_the_batches(tmp_path):
    orders = [list(make_trainer(tmp_path, data_seed=seed).get_train_dataloader().batch_sampler) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("epoch", "changes"),
    [
        (1, {}),
        (0, {"gradient_accumulation_steps": 2}),
        (1, {"dataloader_num_workers": 1, "teacher_forcing_ratio": 0.5}),
        (0, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}),
    ],
    ids=["second epoch", "accumulation", "worker and scheduled sampling", "persistent worker"],
)
def test_resumed_run_ends_with_the_same_bits(tmp_path, changes, epoch):
    whole = make_trainer(tmp_path / "whole", tiny_model(dropout=0.2), num_train_epochs=2, **changes)
    whole.train()
    stop = epoch * whole.state.max_steps // 2 + 2
    saving = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": stop, **changes}
    first = make_trainer(tmp_path / "parts", tiny_model(dropout=0.2), callbacks=[StopAt(stop)], **saving)
    first.train()
    assert first.state.global_step == stop
    second = make_trainer(tmp_path / "parts", tiny_model(dropout=0.2), **saving)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == whole.state.global_step > stop
    assert are_equal(weights_of(whole), weights_of(second))


def test_run_resumed_after_an_epoch_ends_with_the_same_bits(tmp_path):
    saving = {"save_strategy": "epoch", "num_train_epochs": 2}
    whole = make_trainer(tmp_path, tiny_model(dropout=0.2), **saving)
    whole.train()
    second = make_trainer(tmp_path, tiny_model(dropout=0.2), **saving)
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{whole.state.max_steps // 2}"))
    assert are_equal(weights_of(whole), weights_of(second))


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


class CountingPairs(torch.utils.data.Dataset):
    """Pairs in a plain torch dataset, which counts how often rows are read."""

    def __init__(self, pairs):
        self.rows = [{name: pair[name] for name in ("input_ids", "attention_mask", "labels")} for pair in pairs]
        self.reads = 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.reads += 1
        return self.rows[index]


def test_torch_datasets_give_the_same_batches(tmp_path):
    order = np.random.default_rng(2).permutation(45)
    shuffled = tiny_pairs().select(order)  # an index over a table in another order
    plain = CountingPairs(shuffled)
    batches = [
        list(make_trainer(tmp_path, pairs=pairs).get_train_dataloader().batch_sampler) for pairs in (shuffled, plain)
    ]
    assert batches[0] == batches[1]
    lengths = np.array([max(len(row["input_ids"]), len(row["labels"])) for row in shuffled])
    assert all(len(batch) * lengths[batch].max() <= BUDGET for batch in batches[0])


def test_lengths_are_read_once(tmp_path):
    pairs = CountingPairs(tiny_pairs())
    trainer = make_trainer(tmp_path, pairs=pairs)
    for _ in range(3):
        trainer.get_train_dataloader()
        trainer.get_eval_dataloader(pairs)
    assert pairs.reads == len(pairs)


# Evaluation


def loss_of_each_row(model, pairs):
    """Return the summed loss and the number of tokens of each row, computed alone."""
    sums = []
    for row in pairs:
        labels = torch.tensor([row["labels"]])
        with torch.no_grad():
            loss = model.eval()(input_ids=torch.tensor([row["input_ids"]]), labels=labels).loss
        sums.append((loss.item() * labels.numel(), labels.numel()))
    return np.array(sums)


@pytest.mark.parametrize("generate", [False, True], ids=["teacher forcing", "generate"])
def test_eval_loss_is_the_mean_over_tokens(tmp_path, generate):
    trainer = make_trainer(tmp_path, predict_with_generate=generate, generation_max_length=4)
    total, tokens = loss_of_each_row(trainer.model, tiny_pairs()).sum(axis=0)
    assert trainer.evaluate(tiny_pairs())["eval_loss"] == pytest.approx(total / tokens, rel=1e-6)


def test_eval_loss_of_answers_is_the_mean_over_rows(tmp_path):
    torch.manual_seed(3)
    model = VanillaBertForQuestionAnswering(VanillaBertConfig(**SIZES, initializer_range=0.5)).eval()
    numbers = range(11)  # two batches, of 8 and 3: padding would be scored too
    columns = {"start_positions": [0] * 11, "end_positions": [number % 2 for number in numbers]}
    rows = Dataset.from_dict({"input_ids": [[4 + number, 20, 7, 9, 2] for number in numbers], **columns})
    measured = VanillaTrainer(model, make_arguments(tmp_path), processing_class=tiny_tokenizer()).evaluate(rows)
    losses = [model(**{name: torch.tensor([value]) for name, value in row.items()}).loss.item() for row in rows]
    assert measured["eval_loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_numbers_as_labels_are_refused_where_rows_are_repeated(tmp_path, monkeypatch):
    model = VanillaBertForSequenceClassification(VanillaBertConfig(**SIZES, num_labels=1))
    rows = tiny_pairs(5).select_columns(["input_ids"]).add_column("labels", [0.5, 1.5, 2.5, 3.5, 4.5])
    trainer = VanillaTrainer(model, make_arguments(tmp_path), DataCollatorWithPadding(tiny_tokenizer()))
    assert trainer.evaluate(rows)["eval_loss"] > 0
    monkeypatch.setattr(VanillaTrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match="2 processes evaluate 5 rows, of which some twice, .* leave out 1 rows"):
        trainer.evaluate(rows)


def test_eval_loss_of_stock_batches_is_the_stock_one(tmp_path):
    trainer = make_trainer(tmp_path, max_tokens_per_batch=None)
    stock = Seq2SeqTrainer(trainer.model, trainer.args, trainer.data_collator)
    total, tokens = loss_of_each_row(trainer.model, tiny_pairs()).sum(axis=0)
    loss = trainer.evaluate(tiny_pairs())["eval_loss"]
    assert loss == stock.evaluate(tiny_pairs())["eval_loss"]
    assert abs(loss - total / tokens) > 1e-4  # so the test above tells them apart


def test_evaluation_batches_are_within_the_budget(tmp_path):
    collator = SpyCollator()
    trainer = make_trainer(tmp_path, data_collator=collator)
    trainer.evaluate(tiny_pairs())
    assert sum(len(batch) for batch in collator.batches) == 45
    assert len(collator.batches) > 5
    assert len(collator.batches[0][0]) == 9  # longest first, so that memory runs out at once or never


def test_row_longer_than_the_budget_is_predicted_alone(tmp_path):
    trainer = make_trainer(tmp_path, max_tokens_per_batch=3)
    assert trainer.predict(tiny_pairs(7)).label_ids.shape[0] == 7


@pytest.mark.parametrize("accumulation", [None, 2])
def test_predictions_are_in_the_order_of_the_dataset(tmp_path, accumulation):
    pairs = tiny_pairs()
    trainer = make_trainer(tmp_path, eval_accumulation_steps=accumulation)
    output = trainer.predict(pairs)
    logits = output.predictions[0]
    for index, row in enumerate(pairs):
        length = len(row["labels"])
        assert output.label_ids[index, :length].tolist() == row["labels"]
        with torch.no_grad():
            alone = trainer.model(torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).logits[0]
        np.testing.assert_allclose(logits[index, :length], alone.numpy(), atol=1e-5)


def test_translations_are_in_the_order_of_the_dataset(tmp_path):
    pairs = tiny_pairs()
    model = tiny_model(tie_word_embeddings=False)
    trainer = make_trainer(tmp_path, model, predict_with_generate=True, generation_max_length=6)
    predictions = trainer.predict(pairs).predictions
    for index, row in enumerate(pairs):
        alone = trainer.model.generate(torch.tensor([row["input_ids"]]), max_length=6)[0].tolist()
        assert predictions[index, : len(alone)].tolist() == alone
    assert len({tuple(row) for row in predictions.tolist()}) > 5


def test_rows_without_labels_are_predicted_in_order(tmp_path):
    pairs = tiny_pairs()
    model = tiny_model(tie_word_embeddings=False)
    trainer = make_trainer(tmp_path, model, predict_with_generate=True, generation_max_length=5)
    with_labels, without = (trainer.predict(each) for each in (pairs, pairs.remove_columns("labels")))
    assert without.label_ids is None
    assert without.predictions.tolist() == with_labels.predictions.tolist()


def test_metrics_are_computed_in_the_order_of_the_dataset(tmp_path):
    pairs = tiny_pairs()
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction)
        return {"rows": len(prediction.label_ids)}

    trainer = make_trainer(tmp_path, include_for_metrics=["inputs"])
    trainer.compute_metrics = compute_metrics
    metrics = trainer.evaluate({"valid": pairs, "half": pairs.select(range(22))})
    assert (metrics["eval_valid_rows"], metrics["eval_half_rows"]) == (45, 22)
    for index, row in enumerate(pairs):
        assert seen[0].label_ids[index, : len(row["labels"])].tolist() == row["labels"]
        assert seen[0].inputs[index, : len(row["input_ids"])].tolist() == row["input_ids"]
    assert trainer.compute_metrics is compute_metrics


def test_evaluation_does_not_change_the_training(tmp_path):
    runs = []
    for changes in ({}, {"eval_strategy": "steps", "eval_steps": 2}):
        trainer = VanillaTrainer(
            tiny_model(dropout=0.2),
            make_arguments(tmp_path, max_steps=5, **changes),
            train_dataset=tiny_pairs(),
            eval_dataset=tiny_pairs(9, seed=6),
            processing_class=tiny_tokenizer(),
        )
        trainer.train()
        runs.append(weights_of(trainer))
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [2, 4, 5]
    assert are_equal(*runs)


# Scheduled sampling


def decoder_inputs_of(trainer, batch):
    """Return the decoder inputs of each pass of one training step."""
    fed = []
    hook = trainer.model.model.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(
            (kwargs["input_ids"].clone(), module.training, torch.is_grad_enabled())
        ),
        with_kwargs=True,
    )
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    hook.remove()
    return fed, loss


def test_decoder_gets_gold_tokens_by_default(tmp_path):
    trainer = make_trainer(tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    fed, _ = decoder_inputs_of(trainer, batch)
    assert [each[0].tolist() for each in fed] == [batch["decoder_input_ids"].tolist()]


@pytest.mark.parametrize("gives_decoder_inputs", [True, False], ids=["from collator", "from labels"])
def test_decoder_gets_predictions_without_teacher_forcing(tmp_path, gives_decoder_inputs):
    trainer = make_trainer(tmp_path, tiny_model(dropout=0.2), teacher_forcing_ratio=0.0)
    batch = dict(next(iter(trainer.get_train_dataloader())))
    gold, labels = batch["decoder_input_ids"], batch["labels"]
    assert (labels == -100).any()
    with torch.no_grad():
        predicted = trainer.model.eval()(batch["input_ids"], batch["attention_mask"], gold).logits.argmax(-1)
    if not gives_decoder_inputs:
        del batch["decoder_input_ids"]
    fed, loss = decoder_inputs_of(trainer, batch)
    (first, *first_mode), (second, *second_mode) = fed
    assert (first_mode, second_mode) == ([False, False], [True, True])
    assert first.tolist() == gold.tolist()
    expected = gold.clone()
    is_target = labels[:, :-1] != -100
    expected[:, 1:][is_target] = predicted[:, :-1][is_target]
    assert second.tolist() == expected.tolist()
    assert not torch.equal(expected, gold)
    loss.backward()
    assert trainer.model.lm_head.weight.grad.abs().sum() > 0


def test_ratio_is_the_share_of_gold_tokens(tmp_path):
    trainer = make_trainer(tmp_path, teacher_forcing_ratio=0.5, max_tokens_per_batch=400)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.args.teacher_forcing_ratio = 0.0
    all_replaced = decoder_inputs_of(trainer, batch)[0][1][0] != batch["decoder_input_ids"]
    trainer.args.teacher_forcing_ratio = 0.5
    replaced = decoder_inputs_of(trainer, batch)[0][1][0] != batch["decoder_input_ids"]
    assert 0.35 < replaced.sum() / all_replaced.sum() < 0.65
    assert not (replaced & ~all_replaced).any()


def test_evaluation_is_not_sampled(tmp_path):
    losses = [
        make_trainer(tmp_path, teacher_forcing_ratio=ratio).evaluate(tiny_pairs())["eval_loss"] for ratio in (0, 1)
    ]
    assert losses[0] == losses[1]


# A loss that is not finite


def test_nan_loss_stops_the_run(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[Poison(3)], max_steps=9, logging_steps=2)
    with pytest.raises(ValueError, match="The training loss is nan at step 4 "):
        trainer.train()


def test_nan_loss_is_found_without_logs(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[Poison(3)], max_steps=5, logging_strategy="no")
    with pytest.raises(ValueError, match="The training loss is nan at step 4 "):
        trainer.train()


def test_nan_weights_are_not_saved(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 100}
    trainer = make_trainer(tmp_path, callbacks=[Poison(4)], max_steps=9, **saving)
    name = next(iter(dict(trainer.model.named_parameters())))
    with pytest.raises(ValueError, match=f"The weights `{name}` hold nan or infinity at step 4, and so they are not"):
        trainer.train()
    assert os.listdir(tmp_path) == ["checkpoint-2"]


def test_stock_trainer_hides_nan_losses(tmp_path):
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), max_steps=5, logging_steps=5, use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False
    )
    recorder = Recorder()
    model = tiny_model()
    callbacks = [Poison(3), recorder]
    Seq2SeqTrainer(model, arguments, tiny_collator(model), train_dataset=tiny_pairs(), callbacks=callbacks).train()
    assert math.isfinite(recorder.losses[0])
    assert torch.isnan(next(model.parameters())).any()


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_sequences_cut_across_devices_are_refused(name, tmp_path):
    if name not in inspect.signature(ParallelismConfig).parameters:
        pytest.skip(f"accelerate has no `{name}` yet")
    with pytest.raises(ValueError, match=f"must not cut sequences across devices.*`{name}` 2.* Use DDP, FSDP2, or"):
        make_trainer(tmp_path, parallelism_config=ParallelismConfig(**{name: 2}))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
def test_compiled_training_compiles_a_few_times_for_many_shapes(tmp_path, monkeypatch):
    seen = set()

    class ShapeCollator(SpyCollator):
        def __call__(self, rows):
            batch = super().__call__(rows)
            seen.add((batch["input_ids"].shape, batch["labels"].shape))
            return batch

    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # the arguments change it
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    shallow = {"encoder_layers": 1, "decoder_layers": 1}
    plain = make_trainer(tmp_path / "plain", tiny_model(**shallow), max_steps=9).train()
    torch.compiler.reset()
    counters.clear()
    arguments = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 9}
    trainer = make_trainer(tmp_path / "out", tiny_model(**shallow), data_collator=ShapeCollator(), **arguments)
    compiled = trainer.train()
    graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    torch.compiler.reset()
    assert len(seen) > 6
    assert 1 <= graphs <= 3  # for the first shape, for all others, and for a single row
    assert not breaks
    assert compiled.training_loss == pytest.approx(plain.training_loss, rel=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
def test_trainer_compiles_layers_one_by_one_and_works_on_tokens_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # the arguments change it
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    planned, plan_tokens = [], packing.PackingPlanner.plan_tokens

    def spy(planner, *args, **kwargs):
        planned.append((planner.is_compiled, plan_tokens(planner, *args, **kwargs)))
        return planned[-1][1]

    monkeypatch.setattr(packing.PackingPlanner, "plan_tokens", spy)
    losses = []
    for name in ("plain", "compiled"):
        torch.compiler.reset()
        options = {"torch_compile": True, "torch_compile_backend": "eager"} if planned else {}
        monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", str(bool(options)))
        losses.append(make_trainer(tmp_path / name, tiny_model(), max_steps=4, **options).train().training_loss)
    torch.compiler.reset()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert {is_compiled for is_compiled, _ in planned} == {False, True}
    assert any(packed is not None for is_compiled, packed in planned if is_compiled)
