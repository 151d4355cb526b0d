"""Translate lists of texts: tokenize, sort by length, search, put back into order."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from ..models.text_batches import (
    TARGET_TOKENIZER,
    as_texts,
    default_max_length,
    load_tokenizers,
    map_batches,
    token_ids,
)
from ..models.translating import Translation, align_translations, check_search, decode_n_best, source_batch
from .beam_search import beam_search
from .cpu_layers import fast_model


def load_translator(
    model_name_or_path: str, *, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """Load a model and its tokenizers.

    Args:
        model_name_or_path (`str`): A folder or a name on the Hub.
        dtype (`str` or `torch.dtype`, defaults to `"auto"`): Type of the weights, such as `"float32"` or `"bfloat16"`;
            `"auto"` is the type they were saved in.
        device (`str` or `torch.device`, defaults to `"cpu"`): Where the model shall run.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerBase]`: the model in evaluation mode, the
        tokenizer of the source and that of the target. They are one and the same unless there is another one in the
        model's subfolder `target_tokenizer`.

    Raises:
        OSError: if there is no such model.
        ValueError: if the model has two vocabularies, but no tokenizer for the second.
    """
    model = AutoModelForSeq2SeqLM.from_pretrained(model_name_or_path, dtype=dtype).to(device).eval()
    tokenizer, target_tokenizer = load_tokenizers(model_name_or_path)
    source_size = getattr(model.config, "source_vocab_size", None)
    if source_size not in (None, model.config.vocab_size) and target_tokenizer is tokenizer:
        raise ValueError(
            f"{model_name_or_path} has two vocabularies, of {source_size} and {model.config.vocab_size} entries, and "
            f"needs a target tokenizer in its subfolder {TARGET_TOKENIZER}, but has none."
        )
    return model, tokenizer, target_tokenizer


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    num_beams: int = 4,
    length_penalty: float = 0.6,
    length_penalty_type: str = "gnmt",
    max_length_offset: int = 50,
    n_best: int = 1,
    with_alignments: bool = False,
    max_source_length: int | None = None,
    max_tokens_per_batch: int = 2048,
    show_progress: bool = False,
    **generate_kwargs: Any,
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
        texts (`Sequence[str]`): Any texts. Special tokens in them are text; lone surrogates become U+FFFD. A text
            without words is translated to one empty text with the score 0.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer, if it is another one.
        num_beams (`int`, defaults to 4): Beams of the search; 1 is greedy.
        length_penalty (`float`, defaults to 0.6): Exponent alpha of the length penalty.
        length_penalty_type (`str`, defaults to `"gnmt"`): `"gnmt"` or `"power"`, as in `beam_search`.
        max_length_offset (`int`, defaults to 50): How many tokens longer than its source a translation may be.
        n_best (`int`, defaults to 1): Translations of each text, at most `num_beams`.
        with_alignments (`bool`, defaults to `False`): Whether to align words.
        max_source_length (`int`, *optional*): Most tokens of a text; what is longer is cut, and counted in a warning.
            The model's limit by default.
        max_tokens_per_batch (`int`, defaults to 2048): Most source tokens of a batch, padding included.
        show_progress (`bool`, defaults to `False`): Whether to draw a progress bar on standard error.
        **generate_kwargs: Passed on to `generate()`, such as `early_stopping`; not what is set here, such as
            `max_new_tokens` and `do_sample`.

    Returns:
        `list[list[Translation]]`: for each text its translations, best first: `n_best` of them, or fewer
        where fewer exist.

    Raises:
        TypeError: if `texts` is a single string, or holds something else than strings.
        ValueError: if the model is in training mode, or an option is out of its range or set here.
    """
    if isinstance(texts, str):
        raise TypeError("`texts` must be a list of strings, got a single string; pass a list with it inside.")
    texts = as_texts("texts", texts)
    check_search(
        model,
        num_beams=num_beams,
        n_best=n_best,
        max_length_offset=max_length_offset,
        length_penalty=length_penalty,
        length_penalty_type=length_penalty_type,
        max_source_length=max_source_length,
        generate_kwargs=generate_kwargs,
    )
    target_tokenizer = tokenizer if target_tokenizer is None else target_tokenizer
    max_source_length = default_max_length(model, tokenizer) if max_source_length is None else max_source_length
    ids = token_ids(tokenizer, [text for text in texts if text.strip()], max_source_length, "texts")
    with tqdm(total=len(ids), unit="text", disable=not show_progress) as progress:
        translate_batch = partial(
            _translate_batch,
            fast_model(model, sum(len(sequence) for sequence in ids)),
            target_tokenizer,
            progress,
            num_beams=num_beams,
            length_penalty=length_penalty,
            length_penalty_type=length_penalty_type,
            max_length_offset=max_length_offset,
            num_return_sequences=n_best,
            **generate_kwargs,
        )
        translated = iter(map_batches(translate_batch, ids, max_tokens_per_batch))
    found = [next(translated) if text.strip() else [Translation("", 0.0)] for text in texts]
    if with_alignments:
        align_translations(model, tokenizer, target_tokenizer, texts, found, max_source_length)
    return found


def _translate_batch(
    model: PreTrainedModel,
    target_tokenizer: PreTrainedTokenizerBase,
    progress: tqdm,
    ids: list[list[int]],
    **options: Any,
) -> list[list[Translation]]:
    """Translate token ids to texts: for each source its translations, best first."""
    outputs = model.generate(
        **source_batch(model, ids, options["max_length_offset"]),
        custom_generate=beam_search,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )
    progress.update(len(ids))
    return decode_n_best(
        target_tokenizer, outputs.sequences, outputs.sequences_scores, options["num_return_sequences"]
    )


__all__ = ["load_translator", "translate"]
