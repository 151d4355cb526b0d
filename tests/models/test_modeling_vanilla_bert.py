"""BERT's losses, gradients, initialisation and checkpoints, use with other libraries, and refused input."""

import accelerate
import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_berts import IDS, MASK, MASKED_LABELS, NO_DROPOUT, SEGMENTS, TASKS, TEXT, VOCAB, native_bert, tiny_bert
from torch import nn
from transformers import pipeline

from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForMaskedLM,
    VanillaBertForPreTraining,
    VanillaBertForQuestionAnswering,
    VanillaBertForSequenceClassification,
    VanillaBertModel,
)


LABELLED = {task: line for task, line in TASKS.items() if task != "model"}
# Tasks whose labels the Trainer counts; the count of a batch is that of its labels.
COUNTED = {task: line for task, line in LABELLED.items() if "labels" in line[3]}
# peft calls a deprecated method of transformers, and 0.18 looks for a config in the wrong place
PEFT_WARNS = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning", "ignore:Could not find a config file:UserWarning"
)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def rows(inputs, which):
    return {name: tensor[which] for name, tensor in inputs.items()}


@pytest.mark.parametrize("task", COUNTED)
def test_gradients_of_two_batches_add_up_to_that_of_one(task):
    model = tiny_bert(task, **NO_DROPOUT).train()
    inputs = LABELLED[task][3]
    items = (inputs["labels"] != -100).sum()
    losses = [model(**rows(inputs, slice(row, row + 1)), num_items_in_batch=items).loss for row in (0, 1)]
    whole = model(**inputs, num_items_in_batch=items).loss if task == "pre-training" else model(**inputs).loss
    torch.testing.assert_close(sum(losses), whole)
    model.zero_grad()
    whole.backward()
    wanted = gradients(model)
    model.zero_grad()
    sum(losses).backward()
    # The sums over tokens add in another order: some dozen roundings of float32 at values of about 1.
    torch.testing.assert_close(gradients(model), wanted, rtol=1e-5, atol=5e-6)


def test_sentence_pairs_are_weighted_by_masked_tokens_over_a_step():
    model = tiny_bert("pre-training")
    inputs = LABELLED["pre-training"][3]  # 2 and 1 masked tokens
    labels = inputs["next_sentence_label"]
    first, second = (model(**rows(TEXT, [row]), next_sentence_label=labels[[row]]).loss for row in (0, 1))
    masked = model(**TEXT, labels=MASKED_LABELS).loss
    torch.testing.assert_close(model(**inputs).loss, masked + (first + second) / 2)
    torch.testing.assert_close(model(**inputs, num_items_in_batch=3).loss, masked + (2 * first + second) / 3)


@pytest.mark.parametrize("task", ["masked-lm", "pre-training"])
def test_training_projects_labelled_tokens_and_evaluation_all(task):
    model = tiny_bert(task, **NO_DROPOUT)
    name = "logits" if task == "masked-lm" else "prediction_logits"
    inputs = LABELLED[task][3]
    evaluated = model.eval()(**inputs)
    assert evaluated[name].shape == (2, 7, VOCAB)
    seen = []
    head = next(module for name, module in model.named_modules() if name.endswith(".transform"))
    head.register_forward_hook(lambda module, args, output: seen.append(args[0].shape))
    trained = model.train()(**inputs)
    assert getattr(trained, name) is None
    assert seen == [(3, 12)]
    torch.testing.assert_close(trained.loss, evaluated.loss)
    assert model(**TEXT)[name].shape == (2, 7, VOCAB)


@pytest.mark.promise("no labels")
def test_batch_without_masked_tokens_has_zero_loss_and_gradients():
    model = tiny_bert("masked-lm").train()
    loss = model(**TEXT, labels=torch.full_like(IDS, -100)).loss
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_pretraining_head_accepts_either_label_alone():
    model = tiny_bert("pre-training")
    both = model(**LABELLED["pre-training"][3]).loss
    masked = model(**TEXT, labels=MASKED_LABELS).loss
    following = model(**TEXT, next_sentence_label=torch.tensor([1, 0])).loss
    torch.testing.assert_close(masked + following, both)


@pytest.mark.parametrize("padding", [2, 3], ids=["one-more", "two-more"])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_row_of_a_batch_equals_the_row_alone(kernel, padding):
    model = tiny_bert("model", attn_implementation=kernel)
    alone = model(IDS[1:, :5], token_type_ids=SEGMENTS[1:, :5])
    wide = [nn.functional.pad(tensor, (0, padding)) for tensor in (IDS, MASK, SEGMENTS)]
    batch = model(*wide)
    torch.testing.assert_close(batch.last_hidden_state[1:, :5], alone.last_hidden_state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(batch.pooler_output[1:], alone.pooler_output, rtol=1e-5, atol=1e-5)


def test_row_of_padding_has_finite_gradients():
    model = tiny_bert("masked-lm", **NO_DROPOUT).train()
    mask = MASK.clone()
    mask[1] = 0
    model(IDS, attention_mask=mask, labels=MASKED_LABELS).loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


def test_position_ids_and_input_embeddings_are_used():
    model = tiny_bert("model")
    expected = model(IDS).last_hidden_state
    embedded = model(inputs_embeds=model.get_input_embeddings()(IDS), position_ids=torch.arange(7)[None])
    torch.testing.assert_close(embedded.last_hidden_state, expected)
    moved = model(IDS, position_ids=torch.arange(1, 8)[None]).last_hidden_state
    assert (moved - expected).abs().max() > 1e-3


def test_initialisation_is_that_of_the_authors():
    config = VanillaBertConfig(vocab_size=499, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    model = VanillaBertForPreTraining(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name.lower():
            assert (parameter == 1).all(), name
        elif parameter.numel() > 1000:
            assert parameter.abs().max() <= 0.04, name
            assert 0.016 < parameter.std() < 0.019, name  # normal, truncated at two deviations: 0.0176
    assert not model.bert.embeddings.word_embeddings.weight[0].any()


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_hidden_states_and_attentions_are_returned_on_request(attn_implementation):
    model = tiny_bert("model", attn_implementation="eager")
    outputs = model(**TEXT, output_hidden_states=True, output_attentions=True)
    assert [tuple(each.shape) for each in outputs.hidden_states] == [(2, 7, 12)] * 3
    assert torch.equal(outputs.hidden_states[-1], outputs.last_hidden_state)
    assert [tuple(each.shape) for each in outputs.attentions] == [(2, 3, 7, 7)] * 2
    assert not outputs.attentions[0][1, :, :, 5:].any()
    model.set_attn_implementation(attn_implementation)
    torch.testing.assert_close(model(**TEXT).pooler_output, outputs.pooler_output)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing_keeps_gradients():
    model = tiny_bert("pre-training").train()
    inputs = LABELLED["pre-training"][3]
    torch.manual_seed(1)
    model(**inputs).loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    torch.manual_seed(1)
    model(**inputs).loss.backward()
    torch.testing.assert_close(gradients(model), wanted)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@pytest.mark.parametrize("task", LABELLED)
def test_model_compiles_without_graph_breaks(task):
    torch.compiler.reset()
    model = tiny_bert(task, **NO_DROPOUT, num_hidden_layers=1).train()
    inputs = LABELLED[task][3]
    expected = model(**inputs).loss
    compiled = torch.compile(model, fullgraph=True, backend="eager")(**inputs).loss
    torch.testing.assert_close(compiled, expected)
    compiled.backward()
    wanted = gradients(model) if task != "pre-training" else None
    assert wanted is None or all(torch.isfinite(gradient).all() for gradient in wanted.values())
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_close_to_single_precision(dtype):
    model = tiny_bert("classes")
    expected = model(**TEXT).logits
    halved = model.to(dtype)(**TEXT).logits
    assert halved.dtype == dtype
    torch.testing.assert_close(halved.float(), expected, rtol=0.05, atol=0.05)


def test_resizing_embeddings_resizes_the_bias(tmp_path):
    model = tiny_bert("masked-lm")
    before = model(**TEXT).logits
    model.resize_token_embeddings(VOCAB + 4, mean_resizing=False)
    after = model(**TEXT).logits
    assert after.shape == (2, 7, VOCAB + 4)
    torch.testing.assert_close(after[..., :VOCAB], before)
    head = model.cls["predictions"]
    assert head.decoder.weight is model.get_input_embeddings().weight
    assert head.decoder.bias is head.bias
    assert head.bias.shape == (VOCAB + 4,)
    model.save_pretrained(tmp_path)
    again = VanillaBertForMaskedLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again.eval()(**TEXT).logits, after)


@PEFT_WARNS
def test_lora_trains_only_adapters_and_merges(tmp_path):
    base = tiny_bert("classes")
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(target_modules=["qkv_proj", "out_proj"], r=2, init_lora_weights=False))
    model.train()
    model(**LABELLED["classes"][3]).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    expected = model.eval()(**TEXT).logits
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_bert("classes"), tmp_path).eval()
    torch.testing.assert_close(again(**TEXT).logits, expected)
    torch.testing.assert_close(again.merge_and_unload()(**TEXT).logits, expected)


@PEFT_WARNS
def test_masked_lm_head_with_an_adapter_trains_on_labelled_tokens():
    model = tiny_bert("masked-lm", **NO_DROPOUT, tie_word_embeddings=False).train()
    expected = model(**LABELLED["masked-lm"][3]).loss
    adapted = get_peft_model(model, LoraConfig(target_modules=["decoder"], r=2))
    torch.testing.assert_close(adapted(**LABELLED["masked-lm"][3]).loss, expected)


def test_missing_and_extra_heads_are_reported(tmp_path):
    native_bert("masked-lm").save_pretrained(tmp_path)
    _, info = VanillaBertForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
        "classifier.weight",
        "classifier.bias",
    }
    assert {name.split(".")[0] for name in info["unexpected_keys"]} == {"cls"}


def test_encoder_without_a_pooler_loads_a_checkpoint_with_one(tmp_path):
    tiny_bert("model").save_pretrained(tmp_path)
    model, info = VanillaBertForQuestionAnswering.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"qa_outputs.weight", "qa_outputs.bias"}
    assert model.bert.pooler is None


def test_mismatched_vocabulary_size_is_refused(tmp_path):
    tiny_bert("model").save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        VanillaBertModel.from_pretrained(tmp_path, vocab_size=VOCAB + 1)


def test_fill_mask_pipeline_accepts_the_model(caplog):
    from hf_vanilla.data.tokenization import train_wordpiece_tokenizer

    tokenizer = train_wordpiece_tokenizer(["the dog runs", "the cat runs"] * 9, 60, show_progress=False)
    model = tiny_bert("masked-lm", vocab_size=len(tokenizer))
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
    found = fill("the [MASK] runs", top_k=3)
    encoded = tokenizer("the [MASK] runs", return_tensors="pt", split_special_tokens=False)
    expected = model(**encoded).logits[0, 2].softmax(-1).topk(3)
    assert [each["token"] for each in found] == expected.indices.tolist()
    assert not [record for record in caplog.records if "not supported" in record.message]


@pytest.mark.parametrize(
    ("task", "inputs", "message"),
    [
        ("model", {"input_ids": None}, r"either `input_ids` or `inputs_embeds`"),
        ("model", {"input_ids": IDS + 9}, r"`input_ids` must be in \[0, 13\); got 14.*tokenizer and model"),
        (
            "model",
            {"input_ids": None, "inputs_embeds": torch.ones(7, 12)},
            r"`inputs_embeds` .*, d_model = 12\), got \(7, 12\)",
        ),
        ("model", {"position_ids": torch.arange(3)[None]}, r"`position_ids` .*\(1, 7\), got \(1, 3\)"),
        ("model", {"token_type_ids": SEGMENTS + 1}, r"`token_type_ids` must be in \[0, 2\).*`type_vocab_size`"),
        ("model", {"token_type_ids": SEGMENTS[:, :5]}, r"`token_type_ids` must have shape .*\(2, 7\), got \(2, 5\)"),
        ("model", {"attention_mask": MASK[:, :5]}, r"`attention_mask` must have shape .*\(2, 7\), got \(2, 5\)"),
        ("model", {"position_ids": torch.arange(5, 12)[None]}, r"`position_ids` must be in \[0, 11\).*`max_position"),
        ("masked-lm", {"labels": MASKED_LABELS + 99}, r"`labels` must be in \[0, 13\), or -100 .*; got .*tokenizer"),
        ("masked-lm", {"labels": MASKED_LABELS[:, :5]}, r"`labels` must have shape \(2, 7\), got \(2, 5\)"),
        ("classes", {"labels": torch.tensor([5, 1])}, r"`labels` must be in \[0, 5\).*got 5.*`num_labels`"),
        ("classes", {"labels": torch.tensor([1])}, r"`labels` must have shape \(2,\), got \(1,\)"),
        ("multi-label", {"labels": torch.ones(2, 4)}, r"`labels` must have shape \(2, 3\) for multi_label.*\(2, 4\)"),
        ("tokens", {"labels": torch.full((2, 7), -1)}, r"`labels` must be in \[0, 5\).*got -1"),
        ("next-sentence", {"labels": torch.tensor([0, 2])}, r"`labels` must be in \[0, 2\).*got 2"),
        ("pre-training", {"next_sentence_label": torch.tensor([0])}, r"`next_sentence_label` must have shape \(2,\)"),
        ("answers", {"start_positions": torch.tensor([1])}, r"`start_positions` must have shape \(2,\), got \(1,\)"),
        ("choices", {"input_ids": IDS}, r"`input_ids` must have shape \(batch, choices, length\).*got \(2, 7\)"),
        ("choices", {"labels": torch.tensor([3, 0])}, r"`labels` must be in \[0, 3\).*got 3"),
    ],
    ids=str,
)
def test_bad_input_is_named_in_the_error(task, inputs, message):
    with pytest.raises(ValueError, match=message):
        tiny_bert(task)(**{**TASKS[task][3], **inputs})


@pytest.mark.parametrize("task", ["classes", "tokens", "masked-lm", "next-sentence", "answers", "choices"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16], ids=str)
def test_labels_may_have_any_integer_dtype(task, dtype):
    model, inputs = tiny_bert(task), TASKS[task][3]
    names = [name for name in inputs if "labels" in name or "positions" in name]
    small = {name: inputs[name].to(dtype) for name in names}
    for each in (model.eval(), model.train()):
        torch.manual_seed(1)
        expected = each(**inputs).loss
        torch.manual_seed(1)
        assert torch.equal(each(**{**inputs, **small}).loss, expected)


def test_float_labels_are_refused():
    with pytest.raises(TypeError, match="`labels` must be integers"):
        tiny_bert("tokens")(**TEXT, labels=torch.zeros(2, 7))


def test_answers_labelled_minus_100_are_ignored():
    model, positions = tiny_bert("answers"), torch.tensor([3, -100])
    alone = {name: tensor[:1] for name, tensor in TEXT.items()}
    expected = model(**alone, start_positions=positions[:1], end_positions=positions[:1]).loss
    torch.testing.assert_close(model(**TEXT, start_positions=positions, end_positions=positions).loss, expected)


@pytest.mark.promise("too long")
def test_too_long_input_is_refused():
    with pytest.raises(ValueError, match=r"12 tokens exceeds `max_position_embeddings` \(11\); truncate"):
        tiny_bert("model")(torch.ones(2, 12, dtype=torch.long))


@pytest.mark.skipif(Version(accelerate.__version__) < Version("1.15"), reason="accelerate mixes up weights on disk")
@pytest.mark.parametrize(
    "device_map",
    [
        {"": "disk"},
        {"bert.embeddings": "cpu", "bert.layers": "disk", "cls": "cpu"},
        {"bert.embeddings": "disk", "bert.layers": "cpu", "cls": "disk"},
    ],
    ids=["everything", "layers", "ends"],
)
def test_offloaded_weights_are_read_from_disk(tmp_path, device_map):
    model = tiny_bert("masked-lm")
    model.save_pretrained(tmp_path)
    offloaded = type(model).from_pretrained(tmp_path, device_map=device_map, offload_folder=tmp_path / "disk")
    inputs = TASKS["masked-lm"][3]
    torch.testing.assert_close(offloaded(**inputs).logits, model(**inputs).logits)
