"""A model's copy for a CPU has the same outputs, and the model is unchanged."""

import copy

import pytest
import torch
from tiny_translator import reversal_batch, trained_model
from torch import nn

from hf_vanilla.generation.cpu_layers import MIN_ROWS, PackedLinear, can_pack, fast_model, for_cpu
from hf_vanilla.models.layers import FusedLinear


packs_float32 = pytest.mark.skipif(not can_pack(torch.ones(1), MIN_ROWS), reason="no packed kernel for float32")


@pytest.fixture(scope="module")
def model():
    return trained_model(steps=5)


def kinds(module):
    return {name: type(child) for name, child in module.named_modules()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(50, 16), (1, 16), (3, 5, 16), (0, 16)], ids=str)
@torch.no_grad()
def test_packed_linear_equals_plain_linear(shape, bias, dtype):
    linear, hidden_states = nn.Linear(16, 24, bias=bias).to(dtype), torch.randn(shape, dtype=dtype)
    if not can_pack(linear.weight, 50):
        pytest.skip(f"no packed kernel for {dtype}")
    packed = PackedLinear(linear, rows=50)(hidden_states)
    assert packed.dtype == dtype
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(packed, linear(hidden_states), **tolerance)


def test_copy_computes_the_same(model):
    batch = reversal_batch(5)
    fast = fast_model(model, rows=100)
    with torch.no_grad():
        torch.testing.assert_close(fast(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fast(**batch).loss, model(**batch).loss)
    assert (fast.device, fast.dtype, fast.config) == (model.device, model.dtype, model.config)
    sequences = fast.generate(batch["input_ids"], num_beams=3, max_new_tokens=5)
    torch.testing.assert_close(sequences, model.generate(batch["input_ids"], num_beams=3, max_new_tokens=5))


@packs_float32
def test_copy_packs_all_linear_maps_and_keeps_the_model(model):
    before = kinds(model)
    fast = kinds(fast_model(model, rows=100))
    assert kinds(model) == before
    linear = [name for name, kind in before.items() if kind in (nn.Linear, FusedLinear)]
    assert len(linear) == 1 + 4 * 1 + 7 * 3  # the output, one encoder layer, three decoder layers
    assert all(fast[name] is PackedLinear for name in linear)
    assert {name: kind for name, kind in fast.items() if name not in linear} == {
        name: kind for name, kind in before.items() if name not in linear
    }


def test_copy_shares_other_weights(model):
    fast = fast_model(model, rows=100)
    assert fast.model.decoder.embed_tokens is model.model.decoder.embed_tokens
    assert fast.model.encoder.layers[0] is not model.model.encoder.layers[0]


def test_decoder_attention_is_eager_only_in_the_copy(model):
    fast = fast_model(model, rows=100)
    assert fast.model.decoder.layers[0].self_attn.config._attn_implementation == "eager"
    assert fast.model.decoder.layers[0].cross_attn.config._attn_implementation == "eager"
    assert fast.model.encoder.layers[0].self_attn.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "sdpa"
    assert model.model.decoder.layers[0].self_attn.config._attn_implementation == "sdpa"


@packs_float32
def test_few_rows_are_not_packed(model):
    assert PackedLinear not in kinds(for_cpu(model.lm_head, MIN_ROWS - 1)).values()
    assert PackedLinear in kinds(for_cpu(model.lm_head, MIN_ROWS)).values()


def test_changed_linear_maps_are_not_packed(model):
    changed = copy.deepcopy(model)
    changed.lm_head.register_forward_hook(lambda module, args, output: output * 0)
    changed.model.decoder.layers[0].feed_forward.fc1 = type("Adapter", (nn.Linear,), {})(16, 24)
    fast = fast_model(changed, rows=100)
    assert fast.lm_head is changed.lm_head
    assert type(fast.model.decoder.layers[0].feed_forward.fc1).__name__ == "Adapter"
    double = copy.deepcopy(model).double()
    assert PackedLinear not in kinds(fast_model(double, rows=100)).values()


def test_other_models_are_not_copied():
    other = nn.Linear(2, 3)
    assert fast_model(other, rows=100) is other  # type: ignore[arg-type]
