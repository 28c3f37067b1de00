"""Repair after a loss: make a restored version redundant again, so that it survives the next loss.

A rebuilt shard is only in the memory of its rank. The rank puts it into a slot, and from there it
goes the way of every version: the agent commits it, the votes find the version complete on all
nodes, and the agents protect it. A shard with a damaged file that is still in a slot of its rank
goes the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from tierckpt.core.copies import Found, FoundParity, distinct
from tierckpt.core.ledger import BROKEN, DONE
from tierckpt.core.levels import AGENT, LOCAL
from tierckpt.core.restore_plan import RestorePlan
from tierckpt.erasure.groups import RedundancyGroup
from tierckpt.format.ids import ParityKey, ShardKey, VersionId
from tierckpt.restore.shard_image import ShardImage
from tierckpt.storage.memory.slot_pool import NoSlotError, SlotPool
from tierckpt.storage.memory.slots import Slot, seal_area_bytes

if TYPE_CHECKING:
    from tierckpt.group import Group
    from tierckpt.restore.verified_version import VerifiedVersion

    from .tiers import Tiers


def repair(attempt: VerifiedVersion, group: Group, levels: Tiers) -> bool:
    """Make a loaded version complete and protected again.

    That is necessary if a part of it was lost or damaged on a disk, or came from a node outside the
    job; or if some of its parity is missing, because an earlier run was killed before it had made
    or repaired it.

    Returns False if a repair is impossible and a new version must be taken. Training thread; all
    ranks do the same, and none waits for another.
    """
    id_, agreement = attempt.plan.id, levels.agreement
    if any(source.place.level == AGENT for source in attempt.plan.sources):
        return False  # that agent ends soon, and its node may be gone then
    lacking = shards_to_mend(attempt.plan, levels.history.found)
    if lacking != frozenset() and not was_lost(attempt.plan, levels.history.damaged):
        return True  # it never was on all disks, or has another number of ranks
    if any(source.rebuilt for source in attempt.plan.sources) and not levels.peers.ready:
        return True  # the parity it was rebuilt from still protects it; a new version has none
    if lacking is None:
        return False
    parities = parities_to_mend(attempt.plan, levels.peers.groups, levels.history.parities)
    if not lacking and not parities:
        return True
    levels.peers.mend(id_, parities)
    if not lacking:
        levels.promotion.protect(id_)
        return True
    agreement.local.open.append(id_)
    if group.rank not in lacking:
        agreement.tell(LOCAL, id_, DONE)
        return True
    protected = agreement.memory.protected()
    # Two slots with one version would leave none for the next.
    slot = None if attempt.plan.sources[group.rank].rebuilt else levels.pool.find(id_)
    try:
        if slot is None:
            image, pinned = attempt.images[group.rank], levels.agent.pinned()
            slot = keep(image, levels.pool, protected, pinned)
    except (OSError, NoSlotError) as error:
        agreement.tell(LOCAL, id_, BROKEN)
        text = f"the shard to repair cannot be kept in memory: {error}"
        levels.reports.not_committed_later(id_, text)
    else:
        levels.slot_handoff.commit_sealed(id_, slot)
    return True


def was_lost(plan: RestorePlan, damaged: Collection[ShardKey]) -> bool:
    """True if a part of the version was on a disk of the job and is not there any more.

    Pure. A rebuilt shard was on a disk; so was a shard that only some ranks fetched from the
    persistent level, because only versions that are on all disks go there. `damaged`: see
    `JobHistory`.
    """
    levels = plan.levels
    apart = "persistent" in levels and len(levels) > 1
    shards = {ShardKey(plan.id, source.shard, len(plan.sources)) for source in plan.sources}
    return apart or any(s.rebuilt for s in plan.sources) or not shards.isdisjoint(damaged)


def shards_to_mend(plan: RestorePlan, found: Sequence[Sequence[Found]]) -> frozenset[int] | None:
    """Shards that are not on the disk of the node of their rank.

    Pure: every rank has the same result. `found`: the sound shards that each rank found. None if
    this version cannot be protected again and a new one must be taken: it has another number of
    ranks, or some rank's shard is on another node and no longer in memory.
    """
    shards = len(plan.sources)
    if shards != len(found):
        return None
    lacking = set()
    for source in plan.sources:
        key = ShardKey(plan.id, source.shard, shards)
        here = {(f.key, f.facts.run_id) for f in found[source.shard] if f.place.level == "local"}
        if source.rebuilt or (key, plan.run_id) not in here:
            if not (source.direct or source.rebuilt):
                return None
            lacking.add(source.shard)
    return frozenset(lacking)


def parities_to_mend(
    plan: RestorePlan,
    groups: Iterable[RedundancyGroup],
    found: Sequence[Sequence[FoundParity]],
) -> frozenset[int]:
    """Shards without the version's parity for `groups` on the disk of their rank's node.

    Pure. Sound parity is left as it is: while it is made again it would be missing.
    """
    left_of = {rebuilt.group: rebuilt.left for rebuilt in plan.rebuilds}
    damaged = {
        p.key
        for each in distinct(found)
        for p in each
        if p.place.level == "local" and p.key not in left_of.get(p.group, {p.key})
    }
    lost = set()
    for group in groups:
        code = (group.ranks, group.code.k, group.code.m)
        for rank in group.ranks:
            key = ParityKey(plan.id, rank, len(plan.sources))
            here = (p for p in found[rank] if p.place.level == "local")
            there = {(p.key, p.facts.run_id, (p.group, p.k, p.m)) for p in here}
            if key in damaged or (key, plan.run_id, code) not in there:
                lost.add(rank)
    return frozenset(lost)


def keep(image: ShardImage, pool: SlotPool, protected: set[VersionId], pinned: set[str]) -> Slot:
    """Copy a sound shard into a slot of this rank, with the seal of the original.

    `protected` and `pinned` as in `SlotPool.choose`; raises the errors of that method.
    """
    manifest = image.manifest
    seal_bytes = seal_area_bytes(manifest.data_blocks, len(manifest.facts.lineage))
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
