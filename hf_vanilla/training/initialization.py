"""Start values of a model's embeddings, from the examples that it will be trained on.

    tokens      their neighbours: pointwise mutual information, reduced to the model's width
    positions   the sinusoids of the Transformer: the distance of two positions is a rotation
    bias        of the prediction: how often each token occurs

From random embeddings, a new model first learns just these, for many updates.
"""

import math
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel
from transformers.utils import logging

from ..data.batching import measure_pair_lengths
from ..models.layers import sinusoidal_positions


logger = logging.get_logger(__name__)

COLUMNS = ["input_ids", "token_type_ids", "special_tokens_mask"]
# Tokens on each side that count as neighbours; one at distance n counts 1/n.
WINDOW = 5
# Tokens that are counted at most, evenly from all examples.
MAX_TOKENS = 20_000_000
# Share of values above which products with a dense matrix are faster.
DENSE_SHARE = 0.1
# Size of the start values over that of random ones.
SCALE = 2.0


@torch.no_grad()
def initialize_from_examples(model: PreTrainedModel, examples: Dataset, seed: int = 0) -> None:
    """Set the embeddings of tokens and positions, and the bias of the predictions, of a new model.

    Args:
        model (`PreTrainedModel`): A model with learned positions, which its `get_position_embeddings` gives. Special
            tokens, and tokens that do not occur, keep their embeddings.
        examples (`Dataset`): Examples of `build_pretraining_dataset` or `build_masked_language_dataset`.
        seed (`int`, defaults to 0): Seed of a random rotation.

    Raises:
        TypeError: if `examples` is a stream.
        ValueError: if the model gives no embeddings of learned positions, the vocabulary is smaller than the
            model is wide, or `examples` lack a column, have ids beyond the vocabulary, or no two tokens next to each
            other.

    Source: Levy & Goldberg 2014, "Neural Word Embedding as Implicit Matrix Factorization"; Levy et al. 2015 for the
    smoothing; Vaswani et al. 2017, section 3.5, for the positions.
    """
    positions = _positions_of(model)
    weight = model.get_input_embeddings().weight
    bias = getattr(model.get_output_embeddings(), "bias", None)
    vocab_size, width = weight.shape
    _check_examples(examples, vocab_size, width)
    size = SCALE * model.config.initializer_range
    information, counts = _pmi_and_counts(examples, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vectors = _low_rank_vectors(information, width)
    vectors = torch.nn.functional.normalize(vectors - vectors[counts > 0].mean(0)) * size * math.sqrt(width)
    weight[counts > 0] = vectors[counts > 0].to(weight)
    places = torch.arange(len(positions))[None]
    positions.copy_(size * math.sqrt(2) * sinusoidal_positions(places, width, "sinusoidal")[0])
    if bias is not None:
        bias.copy_(((counts + 0.5) / counts.sum()).log())
    logger.info(
        f"Embeddings of {int((counts > 0).sum()):,} tokens start from their neighbours in {len(examples):,} examples."
    )


def _positions_of(model: PreTrainedModel) -> torch.Tensor:
    """Return the embeddings of a model's positions."""
    try:
        return model.base_model.get_position_embeddings().weight
    except (NotImplementedError, AttributeError):
        raise ValueError(
            f"`model` must give embeddings of learned positions (`get_position_embeddings`), as a BERT does, but a "
            f"{type(model).__name__} gives none; train it from random embeddings."
        ) from None


def _check_examples(examples: Any, vocab_size: int, width: int) -> None:
    """Raise if the start values can't be computed."""
    if vocab_size < width:
        raise ValueError(
            f"`vocab_size` ({vocab_size}) must be at least the model's width ({width}); give another of the two."
        )
    if not isinstance(examples, Dataset):
        raise TypeError(
            f"`examples` must be a `datasets.Dataset`, got {type(examples).__name__}; load a stream first."
        )
    missing = [name for name in COLUMNS if name not in examples.column_names]
    if missing:
        raise ValueError(
            f"`examples` must have the columns {', '.join(COLUMNS)}, but {missing[0]} is missing; build them by "
            "`build_pretraining_dataset` or `build_masked_language_dataset`."
        )


def _pmi_and_counts(examples: Dataset, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positive pointwise mutual information of tokens and their neighbours, and how often each occurs."""
    lengths = measure_pair_lengths(examples).source
    step = max(1, math.ceil(lengths.sum(dtype=np.int64) / MAX_TOKENS))
    rows = examples.select_columns(COLUMNS).with_format("arrow").select(range(0, len(examples), step))[:]
    ids, types, special = (rows[name].combine_chunks().flatten().to_numpy() for name in COLUMNS)
    if ids.max(initial=0) >= vocab_size:
        raise ValueError(
            f"`examples` must have ids below the `vocab_size` of the model ({vocab_size}), got {ids.max()}."
        )
    lengths = lengths[::step]
    segments = np.repeat(np.arange(len(lengths)), lengths) * 2 + types
    is_counted = special == 0
    pairs, times = [], []
    for distance in range(1, WINDOW + 1):
        near = (segments[:-distance] == segments[distance:]) & is_counted[:-distance] & is_counted[distance:]
        left, right = (each[near].astype(np.int64) for each in (ids[:-distance], ids[distance:]))
        different, counts = np.unique(left * vocab_size + right, return_counts=True)
        pairs += [different, different % vocab_size * vocab_size + different // vocab_size]
        times += [counts / distance] * 2
    different, place = np.unique(np.concatenate(pairs), return_inverse=True)
    if len(different) == 0:
        raise ValueError(
            "`examples` must have tokens next to each other in a segment, but there are none; give longer examples."
        )
    joint = np.bincount(place, weights=np.concatenate(times))
    token, neighbour = np.divmod(different, vocab_size)
    total = np.bincount(token, weights=joint, minlength=vocab_size)
    smoothed = total**0.75  # else rare neighbours say most
    values = np.maximum(np.log(joint * smoothed.sum() / (total[token] * smoothed[neighbour])), 0)
    indices = torch.from_numpy(np.stack((token, neighbour)))
    information = torch.sparse_coo_tensor(
        indices, torch.from_numpy(values).float(), (vocab_size, vocab_size), check_invariants=True
    )
    return information.coalesce(), torch.from_numpy(np.bincount(ids[is_counted], minlength=vocab_size))


def _low_rank_vectors(matrix: torch.Tensor, width: int) -> torch.Tensor:
    """Return a vector of a width for each row, which keeps most of the matrix, in no special directions."""
    if matrix.values().numel() > DENSE_SHARE * matrix.numel():
        matrix = matrix.to_dense()
    left, values, _ = torch.svd_lowrank(matrix, q=min(width + 8, len(matrix)), niter=3)
    vectors = (left * values.sqrt())[:, :width]
    return vectors @ torch.linalg.qr(torch.randn(width, width)).Q
