"""Party: a redundancy group, and the addresses of its members' agents."""

from __future__ import annotations

from dataclasses import dataclass

from tierckpt.erasure.groups import RedundancyGroup

from .address import Address


@dataclass(frozen=True)
class Party:
    """A group, and the addresses of its members."""

    group: RedundancyGroup
    addresses: tuple[Address, ...]
    """Addresses of the members' agents, in the order of the ring."""
    member: int
    """This agent's number on the ring."""

    def name(self, member: int) -> str:
        """The member's name in errors."""
        return f"rank {self.group.ranks[member]} ({self.addresses[member]})"

    @property
    def others(self) -> list[int]:
        """All other members, starting with the next on the ring, so that connections spread
        evenly."""
        n = self.group.code.n
        return [(self.member + i) % n for i in range(1, n)]


__all__ = ["Party"]
