#!/usr/bin/env python
r"""The baseline of a language model: a 5-gram model with modified Kneser-Ney smoothing, of the same text and tokens.

    python scripts/benchmark/ngram_baseline.py --kenlm kenlm/build/bin --tokenizer runs/gpt \
        --train_files encyclopedia.jsonl.gz novels.txt --files held_out.jsonl.gz --output_file ngram.json

KenLM (Heafield et al. 2013, https://github.com/kpu/kenlm) estimates the model with `lmplz` and scores with `query`;
--kenlm is the folder of both. A document is one sentence to it, so that its <s> and </s> are the end-of-text tokens
before and after a document. Perplexity per word and bits per byte are those of scripts/evaluate_gpt.py.
"""

import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import run_child
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_vanilla.command_line.checks import check_files_exist, check_models, check_results_file
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.command_line.report import write_report
from hf_vanilla.data import load_documents
from hf_vanilla.metrics.perplexity import corpus_scores, encode_documents


DOCUMENTS_AT_ONCE = 500
NATS_PER_DECADE = 2.302585092994046


@dataclass
class BaselineArguments:
    """The programs, the text and the report."""

    kenlm: str = field(metadata={"help": "Folder with KenLM's programs lmplz and query."})
    tokenizer: str = field(metadata={"help": "Folder or Hub name of the tokenizer."})
    train_files: list[str] = field(
        metadata={"help": "Documents to count in: .jsonl, .json, .csv, .tsv or plain text, also as .gz; .parquet."}
    )
    files: list[str] = field(metadata={"help": "Documents to score."})
    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    order: int = field(default=5, metadata={"help": "Tokens of the longest n-gram."})
    memory: str = field(default="2G", metadata={"help": "Memory of lmplz for sorting."})
    output_file: str = field(
        default="benchmark_output/ngram_baseline.json", metadata={"help": "JSON file of results."}
    )

    def __post_init__(self) -> None:
        for program in ("lmplz", "query"):
            if not (Path(self.kenlm) / program).is_file():
                raise ValueError(f"`kenlm` must be a folder with KenLM's programs, but {self.kenlm} has no {program}.")
        if self.order < 2:
            raise ValueError(f"`order` must be at least 2, got {self.order}.")


def write_tokens(path: Path, texts: list[str], tokenizer: PreTrainedTokenizerBase) -> int:
    """Write the ids of each document on a line, and return the number of tokens, ends of documents included."""
    count = 0
    with path.open("w", encoding="ascii") as file:
        for start in range(0, len(texts), DOCUMENTS_AT_ONCE):
            for ids in encode_documents(tokenizer, texts[start : start + DOCUMENTS_AT_ONCE]):
                file.write(" ".join(map(str, ids[1:-1])) + "\n")
                count += len(ids) - 1
    return count


def total_nats(lines: Iterable[str]) -> float:
    """Add up -log p of the sentences in the output of `query -v sentence`."""
    totals = [re.match(r"Total: (-?[\d.e+-]+|-inf)", line) for line in lines]
    return -NATS_PER_DECADE * sum(float(found[1]) for found in totals if found)


def score_files(arguments: BaselineArguments) -> dict[str, Any]:
    """Estimate the model, and return the scores of each file."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    programs = Path(arguments.kenlm)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = load_documents(data_files=arguments.train_files, text_column=arguments.text_column)["text"][:]
        trained = write_tokens(folder / "train", texts, tokenizer)
        estimate = [str(programs / "lmplz"), "-o", str(arguments.order), "-S", arguments.memory]
        with (folder / "train").open() as source, (folder / "model").open("w") as target:
            run_child([*estimate, "-T", str(folder / "sorting")], source, target)
        files = {}
        for path in arguments.files:
            texts = load_documents(data_files=[path], text_column=arguments.text_column)["text"][:]
            tokens = write_tokens(folder / "test", texts, tokenizer)
            with (folder / "test").open() as source:
                answer = run_child([str(programs / "query"), "-v", "sentence", str(folder / "model")], source)
            scores = corpus_scores(total_nats(answer.splitlines()), tokens, texts)
            files[path] = {name: round(value, 4) for name, value in scores.items()}
    smoothing = f"{arguments.order}-gram, modified Kneser-Ney, interpolated, unpruned (KenLM)"
    return {"model": smoothing, "vocabulary": len(tokenizer), "training_tokens": trained, "files": files}


def main() -> None:
    """Check the options, estimate, score, report."""
    (arguments,) = parse_arguments(BaselineArguments, description=__doc__)
    check_files_exist(train_files=arguments.train_files, files=arguments.files)
    check_models(tokenizer=arguments.tokenizer)
    check_results_file(arguments.output_file)
    report = score_files(arguments)
    for path, scores in report["files"].items():
        print(
            f"{path}: perplexity {scores['perplexity_per_word']:.2f} a word, {scores['bits_per_byte']:.4f} bits a byte"
        )
    write_report(arguments.output_file, report)


if __name__ == "__main__":
    sys.exit(run(main))
