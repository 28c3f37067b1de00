"""What an agent lets others read: shards and parity of its node, by name and in ranges.

For a run of the job that this node is no part of any more (see `former_nodes`): as nobody looks
there, what lies in its memory and on its disk would count as lost. Nothing is checked here; who
reads compares with the checksums in the manifests.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tierckpt.core.copies import AGENT, EVERYWHERE, Found, FoundParity, Inventory, Location, Problem
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import Key, ParityKey, ShardKey
from tierckpt.format.manifest import digest
from tierckpt.storage.files.file_lock import lock_shared_again
from tierckpt.storage.inventory import take_inventory
from tierckpt.storage.local.store import LocalStore
from tierckpt.storage.memory.job_directory import JobDirectory
from tierckpt.storage.memory.slots import read_image, sealed_at

MOST_BYTES = 4 << 20
"""What is read at once, and held."""


class ReadServer:
    """Any thread. Methods raise OSError, and ValueError for what is no request of ours."""

    def __init__(self) -> None:
        self._stores: list[LocalStore] = []
        self._job: JobDirectory | None = None
        self._found: dict[Path, str] = {}
        """Which copy was in each slot that was looked at, then."""
        self.asked_at = -math.inf
        """When somebody last asked for anything (monotonic)."""

    def add(self, store: LocalStore, job: JobDirectory | None = None) -> None:
        """Show what is committed in `store`, and what is sealed in the memory of `job`."""
        if store.directory not in [known.directory for known in self._stores]:
            self._stores.append(store)
        self._job = job or self._job

    def list(self) -> bytes:
        """All that is here, for `listed`, and what cannot be used, or seen. A shard that is in
        memory and on disk is told of both: one of the two may be damaged."""
        self.asked_at = time.monotonic()
        seen = [take_inventory(self._job, store, "") for store in self._stores] if self._job else []
        lock_shared_again()
        found = {(f.key, f.place.level): f for each in seen for f in each.found}
        told = {
            "generation": max((each.generation for each in seen), default=0),
            "shards": [_shard(each) for each in found.values()],
            "parities": [_parity(each) for inventory in seen for each in inventory.parities],
            "problems": _problems(each.problems for each in seen),
            "unseen": _problems(each.unseen for each in seen),
        }
        return json.dumps(told).encode()

    def manifest(self, stem: str, in_memory: bool = False) -> bytes:
        """Of a shard or of parity: of the copy on disk, or of that in memory."""
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
        """A range of the bytes, unchecked; less where they end. Only names that we give, of what
        exists: no other file can be asked for.

        `copy` is the digest of the manifest that was told (`copy_of`): what has another one by now,
        as an agent commits what was in memory, is FileNotFoundError.
        """
        self.asked_at = time.monotonic()
        key = _key(stem)
        if offset < 0 or not 0 <= nbytes <= MOST_BYTES:
            raise ValueError(f"bytes {offset} and {nbytes} more cannot be asked for at once")
        if not in_memory:
            store = self._store_of(key)
            if copy_of(store.read_manifest(key)) != copy:
                raise _stored_otherwise(key)
            return store.read(key, offset, nbytes)
        try:
            path = self._slot_with(copy, key)
            data = read_image(path, offset, nbytes)
            if self._in_slot(path) != copy:  # by now; a slot is unsealed before it changes
                raise _stored_otherwise(key)
            return data
        finally:
            lock_shared_again()

    def _store_of(self, key: ShardKey) -> LocalStore:
        """The one that has it."""
        for store in self._stores:
            if store.has(key):
                return store
        raise _not_here(key)

    def _slot_with(self, copy: str, key: ShardKey) -> Path:
        """The slot that has it; first looks where it was found last."""
        slots = self._job.segments() if self._job else []
        for path in sorted(slots, key=lambda path: self._found.get(path) != copy):
            if self._in_slot(path) == copy:
                return path
        raise _stored_otherwise(key)

    def _in_slot(self, path: Path) -> str:
        """Which copy is sealed there; empty when none is."""
        data = None
        with suppress(OSError):
            data = sealed_at(path)
        self._found[path] = found = "" if data is None else copy_of(data)
        return found


def copy_of(manifest: bytes) -> str:
    """Tells one copy of a shard from another that is stored otherwise."""
    return digest(manifest).hex()


def _not_here(key: ShardKey) -> FileNotFoundError:
    return FileNotFoundError(f"{key} is not here")


def _stored_otherwise(key: ShardKey) -> FileNotFoundError:
    return FileNotFoundError(f"{key} is stored in another way by now, or not any more")


def _key(stem: str) -> ShardKey:
    key = ShardKey.parse(stem) or ParityKey.parse(stem)
    if key is None:
        raise ValueError(f"{stem!r} is no shard and no parity")
    return key


def _shard(found: Found) -> dict[str, Any]:
    return {
        "stem": found.key.stem,
        "encoded": found.place.encoded,
        "in_memory": found.place.level == "memory",
        "facts": found.facts.to_json(),
    }


def _parity(found: FoundParity) -> dict[str, Any]:
    code = {"group": found.group, "k": found.k, "m": found.m}
    return {"stem": found.key.stem, "facts": found.facts.to_json(), **code}


def _problems(seen: Iterable[Iterable[Problem]]) -> list[dict[str, Any]]:
    """Memory's are in what is seen with each store."""
    return [
        {
            "why": f"{problem.place.where}: {problem.why}",
            "newer": problem.newer,
            "stems": [key.stem for key in problem.keys],
        }
        for problem in dict.fromkeys(problem for each in seen for problem in each)
    ]


def listed(data: bytes, where: str, host: str) -> Inventory:
    """What `ReadServer.list` told of node `host`: all of it may be read by anybody, through the
    agent that is called `where`. Raises ValueError, KeyError or TypeError for anything else."""
    told = json.loads(data)
    return Inventory(
        tuple(_found(each, where) for each in told["shards"]),
        tuple(_problem(each, where) for each in told["problems"]),
        tuple(_problem(each, where) for each in told["unseen"]),
        int(told["generation"]),
        host,
        parities=tuple(_found_parity(each, where) for each in told["parities"]),
    )


def _found(told: dict[str, Any], where: str) -> Found:
    place = Location(AGENT, EVERYWHERE, where, bool(told["encoded"]), bool(told["in_memory"]))
    return Found(_told_key(told, ShardKey), place, VersionFacts.from_json(told["facts"]))


def _found_parity(told: dict[str, Any], where: str) -> FoundParity:
    return FoundParity(
        _told_key(told, ParityKey),
        Location(AGENT, EVERYWHERE, where),
        VersionFacts.from_json(told["facts"]),
        group=tuple(told["group"]),
        k=int(told["k"]),
        m=int(told["m"]),
    )


def _problem(told: dict[str, Any], where: str) -> Problem:
    place, keys = Location(AGENT, EVERYWHERE, where), tuple(_key(stem) for stem in told["stems"])
    return Problem(place, str(told["why"]), bool(told["newer"]), keys)


def _told_key(told: dict[str, Any], kind: type[Key]) -> Key:
    key = kind.parse(told["stem"])
    if key is None:
        raise ValueError(f"{told['stem']!r} is no {kind.NOUN}")
    return key
