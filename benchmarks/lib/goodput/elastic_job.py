"""Elastic Horovod for goodput.py: Horovod's launcher and commits, with forked ranks.

horovodrun starts relays (relay.py); each asks this process to fork a rank. So the start-up of
processes does not count, as for the other methods, and the recovery of Horovod does: the survivor
rolls back to the last commit in its memory, the launcher takes a spare host, both join.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lib.goodput.killed_job import (
    Course,
    Order,
    Rank,
    StuckError,
    be_rank,
    check_fork,
    journal_of,
    last_words,
    record_stall,
    when_ready,
    workload_of,
)
from lib.launchers import LOOPBACKS, horovodrun, write_discovery


def run(order: Order, seconds: float, kills: Sequence[float], seed: int) -> Course:
    """Like `killed_job.run`, but Horovod's launcher replaces the killed ranks."""
    order.folder.mkdir(parents=True, exist_ok=True)
    workload_of(order)
    server = Server(order)
    chance = random.Random(seed)
    ahead, done = sorted(k for k in kills if k < seconds), []
    try:
        begin = when_ready(order, server.serve)
        while (now := time.monotonic() - begin) < seconds and server.launcher.poll() is None:
            if ahead and ahead[0] <= now:
                alive = [rank for rank in server.ranks if not rank.ended]
                if alive:
                    chance.choice(alive).kill()
                done.append(begin + ahead.pop(0))
            server.serve(min([0.2, seconds - now, *(k - now for k in ahead[:1])]))
        end = time.monotonic()
        if server.launcher.poll() not in (None, 0):
            raise StuckError(last_words(order))
    finally:
        server.close()
    return Course(end, list(journal_of(order)), done)


class Server:
    """horovodrun, and the ranks that its relays request."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.ranks: list[Rank] = []
        self._relays: dict[int, tuple[socket.socket, Rank]] = {}
        path = str(order.memory / "door")
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(path)
        self._door.listen(8)
        here = Path(__file__).resolve().parent
        command = horovodrun(2, write_discovery(order.folder / "hosts.sh", LOOPBACKS))
        command += [sys.executable, "-S", "-E", str(here / "relay.py"), path]
        with (order.folder / "log").open("ab") as log:
            self.launcher = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def serve(self, seconds: float) -> None:
        """For `seconds` at most: fork for new relays, and report the exit status of ended ranks."""
        poll = select.poll()
        poll.register(self._door, select.POLLIN)
        for fd, (_, rank) in self._relays.items():
            poll.register(fd, select.POLLIN)
            poll.register(rank.fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)}
        for fd, (relay, rank) in list(self._relays.items()):
            if fd in ready:
                rank.kill()  # the launcher ended its relay
            if fd in ready or rank.fd in ready:
                rank.reap()
                with suppress(OSError):
                    relay.sendall(f"{rank.status & 255}\n".encode())
                relay.close()
                del self._relays[fd]
        if self._door.fileno() in ready:
            self._let_in()

    def _let_in(self) -> None:
        relay, _ = self._door.accept()
        with relay.makefile("r") as stream:
            environment: dict[str, str] = json.loads(stream.readline())
        check_fork()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            os.environ.clear()
            os.environ.update(environment)
            be_rank(self.order, parent, lambda: train(self.order))
        rank = Rank(pid)
        self.ranks.append(rank)
        self._relays[relay.fileno()] = relay, rank

    def close(self) -> None:
        """End all processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.launcher.pid, signal.SIGKILL)
        self.launcher.wait()
        for rank in self.ranks:
            rank.kill()
            rank.reap()
        for relay, _ in self._relays.values():
            relay.close()
        self._door.close()


def train(order: Order) -> None:
    """Train one rank with the loop of Horovod's documentation."""
    import horovod.torch as hvd_module

    hvd: Any = hvd_module
    hvd.init()
    torch.set_num_threads(1)
    workload = workload_of(order)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(workload.model.parameters(), lr=1e-4),
        named_parameters=workload.model.named_parameters(),
    )
    journal = os.open(order.folder / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def record(state: Any, began: bool) -> None:
        if hvd.rank() == 0:
            line = f"0 {state.version} {time.monotonic()} {int(began)}\n"
            os.write(journal, line.encode())

    stalls: list[float] = []

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def loop(state: Any) -> None:
        record(state, began=True)
        while state.version < order.steps:
            optimizer.zero_grad()
            torch.autograd.backward(workload.loss(workload.model))
            optimizer.step()
            state.version += 1
            if state.version % order.every == 0:
                calls = time.perf_counter()
                state.commit()
                stalls.append(time.perf_counter() - calls)
            record(state, began=False)

    loop(hvd.elastic.TorchState(model=workload.model, optimizer=optimizer, version=0))
    hvd.barrier()
    if hvd.rank() == 0:
        record_stall(order, stalls)
