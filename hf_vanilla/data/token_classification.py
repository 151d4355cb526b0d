"""Tagged words for token classification, and their tokenization."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..models.checks import IGNORED_LABEL
from .files import quoted


logger = logging.get_logger(__name__)


def check_tagged_words(rows: Dataset, tokens_column: str, tags_column: str, where: str) -> None:
    """Check that every row has a list of words and a list of as many tags.

    Args:
        rows (`Dataset`): Rows with words and tags.
        tokens_column (`str`): Column of the words.
        tags_column (`str`): Column of their tags.
        where (`str`): Name of the dataset, for messages.

    Raises:
        ValueError: if a row has anything else; row and column are named.
    """
    for name, column in (("tokens_column", tokens_column), ("tags_column", tags_column)):
        for row, values in enumerate(rows[column][:], start=1):
            if not isinstance(values, list):
                raise ValueError(f"{where}, row {row}: `{name}` must be a list of strings, got {quoted(values)}.")
            for value in values:
                if not isinstance(value, str):
                    raise ValueError(
                        f"{where}, row {row}: `{name}` must contain only strings, or numbers that have names in a "
                        f"`ClassLabel` feature, but has {quoted(value)}."
                    )
    for row, (words, tags) in enumerate(zip(rows[tokens_column][:], rows[tags_column][:], strict=True), start=1):
        if len(words) != len(tags):
            raise ValueError(
                f"{where}, row {row}: `tags_column` must have as many entries as `tokens_column`, got {len(tags)} and "
                f"{len(words)}."
            )


def tag_names(tags: Sequence[Sequence[str]]) -> list[str]:
    """Collect the tags of a dataset.

    Args:
        tags (`Sequence[Sequence[str]]`): Tags of each sentence, such as `B-person`, `I-person` and `O`.

    Returns:
        `list[str]`: `O` first, then sorted by type, B before I.
    """
    return sorted({tag for row in tags for tag in row}, key=lambda tag: (tag != "O", tag[2:], tag))


def tokenize_tagged_words(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    names: Sequence[str],
    *,
    tokens_column: str = "tokens",
    tags_column: str = "tags",
    max_length: int = 128,
    label_all_pieces: bool = False,
) -> Dataset:
    """Tokenize words into subwords, and label the first subword of each word with the word's tag.

    Args:
        rows (`Dataset`): Rows with words and tags.
        tokenizer (`PreTrainedTokenizerBase`): A fast tokenizer.
        names (`Sequence[str]`): The tags, in the order of their ids.
        tokens_column (`str`): Column of the words, a list of strings.
        tags_column (`str`): Column of their tags, a list of strings.
        max_length (`int`): Most tokens of a sentence; a warning counts truncated ones.
        label_all_pieces (`bool`): Whether to label the other subwords of a word with its tag, too.

    Returns:
        `Dataset`: the model's inputs, and `labels`, -100 where there is none.

    Raises:
        ValueError: if a sentence has not as many tags as words, or a tag is unknown; the row is named.

    Source: Devlin et al. 2018, 5.3.
    """
    numbers = {name: number for number, name in enumerate(names)}
    for row, (words, tags) in enumerate(zip(rows[tokens_column][:], rows[tags_column][:], strict=True), start=1):
        if len(words) != len(tags):
            raise ValueError(
                f"Row {row}: `tags_column` must have as many entries as `tokens_column`, got {len(tags)} and "
                f"{len(words)}."
            )
        for tag in tags:
            if tag not in numbers:
                raise ValueError(f"Row {row}: a tag must be one of {quoted(names)}; got {quoted(tag)}.")
    encoded = tokenizer(
        rows[tokens_column][:], is_split_into_words=True, truncation=True, max_length=max_length, verbose=False
    )
    labels: list[list[int]] = []
    cut = 0
    for row, tags in enumerate(rows[tags_column][:]):
        words = encoded.word_ids(row)
        labels.append(_labels_of([numbers[tag] for tag in tags], words, label_all_pieces))
        cut += bool(encoded[row].overflowing)
    if cut:
        logger.warning(f"{cut} of {len(rows)} sentences were truncated to {max_length} tokens; the left part is kept.")
    columns: dict[str, Any] = dict(encoded)
    return Dataset.from_dict({**columns, "labels": labels})


def _labels_of(numbers: list[int], words: list[int | None], label_all_pieces: bool) -> list[int]:
    """Return the label of each token of a sentence."""
    labels = []
    previous = None
    for word in words:
        has_label = word is not None and (label_all_pieces or word != previous)
        labels.append(numbers[word] if has_label and word is not None else IGNORED_LABEL)
        previous = word
    return labels
