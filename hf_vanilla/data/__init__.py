"""Text in, batches out: parallel corpora, token-budget batches, synthetic tasks."""

from .batching import LengthSortedBatchSampler, TokenBudgetBatchSampler
from .parallel import load_parallel_dataset, tokenize_parallel_dataset
from .synthetic import copy_task, date_corpus


__all__ = [
    "LengthSortedBatchSampler",
    "TokenBudgetBatchSampler",
    "copy_task",
    "date_corpus",
    "load_parallel_dataset",
    "tokenize_parallel_dataset",
]
