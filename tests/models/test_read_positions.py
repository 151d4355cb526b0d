"""Unread positions of the last layer are skipped; losses, gradients and logits are unchanged."""

import pytest
import torch
from tiny_berts import IDS, LENGTH, MASK, NO_DROPOUT, TASKS, TEXT, tiny_bert

from hf_vanilla.models import packing
from hf_vanilla.models.layers import EncoderLayer, SelfAttention
from hf_vanilla.models.packing import LengthBucket, Packing, PackingPlanner


# Values of size 1 in float32 (2 ** -24), after some dozen operations that add in another order on each side.
TOLERANCE = dict(rtol=1e-5, atol=5e-6)
POOLED = ["next-sentence", "classes", "regression", "multi-label", "choices"]
READ = torch.tensor([[1, 0, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]])


def without_mask(inputs):
    return {name: tensor for name, tensor in inputs.items() if name != "attention_mask"}


def results(model, inputs):
    """Compute outputs and gradients."""
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {**outputs, **{name: gradient for name, gradient in gradients.items() if gradient is not None}}


def read_tokens(encoder, read=READ):
    planned = PackingPlanner(encoder, torch.ones(2, LENGTH, 12), {}).plan_outputs(None, read)
    return None if planned is None else planned.outputs


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize(
    ("task", "read"),
    [("pre-training", 5), ("masked-lm", 3), *((task, 6 if task == "choices" else 2) for task in POOLED)],
)
def test_skipping_keeps_training_results(task, read, is_padded, checkpointing, fed_positions, no_shortcuts):
    model = tiny_bert(task, **NO_DROPOUT).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    inputs = TASKS[task][3] if is_padded else without_mask(TASKS[task][3])
    actual = results(model, inputs)
    assert fed_positions[1] == read < fed_positions[0]
    no_shortcuts(padding=False)
    expected = results(model, inputs)
    assert fed_positions[-1] == fed_positions[0]
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("task", POOLED)
def test_skipping_keeps_evaluation_results(task, fed_positions, no_shortcuts):
    model = tiny_bert(task)
    inputs = TASKS[task][3]
    actual = model(**inputs).logits
    assert fed_positions[1] < fed_positions[0]
    no_shortcuts(padding=False)
    torch.testing.assert_close(actual, model(**inputs).logits, **TOLERANCE)


@pytest.mark.parametrize("task", ["tokens", "answers"])
def test_token_and_answer_heads_compute_all_positions(task, fed_positions):
    tiny_bert(task).train()(**TASKS[task][3])
    assert len(set(fed_positions)) == 1


@pytest.mark.parametrize("task", ["pre-training", "masked-lm"])
def test_evaluation_logits_have_all_positions(task, fed_positions):
    tiny_bert(task)(**TASKS[task][3])
    assert fed_positions == [IDS.numel()] * 2


@pytest.mark.parametrize("is_padded", [True, False])
def test_encoder_skips_unread_positions(is_padded, fed_positions):
    model = tiny_bert("model")
    inputs = TEXT if is_padded else without_mask(TEXT)
    actual = model(**inputs, read_positions=READ)
    assert fed_positions[1] == READ.sum() < fed_positions[0]
    expected = model(**inputs)
    assert torch.equal(actual.last_hidden_state != 0, (READ != 0)[..., None].expand_as(actual.last_hidden_state))
    torch.testing.assert_close(actual.last_hidden_state[READ != 0], expected.last_hidden_state[READ != 0], **TOLERANCE)
    torch.testing.assert_close(actual.pooler_output, expected.pooler_output, **TOLERANCE)


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_layer_skips_unread_positions_with_either_residual(kernel, norm_position):
    config = tiny_bert("model", attn_implementation=kernel).config
    config.norm_position = norm_position
    torch.manual_seed(0)
    layer = EncoderLayer(config).eval()
    states, tokens = torch.randn(2, LENGTH, config.hidden_size), torch.tensor([0, 3, 9])
    expected = layer(states).flatten(0, 1)[tokens]
    mask = Packing(2, LENGTH, None, (LengthBucket(2, LENGTH),), outputs=tokens)
    torch.testing.assert_close(layer(states.flatten(0, 1)[None], mask)[0], expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_outputs_of_each_layer_have_all_positions(name, fed_positions):
    model = tiny_bert("classes", attn_implementation="eager")
    plain = model(**TEXT).logits
    outputs = model(**TEXT, **{name: True})
    assert fed_positions[-2:] == [IDS.numel()] * 2
    torch.testing.assert_close(outputs.logits, plain, **TOLERANCE)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
@pytest.mark.parametrize("name", ["layers.1", "layers.1.self_attn.out_proj", "layers.1.feed_forward"])
def test_hooked_layer_gets_all_positions(name, kind):
    model, shapes = tiny_bert("classes").train(), []
    module = model.bert.get_submodule(name)
    assert read_tokens(model.bert) is not None
    # A hook's last argument is the output, the input, or a gradient of either.
    handle = getattr(module, f"register_{kind}")(
        lambda *args: shapes.append((args[-1] if torch.is_tensor(args[-1]) else args[-1][0]).shape[:2])
    )
    model(input_ids=IDS).logits.sum().backward()
    assert shapes == [(2, LENGTH)]
    handle.remove()
    assert read_tokens(model.bert) is not None


def test_hooked_encoder_gets_all_positions():
    model, outputs = tiny_bert("classes"), []
    model.bert.register_forward_hook(lambda module, args, output: outputs.append(output.last_hidden_state))
    model(input_ids=IDS)
    assert outputs[0].all()


def test_layer_of_a_subclass_gets_all_positions():
    class Layer(EncoderLayer):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            return 2 * hidden_states

    model = tiny_bert("classes")
    assert read_tokens(model.bert) is not None
    model.bert.layers[1] = Layer(model.config)
    assert read_tokens(model.bert) is None
    assert model(input_ids=IDS).logits.shape == (2, 5)


def test_attention_of_a_subclass_gets_all_positions():
    class Attention(SelfAttention):
        def forward(self, hidden_states, attention_mask=None, past_key_values=None, packing=None, **kwargs):
            return 2 * hidden_states, None

    model = tiny_bert("classes")
    model.bert.layers[1].self_attn = Attention(model.config)
    assert read_tokens(model.bert) is None
    assert model(input_ids=IDS).logits.shape == (2, 5)


def test_encoder_without_layers_skips_nothing():
    model = tiny_bert("classes")
    model.bert.layers = model.bert.layers[:0]
    expected = model.bert(IDS).pooler_output
    torch.testing.assert_close(model.bert(IDS, read_positions=READ).pooler_output, expected)


@pytest.mark.parametrize("read", [torch.zeros(2, LENGTH), torch.ones(2, LENGTH), READ.to("meta")])
def test_skipping_is_off_if_no_all_or_unknown_positions_are_read(read):
    model = tiny_bert("model")
    assert read_tokens(model, read) is None


def test_dropout_of_read_positions_has_the_same_distribution(monkeypatch):
    model = tiny_bert("classes", hidden_dropout_prob=0.3).train()

    def logits(share):
        monkeypatch.setattr(packing, "MAX_OUTPUT_SHARE", share)
        torch.manual_seed(0)
        with torch.no_grad():
            return torch.stack([model(input_ids=IDS, attention_mask=MASK).logits for _ in range(800)])

    actual, expected = logits(0.75), logits(0.0)
    error = (actual.var(0) / 800 + expected.var(0) / 800).sqrt()
    assert ((actual.mean(0) - expected.mean(0)).abs() < 4 * error).all()
    torch.testing.assert_close(actual.std(0), expected.std(0), rtol=0.15, atol=0.0)


def test_pooler_always_has_the_first_position():
    model = tiny_bert("model")
    read = torch.zeros(2, LENGTH, dtype=torch.long)
    read[:, 3] = 1
    outputs = model(IDS, read_positions=read)
    torch.testing.assert_close(outputs.pooler_output, model(IDS).pooler_output, **TOLERANCE)


def test_head_in_evaluation_mode_gets_all_positions():
    model = tiny_bert("masked-lm", **NO_DROPOUT)
    expected = model(**TASKS["masked-lm"][3]).logits
    model.train()
    model.cls.eval()
    actual = model(**without_mask(TASKS["masked-lm"][3])).logits
    torch.testing.assert_close(actual[0], expected[0], **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16], ids=str)
def test_labels_may_be_small_integers(dtype):
    model = tiny_bert("masked-lm", vocab_size=200, **NO_DROPOUT).train()
    labels = torch.full_like(IDS, 156)  # -100 as an unsigned byte
    expected = model(input_ids=IDS, labels=labels).loss
    torch.testing.assert_close(model(input_ids=IDS, labels=labels.to(dtype)).loss, expected)


@pytest.mark.parametrize("shape", [(2, 6), (2, 1, 7, 7)])
def test_read_positions_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"`read_positions` must have shape \(batch, length\) = \(2, 7\), got \(2, "):
        tiny_bert("model")(**TEXT, read_positions=torch.ones(shape))


def test_labels_of_another_shape_are_named_in_the_error():
    with pytest.raises(ValueError, match=r"`labels` must have shape \(2, 7\), got \(2, 6\)"):
        tiny_bert("masked-lm").train()(**TEXT, labels=torch.ones(2, 6, dtype=torch.long))


@pytest.mark.parametrize("missing", ["input_ids", "inputs_embeds"])
def test_skipping_works_with_ids_and_with_embeddings(missing, fed_positions):
    model = tiny_bert("classes")
    inputs = {"input_ids": IDS, "inputs_embeds": model.get_input_embeddings()(IDS)}
    inputs.pop(missing)
    outputs = model(**inputs, attention_mask=MASK)
    assert fed_positions == [12, 2]
    torch.testing.assert_close(outputs.logits, model(input_ids=IDS, attention_mask=MASK).logits, **TOLERANCE)


def test_patched_layer_gets_all_positions():
    model, shapes = tiny_bert("classes"), []
    forward = model.bert.layers[0].forward

    def patched(hidden_states, *args, **kwargs):
        shapes.append(hidden_states.shape)
        return forward(hidden_states, *args, **kwargs)

    model.bert.layers[0].forward = patched
    model(**TEXT)
    assert shapes == [(2, LENGTH, 12)]
