"""The jobs of a survey: one, or several, as in the folder above them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

from tierckpt._text import counted, is_url, some
from tierckpt.core.fork import source_of
from tierckpt.errors import ConfigError
from tierckpt.storage.files import answers
from tierckpt.storage.run_records import FOLDER as RUNS

from .folders import folders_with_jobs
from .survey import Copy, Survey, Where, survey

MOST_NAMED = 8


@dataclass
class _Job:
    """Places that belong together, by the names of jobs and runs in them."""

    names: set[str]
    near: set[str] = field(default_factory=set)
    """Directories of the local level, as they were given."""
    far: set[str] = field(default_factory=set)
    """Places of the persistent level. A job has several only if it was moved."""


def jobs_in(there: Survey) -> list[list[str]]:
    """The places of each job, as they were given; one list if all are of one job.

    The directories of a job's nodes have runs in common, or the job's name: it is made from the
    `path`, so a moved job has two. Two jobs also have two runs with one number, under different
    names of the job, if one was copied from the other.
    """
    own = [copy for copy in there.copies if not there.is_elsewhere(copy.place)]
    jobs = _together(own, there)
    near = [sorted(job.near) for job in jobs if job.near]
    far = [sorted(job.far) for job in jobs if job.far]
    several = [sorted(job.near or job.far) for job in jobs if job.near or job.far]
    if len(near) < 2 and len(far) < 2:
        several = []
    if not several and _clash(own):
        places = [place for job in jobs for place in (*job.near, *job.far)]
        several = [[each] for each in places or sorted({copy.facts.job for copy in own})]
    return sorted(several or near or far)


def _together(own: Iterable[Copy], there: Survey) -> list[_Job]:
    """The places, joined by the names that they share."""
    given = {str(folder.resolve()): str(folder) for folder in there.directories}
    found: dict[tuple[str, str], _Job] = {}
    for copy in own:
        level = copy.place.level
        place = copy.place.where if level != "memory" else copy.facts.job
        job = found.get((level, place))
        if job is None:
            job = found[level, place] = _Job({f"run {name}" for name in there.runs.get(place, ())})
            job.near |= {given.get(place, place)} if level == "local" else set()
            job.near |= set(there.claims.get(place, ())) if level == "memory" else set()
            job.far |= {place} if level == "persistent" else set()
        job.names |= {f"job {copy.facts.job}", f"run {copy.facts.run_id}"}
    for name in there.living - there.elsewhere:  # one without a version, too
        job = found.setdefault(("memory", name), _Job({f"job {name}"}))
        job.near |= set(there.claims.get(name, ()))
    joined = list[_Job]()
    for job in found.values():
        for same in [each for each in joined if each.names & job.names]:
            joined.remove(same)
            job = _Job(same.names | job.names, same.near | job.near, same.far | job.far)
        joined.append(job)
    return joined


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


def survey_of_job(path: str) -> Survey:
    """The survey of one job's path. Raises MissingPathError if there is nothing, ConfigError for
    the folder of several jobs."""
    there = survey(path)
    refuse_several_jobs(there, path)
    return there


def where_jobs_are(path: str) -> str:
    """The jobs to which the path of a place that no job has used may lead, as a sentence with the
    remedy. Raises MissingPathError if there is nothing at all."""
    there = survey(path)
    inside = [str(each) for each in there.directories if str(each) != path]
    if several := several_jobs(there):
        return several
    if inside:
        text = f"the versions of a job are in {some(inside, MOST_NAMED)}"
        return f"{text}. Give {'one of them; one is enough' if inside[1:] else 'that path'}"
    return hint_of(path, there) or "give a job's path or its persistent_path"


def hint_of(path: str, there: Survey) -> str:
    """Where the checkpoints may be, if there are none at a path: below it, or, of a URL, without
    the version after it. A sentence; empty if nothing is known. May ask the store."""
    if not is_url(path):
        return _below(folders_with_jobs(path, MOST_NAMED + 1))
    source = source_of(path)
    if source.version is not None:
        text = f"only a fork's source takes @v{source.version} after it; give {source.path}"
        return f"{text}, if that is what you mean"
    with suppress(Exception), closing(there.open_store(path)) as store:
        folders = [name.rstrip("/") for name in store.notes() if name.endswith("/")]
        return _below([f"{path.rstrip('/')}/{name}" for name in folders if name != RUNS])
    return ""


def hints_of(paths: Where | Sequence[Where], there: Survey) -> str:
    """The hints of all these paths, if the survey found nothing at any of them."""
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    known = [each for each in given if not answers.is_silent(os.fspath(each))]
    hints = [] if there.copies else [hint_of(os.fspath(each), there) for each in known]
    return "; ".join(filter(None, hints))


def _below(folders: list[str]) -> str:
    names = some(sorted(folders), MOST_NAMED)
    return f"there are folders below it: {names}; give one of them" if folders else ""


__all__ = [
    "hint_of",
    "hints_of",
    "jobs_in",
    "refuse_several_jobs",
    "several_jobs",
    "survey_of_job",
    "where_jobs_are",
]
