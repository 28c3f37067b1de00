"""Inventory exchange: every rank receives all inventories at a restart, each different one once.

The ranks of a node see the same slots and files, and usually find the same. So ranks first exchange
checksums of their inventories, and of those that are equal only the first rank sends its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tierckpt.agent.protocol import Mark
from tierckpt.core import packed_inventory
from tierckpt.core.copies import Inventory
from tierckpt.group import Group

from .error_barrier import ErrorBarrier


class Offer(NamedTuple):
    """A rank's announcement of its inventory."""

    digest: bytes
    token: str
    """Rank 0's token; empty from the others, as no other is used."""
    mark: Mark
    """Mark of the list of nodes that the rank's agent knows, see `FormerNodes.look`."""


def gather_inventories(
    group: Group | ErrorBarrier, own: Inventory, mark: Mark
) -> tuple[list[Inventory], list[Mark]]:
    """Return every rank's inventory and mark. Collective, in two rounds.

    Ranks with equal inventories have one object. Only rank 0's has its token.
    """
    packed = packed_inventory.pack(own)
    token = "" if group.rank else own.token
    offers: list[Offer] = group.all_gather_object(
        Offer(packed_inventory.digest(packed), token, mark)
    )
    parts: list[bytes] = group.all_gather_object(packed if is_sender(offers, group.rank) else b"")
    return _put_together(offers, parts), [offer.mark for offer in offers]


def is_sender(offers: Sequence[Offer], rank: int) -> bool:
    """True for the first rank with its inventory."""
    return next(r for r, o in enumerate(offers) if o.digest == offers[rank].digest) == rank


def _put_together(offers: Sequence[Offer], parts: Sequence[bytes]) -> list[Inventory]:
    """Return the inventories by rank. The first rank has one of its own, for its token."""
    received: dict[bytes, Inventory] = {}
    for offer, part in zip(offers, parts, strict=True):
        if part:
            received[offer.digest] = packed_inventory.unpack(part, offer.token)
    return [received[offer.digest] for offer in offers]


__all__ = ["Offer", "gather_inventories", "is_sender"]
