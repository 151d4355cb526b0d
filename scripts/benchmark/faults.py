"""Shared by the soak: tiny trainings in forked processes, kills of them, and damages of their checkpoints."""

import ctypes
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.state import PartialState
from safetensors.torch import load_file, save_file

from hf_vanilla.data import date_corpus
from hf_vanilla.training.manifest import MANIFEST_FILE, list_files


SCRIPTS = Path(__file__).parents[1]
# System calls that change files; strace ignores those with a question mark that a machine does not have.
CALLS = (
    "write pwrite64 writev ?rename ?renameat renameat2 ?unlink unlinkat ?rmdir ?mkdir mkdirat fsync fdatasync "
    "ftruncate ?creat ?link linkat ?symlink symlinkat ?copy_file_range ?sendfile ?chmod fchmod ?utimensat"
)
LIMIT = 300  # seconds: a run that takes longer hangs
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)  # of Linux's prctl
GRACE = 3.0  # seconds between SIGTERM and SIGKILL for the other ranks; torchrun has 30
WEIGHTS = "model.safetensors"
UPDATES = "--max_steps 9 --save_steps 2 --warmup_steps 2 --logging_steps 5 --disable_tqdm true --use_cpu"
SIZES = {
    "translator": "--vocab_size 270 --d_model 16 --d_ff 24 --num_heads 4 --encoder_layers 1 --decoder_layers 1 "
    "--max_tokens_per_batch 300",
    "BERT": "--preset tiny --hidden_size 16 --num_attention_heads 4 --intermediate_size 24 --vocab_size 90 "
    "--max_tokens_per_batch 256 --phase_lengths 16 32",
}


class Training(NamedTuple):
    """A training to kill, in so many processes.

    Attributes:
        name: `translator` or `BERT`.
        ranks: Number of processes.
    """

    name: str
    ranks: int


TRAININGS = [Training(name, ranks) for ranks in (1, 2) for name in SIZES]


def training_of_case(number: int) -> Training:
    """Return the training of a case: each fifth has two processes.

    Args:
        number (`int`): The case.

    Returns:
        `Training`: its training.
    """
    return Training(list(SIZES)[number // 5 % 2 if number % 5 == 4 else number % 2], 2 if number % 5 == 4 else 1)


@dataclass
class Kill:
    """A SIGKILL at a system call.

    Attributes:
        rank: The process.
        call: Name of the call.
        number: Which of a thread's calls of this name since strace was attached, from 1; 0 kills nothing.
        delay: Seconds from the start until strace is attached.
    """

    rank: int
    call: str
    number: int
    delay: float = 0.0


@dataclass
class Ending:
    """How a run has ended.

    Attributes:
        codes: Exit status of each process, minus the signal that ended it; `None` where it hung and was killed.
        log: What it wrote to both outputs.
        seconds: How long it took.
        traces: What strace wrote, of each traced process.
    """

    codes: list[int | None]
    log: str
    seconds: float
    traces: dict[int, str] = field(default_factory=dict)


def write_corpora(folder: Path) -> None:
    """Write what the trainings learn from.

    Args:
        folder (`Path`): The folder, which is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pairs = date_corpus(90)
    for column in ("source", "target"):
        (folder / column).write_text("".join(f"{text}\n" for text in pairs[column]), encoding="utf-8")
    animals = ("dog", "cat", "bird", "horse")
    documents = [
        "\n".join(f"the {animals[number % 4]} has {legs} legs ." for legs in range(number % 3 + 2, 9))
        for number in range(40)
    ]
    (folder / "documents.txt").write_text("\n\n".join(documents), encoding="utf-8")


def command_of(training: Training, corpora: Path, run_dir: Path) -> list[str]:
    """Return script and options of a training.

    Args:
        training (`Training`): The training.
        corpora (`Path`): The folder of [`write_corpora`].
        run_dir (`Path`): Its `--output_dir`.

    Returns:
        `list[str]`: the command line, from the script on.
    """
    if training.name == "translator":
        files = ["--train_source_file", str(corpora / "source"), "--train_target_file", str(corpora / "target")]
        script = "train_translation.py"
    else:
        files, script = ["--train_files", str(corpora / "documents.txt")], "pretrain_bert.py"
    return [str(SCRIPTS / script), *files, *f"{SIZES[training.name]} {UPDATES}".split(), "--output_dir", str(run_dir)]


def run_forked(function: Callable[[], Any], log: Path, environment: dict[str, str], gate: int | None = None) -> int:
    """Call a function in a forked process, which has imported all that this one has.

    Args:
        function (`Callable[[], Any]`): The function. Its end or `SystemExit` gives the exit status; an error is 1.
        log (`Path`): A file for both outputs of the process, which is extended.
        environment (`dict[str, str]`): More environment variables.
        gate (`int`, *optional*): A pipe to read a byte from before the function is called.

    Returns:
        `int`: the process.
    """
    sys.stdout.flush()  # otherwise the child writes the same again
    ready, begun = os.pipe()
    process = os.fork()
    if process:
        os.close(begun)
        os.read(ready, 1)  # until the process can be traced, or has ended
        os.close(ready)
        return process
    code = 1
    try:
        os.close(ready)
        allow_tracing()
        os.close(begun)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        PartialState._reset_state()
        if gate is not None:
            os.read(gate, 1)
        function()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def allow_tracing() -> None:
    """Have other processes than the parent trace this one, which Yama, a security module of Linux, forbids."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)  # an error without Yama


def run_training(command: list[str], ranks: int, kills: list[Kill] | None = None) -> Ending:
    """Run a training script to its end, or until it is killed; then the other ranks get SIGTERM, as from torchrun.

    Args:
        command (`list[str]`): Script and options; the last is the folder of the run, which gets a log beside it.
        ranks (`int`): Number of processes.
        kills (`list[Kill]`, *optional*): Calls to trace, at most one for each rank.

    Returns:
        `Ending`: how it ended.

    Raises:
        ValueError: if strace can't trace it.
    """

    def script() -> None:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")

    log = Path(command[-1]).with_suffix(".log")
    log.unlink(missing_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    gate, opened = os.pipe()
    processes = []
    for rank in range(ranks):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if ranks > 1 else {}
        environment = {name: str(value) for name, value in names.items()} | shared if ranks > 1 else {}
        processes.append(run_forked(script, log, environment, gate))
    started = time.monotonic()
    tracers, waiting = [], sorted(kills or [], key=lambda kill: kill.delay)
    try:
        while waiting and waiting[0].delay == 0:
            kill = waiting.pop(0)
            tracers.append((kill.rank, attach(processes[kill.rank], kill, log.with_suffix(f".trace{kill.rank}"))))
        os.write(opened, bytes(ranks))
        for kill in waiting:
            time.sleep(kill.delay)
            tracers.append((kill.rank, attach(processes[kill.rank], kill, log.with_suffix(f".trace{kill.rank}"))))
    except ValueError:
        for process in processes:  # which may wait at the gate
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        raise
    codes = wait_for_ranks(processes, started + LIMIT)
    os.close(gate)
    os.close(opened)
    for _, tracer in tracers:
        tracer.wait()
    traces = {rank: log.with_suffix(f".trace{rank}").read_text(errors="replace") for rank, _ in tracers}
    return Ending(codes, log.read_text(errors="replace"), time.monotonic() - started, traces)


def attach(process: int, kill: Kill, output: Path) -> subprocess.Popen:
    """Attach strace to a process and its threads, and wait until it traces.

    Args:
        process (`int`): The process.
        kill (`Kill`): Where to kill it.
        output (`Path`): File for the calls.

    Returns:
        `subprocess.Popen`: strace.

    Raises:
        ValueError: if strace ends although the process has not; with what strace says.
    """
    injected = ["-e", f"inject={kill.call}:signal=SIGKILL:when={kill.number}"] if kill.number else []
    trace = f"trace={','.join(CALLS.split())}"
    command = ["strace", "-f", "-y", "-s", "0", "-o", str(output), "-e", trace, *injected, "-p", str(process)]
    output.write_text("")
    errors = Path(f"{output}.errors")
    with errors.open("w") as file:
        tracer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
    status = Path(f"/proc/{process}/status")
    while tracer.poll() is None and "\nTracerPid:\t0\n" in status.read_text():
        time.sleep(0.001)
    if tracer.poll() is not None and not output.read_text() and "\nState:\tZ" not in status.read_text():
        reason = " ".join(errors.read_text(errors="replace").split()) or "no message"
        raise ValueError(f"strace can't trace a training; give 0 --kills and --damages, or allow it: {reason}")
    return tracer


def wait_for_ranks(processes: list[int], deadline: float) -> list[int | None]:
    """Wait for the processes of a run; once one has failed, end the others.

    Args:
        processes (`list[int]`): The processes.
        deadline (`float`): When they hang, on the monotonic clock.

    Returns:
        `list[int | None]`: exit status of each; `None` of those that were killed at the deadline.
    """
    codes: dict[int, int | None] = {}
    hung = False
    while len(codes) < len(processes):
        for process in set(processes) - codes.keys():
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended:
                continue
            codes[process] = None if hung else os.waitstatus_to_exitcode(status)
            if codes[process]:
                for other in set(processes) - codes.keys():
                    os.kill(other, signal.SIGTERM)
                deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            hung = not any(codes.values())
            for process in set(processes) - codes.keys():
                os.kill(process, signal.SIGKILL)
            deadline += LIMIT
        time.sleep(0.002)
    return [codes[process] for process in processes]


def recorded_calls(trace: str, folder: Path) -> list[tuple[str, int]]:
    """Find the calls in a trace that change files of a folder.

    Args:
        trace (`str`): What strace wrote.
        folder (`Path`): The folder.

    Returns:
        `list[tuple[str, int]]`: the name of each call, and which of those of its thread it was.
    """
    counts: Counter = Counter()
    found = []
    for line in trace.splitlines():
        begun = re.match(r"(\d+) +(\w+)\(", line)
        if begun is not None:
            counts[begun.groups()] += 1
            if f"{folder}/" in line:
                found.append((begun[2], counts[begun.groups()]))
    return found


def place_of_kill(trace: str, kill: Kill) -> str:
    """Return the call at which a process was killed, without the numbers of threads.

    Args:
        trace (`str`): What strace wrote.
        kill (`Kill`): The kill.

    Returns:
        `str`: such as `fsync(5</tmp/run/checkpoint-2/config.json>)`.
    """
    lines = re.findall(rf"^\d+ +({kill.call}\(.*)", trace, flags=re.MULTILINE)
    return lines[-1].split(" <unfinished")[0].split(" = ")[0].strip() if lines else ""


def is_inside_save(run_dir: Path) -> bool:
    """Check whether a killed run has left a save that was not finished.

    Args:
        run_dir (`Path`): The folder of the run.

    Returns:
        `bool`: true for a checkpoint that is being written or removed, one without manifest, and a final model.
    """
    unfinished = any((run_dir / name).exists() for name in (".staging", "_saving"))
    return unfinished or any(not (folder / MANIFEST_FILE).exists() for folder in run_dir.glob("checkpoint-*"))


def same_weights(one: Path, other: Path) -> bool:
    """Compare the final models of two runs, bit by bit.

    Args:
        one (`Path`): The folder of a run.
        other (`Path`): Another one.

    Returns:
        `bool`: whether both are there and equal.
    """
    if not (one / WEIGHTS).is_file() or not (other / WEIGHTS).is_file():
        return False
    ours, theirs = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    return ours.keys() == theirs.keys() and all(
        torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)) for name, tensor in ours.items()
    )


def cut(path: Path, rng: random.Random) -> None:
    """Truncate a file, by two bytes at least."""
    os.truncate(path, rng.randrange(path.stat().st_size - 1))


def flip(path: Path, rng: random.Random) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def zero(path: Path, rng: random.Random) -> None:
    """Overwrite a file with zeros."""
    path.write_bytes(bytes(path.stat().st_size))


def drop(path: Path, rng: random.Random) -> None:
    """Remove a file."""
    path.unlink()


def change_tensors(change: Callable[[dict[str, torch.Tensor], str], None]) -> Callable[[Path, random.Random], None]:
    """Return a damage of a file of weights that leaves it a good safetensors file."""

    def damage(path: Path, rng: random.Random) -> None:
        tensors = load_file(path)
        change(tensors, rng.choice(sorted(name for name, tensor in tensors.items() if tensor.any())))
        save_file(tensors, path, metadata={"format": "pt"})

    return damage


def zero_tensor(tensors: dict[str, torch.Tensor], name: str) -> None:
    """Overwrite a tensor with zeros."""
    tensors[name] = torch.zeros_like(tensors[name])


def drop_tensor(tensors: dict[str, torch.Tensor], name: str) -> None:
    """Remove a tensor."""
    del tensors[name]


def rename_tensor(tensors: dict[str, torch.Tensor], name: str) -> None:
    """Rename a tensor."""
    tensors[f"{name}_old"] = tensors.pop(name)


FILE_DAMAGES = {"cut": cut, "bit flipped": flip, "zeroed": zero, "file dropped": drop}
TENSOR_DAMAGES = {
    "tensor zeroed": change_tensors(zero_tensor),
    "tensor dropped": change_tensors(drop_tensor),
    "tensor renamed": change_tensors(rename_tensor),
}


def damage_checkpoint(checkpoint: Path, rng: random.Random) -> tuple[str, str]:
    """Damage one file of a checkpoint. The pickled arguments are spared: nothing reads them.

    Args:
        checkpoint (`Path`): The checkpoint.
        rng (`random.Random`): Source of random numbers.

    Returns:
        `tuple[str, str]`: what was done, and the name of the file.
    """
    how = rng.choice([*FILE_DAMAGES, *TENSOR_DAMAGES])
    if how in TENSOR_DAMAGES:
        name = WEIGHTS
        TENSOR_DAMAGES[how](checkpoint / name, rng)
    else:
        name = rng.choice([*list_files(checkpoint), MANIFEST_FILE])
        FILE_DAMAGES[how](checkpoint / name, rng)
    return how, name


def copy_run(source: Path, target: Path, checkpoints: int) -> list[Path]:
    """Copy a finished run as if it had been killed after some of its checkpoints.

    Args:
        source (`Path`): The folder of the run.
        target (`Path`): The folder of the copy, which is replaced.
        checkpoints (`int`): How many to keep, of the first ones.

    Returns:
        `list[Path]`: the checkpoints of the copy, by step.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    for name in ("trainer_state.json", WEIGHTS):
        (target / name).unlink()
    found = sorted(target.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    for folder in found[checkpoints:]:
        shutil.rmtree(folder)
    return found[:checkpoints]
