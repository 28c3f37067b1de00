"""A job that is killed and comes back: ranks are forked from a process that has torch already.

So a run begins within a second, and what is measured is the way back, not Python's imports. Sound
because there is nothing to lose in a fork: one thread, no process group, checked before each.
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
HANG_SECONDS = 90.0  # without a step: something is wrong
LOOK_SECONDS = 2.0  # between two looks for that


class StuckError(RuntimeError):
    """A job made no progress; the text holds what its ranks printed last."""


@dataclass(frozen=True)
class Order:
    """What a job does: `steps` in all, a version every `every` steps, in these folders."""

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
    """A line of rank 0's journal. `run_id` counts from 0; `version` 0 and up, `began`: resumed."""

    run_id: int
    version: int
    seconds: float
    began: bool = False


@dataclass
class Course:
    """What came of a job.

    end_seconds: when it ended; all times are time.monotonic()'s. wall_seconds: from where it first
    was ready to train; useful: steps that count in the end; made: all steps; back_seconds: of each
    failure, until the first step after it was complete.
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
            # A rank that is still alive may tell of a step that was complete already.
            later = dropwhile(lambda s, k=kill: not (s.began and s.seconds > k), self.steps)
            first = next((step.seconds for step in later if not step.began), None)
            found += [first - kill] if first else []
        return found

    def last_life(self) -> list[float]:
        """When each step of the last run was complete."""
        last = max((step.run_id for step in self.steps), default=0)
        return [step.seconds for step in self.steps if step.run_id == last and not step.began]


def run(order: Order, seconds: float, kills: Sequence[float], seed: int) -> Course:
    """Train for so long, or to the end; SIGKILL a rank at each of `kills`.

    Seconds count from where it first is ready to train.

    When a rank is gone, the others are ended and all are started again, as torchrun does.
    """
    order.folder.mkdir(parents=True, exist_ok=True)
    workload_of(order)
    chance, run_id = random.Random(seed), 0
    ahead, done = sorted(k for k in kills if k < seconds), []
    began, ranks = time.time(), _start(order, run_id)
    try:
        begin = when_ready(order, lambda seconds: _wait(ranks, seconds))
        while (now := time.monotonic() - begin) < seconds:
            if ahead and ahead[0] <= now:
                ranks[chance.randrange(order.world)].kill()
                done.append(begin + ahead.pop(0))
            limit = min([seconds, *ahead[:1]]) - now
            _wait(ranks, min(limit, LOOK_SECONDS))
            if _silent_seconds(order, since=began) > HANG_SECONDS:
                raise StuckError(last_words(order))
            if all(rank.ended and rank.status == 0 for rank in ranks):
                break
            if any(rank.ended and rank.status for rank in ranks):
                if not done or begin + now - done[-1] > HANG_SECONDS:
                    raise StuckError(last_words(order))
                _end(ranks)
                run_id += 1
                began, ranks = time.time(), _start(order, run_id)
        end = time.monotonic()
    finally:
        _end(ranks)
    return Course(end, list(journal_of(order)), done)


@cache
def built(model: str, batch: int) -> models.Workload:
    """Made once, before all forks: initial weights, which ranks then have as their own."""
    return models.build(model, batch, torch.device("cpu"))


def workload_of(order: Order) -> models.Workload:
    """What the job trains."""
    return built(order.model, order.batch)


# --- the parent's side ---------------------------------------------------------------------------


class Rank:
    """A child, held by a descriptor."""

    def __init__(self, pid: int) -> None:
        self.pid, self.fd = pid, os.pidfd_open(pid)
        self.ended, self.status = False, -1

    def kill(self) -> None:
        """SIGKILL; it is reaped later."""
        if not self.ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait for its end."""
        if not self.ended:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self.fd)
            self.ended = True


def _start(order: Order, run_id: int) -> list[Rank]:
    return [Rank(_fork(order, run_id, number)) for number in range(order.world)]


def _wait(ranks: list[Rank], seconds: float) -> None:
    """Return when a rank ended, or after so long."""
    poll = select.poll()
    for rank in ranks:
        if not rank.ended:
            poll.register(rank.fd, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)}
    for rank in ranks:
        if rank.fd in ready and not rank.ended:
            rank.reap()


def _silent_seconds(order: Order, since: float) -> float:
    """How long no step was complete; `since` (Unix time) the ranks are there."""
    path = order.folder / "journal"
    last = path.stat().st_mtime if path.exists() else 0.0
    return time.time() - max(last, since)


def _end(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.reap()


def journal_of(order: Order) -> Iterator[Step]:
    """What rank 0 told."""
    path = order.folder / "journal"
    for line in path.read_text().splitlines() if path.exists() else []:
        run_id, version, seconds, began = line.split()
        yield Step(int(run_id), int(version), float(seconds), began == "1")


def tell_stall(order: Order, seconds: Sequence[float]) -> None:
    """Leave the median where the parent finds it."""
    if seconds:
        (order.folder / "stall").write_text(str(median(seconds)))


def when_ready(order: Order, wait: Callable[[float], None]) -> float:
    """Return the time.monotonic() at which rank 0 first was ready to train, having waited for it
    with calls of `wait(seconds)`. Raises StuckError."""
    limit = time.monotonic() + HANG_SECONDS
    while not (steps := list(journal_of(order))):
        if time.monotonic() > limit:
            raise StuckError(last_words(order))
        wait(0.02)
    return steps[0].seconds


def last_words(order: Order) -> str:
    """For whoever wants to know what went wrong."""
    text = (order.folder / "log").read_text(errors="replace")
    return f"{order.method} made no progress; its ranks' last words:\n{text[-3000:]}"


# --- the ranks' side -----------------------------------------------------------------------------


def check_fork() -> None:
    """Raise RuntimeError unless this process has one thread: nothing can be lost in a fork then."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"cannot fork safely: {threads} threads")


def _fork(order: Order, run_id: int, rank: int) -> int:
    check_fork()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        be_rank(order, parent, lambda: _train(order, run_id, rank))
    return pid


def be_rank(order: Order, parent: int, train: Callable[[], None]) -> NoReturn:
    """In the child: cut the ties to the parent but its run, train, and end."""
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
    _leave(status)


def _leave(status: int) -> NoReturn:
    """Without gloo's teardown, which sometimes aborts and says nothing about anything."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _train(order: Order, run_id: int, rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    meeting = f"file://{order.folder}/meeting{run_id}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=order.world)
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

    def tell(began: bool) -> None:
        if rank == 0:
            line = f"{run_id} {version} {time.monotonic()} {int(began)}\n"
            os.write(journal, line.encode())

    stalls: list[float] = []
    tell(began=True)
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
        tell(began=False)
    dist.barrier()
    if rank == 0:
        tell_stall(order, method.stall_seconds() or stalls)
