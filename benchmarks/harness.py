"""Teams of trainer processes, one team a method, and the round-robin over them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from methods import Setting
from processes import MARK, Family, MemorySampler, machine_busy_seconds

HERE = Path(__file__).resolve().parent
MEMORY_CYCLES = 3  # checkpoints in the block that is sampled for memory


class TeamError(RuntimeError):
    """A rank failed, hung or vanished; the message holds what it said."""


class Team:
    """The ranks of one method, alive for the whole run and idle while others are measured.

    One set of processes a method, because methods leave things behind in a process (daemons,
    threads, cached buffers, a communication hook), and kept alive, because starting is slow (2-10
    s) and steady state is what is asked about. An idle team is blocked in read(2).

    Each rank leads a session of its own, so that a method's daemons cannot be taken for ours,
    and carries the family's mark, so that they are found wherever they went.
    """

    def __init__(self, setting: Setting, world: int, timeout_s: float, log: Path) -> None:
        self.family = Family(uuid.uuid4().hex)
        self.timeout_s = timeout_s
        self.log = log  # what the ranks print; shown if one of them dies without a word
        self._pipes: list[Connection] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        port = _free_port()
        try:
            for rank in range(world):
                self._launch(rank, world, port)
            for pipe in self._pipes:
                pipe.send(setting)
        except BaseException:
            self.kill()
            raise

    def _launch(self, rank: int, world: int, port: int) -> None:
        near, far = Pipe()
        environment = {
            **os.environ,
            MARK: self.family.token,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(HERE / "trainer.py"), str(far.fileno())]
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        far.close()
        self._pipes.append(near)
        self._ranks.append(process)

    def ready(self) -> int:
        """Wait until all ranks have trained a step; return the bytes of the training state."""
        return int(self._replies()[0])

    def command(self, name: str, **arguments: Any) -> list[Any]:
        """Have every rank do the same; return their answers in rank order."""
        for pipe in self._pipes:
            try:
                pipe.send((name, arguments))
            except OSError as error:
                raise TeamError(f"a rank is gone before {name}") from error
        return self._replies()

    def _replies(self) -> list[Any]:
        """One answer of every rank, or the first failure: a rank that has failed tells so
        while the others still wait for it in a collective.
        """
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
            last = self.log.read_text(errors="replace").strip().splitlines()[-20:]
            raise TeamError("\n".join(["a rank died; its last words:", *last])) from error
        if status == "error":
            raise TeamError(str(value).strip())
        return value

    def block(self, steps: int, checkpoints: bool) -> dict[str, Any]:
        """One measured block: the ranks' own timings, the family's CPU seconds, and the cores
        that everything else on the machine took meanwhile.
        """
        start, busy, cpu = time.perf_counter(), machine_busy_seconds(), self.family.cpu_seconds()
        ranks = self.command("block", steps=steps, checkpoints=checkpoints)
        cpu = self.family.cpu_seconds() - cpu
        others = (machine_busy_seconds() - busy - cpu) / (time.perf_counter() - start)
        return {"ranks": ranks, "cpu_s": cpu, "steps": steps, "others": max(others, 0.0)}

    def memory_block(self, steps: int, checkpoints: bool) -> dict[str, int]:
        """Peak bytes of the family over a block that is not timed, and of the device."""
        with MemorySampler(self.family) as sampler:
            ranks = self.command("block", steps=steps, checkpoints=checkpoints)
        return {**sampler.peak, "Gpu": sum(rank["gpu_peak_bytes"] for rank in ranks)}

    def begin_close(self) -> None:
        """Ask every rank to end."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(("close", {}))

    def end_close(self, limit_s: float = 15.0) -> None:
        """Wait for the ranks, then make sure that nothing of the family is left.

        What hangs in teardown has been measured already: it is killed, and no error.
        """
        limit = time.monotonic() + limit_s
        for process in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(limit - time.monotonic(), 0))
        self.kill()

    def kill(self) -> None:
        self.family.kill()
        for process in self._ranks:
            process.wait()
        for pipe in self._pipes:
            pipe.close()


def measure_memory(team: Team, every: int) -> dict[str, Any]:
    """Peak memory before and after the method is attached.

    The baseline is taken in the same processes before `attach`, so that whatever the method
    keeps between checkpoints (buffers, daemons, imported libraries) counts as extra.
    """
    steps = MEMORY_CYCLES * every
    team.command("block", steps=2, checkpoints=False)  # let the allocator settle
    plain = team.memory_block(max(steps, 4), checkpoints=False)
    team.command("attach")
    return {"plain": plain, "checkpoints": team.memory_block(steps, checkpoints=True)}


def measure_visit(team: Team, steps: int) -> dict[str, Any]:
    """Plain, checkpoints, plain: a steady drift of the machine cancels out."""
    visit = {
        "before": team.block(steps // 2, checkpoints=False),
        "checkpoints": team.block(steps, checkpoints=True),
        "after": team.block(steps - steps // 2, checkpoints=False),
    }
    team.command("sweep")
    return visit


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
