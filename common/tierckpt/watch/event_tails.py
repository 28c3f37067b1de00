"""Event tails: the newest events of all ranks, read from the ends of their files.

A look reads at most READ_BYTES, whatever the number of ranks and the length of the job: the first
look reads a share of that from the end of each file, later looks what was added since. At most
FILES_AT_ONCE files are read in a look after the first one, in turns.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tierckpt.events import RECORDS, Record, decode, files_in

from .view import EventsView, Incident, Slow

READ_BYTES = 32 << 20
MOST_TAIL_BYTES = 128 << 10
LEAST_TAIL_BYTES = 4 << 10
FILES_AT_ONCE = 256
KEPT = 64
"""Number of times that are kept for each rank and kind of work."""
INCIDENTS = ("failed", "skipped", "drifted", "rejected")
FRESH_SECONDS = 60.0
"""Least `EventsView.fresh_seconds`."""
FRESH_PERIODS = 2.0
"""A running job is silent for less than so many times its longest silence before."""


@dataclass
class _Tail:
    """The end of one rank's file, as far as it was read."""

    path: Path
    rank: int
    offset: int = 0
    rest: bytes = b""
    """The begin of a line of which the end was not there yet."""
    last: str = ""
    """The name of its newest event."""
    last_message: str = ""
    last_seconds: float = 0.0
    """Its Unix time. A clock that was set back is followed."""
    progress: tuple[int, float] | None = None
    """Version and time of the newest record of progress, on the clock of `time.monotonic()`."""
    longest_seconds: float = 0.0
    """Longest time between two of them in this run: a long step, or an evaluation."""
    steps_per_second: float | None = None
    """Between the two newest ones."""
    is_current: bool = True
    """It has events as new as those of the others: its rank belongs to the newest run."""
    problem: str = ""
    """The reason that it could not be read."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of its events by `name/level`."""
    times: dict[str, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=KEPT))
    )
    """Seconds by kind of work, see `Slow`."""

    def read(self, most_bytes: int) -> list[Record]:
        """Events added since the last call, from the newest `most_bytes`. Raises OSError."""
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < self.offset:  # another file of the same name
                self.offset, self.rest = 0, b""
            begin = max(self.offset, size - most_bytes)
            cut = begin > self.offset
            file.seek(begin)
            data = file.read(size - begin)
        self.offset = begin + len(data)
        lines = ((b"" if cut else self.rest) + data).split(b"\n")
        self.rest = lines.pop()
        return [record for record in map(decode, lines[1:] if cut else lines) if record]

    def beat(self, record: Record) -> None:
        """Take one of `RECORDS`: the pace, by two records of progress of one run."""
        if record["name"] != "progress":
            self.progress = self.steps_per_second = None
            self.longest_seconds = 0.0
            return
        at = record["monotonic_seconds"]
        now = record["version"], record["time_seconds"] if at is None else float(at)
        before, self.progress = self.progress, now
        if "from" in record["facts"]:  # the first one after a start, a restore or a rollback
            self.steps_per_second = None
        elif before is not None and now[0] > before[0] and now[1] > before[1]:
            period = now[1] - before[1]
            self.longest_seconds = max(self.longest_seconds, period)
            self.steps_per_second = (now[0] - before[0]) / period

    @property
    def fresh_seconds(self) -> float:
        return max(FRESH_SECONDS, FRESH_PERIODS * self.longest_seconds)


class EventTails:
    """The events in one folder. One thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tails: dict[int, _Tail] = {}
        self._turn = 0
        self._versions: dict[str, set[int]] = defaultdict(set)
        """Versions of incidents by `name/level`: ranks report the same version each."""
        self._since: float | None = None
        self._incidents: dict[tuple[str, str], Incident] = {}
        self.write_rates: dict[str, float] = {}
        """Bytes a second of the newest result, by level."""

    def look(self) -> EventsView | None:
        """Read what is new; None if the folder has no events. Raises OSError if it cannot be
        read."""
        first = not self._tails
        for rank, path in files_in(self.folder).items():
            if rank not in self._tails:
                self._tails[rank] = _Tail(path, rank)
        if not self._tails:
            return None
        each = max(LEAST_TAIL_BYTES, min(MOST_TAIL_BYTES, READ_BYTES // len(self._tails)))
        read = [*self._tails.values()] if first else self._in_turn()
        for tail in read:
            self._read(tail, each)
        newest = _newest(self._tails.values())
        for tail in read:
            distance = abs(newest.last_seconds - tail.last_seconds)
            tail.is_current = distance < max(newest.fresh_seconds, tail.fresh_seconds)
        return self._view()

    @property
    def problems(self) -> list[str]:
        """Files that the last looks could not read."""
        return [tail.problem for tail in self._tails.values() if tail.problem]

    def _read(self, tail: _Tail, most_bytes: int) -> None:
        tail.problem, records = "", list[Record]()
        try:
            records = tail.read(most_bytes)
        except FileNotFoundError:
            pass
        except OSError as error:  # the other files are shown
            tail.problem = f"{tail.path}: {error.strerror or error}"
        for record in records:
            self._add(tail, record)

    def _in_turn(self) -> list[_Tail]:
        tails = [self._tails[rank] for rank in sorted(self._tails)]
        begin, self._turn = self._turn, (self._turn + FILES_AT_ONCE) % len(tails)
        return (tails + tails)[begin : begin + min(FILES_AT_ONCE, len(tails))]

    def _add(self, tail: _Tail, record: Record) -> None:
        name, level, time_seconds = record["name"], record["level"], record["time_seconds"]
        self._since = min(time_seconds, self._since or time_seconds)
        tail.last, tail.last_message, tail.last_seconds = name, record["message"], time_seconds
        if name in RECORDS:
            tail.beat(record)
            return
        kind = f"{name}/{level}" if level else name
        tail.counts[kind] += 1
        seconds = record["seconds"]
        if name == "sealed" and "stall" in seconds:
            tail.times["stall"].append(seconds["stall"])
        elif name == "committed" and (spent := sum(seconds.values())) > 0:
            tail.times[level].append(spent)
            if record["nbytes"]:
                self.write_rates[level] = record["nbytes"] / spent
        if name in INCIDENTS:
            self._versions[kind].add(record["version"])
            before = self._incidents.get((name, level))
            if before is None or before.time_seconds <= time_seconds:
                self._incidents[name, level] = Incident(
                    name, level, record["version"], tail.rank, time_seconds, record["message"]
                )

    def _counts(self) -> dict[str, int]:
        """Number of versions of incidents, and the largest number of any rank for other events."""
        found: Counter[str] = Counter()
        for tail in self._tails.values():
            found |= tail.counts
        found.update({kind: len(them) - found[kind] for kind, them in self._versions.items()})
        return dict(sorted(found.items()))

    def _view(self) -> EventsView:
        newest = _newest(self._tails.values())
        tails = [tail for tail in self._tails.values() if tail.is_current or tail is newest]
        paces = [tail.steps_per_second for tail in tails if tail.steps_per_second is not None]
        stalls = [each for tail in tails for each in tail.times.get("stall", ())]
        incidents = sorted(self._incidents.values(), key=lambda i: i.time_seconds, reverse=True)
        return EventsView(
            folder=str(self.folder),
            files=len(self._tails),
            since_seconds=self._since,
            newest_seconds=newest.last_seconds if newest.last else None,
            fresh_seconds=max(tail.fresh_seconds for tail in tails),
            steps_per_second=statistics.median(paces) if paces else None,
            stall_seconds=statistics.median(stalls) if stalls else None,
            worst_stall_seconds=max(stalls, default=None),
            counts=self._counts(),
            slow=tuple(_slowest(tails)),
            incidents=tuple(incidents),
            closed=newest.last_message if newest.last == "closed" else "",
        )


def _newest(tails: Iterable[_Tail]) -> _Tail:
    """The one with the newest event; one of the future only if all are: its clock was wrong."""
    latest = time.time() + FRESH_SECONDS
    return max(tails, key=lambda tail: (tail.last_seconds <= latest, tail.last_seconds))


def _slowest(tails: Iterable[_Tail]) -> list[Slow]:
    """The slowest rank for each kind of work, by the median of its newest times."""
    medians: dict[str, dict[int, float]] = defaultdict(dict)
    for tail in tails:
        for work, times in tail.times.items():
            medians[work][tail.rank] = statistics.median(times)
    found = []
    for work in ("stall", "local", "peer", "persistent"):
        if by_rank := medians.get(work):
            rank = max(by_rank, key=lambda each: by_rank[each])
            median = statistics.median(by_rank.values())
            found.append(Slow(work, rank, by_rank[rank], median, len(by_rank)))
    return found


__all__ = ["EventTails"]
