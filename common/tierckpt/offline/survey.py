"""A survey: all versions in some places, seen from outside any job, and the jobs they are of.

A place is a job's `path` on a node (or the folder above all nodes' paths, if they are visible
here), or its `persistent_path`, or a folder with all of several jobs. To find the directories that
a path means, only names are read. A job's memory on this machine is found by its path, by its name
in files on disk, or by the claim that it left there.
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
from pathlib import Path

from msgspec import Struct, field

from tierckpt import _process
from tierckpt._text import counted, directory_of, is_url, some
from tierckpt.config import Config, PersistentConfig, load_config
from tierckpt.core.branches import (
    Child,
    Origin,
    Rollback,
    RollbackRequest,
    merged_rollbacks,
    pending_request,
    source_of,
)
from tierckpt.core.restore_plan import (
    EVERYWHERE,
    Found,
    FoundParity,
    Location,
    Problem,
    RestorePlan,
    plan_restore,
)
from tierckpt.errors import ConfigError, CorruptShardError, FormatError, PersistentError
from tierckpt.format.ids import NO_RUN, ShardKey, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.storage import answers
from tierckpt.storage.claims import NODE, memory_folders, node_named, parent_of, siblings_of
from tierckpt.storage.durable import mounts_in
from tierckpt.storage.inventory import (
    look_at_local,
    look_at_memory,
    look_at_parities,
    look_at_persistent,
    look_at_rollbacks,
)
from tierckpt.storage.job_directory import JobDirectory, is_default_id, job_id_of
from tierckpt.storage.local import LocalStore
from tierckpt.storage.marks import LocalPins, PersistentPins, local_suspects
from tierckpt.storage.notes import RUNS_FOLDER as RUNS
from tierckpt.storage.notes import ForkMarks, OriginFile, Place, RollbackFiles, RunRecords, is_kept
from tierckpt.storage.persistent import PersistentStore, VersionManifest, VersionName

__all__ = [
    "MissingPathError",
    "beside",
    "folders_of",
    "folders_with_jobs",
    "hint_of",
    "hints_of",
    "jobs_in",
    "refuse_several_jobs",
    "several_jobs",
    "survey_of_job",
    "where_jobs_are",
]


FOREIGN = "lost+found"
"""A file system's own folder, which most users cannot read."""


class MissingPathError(ConfigError):
    """There is nothing at a path, nor any memory of its job."""


def folders_of(path: str, unseen: list[Problem]) -> list[Path]:
    """The directories that a path means: itself, and those in it that are a node's; in a folder
    other than a job's own place also those that are a persistent level, or may have a job in memory
    alone. Adds unreadable ones to `unseen`. Raises MissingPathError if the path does not exist."""
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
    for _, folder in node_named(path, _names_in(parent_of(path), unseen)):
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
    node's. `job`: its id, if set."""
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


Where = str | os.PathLike[str]
Copy = Found | FoundParity
OpenPersistent = Callable[[str], PersistentStore]
"""Opens the persistent store at an address."""


class Survey(Struct):
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
    """Records of the version of another job that this one started from."""
    children: list[tuple[str, Child]] = field(default_factory=list)
    """Marks of forks that started from versions here, each with its level."""
    bad_notes: list[Problem] = field(default_factory=list)
    """Records of origins that cannot be read. No version needs them, but a job without versions
    does not start."""
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
    """Folders of other nodes with newer versions, and how to include them, as text."""
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

    @_process.collector_paused()
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
            rollback=self.rollback_run,
            abandoned=abandoned,
        )

    @property
    def request(self) -> RollbackRequest | None:
        """The request that the next restart carries out, if there is one."""
        return next(iter(pending_request(self.requests, self.record)), None)

    @property
    def record(self) -> Rollback | None:
        """The record of the last run that went back."""
        return merged_rollbacks(self.rollbacks)

    @property
    def rollback_run(self) -> tuple[int, int]:
        """The entry in the lineage of the last run that went back."""
        return self.record.entry if self.record else NO_RUN

    @property
    def next_run(self) -> tuple[int, int]:
        """The entry in the lineage of the next run if there is a request, else of the last run that
        went back."""
        request = self.request
        return (self.generation + 1, request.version) if request else self.rollback_run

    @property
    def generation(self) -> int:
        """The newest generation seen; 0 without any."""
        return max([0, self.rollback_run[0], *(copy.key.id.generation for copy in self.copies)])

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
            place, named, why = _whole(each.place.where), *_split_reason(each.why)
            why = why if _whole(named) == place else each.why
            # A directory may have been seen as two levels, under two names.
            found.setdefault((place, why), f"{each.place.where}: {why}")
        return list(found.values())


def _whole(place: str) -> str:
    return place if is_url(place) or answers.is_silent(place) else os.path.realpath(place)


def _split_reason(why: str) -> tuple[str, str]:
    """The place that a reason starts with, and the rest."""
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


@_process.collector_paused()  # an object for every copy of every rank
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
        pins = LocalPins(folder).marked()
        there.pinned |= {("local", id_.generation, id_.version) for id_ in pins}
        there.suspects |= local_suspects(folder).texts()
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
        pins = [name.id for name in PersistentPins(store).marked()]
        there.pinned |= {("persistent", id_.generation, id_.version) for id_ in pins}
        _look_at_forks(store, Location("persistent", EVERYWHERE, config.path), there)


def _look_at_forks(place: Place, at: Location, there: Survey) -> None:
    with suppress(OSError, PersistentError):  # reported for the versions
        there.children += [(at.level, child) for child in ForkMarks(place).all()]
        try:
            origin = OriginFile(place).read()
        except (CorruptShardError, FormatError) as error:
            why = f"{error}: the record of the version that this job starts from"
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
    there.suspects |= local_suspects(job.path).texts()
    host = job.node or socket.gethostname()
    _look_at_forks(job.path, Location("memory", host, str(job.path)), there)  # without a disk
    look_at_memory(job, host, there.found, there.problems, there.unseen)


MAX_NAMED = 8


class _Job(Struct):
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
    names = some([" and ".join(places) for places in jobs], MAX_NAMED)
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
        text = f"the versions of a job are in {some(inside, MAX_NAMED)}"
        return f"{text}. Give {'one of them; one is enough' if inside[1:] else 'that path'}"
    return hint_of(path, there) or "give a job's path or its persistent_path"


def hint_of(path: str, there: Survey) -> str:
    """Where the checkpoints may be, if there are none at a path: below it, or, of a URL, without
    the version after it. A sentence; empty if nothing is known. May ask the store."""
    if not is_url(path):
        return _below(folders_with_jobs(path, MAX_NAMED + 1))
    source = source_of(path)
    if source.version is not None:
        text = f"only a fork's source takes @v{source.version} after it; give {source.path}"
        return f"{text}, if you mean that"
    with suppress(Exception), closing(there.open_store(path)) as store:
        folders = [name.rstrip("/") for name in store.backend.sizes() if name.endswith("/")]
        return _below([f"{path.rstrip('/')}/{name}" for name in folders if name != RUNS])
    return ""


def hints_of(paths: Where | Sequence[Where], there: Survey) -> str:
    """The hints of all these paths, if the survey found nothing at any of them."""
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    known = [each for each in given if not answers.is_silent(os.fspath(each))]
    hints = [] if there.copies else [hint_of(os.fspath(each), there) for each in known]
    return "; ".join(filter(None, hints))


def _below(folders: list[str]) -> str:
    names = some(sorted(folders), MAX_NAMED)
    return f"there are folders below it: {names}; give one of them" if folders else ""
