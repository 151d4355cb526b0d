"""Configuration of GPT (Radford et al. 2018), with its size and miniatures as presets."""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict

from .self_contained import NativeType, SelfContainedConfig, size_fields


# Field names of transformers' `openai-gpt` and `gpt2`, and those here.
_NATIVE_FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "afn": "hidden_act",
    "activation_function": "hidden_act",
    "resid_pdrop": "hidden_dropout_prob",
    "embd_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
    "layer_norm_epsilon": "layer_norm_eps",
    "summary_first_dropout": "classifier_dropout",
}
_ALIASES = ("n_embd", "n_layer", "n_head", "n_positions")  # which transformers knows by our names too
_OPENAI_ACTIVATIONS = {"gelu": "gelu_new", "swish": "silu"}  # what transformers computes for two values of `afn`
_PLAIN_GPT2 = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}


@strict
class VanillaGptConfig(SelfContainedConfig):
    """Configuration of a `VanillaGptModel`. The defaults are the paper's model.

    Args:
        vocab_size (`int`, defaults to 40478): Size of the vocabulary.
        hidden_size (`int`, defaults to 768): Width of the residual stream.
        num_hidden_layers (`int`, defaults to 12): Layers.
        num_attention_heads (`int`, defaults to 12): Attention heads.
        intermediate_size (`int`, *optional*, defaults to `4 * hidden_size`): Inner width of the feed-forward networks.
        hidden_act (`str`, defaults to `"gelu_new"`): Activation, a name of transformers' `ACT2FN`; the default is the
            authors' approximation of GELU.
        hidden_dropout_prob (`float`, defaults to 0.1): Dropout on embeddings and on each sub-layer's output.
        attention_probs_dropout_prob (`float`, defaults to 0.1): Dropout on attention weights.
        max_position_embeddings (`int`, defaults to 512): Rows of the learned position table.
        layer_norm_eps (`float`, defaults to 1e-5): Epsilon of every LayerNorm.
        initializer_range (`float`, defaults to 0.02): Standard deviation of the normal initialisation.
        norm_position (`str`, defaults to `"post"`): `"post"`, the paper's, or `"pre"`, GPT-2's.
        classifier_dropout (`float`, *optional*, defaults to `hidden_dropout_prob`): Dropout before a classifier.
        lm_loss_weight (`float`, defaults to 0.5): Weight of the language model's loss when a classifier is fine-tuned,
            the paper's lambda; 0 for none.
        pad_token_id (`int`, *optional*): Padding; the paper's vocabulary has none.
        bos_token_id (`int`, *optional*): First token of a generated text without a prompt.
        eos_token_id (`int` or `list[int]`, *optional*): Token after which generation stops.
        use_cache (`bool`, defaults to `True`): Whether the model returns keys and values.
        tie_word_embeddings (`bool`, defaults to `True`): The projection onto the vocabulary is the embedding.

    Raises:
        huggingface_hub.errors.StrictDataclassError: around a ValueError, if a value is out of its range or two values
            contradict each other; around a TypeError, if a value has another type than its field.

    Source: Radford et al. 2018, 4.1.

    Example:
    ```python
    >>> from hf_vanilla import VanillaGptConfig
    >>> config = VanillaGptConfig.preset("mini", vocab_size=8000)
    >>> config.num_hidden_layers, config.hidden_size, config.intermediate_size
    (4, 256, 1024)

    ```
    """

    model_type = "vanilla_gpt"
    native_types = {
        "openai-gpt": NativeType(_NATIVE_FIELDS, _OPENAI_ACTIVATIONS, _PLAIN_GPT2, {"norm_position": "post"}),
        "gpt2": NativeType(_NATIVE_FIELDS, fixed=_PLAIN_GPT2, implied={"norm_position": "pre"}),
    }
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    paper = (
        "GPT of Radford et al. 2018 "
        "([paper](https://cdn.openai.com/research-covers/language-unsupervised/language_understanding_paper.pdf))."
    )
    presets = {
        "gpt1": size_fields(12, 768, intermediate_size=None),  # that follows from the width
        "tiny": size_fields(2, 128, intermediate_size=None),
        "mini": size_fields(4, 256, intermediate_size=None),
        "small": size_fields(4, 512, intermediate_size=None),
        "medium": size_fields(8, 512, intermediate_size=None),
    }
    special_ids = ("pad_token_id", "bos_token_id", "eos_token_id")
    choices = {"norm_position": ("post", "pre")}

    vocab_size: int = 40478
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    hidden_act: str = "gelu_new"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    norm_position: str = "post"
    classifier_dropout: float | int | None = None
    lm_loss_weight: float | int = 0.5
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what is saved: fields that transformers' `gpt2` and `openai-gpt` call otherwise have both names.

        Returns:
            `dict[str, Any]`: the fields.
        """
        native = self.native_types["gpt2" if self.norm_position == "pre" else "openai-gpt"]
        values = {ours: theirs for theirs, ours in native.values.items()}
        named = {theirs: getattr(self, ours) for theirs, ours in native.renamed.items() if theirs not in _ALIASES}
        named = {theirs: values.get(value, value) for theirs, value in named.items() if value is not None}
        return {**super().to_diff_dict(), **named}

    @classmethod
    def auto_classes(cls) -> dict[str, Any]:
        """Return the model class of each Auto class."""
        from .modeling_vanilla_gpt import AUTO_CLASSES

        return AUTO_CLASSES

    def forward_flops(self, input_lengths: torch.Tensor, label_counts: torch.Tensor) -> torch.Tensor:
        """Count the operations of all matrix products of a pre-training's forward pass; a multiply-add counts as two.

        Args:
            input_lengths (`torch.Tensor` of shape `(batch,)`): Tokens of each row.
            label_counts (`torch.Tensor` of shape `(batch,)`): Tokens of each row that are predicted.

        Returns:
            `torch.Tensor` of shape `(batch,)`: the operations of each row.
        """
        layer = self.attention_flops(input_lengths, input_lengths) + self.feed_forward_flops(input_lengths)
        return self.num_hidden_layers * layer + label_counts * 2 * self.hidden_size * self.vocab_size

    def validate_lm_loss_weight(self) -> None:
        """Check the weight of the language model's loss.

        Raises:
            ValueError: if it is negative or infinite.
        """
        if not 0 <= self.lm_loss_weight < float("inf"):
            raise ValueError(f"`lm_loss_weight` must be finite and not negative, got {self.lm_loss_weight}.")


__all__ = ["VanillaGptConfig"]
