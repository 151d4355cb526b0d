"""BERT's tokenizer: splitting, encoding, and loading without the package."""

import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from hf_vanilla.data.tokenization import train_wordpiece_tokenizer


TEXTS = ["the penguins are flightless birds , penguin !", "the man went to the store", "Flight of the Café birds"] * 5


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece_tokenizer(TEXTS, 90, show_progress=False)


def test_special_tokens_have_the_first_ids(tokenizer):
    assert tokenizer.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 4)


def test_words_are_split_and_joined(tokenizer):
    pieces = tokenizer.tokenize("the penguins store")
    assert pieces[0] == "the"

    assert tokenizer.unk_token not in tokenizer.tokenize("wentstore")
    assert tokenizer.decode(tokenizer("the wentstore went")["input_ids"], skip_special_tokens=True) == (
        "the wentstore went"
    )


def test_text_and_pair_have_the_special_tokens_of_the_paper(tokenizer):
    single, pair = tokenizer("the man"), tokenizer("the man", "birds")
    assert tokenizer.convert_ids_to_tokens(single["input_ids"])[0::3] == ["[CLS]", "[SEP]"]
    assert list(single) == ["input_ids", "token_type_ids", "attention_mask"]
    ends = [index for index, token in enumerate(pair["input_ids"]) if token == tokenizer.sep_token_id]
    assert pair["token_type_ids"] == [0] * (ends[0] + 1) + [1] * (ends[1] - ends[0])


@pytest.mark.promise("special tokens in a text")
def test_mask_in_a_text_is_special_by_default(tokenizer):
    assert tokenizer.mask_token_id in tokenizer("the [MASK] went")["input_ids"]
    assert tokenizer.mask_token_id not in tokenizer("the [MASK] went", split_special_tokens=True)["input_ids"]


def test_uncased_drops_case_and_accents_and_cased_keeps_them(tokenizer):
    assert tokenizer.tokenize("CAFÉ The") == tokenizer.tokenize("cafe the")
    cased = train_wordpiece_tokenizer(TEXTS, 90, lowercase=False, show_progress=False)
    assert cased.tokenize("Flight") != cased.tokenize("flight")
    assert "[UNK]" not in cased.tokenize("Café")


def test_chinese_characters_are_words():
    tokenizer = train_wordpiece_tokenizer(["我爱中国", "中国很大"] * 3, 30, show_progress=False)
    assert tokenizer.tokenize("我爱中国") == ["我", "爱", "中", "国"]


def test_rare_characters_are_unknown():
    tokenizer = train_wordpiece_tokenizer(["aaa bbb"] * 9 + ["z"], 30, alphabet_size=2, show_progress=False)
    assert tokenizer.tokenize("z a") == ["[UNK]", "a"]


@pytest.mark.parametrize("texts", [iter(TEXTS), TEXTS[::-1]], ids=["iterator", "reversed"])
def test_training_is_reproducible(tokenizer, texts):
    assert train_wordpiece_tokenizer(texts, 90, show_progress=False).get_vocab() == tokenizer.get_vocab()


def test_frequent_words_count_as_often_as_they_occur():
    # one entry beside the characters: of "ab" or, by two words, of "cd"
    few, many = (
        train_wordpiece_tokenizer([("ab " * 5 + "cd cd cde cde ") * times], 14, show_progress=False)
        for times in (1, 3_001)
    )
    assert "ab" in few.get_vocab()
    assert many.get_vocab() == few.get_vocab()


def test_more_characters_than_entries_are_rejected():
    with pytest.raises(ValueError, match=r"`vocab_size` must be at least 16, .*, got 14; or lower `alphabet_size`"):
        train_wordpiece_tokenizer(["abcdef"], 14, show_progress=False)
    assert len(train_wordpiece_tokenizer(["abcdef", "ab"], 14, alphabet_size=2, show_progress=False)) < 14


def test_wordpiece_tokenizer_loads_without_the_package(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    script = f"""
import sys
sys.modules["hf_vanilla"] = None
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(tmp_path)!r})
print(tokenizer("the man", "[MASK] birds"))
print(tokenizer.model_max_length, tokenizer.mask_token)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == [str(tokenizer("the man", "[MASK] birds")), "512 [MASK]"]
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()


def test_small_wordpiece_vocabulary_is_logged(caplog):
    train_wordpiece_tokenizer(["ab"] * 3, 50, show_progress=False)
    assert "not the 50 of `vocab_size`" in caplog.text


@pytest.mark.parametrize(
    ("texts", "options", "error", "message"),
    [
        ("text", {}, TypeError, "`texts` must be an iterable of strings"),
        ([3], {}, TypeError, "item 1 is 3"),
        ([], {}, ValueError, "`texts` must have some text"),
        (["a"], {"vocab_size": 6}, ValueError, "`vocab_size` must be at least 7 .*got 6"),
        (["a"], {"vocab_size": 9.5}, TypeError, "`vocab_size` must be an integer, got 9.5"),
        (["a"], {"min_frequency": 0}, ValueError, "`min_frequency` must be at least 1, got 0"),
        (["a"], {"alphabet_size": 0}, ValueError, "`alphabet_size` must be at least 1, got 0"),
    ],
    ids=["string", "number", "nothing", "small", "fraction", "frequency", "alphabet"],
)
def test_bad_input_is_named(texts, options, error, message):
    with pytest.raises(error, match=message):
        train_wordpiece_tokenizer(texts, **{"vocab_size": 90, "show_progress": False, **options})
