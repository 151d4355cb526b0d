"""From texts to ranked translations, with any encoder-decoder's `generate()`."""

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from .alignment import WordAlignment, word_alignments
from .checks import (
    check_evaluation_mode,
    check_integer,
    check_not_nan,
    position_limit,
)
from .text_batches import (
    default_max_length,
    padded_inputs,
    token_ids,
)


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
    "custom_generate": "leave it out, as translations are searched for by `beam_search`",
    "inputs": "give the texts",
    "pad_token_id": "leave it out, as texts have no padding",
    "prefix_allowed_tokens_fn": "texts are sorted into batches, so its row would be that of another text; give a "
    "`logits_processor` for all texts, or search with `generate()`",
}
# Largest exponent of a length penalty: above it, the penalty of a long text is no float32.
MAX_LENGTH_PENALTY = 10


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
        length_penalty (`float`): The exponent alpha, in [-10, 10]. 0 means no penalty.
        length_penalty_type (`str`): `"gnmt"` for ((5 + length) / 6)^alpha, or `"power"` for length^alpha, which is
            transformers' own.

    Returns:
        `float` or `torch.Tensor`: the penalty.

    Raises:
        ValueError: if the exponent is out of its range, or the type is unknown.

    Source: Wu et al. 2016, equation 14; Vaswani et al. 2017, 6.1 (alpha = 0.6). Wu et al. don't say whether |Y| counts
    `</s>`; it does in Tensor2Tensor, the code of the second paper.
    """
    if not -MAX_LENGTH_PENALTY <= length_penalty <= MAX_LENGTH_PENALTY:
        rule = f"[-{MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}]"
        raise ValueError(f"`length_penalty` must be in {rule}, got {length_penalty}.")
    if length_penalty_type == "gnmt":
        return ((5 + length) / 6) ** length_penalty
    if length_penalty_type == "power":
        return length**length_penalty
    raise ValueError(f'`length_penalty_type` must be "gnmt" or "power", got {length_penalty_type!r}.')


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How texts are translated: the beam search, by default the paper's, and its limits.

    Args:
        num_beams (`int`, defaults to 4): Beams of the search; 1 is greedy search.
        length_penalty (`float`, defaults to 0.6): Exponent alpha of the length penalty, in [-10, 10]; higher favours
            longer texts.
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
        if isinstance(start := self.generate_kwargs.get("decoder_start_token_id"), Sequence | torch.Tensor):
            raise ValueError(f"`decoder_start_token_id` must be one id, that of all texts, got {start}.")

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
        known -= {"self", "kwargs"}
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
