"""Loss of a node to the next step: a spare node takes its place."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from lib.launchers import SHIM, environment, torchrun
from lib.processes import MARK, Family
from lib.restart.kills import Job, Kills, figures
from tierckpt.testing import free_ports

HERE = Path(__file__).resolve().parent
FIRST = "node0"
"""The node that stays, and records the moments."""
LIMIT_SECONDS = 100.0
IMPORT_SECONDS = 8.0
"""The time in which a spare agent of torchrun is certainly there."""
SAID = "this spare waits"
LOOK_SECONDS = 0.1
SIGNS_OF_LIFE = "keep_alive_interval=1,keep_alive_max_attempt=3"
AGENT, QUICK, STANDBY = "torchrun", "torchrun, 3 s", "tierckpt run --standby"
LAUNCHERS = (AGENT, QUICK, STANDBY)
"""torchrun with a spare agent, which is let in when the lost one has sent no sign of life for 15 s,
or for 3; and a spare of `tierckpt run`."""


def measure(launcher: str, state_bytes: int, losses: int, places: tuple[Path, Path]) -> Kills:
    """Run one job on two nodes of one rank, and lose the second node `losses` times; the first
    time is not counted. Nodes are names on this machine."""
    for each in places:
        each.mkdir(parents=True)
    folder, memory = places
    job = Job(launcher, 2, state_bytes, losses + 1, str(folder), str(memory))
    family = Family(uuid.uuid4().hex)
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**environment(folder), "PYTHONPATH": path, MARK: family.token}
    nodes = _Nodes(job, folder, env)
    try:
        nodes.start()
        nodes.wait(lambda: _is_listening(nodes.port))  # it keeps the store, so it is not lost
        nodes.start()
        nodes.wait((folder / "starts").exists)
        for loss in range(job.kills):
            nodes.add_spare()
            (folder / f"ready{loss}").touch()
            nodes.wait_for_starts(loss + 2)
    finally:
        family.kill()
        nodes.reap()
    return figures(job, folder)


class _Nodes:
    """The processes of launchers, one for each node."""

    def __init__(self, job: Job, folder: Path, env: dict[str, str]) -> None:
        self.port, self._shims = free_ports(2)
        self._job, self._folder, self._env = job, folder, env
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> Path:
        """Start the next node: one of two, or a spare one; returns its log."""
        number = len(self._started)
        env = {**self._env, "TIERCKPT_NODE": f"{FIRST[:-1]}{number}"}
        path = self._folder / f"log{number}"
        with path.open("w") as log:
            self._started.append(
                subprocess.Popen(self._command(number > 1), env=env, stdout=log, stderr=log)
            )
        return path

    def add_spare(self) -> None:
        """Start a spare node, and wait until it is ready. One at a time: with two spare agents
        torchrun started all processes again and again."""
        began, log = time.monotonic(), self.start()
        self.wait(lambda: SAID in log.read_text() or time.monotonic() - began > IMPORT_SECONDS)

    def wait_for_starts(self, count: int) -> None:
        """Wait until the job has started so often."""
        self.wait(lambda: len((self._folder / "starts").read_text().splitlines()) == count)

    def _command(self, is_spare: bool) -> list[str]:
        script = [str(HERE / "lost_rank.py"), json.dumps(asdict(self._job))]
        place = ["--rdzv-backend", "c10d", "--rdzv-id", "lost", "--local-addr", "127.0.0.1"]
        two = ["--nnodes", "2", *place, "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        if self._job.launcher == STANDBY:
            shim = [*SHIM, "--rendezvous", f"127.0.0.1:{self._shims}"]
            how = torchrun(1, [*shim, "--standby"]) if is_spare else torchrun(1, shim, two)
            return [*how, *script]
        more = ["--rdzv-conf", SIGNS_OF_LIFE] if self._job.launcher == QUICK else []
        return [*torchrun(1, (), [*two, *more]), *script]

    def wait(self, true: Callable[[], bool]) -> None:
        """Wait for a condition. Raises RuntimeError with the logs if the first node ends."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not true():
            if self._started[0].poll() is not None or time.monotonic() > deadline:
                logs = sorted(self._folder.glob("log*"))
                raise RuntimeError("\n".join(f"{p.name}: {p.read_text()[-3000:]}" for p in logs))
            time.sleep(LOOK_SECONDS)

    def reap(self) -> None:
        """Wait for the ends of all launchers."""
        for process in self._started:
            process.wait()


def _is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


__all__ = ["LAUNCHERS", "measure"]
