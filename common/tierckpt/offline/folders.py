"""The directories that a path means: a job's own, those of its nodes, or those of all jobs in a
folder. Only names are read."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from tierckpt.core.copies import Location, Problem
from tierckpt.core.fork import source_of
from tierckpt.errors import ConfigError
from tierckpt.format.ids import VersionId
from tierckpt.storage.files import answers
from tierckpt.storage.files.mounts import mounts_in
from tierckpt.storage.forks import is_kept
from tierckpt.storage.local.directory_claim import memory_folders
from tierckpt.storage.local.sibling_nodes import NODE, named, parent_of, siblings_of
from tierckpt.storage.local.store import LocalStore
from tierckpt.storage.memory.job_directory import job_id_of
from tierckpt.storage.persistent import PersistentStore
from tierckpt.storage.run_records import FOLDER as RUNS

FOREIGN = "lost+found"
"""A file system's own folder, which most users cannot read."""


class MissingPathError(ConfigError):
    """There is nothing at a path, nor any memory of its job."""


def folders_of(path: str, unseen: list[Problem]) -> list[Path]:
    """The directories that a path means: itself, and those in it that are a node's; in a folder
    that is no job's own place also those that are a persistent level, or may have a job in memory
    alone. Adds unreadable ones to
    `unseen`. Raises MissingPathError if the path does not exist."""
    if NODE in path:
        return _named_after_nodes(path, unseen)
    folder = Path(path)
    try:
        if not folder.is_dir():
            raise MissingPathError(
                f"{path} is not a directory; give a job's path or its persistent_path"
                + _without_version(path)
            )
        hanging = [Path(each) for each in answers.silent(mounts_in(path), answers.PATIENCE_SECONDS)]
        for each in hanging:
            _add(each, answers.NoAnswerError(str(each), answers.PATIENCE_SECONDS), unseen)
        there = (each for each in folder.iterdir() if each.absolute() not in hanging)
        inside = sorted(each for each in there if not _is_no_job(each))
    except OSError as error:
        _add(folder, error, unseen)
        return []
    own = _has_shards(folder, unseen) or _has_versions(folder)
    return [folder, *(each for each in inside if _is_place(each, unseen, own))]


def _is_place(folder: Path, unseen: list[Problem], is_inside_a_job: bool) -> bool:
    """Whether a directory has versions of the local level, or, outside of a job's own place, of
    the persistent one, or was a job's `path`, which may have versions in memory alone. Inside a
    job's path, these may be another job's."""
    if _has_shards(folder, unseen):
        return True
    return not is_inside_a_job and (_has_versions(folder) or _was_a_path(folder))


def folders_with_jobs(path: str, most: int) -> list[str]:
    """Directories in a path that are folders with jobs, at most so many; none if the path cannot be
    read."""
    found: list[str] = []
    with suppress(OSError):
        for each in sorted(Path(path).iterdir()):
            if len(found) == most:
                break
            if answers.is_silent(str(each.absolute())):
                continue
            with suppress(OSError, MissingPathError):
                if not _is_no_job(each) and each.is_dir() and folders_of(str(each), [])[1:]:
                    found.append(str(each))
    return found


def _without_version(path: str) -> str:
    """A hint if the path is one with a version, as for a fork."""
    source = source_of(path)
    if source.version is None or not Path(source.path).is_dir():
        return ""
    return f": {source.path}. (Only a fork's source takes @v{source.version} after it)"


def _is_no_job(folder: Path) -> bool:
    """Whether a folder in a job's directory belongs to the file system, or has another job's files
    that a fork keeps."""
    return folder.name == FOREIGN or is_kept(folder)


def _named_after_nodes(path: str, unseen: list[Problem]) -> list[Path]:
    before, found = len(unseen), list[Path]()
    for _, folder in named(path, _names_in(parent_of(path), unseen)):
        try:
            if folder.is_dir():
                found.append(folder)
        except OSError as error:
            _add(folder, error, unseen)
    if not found and len(unseen) == before:
        raise MissingPathError(f"there is no directory {path}, for any name in place of {NODE}")
    return found


def beside(path: str, job: str) -> list[str]:
    """Sentences about newer versions of the same job in other nodes' folders, if `path` is a
    node's. `job`: its id, if that is set."""
    if NODE in path:
        return []
    parent, node = os.path.split(os.path.abspath(path))
    template = os.path.join(parent, NODE)
    own: VersionId | None = None
    with suppress(OSError):
        keys = LocalStore(path).keys()
        own = max((key.id for key in keys), default=None)
    found = siblings_of(template, job or job_id_of(template), {node})
    return [
        f"{each.directory} has {each.newest} of the same job: to include all nodes, give "
        f"'{template}', in quotes. A restart sees only its own nodes' folders"
        for each in found[:1]
        if own is None or each.newest > own
    ]


def _names_in(folder: Path, unseen: list[Problem]) -> list[str]:
    try:
        return sorted({*os.listdir(folder)} - {FOREIGN})
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        _add(folder, error, unseen)
        return []


def _has_shards(folder: Path, unseen: list[Problem]) -> bool:
    store = LocalStore(folder)
    try:
        return folder.is_dir() and bool(store.keys() or store.parities())
    except OSError as error:
        _add(folder, error, unseen)
        return False


def _has_versions(folder: Path) -> bool:
    """Whether a directory is a persistent level with versions."""
    with suppress(OSError):  # reported for the shards
        return folder.is_dir() and bool(PersistentStore(str(folder)).versions())
    return False


def _was_a_path(folder: Path) -> bool:
    return os.path.isdir(folder / RUNS) or any(map(Path.is_dir, memory_folders(folder)))


def _add(folder: Path, error: OSError, unseen: list[Problem]) -> None:
    where = Location("local", socket.gethostname(), str(folder.absolute()))
    unseen.append(Problem.of(where, error))


__all__ = ["MissingPathError", "beside", "folders_of", "folders_with_jobs"]
