"""The configurations in scripts/launch: a dead process ends the job in time, and it restarts to the same bits."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version


ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts" / "launch"
TRAINING = Path(__file__).with_name("run_with_deaths.py")
PATIENCE = 300  # seconds, for a busy machine
# Two processes add numbers; one of them is killed, once.
WORKER = """
import os, pathlib, signal, sys
import torch
from torch import distributed

distributed.init_process_group("gloo")
rank, folder = distributed.get_rank(), pathlib.Path(sys.argv[1])
number = torch.tensor(rank + 1.0)
distributed.barrier()
if rank == 1 and not (folder / "killed").exists():
    (folder / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)
distributed.all_reduce(number)
(folder / str(rank)).write_text(str(number.item()))
distributed.destroy_process_group()
"""
# Ignores SIGTERM.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: open(f"{sys.argv[1]}/signal", "w").close())
open(f"{sys.argv[1]}/ready", "w").write(str(os.getpid()))
while True:
    time.sleep(0.1)
"""
needs_resume = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="5.17 can't resume several processes on CPU"
)


def start(*arguments, **variables):
    """Start processes on this machine, or on one of several."""
    environment = {**os.environ, "PYTHON": sys.executable, "PROCESSES": "2", **variables}
    return subprocess.Popen(["bash", LAUNCH / "torchrun.sh", *map(str, arguments)], env=environment, cwd=ROOT)


def wait_for(path):
    until = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.02)


def worker_in(folder, program):
    path = folder / "worker.py"
    path.write_text(program)
    return path


def sums_in(folder):
    return [(folder / str(rank)).read_text() for rank in range(2)]


@pytest.mark.promise("process killed")
def test_job_restarts_after_a_death(tmp_path):
    assert start(worker_in(tmp_path, WORKER), tmp_path, RESTARTS="1").wait(PATIENCE) == 0
    assert sums_in(tmp_path) == ["3.0", "3.0"]


def test_job_ends_when_its_restarts_are_used_up(tmp_path):
    assert start(worker_in(tmp_path, WORKER), tmp_path, RESTARTS="0").wait(PATIENCE) == 1


def test_signal_reaches_the_processes_which_are_killed_after_the_grace(tmp_path):
    launcher = start(worker_in(tmp_path, STUBBORN), tmp_path, PROCESSES="1", GRACE="1")
    wait_for(tmp_path / "ready")
    since = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE) != 0
    assert time.monotonic() - since < 25  # torchrun's own grace is 30 s
    assert (tmp_path / "signal").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "ready").read_text()), 0)


@pytest.mark.promise("process killed")
@pytest.mark.slow
def test_two_machines_restart_after_a_death(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        head = f"localhost:{free.getsockname()[1]}"
    worker = worker_in(tmp_path, WORKER)
    common = dict(PROCESSES="1", RESTARTS="1", NODES="2", HEAD=head, ADDRESS="localhost")
    agents = [start(worker, tmp_path, **common) for _ in range(2)]
    assert [agent.wait(PATIENCE) for agent in agents] == [0, 0]
    assert sums_in(tmp_path) == ["3.0", "3.0"]


STUBS = {
    "srun": 'shift; echo $$ >"$FOLDER/step"; exec "$@"',
    "scontrol": 'if [ $1 = show ]; then echo localhost; else echo "$@" >"$FOLDER/queue"; fi',
    "scancel": '[ "$*" = "--signal=TERM 7" ] && kill -TERM $(cat "$FOLDER/step")',
}


def start_in_slurm(folder, program):
    """Run the batch script as Slurm does: a copy of it, in the folder where it was submitted."""
    for name, content in STUBS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{content}\n")
        (folder / name).chmod(0o755)
    script = folder / "slurm_script"
    script.write_text((LAUNCH / "slurm.sh").read_text())
    job = dict(SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="localhost", FOLDER=str(folder))
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **job, "PATH": path, "PYTHON": sys.executable, "PROCESSES": "2", "GRACE": "1"}
    return subprocess.Popen(["bash", script, worker_in(folder, program), folder], env=environment, cwd=ROOT)


def test_job_in_slurm_restarts_and_ends(tmp_path):
    assert start_in_slurm(tmp_path, WORKER).wait(PATIENCE) == 0
    assert sums_in(tmp_path) == ["3.0", "3.0"]
    assert not (tmp_path / "queue").exists()


def test_job_in_slurm_is_queued_again_when_its_time_is_up(tmp_path):
    job = start_in_slurm(tmp_path, STUBBORN)
    wait_for(tmp_path / "ready")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(PATIENCE) != 0
    assert (tmp_path / "signal").exists()
    assert (tmp_path / "queue").read_text() == "requeue 7\n"


@pytest.mark.promise("killed inside a save", "process killed", "process 0 killed in a save")
@pytest.mark.slow
@needs_resume
def test_killed_training_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    deaths = "1-start,1-step,0-save,1-hang"
    for folder, places in ((whole, "none"), (killed, deaths)):
        folder.mkdir()
        assert start(TRAINING, folder, places, RESTARTS="4").wait(3 * PATIENCE) == 0
    events = [line.split() for line in (killed / "times").read_text().splitlines()]
    since = [float(moment) for name, moment in events if name == "death"]
    restarts = [
        min(float(moment) for name, moment in events if name == "start" and float(moment) > death) for death in since
    ]
    assert len(since) == 4
    # All processes have ended then; a hang is noted when it begins, and lasts for `ddp_timeout`.
    assert max(after - before for before, after in zip(since, restarts, strict=True)) < 60
    expected, actual = torch.load(whole / "weights.pt"), torch.load(killed / "weights.pt")
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())


HOSTS = {"node1": "10.77.0.1", "node2": "10.77.0.2"}


@pytest.fixture
def machines(tmp_path):
    """Prefixes of commands that run on two machines, which are network namespaces, joined by a cable."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in HOSTS.items()))
    spaces = {name: f"{name}-{os.getpid()}" for name in HOSTS}
    first, second = spaces.values()
    rename = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
    try:
        for space in spaces.values():
            ip("netns", "add", space)
        ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, space in spaces.items():
            ip("-n", space, "address", "add", f"{HOSTS[name]}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", space, "link", "set", device, "up")
        yield [
            [
                "nsenter",
                f"--net=/run/netns/{space}",
                "unshare",
                "--mount",
                "--uts",
                "bash",
                "-c",
                rename,
                "-",
                hosts,
                name,
            ]
            for name, space in spaces.items()
        ]
    finally:
        for space in spaces.values():
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)


def ip(*arguments):
    """Change the network, or skip the test where that is not allowed."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and `ip`")
    made = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"no network namespaces here: {made.stderr}")


@pytest.mark.promise("process killed")
@pytest.mark.slow
def test_two_hosts_restart_after_a_death(machines, tmp_path):
    worker = worker_in(tmp_path, WORKER)
    variables = dict(PYTHON=sys.executable, PROCESSES="1", RESTARTS="1", NODES="2", HEAD="node1:29400")
    agents = [
        subprocess.Popen(
            [*machine, "bash", LAUNCH / "torchrun.sh", worker, tmp_path], env={**os.environ, **variables}, cwd=ROOT
        )
        for machine in machines
    ]
    assert [agent.wait(PATIENCE) for agent in agents] == [0, 0]
    assert sums_in(tmp_path) == ["3.0", "3.0"]


COMMANDS = re.findall(r"^scripts/launch/torchrun.sh .*?(?=^```|\n\n)", (LAUNCH / "README.md").read_text(), re.M | re.S)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=["copies", "sharded"])
def test_commands_of_the_readme_train(tmp_path, command):
    """On CPUs `--fsdp` makes copies too, so this is only the start of it."""
    for side, text in (("en", "the dog likes the cat\n"), ("de", "der hund mag die katze\n")):
        (tmp_path / f"train.{side}").write_text(text * 9)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    command = command.strip().replace("--max_steps 600", "--max_steps 2 --use_cpu")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "PROCESSES": "2", "RESTARTS": "0"}
    assert subprocess.run(["bash", "-c", command], env=environment, cwd=tmp_path, check=False).returncode == 0
    assert list(tmp_path.glob("runs/*/model.safetensors"))
