"""Rebuilding lost shards at a restart, by all ranks together.

Every rank rebuilds every lost shard, from bytes that whoever has them broadcasts. Each needs all
shards anyway, and multiplying costs less than sending the result once more. What a rank holds of it
is the lost shards, and windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from .errors import CorruptShardError, RestoreError
from .group import Group
from .images import LOST, Image
from .inventory import ParitySource, Place, Rebuild, RestorePlan
from .localstore import LocalStore
from .naming import ParityKey, ShardKey
from .peer.parity import ParityManifest, Read, check_parity
from .peer.rebuild import rebuild

Failure = tuple[ShardKey, Place, str]


class Parities:
    """The parities that a plan needs: those that this rank reads, and what is made with all."""

    def __init__(self, plan: RestorePlan, group: Group) -> None:
        self._plan, self._group = plan, group
        self._mine: dict[ParityKey, tuple[ParityManifest, memoryview]] = {}
        self._close: list[Callable[[], None]] = []

    def open(self) -> list[Failure]:
        """Map and check this rank's; returns those that are not what they should be."""
        failures: list[Failure] = []
        for source in (s for each in self._plan.rebuilds for s in each.parities):
            if source.reader == self._group.rank:
                try:
                    self._open(source)
                except LOST as error:
                    failures.append((source.key, source.place, str(error)))
        return failures

    def _open(self, source: ParitySource) -> None:
        store = LocalStore(source.place.where)
        record = ParityManifest.decode(store.read_manifest(source.key))
        mapped = store.open_image(source.key)
        view = memoryview(mapped)
        self._close += [view.release, mapped.close]
        check_parity(record, _reader_of(view))
        self._mine[source.key] = (record, view)

    def records(self) -> list[tuple[ParityKey, bytes]]:
        """The manifests of this rank's, for the others."""
        return [(key, record.encode()) for key, (record, _) in self._mine.items()]

    def rebuild(
        self, records: Iterable[tuple[ParityKey, bytes]], images: dict[int, Image]
    ) -> list[Failure]:
        """Make what is lost, into `images`; returns what proved damaged. Collective."""
        known = dict(records)
        for each in self._plan.rebuilds:
            record = ParityManifest.decode(known[each.parities[0].key])
            made = {
                each.group.index(shard): memoryview(
                    bytearray(record.manifests[each.group.index(shard)].image_bytes)
                )
                for shard in each.lost
            }
            try:
                rebuild(record, self._shards(each, images), self._parities(each), made)
            except (CorruptShardError, RestoreError) as error:
                return [(s.key, s.place, str(error)) for s in each.parities]
            for member, view in made.items():
                shard = each.group[member]
                images[shard] = Image(record.manifests[member], view, _nothing)
        return []

    def _shards(self, each: Rebuild, images: Mapping[int, Image]) -> dict[int, Read]:
        sources = {s.shard: s for s in self._plan.sources}
        return {
            member: self._broadcast(
                sources[shard].reader, images[shard].view if shard in images else None
            )
            for member, shard in enumerate(each.group)
            if shard not in each.lost
        }

    def _parities(self, each: Rebuild) -> dict[int, Read]:
        return {
            s.member: self._broadcast(
                s.reader, self._mine[s.key][1] if s.key in self._mine else None
            )
            for s in each.parities
        }

    def _broadcast(self, reader: int, view: memoryview | None) -> Read:
        """A range, from the rank that has it to all; they ask for the same ones in one order."""

        def read(offset: int, into: memoryview) -> None:
            if reader == self._group.rank:
                assert view is not None
                into[:] = view[offset : offset + len(into)]
            self._group.broadcast(torch.frombuffer(into, dtype=torch.uint8), reader)

        return read

    def close(self) -> None:
        """Unmap."""
        self._mine.clear()
        for close in self._close:
            close()


def _reader_of(view: memoryview) -> Read:
    def read(offset: int, into: memoryview) -> None:
        found = view[offset : offset + len(into)]
        if len(found) < len(into):
            raise EOFError(f"{len(view)} bytes")
        into[:] = found

    return read


def _nothing() -> None:
    """What was rebuilt is memory of our own."""
