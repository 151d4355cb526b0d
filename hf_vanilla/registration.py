"""Registration of the models and pipelines of all families with transformers' Auto classes and `pipeline()`."""

from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pipelines import PIPELINE_REGISTRY

from .generation.translation_pipeline import AutoTranslator, TranslationPipeline
from .models.configuration_vanilla_bert import VanillaBertConfig
from .models.configuration_vanilla_gpt import VanillaGptConfig
from .models.configuration_vanilla_transformer import VanillaTransformerConfig
from .models.configuration_vanilla_vit import VanillaVitConfig
from .models.modeling_vanilla_gpt import VanillaGptForCausalLM
from .models.pipeline_vanilla_bert import QuestionAnsweringPipeline


# One line for each model family.
CONFIGS = (VanillaTransformerConfig, VanillaBertConfig, VanillaGptConfig, VanillaVitConfig)
# For each config class, the model class of each Auto class.
AUTO_CLASSES: dict[Any, dict[str, Any]] = {config_class: config_class.auto_classes() for config_class in CONFIGS}
# For each task, the pipeline and the Auto class of its model. transformers 5 has dropped both tasks.
PIPELINES: dict[str, tuple[Any, Any]] = {
    "vanilla-translation": (TranslationPipeline, AutoTranslator),
    "vanilla-question-answering": (QuestionAnsweringPipeline, transformers.AutoModelForQuestionAnswering),
}


def register() -> None:
    """Register every config, model and pipeline of the package with transformers. Repeated calls have no effect.

    A config that another package has registered under one of the names is replaced, a pipeline is kept.

    Raises:
        ValueError: if transformers itself has a model type of one of the names.
    """
    for config_class, models in AUTO_CLASSES.items():
        transformers.AutoConfig.register(config_class.model_type, config_class)
        for name, model_class in models.items():
            getattr(transformers, name).register(config_class, model_class)
    # For the label smoothing of transformers' trainer, which shifts the labels of these classes alone.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[VanillaGptConfig.model_type] = VanillaGptForCausalLM.__name__
    for task, (pipeline_class, auto_class) in PIPELINES.items():
        if task not in PIPELINE_REGISTRY.get_supported_tasks():
            PIPELINE_REGISTRY.register_pipeline(task, pipeline_class=pipeline_class, pt_model=(auto_class,))
