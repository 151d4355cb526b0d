"""From lists of texts to batches of about equally long ones, and back into order."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import cached_file, logging


def load_tokenizers(name_or_path: str | os.PathLike) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """Load the tokenizers of source and target of a model.

    Args:
        name_or_path (`str`): A folder or a name on the Hub.

    Returns:
        `tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]`: the tokenizer of the source and that of the target.
        They are one object unless there is another one in the subfolder `target_tokenizer`.

    Raises:
        OSError: if there is no tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    return tokenizer, load_target_tokenizer(name_or_path) or tokenizer


logger = logging.get_logger(__name__)


Found = TypeVar("Found")


# Where a model with two vocabularies keeps the target's tokenizer, beside its own files.
TARGET_TOKENIZER = "target_tokenizer"


# Most tokens of a text where neither tokenizer nor model has a limit; more would take memory with the square of it.
DEFAULT_MAX_LENGTH = 1024


# A shorter text counts as one of this many tokens: what it is translated to takes memory, too.
SHORT = 8


def load_target_tokenizer(name_or_path: str | os.PathLike) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of the target, if a model has one of its own.

    Args:
        name_or_path (`str`): A folder or a name on the Hub.

    Returns:
        `PreTrainedTokenizerBase`: the tokenizer in the subfolder `target_tokenizer`, or `None` where there is none.
    """
    config = f"{TARGET_TOKENIZER}/tokenizer_config.json"
    if not os.path.isdir(name_or_path):
        try:
            validate_repo_id(str(name_or_path))
        except HFValidationError:  # a folder that is gone, such as a temporary one
            return None
    if cached_file(name_or_path, config, _raise_exceptions_for_missing_entries=False) is None:
        return None
    return AutoTokenizer.from_pretrained(name_or_path, subfolder=TARGET_TOKENIZER)


def default_max_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Find out how many tokens a text may have.

    Args:
        model (`PreTrainedModel`): The model, whose `max_position_embeddings` count unless its positions are sinusoids.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer, whose `model_max_length` counts if it has one.

    Returns:
        `int`: the smaller limit, at most 1024.
    """
    has_table = getattr(model.config, "position_type", "learned") == "learned"
    positions = (
        getattr(model.config, "max_position_embeddings", DEFAULT_MAX_LENGTH) if has_table else DEFAULT_MAX_LENGTH
    )
    return min(DEFAULT_MAX_LENGTH, positions, tokenizer.model_max_length)


def as_texts(name: str, given: Any) -> list[str]:
    """Return one text or several as a list.

    Args:
        name (`str`): What the caller's argument is called.
        given (`str` or `Iterable[str]`): What was given.

    Returns:
        `list[str]`: the texts.

    Raises:
        TypeError: if it is something else.
    """
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise TypeError(f"`{name}` must be a string or a list of strings, got {type(given).__name__}.")
    texts = list(given)
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise TypeError(f"`{name}` must hold strings, but number {number} is {type(text).__name__}.")
    return texts


def without_lone_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which no encoding can write, by the replacement character U+FFFD.

    Args:
        text (`str`): Any text.

    Returns:
        `str`: the text; the same one if there is nothing to replace.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int, *, with_offsets: bool = False
) -> tuple[list[dict[str, list]], int]:
    """Tokenize texts, special tokens in them being text like any other, and cut those that are too long on the right.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
        texts (`Sequence[str]`): The texts.
        max_length (`int`): Most tokens that a text may have, `</s>` included.
        with_offsets (`bool`, defaults to `False`): Whether to tell which characters each token stands for.

    Returns:
        `tuple[list[dict[str, list]], int]`: for each text its `input_ids`, and with offsets its `offset_mapping` and
        `special_tokens_mask`; and the number of texts that were cut.
    """
    if not texts:
        return [], 0
    options = dict(
        split_special_tokens=True,
        return_attention_mask=False,
        return_offsets_mapping=with_offsets,
        return_special_tokens_mask=with_offsets,
        verbose=False,
    )
    columns = tokenizer(list(texts), **options)
    encoded = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    too_long = [number for number, text in enumerate(encoded) if len(text["input_ids"]) > max_length]
    for number in too_long:
        # the tokenizer itself cuts, so that what it puts at the end of a text is still there
        encoded[number] = dict(tokenizer(texts[number], truncation=True, max_length=max_length, **options))
    return encoded, len(too_long)


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int, name: str) -> list[list[int]]:
    """Tokenize any texts, and warn of those that were cut.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
        texts (`Sequence[str]`): The texts; lone surrogates in them are replaced.
        max_length (`int`): Most tokens that a text may have, `</s>` included.
        name (`str`): What the warning calls the texts.

    Returns:
        `list[list[int]]`: the token ids of each text.
    """
    encoded, cut = encode_texts(tokenizer, [without_lone_surrogates(text) for text in texts], max_length)
    if cut:
        logger.warning(f"{cut} of {len(texts)} {name} were cut to {max_length} tokens; the left part is kept.")
    return [text["input_ids"] for text in encoded]


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group texts of about the same length into batches, the longest first.

    Args:
        lengths (`Sequence[int]`): The texts' lengths in tokens.
        max_tokens (`int`): Most tokens of a batch, padding included. A text that is longer gets a batch of its own.

    Returns:
        `list[list[int]]`: for each batch the numbers of its texts.

    Raises:
        ValueError: if `max_tokens` is not positive.
    """
    if max_tokens < 1:
        raise ValueError(f"`max_tokens_per_batch` must be at least 1, got {max_tokens}.")
    batches: list[list[int]] = []
    room = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if room < 1:
            batches.append([])
            room = max(1, max_tokens // max(1, lengths[number]))
        batches[-1].append(number)
        room -= 1
    return batches


def map_batches(
    function: Callable[[list[list[int]]], Sequence[Found]], ids: Sequence[list[int]], max_tokens: int
) -> list[Found]:
    """Apply a function to batches of about equally long sequences.

    Args:
        function (`Callable`): What gives, for a batch of token ids, one result for each sequence.
        ids (`Sequence[list[int]]`): The token ids of all sequences.
        max_tokens (`int`): Most tokens of a batch, padding included.

    Returns:
        `list`: the results in the order of the sequences.
    """
    found: dict[int, Found] = {}
    for batch in batches_by_length([max(len(sequence), SHORT) for sequence in ids], max_tokens):
        found.update(zip(batch, function([ids[number] for number in batch]), strict=True))
    return [found[number] for number in range(len(ids))]


def padded(sequences: Sequence[Sequence[int]], padding: int, device: torch.device) -> torch.Tensor:
    """Put sequences into one tensor.

    Args:
        sequences (`Sequence[Sequence[int]]`): Token ids.
        padding (`int`): What to put behind the shorter ones.
        device (`torch.device`): Where the tensor shall be.

    Returns:
        `torch.LongTensor` of shape `(batch, length)`: the tensor.
    """
    tensors = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    return pad_sequence(tensors, batch_first=True, padding_value=padding).to(device)


__all__ = [
    "TARGET_TOKENIZER",
    "as_texts",
    "batches_by_length",
    "default_max_length",
    "encode_texts",
    "load_target_tokenizer",
    "map_batches",
    "padded",
    "token_ids",
    "without_lone_surrogates",
]
