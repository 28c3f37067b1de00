"""A job, killed and restarted. Ranks are forked from a process that has imported torch.

A run then starts within a second, so that the measured time is that of the restore, not that of
Python's imports. Forking is safe: `check_fork` makes sure that the parent has one thread.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import dropwhile
from pathlib import Path
from statistics import median
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lib import models
from lib.goodput.methods import RESUMABLE
from lib.methods.method import Job

PR_SET_PDEATHSIG = 1
HANG_SECONDS = 90.0  # without a step: the job is stuck
LOOK_SECONDS = 2.0  # between two checks of that


class StuckError(RuntimeError):
    """A job made no progress; the text has the last output of its ranks."""


@dataclass(frozen=True)
class Order:
    """The parameters of a job: `steps` in all, a version every `every` steps, two folders."""

    method: str
    every: int
    model: str
    batch: int
    world: int
    folder: Path
    memory: Path
    steps: int = 1_000_000_000


@dataclass(frozen=True)
class Step:
    """A line of rank 0's journal. `run` counts from 0; `began`: the run started at `version`."""

    run: int
    version: int
    seconds: float
    began: bool = False


@dataclass
class Course:
    """The course of a job. Times are those of time.monotonic().

    end_seconds: the time of its end. wall_seconds: the duration since it first was ready to train.
    useful: steps that count in the end. made: all steps. back_seconds: for each failure, the time
    until the first step after it was complete.
    """

    end_seconds: float
    steps: list[Step]
    kills: list[float] = field(default_factory=list)

    @property
    def wall_seconds(self) -> float:
        return self.end_seconds - self.steps[0].seconds if self.steps else 0.0

    @property
    def useful(self) -> int:
        return self.steps[-1].version if self.steps else 0

    @property
    def made(self) -> int:
        return sum(not step.began for step in self.steps)

    @property
    def back_seconds(self) -> list[float]:
        found = []
        for kill in self.kills:
            # A surviving rank may still record a step that was complete before the kill.
            later = dropwhile(lambda s, k=kill: not (s.began and s.seconds > k), self.steps)
            first = next((step.seconds for step in later if not step.began), None)
            found += [first - kill] if first else []
        return found

    def last_run(self) -> list[float]:
        """The times at which the steps of the last run were complete."""
        last = max((step.run for step in self.steps), default=0)
        return [step.seconds for step in self.steps if step.run == last and not step.began]


def run(order: Order, seconds: float, kills: Sequence[float], seed: int) -> Course:
    """Train for `seconds`, or to the end; SIGKILL a random rank at each of `kills`.

    Seconds count from the moment when the job first is ready to train. After the death of a rank
    the others are ended and all are started again, as torchrun does. No kill is left out, even if
    this process is so late that the seconds are over.
    """
    order.folder.mkdir(parents=True, exist_ok=True)
    workload_of(order)
    chance, number = random.Random(seed), 0
    ahead, done = sorted(k for k in kills if k < seconds), []
    began, ranks = time.time(), _start(order, number)
    try:
        begin = when_ready(order, lambda seconds: _wait(ranks, seconds))
        while (now := time.monotonic() - begin) < seconds or ahead:
            if ahead and ahead[0] <= now:
                ranks[chance.randrange(order.world)].kill()
                done.append(begin + ahead.pop(0))
            limit = min([seconds, *ahead[:1]]) - now
            _wait(ranks, min(limit, LOOK_SECONDS))
            if silent_seconds(order, since=began) > HANG_SECONDS:
                raise StuckError(last_words(order))
            if all(rank.ended and rank.status == 0 for rank in ranks):
                break
            if any(rank.ended and rank.status for rank in ranks):
                if not done or begin + now - done[-1] > HANG_SECONDS:
                    raise StuckError(last_words(order))
                _end(ranks)
                number += 1
                began, ranks = time.time(), _start(order, number)
        end = time.monotonic()
    finally:
        _end(ranks)
    return Course(end, list(journal_of(order)), done)


@cache
def built(model: str, batch: int) -> models.Workload:
    """Make the model once, before all forks; each rank then has its own copy."""
    return models.build(model, batch, torch.device("cpu"))


def workload_of(order: Order) -> models.Workload:
    """The model and batch of the job."""
    return built(order.model, order.batch)


# --- the parent's side ---------------------------------------------------------------------------


class Rank:
    """A child process, held by a pidfd."""

    def __init__(self, pid: int) -> None:
        self.pid, self.fd = pid, os.pidfd_open(pid)
        self.ended, self.status = False, -1

    def kill(self) -> None:
        """Send SIGKILL; `reap` waits for the end."""
        if not self.ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait for the end of the process."""
        if not self.ended:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self.fd)
            self.ended = True


def _start(order: Order, run: int) -> list[Rank]:
    return [Rank(_fork(order, run, rank)) for rank in range(order.world)]


def _wait(ranks: list[Rank], seconds: float) -> None:
    """Return when a rank has ended, after `seconds` at most."""
    poll = select.poll()
    for rank in ranks:
        if not rank.ended:
            poll.register(rank.fd, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)}
    for rank in ranks:
        if rank.fd in ready and not rank.ended:
            rank.reap()


def silent_seconds(order: Order, since: float) -> float:
    """Seconds since the last complete step, or since the start of the ranks (Unix time)."""
    path = order.folder / "journal"
    last = path.stat().st_mtime if path.exists() else 0.0
    return time.time() - max(last, since)


def _end(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.reap()


def journal_of(order: Order) -> Iterator[Step]:
    """The steps that rank 0 has recorded."""
    path = order.folder / "journal"
    for line in path.read_text().splitlines() if path.exists() else []:
        run, version, seconds, began = line.split()
        yield Step(int(run), int(version), float(seconds), began == "1")


def record_stall(order: Order, seconds: Sequence[float]) -> None:
    """Write the median for the parent."""
    if seconds:
        (order.folder / "stall").write_text(str(median(seconds)))


def when_ready(order: Order, wait: Callable[[float], None]) -> float:
    """Wait until rank 0 first is ready to train; return that time.monotonic().

    Waits with calls of `wait(seconds)`. Raises StuckError.
    """
    limit = time.monotonic() + HANG_SECONDS
    while not (steps := list(journal_of(order))):
        if time.monotonic() > limit:
            raise StuckError(last_words(order))
        wait(0.02)
    return steps[0].seconds


def last_words(order: Order) -> str:
    """An error text with the last output of the ranks."""
    text = (order.folder / "log").read_text(errors="replace")
    return f"{order.method} made no progress; the last output of its ranks:\n{text[-3000:]}"


# --- the ranks' side -----------------------------------------------------------------------------


def check_fork() -> None:
    """Raise RuntimeError unless this process has one thread, so that forking is safe."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"cannot fork safely: {threads} threads")


def _fork(order: Order, run: int, rank: int) -> int:
    check_fork()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        be_rank(order, parent, lambda: _rank(order, run, rank))
    return pid


def be_rank(order: Order, parent: int, train: Callable[[], None]) -> NoReturn:
    """In the child: train, then exit. The child also ends with the parent."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            os.setsid()
            log = os.open(order.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for target in (1, 2):
                os.dup2(log, target)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            train()
            status = 0
    except BaseException:
        traceback.print_exc()
    leave(status)


def leave(status: int) -> NoReturn:
    """Exit without the teardown of gloo, which sometimes aborts without a reason."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _rank(order: Order, run: int, rank: int) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{order.folder}/meeting{run}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=order.world)
    train(order, run)


def train(order: Order, run: int) -> None:
    """Train one rank of the default process group; `run` counts the starts of the job."""
    torch.manual_seed(1)
    rank = dist.get_rank()
    workload = workload_of(order)
    model = DistributedDataParallel(workload.model)
    optimizer = torch.optim.Adam(workload.model.parameters(), lr=1e-4)
    directory = order.folder / "checkpoints"
    directory.mkdir(exist_ok=True)
    method = RESUMABLE[order.method]()
    job = Job(
        model=model,
        module=workload.model,
        optimizer=optimizer,
        directory=directory,
        memory=order.memory,
        rank=rank,
        world=order.world,
        device=torch.device("cpu"),
    )
    version = method.resume(job, order.every)
    journal = os.open(order.folder / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def record(began: bool) -> None:
        if rank == 0:
            line = f"{run} {version} {time.monotonic()} {int(began)}\n"
            os.write(journal, line.encode())

    stalls: list[float] = []
    record(began=True)
    while version < order.steps:
        optimizer.zero_grad()
        torch.autograd.backward(workload.loss(model))
        waits = time.perf_counter()
        method.before_optimizer_step()
        waits -= time.perf_counter()
        optimizer.step()
        version += 1
        due = version % order.every == 0
        calls = time.perf_counter()
        method.boundary(version, due)
        if due:
            stalls.append(time.perf_counter() - calls - waits)
        record(began=False)
    dist.barrier()
    if rank == 0:
        record_stall(order, method.stall_seconds() or stalls)
