"""Orders for forks without a job: `tierckpt fork`, its inverse, and the end of holds by hand."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from tierckpt._text import directory_of, is_url, some
from tierckpt.config import PersistentConfig, load_config
from tierckpt.core.branches import Child, Origin, source_of
from tierckpt.core.restore_plan import RestorePlan
from tierckpt.errors import ConfigError, PinError, RestoreError
from tierckpt.format.records import VersionFacts
from tierckpt.offline.survey import (
    MissingPathError,
    Survey,
    hints_of,
    several_jobs,
    survey,
    survey_of_job,
)
from tierckpt.storage.claims import NODE
from tierckpt.storage.local import LocalStore
from tierckpt.storage.notes import ForkMarks, KeptFiles, OriginFile, Place
from tierckpt.storage.persistent import PersistentStore

from .source import child_of, encoded_in, new_origin, places_of


def order_fork(source: str, path: str, theirs: Survey) -> tuple[Origin, list[str]]:
    """Order that the job with this `path` (or persistent_path) starts from a version of another
    job: hold the version there, then write the record here. Returns the record, and sentences about
    what keeps the version. `theirs`: what `survey_of_job` returned for the source's path.

    A kill in between leaves a hold, which the same order takes up again. Raises ConfigError if
    there are versions already, or another order; RestoreError if there is no such version.
    """
    wanted = source_of(source)
    plan = theirs.plan(wanted.version, abandoned=True)
    facts = _facts_of(plan, theirs) if plan else None
    if facts is None:
        whole = sorted({i.version for i in _ids(theirs) if theirs.plan(i.version)})
        names = ", ".join(f"v{v}" for v in whole[-8:]) or "none"
        hint = f"; {hint}" if (hint := hints_of(wanted.path, theirs)) else ""
        raise RestoreError(
            f"there is no complete {'version' if wanted.version is None else f'v{wanted.version}'} "
            f"in {wanted.path}. Nothing was changed",
            f"Complete ones there: {names}{hint}. If other nodes have the rest: order the fork "
            f"where the job starts, TIERCKPT_FORK_FROM={source}",
        )
    here = _survey(path)
    _refuse_used(path, here)
    place = _absolute(path)
    origin = new_origin(_absolute(wanted.path), facts, place)
    if here.origins and here.origins[0].name != origin.name:
        raise ConfigError(
            f"{path} is to start from {here.origins[0]} already; `tierckpt fork --cancel {path}` "
            "takes that back"
        )
    folder = _on_this_node(path)
    sentences = _keep(theirs, origin, place, folder)
    with opened(folder) as there:
        if isinstance(there, PersistentStore):
            there.create()
        else:
            LocalStore(folder).create()
        OriginFile(there).write(origin)
    return origin, sentences


def _keep(theirs: Survey, origin: Origin, path: str, folder: str) -> list[str]:
    """Hold the version at its source, and keep its files in `folder` if on the same file system.
    Returns sentences about both."""
    id_, kept = origin.id, KeptFiles(folder, origin.name)
    places = places_of(theirs, id_)
    if not places:
        return [
            f"v{id_.version} is in memory alone, where nothing keeps it: start the new job before "
            "its own job takes further versions, or goes away"
        ]
    for where in sorted({p for each in places.values() for p in each}):
        with opened(where) as there:
            ForkMarks(there).add(child_of(origin, path))
        if not (is_url(where) or is_url(path) or encoded_in(theirs, id_, where)):
            with contextlib.suppress(OSError):  # another file system
                kept.link(directory_of(where), id_)
    sentences = [f"v{id_.version} is held there until this job has a version of its own on disk"]
    if kept.folder.is_dir() and survey(str(kept.folder)).plan(id_.version, abandoned=True):
        sentences.append(
            f"its files have second names in {folder} (hard links) until then: the source may be "
            "deleted"
        )
    return sentences


def _facts_of(plan: RestorePlan, there: Survey) -> VersionFacts | None:
    found = (copy.facts for copy in there.copies if copy.key.id == plan.id)
    return next((facts for facts in found if facts.run_id == plan.run_id), None)


def _ids(there: Survey) -> set[Any]:
    return {copy.key.id for copy in there.copies}


def _refuse_used(path: str, here: Survey) -> None:
    if here.living:
        raise ConfigError(f"{path} is in use by a running job; end it, or give another path")
    if several := several_jobs(here):
        raise ConfigError(
            f"{path} has checkpoints already: {several}, or another path for the new job"
        )
    if here.copies:
        names = some([f"v{n}" for n in sorted({i.version for i in _ids(here)})])
        raise ConfigError(
            f"{path} has checkpoints already ({names}), and its job continues with these. Give "
            "another path"
        )


def cancel_fork(path: str) -> Origin | None:
    """Take an order back: remove the record, then the hold at the source. None if the record was
    damaged: then the hold is unknown, and stays. Raises ConfigError without an order, or if the job
    has versions of its own."""
    here = survey(path)
    if here.bad_notes and not (here.origins or here.copies or here.living):
        _remove_record(path, here)
        return None
    if not here.origins:
        several = several_jobs(here)
        text = f"{path}: there is no order to start from another job's version"
        raise ConfigError(f"{text}: {several}" if several else text)
    origin = here.origins[0]
    if here.copies or here.living:
        raise ConfigError(
            f"{path}: its job has started from {origin}, which cannot be taken back. The record "
            "stays, as a part of its history"
        )
    _remove_record(path, here)
    with contextlib.suppress(MissingPathError):
        _on_marks(survey(origin.source), origin.name, lambda m: m.remove(origin.id, origin.name))
    return origin


def _remove_record(path: str, here: Survey) -> None:
    for where in [path] if is_url(path) else map(str, here.directories):
        with opened(where) as place:
            OriginFile(place).remove()
        if not is_url(where):
            KeptFiles.remove_all(where)


def end_holds(path: str, version: int) -> list[str]:
    """Turn all holds of a version into notes; returns the paths of the forks that had them. Raises
    PinError if no fork holds it, ConfigError for the folder of several jobs."""
    there = survey_of_job(path)
    held = {c.name: c for _, c in there.children if c.held and c.id.version == version}
    if not held:
        others = sorted({c.id.version for _, c in there.children if c.held})
        names = ", ".join(f"v{each}" for each in others) or "none"
        raise PinError(f"{path}: no fork holds v{version}; versions that are held: {names}")
    for child in held.values():
        _on_marks(there, child.name, functools.partial(_release, child))
    return sorted(child.path or "unknown" for child in held.values())


def _release(child: Child, marks: ForkMarks) -> None:
    marks.release(child.id, child.name)


def _on_marks(there: Survey, name: str, change: Callable[[ForkMarks], Any]) -> None:
    places = {directory_of(child.where) for _, child in there.children if child.name == name}
    for place in sorted(places):
        with opened(place) as found:
            change(ForkMarks(found))


def _survey(path: str) -> Survey:
    with contextlib.suppress(MissingPathError):
        return survey(path)
    return Survey()


def _on_this_node(path: str) -> str:
    """The directory of a path with `{node}` on this node; the ranks on the others ask this one."""
    return path if is_url(path) else path.replace(NODE, load_config().here)


def _absolute(path: str) -> str:
    return path if is_url(path) else os.path.realpath(path)


@contextlib.contextmanager
def opened(path: str) -> Iterator[Place]:
    """A place for notes: a directory as it is, the store of a URL."""
    if not is_url(path):
        yield path
        return
    there: PersistentConfig = load_config().persistent.at(path)
    with contextlib.closing(PersistentStore(there.path, **there.options())) as store:
        yield store


__all__ = ["cancel_fork", "end_holds", "order_fork"]
