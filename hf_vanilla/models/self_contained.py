"""Saves with every model its code and its pipelines, so that loading it needs transformers alone."""

import os
from typing import Any

from transformers import Pipeline
from transformers.configuration_utils import PreTrainedConfig


def _place_of(saved_class: type) -> str:
    """Name a class as transformers finds it in a checkpoint, such as `modeling_vanilla_bert.VanillaBertModel`."""
    return f"{saved_class.__module__.rpartition('.')[2]}.{saved_class.__name__}"


class SelfContainedConfig(PreTrainedConfig):
    """A configuration that is saved with the code of its model family and with all Auto classes that can load it.

    By default transformers names only the head that was saved, and `AutoModel` can't load what `AutoModelForMaskedLM`
    can.
    """

    _auto_class = "AutoConfig"  # makes transformers copy the file of the class and those that it imports

    def auto_classes(self) -> dict[str, Any]:
        """Return the model class of each Auto class.

        The method itself imports the models: at the top of the file the import would be circular. transformers, which
        copies what is imported, finds it here too.

        Returns:
            `dict[str, Any]`: for example `{"AutoModel": VanillaBertModel}`.

        Raises:
            NotImplementedError: if the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `auto_classes`.")

    def pipelines(self) -> dict[str, tuple[str, type]]:
        """Return the model family's pipelines that transformers lacks, imported as in `auto_classes`.

        Returns:
            `dict[str, tuple]`: for each task the Auto class of its model, and the pipeline class.
        """
        return {}

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save the configuration, the code of the model family, and the model class of each Auto class.

        A model with the head of one of the family's pipelines is saved with that pipeline, too.

        Args:
            save_directory (`str`): Folder to write to.
            *args: Passed on.
            **kwargs: Passed on.
        """
        places = {name: _place_of(model_class) for name, model_class in self.auto_classes().items()}
        self.auto_map = {**(getattr(self, "auto_map", None) or {}), **places}
        self._update_custom_pipelines()
        super().save_pretrained(save_directory, *args, **kwargs)

    def _update_custom_pipelines(self) -> None:
        """Name in `custom_pipelines`, where transformers looks, the pipelines that fit the head."""
        own = {task: (auto_class, _place_of(pipeline)) for task, (auto_class, pipeline) in self.pipelines().items()}
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
            del self.custom_pipelines  # transformers expects a dictionary wherever the attribute exists


class SelfContainedPipeline(Pipeline):
    """A pipeline that gets all inputs of a call at once and makes its own batches.

    Subclasses do all work in `_forward`, and get there the options of the call and of the constructor.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def _sanitize_parameters(self, **options: Any) -> tuple[dict, dict, dict]:
        return {}, options, {}

    def preprocess(self, inputs: Any, **options: Any) -> Any:
        """Return the inputs as they are.

        Args:
            inputs (`Any`): All inputs of a call.
            **options (`Any`): None.

        Returns:
            `Any`: the inputs.
        """
        return inputs

    def postprocess(self, outputs: Any, **options: Any) -> Any:
        """Return the outputs as they are.

        Args:
            outputs (`Any`): What `_forward` returned.
            **options (`Any`): None.

        Returns:
            `Any`: the outputs.
        """
        return outputs


__all__ = ["SelfContainedConfig", "SelfContainedPipeline"]
