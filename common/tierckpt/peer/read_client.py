"""Client of `read_server`, for a process other than an agent.

It has the interface of a persistent level: shards by version and number, in ranges.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tierckpt.core.copies import Inventory
from tierckpt.errors import PeerError
from tierckpt.format.ids import ParityKey, ShardKey
from tierckpt.storage.persistent import VersionName

from .address import Address
from .read_server import MOST_BYTES, copy_of, listed
from .wire import Link, greet, reach

REACH_SECONDS = 2.0
"""A node that accepts no connection within this time, or does not answer on it, counts as down: a
restart waits for it."""
STALL_SECONDS = 10.0
"""Limit of silence in the middle of an answer."""


class RemoteNode:
    """One connection to a node's agent, made when needed. Any thread; one call at a time.

    Methods raise ConnectionError when the agent cannot be reached, FileNotFoundError for a shard
    that is not there, EOFError for one that is truncated, OSError for one that the node cannot
    read.
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
        for low in range(0, len(into), MOST_BYTES):
            part = into[low : low + MOST_BYTES]
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
                    greet(self._link, self._secret, REACH_SECONDS)
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


@dataclass(frozen=True)
class RemoteFile:
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
