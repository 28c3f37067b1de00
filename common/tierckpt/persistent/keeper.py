"""A lease is kept between flushes, too: else another job takes the place of one that lives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from .errors import LeaseHeldError
from .lease import LEASE_SECONDS

if TYPE_CHECKING:
    from .names import VersionName
    from .store import PersistentStore

CLOSE_SECONDS = 5.0
RENEWALS = 3
"""In the time of a lease: one or two may fail."""


class Keeper:
    """Renews a lease from a thread of its own: one listing, one read and one write each time.

    For one node of a job only; the flushes of the others see that the lease is kept.
    """

    def __init__(
        self,
        open_store: Callable[[], PersistentStore],
        every_seconds: float = LEASE_SECONDS / RENEWALS,
    ) -> None:
        """`open_store` is called by the thread, which closes what it gets."""
        self._open_store, self._every_seconds = open_store, every_seconds
        self._lock = threading.Lock()
        self._whose = ("", "")
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._last: VersionName | None = None

    def keep(self, life: str, owner: str) -> None:
        """Renew the lease of `life` and `owner` from now on, until they have it no more.

        Where there may be no more threads it is not; to be asked for again at the next flush.
        """
        with self._lock:
            self._whose = (life, owner)
            if self._thread is None and not self._closed.is_set():
                thread = threading.Thread(target=self._run, name="tierckpt-lease", daemon=True)
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def close(self, last: VersionName | None = None) -> None:
        """End; a call under way is waited for, but not for long: its store may hang.

        `last`: what this node flushed last. Where that exists, all nodes are through, and the lease
        is given back: the next job, on whatever nodes, need not wait for its end.
        """
        self._last = last
        self._closed.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        with contextlib.closing(self._open_store()) as store:
            while not self._closed.wait(self._every_seconds):
                with self._lock:
                    whose = self._whose
                if not _renewed(store, *whose):
                    with self._lock:
                        if whose == self._whose:  # else another life has begun meanwhile
                            self._thread = None
                            return
            with contextlib.suppress(Exception):  # it ends by itself, later
                if self._last is not None and store.exists(self._last):
                    store.lease(*self._whose).release()


def _renewed(store: PersistentStore, life: str, owner: str) -> bool:
    """False when the lease is lost; a renewal that failed is tried again."""
    try:
        return store.lease(life, owner).renew()
    except LeaseHeldError:
        return False
    except OSError:
        return True
