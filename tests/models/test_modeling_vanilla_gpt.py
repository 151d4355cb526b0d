"""GPT: padding, caches, generation, flattened batches, the auxiliary loss, and what bad input gets."""

import copy
import re

import pytest
import torch
from tiny_gpts import CHOICES, IDS, LABELS, LEFT, LENGTH, MASK, NO_DROPOUT, TASKS, TEXT, VOCAB, tiny_gpt
from tiny_models import assert_same, gradients
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    StaticCache,
    TextStreamer,
    Trainer,
    TrainingArguments,
    pipeline,
)

from hf_vanilla import VanillaGptConfig, VanillaGptForCausalLM


NORMS = ["post", "pre"]
KERNELS = ["eager", "sdpa"]
PROMPTS = [[5, 6, 7, 8], [10, 3], [4]]
GREEDY = dict(do_sample=False, max_new_tokens=6, eos_token_id=None)


def left_padded(rows):
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def losses_and_gradients(model, *batches):
    """Sum the losses of batches, and collect the gradients."""
    model.zero_grad()
    losses = [model(**batch).loss for batch in batches]
    for loss in losses:
        loss.backward()
    return {"loss": sum(losses).detach(), **gradients(model)}


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt1", 116_534_784), ("mini", 4 * 789_760 + 256 * (40478 + 512))], ids=str
)
def test_sizes_have_the_parameters_of_the_paper(name, parameters):
    with torch.device("meta"):
        model = VanillaGptForCausalLM(VanillaGptConfig.preset(name))
    assert model.num_parameters() == parameters


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("norm", NORMS)
def test_padding_on_either_side_changes_nothing(norm, kernel, no_shortcuts, fed_positions):
    model = tiny_gpt(norm_position=norm, attn_implementation=kernel).transformer
    tokens = torch.cat([model(row[kept][None]).last_hidden_state[0] for row, kept in zip(IDS, MASK != 0, strict=True)])
    del fed_positions[:]
    for batch in (TEXT, LEFT):
        packed = model(**batch, use_cache=False).last_hidden_state
        cached = model(**batch, use_cache=True).last_hidden_state  # computes padding, too
        for hidden_states in (packed, cached):
            assert torch.equal((hidden_states != 0).all(-1), batch["attention_mask"] != 0)
            torch.testing.assert_close(hidden_states[batch["attention_mask"] != 0], tokens, rtol=1e-4, atol=1e-5)
    assert fed_positions == [12, 12, 14, 14] * 2


@pytest.mark.parametrize("task", TASKS)
def test_shortcuts_keep_loss_and_gradients(task, no_shortcuts):
    model = tiny_gpt(task, **NO_DROPOUT).train()
    batch = TASKS[task][2]
    fast = losses_and_gradients(model, batch)
    no_shortcuts()
    assert_same(losses_and_gradients(model, batch), fast, rtol=1e-4, atol=1e-6)


def test_loss_of_training_is_that_of_the_logits():
    model = tiny_gpt(**NO_DROPOUT)
    for batch in (TEXT, LEFT):
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        outputs = model.eval()(**batch, labels=labels)
        logits, predicted = (
            outputs.logits[:, :-1],
            batch["attention_mask"][:, :-1] * batch["attention_mask"][:, 1:] != 0,
        )
        expected = nn.functional.cross_entropy(logits[predicted], labels[:, 1:][predicted])
        torch.testing.assert_close(outputs.loss, expected)
        outputs = model.train()(**batch, labels=labels)
        torch.testing.assert_close(outputs.loss, expected)
        assert outputs.logits is None


def test_shifted_labels_are_those_of_the_next_tokens():
    model = tiny_gpt(**NO_DROPOUT).train()
    shifted = torch.cat((LABELS[:, 1:], torch.full((2, 1), -100)), dim=1)
    expected = losses_and_gradients(model, {**TEXT, "labels": LABELS})
    assert_same(losses_and_gradients(model, {**TEXT, "shift_labels": shifted}), expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kwargs", [True, False], ids=["cu_seq_lens", "positions"])
def test_flattened_batch_equals_its_rows(kernel, kwargs, no_shortcuts):
    model = tiny_gpt(attn_implementation=kernel, **NO_DROPOUT)
    rows = [[5, 6, 7, 8, 9], [10, 3], [4], [3, 3, 12, 11, 5, 4, 7]]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=kwargs)
    batch = collate([{"input_ids": row} for row in rows])
    expected = torch.cat([model(torch.tensor([row])).logits[0] for row in rows])
    padded = left_padded(rows)
    padded["labels"] = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
    wanted = losses_and_gradients(model.train(), padded)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    for _ in range(2):  # packed, then with the kernel's own mask
        model.eval()
        torch.testing.assert_close(model(**inputs).logits[0], expected, rtol=1e-4, atol=1e-5)  # with a new cache
        torch.testing.assert_close(model(**inputs, use_cache=False).logits[0], expected, rtol=1e-4, atol=1e-5)
        assert_same(losses_and_gradients(model.train(), batch), wanted, rtol=1e-4, atol=1e-6)
        model.transformer.layers[0].register_forward_hook(lambda *_: None)


def test_flattened_sequences_are_sorted_by_length():
    config = dict(max_position_embeddings=200, **NO_DROPOUT)
    model = tiny_gpt(**config)
    rows = [torch.randint(3, VOCAB, (length,)).tolist() for length in (150, 9, 200, 70, 3)]
    batch = DataCollatorWithFlattening()([{"input_ids": row} for row in rows])
    expected = torch.cat([model(torch.tensor([row])).logits[0] for row in rows])
    actual = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)  # several hundred keys


@pytest.mark.parametrize("task", TASKS)
def test_accumulated_batches_give_the_gradient_of_one(task):
    model = tiny_gpt(task, **NO_DROPOUT).train()
    batch = TASKS[task][2]
    items = torch.tensor(10 if task == "text" else batch["labels"].numel())  # the first tokens are not predicted
    parts = [
        {**{name: tensor[row : row + 1] for name, tensor in batch.items()}, "num_items_in_batch": items}
        for row in range(2)
    ]
    assert_same(losses_and_gradients(model, *parts), losses_and_gradients(model, batch), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("task", ["classes", "choices", "multi-label"])
def test_classifiers_are_trained_on_the_language_model_too(task):
    batch, weight = TASKS[task][2], 0.3
    model = tiny_gpt(task, lm_loss_weight=weight, **NO_DROPOUT)
    expected = model(**batch).loss
    of_texts = []
    ids, mask = (batch[name].flatten(0, -2) for name in ("input_ids", "attention_mask"))
    for text, kept in zip(ids, mask != 0, strict=True):
        hidden_states = model.transformer(text[kept][None]).last_hidden_state[0]
        of_texts.append(nn.functional.cross_entropy(model.lm_head(hidden_states[:-1]), text[kept][1:]))
    torch.testing.assert_close(model.train()(**batch).loss, expected + weight * torch.stack(of_texts).mean())
    model.config.lm_loss_weight = 0
    torch.testing.assert_close(model(**batch).loss, expected)


def test_text_without_a_label_is_not_trained_on():
    model = tiny_gpt("classes", **NO_DROPOUT).train()
    both = losses_and_gradients(model, {**TEXT, "labels": torch.tensor([3, -100])})
    first = losses_and_gradients(model, {"input_ids": IDS[:1], "labels": torch.tensor([3])})
    assert_same(both, first, rtol=1e-4, atol=1e-6)


def test_classifier_reads_the_last_token_alone(fed_positions):
    model = tiny_gpt("choices")
    expected = model(**CHOICES).logits
    assert fed_positions == [6 * 6, 6]
    changed = copy.deepcopy(CHOICES)
    changed["input_ids"][:, :, -1] = torch.where(changed["attention_mask"][:, :, -1] == 0, 12, 3)  # padding
    torch.testing.assert_close(model(**changed).logits, expected)
    embedded = model.transformer.embed_tokens(CHOICES["input_ids"])
    outputs = model(inputs_embeds=embedded, attention_mask=CHOICES["attention_mask"])
    torch.testing.assert_close(outputs.logits, expected)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_left_padded_prompts_are_continued_as_single_ones(norm, options):
    model = tiny_gpt(norm_position=norm)
    together = model.generate(**left_padded(PROMPTS), **GREEDY, **options)
    for prompt, sequence in zip(PROMPTS, together, strict=True):
        alone = model.generate(torch.tensor([prompt]), **GREEDY, **options)[0]
        assert torch.equal(sequence[-6:], alone[-6:])


STATIC = {"cache_implementation": "static", "disable_compile": True}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("prompts", "options"),
    [(left_padded(PROMPTS), {"use_cache": False}), (left_padded(PROMPTS), STATIC), (TEXT, STATIC)],
    ids=["no cache", "static cache", "static cache, right padding"],
)
def test_all_caches_give_the_same_tokens(norm, prompts, options):
    model = tiny_gpt(norm_position=norm)
    expected = model.generate(**prompts, **GREEDY)
    assert torch.equal(model.generate(**prompts, **GREEDY, **options), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_cached_logits_equal_those_of_the_whole_text(static, name):
    model = tiny_gpt()
    cache = StaticCache(config=model.config, max_cache_len=9) if static else None
    expected = model(**LEFT).logits
    outputs = model(LEFT["input_ids"][:, :4], LEFT["attention_mask"][:, :4], **{name: cache})
    cache, parts = outputs.past_key_values, [outputs.logits]
    for column in range(4, LENGTH):
        new = LEFT["input_ids"][:, column : column + 1]
        parts.append(model(new, LEFT["attention_mask"][:, : column + 1], **{name: cache}).logits)
    kept = LEFT["attention_mask"] != 0
    torch.testing.assert_close(torch.cat(parts, dim=1)[kept], expected[kept], rtol=1e-4, atol=1e-5)


def test_assisted_decoding_gives_the_same_tokens():
    model, assistant = tiny_gpt(), tiny_gpt(seed=1, num_hidden_layers=1)
    prompt = torch.tensor([PROMPTS[0]])
    expected = model.generate(prompt, **GREEDY)
    assert torch.equal(model.generate(prompt, assistant_model=assistant, **GREEDY), expected)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=2, **GREEDY), expected)


def test_sampling_depends_on_the_seed_alone():
    model = tiny_gpt()
    options = dict(do_sample=True, top_k=0, num_return_sequences=20, max_new_tokens=4)
    torch.manual_seed(3)
    first = model.generate(torch.tensor([[5]]), **options)
    assert len({tuple(row) for row in first.tolist()}) > 10
    torch.manual_seed(3)
    assert torch.equal(model.generate(torch.tensor([[5]]), **options), first)


class Recorder(TextStreamer):
    def __init__(self):
        self.ids, self.ended = [], False

    def put(self, value):
        self.ids += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_tokens_are_streamed():
    model, streamer = tiny_gpt(), Recorder()
    expected = model.generate(torch.tensor([PROMPTS[0]]), **GREEDY)[0].tolist()
    model.generate(torch.tensor([PROMPTS[0]]), streamer=streamer, **GREEDY)
    assert streamer.ended
    assert streamer.ids == expected


@pytest.mark.parametrize("kept", [1, 3, torch.tensor([0, 4])], ids=str)
def test_logits_are_computed_where_they_are_kept(kept):
    model = tiny_gpt()
    expected = model(**TEXT).logits
    expected = expected[:, -kept:] if isinstance(kept, int) else expected[:, kept]
    torch.testing.assert_close(model(**TEXT, logits_to_keep=kept).logits, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_stock_trainer_learns_to_continue_a_text(tmp_path, smoothing):
    backend = Tokenizer(models.WordLevel({str(number): number for number in range(VOCAB)}, "1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="0")
    rows = [
        {"input_ids": [3 + (start + step) % 9 for step in range(length)]} for start in range(9) for length in (5, 8)
    ]
    model = tiny_gpt(hidden_dropout_prob=0.0)
    options = dict(max_steps=60, learning_rate=0.01, per_device_train_batch_size=6, gradient_accumulation_steps=2)
    options["label_smoothing_factor"] = smoothing
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", **options
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(model, args, train_dataset=rows, data_collator=collator).train()
    generator = pipeline("text-generation", model=model.eval(), tokenizer=tokenizer)
    assert generator("5 6", **GREEDY)[0]["generated_text"].replace(" ", "") == "5678910113"


BAD = {
    "ids": ({"input_ids": IDS + 6}, r"`input_ids` must be in \[0, 13\); got 13 at row 0, position 3"),
    "nothing": ({"input_ids": None}, "Pass either `input_ids` or `inputs_embeds`"),
    "mask": ({"attention_mask": MASK[:, 1:]}, r"`attention_mask` must have shape .* = \(2, 7\), got \(2, 6\)"),
    "labels": ({"labels": LABELS[:, 1:]}, r"`labels` must have shape \(2, 7\), got \(2, 6\)"),
    "label": ({"labels": LABELS + 9}, r"`labels` must be in \[0, 13\), or -100 .*; got 14 at row 0"),
    "length": ({"input_ids": IDS.repeat(1, 3)}, "21 tokens exceeds `max_position_embeddings` .17."),
    "positions": ({"position_ids": torch.arange(12, 19)[None]}, r"`position_ids` must be in \[0, 17\); got 17 at"),
    "widths": ({"input_ids": None, "inputs_embeds": torch.ones(2, 7, 5)}, r"`inputs_embeds` must have shape .* = 12"),
    "read": ({"read_positions": MASK[:, 1:]}, r"`read_positions` must have shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    changed, message = BAD[name]
    inputs = {"input_ids": IDS, **changed}
    model = tiny_gpt().transformer if name == "read" else tiny_gpt()
    with pytest.raises(ValueError, match=message):
        model(**inputs)


def test_past_and_new_tokens_must_have_positions():
    model = tiny_gpt()
    cache = model(IDS.repeat(1, 2)).past_key_values
    with pytest.raises(ValueError, match=re.escape("21 tokens exceeds `max_position_embeddings` (17)")):
        model(IDS, past_key_values=cache)


@pytest.mark.promise("generation past the positions")
def test_generation_ends_where_positions_end():
    model = tiny_gpt()
    assert model.generate(IDS[:1], do_sample=False, eos_token_id=None, max_length=18).shape == (1, 18)
    message = "`max_length` (19, the prompt and `max_new_tokens`) must not exceed 18"
    with pytest.raises(ValueError, match=re.escape(message)):
        model.generate(IDS[:1], max_new_tokens=12)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"input_ids": IDS + VOCAB}, ValueError, r"`input_ids` must be in \[0, 13\)"),
        ({"input_ids": [2, 5]}, TypeError, "`input_ids` must be a tensor"),
        ({"input_ids": IDS, "attention_mask": 1}, TypeError, "`attention_mask` must be a tensor"),
        ({"input_ids": IDS, "attention_mask": torch.tensor(1)}, ValueError, "`attention_mask` must have shape"),
        ({"inputs_embeds": torch.zeros(2, 7, 5)}, ValueError, "`inputs_embeds` must have shape .* = 12"),
        ({"input_ids": IDS, "forced_eos_token_id": 13}, ValueError, "`forced_eos_token_id` must be in"),
    ],
)
def test_bad_prompts_are_refused_by_generate(inputs, error, message):
    with pytest.raises(error, match=message):
        tiny_gpt().generate(**inputs, max_new_tokens=2)
    with pytest.raises(TypeError, match="` must be a `Cache`, got tuple"):
        tiny_gpt()(IDS, past_key_values=())


@pytest.mark.parametrize(
    ("task", "inputs", "message"),
    [
        (
            "classes",
            {"input_ids": CHOICES["input_ids"]},
            r"`input_ids` must have shape \(batch, length\).*got \(2, 3, 7\)",
        ),
        ("choices", {"input_ids": IDS}, r"`input_ids` must have shape \(batch, choices, length\).*got \(2, 7\)"),
        ("choices", {}, r"`input_ids` must have shape .* got None"),
        ("classes", {"input_ids": IDS[:, :0]}, "length at least 1"),
        ("classes", {"input_ids": IDS, "labels": torch.tensor([5, 0])}, r"`labels` must be in \[0, 5\)"),
        ("choices", {**CHOICES, "labels": torch.tensor([3, 0])}, r"`labels` must be in \[0, 3\)"),
        ("choices", {**CHOICES, "mc_labels": torch.tensor([0, 1])}, "`mc_labels` must not be given: .* pass `labels`"),
        ("classes", {"input_ids": IDS, "attention_mask": MASK[:1]}, "`attention_mask` must have shape"),
        ("text", {"input_ids": IDS, "labels": IDS, "attention_mask": MASK[:1]}, "`attention_mask` must have shape"),
        ("text", {"input_ids": IDS, "labels": IDS, "attention_mask": MASK[:, :5]}, "`attention_mask` must have shape"),
    ],
    ids=range(10),
)
def test_bad_input_of_heads_is_refused(task, inputs, message):
    with pytest.raises(ValueError, match=message):
        tiny_gpt(task)(**inputs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_position": "middle"}, "`norm_position` must be one of post, pre; got 'middle'"),
        ({"eos_token_id": [2, 13]}, r"`eos_token_id` must be in \[0, `vocab_size` = 13\), got 13"),
        ({"lm_loss_weight": -0.1}, "`lm_loss_weight` must be finite and not negative, got -0.1"),
    ],
)
def test_bad_configs_are_refused(fields, message):
    with pytest.raises(Exception, match=message):
        tiny_gpt(**fields)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match=r"`hidden_size` \(12\) must be divisible by `num_attention_heads` \(5\)"):
        tiny_gpt(num_attention_heads=5)
