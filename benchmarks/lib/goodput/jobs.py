"""Jobs whose ranks are killed at given times: forked, or under a launcher."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from lib import models
from lib.goodput.course import Course, steps_of
from lib.jobs.plan import Plan
from lib.jobs.processes import SHIM, Forked, JobError, Processes, horovodrun, torchrun, wait_for_any
from lib.jobs.rank import train
from lib.processes import MARK
from lib.training.launchers import Ranks

HANG_SECONDS = 90.0  # without a step: the job is stuck
LOOK_SECONDS = 2.0  # between two checks of that


def run(plan: Plan, seconds: float, kills: Sequence[float], seed: int) -> Course:
    """Train for `seconds`, or to the end; SIGKILL a random rank at each of `kills`.

    Seconds count from the moment when the job first is ready to train. A rank that is being
    started at the time of its failure is killed as soon as it runs. No kill is left out, even if
    this process is so late that the seconds are over.
    """
    job = Processes(plan)
    ahead, done, chance = (
        sorted(k for k in kills if k < seconds),
        list[float](),
        random.Random(seed),
    )
    victim = chance.randrange(plan.world)
    started = time.time()
    ranks = starter_of(plan)(job)
    try:
        while not (steps := steps_of(plan)):
            if time.time() - started > HANG_SECONDS:
                raise JobError(job.last_words())
            ranks.wait(0.02)
        begin = steps[0].seconds
        while ((now := time.time() - begin) < seconds or ahead) and not ranks.have_ended():
            if ahead and ahead[0] <= now and ranks.kill(victim):
                done.append(time.time())
                ahead.pop(0)
                victim = chance.randrange(plan.world)
            limit = min([seconds, *ahead[:1]]) - now
            ranks.wait(max(0.02, min(limit, LOOK_SECONDS)))
            if _silent_seconds(plan, started) > HANG_SECONDS:
                raise JobError(job.last_words())
        end = time.time()
    finally:
        ranks.close()
        job.close()
    return Course(end, steps_of(plan), done)


def _silent_seconds(plan: Plan, started: float) -> float:
    """Seconds since the last line of rank 0's log, or since the start of the job."""
    path = plan.log_of(0)
    return time.time() - max(started, path.stat().st_mtime if path.exists() else 0.0)


@cache
def made(name: str) -> tuple[models.Model, torch.nn.Module]:
    """Make the model once, before all forks; each rank then has its own copy."""
    return models.made(name)


class Forks:
    """Ranks that are forked; after the death of one the others end and all start again, as under
    torchrun."""

    def __init__(self, job: Processes) -> None:
        self.job, self.number, self.killed = job, 0, float("-inf")
        made(job.plan.model)
        self._start()

    def _start(self) -> None:
        self.ranks = [Forked(self.job, self._trainer(rank)) for rank in range(self.job.plan.world)]

    def _trainer(self, rank: int) -> Callable[[], None]:
        plan, begun = self.job.plan, time.time()
        meeting = f"file://{plan.folder}/meeting{self.number}"

        def run() -> None:
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=plan.world)
            moments = {"begun": begun, "imported": time.time()}
            train(plan, Ranks("gloo"), moments, made(plan.model))

        return run

    def kill(self, rank: int) -> bool:
        """SIGKILL to a rank; False if it is not there."""
        self.ranks[rank].kill()
        self.killed = time.monotonic()
        return True

    def wait(self, seconds: float) -> None:
        """Wait for at most so long, and start ranks again if one has ended."""
        wait_for_any(self.ranks, seconds)
        if any(rank.ended and rank.status for rank in self.ranks):
            if time.monotonic() - self.killed > HANG_SECONDS:
                raise JobError(self.job.last_words())
            self.close()
            self.number += 1
            self._start()

    def have_ended(self) -> bool:
        """Whether the job is complete."""
        return all(rank.ended for rank in self.ranks)

    def close(self) -> None:
        """End all ranks."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.reap()


class Launched:
    """torchrun and `tierckpt run`: the start of processes counts, too."""

    def __init__(self, job: Processes) -> None:
        self.job = job
        self.launcher = job.start([*torchrun(job.plan.world, SHIM), *job.rank])

    def kill(self, rank: int) -> bool:
        """SIGKILL to a rank; False if it has no process: the last one has ended."""
        path = Path(self.job.plan.folder, f"pid{rank}")
        mine = f"{MARK}={self.job.family.token}".encode()
        try:
            pid = int(path.read_text())
            if mine not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return False  # another process has this number by now
            os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError):
            return False
        path.unlink()
        return True

    def wait(self, seconds: float) -> None:
        """Wait for at most so long. Raises JobError if the launcher gave up."""
        with suppress(subprocess.TimeoutExpired):
            if self.launcher.wait(seconds):
                raise JobError(self.job.last_words())

    def have_ended(self) -> bool:
        return self.launcher.poll() is not None

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.launcher.pid, signal.SIGKILL)


class Relayed(Launched):
    """Elastic Horovod with forked ranks: horovodrun starts relays (relay.py), and each asks this
    process to fork a rank.

    So the start-up of processes does not count, as for forked jobs, and the recovery of Horovod
    does: the survivor rolls back to the last commit in its memory, the launcher takes a spare
    host, both join.
    """

    def __init__(self, job: Processes) -> None:
        self.job = job
        made(job.plan.model)
        self.ranks: list[Forked] = []
        self._relays: dict[int, tuple[socket.socket, Forked]] = {}
        path = f"{job.plan.memory}/door"
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(path)
        self._door.listen(8)
        relay = [sys.executable, "-S", "-E", str(Path(__file__).with_name("relay.py")), path]
        self.launcher = job.start([*horovodrun(job.plan.world, job.plan.folder), *relay])

    def kill(self, rank: int) -> bool:
        alive = [each for each in self.ranks if not each.ended]
        if alive:
            alive[rank % len(alive)].kill()
        return bool(alive)

    def wait(self, seconds: float) -> None:
        """For so long at most: fork for new relays, and tell them about ranks that have ended."""
        door = self._door.fileno()
        ready = wait_for_any(self.ranks, min(seconds, 0.2), door, *self._relays)
        for fd, (relay, rank) in list(self._relays.items()):
            if fd in ready:
                rank.kill()  # the launcher ended its relay
            if fd in ready or rank.ended:
                rank.reap()
                with suppress(OSError):
                    relay.sendall(f"{rank.status & 255}\n".encode())
                relay.close()
                del self._relays[fd]
        if door in ready:
            self._let_in()
        super().wait(0)

    def _let_in(self) -> None:
        from lib.jobs import elastic

        relay, _ = self._door.accept()
        with relay.makefile("r") as stream:
            environment: dict[str, str] = json.loads(stream.readline())

        def run() -> None:
            os.environ.clear()
            os.environ.update(environment)
            elastic.train(self.job.plan, made(self.job.plan.model))

        rank = Forked(self.job, run)
        self.ranks.append(rank)
        self._relays[relay.fileno()] = relay, rank

    def close(self) -> None:
        super().close()
        for rank in self.ranks:
            rank.kill()
            rank.reap()
        for relay, _ in self._relays.values():
            relay.close()
        self._door.close()


def starter_of(plan: Plan) -> type[Forks] | type[Launched]:
    """How the ranks of a job start."""
    if plan.method == "hvd-elastic":
        return Relayed
    return Launched if plan.method == "ours-run" else Forks
