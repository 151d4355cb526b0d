"""Export of an encoder-decoder to CTranslate2, whose programs and servers run without torch."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.files import is_full_disk
from ..models.layers import sinusoidal_positions
from ..models.text_batches import TARGET_TOKENIZER, check_target_tokenizer


logger = logging.get_logger(__name__)

# CTranslate2's names of the activations that both know.
ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_python": "GELU",
    "gelu_new": "GELUTanh",
    "gelu_fast": "GELUTanh",
    "gelu_pytorch_tanh": "GELUTanh",
    "quick_gelu": "GELUSigmoid",
    "silu": "SWISH",
    "swish": "SWISH",
}
QUANTIZATIONS = ("float32", "float16", "bfloat16", "int16", "int8", "int8_float32", "int8_float16", "int8_bfloat16")
# Sinusoids have no last position, but CTranslate2 reads them from a table; it cuts sources at 1,024 tokens by default.
DEFAULT_MAX_LENGTH = 1024
MOST_POSITIONS = 100_000  # two tables of 400 MB for a `d_model` of 1,024
WEIGHTS = "model.bin"  # without it, CTranslate2 loads no folder


def export_to_ctranslate2(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str | os.PathLike[str],
    *,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    quantization: str = "float32",
    max_length: int | None = None,
) -> Path:
    """Write an encoder-decoder and its tokenizers as a folder for `ctranslate2.Translator`.

    The search there has the length penalty `length^alpha`, which is `length_penalty_type="power"` here, and ends with
    the first `beam_size` hypotheses; `patience=4` looks further. A new folder appears when it is complete; into an
    empty one, the weights are moved last.

    Args:
        model (`PreTrainedModel`): The model, on a CPU.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the source.
        output_dir (`str`): The folder to write, or a link to it; it must be new or empty.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer of the target, if it is another one.
        quantization (`str`, defaults to `"float32"`): Type of the weights: `"float32"`, `"float16"`, `"bfloat16"`,
            `"int16"`, or `"int8"`, alone or as in `"int8_bfloat16"` with the type of all else. CTranslate2 converts
            types that a machine lacks when it loads them.
        max_length (`int`, *optional*): Most tokens of a source and of a translation; by default those of a table of
            learned positions, which are the most, or 1,024 of at most 100,000.

    Returns:
        `Path`: `output_dir`.

    Raises:
        ImportError: if ctranslate2 is not installed.
        ValueError: if the model is no encoder-decoder of this package, has what CTranslate2 lacks, such as heads that
            don't share `d_model`, or a weight that is nan or infinite; if a tokenizer doesn't fit it; if `output_dir`
            is not empty or can't be written, `quantization` is unknown, or `max_length` is below 1, or beyond 100,000
            or the model's.
    """
    target = Path(os.path.realpath(output_dir))
    leftovers = _leftovers(target)
    if target.exists() and (not target.is_dir() or set(target.iterdir()) - set(leftovers)):
        raise ValueError(f"`output_dir` must be a new or empty folder, but {output_dir} is not; give another.")
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"`quantization` must be one of {', '.join(QUANTIZATIONS)}; got {quantization!r}.")
    spec = to_ctranslate2(model, tokenizer, target_tokenizer, max_length=max_length)
    spec.optimize(quantization=quantization)
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    # An existing folder may be a file system of its own, onto which no other folder can be moved.
    temporary = target / f".{os.getpid()}.tmp" if target.exists() else Path(f"{target}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        spec.save(str(temporary))
        tokenizer.save_pretrained(temporary)
        if target_tokenizer is not None and target_tokenizer is not tokenizer:
            target_tokenizer.save_pretrained(temporary / TARGET_TOKENIZER)
        if temporary.parent == target:
            for path in sorted(temporary.iterdir(), key=lambda path: path.name == WEIGHTS):
                path.rename(target / path.name)
        else:
            temporary.rename(target)
    except Exception as error:
        if not isinstance(error, OSError) and not is_full_disk(error):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"`output_dir` ({output_dir}) can't be written: {reason}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Path(output_dir)


def _leftovers(target: Path) -> list[Path]:
    """Find the temporary folders of exports to `target` that were killed."""
    found = []
    for path in [*target.parent.glob("*.tmp"), *target.glob(".*.tmp")]:
        start = "" if path.parent == target else target.name
        number = re.fullmatch(re.escape(start) + r"\.(\d{1,7})\.tmp", path.name)
        if number and not _is_other_process(int(number[1])):
            found.append(path)
    return found


def _is_other_process(number: int) -> bool:
    """Whether a process with this number is running beside this one; assumed on Windows."""
    if number == os.getpid():
        return False
    if os.name == "nt":
        return True  # signal 0 would end the process there
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return True


def to_ctranslate2(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_length: int | None = None,
) -> Any:
    """Describe an encoder-decoder to CTranslate2.

    Args:
        model (`PreTrainedModel`): The model, on a CPU.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the source.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer of the target, if it is another one.
        max_length (`int`, *optional*): As in [`export_to_ctranslate2`].

    Returns:
        `Any`: a `ctranslate2.specs.TransformerSpec` with all weights; those in float32 are not copied.

    Raises:
        ImportError: if ctranslate2 is not installed.
        ValueError: as in [`export_to_ctranslate2`].
    """
    try:
        from ctranslate2 import specs
    except ImportError as error:
        raise ImportError('The export needs one more package: pip install "hf_vanilla[export]"') from error
    config, target_tokenizer = model.config, target_tokenizer or tokenizer
    _check_config(config)
    _warn_of_generation(model.generation_config, target_tokenizer)
    check_target_tokenizer(config, tokenizer, target_tokenizer)
    spec = specs.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.num_heads,
        pre_norm=config.norm_position == "pre",
        activation=getattr(specs.common_spec.Activation, ACTIVATIONS[config.activation_function]),
    )
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    (embeddings,) = spec.encoder.embeddings
    for stack, stack_spec, embeddings_spec in (
        (model.model.encoder, spec.encoder, embeddings),
        (model.model.decoder, spec.decoder, spec.decoder.embeddings),
    ):
        embeddings_spec.weight = _array(stack.embed_tokens.weight)
        stack_spec.position_encodings.encodings = _array(_positions(stack, max_length))
        if not isinstance(stack.norm, nn.Identity):
            _copy_parameters(stack.norm, stack_spec.layer_norm)
        for layer, layer_spec in zip(stack.layers, stack_spec.layer, strict=True):
            _copy_layer(layer, layer_spec)
    _copy_parameters(model.lm_head, spec.decoder.projection)
    spec.register_source_vocabulary(_vocabulary(tokenizer, model.model.encoder.embed_tokens))
    tokens = _vocabulary(target_tokenizer, model.model.decoder.embed_tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.unk_token = tokenizer.unk_token
    spec.config.eos_token = target_tokenizer.eos_token
    spec.config.bos_token = spec.config.decoder_start_token = tokens[config.decoder_start_token_id]
    spec.validate()
    return spec


def _check_config(config: Any) -> None:
    """Check that CTranslate2 can compute a model."""
    if config.model_type != "vanilla_transformer":
        raise ValueError(f"The model must be a `vanilla_transformer`, an encoder-decoder; got {config.model_type!r}.")
    if config.activation_function not in ACTIVATIONS:
        raise ValueError(
            f"`activation_function` must be one that CTranslate2 has, {', '.join(ACTIVATIONS)}; got "
            f"{config.activation_function!r}. Use the model as it is."
        )
    width = config.d_model // config.num_heads
    if (config.d_k, config.d_v, config.d_k * config.num_heads) != (width, width, config.d_model):
        raise ValueError(
            "`d_k` and `d_v` must be d_model / num_heads, as in CTranslate2, got "
            f"{config.d_k} and {config.d_v} for {config.d_model} / {config.num_heads}. Use the model as it is."
        )
    if config.attention_scale not in (None, config.d_k**-0.5):
        raise ValueError(
            f"`attention_scale` must be d_k ** -0.5, as in CTranslate2, got {config.attention_scale}. Use the model "
            "as it is."
        )


def _warn_of_generation(options: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn of what ends or limits translations here, and is an option of CTranslate2's search."""
    ends = options.eos_token_id if isinstance(options.eos_token_id, list) else [options.eos_token_id]
    if any(each not in (None, tokenizer.eos_token_id) for each in ends):
        tokens = tokenizer.convert_ids_to_tokens(ends)
        logger.warning(f"The export ends texts with one token: give `translate_batch` all as `end_token`, {tokens}.")
    suppressed = [each for each in options.suppress_tokens or [] if each != options.pad_token_id]
    if suppressed:
        tokens = [[token] for token in tokenizer.convert_ids_to_tokens(suppressed)]
        logger.warning(
            f"The export suppresses no tokens: give `translate_batch` yours as `suppress_sequences`, {tokens}."
        )


def _array(tensor: torch.Tensor) -> Any:
    """Return a weight for CTranslate2."""
    if not tensor.isfinite().all():
        raise ValueError("The model's weights must be finite numbers, but one is nan or infinite; train it again.")
    return tensor.detach().float().numpy()


def _positions(stack: Any, max_length: int | None) -> torch.Tensor:
    """Return position encodings of shape `(max_length, d_model)`."""
    config = stack.config
    limit = config.max_position_embeddings if config.position_type == "learned" else None
    length = limit or DEFAULT_MAX_LENGTH if max_length is None else max_length
    if not 1 <= length <= (limit or MOST_POSITIONS):
        most = f"{MOST_POSITIONS:,}" if limit is None else f"the model's learned positions ({limit})"
        raise ValueError(f"`max_length` must be between 1 and {most}, got {length}.")
    if limit is not None:
        return stack.embed_positions.weight[:length]
    return sinusoidal_positions(torch.arange(length), config.d_model, config.position_type)


def _copy_layer(layer: Any, spec: Any) -> None:
    """Copy the parameters of an encoder or decoder layer."""
    for part, name in (("self_attn", "self_attention"), ("cross_attn", "attention")):
        if not hasattr(layer, part):
            continue
        attention, attention_spec = getattr(layer, part), getattr(spec, name)
        projections = [attention.qkv_proj] if part == "self_attn" else [attention.q_proj, attention.kv_proj]
        for linear, linear_spec in zip([*projections, attention.out_proj], attention_spec.linear, strict=True):
            _copy_parameters(linear, linear_spec)
        _copy_parameters(getattr(layer, f"{part}_residual").layer_norm, attention_spec.layer_norm)
    _copy_parameters(layer.feed_forward.fc1, spec.ffn.linear_0)
    _copy_parameters(layer.feed_forward.fc2, spec.ffn.linear_1)
    _copy_parameters(layer.feed_forward_residual.layer_norm, spec.ffn.layer_norm)


def _copy_parameters(module: Any, spec: Any) -> None:
    """Copy weight and bias of a linear map or a norm."""
    names = ("gamma", "beta") if isinstance(module, nn.LayerNorm) else ("weight", "bias")
    for name, parameter in zip(names, (module.weight, module.bias), strict=True):
        if parameter is not None:
            setattr(spec, name, _array(parameter))


def _vocabulary(tokenizer: PreTrainedTokenizerBase, embeddings: nn.Embedding) -> list[str]:
    """Return the token of each row of an embedding; rows beyond the tokenizer's get names of their own."""
    rows = embeddings.num_embeddings
    if len(tokenizer) > rows:
        raise ValueError(
            f"The tokenizer must fit the model's vocabulary of {rows}, but has {len(tokenizer)} tokens; resize the "
            "embeddings, and train the model further."
        )
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return tokens + [f"<unused{number}>" for number in range(len(tokens), rows)]
