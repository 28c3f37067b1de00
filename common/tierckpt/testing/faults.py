"""Fault injection in this process; for another one, set `TIERCKPT_FAULTS` in its environment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .. import faults


@contextlib.contextmanager
def injected(rules: str) -> Iterator[list[faults.Rule]]:
    """Let the `rules` (see `tierckpt.faults`) hold inside `with`; yields them, to ask for hits."""
    before, faults._rules = faults._rules, faults.parse(rules)
    try:
        yield faults._rules
    finally:
        faults._rules = before
