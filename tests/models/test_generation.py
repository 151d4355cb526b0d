"""transformers' `generate()` with our model: every way of decoding equals a simpler one."""

import itertools

import pytest
import torch
from reference import exhaustive_search
from tiny_models import BOS, EOS, PAD, SOURCE, SOURCE_MASK, VOCAB, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from hf_vanilla import VanillaTransformerForConditionalGeneration
from hf_vanilla.models.cache_names import CACHE_NAME
from hf_vanilla.models.modeling_vanilla_transformer import Seq2SeqGenerationMixin


INPUTS = {"inputs": SOURCE, "attention_mask": SOURCE_MASK}
MODES = {
    "greedy": dict(),
    "beams": dict(num_beams=3, num_return_sequences=3),
    "beams with a prompt": dict(num_beams=3, decoder_input_ids=torch.tensor([[BOS, 4, 5], [BOS, 6, 7]])),
}
# A model with random weights repeats one token; this makes it generate different ones.
VARIED = dict(max_new_tokens=9, no_repeat_ngram_size=1, return_dict_in_generate=True, output_scores=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


class StockModel(VanillaTransformerForConditionalGeneration):
    """Our model with transformers' own handling of beams: all inputs and caches are repeated and reordered."""

    def _expand_inputs_for_generation(self, *args, **kwargs):
        return super(Seq2SeqGenerationMixin, self)._expand_inputs_for_generation(*args, **kwargs)

    def _reorder_cache(self, past_key_values, beam_idx):
        past_key_values.reorder_cache(beam_idx)
        return past_key_values


def assert_same_results(actual, expected):
    assert torch.equal(actual.sequences, expected.sequences)
    assert len(actual.scores) == len(expected.scores)
    for one, other in zip(actual.scores, expected.scores, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if "sequences_scores" in expected:
        torch.testing.assert_close(actual.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-5)
        assert torch.equal(actual.beam_indices, expected.beam_indices)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_cached_decoding_equals_uncached_decoding(mode, kernel):
    model = tiny_model(attn_implementation=kernel)
    cached = model.generate(**INPUTS, **mode, **VARIED)
    uncached = model.generate(**INPUTS, **mode, **VARIED, use_cache=False)
    assert_same_results(cached, uncached)
    assert len(cached.sequences.unique()) > 4


@pytest.mark.parametrize("depths", [(2, 3), (1, 3), (3, 1)], ids=str)
def test_static_cache_equals_dynamic_cache(mode, depths):
    model = tiny_model(encoder_layers=depths[0], decoder_layers=depths[1])
    static = model.generate(**INPUTS, **mode, **VARIED, cache_implementation="static")
    assert isinstance(static.past_key_values.self_attention_cache, StaticCache)
    assert len(static.past_key_values.self_attention_cache.layers) == depths[1]
    assert_same_results(static, model.generate(**INPUTS, **mode, **VARIED))


@pytest.mark.parametrize("depths", [(2, 3), (1, 3), (3, 1)], ids=str)
def test_given_cache_is_filled(mode, depths):
    model = tiny_model(encoder_layers=depths[0], decoder_layers=depths[1])
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    actual = model.generate(**INPUTS, **mode, **VARIED, **{CACHE_NAME: cache})
    assert actual.past_key_values is cache
    assert len(cache.self_attention_cache.layers) == len(cache.cross_attention_cache.layers) == depths[1]
    assert cache.get_seq_length() >= actual.sequences.shape[1] - 1  # all but the last token; other beams may be longer
    assert_same_results(actual, model.generate(**INPUTS, **mode, **VARIED))


def test_padding_on_the_left_equals_padding_on_the_right(model, mode):
    left = torch.tensor([[3, 4, 5, 6, 2], [0, 0, 7, 8, 2]])
    actual = model.generate(left, attention_mask=(left != PAD).long(), **mode, **VARIED)
    assert_same_results(actual, model.generate(**INPUTS, **mode, **VARIED))


def test_sentence_of_a_batch_equals_the_sentence_alone(model):
    together = model.generate(**INPUTS, num_beams=3, **VARIED).sequences
    for row, length in enumerate([5, 3]):
        alone = model.generate(SOURCE[[row], :length], num_beams=3, **VARIED).sequences[0]
        ours = together[row, : len(alone)]
        assert torch.equal(ours, alone)
        assert (together[row, len(alone) :] == EOS).all()  # transformers pads with the end token if padding is 0


@pytest.mark.promise("row of padding")
@pytest.mark.parametrize("num_beams", [1, 3])
def test_row_of_padding_does_not_change_the_others(model, num_beams):
    source = torch.cat((SOURCE, torch.zeros(1, 5, dtype=torch.long)))
    with_padding = model.generate(source, attention_mask=(source != PAD).long(), num_beams=num_beams, **VARIED)
    neighbour = torch.cat((SOURCE, SOURCE[:1]))
    without = model.generate(neighbour, attention_mask=(neighbour != PAD).long(), num_beams=num_beams, **VARIED)
    for one, other in zip(with_padding.scores, without.scores, strict=False):
        assert torch.equal(one[: 2 * num_beams], other[: 2 * num_beams])
        assert not one.isnan().any()
    shortest = min(with_padding.sequences.shape[1], without.sequences.shape[1])
    assert torch.equal(with_padding.sequences[:2, :shortest], without.sequences[:2, :shortest])


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
def test_beams_that_share_a_source_equal_beams_with_repeated_sources(kernel, use_cache):
    model = tiny_model(attn_implementation=kernel)
    stock = StockModel._from_config(model.config, attn_implementation=kernel).eval()
    stock.load_state_dict(model.state_dict())
    options = dict(num_beams=4, num_return_sequences=4, use_cache=use_cache, **VARIED)
    actual, expected = model.generate(**INPUTS, **options), stock.generate(**INPUTS, **options)
    assert_same_results(actual, expected)
    changed_places = [len(set(row) - {-1}) > 1 for row in actual.beam_indices.tolist()]
    assert all(changed_places)
    if use_cache:
        for ours, theirs in zip(
            actual.past_key_values.cross_attention_cache.layers,
            expected.past_key_values.cross_attention_cache.layers,
            strict=True,
        ):
            assert theirs.keys.shape == (8, 4, 5, 3)
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
        assert actual.past_key_values.self_attention_cache.layers[0].keys.shape[0] == 8


def test_reordering_changes_the_self_attention_cache_only(model):
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    encoder_outputs = model.get_encoder()(SOURCE, attention_mask=SOURCE_MASK)
    target = torch.tensor([[1], [3], [4], [5]])
    model(encoder_outputs=encoder_outputs, decoder_input_ids=target, past_key_values=cache)
    before = [layer.keys.clone() for layer in cache.self_attention_cache.layers]
    sources = [layer.keys for layer in cache.cross_attention_cache.layers]
    assert model._reorder_cache(cache, torch.tensor([1, 1, 3, 2])) is cache
    for layer, keys in zip(cache.self_attention_cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys[[1, 1, 3, 2]])
    for layer, keys in zip(cache.cross_attention_cache.layers, sources, strict=True):
        assert layer.keys is keys


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_beam_search_with_enough_beams_is_exhaustive_search(length_penalty, early_stopping):
    model = tiny_model(vocab_size=5, encoder_layers=1, decoder_layers=1, tie_word_embeddings=False, seed=4)
    source = torch.tensor([[3, 4, 2]])

    @torch.no_grad()
    def next_log_probs(sequence):
        logits = model(source, decoder_input_ids=torch.tensor([sequence])).logits[0, -1].double()
        log_probs = logits.log_softmax(-1)
        log_probs[PAD] = -torch.inf
        return log_probs.tolist()

    expected = exhaustive_search(next_log_probs, BOS, EOS, max_new_tokens=3, length_penalty=length_penalty)[:12]
    actual = model.generate(
        source,
        num_beams=30,
        num_return_sequences=12,
        max_new_tokens=3,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = [row[: row.index(EOS) + 1] if EOS in row else row for row in actual.sequences.tolist()]
    assert sequences == [sequence for _, sequence in expected]
    assert actual.sequences_scores.tolist() == pytest.approx([score for score, _ in expected], abs=1e-4)


def test_attentions_and_hidden_states_of_beams_have_the_shapes_of_transformers():
    model = tiny_model(attn_implementation="eager")
    outputs = model.generate(
        **INPUTS, num_beams=3, **{**VARIED, "max_new_tokens": 4}, output_attentions=True, output_hidden_states=True
    )
    steps, rows = 4, 2 * 3
    assert [weights.shape for weights in outputs.encoder_attentions] == [(2, 4, 5, 5)] * 2
    assert [states.shape for states in outputs.encoder_hidden_states] == [(2, 5, 16)] * 3
    assert (
        len(outputs.decoder_attentions) == len(outputs.cross_attentions) == len(outputs.decoder_hidden_states) == steps
    )
    for step in range(steps):
        assert [weights.shape for weights in outputs.decoder_attentions[step]] == [(rows, 4, 1, step + 1)] * 3
        assert [weights.shape for weights in outputs.cross_attentions[step]] == [(rows, 4, 1, 5)] * 3
        assert [states.shape for states in outputs.decoder_hidden_states[step]] == [(rows, 1, 16)] * 4
        for weights in (*outputs.decoder_attentions[step], *outputs.cross_attentions[step]):
            torch.testing.assert_close(weights.sum(-1), torch.ones(rows, 4, 1))
        assert (outputs.cross_attentions[step][0][3:, ..., 3:] == 0).all()  # padding of the second sentence


def test_cross_attention_of_a_beam_is_that_of_its_tokens():
    model = tiny_model(attn_implementation="eager")
    outputs = model.generate(**INPUTS, num_beams=3, **{**VARIED, "max_new_tokens": 4}, output_attentions=True)
    with torch.no_grad():
        forced = model(
            SOURCE, attention_mask=SOURCE_MASK, decoder_input_ids=outputs.sequences[:, :-1], output_attentions=True
        ).cross_attentions
    for sentence, step, layer in itertools.product(range(2), range(4), range(3)):
        beam = outputs.beam_indices[sentence, step]
        if beam >= 0:
            torch.testing.assert_close(
                outputs.cross_attentions[step][layer][beam, :, 0],
                forced[layer][sentence, :, step],
                rtol=1e-4,
                atol=1e-5,
            )


def test_more_beams_than_tokens_are_accepted(model):
    sequences = model.generate(**INPUTS, num_beams=20, max_new_tokens=4)
    assert sequences.shape[0] == 2
    assert sequences.max() < VOCAB


@torch.no_grad()
def test_greedy_search_takes_the_most_probable_token_at_each_step(model):
    target = torch.full((2, 1), BOS)
    for _ in range(8):
        logits = model(SOURCE, attention_mask=SOURCE_MASK, decoder_input_ids=target).logits[:, -1]
        logits[:, PAD] = -torch.inf
        logits.scatter_(1, target, -torch.inf)  # no token twice
        target = torch.cat((target, logits.argmax(-1, keepdim=True)), dim=1)
    first_end = (target == EOS).int().argmax(1)
    expected = [row[: end + 1] if end else row for row, end in zip(target.tolist(), first_end.tolist(), strict=True)]
    actual = model.generate(**INPUTS, num_beams=1, no_repeat_ngram_size=1, max_new_tokens=8).tolist()
    for ours, wanted in zip(actual, expected, strict=True):
        assert ours[: len(wanted)] == wanted
        assert set(ours[len(wanted) :]) <= {PAD}


def test_sampling_depends_on_the_seed(model):
    samples = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        samples.append(model.generate(**INPUTS, do_sample=True, num_return_sequences=5, max_new_tokens=8))
    assert samples[0].shape[0] == 10
    assert torch.equal(samples[0], samples[1])
    assert not (samples[0].shape == samples[2].shape and torch.equal(samples[0], samples[2]))


@torch.no_grad()
def test_samples_are_drawn_from_the_distribution_of_the_model(model):
    logits = model(SOURCE, attention_mask=SOURCE_MASK, decoder_input_ids=torch.full((2, 1), BOS)).logits[:, 0]
    logits[:, PAD] = -torch.inf
    expected = logits.softmax(-1)
    samples = model.generate(**INPUTS, do_sample=True, top_k=0, num_return_sequences=4000, max_new_tokens=1)
    counts = torch.stack([row.bincount(minlength=VOCAB) for row in samples[:, 1].view(2, 4000)]) / 4000
    assert ((counts - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-9).all()


@pytest.fixture(scope="module")
def tokenizer():
    words = ["<pad>", "<s>", "</s>", *(f"word{number}" for number in range(3, VOCAB))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def test_streamer_prints_the_translation(model, tokenizer, capsys):
    options = dict(max_new_tokens=5, no_repeat_ngram_size=1)
    sequence = model.generate(SOURCE[:1], **options, streamer=TextStreamer(tokenizer, skip_special_tokens=True))[0]
    assert capsys.readouterr().out.split() == tokenizer.decode(sequence, skip_special_tokens=True).split()
    assert len(sequence) > 3


def test_streamer_ends_for_an_empty_source(model, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, timeout=1.0)
    model.generate(SOURCE[:1, :0], streamer=streamer)
    assert list(streamer) == [""]


@pytest.mark.filterwarnings("ignore:.*generation_config.*")
def test_assisted_decoding_equals_greedy_search(model):
    expected = model.generate(SOURCE[:1], max_new_tokens=8)
    assistant = tiny_model(encoder_layers=1, decoder_layers=1, seed=5)
    assert torch.equal(model.generate(SOURCE[:1], assistant_model=assistant, max_new_tokens=8), expected)
    assert torch.equal(model.generate(SOURCE[:1], prompt_lookup_num_tokens=2, max_new_tokens=8), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_generation_works_in_half_precision(dtype):
    source = torch.cat((SOURCE, torch.zeros(1, 5, dtype=torch.long)))
    outputs = tiny_model().to(dtype).generate(source, attention_mask=(source != PAD).long(), num_beams=2, **VARIED)
    assert not any(scores.isnan().any() for scores in outputs.scores)
    assert outputs.sequences.shape[1] > 4


def test_encoder_outputs_and_embeddings_may_replace_ids(model, mode):
    expected = model.generate(**INPUTS, **mode, **VARIED)
    encoder_outputs = model.get_encoder()(SOURCE, attention_mask=SOURCE_MASK)
    given = model.generate(encoder_outputs=encoder_outputs, attention_mask=SOURCE_MASK, **mode, **VARIED)
    assert_same_results(given, expected)
    embedded = model.get_input_embeddings()(SOURCE)
    given = model.generate(inputs_embeds=embedded, attention_mask=SOURCE_MASK, **mode, **VARIED)
    assert_same_results(given, expected)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_default_maximum_length_is_source_length_plus_50(num_beams):
    model = tiny_model(encoder_layers=1, decoder_layers=1)
    endless = dict(suppress_tokens=[PAD, EOS], num_beams=num_beams)
    assert model.generate(**INPUTS, **endless).shape == (2, 1 + 5 + 50)
    assert model.generate(SOURCE[1:, :3], **endless).shape == (1, 1 + 3 + 50)
    assert model.generate(SOURCE, generation_config=GenerationConfig(**endless, pad_token_id=PAD)).shape == (2, 56)


def test_given_maximum_length_is_used():
    model = tiny_model(encoder_layers=1, decoder_layers=1)
    endless = dict(suppress_tokens=[PAD, EOS])
    assert model.generate(**INPUTS, **endless, max_length=6).shape == (2, 6)
    assert model.generate(**INPUTS, **endless, max_new_tokens=70).shape == (2, 71)
    assert model.generate(**INPUTS, generation_config=GenerationConfig(**endless, max_new_tokens=3)).shape == (2, 4)
    model.generation_config.max_length = 5
    assert model.generate(**INPUTS, **endless).shape == (2, 5)


def test_evaluation_with_the_stock_trainer_keeps_the_default_length(tokenizer, tmp_path):
    model = tiny_model()
    model.generation_config.suppress_tokens = [PAD, EOS]  # no sequence ends early
    rows = [{"input_ids": SOURCE[0].tolist(), "attention_mask": [1] * 5, "labels": [5, 6, 2]}] * 2
    args = Seq2SeqTrainingArguments(tmp_path, predict_with_generate=True, report_to="none", use_cpu=True)
    trainer = Seq2SeqTrainer(model, args, DataCollatorForSeq2Seq(tokenizer, model), eval_dataset=rows)
    for _ in range(2):
        assert trainer.predict(rows).predictions.shape == (2, 1 + 5 + 50)
    trainer.save_model()
    again = type(model).from_pretrained(tmp_path)
    assert again.generate(**INPUTS).shape == (2, 1 + 5 + 50)


def test_padding_is_never_generated(tmp_path):
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all tokens are equally likely, and padding is the first
    model.save_pretrained(tmp_path)
    reloaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    for generating in (model, reloaded):
        assert (generating.generate(**INPUTS, max_new_tokens=4) != PAD).all()
        samples = generating.generate(**INPUTS, max_new_tokens=6, do_sample=True, num_return_sequences=50)
        before_end = (samples == EOS).cumsum(1) == 0
        assert (samples[before_end] != PAD).all()
        assert len(samples.unique()) == VOCAB


def test_learned_positions_limit_the_default_length():
    model = tiny_model(position_type="learned", max_position_embeddings=8)
    endless = dict(suppress_tokens=[PAD, EOS])
    # 8 tokens can be read, and one more written
    assert model.generate(**INPUTS, **endless).shape == (2, 9)
    assert model.generate(**INPUTS, **endless, decoder_input_ids=torch.tensor([[1, 4, 5], [1, 6, 7]])).shape == (2, 9)
    assert model.generate(**INPUTS, **endless, max_new_tokens=8, num_beams=2).shape == (2, 9)
    assert model.generate(**INPUTS, **endless, max_length=9, cache_implementation="static").shape == (2, 9)


@pytest.mark.promise("generation past the positions")
@pytest.mark.parametrize("length", [dict(max_new_tokens=9), dict(max_length=10)], ids=str)
@pytest.mark.parametrize("num_beams", [1, 2])
def test_exceeding_learned_positions_is_refused_before_decoding_starts(length, num_beams):
    model = tiny_model(position_type="learned", max_position_embeddings=8)
    calls = []
    model.model.decoder.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(
        ValueError, match=r"`max_length` \(10, .*must not exceed 9: .*`max_position_embeddings`.* is 8"
    ):
        model.generate(**INPUTS, **length, num_beams=num_beams)
    assert calls == []


@pytest.mark.promise("empty batch or sentence")
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", [{}, dict(cache_implementation="static")], ids=["dynamic", "static"])
def test_empty_batch_gives_empty_output(num_beams, kernel, cache):
    model = tiny_model(attn_implementation=kernel)
    options = dict(num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=4, **cache)
    no_rows = model.generate(SOURCE[:0], attention_mask=SOURCE_MASK[:0], **options)
    assert (no_rows.shape, no_rows.dtype) == ((0, 2), torch.long)
    no_source = model.generate(SOURCE[:, :0], attention_mask=SOURCE_MASK[:, :0], **options)
    assert no_source.tolist() == [[BOS, EOS]] * 2 * num_beams
    embedded = model.generate(inputs_embeds=torch.zeros(2, 0, 16), **options)
    assert torch.equal(embedded, no_source)
    as_dict = model.generate(input_ids=SOURCE[:, :0], **options, return_dict_in_generate=True)
    assert torch.equal(as_dict.sequences, no_source)
    assert num_beams == 1 or as_dict.sequences_scores.tolist() == [0.0] * 2 * num_beams
    prompt = torch.tensor([[BOS, 5], [BOS, 6]])
    prompted = model.generate(SOURCE[:, :0], decoder_input_ids=prompt, **options)
    assert prompted.tolist() == [[BOS, 5, EOS]] * num_beams + [[BOS, 6, EOS]] * num_beams


@pytest.mark.promise("empty batch or sentence")
@pytest.mark.parametrize(("ends", "expected"), [([5, 2], [[BOS, 5]]), (None, [[BOS]])], ids=str)
def test_empty_source_gives_start_and_first_end_token(ends, expected):
    assert tiny_model(eos_token_id=ends).generate(SOURCE[:1, :0]).tolist() == expected


@pytest.mark.promise("options of a search")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_beams=2, num_return_sequences=3), r"`num_return_sequences` \(3\).*`num_beams` \(2\)"),
        (dict(num_return_sequences=2), r"do not support `num_return_sequences` different than 1 \(got 2\)"),
        (dict(max_new_tokens=0), "`max_new_tokens` must be greater than 0, but is 0"),
        (dict(max_new_tokens=-3), "`max_new_tokens` must be greater than 0, but is -3"),
        (dict(max_length=1), "`max_length` is set to 1"),
        (dict(do_sample=True, temperature=0.0), r"`temperature` \(=0.0\) has to be a strictly positive float"),
        (dict(do_sample=True, temperature=float("nan")), "`temperature` must be finite, got nan"),
        (dict(do_sample=True, top_k=-1), "`top_k` has to be a strictly positive integer, but is -1"),
        (dict(suppress_tokens=[5, 99]), r"`suppress_tokens` must be in .* the ids of the target vocabulary; got 99"),
        (dict(suppress_tokens=[None]), "`suppress_tokens` must be token ids, which are integers, got None"),
        (dict(num_beam=3), r"not used by the model: \['num_beam'\]"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(model, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        model.generate(**INPUTS, **options)
