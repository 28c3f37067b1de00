"""Nodes and spares: a node is lost every ten epochs, with its processes, memory and disk.

Each node is a network namespace with a folder for its disk and one for its memory; all see one
shared file system. Ours runs under `tierckpt run`: its spares take the places of lost nodes. The
job with root checkpointing ends with its first lost node; here it is also started again, at once
and with a spare in the place of the node, as one would by hand.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.launchers import SHIM
from lib.papers.scr_exa.jobs import (
    LOOK_SECONDS,
    JobError,
    Plan,
    Watched,
    compared,
    figures_of,
    lines_of,
    losses_of,
    python,
    starts_of,
)
from tierckpt.testing.network import Network, network

MEETING, PORT = 29512, 29513
"""Each job has a network of its own."""
SAID = "this spare waits"


def measure(plan: Plan, spares: int, losses: list[int], limit_s: float) -> dict[str, Any]:
    """Run the undisturbed job, and the one that loses nodes when rank 0 has done the steps in
    `losses`; return a row's figures. Raises JobError, and NoNetworkError without namespaces."""
    calm = plan.calm()
    with network(plan.world) as cables:
        _Nodes(calm, cables, limit_s).run([])
    with network(plan.world + spares) as cables:
        since = _Nodes(plan, cables, limit_s).run(losses)
    step_seconds = _wall_seconds(calm) / plan.steps
    wall_seconds = _wall_seconds(plan)
    return {
        **compared(plan, losses_of(calm)),
        **figures_of(starts_of(plan, since)),
        "spares": spares,
        "lost_at": losses,
        "survived": len(since),
        "steps": plan.steps,
        "calm_step_seconds": step_seconds,
        "wall_seconds": wall_seconds,
        "goodput": plan.steps * step_seconds / wall_seconds,
    }


def _wall_seconds(plan: Plan) -> float:
    """From the moment when all ranks first were ready to train, to the end of the last step."""
    first = max(lines_of(plan, rank)[0]["restored"] for rank in range(plan.world))
    return float(lines_of(plan, 0)[-1]["end"]) - first


class _Nodes:
    """The processes of one job. The first nodes have a rank each, the others are spares."""

    def __init__(self, plan: Plan, cables: Network, limit_s: float) -> None:
        plan.make_folders()
        self._plan, self._cables, self._limit_s = plan, cables, limit_s
        self._job = Watched(plan)
        self._has_shims = plan.method != "root-shared"
        self._all: list[subprocess.Popen[bytes]] = []

    def run(self, losses: list[int]) -> list[float]:
        """Run the job to its end; return the times of the losses."""
        plan, since = self._plan, []
        spare = plan.world
        try:
            self._start_all(list(range(plan.world)))
            if self._has_shims and losses:
                self._wait_for_spares(len(self._cables.nodes) - plan.world)
            nodes = list(range(plan.world))
            for number, step in enumerate(losses):
                self._wait(lambda step=step: self._job.last_step() >= step)  # type: ignore[misc]
                # Never rank 0: its node is the meeting place.
                rank = 1 + 3 * number % (plan.world - 1)
                since.append(time.time())
                self._lose(nodes[rank])
                plan.release(step)
                nodes[rank], spare = spare, spare + 1
                if not self._has_shims:
                    self._job.family.kill()
                    self._start_all(nodes)
                self._wait(lambda after=since[-1]: self._has_stepped(after))  # type: ignore[misc]
            self._wait(lambda: self._job.have_done(plan.steps))
        finally:
            self._job.family.kill()
            for process in self._all:
                process.wait()
            shutil.rmtree(plan.memory, ignore_errors=True)
        return since

    def _start_all(self, nodes: list[int]) -> None:
        for rank, node in enumerate(nodes):
            self._start(node, rank)

    def _wait_for_spares(self, count: int) -> None:
        for node in range(self._plan.world, self._plan.world + count):
            self._start(node, None)
        self._wait(lambda: self._job.output.read_text(errors="replace").count(SAID) == count)

    def _start(self, node: int, rank: int | None) -> None:
        """Start the process of a rank, or of a spare, on a node."""
        job, plan = self._job, self._plan
        meeting = self._cables.address(0)
        env = {
            **os.environ,
            **job.environment,
            "TIERCKPT_NODE": f"node{node}",
            "TIERCKPT_PEER_INTERFACE": "net0",
            "GLOO_SOCKET_IFNAME": "net0",
        }
        if rank is not None:
            port = PORT + len(self._all) // plan.world  # that of a killed process may not be free
            place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": plan.world, "MASTER_PORT": port}
            env |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": meeting}
        shim = [*SHIM, "--rendezvous", f"{meeting}:{MEETING}"] if self._has_shims else []
        shim += ["--standby"] if rank is None else []
        with job.output.open("ab") as output:
            process = subprocess.Popen(
                [*self._cables.inside(node), *python([*shim, *plan.command()])],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._all.append(process)
        if rank == 0:
            self._first = process

    def _lose(self, node: int) -> None:
        """Kill the processes of a node, and remove its memory and disk."""
        mine = f"TIERCKPT_NODE=node{node}".encode()
        for pid in self._job.family.pids():
            with contextlib.suppress(OSError):
                if mine in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
        for place in (self._plan.memory, self._plan.folder):
            shutil.rmtree(f"{place}/node{node}", ignore_errors=True)

    def _has_stepped(self, after: float) -> bool:
        """Whether rank 0 has done a step in a start after a moment."""
        lines = lines_of(self._plan, 0)
        begins = [place for place, line in enumerate(lines) if line.get("begun", 0) > after]
        return bool(begins) and "step" in lines[-1] and begins[-1] < len(lines) - 1

    def _wait(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._limit_s
        while not true():
            if time.monotonic() > deadline or (self._first.poll() is not None and not true()):
                raise JobError(self._job.last_words())
            time.sleep(LOOK_SECONDS)
