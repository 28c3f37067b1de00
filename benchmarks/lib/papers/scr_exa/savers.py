"""The methods of SCR-Exa's jobs, under both launchers: they take checkpoints, and resume."""

from __future__ import annotations

import importlib
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lib.goodput.methods import Nothing, Ours, OursDisk, newest_file, remove_old, version_of
from lib.methods.method import Job
from lib.methods.shared_store import BYTES_PER_SECOND, FLUSHED_OF, HorovodRootShared, RootShared

SLOW_STEP_SECONDS, PAUSE_SECONDS = 0.4, 0.02
Broadcast = Callable[[torch.Tensor], object]


class _Root(Nothing):
    """Root checkpointing: rank 0 writes to the shared file system and reads it, the others get the
    bytes by a broadcast."""

    is_shared = True
    """Whether its directory is the shared file system, and not the node's own disk."""

    def resume(self, job: Job, every: int) -> int:
        self.setup(job)
        return read_by_root(job, self._broadcast())

    def _broadcast(self) -> Broadcast:
        raise NotImplementedError

    def boundary(self, version: int, due: bool) -> None:
        super().boundary(version, due)
        if due:
            remove_old(self.job)


class Root(_Root, RootShared):
    """Root checkpointing under DDP."""

    def _broadcast(self) -> Broadcast:
        return lambda tensor: dist.broadcast(tensor, 0)


class HorovodRoot(_Root, HorovodRootShared):
    """Root checkpointing under Horovod."""

    def _broadcast(self) -> Broadcast:
        hvd: Any = importlib.import_module("horovod.torch")
        return lambda tensor: hvd.broadcast_(tensor, 0)


def read_by_root(job: Job, broadcast: Broadcast) -> int:
    """Load the newest file: rank 0 reads it, as long as the shared file system takes for that;
    return its version, or 0 if there is none."""
    path = newest_file(job) if job.rank == 0 else None
    raw = _read(path) if path else b""
    about = torch.tensor([version_of(path) if path else 0, len(raw)])
    broadcast(about)
    version, size_bytes = (int(value) for value in about)
    if not version:
        return 0
    content = torch.empty(size_bytes, dtype=torch.uint8)
    if job.rank == 0:
        content = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    broadcast(content)
    state = torch.load(io.BytesIO(content.numpy().data))
    job.module.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    return version


def _read(path: Path) -> bytes:
    begin = time.perf_counter()
    raw = path.read_bytes()
    time.sleep(max(0.0, begin + len(raw) / BYTES_PER_SECOND - time.perf_counter()))
    return raw


class HorovodMemory(Ours):
    """The memory level under Horovod."""

    adapter = "horovod_ckpt"


class HorovodDisk(OursDisk):
    """The local level under Horovod."""

    adapter = "horovod_ckpt"


class Protected(OursDisk):
    """Each version to memory and to the node's disk, with parity on other nodes, and one of ten
    flushed to the shared file system, as SCR does."""

    title = "Tierckpt, to local with XOR, every 10th flushed"

    def resume(self, job: Job, every: int) -> int:
        self._protected = False  # events come before the restart has ended
        version = super().resume(job, every)
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

    def settings(self, every: int) -> dict[str, Any]:
        return {
            **super().settings(every),
            "peer_redundancy": "xor",
            "persistent_path": str(self.job.directory.parent / "shared" / "flushed"),
            "persistent_every_steps": FLUSHED_OF * every,
            "persistent_every_seconds": 0,
            "persistent_bytes_per_second": BYTES_PER_SECOND,
        }


SAVERS: dict[str, dict[str, type[Nothing]]] = {
    "torchrun": {
        "nothing": Nothing,
        "root-shared": Root,
        "ours-memory": Ours,
        "ours-local": OursDisk,
        "ours-xor": Protected,
    },
    "horovod": {
        "nothing": Nothing,
        "root-shared": HorovodRoot,
        "ours-memory": HorovodMemory,
        "ours-local": HorovodDisk,
    },
}
