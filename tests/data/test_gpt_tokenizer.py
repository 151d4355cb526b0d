"""GPT's tokenizer: any text decodes to itself, ends of texts, and loading without the package."""

import subprocess
import sys

import pytest
from transformers import AutoTokenizer, GPT2Tokenizer

from hf_vanilla.data.tokenization import add_text_ends, train_gpt_tokenizer, train_wordpiece_tokenizer


TEXTS = ["the penguins are flightless birds, penguin!", "He's  here.\n\nThe end"] * 5


@pytest.fixture(scope="module")
def tokenizer():
    return train_gpt_tokenizer(TEXTS, 300, model_max_length=31, show_progress=False)


@pytest.mark.parametrize("text", ["", " a  b ", "\ttabs\n\n and\r\nlines ", "Zürich 世界 🐧\u200d\x00", "it's , 12 ."])
def test_any_text_decodes_to_itself(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_special_tokens(tokenizer):
    assert tokenizer.convert_ids_to_tokens([0, 1]) == ["<|pad|>", "<|endoftext|>"]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 1)
    assert tokenizer("the<|endoftext|>")["input_ids"][-1] == 1
    assert 1 not in tokenizer("the<|endoftext|>", split_special_tokens=True)["input_ids"]
    assert len(tokenizer("the end " * 40, truncation=True)["input_ids"]) == 31
    assert tokenizer.tokenize("the penguins")[0] == "the"  # no space before the first word


def test_training_is_reproducible(tokenizer):
    assert train_gpt_tokenizer(iter(TEXTS[::-1]), 300, show_progress=False).get_vocab() == tokenizer.get_vocab()


def test_tokenizer_loads_without_the_package(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    script = f"""
import sys
sys.modules["hf_vanilla"] = None
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(tmp_path)!r})
print(tokenizer("the man", "birds"), tokenizer.model_max_length, tokenizer.eos_token, tokenizer.pad_token)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == [f"{tokenizer('the man', 'birds')} 31 <|endoftext|> <|pad|>"]


@pytest.mark.parametrize(
    ("texts", "options", "error", "message"),
    [
        ("text", {}, TypeError, "`texts` must be an iterable of strings"),
        ([], {}, ValueError, "`texts` must have some text"),
        (["a"], {"vocab_size": 257}, ValueError, "`vocab_size` must be at least 258 .*got 257"),
        (["a"], {"min_frequency": 0}, ValueError, "`min_frequency` must be at least 1, got 0"),
        (["a"], {"model_max_length": 0}, ValueError, "`model_max_length` must be at least 1, got 0"),
    ],
)
def test_bad_input_is_named(texts, options, error, message):
    with pytest.raises(error, match=message):
        train_gpt_tokenizer(texts, **{"vocab_size": 300, "show_progress": False, **options})


def test_classifier_gets_ends_of_texts_and_saves_them(tmp_path):
    vocabulary = {"a": 0, "b": 1, "<|endoftext|>": 2}
    for number, tokenizer in enumerate((train_gpt_tokenizer(TEXTS, 300), GPT2Tokenizer(vocabulary, []))):
        end, a, b = (tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "a", "b"))
        add_text_ends(tokenizer).save_pretrained(tmp_path / str(number))
        for each in (tokenizer, add_text_ends(AutoTokenizer.from_pretrained(tmp_path / str(number)))):
            assert each("a", truncation=True, max_length=3)["input_ids"] == [end, a, end]
            assert each("aa", "b", truncation=True, max_length=5)["input_ids"] == [end, a, end, b, end]
            assert each(["a", "ab"], padding=True)["attention_mask"] == [[1, 1, 1, 0], [1, 1, 1, 1]]
            assert each.pad_token == "<|pad|>"
    bert = train_wordpiece_tokenizer(TEXTS, 90, show_progress=False)
    before = bert("the penguins")["input_ids"]
    assert add_text_ends(bert)("the penguins")["input_ids"] == before
