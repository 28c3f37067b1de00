"""A folder with the routed files of a version: one folder for each rank that wrote some."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from tierckpt.errors import RestoreError
from tierckpt.offline.stored_version import StoredVersion
from tierckpt.storage.routed.folders import checked_name


def recognizes(path: Path) -> bool:
    """True for a folder that looks as if `write` had made it."""
    return all(each.is_dir() and re.fullmatch(r"\d{5,}", each.name) for each in path.iterdir())


def write(version: StoredVersion, out: Path) -> int:
    """Write the files of all ranks to `out/<rank>/<name>`, with their permissions; returns their
    number.

    Every byte is verified. Raises RestoreError if the version has no files, CorruptShardError for
    damage, and OSError.
    """
    count = 0
    for rank, shard in enumerate(version.shards):
        modes = (version.tree(rank).get("files") or {}).get("modes", {})
        for name, (low, high) in version.files(rank).items():
            path = out / f"{rank:05d}" / checked_name(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for window in shard.windows(low, high):
                    file.write(window)
            path.chmod(modes[name] | stat.S_IRUSR)
            count += 1
    if not count:
        raise RestoreError(f"{version.text()} has no files: no program routed any")
    return count


__all__ = ["recognizes", "write"]
