"""What may be in a folder that is published, and what never leaves the machine."""

import fnmatch
import os
import re
import zipfile
from pathlib import Path
from typing import BinaryIO

import huggingface_hub
import transformers
from huggingface_hub import HfApi
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from ..registration import AUTO_CLASSES


logger = logging.get_logger(__name__)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


# What a training leaves beside its model: to go on with, not to publish.
TRAINING_STATE = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth", "trainer_state.json", "manifest.json")


# Never published: pickles of arguments with paths of the machine, checkpoints on the way, logs, version control.
NEVER = (
    "training_args.bin",
    "checkpoint-*/*",
    "averaged*/*",
    "runs/*",
    "logs/*",
    "_run*",
    "_saving/*",
    ".*",
    "*/.*",
    "__pycache__/*",
    "*.tmp",
)


PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")


WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")  # beside config.json; those in subfolders are not read


# Of a user, of an organization, and of a user who logged in elsewhere.
_TOKEN = re.compile(rb"(?:hf_|api_org_)[A-Za-z0-9]{30,}|hf_oauth_[A-Za-z0-9._-]{30,}")


_LONGEST_TOKEN = 4096


_CHUNK = 1 << 20


def check_folder(
    folder: str | os.PathLike[str], *, with_training_state: bool = False, token: str | None = None
) -> list[str]:
    """Find the files of a folder that are to be published, and make sure that others can use them.

    Args:
        folder (`str`):
            The folder of a model.
        with_training_state (`bool`):
            Whether optimizer, scheduler and random states belong to it.
        token (`str`, *optional*):
            A token that must not be in any file; the one that is logged in with is looked for in any case.

    Returns:
        `list[str]`: their names, relative to the folder, sorted.

    Raises:
        ValueError: if there is no folder or no `config.json`; the weights lack a tensor, or have one too many; model
            and tokenizer do not agree; a file is a pickle, or a link that leads out of the folder; or a file has a
            token of the Hub in it.
    """
    root = Path(folder)
    if not (root / "config.json").is_file():
        models = sorted(str(path.parent) for path in root.glob("*/config.json"))
        hint = f" These have one: {', '.join(models[:5])}; give the one to publish." if models else ""
        raise ValueError(f"`folder` must be a folder with a config.json, but {root} has none.{hint}")
    names = _files_of(root, with_training_state=with_training_state)
    _check_links(root, names)
    pickles = [name for name in names if _may_be_pickle(root / name) and not _matches(name, TRAINING_STATE)]
    if pickles:
        raise ValueError(
            f"{pickles[0]} may be a pickle, which can run code where it is loaded. Remove it; weights belong in "
            "model.safetensors (`save_pretrained` writes it)."
        )
    _check_model(root)
    for name in names:
        with (root / name).open("rb") as file:
            if _has_token(file, _secrets(token)):
                raise ValueError(
                    f"{name} has a token of the Hub in it. Remove it, and revoke it in the Hub's settings."
                )
    return names


def _files_of(root: Path, *, with_training_state: bool) -> list[str]:
    """List the files that are to be published."""
    left_out = NEVER if with_training_state else NEVER + TRAINING_STATE
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return [name for name in names if not _matches(name, left_out)]


def _check_links(root: Path, names: list[str]) -> None:
    """Raise if a file lies elsewhere; those of a snapshot in the Hub's cache lie in its blobs."""
    allowed = [root.resolve()]
    if allowed[0].parent.name == "snapshots":
        allowed.append(allowed[0].parents[1] / "blobs")
    for name in names:
        target = (root / name).resolve()
        if not any(target.is_relative_to(each) for each in allowed):
            raise ValueError(
                f"{name} is a link to {target}, which is not in the folder. Remove it, or put a copy in its place."
            )


def _may_be_pickle(path: Path) -> bool:
    """Tell by a file's name, its first bytes, or what a zip has inside, as `torch.save` writes it."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        return True
    with path.open("rb") as file:
        head = file.read(9)
    if head[:2] == b"PK":
        try:
            with zipfile.ZipFile(path) as archive:
                return any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist())
        except zipfile.BadZipFile:
            return False  # nothing can be loaded from it
    # A pickle begins with 0x80 and its protocol. A safetensors file may too, for it begins with its header's length.
    is_safetensors = head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size
    return head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5") and not is_safetensors


def _check_model(root: Path) -> None:
    """Raise unless the model loads completely, and the tokenizer fits it."""
    config = AutoConfig.from_pretrained(root, local_files_only=True)
    classes = {model.__name__: model for models in AUTO_CLASSES.values() for model in models.values()}
    architecture = next(iter(config.architectures or []), None)
    model_class = classes.get(architecture) or getattr(transformers, str(architecture), None)
    if model_class is None:
        raise ValueError(f"`architectures` in config.json must name a model class, got {config.architectures}.")
    try:
        model, loading = model_class.from_pretrained(root, local_files_only=True, output_loading_info=True)
    except (OSError, RuntimeError, KeyError, SafetensorError) as error:
        raise ValueError(f"The model in {root} does not load: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[kind]:
            named = ", ".join(sorted(map(str, loading[kind]))[:3])
            raise ValueError(f"The weights in {root} are not those of {architecture}: {kind} {named}.")
    if not any((root / name).is_file() for name in TOKENIZER_FILES):
        logger.warning(f"{root} has no tokenizer: nobody can use the model with text. `save_pretrained` writes one.")
        return
    tokenizer = AutoTokenizer.from_pretrained(root, local_files_only=True)
    size = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > size:
        raise ValueError(f"The tokenizer has {len(tokenizer)} entries, but the model only {size}: they don't match.")
    if config.pad_token_id is not None and tokenizer.pad_token_id not in (None, config.pad_token_id):
        raise ValueError(
            f"`pad_token_id` of config.json ({config.pad_token_id}) and of the tokenizer ({tokenizer.pad_token_id}) "
            "must be the same."
        )


def _whole_name(api: HfApi, repo_id: str) -> str:
    """Put the name of the account before a name without one."""
    return repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"


def _secrets(token: str | None) -> list[str]:
    """List the tokens that are in use."""
    return [each for each in (token, huggingface_hub.get_token()) if each]


def _has_token(file: BinaryIO, secrets: list[str]) -> bool:
    """Tell whether a file has something that looks like a token, or one of these."""
    before = b""
    while chunk := file.read(_CHUNK):
        window = before + chunk
        if _TOKEN.search(window) or any(secret.encode() in window for secret in secrets):
            return True
        before = window[-_LONGEST_TOKEN:]
    return False
