"""From texts to ranked translations, with any encoder-decoder's `generate()`, and to alignments from cross-attention.

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

import inspect
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from .checks import (
    IGNORED_LABEL,
    as_texts,
    check_arguments,
    check_evaluation_mode,
    check_integer,
    check_not_nan,
    position_limit,
)
from .text_batches import (
    batches_by_length,
    default_max_length,
    encode_texts,
    padded,
    padded_inputs,
    token_ids,
    without_lone_surrogates,
)


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


# Held while a model has another attention kernel, as threads may share it.
_KERNEL_CHANGES = threading.Lock()
# Most bytes of the log probabilities of all steps, which transformers keeps.
MAX_SCORES_MEMORY = 2**30
# The score of a hypothesis that was not found, as in transformers.
NOT_FOUND = -1e9


# Options of `generate()` and of other pipelines that a translation sets itself, and what to do instead.
FIXED_OPTIONS = {
    "max_new_tokens": "give `max_length_offset`, how many tokens longer than its source a translation may be",
    "max_length": "give `max_length_offset`, how many tokens longer than its source a translation may be",
    "num_return_sequences": "give `n_best`",
    "batch_size": "give `max_tokens_per_batch`",
    "generation_config": "give its options themselves",
    "do_sample": "leave it out, as translations are searched for and not sampled",
    "output_scores": "leave it out, as every translation has its score",
    "output_logits": "leave it out, as every translation has its score",
    "return_dict_in_generate": "leave it out",
}


@dataclass
class Translation:
    """One translation of a text.

    Args:
        text (`str`): The translation.
        score (`float`): Log probability in nats, divided by the length penalty; higher is better.
        alignment (`WordAlignment`, *optional*): Which source words its words come from.
    """

    text: str
    score: float
    alignment: WordAlignment | None = None


def length_penalty_of(
    length: float | torch.Tensor, length_penalty: float, length_penalty_type: str
) -> float | torch.Tensor:
    """Compute the divisor of a hypothesis' log probability.

    Args:
        length (`float` or `torch.Tensor`): Number of generated tokens, with `</s>` and without the start token.
        length_penalty (`float`): The exponent alpha. 0 means no penalty.
        length_penalty_type (`str`): `"gnmt"` for ((5 + length) / 6)^alpha, or `"power"` for length^alpha, which is
            transformers' own.

    Returns:
        `float` or `torch.Tensor`: the penalty.

    Raises:
        ValueError: if the exponent is not finite or too large, or the type is unknown.

    Source: Wu et al. 2016, equation 14; Vaswani et al. 2017, 6.1 (alpha = 0.6). Wu et al. don't say whether |Y| counts
    `</s>`; it does in Tensor2Tensor, the code of the second paper.
    """
    if not math.isfinite(length_penalty):
        raise ValueError(f"`length_penalty` must be finite, got {length_penalty}.")
    try:
        if length_penalty_type == "gnmt":
            return ((5 + length) / 6) ** length_penalty
        if length_penalty_type == "power":
            return length**length_penalty
    except OverflowError as error:
        raise ValueError(f"`length_penalty` ({length_penalty}) is too large for {length} tokens.") from error
    raise ValueError(f'`length_penalty_type` must be "gnmt" or "power", got {length_penalty_type!r}.')


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How texts are translated: the beam search, by default the paper's, and its limits.

    Args:
        num_beams (`int`, defaults to 4): Beams of the search; 1 is greedy search.
        length_penalty (`float`, defaults to 0.6): Exponent alpha of the length penalty; higher favours longer texts.
        length_penalty_type (`str`, defaults to `"gnmt"`): `"gnmt"` or `"power"`, as in [`length_penalty_of`].
        max_length_offset (`int`, defaults to 50): How many tokens longer than its source a translation may be.
        n_best (`int`, defaults to 1): Translations of each text, at most `num_beams`.
        max_source_length (`int`, *optional*): Most tokens of a text; longer ones are truncated, with a warning that
            counts them. The model's limit by default.
        max_tokens_per_batch (`int`, defaults to 2048): Most source tokens of a batch, padding included.
        generate_kwargs (`Mapping[str, Any]`): Further options of `generate()`, such as `early_stopping`; not those in
            `FIXED_OPTIONS`.

    Raises:
        ValueError: if an option is out of its range, or a further one is fixed or unknown to `generate()`.
        TypeError: if an option is no number.

    Source: Vaswani et al. 2017, 6.1.
    """

    num_beams: int = 4
    length_penalty: float = 0.6
    length_penalty_type: str = "gnmt"
    max_length_offset: int = 50
    n_best: int = 1
    max_source_length: int | None = None
    max_tokens_per_batch: int = 2048
    generate_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = {"num_beams": 1, "max_length_offset": 0, "max_source_length": 1, "max_tokens_per_batch": 1}
        for name, lowest in {**limits, "n_best": -math.inf}.items():  # its limits are checked together, below
            value = getattr(self, name)
            if value is not None or name != "max_source_length":
                check_integer(name, value, lowest)
        if not isinstance(self.length_penalty, int | float):
            raise TypeError(f"`length_penalty` must be a number, got {self.length_penalty!r}.")
        if not 1 <= self.n_best <= self.num_beams:
            raise ValueError(f"`n_best` must be in [1, `num_beams` = {self.num_beams}], got {self.n_best}.")
        length_penalty_of(1, self.length_penalty, self.length_penalty_type)
        check_not_fixed(self.generate_kwargs)

    @classmethod
    def from_kwargs(cls, **options: Any) -> "SearchOptions":
        """Collect keyword arguments; those that are no fields of this class are options of `generate()`.

        Args:
            **options (`Any`): The options.

        Returns:
            `SearchOptions`: the checked options.

        Raises:
            ValueError: as for the class, and if neither this class nor `generate()` has an option of that name.
        """
        names = [each.name for each in fields(cls) if each.name != "generate_kwargs"]
        own = {name: options.pop(name) for name in names if name in options}
        known = {*vars(GenerationConfig()), *inspect.signature(GenerationMixin.generate).parameters}
        if unknown := [name for name in options if name not in known | FIXED_OPTIONS.keys()]:
            raise ValueError(
                f"`{unknown[0]}` is not an option of translations; these are {', '.join(names)}, and the options of "
                "`generate()`."
            )
        return cls(**own, generate_kwargs=options)

    def with_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> "SearchOptions":
        """Add the tokenizer that `stop_strings` need.

        Args:
            tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.

        Returns:
            `SearchOptions`: the options.
        """
        if "stop_strings" not in self.generate_kwargs:
            return self
        return replace(self, generate_kwargs={**self.generate_kwargs, "tokenizer": tokenizer})


def check_not_fixed(options: Iterable[str]) -> None:
    """Check that no option is one that a translation sets itself.

    Args:
        options (`Iterable[str]`): Names of options.

    Raises:
        ValueError: if one is in `FIXED_OPTIONS`.
    """
    for name in options:
        if name in FIXED_OPTIONS:
            raise ValueError(f"`{name}` is not an option of translations; {FIXED_OPTIONS[name]}.")


def translate_texts(
    model: PreTrainedModel,
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase],
    texts: Sequence[str],
    search: Callable[[list[list[int]]], Iterable[list[Translation]]],
    *,
    max_source_length: int | None = None,
    with_alignments: bool = False,
) -> list[list[Translation]]:
    """Tokenize texts, search, and align; a text without words gets one empty translation with the score 0.

    Args:
        model (`PreTrainedModel`): An encoder-decoder model, in evaluation mode.
        tokenizers (`tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]`): Those of source and target.
        texts (`Sequence[str]`): The texts.
        search (`Callable`): Takes the token ids of the texts that have words, and gives the translations of each.
        max_source_length (`int`, *optional*): Most tokens of a text; the model's limit by default.
        with_alignments (`bool`, defaults to `False`): Whether to align words.

    Returns:
        `list[list[Translation]]`: for each text its translations, best first.

    Raises:
        ValueError: if the model is in training mode.
    """
    check_evaluation_mode(model)
    max_length = default_max_length(model, tokenizers[0]) if max_source_length is None else max_source_length
    found = iter(search(token_ids(tokenizers[0], [text for text in texts if text.strip()], max_length, "texts")))
    rows = [next(found) if text.strip() else [Translation("", 0.0)] for text in texts]
    if with_alignments:
        pairs = [(text, each) for text, row in zip(texts, rows, strict=True) for each in row]
        sources, targets = [text for text, _ in pairs], [each.text for _, each in pairs]
        alignments = word_alignments(
            model,
            tokenizers[0],
            sources,
            targets,
            target_tokenizer=tokenizers[1],
            max_length=max_length,
            max_target_length=position_limit(model.config) or sys.maxsize,
        )
        for (_, each), alignment in zip(pairs, alignments, strict=True):
            each.alignment = alignment
    return rows


def source_batch(model: PreTrainedModel, ids: list[list[int]], max_length_offset: int) -> dict[str, Any]:
    """Make the inputs of `generate()` for one batch.

    Args:
        model (`PreTrainedModel`): The model; learned positions limit the length of its output.
        ids (`list[list[int]]`): Token ids of the sources.
        max_length_offset (`int`): How many tokens longer than the longest source a translation may be.

    Returns:
        `dict[str, Any]`: `input_ids` and `attention_mask` of shape `(batch, src_len)`, and `max_new_tokens`.
    """
    longest = max(len(sequence) for sequence in ids) + max_length_offset
    limit = position_limit(model.config) or longest
    return {**padded_inputs(model, ids), "max_new_tokens": min(longest, limit)}


def decode_n_best(
    tokenizer: PreTrainedTokenizerBase, sequences: torch.Tensor, scores: torch.Tensor, n_best: int
) -> list[list[Translation]]:
    """Decode the results of a search.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.
        sequences (`torch.LongTensor` of shape `(batch * n_best, tgt_len)`): Token ids, best first for each source.
        scores (`torch.Tensor` of shape `(batch * n_best,)`): Their scores; -1e9 or less if none was found.
        n_best (`int`): Sequences of each source.

    Returns:
        `list[list[Translation]]`: for each source its translations, at least one.
    """
    texts = tokenizer.batch_decode(sequences, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    found = list(map(Translation, texts, scores.tolist()))
    rows = [found[start : start + n_best] for start in range(0, len(found), n_best)]
    return [row[:1] + [translation for translation in row[1:] if translation.score > NOT_FOUND] for row in rows]


def search_and_rank(
    model: PreTrainedModel, ids: list[list[int]], options: SearchOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Search with transformers' `generate()`, and rank the hypotheses by any length penalty.

    transformers' search divides log probabilities by length^alpha and has no GNMT penalty. So it finds `num_beams`
    hypotheses with the same alpha, and only these are ranked by GNMT's scores.

    Args:
        model (`PreTrainedModel`): An encoder-decoder model.
        ids (`list[list[int]]`): Token ids of the sources.
        options (`SearchOptions`): The options.

    Returns:
        `tuple[torch.LongTensor, torch.Tensor]`: sequences of shape `(batch * n_best, tgt_len)` and their scores of
        shape `(batch * n_best,)`, -inf where none was found.

    Raises:
        ValueError: if the model gives nan.
    """
    num_beams, alpha = options.num_beams, options.length_penalty
    outputs = model.generate(
        **source_batch(model, ids, options.max_length_offset),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=num_beams > 1,
        output_logits=num_beams == 1,
        **({} if num_beams == 1 else {"length_penalty": alpha}),
        **options.generate_kwargs,
    )
    if num_beams == 1:
        log_probs = model.compute_transition_scores(outputs.sequences, outputs.logits, normalize_logits=True)
        is_token = outputs.sequences[:, -log_probs.shape[1] :] != model.config.pad_token_id  # (batch, tgt_len)
        lengths = is_token.sum(1)
        sums, is_found = log_probs.masked_fill(~is_token, 0.0).sum(1), lengths > 0
    else:
        lengths = (outputs.beam_indices >= 0).sum(1)  # (batch * num_beams,)
        sums = outputs.sequences_scores * length_penalty_of(lengths.clamp(min=1), alpha, "power")
        is_found = torch.minimum(outputs.sequences_scores, sums) > NOT_FOUND / 2
    steps = outputs.scores or outputs.logits  # of each step (batch * num_beams, vocab)
    check_not_nan(torch.stack([step.amax() for step in steps]))  # nan if one is; asked once, as a GPU is waited for
    scores = sums / length_penalty_of(lengths.clamp(min=1), alpha, options.length_penalty_type)
    scores = scores.masked_fill(~is_found, -torch.inf).view(-1, num_beams)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    sequences = outputs.sequences.view(len(ids), num_beams, -1)
    best = order[:, : options.n_best, None].expand(-1, -1, sequences.shape[2])
    return sequences.gather(1, best).flatten(0, 1), scores[:, : options.n_best].flatten()
