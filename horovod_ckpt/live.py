"""What ranks have in their models when those they trained with are gone.

An elastic job's processes outlive its checkpointers: each rank remembers what it has between one
and the next, the ranks compare, and the best of all is what they go on from where no level has a
version. Pure.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

import tierckpt
from tierckpt.naming import Lineage


class Condition(enum.IntEnum):
    """What the state in a rank's models is worth."""

    UNSOUND = 0
    """Half loaded, or given up by the script."""
    INEXACT = 1
    """An iteration was cut short: its forward pass has moved generators and buffers."""
    EXACT = 2


@dataclass(frozen=True, order=True)
class Live:
    """A state in the models and the optimizers; of several the largest is the best to go on from.

    A rank that never trained has none.
    """

    condition: Condition
    version: int
    iteration: int
    lineage: Lineage
    committed: int = field(default=0, compare=False)
    """The version of the last boundary that the rank passed."""


NOT_SOUND = Live(Condition.UNSOUND, 0, 0, ())


def left_by(ckpt: tierckpt.Checkpointer, condition: Condition) -> Live:
    """What a rank has that trained with `ckpt`, whose last restore may have got half-way."""
    condition = Condition.UNSOUND if ckpt.state.torn else condition
    return Live(condition, ckpt.steps_made, ckpt.iteration, ckpt.lineage, ckpt.version)


def left_half_way(ckpt: tierckpt.Checkpointer, before: Live | None) -> Live | None:
    """What a rank has that was about to begin with `ckpt`, and had `before` then."""
    if ckpt.state.torn:
        return NOT_SOUND
    if ckpt.version:  # all of it had come
        version = ckpt.version
        return Live(Condition.INEXACT, version, ckpt.iteration, ckpt.lineage, version)
    return before and replace(before, condition=min(before.condition, Condition.INEXACT))
