"""Holdings: the newest version on each level, and the writes that outlive a failure."""

from __future__ import annotations

from collections.abc import Iterable

from .schedule import Rung, Schedule
from .shared_store import SharedStore

WRITES_GO_ON = {"process": ("local", "peer", "persistent")}
"""Levels whose agents complete a write after such a failure. A copy to memory ends with its
process."""


class Holdings:
    """What a restart can read. A level without a version is absent."""

    def __init__(self, schedule: Schedule, store: SharedStore) -> None:
        self._schedule, self._store = schedule, store
        self.newest: dict[str, int] = {}
        self._pending: dict[str, tuple[float, int]] = {}
        """By level, the time at which a write that outlived its run began, and its version."""

    def advance(self, begin: float, from_position: float, position: float, kind: str) -> None:
        """Add the versions of a run that began at `begin`, and was at `position` when it failed."""
        for rung in self._schedule.rungs:
            found, started = self._newest(rung, begin, from_position, position)
            if found and self._is_new(found, from_position):
                self.newest[rung.name] = max(found, self.newest.get(rung.name, 0))
                self._pending.pop(rung.name, None)
            if started > found and self._is_new(started, from_position):
                wall = begin + self._schedule.position(started) - from_position
                if rung.name in WRITES_GO_ON.get(kind, ()):
                    self._pending[rung.name] = wall, started

    def _is_new(self, version: int, from_position: float) -> bool:
        """True for versions of this run, not of those before it."""
        return self._schedule.position(version) > from_position

    def _newest(
        self, rung: Rung, begin: float, from_position: float, position: float
    ) -> tuple[int, int]:
        """The newest complete version, and the newest one that was begun."""
        every = rung.every_steps
        started = self._schedule.newest(position, every)
        complete = self._schedule.newest(position - rung.latency_seconds, every)
        if rung.flush_seconds:
            lead = rung.latency_seconds - rung.flush_seconds
            while complete > 0 and self._is_new(complete, from_position):
                wall = begin + self._schedule.position(complete) - from_position + lead
                if self._store.is_complete(wall, rung.flush_seconds):
                    break
                complete -= every
        return complete, started

    def settle(self, now: float) -> None:
        """Count writes that agents have completed since their run failed."""
        for rung in self._schedule.rungs:
            if rung.name not in self._pending:
                continue
            began, version = self._pending[rung.name]
            lead = rung.latency_seconds - rung.flush_seconds
            done = began + rung.latency_seconds <= now
            if rung.flush_seconds:
                done = self._store.is_complete(began + lead, rung.flush_seconds)
            if done:
                self.newest[rung.name] = max(version, self.newest.get(rung.name, 0))
                del self._pending[rung.name]

    def lose(self, levels: Iterable[str]) -> None:
        """Forget the versions of these levels, and writes to them that are under way."""
        for level in levels:
            self.newest.pop(level, None)
            self._pending.pop(level, None)

    def best(self) -> tuple[str, int]:
        """The level that a restart reads, and the version: the newest one, from the cheapest level.
        `scratch` and 0 if there is none."""
        found = [
            (-version, number, rung.name)
            for number, rung in enumerate(self._schedule.rungs)
            if (version := self.newest.get(rung.name, 0))
        ]
        if not found:
            return "scratch", 0
        version, _, level = min(found)
        return level, -version

    def resume(self, level: str, version: int) -> None:
        """Begin a run from this version: later ones are of a lineage that ended."""
        if level == "peer":
            self.newest["local"] = version  # rebuilt
        self.newest = {name: min(v, version) for name, v in self.newest.items()}
        self._pending = {n: (at, v) for n, (at, v) in self._pending.items() if v <= version}
