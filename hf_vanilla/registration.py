"""What the Auto classes find: for each config class the models that each Auto class loads; and our pipelines."""

from typing import Any

import transformers

from .models import modeling_vanilla_bert, modeling_vanilla_transformer
from .models.configuration_vanilla_bert import VanillaBertConfig
from .models.configuration_vanilla_transformer import VanillaTransformerConfig
from .pipelines import register_pipelines


AUTO_CLASSES: dict[Any, dict[str, Any]] = {
    VanillaTransformerConfig: modeling_vanilla_transformer.AUTO_CLASSES,
    VanillaBertConfig: modeling_vanilla_bert.AUTO_CLASSES,
}


def register() -> None:
    """Make transformers know every config, model and pipeline of the package. Calling it again changes nothing.

    Raises:
        ValueError: if another package has taken one of the names.
    """
    for config_class, models in AUTO_CLASSES.items():
        transformers.AutoConfig.register(config_class.model_type, config_class)
        for name, model_class in models.items():
            getattr(transformers, name).register(config_class, model_class)
    register_pipelines()
