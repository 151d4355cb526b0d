"""A trainer whose pushes to the Hub are checked and verified like those of `publish`, and never end the training."""

import functools
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HTTPError
from transformers import PreTrainedModel
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import PushInProgress, logging

from hf_vanilla_cli import command_of_script

from .card import PAPERS, CardFacts, make_card
from .clean_checkpoints import CleanCheckpointTrainer
from .client import add_advice, is_transient, retry, root_cause
from .folder import PUSH_FOLDER, check_files, check_model, find_files, is_weight_file, replace_file
from .publish import commit_folder


logger = logging.get_logger(__name__)

# What may go wrong with a push: files, checks, the network, and the Hub's client.
_PUSH_ERRORS = (OSError, ValueError, RuntimeError, HTTPError)


class _UnpickledToken(str):
    """A token of the Hub that pickled training arguments do not contain: they have `None` in its place."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __copy__(self) -> "_UnpickledToken":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "_UnpickledToken":
        return self


class ResilientPushTrainer(CleanCheckpointTrainer):
    """A `Trainer` whose `push_to_hub=True` gives the guarantees of `publish`, and survives an outage of the Hub.

    Every push, of a checkpoint or of the final model, is checked (the model loads; no pickles, no tokens, no state of
    the training), is one commit, and is verified. A push that fails is a warning: training continues, the next
    checkpoint tries again, and `push_to_hub` at the end sends all that is missing or says how to do that later. Only a
    refusal before the first step (no such account, no right to write) ends the run at once.

    `hub_strategy="checkpoint"` and `"all_checkpoints"` add the state to resume from to the same commit, in a folder of
    its own. `training_args.bin` never leaves the machine, and has no `hub_token` in it. The model card is that of
    `publish`.
    """

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Create the repository, or leave that for later if the Hub does not answer.

        Args:
            *args (`Any`): Those of the stock method, which differ between versions of transformers.
            **kwargs (`Any`): Those of the stock method.

        Raises:
            HfHubHTTPError: if the Hub refuses.
        """
        self.push_in_progress: Any = None
        self._api = HfApi(token=self.args.hub_token)  # runs jobs in the background, one after the other
        if self.is_world_process_zero():
            shutil.rmtree(self._run_dir / PUSH_FOLDER, ignore_errors=True)  # of a run that was killed
        try:
            super().init_hf_repo(*args, **kwargs)
        except (OSError, HTTPError) as error:
            if not is_transient(error):
                add_advice(error)
                raise
            self._warn(error)

    @property
    def _run_dir(self) -> Path:
        return Path(str(self.args.output_dir))

    def _warn(self, error: BaseException) -> None:
        logger.warning(
            f"A push to the Hub failed ({root_cause(error)}). Training continues; the next push tries again."
        )

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model and push the folder of the run, or say how to push it later.

        Args:
            *args (`Any`): Those of `push_folder`.
            **kwargs (`Any`): Those of `push_folder`.

        Returns:
            What `push_folder` returns.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        return self.push_folder(*args, **kwargs)

    def push_folder(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Push the folder of the run, whose model is saved already, or say how to push it later.

        Args:
            commit_message (`str`, *optional*, defaults to `"End of training"`): First line of the commit's message.
            blocking (`bool`, *optional*, defaults to `True`): Whether to wait for the end of the push.
            token (`str`, *optional*): The default is `hub_token` of the arguments.
            revision (`str`, *optional*): The branch; the default is `hub_revision` of the arguments.
            private (`bool`, *optional*): Whether to create a private repository; the default is `hub_private_repo` of
                the arguments.
            **kwargs (`Any`): The arguments of `create_model_card`.

        Returns:
            `CommitInfo`, or without `blocking` a `Future` of it; `None` if a check failed or the Hub refused or failed
            in every attempt, and in all processes but the first.
        """
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        push = functools.partial(
            self._push_or_report,
            commit_message or "End of training",
            token if token is not None else self.args.hub_token,
            revision if revision is not None else self.args.hub_revision,
            private,
            kwargs,
        )
        return push() if blocking else HfApi().run_as_future(push)

    def _push_or_report(
        self,
        commit_message: str,
        token: str | None,
        revision: str | None,
        private: bool | None,
        card: dict[str, Any],
    ) -> CommitInfo | None:
        """Push the folder of the run; if that fails, log how to push it later."""
        folder = self._run_dir
        try:
            if self.hub_model_id is None:
                options = {} if private is None else {"private": private}  # older versions of transformers lack it
                retry(functools.partial(super().init_hf_repo, token=token, **options))
            self.create_model_card(**card)
            check_model(folder, self._model_class())
            return self._commit(HfApi(token=token), folder, {".": find_files(folder)}, commit_message, revision)
        except _PUSH_ERRORS as error:
            command = [
                *command_of_script("push_to_hub").split(),
                "--folder",
                str(folder),
                "--repo_id",
                self._repo_id(),
            ]
            command += [] if revision is None else ["--revision", revision]
            is_private = self.args.hub_private_repo if private is None else private
            if self.hub_model_id is None and is_private:  # the repository is yet to be created
                command += ["--private", "true"]
            reason = " ".join([str(error), *getattr(error, "__notes__", ())])
            logger.warning(
                f"The model could not be pushed to the Hub ({reason}). It is in {folder}; to push it later: "
                f"{shlex.join(command)}"
            )
            return None

    def _model_class(self) -> type[PreTrainedModel] | None:
        """Return the class of the model in training, which may be none that `config.json` can name."""
        model = self.accelerator.unwrap_model(self.model)
        return type(model) if isinstance(model, PreTrainedModel) else None

    def _commit(
        self, api: HfApi, folder: Path, names_in: dict[str, list[str]], message: str, revision: str | None
    ) -> CommitInfo:
        """Check files and push them in one commit; `names_in` has those of the folder (".") and of folders in it."""
        for part, names in names_in.items():
            check_files(folder / part, names, token=api.token if isinstance(api.token, str) else None)
        names = [(Path(part) / name).as_posix() for part, names in names_in.items() for name in names]
        repo_id = str(self.hub_model_id)
        done = commit_folder(api, repo_id, folder, names, revision=revision or "main", commit_message=message)
        url = f"{api.endpoint}/{repo_id}/commit/{done.commit}"
        return CommitInfo(commit_url=url, commit_message=message, commit_description="", oid=str(done.commit))

    def create_model_card(
        self,
        language: str | list[str] | None = None,
        license: str | None = None,
        *args: Any,
        finetuned_from: str | None = None,
        dataset_tags: str | list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the model card of `publish`, or the stock one for a model that is not of this package.

        A card that somebody has edited is kept. An error here is only a warning.

        Args:
            language (`str` or `list[str]`, *optional*): Codes of the languages.
            license (`str`, *optional*): The Hub's identifier of the licence.
            *args (`Any`): Of the stock card only.
            finetuned_from (`str`, *optional*): The model that was fine-tuned.
            dataset_tags (`str` or `list[str]`, *optional*): Names of the data sets on the Hub.
            **kwargs (`Any`): Of the stock card only.
        """
        if not self.is_world_process_zero():
            return
        try:
            if getattr(getattr(self.model, "config", None), "model_type", None) not in PAPERS:
                kwargs.setdefault("model_name", self._repo_id().split("/")[-1])
                kwargs.update(finetuned_from=finetuned_from, dataset_tags=dataset_tags)
                super().create_model_card(language, license, *args, **kwargs)
                return
            facts = CardFacts(
                language=_as_list(language),
                license=license,
                datasets=_as_list(dataset_tags),
                base_model=finetuned_from,
            )
            files = make_card(self._run_dir, self._repo_id(), facts)
            if files is None:
                path = self._run_dir / "README.md"
                logger.warning(f"{path} is kept as it is: it was edited, or has facts that this push does not give.")
                return
            for name, content in files.items():
                replace_file(self._run_dir / name, content)
        except Exception as error:  # no error in a card is worth losing the training
            logger.warning(f"No model card was written to {self._run_dir}: {error}")

    def _repo_id(self) -> str:
        """Return the name of the repository as far as it is known."""
        return self.hub_model_id or self.args.hub_model_id or self._run_dir.absolute().name

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and the arguments without the token.

        Args:
            output_dir (`str`, *optional*): The folder; the default is that of the run.
            _internal_call (`bool`, *optional*, defaults to `False`): Whether the trainer itself saves, which then does
                not push.
        """
        if self.args.hub_token is not None:  # pushes still need it in the arguments
            self.args.hub_token = _UnpickledToken(self.args.hub_token)
        super().save_model(output_dir, _internal_call)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint in the background, from a copy made of links that later checkpoints do not change."""
        args = self.args
        self._warn_of_failed_pushes()
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        jobs = [] if self.push_in_progress is None else self.push_in_progress.jobs
        if jobs and not args.hub_always_push:
            return
        copy = self._run_dir / PUSH_FOLDER / Path(checkpoint_folder).name
        try:
            if self.hub_model_id is None:
                self.init_hf_repo()
            if self.hub_model_id is None:  # the Hub did not answer, which is logged
                return
            self.callback_handler.on_push_begin(args, self.state, self.control)
            names_in = self._copy_checkpoint(Path(checkpoint_folder), copy)
            check_model(copy, self._model_class())  # not in the background: it sets global options of torch
        except _PUSH_ERRORS as error:
            shutil.rmtree(copy, ignore_errors=True)
            self._warn(error)
            return
        by_steps = args.save_strategy == SaveStrategy.STEPS
        moment = f"step {self.state.global_step}" if by_steps else f"epoch {int(self.state.epoch or 0)}"
        message = f"Training in progress, {moment}"
        push = functools.partial(self._commit, self._api, copy, names_in, message, args.hub_revision)
        self.push_in_progress = PushInProgress([*jobs, self._api.run_as_future(_and_remove, push, copy)])

    def _copy_checkpoint(self, checkpoint: Path, copy: Path) -> dict[str, list[str]]:
        """Copy a checkpoint, and other files of the run such as tokenizers; return the names in each folder.

        Files of a checkpoint do not change, so links to them are enough, and survive the removal of the checkpoint.
        """
        shutil.rmtree(copy, ignore_errors=True)
        names = find_files(checkpoint)
        shared = [name for name in find_files(self._run_dir) if name not in names and not is_weight_file(name)]
        for name in shared:
            _place(shutil.copy2, self._run_dir / name, copy / name)
        for name in names:
            _place(_link, checkpoint / name, copy / name)
        names_in = {".": shared + names}
        if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            is_last_only = self.args.hub_strategy == HubStrategy.CHECKPOINT
            part = "last-checkpoint" if is_last_only else checkpoint.name
            names_in[part] = find_files(checkpoint, with_training_state=True)
            for name in names_in[part]:
                _place(_link, checkpoint / name, copy / part / name)
        return names_in

    def _finish_current_push(self) -> None:
        """Wait for the pushes in progress, and warn of those that failed."""
        super()._finish_current_push()
        self._warn_of_failed_pushes()
        if self.is_world_process_zero():
            shutil.rmtree(self._run_dir / PUSH_FOLDER, ignore_errors=True)

    def _warn_of_failed_pushes(self) -> None:
        """Warn once of each push that failed in its thread, where nobody else looks."""
        push = getattr(self, "push_in_progress", None)
        if push is None:
            return
        done = [job for job in push.jobs if job.done()]
        push.jobs = [job for job in push.jobs if job not in done]
        for job in done:
            error = None if job.cancelled() else job.exception()
            if error is not None:
                self._warn(error)


def _and_remove(push: Callable[[], CommitInfo], folder: Path) -> CommitInfo:
    """Push, and remove the folder even if the push fails."""
    try:
        return push()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _place(put: Callable[[Path, Path], Any], source: Path, target: Path) -> None:
    """Copy or link a file into a folder that may not exist yet."""
    target.parent.mkdir(parents=True, exist_ok=True)
    put(source, target)


def _link(source: Path, target: Path) -> None:
    """Link a file, or copy it where the file system has no links."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copy2(source, target)


def _as_list(names: str | list[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else names or []
