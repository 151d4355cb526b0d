"""Checks of what a model is given: ids, masks, labels and texts. Bad input is refused by name, before any work."""

import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel


# The label of a position without a loss, everywhere in transformers.
IGNORED_LABEL = -100
# Hint appended to out-of-vocabulary errors.
VOCABULARY_HINT = "These are the ids of the vocabulary: do tokenizer and model belong together?"
# Options of `generate()` that are ids of the target vocabulary, or lists of them.
ID_OPTIONS = (
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
)


def has_label(labels: Tensor) -> Tensor:
    """Find the positions with a label.

    Args:
        labels (`torch.Tensor`): Integers of any kind; -100 where there is none.

    Returns:
        `torch.BoolTensor` of their shape.
    """
    return labels.long() != IGNORED_LABEL  # among small integers, -100 may be another number


def in_function_transform() -> bool:
    """Ask whether a transform of `torch.func` runs, such as `grad` or `vmap`, which hides the values of tensors.

    Returns:
        `bool`: the answer.
    """
    return torch._C._are_functorch_transforms_active()  # as torch's own `autograd.Function` asks


def hides_values(tensor: Tensor) -> bool:
    """Ask whether code may not depend on a tensor's values: it is compiled or transformed, or the tensor has none.

    Args:
        tensor (`torch.Tensor`): The tensor, which may be one of torch's `FakeTensorMode`.

    Returns:
        `bool`: the answer.
    """
    return torch.compiler.is_compiling() or in_function_transform() or isinstance(tensor, FakeTensor)


def reads_values(tensor: Tensor) -> bool:
    """Ask whether the values of a tensor may be read: by plain code, and on a CPU, where nothing has to be waited for.

    Args:
        tensor (`torch.Tensor`): The tensor.

    Returns:
        `bool`: the answer.
    """
    return tensor.device.type == "cpu" and not hides_values(tensor)


def can_read(tensor: Tensor) -> bool:
    """Ask whether code may depend on a tensor's values, on a GPU by waiting for it: not while a graph is captured.

    Args:
        tensor (`torch.Tensor`): The tensor.

    Returns:
        `bool`: the answer.
    """
    if hides_values(tensor) or tensor.device.type == "meta":
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check_evaluation_mode(model: PreTrainedModel) -> None:
    """Check that dropout is off.

    Args:
        model (`PreTrainedModel`): The model.

    Raises:
        ValueError: if it is in training mode.
    """
    if model.training:
        raise ValueError("`model` must be in evaluation mode, as dropout changes its outputs; call `model.eval()`.")


def check_arguments(num_items_in_batch: Any = None, **tensors: Any) -> None:
    """Check the types of a model's arguments; the value of a number on a CPU, outside of compiled code.

    Args:
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): Number of labels of an optimizer step.
        **tensors (`torch.Tensor`, *optional*): Tensors by the names of their arguments.

    Raises:
        TypeError: if an argument is no tensor, or no number.
        ValueError: if `num_items_in_batch` is negative, infinite or nan.
    """
    for name, given in tensors.items():
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(f"`{name}` must be a tensor, got {type(given).__name__}.")
    items = num_items_in_batch
    is_tensor = isinstance(items, Tensor)
    if items is None or (is_tensor and not reads_values(items)):
        return
    if not (items.numel() == 1 and not items.is_complex() if is_tensor else isinstance(items, int | float)):
        raise TypeError(f"`num_items_in_batch` must be a number or a tensor with one, got {type(items).__name__}.")
    if not 0 <= float(items) < math.inf:
        raise ValueError(f"`num_items_in_batch` must be a number of labels, 0 or more, got {float(items)}.")


def _check_values(name: str, ids: Tensor, size: int, hint: str, ignored: int | None = None) -> None:
    """Check that every id is in [0, size) or ignored, where reading values needs no synchronization."""
    if not reads_values(ids) or ids.numel() == 0:
        return
    lowest, highest = torch.aminmax(ids)
    if lowest >= 0 and highest < size:
        return
    wrong = (ids < 0) | (ids >= size)
    wrong = wrong if ignored is None else wrong & (ids != ignored)
    if wrong.any():
        place = wrong.nonzero()[0]
        where = ", ".join(f"{axis} {index}" for axis, index in zip(("row", "position"), place.tolist(), strict=False))
        rule = f"[0, {size})" if ignored is None else f"[0, {size}), or {ignored} where there is none"
        raise ValueError(f"`{name}` must be in {rule}; got {ids[tuple(place)].item()} at {where}. {hint}")


def check_input_ids(name: str, input_ids: Tensor, size: int, hint: str = VOCABULARY_HINT) -> None:
    """Check that every id is in its table; the values on a CPU, outside of compiled code.

    Args:
        name (`str`): Name of the argument.
        input_ids (`torch.Tensor` of shape `(batch, length)`): The ids.
        size (`int`): Number of rows of the table, such as the size of the vocabulary.
        hint (`str`, *optional*): Hint appended to the error.

    Raises:
        ValueError: if an id is negative or not below `size`, or `input_ids` does not have two dimensions.
        TypeError: if `input_ids` is no tensor of integers.
    """
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"`{name}` must be a tensor of shape (batch, length), got {type(input_ids).__name__}.")
    if input_ids.dim() != 2:
        raise ValueError(f"`{name}` must have shape (batch, length), got {tuple(input_ids.shape)}.")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"`{name}` must be integers (torch.long), got {input_ids.dtype}.")
    _check_values(name, input_ids, size, hint)


def check_shape(name: str, tensor: Tensor, batch: int, length: int) -> None:
    """Check that a tensor has one entry for each position of a batch.

    Args:
        name (`str`): Name of the argument.
        tensor (`torch.Tensor` of shape `(batch, length)`): The tensor.
        batch (`int`): Rows of the batch.
        length (`int`): Its length.

    Raises:
        ValueError: if it has another shape.
        TypeError: if it is no tensor.
    """
    check_arguments(**{name: tensor})
    if tuple(tensor.shape) != (batch, length):
        raise ValueError(f"`{name}` must have shape (batch, length) = ({batch}, {length}), got {tuple(tensor.shape)}.")


def check_attention_mask(name: str, attention_mask: Any, batch: int, length: int) -> None:
    """Check that a padding mask has the shape of its batch.

    Args:
        name (`str`): Name of the argument.
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding. Masks
            of four dimensions, of booleans or of numbers that are added to the scores, and those of flex attention are
            transformers' own and pass.
        batch (`int`): Rows of the batch.
        length (`int`): Its length.

    Raises:
        ValueError: if it has another shape.
        TypeError: if it is no tensor, or a mask of four dimensions is of integers.
    """
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            rule = f"`{name}` of four dimensions must be of booleans, or of numbers that are added to the scores"
            raise TypeError(f"{rule}; got {attention_mask.dtype}. Pass `{name}.bool()`.")
        if attention_mask.shape[0] not in (1, batch):
            expected = f"(batch or 1, heads or 1, query_len, key_len), with a batch of {batch}"
            raise ValueError(f"`{name}` must have shape {expected}; got {tuple(attention_mask.shape)}.")
    elif attention_mask is not None and not isinstance(attention_mask, BlockMask):
        check_shape(name, attention_mask, batch, length)


def check_labels(
    name: str,
    labels: Tensor,
    shape: tuple[int, ...] | None,
    size: int,
    hint: str = "`num_labels` of the config sets the number of classes.",
) -> None:
    """Check the shape of labels, and on a CPU, outside of compiled code, their values.

    Args:
        name (`str`): Name of the argument.
        labels (`torch.Tensor`): Class numbers; -100 is ignored.
        shape (`tuple[int, ...]`, *optional*): The shape that they must have; any `(batch, length)` by default.
        size (`int`): Number of classes.
        hint (`str`, *optional*): Hint appended to the error.

    Raises:
        ValueError: if the shape is another one, or a label is neither -100 nor in [0, size).
        TypeError: if the labels are no integers.
    """
    if tuple(labels.shape) != shape and (shape is not None or labels.dim() != 2):
        raise ValueError(f"`{name}` must have shape {shape or '(batch, length)'}, got {tuple(labels.shape)}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"`{name}` must be integers (torch.long), got {labels.dtype}.")
    _check_values(name, labels.long(), size, hint, IGNORED_LABEL)  # of small integers, -100 would be another number


def checked_embeddings(
    embedding: nn.Embedding, input_ids: Tensor | None, inputs_embeds: Tensor | None, prefix: str = ""
) -> Tensor:
    """Look up the embeddings of checked ids, or check those that are given.

    Args:
        embedding (`nn.Embedding`): The embedding.
        input_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Ids.
        inputs_embeds (`torch.Tensor` of shape `(batch, length, d_model)`, *optional*): Embeddings in place of ids.
        prefix (`str`, *optional*): What comes before both names in errors, such as `decoder_`.

    Returns:
        `torch.Tensor` of shape `(batch, length, d_model)`: the embeddings.

    Raises:
        ValueError: if not exactly one of both is given, an id is outside the vocabulary, or a shape doesn't fit.
        TypeError: if `input_ids` is no tensor of integers, or `inputs_embeds` none of floating-point numbers.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(f"Pass either `{prefix}input_ids` or `{prefix}inputs_embeds`: exactly one of them.")
    if input_ids is not None:
        check_input_ids(f"{prefix}input_ids", input_ids, embedding_sizes(embedding)[0])
        return embedding(input_ids)
    check_states(f"{prefix}inputs_embeds", inputs_embeds, embedding_sizes(embedding)[1])
    return cast(Tensor, inputs_embeds)


def embedding_sizes(embedding: Any) -> tuple[int, int]:
    """Return the sizes of a table of embeddings, or of one inside of an adapter.

    Args:
        embedding (`nn.Module`): The embeddings.

    Returns:
        `tuple[int, int]`: their number, and their width.
    """
    if hasattr(embedding, "num_embeddings"):
        return embedding.num_embeddings, embedding.embedding_dim
    return embedding.weight.shape[0], embedding.weight.shape[1]


def check_states(name: str, states: Any, width: int) -> None:
    """Check type and width of embeddings or hidden states.

    Args:
        name (`str`): Name of the argument.
        states (`torch.Tensor` of shape `(batch, length, d_model)`): The embeddings or hidden states.
        width (`int`): The model's width, d_model.

    Raises:
        ValueError: if they have another shape.
        TypeError: if they are no tensor of floating-point numbers.
    """
    check_arguments(**{name: states})
    if states.dim() != 3 or states.shape[2] != width:
        raise ValueError(f"`{name}` must have shape (batch, length, d_model = {width}), got {tuple(states.shape)}.")
    if not states.is_floating_point():
        raise TypeError(f"`{name}` must be floating-point numbers, got {states.dtype}.")


def flatten_texts(inputs: dict[str, Any], axes: int) -> tuple[list[Any], tuple[int, ...]]:
    """Make each text a row of its own, where a row of the batch may have several, such as choices.

    Args:
        inputs (`dict[str, torch.Tensor | None]`): `input_ids` of shape `(batch, length)`, or with two axes `(batch,
            choices, length)`, or `inputs_embeds` with d_model after it, and others that begin in the same way; or
            `None`.
        axes (`int`): Number of axes before the tokens.

    Returns:
        `tuple[list[torch.Tensor | None], tuple[int, ...]]`: the inputs of shape `(texts, length, ...)`, and the sizes
        of these axes.

    Raises:
        ValueError: if the texts have another number of axes or no tokens, or an input another number of texts.
        TypeError: if an input is no tensor.
    """
    check_arguments(**inputs)
    name = "input_ids" if inputs["inputs_embeds"] is None else "inputs_embeds"
    given = inputs[name]
    if given is None or given.dim() != axes + (1 if name == "input_ids" else 2) or given.shape[axes] == 0:
        raise ValueError(
            f"`input_ids` must have shape (batch, {'choices, ' * (axes - 1)}length), length at least 1, or "
            f"`inputs_embeds` one dimension more; got {None if given is None else tuple(given.shape)}."
        )
    shape = tuple(given.shape[:axes])
    for name, tensor in inputs.items():
        if tensor is not None and tuple(tensor.shape[:axes]) != shape and axes > 1:
            raise ValueError(f"`{name}` must begin with batch and choices, {shape}, got {tuple(tensor.shape)}.")
    return [None if tensor is None else tensor.flatten(0, axes - 1) for tensor in inputs.values()], shape


def as_texts(name: str, given: Any, *, allows_one: bool = True) -> list[str]:
    """Return one text or several as a list.

    Args:
        name (`str`): Name of the argument, for messages.
        given (`str` or `Iterable[str]`): Its value.
        allows_one (`bool`, defaults to `True`): Whether it may be a single text.

    Returns:
        `list[str]`: the texts.

    Raises:
        TypeError: if it is anything else.
    """
    if isinstance(given, str) and not allows_one:
        raise TypeError(f"`{name}` must be a list of strings, got a single string; pass a list with it inside.")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise TypeError(f"`{name}` must be a string or a list of strings, got {type(given).__name__}.")
    texts = list(given)
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise TypeError(f"`{name}` must contain only strings, but number {number} is {type(text).__name__}.")
    return texts


def check_not_nan(log_probs: Tensor) -> None:
    """Check that a model's log probabilities are numbers: with nan, a search would find empty texts.

    Args:
        log_probs (`torch.Tensor`): The log probabilities, or sums of them.

    Raises:
        ValueError: if one is nan.
    """
    if log_probs.isnan().any():
        raise ValueError(
            "The model's log probabilities are nan. Either its weights are nan (train it again), or values overflow "
            'in its dtype (load it with `dtype="float32"`).'
        )


def position_limit(config: PreTrainedConfig) -> int | None:
    """Return the number of positions in a model's table.

    Args:
        config (`PreTrainedConfig`): Config of a model of this package, or of one of transformers.

    Returns:
        `int`: the number; `None` for sinusoids, and for models of no texts.
    """
    is_learned = getattr(config, "position_type", "learned") == "learned"
    return getattr(config, "max_position_embeddings", None) if is_learned else None


def check_length(length: int, limit: int | None) -> None:
    """Check that a table of learned positions reaches.

    Args:
        length (`int`): Length of a sequence.
        limit (`int`, *optional*): Rows of the table, if there is one.

    Raises:
        ValueError: if it does not.
    """
    if limit is not None and length > limit:
        raise ValueError(
            f"A sequence of {length} tokens exceeds `max_position_embeddings` ({limit}); truncate the input "
            "(`tokenizer(..., truncation=True, max_length=...)`) or build a model with more."
        )


def check_position_ids(position_ids: Tensor | None, batch: int, length: int, limit: int, past_length: Any = 0) -> None:
    """Check that a table of learned positions has each position.

    Args:
        position_ids (`torch.LongTensor` of shape `(batch or 1, length)`, *optional*): Positions; counted on from
            `past_length` by default.
        batch (`int`): Rows of the batch.
        length (`int`): Its length.
        limit (`int`): Rows of the table.
        past_length (`int` or `torch.Tensor`, *optional*): Number of positions before these.

    Raises:
        ValueError: if it lacks one, or `position_ids` has another shape.
        TypeError: if `position_ids` is no tensor of integers.
    """
    if position_ids is None:
        return check_length(past_length + length, limit)
    check_input_ids("position_ids", position_ids, limit, "`max_position_embeddings` of the config is the limit.")
    return check_shape("position_ids", position_ids, 1 if len(position_ids) == 1 else batch, length)


def check_offsets(
    offsets: Any, batch: int, length: int, attention_mask: Any = None, past_key_values: Any = None
) -> None:
    """Check the offsets of a row that holds several sequences; their values on a CPU, outside of compiled code.

    Args:
        offsets (`torch.Tensor` of shape `(sequences + 1,)`, *optional*): First position of each sequence, and the
            length of the row: transformers' `cu_seq_lens_q`.
        batch (`int`): Rows of the batch.
        length (`int`): Its length.
        attention_mask (`torch.Tensor`, *optional*): The model's mask; of two dimensions, it does not go with offsets.
        past_key_values (`Cache`, *optional*): The model's cache, which does not go with offsets.

    Raises:
        ValueError: if there is not one row, the offsets do not go from 0 to its length, or other arguments don't fit.
        TypeError: if the offsets are no tensor of integers.
    """
    if offsets is None:
        return
    check_arguments(cu_seq_lens_q=offsets)
    if batch != 1 or offsets.dim() != 1 or len(offsets) < 2:
        raise ValueError(
            "`cu_seq_lens_q` must have shape (sequences + 1,), and the batch one row that holds all of them; got "
            f"shape {tuple(offsets.shape)} and {batch} rows."
        )
    if offsets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"`cu_seq_lens_q` must be integers (torch.int32), got {offsets.dtype}.")
    if past_key_values is not None or (isinstance(attention_mask, Tensor) and attention_mask.dim() == 2):
        name = "attention_mask" if past_key_values is None else "past_key_values"
        raise ValueError(f"`{name}` must not be given with `cu_seq_lens_q`, a row of several sequences; leave it out.")
    if reads_values(offsets) and (offsets[0] != 0 or offsets[-1] != length or (offsets.diff() < 0).any()):
        rule = f"`cu_seq_lens_q` must begin with 0, not fall, and end with the length of the row, {length}"
        raise ValueError(f"{rule}; got {offsets.tolist()}.")


def check_encoder_arguments(keep_padding: Any, shift_labels: Any, *caches: Any) -> None:
    """Check arguments that all encoders share.

    Args:
        keep_padding (`bool`): Whether the output at padding is computed, too.
        shift_labels (`torch.Tensor`, *optional*): What accelerate gives where it has cut sequences across devices.
        *caches (`Cache`, *optional*): Caches of keys and values, which an encoder does not take.

    Raises:
        ValueError: if `shift_labels` or a cache is given.
        TypeError: if `keep_padding` is no bool.
    """
    if not isinstance(keep_padding, bool):
        raise TypeError(f"`keep_padding` must be a bool, got {type(keep_padding).__name__}.")
    if any(cache is not None for cache in caches):
        raise ValueError("`past_key_values` must not be given to an encoder, which reads all positions at once.")
    if shift_labels is not None:
        raise ValueError(
            "`shift_labels` must not be given: context parallelism, which cuts sequences across devices, knows causal "
            "attention only. Use DDP, FSDP2 or tensor parallelism (`DistributedConfig`)."
        )


def check_heads(config: PreTrainedConfig) -> None:
    """Check that the width divides into heads: when a model is built, not in its config, as in transformers.

    Args:
        config (`PreTrainedConfig`): The model's config.

    Raises:
        ValueError: if `num_attention_heads` does not divide `hidden_size`.
    """
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"`hidden_size` ({config.hidden_size}) must be divisible by `num_attention_heads` "
            f"({config.num_attention_heads})."
        )


def check_generated_length(max_length: int, limit: int | None) -> None:
    """Check that learned positions reach while a model generates. The last token is never read, so it needs none.

    Args:
        max_length (`int`): Most tokens, those of the prompt too.
        limit (`int`, *optional*): Rows of the table, if there is one.

    Raises:
        ValueError: if they do not.
    """
    if limit is not None and max_length > limit + 1:
        raise ValueError(
            f"`max_length` ({max_length}, the prompt and `max_new_tokens`) must not exceed "
            f"{limit + 1}: the model reads all but the last token, and `max_position_embeddings` is {limit}."
        )


def check_generation_options(options: GenerationConfig, vocab_size: int) -> None:
    """Check numbers of sequences, ids and temperature, which transformers leaves unchecked.

    Args:
        options (`GenerationConfig`): The options.
        vocab_size (`int`): Size of the vocabulary that is generated from.

    Raises:
        ValueError: if a number is below 1, an id outside the vocabulary, or the temperature infinite.
        TypeError: if a number or an id is no integer.
    """
    for name in ("num_beams", "num_return_sequences"):
        if (number := getattr(options, name)) is not None:
            check_integer(name, number)
    for name in ID_OPTIONS:
        given: Any = getattr(options, name, None)
        given = given.tolist() if hasattr(given, "tolist") else given
        if given is None:
            continue
        for each in given if isinstance(given, list | tuple) else [given]:
            if not _is_integer(each):
                raise TypeError(f"`{name}` must be token ids, which are integers, got {each!r}.")
            if not 0 <= each < vocab_size:
                rule = f"`{name}` must be in [0, {vocab_size}), the ids of the target vocabulary"
                raise ValueError(f"{rule}; got {each}.")
    if options.temperature is not None and not math.isfinite(options.temperature):
        raise ValueError(f"`temperature` must be finite, got {options.temperature}.")


def check_integer(name: str, value: Any, lowest: float = 1) -> None:
    """Check a number that counts something.

    Args:
        name (`str`): Name of the argument.
        value (`int`): Its value.
        lowest (`float`, defaults to 1): The lowest that is allowed.

    Raises:
        ValueError: if it is below `lowest`.
        TypeError: if it is no integer.
    """
    if not _is_integer(value):
        raise TypeError(f"`{name}` must be an integer, got {value!r}.")
    if value < lowest:
        raise ValueError(f"`{name}` must be at least {lowest}, got {value}.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
