"""Configuration of BERT (Devlin et al. 2018), with its two sizes and the 24 miniatures as presets."""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import Pipeline

from .self_contained import NativeType, SelfContainedConfig, size_fields


# Devlin et al. 2018, section 3, and Turc et al. 2019, "Well-Read Students Learn Better", whose names for five sizes
# come first, before the whole grid.
_PRESETS = {
    "base": size_fields(12, 768),
    "large": size_fields(24, 1024),
    "tiny": size_fields(2, 128),
    "mini": size_fields(4, 256),
    "small": size_fields(4, 512),
    "medium": size_fields(8, 512),
    **{
        f"L-{layers}_H-{width}": size_fields(layers, width)
        for layers in range(2, 13, 2)
        for width in (128, 256, 512, 768)
    },
}


@strict
class VanillaBertConfig(SelfContainedConfig):
    """Configuration of a `VanillaBertModel`. Fields and defaults are those of transformers' `BertConfig`: BERT base.

    Args:
        vocab_size (`int`, defaults to 30522): Size of the vocabulary.
        hidden_size (`int`, defaults to 768): Width of the residual stream, the paper's H.
        num_hidden_layers (`int`, defaults to 12): Layers, the paper's L.
        num_attention_heads (`int`, defaults to 12): Attention heads, the paper's A.
        intermediate_size (`int`, defaults to 3072): Inner width of the feed-forward networks.
        hidden_act (`str`, defaults to `"gelu"`): Activation, a name of transformers' `ACT2FN`.
        hidden_dropout_prob (`float`, defaults to 0.1): Dropout on embeddings and on each sub-layer's output.
        attention_probs_dropout_prob (`float`, defaults to 0.1): Dropout on attention weights.
        max_position_embeddings (`int`, defaults to 512): Rows of the learned position table.
        type_vocab_size (`int`, defaults to 2): Number of segments.
        initializer_range (`float`, defaults to 0.02): Standard deviation of the truncated normal initialisation.
        layer_norm_eps (`float`, defaults to 1e-12): Epsilon of every LayerNorm.
        pad_token_id (`int`, *optional*, defaults to 0): Padding.
        classifier_dropout (`float`, *optional*, defaults to `hidden_dropout_prob`): Dropout before a classifier.
        bos_token_id (`int`, *optional*): Not used; there so that every BERT's config fits.
        eos_token_id (`int` or `list[int]`, *optional*): Not used.
        use_cache (`bool`, defaults to `True`): Not used: an encoder has no cache.
        is_decoder (`bool`, defaults to `False`): Must be false: this is the paper's encoder.
        add_cross_attention (`bool`, defaults to `False`): Must be false.
        tie_word_embeddings (`bool`, defaults to `True`): The masked language model's projection is the embedding.

    Raises:
        huggingface_hub.errors.StrictDataclassError: around a ValueError, if a value is out of its range or two values
            contradict each other; around a TypeError, if a value has another type than its field.

    Source: Devlin et al. 2018, section 3 and A.2.

    Example:
    ```python
    >>> from hf_vanilla import VanillaBertConfig
    >>> config = VanillaBertConfig.preset("mini", vocab_size=8000)
    >>> config.num_hidden_layers, config.hidden_size
    (4, 256)

    ```
    """

    model_type = "vanilla_bert"
    # relative positions are another model
    native_types = dict.fromkeys(("bert", model_type), NativeType(fixed={"position_embedding_type": "absolute"}))

    paper = "BERT of Devlin et al. 2018 ([paper](https://arxiv.org/abs/1810.04805))."
    presets = _PRESETS
    special_ids = ("pad_token_id",)

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    use_cache: bool = True
    classifier_dropout: float | int | None = None
    is_decoder: bool = False
    add_cross_attention: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True

    @classmethod
    def auto_classes(cls) -> dict[str, Any]:
        """Return the model class of each Auto class."""
        from .modeling_vanilla_bert import AUTO_CLASSES

        return AUTO_CLASSES

    @classmethod
    def pipelines(cls) -> dict[str, tuple[str, type[Pipeline]]]:
        """Return the pipelines that transformers lacks."""
        from .pipeline_vanilla_bert import QuestionAnsweringPipeline

        return {"question-answering": ("AutoModelForQuestionAnswering", QuestionAnsweringPipeline)}

    def forward_flops(
        self, input_lengths: torch.Tensor, label_counts: torch.Tensor, *, whole_last_layer: bool = False
    ) -> torch.Tensor:
        """Count the operations of all matrix products of a pre-training's forward pass; a multiply-add counts as two.

        Args:
            input_lengths (`torch.Tensor` of shape `(batch,)`): Tokens of each row.
            label_counts (`torch.Tensor` of shape `(batch,)`): Tokens of each row that are predicted.
            whole_last_layer (`bool`, defaults to `False`): Whether the last layer computes all outputs, as compiled
                code does, or only those that a head reads.

        Returns:
            `torch.Tensor` of shape `(batch,)`: the operations of each row.
        """
        from .packing import MAX_OUTPUT_SHARE  # here, as packing imports all that runs a model

        width = self.hidden_size
        layer = self.attention_flops(input_lengths, input_lengths) + self.feed_forward_flops(input_lengths)
        layers = self.num_hidden_layers * layer
        if not whole_last_layer:
            read = label_counts + 1  # with the first token
            is_shorter = read <= MAX_OUTPUT_SHARE * input_lengths
            left_out = torch.where(is_shorter, input_lengths - read, 0)
            # of attention, the projection of its output
            layers = layers - left_out * 2 * width**2 - self.feed_forward_flops(left_out)
        prediction = label_counts * (2 * width**2 + 2 * width * self.vocab_size)
        return layers + prediction + 2 * width**2 + 4 * width

    def validate_is_encoder(self) -> None:
        """Check that no decoder is wanted.

        Raises:
            ValueError: if one is.
        """
        for name in ("is_decoder", "add_cross_attention"):
            if getattr(self, name):
                raise ValueError(f"`{name}` must be false: VanillaBert is the paper's encoder.")


__all__ = ["VanillaBertConfig"]
