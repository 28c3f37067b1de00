"""Demand: a version of this very moment, durable before the training goes on, or ends.

What is in memory already need not be taken again, if all ranks have it, and it is what is live on
all of them still: it goes on from there. So what is stored is the same however far copies had got.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from tierckpt.config import Config
from tierckpt.coordination.agreement import Agreement
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.group import Group
from tierckpt.storage.memory.slot_pool import SlotPool
from tierckpt.storage.memory.slots import Slot

from .tiers import Tiers


class Sealed(enum.IntEnum):
    """What a version in memory is worth to who wants the live state; the minimum of all ranks."""

    NOT = 0
    """It is not there, or not complete."""
    MOVED_ON = 1
    """The live state is another one."""
    LIVE = 2


IsLive = Callable[[Manifest, memoryview], bool]
"""Whether the live state is what was sealed so, of which these are manifest and image."""


class SaveNow:
    """One rank's part. Training thread, with nothing being copied."""

    def __init__(
        self, config: Config, group: Group, pool: SlotPool, agreement: Agreement, levels: Tiers
    ) -> None:
        """What it is given stays its owner's."""
        self._config, self._group, self._pool = config, group, pool
        self._agreement, self._levels = agreement, levels

    def commit(self, id_: VersionId, is_live: IsLive) -> Sealed:
        """Have a version committed that all ranks have sealed, where it is what is live on all.
        Collective.

        NOT: nobody has it any more, and it is to be taken. MOVED_ON: it stays as it is, and what is
        live is to be taken as another one.
        """
        slot = self._pool.find(id_)
        manifest = slot.manifest() if slot is not None else None
        mine = self._look(slot, manifest, is_live)
        found: Sealed = min(self._group.all_gather_object(mine))
        if found is Sealed.NOT:
            # Where it was sealed all the same, it is void: all ranks' shards are of one moment.
            self._pool.void(id_)
            self._agreement.forget(id_)
        if found is Sealed.LIVE:
            assert manifest is not None
            promotion = self._levels.promotion
            if self._config.uses("persistent") and id_ != promotion.ordered:
                promotion.flush_when_safe(manifest.facts)
            self._commit(id_)
        return found

    def commit_as_it_is(self, id_: VersionId | None) -> bool:
        """Have a version committed as it was sealed, also in the run before. Collective.

        False, with nothing changed, when some rank has not its shard of it in memory.
        """
        slot = None if id_ is None else self._pool.find(id_)
        manifest = None if slot is None else slot.manifest()
        key = None if id_ is None else ShardKey(id_, self._group.rank, self._group.size)
        if not all(self._group.all_gather_object(manifest is not None and manifest.key == key)):
            return False
        assert id_ is not None
        self._commit(id_)
        return True

    def _commit(self, id_: VersionId) -> None:
        """All ranks have it."""
        local, slot = self._agreement.local, self._pool.find(id_)
        assert slot is not None
        if self._config.uses("local") and id_ != local.safe and id_ not in local.open:
            local.open.append(id_)
            self._levels.slot_handoff.commit_sealed(id_, slot)

    def _look(self, slot: Slot | None, manifest: Manifest | None, is_live: IsLive) -> Sealed:
        """What this rank's slot is worth."""
        memory = self._agreement.memory
        if slot is None or manifest is None or manifest.id not in (memory.safe, *memory.open):
            return Sealed.NOT
        try:
            with slot.image() as image:
                return Sealed.LIVE if is_live(manifest, image) else Sealed.MOVED_ON
        except Exception:  # the others wait; who takes it will meet the same, and says so
            return Sealed.MOVED_ON

    def settle(self, id_: VersionId) -> None:
        """Learn what became of it, and have it go on from the local level. Collective."""
        self._agreement.settle()
        promotion = self._levels.promotion
        if promotion.awaits(id_) and id_ == self._agreement.local.safe:  # and was so before
            slot = self._pool.find(id_)
            manifest = slot.manifest() if slot is not None else None
            mine = (manifest.image_bytes, manifest.facts.metric) if manifest else (0, None)
            told = self._group.all_gather_object(mine)
            promotion.local_safe(id_, max(nbytes for nbytes, _ in told), told[0][1])

    def commit_newest(self) -> bool:
        """Hand the newest version in memory to the agent, if the local level lacks it; not
        collective. True if so."""
        memory, local = self._agreement.memory, self._agreement.local
        taken = [*memory.open, *filter(None, [memory.safe])]
        newest = max((i for i in taken if self._pool.find(i) is not None), default=None)
        if newest is None or not self._config.uses("local") or newest in (*local.open, local.safe):
            return False
        slot = self._pool.find(newest)
        if slot is None:  # removed from outside, just now
            return False
        self._levels.slot_handoff.commit_sealed(newest, slot)
        return True


__all__ = ["SaveNow", "Sealed"]
