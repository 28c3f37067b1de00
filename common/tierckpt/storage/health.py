"""Node health: checks before a start that a node can hold checkpoints. Takes seconds.

A directory is healthy if a file written there, flushed to the device and read back has the same
bytes, and if there is enough free space. A process of its own checks each directory, because a dead
file system blocks any process that touches it. Standard library only.

    python -m tierckpt.storage.health '{"path": "/local/ckpts", "needed_bytes": 0, "make": false}'

prints the problem of one directory, or nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from tierckpt import _faults
from tierckpt._children import child_command, child_environment

from . import durable

PROBE_BYTES = 1024 * 1024
"""Bytes written to each directory: enough to make the device work."""


class Need(Struct, frozen=True):
    """Requirements for a directory."""

    path: str
    needed_bytes: int = 0
    """Free space, besides the bytes that the check itself writes."""
    make: bool = False
    """Create the directory if it is missing, as the job would."""
    parents: bool = True
    """Create missing parents too; False if a file system must be mounted there."""


def examine(
    needs: Sequence[Need],
    memory_bytes: int = 0,
    timeout_seconds: float = 20.0,
    processes: bool = True,
) -> list[str]:
    """Problems of this node, a sentence each; empty if it is healthy.

    Args:
        needs: directories; all are checked at once.
        memory_bytes: memory that must be available.
        timeout_seconds: a directory that does not answer in this time is a problem.
        processes: check in child processes; else in this process, without a time limit.
    """
    found = [check_memory(memory_bytes)]
    if processes:
        with contextlib.ExitStack() as interrupted:
            started = [(need.path, _start(need)) for need in needs]
            for _, process in started:
                interrupted.callback(process.kill)
            deadline = time.monotonic() + timeout_seconds
            for path, process in started:
                hangs = _hangs(path, timeout_seconds)
                found.append(_outcome(path, process, deadline - time.monotonic(), hangs))
            interrupted.pop_all()
    else:
        found += map(check_directory, needs)
    return [problem for problem in found if problem]


def check_memory(needed_bytes: int) -> str:
    """The problem if less memory is available than needed; empty if there is enough."""
    room = memory_room()
    if room is None or room.nbytes >= needed_bytes:  # None: no problem is known
        return ""
    have, needed = size_text(room.nbytes), size_text(needed_bytes)
    return f"{room.where}: {have} of memory are available and {needed} needed"


def check_directory(need: Need) -> str:
    """The problem of a directory; empty if it is healthy. Hangs if the file system hangs."""
    path = need.path
    try:
        if need.make:
            durable.make(Path(path), need.parents)
        _faults.point("health", op="room")
        found = os.statvfs(path)
        free = found.f_bavail * found.f_frsize
        needed = need.needed_bytes + PROBE_BYTES
        if free < needed:
            return f"{path}: {size_text(free)} are free and {size_text(needed)} needed; free space"
        return _write_and_read(path)
    except OSError as error:
        return f"{path}: {_reason(error, need)}"


def _reason(error: OSError, need: Need) -> str:
    """The error without the name of the temporary file."""
    above = os.path.dirname(os.path.abspath(need.path))
    kinds = {
        errno.ENOENT: f"there is no directory {above if need.make else need.path}",
        errno.ENOTDIR: "this is not a directory",
        errno.EACCES: "this user may not write there",
        errno.EROFS: "it is mounted read-only",
    }
    return kinds.get(error.errno or 0, str(error))


def _write_and_read(folder: str) -> str:
    written = os.urandom(PROBE_BYTES)
    # Without a name: no file remains, even if the check is killed while it hangs.
    with tempfile.TemporaryFile(dir=folder) as file:
        _faults.point("health", op="write")
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
        # Clean pages leave the page cache, so that the read comes from the device.
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


def output_of(module: str, need: Need, timeout_seconds: float) -> str:
    """The output of another module's check of one directory, which may hang; or the problem if it
    did not end in time, or crashed."""
    process = _start(need, module)
    try:
        return _outcome(need.path, process, timeout_seconds, _hangs(need.path, timeout_seconds))
    finally:
        process.kill()


def _hangs(path: str, timeout_seconds: float) -> str:
    return f"{path} did not answer within {timeout_seconds:g} s; its file system hangs"


def _start(need: Need, module: str = __name__) -> subprocess.Popen[str]:
    return subprocess.Popen(
        child_command(module, json.dumps(asdict(need))),
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        process_group=0,  # the waiting process handles Ctrl-C
    )


def _outcome(path: str, process: subprocess.Popen[str], timeout_seconds: float, hangs: str) -> str:
    """The output of the check; `hangs` if it did not end in time, and then it is killed."""
    try:
        # A process checked late may have answered long ago.
        output, _ = process.communicate(timeout=max(timeout_seconds, 0.5))
    except subprocess.TimeoutExpired:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)  # a process stuck in the kernel ends later
        return hangs
    if process.returncode:
        return f"{path}: the check ended with status {process.returncode}"
    return output.strip()


def main(argument: str) -> None:
    """Check one directory in this process."""
    answer(check_directory(Need(**json.loads(argument))))


def answer(text: str) -> None:
    """In a process of a check: print the result. Ends silently if nothing waits for it any more."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(text, flush=True)


# --- sizes ---------------------------------------------------------------------------------------

UNITS = ("", "K", "M", "G", "T", "P")


def size_text(nbytes: float) -> str:
    """`1.5 GiB`."""
    unit = 0
    while nbytes >= 1024 and unit < len(UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.4g} {UNITS[unit]}{'iB' if unit else 'bytes'}"


if __name__ == "__main__":
    main(sys.argv[1])


class Room(Struct, frozen=True):
    """Available bytes, and the source of the limit: `this node`, or the folder of a control
    group."""

    nbytes: int
    where: str


class _Kind(Struct, frozen=True):
    """One of the two versions of control groups, with its file names."""

    line: str
    """Prefix of its line in /proc/self/cgroup."""
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
    """The lowest of all limits; None if the kernel reports none. `root` is the root of /proc and
    /sys."""
    return min([*_machine(root), *_groups(root)], key=lambda room: room.nbytes, default=None)


def _machine(root: Path) -> Iterator[Room]:
    found = re.search(r"^MemAvailable: *(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    if found:
        yield Room(int(found[1]) * 1024, "this node")


def _groups(root: Path) -> Iterator[Room]:
    """Limits of all enclosing groups visible from here: a container sees its own group and those in
    it."""
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
