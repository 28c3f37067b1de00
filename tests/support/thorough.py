"""What is tested at every point only on demand: the gate has forty minutes for everything."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

VARIABLE = "EVERY_POINT"
"""Not `TIERCKPT_...`: that would be a setting, and every rank would refuse it as unknown."""


def points(every: Iterable[str], *always: str) -> list[str]:
    """`every` with the variable set, else those of `always`, in the order of `every`."""
    every = list(every)
    assert set(always) <= set(every)
    return every if os.environ.get(VARIABLE) else [point for point in every if point in always]


def on_demand(why: str) -> pytest.MarkDecorator:
    """For a test that the gate leaves out, and why it can."""
    return pytest.mark.skipif(
        not os.environ.get(VARIABLE), reason=f"on demand ({VARIABLE}=1): {why}"
    )
