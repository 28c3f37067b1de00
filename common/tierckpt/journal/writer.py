"""Writer: the thread that appends records to journal files, and makes them durable."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tierckpt import _faults
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import VersionId
from tierckpt.format.manifest import Manifest, digest
from tierckpt.format.verify import digests_of
from tierckpt.storage.files import durable

from .chain import outdated
from .frames import BOUNDARY, STEP, FrameHead, SegmentName
from .images import Image
from .segments import names_in, remove_all

MOST_WAITING = 3
"""Records whose memory may wait for the disk. One more, and the disk does not keep up."""
CLOSE_SECONDS = 10.0
"""At the end: time to wait for the disk."""


@dataclass(frozen=True)
class Draft:
    """A record that is to be written."""

    segment: SegmentName
    after: VersionId
    facts: VersionFacts
    digest: int
    """See `FrameHead.digest`."""
    steps: tuple[Image, ...]
    small: Image


class JournalWriter:
    """Owns the thread and the memory of records. Methods are for the training thread."""

    def __init__(
        self, folder: Path, shard: int, on_failed: Callable[[VersionId, OSError], None]
    ) -> None:
        """`on_failed` is called on the thread if a record could not be written, with the place that
        it follows: the rest of its file is dropped."""
        self.failed: SegmentName | None = None
        """The last file that could not be written."""
        self._folder, self._shard, self._on_failed = folder, shard, on_failed
        self._queue: queue.SimpleQueue[Draft | Callable[[], None] | None] = queue.SimpleQueue()
        self._free: deque[torch.Tensor] = deque(maxlen=2 * MOST_WAITING + 2)
        self._waiting = 0
        self._changed = threading.Condition()
        self._file: tuple[SegmentName, int] | None = None
        """The open file and its descriptor."""
        self._thread = threading.Thread(target=self._run, name="tierckpt-journal", daemon=True)
        self._thread.start()

    def room(self, nbytes: int) -> torch.Tensor:
        """Memory for an image: that of a written one, if one of this length is free."""
        for _ in range(len(self._free)):
            with contextlib.suppress(IndexError):  # the other thread only appends
                found = self._free.popleft()
                if found.numel() == nbytes:
                    return found
                self._free.append(found)
        return torch.empty(nbytes, dtype=torch.uint8)

    def keeps_up(self, wait: bool) -> bool:
        """True if another record may be submitted; with `wait`, when that is so."""
        with self._changed:
            while wait and self._waiting >= MOST_WAITING:
                self._changed.wait()
            return self._waiting < MOST_WAITING

    def submit(self, draft: Draft) -> None:
        """Write a record, after those before it. Its images belong to the thread from now on."""
        with self._changed:
            self._waiting += 1
        self._queue.put(draft)

    def retire(self, shards: int, safe: VersionId | None, keep: int) -> None:
        """Remove files of this rank that no restart needs any more, see `chain.outdated`. `shards`:
        the number of ranks. A former rank's files belong to the rank of its number modulo that."""

        def retire() -> None:
            there = names_in(self._folder)
            old = outdated((name.base.id for name in there), safe, keep)
            mine = (name for name in there if name.base.shard % shards == self._shard)
            remove_all(self._folder, [name for name in mine if name.base.id in old])

        self._queue.put(retire)

    def remove(self, unwanted: Callable[[SegmentName], bool]) -> None:
        """Remove this rank's files for which `unwanted` is true."""

        def remove() -> None:
            mine = (n for n in names_in(self._folder) if n.base.shard == self._shard)
            remove_all(self._folder, filter(unwanted, mine))
            if self._file is not None and unwanted(self._file[0]):
                self._close_file()

        self._queue.put(remove)

    def close(self) -> None:
        """Write what was submitted, for at most CLOSE_SECONDS, and end the thread."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all submitted records are durable or have failed; False after that time."""
        end = time.monotonic() + timeout_seconds
        with self._changed:
            while self._waiting and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())
            return not self._waiting

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if not isinstance(work, Draft):
                with contextlib.suppress(OSError):  # the next one tries again
                    work()
                continue
            try:
                if work.segment != self.failed:
                    self._append(work)
            except OSError as error:
                self.failed = work.segment
                self._close_file()
                self._on_failed(work.after, error)
            finally:
                self._free += [image.data for image in (*work.steps, work.small)]
                with self._changed:
                    self._waiting -= 1
                    self._changed.notify_all()
        self._close_file()

    def _append(self, draft: Draft) -> None:
        fd = self._open(draft.segment)
        whole = os.lseek(fd, 0, os.SEEK_CUR)
        try:
            for image in draft.steps:
                self._write(fd, draft, STEP, image)
            self._write(fd, draft, BOUNDARY, draft.small)
            os.fdatasync(fd)
        except OSError:
            with contextlib.suppress(OSError):  # a record without its end is not read
                os.ftruncate(fd, whole)
            raise

    def _write(self, fd: int, draft: Draft, kind: int, image: Image) -> None:
        """Write one frame."""
        data = image.data.numpy().data
        manifest = Manifest(
            facts=draft.facts,
            shard=self._shard,
            image_bytes=len(image.header) + len(data),
            header_bytes=len(image.header),
            rank_state_bytes=image.tree_bytes,
            digests=digest(image.header) + digests_of(data, image.block_bytes),
            created_seconds=time.time(),
        )
        text = manifest.encode()
        state = draft.digest if kind == BOUNDARY else 0
        head = FrameHead(kind, draft.after, state, len(text), manifest.image_bytes).encode()
        half = len(data) // 2
        _write_all(fd, memoryview(head + text + image.header))
        _write_all(fd, data[:half])
        _faults.point("journal", version=draft.facts.id.version, kind=kind)
        _write_all(fd, data[half:])

    def _open(self, name: SegmentName) -> int:
        if self._file is not None and self._file[0] == name:
            return self._file[1]
        self._close_file()
        durable.make(self._folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fd = os.open(self._folder / str(name), flags, 0o666)
        self._file = name, fd
        durable.share(fd, self._folder)
        try:
            durable.sync(self._folder)
        except OSError as error:
            if error.errno not in durable.REFUSALS:
                raise
        return fd

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file[1])
            self._file = None


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


__all__ = ["CLOSE_SECONDS", "MOST_WAITING", "Draft", "JournalWriter"]
