"""Pushes to the Hub during a training that the Hub can't stop, and that are complete."""

import functools
import shlex
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HTTPError
from transformers import Trainer
from transformers.utils import logging

from .card import CURVE, PAPERS, CardFacts, card_of_folder, draw_curve, sign_card, stays
from .client import add_advice, cause_of, is_passing, retry
from .folder import NEVER


logger = logging.get_logger(__name__)


class _UnpickledToken(str):
    """A token of the Hub that is not written where training arguments are pickled: nothing stands there instead."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __copy__(self) -> "_UnpickledToken":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "_UnpickledToken":
        return self


class PatientPushes(Trainer):
    """Makes `push_to_hub=True` of a `Trainer` survive a Hub that does not answer.

    Training goes on, the next checkpoint tries again, and `push_to_hub` at the end sends all that is missing; where
    it can't, it says how to do that later. A refusal (no such account, no right to write) still ends the run at once,
    before the first step. What is pushed on the way has the code of the model too, which the stock trainer leaves out.
    `training_args.bin`, which goes to the Hub with it, never has `hub_token` in it, and is no part of the last push.
    The model card is that of `publish`.
    """

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Make the repository, or leave that for later if the Hub does not answer.

        Args:
            *args (`Any`):
                As of the stock method, whose arguments differ between versions of transformers.
            **kwargs (`Any`):
                The same.

        Raises:
            HfHubHTTPError: if the Hub refuses before the first step.
        """
        self.push_in_progress: Any = None
        try:
            super().init_hf_repo(*args, **kwargs)
        except (OSError, HTTPError) as error:
            if not is_passing(error):
                add_advice(error)
                raise
            self._warn(error)

    def _warn(self, error: BaseException) -> None:
        logger.warning(f"A push to the Hub failed ({cause_of(error)}). Training goes on; the next push tries again.")

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model and push the folder of the run, or say how to push it later.

        Args:
            *args (`Any`):
                As of `push_folder`.
            **kwargs (`Any`):
                The same.

        Returns:
            As `push_folder`.
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
            commit_message (`str`, *optional*, defaults to `"End of training"`):
                First line of the commit's message.
            blocking (`bool`, *optional*, defaults to `True`):
                Whether to wait for the end of the push.
            token (`str`, *optional*):
                The default is `hub_token` of the arguments.
            revision (`str`, *optional*):
                The branch; the default is `hub_revision` of the arguments.
            private (`bool`, *optional*):
                Whether a repository that is made shall be private; the default is `hub_private_repo` of the arguments.
            **kwargs (`Any`):
                The arguments of `create_model_card`.

        Returns:
            `CommitInfo`, or without `blocking` a `Future` of it; `None` if the Hub failed again and again or refused,
            and in all processes but the first.
        """
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        push = functools.partial(
            self._push_patiently,
            commit_message,
            token if token is not None else self.args.hub_token,
            revision if revision is not None else self.args.hub_revision,
            private,
            kwargs,
        )
        return push() if blocking else HfApi().run_as_future(push)

    def _push_patiently(
        self,
        commit_message: str | None,
        token: str | None,
        revision: str | None,
        private: bool | None,
        card: dict[str, Any],
    ) -> CommitInfo | None:
        """Push until the Hub takes it, and give up with a warning."""
        folder = str(self.args.output_dir)
        try:
            if self.hub_model_id is None:
                options = {} if private is None else {"private": private}  # older versions of transformers lack it
                retry(functools.partial(super().init_hf_repo, token=token, **options))
            self.create_model_card(**card)
            return retry(
                lambda: HfApi(token=token).upload_folder(
                    repo_id=str(self.hub_model_id),
                    folder_path=folder,
                    commit_message=commit_message,
                    ignore_patterns=list(NEVER),
                    revision=revision,
                )
            )
        except (OSError, RuntimeError, HTTPError) as error:
            words = ["python", "scripts/push_to_hub.py", "--folder", folder, "--repo_id", self._repo_id()]
            words += [] if revision is None else ["--revision", revision]
            told = " ".join([str(error), *getattr(error, "__notes__", ())])
            logger.warning(
                f"The model could not be pushed to the Hub ({told}). It is in {folder}; to push it later: "
                f"{shlex.join(words)}"
            )
            return None

    def create_model_card(
        self,
        language: str | list[str] | None = None,
        license: str | None = None,
        *args: Any,
        finetuned_from: str | None = None,
        dataset_tags: str | list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the model card that `publish` would write, or the stock one of a model that is not of this package.

        A card that somebody has edited stays as it is. One that can't be written is warned of, and nothing else.

        Args:
            language (`str` or `list[str]`, *optional*):
                Codes of the languages.
            license (`str`, *optional*):
                As the Hub names it.
            *args (`Any`):
                Of the stock card alone.
            finetuned_from (`str`, *optional*):
                The model that was fine-tuned.
            dataset_tags (`str` or `list[str]`, *optional*):
                Names of the data sets on the Hub.
            **kwargs (`Any`):
                Of the stock card alone.
        """
        if not self.is_world_process_zero():
            return
        folder = Path(str(self.args.output_dir))
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
            path, is_told = folder / "README.md", facts != CardFacts()
            if stays(path, is_told=is_told):
                logger.warning(f"{path} stays as it is: it was edited, or has facts that this push does not give.")
                return
            picture = draw_curve(folder)
            if picture is not None:
                (folder / CURVE).write_bytes(picture)
            card = card_of_folder(folder, self._repo_id(), facts)
            path.write_text(sign_card(card, is_told=is_told), encoding="utf-8")
        except Exception as error:  # whatever it is, the training is worth more
            logger.warning(f"No model card was written to {folder}: {error}")

    def _repo_id(self) -> str:
        """Return the name of the repository as far as it is known."""
        return self.hub_model_id or self.args.hub_model_id or Path(str(self.args.output_dir)).absolute().name

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and the arguments without the token.

        Args:
            output_dir (`str`, *optional*):
                The folder; the default is that of the run.
            _internal_call (`bool`, *optional*, defaults to `False`):
                Whether the trainer itself saves, which then does not push.
        """
        self._keep_token_out_of_pickles()
        super().save_model(output_dir, _internal_call)

    def _keep_token_out_of_pickles(self) -> None:
        """Make the token one that is not pickled; pushes still need it in the arguments."""
        if self.args.hub_token is not None:
            self.args.hub_token = _UnpickledToken(self.args.hub_token)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint with its code, if there is a repository by now."""
        self._tell_of_failed_pushes()
        if self.hub_model_id is None:
            try:
                self.init_hf_repo()
            except (OSError, HTTPError) as error:  # a refusal that comes this late must not cost the training
                self._warn(error)
        if self.hub_model_id is None and self.is_world_process_zero():
            return
        if self.is_world_process_zero():
            for path in Path(checkpoint_folder).glob("*.py"):
                shutil.copy(path, str(self.args.output_dir))
        self._keep_token_out_of_pickles()
        super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self) -> None:
        """Wait for the pushes on the way, and tell of those that failed."""
        super()._finish_current_push()
        self._tell_of_failed_pushes()

    def _tell_of_failed_pushes(self) -> None:
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


def _as_list(words: str | list[str] | None) -> list[str]:
    return [words] if isinstance(words, str) else words or []
