r"""Training of subword tokenizers that load with `AutoTokenizer`, without this package.

The paper uses byte-pair encoding with a vocabulary shared by both languages (section 5.1, citing Sennrich et al.
2016). Here the same algorithm, or Kudo's unigram model (2018), runs on the bytes of the text:

```
"Hello, 世界"            the text
" Hello, 世界"           a leading space
" Hello" "," " 世界"     words with their space; bytes become letters, and subwords never cross these borders
" Hel" "lo" "," " 世界" "</s>"
```

The leading space lets the first word of a sentence have the subwords of the same word elsewhere; decoding removes it.
Any Unicode text decodes to itself, spaces included, and no text is unknown.

Departures from the paper: the smallest subwords are bytes instead of characters, so nothing is lost; digits are
separate, so that numbers are copied and not memorized.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from ..models.checks import check_integer


logger = logging.get_logger(__name__)


SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")


# The special tokens and the 256 bytes.
MINIMUM_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256


WORDPIECE_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


# Repetitions of a word in one text for WordPiece's trainer: the commonest word of a large corpus, as one text, would
# fill the memory.
_MAX_REPETITIONS = 10_000


# Padding is a token of its own: a collator that ignores it in the loss must not ignore the end of a text.
GPT_SPECIAL_TOKENS = ("<|pad|>", "<|endoftext|>")


# Scripts without spaces between words. U+30FC, the prolonged sound mark of kana, belongs to no script.
_SYLLABLES = r"\p{Hiragana}\p{Katakana}\u30FC\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"


_SPACELESS = rf"\p{{Han}}{_SYLLABLES}"


_LETTER = rf"[[\p{{L}}\p{{M}}]&&[^{_SPACELESS}]]"


# One alternative per line: a word with its space, across apostrophes and zero-width joiners; one digit; a run of other
# characters; "<" alone, so that no learned subword looks like a special token; spaces except for the last one before a
# word; other white space. The quantifiers are possessive so that long lines take linear time.
_SPACED = "|".join(
    (
        rf" ?{_LETTER}++(?:['\u2019\u200C\u200D]{_LETTER}++)*+",
        r" ?\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}<]++",
        r" ?<",
        r"\s+(?!\S)",
        r"\s",
    )
)


# In text that is segmented by spaces, a word of these scripts with its space, of one script or several (食べる). Words
# have at most 12 letters; a longer run after a space is a clause, which has no space of its own.
_SEGMENTED = rf" (?>[{_SPACELESS}]{{1,12}})(?![{_SPACELESS}])"


# A Chinese clause is one run of letters. Frequent clauses would become subwords if the trainer saw them whole, so it
# sees at most 4 ideographs at a time (nearly all Chinese words are that short) and 12 characters of the syllabic
# scripts. The trained tokenizer sees whole runs, so that it finds a word at any position.
_TRAINING_PATTERN = rf"{_SEGMENTED}|\p{{Han}}{{1,4}}|[{_SYLLABLES}]{{1,12}}|{_SPACED}"


_PATTERN = rf"{_SEGMENTED}|\p{{Han}}++|[{_SYLLABLES}]++|{_SPACED}"


# 12 characters of 3 bytes: the longest match of the training pattern in scripts without spaces.
_UNIGRAM_MAX_PIECE_BYTES = 36


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    algorithm: str = "bpe",
    min_frequency: int | None = None,
    lowercase: bool = False,
    split_special_tokens: bool = True,
    model_max_length: int | None = None,
    show_progress: bool = True,
) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer; training on both sides of a corpus gives the paper's joint vocabulary.

    The ids of the special tokens are `<pad>` 0, `<s>` 1, `</s>` 2, `<unk>` 3; the other entries are the 256 bytes and
    learned subwords. Encoded texts end in `</s>` and have no `<s>`, as sources and labels need it; the decoder starts
    with `<s>`. `save_pretrained` writes files that need no code of this package.

    Chinese, Japanese, Thai and other scripts without spaces may be segmented by spaces or not: a word with its space
    is a candidate for one token, and text without spaces is split wherever subwords are frequent.

    Args:
        texts (`Iterable[str]`): The training text, read once: sentences, lines or whole documents.
        vocab_size (`int`): Number of entries, special tokens included; at least 260. The result has fewer only if the
            text has no more subwords to learn; a warning reports this.
        algorithm (`str`): `"bpe"` (Sennrich et al. 2016) or `"unigram"` (Kudo 2018).
        min_frequency (`int`, *optional*): BPE only: minimum frequency of a pair to be merged; 2 by default.
        lowercase (`bool`): Whether to lower-case all text first. Decoding then gives lower case.
        split_special_tokens (`bool`): Whether special tokens such as `</s>` in a text are plain text. The choice is
            saved with the tokenizer; a call can override it: `tokenizer(text, split_special_tokens=...)`.
        model_max_length (`int`, *optional*): Length in tokens to which `truncation=True` truncates; unlimited by
            default.
        show_progress (`bool`): Whether the trainer draws progress bars.

    Returns:
        `PreTrainedTokenizerFast`: pads on the right, truncates on the right, returns `input_ids` and `attention_mask`.

    Raises:
        TypeError: if `texts` is a single string or has an item that is not a string, or `vocab_size` is not an
            integer.
        ValueError: if there is no text, a text has a lone surrogate, `vocab_size` is too small, `algorithm` is
            unknown, `min_frequency` is below 1 or given for unigram, or `model_max_length` is below 1.

    Source: Vaswani et al. 2017, 5.1; byte level as in Radford et al. 2019, 2.2.
    """
    _check_arguments(texts, vocab_size, MINIMUM_VOCAB_SIZE)
    _check_algorithm(algorithm, min_frequency)
    if model_max_length is not None:
        check_integer("model_max_length", model_max_length)
    backend = _train_backend(
        _checked_texts(texts),
        _trainer(vocab_size, algorithm, min_frequency, show_progress),
        lowercase=lowercase,
        length=len(texts) if isinstance(texts, Sized) else None,
    )
    if algorithm == "unigram":
        backend.model = _reproducible_unigram(backend, vocab_size)
    _warn_of_small_vocabulary(backend, vocab_size)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=SPECIAL_TOKENS[0],
        bos_token=SPECIAL_TOKENS[1],
        eos_token=SPECIAL_TOKENS[2],
        unk_token=SPECIAL_TOKENS[3],
        split_special_tokens=split_special_tokens,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="right",
        truncation_side="right",
        clean_up_tokenization_spaces=False,
    )


def train_wordpiece_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    lowercase: bool = True,
    min_frequency: int = 2,
    alphabet_size: int = 1000,
    model_max_length: int = 512,
    show_progress: bool = True,
) -> PreTrainedTokenizerFast:
    """Train BERT's WordPiece tokenizer: words and punctuation are separate, subwords inside a word start with `##`.

    Each Chinese character is a word. The ids of the special tokens are `[PAD]` 0, `[UNK]` 1, `[CLS]` 2, `[SEP]` 3,
    `[MASK]` 4. A text becomes `[CLS] A [SEP]`, a pair `[CLS] A [SEP] B [SEP]` with `token_type_ids`.
    `save_pretrained` writes files that need no code of this package. Special tokens in a text are special, as in every
    BERT (`"the [MASK] barks"`); `tokenizer(text, split_special_tokens=True)` reads them as plain text.

    Args:
        texts (`Iterable[str]`): The training text, read once: sentences, lines or whole documents.
        vocab_size (`int`): Number of entries, special tokens included. The result has fewer only if the text has no
            more subwords to learn; a warning reports this.
        lowercase (`bool`): Whether to lower-case text and strip accents (the paper's uncased models).
        min_frequency (`int`): Minimum frequency of a pair of subwords to be merged.
        alphabet_size (`int`): Number of different characters, the most frequent ones; words with others are `[UNK]`.
            Chinese needs 6,000 or more.
        model_max_length (`int`): Length in tokens to which `truncation=True` truncates.
        show_progress (`bool`): Whether the trainer draws progress bars.

    Returns:
        `PreTrainedTokenizerFast`: pads on the right, and returns `input_ids`, `token_type_ids` and `attention_mask`.

    Raises:
        TypeError: if `texts` is a single string or has an item that is not a string, or `vocab_size` is not an
            integer.
        ValueError: if there is no text, a text has a lone surrogate, or a number is too small: `vocab_size` must be at
            least the number of characters of the text.

    Source: Devlin et al. 2018, section 3; Wu et al. 2016, 4.1.
    """
    _check_arguments(texts, vocab_size, len(WORDPIECE_SPECIAL_TOKENS) + 2)
    for name, value in (
        ("min_frequency", min_frequency), ("alphabet_size", alphabet_size), ("model_max_length", model_max_length)
    ):  # fmt: skip
        check_integer(name, value)
    pad, unknown, start, end, mask = WORDPIECE_SPECIAL_TOKENS
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    words = _count_words(_checked_texts(texts), normalizer)
    vocabulary = _train_wordpiece(words, vocab_size, min_frequency, alphabet_size, show_progress)
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(list(WORDPIECE_SPECIAL_TOKENS))
    _warn_of_small_vocabulary(backend, vocab_size)
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B:1 {end}:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in (start, end)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        unk_token=unknown,
        cls_token=start,
        sep_token=end,
        mask_token=mask,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        padding_side="right",
        truncation_side="right",
        clean_up_tokenization_spaces=False,
    )


def train_gpt_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    min_frequency: int = 2,
    model_max_length: int = 512,
    show_progress: bool = True,
) -> PreTrainedTokenizerFast:
    """Train GPT-2's tokenizer: byte-pair encoding on bytes, from which any text decodes to itself.

    The ids of the special tokens are `<|pad|>` 0 and `<|endoftext|>` 1, which is `bos_token` and `eos_token` in one;
    the other entries are the 256 bytes and learned subwords. Nothing is added to a text. `save_pretrained` writes
    files that need no code of this package. Special tokens in a text are special, as in every GPT-2;
    `tokenizer(text, split_special_tokens=True)` reads them as plain text.

    Args:
        texts (`Iterable[str]`): The training text, read once: lines or whole documents.
        vocab_size (`int`): Number of entries, special tokens included; at least 258. The result has fewer only if the
            text has no more subwords to learn; a warning reports this.
        min_frequency (`int`): Minimum frequency of a pair of subwords to be merged.
        model_max_length (`int`): Length in tokens to which `truncation=True` truncates.
        show_progress (`bool`): Whether the trainer draws progress bars.

    Returns:
        `PreTrainedTokenizerFast`: pads on the right, and returns `input_ids` and `attention_mask`. For `generate` with
        several prompts set `padding_side="left"`.

    Raises:
        TypeError: if `texts` is a single string or has an item that is not a string, or `vocab_size` is not an
            integer.
        ValueError: if there is no text, a text has a lone surrogate, or a number is too small.

    Source: Radford et al. 2019, 2.2. Departure from Radford et al. 2018: their subwords are of lower-cased words,
    without spaces, so that text does not decode to itself.
    """
    _check_arguments(texts, vocab_size, len(GPT_SPECIAL_TOKENS) + 256)
    for name, value in (("min_frequency", min_frequency), ("model_max_length", model_max_length)):
        check_integer(name, value)
    pad, end = GPT_SPECIAL_TOKENS
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(GPT_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=show_progress,
    )
    backend.train_from_iterator(
        _checked_texts(texts), trainer, length=len(texts) if isinstance(texts, Sized) else None
    )
    backend.decoder = decoders.ByteLevel()
    _warn_of_small_vocabulary(backend, vocab_size)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token=end,
        eos_token=end,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="right",
        truncation_side="right",
        clean_up_tokenization_spaces=False,
    )


def add_text_ends(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Let a language model's tokenizer put its end-of-text token around texts and between those of a pair.

    A classifier of GPT needs tokens that start a text, separate a pair, and end it, the token that is read (Radford et
    al. 2018, 3.3). Here all three are the end-of-text token, which the model has met between documents. The tokenizer
    saves it as part of its post-processor. A tokenizer that adds tokens already stays as it is.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer, which is changed. Without a padding or an end-of-text
            token it gets `<|pad|>` or `<|endoftext|>`, for which the model's vocabulary has to grow.

    Returns:
        `PreTrainedTokenizerFast`: the same tokenizer.

    Departure from the paper: it adds three new tokens, whose embeddings are learnt in fine-tuning.
    """
    if tokenizer("")["input_ids"]:
        return tokenizer
    for name, token in zip(("pad_token", "eos_token"), GPT_SPECIAL_TOKENS, strict=True):
        if getattr(tokenizer, name) is None:
            tokenizer.add_special_tokens({name: token})
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{end} $A {end}",
        pair=f"{end} $A {end} $B {end}",
        special_tokens=[(end, tokenizer.eos_token_id)],
    )
    return tokenizer


def tokenizer_settings(content: str) -> dict[str, Any]:
    """Read what decides how a tokenizer encodes.

    Args:
        content (`str`): Its `tokenizer.json`.

    Returns:
        `dict[str, Any]`: the content without truncation and padding, which every call sets.

    Raises:
        ValueError: if it is broken.
    """
    settings = json.loads(content)
    if not isinstance(settings, dict):
        raise ValueError(f"`content` must be a JSON object, got a {type(settings).__name__}.")
    return {name: value for name, value in settings.items() if name not in ("truncation", "padding")}


def _check_arguments(texts: Iterable[str], vocab_size: int, minimum: int) -> None:
    """Raise on arguments that would fail only during training."""
    if isinstance(texts, str | bytes):
        raise TypeError(
            f"`texts` must be an iterable of strings, got a single {type(texts).__name__}; pass a list with it inside."
        )
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool):
        raise TypeError(f"`vocab_size` must be an integer, got {vocab_size!r}.")
    if vocab_size < minimum:
        raise ValueError(
            f"`vocab_size` must be at least {minimum} (special tokens and single characters), got {vocab_size}."
        )


def _check_algorithm(algorithm: str, min_frequency: int | None) -> None:
    """Raise if the algorithm is unknown or has no minimum frequency."""
    if algorithm not in ("bpe", "unigram"):
        raise ValueError(f'`algorithm` must be "bpe" or "unigram", got {algorithm!r}.')
    if min_frequency is None:
        return
    if algorithm == "unigram":
        raise ValueError(f'`min_frequency` ({min_frequency}) is for "bpe" only; leave it out for "unigram".')
    check_integer("min_frequency", min_frequency)


def _count_words(texts: Iterable[str], normalizer: normalizers.Normalizer) -> Counter[str]:
    """Count the words and punctuation marks of texts."""
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for text in texts:
        words.update(word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text)))
    return words


def _train_wordpiece(
    words: Counter[str], vocab_size: int, min_frequency: int, alphabet_size: int, show_progress: bool
) -> dict[str, int]:
    """Learn the subwords of words; return their ids.

    The trainer assigns ids to characters in an order that differs between runs, and breaks ties between equally
    frequent pairs by id. So characters get their ids here.
    """
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            characters[character] += count
    ranked = sorted(characters, key=lambda character: (-characters[character], character))
    alphabet = set(ranked[:alphabet_size])
    words = Counter({word: count for word, count in words.items() if alphabet.issuperset(word)})
    inner = {f"##{character}" for word in words for character in word[1:]}
    first_ids = [*WORDPIECE_SPECIAL_TOKENS, *sorted(alphabet), *sorted(inner)]
    if len(first_ids) > vocab_size:
        raise ValueError(
            f"`vocab_size` must be at least {len(first_ids)}, the number of special tokens and characters of this "
            f"text, got {vocab_size}; or lower `alphabet_size` ({alphabet_size})."
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=first_ids, show_progress=show_progress
    )
    backend = Tokenizer(models.WordPiece(unk_token=WORDPIECE_SPECIAL_TOKENS[1]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    length = sum(math.ceil(count / _MAX_REPETITIONS) for count in words.values())
    backend.train_from_iterator(_repeat_words(words), trainer, length=length)
    return backend.get_vocab()


def _repeat_words(words: Counter[str]) -> Iterator[str]:
    """Yield texts that together have each word as often as it was counted."""
    for word in sorted(words):
        for done in range(0, words[word], _MAX_REPETITIONS):
            yield f"{word} " * min(_MAX_REPETITIONS, words[word] - done)


def _warn_of_small_vocabulary(backend: Tokenizer, vocab_size: int) -> None:
    """Warn if the text had too few subwords."""
    if backend.get_vocab_size() < vocab_size:
        logger.warning(
            f"The vocabulary has {backend.get_vocab_size()} entries, not the {vocab_size} of `vocab_size`: the text "
            "has no more subwords to learn. Give more text or a smaller `vocab_size`."
        )


def _train_backend(
    texts: Iterator[str], trainer: trainers.Trainer, *, lowercase: bool, length: int | None
) -> Tokenizer:
    """Build the steps from text to ids and back, and train the model."""
    backend = Tokenizer(models.BPE() if isinstance(trainer, trainers.BpeTrainer) else models.Unigram())
    prepend_space = normalizers.Prepend(" ")
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), prepend_space]) if lowercase else prepend_space
    backend.pre_tokenizer = _pre_tokenizer(_TRAINING_PATTERN)
    backend.train_from_iterator(texts, trainer, length=length)
    backend.pre_tokenizer = _pre_tokenizer(_PATTERN)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    end_token = SPECIAL_TOKENS[2]
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end_token}",
        pair=f"$A {end_token} $B {end_token}",
        special_tokens=[(end_token, backend.token_to_id(end_token))],
    )
    return backend


def _checked_texts(texts: Iterable[str]) -> Iterator[str]:
    """Yield each text after checking that it is a string with a UTF-8 form."""
    characters = 0
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise TypeError(f"`texts` must be strings, but item {number} is {text!r} ({type(text).__name__}).")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"`texts` must be valid Unicode, but item {number} has a lone surrogate at position {error.start}; "
                "read the file as UTF-8 or drop the item."
            ) from None
        characters += len(text)
        yield text
    if not characters:
        raise ValueError("`texts` must have some text, but it has no item or only empty ones.")


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Split into the matches of `pattern`, then map bytes to letters."""
    return pre_tokenizers.Sequence(
        [
            # The leading space helps only text with spaces; before other text it would be a subword of its own.
            pre_tokenizers.Split(Regex(rf"\A (?=[{_SPACELESS}])(?!(?>[{_SPACELESS}]{{1,12}}) )"), behavior="removed"),
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _trainer(vocab_size: int, algorithm: str, min_frequency: int | None, show_progress: bool) -> trainers.Trainer:
    """Make a trainer whose vocabulary starts with the special tokens and has all 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if algorithm == "bpe":
        return trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2 if min_frequency is None else min_frequency,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=alphabet,
            show_progress=show_progress,
        )
    return trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        unk_token=SPECIAL_TOKENS[3],
        max_piece_length=_UNIGRAM_MAX_PIECE_BYTES,
        show_progress=show_progress,
    )


def _reproducible_unigram(backend: Tokenizer, vocab_size: int) -> models.Unigram:
    """Rebuild a trained unigram model so that it is the same in every run and has at most `vocab_size` entries.

    The trainer ranks unseen bytes at random, sums scores in no fixed order, and keeps more subwords than it should in
    a very small vocabulary.
    """
    trained = json.loads(backend.to_str())["model"]["vocab"][len(SPECIAL_TOKENS) :]
    scores = {piece: round(score, 6) for piece, score in trained}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # The trainer gives unseen bytes the lowest score, plus 0.0001 for each further one.
    floor = min(scores.values())
    for byte in alphabet:
        if scores[byte] < floor + 0.0001 * len(alphabet):
            scores[byte] = floor
    ranked = sorted(scores, key=lambda piece: (-scores[piece], piece))
    learned = [piece for piece in ranked if len(piece) > 1][: vocab_size - MINIMUM_VOCAB_SIZE]
    kept = {*learned, *alphabet}
    vocabulary = [(token, 0.0) for token in SPECIAL_TOKENS]
    vocabulary += [(piece, scores[piece]) for piece in ranked if piece in kept]
    return models.Unigram(vocabulary, SPECIAL_TOKENS.index("<unk>"))
