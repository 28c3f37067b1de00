"""The pool: one rank's slots, and which of them may be overwritten.

The rule that keeps a restorable version alive at every instant (docs/internals/agreement.md,
"Two slots are enough"): a slot is overwritten only when it holds no version of the ledger's
protected set, is not being filled, and is not being read by an agent, ours or the previous run's.

Thread-safe: the copier thread chooses slots, the training thread asks and frees.
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
    """Every slot holds something that must not be overwritten."""


class SlotPool:
    """See the module's text."""

    def __init__(
        self,
        job: JobDirectory,
        rank: int,
        count: int,
        on_notice: Callable[[str, int], None],
        in_place: LocalStore | None = None,
    ) -> None:
        """`on_notice(text, severity)` hears of the fall-back to memory of this process alone.

        `in_place`: the local level, where slots are to be files of it (see `image_file`).
        """
        self.job = job
        self.rank = rank
        self.in_place = in_place
        """None also from when there was no room for such a file."""
        self.slots: list[Slot | None] = [None] * count
        self.volatile = False
        """True once a slot does not outlive this process (`shm_dir` was too small)."""
        self._held: list[VersionId | None] = [None] * count
        """Which version each slot holds, sealed."""
        self._filling: set[int] = set()
        self._foreign: set[int] = set()
        """Adopted slots that an agent of the run before may still be reading."""
        self._mappings = Mappings()
        self._lock = threading.Lock()
        self.on_notice = on_notice
        self.on_map: Callable[[Slot], None] = _nothing
        """Called with a slot before it is first filled (a GPU wants its memory page-locked)."""
        self.on_unmap: Callable[[Slot], None] = _nothing

    @property
    def complete(self) -> bool:
        """True when no slot is left to be made, which takes its time."""
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
        """Remove images that no slot has any more: persistent memory outlives a reboot, and the
        slots do not. Those of other living ranks are theirs to judge."""
        images = images_of(store.directory, self.job.path)
        linked = self.job.images()
        for image, slot in images:
            rank = rank_of(slot)
            if image not in linked and (rank == self.rank or not self.job.lives(rank)):
                with contextlib.suppress(OSError):
                    image.unlink()

    def choose(
        self, protected: set[VersionId], pinned: set[str], seal_bytes: int, image_bytes: int
    ) -> Slot:
        """An unsealed slot of at least that size, marked as being filled until `filled`.

        Raises NoSlotError when all are taken, OSError when there is no memory for a new one.
        """
        with self._lock:
            index = self._free_index(protected, pinned)
            self._filling.add(index)
        try:
            return self._make_ready(index, seal_bytes, image_bytes)
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
        """Slots that an agent reads, ours (`pinned`, by name) or that of the run before."""
        for index in list(self._foreign):
            slot = self.slots[index]
            if slot is None or not slot.in_use_elsewhere():
                self._foreign.discard(index)
        ours = {i for i, s in enumerate(self.slots) if s is not None and s.name in pinned}
        return ours | self._foreign

    def _make_ready(self, index: int, seal_bytes: int, image_bytes: int) -> Slot:
        slot = self.slots[index]
        self._held[index] = None
        self._mappings.forget_removed()
        if slot is not None:
            slot.unseal()
            if slot.is_gone:
                self._make_folder_anew(slot)
            elif slot.fits(seal_bytes, image_bytes, self.in_place):
                self.on_map(slot)
                return slot
            self.slots[index] = None
            self.on_unmap(slot)
            slot.remove()
        self.slots[index] = made = self._create(index, seal_bytes, image_bytes)
        self.on_map(made)
        return made

    def _make_folder_anew(self, slot: Slot) -> None:
        """Something cleans up there while the job runs (a scheduler's epilogue, systemd)."""
        self.on_notice(
            f"somebody removed {slot.path}, where versions were kept in memory: it is made anew, "
            "and until the next version is sealed there is none in memory. Set shm_dir to a memory "
            "file system that nothing cleans up",
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
        """The snapshot that was filling `slot` is done; `sealed` names what the slot now holds."""
        with self._lock:
            for index in [i for i in self._filling if self.slots[i] is slot]:
                self._held[index] = sealed
                self._filling.discard(index)

    def has_room(self, needed: Iterable[VersionId], pinned: set[str]) -> bool:
        """True when a slot is left besides those of `needed` versions, filled or still to be."""
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
        """The slot that holds `id_`, sealed, if others can find it, too."""
        slot = self.slots[self._held.index(id_)] if id_ in self._held else None
        return None if slot is None or slot.is_gone else slot

    def void(self, id_: VersionId) -> None:
        """Unseal the slot that holds `id_`, if one does: the version is to be taken again."""
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
    """What follows from too little shared memory, and the way out."""
    return (
        "slots that do not fit are private memory and DO NOT survive a killed process; only the "
        f"local level does. Give {shm_dir} more memory (docker run --shm-size, an emptyDir of "
        "medium Memory in Kubernetes), or set shm_dir to a larger memory file system"
    )


def _nothing(slot: Slot) -> None:
    """No GPU, nothing to do."""
