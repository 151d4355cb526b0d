#!/usr/bin/env python
"""Score translations against references with BLEU and chrF, and record how they were made.

    python scripts/evaluate_translation.py --hypotheses out.de --references test.de

For tokenized and lower-cased text, as in many papers: --tokenize none --lowercase.
With --output_file the scores are written to a JSON file, together with versions, machine and, if given, the commands
that made the translations (--commands) and further facts (--notes).
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("evaluate_translation")

import json
import sys
from dataclasses import dataclass, field
from typing import Literal

from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.command_line.report import describe_environment
from hf_vanilla.data.files import read_lines, replacing_file
from hf_vanilla.metrics import Bleu, ChrF


@dataclass
class EvaluationArguments:
    """Input, output and settings of the metrics."""

    hypotheses: str = field(metadata={"help": "Text file, one translation per line."})
    references: str = field(metadata={"help": "Text file, one reference per line."})
    tokenize: Literal["13a", "zh", "none", "char", "intl"] = field(
        default="13a", metadata={"help": "sacreBLEU's tokenizer."}
    )
    lowercase: bool = field(default=False, metadata={"help": "Ignore case."})
    output_file: str | None = field(default=None, metadata={"help": "JSON file to write the result to."})
    commands: list[str] = field(default_factory=list, metadata={"help": "The commands that made the translations."})
    notes: list[str] = field(default_factory=list, metadata={"help": "Further facts, each as name=value."})

    def __post_init__(self):
        for note in self.notes:
            if "=" not in note:
                raise ValueError(f"`notes` must be of the form name=value, got {note!r}.")


def main() -> None:
    """Score, print and write the result."""
    (arguments,) = parse_arguments(EvaluationArguments, description=__doc__)
    hypotheses, references = read_lines(arguments.hypotheses), read_lines(arguments.references)
    if len(hypotheses) != len(references):
        raise ValueError(
            f"`hypotheses` and `references` must have equally many lines, but {arguments.hypotheses} has "
            f"{len(hypotheses)} and {arguments.references} has {len(references)}; line N of one is scored against "
            "line N of the other."
        )
    if not hypotheses:
        raise ValueError(f"`hypotheses` must have at least one line, but {arguments.hypotheses} is empty.")
    bleu = Bleu().compute(
        predictions=hypotheses, references=references, tokenize=arguments.tokenize, lowercase=arguments.lowercase
    )
    chrf = ChrF().compute(predictions=hypotheses, references=references, lowercase=arguments.lowercase)
    result = {
        "bleu": round(bleu["score"], 2),
        "chrf": round(chrf["score"], 2),
        "bleu_signature": bleu["signature"],
        "chrf_signature": chrf["signature"],
        "sentences": len(hypotheses),
        "notes": dict(note.split("=", 1) for note in arguments.notes),
        "commands": arguments.commands,
        **describe_environment("sacrebleu"),
    }
    text = json.dumps(result, indent=2, ensure_ascii=False)
    print(text)
    if arguments.output_file is not None:
        with replacing_file(arguments.output_file) as file:
            file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(run(main))
