"""Segments: the files of a journal, their records, and how far these lead. Without torch.

A journal file is a sequence of frames. Each has a head of fixed length, a manifest, zeros up to a
page, and the image of a shard, so that images can be written past the page cache. Some `STEP`
frames and the `BOUNDARY` frame after them are one record: the gradients of the optimizer steps of
one iteration, and the small state after it.

The format is in FORMAT.md. The bytes and the chain of records that lead on from a version, found
alike on all ranks, are pure.

A restart first reads heads and manifests, to find the records that it needs, and verifies the
images of these alone: a journal is much larger than a version.

No steps are lost silently because a setting is missing, or the number of ranks is another:
`unused_journal` names the steps that a restart does not make again.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import xxhash
from msgspec import Struct

from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.ids import NO_RUN, PAGE_BYTES, Name, ShardKey, VersionId, round_up
from tierckpt.format.manifest import Manifest, verify_shard
from tierckpt.group import Node
from tierckpt.storage.durable import MappedFile, open_plain, remove

from . import FOLDER

if TYPE_CHECKING:
    from tierckpt.offline.survey import Survey

__all__ = [
    "BOUNDARY",
    "FOLDER",
    "HEAD_BYTES",
    "ITSELF",
    "NOT_SET",
    "NOT_STRICT",
    "OTHER_RANKS",
    "STEP",
    "SUFFIX",
    "FileOwner",
    "Frame",
    "FrameHead",
    "JournalCheck",
    "JournalReach",
    "JournalReader",
    "Link",
    "Record",
    "RecordKey",
    "SegmentName",
    "chain_from",
    "check_journals",
    "names_in",
    "outdated",
    "reach_of",
    "reach_of_restart",
    "rebuildable",
    "remove_all",
    "unused_journal",
]


STEP, BOUNDARY = 0, 1
"""Kinds of frames."""
SUFFIX = ".journal"
HEAD_BYTES = 64
_MAGIC = b"tierjrn1"
_FIELDS = struct.Struct("<8s6Q")
_CHECK = struct.Struct("<Q")
_NAME = re.compile(
    rf"(?P<stem>.+)\.by(?P<writer>\d{{6,}})(\.copy(?P<keeper>\d{{5,}}))?{re.escape(SUFFIX)}"
)
ITSELF = -1
"""In place of a keeper: the rank of the shard wrote the file."""


class FrameHead(Struct, frozen=True):
    """The head of a frame."""

    kind: int
    after: VersionId
    """The version or record that this frame's record follows."""
    digest: int
    """xxh3_64 of this rank's stripes of parameters and optimizer state after the record; 0 in a
    `STEP` frame."""
    manifest_bytes: int
    image_bytes: int

    @property
    def frame_bytes(self) -> int:
        """Length of the frame."""
        return self.image_offset + self.image_bytes

    @property
    def image_offset(self) -> int:
        """Offset of the image in the frame."""
        return round_up(HEAD_BYTES + self.manifest_bytes, PAGE_BYTES)

    def encode(self) -> bytes:
        """The head's bytes, with their xxh3_64 at the end."""
        lengths = self.manifest_bytes, self.image_bytes
        text = _FIELDS.pack(_MAGIC, self.kind, *self.after, self.digest, *lengths)
        return text + _CHECK.pack(xxhash.xxh3_64_intdigest(text))

    @staticmethod
    def decode(data: bytes | memoryview) -> FrameHead:
        """Read the bytes that `encode` made. Raises CorruptShardError for any others."""
        text = bytes(data[: _FIELDS.size])
        check = bytes(data[_FIELDS.size : HEAD_BYTES])
        if len(check) < _CHECK.size or check != _CHECK.pack(xxhash.xxh3_64_intdigest(text)):
            raise CorruptShardError("the head of a frame is truncated or damaged")
        magic, kind, generation, version, digest, manifest_bytes, image_bytes = _FIELDS.unpack(text)
        if magic != _MAGIC or kind not in (STEP, BOUNDARY):
            raise CorruptShardError(f"a frame of an unknown kind ({magic!r}, {kind})")
        after = VersionId(generation, version)
        return FrameHead(kind, after, digest, manifest_bytes, image_bytes)


class SegmentName(Name, frozen=True):
    """The name of a journal file: one rank's records between two versions on local."""

    base: ShardKey
    """The rank's shard of the version before the first record, or the record before it."""
    writer: int
    """Generation of the run that writes the file."""
    keeper: int = ITSELF
    """The rank that writes this copy of another rank's journal."""

    def __str__(self) -> str:
        copy = "" if self.keeper == ITSELF else f".copy{self.keeper:05d}"
        return f"{self.base.stem}.by{self.writer:06d}{copy}{SUFFIX}"

    @property
    def rank(self) -> int:
        """The rank that writes the file."""
        return self.base.shard if self.keeper == ITSELF else self.keeper

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        """Read a name; None if it is another kind of name."""
        match = _NAME.fullmatch(name)
        base = ShardKey.parse(match["stem"]) if match else None
        if match is None or base is None:
            return None
        return cls(base, int(match["writer"]), int(match["keeper"] or ITSELF))


class RecordKey(NamedTuple):
    """What one record has in common on all ranks."""

    after: VersionId
    id: VersionId
    run_id: str
    """See `VersionFacts.run_id`: two runs that did not see each other may make records of the same
    id: their parts must not be mixed."""
    steps: int
    """Number of optimizer steps."""


class Link(NamedTuple):
    """One record of one shard, as all ranks know it."""

    after: VersionId
    id: VersionId
    run_id: str
    digest: int
    """See `FrameHead.digest`."""
    steps: tuple[int, ...]
    """Bytes of the image of each optimizer step's gradients."""

    @property
    def key(self) -> RecordKey:
        """What it has in common with those of other shards."""
        return RecordKey(self.after, self.id, self.run_id, len(self.steps))


def chain_from(
    base: VersionId, shards: Iterable[Iterable[RecordKey]], rollback: tuple[int, int] = NO_RUN
) -> list[RecordKey]:
    """Return the records that follow `base`, oldest first, as far as there is one of every shard.

    Where two runs continued from the same place, the newer one counts. `rollback`: the entry in
    the lineage of the last run that went back (see `Rollback`); records given up do not count.
    """
    common = set.intersection(*map(set, shards))
    following: dict[VersionId, RecordKey] = {}
    for key in sorted(common):
        if key.id.generation >= rollback[0] or key.id.version <= rollback[1]:
            following[key.after] = key  # the newest comes last
    found: list[RecordKey] = []
    place = base
    while (follower := following.get(place)) is not None and follower.id > base:
        if follower in found:
            break
        found.append(follower)
        place = follower.id
    return found


def rebuildable(
    safe: VersionId | None, protected: VersionId | None, most_steps: int
) -> VersionId | None:
    """Return the version that a restart starts with after the loss of a node: the `protected` one.
    If it is more than `most_steps` older than the newest one on local, `safe`, nothing waits for
    the peer level any more, as the room on the disk is limited."""
    if safe is None or protected is None or safe.version - protected.version > most_steps:
        return safe
    return min(safe, protected)


def outdated(bases: Iterable[VersionId], safe: VersionId | None, keep: int) -> set[VersionId]:
    """Return the bases of journal files that no restart needs any more, once `safe` is the newest
    version that it may start with: all but the newest `keep` up to `safe`, and later ones."""
    known = sorted(each for each in {*bases} if safe is not None and each <= safe)
    return {*known[: max(len(known) - keep, 0)]}


class Frame(Struct, frozen=True):
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


class Record(Struct, frozen=True):
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
        `problems`. The last record of a file may be incomplete, as its writer was killed: no
        problem."""
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
        start, end = low + HEAD_BYTES, low + head.frame_bytes
        if end > len(view):
            return
        file.bring(start, start + head.manifest_bytes)
        manifest = Manifest.decode(bytes(view[start : start + head.manifest_bytes]))
        image = low + head.image_offset
        yield Frame(head, manifest, view[image:end], file, image)
        low = end


class FileOwner(Struct, frozen=True):
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
        """Whether this rank removes a useless file: also as the first rank of its node,
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


UNUSED = (
    "the journal in {folder} leads from v{base} on to v{last}, and {why}: the steps after "
    "v{reached} are lost. {remedy} to have them again"
)
NOT_SET = ("local_journal_steps is not set", "Start again with local_journal_steps")
NOT_STRICT = ("restore(strict=False) makes no steps again", "Start again with strict=True")
OTHER_RANKS = ("it is of {were} rank(s), this job has {size}", "Start again with {were} rank(s)")


def unused_journal(
    directory: str,
    base: VersionId,
    rollback: tuple[int, int],
    texts: tuple[str, str],
    size: int,
    reached: VersionId | None = None,
) -> str:
    """Describe the longest journal in this local directory that follows the version `base`, if it
    leads further than to `reached`; empty without one. Never raises.

    Args:
        directory: the local directory.
        base: the version that was restored.
        rollback: see `chain_from`.
        texts: the reason why it is not used, and the remedy.
        size: number of ranks of this job.
        reached: how far this job's own journal has led; only journals of another number of ranks
            count then.
    """
    folder, longest = Path(directory) / FOLDER, (reached or base).version
    text = ""
    there = names_in(folder)
    for shards, shard in sorted({(n.base.shards, n.base.shard) for n in there}):
        if reached is not None and shards == size:
            continue
        names = [n for n in there if (n.base.shards, n.base.shard) == (shards, shard)]
        with closing(JournalReader(folder, names)) as reader:
            keys = [key for _, key in reader.records]
        chain = chain_from(base, [keys], rollback)
        if chain and chain[-1].id.version > longest:
            longest = chain[-1].id.version
            why, remedy = (each.format(were=shards, size=size) for each in texts)
            text = UNUSED.format(
                folder=folder,
                base=base.version,
                last=longest,
                why=why,
                reached=(reached or base).version,
                remedy=remedy,
            )
    return text


class JournalReach(Struct, frozen=True):
    """The records after one version. Heads and manifests were read, images were not."""

    base: int
    """The version."""
    last: int
    """The version that a boundary after the last record would have; `base` without records."""
    records: int
    """Number of records that all ranks have."""
    missing: list[int]
    """Ranks without any record of this job, in the directories that were searched."""


def reach_of(
    directories: Iterable[Path], base: VersionId, ranks: int, rollback: tuple[int, int]
) -> JournalReach | None:
    """How far the journals in these local directories lead from the version `base` of a job with
    that number of ranks; None without a journal. `rollback`: see `chain_from`. Never raises."""
    keys: list[set[RecordKey]] = [set() for _ in range(ranks)]
    for directory in directories:
        folder = directory / FOLDER
        names = [n for n in names_in(folder) if n.base.shards == ranks and n.base.shard < ranks]
        with closing(JournalReader(folder, names)) as reader:
            for shard, key in reader.records:
                keys[shard].add(key)
    if not any(keys):
        return None
    chain = chain_from(base, keys, rollback)
    last = chain[-1].id if chain else base
    missing = [rank for rank, theirs in enumerate(keys) if not theirs]
    return JournalReach(base.version, last.version, len(chain), missing)


def reach_of_restart(there: Survey) -> JournalReach | None:
    """How far the journals in a survey lead from the version that a restart takes; None without any
    journal, without a version, and if the restart goes back, as it makes no steps again then."""
    plan = there.plan() if there.request is None else None
    if plan is None:
        return None
    return reach_of(there.directories, plan.id, len(plan.sources), there.rollback_run)


class JournalCheck(Struct, frozen=True):
    """All records of one rank in a directory, or all in a copy, compared with their checksums."""

    records: int
    nbytes: int
    """Bytes of its files."""
    problems: list[str]
    """The damage, with the path; empty: none."""


def check_journals(directories: Iterable[Path]) -> Iterator[JournalCheck]:
    """Read every byte of the journals in these local directories, rank by rank. An incomplete
    record at the end of a file is no damage. Never raises."""
    for folder in (directory / FOLDER for directory in directories):
        of_rank: dict[tuple[int, int, int], list[SegmentName]] = {}
        for name in names_in(folder):
            of_rank.setdefault((name.base.shard, name.base.shards, name.keeper), []).append(name)
        for _, names in sorted(of_rank.items()):
            with closing(JournalReader(folder, names)) as reader:
                all(reader.is_sound(*held) for held in reader.records)
                yield JournalCheck(len(reader.records), reader.nbytes, reader.problems)
