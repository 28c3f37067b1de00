"""Claim files: their content, and how to read those of any job or user. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from tierckpt._host import host_id
from tierckpt.storage.files import durable, file_lock
from tierckpt.storage.files.durable import open_plain

PREFIX = ".claim."
MOST_BYTES = 1 << 16
UNKNOWN = "an unknown machine"
GONE = frozenset({errno.ENOENT, errno.ESTALE})


@dataclass(frozen=True)
class Claim:
    """Content of a claim's file. Unknown fields of a later tierckpt are ignored."""

    host: str = UNKNOWN
    pid: int = 0
    since_seconds: float = field(default_factory=time.time)
    """Unix time."""
    machine: str = ""
    """Id of the machine and its boot: the kernel that keeps the lock."""
    launch: str = ""
    """The launcher's name for this launch, for messages; may be empty."""
    memory: str = ""
    """Folder of the job's slots on that machine."""
    user: str = ""
    job: str = ""
    attempt: int = 0
    starters: tuple[str, ...] = ()
    """Starters of the process that made the claim, see `launch.Launch`."""
    run_starters: tuple[str, ...] = ()
    """Starters of all ranks of its run."""
    persistent: str = ""
    """The job's `persistent_path`, for commands that watch the job."""
    events: str = ""
    """The job's `events_dir`, absolute, for the same commands."""
    finished: int | None = None
    """The version with which the holder's training has ended by itself, for starts that wait."""
    refused: bool = False
    """The holder was refused, because the run with that end is another training: the starters of
    this claim may not try again."""

    def encode(self) -> bytes:
        """The content as bytes."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(content: bytes) -> Claim:
        """Raises ValueError or TypeError for other content."""
        values = json.loads(content)
        given = {each.name: values[each.name] for each in fields(Claim) if each.name in values}
        for name in ("starters", "run_starters"):
            given[name] = tuple(given.get(name, ()))
        return Claim(**given)

    def text(self) -> str:
        """The claim, for messages."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_seconds))
        process = f"process {self.pid} on {self.host}" if self.pid else self.host
        owner = f", of user {self.user}" if self.user else ""
        return f"{process}{owner}, since {since}" + (
            f", started by {self.launch}" if self.launch else ""
        )


def opened(path: Path) -> tuple[int, bool]:
    """A descriptor, and whether it may be written to: another user's claim may be readable only."""
    how = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | how), True
    except OSError as error:
        if error.errno not in durable.NO_RIGHT:
            raise
        return os.open(path, os.O_RDONLY | how), False


def unreadable(path: Path) -> Claim | None:
    """A claim of which only the owner of the file is known; None if the file has just
    disappeared."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    except OSError:
        return Claim()
    return replace(Claim(), user=user_name(found.st_uid), since_seconds=found.st_mtime)


def user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def is_claimed(directory: str | os.PathLike[str]) -> bool:
    """Whether a living process has a claim there, as far as locks show. Raises OSError. Do not call
    it for the directory that this process has claimed: closing the file would drop the lock."""
    for name in os.listdir(directory):
        if name.startswith(PREFIX):
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(Path(directory, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    if not file_lock.free(fd):
                        return True
                finally:
                    os.close(fd)
    return False


def claims_in(directory: str | os.PathLike[str]) -> list[tuple[Claim, bool]]:
    """The claims in a directory, each with True while its process lives, as far as locks show. One
    that cannot be read is left out. Empty in a trainer's own process, as `memory_folders`."""
    found = []
    with contextlib.suppress(OSError):
        for name in [] if file_lock.any_held() else sorted(os.listdir(directory)):
            if name.startswith(PREFIX):
                with (
                    contextlib.suppress(OSError, ValueError, TypeError),
                    open_plain(Path(directory, name)) as file,
                ):
                    held = file_lock.held(file.fileno())
                    found.append((Claim.decode(file.read(MOST_BYTES)), held))
    return found


def memory_folders(directory: str | os.PathLike[str]) -> set[Path]:
    """Folders in this machine's memory of the jobs that have claims here, dead jobs included. Empty
    in a trainer's own process: the kernel drops its lock when it closes a claim that it has read.
    """
    found = set()
    with contextlib.suppress(OSError):
        for name in [] if file_lock.any_held() else os.listdir(directory):
            if name.startswith(PREFIX):
                with contextlib.suppress(OSError), open_plain(Path(directory, name)) as file:
                    found |= memory_of(file.read(MOST_BYTES))
    return found


def memory_of(content: bytes) -> set[Path]:
    """The memory folder named in a claim's content, if it is on this machine."""
    with contextlib.suppress(ValueError, TypeError):
        claim = Claim.decode(content)
        return {Path(claim.memory)} if claim.memory and claim.machine == host_id() else set()
    return set()


__all__ = [
    "Claim",
    "claims_in",
    "is_claimed",
    "memory_folders",
    "memory_of",
    "opened",
    "unreadable",
    "user_name",
]
