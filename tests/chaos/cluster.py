"""The machine that the chaos test breaks: nodes with a disk and a memory each, and a run's ranks.

Nodes are names here, as in examples/spares: TIERCKPT_NODE, a folder, and a part of shared memory.
Ranks are forked from one process that has imported torch. Every started process carries the round's
folder in its environment, so that no process of anybody else is killed.
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
from tierckpt.storage import JobDirectory, job_id_of

DISK_BYTES = 32 * 1024 * 1024
MARK = "CHAOS_FOLDER"


class Cluster:
    """Folders, mounts and processes of one round. `close` removes all but the logs."""

    def __init__(self, folder: Path, shm: Path, shape: Shape, launcher: str) -> None:
        self.folder, self.shm, self.shape, self.launcher = folder, shm, shape, launcher
        self.path = str(folder / "disks" / "{node}" / "ckpts")
        self.shared = folder / "shared"
        self.ranks: list[BaseProcess] = []
        self.small_disks = True
        """True if disks can be filled; otherwise a missing disk stands for a full one."""
        self._rendezvous = Rendezvous() if launcher.startswith("horovod") else None
        folder.mkdir(parents=True)
        shm.mkdir(parents=True)
        for node in shape.node_numbers:
            self.disk(node).mkdir(parents=True)
            self.small_disks = self.small_disks and _mount(self.disk(node))

    def disk(self, node: int) -> Path:
        """Folder of one node's disk."""
        return self.folder / "disks" / f"node{node}"

    def memory(self, node: int) -> JobDirectory:
        """The job's folder in one node's memory."""
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
        if not self.small_disks:  # a full disk would be readable at the restart
            for node in self.shape.node_numbers:
                self.free(node)

    def agents(self, node: int | None = None) -> list[Process]:
        """Process ids of living agents, of all nodes or of one."""
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
        """Kill agents with SIGKILL; returns their number."""
        found = self.agents(node)
        for agent in found:
            agent.kill()
        return len(found)

    def signal_agents(self, node: int, number: signal.Signals) -> int:
        """Send a signal to the node's agents; returns their number."""
        found = self.agents(node)
        for agent in found:
            agent.signal(number)
            agent.forget()
        return len(found)

    # --- memory and disks ----------------------------------------------------------------------

    def wipe_memory(self, node: int) -> None:
        """Remove everything that the node had in memory."""
        shutil.rmtree(self.memory(node).path, ignore_errors=True)

    def wipe_disk(self, node: int) -> None:
        """Replace the node's disk by an empty one."""
        self.free(node)
        for entry in self.disk(node).iterdir():
            shutil.rmtree(entry)

    def fill(self, node: int) -> None:
        """Fill the node's disk, so that no write succeeds any more."""
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
        """Undo `fill`."""
        if self.small_disks:
            (self.disk(node) / "filler").unlink(missing_ok=True)
        elif self._away(node).exists():
            self.disk(node).unlink()
            self._away(node).rename(self.disk(node))

    def _away(self, node: int) -> Path:
        return self.folder / "away" / f"node{node}"

    def expire_lease(self) -> None:
        """Age the lease of a killed run, as if it was last renewed two minutes ago."""
        for path in self.shared.glob("lease.*"):
            path.unlink(missing_ok=True)

    # --- the end -------------------------------------------------------------------------------

    def left_in_memory(self) -> list[str]:
        """Files of this round in shared memory."""
        return sorted(str(path) for path in self.shm.rglob("*"))

    def close(self) -> None:
        """Kill remaining processes, unmount, and remove all but journals and logs."""
        self.stop()
        self.kill_agents()
        if self._rendezvous is not None:
            self._rendezvous.close()
        for node in self.shape.node_numbers:
            if os.path.ismount(self.disk(node)):
                subprocess.run(["umount", "-l", str(self.disk(node))], check=True)
        shutil.rmtree(self.shm, ignore_errors=True)


def _mount(folder: Path) -> bool:
    """Mount a small file system in memory there; False where not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False
