"""Versions that are sealed in memory, and become durable outside a boundary: at once, or at the
end.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from tierckpt.config import Config
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.group import Group
from tierckpt.storage.memory.slots import Slot

from .tiers import Tiers


class Sealed(enum.IntEnum):
    """A version in memory compared with the live state; the minimum of all ranks counts."""

    NOT = 0
    """The version is missing or incomplete."""
    MOVED_ON = 1
    """The live state differs from it."""
    LIVE = 2
    """The live state equals it."""


IsLive = Callable[[Manifest, memoryview], bool]
"""Returns True if the live state equals the sealed version with this manifest and image."""


class SealedVersions:
    """This rank's part of them. Training thread, while no copy is in progress."""

    def __init__(self, config: Config, group: Group, levels: Tiers) -> None:
        """All arguments stay their owners'."""
        self._config, self._group, self._levels = config, group, levels
        self._pool, self._agreement = levels.pool, levels.agreement

    def commit(self, id_: VersionId, is_live: IsLive) -> Sealed:
        """Commit a version if all ranks have sealed it and it equals the live state of all.
        Collective; returns the minimum of all ranks.

        NOT: the version is void on all ranks now, and must be taken. MOVED_ON: it stays as it is,
        and the live state must be taken as another version.
        """
        slot = self._pool.find(id_)
        manifest = slot.manifest() if slot is not None else None
        sealed = self._look(slot, manifest, is_live)
        found: Sealed = min(self._group.all_gather_object(sealed))
        if found is Sealed.NOT:
            # A rank that has sealed it voids it: all shards of a version are of one step.
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
        """Commit a version as it was sealed, also by the previous run. Collective.

        False, with nothing changed, if some rank does not have its shard in memory.
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
        """Commit a version that all ranks have in memory, unless it is on local or on its way."""
        local, slot = self._agreement.local, self._pool.find(id_)
        assert slot is not None
        if self._config.uses("local") and id_ != local.safe and id_ not in local.open:
            local.open.append(id_)
            self._levels.slot_handoff.commit_sealed(id_, slot)

    def _look(self, slot: Slot | None, manifest: Manifest | None, is_live: IsLive) -> Sealed:
        """Compare the version in this rank's slot with the live state."""
        memory = self._agreement.memory
        if slot is None or manifest is None or manifest.id not in (memory.safe, *memory.open):
            return Sealed.NOT
        try:
            with slot.image() as image:
                return Sealed.LIVE if is_live(manifest, image) else Sealed.MOVED_ON
        except Exception:  # other ranks wait; the new version meets this error and reports it
            return Sealed.MOVED_ON

    def settle(self, id_: VersionId) -> None:
        """Agree on the result of this version; promote it if local had it before. Collective."""
        self._agreement.settle()
        promotion = self._levels.promotion
        if promotion.awaits(id_) and id_ == self._agreement.local.safe:  # was on local before
            slot = self._pool.find(id_)
            manifest = slot.manifest() if slot is not None else None
            facts = (manifest.image_bytes, manifest.facts.metric) if manifest else (0, None)
            gathered = self._group.all_gather_object(facts)
            promotion.local_safe(id_, max(nbytes for nbytes, _ in gathered), gathered[0][1])

    def commit_newest(self) -> bool:
        """Hand the newest version in memory to the agent, if the local level lacks it. Returns True
        if it did. Not collective."""
        memory, local = self._agreement.memory, self._agreement.local
        taken = [*memory.open, *filter(None, [memory.safe])]
        newest = max((i for i in taken if self._pool.find(i) is not None), default=None)
        if newest is None or not self._config.uses("local") or newest in (*local.open, local.safe):
            return False
        slot = self._pool.find(newest)
        if slot is None:  # removed by another process just now
            return False
        self._levels.slot_handoff.commit_sealed(newest, slot)
        return True


__all__ = ["Sealed", "SealedVersions"]
