"""Scores in results files, and in what a training saves next to its model."""

import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from ..data.files import read_json_object
from .run_settings import RUN_SETTINGS_FILE


class Score(NamedTuple):
    """A score.

    Attributes:
        dataset: The data it was measured on.
        metric: Name of the metric in the Hub's metadata.
        name: Its usual name in papers.
        value: The score.
    """

    dataset: str
    metric: str
    name: str
    value: float


# Metric and usual name of each score in results files, if they differ from its key.
SCORE_NAMES = {
    "bleu": ("bleu", "BLEU"),
    "chrf": ("chrf", "chrF"),
    "chrf++": ("chrf", "chrF++"),
    "ter": ("ter", "TER"),
    "comet": ("comet", "COMET"),
    "mlm_loss": ("loss", "loss of masked tokens, nats"),
    "mlm_accuracy": ("accuracy", "accuracy of masked tokens"),
    "nsp_accuracy": ("accuracy", "accuracy of next sentences"),
    "perplexity_per_word": ("perplexity", "perplexity per word"),
    "matthews": ("matthews_correlation", "Matthews correlation"),
    "pearson": ("pearsonr", "Pearson correlation"),
    "spearman": ("spearmanr", "Spearman correlation"),
}
ENTITY_SCORES = ("precision", "recall", "f1")  # also of one type, such as PER_f1
TRANSLATION_SCORES = ("bleu", "chrf", "chrf++", "ter", "comet")
# Endings of what a trainer measures in addition to scores.
NOT_SCORES = (
    *("loss", "perplexity", "gen_len", "runtime", "per_second", "epoch"),
    *("documents", "words", "bytes", "tokens"),
)
# Scores of a pre-training, for each of its files.
PRETRAINING_SCORES = (
    *("mlm_loss", "mlm_accuracy", "nsp_accuracy"),
    *("perplexity_per_word", "bits_per_byte", "perplexity_per_token"),
)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that a training may have left.

    Args:
        path (`Path`): The file.

    Returns:
        `dict[str, Any]`: its content, empty if there is no such file.

    Raises:
        ValueError: if the file is there, but holds no JSON object.
    """
    return read_json_object(path) if path.is_file() else {}


def results_of_folder(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Collect what a training has saved next to its model.

    Args:
        folder (`str`): The folder.

    Returns:
        `dict[str, Any]`: number of `parameters`; `scores` for each set, from `eval_results.json`, as the training
        scripts write it, or `scores.json`, as fine-tunings do; `notes`, about settings and length of the training;
        `versions` and `machine` of the training.
    """
    root = Path(folder)
    state, trained = read_json(root / "trainer_state.json"), read_json(root / "train_results.json")
    settings = read_json(root / RUN_SETTINGS_FILE)
    notes = dict(settings.pop("notes", {}))
    if state.get("global_step"):
        notes["updates"] = f"{state['global_step']:,}"
    if "epoch" in trained:
        notes["epochs"] = f"{trained['epoch']:.4g}"
    if "train_runtime" in trained:
        notes["minutes since the last start"] = f"{trained['train_runtime'] / 60:.1f}"
    scores = read_json(root / "scores.json")
    measured = read_json(root / "eval_results.json")
    if measured:
        scores = {}
        for name, value in measured.items():
            of_length = re.fullmatch(r"eval_(\d+)_tokens_(.+)", name)
            dataset = f"validation, {of_length[1]} tokens" if of_length else "validation"
            scores.setdefault(dataset, {})[of_length[2] if of_length else name.removeprefix("eval_")] = value
    return {"parameters": _count_parameters(root), "scores": scores, "notes": notes, **settings}


def list_scores(results: dict[str, Any], seed: str | None = None) -> list[Score]:
    """List the scores of a results file.

    Args:
        results (`dict[str, Any]`): Results of a translation, a pre-training or a fine-tuning, or those that
            [`results_of_folder`] finds.
        seed (`str`, *optional*): The seed whose scores to list. The default, also for a seed without results, is the
            median of all seeds.

    Returns:
        `list[Score]`: the scores.
    """
    if not results.keys().isdisjoint(TRANSLATION_SCORES):
        dataset = results.get("notes", {}).get("test_set", "test")
        return [_score(dataset, name, results[name]) for name in TRANSLATION_SCORES if name in results]
    if "files" in results:
        return [
            _score(Path(dataset).name, name, measured[name])
            for dataset, measured in results["files"].items()
            for name in PRETRAINING_SCORES
            if name in measured
        ]
    if "scores" in results:
        return [
            _score(dataset, name, value)
            for dataset, measured in results["scores"].items()
            for name, value in measured.items()
            if not name.endswith(NOT_SCORES)
        ]
    score, seeds = results.get("main_score", ""), results.get("seeds", {})
    if seed in seeds:
        return [_score(dataset, score, measured[score]) for dataset, measured in seeds[seed].items()]
    suffix = f" (median of {len(seeds)} seeds)" if len(seeds) > 1 else ""
    return [_score(dataset, score, each["median"], suffix) for dataset, each in results.get("summary", {}).items()]


def _score(dataset: str, key: str, value: float, suffix: str = "") -> Score:
    kind, _, of_type = key.rpartition("_")
    default = (of_type if kind and of_type in ENTITY_SCORES else key, key.replace("_", " "))
    metric, name = SCORE_NAMES.get(key, default)
    return Score(dataset, metric, name + suffix, round(value, 2 if key in TRANSLATION_SCORES else 4))


def _count_parameters(root: Path) -> int:
    """Count the weights of a folder without reading them."""
    count = 0
    for path in root.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count
