"""To the Hub and back: publishing with one verified commit, rolling back, model cards, pushes of a training."""

from .folder import check_folder
from .publish import Publication, publish, roll_back


__all__ = ["Publication", "check_folder", "publish", "roll_back"]
