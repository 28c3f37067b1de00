"""Folders in memory in which a program writes routed files, and reads restored ones.

    <files_dir>/tierckpt-files-<uid>/<job>/r<rank>/routed/...
    <files_dir>/tierckpt-files-<uid>/<job>/r<rank>/restored/<shard>/...

Nothing in them is data for a restart: a version is in its slots and files. They belong to the
running trainer of the rank, whose lock is in the job's folder (see `job_directory`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path, PurePosixPath

from tierckpt.errors import ConfigError, TierckptError
from tierckpt.storage.memory.job_directory import JobDirectory

MOST_NAME_BYTES = 1024
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
    if size > MOST_NAME_BYTES:
        raise TierckptError(f"{given[:40]!r}... is too long: {size} bytes of {MOST_NAME_BYTES}")
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
            remove(self.path)
            self.routed.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise ConfigError(
                f"there is no place for routed files in {files_dir}: {error}. files_dir must be an "
                "existing, writable directory"
            ) from error

    def clear(self) -> None:
        """Remove all routed files. Never fails: `route` makes the folders that it needs."""
        remove(self.routed)

    def restored(self, shard: int) -> Path:
        """The folder for the restored files of a shard."""
        return self._restored / f"{shard:05d}"

    def drop_restored(self) -> None:
        """Remove all restored files."""
        remove(self._restored)

    def close(self) -> None:
        """Remove everything of this rank."""
        remove(self.path)
        for folder in (self._job, self._job.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()


def remove(folder: Path) -> None:
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
            remove(folder)


__all__ = ["FileFolders", "checked_name", "remove"]
