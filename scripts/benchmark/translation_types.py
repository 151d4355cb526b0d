#!/usr/bin/env python
r"""What lower precision costs a trained translator: BLEU and changed translations, beside those of CTranslate2.

A trained model translates all sentences of a file with our beam search, in float32, bfloat16 and int8 (linear maps of
8-bit integers, float32 for all else), and with CTranslate2, converted, in each of these that it has here. The searches
differ in their length penalties: ours is (5 + length) / 6 to the power of 0.6, CTranslate2's length to the same power.
So each type is compared with float32 of the same search. Without CTranslate2 its rows are left out.

    python scripts/benchmark/translation_types.py --model runs/en-de --parallel_file test.jsonl --columns en de
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from measuring import BenchmarkArguments, ctranslate2_is_installed, prepare, sentence_pairs, write_results

from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.generation import load_translator, translate
from hf_vanilla.generation.export import to_ctranslate2
from hf_vanilla.metrics import corpus_scores


LENGTH_PENALTY = 0.6
LENGTH_OFFSET = 50
TYPES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8_float32"}  # ours and CTranslate2's names


@dataclass
class TypesArguments(BenchmarkArguments):
    """Options of this comparison."""

    model: str | None = field(default=None, metadata={"help": "Folder of a trained translator."})
    parallel_file: str | None = field(default=None, metadata={"help": "Pairs: JSON lines, CSV or Parquet."})
    columns: list[str] = field(default_factory=lambda: ["source", "target"], metadata={"help": "Its two columns."})
    sentences: int = field(default=1000, metadata={"help": "Number of sentences."})
    num_beams: int = field(default=4, metadata={"help": "Beams of both searches; 1 is greedy search."})
    bleu_tokenize: str = field(default="13a", metadata={"help": "sacreBLEU's tokenizer for BLEU."})
    lowercase: bool = field(default=False, metadata={"help": "Ignore case."})


def by_ctranslate2(arguments: TypesArguments, texts: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Translate with CTranslate2 in each type: the name of each and its translations."""
    import ctranslate2

    model, *tokenizers = load_translator(str(arguments.model), dtype="float32")
    tokens = [tokenizers[0].convert_ids_to_tokens(ids) for ids in tokenizers[0](texts)["input_ids"]]
    with tempfile.TemporaryDirectory() as folder:
        to_ctranslate2(model, tokenizers[0], tokenizers[1]).save(folder)
        for name in TYPES:
            if TYPES[name] not in ctranslate2.get_supported_compute_types("cpu"):
                continue
            translator = ctranslate2.Translator(folder, compute_type=TYPES[name], intra_threads=arguments.threads)
            results = translator.translate_batch(
                tokens,
                max_batch_size=2048,
                batch_type="tokens",
                beam_size=arguments.num_beams,
                length_penalty=LENGTH_PENALTY,
                max_decoding_length=max(map(len, tokens)) + LENGTH_OFFSET,
            )
            ids = [tokenizers[1].convert_tokens_to_ids(each.hypotheses[0]) for each in results]
            yield f"CTranslate2, {name}", tokenizers[1].batch_decode(ids, skip_special_tokens=True)


def by_ours(arguments: TypesArguments, texts: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Translate with our search in each type: the name of each and its translations."""
    for name in TYPES:
        model, tokenizer, target_tokenizer = load_translator(str(arguments.model), dtype=name)
        found = translate(
            model,
            tokenizer,
            texts,
            target_tokenizer=target_tokenizer,
            num_beams=arguments.num_beams,
            length_penalty=LENGTH_PENALTY,
            max_length_offset=LENGTH_OFFSET,
        )
        yield f"ours, {name}", [row[0].text for row in found]


def main() -> None:
    """Translate in all types with both searches, score, compare, report."""
    (arguments,) = parse_arguments(TypesArguments, description=__doc__)
    prepare(arguments)
    for name in ("model", "parallel_file"):
        if getattr(arguments, name) is None:
            raise ValueError(f"--{name} must be given.")
    arguments.repeats = 1  # nothing is timed
    count = 20 if arguments.quick else arguments.sentences
    pairs = sentence_pairs(arguments.parallel_file, arguments.columns, count)
    found = dict(by_ours(arguments, pairs["source"]))
    if ctranslate2_is_installed():
        found |= by_ctranslate2(arguments, pairs["source"])
    rows: dict[str, dict[str, float]] = {}
    for name, translations in found.items():
        scores = corpus_scores(
            translations,
            pairs["target"],
            metrics=["bleu"],
            tokenize=arguments.bleu_tokenize,
            lowercase=arguments.lowercase,
        )
        exact = found[f"{name.split(',')[0]}, float32"]
        changed = sum(one != other for one, other in zip(translations, exact, strict=True))
        rows[name] = {"bleu": scores["bleu"], "translations_that_differ_from_float32": changed}
        print(f"{name}: BLEU {scores['bleu']:.2f}, {changed} of {len(exact)} translations are not those of float32")
    write_results(
        arguments,
        f"beam-{arguments.num_beams} translation of {len(pairs['source'])} sentences in several types",
        types=rows,
        settings={
            "bleu_signature": scores["bleu_signature"],
            "num_beams": arguments.num_beams,
            "length_penalty": LENGTH_PENALTY,
            "model": arguments.model,
            "text": arguments.parallel_file,
        },
    )


if __name__ == "__main__":
    sys.exit(run(main))
