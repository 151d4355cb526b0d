"""Datasets and batches: parallel text, documents for pre-training, batches and streams, synthetic tasks."""

from .batching import LengthSortedBatchSampler, TokenBudgetBatchSampler
from .blocks import build_blocks, collate_blocks
from .documents import load_documents, split_sentences
from .parallel import load_parallel_dataset, tokenize_parallel_dataset
from .pretraining import (
    ShiftedPositionsCollator,
    WholeWordMaskingCollator,
    build_masked_language_dataset,
    build_pretraining_dataset,
    mask_statically,
)
from .python_documentation import python_documentation
from .streams import TokenBudgetStream
from .synthetic import copy_task, date_corpus


__all__ = [
    "LengthSortedBatchSampler",
    "ShiftedPositionsCollator",
    "TokenBudgetBatchSampler",
    "TokenBudgetStream",
    "WholeWordMaskingCollator",
    "build_blocks",
    "build_masked_language_dataset",
    "build_pretraining_dataset",
    "collate_blocks",
    "copy_task",
    "date_corpus",
    "load_documents",
    "load_parallel_dataset",
    "mask_statically",
    "python_documentation",
    "split_sentences",
    "tokenize_parallel_dataset",
]
