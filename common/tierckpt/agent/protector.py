"""The agent's part in the peer level: parity for the node's shards, made with other nodes.

A version is protected once it is complete on the local level of all ranks, from the files there.
Every node's agent gets the order from its first trainer, and the agents meet (`peer.exchange`).
numpy is imported with this module, so only agents of jobs with a peer level pay for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from tierckpt import _faults
from tierckpt._text import error_text
from tierckpt.core.levels import PEER
from tierckpt.erasure.codes import Code
from tierckpt.erasure.groups import RedundancyGroup
from tierckpt.errors import LEFT_OUT, ConfigError
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.net.addresses import Address, own_host
from tierckpt.peer.exchange import Exchange, Party, Shard
from tierckpt.peer.remote_reads import ReadServer
from tierckpt.peer.transport import Transport
from tierckpt.storage.job_directory import JobDirectory
from tierckpt.storage.local import LocalStore

from .pipeline import Answer, ShardGuard, Stage, open_shard
from .protocol import (
    KnownNodes,
    ListenSettings,
    PartySettings,
    Protected,
    ProtectFailed,
)


class _Order(Struct, frozen=True):
    """A version to protect, with the parties known at the time of the order: a later run has other
    shards here, and other peers."""

    directory: str
    id: VersionId
    shards: int
    parties: Sequence[PartySettings]
    transport: Transport | None
    lost: Sequence[int] | None

    @property
    def keys(self) -> list[ShardKey]:
        """The node's shards."""
        return [self.key(party) for party in self.parties]

    def key(self, party: PartySettings) -> ShardKey:
        return ShardKey(self.id, party.shard, self.shards)


class Protector(Stage[_Order]):
    """Makes the parity of one node and job, of all shards of the node at once."""

    def __init__(self, held: ShardGuard, on_idle: Callable[[], None]) -> None:
        super().__init__(PEER, held, on_idle)
        self._lock = threading.Lock()
        self._secret = b""
        self._place: ListenSettings | None = None
        self._met: ListenSettings | None = None
        """Place of the run in which agents met last. If a later run ends before all its agents have
        met, the nodes find each other by this one."""
        self._read_server = ReadServer()
        self._transport: Transport | None = None
        self._parties: Sequence[PartySettings] = ()
        self._known_nodes: KnownNodes | None = None
        """Result of `known_nodes`."""

    def open(self, where: ListenSettings) -> Address:
        """Listen for the agents of the run with this secret. Exchanges of the previous run are
        given up, and its agents may only read. Agents of other nodes may read the stores that
        `where` serves.

        Raises ConfigError when it cannot listen there.
        """
        with self._lock:
            self._place = where
            if (serves := where.serves) is not None:
                job = JobDirectory(Path(serves.root), serves.job)
                self._read_server.add(LocalStore(serves.directory), job)
            return self._listen()

    def _listen(self) -> Address:
        """With the lock held: listen at the place, unless it does already. Raises ConfigError."""
        assert self._place is not None
        place, secret = self._place, self._place.secret.encode()
        if self._transport is None or self._secret != secret:
            host = own_host(place.interface, place.towards)
            self._transport = self._successor(secret, host, place.port)
            self._secret = secret
            self._transport.read_server = self._read_server
        return self._transport.address

    def _successor(self, secret: bytes, host: str, port: int) -> Transport:
        """With the lock held: replace the transport of the previous run, at its port if possible,
        because agents that have not met us in this run look there. Raises ConfigError; if another
        port was needed, the old transport is still open then."""
        before, former = self._transport, (self._met.secret.encode(),) if self._met else ()
        if before is not None and before.address == Address(host, port or before.address.port):
            before.close()
            self._transport = None
            with contextlib.suppress(ConfigError):
                return Transport(secret, host, before.address.port, former=former)
        made = Transport(secret, host, port, former=former)
        if before is not None:
            before.close()
        return made

    def _listen_again(self) -> None:
        """With the lock held: try again to listen. The port of a dead agent, which all nodes know,
        may have been in use when this agent took its place, and be free now."""
        if self._transport is None and self._place is not None:
            with contextlib.suppress(ConfigError):
                self._listen()

    def introduce(
        self, parties: Sequence[PartySettings], known_nodes: KnownNodes | None = None
    ) -> None:
        """Set the parties that protect the node's shards from now on, and all agents of the job."""
        with self._lock:
            self._parties, self._known_nodes = parties, known_nodes
            self._met = self._place
            if self._met is not None and self._transport is not None:
                self._met = replace(self._met, port=self._transport.address.port)

    def known_nodes(self) -> KnownNodes | None:
        """All agents, as given to `introduce`; None before."""
        return self._known_nodes

    def met_at(self) -> ListenSettings | None:
        """Place where those agents find this one; None before `introduce`. For `inherit`."""
        with self._lock:
            return self._met

    def inherit(self, where: ListenSettings, known_nodes: KnownNodes | None) -> None:
        """Take over the place of an agent that shut down and reported these values, so that other
        nodes still find this node if the current run ends before its own agents have met."""
        with contextlib.suppress(ConfigError):  # the run itself can use another port
            self.open(where)
        self.introduce((), known_nodes)

    def protect(
        self,
        directory: str,
        version: VersionId,
        shards: int,
        lost: Sequence[int] | None,
        answer: Answer,
    ) -> None:
        """Protect the node's shards of a version. Of waiting versions, only the newest is kept.

        Repairs are all kept: another node may be working on one already, and would wait for us.

        `lost`: shards without parity, the same list on all nodes; None: make all parity. Raises as
        `Stage.accept`.
        """
        with self._lock:
            self._listen_again()
            met = (self._parties, self._transport)
        order = _Order(directory, version, shards, *met, lost)
        if order.keys:
            self.accept(order, answer)
        else:
            answer(self._failed(order, "the agents of the nodes have not met"))

    def asked_at(self) -> float:
        """Time of the last read by another node (monotonic); -inf before."""
        return self._read_server.asked_at

    def close(self) -> None:
        """Stop listening. Exchanges in progress fail."""
        with self._lock:
            transport, self._transport, self._place = self._transport, None, None
        if transport is not None:
            transport.close()

    def _replaces(self, order: _Order, waiting: _Order) -> bool:
        return waiting.lost is None

    def _failed(self, order: _Order, error: str, superseded: bool = False) -> ProtectFailed:
        return ProtectFailed(order.id, error, superseded)

    def _store(self, order: _Order) -> Protected | ProtectFailed:
        start = time.perf_counter()
        try:
            nbytes, errors = _protect_all(order)
        except Exception as error:  # any failure costs only this version's parity
            nbytes, errors = 0, [error_text(error)]
        if errors:
            left_out = all(LEFT_OUT in text for text in errors)
            return self._failed(order, "; ".join(errors), superseded=left_out)
        return Protected(order.id, nbytes, time.perf_counter() - start)


def _protect_all(order: _Order) -> tuple[int, list[str]]:
    """Protect all shards of the node; returns the bytes of parity committed, and all errors."""
    transport = order.transport
    if transport is None:
        return 0, ["the agents do not know each other"]
    _faults.point("peer", op="begin", version=order.id.version)
    written: list[int] = []
    errors: list[str] = []

    def protect(party: PartySettings) -> None:
        try:
            written.append(_protect(transport, party, order))
        except Exception as error:
            errors.append(f"{order.key(party)}: {error_text(error)}")

    threads = []
    for party in order.parties:
        thread = threading.Thread(target=protect, args=(party,), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the groups of the other shards continue
            errors.append(f"{order.key(party)}: {error_text(error)}")
        else:
            threads.append(thread)
    for thread in threads:
        thread.join()
    return sum(written), errors


def _protect(transport: Transport, settings: PartySettings, order: _Order) -> int:
    """Protect one shard; returns the bytes of parity committed."""
    party, make = _party_of(settings), None
    if order.lost is not None:
        make = [i for i, rank in enumerate(party.group.ranks) if rank in order.lost]
        if not make:
            return 0
    store, key = LocalStore(order.directory), order.key(settings)
    stored = store.read_manifest(key)
    with open_shard(store, key) as (image, manifest):
        shard = Shard(image, manifest, _unchanged(store, key, stored))
        return Exchange(transport, party, shard, store, make).run().parity_bytes


def _party_of(settings: PartySettings) -> Party:
    group = RedundancyGroup(settings.ranks, Code(settings.n, settings.k, settings.m))
    pairs = zip(settings.hosts, settings.ports, strict=True)
    addresses = tuple(Address(host, port) for host, port in pairs)
    return Party(group, addresses, settings.ranks.index(settings.shard))


def _unchanged(store: LocalStore, key: ShardKey, manifest: bytes) -> Callable[[], bool]:
    def still() -> bool:
        with contextlib.suppress(OSError):
            return store.read_manifest(key) == manifest
        return False

    return still
