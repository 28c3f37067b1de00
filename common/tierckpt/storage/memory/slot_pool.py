"""The pool: one rank's slots, and the choice of the next one to overwrite.

The rule that keeps a restorable version at every instant (docs/internals/agreement.md, "Two slots
are enough"): a slot is overwritten only when it holds no version of the ledger's protected set, is
not being filled, and is not being read by an agent of this run or the previous one.

Thread-safe: the copier thread chooses slots, the training thread queries and frees them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Iterable

from tierckpt.format.ids import VersionId
from tierckpt.storage.local.store import LocalStore

from .image_file import ImageFile, Mappings, images_of
from .job_directory import JobDirectory, rank_of
from .slots import Slot


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
    ) -> None:
        """`on_notice(text, severity)` reports the fall-back to private memory of this process.

        `in_place`: the local level, if slots are to be files in it (see `image_file`).
        """
        self.job = job
        self.rank = rank
        self.in_place = in_place
        """None also after there was no room for such a file."""
        self.slots: list[Slot | None] = [None] * count
        self.volatile = False
        """True once a slot does not outlive this process (`shm_dir` was too small)."""
        self._held: list[VersionId | None] = [None] * count
        """The sealed version in each slot."""
        self._filling: set[int] = set()
        self._foreign: set[int] = set()
        """Adopted slots that an agent of the previous run may still be reading."""
        self._mappings = Mappings()
        self._lock = threading.Lock()
        self.on_notice = on_notice
        self.on_map: Callable[[Slot], None] = _nothing
        """Called with a slot before it is first filled (a GPU needs its memory page-locked)."""
        self.on_unmap: Callable[[Slot], None] = _nothing

    @property
    def complete(self) -> bool:
        """True when all slots exist; making one takes time."""
        return None not in self.slots

    def adopt(self) -> None:
        """Take over the slots that an earlier run of this rank left on this machine."""
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
        index = -1
        try:  # an interrupt may come right after the lock
            with self._lock:
                index = self._free_index(protected, pinned)
                self._filling.add(index)
            return self._make_ready(index, seal_bytes, image_bytes, at_once)
        except BaseException:
            with self._lock:
                self._filling.discard(index)
            raise

    def _free_index(self, protected: set[VersionId], pinned: set[str]) -> int:
        reading = self._reading(pinned)
        free = [
            (held or VersionId(-1, -1), index)
            for index, held in enumerate(self._held)
            if index not in self._filling and index not in reading and held not in protected
        ]
        if not free:
            raise NoSlotError("every slot holds a version that must not be overwritten yet")
        return min(free)[1]

    def _reading(self, pinned: set[str]) -> set[int]:
        """Slots that an agent reads, ours (`pinned`, by name) or that of the previous run."""
        for index in list(self._foreign):
            slot = self.slots[index]
            if slot is None or not slot.in_use_elsewhere():
                self._foreign.discard(index)
        if not pinned:
            return set(self._foreign)
        ours = {i for i, s in enumerate(self.slots) if s is not None and s.name in pinned}
        return ours | self._foreign

    def _make_ready(self, index: int, seal_bytes: int, image_bytes: int, at_once: bool) -> Slot:
        slot = self.slots[index]
        removed = slot is not None and slot.is_removed
        fits = (
            slot is not None and not removed and slot.fits(seal_bytes, image_bytes, self.in_place)
        )
        if at_once and not (fits and slot is not None and slot.is_populated):
            raise NoSlotError("a slot must be made or mapped first")
        self._held[index] = None
        self._mappings.forget_removed()
        if slot is not None:
            slot.unseal()
            if fits:
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
            self.volatile = True
            self.on_notice(
                f"{self.job.root.parent} has no room for a slot of {seal_bytes + image_bytes} "
                f"bytes ({len(self.slots)} per rank are needed): "
                f"{too_small(str(self.job.root.parent))}",
                logging.ERROR,
            )
        return Slot.create(None, path.name, seal_bytes, image_bytes)

    def filled(self, slot: Slot | None, sealed: VersionId | None) -> None:
        """Record that the snapshot in `slot` is done, and the version `sealed` that it holds."""
        with self._lock:
            for index in [i for i in self._filling if self.slots[i] is slot]:
                self._held[index] = sealed
                self._filling.discard(index)

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
            return len(self.slots) - len(used) - unbound >= 1

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
        self.slots = [None] * len(self.slots)
        self._held = [None] * len(self.slots)


def too_small(shm_dir: str) -> str:
    """Consequence of too little shared memory, with advice."""
    return (
        "slots that do not fit are private memory and DO NOT survive a killed process; only the "
        f"local level does. Give {shm_dir} more memory (docker run --shm-size, an emptyDir of "
        "medium Memory in Kubernetes), or set shm_dir to a larger memory file system"
    )


def _nothing(slot: Slot) -> None:
    """Do nothing, without a GPU."""
