#!/usr/bin/env python
"""Score translations against references with BLEU, chrF, TER or COMET, and record how they were made.

    python scripts/evaluate_translation.py --hypotheses out.de --references test.de

For tokenized and lower-cased text, as in many papers: --bleu_tokenize none --lowercase. Other scores, with 95 %
confidence intervals: --metrics bleu chrf chrf++ ter --bootstrap_samples 1000. With the translations of another system
(--baseline) the difference of the two is tested by paired bootstrap resampling. COMET needs the package unbabel-comet:
--metrics bleu comet --sources test.en; it is computed without intervals, tests and lower-casing.
With --output_file the scores are written to a JSON file, together with versions, machine and its speed and, if given,
the commands that made the translations (--commands) and further facts (--notes).
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("evaluate_translation")

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hf_vanilla.command_line.checks import check_results_file
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.command_line.report import describe_measured_environment
from hf_vanilla.data.files import STANDARD_STREAM, read_lines, replacing_file
from hf_vanilla.metrics import comet_score, corpus_scores
from hf_vanilla.metrics.bleu import check_tokenize
from hf_vanilla.metrics.corpus_scores import SACREBLEU_SCORES


METRICS = (*SACREBLEU_SCORES, "comet")
# The metrics that an option changes.
AFFECTED = {
    "baseline": {*SACREBLEU_SCORES},
    "bootstrap_samples": {*SACREBLEU_SCORES},
    "lowercase": {*SACREBLEU_SCORES} - {"ter"},
}


@dataclass
class EvaluationArguments:
    """Input, output and settings of the metrics."""

    hypotheses: str = field(metadata={"help": "Text file, one translation per line."})
    references: str = field(metadata={"help": "Text file, one reference per line."})
    metrics: list[str] = field(
        default_factory=lambda: ["bleu", "chrf"], metadata={"help": f"The scores, of {', '.join(METRICS)}."}
    )
    bleu_tokenize: Literal[
        "13a", "zh", "none", "char", "intl", "ja-mecab", "ko-mecab", "flores101", "flores200", "spBLEU-1K"
    ] = field(
        default="13a", metadata={"help": "sacreBLEU's tokenizer for BLEU; some need a package, which is named then."}
    )
    tokenize: str | None = field(default=None, metadata={"help": "Earlier name of bleu_tokenize."})
    bootstrap_samples: int = field(
        default=0,
        metadata={
            "help": "Resampled texts for confidence intervals, at least 2; not for COMET. Default: none; 1000 with a "
            "baseline."
        },
    )
    baseline: str | None = field(
        default=None,
        metadata={"help": "Text file with the translations of another system, to compare with; not for COMET."},
    )
    sources: str | None = field(default=None, metadata={"help": "Text file with the translated lines, for COMET."})
    lowercase: bool = field(
        default=False,
        metadata={"help": "Ignore case in BLEU and chrF. TER always does, as by default in sacreBLEU; COMET never."},
    )
    output_file: str | None = field(default=None, metadata={"help": "JSON file to write the result to."})
    commands: list[str] = field(default_factory=list, metadata={"help": "The commands that made the translations."})
    notes: list[str] = field(default_factory=list, metadata={"help": "Further facts, each as name=value."})

    def __post_init__(self):
        for name in self.metrics:
            if name not in METRICS:
                raise ValueError(f"`metrics` must be among {', '.join(METRICS)}; got {name!r}.")
        for note in self.notes:
            if "=" not in note:
                raise ValueError(f"`notes` must be of the form name=value, got {note!r}.")
        if self.tokenize is not None:
            if self.bleu_tokenize not in ("13a", self.tokenize):
                raise ValueError(
                    f"`bleu_tokenize` ({self.bleu_tokenize}) and `tokenize` ({self.tokenize}), its earlier name, "
                    "differ; leave the second out."
                )
            self.bleu_tokenize = self.tokenize  # type: ignore[assignment]
        if self.bleu_tokenize != "13a" and "bleu" not in self.metrics:
            raise ValueError(f"`bleu_tokenize` has no effect on {', '.join(self.metrics)}; leave it out, or add bleu.")
        for name, metrics in AFFECTED.items():
            if getattr(self, name) and not metrics.intersection(self.metrics):
                raise ValueError(
                    f"`{name}` has no effect on {', '.join(self.metrics)}; leave it out, or add --metrics bleu."
                )
        if self.baseline is not None and self.bootstrap_samples == 0:
            self.bootstrap_samples = 1000
        if ("comet" in self.metrics) != (self.sources is not None):
            rule = "is missing; COMET needs the translated text, as in --sources test.en"
            raise ValueError(f"`sources` {rule if self.sources is None else 'is for --metrics comet; leave it out'}.")
        inputs = {name: getattr(self, name) for name in ("hypotheses", "references", "baseline", "sources")}
        if list(inputs.values()).count(STANDARD_STREAM) > 1:
            raise ValueError("Only one of `hypotheses`, `references`, `baseline` and `sources` can be standard input.")
        check_results_file(self.output_file, "output_file", **inputs)
        check_tokenize(self.bleu_tokenize)


def main() -> None:
    """Score, print and write the result."""
    (arguments,) = parse_arguments(EvaluationArguments, description=__doc__)
    hypotheses, references = read_lines(arguments.hypotheses), read_lines(arguments.references)
    baseline, sources = (
        None if path is None else read_lines(path) for path in (arguments.baseline, arguments.sources)
    )
    for name, lines in (("hypotheses", hypotheses), ("baseline", baseline), ("sources", sources)):
        if lines is not None and len(lines) != len(references):
            raise ValueError(
                f"`{name}` and `references` must have equally many lines, but {getattr(arguments, name)} has "
                f"{len(lines)} and {arguments.references} has {len(references)}; line N of one belongs to line N of "
                "the other."
            )
    if not hypotheses:
        raise ValueError(f"`hypotheses` must have at least one line, but {arguments.hypotheses} is empty.")
    scores = corpus_scores(
        hypotheses,
        references,
        metrics=[name for name in arguments.metrics if name != "comet"],
        tokenize=arguments.bleu_tokenize,
        lowercase=arguments.lowercase,
        bootstrap_samples=arguments.bootstrap_samples,
        baseline=baseline,
    )
    if "comet" in arguments.metrics and sources is not None:
        scores |= comet_score(sources, hypotheses, references)
    result = {
        **scores,
        "sentences": len(hypotheses),
        "notes": dict(note.split("=", 1) for note in arguments.notes),
        "commands": arguments.commands,
        **describe_measured_environment("sacrebleu"),
    }
    text = json.dumps(result, indent=2, ensure_ascii=False)
    print(text)
    if arguments.output_file is not None:
        Path(arguments.output_file).absolute().parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(arguments.output_file) as file:
            file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(run(main))
