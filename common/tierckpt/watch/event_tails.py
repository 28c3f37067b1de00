"""Event tails: the newest events of all ranks, read from the ends of their files.

A look reads at most READ_BYTES, whatever the number of ranks and the length of the job: the first
look reads a share of that from the end of each file, later looks what was added since. At most
FILES_AT_ONCE files are read in a look after the first one, in turns.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .view import EventsView, Incident, Slow

READ_BYTES = 32 << 20
MOST_TAIL_BYTES = 128 << 10
LEAST_TAIL_BYTES = 4 << 10
FILES_AT_ONCE = 256
KEPT = 64
"""Number of times that are kept for each rank and kind of work."""
INCIDENTS = ("failed", "skipped", "drifted", "rejected")
_FILE = re.compile(r"events-r(\d+)\.jsonl")
Record = dict[str, Any]


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
        return [record for record in map(_record, lines[1:] if cut else lines) if record]


def _record(line: bytes) -> Record | None:
    """The event in a line; None if it is none."""
    try:
        record = json.loads(line)
        event = {
            "name": str(record["name"]),
            "level": str(record["level"]),
            "version": int(record["version"]),
            "nbytes": int(record["nbytes"]),
            "seconds": {str(k): float(v) for k, v in record["seconds"].items()},
            "message": str(record["message"]),
            "time_seconds": float(record["time_seconds"]),
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return event


class EventTails:
    """The events in one folder. One thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tails: dict[int, _Tail] = {}
        self._turn = 0
        self._versions: dict[str, set[int]] = defaultdict(set)
        """Versions of incidents by `name/level`: ranks report the same version each."""
        self._since: float | None = None
        self._newest: float | None = None
        self._incidents: dict[tuple[str, str], Incident] = {}
        self.write_rates: dict[str, float] = {}
        """Bytes a second of the newest result, by level."""

    def look(self) -> EventsView | None:
        """Read what is new; None if the folder has no events. Raises OSError if it cannot be
        read."""
        first = not self._tails
        for name in os.listdir(self.folder):
            if (found := _FILE.fullmatch(name)) and (rank := int(found[1])) not in self._tails:
                self._tails[rank] = _Tail(self.folder / name, rank)
        if not self._tails:
            return None
        each = max(LEAST_TAIL_BYTES, min(MOST_TAIL_BYTES, READ_BYTES // len(self._tails)))
        for tail in [*self._tails.values()] if first else self._in_turn():
            try:
                records = tail.read(each)
            except FileNotFoundError:
                continue
            for record in records:
                self._add(tail, record)
        return self._view()

    def _in_turn(self) -> list[_Tail]:
        tails = [self._tails[rank] for rank in sorted(self._tails)]
        begin, self._turn = self._turn, (self._turn + FILES_AT_ONCE) % len(tails)
        return (tails + tails)[begin : begin + min(FILES_AT_ONCE, len(tails))]

    def _add(self, tail: _Tail, record: Record) -> None:
        name, level, time_seconds = record["name"], record["level"], record["time_seconds"]
        self._since = min(time_seconds, self._since or time_seconds)
        self._newest = max(time_seconds, self._newest or time_seconds)
        kind = f"{name}/{level}" if level else name
        tail.counts[kind] += 1
        tail.last, tail.last_message = name, record["message"]
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
        tails = self._tails.values()
        stalls = [each for tail in tails for each in tail.times.get("stall", ())]
        closed = [tail.last_message for tail in tails if tail.last == "closed"]
        incidents = sorted(self._incidents.values(), key=lambda i: i.time_seconds, reverse=True)
        return EventsView(
            folder=str(self.folder),
            files=len(tails),
            since_seconds=self._since,
            newest_seconds=self._newest,
            stall_seconds=statistics.median(stalls) if stalls else None,
            worst_stall_seconds=max(stalls, default=None),
            counts=self._counts(),
            slow=tuple(_slowest(tails)),
            incidents=tuple(incidents),
            closed=closed[0] if closed else "",
        )


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
