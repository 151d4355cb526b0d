"""Every head equals transformers' own BERT with the same weights: outputs, loss and gradients."""

import pytest
import torch
from tiny_berts import MASK, NO_DROPOUT, TASKS, native_bert, tiny_bert
from transformers import BertConfig


TOLERANCE = dict(rtol=1e-5, atol=1e-5)
EXACT = dict(rtol=1e-6, atol=1e-6)  # float64
pytestmark = pytest.mark.parametrize("task", TASKS)


@pytest.fixture
def saved(task, tmp_path):
    native = native_bert(task, **NO_DROPOUT)
    native.save_pretrained(tmp_path)
    return native, tmp_path


def original_gradients(model, folder):
    """Save the gradients as weights, so that they get BERT's names."""
    for parameter in model.parameters():
        parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
def test_outputs_equal_those_of_transformers(task, saved, kernel, padded):
    native, folder = saved
    model = TASKS[task][0].from_pretrained(folder, attn_implementation=kernel).eval()
    inputs = dict(TASKS[task][3])
    if not padded:
        del inputs["attention_mask"], inputs["token_type_ids"]
    with torch.no_grad():
        actual, expected = model(**inputs), native(**inputs)
    assert set(actual.keys()) == set(expected.keys())
    for name in expected:
        if padded and name == "last_hidden_state":  # outputs at padding are undefined
            torch.testing.assert_close(actual[name] * MASK[..., None], expected[name] * MASK[..., None], **TOLERANCE)
        else:
            torch.testing.assert_close(actual[name], expected[name], **TOLERANCE)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_gradients_equal_those_of_transformers_in_training_mode(task, saved, kernel, tmp_path):
    native, folder = saved
    model_class, native_class, _, inputs = TASKS[task]
    model = model_class.from_pretrained(folder, attn_implementation=kernel, dtype=torch.float64, **NO_DROPOUT)
    for each in (model, native.double()):
        outputs = each.train()(**inputs)
        loss = (outputs.last_hidden_state * MASK[..., None]).square().mean() if task == "model" else outputs.loss
        loss.backward()
    options = {"config": BertConfig.from_pretrained(folder), "dtype": torch.float64}
    ours = native_class.from_pretrained(original_gradients(model, tmp_path / "ours"), **options)
    theirs = native_class.from_pretrained(original_gradients(native, tmp_path / "theirs"), **options)
    for (name, actual), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
        # A bias of all keys, or of all positions of an answer, adds the same to each score: its gradient is 0.
        has_none = name.endswith(("key.bias", "qa_outputs.bias")) or (task == "model" and "pooler" in name)
        assert expected.abs().sum() > 0 or has_none, name


def test_saved_weights_are_bit_equal_in_transformers(task, saved, tmp_path):
    native, folder = saved
    TASKS[task][0].from_pretrained(folder).save_pretrained(tmp_path / "ours")
    again, info = TASKS[task][1].from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    wanted = native.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


def test_saved_model_loads_in_transformers(task, tmp_path):
    model = tiny_bert(task)
    model.save_pretrained(tmp_path / "own-names", save_original_format=False)
    model = TASKS[task][0].from_pretrained(tmp_path / "own-names").eval()
    model.save_pretrained(tmp_path)
    native, info = TASKS[task][1].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        actual, expected = native.eval()(**TASKS[task][3]), model(**TASKS[task][3])
    first = "last_hidden_state" if task == "model" else "loss"
    scale = MASK[..., None] if task == "model" else 1
    torch.testing.assert_close(actual[first] * scale, expected[first] * scale, **TOLERANCE)


@pytest.mark.parametrize("original", [True, False], ids=["original-names", "own-names"])
def test_both_formats_reload_bit_equal(task, tmp_path, original):
    model = tiny_bert(task)
    model.save_pretrained(tmp_path, save_original_format=original)
    again, info = TASKS[task][0].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
