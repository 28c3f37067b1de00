"""Handover: a slot's way round one snapshot, from being chosen to being the agent's to commit.

The ledgers of `agreement` hear of every turn, whatever happens, so that all ranks have the same
list of versions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tierckpt.agent.client import AgentClient
from tierckpt.coordination.agreement import Agreement
from tierckpt.coordination.reports import Reports
from tierckpt.core.ledger import BROKEN, DONE
from tierckpt.core.levels import AWAITED, LEDGERS, LOCAL, MEMORY
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.group import Group
from tierckpt.snapshot.snapshot import Phase, Snapshot
from tierckpt.storage.memory.slot_pool import NoSlotError, SlotPool
from tierckpt.storage.memory.slots import Slot, seal_area_bytes

PATIENCE_SECONDS = 30.0
"""So long, with `when_busy="wait"`, for a copy that no optimizer waits for any more."""
CUT_SHORT = "an interrupt came before it was there"


def _id_of(snapshot: Snapshot) -> VersionId:
    return snapshot.facts.id


class SlotHandoff:
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
        self._begun: dict[VersionId, Snapshot] = {}
        """Those that are not over, or of whose end the books have not heard yet."""

    def chooser(self, id_: VersionId, runs: int) -> Callable[[int, int], Slot]:
        """Who finds a slot for the version of this boundary, on the copier's thread: as long as it
        takes, it waits for the proof that an older version is superseded."""
        protected = self._agreement.protected(id_)

        def choose(blocks: int, image_bytes: int) -> Slot:
            seal_bytes, pool = seal_area_bytes(blocks, runs), self._pool
            try:
                return pool.choose(protected, self._agent.pinned(), seal_bytes, image_bytes)
            except NoSlotError:
                proven = self._agreement.last_word(protected)
            return pool.choose(proven, self._agent.pinned(), seal_bytes, image_bytes)

        return choose

    def begun(self, snapshot: Snapshot) -> None:
        """It is being copied; training thread."""
        snapshot.bind_patience_seconds = self._agreement.patience_seconds
        snapshot.hopeless = self._agreement.hopeless
        self._begun[_id_of(snapshot)] = snapshot

    def starved(self) -> None:
        """The training thread waited for a slot in vain, hence for a vote; training thread."""
        self._agreement.lose_patience()

    def done(self, snapshot: Snapshot) -> None:
        """Sealed or failed; on the thread that did it."""
        id_ = _id_of(snapshot)
        sealed = snapshot.phase is Phase.SEALED
        self._pool.filled(snapshot.slot, id_ if sealed else None)
        if LOCAL in snapshot.levels:
            if sealed:
                assert snapshot.slot is not None
                assert snapshot.manifest is not None
                self._commit(id_, snapshot.slot, snapshot.manifest)
            else:
                self._agreement.tell(LOCAL, id_, BROKEN)
        self._agreement.tell(MEMORY, id_, DONE if sealed else BROKEN)
        self.finished.append(snapshot)
        self._begun.pop(id_, None)  # last: before, an interrupt may have cut this short

    def wait(self) -> None:
        """Return when what is being copied is over, if that gets on; training thread."""
        for snapshot in [*self._begun.values()]:
            snapshot.wait_done(PATIENCE_SECONDS)

    def take_stock(self) -> None:
        """At a boundary: tell the books of what nobody is at work on any more, because an exception
        that was no error (a KeyboardInterrupt) came between. It would stay open for ever."""
        begun = dict(self._begun)
        for id_, snapshot in begun.items():
            if snapshot.wait_done(0.0):
                self._make_up(id_, snapshot)
        for id_ in self._agreement.undecided(MEMORY):
            if id_ not in begun:
                self.broken(id_)
                self._reports.lost(id_.version, CUT_SHORT)
        for id_ in self._agreement.undecided(LOCAL):
            if id_ not in begun and not self._agent.concerns(id_):
                self._agreement.tell(LOCAL, id_, BROKEN)
                self._reports.not_committed_later(id_, CUT_SHORT)
        # Nobody is told that these are lost: they may be there.
        for level in set(LEDGERS).difference(AWAITED):
            for id_ in self._agreement.undecided(level):
                if not self._agent.concerns(id_):
                    self._agreement.tell(level, id_, level.facts.failed_state)

    def _make_up(self, id_: VersionId, snapshot: Snapshot) -> None:
        """`done` was cut short; whether the agent was told will be seen at the next boundary."""
        sealed = snapshot.phase is Phase.SEALED
        self._pool.filled(snapshot.slot, id_ if sealed else None)
        self._agreement.tell(MEMORY, id_, DONE if sealed else BROKEN)
        self._begun.pop(id_, None)

    def broken(self, id_: VersionId) -> None:
        """There is no snapshot of a version that is in the ledgers; training thread."""
        self._agreement.tell(MEMORY, id_, BROKEN)
        self._agreement.tell(LOCAL, id_, BROKEN)

    def commit_sealed(self, id_: VersionId, slot: Slot) -> None:
        """Commit what was sealed before; training thread."""
        manifest = slot.manifest()
        assert manifest is not None
        self._commit(id_, slot, manifest)

    def _commit(self, id_: VersionId, slot: Slot, manifest: Manifest) -> None:
        self._agreement.tell_shard(id_, manifest.image_bytes, manifest.facts.metric)
        key = ShardKey(id_, self._group.rank, self._group.size)
        try:
            error = self._agent.commit(key, slot)
        except Exception as problem:  # on the thread that sealed: a version is lost, no more
            error = f"{type(problem).__name__}: {problem}"
        if error:
            self._agreement.tell(LOCAL, id_, BROKEN)
            self._reports.not_committed_later(id_, error)


__all__ = ["SlotHandoff"]
