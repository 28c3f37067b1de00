"""The machine that the chaos test breaks: nodes with a disk and a memory each, and a run's ranks.

Nodes are names here, as in examples/spares: TIERCKPT_NODE, a folder, and a part of shared memory.
Ranks are forked from one process that has imported torch. All that is started carries the round's
folder in its environment, so that what is killed is ours.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.chaos.job import Orders, run, to_json
from tests.chaos.plan import Shape
from tests.chaos.rendezvous import Rendezvous
from tests.support.crash.launcher import Process, quiet_environment
from tierckpt.storage.memory.job_directory import JobDirectory, job_id_of

DISK_BYTES = 32 * 1024 * 1024
MARK = "CHAOS_FOLDER"


class Cluster:
    """One round's place: folders, mounts and processes. `close` removes it all but the logs."""

    def __init__(self, folder: Path, shm: Path, shape: Shape, launcher: str) -> None:
        self.folder, self.shm, self.shape, self.launcher = folder, shm, shape, launcher
        self.path = str(folder / "disks" / "{node}" / "ckpts")
        self.shared = folder / "shared"
        self.ranks: list[BaseProcess] = []
        self.small_disks = True
        """Disks can be filled; else a full one is played by one that is not there."""
        self._rendezvous = Rendezvous() if launcher == "horovod" else None
        folder.mkdir(parents=True)
        shm.mkdir(parents=True)
        for node in shape.node_numbers:
            self.disk(node).mkdir(parents=True)
            self.small_disks = self.small_disks and _mount(self.disk(node))

    def disk(self, node: int) -> Path:
        """Of one node."""
        return self.folder / "disks" / f"node{node}"

    def memory(self, node: int) -> JobDirectory:
        """Of one node."""
        return JobDirectory.at(self.shm, job_id_of(self.path), f"node{node}")

    # --- processes -----------------------------------------------------------------------------

    def start(self, orders: list[Orders]) -> None:
        """A run of the job: one process a rank."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.chaos.preloaded"])
        ranks = len(orders)
        settings = self._rendezvous.renew(ranks) if self._rendezvous else [{}] * ranks
        self.ranks = []
        for each in orders:
            own = {MARK: str(self.folder), "TIERCKPT_NODE": f"node{each.node}"}
            environment = {**quiet_environment(), **settings[each.rank], **own}
            log = str(self.folder / f"life{each.life}-r{each.rank}.log")
            process = context.Process(target=run, args=(to_json(each), environment, log))
            process.start()
            self.ranks.append(process)

    def stop(self) -> None:
        """SIGKILL to all ranks, as a launcher does when one of them fails; agents stay."""
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.join()
            process.close()
        self.ranks = []
        if not self.small_disks:  # a full disk could be read at the restart
            for node in self.shape.node_numbers:
                self.free(node)

    def agents(self, node: int | None = None) -> list[Process]:
        """Living agents, of all nodes or of one."""
        name = b"" if node is None else f"node{node}\0".encode()
        return [Process(pid) for pid, arguments, its in self._ours() if its.startswith(name)]

    def _ours(self) -> Iterator[tuple[int, bytes, bytes]]:
        mark = f"{MARK}={self.folder}\0".encode()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                environment = Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
                if b"tierckpt.agent.process" in command and mark in environment:
                    node = environment.partition(b"TIERCKPT_NODE=")[2]
                    yield int(pid), command, node

    def kill_agents(self, node: int | None = None) -> int:
        """SIGKILL; returns how many there were."""
        found = self.agents(node)
        for agent in found:
            agent.kill()
        return len(found)

    def signal_agents(self, node: int, number: signal.Signals) -> int:
        """To the node's agents; returns how many there are."""
        found = self.agents(node)
        for agent in found:
            agent.signal(number)
            agent.forget()
        return len(found)

    # --- memory and disks ----------------------------------------------------------------------

    def wipe_memory(self, node: int) -> None:
        """All that the node had in memory is gone."""
        shutil.rmtree(self.memory(node).path, ignore_errors=True)

    def wipe_disk(self, node: int) -> None:
        """The node comes back with an empty disk."""
        self.free(node)
        for entry in self.disk(node).iterdir():
            shutil.rmtree(entry)

    def fill(self, node: int) -> None:
        """Nothing can be written to the node's disk any more."""
        if not self.small_disks:
            self._away(node).parent.mkdir(exist_ok=True)
            if not self._away(node).exists():
                self.disk(node).rename(self._away(node))
                self.disk(node).touch()
            return
        with (self.disk(node) / "filler").open("ab", buffering=0) as file:
            for nbytes in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(nbytes))

    def free(self, node: int) -> None:
        """The inverse of `fill`."""
        if self.small_disks:
            (self.disk(node) / "filler").unlink(missing_ok=True)
        elif self._away(node).exists():
            self.disk(node).unlink()
            self._away(node).rename(self.disk(node))

    def _away(self, node: int) -> Path:
        return self.folder / "away" / f"node{node}"

    def expire_lease(self) -> None:
        """As if two minutes had passed since a run that was killed renewed it last."""
        for path in self.shared.glob("lease.*"):
            path.unlink(missing_ok=True)

    # --- the end -------------------------------------------------------------------------------

    def left_in_memory(self) -> list[str]:
        """Files of this round in shared memory."""
        return sorted(str(path) for path in self.shm.rglob("*"))

    def close(self) -> None:
        """Kill what is left, unmount, and remove all but journals and logs."""
        self.stop()
        self.kill_agents()
        if self._rendezvous is not None:
            self._rendezvous.close()
        for node in self.shape.node_numbers:
            if os.path.ismount(self.disk(node)):
                subprocess.run(["umount", "-l", str(self.disk(node))], check=True)
        shutil.rmtree(self.shm, ignore_errors=True)


def _mount(folder: Path) -> bool:
    """A small file system in memory there; False where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False
