"""Halting by a signal: under a real launcher, and in processes that cannot react."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.crash.launcher import PATIENCE_SECONDS, Job, Process, quiet_environment
from tests.support.crash.scenario import RANKS, VARIABLE
from tests.support.warm_python.servers import PYTHON, THROUGHOUT

SCRIPT = Path(__file__).resolve().parents[2] / "support" / "crash" / "halting_job.py"
STAND, LAST = 12, 14
"""All ranks stand before this step; the rank with the signal votes at v13, and v14 is the last."""
GONE = f"kill@peer:op=begin,version={LAST}"
"""The end of an agent that protects the last version, before any other agent has joined: the
exchange of one that has joined would end at once."""


def start_torchrun(job: Job, asks: bool, workers: int = 0) -> subprocess.Popen[bytes]:
    """Start run 0 of the job; it waits before step STAND."""
    scenario = replace(job.scenario, life=0, gates={"stand": STAND})
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), "--max-restarts", "3"]
    command += ["--monitor-interval", "0.1", str(SCRIPT)]
    with (job.folder / "torchrun.log").open("wb") as log:
        job.foreign = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={
                **quiet_environment(),
                **THROUGHOUT,
                VARIABLE: scenario.to_json(),
                "CRASH_ASKS": "yes" if asks else "",
                "CRASH_WORKERS": str(workers),
            },
        )
    stand = "both ranks at the gate"
    patience = 2 * PATIENCE_SECONDS
    job.wait_for(
        lambda: all(job.journal(r, 0, waiting="stand") for r in range(RANKS)), stand, patience
    )
    return job.foreign


def open_when_told(job: Job, ranks: list[int]) -> None:
    """Let all ranks continue once these have received their signal."""
    job.wait_for(lambda: all(job.journal(r, 0, signal=15) for r in ranks), f"SIGTERM at {ranks}")
    (job.folder / "stand").touch()


def both_ended_after_the_same_version(job: Job) -> None:
    for rank in range(RANKS):
        assert [x["exit"] for x in job.journal(rank, 0) if "exit" in x] == [0], job.output()
        assert job.committed(rank, 0)[-1] == LAST
        assert max(job.losses(rank, 0)) == LAST - 1
    resumed = job.live()
    assert resumed.start == LAST
    assert resumed.resumed()["levels"] == {"local": RANKS}
    job.ended_as_undisturbed()


def test_a_signal_to_one_rank_ends_all_with_one_last_version(job: Job) -> None:
    """The loop never calls should_exit()."""
    torchrun = start_torchrun(job, asks=False)
    (line,) = (x for x in job.journal(1, 0) if "pid" in x)
    rank = Process(line["pid"])
    rank.signal(signal.SIGTERM)
    open_when_told(job, [1])
    job.wait_for(lambda: torchrun.poll() is not None, "torchrun's end")
    rank.forget()
    assert torchrun.returncode == 0, "nothing failed, so nothing is restarted"
    assert not job.journal(0, 0, signal=15)
    both_ended_after_the_same_version(job)


def test_a_signal_to_the_launcher_reaches_the_ranks(job: Job) -> None:
    """The loop calls should_exit(). The launcher signals process groups, with workers of
    DataLoaders, too."""
    torchrun = start_torchrun(job, asks=True, workers=2)
    torchrun.send_signal(signal.SIGTERM)
    open_when_told(job, [0, 1])
    job.wait_for(lambda: torchrun.poll() is not None, "torchrun's end")
    assert "SIGKILL" not in (job.folder / "torchrun.log").read_text()
    both_ended_after_the_same_version(job)


def test_other_nodes_that_cannot_be_reached_do_not_keep_it_from_ending_in_time(job: Job) -> None:
    """Node 1's agent is gone when the last version is to be protected; node 0's continues alone."""
    job.settings |= {
        "path": str(job.folder / "{node}" / "ckpts"),
        "peer_redundancy": "partner",
        "peer_interface": "lo",
        "halt_grace_seconds": 12,
    }
    job.scenario.settings, job.scenario.rules = job.settings, {"1": GONE}
    torchrun = start_torchrun(job, asks=True)
    torchrun.send_signal(signal.SIGTERM)
    open_when_told(job, [0, 1])
    job.wait_for(lambda: torchrun.poll() is not None, "torchrun's end")
    assert job.fired(1, GONE)
    assert job.agents(0), "it outlives its trainer"
    for rank in range(RANKS):
        assert [x["exit"] for x in job.journal(rank, 0) if "exit" in x] == [0], job.output()
        assert job.committed(rank, 0)[-1] == LAST
        assert job.journal(rank, 0, event="closed")
    (failed,) = job.journal(0, 0, event="failed", level="peer", version=LAST)
    assert "not all versions are stored on other nodes yet" in failed["message"]
    assert f"stays in {job.folder}/node0/ckpts, and the node's agent" in failed["message"]


# --- processes that cannot react -----------------------------------------------------------------

BEGIN = """
import ctypes, os, signal, sys, time
import tierckpt.halt.signals as module
from tierckpt.config import parse_signals
{patch}
signals = module.Signals(parse_signals("SIGTERM"), {patience_seconds})
{boundary}
print("ready", flush=True)
"""
BOUNDARY = "signals.passed_boundary()"
# A wait that no signal interrupts, as in a collective with a dead peer.
STUCK = """
lock = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(lock)
libc.pthread_mutex_lock(lock)
"""
SLEEPS = "while not signals.received: time.sleep(0.001)\n"
HEARD = 'print("heard", flush=True)\ntime.sleep(60)\n'

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(program)`: a process that has printed "ready"."""
    started = []

    def run(
        then: str, patch: str = "", boundary: str = BOUNDARY, patience_seconds: float = 600.0
    ) -> subprocess.Popen[str]:
        first = BEGIN.format(patch=patch, boundary=boundary, patience_seconds=patience_seconds)
        program = first + then
        process = subprocess.Popen([sys.executable, "-c", program], stdout=-1, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_before_the_first_boundary_a_signal_ends_at_once(start: Start) -> None:
    process = start("time.sleep(60)", boundary="")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGTERM


def test_the_same_signal_again_ends_at_once(start: Start) -> None:
    """But not an echo of the first one: this one is recognized by a shorter time."""
    wait = f"{SLEEPS}first = time.monotonic()\n"
    wait += "while time.monotonic() < first + 0.2: time.sleep(0.001)\n"
    process = start(wait + HEARD, patch="module.REPEATED_SECONDS = 0.1")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "heard\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGTERM


def test_a_process_that_hangs_in_a_collective_ends(start: Start) -> None:
    process = start(STUCK, patience_seconds=0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("disarm", "seconds", "status"),
    [("signals.disarm()\n", 2, 0), ("", 600, 128 + signal.SIGTERM)],
)
def test_one_at_its_end_may_take_its_time(
    start: Start, disarm: str, seconds: int, status: int
) -> None:
    """Both times are far beyond its patience; without `disarm` it does not come to the end."""
    wait = f"{disarm}{SLEEPS}first = time.monotonic()\n"
    wait += f"while time.monotonic() < first + {seconds}: time.sleep(0.01)\nprint('done')\n"
    process = start(wait, patience_seconds=0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == status


def test_a_forked_child_ends_at_a_signal_and_its_parent_receives_none(start: Start) -> None:
    """DataLoader ends its workers in this way."""
    child = "read, write = os.pipe()\nchild = os.fork()\n"
    child += "if not child:\n  os.write(write, b'!')\n  time.sleep(60)\n  os._exit(1)\n"
    child += "os.read(read, 1)\nos.kill(child, signal.SIGTERM)\n"
    child += "print(os.waitpid(child, 0)[1], signals.received, flush=True)\n"
    process = start(child)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{int(signal.SIGTERM)} None\n"
    assert process.wait(PATIENCE_SECONDS) == 0
