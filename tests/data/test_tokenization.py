import importlib
import itertools
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_vanilla.data import tokenization
from hf_vanilla.data.synthetic import date_corpus
from hf_vanilla.data.tokenization import train_tokenizer


ALGORITHMS = ("bpe", "unigram")
HAN = re.compile(r"[\u4e00-\u9fff]")
NASTY_TEXTS = {
    "empty": "",
    "one_space": " ",
    "spaces": "   leading, several   inside and trailing  ",
    "newlines": "carriage\r\nreturn\rtab\t\n\n",
    "other_line_ends": "a\u2028b\u2029c\x0cd\x85e\x1cf",
    "control": "\x00nul\x00 \x1b[31mred\x7f",
    "metaspace": "▁sentence▁piece Ġbyte",
    "byte_order_mark": "\ufeffstart",
    "combining": "e\u0301 a\u0308\u0304 \u0301alone",
    "right_to_left": "שלום עולם مرحبا بالعالم",
    "joiners": "می\u200cخواهم क\u094d\u200dष",
    "emoji": "👨\u200d👩\u200d👧 🏳️\u200d🌈 🇩🇪",
    "chinese": "我们在看书，他喜欢狗。",
    "chinese_after_space": " 我们 在 看书 ",
    "japanese": "コーヒーを飲む時々ｶﾀｶﾅ",
    "thai": "สวัสดีครับ",
    "special_tokens": "</s> <pad>x<unk></s><s>",
    "angle_brackets": "<<a <= b>> </ s>",
    "apostrophes": "don't l\u2019homme rock'n'roll 'quoted' '' '",
    "digits": "3.14159 1,000,000 ½ ٣ 2026-01-31",
    "private_and_last": "\ue000 \U000f0000 \U0010ffff \ufffe",
    "never_seen": "Ω≈ç√∫˜µ≤≥÷ жизнь",
}


def corpus() -> list[str]:
    english = [
        " ".join(words) for words in itertools.product(("The dog", "My cat"), ("eats", "sees"), ("bread.", "it."))
    ]
    german = [
        " ".join(words) for words in itertools.product(("Der Hund", "Die Katze"), ("frisst", "sieht"), ("Brot.",))
    ]
    chinese = [
        "".join(words) for words in itertools.product(("我们", "他"), ("喜欢", "看见"), ("狗", "面包"), ("。", "吗？"))
    ]
    long_clause = ["我们在北京大学学习汉语和数学课程"] * 8
    return (english + german + chinese) * 4 + long_clause + ["In 1998 it's </s> and <pad>."] * 8


@pytest.fixture(scope="module", params=ALGORITHMS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return train_tokenizer(corpus(), 320, algorithm=request.param, show_progress=False)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(tokenization.logger, "warning", messages.append)
    return messages


def decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def pieces(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [tokenizer.decode([index]) for index in range(4, len(tokenizer))]


def test_special_tokens_have_the_first_four_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == ["<pad>", "<s>", "</s>", "<unk>"]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 1)
    assert (tokenizer.eos_token_id, tokenizer.unk_token_id) == (2, 3)


def test_output_fits_an_encoder_decoder(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = tokenizer(["The dog eats bread.", "it."], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    long_ids, short_ids = batch["input_ids"]
    assert long_ids[-1] == 2
    assert long_ids.count(2) == 1
    assert 1 not in long_ids
    assert short_ids[sum(batch["attention_mask"][1]) - 1] == 2
    assert set(short_ids[sum(batch["attention_mask"][1]) :]) == {0}


def test_empty_text_is_the_end_token_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer("")["input_ids"] == [2]


def test_second_text_has_its_own_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = (tokenizer(text)["input_ids"] for text in ("The dog", "sees it."))
    assert tokenizer("The dog", "sees it.")["input_ids"] == first + second


@pytest.mark.parametrize("text", NASTY_TEXTS.values(), ids=NASTY_TEXTS.keys())
def test_text_decodes_to_itself(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert decode(tokenizer, ids) == text
    assert tokenizer.batch_decode([ids], skip_special_tokens=True) == [text]
    # The decoder of a model starts with <s>, and a batch is padded.
    assert decode(tokenizer, [1, *ids, 0, 0]) == text
    assert not set(ids[:-1]) & {0, 1, 2, 3}


@settings(max_examples=150, deadline=None, database=None)
@given(text=st.text(max_size=40))
def test_any_unicode_decodes_to_itself(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert decode(tokenizer, ids) == text
    assert not set(ids[:-1]) & {0, 1, 2, 3}


@settings(max_examples=100, deadline=None, database=None)
@given(
    parts=st.lists(
        st.sampled_from([" ", "  ", "我", "们", "The", "</s>", "<pad>", "'", "\n", "1", "ー", "e\u0301", "<"])
    )
)
def test_any_mixture_of_scripts_decodes_to_itself(tokenizer: PreTrainedTokenizerFast, parts: list[str]) -> None:
    text = "".join(parts)
    assert decode(tokenizer, tokenizer(text)["input_ids"]) == text


@pytest.mark.promise("odd text")
def test_a_line_of_a_megabyte_decodes_to_itself(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "a'" * 500_000
    assert decode(tokenizer, tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("unit", ["a", "我", " ", "<", "a ", "e\u0301", "1", "!", "\n", "ー"])
def test_a_long_run_of_one_kind_decodes_to_itself(tokenizer: PreTrainedTokenizerFast, unit: str) -> None:
    text = unit * 30_000
    assert decode(tokenizer, tokenizer(text)["input_ids"]) == text


def test_first_word_has_the_subwords_of_the_same_word_inside(tokenizer: PreTrainedTokenizerFast) -> None:
    first = tokenizer.tokenize("dog")
    assert tokenizer.tokenize("My dog")[-len(first) :] == first


def test_chinese_word_has_the_same_subwords_at_the_start_and_inside(tokenizer: PreTrainedTokenizerFast) -> None:
    first = tokenizer.tokenize("喜欢")
    assert len(first) == 1
    # The ideograph around it is in no text of the corpus, so nothing can join the word.
    around = tokenizer.tokenize("啊")
    assert tokenizer.tokenize("啊喜欢啊") == around + first + around


def test_chinese_subwords_are_words_and_not_clauses(tokenizer: PreTrainedTokenizerFast) -> None:
    lengths = [len(HAN.findall(piece)) for piece in pieces(tokenizer)]
    assert max(lengths) in (2, 3, 4)
    assert len(tokenizer.tokenize("我们喜欢面包")) < 6


def test_frequent_clause_is_split_despite_a_large_vocabulary() -> None:
    tokenizer = train_tokenizer(["我们在北京大学学习汉语"] * 50, 320, show_progress=False)
    assert max(len(HAN.findall(piece)) for piece in pieces(tokenizer)) == 4
    # Words of four ideographs are subwords at any position, not only at every fourth ideograph.
    assert tokenizer.tokenize("啊学习汉语")[-1:] == tokenizer.tokenize("学习汉语")[-1:]


# The words of a text, and how many tokens the same text has without spaces.
SEGMENTED = {
    "Chinese": (["我们", "在", "北京大学", "学习", "汉语", "。"], 4),
    "Japanese": (["私", "は", "コーヒー", "を", "食べながら", "飲む", "。"], 7),
    "Thai": (["ผม", "ชอบ", "กิน", "ข้าว", "มาก"], 2),
}


@pytest.mark.parametrize("language", SEGMENTED)
def test_a_segmented_word_is_one_token_with_its_space(language) -> None:
    words, unsegmented_tokens = SEGMENTED[language]
    segmented = [" ".join(words[start:] + words[:start]) for start in range(len(words))] * 20
    unsegmented = [line.replace(" ", "") for line in segmented]
    for texts, number in ((segmented, len(words)), (unsegmented, unsegmented_tokens)):
        tokens = train_tokenizer(texts, 420, show_progress=False).tokenize(texts[0])
        assert (len(tokens), tokens.count("Ġ")) == (number, 0)


def test_digits_are_separate(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [tokenizer.decode([index]) for index in tokenizer("it 1998")["input_ids"]][-5:-1] == ["1", "9", "9", "8"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("vocab_size", [260, 261, 300])
def test_vocabulary_has_the_given_size(algorithm: str, vocab_size: int, warnings: list[str]) -> None:
    texts = corpus() + date_corpus(500)["source"][:]
    tokenizer = train_tokenizer(texts, vocab_size, algorithm=algorithm, show_progress=False)
    assert len(tokenizer) == tokenizer.vocab_size == vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))
    assert warnings == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_small_vocabulary_is_logged(algorithm: str, warnings: list[str]) -> None:
    tokenizer = train_tokenizer(["ab ab"], 5000, algorithm=algorithm, show_progress=False)
    assert 260 <= len(tokenizer) < 300
    assert len(warnings) == 1
    assert f"has {len(tokenizer)} entries, not the 5000 of `vocab_size`" in warnings[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_text_gives_the_same_tokenizer(algorithm: str) -> None:
    first, second = (
        train_tokenizer(iter(corpus()), 320, algorithm=algorithm, show_progress=False).backend_tokenizer.to_str()
        for _ in range(2)
    )
    assert first == second


def test_joint_and_separate_vocabularies() -> None:
    english = ["The dog eats bread."] * 4
    german = ["Der Hund frisst Brot."] * 4
    joint = train_tokenizer(itertools.chain(english, german), 290, show_progress=False)
    alone = train_tokenizer(english, 290, show_progress=False)
    assert len(joint.tokenize("Hund")) < len(alone.tokenize("Hund"))
    assert joint.tokenize("dog") == ["Ġdog"]
    assert alone.tokenize("dog") == ["Ġdog"]


def test_min_frequency_limits_merges() -> None:
    texts = ["ab"] * 3 + ["cd"] * 2
    common, all_pairs = (train_tokenizer(texts, 264, min_frequency=count, show_progress=False) for count in (3, 2))
    assert common.tokenize("ab cd") == ["Ġab", "Ġ", "c", "d"]
    assert all_pairs.tokenize("ab cd") == ["Ġab", "Ġcd"]


def test_lower_case() -> None:
    tokenizer = train_tokenizer(corpus(), 320, lowercase=True, show_progress=False)
    assert tokenizer("THE Dog</S>")["input_ids"] == tokenizer("the dog</s>")["input_ids"]
    assert decode(tokenizer, tokenizer(" ÄRGER İ")["input_ids"]) == " ärger i̇"


def test_truncation_keeps_the_left_part_and_the_end_token() -> None:
    tokenizer = train_tokenizer(corpus(), 320, model_max_length=4, show_progress=False)
    ids = tokenizer("The dog eats bread.", truncation=True)["input_ids"]
    whole = tokenizer("The dog eats bread.", verbose=False)["input_ids"]
    assert len(whole) > 4
    assert ids == [*whole[:3], 2]


@pytest.mark.promise("special tokens in a text")
def test_special_tokens_in_a_text_stay_plain_text_after_loading(tokenizer: PreTrainedTokenizerFast, tmp_path) -> None:
    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "The </s> dog <pad><s>"
    ids = reloaded(text)["input_ids"]
    assert ids == tokenizer(text)["input_ids"]
    assert not set(ids[:-1]) & {0, 1, 2, 3}
    assert decode(reloaded, ids) == text


def test_special_tokens_in_a_text_can_be_special(tokenizer: PreTrainedTokenizerFast, tmp_path) -> None:
    dog, cat = (tokenizer(text)["input_ids"][:-1] for text in ("dog", "cat"))
    assert tokenizer("dog</s>cat", split_special_tokens=False)["input_ids"] == [*dog, 2, *cat, 2]
    parsing = train_tokenizer(corpus(), 320, split_special_tokens=False, show_progress=False)
    parsing.save_pretrained(tmp_path)
    for reader in (parsing, AutoTokenizer.from_pretrained(tmp_path)):
        assert reader("</s><pad>")["input_ids"] == [2, 0, 2]
        assert decode(reader, reader("dog</s>")["input_ids"]) == "dog"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_subword_looks_like_a_special_token(algorithm: str) -> None:
    tokenizer = train_tokenizer(["</s>", "<pad> <s>", "x</s>"] * 100, 280, algorithm=algorithm, show_progress=False)
    for text in ("</s>", "x</s>", " <pad>", "<unk>"):
        ids = tokenizer(text)["input_ids"]
        assert not set(ids[:-1]) & {0, 1, 2, 3}
        assert decode(tokenizer, ids) == text


LOAD_WITHOUT_PACKAGE = """
import json, sys
sys.modules["hf_vanilla"] = None
from transformers import AutoTokenizer
texts = json.load(open("texts.json", encoding="utf-8"))
results = {}
for folder in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts)
    results[folder] = {
        "names": list(batch),
        "ids": batch["input_ids"],
        "decoded": tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True),
        "settings": [tokenizer.padding_side, tokenizer.truncation_side, tokenizer.split_special_tokens,
                     tokenizer.clean_up_tokenization_spaces, tokenizer.pad_token, tokenizer.model_max_length],
    }
print(json.dumps(results))
"""


def test_tokenizer_loads_without_the_package(tmp_path) -> None:
    texts = list(NASTY_TEXTS.values())
    (tmp_path / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    expected = {}
    for algorithm in ALGORITHMS:
        tokenizer = train_tokenizer(corpus(), 320, algorithm=algorithm, model_max_length=50, show_progress=False)
        tokenizer.save_pretrained(tmp_path / algorithm)
        expected[algorithm] = {
            "names": ["input_ids", "attention_mask"],
            "ids": tokenizer(texts, verbose=False)["input_ids"],
            "decoded": texts,
            "settings": ["right", "right", True, False, "<pad>", 50],
        }
    command = [sys.executable, "-c", LOAD_WITHOUT_PACKAGE, *ALGORITHMS]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == expected


@pytest.mark.parametrize(
    ("texts", "arguments", "error", "message"),
    [
        ("one string", {}, TypeError, "`texts` must be an iterable of strings, got a single str"),
        (b"bytes", {}, TypeError, "`texts` must be an iterable of strings, got a single bytes"),
        (["a", 5], {}, TypeError, r"`texts` must be strings, but item 2 is 5 \(int\)"),
        (["a", None], {}, TypeError, r"item 2 is None \(NoneType\)"),
        ([], {}, ValueError, "`texts` must have some text, but it has no item"),
        (["", ""], {}, ValueError, "`texts` must have some text, but it has no item or only empty ones"),
        (["a", "b", "xy\ud800"], {}, ValueError, "item 3 has a lone surrogate at position 2"),
        (["a"], {"vocab_size": 259}, ValueError, r"`vocab_size` must be at least 260 .*, got 259"),
        (["a"], {"vocab_size": 300.0}, TypeError, "`vocab_size` must be an integer, got 300.0"),
        (["a"], {"vocab_size": True}, TypeError, "`vocab_size` must be an integer, got True"),
        (["a"], {"algorithm": "wordpiece"}, ValueError, '`algorithm` must be "bpe" or "unigram", got \'wordpiece\''),
        (["a"], {"min_frequency": 0}, ValueError, "`min_frequency` must be at least 1, got 0"),
        (
            ["a"],
            {"min_frequency": 3, "algorithm": "unigram"},
            ValueError,
            r"`min_frequency` \(3\) is for \"bpe\" only",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_bad_input_is_named(texts, arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        train_tokenizer(texts, **{"vocab_size": 300, "show_progress": False, **arguments})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bad_item_of_a_generator_is_named(algorithm: str) -> None:
    with pytest.raises(TypeError, match="item 3 is 7"):
        train_tokenizer((item for item in ("a", "b", 7)), 300, algorithm=algorithm, show_progress=False)


def test_old_module_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hf_vanilla.tokenization", raising=False)
    with pytest.warns(FutureWarning, match="`hf_vanilla.tokenization` is now `hf_vanilla.data.tokenization`"):
        assert importlib.import_module("hf_vanilla.tokenization").train_tokenizer is train_tokenizer
