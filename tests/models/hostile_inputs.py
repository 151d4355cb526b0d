"""Random configs, inputs, options and files, most of them bad, for test_fuzz.py and scripts/benchmark/soak.py.

Each of `KINDS` draws a call without arguments; `outcome` makes it.
"""

import dataclasses
import json
import math
import pickle
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tiny_gpts
import tiny_vits
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import strategies as st
from safetensors.torch import load, save
from tiny_berts import SIZES, TASKS, tiny_bert
from tiny_models import BATCH, SOURCE, SOURCE_MASK, TARGET, tiny_config, tiny_model

import hf_vanilla
from hf_vanilla.generation import beam_search, score
from hf_vanilla.hub.folder import check_model


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


def outcome(call: Callable[[], Any]) -> str:
    """Make a call, and return `accepted` or the class of its refusal; any other error, or a nan, is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            output = call()
        except REFUSED as error:
            return next(each.__name__ for each in reversed(REFUSED) if isinstance(error, each))
    for name, value in (output or {}).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert not value.isnan().any(), name
    return "accepted"


# Of each family its config of tiny sizes, a model, and inputs.
FAMILIES = {
    "bert": (partial(hf_vanilla.VanillaBertConfig, **SIZES), hf_vanilla.VanillaBertForMaskedLM, TASKS["masked-lm"][3]),
    "transformer": (tiny_config, hf_vanilla.VanillaTransformerForConditionalGeneration, BATCH),
    "gpt": (
        partial(hf_vanilla.VanillaGptConfig, **tiny_gpts.SIZES),
        hf_vanilla.VanillaGptForCausalLM,
        tiny_gpts.TASKS["text"][2],
    ),
    "vit": (
        partial(hf_vanilla.VanillaVitConfig, **tiny_vits.SIZES),
        hf_vanilla.VanillaVitForImageClassification,
        {"pixel_values": tiny_vits.IMAGES, "labels": torch.tensor([1, 0])},
    ),
}
FIELDS = {
    family: sorted({field.name for field in dataclasses.fields(model.config_class)} | {"num_labels", "problem_type"})
    for family, (_, model, _) in FAMILIES.items()
}


def build_and_compute(family, fields):
    config, model_class, inputs = FAMILIES[family]
    return model_class(config(**fields)).eval()(**inputs, return_dict=True)


def configs(family):
    fields = st.dictionaries(st.sampled_from(FIELDS[family]), anything, min_size=1, max_size=2)
    return st.builds(partial, st.just(build_and_compute), st.just(family), fields)


MODELS = {
    **{f"bert, {task}": tiny_bert(task) for task in TASKS},
    **{f"gpt, {task}": tiny_gpts.tiny_gpt(task) for task in tiny_gpts.TASKS},
    **{f"vit, {task}": tiny_vits.tiny_vit(task) for task in tiny_vits.TASKS},
    "translation": tiny_model(),
}
INPUTS = {
    **{f"bert, {task}": entry[-1] for task, entry in TASKS.items()},
    **{f"gpt, {task}": entry[-1] for task, entry in tiny_gpts.TASKS.items()},
    **{f"vit, {task}": {"pixel_values": tiny_vits.IMAGES, **entry[-1]} for task, entry in tiny_vits.TASKS.items()},
    "translation": BATCH,
}
MORE = {
    "translation": ["decoder_input_ids", "decoder_attention_mask", "inputs_embeds", "decoder_inputs_embeds"],
    "bert": ["position_ids", "inputs_embeds", "token_type_ids", "labels"],
    "gpt": ["position_ids", "inputs_embeds", "labels", "logits_to_keep"],
    "vit": ["interpolate_pos_encoding", "labels"],
}


def compute(task, is_training, inputs):
    torch.manual_seed(0)
    return MODELS[task].train(is_training)(**inputs)


def inputs_of(task):
    inputs = changed_inputs(INPUTS[task], [*MORE[task.split(",")[0]], "num_items_in_batch"])
    return st.builds(partial, st.just(compute), st.just(task), st.booleans(), inputs)


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


def generate(task, **options):
    torch.manual_seed(0)
    MODELS[task].eval().generate(**options)


SEARCHES = {"generate": {}, "beam_search": {"custom_generate": beam_search}}
PROMPTS = {"translation": {"input_ids": SOURCE, "attention_mask": SOURCE_MASK}, "gpt, text": tiny_gpts.LEFT}


def options_of(task, search):
    names = st.lists(st.sampled_from(sorted(OPTIONS)), min_size=1, max_size=3, unique=True)
    options = names.flatmap(
        lambda names: st.fixed_dictionaries({name: st.sampled_from(OPTIONS[name]) for name in names})
    )
    given = {**PROMPTS[task], "max_new_tokens": 4, **SEARCHES[search]}
    return options.map(lambda options: partial(generate, task, **{**given, **options}))


def searched_inputs(task):
    inputs = {**PROMPTS[task], **({"decoder_input_ids": TARGET[:, :1]} if task == "translation" else {})}
    searches = [{}, {"num_beams": 3}, {**SEARCHES["beam_search"], "num_beams": 3}]
    return st.tuples(changed_inputs(inputs, ["inputs_embeds"]), st.sampled_from(searches)).map(
        lambda drawn: partial(generate, task, **drawn[0], **drawn[1], max_new_tokens=3)
    )


def scored_inputs():
    def call(inputs):
        return {"scores": score(MODELS["translation"].eval(), **inputs).scores}

    return changed_inputs(BATCH, []).map(lambda inputs: partial(call, inputs))


with tempfile.TemporaryDirectory() as saved:
    MODELS["translation"].save_pretrained(saved)
    CONFIG = json.loads(Path(saved, "config.json").read_text())
    WEIGHTS = Path(saved, "model.safetensors").read_bytes()


class Canary:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def load_and_compute(**files):
    """Write a folder, check its model as before a push or a resume, load it and compute; nothing in it may run."""
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder, "canary")
        (Path(folder) / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
        written = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": WEIGHTS, **files}
        for name, content in written.items():
            content = pickle.dumps(Canary(str(canary))) if content is PICKLE else content
            if content is not None:
                Path(folder, name).write_bytes(content)
        try:
            check_model(folder, hf_vanilla.VanillaTransformerForConditionalGeneration)
            model = hf_vanilla.VanillaTransformerForConditionalGeneration.from_pretrained(folder)
            return model.eval()(**BATCH, return_dict=True)
        finally:
            assert not canary.exists(), "code was run"


PICKLE = "a pickle"
AUTO_MAP = {"AutoConfig": "evil.Config", "AutoModelForSeq2SeqLM": "evil.Model", "AutoModel": "evil.Model"}
DEEP = [b"[" * 10**5, b'{"a":' * 10**5, b'{"d_model": ' + b"9" * 5000 + b"}", b"", b"null", b"[]", b"3", b"\xff\xfe"]


@st.composite
def damaged(draw, content):
    """Draw bytes that are cut, or have a few others, or more of them."""
    content = bytearray(content)
    how = draw(st.sampled_from(["cut", "changed", "inserted"]))
    for _ in range(1 if how == "cut" else draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(content) - 1))
        if how == "cut":
            del content[place:]
        elif how == "changed":
            content[place] = draw(st.integers(0, 255))
        else:
            content[place:place] = draw(st.binary(max_size=9))
    return bytes(content)


def config_files():
    names = [*FIELDS["transformer"], "architectures", "model_type", "auto_map", "transformers_version", "dtype"]
    fields = st.dictionaries(st.sampled_from(names), st.one_of(anything, st.just(AUTO_MAP)), min_size=1, max_size=2)
    changed = fields.map(lambda fields: json.dumps({**CONFIG, **fields}).encode())
    content = st.one_of(changed, damaged(json.dumps(CONFIG).encode()), st.sampled_from(DEEP))
    return content.map(lambda content: partial(load_and_compute, **{"config.json": content}))


@st.composite
def changed_tensors(draw):
    """Draw a good safetensors file in which one tensor is another."""
    tensors = load(WEIGHTS)
    name = draw(st.sampled_from(sorted(tensors)))
    tensor = tensors.pop(name)
    how = draw(st.sampled_from(["drop", "rename", "fill", "dtype", "shape", "empty", "extra"]))
    if how == "fill":
        tensors[name] = torch.full_like(tensor, draw(st.sampled_from(FLOATS)))
    elif how == "dtype":
        tensors[name] = tensor.to(draw(st.sampled_from(DTYPES)))
    elif how == "shape":
        tensors[name] = tensor.reshape(-1)[: draw(st.integers(0, tensor.numel()))].clone()
    elif how == "extra":
        tensors |= {name: tensor, f"{name}.more": torch.ones(2)}
    elif how == "rename":
        tensors[f"{name}x"] = tensor
    elif how == "empty":
        tensors[name] = tensor[:0].clone()
    return save(tensors, metadata={"format": "pt"})


HEADERS = [(2**63 - 1).to_bytes(8, "little"), (10**8).to_bytes(8, "little") + b"{" * 99, bytes(8), bytes(7)]
INDEX = {"metadata": {}, "weight_map": {"lm_head.weight": "../outside.safetensors"}}


def weight_files():
    content = st.one_of(
        damaged(WEIGHTS), damaged(WEIGHTS[:3000]), changed_tensors(), st.sampled_from([*HEADERS, PICKLE])
    )
    alone = content.map(lambda content: {"model.safetensors": content})
    others = st.sampled_from(
        [
            {"model.safetensors": None, "pytorch_model.bin": PICKLE},
            {"model.safetensors": None, "model.safetensors.index.json": json.dumps(INDEX).encode()},
            *({"model.safetensors": None, "model.safetensors.index.json": content} for content in DEEP),
        ]
    )
    return st.one_of(alone, alone, alone, others).map(lambda files: partial(load_and_compute, **files))


KINDS = {
    **{f"config of {family}": configs(family) for family in FIELDS},
    **{f"inputs of {task}": inputs_of(task) for task in INPUTS},
    **{f"options of {search}, {task}": options_of(task, search) for search in SEARCHES for task in PROMPTS},
    **{f"ids and masks of a search, {task}": searched_inputs(task) for task in PROMPTS},
    "labels to score": scored_inputs(),
    "config files": config_files(),
    "weight files": weight_files(),
}
