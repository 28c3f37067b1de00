"""Heartbeat: one rank's records for `tierckpt goodput`, among its events.

`started` is written when a checkpointer opens its event log, `attached` when it is ready,
`progress` at the first boundary after each start or restore, then at the first boundary after every
period, and at an end without `close()`. So the last state of a killed process is known within one
period and one step. The loop itself counts the times of waits.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from tierckpt._milestones import ATTEMPT_VARIABLE, RESTART_VARIABLE
from tierckpt.core.parts import Boundary, Part, Stalls
from tierckpt.events import EventLog

if TYPE_CHECKING:
    from tierckpt.checkpointer.loop import TrainingJob
    from tierckpt.format.ids import VersionId
    from tierckpt.restored import Restored

IMPORTED_SECONDS = time.monotonic()
"""Import of this module, after torch: by `time.monotonic()`."""
PERIOD_SECONDS = 5.0
"""Between two records of progress; 0: a record at every boundary."""
MOMENTS = ("failed", "noticed", "ended")
"""Moments of a restart in `RESTART_VARIABLE`, in Unix seconds."""


class Heartbeat(Part):
    """One checkpointer's records. Training thread; never raises."""

    early = True
    patient = frozenset(("boundary_ends",))

    @classmethod
    def of(cls, job: TrainingJob) -> Self:
        """Of every job."""
        return cls(job.log, PERIOD_SECONDS, job.group.size, job.start_seconds, job.stalls)

    def __init__(
        self,
        log: EventLog,
        period_seconds: float,
        world: int,
        attach_seconds: float,
        stalls: Stalls,
    ) -> None:
        """Write `started`. `attach_seconds`: start of the attach, by `time.monotonic()`; `stalls`:
        kept by the loop."""
        self._log, self._period, self._attach = log, period_seconds, attach_seconds
        self._stalls, self._save = stalls, 0.0
        if not period_seconds:
            self.patient = frozenset()
        self._facts: dict[str, Any] | None = {"from": 0}
        """Facts of the next record, which is due at the next boundary; None: a usual one."""
        stalls.passed_seconds = time.perf_counter()
        self._next = 0.0 if log.has_file else math.inf
        if not log.has_file:
            return
        facts = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "world": world,
            "shim": ATTEMPT_VARIABLE in os.environ,
            "heartbeat_seconds": period_seconds,
            **_restart(),
        }
        log.record("started", seconds=self._startup(), facts=facts)

    def attached(self, job: TrainingJob) -> None:
        """Write that the checkpointer is ready."""
        if self._log.has_file:
            seconds = {"attach": time.monotonic() - self._attach}
            self._log.record("attached", seconds=seconds, facts={"job": job.history.job})

    def continues_from(self, result: Restored, base: VersionId | None, generation: int) -> None:
        """The next boundary writes a record, and sums start."""
        stalls = self._stalls
        stalls.boundary_seconds = stalls.barrier_seconds = self._save = 0.0
        self._facts, stalls.version = {"from": result.version}, result.version
        self._next = 0.0 if self._log.has_file else math.inf

    def boundary_ends(self, at: Boundary) -> None:
        """Write a record if one is due."""
        now = self._stalls.passed_seconds
        if now >= self._next:
            facts = {} if self._facts is None else {**self._facts, "run": at.run}
            self._facts = None
            self._next = now + self._period if self._log.has_file else math.inf
            self._write(facts)

    @contextlib.contextmanager
    def saving(self, trained: bool) -> Iterator[None]:
        """Count all its waits; boundaries in it are part of it."""
        start, stalls = time.perf_counter(), self._stalls
        before = stalls.boundary_seconds, stalls.barrier_seconds
        try:
            yield
        finally:
            stalls.boundary_seconds, stalls.barrier_seconds = before
            self._save += time.perf_counter() - start

    def left(self, abandoned: bool) -> None:
        """Without `close()`: write the last state, which is newer than that of the last record."""
        if abandoned and self._log.has_file:
            since = time.perf_counter() - self._stalls.passed_seconds
            self._write({**(self._facts or {}), "since_boundary": since, "ended": True})

    def _write(self, facts: dict[str, Any]) -> None:
        stalls = self._stalls
        waits = {"boundary": stalls.boundary_seconds, "barrier": stalls.barrier_seconds}
        seconds = {**waits, "save": self._save}
        self._log.record("progress", version=stalls.version, seconds=seconds, facts=facts)

    def _startup(self) -> dict[str, float]:
        """Seconds from the process's start to torch's import, to the attach, and to now."""
        now = time.monotonic()
        process = now - _process_age_seconds(now)
        imported = max(process, min(IMPORTED_SECONDS, self._attach))
        return {
            "import": max(0.0, imported - process),
            "setup": self._attach - imported,
            "attach": now - self._attach,
        }


def _process_age_seconds(now: float) -> float:
    """Age of this process, to 10 ms; from the import of this module on if the system hides it."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now - IMPORTED_SECONDS


def _restart() -> dict[str, float]:
    """The moments of the restart that `tierckpt run` has made, in Unix seconds; empty without."""
    words = os.environ.get(RESTART_VARIABLE, "").split()
    with contextlib.suppress(ValueError):
        return dict(zip(MOMENTS, map(float, words), strict=True)) if words else {}
    return {}


__all__ = ["MOMENTS", "Heartbeat"]
