"""Shared by the benchmarks: options, turns, text and the report."""

import copy
import datetime
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    set_seed,
)
from transformers.utils import logging

from hf_vanilla import VanillaGptConfig, VanillaGptForCausalLM, VanillaTransformerConfig
from hf_vanilla.command_line.report import write_report
from hf_vanilla.data import load_documents, load_parallel_dataset, python_documentation, split_sentences
from hf_vanilla.models.checks import IGNORED_LABEL
from hf_vanilla.training import command_of_process


FOLDER = Path("benchmark_output")
# Which type is faster depends on the machine, and on the side.
FLOAT_TYPES = ("float32", "bfloat16")
GPT_VOCAB_SIZE = 40_478
# Updates of a training before it is measured.
WARMUP_STEPS = 2
# By the place of the norms, transformers' own GPTs.
NATIVE_GPTS: dict[str, tuple[Any, Any]] = {
    "post": (OpenAIGPTLMHeadModel, OpenAIGPTConfig),
    "pre": (GPT2LMHeadModel, GPT2Config),
}
# Recorded with results if a benchmark uses them, besides the packages that are always recorded.
PACKAGES = ("accelerate", "ctranslate2")


@dataclass
class BenchmarkArguments:
    """Options of every benchmark."""

    repeats: int = field(default=3, metadata={"help": "Turns of each side; the report has medians."})
    quick: bool = field(default=False, metadata={"help": "A small model and two turns, to check that it runs."})
    threads: int = field(default=2, metadata={"help": "Threads of the CPU."})
    output_file: str | None = field(
        default=None, metadata={"help": "JSON file for the results. Default: a file in benchmark_output/."}
    )


def prepare(arguments: BenchmarkArguments) -> None:
    """Check the options, limit `quick` to two turns, set the number of threads, and silence the libraries."""
    for name in ("repeats", "threads", "num_beams", "length"):  # not every benchmark has the last two
        if (value := getattr(arguments, name, 1)) < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}.")
    if arguments.quick:
        arguments.repeats = min(arguments.repeats, 2)
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def take_turns(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure all sides in turn, `repeats` times, so that a drift of the machine's speed affects them alike.

    Args:
        sides (`dict[str, Callable[[], float]]`): Name of each side, and the function that measures it once.
        repeats (`int`): Number of turns.

    Returns:
        `dict[str, list[float]]`: the figures of each side, by turn.
    """
    figures: dict[str, list[float]] = {name: [] for name in sides}
    with tqdm(total=repeats * len(sides), unit="turn") as progress:
        for _ in range(repeats):
            for name, measure in sides.items():
                figures[name].append(measure())
                progress.update()
    return figures


def in_each_type(sides: Mapping[str, Callable[..., Callable[[], float]]]) -> dict[str, Callable[[], float]]:
    """Name each side in float32 and in bfloat16.

    Args:
        sides (`Mapping[str, Callable[..., Callable[[], float]]]`): Name of each side, and what makes the function that
            measures it, given a type as `dtype`.

    Returns:
        `dict[str, Callable[[], float]]`: name with type, and the function that measures it: sides for [`take_turns`].
    """
    return {f"{name}, {dtype}": side(dtype=dtype) for name, side in sides.items() for dtype in FLOAT_TYPES}


def pairs_of_types(
    figures: dict[str, list[float]], compared: dict[str, tuple[str, str, float | None]]
) -> dict[str, tuple[str, str, float | None]]:
    """Compare sides in the faster type of each, and like for like in float32.

    Args:
        figures (`dict[str, list[float]]`): As returned by [`take_turns`], for sides of [`in_each_type`].
        compared (`dict[str, tuple[str, str, float | None]]`): Name of each ratio: the two sides, and the target.

    Returns:
        `dict[str, tuple[str, str, float | None]]`: the ratios for [`report`].
    """

    def fastest(name: str) -> str:
        return max((f"{name}, {dtype}" for dtype in FLOAT_TYPES), key=lambda side: statistics.median(figures[side]))

    pairs: dict[str, tuple[str, str, float | None]] = {}
    for ratio, (ours, other, target) in compared.items():
        pairs[ratio] = (fastest(ours), fastest(other), target)
        pairs[f"{ratio}, float32 on both sides"] = (f"{ours}, float32", f"{other}, float32", None)
    return pairs


def spread(values: list[float]) -> dict[str, float]:
    """Return median, lowest and highest of some figures, rounded to four digits."""
    summary = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return {name: float(f"{value:.4g}") for name, value in summary.items()}


def report(
    arguments: BenchmarkArguments,
    work: str,
    unit: str,
    figures: dict[str, list[float]],
    ratios: dict[str, tuple[str, str, float | None]],
    operations: Sequence[tuple[float, float]] = (),
    **settings: Any,
) -> None:
    """Print all sides and their ratios, and write them to a file; with `quick` there are no targets.

    Args:
        arguments (`BenchmarkArguments`): The options.
        work (`str`): Description of the work.
        unit (`str`): Unit of the figures.
        figures (`dict[str, list[float]]`): As returned by [`take_turns`].
        ratios (`dict[str, tuple[str, str, float | None]]`): Name of each ratio: the two sides, and the target.
        operations (`Sequence[tuple[float, float]]`, *optional*): Of our side in each turn, operations per second, and
            those of one large product.
        **settings (`Any`): Other settings that the figures depend on.
    """
    sides = {name: spread(values) for name, values in figures.items()}
    compared = {}
    for name, (ours, other, target) in ratios.items():
        quotients = [a / b for a, b in zip(figures[ours], figures[other], strict=True)]
        has_target = target is not None and not arguments.quick
        compared[name] = {**spread(quotients), **({"target": target} if has_target else {})}
    print(f"\n{work}{', quick' if arguments.quick else ''}, {unit}:")
    for name, side in sides.items():
        median, lowest, highest = (
            f"{side[key]:,.0f}" if side[key] >= 1000 else f"{side[key]:.4g}" for key in ("median", "lowest", "highest")
        )
        print(f"  {name}: {median}   ({lowest} to {highest})")
    for name, ratio in compared.items():
        wanted = f", target {ratio['target']:g}" if "target" in ratio else ""
        print(f"  {name}: {ratio['median']:.2f} x   ({ratio['lowest']:.2f} to {ratio['highest']:.2f}{wanted})")
    extra = {"utilisation": utilisation(operations)} if operations else {}
    write_results(arguments, work, unit=unit, sides=sides, ratios=compared, **extra, settings=settings)


def utilisation(operations: Sequence[tuple[float, float]]) -> dict[str, dict[str, float]]:
    """Compare operations per second with those of one large product, turn by turn, and print the share."""
    reached, ceiling = (spread(list(values)) for values in zip(*operations, strict=True))
    share = spread([each / most for each, most in operations])
    print(
        f"  ours computes {reached['median'] / 1e9:,.0f} GFLOP/s, {share['median']:.0%} of the "
        f"{ceiling['median'] / 1e9:,.0f} of one large product   ({share['lowest']:.0%} to {share['highest']:.0%})"
    )
    return {"operations_per_second": reached, "product_ceiling": ceiling, "share": share}


def write_results(arguments: BenchmarkArguments, work: str, **figures: Any) -> None:
    """Write figures, with versions and machine, to `output_file` or a file with the script's name.

    Args:
        arguments (`BenchmarkArguments`): The options.
        work (`str`): Description of the work.
        **figures (`Any`): The figures.
    """
    written = {
        "work": work,
        **figures,
        "quick": arguments.quick,
        "repeats": arguments.repeats,
        "threads": arguments.threads,
        "command": command_of_process(),
        "date": datetime.date.today().isoformat(),
    }
    path = arguments.output_file or str(FOLDER / f"{Path(sys.argv[0]).stem}.json")
    write_report(path, written, *(name for name in PACKAGES if name in sys.modules))


def device() -> torch.device:
    """Return the device to measure on: a GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def now() -> float:
    """Return the time when all work of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def product_ceiling(dtype: torch.dtype, size: int | None = None) -> float:
    """Measure the operations per second of one large matrix product, with the current number of threads."""
    size = size or (8192 if device().type == "cuda" else 2048)
    one, other = (torch.randn(size, size, device=device()).to(dtype) for _ in range(2))
    at_once = 10 if device().type == "cuda" else 1  # a GPU's are short beside the wait for it
    seconds = []
    for _ in range(8):
        started = now()
        for _ in range(at_once):
            torch.mm(one, other)
        seconds.append((now() - started) / at_once)
    return 2 * size**3 / statistics.median(seconds[3:])  # the first ones warm up


def training_operations(
    config: PreTrainedConfig, lengths: torch.Tensor, labelled: torch.Tensor, **options: Any
) -> float:
    """Count the operations of the matrix products of a training step, backward twice as many, padding excluded.

    Args:
        config (`PreTrainedConfig`): Config of a model of this package.
        lengths (`torch.Tensor` of shape `(rows,)`): Real tokens of each row's `input_ids`.
        labelled (`torch.Tensor` of shape `(rows,)`): Labelled tokens of each row.
        **options (`Any`): Further arguments of the config's `forward_flops`.

    Returns:
        `float`: the operations.
    """
    lengths, labelled = lengths.cpu().double(), labelled.cpu().double()
    # the same share in each row: the last layer leaves out outputs of the whole batch
    if not config.is_encoder_decoder:
        labelled = lengths * float(labelled.sum() / lengths.sum())
    return 3 * float(config.forward_flops(lengths, labelled, **options).sum())


def sentence_pairs(parallel_file: str | None, columns: list[str], limit: int) -> dict[str, list[str]]:
    """Read sentence pairs, or make some from Python's documentation: a sentence, and its words reversed.

    Args:
        parallel_file (`str`, *optional*): JSON lines, CSV or Parquet.
        columns (`list[str]`): The columns of source and target.
        limit (`int`): Most pairs.

    Returns:
        `dict[str, list[str]]`: `source` and `target`.
    """
    if parallel_file is not None:
        pairs = load_parallel_dataset(
            data_files={"train": parallel_file}, source_column=columns[0], target_column=columns[1]
        )["train"]
        pairs = pairs.select(range(min(limit, len(pairs))))
        return {name: pairs[name][:] for name in ("source", "target")}
    sentences = [each for text in python_documentation(400) for each in split_sentences(text.replace("\n", " "))]
    sentences = [" ".join(each.split()[:25]) for each in sentences if len(each.split()) > 3][:limit]
    return {"source": sentences, "target": [" ".join(reversed(each.split())) for each in sentences]}


def language_documents(text_file: str | None, limit: int) -> Dataset:
    """Read documents, by default Python's documentation.

    Args:
        text_file (`str`, *optional*): JSON lines, CSV, Parquet or text.
        limit (`int`): Most documents.

    Returns:
        `Dataset`: with a column `text`.
    """
    if text_file is None:
        return Dataset.from_dict({"text": python_documentation(1000)})
    documents = load_documents(data_files=[text_file])
    return documents.select(range(min(limit, len(documents))))


def run_child(command: list[str], stdin: IO[str] | None = None, stdout: IO[str] | None = None) -> str:
    """Run a command, and return its output.

    Args:
        command (`list[str]`): The command.
        stdin (`IO[str]`, *optional*): A file for its standard input.
        stdout (`IO[str]`, *optional*): A file for its standard output.

    Returns:
        `str`: its standard output; empty if that is in a file.

    Raises:
        ValueError: if it fails, with the last line of its errors.
    """
    output = subprocess.PIPE if stdout is None else stdout
    finished = subprocess.run(command, stdin=stdin, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    if finished.returncode:
        raise ValueError(f"{' '.join(command)} failed: {(finished.stderr.strip().splitlines() or ['no message'])[-1]}")
    return finished.stdout or ""


def reason_of(error: Exception) -> str:
    """Return class and first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def ctranslate2_is_installed() -> bool:
    """Return whether CTranslate2 is installed, and if not, say how its rows are added."""
    is_installed = importlib.util.find_spec("ctranslate2") is not None
    if not is_installed:
        print("CTranslate2 is not installed, so its rows are left out; `pip install ctranslate2` adds them.")
    return is_installed


def marian_like(config: VanillaTransformerConfig) -> MarianMTModel:
    """Build transformers' MarianMTModel with the sizes, dropout and tied embeddings of our config."""
    return MarianMTModel(
        MarianConfig(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            dropout=config.dropout,
            activation_function="relu",
            scale_embedding=True,
            pad_token_id=config.pad_token_id,
            eos_token_id=config.eos_token_id,
            forced_eos_token_id=None,
            decoder_start_token_id=config.decoder_start_token_id,
        )
    )


def gpt_pair(size: str, norm_position: str = "post") -> tuple[PreTrainedModel, PreTrainedModel]:
    """Build a GPT of the paper's vocabulary, and transformers' own with the same sizes, dropout and random weights.

    Args:
        size (`str`): A preset.
        norm_position (`str`): `"post"` for OpenAIGPTLMHeadModel, `"pre"` for GPT2LMHeadModel.

    Returns:
        `tuple[PreTrainedModel, PreTrainedModel]`: ours and transformers', in evaluation mode.
    """
    set_seed(0)
    config = VanillaGptConfig.preset(size, vocab_size=GPT_VOCAB_SIZE, norm_position=norm_position)
    ours = VanillaGptForCausalLM(config)
    sizes = {"n_embd": config.hidden_size, "n_layer": config.num_hidden_layers, "n_head": config.num_attention_heads}
    sizes |= {"vocab_size": GPT_VOCAB_SIZE, "n_positions": config.max_position_embeddings}
    native_class, native_config = NATIVE_GPTS[norm_position]
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"))  # GPT-2's are outside of this vocabulary
    with tempfile.TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
        native = native_class.from_pretrained(folder, config=native_config(**sizes, **ids))
    return ours.eval(), native.eval()


class Speedometer(TrainerCallback):
    """Measures real tokens and operations of matrix products per second of a training, after its first updates.

    Args:
        model (`PreTrainedModel`): The model to train.
        name (`str`): The model's argument whose tokens are counted.
        padding (`int`): Its value at padding.
        warmup_steps (`int`): Updates before the measurement.
    """

    def __init__(self, model: PreTrainedModel, name: str, padding: int, warmup_steps: int):
        self.config = model.config
        self.name, self.padding, self.warmup_steps = name, padding, warmup_steps
        self.started, self.seconds = 0.0, 0.0
        self.tokens: list[torch.Tensor] = []  # of each batch; read at the end, to keep a GPU from waiting
        self.lengths: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.tokens.append((kwargs[self.name] != self.padding).sum())
        is_labelled = kwargs["labels"] != IGNORED_LABEL
        self.lengths.append((kwargs["attention_mask"].sum(dim=1), is_labelled.sum(dim=1)))

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Start the clock after the first updates."""
        if state.global_step == self.warmup_steps:
            self.tokens, self.lengths, self.started = [], [], now()

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Stop the clock."""
        self.seconds = now() - self.started
        self.hook.remove()

    def rate(self) -> float:
        """Return tokens per second."""
        return sum(map(int, self.tokens)) / self.seconds

    def operations_per_second(self) -> float:
        """Return operations of matrix products per second, for a model of this package."""
        return sum(training_operations(self.config, *each) for each in self.lengths) / self.seconds


def clocked_training(steps: int) -> dict[str, Any]:
    """Return the arguments of a training with `steps` updates to measure, which writes nothing."""
    return {
        "output_dir": str(FOLDER),
        "max_steps": steps + WARMUP_STEPS,
        "use_cpu": not torch.accelerator.is_available(),
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def fresh_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model to train it: accelerate leaves one in the precision of its first training."""
    return copy.deepcopy(model)


def train_and_clock(trainer: Trainer, name: str, padding: int, warmup_steps: int = WARMUP_STEPS) -> Speedometer:
    """Run a training, and return its measurement after the first updates."""
    speedometer = Speedometer(trainer.model, name, padding, warmup_steps)
    trainer.add_callback(speedometer)
    trainer.remove_callback(PrinterCallback)  # its lines would break the progress bar
    trainer.train()
    return speedometer
