"""Rollback: the way back to an older version, once. Pure.

A request names a version: the setting `rollback_to`, or a file that `tierckpt rollback` wrote. The
next restore takes that version, and its run stores a record before its first version: its own entry
in the lineage. Restarts apply the record until a version of that run, or of a later one, is found,
which has the entry in its own lineage. So a restart never returns to versions that were given up,
and carries out no request twice, however long the request stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierckpt._text import some
from tierckpt.errors import RestoreError

SETTING = "rollback_to"
MOST_HONOURED = 64
"""Limit of the names of requests in a record."""


@dataclass(frozen=True)
class RollbackRequest:
    """A wish to go back to a version, until a run has done so."""

    version: int
    name: str
    """Name of the request, which no other one has."""
    where: str = ""
    """The place that has the request."""


@dataclass(frozen=True, order=True)
class Rollback:
    """The record of a run that went back: its entry in the lineage, and all earlier requests."""

    generation: int
    version: int
    honoured: tuple[str, ...] = ()
    """Names of requests that runs have carried out, oldest first."""

    @property
    def entry(self) -> tuple[int, int]:
        """The run's entry in the lineage."""
        return self.generation, self.version


def of_setting(version: int) -> RollbackRequest | None:
    """Return the request of the setting; None if it is not set."""
    return RollbackRequest(version, f"{SETTING} {version}", SETTING) if version else None


def merged(records: Iterable[Rollback]) -> Rollback | None:
    """Return the newest record, with the requests of all; None without one."""
    ordered = sorted(records)
    if not ordered:
        return None
    names = dict.fromkeys(name for each in ordered for name in each.honoured)
    return Rollback(*ordered[-1].entry, tuple(names)[-MOST_HONOURED:])


def pending(
    requests: Iterable[RollbackRequest], done: Rollback | None
) -> tuple[RollbackRequest, ...]:
    """Return the requests that no run has carried out. Those of the command come before the
    setting's."""
    honoured = done.honoured if done else ()
    left = {each.name: each for each in requests if each.name not in honoured}
    return tuple(sorted(left.values(), key=lambda each: (each.where == SETTING, each.name)))


def check_alike(requests: Iterable[RollbackRequest]) -> None:
    """Raise RestoreError if files at different places ask for different versions."""
    by_command = [each for each in requests if each.where != SETTING]
    if len({each.version for each in by_command}) > 1:
        wanted = some(sorted(f"v{each.version} in {each.where}" for each in by_command))
        raise RestoreError(
            f"`tierckpt rollback` was called for different versions: {wanted}. Nothing was changed",
            "Take back all but one: tierckpt rollback PATH --cancel",
        )


def nearest(wanted: int, there: Iterable[int], count: int = 4) -> list[int]:
    """Return the numbers of `there` that are nearest to `wanted`, in order."""
    return sorted(sorted(set(there), key=lambda each: (abs(each - wanted), each))[:count])


__all__ = [
    "SETTING",
    "Rollback",
    "RollbackRequest",
    "check_alike",
    "merged",
    "nearest",
    "of_setting",
    "pending",
]
