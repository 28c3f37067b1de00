"""Slot handoff: the way of a slot through one snapshot, from its choice to the agent's commit.

The ledgers of `agreement` record every outcome, also after errors, so that all ranks have the same
list of versions.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tierckpt._text import in_words
from tierckpt.agent.client import AgentClient
from tierckpt.coordination.agreement import Agreement
from tierckpt.coordination.reports import Reports
from tierckpt.core.ledger import BROKEN, DONE
from tierckpt.core.levels import AWAITED, LEDGERS, LOCAL, MEMORY
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.group import Group
from tierckpt.snapshot.phase import Phase
from tierckpt.storage.memory.slot_pool import NoSlotError, SlotPool
from tierckpt.storage.memory.slots import Slot, seal_area_bytes

if TYPE_CHECKING:
    from tierckpt.snapshot.snapshot import ChooseSlot, Snapshot

PATIENCE_SECONDS = 30.0
"""Longest wait, with `when_busy="wait"`, for a copy that no optimizer waits for any more."""
CUT_SHORT = "an interrupt came before the copy was complete"


def _id_of(snapshot: Snapshot) -> VersionId:
    return snapshot.facts.id


class SlotHandoff:
    """One rank's slots. Owns none of its arguments. Each method names the thread that calls it."""

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
        """Snapshots that have ended, and whose end the training thread has not processed."""
        self._begun: dict[VersionId, Snapshot] = {}
        """Snapshots that have not ended, or whose end is not yet in the ledgers."""

    def chooser(self, id_: VersionId, runs: int) -> ChooseSlot:
        """Return the function that finds a slot for this boundary's version. On the copier thread
        it waits, if necessary, for the proof that an older version is superseded."""
        protected = self._agreement.protected(id_)

        def choose(blocks: int, image_bytes: int, at_once: bool = False) -> Slot:
            seal_bytes, pool = seal_area_bytes(blocks, runs), self._pool
            if at_once:
                if not self._agreement.has_last_word:
                    raise NoSlotError("the ranks have not voted yet")
                proven = self._agreement.last_word(protected)
                return pool.choose(proven, self._agent.pinned(), seal_bytes, image_bytes, True)
            try:
                known = self._agreement.last_word(protected, waits=False)
                return pool.choose(known, self._agent.pinned(), seal_bytes, image_bytes)
            except NoSlotError:
                proven = self._agreement.last_word(protected)
            return pool.choose(proven, self._agent.pinned(), seal_bytes, image_bytes)

        return choose

    def begun(self, snapshot: Snapshot) -> None:
        """Record that a snapshot is being copied; training thread."""
        snapshot.bind_patience_seconds = self._agreement.patience_seconds
        snapshot.hopeless = self._agreement.hopeless
        self._begun[_id_of(snapshot)] = snapshot

    def starved(self) -> None:
        """Record that the training thread waited for a slot, hence a vote, in vain."""
        self._agreement.lose_patience()

    def done(self, snapshot: Snapshot) -> None:
        """Record that a snapshot is sealed or failed; on the thread that ended it."""
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
        self._begun.pop(id_, None)  # last: an interrupt may cut the steps above short

    def wait(self) -> None:
        """Return when all copies have ended, or made no progress for too long; training thread."""
        for snapshot in [*self._begun.values()]:
            snapshot.wait_done(PATIENCE_SECONDS)

    def take_stock(self) -> None:
        """Break versions that no thread works on any more, at a boundary. A BaseException that is
        no Exception (a KeyboardInterrupt) cut the work short; they would stay open for ever."""
        if not (self._begun or self._agreement.is_any_undecided):
            return
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
        # No event reports these as lost: they may be complete.
        for level in set(LEDGERS).difference(AWAITED):
            for id_ in self._agreement.undecided(level):
                if not self._agent.concerns(id_):
                    self._agreement.tell(level, id_, level.facts.failed_state)

    def _make_up(self, id_: VersionId, snapshot: Snapshot) -> None:
        """Complete a `done` that was cut short; the next boundary shows whether the agent knows."""
        sealed = snapshot.phase is Phase.SEALED
        self._pool.filled(snapshot.slot, id_ if sealed else None)
        self._agreement.tell(MEMORY, id_, DONE if sealed else BROKEN)
        self._begun.pop(id_, None)

    def broken(self, id_: VersionId) -> None:
        """Break a version in the ledgers that has no snapshot; training thread."""
        self._agreement.tell(MEMORY, id_, BROKEN)
        self._agreement.tell(LOCAL, id_, BROKEN)

    def commit_sealed(self, id_: VersionId, slot: Slot) -> None:
        """Commit a version that was sealed before; training thread."""
        manifest = slot.manifest()
        assert manifest is not None
        self._commit(id_, slot, manifest)

    def _commit(self, id_: VersionId, slot: Slot, manifest: Manifest) -> None:
        self._agreement.tell_shard(id_, manifest.image_bytes, manifest.facts.metric)
        key = ShardKey(id_, self._group.rank, self._group.size)
        try:
            error = self._agent.commit(key, slot)
        except Exception as problem:  # on the thread that sealed: only this version is lost
            error = in_words(problem)
        if error:
            self._agreement.tell(LOCAL, id_, BROKEN)
            self._reports.not_committed_later(id_, error)


__all__ = ["SlotHandoff"]
