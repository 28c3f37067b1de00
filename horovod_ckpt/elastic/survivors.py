"""The live states of the remaining ranks after others were lost.

An elastic job's processes outlive its checkpointers. Between two checkpointers each rank remembers
the facts of its live state; then the ranks compare them, and continue from the best one if no level
has a version. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tierckpt.checkpointer.adapter import Handle
from tierckpt.format.ids import Lineage


class Condition(enum.IntEnum):
    """The condition of a rank's live state."""

    UNSOUND = 0
    """Partly loaded, or rejected by the script."""
    INEXACT = 1
    """An iteration was interrupted: its forward pass has changed generators and buffers."""
    EXACT = 2


@dataclass(frozen=True, order=True)
class Survivors:
    """The facts of a live state, of models and optimizers; the largest one is the best state to
    continue from.

    A rank that never trained has none.
    """

    condition: Condition
    version: int
    iteration: int
    lineage: Lineage
    committed: int = field(default=0, compare=False)
    """The version of the last boundary that the rank passed."""
    drifted: bool = field(default=False, compare=False)
    """The replicas of the ranks with this state differed; set on all of these ranks."""
    odd: bool = field(default=False, compare=False)
    """More than half of these ranks were equal, and this rank differed."""


NOT_SOUND = Survivors(Condition.UNSOUND, 0, 0, ())


def left_by(handle: Handle, condition: Condition) -> Survivors:
    """The live state of a rank that trained with this checkpointer; UNSOUND if a restore was
    interrupted."""
    condition = Condition.UNSOUND if handle.state.torn else condition
    finding = handle.drift
    odd = finding is not None and handle.group.rank in (finding.odd or ())
    at = (handle.steps_made, handle.iteration, handle.lineage, handle.version)
    return Survivors(condition, *at, finding is not None, odd)


def best_of(by_rank: Sequence[Survivors | None]) -> tuple[int, Survivors] | None:
    """The rank with the best live state, and that state; None if no rank has one. If several ranks
    have it, the first one that is not odd."""
    live = max(filter(None, by_rank), default=None)
    if live is None:
        return None
    ranks = [rank for rank, each in enumerate(by_rank) if each == live]
    return min(ranks, key=lambda rank: by_rank[rank].odd), live  # type: ignore[union-attr]


def left_half_way(handle: Handle, before: Survivors | None) -> Survivors | None:
    """The live state of a rank after a failure at the start of this checkpointer; `before`: its
    state before that start."""
    if handle.state.torn:
        return NOT_SOUND
    if handle.version:  # the whole state was received
        version = handle.version
        return Survivors(Condition.INEXACT, version, handle.iteration, handle.lineage, version)
    return before and replace(before, condition=min(before.condition, Condition.INEXACT))
