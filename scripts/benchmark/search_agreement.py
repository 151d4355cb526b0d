#!/usr/bin/env python
r"""The fast beam search against transformers' own: how many hypotheses differ, and by how much their scores differ.

A trained model translates all sentences of a file twice, in the same batches: with plain `generate()`, and with
`custom_generate=beam_search` on the model with packed weights. In float32 the results must be the same; in bfloat16,
where the order of sums changes their rounding, each is compared with float32 too. With `--num_beams 1` both searches
are greedy.

    python scripts/benchmark/search_agreement.py --model runs/en-de --source_file test.jsonl --source_column en
"""

import sys
from dataclasses import dataclass, field

import torch
from measuring import FOLDER, BenchmarkArguments, device, prepare, write_results
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data import load_documents
from hf_vanilla.generation import beam_search, fast_model, load_translator
from hf_vanilla.models.text_batches import batches_by_length, padded


LENGTH_PENALTY = 0.6
LENGTH_OFFSET = 50

# The token ids of a translation, and its score.
Hypothesis = tuple[list[int], float]


@dataclass
class AgreementArguments(BenchmarkArguments):
    """Options of this comparison."""

    model: str | None = field(default=None, metadata={"help": "Folder of a trained translator."})
    source_file: str | None = field(default=None, metadata={"help": "Sentences: JSON lines, CSV, Parquet or text."})
    source_column: str = field(default="text", metadata={"help": "Its column."})
    num_beams: int = field(default=4, metadata={"help": "Beams of both searches; 1 is greedy search."})
    max_tokens_per_batch: int = field(default=2048, metadata={"help": "Source tokens of a batch."})


def best_hypotheses(
    model: PreTrainedModel, sources: list[list[int]], max_tokens_per_batch: int, num_beams: int, is_fast: bool
) -> list[Hypothesis]:
    """Translate with one of the searches, and return the best hypothesis of each source without padding."""
    found: list[Hypothesis] = [([], 0.0)] * len(sources)
    searcher = fast_model(model, sum(map(len, sources))) if is_fast else model
    end = model.generation_config.eos_token_id
    for places in tqdm(batches_by_length([len(each) for each in sources], max_tokens_per_batch), unit="batch"):
        batch = [sources[place] for place in places]
        outputs = searcher.generate(
            input_ids=padded(batch, model.config.pad_token_id, model.device),
            attention_mask=padded([[1] * len(each) for each in batch], 0, model.device),
            num_beams=num_beams,
            do_sample=False,
            length_penalty=LENGTH_PENALTY,
            max_new_tokens=max(map(len, batch)) + LENGTH_OFFSET,
            return_dict_in_generate=True,
            output_scores=not is_fast and num_beams > 1,  # transformers needs it for sequence scores
            output_logits=not is_fast and num_beams == 1,
            **({"custom_generate": beam_search} if is_fast else {}),
        )
        if "sequences_scores" in outputs:
            scores = outputs.sequences_scores.tolist()
        else:
            scores = greedy_scores(model, outputs.sequences, outputs.logits, end)
        for place, sequence, score in zip(places, outputs.sequences[:, 1:].tolist(), scores, strict=True):
            found[place] = (sequence[: sequence.index(end)] if end in sequence else sequence, score)
    return found


def greedy_scores(
    model: PreTrainedModel, sequences: torch.Tensor, logits: tuple[torch.Tensor, ...], end: int
) -> list[float]:
    """Score the results of transformers' greedy search like beams: log probability over length^LENGTH_PENALTY."""
    of_tokens = model.compute_transition_scores(sequences, logits, normalize_logits=True)  # (sentences, tgt_len)
    is_end = sequences[:, -of_tokens.shape[1] :] == end
    is_padding = is_end.cumsum(dim=1) > is_end.long()
    lengths = (~is_padding).sum(dim=1)
    return (of_tokens.masked_fill(is_padding, 0.0).sum(dim=1) / lengths**LENGTH_PENALTY).tolist()


def difference(one: list[Hypothesis], other: list[Hypothesis]) -> dict[str, float]:
    """Count the hypotheses that differ, and find the largest difference of scores."""
    pairs = list(zip(one, other, strict=True))
    return {
        "hypotheses_that_differ": sum(tokens != other_tokens for (tokens, _), (other_tokens, _) in pairs),
        "largest_score_difference": float(
            f"{max(abs(score - other_score) for (_, score), (_, other_score) in pairs):.3g}"
        ),
    }


def main() -> None:
    """Translate in both dtypes with both searches, compare, report."""
    (arguments,) = parse_arguments(AgreementArguments, description=__doc__)
    arguments.output_file = arguments.output_file or str(FOLDER / f"search_agreement_beam_{arguments.num_beams}.json")
    prepare(arguments)
    for name, value in (("model", arguments.model), ("source_file", arguments.source_file)):
        if value is None:
            raise ValueError(f"--{name} must be given.")
    arguments.repeats = 1  # nothing is timed
    sentences = load_documents(data_files=[arguments.source_file], text_column=arguments.source_column)["text"][:]
    sentences = sentences[:20] if arguments.quick else sentences
    found: dict[str, list[Hypothesis]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model, tokenizer, _ = load_translator(arguments.model, dtype=dtype, device=device())
        sources = tokenizer(sentences)["input_ids"]
        for side in ("plain", "fast"):
            name = f"{side}, {str(dtype).removeprefix('torch.')}"
            found[name] = best_hypotheses(
                model, sources, arguments.max_tokens_per_batch, arguments.num_beams, side == "fast"
            )
    compared = {
        name: difference(found[one], found[other])
        for name, one, other in (
            ("fast against plain, float32", "fast, float32", "plain, float32"),
            ("fast against plain, bfloat16", "fast, bfloat16", "plain, bfloat16"),
            ("plain in bfloat16 against plain in float32", "plain, bfloat16", "plain, float32"),
            ("fast in bfloat16 against plain in float32", "fast, bfloat16", "plain, float32"),
        )
    }
    for name, figures in compared.items():
        scores = f"scores by at most {figures['largest_score_difference']:g}"
        print(f"{name}: {figures['hypotheses_that_differ']} of {len(sentences)} hypotheses differ, {scores}")
    write_results(
        arguments,
        f"beam-{arguments.num_beams} translation of {len(sentences)} sentences, the fast search against the plain one",
        compared=compared,
        settings={
            "sentences": len(sentences),
            "num_beams": arguments.num_beams,
            "length_penalty": LENGTH_PENALTY,
            "max_tokens_per_batch": arguments.max_tokens_per_batch,
            "model": arguments.model,
            "text": arguments.source_file,
        },
    )


if __name__ == "__main__":
    sys.exit(run(main))
