"""The jobs of a survey: one, or several, as in the folder above them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierckpt._text import counted, some
from tierckpt.errors import ConfigError

from .survey import Copy, Survey

MOST_NAMED = 8


@dataclass
class _Job:
    """Directories that belong together, by the names of jobs and runs in them."""

    places: list[str]
    names: set[str]


def jobs_in(there: Survey) -> list[list[str]]:
    """The places of each job, as they were given; one list if all are of one job.

    The directories of a job's nodes have runs in common, or the job's name: it is made from the
    `path`, so a moved job has two. Two jobs also have two runs with one number, under different
    names of the job, if one was copied from the other.
    """
    own = [copy for copy in there.copies if not there.is_elsewhere(copy.place)]
    jobs = _together(own, there)
    if len(jobs) > 1 or not _clash(own):
        return [sorted(job.places) for job in jobs]
    given = {str(folder.resolve()): str(folder) for folder in there.directories}
    local = {c.place.where for c in own if c.place.level == "local"}
    places = local or {copy.place.where for copy in own}
    return [[given.get(place, place)] for place in sorted(places)]


def _together(own: Iterable[Copy], there: Survey) -> list[_Job]:
    """The directories of the local level, joined by the names that they share."""
    names: dict[str, set[str]] = {}
    for copy in own:
        near = copy.place.level == "local"
        here = names.setdefault(copy.place.where if near else copy.facts.run_id, set())
        here |= {f"job {copy.facts.job}", f"run {copy.facts.run_id}"}
    jobs = list[_Job]()
    for folder in there.directories:
        place = str(folder.resolve())
        if place in names:
            runs = {f"run {run_id}" for run_id in there.runs.get(place, ())}
            jobs.append(_Job([str(folder)], names.pop(place) | runs))
    jobs += [_Job([], each) for each in names.values()]  # of other levels
    joined = list[_Job]()
    for job in jobs:
        same = [each for each in joined if each.names & job.names]
        for each in same:
            joined.remove(each)
            job = _Job([*each.places, *job.places], each.names | job.names)
        joined.append(job)
    return [job for job in joined if job.places]


def _clash(own: Iterable[Copy]) -> bool:
    """Whether two runs have one number, under different names of the job."""
    runs: dict[int, dict[str, set[str]]] = {}
    for copy in own:
        named = runs.setdefault(copy.key.id.generation, {})
        named.setdefault(copy.facts.run_id, set()).add(copy.facts.job)
    for first, *others in map(list, map(dict.values, runs.values())):
        if any(first.isdisjoint(other) for other in others):
            return True
    return False


def several_jobs(there: Survey) -> str:
    """A sentence if the survey is one of several jobs, else empty."""
    jobs = jobs_in(there)
    if len(jobs) < 2:
        return ""
    names = some([" and ".join(places) for places in jobs], MOST_NAMED)
    return f"{counted(len(jobs), 'job')} are here: {names}. Give the path of one of them"


def refuse_several_jobs(there: Survey, path: str) -> None:
    """Raise ConfigError if the survey is one of several jobs, as of the folder above them: of their
    versions none is the newest."""
    if several := several_jobs(there):
        raise ConfigError(f"{path}: {several}")


__all__ = ["jobs_in", "refuse_several_jobs", "several_jobs"]
