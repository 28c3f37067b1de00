"""The agent's part in the peer level: the node's shards, protected with those of other nodes.

A version is protected when it is complete on the local level of all ranks, from the files there:
every node's agent is told so by its first trainer, and they meet (`peer.Exchange`). Numpy is
imported with this module, so only agents of jobs with a peer level pay for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .held import Held, open_shard
from .localstore import LocalStore
from .naming import ShardKey, VersionId
from .peer.address import Address, own_host
from .peer.exchange import Exchange, Party, Shard
from .peer.transport import Transport
from .redundancy.codes import Code
from .redundancy.groups import RedundancyGroup

Answer = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class PartySettings:
    """One shard of this node, the group it is in, and where the other members' agents are."""

    shard: int
    ranks: tuple[int, ...]
    n: int
    k: int
    m: int
    hosts: tuple[str, ...]
    ports: tuple[int, ...]

    @staticmethod
    def of(shard: int, group: RedundancyGroup, addresses: dict[int, Address]) -> PartySettings:
        """`addresses` has the agent of every member's node, by rank."""
        there = [addresses[rank] for rank in group.ranks]
        code = group.code
        return PartySettings(
            shard,
            group.ranks,
            code.n,
            code.k,
            code.m,
            tuple(address.host for address in there),
            tuple(address.port for address in there),
        )

    def party(self) -> Party:
        """As an exchange takes it."""
        group = RedundancyGroup(self.ranks, Code(self.n, self.k, self.m))
        pairs = zip(self.hosts, self.ports, strict=True)
        addresses = tuple(Address(host, port) for host, port in pairs)
        return Party(group, addresses, self.ranks.index(self.shard))

    def as_message(self) -> dict[str, Any]:
        """For the socket."""
        return asdict(self)

    @staticmethod
    def of_message(values: dict[str, Any]) -> PartySettings:
        """The inverse of `as_message`."""
        lists = {name: tuple(values[name]) for name in ("ranks", "hosts", "ports")}
        return PartySettings(**{**values, **lists})


@dataclass(frozen=True)
class _Order:
    """A version to be protected."""

    directory: str
    keys: list[ShardKey]
    lost: list[int] | None
    answer: Answer

    def say(self, op: str, **more: Any) -> None:
        id_ = self.keys[0].id
        self.answer({"op": op, "version": id_.version, "generation": id_.generation, **more})


class Protector:
    """One a node and job. Any thread may call it; a thread of its own protects version by version,
    all shards of the node at once."""

    def __init__(self, held: Held, on_idle: Callable[[], None]) -> None:
        self._held = held
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._secret = b""
        self._transport: Transport | None = None
        self._parties: list[PartySettings] = []
        self._orders: list[_Order] = []
        self._thread: threading.Thread | None = None

    def open(self, life: str, interface: str, port: int, towards: str) -> Address:
        """Listen for the agents of this life; what the life before had is closed.

        Raises ConfigError when that is not possible.
        """
        secret = life.encode()
        with self._lock:
            if self._transport is not None and self._secret != secret:
                self._transport.close()
                self._transport = None
            if self._transport is None:
                host = own_host(interface, towards)
                self._transport, self._secret = Transport(secret, host, port), secret
            return self._transport.address

    def know(self, parties: list[PartySettings]) -> None:
        """Who protects the node's shards from now on."""
        with self._lock:
            self._parties = parties

    def order(
        self,
        directory: str,
        version: VersionId,
        shards: int,
        lost: list[int] | None,
        answer: Answer,
    ) -> None:
        """Protect the node's shards of a version; of versions that wait, the newest is enough.

        But not of those that are mended: another node may be at it already, and would wait for us.

        `lost`: the shards beside which parity is to be made, the same everywhere; None: all.
        """
        with self._lock:
            keys = [ShardKey(version, party.shard, shards) for party in self._parties]
            if not keys:
                where = {"version": version.version, "generation": version.generation}
                answer({"op": "protect_failed", **where, "error": "the agents never met"})
                return
            self._held.add(keys)
            for older in [order for order in self._orders if order.lost is None]:
                self._orders.remove(older)
                self._held.discard(older.keys)
                older.say("protect_failed", error="superseded", superseded=True)
            self._orders.append(_Order(directory, keys, lost, answer))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="tierckpt-protector", daemon=True
                )
                self._thread.start()

    def busy(self) -> bool:
        """True while something is protected, or waits."""
        return self._thread is not None

    def close(self) -> None:
        """Give the port back. Exchanges under way fail."""
        with self._lock:
            transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._orders:
                    self._thread = None
                    break
                order = self._orders.pop(0)
                transport, parties = self._transport, self._parties
            begin = time.perf_counter()
            try:
                nbytes, errors = _protect_all(transport, parties, order)
            finally:
                self._held.discard(order.keys)
            if errors:
                order.say("protect_failed", error="; ".join(errors))
            else:
                seconds = time.perf_counter() - begin
                order.say("protected", nbytes=nbytes, seconds=seconds)
        self._on_idle()


def _protect_all(
    transport: Transport | None, parties: list[PartySettings], order: _Order
) -> tuple[int, list[str]]:
    """Bytes of parity that were committed, and what went wrong."""
    if transport is None:
        return 0, ["the agents do not know each other"]
    store, lost = LocalStore(order.directory), order.lost
    of_shard = {party.shard: party.party() for party in parties}
    written: list[int] = []
    errors: list[str] = []

    def protect(key: ShardKey) -> None:
        party, make = of_shard[key.shard], None
        if lost is not None:
            make = [i for i, rank in enumerate(party.group.ranks) if rank in lost]
            if not make:
                return
        try:
            stored = store.read_manifest(key)
            with open_shard(store, key) as (image, manifest):
                still = _unchanged(store, key, stored)
                shard = Shard(image, manifest, still)
                report = Exchange(transport, party, shard, store, make).run()
                written.append(report.parity_bytes)
        except Exception as error:  # whatever it is, it costs this version's redundancy only
            errors.append(f"{key}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=protect, args=(key,), daemon=True) for key in order.keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(written), errors


def _unchanged(store: LocalStore, key: ShardKey, manifest: bytes) -> Callable[[], bool]:
    def still() -> bool:
        with contextlib.suppress(OSError):
            return store.read_manifest(key) == manifest
        return False

    return still
