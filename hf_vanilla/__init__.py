"""The Transformer of 2017, BERT, GPT and ViT as first-class Hugging Face models. The import registers them."""

from .hub.publish import Publication, publish, roll_back
from .models.configuration_vanilla_bert import VanillaBertConfig
from .models.configuration_vanilla_gpt import VanillaGptConfig
from .models.configuration_vanilla_transformer import VanillaTransformerConfig
from .models.configuration_vanilla_vit import VanillaVitConfig
from .models.modeling_vanilla_bert import (
    VanillaBertForMaskedLM,
    VanillaBertForMultipleChoice,
    VanillaBertForNextSentencePrediction,
    VanillaBertForPreTraining,
    VanillaBertForQuestionAnswering,
    VanillaBertForSequenceClassification,
    VanillaBertForTokenClassification,
    VanillaBertModel,
    VanillaBertPreTrainedModel,
)
from .models.modeling_vanilla_gpt import (
    VanillaGptForCausalLM,
    VanillaGptForMultipleChoice,
    VanillaGptForSequenceClassification,
    VanillaGptModel,
    VanillaGptPreTrainedModel,
)
from .models.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerPreTrainedModel,
)
from .models.modeling_vanilla_vit import (
    VanillaVitForImageClassification,
    VanillaVitModel,
    VanillaVitPreTrainedModel,
)
from .registration import register


__version__ = "0.2.0"

__all__ = [
    "Publication",
    "VanillaBertConfig",
    "VanillaBertForMaskedLM",
    "VanillaBertForMultipleChoice",
    "VanillaBertForNextSentencePrediction",
    "VanillaBertForPreTraining",
    "VanillaBertForQuestionAnswering",
    "VanillaBertForSequenceClassification",
    "VanillaBertForTokenClassification",
    "VanillaBertModel",
    "VanillaBertPreTrainedModel",
    "VanillaGptConfig",
    "VanillaGptForCausalLM",
    "VanillaGptForMultipleChoice",
    "VanillaGptForSequenceClassification",
    "VanillaGptModel",
    "VanillaGptPreTrainedModel",
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
    "VanillaVitConfig",
    "VanillaVitForImageClassification",
    "VanillaVitModel",
    "VanillaVitPreTrainedModel",
    "__version__",
    "publish",
    "roll_back",
]

register()
