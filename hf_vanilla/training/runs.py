"""The folder of a run: its lock, the options it was started with, resuming, and its final model."""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import distributed
from transformers import EarlyStoppingCallback, Trainer, TrainerState, TrainingArguments
from transformers.tokenization_utils_base import FULL_TOKENIZER_FILE
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import CONFIG_NAME, logging

from ..data.files import read_json_object, replacing_file
from ..data.tokenization import tokenizer_settings
from ..hub.pushing_trainer import ResilientPushTrainer
from ..hub.run_settings import save_run_settings
from ..models.text_batches import TARGET_TOKENIZER
from .checkpointing import keep_manifests, wait_for_manifests
from .checkpoints import checkpoint_to_resume, find_best_checkpoint, folders_by_step, last_complete_checkpoint
from .divergence import check_finite_weights
from .manifest import ORDER_ARGUMENTS
from .signals import exit_on_sigterm, stopping_on_signals


logger = logging.get_logger(__name__)


# `Trainer` pushes no files whose names begin with an underscore.
LOCK_FILE = "_run.lock"
OPTIONS_FILE = "_run_options.json"
EARLIER_FOLDER = "_run_earlier"  # what an attempt has left that was given up
SAVING_FOLDER = "_saving"  # the final model while it is written
ALL_RESULTS_FILE = "all_results.json"


# Training arguments that decide the order of the examples, the updates, their precision or the final model. Most of
# those of optimizer and schedule would have no effect: `Trainer` restores them from the checkpoint.
SEMANTIC_ARGUMENTS = (
    *ORDER_ARGUMENTS,
    "average_last",
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "optim",
    "optim_args",
    "muon",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "label_smoothing_factor",
    "teacher_forcing_ratio",
    "consistency_weight",
    "bf16",
    "fp16",
    "tf32",
)


# Options of places, logs and speed, which do not change what is learnt, and `precision`, which sets `bf16`.
NON_SEMANTIC_OPTIONS = re.compile(
    r"output_dir|force_resume|stop_grace|on_nan|on_disk_full|stop_on_divergence|results_file|seeds|main_score|disable_tqdm|resume_from_checkpoint"
    r"|preprocessing_num_workers|local_rank|debug"
    r"|report_to|project|run_name|precision|use_cpu|skip_memory_metrics|torch_compile|prediction_loss_only|label_names"
    r"|remove_unused_columns|include_for_metrics|per_device_eval_batch_size|gradient_checkpointing"
    r"|(log|logging|save|push|hub|trackio|dataloader(?!_drop_last)|ddp|torch_compile|torch_empty|eval|do|gradient_checkpointing)_.*"
)


# Options whose values are files or models, which are compared by content.
PATH_OPTIONS = re.compile(r".*(_files?|_path)|dataset_name")


# What earlier versions noted in place of a folder of data.
NO_CONTENT = f"sha256 {hashlib.sha256().hexdigest()}"


# The files of a model's folder that decide what it computes.
MODEL_FILES = re.compile(
    r".*\.safetensors|pytorch_model.*\.bin|config\.json|tokenizer\.json|vocab\..*|merges\.txt|.*\.model"
)


@contextmanager
def lock_run_folder(output_dir: str | os.PathLike[str], *, is_main_process: bool = True) -> Iterator[None]:
    """Lock a folder against other runs; the lock ends with its process.

    SIGTERM ends this block with exit code 143, after the folder is unlocked.

    Args:
        output_dir (`str`): The folder. A new one is removed again if nothing has been written to it.
        is_main_process (`bool`): Whether to lock; the other processes of a run must not.

    Yields:
        Nothing.

    Raises:
        ValueError: if another run has the lock.
    """
    with exit_on_sigterm():
        if is_main_process:
            with _lock(Path(output_dir)):
                yield
        else:
            yield


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock a folder."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"`output_dir` ({folder}) is in use by another run; wait until it has ended, or give another folder."
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows does not remove open files
            (folder / LOCK_FILE).unlink()  # before the release: afterwards it may be another run's
        lock.release()
        if is_new and folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK_FILE, OPTIONS_FILE}:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def main_process_first(args: TrainingArguments) -> Iterator[None]:
    """Run this block on the first process, and then on the others, as `TrainingArguments.main_process_first` does.

    The others wait for up to a day, however short the `ddp_timeout` of a step is. If the first process fails, they
    run the block too.

    Args:
        args (`TrainingArguments`): The training arguments; all processes must call this.

    Yields:
        Nothing.
    """
    if args.world_size == 1:
        yield
        return
    group = distributed.new_group(backend="gloo", timeout=timedelta(days=1))
    if args.process_index > 0:
        distributed.barrier(group)
    try:
        yield
    finally:
        if args.process_index == 0:
            distributed.barrier(group)


def begin_run(args: TrainingArguments, *options: Any) -> tuple[str | None, bool]:
    """Find the checkpoint that a run resumes from, and check that its options are unchanged.

    A run that returns to the checkpoint `resume_from_checkpoint` does so once: the same command again resumes from the
    newest checkpoint since then. Checkpoints of the folder that are later than the one to resume from, or all if a run
    starts anew, are of an attempt that was given up. They are moved to a numbered folder in `_run_earlier`.

    Args:
        args (`TrainingArguments`): The training arguments; all processes must call this.
        *options (`Any`): Dataclasses of further options, such as those of model and data.

    Returns:
        `tuple[str | None, bool]`: the checkpoint, if there is one, and whether the run is finished.

    Raises:
        ValueError: if an option or the tokenizer differs from that of the run to resume.
    """
    folder, given = str(args.output_dir), args.resume_from_checkpoint
    returned_to = None if given is None else os.path.realpath(given)
    is_continued = given is None or saved_option(folder, "resume_from_checkpoint") == returned_to
    checkpoint = (checkpoint_to_resume(folder) if is_continued else None) or checkpoint_to_resume(folder, given)
    finished = is_continued and is_finished(args)
    if args.world_size > 1:
        args.distributed_state.wait_for_everyone()  # before files are moved
    if args.should_save:
        if checkpoint is not None:
            _check_tokenizers(Path(checkpoint))
        found = {name: value for each in options for name, value in vars(each).items()}
        found.update({name: getattr(args, name) for name in SEMANTIC_ARGUMENTS if hasattr(args, name)})
        decisive = _check_options(folder, decisive_options(found), checkpoint)
        if not finished:
            _set_aside_later(Path(folder), checkpoint)
        _save_options(folder, {**decisive, "resume_from_checkpoint": returned_to})
    if finished:
        logger.warning(f"The run in {folder} is finished: it has all its updates and its final model.")
    elif checkpoint is not None:
        since = f", since the run has returned to {given} before" if is_continued and given is not None else ""
        logger.warning(f"Resuming from {checkpoint}{since}; for a new run give another --output_dir.")
    return checkpoint, finished


def decisive_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Select the options that decide what is learnt, with a checksum in place of each file or model.

    Args:
        options (`Mapping[str, Any]`): All options by name.

    Returns:
        `dict[str, Any]`: those that must be unchanged when a run is resumed.
    """
    return {
        name: _checksum_of_content(value) if PATH_OPTIONS.fullmatch(name) else value
        for name, value in options.items()
        if not NON_SEMANTIC_OPTIONS.fullmatch(name)
    }


def check_and_save_options(
    output_dir: str | os.PathLike[str], options: Mapping[str, Any], checkpoint: str | os.PathLike[str] | None = None
) -> None:
    """Check that a run is resumed with the options it was started with, and save them.

    A run that has neither a checkpoint nor a model yet may change its options.

    Args:
        output_dir (`str`): Folder of the run.
        options (`Mapping[str, Any]`): Options as returned by [`decisive_options`].
        checkpoint (`str`, *optional*): The checkpoint to resume from, of this or another run.

    Raises:
        ValueError: if an option differs from that of the run to resume, or the saved options can't be read.
    """
    _save_options(output_dir, _check_options(output_dir, options, checkpoint))


def _check_options(
    output_dir: str | os.PathLike[str], options: Mapping[str, Any], checkpoint: str | os.PathLike[str] | None
) -> dict[str, Any]:
    """Check that a run is resumed with the options it was started with, and return them as JSON has them."""
    folder = Path(output_dir) if checkpoint is None else Path(checkpoint).absolute().parent
    given: dict[str, Any] = json.loads(json.dumps(options, default=str))
    if (folder / OPTIONS_FILE).is_file() and (checkpoint is not None or (folder / CONFIG_NAME).is_file()):
        _check_unchanged(given, _read_options(folder / OPTIONS_FILE), folder)
    return given


def _save_options(output_dir: str | os.PathLike[str], options: dict[str, Any]) -> None:
    """Save the options of a run."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    with replacing_file(str(Path(output_dir) / OPTIONS_FILE)) as file:
        file.write(json.dumps(options, indent=1, ensure_ascii=False) + "\n")


def _set_aside_later(folder: Path, checkpoint: str | None) -> None:
    """Move checkpoints, and the state of a final model, that are later than the checkpoint to resume from, if any."""
    step = -1
    if checkpoint is not None and Path(checkpoint).resolve().parent == folder.resolve():
        step = read_json_object(Path(checkpoint, TRAINER_STATE_NAME))["global_step"]
    found = folders_by_step(folder) if folder.is_dir() else {}
    later = [each for number, each in found.items() if number > step]
    with contextlib.suppress(ValueError):  # there is none, or a broken one
        if read_json_object(folder / TRAINER_STATE_NAME).get("global_step", 0) > step:
            later.append(folder / TRAINER_STATE_NAME)
    if not later:
        return
    attempts = folder / EARLIER_FOLDER
    attempts.mkdir(exist_ok=True)
    target = attempts / str(
        1 + max((int(each.name) for each in attempts.iterdir() if each.name.isdecimal()), default=0)
    )
    target.mkdir()
    for path in later:
        os.replace(path, target / path.name)
    names = ", ".join(path.name for path in later)
    logger.warning(f"Moved to {target}, as the run does not continue from them: {names}.")


def saved_option(output_dir: str | os.PathLike[str], name: str) -> Any:
    """Return an option of the run in a folder.

    Args:
        output_dir (`str`): Folder of the run, or of a fine-tuning with a subfolder for each seed.
        name (`str`): Name of the option.

    Returns:
        `Any`: its value, or `None` if there is no such run, or it has no such option.

    Raises:
        ValueError: if the saved options can't be read.
    """
    folder = Path(output_dir)
    for path in [folder / OPTIONS_FILE, *sorted(folder.glob(f"seed-*/{OPTIONS_FILE}"))]:
        if path.is_file():
            return _read_options(path).get(name)
    return None


def train_to_end(trainer: Trainer, checkpoint: str | os.PathLike[str] | None = None) -> None:
    """Train, from a checkpoint if there is one, and save the metrics of the training.

    Of a checkpoint that has all updates only the weights are loaded: transformers' `Trainer` would add an update. The
    checkpoints get manifests ([`ManifestCallback`]), and SIGTERM or Ctrl-C saves one and ends the training
    ([`StopOnSignalCallback`]).

    Args:
        trainer (`Trainer`): The trainer; all processes must call this.
        checkpoint (`str`, *optional*): The checkpoint to resume from.
    """
    if checkpoint is None or not _is_over(read_json_object(Path(checkpoint) / TRAINER_STATE_NAME), trainer.args):
        keep_manifests(trainer)
        with stopping_on_signals(trainer, getattr(trainer.args, "stop_grace", 25.0)):
            try:
                result = trainer.train(resume_from_checkpoint=checkpoint)
            finally:
                wait_for_manifests()  # after an error too, so that this process can resume
        trainer.log_metrics("train", result.metrics)
        save_metrics(trainer, "train", result.metrics)
        return
    trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    best = None
    if trainer.args.load_best_model_at_end:
        best = find_best_checkpoint(trainer.state, Path(checkpoint).parent)
        if best is None and trainer.state.best_model_checkpoint is not None:
            logger.warning("The best checkpoint is gone, and so the last one is taken.")
    trainer.model.load_state_dict(type(trainer.model).from_pretrained(best or checkpoint).state_dict())


def save_metrics(trainer: Trainer, split: str, metrics: Mapping[str, Any]) -> None:
    """Save metrics as `Trainer.save_metrics` does, but replace each file in one step.

    Args:
        trainer (`Trainer`): The trainer; all processes may call this.
        split (`str`): Name of the file, `<split>_results.json`; `all_results.json` gets the metrics too.
        metrics (`Mapping[str, Any]`): The metrics.

    Raises:
        ValueError: if a file can't be written.
    """
    if not trainer.is_world_process_zero():
        return
    folder = Path(str(trainer.args.output_dir))
    try:
        collected = read_json_object(folder / ALL_RESULTS_FILE)
    except ValueError:  # there is none, or a broken one
        collected = {}
    for name, content in ((f"{split}_results.json", metrics), (ALL_RESULTS_FILE, {**collected, **metrics})):
        with replacing_file(str(folder / name)) as file:
            file.write(json.dumps(content, indent=4, sort_keys=True))


@contextmanager
def resume_hint_on_interrupt(run_dir: str | os.PathLike) -> Iterator[None]:
    """Add a note on how to resume the run to a Ctrl-C in this block.

    Args:
        run_dir (`str`): The `output_dir` of a `Trainer`.

    Yields:
        Nothing: the block trains.

    Raises:
        KeyboardInterrupt: that of the block, with the note.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        checkpoint = last_complete_checkpoint(run_dir)
        interrupt.add_note(
            f"The same command resumes from {checkpoint}."
            if checkpoint is not None
            else "There is no checkpoint yet (--save_steps), so the same command starts from the beginning."
        )
        raise


def save_final_model(trainer: Trainer) -> None:
    """Save model, tokenizer and state in the folder of the run, and push it with `push_to_hub`.

    They are written to a subfolder, and then moved file by file, so that an error while writing leaves earlier files
    unchanged.

    Args:
        trainer (`Trainer`): The trainer; all processes must call this.

    Raises:
        ValueError: if a weight is nan or infinite; nothing is written then.
    """
    check_finite_weights(trainer.model, trainer.state.global_step)
    folder = Path(str(trainer.args.output_dir))
    temporary = folder / SAVING_FOLDER
    if trainer.args.should_save:
        shutil.rmtree(temporary, ignore_errors=True)
    try:
        trainer.save_model(str(temporary), _internal_call=True)  # does not push yet
        if trainer.args.should_save:
            save_run_settings(trainer, temporary)
            trainer.state.save_to_json(str(temporary / TRAINER_STATE_NAME))
            _move_files(temporary, folder)
    finally:
        if trainer.args.should_save:
            shutil.rmtree(temporary, ignore_errors=True)
    if not trainer.args.push_to_hub:
        return
    if isinstance(trainer, ResilientPushTrainer):
        trainer.push_folder("Model save")
    else:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def is_finished(args: TrainingArguments) -> bool:
    """Check whether a run has had all its updates, or has stopped early, and its final model is saved.

    `save_final_model` saves the trainer's state last, so that state describes the model in the folder.

    Args:
        args (`TrainingArguments`): The length of the run, and its folder.

    Returns:
        `bool`: true if the run is finished.
    """
    folder = Path(str(args.output_dir))
    has_model = any(folder.glob("model*.safetensors")) and not (folder / SAVING_FOLDER).exists()
    try:
        state = read_json_object(folder / TRAINER_STATE_NAME)
    except ValueError:  # there is none, or a broken one
        return False
    return has_model and _is_over(state, args)


def _is_over(state: dict[str, Any], args: TrainingArguments) -> bool:
    """Whether no updates of a run of this length are left, or early stopping has ended it, with no less patience."""
    if args.max_steps > 0:
        has_all_updates = state.get("global_step", 0) >= args.max_steps
        has_same_length = state.get("max_steps") == args.max_steps
    else:  # an epoch is a sum of fractions
        has_all_updates = (state.get("epoch") or 0.0) >= args.num_train_epochs - 1e-9
        has_same_length = state.get("num_train_epochs") == math.ceil(args.num_train_epochs)
    if has_all_updates:
        return True
    patience = getattr(args, "early_stopping_patience", 0)
    has_ended = any("train_runtime" in entry for entry in state.get("log_history", []))
    waited = patience if has_ended else 0
    stopping = state.get("stateful_callbacks", {}).get(EarlyStoppingCallback.__name__)
    if isinstance(stopping, dict):  # of a run that has ended, the last evaluation may not be counted
        counter = stopping["attributes"]["early_stopping_patience_counter"]
        waited = stopping["args"]["early_stopping_patience"] if has_ended else counter
    return has_same_length and 0 < patience <= waited


def _read_options(path: Path) -> dict[str, Any]:
    """Read the options that a run was started with."""
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ValueError(
            f"{path} must hold the options of the run in its folder, but is broken. Remove it to resume with the "
            "options given now, or give another `output_dir`."
        )
    return options


def _check_unchanged(options: dict[str, Any], earlier: dict[str, Any], folder: Path) -> None:
    """Raise if options differ; an option that only one of two versions has is ignored."""
    differing = [name for name, value in options.items() if name in earlier and earlier[name] != value]
    differing = [name for name in differing if earlier[name] != NO_CONTENT]
    # Version 0.1 had defaults where scripts now look for the usual columns, and find these first.
    defaults = ("text", "label", "sent1", "endings", "tokens", "tags")
    is_found = {name for name in differing if name.endswith("_column") and options[name] is None}
    differing = [name for name in differing if name not in is_found or earlier[name] not in defaults]
    if not differing:
        return
    name, *others = differing
    before = "default" if earlier[name] is None else repr(earlier[name])
    difference = f"is {options[name]!r}, not the {before}"
    if PATH_OPTIONS.fullmatch(name):
        difference = "has other contents than those"
    also = f" (and so {', '.join(others)})" if others else ""
    raise ValueError(
        f"`{name}` {difference} that the run in {folder} was started with{also}. Give the same options to resume that "
        "run, or another `output_dir` for a new one, which a checkpoint as `model_name_or_path` can start from."
    )


def _check_tokenizers(checkpoint: Path) -> None:
    """Raise if the tokenizers in the folder of a run, which it resumes with, are not those of the checkpoint."""
    folder = checkpoint.absolute().parent
    for name in (FULL_TOKENIZER_FILE, f"{TARGET_TOKENIZER}/{FULL_TOKENIZER_FILE}"):
        path, saved = folder / name, checkpoint / name
        content = _tokenizer_content(saved) if saved.is_file() else None
        if content is not None and path.is_file() and _tokenizer_content(path) != content:
            raise ValueError(
                f"{path} differs from {saved}, with which the run was trained. Restore it from there to resume that "
                "run, or give another `output_dir` for a new one."
            )


def _tokenizer_content(path: Path) -> dict[str, Any] | None:
    """Read a tokenizer's file, without the settings that calls change; `None` if it is broken."""
    try:
        return tokenizer_settings(path.read_text(encoding="utf-8"))
    except ValueError:
        return None


def _checksum_of_content(value: Any) -> Any:
    """Return a checksum for a file, the files of a model, or names and sizes in a folder; other values as they are."""
    if isinstance(value, list | tuple):
        return [_checksum_of_content(each) for each in value]
    path = Path(str(value))
    if value is None or not path.exists():
        return value
    files, checksum = [path], hashlib.sha256()
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.is_file())
        files = [each for each in found if MODEL_FILES.fullmatch(each.name)]
        if not files:  # of data, such as images in a folder for each label, and so perhaps very many
            listed = [(each.relative_to(path).as_posix(), each.stat().st_size) for each in found]
            checksum.update(json.dumps(listed).encode())
    for each in files:
        with each.open("rb") as file:
            checksum.update(hashlib.file_digest(file, "sha256").digest())
    return f"sha256 {checksum.hexdigest()}"


def _move_files(source: Path, folder: Path) -> None:
    """Move all files of `source` to `folder`, and remove older weights with other file names there."""
    moved = [path.relative_to(source) for path in sorted(source.rglob("*")) if path.is_file()]
    # Weights make the model complete, and the state that of a finished run.
    moved.sort(key=lambda name: (name.name == TRAINER_STATE_NAME, name.suffix == ".safetensors"))
    for name in moved:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, folder / name)
    for path in folder.glob("model*.safetensors*"):
        if path.relative_to(folder) not in moved:
            path.unlink()
