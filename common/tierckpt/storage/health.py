"""Node health: can a node do what checkpoints need of it? Found out before a start, and quickly.

A directory is well when a file that is written there, flushed to the device and read back from it
is what was written, and when there is room. Each is looked at by a process of its own, since a file
system that is dead holds on to whoever touches it. Standard library only.

    python -m tierckpt.storage.health '{"path": "/local/ckpts", "needed_bytes": 0, "make": false}'

prints what is wrong with one directory, or nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tierckpt import _faults
from tierckpt._children import child_command, child_environment
from tierckpt.errors import ConfigError

from .files import durable

PROBE_BYTES = 1024 * 1024
"""Written to each directory: enough for the device to have to do something."""


@dataclass(frozen=True)
class Need:
    """What a directory has to offer."""

    path: str
    needed_bytes: int = 0
    """Room, besides what is written here to try it out."""
    make: bool = False
    """Make it if it is not there, as the job would."""
    parents: bool = True
    """And what it is in; not where a file system has to be mounted."""


def examine(
    needs: Sequence[Need],
    memory_bytes: int = 0,
    timeout_seconds: float = 20.0,
    processes: bool = True,
) -> list[str]:
    """What is wrong with this node, a sentence each; empty when it is well.

    Args:
        needs: directories, looked at all at once.
        memory_bytes: memory that has to be available.
        timeout_seconds: a directory that has not answered by then is not well.
        processes: look from processes of their own; else from here, for as long as it takes.
    """
    found = [check_memory(memory_bytes)]
    if processes:
        with contextlib.ExitStack() as interrupted:
            started = [(need.path, _start(need)) for need in needs]
            for _, process in started:
                interrupted.callback(process.kill)
            deadline = time.monotonic() + timeout_seconds
            for path, process in started:
                hangs = f"{path} did not answer within {timeout_seconds:g} s; its file system hangs"
                found.append(_outcome(path, process, deadline - time.monotonic(), hangs))
            interrupted.pop_all()
    else:
        found += map(check_directory, needs)
    return [problem for problem in found if problem]


def check_memory(needed_bytes: int) -> str:
    """In words, that less memory is available than needed; empty when there is enough."""
    room = memory_room()
    if room is None or room.nbytes >= needed_bytes:  # None: nothing is known to be wrong
        return ""
    have, needed = size_text(room.nbytes), size_text(needed_bytes)
    return f"{room.where}: {have} of memory are available and {needed} needed"


def check_directory(need: Need) -> str:
    """In words, what is wrong with a directory; empty when it is well. May hang as it does."""
    path = need.path
    try:
        if need.make:
            durable.make(Path(path), need.parents)
        _faults.point("health", op="room")
        found = os.statvfs(path)
        free = found.f_bavail * found.f_frsize
        needed = need.needed_bytes + PROBE_BYTES
        if free < needed:
            return f"{path}: {size_text(free)} are free and {size_text(needed)} needed; make room"
        return _write_and_read(path)
    except OSError as error:
        return f"{path}: {_in_words(error, need)}"


def _in_words(error: OSError, need: Need) -> str:
    """Without the name of a file that was made only to try."""
    above = os.path.dirname(os.path.abspath(need.path))
    kinds = {
        errno.ENOENT: f"there is no directory {above if need.make else need.path}",
        errno.ENOTDIR: "this is no directory",
        errno.EACCES: "nothing may be written there",
        errno.EROFS: "it is mounted read-only",
    }
    return kinds.get(error.errno or 0, str(error))


def _write_and_read(folder: str) -> str:
    written = os.urandom(PROBE_BYTES)
    # Without a name: nothing of it stays, though the check may be killed where it hangs.
    with tempfile.TemporaryFile(dir=folder) as file:
        _faults.point("health", op="write")
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
        # What is clean and not wanted leaves the page cache: the device has to be asked.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        _faults.point("health", op="read")
        read = os.pread(file.fileno(), PROBE_BYTES, 0)
    if read == written:
        return ""
    wrong = sum(a != b for a, b in zip(written, read, strict=False)) + abs(len(written) - len(read))
    return (
        f"{folder}: {wrong} of {PROBE_BYTES} bytes were read back wrong; take the device out of use"
    )


# --- in processes --------------------------------------------------------------------------------


def _start(need: Need) -> subprocess.Popen[str]:
    return subprocess.Popen(
        child_command(__name__, json.dumps(asdict(need))),
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        process_group=0,  # Ctrl-C is for whoever waits for it
    )


def _outcome(path: str, process: subprocess.Popen[str], timeout_seconds: float, hangs: str) -> str:
    """What it found; `hangs` when it was still at it, and is killed."""
    try:
        # One that is waited for when the time is over has perhaps answered long ago.
        said, _ = process.communicate(timeout=max(timeout_seconds, 0.5))
    except subprocess.TimeoutExpired:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)  # one that the kernel holds on to ends later, when nobody asks
        return hangs
    if process.returncode:
        return f"{path}: the check itself ended with status {process.returncode}"
    return said.strip()


def main(argument: str) -> None:
    """Be the process that looks at one directory."""
    print(check_directory(Need(**json.loads(argument))))


# --- sizes ---------------------------------------------------------------------------------------

UNITS = ("", "K", "M", "G", "T", "P")


def parse_size(text: str) -> int:
    """Bytes from `800`, `64M`, `1.5G`; units are powers of 1024. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(f"{text!r} is no size; give bytes, or a number with K, M, G or T")
    return int(float(found[1]) * 1024 ** UNITS.index(found[2].upper()))


def size_text(nbytes: float) -> str:
    """`1.5 GiB`."""
    unit = 0
    while nbytes >= 1024 and unit < len(UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.4g} {UNITS[unit]}{'iB' if unit else 'bytes'}"


if __name__ == "__main__":
    main(sys.argv[1])


@dataclass(frozen=True)
class Room:
    """Available bytes, and whose limit that is: `this node`, or a control group by its folder."""

    nbytes: int
    where: str


@dataclass(frozen=True)
class _Kind:
    """One of the two generations of control groups, and how each calls things."""

    line: str
    """What begins its line of /proc/self/cgroup."""
    mount: str
    limit: str
    used: str
    cache: str
    """Field of memory.stat: page cache that the kernel drops when it needs room."""


_KINDS = (
    _Kind(r"0::", "", "memory.max", "memory.current", "inactive_file"),
    _Kind(
        r"\d+:(?:\w+,)*memory(?:,\w+)*:",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def memory_room(root: Path = Path("/")) -> Room | None:
    """The tightest of all limits; None where the kernel does not tell. `root`: of /proc, /sys."""
    return min([*_machine(root), *_groups(root)], key=lambda room: room.nbytes, default=None)


def _machine(root: Path) -> Iterator[Room]:
    found = re.search(r"^MemAvailable: *(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    if found:
        yield Room(int(found[1]) * 1024, "this node")


def _groups(root: Path) -> Iterator[Room]:
    """Of every group around us that is seen from here: a container's view begins at its own."""
    groups = _text(root / "proc/self/cgroup")
    for kind in _KINDS:
        found = re.search(rf"^{kind.line}/(.*)$", groups, re.MULTILINE)
        mount = root / "sys/fs/cgroup" / kind.mount
        inner = mount / found[1] if found else mount
        for folder in (inner, *inner.parents) if found else ():
            with suppress(ValueError):  # "max", or no such file: no limit here
                limit, used = int(_text(folder / kind.limit)), int(_text(folder / kind.used))
                cache = re.search(rf"^{kind.cache} (\d+)$", _text(folder / "memory.stat"), re.M)
                yield Room(max(0, limit - used + int(cache[1] if cache else 0)), str(folder))
            if folder == mount:
                break


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
