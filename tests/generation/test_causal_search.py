"""The search of decoder-only models against transformers' own, on prompts of mixed length."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from searching import assert_same, search, search_stock
from transformers import (
    DynamicCache,
    MambaConfig,
    MambaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from hf_vanilla import VanillaGptForCausalLM
from hf_vanilla.generation import beam_search, fast_model
from hf_vanilla.generation.cpu_layers import PackedLinear, can_pack
from hf_vanilla.models.cache_names import CACHE_NAME


sys.path.append(str(Path(__file__).parents[1] / "models"))

from tiny_gpts import NO_DROPOUT, native_gpt, tiny_gpt


VOCAB, PAD, ENDS = 23, 1, [2, 4, 10, 14, 18]  # so many ends that few texts reach the greatest length
SIZES = dict(vocab_size=VOCAB, max_position_embeddings=40, pad_token_id=PAD, eos_token_id=ENDS)
NORMS = pytest.mark.parametrize("norm", ["post", "pre"])


def prompts(batch=9, longest=7):
    """Prompts of mixed length with padding at the left; with 4 beams they are enough rows for packed weights."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (batch, longest))
    is_token = torch.arange(longest) >= torch.arange(batch)[:, None] % longest
    return {"input_ids": ids.masked_fill(~is_token, PAD), "attention_mask": is_token.long()}


def varied(model):
    """Make the tokens depend on the position, so that texts end, and at different lengths."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "pos" in name or "wpe" in name:
                weight.normal_()
    return model


@pytest.fixture(scope="module")
def model():
    return varied(tiny_gpt(**SIZES))


@NORMS
@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "sizes", [{}, {"n_embd": 20, "n_head": 5, "n_layer": 3, "vocab_size": 29}, {"n_embd": 9, "n_head": 1}], ids=str
)
def test_sequences_equal_those_of_transformers_own_models(norm, num_beams, sizes, tmp_path):
    fixed = {"n_positions": 40, "pad_token_id": PAD, "eos_token_id": ENDS}
    native = varied(native_gpt(norm, **{"vocab_size": VOCAB, **fixed, **sizes}))
    native.save_pretrained(tmp_path)
    model = VanillaGptForCausalLM.from_pretrained(tmp_path)
    options = {"num_beams": num_beams, "max_new_tokens": 15, "do_sample": False}
    expected = native.generate(**prompts(), **options)
    for searched in (model, fast_model(model, 36), native):
        found = searched.generate(**prompts(), **options, custom_generate=beam_search)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    lengths = torch.isin(expected[:, 7:], torch.tensor([*ENDS, PAD])).float().argmax(1)
    assert len(lengths.unique()) > 2


OPTIONS = {
    "default": {},
    "n-best": {"num_return_sequences": 3},
    "early_stopping": {"early_stopping": True},
    "never stops early": {"early_stopping": "never", "length_penalty": 2.0},
    "max_length counts the prompt": {"max_length": 11},
    "min_new_tokens": {"min_new_tokens": 4},
    "suppress_tokens": {"suppress_tokens": [4, 5]},
    "one end": {"eos_token_id": 2},
    "no end": {"eos_token_id": None},
    "padding is 0": {"pad_token_id": 0},
    "repetition_penalty": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "without cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "prompt in parts": {"prefill_chunk_size": 3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_search_equals_transformers(model, options):
    options = {"num_beams": 4, "max_new_tokens": None if "max_length" in options else 20, **options}
    assert_same(search(model, prompts(), **options), search_stock(model, prompts(), **options))


def side(inputs, name):
    """The same prompts in another form."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if name == "right":
        lengths = mask.sum(1).tolist()
        return {
            key: torch.stack([row.roll(length) for row, length in zip(rows, lengths, strict=True)])
            for key, rows in inputs.items()
        }
    if name == "positions":
        return {**inputs, "position_ids": (mask.cumsum(1) * 2).clamp(max=9)}
    return {"input_ids": ids[mask.all(1)]}


@pytest.mark.parametrize("name", ["right", "positions", "no padding"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_search_takes_any_padding_and_positions(model, name, implementation):
    model = copy.deepcopy(model)
    model.set_attn_implementation(implementation)
    options = {"num_beams": 3, "max_new_tokens": 9}
    inputs = side(prompts(), name)
    assert_same(search(model, inputs, **options), search_stock(model, inputs, **options))


def test_empty_prompt_leaves_the_others_as_they_are(model):
    inputs, options = prompts(), {"num_beams": 4, "max_new_tokens": 9}
    others = torch.arange(9) != 4
    emptied = {**inputs, "attention_mask": inputs["attention_mask"] * others[:, None]}
    ours, full = search(model, emptied, **options), search(model, inputs, **options)
    assert torch.isfinite(ours.sequences_scores).all()
    assert torch.equal(ours.sequences[others], full.sequences[others])


def test_embedded_prompts_and_given_pasts_are_continued(model):
    inputs = side(prompts(), "no padding")
    options = {"num_beams": 3, "max_new_tokens": 9}
    embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}
    ours = search(model, embedded, **options)
    torch.testing.assert_close(ours.sequences, search_stock(model, embedded, **options).sequences, rtol=0, atol=0)
    expected = search(model, inputs, num_beams=1, max_new_tokens=9).sequences
    past = model(inputs["input_ids"][:, :-1]).past_key_values
    torch.testing.assert_close(
        search(model, inputs, **{CACHE_NAME: past}, num_beams=1, max_new_tokens=9).sequences, expected, rtol=0, atol=0
    )


def test_given_cache_is_filled(model):
    cache, options = DynamicCache(), {"num_beams": 3, "max_new_tokens": 9, "eos_token_id": None}
    found = search(model, prompts(), **{CACHE_NAME: cache}, **options)
    assert_same(found, search(model, prompts(), **options))
    assert found[CACHE_NAME] is cache
    assert cache.get_seq_length() == 7 + 8


@torch.no_grad()
def stock_model(kind, config, **sizes):
    """A model without attention, whose cache has another name."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2, "pad_token_id": PAD, "eos_token_id": ENDS, **sizes}
    model = kind(config(**sizes)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.5)
    return model


def test_state_space_models_are_searched():
    model = stock_model(MambaForCausalLM, MambaConfig, hidden_size=12, state_size=5)
    options = {"num_beams": 4, "max_new_tokens": 9}
    inputs = side(prompts(), "no padding")
    expected = search_stock(model, inputs, **options)
    assert_same(search(model, inputs, **options), expected)
    assert (expected.beam_indices.diff() != 0).any()


def test_cache_that_can_not_follow_beams_is_refused():
    model = stock_model(RwkvForCausalLM, RwkvConfig, hidden_size=16, attention_hidden_size=16)
    with pytest.raises(ValueError, match="`num_beams` must be 1 with the cache of a RwkvForCausalLM.*, got 4; pass"):
        search(model, side(prompts(), "no padding"), num_beams=4, max_new_tokens=5)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
def test_gradient_checkpointing_needs_no_cache():
    model = varied(tiny_gpt(**SIZES, **NO_DROPOUT)).train()
    options = {"num_beams": 4, "max_new_tokens": 9}
    expected = search(model, prompts(), **options)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="`use_cache` must be false in training mode with gradient checkpointing"):
        search(model, prompts(), **options)
    assert_same(search(model, prompts(), use_cache=False, **options), expected)


@pytest.mark.parametrize("pad_token_id", [PAD, 0])
def test_one_beam_is_greedy_search(model, pad_token_id):
    options = {"num_beams": 1, "max_new_tokens": 20, "pad_token_id": pad_token_id}
    greedy = model.generate(**prompts(), return_dict_in_generate=True, output_logits=True, **options)
    ours = search(model, prompts(), **options)
    assert torch.equal(ours.sequences, greedy.sequences)
    words = model.compute_transition_scores(greedy.sequences, greedy.logits, normalize_logits=True)
    generated = ours.beam_indices >= 0
    assert len(generated.sum(1).unique()) > 2
    expected = words.masked_fill(~generated, 0).sum(1) / generated.sum(1)
    torch.testing.assert_close(ours.sequences_scores, expected, rtol=1e-4, atol=1e-4)  # as above


def test_outputs_equal_those_of_transformers(model):
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    asked = {"output_scores": True, "output_logits": True, "output_attentions": True, "output_hidden_states": True}
    options = {"num_beams": 4, "max_new_tokens": 9, **asked}
    ours, theirs = search(model, prompts(), **options), search_stock(model, prompts(), **options)
    assert_same(ours, theirs)
    assert type(ours) is type(theirs)
    assert set(ours.keys()) == set(theirs.keys())
    for name in ("scores", "logits", "attentions", "hidden_states"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4)


def test_prompt_does_not_depend_on_the_batch(model):
    inputs, options = prompts(), {"num_beams": 4, "max_new_tokens": 20}
    together = search(model, inputs, **options)
    for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        alone = search(model, {"input_ids": inputs["input_ids"][row : row + 1, -length:]}, **options)
        generated = alone.sequences[0, length:]
        assert torch.equal(together.sequences[row, 7 : 7 + len(generated)], generated)
        torch.testing.assert_close(together.sequences_scores[row], alone.sequences_scores[0], rtol=1e-4, atol=1e-4)


def test_prompts_are_read_once_and_leave_when_they_end(model):
    read = []
    hook = model.transformer.layers[0].register_forward_hook(lambda layer, args, output: read.append(output.shape[:2]))
    search(model, prompts(), num_beams=4, max_new_tokens=20)
    hook.remove()
    assert read[:2] == [(9, 7), (9, 4)]
    assert read[-1][0] < 9


class Stream(BaseStreamer):
    def __init__(self):
        self.given, self.has_ended = [], False

    def put(self, value):
        self.given.append(value)

    def end(self):
        self.has_ended = True


def test_tokens_are_streamed(model):
    stream = Stream()
    sequences = search(model, prompts(), max_new_tokens=9, streamer=stream).sequences
    prompt, *tokens = stream.given
    assert torch.equal(torch.cat((prompt, torch.stack(tokens, dim=1)), dim=1), sequences)
    assert stream.has_ended


class StopAtToken(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == 7


def test_custom_stopping_criteria_end_sequences(model):
    options = {"num_beams": 4, "max_new_tokens": 20, "stopping_criteria": StoppingCriteriaList([StopAtToken()])}
    assert_same(search(model, prompts(), **options), search_stock(model, prompts(), **options))


class Inverted(VanillaGptForCausalLM):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = -outputs.logits
        return outputs


class Repeating(VanillaGptForCausalLM):
    def prepare_inputs_for_generation(self, *args, **kwargs):
        prepared = super().prepare_inputs_for_generation(*args, **kwargs)
        return {**prepared, "input_ids": torch.full_like(prepared["input_ids"], 5)}


def inverted(module, args, outputs):
    outputs.logits = -outputs.logits
    return outputs


def changed_states(module, args, outputs):
    outputs.last_hidden_state = outputs.last_hidden_state.roll(1, -1)
    return outputs


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Position ids are not supported:UserWarning")
@pytest.mark.parametrize("way", ["subclass", "preparing", "hook", "hook of the decoder", "patch", "prompt"])
def test_search_computes_what_the_model_does(model, way):
    expected = search(model, prompts(), num_beams=4, max_new_tokens=9)
    changed = copy.deepcopy(model)
    if way == "subclass":
        changed.__class__ = Inverted
    elif way == "preparing":
        changed.__class__ = Repeating
    elif way == "hook":
        changed.register_forward_hook(inverted)
    elif way == "hook of the decoder":
        changed.transformer.register_forward_hook(changed_states)
    elif way == "patch":
        forward = changed.forward
        changed.forward = lambda *args, **kwargs: inverted(changed, args, forward(*args, **kwargs))
    elif CACHE_NAME != "past_key_values":
        pytest.skip("PEFT 0.21 looks for a cache by its old name only")
    else:
        changed = get_peft_model(changed, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    found = search(changed, prompts(), num_beams=4, max_new_tokens=9)
    assert_same(found, search_stock(changed, prompts(), num_beams=4, max_new_tokens=9))
    assert found.sequences.shape != expected.sequences.shape or not torch.equal(found.sequences, expected.sequences)


def test_search_uses_all_positions_that_the_model_learnt():
    model = tiny_gpt(**{**SIZES, "max_position_embeddings": 12})
    assert search(model, prompts(), num_beams=4, max_length=13, min_length=13).sequences.shape == (9, 13)
    with pytest.raises(ValueError, match=r"`max_length` \(14.*must not exceed 13"):
        search(model, prompts(), num_beams=4, max_length=14)


@pytest.mark.parametrize("kind", [search, search_stock])
@pytest.mark.parametrize("shape", [(2, 0), (0, 5)])
def test_empty_prompts_are_refused(model, kind, shape):
    with pytest.raises(ValueError, match="`input_ids` must have at least one token, to continue from; got none"):
        kind(model, {"input_ids": torch.zeros(shape, dtype=torch.long)}, num_beams=4, max_new_tokens=3)


@pytest.mark.parametrize("kind", [search, search_stock])
def test_negative_numbers_of_sequences_are_refused(model, kind):
    with pytest.raises(ValueError, match="`num_beams` or `num_return_sequences` must be at least 1, got -1"):
        kind(model, prompts(), num_beams=-1, num_return_sequences=-3, max_new_tokens=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_copy_finds_the_same(model, dtype):
    model = copy.deepcopy(model).to(dtype)
    fast, options = fast_model(model, 36), {"num_beams": 4, "max_new_tokens": 9, "eos_token_id": None}
    ours, plain = search(fast, prompts(), **options), search(model, prompts(), **options)
    # a product with packed weights rounds differently; bfloat16 has 8 bits
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(ours.sequences_scores, plain.sequences_scores, rtol=0, atol=tolerance)
    assert isinstance(fast.lm_head, PackedLinear) == can_pack(model.lm_head.weight, 36)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_length_offset": 3},
            "`max_length_offset` counts from a source, which a decoder-only model does not have",
        ),
        ({"do_sample": True}, "`do_sample` must be false"),
        ({"input_ids": torch.full((9, 7), VOCAB)}, r"`input_ids` must be in \[0, 23\).*; got 23 at row 0"),
    ],
    ids=["offset", "sampling", "id"],
)
def test_refuses(model, options, message):
    with pytest.raises(ValueError, match=message):
        search(model, {**prompts(), "max_new_tokens": 9, **options})
