"""What is tested at every point only on demand: the gate has forty minutes for everything."""

from __future__ import annotations

import os
from collections.abc import Iterable

VARIABLE = "EVERY_POINT"
"""Not `TIERCKPT_...`: that would be a setting, and every rank would refuse it as unknown."""


def points(every: Iterable[str], *always: str) -> list[str]:
    """`every` with the variable set, else those of `always`, in the order of `every`."""
    every = list(every)
    assert set(always) <= set(every)
    return every if os.environ.get(VARIABLE) else [point for point in every if point in always]
