"""Publishing on the Hub in one verified commit, rolling back, model cards, and pushes of a training."""

from .folder import check_folder
from .publish import Publication, publish, roll_back


__all__ = ["Publication", "check_folder", "publish", "roll_back"]
