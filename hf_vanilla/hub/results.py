"""Scores and figures of results files."""

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open


class Figure(NamedTuple):
    """A score.

    Attributes:
        dataset: What it was measured on.
        metric: Name of the metric as the Hub knows it.
        name: What people call it.
        value: The score.
    """

    dataset: str
    metric: str
    name: str
    value: float


# What a trainer measures beside scores.
NO_SCORES = ("loss", "perplexity", "gen_len", "runtime", "per_second", "epoch")


def _figure(dataset: str, score: str, value: float, of: str = "") -> Figure:
    metric, name = SCORES.get(score, (score, score.replace("_", " ")))
    return Figure(dataset, metric, name + of, round(value, 2 if metric in ("bleu", "chrf") else 4))


def _count_parameters(root: Path) -> int:
    """Count the weights of a folder without reading them."""
    count = 0
    for path in root.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON file that a training leaves, if there is one."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


# For each score of the result files: its name on the Hub, and what it is called where models are compared.
SCORES = {
    "bleu": ("bleu", "BLEU"),
    "chrf": ("chrf", "chrF"),
    "mlm_loss": ("loss", "loss of masked tokens, nats"),
    "mlm_accuracy": ("accuracy", "accuracy of masked tokens"),
    "nsp_accuracy": ("accuracy", "accuracy of next sentences"),
    "matthews": ("matthews_correlation", "Matthews correlation"),
    "pearson": ("pearsonr", "Pearson correlation"),
    "spearman": ("spearmanr", "Spearman correlation"),
}


def results_of_folder(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Gather what a training has left beside its model.

    Args:
        folder (`str`):
            The folder.

    Returns:
        `dict[str, Any]`: number of `parameters`; `scores` for each set, from `eval_results.json`, as the training
        scripts write it, or `scores.json`, as fine-tunings do; `notes`, about the length of the training.
    """
    root = Path(folder)
    state, trained = _read(root / "trainer_state.json"), _read(root / "train_results.json")
    notes = {"updates": f"{state['global_step']:,}"} if state.get("global_step") else {}
    if "epoch" in trained:
        notes["epochs"] = f"{trained['epoch']:.4g}"
    if "train_runtime" in trained:
        notes["minutes since the last start"] = f"{trained['train_runtime'] / 60:.1f}"
    scores = _read(root / "scores.json")
    measured = _read(root / "eval_results.json")
    if measured:
        scores = {"validation": {name.removeprefix("eval_"): value for name, value in measured.items()}}
    return {"parameters": _count_parameters(root), "scores": scores, "notes": notes}


def figures_of(results: dict[str, Any], seed: str | None = None) -> list[Figure]:
    """List the scores of a file of results.

    Args:
        results (`dict[str, Any]`):
            Of a translation, a pre-training or a fine-tuning, or what [`results_of_folder`] finds.
        seed (`str`, *optional*):
            The one of the seeds whose scores to list; by default, or if there is no such seed, it is their median.

    Returns:
        `list[Figure]`: the scores.
    """
    if "bleu" in results:
        dataset = results.get("notes", {}).get("test_set", "test")
        return [_figure(dataset, name, results[name]) for name in ("bleu", "chrf")]
    if "files" in results:
        return [
            _figure(Path(dataset).name, name, figures[name])
            for dataset, figures in results["files"].items()
            for name in ("mlm_loss", "mlm_accuracy", "nsp_accuracy")
            if name in figures
        ]
    if "scores" in results:
        return [
            _figure(dataset, name, value)
            for dataset, figures in results["scores"].items()
            for name, value in figures.items()
            if not name.endswith(NO_SCORES)
        ]
    score, seeds = results.get("main_score", ""), results.get("seeds", {})
    if seed in seeds:
        return [_figure(dataset, score, figures[score]) for dataset, figures in seeds[seed].items()]
    of = f" (median of {len(seeds)} seeds)" if len(seeds) > 1 else ""
    return [_figure(dataset, score, each["median"], of) for dataset, each in results.get("summary", {}).items()]
