"""The pool: one rank's slots, and the choice of the next one to overwrite.

The rule that keeps a restorable version at every instant (docs/internals/agreement.md, "Two slots
are enough"): a slot is overwritten only when it holds no version of the ledger's protected set, is
not being filled, and is not being read by an agent of this run or the previous one.

An agent with a slow or hanging disk reads a slot for long. Then the pool makes one more, so that
versions in memory continue; without memory for that it takes the slot away from the reader, which
notices before it commits anything (`TrainerSession`).

Thread-safe: the copier thread chooses slots, the training thread queries and frees them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable

from tierckpt.format.ids import VersionId
from tierckpt.storage.health import memory_room
from tierckpt.storage.local import LocalStore

from .job_directory import JobDirectory, rank_of
from .slots import ImageFile, Mappings, Slot, images_of

LATE_SECONDS = 2.0
"""A slot read for longer gets a substitute."""
KEPT_SECONDS = 60.0
"""A substitute is kept for this time after it was last needed: disks are slow again and again."""
TAKEN_SECONDS = 10.0
"""Without memory for a substitute, a slot read for longer is taken away. Twice as long
after each time, or a slow disk would never complete a version."""
SEEN_SECONDS = 0.1
"""Interval between two looks whether another program has removed a slot's file."""
LOOK_SECONDS = 1.0
"""Interval between two looks for memory, while there is too little."""


NO_VERSION = VersionId(-1, -1)


class NoSlotError(Exception):
    """Every slot holds data that must not be overwritten."""


class SlotPool:
    """One rank's slots, see the module's text."""

    def __init__(
        self,
        job: JobDirectory,
        rank: int,
        count: int,
        on_notice: Callable[[str, int], None],
        in_place: LocalStore | None = None,
        may_grow: bool = False,
    ) -> None:
        """`on_notice(text, severity)` reports the fall-back to private memory of this process.

        `in_place`: the local level, if slots are to be files in it (see `slots.ImageFile`).
        `may_grow`: `count` is not a setting, see `have_more`.
        """
        self.job = job
        self.rank = rank
        self.in_place = in_place
        """None also after there was no room for such a file."""
        self.count = self._least = count
        """Number of slots as long as none is read for long."""
        self.most: float = math.inf if may_grow and in_place is None else count
        """Limit of that number, for `have_more`."""
        self.slots: list[Slot | None] = [None] * count
        self.volatile = False
        """True once a slot does not outlive this process (`shm_dir` was too small)."""
        self._held: list[VersionId | None] = [None] * count
        """The sealed version in each slot."""
        self.filling: set[int] = set()
        """Slots that are being filled; set by the pool."""
        self._foreign: set[int] = set()
        """Adopted slots that an agent of the previous run may still be reading."""
        self._read_since: dict[int, float] = {}
        """Slots that an agent reads, and when that was first seen (monotonic)."""
        self._taken: set[int] = set()
        """Those of them that were taken away."""
        self._taken_seconds = TAKEN_SECONDS
        self._kept_until = 0.0
        """No surplus slot is removed before this time (monotonic)."""
        self._looked_seconds, self._has_memory = -math.inf, False
        """Time of the last look for memory (monotonic), and its result."""
        self._mappings = Mappings()
        self._lock = threading.Lock()
        self.on_notice = on_notice
        self.on_map: Callable[[Slot], None] = _nothing
        """Called with a slot before it is first filled (a GPU needs its memory page-locked)."""
        self.on_unmap: Callable[[Slot], None] = _nothing

    @property
    def complete(self) -> bool:
        """True when all slots exist; making one takes time."""
        return None not in self.slots[: self.count]

    def adopt(self) -> None:
        """Take over the slots that an earlier run of this rank left on this machine."""
        numbers = (path.name.partition(".") for path in self.job.segments())
        mine = [int(index) for name, _, index in numbers if rank_of(name) == self.rank]
        more = max([0, *(index + 1 - self.count for index in mine)])
        if more:
            self._kept_until = math.inf
            self.slots, self._held = self.slots + [None] * more, self._held + [None] * more
        for index in range(len(self.slots)):
            slot = Slot.open(self.job.slot_path(self.rank, index))
            if slot is not None:
                manifest = slot.manifest()
                if slot.file is not None:
                    slot.file.mappings = self._mappings
                self.slots[index] = slot
                self._held[index] = manifest.id if manifest else None
                self._foreign.add(index)
        if self.in_place is not None:
            self._drop_strays(self.in_place)

    def drop_adopted(self) -> None:
        """Allow the removal of slots that an earlier run had in addition: none of its versions is
        needed any more."""
        self._kept_until = min(self._kept_until, 0.0)

    def _drop_strays(self, store: LocalStore) -> None:
        """Remove images without a slot: persistent memory survives a reboot, slots do not. Images
        of other running ranks are left to those."""
        images = images_of(store.directory, self.job.path)
        linked = self.job.images()
        for image, slot in images:
            rank = rank_of(slot)
            if image not in linked and (rank == self.rank or not self.job.has_trainer(rank)):
                with contextlib.suppress(OSError):
                    image.unlink()

    def choose(
        self,
        protected: set[VersionId],
        pinned: set[str],
        seal_bytes: int,
        image_bytes: int,
        at_once: bool = False,
    ) -> Slot:
        """An unsealed slot of at least that size, marked as being filled until `filled`.

        Raises NoSlotError when all are in use, OSError when there is no memory for a new one.
        `at_once`: NoSlotError also where memory must be made or mapped, which takes time.
        """
        index, surplus = -1, None
        try:  # an interrupt may come right after the lock
            try:
                with self._lock:
                    if not at_once:
                        surplus = self._surplus(protected, pinned)
                    index = self._free_index(protected, pinned)
                    self.filling.add(index)
            finally:
                if surplus is not None:
                    self.on_unmap(surplus)
                    surplus.remove()
            return self._make_ready(index, seal_bytes, image_bytes, at_once)
        except BaseException:
            with self._lock:
                self.filling.discard(index)
            raise

    def have_more(self, count: int, nbytes: int) -> None:
        """Have at least so many slots from now on, if there is memory for them on each rank of this
        node, and no setting says how many there are. Without memory it does not look again.
        `nbytes`: the size of one."""
        with self._lock:
            more = count - sum(slot is not None for slot in self.slots)
            if more > 0 and not self._is_memory_for(more * nbytes):
                self.most = self.count
            if count <= self.most:
                self.slots += [None] * max(count - len(self.slots), 0)
                self._held += [None] * max(count - len(self._held), 0)
                self.count = max(self.count, count)

    def take_again(self, slot: Slot, complete: VersionId) -> bool:
        """As `choose`, of this slot, as it fits; False, and nothing is chosen, where that needs a
        closer look. `complete`: a version known to be complete on all ranks, so older ones are not
        needed."""
        if time.monotonic() - slot.seen_seconds > SEEN_SECONDS:
            return False
        index = -1
        try:  # as in `choose`
            with self._lock:
                if self._foreign or self._read_since or self.in_place is not None:
                    return False
                if slot not in self.slots:
                    return False
                place = self.slots.index(slot)
                held = self._held[place]
                if held is None or held >= complete:
                    return False
                index = place
                self.filling.add(index)
                self._held[index] = None
            slot.unseal()
        except BaseException:
            with self._lock:
                self.filling.discard(index)
            raise
        return True

    def _free_index(self, protected: set[VersionId], pinned: set[str]) -> int:
        reading: Collection[int] = ()
        if pinned or self._foreign or self._read_since:
            reading = self._reading(pinned)
        first: tuple[bool, VersionId, int] | None = None
        for index, held in enumerate(self._held):
            if index in self.filling or index in reading or held in protected:
                continue
            if index < self.count or self.slots[index] is not None:
                place = index in self._read_since, held or NO_VERSION, index
                first = place if first is None else min(first, place)
        if first is not None:
            taken, _, index = first
            if taken and index not in self._taken:
                self._taken.add(index)
                self._taken_seconds *= 2
            return index
        if self._growable():
            return self._more()
        raise NoSlotError("every slot holds a version that must not be overwritten yet")

    def _more(self) -> int:
        """The number of a slot that does not exist yet, beyond the usual ones."""
        for index in range(self.count, len(self.slots)):
            if self.slots[index] is None and index not in self.filling:
                return index
        self.slots.append(None)
        self._held.append(None)
        return len(self.slots) - 1

    def _surplus(self, protected: set[VersionId], pinned: set[str]) -> Slot | None:
        """The last slot, no longer one of the pool, if it is free and not needed any more."""
        reading, last = self._reading(pinned), len(self.slots) - 1
        if last < self.count + len(self._late()) or time.monotonic() < self._kept_until:
            return None
        if last in self.filling or last in reading or self._held[last] in protected:
            return None
        self._held.pop()
        self._read_since.pop(last, None)
        self._taken.discard(last)
        return self.slots.pop()

    def _reading(self, pinned: set[str]) -> set[int]:
        """Slots that an agent reads, ours (`pinned`, by name) or that of the previous run, without
        those that are or may be taken away from it."""
        for index in list(self._foreign):
            slot = self.slots[index] if index < len(self.slots) else None
            if slot is None or not slot.in_use_elsewhere():
                self._foreign.discard(index)
        if not (pinned or self._foreign):
            if self._read_since:
                self._read_since.clear()
                self._taken.clear()
            return set()
        ours = {i for i, s in enumerate(self.slots) if s is not None and s.name in pinned}
        reading, now = ours | self._foreign, time.monotonic()
        since = self._read_since
        self._read_since = {index: since.get(index, now) for index in reading}
        self._taken &= reading
        if self._late():
            self._kept_until = max(self._kept_until, now + KEPT_SECONDS)
        return reading - self._taken - self._takeable()

    def _late(self) -> list[int]:
        """Slots that an agent reads for long."""
        now = time.monotonic()
        return [i for i, since in self._read_since.items() if now - since > LATE_SECONDS]

    def _growable(self) -> int:
        """Number of slots that can be made in addition, as others are read for long."""
        existing = sum(slot is not None for slot in self.slots[self.count :])
        making = sum(index >= self.count and self.slots[index] is None for index in self.filling)
        wanted = len(self._late()) - existing - making
        return wanted if wanted > 0 and self._memory_for_more() else 0

    def _memory_for_more(self) -> bool:
        """Whether there is memory for a slot more on each rank of this node."""
        now = time.monotonic()
        if now - self._looked_seconds > LOOK_SECONDS:
            self._looked_seconds = now
            nbytes = max((slot.nbytes for slot in self.slots if slot is not None), default=0)
            self._has_memory = self._is_memory_for(nbytes)
        return self._has_memory

    def _is_memory_for(self, nbytes: int) -> bool:
        """Whether there is so much on each rank of this node."""
        place = self.job.root if self.in_place is None else self.in_place.directory
        found, room = os.statvfs(place), memory_room()
        ranks = max(self.job.trainers(), 1)
        return found.f_bavail * found.f_frsize >= ranks * nbytes and (
            room is None or room.nbytes >= (ranks + 1) * nbytes
        )

    def _takeable(self) -> set[int]:
        """Slots that may be taken away from a reader. Not a file that becomes the shard's own, nor
        memory that ends with this process: versions there are worth less than those on disk."""
        late = self._late()
        if not late or self.volatile or self.in_place is not None or self._memory_for_more():
            return set()
        before = time.monotonic() - self._taken_seconds
        return {index for index in late if self._read_since[index] < before}

    @property
    def outlook(self) -> str:
        """What happens in memory while an agent does not finish with a slot, as text."""
        with self._lock:
            if not self.volatile and (not self._late() or self._memory_for_more()):
                return "versions in memory continue"
            if self.volatile or self.in_place is not None:
                return (
                    f"no version is taken in memory until then: {self.job.root.parent} has no room "
                    "for one more slot"
                )
            return (
                f"versions in memory continue; {self.job.root.parent} has no room for one more "
                "slot, so the version now being written is given up for them"
            )

    def _make_ready(self, index: int, seal_bytes: int, image_bytes: int, at_once: bool) -> Slot:
        slot = self.slots[index]
        removed = slot is not None and slot.is_removed
        if slot is not None:
            slot.seen_seconds = time.monotonic()
        fits = (
            slot is not None and not removed and slot.fits(seal_bytes, image_bytes, self.in_place)
        )
        if at_once and not (fits and slot is not None and slot.is_populated):
            raise NoSlotError("a slot must be made or mapped first")
        self._held[index] = None
        self._foreign.discard(index)
        if self._mappings.kept:
            self._mappings.forget_removed()
        if slot is not None:
            slot.unseal()
            if fits:
                if not slot.is_populated:
                    slot.populate()
                self.on_map(slot)
                return slot
            if removed:
                self._make_folder(slot)
            self.slots[index] = None
            self.on_unmap(slot)
            slot.remove()
        self.slots[index] = made = self._create(index, seal_bytes, image_bytes)
        made.populate()
        self.on_map(made)
        return made

    def _make_folder(self, slot: Slot) -> None:
        """Make the folder again after a removal by systemd, a scheduler's epilogue or the like."""
        self.on_notice(
            f"{slot.path} was removed by another program. It held a version in memory; it is made "
            "again, and there is none in memory until the next version is sealed. Set shm_dir to a "
            "memory file system that no program cleans up",
            logging.ERROR,
        )
        self.job.create()

    def _create(self, index: int, seal_bytes: int, image_bytes: int) -> Slot:
        path = self.job.slot_path(self.rank, index)
        if self.in_place is not None:
            try:
                file = ImageFile.make(path, self.in_place, self.rank, image_bytes)
                file.mappings = self._mappings
                return Slot.create(path, path.name, seal_bytes, 0, file)
            except OSError as error:
                self.on_notice(
                    f"no slot can be made in {self.in_place.directory} ({error}): from now on "
                    f"slots are in {self.job.root.parent}, and versions are copied from there",
                    logging.WARNING,
                )
                self.in_place = None
        if not self.volatile:
            try:
                return Slot.create(path, path.name, seal_bytes, image_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                    raise
                if index >= self._least:
                    self._has_memory, self.count, self.most = False, self._least, self._least
                    raise NoSlotError("there is no memory for one more slot") from error
            self.volatile = True
            self.on_notice(
                f"{self.job.root.parent} has no room for a slot of {seal_bytes + image_bytes} "
                f"bytes ({self.count} per rank are needed): "
                f"{too_small(str(self.job.root.parent))}",
                logging.ERROR,
            )
        return Slot.create(None, path.name, seal_bytes, image_bytes)

    def filled(self, slot: Slot | None, sealed: VersionId | None) -> None:
        """Record that the snapshot in `slot` is done, and the version `sealed` that it holds."""
        with self._lock:
            for index in tuple(self.filling):
                if self.slots[index] is slot:
                    self._held[index] = sealed
                    self.filling.discard(index)

    def give_up(self, slot: Slot) -> None:
        """Void a slot that is being filled, if it is: it can be chosen again."""
        with self._lock:
            for index in [i for i in self.filling if self.slots[i] is slot]:
                slot.unseal()
                self._held[index] = None
                self.filling.discard(index)

    def has_room(self, needed: Iterable[VersionId], pinned: set[str]) -> bool:
        """True when a slot is free besides those of `needed` versions, sealed or not."""
        with self._lock:
            used = self._reading(pinned)
            unbound = 0
            for id_ in needed:
                if id_ in self._held:
                    used.add(self._held.index(id_))
                else:
                    unbound += 1
            there = len(self.slots) - self.slots[self.count :].count(None)
            return there - len(used) - unbound >= 1 or (
                there + self._growable() - len(used) - unbound >= 1
            )

    def find(self, id_: VersionId) -> Slot | None:
        """The slot with the sealed version `id_`, if other processes can find it, too."""
        slot = self.slots[self._held.index(id_)] if id_ in self._held else None
        return None if slot is None or slot.is_removed else slot

    def void(self, id_: VersionId) -> None:
        """Unseal the slot that holds `id_`, if there is one: the version will be taken again."""
        with self._lock:
            for index in [i for i, held in enumerate(self._held) if held == id_]:
                slot = self.slots[index]
                assert slot is not None
                slot.unseal()
                self._held[index] = None

    def close(self, remove: bool) -> None:
        """Unmap all slots, and delete them if `remove`."""
        for slot in self.slots:
            if slot is not None:
                self.on_unmap(slot)
                if remove:
                    slot.remove()
                else:
                    slot.close()
        self._mappings.close()
        self.slots = [None] * self.count
        self._held = [None] * self.count


def too_small(shm_dir: str) -> str:
    """Consequence of too little shared memory, with advice."""
    return (
        "slots that do not fit are private memory and DO NOT survive a killed process; only the "
        f"local level does. Give {shm_dir} more memory (docker run --shm-size, an emptyDir of "
        "medium Memory in Kubernetes), or set shm_dir to a larger memory file system"
    )


def _nothing(slot: Slot) -> None:
    """Do nothing, without a GPU."""
