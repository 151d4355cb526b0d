"""The original Transformer (2017) and BERT as first-class Hugging Face models. Importing it registers them."""

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
