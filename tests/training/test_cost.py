"""The cost estimate: operations against torch's own count, memory, and bad input."""

import pytest
import torch
from datasets import Dataset, DatasetDict
from tiny_translation import tiny_config, tiny_pairs
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForPreTraining,
    VanillaGptConfig,
    VanillaGptForCausalLM,
    VanillaTransformerForConditionalGeneration,
    training,
)
from hf_vanilla.training import Estimate, estimate
from hf_vanilla.training.cost import CPU_HOLES


BERT = {"vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 20}


def counted(model, **inputs):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    return counter.get_total_flops()


def test_flops_of_a_transformer_match_torch():
    config = tiny_config(d_k=3, d_v=5, attn_implementation="eager")
    model = VanillaTransformerForConditionalGeneration(config)
    ids = torch.randint(3, 29, (1, 5))
    labels = torch.randint(3, 29, (1, 7))
    expected = counted(model.eval(), input_ids=ids, labels=labels)
    assert config.forward_flops(torch.tensor([5]), torch.tensor([7])).tolist() == [expected]


def test_flops_of_bert_match_torch():
    config = VanillaBertConfig(**BERT, attn_implementation="eager")
    model = VanillaBertForPreTraining(config)
    expected = counted(model.eval(), input_ids=torch.randint(3, 29, (1, 7)))
    assert config.forward_flops(torch.tensor([7]), torch.tensor([7])).tolist() == [expected]


def test_flops_and_estimate_of_gpt_match_torch():
    config = VanillaGptConfig(**{**BERT, "max_position_embeddings": 9, "attn_implementation": "eager"})
    model = VanillaGptForCausalLM(config)
    expected = counted(model.eval(), input_ids=torch.randint(3, 29, (1, 7)))
    assert config.forward_flops(torch.tensor([7]), torch.tensor([7])).tolist() == [expected]
    rows = Dataset.from_dict({"input_ids": torch.randint(3, 29, (20, 7)).tolist()})
    costs = estimate(config, rows, updates=30, max_tokens_per_batch=14, probes=1)
    assert costs.parameters == model.num_parameters()
    assert costs.flops == 3 * 30 * 2 * config.forward_flops(torch.tensor([7]), torch.tensor([6])).item()


@pytest.mark.parametrize("whole_last_layer", [False, True])
def test_flops_of_pretraining_match_torch(whole_last_layer):
    config = VanillaBertConfig(**BERT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = VanillaBertForPreTraining(config).train()
    if whole_last_layer:
        model.bert.layers[-1].register_forward_hook(lambda *_: None)  # a hooked layer gets all positions
    ids = torch.randint(3, 29, (1, 7))
    labels = torch.where(torch.tensor([False, False, True, False, False, True, False]), ids, -100)
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=labels, next_sentence_label=torch.tensor([1])).loss.backward()
    expected = config.forward_flops(torch.tensor([7]), torch.tensor([2]), whole_last_layer=whole_last_layer)
    assert 3 * expected.item() == pytest.approx(counter.get_total_flops(), rel=1e-9)


def test_old_names_of_flops_warn():
    lengths = torch.tensor([7, 11])
    with pytest.warns(FutureWarning, match="`transformer_flops` is now called `config.forward_flops`"):
        flops = training.transformer_flops(tiny_config(), lengths, lengths + 1)
    assert torch.equal(flops, tiny_config().forward_flops(lengths, lengths + 1))
    with pytest.warns(FutureWarning, match="`bert_flops` is now called `config.forward_flops`"):
        flops = training.bert_flops(VanillaBertConfig(**BERT), lengths)
    assert torch.equal(flops, VanillaBertConfig(**BERT).forward_flops(lengths, lengths * 0.15))


@pytest.mark.parametrize("bf16", [True, False])
def test_estimate_extrapolates_a_run(bf16):
    config, pairs = tiny_config(), tiny_pairs(45)
    state = torch.get_rng_state()
    costs = estimate(config, pairs, updates=100, max_tokens_per_batch=40, bf16=bf16, probes=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert costs.parameters == VanillaTransformerForConditionalGeneration(config).num_parameters()
    assert 10 < costs.tokens_per_update <= 40
    assert costs.memory > 4 * 4 * costs.parameters
    assert costs.seconds > 0
    twice = estimate(config, pairs, updates=200, max_tokens_per_batch=40, bf16=bf16, probes=2)
    assert twice.flops == pytest.approx(2 * costs.flops)


def test_estimate_at_a_given_speed_measures_nothing():
    config, pairs = tiny_config(), tiny_pairs(45)
    measured = estimate(config, pairs, updates=100, max_tokens_per_batch=40, probes=1)
    costs = estimate(config, pairs, updates=100, max_tokens_per_batch=40, flops_per_second=2e6)
    assert (costs.parameters, costs.flops) == (measured.parameters, measured.flops)
    assert costs.seconds == costs.flops / 2e6
    assert costs.memory == 16 * costs.parameters  # float32: weights, gradients and two moments


def test_estimate_prints_units():
    costs = Estimate(parameters=2_605_568, tokens_per_update=1234.6, flops=3.2149e15, memory=71.3e6, seconds=93_784.6)
    assert str(costs) == (
        "2,605,568 parameters, 1,235 tokens an update, 3.21e+15 operations, 0.0713 GB of memory, "
        "1 day, 2:03:05 (h:mm:ss)"
    )


class StoragesMade(TorchDispatchMode):
    """Records the storages that operations make, without keeping them alive."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.made.setdefault(reference.cdata, (reference, storage.nbytes()))
        return results

    def bytes_alive(self, without):
        """Count the bytes that are alive, without the storages of some tensors."""
        others = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in without}
        alive = {key: nbytes for key, (storage, nbytes) in self.made.items() if not storage.expired()}
        return sum(nbytes for key, nbytes in alive.items() if key not in others)


def test_estimate_matches_a_real_update(monkeypatch):
    clock = iter([0, 10, 13, 20, 25])  # the first update does not count; the others take 3 and 5 seconds
    monkeypatch.setattr("time.perf_counter", clock.__next__)
    config = tiny_config(dropout=0.1, label_smoothing=0.0, attn_implementation="eager")
    sides = {"input_ids": torch.randint(3, 29, (42, 5)), "labels": torch.randint(3, 29, (42, 7))}
    pairs = Dataset.from_dict({name: side.tolist() for name, side in sides.items()})
    costs = estimate(config, pairs, updates=100, max_tokens_per_batch=98, probes=2)
    assert costs.seconds == 4 * 100
    assert costs.tokens_per_update == 98

    model = VanillaTransformerForConditionalGeneration(config).train()
    with FlopCounterMode(display=False) as counter:
        with StoragesMade() as storages:
            loss = model(**{name: side[:14] for name, side in sides.items()}).loss
        kept = storages.bytes_alive(without=model.parameters())
        loss.backward()
    assert costs.flops == pytest.approx(100 * counter.get_total_flops(), rel=1e-6)
    assert costs.memory - 4 * 4 * costs.parameters == pytest.approx((1 + CPU_HOLES) * kept, rel=0.03)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_estimate_works_without_gradients(mode):
    with mode():
        costs = estimate(tiny_config(), tiny_pairs(9), updates=3, max_tokens_per_batch=40, probes=2)
    assert costs.memory > 4 * 4 * costs.parameters


def test_estimate_of_memory_grows_with_the_batch():
    config = VanillaBertConfig(**BERT)
    documents = Dataset.from_dict({"input_ids": [list(range(3, 3 + length)) for length in (9, 10, 11, 12) * 20]})
    small, large = (estimate(config, documents, updates=1, max_tokens_per_batch=size, probes=2) for size in (60, 600))
    weights = 4 * 4 * small.parameters
    assert (large.memory - weights) > 5 * (small.memory - weights)
    assert large.tokens_per_update > 7 * small.tokens_per_update


def test_bad_arguments_raise():
    config, pairs = tiny_config(), tiny_pairs(5)
    with pytest.raises(ValueError, match="`updates` must be at least 1, got 0"):
        estimate(config, pairs, updates=0, max_tokens_per_batch=40)
    with pytest.raises(ValueError, match="`dataset` must have a column `labels`"):
        estimate(config, pairs.remove_columns("labels"), updates=1, max_tokens_per_batch=40)
    with pytest.raises(TypeError, match="`config` must be .* got a str"):
        estimate("base", pairs, updates=1, max_tokens_per_batch=40)


@pytest.mark.parametrize("updates", ["7", float("nan"), 1.5, True, None])
def test_number_of_updates_must_be_an_integer(updates):
    with pytest.raises(TypeError, match="`updates` must be an integer, got "):
        estimate(tiny_config(), tiny_pairs(5), updates=updates, max_tokens_per_batch=40)


def test_other_datasets_raise():
    pairs = tiny_pairs(5)
    for dataset in (None, pairs.to_iterable_dataset(), DatasetDict(train=pairs)):
        with pytest.raises(TypeError, match=f"`dataset` must be a `datasets.Dataset`, got {type(dataset).__name__};"):
            estimate(tiny_config(), dataset, updates=1, max_tokens_per_batch=40)
    with pytest.raises(ValueError, match="`dataset` must have at least one row, got none"):
        estimate(tiny_config(), pairs.select([]), updates=1, max_tokens_per_batch=40)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input_ids": ["ein", "mann"]}, TypeError, "lists of integers in `input_ids`, got .*string.*; tokenize"),
        ({"input_ids": [3, 4]}, TypeError, "lists of integers in `input_ids`, got Value.*int.*; tokenize"),
        ({"labels": [[3.5], [4.0]]}, TypeError, "lists of integers in `labels`, got List.*float64.*; tokenize"),
        ({"input_ids": [[3], None]}, ValueError, "at least one token in each row of `input_ids`, got none in row 1"),
        ({"labels": [[], [3]]}, ValueError, "at least one token in each row of `labels`, got none in row 0"),
        ({"labels": [[3], [4] * 41]}, ValueError, "`max_tokens_per_batch` must be at least 41, .* row 1, got 40;"),
    ],
    ids=["text", "numbers", "floats", "null", "empty", "long"],
)
def test_bad_rows_raise(changes, error, message):
    rows = Dataset.from_dict({"input_ids": [[3, 4], [5]], "labels": [[6], [7, 8]], **changes})
    with pytest.raises(error, match=message):
        estimate(tiny_config(), rows, updates=1, max_tokens_per_batch=40)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"bf16": "yes"}, TypeError, "`bf16` must be True or False, got 'yes'"),
        ({"max_tokens_per_batch": 40.0}, TypeError, "`max_tokens_per_batch` must be an integer, got 40.0"),
        ({"max_tokens_per_batch": 0}, ValueError, "`max_tokens_per_batch` must be at least 1, got 0"),
        ({"seed": -1}, ValueError, "`seed` must be at least 0, got -1"),
    ],
)
def test_bad_options_raise(changes, error, message):
    with pytest.raises(error, match=message):
        estimate(tiny_config(), tiny_pairs(5), **{"updates": 1, "max_tokens_per_batch": 40, **changes})
