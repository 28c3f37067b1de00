"""Two jobs must not share one place: a lease says whose it is.

Only "make this name if it is not there" is needed of the store, which POSIX has as link(2) and S3
as a conditional put: every holder makes a file with the next number, and of several that try
exactly one succeeds. The holder renews by overwriting its own file; a lease that was not renewed
in time may be followed by the next number. (Numbered locks are Chubby's sequencers; here they
fence nothing, because no job ever writes or removes what another one has.)

No clock of another machine is believed: whoever wants a lease watches it, and when it has not
changed for its whole time, by the watcher's own monotonic clock, its holder is dead. Each renewal
writes another random token. What a lease says of its end is for people, and for earlier tierckpts.

Where a store ignores the condition (some S3 look-alikes do), two jobs that begin within the same
second or so are not told apart. What that costs is room and a confusing list of versions, never a
version: names carry the run, and retention leaves other jobs' versions alone.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from tierckpt.errors import CorruptShardError, FlushCancelledError, FormatError, LeaseHeldError
from tierckpt.format.version_records import seal, unseal

from .backend import Backend
from .clock import Clock

LEASE_SECONDS = 120.0

_NAME = re.compile(r"lease\.(\d{6,})")


@dataclass(frozen=True)
class LeaseRecord:
    """What a lease's file says."""

    number: int
    owner: str
    """Job and node, for people; and of one owner, only one run can be alive."""
    run_id: str
    """All members of one run hold the lease together."""
    expires_seconds: float
    """Unix time by its holder's clock, which may be wrong."""


class Lease:
    """One life's hold on a place. Every node's agent has one and calls `ensure` before it flushes.

    It costs a listing and a small read, and a write only once in half of `lease_seconds` for the
    whole job: whoever of the run comes first then renews it for all. Another run's has ended when
    this object saw it unchanged for `lease_seconds`: to be asked again and again till then.

    A restarted job does not wait for its own dead run: what that run left under the same `owner`
    is free at once. So an owner's name must be one that two living jobs cannot both have. A run
    that had the lease and was followed by one of the same owner is over, and does not take it back.

    Where nobody ever had a lease, only the member that `begins` takes it, and the others wait for
    it: one that sees none then does not see the same place (a file system that is not mounted).
    Nor does one that had the lease when it looked last, and finds nothing at all: who else wants
    the place leaves a lease there.
    """

    def __init__(
        self,
        backend: Backend,
        run_id: str,
        owner: str,
        clock: Clock,
        lease_seconds: float = LEASE_SECONDS,
        begins: bool = True,
    ) -> None:
        self._backend, self.run_id, self.owner = backend, run_id, owner
        self._begins = begins
        self._clock, self.lease_seconds = clock, lease_seconds
        self._ensured_seconds = float("-inf")
        self._ours_at_last = False
        """It was this run's when it was asked for last."""
        self._abandoned = False
        self._seen = (0, "")
        """Number and content of the newest lease when it was last read."""
        self._seen_since = 0.0
        """When it was first seen to be so, by the monotonic clock."""

    def abandon(self) -> None:
        """Take and renew nothing any more: FlushCancelledError, where that is asked for. Any
        thread."""
        self._abandoned = True

    def keep(self) -> None:
        """`ensure`, if the last time was a quarter of the lease's time ago. Cheap otherwise."""
        if self._clock.monotonic() - self._ensured_seconds > self.lease_seconds / 4:
            self.ensure()

    def held(self) -> bool:
        """True while this run has the place to itself."""
        newest = self.newest()
        return newest is not None and newest.run_id == self.run_id

    def ensure(self) -> int:
        """Hold the lease from now on for at least half its time; returns its number.

        Raises LeaseHeldError when another run holds it, FileNotFoundError when the member that
        begins has not been here or the place is empty all at once, and the store's errors.
        """
        number = self._ensure()
        self._ensured_seconds = self._clock.monotonic()
        self._ours_at_last = True
        return number

    def renew(self) -> bool:
        """Lengthen the lease if this run has it; False when not, and then nothing is taken: of a
        run that is over nothing may begin again. Raises as `ensure`."""
        newest = self.newest()
        if newest is None or newest.run_id != self.run_id:
            return False
        self._write(newest.number)
        self._check_followers(newest.number)
        return True

    def _ensure(self) -> int:
        while True:
            newest = self.newest()
            if newest is None and self._ours_at_last and not self._backend.sizes():
                raise FileNotFoundError(
                    f"{self._backend.url} has nothing in it, and had this job's lease: is it not "
                    "mounted any more? Nothing is written there until it is as it was; if somebody "
                    "emptied it, restart the job to begin there anew"
                )
            if newest is None and not self._begins:
                raise FileNotFoundError(
                    f"{self._backend.url} does not have the lease that the job's first node takes: "
                    "has that node trouble, or is on this one another place (not mounted?)"
                )
            if newest is None or self._free(newest):
                made = self._take(1 if newest is None else newest.number + 1, newest)
                if made:
                    return made
                continue  # somebody was faster: look again
            if newest.run_id != self.run_id:
                raise self._held(newest)
            if not self._is_fresh(newest):
                self._write(newest.number)
                self._check_followers(newest.number)
            return newest.number

    def release(self) -> None:
        """Give the lease back, if this run has it: the next job need not wait."""
        newest = self.newest()
        if newest is not None and newest.run_id == self.run_id:
            self._backend.delete(_name(newest.number))
        self._ours_at_last = False

    def take_away(self) -> LeaseRecord | None:
        """Free the place for whoever asks next, and tell whose it was; None when it was nobody's.

        For a holder that hangs and renews: its next renewal finds that the lease is lost. As
        itself (`run_id`) this lease must be nobody.
        """
        while (newest := self.newest()) is not None and newest.run_id:
            if self._take(newest.number + 1, None):
                self._backend.delete(_name(newest.number))
                return newest
        return None

    def newest(self) -> LeaseRecord | None:
        """Whose the place is, or was; None when nobody's."""
        numbers = self.numbers()
        return self._read(max(numbers)) if numbers else None

    def numbers(self) -> list[int]:
        """Of all that are in the place, those that have expired and cannot be read included."""
        return [int(m[1]) for n in self._backend.sizes() if (m := _NAME.fullmatch(n))]

    def _take(self, number: int, expired: LeaseRecord | None) -> int | None:
        """Make the file `number`; None when another run did, or the old holder woke up."""
        token = secrets.token_hex(8)
        try:
            self._write(number, token, exclusive=True)
        except FileExistsError:
            return None
        if token not in self._raw(number):  # the store took no notice of `exclusive`
            return None
        if expired is not None:
            # The old holder may have renewed just before our file was there. It does not see ours
            # before its next renewal, but we see its, now: ours came second.
            again = self._read(expired.number)
            if again is not None and not self._free(again):
                self._backend.delete(_name(number))
                return None
            self._backend.delete(_name(expired.number))
        return number

    def _check_followers(self, number: int) -> None:
        """A renewal that came too late: somebody has followed."""
        newest = self.newest()
        if newest is not None and newest.number > number and newest.run_id != self.run_id:
            self._backend.delete(_name(number))
            raise self._held(newest)

    def _unchanged_seconds(self, record: LeaseRecord) -> float:
        """So long this object has seen it as it is."""
        same = self._seen[0] == record.number
        return self._clock.monotonic() - self._seen_since if same else 0.0

    def _is_fresh(self, record: LeaseRecord) -> bool:
        """Whether this run's own need not be renewed yet. The clock of who wrote it is believed
        where what it says can be: at most the lease's time is left."""
        left = record.expires_seconds - self._clock.now()
        half = self.lease_seconds / 2
        return half <= left <= self.lease_seconds and self._unchanged_seconds(record) < half

    def _free(self, record: LeaseRecord) -> bool:
        same = record.owner == self.owner and record.run_id != self.run_id
        ended = not record.run_id or self._unchanged_seconds(record) >= self.lease_seconds
        return (same and not self._had) or ended

    @property
    def _had(self) -> bool:
        """Whether this run had it: then another one that has it is no earlier one's."""
        return self._ensured_seconds > float("-inf")

    def _write(self, number: int, token: str = "", exclusive: bool = False) -> None:
        if self._abandoned:
            raise FlushCancelledError(f"the lease of {self.owner} is not to be kept any more")
        expires = self._clock.now() + self.lease_seconds
        values = {"owner": self.owner, "run_id": self.run_id, "expires_seconds": expires}
        # Another one each time, or a watcher whose clock, and ours, stand still saw no change.
        data = seal("lease", {**values, "token": token or secrets.token_hex(8)})
        name = _name(number)
        self._backend.put(name, lambda: iter([memoryview(data)]), len(data), exclusive)

    def _raw(self, number: int) -> str:
        try:
            return self._backend.read(_name(number)).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _read(self, number: int) -> LeaseRecord | None:
        """The record; None when the file is gone. One that is damaged is nobody's."""
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
        self._ours_at_last = False
        left = max(self.lease_seconds - self._unchanged_seconds(record), 0.0)
        ends = self._clock.now() + left
        return LeaseHeldError(self._backend.url, record.owner, ends, left)


def _name(number: int) -> str:
    return f"lease.{number:06d}"
