"""Holds of forks that nobody will end: the source was moved, so the fork did not find its mark; or
the fork was killed at the moment of its first version, and lost its record with its node."""

from __future__ import annotations

import socket
from contextlib import suppress

from tierckpt._text import is_url
from tierckpt.core.fork import Child
from tierckpt.core.levels import MEMORY
from tierckpt.errors import TierckptError
from tierckpt.offline.survey import Survey, survey


def is_stale(child: Child, fork: Survey) -> bool:
    """Whether the fork with this survey does not need the version that is held for it: it says so
    in the record of its origin, or it does not run, and has a complete version on disk. (One that
    runs ends the hold itself, a moment after its first version.)"""
    if not child.held:
        return False
    if any(origin.name == child.name and not origin.held for origin in fork.origins):
        return True
    is_here = is_url(child.path) or child.host == socket.gethostname()
    plan = fork.plan() if is_here and not fork.living else None
    return plan is not None and MEMORY not in plan.levels


def stale_holds(there: Survey) -> list[Child]:
    """The holds in a survey that their forks do not need any more, as far as the forks' paths lead
    to them from here. Reads those forks."""
    found: dict[str, Child] = {}
    for _, child in there.children:
        if child.held and child.path:
            with suppress(OSError, TierckptError):
                if is_stale(child, survey(child.path)):
                    found[child.name] = child
    return sorted(found.values(), key=lambda each: (each.id, each.path))


__all__ = ["is_stale", "stale_holds"]
