"""Which source words the words of a translation come from, by cross-attention of any encoder-decoder.

```
                The  dog  runs                       matrix (target words, source words)
    Der          .9   .1   .0   -> 0-0                 soft: how much a target word attends to each source word
    Hund         .1   .8   .1   -> 1-1                 while it is generated
    läuft        .0   .2   .8   -> 2-2               pairs "0-0 1-1 2-2" (source-target, Pharaoh's format)
```

The attention is that of the step which generates a token, in one layer, averaged over heads. The default is the
penultimate layer, which aligns best in a Transformer (Garg et al. 2019, "Jointly Learning to Align and Translate with
Transformer Models"); of two layers it is the last. Subwords are combined into words: a target word gets the mean of
its subwords' attention, a source word the sum. Attention to `</s>` belongs to no word, so rows may sum to less than 1.
"""

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from .checks import (
    IGNORED_LABEL,
    as_texts,
    check_arguments,
    check_evaluation_mode,
    check_integer,
    check_not_nan,
)
from .text_batches import (
    batches_by_length,
    default_max_length,
    encode_texts,
    padded,
    padded_inputs,
    without_lone_surrogates,
)


# Held while a model has another attention kernel, as threads may share it.
_KERNEL_CHANGES = threading.Lock()


@dataclass
class WordAlignment:
    """Which source words the words of a translation come from. Words are separated by white space.

    Args:
        pairs (`list[tuple[int, int]]`): Indices, from 0, of a source word and a target word that are aligned.
        matrix (`torch.Tensor` of shape `(target words, source words)`): Attention of each target word.
    """

    pairs: list[tuple[int, int]]
    matrix: torch.Tensor

    def __str__(self) -> str:
        return " ".join(f"{source}-{target}" for source, target in self.pairs)

    @classmethod
    def from_matrix(cls, matrix: torch.Tensor, threshold: float | None = None) -> "WordAlignment":
        """Align words by their attention.

        Args:
            matrix (`torch.Tensor` of shape `(target words, source words)`): Attention of each target word.
            threshold (`float`, *optional*): Align every pair with at least this much attention (0 to 1). By default
                each target word is aligned to the one source word that it attends to most.

        Returns:
            `WordAlignment`: pairs in the order of the source; words without attention are in none.
        """
        if matrix.numel() == 0:
            return cls([], matrix)
        if threshold is None:
            is_aligned = torch.zeros_like(matrix, dtype=torch.bool).scatter_(1, matrix.argmax(1, keepdim=True), True)
        else:
            is_aligned = matrix >= threshold
        pairs = (is_aligned & (matrix > 0)).T.nonzero().tolist()
        return cls([(source, target) for source, target in pairs], matrix)


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
    max_target_length: int | None = None,
    max_tokens_per_batch: int = 4096,
) -> list[WordAlignment]:
    """Align the words of sentences with those of their translations, from any source.

    ```python
    model = AutoModelForSeq2SeqLM.from_pretrained("runs/en-de")
    tokenizer = AutoTokenizer.from_pretrained("runs/en-de")
    [alignment] = word_alignments(model, tokenizer, ["a man runs ."], ["ein mann rennt ."])
    str(alignment)  # "0-0 1-1 2-2 3-3"
    ```

    Args:
        model (`PreTrainedModel`): An encoder-decoder model. It uses eager attention during the call.
        tokenizer (`PreTrainedTokenizerBase`): A fast tokenizer, of the source and, unless another is given, the
            target.
        sources (`Sequence[str]`): Sentences, words separated by spaces. Segment languages without spaces first.
        translations (`Sequence[str]`): Their translations.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer, if it is another one.
        layer (`int`, *optional*): Decoder layer whose attention is used; the penultimate one by default, of two the
            last.
        heads (`Sequence[int]`, *optional*): Heads to average; all by default.
        threshold (`float`, *optional*): Align every pair of words with at least this much attention (0 to 1). By
            default each target word is aligned to the one source word that it attends to most.
        max_length (`int`, *optional*): Most tokens of a sentence; words after them are not aligned. The model's limit
            by default.
        max_target_length (`int`, *optional*): The same for translations; `max_length` by default.
        max_tokens_per_batch (`int`, defaults to 4096): Most tokens of a batch, padding included, source and target
            together.

    Returns:
        `list[WordAlignment]`: one for each pair, empty where a side has no words.

    Raises:
        ValueError: if there are not as many translations as sources, the model is in training mode, `layer` or a head
            does not exist, a length is below 1, or the model gives nan.
        TypeError: if sources or translations are a single string, or contain anything but strings, or a length is no
            integer.
    """
    sources = as_texts("sources", sources, allows_one=False)
    translations = as_texts("translations", translations, allows_one=False)
    if len(sources) != len(translations):
        raise ValueError(
            f"`translations` must be as many as `sources` ({len(sources)}), got {len(translations)}: one for each."
        )
    target_tokenizer = tokenizer if target_tokenizer is None else target_tokenizer
    max_length = default_max_length(model, tokenizer) if max_length is None else max_length
    max_target_length = max_length if max_target_length is None else max_target_length
    check_integer("max_length", max_length)
    check_integer("max_target_length", max_target_length)
    sources = [without_lone_surrogates(text) for text in sources]
    translations = [without_lone_surrogates(text) for text in translations]
    encoded_sources, _ = encode_texts(tokenizer, sources, max_length, with_offsets=True)
    encoded_targets, _ = encode_texts(target_tokenizer, translations, max_target_length, with_offsets=True)
    lengths = [
        len(source["input_ids"]) + len(target["input_ids"])
        for source, target in zip(encoded_sources, encoded_targets, strict=True)
    ]
    alignments: dict[int, WordAlignment] = {}
    for batch in batches_by_length(lengths, max_tokens_per_batch):
        inputs = padded_inputs(model, [encoded_sources[number]["input_ids"] for number in batch])
        labels = padded([encoded_targets[number]["input_ids"] for number in batch], IGNORED_LABEL, model.device)
        attention = forced_attention(model, **inputs, labels=labels, layer=layer, heads=heads).float().cpu()
        for row, number in enumerate(batch):
            source_words = word_numbers(sources[number], encoded_sources[number])
            target_words = word_numbers(translations[number], encoded_targets[number])
            tokens = attention[row, : len(target_words), : len(source_words)]
            shape = (len(translations[number].split()), len(sources[number].split()))
            matrix = combine_subwords(tokens, target_words, source_words, shape)
            alignments[number] = WordAlignment.from_matrix(matrix, threshold)
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
    """Compute the cross-attention of given targets (forced decoding).

    Args:
        model (`PreTrainedModel`): An encoder-decoder model. It uses eager attention during the call.
        input_ids (`torch.LongTensor` of shape `(batch, src_len)`): Source tokens.
        attention_mask (`torch.Tensor` of shape `(batch, src_len)`, *optional*): 1 for tokens, 0 for padding.
        labels (`torch.LongTensor` of shape `(batch, tgt_len)`): Target tokens without the start token; -100 is
            padding.
        layer (`int`, *optional*): Decoder layer, from 0; the penultimate one by default, of two the last.
        heads (`Sequence[int]`, *optional*): Heads to average; all by default.

    Returns:
        `torch.Tensor` of shape `(batch, tgt_len, src_len)`: for each target token, the attention of the step that
        generates it. Rows of -100 are 0.

    Raises:
        ValueError: if the model is in training mode or gives nan, or `layer` or a head does not exist.
    """
    check_evaluation_mode(model)
    check_arguments(input_ids=input_ids, labels=labels)
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(labels)
    with _KERNEL_CHANGES:  # of a model that several threads may share
        implementation = model.config._attn_implementation
        model.set_attn_implementation("eager")  # the only kernel that returns attention weights
        try:
            with torch.no_grad():
                outputs = model(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    decoder_input_ids=decoder_input_ids,
                    output_attentions=True,
                    use_cache=False,
                    return_dict=True,
                )
        finally:
            model.set_attn_implementation(implementation)
    check_not_nan(outputs.logits)
    attention = mean_of_heads(outputs.cross_attentions, layer, heads)  # (batch, tgt_len, src_len)
    return attention * (labels != IGNORED_LABEL)[..., None]


def mean_of_heads(
    cross_attentions: Sequence[torch.Tensor], layer: int | None = None, heads: Sequence[int] | None = None
) -> torch.Tensor:
    """Average the heads of one layer's attention.

    Args:
        cross_attentions (`Sequence[torch.Tensor]`): For each layer a tensor of shape `(batch, heads, tgt_len,
            src_len)`.
        layer (`int`, *optional*): Decoder layer, from 0; the penultimate one by default, of two the last.
        heads (`Sequence[int]`, *optional*): Heads to average; all by default.

    Returns:
        `torch.Tensor` of shape `(batch, tgt_len, src_len)`: the mean.

    Raises:
        ValueError: if `layer` or a head does not exist.
    """
    layers = len(cross_attentions)
    if layer is None:
        layer = layers - 2 if layers > 2 else layers - 1
    if not -layers <= layer < layers:
        raise ValueError(f"`layer` must be in [{-layers}, {layers}), as the decoder has {layers} layers; got {layer}.")
    attention = cross_attentions[layer]  # (batch, heads, tgt_len, src_len)
    if heads is None:
        return attention.mean(1)
    count = attention.shape[1]
    if not heads or not all(0 <= head < count for head in heads):
        raise ValueError(f"`heads` must be a non-empty list of numbers in [0, {count}), got {list(heads)}.")
    return attention[:, list(heads)].mean(1)


def word_numbers(text: str, encoded: dict[str, list]) -> list[int]:
    """Find the word that each token belongs to. Words are separated by white space.

    Args:
        text (`str`): The text.
        encoded (`dict[str, list]`): Output of a fast tokenizer: `offset_mapping` and `special_tokens_mask`.

    Returns:
        `list[int]`: for each token the index of its word, from 0; -1 for special tokens and trailing spaces. A space
        belongs to the word after it.
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


def combine_subwords(
    attention: torch.Tensor, target_words: Sequence[int], source_words: Sequence[int], shape: tuple[int, int]
) -> torch.Tensor:
    """Turn attention between tokens into attention between words: sums over source, means over target subwords.

    Args:
        attention (`torch.Tensor` of shape `(target tokens, source tokens)`): Attention between tokens.
        target_words (`Sequence[int]`): For each target token the index of its word, -1 for none.
        source_words (`Sequence[int]`): For each source token the same.
        shape (`tuple[int, int]`): Numbers of target and source words.

    Returns:
        `torch.Tensor` of shape `(target words, source words)`: attention between words.
    """
    target, source = torch.tensor(target_words), torch.tensor(source_words)
    attention = attention[target >= 0][:, source >= 0]  # (target tokens, source tokens) that belong to words
    target, source = target[target >= 0], source[source >= 0]
    summed = attention.new_zeros(len(target), shape[1]).index_add_(1, source, attention)
    subwords = torch.bincount(target, minlength=shape[0]).clamp(min=1)
    return attention.new_zeros(shape).index_add_(0, target, summed) / subwords[:, None]
