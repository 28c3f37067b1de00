"""The methods of jobs that are killed and resume: Tierckpt with intervals, as scripts use it, and
its alternatives."""

from __future__ import annotations

import time
from typing import Any

from lib.methods.alternatives import (
    BYTES_PER_SECOND,
    DcpThread,
    RootShared,
    TorchLoad,
    TorchSave,
)
from lib.methods.checkfreq import CheckFreq
from lib.methods.method import Job, Method
from lib.methods.ours import FLUSHED_OF, checkpointer_of, wait_for_all

SLOW_STEP_SECONDS, PAUSE_SECONDS = 0.4, 0.02


class Ours(Method):
    """To memory at the interval, to local disk once a minute."""

    name = "ours"
    title = "Tierckpt, memory and local"

    def resume(self, job: Job, every: int) -> int:
        self.every, self.waits = every, list[float]()
        return super().resume(job, every)

    def setup(self, job: Job) -> None:
        super().setup(job)
        usual = {"path": str(job.directory), "on_event": self._receive}
        self.checkpointer = checkpointer_of(job, **{**usual, **self.settings()})

    def load(self) -> int:
        return int(self.checkpointer.restore())

    def settings(self) -> dict[str, Any]:
        """The intervals of the levels."""
        return {"memory_every_steps": self.every}

    def _receive(self, event: Any) -> None:
        if event.name == "sealed":
            self.waits.append(event.seconds["stall"])

    def boundary(self, version: int, due: bool) -> None:
        self.checkpointer.step()

    def stall_seconds(self) -> list[float]:
        return self.waits

    def drain(self) -> None:
        self.checkpointer.save(now=True)
        wait_for_all(self.checkpointer, self.name)

    def close(self) -> None:
        self.checkpointer.abandon()


class Memory(Ours):
    """To memory alone: all processes are lost."""

    title = "Tierckpt, memory"

    def settings(self) -> dict[str, Any]:
        return {"memory_every_steps": self.every, "local_every_seconds": 0}


class Disk(Ours):
    """To local disk at the interval."""

    title = "Tierckpt, local disk"

    def settings(self) -> dict[str, Any]:
        return {"memory_every_steps": 0, "local_every_steps": self.every, "local_every_seconds": 0}


class Peer(Disk):
    """Each version to local disk, with a copy on another node; each rank is a node."""

    title = "Tierckpt, peer (a node is lost)"

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "path": str(self.job.directory.parent / "{node}"),
            "node": f"node{self.job.rank}",
            "peer_redundancy": "partner",
            "peer_interface": "lo",
        }


class Persistent(Disk):
    """Each version to local disk, and to a store beside the nodes' folders."""

    title = "Tierckpt, persistent"

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "persistent_path": str(self.job.directory.parent / "shared"),
            "persistent_every_steps": self.every,
            "persistent_every_seconds": 0,
        }


class Xor(Disk):
    """Each version to memory and to the node's disk, with parity on other nodes, and one of ten
    flushed to the shared file system, as SCR does."""

    title = "Tierckpt, to local with XOR, every 10th flushed"

    def setup(self, job: Job) -> None:
        self._protected = False
        super().setup(job)

    def load(self) -> int:
        version = super().load()
        self._protected |= version > 0
        return version

    def _receive(self, event: Any) -> None:
        super()._receive(event)
        self._protected |= (event.name, event.level) == ("committed", "peer")

    def boundary(self, version: int, due: bool) -> None:
        """Make slow steps at the start, until the first version has its parity.

        A node lost before then ends the job. Only the steps of a toy are quicker than a
        busy disk."""
        super().boundary(version, due)
        limit = time.monotonic() + SLOW_STEP_SECONDS
        while not self._protected and time.monotonic() < limit:
            time.sleep(PAUSE_SECONDS)
            self.checkpointer.wait(0)  # it reports events

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "peer_redundancy": "xor",
            "persistent_path": str(self.job.directory.parent / "shared" / "flushed"),
            "persistent_every_steps": FLUSHED_OF * self.every,
            "persistent_every_seconds": 0,
            "persistent_bytes_per_second": BYTES_PER_SECOND,
        }


class Nodes(Xor):
    """Each version to memory, every second one to the node's disk, with parity on other nodes."""

    title = "Tierckpt, memory and peer"

    def settings(self) -> dict[str, Any]:
        return {
            "memory_every_steps": self.every,
            "local_every_steps": 2 * self.every,
            "local_every_seconds": 0,
            "peer_redundancy": "xor",
        }


class Run(Ours):
    """Tierckpt under torchrun and `tierckpt run`."""

    title = "Tierckpt, tierckpt run"


class HorovodElastic(Method):
    """hvd.elastic.TorchState: a copy in every process's memory; its loop is its own."""

    title = "hvd.elastic"


RESUMABLE: dict[str, type[Method]] = {
    "nothing": Method,
    "torch-save": TorchSave,
    "checkfreq": CheckFreq,
    "dcp-thread": DcpThread,
    "hvd-elastic": HorovodElastic,
    "ours": Ours,
    "ours-run": Run,
    "ours-memory": Memory,
    "ours-local": Disk,
    "ours-peer": Peer,
    "ours-persistent": Persistent,
    "ours-xor": Xor,
    "ours-nodes": Nodes,
    "torch-load": TorchLoad,
    "root-shared": RootShared,
}
