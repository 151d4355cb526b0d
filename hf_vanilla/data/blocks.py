"""GPT's pre-training examples: documents cut into blocks of equal length, without padding.

    documents:  a a a a a | b b | c c c c           | is the end-of-text token, $ below
    across:     $aaa aa$b b$cc cc$                  blocks of 4; the incomplete last one is dropped, or kept
    separate:   $aaa aa$ $bb$ $ccc c$               each document begins and ends with the token

No token of a block is padding and all but its first are predicted, so every position of a batch is learnt from.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .tokenization import tokenizer_settings


logger = logging.get_logger(__name__)

# Part of the cache's key: raise it when the same documents give other blocks.
BUILDER_VERSION = 1

MINIMUM_LENGTH = 2  # a token and the one that it predicts

_FEATURES = Features({"input_ids": List(Value("int32"))})


def build_blocks(
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    block_length: int = 512,
    across_documents: bool = True,
    keep_short: bool = False,
    num_proc: int | None = None,
) -> Dataset | IterableDataset:
    """Tokenize documents and cut them into blocks for causal language modeling.

    A table is cached on disk until text, tokenizer or a setting changes; a stream is cut during iteration, and gives
    the same blocks: one worker of a data loader cuts all of it, and a stream that continues from a state first reads
    again what comes before. transformers' trainer takes both with `DataCollatorForLanguageModeling(tokenizer,
    mlm=False)`, which makes the labels and pads short blocks; [`collate_blocks`] is quicker where no block is short.

    Args:
        documents (`Dataset` or `IterableDataset`): The documents, with the column `text`, as
            [`~hf_vanilla.data.load_documents`] returns them.
        tokenizer (`PreTrainedTokenizerBase`): A tokenizer with an `eos_token`, the end-of-text token. Special tokens
            in a document are read as plain text.
        block_length (`int`): Tokens of a block.
        across_documents (`bool`): Whether a block may hold several documents, joined by the end-of-text token: the
            paper's contiguous text. Otherwise each document begins a new block.
        keep_short (`bool`): Whether to keep the block shorter than `block_length` at the end of the text, or with
            `across_documents=False` at the end of each document. A single token is always dropped.
        num_proc (`int`, *optional*): Number of processes that tokenize; not for streaming data.

    Returns:
        The same kind of dataset, with `input_ids`.

    Raises:
        ValueError: if the tokenizer has no end-of-text token, `block_length` is out of its range, no document fills a
            block, or `num_proc` is given for streaming data.

    Source: Radford et al. 2018, 4.1.
    """
    _check_settings(tokenizer, block_length)
    encode = _DocumentTokenizer(tokenizer)
    settings: dict[str, Any] = {
        "block_length": block_length,
        "end_token_id": tokenizer.eos_token_id,
        "across_documents": across_documents,
        "keep_short": keep_short,
    }
    if isinstance(documents, IterableDataset):
        if num_proc is not None:
            raise ValueError("`num_proc` is not for streaming data; use `dataloader_num_workers` in training.")
        stream = documents.select_columns(["text"]).map(encode, batched=True, remove_columns=["text"])
        return IterableDataset.from_generator(
            _generate_blocks, features=_FEATURES, gen_kwargs={"documents": stream, **settings}
        )
    tokens = documents.map(
        encode,
        batched=True,
        remove_columns=documents.column_names,
        features=_FEATURES,
        num_proc=num_proc,
        desc="tokenizing documents",
        # The default hashes the tokenizer, whose state changes with use.
        new_fingerprint=Hasher.hash([documents._fingerprint, encode.settings()]),
    )
    if next(_generate_blocks(tokens, **settings), None) is None:
        raise ValueError(
            f"`documents` must fill at least one block of `block_length` ({block_length}) tokens, but do not. Give "
            "more text, a smaller `block_length`, or `keep_short=True`."
        )
    blocks = Dataset.from_generator(
        _generate_blocks, features=_FEATURES, gen_kwargs={"documents": tokens, **settings, "version": BUILDER_VERSION}
    )
    logger.info(f"{len(documents):,} documents: {len(blocks):,} blocks of {block_length} tokens.")
    return blocks


def collate_blocks(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack blocks of equal length; the labels are the tokens themselves, which a causal model shifts.

    Unlike transformers' collator it needs no padding token, and makes no attention mask.

    Args:
        examples (`list[dict[str, Any]]`): Rows of [`build_blocks`].

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `labels` of shape `(batch, length)`.

    Raises:
        ValueError: if the blocks differ in length.
    """
    lengths = {len(example["input_ids"]) for example in examples}
    if len(lengths) > 1:
        raise ValueError(
            f"`examples` must be blocks of one length, got lengths from {min(lengths)} to {max(lengths)}; use "
            "`DataCollatorForLanguageModeling(tokenizer, mlm=False)`, which pads short blocks."
        )
    input_ids = torch.tensor([example["input_ids"] for example in examples])
    return {"input_ids": input_ids, "labels": input_ids.clone()}


class _DocumentTokenizer:
    """Tokenizes whole documents without special tokens; called by `datasets.map`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def settings(self) -> list[Any]:
        """Return everything that the tokens depend on, except for the documents."""
        backend = tokenizer_settings(self.tokenizer.backend_tokenizer.to_str())
        return [type(self).__name__, BUILDER_VERSION, json.dumps(backend, sort_keys=True)]

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        """Tokenize a batch of documents."""
        encoded = self.tokenizer(
            [text or "" for text in batch["text"]],  # a row may be null
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            split_special_tokens=True,
            verbose=False,
        )
        return {"input_ids": encoded["input_ids"]}


def _generate_blocks(
    documents: Dataset | IterableDataset,
    block_length: int,
    end_token_id: int,
    across_documents: bool,
    keep_short: bool,
    version: int = BUILDER_VERSION,
) -> Iterator[dict[str, list[int]]]:
    """Yield the blocks of tokenized documents; `version` is part of the cache's key alone."""
    rest = [end_token_id]
    # By batches, workers of a data loader do not share a stream out: the one that cuts gets all of it.
    for tokens in itertools.chain.from_iterable(batch["input_ids"] for batch in documents.iter(batch_size=1000)):
        rest += [*tokens, end_token_id]
        complete = len(rest) - len(rest) % block_length
        for start in range(0, complete, block_length):
            yield {"input_ids": rest[start : start + block_length]}
        rest = rest[complete:]
        if not across_documents:
            if keep_short and len(rest) >= MINIMUM_LENGTH:
                yield {"input_ids": rest}
            rest = [end_token_id]
    if across_documents and keep_short and len(rest) >= MINIMUM_LENGTH:
        yield {"input_ids": rest}


def _check_settings(tokenizer: PreTrainedTokenizerBase, block_length: int) -> None:
    """Raise if the tokenizer has no end-of-text token, or the length is out of its range."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "`tokenizer` must have an `eos_token`, the end-of-text token; `train_gpt_tokenizer` makes such a one."
        )
    if not MINIMUM_LENGTH <= block_length <= tokenizer.model_max_length:
        raise ValueError(
            f"`block_length` must be between {MINIMUM_LENGTH} and the tokenizer's `model_max_length` "
            f"({tokenizer.model_max_length}), got {block_length}."
        )
