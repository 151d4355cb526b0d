"""The same weights give the same results as in torch's Transformer and in transformers' Marian."""

import warnings

import pytest
import torch
from tiny_models import BATCH, SOURCE, SOURCE_MASK, TARGET, gradients, tiny_config
from torch import nn
from transformers import MarianConfig, MarianMTModel

from hf_vanilla import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
from hf_vanilla.models.layers import sinusoidal_positions


D_MODEL, HEADS, D_FF = 16, 4, 24
SIZES = dict(d_model=D_MODEL, num_heads=HEADS, d_k=None, d_v=None, d_ff=D_FF)
TARGET_MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])


def torch_transformer(norm_first, activation):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")  # torch's own default
        theirs = nn.Transformer(
            D_MODEL,
            HEADS,
            2,
            3,
            D_FF,
            activation=activation,
            norm_first=norm_first,
            batch_first=True,
            dtype=torch.float64,
        )
    if not norm_first:
        # torch ends both stacks with one more norm, which the paper does not have
        theirs.encoder.norm = theirs.decoder.norm = None
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs.eval()


def torch_names(norm_first):
    """Map each of our parameters to torch's Transformer: name -> (name there, slice of its rows)."""
    everything, names = slice(None), {}

    def linear(ours, theirs):
        for kind in ("weight", "bias"):
            names[f"{ours}.{kind}"] = (f"{theirs}.{kind}", everything)

    for stack, layers, norms in (("encoder", 2, 2), ("decoder", 3, 3)):
        for layer in range(layers):
            ours, theirs = f"{stack}.layers.{layer}", f"{stack}.layers.{layer}"
            for kind in ("weight", "bias"):
                names[f"{ours}.self_attn.qkv_proj.{kind}"] = (f"{theirs}.self_attn.in_proj_{kind}", everything)
                if stack == "decoder":
                    cross = f"{theirs}.multihead_attn.in_proj_{kind}"
                    names[f"{ours}.cross_attn.q_proj.{kind}"] = (cross, slice(0, D_MODEL))
                    names[f"{ours}.cross_attn.kv_proj.{kind}"] = (cross, slice(D_MODEL, None))
            linear(f"{ours}.self_attn.out_proj", f"{theirs}.self_attn.out_proj")
            linear(f"{ours}.feed_forward.fc1", f"{theirs}.linear1")
            linear(f"{ours}.feed_forward.fc2", f"{theirs}.linear2")
            linear(f"{ours}.self_attn_residual.layer_norm", f"{theirs}.norm1")
            linear(f"{ours}.feed_forward_residual.layer_norm", f"{theirs}.norm{norms}")
            if stack == "decoder":
                linear(f"{ours}.cross_attn.out_proj", f"{theirs}.multihead_attn.out_proj")
                linear(f"{ours}.cross_attn_residual.layer_norm", f"{theirs}.norm2")
        if norm_first:
            linear(f"{stack}.norm", f"{stack}.norm")
    return names


def same_as(theirs, norm_first, activation, kernel):
    config = tiny_config(
        **SIZES,
        norm_position="pre" if norm_first else "post",
        activation_function=activation,
        layer_norm_eps=theirs.encoder.layers[0].norm1.eps,
    )
    config._attn_implementation = kernel
    ours = VanillaTransformerModel(config).double().eval()
    with torch.no_grad():
        for name, (theirs_name, rows) in torch_names(norm_first).items():
            ours.get_parameter(name).copy_(theirs.get_parameter(theirs_name)[rows])
    return ours


def before_scale_and_positions(states):
    """Return embeddings that become `states` once the model scales by sqrt(d_model) and adds positions."""
    positions = sinusoidal_positions(torch.arange(states.shape[1]), D_MODEL, "sinusoidal").to(states.dtype)
    return (states - positions) / D_MODEL**0.5


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_outputs_and_gradients_equal_those_of_torch(norm_first, activation, kernel, padded):
    theirs = torch_transformer(norm_first, activation)
    ours = same_as(theirs, norm_first, activation, kernel)
    source = torch.randn(2, 5, D_MODEL, dtype=torch.float64, requires_grad=True)
    target = torch.randn(2, 7, D_MODEL, dtype=torch.float64, requires_grad=True)
    source_mask, target_mask = (SOURCE_MASK, TARGET_MASK) if padded else (None, None)

    actual = ours(
        inputs_embeds=before_scale_and_positions(source),
        attention_mask=source_mask,
        decoder_inputs_embeds=before_scale_and_positions(target),
        decoder_attention_mask=target_mask,
        use_cache=False,
    ).last_hidden_state
    expected = theirs(
        source,
        target,
        tgt_mask=torch.ones(7, 7, dtype=torch.bool).triu(1),
        src_key_padding_mask=SOURCE_MASK == 0 if padded else None,
        memory_key_padding_mask=SOURCE_MASK == 0 if padded else None,
        tgt_key_padding_mask=TARGET_MASK == 0 if padded else None,
    )
    tokens = TARGET_MASK.bool() if padded else torch.ones(2, 7, dtype=torch.bool)
    torch.testing.assert_close(actual[tokens], expected[tokens], rtol=1e-9, atol=1e-11)

    direction = torch.randn_like(expected) * tokens[..., None]
    gradients_of_ours = torch.autograd.grad((actual * direction).sum(), (source, target), retain_graph=True)
    gradients_of_theirs = torch.autograd.grad((expected * direction).sum(), (source, target), retain_graph=True)
    for one, other in zip(gradients_of_ours, gradients_of_theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11)
    (actual * direction).sum().backward()
    (expected * direction).sum().backward()
    for name, (theirs_name, rows) in torch_names(norm_first).items():
        torch.testing.assert_close(
            ours.get_parameter(name).grad,
            theirs.get_parameter(theirs_name).grad[rows],
            rtol=1e-8,
            atol=1e-11,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_every_parameter_of_torch_is_mapped():
    for norm_first in (False, True):
        theirs = torch_transformer(norm_first, "relu")
        ours = same_as(theirs, norm_first, "relu", "sdpa")
        names = torch_names(norm_first)
        assert {name for name, _ in names.values()} == {name for name, _ in theirs.named_parameters()}
        embeddings = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
        assert set(names) == {name for name, _ in ours.named_parameters(remove_duplicate=False)} - embeddings


@pytest.fixture(scope="module")
def marian():
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=13,
        d_model=D_MODEL,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=D_FF,
        decoder_ffn_dim=D_FF,
        activation_function="relu",
        scale_embedding=True,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        init_std=0.2,
    )
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "shared" not in name and "embed" not in name:
                parameter.mul_(4.0)  # large enough that the model does not just repeat its input
    return model


@pytest.fixture(scope="module")
def twin(marian):
    """Our model with the weights of Marian."""
    config = tiny_config(**SIZES, position_type="sinusoidal_split", layer_norm_eps=1e-5)
    ours = VanillaTransformerForConditionalGeneration(config).eval()
    theirs = marian.state_dict()
    state = {"model.encoder.embed_tokens.weight": theirs["model.shared.weight"]}
    state["model.decoder.embed_tokens.weight"] = state["lm_head.weight"] = theirs["model.shared.weight"]
    renamed = {"self_attn_residual.layer_norm": "self_attn_layer_norm", "feed_forward.fc1": "fc1"}
    renamed |= {"feed_forward.fc2": "fc2", "feed_forward_residual.layer_norm": "final_layer_norm"}
    renamed |= {"cross_attn_residual.layer_norm": "encoder_attn_layer_norm"}
    renamed |= {"cross_attn.q_proj": "encoder_attn.q_proj", "cross_attn.out_proj": "encoder_attn.out_proj"}
    for name in ours.state_dict():
        prefix, _, kind = name.rpartition(".")
        for one, other in renamed.items():
            prefix = prefix.replace(one, other)
        if prefix.endswith("qkv_proj"):
            parts = [prefix.replace("qkv_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
        elif prefix.endswith("kv_proj"):
            prefix = prefix.replace("cross_attn", "encoder_attn")
            parts = [prefix.replace("kv_proj", part) for part in ("k_proj", "v_proj")]
        else:
            parts = [prefix]
        if name not in state:
            state[name] = torch.cat([theirs[f"{part}.{kind}"] for part in parts])
    ours.load_state_dict(state)
    return ours


@torch.no_grad()
def test_logits_and_hidden_states_equal_those_of_marian(marian, twin):
    inputs = dict(input_ids=SOURCE, attention_mask=SOURCE_MASK, decoder_input_ids=TARGET, output_hidden_states=True)
    expected, actual = marian(**inputs), twin(**inputs)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-5, atol=1e-5)
    tokens = SOURCE_MASK.bool()  # positions at padding differ from Marian's
    for one, other in zip(actual.encoder_hidden_states, expected.encoder_hidden_states, strict=True):
        torch.testing.assert_close(one[tokens], other[tokens], rtol=1e-5, atol=1e-5)
    for one, other in zip(actual.decoder_hidden_states, expected.decoder_hidden_states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_loss_and_gradients_equal_those_of_marian(marian, twin):
    for model in (marian, twin):
        model.zero_grad()
        model(**BATCH).loss.backward()
    torch.testing.assert_close(twin(**BATCH).loss, marian(**BATCH).loss)
    ours, theirs = gradients(twin), dict(marian.named_parameters())
    embedding = theirs["model.shared.weight"].grad.clone()
    embedding[0] = 0  # our padding row gets no gradient
    # Sums over all positions, which each side adds in its own order: some dozen roundings of float32.
    torch.testing.assert_close(ours["model.encoder.embed_tokens.weight"], embedding, rtol=1e-4, atol=5e-6)
    for name in ("fc1.weight", "fc2.bias"):
        torch.testing.assert_close(
            ours[f"model.encoder.layers.1.feed_forward.{name}"],
            theirs[f"model.encoder.layers.1.{name}"].grad,
            rtol=1e-4,
            atol=5e-6,
        )


@pytest.mark.parametrize("num_beams", [1, 4])
def test_translations_equal_those_of_marian(marian, twin, num_beams):
    options = dict(num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=9, no_repeat_ngram_size=1)
    options |= dict(suppress_tokens=[0], attention_mask=SOURCE_MASK)
    expected = marian.generate(SOURCE, **options)
    assert torch.equal(twin.generate(SOURCE, **options), expected)
    assert len(expected.unique()) > 4
