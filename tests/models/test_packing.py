"""Packing changes no results: outputs, losses and gradients equal those of all positions."""

import logging
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import compile_regions
from tiny_berts import NO_DROPOUT, TASKS, tiny_bert
from tiny_gpts import tiny_gpt
from tiny_models import tiny_model
from torch._subclasses import FakeTensorMode

from hf_vanilla import VanillaBertModel
from hf_vanilla.models import dropout, packing, varlen_attention
from hf_vanilla.models.packing import Packing, PackingPlanner
from hf_vanilla.models.read_positions import host_sizes


# Values of size 1 in float32 (2 ** -24), after some dozen operations that add in another order on each side.
TOLERANCE = dict(rtol=1e-5, atol=5e-6)
SOURCE = torch.tensor([[5, 6, 7, 8, 2], [9, 3, 2, 0, 0], [4, 2, 0, 0, 0]])
LABELS = torch.tensor(
    [[7, 2, -100, -100, -100, -100, -100], [5, -100, 9, 6, 3, 4, 2], [8, 3, 2, -100, -100, -100, -100]]
)
SOURCE_MASKS = {
    "right": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]],
    "left": [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]],
    "holes": [[1, 0, 1, 1, 1], [1, 0, 0, 0, 1], [0, 1, 0, 1, 0]],
}
COMPILED = {
    "encoder": lambda: tiny_bert("masked-lm", max_position_embeddings=17, **NO_DROPOUT),
    "decoder": lambda: tiny_gpt(**NO_DROPOUT),
    "both": lambda: tiny_model(dropout=0.0),
}
DECODER_MASKS = {
    "none": None,
    "left": [[0, 0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1]],
}


def plan(model, states, mask, max_buckets=1, **arguments):
    """Plan the packing of a batch."""
    return PackingPlanner(model, states, arguments).plan_tokens(states, mask, max_buckets=max_buckets)


def packed(mask, **kwargs):
    """Plan the packing of a batch for a tiny BERT."""
    shape = (1, 1) if mask is None else mask.shape[:2]
    return plan(tiny_bert("model"), torch.ones(*shape, 12), mask, **kwargs)


def loss_and_gradients(model, inputs):
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    return outputs.loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(model, inputs, no_shortcuts):
    packed_loss, packed = loss_and_gradients(model, inputs)
    no_shortcuts()
    plain_loss, plain = loss_and_gradients(model, inputs)
    torch.testing.assert_close(packed_loss, plain_loss, **TOLERANCE)
    assert packed.keys() == plain.keys()
    for name, gradient in plain.items():
        if gradient is None:
            assert packed[name] is None
        else:
            torch.testing.assert_close(packed[name], gradient, **TOLERANCE)


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("decoder_mask", DECODER_MASKS)
@pytest.mark.parametrize("source_mask", SOURCE_MASKS)
def test_packing_keeps_transformer_training_results(
    source_mask, decoder_mask, kernel, norm_position, fed_positions, no_shortcuts
):
    model = tiny_model(dropout=0.0, norm_position=norm_position).train()
    model.set_attn_implementation(kernel)
    mask = torch.tensor(SOURCE_MASKS[source_mask])
    inputs = {"input_ids": SOURCE, "attention_mask": mask, "labels": LABELS}
    real_targets = 2 + 7 + 3
    if DECODER_MASKS[decoder_mask] is not None:
        real_targets = LABELS.numel()  # a masked position still has an output, and may have a label
        inputs["decoder_attention_mask"] = torch.tensor(DECODER_MASKS[decoder_mask])
        inputs["labels"] = LABELS.masked_fill(inputs["decoder_attention_mask"] == 0, -100)
    model(**inputs)
    assert fed_positions == [int(mask.sum())] * 2 + [real_targets] * 3  # 2 encoder and 3 decoder layers
    assert_same(model, inputs, no_shortcuts)
    assert fed_positions[-5:] == [15] * 2 + [21] * 3


def test_packed_encoder_is_zero_at_padding_and_unchanged_elsewhere(fed_positions, no_shortcuts):
    encoder = tiny_model().model.encoder.eval()
    mask = torch.tensor(SOURCE_MASKS["right"])
    packed = encoder(SOURCE, attention_mask=mask).last_hidden_state
    no_shortcuts()
    plain = encoder(SOURCE, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(packed, plain * mask[..., None], **TOLERANCE)
    assert fed_positions == [10] * 2 + [15] * 2


@pytest.mark.parametrize("bucket_length", [1, 64])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("task", [task for task in TASKS if task not in ("model", "choices")])
def test_packing_keeps_bert_training_results(task, kernel, bucket_length, fed_positions, monkeypatch, no_shortcuts):
    monkeypatch.setattr(packing, "BUCKET_LENGTH", bucket_length)
    model = tiny_bert(task, attn_implementation=kernel, **NO_DROPOUT).train()
    model(**TASKS[task][3])
    reads_padding = task == "answers"  # the loss of transformers' head counts padding among the positions
    assert fed_positions[0] == (14 if reads_padding else 12) >= fed_positions[1]
    assert_same(model, TASKS[task][3], no_shortcuts)


@pytest.mark.parametrize(("length", "buckets"), [(10, 1), (127, 1), (130, 2), (700, 8)])
def test_long_rows_are_sorted_into_more_buckets(length, buckets):
    ids = torch.randint(5, 11, (9, length))
    mask = (torch.arange(length) < (length - torch.arange(9)[:, None] * (length // 10))).long()
    model = tiny_bert("model", max_position_embeddings=700).eval().double()  # sums of 700 terms round more in float32
    planned = plan(model, torch.ones(9, length, 12), mask, max_buckets=8)
    assert len(planned.buckets) == buckets
    for encoder in (model, tiny_model().model.encoder.eval().double()):
        actual = encoder(ids, attention_mask=mask).last_hidden_state
        plain = encoder(ids, attention_mask=mask, keep_padding=True).last_hidden_state
        torch.testing.assert_close(actual, plain * mask[..., None], **TOLERANCE)


def test_buckets_are_counted_without_padding():
    mask = (torch.arange(512) < torch.arange(20, 36)[:, None]).long()
    assert len(packed(mask, max_buckets=8).buckets) == 1


@pytest.mark.parametrize("buckets", [1, 2, 3, 9])
def test_packing_round_trips_with_any_number_of_buckets(buckets, monkeypatch):
    monkeypatch.setattr(packing, "BUCKET_LENGTH", 0.5)
    mask = torch.arange(7) < torch.tensor([3, 7, 1, 7, 4])[:, None]
    states = torch.randn(5, 7, 2) * mask[..., None]
    planned = packed(mask.long(), max_buckets=buckets)
    assert isinstance(planned, Packing)
    assert len(planned.buckets) == min(buckets, 5)
    tokens = planned.pack(states)
    assert tokens.shape == (1, 22, 2)
    assert torch.equal(planned.unpack(tokens), states)
    attention = SimpleNamespace(is_causal=False)
    assert torch.equal(planned.attend(attention, lambda rows, mask: (rows, None), tokens), tokens)
    assert sum(bucket.length * bucket.rows for bucket in planned.buckets) == {1: 35, 2: 26, 3: 27, 9: 22}[buckets]
    if buckets > 1:
        assert [bucket.length for bucket in planned.buckets] == sorted(bucket.length for bucket in planned.buckets)


@pytest.mark.parametrize(
    "mask",
    [
        None,
        torch.ones(2, 7),  # no padding
        torch.tensor([[1, 1, 0], [0, 0, 0]]),  # a row of padding only
        torch.ones(2, 1, 7, 7),  # a four-dimensional mask
        torch.ones(0, 7),
    ],
)
def test_packing_is_off_without_padding_and_with_special_masks(mask):
    assert packed(mask) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_packing_is_off_where_the_mask_has_no_values(device):
    mask, model = torch.tensor(SOURCE_MASKS["right"], device="meta"), tiny_bert("model")
    assert plan(model, torch.ones(3, 5, 12, device=device), mask) is None


def devices_of(packing):
    """List the devices of all tensors of a packing."""
    parts = [*packing, *(each for bucket in packing.buckets for each in bucket)]
    return {part.device.type for part in parts if isinstance(part, torch.Tensor)}


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("max_buckets", [1, 3])
def test_gpu_without_kernels_for_sequences_gets_the_buckets_of_a_cpu(max_buckets, kernel, monkeypatch):
    """The mask has values, as a GPU's has, and all else is on "meta": what stayed on the CPU would show."""
    monkeypatch.setattr(packing, "BUCKET_LENGTH", 1)
    monkeypatch.setattr(varlen_attention, "has_operator", lambda name: False)
    mask, model = torch.tensor(SOURCE_MASKS["left"]), tiny_bert("masked-lm", attn_implementation=kernel).train()
    plans = [plan(model.bert, torch.ones(3, 5, 12, device=each), mask, max_buckets) for each in ("cpu", "meta")]
    assert [devices_of(each) for each in plans] == [{"cpu"}, {"meta"}]
    shapes = [[(bucket.rows, bucket.length, bucket.tokens) for bucket in each.buckets] for each in plans]
    assert shapes[0] == shapes[1]
    assert plans[0].positions.shape == plans[1].positions.shape


def test_step_on_a_gpu_without_kernels_for_sequences_works_on_tokens(fed_positions):
    mask = torch.tensor(SOURCE_MASKS["right"])
    labels = SOURCE.masked_fill(SOURCE != 2, -100)
    model = tiny_bert("masked-lm", attn_implementation="eager").train().to("meta")
    sizes = {name: tuple(each) for name, each in host_sizes(mask, labels).items()}
    inputs = {"input_ids": SOURCE.to("meta"), "labels": labels.to("meta"), "attention_mask": mask}
    model(**inputs, mask_sizes=sizes, num_items_in_batch=torch.tensor(3, device="meta")).loss.backward()
    assert fed_positions == [10, 3]
    assert {each.grad.device.type for each in model.bert.layers.parameters()} == {"meta"}


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_packing_is_off_with_outputs_of_each_layer(name):
    mask = torch.tensor(SOURCE_MASKS["right"])
    assert packed(mask) is not None
    assert packed(mask, **{name: True}) is None


def test_packing_is_off_for_flex_attention():
    mask, model = torch.tensor(SOURCE_MASKS["right"]), tiny_bert("model")
    model.config._attn_implementation = "flex_attention"
    assert plan(model, torch.ones(3, 5, 12), mask) is None


def test_packing_is_off_while_a_layer_is_hooked(fed_positions):
    model, mask, shapes = tiny_bert("model"), torch.tensor(SOURCE_MASKS["right"]), []
    model(SOURCE, attention_mask=mask, output_hidden_states=True)  # transformers leaves hooks of its own there
    model(SOURCE, attention_mask=mask)
    assert fed_positions == [15] * 2 + [10] * 2
    handle = model.layers[0].register_forward_hook(lambda layer, args, output: shapes.append(tuple(output.shape)))
    model(SOURCE, attention_mask=mask)
    assert shapes == [(3, 5, 12)]
    handle.remove()
    model(SOURCE, attention_mask=mask)
    assert fed_positions[-2:] == [10] * 2
    seen = {}
    model.layers[0].register_forward_pre_hook(seen.setdefault)  # a hook of no module
    model(SOURCE, attention_mask=mask)
    assert seen[model.layers[0]][0].shape == (3, 5, 12)


def test_packing_is_off_while_the_last_norm_is_hooked(fed_positions):
    encoder, mask, shapes = tiny_model(norm_position="pre").model.encoder, torch.tensor(SOURCE_MASKS["right"]), []
    encoder(SOURCE, mask)
    encoder.norm.register_forward_hook(lambda norm, args, output: shapes.append(tuple(output.shape)))
    encoder(SOURCE, mask)
    assert fed_positions == [10] * 2 + [15] * 2
    assert shapes == [(3, 5, 16)]


@pytest.mark.parametrize("make_model", [tiny_gpt, lambda: tiny_bert("masked-lm"), tiny_model], ids=COMPILED)
def test_tensors_without_values_are_trained_on(make_model):
    model = make_model().train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        mask = torch.ones(3, 5, dtype=torch.long)
        loss = model(mask, attention_mask=mask, labels=mask).loss
        loss.backward()
    assert loss.shape == ()


def padded_batch(batch, length):
    """Draw rows of different lengths, which have labels of their first three tokens."""
    ids, positions = torch.randint(3, 13, (batch, length)), torch.arange(length)
    mask = positions < length - 2 * torch.arange(batch)[:, None]
    labels = ids.masked_fill(positions > 2, -100)
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("make", COMPILED.values(), ids=COMPILED)
def test_layers_compiled_one_by_one_work_on_packed_tokens(make, monkeypatch):
    torch.compiler.reset()
    plans, layers, plan_tokens = [], [], PackingPlanner.plan_tokens

    def recorded(*args, **kwargs):
        plans.append(plan_tokens(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr(PackingPlanner, "plan_tokens", recorded)

    def backend(graph, inputs):
        names = " ".join(node.name for node in graph.graph.nodes)
        layers.extend([graph] if "feed_forward" in names else [])
        return graph

    plain, compiled = make().train(), compile_regions(make().train(), backend=backend)
    for shape in [(2, 9), (3, 12), (4, 11), (3, 17), (5, 13)]:
        batch = padded_batch(*shape)
        expected_loss, expected = loss_and_gradients(plain, batch)
        plans.clear()
        loss, actual = loss_and_gradients(compiled, batch)
        assert len(plans) > 0
        assert None not in plans
        torch.testing.assert_close(loss, expected_loss, **TOLERANCE)
        actual = {name.replace("_orig_mod.", ""): gradient for name, gradient in actual.items()}
        torch.testing.assert_close(actual, expected, **TOLERANCE)
    torch.compiler.reset()
    assert 1 <= len(layers) <= 4  # first shape and all others, of two classes, or of the last layer and those before


@pytest.mark.parametrize("pooled", [True, False])
def test_first_position_is_computed_for_a_pooler(pooled, fed_positions, no_shortcuts):
    config = tiny_bert("model").config
    torch.manual_seed(0)
    model = VanillaBertModel(config, add_pooling_layer=pooled).eval()
    inputs = {"input_ids": SOURCE, "attention_mask": torch.tensor(SOURCE_MASKS["left"])}
    actual = model(**inputs)
    assert fed_positions == [15 if pooled else 10] * 2
    no_shortcuts()
    torch.testing.assert_close(actual.to_tuple(), model(**inputs).to_tuple(), **TOLERANCE)


@pytest.mark.parametrize("task", ["masked-lm", "pre-training", "tokens"])
def test_label_at_padding_is_scored_as_without_packing(task, no_shortcuts):
    model = tiny_bert(task, **NO_DROPOUT).train()
    labels = TASKS[task][3]["labels"].clone()
    labels[1, -1] = 3  # the mask is 0 there
    assert_same(model, {**TASKS[task][3], "labels": labels}, no_shortcuts)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_masked_decoder_positions_are_computed(mode, no_shortcuts):
    model = getattr(tiny_model(dropout=0.0, label_smoothing=0.0), mode)()
    decoder_input_ids = torch.tensor([[0, 7, 2, 0, 0], [0, 5, 9, 6, 3], [0, 8, 3, 2, 0]])  # begins with padding
    labels = torch.tensor([[7, 2, -100, -100, -100], [5, 9, 6, 3, 2], [8, 3, 2, -100, -100]])
    inputs = {
        "input_ids": SOURCE,
        "attention_mask": torch.tensor(SOURCE_MASKS["right"]),
        "decoder_input_ids": decoder_input_ids,
        "decoder_attention_mask": (decoder_input_ids != 0).long(),
        "labels": labels,
    }
    assert_same(model, inputs, no_shortcuts)


def test_cache_is_used_in_training(no_shortcuts):
    model = tiny_model(dropout=0.0)
    mask = torch.tensor(SOURCE_MASKS["right"])
    prefix = torch.tensor([[1, 4], [1, 5], [1, 6]])

    def loss():
        cache = model.eval()(SOURCE, attention_mask=mask, decoder_input_ids=prefix, use_cache=True).past_key_values
        return model.train()(SOURCE, attention_mask=mask, past_key_values=cache, labels=LABELS).loss

    packed_loss = loss()
    no_shortcuts()
    torch.testing.assert_close(packed_loss, loss(), **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int8], ids=str)
def test_mask_may_have_any_dtype(dtype):
    model, mask = tiny_bert("model"), torch.tensor(SOURCE_MASKS["right"])
    expected = model(SOURCE, attention_mask=mask).last_hidden_state
    assert torch.equal(model(SOURCE, attention_mask=mask.to(dtype)).last_hidden_state, expected)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("family", ["bert", "transformer"])
def test_gradient_checkpointing_draws_the_same_dropout(family, use_reentrant):
    if family == "bert":
        model, inputs = tiny_bert("masked-lm").train(), TASKS["masked-lm"][3]
    else:
        model, inputs = tiny_model(attention_dropout=0.2).train(), TRANSFORMER_BATCH
    torch.manual_seed(5)
    expected_loss, expected = loss_and_gradients(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    torch.manual_seed(5)
    loss, gradients = loss_and_gradients(model, inputs)
    torch.testing.assert_close(loss, expected_loss)
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(gradients[name], gradient)


def test_dropout_of_packed_tokens_has_the_configured_rate(monkeypatch):
    torch.manual_seed(3)
    model = tiny_model(dropout=0.3, d_model=64).train()
    noises = []
    noise_of = dropout.dropout_noise

    def recorded(*args):
        noises.append(noise_of(*args))
        return noises[-1]

    monkeypatch.setattr(dropout, "dropout_noise", recorded)
    for _ in range(10):
        model(SOURCE, attention_mask=torch.tensor(SOURCE_MASKS["right"]), labels=LABELS)
    kept = torch.cat([noise.flatten() for noise in noises if noise.shape[1] in (10, 12)])
    assert kept.numel() > 50_000
    assert kept.float().mean().item() == pytest.approx(0.7, abs=0.01)


TRANSFORMER_BATCH = {"input_ids": SOURCE, "attention_mask": torch.tensor(SOURCE_MASKS["right"]), "labels": LABELS}


def transformer_with_dropout():
    model = tiny_model(dropout=0.1, attention_dropout=0.1, label_smoothing=0.0, encoder_layers=1, decoder_layers=1)
    for stack in (model.model.encoder, model.model.decoder):
        stack.dropout.p = 0.0  # of the embeddings, which is applied before packing
    return model


def bert_with_dropout():
    model = tiny_bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    model.bert.embeddings.dropout.p = 0.0
    return model


def losses_of_seeds(model, inputs, seeds):
    losses = []
    for seed in seeds:
        torch.manual_seed(seed)
        losses.append(model(**inputs).loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize(
    ("make_model", "inputs", "positions"),
    [
        (transformer_with_dropout, TRANSFORMER_BATCH, (10, 15)),
        (bert_with_dropout, TASKS["pre-training"][3], (12, 14)),
    ],
    ids=["transformer", "bert"],
)
def test_packed_losses_with_dropout_have_the_plain_distribution(
    make_model, inputs, positions, fed_positions, no_shortcuts
):
    """The deviation grows as the root of the rate: half the rate in packed layers would give about 0.7 of it."""
    model, count = make_model().train(), 300
    packed = losses_of_seeds(model, inputs, range(count))
    no_shortcuts()
    fed_when_packed = fed_positions[0]
    fed_positions.clear()
    plain = losses_of_seeds(model, inputs, range(count, 2 * count))
    assert (fed_when_packed, fed_positions[0]) == positions
    standard_error = ((packed.var() + plain.var()) / count).sqrt()
    assert (packed.mean() - plain.mean()).abs() < 4 * standard_error
    assert 0.8 < packed.std() / plain.std() < 1.25


@torch.no_grad()
@pytest.mark.parametrize("position_type", ["sinusoidal", "learned"])
@pytest.mark.parametrize("value", [2, -1, 0.5, True])
def test_mask_marks_tokens_by_any_nonzero_value(value, position_type):
    mask = torch.tensor(SOURCE_MASKS["left"])
    other = mask.bool() if value is True else mask * value
    transformer = tiny_model(position_type=position_type)
    target = {"decoder_input_ids": LABELS.clamp(min=0)}
    target_mask = torch.tensor(DECODER_MASKS["left"])
    expected = transformer(SOURCE, mask, decoder_attention_mask=target_mask, **target).logits
    actual = transformer(SOURCE, other, decoder_attention_mask=target_mask.to(other.dtype) * value, **target).logits
    assert torch.equal(actual, expected)
    bert = tiny_bert("masked-lm")
    assert torch.equal(bert(SOURCE, other).logits, bert(SOURCE, mask).logits)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_attention_weights_are_missed_with_advice(kernel, caplog, monkeypatch):
    messages = []
    monkeypatch.setattr(packing.logger, "warning_once", messages.append)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = tiny_model(attn_implementation=kernel)
    model(SOURCE, labels=LABELS[:, :4], output_attentions=True)
    assert len(messages) == (0 if kernel == "eager" else 2)  # encoder and decoder
    assert all('`model.set_attn_implementation("eager")`' in message for message in messages)
    assert "output_attentions" not in caplog.text  # the kernel's own warning
