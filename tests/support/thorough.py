"""Selection of test points: some only on demand, some in the gate, but not in `make test`.

The gate has forty minutes for everything, `make test` twelve.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

VARIABLE = "EVERY_POINT"
"""Not `TIERCKPT_...`: that would be a setting, and every rank would refuse it as unknown."""
SWEEPS = "sweeps"
"""Value of the variable in the gate."""


def everything() -> bool:
    """True if all points are requested."""
    return os.environ.get(VARIABLE, "") not in ("", SWEEPS)


def points(every: Iterable[str], *always: str) -> list[str]:
    """Return `every` if the variable is 1, otherwise those of `always`, in the order of `every`."""
    return _points(every, always, everything())


def swept_points(every: Iterable[str], *always: str) -> list[str]:
    """The same, but the gate takes `every`, too."""
    return _points(every, always, os.environ.get(VARIABLE, "") != "")


def _points(every: Iterable[str], always: tuple[str, ...], thorough: bool) -> list[str]:
    every = list(every)
    assert set(always) <= set(every)
    return every if thorough else [point for point in every if point in always]


def on_demand(why: str) -> pytest.MarkDecorator:
    """Mark a test that the gate leaves out, with the reason."""
    return pytest.mark.skipif(not everything(), reason=f"on demand ({VARIABLE}=1): {why}")
