"""Model cards: what a model is, how to load it, what it was trained on, what it scores and where its limits are.

Every number of a card comes from a file of results; what no file can tell, the terms of the data and the limits, comes
from [`CardFacts`].
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoConfig
from transformers.utils import logging


logger = logging.get_logger(__name__)

TEMPLATE = Path(__file__).with_name("model_card_template.md")
CURVE = "training_curve.png"
NOT_TOLD = "Nobody has said yet."
# What the scores of the result files are called where models are compared.
SCORES = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "mlm_loss": "loss of masked tokens, nats",
    "mlm_accuracy": "accuracy of masked tokens",
    "nsp_accuracy": "accuracy of next sentences",
}
PAPERS = {
    "vanilla_transformer": "The encoder-decoder Transformer of Vaswani et al. 2017 ([paper](https://arxiv.org/abs/1706.03762)).",
    "vanilla_bert": "BERT of Devlin et al. 2018 ([paper](https://arxiv.org/abs/1810.04805)).",
}
TASKS = {
    "AutoModelForSeq2SeqLM": "translation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForPreTraining": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForNextSentencePrediction": "text-classification",
}


@dataclass
class CardFacts:
    """What a file of results does not tell.

    Args:
        title (`str`): First line of the card.
        language (`list[str]`): Codes of the languages, such as `["en", "de"]`.
        license (`str`, *optional*): As the Hub names it, such as `"apache-2.0"`; `"other"` needs `license_name`.
        license_name (`str`, *optional*): Name of another licence.
        datasets (`list[str]`): Names of the data sets.
        training_data (`str`): What the model was trained on, and the terms of it.
        limits (`str`): What it must not be used for, and where it fails.
        base_model (`str`, *optional*): The model that was fine-tuned.
    """

    title: str = "Model"
    language: list[str] = field(default_factory=list)
    license: str | None = None
    license_name: str | None = None
    datasets: list[str] = field(default_factory=list)
    training_data: str = NOT_TOLD
    limits: str = NOT_TOLD
    base_model: str | None = None


def model_card(
    facts: CardFacts,
    repo_id: str,
    *,
    model_type: str,
    auto_class: str,
    parameters: int | None = None,
    results: dict[str, Any] | None = None,
    has_curve: bool = False,
    own_pipeline: str | None = None,
) -> ModelCard:
    """Fill the template.

    Args:
        facts (`CardFacts`):
            What the results do not tell.
        repo_id (`str`):
            Where the model is to be loaded from.
        model_type (`str`):
            `"vanilla_transformer"` or `"vanilla_bert"`.
        auto_class (`str`):
            Name of the Auto class that loads it with its head.
        parameters (`int`, *optional*):
            Number of parameters.
        results (`dict[str, Any]`, *optional*):
            A file of results, as the scripts write them.
        has_curve (`bool`):
            Whether `training_curve.png` lies beside the card.
        own_pipeline (`str`, *optional*):
            Task of the pipeline that the model brings along.

    Returns:
        `ModelCard`: with metadata that the Hub reads, the scores as a `model-index` among them.

    Raises:
        ValueError: if there is no such family or Auto class.
    """
    if model_type not in PAPERS:
        raise ValueError(f"`model_type` must be one of {', '.join(PAPERS)}; got {model_type!r}.")
    if auto_class not in TASKS and auto_class != "AutoModel":
        raise ValueError(f"`auto_class` must be one of {', '.join(TASKS)} or AutoModel; got {auto_class!r}.")
    results = results or {}
    figures = figures_of(results)
    task = TASKS.get(auto_class, "feature-extraction")
    data = ModelCardData(
        language=facts.language or None,
        license=facts.license,
        license_name=facts.license_name,
        library_name="transformers",
        pipeline_tag=task if task != "multiple-choice" else None,
        tags=["hf_vanilla", model_type],
        datasets=facts.datasets or None,
        base_model=facts.base_model,
        model_name=repo_id.split("/")[-1],
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type=_slug(dataset),
                dataset_name=dataset,
                metric_type=_slug(score),
                metric_name=score,
                metric_value=value,
            )
            for dataset, score, value in figures
        ]
        or None,
    )
    parameters = parameters or int(results.get("parameters") or results.get("notes", {}).get("parameters", 0))
    size = f" {parameters:,} parameters." if parameters else ""
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=facts.title,
        description=PAPERS[model_type] + size,
        auto_class=auto_class,
        repo_id=repo_id,
        training_data=facts.training_data,
        limits=facts.limits,
        commands=results.get("commands") or ([results["command"]] if "command" in results else []),
        notes={name.replace("_", " "): value for name, value in results.get("notes", {}).items()},
        figures=figures,
        environment=_environment(results),
        has_curve=has_curve,
        own_pipeline=own_pipeline,
    )


def card_of_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    facts: CardFacts | None = None,
    results: dict[str, Any] | None = None,
    *,
    draw: bool = True,
) -> ModelCard:
    """Make the card of a model's folder out of what lies there.

    Args:
        folder (`str`):
            The folder, with `config.json`.
        repo_id (`str`):
            Where it will be loaded from.
        facts (`CardFacts`, *optional*):
            What the folder does not tell.
        results (`dict[str, Any]`, *optional*):
            A file of results.
        draw (`bool`):
            Whether to draw the training curve into the folder, if there is one to draw and matplotlib is installed.

    Returns:
        `ModelCard`: the card, which is not written yet.

    Raises:
        ValueError: if the folder's model is of another family than this package's.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type not in PAPERS:
        raise ValueError(
            f"`folder` must have a model of type {' or '.join(PAPERS)}, got {config.model_type}; write its README.md "
            "yourself."
        )
    names = {model_class.__name__: name for name, model_class in config.auto_classes().items()}
    auto_class = names.get(next(iter(config.architectures or []), ""), "AutoModel")
    facts = facts or CardFacts(title=repo_id.split("/")[-1])
    offered = getattr(config, "custom_pipelines", {})
    return model_card(
        facts,
        repo_id,
        model_type=config.model_type,
        auto_class=auto_class if auto_class in TASKS else "AutoModel",
        results=results,
        has_curve=_draw_curve(Path(folder)) if draw else (Path(folder) / CURVE).is_file(),
        own_pipeline=next((task for task in config.pipelines() if task in offered), None),
    )


def figures_of(results: dict[str, Any]) -> list[tuple[str, str, float]]:
    """List the scores of a file of results.

    Args:
        results (`dict[str, Any]`):
            Of a translation, a pre-training or a fine-tuning.

    Returns:
        `list[tuple[str, str, float]]`: data set, name of the score, value.
    """
    if "bleu" in results:
        dataset = results.get("notes", {}).get("test_set", "test")
        return [(dataset, SCORES[name], results[name]) for name in ("bleu", "chrf")]
    if "files" in results:
        return [
            (Path(dataset).name, SCORES[name], figures[name])
            for dataset, figures in results["files"].items()
            for name in ("mlm_loss", "mlm_accuracy", "nsp_accuracy")
            if name in figures
        ]
    score = results.get("main_score", "")
    seeds = len(results.get("seeds", ()))
    of = f", median of {seeds} seeds" if seeds > 1 else ""
    return [
        (dataset, f"{score}{of}", round(figures["median"], 4))
        for dataset, figures in results.get("summary", {}).items()
    ]


def _environment(results: dict[str, Any]) -> str:
    """Say what was measured with."""
    parts = [f"{name} {version}" for name, version in results.get("versions", {}).items()]
    machine = results.get("machine", {})
    if machine:
        parts.append(machine.get("gpu") or f"{machine['cores']} cores ({machine['architecture']})")
    return ", ".join(parts)


def _slug(name: str) -> str:
    """Turn a name into an identifier as the Hub's metadata has them."""
    words = "".join(character if character.isalnum() else " " for character in name.lower()).split()
    return "_".join(words)


def _draw_curve(folder: Path) -> bool:
    """Draw the training curve beside the card, if the folder has one to draw and matplotlib is there."""
    state = folder / "trainer_state.json"
    if not state.is_file():
        return (folder / CURVE).is_file()
    try:
        from .visualization import plot_training_curve

        figure = plot_training_curve(json.loads(state.read_text(encoding="utf-8")).get("log_history", []))
    except (ImportError, ValueError) as error:
        logger.warning(f"The card has no training curve: {error}")
        return False
    figure.savefig(folder / CURVE)
    return True
