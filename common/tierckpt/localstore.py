"""The `local` level's store: shard files in one directory of a node-local file system.

`<stem>.safetensors` is the shard, `<stem>.manifest` makes it exist. What is true at every instant,
also when the process is killed or the machine loses power:

- a manifest is there only when its shard is complete and on the device;
- names beginning with a dot are work in progress and are never data.

Files retired by retention are kept for reuse (one), since overwriting an allocated file is
measurably faster than growing a new one. Standard library only, so that the agent stays small.
Not thread-safe; one writer per shard index, any number of readers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import faults
from .naming import PAGE_BYTES, ShardKey

WRITE_BYTES = 8 * 1024 * 1024
"""Size of one write: large enough for the device, small enough to be interrupted."""

DATA_SUFFIX = ".safetensors"
MANIFEST_SUFFIX = ".manifest"


@dataclass(frozen=True)
class CommitTimes:
    """Where a commit's time went."""

    write_seconds: float
    """Opening, writing and fsync of the shard."""
    commit_seconds: float
    """Renames and the manifest."""
    direct: bool
    """True when the page cache was bypassed."""


class LocalStore:
    """See the module's text. Every method may raise OSError; nothing committed is then lost."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def create(self) -> None:
        """Make the directory."""
        self.directory.mkdir(parents=True, exist_ok=True)

    # --- writing -------------------------------------------------------------------------------

    def commit(
        self,
        key: ShardKey,
        image: memoryview,
        manifest: bytes,
        still_sealed: Callable[[], bool] = lambda: True,
    ) -> CommitTimes:
        """Make the shard exist, durably. After an OSError it does not, and older ones still do.

        `image` must not change meanwhile; its length is a multiple of PAGE_BYTES. `still_sealed` is
        asked after the last byte was read: False means it did change, and is an OSError.
        """
        data, record = self._data(key), self._manifest(key)
        temp = self.directory / f".{key.stem}.tmp"
        begin = time.perf_counter()
        # A manifest of this very key could only be an earlier try of ours: void it first.
        if record.exists():
            self._unlink(record)
            self._sync_directory()
        self._take_spare(key.shard, temp)
        try:
            faults.point("file", op="open")
            with _LockedFile(temp) as file:
                file.write(image)
                written = time.perf_counter()
                if not still_sealed():
                    raise FileNotFoundError(f"the slot of {key} was refilled while it was written")
                self._rename(temp, data)
                self._sync_directory()
                self._write_small(self.directory / f".{key.stem}.manifest.tmp", record, manifest)
        except OSError:
            # No shard, so no manifest, which goes first (it is there when the last fsync failed);
            # give the space back at once, the device may be full.
            for path in (record, temp, data):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            raise
        return CommitTimes(written - begin, time.perf_counter() - written, file.direct)

    def retire(self, key: ShardKey) -> None:
        """Make the shard not exist; its file is kept for reuse if none is kept yet."""
        self._unlink(self._manifest(key))
        self._sync_directory()  # before the data changes its name: never a manifest without data
        spare, data = self._spare(key.shard), self._data(key)
        linked = data.exists() and data.stat().st_nlink > 1  # somebody's hard link keeps it
        if linked or spare.exists():
            self._unlink(data)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._rename(data, spare)

    def drop_spare(self, shard: int) -> None:
        """Remove the file that was kept for reuse."""
        self._spare(shard).unlink(missing_ok=True)

    def clean(self, shard: int) -> list[str]:
        """Remove what a writer of `shard` left half-done when it was killed; returns the names.

        Files that a living writer (the agent of a trainer that was just killed) still has open
        are locked, and left alone.
        """
        removed = []
        for path in self.directory.glob(f".*.s{shard:05d}of*"):
            stem = path.name.removeprefix(".").removesuffix(".manifest.tmp")
            data = self.directory / f"{stem}{DATA_SUFFIX}"
            if data.exists() and not _unlocked(data):
                continue  # a living writer is about to rename this manifest
            if path != self._spare(shard) and _unlocked(path):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    removed.append(path.name)
        for path in self.directory.glob(f"*.s{shard:05d}of*{DATA_SUFFIX}"):
            key = ShardKey.parse(path.name.removesuffix(DATA_SUFFIX))
            # In this order: a writer that lets go of the lock has made its manifest before.
            if key and _unlocked(path) and not self._manifest(key).exists():
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    removed.append(path.name)
        return removed

    # --- reading -------------------------------------------------------------------------------

    def keys(self) -> list[ShardKey]:
        """Every shard that exists here; an empty list when the directory does not."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        keys = [
            ShardKey.parse(n.removesuffix(MANIFEST_SUFFIX))
            for n in names
            if n.endswith(MANIFEST_SUFFIX)
        ]
        return sorted(k for k in keys if k is not None)

    def read_manifest(self, key: ShardKey) -> bytes:
        """The manifest's bytes, unchecked."""
        return self._manifest(key).read_bytes()

    def open_image(self, key: ShardKey) -> mmap.mmap:
        """The shard's bytes, mapped, unchecked; writes to the map stay private. Close it."""
        with self._data(key).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    # --- file operations, each with its fault point --------------------------------------------

    def _data(self, key: ShardKey) -> Path:
        return self.directory / f"{key.stem}{DATA_SUFFIX}"

    def _manifest(self, key: ShardKey) -> Path:
        return self.directory / f"{key.stem}{MANIFEST_SUFFIX}"

    def _spare(self, shard: int) -> Path:
        return self.directory / f".spare.s{shard:05d}of"

    def _take_spare(self, shard: int, temp: Path) -> None:
        faults.point("file", op="take_spare")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._spare(shard), temp)

    def _write_small(self, temp: Path, final: Path, content: bytes) -> None:
        """Atomically and durably create `final`."""
        try:
            faults.point("file", op="open_manifest")
            with temp.open("wb") as file:
                faults.point("file", op="write_manifest")
                file.write(content)
                file.flush()
                faults.point("file", op="fsync_manifest")
                os.fsync(file.fileno())
            self._rename(temp, final)
        except OSError:
            with contextlib.suppress(OSError):
                temp.unlink(missing_ok=True)
            raise
        self._sync_directory()

    def _rename(self, source: Path, target: Path) -> None:
        faults.point("file", op="rename", target=target.name)
        os.rename(source, target)

    def _unlink(self, path: Path) -> None:
        faults.point("file", op="unlink", target=path.name)
        path.unlink(missing_ok=True)

    def _sync_directory(self) -> None:
        faults.point("file", op="fsync_directory")
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class _LockedFile:
    """A file being written, past the page cache where the file system takes that.

    Locked from the first byte until the manifest is there (see `clean`); the kernel drops the lock
    if we are killed.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd, self.direct = os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # tmpfs of older kernels, some network file systems
                raise
            self._fd, self.direct = os.open(path, flags, 0o644), False
        fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def __enter__(self) -> _LockedFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, image: memoryview) -> None:
        """Make `image` the file's durable content."""
        if os.fstat(self._fd).st_size > len(image):
            os.ftruncate(self._fd, len(image))
        offset = 0
        while offset < len(image):
            faults.point("file", op="write", offset=offset)
            try:
                offset += os.pwrite(self._fd, image[offset : offset + WRITE_BYTES], offset)
            except OSError as error:
                if not (self.direct and error.errno == errno.EINVAL):
                    raise
                self._leave_direct()
            else:
                if self.direct and offset % PAGE_BYTES:
                    self._leave_direct()  # a short write; the rest is no longer aligned
        faults.point("file", op="fsync")
        os.fsync(self._fd)

    def _leave_direct(self) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False


def _unlocked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)
