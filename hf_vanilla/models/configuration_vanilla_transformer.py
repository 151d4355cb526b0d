"""Configuration of the encoder-decoder Transformer of Vaswani et al. 2017, with the rows of its Table 3 as presets."""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import Pipeline

from .self_contained import SelfContainedConfig


# Vaswani et al. 2017, Table 3: what each row changes against `base`. Rows are named after their part of the table and
# what they change.
_TABLE_3: dict[str, dict[str, Any]] = {
    "base": {},
    "A_heads_1": {"num_heads": 1, "d_k": 512, "d_v": 512},
    "A_heads_4": {"num_heads": 4, "d_k": 128, "d_v": 128},
    "A_heads_16": {"num_heads": 16, "d_k": 32, "d_v": 32},
    "A_heads_32": {"num_heads": 32, "d_k": 16, "d_v": 16},
    "B_d_k_16": {"d_k": 16},
    "B_d_k_32": {"d_k": 32},
    "C_layers_2": {"encoder_layers": 2, "decoder_layers": 2},
    "C_layers_4": {"encoder_layers": 4, "decoder_layers": 4},
    "C_layers_8": {"encoder_layers": 8, "decoder_layers": 8},
    "C_d_model_256": {"d_model": 256, "d_k": 32, "d_v": 32},
    "C_d_model_1024": {"d_model": 1024, "d_k": 128, "d_v": 128},
    "C_d_ff_1024": {"d_ff": 1024},
    "C_d_ff_4096": {"d_ff": 4096},
    "D_dropout_0.0": {"dropout": 0.0},
    "D_dropout_0.2": {"dropout": 0.2},
    "D_label_smoothing_0.0": {"label_smoothing": 0.0},
    "D_label_smoothing_0.2": {"label_smoothing": 0.2},
    "E_learned_positions": {"position_type": "learned"},
    "big": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3},
}


@strict
class VanillaTransformerConfig(SelfContainedConfig):
    """Configuration of a `VanillaTransformerModel`. The defaults are the paper's base model.

    | paper | field | transformers' name for it |
    |---|---|---|
    | d_model | `d_model` | `hidden_size` |
    | d_ff | `d_ff` | `intermediate_size` |
    | h | `num_heads` | `num_attention_heads` |
    | N | `encoder_layers`, `decoder_layers` | `num_hidden_layers` (the encoder's) |
    | P_drop | `dropout` | `hidden_dropout_prob` |
    | epsilon_ls | `label_smoothing` | |

    Args:
        vocab_size (`int`, defaults to 37000): Size of the vocabulary that the model writes in; the source's too unless
            `source_vocab_size` says otherwise.
        source_vocab_size (`int`, *optional*): Size of the source vocabulary if it is another one. Needs
            `share_encoder_decoder_embeddings=False`.
        d_model (`int`, defaults to 512): Width of the residual stream.
        d_ff (`int`, defaults to 2048): Inner width of the feed-forward networks.
        num_heads (`int`, defaults to 8): Attention heads.
        d_k (`int`, *optional*, defaults to `d_model / num_heads`): Width of one head's queries and keys.
        d_v (`int`, *optional*, defaults to `d_model / num_heads`): Width of one head's values.
        attention_scale (`float`, *optional*, defaults to `d_k ** -0.5`): What the scores are multiplied with.
        encoder_layers (`int`, defaults to 6): Layers of the encoder.
        decoder_layers (`int`, defaults to 6): Layers of the decoder.
        activation_function (`str`, defaults to `"relu"`): Activation of the feed-forward networks, a name of
            transformers' `ACT2FN`.
        dropout (`float`, defaults to 0.1): The paper's P_drop: on each sub-layer's output before the residual sum, and
            on the sum of embeddings and positions.
        attention_dropout (`float`, defaults to 0.0): Dropout on attention weights. Not the paper's.
        activation_dropout (`float`, defaults to 0.0): Dropout inside the feed-forward network. Not the paper's.
        norm_position (`str`, defaults to `"post"`): `"post"`, the paper's LayerNorm(x + Sublayer(x)); or `"pre"`, the
            Annotated Transformer's x + Sublayer(LayerNorm(x)) with one more norm at the end of each stack.
        layer_norm_eps (`float`, defaults to 1e-6): Epsilon of every LayerNorm (Tensor2Tensor's; the paper is silent).
        position_type (`str`, defaults to `"sinusoidal"`): `"sinusoidal"`, sine and cosine interleaved as in the paper;
            `"sinusoidal_split"`, the same numbers with all sines first (Marian); `"sinusoidal_t2t"`, Tensor2Tensor's
            `get_timing_signal_1d`, split and with slightly other frequencies; or `"learned"`.
        max_position_embeddings (`int`, defaults to 512): Rows of the learned position table. Sinusoids have no limit.
        label_smoothing (`float`, defaults to 0.1): Probability taken from the true token, in training mode only.
        label_smoothing_type (`str`, defaults to `"uniform"`): Which tokens get that probability. `"uniform"`: all of
            the vocabulary, the true one too (torch); `"t2t"`: all others (Tensor2Tensor); `"annotated"`: all but the
            true one and padding (the Annotated Transformer). The last two subtract the entropy of the
            smoothed target, so that a perfect prediction costs 0.
        tie_word_embeddings (`bool`, defaults to `True`): The output projection is the target embedding.
        share_encoder_decoder_embeddings (`bool`, defaults to `True`): Source and target have one embedding.
        use_cache (`bool`, defaults to `True`): Whether the decoder returns its keys and values.
        pad_token_id (`int`, defaults to 0): Padding. Its embedding is zero and stays zero.
        bos_token_id (`int`, defaults to 1): Begin of sentence.
        eos_token_id (`int`, defaults to 2): End of sentence.
        decoder_start_token_id (`int`, *optional*, defaults to `bos_token_id`): First token that the decoder reads.

    Raises:
        ValueError: if `num_heads` does not divide `d_model` and `d_k` or `d_v` is missing.
        huggingface_hub.errors.StrictDataclassError: around a ValueError, if a value is out of its range or two values
            contradict each other; around a TypeError, if a value has another type than its field.

    Example:
    ```python
    >>> from hf_vanilla import VanillaTransformerConfig
    >>> config = VanillaTransformerConfig.preset("big", vocab_size=32000)
    >>> config.d_model, config.hidden_size, config.d_k
    (1024, 1024, 64)

    ```
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "encoder_layers",
        "hidden_act": "activation_function",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    }

    paper = "The encoder-decoder Transformer of Vaswani et al. 2017 ([paper](https://arxiv.org/abs/1706.03762))."
    presets = _TABLE_3
    sizes = (*SelfContainedConfig.sizes, "source_vocab_size", "d_k", "d_v")
    counts = ("encoder_layers", "decoder_layers")
    rates = (*SelfContainedConfig.rates, "activation_dropout", "label_smoothing")
    scales = ("layer_norm_eps", "attention_scale")
    special_ids = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    choices = {
        "norm_position": ("post", "pre"),
        "position_type": ("sinusoidal", "sinusoidal_split", "sinusoidal_t2t", "learned"),
        "label_smoothing_type": ("uniform", "t2t", "annotated"),
    }

    vocab_size: int = 37000
    source_vocab_size: int | None = None
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    d_k: int | None = None
    d_v: int | None = None
    attention_scale: float | int | None = None
    encoder_layers: int = 6
    decoder_layers: int = 6
    activation_function: str = "relu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    norm_position: str = "post"
    layer_norm_eps: float = 1e-6
    position_type: str = "sinusoidal"
    max_position_embeddings: int = 512
    label_smoothing: float | int = 0.1
    label_smoothing_type: str = "uniform"
    tie_word_embeddings: bool = True
    share_encoder_decoder_embeddings: bool = True
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name in self.attribute_map.keys() & kwargs.keys():  # first, as other fields follow from them
            setattr(self, name, kwargs.pop(name))
        if None in (self.d_k, self.d_v) and self.num_heads > 0:
            if self.d_model % self.num_heads:
                raise ValueError(
                    f"`d_model` ({self.d_model}) must be divisible by `num_heads` ({self.num_heads}); "
                    "or give both `d_k` and `d_v`."
                )
            self.d_k = self.d_model // self.num_heads if self.d_k is None else self.d_k
            self.d_v = self.d_model // self.num_heads if self.d_v is None else self.d_v
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.bos_token_id
        super().__post_init__(**kwargs)

    @classmethod
    def auto_classes(cls) -> dict[str, Any]:
        """Return the model class of each Auto class."""
        from .modeling_vanilla_transformer import AUTO_CLASSES

        return AUTO_CLASSES

    @classmethod
    def pipelines(cls) -> dict[str, tuple[str, type[Pipeline]]]:
        """Return the pipelines that transformers lacks."""
        from .pipeline_vanilla_transformer import TranslationPipeline

        return {"translation": ("AutoModelForSeq2SeqLM", TranslationPipeline)}

    def forward_flops(self, input_lengths: torch.Tensor, label_counts: torch.Tensor) -> torch.Tensor:
        """Count the operations of all matrix products of a forward pass; a multiply-add counts as two.

        Args:
            input_lengths (`torch.Tensor` of shape `(batch,)`): Tokens of each source.
            label_counts (`torch.Tensor` of shape `(batch,)`): Tokens of each target.

        Returns:
            `torch.Tensor` of shape `(batch,)`: the operations of each pair.
        """
        encoder = self.attention_flops(input_lengths, input_lengths) + self.feed_forward_flops(input_lengths)
        self_attention = self.attention_flops(label_counts, label_counts)
        cross_attention = self.attention_flops(label_counts, input_lengths)
        decoder = self_attention + cross_attention + self.feed_forward_flops(label_counts)
        projection = label_counts * 2 * self.d_model * self.vocab_size
        return self.encoder_layers * encoder + self.decoder_layers * decoder + projection

    def validate_d_model(self) -> None:
        """Check that sinusoids come in pairs.

        Raises:
            ValueError: if not.
        """
        if self.position_type != "learned" and self.d_model % 2:
            raise ValueError(f"`d_model` must be even for sinusoidal positions, got {self.d_model}.")

    def validate_vocabularies(self) -> None:
        """Check that padding is in both vocabularies, that a decoder can start, and that tied embeddings have one.

        Raises:
            ValueError: if they do not.
        """
        if self.source_vocab_size is not None and self.source_vocab_size != self.vocab_size:
            if self.share_encoder_decoder_embeddings:
                raise ValueError(
                    f"`source_vocab_size` ({self.source_vocab_size}) differs from `vocab_size` ({self.vocab_size}): "
                    "two vocabularies need `share_encoder_decoder_embeddings=False`."
                )
            if self.pad_token_id >= self.source_vocab_size:
                raise ValueError(
                    f"`pad_token_id` ({self.pad_token_id}) must be in both vocabularies, and so below "
                    f"`source_vocab_size` ({self.source_vocab_size})."
                )
        if self.decoder_start_token_id is None:
            raise ValueError("`decoder_start_token_id` or `bos_token_id` must be given: the decoder starts with it.")


__all__ = ["VanillaTransformerConfig"]
