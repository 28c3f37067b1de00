"""Lease: at most one job uses a persistent path at a time.

The store must only support "create this name if it does not exist", which POSIX has as link(2) and
S3 as a conditional put. Every holder creates a file with the next number, and of several
concurrent attempts exactly one succeeds. The holder renews by overwriting its own file; if a lease
was not renewed in time, another job may take the next number. (Numbered locks are Chubby's
sequencers; here they fence nothing, because no job ever writes or removes another job's files.)

Clocks of other machines are not trusted: a job that wants the lease watches it, and if it has not
changed for its whole duration, by the watcher's own monotonic clock, its holder is dead. Each
renewal writes another random token. The expiry time in a lease is for people, and for earlier
tierckpts.

If a store ignores the condition (some S3 look-alikes do), two jobs that start within about a second
are not kept apart. The cost is space and a confusing list of versions, never a version: names carry
the run, and retention leaves other jobs' versions alone.

A `LeaseKeeper` renews a lease between flushes, so that no other job takes the path of a living
one. If no trainer is alive on the node that renews it, renewal stops; a flush that continues then
renews the lease like any flush.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from tierckpt.errors import CorruptShardError, FlushCancelledError, FormatError, LeaseHeldError
from tierckpt.format.records import seal, unseal

from .backend import Backend, Clock

if TYPE_CHECKING:
    from tierckpt.format.ids import VersionName

    from .store import PersistentStore


LEASE_SECONDS = 120.0

_NAME = re.compile(r"lease\.(\d{6,})")


class LeaseRecord(Struct, frozen=True):
    """Content of a lease's file."""

    number: int
    owner: str
    """Job and node, for people; at most one run of an owner can be alive."""
    run_id: str
    """All members of one run share the lease."""
    expires_seconds: float
    """Unix time by the holder's clock, which may be wrong."""


class Lease:
    """A run's lease on a persistent path. Every node's agent has one and calls `ensure` before it
    flushes.

    A call costs a listing and a small read. A write happens only once in half of `lease_seconds`
    for the whole job: the first member of the run that calls then renews the lease for all. Another
    run's lease has expired when this object has seen it unchanged for `lease_seconds`; call again
    until then.

    A restarted job does not wait for its own dead run: a lease with the same `owner` is free at
    once. So two living jobs must never have the same owner name. A run that lost its lease to a
    later run of the same owner has ended, and does not take it back.

    If there has never been a lease, only the member with `creates` makes it, and the others wait
    for it: a member that still sees none does not see the same path (an unmounted file system). The
    same holds for a member that had the lease at its last call and now finds an empty path: another
    job would have left its own lease there.
    """

    def __init__(
        self,
        backend: Backend,
        run_id: str,
        owner: str,
        clock: Clock,
        lease_seconds: float = LEASE_SECONDS,
        creates: bool = True,
    ) -> None:
        self._backend, self.run_id, self.owner = backend, run_id, owner
        self._creates = creates
        self._clock, self.lease_seconds = clock, lease_seconds
        self._ensured_seconds = float("-inf")
        self._had_at_last_call = False
        """True if this run had the lease at the last call."""
        self._abandoned = False
        self._seen = (0, "")
        """Number and content of the newest lease at the last read."""
        self._seen_since = 0.0
        """When this content was first seen, by the monotonic clock."""

    @property
    def was_held(self) -> bool:
        """True once a call of `ensure` has succeeded."""
        return self._ensured_seconds > float("-inf")

    def abandon(self) -> None:
        """Stop taking and renewing the lease: later attempts raise FlushCancelledError. Any
        thread."""
        self._abandoned = True

    def keep(self) -> None:
        """Call `ensure` if the last call was more than a quarter of the lease's duration ago; else
        cheap."""
        if self._clock.monotonic() - self._ensured_seconds > self.lease_seconds / 4:
            self.ensure()

    def held(self) -> bool:
        """True while this run has the newest lease."""
        newest = self.newest()
        return newest is not None and newest.run_id == self.run_id

    def ensure(self) -> int:
        """Hold the lease from now on for at least half its duration; returns its number.

        Raises LeaseHeldError if another run holds it, FileNotFoundError if the member with
        `creates` has not made it yet or the path has suddenly become empty, and the store's errors.
        """
        number = self._ensure()
        self._ensured_seconds = self._clock.monotonic()
        self._had_at_last_call = True
        return number

    def renew(self) -> bool:
        """Extend the lease if this run has it. Otherwise returns False and takes nothing, so that a
        run that has ended cannot start again. Raises the errors of `ensure`."""
        newest = self.newest()
        if newest is None or newest.run_id != self.run_id:
            return False
        self._write(newest.number)
        self._check_followers(newest.number)
        return True

    def _ensure(self) -> int:
        while True:
            newest = self.newest()
            if newest is None and self._had_at_last_call and not self._backend.sizes():
                raise FileNotFoundError(
                    f"{self._backend.url} is empty now and had this job's lease: is it not mounted "
                    "any more? Nothing is written there until the lease is back. If the path was "
                    "emptied on purpose, restart the job"
                )
            if newest is None and not self._creates:
                raise FileNotFoundError(
                    f"{self._backend.url} lacks the lease that the job's first node creates. "
                    "Check that node, and that this node has the same path (is it mounted?)"
                )
            if newest is None or self._free(newest):
                made = self._take(1 if newest is None else newest.number + 1, newest)
                if made:
                    return made
                continue  # another run was faster: read again
            if newest.run_id != self.run_id:
                raise self._held(newest)
            if not self._is_fresh(newest):
                self._write(newest.number)
                self._check_followers(newest.number)
            return newest.number

    def release(self) -> None:
        """Give up the lease, if this run has it, so that the next job need not wait."""
        newest = self.newest()
        if newest is not None and newest.run_id == self.run_id:
            self._backend.delete(_name(newest.number))
        self._had_at_last_call = False

    def take_away(self) -> LeaseRecord | None:
        """Free the path for the next job; returns the lease that was taken away, or None if there
        was none.

        For a holder that hangs and still renews: its next renewal finds that the lease is lost.
        This lease object must have an empty `run_id`.
        """
        while (newest := self.newest()) is not None and newest.run_id:
            if self._take(newest.number + 1, None):
                self._backend.delete(_name(newest.number))
                return newest
        return None

    def newest(self) -> LeaseRecord | None:
        """The newest lease, current or expired; None if there is none."""
        numbers = self.numbers()
        return self._read(max(numbers)) if numbers else None

    def numbers(self) -> list[int]:
        """Numbers of all leases in the path, expired and unreadable ones included."""
        return [int(m[1]) for n in self._backend.sizes() if (m := _NAME.fullmatch(n))]

    def _take(self, number: int, expired: LeaseRecord | None) -> int | None:
        """Create the lease `number`; None if another run did, or the old holder renewed."""
        token = secrets.token_hex(8)
        try:
            self._write(number, token, exclusive=True)
        except FileExistsError:
            return None
        if token not in self._raw(number):  # the store ignored `exclusive`
            return None
        if expired is not None:
            # The old holder may have renewed just before our file existed. It sees ours only at its
            # next renewal, but we see its renewal now: ours came second.
            again = self._read(expired.number)
            if again is not None and not self._free(again):
                self._backend.delete(_name(number))
                return None
            self._backend.delete(_name(expired.number))
        return number

    def _check_followers(self, number: int) -> None:
        """Detect a renewal that came too late: raises LeaseHeldError if another run has taken the
        next number."""
        newest = self.newest()
        if newest is not None and newest.number > number and newest.run_id != self.run_id:
            self._backend.delete(_name(number))
            raise self._held(newest)

    def _unchanged_seconds(self, record: LeaseRecord) -> float:
        """How long this object has seen the lease unchanged."""
        same = self._seen[0] == record.number
        return self._clock.monotonic() - self._seen_since if same else 0.0

    def _is_fresh(self, record: LeaseRecord) -> bool:
        """Whether this run's own lease needs no renewal yet. The writer's clock is trusted only for
        plausible values: at most the lease's duration is left."""
        left = record.expires_seconds - self._clock.now()
        half = self.lease_seconds / 2
        return half <= left <= self.lease_seconds and self._unchanged_seconds(record) < half

    def _free(self, record: LeaseRecord) -> bool:
        same = record.owner == self.owner and record.run_id != self.run_id
        ended = not record.run_id or self._unchanged_seconds(record) >= self.lease_seconds
        return (same and not self._had) or ended

    @property
    def _had(self) -> bool:
        """Whether this run has had the lease: then another holder is no earlier run's."""
        return self._ensured_seconds > float("-inf")

    def _write(self, number: int, token: str = "", exclusive: bool = False) -> None:
        if self._abandoned:
            raise FlushCancelledError(f"the lease of {self.owner} was abandoned")
        expires = self._clock.now() + self.lease_seconds
        values = {"owner": self.owner, "run_id": self.run_id, "expires_seconds": expires}
        # A new token each time: a watcher would otherwise see no change if both clocks stood still.
        data = seal("lease", {**values, "token": token or secrets.token_hex(8)})
        name = _name(number)
        self._backend.put(name, lambda: iter([memoryview(data)]), len(data), exclusive)

    def _raw(self, number: int) -> str:
        try:
            return self._backend.read(_name(number)).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _read(self, number: int) -> LeaseRecord | None:
        """The lease's record; None if the file is gone. A damaged one has no holder."""
        text = self._raw(number)
        if (number, text) != self._seen:
            self._seen, self._seen_since = (number, text), self._clock.monotonic()
        if not text:
            return None
        try:
            values = unseal("lease", text.encode())
        except (CorruptShardError, FormatError):
            return LeaseRecord(number, "unknown", "", 0.0)
        return LeaseRecord(
            number, str(values["owner"]), str(values["run_id"]), float(values["expires_seconds"])
        )

    def _held(self, record: LeaseRecord) -> LeaseHeldError:
        self._had_at_last_call = False
        left = max(self.lease_seconds - self._unchanged_seconds(record), 0.0)
        ends = self._clock.now() + left
        return LeaseHeldError(self._backend.url, record.owner, ends, left)


def _name(number: int) -> str:
    return f"lease.{number:06d}"


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
                        # Otherwise `keep` has started another run, or `rest` was called.
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
