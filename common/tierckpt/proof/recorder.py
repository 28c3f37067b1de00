"""The recorder: one rank's part of a run under test, inside the job; see
`coordination.proof_order`.

Its callbacks run on the training thread.

Passes over data loaders show where an epoch of the training ends. Only a job under test watches
them, since the loaders' `__iter__` is replaced. A pass in progress at a boundary belongs to the
training; an evaluation's pass starts and ends between two boundaries.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from tierckpt.callbacks import Callbacks
from tierckpt.coordination.proof_order import PROGRESS, ProofOrder, path_of
from tierckpt.core.decisions import HaltRequest
from tierckpt.format.manifest import Manifest, digest
from tierckpt.format.shard_file import decode_header
from tierckpt.offline.leaves import fingerprint, leaves_of
from tierckpt.state import tree_codec
from tierckpt.storage.local import LocalStore
from tierckpt.storage.routed import FILE_PREFIX, end_without, files_at_end
from tierckpt.storage.slots import Slot

from . import WALL_CLOCK
from .records import Writer

if TYPE_CHECKING:
    from tierckpt.checkpointer.loop import CheckpointerCore
    from tierckpt.checkpointer.start import DataWitness
    from tierckpt.events import Event
    from tierckpt.hooks.unsaved_objects import Unsaved
    from tierckpt.restored import Restored

__all__ = [
    "Recorder",
    "loader_kinds",
    "loaders_under_way",
    "state_of",
    "watch_loaders",
]


_passes: list[tuple[int, weakref.ref[Any], Any]] = []
"""Number, iterator and length of the passes that may be in progress."""
_started_passes = 0


def watch_loaders() -> None:
    """Note every pass that starts from now on. May be called again."""
    for kind in loader_kinds():
        original = vars(kind)["__iter__"]
        if not hasattr(original, "_tierckpt_sees"):
            kind.__iter__ = _seeing(original)


def loader_kinds() -> list[Any]:
    """Loader classes that define their own `__iter__`."""
    found: list[Any] = [DataLoader]
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in found if "__iter__" in vars(kind)]


def _seeing(original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(original)
    def iterate(loader: Any) -> Iterator[Any]:
        iterator = original(loader)
        _note(iterator, loader)
        return iterator

    iterate._tierckpt_sees = True  # type: ignore[attr-defined]
    return iterate


def _note(iterator: Any, loader: Any) -> None:
    global _started_passes
    try:
        ref = weakref.ref(iterator)
    except TypeError:  # the iterator is a list's: its end cannot be seen
        return
    length = 0
    with contextlib.suppress(Exception):  # an iterable dataset has no length
        length = len(loader)
    _started_passes += 1
    # Persistent workers reuse one iterator; a subclass calls its parent's `__iter__`.
    others = [each for each in _passes if each[1]() not in (None, iterator)]
    _passes[:] = [*others, (_started_passes, ref, length)]


def loaders_under_way() -> list[list[int]]:
    """For each pass in progress its number, its batches, and the batches yielded (0: unknown)."""
    found = [(number, ref(), length) for number, ref, length in _passes]
    return [
        [number, length, int(getattr(each, "_num_yielded", 0))]
        for number, each, length in found
        if each is not None
    ]


ELASTIC = "HOROVOD_ELASTIC"
DRAINED = "drained-"
"""Start of the names of files: one rank's journal is on disk, and it may be killed."""
WAIT_SECONDS = 30.0
"""Limit of the wait for other ranks' journals."""


class Recorder(Callbacks):
    """The recorder of one checkpointer, which carries out this process's order."""

    def __init__(
        self, order: ProofOrder, checkpointer: CheckpointerCore, unsaved: Unsaved, data: DataWitness
    ) -> None:
        """Raises OSError if nothing can be recorded: the job has no other purpose."""
        self._order, self._checkpointer = order, checkpointer
        self._rank, self._ranks = checkpointer.group.rank, checkpointer.group.size
        place = checkpointer.config.path
        self._writer = Writer(
            order.folder, Path(place).relative_to(order.folder).parts[0], self._rank
        )
        self._armed = order.kill_at is not None and not order.mark.exists()
        self._start_version = 0
        self._to_keep = order.keep
        self._has_journal = checkpointer.config.local.journal_steps > 0
        memory = str(checkpointer._resources.job.path)
        identity = {"rank": self._rank, "ranks": self._ranks, "pid": os.getpid()}
        self._writer.line("attached", **identity, path=path_of(place), place=place, memory=memory)
        self._unsaved: tuple[int, int] = (0, 0)
        self._witness: tuple[int, str] | None = None
        self._unsaved_objects, self._data = unsaved, data
        if data.mode == "error":
            data.mode = "warn"  # the steps after it show the effect
        watch_loaders()
        checkpointer._halt.ask(HaltRequest(after_version=order.until))

    def on_restored(self, restored: Restored) -> None:
        """Record the version that this run starts from."""
        self._start_version = restored.version
        self._writer.line("restored", version=restored.version)
        if self._has_journal:
            self._writer.line("journal", records=restored.replayed, why=restored.unrepeated)

    def on_sealed(self, event: Event) -> None:
        """Record the version's contents. The slot is not overwritten before the next boundary."""
        if (newest := self._newest_of(event.version)) is not None:
            slot, manifest = newest
            with slot.image() as view:
                state = state_of(view, manifest)
                if self._to_keep is not None and event.version >= self._to_keep:
                    self._keep(view, manifest)
            self._writer.state(event.version, state)
        if self._rank == 0:
            with contextlib.suppress(OSError):
                (self._order.folder / PROGRESS).write_text(str(event.version))

    def _newest_of(self, version: int | None) -> tuple[Slot, Manifest] | None:
        """The slot with the newest generation of this version, and its manifest."""
        found = [(s, s.manifest()) for s in self._checkpointer._pool.slots if s is not None]
        known = [(s, m) for s, m in found if m is not None and m.id.version == version]
        return max(known, key=lambda each: each[1].id, default=None)

    def _keep(self, view: memoryview, manifest: Manifest) -> None:
        """Copy this rank's shard, once."""
        self._to_keep = None
        here = Path(self._checkpointer.config.directory).relative_to(self._order.folder)
        store = LocalStore(self._order.kept / here)
        store.create()
        store.commit(manifest.key, view[: manifest.image_bytes], manifest.encode())

    def on_step_boundary(self, version: int) -> None:
        """Kill the process if this is the boundary. All ranks know the same safe version, so all
        are killed here or none."""
        self._writer.line("passes", version=version, passes=loaders_under_way())
        unsaved = self._unsaved_objects
        if (seen := (len(unsaved.texts), unsaved.schedulers)) != self._unsaved:
            self._unsaved = seen
            self._writer.line("unsaved", texts=unsaved.texts, schedulers=unsaved.schedulers)
        if (witness := self._data.result) is not self._witness:
            self._witness = witness
            self._writer.line("witness", result=witness)
        if not self._armed or version < (self._order.kill_at or 0):
            return
        safe = self._checkpointer._agreement.memory.safe
        if safe is None or safe.version <= self._start_version:
            return
        self._armed = False
        # In an elastic job one rank is killed: with no survivors the job would wait for new hosts.
        if os.environ.get(ELASTIC) != "1" or self._rank == self._ranks - 1:
            self._writer.line("killed", version=version)
            if self._has_journal:
                self._leave_only_the_disk()
            self._order.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def _leave_only_the_disk(self) -> None:
        """Wait until every rank has this boundary in its journal, and make the versions in memory
        unusable: the next start must make the journal's steps again."""
        for drain in self._checkpointer._parts.drain:
            drain(WAIT_SECONDS)
        here = f"{DRAINED}{Path(self._checkpointer.config.path).name}."
        (self._order.folder / f"{here}{self._rank}").touch()
        end = time.monotonic() + WAIT_SECONDS
        while len([*self._order.folder.glob(f"{here}*")]) < self._ranks and time.monotonic() < end:
            time.sleep(0.01)
        for slot in filter(None, self._checkpointer._pool.slots):
            slot.unseal()


def state_of(view: memoryview, manifest: Manifest) -> dict[str, str]:
    """Names and fingerprints of all values in a sealed shard, except times."""
    header = decode_header(view[: manifest.header_bytes])
    found: dict[str, str] = {}
    for piece in header.pieces:
        low = header.header_bytes + piece.offset
        part = "" if piece.whole else f"[{piece.start}:{piece.stop}]"
        data = digest(view[low : low + piece.nbytes]).hex()
        found[piece.spec.name + part] = f"{piece.spec.dtype}{list(piece.spec.shape)} #{data}"
    tree = view[header.tree_offset :][: manifest.rank_state_bytes]
    files = files_at_end(len(tree), lambda low, high: bytes(tree[low:high]))
    for name, (low, high) in files.items():
        found[FILE_PREFIX + name] = f"{high - low} bytes #{digest(tree[low:high]).hex()}"
    small = tree_codec.decode(bytes(tree[: end_without(len(tree), files)]), cut=True)
    found |= {
        name: fingerprint(leaf)
        for name, leaf in leaves_of(small).items()
        if not name.endswith(f"/{WALL_CLOCK}")
    }
    metric = manifest.facts.metric
    return found if metric is None else {**found, "metric": fingerprint(metric)}
