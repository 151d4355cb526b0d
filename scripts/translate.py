#!/usr/bin/env python
"""Translate a text file (or standard input) line by line: line N of the output is the translation of line N.

    python scripts/translate.py --model runs/en-de --input test.en --output test.out
    echo "A dog runs." | python scripts/translate.py --model runs/en-de

The defaults are the paper's search: 4 beams, GNMT length penalty with alpha 0.6, at most 50 tokens more than the
source. With --n_best N there are N lines for each line, "number ||| translation ||| score". `accelerate launch` or
`torchrun` in place of `python` share the lines out to several devices.
"""

import contextlib
import gzip
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, HfArgumentParser

import hf_vanilla  # noqa: F401  # registers the models
from hf_vanilla.generation import Hypothesis, translate


TARGET_TOKENIZER = "target_tokenizer"


@dataclass
class TranslationArguments:
    """Options of the translation."""

    model: str = field(metadata={"help": "Folder or Hub name of the model."})
    input: str = field(default="-", metadata={"help": "UTF-8 text file, may be .gz; - is standard input."})
    output: str = field(default="-", metadata={"help": "File to write; - is standard output."})
    num_beams: int = field(default=4, metadata={"help": "Number of beams; 1 is greedy search, and fastest."})
    length_penalty: float = field(default=0.6, metadata={"help": "Exponent alpha of the length penalty; 0 is none."})
    length_penalty_type: str = field(
        default="gnmt", metadata={"help": "gnmt: ((5 + length) / 6)^alpha, the paper's; power: length^alpha."}
    )
    max_length_offset: int = field(
        default=50, metadata={"help": "How many tokens longer than its source a translation may be."}
    )
    max_source_length: int = field(default=1024, metadata={"help": "Longest source in tokens; more is cut off."})
    n_best: int = field(default=1, metadata={"help": "Translations of each line, at most num_beams."})
    scores: bool = field(default=False, metadata={"help": "Write the score behind each translation: ' ||| -0.53'."})
    max_tokens_per_batch: int = field(default=4096, metadata={"help": "Size of a batch in source tokens."})
    dtype: str = field(default="auto", metadata={"help": "auto (as saved), float32, bfloat16 or float16."})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda, ... Default: the fastest there is."})


def read_lines(path: str) -> list[str]:
    """Read all lines; only a newline character ends a line. Raises a ValueError for text that is not UTF-8."""
    if path == "-":
        data = sys.stdin.buffer.read()
    else:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            data = file.read()
    lines = []
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n") if data else [], start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            name = "standard input" if path == "-" else path
            raise ValueError(f"`input` must be UTF-8, but line {number} of {name} is not: {error}.") from error
        lines.append(text.removesuffix("\r"))
    return lines


@contextlib.contextmanager
def opened_output(path: str):
    """Open the output; a file appears only when it is complete."""
    if path == "-":
        yield sys.stdout
        return
    target = Path(path).absolute()
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise ValueError(f"`output` ({path}) must be in a folder that can be written to: {error}.") from error
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            yield file
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def format_line(number: int, hypotheses: list[Hypothesis], n_best: int, scores: bool) -> str:
    """Write the translations of one line as the output has them."""
    if n_best > 1:
        return "".join(f"{number} ||| {each.text} ||| {each.score:.4f}\n" for each in hypotheses)
    score = f" ||| {hypotheses[0].score:.4f}" if scores else ""
    return f"{hypotheses[0].text}{score}\n"


def translate_all(arguments: TranslationArguments, state: PartialState) -> list[list[Hypothesis]]:
    """Translate this process's share of the lines, and return those of all processes in order."""
    lines = read_lines(arguments.input)
    dtype = arguments.dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    device = torch.device(arguments.device) if arguments.device else state.device
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    has_target = (Path(arguments.model) / TARGET_TOKENIZER).is_dir()
    translations = translate(
        AutoModelForSeq2SeqLM.from_pretrained(arguments.model, dtype=dtype).to(device),
        tokenizer,
        lines[state.process_index :: state.num_processes],
        target_tokenizer=AutoTokenizer.from_pretrained(arguments.model, subfolder=TARGET_TOKENIZER)
        if has_target
        else tokenizer,
        num_beams=arguments.num_beams,
        n_best=arguments.n_best,
        length_penalty=arguments.length_penalty,
        length_penalty_type=arguments.length_penalty_type,
        max_length_offset=arguments.max_length_offset,
        max_source_length=arguments.max_source_length,
        max_tokens_per_batch=arguments.max_tokens_per_batch,
        show_progress=state.is_main_process,
    )
    shares = gather_object([translations])
    return [shares[number % state.num_processes][number // state.num_processes] for number in range(len(lines))]


def main() -> None:
    """Open the output, translate, write."""
    (arguments,) = HfArgumentParser(TranslationArguments, description=__doc__).parse_args_into_dataclasses()
    if arguments.dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"`dtype` must be auto, float32, bfloat16 or float16; got {arguments.dtype!r}.")
    state = PartialState(cpu=arguments.device == "cpu" or not torch.accelerator.is_available())
    with opened_output(arguments.output if state.is_main_process else os.devnull) as file:
        translations = translate_all(arguments, state)
        for number, hypotheses in enumerate(translations):
            file.write(format_line(number, hypotheses, arguments.n_best, arguments.scores))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
