"""The folder of a job's slots in the memory file system, and the locks of its processes.

The `memory` level is the sealed slots themselves. They are files in a memory file system, so they
outlive a killed process, and its successor finds them by name:

    <shm_dir>/tierckpt-<uid>/<job>/r<rank>.<k>       a slot
    <shm_dir>/tierckpt-<uid>/<job>/r<rank>.lock      locked by the running trainer of the rank; has
                                                     its process id, the directories of its halt
                                                     requests, the place of its local level, and,
                                                     once its training has ended by itself, the
                                                     version at that end
    <shm_dir>/tierckpt-<uid>/<job>/seen.dead         since when other jobs have seen no process here

Locks are POSIX record locks: the kernel drops them when the process dies, and forked children (a
DataLoader's workers, which outlive a killed parent for seconds) do not inherit them. A process
that takes a lock holds the folder's gate shared for a moment. A process that removes unlocked
files holds the gate alone, so no process can start to use files during their removal.

The first process that finds a folder unused leaves a mark in it, `seen.dead`. Its time comes from
a clock that counts from the machine's start and cannot be set. A mark of another boot, or of a
namespace with another clock, says nothing and is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from tierckpt._process import boot_id
from tierckpt.config import Config
from tierckpt.errors import ConfigError, CorruptShardError, FormatError, TierckptError
from tierckpt.format.ids import VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.storage import answers, durable, file_lock
from tierckpt.storage.durable import plain

from .slots import LINK_SUFFIX, read_seal, remove_link, remove_segment, seal_of

if TYPE_CHECKING:
    from tierckpt.group import Node

__all__ = ["dead_seconds", "forget_dead"]


DEAD_MARK = "seen.dead"
MAX_MARK_BYTES = 4096


def dead_seconds(folder: Path) -> float:
    """Seconds since the folder was marked as unused; 0.0 if it had no mark, and is marked now. The
    caller must hold the folder's gate and have found no process in it. Raises OSError."""
    path, now_seconds = folder / DEAD_MARK, time.clock_gettime(time.CLOCK_MONOTONIC)
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
        with durable.open_plain(path) as file:
            mark = json.loads(file.read(MAX_MARK_BYTES))
        seen_seconds = float(mark["monotonic_seconds"])
        if mark["clock"] == _clock() and seen_seconds <= now_seconds:
            return now_seconds - seen_seconds
    path.write_text(json.dumps({"clock": _clock(), "monotonic_seconds": now_seconds}))
    return 0.0


def forget_dead(folder: Path) -> None:
    """Remove the mark, because the folder is in use again. Raises OSError."""
    durable.remove(folder / DEAD_MARK)


def _clock() -> str:
    """Identity of the clock: of this boot, in this namespace."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/time")
    return f"{boot_id()} {space}"


FINISHED = "finished"
"""In a lock's last line: the version with which the training of its holder has ended by itself."""
NAP_SECONDS = 0.05
MAX_BYTES = 1 << 16


class JobBusyError(TierckptError):
    """Another running process is the same rank of the same job on this machine, or another job uses
    the local level's directory."""


class JobFinishedError(JobBusyError, ConfigError):
    """The run that this start has waited for has finished its training. A start waits for a run
    that dies or is halted, to continue the same job; this one is another experiment."""

    def __init__(self, place: str, version: int) -> None:
        self.place, self.version = place, version
        super().__init__(
            f"{place} belongs to another training, which ran when this one was started, and has "
            f"finished at v{version} since: this one would take its end for its own. Give each "
            "training a path of its own. If this one is to continue from that end: start it with "
            f"rollback_to={version} (TIERCKPT_ROLLBACK_TO={version})"
        )

    def __reduce__(self) -> tuple[type[JobFinishedError], tuple[str, int]]:
        """Support pickling between processes."""
        return type(self), (self.place, self.version)


def job_id_of(path: str | os.PathLike[str]) -> str:
    """The default job id: writers to the same place are the same job, now or after a restart."""
    real = os.path.abspath(path) if answers.is_silent(str(path)) else os.path.realpath(path)
    slug = re.sub(r"[^A-Za-z0-9_.]+", "_", os.path.basename(real)) or "root"
    return f"{slug[:40]}-{hashlib.sha256(os.fsencode(real)).hexdigest()[:12]}"


def is_default_id(job: str) -> bool:
    """True if the id looks like a result of `job_id_of`: then the user has set no job_id."""
    return re.fullmatch(r"[A-Za-z0-9_.]{1,40}-[0-9a-f]{12}", job) is not None


def watched_directories(config: Config, rank: int, node: Node) -> list[str]:
    """Directories in which this rank looks for halt requests: for a node's first rank `path`, which
    may be local to the node; for rank 0 the persistent level's directory, which an operator reaches
    from anywhere."""
    found = [config.directory] if node.first == rank else []
    shared = config.persistent.path
    if rank == 0 and shared and "://" not in shared:
        found.append(shared)
    return found


class JobDirectory(Struct, frozen=True):
    """The folder in the memory file system that holds one job's segments on this machine."""

    root: Path
    job: str
    node: str = ""
    """Set when several "nodes" share a machine: each has its own memory."""

    @staticmethod
    def at(shm_dir: str | os.PathLike[str], job: str, node: str = "") -> JobDirectory:
        """The folder of `job` under `shm_dir`, private to this user."""
        # Absolute: agents work in another directory.
        return JobDirectory(Path(os.path.abspath(shm_dir)) / f"tierckpt-{os.getuid()}", job, node)

    @property
    def path(self) -> Path:
        """The folder with the segments."""
        return self.root / (f"{self.job}@{self.node}" if self.node else self.job)

    def create(self) -> None:
        """Make the folder, readable by this user alone."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        if self.root.stat().st_uid != os.getuid():
            raise PermissionError(
                f"{self.root} belongs to another user; set shm_dir to another place"
            )
        self.path.mkdir(mode=0o700, exist_ok=True)

    def lock_rank(
        self,
        rank: int,
        patience_seconds: float = 15.0,
        on_wait: Callable[[str], None] = lambda text: None,
        watches: Sequence[str] = (),
        local: str = "",
        continues_from: int = 0,
    ) -> int:
        """Become the running trainer of `rank`; returns a descriptor for `unlock_rank`. `watches`:
        directories of this trainer's halt requests, see `watched`. `local`: see `last_local`.

        The kernel may need some time to tear down a killed predecessor, so this waits
        `patience_seconds` before it raises JobBusyError; `on_wait` is called once. Raises
        JobFinishedError if the predecessor finishes meanwhile (`unlock_rank`), unless it does so at
        the version `continues_from`, and OSError if the lock is no plain file, or the folder cannot
        be made.
        """
        path = self.lock_path(rank)
        if file_lock.held_here(path):
            raise JobBusyError(
                f"this process already has a checkpointer for rank {rank} of job {self.job!r}. Use "
                "one for all optimizers of a job: optimizer={'name': ..., 'other name': ...} "
                "(Horovod: horovod_ckpt.install with all results of hvd.DistributedOptimizer); or "
                "close the other one first (in a notebook: ckpt.close(), before the cell runs "
                "again), or give this one another path"
            )
        deadline, reported = time.monotonic() + patience_seconds, False
        while True:
            self.create()
            try:
                fd = take_lock(path)
            except FileNotFoundError:  # another process has just removed the folder
                if time.monotonic() > deadline:
                    raise
                continue
            if fd is not None:
                break
            owner = path.read_text(errors="replace").partition("\n")[0].strip() or "unknown"
            if time.monotonic() > deadline:
                raise self._busy(rank, owner)
            if not reported:
                reported = True
                text = f"rank {rank} of job {self.job!r} still runs on this machine (process"
                on_wait(f"{text} {owner}): waiting at most {patience_seconds:g} s for its end")
            finished = _await(path, deadline)
            if finished not in (None, continues_from):
                raise JobFinishedError(local or f"job {self.job!r}", finished)
            time.sleep(NAP_SECONDS)
        with contextlib.suppress(OSError):
            forget_dead(self.path)
        with contextlib.suppress(OSError):  # the lock is held in any case
            lines = (str(os.getpid()), json.dumps(list(watches)), json.dumps(local))
            os.pwrite(fd, "\n".join(lines).encode(), 0)
        return fd

    def unlock_rank(self, fd: int, finished: int | None = None) -> None:
        """The inverse of `lock_rank`. `finished`: the version with which the training has ended by
        itself, for a start that waits for this rank."""
        if finished is not None:
            with contextlib.suppress(OSError):
                os.lseek(fd, 0, os.SEEK_END)
                os.write(fd, f"\n{json.dumps({FINISHED: finished})}".encode())
        file_lock.close(fd)

    def _busy(self, rank: int, owner: str) -> JobBusyError:
        return JobBusyError(
            f"rank {rank} of job {self.job!r} is already running on this machine (process "
            f"{owner}). Two jobs cannot write to one path: give this one another path, and another "
            "job_id if that is set: two jobs cannot share one either."
        )

    def segments(self) -> list[Path]:
        """Files of all slots of this job, of any rank."""
        return sorted(p for p in _listdir(self.path) if re.fullmatch(r"r\d{5,}\.\d+", p.name))

    def images(self) -> set[Path]:
        """Images of this job's slots in other directories, whether they exist or not."""
        return {link.resolve() for link in _links(self.path)}

    def slot_path(self, rank: int, index: int) -> Path:
        """File of slot `index` of `rank`."""
        return self.path / f"r{rank:05d}.{index}"

    def lock_path(self, rank: int) -> Path:
        """File that the running trainer of `rank` holds locked."""
        return self.path / f"r{rank:05d}.lock"

    def sealed(self) -> Iterator[tuple[Path, Manifest]]:
        """Every sealed slot of this job on this machine."""
        for path in self.segments():
            manifest = read_seal(path)
            if manifest is not None:
                yield path, manifest

    def damaged(self) -> Iterator[tuple[Path, CorruptShardError | FormatError | OSError]]:
        """Every slot with a seal but without a readable manifest, and the error; OSError for a slot
        that cannot be read at all."""
        for path in self.segments():
            try:
                seal_of(path)
            except FileNotFoundError:
                continue  # just removed
            except (CorruptShardError, FormatError, OSError) as error:
                yield path, error

    def alive(self) -> bool:
        """True while any trainer or agent of this job runs."""
        return any(not _unlocked(p) for p in _listdir(self.path) if not p.is_symlink())

    def trains(self) -> bool:
        """True while any trainer of this job runs; an agent alone changes no slot."""
        return any(not _unlocked(path) for path in self._rank_locks())

    def trainers(self) -> int:
        """Number of running trainers of this job."""
        return sum(not _unlocked(path) for path in self._rank_locks())

    def watched(self) -> set[str]:
        """Directories in which running trainers of this job look for halt requests. Without those
        of this process: reading its own lock file would drop the lock."""
        found = set[str]()
        for path in self._rank_locks():
            if not (file_lock.held_here(path) or _unlocked(path)):
                # A trainer of another tierckpt may have written no such line.
                with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
                    found.update(json.loads(path.read_text().split("\n")[1]))
        return found

    def last_local(self, rank: int) -> str | None:
        """Local level's directory of the last trainer with this rank here: empty if it had none,
        None if unknown. Call it before `lock_rank`, which writes the new one."""
        path = self.lock_path(rank)
        with contextlib.suppress(OSError, ValueError, IndexError):
            local = (
                None if file_lock.held_here(path) else json.loads(path.read_text().split("\n")[2])
            )
            return local if isinstance(local, str) else None
        return None

    def _rank_locks(self) -> list[Path]:
        return [p for p in _listdir(self.path) if re.fullmatch(r"r\d{5,}\.lock", p.name)]

    def has_trainer(self, rank: int) -> bool:
        """True while a trainer of this rank runs on this machine."""
        return not _unlocked(self.lock_path(rank))

    def dead_seconds(self) -> float:
        """Seconds since the folder was first found unused, as far as known; see
        `remove_dead_jobs`. The caller must hold the gate and have just found no process."""
        with contextlib.suppress(OSError):  # memory is full: nothing is lost by waiting
            return dead_seconds(self.path)
        return 0.0

    def remove(self) -> None:
        """Delete the folder and all files in it."""
        for path in _listdir(self.path):  # in order of names, so a slot goes before its link
            if path.is_symlink():
                remove_link(path)
            else:
                durable.remove(path)
        self.remove_if_unused()

    def remove_surplus(self, ranks: Collection[int]) -> bool:
        """Delete segments that a run with these `ranks` on this machine will never use: of other
        ranks. False when an agent still reads one.

        The slots of a rank in `ranks` stay even if its trainer has just ended: its successor needs
        them.
        """
        done = True
        with contextlib.suppress(FileNotFoundError), _gate(self.path, fcntl.LOCK_EX):
            for path in self.segments():
                rank = rank_of(path.name)
                if rank in ranks or self.has_trainer(rank):
                    continue
                if _unlocked(path):
                    remove_segment(path)
                else:
                    done = False
        return done

    def remove_versions(self, ids: Collection[VersionId]) -> bool:
        """Delete the sealed slots of these versions; False, with nothing deleted, while a process
        of this job runs."""
        with contextlib.suppress(FileNotFoundError), _gate(self.path, fcntl.LOCK_EX):
            if self.alive():
                return False
            for path, manifest in self.sealed():
                if manifest.id in ids:
                    remove_segment(path)
        return True

    def remove_orphans(self) -> None:
        """Delete segments and locks of ranks without a running trainer on this machine (the
        previous run had more ranks, or had them elsewhere), and files of killed agents."""
        with contextlib.suppress(FileNotFoundError), _gate(self.path, fcntl.LOCK_EX):
            paths = {*self.segments(), *(link.with_suffix("") for link in _links(self.path))}
            locks = {path for path in _listdir(self.path) if path.suffix == ".lock"}
            agents = {lock for lock in locks if lock.name.startswith("agent")}
            for rank in {rank_of(path.name) for path in (*paths, *(locks - agents))}:
                if not self.has_trainer(rank):
                    for path in (path for path in paths if rank_of(path.name) == rank):
                        remove_segment(path)
                    durable.remove(self.lock_path(rank))
            for lock in agents:
                if _unlocked(lock):
                    lock.with_suffix(".socket").unlink(missing_ok=True)
                    lock.with_suffix(".status").unlink(missing_ok=True)
                    durable.remove(lock)

    def remove_if_unused(self) -> None:
        """Delete the folder unless another process still has files in it."""
        for path in (self.path, self.root):
            with contextlib.suppress(OSError):
                path.rmdir()

    def others(self) -> list[JobDirectory]:
        """Folders of this user's other jobs."""
        return [each for each in _jobs_in(self.root) if each.path != self.path]

    def remove_dead_jobs(self, linger_seconds: float) -> list[str]:
        """Delete other jobs' segments when no process of the job runs, and none has since a job
        first found that `linger_seconds` ago. The segments may be the only copy, so
        their age by the time of day, which can be set, does not count."""
        removed = []
        for other in self.others():
            with contextlib.suppress(FileNotFoundError), _gate(other.path, fcntl.LOCK_EX):
                if other.alive():
                    with contextlib.suppress(OSError):
                        forget_dead(other.path)
                elif other.dead_seconds() >= linger_seconds:
                    other.remove()
                    removed.append(other.job)
        return removed


def jobs_at(shm_dir: str | os.PathLike[str]) -> list[JobDirectory]:
    """Folders of all of this user's jobs under `shm_dir`."""
    return _jobs_in(JobDirectory.at(shm_dir, "").root)


def _jobs_in(root: Path) -> list[JobDirectory]:
    return [JobDirectory(root, path.name) for path in _listdir(root) if path.is_dir()]


def _await(path: Path, deadline: float) -> int | None:
    """Wait until no other process has the lock, or the file has gone. Returns the version at which
    its holder's training has finished meanwhile, if it has."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        # Held open: a trainer that ends removes the file. Closed before this process locks it.
        fd = plain(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), path)
        try:
            while file_lock.held(fd):
                if time.monotonic() > deadline:
                    return None
                time.sleep(NAP_SECONDS)
            last = os.pread(fd, MAX_BYTES, 0).rpartition(b"\n")[2]
            return int(json.loads(last)[FINISHED])
        finally:
            os.close(fd)
    return None


def take_lock(path: Path) -> int | None:
    """Make and lock the file, with this process's id in it, until `file_lock.close`.

    None when another process holds it. Raises FileNotFoundError when the folder was removed,
    OSError if the path is no plain file, a link included.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with _gate(path.parent, fcntl.LOCK_SH) as folder:
        while True:
            try:
                fd = plain(os.open(path.name, flags, 0o600, dir_fd=folder), path)
            except OSError as error:
                error.filename = str(path)  # it was opened relative to the folder
                raise
            if not file_lock.lock(fd, path):
                os.close(fd)
                return None
            # Its last owner may have removed the file between our open and our lock.
            if os.fstat(fd).st_nlink:
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
                return fd
            file_lock.close(fd)


@contextlib.contextmanager
def _gate(folder: Path, how: int) -> Iterator[int]:
    """Wait for the folder's own lock, LOCK_SH or LOCK_EX, and hold it; yields a descriptor.

    Raises FileNotFoundError when the folder was removed.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how)
        if not os.fstat(fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        yield fd
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a forked child may have a copy
        os.close(fd)


def rank_of(name: str) -> int:
    """Rank of the slot or lock with this name."""
    return int(name[1:].partition(".")[0])


def _unlocked(path: Path) -> bool:
    """True when no process has it locked. Only files are locked."""
    try:
        return file_lock.unlocked(path)
    except OSError as error:
        # Only plain files can be locked; the last error is a socket's.
        if error.errno in (errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.ENXIO):
            return True
        raise


def _listdir(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except FileNotFoundError:
        return []


def _links(path: Path) -> list[Path]:
    return [p for p in _listdir(path) if p.name.endswith(LINK_SUFFIX) and p.is_symlink()]


def job_directory(config: Config) -> JobDirectory:
    """The job's folder in this node's shared memory."""
    return JobDirectory.at(config.shm_dir, config.job_id or job_id_of(config.path), config.node)
