"""Compilation, export, LoRA adapters and other attention kernels."""

import shutil
from functools import partial
from itertools import chain

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_berts import NO_DROPOUT, TASKS, tiny_bert
from tiny_gpts import TASKS as GPT_TASKS
from tiny_gpts import tiny_gpt
from tiny_models import (
    BATCH,
    LABELS,
    SOURCE,
    SOURCE_MASK,
    TARGET,
    VOCAB,
    assert_same,
    gradients,
    tiny_model,
)
from tiny_vits import IMAGES, tiny_vit
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from hf_vanilla.models import packing, varlen_attention


INPUTS = {"input_ids": SOURCE, "attention_mask": SOURCE_MASK, "decoder_input_ids": TARGET}
SHALLOW = dict(encoder_layers=1, decoder_layers=1)
# torch warns of its own tracing of a `torch.autograd.Function`
DYNAMO_WARNS = pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def static_cache(model):
    config = model.config.get_text_config(decoder=True)
    return EncoderDecoderCache(
        StaticCache(config=config, max_cache_len=9), StaticCache(config=config, max_cache_len=SOURCE.shape[1])
    )


def random_batch(batch, src_len, tgt_len):
    source, labels = torch.randint(3, VOCAB, (batch, src_len)), torch.randint(3, VOCAB, (batch, tgt_len))
    labels[-1, tgt_len // 2 :] = -100
    source[-1, src_len // 2 :] = 0
    return {"input_ids": source, "attention_mask": (source != 0).long(), "labels": labels}


@DYNAMO_WARNS
@pytest.mark.parametrize(
    ("kernel", "smoothing_type"), [("sdpa", "uniform"), ("eager", "t2t"), ("sdpa", "annotated")], ids=str
)
def test_compiled_training_has_the_same_loss_and_gradients(kernel, smoothing_type):
    model = tiny_model(attn_implementation=kernel, dropout=0.0, label_smoothing_type=smoothing_type, **SHALLOW).train()
    batch = {**BATCH, "num_items_in_batch": torch.tensor(17)}
    expected = model(**batch).loss
    expected.backward()
    wanted = gradients(model)
    model.zero_grad()
    outputs = torch.compile(model, fullgraph=True, backend="eager")(**batch)
    outputs.loss.backward()
    torch.testing.assert_close(outputs.loss, expected)
    assert outputs.logits is None
    assert_same(gradients(model), wanted, rtol=1e-4, atol=1e-6)


@DYNAMO_WARNS
@pytest.mark.parametrize("task", ["text", "classes", "choices"])
def test_compiled_training_of_gpt_has_the_same_loss_and_gradients(task):
    model, batch = tiny_gpt(task, **NO_DROPOUT).train(), GPT_TASKS[task][2]
    expected = model(**batch).loss
    expected.backward()
    wanted = gradients(model)
    model.zero_grad()
    loss = torch.compile(model, fullgraph=True, backend="eager")(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert_same(gradients(model), wanted, rtol=1e-4, atol=1e-6)


@DYNAMO_WARNS
def test_compiled_backward_pass_has_the_same_gradients():
    model = tiny_model(dropout=0.0, **SHALLOW).train()
    model(**BATCH).loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(**BATCH).loss.backward()
    assert_same(gradients(model), wanted, rtol=1e-4, atol=1e-6)


def transformable():
    """Models in training without dropout, with their inputs."""
    yield tiny_model(dropout=0.0).train(), BATCH
    for task in ("pre-training", "classes"):
        yield tiny_bert(task, **NO_DROPOUT).train(), TASKS[task][3]
    for task in ("text", "choices"):
        yield tiny_gpt(task, **NO_DROPOUT).train(), GPT_TASKS[task][2]


@pytest.mark.parametrize(
    ("model", "inputs"),
    list(transformable()),
    ids=["translation", "pre-training", "classification", "text", "multiple choice"],
)
def test_function_transforms_give_the_gradients_of_autograd(model, inputs):
    parameters = dict(model.named_parameters())

    def loss(values, inputs):
        return torch.func.functional_call(model, values, (), inputs).loss

    def expected(inputs):
        found = torch.autograd.grad(
            model(**inputs).loss, parameters.values(), allow_unused=True, materialize_grads=True
        )
        return dict(zip(parameters, found, strict=True))

    # float32, added in another order: no chunks, no packing
    assert_same(torch.func.grad(loss)(parameters, inputs), expected(inputs), rtol=1e-4, atol=1e-5)
    inputs = {name: tensor for name, tensor in inputs.items() if name != "attention_mask"}  # its helpers read values
    of_row = torch.func.grad(lambda values, row: loss(values, {name: each[None] for name, each in row.items()}))
    rows = torch.func.vmap(of_row, in_dims=(None, 0))(parameters, inputs)
    for row in range(2):
        actual = {name: tensor[row] for name, tensor in rows.items()}
        one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        assert_same(actual, expected(one), rtol=1e-4, atol=1e-5)


@DYNAMO_WARNS
def test_compilation_is_reused_for_batches_of_all_shapes():
    model = tiny_model(dropout=0.0, **SHALLOW).train()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    for shape in [(2, 5, 7), (3, 9, 4), (5, 4, 11)]:
        batch = random_batch(*shape)
        torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss)
    assert counter.frame_count == 1


@DYNAMO_WARNS
@pytest.mark.parametrize("differentiable", [True, False], ids=["gradients", "no gradients"])
def test_compiled_forward_pass_has_the_same_logits(differentiable):
    model = tiny_model(position_type="learned", norm_position="pre", **SHALLOW)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.set_grad_enabled(differentiable):
        actual, expected = compiled(**INPUTS, use_cache=False), model(**INPUTS, use_cache=False)
    torch.testing.assert_close(actual.logits, expected.logits)


@torch.no_grad()
@pytest.mark.parametrize("position_type", ["sinusoidal", "learned"])
def test_static_cache_decoding_compiles_without_graph_breaks(position_type):
    model = tiny_model(position_type=position_type, **SHALLOW)
    expected = model(**INPUTS).logits
    encoder_outputs = model.get_encoder()(SOURCE, attention_mask=SOURCE_MASK)
    counter = CompileCounterWithBackend("eager")
    compiled, cache = torch.compile(model, fullgraph=True, backend=counter), static_cache(model)
    for step in range(7):
        outputs = compiled(
            encoder_outputs=encoder_outputs,
            attention_mask=SOURCE_MASK,
            decoder_input_ids=TARGET[:, step : step + 1],
            past_key_values=cache,
        )
        torch.testing.assert_close(outputs.logits[:, 0], expected[:, step], rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 2  # the first step, which projects the source, and all others


@DYNAMO_WARNS
def test_compiled_dropout_is_random():
    model = tiny_model(dropout=0.5, **SHALLOW).train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    losses = {compiled(**BATCH).loss.item() for _ in range(3)}
    assert len(losses) == 3


def test_exported_program_has_the_same_logits_for_other_shapes():
    model = tiny_model(**SHALLOW)
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(
        model,
        (),
        {**INPUTS, "use_cache": False},
        dynamic_shapes={**dict.fromkeys(INPUTS, dynamic), "use_cache": None},
    ).module()
    other = random_batch(3, 9, 4)
    target = model.prepare_decoder_input_ids_from_labels(other.pop("labels"))
    others = {**other, "decoder_input_ids": target}
    for inputs in (INPUTS, others):
        torch.testing.assert_close(program(**inputs, use_cache=False).logits, model(**inputs, use_cache=False).logits)


def test_exported_classifier_has_the_same_logits_for_other_shapes():
    model = tiny_gpt("classes")
    given = {name: GPT_TASKS["classes"][2][name] for name in ("input_ids", "attention_mask")}
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=17)
    program = torch.export.export(
        model, (), given, dynamic_shapes={name: {0: batch, 1: length} for name in given}
    ).module()
    inputs = {name: rows.repeat(2, 1)[:3, :5] for name, rows in given.items()}
    torch.testing.assert_close(program(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("task", ["classes", "next-sentence"])
def test_exported_bert_takes_a_text_of_two_tokens(task):
    model, given = tiny_bert(task), {name: TASKS[task][3][name] for name in ("input_ids", "attention_mask")}
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(model, (), given, dynamic_shapes=dict.fromkeys(given, dynamic)).module()
    inputs = {name: rows[:, :2] for name, rows in given.items()}
    torch.testing.assert_close(program(**inputs).logits, model(**inputs).logits)


RATES = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
WITH_DROPOUT = {
    "encoder-decoder": (partial(tiny_model, **RATES, activation_dropout=0.4), INPUTS),
    "bert": (partial(tiny_bert, "classes", **RATES), {"input_ids": SOURCE}),
    "gpt": (partial(tiny_gpt, "classes", **RATES), {"input_ids": SOURCE}),
    "vit": (partial(tiny_vit, **RATES), {"pixel_values": IMAGES}),
}


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("family", WITH_DROPOUT)
def test_dropout_is_switched_by_its_modules(family, kernel):
    make, inputs = WITH_DROPOUT[family]
    model = make(attn_implementation=kernel)
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    with torch.no_grad():
        expected = model(**inputs).logits
        for each in dropouts:
            each.train()  # dropout at inference
        assert not torch.allclose(model(**inputs).logits, model(**inputs).logits)
        for each in dropouts:
            each.p = 0
        torch.testing.assert_close(model.train()(**inputs).logits, expected)


ATTENTION = ["qkv_proj", "q_proj", "kv_proj", "out_proj", "fc1", "fc2"]


def adapted(model, targets):
    config = LoraConfig(task_type="SEQ_2_SEQ_LM", r=3, target_modules=targets, init_lora_weights=True)
    return get_peft_model(model, config)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.filterwarnings("ignore:.*save_embedding_layers:UserWarning")
@pytest.mark.parametrize(
    ("targets", "tied"), [(ATTENTION, True), ([*ATTENTION, "lm_head"], False)], ids=["layers", "layers and projection"]
)
def test_lora_trains_only_adapters_and_reloads(targets, tied, tmp_path):
    original = tiny_model(tie_word_embeddings=tied)
    before = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    expected = original(**BATCH)
    model = adapted(tiny_model(tie_word_embeddings=tied), targets)
    torch.testing.assert_close(model(**BATCH).logits, expected.logits)  # LoRA starts at zero

    model.train()
    optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.02)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(**BATCH).loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for name, tensor in model.get_base_model().state_dict().items():
        if "lora" not in name:
            assert torch.equal(tensor, before[name.replace(".base_layer", "")]), name

    model.eval().save_pretrained(tmp_path)
    reloaded = PeftModel.from_pretrained(tiny_model(tie_word_embeddings=tied), tmp_path).eval()
    torch.testing.assert_close(reloaded(**BATCH).logits, model(**BATCH).logits)
    assert not torch.allclose(reloaded(**BATCH).logits, expected.logits, atol=1e-2)
    generated = [
        adapter.generate(input_ids=SOURCE, attention_mask=SOURCE_MASK, num_beams=2, max_new_tokens=5)
        for adapter in (model, reloaded)
    ]
    assert torch.equal(*generated)
    merged = reloaded.merge_and_unload()
    torch.testing.assert_close(merged(**BATCH).logits, model(**BATCH).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("task", ["text", "classes"])
def test_lora_on_gpt_learns_and_reloads(task, tmp_path):
    batch = GPT_TASKS[task][2]
    config = LoraConfig(
        task_type={"text": "CAUSAL_LM", "classes": "SEQ_CLS"}[task], r=3, target_modules=["qkv_proj", "fc1"]
    )
    model = get_peft_model(tiny_gpt(task, **NO_DROPOUT), config).train()
    before = model(**batch).loss.item()
    optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.05)
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.9 * before
    model.eval().save_pretrained(tmp_path)
    reloaded = PeftModel.from_pretrained(tiny_gpt(task), tmp_path).eval()
    torch.testing.assert_close(reloaded(**batch).logits, model(**batch).logits)
    torch.testing.assert_close(
        reloaded.merge_and_unload()(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-4
    )


FAMILIES = {
    "encoder-decoder": (tiny_model, "embed_tokens", "SEQ_2_SEQ_LM", BATCH),
    "bert": (partial(tiny_bert, "masked-lm"), "word_embeddings", None, TASKS["masked-lm"][3]),
    "gpt": (tiny_gpt, "embed_tokens", "CAUSAL_LM", GPT_TASKS["text"][2]),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["layer", "rows"])
@pytest.mark.parametrize(("make", "table", "task_type", "batch"), FAMILIES.values(), ids=FAMILIES)
def test_adapters_of_embeddings_are_trained(make, table, task_type, batch, kind):
    rows = {"target_modules": ["fc1"], "trainable_token_indices": {table: [3, 5]}}
    options = rows if kind == "rows" else {"target_modules": [table]}
    model = get_peft_model(make(), LoraConfig(task_type=task_type, r=3, **options))
    if kind == "layer":  # it starts at zero; around rows, PEFT leaves out the bias of BERT's tied projection
        torch.testing.assert_close(model.eval()(**batch).logits, make().eval()(**batch).logits)
    model.train()(**batch).loss.backward()
    trained = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    assert all(each is not None for each in trained.values())
    assert any(each.any() for name, each in trained.items() if table in name)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_loss_of_an_adapted_projection_is_that_of_its_logits():
    model = adapted(tiny_model(tie_word_embeddings=False, dropout=0.0, label_smoothing=0.1), ["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.lora_B["default"].weight.normal_()
    logits = model.eval()(**BATCH).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(model.train()(**BATCH).loss, expected)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["lm_head"]}], ids=str)
def test_adapters_of_the_projection_leave_the_padding_row(options):
    config = LoraConfig(task_type="SEQ_2_SEQ_LM", r=3, **{"target_modules": ATTENTION, **options})
    model = get_peft_model(tiny_model(), config).train()
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.5)
    for _ in range(2):  # in LoRA, the second matrix is zero at first
        model(**BATCH).loss.backward()
        optimizer.step()
    trained = model.merge_and_unload().lm_head.weight
    before = tiny_model().lm_head.weight
    assert torch.equal(trained[0], before[0])
    assert not torch.allclose(trained[1:], before[1:])


def test_attention_kernel_can_be_changed_at_run_time():
    model = tiny_model()
    expected = model(**INPUTS).logits
    model.set_attn_implementation("eager")
    outputs = model(**INPUTS, output_attentions=True)
    assert len(outputs.cross_attentions) == 3
    torch.testing.assert_close(outputs.logits, expected)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="flex attention on a CPU needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@torch.no_grad()
def test_flex_attention_equals_sdpa():
    # Only forward: on a CPU, torch 2.13 has no backward pass of it, and its kernel for one query reads out of bounds.
    model = tiny_model()
    expected = model(**INPUTS, decoder_attention_mask=(TARGET != 0).long()).logits
    model.set_attn_implementation("flex_attention")
    actual = model(**INPUTS, decoder_attention_mask=(TARGET != 0).long()).logits
    tokens = TARGET != 0
    torch.testing.assert_close(actual[tokens], expected[tokens], rtol=1e-4, atol=1e-5)


@DYNAMO_WARNS
@torch.no_grad()
@pytest.mark.parametrize("way", ["compiled", "exported"])
@pytest.mark.parametrize("family", ["bert", "gpt", "transformer"])
def test_output_at_padding_is_zero_on_every_path(family, way):
    models = {"bert": lambda: tiny_bert("model"), "gpt": lambda: tiny_gpt(use_cache=False).transformer}
    model = models.get(family, lambda: tiny_model().get_encoder())()
    expected = model(SOURCE, SOURCE_MASK).last_hidden_state
    assert torch.equal((expected != 0).all(-1), SOURCE_MASK.bool())
    if way == "compiled":
        run = torch.compile(model, fullgraph=True, backend="aot_eager")
    else:
        run = torch.export.export(model, (SOURCE, SOURCE_MASK)).module()
    actual = run(SOURCE, SOURCE_MASK).last_hidden_state
    assert torch.equal(actual == 0, expected == 0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)  # packed products have other shapes
    assert model(SOURCE, SOURCE_MASK, keep_padding=True).last_hidden_state.all()


@torch.no_grad()
def test_only_the_encoder_is_given_what_keeps_its_padding():
    model, given = tiny_model().model, []
    expected = model(**INPUTS)
    model.decoder.register_forward_pre_hook(lambda module, args, kwargs: given.extend(kwargs), with_kwargs=True)
    outputs = model(**INPUTS, keep_padding=True)
    assert outputs.encoder_last_hidden_state.all()
    assert "keep_padding" not in given
    # packed products have other shapes
    torch.testing.assert_close(outputs.last_hidden_state, expected.last_hidden_state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention", "flash_attention_2"])
def test_sources_are_repeated_for_beams_if_the_kernel_cannot_share_them(implementation):
    model = tiny_model()
    model.config._attn_implementation = implementation
    encoder_outputs = BaseModelOutput(last_hidden_state=torch.randn(2, 5, 16))
    input_ids, inputs = model._expand_inputs_for_generation(
        input_ids=torch.tensor([[1], [2]]),
        expand_size=3,
        is_encoder_decoder=True,
        encoder_outputs=encoder_outputs,
        attention_mask=SOURCE_MASK,
        decoder_attention_mask=torch.tensor([[1], [0]]),
    )
    assert input_ids.tolist() == [[1], [1], [1], [2], [2], [2]]
    assert inputs["decoder_attention_mask"].tolist() == [[1], [1], [1], [0], [0], [0]]
    rows = 2 if implementation in ("eager", "sdpa") else 6
    assert inputs["encoder_outputs"].last_hidden_state.shape == (rows, 5, 16)
    assert inputs["attention_mask"].shape == (rows, 5)


def flash_stand_in(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, softmax_scale=None):
    """Attention over flattened sequences, as flash attention's kernel for varying lengths computes it."""
    outputs = []
    q_lengths, k_lengths = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    parts = q.split(q_lengths), k.split(k_lengths), v.split(k_lengths)
    for query, key, value in zip(*parts, strict=True):
        mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query)) if causal else None
        heads_first = (states.transpose(0, 1) for states in (query, key, value))
        output = nn.functional.scaled_dot_product_attention(*heads_first, mask, scale=softmax_scale)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def flash_attention_2(monkeypatch):
    """Install the stand-in as transformers' flash attention 2."""
    options = flash_utils._lazy_define_process_function(flash_stand_in)
    functions = (None, flash_stand_in, None, flash_utils._pad_input, flash_utils._unpad_input)
    is_5_17 = hasattr(flash_utils, "lazy_import_paged_flash_attention")  # later versions return a pair of options
    imported = functions, options if is_5_17 else (options, None)
    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", lambda *args: imported)
    return "flash_attention_2"


@pytest.mark.parametrize("family", ["encoder-decoder", "decoder"])
def test_flash_attention_does_not_see_empty_slots_of_a_static_cache(family, flash_attention_2):
    model = tiny_model(d_k=None, d_v=None) if family == "encoder-decoder" else tiny_gpt()
    inputs = {"input_ids": SOURCE, "attention_mask": SOURCE_MASK} if family == "encoder-decoder" else {}
    prefix = "decoder_" if family == "encoder-decoder" else ""

    def logits():
        cache = StaticCache(config=model.config, max_cache_len=9)
        cache = EncoderDecoderCache(cache, DynamicCache(config=model.config)) if prefix else cache
        steps = (TARGET[:, :4], TARGET[:, 4:5])
        given = ({**inputs, f"{prefix}input_ids": step, "past_key_values": cache} for step in steps)
        return torch.cat([model(**each).logits for each in given], dim=1)

    expected = logits()
    model.config._attn_implementation = flash_attention_2
    torch.testing.assert_close(logits(), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("make_model", [partial(tiny_bert, "masked-lm"), tiny_gpt], ids=["bert", "gpt"])
def test_flattened_sequences_do_not_see_each_other_in_flash_attention(make_model, flash_attention_2):
    model, rows = make_model(), [[5, 6, 7, 8], [9], [3, 4, 5]]
    expected = torch.cat([model(torch.tensor([row])).logits[0] for row in rows])
    model.config._attn_implementation = flash_attention_2
    positions = torch.tensor([[each for row in rows for each in range(len(row))]])
    actual = model(torch.tensor([list(chain.from_iterable(rows))]), position_ids=positions).logits[0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tgt_len", [3, 5, 7])
def test_flash_cross_attention_equals_sdpa(tgt_len, side, is_packed, flash_attention_2, monkeypatch):
    source, mask = (tensor.flip(1) if side == "left" else tensor for tensor in (SOURCE, SOURCE_MASK))
    target_mask = torch.ones(2, tgt_len, dtype=torch.long)
    target_mask[1, 0] = 0  # the target has varying lengths, too
    inputs = {"input_ids": source, "attention_mask": mask}
    inputs |= {"decoder_input_ids": TARGET[:, :tgt_len], "decoder_attention_mask": target_mask}
    model = tiny_model(d_k=None, d_v=None)
    expected = model(**inputs).logits
    model.config._attn_implementation = flash_attention_2
    if is_packed:
        monkeypatch.setattr(varlen_attention, "VARLEN_DEVICES", ("cpu",))
        monkeypatch.setattr(packing, "create_bidirectional_mask", None)  # no mask is made
    actual = model(**inputs, use_cache=not is_packed).logits
    torch.testing.assert_close(actual[target_mask.bool()], expected[target_mask.bool()], rtol=1e-5, atol=1e-5)
