"""Handover: a slot's way round one snapshot, from being chosen to being the agent's to commit.

The ledgers of `agreement` hear of every turn, whatever happens, so that all ranks have the same
list of versions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .agentclient import AgentClient
from .agreement import Agreement
from .group import Group
from .manifest import Manifest
from .naming import ShardKey, VersionId
from .policy import BROKEN, DONE
from .pool import NoSlotError, SlotPool
from .reports import Reports
from .slots import Slot, seal_area_bytes
from .snapshot import Phase, Snapshot


class Handover:
    """One rank's part. What it is given stays its owner's. Methods say which thread calls them."""

    def __init__(
        self,
        group: Group,
        pool: SlotPool,
        agent: AgentClient,
        agreement: Agreement,
        reports: Reports,
    ) -> None:
        self._group, self._pool, self._agent = group, pool, agent
        self._agreement, self._reports = agreement, reports
        self.finished: deque[Snapshot] = deque()
        """Those that are over, and of which the training thread has not heard."""

    def chooser(self, id_: VersionId, lives: int) -> Callable[[int, int], Slot]:
        """Who finds a slot for the version of this boundary, on the copier's thread: as long as it
        takes, it waits for the proof that an older version is superseded."""
        protected = self._agreement.protected(id_)

        def choose(blocks: int, image_bytes: int) -> Slot:
            seal_bytes, pool = seal_area_bytes(blocks, lives), self._pool
            try:
                return pool.choose(protected, self._agent.pinned(), seal_bytes, image_bytes)
            except NoSlotError:
                proven = self._agreement.last_word(protected)
            return pool.choose(proven, self._agent.pinned(), seal_bytes, image_bytes)

        return choose

    def done(self, snapshot: Snapshot) -> None:
        """Sealed or failed; on the thread that did it."""
        id_ = VersionId(snapshot.head.generation, snapshot.head.version)
        sealed = snapshot.phase is Phase.SEALED
        self._pool.filled(snapshot.slot, id_ if sealed else None)
        if "local" in snapshot.levels:
            if sealed:
                assert snapshot.slot is not None
                assert snapshot.manifest is not None
                self._commit(id_, snapshot.slot, snapshot.manifest)
            else:
                self._agreement.tell("local", id_, BROKEN)
        self._agreement.tell("memory", id_, DONE if sealed else BROKEN)
        self.finished.append(snapshot)

    def broken(self, id_: VersionId) -> None:
        """There is no snapshot of a version that is in the ledgers; training thread."""
        self._agreement.tell("memory", id_, BROKEN)
        self._agreement.tell("local", id_, BROKEN)

    def commit_sealed(self, id_: VersionId, slot: Slot) -> None:
        """Commit what was sealed before; training thread."""
        manifest = slot.manifest()
        assert manifest is not None
        self._commit(id_, slot, manifest)

    def _commit(self, id_: VersionId, slot: Slot, manifest: Manifest) -> None:
        self._agreement.tell_shard(id_, manifest.image_bytes, manifest.metric)
        key = ShardKey(id_, self._group.rank, self._group.size)
        try:
            error = self._agent.commit(key, slot)
        except Exception as problem:  # on the thread that sealed: a version is lost, no more
            error = f"{type(problem).__name__}: {problem}"
        if error:
            self._agreement.tell("local", id_, BROKEN)
            self._reports.not_committed_later(id_, error)


__all__ = ["Handover"]
