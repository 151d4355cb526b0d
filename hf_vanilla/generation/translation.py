"""Translate lists of texts: tokenize, sort by length, search, restore the order."""

from collections.abc import Sequence
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from ..models.checks import as_texts
from ..models.text_batches import check_target_tokenizer, load_tokenizers, map_batches
from ..models.translating import SearchOptions, Translation, decode_n_best, source_batch, translate_texts
from ..precision import FASTEST, INT8, is_int8, resolve_dtype
from .beam_search import beam_search
from .cpu_layers import fast_model, is_faster_with_int8


def load_translator(
    model_name_or_path: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    allow_int8: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """Load a model and its tokenizers.

    Args:
        model_name_or_path (`str`): A folder or a name on the Hub.
        dtype (`str` or `torch.dtype`, defaults to `"auto"`): Type of the weights, such as `"float32"` or `"bfloat16"`;
            `"auto"` is the type they were saved in, `"fastest"` the faster of those two on the device. `"int8"` is
            `"auto"` with linear maps of 8-bit integers ([`fast_model`]), only on a CPU.
        device (`str` or `torch.device`, defaults to `"cpu"`): Device of the model.
        allow_int8 (`bool`, defaults to `False`): Whether `"fastest"` may choose linear maps of 8-bit integers too,
            which change some translations.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerBase]`: the model in evaluation mode, the
        tokenizers of source and target. They are one object unless the model's subfolder `target_tokenizer` has
        another one.

    Raises:
        OSError: if there is no such model.
        ValueError: if the model has two vocabularies but only one tokenizer, `dtype` is `"int8"` and the model or the
            machine does not support it, or `allow_int8` is given with another `dtype` than `"fastest"`.
    """
    if allow_int8 and dtype != FASTEST:
        raise ValueError(
            f"`allow_int8` is for the `dtype` 'fastest', got the `dtype` {dtype!r}; leave one of them out."
        )
    float_type = "auto" if is_int8(dtype) else resolve_dtype(dtype, device)
    model = AutoModelForSeq2SeqLM.from_pretrained(model_name_or_path, dtype=float_type).to(device).eval()
    if is_int8(dtype) or (allow_int8 and is_faster_with_int8(model)):
        model = fast_model(model, SearchOptions.max_tokens_per_batch, INT8)
    tokenizer, target_tokenizer = load_tokenizers(model_name_or_path)
    check_target_tokenizer(model.config, tokenizer, target_tokenizer)
    return model, tokenizer, target_tokenizer


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    with_alignments: bool = False,
    show_progress: bool = False,
    **options: Any,
) -> list[list[Translation]]:
    """Translate texts with the paper's beam search (Vaswani et al. 2017, 6.1).

    ```python
    model, tokenizer, target_tokenizer = load_translator("runs/en-de")
    [[best]] = translate(model, tokenizer, ["a man runs ."], target_tokenizer=target_tokenizer)
    best.text  # "ein mann rennt ."
    ```

    Args:
        model (`PreTrainedModel`): An encoder-decoder model, in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer, of the source and, unless another is given, the target.
        texts (`Sequence[str]`): Any texts. Special tokens in them are read as plain text; lone surrogates become
            U+FFFD. A text without words has one empty translation with the score 0.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer, if it is another one.
        with_alignments (`bool`, defaults to `False`): Whether to align words.
        show_progress (`bool`, defaults to `False`): Whether to draw a progress bar on standard error.
        **options (`Any`): Fields of [`SearchOptions`], such as `num_beams`, `length_penalty` and `n_best`, and further
            options of `generate()`, such as `early_stopping`.

    Returns:
        `list[list[Translation]]`: for each text its translations, best first: `n_best` of them, or fewer where fewer
        exist.

    Raises:
        TypeError: if `texts` is a single string, or contains anything but strings.
        ValueError: if the model is in training mode, or an option is unknown, fixed or out of its range.
    """
    texts = as_texts("texts", texts, allows_one=False)
    target_tokenizer = tokenizer if target_tokenizer is None else target_tokenizer
    search_options = SearchOptions.from_kwargs(**options).with_tokenizer(target_tokenizer)

    def search(ids: list[list[int]]) -> list[list[Translation]]:
        fast = fast_model(model, sum(len(sequence) for sequence in ids))
        with tqdm(total=len(ids), unit="text", disable=not show_progress) as progress:

            def translate_batch(batch: list[list[int]]) -> list[list[Translation]]:
                found = _search_batch(fast, batch, search_options)
                progress.update(len(batch))
                return decode_n_best(target_tokenizer, *found, search_options.n_best)

            return map_batches(translate_batch, ids, search_options.max_tokens_per_batch)

    return translate_texts(
        model,
        (tokenizer, target_tokenizer),
        texts,
        search,
        max_source_length=search_options.max_source_length,
        with_alignments=with_alignments,
    )


def _search_batch(
    model: PreTrainedModel, ids: list[list[int]], options: SearchOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Search with `beam_search`: sequences (batch * n_best, tgt_len) and their scores (batch * n_best,)."""
    outputs = model.generate(
        **source_batch(model, ids, options.max_length_offset),
        custom_generate=beam_search,
        num_beams=options.num_beams,
        length_penalty=options.length_penalty,
        length_penalty_type=options.length_penalty_type,
        max_length_offset=options.max_length_offset,
        num_return_sequences=options.n_best,
        do_sample=False,
        return_dict_in_generate=True,
        **options.generate_kwargs,
    )
    return outputs.sequences, outputs.sequences_scores


__all__ = ["load_translator", "translate"]
