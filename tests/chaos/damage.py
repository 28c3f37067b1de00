"""Flipped bits and truncated files: at random, or in the copies that the next restart would load.

The package's planner is asked only for the target. `truth` derives the versions that are owed then.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tests.chaos.cluster import Cluster
from tests.chaos.plan import Fault
from tierckpt.config import PersistentConfig
from tierckpt.core import Inventory, Location, plan_restore
from tierckpt.format import ShardKey, VersionId, VersionName
from tierckpt.journal import FOLDER, SegmentName, names_in
from tierckpt.storage import LocalStore, take_inventory

Hit = tuple[str, int, int, int]
"""(level, rank, generation, version) of a damaged copy; for parity, the rank is its holder."""
Target = tuple[Path, Hit]


class Damage:
    """Damages copies of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def strike(self, fault: Fault) -> list[Hit]:
        """Flip the bit, or cut the file, of all targets; returns the damaged copies."""
        find = getattr(self, f"_in_{fault.level}", self._aimed)
        targets: list[Target] = list(find(fault))
        for path, (level, *_) in targets:
            with contextlib.suppress(FileNotFoundError):  # retired in the meantime: no loss
                _break(path, level, fault)
        if fault.level == "local":
            self._in_journal(fault)
        return [hit for _, hit in targets]

    # --- copies that the next restart would load -----------------------------------------------

    def _aimed(self, fault: Fault) -> Iterator[Target]:
        """Targets of an aimed fault; `Fault.level` describes them."""
        seen = self._inventories()
        parities = [each.parities for each in seen]
        plan = plan_restore([each.found for each in seen], parities=parities)
        if plan is None:
            return
        there = [s for s in plan.sources if s.place.level != "peer"]
        source = there[fault.rank % len(there)]
        key = ShardKey(plan.id, source.shard, len(plan.sources))
        places = {source.place}
        if fault.level == "copies":
            places = {f.place for each in seen for f in each.found if f.key == key}
            for parity in {(p.key, p.place) for p in chain(*parities) if p.key.id == plan.id}:
                yield _in_directory(*parity, fault.part), _hit("parity", parity[0])
        for place in sorted(places):
            path = self._path(place, key, fault.part)
            if path is not None:
                yield path, _hit(place.level, key)

    def _inventories(self) -> list[Inventory]:
        """Copies that the ranks of all nodes would see."""
        shared = None
        if self._cluster.shape.persistent:
            shared = PersistentConfig(path=str(self._cluster.shared))
        return [
            take_inventory(
                self._cluster.memory(node), self._store(node), f"node{node}", None if i else shared
            )
            for i, node in enumerate(self._cluster.shape.node_numbers)
        ]

    def _path(self, place: Location, key: ShardKey, part: str) -> Path | None:
        if place.level == "memory":
            return Path(place.where)
        if place.level == "local":
            return _in_directory(key, place, part)
        return self._shared_file(key.id, part)

    # --- the newest of one rank on one level ---------------------------------------------------

    def _in_memory(self, fault: Fault) -> Iterator[Target]:
        memories = [self._cluster.memory(node) for node in self._cluster.shape.node_numbers]
        sealed = chain.from_iterable(memory.sealed() for memory in memories)
        mine = [(m.id, path, m.key) for path, m in sealed if m.shard == fault.rank]
        for _, path, key in sorted(mine)[-1:]:
            yield path, _hit("memory", key)

    def _in_local(self, fault: Fault) -> Iterator[Target]:
        yield from self._newest_file(fault, parity=False)

    def _in_journal(self, fault: Fault) -> None:
        """Damage the rank's newest journal file, if there is one: it is owed nothing."""
        found: list[tuple[SegmentName, Path]] = []
        for node in self._cluster.shape.node_numbers:
            folder = self._store(node).directory / FOLDER
            names = [name for name in names_in(folder) if name.base.shard == fault.rank]
            found += [(name, folder / str(name)) for name in names]
        for _, path in sorted(found)[-1:]:
            with contextlib.suppress(OSError, IndexError):
                _break(path, "local", fault)

    def _in_parity(self, fault: Fault) -> Iterator[Target]:
        yield from self._newest_file(fault, parity=True)

    def _newest_file(self, fault: Fault, parity: bool) -> Iterator[Target]:
        mine: list[tuple[ShardKey, Path]] = []
        for node in self._cluster.shape.node_numbers:
            store = self._store(node)
            with contextlib.suppress(OSError):
                found: list[ShardKey] = [*(store.parities() if parity else store.keys())]
                mine += [(key, store.directory) for key in found if key.shard == fault.rank]
        for key, directory in sorted(mine)[-1:]:
            yield directory / _name(key, fault.part), _hit(fault.level, key)

    def _in_persistent(self, fault: Fault) -> Iterator[Target]:
        names = [VersionName.parse(p.stem) for p in self._cluster.shared.glob("v*.manifest")]
        for name in sorted(name for name in names if name is not None)[-1:]:
            path = self._shared_file(name.id, fault.part)
            if path is not None:
                yield path, ("persistent", 0, name.id.generation, name.id.version)

    def _shared_file(self, id_: VersionId, part: str) -> Path | None:
        """Files of one version on the persistent level."""
        shared = self._cluster.shared
        for manifest in sorted(
            shared.glob(f"v{id_.version:010d}.g{id_.generation:06d}.*.manifest")
        ):
            files = sorted((shared / manifest.stem).glob("*.shards"))
            return files[0] if files and part == "data" else manifest
        return None

    def _store(self, node: int) -> LocalStore:
        return LocalStore(self._cluster.disk(node) / "ckpts")


def _hit(level: str, key: ShardKey) -> Hit:
    return level, key.shard, key.id.generation, key.id.version


def _in_directory(key: ShardKey, place: Location, part: str) -> Path:
    return Path(place.where) / _name(key, part)


def _name(key: ShardKey, part: str) -> str:
    return f"{key.stem}{key.SUFFIX if part == 'data' else '.manifest'}"


def _break(path: Path, level: str, fault: Fault) -> None:
    low, high = _extent(path, level, fault.part)
    at = low + int(fault.spot * (high - low))
    if fault.kind == "truncate":
        os.truncate(path, at)
        return
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << fault.bit]), at)


def _extent(path: Path, level: str, part: str) -> tuple[int, int]:
    """First byte and end of the range that may be damaged: for a slot, its seal or its image."""
    size = path.stat().st_size
    if level != "memory":
        return 0, max(size, 1)
    with path.open("rb") as file:
        seal_bytes = int.from_bytes(file.read(16)[8:], "little")
    return (seal_bytes, size) if part == "data" else (0, 24 + 512)
