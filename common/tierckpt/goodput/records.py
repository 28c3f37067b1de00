"""Records: the event files of ranks, read as the runs of each rank.

Times are Unix seconds on the rank's own clock. Within a run they follow the monotonic clock from
the run's first record on, so that a clock set during the run changes no duration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct, field

from tierckpt._text import counted
from tierckpt.errors import ConfigError
from tierckpt.events import Record, decode, lines_of, unreadable

NOTICED_SET_SECONDS = 1.0
"""A clock that was set by more is named in a note."""


class Sample(Struct, frozen=True):
    """A boundary: its end, its version, and the stalls since the span's start."""

    at: float
    version: int
    stall_seconds: float


class Span(Struct):
    """Training without a restore, from `start` and `version` on."""

    start: float
    version: int
    restore_seconds: float = 0.0
    """Duration of the restore that ended at `start`."""
    is_restored: bool = False
    samples: list[Sample] = field(default_factory=list)
    reached: int = 0
    """The newest version that was certainly reached."""
    end: float = 0.0

    @property
    def newest(self) -> int:
        """The newest version known, at least `version`."""
        return max(self.version, self.reached, *(s.version for s in self.samples[-1:]))


class RankRun(Struct):
    """One checkpointer of one rank, from the start of its process to its last sign of life."""

    rank: int
    process: float
    """Start of the process."""
    imported: float
    attach: float
    """Start of the attach."""
    host: str = ""
    world: int = 1
    shim: bool = False
    """`tierckpt run` started the process."""
    heartbeat_seconds: float = 0.0
    attached: float | None = None
    attach_seconds: float = 0.0
    run: str = ""
    """The name of its first run on all ranks; empty before the first boundary."""
    job: str = ""
    spans: list[Span] = field(default_factory=list)
    last: float = 0.0
    silence_seconds: float = 0.0
    """Longest time between two records since the first boundary."""
    records: int = 0
    """Number of records since then."""
    told_end: bool = False
    """The last record is that of a process that was not killed: it is exact."""
    closing: float | None = None
    """Start of `close()`, if it ended cleanly at `last`."""
    reason: str = ""
    """Reason of the clean end."""
    interrupted: bool = False
    """It ended cleanly on a signal, or at the end of its allocation."""
    restart: tuple[float, float, float] | None = None
    """Failure before this run, its notice, and the end of the former processes, if known."""
    set_seconds: float = 0.0
    """By how much the clock was set during the run."""
    moved_seconds: float = 0.0
    """By how much all times of the run were moved, to the clock of the former run."""
    follows_at_once: bool = False
    """The time between the former run and this one is unknown, and counts as 0."""


def read(paths: Iterable[Path]) -> tuple[list[RankRun], list[str]]:
    """All runs of all ranks, and notes about what could not be used. Raises ConfigError."""
    runs: list[RankRun] = []
    notes: list[str] = []
    for path in paths:
        reader = _FileReader(path)
        for line in lines_of(path):
            reader.read(line)
        runs += reader.runs
        notes += reader.notes()
    if not runs:
        names = ", ".join(map(str, paths))
        raise ConfigError(
            f"{names}: no run of a job is recorded there; give the folder that a job with the "
            "setting events_dir wrote"
        )
    return runs, notes


class _FileReader:
    """Reads one rank's file, or one that several ranks wrote one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[RankRun] = []
        self._bad = self._early = 0
        self._anchor = 0.0, 0.0

    def read(self, line: bytes) -> None:
        """Take the next line. A killed rank may leave half a line."""
        record = decode(line)
        try:
            if record is not None:
                self._add(record)
        except (KeyError, TypeError, ValueError):  # a record without what it should have
            record = None
        self._bad += record is None

    def _add(self, record: Record) -> None:
        name = record["name"]
        if name == "started":
            self._start(_started(record), record)
            return
        if not self.runs:
            self._early += 1
            return
        run, at = self.runs[-1], self._at(record)
        before, run.last = run.last, max(at, run.last)
        run.set_seconds = record["time_seconds"] + run.moved_seconds - at
        if run.spans and run.spans[-1].samples:
            run.records += 1
            run.silence_seconds = max(run.silence_seconds, run.last - before)
        seconds, facts = record["seconds"], record["facts"]
        if name == "attached":
            run.attached, run.job = at, str(facts["job"])
            run.attach_seconds = seconds["attach"]
            run.spans.append(Span(at, 0, end=at))
        elif name == "restored":
            _restored(run, record, max(before, at - seconds.get("total", 0.0)), at)
        elif name == "progress":
            _progress(run, record, at)
        elif name == "closed":
            run.closing = max(before, at - seconds.get("close", 0.0))
            run.reason, run.interrupted = record["message"], bool(facts.get("interrupted"))
        elif name == "sealed" and run.spans:
            run.spans[-1].reached = max(run.spans[-1].reached, record["version"])
        if run.spans:
            run.spans[-1].end = run.last if run.closing is None else run.closing

    def _start(self, run: RankRun, record: Record) -> None:
        """Start a run, on the clock of the former ones."""
        if self.runs:
            _follow(self.runs[-1], run)
        self._anchor = run.last, float(record["monotonic_seconds"])
        self.runs.append(run)

    def _at(self, record: Record) -> float:
        """The time of an event on the run's own clock."""
        wall, monotonic = self._anchor
        if (now := record["monotonic_seconds"]) is None:
            return float(record["time_seconds"]) + self.runs[-1].moved_seconds
        return float(wall + now - monotonic)

    def notes(self) -> Iterator[str]:
        """Notes about this file."""
        yield from unreadable(self.path, self._bad)
        if self._early:
            was = "was" if self._early == 1 else "were"
            events = counted(self._early, "event")
            yield f"{self.path}: {events} before the first start {was} left out"
        for run in self.runs:
            if abs(run.set_seconds) > NOTICED_SET_SECONDS:
                yield (
                    f"the clock of {run.host or f'rank {run.rank}'} was set by "
                    f"{run.set_seconds:+.1f} s during a run; durations are not affected"
                )


def _started(record: Record) -> RankRun:
    at, seconds, facts = record["time_seconds"], record["seconds"], record["facts"]
    attach = at - seconds["attach"]
    imported = attach - seconds["setup"]
    moments = [facts.get(name) for name in ("failed", "noticed", "ended")]
    known = all(isinstance(each, int | float) for each in moments)
    return RankRun(
        rank=record["rank"],
        process=imported - seconds["import"],
        imported=imported,
        attach=attach,
        host=facts["host"],
        world=facts["world"],
        shim=facts["shim"],
        heartbeat_seconds=facts["heartbeat_seconds"],
        last=at,
        restart=(moments[0], moments[1], moments[2]) if known else None,
    )


def _follow(before: RankRun, run: RankRun) -> None:
    """Move the times of a run to the clock of the former one, as far as that was set. A run that
    would still start before the end of the former one (its clock was set between them, or is that
    of another node) follows at once."""
    moved = 0.0
    if run.host == before.host:
        was_set = abs(before.set_seconds) > NOTICED_SET_SECONDS
        moved = before.moved_seconds - (before.set_seconds if was_set else 0.0)
    if before.last - (run.last + moved) > NOTICED_SET_SECONDS:
        moved, run.follows_at_once, run.restart = before.last - run.process, True, None
    run.moved_seconds = moved
    for name in ("process", "imported", "attach", "last"):
        setattr(run, name, getattr(run, name) + moved)
    if run.restart is not None:
        failed, noticed, ended = run.restart
        run.restart = failed + moved, noticed + moved, ended + moved


def _restored(run: RankRun, record: Record, start: float, at: float) -> None:
    """A restore starts another span, also if the training was under way."""
    if run.spans:
        run.spans[-1].end = start
    run.spans.append(Span(at, record["version"], at - start, True, end=at))


def _progress(run: RankRun, record: Record, at: float) -> None:
    facts, version = record["facts"], record["version"]
    run.run = run.run or facts.get("run", "")
    run.told_end = bool(facts.get("ended"))
    if not run.spans:
        return
    span = run.spans[-1]
    if (from_version := facts.get("from")) is not None and from_version != span.version:
        if span.samples:  # rolled back without a restore: elastic Horovod
            span = Span(span.samples[-1].at, from_version)
            run.spans[-1].end = span.start
            run.spans.append(span)
        span.version = from_version
    boundary = at - facts.get("since_boundary", 0.0)
    if "from" in facts and facts.get("ended"):  # no boundary was passed since the span's start
        return
    stalls = sum(record["seconds"].values())
    last = span.samples[-1] if span.samples else Sample(span.start, span.version, 0.0)
    span.samples.append(
        Sample(
            max(boundary, last.at),
            max(version, last.version),
            max(stalls, last.stall_seconds),
        )
    )
