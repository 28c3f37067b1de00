"""Writer: the thread that appends records to journal files, and makes them durable."""

from __future__ import annotations

import contextlib
import errno
import mmap
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec import Struct

from tierckpt import _faults
from tierckpt.format.ids import PAGE_BYTES, VersionId
from tierckpt.format.manifest import Manifest, digest, digests_of
from tierckpt.format.records import VersionFacts
from tierckpt.storage import durable
from tierckpt.storage.durable import DirectFile

from .journal import CLOSE_SECONDS
from .segments import BOUNDARY, STEP, FrameHead, SegmentName, names_in, outdated, remove_all
from .steps import Image

MAX_WAITING = 3
"""Records that may wait for the disk in memory. One more, and the disk does not keep up."""


class Draft(Struct, frozen=True):
    """A record to write."""

    segment: SegmentName
    after: VersionId
    facts: VersionFacts
    digest: int
    """See `FrameHead.digest`."""
    steps: tuple[Image, ...]
    small: Image | None
    """None in a copy of another rank's journal: that rank sends it."""


FrameBytes = tuple[memoryview, memoryview]
"""The bytes of a frame, in two parts, each with whole pages."""


def frame_of(draft: Draft, kind: int, image: Image) -> FrameBytes:
    """The frame of an image. Any thread."""
    data = image.data.numpy().data
    manifest = Manifest(
        facts=draft.facts,
        shard=draft.segment.base.shard,
        image_bytes=len(image.header) + len(data),
        header_bytes=len(image.header),
        rank_state_bytes=image.tree.nbytes,
        digests=digest(image.header) + digests_of(data, image.block_bytes),
        created_seconds=time.time(),
    )
    text = manifest.encode()
    state = draft.digest if kind == BOUNDARY else 0
    head = FrameHead(kind, draft.after, state, len(text), manifest.image_bytes)
    first = mmap.mmap(-1, head.image_offset + len(image.header))  # starts with a page
    first.write((head.encode() + text).ljust(head.image_offset, b"\0") + image.header)
    return memoryview(first), data


def last_frame(draft: Draft) -> FrameBytes:
    """The frame of a record's small state. Any thread."""
    assert draft.small is not None
    return frame_of(draft, BOUNDARY, draft.small)


class JournalWriter:
    """Owns the thread and the memory of records. Methods are for the training thread."""

    def __init__(
        self,
        folder: Path,
        on_failed: Callable[[VersionId, Exception], None],
        last_frame: Callable[[Draft], FrameBytes] = last_frame,
        reuses_small: bool = True,
    ) -> None:
        """`on_failed` is called on the thread if a record could not be written, with the place that
        it follows: the rest of its file is dropped. `last_frame` is called there, too. With
        `reuses_small` this thread alone reads a draft's small state."""
        self.failed: SegmentName | None = None
        """The last file that could not be written."""
        self._folder, self._on_failed = folder, on_failed
        self._last_frame, self._reuses_small = last_frame, reuses_small
        self._queue: queue.SimpleQueue[Draft | Callable[[], None] | None] = queue.SimpleQueue()
        self._free: deque[torch.Tensor] = deque(maxlen=2 * MAX_WAITING + 2)
        self._waiting = 0
        self._changed = threading.Condition()
        self._file: tuple[SegmentName, DirectFile] | None = None
        """The open file."""
        self._end = 0
        """Bytes of its whole records."""
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
        memory = mmap.mmap(-1, nbytes)  # starts with a page, as writes past the page cache need it
        return torch.frombuffer(memory, dtype=torch.uint8)

    def keeps_up(self, wait: bool) -> bool:
        """True if another record may be submitted; with `wait`, once it may."""
        with self._changed:
            while wait and self._waiting >= MAX_WAITING:
                self._changed.wait()
            return self._waiting < MAX_WAITING

    def submit(self, draft: Draft) -> None:
        """Write a record, after those before it. Its images belong to the thread from now on."""
        with self._changed:
            self._waiting += 1
        self._queue.put(draft)

    def retire(
        self, mine: Callable[[SegmentName], bool], safe: VersionId | None, keep: int
    ) -> None:
        """Remove files that no restart needs any more, see `outdated`, among those for which
        `mine` is true."""

        def retire() -> None:
            there = names_in(self._folder)
            old = outdated((name.base.id for name in there), safe, keep)
            remove_all(self._folder, [n for n in filter(mine, there) if n.base.id in old])

        self._queue.put(retire)

    def remove(self, unwanted: Callable[[SegmentName], bool]) -> None:
        """Remove files for which `unwanted` is true."""

        def remove() -> None:
            remove_all(self._folder, filter(unwanted, names_in(self._folder)))
            if self._file is not None and unwanted(self._file[0]):
                self._close_file()

        self._queue.put(remove)

    def after_all(self, work: Callable[[], None]) -> None:
        """Call this on the thread, after the records that were submitted."""
        self._queue.put(work)

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Write what was submitted, for at most that time, and end the thread."""
        self._queue.put(None)
        self._thread.join(max(timeout_seconds, 0.0))

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all submitted records are durable or have failed; False after that time."""
        end = time.monotonic() + timeout_seconds
        with self._changed:
            while self._waiting and time.monotonic() < end:
                self._changed.wait(min(end - time.monotonic(), CLOSE_SECONDS))
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
            except Exception as error:  # also in memory: the training may wait for this thread
                self.failed = work.segment
                self._close_file()
                self._on_failed(work.after, error)
            finally:
                self._free += [image.data for image in work.steps]
                if self._reuses_small and work.small is not None:
                    self._free.append(work.small.data)
                with self._changed:
                    self._waiting -= 1
                    self._changed.notify_all()
        self._close_file()

    def _append(self, draft: Draft) -> None:
        file = self._open(draft.segment)
        whole = self._end
        try:
            for image in draft.steps:
                self._write(file, draft, STEP, frame_of(draft, STEP, image))
            self._write(file, draft, BOUNDARY, self._last_frame(draft))
            file.sync(self._end)
            if file.is_removed:
                raise FileNotFoundError(errno.ENOENT, "somebody removed it", str(draft.segment))
        except Exception:
            self._end = whole
            with contextlib.suppress(OSError):  # a record without its end is not read
                file.sync(whole)
            raise

    def _write(self, file: DirectFile, draft: Draft, kind: int, frame: FrameBytes) -> None:
        first, data = frame
        half = len(data) // 2 // PAGE_BYTES * PAGE_BYTES
        start = self._end + len(first)
        file.write(first, self._end)
        file.write(data[:half], start)
        _faults.point("journal", version=draft.facts.id.version, kind=kind)
        file.write(data[half:], start + half)
        self._end = start + len(data)

    def _open(self, name: SegmentName) -> DirectFile:
        if self._file is not None and self._file[0] == name:
            return self._file[1]
        self._close_file()
        durable.make(self._folder)
        self._file = name, DirectFile(self._folder / str(name))
        self._end = 0
        try:
            durable.sync(self._folder)
        except OSError as error:
            if error.errno not in durable.REFUSALS:
                raise
        return self._file[1]

    def _close_file(self) -> None:
        if self._file is not None:
            self._file[1].close()
            self._file = None


__all__ = ["MAX_WAITING", "Draft", "FrameBytes", "JournalWriter", "last_frame"]
