"""The history of a job as a tree of runs, versions and forks, and its lines for people.

Runs that came from each other are not nested: the run that leads to the newest one is on the same
level as the run that it came from, so a job with many restarts is a list. Runs that lead to
nothing newer (given up by a rollback, or dead before their first version) are below the run that
they came from. Facts are shown where they change.

A hold of a fork without an end is stale: the source was moved, so the fork did not find its
mark; or the fork was killed at the moment of its first version, and lost its record with its node.
"""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import asdict

from tierckpt._text import counted, is_url, some
from tierckpt.config import load_config
from tierckpt.core.branches import Child, Origin
from tierckpt.core.levels import MEMORY
from tierckpt.errors import TierckptError
from tierckpt.format.ids import VersionId
from tierckpt.format.records import RunEnd, RunRecord
from tierckpt.offline.catalog import Row
from tierckpt.offline.survey import Survey, survey
from tierckpt.storage.claims import NODE
from tierckpt.storage.job_directory import JobDirectory

if TYPE_CHECKING:
    from tierckpt.core.branches import Origin
    from tierckpt.format.records import RunRecord

__all__ = [
    "Branch",
    "ForkNode",
    "JobNode",
    "RunNode",
    "VersionNode",
    "branches_of",
    "is_stale",
    "job_text",
    "stale_holds",
]


class VersionNode(Struct):
    """A version that exists on some level."""

    id: VersionId
    levels: list[str] = field(default_factory=list)
    iteration: int | None = None
    metric: float | None = None
    created_seconds: float | None = None
    complete: bool = False
    next: bool = False
    """A restart takes it."""
    given_up: bool = False
    """The job went back to an older version."""
    best: bool = False
    pinned: bool = False
    held_for: list[str] = field(default_factory=list)
    suspect: str = ""

    def add(self, row: Row) -> None:
        """Add what is on one level."""
        self.levels.append(row.level)
        self.iteration = self.iteration if row.iteration is None else row.iteration
        self.metric = self.metric if row.metric is None else row.metric
        times = (self.created_seconds, row.created_seconds)
        self.created_seconds = max((t for t in times if t is not None), default=None)
        self.complete |= row.restartable
        self.next |= row.next
        self.given_up |= not row.is_past
        self.pinned |= row.pinned
        self.held_for = sorted({*self.held_for, *row.held_for})
        self.suspect = self.suspect or row.suspect

    def as_json(self) -> dict[str, Any]:
        """The version for other programs."""
        values = {"version": self.id.version, **asdict(self)}
        del values["id"]
        return values


class RunNode(Struct, eq=False):
    """A run: the versions that it took, and what came from them."""

    generation: int
    run_id: str = ""
    """Empty: known only as an ancestor of other runs."""
    started_from: VersionId | None = None
    """The version of the job that it restored; None: none, or unknown."""
    record: RunRecord | None = None
    end: RunEnd | None = None
    running: bool = False
    """A process of it lives on this machine."""
    versions: list[VersionNode] = field(default_factory=list)
    runs: list[RunNode] = field(default_factory=list)
    """Runs that started from versions of this one."""
    forks: list[ForkNode] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, float]:
        """Runs in order of time."""
        return self.generation, self.record.started_seconds if self.record else 0.0

    @property
    def start_number(self) -> int:
        """The number of the version that it restored; 0: none."""
        return self.started_from.version if self.started_from else 0

    @property
    def newest(self) -> int:
        """The newest known version of this run; the one it started with, if none is."""
        known = [self.start_number, self.end.version if self.end else 0]
        known += [each.id.version for each in self.versions]
        known += [each.start_number for each in self.runs]
        known += [each.child.id.version for each in self.forks]
        return max(known)

    def as_json(self) -> dict[str, Any]:
        """The run for other programs, without the runs that came from it."""
        end = self.end.to_json() if self.end else None
        record = self.record.to_json() if self.record else {}
        return {
            **record,
            "generation": self.generation,
            "run_id": self.run_id,
            "began": None if self.started_from is None else [*self.started_from],
            "running": self.running,
            "end": end and {key: end[key] for key in end if key != "run_id"},
            "newest": self.newest,
            "versions": [each.as_json() for each in self.versions],
            "forks": [each.as_json() for each in self.forks],
        }


class JobNode(Struct, eq=False):
    """A job, with its runs."""

    path: str
    origin: Origin | None = None
    runs: list[RunNode] = field(default_factory=list)
    """Those that started from no version of the job, oldest first."""
    troubles: list[str] = field(default_factory=list)
    """What could not be read, as text."""
    hint: str = ""
    """Where the job may be, if nothing is here."""

    def every_run(self) -> list[RunNode]:
        """All runs, oldest first; each after the run that it came from."""
        found = [*self.runs]
        for each in found:  # grows on the way
            found += each.runs
        return sorted(found, key=lambda each: each.order)

    def every_path(self) -> list[str]:
        """The paths of this job and of all forks below it that were found."""
        forks = [fork.job for run in self.every_run() for fork in run.forks if fork.job]
        return [self.path, *(path for job in forks for path in job.every_path())]

    def as_json(self) -> dict[str, Any]:
        """The history for other programs. Times are Unix times. (Of a folder with several jobs the
        command prints `path`, and `jobs`, a list of these.)

        - `path`: as given, or a fork's own; `problems`: what could not be read, as text
        - `origin`: null, or the other job's version that it started from: keys of `fork.json`
        - `runs`: a flat list, oldest first: `generation`, `run_id` (distinguishes runs that left no
          version, and share their generation with the next one), `began` (null, or generation and
          version in the list's earlier runs), `running`, `newest` (number of its newest known
          version), `end` (null, or `ended_seconds`, `reason`, `rank`, `failed`, `version`),
          `versions`, `forks`, and the keys of its record, if there is one
        - `versions` of a run: `version`, `levels`, `iteration`, `metric`, `created_seconds`, and
          `complete`, `next` (a restart takes it), `given_up`, `best`, `pinned`, `held_for`,
          `suspect`
        - `forks` of a run: `from` (generation and version), `path`, `host`, `since_seconds`,
          `held`, and `job`: null, or an object like this one
        """
        return {
            "path": self.path,
            "origin": self.origin.to_json() if self.origin else None,
            "runs": [each.as_json() for each in self.every_run()],
            "problems": self.troubles,
        }


class ForkNode(Struct, eq=False):
    """A fork of a version."""

    child: Child
    job: JobNode | None = None
    """Its own history, if its path leads to it from here."""
    is_stale: bool = False
    """The version is held for it, and it does not need it any more."""

    @property
    def waits(self) -> bool:
        """The version is held for it, and it has none of its own."""
        return self.child.held and not (self.job and any(r.versions for r in self.job.every_run()))

    def as_json(self) -> dict[str, Any]:
        """The fork for other programs."""
        return {
            "from": [*self.child.id],
            "path": self.child.path,
            "host": self.child.host,
            "since_seconds": self.child.since_seconds,
            "held": self.child.held,
            "job": self.job.as_json() if self.job else None,
        }


def is_stale(child: Child, fork: Survey) -> bool:
    """Whether the fork with this survey does not need the version held for it: it says so
    in the record of its origin, or it does not run, and has a complete version on disk. (One that
    runs ends the hold itself, a moment after its first version.)"""
    if not child.held:
        return False
    if any(origin.name == child.name and not origin.held for origin in fork.origins):
        return True
    is_here = is_url(child.path) or child.host == socket.gethostname()
    plan = fork.plan() if is_here and not fork.living else None
    return plan is not None and MEMORY not in plan.levels


def stale_holds(there: Survey) -> list[Child]:
    """The holds in a survey that their forks do not need any more, as far as the forks' paths lead
    to them from here. Reads those forks."""
    found: dict[str, Child] = {}
    for _, child in there.children:
        if child.held and child.path:
            with suppress(OSError, TierckptError):
                if is_stale(child, survey(child.path)):
                    found[child.name] = child
    return sorted(found.values(), key=lambda each: (each.id, each.path))


COMMIT_LETTERS = HASH_LETTERS = 10
MAX_STARTS = 2
"""More starts of one kind that left nothing are one line."""
UUID = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")


class Branch(Struct):
    """A line of the tree, with those below it."""

    text: str
    below: list[Branch] = field(default_factory=list)


def branches_of(job: JobNode, every: bool) -> list[Branch]:
    """The branches of a job. `every`: each version and start on a line of its own, with all
    facts."""
    return _JobLines(job, every, {}).of(job.runs)


class _JobLines:
    """Makes the lines of one job, from the top to the bottom."""

    def __init__(self, job: JobNode, every: bool, known: Mapping[str, str]) -> None:
        self._every = every
        self._known = {**known}
        """The facts of the run above."""
        self._newest: dict[int, tuple[int, float]] = {}
        """By run: the place in time of the newest run that came from it."""
        for run in reversed(job.every_run()):
            later = [self._newest[id(each)] for each in run.runs]
            self._newest[id(run)] = max([run.order, *later])

    def of(self, runs: Iterable[RunNode]) -> list[Branch]:
        """Branches of runs that started from the same run, each with those that lead on from it."""
        found: list[Branch] = []
        for _, group in groupby(runs, key=self._kind):
            same = [*group]
            if _is_bare(same[0]) and len(same) > MAX_STARTS and not self._every:
                news = self._news(same[-1].record)
                found.append(Branch(", ".join([_starts_text(same), *news])))
                continue
            for run in same:
                found += self._of_chain(run)
        return found

    def _kind(self, run: RunNode) -> object:
        """Equal for starts that can share a line. The name of a launch may differ."""
        facts = {**_facts(run.record), "launcher": ""}
        return (run.generation, run.started_from, facts) if _is_bare(run) else id(run)

    def _of_chain(self, run: RunNode) -> Iterator[Branch]:
        left: RunNode | None = run
        while left is not None:
            last = max(left.runs, key=lambda each: self._newest[id(each)], default=None)
            yield self._of_run(left, [each for each in left.runs if each is not last])
            left = last

    def _of_run(self, run: RunNode, aside: list[RunNode]) -> Branch:
        branch = Branch(", ".join([run_text(run), *self._news(run.record)]))
        branch.below += [Branch(text) for text in version_texts(run.versions, self._every)]
        for fork in run.forks:
            job = fork.job
            below = _JobLines(job, self._every, self._known).of(job.runs) if job else []
            branch.below.append(Branch(fork_text(fork), below))
        branch.below += self.of(aside)
        return branch

    def _news(self, record: RunRecord | None) -> list[str]:
        facts = _facts(record)
        new = [text for name, text in facts.items() if self._every or self._known.get(name) != text]
        self._known |= facts
        return new


# --- runs ----------------------------------------------------------------------------------------


def job_text(job: JobNode) -> str:
    """A line about a job."""
    if job.origin is None:
        return job.path
    source = job.origin.source
    there = is_url(source) or NODE in source or Path(source).is_dir()
    in_memory = JobDirectory.at(load_config().shm_dir, job.origin.job).path
    gone = "" if there or in_memory.is_dir() else ", which is not found from here"
    return f"{job.path}, a fork of {_origin_text(job.origin)}{gone}"


def _origin_text(origin: Origin) -> str:
    parts = f" ({' and '.join(origin.parts)} only)" if origin.parts else ""
    return f"{origin}{parts}"


def run_text(run: RunNode) -> str:
    """A line about a run: what it restored, how far it came, when, and how it ended."""
    record = run.record
    if record is None and not run.started_from:
        return f"run {run.generation}, nothing noted{', running' if run.running else ''}"
    start = _start_text(run)
    reached = f" to v{run.newest}" if _made_any(run, start) else ""
    text = f"run {run.generation}, from {start}{reached}"
    return text if record is None else f"{text}, {_when(record.started_seconds, run)}"


def _start_text(run: RunNode) -> str:
    if run.record and run.record.fork:
        return run.record.fork
    return f"v{run.start_number}" if run.started_from else "the beginning"


def _made_any(run: RunNode, start: str) -> bool:
    """Whether a run came further than its start. A fork's first version may have the number of
    its source's."""
    if start.endswith(f"@v{run.newest}"):
        return any(each.id.version < run.newest for each in run.versions)
    return run.newest > run.start_number


def _when(started_seconds: float, run: RunNode) -> str:
    since = _time_text(started_seconds)
    if run.end is None:
        return f"{since}, {'running' if run.running else 'no end noted'}"
    return f"{since} to {_time_text(run.end.ended_seconds, since)}, {_end_text(run)}"


def _end_text(run: RunNode) -> str:
    if run.end is None:
        return "no end noted"
    where = f" on rank {run.end.rank}" if run.end.failed else ""
    return f"{run.end.reason}{where}"


def _time_text(seconds: float, after: str = "") -> str:
    """A time; without its day if a text starts with the same."""
    text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return text[11:] if text[:10] == after[:10] else text


def _is_bare(run: RunNode) -> bool:
    return run.record is not None and not (run.versions or run.runs or run.forks or run.running)


def _starts_text(runs: list[RunNode]) -> str:
    """A line about several starts that left nothing."""
    first, last = (r.record.started_seconds for r in (runs[0], runs[-1]) if r.record)
    start = _start_text(runs[0])
    since = _time_text(first)
    ends = Counter(map(_end_text, runs)).most_common()
    return ", ".join(
        [
            f"run {runs[0].generation}, from {start}: {len(runs)} starts that left no version",
            f"{since} to {_time_text(last, since)}",
            *(f"{text} ({count})" if len(ends) > 1 else text for text, count in ends),
        ]
    )


def _facts(record: RunRecord | None) -> dict[str, str]:
    """Who started a run, how, and with what; texts by name."""
    if record is None:
        return {}
    nodes = f" on {counted(record.nodes, 'node')}" if record.nodes > 1 else ""
    shown = [n for n in record.software if n not in ("python", "numpy")]
    found = {
        "who": f"{record.user}@{record.host}" if record.user and record.host else record.host,
        "ranks": f"{counted(record.ranks, 'rank')}{nodes}",
        "launcher": UUID.sub(r"\1", record.launcher),
        "git": f"git {record.git[:COMMIT_LETTERS]}" if record.git else "",
        "command": f"command {record.command[:HASH_LETTERS]}" if record.command else "",
        "software": " ".join(f"{name} {record.software[name]}" for name in shown),
    }
    return {name: text for name, text in found.items() if text}


# --- versions and forks --------------------------------------------------------------------------


def version_texts(versions: list[VersionNode], every: bool) -> Iterator[str]:
    """Lines about versions; neighbours with the same notes share one, unless `every`."""
    if every:
        for node in versions:
            taken = [] if node.created_seconds is None else [_time_text(node.created_seconds)]
            yield ", ".join([f"v{node.id.version} {_where(node)}", *taken, *version_notes(node)])
        return
    for notes, group in groupby(versions, key=version_notes):
        same = [*group]
        first, last = same[0], same[-1]
        if first is last:
            yield ", ".join([f"v{first.id.version} {_where(first)}", *notes])
        else:
            text = f"v{first.id.version} to v{last.id.version}, {counted(len(same), 'version')}"
            yield ", ".join([text, *notes, f"the last one {_where(last)}"])


def _where(node: VersionNode) -> str:
    metric = f", metric {node.metric:.6g}" if node.metric is not None else ""
    disks = [level for level in node.levels if level != MEMORY]
    places = ["in memory"] if MEMORY in node.levels else []
    places += [f"on {' and '.join(disks)}"] if disks else []
    return f"{' and '.join(places)}{metric}"


def version_notes(node: VersionNode) -> list[str]:
    """What there is to say about a version."""
    marks = {
        "a restart takes this": node.next,
        "given up": node.given_up,
        "not complete here": not (node.complete or node.given_up),
        "best": node.best,
        "pinned": node.pinned,
        "suspect": bool(node.suspect),
    }
    held = [f"held for {some(node.held_for, 2)}"] if node.held_for else []
    return [text for text, applies in marks.items() if applies] + held


def fork_text(fork: ForkNode) -> str:
    """A line about a fork."""
    child = fork.child
    text = f"fork of v{child.id.version}: {child.path or 'unknown, as its mark cannot be read'}"
    if fork.job is None and child.path:
        text += f", not found from here (made on {child.host})" if child.host else ", not found"
    elif fork.job is not None and fork.job.origin is not None and fork.job.origin.parts:
        text += f" ({' and '.join(fork.job.origin.parts)} only)"
    if fork.is_stale:
        return f"{text}, does not need the hold any more (tierckpt unpin --forks)"
    return f"{text}, has no version of its own yet" if fork.waits else text
