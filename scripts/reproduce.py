#!/usr/bin/env python
r"""Reproduce a recorded score: from the data files to its row of the table, with one command.

    python scripts/reproduce.py multi30k_en_de_tok --data_dir data --output_dir reproduced
    python scripts/reproduce.py bert_mini_sst2 --data_dir data --dry_run

The first argument is the name of a file in model_cards/results. The data files are in --data_dir, in the folders that
the commands name, such as data/multi30k/tok_train.jsonl.gz; --dry_run shows the commands, and needs no data. A
fine-tuning first trains the model that it starts from. The same command again continues where it was stopped. The
scores differ a little with the machine, and with the number of threads.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("reproduce")

import gzip
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_vanilla.command_line.options import parse_arguments, run, take_task
from hf_vanilla.data.files import replacing_file
from hf_vanilla.hub.results import list_scores, read_json


SCRIPTS = Path(__file__).resolve().parent
RECORDED = SCRIPTS.parent / "model_cards" / "results"
# What `data_dir` has: folders of data sets, and of KenLM's programs.
DATA_FILE = re.compile(
    r"(?<![\w./-])(?:enwiki_sample|glue|kenlm|multi30k|multiple_choice|ner|novels_pd|squad_v1\.1|tatoeba_en_zh"
    r"|wikitext2_eval)/[\w./-]+"
)
SCRIPT = re.compile(r" scripts/([\w/]+\.py)")
PROCESSES = re.compile(r" --nproc_per_node (\d+) ")
PIPE = " | "
STATE_FILE = "reproduced.json"  # what is done, and the seconds of each command


class Extract(NamedTuple):
    """A file that is made of a data file.

    Attributes:
        source: The data file, JSON lines.
        column: The column whose texts become lines; by default the file is copied.
        rows: How many of the first rows are taken; all by default.
    """

    source: str
    column: str | None = None
    rows: int | None = None


class Recipe(NamedTuple):
    """The way from data files to a results file.

    Attributes:
        commands: The commands, as the results file records them; the last one writes the results.
        files: Files to make of the data first, by name.
        after: The recipe that trains the model which this one uses; both have one folder.
        results_option: The option of the last command for the results.
        notes: More facts for the results, each as name=value.
    """

    commands: list[str]
    files: dict[str, Extract] = {}
    after: str | None = None
    results_option: str = "results_file"
    notes: tuple[str, ...] = ()


def translation(
    folder: str,
    languages: tuple[str, str],
    validation: str,
    test: str,
    *,
    prefix: str = "",
    search: str = "--num_beams 5",
    bleu: str = "--tokenize 13a",
    vocabulary: int = 10000,
    dropout: float = 0.2,
    optimizer: str = "--muon --learning_rate 4e-3 --weight_decay 0.3",
    steps: int,
    run: str,
    seed: int = 1,
) -> Recipe:
    """Return the recipe of a translator; names of data files are without their ending, and begin with `prefix`.

    `optimizer` has options of training, `search` those of translation, `bleu` those of the score.
    """
    source, target = languages
    test = f"{prefix}{test}"
    return Recipe(
        [
            f"python scripts/train_translation.py --train_file {folder}/{prefix}train.jsonl.gz --validation_file "
            f"{folder}/{prefix}{validation}.jsonl.gz --source_column {source} --target_column {target} "
            f"--vocab_size {vocabulary} --d_model 128 --d_ff 256 --num_heads 4 --encoder_layers 4 "
            f"--decoder_layers 4 --norm_position pre --dropout {dropout} --max_tokens_per_batch 4096 --bf16 "
            f"{optimizer} --lr_scheduler_type linear --warmup_steps 300 "
            f"--max_steps {steps} --save_steps {steps // 100} --save_total_limit 10 --average_last 10 "
            "--eval_strategy steps --eval_steps 500 --no_predict_with_generate --logging_steps 100 "
            f"--seed {seed} --output_dir runs/{run}",
            f"python scripts/translate.py --model runs/{run} --input {test}.{source} --output runs/{run}.out {search}",
            f"python scripts/evaluate_translation.py --hypotheses runs/{run}.out --references {test}.{target} {bleu}",
        ],
        {f"{test}.{language}": Extract(f"{folder}/{test}.jsonl.gz", language) for language in languages},
        results_option="output_file",
        notes=(f"test_set={test}", f"seed={seed}"),
    )


def multi30k(kind: str, **settings: Any) -> dict[str, Recipe]:
    """Return the recipes of Multi30k's text of one kind, with three seeds."""
    return {
        f"multi30k_en_de_{kind}{suffix}": translation(
            "multi30k", ("en", "de"), "val", "test_2016_flickr", seed=seed, **settings
        )
        for seed, suffix in ((1, ""), (2, "_seed2"), (3, "_seed3"))
    }


def finetuning(
    task: str,
    script: str,
    folder: str,
    options: str = "",
    *,
    has_test: bool = False,
    optimizer: str = "--muon ",
    after: str = "bert_mini_two_hours",
) -> dict[str, Recipe]:
    """Return the recipes of a fine-tuning of the BERT of a recipe, and of one from random weights by AdamW."""
    files = "".join(
        f"--{split}_file {folder}/{split}.jsonl.gz "
        for split in ("train", "validation", *(["test"] if has_test else []))
    )
    settings = (
        "--learning_rate 3e-4 --num_train_epochs 4 --per_device_train_batch_size 32 --bf16 --disable_tqdm true "
        "--logging_steps 500 --seeds 1 2 3"
    )
    return {
        f"bert_mini_{task}{suffix}": Recipe(
            [
                f"python scripts/finetune_{script}.py --model_name_or_path runs/bert {settings} {way}{files}"
                f"{options}--output_dir runs/{task}{suffix} --results_file runs/bert_mini_{task}{suffix}.json"
            ],
            after=start,
        )
        for suffix, way, start in (
            ("", optimizer, after),
            ("_from_scratch", "--from_scratch ", "bert_mini_pretraining"),
        )
    }


def gpt_finetuning(task: str, epochs: int, options: str = "") -> dict[str, Recipe]:
    """Return recipes of the small GPT's fine-tuning: with its language model's loss or not, from scratch or not."""
    return {
        f"gpt_mini_{task}{suffix}": Recipe(
            [
                "python scripts/finetune_classification.py --model_name_or_path runs/gpt --learning_rate 3e-4 "
                f"--num_train_epochs {epochs} --per_device_train_batch_size 32 --bf16 --disable_tqdm true "
                f"--logging_steps 500 --seeds 1 2 3 --train_file glue/{task}/train.jsonl.gz --validation_file "
                f"glue/{task}/validation.jsonl.gz --text_column sentence {options}{loss}--output_dir "
                f"runs/gpt_{task}{suffix} --results_file runs/gpt_mini_{task}{suffix}.json"
            ],
            after="gpt_mini_pretraining",
        )
        for suffix, loss in (
            ("", "--lm_loss_weight 0.5 "),
            ("_no_lm", "--lm_loss_weight 0 "),
            ("_from_scratch", "--lm_loss_weight 0.5 --from_scratch "),
            ("_from_scratch_no_lm", "--lm_loss_weight 0 --from_scratch "),
        )
    }


def squad() -> dict[str, Recipe]:
    """Return the recipes of SQuAD, from the earlier BERT of 94 minutes, by AdamW."""
    return {
        f"bert_mini_squad{suffix}": Recipe(
            [
                "python scripts/finetune_question_answering.py --model_name_or_path runs/bert --train_file "
                "squad_v1.1/train.jsonl.gz --validation_file squad_v1.1/validation.jsonl.gz --max_train_questions "
                "24000 --max_length 256 --doc_stride 64 --learning_rate 3e-4 --num_train_epochs 2 "
                "--per_device_train_batch_size 32 --bf16 --disable_tqdm true --save_strategy epoch "
                f"--save_total_limit 1 --logging_steps 200 --seeds 1 2 3 {scratch}--output_dir runs/squad{suffix} "
                f"--results_file runs/bert_mini_squad{suffix}.json"
            ],
            after="bert_mini_pretraining",
        )
        for suffix, scratch in (("", ""), ("_from_scratch", "--from_scratch "))
    }


WIKITEXT = (
    "zcat wikitext2_eval/test.raw.txt.gz | awk '/^ = [^=]/ {print \"\"; next} /^ = =/ {next} NF' > wikitext2.test.txt"
)
ENWIKI_TEST = {"enwiki_sample.test.jsonl.gz": Extract("enwiki_sample/test.jsonl.gz")}
PAIR = "--text_column sentence1 --text_pair_column sentence2 "
RECIPES = {
    **multi30k(
        "tok",
        prefix="tok_",
        search="--num_beams 5 --length_penalty_type power --length_penalty 1.0",
        bleu="--tokenize none --lowercase",
        dropout=0.3,
        steps=6000,
        run="multi30k",
    ),
    **multi30k("raw", steps=3500, run="multi30k-raw"),
    "tatoeba_zh_en": translation(
        "tatoeba_en_zh", ("zh", "en"), "validation", "test", vocabulary=8000, steps=2000, run="tatoeba-zh-en"
    ),
    "multi30k_try_out": Recipe(
        [
            "hf-vanilla train-translation --train_source_file train.en --train_target_file train.de --vocab_size 2000 "
            "--d_model 128 --d_ff 256 --num_heads 4 --encoder_layers 2 --decoder_layers 2 --max_tokens_per_batch 2048 "
            "--max_steps 600 --warmup_steps 200 --precision fastest --output_dir runs/try-out",
            "hf-vanilla translate --model runs/try-out --input test.en --output test.out",
            "hf-vanilla evaluate-translation --hypotheses test.out --references test.de",
        ],
        {
            **{f"train.{each}": Extract("multi30k/train.jsonl.gz", each, 2000) for each in ("en", "de")},
            **{f"test.{each}": Extract("multi30k/test_2016_flickr.jsonl.gz", each) for each in ("en", "de")},
        },
        results_option="output_file",
        notes=("test_set=test_2016_flickr",),
    ),
    "bert_mini_pretraining": Recipe(
        [
            "torchrun --nproc_per_node 2 scripts/pretrain_bert.py --train_files enwiki_sample/train.jsonl.gz "
            "novels_pd/train.jsonl.gz --validation_files enwiki_sample/validation.jsonl.gz --preset mini "
            "--vocab_size 8000 --hidden_dropout_prob 0 --attention_probs_dropout_prob 0 --repeats 2 "
            "--phase_lengths 32 128 512 --phase_shares 0.15 0.75 0.1 --max_tokens_per_batch 2048 --bf16 "
            "--learning_rate 7e-4 --warmup_steps 1000 --max_steps 18000 --eval_strategy steps --eval_steps 6000 "
            "--logging_steps 100 --save_steps 1000 --save_total_limit 2 --seed 1 --output_dir runs/bert",
            WIKITEXT,
            "python scripts/evaluate_bert.py --model runs/bert --files enwiki_sample.test.jsonl.gz wikitext2.test.txt",
        ],
        ENWIKI_TEST,
    ),
    "bert_mini_two_hours": Recipe(
        [
            "torchrun --nproc_per_node 2 scripts/pretrain_bert.py --train_files enwiki_sample/train.jsonl.gz "
            "novels_pd/train.jsonl.gz --validation_files enwiki_sample/validation.jsonl.gz --preset mini "
            "--vocab_size 8000 --hidden_dropout_prob 0 --attention_probs_dropout_prob 0 --repeats 2 "
            "--phase_lengths 32 128 512 --phase_shares 0.05 0.84 0.11 --mixed_phases 2 --shifted_positions 0.25 "
            "--mlm_probability 0.15 --max_tokens_per_batch 4096 --bf16 --muon --weight_decay 0.1 --initial_embeddings "
            "examples --learning_rate 1e-3 --lr_scheduler_type linear --warmup_steps 300 --max_steps 16000 "
            "--validation_lengths 128 512 --eval_strategy steps --eval_steps 4800 --logging_steps 50 "
            "--save_steps 1200 --save_total_limit 2 --seed 1 --output_dir runs/bert",
            WIKITEXT,
            "python scripts/evaluate_bert.py --model runs/bert --max_length 128 512 --by_position 8 --files "
            "enwiki_sample.test.jsonl.gz wikitext2.test.txt",
        ],
        ENWIKI_TEST,
    ),
    **finetuning(
        "sst2", "classification", "glue/sst2", "--text_column sentence ", optimizer="", after="bert_mini_pretraining"
    ),
    **finetuning("cola", "classification", "glue/cola", "--text_column sentence --main_score matthews "),
    **finetuning("rte", "classification", "glue/rte", PAIR),
    **finetuning("stsb", "classification", "glue/stsb", f"{PAIR}--label_column score --regression ", has_test=True),
    **finetuning("wnut17", "token_classification", "ner/wnut17", "--tags_column ner_tags ", has_test=True),
    **finetuning("codah", "multiple_choice", "multiple_choice/codah", has_test=True),
    **squad(),
    "gpt_mini_pretraining": Recipe(
        [
            'zcat novels_pd/train.jsonl.gz | awk \'NR % 40 == 7 {print > "novels.test.jsonl"; next} '
            '{print > "novels.train.jsonl"}\'',
            "python scripts/pretrain_gpt.py --train_files enwiki_sample/train.jsonl.gz novels.train.jsonl "
            "--validation_files enwiki_sample/validation.jsonl.gz --vocab_size 8000 --preset mini "
            "--hidden_dropout_prob 0 --attention_probs_dropout_prob 0 --block_length 256 "
            "--per_device_train_batch_size 8 --bf16 --learning_rate 1e-3 --warmup_steps 400 --max_steps 9000 "
            "--eval_strategy steps --eval_steps 1500 --logging_steps 50 --save_steps 250 --save_total_limit 2 "
            "--seed 1 --output_dir runs/gpt",
            "python scripts/evaluate_gpt.py --model runs/gpt --files enwiki_sample.test.jsonl.gz novels.test.jsonl",
        ],
        ENWIKI_TEST,
    ),
    **gpt_finetuning("cola", 4, "--main_score matthews "),
    **gpt_finetuning("sst2", 1),
    "ngram_enwiki_novels": Recipe(
        [
            "python scripts/benchmark/ngram_baseline.py --kenlm kenlm/build/bin --tokenizer runs/gpt --train_files "
            "enwiki_sample/train.jsonl.gz novels.train.jsonl --files enwiki_sample.test.jsonl.gz novels.test.jsonl"
        ],
        after="gpt_mini_pretraining",
        results_option="output_file",
    ),
    "vit_digits": Recipe(["python scripts/demo_vit.py --results_file model_cards/results/vit_digits.json"]),
}
TASKS = tuple(RECIPES)


@dataclass
class ReproduceArguments:
    """Where the data is, and what to write."""

    data_dir: str = field(
        default="data", metadata={"help": "Folder of the data sets, in subfolders as the commands name them."}
    )
    output_dir: str = field(default="reproduced", metadata={"help": "Folder for models, translations and results."})
    dry_run: bool = field(default=False, metadata={"help": "Only show the commands."})


def results_path(name: str) -> str:
    """Return the file that a recipe writes its results to, in its folder."""
    return f"runs/{name}.json"


def data_files(recipe: Recipe) -> list[str]:
    """List the data files that a recipe reads."""
    named = [each for command in recipe.commands for each in DATA_FILE.findall(command)]
    return sorted({*named, *(each.source for each in recipe.files.values())})


def runnable(command: str, data_dir: Path) -> str:
    """Write a command with this interpreter, the scripts of this folder, and the data.

    Processes take a free port.
    """
    command = DATA_FILE.sub(lambda found: shlex.quote(str(data_dir / found[0])), command)
    python = shlex.quote(sys.executable)
    for program, replacement in (
        ("torchrun", f"{python} -m torch.distributed.run --standalone"),
        ("hf-vanilla", f"{python} -m hf_vanilla_cli"),
        ("python", python),
    ):
        if command.startswith(f"{program} "):
            command = replacement + command.removeprefix(program)
            break
    return SCRIPT.sub(lambda found: f" {shlex.quote(str(SCRIPTS / found[1]))}", command, count=1)


def options_of_results(name: str, minutes: float) -> str:
    """Return the options with which the last command of a recipe writes its results."""
    recipe = RECIPES[name]
    options = f" --{recipe.results_option} {results_path(name)}"
    if len(recipe.commands) > 1:  # an evaluation, which does not know of the other commands
        notes = [*([f"training_minutes={minutes:.1f}"] if minutes else []), *recipe.notes]
        options += f" --commands {shlex.join(recipe.commands)}"
        options += f" --notes {shlex.join(notes)}" if notes else ""
    return options


def lines_of(name: str, data_dir: Path, seconds: dict[str, float]) -> list[str]:
    """Return the commands of a recipe as they are run; `seconds` has the times of those that are done."""
    recipe = RECIPES[name]
    minutes = sum(seconds.get(each, 0) for each in recipe.commands if re.search("train[_-]", each)) / 60
    lines = [runnable(command, data_dir) for command in recipe.commands]
    lines[-1] = re.sub(r" --results_file \S+", "", lines[-1]) + options_of_results(name, minutes)
    return lines


def run_line(line: str, folder: Path) -> None:
    """Run a command in a folder, on the CPU if there are too few GPUs for its processes.

    Ctrl-C and SIGTERM reach it, and it may save a checkpoint before it ends.
    """
    command = ["bash", "-o", "pipefail", "-c", line] if PIPE in line else shlex.split(line)
    processes = PROCESSES.search(line)
    has_too_few_gpus = processes is not None and 0 < torch.cuda.device_count() < int(processes[1])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if has_too_few_gpus else None
    process = subprocess.Popen(command, cwd=folder, env=environment)
    earlier = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, earlier)
    if status != 0:
        raise ValueError(
            f"This command has ended with status {status}; run the script again to continue from it: {line}"
        )


def extract(wanted: Extract, data_dir: Path, path: Path) -> None:
    """Make a file of a data file."""
    if wanted.column is None:
        shutil.copyfile(data_dir / wanted.source, path)
        return
    with gzip.open(data_dir / wanted.source, "rt", encoding="utf-8") as rows, replacing_file(str(path)) as file:
        try:
            for row in itertools.islice(rows, wanted.rows):
                file.write(json.loads(row)[wanted.column] + "\n")
        except (gzip.BadGzipFile, EOFError, ValueError, LookupError, TypeError) as error:
            rule = f"must be gzipped lines of JSON, each with a text `{wanted.column}`"
            raise ValueError(f"{data_dir / wanted.source} {rule}: {error!r}.") from None


def read_state(folder: Path) -> dict[str, Any]:
    """Read what is done in a folder, and how long it took."""
    return {"done": {}, "seconds": {}, **read_json(folder / STATE_FILE)}


def reproduce(name: str, data_dir: Path, folder: Path) -> bool:
    """Run the commands of a recipe that are not done yet, those of the model that it starts from before.

    All that follows a command that is run is run too; the answer is whether there was one.
    """
    recipe = RECIPES[name]
    has_new_model = recipe.after is not None and reproduce(recipe.after, data_dir, folder)
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    state = read_state(folder)
    earlier = zip(recipe.commands, [] if has_new_model else state["done"].get(name, []), strict=False)
    done = [command for command, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], earlier)]
    if len(done) == len(recipe.commands):
        return False
    for path, wanted in recipe.files.items():
        extract(wanted, data_dir, folder / path)
    for number, command in enumerate(recipe.commands[len(done) :], start=len(done)):
        line = lines_of(name, data_dir, state["seconds"])[number]
        sys.stderr.write(f"{name}: {command}\n")
        start = time.monotonic()
        try:
            run_line(line, folder)
            done.append(command)
        finally:
            state = read_state(folder)  # anew, since another recipe may have run beside this one
            state["seconds"][command] = state["seconds"].get(command, 0.0) + time.monotonic() - start
            state["done"][name] = done
            with replacing_file(str(folder / STATE_FILE)) as file:
                file.write(json.dumps(state, indent=1) + "\n")
    return True


def rows(recorded: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """Return the rows of a table with recorded and reproduced scores."""
    before = {(score.dataset, score.name): score.value for score in list_scores(recorded)} if recorded else {}
    lines = ["| data | score | recorded | reproduced |", "|---|---|---|---|"]
    for score in list_scores(measured):
        lines.append(
            f"| {score.dataset} | {score.name} | {before.get((score.dataset, score.name), '–')} | {score.value} |"
        )
    return lines


def show_commands(names: list[str], data_dir: Path, folder: Path) -> None:
    """Print the commands of recipes."""
    sys.stdout.write(f"mkdir -p {shlex.quote(str(folder / 'runs'))} && cd {shlex.quote(str(folder))}\n")
    for name in names:
        for file, wanted in RECIPES[name].files.items():
            content = "a copy" if wanted.column is None else f"the column {wanted.column}"
            first = f"the first {wanted.rows} rows of " if wanted.rows else ""
            sys.stdout.write(f"# {file}: {content} of {first}{data_dir / wanted.source}\n")
        sys.stdout.write("\n".join(lines_of(name, data_dir, {})) + "\n")


def main() -> None:
    """Check that the data is there, run the commands, and print the scores."""
    name = take_task(TASKS)
    (arguments,) = parse_arguments(ReproduceArguments, description=__doc__)
    after = RECIPES[name].after
    names = [name] if after is None else [after, name]
    data_dir = Path(arguments.data_dir).absolute()
    folder = Path(arguments.output_dir).absolute() / names[0]
    if arguments.dry_run:
        show_commands(names, data_dir, folder)
        return
    scripts = [each for recipe in names for command in RECIPES[recipe].commands for each in SCRIPT.findall(command)]
    if not all((SCRIPTS / each).is_file() for each in scripts):
        raise ValueError(f"The installed package lacks a script of {name}: run this in the project's repository.")
    if shutil.which("bash") is None and any(PIPE in command for each in names for command in RECIPES[each].commands):
        raise ValueError(f"The commands of {name} have pipes, and so need bash; install it.")
    missing = [each for recipe in names for each in data_files(RECIPES[recipe]) if not (data_dir / each).exists()]
    if missing:
        raise ValueError(f"`data_dir` ({data_dir}) must have {', '.join(missing)}.")
    reproduce(name, data_dir, folder)
    if not (folder / results_path(name)).is_file():
        raise ValueError(
            f"{folder / results_path(name)} is missing, though {folder / STATE_FILE} says that its command is done; "
            "remove that to run all commands again."
        )
    if not RECORDED.is_dir():
        sys.stderr.write("The recorded scores are in the project's repository, not in the installed package.\n")
    recorded, measured = read_json(RECORDED / f"{name}.json"), read_json(folder / results_path(name))
    sys.stdout.write("\n".join(rows(recorded, measured)) + "\n")


if __name__ == "__main__":
    sys.exit(run(main))
