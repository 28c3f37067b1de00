"""The history of a job and of all that came from it, as a tree: `tierckpt log`.

Runs come from their records and from the lineages of versions, so that the tree is there also for
jobs without records, and for runs of which retention has left nothing. Runs that left no version
share their generation with the run after them: only their names differ.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from tierckpt._text import directory_of, is_url
from tierckpt.config import load_config
from tierckpt.core.branches import Child
from tierckpt.errors import TierckptError
from tierckpt.format.ids import VersionId
from tierckpt.format.records import RunEnd
from tierckpt.offline.catalog import rows_of
from tierckpt.offline.survey import (
    MissingPathError,
    Survey,
    hint_of,
    jobs_in,
    survey,
    survey_of_job,
)
from tierckpt.storage.notes import FoundRuns, RunRecords

from .history import ForkNode, JobNode, RunNode, VersionNode, is_stale
from .orders import opened


def trees_of(path: str) -> list[JobNode]:
    """The histories at a path: that of its job, or of all jobs in the folder. A fork is below its
    source; the list has the others. Raises as `tree_of`."""
    there = survey(path)
    several = jobs_in(there)
    if not several[1:]:
        return [_tree(there, path, ())]
    jobs = {" ".join(places): survey(places) for places in several}
    here = {_whole(name) for name in jobs}
    # First those that are no forks of others here: their trees contain these.
    order = sorted(jobs, key=lambda name: any(o.source in here for o in jobs[name].origins))
    found, shown = list[JobNode](), set[str]()
    for name in order:
        if _whole(name) not in shown:
            found.append(_tree(jobs[name], name, ()))
            shown |= {_whole(each) for each in found[-1].every_path()}
    return found


def tree_of(path: str) -> JobNode:
    """The history of the job at a path or persistent_path, and of its forks, as far as their paths
    lead to them from here. Raises MissingPathError if there is nothing, ConfigError for the folder
    of several jobs."""
    return _tree(survey_of_job(path), path, ())


def _tree(there: Survey, path: str, seen: Iterable[str]) -> JobNode:
    """The history of the job with this survey. `seen`: jobs that are in the tree already."""
    job = JobNode(path, next(iter(there.origins), None), troubles=[*there.troubles])
    job.hint = "" if there.copies else hint_of(path, there)
    runs = _Runs(there)
    for found in _records(there, path, job.troubles):
        runs.add_records(found)
    runs.add_versions()
    runs.add_lineages()
    job.runs = runs.roots()
    _add_forks(there, runs, job, {*seen, _whole(path)})
    return job


def _whole(path: str) -> str:
    """A path as a fork's mark has it."""
    return path if is_url(path) else os.path.abspath(path)


def _records(there: Survey, path: str, troubles: list[str]) -> Iterator[FoundRuns]:
    places = {*map(str, there.directories), *([path] if is_url(path) else [])}
    places |= {c.place.where for c in there.copies if c.place.level == "persistent"}
    for place in sorted({*map(directory_of, places)}):
        try:
            with opened(place) as opened_place:
                found = RunRecords(opened_place).all()
        except (OSError, TierckptError) as error:
            troubles.append(f"the records of runs in {place}: {error}")
        else:
            troubles += found.troubles
            yield found


class _Runs:
    """The runs of one job, by generation and name."""

    def __init__(self, there: Survey) -> None:
        self._there = there
        self._nodes: dict[int, dict[str, RunNode]] = {}
        self._named: dict[str, RunNode] = {}

    def _node(self, generation: int, run_id: str) -> RunNode:
        """The run of that name. It has two generations if it took its last version once more."""
        node = self._named.get(run_id) or RunNode(generation, run_id)
        if run_id:
            self._named[run_id] = node
        return self._nodes.setdefault(generation, {}).setdefault(run_id, node)

    def add_records(self, found: FoundRuns) -> None:
        """Add the runs with a record at one place, and their ends."""
        for record in found.records:
            node = self._node(record.generation, record.run_id)
            node.record, node.started_from = record, record.started_from
            end = found.ends.get(record.run_id)
            if end and (node.end is None or _cause(end) < _cause(node.end)):
                node.end = end

    def add_versions(self) -> None:
        """Add the versions that exist, and their runs."""
        found: dict[tuple[VersionId, str], VersionNode] = {}
        for row in rows_of(self._there):
            if not row.elsewhere:
                id_ = VersionId(row.generation, row.version)
                found.setdefault((id_, row.run_id), VersionNode(id_)).add(row)
        for (id_, run_id), version in sorted(found.items(), key=lambda item: item[0]):
            self._node(id_.generation, run_id).versions.append(version)
        measured = [each for each in found.values() if each.metric is not None and each.complete]
        if measured:
            sign = 1 if self._best() == "lowest" else -1
            min(measured, key=lambda each: sign * (each.metric or 0.0)).best = True

    def _best(self) -> str:
        """Which metric is best, `lowest` or `highest`, as the job's last run had it."""
        noted = [node.record.best for node in self._in_order() if node.record and node.record.best]
        return noted[-1] if noted else load_config().best

    def add_lineages(self) -> None:
        """Add runs that are known only as ancestors, and what runs without a record restored."""
        for lineage in sorted({copy.facts.lineage for copy in self._there.copies}):
            before = 0
            for generation, version in lineage:
                node = self.of(generation)
                known = node.record or node.started_from or node.generation != generation
                if before and version and not known:
                    node.started_from = VersionId(before, version)
                before = generation

    def of(self, generation: int) -> RunNode:
        """The run with versions of this generation: of several, the last one, as it started
        when the others had left nothing."""
        if not self._nodes.get(generation):
            return self._node(generation, "")
        found = self._nodes[generation].values()
        return max(found, key=lambda each: (bool(each.versions), each.order))

    def _in_order(self) -> list[RunNode]:
        found = {node: None for named in self._nodes.values() for node in named.values()}
        return sorted(found, key=lambda each: each.order)

    def roots(self) -> list[RunNode]:
        """Put each run below the one that it came from; returns the others."""
        roots, found = list[RunNode](), self._in_order()
        for node in found:
            parent = None
            if node.started_from and node.started_from.generation in self._nodes:
                parent = self.of(node.started_from.generation)
            is_root = parent is None or parent.order >= node.order
            (roots if parent is None or is_root else parent.runs).append(node)
        if found and self._there.living and found[-1].end is None:
            found[-1].running = True
        return roots


def _cause(end: RunEnd) -> tuple[bool, float]:
    """Ends of one run that several nodes noted, in order: the first error is the cause."""
    return not end.failed, end.ended_seconds


def _add_forks(there: Survey, runs: _Runs, job: JobNode, seen: set[str]) -> None:
    children: dict[str, Child] = {}
    known = job.every_run()
    for _, child in there.children:
        if child.name not in children or child.held:
            children[child.name] = child
    for child in sorted(children.values(), key=lambda c: (c.id, c.since_seconds, c.path)):
        node = runs.of(child.id.generation)
        if node not in known:
            known.append(node)
            job.runs.append(node)
        fork = ForkNode(child)
        node.forks.append(fork)
        if child.path and child.path not in seen:
            with contextlib.suppress(MissingPathError, OSError, TierckptError):
                theirs = survey_of_job(child.path)
                fork.job = _tree(theirs, child.path, seen)
                fork.is_stale = is_stale(child, theirs)


__all__ = ["tree_of", "trees_of"]
