"""Word alignments from cross-attention.

```
                The  dog  runs                       matrix (target words, source words)
    Der          .9   .1   .0   -> 0-0                 soft: how much of its attention a target word gives to each
    Hund         .1   .8   .1   -> 1-1                 source word while it is being written
    läuft        .0   .2   .8   -> 2-2               pairs "0-0 1-1 2-2" (source-target, Pharaoh's format)
```

The attention is that of the step which writes a token, in one layer, averaged over its heads. Of the layers of a
Transformer the penultimate one aligns best (Garg et al. 2019, "Jointly Learning to Align and Translate with
Transformer Models"), so that is the default. A word's pieces count together: a target word gets the mean of its
pieces' attention, a source word the sum. What falls on `</s>` belongs to no word, so rows may sum to less than 1.

There are two ways to the same numbers: `forced_attention` reads a finished translation once, which is simple and
cheap; `beam_attention` takes what a beam search has recorded and follows the beams back.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation import GenerateBeamEncoderDecoderOutput
from transformers.modeling_utils import PreTrainedModel

from .checks import check_evaluation_mode
from .text_batches import batches_by_length, default_max_length, encode_texts, padded, without_lone_surrogates


IGNORED = -100


@dataclass
class WordAlignment:
    """Which source words the words of a translation come from. Words are what stands between spaces.

    Args:
        pairs (`list[tuple[int, int]]`): Numbers, from 0, of a source word and a target word that belong together.
        matrix (`torch.Tensor` of shape `(target words, source words)`): Attention of each target word.
    """

    pairs: list[tuple[int, int]]
    matrix: torch.Tensor

    def __str__(self) -> str:
        return " ".join(f"{source}-{target}" for source, target in self.pairs)


def word_alignments(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    translations: Sequence[str],
    *,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    threshold: float | None = None,
    max_length: int | None = None,
    max_tokens_per_batch: int = 4096,
) -> list[WordAlignment]:
    """Align the words of sentences with those of their translations, whoever wrote these.

    ```python
    [alignment] = word_alignments(model, tokenizer, ["a man runs ."], ["ein mann rennt ."])
    str(alignment)  # "0-0 1-1 2-2 3-3"
    ```

    Args:
        model (`PreTrainedModel`): An encoder-decoder model. It runs with eager attention for the time of the call.
        tokenizer (`PreTrainedTokenizerBase`): A fast tokenizer, of the source and, unless another is given, the
            target.
        sources (`Sequence[str]`): Sentences, words separated by spaces. Segment a language without spaces before.
        translations (`Sequence[str]`): Their translations.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer, if it is another one.
        layer (`int`, *optional*): Decoder layer whose attention is taken; the penultimate one by default.
        heads (`Sequence[int]`, *optional*): Heads to average; all by default.
        threshold (`float`, *optional*): Link every pair of words with at least this much attention (0 to 1). By
            default each target word is linked to the one source word that has most of it.
        max_length (`int`, *optional*): Most tokens of a sentence; words behind it are not aligned. The model's limit
            by default.
        max_tokens_per_batch (`int`, defaults to 4096): Most tokens of a batch, padding included, source and target
            together.

    Returns:
        `list[WordAlignment]`: one for each pair, empty where a side has no words.

    Raises:
        ValueError: if there are not as many translations as sources, the model is in training mode, or `layer` or a
            head does not exist.
    """
    if len(sources) != len(translations):
        raise ValueError(
            f"`translations` must be as many as `sources` ({len(sources)}), got {len(translations)}: one for each."
        )
    target_tokenizer = tokenizer if target_tokenizer is None else target_tokenizer
    max_length = default_max_length(model, tokenizer) if max_length is None else max_length
    sources = [without_lone_surrogates(text) for text in sources]
    translations = [without_lone_surrogates(text) for text in translations]
    encoded_sources, _ = encode_texts(tokenizer, sources, max_length, with_offsets=True)
    encoded_targets, _ = encode_texts(target_tokenizer, translations, max_length, with_offsets=True)
    lengths = [
        len(source["input_ids"]) + len(target["input_ids"])
        for source, target in zip(encoded_sources, encoded_targets, strict=True)
    ]
    alignments: dict[int, WordAlignment] = {}
    for batch in batches_by_length(lengths, max_tokens_per_batch):
        source_ids = [encoded_sources[number]["input_ids"] for number in batch]
        target_ids = [encoded_targets[number]["input_ids"] for number in batch]
        input_ids = padded(source_ids, model.config.pad_token_id, model.device)
        attention_mask = padded([[1] * len(ids) for ids in source_ids], 0, model.device)
        labels = padded(target_ids, IGNORED, model.device)
        attention = forced_attention(model, input_ids, attention_mask, labels, layer=layer, heads=heads).float().cpu()
        for row, number in enumerate(batch):
            source_words = word_numbers(sources[number], encoded_sources[number])
            target_words = word_numbers(translations[number], encoded_targets[number])
            tokens = attention[row, : len(target_words), : len(source_words)]
            shape = (len(translations[number].split()), len(sources[number].split()))
            matrix = _of_words(tokens, target_words, source_words, shape)
            alignments[number] = WordAlignment(_pairs(matrix, threshold), matrix)
    return [alignments[number] for number in range(len(sources))]


def forced_attention(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Let a model read given targets, and take its cross-attention.

    Args:
        model (`PreTrainedModel`): An encoder-decoder model. It runs with eager attention for the time of the call.
        input_ids (`torch.LongTensor` of shape `(batch, src_len)`): Source tokens.
        attention_mask (`torch.Tensor` of shape `(batch, src_len)`, *optional*): 1 for tokens, 0 for padding.
        labels (`torch.LongTensor` of shape `(batch, tgt_len)`): Target tokens without the decoder's start; -100 is
            padding.
        layer (`int`, *optional*): Decoder layer, from 0; the penultimate one by default.
        heads (`Sequence[int]`, *optional*): Heads to average; all by default.

    Returns:
        `torch.Tensor` of shape `(batch, tgt_len, src_len)`: for each target token, the attention of the step that
        writes it. Rows of -100 are 0.

    Raises:
        ValueError: if the model is in training mode, or `layer` or a head does not exist.
    """
    check_evaluation_mode(model)
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(labels)
    with _eager_attention(model), torch.no_grad():
        outputs = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            output_attentions=True,
            use_cache=False,
        )
    attention = _mean_of_heads(outputs.cross_attentions, layer, heads)  # (batch, tgt_len, src_len)
    return attention * (labels != IGNORED)[..., None]


def beam_attention(
    outputs: GenerateBeamEncoderDecoderOutput, *, layer: int | None = None, heads: Sequence[int] | None = None
) -> torch.Tensor:
    """Collect the cross-attention along the hypotheses of a beam search: each step's, of the beam that it continues.

    ```python
    model.set_attn_implementation("eager")
    outputs = model.generate(**inputs, num_beams=4, output_attentions=True, return_dict_in_generate=True)
    attention = beam_attention(outputs)
    ```

    Args:
        outputs (`GenerateBeamEncoderDecoderOutput`): What `generate()` returned, with or without `beam_search`.
        layer (`int`, *optional*): Decoder layer, from 0; the penultimate one by default.
        heads (`Sequence[int]`, *optional*): Heads to average; all by default.

    Returns:
        `torch.Tensor` of shape `(batch * num_return_sequences, tgt_len, src_len)`: for each generated token, the
        attention of the step that wrote it. Rows behind the end of a hypothesis are 0.

    Raises:
        ValueError: if the outputs don't hold cross-attentions and beam indices, or `layer` or a head does not exist.
    """
    steps, beam_indices = outputs.get("cross_attentions"), outputs.get("beam_indices")
    if beam_indices is None or not steps or steps[0] is None or steps[0][0] is None:
        raise ValueError(
            "`outputs` must hold `cross_attentions` and `beam_indices`: search with `num_beams` above 1, "
            "`return_dict_in_generate=True`, `output_attentions=True`, and attn_implementation='eager'."
        )
    tgt_len = beam_indices.shape[1]
    last_query = [tuple(attention[:, :, -1:] for attention in step) for step in steps[:tgt_len]]
    attention = torch.cat(
        [_mean_of_heads(step, layer, heads) for step in last_query], dim=1
    )  # (rows, tgt_len, src_len)
    beams = beam_indices.long().clamp(min=0)  # (batch * num_return_sequences, tgt_len)
    followed = attention[beams, torch.arange(tgt_len, device=beams.device)]
    return followed * (beam_indices >= 0)[..., None]


def word_numbers(text: str, encoded: dict[str, list]) -> list[int]:
    """Tell which word of a text each token belongs to. Words are what stands between spaces.

    Args:
        text (`str`): The text.
        encoded (`dict[str, list]`): What a fast tokenizer made of it: `offset_mapping` and `special_tokens_mask`.

    Returns:
        `list[int]`: for each token the number of its word, from 0; -1 for special tokens and spaces at the end. A
        space belongs to the word behind it.
    """
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    numbers, word = [], 0
    for (start, end), is_special in zip(encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True):
        if is_special:
            numbers.append(-1)
            continue
        last_character = max(start, end - 1)
        while word < len(ends) and ends[word] <= last_character:
            word += 1
        numbers.append(word if word < len(ends) else -1)
    return numbers


@contextmanager
def _eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use the one attention kernel that returns its weights."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)


def _mean_of_heads(
    cross_attentions: Sequence[torch.Tensor], layer: int | None, heads: Sequence[int] | None
) -> torch.Tensor:
    """Average the heads of one layer's attention: (batch, tgt_len, src_len)."""
    layers = len(cross_attentions)
    layer = max(layers - 2, 0) if layer is None else layer
    if not -layers <= layer < layers:
        raise ValueError(f"`layer` must be in [{-layers}, {layers}), as the decoder has {layers} layers; got {layer}.")
    attention = cross_attentions[layer]  # (batch, heads, tgt_len, src_len)
    if heads is None:
        return attention.mean(1)
    count = attention.shape[1]
    if not heads or not all(0 <= head < count for head in heads):
        raise ValueError(f"`heads` must be some numbers in [0, {count}), got {list(heads)}.")
    return attention[:, list(heads)].mean(1)


def _of_words(
    attention: torch.Tensor, target_words: Sequence[int], source_words: Sequence[int], shape: tuple[int, int]
) -> torch.Tensor:
    """Turn attention between tokens into attention between words: sums over source, means over target pieces."""
    target, source = torch.tensor(target_words), torch.tensor(source_words)
    attention = attention[target >= 0][:, source >= 0]  # (target tokens, source tokens) that belong to words
    target, source = target[target >= 0], source[source >= 0]
    summed = attention.new_zeros(len(target), shape[1]).index_add_(1, source, attention)
    pieces = torch.bincount(target, minlength=shape[0]).clamp(min=1)
    return attention.new_zeros(shape).index_add_(0, target, summed) / pieces[:, None]


def _pairs(matrix: torch.Tensor, threshold: float | None) -> list[tuple[int, int]]:
    """Link words: source and target numbers, in the order of the source. Words without attention stay alone."""
    if matrix.numel() == 0:
        return []
    chosen = matrix >= threshold if threshold is not None else torch.zeros_like(matrix, dtype=torch.bool)
    if threshold is None:
        chosen.scatter_(1, matrix.argmax(1, keepdim=True), True)
    return [(source, target) for source, target in (chosen & (matrix > 0)).T.nonzero().tolist()]


__all__ = ["WordAlignment", "beam_attention", "forced_attention", "word_alignments", "word_numbers"]
