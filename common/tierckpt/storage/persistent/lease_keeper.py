"""A lease is kept between flushes, too: else another job takes the place of one that lives.

Where no trainer lives any more on the node that keeps it, it is not kept: a flush that goes on then
renews it as any flush does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tierckpt.errors import LeaseHeldError

from .lease import LEASE_SECONDS

if TYPE_CHECKING:
    from tierckpt.format.version_names import VersionName

    from .store import PersistentStore

CLOSE_SECONDS = 5.0
RENEWALS = 3
"""In the time of a lease: one or two may fail."""


class LeaseKeeper:
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
        """Life and owner; empty where nobody's lease is to be seen to."""
        self._thread: threading.Thread | None = None
        """The one that renews."""
        self._over = threading.Event()
        """For that thread."""
        self._shutdown: threading.Thread | None = None
        """The one that ended last, or gives the lease back."""
        self._closed = False

    def keep(self, run_id: str, owner: str) -> None:
        """Renew the lease of `run_id` and `owner` from now on, until they have it no more.

        Where there may be no more threads it is not; to be asked for again at the next flush.
        """
        with self._lock:
            self._whose = (run_id, owner)
            if self._thread is None and not self._closed:
                self._over = threading.Event()
                self._thread = _started(self._renew, self._over)

    def rest(self, last: VersionName | None = None) -> None:
        """Renew no more, until `keep` is called again. Waits for nothing.

        `last`: what this node flushed last, and it has no more to flush. Where that exists, all
        nodes are through, and the lease is given back: the next job, on whatever nodes, need not
        wait for its end.
        """
        with self._lock:
            self._over.set()
            if self._thread is not None:
                self._shutdown, self._thread = self._thread, None
            if last is not None and self._whose != ("", ""):
                what = (self._whose, last, self._shutdown)
                self._whose = ("", "")
                self._shutdown = _started(self._give_back, *what) or self._shutdown

    def close(self, last: VersionName | None = None) -> None:
        """`rest` for good; a call under way is waited for, but not for long: its store may hang."""
        self.rest(last)
        with self._lock:
            self._closed = True
            thread = self._shutdown
        if thread is not None:
            thread.join(CLOSE_SECONDS)

    def _renew(self, over: threading.Event) -> None:
        with contextlib.closing(self._open_store()) as store:
            while not over.wait(self._every_seconds):
                with self._lock:
                    whose = self._whose
                if not _renewed(store, *whose):
                    with self._lock:
                        # Else another run has begun meanwhile, or it is over.
                        if whose == self._whose and not over.is_set():
                            self._thread = None
                            return

    def _give_back(
        self, whose: tuple[str, str], last: VersionName, renewing: threading.Thread | None
    ) -> None:
        if renewing is not None:
            renewing.join()  # or it might write once more what is removed here
        # Whatever fails: it ends by itself, later.
        with contextlib.suppress(Exception), contextlib.closing(self._open_store()) as store:
            if store.exists(last):
                store.lease(*whose).release()


def _started(target: Callable[..., None], *arguments: object) -> threading.Thread | None:
    """None where there may be no more threads."""
    name = "tierckpt-lease"
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    with contextlib.suppress(RuntimeError):
        thread.start()
        return thread
    return None


def _renewed(store: PersistentStore, run_id: str, owner: str) -> bool:
    """False when the lease is lost; a renewal that failed is tried again."""
    try:
        return store.lease(run_id, owner).renew()
    except LeaseHeldError:
        return False
    except OSError:
        return True
