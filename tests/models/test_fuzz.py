"""Random configs, inputs and options: only named errors come out, and what is accepted gives numbers."""

import dataclasses
import math
import os
import warnings

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_berts import SIZES, TASKS, tiny_bert
from tiny_models import BATCH, SOURCE, SOURCE_MASK, TARGET, tiny_config, tiny_model

import hf_vanilla
from hf_vanilla.generation import beam_search, score


# `make fuzz` asks for thousands of cases of each test.
CASES = int(os.environ.get("FUZZ_CASES", "25"))
fuzz = settings(
    max_examples=CASES,
    deadline=None,
    derandomize="FUZZ_CASES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
REFUSED = (ValueError, TypeError, StrictDataclassError)

NUMBERS = [0, 1, 2, 3, 5, 7, 16, 24, 10**4, 2**40, -1, -3, True, False]
FLOATS = [0.0, 0.1, 0.5, 1.0, 1.5, -0.5, 1e-30, 1e30, math.nan, math.inf, -math.inf]
OTHERS = [None, "", "x", "gelu", "learned", "pre", [], [1], [-1, 99], {}, {"0": "A"}, {0: "A", 1: "B"}]
anything = st.sampled_from([*NUMBERS, *FLOATS, *OTHERS])

DTYPES = [torch.long, torch.int32, torch.int8, torch.bool, torch.float32, torch.float16, torch.float64]
FILLS = [0, 1, 2, 5, 12, 13, 40, -1, -100, 2**31, 0.5, math.nan, math.inf]


@st.composite
def tensors(draw, like):
    """Draw a tensor of any dtype; half the time in the shape of another one."""
    shape = st.lists(st.integers(0, 8), max_size=3).map(tuple)  # masks of four are transformers' own
    size = draw(st.one_of(st.just(tuple(like.shape)), shape))
    filled = torch.full(size, draw(st.sampled_from(FILLS)), dtype=torch.float64)
    if filled.numel():
        filled.view(-1)[draw(st.integers(0, filled.numel() - 1))] = draw(st.sampled_from(FILLS))
    return filled.nan_to_num(0, 99, -99).clamp(-200, 200).to(draw(st.sampled_from(DTYPES)))


def changed_inputs(inputs, names):
    """Draw inputs of which one or two are replaced, by a tensor, a number, a string, a list or nothing."""
    change = st.sampled_from(sorted({*inputs, *names})).flatmap(
        lambda name: st.tuples(
            st.just(name), st.one_of(tensors(inputs.get(name, next(iter(inputs.values())))), anything)
        )
    )
    return st.lists(change, min_size=1, max_size=2).map(lambda changes: {**inputs, **dict(changes)})


def assert_numbers(output):
    for name, value in output.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert not value.isnan().any(), name


def attempt(function, *args, **kwargs):
    """Call a function; a refusal is as good as an answer, any other error fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(*args, **kwargs)
        except REFUSED:
            return None


FIELDS = {
    family: sorted({field.name for field in dataclasses.fields(config)} | {"num_labels", "problem_type"})
    for family, config in (
        ("bert", hf_vanilla.VanillaBertConfig),
        ("transformer", hf_vanilla.VanillaTransformerConfig),
    )
}


@pytest.mark.parametrize("family", FIELDS)
@given(data=st.data())
@fuzz
def test_any_config_is_refused_or_computes(family, data):
    names = st.sampled_from(FIELDS[family])
    fields = data.draw(st.dictionaries(names, anything, min_size=1, max_size=2))

    def build():
        if family == "bert":
            config = hf_vanilla.VanillaBertConfig(**{**SIZES, **fields})
            model, inputs = hf_vanilla.VanillaBertForMaskedLM(config), TASKS["masked-lm"][3]
        else:
            model, inputs = hf_vanilla.VanillaTransformerForConditionalGeneration(tiny_config(**fields)), BATCH
        return model.eval()(**inputs, return_dict=True)

    output = attempt(build)
    if output is not None:
        assert_numbers(output)


MODELS = {**{task: tiny_bert(task) for task in TASKS}, "translation": tiny_model()}
INPUTS = {**{task: TASKS[task][3] for task in TASKS}, "translation": BATCH}
MORE = {
    "translation": ["decoder_input_ids", "decoder_attention_mask", "inputs_embeds", "decoder_inputs_embeds"],
    "bert": ["position_ids", "inputs_embeds", "token_type_ids", "labels"],
}


@pytest.mark.parametrize("task", INPUTS)
@given(data=st.data())
@fuzz
def test_any_input_is_refused_or_computes(task, data):
    names = MORE.get(task, MORE["bert"])
    inputs = data.draw(changed_inputs(INPUTS[task], [*names, "num_items_in_batch"]))
    model = MODELS[task].train(data.draw(st.booleans()))
    torch.manual_seed(0)
    output = attempt(model, **inputs)
    if output is not None:
        assert_numbers(output)


OPTIONS = {
    "num_beams": NUMBERS[:8] + NUMBERS[10:],
    "num_return_sequences": NUMBERS[:6] + NUMBERS[10:],
    "max_new_tokens": NUMBERS[:6] + NUMBERS[10:],
    "min_new_tokens": NUMBERS[:6] + NUMBERS[10:],
    "max_length": NUMBERS[:6] + NUMBERS[10:],
    "length_penalty": FLOATS,
    "length_penalty_type": ["gnmt", "power", "x", 3],
    "early_stopping": [True, False, "never", "x", 3],
    "do_sample": [True, False],
    "temperature": FLOATS,
    "top_k": NUMBERS[:8],
    "top_p": FLOATS,
    "repetition_penalty": FLOATS,
    "no_repeat_ngram_size": NUMBERS[:6],
    "forced_bos_token_id": [*NUMBERS[:6], 13, -1],
    "forced_eos_token_id": [*NUMBERS[:6], 13, -1],
    "decoder_start_token_id": [*NUMBERS[:6], 13, -1],
    "eos_token_id": [*NUMBERS[:6], 13, -1, [], [2, 3]],
    "pad_token_id": [*NUMBERS[:6], 13, -1],
    "bad_words_ids": [[[5]], [[2]], [[]], [], [[13]], [[-1]], 5],
    "suppress_tokens": [[5], [], [13], [-1], None],
    "output_scores": [True, False],
    "return_dict_in_generate": [True, False],
    "use_cache": [True, False],
}


@pytest.mark.parametrize("search", ["generate", "beam_search"])
@given(data=st.data())
@fuzz
def test_any_option_of_a_search_is_refused_or_works(search, data):
    names = st.lists(st.sampled_from(sorted(OPTIONS)), min_size=1, max_size=3, unique=True)
    options = {name: data.draw(st.sampled_from(OPTIONS[name])) for name in data.draw(names)}
    inputs = {"attention_mask": SOURCE_MASK, "max_new_tokens": 4, **options}
    torch.manual_seed(0)
    custom = {"custom_generate": beam_search} if search == "beam_search" else {}
    attempt(MODELS["translation"].eval().generate, SOURCE, **inputs, **custom)


@given(data=st.data())
@fuzz
def test_any_ids_and_masks_of_a_search_are_refused_or_work(data):
    inputs = {"input_ids": SOURCE, "attention_mask": SOURCE_MASK, "decoder_input_ids": TARGET[:, :1]}
    inputs = data.draw(changed_inputs(inputs, ["inputs_embeds"]))
    custom = data.draw(st.sampled_from([{}, {"num_beams": 3}, {"custom_generate": beam_search, "num_beams": 3}]))
    attempt(MODELS["translation"].eval().generate, **inputs, **custom, max_new_tokens=3)


@given(data=st.data())
@fuzz
def test_any_labels_are_refused_or_scored(data):
    inputs = data.draw(changed_inputs(BATCH, []))
    output = attempt(score, MODELS["translation"].eval(), **inputs)
    if output is not None:
        assert not output.scores.isnan().any()
