"""Guarantees of a file system that the levels rely on: locks, exclusive names, links, renames.

Each is tried with small files in a folder of its own, which is removed. Standard library only.

    python -m tierckpt.storage.guarantees '{"path": "/local/ckpts"}'

prints the result for one directory as JSON. `health.output_of` runs that in a process of its own,
because a dead file system blocks any process that touches it.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from . import durable, file_lock
from .durable import DirectFile, locks_are_local
from .health import Need, answer, check_directory, output_of

PREFIX = ".tierckpt-probe-"
"""Start of the folder's name; a killed process leaves it behind."""


class Guarantees(Struct, frozen=True):
    """The result for one directory."""

    place: str = ""
    """The directory that was tried, without links: the one in question or, if that does not exist,
    the nearest parent. Empty if its file system hangs."""
    missing: int = 0
    """Number of folders to be made between that directory and the one in question."""
    free_bytes: int = 0
    problem: str = ""
    """Why nothing can be stored there, as of `health.check_directory`; all else is then unknown."""
    broken: dict[str, str] = field(default_factory=dict)
    """Guarantees that do not hold, with the reasons: `locks`, `exclusive creation`, `links`,
    `renames`, `durable names`."""
    direct: bool = False
    """Files can be written past the page cache (O_DIRECT)."""
    local_locks: str = ""
    """Why other machines do not see the locks; empty if unknown."""


def of_directory(need: Need, timeout_seconds: float) -> Guarantees:
    """Try a directory in a process of its own. A file system that hangs is a problem."""
    output = output_of(__name__, need, timeout_seconds)
    try:
        return Guarantees(**json.loads(output))
    except (ValueError, TypeError):
        return Guarantees(problem=output or "the check printed nothing")


def try_directory(need: Need) -> Guarantees:
    """Try a directory, or the nearest parent, in this process, which must have no other threads.
    Hangs if the file system hangs."""
    path = Path(os.path.abspath(need.path))
    place = next(each for each in (path, *path.parents) if os.path.lexists(each))
    need, real = replace(need, path=str(place)), os.path.realpath(place)
    missing = len(path.parts) - len(place.parts)
    if problem := check_directory(need):
        return Guarantees(real, missing, problem=problem.removeprefix(f"{place}: "))
    found = os.statvfs(place)
    free_bytes = found.f_bavail * found.f_frsize
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=need.path) as name:
        folder = Path(name)
        broken = dict(_broken(folder))
        direct, local = _is_direct(folder), locks_are_local(real)
        return Guarantees(real, missing, free_bytes, "", broken, direct, local)


def _is_direct(folder: Path) -> bool:
    page = mmap.mmap(-1, mmap.PAGESIZE)  # aligned, as the slots are
    try:
        with DirectFile(folder / "direct") as file:
            file.write(memoryview(page), 0)
            return file.direct
    except OSError:
        return False


def _broken(folder: Path) -> Iterator[tuple[str, str]]:
    for name, attempt in ATTEMPTS.items():
        try:
            reason = attempt(folder)
        except OSError as error:
            reason = error.strerror or str(error)
        if reason:
            yield name, reason


def _lock(folder: Path) -> str:
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        if not file_lock.try_lock(fd):
            return "another process has the lock of a new file"
        child = os.fork()
        if not child:
            os._exit(_status_of_rival(folder / "lock"))
        _, status = os.waitpid(child, 0)
        return "two processes got one lock" if os.waitstatus_to_exitcode(status) else ""
    finally:
        os.close(fd)


def _status_of_rival(path: Path) -> int:
    """In another process: 1 if it gets the lock that its parent has."""
    try:
        return int(file_lock.try_lock(os.open(path, os.O_RDWR)))
    except OSError:
        return 0


def _create(folder: Path) -> str:
    for _ in range(2):
        try:
            os.close(os.open(folder / "once", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return ""
    return "a name was created twice"


def _link(folder: Path) -> str:
    (folder / "source").touch()
    for _ in range(2):
        try:
            os.link(folder / "source", folder / "link")
        except FileExistsError:
            return ""
    return "a name was linked twice"


def _rename(folder: Path) -> str:
    name, new = folder / "name", folder / "new"
    name.write_bytes(b"old")
    new.write_bytes(b"new")
    with name.open("rb") as before:
        os.rename(new, name)
        if before.read() != b"old":
            return "a reader of the old file lost its bytes"
    return "" if name.read_bytes() == b"new" and not new.exists() else "the old file stayed"


def _sync(folder: Path) -> str:
    durable.sync(folder)
    return ""


ATTEMPTS: dict[str, Callable[[Path], str]] = {
    "locks": _lock,
    "exclusive creation": _create,
    "links": _link,
    "renames": _rename,
    "durable names": _sync,
}
"""Functions that try a guarantee, and return or raise the reason why it does not hold."""


def main(argument: str) -> None:
    """Try one directory in this process."""
    answer(json.dumps(asdict(try_directory(Need(**json.loads(argument))))))


if __name__ == "__main__":
    main(sys.argv[1])


__all__ = ["Guarantees", "of_directory", "try_directory"]
