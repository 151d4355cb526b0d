"""Base of the metrics over hypotheses and references: checked input, any number of references, no files."""

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

    Examples of a single process are in memory and not in a file, so any number of independent processes can score at
    once. Only with `num_process` above 1, processes share examples through files in `cache_dir`, as in `evaluate`.

    Subclasses describe the metric in `_info`, with `TEXT_FEATURES`, and compute it in `_compute`.

    Args:
        config_name (`str`, *optional*): Name of the metric's configuration in `evaluate`.
        keep_in_memory (`bool`, *optional*, defaults to `True`): Ignored, but needed by `evaluate.load`; the examples
            of a single process are always in memory.
        num_process (`int`, *optional*, defaults to 1): Number of processes that contribute to one score.
        **kwargs (`Any`): As for `evaluate.Metric`: `cache_dir`, `process_id`, `experiment_id`, `timeout`, ...
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
        """Add hypotheses and their references to the next `compute`.

        Args:
            predictions (`Sequence[str]`): Hypotheses.
            references (`Sequence[str | Sequence[str]]`): For each hypothesis its reference, or a list of references.
            **kwargs (`Any`): Not supported; `evaluate` names them in an error.

        Raises:
            TypeError: if either is missing, is a single string, or contains anything but strings.
            ValueError: if their counts differ, or a hypothesis has no reference.
        """
        hypotheses = _checked_predictions(predictions)
        super().add_batch(predictions=hypotheses, references=_reference_lists(references, len(hypotheses)), **kwargs)

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Add one hypothesis and its references to the next `compute`.

        Args:
            prediction (`str`): The hypothesis.
            reference (`str | Sequence[str]`): Its reference, or a list of references.
            **kwargs (`Any`): Not supported; `evaluate` names them in an error.

        Raises:
            TypeError: if either is missing or contains anything but strings.
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
        """Score the given pairs together with those that were added since the last call.

        Args:
            predictions (`Sequence[str]`, *optional*): Hypotheses.
            references (`Sequence[str | Sequence[str]]`, *optional*): For each hypothesis its reference, or a list of
                references.
            **kwargs (`Any`): Settings of the metric.

        Returns:
            `dict[str, Any]`: the score and its parts; `None` in all processes except the first.

        Raises:
            TypeError: if either is given alone, is a single string, or contains anything but strings.
            ValueError: if their counts differ, a hypothesis has no reference, or there is nothing to score.
        """
        _check_not_empty(len(self), predictions, references)
        return super().compute(predictions=predictions, references=references, **kwargs)

    @abc.abstractmethod
    def _compute(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Score `predictions` against `references`, one list of strings each; further arguments are settings."""

    def _build_data_dir(self) -> str:
        """Return the folder of the examples, which exists only if processes share them."""
        return "" if self.keep_in_memory else super()._build_data_dir()


def reference_streams(references: Sequence[Sequence[str]]) -> list[list[Any]]:
    """Arrange the references of each hypothesis in the streams that sacreBLEU expects.

    Args:
        references (`Sequence[Sequence[str]]`): For each hypothesis its references.

    Returns:
        `list[list[str | None]]`: the first references of all hypotheses, the second references, and so on; `None`
        where a hypothesis has fewer.
    """
    return [list(stream) for stream in zip_longest(*references)]


def _check_not_empty(num_added: int, predictions: Sequence[str] | None, references: Sequence | None) -> None:
    if num_added == 0 and all(texts is None or len(texts) == 0 for texts in (predictions, references)):
        raise ValueError("`predictions` must have at least one hypothesis, got none.")


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
            f"`predictions` and `references` must be equal in number, got {count} and {len(references)}; "
            "put several references of one hypothesis into a list."
        )
    lists = [[reference] if isinstance(reference, str) else reference for reference in references]
    for index, texts in enumerate(lists):
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"`references` must be strings or lists of strings, got {texts!r} at index {index}.")
        if not texts:
            raise ValueError(f"`references` must have a reference for every hypothesis, got none at index {index}.")
    return [list(texts) for texts in lists]
