"""Small versions: copied and sealed at the boundary itself.

The bytes of a small version cost less than its way through hooks, threads and the barrier. So the
training thread copies it with one call in C, and seals it. Nothing changes meanwhile, so nothing
has to be watched.

At the boundary, the votes of the last one are known: of the version before the last. So neither its
slot nor that of the last version may be overwritten, and small versions take turns in three slots,
where others need two (docs/internals/agreement.md, "Two slots are enough").
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct

from tierckpt import _faults
from tierckpt.format.ids import PAGE_BYTES
from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.format.manifest import Manifest
from tierckpt.format.records import VersionFacts
from tierckpt.state import tree_codec
from tierckpt.storage.slot_pool import NoSlotError, SlotPool
from tierckpt.storage.slots import Slot

from .copy_engine import Job, Library, Table
from .copy_plan import Binding, CopyPlan
from .snapshot import PhaseTimer

if TYPE_CHECKING:
    import torch

__all__ = ["MOST_BYTES", "MOST_TENSORS", "SLOTS", "Copied", "SmallVersions"]

MOST_BYTES = 4 * 1024 * 1024
"""A larger state is copied layer by layer: the training would wait for this one for a millisecond,
at most."""
MOST_TENSORS = 2048
"""The header of a state with more takes long to make: the copier makes it."""
SLOTS = 3

SlotNow = Callable[[VersionFacts, int, int, Slot | None], Slot]
"""See `staging.Slots.at_boundary`."""


class Copied(Struct, eq=False):
    """A version that was copied at its boundary. As a sealed `Snapshot`."""

    facts: VersionFacts
    plan: CopyPlan
    levels: tuple[str, ...]
    slot: Slot
    manifest: Manifest
    clock: PhaseTimer

    sealed: ClassVar[bool] = True


class SmallVersions:
    """Copies the small versions of one checkpointer. Training thread."""

    def __init__(self, library: Library, pool: SlotPool) -> None:
        """Owns nothing of them."""
        self._library, self._pool = library, pool
        self._job: tuple[Table | None, Job | None] = None, None
        """The job of the last version, which is used again with the same table."""
        self._tree: tuple[tuple[Any, ...], tuple[bytes, int, bytes] | None] = (), None
        """The objects that the last header and tree are made of, and these."""
        self._last: deque[Copied] = deque(maxlen=SLOTS)
        """The last versions. The next one takes the slot of the oldest, if it can."""
        self._chosen: Slot | None = None
        """The slot of the newest one."""

    def forget(self) -> None:
        """Forget the last versions, and what they hold."""
        self._job, self._tree = (None, None), ((), None)
        self._last.clear()

    def copy(
        self,
        facts: VersionFacts,
        levels: tuple[str, ...],
        plan: CopyPlan,
        tree: tuple[Any, list[torch.Tensor | bytes]],
        choose_slot: SlotNow,
    ) -> Copied | None:
        """Copy and seal a version, in a slot that counts as being filled until the caller says
        otherwise.

        None, and nothing is done, if it is not small, its bytes are not in the memory of the CPU,
        or there is no slot now: the caller takes another way. Arguments as for `Snapshot`; `tree`:
        the node, and the tensors of the arena. Raises OSError.
        """
        chosen, self._chosen = self._chosen, None
        if chosen is not None and self._pool.filling:  # an interrupt cut the last one short
            self._pool.give_up(chosen)
        data_bytes, table = plan.layout.nbytes, plan.table()
        if table is None or not 0 < data_bytes <= MOST_BYTES or self._pool.in_place is not None:
            return None
        if len(plan.sources) > MOST_TENSORS:
            return None
        if _faults.armed("copy") or _faults.armed("barrier"):
            return None  # they are on the way of other versions
        encoded = self._encoded(plan, *tree)
        if encoded is None:
            return None
        header, room_bytes, tail = encoded
        tail_bytes = room_bytes - data_bytes
        if tail_bytes > BLOCK_BYTES:
            return None
        start, image_bytes = time.perf_counter(), len(header) + room_bytes
        usual = None
        if len(self._last) == SLOTS:
            oldest = self._last[0]
            fits = oldest.plan is plan and oldest.manifest.image_bytes == image_bytes
            usual = oldest.slot if fits else None
        if self._pool.count < SLOTS <= self._pool.most:
            self._pool.have_more(SLOTS, image_bytes + PAGE_BYTES)
        if self._pool.count < SLOTS:
            return None
        try:
            slot = choose_slot(facts, table.count + 1, image_bytes, usual)
        except NoSlotError:
            # An agent reads one, or votes lag: they do so until a boundary takes no version.
            if self._pool.count == SLOTS < self._pool.most:
                self._pool.have_more(SLOTS + 1, image_bytes + PAGE_BYTES)
            return None
        self._chosen = slot
        try:
            version = facts.id.version
            _faults.point("refill", version=version)
            if slot.bound is None:
                slot.bound = Binding(slot)
            _faults.point("tree", version=version, block=0)
            job = self._job_of(table)
            job.fill_at_once(slot.bound.address, (header, data_bytes, tail, tail_bytes))
            copy_seconds, hash_seconds, digests = job.results()
            shard, length = plan.layout.rank, len(header)
            sizes = image_bytes, length, len(tail)
            manifest = Manifest(facts, shard, *sizes, digests, time.time())
            _faults.point("seal", version=version)
            slot.seal(manifest.encode())
            _faults.point("sealed", version=version)
        except BaseException:
            self._pool.give_up(slot)
            raise
        after = time.perf_counter() - start
        clock = PhaseTimer(copy=copy_seconds, checksum=hash_seconds, sealed_after=after)
        copied = Copied(facts, plan, levels, slot, manifest, clock)
        self._last.append(copied)
        return copied

    def _encoded(
        self, plan: CopyPlan, node: Any, tensors: list[torch.Tensor | bytes]
    ) -> tuple[bytes, int, bytes] | None:
        """Header, length of the data, and tree; the last ones if nothing is another object."""
        of, encoded = self._tree
        now = plan, plan.trained, node, *tensors
        if len(now) == len(of) and all(map(is_, now, of)):
            return encoded
        tail = tree_codec.encoded_bytes(node, tensors)
        if tail is None:
            return None
        encoded = *plan.header(len(tail)), tail
        self._tree = now, encoded
        return encoded

    def _job_of(self, table: Table) -> Job:
        its, job = self._job
        if job is None or its is not table:
            job = Job(self._library, table)
            self._job = table, job
        return job
