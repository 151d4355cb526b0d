"""What the Auto classes find: one table from config class to model classes."""

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
)

from .models.configuration_vanilla_bert import VanillaBertConfig
from .models.configuration_vanilla_transformer import VanillaTransformerConfig
from .models.modeling_vanilla_bert import (
    VanillaBertForMaskedLM,
    VanillaBertForMultipleChoice,
    VanillaBertForNextSentencePrediction,
    VanillaBertForPreTraining,
    VanillaBertForQuestionAnswering,
    VanillaBertForSequenceClassification,
    VanillaBertForTokenClassification,
    VanillaBertModel,
)
from .models.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel


AUTO_CLASSES: dict[Any, dict[Any, Any]] = {
    VanillaTransformerConfig: {
        AutoModel: VanillaTransformerModel,
        AutoModelForSeq2SeqLM: VanillaTransformerForConditionalGeneration,
    },
    VanillaBertConfig: {
        AutoModel: VanillaBertModel,
        AutoModelForTextEncoding: VanillaBertModel,
        AutoModelForPreTraining: VanillaBertForPreTraining,
        AutoModelForMaskedLM: VanillaBertForMaskedLM,
        AutoModelForNextSentencePrediction: VanillaBertForNextSentencePrediction,
        AutoModelForSequenceClassification: VanillaBertForSequenceClassification,
        AutoModelForTokenClassification: VanillaBertForTokenClassification,
        AutoModelForQuestionAnswering: VanillaBertForQuestionAnswering,
        AutoModelForMultipleChoice: VanillaBertForMultipleChoice,
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
