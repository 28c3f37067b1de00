"""The copier: the thread that copies snapshots beside the training."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

from . import snapshot as snapshots
from .copy_engine import Desk, Progress
from .snapshot import Snapshot


class Work(Protocol):
    """A job for the copier."""

    def run(self) -> None:
        """Do the job, until it is done."""
        ...

    def fail(self, error: BaseException) -> None:
        """Give up, because `run` raised."""
        ...


class Copier(threading.Thread):
    """The copier thread, one per training process. Executes its jobs in order."""

    def __init__(self, desk: Desk | None = None) -> None:
        """`desk`: where jobs of the copy engine are posted, if there is one."""
        super().__init__(name="tierckpt-copier", daemon=True)
        self.desk = desk
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._expected: deque[weakref.ref[Snapshot]] = deque(maxlen=2)
        """The newest snapshot, and the one before: it may have failed in the middle of a block."""
        self.start()

    def submit(self, work: Work) -> None:
        """Queue a snapshot, or a comparison of replicas."""
        self._queue.put(work)
        if self.desk is not None:
            self.desk.ring()

    def expect(self, snapshot: Snapshot) -> None:
        """Remember a snapshot that has begun and may not be submitted for long: see
        `snapshot.QUIET_SECONDS`. Wakes no thread: the training thread has no time for that."""
        self._expected.append(weakref.ref(snapshot))

    def close(self) -> None:
        """End the thread after all queued jobs."""
        self._queue.put(None)
        if self.desk is not None:
            self.desk.ring()
        # A daemon: another rank may never answer its wait.
        self.join(snapshots.JOIN_PATIENCE_SECONDS)
        if self.desk is not None and not self.is_alive():
            self.desk.clear()  # a slot that somebody keeps cannot be unmapped

    def run(self) -> None:
        """Execute jobs until `close`."""
        while True:
            try:
                work = self._next_work()
            except queue.Empty:
                self._look_at_expected()
                continue
            if work is None:
                return
            _carry_out(work, work.run)

    def _next_work(self) -> Work | None:
        """Wait for work. Raises queue.Empty after a quiet time, and when a posted job needs this
        thread."""
        if self.desk is None:
            return self._queue.get(timeout=snapshots.QUIET_SECONDS)
        if self._queue.empty():
            progress = self.desk.serve(snapshots.QUIET_SECONDS, snapshots.LINGER_SECONDS)
            if progress is not Progress.UNFINISHED:  # first, even if there is work by now
                raise queue.Empty
        return self._queue.get_nowait()

    def _look_at_expected(self) -> None:
        for each in tuple(self._expected):
            if (snapshot := each()) is not None:
                _carry_out(snapshot, snapshot.run_if_quiet)


def _carry_out(work: Work, part: Callable[[], object]) -> None:
    try:
        part()
    except Exception as error:  # e.g. in `on_done`: only this version is lost
        work.fail(error)


__all__ = ["Copier", "Work"]
