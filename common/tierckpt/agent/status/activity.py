"""Counters of an agent's work: results by level, and the work under way."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

from tierckpt.agent.protocol import AgentMessage, LevelStatus, NotStored, Stored, TaskStatus
from tierckpt.core.levels import LOCAL, RANK
from tierckpt.format.ids import VersionId

Member = TypeVar("Member")


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


class _Order:
    """An order for the local level, in one thread; any may look at it."""

    def __init__(self) -> None:
        self._thread = threading.get_native_id()
        self._sign, self._moved_at = "", time.monotonic()

    def quiet_seconds(self) -> float:
        """Time since the first look that saw no progress of its thread."""
        sign, now = _work_of(self._thread), time.monotonic()
        if sign != self._sign:
            self._sign, self._moved_at = sign, now
        return now - self._moved_at


class Activity:
    """The commits under way, and the results of all work by level. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._levels: dict[str, LevelStatus] = {}
        self._commits: set[Task] = set()
        self._orders: set[_Order] = set()

    def order(self) -> AbstractContextManager[None]:
        """An order for the local level, while this thread carries it out."""
        return self._while_in(self._orders, _Order())

    def local_quiet_seconds(self) -> float:
        """Time since the slowest of them last proceeded."""
        with self._lock:
            return max((order.quiet_seconds() for order in self._orders), default=0.0)

    def commit(self, id_: VersionId, shard: int, nbytes: int) -> AbstractContextManager[None]:
        """A commit to the local level, while it is under way."""
        task = Task(LOCAL, id_, shard)
        task.restart(nbytes)
        return self._while_in(self._commits, task)

    @contextlib.contextmanager
    def _while_in(self, members: set[Member], member: Member) -> Iterator[None]:
        with self._lock:
            members.add(member)
        try:
            yield
        finally:
            with self._lock:
                members.discard(member)

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


def _work_of(thread: int) -> str:
    """The bytes that a thread has read and written, and its time in Python and in codecs. The
    kernel counts bytes as it gives them to the device, so also within one long call. Its own time
    does not count: a thread that waits for a dead disk may wake up again and again."""
    folder = f"/proc/self/task/{thread}"
    try:
        with open(f"{folder}/io") as counters, open(f"{folder}/stat") as stat:
            return counters.read() + stat.read().rpartition(")")[2].split()[11]
    except (OSError, IndexError):  # it has just ended, or the kernel does not count
        return ""


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
