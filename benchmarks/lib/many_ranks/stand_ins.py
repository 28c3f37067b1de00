"""One rank of a job of many: everything that the others would send is made from its own.

The code under measurement is the product's. The other ranks exist only as the objects that they
contribute to a collective.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from msgspec.structs import replace

from tierckpt.agent.protocol import (
    Introduce,
    KnownNodes,
    Listening,
    ListenSettings,
    PartySettings,
)
from tierckpt.coordination.job_history import Offer
from tierckpt.core.restore_plan import (
    Found,
    FoundParity,
    Inventory,
    inventory_digest,
    pack_inventory,
)
from tierckpt.erasure.groups import Scheme, plan_groups
from tierckpt.format.ids import ParityKey, VersionId
from tierckpt.format.manifest import DIGEST_BYTES, Manifest
from tierckpt.format.records import VersionFacts
from tierckpt.storage.inventory import take_inventory
from tierckpt.storage.job_directory import JobDirectory
from tierckpt.storage.local import LocalStore
from tierckpt.storage.slots import Slot, seal_area_bytes

NODE_RANKS = 8
BLOCKS = 24
"""Blocks of a shard; a checksum of each is in the manifest."""
IMAGE_BYTES = 4096
MEMORY, LOCAL = (1000, 1001), (900, 950)
"""Versions in every rank's memory, and on its disk."""


def measure(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of `work`, and its CPU time in this process."""
    begin = time.process_time()
    result = work()
    return result, time.process_time() - begin


class OneOfMany:
    """A Group: this rank, and others of which `others` gives what they contribute.

    `others(turn, own)` yields the values of ranks 1 and up at the collective number `turn`. Counts
    the bytes that this rank receives; the time for making the other ranks' values is in
    `outside_seconds`.
    """

    rank = 0

    def __init__(self, size: int, others: Callable[[int, Any], Iterator[Any]]) -> None:
        self.size = size
        self._others = others
        self.turn = 0
        self.received_bytes = 0
        self.outside_seconds = 0.0

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather as a Group does."""
        begin = time.process_time()
        sent = [pickle.dumps(value), *map(pickle.dumps, self._others(self.turn, value))]
        self.outside_seconds += time.process_time() - begin
        assert len(sent) == self.size
        self.turn += 1
        self.received_bytes += sum(map(len, sent))
        return [pickle.loads(each) for each in sent]

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """Broadcast as a Group does: no part of this measurement does."""
        raise NotImplementedError


class SilentAgent:
    """An AgentClient with an agent that listens, and keeps what it learns about the others."""

    settings = SimpleNamespace(root="/dev/shm/tierckpt", folder="job-0123456789ab")
    session = SimpleNamespace(directory="/tmp/none")

    def __init__(self) -> None:
        self.introduced = Introduce((), None)

    def listen(self, where: ListenSettings, timeout_seconds: float) -> Listening:
        """Listen as AgentClient does."""
        return Listening("10.0.0.1", 40_000)

    def introduce(
        self, where: ListenSettings, parties: Iterable[PartySettings], known_nodes: KnownNodes
    ) -> None:
        """Introduce as AgentClient does."""
        self.introduced = Introduce(tuple(parties), known_nodes)


class CountedRequests:
    """A backend of the persistent level that counts its calls."""

    def __init__(self, backend: Any) -> None:
        self._backend, self._count = backend, 0

    def take(self) -> int:
        """Return the number of calls since the last time."""
        count, self._count = self._count, 0
        return count

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        if not callable(value):
            return value

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._count += 1
            return value(*args, **kwargs)

        return counted


def facts(ranks: int, version: int) -> VersionFacts:
    """Facts of a version of the job."""
    lineage, before = ((1, 0), (2, 100), (3, 200)), VersionId(3, version - 50)
    id_ = VersionId(3, version)
    run = "0123456789abcdef"
    return VersionFacts(
        "job-0123456789ab", run, id_, ranks, lineage, version, "calls", None, before
    )


def manifest(ranks: int, version: int, shard: int) -> Manifest:
    """The manifest of a shard."""
    digests = bytes(range(DIGEST_BYTES)) * (BLOCKS + 1)
    known = facts(ranks, version)
    return Manifest(known, shard, IMAGE_BYTES, IMAGE_BYTES, 1000, digests, 1.7e9 + version)


class Node:
    """The first node of the job, with real slots and files of its ranks in `folder`."""

    def __init__(self, ranks: int, folder: Path) -> None:
        self.ranks = ranks
        self.host = "node00000/0123456789abcdef0123456789abcdef"
        self.job = JobDirectory.at(folder / "shm", "job-0123456789ab")
        self.store = LocalStore(folder / "local")
        (folder / "shm").mkdir()
        self.job.create()
        self.store.create()
        for shard in range(min(NODE_RANKS, ranks)):
            for index, version in enumerate(MEMORY):
                area = seal_area_bytes(BLOCKS, 3)
                path = self.job.slot_path(shard, index)
                slot = Slot.create(path, path.name, area, IMAGE_BYTES)
                slot.seal(manifest(ranks, version, shard).encode())
                slot.close()
            for version in LOCAL:
                key = facts(ranks, version).key(shard)
                image = memoryview(bytes(IMAGE_BYTES))
                self.store.commit(key, image, manifest(ranks, version, shard).encode())

    def look(self) -> Inventory:
        """Take the inventory of this node, as each of its ranks does at a restart."""
        return take_inventory(self.job, self.store, self.host)


def all_nodes(first: Inventory, ranks: int) -> list[Inventory]:
    """Return the inventory of every node, like that of the first one, with parity of the newest
    version on disk."""
    nodes = -(-ranks // NODE_RANKS)
    domains = [str(rank // NODE_RANKS) for rank in range(ranks)]
    group_of: dict[int, Any] = {}
    if nodes > 1:
        scheme = Scheme.parse("xor" if nodes < 6 else "rs 4+2")
        for group in plan_groups(domains, scheme, min(nodes, 8)):
            group_of.update(dict.fromkeys(group.ranks, group))
    return [_on_node(first, node, ranks, group_of) for node in range(nodes)]


def _on_node(first: Inventory, node: int, ranks: int, group_of: dict[int, Any]) -> Inventory:
    host = first.host.replace("node00000", f"node{node:05d}")

    def moved(found: Found) -> Found | None:
        shard = node * NODE_RANKS + found.key.shard
        where = found.place.where.replace(f"/r{found.key.shard:05d}", f"/r{shard:05d}")
        place = replace(found.place, host=host, where=where)
        return replace(found, key=replace(found.key, shard=shard), place=place)

    there = [f for f in map(moved, first.found) if f is not None and f.key.shard < ranks]
    parities = []
    for f in there:
        if f.place.level == "local" and f.key.id.version == LOCAL[-1] and f.key.shard in group_of:
            group = group_of[f.key.shard]
            key = ParityKey(f.key.id, f.key.shard, ranks)
            code = group.ranks, group.code.k, group.code.m
            parities.append(FoundParity(key, f.place, f.facts, *code))
    return replace(first, found=tuple(there), host=host, parities=tuple(parities), token="t" * 48)


def exchanged(nodes: list[Inventory], ranks: int) -> Callable[[int, Any], Iterator[Any]]:
    """Return what the other ranks contribute to the exchange of inventories."""
    packed = [pack_inventory(each) for each in nodes]
    offers = [Offer(inventory_digest(each), "", (0, "")) for each in packed]

    def others(turn: int, own: Any) -> Iterator[Any]:
        for rank in range(1, ranks):
            node = rank // NODE_RANKS
            if turn == 0:
                # The ranks of the first node found the same as this rank.
                yield own._replace(token="") if node == 0 else offers[node]
            else:
                yield b"" if node == 0 or rank % NODE_RANKS else packed[node]

    return others
