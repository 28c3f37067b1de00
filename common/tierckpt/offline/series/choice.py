"""The versions of a path that somebody asked for, and what may be missing among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from tierckpt._text import some
from tierckpt.core.copies import Problem
from tierckpt.core.retention import milestones
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.format.ids import VersionId

from ..catalog import complete_versions
from ..jobs import hints_of
from ..load import leave_out_memory, text_of
from ..survey import Survey, Where, survey

MOST_SHOWN = 4


@dataclass(frozen=True)
class Choice:
    """The versions that somebody asked for."""

    every: int | None = None
    first: int | None = None
    last: int | None = None
    run: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for what is no whole number, and for an `every` of no steps."""
        for name, value in vars(self).items():
            if value is not None and not isinstance(value, SupportsIndex):
                raise ConfigError(f"{name}={value!r}: give a whole number")
        if self.every is not None and self.every < 1:
            raise ConfigError(f"every={self.every}: give a number of steps, 1 or more")

    def among(self, versions: Iterable[int]) -> set[int]:
        """The versions that are chosen among these, which are all that there are."""
        points = versions if self.every is None else milestones(versions, self.every)
        return {
            version
            for version in points
            if (self.first is None or version >= self.first)
            and (self.last is None or version <= self.last)
        }

    def __str__(self) -> str:
        given = {name: value for name, value in vars(self).items() if value is not None}
        return ", ".join(f"{name}={value}" for name, value in given.items())


@dataclass(frozen=True)
class Chosen:
    """The versions that were chosen, and those that may be missing among them."""

    parts: dict[VersionId, Survey]
    """Each version's own copies, oldest first."""
    gaps: tuple[str, ...]
    """Sentences about chosen versions that exist and cannot be read."""
    others: tuple[int, ...]
    """Versions that can be read and were not chosen."""
    parts_only: bool
    """There are shards, but no complete version."""
    hint: str = ""
    """Where the checkpoints may be, if none are here."""

    def texts(self, choice: Choice) -> Iterator[str]:
        """What to tell whoever chose, if anything."""
        if not self.parts and self.others:
            there = some([f"v{version}" for version in self.others], 6)
            yield f"no version for {choice}; there is {there}"
        elif self.parts_only:
            yield "no version is complete here; give the places of all nodes, or the persistent one"
        elif not self.parts:
            yield f"no checkpoints here; {self.hint}" if self.hint else "no checkpoints here"
        if self.gaps:
            yield f"versions may be missing: {some(self.gaps, MOST_SHOWN, '; ')}"


def choose(path: Where | Sequence[Where], choice: Choice) -> Chosen:
    """The versions of a path that can be read and were chosen. Raises as `history`."""
    there = survey(path)
    troubles = [*there.unseen, *there.problems]
    leave_out_memory(there)
    every = complete_versions(there, text_of(path), choice.run)
    gaps = _gaps(troubles, choice, every)
    if gaps and not every:
        raise RestoreError(f"{text_of(path)}: nothing can be read: {some(gaps, MOST_SHOWN, '; ')}")
    if not every:
        # Memory was left out: that of a running job changes.
        gaps = _gaps([*there.unseen, *there.problems], choice, every)
    chosen = choice.among(id_.version for id_ in every)
    parts = {id_: part for id_, part in every.items() if id_.version in chosen}
    others = tuple(id_.version for id_ in every if id_ not in parts)
    partly = bool(there.copies) and not every
    return Chosen(parts, gaps, others, partly, hints_of(path, there))


def _gaps(
    troubles: Iterable[Problem], choice: Choice, readable: Iterable[VersionId]
) -> tuple[str, ...]:
    """What cannot be read, without what only concerns versions that were not chosen, and would not
    be if they could be read."""
    there = {id_.version for id_ in readable}
    found: dict[str, None] = {}
    for each in troubles:
        lost = {key.id.version for key in each.keys}
        if not lost or lost & choice.among(there | lost):
            found[f"{each.place.where}: {each.why}"] = None
    return tuple(found)


__all__ = ["Choice", "Chosen", "choose"]
