"""Text in, batches out: parallel corpora, token-budget batches, synthetic tasks."""

from .batching import TokenBudgetBatchSampler, batch_cost, padding_efficiency, token_budget_batches
from .parallel import load_parallel_dataset, tokenize_parallel_dataset
from .synthetic import copy_task, date_corpus


__all__ = [
    "TokenBudgetBatchSampler",
    "batch_cost",
    "copy_task",
    "date_corpus",
    "load_parallel_dataset",
    "padding_efficiency",
    "token_budget_batches",
    "tokenize_parallel_dataset",
]
