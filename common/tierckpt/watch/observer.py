"""The observer: collects what one look at a job shows."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tierckpt._text import directory_of, is_url
from tierckpt.agent.protocol import TaskStatus
from tierckpt.agent.status.client import FoundAgent, find_agents
from tierckpt.config import load_config
from tierckpt.offline.catalog import Row, rows_of
from tierckpt.offline.jobs import hints_of, refuse_several_jobs
from tierckpt.offline.survey import survey
from tierckpt.storage.files import answers
from tierckpt.storage.local.claim_file import Claim, claims_in
from tierckpt.storage.memory.job_directory import JobDirectory

from .event_tails import EventTails
from .job_state import Seen, job_state
from .levels import level_views
from .persistent import PlaceView, look_at
from .view import (
    RUNS,
    UNKNOWN,
    AgentView,
    EventsView,
    Node,
    View,
    Work,
)

MOST_TIMES = 10_000
"""Number of versions whose times are kept."""
MOST_NODES = 4096
"""Number of directories whose claims are read."""


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
        """Where the job may be, if nothing is at the paths; None: nobody has looked yet."""
        self._taken: dict[tuple[int, int, str], float] = {}
        """Unix times of the versions seen so far, by generation, version and run."""

    def look(self) -> View:
        """Collect a view. Raises MissingPathError if a path does not exist and its job has nothing
        in memory, and ConfigError for the folder of several jobs."""
        begin, now = time.monotonic(), time.time()
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
            took_seconds=time.monotonic() - begin,
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
        for name in [*self._taken][:-MOST_TIMES]:
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
        """Persistent places named in claims that were not given. One that is not here (another
        machine's) is left out."""
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
    found = [claim for folder in directories[:MOST_NODES] for claim in claims_in(folder)]
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


__all__ = ["Observer"]
