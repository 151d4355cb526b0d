"""Every layer equals its formula written as loops, outputs and gradients, in double precision."""

import functools
import itertools
import math

import pytest
import torch
from reference import (
    layer_norm,
    marian_positions,
    multi_head_attention,
    paper_positions,
    timing_signal_1d,
)
from tiny_models import SOURCE, SOURCE_MASK, TARGET, tiny_config, tiny_model
from torch import nn
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from hf_vanilla import VanillaTransformerForConditionalGeneration
from hf_vanilla.models import dropout as dropout_module
from hf_vanilla.models import layers
from hf_vanilla.models.dropout import dropout, dropout_noise
from hf_vanilla.models.layers import (
    RESIDUALS,
    CrossAttention,
    FusedLinear,
    PositionwiseFeedForward,
    PostNormResidual,
    PreNormResidual,
    SelfAttention,
    sinusoidal_positions,
)
from hf_vanilla.models.sequences import positions_of


KERNELS = ("eager", "sdpa")
MASKS = ("none", "padded", "causal", "causal and padded")


@pytest.fixture
def always_sdpa(monkeypatch):
    """Count calls of torch's kernel, with the path for short sequences switched off."""
    calls = []
    kernel = nn.functional.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(args[0].shape)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(layers, "SHORT_SEQUENCE", -1)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counted)
    return calls


def config_for(kernel, **overrides):
    config = tiny_config(**overrides)
    config._attn_implementation = kernel
    return config


def random_module(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return module.double().eval()


def random_states(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def self_mask(kind, length):
    """Which keys each query of 2 sentences may attend to: (2, length, length); the second ends in padding."""
    allowed = torch.ones(2, length, length, dtype=torch.bool)
    if "padded" in kind:
        allowed[1, :, max(length - 2, 1) :] = False
    if "causal" in kind:
        allowed = allowed & torch.ones(length, length, dtype=torch.bool).tril()
    return allowed


def matrices_of(module):
    """The matrices of an attention module under their names in the paper."""
    if isinstance(module, SelfAttention):
        names, weight, bias, sizes = "qkv", module.qkv_proj.weight, module.qkv_proj.bias, module.qkv_sizes
        matrices = dict(zip(names, weight.split(sizes), strict=True))
        biases = dict(zip(names, bias.split(sizes), strict=True))
    else:
        matrices = dict(zip("kv", module.kv_proj.weight.split(module.kv_sizes), strict=True), q=module.q_proj.weight)
        biases = dict(zip("kv", module.kv_proj.bias.split(module.kv_sizes), strict=True), q=module.q_proj.bias)
    matrices["o"], biases["o"] = module.out_proj.weight, module.out_proj.bias
    return matrices | {f"{name}_bias": bias for name, bias in biases.items()}


def assert_equal_with_gradients(actual, expected, inputs):
    """Compare two results, and their gradients in one random direction."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    direction = torch.randn_like(expected)
    actual_gradients = torch.autograd.grad((actual * direction).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * direction).sum(), inputs)
    for ours, theirs in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


EXAMPLE_INPUTS = torch.tensor([[1.0, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]])
EXAMPLE_KEY = torch.tensor([[0.0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0]])
EXAMPLE_QUERY = torch.tensor([[1.0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]])
EXAMPLE_VALUE = torch.tensor([[0.0, 2, 0], [0, 3, 0], [1, 0, 3], [1, 1, 0]])
EXAMPLE_OUTPUTS = {
    1.0: [[1.9366, 6.6831, 1.5951], [2.0000, 7.9640, 0.0540], [1.9997, 7.7599, 0.3584]],
    None: [[1.8639, 6.3194, 1.7042], [1.9991, 7.8141, 0.2735], [1.9926, 7.4796, 0.7359]],
}


def example_module(kernel, attention_scale):
    """One head of width 3 in a model of width 4, whose W_O is the identity with a row of zeros below it."""
    config = config_for(kernel, d_model=4, num_heads=1, d_k=3, d_v=3, attention_scale=attention_scale)
    module = SelfAttention(config).eval()
    with torch.no_grad():
        module.qkv_proj.weight.copy_(torch.cat((EXAMPLE_QUERY, EXAMPLE_KEY, EXAMPLE_VALUE), dim=1).T)
        module.qkv_proj.bias.zero_()
        module.out_proj.weight.copy_(torch.eye(4, 3))
        module.out_proj.bias.zero_()
    return module


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("attention_scale", EXAMPLE_OUTPUTS, ids=["unscaled", "scaled"])
def test_worked_example_agrees_to_four_decimals(kernel, attention_scale):
    module = example_module(kernel, attention_scale)
    expected = torch.tensor(EXAMPLE_OUTPUTS[attention_scale])
    for differentiable in (False, True):
        with torch.set_grad_enabled(differentiable):
            output = module(EXAMPLE_INPUTS[None])[0][0]
        torch.testing.assert_close(output[:, :3], expected, rtol=0, atol=5e-5)
        assert (output[:, 3] == 0).all()


def test_worked_example_has_the_intermediate_values_of_the_text():
    module = example_module("eager", 1.0)
    with torch.no_grad():
        query, key, value = module.qkv_proj(EXAMPLE_INPUTS).split(module.qkv_sizes, dim=-1)
        weights = module(EXAMPLE_INPUTS[None])[1][0, 0]
    assert query.tolist() == [[1, 0, 2], [2, 2, 2], [2, 1, 3]]
    assert key.tolist() == [[0, 1, 1], [4, 4, 0], [2, 3, 1]]
    assert value.tolist() == [[1, 2, 3], [2, 8, 0], [2, 6, 3]]
    assert (query @ key.T).tolist() == [[2, 4, 4], [4, 16, 12], [4, 12, 10]]
    expected = torch.tensor([[0.0634, 0.4683, 0.4683], [6e-6, 0.9820, 0.0180], [3e-4, 0.8805, 0.1192]])
    torch.testing.assert_close(weights, expected, rtol=0, atol=6e-5)


@pytest.mark.parametrize("length", [1, 7, 13])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_self_attention_equals_loops(kernel, kind, length):
    module = random_module(SelfAttention(config_for(kernel), is_causal="causal" in kind))
    hidden_states = random_states(2, length, 16)
    allowed = self_mask(kind, length)
    # without padding, transformers' mask functions return no mask, and the kernels apply `is_causal`
    mask = allowed[:, None] if "padded" in kind else None
    actual = module(hidden_states, mask)[0]
    expected = multi_head_attention(hidden_states, hidden_states, matrices_of(module), 4, allowed, 3**-0.5)
    assert_equal_with_gradients(actual, expected, [hidden_states, *module.parameters()])


@pytest.mark.parametrize("kind", MASKS)
def test_torch_kernel_equals_loops(always_sdpa, kind):
    module = random_module(SelfAttention(config_for("sdpa"), is_causal="causal" in kind))
    hidden_states = random_states(2, 7, 16)
    allowed = self_mask(kind, 7)
    actual = module(hidden_states, allowed[:, None] if "padded" in kind else None)[0]
    expected = multi_head_attention(hidden_states, hidden_states, matrices_of(module), 4, allowed, 3**-0.5)
    assert_equal_with_gradients(actual, expected, [hidden_states, *module.parameters()])
    assert always_sdpa == [(2, 4, 7, 3)]


def test_short_sequences_and_dropout_skip_the_torch_kernel_in_training(always_sdpa, monkeypatch):
    module = random_module(SelfAttention(config_for("sdpa", attention_dropout=0.1))).bfloat16().train()
    module(random_states(2, 8, 16).bfloat16())
    assert always_sdpa == []
    module.double()(random_states(2, 8, 16))
    assert always_sdpa == [(2, 4, 8, 3)]
    always_sdpa.clear()
    module = random_module(SelfAttention(config_for("sdpa"))).train()
    monkeypatch.setattr(layers, "SHORT_SEQUENCE", 7)
    module(random_states(2, 7, 16))
    assert always_sdpa == []
    with torch.no_grad():  # as in the first pass of a checkpointed layer
        module(random_states(2, 7, 16))
    assert always_sdpa == []
    module(random_states(2, 8, 16))
    module.eval()(random_states(2, 7, 16))
    assert always_sdpa == [(2, 4, 8, 3), (2, 4, 7, 3)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("query_len", "key_len"), [(1, 1), (7, 5), (1, 13)], ids=str)
def test_cross_attention_equals_loops(kernel, query_len, key_len):
    module = random_module(CrossAttention(config_for(kernel)))
    hidden_states, encoder_hidden_states = random_states(2, query_len, 16), random_states(2, key_len, 16, seed=2)
    allowed = torch.ones(2, query_len, key_len, dtype=torch.bool)
    allowed[1, :, max(key_len - 2, 1) :] = False
    actual = module(hidden_states, encoder_hidden_states, allowed[:, None])[0]
    expected = multi_head_attention(hidden_states, encoder_hidden_states, matrices_of(module), 4, allowed, 3**-0.5)
    assert_equal_with_gradients(actual, expected, [hidden_states, encoder_hidden_states, *module.parameters()])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("query_len", [1, 7])
def test_target_rows_that_share_a_source_equal_rows_with_repeated_sources(kernel, query_len):
    module = random_module(CrossAttention(config_for(kernel)))
    hidden_states, encoder_hidden_states = random_states(6, query_len, 16), random_states(2, 5, 16, seed=2)
    mask = SOURCE_MASK.bool()[:, None, None].expand(2, 1, query_len, 5)
    actual, weights = module(hidden_states, encoder_hidden_states, mask)
    repeated = [states.repeat_interleave(3, dim=0) for states in (encoder_hidden_states, mask)]
    expected, expected_weights = module(hidden_states, *repeated)
    assert_equal_with_gradients(actual, expected, [hidden_states, encoder_hidden_states, *module.parameters()])
    if kernel == "eager":
        assert weights.shape == (6, 4, query_len, 5)
        torch.testing.assert_close(weights, expected_weights)
    else:
        assert weights is None


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_scale_is_the_factor_of_the_scores(kernel):
    module = random_module(SelfAttention(config_for(kernel, attention_scale=0.25)))
    hidden_states = random_states(2, 7, 16)
    expected = multi_head_attention(
        hidden_states, hidden_states, matrices_of(module), 4, self_mask("none", 7), scaling=0.25
    )
    torch.testing.assert_close(module(hidden_states)[0], expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("differentiable", [True, False], ids=["gradients", "no gradients"])
def test_masked_keys_do_not_change_the_output(kernel, differentiable):
    module = random_module(SelfAttention(config_for(kernel)))
    hidden_states = random_states(2, 7, 16).detach()
    mask = self_mask("padded", 7)[:, None]
    changed = hidden_states.clone()
    changed[1, 5:] = 1e6
    with torch.set_grad_enabled(differentiable):
        before, after = module(hidden_states, mask)[0], module(changed, mask)[0]
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1, :5], after[1, :5])


@pytest.mark.parametrize("kernel", KERNELS)
def test_later_positions_do_not_change_earlier_outputs(kernel):
    module = random_module(SelfAttention(config_for(kernel), is_causal=True))
    hidden_states = random_states(2, 7, 16).detach()
    changed = hidden_states.clone()
    changed[:, 4:] = 1e6
    assert torch.equal(module(hidden_states)[0][:, :4], module(changed)[0][:, :4])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("differentiable", [True, False], ids=["gradients", "no gradients"])
def test_row_of_padding_is_finite_and_does_not_change_the_others(kernel, dtype, differentiable):
    module = random_module(SelfAttention(config_for(kernel))).to(dtype)
    hidden_states = random_states(2, 7, 16).detach().to(dtype)
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    with torch.set_grad_enabled(differentiable):
        expected = module(hidden_states, mask)[0]
        mask[1] = False
        output = module(hidden_states, mask)[0]
    assert output.isfinite().all()
    assert torch.equal(output[0], expected[0])
    if differentiable:
        output.float().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropped_attention_weights_are_scaled_up(kernel):
    module = random_module(SelfAttention(config_for(kernel, attention_dropout=0.5)))
    hidden_states = random_states(2, 7, 16).detach()
    with torch.no_grad():
        expected = module(hidden_states)[0]
        module.train()
        samples = torch.stack([module(hidden_states)[0] for _ in range(1000)])
    deviation = samples.std(0)
    assert (deviation > 0.1).all()
    assert ((samples.mean(0) - expected).abs() < 5 * deviation / math.sqrt(1000)).all()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_feed_forward_equals_the_formula_at_each_position(activation):
    module = random_module(PositionwiseFeedForward(tiny_config(activation_function=activation)))
    hidden_states = random_states(2, 7, 16)
    first, second = module.fc1, module.fc2

    def at_one_position(vector):
        inner = first.weight @ vector + first.bias
        inner = torch.where(inner > 0, inner, 0.0) if activation == "relu" else inner * torch.special.ndtr(inner)
        return second.weight @ inner + second.bias

    expected = torch.stack([torch.stack([at_one_position(vector) for vector in row]) for row in hidden_states])
    assert_equal_with_gradients(module(hidden_states), expected, [hidden_states, *module.parameters()])


def test_activation_dropout_is_inside_the_feed_forward_network():
    module = random_module(PositionwiseFeedForward(tiny_config(d_ff=512, activation_dropout=0.5))).float()
    module.fc1.weight.data.zero_()
    module.fc1.bias.data.fill_(1.0)
    module.fc2.weight.data.fill_(1.0)
    module.fc2.bias.data.zero_()
    output = module.train()(torch.zeros(2, 7, 16))
    assert set((output / 2.0).remainder(1).flatten().tolist()) == {0.0}  # kept units count 1 / (1 - 0.5)
    assert len(output[..., 0].unique()) > 5
    assert (output - 512).abs().max() < 6 * math.sqrt(512)


@pytest.mark.parametrize(("residual", "name"), [(PostNormResidual, "post"), (PreNormResidual, "pre")])
def test_residual_equals_the_formula(residual, name):
    module = random_module(residual(tiny_config(layer_norm_eps=1e-3)))
    sublayer = random_module(nn.Linear(16, 16), seed=3)
    hidden_states = random_states(2, 7, 16)
    norm = functools.partial(layer_norm, weight=module.layer_norm.weight, bias=module.layer_norm.bias, epsilon=1e-3)
    expected = torch.stack(
        [
            torch.stack(
                [
                    norm(vector + sublayer(vector)) if name == "post" else vector + sublayer(norm(vector))
                    for vector in row
                ]
            )
            for row in hidden_states
        ]
    )
    actual = module.after(hidden_states, sublayer(module.before(hidden_states)))
    assert_equal_with_gradients(actual, expected, [hidden_states, *module.parameters(), *sublayer.parameters()])


@pytest.mark.parametrize("residual", [PostNormResidual, PreNormResidual])
def test_residual_dropout_applies_to_the_sublayer_only(residual):
    module = residual(tiny_config(dropout=0.5)).train()
    module.layer_norm = nn.Identity()
    output = module.after(torch.full((2, 7, 16), 8.0), torch.ones(2, 7, 16))
    assert set(output.unique().tolist()) == {8.0, 10.0}


FORMULAS = {"sinusoidal": paper_positions, "sinusoidal_split": marian_positions, "sinusoidal_t2t": timing_signal_1d}


@pytest.mark.parametrize("d_model", [2, 6, 16])
@pytest.mark.parametrize("position_type", FORMULAS)
def test_sinusoids_equal_their_formula(position_type, d_model):
    actual = sinusoidal_positions(torch.arange(200), d_model, position_type)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), FORMULAS[position_type](200, d_model), rtol=0, atol=3e-5)


def test_split_sinusoids_equal_the_table_of_transformers_marian():
    table = MarianSinusoidalPositionalEmbedding(50, 16)
    expected = table.create_weight()
    torch.testing.assert_close(sinusoidal_positions(torch.arange(50), 16, "sinusoidal_split"), expected.float())


def test_split_sinusoids_are_the_interleaved_ones_in_another_order():
    interleaved = sinusoidal_positions(torch.arange(9), 16, "sinusoidal")
    split = sinusoidal_positions(torch.arange(9), 16, "sinusoidal_split")
    assert torch.equal(torch.cat((interleaved[:, 0::2], interleaved[:, 1::2]), dim=1), split)


def test_sinusoids_have_no_maximum_position():
    far = sinusoidal_positions(torch.tensor([[100_000]]), 16, "sinusoidal")
    assert far.shape == (1, 1, 16)
    angles = [100_000 / 10000 ** (2 * i / 16) for i in range(8)]
    expected = list(itertools.chain.from_iterable((math.sin(angle), math.cos(angle)) for angle in angles))
    torch.testing.assert_close(far[0, 0].double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=0.02)


def test_positions_skip_padding_on_either_side():
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    positions = positions_of(mask, 5, 0, mask.device)
    assert positions[0].tolist() == [0, 1, 2, 3, 4]
    assert positions[1, :3].tolist() == [0, 1, 2]
    assert positions[2, 2:].tolist() == [0, 1, 2]
    assert positions.min() >= 0
    assert positions.max() <= 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
def test_positions_continue_after_the_cache(dtype):
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).to(dtype)
    assert positions_of(mask, 2, 3, mask.device).tolist() == [[3, 4], [1, 2]]
    assert positions_of(None, 2, 3, mask.device).tolist() == [[3, 4]]


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(301, 1001), (3, 7, 14351)], ids=str)
def test_dropout_has_the_rate_and_the_scale_of_torch(shape, rate):
    ones = torch.ones(shape)
    for dropped in (dropout(ones, rate, training=True), nn.functional.dropout(ones, rate)):
        zeros = (dropped == 0).double().mean().item()
        deviation = math.sqrt(rate * (1 - rate) / ones.numel())
        assert abs(zeros - rate) < 5 * deviation + 2**-16
        torch.testing.assert_close(dropped.unique(), torch.tensor([0.0, 1 / (1 - rate)]))
        assert abs(dropped.mean().item() - 1) < 5 * deviation / (1 - rate) + 2**-15


def test_dropped_elements_are_independent_of_their_neighbours():
    noise = dropout_noise(torch.Size([400_000]), 0.3, torch.device("cpu")).float()
    for lag in (1, 2, 3, 4, 5, 8, 1000):
        product = ((noise[lag:] - 0.7) * (noise[:-lag] - 0.7)).mean() / (0.3 * 0.7)
        assert abs(product.item()) < 5 / math.sqrt(400_000), lag
    for residue in range(4):  # four elements come from one random number
        assert abs(noise[residue::4].mean().item() - 0.7) < 5 * math.sqrt(0.21 / 100_000)


def test_dropout_depends_on_the_seed_and_differs_between_calls():
    ones = torch.ones(2, 7, 16)
    torch.manual_seed(5)
    first, second = dropout(ones, 0.5, training=True), dropout(ones, 0.5, training=True)
    torch.manual_seed(5)
    assert torch.equal(dropout(ones, 0.5, training=True), first)
    assert not torch.equal(first, second)
    torch.manual_seed(6)
    assert not torch.equal(dropout(ones, 0.5, training=True), first)


def test_dropout_is_the_identity_in_evaluation_and_at_rate_zero():
    states = torch.randn(2, 7, 16)
    assert dropout(states, 0.5, training=False) is states
    assert dropout(states, 0.0, training=True) is states


@pytest.mark.parametrize("rate", [0.99, 0.99999, 0.999999])
def test_dropout_at_rates_near_one_drops_nearly_all(rate):
    noise = dropout_noise(torch.Size([100_000]), rate, torch.device("cpu"))
    assert noise.float().mean() < 1.5 * (1 - rate) + 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rate", [0.1, 0.37])
def test_dropout_multiplies_by_its_noise_and_scale(dtype, rate):
    states = torch.randn(16, 7, 3, dtype=dtype).transpose(0, 1).requires_grad_()
    direction = torch.randn(7, 16, 3, dtype=dtype)
    torch.manual_seed(5)
    output = dropout(states, rate, training=True)
    torch.manual_seed(5)
    noise = dropout_noise(states.shape, rate, states.device)
    assert (noise.shape, noise.dtype) == ((7, 16, 3), torch.int8)
    assert set(noise.unique().tolist()) == {0, 1}
    scale = torch.tensor(1 / (1 - rate), dtype=dtype)
    assert torch.equal(output, states * (noise.to(dtype) * scale))
    (gradient,) = torch.autograd.grad(output, states, direction)
    assert torch.equal(gradient, direction * (noise.to(dtype) * scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_keeps_the_device_of_its_input(dtype):
    with torch.device("meta"):
        assert dropout(torch.ones(2, 7, dtype=dtype, device="cpu"), 0.5, training=True).device.type == "cpu"


def test_dropout_saves_one_byte_per_element_for_backward():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        dropout(torch.randn(2, 7, 16, dtype=torch.bfloat16, requires_grad=True), 0.5, training=True)
    assert [(tensor.dtype, tensor.numel()) for tensor in kept] == [(torch.int8, 2 * 7 * 16)]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch warns of its own forward mode
def test_dropout_supports_second_forward_and_mapped_derivatives():
    states = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)

    def dropped(states):
        torch.manual_seed(5)
        return dropout(states, 0.5, training=True) ** 2

    assert torch.autograd.gradcheck(dropped, states, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(dropped, states)
    row_by_row = torch.func.vmap(torch.func.grad(lambda row: dropped(row).sum()), randomness="same")(states)
    torch.testing.assert_close(row_by_row[1], torch.func.grad(lambda row: dropped(row).sum())(states[1]))
    one, other = torch.func.vmap(lambda row: dropout(row, 0.5, training=True), randomness="different")(states) != 0
    assert not torch.equal(one, other)  # 20 units each


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_residual_accepts_a_half_precision_sublayer(norm_position):
    residual = RESIDUALS[norm_position](tiny_config(norm_position=norm_position, d_model=16, dropout=0.5)).train()
    states = torch.randn(2, 7, 16)
    torch.manual_seed(5)
    output = residual.after(states, torch.ones_like(states, dtype=torch.bfloat16))
    torch.manual_seed(5)
    expected = states + 2 * dropout_noise(states.shape, 0.5, states.device)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, residual.layer_norm(expected) if norm_position == "post" else expected)


def test_dropout_is_applied_as_in_the_paper_with_independent_noise(monkeypatch):
    noises = []

    def recorded(*args):
        noises.append(dropout_noise(*args))
        return noises[-1]

    monkeypatch.setattr(dropout_module, "dropout_noise", recorded)
    model = tiny_model(dropout=0.5, d_model=64).train()
    model(SOURCE, decoder_input_ids=TARGET)
    # the embeddings of both sides, 2 sub-layers in each of 2 encoder layers, 3 in each of 3 decoder layers
    assert [noise.shape[1] for noise in noises] == [5] * (1 + 2 * 2) + [7] * (1 + 3 * 3)
    for one, other in itertools.combinations(noises, 2):
        if one.shape == other.shape:
            assert 0.4 < (one == other).float().mean() < 0.6


def glorot(fan_out, fan_in):
    return math.sqrt(6 / (fan_in + fan_out))


def assert_fills(weight, bound):
    """Check that weights are uniform on [-bound, bound], by their range and standard deviation."""
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.97 * bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


@pytest.fixture(scope="module")
def fresh_model():
    torch.manual_seed(0)
    return VanillaTransformerForConditionalGeneration(
        tiny_config(vocab_size=500, d_model=64, d_ff=96, d_k=8, d_v=40, tie_word_embeddings=False)
    )


def test_parts_of_a_fused_projection_are_initialised_separately(fresh_model):
    for layer in fresh_model.model.decoder.layers:
        query, key, value = layer.self_attn.qkv_proj.weight.split((32, 32, 160))
        cross_key, cross_value = layer.cross_attn.kv_proj.weight.split((32, 160))
        for weight, rows in ((query, 32), (key, 32), (value, 160), (cross_key, 32), (cross_value, 160)):
            assert_fills(weight, glorot(rows, 64))


def test_matrices_have_xavier_initialisation_and_biases_are_zero(fresh_model):
    layer = fresh_model.model.decoder.layers[0]
    assert_fills(layer.cross_attn.q_proj.weight, glorot(32, 64))
    assert_fills(layer.self_attn.out_proj.weight, glorot(64, 160))
    assert_fills(layer.feed_forward.fc1.weight, glorot(96, 64))
    assert_fills(layer.feed_forward.fc2.weight, glorot(64, 96))
    assert_fills(fresh_model.lm_head.weight, glorot(500, 64))
    for name, parameter in fresh_model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "layer_norm" in name:
            assert (parameter == 1).all(), name


def test_embeddings_have_the_standard_deviation_of_tensor2tensor_and_padding_is_zero(fresh_model):
    weight = fresh_model.model.encoder.embed_tokens.weight
    assert weight[1:].std().item() == pytest.approx(64**-0.5, rel=0.02)
    assert (weight[0] == 0).all()


def test_fused_linear_concatenates_its_parts():
    module = random_module(FusedLinear(16, (3, 5)))
    states = random_states(2, 7, 16)
    first, second = module(states).split((3, 5), dim=-1)
    torch.testing.assert_close(first, states @ module.weight[:3].T + module.bias[:3])
    torch.testing.assert_close(second, states @ module.weight[3:].T + module.bias[3:])


@pytest.mark.parametrize("all_masked", [False, True])
def test_masked_attention_passes_gradcheck(all_masked):
    query, key, value = (torch.randn(2, 1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]], dtype=torch.bool)[:, None, None]
    if all_masked:
        mask[1] = False

    def attend(query, key, value):
        return layers.eager_attention_forward(nn.Module(), query, key, value, mask, scaling=0.5)[0]

    assert torch.autograd.gradcheck(attend, (query, key, value))


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float16).min], ids=["-inf", "lowest"])
def test_row_that_an_added_mask_hides_is_finite(hidden):
    query = torch.full((2, 4, 3, 4), 8.0, dtype=torch.float16)
    mask = torch.zeros(2, 1, 3, 3, dtype=torch.float16)
    mask[1] = hidden
    output = layers.eager_attention_forward(nn.Module(), query, -query, query, mask, scaling=0.5)[0]
    assert (output == 8).all()  # the mean of equal values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_masked_keys_have_zero_weight_at_any_score(dtype):
    query = torch.tensor([200.0], dtype=dtype)[None, None, None]
    key = torch.tensor([[-200.0], [200.0]], dtype=dtype)[None, None]
    mask = torch.tensor([[True, False]])[None, None]
    weights = layers.eager_attention_forward(nn.Module(), query, key, key, mask, scaling=1.0)[1]
    assert weights.flatten().tolist() == [1.0, 0.0]
