"""`tierckpt list --files`: the routed files of a version."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tierckpt._text import size_text
from tierckpt.offline.survey import Survey

from ..columns import print_columns

if TYPE_CHECKING:
    from rich.console import Console

TITLES = ("rank", "size", "file")
NEWEST = 0
"""In place of a version's number: the one that a restart takes from disks."""


@dataclass(frozen=True)
class _File:
    rank: int
    nbytes: int
    name: str


def files_as_json(there: Survey, paths: Sequence[str], version: int) -> dict[str, Any]:
    """The files of a version for other programs. Raises as `print_files`."""
    number, name, files = _files_of(there, paths, version)
    return {"version": number, "name": name, "files": [asdict(each) for each in files]}


def print_files(there: Survey, paths: Sequence[str], version: int, console: Console) -> None:
    """Print the files of a version. Reads the heads of its shards. `there`: the survey of these
    paths, which stays as it is. Raises RestoreError without such a version."""
    number, name, files = _files_of(there, paths, version)
    if not files:
        text = f"v{number} has no files: no program routed any (docs/files.md)"
        console.print(text, soft_wrap=True)
        return
    named = f" ({name!r})" if name not in ("", str(number)) else ""
    console.print(f"files of v{number}{named}:", soft_wrap=True)
    lines = [(str(each.rank), size_text(each.nbytes) or "0 B", each.name) for each in files]
    print_columns([TITLES, *lines], ("file",), console)


def _files_of(there: Survey, paths: Sequence[str], version: int) -> tuple[int, str, list[_File]]:
    """Number, name and files of a version; the name is the program's own, as in SCR."""
    from tierckpt.offline.load import leave_out_memory  # imports torch
    from tierckpt.offline.stored_version import open_version

    there = replace(there, unseen=[*there.unseen])
    leave_out_memory(there)
    with closing(open_version(paths, version or None, lambda nbytes: None, there)) as found:
        files = [
            _File(rank, high - low, name)
            for rank in range(len(found.shards))
            for name, (low, high) in sorted(found.files(rank).items())
        ]
        name = str((found.tree(0).get("files") or {}).get("name", ""))
        return found.manifest.id.version, name, files


__all__ = ["NEWEST", "files_as_json", "print_files"]
