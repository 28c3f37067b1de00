"""Nodes and spares: a node is lost with its processes, memory and disk, and a spare replaces it.

A node is a network namespace, or a name on this machine. It has a folder for its disk and one for
its memory; all see one shared file system.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lib.jobs.plan import Plan, last_step, lines_of
from lib.jobs.processes import SHIM, Processes, torchrun
from tierckpt.testing import free_ports
from tierckpt.testing.network import Network

MEETING, PORT = 29512, 29513
"""Each job in namespaces has a network of its own."""
SAID = "this spare waits"
AGENT_SECONDS = 8.0
"""The time in which a spare agent of torchrun is certainly there."""


class Nodes:
    """The nodes of a job, each with one rank; further ones are spares. `close` ends them all."""

    def __init__(self, plan: Plan, limit_s: float) -> None:
        self.plan, self.limit_s = plan, limit_s
        self.job = Processes(plan)
        self.of_rank = list(range(plan.world))
        """The node of each rank."""
        self._spares = 0

    def start(self, node: int, rank: int | None) -> None:
        """Start the process of a rank, or of a spare, on a node."""
        raise NotImplementedError

    def start_all(self) -> None:
        """Start all ranks."""
        for rank, node in enumerate(self.of_rank):
            self.start(node, rank)

    def add_spare(self) -> None:
        """Start a spare node, and wait until it is ready."""
        self.start(self.plan.world + self._spares, None)
        self._spares += 1
        began, output = time.monotonic(), self.job.output
        self.job.wait(
            lambda: (
                output.read_text(errors="replace").count(SAID) == self._spares
                or time.monotonic() - began > self.spare_seconds
            ),
            self.limit_s,
        )

    spare_seconds = float("inf")
    """The time after which a spare is ready that says nothing."""

    def lose(self, rank: int, step: int, spare: int) -> float:
        """Lose the node of a rank when the job has done a step; return the time of that. `spare`
        is the node that takes its place."""
        self.job.wait(lambda: last_step(self.plan) >= step, self.limit_s)
        node, moment = self.of_rank[rank], time.time()
        mine = f"TIERCKPT_NODE=node{node}".encode()
        for pid in self.job.family.pids():
            with contextlib.suppress(OSError):
                if mine in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
        for place in (self.plan.memory, self.plan.folder):
            shutil.rmtree(f"{place}/node{node}", ignore_errors=True)
        self.plan.release(step)
        self.of_rank[rank] = spare
        return moment

    def wait_for_a_step(self, after: float) -> None:
        """Wait until rank 0 has done a step in a start after a moment."""

        def has_stepped() -> bool:
            lines = lines_of(self.plan, 0)
            begins = [place for place, line in enumerate(lines) if line.get("begun", 0) > after]
            return bool(begins) and "step" in lines[-1] and begins[-1] < len(lines) - 1

        self.job.wait(has_stepped, self.limit_s)

    def close(self) -> None:
        self.job.close()


class Namespaces(Nodes):
    """Nodes in network namespaces: under `tierckpt run`, or ranks alone for another method."""

    def __init__(self, plan: Plan, limit_s: float, cables: Network) -> None:
        super().__init__(plan, limit_s)
        self._cables = cables
        self.has_shims = plan.method.startswith("ours")

    def start(self, node: int, rank: int | None) -> None:
        meeting, plan = self._cables.address(0), self.plan
        variables = {
            "TIERCKPT_NODE": f"node{node}",
            "TIERCKPT_PEER_INTERFACE": "net0",
            "GLOO_SOCKET_IFNAME": "net0",
        }
        if rank is not None:
            # The port of a killed process may not be free.
            port = PORT + len(self.job.all) // plan.world
            place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": plan.world, "MASTER_PORT": port}
            variables |= {name: str(value) for name, value in place.items()}
            variables["MASTER_ADDR"] = meeting
        shim = [*SHIM, "--rendezvous", f"{meeting}:{MEETING}"] if self.has_shims else []
        shim += ["--standby"] if rank is None else []
        command = [*self._cables.inside(node), sys.executable, *shim, *self.job.rank]
        self.job.start(command, **variables)

    def start_again(self) -> None:
        """End what is left of the job, and start it again with the spare, as one would by hand."""
        self.job.family.kill()
        for process in self.job.all:
            process.wait()
        first = len(self.job.all)
        self.start_all()
        self.job.all = self.job.all[first:] + self.job.all[:first]  # the first one is awaited


class Names(Nodes):
    """Nodes that are names on this machine, each under torchrun, with `tierckpt run` or alone."""

    def __init__(self, plan: Plan, limit_s: float, shims: bool, settings: Sequence[str]) -> None:
        super().__init__(plan, limit_s)
        self._has_shims, self._settings = shims, settings
        self._port, self._meeting = free_ports(2)
        self.spare_seconds = float("inf") if shims else AGENT_SECONDS

    def start(self, node: int, rank: int | None) -> None:
        place = ["--rdzv-backend", "c10d", "--rdzv-id", "lost", "--local-addr", "127.0.0.1"]
        nodes = [*("--nnodes", "2"), *place, "--rdzv-endpoint", f"127.0.0.1:{self._port}"]
        shim = [*SHIM, "--rendezvous", f"127.0.0.1:{self._meeting}"] if self._has_shims else []
        if rank is None and self._has_shims:
            command = torchrun(1, [*shim, "--standby"])
        else:
            command = torchrun(1, shim, [*nodes, *self._settings])
        self.job.start([*command, *self.job.rank], TIERCKPT_NODE=f"node{node}")
        if rank == 0:  # it keeps the store, so it is not lost
            self.job.wait(self._is_listening, self.limit_s)

    def _is_listening(self) -> bool:
        address = ("127.0.0.1", self._port)
        with contextlib.suppress(OSError), socket.create_connection(address):
            return True
        return False
