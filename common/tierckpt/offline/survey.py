"""A survey: all versions in some places, seen from outside any job.

A place is a job's `path` on a node (or the folder above all nodes' paths, if they are visible
here), or its `persistent_path`. A job's memory on this machine is found by its path, by its name in
files on disk, or by the claim that it left there.
"""

from __future__ import annotations

import errno
import functools
import glob
import itertools
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tierckpt import _garbage
from tierckpt._text import directory_of, is_url
from tierckpt.config import Config, PersistentConfig, load_config
from tierckpt.core.copies import EVERYWHERE, Found, FoundParity, Location, Problem
from tierckpt.core.fork import Child, Origin
from tierckpt.core.restore_plan import RestorePlan, plan_restore
from tierckpt.core.rollback import Rollback, RollbackRequest, merged, pending
from tierckpt.errors import CorruptShardError, FormatError, PersistentError
from tierckpt.format.ids import NO_RUN, ShardKey, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.storage.files import answers
from tierckpt.storage.forks import ForkMarks, OriginFile
from tierckpt.storage.inventory import (
    look_at_local,
    look_at_memory,
    look_at_parities,
    look_at_persistent,
    look_at_rollbacks,
)
from tierckpt.storage.local.directory_claim import memory_folders
from tierckpt.storage.local.pins import LocalPins
from tierckpt.storage.local.sibling_nodes import NODE, parent_of
from tierckpt.storage.local.store import LocalStore
from tierckpt.storage.memory.job_directory import JobDirectory, is_default_id, job_id_of
from tierckpt.storage.notes import Place
from tierckpt.storage.persistent import PersistentStore, VersionManifest, VersionName
from tierckpt.storage.persistent.pins import PersistentPins
from tierckpt.storage.rollbacks import RollbackFiles
from tierckpt.storage.run_records import RunRecords
from tierckpt.storage.suspects import SuspectMarks

from .folders import MissingPathError, beside, folders_of

Where = str | os.PathLike[str]
Copy = Found | FoundParity
OpenPersistent = Callable[[str], PersistentStore]
"""Opens the persistent store at an address."""


@dataclass
class Survey:
    """The result. Only manifests were read."""

    found: list[Found] = field(default_factory=list)
    parities: list[FoundParity] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    """Manifests that cannot be used, with the reasons."""
    unseen: list[Problem] = field(default_factory=list)
    """Places and manifests that cannot be read, with the reasons."""
    pinned: set[tuple[str, int, int]] = field(default_factory=set)
    """Level, generation and version."""
    suspects: dict[VersionId, str] = field(default_factory=dict)
    """By marks on local disks and in memory."""
    requests: list[RollbackRequest] = field(default_factory=list)
    """Requests to go back (`tierckpt rollback`)."""
    rollbacks: list[Rollback] = field(default_factory=list)
    """Records of runs that went back."""
    origins: list[Origin] = field(default_factory=list)
    """Records of the version of another job that this one began from."""
    children: list[tuple[str, Child]] = field(default_factory=list)
    """Marks of forks that began from versions here, each with its level."""
    bad_notes: list[Problem] = field(default_factory=list)
    """Records of origins that cannot be read. No version needs them, but a job without versions
    does not begin."""
    runs: dict[str, set[str]] = field(default_factory=dict)
    """Names of the runs with a record, by directory."""
    manifests: dict[tuple[str, VersionName], VersionManifest] = field(default_factory=dict)
    """Those of the persistent level, by place and version."""
    open_store: OpenPersistent = PersistentStore
    living: set[str] = field(default_factory=set)
    """Jobs with a live trainer on this machine."""
    memory: list[str] = field(default_factory=list)
    """Folders in this machine's memory that were searched."""
    beside: list[str] = field(default_factory=list)
    """Folders of other nodes with newer versions, and how to include them, in words."""
    directories: list[Path] = field(default_factory=list)
    """Directories that were searched for files of the local level."""
    claims: dict[str, list[str]] = field(default_factory=dict)
    """Those of each job that may be in this machine's memory, by their claims and paths."""
    jobs: list[JobDirectory] = field(default_factory=list)
    """Folders of the jobs in this machine's memory that exist."""
    elsewhere: set[str] = field(default_factory=set)
    """Jobs with memory on this machine that no restart from these places sees: it has another job
    id, because the files here were moved or copied."""

    def open_far(self, place: Location) -> PersistentStore:
        """Open the persistent store at this place."""
        return self.open_store(place.where)

    @_garbage.paused()
    def plan(self, version: int | None = None, abandoned: bool = False) -> RestorePlan | None:
        """The plan of a restart that sees the same files, or of a `restore(version=...)`. For
        `abandoned` see `plan_restore`."""
        found = [each for each in self.found if not self.is_elsewhere(each.place)]
        if version is None and (request := self.request) is not None:
            version = request.version
        return plan_restore(
            [found],
            version=version,
            parities=[self.parities],
            began=self.began_last,
            abandoned=abandoned,
        )

    @property
    def request(self) -> RollbackRequest | None:
        """The request that the next restart carries out, if there is one."""
        return next(iter(pending(self.requests, self.record)), None)

    @property
    def record(self) -> Rollback | None:
        """The record of the last run that went back."""
        return merged(self.rollbacks)

    @property
    def began_last(self) -> tuple[int, int]:
        """The entry in the lineage of the last run that went back."""
        return self.record.entry if self.record else NO_RUN

    @property
    def begins_at(self) -> tuple[int, int]:
        """The entry in the lineage of the next run if there is a request, else of the last run that
        went back."""
        request = self.request
        return (self.generation + 1, request.version) if request else self.began_last

    @property
    def generation(self) -> int:
        """The newest generation seen; 0 without any."""
        return max([0, self.began_last[0], *(copy.key.id.generation for copy in self.copies)])

    def is_elsewhere(self, place: Location) -> bool:
        """Whether this is memory that no restart from these places sees."""
        return job_of(place) in self.elsewhere

    def suspicion(self, id_: VersionId) -> str:
        """The known or possible difference of replicas when the version was taken; empty if none is
        known."""
        said = (f.facts.suspect for f in self.found if f.key.id == id_ and f.facts.suspect)
        return self.suspects.get(id_) or next(said, "")

    @property
    def copies(self) -> list[Copy]:
        """All copies of shards, and all parity."""
        return [*self.found, *self.parities]

    @property
    def troubles(self) -> list[str]:
        """Sentences about everything that could not be read."""
        found = dict[tuple[str, str], str]()
        for each in (*self.unseen, *self.problems, *self.bad_notes):
            place, named, why = _whole(each.place.where), *_parted(each.why)
            why = why if _whole(named) == place else each.why
            # A directory may have been seen as two levels, under two names.
            found.setdefault((place, why), f"{each.place.where}: {why}")
        return list(found.values())


def _whole(place: str) -> str:
    return place if is_url(place) or answers.is_silent(place) else os.path.realpath(place)


def _parted(why: str) -> tuple[str, str]:
    """The place that a reason begins with, and the rest."""
    place, _, rest = why.partition(": ")
    return place, rest


def job_of(place: Location) -> str:
    """The job of a place in memory; empty for another level."""
    return Path(place.where).parent.name.partition("@")[0] if place.level == "memory" else ""


def why_elsewhere(job: str) -> str:
    """The reason why no restart from the places sees that job's memory, and the remedy."""
    return (
        f"memory of job {job!r}, which has another path: these files were moved from there, or "
        "copied. A restart from there finds that memory, or one with that name as its job_id "
        "(TIERCKPT_JOB_ID)"
    )


@_garbage.paused()  # an object for every copy of every rank
def survey(paths: Where | Sequence[Where], config: Config | None = None) -> Survey:
    """Look at all of `paths`, and at their jobs' memory on this machine. `config` has the jobs'
    id, node and place in memory, and their store's options; default: as the environment says.
    Raises MissingPathError if a path does not exist and its job has nothing in memory."""
    config = load_config() if config is None else config
    there = Survey(open_store=functools.partial(_open_store, config.persistent))
    jobs, own, roots = set[str](), set[str](), {JobDirectory.at(config.shm_dir, "").root}
    missing: dict[str, MissingPathError] = {}
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    places = [*dict.fromkeys(map(directory_of, given))]
    roots_of = {path: str(parent_of(path)) if NODE in path else path for path in places}
    silent = answers.silent(roots_of.values(), answers.PATIENCE_SECONDS)
    for path in places:
        if is_url(path):
            _look_at_shared(config.persistent.at(path), there)
            continue
        if (hanging := roots_of[path]) in silent:  # what is in memory is seen nevertheless
            error = answers.NoAnswerError(hanging, answers.PATIENCE_SECONDS)
            where = Location("local", socket.gethostname(), hanging)
            there.unseen.append(Problem.of(where, error))
            jobs |= {config.job_id or job_id_of(path)}
            own |= {config.job_id or job_id_of(path)}
            continue
        jobs |= {job_id_of(path), config.job_id} - {""}
        own |= {config.job_id} if config.job_id else _ids_of(path, config.node)
        folders = list[Path]()
        near = beside(path, config.job_id)
        there.beside += near
        try:
            folders = folders_of(path, there.unseen)
        except MissingPathError as error:
            text = "; ".join([str(error), *near])
            missing[config.job_id or job_id_of(path)] = MissingPathError(text)
        there.directories += folders
        for folder in folders:
            _look_at_disk(folder, there)
            _look_at_shared(config.persistent.at(str(folder)), there)
            own |= set() if config.job_id else _ids_of(str(folder), config.node)
            memories = memory_folders(folder)
            roots |= {memory.parent for memory in memories}
            names = {memory.name.partition("@")[0] for memory in memories}
            for job in names | {config.job_id or job_id_of(folder)}:
                there.claims.setdefault(job, []).append(str(folder))
    jobs |= {*_jobs_named(there), *there.claims}
    there.elsewhere = {job for job in jobs - own if config.job_id or is_default_id(job)}
    _look_at_memory(roots, jobs, there)
    in_memory = {job_of(each.place) for each in there.found}
    for job, no_directory in missing.items():
        if job not in in_memory:
            raise no_directory
    return there


def _open_store(config: PersistentConfig, where: str) -> PersistentStore:
    return PersistentStore(where, **config.at(where).options())


def _ids_of(path: str, node: str) -> set[str]:
    """Ids of the jobs that may have this `path`: literally, or with `{node}` for a part of it."""
    parts = Path(os.path.abspath(path)).parts
    templates = [Path(*parts[:i], NODE, *parts[i + 1 :]) for i in range(1, len(parts))]
    here = os.path.abspath(path).replace(node or socket.gethostname(), NODE)
    return {job_id_of(each) for each in (path, here, f"{path}/{NODE}", *map(str, templates))}


def _look_at_disk(folder: Path, there: Survey) -> None:
    store, place = (
        LocalStore(folder),
        Location("local", socket.gethostname(), str(folder.resolve())),
    )
    look_at_local(store, place, there.found, there.problems, there.unseen)
    there.parities += look_at_parities(store, place, there.problems, there.unseen)
    with suppress(OSError):  # already reported
        pins = LocalPins(folder).pinned()
        there.pinned |= {("local", id_.generation, id_.version) for id_ in pins}
        there.suspects |= SuspectMarks(folder).all()
        there.runs[place.where] = RunRecords(folder).names()
    _look_at_forks(folder, place, there)
    files = RollbackFiles(folder)
    troubles = there.problems, there.unseen
    look_at_rollbacks(files, place, there.requests, there.rollbacks, *troubles)


def _look_at_shared(config: PersistentConfig, there: Survey) -> None:
    rollbacks = there.requests, there.rollbacks
    patience = answers.PATIENCE_SECONDS
    read = look_at_persistent(
        config, there.found, there.problems, there.unseen, *rollbacks, patience
    )
    there.manifests |= {(config.path, name): manifest for name, manifest in read.items()}
    if answers.is_silent(config.path):
        return
    with suppress(Exception), closing(there.open_store(config.path)) as store:
        pins = [name.id for name in PersistentPins(store).pinned()]
        there.pinned |= {("persistent", id_.generation, id_.version) for id_ in pins}
        _look_at_forks(store, Location("persistent", EVERYWHERE, config.path), there)


def _look_at_forks(place: Place, at: Location, there: Survey) -> None:
    with suppress(OSError, PersistentError):  # reported for the versions
        there.children += [(at.level, child) for child in ForkMarks(place).all()]
        try:
            origin = OriginFile(place).read()
        except (CorruptShardError, FormatError) as error:
            why = f"{error}: the record of the version that this job begins from"
            there.bad_notes.append(Problem(at, why))
        else:
            there.origins += [origin] if origin else []


def _jobs_named(there: Survey) -> set[str]:
    """Names of the jobs by one manifest of each directory: a directory has one job."""
    newest: dict[str, ShardKey] = {}
    for each in there.found:
        if each.place.level == "local":
            newest[each.place.where] = max(each.key, newest.get(each.place.where, each.key))
    found = set()
    for where, key in newest.items():
        with suppress(Exception):
            found.add(Manifest.decode(LocalStore(where).read_manifest(key)).facts.job)
    return found


def _look_at_memory(roots: Iterable[Path], jobs: Iterable[str], there: Survey) -> None:
    for root, job in itertools.product(sorted(roots), sorted(jobs)):
        there.memory.append(str(root / job))
        if root.is_dir() and not os.access(root, os.R_OK | os.X_OK):
            why = PermissionError(errno.EACCES, "another user's")
            place = Location("memory", socket.gethostname(), str(root / job))
            there.unseen.append(Problem.of(place, why))
        with suppress(OSError):
            for folder in sorted(root.glob(f"{glob.escape(job)}*")):
                name, _, node = folder.name.partition("@")
                if name == job:
                    _look_at_slots(JobDirectory(root, job, node), there)


def _look_at_slots(job: JobDirectory, there: Survey) -> None:
    there.jobs.append(job)
    if job.trains():
        there.living.add(job.job)
    there.suspects |= SuspectMarks(job.path).all()
    host = job.node or socket.gethostname()
    _look_at_forks(job.path, Location("memory", host, str(job.path)), there)  # without a disk
    look_at_memory(job, host, there.found, there.problems, there.unseen)
