"""The folder of a run: whose it is, what it was started with, and how it ends."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import CONFIG_NAME, logging

from ..data.files import replacing_file
from ..hub.pushing_trainer import PatientPushes
from .checkpoints import SAVING_FOLDER, _move_files, checkpoint_to_resume, last_complete_checkpoint


logger = logging.get_logger(__name__)


# Of the options of training, those that decide which examples come when, and what the final model is.
DECISIVE_ARGUMENTS = (
    "seed",
    "data_seed",
    "max_tokens_per_batch",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "average_last",
)


# `Trainer` keeps files with these beginnings off the Hub.
LOCK_FILE = "_run.lock"


OPTIONS_FILE = "_run_options.json"


# Options that decide where things go, what is told and how fast it is, and not what is learnt.
INDIFFERENT = re.compile(
    r"output_dir|results_file|seeds|main_score|disable_tqdm|resume_from_checkpoint|preprocessing_num_workers|local_rank|debug"
    r"|report_to|project|run_name|use_cpu|skip_memory_metrics|torch_compile|prediction_loss_only|label_names"
    r"|remove_unused_columns|include_for_metrics|per_device_eval_batch_size|gradient_checkpointing"
    r"|(log|logging|save|push|hub|trackio|dataloader|ddp|torch_compile|torch_empty|eval|do|gradient_checkpointing)_.*"
)


MODEL_FILES = re.compile(
    r".*\.safetensors|pytorch_model.*\.bin|config\.json|tokenizer\.json|vocab\..*|merges\.txt|.*\.model"
)


FILES = re.compile(r".*(_files?|_path)")


@contextmanager
def hold_folder(output_dir: str | os.PathLike[str], *, is_main_process: bool = True) -> Iterator[None]:
    """Keep other runs out of a folder; the lock of a process that has died does not count.

    Args:
        output_dir (`str`):
            The folder, which is made if it does not exist, and then removed if nothing has been written to it.
        is_main_process (`bool`):
            Whether to hold it; the other processes of a run must not.

    Yields:
        Nothing.

    Raises:
        ValueError: if another run holds it.
    """
    if not is_main_process:
        yield
        return
    folder = Path(output_dir)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"`output_dir` ({output_dir}) is in use by another run; wait until it has ended, or give another folder."
        ) from None
    try:
        yield
    finally:
        lock.release()
        if is_new and folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK_FILE, OPTIONS_FILE}:
            shutil.rmtree(folder, ignore_errors=True)


def keep_options(
    output_dir: str | os.PathLike[str], options: Mapping[str, Any], checkpoint: str | os.PathLike[str] | None = None
) -> None:
    """Write down what a run was started with, and refuse to go on with something else.

    Where there is neither a checkpoint nor a model yet, any options will do.

    Args:
        output_dir (`str`):
            Folder of the run.
        options (`Mapping[str, Any]`):
            As [`decisive_options`] gives them.
        checkpoint (`str`, *optional*):
            The checkpoint that is resumed from, also one of another run.

    Raises:
        ValueError: if an option is another one than that of the run which is gone on with, or what it was started
            with can't be read.
    """
    folder = Path(output_dir) if checkpoint is None else Path(checkpoint).absolute().parent
    given: dict[str, Any] = json.loads(json.dumps(options, default=str))
    if (folder / OPTIONS_FILE).is_file() and (checkpoint is not None or (folder / CONFIG_NAME).is_file()):
        _check_same(given, _read_options(folder / OPTIONS_FILE), folder)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    with replacing_file(str(Path(output_dir) / OPTIONS_FILE)) as file:
        file.write(json.dumps(given, indent=1, ensure_ascii=False) + "\n")


def decisive_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the options that decide what is learnt. Of files and models their contents count, not where they are.

    Args:
        options (`Mapping[str, Any]`):
            All options by name.

    Returns:
        `dict[str, Any]`: those that must be the same for a run to go on.
    """
    return {
        name: _contents(value) if FILES.fullmatch(name) else value
        for name, value in options.items()
        if not INDIFFERENT.fullmatch(name)
    }


def begin_run(args: TrainingArguments, *options: Any) -> tuple[str | None, bool]:
    """Find out where a run goes on, tell it, and refuse to go on with other options.

    Args:
        args (`TrainingArguments`):
            How to train, and the folder.
        *options (`Any`):
            Dataclasses of further options: of the model and of the data.

    Returns:
        `tuple[str | None, bool]`: the checkpoint to go on from, if there is one, and whether nothing is left to do.

    Raises:
        ValueError: if an option is another one than that of the run which is gone on with.
    """
    folder = str(args.output_dir)
    checkpoint = checkpoint_to_resume(folder, args.resume_from_checkpoint)
    if args.should_save:
        given = {name: value for each in options for name, value in vars(each).items()}
        given.update({name: getattr(args, name) for name in DECISIVE_ARGUMENTS if hasattr(args, name)})
        keep_options(folder, decisive_options(given), checkpoint)
    finished = args.resume_from_checkpoint is None and is_finished(args)
    if finished:
        logger.warning(f"The run in {folder} has all its updates and its final model: nothing is left to do.")
    elif checkpoint is not None:
        logger.warning(f"Going on from {checkpoint}; for a new run give another --output_dir.")
    return checkpoint, finished


def train_to_end(trainer: Trainer, checkpoint: str | os.PathLike[str] | None = None) -> None:
    """Train, from a checkpoint if there is one, and save what was measured on the way.

    A run that has had all its updates gets no more: transformers' `Trainer` would add one. Only its weights are taken
    out of the checkpoint, for what is still to be done.

    Args:
        trainer (`Trainer`):
            The trainer; all processes must call this.
        checkpoint (`str`, *optional*):
            The checkpoint to go on from.
    """
    if checkpoint is None or not has_all_updates(checkpoint, trainer.args):
        result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        return
    trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
    trainer.model.load_state_dict(type(trainer.model).from_pretrained(best or checkpoint).state_dict())


def has_all_updates(folder: str | os.PathLike[str], args: TrainingArguments) -> bool:
    """Tell whether a run had all its updates.

    Args:
        folder (`str`):
            A checkpoint, or the folder of a run whose state has been saved.
        args (`TrainingArguments`):
            How long the run shall be.

    Returns:
        `bool`: true if nothing is left to train.
    """
    state = TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME))
    if args.max_steps > 0:
        return state.global_step >= args.max_steps
    return (state.epoch or 0.0) >= args.num_train_epochs


def is_finished(args: TrainingArguments) -> bool:
    """Tell whether a run has had all its updates and its final model is saved.

    `save_final_model` saves the run's state last of all, so what it says holds for all that is in the folder.

    Args:
        args (`TrainingArguments`):
            How long the run shall be, and its folder.

    Returns:
        `bool`: true if nothing is left to do.
    """
    folder = Path(str(args.output_dir))
    has_model = any(folder.glob("model*.safetensors")) and not (folder / SAVING_FOLDER).exists()
    return has_model and (folder / TRAINER_STATE_NAME).is_file() and has_all_updates(folder, args)


def _read_options(path: Path) -> dict[str, Any]:
    """Read what a run was started with."""
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ValueError(
            f"{path} must hold the options of the run in its folder, but is broken. Remove it to go on with the "
            "options given now, or give another `output_dir`."
        )
    return options


def _check_same(options: dict[str, Any], earlier: dict[str, Any], folder: Path) -> None:
    """Name the options that differ; one that only one of two versions knows does not count."""
    differing = [name for name, value in options.items() if name in earlier and earlier[name] != value]
    if not differing:
        return
    name, *others = differing
    told = f"is {options[name]!r}, not the {earlier[name]!r}"
    if FILES.fullmatch(name):
        told = "has other contents than those"
    also = f" (and so {', '.join(others)})" if others else ""
    raise ValueError(
        f"`{name}` {told} that the run in {folder} was started with{also}. Give the same options to go on with that "
        "run, or another `output_dir` for a new one."
    )


def _contents(value: Any) -> Any:
    """Return a checksum in place of the name of a file, or of a folder with a model; other names as they are."""
    if isinstance(value, list | tuple):
        return [_contents(each) for each in value]
    path = Path(str(value))
    if value is None or not path.exists():
        return value
    files = [path]
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file() and MODEL_FILES.fullmatch(each.name))
    checksum = hashlib.sha256()
    for each in files:
        with each.open("rb") as file:
            checksum.update(hashlib.file_digest(file, "sha256").digest())
    return f"sha256 {checksum.hexdigest()}"


def save_final_model(trainer: Trainer) -> None:
    """Save model, tokenizer and state in the folder of the run, and push it if that is asked for.

    They are written to a folder in it, and then moved file by file, so that an error on the way leaves what was there
    whole.

    Args:
        trainer (`Trainer`):
            The trainer; all processes must call this.
    """
    folder = Path(str(trainer.args.output_dir))
    temporary = folder / SAVING_FOLDER
    if trainer.args.should_save:
        shutil.rmtree(temporary, ignore_errors=True)
    try:
        trainer.save_model(str(temporary), _internal_call=True)  # not yet to the Hub
        if trainer.args.should_save:
            _move_files(temporary, folder)
    finally:
        if trainer.args.should_save:
            shutil.rmtree(temporary, ignore_errors=True)
    trainer.save_state()
    if not trainer.args.push_to_hub:
        return
    if isinstance(trainer, PatientPushes):
        trainer.push_folder("Model save")
    else:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


@contextmanager
def told_how_to_go_on(run_dir: str | os.PathLike) -> Iterator[None]:
    """Add to a Ctrl-C in this block how the run can be gone on with.

    Args:
        run_dir (`str`):
            The `output_dir` of a `Trainer`.

    Yields:
        Nothing: the block trains.

    Raises:
        KeyboardInterrupt: the one of the block, with a note.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        checkpoint = last_complete_checkpoint(run_dir)
        interrupt.add_note(
            f"The same command again goes on from {checkpoint}."
            if checkpoint is not None
            else "There is no checkpoint yet (--save_steps), so the same command begins anew."
        )
        raise


__all__ = [
    "begin_run",
    "decisive_options",
    "has_all_updates",
    "hold_folder",
    "is_finished",
    "keep_options",
    "train_to_end",
]
