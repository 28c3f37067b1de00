"""Search: the records that follow a version, and the rank that reads each of them.

A rank's journal is on its node, and a copy of it may be on another node (see `copies`). Ranks may
have moved to other nodes since, so any node may have any rank's files.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from tierckpt._text import some
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.reports import Reports
from tierckpt.format.ids import VersionId
from tierckpt.group import Node

from .chain import Link, RecordKey, chain_from
from .frames import SegmentName
from .segments import FOLDER, JournalReader, names_in
from .unused import OTHER_RANKS, unused_journal
from .writer import MOST_WAITING

SHORTER = (
    "rank {rank} has the journal only up to v{last}, and others have {more} more record(s): the "
    "job goes on from v{last}"
)
ELSEWHERE = "the journal of rank {ranks} comes from a copy on another rank's node"
Held = tuple[int, RecordKey]
"""A shard, and a record of it."""


class JournalSearch:
    """The records that follow one version, alike on all ranks, each sound on some rank. Training
    thread; `close` it."""

    def __init__(
        self,
        directory: str,
        node: Node,
        barrier: ErrorBarrier,
        reports: Reports,
        base: VersionId,
        began: tuple[int, int],
        most: int | None,
    ) -> None:
        """Read and verify the journals on this rank's `node`. `began`: see `chain_from`; `most`:
        limit of the records, in a try after the first one, which has reported all problems.
        Collective."""
        self._barrier, self._reports, self._base = barrier, reports, base
        self._shards = range(barrier.size)
        folder = Path(directory) / FOLDER
        with barrier:
            there = [n for n in names_in(folder) if n.base.shards == barrier.size]
            names = self._mine(node, there)
            self.reader = JournalReader(folder, names)
            gathered: list[list[tuple[int, Link]]] = barrier.all_gather_object(self.reader.links)
        self._links = [{(s, link.key): link for s, link in theirs} for theirs in gathered]
        """By rank."""
        self._holders = self._holders_of()
        whole = chain_from(base, self._keys(), began)[:most]
        self.keys = whole
        """The records, oldest first."""
        self._verify()
        if most is None:
            self._report(directory, whole, began)

    def source(self, shard: int, key: RecordKey) -> int:
        """The rank that has the record of a shard."""
        return self._holders[shard, key][0]

    def link(self, shard: int, key: RecordKey) -> Link:
        """The record of a shard, as its source has it."""
        return self._links[self.source(shard, key)][shard, key]

    def close(self) -> None:
        """Unmap the journals."""
        self.reader.close()

    def _mine(self, node: Node, names: Sequence[SegmentName]) -> list[SegmentName]:
        """The files that this rank reads: its own, and as the node's first rank those of ranks of
        other nodes, unless these ranks see the same files. Collective."""
        rank = self._barrier.rank
        own = {n for n in names if n.base.shard == rank}
        seen: list[set[SegmentName]] = self._barrier.all_gather_object(own)
        if rank != node.first:
            return sorted(own)
        others = (n for n in names if n.base.shard in self._shards)
        return sorted(own | {n for n in others if n not in seen[n.base.shard]})

    def _holders_of(self) -> dict[Held, list[int]]:
        """By record, the ranks that have it: first the rank of the shard, then in their order."""
        holders: dict[Held, list[int]] = {}
        for rank, theirs in enumerate(self._links):
            for held in theirs:
                holders.setdefault(held, []).append(rank)
        for (shard, _), ranks in holders.items():
            ranks.sort(key=lambda rank: (rank != shard, rank))
        return holders

    def _keys(self) -> list[set[RecordKey]]:
        """By shard, the records that some rank has."""
        found: list[set[RecordKey]] = [set() for _ in self._shards]
        for (shard, key), ranks in self._holders.items():
            if ranks:
                found[shard].add(key)
        return found

    def _verify(self) -> None:
        """Verify the records on their sources, in order; a damaged one has another source, or none
        and ends the journal. Collective."""
        sound: set[Held] = set()
        damaged: list[list[Held]] = []
        while self.keys and (not damaged or any(damaged)):
            with self._barrier:
                damaged = self._barrier.all_gather_object(self._first_damaged(sound))
            for rank, theirs in enumerate(damaged):
                for held in theirs:
                    self._holders[held].remove(rank)
            self.keys = self.keys[: min(self._lengths(self.keys))]

    def _first_damaged(self, sound: set[Held]) -> list[Held]:
        """Verify the records whose source this rank is; returns the first damaged one of each
        shard, and adds to `sound` those before it."""
        found = []
        for shard in self._shards:
            for key in self.keys:
                held = (shard, key)
                if held in sound or self.source(*held) != self._barrier.rank:
                    continue
                if not self.reader.is_sound(*held):
                    found.append(held)
                    break
                sound.add(held)
        return found

    def _lengths(self, keys: Sequence[RecordKey]) -> list[int]:
        """By shard, the number of these records up to the first that no rank has."""
        held = ((self._holders[shard, key] for key in keys) for shard in self._shards)
        return [len([*takewhile(bool, each)]) for each in held]

    def _report(self, directory: str, whole: Sequence[RecordKey], began: tuple[int, int]) -> None:
        for text in self.reader.problems:
            self._reports.notice(f"a part of the journal is not used: {text}", logging.WARNING)
        if self._barrier.rank:
            return
        self._report_ends(whole, began)
        reached = self.keys[-1].id if self.keys else self._base
        size = self._barrier.size
        if text := unused_journal(directory, self._base, began, OTHER_RANKS, size, reached):
            self._reports.notice(text, logging.WARNING)
        apart = sorted({s for s in self._shards for key in self.keys if self.source(s, key) != s})
        if apart:
            self._reports.notice(ELSEWHERE.format(ranks=some(apart)), logging.INFO)

    def _report_ends(self, whole: Sequence[RecordKey], began: tuple[int, int]) -> None:
        """Report ranks with fewer records than others."""
        most = len(whole)
        lengths = self._lengths(whole)
        for shard, keys in enumerate(self._keys()):
            alone = chain_from(self._base, [keys], began)
            # A newer run that only some ranks have a record of does not count.
            if lengths[shard] == most and [*whole] == alone[:most]:
                lengths[shard] = len(alone)
        least, last = min(lengths), self.keys[-1].id if self.keys else self._base
        if (more := max(lengths) - least) > 0:
            usual = more <= MOST_WAITING + 1  # the ranks were killed while they wrote
            text = SHORTER.format(rank=lengths.index(least), last=last.version, more=more)
            self._reports.notice(text, logging.INFO if usual else logging.WARNING)


__all__ = ["JournalSearch"]
