"""A view: what one look at a job has shown. Values only; `as_json` is the documented schema."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, to_builtins

SCHEMA = 1
"""Number of the schema. A new field leaves it as it is; a field removed, or of another meaning,
increases it."""

RUNS, ENDING, STOPPED, UNKNOWN = "runs", "ending", "stopped", "unknown"


class Restart(Struct, frozen=True):
    """The version that a restart takes which sees the same files."""

    version: int
    iteration: int | None
    levels: tuple[str, ...]
    age_seconds: float | None
    """Time since the version was taken; None if it is unknown."""
    journal: int | None = None
    """The version to which a journal leads on from there; None without one."""


class JobState(Struct, frozen=True):
    """The job as a whole."""

    state: str
    """`runs`: a trainer lives. `ending`: trainers have ended, and an agent still works or waits.
    `stopped`: no process is left. `unknown`: nothing here shows whether a process lives."""
    evidence: str
    """The reason for `state`, as text."""
    job_id: str
    last_seen_seconds: float | None
    """Unix time of the newest sign of the job: a version, an event, a lease."""
    trainers_here: int
    """Number of trainers that live on this machine."""
    steps_per_second: float | None
    """By the newest records of progress in the events, else by the newest versions in this
    machine's memory."""
    restart: Restart | None
    suspects: dict[str, str]
    """Versions of which replicas differed or may have, such as `v12`, with the reason."""


class LevelView(Struct, frozen=True):
    """One level."""

    level: str
    version: int
    """The newest version complete here; without one, the newest of which a part is here."""
    shards_seen: int
    shards: int
    versions: int
    """Number of versions of which something is here."""
    nbytes: int
    """Stored bytes of that version, as far as they are seen."""
    age_seconds: float | None
    """Time since the version was taken."""
    durable_since_seconds: float | None
    """Unix time of its commit; None for memory, and where it is unknown."""
    bytes_per_second: float | None
    """Mean rate at which versions reach the level: bytes of a version by the time between two."""
    write_bytes_per_second: float | None
    """Rate while a version was written, by one node or rank; None if it is unknown."""
    stored: int | None = None
    """Number of versions that were committed (sealed, in memory) in the period of the events."""
    skipped: int | None = None
    failed: int | None = None


class Work(Struct, frozen=True):
    """A version on its way to a level."""

    node: str
    level: str
    version: int
    shard: int | None
    """None: all shards of the node, or of the job."""
    seconds: float
    """Time since the start; 0.0 where it is unknown."""
    done_bytes: int = 0
    total_bytes: int = 0
    """Upper bound; 0 where it is unknown."""
    done_shards: int = 0
    total_shards: int = 0
    """Number of the version's shards; 0 for the work of one agent."""
    waits_for: str = ""
    """Shards that are missing, as text."""


class AgentView(Struct, frozen=True):
    """The agent of a node."""

    node: str
    pid: int | None
    state: str
    """`runs`, `silent` (it does not answer) or `gone` (it was killed)."""
    began_seconds: float | None
    trainers: tuple[int, ...]
    """Ranks that are connected."""
    awaited: tuple[int, ...]
    """Killed ranks, with successors that it waits for."""
    waiting: dict[str, int]
    """Number of versions that wait, by level."""
    quiet_seconds: float
    """Time since the flush under way last proceeded."""
    note: str = ""


class Node(Struct, frozen=True):
    """A node that has claimed its directory."""

    host: str
    pid: int
    lives: bool
    since_seconds: float


class Slow(Struct, frozen=True):
    """The rank that took longest for one kind of work, beside the median of all ranks."""

    work: str
    """`stall` (of the training), `local`, `peer` or `persistent` (until a version was there)."""
    rank: int
    seconds: float
    median_seconds: float
    ranks: int
    """Number of ranks with such events."""


class Incident(Struct, frozen=True):
    """The newest event of one kind."""

    name: str
    level: str
    version: int
    rank: int
    time_seconds: float
    message: str


class EventsView(Struct, frozen=True):
    """The events of the job, from the end of each rank's file."""

    folder: str
    files: int
    since_seconds: float | None
    """Unix time of the oldest event that was read."""
    newest_seconds: float | None
    """Unix time of the newest one."""
    fresh_seconds: float
    """A running job writes an event within this time."""
    steps_per_second: float | None
    """By the records of progress; None before there are two in the newest run."""
    stall_seconds: float | None
    """Median over versions and ranks."""
    worst_stall_seconds: float | None
    counts: dict[str, int]
    """By `name/level`: number of versions for `failed`, `skipped`, `drifted` and `rejected`, the
    largest number of events of any rank for others."""
    slow: tuple[Slow, ...]
    incidents: tuple[Incident, ...]
    """The newest `failed`, `skipped`, `drifted` and `rejected`, newest first."""
    closed: str = ""
    """The reason in the event `closed`, if it is the newest one."""


class View(Struct, frozen=True):
    """All of it."""

    time_seconds: float
    """Unix time of the look."""
    paths: tuple[str, ...]
    took_seconds: float
    job: JobState
    levels: tuple[LevelView, ...]
    work: tuple[Work, ...]
    agents: tuple[AgentView, ...]
    nodes: tuple[Node, ...]
    events: EventsView | None
    notes: tuple[str, ...] = ()
    """What cannot be seen from here, and what would show it."""
    problems: tuple[str, ...] = ()
    """Places and files that cannot be read."""

    def as_json(self) -> dict[str, Any]:
        """The view for other programs."""
        return {"schema": SCHEMA, **to_builtins(self)}


__all__ = [
    "ENDING",
    "RUNS",
    "SCHEMA",
    "STOPPED",
    "UNKNOWN",
    "AgentView",
    "EventsView",
    "Incident",
    "JobState",
    "LevelView",
    "Node",
    "Restart",
    "Slow",
    "View",
    "Work",
]
