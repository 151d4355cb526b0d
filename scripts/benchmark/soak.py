#!/usr/bin/env python
r"""Kill trainings, damage checkpoints and give hostile inputs, hundreds of times, and count what comes of it.

- kills: a tiny training, of a translator or a BERT, gets SIGKILL at a random system call that changes files (strace
  sends it). The same command again has to end with the same final weights, bit by bit. Each fifth has two processes.
- damages: files of a run's newest checkpoints are cut, flipped, zeroed or dropped, or lose a tensor. The same command
  again has to resume from an older one and end with the same weights, or to fail and name the file.
- hostile: random configs, inputs, options of searches and files, of tests/models/hostile_inputs.py. Each has to be
  refused with ValueError, TypeError or StrictDataclassError, or to compute numbers.

    python scripts/benchmark/soak.py
    python scripts/benchmark/soak.py --kills 5 --damages 5 --hostile 50 --folder /tmp/soak  # a quick one

The same command continues a soak that was stopped. It needs a clone of the repository, Linux and strace. The
trainings are the scripts, in processes forked from this one, as importing torch would take longer than they do; two
processes are two such forks, with the environment variables of torchrun.
"""

import datetime
import importlib
import json
import os
import random
import re
import resource
import runpy
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import faults
import hypothesis
import torch
from faults import Ending, Kill, Training
from hypothesis import HealthCheck, settings
from hypothesis import Phase as HypothesisPhase
from measuring import FOLDER
from tqdm.auto import tqdm
from tqdm.std import tqdm as StandardTqdm

from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.command_line.report import write_report
from hf_vanilla.training import command_of_process
from hf_vanilla.training.manifest import MANIFEST_FILE, hash_of_code


HOSTILE_INPUTS = Path(__file__).parents[2] / "tests" / "models"
BATCH = 50  # hostile inputs of a process
LONGEST_BATCH = 600  # seconds
MOST_MEMORY = 16 * 2**30  # bytes: an input that takes more fails
DRAWS = 20  # of a kill, until the training gets to it


@dataclass
class SoakArguments:
    """Options of the soak."""

    kills: int = field(default=200, metadata={"help": "Trainings to kill."})
    damages: int = field(default=200, metadata={"help": "Runs to damage."})
    hostile: int = field(default=10_000, metadata={"help": "Hostile inputs."})
    seed: int = field(default=0, metadata={"help": "Seed of all choices."})
    folder: str = field(default=str(FOLDER / "soak"), metadata={"help": "Folder of the runs and of the log."})
    output_file: str = field(default=str(FOLDER / "soak.json"), metadata={"help": "JSON file for the counts."})


class CaseLog:
    """The cases so far, one JSON object in a line for each.

    Args:
        path (`Path`): The file; the cases in it are not tried again.
        seed (`int`): Seed of the soak.

    Raises:
        ValueError: if the file is of another soak.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        header = {"seed": seed, "code": hash_of_code()}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else [json.dumps(header)]
        if json.loads(lines[0]) != header:
            raise ValueError(f"{path} is of another seed or version of the code; remove it, or give another `folder`.")
        self.cases: list[dict[str, Any]] = []
        for line in lines[1:]:
            try:
                self.cases.append(json.loads(line))
            except ValueError:
                break  # cut where the soak was killed
        path.write_text("".join(f"{line}\n" for line in lines[: len(self.cases) + 1]), encoding="utf-8")

    def run(self, part: str, count: int, attempt: Callable[[int], dict[str, Any]]) -> None:
        """Try the cases of a part that have not been tried.

        Args:
            part (`str`): Name of the part.
            count (`int`): Number of its cases.
            attempt (`Callable[[int], dict[str, Any]]`): Tries a case, and describes it with `outcome` and `failures`.
        """
        tried = {case["case"] for case in self.of(part)}
        with tqdm(total=count, initial=len(tried), desc=part) as progress:
            for number in sorted(set(range(count)) - tried):
                case = {"part": part, "case": number, **attempt(number)}
                self.cases.append(case)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(case, ensure_ascii=False) + "\n")
                progress.set_postfix(failures=sum(len(each["failures"]) for each in self.of(part)))
                progress.update()

    def of(self, part: str) -> list[dict[str, Any]]:
        """Return the cases of a part.

        Args:
            part (`str`): Name of the part.

        Returns:
            `list[dict[str, Any]]`: the cases.
        """
        return [case for case in self.cases if case["part"] == part]


class Trainings:
    """Undisturbed runs, and disturbed ones to compare with them.

    Args:
        folder (`Path`): Folder of all runs.
        seed (`int`): Seed of all choices.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        faults.write_corpora(folder / "corpora")
        for script in ("train_translation.py", "pretrain_bert.py"):
            runpy.run_path(str(faults.SCRIPTS / script), run_name="imported")

    def command(self, training: Training, run_dir: Path, *options: str) -> list[str]:
        """Return the command line of a training; its last argument is the folder of the run."""
        script, *others = faults.command_of(training, self.folder / "corpora", run_dir)
        return [script, *options, *others]

    def reference(self, training: Training) -> tuple[Path, dict[str, Any]]:
        """Return the undisturbed run, which the first call makes.

        Args:
            training (`Training`): The training.

        Returns:
            `tuple[Path, dict[str, Any]]`: its folder; its `calls` by rank, and its `seconds`.

        Raises:
            ValueError: if it fails, or strace has recorded no calls of it.
        """
        run_dir = self.folder / f"undisturbed_{training.name}_{training.ranks}"
        facts = run_dir.with_suffix(".json")
        if not facts.exists():
            shutil.rmtree(run_dir, ignore_errors=True)
            kills = [Kill(rank, "write", 0) for rank in range(training.ranks)]
            ending = faults.run_training(self.command(training, run_dir), training.ranks, kills)
            if any(code != 0 for code in ending.codes):
                raise ValueError(f"The undisturbed training {training} has failed: {ending.log[-2000:]}")
            calls = [faults.recorded_calls(ending.traces[rank], run_dir) for rank in range(training.ranks)]
            if not all(calls):
                raise ValueError(f"strace has recorded no calls of {training} that change files of {run_dir}.")
            facts.write_text(json.dumps({"calls": calls, "seconds": ending.seconds}))
        return run_dir, json.loads(facts.read_text())

    def kill(self, number: int) -> dict[str, Any]:
        """Kill a training at a random call, and run it again to its end."""
        rng, training = random.Random(f"{self.seed} kill {number}"), faults.training_of_case(number)
        expected, facts = self.reference(training)
        command = self.command(training, self.folder / "killed", "--save_total_limit", "2")
        for _ in range(DRAWS):
            shutil.rmtree(self.folder / "killed", ignore_errors=True)
            kill = draw_kill(rng, facts)
            ending = faults.run_training(command, training.ranks, [kill])
            if any(code != 0 for code in ending.codes):
                break
        place = faults.place_of_kill(ending.traces[kill.rank], kill).replace(str(self.folder), "")
        case = {"training": training.name, "ranks": training.ranks, "rank": kill.rank, "place": place}
        case |= {"delay": round(kill.delay, 3), "call": kill.call, "number": kill.number}
        case["inside_save"] = faults.is_inside_save(self.folder / "killed")
        if ending.codes[kill.rank] != -9:
            return {**case, **self.failure(number, f"not killed, but ended with {ending.codes}", ending)}
        ending = faults.run_training(command, training.ranks)
        outcome, resumed = outcome_of(ending)
        case["resumed_from"] = resumed
        if any(code != 0 for code in ending.codes):
            return {**case, **self.failure(number, f"ended with {ending.codes} after a kill", ending)}
        if not faults.same_weights(self.folder / "killed", expected):
            return {**case, **self.failure(number, f"{outcome}, but other weights", ending)}
        return {**case, "outcome": f"{outcome}, weights bit-equal", "failures": []}

    def damage(self, number: int) -> dict[str, Any]:
        """Damage checkpoints of a finished run, and run it again."""
        rng, training = random.Random(f"{self.seed} damage {number}"), faults.training_of_case(number)
        expected, _ = self.reference(training)
        run_dir = self.folder / "damaged"
        checkpoints = faults.copy_run(expected, run_dir, rng.randint(1, 5))
        newest = rng.choice([1, 1, 1, 2, len(checkpoints)])
        damaged = {folder.name: faults.damage_checkpoint(folder, rng) for folder in checkpoints[-newest:]}
        case = {
            "training": training.name,
            "ranks": training.ranks,
            "checkpoints": len(checkpoints),
            "damaged": damaged,
        }
        ending = faults.run_training(self.command(training, run_dir), training.ranks)
        outcome, resumed = outcome_of(ending)
        case["resumed_from"] = resumed
        only_unfinished = all(damage == ("file dropped", MANIFEST_FILE) for damage in damaged.values())
        reason = None
        if resumed in damaged or outcome == "was finished":
            reason = f"{outcome}: from a damaged checkpoint"
        elif None in ending.codes:
            reason = "hung"
        elif any(code != 0 for code in ending.codes):
            outcome = "refused, file named"
            if len(damaged) < len(checkpoints):
                reason = "refused although an older checkpoint is good"
            elif not any(name in ending.log for _, name in damaged.values()):
                reason = "refused, but no file named"
        elif outcome == "started anew" and not (only_unfinished and len(damaged) == len(checkpoints)):
            reason = "started anew"
        elif not faults.same_weights(run_dir, expected):
            reason = f"{outcome}, but other weights"
        else:
            outcome = f"{outcome}, weights bit-equal"
        return {**case, **(self.failure(number, reason, ending) if reason else {"outcome": outcome, "failures": []})}

    def failure(self, number: int, reason: str, ending: Ending) -> dict[str, Any]:
        """Describe a failure, and keep what is left of its run."""
        kept = self.folder / f"failure_{number}"
        for name in ("killed", "damaged"):
            for path in (self.folder / name, self.folder / f"{name}.log"):
                if path.exists():
                    shutil.copytree(path, kept / name, dirs_exist_ok=True) if path.is_dir() else shutil.copy(
                        path, kept
                    )
        lines = ending.log.strip().splitlines()[-3:]
        return {"outcome": f"FAILED: {reason}", "failures": [f"{reason}: {' / '.join(lines)}"[:1000]]}


def draw_kill(rng: random.Random, facts: dict[str, Any]) -> Kill:
    """Draw a call of an undisturbed run, or the next of a kind after a random time, which reaches threads too."""
    rank = rng.randrange(len(facts["calls"]))
    call, number = rng.choice(facts["calls"][rank])
    if rng.random() < 0.5:
        return Kill(rank, call, number)
    return Kill(rank, call, rng.randint(1, 3), rng.uniform(0.0, facts["seconds"]))


def outcome_of(ending: Ending) -> tuple[str, str | None]:
    """Return what a run has done with the checkpoints it found, and the name of the one that it resumed from."""
    resumed = re.search(r"Resuming from .*(checkpoint-\d+);", ending.log)
    if "is finished: it has all" in ending.log:
        return "was finished", None
    return ("resumed", resumed[1]) if resumed else ("started anew", None)


def hostile_batch(number: int, sizes: list[tuple[str, int]], seed: int, folder: Path) -> dict[str, Any]:
    """Try a batch of hostile inputs in a process of its own, which may crash."""
    kind, count = sizes[number]
    output, log = folder / "hostile.json", folder / "hostile.log"
    for path in (output, log):
        path.unlink(missing_ok=True)
    log.touch()
    process = faults.run_forked(partial(try_inputs, kind, count, seed * 1_000_003 + number, output), log, {})
    [code] = faults.wait_for_ranks([process], time.monotonic() + LONGEST_BATCH)
    if code != 0 or not output.exists():
        why = "hangs" if code is None else f"ends the process with {code}"
        found = {"counts": {}, "failures": [f"an input {why}: {log.read_text(errors='replace')[-500:]}"]}
    else:
        found = json.loads(output.read_text())
    return {"kind": kind, "outcome": ", ".join(found["counts"]), **found}


def try_inputs(kind: str, count: int, seed: int, output: Path) -> None:
    """Try inputs of a kind, and write the counts of their outcomes and the failures to a file."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    inputs = importlib.import_module("hostile_inputs")
    counts: Counter = Counter()
    failures: list[str] = []

    def attempt(call: Callable[[], Any]) -> None:
        if counts.total() + len(failures) == count:
            return
        try:
            counts[inputs.outcome(call)] += 1
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}; in {call!r}"[:1000])

    tried = -1
    while tried < counts.total() + len(failures) < count:  # a kind may have fewer different inputs than that
        tried, seed = counts.total() + len(failures), seed + 500_009
        test = hypothesis.given(inputs.KINDS[kind])(attempt)
        test = settings(
            max_examples=count,
            phases=[HypothesisPhase.generate],
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )(test)
        hypothesis.seed(seed)(test)()
    output.write_text(json.dumps({"counts": dict(counts), "failures": failures}))


def sizes_of_batches(kinds: list[str], total: int) -> list[tuple[str, int]]:
    """Share a number of inputs among the kinds, in batches."""
    sizes = []
    while total > 0:
        share = -(-total // len(kinds)) if total < BATCH * len(kinds) else BATCH
        for kind in kinds:
            if total > 0:
                sizes.append((kind, min(share, total)))
                total -= sizes[-1][1]
    return sizes


def summary(log: CaseLog) -> dict[str, Any]:
    """Count the outcomes of all parts."""
    found: dict[str, Any] = {}
    for part in ("kills", "damages"):
        cases = log.of(part)
        counted = {"cases": len(cases), "with two processes": sum(case["ranks"] == 2 for case in cases)}
        found[part] = {**counted, "outcomes": dict(Counter(case["outcome"] for case in cases).most_common())}
    kills, damages, hostile = (log.of(part) for part in ("kills", "damages", "hostile"))
    found["kills"]["inside a save"] = sum(case["inside_save"] for case in kills)
    found["kills"]["calls"] = dict(Counter(case["call"] for case in kills).most_common())
    found["damages"]["damages"] = dict(
        Counter(how for case in damages for how, _ in case["damaged"].values()).most_common()
    )
    by_kind: dict[str, Counter] = {}
    for batch in hostile:
        by_kind.setdefault(batch["kind"], Counter()).update(batch["counts"] | {"failed": len(batch["failures"])})
    outcomes: Counter = sum(by_kind.values(), Counter())
    found["hostile"] = {
        "cases": outcomes.total(),
        "batches": len(hostile),
        "outcomes": dict(outcomes.most_common()),
        "by kind": by_kind,
    }
    found["failures"] = [
        {"part": case["part"], "case": case["case"], "failure": failure}
        for case in log.cases
        for failure in case["failures"]
    ]
    return found


def main() -> None:
    """Check the options, try all cases that are left, and write the counts."""
    (arguments,) = parse_arguments(SoakArguments, description=__doc__)
    for name in ("kills", "damages", "hostile"):
        if getattr(arguments, name) < 0:
            raise ValueError(f"--{name} must not be negative, got {getattr(arguments, name)}.")
    if arguments.kills + arguments.damages > 0 and shutil.which("strace") is None:
        raise ValueError("--kills and --damages need Linux and strace; install it, or give 0 for both.")
    torch.set_num_threads(1)  # a process with more threads can't be forked
    tqdm.monitor_interval = 0
    StandardTqdm.set_lock(threading.RLock())  # its own is shared with forks, and a killed one may have it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = Path(arguments.folder).resolve()  # without links, as in the traces
    folder.mkdir(parents=True, exist_ok=True)
    log = CaseLog(folder / "cases.jsonl", arguments.seed)
    if arguments.kills + arguments.damages > 0:
        trainings = Trainings(folder, arguments.seed)
        log.run("kills", arguments.kills, trainings.kill)
        log.run("damages", arguments.damages, trainings.damage)
    if arguments.hostile > 0:
        sys.path.insert(0, str(HOSTILE_INPUTS))
        kinds = list(importlib.import_module("hostile_inputs").KINDS)
        sizes = sizes_of_batches(kinds, arguments.hostile)
        log.run("hostile", len(sizes), partial(hostile_batch, sizes=sizes, seed=arguments.seed, folder=folder))
    found = summary(log)
    report = {"work": "kills, damages and hostile inputs", "seed": arguments.seed, **found}
    write_report(
        arguments.output_file, {**report, "command": command_of_process(), "date": datetime.date.today().isoformat()}
    )
    print(json.dumps({**found, "failures": len(found["failures"])}, indent=1))
    if found["failures"]:
        first = found["failures"][0]
        raise ValueError(f"{len(found['failures'])} cases have failed; the first: {first}. {log.path} has all.")


if __name__ == "__main__":
    sys.exit(run(main))
