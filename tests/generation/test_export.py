"""The export to CTranslate2: scores, translations, both vocabularies, and what it refuses."""

import errno
import json
import multiprocessing
import os

import pytest
import torch
from text_translator import KNOWN, text_model, text_tokenizer
from transformers import AutoTokenizer

from hf_vanilla import VanillaBertConfig, VanillaBertModel, VanillaTransformerConfig
from hf_vanilla import VanillaTransformerForConditionalGeneration as Translator
from hf_vanilla.data.tokenization import train_tokenizer
from hf_vanilla.generation import export_to_ctranslate2, score, translate


ctranslate2 = pytest.importorskip("ctranslate2")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ctranslate2's own imports

SIZES = {"d_model": 12, "d_ff": 20, "num_heads": 3, "encoder_layers": 1, "decoder_layers": 2}
SOURCE, TARGET = "a b e c", "d c c b a"


@pytest.fixture(scope="module")
def tokenizers():
    return [train_tokenizer([text] * 3, size, show_progress=False) for text, size in (("a b c", 261), ("d c b", 263))]


def random_model(tokenizer, **options):
    torch.manual_seed(0)
    config = VanillaTransformerConfig(**{"vocab_size": len(tokenizer), **SIZES, **options})
    model = Translator(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases are 0 in a new model, weights of norms 1
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model


def tokens_of(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


def log_probs_of(folder, tokenizer, target_tokenizer, **options):
    source, target = tokens_of(tokenizer, SOURCE), tokens_of(target_tokenizer, TARGET)[:-1]  # it adds the </s> itself
    [found] = ctranslate2.Translator(str(folder), **options).score_batch([source], [target])
    return found.log_probs


@pytest.mark.promise("export to CTranslate2")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_position": "pre"},
        {"position_type": "sinusoidal_split", "activation_function": "gelu"},
        {"position_type": "sinusoidal_t2t", "activation_function": "gelu_new"},
        {"position_type": "learned", "max_position_embeddings": 37, "activation_function": "silu"},
        {"tie_word_embeddings": False, "layer_norm_eps": 0.1},
        {"vocab_size": 270},
    ],
    ids=["paper", "pre-norm", "split", "Tensor2Tensor", "learned", "untied", "rows without tokens"],
)
def test_scores_are_equal(tokenizers, tmp_path, options):
    tokenizer = tokenizers[0]
    model = random_model(tokenizer, **options)
    export_to_ctranslate2(model, tokenizer, tmp_path / "exported")
    source, target = (torch.tensor([tokenizer(text)["input_ids"]]) for text in (SOURCE, TARGET))
    expected = score(model, source, None, target).token_log_probs[0].tolist()
    assert log_probs_of(tmp_path / "exported", tokenizer, tokenizer) == pytest.approx(expected, abs=1e-4)


@pytest.mark.promise("export to CTranslate2")
def test_two_vocabularies_are_kept_apart(tokenizers, tmp_path):
    sizes = {"source_vocab_size": len(tokenizers[0]), "share_encoder_decoder_embeddings": False}
    model = random_model(tokenizers[1], **sizes)
    export_to_ctranslate2(model, tokenizers[0], tmp_path / "exported", target_tokenizer=tokenizers[1])
    saved = [AutoTokenizer.from_pretrained(tmp_path / "exported", subfolder=each) for each in ("", "target_tokenizer")]
    assert [each.get_vocab() for each in saved] == [each.get_vocab() for each in tokenizers]
    source, target = (
        torch.tensor([each(text)["input_ids"]]) for each, text in zip(tokenizers, (SOURCE, TARGET), strict=True)
    )
    expected = score(model, source, None, target).token_log_probs[0].tolist()
    assert log_probs_of(tmp_path / "exported", *saved) == pytest.approx(expected, abs=1e-4)


@pytest.mark.promise("export to CTranslate2")
@pytest.mark.parametrize("length_penalty", [0.0, 0.6])
def test_translations_are_those_of_our_search(tmp_path, length_penalty):
    model, tokenizer = text_model(), text_tokenizer()
    export_to_ctranslate2(model, tokenizer, tmp_path / "exported", max_length=64)
    settings = {"num_beams": 4, "length_penalty": length_penalty, "length_penalty_type": "power"}
    expected = [best for [best] in translate(model, tokenizer, KNOWN, **settings)]
    saved = AutoTokenizer.from_pretrained(tmp_path / "exported")
    found = ctranslate2.Translator(str(tmp_path / "exported")).translate_batch(
        [tokens_of(saved, text) for text in KNOWN],
        beam_size=4,
        patience=4,  # without it, the search ends with the first four hypotheses
        length_penalty=length_penalty,
        max_decoding_length=55,
        return_scores=True,
    )
    ids = [saved.convert_tokens_to_ids(each.hypotheses[0]) for each in found]
    assert saved.batch_decode(ids, skip_special_tokens=True) == [best.text for best in expected]
    assert [each.scores[0] for each in found] == pytest.approx([best.score for best in expected], abs=1e-3)


@pytest.mark.promise("export to CTranslate2")
@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.05), ("bfloat16", 0.05), ("float16", 0.005)])
def test_smaller_types_change_scores_a_little(tokenizers, tmp_path, quantization, tolerance):
    tokenizer = tokenizers[0]
    model = random_model(tokenizer)
    for name in ("float32", quantization):
        export_to_ctranslate2(model, tokenizer, tmp_path / name, quantization=name, max_length=16)
    weights = [(tmp_path / name / "model.bin").stat().st_size for name in ("float32", quantization)]
    assert weights[1] < 0.7 * weights[0]
    found = [
        log_probs_of(tmp_path / name, tokenizer, tokenizer, compute_type="float32")
        for name in ("float32", quantization)
    ]
    assert found[0] != found[1]
    assert found[1] == pytest.approx(found[0], abs=tolerance)


@pytest.mark.promise("export to CTranslate2")
@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"d_k": 5, "d_v": 4}, {}, r"`d_k` and `d_v` must be d_model / num_heads.* got 5 and 4 for 12 / 3"),
        (
            {"activation_function": "relu2"},
            {},
            r"`activation_function` must be one that CTranslate2 has, relu.*'relu2'",
        ),
        ({"attention_scale": 1.0}, {}, r"`attention_scale` must be d_k \*\* -0\.5.* got 1\.0"),
        ({"vocab_size": 260}, {}, r"The tokenizer must fit the model's vocabulary of 260, but has 261 tokens"),
        ({}, {"quantization": "int4"}, r"`quantization` must be one of float32, .*; got 'int4'"),
        ({}, {"max_length": 0}, r"`max_length` must be between 1 and 100,000, got 0"),
        ({}, {"max_length": 10**20}, r"`max_length` must be between 1 and 100,000, got 10{20}"),
        ({"position_type": "learned"}, {"max_length": 513}, r"`max_length` must be between 1 and .* \(512\), got 513"),
    ],
    ids=["widths", "activation", "scale", "vocabulary", "type", "length", "memory", "positions"],
)
def test_what_ctranslate2_lacks_is_refused(tokenizers, tmp_path, config, options, message):
    model = random_model(tokenizers[0], **config)
    with pytest.raises(ValueError, match=message):
        export_to_ctranslate2(model, tokenizers[0], tmp_path / "exported", **options)
    assert list(tmp_path.iterdir()) == []


def test_other_models_bad_weights_and_full_folders_are_refused(tokenizers, tmp_path):
    bert = VanillaBertModel(VanillaBertConfig.preset("tiny", vocab_size=30))
    with pytest.raises(ValueError, match="must be a `vanilla_transformer`, an encoder-decoder; got 'vanilla_bert'"):
        export_to_ctranslate2(bert, tokenizers[0], tmp_path / "exported")
    model = random_model(tokenizers[0])
    model.model.encoder.layers[0].feed_forward.fc1.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="weights must be finite numbers"):
        export_to_ctranslate2(model, tokenizers[0], tmp_path / "exported")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"`output_dir` must be a new or empty folder, but .*full is not"):
        export_to_ctranslate2(random_model(tokenizers[0]), tokenizers[0], tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("place", ["real", "link", "dangling", "."])
def test_output_can_be_an_empty_folder_or_a_link(tokenizers, tmp_path, monkeypatch, place):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("new")
    monkeypatch.chdir(tmp_path / "real" if place == "." else tmp_path)
    written = tmp_path / ("new" if place == "dangling" else "real")
    before = written.exists() and written.stat().st_ino
    export_to_ctranslate2(random_model(tokenizers[0]), tokenizers[0], place, max_length=16)
    ctranslate2.Translator(str(written))
    assert before in (False, written.stat().st_ino)  # which may be where a volume is mounted, or the user's shell is
    assert not list(tmp_path.glob("**/*.tmp"))
    assert all((tmp_path / name).is_symlink() for name in ("link", "dangling"))


def test_further_ends_and_suppressed_tokens_are_named(tokenizers, tmp_path, caplog):
    model = random_model(tokenizers[0])
    export_to_ctranslate2(model, tokenizers[0], tmp_path / "plain", max_length=16)
    assert not caplog.messages
    model.generation_config.update(eos_token_id=[2, 258], suppress_tokens=[0, 257])
    export_to_ctranslate2(model, tokenizers[0], tmp_path / "new", max_length=16)
    ends, suppressed = (tokenizers[0].convert_ids_to_tokens(ids) for ids in ([2, 258], [257]))
    expected = f"all as `end_token`, {ends}.", f"yours as `suppress_sequences`, {[suppressed]}."
    for message, end in zip(caplog.messages, expected, strict=True):
        assert message.endswith(end)


def test_leftovers_of_killed_exports_are_removed(tokenizers, tmp_path):
    ended = multiprocessing.get_context("spawn").Process()
    ended.start()
    ended.join()
    kept = [tmp_path / f"new.{os.getppid()}.tmp", tmp_path / "new.notes.tmp", tmp_path / "empty"]
    for path in (*kept, tmp_path / f"new.{ended.pid}.tmp", kept[-1] / f".{ended.pid}.tmp"):
        path.mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    with pytest.raises(ValueError, match="must be a new or empty folder"):
        export_to_ctranslate2(random_model(tokenizers[0]), tokenizers[0], tmp_path / "empty")
    assert len(list((tmp_path / "empty").glob(".*.tmp"))) == 1
    (tmp_path / "empty" / "notes.txt").unlink()
    for name in ("new", "empty"):
        export_to_ctranslate2(random_model(tokenizers[0]), tokenizers[0], tmp_path / name, max_length=16)
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "new"])
    assert not list((tmp_path / "empty").glob("*.tmp"))


def test_output_that_cannot_be_written_is_named(tokenizers, tmp_path, monkeypatch):
    model = random_model(tokenizers[0])
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`output_dir` \(.*file/new\) can't be written: Not a directory"):
        export_to_ctranslate2(model, tokenizers[0], tmp_path / "file" / "new")

    def fill_disk(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tokenizers[0], "save_pretrained", fill_disk)
    with pytest.raises(ValueError, match=r"`output_dir` \(.*new\) can't be written: No space left on device"):
        export_to_ctranslate2(model, tokenizers[0], tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_damaged_export_is_not_loaded(tokenizers, tmp_path):
    (tmp_path / "empty").mkdir()
    folder = export_to_ctranslate2(random_model(tokenizers[0]), tokenizers[0], tmp_path / "empty")
    weights = (folder / "model.bin").read_bytes()
    (folder / "model.bin").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(RuntimeError, match="invalid payload size"):
        ctranslate2.Translator(str(folder))
    assert json.loads((folder / "config.json").read_text())["decoder_start_token"] == "<s>"
