"""Makes every saved model carry its code and its pipelines, so that whoever loads it needs transformers alone."""

import os
from typing import Any

from transformers.configuration_utils import PreTrainedConfig


class SelfContainedConfig(PreTrainedConfig):
    """A configuration that is saved with the code of its family and with all Auto classes that can load it.

    Left alone, transformers names the one head that was saved, and `AutoModel` can't load what
    `AutoModelForMaskedLM` can.
    """

    _auto_class = "AutoConfig"  # transformers then copies the file of the class and all that it imports from beside it

    def auto_classes(self) -> dict[str, Any]:
        """Return the model class behind each Auto class.

        The import of the models stands within this method: it would go round in circles at the top of a file, and
        transformers, which copies what is imported, finds it here too.

        Returns:
            `dict[str, Any]`: for example `{"AutoModel": VanillaBertModel}`.

        Raises:
            NotImplementedError: if the family does not say.
        """
        raise NotImplementedError(f"{type(self).__name__} must say which model classes there are.")

    def pipelines(self) -> dict[str, tuple[str, type]]:
        """Return the pipelines of the family that transformers does not have, imported as the models are.

        Returns:
            `dict[str, tuple]`: for each task the Auto class that it needs, and the pipeline's class.
        """
        return {}

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save the configuration, the code of the family, and which class of it each Auto class is to load.

        What is saved with the head of one of the family's pipelines offers that pipeline, too.

        Args:
            save_directory (`str`): Folder to write to.
            *args: Passed on.
            **kwargs: Passed on.
        """
        places = {
            name: f"{model_class.__module__.rpartition('.')[2]}.{model_class.__name__}"
            for name, model_class in self.auto_classes().items()
        }
        self.auto_map = {**(getattr(self, "auto_map", None) or {}), **places}
        self._offer_pipelines()
        super().save_pretrained(save_directory, *args, **kwargs)

    def _offer_pipelines(self) -> None:
        """Bring `custom_pipelines`, through which transformers finds a checkpoint's own, up to date with the head."""
        own = {
            task: (auto_class, f"{pipeline_class.__module__.rpartition('.')[2]}.{pipeline_class.__name__}")
            for task, (auto_class, pipeline_class) in self.pipelines().items()
        }
        places = {place for _, place in own.values()}
        offered = getattr(self, "custom_pipelines", None) or {}
        offered = {task: entry for task, entry in offered.items() if entry.get("impl") not in places}
        classes = self.auto_classes()
        for task, (auto_class, place) in own.items():
            if classes[auto_class].__name__ in (self.architectures or ()):
                offered[task] = {"impl": place, "pt": [auto_class]}
        if offered:
            self.custom_pipelines = offered
        elif hasattr(self, "custom_pipelines"):
            del self.custom_pipelines  # transformers takes it for a dictionary wherever it exists
