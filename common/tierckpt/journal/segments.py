"""Segments: the files of a journal, read and removed. Without torch.

A record counts if all of its frames are whole: every byte has a checksum. The first damaged or
incomplete frame of a file ends it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.ids import VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.format.verify import verify_shard
from tierckpt.storage.files.durable import open_plain, remove

from .chain import Link
from .frames import BOUNDARY, HEAD_BYTES, SUFFIX, FrameHead, SegmentName

FOLDER = "journal"
"""Folder of the journal in the directory of the local level."""


@dataclass(frozen=True)
class Frame:
    """A verified frame in a mapped file."""

    head: FrameHead
    manifest: bytes
    image: memoryview


@dataclass(frozen=True)
class Record:
    """A verified record: the gradients of some optimizer steps, and the small state after them."""

    steps: tuple[Frame, ...]
    small: Frame
    id: VersionId

    @property
    def link(self) -> Link:
        """The record as other ranks know it."""
        return Link(self.small.head.after, self.id, tuple(len(each.image) for each in self.steps))


class JournalReader:
    """One rank's records on this node. `close` unmaps the files: no `Frame` is used after it."""

    def __init__(self, folder: Path, shard: int, shards: int) -> None:
        """Read and verify all files of this rank, of a job with that number of ranks. Never raises:
        files that cannot be read are in `problems`."""
        self.records: dict[tuple[VersionId, VersionId], Record] = {}
        """By the place that each follows, and its id."""
        self.problems: list[str] = []
        self._maps: list[tuple[mmap.mmap, memoryview]] = []
        for name in names_in(folder):
            if (name.base.shard, name.base.shards) != (shard, shards):
                continue
            try:
                self._read(folder / str(name))
            except (OSError, CorruptShardError, FormatError) as error:
                self.problems.append(f"{folder / str(name)}: {error}")

    def _read(self, path: Path) -> None:
        with open_plain(path) as file:
            if not file.seek(0, 2):
                return
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(mapped)
        self._maps.append((mapped, view))
        steps: list[Frame] = []
        for frame in _frames(view):
            if frame.head.kind != BOUNDARY:
                steps.append(frame)
                continue
            id_ = Manifest.decode(frame.manifest).id
            record = Record(tuple(steps), frame, id_)
            self.records[record.link[:2]] = record
            steps = []

    def close(self) -> None:
        """Unmap all files. May be called again."""
        self.records = {}
        while self._maps:
            mapped, view = self._maps.pop()
            with contextlib.suppress(BufferError):  # an image is still in use: freed with that
                view.release()
                mapped.close()


def _frames(view: memoryview) -> Iterator[Frame]:
    """The frames of a file, without the last if it is incomplete: its writer was killed. Raises
    CorruptShardError or FormatError at the first damaged one."""
    low = 0
    while low + HEAD_BYTES <= len(view):
        head = FrameHead.decode(view[low : low + HEAD_BYTES])
        begin = low + HEAD_BYTES + head.manifest_bytes
        low += head.frame_bytes
        if low > len(view):
            return
        data = bytes(view[begin - head.manifest_bytes : begin])
        image = view[begin:low]
        manifest = Manifest.decode(data)
        verify_shard(manifest, image, f"the record of v{manifest.id.version}")
        yield Frame(head, data, image)


def names_in(folder: Path) -> list[SegmentName]:
    """The journal files in a folder, in order; none if it cannot be listed."""
    names: Iterable[Path] = ()
    with contextlib.suppress(OSError):
        names = [*folder.glob(f"*{SUFFIX}")]
    return sorted(found for each in names if (found := SegmentName.parse(each.name)))


def remove_all(folder: Path, names: Iterable[SegmentName]) -> None:
    """Remove journal files. Raises OSError."""
    for name in names:
        remove(folder / str(name))


__all__ = ["FOLDER", "Frame", "JournalReader", "Record", "names_in", "remove_all"]
