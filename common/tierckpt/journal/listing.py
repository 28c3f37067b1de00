"""Listing: how far a journal leads, and whether it is sound, for people who look at files. Without
torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tierckpt.format.ids import VersionId
from tierckpt.offline.survey import Survey

from .chain import RecordKey, chain_from
from .frames import SegmentName
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
    keys: list[set[RecordKey]] = [set() for _ in range(ranks)]
    for directory in directories:
        folder = directory / FOLDER
        names = [n for n in names_in(folder) if n.base.shards == ranks and n.base.shard < ranks]
        with closing(JournalReader(folder, names)) as reader:
            for shard, key in reader.records:
                keys[shard].add(key)
    if not any(keys):
        return None
    chain = chain_from(base, keys, began)
    last = chain[-1].id if chain else base
    missing = [rank for rank, theirs in enumerate(keys) if not theirs]
    return JournalReach(base.version, last.version, len(chain), missing)


def reach_of_restart(there: Survey) -> JournalReach | None:
    """How far the journals in a survey lead from the version that a restart takes; None without any
    journal, without a version, and if the restart goes back, as it makes no steps again then."""
    plan = there.plan() if there.request is None else None
    if plan is None:
        return None
    return reach_of(there.directories, plan.id, len(plan.sources), there.began_last)


@dataclass(frozen=True)
class JournalCheck:
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


__all__ = ["JournalCheck", "JournalReach", "check_journals", "reach_of", "reach_of_restart"]
