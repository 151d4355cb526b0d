"""The files of a model's folder: which are published, which never leave the machine, and what makes them unfit."""

import fnmatch
import hashlib
import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, logging

from ..data.files import replacing_binary_file
from ..models.text_batches import (
    TARGET_TOKENIZER,
    check_end_token,
    check_target_tokenizer,
    load_target_tokenizer,
)
from ..registration import AUTO_CLASSES
from .client import known_tokens


logger = logging.get_logger(__name__)

# What a training leaves at the top of a checkpoint to resume from, DeepSpeed and FSDP included: published on request.
_TRAINING_STATE = re.compile(
    r"(optimizer|scheduler|scaler|rng_state).*\.(pt|pth|bin)"
    r"|(trainer_state|manifest|stream_state(_\d+)?)\.json"
    r"|latest|zero_to_fp32\.py|(global_step|optimizer_|pytorch_model_fsdp_)\d+"
)
PUSH_FOLDER = "_pushing"  # of a run: copies of what is on its way to the Hub
# Never published: pickled arguments with paths of the machine, other checkpoints, logs, version control, and answers
# that are parts of the validation texts.
_NEVER_PUBLISHED = (
    "training_args.bin", "checkpoint-*/*", "averaged*/*", "runs/*", "logs/*", "_run*", "_saving/*", f"{PUSH_FOLDER}/*",
    ".*", "*/.*", "__pycache__/*", "*.tmp", "predictions.json", "nbest_predictions.json",
)  # fmt: skip
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
# Limits of the files that libraries read whole into memory, in bytes, and how deep their brackets may nest.
_MAX_JSON_SIZES = {
    CONFIG_NAME: 16 << 20,
    "generation_config.json": 16 << 20,
    "tokenizer_config.json": 16 << 20,
    "tokenizer.json": 256 << 20,
    "model.safetensors.index.json": 64 << 20,
}
_MAX_JSON_DEPTH = 100
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[][{}]', re.DOTALL)
# Tokens of a user, of an organization, and of a user who logged in through another site.
_TOKEN = re.compile(rb"(?:hf_|api_org_)[A-Za-z0-9]{30,}|hf_oauth_[A-Za-z0-9._-]{30,}")
_MAX_TOKEN_LENGTH = 4096
_CHUNK_SIZE = 1 << 20  # bytes


def check_folder(
    folder: str | os.PathLike[str], *, with_training_state: bool = False, token: str | None = None
) -> list[str]:
    """List the files of a folder to publish, and check that others can use them.

    Args:
        folder (`str`): Folder of a model, or of an adapter of PEFT.
        with_training_state (`bool`): Whether to include optimizer, scheduler and random states.
        token (`str`, *optional*): A token that no file may contain, in addition to that of the login.

    Returns:
        `list[str]`: their names, relative to the folder, sorted.

    Raises:
        ValueError: if there is no folder or no `config.json`; if the weights lack a tensor or have one too many; if
            model and tokenizer do not fit; if a file is a pickle, or a link to a file outside the folder; or if a
            file contains a token of the Hub.
    """
    _check_has_config(Path(folder))
    names = find_files(folder, with_training_state=with_training_state)
    check_files(folder, names, token=token)
    check_model(folder)
    return names


def find_files(folder: str | os.PathLike[str], *, with_training_state: bool = False) -> list[str]:
    """List the files of a folder to publish.

    Args:
        folder (`str`): The folder.
        with_training_state (`bool`): Whether to include optimizer, scheduler and random states.

    Returns:
        `list[str]`: their names, relative to the folder, sorted.

    Raises:
        ValueError: if a file is a link to a file outside the folder.
    """
    root = Path(folder)
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    names = [name for name in names if not _matches(name, _NEVER_PUBLISHED)]
    if not with_training_state:
        names = [name for name in names if not is_training_state(name)]
    allowed = [root.resolve()]
    if allowed[0].parent.name == "snapshots":  # of the Hub's cache, whose files are links to its blobs
        allowed.append(allowed[0].parents[1] / "blobs")
    for name in names:
        target = (root / name).resolve()
        if not any(target.is_relative_to(each) for each in allowed):
            raise ValueError(
                f"{name} is a link to {target}, which is not in the folder. Remove it, or replace it by a copy."
            )
    return names


def is_training_state(name: str) -> bool:
    """Return whether a file or folder of a checkpoint belongs to the training and not to the model.

    Args:
        name (`str`): Its name, relative to the checkpoint.

    Returns:
        `bool`: `True` for states of optimizer, scheduler, random numbers and trainer.
    """
    return _TRAINING_STATE.fullmatch(name.partition("/")[0]) is not None


def is_weight_file(name: str) -> bool:
    """Return whether a file holds weights in safetensors, or is their index.

    Args:
        name (`str`): Its name.

    Returns:
        `bool`: `True` if it does.
    """
    return _matches(name, _WEIGHT_FILES)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def check_files(folder: str | os.PathLike[str], names: list[str], *, token: str | None = None) -> None:
    """Check that files are no pickles and contain no token.

    Args:
        folder (`str`): The folder.
        names (`list[str]`): Names of the files; those of a training's state may be pickles.
        token (`str`, *optional*): A token to look for, in addition to that of the login.

    Raises:
        ValueError: if a file is a pickle or contains a token.
    """
    root, tokens = Path(folder), known_tokens(token)
    for name in names:
        if not is_training_state(name) and _may_be_pickle(root / name):
            raise ValueError(
                f"{name} may be a pickle, which can run code where it is loaded. Remove it; weights belong in "
                "model.safetensors (`save_pretrained` writes it)."
            )
    for name in names:
        with (root / name).open("rb") as file:
            if contains_token(file, tokens):
                raise ValueError(
                    f"{name} contains a token of the Hub. Remove it, and revoke it in the Hub's settings."
                )


def _may_be_pickle(path: Path) -> bool:
    """Check a file's name, its first bytes, and the content of a zip archive as `torch.save` writes it."""
    if path.suffix.lower() in _PICKLE_SUFFIXES:
        return True
    with path.open("rb") as file:
        head = file.read(9)
    if head[:2] == b"PK":
        try:
            with zipfile.ZipFile(path) as archive:
                return any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist())
        except zipfile.BadZipFile:
            return False  # nothing can be loaded from it
    # A pickle begins with 0x80 and its protocol. So may a safetensors file, which begins with its header's length.
    is_safetensors = head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size
    return head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5") and not is_safetensors


def contains_token(file: BinaryIO, tokens: list[str]) -> bool:
    """Return whether a file contains one of these tokens, or anything that looks like one of the Hub.

    Args:
        file (`BinaryIO`): The open file.
        tokens (`list[str]`): Tokens in use.

    Returns:
        `bool`: `True` if there is one.
    """
    before = b""
    while chunk := file.read(_CHUNK_SIZE):
        window = before + chunk
        if _TOKEN.search(window) or any(token.encode() in window for token in tokens):
            return True
        before = window[-_MAX_TOKEN_LENGTH:]
    return False


def _check_has_config(root: Path) -> None:
    """Raise unless a folder has the configuration of a model or of an adapter."""
    if any((root / name).is_file() for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME)):
        return
    models = sorted(str(path.parent) for path in root.glob(f"*/{CONFIG_NAME}"))
    hint = f" These have one: {', '.join(models[:5])}; give the one to publish." if models else ""
    raise ValueError(f"`folder` must be a folder with a {CONFIG_NAME}, but {root} has none.{hint}")


def check_model(folder: str | os.PathLike[str], model_class: type[PreTrainedModel] | None = None) -> None:
    """Check that a folder's model loads completely, and that its tokenizer fits.

    Of an adapter of PEFT, whose base model is not in the folder, only the weight files are checked. The check draws no
    random numbers, so a training can continue after it as if there were none.

    Args:
        folder (`str`): The folder.
        model_class (`type`, *optional*): Class of the model. The default is the one that `config.json` names.

    Raises:
        ValueError: if a file exceeds the limits of [`check_json_files`]; if the model does not load; if its weights
            lack a tensor, have one too many or one that is nan, infinite or of integers; if an index names files
            outside the folder; or if its tokenizer is another model's.
    """
    root = Path(folder)
    _check_has_config(root)
    check_json_files(root)
    _check_indices(root)
    if not (root / CONFIG_NAME).is_file():
        _check_weight_files(root)
        return
    if is_deepspeed_zero3_enabled():  # then loading is a collective operation, and one process pushes
        _check_weight_files(root)
        return
    with torch.random.fork_rng(devices=[]):
        model = _load_completely(root, model_class or _class_of_folder(root))
    _check_numbers(root, model)
    if not any((root / name).is_file() for name in _TOKENIZER_FILES):
        logger.warning(f"{root} has no tokenizer: texts can't be encoded. `save_pretrained` writes one.")
        return
    tokenizer = AutoTokenizer.from_pretrained(root, local_files_only=True)
    size = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > size:
        raise ValueError(f"The tokenizer has {len(tokenizer)} entries, but the model only {size}: they don't match.")
    pad_token_id = model.config.pad_token_id
    if pad_token_id is not None and tokenizer.pad_token_id not in (None, pad_token_id):
        raise ValueError(
            f"`pad_token_id` of {CONFIG_NAME} ({pad_token_id}) and of the tokenizer ({tokenizer.pad_token_id}) must "
            "be the same."
        )
    if model.config.is_encoder_decoder:
        _check_target_tokenizer(root, model, tokenizer)
    else:
        check_end_token(model.config, tokenizer)


def _check_target_tokenizer(root: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise unless a translator has a tokenizer for each of its vocabularies, and none of another model."""
    target_tokenizer = load_target_tokenizer(root) or tokenizer
    check_target_tokenizer(model.config, tokenizer, target_tokenizer)
    size = model.config.get_text_config(decoder=True).vocab_size
    if len(target_tokenizer) > size:
        raise ValueError(
            f"The tokenizer in {TARGET_TOKENIZER} has {len(target_tokenizer)} entries, but the model writes only "
            f"{size}: they don't match."
        )


def check_weights(folder: str | os.PathLike[str]) -> None:
    """Check that a model of this package in a folder has all its weights, before something is computed with it.

    transformers draws weights that are missing at random, and only lists them. Other models are not checked.

    Args:
        folder (`str`): The folder.

    Raises:
        ValueError: if its weights lack a tensor, have one too many or one of another shape, that is nan, infinite or
            of integers; or if they can't be read.
    """
    model_class = find_model_class(folder)
    if model_class is not None and any(model_class in models.values() for models in AUTO_CLASSES.values()):
        with torch.random.fork_rng(devices=[]):
            _check_numbers(Path(folder), _load_completely(Path(folder), model_class))


def _check_weight_files(root: Path) -> None:
    """Raise unless there are weights and each file of them is complete."""
    paths = sorted(root.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{root} has no weights in safetensors. `save_pretrained` writes them.")
    for path in paths:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ValueError(f"The model in {root} does not load: {path.name}: {error}") from error


def find_model_class(folder: str | os.PathLike[str]) -> type[PreTrainedModel] | None:
    """Find the model class that `config.json` names, among those of this package and of transformers.

    Args:
        folder (`str`): Folder of a model.

    Returns:
        `type[PreTrainedModel]`: the class; `None` if the config is of another model, or can't be read.
    """
    try:
        return _class_of_folder(Path(folder))
    except (ValueError, OSError, KeyError):
        return None


def check_json_files(folder: str | os.PathLike[str]) -> None:
    """Check that the files of config and tokenizer have no absurd size or depth, before anything reads them.

    At most 16 MiB for a config, 64 MiB for an index, 256 MiB for a tokenizer, and brackets in 100 levels.

    Args:
        folder (`str`): The folder of a model, perhaps with the tokenizer of its target in a subfolder.

    Raises:
        ValueError: if a file exceeds a limit, or the config is no JSON object.
    """
    folders = (Path(folder), Path(folder) / TARGET_TOKENIZER)
    for path in (each / name for each in folders for name in _MAX_JSON_SIZES if (each / name).is_file()):
        size, limit = path.stat().st_size, _MAX_JSON_SIZES[path.name]
        if size > limit:
            raise ValueError(f"{path} must have at most {limit:,} bytes, got {size:,}.")
        depth = 0
        for found in _STRING_OR_BRACKET.finditer(path.read_bytes()):
            depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found[0], 0)
            if depth > _MAX_JSON_DEPTH:
                raise ValueError(f"{path} must not nest brackets deeper than {_MAX_JSON_DEPTH} levels.")
        if path.name == CONFIG_NAME and not path.read_bytes().lstrip().startswith(b"{"):
            raise ValueError(f"{path} must hold a JSON object.")


def _check_numbers(root: Path, model: PreTrainedModel) -> None:
    """Raise if a weight of a loaded model is nan or infinite, or was cast from integers."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.float()).all():
            raise ValueError(f"The weights `{name}` in {root} hold nan or infinity.")
    if not all(each.is_floating_point() for each in model.parameters()):
        return  # quantised weights
    for path in sorted(root.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (an open file of safetensors, which is no dictionary)
                dtype = file.get_slice(name).get_dtype()
                if not dtype.startswith(("F", "BF")) and not name.endswith("position_ids"):  # a buffer of old files
                    raise ValueError(f"The weights `{name}` in {path} must be floating-point numbers, got {dtype}.")


def _check_indices(root: Path) -> None:
    """Raise unless the shards that indices name are files of the folder, as others will have them."""
    for path in sorted(root.glob("*.safetensors.index.json")):
        try:
            shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
            outside = next((name for name in shards if re.search(r"^[/\\]|\.\.|:", name)), None)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path.name} in {root} must map names of weights to files: {error!r}.") from error
        if outside is not None:
            raise ValueError(
                f"{path.name} in {root} names {outside}, which is not in the folder. `save_pretrained` writes an "
                "index and its files anew."
            )


def _class_of_folder(root: Path) -> type[PreTrainedModel]:
    """Find the model class that config.json names, among those of this package and of transformers."""
    config = AutoConfig.from_pretrained(root, local_files_only=True)
    classes = {model.__name__: model for models in AUTO_CLASSES.values() for model in models.values()}
    architecture = next(iter(config.architectures or []), None)
    model_class = classes.get(architecture) or getattr(transformers, str(architecture), None)
    if model_class is None:
        raise ValueError(f"`architectures` in {CONFIG_NAME} must name a model class, got {config.architectures}.")
    return model_class


def _load_completely(root: Path, model_class: type[PreTrainedModel]) -> Any:
    """Load a model, and raise if a weight is missing, has another shape or is left over."""
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, loading = model_class.from_pretrained(
            root, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, RuntimeError, KeyError, SafetensorError, pickle.UnpicklingError) as error:
        raise ValueError(f"The model in {root} does not load: {error}") from error
    finally:
        if shows_progress:
            logging.enable_progress_bar()
    reshaped = [f"{name} has shape {[*found]}, not {[*wanted]}" for name, found, wanted in loading["mismatched_keys"]]
    found = {"it lacks ": loading["missing_keys"], "it has also ": loading["unexpected_keys"], "": reshaped}
    for what, names in found.items():
        if names:
            fault = what + ", ".join(sorted(names)[:3])
            raise ValueError(
                f"The weights in {root} are not those of a {model_class.__name__} with its {CONFIG_NAME}: {fault}."
            )
    return model


class FileHash(NamedTuple):
    """What identifies a file's content. The Hub gives one of the two: SHA-256 for files in LFS, git's for others."""

    sha256: str | None
    git: str | None

    def matches(self, other: "FileHash | None") -> bool:
        """Compare by SHA-256 if both have it, else by git's hash.

        Args:
            other (`FileHash`, *optional*): The other file's hash; `None` if there is no such file.

        Returns:
            `bool`: `True` if the contents are the same.
        """
        if other is None:
            return False
        if self.sha256 is not None and other.sha256 is not None:
            return self.sha256 == other.sha256
        return self.git is not None and self.git == other.git


def hash_file(file: BinaryIO) -> FileHash:
    """Compute both hashes of a file.

    Args:
        file (`BinaryIO`): The open file.

    Returns:
        `FileHash`: SHA-256 and git's hash, in hexadecimal digits.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
    while chunk := file.read(_CHUNK_SIZE):
        sha256.update(chunk)
        git.update(chunk)
    return FileHash(sha256.hexdigest(), git.hexdigest())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one step; a link to another file is replaced, and that file is left alone.

    Args:
        path (`Path`): The file.
        content (`bytes`): Its new content.
    """
    complete = path.with_name(f"{path.name}.tmp")
    with replacing_binary_file(str(complete)) as file:
        file.write(content)
    complete.replace(path)
