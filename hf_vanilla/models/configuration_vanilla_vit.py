"""Configuration of the Vision Transformer (Dosovitskiy et al. 2020), with the sizes of its Table 1 as presets."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN

from .self_contained import NativeType, SelfContainedConfig, height_and_width, size_fields


# Base, large and huge of Dosovitskiy et al. 2020, Table 1, with the patch sizes of Table 5; small and tiny of Steiner
# et al. 2021, "How to train your ViT?", Table 2.
_PRESETS = {
    "B/16": size_fields(12, 768, patch_size=16),
    "B/32": size_fields(12, 768, patch_size=32),
    "L/16": size_fields(24, 1024, patch_size=16),
    "L/32": size_fields(24, 1024, patch_size=32),
    "H/14": size_fields(32, 1280, heads=16, patch_size=14),
    "S/16": size_fields(12, 384, patch_size=16),
    "S/32": size_fields(12, 384, patch_size=32),
    "Ti/16": size_fields(12, 192, patch_size=16),
}


@strict
class VanillaVitConfig(SelfContainedConfig):
    """Configuration of a `VanillaVitModel`. Fields and defaults are those of transformers' `ViTConfig`: ViT-B/16.

    Args:
        hidden_size (`int`, defaults to 768): Width of the residual stream, the paper's D.
        num_hidden_layers (`int`, defaults to 12): Layers, the paper's L.
        num_attention_heads (`int`, defaults to 12): Attention heads, the paper's k.
        intermediate_size (`int`, defaults to 3072): Inner width of the feed-forward networks.
        hidden_act (`str`, defaults to `"gelu"`): Activation, a name of transformers' `ACT2FN`.
        hidden_dropout_prob (`float`, defaults to 0.0): Dropout on embeddings and on each sub-layer's output.
        attention_probs_dropout_prob (`float`, defaults to 0.0): Dropout on attention weights.
        initializer_range (`float`, defaults to 0.02): Standard deviation of the normal distribution of the initial
            weights, which is cut at two of them; transformers' is not cut.
        layer_norm_eps (`float`, defaults to 1e-12): Epsilon of every LayerNorm.
        image_size (`int` or a pair, defaults to 224): Height and width of an image in pixels.
        patch_size (`int` or a pair, defaults to 16): Height and width of a patch in pixels, the paper's P. It must
            divide the image size.
        num_channels (`int`, defaults to 3): Channels of an image, the paper's C: 3 for colours, 1 for grey.
        qkv_bias (`bool`, defaults to `True`): Must be true: queries, keys and values have biases.
        encoder_stride (`int`, defaults to 16): Not used; there so that every ViT's config fits.
        pooler_output_size (`int`, *optional*, defaults to `hidden_size`): Width of the pooler's output.
        pooler_act (`str`, defaults to `"tanh"`): Activation of the pooler.

    Raises:
        huggingface_hub.errors.StrictDataclassError: around a ValueError, if a value is out of its range or two values
            contradict each other; around a TypeError, if a value has another type than its field.

    Source: Dosovitskiy et al. 2020, section 3.1 and Table 1.

    Example:
    ```python
    >>> from hf_vanilla import VanillaVitConfig
    >>> config = VanillaVitConfig.preset("S/16", num_labels=10)
    >>> config.num_hidden_layers, config.hidden_size, config.grid
    (12, 384, (14, 14))

    ```
    """

    model_type = "vanilla_vit"
    native_types = {"vit": NativeType()}

    paper = "The Vision Transformer of Dosovitskiy et al. 2020 ([paper](https://arxiv.org/abs/2010.11929))."
    processor = "AutoImageProcessor"
    presets = _PRESETS
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    qkv_bias: bool = True
    encoder_stride: int = 16
    pooler_output_size: int | None = None
    pooler_act: str = "tanh"

    norm_position = "pre"  # no field, so not saved

    def __post_init__(self, **kwargs: Any) -> None:
        self.pooler_output_size = self.pooler_output_size or self.hidden_size
        super().__post_init__(**kwargs)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches of an image."""
        image, patch = height_and_width(self.image_size), height_and_width(self.patch_size)
        return image[0] // patch[0], image[1] // patch[1]

    @classmethod
    def auto_classes(cls) -> dict[str, Any]:
        """Return the model class of each Auto class."""
        from .modeling_vanilla_vit import AUTO_CLASSES

        return AUTO_CLASSES

    def validate_image_size(self) -> None:
        """Check that images divide into patches.

        Raises:
            ValueError: if not.
        """
        for name in ("image_size", "patch_size"):
            size = getattr(self, name)
            if (not isinstance(size, int) and len(size) != 2) or min(height_and_width(size)) < 1:
                raise ValueError(
                    f"`{name}` must be a number of pixels of at least 1, or two of them, height and width; got {size}."
                )
        image, patch = height_and_width(self.image_size), height_and_width(self.patch_size)
        if image[0] % patch[0] or image[1] % patch[1]:
            raise ValueError(
                f"`image_size` ({self.image_size}) must be a multiple of `patch_size` ({self.patch_size}), or the "
                "last rows and columns of pixels would be ignored."
            )
        positions = self.grid[0] * self.grid[1]
        self._check_number_of_parameters(self.hidden_size * (self.num_channels * patch[0] * patch[1] + positions))

    def validate_qkv_bias(self) -> None:
        """Check that queries, keys and values have biases.

        Raises:
            ValueError: if not.
        """
        if not self.qkv_bias:
            raise ValueError("`qkv_bias` must be true: queries, keys and values have biases, as in the authors' code.")

    def validate_pooler_act(self) -> None:
        """Check that the pooler's activation exists.

        Raises:
            ValueError: if not.
        """
        if self.pooler_act not in ACT2FN:
            raise ValueError(
                f"`pooler_act` must be a name of transformers' ACT2FN, such as tanh; got {self.pooler_act!r}."
            )


__all__ = ["VanillaVitConfig"]
