"""BERT's pre-training examples: pairs of segments from documents, and masks.

    document:  s1 s2 s3 s4 | s5 s6 s7 | s8 ...      chunks of sentences, as long as one example
    IsNext:    [CLS] s1 s2 [SEP] s3 s4 [SEP]        50 %: A and B are one chunk, split at a random sentence
    NotNext:   [CLS] s1 [SEP] x4 x5 x6 [SEP]        50 %: B starts anywhere in another document; s2 s3 s4 are reused

transformers' `DataCollatorForLanguageModeling` masks each batch anew; [`mask_statically`] masks once, as the authors
did.

Departure from the authors' `create_pretraining_data`: a short target length is drawn for each example and not for each
document, so that short examples are 10 % of all, as in the paper.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase
from transformers.utils import logging

from ..models.checks import check_integer
from .documents import split_sentences
from .tokenization import tokenizer_settings


logger = logging.get_logger(__name__)

# Part of the cache's key: raise it when the same documents give other examples.
BUILDER_VERSION = 2

Sentences = list[list[int]]  # one document: the token ids of each sentence

SPECIAL_TOKENS_OF_A_PAIR = 3  # [CLS] A [SEP] B [SEP]
MINIMUM_LENGTH = 8
INNER_PIECE = "##"  # how WordPiece begins the pieces inside of a word
# Documents from which random segments are drawn; they are in memory together.
GROUP_SIZE = 1000

_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "token_type_ids": List(Value("int8")),
        "special_tokens_mask": List(Value("int8")),
        "next_sentence_label": Value("int64"),
        "offset_mapping": List(List(Value("int32"))),
        "cut_tokens": Value("int32"),
    }
)


def build_pretraining_dataset(
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int = 128,
    short_sequence_probability: float = 0.1,
    repeats: int = 1,
    seed: int = 0,
    num_proc: int | None = None,
) -> Dataset | IterableDataset:
    """Pack documents into pairs of segments for masked language modeling and next-sentence prediction.

    transformers' trainer takes the result with `DataCollatorForLanguageModeling(tokenizer)`; to mask whole words, use
    [`WholeWordMaskingCollator`] and `remove_unused_columns=False`.

    It is cached on disk until text, tokenizer or a setting changes. It does not depend on the number of processes.

    Args:
        documents (`Dataset` or `IterableDataset`): The documents, with the column `text`, as
            [`~hf_vanilla.data.load_documents`] returns them.
        tokenizer (`PreTrainedTokenizerBase`): A tokenizer with `[CLS]`, `[SEP]` and `[MASK]`.
        max_length (`int`): Most tokens of an example, the three special ones included.
        short_sequence_probability (`float`): Share of examples with a random shorter target length.
        repeats (`int`): Number of passes over the documents, each with other pairs (the authors' `dupe_factor`).
        seed (`int`): Seed of all random choices.
        num_proc (`int`, *optional*): Number of processes; not for streaming data.

    Returns:
        The same kind of dataset, with `input_ids`, `token_type_ids`, `special_tokens_mask`, `next_sentence_label` (0
        if B follows A, 1 if it is random) and `offset_mapping` (artificial offsets, adjacent within a word).

    Raises:
        ValueError: if there is only one document, or all documents have only one sentence; the tokenizer lacks a
            token; a number is out of its range; or `num_proc` is given for streaming data.

    Source: Devlin et al. 2018, 3.1 and A.2.
    """
    _check_tokenizer(tokenizer)
    _check_settings(tokenizer, max_length, short_sequence_probability, repeats)
    builder = _PairBuilder(tokenizer, max_length, short_sequence_probability, repeats, seed)
    if isinstance(documents, IterableDataset):
        if num_proc is not None:
            raise ValueError("`num_proc` is not for streaming data; use `dataloader_num_workers` in training.")
        groups = documents.select_columns(["text"]).batch(GROUP_SIZE)
        pairs = groups.map(builder, batched=True, batch_size=1, with_indices=True, remove_columns=["text"])
        return pairs.remove_columns(["cut_tokens"]).cast(_without_counts())
    with_text = itertools.islice((text for text in documents["text"] if text and text.strip()), 2)
    if (count := sum(1 for _ in with_text)) < 2:
        raise ValueError(
            f"`documents` must be at least 2 for next-sentence prediction, got {count} with text: random "
            "segments come from other documents. Separate documents with blank lines, or train without this task."
        )
    group_size = _group_size(len(documents))
    groups = documents.select_columns(["text"]).batch(group_size)
    pairs = groups.map(
        builder,
        batched=True,
        batch_size=1,
        with_indices=True,
        remove_columns=["text"],
        features=_FEATURES,
        num_proc=num_proc,
        desc=f"building pairs of {max_length} tokens, {group_size} documents at a time",
        # The default hashes the tokenizer, whose state changes with use.
        new_fingerprint=Hasher.hash([groups._fingerprint, builder.settings()]),
    )
    _report(pairs, len(documents), max_length)
    return pairs.remove_columns(["cut_tokens"])


def build_masked_language_dataset(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int = 128,
    num_proc: int | None = None,
) -> Dataset:
    """Pack documents into single segments for masked language modeling alone: as many whole sentences as fit.

    Args:
        documents (`Dataset`): The documents, with the column `text`.
        tokenizer (`PreTrainedTokenizerBase`): A tokenizer with `[CLS]`, `[SEP]` and `[MASK]`.
        max_length (`int`): Most tokens of an example, the two special ones included; a longer sentence continues in
            the next.
        num_proc (`int`, *optional*): Number of processes.

    Returns:
        `Dataset`: with `input_ids`, `token_type_ids`, `special_tokens_mask` and `offset_mapping`.

    Raises:
        ValueError: if the tokenizer lacks a token, or `max_length` is out of its range.

    Source: Liu et al. 2019 (RoBERTa), 4.2 (DOC-SENTENCES).
    """
    _check_tokenizer(tokenizer)
    _check_settings(tokenizer, max_length, 0.0, 1)
    builder = _SegmentBuilder(tokenizer, max_length)
    names = ("input_ids", "token_type_ids", "special_tokens_mask", "offset_mapping")
    return documents.map(
        builder,
        batched=True,
        remove_columns=documents.column_names,
        features=Features({name: _FEATURES[name] for name in names}),
        num_proc=num_proc,
        desc=f"building segments of {max_length} tokens",
        new_fingerprint=Hasher.hash([documents._fingerprint, builder.settings()]),
    )


class WholeWordMaskingCollator(DataCollatorForLanguageModeling):
    """transformers' collator with `whole_word_mask=True`, extended to examples of different lengths.

    Needs the columns `offset_mapping` and `special_tokens_mask`, so set `remove_unused_columns=False` in the training
    arguments. As in transformers' collator, 100 % of the chosen words become `[MASK]`.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the examples.
        mlm_probability (`float`): Share of tokens to predict.
        seed (`int`, *optional*): Seed of the masks; torch's global generator by default.

    Raises:
        ValueError: if the tokenizer has no pieces inside of words (`##`), and so can't tell what a word is.

    Source: the later "whole word masking" models of Devlin et al. 2018.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, mlm_probability: float = 0.15, seed: int | None = None
    ) -> None:
        if not any(token.startswith(INNER_PIECE) for token in tokenizer.get_vocab()):
            raise ValueError(
                f"`tokenizer` must mark the pieces inside of words ({INNER_PIECE}) for whole-word masking, this one "
                "does not. Take a WordPiece tokenizer, or mask single pieces."
            )
        super().__init__(
            tokenizer,
            mlm_probability=mlm_probability,
            mask_replace_prob=1.0,
            random_replace_prob=0.0,
            whole_word_mask=True,
            seed=seed,
        )

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Pad offsets, then call transformers' collator.

        Args:
            examples (`list[dict[str, Any]]`): Rows of a dataset of this module.

        Returns:
            `dict[str, Any]`: a batch with `labels`.

        Raises:
            ValueError: if a column that marks words is missing.
        """
        for name in ("offset_mapping", "special_tokens_mask"):
            if name not in examples[0]:
                raise ValueError(
                    f"Whole-word masking needs the column `{name}`; set `remove_unused_columns=False` in the training "
                    "arguments, or the trainer drops it."
                )
        longest = max(len(example["input_ids"]) for example in examples)
        padded = [
            {
                **example,
                "offset_mapping": [*example["offset_mapping"], *[[0, 0]] * (longest - len(example["input_ids"]))],
            }
            for example in examples
        ]
        return super().torch_call(padded)


class ShiftedPositionsCollator:
    """Lets the positions of some examples start at a random place, so that short examples teach late positions, too.

        as they are     [CLS] a b [SEP] c [SEP]     0 1 2 3 4 5
        shifted         [CLS] d [SEP] e f [SEP]     7 8 9 10 11 12      at most to `max_positions` - 1

    Args:
        collator (`Callable`): Makes a batch of examples, like `DataCollatorForLanguageModeling(tokenizer)`.
        probability (`float`): Share of the examples that are shifted, by equally likely numbers of positions.
        max_positions (`int`): Positions of the model, its `max_position_embeddings`.

    Raises:
        ValueError: if `probability` is not between 0 and 1.

    Source: Kiyono et al. 2021, "SHAPE: Shifted Absolute Position Embedding for Transformers", where all are shifted.
    """

    def __init__(
        self, collator: Callable[[list[dict[str, Any]]], Any], probability: float, max_positions: int
    ) -> None:
        if not 0 <= probability <= 1:
            raise ValueError(f"`probability` must be from 0 to 1, got {probability}; give the share of the examples.")
        self.collator = collator
        self.probability = probability
        self.max_positions = max_positions

    def __call__(self, examples: list[dict[str, Any]]) -> Any:
        """Collate with random numbers of torch's global generator.

        Args:
            examples (`list[dict[str, Any]]`): Rows with `input_ids`.

        Returns:
            The collator's batch, and in it `position_ids` (batch, length).

        Raises:
            ValueError: if the batch has more tokens in a row than the model has positions.
        """
        batch = self.collator(examples)
        rows, length = batch["input_ids"].shape
        if length > self.max_positions:
            raise ValueError(
                f"`max_positions` ({self.max_positions}) must be at least the length of the examples, got {length} "
                "tokens; give shorter ones, or the model more positions."
            )
        shifts = torch.randint(self.max_positions - length + 1, (rows, 1))
        batch["position_ids"] = torch.arange(length) + shifts * (torch.rand(rows, 1) < self.probability)
        return batch


def mask_statically(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    probability: float = 0.15,
    max_predictions: int = 20,
    seed: int = 0,
    num_proc: int | None = None,
) -> Dataset:
    """Mask an exact number of tokens in each example once, as the authors' code does.

    In an example of n tokens, min(`max_predictions`, max(1, round(n * `probability`))) tokens are chosen, none of them
    special; 80 % of these become `[MASK]`, 10 % a random token, and 10 % are unchanged. Use
    `DataCollatorForTokenClassification(tokenizer)`, which pads `labels`.

    Args:
        dataset (`Dataset`): Result of [`build_pretraining_dataset`].
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        probability (`float`): Share of tokens to predict.
        max_predictions (`int`): Most tokens to predict in an example: the authors' 20 at length 128, 77 or 80 at 512.
        seed (`int`): Seed of all random choices.
        num_proc (`int`, *optional*): Number of processes.

    Returns:
        `Dataset`: with masked `input_ids`, and `labels`, -100 where nothing is predicted.

    Raises:
        ValueError: if the tokenizer lacks a token, or a number is out of its range.

    Source: Devlin et al. 2018, A.1; `create_masked_lm_predictions` of the authors' code.
    """
    _check_tokenizer(tokenizer)
    if not 0 < probability < 1:
        raise ValueError(f"`probability` must be between 0 and 1, got {probability}.")
    check_integer("max_predictions", max_predictions)
    ordinary = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    masker = _StaticMasker(tokenizer.mask_token_id, np.array(ordinary), probability, max_predictions, seed)
    features = Features({**dataset.features, "labels": List(Value("int32"))})
    return dataset.map(
        masker, with_indices=True, features=features, num_proc=num_proc, desc="masking", load_from_cache_file=True
    )


class _SentenceTokenizer:
    """Tokenizes documents sentence by sentence."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.start: int = tokenizer.cls_token_id
        self.end: int = tokenizer.sep_token_id
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self.is_inner = np.array([token.startswith(INNER_PIECE) for token in tokens])

    def settings(self) -> list[Any]:
        """Return everything that the result depends on, except for the documents."""
        backend = tokenizer_settings(self.tokenizer.backend_tokenizer.to_str())
        return [
            type(self).__name__,
            BUILDER_VERSION,
            json.dumps(backend, sort_keys=True),
            self.start,
            self.end,
            self.max_length,
        ]

    def sentences_of(self, texts: list[str]) -> list[Sentences]:
        """Tokenize texts sentence by sentence. Special tokens in them are read as plain text."""
        documents = [split_sentences(text or "") for text in texts]  # a row may be null
        flat = [sentence for document in documents for sentence in document]
        if not flat:
            return [[] for _ in documents]
        encoded = iter(
            self.tokenizer(
                flat,
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                split_special_tokens=True,
                verbose=False,
            )["input_ids"]
        )
        return [[ids for ids in (next(encoded) for _ in document) if ids] for document in documents]

    def offsets(self, input_ids: list[int]) -> list[list[int]]:
        """Return artificial offsets: adjacent within a word, with gaps between words."""
        starts = np.arange(len(input_ids)) * 2
        ends = starts + 1
        follows = np.append(self.is_inner[input_ids[1:]], False)
        return np.stack((starts, ends + follows), axis=1).tolist()


class _PairBuilder(_SentenceTokenizer):
    """Builds pairs from a group of documents; called by `datasets.map`, with batches of one group."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        short_sequence_probability: float,
        repeats: int,
        seed: int,
    ) -> None:
        super().__init__(tokenizer, max_length)
        self.short_sequence_probability = short_sequence_probability
        self.repeats = repeats
        self.seed = seed

    def settings(self) -> list[Any]:
        """Return everything that the pairs depend on, except for the documents."""
        return [*super().settings(), self.short_sequence_probability, self.repeats, self.seed]

    def __call__(self, batch: dict[str, list[list[str]]], indices: list[int]) -> dict[str, list[Any]]:
        """Build the pairs of one group."""
        columns: dict[str, list[Any]] = {name: [] for name in _FEATURES}
        for texts, index in zip(batch["text"], indices, strict=True):
            documents = [document for document in self.sentences_of(texts) if document]
            for repeat in range(self.repeats):
                generator = np.random.default_rng((self.seed, index, repeat))
                for number in range(len(documents)):
                    for pair in self._pairs_of(documents, number, generator):
                        self._append(columns, *pair)
        return columns

    def _pairs_of(
        self, documents: list[Sentences], number: int, generator: np.random.Generator
    ) -> Iterator[tuple[list[int], list[int], bool, int]]:
        """Yield (A, B, whether B is random, number of truncated tokens) of one document."""
        document = documents[number]
        room = self.max_length - SPECIAL_TOKENS_OF_A_PAIR
        start = 0
        while start < len(document):
            is_short = generator.random() < self.short_sequence_probability
            target = int(generator.integers(2, room + 1)) if is_short else room
            stop, length = start, 0
            while stop < len(document) and length < target:
                length += len(document[stop])
                stop += 1
            middle = start + 1 if stop - start < 2 else int(generator.integers(start + 1, stop))
            first = [token for sentence in document[start:middle] for token in sentence]
            is_random = stop - start == 1 or generator.random() < 0.5
            if is_random and len(documents) > 1:
                other = (number + 1 + int(generator.integers(len(documents) - 1))) % len(documents)
                second = _random_segment(documents[other], target - len(first), generator)
                stop = middle  # the next pair starts with the unused sentences
            elif stop - start == 1:  # no next sentence within the target length, and no other document
                start = stop
                continue
            else:
                is_random = False
                second = [token for sentence in document[middle:stop] for token in sentence]
            cut = _truncate(first, second, room, generator)
            yield first, second, is_random, cut
            start = stop

    def _append(
        self, columns: dict[str, list[Any]], first: list[int], second: list[int], is_random: bool, cut: int
    ) -> None:
        """Append a pair to the columns of the dataset."""
        input_ids = [self.start, *first, self.end, *second, self.end]
        columns["input_ids"].append(input_ids)
        columns["token_type_ids"].append([0] * (len(first) + 2) + [1] * (len(second) + 1))
        columns["special_tokens_mask"].append([1, *[0] * len(first), 1, *[0] * len(second), 1])
        columns["next_sentence_label"].append(int(is_random))
        columns["offset_mapping"].append(self.offsets(input_ids))
        columns["cut_tokens"].append(cut)


class _SegmentBuilder(_SentenceTokenizer):
    """Builds single segments from documents; called by `datasets.map`."""

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        """Build the segments of a batch of documents."""
        room = self.max_length - 2
        columns: dict[str, list[Any]] = {
            name: [] for name in ("input_ids", "token_type_ids", "special_tokens_mask", "offset_mapping")
        }
        for document in self.sentences_of(batch["text"]):
            segment: list[int] = []
            for sentence in [*document, []]:
                if segment and (len(segment) + len(sentence) > room or not sentence):
                    self._append(columns, segment)
                    segment = []
                segment = segment + sentence
                while len(segment) > room:
                    self._append(columns, segment[:room])
                    segment = segment[room:]
        return columns

    def _append(self, columns: dict[str, list[Any]], segment: list[int]) -> None:
        """Append a segment to the columns of the dataset."""
        input_ids = [self.start, *segment, self.end]
        columns["input_ids"].append(input_ids)
        columns["token_type_ids"].append([0] * len(input_ids))
        columns["special_tokens_mask"].append([1, *[0] * len(segment), 1])
        columns["offset_mapping"].append(self.offsets(input_ids))


class _StaticMasker:
    """Masks one example; called by `datasets.map`."""

    def __init__(
        self, mask_id: int, ordinary_ids: np.ndarray, probability: float, max_predictions: int, seed: int
    ) -> None:
        self.mask_id = mask_id
        self.ordinary_ids = ordinary_ids
        self.probability = probability
        self.max_predictions = max_predictions
        self.seed = seed

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        """Choose tokens and replace them."""
        generator = np.random.default_rng((self.seed, index))
        input_ids = np.array(row["input_ids"])
        candidates = np.flatnonzero(np.array(row["special_tokens_mask"]) == 0)
        count = min(self.max_predictions, max(1, round(len(input_ids) * self.probability)), len(candidates))
        chosen = generator.permutation(candidates)[:count]
        labels = np.full_like(input_ids, -100)
        labels[chosen] = input_ids[chosen]
        draw = generator.random(count)
        input_ids[chosen[draw < 0.8]] = self.mask_id
        replaced = chosen[draw >= 0.9]
        input_ids[replaced] = generator.choice(self.ordinary_ids, len(replaced))
        return {**row, "input_ids": input_ids.tolist(), "labels": labels.tolist()}


def _random_segment(document: Sentences, length: int, generator: np.random.Generator) -> list[int]:
    """Return consecutive sentences, from a random one on, until they have `length` tokens."""
    segment: list[int] = []
    for sentence in document[int(generator.integers(len(document))) :]:
        segment.extend(sentence)
        if len(segment) >= length:
            break
    return segment


def _truncate(first: list[int], second: list[int], room: int, generator: np.random.Generator) -> int:
    """Truncate the longer side, at a random end, token by token until both fit; return the number of tokens."""
    excess = len(first) + len(second) - room
    if excess <= 0:
        return 0
    # Token by token, the longer side shrinks to the length of the other; then both shrink in turn.
    from_first = min(excess, max(0, len(first) - len(second)))
    from_second = min(excess, max(0, len(second) - len(first)))
    rest = excess - from_first - from_second
    for side, count in ((first, from_first + rest // 2), (second, from_second + rest - rest // 2)):
        front = int(generator.binomial(count, 0.5))
        del side[:front]
        del side[len(side) - (count - front) :]
    return excess


def _group_size(documents: int) -> int:
    """Return how many documents form a group, such that the last group has more than one."""
    groups = max(1, round(documents / GROUP_SIZE))
    size = -(-documents // groups)
    while documents % size == 1:
        size += 1
    return size


def _without_counts() -> Features:
    """Return the features of the finished examples."""
    return Features({name: feature for name, feature in _FEATURES.items() if name != "cut_tokens"})


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise unless a tokenizer has BERT's special tokens."""
    for name in ("cls_token", "sep_token", "mask_token"):
        if getattr(tokenizer, name) is None:
            raise ValueError(f"`tokenizer` must have a `{name}`; `train_wordpiece_tokenizer` makes such a tokenizer.")


def _check_settings(
    tokenizer: PreTrainedTokenizerBase, max_length: int, short_sequence_probability: float, repeats: int
) -> None:
    """Raise if a setting is out of its range."""
    if not MINIMUM_LENGTH <= max_length <= tokenizer.model_max_length:
        raise ValueError(
            f"`max_length` must be between {MINIMUM_LENGTH} and the tokenizer's `model_max_length` "
            f"({tokenizer.model_max_length}), got {max_length}."
        )
    if not 0 <= short_sequence_probability <= 1:
        raise ValueError(f"`short_sequence_probability` must be in [0, 1], got {short_sequence_probability}.")
    check_integer("repeats", repeats)


def _report(pairs: Dataset, documents: int, max_length: int) -> None:
    """Log statistics of the pairs, and raise if all of them are random."""
    labels = np.asarray(pairs.data.column("next_sentence_label"))
    if not len(labels):
        raise ValueError("`documents` must have text, but all of them are empty.")
    if labels.all():
        raise ValueError(
            "`documents` must have several sentences each for next-sentence prediction, but all have only one. Join "
            "the sentences of a document, or train without this task."
        )
    cut = int(np.asarray(pairs.data.column("cut_tokens")).sum())
    logger.info(
        f"{documents:,} documents: {len(labels):,} pairs of up to {max_length} tokens, {labels.mean():.1%} with a "
        f"second segment from another document; {cut:,} tokens truncated to fit."
    )
