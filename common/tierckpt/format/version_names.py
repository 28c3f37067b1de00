"""Names on the persistent level, and which shards share a file. Pure; standard library only.

Everything of one version lies in one folder whose name says what it holds. Shards are gathered in
*groups* of consecutive numbers. The rule needs nothing but the number of shards, so every writer
knows it without asking anybody:

    <root>/<version>.manifest           makes the version exist
    <root>/<version>.retired            the version is being removed, or must not come to be
    <root>/<version>.pin                retention leaves the version alone
    <root>/<version>.suspect            replicas differed when it was taken; says in what
    <root>/<version>/<group>.group      says where every shard of the group is
    <root>/<version>/<group>.shards     the group's shards, where many can write into one file
    <root>/<version>/<group>/s<first>-<last>.shards   ... or those of one writer, where they can't
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .ids import PAGE_BYTES, VersionId, round_up

SHARDS_PER_GROUP = 64
"""10,000 ranks make 157 groups, 1,000 make 16, up to 64 make one."""

MANIFEST, RETIRED, PIN, SUSPECT = ".manifest", ".retired", ".pin", ".suspect"
GROUP, SHARDS = ".group", ".shards"

_STEM = re.compile(r"v(\d{10,})\.g(\d{6,})\.of(\d{5,})\.([0-9A-Za-z]+)")
_RUN = re.compile(r"s(\d{5,})-(\d{5,})\.shards")


@dataclass(frozen=True, order=True)
class VersionName:
    """Names one version of one run, and tells how many shards it has.

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
        v, g = self.id.version, self.id.generation
        return f"v{v:010d}.g{g:06d}.of{self.shards:05d}.{self.run_id}"

    @staticmethod
    def parse(stem: str) -> VersionName | None:
        """The inverse of `stem`; None when `stem` is something else's name."""
        match = _STEM.fullmatch(stem)
        if match is None:
            return None
        version, generation, shards, run_id = match.groups()
        return VersionName(VersionId(int(generation), int(version)), int(shards), run_id)

    def __str__(self) -> str:
        return f"{self.id} (generation {self.id.generation}, run {self.run_id})"


@dataclass(frozen=True)
class Groups:
    """How the shards of a version are gathered."""

    shards: int
    per_group: int = SHARDS_PER_GROUP

    @property
    def count(self) -> int:
        """How many groups there are."""
        return -(-self.shards // self.per_group)

    def of(self, shard: int) -> int:
        """The group of a shard."""
        return shard // self.per_group

    def members(self, group: int) -> range:
        """The shards of a group."""
        first = group * self.per_group
        return range(first, min(first + self.per_group, self.shards))

    def label(self, group: int) -> str:
        """Beginning of the names of the group's files."""
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
    """File, in its group's folder, of the consecutive shards that one writer stores together."""
    return f"s{run[0]:05d}-{run[-1]:05d}{SHARDS}"


def parse_run(name: str) -> range | None:
    """The inverse of `run_name`; None for other names."""
    match = _RUN.fullmatch(name)
    return range(int(match[1]), int(match[2]) + 1) if match else None


@dataclass(frozen=True)
class SharedPlaces:
    """Who writes where in a file that many write: a table of records, then the shards' places.

    A place is as large as the version's largest shard, so offsets follow from that one number.
    Places begin at whole mebibytes: a stripe of a parallel file system then has one writer (two
    writers to a stripe make its lock go to and fro). What is not written takes no room on disk.
    """

    members: int
    largest_bytes: int
    """Length of the longest shard of the version; the same number for every writer."""

    @property
    def record_bytes(self) -> int:
        """Room for one record: a page, and what manifests grow by for larger shards."""
        return round_up(2 * PAGE_BYTES + self.largest_bytes // 8192, PAGE_BYTES)

    @property
    def _align_bytes(self) -> int:
        return 1 << 20 if self.largest_bytes >= 1 << 20 else PAGE_BYTES

    def record_offset(self, index: int) -> int:
        """Where the record of the group's shard number `index` begins."""
        return index * self.record_bytes

    def image_offset(self, index: int) -> int:
        """Where its bytes begin."""
        table_bytes = round_up(self.members * self.record_bytes, self._align_bytes)
        return table_bytes + index * round_up(self.largest_bytes, self._align_bytes)
