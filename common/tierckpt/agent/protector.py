"""The agent's part in the peer level: the node's shards, protected with those of other nodes.

A version is protected when it is complete on the local level of all ranks, from the files there:
every node's agent is told so by its first trainer, and they meet (`peer.Exchange`). Numpy is
imported with this module, so only agents of jobs with a peer level pay for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tierckpt import _faults
from tierckpt.erasure.codes import Code
from tierckpt.erasure.groups import RedundancyGroup
from tierckpt.errors import LEFT_OUT, ConfigError
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.peer.address import Address, own_host
from tierckpt.peer.exchange import Exchange, Party, Shard
from tierckpt.peer.read_server import ReadServer
from tierckpt.peer.transport import Transport
from tierckpt.storage.local.store import LocalStore
from tierckpt.storage.memory.job_directory import JobDirectory

from .protocol import (
    AgentMessage,
    KnownNodes,
    ListenSettings,
    PartySettings,
    Protected,
    ProtectFailed,
)
from .shard_guard import ShardGuard, open_shard

Answer = Callable[[AgentMessage], None]


@dataclass(frozen=True)
class _Order:
    """A version to be protected, by those who knew each other when that was ordered: a run that
    begins meanwhile has other shards here, and other peers."""

    directory: str
    version: VersionId
    shards: int
    parties: Sequence[PartySettings]
    transport: Transport | None
    lost: Sequence[int] | None
    answer: Answer

    @property
    def keys(self) -> list[ShardKey]:
        """The node's shards."""
        return [self.key(party) for party in self.parties]

    def key(self, party: PartySettings) -> ShardKey:
        return ShardKey(self.version, party.shard, self.shards)

    def fail(self, error: str, superseded: bool = False) -> None:
        self.answer(ProtectFailed(self.version, error, superseded))


class Protector:
    """One a node and job. Any thread may call it; a thread of its own protects version by version,
    all shards of the node at once."""

    def __init__(self, held: ShardGuard, on_idle: Callable[[], None]) -> None:
        self._held = held
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._secret = b""
        self._place: ListenSettings | None = None
        self._met: ListenSettings | None = None
        """That of the run in which agents met last. Where those of a later one do not, or not all
        have heard of it when that ends, this is what they know each other by."""
        self._read_server = ReadServer()
        self._transport: Transport | None = None
        self._parties: Sequence[PartySettings] = ()
        self._known_nodes: KnownNodes | None = None
        """See `known_nodes`."""
        self._orders: list[_Order] = []
        self._thread: threading.Thread | None = None

    def open(self, where: ListenSettings) -> Address:
        """Listen for the agents of the run that has this secret. Exchanges of the run before are
        given up, and its agents may only look. Agents that ask what is here are shown what `where`
        serves.

        Raises ConfigError when that is not possible.
        """
        with self._lock:
            self._place = where
            if (serves := where.serves) is not None:
                job = JobDirectory(Path(serves.root), serves.job)
                self._read_server.add(LocalStore(serves.directory), job)
            return self._listen()

    def _listen(self) -> Address:
        """With the lock held: at the place, unless it does already. Raises ConfigError."""
        assert self._place is not None
        place, secret = self._place, self._place.secret.encode()
        if self._transport is None or self._secret != secret:
            host = own_host(place.interface, place.towards)
            self._transport = self._successor(secret, host, place.port)
            self._secret = secret
            self._transport.read_server = self._read_server
        return self._transport.address

    def _successor(self, secret: bytes, host: str, port: int) -> Transport:
        """With the lock held: of the transport of the run before, and at its port where that will
        do, as who has not met us in this run looks for us there. Raises ConfigError; what cannot
        have another port is still there."""
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
        """With the lock held. A dead agent's port, which all know, may have been somebody's when
        this one took its place; it may be free by now."""
        if self._transport is None and self._place is not None:
            with contextlib.suppress(ConfigError):
                self._listen()

    def introduce(
        self, parties: Sequence[PartySettings], known_nodes: KnownNodes | None = None
    ) -> None:
        """Set who protects the node's shards from now on, and where all agents of the job are."""
        with self._lock:
            self._parties, self._known_nodes = parties, known_nodes
            self._met = self._place
            if self._met is not None and self._transport is not None:
                self._met = replace(self._met, port=self._transport.address.port)

    def known_nodes(self) -> KnownNodes | None:
        """All agents, as `introduce` had them; None before."""
        return self._known_nodes

    def met_at(self) -> ListenSettings | None:
        """Where those agents find this one; None before `introduce`. For `inherit`."""
        with self._lock:
            return self._met

    def inherit(self, where: ListenSettings, known_nodes: KnownNodes | None) -> None:
        """Be to others what an agent was that shut down, and said this: the run that has begun may
        end before its own agents have met."""
        with contextlib.suppress(ConfigError):  # for the run itself another port will do
            self.open(where)
        self.introduce((), known_nodes)

    def order(
        self,
        directory: str,
        version: VersionId,
        shards: int,
        lost: Sequence[int] | None,
        answer: Answer,
    ) -> None:
        """Protect the node's shards of a version; of versions that wait, the newest is enough.

        But not of those that are mended: another node may be at it already, and would wait for us.

        `lost`: the shards beside which parity is to be made, the same everywhere; None: all.
        """
        with self._lock:
            self._listen_again()
            met = (self._parties, self._transport)
            order = _Order(directory, version, shards, *met, lost, answer)
            if not order.keys:
                order.fail("the agents never met")
                return
            try:
                self._have_thread()
            except RuntimeError as error:  # as many as the system, or the container, allows
                order.fail(_text(error))
                return
            self._held.add(order.keys)
            for older in [each for each in self._orders if each.lost is None]:
                self._orders.remove(older)
                self._held.discard(older.keys)
                older.fail("a newer one came", superseded=True)
            self._orders.append(order)

    def _have_thread(self) -> None:
        """With the lock held, for which it waits then. Raises RuntimeError, and there is none."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="tierckpt-protector", daemon=True)
            thread.start()
            self._thread = thread  # after it: one that never ran would be waited for for ever

    def busy(self) -> bool:
        """True while something is protected, or waits."""
        return self._thread is not None

    def asked_at(self) -> float:
        """When another node last read what is here (monotonic); -inf before."""
        return self._read_server.asked_at

    def close(self) -> None:
        """Give the port back. Exchanges under way fail."""
        with self._lock:
            transport, self._transport, self._place = self._transport, None, None
        if transport is not None:
            transport.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._orders:
                    self._thread = None
                    break
                order = self._orders.pop(0)
            begin = time.perf_counter()
            try:
                nbytes, errors = _protect_all(order)
            except Exception as error:  # whatever it is, it costs this version's redundancy only
                nbytes, errors = 0, [_text(error)]
            finally:
                self._held.discard(order.keys)
            if errors:
                left_out = all(LEFT_OUT in text for text in errors)
                order.fail("; ".join(errors), superseded=left_out)
            else:
                seconds = time.perf_counter() - begin
                order.answer(Protected(order.version, nbytes, seconds))
        self._on_idle()


def _protect_all(order: _Order) -> tuple[int, list[str]]:
    """Bytes of parity that were committed, and what went wrong."""
    transport = order.transport
    if transport is None:
        return 0, ["the agents do not know each other"]
    _faults.point("peer", op="begin", version=order.version.version)
    written: list[int] = []
    errors: list[str] = []

    def protect(party: PartySettings) -> None:
        try:
            written.append(_protect(transport, party, order))
        except Exception as error:
            errors.append(f"{order.key(party)}: {_text(error)}")

    threads = []
    for party in order.parties:
        thread = threading.Thread(target=protect, args=(party,), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the others' groups go on
            errors.append(f"{order.key(party)}: {_text(error)}")
        else:
            threads.append(thread)
    for thread in threads:
        thread.join()
    return sum(written), errors


def _protect(transport: Transport, settings: PartySettings, order: _Order) -> int:
    """One shard's part; returns the bytes of parity that were committed."""
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


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
