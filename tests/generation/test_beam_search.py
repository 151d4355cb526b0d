"""Beam search against transformers' own, against all sequences of a tiny vocabulary, and against itself row by row."""

import copy
import importlib
import itertools
from functools import partial

import pytest
import torch
from searching import assert_same, search, search_stock
from tiny_translator import BOS, EOS, PAD, sources, trained_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LogitsProcessorList,
    MarianConfig,
    MarianMTModel,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.streamers import BaseStreamer

from hf_vanilla.generation import beam_search, length_penalty_of
from hf_vanilla.generation.beam_decoders import SideBySideDecoder
from hf_vanilla.generation.beam_search import best_continuations, log_sum_exp
from hf_vanilla.models.cache_names import CACHE_NAME


@pytest.fixture(scope="module")
def model():
    return trained_model()


@pytest.fixture(scope="module")
def inputs():
    torch.manual_seed(1)
    return sources(batch=9)  # with 4 beams enough rows for packed weights


OPTIONS = {
    "default": {},
    "one beam more": {"num_beams": 5},
    "n-best": {"num_return_sequences": 3},
    "early_stopping": {"early_stopping": True},
    "never stops early": {"early_stopping": "never"},
    "no penalty": {"length_penalty": 0.0},
    "long is good": {"length_penalty": 2.0, "early_stopping": "never"},
    "long is bad": {"length_penalty": -1.0},
    "max_length": {"max_length": 5},
    "min_length": {"min_length": 8},
    "min_new_tokens": {"min_new_tokens": 4},
    "suppress_tokens": {"suppress_tokens": [0, 4, 5, 9]},
    "suppress nothing": {"suppress_tokens": []},
    "ids outside": {"logits_processor": LogitsProcessorList([SuppressTokensLogitsProcessor([-1, 5, 99])])},
    "two ends": {"eos_token_id": [2, 5]},
    "no end": {"eos_token_id": None, "suppress_tokens": [0, 2]},
    "padding that is not 0": {"pad_token_id": 3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "of the source": {"encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 1.5},
    "forced tokens": {"forced_bos_token_id": 7, "forced_eos_token_id": 2, "early_stopping": True},
    "time": {"max_time": 1000.0},
    "without cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_search_equals_transformers(model, inputs, options):
    options = {"num_beams": 4, "max_new_tokens": None if "max_length" in options else 20, **options}
    theirs = search_stock(model, inputs, **options)
    ours = search(model, inputs, **options)
    assert_same(ours, theirs)
    sequences = model.generate(**inputs, custom_generate=beam_search, **options)
    torch.testing.assert_close(sequences, theirs.sequences, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"max_length_offset": 3}], ids=["plain", "own lengths"])
@pytest.mark.parametrize("mask", ["repeated for beams", "too short", "of one row"])
def test_masks_of_other_shapes_are_refused(model, inputs, mask, options):
    encoded = model.get_encoder()(**inputs)
    given = inputs["attention_mask"]
    wrong = {"repeated for beams": given.repeat_interleave(4, 0), "too short": given[:, 1:], "of one row": given[:1]}
    with pytest.raises(ValueError, match=r"`attention_mask` must have shape .* = \(9, 7\), got"):
        search(model, {"encoder_outputs": encoded, "attention_mask": wrong[mask]}, num_beams=4, **options)


@pytest.mark.parametrize("part", ["model", "model.decoder"])
@pytest.mark.parametrize("way", ["hook", "subclass"])
def test_search_computes_what_the_model_inside_does(model, inputs, part, way):
    changed = copy.deepcopy(model)
    inside = changed.get_submodule(part)

    def roll(module, args, outputs):
        outputs.last_hidden_state = outputs.last_hidden_state.roll(1, -1)
        return outputs

    if way == "hook":
        inside.register_forward_hook(roll)
    else:
        kind = type(inside)
        forward = {"forward": lambda self, *args, **kwargs: roll(self, args, kind.forward(self, *args, **kwargs))}
        inside.__class__ = type("Rolled", (kind,), forward)
    options = {"num_beams": 4, "max_new_tokens": 9}
    found = search(changed, inputs, **options)
    assert_same(found, search_stock(changed, inputs, **options))
    assert not torch.equal(found.sequences[:, :2], search(model, inputs, **options).sequences[:, :2])


def test_models_of_double_precision_are_searched(model, inputs):
    options = {"num_beams": 4, "max_new_tokens": 20}
    found = search(copy.deepcopy(model).double(), inputs, **options)
    torch.testing.assert_close(found.sequences, search(model, inputs, **options).sequences)
    assert found.sequences_scores.dtype == torch.float64


def test_without_an_end_short_sequences_are_padded(model, inputs):
    options = {"num_beams": 4, "eos_token_id": None, "pad_token_id": 4, "max_length_offset": 1, "max_new_tokens": 20}
    found = search(model, inputs, **options)
    lengths = 2 + inputs["attention_mask"].sum(1)  # with the start token
    assert lengths.unique().numel() > 1
    is_after = torch.arange(found.sequences.shape[1]) >= lengths[:, None]
    assert (found.sequences[is_after] == 4).all()


def test_translations_have_different_lengths(model, inputs):
    generated = (search(model, inputs, num_beams=4, max_new_tokens=20).beam_indices >= 0).sum(1)
    assert generated.min() < 8  # some leave the batch early
    assert generated.max() == 20  # and some use up the room for their keys more than once
    assert len(generated.unique()) > 2


CONFIGS = {
    "pre-norm": {"norm_position": "pre"},
    "learned positions": {"position_type": "learned", "max_position_embeddings": 13},
    "two vocabularies": {
        "source_vocab_size": 50,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
    },
    "more words than a run": {"vocab_size": 200},
    "runs without rest": {"vocab_size": 128},
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_search_equals_transformers_with_any_config(config, implementation, inputs):
    model = trained_model(steps=5, **config)
    model.set_attn_implementation(implementation)
    options = {"num_beams": 4, "max_new_tokens": 12}
    assert_same(search(model, inputs, **options), search_stock(model, inputs, **options))


def foreign_model():
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": None}
    model = MarianMTModel(MarianConfig(vocab_size=30, **sizes, **heads, **ids)).eval()
    with torch.no_grad():
        model.final_logits_bias.normal_()
    return model


def test_search_equals_transformers_with_another_model(inputs):
    model = foreign_model()
    options = {"num_beams": 4, "max_new_tokens": 12, "num_return_sequences": 2}
    assert_same(search(model, inputs, **options), search_stock(model, inputs, **options))


def test_search_takes_a_prompt_and_encoder_outputs(model, inputs):
    prompt = torch.tensor([[BOS, 5, 9]]).repeat(9, 1)
    encoder_outputs = model.get_encoder()(**inputs)
    given = {
        "encoder_outputs": encoder_outputs,
        "attention_mask": inputs["attention_mask"],
        "decoder_input_ids": prompt,
    }
    options = {"num_beams": 4, "max_new_tokens": 12, "early_stopping": "never"}
    ours = search(model, given, **options)
    assert_same(ours, search_stock(model, given, **options))
    assert (ours.sequences[:, :3] == prompt).all()


def test_left_padding_and_empty_rows_are_masked(model, inputs):
    emptied = {name: tensor.clone() for name, tensor in inputs.items()}
    for tensor in emptied.values():
        tensor[4] = 0
    options = {"num_beams": 4, "max_new_tokens": 12}
    ours, full = search(model, emptied, **options), search(model, inputs, **options)
    assert torch.isfinite(ours.sequences_scores).all()
    others = torch.arange(9) != 4
    torch.testing.assert_close(ours.sequences_scores[others], full.sequences_scores[others])
    assert ours.sequences_scores[4] != full.sequences_scores[4]
    left = {name: tensor.flip(1) for name, tensor in emptied.items()}
    for row, length in enumerate(left["attention_mask"].sum(1).tolist()):
        left["input_ids"][row, 7 - length :] = emptied["input_ids"][row, :length]
    assert_same(search(model, left, **options), ours)


def test_given_cache_is_filled(model, inputs):
    options = {"num_beams": 1, "max_new_tokens": 5, "eos_token_id": None}
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    found = search(model, inputs, **{CACHE_NAME: cache}, **options)
    assert_same(found, search(model, inputs, **options))
    assert found[CACHE_NAME] is cache
    assert cache.get_seq_length() == 5


def test_missing_source_mask_means_no_padding(model, inputs):
    unmasked = {"input_ids": inputs["input_ids"][:, :1]}
    options = {"num_beams": 4, "max_new_tokens": 12}
    ours = search(model, unmasked, max_length_offset=3, **options)
    masked = {**unmasked, "attention_mask": torch.ones(9, 1, dtype=torch.long)}
    assert_same(ours, search(model, masked, max_length_offset=3, **options))
    assert ours.sequences.shape[1] <= 1 + 1 + 3


def test_outputs_equal_those_of_transformers(model, inputs):
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    asked = {"output_scores": True, "output_logits": True, "output_attentions": True, "output_hidden_states": True}
    options = {"num_beams": 4, "max_new_tokens": 9, **asked}
    ours, theirs = search(model, inputs, **options), search_stock(model, inputs, **options)
    assert_same(ours, theirs)
    assert type(ours) is type(theirs)
    assert set(ours.keys()) == set(theirs.keys())
    for name in ("scores", "logits", "encoder_attentions", "encoder_hidden_states"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4)
    for name in ("decoder_attentions", "cross_attentions", "decoder_hidden_states"):
        assert len(ours[name]) == len(theirs[name])
        for our_step, their_step in zip(ours[name], theirs[name], strict=True):
            torch.testing.assert_close(our_step, their_step, rtol=1e-4, atol=1e-4)


def test_token_scores_add_up_to_the_sequence_score(model, inputs):
    options = {"num_beams": 4, "max_new_tokens": 9, "output_scores": True, "length_penalty": 0.6}
    outputs = search(model, inputs, length_penalty_type="gnmt", **options)
    words = model.compute_transition_scores(outputs.sequences, outputs.scores, outputs.beam_indices)
    lengths = (outputs.beam_indices >= 0).sum(1)
    torch.testing.assert_close(words.sum(1) / ((5 + lengths) / 6) ** 0.6, outputs.sequences_scores)


def test_outputs_can_be_changed_in_place(model, inputs):
    outputs = search(model, inputs, num_beams=4, max_new_tokens=9)
    outputs.sequences[outputs.sequences == EOS] = -100
    outputs.sequences_scores += 1
    assert not outputs.sequences.is_inference()
    assert outputs.past_key_values is None


@pytest.mark.parametrize("with_end", [True, False], ids=["ends", "no end"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.6])
def test_one_beam_is_greedy_search(model, inputs, length_penalty, with_end):
    assert len(inputs["attention_mask"].sum(1).unique()) > 2
    ends = {} if with_end else {"eos_token_id": None, "suppress_tokens": [PAD, EOS]}
    options = {"num_beams": 1, "max_new_tokens": 9, **ends}
    greedy = model.generate(**inputs, return_dict_in_generate=True, output_logits=True, **options)
    ours = search(model, inputs, length_penalty=length_penalty, **options)
    is_padding = ours.beam_indices < 0
    lengths = (~is_padding).sum(1)
    assert set((ours.sequences == EOS).any(1).tolist()) == ({True, False} if with_end else {False})
    assert len(lengths.unique()) > (2 if with_end else 0)
    torch.testing.assert_close(ours.sequences[:, 1:].masked_fill(is_padding, PAD), greedy.sequences[:, 1:])
    # as in all beam search, probabilities are those of the model, before words are suppressed
    words = model.compute_transition_scores(greedy.sequences, greedy.logits, normalize_logits=True)
    expected = words.masked_fill(is_padding, 0.0).sum(1) / lengths**length_penalty
    torch.testing.assert_close(ours.sequences_scores, expected, rtol=1e-5, atol=1e-5)


class Stream(BaseStreamer):
    """Records its inputs."""

    def __init__(self):
        self.given, self.has_ended = [], False

    def put(self, value):
        self.given.append(value)

    def end(self):
        self.has_ended = True


STREAMED = {
    "sentences leave": {},
    "any model": {"min_length": 3},
    "own lengths": {"max_length_offset": 0, "eos_token_id": None, "suppress_tokens": [PAD, EOS]},
}


@pytest.mark.parametrize("options", STREAMED.values(), ids=STREAMED)
def test_one_beam_streams_its_tokens_and_ends(model, inputs, options):
    stream = Stream()
    sequences = search(model, inputs, max_new_tokens=9, streamer=stream, **options).sequences
    prompt, *tokens = stream.given
    assert torch.equal(torch.cat((prompt, torch.stack(tokens, dim=1)), dim=1), sequences)
    assert stream.has_ended
    assert not tokens[0].is_inference()


def test_streams_tokens_of_a_foreign_model(inputs):
    stream = Stream()
    custom_generate = partial(beam_search, streamer=stream)
    options = {"max_new_tokens": 5, "streamer": stream, "custom_generate": custom_generate}
    sequences = foreign_model().generate(**inputs, **options)
    prompt, *tokens = stream.given
    assert torch.equal(torch.cat((prompt, torch.stack(tokens, dim=1)), dim=1), sequences)
    assert stream.has_ended
    with pytest.raises(ValueError, match=r"`streamer` can't be combined with `num_beams` \(4\)"):
        foreign_model().generate(**inputs, **options, num_beams=4)


def test_refuses_to_stream_several_beams_before_any_token(model, inputs):
    stream = Stream()
    with pytest.raises(ValueError, match="`streamer` cannot be used with beam search"):
        search(model, inputs, num_beams=4, streamer=stream)
    assert stream.given == []


@torch.no_grad()
def all_sequences(model, source, max_new_tokens, vocab_size):
    """Every sequence that can be generated, with its log probability and its length: a list of tuples."""
    words = [word for word in range(vocab_size) if word not in (PAD, EOS)]
    found = []
    for length in range(1, max_new_tokens + 1):
        last_words = [EOS, *words] if length == max_new_tokens else [EOS]
        sequences = [[*start, last] for start in itertools.product(words, repeat=length - 1) for last in last_words]
        targets = torch.tensor(sequences)
        inputs = torch.cat((torch.full((len(targets), 1), BOS), targets[:, :-1]), dim=1)
        logits = model(source.expand(len(targets), -1), decoder_input_ids=inputs).logits
        log_probs = logits.log_softmax(-1).gather(2, targets[..., None]).sum((1, 2))
        found += [(log_prob.item(), sequence) for log_prob, sequence in zip(log_probs, sequences, strict=True)]
    return found


@pytest.mark.parametrize("length_penalty_type", ["gnmt", "power"])
@pytest.mark.parametrize("length_penalty", [0.6, 0.0, 2.0])
def test_search_equals_exhaustive_search(length_penalty, length_penalty_type):
    vocab_size, max_new_tokens, returned = 6, 4, 9
    model = trained_model(steps=1, vocab_size=vocab_size)
    source = torch.tensor([[3, 4, 5, EOS], [5, 5, 3, EOS]])
    outputs = search(
        model,
        {"input_ids": source},
        num_beams=341,  # 1 + 4 + 16 + 64 sequences with an end, 256 without: none is ever dropped
        num_return_sequences=returned,
        max_new_tokens=max_new_tokens,
        early_stopping="never",
        length_penalty=length_penalty,
        length_penalty_type=length_penalty_type,
    )
    sequences = outputs.sequences.view(2, returned, -1)
    for row in range(2):
        found = all_sequences(model, source[row : row + 1], max_new_tokens, vocab_size)
        assert len(found) == 341
        penalty = {"gnmt": lambda length: ((5 + length) / 6) ** length_penalty}
        penalty["power"] = lambda length: length**length_penalty
        scored = sorted(((score / penalty[length_penalty_type](len(seq)), seq) for score, seq in found), reverse=True)
        for place in range(returned):
            score, expected = scored[place]
            assert outputs.sequences_scores[row * returned + place].item() == pytest.approx(score, abs=1e-5)
            assert sequences[row, place, 1 : 1 + len(expected)].tolist() == expected


@pytest.mark.parametrize(
    ("length", "length_penalty", "length_penalty_type", "expected"),
    [
        (1, 0.6, "gnmt", 1.0),
        (13, 1.0, "gnmt", 3.0),
        (25, 0.6, "gnmt", 5**0.6),
        (9, 0.5, "power", 3.0),
        (9, 0, "gnmt", 1),
    ],
)
def test_length_penalty_of_both_types(length, length_penalty, length_penalty_type, expected):
    assert length_penalty_of(length, length_penalty, length_penalty_type) == pytest.approx(expected)


def test_missing_continuations_are_dropped():
    model = trained_model(
        steps=1, vocab_size=5
    )  # one word, the begin and the end besides padding and the unknown word
    inputs = {"input_ids": torch.tensor([[3, 4, EOS]])}
    outputs = search(model, inputs, num_beams=8, num_return_sequences=8, max_new_tokens=2, suppress_tokens=[0, 1, 3])
    words = {tuple(sequence) for sequence in outputs.sequences[:, 1:].tolist()}
    assert {(EOS, EOS), (4, EOS), (4, 4)} <= words
    assert (outputs.sequences_scores[:3] > -100).all()
    assert (outputs.sequences_scores[3:] == -1e9).all()
    assert (outputs.beam_indices[3:] == -1).all()


def test_constraints_see_allowed_beams_only(model, inputs):
    following = {(): [5, 6], (5,): [7, EOS], (6,): [EOS], (5, 7): [8, 9], (5, 7, 8): [EOS], (5, 7, 9): [EOS]}

    def allowed(row, ids):
        words = tuple(ids[1:].tolist())
        return [7] if row == 0 else [EOS] if EOS in words else following[words]

    options = {"num_beams": 4, "max_new_tokens": 6, "prefix_allowed_tokens_fn": allowed}
    assert_same(search(model, inputs, **options), search_stock(model, inputs, **options))


def projected_rows(model, **options):
    """Number of sentences that each step projects onto the vocabulary."""
    rows = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: rows.append(len(args[0])))
    outputs = search(model, **options)
    hook.remove()
    return rows, outputs


def test_finished_sentences_leave_the_batch(model, inputs):
    options = {"num_beams": 4, "max_new_tokens": 20}
    rows, _ = projected_rows(model, inputs=inputs, **options)
    assert rows[0] == 9
    assert rows[-1] < 9
    rows, _ = projected_rows(model, inputs=inputs, output_scores=True, **options)
    assert set(rows) == {9}


class CountWaits(TorchDispatchMode):
    """Counts, after each call of a layer, operations that synchronize with an accelerator or copy to it."""

    waits = {"item", "is_nonzero", "_local_scalar_dense", "nonzero", "masked_select", "lift_fresh"}

    def __init__(self, layer):
        super().__init__()
        self.counts = []
        layer.register_forward_hook(lambda *args: self.counts.append(0))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith("index"):  # boolean masks synchronize
            indices = [index for index in tree_leaves(args[1:]) if isinstance(index, torch.Tensor)]
            is_wait = any(index.dtype == torch.bool for index in indices)
        else:
            is_wait = name in self.waits
        if is_wait and self.counts:
            self.counts[-1] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("options", "least_reused"),
    [({}, 3), ({"eos_token_id": None}, 2), ({"output_scores": True}, 0)],
    ids=["sentences leave", "none leaves", "any model"],
)
def test_step_synchronizes_with_an_accelerator_once(model, inputs, options, least_reused, monkeypatch):
    model = copy.deepcopy(model)
    reuse_slots, reused = SideBySideDecoder.reuse_slots, []

    def spy(decoder):
        reused.append(len(count.counts))
        reuse_slots(decoder)

    monkeypatch.setattr(SideBySideDecoder, "reuse_slots", spy)
    with CountWaits(model.lm_head) as count:
        search(model, inputs, num_beams=4, max_new_tokens=20, **options)
    assert len(count.counts) == 20
    assert least_reused <= len(reused) < 6
    # Each step reads the number of open sentences, or also of slots to keep; the last also whether a score is nan, and
    # the longest sequence.
    assert count.counts == [1 + reused.count(step) for step in range(1, 20)] + [3]


@pytest.mark.parametrize("steps", [3, 8])
@pytest.mark.parametrize("name", ["default", "n-best", "never stops early", "max_length", "suppress_tokens", "no end"])
def test_rare_questions_of_what_is_finished_change_nothing(model, inputs, name, steps, monkeypatch):
    options = {"num_beams": 4, "max_new_tokens": None if name == "max_length" else 20, **OPTIONS[name]}
    expected = search(model, inputs, **options)
    module = importlib.import_module("hf_vanilla.generation.beam_search")
    monkeypatch.setattr(module, "STEPS_BETWEEN_CHECKS", steps)  # as for an accelerator
    model = copy.deepcopy(model)
    with CountWaits(model.lm_head) as count:
        assert_same(search(model, inputs, **options), expected)
    silent = min(steps, len(count.counts)) - 1  # later, slots are reused, too
    assert count.counts[:silent] == [0] * silent


@pytest.mark.parametrize("lengths", [{}, {"min_new_tokens": 20, "forced_eos_token_id": EOS}], ids=["free", "forced"])
def test_row_does_not_depend_on_the_batch(model, inputs, lengths):
    options = {"num_beams": 4, "max_new_tokens": 30, "max_length_offset": 4, "length_penalty_type": "gnmt", **lengths}
    together = search(model, inputs, **options)
    last = together.sequences.gather(1, (together.beam_indices >= 0).sum(1, keepdim=True))
    assert (last == EOS).all()
    for row in range(9):
        length = int(inputs["attention_mask"][row].sum())
        alone = search(model, {"input_ids": inputs["input_ids"][row : row + 1, :length]}, **options)
        width = alone.sequences.shape[1]
        torch.testing.assert_close(together.sequences[row : row + 1, :width], alone.sequences)
        torch.testing.assert_close(together.sequences_scores[row : row + 1], alone.sequences_scores)
        assert width <= 1 + length + 4


def test_max_length_offset_counts_from_each_source(model, inputs):
    options = {"num_beams": 4, "max_new_tokens": 30, "eos_token_id": None, "suppress_tokens": [PAD, EOS]}
    for offset in (0, 3):
        outputs = search(model, inputs, max_length_offset=offset, **options)
        expected = inputs["attention_mask"].sum(1) + offset
        assert (outputs.beam_indices >= 0).sum(1).tolist() == expected.tolist()


class StopAtToken(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


def test_custom_stopping_criteria_end_sequences(model, inputs):
    options = {"num_beams": 4, "max_new_tokens": 20, "stopping_criteria": StoppingCriteriaList([StopAtToken(7)])}
    assert_same(search(model, inputs, **options), search_stock(model, inputs, **options))


def test_search_computes_in_float32_by_any_default(model, inputs):
    options = {"num_beams": 4, "max_new_tokens": 12, "early_stopping": True}
    expected = search(model, inputs, **options)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = search(model, inputs, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=0, atol=0)


def test_half_precision_is_close(model, inputs):
    model = copy.deepcopy(model)
    options = {"num_beams": 4, "max_new_tokens": 12, "early_stopping": True}
    full = search(model, inputs, **options)
    half = search(model.bfloat16(), inputs, **options)
    assert half.sequences_scores.dtype == torch.float32
    torch.testing.assert_close(half.sequences_scores, full.sequences_scores, rtol=0, atol=0.1)


@pytest.mark.parametrize("vocab", [3, 63, 64, 65, 200, 1000])
@pytest.mark.parametrize("count", [1, 8, 300])
def testbest_continuations_are_those_of_a_full_sort(vocab, count):
    logits, scores = torch.randn(2, 5, vocab), torch.randn(2, 5)
    normalizers = log_sum_exp(logits)
    best, beams, tokens = best_continuations(logits, normalizers, scores, count)
    full = (logits.log_softmax(-1) + scores[..., None]).flatten(1)
    expected, indices = full.sort(descending=True)
    existing = min(count, 5 * vocab)
    assert best.shape == beams.shape == tokens.shape == (2, count)
    torch.testing.assert_close(best[:, :existing], expected[:, :existing])
    assert torch.isneginf(best[:, existing:]).all()
    torch.testing.assert_close((beams * vocab + tokens)[:, :existing], indices[:, :existing])


@pytest.mark.parametrize("scale", [1.0, 1e4], ids=["small", "large"])
def test_log_sum_exp_equals_torch(scale):
    logits = torch.randn(3, 50, 3000) * scale  # several blocks of rows
    torch.testing.assert_close(log_sum_exp(logits), logits.logsumexp(-1))
    assert log_sum_exp(logits.bfloat16()).dtype == torch.float32


OTHER_MODES = {
    "force_words_ids": [[5]],
    "constraints": [],
    "penalty_alpha": 0.6,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "dola_layers": "high",
    "prompt_lookup_num_tokens": 3,
    "use_mtp": True,
    "low_memory": True,
}
OUTSIDE = r" must be in \[0, 30\), the ids of the target vocabulary; got "
REFUSED = [
    ({"do_sample": True}, ValueError, "`do_sample` must be false"),
    ({"assistant_model": object()}, ValueError, "`assistant_model` is not used by this `custom_generate`"),
    ({"cache_implementation": "paged"}, ValueError, 'Continuous batching .*="paged".* needs a paged cache'),
    ({"length_penalty": 11.0}, ValueError, r"`length_penalty` must be in \[-10, 10\], got 11.0"),
    ({"length_penalty_type": "wu"}, ValueError, '`length_penalty_type` must be "gnmt" or "power", got \'wu\''),
    ({"max_length_offset": -1}, ValueError, "`max_length_offset` must be at least 0, got -1"),
    ({"max_length_offset": 0.5}, TypeError, "`max_length_offset` must be an integer, got 0.5"),
    *(({name: value}, ValueError, f"`{name}` .* drop it, or drop `custom") for name, value in OTHER_MODES.items()),
    ({"num_beams": 0}, ValueError, "`num_beams` must be at least 1, got 0"),
    ({"num_beams": -1}, ValueError, "`num_beams` must be at least 1, got -1"),
    ({"num_beams": True}, TypeError, "`num_beams` must be an integer, got True"),
    ({"num_return_sequences": 0}, ValueError, "`num_return_sequences` must be at least 1, got 0"),
    ({"num_beams": -1, "num_return_sequences": -1}, ValueError, "`num_return_sequences` must be at least 1, got -1"),
    ({"decoder_start_token_id": 30}, ValueError, f"`decoder_start_token_id`{OUTSIDE}30"),
    ({"decoder_start_token_id": [1] * 8 + [-1]}, ValueError, f"`decoder_start_token_id`{OUTSIDE}-1"),
    ({"decoder_start_token_id": 1.5}, TypeError, "`decoder_start_token_id` must be token ids, .* got 1.5"),
    ({"forced_bos_token_id": -1}, ValueError, f"`forced_bos_token_id`{OUTSIDE}-1"),
    ({"forced_eos_token_id": [2, 30]}, ValueError, f"`forced_eos_token_id`{OUTSIDE}30"),
    ({"suppress_tokens": [5, 30]}, ValueError, f"`suppress_tokens`{OUTSIDE}30"),
    ({"suppress_tokens": [1.5]}, TypeError, "`suppress_tokens` must be token ids, .* got 1.5"),
    ({"begin_suppress_tokens": torch.tensor([-1])}, ValueError, f"`begin_suppress_tokens`{OUTSIDE}-1"),
    ({"decoder_input_ids": torch.tensor([[1, 5]] * 8 + [[1, 30]])}, ValueError, "got 30 at row 8, position 1"),
    (
        {"decoder_input_ids": torch.ones(9, 2)},
        TypeError,
        r"`decoder_input_ids` must be integers .* got torch\.float32",
    ),
]


@pytest.mark.promise("options of a search")
@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=["-".join(case[0]) for case in REFUSED])
def test_refuses(model, inputs, options, error, message):
    with pytest.raises(error, match=message):
        search(model, inputs, **{"num_beams": 4, **options})


def test_uses_all_positions_that_the_model_learnt(inputs):
    model = trained_model(steps=1, position_type="learned", max_position_embeddings=9)
    sequences = search(model, inputs, num_beams=4, max_new_tokens=9, min_length=10).sequences
    assert sequences.shape == (9, 10)
    with pytest.raises(ValueError, match=r"`max_length` \(11.*must not exceed 10"):
        search(model, inputs, num_beams=4, max_new_tokens=10)
