"""Model cards: what a model is, how to use it, its training data, its scores and its limits.

Every number of a card comes from a results file, or from what a training left in the model's folder. What no file
holds, such as the licence of the data and the limits, comes from [`CardFacts`].
"""

import functools
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

from ..registration import CONFIGS
from .results import Score, list_scores, read_json, results_of_folder


logger = logging.get_logger(__name__)


TEMPLATE = Path(__file__).with_name("model_card_template.md")
CURVE = "training_curve.png"
NOTES_SHOWN_ELSEWHERE = ("parameters", "test_set")  # in the description and in the table of scores
# For each model type, the sentence that names its paper, and the Auto class of what makes a model's inputs.
PAPERS = {config_class.model_type: config_class.paper for config_class in CONFIGS}
PROCESSORS = {config_class.model_type: config_class.processor for config_class in CONFIGS}
TASKS = {
    "AutoModelForSeq2SeqLM": "translation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForPreTraining": "fill-mask",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForNextSentencePrediction": "text-classification",
    "AutoModelForImageClassification": "image-classification",
}
# The task of a model without a head.
FEATURES = {"AutoTokenizer": "feature-extraction", "AutoImageProcessor": "image-feature-extraction"}
# Tasks for which transformers has no pipeline; the package registers its own under other names.
OWN_PIPELINES = {"translation": "vanilla-translation", "question-answering": "vanilla-question-answering"}
# How to call a pipeline, and what to print of its output.
CALLS = {
    "translation": 'print(pipe({example})[0]["translation_text"])',
    "fill-mask": 'for guess in pipe({example}):\n    print(guess["score"], guess["sequence"])',
    "text-generation": 'print(pipe({example}, max_new_tokens=50)[0]["generated_text"])',
    "text-classification": "print(pipe({example}))",
    "token-classification": "print(pipe({example}))",
    "question-answering": 'print(pipe("Who has two dogs?", "Ben has two dogs and a cat."))',
    "image-classification": "print(pipe({example}))",
}
EXAMPLES = {
    "fill-mask": "The capital of France is [MASK].",
    "text-generation": "The old house",
    "image-classification": "picture.png",
}
EXAMPLE = "A dog runs."
PIPELINE = """from transformers import pipeline

pipe = pipeline("{task}", model={repo_id}{trust})
{call}
"""
LOADING = """from transformers import {processor}, {auto_class}

{variable} = {processor}.from_pretrained({repo_id}{trust})
model = {auto_class}.from_pretrained({repo_id}{trust})
"""
# What follows the loading where there is no pipeline, or none that fits: that of images makes all of them colours.
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
    "AutoModelForImageClassification": """
from PIL import Image

with Image.open({example}) as picture:
    inputs = processor(picture.convert("L"), return_tensors="pt")
print(model.config.id2label[model(**inputs).logits.argmax().item()])
""",
}
# The last line of a written card, its signature, names its sources and its hash: an edited card is recognized by it.
FROM_FOLDER = "from its folder"
FROM_AUTHOR = "from its folder and its author's facts or results"
_SIGNATURE = re.compile(r"\n<!-- Written by hf_vanilla (.+); renewed unless edited: ([0-9a-f]{16}) -->\n\Z")
_FILE_ENDINGS = re.compile(r"(?:\.(?:txt|jsonl?|csv|tsv|parquet|gz))+(?=$|, )")
_LOCAL_PATH = re.compile(r"(?:--?[\w-]+=)?(~?(?:/[^/^*{}|;\n]+)+/?)")


@dataclass
class CardFacts:
    """Facts for a model card that no file holds.

    Args:
        title (`str`, *optional*): Title of the card; the default is the name of the repository.
        language (`list[str]`): Codes of the languages, such as `["en", "de"]`.
        license (`str`, *optional*): The Hub's identifier, such as `"apache-2.0"`; `"other"` needs `license_name`.
        license_name (`str`, *optional*): Name of another licence.
        datasets (`list[str]`): Names of the data sets.
        training_data (`str`, *optional*): What the model was trained on, and the licence of that data. Markdown; HTML
            and pictures are shown as text.
        limits (`str`, *optional*): Where the model fails, and what not to use it for. As `training_data`.
        example (`str`, *optional*): A text, or the path of a picture, to try it with.
        base_model (`str`, *optional*): The model that was fine-tuned.

    Raises:
        TypeError: if a field has another type.
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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in ("language", "datasets"):
                if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                    raise TypeError(f"`{name}` of the card must be a list of strings, got {value!r}.")
            elif value is not None and not isinstance(value, str):
                raise TypeError(f"`{name}` of the card must be a string, got {value!r}.")


def missing_facts(facts: CardFacts | None) -> list[str]:
    """List the missing facts that readers look for in a card.

    Args:
        facts (`CardFacts`, *optional*): The given facts.

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
    num_channels: int = 3,
    recipe: str | None = None,
) -> ModelCard:
    """Fill the template.

    Args:
        facts (`CardFacts`): What the results do not contain.
        repo_id (`str`): The repository from which to load the model.
        model_type (`str`): The config's `model_type`.
        auto_class (`str`): Name of the Auto class that loads the model with its head.
        results (`dict[str, Any]`, *optional*): Content of a results file of the scripts, or what
            [`results_of_folder`] finds.
        seed (`str`, *optional*): The model's seed, if the results are those of several.
        curve (`str`, *optional*): Name of a picture of the training in the card's folder.
        has_pipeline (`bool`): Whether the model brings the pipeline of its task if transformers has none.
        num_channels (`int`): Channels of the model's images, if it reads any: 3 for colours, 1 for grey.
        recipe (`str`, *optional*): Name with which `hf-vanilla reproduce` trains the model again.

    Returns:
        `ModelCard`: the card, with metadata for the Hub that include the scores as a `model-index`.

    Raises:
        ValueError: if there is no such model type or Auto class.
    """
    if model_type not in PAPERS:
        raise ValueError(f"`model_type` must be one of {', '.join(PAPERS)}; got {model_type!r}.")
    if auto_class not in TASKS and auto_class != "AutoModel":
        raise ValueError(f"`auto_class` must be one of {', '.join(TASKS)} or AutoModel; got {auto_class!r}.")
    results = results or {}
    scores = list_scores(results, seed)
    processor = PROCESSORS[model_type]
    task = TASKS.get(auto_class, FEATURES[processor])
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
        eval_results=[_eval_result(score, task) for score in scores] or None,
    )
    notes = results.get("notes", {})
    commands = results.get("commands") or ([results["command"]] if "command" in results else [])
    use = functools.partial(_use, auto_class, processor, repo_id, facts, num_channels)
    filled = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=escape_markdown(facts.title or name),
        description=PAPERS[model_type] + _size(results),
        use=use(with_package=True),
        use_without_package=use(with_package=False, has_pipeline=has_pipeline),
        training_data=facts.training_data and plain_markdown(facts.training_data),
        limits=facts.limits and plain_markdown(facts.limits),
        commands=[one_line(strip_local_paths(command)).replace("```", "` ` `") for command in commands],
        notes={
            escape_markdown(name.replace("_", " ")): escape_markdown(value)
            for name, value in notes.items()
            if name not in NOTES_SHOWN_ELSEWHERE
        },
        scores=[
            each._replace(dataset=escape_markdown(each.dataset), name=escape_markdown(each.name)) for each in scores
        ],
        environment=escape_markdown(_environment(results)),
        curve=curve,
        recipe=recipe,
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
    """Make the card of a model's folder from its files.

    Args:
        folder (`str`): The folder, with `config.json`.
        repo_id (`str`): The repository from which to load the model.
        facts (`CardFacts`, *optional*): What the folder does not contain.
        results (`dict[str, Any]`, *optional*): Content of a results file, whose scores replace those in the folder.
            Of several seeds, a folder `seed-3` gets its own score, and any other the median.
        curve (`str`, *optional*): Name of a picture of the training that will be in the folder; the default is
            `training_curve.png`, if there is one.

    Returns:
        `ModelCard`: the card, which is not written yet.

    Raises:
        ValueError: if the model is not one of this package.
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
        num_channels=getattr(config, "num_channels", 3),
    )


def make_card(
    folder: str | os.PathLike[str],
    repo_id: str,
    facts: CardFacts | None = None,
    results: dict[str, Any] | None = None,
) -> dict[str, bytes] | None:
    """Make the signed card of a model's folder and the picture of its training; nothing is written.

    Args:
        folder (`str`): The folder, with `config.json`.
        repo_id (`str`): The repository from which to load the model.
        facts (`CardFacts`, *optional*): What the folder does not contain.
        results (`dict[str, Any]`, *optional*): Content of a results file.

    Returns:
        `dict[str, bytes]` or `None`: contents of `README.md` and, if losses were logged, `training_curve.png`; `None`
        if the card in the folder must be kept, see [`keep_existing_card`].
    """
    has_author_facts = facts not in (None, CardFacts()) or results is not None
    if keep_existing_card(Path(folder) / "README.md", has_author_facts=has_author_facts):
        return None
    picture = draw_curve(folder)
    card = card_of_folder(folder, repo_id, facts, results, curve=None if picture is None else CURVE)
    files = {"README.md": sign_card(card, has_author_facts=has_author_facts).encode()}
    return files if picture is None else {**files, CURVE: picture}


def sign_card(card: ModelCard, *, has_author_facts: bool) -> str:
    """Add the comment by which an unedited card is recognized.

    Args:
        card (`ModelCard`): The card.
        has_author_facts (`bool`): Whether it has facts or results of an author.

    Returns:
        `str`: the card's text, with the comment.
    """
    source = FROM_AUTHOR if has_author_facts else FROM_FOLDER
    text = str(card).replace("\r\n", "\n").replace("\r", "\n")  # as it will be read
    return f"{text}\n<!-- Written by hf_vanilla {source}; renewed unless edited: {_digest(text)} -->\n"


def keep_existing_card(path: Path, *, has_author_facts: bool) -> bool:
    """Return whether there is a card that must not be replaced.

    Args:
        path (`Path`): README.md of a model's folder.
        has_author_facts (`bool`): Whether the new card would have facts or results of an author.

    Returns:
        `bool`: `True` if the card was edited, or has an author's facts that the new one would lack.
    """
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    signature = _SIGNATURE.search(text)
    if signature is None or signature[2] != _digest(text[: signature.start()]):
        return True
    return signature[1] == FROM_AUTHOR and not has_author_facts


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def one_line(text: Any) -> str:
    """Put text into one line, without control characters such as those that colour a terminal.

    Args:
        text (`Any`): Text, or any object with a string form.

    Returns:
        `str`: the printable characters.
    """
    return "".join(each for each in re.sub(r"\s", " ", str(text)) if each.isprintable()).strip()


def escape_markdown(text: Any) -> str:
    """Escape text from files, such as names of data sets, so that a card shows it as it is.

    Args:
        text (`Any`): Text, or any object with a string form.

    Returns:
        `str`: one line of Markdown without control characters, markup, links, pictures or cells.
    """
    return re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(one_line(text), quote=False))


def plain_markdown(text: str) -> str:
    """Keep an author's Markdown, but show HTML and pictures as text, and drop control characters.

    Args:
        text (`str`): Text of one or several lines.

    Returns:
        `str`: Markdown that loads and runs nothing where it is shown.
    """
    lines = ("".join(each for each in line if each.isprintable()) for line in text.splitlines())
    return "\n".join(lines).replace("<", "&lt;").replace("![", "\\![")


def strip_local_paths(command: str) -> str:
    """Shorten absolute paths in a command to their last part, since the rest describes one machine.

    Args:
        command (`str`): A command line.

    Returns:
        `str`: the same with names of files and folders only.
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
        folder (`str`): The folder, with `trainer_state.json` if it was trained.

    Returns:
        `bytes`: a picture in PNG; `None` if fewer than two losses were logged, or matplotlib is not installed.
    """
    history = read_json(Path(folder) / "trainer_state.json").get("log_history", [])
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


def _eval_result(score: Score, task: str) -> EvalResult:
    return EvalResult(
        task_type=task,
        dataset_type=_slug(score.dataset),
        dataset_name=score.dataset,
        metric_type=score.metric,
        metric_name=score.name,
        metric_value=score.value,
    )


def _use(
    auto_class: str,
    processor: str,
    repo_id: str,
    facts: CardFacts,
    num_channels: int,
    *,
    with_package: bool,
    has_pipeline: bool = True,
) -> str:
    """Write a program that loads the model, uses it once and prints the output."""
    task = TASKS.get(auto_class, "")
    trust = "" if with_package else ", trust_remote_code=True"
    quoted = _quoted(repo_id)
    example = _quoted(facts.example or EXAMPLES.get(task, EXAMPLE))
    takes_others = auto_class == "AutoModelForNextSentencePrediction" or num_channels != 3  # than a pipeline gives
    if task in CALLS and not takes_others and (has_pipeline or task not in OWN_PIPELINES):
        named = OWN_PIPELINES.get(task, task) if with_package else task
        call = CALLS[task].format(example=example)
        program = PIPELINE.format(task=named, repo_id=quoted, trust=trust, call=call)
    else:
        variable = "tokenizer" if processor == "AutoTokenizer" else "processor"
        names = {"auto_class": auto_class, "processor": processor, "variable": variable}
        program = LOADING.format(**names, repo_id=quoted, trust=trust)
        program += USES.get(auto_class, "").replace("{example}", example)
    return ("import hf_vanilla  # transformers learns the model\n" if with_package else "") + program


def _quoted(text: str) -> str:
    """Write a string literal of Python in one line, with characters that don't print as escapes."""
    literal = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in literal)


def _size(results: dict[str, Any]) -> str:
    """Describe the size of the model that results are of, if they know it."""
    parameters = int(results.get("parameters") or results.get("notes", {}).get("parameters", 0))
    sizes = f": {results['sizes']}" if "sizes" in results else ""
    return f" {parameters:,} parameters{sizes}." if parameters else ""


def _sizes(config: PreTrainedConfig) -> str:
    """Describe a model by its sizes."""
    layers = config.num_hidden_layers
    if config.is_encoder_decoder:
        layers = f"{config.encoder_layers}+{config.decoder_layers}"
    if hasattr(config, "image_size"):
        inputs = f"images of {config.image_size} pixels, patches of {config.patch_size}"
    else:
        inputs = f"vocabulary of {config.vocab_size:,}"
    source_size = getattr(config, "source_vocab_size", None)
    if source_size is not None and source_size != config.vocab_size:
        inputs = f"vocabulary of {source_size:,} (source) and {config.vocab_size:,} (target)"
    return (
        f"{layers} layers of width {config.hidden_size}, {config.num_attention_heads} heads, feed-forward networks of "
        f"width {config.intermediate_size}, {inputs}"
    )


def _environment(results: dict[str, Any]) -> str:
    """Name the versions and the machine of the measurements."""
    parts = [f"{name} {version}" for name, version in results.get("versions", {}).items()]
    machine = results.get("machine", {})
    if machine:
        parts.append(machine.get("gpu") or f"{machine['cores']} cores ({machine['architecture']})")
    return ", ".join(parts)


def _slug(name: str) -> str:
    """Turn the name of a data set or file into an identifier for the Hub's metadata, which must not be empty."""
    words = "".join(
        character if character.isalnum() else " " for character in _FILE_ENDINGS.sub("", name.lower())
    ).split()
    return "_".join(words) or "unnamed"
