"""From lists of texts to batches of similar length, and back into order."""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import cached_file, logging

from .checks import check_integer, position_limit


logger = logging.get_logger(__name__)


Result = TypeVar("Result")


# Subfolder of a model with two vocabularies that holds the target's tokenizer.
TARGET_TOKENIZER = "target_tokenizer"


# Most tokens of a text where neither tokenizer nor model has a limit: memory grows with their square.
DEFAULT_MAX_LENGTH = 1024


# Shorter texts count as this many tokens: their translations take memory, too.
MIN_COUNTED_LENGTH = 8


# Texts that are tokenized at once: a tokenizer's own result takes many times the memory of the ids.
TEXTS_AT_ONCE = 10_000


def load_tokenizers(name_or_path: str | os.PathLike) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """Load a model's tokenizers of source and target.

    Args:
        name_or_path (`str`): A folder or a name on the Hub.

    Returns:
        `tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]`: the tokenizers of source and target. They are one
        object unless the subfolder `target_tokenizer` has another one.

    Raises:
        OSError: if there is no tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    return tokenizer, load_target_tokenizer(name_or_path) or tokenizer


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
        except HFValidationError:  # a folder that no longer exists, such as a temporary one
            return None
    if cached_file(name_or_path, config, _raise_exceptions_for_missing_entries=False) is None:
        return None
    return AutoTokenizer.from_pretrained(name_or_path, subfolder=TARGET_TOKENIZER)


def check_end_token(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that model and tokenizer agree on the token that ends a text, as those of two models often do not.

    Args:
        config (`PreTrainedConfig`): The model's config.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of what it writes.

    Raises:
        ValueError: if both have one, and not the same.
    """
    ends, given = getattr(config, "eos_token_id", None), tokenizer.eos_token_id
    if ends is not None and given is not None and given not in (ends if isinstance(ends, list) else [ends]):
        raise ValueError(
            f"`eos_token_id` of the model ({ends}) and of the tokenizer ({given}, {tokenizer.eos_token!r}) must be "
            "the same: do tokenizer and model belong together?"
        )


def check_target_tokenizer(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that a model with two vocabularies has two tokenizers, and that its texts end as the target's do.

    Args:
        config (`PreTrainedConfig`): The model's config.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the source.
        target_tokenizer (`PreTrainedTokenizerBase`): That of the target.

    Raises:
        ValueError: if they are one object, or the model's texts end with another token.
    """
    check_end_token(config, target_tokenizer)
    source_size = getattr(config, "source_vocab_size", None)
    if source_size is not None and not config.share_encoder_decoder_embeddings and target_tokenizer is tokenizer:
        raise ValueError(
            f"{config._name_or_path or 'The model'} has two vocabularies, of {source_size} and {config.vocab_size} "
            f"entries, but one tokenizer; save the target's in its subfolder {TARGET_TOKENIZER}. If both share one, "
            "set `source_vocab_size` to null in config.json."
        )


def default_max_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Find the length limit of a text.

    Args:
        model (`PreTrainedModel`): The model; its `max_position_embeddings` count unless its positions are sinusoids.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer, for its `model_max_length`.

    Returns:
        `int`: the smaller limit in tokens, at most 1024.
    """
    return min(DEFAULT_MAX_LENGTH, tokenizer.model_max_length, position_limit(model.config) or DEFAULT_MAX_LENGTH)


def without_lone_surrogates(text: str) -> str:
    """Replace lone halves of surrogate pairs, which have no encoding, by the replacement character U+FFFD.

    Args:
        text (`str`): Any text.

    Returns:
        `str`: the text.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int, *, with_offsets: bool = False
) -> tuple[list[dict[str, list]], int]:
    """Tokenize texts and truncate long ones on the right. Special tokens in a text are read as plain text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
        texts (`Sequence[str]`): The texts, without lone surrogates.
        max_length (`int`): Most tokens of a text, `</s>` included.
        with_offsets (`bool`, defaults to `False`): Whether to return the characters of each token.

    Returns:
        `tuple[list[dict[str, list]], int]`: for each text its `input_ids`, and with offsets its `offset_mapping` and
        `special_tokens_mask`; and the number of truncated texts.
    """
    options = dict(
        split_special_tokens=True,
        return_attention_mask=False,
        return_offsets_mapping=with_offsets,
        return_special_tokens_mask=with_offsets,
        verbose=False,
    )
    encoded: list[dict[str, list]] = []
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        columns = tokenizer(list(texts[start : start + TEXTS_AT_ONCE]), **options)
        encoded += [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    too_long = [number for number, text in enumerate(encoded) if len(text["input_ids"]) > max_length]
    for number in too_long:
        # The tokenizer itself truncates, so that the text still ends in its special tokens.
        encoded[number] = dict(tokenizer(texts[number], truncation=True, max_length=max_length, **options))
    return encoded, len(too_long)


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int, name: str) -> list[list[int]]:
    """Tokenize texts, and warn of truncated ones.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
        texts (`Sequence[str]`): The texts; lone surrogates in them are replaced.
        max_length (`int`): Most tokens of a text, `</s>` included.
        name (`str`): What the warning calls the texts.

    Returns:
        `list[list[int]]`: the token ids of each text.

    Raises:
        ValueError: if `max_length` is below 1.
        TypeError: if it is no integer.
    """
    check_integer("max_length", max_length)
    encoded, cut = encode_texts(tokenizer, [without_lone_surrogates(text) for text in texts], max_length)
    if cut:
        logger.warning(f"{cut} of {len(texts)} {name} were truncated to {max_length} tokens; the left part is kept.")
    return [text["input_ids"] for text in encoded]


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group texts of similar length into batches, the longest first.

    Args:
        lengths (`Sequence[int]`): Number of tokens of each text.
        max_tokens (`int`): Most tokens of a batch, padding included. A longer text gets a batch of its own.

    Returns:
        `list[list[int]]`: for each batch the numbers of its texts.

    Raises:
        ValueError: if `max_tokens` is not positive.
    """
    check_integer("max_tokens_per_batch", max_tokens)
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
    function: Callable[[list[list[int]]], Sequence[Result]], ids: Sequence[list[int]], max_tokens: int
) -> list[Result]:
    """Apply a function to batches of sequences of similar length.

    Args:
        function (`Callable`): Maps the token ids of a batch to one result per sequence.
        ids (`Sequence[list[int]]`): The token ids of all sequences.
        max_tokens (`int`): Most tokens of a batch, padding included.

    Returns:
        `list`: the results in the order of the sequences.
    """
    found: dict[int, Result] = {}
    for batch in batches_by_length([max(len(sequence), MIN_COUNTED_LENGTH) for sequence in ids], max_tokens):
        found.update(zip(batch, function([ids[number] for number in batch]), strict=True))
    return [found[number] for number in range(len(ids))]


def padded(sequences: Sequence[Sequence[int]], padding: int, device: torch.device) -> torch.Tensor:
    """Make one tensor of sequences, padded on the right.

    Args:
        sequences (`Sequence[Sequence[int]]`): Token ids.
        padding (`int`): Padding id.
        device (`torch.device`): Device of the tensor.

    Returns:
        `torch.LongTensor` of shape `(batch, length)`: the tensor.
    """
    tensors = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    return pad_sequence(tensors, batch_first=True, padding_value=padding).to(device)


def padded_inputs(model: PreTrainedModel, ids: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Make a model's inputs of sequences, padded on the right.

    Args:
        model (`PreTrainedModel`): The model.
        ids (`Sequence[Sequence[int]]`): Token ids.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `attention_mask` of shape `(batch, length)`.
    """
    masks = [[1] * len(sequence) for sequence in ids]
    input_ids = padded(ids, model.config.pad_token_id, model.device)
    return {"input_ids": input_ids, "attention_mask": padded(masks, 0, model.device)}
