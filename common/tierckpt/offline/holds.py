"""Holds of forks that nobody will end: the source was moved, so the fork did not find its mark."""

from __future__ import annotations

from contextlib import suppress

from tierckpt.core.fork import Child, Origin
from tierckpt.errors import TierckptError

from .survey import Survey, survey


def is_stale(child: Child, origin: Origin | None) -> bool:
    """Whether a fork does not need the version that is held for it, by the record of its origin.
    False without one."""
    return child.held and origin is not None and origin.name == child.name and not origin.held


def stale_holds(there: Survey) -> list[Child]:
    """The holds in a survey that their forks do not need any more, as far as the forks' paths lead
    to them from here. Reads those forks."""
    found: dict[str, Child] = {}
    for _, child in there.children:
        if child.held and child.path:
            with suppress(OSError, TierckptError):
                if any(is_stale(child, origin) for origin in survey(child.path).origins):
                    found[child.name] = child
    return sorted(found.values(), key=lambda each: (each.id, each.path))


__all__ = ["is_stale", "stale_holds"]
