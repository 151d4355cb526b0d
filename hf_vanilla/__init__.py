"""The original Transformer of 2017 as a first-class Hugging Face model. Importing the package registers it."""

from .models.configuration_vanilla_transformer import VanillaTransformerConfig
from .models.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerPreTrainedModel,
)
from .registration import register


__version__ = "0.1.0"

__all__ = [
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
    "__version__",
]

register()
