"""Segments: the files of a journal, read and removed. Without torch.

A restart first reads heads and manifests, to find the records that it needs, and verifies the
images of these alone: a journal is much larger than a version.
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
from tierckpt.storage.files.mapped_file import MappedFile

from .chain import Link
from .frames import BOUNDARY, HEAD_BYTES, SUFFIX, FrameHead, SegmentName

FOLDER = "journal"
"""Folder of the journal in the directory of the local level."""


@dataclass(frozen=True)
class Frame:
    """A frame in a mapped file. Head and manifest are sound, the image is as `verify` finds it."""

    head: FrameHead
    manifest: Manifest
    image: memoryview
    """Touch it after `verify` alone: before that a disk that fails ends the process."""
    file: MappedFile
    low: int
    """Offset of the image in the file."""

    def verify(self) -> None:
        """Raise CorruptShardError or FormatError unless the image is that of the manifest, and
        OSError if it cannot be read."""
        self.file.bring(self.low, self.low + len(self.image))
        verify_shard(self.manifest, self.image, f"the record of {self.manifest.id}")


@dataclass(frozen=True)
class Record:
    """A record: the gradients of some optimizer steps, and the small state after them."""

    path: Path
    steps: tuple[Frame, ...]
    small: Frame

    @property
    def id(self) -> VersionId:
        """The version that a boundary after it would have."""
        return self.small.manifest.id

    @property
    def link(self) -> Link:
        """The record as other ranks know it."""
        steps = tuple(len(each.image) for each in self.steps)
        return Link(self.small.head.after, self.id, steps)


class JournalReader:
    """One rank's records on this node. `close` unmaps the files: no `Frame` is used after it."""

    def __init__(self, folder: Path, shard: int, shards: int) -> None:
        """Read heads and manifests in all files of this rank, of a job with that number of ranks.
        Never raises: parts that cannot be read are in `problems`. The last record of a file may be
        incomplete, as its writer was killed; that is no problem."""
        self.records: dict[tuple[VersionId, VersionId], Record] = {}
        """By the place that each follows, and its id."""
        self.problems: list[str] = []
        self._files: list[MappedFile] = []
        for name in names_in(folder):
            if (name.base.shard, name.base.shards) != (shard, shards):
                continue
            path = folder / str(name)
            try:
                self._read(path)
            except FileNotFoundError:
                continue  # retired since the folder was listed
            except (OSError, CorruptShardError, FormatError) as error:
                self.problems.append(f"{path}: {error}")

    def _read(self, path: Path) -> None:
        with open_plain(path) as file:
            if not file.seek(0, 2):
                return
            mapped = MappedFile(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        self._files.append(mapped)
        steps: list[Frame] = []
        for frame in _frames(mapped):
            if frame.head.kind != BOUNDARY:
                steps.append(frame)
                continue
            record = Record(path, tuple(steps), frame)
            self.records[record.link[:2]] = record
            steps = []

    def sound(self, pairs: Iterable[tuple[VersionId, VersionId]]) -> int:
        """Verify records in this order; returns the number of those before the first damaged one,
        which `problems` names then."""
        count = 0
        for pair in pairs:
            record = self.records[pair]
            try:
                for frame in (*record.steps, record.small):
                    frame.verify()
            except (OSError, CorruptShardError, FormatError) as error:
                self.problems.append(f"{record.path}: {error}")
                break
            count += 1
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(len(file.view) for file in self._files)

    def close(self) -> None:
        """Unmap all files. May be called again."""
        self.records = {}
        while self._files:
            self._files.pop().close()


def _frames(file: MappedFile) -> Iterator[Frame]:
    """The frames of a file, without the last if it is incomplete. Raises CorruptShardError or
    FormatError at the first damaged head or manifest, and OSError at one that cannot be read."""
    low, view = 0, file.view
    while low + HEAD_BYTES <= len(view):
        file.bring(low, low + HEAD_BYTES)
        head = FrameHead.decode(view[low : low + HEAD_BYTES])
        begin, end = low + HEAD_BYTES, low + head.frame_bytes
        if end > len(view):
            return
        file.bring(begin, begin + head.manifest_bytes)
        manifest = Manifest.decode(bytes(view[begin : begin + head.manifest_bytes]))
        image = low + head.image_offset
        yield Frame(head, manifest, view[image:end], file, image)
        low = end


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
