"""Return freed memory to the system during training."""

import ctypes
import sys
import time
from typing import Any

from transformers import TrainerCallback


# From one release to the next. Each takes some hundredths of a second; memory needed again must be fetched.
SECONDS = 60.0


class ReleaseMemoryCallback(TrainerCallback):
    """Gives freed memory back to the system, once a minute of training.

    glibc's `malloc` keeps what is freed between pieces in use. Batches of many lengths leave such holes, so that a
    long training on a CPU would hold several times the memory that it uses. Without glibc, nothing is done.

    ```python
    Trainer(model, args, callbacks=[ReleaseMemoryCallback()])
    ```
    """

    def __init__(self) -> None:
        self._released = time.monotonic()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Release memory if a minute has passed.

        Args:
            *args (`Any`): Not used.
            **kwargs (`Any`): Not used.
        """
        if time.monotonic() - self._released >= SECONDS:
            release_memory()
            self._released = time.monotonic()


def release_memory() -> None:
    """Give all whole pages of freed memory back to the system, with glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


__all__ = ["ReleaseMemoryCallback"]
