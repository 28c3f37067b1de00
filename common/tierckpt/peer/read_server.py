"""Server for reading: other nodes read shards and parity of this node, by name and in ranges.

It serves a run of the job that does not include this node any more (see `former_nodes`): no rank
looks there, so the shards in its memory and on its disk would count as lost. Nothing is checked
here; the reader compares with the checksums in the manifests.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tierckpt.core.copies import EVERYWHERE, Found, FoundParity, Inventory, Location, Problem
from tierckpt.core.levels import AGENT, MEMORY
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import Key, ParityKey, ShardKey
from tierckpt.format.manifest import digest
from tierckpt.storage.files.file_lock import lock_shared_again
from tierckpt.storage.inventory import take_inventory
from tierckpt.storage.local.store import LocalStore
from tierckpt.storage.memory.job_directory import JobDirectory
from tierckpt.storage.memory.slots import read_image, sealed_at

MOST_BYTES = 4 << 20
"""Limit of one read, held in memory."""


class ReadServer:
    """Any thread. Methods raise OSError, and ValueError for an invalid request."""

    def __init__(self) -> None:
        self._stores: list[LocalStore] = []
        self._job: JobDirectory | None = None
        self._found: dict[Path, str] = {}
        """The copy that was last seen in each slot."""
        self.asked_at = -math.inf
        """Time of the last request (monotonic)."""

    def add(self, store: LocalStore, job: JobDirectory | None = None) -> None:
        """Serve the shards committed in `store`, and those sealed in the memory of `job`."""
        if store.directory not in [known.directory for known in self._stores]:
            self._stores.append(store)
        self._job = job or self._job

    def list(self) -> bytes:
        """Encode an inventory of this node for `listed`, with all problems. A shard that is both in
        memory and on disk is listed twice: one of the copies may be damaged."""
        self.asked_at = time.monotonic()
        seen = [take_inventory(self._job, store, "") for store in self._stores] if self._job else []
        lock_shared_again()
        found = {(f.key, f.place.level): f for each in seen for f in each.found}
        listing = {
            "generation": max((each.generation for each in seen), default=0),
            "shards": [_shard(each) for each in found.values()],
            "parities": [_parity(each) for inventory in seen for each in inventory.parities],
            "problems": _problems(each.problems for each in seen),
            "unseen": _problems(each.unseen for each in seen),
        }
        return json.dumps(listing).encode()

    def manifest(self, stem: str, in_memory: bool = False) -> bytes:
        """Manifest of a shard or parity: of its copy on disk, or with `in_memory` of the one in
        memory."""
        self.asked_at = time.monotonic()
        key = _key(stem)
        if not in_memory:
            return self._store_of(key).read_manifest(key)
        try:
            for path, manifest in self._job.sealed() if self._job else ():
                if manifest.key == key and (data := sealed_at(path)) is not None:
                    return data
        finally:
            lock_shared_again()
        raise _not_here(key)

    def read(
        self, stem: str, offset: int, nbytes: int, copy: str, in_memory: bool = False
    ) -> bytes:
        """Read a range of bytes, without a check; shorter where the file ends. Only names of shards
        and parities that exist can be requested, so no other file can be read.

        `copy` is the digest of the manifest that the reader has (`copy_of`). Raises
        FileNotFoundError when the manifest has changed since, as when an agent commits a shard that
        was in memory.
        """
        self.asked_at = time.monotonic()
        key = _key(stem)
        if offset < 0 or not 0 <= nbytes <= MOST_BYTES:
            raise ValueError(f"{nbytes} bytes from {offset} on cannot be requested at once")
        if not in_memory:
            store = self._store_of(key)
            if copy_of(store.read_manifest(key)) != copy:
                raise _stored_otherwise(key)
            return store.read(key, offset, nbytes)
        try:
            path = self._slot_with(copy, key)
            data = read_image(path, offset, nbytes)
            if self._in_slot(path) != copy:  # read again: a slot is unsealed before it changes
                raise _stored_otherwise(key)
            return data
        finally:
            lock_shared_again()

    def _store_of(self, key: ShardKey) -> LocalStore:
        """The store that has `key`."""
        for store in self._stores:
            if store.has(key):
                return store
        raise _not_here(key)

    def _slot_with(self, copy: str, key: ShardKey) -> Path:
        """The slot that holds the copy; looks first where the copy was last seen."""
        slots = self._job.segments() if self._job else []
        for path in sorted(slots, key=lambda path: self._found.get(path) != copy):
            if self._in_slot(path) == copy:
                return path
        raise _stored_otherwise(key)

    def _in_slot(self, path: Path) -> str:
        """Identity of the copy sealed in the slot; empty when none is."""
        data = None
        with suppress(OSError):
            data = sealed_at(path)
        self._found[path] = found = "" if data is None else copy_of(data)
        return found


def copy_of(manifest: bytes) -> str:
    """Identity of one copy of a shard, different from that of a copy with another encoding."""
    return digest(manifest).hex()


def _not_here(key: ShardKey) -> FileNotFoundError:
    return FileNotFoundError(f"{key} is not here")


def _stored_otherwise(key: ShardKey) -> FileNotFoundError:
    return FileNotFoundError(f"{key} was moved or deleted after its manifest was read")


def _key(stem: str) -> ShardKey:
    key = ShardKey.parse(stem) or ParityKey.parse(stem)
    if key is None:
        raise ValueError(f"{stem!r} is no shard and no parity")
    return key


def _shard(found: Found) -> dict[str, Any]:
    return {
        "stem": found.key.stem,
        "encoded": found.place.encoded,
        "in_memory": found.place.level == MEMORY,
        "facts": found.facts.to_json(),
    }


def _parity(found: FoundParity) -> dict[str, Any]:
    code = {"group": found.group, "k": found.k, "m": found.m}
    return {"stem": found.key.stem, "facts": found.facts.to_json(), **code}


def _problems(seen: Iterable[Iterable[Problem]]) -> list[dict[str, Any]]:
    """Problems of all stores, each once: problems of memory are in every store's inventory."""
    return [
        {
            "why": f"{problem.place.where}: {problem.why}",
            "newer": problem.newer,
            "stems": [key.stem for key in problem.keys],
        }
        for problem in dict.fromkeys(problem for each in seen for problem in each)
    ]


def listed(data: bytes, where: str, host: str) -> Inventory:
    """Decode `ReadServer.list` of node `host` into an inventory: any rank may read all of it,
    through the agent named `where`. Raises ValueError, KeyError or TypeError for invalid data."""
    listing = json.loads(data)
    return Inventory(
        tuple(_found(each, where) for each in listing["shards"]),
        tuple(_problem(each, where) for each in listing["problems"]),
        tuple(_problem(each, where) for each in listing["unseen"]),
        int(listing["generation"]),
        host,
        parities=tuple(_found_parity(each, where) for each in listing["parities"]),
    )


def _found(entry: dict[str, Any], where: str) -> Found:
    place = Location(AGENT, EVERYWHERE, where, bool(entry["encoded"]), bool(entry["in_memory"]))
    return Found(_key_of(entry, ShardKey), place, VersionFacts.from_json(entry["facts"]))


def _found_parity(entry: dict[str, Any], where: str) -> FoundParity:
    return FoundParity(
        _key_of(entry, ParityKey),
        Location(AGENT, EVERYWHERE, where),
        VersionFacts.from_json(entry["facts"]),
        group=tuple(entry["group"]),
        k=int(entry["k"]),
        m=int(entry["m"]),
    )


def _problem(entry: dict[str, Any], where: str) -> Problem:
    place, keys = Location(AGENT, EVERYWHERE, where), tuple(_key(stem) for stem in entry["stems"])
    return Problem(place, str(entry["why"]), bool(entry["newer"]), keys)


def _key_of(entry: dict[str, Any], kind: type[Key]) -> Key:
    key = kind.parse(entry["stem"])
    if key is None:
        raise ValueError(f"{entry['stem']!r} is no {kind.NOUN}")
    return key
