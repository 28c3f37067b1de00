"""The state of a job: whether it runs, by the surest sign that one look has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tierckpt.agent.status.client import RUNS as AGENT_RUNS
from tierckpt.agent.status.client import FoundAgent
from tierckpt.journal.listing import reach_of_restart
from tierckpt.offline.catalog import Row
from tierckpt.offline.survey import Survey
from tierckpt.storage.local.claim_file import Claim
from tierckpt.storage.persistent.lease import LEASE_SECONDS

from .levels import restart_of, steps_per_second
from .persistent import LeaseView, PlaceView
from .view import ENDING, RUNS, STOPPED, UNKNOWN, EventsView, JobState, Restart


@dataclass
class Seen:
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
    """The state of the job, and the reason in words; the surest sign decides."""
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


__all__ = ["Seen", "job_state"]
