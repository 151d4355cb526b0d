r"""Train a subword tokenizer that loads with `AutoTokenizer` in a process that has no hf_vanilla.

The paper uses byte-pair encoding with a vocabulary shared by both languages (section 5.1, citing Sennrich et al.
2016). Here the same algorithm, or Kudo's unigram model (2018), runs on the bytes of the text:

```
"Hello, 世界"            the text
" Hello, 世界"           one space in front
" Hello" "," " " "世界"  words with their space; bytes become letters, and pieces never cross these borders
" Hel" "lo" "," " " "世界" "</s>"
```

The space in front makes the first word of a sentence share its pieces with the same word further in; decoding takes it
off again. Any Unicode text decodes to itself, spaces included, and no text is ever unknown.

Departures from the paper: bytes instead of characters are the smallest pieces, so nothing is lost; digits stay apart,
so that numbers are copied and not remembered.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sized

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging


logger = logging.get_logger(__name__)


SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")


# The special tokens and the 256 bytes.
MINIMUM_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256


WORDPIECE_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


# Scripts written without spaces between words. U+30FC, the mark that lengthens a kana vowel, belongs to no script.
_SYLLABLES = r"\p{Hiragana}\p{Katakana}\u30FC\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"


_SPACELESS = rf"\p{{Han}}{_SYLLABLES}"


_LETTER = rf"[[\p{{L}}\p{{M}}]&&[^{_SPACELESS}]]"


# One alternative a line: a word with its space, joined over apostrophes and zero-width joiners; one digit; a run of
# other signs; "<" alone, so that no learnt piece can be spelled like a special token; spaces but for the last one
# before a word. The quantifiers are possessive so that a line of a megabyte takes linear time.
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


# A clause of Chinese is one run of letters. Frequent clauses would become pieces if the trainer saw them whole, so it
# is shown at most 4 ideographs at a time (nearly all Chinese words are that short) and 12 signs of the syllabic
# scripts. The finished tokenizer sees whole runs, so that a word is found wherever it stands.
_TRAINING_PATTERN = rf"\p{{Han}}{{1,4}}|[{_SYLLABLES}]{{1,12}}|{_SPACED}"


_PATTERN = rf"\p{{Han}}++|[{_SYLLABLES}]++|{_SPACED}"


# 12 signs of 3 bytes, the longest that the pattern above lets through outside the spaced scripts.
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
    """Train a byte-level tokenizer; one call on both sides of a corpus gives the paper's joint vocabulary.

    The ids of the special tokens are `<pad>` 0, `<s>` 1, `</s>` 2, `<unk>` 3; the other entries are the 256 bytes
    and what was learnt. Encoding ends in `</s>` and has no `<s>`, as source and label want it; the decoder starts
    with `<s>`. `save_pretrained` writes files that need no code of this package.

    Args:
        texts (`Iterable[str]`): The training text, read once: sentences, lines or whole documents.
        vocab_size (`int`): Number of entries, special tokens included; at least 260. The result has fewer only if the
            text has no more pieces to learn, which a warning tells.
        algorithm (`str`): `"bpe"` (Sennrich et al. 2016) or `"unigram"` (Kudo 2018).
        min_frequency (`int`, *optional*): BPE only: a pair must occur this often to be merged. 2 when not given.
        lowercase (`bool`): Whether to lower-case all text before it is split. Decoding then gives lower case.
        split_special_tokens (`bool`): Whether `</s>` and its like, written in a text, are plain text. `False` reads
            them as the special token. Either way the choice is saved, and a single call can differ: `tokenizer(text,
            split_special_tokens=...)`.
        model_max_length (`int`, *optional*): Length in tokens at which `truncation=True` cuts; none when not given.
        show_progress (`bool`): Whether the trainer draws progress bars.

    Returns:
        `PreTrainedTokenizerFast`: pads on the right, truncates on the right, returns `input_ids` and `attention_mask`.

    Raises:
        TypeError: if `texts` is one string, has an item that is no string, or `vocab_size` is no integer.
        ValueError: if there is no text, a text has a lone surrogate, `vocab_size` is too small, `algorithm` is
            unknown, or `min_frequency` is below 1 or given for unigram.

    Source: Vaswani et al. 2017, 5.1; byte level as in Radford et al. 2019, 2.2.
    """
    _check_arguments(texts, vocab_size, MINIMUM_VOCAB_SIZE)
    _check_algorithm(algorithm, min_frequency)
    backend = _train_backend(
        _checked_texts(texts),
        _trainer(vocab_size, algorithm, min_frequency, show_progress),
        lowercase=lowercase,
        length=len(texts) if isinstance(texts, Sized) else None,
    )
    if algorithm == "unigram":
        backend.model = _settled_unigram(backend, vocab_size)
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
    """Train BERT's tokenizer: words and punctuation apart, words in pieces, inner pieces marked with `##`.

    Chinese characters are words of their own. The ids of the special tokens are `[PAD]` 0, `[UNK]` 1, `[CLS]` 2,
    `[SEP]` 3, `[MASK]` 4. A text becomes `[CLS] A [SEP]`, a pair `[CLS] A [SEP] B [SEP]` with `token_type_ids`.
    `save_pretrained` writes files that need no code of this package. Special tokens written in a text are special,
    as in every BERT (`"the [MASK] barks"`); `tokenizer(text, split_special_tokens=True)` takes them for text.

    Args:
        texts (`Iterable[str]`): The training text, read once: sentences, lines or whole documents.
        vocab_size (`int`): Number of entries, special tokens included. The result has fewer only if the text has no
            more pieces to learn, which a warning tells.
        lowercase (`bool`): Whether to lower-case text and strip accents (the paper's uncased models).
        min_frequency (`int`): A pair of pieces must occur this often to be merged.
        alphabet_size (`int`): Number of different characters kept, the most frequent ones; a word with another one is
            `[UNK]`. Chinese wants 6,000 or more.
        model_max_length (`int`): Length in tokens at which `truncation=True` cuts.
        show_progress (`bool`): Whether the trainer draws progress bars.

    Returns:
        `PreTrainedTokenizerFast`: pads on the right, and returns `input_ids`, `token_type_ids` and `attention_mask`.

    Raises:
        TypeError: if `texts` is one string, has an item that is no string, or `vocab_size` is no integer.
        ValueError: if there is no text, a text has a lone surrogate, or a number is too small: `vocab_size` must hold
            the characters of the text at least.

    Source: Devlin et al. 2018, section 3; Wu et al. 2016, 4.1.
    """
    _check_arguments(texts, vocab_size, len(WORDPIECE_SPECIAL_TOKENS) + 2)
    for name, value in (("min_frequency", min_frequency), ("alphabet_size", alphabet_size)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
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


def _check_arguments(texts: Iterable[str], vocab_size: int, minimum: int) -> None:
    """Raise on anything that the training would only stumble over later."""
    if isinstance(texts, str | bytes):
        raise TypeError(
            f"`texts` must be an iterable of strings, got a single {type(texts).__name__}; pass a list with it inside."
        )
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool):
        raise TypeError(f"`vocab_size` must be an integer, got {vocab_size!r}.")
    if vocab_size < minimum:
        raise ValueError(
            f"`vocab_size` must be at least {minimum} (special tokens and single signs), got {vocab_size}."
        )


def _check_algorithm(algorithm: str, min_frequency: int | None) -> None:
    """Raise on an algorithm that does not exist, or does not count pairs."""
    if algorithm not in ("bpe", "unigram"):
        raise ValueError(f'`algorithm` must be "bpe" or "unigram", got {algorithm!r}.')
    if min_frequency is None:
        return
    if algorithm == "unigram":
        raise ValueError(f'`min_frequency` ({min_frequency}) is for "bpe" only; leave it out for "unigram".')
    if min_frequency < 1:
        raise ValueError(f"`min_frequency` must be at least 1, got {min_frequency}.")


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
    """Learn the pieces of words; returns their ids.

    The trainer gives ids to inner characters in the order in which it meets them, which differs from run to run, and
    lets ids decide between equally frequent pairs. So the characters get their ids beforehand.
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
    backend.train_from_iterator((f"{word} " * words[word] for word in sorted(words)), trainer, length=len(words))
    return backend.get_vocab()


def _warn_of_small_vocabulary(backend: Tokenizer, vocab_size: int) -> None:
    """Tell when the text had too few pieces."""
    if backend.get_vocab_size() < vocab_size:
        logger.warning(
            f"The vocabulary has {backend.get_vocab_size()} entries, not the {vocab_size} of `vocab_size`: the text "
            "has no more pieces to learn. Give more text or a smaller `vocab_size`."
        )


def _train_backend(
    texts: Iterator[str], trainer: trainers.Trainer, *, lowercase: bool, length: int | None
) -> Tokenizer:
    """Put the steps from text to ids and back together, and train the one that is learnt."""
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
    """Yield each text once it is known to be a string that has a UTF-8 form."""
    characters = 0
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise TypeError(f"`texts` must hold strings only, but item {number} is {text!r} ({type(text).__name__}).")
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
        raise ValueError("`texts` must hold some text, but it has no item or only empty ones.")


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Split into the matches of `pattern`, then write bytes as letters."""
    return pre_tokenizers.Sequence(
        [
            # The space in front helps only scripts that write spaces; before the others it would be a lone piece.
            pre_tokenizers.Split(Regex(rf"\A (?=[{_SPACELESS}])"), behavior="removed"),
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _trainer(vocab_size: int, algorithm: str, min_frequency: int | None, show_progress: bool) -> trainers.Trainer:
    """Make the trainer whose vocabulary starts with the special tokens and holds all 256 bytes."""
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


def _settled_unigram(backend: Tokenizer, vocab_size: int) -> models.Unigram:
    """Rebuild a trained unigram model so that the same text always gives the same ids and no more than `vocab_size`.

    The trainer ranks the bytes that it did not see by chance, sums scores in no fixed order, and keeps surplus pieces
    of a very small vocabulary.
    """
    trained = json.loads(backend.to_str())["model"]["vocab"][len(SPECIAL_TOKENS) :]
    scores = {piece: round(score, 6) for piece, score in trained}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # The trainer puts the bytes that it did not see at the lowest score, and 0.0001 more for each further one.
    floor = min(scores.values())
    for byte in alphabet:
        if scores[byte] < floor + 0.0001 * len(alphabet):
            scores[byte] = floor
    ranked = sorted(scores, key=lambda piece: (-scores[piece], piece))
    learnt = [piece for piece in ranked if len(piece) > 1][: vocab_size - MINIMUM_VOCAB_SIZE]
    kept = {*learnt, *alphabet}
    vocabulary = [(token, 0.0) for token in SPECIAL_TOKENS]
    vocabulary += [(piece, scores[piece]) for piece in ranked if piece in kept]
    return models.Unigram(vocabulary, SPECIAL_TOKENS.index("<unk>"))
