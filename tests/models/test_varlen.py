"""Packing for GPUs, with stand-ins for torch's kernels: outputs and gradients equal those of all positions."""

from itertools import pairwise

import pytest
import torch
from accelerate.utils import compile_regions
from tiny_berts import NO_DROPOUT, tiny_bert
from tiny_berts import TASKS as BERT_TASKS
from tiny_gpts import TASKS as GPT_TASKS
from tiny_gpts import tiny_gpt
from tiny_models import BATCH, tiny_model
from tiny_vits import IMAGES, tiny_vit
from tiny_vits import TASKS as VIT_TASKS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DataCollatorWithFlattening, DynamicCache

from hf_vanilla.models import checks, chunked_loss, dropout, layers, packing, read_positions, varlen_attention
from hf_vanilla.models.packing import PackingPlanner
from hf_vanilla.models.read_positions import host_sizes
from hf_vanilla.models.sequences import Sequences
from hf_vanilla.models.varlen_attention import EFFICIENT, FLASH


# Values of size 1 in float32 (2 ** -24), after some dozen operations that add in another order on each side.
TOLERANCE = dict(rtol=1e-5, atol=5e-6)


def sequences_of(states, offsets, is_causal, scale, dropout, seed):
    """Cut queries, keys and values (tokens, heads, width) into sequences; with each its weights, and what is kept."""
    query, key, value = states
    generator = torch.Generator().manual_seed(int(seed))
    for (start, end), (k_start, k_end) in zip(*(pairwise(each.tolist()) for each in offsets), strict=True):
        part = query[start:end], key[k_start:k_end], value[k_start:k_end]
        scores = scale * torch.einsum("qhd,khd->hqk", *part[:2])
        if is_causal:
            scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
        kept = torch.rand(scores.shape, generator=generator) >= dropout  # as a kernel draws them again
        yield *part, scores.softmax(-1), kept / (1 - dropout)


def attention_of_sequences(states, *options):
    """Compute attention sequence by sequence."""
    parts = sequences_of(states, *options)
    return torch.cat([torch.einsum("hqk,khd->qhd", weights * kept, value) for _, _, value, weights, kept in parts])


def gradients_of_sequences(grad, states, offsets, is_causal, scale, *options):
    """Compute the gradients of attention by hand: autograd does not look into a kernel."""
    gradients = []
    parts = sequences_of(states, offsets, is_causal, scale, *options)
    for (start, end), (query, key, value, weights, kept) in zip(pairwise(offsets[0].tolist()), parts, strict=True):
        wanted = grad[start:end]
        of_weights = torch.einsum("qhd,khd->hqk", wanted, value) * kept
        of_scores = scale * weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
        of_query = torch.einsum("hqk,khd->qhd", of_scores, key)
        of_key = torch.einsum("hqk,qhd->khd", of_scores, query)
        gradients.append((of_query, of_key, torch.einsum("hqk,qhd->khd", weights * kept, wanted)))
    return tuple(torch.cat(each) for each in zip(*gradients, strict=True))


def check_kernel_inputs(states, offsets, max_lengths):
    """Refuse what the kernels for GPUs refuse, or would read beyond the end of."""
    for tensor in states:
        assert tensor.stride(-1) == 1
        assert tensor.shape[-1] % 8 == 0
        assert tensor.shape == (len(tensor), *states[0].shape[1:])
    for each, tensor, longest in zip(offsets, states[:2], max_lengths, strict=True):
        assert each.dtype == torch.int32
        assert each[0] == 0
        assert each[-1] == len(tensor)
        assert type(longest) is int
        assert longest >= each.diff().max()


@pytest.fixture
def kernel_calls(request, monkeypatch):
    """Have a CPU run torch's kernels for GPUs; list the calls, each with its dropout and its number of sequences."""
    name, calls, library = getattr(request, "param", FLASH), [], torch.library.Library("aten", "IMPL")

    def forward(states, offsets, max_lengths, is_causal, scale, dropout):
        check_kernel_inputs(states, offsets, max_lengths)
        calls.append((dropout, len(offsets[0]) - 1))
        seed = torch.randint(2**31, ())
        return attention_of_sequences(states, offsets, is_causal, scale, dropout, seed), seed

    def flash(q, k, v, q_offsets, k_offsets, max_q, max_k, dropout, is_causal, debug, *, scale=None, **windows):
        output, seed = forward((q, k, v), (q_offsets, k_offsets), (max_q, max_k), is_causal, scale, dropout)
        return output, output.new_empty(0), seed, seed.clone(), output.new_empty(0)

    def flash_backward(grad, q, k, v, out, sums, q_offsets, k_offsets, max_q, max_k, dropout, causal, seed, *_, scale):
        return gradients_of_sequences(grad, (q, k, v), (q_offsets, k_offsets), causal, scale, dropout, seed)

    def efficient(q, k, v, bias, q_offsets, k_offsets, max_q, max_k, dropout, mask_type, sums=False, *, scale=None):
        assert sums == torch.is_grad_enabled()
        states, offsets = (q[0], k[0], v[0]), (q_offsets, k_offsets)
        output, seed = forward(states, offsets, (max_q, max_k), mask_type == 1, scale, dropout)
        return output[None], output.new_empty(0), seed, seed.clone(), max_q, max_k

    def efficient_backward(grad, q, k, v, bias, out, q_offsets, k_offsets, max_q, max_k, *rest, scale=None):
        _, dropout, seed, _, mask_type, _ = rest
        states, offsets = (q[0], k[0], v[0]), (q_offsets, k_offsets)
        gradients = gradients_of_sequences(grad[0], states, offsets, mask_type == 1, scale, dropout, seed)
        return *(each[None] for each in gradients), grad.new_empty(0)

    for operator, forwards, backwards in ((FLASH, flash, flash_backward), (EFFICIENT, efficient, efficient_backward)):
        library.impl(operator, forwards, "CPU")
        library.impl(operator.replace("forward", "backward"), backwards, "CPU")
    monkeypatch.setattr(varlen_attention, "VARLEN_DEVICES", ("cpu",))
    if name == FLASH:
        monkeypatch.setattr(varlen_attention, "FLASH_DTYPES", (torch.float32,))
    yield calls
    library._destroy()


BOTH_KERNELS = pytest.mark.parametrize("kernel_calls", [FLASH, EFFICIENT], indirect=True)


@pytest.fixture
def as_on_a_cpu(monkeypatch, no_shortcuts):
    """Return a function that has a CPU compute all positions by its own kernels."""

    def switch():
        monkeypatch.setattr(varlen_attention, "VARLEN_DEVICES", ("cuda",))
        no_shortcuts()

    return switch


FAMILIES = {
    **{f"bert {task}": (lambda task=task: tiny_bert(task, **NO_DROPOUT), BERT_TASKS[task][3]) for task in BERT_TASKS},
    **{f"gpt {task}": (lambda task=task: tiny_gpt(task, **NO_DROPOUT), GPT_TASKS[task][2]) for task in GPT_TASKS},
    "transformer": (lambda: tiny_model(dropout=0.0), BATCH),
    "pre-norm transformer": (lambda: tiny_model(dropout=0.0, norm_position="pre"), BATCH),
    "vit": (lambda: tiny_vit(**NO_DROPOUT), {"pixel_values": IMAGES, **VIT_TASKS["classes"][3]}),
}
del FAMILIES["bert model"]
# Calls of the kernel in a step: one for each of two layers, or of 2 encoder layers and twice of 3 decoder layers.
# Answers are looked for in padding too; BERT's choices begin with padding, and ViT has none.
CALLS = {"transformer": 8, "pre-norm transformer": 8, "bert answers": 0, "bert choices": 0, "vit": 0}


def loss_and_gradients(model, inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return {
        "loss": loss.detach(),
        **{name: each.grad for name, each in model.named_parameters() if each.grad is not None},
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_training_equals_padded(family, kernel_calls, fed_positions, as_on_a_cpu):
    make_model, inputs = FAMILIES[family]
    model = make_model().train()
    actual, fed = loss_and_gradients(model, inputs), sum(fed_positions)
    assert len(kernel_calls) == CALLS.get(family, 2)
    as_on_a_cpu()
    torch.testing.assert_close(actual, loss_and_gradients(model, inputs), rtol=1e-4, atol=2e-5)  # sums of other orders
    assert fed < sum(fed_positions) - fed or family == "bert answers"


@torch.no_grad()
@BOTH_KERNELS
@pytest.mark.parametrize("padded", ["source", "target", "both", "left", "neither"])
def test_packed_cross_attention_equals_padded(padded, kernel_calls, as_on_a_cpu):
    model, inputs = tiny_model(dropout=0.0).train(), dict(BATCH)
    if padded in ("target", "neither"):
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    if padded == "left":
        inputs |= {name: inputs[name].flip(1) for name in ("input_ids", "attention_mask")}
    if padded in ("source", "neither"):
        inputs["labels"] = inputs["labels"].clamp(min=3)
    actual = model(**inputs).loss
    assert len(kernel_calls) == {"source": 2 + 3, "target": 6, "neither": 0}.get(padded, 8)
    as_on_a_cpu()
    torch.testing.assert_close(actual, model(**inputs).loss, **TOLERANCE)


def test_padding_that_is_left_out_is_none_of_the_read_positions(kernel_calls, as_on_a_cpu):
    inputs = dict(BERT_TASKS["pre-training"][3])
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][1, -1] = 3
    model = tiny_bert(**NO_DROPOUT).train()
    actual = model(**inputs, keep_padding=False).loss
    assert len(kernel_calls) == 2
    as_on_a_cpu()
    torch.testing.assert_close(actual, model(**inputs, keep_padding=False).loss, **TOLERANCE)


def test_labels_at_padding_and_empty_rows_are_not_packed(kernel_calls, as_on_a_cpu):
    stray = dict(BERT_TASKS["pre-training"][3])
    stray["labels"] = stray["labels"].clone()
    stray["labels"][1, -1] = 3
    empty = {**BATCH, "attention_mask": BATCH["attention_mask"] * torch.tensor([[1], [0]])}
    models = (tiny_bert(**NO_DROPOUT).train(), tiny_model(dropout=0.0).train())
    actual = [loss_and_gradients(model, inputs) for model, inputs in zip(models, (stray, empty), strict=True)]
    assert kernel_calls == []
    as_on_a_cpu()
    expected = [loss_and_gradients(model, inputs) for model, inputs in zip(models, (stray, empty), strict=True)]
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize(("training", "rate"), [(True, 0.2), (False, 0.0)])
def test_kernel_drops_attention_weights_in_training(training, rate, kernel_calls):
    model = tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.2).train(training).bert
    model(**BERT_TASKS["model"][3])
    assert kernel_calls == [(rate, 2)] * 2


@BOTH_KERNELS
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("widths", [(8, 8), (3, 5), (16, 8)])
def test_varlen_attention_equals_that_of_each_sequence(widths, is_causal, kernel_calls):
    lengths, heads, d_k, d_v = [4, 1, 7], 3, *widths
    sequences = Sequences.of_lengths(torch.tensor(lengths), 7)
    query, key, value = (torch.randn(1, heads, 12, width, requires_grad=True) for width in (d_k, d_k, d_v))
    module = nn.Module()
    module.is_causal = is_causal
    where = varlen_attention.kernel_arguments(sequences, sequences)
    states = (each.transpose(1, 2) for each in (query, key, value))
    output = varlen_attention.varlen_attention(module, *states, 0.0, 0.7, **where)
    parts = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    expected = [nn.functional.scaled_dot_product_attention(*part, is_causal=is_causal, scale=0.7) for part in parts]
    expected = torch.cat(expected, dim=2).transpose(1, 2)
    torch.testing.assert_close(output, expected, **TOLERANCE)
    weights = torch.randn_like(output)
    gradients = [torch.autograd.grad((each * weights).sum(), (query, key, value)) for each in (output, expected)]
    torch.testing.assert_close(*gradients, **TOLERANCE)


class Waits(TorchDispatchMode):
    """Counts what would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique"):
            self.found.append(func)
        return func(*args, **(kwargs or {}))


# The last two ask themselves: transformers' helper makes a mask, which is what a head that reads padding needs.
ONE_WAIT = [name for name in FAMILIES if name not in ("vit", "bert answers", "bert choices")]


@pytest.mark.parametrize("family", ONE_WAIT)
def test_training_step_waits_once_for_a_gpu(family, kernel_calls, monkeypatch):
    make_model, inputs = FAMILIES[family]
    model, counted, count = make_model().train(), [], read_positions.count_masks
    for module in (read_positions, packing):
        monkeypatch.setattr(module, "count_masks", lambda *masks: counted.append(masks) or count(*masks))
    for module in (checks, chunked_loss):  # which read values on a CPU alone
        monkeypatch.setattr(module, "reads_values", lambda tensor: False)
    with Waits() as waits:
        model(**inputs).loss.backward()
    assert (len(counted), waits.found) == (1, [])


@pytest.mark.parametrize("family", ["transformer", "bert pre-training", "bert masked-lm", "bert tokens", "gpt text"])
def test_training_step_does_not_wait_if_the_collator_has_counted(family):
    """Tensors on "meta" have no values: asking for one is an error."""
    make_model, inputs = FAMILIES[family]
    sizes = {name: tuple(each) for name, each in host_sizes(inputs["attention_mask"], inputs["labels"]).items()}
    model = make_model().train().to("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = {name: tensor.to("meta") for name, tensor in inputs.items()}
    with pytest.raises(Exception, match="meta"):
        model(**inputs)
    model(**inputs, mask_sizes=sizes, num_items_in_batch=torch.tensor(5, device="meta")).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def test_counted_batches_give_the_same_gradients(kernel_calls, as_on_a_cpu):
    for make_model, inputs in (FAMILIES["transformer"], FAMILIES["bert pre-training"], FAMILIES["gpt text"]):
        model = make_model().train()
        expected = loss_and_gradients(model, inputs)
        sizes = host_sizes(inputs["attention_mask"], inputs["labels"])
        torch.testing.assert_close(loss_and_gradients(model, {**inputs, "mask_sizes": sizes}), expected)
    as_on_a_cpu()
    torch.testing.assert_close(loss_and_gradients(model, {**inputs, "mask_sizes": sizes}), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("task", "labels", "fields"),
    [("classes", torch.tensor([4, 1]), {"lm_loss_weight": 0.0}), ("multi-label", torch.eye(7)[:2], {"num_labels": 7})],
)
def test_counts_of_classes_are_not_taken_for_those_of_tokens(task, labels, fields, kernel_calls):
    inputs, model = {**GPT_TASKS[task][2], "labels": labels}, tiny_gpt(task, **NO_DROPOUT, **fields).train()
    sizes = {name: tuple(each) for name, each in host_sizes(inputs["attention_mask"], labels).items()}
    expected = loss_and_gradients(model, inputs)
    torch.testing.assert_close(loss_and_gradients(model, {**inputs, "mask_sizes": sizes}), expected, **TOLERANCE)


def test_full_mask_is_dropped_if_it_is_known_to_be_full(kernel_calls, monkeypatch):
    inputs = {**BATCH, "attention_mask": torch.ones_like(BATCH["attention_mask"])}
    sizes = host_sizes(inputs["attention_mask"], inputs["labels"])
    expected = tiny_model(dropout=0.0).train()(**inputs).loss
    monkeypatch.setattr(packing, "create_bidirectional_mask", lambda attention_mask, **kwargs: attention_mask)
    actual = tiny_model(dropout=0.0).train()(**inputs, mask_sizes=sizes).loss
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@torch.no_grad()
@pytest.mark.parametrize("family", ["bert masked-lm", "gpt text", "transformer"])
def test_compiled_model_takes_sizes_of_a_full_mask(family):
    make_model, inputs = FAMILIES[family]
    model, inputs = make_model().train(), {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}
    inputs["mask_sizes"] = host_sizes(inputs["attention_mask"], inputs["labels"])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).loss, model(**inputs).loss, **TOLERANCE)
    torch.compiler.reset()


ROWS = [[5, 6, 7, 8, 9], [10, 3], [4], [3, 3, 12, 11, 5, 4, 7]]


MODELS = {"bert": lambda **options: tiny_bert("masked-lm", **options), "gpt": tiny_gpt}


def check_flattened(model, given, **options):
    """Compare a flattened batch with its rows."""
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=given != "positions")(
        [{"input_ids": row} for row in ROWS]
    )
    wanted = [name for name in batch if name != "labels" and not (given == "offsets" and name == "position_ids")]
    expected = torch.cat([model(torch.tensor([row])).logits[0] for row in ROWS])
    actual = model(**{name: batch[name] for name in wanted}, **options).logits[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize("given", ["positions", "offsets", "both"])
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_flattened_sequences_do_not_see_each_other(kernel, family, given, is_hooked):
    model = MODELS[family](attn_implementation=kernel)
    if is_hooked:  # then they are not packed, but masked
        model.base_model.layers[0].register_forward_hook(lambda *_: None)
    check_flattened(model, given)


@torch.no_grad()
@pytest.mark.parametrize("given", ["positions", "offsets", "both"])
@pytest.mark.parametrize("family", MODELS)
def test_flattened_sequences_are_packed_for_a_gpu(family, given, kernel_calls):
    check_flattened(MODELS[family](), given, **({"use_cache": False} if family == "gpt" else {}))
    assert kernel_calls == [(0.0, len(ROWS))] * 2


@torch.no_grad()
def test_positions_that_jump_elsewhere_are_one_sequence_to_bert():
    model, ids = tiny_bert("masked-lm"), torch.tensor([[5, 6, 7, 8]])
    shuffled = torch.tensor([[3, 0, 2, 1]])
    expected = model(ids[:, [1, 3, 2, 0]]).logits
    torch.testing.assert_close(model(ids, position_ids=shuffled).logits[:, [1, 3, 2, 0]], expected, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("family", MODELS)
def test_offsets_divide_a_row_whose_positions_go_on(family):
    model, ids, positions = MODELS[family](), torch.tensor([[5, 6, 7, 8, 9]]), torch.arange(5)[None]
    given = {"input_ids": ids, "position_ids": positions, "cu_seq_lens_q": torch.tensor([0, 2, 5]), "use_cache": False}
    given = {name: value for name, value in given.items() if family == "gpt" or name != "use_cache"}
    expected = model(ids[:, 2:], position_ids=positions[:, 2:]).logits
    torch.testing.assert_close(model(**given).logits[:, 2:], expected, **TOLERANCE)
    masked = model(**given, output_hidden_states=True)  # not packed
    torch.testing.assert_close(masked.logits[:, 2:], expected, **TOLERANCE)


def test_offsets_of_several_rows_are_refused():
    for make_model in (tiny_bert, tiny_gpt):
        with pytest.raises(TypeError, match="`cu_seq_lens_q` must be a tensor, got list"):
            make_model().base_model(torch.tensor([[5, 6]]), cu_seq_lens_q=[0, 1, 2])
        with pytest.raises(ValueError, match="`cu_seq_lens_q`"):
            make_model().base_model(torch.tensor([[5, 6], [7, 8]]), cu_seq_lens_q=torch.tensor([0, 2, 4]))


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        ([0, 3], ValueError, r"must begin with 0, not fall, and end with the length of the row, 5; got \[0, 3\]"),
        ([0, 2, 9], ValueError, r"must begin with 0, .* got \[0, 2, 9\]"),
        ([1, 5], ValueError, r"must begin with 0, .* got \[1, 5\]"),
        ([0, 4, 3, 5], ValueError, r"must begin with 0, .* got \[0, 4, 3, 5\]"),
        ([], ValueError, r"must have shape \(sequences \+ 1,\)"),
        ([0.0, 5.0], TypeError, "must be integers .* got torch.float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", MODELS)
def test_offsets_that_do_not_fit_the_row_are_refused(family, offsets, error, message):
    for length in ({}, {"max_length_q": 5}):
        with pytest.raises(error, match=f"`cu_seq_lens_q` {message}"):
            MODELS[family]()(torch.tensor([[5, 6, 7, 8, 9]]), cu_seq_lens_q=torch.tensor(offsets), **length)


@pytest.mark.parametrize("family", MODELS)
def test_offsets_come_without_a_mask_or_cache(family):
    model, row = MODELS[family](), {"input_ids": torch.tensor([[5, 6, 7]]), "cu_seq_lens_q": torch.tensor([0, 1, 3])}
    with pytest.raises(ValueError, match="`attention_mask` must not be given with `cu_seq_lens_q`"):
        model(**row, attention_mask=torch.ones(1, 3))
    if family == "gpt":
        with pytest.raises(ValueError, match="`past_key_values` must not be given with `cu_seq_lens_q`"):
            model(**row, past_key_values=DynamicCache())


@pytest.mark.parametrize(
    "given", [{"cu_seq_lens_q": torch.tensor([0, 2, 5])}, {"position_ids": torch.arange(5)[None]}]
)
def test_encoder_decoder_refuses_flattened_batches(given):
    model, ids = tiny_model(), BATCH["input_ids"]
    states = model.model.encoder(ids).last_hidden_state
    calls = (
        lambda: model(**BATCH, **given),
        lambda: model.model.encoder(ids, **given),
        lambda: model.model.decoder(ids, encoder_hidden_states=states, **given),
    )
    for call in calls:
        with pytest.raises(ValueError, match=f"`{next(iter(given))}` must not be given"):
            call()


def test_flattened_sequences_leave_no_cache():
    ids, model = torch.tensor([[5, 6, 7, 8, 9]]), tiny_gpt()
    assert model(ids, position_ids=torch.tensor([[0, 1, 0, 1, 2]]), use_cache=True).past_key_values is None
    assert model(ids, position_ids=torch.arange(5)[None], use_cache=True).past_key_values.get_seq_length() == 5


def test_torch_has_the_operators_with_the_expected_arguments(monkeypatch):
    assert varlen_attention.has_operator(FLASH)
    assert varlen_attention.has_operator(EFFICIENT)
    for name, arguments in varlen_attention.KERNEL_ARGUMENTS.items():
        monkeypatch.setitem(varlen_attention.KERNEL_ARGUMENTS, name, arguments.replace("query key", "key query"))
    varlen_attention.has_operator.cache_clear()
    assert varlen_attention.varlen_kernel(torch.device("meta"), torch.float32) is None
    monkeypatch.undo()
    varlen_attention.has_operator.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "hip", "expected"),
    [
        ((9, 0), torch.bfloat16, None, FLASH),
        ((9, 0), torch.bfloat16, "built without flash", EFFICIENT),
        ((8, 0), torch.float16, None, FLASH),
        ((9, 0), torch.float32, None, EFFICIENT),
        ((7, 5), torch.float16, None, EFFICIENT),
        ((7, 5), torch.bfloat16, None, None),
        ((9, 0), torch.float64, None, None),
        ((9, 0), torch.bfloat16, "6.4", None),
    ],
)
def test_kernel_is_one_that_the_gpu_has_for_the_type(capability, dtype, hip, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: hip != "built without flash")
    monkeypatch.setattr(torch.version, "hip", None if hip == "built without flash" else hip)
    assert varlen_attention.varlen_kernel(torch.device("cuda", 0), dtype) == expected


def test_heads_too_wide_for_flash_attention_take_the_other_kernel(kernel_calls, monkeypatch):
    sequences = Sequences.of_lengths(torch.tensor([4, 3]), 4)
    module, where = nn.Module(), varlen_attention.kernel_arguments(sequences, sequences)
    module.is_causal = False
    monkeypatch.setattr(torch.ops.aten, FLASH, None)
    wide = torch.randn(1, 2, 7, 257)  # flash attention takes 256
    states = wide.transpose(1, 2)
    output = varlen_attention.varlen_attention(module, states, states, states, 0.0, 0.1, **where)
    expected = [nn.functional.scaled_dot_product_attention(*[part] * 3, scale=0.1) for part in wide.split([4, 3], 2)]
    torch.testing.assert_close(output, torch.cat(expected, 2).transpose(1, 2), **TOLERANCE)


def batch_of_lengths(lengths):
    """Draw rows of these lengths, which have labels of their first three tokens."""
    positions = torch.arange(max(lengths))
    mask = positions < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 13, mask.shape).masked_fill(~mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(positions > 2, -100)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("family", ["bert masked-lm", "gpt text", "transformer"])
def test_layers_compiled_one_by_one_are_compiled_for_all_lengths_at_once(family, kernel_calls, monkeypatch):
    torch.compiler.reset()
    graphs_of_layers = []

    def backend(graph, inputs):
        graphs_of_layers.extend([graph] if any("feed_forward" in node.name for node in graph.graph.nodes) else [])
        return graph

    monkeypatch.setattr(packing, "LENGTH_BOUNDS", (6, 12))  # the longest rows are on both sides of one
    make_model, _ = FAMILIES[family]
    plain, compiled = make_model().train(), compile_regions(make_model().train(), backend=backend, fullgraph=True)
    for number in range(12):
        lengths = torch.randint(4, 11, (2 + number % 5,)).tolist()
        batch = batch_of_lengths(lengths if number % 4 else lengths[:1] * len(lengths))  # some without padding
        if family == "transformer":
            batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100).flip(0)
        elif number % 8 == 4:
            del batch["attention_mask"]
        expected, actual = loss_and_gradients(plain, batch), loss_and_gradients(compiled, batch)
        actual = {name.replace("_orig_mod.", ""): each for name, each in actual.items()}
        torch.testing.assert_close(actual, expected, **TOLERANCE)
    torch.compiler.reset()
    # for the first bound and for all others, of two classes, or of the last layer and those before
    assert len(graphs_of_layers) <= 4
    assert graphs_of_layers


def test_compiled_layers_take_no_kernel_whose_gradient_is_not_traced(monkeypatch):
    model, states = tiny_bert().bert, torch.empty(1, 2, 12, device="meta")
    monkeypatch.setattr(varlen_attention, "varlen_kernel", lambda *_: EFFICIENT)
    assert PackingPlanner(model, states, {}).is_varlen
    model.layers[0].compile(backend="eager")  # which happens at the first call
    assert not PackingPlanner(model, states, {}).is_varlen
    monkeypatch.setattr(varlen_attention, "varlen_kernel", lambda *_: FLASH)
    assert PackingPlanner(model, states, {}).is_varlen
    monkeypatch.setattr(varlen_attention, "FLASH_WIDTH", model.layers[0].self_attn.d_k - 1)
    assert not PackingPlanner(model, states, {}).is_varlen


def test_tokens_are_put_back_on_the_device_of_the_last_layer():
    packed = packing.Packing(2, 3, torch.tensor([0, 1, 3]))  # made on the device of the embeddings
    assert packed.unpack(torch.empty(1, 3, 4, device="meta")).shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("name", "is_warned"),
    [
        ("flash_attention_3", True),
        ("flash_attention_4", True),
        ("kernels-community/vllm-flash-attn3", True),
        ("flash_attention_2", False),
    ],
)
def test_lost_dropout_is_warned_of(name, is_warned, monkeypatch):
    messages = []
    monkeypatch.setattr(dropout.logger, "warning_once", messages.append)
    monkeypatch.setattr(layers.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_: layers.eager_attention_forward)
    attention = tiny_bert(attention_probs_dropout_prob=0.1).bert.layers[0].self_attn.train()
    attention.config._attn_implementation = name
    attention(torch.ones(1, 2, 12))
    attention.eval()(torch.ones(1, 2, 12))
    assert [name in message for message in messages] == [True] * is_warned
