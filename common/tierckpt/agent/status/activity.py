"""Counters of an agent's work: results by level, and the work under way."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

from tierckpt.agent.protocol import AgentMessage, LevelStatus, NotStored, Stored, TaskStatus
from tierckpt.core.levels import LOCAL, RANK
from tierckpt.format.ids import VersionId


class Task:
    """A version on its way to a level. One thread works on it and changes it; any may read it."""

    def __init__(self, level: str, id_: VersionId, shard: int | None = None) -> None:
        self._level, self._id, self._shard = level, id_, shard
        self._began_seconds = time.time()
        self._done_bytes = self._total_bytes = 0

    def restart(self, total_bytes: int) -> None:
        """Begin an attempt, with an upper bound of its bytes."""
        self._done_bytes, self._total_bytes = 0, total_bytes

    def advance(self, nbytes: int) -> None:
        """Count bytes as done."""
        self._done_bytes += nbytes

    def status(self) -> TaskStatus:
        """The task now."""
        done = min(self._done_bytes, self._total_bytes)
        return TaskStatus(
            self._level, self._id, self._began_seconds, self._shard, done, self._total_bytes
        )


class Activity:
    """The commits under way, and the results of all work by level. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._levels: dict[str, LevelStatus] = {}
        self._commits: set[Task] = set()

    @contextlib.contextmanager
    def commit(self, id_: VersionId, shard: int, nbytes: int) -> Iterator[None]:
        """A commit to the local level, while it is under way."""
        task = Task(LOCAL, id_, shard)
        task.restart(nbytes)
        with self._lock:
            self._commits.add(task)
        try:
            yield
        finally:
            with self._lock:
                self._commits.discard(task)

    def record(self, message: AgentMessage) -> None:
        """Count a result; any other message changes nothing."""
        if not isinstance(message, Stored | NotStored):
            return
        with self._lock:
            before = self._levels.get(message.level, LevelStatus(message.level))
            match message:
                case Stored():
                    self._levels[message.level] = _stored(before, message)
                case NotStored():
                    self._levels[message.level] = _not_stored(before, message)

    def commits(self) -> list[TaskStatus]:
        """The commits under way, the oldest first."""
        with self._lock:
            return sorted((t.status() for t in self._commits), key=lambda t: t.began_seconds)

    def levels(self, waiting: dict[str, int]) -> list[LevelStatus]:
        """The results by level. `waiting`: number of versions that wait, by level."""
        with self._lock:
            found = dict(self._levels)
        for level, count in waiting.items():
            found[level] = replace(found.get(level, LevelStatus(level)), waiting=count)
        return sorted(found.values(), key=lambda each: RANK[each.level])


def _stored(before: LevelStatus, message: Stored) -> LevelStatus:
    newest, at_seconds = before.newest, before.newest_at_seconds
    if newest is None or message.id > newest:
        newest, at_seconds = message.id, time.time()
    return replace(
        before,
        stored=before.stored + 1,
        stored_bytes=before.stored_bytes + message.nbytes,
        newest=newest,
        newest_at_seconds=at_seconds,
        last_bytes=message.nbytes,
        last_seconds=sum(message.times_seconds.values()),
    )


def _not_stored(before: LevelStatus, message: NotStored) -> LevelStatus:
    if message.superseded:
        return replace(before, superseded=before.superseded + 1)
    text = f"{message.id}: {message.error}"
    return replace(before, failed=before.failed + 1, last_failure=text)


__all__ = ["Activity", "Task"]
