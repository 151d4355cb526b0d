"""What all configs, models and pipelines share.

Sizes and checks of configs, names in files, loading and saving with code, the pooler, the last norm, streaming.
"""

import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, cast

import torch
from torch import Tensor, nn
from transformers import Pipeline
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightTransform
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from .cache_names import CACHE_NAME
from .checks import check_generated_length, check_generation_options, position_limit
from .dropout import Dropout
from .layers import EncoderLayer, SelfAttention


# Limits of a config, far beyond any model: above them, building one fills the memory or takes minutes before it fails.
MAX_LAYERS = 10_000
MAX_LABELS = 1_000_000
MAX_PARAMETERS = 10**12
# Width of one head in nearly all published models.
HEAD_WIDTH = 64


def _place_of(saved_class: type) -> str:
    """Name a class as transformers finds it in a checkpoint, such as `modeling_vanilla_bert.VanillaBertModel`."""
    return f"{saved_class.__module__.rpartition('.')[2]}.{saved_class.__name__}"


class NativeType(NamedTuple):
    """How the saved configurations of one of transformers' model types are read.

    Attributes:
        renamed: Names of its fields, and those here. If several have the same name here, their values must be equal.
        values: Values of renamed fields, and those here.
        fixed: Fields that make another model, with the value that this one has.
        implied: Fields that only differ between model types.
    """

    renamed: Mapping[str, str] = {}
    values: Mapping[Any, Any] = {}
    fixed: Mapping[str, Any] = {}
    implied: Mapping[str, Any] = {}


def size_fields(layers: int, width: int, heads: int | None = None, **others: Any) -> dict[str, Any]:
    """Build the fields of a published size.

    Args:
        layers (`int`): Number of layers.
        width (`int`): Width of the residual stream; the intermediate size is four times that, as in all
            published models.
        heads (`int`, *optional*): Attention heads; of width 64 by default.
        **others (`Any`): Further fields.

    Returns:
        `dict[str, Any]`: the fields.
    """
    heads = width // HEAD_WIDTH if heads is None else heads
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": 4 * width, **others}


def height_and_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width of images or patches whose size is one number, the side of a square, or both.

    Args:
        size (`int` or `Sequence[int]`): `image_size` or `patch_size` of a config, in pixels.

    Returns:
        `tuple[int, int]`: height and width.
    """
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


class SelfContainedConfig(PreTrainedConfig):
    """A configuration that is saved with the code of its model family and with all Auto classes that can load it.

    By default transformers names only the head that was saved, and `AutoModel` can't load what `AutoModelForMaskedLM`
    can.
    """

    # One sentence that names the paper, for model cards.
    paper: ClassVar[str] = ""
    # Name of the Auto class that loads what makes a model's inputs.
    processor: ClassVar[str] = "AutoTokenizer"
    # The model types of transformers whose saved configurations can be read.
    native_types: ClassVar[dict[str, NativeType]] = {}
    # For each published size the fields that it sets.
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    # Names of fields, if a family has them: numbers of at least 1, of at least 0, in [0, 1), and above 0.
    sizes: ClassVar[tuple[str, ...]] = (
        *("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings"),
        *("type_vocab_size", "num_channels", "pooler_output_size"),
    )
    counts: ClassVar[tuple[str, ...]] = ("num_hidden_layers",)
    rates: ClassVar[tuple[str, ...]] = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
    scales: ClassVar[tuple[str, ...]] = ("initializer_range", "layer_norm_eps")
    # Names of ids in the vocabulary, and fields with the values that they may have.
    special_ids: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[dict[str, tuple[str, ...]]] = {}
    # What the shared layers ask for and most models have no choice about; no fields, so not saved.
    norm_position = "post"
    activation_dropout = 0.0
    attention_scale = cast(Any, None)
    pooler_output_size = cast(Any, None)  # the width of the model
    pooler_act = "tanh"

    # How processes shard a model, for transformers' `DistributedConfig`; each model keeps the rules for its modules.
    # A cut through a fused projection is no cut between heads, so its output is gathered before heads attend.
    base_model_tp_plan = {
        "layers.*.self_attn.qkv_proj": "colwise_gather_output",
        "layers.*.self_attn.out_proj": "rowwise_split_input",
        "layers.*.cross_attn.q_proj": "colwise_gather_output",
        "layers.*.cross_attn.kv_proj": "colwise_gather_output",
        "layers.*.cross_attn.out_proj": "rowwise_split_input",
        "layers.*.feed_forward.fc1": "colwise",
        "layers.*.feed_forward.fc2": "rowwise",
    }
    base_model_fsdp_plan = {"layers.*": "free_full_weight"}

    _auto_class = "AutoConfig"  # makes transformers copy the file of the class and those that it imports

    def __post_init__(self, **kwargs: Any) -> None:
        num_labels = kwargs.get("num_labels")
        if num_labels is not None and not (isinstance(num_labels, int) and 0 <= num_labels <= MAX_LABELS):
            raise ValueError(f"`num_labels` must be an integer in [0, {MAX_LABELS:,}], got {num_labels!r}.")
        kinds = {"id2label": (dict, "a dict"), "dtype": (str | torch.dtype | dict, "a dtype, its name, or a dict")}
        for name, (kind, rule) in kinds.items():
            if (value := getattr(self, name, None)) is not None and not isinstance(value, kind):
                raise TypeError(f"`{name}` must be {rule}, got {value!r}.")
        dtype = getattr(self, "dtype", None)
        found = getattr(torch, str(dtype).rpartition(".")[2], None)
        if isinstance(dtype, str) and dtype != "auto" and not isinstance(found, torch.dtype):
            raise ValueError(f"`dtype` must be a dtype of torch, such as float32; got {dtype!r}.")
        super().__post_init__(**kwargs)

    @classmethod
    def auto_classes(cls) -> dict[str, Any]:
        """Return the model class of each Auto class.

        The method itself imports the models: at the top of the file the import would be circular. transformers, which
        copies what is imported, finds it here too.

        Returns:
            `dict[str, Any]`: for example `{"AutoModel": VanillaBertModel}`.

        Raises:
            NotImplementedError: if the subclass does not define it.
        """
        raise NotImplementedError(f"{cls.__name__} must define `auto_classes`.")

    @classmethod
    def pipelines(cls) -> dict[str, tuple[str, type]]:
        """Return the model family's pipelines that transformers lacks, imported as in `auto_classes`.

        Returns:
            `dict[str, tuple]`: for each task the Auto class of its model, and the pipeline class.
        """
        return {}

    @property
    def d_k(self) -> Any:
        """Width of one head's queries and keys."""
        return self.hidden_size // self.num_attention_heads

    @property
    def d_v(self) -> Any:
        """Width of one head's values."""
        return self.d_k

    def attention_flops(self, queries: Any, keys: Any) -> Any:
        """Count the operations of one attention with its projections; a multiply-add counts as two.

        Args:
            queries (`torch.Tensor` of shape `(batch,)`): Positions that attend.
            keys (`torch.Tensor` of shape `(batch,)`): Positions that they attend to.

        Returns:
            `torch.Tensor` of shape `(batch,)`: the operations.
        """
        width = self.num_attention_heads * (self.d_k + self.d_v)
        return 2 * width * (self.hidden_size * (queries + keys) + queries * keys)

    def feed_forward_flops(self, tokens: Any) -> Any:
        """Count the operations of one feed-forward network; a multiply-add counts as two.

        Args:
            tokens (`torch.Tensor` of shape `(batch,)`): Positions that it works on.

        Returns:
            `torch.Tensor` of shape `(batch,)`: the operations.
        """
        return tokens * 4 * self.hidden_size * self.intermediate_size

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a saved configuration; one of `native_types` is translated, and second names of fields are dropped.

        Args:
            pretrained_model_name_or_path (`str`): A folder or a name on the Hub.
            **kwargs: As in `PreTrainedConfig.get_config_dict`.

        Returns:
            `tuple[dict, dict]`: the fields, and the arguments that are left.

        Raises:
            ValueError: if it is another model than the published ones.
        """
        fields, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        native = cls.native_types.get(fields.get("model_type", ""))
        if native is None:
            second_names = {theirs for each in cls.native_types.values() for theirs in each.renamed}
            return {name: value for name, value in fields.items() if name not in second_names}, unused
        found = {name: (fields.pop(name, value), value) for name, value in native.fixed.items()}
        for theirs, ours in native.renamed.items():
            if theirs in fields:
                value = fields.pop(theirs)
                value = native.values.get(value, value)
                found[theirs] = (value, fields.setdefault(ours, value))
        for name, (value, expected) in found.items():
            if value != expected:
                raise ValueError(
                    f"`{name}` of {pretrained_model_name_or_path} must be {expected!r}, as in the published models; "
                    "load it with transformers' own class."
                )
        return {**fields, **native.implied, "model_type": cls.model_type}, unused

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """Build the configuration of a published size.

        Args:
            name (`str`): One of `preset_names()`.
            **overrides: Fields that differ from it, such as `vocab_size`.

        Returns:
            `SelfContainedConfig`: the configuration.

        Raises:
            ValueError: if there is no such size.
        """
        if name not in cls.presets:
            raise ValueError(f"`name` must be one of {', '.join(cls.presets)}; got {name!r}.")
        return cls(**{**cls.presets[name], **overrides})

    @classmethod
    def preset_names(cls) -> tuple[str, ...]:
        """Name the sizes that `preset` builds.

        Returns:
            `tuple[str, ...]`: the names, in the order of the paper.
        """
        return tuple(cls.presets)

    def validate_bounds(self) -> None:
        """Check numbers, the size too, that special ids are in the vocabulary, and that named choices exist.

        Raises:
            ValueError: if a field is not.
        """
        infinity = float("inf")
        ranges: list[tuple[tuple[str, ...], float, float, str]] = [
            (self.sizes, 1, infinity, "must be at least 1"),
            (self.counts, 0, infinity, "must not be negative"),
            (self.counts, 0, MAX_LAYERS + 1, f"must be at most {MAX_LAYERS:,}"),
            (self.rates, 0, 1, "must be in [0, 1)"),
            (self.scales, sys.float_info.min, infinity, "must be positive and finite"),
        ]
        for names, low, high, rule in ranges:
            for name in names:
                value = getattr(self, name, None)
                if value is not None and not low <= value < high:
                    raise ValueError(f"`{self.attribute_map.get(name, name)}` {rule}, got {value}.")
        self._check_parameters()
        for name in self.special_ids:
            value = getattr(self, name)
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is not None and not 0 <= token_id < self.vocab_size:
                    raise ValueError(f"`{name}` must be in [0, `vocab_size` = {self.vocab_size}), got {token_id}.")
        for name, allowed in self.choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}; got {getattr(self, name)!r}.")
        if self.hidden_act not in ACT2FN:
            name = self.attribute_map.get("hidden_act", "hidden_act")
            raise ValueError(
                f"`{name}` must be a name of transformers' ACT2FN, such as relu or gelu; got {self.hidden_act!r}."
            )

    def _check_parameters(self) -> None:
        """Estimate the number of parameters from below, and raise if it is absurd."""
        attention = 2 * self.num_attention_heads * ((self.d_k or 0) + (self.d_v or 0)) * self.hidden_size
        layer = attention + 2 * self.hidden_size * self.intermediate_size
        rows = sum(getattr(self, name, None) or 0 for name in ("vocab_size", "source_vocab_size", "type_vocab_size"))
        rows += position_limit(self) or 0
        parameters = sum(getattr(self, name) for name in self.counts) * layer + rows * self.hidden_size
        self._check_number_of_parameters(parameters)

    def _check_number_of_parameters(self, parameters: int) -> None:
        """Raise if a lower bound of the number of parameters is absurd."""
        if parameters > MAX_PARAMETERS:
            memory = f"{4 * parameters / 2**40:,.0f} TiB in float32"
            raise ValueError(
                f"The sizes make at least {parameters:.1e} parameters, {memory}; at most {MAX_PARAMETERS:.0e} are "
                "allowed. Make `hidden_size`, `intermediate_size`, the layers, the vocabulary or the images smaller."
            )

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save the configuration, the code of the model family, and the model class of each Auto class.

        A model with the head of one of the family's pipelines is saved with that pipeline, too.

        Args:
            save_directory (`str`): Folder to write to.
            *args: Passed on.
            **kwargs: Passed on.
        """
        places = {name: _place_of(model_class) for name, model_class in self.auto_classes().items()}
        self.auto_map = {**(getattr(self, "auto_map", None) or {}), **places}
        self._update_custom_pipelines()
        super().save_pretrained(save_directory, *args, **kwargs)

    def _update_custom_pipelines(self) -> None:
        """Name in `custom_pipelines`, where transformers looks, the pipelines that fit the head."""
        own = {task: (auto_class, _place_of(pipeline)) for task, (auto_class, pipeline) in self.pipelines().items()}
        places = {place for _, place in own.values()}
        offered = getattr(self, "custom_pipelines", None) or {}
        # ours under any task: a pipeline that saves itself is listed under more than one
        offered = {task: entry for task, entry in offered.items() if entry.get("impl") not in places}
        for task, (auto_class, place) in own.items():
            if self.auto_classes()[auto_class].__name__ in (self.architectures or ()):
                offered[task] = {"impl": place, "pt": [auto_class]}
        if offered:
            self.custom_pipelines = offered
        elif hasattr(self, "custom_pipelines"):
            del self.custom_pipelines  # transformers expects a dictionary wherever the attribute exists


def final_norm(config: PreTrainedConfig) -> nn.Module:
    """Build the norm after the last layer, which pre-norm layers need.

    Args:
        config (`PreTrainedConfig`): The model's config.

    Returns:
        `nn.Module`: the norm, or for post-norm layers `nn.Identity`.

    Source: Tensor2Tensor's `transformer_base_v2`; the Annotated Transformer.
    """
    is_pre = config.norm_position == "pre"
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if is_pre else nn.Identity()


class Pooler(nn.Module):
    """Representation of a whole input: its first position, passed through a dense layer with an activation.

    Args:
        config (`PreTrainedConfig`): The model's config.

    Source: Devlin et al. 2018, section 3.1, the vector C, with the layer of the authors' code; Dosovitskiy et al.
    2020, section 3.1, the hidden layer of the head in pre-training.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.pooler_output_size or config.hidden_size)
        self.activation = ACT2FN[config.pooler_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Pool.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): The encoder's output.

        Returns:
            `torch.Tensor` of shape `(batch, d_model)`, or of width `pooler_output_size`: one vector for each input.
        """
        return self.activation(self.dense(hidden_states[:, 0]))


def _take_file_names(module: Any, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Rename what `load_state_dict` is given under the names in files: a pre-hook of it.

    transformers renames in `from_pretrained` and, backwards, in `save_pretrained`, by the rules in
    `conversion_<family>`. `load_state_dict`, which the Trainer calls when it resumes, does not.

    Args:
        module (`VanillaPreTrainedModel`): The model, whose `file_names` are the rules.
        state_dict (`dict[str, torch.Tensor]`): The parameters, renamed in place.
        prefix (`str`): What the names of this model begin with.
        *args: torch's `local_metadata`, `strict` and `missing_keys`, which gets what a file has in part, and more.
    """
    # Copies, as transformers notes in them what was used. The last are names that it renames in all checkpoints.
    names = [*deepcopy(module.file_names()), *get_checkpoint_conversion_mapping("legacy")]
    ignored = module._keys_to_ignore_on_load_unexpected or ()
    parts: dict[str, tuple[WeightConverter, dict[str, Tensor]]] = {}
    own = {prefix + name for name in module.state_dict()}
    for theirs in [name for name in state_dict if name.startswith(prefix) and name not in own]:
        ours, converter, pattern = theirs[len(prefix) :], None, ""
        for each in names:
            ours, source = each.rename_source_key(ours)
            if isinstance(each, WeightConverter) and source is not None:
                converter, pattern = each, source
        if any(re.search(each, ours) for each in ignored):
            del state_dict[theirs]
        elif converter is not None:
            parts.setdefault(ours, (converter, {}))[1][pattern] = state_dict.pop(theirs)
        elif ours != theirs[len(prefix) :]:
            state_dict[prefix + ours] = state_dict.pop(theirs)
    parameters = dict(module.named_parameters())
    for name, (converter, found) in parts.items():
        patterns = converter.source_patterns
        if name in parameters and len(found) < len(patterns):  # another shard may hold the other parts
            args[2].append(prefix + name)
            known = parameters[name].detach().chunk(len(patterns))
            found = {**dict(zip(patterns, known, strict=True)), **found}
        patterns = [pattern for pattern in patterns if pattern in found]
        for operation in converter.operations:
            found = operation.convert(found, patterns, converter.target_patterns)
        (state_dict[prefix + name],) = found.values()


class VanillaPreTrainedModel(PreTrainedModel):
    """What all models of the package share: what transformers may do with them, and how norms are initialised."""

    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    # those of an encoder; a decoder with cross-attention has its own
    _can_record_outputs = {"hidden_states": EncoderLayer, "attentions": OutputRecorder(SelfAttention, index=1)}
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if names := self.file_names():
            # Here and not once for all: code that came with another checkpoint may have registered its own names. By
            # class, not by model type: transformers' own classes, given such a config, have names of theirs.
            base_class = config.auto_classes()["AutoModel"]
            key = type(self) if isinstance(self, base_class) else base_class
            register_checkpoint_conversion_mapping(key.__name__, names, overwrite=True)
            self.register_load_state_dict_pre_hook(_take_file_names)

    def init_parallel_plans(self) -> None:
        """Keep of the config's plans what names a module here, and embeddings whole: losses read the projection's."""
        super().init_parallel_plans()
        names = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in self.named_modules()}
        names = {name for name in names if not name.endswith("embed_tokens")}
        for plan in ("_tp_plan", "_fsdp_plan"):
            rules = getattr(self, plan) or {}
            setattr(self, plan, {name: style for name, style in rules.items() if name in names})

    @classmethod
    def from_pretrained(cls, *args: Any, distributed_config: Any = None, **kwargs: Any) -> Any:
        """Load a model, and with a `distributed_config` shard it over the processes that `torchrun` started.

        Each process reads all weights and then keeps its part. transformers alone would cut them as they are in the
        file, where queries, keys and values are apart, or matrices transposed: other parts.

        Args:
            *args: As in `PreTrainedModel.from_pretrained`.
            distributed_config (`DistributedConfig`, *optional*): From `transformers.distributed`:
                `DistributedConfig(tp_plan="auto")` for tensor parallelism, `DistributedConfig(fsdp_size=2)` for FSDP2.
            **kwargs: As in `PreTrainedModel.from_pretrained`.

        Returns:
            `PreTrainedModel`: the model, in evaluation mode; or what transformers returns beside it.

        Raises:
            ValueError: if `tp_plan` or `tp_size` are given by themselves.
        """
        if kwargs.get("tp_plan") is not None or kwargs.get("tp_size") is not None:
            raise ValueError(
                "`tp_plan` and `tp_size` must be fields of `distributed_config`; pass "
                '`distributed_config=DistributedConfig(tp_plan="auto")`, from `transformers.distributed`.'
            )
        distributed, device_map, mesh = cls.prepare_distribute_model(
            distributed_config, device_map=kwargs.pop("device_map", None)
        )
        loaded = super().from_pretrained(*args, device_map=device_map, **kwargs)
        if mesh is not None:
            cls.maybe_distribute_model(loaded[0] if isinstance(loaded, tuple) else loaded, distributed, mesh)
        return loaded

    def file_names(self) -> list[WeightTransform]:
        """Return the rules from the names of parameters in files to those in the model; none by default.

        Returns:
            `list[WeightTransform]`: transformers' rules. Saving applies them backwards.
        """
        return []

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save the model under the names that its family has in files, which transformers' own classes read.

        Args:
            save_directory (`str`): Folder to write to.
            *args: Passed on.
            **kwargs: Passed on. `save_original_format=False` writes the names of this module's parameters, which
                quantised weights need: they can't be cut into queries, keys and values, or transposed.
        """
        if names := self.file_names():
            self._weight_conversions = names  # of a loaded model those that its file needed, perhaps none
        super().save_pretrained(save_directory, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Set norms to the identity, biases to zero, and embeddings of padding to zero unless they are loaded."""
        if isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            init.zeros_(module.bias)
        is_loaded = getattr(getattr(module, "weight", None), "_is_hf_initialized", False)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and not is_loaded:
            init.zeros_(module.weight[module.padding_idx])


def classifier_dropout(config: Any) -> Dropout:
    """Make the dropout of what a classifier of texts reads.

    Args:
        config (`PreTrainedConfig`): The model's config.

    Returns:
        `Dropout`: the module.
    """
    rate = config.classifier_dropout
    return Dropout(config.hidden_dropout_prob if rate is None else rate)


class StreamingGenerationMixin(GenerationMixin):
    """`generate()` of the package's models: options are checked, and a `custom_generate` gets the streamer, too."""

    def _extract_generation_mode_kwargs(
        self, custom_generate: Any, kwargs: dict[str, Any], synced_gpus: Any, assistant_model: Any, streamer: Any
    ) -> dict[str, Any]:
        """Pass all that a `custom_generate` takes, as transformers does not; refuse an assistant that it does not.

        Without that a streamer would never end, `stop_strings` would find no tokenizer, processes that share a model
        would wait for each other, and a cache from outside would stay empty.
        """
        extract = super()._extract_generation_mode_kwargs
        given = extract(None, {**kwargs}, synced_gpus, assistant_model, streamer)  # for all modes
        given["fills_cache"] = kwargs.get(CACHE_NAME) is not None
        extracted = extract(custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        taken = inspect.signature(custom_generate).parameters if callable(custom_generate) else {}
        if callable(custom_generate) and assistant_model is not None and "assistant_model" not in taken:
            raise ValueError("`assistant_model` is not used by this `custom_generate`; leave one of them out.")
        return {**extracted, **{name: each for name, each in given.items() if name in taken}}

    def generate_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse continuous batching, to which `generate()` switches with `cache_implementation="paged"`.

        Args:
            *args (`Any`): Not used.
            **kwargs (`Any`): Not used.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            'Continuous batching (`cache_implementation="paged"`) needs a paged cache, which the model does not have; '
            "call `generate()` without it."
        )

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Check the number of rows of each input, which transformers does later, and repeat the inputs."""
        if expand_size < 1:
            raise ValueError(f"`num_beams` or `num_return_sequences` must be at least 1, got {expand_size}.")
        return super()._expand_inputs_for_generation(expand_size, *args, **kwargs)

    def _prepare_generated_length(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> GenerationConfig:
        """Refuse options out of range, and a length that learned positions do not reach."""
        check_generation_options(generation_config, self.config.vocab_size)
        generation_config = super()._prepare_generated_length(generation_config, *args, **kwargs)
        check_generated_length(generation_config.max_length, position_limit(self.config))
        return generation_config


class SelfContainedPipeline(Pipeline):
    """A pipeline that gets all inputs of a call at once and makes its own batches.

    Subclasses do all work in `_forward`, and get there the options of the call and of the constructor.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def _sanitize_parameters(self, **options: Any) -> tuple[dict, dict, dict]:
        return {}, options, {}

    def preprocess(self, inputs: Any, **options: Any) -> Any:
        """Return the inputs as they are.

        Args:
            inputs (`Any`): All inputs of a call.
            **options (`Any`): None.

        Returns:
            `Any`: the inputs.
        """
        return inputs

    def postprocess(self, outputs: Any, **options: Any) -> Any:
        """Return the outputs as they are.

        Args:
            outputs (`Any`): What `_forward` returned.
            **options (`Any`): None.

        Returns:
            `Any`: the outputs.
        """
        return outputs
