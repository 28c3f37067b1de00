"""Slots: reusable shared-memory buffers, each holding one shard in file layout.

The `memory` level is the sealed slots themselves: they are files in a memory file system, so they
outlive a process that is killed, and its successor finds them by name:

    <shm_dir>/tierckpt-<uid>/<job>/r<rank>.<k>       a slot
    <shm_dir>/tierckpt-<uid>/<job>/r<rank>.lock      held by the living trainer of that rank

A slot is a seal area (one or more pages) and the shard's image, which may also be a file of its own
in the local level's directory (see `imagefile`). The seal area holds the length of
the manifest, zero while the slot is not sealed, and the manifest. Sealing writes the manifest
first and its length last, and a manifest carries its own checksum, so a process killed at any
instruction leaves either a sealed slot or an unsealed one.

Locks are POSIX record locks: the kernel drops them when the process dies, and forked children (a
DataLoader's workers, which outlive a killed parent for seconds) do not inherit them. Whoever takes
one holds the folder's gate for a moment, and whoever removes what nobody has locked has the gate
to itself: nobody comes back to what is just being removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import CorruptShardError, FormatError, TierckptError
from .filelock import try_lock
from .imagefile import LINK_SUFFIX, ImageFile, remove_image, remove_link
from .localstore import LocalStore
from .manifest import DIGEST_BYTES, Manifest
from .naming import PAGE_BYTES, round_up

_MAGIC = b"TCKPSLOT"
_SEAL_HEAD_BYTES = 24
"""Magic, length of the seal area, length of the manifest."""


class JobBusyError(TierckptError):
    """Another living process is the same rank of the same job on this machine, or another job has
    the local level's directory."""


def job_id_of(path: str | os.PathLike[str]) -> str:
    """The default job id: whoever writes to the same place is the same job, now or restarted."""
    real = os.path.realpath(path)
    slug = re.sub(r"[^A-Za-z0-9_.]+", "_", os.path.basename(real)) or "root"
    return f"{slug[:40]}-{hashlib.sha256(real.encode()).hexdigest()[:12]}"


def seal_area_bytes(blocks: int, lives: int = 1) -> int:
    """Room for a manifest with the digests of the header and `blocks` blocks (base64), and the
    lineage of `lives` lives."""
    digests = (blocks + 1) * DIGEST_BYTES * 4 // 3
    return round_up(_SEAL_HEAD_BYTES + 2048 + 48 * lives + digests, PAGE_BYTES)


class Slot:
    """One mapped segment. Owned by the process that maps it; not thread-safe."""

    def __init__(
        self, fd: int, name: str, path: Path | None, file: ImageFile | None = None
    ) -> None:
        """Take over `fd`. `path` is None for a segment that no other process can find, `file` for
        one that has the image in itself."""
        self.fd = fd
        self.name = name
        self.path = path
        self.file = file
        self._segment_bytes = os.fstat(fd).st_size
        populate = getattr(mmap, "MAP_POPULATE", 0)
        self._map = mmap.mmap(fd, self._segment_bytes, flags=mmap.MAP_SHARED | populate)
        self.seal_bytes = int.from_bytes(self._map[8:16], "little")
        self.registered_address = 0
        """Address of the image while it is page-locked for a GPU."""

    @classmethod
    def create(
        cls,
        path: Path | None,
        name: str,
        seal_bytes: int,
        image_bytes: int,
        file: ImageFile | None = None,
    ) -> Slot:
        """Make a segment with all its memory reserved now; OSError (ENOSPC) when there is none.

        `image_bytes` are those in the segment: 0 where the image is `file`.

        Reserving matters: touching a page that a full memory file system cannot give is SIGBUS.
        """
        if path is None:
            fd = _anonymous(name)
        else:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, seal_bytes + image_bytes)
            os.pwrite(fd, _MAGIC + seal_bytes.to_bytes(8, "little") + bytes(8), 0)
            return cls(fd, name, path, file)
        except OSError:
            os.close(fd)
            if path is not None:
                remove_segment(path)
            raise

    @classmethod
    def open(cls, path: Path) -> Slot | None:
        """Map an existing segment; None when it or its image is gone, or it is none of ours."""
        try:
            file = ImageFile.of(path)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        head = os.pread(fd, 16, 0)
        sound = head[:8] == _MAGIC and int.from_bytes(head[8:], "little") >= PAGE_BYTES
        if not sound or int.from_bytes(head[8:], "little") > os.fstat(fd).st_size:
            os.close(fd)
            return None
        return cls(fd, path.name, path, file)

    @property
    def image_bytes(self) -> int:
        """Room for the shard."""
        return self._segment_bytes - self.seal_bytes if self.file is None else self.file.nbytes

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return self.seal_bytes + self.image_bytes

    def image(self) -> memoryview:
        """The shard's bytes, writable; release it before `close`. Raises what `ImageFile.view`
        does."""
        if self.file is not None:
            return self.file.view()
        return memoryview(self._map)[self.seal_bytes :]

    def fits(self, seal_bytes: int, image_bytes: int, store: LocalStore | None) -> bool:
        """True when it can take such a shard as it is.

        An image in `store` becomes the shard's file there: it must be exactly as long, and nobody
        else's. Without a store, room is left for a state that grows a little.
        """
        if self.seal_bytes < seal_bytes:
            return False
        if self.file is None or store is None:
            room = self.image_bytes
            return (
                self.file is None and store is None and image_bytes <= room <= image_bytes * 5 // 4
            )
        return self.file.can_be(store, image_bytes) and self.file.is_ours_alone()

    def seal(self, manifest: bytes) -> None:
        """Declare the image complete: nothing in it changes until `unseal`."""
        room = self.seal_bytes - _SEAL_HEAD_BYTES
        if len(manifest) > room:
            raise TierckptError(f"manifest of {len(manifest)} bytes, the seal area has {room}")
        self._map[_SEAL_HEAD_BYTES : _SEAL_HEAD_BYTES + len(manifest)] = manifest
        self._map[16:24] = len(manifest).to_bytes(8, "little")

    def unseal(self) -> None:
        """Declare the image void, before its first byte changes."""
        self._map[16:24] = bytes(8)

    def manifest_bytes(self) -> bytes | None:
        """The manifest as it was sealed, unchecked; None when not sealed."""
        length = int.from_bytes(self._map[16:24], "little")
        if not 0 < length <= self.seal_bytes - _SEAL_HEAD_BYTES:
            return None
        return self._map[_SEAL_HEAD_BYTES : _SEAL_HEAD_BYTES + length]

    def manifest(self) -> Manifest | None:
        """The manifest; None when the slot is not sealed or the manifest is damaged."""
        data = self.manifest_bytes()
        if data is None:
            return None
        try:
            return Manifest.decode(data)
        except (CorruptShardError, FormatError):
            return None

    def in_use_elsewhere(self) -> bool:
        """True while another process (an agent writing it out) holds the segment."""
        return not _lockable(self.fd)

    def close(self) -> None:
        """Unmap and close; the segment stays."""
        with contextlib.suppress(BufferError):  # a view is still about: freed with it
            self._map.close()
        os.close(self.fd)
        if self.file is not None:
            self.file.close()

    def remove(self) -> None:
        """Unmap, close and delete; what was committed stays."""
        self.close()
        if self.path is not None:
            remove_segment(self.path)


def remove_segment(path: Path) -> None:
    """Delete the slot at `path`, mapped by somebody or not."""
    path.unlink(missing_ok=True)  # first: a seal must not be found without its image
    remove_image(path)


def pin(fd: int) -> None:
    """Tell other processes that this one reads the segment; until `unpin`, or its death."""
    fcntl.lockf(fd, fcntl.LOCK_SH)


def unpin(fd: int) -> None:
    """The inverse of `pin`."""
    fcntl.lockf(fd, fcntl.LOCK_UN)


def take_lock(path: Path) -> int | None:
    """Make and lock the file, with this process's id in it, until the descriptor is closed.

    None when another process holds it. Raises FileNotFoundError when the folder is gone.
    """
    with _gate(path.parent, fcntl.LOCK_SH) as folder:
        while True:
            fd = os.open(path.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=folder)
            if not try_lock(fd):
                os.close(fd)
                return None
            # Its last owner may have removed the file between our open and our lock.
            if os.fstat(fd).st_nlink:
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
                return fd
            os.close(fd)


@contextlib.contextmanager
def _gate(folder: Path, how: int) -> Iterator[int]:
    """Hold the folder itself locked, LOCK_SH or LOCK_EX, after waiting for it; gives a descriptor.

    Raises FileNotFoundError when the folder is gone.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how)
        if not os.fstat(fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        yield fd
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing would not do: a child may have been forked
        os.close(fd)


_locked_here: dict[Path, int] = {}
"""Lock files that this process holds (by path, the process's id): POSIX locks do not exclude their
own process, and closing any descriptor of the file would drop them."""


def _lockable(fd: int) -> bool:
    if not try_lock(fd):
        return False
    fcntl.lockf(fd, fcntl.LOCK_UN)
    return True


@dataclass(frozen=True)
class JobDirectory:
    """The folder in the memory file system that holds one job's segments on this machine."""

    root: Path
    job: str
    node: str = ""
    """Set where several "nodes" share a machine: each has a memory of its own."""

    @staticmethod
    def at(shm_dir: str | os.PathLike[str], job: str, node: str = "") -> JobDirectory:
        """The folder of `job` under `shm_dir`, private to this user."""
        # Absolute: agents work in another directory.
        return JobDirectory(Path(os.path.abspath(shm_dir)) / f"tierckpt-{os.getuid()}", job, node)

    @property
    def path(self) -> Path:
        """Where the segments are."""
        return self.root / (f"{self.job}@{self.node}" if self.node else self.job)

    def create(self) -> None:
        """Make the folder, readable by this user alone."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        if self.root.stat().st_uid != os.getuid():
            raise PermissionError(
                f"{self.root} belongs to another user; set shm_dir to another place"
            )
        self.path.mkdir(mode=0o700, exist_ok=True)

    def lock_rank(self, rank: int, patience_seconds: float = 15.0) -> int:
        """Become the living trainer of `rank`; returns a descriptor for `unlock_rank`.

        A predecessor that was killed a moment ago may take the kernel some time to tear down, so
        this waits `patience_seconds` before it raises JobBusyError.
        """
        path = self.lock_path(rank)
        if _locked_here.get(path) == os.getpid():
            raise JobBusyError(
                f"this process has a checkpointer for rank {rank} of job {self.job!r} already. One "
                "for all optimizers of a job: optimizer={'name': ..., 'other name': ...} (Horovod: "
                "horovod_ckpt.install with all that hvd.DistributedOptimizer returned); or close "
                "the other one first, or give this one another path"
            )
        deadline = time.monotonic() + patience_seconds
        while True:
            self.create()
            try:
                fd = take_lock(path)
            except FileNotFoundError:  # whoever had the folder before has just removed it
                continue
            if fd is not None:
                break
            if time.monotonic() > deadline:
                raise self._busy(rank, path.read_text(errors="replace").strip() or "unknown")
            time.sleep(0.05)
        _locked_here[path] = os.getpid()
        return fd

    def unlock_rank(self, rank: int, fd: int) -> None:
        """The inverse of `lock_rank`."""
        _locked_here.pop(self.lock_path(rank), None)
        os.close(fd)

    def _busy(self, rank: int, owner: str) -> JobBusyError:
        return JobBusyError(
            f"rank {rank} of job {self.job!r} is already running on this machine (process "
            f"{owner}). Two jobs cannot write to one path: give this one another path."
        )

    def segments(self) -> list[Path]:
        """Files of all slots of this job, of any rank."""
        return sorted(p for p in _listdir(self.path) if re.fullmatch(r"r\d{5,}\.\d+", p.name))

    def images(self) -> set[Path]:
        """Images of this job's slots that are files elsewhere, whether they are there or not."""
        return {link.resolve() for link in _links(self.path)}

    def slot_path(self, rank: int, index: int) -> Path:
        """File of slot `index` of `rank`."""
        return self.path / f"r{rank:05d}.{index}"

    def lock_path(self, rank: int) -> Path:
        """File that the living trainer of `rank` holds locked."""
        return self.path / f"r{rank:05d}.lock"

    def sealed(self) -> Iterator[tuple[Path, Manifest]]:
        """Every sealed slot of this job on this machine."""
        for path in self.segments():
            manifest = read_seal(path)
            if manifest is not None:
                yield path, manifest

    def damaged(self) -> Iterator[tuple[Path, CorruptShardError | FormatError]]:
        """Every slot that says it is sealed and whose manifest cannot be read, and why."""
        for path in self.segments():
            try:
                _read_seal(path)
            except (CorruptShardError, FormatError) as error:
                yield path, error
            except OSError:
                continue

    def alive(self) -> bool:
        """True while any trainer or agent of this job lives."""
        return any(not _path_lockable(p) for p in _listdir(self.path) if not p.is_symlink())

    def lives(self, rank: int) -> bool:
        """True while a trainer of that rank does, on this machine."""
        return not _path_lockable(self.lock_path(rank))

    def newest_seconds(self) -> float:
        """Unix time of the last sign of life."""
        times = [self.path.stat().st_mtime] if self.path.exists() else [0.0]
        times += [m.created_seconds for _, m in self.sealed()]
        return max(times)

    def remove(self) -> None:
        """Delete the folder and all segments in it."""
        for path in _listdir(self.path):  # in this order a slot goes before its link
            if path.is_symlink():
                remove_link(path)
            else:
                path.unlink(missing_ok=True)
        self.remove_if_unused()

    def remove_surplus(self, ranks: Collection[int], slots: int) -> bool:
        """Delete segments that a life with these `ranks` on this machine, and so many `slots` for
        each, will never use: other ranks', and those beyond. False when an agent still reads one.

        One of `ranks` that lives no more, from just now, has left there what its successor needs.
        """
        done = True
        with contextlib.suppress(FileNotFoundError), _gate(self.path, fcntl.LOCK_EX):
            for path in self.segments():
                rank, index = rank_of(path.name), int(path.name.partition(".")[2])
                if index < slots and (rank in ranks or self.lives(rank)):
                    continue
                if _path_lockable(path):
                    remove_segment(path)
                else:
                    done = False
        return done

    def remove_orphans(self) -> None:
        """Delete segments and locks of ranks that no living trainer on this machine is (the life
        before had more ranks, or had them elsewhere), and what agents left that were killed."""
        with contextlib.suppress(FileNotFoundError), _gate(self.path, fcntl.LOCK_EX):
            paths = {*self.segments(), *(link.with_suffix("") for link in _links(self.path))}
            locks = {path for path in _listdir(self.path) if path.suffix == ".lock"}
            agents = {lock for lock in locks if lock.name.startswith("agent")}
            for rank in {rank_of(path.name) for path in (*paths, *(locks - agents))}:
                if not self.lives(rank):
                    for path in (path for path in paths if rank_of(path.name) == rank):
                        remove_segment(path)
                    self.lock_path(rank).unlink(missing_ok=True)
            for lock in agents:
                if _path_lockable(lock):
                    lock.with_suffix(".socket").unlink(missing_ok=True)
                    lock.unlink(missing_ok=True)

    def remove_if_unused(self) -> None:
        """Delete the folder unless somebody else still has something in it."""
        for path in (self.path, self.root):
            with contextlib.suppress(OSError):
                path.rmdir()

    def others(self) -> list[JobDirectory]:
        """Folders of this user's other jobs."""
        return [
            JobDirectory(self.root, p.name)
            for p in _listdir(self.root)
            if p.is_dir() and p.name != self.path.name
        ]

    def remove_dead_jobs(self, linger_seconds: float) -> list[str]:
        """Delete other jobs' segments when nobody of the job lives and nobody came back in time."""
        removed = []
        for other in self.others():
            with contextlib.suppress(FileNotFoundError), _gate(other.path, fcntl.LOCK_EX):
                if not other.alive() and time.time() - other.newest_seconds() > linger_seconds:
                    other.remove()
                    removed.append(other.job)
        return removed


def _anonymous(name: str) -> int:
    try:
        return os.memfd_create(f"tierckpt-{name}")
    except AttributeError as error:  # Python was built for an old C library
        text = "this Python has no memfd_create, which slots need where shm_dir has no room"
        raise OSError(errno.ENOSYS, text) from error


def rank_of(name: str) -> int:
    """Whose slot has that name."""
    return int(name[1:].partition(".")[0])


def read_seal(path: Path) -> Manifest | None:
    """The manifest of the slot at `path` without mapping its image; None when not sealed."""
    try:
        return _read_seal(path)
    except (OSError, CorruptShardError, FormatError):
        return None


def _read_seal(path: Path) -> Manifest | None:
    with path.open("rb") as file:
        head = file.read(_SEAL_HEAD_BYTES)
        if head[:8] != _MAGIC:
            return None
        length = int.from_bytes(head[16:24], "little")
        area = int.from_bytes(head[8:16], "little")
        if not 0 < length <= area - _SEAL_HEAD_BYTES:
            return None
        return Manifest.decode(file.read(length))


def _path_lockable(path: Path) -> bool:
    if _locked_here.get(path) == os.getpid():
        return False
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EISDIR, errno.ENXIO):  # the last: a socket
            return True
        raise
    try:
        return _lockable(fd)
    finally:
        os.close(fd)


def _listdir(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except FileNotFoundError:
        return []


def _links(path: Path) -> list[Path]:
    return [p for p in _listdir(path) if p.name.endswith(LINK_SUFFIX) and p.is_symlink()]
