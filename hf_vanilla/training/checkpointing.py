"""Checkpoints that are written in one step, described by a manifest, and checked before a run resumes from them.

.staging/checkpoint-500/*      the trainer writes; a process killed here leaves checkpoint-500 as it was
checkpoint-500                 one rename by one process; not resumed from before it has its manifest
checkpoint-500/manifest.json   written by a thread beside the training: all files on the disk, and their hashes
checkpoint-400                 removed, if `save_total_limit` says so
checkpoint-418                 saved because the run was stopped: removed once the next one is complete
"""

import errno
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, TrainOutput
from transformers.utils import logging

from ..data.files import is_full_disk
from ..hub.pushing_trainer import ResilientPushTrainer
from .checkpoints import (
    MANIFEST_MARK,
    checkpoint_to_resume,
    find_best_checkpoint,
    folders_by_step,
    was_scheduled,
    why_not_resumable,
)
from .manifest import changes, harmless_changes, order_seed, read_manifest, training_facts, write_manifest
from .memory import ReleaseMemoryCallback
from .muon import MuonTrainer
from .parallelism import check_parallelism
from .policies import BatchWatcher, NaNPolicyCallback, RollbackRequested


logger = logging.get_logger(__name__)


STAGING_FOLDER = ".staging"  # of a run: the checkpoint that is being written, and one that is being removed
_writing: list[threading.Thread] = []
Callback = TypeVar("Callback", bound=TrainerCallback)


class EvaluationStopped(Exception):  # noqa: N818 - no error
    """Raised by a callback to have the trainer leave an evaluation and save a checkpoint."""


class ManifestCallback(TrainerCallback):
    """Writes a manifest for each checkpoint of any `Trainer`, and checks the checkpoint that a run resumes from.

    The manifest is written by a thread while training continues. A damaged checkpoint is refused, and so is a training
    with another number of processes, order of examples, configuration, tokenizer or training data than the one that
    saved it. Changes of the code and of versions are a warning. Add it after callbacks that save files of their own in
    a checkpoint. [`VanillaTrainer`] has it already.

    ```python
    trainer = Trainer(model, args, callbacks=[ManifestCallback()])
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(args.output_dir))
    ```

    Args:
        force (`bool`): Whether to resume despite such changes, with a warning.

    Raises:
        ValueError: from `Trainer.train`, with what is damaged or has changed.
    """

    def __init__(self, force: bool = False) -> None:
        self.force = force
        self.resumed: Path | None = None  # set by a trainer that knows it, and has checked its files
        self.saved: Path | None = None  # set by a trainer that leaves the removal of old ones to this callback
        self.is_scheduled = True  # set by such a trainer, too: whether more than a stop asks for this checkpoint
        self._facts: dict[str, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the checkpoint that the run resumes from."""
        model, processing_class = kwargs.get("model"), kwargs.get("processing_class")
        dataset = getattr(kwargs.get("train_dataloader"), "dataset", None)
        self._facts = training_facts(args, model, processing_class, dataset)
        if state.global_step > 0:
            folder = self.resumed or _folder_of(args, state)
            self._check_resumed(folder, model)
            # The trainer forgets one that is no longer where it was, and it could be removed.
            state.best_model_checkpoint = find_best_checkpoint(state, folder.parent)
            state.compute_steps(args, state.max_steps)  # those of the options, not of the checkpoint
        self.resumed = None
        # A checkpoint whose state has this mark is complete only with its manifest.
        state.stateful_callbacks[MANIFEST_MARK] = {"args": {"force": self.force}, "attributes": {}}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the manifest in a thread."""
        if args.world_size > 1:
            args.distributed_state.wait_for_everyone()  # other processes write random states
        is_own, folder, self.saved = self.saved is not None, self.saved or _folder_of(args, state), None
        if args.should_save and folder.is_dir():
            wait_for_manifests()
            best = state.best_model_checkpoint
            self._facts["scheduled"] = self.is_scheduled
            rotation = (args.save_total_limit, best) if is_own else None
            job = threading.Thread(target=self.write, args=(folder, rotation), name="manifest")
            _writing.append(job)
            job.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait before the next checkpoint, after which the stock trainer removes old ones."""
        if control.should_save:
            wait_for_manifests()

    on_epoch_end = on_step_end

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Wait at the end of the training, before the trainer removes checkpoints."""
        if "train_runtime" in (kwargs.get("logs") or {}):
            wait_for_manifests()

    def write(self, folder: Path, rotation: tuple[int | None, str | None] | None = None) -> None:
        """Write the manifest of a checkpoint, and then remove the oldest ones.

        An error is a warning: the run can't resume from that checkpoint, but from earlier ones.

        Args:
            folder (`Path`): The checkpoint.
            rotation (`tuple[int | None, str | None]`, *optional*): How many checkpoints to keep, and the best one;
                by default the trainer itself removes old ones.
        """
        try:
            write_manifest(folder, {"step": int(folder.name.rpartition("-")[2]), **self._facts})
            if rotation is not None:
                rotate_checkpoints(folder, *rotation)
        except (OSError, ValueError) as error:
            logger.warning(f"{folder} has no manifest, so the run can't be resumed from it: {error}")
            if rotation is not None and is_full_disk(error):
                shutil.rmtree(folder, ignore_errors=True)  # it would only take the space of the next one

    def _check_resumed(self, folder: Path, model: Any) -> None:
        """Check the files of a checkpoint unless that is done, and that the training is the one that it is of."""
        reason = why_not_resumable(folder) if self.resumed is None and folder.is_dir() else None
        if reason is not None:
            raise ValueError(f"The run can't be resumed from {folder}, because it has {reason}.")
        manifest = read_manifest(folder)
        if manifest is None:
            return
        differing = changes(folder, manifest, self._facts, model)
        if differing and not self.force:
            raise ValueError(
                f"This is not the training that saved {folder}: {'; '.join(differing)}. Resume with the same, give "
                "another `output_dir`, or continue all the same with --force (`force_resume=True`)."
            )
        if differing:
            logger.warning(f"Resuming from {folder} although {'; '.join(differing)}: not the run it was.")
        harmless = harmless_changes(manifest, self._facts)
        if harmless:
            logger.warning(
                f"Changed since {folder} was saved: {', '.join(harmless)}. The last bits of the run may differ."
            )


class EpochLengthGroupedSampler(LengthGroupedSampler):
    """Groups rows of like length, in an order that only the seed and the epoch decide.

    transformers' own draws it from the random numbers of the process, whose state at the beginning of an epoch is in
    no checkpoint: an epoch that is resumed would have another order, with rows that are repeated and left out.

    Args:
        sampler (`LengthGroupedSampler`): transformers' own, with its lengths and size of batches.
        trainer (`Trainer`): The trainer, which knows seed and epoch.
    """

    def __init__(self, sampler: LengthGroupedSampler, trainer: Trainer) -> None:
        super().__init__(sampler.batch_size, lengths=sampler.lengths)
        self._trainer = trainer

    def __iter__(self) -> Iterator[int]:
        args = self._trainer.args
        self.generator = torch.Generator().manual_seed(order_seed(args) + int(self._trainer.state.epoch or 0))
        return super().__iter__()


@contextmanager
def _without_dropping(args: TrainingArguments) -> Iterator[None]:
    """Turn `dataloader_drop_last` off meanwhile."""
    given, args.dataloader_drop_last = args.dataloader_drop_last, False
    try:
        yield
    finally:
        args.dataloader_drop_last = given


class VerifiedCheckpointTrainer(MuonTrainer, ResilientPushTrainer):
    """A `Trainer` whose checkpoints appear complete or not at all, and are verified when a run resumes from them.

    - Batches of rows of like length (`group_by_length`) have the same order in an epoch that is resumed.
    - A checkpoint is written in a hidden folder beside its place, moved there in one step by one process, and
      described by a manifest ([`ManifestCallback`]). Older ones beyond `save_total_limit` are removed after that.
    - `train(resume_from_checkpoint=True)` resumes from the newest checkpoint that is complete and undamaged, names
      those that it skips, and refuses to start anew if all are damaged. What callbacks count, such as the patience of
      early stopping, is restored.
    - `force_resume` in the training arguments resumes although configuration, tokenizer, data or processes changed.
    - If the disk is full, the partial checkpoint is removed, and the training ends with an error in all processes.
      With `on_disk_full="continue"` in the training arguments it is a warning, and the next checkpoint is tried.
    - With `on_nan="rollback"` it returns to the newest good checkpoint as [`NaNPolicyCallback`] asks for.
    - `dataloader_drop_last` is for training alone: evaluations and predictions count every row.
    - `muon` in the training arguments updates the matrices of the layers by Muon.
    - Freed memory goes back to the system once a minute ([`ReleaseMemoryCallback`]).
    - `label_smoothing_factor` is refused for models whose loss transformers' trainer would replace by another.
    - Context and sequence parallelism (`parallelism_config`) are refused.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._staging: str | None = None
        self._disk_full: Exception | None = None  # while a checkpoint is written
        self._resumed_from: str | None = None
        self._saved: list[str] = []  # by the last call of `train`
        _check_label_smoothing(self.args, self.model, self.label_names)
        keep_manifests(self)
        self.add_callback(ReleaseMemoryCallback())

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, unless it is to cut sequences across devices.

        Raises:
            ValueError: if it is.
        """
        check_parallelism(getattr(self.args, "parallelism_config", None))
        super().create_accelerator_and_postprocess()
        check_parallelism(getattr(self.accelerator, "parallelism_config", None))  # that of `accelerate launch`

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Make the order of rows of like length one that a resumed epoch has again."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        return EpochLengthGroupedSampler(sampler, self) if isinstance(sampler, LengthGroupedSampler) else sampler

    def get_train_dataloader(self) -> DataLoader:
        """Load the training data; starting persistent workers leaves the random numbers of the training as they are.

        They start once, which in a resumed run is at another epoch.

        Returns:
            `DataLoader`: its batches.
        """
        dataloader = super().get_train_dataloader()
        if self.args.dataloader_persistent_workers:
            inner = getattr(dataloader, "base_dataloader", dataloader)  # accelerate's wrapper has one
            inner.generator = torch.Generator().manual_seed(self.args.seed)
        return dataloader

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """Load every row to evaluate, also with `dataloader_drop_last`.

        Args:
            *args (`Any`): As in `Trainer`.
            **kwargs (`Any`): Likewise.

        Returns:
            `DataLoader`: its batches.
        """
        with _without_dropping(self.args):
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """Load every row to predict, also with `dataloader_drop_last`.

        Args:
            *args (`Any`): As in `Trainer`.
            **kwargs (`Any`): Likewise.

        Returns:
            `DataLoader`: its batches.
        """
        with _without_dropping(self.args):
            return super().get_test_dataloader(*args, **kwargs)

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike | bool | None = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> TrainOutput:
        """Train, from a checkpoint that is verified first.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): The checkpoint; `True` takes the newest good one in
                `output_dir`.
            trial (`Any`, *optional*): As in `Trainer.train`.
            *args (`Any`): The other arguments of `Trainer.train`.
            **kwargs (`Any`): Likewise.

        Returns:
            `TrainOutput`: step, loss and metrics.

        Raises:
            ValueError: if there is no checkpoint, if all or the given one are damaged, or if the training is another
                than the one that saved it; or by the callbacks, such as [`NaNPolicyCallback`].
        """
        if isinstance(resume_from_checkpoint, bool) or resume_from_checkpoint is None:
            given = checkpoint_to_resume(str(self.args.output_dir)) if resume_from_checkpoint else None
            if resume_from_checkpoint and given is None:
                raise ValueError(
                    f"`resume_from_checkpoint` is True, but {self.args.output_dir} has no checkpoint to resume from; "
                    "leave it out to start anew."
                )
        else:
            given = checkpoint_to_resume(str(self.args.output_dir), os.fspath(resume_from_checkpoint))
        policy = self._callback(NaNPolicyCallback)
        if policy is not None:
            policy.left_out = set()
        self._saved = []
        while True:
            self._resumed_from = given
            manifest = self._callback(ManifestCallback)
            if manifest is not None:
                manifest.resumed = None if given is None else Path(given)
            if given is not None:
                self._restore_callbacks(Path(given))
            try:
                return super().train(given, trial, *args, **kwargs)
            except RollbackRequested as request:
                given = self._roll_back(request, given)
            finally:
                wait_for_manifests()  # after an error too, so that this process can resume

    def _roll_back(self, request: RollbackRequested, given: str | None) -> str:
        """Return the checkpoint to return to, and have the update that failed left out from now on."""
        policy = self._callback(NaNPolicyCallback)
        if policy is None or len(policy.left_out) >= policy.max_rollbacks:
            limit = 0 if policy is None else policy.max_rollbacks
            raise ValueError(f"{request} It has been tried with {limit} rollbacks.") from None
        wait_for_manifests()
        self.accelerator.wait_for_everyone()
        # Others in the folder are of an earlier attempt.
        candidates = [*reversed(self._saved), *([given] if given else [])]
        good = (each for each in candidates if why_not_resumable(each) is None)
        found = next(good, None)
        if found is None:
            raise ValueError(f"{request} There is no checkpoint to return to; save more often.") from None
        policy.left_out.add(request.step)
        logger.warning(f"{request} Returning to {found}, and then leaving out step {request.step}.")
        return found

    def _restore_callbacks(self, checkpoint: Path) -> None:
        """Restore what callbacks, such as early stopping, count."""
        saved = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).stateful_callbacks
        for callback in self.callback_handler.callbacks:
            found = saved.get(type(callback).__name__)
            if isinstance(callback, ExportableState) and isinstance(found, dict):
                for name, value in found.get("attributes", {}).items():
                    setattr(callback, name, value)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on a batch, and show it to callbacks that watch batches.

        Args:
            model (`torch.nn.Module`): The model, wrapped or not.
            inputs (`dict[str, Any]`): The batch.
            *args (`Any`): As in `Trainer`.
            **kwargs (`Any`): Likewise.

        Returns:
            `torch.Tensor`: the loss.
        """
        loss = super().training_step(model, inputs, *args, **kwargs)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, BatchWatcher):
                callback.add_batch(inputs, loss)
        return loss

    def _callback(self, callback_class: type[Callback]) -> Callback | None:
        """Return the callback of a class; a run may have removed it."""
        found = (each for each in self.callback_handler.callbacks if isinstance(each, callback_class))
        return next(found, None)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Compare the model with the best so far."""
        try:
            return super()._determine_best_metric(metrics, trial)
        except KeyError as error:  # its text names the argument and the metrics
            raise ValueError(*error.args) from None

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder of checkpoints, which is another one while one is written."""
        return self._staging or super()._get_output_dir(trial)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint even if a callback stops the evaluation before it."""
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except EvaluationStopped:
            self.control.should_evaluate = False
            self.control.should_save = self.control.should_training_stop = True
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint in the staging folder, move it to its place, and push it."""
        wait_for_manifests()
        run_dir = super()._get_output_dir(trial)
        staging = Path(run_dir, STAGING_FOLDER)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.local_process_index == 0:
            shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
        self.accelerator.wait_for_everyone()
        self._staging, self._disk_full = str(staging), None
        best = self.state.best_model_checkpoint
        try:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, ExportableState):  # the state of a resumed run may not know it
                    self.state.stateful_callbacks.setdefault(type(callback).__name__, {})
            with self._full_disk_noted():
                super()._save_checkpoint(model, trial)
                is_scheduled = not any(
                    getattr(each, "saves_out_of_turn", False) for each in self.callback_handler.callbacks
                )
                self._name_best_checkpoint(staging / name, str(Path(run_dir, name)) if is_scheduled else best)
        except BaseException:
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        finally:
            self._staging = None
        is_full = [self._disk_full is not None]
        if any(gather_object(is_full) if self.args.world_size > 1 else is_full):
            self.state.best_model_checkpoint = best
            self._leave_out_checkpoint(staging, Path(run_dir, name))
            return
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            move_checkpoint(staging / name, Path(run_dir, name))
        self.accelerator.wait_for_everyone()
        self._saved.append(str(Path(run_dir, name)))
        manifest = self._callback(ManifestCallback)
        if manifest is not None:
            manifest.saved, manifest.is_scheduled = Path(run_dir, name), is_scheduled
        if self.args.push_to_hub:
            # With the state to resume from, the manifest has to be in the push.
            if manifest is not None and self.args.should_save and self.args.hub_strategy in _PUSHING_STATE:
                manifest.write(Path(run_dir, name))
            self._push_from_checkpoint(os.path.join(run_dir, name))

    @contextmanager
    def _full_disk_noted(self) -> Iterator[None]:
        """Note that the disk is full while a checkpoint is written, in place of raising the error."""
        try:
            yield
        except Exception as error:
            # After a first such error others may follow from it.
            if self._staging is None or not (self._disk_full or is_full_disk(error)):
                raise
            self._disk_full = self._disk_full or error

    def _save(self, *args: Any, **kwargs: Any) -> None:
        """Save the model; of a checkpoint the other files follow even if the disk is full.

        Other processes wait for this one between the model and those files.
        """
        with self._full_disk_noted():
            super()._save(*args, **kwargs)

    def _leave_out_checkpoint(self, staging: Path, folder: Path) -> None:
        """Remove a checkpoint for which the disk has no space, and raise the error, or warn and continue."""
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        reason = str(self._disk_full or "in another process").strip().partition("\n")[0]
        message = f"The disk is full: {folder} could not be written ({reason})"
        earlier = [each for step, each in folders_by_step(folder.parent).items() if step < self.state.global_step]
        state = f"the last checkpoint is {earlier[-1]}" if earlier else "there is no earlier checkpoint"
        if getattr(self.args, "on_disk_full", "stop") != "continue":
            raise OSError(errno.ENOSPC, f"{message}; {state}. Free some space and resume") from self._disk_full
        free = shutil.disk_usage(folder.parent).free / 2**20
        is_best = ", which is the best model so far" if self.state.best_global_step == self.state.global_step else ""
        logger.warning(
            f"{message}, and is missing{is_best}; {state}. {free:,.1f} MiB are free. Training continues, and tries "
            "again at the next checkpoint."
        )

    def _name_best_checkpoint(self, staged: Path, best: str | None) -> None:
        """Have the state name another place than the staging folder, if this checkpoint is the best."""
        if self.state.best_model_checkpoint == str(staged):
            self.state.best_model_checkpoint = best
            if self.args.should_save:
                self.state.save_to_json(str(staged / TRAINER_STATE_NAME))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint once it is in its place."""
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)


_PUSHING_STATE = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)


def wait_for_manifests() -> None:
    """Wait until the manifests of all checkpoints of this process are written."""
    while _writing:
        _writing[0].join()
        _writing.pop(0)


def move_checkpoint(staged: Path, folder: Path) -> None:
    """Move a complete checkpoint to its place, in one step; an earlier one there is replaced.

    Args:
        staged (`Path`): The checkpoint in the staging folder of its run, which is removed then.
        folder (`Path`): Its place, on the same file system.
    """
    if folder.exists():
        os.replace(folder, staged.with_name("replaced"))
    os.replace(staged, folder)
    shutil.rmtree(staged.parent, ignore_errors=True)


def rotate_checkpoints(newest: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints of a run, but never the newest and the best one.

    Checkpoints of later steps than the newest are of an attempt that was given up, and are removed first. One that was
    saved because the run was stopped does not count, and is removed once there is a newer one: so the run ends with
    the same checkpoints, and the same average of the last ones, as one that was not stopped.

    Args:
        newest (`Path`): The checkpoint saved last, which is complete.
        limit (`int`, *optional*): How many to keep; all by default.
        best (`str`, *optional*): The best one.
    """
    folders = folders_by_step(newest.parent)
    step = next((step for step, folder in folders.items() if folder == newest), 0)
    kept = {newest.resolve(), *([Path(best).resolve()] if best else [])}
    unscheduled = {each for each in folders if not was_scheduled(folders[each])}
    others = [each for each in folders if folders[each].resolve() not in kept]
    others.sort(key=lambda each: (each < step, each))
    removed = [each for each in others if each in unscheduled]
    if limit is not None and limit > 0:
        counted = [each for each in others if each not in unscheduled]
        removed += counted[: max(0, len(folders) - len(unscheduled) - max(limit, len(kept)))]
    trash = newest.parent / STAGING_FOLDER
    for each in removed:
        trash.mkdir(exist_ok=True)
        # Moved away in one step: a process killed here leaves no half checkpoint.
        os.replace(folders[each], trash / f"removed-{each}")
    shutil.rmtree(trash, ignore_errors=True)


def _check_label_smoothing(args: TrainingArguments, model: Any, label_names: Sequence[str]) -> None:
    """Check that the label smoothing of transformers' trainer computes the loss that the model is trained with."""
    if args.label_smoothing_factor == 0:
        return
    problem_type, reason = getattr(getattr(model, "config", None), "problem_type", None), None
    if label_names and "labels" not in label_names:
        reason = f"it would have no effect on its labels, {', '.join(label_names)}"
    elif problem_type in ("regression", "multi_label_classification"):
        reason = f"its labels are those of {problem_type}, and no classes"
    elif not getattr(model, "takes_label_smoothing_factor", True):
        reason = "transformers' trainer would compute another loss"
    if reason is not None:
        raise ValueError(
            f"`label_smoothing_factor` ({args.label_smoothing_factor}) is not for a {type(model).__name__}: {reason}; "
            "leave it at 0."
        )


def _folder_of(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the checkpoint of the current step."""
    return Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def keep_manifests(trainer: Trainer) -> None:
    """Add a [`ManifestCallback`] to a trainer that has none.

    Args:
        trainer (`Trainer`): The trainer.
    """
    if not any(isinstance(each, ManifestCallback) for each in trainer.callback_handler.callbacks):
        trainer.add_callback(ManifestCallback(force=getattr(trainer.args, "force_resume", False)))


__all__ = ["ManifestCallback", "VerifiedCheckpointTrainer"]
