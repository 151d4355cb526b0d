"""Pushes to the Hub during a training that the Hub can't stop, and that are complete."""

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError
from transformers import Trainer
from transformers.utils import logging

from ..hub_trouble import is_passing


logger = logging.get_logger(__name__)


class PatientPushes(Trainer):
    """Makes `push_to_hub=True` of a `Trainer` survive a Hub that does not answer.

    Training goes on, the next checkpoint tries again, and `push_to_hub` at the end sends all that is missing. A
    refusal (no such account, no right to write) still ends the run at once, before the first step. What is pushed on
    the way has the code of the model too, which the stock trainer leaves out.
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
        super()._push_from_checkpoint(checkpoint_folder)
