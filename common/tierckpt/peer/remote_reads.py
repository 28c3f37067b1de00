"""Remote reads: shards and parity of a node, read through its agent, by name and in ranges.

They serve a run of the job that does not include that node any more (see `FormerNodes`): no rank
looks there, so the shards in its memory and on its disk would count as lost. The server checks
nothing; the reader compares with the checksums in the manifests.

`RemoteNode` is the client, for a process other than an agent. It has the interface of a persistent
level: shards by version and number, in ranges.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from tierckpt.core.levels import AGENT, MEMORY
from tierckpt.core.restore_plan import EVERYWHERE, Found, FoundParity, Inventory, Location, Problem
from tierckpt.errors import PeerError
from tierckpt.format.ids import Key, ParityKey, ShardKey, VersionName
from tierckpt.format.manifest import digest
from tierckpt.format.records import VersionFacts
from tierckpt.net.addresses import Address
from tierckpt.net.handshake import greet
from tierckpt.net.link import Link, reach
from tierckpt.storage.file_lock import lock_shared_again
from tierckpt.storage.inventory import take_inventory
from tierckpt.storage.job_directory import JobDirectory
from tierckpt.storage.local import LocalStore
from tierckpt.storage.slots import read_image, sealed_at

PURPOSE = "peer"
"""Kind of listener that an agent is (see `net.handshake`)."""
MAX_BYTES = 4 << 20
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
        """Encode an inventory of this node for `listed`, with all problems. A shard both in memory
        and on disk is listed twice: one of the copies may be damaged."""
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
        if offset < 0 or not 0 <= nbytes <= MAX_BYTES:
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


REACH_SECONDS = 2.0
"""A node that accepts no connection within this time, or does not answer on it, counts as down: a
restart waits for it."""
STALL_SECONDS = 10.0
"""Limit of silence in the middle of an answer."""


class RemoteNode:
    """One connection to a node's agent, made when needed. Any thread; one call at a time.

    Methods raise ConnectionError when the agent cannot be reached, FileNotFoundError for a missing
    shard, EOFError for a truncated one, OSError for one that the node cannot read.
    """

    def __init__(
        self,
        name: str,
        address: Address,
        secret: bytes,
        down: threading.Event | None = None,
        in_memory: bool = False,
    ) -> None:
        """`name` appears in places and errors; `secret` is the secret of the run in which the agent
        met other agents last. `down` is shared by all clients of this node: once it is set, no
        client asks the node again, or each range would wait for the same limit. Reads the shards on
        the node's disk, or with `in_memory` those in its memory."""
        self.name, self._address, self._secret = name, address, secret
        self._down, self._in_memory = down or threading.Event(), in_memory
        self._lock = threading.Lock()
        self._link: Link | None = None

    def inventory(self, host: str) -> Inventory:
        """Everything that the node has; `host` is the node's name."""
        with self._connection() as link:
            record = link.receive_record(_answer(link, {"op": "list"}))
            try:
                return listed(record, self.name, host)
            except (ValueError, KeyError, TypeError) as error:
                raise ConnectionError(f"{self.name} sent no valid inventory: {error}") from error

    def open_shard(self, name: VersionName, shard: int) -> RemoteFile:
        """Open a shard of a version; nothing of it is checked."""
        return self._open(ShardKey(name.id, shard, name.shards), self._in_memory)

    def open_parity(self, key: ParityKey) -> RemoteFile:
        """Open a parity; nothing of it is checked."""
        return self._open(key)

    def _open(self, key: ShardKey, in_memory: bool = False) -> RemoteFile:
        with self._connection() as link:
            head = _answer(link, {"op": "manifest", "stem": key.stem, "in_memory": in_memory})
            return RemoteFile(self, key.stem, link.receive_record(head), in_memory)

    def exists(self, name: VersionName) -> bool:
        """Always False: a node has only some of the shards, so it cannot know."""
        return False

    def read(self, file: RemoteFile, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` of a shard or parity."""
        copy = copy_of(file.manifest)
        which = {"stem": file.stem, "copy": copy, "in_memory": file.in_memory}
        for low in range(0, len(into), MAX_BYTES):
            part = into[low : low + MAX_BYTES]
            where = {"offset": offset + low, "length": len(part)}
            with self._connection() as link:
                head = _answer(link, {"op": "fetch", **which, **where})
                if head.get("nbytes", 0) != len(part):
                    raise EOFError(f"truncated: {self.name} has {file.stem} only in part")
                link.receive_into(part)

    def close(self) -> None:
        """Close the connection. The next call makes a new one."""
        with self._lock:
            self._hang_up()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Link]:
        """The connection, made when needed, closed after any error."""
        with self._lock:
            try:
                if self._down.is_set():
                    raise ConnectionError(f"{self.name} did not answer before")
                if self._link is None:
                    self._link = reach(self._address, REACH_SECONDS)
                    greet(self._link, PURPOSE, self._secret, {}, REACH_SECONDS)
                    self._link.seconds = STALL_SECONDS
                yield self._link
            except BaseException as error:
                self._hang_up()
                if isinstance(error, PeerError):
                    self._down.set()
                    raise ConnectionError(f"{self.name}: {error}") from error
                raise

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


class RemoteFile(Struct, frozen=True):
    """One shard or parity. Reading raises as the node's methods do."""

    node: RemoteNode
    stem: str
    manifest: bytes
    """Not checked."""
    in_memory: bool = False
    """The copy in the node's memory, not the one on its disk."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read a range, without a check."""
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on, without a check."""
        self.node.read(self, offset, into)


def _answer(link: Link, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request, and return the head of the answer."""
    link.send(request)
    head = link.receive(link.seconds)
    if "error" in head:
        raise (FileNotFoundError if head.get("gone") else OSError)(f"{link.peer}: {head['error']}")
    return head
