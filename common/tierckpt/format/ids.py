"""Names, versions and format constants that all parts share. Light: standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

from tierckpt.errors import NewerFormatError

FORMAT_MAJOR = 1
FORMAT_MINOR = 1

PAGE_BYTES = 4096
"""Header and data lengths are multiples of this, as O_DIRECT requires."""

Lineage = tuple[tuple[int, int], ...]
"""(generation, version it started from) of a generation and all its ancestors, oldest first."""


NO_RUN = (0, 0)
"""An entry in a lineage that is older than every version."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def check_version(text: str, what: str) -> None:
    """Raise NewerFormatError when `text` ("major.minor") is of a newer major version than ours."""
    major = int(str(text).split(".", maxsplit=1)[0])
    if major > FORMAT_MAJOR:
        raise NewerFormatError(
            f"this {what} has format version {text}, this tierckpt reads up to {FORMAT_MAJOR}.x; "
            "read it with the tierckpt that wrote it, or a newer one"
        )


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
        """The begin of the names of all files of this version, before a dot."""
        return f"v{self.version:010d}.g{self.generation:06d}"


@dataclass(frozen=True, order=True)
class ShardKey:
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


class ParityKey(ShardKey):
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

    When a job was taken back to v5 and went on, v12 of the run before is not in its past.
    """
    if not lineage or id_.generation > lineage[-1][0]:
        return True
    return all(id_.version <= base for gen, base in lineage if gen > id_.generation)


def newest_first(
    found: Iterable[tuple[VersionId, Lineage]], began: tuple[int, int] = NO_RUN
) -> list[VersionId]:
    """Order versions for a restart, newest first; only those in the newest one's past.

    `began` is the entry in the lineage of a run that may have left no version yet. If it is newer
    than all versions, only those in its past count.
    """
    known = dict(found)
    lineage = newest_lineage(known, began)
    return sorted((i for i in known if on_lineage(i, lineage)), reverse=True)


def newest_lineage(known: Mapping[VersionId, Lineage], began: tuple[int, int] = NO_RUN) -> Lineage:
    """Return the lineage of the newest version, continued by the run that `began` after it (see
    `newest_first`); empty without versions."""
    newest = max(known, default=None)
    if newest is None:
        return ()
    return (*known[newest], began) if began[0] > newest.generation else known[newest]


def newest_of_each(ids: Iterable[VersionId]) -> set[VersionId]:
    """Return the newest version of each number, since a number can be taken again."""
    return set({id_.version: id_ for id_ in sorted(ids)}.values())
