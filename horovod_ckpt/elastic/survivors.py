"""What ranks have in their models when those they trained with are gone.

An elastic job's processes outlive its checkpointers: each rank remembers what it has between one
and the next, the ranks compare, and the best of all is what they go on from where no level has a
version. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tierckpt.checkpointer.adapter import Handle
from tierckpt.format.ids import Lineage


class Condition(enum.IntEnum):
    """What the state in a rank's models is worth."""

    UNSOUND = 0
    """Half loaded, or given up by the script."""
    INEXACT = 1
    """An iteration was cut short: its forward pass has moved generators and buffers."""
    EXACT = 2


@dataclass(frozen=True, order=True)
class Survivors:
    """A state in the models and the optimizers; of several the largest is the best to go on from.

    A rank that never trained has none.
    """

    condition: Condition
    version: int
    iteration: int
    lineage: Lineage
    committed: int = field(default=0, compare=False)
    """The version of the last boundary that the rank passed."""
    drifted: bool = field(default=False, compare=False)
    """The ranks that had it are known to have differed, on all of them."""
    odd: bool = field(default=False, compare=False)
    """More than half of them were alike, and this rank differed."""


NOT_SOUND = Survivors(Condition.UNSOUND, 0, 0, ())


def left_by(handle: Handle, condition: Condition) -> Survivors:
    """The state of a rank that trained with this checkpointer, whose last restore may have got
    half-way."""
    condition = Condition.UNSOUND if handle.state.torn else condition
    finding = handle.drift
    odd = finding is not None and handle.group.rank in (finding.odd or ())
    at = (handle.steps_made, handle.iteration, handle.lineage, handle.version)
    return Survivors(condition, *at, finding is not None, odd)


def best_of(everyone: Sequence[Survivors | None]) -> tuple[int, Survivors] | None:
    """The rank that has the best of what all ranks have, and that; None where nobody has any. Of
    several it is the first one that is not odd."""
    live = max(filter(None, everyone), default=None)
    if live is None:
        return None
    ranks = [rank for rank, each in enumerate(everyone) if each == live]
    return min(ranks, key=lambda rank: everyone[rank].odd), live  # type: ignore[union-attr]


def left_half_way(handle: Handle, before: Survivors | None) -> Survivors | None:
    """The state of a rank that was about to begin with this checkpointer, and had `before` then."""
    if handle.state.torn:
        return NOT_SOUND
    if handle.version:  # all of it had come
        version = handle.version
        return Survivors(Condition.INEXACT, version, handle.iteration, handle.lineage, version)
    return before and replace(before, condition=min(before.condition, Condition.INEXACT))
