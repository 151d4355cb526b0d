"""The manifest of a checkpoint: its files with their hashes, and what the training was when it was saved.

    checkpoint-500/manifest.json
        step, world_size
        files       name -> size in bytes, sha256
        options     the arguments that decide the order of the examples
        hashes      config, tokenizer, data, code
        versions    python, torch, transformers, ...
        sha256      of all this

It is written last, after all files are on the disk. So a checkpoint with a manifest is complete, any change of a file
shows, and a training with another configuration can be refused.
"""

import functools
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils import CONFIG_NAME

from ..data.files import replacing_file
from ..data.tokenization import tokenizer_settings


MANIFEST_FILE = "manifest.json"
FORMAT = 2
# Arguments that decide which examples are in which update.
ORDER_ARGUMENTS = (
    "seed",
    "data_seed",
    "max_tokens_per_batch",
    "stream_buffer",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "train_sampling_strategy",
    "dataloader_drop_last",
)
# Fields of a config that saving or loading a model sets.
VOLATILE_FIELDS = {
    "architectures",
    "auto_map",
    "custom_pipelines",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
}
PACKAGES = ("hf_vanilla", "torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy")
HASHED_ROWS = 256


def order_seed(args: TrainingArguments) -> int:
    """Return the seed of the order of the examples.

    Args:
        args (`TrainingArguments`): The training arguments.

    Returns:
        `int`: `data_seed` if it is given, or else `seed`.
    """
    return args.seed if args.data_seed is None else args.data_seed


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint once all its files are on the disk.

    Args:
        folder (`Path`): The checkpoint.
        facts (`Mapping[str, Any]`): What else the manifest holds, as [`training_facts`] returns it, and `step`.

    Raises:
        OSError: if a file can't be read, or the manifest can't be written.
    """
    files = {}
    for name in list_files(folder):
        with (folder / name).open("rb") as file:
            if os.name == "posix":  # elsewhere only files open for writing can be synced
                os.fsync(file.fileno())
            files[name] = {"size": os.fstat(file.fileno()).st_size, "sha256": _digest(file)}
    for each in sorted({(folder / name).parent for name in files}):
        _sync_folder(each)
    manifest = {"format": FORMAT, **facts, "files": files}
    with replacing_file(str(folder / MANIFEST_FILE)) as file:
        json.dump({**manifest, "sha256": _hash_of(manifest)}, file, indent=1, ensure_ascii=False)
        file.write("\n")
    _sync_folder(folder)
    _sync_folder(folder.parent)


def list_files(folder: Path) -> list[str]:
    """List the files of a checkpoint but for its manifest, and the pickled arguments, which are never read.

    Args:
        folder (`Path`): The checkpoint.

    Returns:
        `list[str]`: their names, relative to the folder, sorted.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    return [name for name in names if not name.startswith((MANIFEST_FILE, TRAINING_ARGS_NAME))]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a checkpoint.

    Args:
        folder (`Path`): The checkpoint.

    Returns:
        `dict[str, Any]`: the manifest; `None` if the checkpoint has none.

    Raises:
        ValueError: if it can't be read, or is no manifest of this version.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"an unreadable {MANIFEST_FILE}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"a broken {MANIFEST_FILE}")
    version_of_format, checksum = manifest.get("format"), manifest.pop("sha256", None)
    if version_of_format not in (1, FORMAT):
        raise ValueError(f"a {MANIFEST_FILE} of format {version_of_format!r}, which this version can't check")
    if version_of_format == FORMAT and checksum != _hash_of(manifest):
        raise ValueError(f"a broken {MANIFEST_FILE}: it has changed since it was written")
    return manifest


def damage_of_files(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """Compare the files of a checkpoint with its manifest.

    Args:
        folder (`Path`): The checkpoint.
        manifest (`Mapping[str, Any]`): Its manifest.

    Returns:
        `str`: what is wrong with the first damaged file; `None` if all are as they were written. Files that the
        manifest does not list are ignored.
    """
    for name, expected in manifest["files"].items():
        path = folder / name
        try:
            if path.stat().st_size != expected["size"]:
                return f"a truncated or broken {name}: {path.stat().st_size:,} bytes, not {expected['size']:,}"
            with path.open("rb") as file:
                if _digest(file) != expected["sha256"]:
                    return f"a broken {name}: its bytes have changed since it was written"
        except FileNotFoundError:
            return f"no {name}"
        except (OSError, KeyError, TypeError) as error:
            return f"an unreadable {name} ({error})"
    return None


def training_facts(args: TrainingArguments, model: Any, processing_class: Any, dataset: Any) -> dict[str, Any]:
    """Describe a training for the manifests of its checkpoints.

    Args:
        args (`TrainingArguments`): The training arguments.
        model (`torch.nn.Module`): The model.
        processing_class (`Any`): The tokenizer or image processor, if there is one.
        dataset (`Any`): The training data, if it is known.

    Returns:
        `dict[str, Any]`: `world_size`, `options`, `hashes` and `versions`.
    """
    hashes = {
        "config": _hash_of(_config_fields(model)),
        "tokenizer": _hash_of(_processing_content(processing_class)),
        "data": _hash_of_data(dataset),
        "code": hash_of_code(),
    }
    options = {name: getattr(args, name) for name in ORDER_ARGUMENTS if hasattr(args, name)}
    return {
        "world_size": args.world_size,
        "options": json.loads(json.dumps(options, default=str)),
        "hashes": hashes,
        "versions": versions(),
    }


def changes(folder: Path, manifest: Mapping[str, Any], facts: Mapping[str, Any], model: Any) -> list[str]:
    """Name what differs between a training and the one that saved a checkpoint, so that it can't continue exactly.

    Args:
        folder (`Path`): The checkpoint.
        manifest (`Mapping[str, Any]`): Its manifest.
        facts (`Mapping[str, Any]`): The training, as [`training_facts`] returns it.
        model (`torch.nn.Module`): The model of the training.

    Returns:
        `list[str]`: one phrase for each difference.
    """
    found = []
    if manifest.get("world_size") != facts["world_size"]:
        found.append(f"the number of processes is {facts['world_size']}, not {manifest.get('world_size')}")
    before = manifest.get("options", {})
    for name, value in facts["options"].items():
        if name in before and before[name] != value:
            found.append(f"`{name}` is {value!r}, not {before[name]!r}")
    for name in ("config", "tokenizer", "data"):
        if _differs(manifest, facts, "hashes", name):
            what = {"config": "the model's configuration", "data": "the training data"}.get(name, f"the {name}")
            found.append(f"{what} has changed" + (_changed_fields(folder, model) if name == "config" else ""))
    return found


def harmless_changes(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Name changes of code and of versions since a checkpoint was saved.

    Args:
        manifest (`Mapping[str, Any]`): The manifest of the checkpoint.
        facts (`Mapping[str, Any]`): The training, as [`training_facts`] returns it.

    Returns:
        `list[str]`: one phrase for each difference.
    """
    found = ["the code of hf_vanilla"] if _differs(manifest, facts, "hashes", "code") else []
    before = manifest.get("versions", {})
    return found + [
        f"{name} ({before[name]}, now {new})"
        for name, new in facts["versions"].items()
        if name in before and before[name] != new
    ]


@functools.lru_cache(maxsize=1)
def hash_of_code() -> str:
    """Hash the source files of the package.

    Returns:
        `str`: SHA-256 in hexadecimal digits.
    """
    root = Path(__file__).parents[1]
    checksum = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        checksum.update(path.relative_to(root).as_posix().encode())
        checksum.update(hashlib.sha256(path.read_bytes()).digest())
    return checksum.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that take part in a training.

    Returns:
        `dict[str, str]`: by name; packages that are not installed are left out.
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _digest(file: Any) -> str:
    """Return the SHA-256 of an open file; other threads run meanwhile."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_of(content: Any) -> str | None:
    """Return the SHA-256 of a value as JSON; `None` for `None`."""
    if content is None:
        return None
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _config_fields(model: Any) -> dict[str, Any] | None:
    """Return the fields of a model's config that decide what it computes."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    return {name: value for name, value in config.to_dict().items() if name not in VOLATILE_FIELDS}


def _changed_fields(folder: Path, model: Any) -> str:
    """Name the fields of the config that differ from those saved in a checkpoint, if they can be read."""
    try:
        saved = type(model.config).from_pretrained(folder, local_files_only=True).to_dict()
    except (OSError, ValueError):
        return ""
    fields = _config_fields(model) or {}
    differing = [name for name, value in fields.items() if saved.get(name) != value]
    named = ", ".join(f"`{name}` is {fields[name]!r}, not {saved.get(name)!r}" for name in differing[:3])
    return f" ({CONFIG_NAME}: {named})" if named else ""


def _processing_content(processing_class: Any) -> Any:
    """Return what decides how a tokenizer or image processor encodes; the padding of its last call is left out."""
    backend = getattr(processing_class, "backend_tokenizer", None)
    if backend is not None:
        return tokenizer_settings(backend.to_str())
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return processing_class.get_vocab()
    to_dict = getattr(processing_class, "to_dict", None)
    if to_dict is None:
        return None
    return {name: value for name, value in to_dict().items() if name not in VOLATILE_FIELDS}


def _hash_of_data(dataset: Any) -> str | None:
    """Hash the number of rows, and the columns and some rows, evenly spaced, of stored data; `None` for a stream."""
    if not hasattr(dataset, "__len__"):
        return None
    content: list[Any] = [len(dataset)]
    stored = getattr(dataset, "dataset", dataset)  # of torch's `Subset` and of others that wrap one
    if isinstance(stored, datasets.Dataset) and len(stored) > 0:
        # As stored: a transform may be random.
        stored = stored.with_format("arrow")
        content += [stored.column_names, list(_some_rows(stored))]
    return _hash_of(content)


def _some_rows(stored: Any) -> Iterator[str]:
    """Yield a hash of each chosen row."""
    chosen = np.unique(np.linspace(0, len(stored) - 1, min(HASHED_ROWS, len(stored)), dtype=np.int64))
    for row in stored[chosen.tolist()].to_pylist():
        yield hashlib.sha256(repr(sorted(row.items())).encode()).hexdigest()


def _differs(manifest: Mapping[str, Any], facts: Mapping[str, Any], part: str, name: str) -> bool:
    """Compare an entry; one that either side lacks is no difference."""
    before, now = manifest.get(part, {}).get(name), facts[part].get(name)
    return before is not None and now is not None and before != now
