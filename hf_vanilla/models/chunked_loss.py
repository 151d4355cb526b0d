"""Cross-entropy from hidden states, chunk by chunk, without ever holding all the logits.

The loss of one token is lse - sum_v t_v z_v: z are its logits, lse their log-sum-exp, and t the smoothed target, which
sums to one. Its gradient with respect to z is softmax(z) - t.
"""

import re
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import IGNORED_LABEL, reads_values


# Tokens whose logits exist at the same time in training: measured on a CPU.
CHUNK_TOKENS = 256


# Logits that may exist at the same time on an accelerator, where few and large products are fast, and each chunk adds
# to all of the weight's gradient. With their probabilities half a GiB in 16 bits; not tuned.
CHUNK_LOGITS = 2**27


# Vocabulary entries whose logits are computed, and gradients summed, at the same time on a CPU. Larger products of 256
# tokens have up to half the speed, and larger temporaries cost more in page faults than in sums.
VOCAB_BLOCK_SIZE = 1024


# Where sums of products of 16-bit matrices are kept in float32: chunks are large there, and sums in 16 bits would be
# rounded too much, and could overflow.
FLOAT_SUM_DEVICES = ("cuda",)


class SmoothedTarget(NamedTuple):
    """Target distribution of one token.

    Attributes:
        true_probability: Probability of the true token.
        other_probability: Probability of every other token.
        excluded_id: A token that has probability 0 instead, or -1.
        entropy: What is subtracted from the cross-entropy, in nats.
    """

    true_probability: float
    other_probability: float
    excluded_id: int
    entropy: float


def _expected_logits(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    target: SmoothedTarget,
) -> Tensor:
    """Average each token's logits under its target, sum_v t_v z_v, without computing them all: (tokens,)."""
    hidden_states, weight = hidden_states.float(), weight.float()
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias.float()
    true_logits = (hidden_states * weight[labels]).sum(1) + bias[labels]
    expected = (target.true_probability - target.other_probability) * true_logits
    if target.other_probability > 0:
        expected += target.other_probability * (hidden_states @ weight.sum(0) + bias.sum())
    if target.excluded_id >= 0:
        expected -= target.other_probability * (hidden_states @ weight[target.excluded_id] + bias[target.excluded_id])
    return expected


def _subtract_target(
    grad_hidden: Tensor, weight: Tensor, labels: Tensor, target: SmoothedTarget, token_weights: Tensor
) -> None:
    """Take the target's part, -t, out of a gradient with that of softmax(z): in place, without a (tokens, vocab).

    The target is `other_probability` for every entry of the vocabulary, plus the rest for the true one. So its
    product with the projection is a sum and rows of it, times the token's weight.
    """
    rest = target.true_probability - target.other_probability
    grad_hidden -= rest * token_weights[:, None] * weight[labels]
    if target.other_probability > 0:
        grad_hidden -= target.other_probability * token_weights[:, None] * weight.sum(0)
    if target.excluded_id >= 0:
        grad_hidden += target.other_probability * token_weights[:, None] * weight[target.excluded_id]


def _subtract_target_from_projection(
    grad_weight: Tensor,
    grad_bias: Tensor | None,
    hidden_states: Tensor,
    labels: Tensor,
    target: SmoothedTarget,
    token_weights: Tensor,
) -> None:
    """Do as [`_subtract_target`] does, in the gradients of the projection's weight and bias."""
    rest = target.true_probability - target.other_probability
    hidden_states, total = hidden_states.float() * token_weights[:, None], token_weights.sum()
    grad_weight.index_add_(0, labels, hidden_states, alpha=-rest)
    if grad_bias is not None:
        grad_bias.index_add_(0, labels, token_weights, alpha=-rest)
        grad_bias -= target.other_probability * total
    if target.other_probability > 0:
        grad_weight -= target.other_probability * hidden_states.sum(0)
    if target.excluded_id >= 0:
        grad_weight[target.excluded_id] += target.other_probability * hidden_states.sum(0)
        if grad_bias is not None:
            grad_bias[target.excluded_id] += target.other_probability * total


def _logits(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Project hidden states (tokens, d_model): (tokens, vocab)."""
    logits = hidden_states.new_empty(hidden_states.shape[0], weight.shape[0])
    for block in _vocab_blocks(weight):
        torch.mm(hidden_states, weight[block].t(), out=logits[:, block])
    return logits if bias is None else logits.add_(bias)


def _vocab_blocks(weight: Tensor) -> list[slice]:
    """Divide the vocabulary into blocks whose products fit the caches of a CPU."""
    vocab_size = weight.shape[0]
    step = VOCAB_BLOCK_SIZE if weight.device.type == "cpu" else vocab_size
    return [slice(start, start + step) for start in range(0, vocab_size, step)]


def chunk_size(weight: Tensor) -> int:
    """Return the number of tokens whose logits are computed at a time, for a projection (vocab, d_model)."""
    return CHUNK_TOKENS if weight.device.type == "cpu" else max(CHUNK_TOKENS, CHUNK_LOGITS // weight.shape[0])


def _softmax_and_log_sum_exp(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Find a chunk's probabilities (tokens, vocab), on a CPU in the place of its logits, and log-sum-exps (tokens,).

    These are z - log p of the true token; where p vanishes, they are recomputed. An accelerator would have to be asked
    where, so there they are z - log p of the most probable token, whose p is at least 1 / vocab. Either way the loss
    is rounded as p is, to the type of the logits: in bfloat16 by up to 0.004 nats a token.
    """
    logits = _logits(hidden_states, weight, bias)
    if not reads_values(logits):
        highest, tokens = logits.max(dim=1)
        probabilities = torch.softmax(logits, dim=1)  # one pass, which computes in float32
        return probabilities, highest.float() - probabilities.gather(1, tokens[:, None])[:, 0].float().log()
    true_logits = logits.gather(1, labels[:, None])[:, 0].float()
    probabilities = torch.softmax(logits, dim=1, out=logits)
    true_probabilities = probabilities.gather(1, labels[:, None])[:, 0].float()
    log_sum_exp = true_logits - true_probabilities.log()
    least = max(torch.finfo(dtype).tiny for dtype in (probabilities.dtype, torch.float32))
    vanished = (true_probabilities < least).nonzero()[:, 0]
    recomputed = _logits(hidden_states[vanished], weight, bias).float().logsumexp(1)
    return probabilities, log_sum_exp.index_copy(0, vanished, recomputed)


@cache
def adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Find out by small matrices whether a device adds products of 16-bit ones to float32 sums in one operation.

    Args:
        device (`torch.device`): The device.
        dtype (`torch.dtype`): The type of the matrices.

    Returns:
        `bool`: the answer.

    Raises:
        OutOfMemoryError: if there is no memory left.
        AcceleratorError: if the device can't be used any more.
    """
    sums, ones = torch.ones(8, 8, device=device), torch.ones(8, 8, device=device, dtype=dtype)
    try:
        torch.addmm(sums, ones, ones, out_dtype=torch.float32, out=sums)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, TypeError):
        return False
    return True


def _add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of matrices to sums in float32, in place."""
    if left.device.type not in FLOAT_SUM_DEVICES or left.dtype not in (torch.float16, torch.bfloat16):
        sums += torch.mm(left, right)
    elif adds_in_float32(left.device, left.dtype):
        torch.addmm(sums, left, right, out_dtype=torch.float32, out=sums)
    else:
        sums.addmm_(left.float(), right.float())


def _add_gradients(
    grad_weight: Tensor, grad_bias: Tensor | None, chunk: Tensor, probabilities: Tensor, shares: Tensor | None
) -> None:
    """Add a chunk's part of the gradients of weight and bias that softmax(z) makes: in place, block by block.

    `shares`, of shape `(tokens, 1)`, are the weights of the tokens, if these are not all 1.
    """
    weighted = chunk if shares is None else chunk * shares
    for block in _vocab_blocks(grad_weight):
        _add_product(grad_weight[block], probabilities[:, block].t(), weighted)
        if grad_bias is not None and shares is None:
            grad_bias[block] += probabilities[:, block].sum(0, dtype=torch.float32)
        elif grad_bias is not None and shares is not None:
            _add_product(grad_bias[block, None], probabilities[:, block].t(), shares)


def loss_and_gradients(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    target: SmoothedTarget,
    weights: Tensor | None = None,
    is_frozen: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sum the cross-entropy of labelled tokens, and find its gradients, chunk by chunk.

    Args:
        hidden_states (`torch.Tensor` of shape `(tokens, d_model)`): What is projected.
        weight (`torch.Tensor` of shape `(vocab, d_model)`): Weight of the projection.
        bias (`torch.Tensor` of shape `(vocab,)`, *optional*): Its bias.
        labels (`torch.Tensor` of shape `(tokens,)`): True tokens.
        target (`SmoothedTarget`): The distribution around the true token.
        weights (`torch.Tensor` of shape `(tokens,)`, *optional*): What each token's loss is multiplied with.
        is_frozen (`bool`, defaults to `False`): Whether the projection gets no gradients.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]`: the sum, of shape `()`, in
        nats, and its gradients by hidden states, weight and bias; all in float32, in which they are scaled later.
    """
    token_weights = torch.ones_like(labels, dtype=torch.float32) if weights is None else weights.float()
    # in float16, small weights times small probabilities would be 0: matrices get their shares of the largest weight
    largest = None
    if weights is not None and weights.numel() > 0:
        largest = token_weights.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    weight_in_use = weight.to(hidden_states.dtype)
    bias_in_use = None if bias is None else bias.to(hidden_states.dtype)
    grad_hidden = torch.empty_like(hidden_states, dtype=torch.float32)
    grad_weight = None if is_frozen else torch.zeros_like(weight, dtype=torch.float32)
    grad_bias = None if is_frozen or bias is None else torch.zeros_like(bias, dtype=torch.float32)
    total = _expected_logits(hidden_states, weight, bias, labels, target).mul(token_weights).sum().neg()
    step = chunk_size(weight)
    for start in range(0, hidden_states.shape[0], step):
        rows = slice(start, start + step)
        chunk = hidden_states[rows]
        probabilities, log_sum_exp = _softmax_and_log_sum_exp(chunk, weight_in_use, bias_in_use, labels[rows])
        total += (log_sum_exp * token_weights[rows]).sum()
        grad_hidden[rows] = torch.mm(probabilities, weight_in_use)
        if grad_weight is not None:
            shares = None if largest is None else (token_weights[rows, None] / largest).to(chunk.dtype)
            _add_gradients(grad_weight, grad_bias, chunk, probabilities, shares)
    if largest is not None:
        grad_hidden *= token_weights[:, None]
        for gradient in (grad_weight, grad_bias):
            if gradient is not None:
                gradient *= largest
    of_target = (labels, target, token_weights)
    _subtract_target(grad_hidden, weight.float(), *of_target)
    if grad_weight is not None:
        _subtract_target_from_projection(grad_weight, grad_bias, hidden_states, *of_target)
    total -= token_weights.sum() * target.entropy
    return total, grad_hidden, grad_weight, grad_bias


def positions_with_label(labels: Tensor, count: int | None) -> Tensor:
    """Find the labels that are not -100.

    Args:
        labels (`torch.Tensor` of shape `(tokens,)`): Labels.
        count (`int`, *optional*): How many these are; otherwise an accelerator is waited for to count them.

    Returns:
        `torch.LongTensor` of shape `(count,)`: their positions.
    """
    is_labelled = labels != IGNORED_LABEL
    return (is_labelled.nonzero() if count is None else is_labelled.nonzero_static(size=count))[:, 0]


# One operation, so that compiled code neither looks into it nor breaks at its unknown number of labels. A copy of this
# file, in the folder of a model, is another module and needs another name.
@torch.library.custom_op(
    re.sub(r"\W", "_", __name__, flags=re.ASCII) + "::cross_entropy_and_gradients",
    mutates_args=(),
    schema="(Tensor hidden_states, Tensor weight, Tensor? bias, Tensor labels, Tensor? weights, SymInt? count,"
    " float true_probability, float other_probability, int excluded_id, float entropy)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),  # its shapes depend on the number of labels
)
def cross_entropy_and_gradients(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor | None,
    count: int | None,
    *target: Any,
) -> tuple[Tensor, ...]:
    """Compute the sum, and its gradients with respect to hidden states (tokens, d_model), weight and bias."""
    labelled = positions_with_label(labels, count)
    total, grad_labelled, *of_projection = loss_and_gradients(
        hidden_states.index_select(0, labelled),
        weight,
        bias,
        labels.index_select(0, labelled),
        SmoothedTarget(*target),
        None if weights is None else weights.index_select(0, labelled),
    )
    grad_hidden = torch.zeros_like(hidden_states, dtype=torch.float32).index_copy_(0, labelled, grad_labelled)
    grad_weight, grad_bias = (hidden_states.new_empty(0) if each is None else each for each in of_projection)
    return total, grad_hidden, grad_weight, grad_bias


@cross_entropy_and_gradients.register_fake
def _(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    return (
        hidden_states.new_empty((), dtype=torch.float32),
        torch.empty_like(hidden_states, dtype=torch.float32),
        torch.empty_like(weight, dtype=torch.float32),
        hidden_states.new_empty(0) if bias is None else torch.empty_like(bias, dtype=torch.float32),
    )


class _CrossEntropySum(torch.autograd.Function):
    """The sum of the cross-entropy, with gradients that are computed on the way forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        target: SmoothedTarget,
        weights: Tensor | None,
        count: int | None,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            arguments = (hidden_states, weight, bias, labels, weights, count, *target)
            total, *computed = cross_entropy_and_gradients(*arguments)
            # CUDA graphs of the backward keep the addresses of what is saved. Torch before 2.13 records them anew for
            # each address; this operation, outside of graphs, gives others each time, the forward's graph does not.
            gradients = [gradient + 0 for gradient in computed]
        else:
            is_frozen = not any(ctx.needs_input_grad[1:3])
            total, *gradients = loss_and_gradients(hidden_states, weight, bias, labels, target, weights, is_frozen)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "`create_graph=True` has no effect here: the loss of training with labels can be differentiated once. "
                "Take `torch.func.grad`, or compute the loss from the logits of evaluation mode."
            )
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        # autograd makes them of the types of the inputs
        return (*(gradient * grad_output if is_needed else None for gradient, is_needed in needed), *[None] * 4)


def projected_cross_entropy_sum(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    target: SmoothedTarget,
    weights: Tensor | None = None,
    count: int | None = None,
) -> Tensor:
    """Project the tokens that `select_labelled` gives onto the vocabulary and sum the cross-entropy.

    Works in chunks of tokens, so that the `(tokens, vocab)` logits of many never exist whole, and computes their
    gradient while they are in memory.

    Args:
        hidden_states (`torch.Tensor` of shape `(tokens, d_model)`): What is projected.
        weight (`torch.Tensor` of shape `(vocab, d_model)`): The projection.
        bias (`torch.Tensor` of shape `(vocab,)`, *optional*): Its bias.
        labels (`torch.Tensor` of shape `(tokens,)`): True tokens.
        target (`SmoothedTarget`): The distribution around the true token.
        weights (`torch.Tensor` of shape `(tokens,)`, *optional*): What each token's loss is multiplied with.
        count (`int`, *optional*): The number of tokens with a label, which compiled code otherwise waits for.

    Returns:
        `torch.Tensor` of shape `()`: the sum over all tokens, in float32 and nats. Can be differentiated once:
        a second time is a RuntimeError.
    """
    device = hidden_states.device.type
    has_autocast = device != "meta"  # compiled code of torch 2.11 can't ask `is_autocast_available`
    if has_autocast and torch.is_autocast_enabled(device):
        hidden_states = hidden_states.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False) if has_autocast else nullcontext():
        return _CrossEntropySum.apply(hidden_states, weight, bias, labels, target, weights, count)
