"""Deprecated name of `hf_vanilla.data.tokenization`, until 0.3."""

import warnings

from .data.tokenization import (
    MINIMUM_VOCAB_SIZE,
    SPECIAL_TOKENS,
    WORDPIECE_SPECIAL_TOKENS,
    train_tokenizer,
    train_wordpiece_tokenizer,
)
from .models.text_batches import load_tokenizers


warnings.warn(
    "`hf_vanilla.tokenization` is now `hf_vanilla.data.tokenization`, and will be removed in 0.3.",
    FutureWarning,
    stacklevel=2,
)

__all__ = [
    "MINIMUM_VOCAB_SIZE",
    "SPECIAL_TOKENS",
    "WORDPIECE_SPECIAL_TOKENS",
    "load_tokenizers",
    "train_tokenizer",
    "train_wordpiece_tokenizer",
]
