import pytest
import torch
from tiny_translation import tiny_collator, tiny_model, tiny_pairs
from transformers import BertConfig, BertForMaskedLM

from hf_vanilla.training import VanillaTrainer, VanillaTrainingArguments, consistency


def make_trainer(folder, model, **changes):
    options = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no", **changes}
    arguments = VanillaTrainingArguments(str(folder), max_tokens_per_batch=40, **options)
    return VanillaTrainer(model, arguments, tiny_collator(tiny_model()), train_dataset=tiny_pairs())


def batch_of(trainer):
    batch = dict(next(iter(trainer.get_train_dataloader())))
    assert (batch["labels"] == -100).any()
    return batch


def loss_and_gradients(trainer, batch, **options):
    torch.manual_seed(3)
    loss = trainer.compute_loss(trainer.model.train(), dict(batch), **options)
    return loss.detach(), torch.autograd.grad(loss, tuple(trainer.model.parameters()))


def test_loss_is_the_mean_cross_entropy_and_the_weighted_divergence(tmp_path, monkeypatch):
    model = tiny_model(dropout=0.3, label_smoothing=0.0)
    trainer = make_trainer(tmp_path, model, consistency_weight=5.0)
    batch = batch_of(trainer)
    monkeypatch.setattr(consistency, "BLOCK_SIZE", 3 * model.config.vocab_size)  # three tokens at once
    actual, gradients = loss_and_gradients(trainer, batch, num_items_in_batch=torch.tensor(11))

    torch.manual_seed(3)
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    logits = model(**{name: torch.cat((batch[name],) * 2) for name in names}, use_cache=False).logits
    first, second = logits.double().softmax(-1).chunk(2)
    expected = 0.0
    for row, position in (batch["labels"] != -100).nonzero().tolist():
        one, other, token = first[row, position], second[row, position], batch["labels"][row, position]
        assert not torch.equal(one, other)
        expected -= (one[token].log() + other[token].log()) / 2
        expected += 5 / 4 * ((one - other) * (one.log() - other.log())).sum()
    torch.testing.assert_close(actual.double(), expected.detach() / 11, rtol=1e-5, atol=1e-6)
    for gradient, plain in zip(gradients, torch.autograd.grad(expected / 11, tuple(model.parameters())), strict=True):
        torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gives_decoder_inputs", [True, False], ids=["from collator", "from labels"])
@pytest.mark.parametrize("smoothing_type", ["uniform", "t2t", "annotated"])
def test_without_dropout_it_is_the_plain_loss(tmp_path, smoothing_type, gives_decoder_inputs):
    model = tiny_model(dropout=0.0, label_smoothing=0.1, label_smoothing_type=smoothing_type)
    trainers = [make_trainer(tmp_path, model, consistency_weight=weight) for weight in (5.0, 0.0)]
    batch = batch_of(trainers[0])
    if not gives_decoder_inputs:
        del batch["decoder_input_ids"]
    (loss, gradients), (plain_loss, plain_gradients) = (loss_and_gradients(each, batch) for each in trainers)
    # other products: all tokens are projected, twice as many rows
    torch.testing.assert_close(loss, plain_loss, rtol=1e-5, atol=1e-6)
    for gradient, plain in zip(gradients, plain_gradients, strict=True):
        torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-6)
    losses = [each.evaluate(tiny_pairs())["eval_loss"] for each in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_batch_without_labels_has_zero_loss_and_gradients(tmp_path):
    trainer = make_trainer(tmp_path, tiny_model(dropout=0.3), consistency_weight=5.0)
    batch = batch_of(trainer)
    loss, gradients = loss_and_gradients(trainer, {**batch, "labels": torch.full_like(batch["labels"], -100)})
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)


def test_training_brings_the_predictions_together(tmp_path):
    def divergence(weight):
        trainer = make_trainer(
            tmp_path, tiny_model(dropout=0.2), consistency_weight=weight, max_steps=30, learning_rate=0.01, seed=5
        )
        trainer.train()
        measured = make_trainer(tmp_path, trainer.model, consistency_weight=1.0)
        parts = [loss_and_gradients(measured, batch_of(measured))[0]]
        measured.compute_loss_func.weight = 0.0
        parts.append(loss_and_gradients(measured, batch_of(measured))[0])
        return parts[0] - parts[1]

    assert divergence(20.0) < divergence(0.0) / 2


def test_other_models_and_weights_are_refused(tmp_path):
    bert = BertForMaskedLM(
        BertConfig(vocab_size=13, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=9)
    )
    with pytest.raises(
        ValueError, match=r"`consistency_weight` \(5.0\) is for a `VanillaTransformerFor.*, got a bert"
    ):
        make_trainer(tmp_path, bert, consistency_weight=5.0)
    with pytest.raises(ValueError, match=r"`label_smoothing_factor` \(0.1\) has no effect with `consistency_weight`"):
        make_trainer(tmp_path, tiny_model(), consistency_weight=5.0, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="`consistency_weight` must be finite and not negative, got -1"):
        make_trainer(tmp_path, tiny_model(), consistency_weight=-1)
