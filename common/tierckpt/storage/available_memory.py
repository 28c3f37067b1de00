"""How much memory this process may still take: what the machine has, and what its limits leave.

A container, a Slurm step or a systemd unit has a limit of its own, in its control group or in one
above that; `/proc/meminfo` knows nothing of it, and slots in shared memory count against it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


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
