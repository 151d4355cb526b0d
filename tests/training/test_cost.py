"""The cost calculator: operations against torch's own count, and what is refused."""

import pytest
import torch
from datasets import Dataset, DatasetDict
from tiny_translation import tiny_config, tiny_pairs
from torch.utils.flop_counter import FlopCounterMode

from hf_vanilla import VanillaBertConfig, VanillaBertForPreTraining, VanillaTransformerForConditionalGeneration
from hf_vanilla.training import Estimate, bert_flops, estimate, transformer_flops


BERT = {"vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 20}


def counted(model, **inputs):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    return counter.get_total_flops()


def test_operations_of_a_transformer_are_those_that_torch_counts():
    config = tiny_config(d_k=3, d_v=5)
    config._attn_implementation = "eager"
    model = VanillaTransformerForConditionalGeneration(config)
    ids = torch.randint(3, 29, (1, 5))
    labels = torch.randint(3, 29, (1, 7))
    expected = counted(model.eval(), input_ids=ids, labels=labels)
    assert transformer_flops(config, torch.tensor([5]), torch.tensor([7])).tolist() == [expected]


def test_operations_of_bert_are_those_that_torch_counts():
    config = VanillaBertConfig(**BERT)
    config._attn_implementation = "eager"
    model = VanillaBertForPreTraining(config)
    expected = counted(model.eval(), input_ids=torch.randint(3, 29, (1, 7)))
    assert bert_flops(config, torch.tensor([7.0]), masked_share=1.0).tolist() == [expected]


@pytest.mark.parametrize("bf16", [True, False])
def test_a_run_is_extrapolated(bf16):
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


def test_the_costs_are_told_with_units():
    costs = Estimate(parameters=2_605_568, tokens_per_update=1234.6, flops=3.2149e15, memory=71.3e6, seconds=93_784.6)
    assert str(costs) == (
        "2,605,568 parameters, 1,235 tokens an update, 3.21e+15 operations, 0.0713 GB of memory, "
        "1 day, 2:03:05 (h:mm:ss)"
    )


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_it_works_where_gradients_are_off(mode):
    with mode():
        costs = estimate(tiny_config(), tiny_pairs(9), updates=3, max_tokens_per_batch=40, probes=2)
    assert costs.memory > 4 * 4 * costs.parameters


def test_longer_batches_keep_more():
    config = VanillaBertConfig(**BERT)
    documents = Dataset.from_dict({"input_ids": [list(range(3, 3 + length)) for length in (9, 10, 11, 12) * 20]})
    small, large = (estimate(config, documents, updates=1, max_tokens_per_batch=size, probes=2) for size in (60, 600))
    weights = 4 * 4 * small.parameters
    assert (large.memory - weights) > 5 * (small.memory - weights)
    assert large.tokens_per_update > 7 * small.tokens_per_update


def test_senseless_requests_are_refused():
    config, pairs = tiny_config(), tiny_pairs(5)
    with pytest.raises(ValueError, match="`updates` must be at least 1, got 0"):
        estimate(config, pairs, updates=0, max_tokens_per_batch=40)
    with pytest.raises(ValueError, match="`dataset` must have a column `labels`"):
        estimate(config, pairs.remove_columns("labels"), updates=1, max_tokens_per_batch=40)
    with pytest.raises(TypeError, match="`config` must be .* got str"):
        estimate("base", pairs, updates=1, max_tokens_per_batch=40)


@pytest.mark.parametrize("updates", ["7", float("nan"), 1.5, True, None])
def test_a_number_of_updates_is_an_integer(updates):
    with pytest.raises(TypeError, match="`updates` must be an integer, got "):
        estimate(tiny_config(), tiny_pairs(5), updates=updates, max_tokens_per_batch=40)


def test_what_is_no_dataset_is_named():
    pairs = tiny_pairs(5)
    for dataset in (None, pairs.to_iterable_dataset(), DatasetDict(train=pairs)):
        with pytest.raises(TypeError, match=f"`dataset` must be a `datasets.Dataset`, got {type(dataset).__name__};"):
            estimate(tiny_config(), dataset, updates=1, max_tokens_per_batch=40)
    with pytest.raises(ValueError, match="`dataset` must have at least one row, got none"):
        estimate(tiny_config(), pairs.select([]), updates=1, max_tokens_per_batch=40)
