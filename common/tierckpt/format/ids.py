"""Names and numbers that all parts share: versions, shards, and files of the persistent level.

Pure; standard library only.

All files of one version on the persistent level are in one folder, and their names describe their
content. Shards form *groups* of consecutive numbers. The rule needs only the number of shards, so
every writer knows it without asking others:

    <root>/<version>.manifest           makes the version exist
    <root>/<version>.retired            the version is being removed, or must not be completed
    <root>/<version>.pin                retention leaves the version alone
    <root>/<version>.suspect            replicas differed when it was taken; describes how
    <root>/v<version>.g<generation>.<fork>.hold       another job started from it, and needs it
    <root>/v<version>.g<generation>.<fork>.fork       ... and does not need it any more
    <root>/<version>/<group>.group      the place of every shard of the group
    <root>/<version>/<group>.shards     the group's shards, where many can write into one file
    <root>/<version>/<group>/s<first>-<last>.shards   ... or those of one writer, where they can't
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import astuple

from tierckpt.errors import NewerFormatError

FORMAT_MAJOR = 1
FORMAT_MINOR = 1

PAGE_BYTES = 4096
"""Header and data lengths are multiples of this, as O_DIRECT requires."""

Lineage = tuple[tuple[int, int], ...]
"""(generation, version it started from) of a generation and all its ancestors, oldest first."""


NO_RUN = (0, 0)
"""An entry in a lineage older than every version."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple`, at least `value`."""
    return -(-value // multiple) * multiple


def check_version(text: str, what: str) -> None:
    """Raise NewerFormatError when `text` ("major.minor") is of a newer major version than ours."""
    major = int(str(text).split(".", maxsplit=1)[0])
    if major > FORMAT_MAJOR:
        raise NewerFormatError(
            f"this {what} has format version {text}, this tierckpt reads up to {FORMAT_MAJOR}.x; "
            "read it with the tierckpt that wrote it, or a newer one"
        )


_VERSION_STEM = re.compile(r"v(\d{10,})\.g(\d{6,})")


class VersionId(NamedTuple):
    """A version, distinct from one of the same number in an earlier run of the job.

    `generation` numbers the runs: all ranks agree on it when they attach or restore, and it is
    larger than any that was found on any level. Ordered by generation first.
    """

    generation: int
    version: int

    def __str__(self) -> str:
        return f"v{self.version}"

    @property
    def stem(self) -> str:
        """The start of the names of all files of this version, before a dot."""
        return f"v{self.version:010d}.g{self.generation:06d}"

    @staticmethod
    def parse(stem: str) -> VersionId | None:
        """Read a name that `stem` made; None when `stem` is another kind of name."""
        match = _VERSION_STEM.fullmatch(stem)
        return VersionId(int(match[2]), int(match[1])) if match else None


class Name(Struct, frozen=True, order=True):
    """A value that sets have: msgspec's own hash is another one in each process, and so would be
    the order of a set."""

    def __hash__(self) -> int:
        return hash(astuple(self))


class ShardKey(Name, frozen=True):
    """The name of a shard by its content, not its writer; also its file name's stem."""

    LETTER: ClassVar[str] = "s"
    SUFFIX: ClassVar[str] = ".safetensors"
    """Extension of the file with the bytes."""
    NOUN: ClassVar[str] = "shard"

    id: VersionId
    shard: int
    shards: int

    @property
    def stem(self) -> str:
        """File name without extension."""
        return f"{self.id.stem}.{self.LETTER}{self.shard:05d}of{self.shards:05d}"

    @classmethod
    def parse(cls: type[Key], stem: str) -> Key | None:
        """Read a name that `stem` made; None when `stem` is another kind of name."""
        match = _STEM.fullmatch(stem)
        if match is None or match["letter"] != cls.LETTER:
            return None
        version, generation, shard, shards = (int(g) for g in match.group(1, 2, 4, 5))
        return cls(VersionId(generation, version), shard, shards)

    def __str__(self) -> str:
        return f"{self.id} {self.NOUN} {self.shard} of {self.shards}"


class ParityKey(ShardKey, frozen=True):
    """The name of the parity beside a shard: the bytes its rank stores for the rest of its group.

    Never equal to a ShardKey, although its fields are the same.
    """

    LETTER: ClassVar[str] = "p"
    SUFFIX: ClassVar[str] = ".parity"
    NOUN: ClassVar[str] = "parity"


Key = TypeVar("Key", bound=ShardKey)

_STEM = re.compile(r"v(\d{10,})\.g(\d{6,})\.(?P<letter>[sp])(\d{5,})of(\d{5,})")


def on_lineage(id_: VersionId, lineage: Sequence[tuple[int, int]]) -> bool:
    """True when `id_` is a version of the newest generation of `lineage`, or in its past.

    When a job was taken back to v5 and continued, v12 of the run before is not in its past.
    """
    if not lineage or id_.generation > lineage[-1][0]:
        return True
    return all(id_.version <= base for gen, base in lineage if gen > id_.generation)


def newest_first(
    found: Iterable[tuple[VersionId, Lineage]], rollback: tuple[int, int] = NO_RUN
) -> list[VersionId]:
    """Order versions for a restart, newest first; only those in the newest one's past.

    `rollback` is the entry in the lineage of a run that may have left no version yet. If it is
    newer than all versions, only those in its past count.
    """
    known = dict(found)
    lineage = newest_lineage(known, rollback)
    return sorted((i for i in known if on_lineage(i, lineage)), reverse=True)


def newest_lineage(
    known: Mapping[VersionId, Lineage], rollback: tuple[int, int] = NO_RUN
) -> Lineage:
    """Return the lineage of the newest version, continued by `rollback` if newer (see
    `newest_first`); empty without versions."""
    newest = max(known, default=None)
    if newest is None:
        return ()
    return (*known[newest], rollback) if rollback[0] > newest.generation else known[newest]


def newest_of_each(ids: Iterable[VersionId]) -> set[VersionId]:
    """Return the newest version of each number, since a number can be taken again."""
    return set({id_.version: id_ for id_ in sorted(ids)}.values())


SHARDS_PER_GROUP = 64
"""10,000 ranks make 157 groups, 1,000 make 16, up to 64 make one."""

MANIFEST, RETIRED, PIN, SUSPECT = ".manifest", ".retired", ".pin", ".suspect"
HOLD, FORK = ".hold", ".fork"
GROUP, SHARDS, PARTS = ".group", ".shards", ".parts"
PART_BYTES = 16 << 20
"""Length of all parts of a shard but the last. It bounds what a writer has in memory, and what is
sent again after an error; smaller parts would need more requests, also for reads across an edge."""

_FOLDER_STEM = re.compile(r"v(\d{10,})\.g(\d{6,})\.of(\d{5,})\.([0-9A-Za-z]+)")
_RUN = re.compile(r"s(\d{5,})-(\d{5,})\.shards")
_FORK_MARK = re.compile(r"v(\d{10,})\.g(\d{6,})\.([0-9a-f]{16})(\.hold|\.fork)")


class VersionName(Name, frozen=True):
    """The name of one version of one run, with its number of shards.

    The run is part of the name because two runs that never saw each other's nodes may take the
    same generation: their shards must not complete each other's version.
    """

    id: VersionId
    shards: int
    run_id: str
    """Random name of the run, as in the manifests of its shards: digits and letters."""

    @property
    def stem(self) -> str:
        """Name of the folder, and stem of the files beside it."""
        return f"{self.id.stem}.of{self.shards:05d}.{self.run_id}"

    @staticmethod
    def parse(stem: str) -> VersionName | None:
        """Read a name that `stem` made; None when `stem` is another kind of name."""
        match = _FOLDER_STEM.fullmatch(stem)
        if match is None:
            return None
        version, generation, shards, run_id = match.groups()
        return VersionName(VersionId(int(generation), int(version)), int(shards), run_id)

    def __str__(self) -> str:
        return f"{self.id} (generation {self.id.generation}, run {self.run_id})"


class Groups(Struct, frozen=True):
    """The groups of a version's shards."""

    shards: int
    per_group: int = SHARDS_PER_GROUP

    @property
    def count(self) -> int:
        """Number of groups."""
        return -(-self.shards // self.per_group)

    def of(self, shard: int) -> int:
        """Return the group of a shard."""
        return shard // self.per_group

    def members(self, group: int) -> range:
        """Return the shards of a group."""
        first = group * self.per_group
        return range(first, min(first + self.per_group, self.shards))

    def label(self, group: int) -> str:
        """Return the start of the names of the group's files."""
        return f"{group:05d}of{self.count:05d}"

    def runs(self, shards: Iterable[int]) -> Iterator[range]:
        """Cut `shards` into runs of consecutive numbers, none across a group's edge."""
        first = last = None
        for shard in sorted(set(shards)):
            if last is not None and shard == last + 1 and self.of(shard) == self.of(last):
                last = shard
                continue
            if first is not None and last is not None:
                yield range(first, last + 1)
            first = last = shard
        if first is not None and last is not None:
            yield range(first, last + 1)


def run_name(run: range) -> str:
    """Return the name, in its group's folder, of one writer's file of consecutive shards."""
    return f"s{run[0]:05d}-{run[-1]:05d}{SHARDS}"


def parts_name(shard: int) -> str:
    """Return the name, in its group's folder, of the folder with the parts of one shard."""
    return f"s{shard:05d}{PARTS}"


def part_name(number: int) -> str:
    """Return the name of a part in that folder."""
    return f"{number:05d}"


def parse_run(name: str) -> range | None:
    """Read a name that `run_name` made; None for other names."""
    match = _RUN.fullmatch(name)
    return range(int(match[1]), int(match[2]) + 1) if match else None


def fork_mark(id_: VersionId, fork: str, held: bool) -> str:
    """Return the name of the mark of a fork (16 hexadecimal digits) that started from a version; on
    the local level, too."""
    return f"{id_.stem}.{fork}{HOLD if held else FORK}"


def parse_fork_mark(name: str) -> tuple[VersionId, str, bool] | None:
    """Read a name that `fork_mark` made; None for other names."""
    match = _FORK_MARK.fullmatch(name)
    return (VersionId(int(match[2]), int(match[1])), match[3], match[4] == HOLD) if match else None


def held_by_forks(names: Iterable[str]) -> set[VersionId]:
    """Return the versions that forks need, by the names of all files at a place."""
    return {mark[0] for mark in map(parse_fork_mark, names) if mark is not None and mark[2]}


class SharedPlaces(Struct, frozen=True):
    """The places in a file that many writers share: a table of records, then the shards.

    A place is as large as the version's largest shard, so offsets follow from that one number.
    Places start at whole mebibytes: then a stripe of a parallel file system has one writer (two
    writers move the lock of a stripe back and forth). Unwritten ranges take no room on disk.
    """

    members: int
    largest_bytes: int
    """Length of the longest shard of the version; the same number for every writer."""

    @property
    def record_bytes(self) -> int:
        """Room for one record: a page, and the growth of manifests for larger shards."""
        return round_up(2 * PAGE_BYTES + self.largest_bytes // 8192, PAGE_BYTES)

    @property
    def _align_bytes(self) -> int:
        return 1 << 20 if self.largest_bytes >= 1 << 20 else PAGE_BYTES

    def record_offset(self, index: int) -> int:
        """Return the offset of the record of the group's shard number `index`."""
        return index * self.record_bytes

    def image_offset(self, index: int) -> int:
        """Return the offset of that shard's bytes."""
        table_bytes = round_up(self.members * self.record_bytes, self._align_bytes)
        return table_bytes + index * round_up(self.largest_bytes, self._align_bytes)
