"""The history of a job and of all that came from it, as a tree: `tierckpt log`.

Runs come from their records and from the lineages of versions, so that the tree is there also for
jobs without records, and for runs of which retention has left nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tierckpt._text import directory_of, is_url
from tierckpt.config import load_config
from tierckpt.core.fork import Child, Origin
from tierckpt.errors import TierckptError
from tierckpt.format.ids import VersionId
from tierckpt.format.run_record import RunRecord
from tierckpt.offline.catalog import Row, rows_of
from tierckpt.offline.survey import MissingPathError, Survey, survey
from tierckpt.storage.run_records import RunRecords

from .orders import opened


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


@dataclass
class RunNode:
    """A run: the versions that it took, and what came from them."""

    generation: int
    began: VersionId | None = None
    """The version of the job that it restored; None: none, or unknown."""
    record: RunRecord | None = None
    versions: list[VersionNode] = field(default_factory=list)
    runs: list[RunNode] = field(default_factory=list)
    """Runs that began from versions of this one."""
    forks: list[ForkNode] = field(default_factory=list)

    @property
    def newest(self) -> int:
        """The newest version that is known of this run; that it began with, if none is."""
        known = [each.id.version for each in self.versions]
        known += [each.began.version for each in self.runs if each.began]
        known += [each.child.id.version for each in self.forks]
        return max(known, default=self.began.version if self.began else 0)

    def as_json(self) -> dict[str, Any]:
        """The run for other programs."""
        record = self.record.to_json() if self.record else {}
        return {
            **record,
            "generation": self.generation,
            "began": None if self.began is None else [*self.began],
            "versions": [each.as_json() for each in self.versions],
            "runs": [each.as_json() for each in self.runs],
            "forks": [each.as_json() for each in self.forks],
        }


@dataclass
class JobNode:
    """A job, with the runs that began from no version of its own."""

    path: str
    origin: Origin | None = None
    runs: list[RunNode] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    """What could not be read, in words."""

    def every_run(self) -> list[RunNode]:
        """All runs, a run before those that came from it."""
        found, left = [], [*self.runs]
        while left:
            found.append(left.pop(0))
            left += found[-1].runs
        return found

    def as_json(self) -> dict[str, Any]:
        """The tree for other programs."""
        return {
            "path": self.path,
            "origin": self.origin.to_json() if self.origin else None,
            "runs": [each.as_json() for each in self.runs],
            "problems": self.troubles,
        }


@dataclass
class ForkNode:
    """A fork of a version."""

    child: Child
    job: JobNode | None = None
    """Its own history, if its path leads to it from here."""

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


def tree_of(path: str, seen: Iterable[str] = ()) -> JobNode:
    """The history of the job at a path or persistent_path, and of its forks, as far as their paths
    lead to them from here. `seen`: jobs that are in the tree already. Raises MissingPathError if
    there is nothing."""
    there = survey(path)
    job = JobNode(path, next(iter(there.origins), None), troubles=there.troubles)
    records = {record.generation: record for record in _records(there, path)}
    nodes = {g: RunNode(g, record.began, record) for g, record in records.items()}
    _add_lineages(there, nodes)
    _add_versions(there, nodes)
    for generation in sorted(nodes):
        node = nodes[generation]
        parent = nodes.get(node.began.generation) if node.began else None
        (job.runs if parent is None or parent is node else parent.runs).append(node)
    _add_forks(there, nodes, job, {*seen, path})
    return job


def _records(there: Survey, path: str) -> list[RunRecord]:
    places = {*map(str, there.directories), *([path] if is_url(path) else [])}
    places |= {c.place.where for c in there.copies if c.place.level == "persistent"}
    found: dict[str, RunRecord] = {}
    for place in sorted(map(directory_of, places)):
        with contextlib.suppress(OSError, TierckptError), opened(place) as opened_place:
            for record in RunRecords(opened_place).all():
                found.setdefault(record.run_id, record)
    return sorted(found.values(), key=lambda each: (each.generation, each.started_seconds))


def _add_lineages(there: Survey, nodes: dict[int, RunNode]) -> None:
    for lineage in sorted({copy.facts.lineage for copy in there.copies}):
        before = 0
        for generation, version in lineage:
            node = nodes.setdefault(generation, RunNode(generation))
            if node.record is None and before and node.began is None:
                node.began = VersionId(before, version)
            before = generation


def _add_versions(there: Survey, nodes: dict[int, RunNode]) -> None:
    found: dict[VersionId, VersionNode] = {}
    for row in rows_of(there):
        if not row.elsewhere:
            id_ = VersionId(row.generation, row.version)
            found.setdefault(id_, VersionNode(id_)).add(row)
    sign = 1 if load_config().best == "lowest" else -1
    measured = [each for each in found.values() if each.metric is not None and each.complete]
    if measured:
        min(measured, key=lambda each: sign * (each.metric or 0.0)).best = True
    for id_ in sorted(found):
        nodes.setdefault(id_.generation, RunNode(id_.generation)).versions.append(found[id_])


def _add_forks(there: Survey, nodes: dict[int, RunNode], job: JobNode, seen: set[str]) -> None:
    children: dict[str, Child] = {}
    for _, child in there.children:
        if child.name not in children or child.held:
            children[child.name] = child
    for child in sorted(children.values(), key=lambda c: (c.id, c.since_seconds, c.path)):
        if (node := nodes.get(child.id.generation)) is None:
            node = nodes[child.id.generation] = RunNode(child.id.generation)
            job.runs.append(node)
        fork = ForkNode(child)
        node.forks.append(fork)
        if child.path and child.path not in seen:
            with contextlib.suppress(MissingPathError, OSError, TierckptError):
                fork.job = tree_of(child.path, seen)


__all__ = ["ForkNode", "JobNode", "RunNode", "VersionNode", "tree_of"]
