"""The nodes of a history: jobs, their runs and versions, and the forks of these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tierckpt.core.fork import Child, Origin
from tierckpt.format.ids import VersionId
from tierckpt.format.run_record import RunEnd, RunRecord
from tierckpt.offline.catalog import Row


@dataclass
class VersionNode:
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
        values = {"version": self.id.version, **vars(self)}
        del values["id"]
        return values


@dataclass(eq=False)
class RunNode:
    """A run: the versions that it took, and what came from them."""

    generation: int
    run_id: str = ""
    """Empty: known only as an ancestor of other runs."""
    began: VersionId | None = None
    """The version of the job that it restored; None: none, or unknown."""
    record: RunRecord | None = None
    end: RunEnd | None = None
    running: bool = False
    """A process of it lives on this machine."""
    versions: list[VersionNode] = field(default_factory=list)
    runs: list[RunNode] = field(default_factory=list)
    """Runs that began from versions of this one."""
    forks: list[ForkNode] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, float]:
        """Runs in order of time."""
        return self.generation, self.record.started_seconds if self.record else 0.0

    @property
    def begun_at(self) -> int:
        """The number of the version that it restored; 0: none."""
        return self.began.version if self.began else 0

    @property
    def newest(self) -> int:
        """The newest version that is known of this run; that it began with, if none is."""
        known = [self.begun_at, self.end.version if self.end else 0]
        known += [each.id.version for each in self.versions]
        known += [each.begun_at for each in self.runs]
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
            "began": None if self.began is None else [*self.began],
            "running": self.running,
            "end": end and {key: end[key] for key in end if key != "run_id"},
            "newest": self.newest,
            "versions": [each.as_json() for each in self.versions],
            "forks": [each.as_json() for each in self.forks],
        }


@dataclass(eq=False)
class JobNode:
    """A job, with its runs."""

    path: str
    origin: Origin | None = None
    runs: list[RunNode] = field(default_factory=list)
    """Those that began from no version of the job, oldest first."""
    troubles: list[str] = field(default_factory=list)
    """What could not be read, in words."""
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
        - `origin`: null, or the version of another job that it began from: the keys of `fork.json`
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


@dataclass(eq=False)
class ForkNode:
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


__all__ = ["ForkNode", "JobNode", "RunNode", "VersionNode"]
