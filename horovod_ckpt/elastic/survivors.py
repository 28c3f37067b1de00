"""What ranks have in their models when those they trained with are gone.

An elastic job's processes outlive its checkpointers: each rank remembers what it has between one
and the next, the ranks compare, and the best of all is what they go on from where no level has a
version. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import tierckpt
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


def left_by(ckpt: tierckpt.Checkpointer, condition: Condition) -> Survivors:
    """What a rank has that trained with `ckpt`, whose last restore may have got half-way."""
    condition = Condition.UNSOUND if ckpt.state.torn else condition
    finding = ckpt.drift
    odd = finding is not None and ckpt.group.rank in (finding.odd or ())
    at = (ckpt.steps_made, ckpt.iteration, ckpt.lineage, ckpt.version)
    return Survivors(condition, *at, finding is not None, odd)


def best_of(everyone: Sequence[Survivors | None]) -> tuple[int, Survivors] | None:
    """The rank that has the best of what all ranks have, and that; None where nobody has any. Of
    several it is the first one that is not odd."""
    live = max(filter(None, everyone), default=None)
    if live is None:
        return None
    ranks = [rank for rank, each in enumerate(everyone) if each == live]
    return min(ranks, key=lambda rank: everyone[rank].odd), live  # type: ignore[union-attr]


def left_half_way(ckpt: tierckpt.Checkpointer, before: Survivors | None) -> Survivors | None:
    """What a rank has that was about to begin with `ckpt`, and had `before` then."""
    if ckpt.state.torn:
        return NOT_SOUND
    if ckpt.version:  # all of it had come
        version = ckpt.version
        return Survivors(Condition.INEXACT, version, ckpt.iteration, ckpt.lineage, version)
    return before and replace(before, condition=min(before.condition, Condition.INEXACT))
