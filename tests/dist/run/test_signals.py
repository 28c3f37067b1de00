"""Signals reach the script once, and its end is the shim's end."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.waiting import is_seen
from tests.support.warm_python.servers import PYTHON

PATIENCE_SECONDS = 120.0
COUNTS = """
import os, select, signal, sys
def count(number, frame):
    os.write(1, f"{signal.Signals(number).name}\\n".encode())
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, count)
print("ready", os.getppid(), os.getpid(), os.getpgid(0), flush=True)
# Python's handler runs late if the signal comes just before a read that blocks: none does.
while not select.select([0], [], [], 0.02)[0]:
    pass
if line := sys.stdin.readline():
    print("read", line.strip(), flush=True)
    sys.exit(int(line))
"""
TRAINS = """
import os, sys
from tierckpt import _milestones
_milestones.reached("boundary")
ids = os.getppid(), os.getpid(), os.getpgid(0), os.environ["TIERCKPT_ATTEMPT"]
print("ready", *ids, flush=True)
sys.stdin.read()
"""
PLAIN = """
import os, sys, time
print("ready", os.getppid(), os.getpid(), os.getpgid(0), flush=True)
sys.stdin.read()
"""


class Shim:
    """A shim and its script, with a group of their own."""

    def __init__(self, folder: Path, script: str, *options: str) -> None:
        path = folder / "script.py"
        path.write_text(script)
        env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        self.process = subprocess.Popen(
            [PYTHON, "-m", "tierckpt.run", *options, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.shim, self.script, self.group, *self.others = self.ready()

    def ready(self) -> list[int]:
        assert self.process.stdout is not None
        word, *numbers = self.process.stdout.readline().split()
        assert word == "ready", self.process.communicate()
        return [int(number) for number in numbers]

    def witness(self) -> int:
        """The shim's other child; 0 if there is none."""
        return next((pid for pid in self.children() if pid != self.script), 0)

    def waiting(self) -> int:
        """The process of the next attempt."""
        until(lambda: len(self.children()) == 3)
        return next(pid for pid in self.children() if pid not in (self.script, self.witness()))

    def children(self) -> list[int]:
        """All of the shim, the oldest first: the witness."""
        text = Path(f"/proc/{self.shim}/task/{self.shim}/children").read_text()
        return [int(pid) for pid in text.split()]

    def new_witness(self, former: int) -> None:
        """Wait until the shim has another witness."""
        until(lambda: self.witness() not in (former, 0))

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def rest(self, text: str = "") -> tuple[str, str, int]:
        out, err = self.process.communicate(text, timeout=PATIENCE_SECONDS)
        return out, err, self.process.returncode


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Shim]]:
    made: list[Shim] = []

    def new(script: str, *options: str) -> Shim:
        made.append(Shim(tmp_path, script, *options))
        return made[-1]

    yield new
    for each in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.group, signal.SIGKILL)
        each.process.communicate()


def until(true: Callable[[], bool]) -> None:
    assert is_seen(true, PATIENCE_SECONDS)


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        (signal.SIGUSR1, True),
        (signal.SIGTERM, False),
        (signal.SIGHUP, True),
        (signal.SIGINT, False),
    ],
)
def test_a_signal_comes_once(
    number: signal.Signals, to_all: bool, start: Callable[..., Shim]
) -> None:
    """To the shim alone (`kill`), or to its group (torchrun, Ctrl-C)."""
    shim = start(COUNTS, "--max-restarts", "0")
    assert shim.group == os.getpgid(shim.shim)
    for _ in range(2):
        witness = shim.witness()
        os.killpg(shim.group, number) if to_all else os.kill(shim.shim, number)
        assert shim.line() == number.name
        if to_all:
            shim.new_witness(witness)
    out, _, status = shim.rest("7\n")
    assert (out, status) == ("read 7\n", 7)


def test_a_signal_to_every_process_comes_once(start: Callable[..., Shim]) -> None:
    """As Slurm signals a step, and horovodrun the children of a shell. The shim is stopped until
    all have the signal: it allows little time between them, and this process may be slow."""
    shim = start(COUNTS)
    children = Path(f"/proc/{shim.shim}/task/{shim.shim}/children").read_text().split()
    os.kill(shim.shim, signal.SIGSTOP)
    for pid in (shim.shim, *map(int, children)):
        os.kill(pid, signal.SIGUSR1)
    os.kill(shim.shim, signal.SIGCONT)
    assert shim.line() == "SIGUSR1"
    assert shim.rest("0\n") == ("read 0\n", "", 0)


@pytest.mark.parametrize(
    ("number", "to_all"),
    [(signal.SIGTERM, True), (signal.SIGHUP, False), (signal.SIGUSR1, True)],
)
def test_a_script_that_a_signal_ends_is_not_started_again(
    number: signal.Signals, to_all: bool, start: Callable[..., Shim]
) -> None:
    options = ("--max-restarts", "0") if number == signal.SIGUSR1 else ()
    shim = start(PLAIN, *options)
    os.killpg(shim.group, number) if to_all else os.kill(shim.shim, number)
    out, _, status = shim.rest()
    assert (out, status) == ("", -number)


def test_sigterm_to_the_children_alone_ends_the_job(start: Callable[..., Shim]) -> None:
    """horovodrun sends it to the children of its shell, and the shim may have replaced that."""
    shim = start(COUNTS)
    children = Path(f"/proc/{shim.shim}/task/{shim.shim}/children").read_text().split()
    for pid in map(int, children):
        os.kill(pid, signal.SIGTERM)
    assert shim.line() == "SIGTERM"
    assert shim.rest("75\n") == ("read 75\n", "", 75)


ENDS = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
"""


@pytest.mark.parametrize("to_all", [False, True])
def test_a_script_that_ends_before_a_busy_shim_looks_is_not_started_again(
    to_all: bool, start: Callable[..., Shim]
) -> None:
    """The children are signalled, or the whole group, and the script's handler is quick."""
    shim = start(ENDS + PLAIN)
    children = Path(f"/proc/{shim.shim}/task/{shim.shim}/children").read_text().split()
    os.kill(shim.shim, signal.SIGSTOP)
    for pid in [-shim.group] if to_all else map(int, children):
        os.kill(pid, signal.SIGTERM)
    until(lambda: all(gone(int(pid)) for pid in children))
    os.kill(shim.shim, signal.SIGCONT)
    assert shim.rest() == ("", "", 75)


def test_a_killed_shim_takes_its_script_with_it(start: Callable[..., Shim]) -> None:
    shim = start(PLAIN)
    os.kill(shim.shim, signal.SIGKILL)
    assert shim.rest()[2] == -signal.SIGKILL
    until(lambda: gone(shim.script))


WORKERS = """
import os, subprocess, sys
if os.environ["TIERCKPT_ATTEMPT"] == "1":
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stays = subprocess.Popen(["sleep", "1000"], start_new_session=True, **quiet)
    ends = subprocess.Popen(["sleep", "1000"])
    both = subprocess.Popen(["sh", "-c", "sleep 1000 & wait"])
    pids = os.getppid(), os.getpid(), os.getpgid(0), stays.pid, ends.pid, both.pid
    print("ready", *pids, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), 9)
shim = os.getppid()
print("ready", *open(f"/proc/{shim}/task/{shim}/children").read().split(), flush=True)
sys.stdin.readline()
"""


def test_the_next_attempt_finds_no_worker_of_the_last_one(start: Callable[..., Shim]) -> None:
    """A process in a session of its own, as the node's agent, continues."""
    shim = start(WORKERS)
    stays, ends, both = shim.others
    assert shim.process.stdin is not None
    print(file=shim.process.stdin, flush=True)
    try:
        children = shim.ready()
        assert gone(ends)
        assert gone(both)
        assert not gone(stays)
        assert stays in children  # adopted
        assert ends not in children
    finally:
        os.kill(stays, signal.SIGKILL)
    # No zombie: the shim reaps what it has adopted.
    until(lambda: not Path(f"/proc/{stays}").exists())
    assert shim.rest("\n")[2] == 0


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGKILL])
def test_what_the_waiting_process_meets_is_not_for_the_next_attempt(
    number: int, start: Callable[..., Shim]
) -> None:
    """It is forked after the first boundary. Another one takes its place if it was killed."""
    shim = start(TRAINS)
    assert shim.others == [1]
    waiting = shim.waiting()
    os.kill(waiting, number)
    if number == signal.SIGKILL:
        until(lambda: gone(waiting))
    os.kill(shim.script, signal.SIGKILL)
    _, script, group, attempt = shim.ready()
    assert (script == waiting, group, attempt) == (number != signal.SIGKILL, shim.group, 2)
    until(lambda: len(shim.children()) == 4)  # also the servers of this attempt
    left = shim.children()
    _, err, status = shim.rest()
    assert status == 0, err
    assert all(map(gone, left))


def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    """The terminal sends SIGINT to the group in its foreground; the script reads the terminal."""
    path = tmp_path / "script.py"
    path.write_text(COUNTS)
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "tierckpt.run", str(path)], env)
    seen = b""

    def read_until(text: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in seen:
            assert select.select([terminal], [], [], deadline - time.monotonic())[0], seen
            seen += os.read(terminal, 4096)

    read_until(b"ready")
    os.write(terminal, b"\x03")
    read_until(b"SIGINT")
    os.write(terminal, b"4\n")
    read_until(b"read 4")
    assert seen.count(b"SIGINT") == 1
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    os.close(terminal)
