"""Points of tests: a few always, others on demand. The simulator kills at each call."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

VARIABLE = "EVERY_POINT"
"""Not `TIERCKPT_...`: that would be a setting, and every rank would refuse it as unknown."""


def everything() -> bool:
    """True if all points are requested."""
    return os.environ.get(VARIABLE, "") != ""


def points(every: Iterable[str], *always: str) -> list[str]:
    """Those of `always`, in the order of `every`; all of `every` if the variable is set."""
    every = list(every)
    assert set(always) <= set(every)
    return every if everything() else [point for point in every if point in always]


def on_demand(why: str) -> pytest.MarkDecorator:
    """Mark a test that the gate leaves out, with the reason."""
    return pytest.mark.skipif(not everything(), reason=f"on demand ({VARIABLE}=1): {why}")
