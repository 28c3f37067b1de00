"""The points that are tested only on demand, and those that the gate tests, but not `make test`.

The gate has forty minutes for everything, `make test` twelve.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

VARIABLE = "EVERY_POINT"
"""Not `TIERCKPT_...`: that would be a setting, and every rank would refuse it as unknown."""
SWEEPS = "sweeps"
"""Its value in the gate."""


def everything() -> bool:
    """Whether all is asked for."""
    return os.environ.get(VARIABLE, "") not in ("", SWEEPS)


def points(every: Iterable[str], *always: str) -> list[str]:
    """`every` with the variable set to 1, else those of `always`, in the order of `every`."""
    return _points(every, always, everything())


def swept_points(every: Iterable[str], *always: str) -> list[str]:
    """The same, but the gate has `every`, too."""
    return _points(every, always, os.environ.get(VARIABLE, "") != "")


def _points(every: Iterable[str], always: tuple[str, ...], thorough: bool) -> list[str]:
    every = list(every)
    assert set(always) <= set(every)
    return every if thorough else [point for point in every if point in always]


def on_demand(why: str) -> pytest.MarkDecorator:
    """For a test that the gate leaves out, and why it can."""
    return pytest.mark.skipif(not everything(), reason=f"on demand ({VARIABLE}=1): {why}")
