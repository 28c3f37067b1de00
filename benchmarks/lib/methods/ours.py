"""Tierckpt, with the same interface as its alternatives."""

from __future__ import annotations

import importlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from lib.methods.alternatives import BYTES_PER_SECOND
from lib.methods.method import Job, Method

ADAPTERS = {"torchrun": "ddp_ckpt", "horovod": "horovod_ckpt"}
NEVER = 1_000_000_000  # an interval that enables a level and never comes due by itself
DRAIN_LIMIT_S = 60.0
FLUSHED_OF = 10
"""Of so many versions one is flushed to a shared file system."""


def checkpointer_of(job: Job, **settings: Any) -> Any:
    """A checkpointer for this training."""
    adapter = importlib.import_module(ADAPTERS[job.launcher])
    places = {"shm_dir": str(job.memory), "boundary": "explicit"}
    return adapter.Checkpointer(job.model, job.optimizer, **places, **settings)


def wait_for_all(checkpointer: Any, name: str) -> None:
    """Return when all levels have what the agent was given."""
    if not checkpointer._agent.wait(DRAIN_LIMIT_S, everything=True):
        raise TimeoutError(f"{name}: {checkpointer._agent.behind()} are not done")
    checkpointer.wait(0)  # it reports events


class OursMemory(Method):
    """The memory level: versions are sealed in shared memory and survive the trainer."""

    name = "ours-memory"
    title = "Tierckpt, to memory"
    fsync = "-"
    level = "memory"  # empty: none
    final = "sealed"  # the event that ends a version at this level
    slots = 2

    def __init__(self) -> None:
        super().__init__()
        self._open: set[int] = set()  # due versions that are neither finished, skipped nor failed
        self._begun: dict[int, float] = {}  # version -> perf_counter() at its boundary
        self._ahead = 0  # the trainer's version number less the checkpointer's

    def setup(self, job: Job) -> None:
        super().setup(job)
        self._checkpointer = checkpointer_of(job, **self._settings())

    def _settings(self) -> dict[str, Any]:
        is_late = self.slots and self.job.device.type == "cuda"  # the seal is after the barrier
        return {
            "memory_every_steps": NEVER if self.level == "memory" else 0,
            "local_every_steps": NEVER if self.level == "local" else 0,
            "path": str(self.job.directory),
            "local_every_seconds": 0,
            "slots": self.slots + bool(is_late),
            "on_event": self._event,
        }

    def boundary(self, version: int, due: bool) -> None:
        if due:
            self._open.add(version)
            self._begun[version] = time.perf_counter()
            self._interval_ended(at=-1)
        self._checkpointer.step()
        if due:
            # A skipped version would stay due; here it counts as not taken.
            self._interval_ended(at=self._checkpointer.version)
        self._ahead = version - self._checkpointer.version

    def _interval_ended(self, at: int) -> None:
        """Pretend that the interval of the level last ended at version `at`, on all ranks.

        `save()` is no alternative: it takes effect a step later, and goes to all levels. In a real
        job the interval makes a version due.
        """
        last = self._checkpointer._schedule.last
        assert self.level in last, "the schedule has changed: this method would take no version"
        last[self.level] = at

    def _event(self, event: Any) -> None:
        """Collect an event, on the training thread at a later boundary."""
        version = event.version + self._ahead
        phases = self.details.setdefault(version, {})
        phases.update(event.seconds)
        if (event.name, event.level) == (self.final, self.level):
            end = self._end(event, version)
            self.durable[version] = end
            phases["nbytes"] = float(event.nbytes)
            # The end of the write on the common clock: shards of one version may be written in
            # parallel or in sequence.
            phases["write_end"] = end - phases.get("commit", 0.0)
            self._open.discard(version)
        elif event.name in ("skipped", "failed"):
            self._open.discard(version)

    def _end(self, event: Any, version: int) -> float:
        """perf_counter() at the end of the version, not at the arrival of the event."""
        return self._begun[version] + float(event.seconds["sealed_after"])

    def drain(self) -> None:
        if not self._checkpointer.wait(DRAIN_LIMIT_S):
            raise TimeoutError(f"{self.name}: {sorted(self._open)} are not committed")

    def close(self) -> None:
        self._checkpointer.close()


class OursLocal(OursMemory):
    """The local level: manifest committed, file and directory fsync'ed."""

    name = "ours-local"
    title = "Tierckpt, to local"
    fsync = "yes"
    level = "local"
    final = "committed"

    def _end(self, event: Any, version: int) -> float:
        """The time of the rename of the manifest, as the file system has recorded it.

        The event arrives up to a step later. The two clocks differ by a constant.
        """
        now, offset = time.perf_counter(), time.time() - time.perf_counter()
        shard = f"s{self.job.rank:05d}of{self.job.world:05d}"
        found = self.job.directory.rglob(f"v{event.version:010d}.*.{shard}.manifest")
        return max((_changed(path) - offset for path in found), default=now)


def _changed(path: Path) -> float:
    """Unix time of the last change of the inode; a rename changes it."""
    return path.stat().st_ctime_ns / 1e9


class OursOff(OursMemory):
    """Attached with every level off: the fixed cost of the adapter.

    Its hooks cannot all be removed, so another team trains the plain blocks.
    """

    name = "ours-off"
    title = "Tierckpt, attached, off"
    level = ""
    slots = 0
    beside = "nothing"

    def boundary(self, version: int, due: bool) -> None:
        self._checkpointer.step()


class OursLevels(OursMemory):
    """All levels. Each rank is a node with a disk and an agent, and the partner of the other.

    A version is durable on the persistent level, which it reaches some boundaries later.
    """

    name = "ours-levels"
    title = "Tierckpt, to all levels"
    fsync = "yes"
    level = "persistent"
    final = "committed"
    usual = False

    def _settings(self) -> dict[str, Any]:
        return {
            **super()._settings(),
            "path": str(self.job.directory / "{node}"),
            "node": f"node{self.job.rank}",
            "peer_redundancy": "partner",
            "peer_interface": "lo",
            "persistent_path": str(self.job.directory / "persistent"),
            "persistent_every_steps": NEVER,
            "persistent_every_seconds": 0,
        }

    def _end(self, event: Any, version: int) -> float:
        """The arrival of the event at a boundary, at most a step late."""
        return time.perf_counter()

    def drain(self) -> None:
        super().drain()
        wait_for_all(self._checkpointer, self.name)


class OursAuto(OursMemory):
    """Automatic intervals for memory, local and persistent, for budget.py.

    It chooses its versions itself, so `due` is ignored. At the end of a block it writes the number
    of versions per level to `taken<rank>.json` in the directory.
    """

    name = "ours-auto"
    title = "Tierckpt, automatic"
    usual = False
    slots = 3

    def __init__(self) -> None:
        super().__init__()
        self._taken: Counter[str] = Counter()

    def _settings(self) -> dict[str, Any]:
        return {
            **super()._settings(),
            "path": str(self.job.directory / "local"),
            "memory_every_steps": "auto",
            "local_every_steps": "auto",
            "persistent_path": str(self.job.directory / "persistent"),
            "persistent_every_steps": "auto",
            "persistent_every_seconds": 0,
        }

    def boundary(self, version: int, due: bool) -> None:
        self._checkpointer.step()

    def _event(self, event: Any) -> None:
        if event.name in ("sealed", "committed"):
            self._taken[event.level] += 1

    def drain(self) -> None:
        path = self.job.directory / f"taken{self.job.rank}.json"
        path.write_text(json.dumps(self._taken))

    def busy(self) -> bool:
        self._checkpointer.wait(0)  # completes the copy
        return not self._checkpointer._agent.wait(0, everything=True)

    def sweep(self) -> None:
        """Retention deletes old checkpoints."""


class OursFlushed(OursLocal):
    """Every version to local disk, and one of ten flushed to a shared file system of limited
    bandwidth."""

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
        wait_for_all(self._checkpointer, self.name)


OURS = (OursOff, OursMemory, OursLocal, OursLevels, OursAuto, OursFlushed)
