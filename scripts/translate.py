#!/usr/bin/env python
r"""Translate text, line by line: one line of output for each line of input.

Examples:
  a file, with the paper's beam search:
    python scripts/translate.py --model runs/en-de --input test.en --output test.de
  from standard input to standard output:
    echo "a man in an orange hat ." | python scripts/translate.py --model runs/en-de
  the four best translations of each line with their scores, like Moses' n-best lists, without features:
    python scripts/translate.py --model runs/en-de --input test.en --output test.nbest --n_best 4
  on all devices of a machine, each of which translates a part of the lines:
    accelerate launch scripts/translate.py --model runs/en-de --input test.en --output test.de

Text is UTF-8. An empty line stays empty. The output file appears when it is complete; an interrupted program
writes none. Line breaks inside a translation become spaces, and so do tabs where tabs separate columns.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("translate")

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from hf_vanilla.command_line.checks import (
    check_device,
    check_models,
    check_output_is_no_input,
    explained_model_loading,
)
from hf_vanilla.command_line.options import on_first_process, parse_arguments, run
from hf_vanilla.data.files import read_lines, replacing_file
from hf_vanilla.generation import SearchOptions, Translation, load_translator, translate


SEARCH_OPTIONS = [each.name for each in fields(SearchOptions) if each.name != "generate_kwargs"]


@dataclass
class TranslateArguments:
    """Input, output, model and search."""

    model: str = field(metadata={"help": "Folder of a trained model, or its name on the Hub."})
    input: str = field(default="-", metadata={"help": "Text file to translate, also .gz; - is standard input."})
    output: str = field(default="-", metadata={"help": "File to write; - is standard output."})
    num_beams: int = field(
        default=SearchOptions.num_beams, metadata={"help": "Beams of the search; 1 is greedy, more is slower."}
    )
    length_penalty: float = field(
        default=SearchOptions.length_penalty,
        metadata={"help": "Exponent alpha of the length penalty: the higher, the longer the translations."},
    )
    length_penalty_type: Literal["gnmt", "power"] = field(
        default="gnmt",
        metadata={"help": "gnmt: ((5 + length) / 6)^alpha, the paper's; power: length^alpha, transformers'."},
    )
    max_length_offset: int = field(
        default=SearchOptions.max_length_offset,
        metadata={"help": "How many tokens longer than its source a translation may be."},
    )
    n_best: int = field(
        default=SearchOptions.n_best,
        metadata={
            "help": "Translations of each line, at most --num_beams. With more than 1, a line of output is "
            '"line number ||| translation ||| score", line numbers from 0; "|||" in a translation is written '
            '"&#124;&#124;&#124;".'
        },
    )
    scores: bool = field(
        default=False,
        metadata={"help": "Write after each translation a tab and its score: log probability / length penalty."},
    )
    alignments: bool = field(
        default=False,
        metadata={
            "help": 'Write word alignments as the last column: "0-0 1-2" aligns word 0 of the source with word 0 of '
            "the translation, and word 1 with word 2. Words are separated by white space."
        },
    )
    max_source_length: int | None = field(
        default=SearchOptions.max_source_length,
        metadata={"help": "Most tokens of a line; the rest of it is not translated. Unset: the model's limit."},
    )
    max_tokens_per_batch: int = field(
        default=SearchOptions.max_tokens_per_batch,
        metadata={"help": "Most source tokens of a batch, padding included."},
    )
    dtype: Literal["auto", "fastest", "float32", "bfloat16", "float16", "int8"] = field(
        default="auto",
        metadata={
            "help": "Type of the weights: auto is the one they were saved in, fastest the faster one of float32 and "
            "bfloat16 on the device, measured; int8 rounds linear maps to 8 bits, which is faster on most CPUs and "
            "changes some translations."
        },
    )
    allow_int8: bool = field(
        default=False, metadata={"help": "With --dtype fastest: choose int8 where it is the fastest of all."}
    )
    device: str = field(
        default="auto",
        metadata={"help": "Where to run: cpu, cuda, cuda:1 ..., or auto, an accelerator if there is one."},
    )

    def __post_init__(self) -> None:
        SearchOptions(**self.search_options())
        check_device(self.device)

    def search_options(self) -> dict[str, Any]:
        """Return the options of the search."""
        return {name: getattr(self, name) for name in SEARCH_OPTIONS}


def format_translations(number: int, translations: list[Translation], arguments: TranslateArguments) -> str:
    """Format the translations of one line as lines of output."""
    rows = []
    for translation in translations:
        text = " ".join(translation.text.splitlines())
        if arguments.n_best > 1:
            columns = [str(number), text.replace("|||", "&#124;" * 3), f"{translation.score:.4f}"]
        else:
            columns = [text]
        if arguments.scores and arguments.n_best == 1:
            columns.append(f"{translation.score:.4f}")
        if arguments.alignments:
            columns.append(str(translation.alignment))
        if arguments.n_best > 1:
            rows.append(" ||| ".join(columns))
        else:
            rows.append("\t".join([text.replace("\t", " "), *columns[1:]]) if len(columns) > 1 else text)
    return "".join(f"{row}\n" for row in rows)


def translate_lines(lines: list[str], arguments: TranslateArguments, processes: PartialState) -> list[str]:
    """Translate the lines, each process a part of them, and return the output of each line in order."""
    device = processes.device if arguments.device == "auto" else torch.device(arguments.device)
    with explained_model_loading("model", arguments.model):
        model, tokenizer, target_tokenizer = load_translator(
            arguments.model, dtype=arguments.dtype, device=device, allow_int8=arguments.allow_int8
        )
    step = processes.num_processes
    numbers = range(processes.process_index, len(lines), step)
    translations = translate(
        model,
        tokenizer,
        [lines[number] for number in numbers],
        target_tokenizer=target_tokenizer,
        with_alignments=arguments.alignments,
        show_progress=processes.is_main_process,
        **arguments.search_options(),
    )
    blocks = [
        (number, format_translations(number, row, arguments))
        for number, row in zip(numbers, translations, strict=True)
    ]
    return [block for _, block in sorted(gather_object(blocks))]


def main() -> None:
    """Read, translate, write: the first process reads and writes, all translate."""
    (arguments,) = parse_arguments(TranslateArguments, description=__doc__)
    check_models(model=arguments.model)
    check_output_is_no_input(arguments.output, input=arguments.input)
    processes = PartialState(cpu=arguments.device == "cpu" or not torch.accelerator.is_available())
    with replacing_file(arguments.output) if processes.is_main_process else nullcontext() as file:
        lines = on_first_process(partial(read_lines, arguments.input))
        blocks = translate_lines(lines, arguments, processes)
        if file is not None:
            file.writelines(blocks)


if __name__ == "__main__":
    sys.exit(run(main))
