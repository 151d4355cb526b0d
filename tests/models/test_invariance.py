"""What may change how a model computes, but not what: batches, padding, caches, kernels, compilation, resuming.

`make scoreboard` writes the tolerances and the differences seen into the README of the models.
"""

import shutil
from functools import partial

import pytest
import torch
from tiny_berts import NO_DROPOUT, tiny_bert
from tiny_gpts import tiny_gpt
from tiny_models import tiny_model
from tiny_vits import tiny_vit
from transformers import Trainer, TrainingArguments


pytestmark = pytest.mark.promise("other ways to compute")

FAMILIES = {
    "encoder-decoder": tiny_model,
    "BERT": partial(tiny_bert, "masked-lm"),
    "GPT": tiny_gpt,
    "ViT": tiny_vit,
}
TEXTS = ("encoder-decoder", "BERT", "GPT")
WITHOUT_DROPOUT = {"encoder-decoder": dict(dropout=0.0), "BERT": NO_DROPOUT, "GPT": NO_DROPOUT, "ViT": {}}
DROPOUT = dict(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
WITH_DROPOUT = {"encoder-decoder": dict(dropout=0.2, attention_dropout=0.2), "BERT": DROPOUT, "GPT": DROPOUT}
LENGTH = 7


def batch(family, size):
    """Draw inputs with labels; texts are padded on the right, and every length occurs."""
    draw = torch.Generator().manual_seed(0)
    if family == "ViT":
        return {
            "pixel_values": torch.randn(size, 2, 12, 12, generator=draw),
            "labels": torch.randint(5, (size,), generator=draw),
        }
    ids = torch.randint(3, 13, (size, LENGTH), generator=draw)
    mask = (torch.arange(LENGTH) < LENGTH - torch.arange(size)[:, None] % 5).long()
    inputs = {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if family == "encoder-decoder":
        inputs["labels"] = torch.randint(3, 13, (size, 5), generator=draw)
    return inputs


def logits(model, inputs):
    """Return the logits of every row: at every position that is no padding."""
    with torch.no_grad():
        values = model.eval()(**inputs).logits
    if "attention_mask" in inputs and values.shape[:2] == inputs["attention_mask"].shape:
        return values[inputs["attention_mask"].bool()]
    return values.flatten(0, -2)


def trained(model, inputs):
    """Return the loss of training, and every gradient."""
    torch.manual_seed(0)
    model.train().zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_of_one_and_of_64(family, assert_invariant):
    model, inputs = FAMILIES[family](), batch(family, 64)
    rows = [{name: each[row : row + 1] for name, each in inputs.items()} for row in range(64)]
    alone = torch.cat([logits(model, row) for row in rows])
    assert_invariant("batch of 1 and of 64", family, logits(model, inputs), alone)


@pytest.mark.parametrize("family", TEXTS)
def test_padded_or_not(family, assert_invariant):
    model, inputs = FAMILIES[family](), batch(family, 5)
    alone = []
    for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        cut = {"input_ids": inputs["input_ids"][row : row + 1, :length]}
        if family == "encoder-decoder":
            cut["labels"] = inputs["labels"][row : row + 1]
        alone.append(logits(model, cut).view(-1, 13))
    assert_invariant("padded or not", family, logits(model, inputs), torch.cat(alone))


@pytest.mark.parametrize("family", ["encoder-decoder", "GPT"])  # BERT counts its positions from the left
def test_padding_left_or_right(family, assert_invariant):
    model, inputs = FAMILIES[family](), batch(family, 5)
    shifts = (LENGTH - inputs["attention_mask"].sum(1)).tolist()
    left = dict(inputs)
    for name in ("input_ids", "attention_mask"):
        left[name] = torch.stack([row.roll(shift) for row, shift in zip(inputs[name], shifts, strict=True)])
    assert_invariant("padding left or right", family, logits(model, left), logits(model, inputs))


@pytest.mark.parametrize("family", ["encoder-decoder", "GPT"])
def test_cached_or_not(family, assert_invariant):
    model, inputs = FAMILIES[family](), batch(family, 3)
    if family == "GPT":
        fixed, name, tokens = {}, "input_ids", torch.randint(3, 13, (3, LENGTH))
    else:
        fixed, name, tokens = {"attention_mask": inputs["attention_mask"]}, "decoder_input_ids", inputs["labels"]
        fixed["encoder_outputs"] = model.get_encoder()(inputs["input_ids"], attention_mask=fixed["attention_mask"])
    with torch.no_grad():
        expected = model(**fixed, **{name: tokens}).logits
        steps, past = [], None
        for step in range(tokens.shape[1]):
            fed = {**fixed, name: tokens[:, step : step + 1], "past_key_values": past}
            output = model(**fed, use_cache=True)
            past = output.past_key_values
            steps.append(output.logits)
    assert_invariant("cached or not", family, torch.cat(steps, dim=1), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_or_sdpa(family, assert_invariant):
    inputs = batch(family, 5)
    models = [FAMILIES[family](attn_implementation=each, **WITHOUT_DROPOUT[family]) for each in ("sdpa", "eager")]
    sdpa, eager = [{"logits": logits(model, inputs), **trained(model, inputs)} for model in models]
    assert_invariant("eager or SDPA, with gradients", family, sdpa, eager)


@pytest.mark.parametrize("family", TEXTS)
def test_packed_or_not(family, assert_invariant, no_shortcuts, fed_positions):
    model, inputs = FAMILIES[family](**WITHOUT_DROPOUT[family]), batch(family, 10)
    packed = trained(model, inputs)
    number = sum(fed_positions)
    no_shortcuts()
    plain = trained(model, inputs)
    assert number < sum(fed_positions) - number
    assert_invariant("packed or not, with gradients", family, packed, plain)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_or_not(family, reentrant, assert_invariant):
    model, inputs = FAMILIES[family](**WITH_DROPOUT.get(family, DROPOUT)), batch(family, 5)
    expected = trained(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_invariant("gradient checkpointing or not, with dropout", family, trained(model, inputs), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of parts of torch, in the compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_or_not(family, assert_invariant):
    # 6 rows: of 5, one input of a ReLU is 1e-7, so that rounding decides about its gradient
    model, inputs = FAMILIES[family](**WITHOUT_DROPOUT[family]), batch(family, 6)
    expected = {"logits": logits(model, inputs), **trained(model, inputs)}
    model.compile()
    actual = {"logits": logits(model, inputs), **trained(model, inputs)}
    assert_invariant("compiled or not, with gradients", family, actual, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_resumed_or_not(family, assert_invariant, tmp_path):
    inputs = batch(family, 12)
    rows = [{name: each[row] for name, each in inputs.items()} for row in range(12)]
    quiet = dict(use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, report_to="none")

    def weights(checkpoint):
        model = FAMILIES[family](**WITH_DROPOUT.get(family, DROPOUT))
        args = TrainingArguments(str(tmp_path), max_steps=4, save_steps=2, per_device_train_batch_size=3, **quiet)
        trainer = Trainer(model, args, train_dataset=rows)
        trainer.train(resume_from_checkpoint=checkpoint)
        return {name: each.detach().clone() for name, each in model.named_parameters()}

    whole = weights(None)
    assert_invariant("resumed or not", family, weights(str(tmp_path / "checkpoint-2")), whole, tolerance=0.0)
