"""Ledger: the versions of a level that are complete on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierckpt.format.ids import VersionId

PENDING, DONE, BROKEN = 0, 1, -1
"""State of one version on one level at one rank. The minimum over ranks is the version's state:
one broken rank breaks it for all, one pending rank keeps it pending."""


def superseded_by(safe: VersionId, protected: set[VersionId]) -> set[VersionId]:
    """Return the versions of `protected` to protect once `safe` is known complete on all ranks."""
    return {safe, *(v for v in protected if v > safe)}


REMEMBERED = 16
"""Number of broken versions that agents are informed of again, in case they missed the first
message."""


@dataclass
class Ledger:
    """Knowledge about the versions taken to one level, oldest first. Equal on every rank."""

    safe: VersionId | None = None
    """The newest version known to be complete on all ranks: never overwritten, never deleted."""
    open: list[VersionId] = field(default_factory=list)
    """Versions taken whose outcome is not yet known to all ranks."""
    broken: list[VersionId] = field(default_factory=list)
    """The last `REMEMBERED` versions that are known to be incomplete on some rank."""

    def resolve(self, state: int, candidate: VersionId | None) -> VersionId | None:
        """Record the agreed state of `candidate`, the oldest open version when ranks voted.

        Returns the version when it broke, else None.
        """
        if candidate is None or candidate not in self.open or state == PENDING:
            return None
        self.open.remove(candidate)
        self.broken = [v for v in self.broken if v != candidate]  # it may have been taken again
        if state == BROKEN:
            self.broken = [*self.broken, candidate][-REMEMBERED:]
            return candidate
        self.safe = candidate
        return None

    def protected(self, also_safe: VersionId | None = None) -> set[VersionId]:
        """Return the versions that must not be overwritten; `also_safe` was just found safe."""
        known = {*self.open, *([self.safe] if self.safe else [])}
        return known if also_safe is None else superseded_by(also_safe, known)


__all__ = ["BROKEN", "DONE", "PENDING", "REMEMBERED", "Ledger", "superseded_by"]
