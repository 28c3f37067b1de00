"""The mount of a directory: its kind, and whether other machines see it and its locks, as far as
the kernel's table shows. Standard library only.

Only the table is read, so a file system that hangs does not block the caller.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LAYERS", "MEMORY", "SHARED", "Mount", "locks_are_local", "mount_of", "mounts_in"]


MEMORY = frozenset({"tmpfs", "ramfs"})
SHARED = frozenset(
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
"""Kinds of file systems whose locks the kernel keeps locally."""


@dataclass(frozen=True)
class Mount:
    """One line of the table; all fields are empty if no line fits."""

    point: str = ""
    kind: str = ""
    options: frozenset[str] = frozenset()

    @property
    def keeps_locks(self) -> str:
        """Why only this machine sees the locks, as text for messages; empty if that is unknown."""
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
    """The places of mounts directly in a directory, whose name has no links."""
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
    its mount, as text for messages. Empty if that is not known."""
    try:
        return mount_of(os.path.realpath(directory)).keeps_locks
    except OSError:
        return ""
