"""The formulas of the papers as plain loops, slow and easy to check by eye, for comparison with the package."""

import itertools
import math
from collections.abc import Callable

import torch


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(Q K^T * scaling) V for one head of one sentence, query by query, key by key.

    Args:
        query (`torch.Tensor` of shape `(query_len, d_k)`): Queries.
        key (`torch.Tensor` of shape `(key_len, d_k)`): Keys.
        value (`torch.Tensor` of shape `(key_len, d_v)`): Values.
        allowed (`torch.Tensor` of shape `(query_len, key_len)`): True where a query may attend.
        scaling (`float`): Factor of the scores.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: outputs (query_len, d_v) and weights (query_len, key_len).
    """
    outputs, all_weights = [], []
    for row in range(query.shape[0]):
        exponentials = [
            torch.exp(scaling * sum(query[row, i] * key[column, i] for i in range(query.shape[1])))
            if allowed[row, column]
            else query.new_zeros(())
            for column in range(key.shape[0])
        ]
        total = sum(exponentials)
        weights = [exponential / total for exponential in exponentials]
        outputs.append(sum(weights[column] * value[column] for column in range(key.shape[0])))
        all_weights.append(torch.stack(weights))
    return torch.stack(outputs), torch.stack(all_weights)


def multi_head_attention(
    queries_of: torch.Tensor,
    keys_of: torch.Tensor,
    matrices: dict[str, torch.Tensor],
    heads: int,
    allowed: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Compute Concat(head_1, ..., head_h) W_O with head_i = Attention(x W_i^Q, y W_i^K, y W_i^V).

    Args:
        queries_of (`torch.Tensor` of shape `(batch, query_len, d_model)`): x.
        keys_of (`torch.Tensor` of shape `(batch, key_len, d_model)`): y.
        matrices (`dict[str, torch.Tensor]`): `q`, `k`, `v`, `o`, each `(out, in)`, and biases `q_bias` and so on.
        heads (`int`): Number of heads, h.
        allowed (`torch.Tensor` of shape `(batch, query_len, key_len)`): True where a query may attend.
        scaling (`float`): Factor of the scores.

    Returns:
        `torch.Tensor` of shape `(batch, query_len, d_model)`: the output.
    """
    results = []
    for sentence in range(queries_of.shape[0]):
        outputs = []
        for head in range(heads):
            parts = {}
            for name, source in (("q", queries_of), ("k", keys_of), ("v", keys_of)):
                width = matrices[name].shape[0] // heads
                rows = slice(head * width, (head + 1) * width)
                parts[name] = source[sentence] @ matrices[name][rows].T + matrices[f"{name}_bias"][rows]
            outputs.append(attention(parts["q"], parts["k"], parts["v"], allowed[sentence], scaling)[0])
        results.append(torch.cat(outputs, dim=1) @ matrices["o"].T + matrices["o_bias"])
    return torch.stack(results)


def layer_norm(vector: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalise a vector (d_model,) by its mean and biased variance (Ba et al. 2016)."""
    mean = sum(vector) / len(vector)
    variance = sum((entry - mean) ** 2 for entry in vector) / len(vector)
    return (vector - mean) / (variance + epsilon) ** 0.5 * weight + bias


def paper_positions(length: int, d_model: int) -> torch.Tensor:
    """Vaswani et al. 2017, 3.5: PE(pos, 2i) = sin(pos / 10000^(2i / d)), PE(pos, 2i + 1) = cos of the same."""
    table = torch.zeros(length, d_model, dtype=torch.float64)
    for pos, i in itertools.product(range(length), range(d_model // 2)):
        angle = pos / 10000 ** (2 * i / d_model)
        table[pos, 2 * i], table[pos, 2 * i + 1] = math.sin(angle), math.cos(angle)
    return table


def timing_signal_1d(length: int, channels: int) -> torch.Tensor:
    """Tensor2Tensor's `get_timing_signal_1d` with its default timescales 1 and 1e4: sines, then cosines."""
    timescales = channels // 2
    increment = math.log(1e4 / 1.0) / max(timescales - 1, 1)
    table = torch.zeros(length, channels, dtype=torch.float64)
    for pos, i in itertools.product(range(length), range(timescales)):
        scaled_time = pos * math.exp(-i * increment)
        table[pos, i], table[pos, timescales + i] = math.sin(scaled_time), math.cos(scaled_time)
    return table


def marian_positions(length: int, d_model: int) -> torch.Tensor:
    """Marian's table: angle j of position pos is pos / 10000^(2 (j // 2) / d); sines of even j, cosines of odd j."""
    angles = [[pos / 10000 ** (2 * (j // 2) / d_model) for j in range(d_model)] for pos in range(length)]
    rows = [[math.sin(angle) for angle in row[0::2]] + [math.cos(angle) for angle in row[1::2]] for row in angles]
    return torch.tensor(rows, dtype=torch.float64)


def smoothed_loss(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, smoothing_type: str, pad: int
) -> float:
    """Sum the loss of labelled tokens over the target distribution of each kind of smoothing.

    Args:
        logits (`torch.Tensor` of shape `(tokens, vocab)`): Logits.
        labels (`torch.Tensor` of shape `(tokens,)`): True tokens; -100 where there is none.
        smoothing (`float`): Probability taken from the true token.
        smoothing_type (`str`): `"uniform"`, `"t2t"` or `"annotated"`.
        pad (`int`): Id of padding.

    Returns:
        `float`: the sum in nats: the cross-entropy for `"uniform"`, the Kullback-Leibler divergence for the others.
    """
    vocab, total = logits.shape[1], 0.0
    for row, label in zip(logits.double(), labels.tolist(), strict=True):
        if label == -100:
            continue
        log_total = math.log(sum(math.exp(logit - row.max()) for logit in row)) + row.max()
        for token in range(vocab):
            if smoothing_type == "uniform":
                wanted = smoothing / vocab + (1 - smoothing if token == label else 0.0)
            elif smoothing_type == "t2t":
                wanted = 1 - smoothing if token == label else smoothing / (vocab - 1)
            else:
                wanted = 1 - smoothing if token == label else (0.0 if token == pad else smoothing / (vocab - 2))
            total -= wanted * (row[token] - log_total)
            if smoothing_type != "uniform" and wanted > 0:
                total += wanted * math.log(wanted)
    return float(total)


def exhaustive_search(
    next_log_probs: Callable[[list[int]], list[float]],
    start: int,
    end: int,
    max_new_tokens: int,
    length_penalty: float,
) -> list[tuple[float, list[int]]]:
    """Score every possible sequence, as transformers' beam search scores them.

    Args:
        next_log_probs (`Callable`): Maps a sequence to the log probability of each next token; -inf forbids one.
        start (`int`): First token of every sequence.
        end (`int`): The token that ends one.
        max_new_tokens (`int`): Longest sequence, without `start`.
        length_penalty (`float`): Exponent of the length that the sum of log probabilities is divided by.

    Returns:
        `list[tuple[float, list[int]]]`: scores and sequences, best first.
    """
    finished, unfinished = [], [(0.0, [start])]
    for length in range(1, max_new_tokens + 1):
        longer = []
        for score, sequence in unfinished:
            for token, log_prob in enumerate(next_log_probs(sequence)):
                if log_prob == -math.inf:
                    continue
                candidate = (score + log_prob, [*sequence, token])
                if token == end or length == max_new_tokens:
                    finished.append((candidate[0] / length**length_penalty, candidate[1]))
                else:
                    longer.append(candidate)
        unfinished = longer
    return sorted(finished, reverse=True)


def parameter_count(
    vocab: int, d_model: int, d_ff: int, heads: int, d_k: int, d_v: int, layers: int, learned_positions: int = 0
) -> int:
    """Count the parameters of a Transformer with one tied embedding, from the shapes in the paper.

    Args:
        vocab (`int`): Size of the vocabulary.
        d_model (`int`): Width of the model.
        d_ff (`int`): Inner width of the feed-forward networks.
        heads (`int`): Heads.
        d_k (`int`): Width of a head's keys.
        d_v (`int`): Width of a head's values.
        layers (`int`): Layers of the encoder, and of the decoder.
        learned_positions (`int`): Rows of a learned position table, one for the encoder and one for the decoder.

    Returns:
        `int`: the number.
    """
    norm = 2 * d_model
    attention_weights = 2 * d_model * heads * d_k + d_model * heads * d_v + heads * d_v * d_model
    attention_biases = 2 * heads * d_k + heads * d_v + d_model
    feed_forward = d_model * d_ff + d_ff + d_ff * d_model + d_model
    encoder_layer = attention_weights + attention_biases + feed_forward + 2 * norm
    decoder_layer = 2 * (attention_weights + attention_biases) + feed_forward + 3 * norm
    return vocab * d_model + 2 * learned_positions * d_model + layers * (encoder_layer + decoder_layer)
