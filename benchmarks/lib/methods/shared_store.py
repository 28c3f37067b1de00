"""One checkpoint an epoch on a shared parallel file system of a given bandwidth.

The bandwidth is simulated: a write by torch.save lasts as long as it would there, and flushes have
Tierckpt's own limit.
"""

from __future__ import annotations

import time
from typing import Any

from lib.methods.alternatives import TorchSave
from lib.methods.horovod import RootSave
from lib.methods.ours import DRAIN_LIMIT_S, NEVER, OursLocal

BYTES_PER_SECOND = 100_000_000
FLUSHED_OF = 10
"""One of so many checkpoints is flushed."""


class RootShared(TorchSave):
    """Rank 0 writes to the shared file system, and all wait."""

    name = "root-shared"
    title = "torch.save on rank 0, shared file system"
    usual = False

    def _write(self, version: int) -> None:
        begin = time.perf_counter()
        super()._write(version)
        least = self.path(version).stat().st_size / BYTES_PER_SECOND
        time.sleep(max(0.0, begin + least - time.perf_counter()))


class HorovodRootShared(RootShared, RootSave):
    """`RootShared` under Horovod: the others wait at their next allreduce."""


class OursFlushed(OursLocal):
    """Every version to local disk, and one of ten flushed to the shared file system."""

    name = "ours-flushed"
    title = "Tierckpt, to local, every 10th flushed"
    usual = False

    def __init__(self) -> None:
        super().__init__()
        self._asked = 0

    def _settings(self) -> dict[str, Any]:
        return {
            **super()._settings(),
            "persistent_path": str(self.job.directory / "persistent"),
            "persistent_every_steps": NEVER,
            "persistent_every_seconds": 0,
            "persistent_bytes_per_second": BYTES_PER_SECOND,
        }

    def boundary(self, version: int, due: bool) -> None:
        if due and self._asked % FLUSHED_OF == 0:
            self._checkpointer._schedule.last["persistent"] = -1
        super().boundary(version, due)
        if due:
            self._checkpointer._schedule.last["persistent"] = self._checkpointer.version
        self._asked += due

    def drain(self) -> None:
        super().drain()
        if not self._checkpointer._agent.wait(DRAIN_LIMIT_S, everything=True):
            raise TimeoutError(f"{self.name}: {self._checkpointer._agent.behind()} are not done")


class HorovodFlushed(OursFlushed):
    """`OursFlushed` under Horovod."""

    adapter = "horovod_ckpt"


SHARED = (RootShared, OursFlushed)
HOROVOD_SHARED = (HorovodRootShared, HorovodFlushed)
