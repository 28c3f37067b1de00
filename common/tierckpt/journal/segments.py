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
from tierckpt.group import Node
from tierckpt.storage.files.durable import open_plain, remove
from tierckpt.storage.files.mapped_file import MappedFile

from .chain import Link, RecordKey
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
        """The record as all ranks know it."""
        head, facts = self.small.head, self.small.manifest.facts
        steps = tuple(len(each.image) for each in self.steps)
        return Link(head.after, facts.id, facts.run_id, head.digest, steps)

    def verify(self) -> None:
        """As `Frame.verify`, for all frames."""
        for frame in (*self.steps, self.small):
            frame.verify()


class JournalReader:
    """The records in some files. `close` unmaps the files: no `Frame` is used after it."""

    def __init__(self, folder: Path, names: Iterable[SegmentName]) -> None:
        """Read heads and manifests in these files. Never raises: parts that cannot be read are in
        `problems`. The last record of a file may be incomplete, as its writer was killed; that is
        no problem."""
        self.records: dict[tuple[int, RecordKey], Record] = {}
        """By shard and key; that of the first file, if several have it."""
        self._again: dict[tuple[int, RecordKey], list[Record]] = {}
        """All files' records, in their order: on a file system that all nodes see, a folder has a
        rank's journal and the copy of it."""
        self.problems: list[str] = []
        self._files: list[MappedFile] = []
        for name in names:
            path = folder / str(name)
            try:
                self._read(path, name.base.shard)
            except FileNotFoundError:
                continue  # retired since the folder was listed
            except (OSError, CorruptShardError, FormatError) as error:
                self.problems.append(f"{path}: {error}")

    def _read(self, path: Path, shard: int) -> None:
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
            held = shard, record.link.key
            if self.records.setdefault(held, record).link == record.link:
                self._again.setdefault(held, []).append(record)
            steps = []

    def is_sound(self, shard: int, key: RecordKey) -> bool:
        """Verify a record, and a copy of it in another file in its place if it is damaged;
        `problems` names what is damaged."""
        held = shard, key
        for record in self._again[held]:
            self.records[held] = record
            try:
                record.verify()
            except (OSError, CorruptShardError, FormatError) as error:
                self.problems.append(f"{record.path}: {error}")
            else:
                return True
        return False

    @property
    def links(self) -> list[tuple[int, Link]]:
        """All records, each with its shard."""
        return [(shard, record.link) for (shard, _), record in self.records.items()]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(len(file.view) for file in self._files)

    def close(self) -> None:
        """Unmap all files. May be called again."""
        self.records, self._again = {}, {}
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


@dataclass(frozen=True)
class FileOwner:
    """One rank, as the owner of journal files."""

    rank: int
    ranks: int
    """Number of the job's ranks."""
    node: Node

    def wrote(self, name: SegmentName) -> bool:
        """Whether a file is this rank's, or that of a former rank of its number modulo that of
        ranks."""
        return name.rank % self.ranks == self.rank

    def tidies(self, name: SegmentName) -> bool:
        """Whether this rank removes a file that nobody needs: also as the first rank of its node,
        if the file's rank has moved to another node."""
        moved = name.rank % self.ranks not in self.node.ranks
        return self.wrote(name) or (moved and self.rank == self.node.first)


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


__all__ = ["FOLDER", "FileOwner", "Frame", "JournalReader", "Record", "names_in", "remove_all"]
