"""What the Auto classes find: one table from config class to model classes."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from .models.configuration_vanilla_transformer import VanillaTransformerConfig
from .models.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel


AUTO_CLASSES = {
    VanillaTransformerConfig: {
        AutoModel: VanillaTransformerModel,
        AutoModelForSeq2SeqLM: VanillaTransformerForConditionalGeneration,
    },
}


def register() -> None:
    """Make the Auto classes know every config and model of the package. Calling it again changes nothing.

    Raises:
        ValueError: if another package has taken one of the names.
    """
    for config_class, models in AUTO_CLASSES.items():
        AutoConfig.register(config_class.model_type, config_class)
        for auto_class, model_class in models.items():
            auto_class.register(config_class, model_class)
