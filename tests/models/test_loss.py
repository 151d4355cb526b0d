"""The three kinds of label smoothing equal their formulas, and the chunked loss equals the plain one."""

import math

import pytest
import torch
from reference import smoothed_loss
from tiny_berts import tiny_bert
from tiny_models import BATCH, tiny_model
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_vanilla.models import chunked_loss
from hf_vanilla.models.chunked_loss import chunk_size, loss_and_gradients, projected_cross_entropy_sum
from hf_vanilla.models.loss import (
    classification_loss,
    cross_entropy_sum,
    freeze_row,
    select_labelled,
    smoothed_target,
    token_loss,
)


VOCAB, PAD = 13, 4
# torch warns of its own tracing of a `torch.autograd.Function`
DYNAMO_WARNS = pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
KINDS = ("uniform", "t2t", "annotated")
TARGETS = {
    "none": smoothed_target(0.0, "uniform", VOCAB, PAD),
    **{kind: smoothed_target(0.1, kind, VOCAB, PAD) for kind in KINDS},
}
LABELS = torch.tensor([[5, 6, 7, 8, 9, 10, 2], [5, 11, 2, -100, -100, -100, -100], [3, -100, 1, -100, 0, 2, -100]])


def projection(bias=True):
    """Hidden states (3, 7, 8), a weight (vocab, 8) and a bias (vocab,), all with gradients."""
    hidden_states = torch.randn(3, 7, 8, requires_grad=True)
    weight = torch.randn(VOCAB, 8, requires_grad=True)
    return hidden_states, weight, torch.randn(VOCAB, requires_grad=True) if bias else None


def plain_loss(hidden_states, weight, bias, labels, target):
    return cross_entropy_sum(nn.functional.linear(hidden_states, weight, bias), labels, target)


def projected_loss(hidden_states, weight, bias, labels, target):
    labels, hidden_states = select_labelled(labels, hidden_states)
    return projected_cross_entropy_sum(hidden_states, weight, bias, labels, target)


@pytest.fixture(params=[1, 3, 256], ids=lambda tokens: f"chunks of {tokens}")
def chunk_tokens(request, monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK_TOKENS", request.param)
    monkeypatch.setattr(chunked_loss, "VOCAB_BLOCK_SIZE", 4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_smoothing_equals_its_formula(kind, smoothing):
    logits = 2 * torch.randn(3, 7, VOCAB)
    actual = cross_entropy_sum(logits, LABELS, smoothed_target(smoothing, kind, VOCAB, PAD))
    expected = smoothed_loss(logits.flatten(0, 1), LABELS.flatten(), smoothing, kind, PAD)
    assert actual.item() == pytest.approx(expected, rel=1e-6)


def test_uniform_smoothing_is_that_of_torch():
    logits = 2 * torch.randn(3, 7, VOCAB)
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), LABELS.flatten(), label_smoothing=0.1, reduction="sum", ignore_index=-100
    )
    torch.testing.assert_close(cross_entropy_sum(logits, LABELS, TARGETS["uniform"]), expected)


def test_annotated_smoothing_is_the_kl_divergence_of_torch():
    logits = 2 * torch.randn(3, 7, VOCAB)
    labelled = LABELS != -100
    labels, log_probs = LABELS[labelled], logits[labelled].log_softmax(-1)
    distribution = torch.full_like(log_probs, 0.1 / (VOCAB - 2)).scatter(1, labels[:, None], 0.9)
    distribution[:, PAD] = 0
    expected = nn.KLDivLoss(reduction="sum")(log_probs, distribution)
    torch.testing.assert_close(cross_entropy_sum(logits, LABELS, TARGETS["annotated"]), expected)


def test_t2t_smoothing_is_the_cross_entropy_minus_its_minimum():
    logits = 2 * torch.randn(3, 7, VOCAB)
    labelled = LABELS != -100
    log_probs, labels = logits[labelled].log_softmax(-1), LABELS[labelled]
    low = 0.1 / (VOCAB - 1)
    soft = torch.full_like(log_probs, low).scatter(1, labels[:, None], 0.9)
    normalizing = -(0.9 * math.log(0.9) + (VOCAB - 1) * low * math.log(low + 1e-20))
    expected = (-(soft * log_probs).sum(-1) - normalizing).sum()
    torch.testing.assert_close(cross_entropy_sum(logits, LABELS, TARGETS["t2t"]), expected)


def test_loss_without_smoothing_is_the_cross_entropy():
    logits = 2 * torch.randn(3, 7, VOCAB)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="sum")
    for kind in KINDS:
        target = smoothed_target(0.0, kind, VOCAB, PAD)
        torch.testing.assert_close(cross_entropy_sum(logits, LABELS, target), expected)


@pytest.mark.parametrize("kind", ["t2t", "annotated"])
def test_perfect_prediction_has_zero_loss(kind):
    target = TARGETS[kind]
    distribution = torch.full((VOCAB,), target.other_probability)
    distribution[7] = target.true_probability
    if kind == "annotated":
        distribution[PAD] = 0.0
    logits = distribution.clamp(min=1e-30).log()
    assert cross_entropy_sum(logits, torch.tensor(7), target).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_smoothed_target_sums_to_one(kind):
    target = TARGETS[kind]
    others = VOCAB - 1 - (target.excluded_id >= 0)
    assert target.true_probability + others * target.other_probability == pytest.approx(1.0, abs=1e-12)
    assert target.excluded_id == (PAD if kind == "annotated" else -1)


@pytest.mark.parametrize(("kind", "vocab_size"), [("t2t", 1), ("annotated", 2)])
def test_vocabulary_without_another_token_is_refused(kind, vocab_size):
    with pytest.raises(ValueError, match=rf"`vocab_size` \({vocab_size}\) leaves no other token .*\(0.1\)"):
        smoothed_target(0.1, kind, vocab_size, 0)


@pytest.mark.usefixtures("chunk_tokens")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", TARGETS)
def test_chunked_loss_and_gradients_equal_plain_ones(name, bias):
    arguments = projection(bias)
    inputs = [argument for argument in arguments if argument is not None]
    expected = plain_loss(*arguments, LABELS, TARGETS[name])
    actual = projected_loss(*arguments, LABELS, TARGETS[name])
    assert (actual.shape, actual.dtype) == ((), torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(actual * 0.37, inputs), torch.autograd.grad(expected * 0.37, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@DYNAMO_WARNS
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_loss_and_gradients_equal_uncompiled_ones(dtype, bias):
    torch.compiler.reset()
    arguments = projection(bias)
    inputs = [argument for argument in arguments if argument is not None]
    compiled = torch.compile(projected_loss, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        expected = projected_loss(*arguments, LABELS, TARGETS["annotated"])
        actual = compiled(*arguments, LABELS, TARGETS["annotated"])
    torch.testing.assert_close(actual, expected)
    for ours, theirs in zip(torch.autograd.grad(actual, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs)
    torch.compiler.reset()


@DYNAMO_WARNS
def test_compiled_loss_does_not_wait_if_the_number_of_labels_is_known(monkeypatch):
    torch.compiler.reset()
    hidden_states, *parameters = projection()
    inputs, labels = [hidden_states.detach().flatten(0, 1).requires_grad_(), *parameters], LABELS.flatten()
    counts, find = [], chunked_loss.positions_with_label
    monkeypatch.setattr(
        chunked_loss, "positions_with_label", lambda labels, count: counts.append(count) or find(labels, count)
    )
    compiled = torch.compile(projected_cross_entropy_sum, fullgraph=True, backend="aot_eager")
    for last in (21, 20, 17, 15):  # of which the third and the fourth have as many labels
        chosen = labels.masked_fill(torch.arange(21) >= last, -100)
        count = int((chosen != -100).sum())
        actual = compiled(*inputs, chosen, TARGETS["t2t"], count=count)
        expected = projected_cross_entropy_sum(
            inputs[0][chosen != -100], *inputs[1:], chosen[chosen != -100], TARGETS["t2t"]
        )
        torch.testing.assert_close(actual, expected)
        gradients = [torch.autograd.grad(each, inputs) for each in (actual, expected)]
        torch.testing.assert_close(*gradients)
        assert counts[-1] == count
    torch.compiler.reset()


@pytest.mark.parametrize("count", [None, 14])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_custom_operator_passes_opcheck(bias, count):
    hidden_states, *parameters = [None if each is None else each.detach() for each in projection(bias)]
    arguments = (hidden_states.flatten(0, 1), *parameters, LABELS.flatten(), None, count, *TARGETS["t2t"])
    checks = torch.library.opcheck(chunked_loss.cross_entropy_and_gradients, arguments)
    assert set(checks.values()) == {"SUCCESS"}
    operator = chunked_loss.cross_entropy_and_gradients._opoverload
    assert torch.Tag.cudagraph_unsafe in operator.tags


@pytest.mark.parametrize("kind", TARGETS)
def test_loss_of_a_frozen_projection_keeps_no_gradient_of_it(kind):
    hidden_states, weight, bias = projection()
    expected = torch.autograd.grad(projected_loss(hidden_states, weight, bias, LABELS, TARGETS[kind]), hidden_states)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.shape) or each, lambda each: each):
        loss = projected_loss(hidden_states, weight.detach(), bias.detach(), LABELS, TARGETS[kind])
    assert torch.equal(torch.autograd.grad(loss, hidden_states)[0], expected[0])
    assert not any(VOCAB in shape for shape in kept)


def test_loss_does_not_synchronise_with_the_device():
    """Reading values fails on the meta device."""
    hidden_states, weight, bias = (tensor.detach().to("meta") for tensor in projection())
    labels = LABELS.flatten().to("meta")
    total, *gradients = loss_and_gradients(hidden_states.flatten(0, 1), weight, bias, labels, TARGETS["annotated"])
    assert total.shape == ()
    assert [gradient.shape for gradient in gradients] == [(21, 8), (VOCAB, 8), (VOCAB,)]


@pytest.mark.parametrize("has_operator", [True, False])
def test_weight_gradient_is_summed_in_float32_on_a_gpu(has_operator, monkeypatch, request, chunk_tokens):
    """A CPU can't add products of 16-bit matrices to float32 sums in one operation: a stand-in for a GPU's."""
    calls = []

    def add_product(sums, left, right, dtype, beta=1, alpha=1, *, out):
        calls.append(left.dtype)
        return out.copy_(sums + left.float() @ right.float())

    if has_operator:
        library = torch.library.Library("aten", "IMPL")
        library.impl("addmm.dtype_out", add_product, "CPU")
        request.addfinalizer(library._destroy)
    monkeypatch.setattr(chunked_loss, "FLOAT_SUM_DEVICES", ("cpu",))
    chunked_loss.adds_in_float32.cache_clear()
    request.addfinalizer(chunked_loss.adds_in_float32.cache_clear)
    # numbers of 7 bits after the point and probabilities of 1 / 16 are exact in bfloat16; 18 of their products are not
    hidden_states = (1 + torch.randint(128, (18, 8)) / 128).bfloat16()
    labels, weight = torch.randint(16, (18,)), torch.zeros(16, 8)
    _, _, actual, _ = loss_and_gradients(hidden_states, weight, None, labels, TARGETS["none"])
    expected = (1 / 16 - nn.functional.one_hot(labels, 16).double()).t() @ hidden_states.double()
    assert torch.equal(actual.double(), expected)
    assert set(calls) == ({torch.bfloat16} if has_operator else set())
    monkeypatch.undo()
    _, _, rounded, _ = loss_and_gradients(hidden_states, weight, None, labels, TARGETS["none"])
    assert not torch.equal(rounded.double(), expected)


@pytest.mark.usefixtures("chunk_tokens")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_loss_of_an_accelerator_is_that_of_a_cpu(dtype, monkeypatch):
    arguments = projection()
    inputs = [each.detach().to(dtype) for each in arguments]
    flat = inputs[0].flatten(0, 1), *inputs[1:], LABELS.flatten().clamp(min=0), TARGETS["annotated"]
    expected = loss_and_gradients(*(each.float() for each in flat[:3]), *flat[3:])
    monkeypatch.setattr(chunked_loss, "reads_values", lambda tensor: False)
    actual = loss_and_gradients(*flat)
    precision = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).norm() <= precision * theirs.norm()


@pytest.mark.parametrize(
    ("device", "vocab_size", "tokens"),
    [("cpu", 101, 256), ("meta", 37_000, 3627), ("meta", 1_000_000, 256), ("meta", 101, 2**27 // 101)],
)
def test_chunk_size_depends_on_device_and_vocabulary(device, vocab_size, tokens):
    assert chunk_size(torch.empty(vocab_size, 2, device=device)) == tokens  # 2^27 / 37,000 = 3627.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TARGETS)
def test_chunked_loss_under_autocast_is_within_the_precision_of_its_dtype(name, dtype):
    arguments = projection()
    expected = plain_loss(*arguments, LABELS, TARGETS[name])
    with torch.autocast("cpu", dtype):
        actual = projected_loss(*arguments, LABELS, TARGETS[name])
    assert actual.dtype == torch.float32
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=2 * precision, atol=precision)
    for ours, theirs in zip(
        torch.autograd.grad(actual, arguments), torch.autograd.grad(expected, arguments), strict=True
    ):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 2 * precision * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_loss_is_computed_in_single_precision(dtype):
    hidden_states, weight, _ = (tensor.detach().to(dtype) for tensor in projection())
    expected = plain_loss(hidden_states.float(), weight.float(), None, LABELS, TARGETS["uniform"])
    actual = projected_loss(hidden_states, weight, None, LABELS, TARGETS["uniform"])
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_small_weights_do_not_vanish_in_float16():
    weight, vocab_size = (
        1 / 1024,
        40_478,
    )  # of each token: with a probability near 1 / 40,478, below float16's least number
    states, matrix = torch.randn(5, 8), 0.01 * torch.randn(vocab_size, 8)
    labels, weights = torch.arange(5), torch.full((5,), weight)
    weights[2] /= 3
    arguments = (torch.zeros(vocab_size), labels, TARGETS["none"], weights)
    _, *expected = loss_and_gradients(states, matrix, *arguments)
    _, *actual = loss_and_gradients(states.half(), matrix, *arguments)
    for found, exact in zip(actual, expected, strict=True):
        assert (found - exact).norm() < 0.01 * exact.norm()
        assert (found - exact).sum().abs() < 0.01 * exact.abs().sum() / len(labels)


def test_labels_may_be_on_another_device_than_logits():
    """As where `device_map` puts the last layer on the second of two GPUs."""
    labels, device = torch.zeros(2, 7, dtype=torch.long), torch.device("meta")
    states, projection = torch.empty(2, 7, 8, device=device), nn.Linear(8, VOCAB, device=device)
    for training in (True, False):
        loss, _ = token_loss(projection, states, labels, training=training, count=14)
        assert loss.device == device
    assert classification_loss(states, labels).device == device


@pytest.mark.parametrize("name", TARGETS)
def test_no_labels_give_zero_loss_and_gradients(name):
    arguments = projection()
    labels = torch.full_like(LABELS, -100)
    for function in (plain_loss, projected_loss):
        total = function(*arguments, labels, TARGETS[name])
        assert total.item() == 0
        for gradient in torch.autograd.grad(total, arguments):
            assert (gradient == 0).all()


@pytest.mark.parametrize("reads_values", [True, False])  # as on a CPU, as on an accelerator
@pytest.mark.parametrize("name", TARGETS)
def test_large_logits_have_finite_loss_and_gradients(name, reads_values, monkeypatch):
    monkeypatch.setattr(chunked_loss, "reads_values", lambda tensor: reads_values)
    hidden_states, weight, bias = projection()
    arguments = (hidden_states * 1e4, weight, bias)
    expected = plain_loss(*arguments, LABELS, TARGETS[name])
    actual = projected_loss(*arguments, LABELS, TARGETS[name])
    assert actual.isfinite()
    torch.testing.assert_close(actual, expected)
    assert torch.autograd.grad(actual, weight)[0].isfinite().all()


@pytest.mark.parametrize("reads_values", [True, False])
def test_impossible_label_has_infinite_loss(reads_values, monkeypatch):
    monkeypatch.setattr(chunked_loss, "reads_values", lambda tensor: reads_values)
    hidden_states, weight, bias = projection()
    bias = bias.detach().clone()
    bias[LABELS[LABELS != -100][0]] = -math.inf
    certain = chunked_loss.SmoothedTarget(1.0, 0.0, -1, 0.0)
    assert projected_loss(hidden_states, weight, bias, LABELS, certain).item() == math.inf


def test_chunked_loss_works_without_gradients():
    arguments = projection()
    with torch.no_grad():
        actual = projected_loss(*arguments, LABELS, TARGETS["t2t"])
    torch.testing.assert_close(actual, plain_loss(*arguments, LABELS, TARGETS["t2t"]).detach())


def test_differentiating_the_training_loss_twice_is_refused():
    hidden_states, weight, bias = projection()
    total = projected_loss(hidden_states, weight, bias, LABELS, TARGETS["uniform"])
    with pytest.raises(RuntimeError, match="`create_graph=True` .* can be differentiated once"):
        torch.autograd.grad(total, hidden_states, create_graph=True)


def test_unlabelled_positions_get_no_gradient():
    hidden_states, weight, bias = projection()
    projected_loss(hidden_states, weight, bias, LABELS, TARGETS["uniform"]).backward()
    touched = (hidden_states.grad != 0).any(-1)
    assert torch.equal(touched, LABELS != -100)


class CountMasks(TorchDispatchMode):
    """Records operations whose result's size depends on values, for which an accelerator synchronises."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1:] if name.startswith("index") else ()
        has_mask = any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in tree_leaves(indices))
        if has_mask or name in ("nonzero", "masked_select", "_local_scalar_dense"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_labelled_tokens_are_searched_once():
    hidden_states = torch.randn(3, 7, 8, requires_grad=True)
    direction = torch.randn(int((LABELS != -100).sum()), 8)
    with CountMasks() as count:
        labels, selected, numbers = select_labelled(LABELS, hidden_states, torch.arange(21).view(3, 7))
        (gradient,) = torch.autograd.grad(selected, hidden_states, direction)
    assert count.names == ["nonzero"]
    assert torch.equal(labels, LABELS[LABELS != -100])
    assert torch.equal(selected, hidden_states[LABELS != -100])
    assert torch.equal(numbers, (LABELS != -100).flatten().nonzero()[:, 0])
    assert torch.equal(gradient, torch.autograd.grad(hidden_states[LABELS != -100], hidden_states, direction)[0])


@pytest.mark.parametrize("way", ["hook", "patch"])
@pytest.mark.parametrize("tied", [True, False])
def test_hooks_of_the_projection_change_the_loss_of_training_too(tied, way):
    model = tiny_model(tie_word_embeddings=tied, dropout=0.0, label_smoothing=0.0)
    forward, calls = model.lm_head.forward, []
    if way == "hook":
        model.lm_head.register_forward_hook(lambda module, args, logits: logits * 0)
    else:
        model.lm_head.forward = lambda states: forward(states) * 0
    model.lm_head.register_full_backward_hook(lambda *args: calls.append(1))
    for training in (True, False):
        loss = model.train(training)(**BATCH).loss
        assert loss.item() == pytest.approx(math.log(model.config.vocab_size), rel=1e-6)  # of float32
        loss.backward()
    assert len(calls) == 2


def test_frozen_row_keeps_its_values_and_has_no_gradient():
    matrix = torch.randn(5, 3, requires_grad=True)
    direction = torch.randn(5, 3)
    frozen = freeze_row(matrix, 2)
    assert torch.equal(frozen, matrix)
    (frozen * direction).sum().backward()
    expected = direction.clone()
    expected[2] = 0
    assert torch.equal(matrix.grad, expected)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(results) if isinstance(each, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return results


@pytest.mark.parametrize("make_model", [tiny_model, tiny_bert])
def test_training_never_holds_the_logits_of_all_tokens(make_model):
    vocab_size, shape = 101, (30, 10)  # more labels than a chunk has, and no other tensor nearly as large
    model = make_model(vocab_size=vocab_size)
    inputs = {"input_ids": torch.randint(5, vocab_size, shape), "labels": torch.randint(5, vocab_size, shape)}
    logits = 30 * 10 * vocab_size
    with LargestTensor() as evaluation, torch.no_grad():
        model(**inputs)
    assert evaluation.elements == logits
    with LargestTensor() as training:
        model.train()(**inputs).loss.backward()
    assert 0 < training.elements < logits


@DYNAMO_WARNS
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd:UserWarning")
@pytest.mark.parametrize(
    ("make_model", "sizes"),
    [(tiny_model, {"encoder_layers": 1, "decoder_layers": 1}), (tiny_bert, {"num_hidden_layers": 1})],
)
def test_compiled_training_never_holds_the_logits_of_all_tokens(make_model, sizes):
    torch.compiler.reset()
    vocab_size, shape = 101, (30, 10)
    model = make_model(vocab_size=vocab_size, **sizes).train()
    inputs = {"input_ids": torch.randint(5, vocab_size, shape), "labels": torch.randint(5, vocab_size, shape)}
    backend = AotEagerAndRecordGraphs()
    torch.compile(model, fullgraph=True, backend=backend)(**inputs).loss.backward()
    graphs = [*backend.fw_graphs, *backend.bw_graphs]
    values = tree_leaves([node.meta.get("val") for graph in graphs for node in graph.graph.nodes])
    assert len(graphs) == 2
    assert 0 < max(value.numel() for value in values if isinstance(value, torch.Tensor)) < 30 * 10 * vocab_size
    torch.compiler.reset()
