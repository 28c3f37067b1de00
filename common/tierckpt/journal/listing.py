"""Listing: how far a journal leads, and whether it is sound, for people who look at files. Without
torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tierckpt.format.ids import VersionId

from .chain import Link, chain_from
from .segments import FOLDER, JournalReader, names_in


@dataclass(frozen=True)
class JournalReach:
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
    directories: Iterable[Path], base: VersionId, ranks: int, began: tuple[int, int]
) -> JournalReach | None:
    """How far the journals in these local directories lead from the version `base` of a job with
    that number of ranks; None without any journal. `began`: see `chain_from`. Never raises."""
    links: list[set[Link]] = [set() for _ in range(ranks)]
    for directory in directories:
        folder = directory / FOLDER
        for rank in {n.base.shard for n in names_in(folder) if n.base.shards == ranks}:
            with closing(JournalReader(folder, rank, ranks)) as reader:
                links[rank].update(record.link for record in reader.records.values())
    if not any(links):
        return None
    ids = chain_from(base, links, began)
    last = ids[-1] if ids else base
    missing = [rank for rank, theirs in enumerate(links) if not theirs]
    return JournalReach(base.version, last.version, len(ids), missing)


@dataclass(frozen=True)
class JournalCheck:
    """All records of one rank in a directory, compared with their checksums."""

    records: int
    nbytes: int
    """Bytes of its files."""
    problems: list[str]
    """The damage, with the path; empty: none."""


def check_journals(directories: Iterable[Path]) -> Iterator[JournalCheck]:
    """Read every byte of the journals in these local directories, rank by rank. An incomplete
    record at the end of a file is no damage. Never raises."""
    for folder in (directory / FOLDER for directory in directories):
        there = names_in(folder)
        for rank, ranks in sorted({(n.base.shard, n.base.shards) for n in there}):
            with closing(JournalReader(folder, rank, ranks)) as reader:
                reader.sound(reader.records)
                yield JournalCheck(len(reader.records), reader.nbytes, reader.problems)


__all__ = ["JournalCheck", "JournalReach", "check_journals", "reach_of"]
