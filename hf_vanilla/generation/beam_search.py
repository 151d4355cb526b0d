r"""Beam search for `generate()` with the paper's length penalty, faster than transformers' own.

```
          the beams of one sentence            one step
    source  <---- cross-attention ----+   1. the decoder reads each beam's last token
    (stored once)                     |   2. the best `2 * num_beams` continuations of all beams
    "Ein"  "Hund"  "läuft" -----------+   3. those that end in </s> become hypotheses: score / penalty(length)
      |       \                       |   4. the best `num_beams` of the others continue
      |        "rennt" ---------------+   5. sentences that can't improve leave the batch
    "Der" ...
```

What makes it fast, with equal results:
- The beams of a sentence are side by side in one row of the batch. Keys and values are written once and not moved when
  beams are reordered: a mask of their ancestors defines what each beam attends to.
- Source keys and values, or those of a decoder-only model's prompt, are computed and stored once per sentence.
- The best tokens are found among logits; the only pass over the vocabulary is one log-sum-exp.
- Finished sentences leave the batch.

Departures from transformers' beam search: none in the results, unless fewer continuations exist than beams. There
transformers continues with copies of a beam at a score of -1e9; here such beams are dropped.
"""

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from transformers.generation import (
    EosTokenCriteria,
    ForcedEOSTokenLogitsProcessor,
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput

from ..models.cache_names import CACHE_NAME
from ..models.checks import check_generation_options, check_input_ids, check_integer, check_not_nan
from ..models.chunked_loss import CHUNK_LOGITS
from ..models.translating import NOT_FOUND, length_penalty_of
from .beam_decoders import BeamDecoder, SideBySideDecoder, check_source_mask, decoder_for
from .step_graphs import StepGraphs


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer

# Options of transformers' other generation modes, with the values that disable them.
OTHER_MODES: dict[str, tuple[Any, ...]] = {
    "constraints": (None,),
    "force_words_ids": (None,),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "low_memory": (None, False),
}

# The vocabulary is searched in runs of this many tokens: first for the best runs, then for the best tokens in them.
RUN_LENGTH = 64
# Number of logits that are normalized at once on a CPU: 1 MiB.
BLOCK_SIZE = 2**18
# Share of finished sentences at which they are dropped: dropping copies all others.
DROPPED_SHARE = 1 / 8
# Steps from one question of how many sentences are finished to the next. An accelerator waits for each answer.
STEPS_BETWEEN_CHECKS = 1
STEPS_BETWEEN_CHECKS_OF_ACCELERATORS = 8

SearchOutput: TypeAlias = GenerateBeamEncoderDecoderOutput | GenerateBeamDecoderOnlyOutput


def beam_search(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    length_penalty: float | None = None,
    length_penalty_type: str = "power",
    max_length_offset: int | None = None,
    streamer: "BaseStreamer | None" = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    step_graphs: StepGraphs | None = None,
    synced_gpus: bool | None = None,
    fills_cache: bool = False,
    **model_kwargs: Any,
) -> SearchOutput | torch.Tensor:
    """Beam search, to be passed to `generate()` as its `custom_generate`.

    All of `generate()`'s options for beams work as usual: `early_stopping`, `max_length`, `min_length`,
    `num_return_sequences`, logits processors, stopping criteria, `output_scores`, `output_attentions` and so on.
    `num_beams=1` is greedy search. Processors get log probabilities, as in transformers' beam search; in its greedy
    search they get logits, so that a `repetition_penalty` weighs otherwise. The paper's search is

    ```python
    model.generate(
        **inputs, custom_generate=beam_search, num_beams=4, length_penalty=0.6, length_penalty_type="gnmt"
    )
    ```

    Args:
        model (`PreTrainedModel`): An encoder-decoder or a decoder-only model. The faster search is for models of this
            package; others work, too.
        input_ids (`torch.LongTensor` of shape `(batch * num_beams, tgt_len)`): The decoder's prompt.
        logits_processor (`LogitsProcessorList`): Processors of the log probabilities.
        stopping_criteria (`StoppingCriteriaList`): Criteria for the end of a sequence.
        generation_config (`GenerationConfig`): All other options.
        length_penalty (`float`, *optional*): Exponent of the length penalty; `generation_config.length_penalty` by
            default.
        length_penalty_type (`str`, defaults to `"power"`): `"power"` divides log probabilities by
            length^length_penalty as in transformers, `"gnmt"` by ((5 + length) / 6)^length_penalty as in the paper.
        max_length_offset (`int`, *optional*): How many tokens longer than its own source, without padding, a sequence
            may be; only for encoder-decoders. `max_length`, which is the same for all sentences of a batch and counts
            the prompt, also applies.
        streamer (`BaseStreamer`, *optional*): Gets the new token of each sentence, of shape `(batch,)`, after each
            step; only for `num_beams=1`. `generate()` of other libraries' models doesn't pass it on, so bind it, too:
            `model.generate(..., streamer=streamer, custom_generate=partial(beam_search, streamer=streamer))`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): For `stop_strings`, of which `generate()` makes a criterion.
        step_graphs (`StepGraphs`, *optional*): Captures the steps of the faster search as CUDA graphs and replays
            them, in this search and later ones. Other models and options than the faster search's don't use it.
        synced_gpus (`bool`, *optional*): Whether to take steps until all processes have finished, which those that
            share a model must; by default as in `generate()`. That of other libraries' models doesn't pass it on.
        fills_cache (`bool`, defaults to `False`): Whether to use the cache among the model's inputs, as the plain
            search does. `generate()` sets it where the cache is yours; that of other libraries' models need not.
        **model_kwargs: The model's inputs as prepared by `generate()`: `encoder_outputs`, `attention_mask` and so on.

    Returns:
        `torch.LongTensor` of shape `(batch * num_return_sequences, tgt_len)`: the sequences, best first; or with
        `return_dict_in_generate` a `GenerateBeamEncoderDecoderOutput` or `GenerateBeamDecoderOnlyOutput`, always with
        `sequences_scores`.

    Raises:
        ValueError: if an option is out of its range or of another generation mode, an id is outside the vocabulary,
            a streamer is combined with several beams, `max_length_offset` is given for a decoder-only model, the
            model gives nan, its cache can't follow the beams, or it keeps none, as in training with gradient
            checkpointing, or `step_graphs` are given for a model that is not on a CUDA device.
        TypeError: if ids or numbers of beams are not integers.

    Source: Vaswani et al. 2017, 6.1; Wu et al. 2016, 7.
    """
    if max_length_offset is not None and not model.config.is_encoder_decoder:
        raise ValueError(
            "`max_length_offset` counts from a source, which a decoder-only model does not have; limit the length "
            "with `max_new_tokens` instead."
        )
    if max_length_offset is not None:
        check_integer("max_length_offset", max_length_offset, 0)
    vocab_size = _check_options(model, generation_config, input_ids, streamer)
    penalty = partial(
        length_penalty_of,
        length_penalty=generation_config.length_penalty if length_penalty is None else length_penalty,
        length_penalty_type=length_penalty_type,
    )
    penalty(1)
    options = _Options(generation_config, logits_processor, stopping_criteria, penalty, input_ids, vocab_size)
    limits = _length_limits(input_ids, options, max_length_offset, model_kwargs)
    if max_length_offset is not None:
        options.logits_processor = _with_ends_forced_at(limits, logits_processor, options.num_beams)
    decoder = decoder_for(model, input_ids, generation_config, model_kwargs, fills_cache)
    if step_graphs is not None:
        step_graphs.check(input_ids.device)
        decoder = step_graphs.wrap(decoder) if isinstance(decoder, SideBySideDecoder) else decoder
    record = _Record(options, streamer, len(input_ids))
    if synced_gpus is None:
        synced_gpus = model._extract_generation_mode_kwargs(None, {}, None, None, None)["synced_gpus"]
    # A streamer may change in place what it gets, which inference mode forbids.
    with torch.inference_mode(decoder.can_drop and options.is_bare and streamer is None):
        beams = _Beams.start(input_ids, limits, options)
        finished = _search(model, decoder, beams, options, record, synced_gpus)
    if streamer is not None:
        streamer.end()
    return _output(finished, options, record, decoder, model_kwargs.get("encoder_outputs"))


def _check_options(
    model: PreTrainedModel, config: GenerationConfig, input_ids: torch.Tensor, streamer: "BaseStreamer | None"
) -> int:
    """Raise on options that a search lacks or that are out of range, and return the size of the target vocabulary."""
    if config.do_sample:
        raise ValueError("`do_sample` must be false: `beam_search` doesn't sample. To sample, drop `custom_generate`.")
    for name, off in OTHER_MODES.items():
        given = getattr(config, name, None)
        if given not in off:
            raise ValueError(
                f"`{name}` ({given}) belongs to another generation mode than beam search; drop it, or drop "
                "`custom_generate`."
            )
    text_config = model.config.get_text_config(decoder=True)
    size = getattr(text_config, "decoder_vocab_size", None) or text_config.vocab_size
    check_generation_options(config, size)
    if streamer is not None and config.num_beams > 1:
        raise ValueError(
            f"`streamer` can't be combined with `num_beams` ({config.num_beams}): no token is final before the search "
            "ends. Drop it, or set `num_beams=1`."
        )
    check_input_ids(
        "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids", input_ids[:: config.num_beams], size
    )
    if (
        config.use_cache
        and model.training
        and any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    ):
        raise ValueError(
            "`use_cache` must be false in training mode with gradient checkpointing, which keeps no keys and values; "
            "pass `use_cache=False`, or call `model.eval()`."
        )
    return size


class _Options:
    """The options of one search, in the form that its steps need.

    A search is bare if only suppressed tokens change the log probabilities, only `</s>` or the length ends a sequence,
    and log probabilities are not returned.
    """

    def __init__(
        self,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        penalty: partial,
        input_ids: torch.Tensor,
        vocab_size: int,
    ):
        self.config = generation_config
        self.num_beams: int = generation_config.num_beams
        self.early_stopping = generation_config.early_stopping if self.num_beams > 1 else True
        self.penalty = penalty  # of a length
        self.rewards_length = penalty.keywords["length_penalty"] > 0
        self.prompt_length = input_ids.shape[1]
        # Padding of a history; made once, as creating it synchronizes with an accelerator.
        self.blank = torch.tensor([[_padding(generation_config)], [-1]], device=input_ids.device)  # (2, 1)
        self.logits_processor, self.stopping_criteria = logits_processor, stopping_criteria
        lengths = [criterion.max_length for criterion in stopping_criteria if type(criterion) is MaxLengthCriteria]
        ends = [criterion.eos_token_id for criterion in stopping_criteria if type(criterion) is EosTokenCriteria]
        kind = SuppressTokensLogitsProcessor
        suppressed = [processor.suppress_tokens for processor in logits_processor if type(processor) is kind]
        self.max_length: int = min(lengths, default=generation_config.max_length)
        self.ends = torch.cat([end.flatten() for end in ends]) if ends else None
        # The tensor of an empty list is a floating-point one. As in transformers, ids may be outside the vocabulary.
        self.suppressed = torch.cat([tokens.flatten().long() for tokens in suppressed]) if suppressed else None
        if self.suppressed is not None:
            is_token = (self.suppressed >= 0) & (self.suppressed < vocab_size)
            self.suppressed = self.suppressed[is_token]
        self.only_plain_ends = len(lengths) + len(ends) == len(stopping_criteria)
        shows = generation_config.return_dict_in_generate
        self.shows_scores = bool(shows and generation_config.output_scores)
        self.shows_logits = bool(shows and generation_config.output_logits)
        only_suppressed = len(suppressed) == len(logits_processor)
        self.is_bare = only_suppressed and self.only_plain_ends and not (self.shows_scores or self.shows_logits)

    @property
    def candidates(self) -> int:
        """Number of continuations of a sentence to rank: at least `num_beams` of them don't end."""
        ends = self.config._eos_token_tensor
        return self.num_beams * max(2, 1 + (0 if ends is None else len(ends)))


def _padding(config: GenerationConfig) -> int:
    """Return the padding of finished sequences: as in transformers, of several beams `</s>` if the padding id is 0."""
    if config.num_beams == 1 and config._pad_token_tensor is not None:
        return int(config._pad_token_tensor)
    if config._eos_token_tensor is None or len(config._eos_token_tensor) == 0:
        return -1 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    return int(config._pad_token_tensor or config._eos_token_tensor[0])


def _length_limits(
    input_ids: torch.Tensor, options: _Options, max_length_offset: int | None, model_kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return the maximum length of each sentence's sequences, the prompt included: (batch,)."""
    batch = len(input_ids) // options.num_beams
    limits = torch.full((batch,), options.max_length, device=input_ids.device)
    if max_length_offset is None:
        return limits
    check_source_mask(model_kwargs)
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is None:
        attention_mask = torch.ones_like(model_kwargs["encoder_outputs"][0][..., 0])
    # One row for each sentence or for each beam, depending on the model.
    source_lengths = (attention_mask != 0).sum(1).view(batch, -1)[:, 0]
    return limits.minimum(options.prompt_length + source_lengths + max_length_offset)


class _EndsAtLimits(LogitsProcessor):
    """Forces `</s>` as the last token of each sentence, at a limit of its own."""

    def __init__(self, ends: torch.Tensor, limits: torch.Tensor):
        self.ends, self.limits = ends, limits  # (ends,), (batch * num_beams,)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_last = (self.limits == input_ids.shape[1] + 1)[:, None]
        return torch.where(is_last, torch.full_like(scores, -math.inf).index_fill_(1, self.ends, 0.0), scores)


def _with_ends_forced_at(
    limits: torch.Tensor, logits_processor: LogitsProcessorList, num_beams: int
) -> LogitsProcessorList:
    """Replace the processor of `forced_eos_token_id`, whose limit is that of the batch, for limits (batch,)."""
    rows = limits.repeat_interleave(num_beams)
    kind = ForcedEOSTokenLogitsProcessor
    return LogitsProcessorList(
        _EndsAtLimits(each.eos_token_id, rows) if type(each) is kind else each for each in logits_processor
    )


@dataclass
class _Beams:
    """The beams and the hypotheses of some sentences.

    A history has two rows: the tokens, and for each generated token the beam that it was appended to (else -1).
    """

    sentences: torch.Tensor  # (batch,), their indices in the whole batch
    histories: torch.Tensor  # (batch, num_beams, 2, length)
    scores: torch.Tensor  # (batch, num_beams), sums of log probabilities, highest first
    hypotheses: torch.Tensor  # (batch, num_beams, 2, length)
    hypothesis_scores: torch.Tensor  # (batch, num_beams), with the penalty, highest first
    limits: torch.Tensor  # (batch,), the length at which every sequence ends
    is_open: torch.Tensor  # (batch,), false where no hypothesis can improve

    @classmethod
    def start(cls, input_ids: torch.Tensor, limits: torch.Tensor, options: _Options) -> "_Beams":
        """Start all beams of a sentence with the same prompt; only the first one has a finite score."""
        prompts = input_ids.unflatten(0, (-1, options.num_beams))  # (batch, num_beams, length)
        histories = torch.stack((prompts, torch.full_like(prompts, -1)), dim=2)  # (batch, num_beams, 2, length)
        scores = torch.full(prompts.shape[:2], -math.inf, dtype=torch.float32, device=prompts.device)
        scores[:, 0] = 0.0
        not_found = torch.full_like(scores, NOT_FOUND)
        sentences = torch.arange(len(prompts), device=prompts.device)
        is_open = torch.ones_like(sentences, dtype=torch.bool)
        return cls(sentences, histories, scores, histories, not_found, limits, is_open)

    @property
    def length(self) -> int:
        """Number of tokens of a beam, the prompt included."""
        return self.histories.shape[-1]

    @property
    def sequences(self) -> torch.Tensor:
        """The tokens of the beams: (batch, num_beams, length)."""
        return self.histories[:, :, 0]

    @property
    def parents(self) -> torch.Tensor:
        """The beam that each beam's last token was appended to: (batch, num_beams)."""
        return self.histories[:, :, 1, -1]

    def select(self, chosen: torch.Tensor) -> "_Beams":
        """Select some of the sentences."""
        return _Beams(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


def _search(
    model: PreTrainedModel, decoder: BeamDecoder, beams: _Beams, options: _Options, record: "_Record", is_synced: bool
) -> list[_Beams]:
    """Search until no sentence can improve. Return all sentences, in groups that finished together.

    An accelerator is waited for every few steps, to read the number of open sentences; the decoder sometimes does so,
    too. Steps after the last sentence is finished change no hypothesis; `is_synced` takes them while other processes
    have open sentences, with all sentences, and asks the others at every step.
    """
    finished: list[_Beams] = []
    is_free = options.is_bare and not is_synced
    is_accelerated = beams.scores.device.type != "cpu" and is_free and record.streamer is None
    between_checks = STEPS_BETWEEN_CHECKS_OF_ACCELERATORS if is_accelerated else STEPS_BETWEEN_CHECKS
    logits = decoder.start()
    for step in itertools.count(1):
        log_probs, normalizers = _log_probs(logits, beams, options, record)
        scores = beams.scores[:, : log_probs.shape[1]]
        _advance(beams, best_continuations(log_probs, normalizers, scores, options.candidates), options, record)
        record.stream(beams)
        if step % between_checks == 0 or beams.length >= options.max_length:
            is_open = beams.is_open
            closed = len(is_open) - int(is_open.sum())
            if not model._has_unfinished_sequences(closed == len(is_open), is_synced, is_open.device):
                break
            if decoder.can_drop and is_free and closed >= len(is_open) * DROPPED_SHARE:
                order = is_open.byte().argsort(stable=True)  # indices, as a boolean mask would synchronize
                finished.append(beams.select(order[:closed]))
                beams = beams.select(order[closed:])
                decoder.keep(order[closed:])
        logits = decoder.step(beams.sequences, beams.parents)
    return [*finished, beams]


def _log_probs(
    logits: torch.Tensor, beams: _Beams, options: _Options, record: "_Record"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert logits (batch, rows, vocab) to log probabilities plus normalizers (batch, rows), which may be 0."""
    if options.is_bare:
        normalizers = log_sum_exp(logits)
        if options.suppressed is not None:
            logits.index_fill_(-1, options.suppressed, -math.inf)
        return logits, normalizers
    logits = logits.float().expand(-1, options.num_beams, -1)
    flat = logits.flatten(0, 1)  # (batch * num_beams, vocab)
    log_probs = options.logits_processor(beams.sequences.flatten(0, 1), nn.functional.log_softmax(flat, dim=-1))
    record.add(flat, log_probs)
    log_probs = log_probs.view_as(logits)
    return log_probs, log_probs.new_zeros(log_probs.shape[:2])


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Compute log(sum(exp(logits))) over the vocabulary.

    A few rows at a time fit into the processor's cache, while `torch.logsumexp` allocates several times the memory of
    all logits. Powers of 2 are cheaper than powers of e.

    Args:
        logits (`torch.Tensor` of shape `(..., vocab)`): The logits, of any floating point type.

    Returns:
        `torch.Tensor` of shape `(...)`: the result in float32.
    """
    log2_e, sums = math.log2(math.e), []
    block_size = BLOCK_SIZE if logits.device.type == "cpu" else CHUNK_LOGITS
    for rows in logits.flatten(0, -2).split(max(1, block_size // logits.shape[-1])):
        rows = rows.float()
        highest = rows.amax(-1, keepdim=True)
        powers = torch.add(highest * -log2_e, rows, alpha=log2_e).exp2_()
        sums.append(powers.sum(-1).log_().add_(highest[:, 0]))
    return torch.cat(sums).view(logits.shape[:-1])


def best_continuations(
    log_probs: torch.Tensor, normalizers: torch.Tensor, scores: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the best continuations of the beams of each sentence.

    The `count` best tokens are in the `count` runs of tokens with the highest maxima, so only these are searched.

    Args:
        log_probs (`torch.Tensor` of shape `(batch, rows, vocab)`): Log probabilities plus `normalizers`.
        normalizers (`torch.Tensor` of shape `(batch, rows)`): Normalizers to subtract.
        scores (`torch.Tensor` of shape `(batch, rows)`): Log probabilities of the beams.
        count (`int`): Number of continuations.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: the scores, highest first, the beams and the tokens, all of
        shape `(batch, count)`. If fewer continuations exist, the other scores are -inf.
    """
    rows, vocab = log_probs.shape[1:]
    whole_runs = vocab // RUN_LENGTH
    end_of_whole = whole_runs * RUN_LENGTH
    best_of_runs = log_probs[..., :end_of_whole].unflatten(-1, (whole_runs, RUN_LENGTH)).amax(-1)
    if end_of_whole < vocab:
        best_of_rest = log_probs[..., end_of_whole:].amax(-1, keepdim=True)
        best_of_runs = torch.cat((best_of_runs, best_of_rest), dim=-1)  # (batch, rows, runs)
    runs = best_of_runs.shape[-1]
    best_of_runs = best_of_runs - normalizers[..., None] + scores[..., None]
    chosen = best_of_runs.flatten(1).topk(min(count, rows * runs), sorted=False).indices  # (batch, chosen)
    beams, first = chosen // runs, chosen % runs * RUN_LENGTH

    tokens = first[..., None] + torch.arange(RUN_LENGTH, device=first.device)  # (batch, chosen, RUN_LENGTH)
    places = (beams[..., None] * vocab + tokens.clamp(max=vocab - 1)).flatten(1)
    found = log_probs.flatten(1).gather(1, places).view_as(tokens)
    found = found - normalizers.gather(1, beams)[..., None] + scores.gather(1, beams)[..., None]
    found = found.masked_fill(tokens >= vocab, -math.inf).flatten(1)  # (batch, chosen * RUN_LENGTH)
    best, indices = found.topk(min(count, found.shape[1]))  # (batch, count)
    beams, tokens = beams.gather(1, indices // RUN_LENGTH), tokens.flatten(1).gather(1, indices)
    missing = (0, count - best.shape[1])
    return (
        nn.functional.pad(best, missing, value=-math.inf),
        nn.functional.pad(beams, missing),
        nn.functional.pad(tokens.clamp(max=vocab - 1), missing),
    )


def _advance(
    beams: _Beams, continuations: tuple[torch.Tensor, torch.Tensor, torch.Tensor], options: _Options, record: "_Record"
) -> None:
    """Append a token to the beams: the best finished continuations become hypotheses, the best others continue."""
    scores, parents, tokens = continuations  # (batch, candidates)
    if not options.is_bare:
        parents, tokens = _best_for_missing(scores, parents), _best_for_missing(scores, tokens)
    sentences = torch.arange(len(scores), device=scores.device)[:, None]
    new = torch.stack((tokens, parents), dim=-1)[..., None]  # (batch, candidates, 2, 1)
    histories = torch.cat((beams.histories[sentences, parents], new), dim=-1)  # (batch, candidates, 2, length + 1)
    has_ended = _has_ended(histories[:, :, 0], beams.limits, options, record)
    num_beams = options.num_beams
    _add_hypotheses(beams, histories[:, :num_beams], scores[:, :num_beams], has_ended[:, :num_beams], options)
    beams.scores, continued = scores.masked_fill(has_ended, -math.inf).topk(num_beams)
    if not options.is_bare:
        continued = _best_for_missing(beams.scores, continued)
    beams.histories = histories[sentences, continued]
    beams.is_open = beams.is_open & _can_improve(beams, options)


def _best_for_missing(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Put the best one in place of missing ones: constraints may fail on sequences that they never allowed."""
    return torch.where(scores.isneginf(), values[:, :1], values)


def _has_ended(sequences: torch.Tensor, limits: torch.Tensor, options: _Options, record: "_Record") -> torch.Tensor:
    """Return whether each sequence of (batch, candidates, length) ends with its last token."""
    has_ended = (limits <= sequences.shape[-1])[:, None].expand(sequences.shape[:2])
    if not options.only_plain_ends:
        ended_by_criteria = options.stopping_criteria(sequences.flatten(0, 1), record.scores)
        return has_ended | ended_by_criteria.unflatten(0, sequences.shape[:2])
    if options.ends is None:
        return has_ended
    return has_ended | (sequences[..., -1:] == options.ends).any(-1)


def _add_hypotheses(
    beams: _Beams, histories: torch.Tensor, scores: torch.Tensor, has_ended: torch.Tensor, options: _Options
) -> None:
    """Keep the best `num_beams` of previous hypotheses and of those of (batch, num_beams) that have just ended."""
    length = histories.shape[-1] - options.prompt_length
    counts = has_ended & beams.is_open[:, None]
    scores = (scores / options.penalty(length)).masked_fill(~counts, -math.inf)
    blank = options.blank.expand(*histories.shape[:3], 1)
    histories = torch.cat((torch.cat((beams.hypotheses, blank), dim=-1), histories), dim=1)
    beams.hypothesis_scores, best = torch.cat((beams.hypothesis_scores, scores), dim=1).topk(options.num_beams)
    beams.hypotheses = histories[torch.arange(len(scores), device=scores.device)[:, None], best]


def _can_improve(beams: _Beams, options: _Options) -> torch.Tensor:
    """Return whether the best beam may still beat the worst hypothesis of its sentence: (batch,).

    The bound is transformers': with `early_stopping="never"` the highest score that the beam can reach, otherwise its
    score at the current length, a heuristic. With `early_stopping=True` the first `num_beams` hypotheses are final.
    """
    length: int | torch.Tensor = beams.length - options.prompt_length
    if options.early_stopping == "never" and options.rewards_length:
        length = beams.limits - options.prompt_length
    worst = beams.hypothesis_scores[:, -1]
    can_improve = beams.scores[:, 0] / options.penalty(length) > worst
    if options.early_stopping is True:
        can_improve = can_improve & (worst == NOT_FOUND)
    return can_improve


class _Record:
    """Collects what `generate()` returns of every step, and streams tokens."""

    def __init__(self, options: _Options, streamer: "BaseStreamer | None", batch: int):
        self.streamer = streamer
        self.padding = options.blank[0].expand(batch)
        self.scores: tuple[torch.Tensor, ...] | None = () if options.shows_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if options.shows_logits else None

    def add(self, logits: torch.Tensor, log_probs: torch.Tensor) -> None:
        """Record one step: (batch * num_beams, vocab) each."""
        if self.logits is not None:
            self.logits += (logits.clone(),)
        if self.scores is not None:
            self.scores += (log_probs.clone(),)

    def stream(self, beams: _Beams) -> None:
        """Stream the newest token of each sentence, or padding if it finished before."""
        if self.streamer is None:
            return
        newest = torch.where(beams.is_open, beams.sequences[:, 0, -1], beams.hypotheses[:, 0, 0, -1])
        self.streamer.put(self.padding.scatter(0, beams.sentences, newest).cpu())  # (batch,)


def _output(
    finished: list[_Beams],
    options: _Options,
    record: _Record,
    decoder: BeamDecoder,
    encoder_outputs: ModelOutput | None,
) -> SearchOutput | torch.Tensor:
    """Return the best hypotheses of all sentences in the output format of `generate()`."""
    config, prompt_length = options.config, options.prompt_length
    check_not_nan(torch.cat([each for beams in finished for each in (beams.scores, beams.hypothesis_scores)]))
    length = max(beams.length for beams in finished)
    count = sum(len(beams.sentences) for beams in finished)
    histories = options.blank.repeat(count, config.num_return_sequences, 1, length)  # (batch, returned, 2, length)
    scores = finished[0].hypothesis_scores.new_empty(histories.shape[:2])
    for beams in finished:
        histories[beams.sentences, :, :, : beams.length] = beams.hypotheses[:, : config.num_return_sequences]
        scores[beams.sentences] = beams.hypothesis_scores[:, : config.num_return_sequences]
    sequences, parents = histories.flatten(0, 1).unbind(1)  # (batch * returned, length)
    parents = parents[:, prompt_length:]
    generated = int((parents >= 0).sum(-1).max()) if count else 0
    sequences, parents = sequences[:, : prompt_length + generated], parents[:, :generated]
    if not config.return_dict_in_generate:
        return sequences
    first_row = options.num_beams * torch.arange(count, device=parents.device)
    first_row = first_row.repeat_interleave(config.num_return_sequences)[:, None]
    fields: dict[str, Any] = {
        "sequences": sequences,
        "sequences_scores": scores.flatten(),
        "scores": record.scores,
        "logits": record.logits,
        "beam_indices": torch.where(parents >= 0, parents + first_row, parents).int(),
        CACHE_NAME: decoder.past_key_values,
        **decoder.recorded,
    }
    if encoder_outputs is None:
        return GenerateBeamDecoderOnlyOutput(**fields)
    return GenerateBeamEncoderDecoderOutput(
        **fields,
        encoder_attentions=encoder_outputs.get("attentions") if config.output_attentions else None,
        encoder_hidden_states=encoder_outputs.get("hidden_states") if config.output_hidden_states else None,
    )


__all__ = ["beam_search", "best_continuations", "log_sum_exp"]
