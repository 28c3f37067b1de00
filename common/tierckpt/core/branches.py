"""Branches of a lineage: the way back to an older version, and new jobs from another's version.

Pure. A rollback request names a version: the setting `rollback_to`, or a file that `tierckpt
rollback` wrote. The next restore takes that version, and its run stores a record before its first
version: its own entry in the lineage. Restarts apply the record until a version of that run, or of
a later one, is found, which has the entry in its own lineage. So a restart never returns to
versions that were given up, and carries out no request twice, however long the request stays.

A fork is a new job that starts from another one's version. It has the record of its origin beside
its versions. The other job, the source, has a mark beside the version: a *hold* as long as the new
job needs it, because it has no durable version of its own yet. Later the mark stays as a note, so
that the history of the source shows its forks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from tierckpt._text import some
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.format.ids import VersionId

__all__ = [
    "FORK_SETTING",
    "ROLLBACK_SETTING",
    "Child",
    "ForkSource",
    "Origin",
    "Rollback",
    "RollbackRequest",
    "check_alike",
    "fork_name",
    "merged_rollbacks",
    "nearest_version",
    "pending_request",
    "rollback_of_setting",
    "source_of",
]


FORK_SETTING = "fork_from"
_SOURCE = re.compile(r"(.+)@v?(\d+)", re.DOTALL)


class ForkSource(Struct, frozen=True):
    """A version of another job, as people name it."""

    path: str
    """The job's `path`, or its `persistent_path`."""
    version: int | None = None
    """None: the newest."""

    def __str__(self) -> str:
        return self.path if self.version is None else f"{self.path}@v{self.version}"


def source_of(text: str) -> ForkSource:
    """Parse `PATH`, `PATH@4000` or `PATH@v4000`. A directory with such an end in its own name is
    given with a slash after it. Raises ConfigError for an empty path."""
    match = _SOURCE.fullmatch(text)
    source = ForkSource(match[1], int(match[2])) if match else ForkSource(text)
    if not source.path.strip():
        raise ConfigError(f"{FORK_SETTING} is {text!r}; give a job's path, or PATH@VERSION")
    return source


class Origin(Struct, frozen=True):
    """The record of a job that started from a version of another one, or is to."""

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
        values = asdict(self) | {"version": self.id.version, "generation": self.id.generation}
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


def fork_name(host: str, path: str, source: str, id_: VersionId, run_id: str) -> str:
    """Return the name of the fork with that path on that machine, from that version: 16 hexadecimal
    digits. A fork killed before its record is written has the same name at its next try, so it
    leaves no mark for ever."""
    text = "\0".join((host, path, source, run_id, *map(str, id_)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Child(Struct, frozen=True):
    """The mark of a fork, at its source."""

    id: VersionId
    """The version that the fork started from."""
    name: str
    path: str
    """The fork's path (absolute) or URL."""
    host: str = ""
    """The machine that the path is on."""
    since_seconds: float = 0.0
    held: bool = True
    """The fork still needs the version."""
    where: str = ""
    """The place of the mark; not compared."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Child) and asdict(self) | {"where": other.where} == asdict(other)

    def __hash__(self) -> int:
        return hash((self.id, self.name))


ROLLBACK_SETTING = "rollback_to"
MAX_HONOURED = 64
"""Limit of the names of requests in a record."""


class RollbackRequest(Struct, frozen=True):
    """A wish to go back to a version, until a run has done so."""

    version: int
    name: str
    """Name of the request, which no other one has."""
    where: str = ""
    """The place that has the request."""


class Rollback(Struct, frozen=True, order=True):
    """The record of a run that went back: its entry in the lineage, and all earlier requests."""

    generation: int
    version: int
    honoured: tuple[str, ...] = ()
    """Names of requests that runs have carried out, oldest first."""

    @property
    def entry(self) -> tuple[int, int]:
        """The run's entry in the lineage."""
        return self.generation, self.version


def rollback_of_setting(version: int) -> RollbackRequest | None:
    """Return the request of the setting; None if it is not set."""
    return (
        RollbackRequest(version, f"{ROLLBACK_SETTING} {version}", ROLLBACK_SETTING)
        if version
        else None
    )


def merged_rollbacks(records: Iterable[Rollback]) -> Rollback | None:
    """Return the newest record, with the requests of all; None without one."""
    ordered = sorted(records)
    if not ordered:
        return None
    names = dict.fromkeys(name for each in ordered for name in each.honoured)
    return Rollback(*ordered[-1].entry, tuple(names)[-MAX_HONOURED:])


def pending_request(
    requests: Iterable[RollbackRequest], done: Rollback | None
) -> tuple[RollbackRequest, ...]:
    """Return the requests that no run has carried out. Those of the command come before the
    setting's."""
    honoured = done.honoured if done else ()
    left = {each.name: each for each in requests if each.name not in honoured}
    return tuple(
        sorted(left.values(), key=lambda each: (each.where == ROLLBACK_SETTING, each.name))
    )


def check_alike(requests: Iterable[RollbackRequest]) -> None:
    """Raise RestoreError if files at different places ask for different versions."""
    by_command = [each for each in requests if each.where != ROLLBACK_SETTING]
    if len({each.version for each in by_command}) > 1:
        wanted = some(sorted(f"v{each.version} in {each.where}" for each in by_command))
        raise RestoreError(
            f"`tierckpt rollback` was called for different versions: {wanted}. Nothing was changed",
            "Take back all but one: tierckpt rollback PATH --cancel",
        )


def nearest_version(wanted: int, there: Iterable[int], count: int = 4) -> list[int]:
    """Return the numbers of `there` that are nearest to `wanted`, in order."""
    return sorted(sorted(set(there), key=lambda each: (abs(each - wanted), each))[:count])
