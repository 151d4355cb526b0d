"""Model cards: what a model is, how to use it, what it was trained on, what it scores and where its limits are.

Every number of a card comes from a file of results, or from what a training left in the model's folder; what no file
can tell, the terms of the data and the limits, comes from [`CardFacts`].
"""

import hashlib
import html
import io
import json
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging

from .results import Figure, _read, figures_of, results_of_folder


logger = logging.get_logger(__name__)


TEMPLATE = Path(__file__).with_name("model_card_template.md")


CURVE = "training_curve.png"


TOLD_ELSEWHERE = ("parameters", "test_set")  # notes that stand above or in the table


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


# Tasks whose pipelines transformers does not have; the package has them under other names.
OWN_PIPELINES = {"translation": "vanilla-translation", "question-answering": "vanilla-question-answering"}


# How a pipeline is called, and what is printed of its answer.
CALLS = {
    "translation": 'print(pipe({example})[0]["translation_text"])',
    "fill-mask": 'for guess in pipe({example}):\n    print(guess["score"], guess["sequence"])',
    "text-classification": "print(pipe({example}))",
    "token-classification": "print(pipe({example}))",
    "question-answering": 'print(pipe("Who has two dogs?", "Ben has two dogs and a cat."))',
}


EXAMPLES = {"fill-mask": "The capital of France is [MASK]."}


EXAMPLE = "A dog runs."


PIPELINE = """from transformers import pipeline

pipe = pipeline("{task}", model={repo_id}{trust})
{call}
"""


LOADING = """from transformers import AutoTokenizer, {auto_class}

tokenizer = AutoTokenizer.from_pretrained({repo_id}{trust})
model = {auto_class}.from_pretrained({repo_id}{trust})
"""


# What comes behind the loading where there is no pipeline.
USES = {
    "AutoModelForMultipleChoice": """
beginning, endings = "She opened the door", ["and went in.", "and swam away."]
inputs = tokenizer([beginning] * len(endings), endings, padding=True, return_tensors="pt")
scores = model(**{name: each.unsqueeze(0) for name, each in inputs.items()}).logits
print(endings[scores.argmax()])
""",
    "AutoModelForNextSentencePrediction": """
inputs = tokenizer("She opened the door.", "Then she went in.", return_tensors="pt")
print(model(**inputs).logits.softmax(-1)[0, 0])  # probability that the second follows the first
""",
}


# How a written card ends, so that it is known again as long as nobody edits it: what it was made of, and its hash.
FROM_FOLDER = "from its folder"


FROM_AUTHOR = "from its folder and its author's facts or results"


_SIGNATURE = re.compile(r"\n<!-- Written by hf_vanilla (.+); renewed unless edited: ([0-9a-f]{16}) -->\n\Z")


_ENDINGS = re.compile(r"(?:\.(?:txt|jsonl?|csv|tsv|parquet|gz))+$")


_LOCAL_PATH = re.compile(r"(?:--?[\w-]+=)?(~?(?:/[^/^*{}|;\n]+)+/?)")


@dataclass
class CardFacts:
    """What no file tells.

    Args:
        title (`str`, *optional*): First line of the card; the default is the name of the repository.
        language (`list[str]`): Codes of the languages, such as `["en", "de"]`.
        license (`str`, *optional*): As the Hub names it, such as `"apache-2.0"`; `"other"` needs `license_name`.
        license_name (`str`, *optional*): Name of another licence.
        datasets (`list[str]`): Names of the data sets.
        training_data (`str`, *optional*): What the model was trained on, and the terms of it.
        limits (`str`, *optional*): What it must not be used for, and where it fails.
        example (`str`, *optional*): A text to try it with.
        base_model (`str`, *optional*): The model that was fine-tuned.
    """

    title: str | None = None
    language: list[str] = field(default_factory=list)
    license: str | None = None
    license_name: str | None = None
    datasets: list[str] = field(default_factory=list)
    training_data: str | None = None
    limits: str | None = None
    example: str | None = None
    base_model: str | None = None


def missing_facts(facts: CardFacts | None) -> list[str]:
    """Name what a card would not tell although readers look for it.

    Args:
        facts (`CardFacts`, *optional*): What is known.

    Returns:
        `list[str]`: names of fields.
    """
    wanted = ("language", "license", "datasets", "training_data", "limits")
    return [name for name in wanted if not getattr(facts, name, None)]


def model_card(
    facts: CardFacts,
    repo_id: str,
    *,
    model_type: str,
    auto_class: str,
    results: dict[str, Any] | None = None,
    seed: str | None = None,
    curve: str | None = None,
    has_pipeline: bool = True,
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
        results (`dict[str, Any]`, *optional*):
            A file of results, as the scripts write them, or what [`results_of_folder`] finds.
        seed (`str`, *optional*):
            Which of the seeds in the results the model is.
        curve (`str`, *optional*):
            Name of a picture of the training that lies beside the card.
        has_pipeline (`bool`):
            Whether the model brings the pipeline of its task along where transformers has none.

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
    figures = figures_of(results, seed)
    task = TASKS.get(auto_class, "feature-extraction")
    name = repo_id.rstrip("/").split("/")[-1]
    data = ModelCardData(
        language=facts.language or None,
        license=facts.license,
        license_name=facts.license_name,
        library_name="transformers",
        pipeline_tag=task if task != "multiple-choice" else None,
        tags=["hf_vanilla", model_type],
        datasets=facts.datasets or None,
        base_model=facts.base_model,
        model_name=name,
        eval_results=[_eval_result(figure, task) for figure in figures] or None,
    )
    notes = results.get("notes", {})
    parameters = int(results.get("parameters") or notes.get("parameters", 0))
    sizes = f": {results['sizes']}" if "sizes" in results else ""
    size = f" {parameters:,} parameters{sizes}." if parameters else ""
    commands = results.get("commands") or ([results["command"]] if "command" in results else [])
    filled = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=as_text(facts.title or name),
        description=PAPERS[model_type] + size,
        use=_use(auto_class, repo_id, facts, with_package=True),
        use_without_package=_use(auto_class, repo_id, facts, with_package=False, has_pipeline=has_pipeline),
        training_data=facts.training_data,
        limits=facts.limits,
        commands=[printable(without_local_paths(command)).replace("```", "` ` `") for command in commands],
        notes={
            as_text(name.replace("_", " ")): as_text(value)
            for name, value in notes.items()
            if name not in TOLD_ELSEWHERE
        },
        figures=[each._replace(dataset=as_text(each.dataset), name=as_text(each.name)) for each in figures],
        environment=as_text(_environment(results)),
        curve=curve,
    )
    return ModelCard(re.sub(r"\n{3,}", "\n\n", str(filled)).strip() + "\n")


def card_of_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    facts: CardFacts | None = None,
    results: dict[str, Any] | None = None,
    *,
    curve: str | None = None,
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
            A file of results; its scores take the place of those in the folder. Of several seeds a folder `seed-3` has
            its own score, and any other the median.
        curve (`str`, *optional*):
            Name of a picture of the training that will lie beside the card; by default `training_curve.png`, if there
            is one.

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
    found = results_of_folder(folder)
    if results is not None:
        notes = {**found.pop("notes"), **results.get("notes", {})}
        found = {"parameters": found["parameters"], **results, "notes": notes}
    found["sizes"] = _sizes(config)
    seed = re.fullmatch(r"seed-(\d+)", Path(folder).absolute().name)
    offered = getattr(config, "custom_pipelines", {})
    return model_card(
        facts or CardFacts(),
        repo_id,
        model_type=config.model_type,
        auto_class=auto_class if auto_class in TASKS else "AutoModel",
        results=found,
        seed=seed[1] if seed else None,
        curve=CURVE if curve is None and (Path(folder) / CURVE).is_file() else curve,
        has_pipeline=any(task in offered for task in config.pipelines()),
    )


def sign_card(card: ModelCard, *, is_told: bool) -> str:
    """End a card that is to be written with a comment by which it is known again.

    Args:
        card (`ModelCard`):
            The card.
        is_told (`bool`):
            Whether it has facts or results of an author.

    Returns:
        `str`: the card's text, with the comment.
    """
    source = FROM_AUTHOR if is_told else FROM_FOLDER
    text = str(card).replace("\r\n", "\n").replace("\r", "\n")  # as it will be read
    return f"{text}\n<!-- Written by hf_vanilla {source}; renewed unless edited: {_digest(text)} -->\n"


def stays(path: Path, *, is_told: bool) -> bool:
    """Tell whether a card is there that must not be written anew: an edited one, or one that would know less then.

    Args:
        path (`Path`):
            README.md of a model's folder.
        is_told (`bool`):
            Whether the new card would have facts or results of an author.

    Returns:
        `bool`: true if it is to stay.
    """
    if not path.is_file():
        return False
    source = source_of_card(path)
    return source is None or (source == FROM_AUTHOR and not is_told)


def source_of_card(path: Path) -> str | None:
    """Tell what a card was made of.

    Args:
        path (`Path`):
            A README.md.

    Returns:
        `str`: what [`sign_card`] was given; `None` if somebody else has written or edited the card.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    signature = _SIGNATURE.search(text)
    return signature[1] if signature and signature[2] == _digest(text[: signature.start()]) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def printable(text: Any) -> str:
    """Put text into one line, and take control characters, such as those that colour a terminal, out of it.

    Args:
        text (`Any`): Anything; of something else than a string, what it is printed as.

    Returns:
        `str`: what is left.
    """
    return "".join(sign for sign in re.sub(r"\s", " ", str(text)) if sign.isprintable()).strip()


def as_text(text: Any) -> str:
    """Write what comes from files, such as names of data sets, so that a card shows it and does nothing else with it.

    Args:
        text (`Any`): Anything.

    Returns:
        `str`: one line of Markdown without control characters, markup, links, pictures or cells.
    """
    return re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(printable(text), quote=False))


def without_local_paths(command: str) -> str:
    """Shorten the absolute paths of a command, which tell of a machine and help nobody, to their last part.

    Args:
        command (`str`): A command line.

    Returns:
        `str`: the same with names of files and folders alone.
    """
    try:
        words = shlex.split(command)
    except ValueError:  # an open quotation mark
        words = command.split()
    paths = [found[1] for found in map(_LOCAL_PATH.fullmatch, words) if found]
    for path in sorted(paths, key=len, reverse=True):
        command = command.replace(path, Path(path).name)
    return command


def draw_curve(folder: str | os.PathLike[str]) -> bytes | None:
    """Draw the training curve of a model's folder.

    Args:
        folder (`str`): The folder, perhaps with `trainer_state.json`.

    Returns:
        `bytes`: a picture in PNG; `None` if less than two losses were logged, or matplotlib is not installed.
    """
    history = _read(Path(folder) / "trainer_state.json").get("log_history", [])
    if sum("loss" in entry for entry in history) < 2:
        return None
    try:
        from ..visualization import plot_training_curve

        figure = plot_training_curve(history)
    except ImportError as error:
        logger.warning(f"The card has no training curve: {error}")
        return None
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _eval_result(figure: Figure, task: str) -> EvalResult:
    return EvalResult(
        task_type=task,
        dataset_type=_slug(figure.dataset),
        dataset_name=figure.dataset,
        metric_type=figure.metric,
        metric_name=figure.name,
        metric_value=figure.value,
    )


def _use(auto_class: str, repo_id: str, facts: CardFacts, *, with_package: bool, has_pipeline: bool = True) -> str:
    """Write a program that loads the model, uses it once and prints what comes out."""
    task = TASKS.get(auto_class, "")
    trust = "" if with_package else ", trust_remote_code=True"
    quoted = json.dumps(repo_id, ensure_ascii=False)
    is_pair = auto_class == "AutoModelForNextSentencePrediction"
    if task in CALLS and not is_pair and (has_pipeline or task not in OWN_PIPELINES):
        example = json.dumps(facts.example or EXAMPLES.get(task, EXAMPLE), ensure_ascii=False)
        named = OWN_PIPELINES.get(task, task) if with_package else task
        call = CALLS[task].format(example=example)
        program = PIPELINE.format(task=named, repo_id=quoted, trust=trust, call=call)
    else:
        program = LOADING.format(auto_class=auto_class, repo_id=quoted, trust=trust) + USES.get(auto_class, "")
    return ("import hf_vanilla  # transformers learns the model\n" if with_package else "") + program


def _sizes(config: PreTrainedConfig) -> str:
    """Describe a model by its numbers."""
    layers = config.num_hidden_layers
    if config.is_encoder_decoder:
        layers = f"{config.encoder_layers}+{config.decoder_layers}"
    vocabulary = f"{config.vocab_size:,}"
    source_size = getattr(config, "source_vocab_size", None)
    if source_size not in (None, config.vocab_size):
        vocabulary = f"{source_size:,} (source) and {vocabulary} (target)"
    return (
        f"{layers} layers of width {config.hidden_size}, {config.num_attention_heads} heads, feed-forward networks of "
        f"width {config.intermediate_size}, vocabulary of {vocabulary}"
    )


def _environment(results: dict[str, Any]) -> str:
    """Say what was measured with."""
    parts = [f"{name} {version}" for name, version in results.get("versions", {}).items()]
    machine = results.get("machine", {})
    if machine:
        parts.append(machine.get("gpu") or f"{machine['cores']} cores ({machine['architecture']})")
    return ", ".join(parts)


def _slug(name: str) -> str:
    """Turn a name, perhaps of a file, into an identifier as the Hub's metadata has them, which must not be empty."""
    words = "".join(character if character.isalnum() else " " for character in _ENDINGS.sub("", name.lower())).split()
    return "_".join(words) or "unnamed"
