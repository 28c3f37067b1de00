"""Renewal of a lease between flushes, so that no other job takes the path of a living one.

If no trainer is alive on the node that renews it, renewal stops; a flush that continues then renews
the lease like any flush.
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
"""Renewals per duration of a lease: one or two may fail."""


class LeaseKeeper:
    """Renews a lease from a thread of its own: one listing, one read and one write each time.

    Only one node of a job has one; the flushes of the other nodes see that the lease is renewed.
    """

    def __init__(
        self,
        open_store: Callable[[], PersistentStore],
        every_seconds: float = LEASE_SECONDS / RENEWALS,
    ) -> None:
        """The renewal thread calls `open_store`, and closes the store."""
        self._open_store, self._every_seconds = open_store, every_seconds
        self._lock = threading.Lock()
        self._lease_of = ("", "")
        """Run and owner; empty if there is no lease to renew."""
        self._thread: threading.Thread | None = None
        """The renewal thread."""
        self._over = threading.Event()
        """Tells that thread to end."""
        self._shutdown: threading.Thread | None = None
        """The thread that ended last, or that gives the lease back."""
        self._closed = False

    def keep(self, run_id: str, owner: str) -> None:
        """Renew the lease of `run_id` and `owner` from now on, until it is lost.

        Without effect if no more threads can be started; the next flush calls it again.
        """
        with self._lock:
            self._lease_of = (run_id, owner)
            if self._thread is None and not self._closed:
                self._over = threading.Event()
                self._thread = _started(self._renew, self._over)

    def rest(self, last: VersionName | None = None) -> None:
        """Stop renewing until `keep` is called again. Does not wait.

        `last` is given if this node has nothing more to flush: its last flushed version. If that
        version exists, all nodes have finished, and the lease is given back: the next job, on any
        nodes, need not wait until it expires.
        """
        with self._lock:
            self._over.set()
            if self._thread is not None:
                self._shutdown, self._thread = self._thread, None
            if last is not None and self._lease_of != ("", ""):
                arguments = (self._lease_of, last, self._shutdown)
                self._lease_of = ("", "")
                self._shutdown = _started(self._give_back, *arguments) or self._shutdown

    def close(self, last: VersionName | None = None) -> None:
        """`rest` for good; waits for a running call, but only for a few seconds: its store may
        hang."""
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
                    lease_of = self._lease_of
                if not _renewed(store, *lease_of):
                    with self._lock:
                        # Otherwise `keep` has begun another run, or `rest` was called.
                        if lease_of == self._lease_of and not over.is_set():
                            self._thread = None
                            return

    def _give_back(
        self, lease_of: tuple[str, str], last: VersionName, renewing: threading.Thread | None
    ) -> None:
        if renewing is not None:
            renewing.join()  # or it might write again after the removal below
        # Errors are ignored: the lease expires by itself, later.
        with contextlib.suppress(Exception), contextlib.closing(self._open_store()) as store:
            if store.exists(last):
                store.lease(*lease_of).release()


def _started(target: Callable[..., None], *arguments: object) -> threading.Thread | None:
    """The started thread; None if no more threads can be started."""
    name = "tierckpt-lease"
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    with contextlib.suppress(RuntimeError):
        thread.start()
        return thread
    return None


def _renewed(store: PersistentStore, run_id: str, owner: str) -> bool:
    """False if the lease is lost; a failed renewal is tried again."""
    try:
        return store.lease(run_id, owner).renew()
    except LeaseHeldError:
        return False
    except OSError:
        return True
