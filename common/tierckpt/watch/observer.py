"""The observer: collects what one look at a job shows, from its files, its memory and its agents.

The rows of the catalog are reduced to one line a level. A process that sees only the persistent
level learns from the lease, and from unfinished versions: their files show how far all nodes are
together, and which ranks' shards are missing, wherever the watcher runs. Whether the job runs is
decided by the surest sign that one look has found.

Event tails: the newest events of all ranks, read from the ends of their files.

A look reads at most READ_BYTES, whatever the number of ranks and the length of the job: the first
look reads a share of that from the end of each file, later looks what was added since. At most
FILES_AT_ONCE files are read in a look after the first one, in turns.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice, product
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from tierckpt._text import directory_of, is_url, some
from tierckpt.agent.protocol import LevelStatus, TaskStatus
from tierckpt.agent.status import RUNS as AGENT_RUNS
from tierckpt.agent.status import FoundAgent, find_agents
from tierckpt.config import load_config
from tierckpt.core.levels import LOCAL, MEMORY, PEER, PERSISTENT, RANK
from tierckpt.events import RECORDS, Record, decode, files_in
from tierckpt.format.ids import (
    GROUP,
    MANIFEST,
    RETIRED,
    ShardKey,
    VersionId,
    VersionName,
    parse_run,
)
from tierckpt.journal.segments import reach_of_restart
from tierckpt.offline.catalog import Row, rows_of
from tierckpt.offline.survey import Survey, hints_of, refuse_several_jobs, survey
from tierckpt.storage import answers
from tierckpt.storage.claims import Claim, claims_in
from tierckpt.storage.job_directory import JobDirectory
from tierckpt.storage.local import LocalStore
from tierckpt.storage.persistent import PersistentStore
from tierckpt.storage.persistent.lease import LEASE_SECONDS

from .view import (
    ENDING,
    RUNS,
    STOPPED,
    UNKNOWN,
    AgentView,
    EventsView,
    Incident,
    JobState,
    LevelView,
    Node,
    Restart,
    Slow,
    View,
    Work,
)

__all__ = [
    "EventTails",
    "LeaseView",
    "Observer",
    "PlaceView",
    "Seen",
    "job_state",
    "level_views",
    "look_at",
    "restart_of",
    "steps_per_second",
]


READ_BYTES = 32 << 20
MAX_TAIL_BYTES = 128 << 10
MIN_TAIL_BYTES = 4 << 10
FILES_AT_ONCE = 256
KEPT = 64
"""Number of times that are kept for each rank and kind of work."""
INCIDENTS = ("failed", "skipped", "drifted", "rejected")
FRESH_SECONDS = 60.0
"""Least `EventsView.fresh_seconds`."""
FRESH_PERIODS = 2.0
"""A running job is silent for less than so many times its longest silence before."""


class _Tail(Struct):
    """The end of one rank's file, as far as it was read."""

    path: Path
    rank: int
    offset: int = 0
    rest: bytes = b""
    """The start of a line still without its end."""
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
            start = max(self.offset, size - most_bytes)
            cut = start > self.offset
            file.seek(start)
            data = file.read(size - start)
        self.offset = start + len(data)
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
        each = max(MIN_TAIL_BYTES, min(MAX_TAIL_BYTES, READ_BYTES // len(self._tails)))
        read = [*self._tails.values()] if first else self._next_tails()
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

    def _next_tails(self) -> list[_Tail]:
        tails = [self._tails[rank] for rank in sorted(self._tails)]
        start, self._turn = self._turn, (self._turn + FILES_AT_ONCE) % len(tails)
        return (tails + tails)[start : start + min(FILES_AT_ONCE, len(tails))]

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


MAX_MANIFESTS = 256
"""Number of names at which the manifests of one version are looked for, to find its age."""


def level_views(
    rows: Sequence[Row],
    now: float,
    agents: Iterable[LevelStatus],
    events: EventsView | None,
    write_rates: Mapping[str, float],
) -> tuple[LevelView, ...]:
    """One view for each level of which something is seen, the cheapest first. `write_rates` are
    those of events, for levels with an unseen agent."""
    results = list(agents)
    rates = {**write_rates, **_write_rates(results)}
    own = [row for row in rows if not row.elsewhere and row.is_past]
    parities = [
        replace(row, level=PEER.value, nbytes=0, places=[], there=set(range(row.parities)))
        for row in own
        if row.parities and row.level == LOCAL
    ]
    found = []
    for level in sorted({row.level for row in (*own, *parities)}, key=lambda name: RANK[name]):
        on_level = [row for row in (*own, *parities) if row.level == level and row.there]
        if on_level:
            found.append(_level_view(level, on_level, own, now, results, rates.get(level)))
    return tuple(_with_counts(view, events) for view in found)


def _level_view(
    level: str,
    rows: list[Row],
    all_rows: Sequence[Row],
    now: float,
    results: Sequence[LevelStatus],
    write_rate: float | None,
) -> LevelView:
    newest = max([row for row in rows if not row.missing] or rows, key=_id)
    taken = _taken_seconds(newest, all_rows)
    since = {_id(row): _durable_since(row, results) for row in rows}
    times = {_id(row): _taken_seconds(row, all_rows) or since[_id(row)] for row in rows}
    return LevelView(
        level=level,
        version=newest.version,
        shards_seen=len(newest.there),
        shards=newest.shards,
        versions=len(rows),
        nbytes=newest.nbytes,
        age_seconds=None if taken is None else max(now - taken, 0.0),
        durable_since_seconds=since[_id(newest)],
        bytes_per_second=_rate(newest, times),
        write_bytes_per_second=write_rate,
    )


def _id(row: Row) -> VersionId:
    return VersionId(row.generation, row.version)


def _taken_seconds(row: Row, rows: Sequence[Row]) -> float | None:
    """Unix time of the version, also by its copies on other levels."""
    same = [row, *(each for each in rows if (_id(each), each.run_id) == (_id(row), row.run_id))]
    return next((each.created_seconds for each in same if each.created_seconds), None)


def _durable_since(row: Row, results: Sequence[LevelStatus]) -> float | None:
    """Unix time when the last shard seen was committed."""
    if row.level == MEMORY:
        return None
    for result in results:
        if result.level == row.level and result.newest == _id(row):
            return result.newest_at_seconds
    found = []
    with suppress(OSError):
        if row.level == LOCAL:
            keys = [ShardKey(_id(row), shard, row.shards) for shard in sorted(row.there)]
            for place, key in islice(product(row.places, keys), MAX_MANIFESTS):
                with suppress(OSError):
                    found.append(LocalStore(place).committed_seconds(key))
        elif row.level == PERSISTENT and not is_url(row.places[0]):
            stem = VersionName(_id(row), row.shards, row.run_id).stem
            found.append(Path(row.places[0], stem + MANIFEST).stat().st_mtime)
    return max(found, default=None)


def _rate(newest: Row, times: Mapping[VersionId, float | None]) -> float | None:
    """Bytes a second, from the times of the two newest versions of one run."""
    end = times.get(_id(newest))
    earlier = [
        each
        for id_, each in times.items()
        if each is not None and end is not None and each < end
        if id_.generation == newest.generation
    ]
    if end is None or not earlier or not newest.nbytes:
        return None
    return newest.nbytes / (end - max(earlier))


def _write_rates(results: Sequence[LevelStatus]) -> dict[str, float]:
    return {
        each.level: each.last_bytes / each.last_seconds
        for each in results
        if each.last_bytes and each.last_seconds > 0
    }


def _with_counts(view: LevelView, events: EventsView | None) -> LevelView:
    if events is None:
        return view
    stored = "sealed" if view.level == MEMORY else "committed"

    def count(name: str) -> int:
        return events.counts.get(f"{name}/{view.level}", 0)

    return replace(view, stored=count(stored), skipped=count("skipped"), failed=count("failed"))


def restart_of(rows: Sequence[Row], now: float) -> Restart | None:
    """The version that a restart takes; None if none is complete here."""
    taken = [row for row in rows if row.next]
    if not taken:
        return None
    created = _taken_seconds(taken[0], rows)
    age = None if created is None else max(now - created, 0.0)
    iteration = next((row.iteration for row in taken if row.iteration is not None), None)
    return Restart(taken[0].version, iteration, tuple(row.level for row in taken), age)


def steps_per_second(rows: Sequence[Row], now: float) -> float | None:
    """The pace of the training, by the two newest versions in memory, and by the time since then:
    that of a job that hangs goes to 0."""
    times = {
        _id(row): row.created_seconds
        for row in rows
        if row.level == MEMORY and row.created_seconds and not row.elsewhere
    }
    newest = sorted(times)[-2:]
    if len(newest) < 2 or newest[0].generation != newest[1].generation:
        return None
    seconds = max(times[newest[1]] - times[newest[0]], now - times[newest[1]])
    return (newest[1].version - newest[0].version) / seconds if seconds > 0 else None


LABEL = re.compile(r"(\d{5,})of(\d{5,})")
MAX_VERSIONS = 2
"""Number of unfinished versions that are looked into, the newest ones."""
MAX_GROUPS = 16
"""Number of their unfinished groups that are looked into."""


class LeaseView(Struct, frozen=True):
    """The job that uses the place, by its lease."""

    owner: str
    expires_seconds: float
    """Unix time by the clock of the holder."""


class PlaceView(Struct, frozen=True):
    """One place of the persistent level."""

    url: str
    lease: LeaseView | None
    work: tuple[Work, ...]


def look_at(url: str, store: PersistentStore) -> PlaceView:
    """Read the lease and list unfinished versions. Closes `store`. Raises the store's errors."""
    with closing(store):
        record = store.lease_record()
        lease = LeaseView(record.owner, record.expires_seconds) if record else None
        names = [name for name in store.incomplete() if not _retired(store, name)]
        newest = [name for name in names if record and name.run_id == record.run_id]
        work = [_flush_work(store, name) for name in newest[-MAX_VERSIONS:]]
        return PlaceView(
            url, lease, tuple(each for each in work if each.done_shards < each.total_shards)
        )


def _retired(store: PersistentStore, name: VersionName) -> bool:
    try:
        store.backend.size(name.stem + RETIRED)
    except FileNotFoundError:
        return False
    return True


def _flush_work(store: PersistentStore, name: VersionName) -> Work:
    missing, unseen = _missing(store, name)
    done = name.shards - len(missing) - unseen
    waits_for = f"shards {_ranges(missing)}" if missing and not unseen else ""
    version = name.id.version
    counts = {"done_shards": done, "total_shards": name.shards}
    return Work("", "persistent", version, None, 0.0, **counts, waits_for=waits_for)


def _missing(store: PersistentStore, name: VersionName) -> tuple[list[int], int]:
    """Shards not stored yet, and the number of those in an unknown state."""
    there = store.backend.sizes(name.stem)
    counts = [int(found[2]) for found in map(LABEL.match, there) if found]
    if not counts:
        return list(range(name.shards)), 0
    count = counts[0]
    per_group = -(-name.shards // count)
    open_groups = [g for g in range(count) if f"{g:05d}of{count:05d}{GROUP}" not in there]
    missing, unseen = list[int](), 0
    for number, group in enumerate(open_groups):
        members = range(group * per_group, min((group + 1) * per_group, name.shards))
        if number >= MAX_GROUPS or f"{group:05d}of{count:05d}/" not in there:
            unseen += len(members)  # in shared files, which do not show their records
            continue
        files = store.backend.sizes(f"{name.stem}/{group:05d}of{count:05d}")
        stored = _stored(files)
        missing += [shard for shard in members if shard not in stored]
    return missing, unseen


def _stored(files: Iterable[str]) -> set[int]:
    runs = (run for run in map(parse_run, files) if run is not None)
    return set(itertools.chain.from_iterable(runs))


def _ranges(shards: list[int]) -> str:
    """`0-7, 12` for sorted numbers."""
    runs = list[list[int]]()
    for shard in shards:
        if runs and shard == runs[-1][-1] + 1:
            runs[-1].append(shard)
        else:
            runs.append([shard])
    return some([f"{r[0]}-{r[-1]}" if r[1:] else str(r[0]) for r in runs], 4)


class Seen(Struct):
    """The parts of one look."""

    there: Survey
    claims: list[tuple[Claim, bool]]
    agents: list[tuple[str, FoundAgent]]
    """With the names of their nodes."""
    places: list[PlaceView]
    events: EventsView | None
    trainers: int
    dead_since: float | None = None
    """Unix time of the first look that has found only claims of dead processes; None if the last
    one has not."""
    problems: list[str] = field(default_factory=list)
    event_folders: list[str] = field(default_factory=list)
    """Folders that should have events."""


def job_state(seen: Seen, rows: Sequence[Row], now: float) -> JobState:
    """The job as a whole, by all that was seen."""
    state, evidence = _state(seen, now)
    ids = {f.facts.job for f in seen.there.found if not seen.there.is_elsewhere(f.place)}
    if not ids and (lease := _lease(seen.places)):
        ids = {lease.owner.partition(" on ")[0]}
    suspects = {f"v{row.version}": row.suspect for row in rows if row.suspect}
    return JobState(
        state,
        evidence,
        ", ".join(sorted(ids)),
        _last_seen(seen, rows, state, now),
        seen.trainers,
        _steps_per_second(seen.events, rows, now),
        _with_journal(restart_of(rows, now), seen.there),
        suspects,
    )


def _with_journal(restart: Restart | None, there: Survey) -> Restart | None:
    """Add how far a journal leads on from the version that a restart takes."""
    reach = reach_of_restart(there) if restart is not None else None
    if restart is None or reach is None or not reach.records:
        return restart
    return replace(restart, journal=reach.last)


def _state(seen: Seen, now: float) -> tuple[str, str]:
    """The state of the job, and the reason as text; the surest sign decides."""
    if seen.trainers:
        return RUNS, f"{seen.trainers} on this machine"
    if living := sum(lives for _, lives in seen.claims):
        return RUNS, f"claims of {living} of {len(seen.claims)} nodes are held"
    events, lease = seen.events, _lease(seen.places)
    if events and events.closed:
        return STOPPED, f"closed: {events.closed}"
    agents = [each for _, each in seen.agents if each.state == AGENT_RUNS]
    if any(each.status and each.status.awaited for each in agents):
        return ENDING, "its trainers were killed; an agent waits for them to come back"
    if agents:
        return ENDING, "its trainers have ended; an agent is left"
    # Its last events may be fresh: a claim of a dead process needs an event that came later.
    if (newest := _fresh_seconds(events, now)) is not None and newest > (seen.dead_since or 0.0):
        return RUNS, f"its newest event is {max(now - newest, 0.0):.0f} s old"
    if seen.claims or seen.agents:
        return STOPPED, "killed: its processes are gone, and have not cleaned up"
    levels = {f.place.level for f in seen.there.found if not seen.there.is_elsewhere(f.place)}
    if "memory" in levels:
        return STOPPED, "its versions in memory have no process"
    if "local" in levels:
        return STOPPED, "no process has claimed its directory"
    if lease is not None:
        left = lease.expires_seconds - now
        if left > 0:
            return RUNS, "its lease on the persistent level is renewed"
        return STOPPED, "its lease on the persistent level has ended"
    if seen.places:
        return UNKNOWN, "no job holds the persistent level: it has ended, or has not flushed yet"
    return UNKNOWN, "no sign of a process is visible from here"


def _fresh_seconds(events: EventsView | None, now: float) -> float | None:
    """Unix time of the newest event, if it shows that the job runs. One from the future does not:
    a clock was wrong."""
    newest = events.newest_seconds if events else None
    if events is None or newest is None or abs(now - newest) >= events.fresh_seconds:
        return None
    return newest


def _steps_per_second(events: EventsView | None, rows: Sequence[Row], now: float) -> float | None:
    if events and events.steps_per_second and _fresh_seconds(events, now) is not None:
        return events.steps_per_second
    return steps_per_second(rows, now)


def _lease(places: Sequence[PlaceView]) -> LeaseView | None:
    leases = [place.lease for place in places if place.lease and place.lease.owner]
    return max(leases, key=lambda each: each.expires_seconds, default=None)


def _last_seen(seen: Seen, rows: Sequence[Row], state: str, now: float) -> float | None:
    if state == RUNS and seen.trainers:
        return now
    times = [row.created_seconds for row in rows if row.created_seconds]
    if seen.events and seen.events.newest_seconds:
        times.append(min(now, seen.events.newest_seconds))
    if lease := _lease(seen.places):
        times.append(min(now, lease.expires_seconds - LEASE_SECONDS / 2))
    return max(times, default=None)


MAX_TIMES = 10_000
"""Number of versions with kept times."""
MAX_NODES = 4096
"""Number of directories with claims that are read."""


class Observer:
    """Looks at one job again and again. One thread; keeps the positions in event files."""

    def __init__(self, paths: Sequence[str], events_dir: str = "") -> None:
        """`paths` as for `survey`. `events_dir`: where events are, if it is known."""
        self._paths = tuple(dict.fromkeys(map(directory_of, paths)))
        self._config = load_config()
        self._events_dir = events_dir
        self._tails: EventTails | None = None
        """The folder with events that the last look found."""
        self._known_tails: dict[str, EventTails] = {}
        self._found_paths: tuple[str, ...] = ()
        """Places that the job itself has named."""
        self._dead_since: float | None = None
        """See `Seen.dead_since`."""
        self._hint: str | None = None
        """Where the job may be, if nothing is at the paths; None: not searched yet."""
        self._taken: dict[tuple[int, int, str], float] = {}
        """Unix times of the versions seen so far, by generation, version and run."""

    def look(self) -> View:
        """Collect a view. Raises MissingPathError if a path does not exist and its job has nothing
        in memory, and ConfigError for the folder of several jobs."""
        start, now = time.monotonic(), time.time()
        seen = self._see()
        rows = rows_of(seen.there)
        self._remember(rows)
        statuses = [each.status for _, each in seen.agents if each.status is not None]
        results = [level for status in statuses for level in status.levels]
        job = job_state(seen, rows, now)
        rates = self._tails.write_rates if self._tails else {}
        return View(
            time_seconds=now,
            paths=(*self._paths, *self._found_paths),
            took_seconds=time.monotonic() - start,
            job=job,
            levels=level_views(rows, now, results, seen.events, rates),
            work=tuple(_work(seen, now)),
            agents=tuple(_agent(node, each) for node, each in seen.agents),
            nodes=tuple(Node(c.host, c.pid, lives, c.since_seconds) for c, lives in seen.claims),
            events=seen.events,
            notes=tuple([*_notes(seen, job.state), *self._hints(seen)]),
            problems=tuple([*seen.there.troubles, *seen.problems]),
        )

    def _hints(self, seen: Seen) -> list[str]:
        """Where the job may be, as long as nothing is here. Looked for once: it may ask a store."""
        if seen.there.copies or seen.claims or seen.agents:
            return []
        if self._hint is None:
            self._hint = hints_of(self._paths, seen.there)
        return [self._hint] if self._hint else []

    def _remember(self, rows: Iterable[Row]) -> None:
        """Keep the times of versions for levels that do not have them."""
        for row in rows:
            name = (row.generation, row.version, row.run_id)
            if row.created_seconds is not None:
                self._taken[name] = row.created_seconds
            else:
                row.created_seconds = self._taken.get(name)
        for name in [*self._taken][:-MAX_TIMES]:
            del self._taken[name]

    def _see(self) -> Seen:
        there = survey([*self._paths, *self._found_paths])
        refuse_several_jobs(there, ", ".join(self._paths))
        claims = _claims(there.directories)
        if added := self._named_by(claims):
            self._found_paths = (*self._found_paths, *added)
            there = survey([*self._paths, *self._found_paths])
        agents = [(_node(job), each) for job in there.jobs for each in find_agents(job)]
        trainers = sum(map(_trainers, there.jobs))
        seen = Seen(there, claims, agents, [], None, trainers)
        dead = bool(claims) and not any(lives for _, lives in claims)
        self._dead_since = (self._dead_since or time.time()) if dead else None
        seen.dead_since = self._dead_since
        seen.places += self._places(seen)
        seen.events = self._events(seen)
        return seen

    def _named_by(self, claims: Iterable[tuple[Claim, bool]]) -> list[str]:
        """Persistent places named in claims that were not given. One not here (another machine's)
        is left out."""
        named = dict.fromkeys(claim.persistent for claim, _ in claims if claim.persistent)
        known = {*map(_real, (*self._paths, *self._found_paths))}
        answers.silent(named, answers.PATIENCE_SECONDS)
        return [
            p
            for p in named
            if _real(p) not in known and (is_url(p) or answers.is_silent(p) or os.path.isdir(p))
        ]

    def _places(self, seen: Seen) -> list[PlaceView]:
        """The given places that are persistent ones, and those with versions."""
        with_versions = {f.place.where for f in seen.there.found if f.place.level == "persistent"}
        found = []
        for url in dict.fromkeys([*self._paths, *self._found_paths, *sorted(with_versions)]):
            if answers.is_silent(url) or not (is_url(url) or Path(url).is_dir()):
                continue
            try:
                place = look_at(url, seen.there.open_store(url))
            except Exception as error:  # also a client's own errors
                seen.problems.append(f"{url}: {error}")
                continue
            if place.lease or place.work or url in with_versions:
                found.append(place)
        return found

    def _events(self, seen: Seen) -> EventsView | None:
        """What is new in the folder that was given, that the job has named, or of the settings; or
        in a given place itself."""
        named = [claim.events for claim, _ in seen.claims if claim.events]
        folders = (self._events_dir, *named, self._config.events_dir)
        seen.event_folders = [*dict.fromkeys(filter(None, folders))]
        folders = tuple(dict.fromkeys((*seen.event_folders, *self._paths)))
        for folder in answers.silent(folders, answers.PATIENCE_SECONDS):
            if folder in seen.event_folders:
                seen.problems.append(str(answers.NoAnswerError(folder, answers.PATIENCE_SECONDS)))
        for folder in folders:
            if answers.is_silent(folder):
                continue
            self._tails = self._known_tails.setdefault(folder, EventTails(Path(folder)))
            try:
                if (events := self._tails.look()) is not None:
                    seen.problems += self._tails.problems
                    return events
            except (FileNotFoundError, NotADirectoryError):
                pass  # not there yet, a URL, or another machine's
            except OSError as error:
                if folder in seen.event_folders:
                    seen.problems.append(f"{folder}: {error.strerror or error}")
        self._tails = None
        return None


def _real(place: str) -> str:
    return place if is_url(place) or answers.is_silent(place) else os.path.realpath(place)


def _claims(directories: Sequence[Path]) -> list[tuple[Claim, bool]]:
    """The newest claims, one for each machine and process."""
    found = [claim for folder in directories[:MAX_NODES] for claim in claims_in(folder)]
    living = [claim for claim in found if claim[1]]
    return sorted(living or found, key=lambda each: each[0].host)


def _node(job: JobDirectory) -> str:
    return job.node or socket.gethostname()


def _trainers(job: JobDirectory) -> int:
    with suppress(OSError):
        return job.trainers()
    return 0


# --- agents and their work -----------------------------------------------------------------------


def _agent(node: str, each: FoundAgent) -> AgentView:
    status = each.status
    if status is None:
        return AgentView(node, each.pid, each.state, None, (), (), {}, 0.0, each.why)
    failures = [level.last_failure for level in status.levels if level.last_failure]
    note = "shuts down for a later run" if status.shutting_down else "".join(failures[-1:])
    return AgentView(
        node,
        status.pid,
        each.state,
        status.began_seconds,
        status.trainers,
        status.awaited,
        {level.level: level.waiting for level in status.levels if level.waiting},
        status.quiet_seconds,
        note,
    )


def _work(seen: Seen, now: float) -> Iterable[Work]:
    for node, each in seen.agents:
        for task in each.status.tasks if each.status else ():
            yield _task(node, task, now)
    for place in seen.places:
        yield from place.work


def _task(node: str, task: TaskStatus, now: float) -> Work:
    seconds = max(now - task.began_seconds, 0.0)
    done = (task.done_bytes, task.total_bytes)
    return Work(node, task.level, task.id.version, task.shard, seconds, *done)


# --- what is not visible -------------------------------------------------------------------------


def _notes(seen: Seen, state: str) -> Iterable[str]:
    if seen.events is None:
        what = "stalls, skipped and failed versions and slow ranks"
        if folders := ", ".join(seen.event_folders):
            yield f"no events: {folders} has none, or is not visible here; {what} are not shown"
        else:
            yield f"no events: with the setting events_dir (or --events DIR) {what} are shown"
    if not (seen.agents or seen.claims) and state in (RUNS, UNKNOWN):
        yield (
            "the job's processes are not visible from here: run this on one of its nodes, with the "
            "job's path, to see agents and memory"
        )
    yield from seen.there.beside
