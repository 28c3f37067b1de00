"""After a rebuild: redundancy restored, so that the next failure is survived too.

A shard that was rebuilt is in the memory of the rank that made it, which is its own, and nowhere
else. It puts it into a slot, and from there it goes the way of every version: the agent commits it,
the ballots find the version complete on all nodes, and the agents protect it among themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .images import Image
from .inventory import Found, FoundParity, RestorePlan
from .naming import ParityKey, ShardKey, VersionId
from .pool import SlotPool
from .redundancy.groups import RedundancyGroup
from .slots import Slot, seal_area_bytes


def shards_to_mend(plan: RestorePlan, found: Sequence[Sequence[Found]]) -> frozenset[int] | None:
    """Shards that are not on the disk of the node of their rank; empty when none was rebuilt.

    Pure: every rank comes to the same. `found` is what each rank saw before the restore. None when
    this version cannot be protected again and a new one has to be: it has another number of ranks,
    or some rank's shard is on another node, and no longer in memory.
    """
    if not any(source.rebuilt for source in plan.sources):
        return frozenset()
    shards = len(plan.sources)
    if shards != len(found):
        return None
    lacking = set()
    for source in plan.sources:
        key = ShardKey(plan.id, source.shard, shards)
        here = {(f.key, f.life) for f in found[source.shard] if f.place.level == "local"}
        if source.rebuilt or (key, plan.life) not in here:
            if not (source.direct or source.rebuilt):
                return None
            lacking.add(source.shard)
    return frozenset(lacking)


def parities_to_mend(
    plan: RestorePlan,
    groups: Iterable[RedundancyGroup],
    found: Sequence[Sequence[FoundParity]],
) -> frozenset[int]:
    """Shards beside which, at their ranks, there is no parity of the version as `groups` have it.

    Pure. What is there is still good, and is left alone: made anew, it would be gone meanwhile.
    """
    damaged = {
        p.key
        for rebuilt in plan.rebuilds
        for each in found
        for p in each
        if p.group == rebuilt.group and p.key not in rebuilt.left
    }
    lost = set()
    for group in groups:
        code = (group.ranks, group.code.k, group.code.m)
        for rank in group.ranks:
            key = ParityKey(plan.id, rank, len(plan.sources))
            there = {(p.key, p.life, (p.group, p.k, p.m)) for p in found[rank]}
            if key in damaged or (key, plan.life, code) not in there:
                lost.add(rank)
    return frozenset(lost)


def keep(image: Image, pool: SlotPool, protected: set[VersionId], pinned: set[str]) -> Slot:
    """Copy a sound shard into a slot of this rank, sealed as it was when it was taken.

    `protected` and `pinned` as in `SlotPool.choose`; raises what that raises.
    """
    manifest = image.manifest
    seal_bytes = seal_area_bytes(manifest.data_blocks, len(manifest.lineage))
    slot = pool.choose(protected, pinned, seal_bytes, manifest.image_bytes)
    sealed = None
    try:
        with slot.image() as room:
            room[: manifest.image_bytes] = image.view[: manifest.image_bytes]
        slot.seal(manifest.encode())
        sealed = manifest.id
    finally:
        pool.filled(slot, sealed)
    return slot
