"""Fault injection in this process; for another one, set `TIERCKPT_FAULTS` in its environment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tierckpt import _faults


@contextlib.contextmanager
def injected(rules: str) -> Iterator[list[_faults.Rule]]:
    """Apply the `rules` (see `tierckpt._faults`) inside `with`; yields them, for their hits."""
    before, _faults._rules = _faults._rules, _faults.parse(rules)
    try:
        yield _faults._rules
    finally:
        _faults._rules = before
