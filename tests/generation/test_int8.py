"""Linear maps of 8-bit integers: within the error of rounding, on every CPU, and refused where they can't be."""

import copy
import pickle

import pytest
import torch
from text_translator import SENTENCES, save_translator
from tiny_translator import reversal_batch, trained_model
from torch import nn
from torch.testing import assert_close
from transformers import MarianConfig, MarianMTModel, pipeline

from hf_vanilla.generation import beam_search, cpu_layers, fast_model, load_translator, translate
from hf_vanilla.generation.cpu_layers import Int8Linear, PackedLinear, fastest_products
from hf_vanilla.generation.int8_products import LEVELS, weight_levels
from hf_vanilla.models.layers import FusedLinear
from hf_vanilla.precision import Precision


pytestmark = pytest.mark.skipif(not weight_levels(), reason="no products of 8-bit integers on this CPU")


@pytest.fixture(scope="module")
def model():
    return trained_model(steps=5)


def kinds(model):
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(50, 33), (1, 33), (3, 5, 33), (0, 33), (2, 0, 33)], ids=str)
@torch.no_grad()
def test_error_is_that_of_rounding(shape, bias, dtype):
    torch.manual_seed(0)
    linear, inputs = nn.Linear(33, 24, bias=bias).to(dtype), torch.randn(shape, dtype=dtype)
    output = Int8Linear(linear, rows=50)(inputs)
    exact = nn.functional.linear(inputs.double(), linear.weight.double(), linear.bias.double() if bias else None)
    assert (output.dtype, output.shape) == (dtype, exact.shape)
    # Half a unit of each input and each weight, and 1 % for the units' own rounding; bfloat16 and float16 round the
    # result to 8 and 11 bits.
    weight, rows = linear.weight.abs().double(), inputs.abs().double()
    of_weight = weight.amax(1) / (2 * weight_levels())
    of_input = (rows.amax(-1, keepdim=True) if rows.numel() else rows.sum(-1, keepdim=True)) / (2 * LEVELS)
    bound = rows.sum(-1, keepdim=True) * of_weight + of_input * weight.sum(1) + 33 * of_input * of_weight
    assert ((output - exact).abs() <= 1.01 * bound + torch.finfo(dtype).eps * exact.abs()).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_largest_sums_are_not_cut_off(sign):
    linear = nn.utils.skip_init(nn.Linear, 128, 24, bias=False).requires_grad_(False)
    linear.weight.fill_(0.5)
    output = Int8Linear(linear, rows=50)(torch.full((50, 128), sign * 3.0))
    assert_close(output, torch.full((50, 24), sign * 192.0), rtol=1e-5, atol=0)  # float32's rounding of the scales


def test_levels_are_found_by_any_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert weight_levels.__wrapped__() == weight_levels()
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def test_each_row_has_its_own_scale():
    torch.manual_seed(0)
    layer, inputs = Int8Linear(nn.Linear(33, 24), rows=5), torch.randn(6, 33)
    expected = layer(inputs)
    inputs[1] *= 1e6
    inputs[5] *= 1e-9
    inputs[2] = 0
    inputs[3, 4] = torch.nan
    output = layer(inputs)
    assert_close(output[[0, 4]], expected[[0, 4]])
    assert_close(output[2], layer.bias)
    without_bias = Int8Linear(nn.Linear(33, 24, bias=False), rows=5)
    assert_close(without_bias(inputs[5:] * 1e-9), without_bias(inputs[5:]) * 1e-9, rtol=1e-4, atol=0)
    assert output[3].isnan().all()


def test_copy_rounds_all_linear_maps_and_keeps_the_model(model):
    before, weights, batch = kinds(model), copy.deepcopy(model.state_dict()), reversal_batch(5)
    for fast in (fast_model(model, 1, "int8"), fast_model(fast_model(model, 100), 100, torch.int8)):
        assert {name for name, kind in kinds(fast).items() if kind is Int8Linear} == {
            name for name, kind in before.items() if kind in (nn.Linear, FusedLinear)
        }
        with torch.no_grad():
            logits, expected = fast(**batch).logits, model(**batch).logits
        assert not torch.equal(logits, expected)
        # Rounding gives 1.1 %, with weights of 7 bits and on the way through bfloat16 up to 2.2 %.
        assert (logits - expected).norm() < 0.04 * expected.norm()
        assert (fast.dtype, fast.device) == (model.dtype, model.device)
    assert kinds(model) == before
    assert_close(model.state_dict(), weights, rtol=0, atol=0)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))])
def test_copy_is_copied_and_saved_with_the_weights_themselves(model, duplicate, tmp_path):
    fast, batch = fast_model(model, 100, "int8"), reversal_batch(5)
    other = duplicate(fast)
    assert kinds(other) == kinds(fast)
    assert_close(other(**batch).logits, fast(**batch).logits, rtol=0, atol=0)
    fast.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert Int8Linear not in kinds(loaded).values()
    with pytest.raises(ValueError, match="can't load weights"):
        fast.load_state_dict(model.state_dict())


def test_converted_copy(model):
    batch = reversal_batch(5)
    expected = model(**batch).logits.detach()
    exact = fast_model(model, 100, "int8").double()(**batch).logits  # float64 is not rounded to 8 bits
    assert_close(exact, expected.double(), rtol=1e-4, atol=1e-5)
    for dtype in (torch.bfloat16, torch.float16):
        logits = fast_model(model, 100, "int8").to(dtype)(**batch).logits
        assert logits.dtype == dtype
        assert (logits - expected).norm() < 0.04 * expected.norm()


def test_search_does_not_round_the_weights_again(model, monkeypatch):
    fast, batch = fast_model(model, 100, "int8"), reversal_batch(5)
    monkeypatch.setattr(cpu_layers, "quantize_weight", None)
    options = {"num_beams": 4, "max_new_tokens": 7}
    found = fast_model(fast, 100).generate(batch["input_ids"], custom_generate=beam_search, **options)
    assert_close(found, fast.generate(batch["input_ids"], **options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_translator(tmp_path_factory.mktemp("translator"))


def test_translator_and_pipeline_in_int8(folder):
    model, tokenizer, _ = load_translator(folder, dtype="int8")
    assert Int8Linear in kinds(model).values()
    translator = pipeline("vanilla-translation", model=folder, dtype="int8", device="cpu")
    assert kinds(translator.model) == kinds(model)
    found = translate(model, tokenizer, SENTENCES, with_alignments=True)
    assert [row[0].text for row in found] == SENTENCES  # what it has been trained to copy, it copies with a margin
    assert [row["translation_text"] for row in translator(SENTENCES)] == SENTENCES


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_fastest_may_be_int8_only_if_allowed(folder, monkeypatch, dtype):
    monkeypatch.setattr(cpu_layers, "fastest_products", lambda *args: Precision(dtype, "measured"))
    for allow_int8 in (True, False):
        model, *_ = load_translator(folder, dtype="fastest", allow_int8=allow_int8)
        assert (Int8Linear in kinds(model).values()) == (allow_int8 and dtype == torch.int8)
    with pytest.raises(ValueError, match="`allow_int8` is for the `dtype` 'fastest', got the `dtype` 'float32'"):
        load_translator(folder, dtype="float32", allow_int8=True)


def test_products_are_measured():
    state = torch.random.get_rng_state()
    choice = fastest_products(torch.float32, torch.get_num_threads())
    assert choice.gflops.keys() == {torch.float32, torch.int8}
    ratio = choice.gflops[torch.int8] / choice.gflops[torch.float32]
    assert choice.dtype == (torch.int8 if ratio >= 1.2 else torch.float32)
    assert str(choice).startswith(f"{choice.name}: products of int8 run at ")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_can_not_be_rounded_is_refused(model, monkeypatch):
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    marian = MarianMTModel(MarianConfig(vocab_size=9, pad_token_id=0, **sizes, **heads))
    with pytest.raises(ValueError, match="only for models whose class declares .*got a MarianMTModel on cpu"):
        fast_model(marian, 100, "int8")
    with pytest.raises(ValueError, match="`dtype` must be 'int8' or None, got 'bfloat16'"):
        fast_model(model, 100, "bfloat16")
    with pytest.raises(ValueError, match="only for models whose class declares .* on meta; use a CPU"):
        fast_model(copy.deepcopy(model).to("meta"), 100, "int8")
    with pytest.raises(ValueError, match="only for models in float32.* got a model in float64; convert it first"):
        fast_model(copy.deepcopy(model).double(), 100, "int8")
    monkeypatch.setattr(cpu_layers, "weight_levels", lambda: 0)
    with pytest.raises(ValueError, match="`dtype` can't be 'int8' here: this build of torch has no products"):
        fast_model(model, 100, "int8")
    fastest_products.cache_clear()
    try:
        assert str(fastest_products(torch.bfloat16, 1)) == "bfloat16: this CPU has no products of 8-bit integers"
    finally:
        fastest_products.cache_clear()


def test_hooked_and_changed_maps_keep_their_type(model):
    changed = copy.deepcopy(model)
    changed.lm_head.register_forward_hook(lambda module, args, output: output * 0)
    fast = fast_model(changed, 100, "int8")
    assert type(fast.lm_head) is nn.Linear
    assert PackedLinear not in kinds(fast).values()
