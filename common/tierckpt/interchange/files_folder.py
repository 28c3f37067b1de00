"""A folder with the routed files of a version: one folder for each rank that wrote some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from tierckpt.errors import RestoreError
from tierckpt.offline.stored_version import StoredTensor, StoredVersion
from tierckpt.storage.routed.folders import checked_name
from tierckpt.storage.routed.source_file import PREFIX

WINDOW_BYTES = 8 * 1024 * 1024
Write = Callable[[BinaryIO], object]


def write(version: StoredVersion, out: Path) -> int:
    """Write the files of all ranks to `out/<rank>/<name>`; returns their number.

    Every byte is verified. Raises RestoreError if the version has no files, CorruptShardError for
    damage, and OSError.
    """
    count = 0
    for rank in range(len(version.shards)):
        for name, content in _files_of(version, rank).items():
            path = out / f"{rank:05d}" / checked_name(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                content(file)
            count += 1
    if not count:
        raise RestoreError(f"{version.text()} has no files: no program routed any")
    return count


def _files_of(version: StoredVersion, rank: int) -> dict[str, Write]:
    """A function for each file of a rank, which writes it: an entry, or a value of its tree."""
    entries = {
        name.removeprefix(PREFIX): held[rank]
        for name, held in version.own.items()
        if name.startswith(PREFIX) and rank in held
    }
    found: dict[str, Write] = {name: _copy_of(entry) for name, entry in entries.items()}
    beside = (version.tree(rank).get("files") or {}).get("contents", {})
    for name, content in beside.items():
        data = memoryview(content.numpy())
        found[name] = lambda file, data=data: file.write(data)  # type: ignore[misc]
    return found


def _copy_of(entry: StoredTensor) -> Write:
    def copy(file: BinaryIO) -> None:
        for low in range(0, entry.spec.numel, WINDOW_BYTES):
            file.write(entry.read(low, min(low + WINDOW_BYTES, entry.spec.numel)).data)

    return copy


__all__ = ["write"]
