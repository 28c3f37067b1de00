"""Durable files: folders and names that survive a loss of power, locked files past the page cache,
and mapped files on a disk that may fail. Standard library only.

fsync of a file, and of its folder, does not make the folder's own name durable.

A `DirectFile` is locked from its first byte on, and the kernel drops the lock when the process is
killed: cleaners recognize a living writer by it. It passes the page cache if the file system
supports that.

A mapped file: touching a page that the disk cannot read, or after the end of a file that was
truncated, ends the process with SIGBUS: no exception, and no other copy is tried. So the kernel is
asked to read pages before they are touched; that call can fail like any other.

The mount of a directory: its kind, and whether other machines see it and its locks, as far as the
kernel's table shows. Standard library only.

Only the table is read, so a file system that hangs does not block the caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import socket
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from tierckpt import _faults
from tierckpt.format.ids import PAGE_BYTES

from . import file_lock

__all__ = [
    "LAYERS",
    "MEMORY_KINDS",
    "SHARED_KINDS",
    "Mount",
    "locks_are_local",
    "mount_of",
    "mounts_in",
]


MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})
SHARED_KINDS = frozenset(
    (
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "afs", "panfs"),
        *("orangefs", "pvfs2", "wekafs", "glusterfs", "ocfs2", "gfs2", "virtiofs"),
        *("fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.gcsfuse", "fuse.mount-s3"),
        *("fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
    )
)
"""Kinds of file systems that other machines see, too."""
LAYERS = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})
"""Kinds that a container's root has; they are removed with the container."""
_OF_ONE_MACHINE = {
    "nfs": {"nolock", "local_lock=all", "local_lock=posix"},
    "nfs4": {"local_lock=all", "local_lock=posix"},
    "lustre": {"localflock"},
    "cifs": {"nobrl", "nolock"},
    "smb3": {"nobrl", "nolock"},
}
"""Mount options with which a client keeps record locks to itself."""
_ALWAYS = frozenset({"fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.mount-s3"})
"""Kinds of file systems with locks that the kernel keeps locally."""


class Mount(Struct, frozen=True):
    """One line of the table; all fields are empty if no line fits."""

    point: str = ""
    kind: str = ""
    options: frozenset[str] = frozenset()

    @property
    def keeps_locks(self) -> str:
        """Why only this machine sees the locks, as text for messages; empty if unknown."""
        if keeps := sorted(_OF_ONE_MACHINE.get(self.kind, set()) & self.options):
            return f"{self.point} is mounted ({self.kind}) with {keeps[0]}"
        if self.kind in _ALWAYS:
            return f"{self.point} is {self.kind}, which has no locks between machines"
        return ""


def mount_of(path: str | os.PathLike[str], lines: Iterable[str] | None = None) -> Mount:
    """The mount of an absolute path without links. `lines`: those of /proc/self/mountinfo."""
    if lines is None:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").split("\n")
    path, best, found = Path(path), Path("/"), Mount()
    for mount in _mounts(lines):
        point = Path(mount.point)
        # Of two mounts at the same point, the later one covers the earlier.
        if (point == path or point in path.parents) and len(point.parts) >= len(best.parts):
            best, found = point, mount
    return found


def mounts_in(path: str | os.PathLike[str]) -> list[str]:
    """The places of mounts directly in a directory; its name has no links."""
    folder = os.path.abspath(path)
    with open("/proc/self/mountinfo", errors="surrogateescape") as lines:
        points = [mount.point for mount in _mounts(lines)]
    return [point for point in points if point != folder and os.path.dirname(point) == folder]


def _mounts(lines: Iterable[str]) -> Iterator[Mount]:
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split()
        if len(fields) < 6 or not rest:
            continue
        # Blanks, line feeds and backslashes are written in octal.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        options = ",".join([fields[5], *rest[2:3]]).split(",")
        yield Mount(os.path.normpath(point), rest[0], frozenset(options))


def locks_are_local(directory: str | os.PathLike[str]) -> str:
    """Why locks in `directory` are seen only on this machine although others may see the directory:
    its mount, as text for messages. Empty if not known."""
    try:
        return mount_of(os.path.realpath(directory)).keeps_locks
    except OSError:
        return ""


NO_RIGHT = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
REFUSALS = NO_RIGHT | {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""Errors of file systems that cannot sync a folder, or do not let this user do it."""


GROUP_ACCESS = stat.S_IRGRP | stat.S_IWGRP


def make(folder: Path, parents: bool = True) -> None:
    """Create a folder and, with `parents`, its missing parents, durably. Raises OSError.

    Works from the top down, and makes each folder durable before it creates the next. So an
    existing folder is durable, except perhaps the last one: its creator may have died; its name is
    always synced.
    """
    missing = [each for each in (folder, *folder.parents) if parents and not each.exists()]
    for each in reversed(missing or [folder]):
        make_one(each)
        try:
            sync(each.parent)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise


def sync(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_one(folder: Path) -> None:
    """Create a folder if it is missing, not durably, with the rights that its parent gives its
    group. Raises OSError."""
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise
        return
    with contextlib.suppress(OSError):  # else only this user can write to it
        above = folder.parent.stat()
        if above.st_mode & stat.S_ISGID and above.st_mode & stat.S_IWGRP:
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IRWXG)


def share(fd: int, folder: Path) -> None:
    """Let the group of `folder` write to a new file in it, if it may write to the folder: another
    user of the group can then continue the job, whatever the umask of the creator."""
    with contextlib.suppress(OSError):  # then only its owner can use it
        above, found = folder.stat(), os.fstat(fd)
        if above.st_mode & stat.S_IWGRP and found.st_gid == above.st_gid:
            mode = stat.S_IMODE(found.st_mode)
            if mode | GROUP_ACCESS != mode and found.st_uid == os.geteuid():
                os.fchmod(fd, mode | GROUP_ACCESS)


def open_plain(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading; never blocks, as opening a FIFO does.

    Raises OSError for anything else. FileNotFoundError means that the name does not exist, not even
    as a broken link.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(errno.EINVAL, "a broken link", str(path)) from None
        raise
    return os.fdopen(plain(fd, path), "rb", buffering)


def plain(fd: int, path: Path) -> int:
    """The descriptor, if it is a regular file; else it is closed, and OSError names the kind of
    `path`."""
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    kind_name = "a directory" if stat.S_ISDIR(kind) else "no regular file"
    raise OSError(errno.EINVAL, f"{kind_name} instead of a file", str(path))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context with a new file's path beside `path`: at the end that file takes the place of `path`,
    atomically; after an OSError it is removed. Not durable by itself. Raises OSError."""
    temp = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        yield temp
        temp.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)
        raise


def remove(path: Path) -> None:
    """Remove a file or a link, if it exists. A directory is left alone."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()


WRITE_BYTES = 256 * 1024 * 1024
"""Size of one write. The kernel gives all of it to the device at once; between two writes the
device waits until this thread has a core again, which takes milliseconds where training uses all
cores. A killed process lives until its write has ended."""


class DirectFile:
    """A file being written. For one thread at a time; every method may raise OSError."""

    def __init__(self, path: Path) -> None:
        """Raises BlockingIOError if another process has the file locked: waiting for one that hangs
        could take forever."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd, self.direct = os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # tmpfs of older kernels, some network file systems
                raise
            self._fd, self.direct = os.open(path, flags, 0o644), False
        try:
            share(self._fd, path.parent)
            if not file_lock.lock(self._fd):
                raise BlockingIOError(f"another process is still writing {path}")
        except OSError:
            self.close()
            raise

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close and unlock."""
        file_lock.close(self._fd)

    @property
    def is_removed(self) -> bool:
        """True if the file has no name any more."""
        return os.fstat(self._fd).st_nlink == 0

    def write(self, image: memoryview, start: int) -> None:
        """Write `image` at byte `start` of the file."""
        offset = 0
        while offset < len(image):
            _faults.point("file", op="write", offset=start + offset)
            try:
                part = image[offset : offset + WRITE_BYTES]
                offset += os.pwrite(self._fd, part, start + offset)
            except OSError as error:
                if not (self.direct and error.errno == errno.EINVAL):
                    raise
                self._leave_direct()
            else:
                if self.direct and (start + offset) % PAGE_BYTES:
                    self._leave_direct()  # a short write; the rest is no longer aligned

    def sync(self, nbytes: int) -> None:
        """Give the file exactly `nbytes`, and make it durable."""
        if os.fstat(self._fd).st_size != nbytes:
            os.ftruncate(self._fd, nbytes)
        _faults.point("file", op="fsync")
        os.fdatasync(self._fd)  # its length is durable too; `commit` makes its name durable

    def _leave_direct(self) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False


_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
"""From <linux/mman.h>, since Linux 5.14; Python has no names for them."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedFile:
    """The bytes of `mapped`, in `view`. Any thread; the owner closes it."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self.view = memoryview(mapped)
        self._mapped = mapped
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def ask(self, low: int = 0, high: int | None = None) -> None:
        """Start reading a range from the disk, all at once: page faults alone read a few pages at a
        time."""
        if (nbytes := self._there(low, high)) > 0:
            self._advise(low, nbytes, mmap.MADV_WILLNEED)

    def bring(self, low: int, high: int) -> None:
        """Read a range into memory. Other threads run during the read.

        Raises OSError (EIO) if the range cannot be read.
        """
        if (nbytes := self._there(low, high)) <= 0:
            return
        self.ask(low, high)
        error = self._advise(low, nbytes, _MADV_POPULATE_READ)
        # Older kernels do not have this call: pages are read when they are touched.
        if error not in (0, errno.EINVAL, errno.ENOSYS):
            raise OSError(
                errno.EIO,
                f"bytes {low} to {high} cannot be read: the disk fails ({os.strerror(error)}), "
                "or the file was truncated",
            )

    def _advise(self, low: int, nbytes: int, advice: int) -> int:
        """madvise(2) for whole pages; returns 0 or the error number. mmap.madvise would hold the
        interpreter lock until the disk has answered."""
        return _advise(self._address + low, nbytes, advice)

    def _there(self, low: int, high: int | None) -> int:
        """Bytes of a range that the file has; below 0 if it ends before the range."""
        nbytes = len(self._mapped)
        return (nbytes if high is None else min(high, nbytes)) - low

    def close(self) -> None:
        """Unmap; later, if a part is still in use."""
        with contextlib.suppress(BufferError):
            self.view.release()
        with contextlib.suppress(BufferError):
            self._mapped.close()


def populate(address: int, nbytes: int) -> bool:
    """Have the kernel allocate all pages of a range of this process's own memory at once: this
    takes three quarters of the time of page faults. Returns False if the kernel does not support
    it."""
    return _advise(address, nbytes, _MADV_POPULATE_WRITE) == 0


def _advise(address: int, nbytes: int, advice: int) -> int:
    start = address - address % mmap.PAGESIZE
    failed = _libc.madvise(start, address + nbytes - start, advice)
    return ctypes.get_errno() if failed else 0
