"""Forks: a new job that begins where another one was. Pure.

The new job has the record of its origin beside its versions. The other job, the source, has a mark
beside the version: a *hold* as long as the new job needs it, because it has no durable version of
its own yet. Later the mark stays as a note, so that the history of the source shows its forks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tierckpt.errors import ConfigError
from tierckpt.format.ids import VersionId

SETTING = "fork_from"
_SOURCE = re.compile(r"(.+)@v?(\d+)", re.DOTALL)


@dataclass(frozen=True)
class ForkSource:
    """A version of another job, as people name it."""

    path: str
    """The job's `path`, or its `persistent_path`."""
    version: int | None = None
    """None: the newest."""

    def __str__(self) -> str:
        return self.path if self.version is None else f"{self.path}@v{self.version}"


def source_of(text: str) -> ForkSource:
    """Parse `PATH`, `PATH@4000` or `PATH@v4000`. A directory whose own name ends in that way is
    given with a slash after it. Raises ConfigError for an empty path."""
    match = _SOURCE.fullmatch(text)
    source = ForkSource(match[1], int(match[2])) if match else ForkSource(text)
    if not source.path.strip():
        raise ConfigError(f"{SETTING} is {text!r}; give a job's path, or PATH@VERSION")
    return source


@dataclass(frozen=True)
class Origin:
    """The record of a job that began from a version of another one, or is to begin there."""

    source: str
    """The source's path (absolute) or URL."""
    id: VersionId
    run_id: str
    """The run of the source that wrote the version."""
    job: str
    """The source's id."""
    name: str
    """Name of the fork, also in the name of its mark at the source, see `name_of`."""
    parts: tuple[str, ...] = ()
    """The parts that were taken; empty: everything."""
    since_seconds: float = 0.0
    """Unix time of the order."""
    held: bool = True
    """The source's version is still needed, because this job has no durable version of its own."""

    def __str__(self) -> str:
        return f"{self.source}@v{self.id.version}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the record, with the names of FORMAT.md."""
        values = dict(vars(self)) | {"version": self.id.version, "generation": self.id.generation}
        del values["id"]
        return values

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Origin:
        """Read the fields that `to_json` made. Raises KeyError, ValueError or TypeError."""
        return Origin(
            source=str(values["source"]),
            id=VersionId(int(values["generation"]), int(values["version"])),
            run_id=str(values["run_id"]),
            job=str(values["job"]),
            name=str(values["name"]),
            parts=tuple(map(str, values["parts"])),
            since_seconds=float(values["since_seconds"]),
            held=bool(values["held"]),
        )


def name_of(host: str, path: str, source: str, id_: VersionId, run_id: str) -> str:
    """Return the name of the fork with that path on that machine, from that version: 16 hexadecimal
    digits. A fork that is killed before its record is written has the same name at its next try, so
    it leaves no mark that nobody would remove."""
    text = "\0".join((host, path, source, run_id, *map(str, id_)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Child:
    """The mark of a fork, at its source."""

    id: VersionId
    """The version that the fork began from."""
    name: str
    path: str
    """The fork's path (absolute) or URL."""
    host: str = ""
    """The machine that the path is on."""
    since_seconds: float = 0.0
    held: bool = True
    """The fork still needs the version."""
    where: str = field(default="", compare=False)
    """The place of the mark."""


__all__ = ["SETTING", "Child", "ForkSource", "Origin", "name_of", "source_of"]
