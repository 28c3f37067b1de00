"""Demand: a version of this very moment, durable before the training goes on, or ends.

What is in memory already need not be taken again, if all ranks have it: it goes on from there.
"""

from __future__ import annotations

from .agreement import Agreement
from .config import Config
from .group import Group
from .levels import Levels
from .naming import VersionId
from .pool import SlotPool


class Demand:
    """One rank's part. Training thread, with nothing being copied."""

    def __init__(
        self, config: Config, group: Group, pool: SlotPool, agreement: Agreement, levels: Levels
    ) -> None:
        """What it is given stays its owner's."""
        self._config, self._group, self._pool = config, group, pool
        self._agreement, self._levels = agreement, levels

    def commit(self, id_: VersionId, iteration: int) -> bool:
        """Have a version committed, of that iteration, that all ranks have sealed. Collective.

        False when some rank has not: nobody has it any more, and it is to be taken.
        """
        memory, local, onward = self._agreement.memory, self._agreement.local, self._levels.onward
        slot = self._pool.find(id_)
        sealed_here = slot is not None and id_ in (memory.safe, *memory.open)
        if not all(self._group.all_gather_object(sealed_here)):
            # Where it was sealed all the same, it is void: all ranks' shards are of one moment.
            self._pool.void(id_)
            self._agreement.forget(id_)
            return False
        assert slot is not None
        if self._config.uses("persistent") and id_ != onward.ordered:
            onward.flush_when_safe(id_, iteration)
        if self._config.uses("local") and id_ != local.safe and id_ not in local.open:
            local.open.append(id_)
            self._levels.handover.commit_sealed(id_, slot)
        return True

    def settle(self, id_: VersionId) -> None:
        """Learn what became of it, and have it go on from the local level. Collective."""
        self._agreement.settle()
        onward = self._levels.onward
        if onward.awaits(id_) and id_ == self._agreement.local.safe:  # and was so before
            slot = self._pool.find(id_)
            manifest = slot.manifest() if slot is not None else None
            mine = (manifest.image_bytes, manifest.metric) if manifest else (0, None)
            told = self._group.all_gather_object(mine)
            onward.local_safe(id_, max(nbytes for nbytes, _ in told), told[0][1])

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
        self._levels.handover.commit_sealed(newest, slot)
        return True


__all__ = ["Demand"]
