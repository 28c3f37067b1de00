"""Teams of trainer processes, one team per method."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lib.methods.method import Setting
from lib.processes import MARK, Family, MemorySampler, machine_busy_seconds
from lib.training.launchers import LAUNCHERS

HERE = Path(__file__).resolve().parent
MEMORY_CYCLES = 3  # checkpoints in the block sampled for memory
GRACE_SECONDS = 10.0  # horovodrun gives its ranks 5 s to end
LOOK_SECONDS = 0.2  # between checks for dead ranks during a start


class TeamError(RuntimeError):
    """A rank failed, hung or died; the message has its output."""


class Team:
    """The ranks of one method, alive for the whole run and idle while others are measured.

    Each method has its own processes, because methods leave daemons, threads, buffers and hooks in
    them. The processes stay alive, because a start takes 2 to 10 s and steady state is measured.
    An idle team is blocked in read(2), or stopped if its threads would work nevertheless.

    Each rank leads a session of its own and carries the mark of the family, by which its daemons
    are found. A launcher passes no descriptors on to the ranks, so they connect to a socket in the
    private folder in shared memory, which has a short path.
    """

    def __init__(self, setting: Setting, timeout_s: float, log: Path) -> None:
        self.family = Family(uuid.uuid4().hex)
        self.timeout_s = timeout_s
        self.state_bytes = 0
        self.log = log  # the output of the ranks, shown if one of them dies
        self._world = setting.world
        self._pipes: list[Connection] = []  # in rank order
        self._restless = LAUNCHERS[setting.launcher].restless
        self._pids: list[int] = []  # of the ranks, while they may be stopped
        self._processes: list[subprocess.Popen[bytes]] = []
        self._door = socket.socket(socket.AF_UNIX)
        try:
            path = f"{setting.memory}/{setting.method}.sock"
            self._door.bind(path)
            self._door.listen(setting.world)
            self._door.settimeout(LOOK_SECONDS)
            trainer = [sys.executable, str(HERE / "trainer.py"), path, json.dumps(asdict(setting))]
            self._processes = LAUNCHERS[setting.launcher].start(
                setting.world, trainer, {MARK: self.family.token}, log
            )
        except BaseException:
            self.kill()
            raise

    def ready(self) -> int:
        """Wait until all ranks have trained a step; return the bytes of the training state."""
        self._let_in()
        state_bytes = int(self._replies()[0])
        self._signal(signal.SIGSTOP)
        return state_bytes

    def _let_in(self) -> None:
        limit = time.monotonic() + self.timeout_s
        come: dict[int, Connection] = {}
        while len(come) < self._world:
            try:
                visitor, _ = self._door.accept()
            except TimeoutError:
                if any(process.poll() is not None for process in self._processes):
                    raise self._dead() from None
                if time.monotonic() > limit:
                    raise TeamError(f"no ranks within {self.timeout_s:.0f} s") from None
                continue
            visitor.setblocking(True)
            pipe = Connection(visitor.detach())
            rank, pid = self._receive(pipe)
            come[rank] = pipe
            self._pids += [pid] if self._restless else []
        self._pipes = [come[rank] for rank in range(self._world)]

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def command(self, name: str, **arguments: Any) -> list[Any]:
        """Send one command to every rank; return the answers in rank order."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            try:
                pipe.send((name, arguments))
            except OSError as error:
                raise TeamError(f"a rank ended before {name}") from error
        answers = self._replies()
        self._signal(signal.SIGSTOP)
        return answers

    def _replies(self) -> list[Any]:
        """One answer from every rank. Raises the first failure, without waiting for the others:
        these may wait for the failed rank in a collective."""
        limit = time.monotonic() + self.timeout_s
        answers: dict[Any, Any] = {}
        while len(answers) < len(self._pipes):
            left = limit - time.monotonic()
            ready = wait([pipe for pipe in self._pipes if pipe not in answers], max(left, 0))
            if not ready:
                raise TeamError(f"no answer within {self.timeout_s:.0f} s")
            answers.update({pipe: self._receive(pipe) for pipe in ready})
        return [answers[pipe] for pipe in self._pipes]

    def _receive(self, pipe: Any) -> Any:
        try:
            status, value = pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._dead() from error
        if status == "error":
            raise TeamError(str(value).strip())
        return value

    def _dead(self) -> TeamError:
        last = self.log.read_text(errors="replace").strip().splitlines()[-20:]
        return TeamError("\n".join(["a rank died; the last lines of the log:", *last]))

    def block(self, steps: int, checkpoints: bool, every: int | None = None) -> dict[str, Any]:
        """Measure one block: the timings of the ranks, the CPU seconds of the family, and the cores
        that the rest of the machine used. `every` replaces the setting's interval."""
        start, busy, cpu = time.perf_counter(), machine_busy_seconds(), self.family.cpu_seconds()
        ranks = self.command("block", steps=steps, checkpoints=checkpoints, every=every)
        cpu = self.family.cpu_seconds() - cpu
        others = (machine_busy_seconds() - busy - cpu) / (time.perf_counter() - start)
        return {"ranks": ranks, "cpu_s": cpu, "steps": steps, "others": max(others, 0.0)}

    def memory_block(self, steps: int, checkpoints: bool) -> dict[str, int]:
        """Peak memory of the family and of the device over a block without timing."""
        with MemorySampler(self.family) as sampler:
            ranks = self.command("block", steps=steps, checkpoints=checkpoints)
        return {**sampler.peak, "Gpu": sum(rank["gpu_peak_bytes"] for rank in ranks)}

    def begin_close(self) -> None:
        """Ask every rank to exit."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(("close", {}))

    def end_close(self, limit_s: float = 15.0) -> None:
        """Wait for the ranks, then make sure that nothing of the family is left.

        A rank that hangs in its teardown is killed, without an error.
        """
        limit = time.monotonic() + limit_s
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(limit - time.monotonic(), 0))
        self.kill()

    def kill(self) -> None:
        """Kill the family. A launcher is terminated first, so that it can clean up."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        self.family.kill()
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._door.close()


@contextmanager
def training(
    method: str,
    model: str,
    disk: Path,
    memory: Path,
    launcher: str = "torchrun",
    world: int = 2,
    every: int = 1,
    limit_s: float = 300.0,
) -> Iterator[Team]:
    """A team whose ranks have trained a step; `state_bytes` is known. Ends it.

    Its method has a folder of its own on `disk`; `memory` is a folder in shared memory with a short
    path. limit_s: for one command.
    """
    folder = disk / method
    folder.mkdir()
    setting = Setting(method, launcher, world, model, every, str(folder), str(memory))
    team = Team(setting, limit_s, disk / f"{method}.log")
    try:
        team.state_bytes = team.ready()
        yield team
    finally:
        team.begin_close()
        team.end_close()


def measure_memory(team: Team, every: int) -> dict[str, Any]:
    """Peak memory before and after the method is attached.

    The baseline comes from the same processes before `attach`, so that everything that the method
    keeps between checkpoints (buffers, daemons, libraries) counts as extra. During this function
    malloc returns freed memory to the system at once: else it would keep 50 to 100 MB per rank of
    the training's temporary tensors.
    """
    steps = MEMORY_CYCLES * every
    team.command("block", steps=2, checkpoints=False)  # let the allocator settle
    plain = team.memory_block(max(steps, 4), checkpoints=False)
    team.command("attach")
    checkpoints = team.memory_block(steps, checkpoints=True)
    team.command("keep_freed")
    return {"plain": plain, "checkpoints": checkpoints}


def measure_visit(team: Team, plain: Team, steps: int, every: int | None = None) -> dict[str, Any]:
    """Measure plain steps, checkpoints, plain steps: a steady drift of the machine cancels out.

    plain: the team for the plain blocks: `team`, or another one if being attached has a cost.
    """
    visit = {
        "before": plain.block(steps // 2, checkpoints=False),
        "checkpoints": team.block(steps, checkpoints=True, every=every),
        "after": plain.block(steps - steps // 2, checkpoints=False),
    }
    team.command("sweep")
    return visit
