"""Pushes to the Hub during a training that the Hub can't stop, and that are complete."""

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError
from transformers import Trainer
from transformers.utils import logging

from ..hub_trouble import is_passing


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

    Training goes on, the next checkpoint tries again, and `push_to_hub` at the end sends all that is missing. A
    refusal (no such account, no right to write) still ends the run at once, before the first step. What is pushed on
    the way has the code of the model too, which the stock trainer leaves out; and `training_args.bin`, which goes to
    the Hub with it, never has `hub_token` in it.
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
                raise
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        logger.warning(f"The Hub can't be reached ({error}). Training goes on; the next push tries again.")

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
