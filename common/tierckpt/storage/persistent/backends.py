"""Selection of the backend for an address, and the backend of a directory. Packages add backends
by entry points.

A directory may be of a parallel (or any) file system. `put` writes a temporary file, syncs it,
renames it, and syncs the directory, in this order. `write_at` needs no temporary name, because a
shared file counts only after a record elsewhere says so.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierckpt import _entry_points, _faults
from tierckpt._text import directory_of, is_url
from tierckpt.errors import ConfigError
from tierckpt.format.ids import PAGE_BYTES
from tierckpt.storage import answers, durable
from tierckpt.storage.durable import open_plain

from . import object_stores
from .backend import Backend, Content

__all__ = ["GROUP", "open_backend"]


GROUP = "tierckpt.backends"
"""Name of the group of entry points."""


def open_backend(path: str | os.PathLike[str], **storage_options: Any) -> Backend:
    """The backend of a directory, of a URL with its own entry point, or of a client's URL.

    An entry point of the group `tierckpt.backends`, named as the URL's scheme, is called with the
    URL and `storage_options`; else the options go to the client (keys, endpoint): obstore for the
    URLs of object stores, fsspec for all others. Raises ConfigError if the package for this kind of
    URL is not installed, or the entry point fails; `answers.NoAnswerError` for a place known to
    hang.
    """
    place = os.fspath(path) if is_url(path) else directory_of(path)
    if answers.is_silent(place):
        raise answers.NoAnswerError(place)
    if is_url(path):
        scheme = os.fspath(path).partition("://")[0]
        make_backend = _entry_points.find(GROUP, "backend", scheme, ConfigError)
        if make_backend is not None:
            return make_backend(os.fspath(path), **storage_options)  # type: ignore[no-any-return]
        return _of_url(os.fspath(path), **storage_options)

    try:
        return PosixBackend(directory_of(path), **storage_options)
    except TypeError:
        names = ", ".join(sorted(storage_options))
        raise ConfigError(
            f"{path} is a directory: its storage options are direct and shared_writes, not {names}"
        ) from None


def _of_url(url: str, **storage_options: Any) -> Backend:
    if url.partition("://")[0] in object_stores.SCHEMES:
        from .object_stores import ObstoreBackend

        return ObstoreBackend(url, **storage_options)
    from .object_stores import FsspecBackend

    return FsspecBackend(url, **storage_options)


STILL_READ = ".nfs"
"""Prefix of NFS clients for files that were removed while open."""

_serial = itertools.count()


class PosixBackend:
    """Backend on a directory, see `backend.Backend`. Threads may share one, and any number of
    processes a directory.

    `direct` bypasses the page cache for shards: worth a try if the clients' caches are small; not
    every parallel file system gains from it. If the file system refuses it, the cache is used. Set
    `shared_writes=False` for file systems with clients that do not see each other's writes at once
    (NFS): every writer then has its own files.
    """

    in_parts = False

    def __init__(self, path: str, direct: bool = False, shared_writes: bool = True) -> None:
        self.root = Path(os.path.abspath(path))
        self.url = str(self.root)
        self.direct, self.shared_writes = direct, shared_writes

    def create(self) -> None:
        """Create the directory durably, but not its parents: an unmounted file system would
        otherwise be created on the node's own disk."""
        try:
            durable.make(self.root, parents=False)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                errno.ENOENT, f"{self.root.parent} does not exist: is it mounted?"
            ) from error

    def close(self) -> None:
        """Does nothing: no file is open."""

    # --- writing -------------------------------------------------------------------------------

    def put(self, name: str, content: Content, nbytes: int, exclusive: bool = False) -> None:
        """See `Backend.put`. `exclusive` creates a hard link, which fails if the name exists."""
        path = self._with_folder(name)
        temp = path.parent / f".{path.name}.{_writer_tag()}.{next(_serial)}.tmp"
        try:
            _faults.point("file", op="open", target=path.name)
            with _opened(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                _write(fd, 0, content)
            _faults.point("file", op="rename", target=path.name)
            if exclusive:
                os.link(temp, path)
            else:
                os.rename(temp, path)
        finally:
            with contextlib.suppress(OSError):
                temp.unlink(missing_ok=True)
        self._sync_directory(path.parent)

    def write_at(self, name: str, offset: int, content: Content) -> None:
        """See `Backend.write_at`."""
        path = self._with_folder(name)
        _faults.point("file", op="open", target=path.name)
        flags = os.O_WRONLY | os.O_CREAT
        direct = self.direct and offset % PAGE_BYTES == 0
        try:
            with _opened(path, flags | (os.O_DIRECT if direct else 0)) as fd:
                _write(fd, offset, content)
        except OSError as error:
            if not (direct and error.errno == errno.EINVAL):
                raise
            with _opened(path, flags) as fd:
                _write(fd, offset, content)
        self._sync_directory(path.parent)

    def _with_folder(self, name: str) -> Path:
        """Path of the file. Creates its folders, but not the root: an unmounted file system must
        not be created on the node's disk."""
        path = self.root / name
        for folder in reversed(path.relative_to(self.root).parents[:-1]):
            if not (self.root / folder).is_dir():
                _faults.point("file", op="mkdir")
                durable.make_one(self.root / folder)
                self._sync_directory((self.root / folder).parent)
        return path

    # --- reading -------------------------------------------------------------------------------

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `Backend.read`."""
        with open_plain(self.root / name, buffering=0) as file:
            left = os.fstat(file.fileno()).st_size - offset
            left = max(0, left if nbytes is None else min(left, nbytes))
            data = b""
            while len(data) < left:  # one call, except for gigabytes
                more = os.pread(file.fileno(), left - len(data), offset + len(data))
                if not more:
                    break
                data = data + more if data else more
            return data

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """See `Backend.read_into`."""
        done = 0
        with open_plain(self.root / name, buffering=0) as file:
            while done < len(into):
                got = os.preadv(file.fileno(), [into[done:]], offset + done)
                if not got:
                    break
                done += got
        return done

    def size(self, name: str) -> int:
        """See `Backend.size`."""
        return (self.root / name).stat().st_size

    def sizes(self, folder: str = "") -> dict[str, int]:
        """See `Backend.sizes`."""
        found = {}
        try:
            with os.scandir(self.root / folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    with contextlib.suppress(FileNotFoundError):  # removed after the listing
                        is_folder, nbytes = _look_at(entry)
                        found[f"{entry.name}/" if is_folder else entry.name] = nbytes
        except FileNotFoundError:
            return {}
        return found

    # --- removing ------------------------------------------------------------------------------

    def delete(self, *names: str) -> None:
        """See `Backend.delete`; durable on return."""
        for name in names:
            _faults.point("file", op="unlink", target=name)
            (self.root / name).unlink(missing_ok=True)
        for parent in {(self.root / name).parent for name in names}:
            with contextlib.suppress(FileNotFoundError):
                self._sync_directory(parent)

    def delete_folder(self, folder: str) -> None:
        """See `Backend.delete_folder`. NFS keeps a file while it is read, under another name:
        that file and its folder stay until it is closed."""
        path = self.root / folder
        with contextlib.suppress(FileNotFoundError):
            for entry in sorted(os.scandir(path), key=lambda e: e.name):
                if entry.is_dir(follow_symlinks=False):
                    self.delete_folder(f"{folder}/{entry.name}")
                else:
                    self._unlink(path / entry.name)
            _faults.point("file", op="rmdir", target=folder)
            try:
                path.rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            self._sync_directory(path.parent)

    def _unlink(self, path: Path) -> None:
        try:
            _faults.point("file", op="unlink", target=path.name)
            path.unlink(missing_ok=True)
        except OSError as error:
            if not (error.errno == errno.EBUSY and path.name.startswith(STILL_READ)):
                raise

    def discard(self, name: str) -> None:
        """See `Backend.discard`: removes temporary files of dead processes of this machine.

        Other machines' processes cannot be checked; their files go with the folder.
        """
        folder, _, file = name.rpartition("/")
        for temp in _listdir(self.root / folder):
            if temp.startswith(f".{file}") and temp.endswith(".tmp") and _writer_is_dead(temp):
                _faults.point("file", op="unlink", target=temp)
                (self.root / folder / temp).unlink(missing_ok=True)

    def _sync_directory(self, path: Path) -> None:
        _faults.point("file", op="fsync_directory")
        durable.sync(path)


def _write(fd: int, offset: int, content: Content) -> None:
    """Write all windows from `offset` on, durably, and drop them from the page cache."""
    start = offset
    for window in content():
        done = 0
        with window:  # or a traceback would keep the memory in use
            while done < len(window):
                _faults.point("file", op="write", offset=offset)
                count = os.pwrite(fd, window[done:], offset)
                done += count
                offset += count
    _faults.point("file", op="fsync")
    os.fsync(fd)
    os.posix_fadvise(fd, start, offset - start, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        durable.share(fd, path.parent)
        yield fd
    finally:
        os.close(fd)


def _listdir(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def _look_at(entry: os.DirEntry[str]) -> tuple[bool, int]:
    """Whether the entry is a folder, and its length. FileNotFoundError if it was removed meanwhile;
    a broken link counts as an empty file."""
    try:
        is_folder = entry.is_dir()
        return is_folder, 0 if is_folder else entry.stat().st_size
    except OSError:
        if not entry.is_symlink():
            raise
        return False, 0


def _writer_tag() -> str:
    """Tag of machine and process: makes temporary names unique, and identifies their writers
    later."""
    return f"{_machine()}.{os.getpid()}"


@functools.cache
def _machine() -> str:
    """The scope in which this process's number is unique: the boot of a host, and a namespace of
    processes there, as containers may share a host's name. Contains no dots, which separate the
    parts of a name."""
    boot, space = "", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        space = str(os.stat("/proc/self/ns/pid").st_ino)
    return "-".join([socket.gethostname().replace(".", "_"), boot, space])


def _writer_is_dead(temp: str) -> bool:
    """True if a process of this machine wrote `temp` and has ended. A reused process number only
    delays the cleaning."""
    *_, machine, pid, serial = ["", "", *temp.removesuffix(".tmp").split(".")]
    if not (serial.isdigit() and pid.isdigit() and machine == _machine()):
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
