"""Publishing on the Hub in one verified commit, rolling back, model cards, and pushes of a training."""

import warnings
from typing import Any

from . import client
from .card import CardFacts
from .folder import check_folder
from .publish import Publication, publish, roll_back


# Old names, until 0.3, and those in `client`.
_OLD_NAMES = {"retry": "retry", "ATTEMPTS": "MAX_ATTEMPTS", "LONGEST_WAIT": "MAX_WAIT"}


def __getattr__(name: str) -> Any:
    """Return the object of a deprecated name, with a warning."""
    if name not in _OLD_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new_name = _OLD_NAMES[name]
    message = f"`{name}` is now called `hf_vanilla.hub.client.{new_name}`; the old name will be removed in 0.3."
    warnings.warn(message, FutureWarning, stacklevel=2)
    return getattr(client, new_name)


__all__ = ["CardFacts", "Publication", "check_folder", "publish", "roll_back"]
