"""Whether other machines see a directory's locks, as far as the mount options show. Standard
library only."""

from __future__ import annotations

import os
import re
from pathlib import Path

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


def locks_are_local(directory: str | os.PathLike[str]) -> str:
    """Why locks in `directory` are seen only on this machine although others may see the directory:
    its mount, as text for messages. Empty if that is not known."""
    try:
        table = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""
    return local_by(table, os.path.realpath(directory))


def local_by(table: str, path: str) -> str:
    """The same, from the text of /proc/self/mountinfo. Pure."""
    found = ("", "", "")
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 6 or len(rest) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[0]):
            found = (point, rest[0], ",".join([fields[5], *rest[2:3]]))
    point, kind, options = found
    keeps = sorted(_OF_ONE_MACHINE.get(kind, set()) & set(options.split(",")))
    if keeps:
        return f"{point} is mounted ({kind}) with {keeps[0]}"
    return f"{point} is {kind}, which has no locks between machines" if kind in _ALWAYS else ""


__all__ = ["local_by", "locks_are_local"]
