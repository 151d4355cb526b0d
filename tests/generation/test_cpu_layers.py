"""A model's copy for a CPU has the same outputs, and the model is unchanged."""

import copy
import pickle

import pytest
import torch
from searching import assert_same, search, search_stock
from tiny_translator import reversal_batch, trained_model
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

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
    assert_close(packed, linear(hidden_states), **tolerance)


@packs_float32
@torch.no_grad()
def test_copy_computes_under_autocast(model):
    batch, fast = reversal_batch(5), fast_model(model, rows=100)
    with torch.autocast("cpu", torch.bfloat16):
        # sums of bfloat16 products, at some layers of the copy of float32 ones
        assert_close(fast(**batch).logits.float(), model(**batch).logits.float(), rtol=0.05, atol=0.05)


def test_copy_computes_the_same(model):
    batch = reversal_batch(5)
    fast = fast_model(model, rows=100)
    with torch.no_grad():
        assert_close(fast(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-5)
        assert_close(fast(**batch).loss, model(**batch).loss)
    assert (fast.device, fast.dtype, fast.config) == (model.device, model.dtype, model.config)
    sequences = fast.generate(batch["input_ids"], num_beams=3, max_new_tokens=5)
    assert_close(sequences, model.generate(batch["input_ids"], num_beams=3, max_new_tokens=5))


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


def test_copy_shares_the_memory_of_all_weights(model):
    fast = fast_model(model, rows=100)
    assert fast.model.encoder.embed_tokens.weight is fast.model.decoder.embed_tokens.weight
    addresses = {name: parameter.data_ptr() for name, parameter in fast.named_parameters()}
    assert addresses == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))])
def test_copy_is_saved_copied_and_pickled_with_all_weights(model, duplicate, tmp_path):
    fast = fast_model(model, rows=100)
    fast.save_pretrained(tmp_path)
    batch = reversal_batch(5)
    expected = fast(**batch).logits
    for other in (duplicate(fast), type(model).from_pretrained(tmp_path)):
        assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
        assert_close(fast_model(other, rows=100)(**batch).logits, expected, rtol=0, atol=0)
    assert kinds(duplicate(fast)) == kinds(fast)


def test_changing_the_copy_keeps_the_model(model):
    before = copy.deepcopy(model.state_dict())
    fast, batch = fast_model(model, rows=100).double(), reversal_batch(5)
    # the copy computes in float64: 1e-5 is float32's rounding over four layers
    assert_close(fast(**batch).logits, model(**batch).logits.double(), rtol=1e-4, atol=1e-5)
    fast.resize_token_embeddings(40)
    fast.lm_head.register_forward_hook(lambda module, args, output: output * 0)
    assert fast_model(model, rows=100).train()(**batch).loss.requires_grad is False
    with pytest.raises(ValueError, match="can't load weights, which it shares with its model"):
        fast_model(model, rows=100).load_state_dict(before)
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert (model.config.vocab_size, model.dtype, model.training) == (30, torch.float32, False)
    assert not model.lm_head._forward_hooks


def test_decoder_attention_is_eager_only_in_the_copy(model):
    fast = fast_model(model, rows=100)
    assert fast.model.decoder.layers[0].self_attn.config._attn_implementation == "eager"
    assert fast.model.decoder.layers[0].cross_attn.config._attn_implementation == "eager"
    assert fast.model.encoder.layers[0].self_attn.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "sdpa"
    assert model.model.decoder.layers[0].self_attn.config._attn_implementation == "sdpa"


def test_attention_of_ones_own_stays_in_the_copy(model):
    calls = []

    def attend(*args, **kwargs):
        calls.append(args[0])
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("counted", attend)
    AttentionMaskInterface.register("counted", sdpa_mask)
    changed = copy.deepcopy(model)
    changed.set_attn_implementation("counted")
    batch, counts = reversal_batch(5), []
    for each in (changed, fast_model(changed, 100)):
        calls.clear()
        each(**batch)
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


@packs_float32
def test_few_rows_are_not_packed(model):
    assert PackedLinear not in kinds(for_cpu(model.lm_head, MIN_ROWS - 1)).values()
    assert PackedLinear in kinds(for_cpu(model.lm_head, MIN_ROWS)).values()


def test_changed_linear_maps_are_not_packed(model):
    changed = copy.deepcopy(model)
    changed.lm_head.register_forward_hook(lambda module, args, output: output * 0)
    changed.model.decoder.layers[0].feed_forward.fc1 = type("Adapter", (nn.Linear,), {})(16, 24)
    fast = fast_model(changed, rows=100)
    assert type(fast.lm_head) is nn.Linear
    with torch.no_grad():
        assert not fast(**reversal_batch(5)).logits.any()
    assert type(fast.model.decoder.layers[0].feed_forward.fc1).__name__ == "Adapter"
    changed.lm_head.forward = lambda hidden_states: hidden_states[..., :1] * 0 + 3
    changed.lm_head._forward_hooks.clear()
    assert (for_cpu(changed.lm_head, 100)(torch.ones(50, 16)) == 3).all()
    double = copy.deepcopy(model).double()
    assert PackedLinear not in kinds(fast_model(double, rows=100)).values()


def test_other_models_are_not_copied():
    other = nn.Linear(2, 3)
    assert fast_model(other, rows=100) is other  # type: ignore[arg-type]


def test_parametrized_maps_are_copied(model):
    changed, batch = copy.deepcopy(model), reversal_batch(9)
    weight_norm(changed.model.decoder.layers[0].feed_forward.fc1)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"num_beams": 4, "max_new_tokens": 5}
    for each in (changed, fast_model(changed, 100)):
        assert_same(search(each, inputs, **options), search_stock(changed, inputs, **options))


def test_number_of_rows_is_checked(model):
    with pytest.raises(TypeError, match="`rows` must be an integer, got '64'"):
        fast_model(model, "64")


def test_copy_has_its_own_generation_config(model):
    fast_model(model, 9).generation_config.num_beams = 4
    assert model.generation_config.num_beams != 4
