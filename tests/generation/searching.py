"""The two searches that tests compare, and their comparison."""

import torch

from hf_vanilla.generation import beam_search


def search(model, inputs, **options):
    """Search by `beam_search`."""
    return model.generate(**inputs, return_dict_in_generate=True, custom_generate=beam_search, **options)


def search_stock(model, inputs, **options):
    """Search by transformers' own search."""
    return model.generate(**inputs, return_dict_in_generate=True, **{**options, "output_scores": True})


def assert_same(actual, expected):
    """Check that hypotheses and beams are equal, and scores up to keys in another order, or more that are masked."""
    torch.testing.assert_close(actual.sequences, expected.sequences, rtol=0, atol=0)
    torch.testing.assert_close(actual.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual.beam_indices, expected.beam_indices, rtol=0, atol=0)
