"""What the metrics over pairs of text have in common: checked input, any number of references, nothing on disk."""

import abc
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import datasets
import evaluate


TEXT_FEATURES = datasets.Features(
    {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
)


class CorpusMetric(evaluate.Metric, abc.ABC):
    """An `evaluate.Metric` over hypotheses with one or several references each.

    One process keeps its examples in memory: it writes no file, so any number of processes can score at once. Only
    with `num_process` above 1, where the processes add to one score, they exchange examples through files in
    `cache_dir`, as `evaluate` does.

    Subclasses name the metric in `_info`, with `TEXT_FEATURES`, and score in `_compute`.

    Args:
        config_name (`str`, *optional*): Name under which `evaluate` files the metric.
        keep_in_memory (`bool`, *optional*, defaults to `True`): Taken for the sake of `evaluate.load`; the examples of
            a single process are in memory always.
        num_process (`int`, *optional*, defaults to 1): Number of processes that add examples to one score.
        **kwargs (`Any`): As `evaluate.Metric` takes them: `cache_dir`, `process_id`, `experiment_id`, `timeout`, ...
    """

    def __init__(
        self, config_name: str | None = None, keep_in_memory: bool = True, num_process: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(config_name=config_name, keep_in_memory=num_process == 1, num_process=num_process, **kwargs)

    def add_batch(
        self,
        *,
        predictions: Sequence[str] | None = None,
        references: Sequence[str | Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add hypotheses and their references to what `compute` scores.

        Args:
            predictions (`Sequence[str]`): Hypotheses.
            references (`Sequence[str | Sequence[str]]`): For each hypothesis its reference, or a list of references.
            **kwargs (`Any`): None are known; `evaluate` names those that are given.

        Raises:
            TypeError: if either is missing, is a single string, or holds something else than strings.
            ValueError: if their counts differ, or a hypothesis has no reference.
        """
        hypotheses = _checked_predictions(predictions)
        super().add_batch(predictions=hypotheses, references=_reference_lists(references, len(hypotheses)), **kwargs)

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Add one hypothesis and its references to what `compute` scores.

        Args:
            prediction (`str`): The hypothesis.
            reference (`str | Sequence[str]`): Its reference, or a list of references.
            **kwargs (`Any`): None are known; `evaluate` names those that are given.

        Raises:
            TypeError: if either is missing or holds something else than strings.
            ValueError: if the list of references is empty.
        """
        self.add_batch(predictions=[prediction], references=[reference], **kwargs)

    def compute(
        self,
        *,
        predictions: Sequence[str] | None = None,
        references: Sequence[str | Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Score the given pairs together with all that were added since the last call.

        Args:
            predictions (`Sequence[str]`, *optional*): Hypotheses.
            references (`Sequence[str | Sequence[str]]`, *optional*): For each hypothesis its reference, or a list of
                references.
            **kwargs (`Any`): Settings of the metric.

        Returns:
            `dict[str, Any]`: the score and what it is made of; `None` in all processes but the first.

        Raises:
            TypeError: if either is given alone, is a single string, or holds something else than strings.
            ValueError: if their counts differ, a hypothesis has no reference, or there is nothing to score.
        """
        _check_not_empty(len(self), predictions, references)
        return super().compute(predictions=predictions, references=references, **kwargs)

    @abc.abstractmethod
    def _compute(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Score `predictions` against `references`, as many lists of strings; further arguments are settings."""

    def _build_data_dir(self) -> str:
        """Name the folder of the examples, which exists only where processes exchange them."""
        return "" if self.keep_in_memory else super()._build_data_dir()


def reference_streams(references: Sequence[Sequence[str]]) -> list[list[Any]]:
    """Turn the references of each hypothesis into the streams that sacreBLEU takes.

    Args:
        references (`Sequence[Sequence[str]]`): For each hypothesis its references.

    Returns:
        `list[list[str | None]]`: the first references of all hypotheses, the second references, and so on; `None`
        where a hypothesis has fewer.
    """
    return [list(stream) for stream in zip_longest(*references)]


def _check_not_empty(num_added: int, predictions: Sequence[str] | None, references: Sequence | None) -> None:
    if num_added == 0 and not predictions and not references:
        raise ValueError("`predictions` must hold at least one hypothesis, got none; there is nothing to score.")


def _checked_predictions(predictions: Sequence[str] | None) -> list[str]:
    if predictions is None or isinstance(predictions, str):
        raise TypeError(f"`predictions` must be a list of strings, got {type(predictions).__name__}.")
    for index, prediction in enumerate(predictions):
        if not isinstance(prediction, str):
            raise TypeError(f"`predictions` must be strings, got {type(prediction).__name__} at index {index}.")
    return list(predictions)


def _reference_lists(references: Sequence[str | Sequence[str]] | None, count: int) -> list[list[str]]:
    if references is None or isinstance(references, str):
        given = type(references).__name__
        raise TypeError(f"`references` must be a list of strings or of lists of strings, got {given}.")
    if len(references) != count:
        raise ValueError(
            f"`predictions` and `references` must be of equal number, got {count} and {len(references)}; "
            "several references of one hypothesis go into a list of their own."
        )
    lists = [[reference] if isinstance(reference, str) else reference for reference in references]
    for index, texts in enumerate(lists):
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"`references` must be strings or lists of strings, got {texts!r} at index {index}.")
        if not texts:
            raise ValueError(f"`references` must hold a reference for every hypothesis, got none at index {index}.")
    return [list(texts) for texts in lists]
