import pytest
import torch
from datasets import Dataset
from tiny_translation import tiny_model

from hf_vanilla import VanillaBertConfig, VanillaBertForPreTraining
from hf_vanilla.models.layers import sinusoidal_positions
from hf_vanilla.training import initialize_from_examples


CLS, SEP = 1, 2
NOUNS, VERBS = (5, 6, 7), (8, 9, 10)  # a noun comes before a verb, and a verb before a noun


def tiny_bert(**changes):
    torch.manual_seed(3)
    sizes = {"vocab_size": 29, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3}
    return VanillaBertForPreTraining(VanillaBertConfig(**{**sizes, "intermediate_size": 20, **changes}))


def sentences(words, count=40):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        kinds = [words[place % len(words)] for place in range(6)]
        row = [kind[int(torch.randint(len(kind), (), generator=generator))] for kind in kinds]
        rows.append([CLS, *row[:3], SEP, *row[3:], SEP])
    return Dataset.from_dict(
        {
            "input_ids": rows,
            "token_type_ids": [[0] * 5 + [1] * 4] * count,
            "special_tokens_mask": [[1, 0, 0, 0, 1, 0, 0, 0, 1]] * count,
        }
    )


def test_tokens_with_like_neighbours_start_alike_and_others_as_before():
    model, untouched = tiny_bert(), tiny_bert()
    initialize_from_examples(model, sentences((NOUNS, VERBS)))
    weight = model.get_input_embeddings().weight
    cosines = torch.nn.functional.cosine_similarity(weight[5:11, None], weight[None, 5:11], dim=-1)
    same_kind = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool()
    assert cosines[same_kind].min() > cosines[~same_kind].max()
    torch.testing.assert_close(weight[5:11].square().mean(1).sqrt(), torch.full((6,), 0.04))
    others = [*range(5), *range(11, 29)]
    assert torch.equal(weight[others], untouched.get_input_embeddings().weight[others])


def test_positions_are_sinusoids_and_the_bias_is_the_logarithm_of_frequencies():
    model = tiny_bert()
    initialize_from_examples(model, sentences((NOUNS, VERBS)))
    positions = model.bert.embeddings.position_embeddings.weight
    expected = sinusoidal_positions(torch.arange(512), 12, "sinusoidal")
    torch.testing.assert_close(positions, expected * 0.04 * 2**0.5)
    probabilities = model.cls.predictions.bias.softmax(0)
    assert probabilities[5:11].sum() > 0.95
    assert probabilities[[0, CLS, SEP, 20]].max() < 0.003


def test_seed_decides_and_the_state_of_random_numbers_is_kept():
    weights = []
    for seed in (4, 4, 5):
        model = tiny_bert()
        before = torch.random.get_rng_state()
        initialize_from_examples(model, sentences((NOUNS, VERBS)), seed)
        assert torch.equal(before, torch.random.get_rng_state())
        weights.append(model.get_input_embeddings().weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])


def test_segments_are_not_neighbours():
    rows = Dataset.from_dict(
        {
            "input_ids": [[CLS, 5, SEP, 8, SEP]],
            "token_type_ids": [[0, 0, 0, 1, 1]],
            "special_tokens_mask": [[1, 0, 1, 0, 1]],
        }
    )
    with pytest.raises(ValueError, match="`examples` must have tokens next to each other in a segment"):
        initialize_from_examples(tiny_bert(), rows)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda rows: rows.to_iterable_dataset(), TypeError, "must be a `datasets.Dataset`, got IterableDataset"),
        (lambda rows: rows.remove_columns("token_type_ids"), ValueError, "but token_type_ids is missing"),
        (lambda rows: rows.select([]), ValueError, "tokens next to each other"),
        (lambda rows: sentences(((5, 31), VERBS)), ValueError, r"`vocab_size` of the model \(29\), got 31"),
    ],
    ids=["stream", "column", "empty", "vocabulary"],
)
def test_other_examples_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        initialize_from_examples(tiny_bert(), change(sentences((NOUNS, VERBS))))


@pytest.mark.parametrize("order", [range(40), range(39, -1, -1)], ids=["as they are", "shuffled"])
def test_some_of_many_examples_are_counted(monkeypatch, order):
    monkeypatch.setattr("hf_vanilla.training.initialization.MAX_TOKENS", 180)  # half of them
    rows = sentences((NOUNS, VERBS)).select(order)
    expected, model = tiny_bert(), tiny_bert()
    initialize_from_examples(model, rows)
    initialize_from_examples(expected, Dataset.from_list(rows.to_list()[::2]))
    assert torch.equal(model.get_input_embeddings().weight, expected.get_input_embeddings().weight)


def test_more_width_than_tokens_is_refused():
    with pytest.raises(ValueError, match=r"`vocab_size` \(10\) must be at least the model's width \(12\)"):
        initialize_from_examples(tiny_bert(vocab_size=10), sentences((NOUNS, VERBS)))


def test_model_without_learned_positions_is_refused():
    with pytest.raises(ValueError, match="`model` must give embeddings of learned positions .* VanillaTransformerFor"):
        initialize_from_examples(tiny_model(), sentences((NOUNS, VERBS)))
