"""ViT, the Vision Transformer of Dosovitskiy et al. 2020, with its classifier of images.

    +----+----+
    | 1  | 2  |          class   1   2   3   4        patches, each projected to one vector
    +----+----+    ->      0     1   2   3   4        learned positions
    | 3  | 4  |            |     |   |   |   |
    +----+----+        +---v-----v---v---v---v---+
                       |  sum of both, dropout   |
                       +------------v------------+
                       |  norm, self-attention,  |
                       |  add; norm,             |  x L
                       |  feed-forward, add      |
                       +---v---------------------+
                         norm
                           |
                       classifier

Departures from the paper:
- None in the layers. The classifier is one linear layer, also when trained from nothing; the paper's hidden layer with
  tanh is the pooler of `VanillaVitModel`. In fine-tuning the paper's classifier starts at 0, here it is drawn.
- Where the authors' code has an epsilon of LayerNorm of 1e-6, the default is transformers': 1e-12. Dropout is 0, the
  paper's for fine-tuning.
- Where the authors' code has an initialisation for each kind of weight, and transformers a normal distribution, all
  weights, positions and the class token are from a normal distribution cut at two standard deviations, as BERT's.
- What no head reads of the last layer's output is not computed.

Checkpoints of type `vit` load here; transformers' `ViTFor...` read what is saved.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.core_model_loading import WeightTransform
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .checks import check_arguments, check_heads
from .configuration_vanilla_vit import VanillaVitConfig
from .conversion_vanilla_vit import VIT_NAMES
from .dropout import Dropout
from .layers import EncoderLayer
from .loss import label_loss
from .packing import run_encoder
from .read_positions import read_first
from .self_contained import Pooler, VanillaPreTrainedModel, final_norm, height_and_width


# Arguments of transformers' `ViTModel` that must be unset here, and why.
REFUSED_ARGUMENTS = {
    "bool_masked_pos": "the model has no mask token; transformers' `ViTForMaskedImageModeling` has one",
    "attention_mask": "images have no padding, every patch is read",
}


def check_pixel_values(pixel_values: Any, config: VanillaVitConfig, interpolate_pos_encoding: Any) -> None:
    """Check that images fit the model.

    Args:
        pixel_values (`torch.Tensor` of shape `(batch, channels, height, width)`): The images.
        config (`VanillaVitConfig`): The model's config.
        interpolate_pos_encoding (`bool`, *optional*): Whether every size that divides into patches is right.

    Raises:
        ValueError: if the shape does not fit.
        TypeError: if the images are no tensor of floating-point numbers, or `interpolate_pos_encoding` is one.
    """
    if isinstance(interpolate_pos_encoding, Tensor):
        raise TypeError("`interpolate_pos_encoding` must be true or false, got a tensor.")
    if not isinstance(pixel_values, Tensor) or not pixel_values.is_floating_point():
        kind = pixel_values.dtype if isinstance(pixel_values, Tensor) else type(pixel_values).__name__
        raise TypeError(f"`pixel_values` must be a tensor of floats, as an image processor makes it, got {kind}.")
    shape = tuple(pixel_values.shape)
    if len(shape) != 4 or shape[1] != config.num_channels:
        raise ValueError(
            f"`pixel_values` must have shape (batch, channels = {config.num_channels}, height, width), got {shape}; "
            "`num_channels` of the config is the number of channels."
        )
    size, patch = height_and_width(config.image_size), height_and_width(config.patch_size)
    if not interpolate_pos_encoding and shape[2:] != size:
        raise ValueError(
            f"`pixel_values` must have the height and width of `image_size`, {size}, got {shape[2:]}; resize the "
            "images, or pass `interpolate_pos_encoding=True`."
        )
    if min(shape[2:]) < 1 or shape[2] % patch[0] or shape[3] % patch[1]:
        raise ValueError(
            f"`pixel_values` must have a height and width that are multiples of `patch_size`, {patch}, got "
            f"{shape[2:]}; resize or crop the images."
        )


class Embeddings(nn.Module):
    """Projected patches after a class token, plus learned positions, then dropout.

    Args:
        config (`VanillaVitConfig`): The model's config.

    Source: Dosovitskiy et al. 2020, section 3.1, equation 1.
    """

    def __init__(self, config: VanillaVitConfig):
        super().__init__()
        self.grid = config.grid
        patch = height_and_width(config.patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.patch_embeddings = nn.ModuleDict(
            {"projection": nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=patch, stride=patch)}
        )
        self.position_embeddings = nn.Parameter(torch.zeros(1, 1 + self.grid[0] * self.grid[1], config.hidden_size))
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Embed images.

        Args:
            pixel_values (`torch.Tensor` of shape `(batch, channels, height, width)`): The images.

        Returns:
            `torch.Tensor` of shape `(batch, 1 + patches, d_model)`: the input of the first layer.
        """
        projection: Any = self.patch_embeddings["projection"]
        patches = projection(pixel_values.to(projection.weight.dtype))  # (batch, d_model, rows, columns)
        class_token = self.cls_token.expand(patches.shape[0], -1, -1)
        hidden_states = torch.cat((class_token, patches.flatten(2).transpose(1, 2)), dim=1)
        hidden_states = hidden_states + self.positions(patches.shape[2], patches.shape[3])
        return self.dropout(hidden_states)

    def positions(self, rows: int, columns: int) -> Tensor:
        """Return the positions, for another grid of patches than the model's interpolated in two dimensions.

        Args:
            rows (`int`): Rows of patches.
            columns (`int`): Columns of patches.

        Returns:
            `torch.Tensor` of shape `(1, 1 + rows * columns, d_model)`: the positions.

        Source: Dosovitskiy et al. 2020, section 3.2.
        """
        if (rows, columns) == self.grid:
            return self.position_embeddings
        table = self.position_embeddings[:, 1:].transpose(1, 2).unflatten(2, self.grid)  # (1, d_model, rows, columns)
        table = nn.functional.interpolate(table, size=(rows, columns), mode="bicubic", align_corners=False)
        return torch.cat((self.position_embeddings[:, :1], table.flatten(2).transpose(1, 2)), dim=1)


class VanillaVitPreTrainedModel(VanillaPreTrainedModel):
    """What all models of the family share: initialisation, and what transformers may do with them."""

    config: VanillaVitConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules = ["Embeddings", "EncoderLayer"]

    def file_names(self) -> list[WeightTransform]:
        """Return the rules from the names in ViT's own checkpoints, which transformers' `ViTFor...` read."""
        return VIT_NAMES

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights, positions and the class token from a normal distribution cut at two standard deviations."""
        std = self.config.initializer_range
        weights = [module.weight] if isinstance(module, nn.Linear | nn.Conv2d) else []
        if isinstance(module, Embeddings):
            weights = [module.cls_token, module.position_embeddings]
        for weight in weights:
            init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
        super()._init_weights(module)


class VanillaVitModel(VanillaVitPreTrainedModel):
    """The encoder: embeddings, layers, norm and, on top of the class token, the pooler.

    Args:
        config (`VanillaVitConfig`): The model's config.
        add_pooling_layer (`bool`, defaults to `True`): Whether to have a pooler.

    Raises:
        ValueError: if `num_attention_heads` does not divide `hidden_size`.

    Source: Dosovitskiy et al. 2020, section 3.1.
    """

    def __init__(self, config: VanillaVitConfig, add_pooling_layer: bool = True):
        check_heads(config)
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList([EncoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = final_norm(config)  # applied by `run_encoder`
        self.pooler = Pooler(config) if add_pooling_layer else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the projection of patches."""
        return self.embeddings.patch_embeddings["projection"]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the projection of patches."""
        self.embeddings.patch_embeddings["projection"] = value

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)  # `hidden_states` ends before the norm, as in transformers' ViT
    def forward(
        self,
        pixel_values: Tensor,
        interpolate_pos_encoding: bool | None = None,
        class_token_only: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encode images.

        Args:
            pixel_values (`torch.Tensor` of shape `(batch, channels, height, width)`): The images, as an image
                processor makes them.
            interpolate_pos_encoding (`bool`, *optional*): Whether images may have another size than `image_size`, a
                multiple of `patch_size`; the positions are then interpolated.
            class_token_only (`bool`, *optional*, defaults to `False`): Whether only the class token's output is read;
                that of the patches may then be 0, which spares most of the last layer.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `BaseModelOutputWithPooling`: `last_hidden_state` of shape `(batch, 1 + patches, d_model)`, with the class
            token first; `pooler_output` of shape `(batch, pooler_output_size)`, and what was asked for.

        Raises:
            ValueError: if the images have another number of channels, or a size that does not fit; or if
                `bool_masked_pos` or `attention_mask`, which transformers' ViT knows, is given.
            TypeError: if they are no tensor of floating-point numbers, or `interpolate_pos_encoding` is one.
        """
        for name, reason in REFUSED_ARGUMENTS.items():
            if cast(dict, kwargs).pop(name, None) is not None:
                raise ValueError(f"`{name}` must not be given: {reason}.")
        check_pixel_values(pixel_values, self.config, interpolate_pos_encoding)
        hidden_states = self.embeddings(pixel_values)
        read = read_first(hidden_states) if class_token_only else {}
        # the layers, and after them the norm of pre-norm
        hidden_states, first = run_encoder(self, hidden_states, None, **read, **kwargs)
        return BaseModelOutputWithPooling(hidden_states, None if self.pooler is None else self.pooler(first))


class VanillaVitForImageClassification(VanillaVitPreTrainedModel):
    """ViT with a linear classifier of the class token: classes, several labels at once, or numbers (regression).

    Args:
        config (`VanillaVitConfig`): The model's config. With a `num_labels` of 0 there is no classifier: the logits
            are the class token's output, of width d_model.

    Source: Dosovitskiy et al. 2020, section 3.1.
    """

    def __init__(self, config: VanillaVitConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = VanillaVitModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Classify images, and with `labels` compute the loss, the mean over them.

        Args:
            pixel_values (`torch.Tensor` of shape `(batch, channels, height, width)`): The images, as an image
                processor makes them.
            labels (`torch.Tensor` of shape `(batch,)` or `(batch, num_labels)`, *optional*): Classes, -100 is
                ignored; or for several labels or numbers one value for each output. The config's `problem_type`
                decides the loss; unset, one output is regression, integers are classes, and other numbers are several
                labels.
            interpolate_pos_encoding (`bool`, *optional*): As in [`VanillaVitModel`].
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): Labels of the whole optimizer step, in place of
                those of this batch: accumulated batches and several processes then give the gradient of one large
                batch.
            **kwargs: transformers' `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `ImageClassifierOutput`: `loss` of shape `()`, of classes in nats, and `logits` of shape `(batch,
            num_labels)`.

        Raises:
            ValueError: if images or labels do not fit the model, or one of transformers' masks is given.
            TypeError: if the images are no tensor of floating-point numbers, or classes are no integers.
        """
        check_arguments(num_items_in_batch, labels=labels)
        reads = {"class_token_only": True, "return_dict": True}
        outputs = self.vit(pixel_values, interpolate_pos_encoding, **{**reads, **kwargs})
        logits = self.classifier(outputs.last_hidden_state[:, 0])  # (batch, num_labels)
        loss = label_loss(self.config, logits, labels, num_items_in_batch)
        return ImageClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


# The model class of each Auto class, here and in a checkpoint that carries this file.
AUTO_CLASSES = {
    "AutoModel": VanillaVitModel,
    "AutoModelForImageClassification": VanillaVitForImageClassification,
}

__all__ = [
    "AUTO_CLASSES",
    "VanillaVitPreTrainedModel",
    *(model_class.__name__ for model_class in AUTO_CLASSES.values()),
]
