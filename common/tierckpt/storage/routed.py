"""Routed files: the folders in memory in which a program writes files of a version and reads
restored ones, and the files themselves.

    <files_dir>/tierckpt-files-<uid>/<job>/r<rank>/routed/...
    <files_dir>/tierckpt-files-<uid>/<job>/r<rank>/restored/<shard>/...

Nothing in them is data for a restart: a version is in its slots and files. They belong to the
running trainer of the rank, with its lock in the job's folder (see `job_directory`).

The bytes of files are the end of an encoded tree (FORMAT.md, "Encoded tree"), so a reader can
leave them out: a tree with its files may be many gigabytes long, and what other parts of a program
need of it is short.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path, PurePosixPath

from msgspec import Struct

from tierckpt._text import error_text
from tierckpt.errors import ConfigError, FormatError, TierckptError
from tierckpt.storage.durable import SHARED_KINDS, mount_of
from tierckpt.storage.job_directory import JobDirectory

__all__ = [
    "FILE_PREFIX",
    "FileFolders",
    "Range",
    "SourceFile",
    "VersionFiles",
    "checked_name",
    "end_without",
    "files_at_end",
    "remove_folder",
]


FILE_PREFIX = "file/"
"""Start of the names of entries for files."""


class SourceFile(Struct, frozen=True):
    """A complete file that a version is to contain."""

    name: str
    path: str
    nbytes: int
    mode: int
    """Permission bits."""

    @staticmethod
    def at(name: str, folder: Path) -> SourceFile:
        """Look at the file of this name in a folder. Raises TierckptError if it is missing, no
        plain file, elsewhere by a link, or still open for writing."""
        path = os.path.join(folder, name)
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            raise TierckptError(
                f"{name!r} was routed and not written: write the file at the path that route() "
                "returned, and close it before the version ends"
            ) from None
        there = os.path.join(os.path.realpath(folder), name)
        if not stat.S_ISREG(found.st_mode) or os.path.realpath(path) != there:
            raise TierckptError(
                f"{name!r} is no plain file in the folder that route() made: only plain files can "
                "be stored, without links"
            )
        if _is_open_for_writing(path):
            raise TierckptError(
                f"{name!r} is still open for writing, so a part may be missing: close it (end "
                "the `with`, delete the memory map) before the version ends"
            )
        found = os.lstat(path)  # again: no writer is left
        return SourceFile(name, path, found.st_size, stat.S_IMODE(found.st_mode))


def _is_open_for_writing(path: str) -> bool:
    """True if a process of this node has the file open, or mapped, for writing. False if the file
    system cannot tell: those that other machines see refuse leases for reasons of their own.

    The kernel grants a lease for reading only if there is no such process. SIGURG, which processes
    ignore, in place of SIGIO, which ends them, would come if one opened the file at this moment.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return (
            error.errno == errno.EAGAIN
            and mount_of(os.path.realpath(path)).kind not in SHARED_KINDS
        )
    finally:
        os.close(fd)
    return False


MAX_NAME_BYTES = 1024
"""Limit of a file's name with its folders."""


def checked_name(name: str | os.PathLike[str]) -> str:
    """The name of a file as a version stores it: relative, with `/`, and without `.` and `..`.
    Raises TierckptError for a name that would leave the folder."""
    given = os.fspath(name)
    if not isinstance(given, str):
        raise TypeError(f"the name of a file must be text, not {given!r}")
    path = PurePosixPath(given)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in given:
        raise TierckptError(
            f"{given!r} is no name for a file of a version: it must be relative, and stay inside "
            "the version. Give a name like 'state.bin' or 'fields/rank_0.h5'"
        )
    try:
        size = len(str(path).encode())
    except UnicodeEncodeError:
        raise TierckptError(f"{given!r} is no name for a file of a version: not UTF-8") from None
    if size > MAX_NAME_BYTES:
        raise TierckptError(f"{given[:40]!r}... is too long: {size} bytes of {MAX_NAME_BYTES}")
    return str(path)


class FileFolders:
    """One rank's folders. Owns them; one thread."""

    def __init__(self, files_dir: str, job: JobDirectory, rank: int) -> None:
        """Make this rank's folder, empty, and remove those of jobs that are gone. The caller holds
        the rank's lock in `job`. Raises ConfigError if it cannot be made."""
        root = Path(os.path.abspath(files_dir)) / f"tierckpt-files-{os.getuid()}"
        self._job = root / job.path.name
        self.path = self._job / f"r{rank:05d}"
        self.routed, self._restored = self.path / "routed", self.path / "restored"
        try:
            root.mkdir(mode=0o700, exist_ok=True)
            if root.stat().st_uid != os.getuid():
                raise PermissionError(f"{root} belongs to another user")
            _remove_dead(root, job)
            remove_folder(self.path)
            self.routed.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise ConfigError(
                f"there is no place for routed files in {files_dir}: {error}. files_dir must be an "
                "existing, writable directory"
            ) from error

    def clear(self) -> None:
        """Remove all routed files. Never fails: `route` makes the folders that it needs."""
        remove_folder(self.routed)

    def restored(self, shard: int) -> Path:
        """The folder for the restored files of a shard."""
        return self._restored / f"{shard:05d}"

    def drop_restored(self) -> None:
        """Remove all restored files."""
        remove_folder(self._restored)

    def close(self) -> None:
        """Remove everything of this rank."""
        remove_folder(self.path)
        for folder in (self._job, self._job.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()


def remove_folder(folder: Path) -> None:
    """Remove a folder with all its files, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def _remove_dead(root: Path, job: JobDirectory) -> None:
    """Remove the folders of jobs of which no process runs: killed ones."""
    known = {each.path.name: each for each in job.others()}
    for folder in root.iterdir():
        if folder.name == job.path.name:
            continue
        other = known.get(folder.name)
        if other is None or not other.trains():
            remove_folder(folder)


class VersionFiles:
    """The files of the version in progress, see `Files.version`. One thread."""

    complete: bool | None = None
    """True once the version is complete in the memory of all ranks, False if it is lost; None while
    it is in progress."""

    def __init__(self, folder: Path, number: int, name: str) -> None:
        self._folder = folder
        self.number = number
        """Number of the version."""
        self.name = name
        """Name of the version; its number as text if none was given."""
        self._routed: dict[str, Path] = {}

    def route(self, name: str | os.PathLike[str]) -> str:
        """Add a file to the version; returns the path at which to write it.

        The path is in a folder of this rank alone, with the folders of `name` in it. The file must
        be closed when the version ends. Not collective: a rank may route any number of files, and
        two ranks may use the same name. After a restart each rank finds its own.

        Raises TierckptError if the version has ended, or for an absolute name.
        """
        if self.complete is not None:
            raise TierckptError(f"route({os.fspath(name)!r}): version {self.name} has ended")
        key = checked_name(name)
        path = self._folder / key
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._routed[key] = path
        return str(path)

    @property
    def routed(self) -> dict[str, str]:
        """The paths of all files, by name."""
        return {name: str(path) for name, path in self._routed.items()}

    def sources(self, say: Callable[[str], None]) -> list[SourceFile]:
        """All files, complete. Files beside them get a notice by `say`: they are not stored. Raises
        TierckptError if one is missing, or see `SourceFile.at`."""
        found = [SourceFile.at(name, self._folder) for name in sorted(self._routed)]
        known = set(self._routed.values())
        there = (Path(top) / file for top, _, files in os.walk(self._folder) for file in files)
        if strays := sorted(str(p.relative_to(self._folder)) for p in there if p not in known):
            say(
                f"{', '.join(strays[:4])}: written without route(), so version {self.name} does "
                "not contain it. Call route() with the name of each file"
            )
        return found


Range = tuple[int, int]
"""Start and end in the encoded tree."""
_MARK = b'"contents"'


def files_at_end(nbytes: int, read: Callable[[int, int], bytes]) -> dict[str, Range]:
    """The files in an encoded tree of this length, by name, in the order of their bytes.

    `read(low, high)` returns a range of it. Raises FormatError if the files are not the end.
    """
    try:
        end = 8 + int.from_bytes(read(0, 8), "little")
        text = read(8, end)
        if _MARK not in text:  # spares most trees the parsing
            return {}
        tree = json.loads(text)
        contents = (tree["tree"].get("files") or {}).get("contents", {})
        numbers = [node["v"] for node in contents.values()]
        rows = tree["tensors"]
        if numbers != list(range(len(rows) - len(numbers), len(rows))):
            raise ValueError("files are not its last tensors")
        sizes = [rows[number][1][0] for number in numbers]
        low = nbytes - sum(sizes)
        if low < end:
            raise ValueError(f"files of {sum(sizes)} bytes in {nbytes}")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise FormatError(f"not an encoded tree with files: {error_text(error)}") from error
    bounds = list(accumulate(sizes, initial=low))
    return dict(zip(contents, pairwise(bounds), strict=True))


def end_without(nbytes: int, files: dict[str, Range]) -> int:
    """The length of the tree before its files."""
    return min((low for low, _ in files.values()), default=nbytes)
