"""One agent's connections to its peers: plain TCP, made on demand, kept, and made again.

Threads and blocking calls: one thread accepts, and every incoming connection has its own thread.
The number of connections is the number of fellow members of the agent's ranks, whatever the size of
the job. A connection carries these requests, one after the other:

    {"op": "join", "tag", "series", "version", "generation", "member", "to", "attempt"} + manifest
        `member` enters the exchange `tag` with member `to`. Answer: {"op": "joined", "attempt"} +
        manifest, once that member has started the exchange as well, or {"op": "refused" or
        "failed", "why"}. Then {"op": "data", "at": [member, 1 if parity, segment, offset in it],
        "digest"} + bytes (a window; xxh3_64, little endian, hexadecimal), and {"op": "end"}: all
        data was sent, and the shard was sealed all the time; or {"op": "failed", "why"}
    {"op": "fetch", "stem", "offset", "length"}    answer: {"op": "bytes"} + bytes, or {"error"}
    {"op": "manifest", "stem"}    answer: {"op": "manifest"} + manifest, or {"error"}
    {"op": "list"}                the inventory of this node (see `ReadServer`)
    {"op": "why", "tag", "to"}    answer: {"waits_for": [names]}: asked before a silent peer is
        blamed
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from msgspec import Struct

from tierckpt._text import error_text
from tierckpt.errors import LEFT_OUT, ConfigError, ExchangeCancelledError, PeerError
from tierckpt.format.ids import VersionId
from tierckpt.net.addresses import Address
from tierckpt.net.handshake import Caller, Listener, greet
from tierckpt.net.limits import HELLO_SECONDS, MAX_TEXT
from tierckpt.net.link import Link, reach

from .remote_reads import PURPOSE, ReadServer

LOOK_SECONDS = 0.2
"""Interval of checks while a member waits for an exchange to start."""


class Limits(Struct, frozen=True):
    """Time limits of waiting for a peer."""

    join_seconds: float = 60.0
    """Limit for the other members to start the same version: their trainers may seal later."""
    stall_seconds: float = 30.0
    """Limit without a byte of progress, once the exchange has started."""
    again_seconds: float = 10.0
    """Limit to reach an agent that the previous exchange could not reach. Once the agent is
    reached, its trainer has `join_seconds`, as any other."""
    ask_seconds: float = 2.0
    """Limit for a silent member to say which members it waits for. Far below `stall_seconds`: the
    members that wait for the hanging one must give up first."""


class Host(Protocol):
    """The transport's view of an exchange on this node."""

    tag: str
    """Name of version, group and purpose: equal for all members."""
    series: str
    """Name of group and purpose, without the version."""
    id: VersionId
    member: int

    def attend(self, link: Link, head: dict[str, Any], record: bytes) -> None:
        """Serve a member that joins, in its connection's thread, until it has ended."""

    def waits_for(self) -> list[str]:
        """Names of the members that the exchange waits for now."""

    def why_failed(self) -> str:
        """The first failure of the exchange; empty without one."""

    def cancel(self, why: str) -> None:
        """End the exchange with this reason."""


class Transport:
    """Listens from the start; any thread may call any method. Call `close` at the end of the
    run."""

    def __init__(
        self,
        secret: bytes,
        host: str,
        port: int = 0,
        limits: Limits | None = None,
        notice: Callable[[str], None] = lambda text: None,
        former: tuple[bytes, ...] = (),
    ) -> None:
        """`secret` is the run's; port 0 takes any free one. `notice` receives refused connections,
        in any thread. A peer that knows one of `former`, secrets of earlier runs, may read the
        node's shards, but joins no exchange.

        Raises ConfigError when it cannot listen there.
        """
        self.limits = limits or Limits()
        self._secret, self._notice = secret, notice
        self._changed = threading.Condition()
        self._closing = False
        self._hosts: dict[tuple[str, int], Host] = {}
        self._latest: dict[tuple[str, int], VersionId] = {}
        self._given_up: dict[tuple[str, int], tuple[VersionId, str]] = {}
        """The last failed exchange of each series and member, and its reason."""
        self.read_server = ReadServer()
        """The node's shards and parities, for peers."""
        self._kept: dict[Address, list[Link]] = {}
        self._doubted: set[Address] = set()
        self._links: dict[Link, None] = {}  # to peers, in the order in which they were opened
        where = Address(host, port)
        try:
            self._listener = Listener(
                where,
                PURPOSE,
                lambda: (secret, *former),
                self._receive,
                lambda error: self._notice(f"a connection was refused: {error}"),
            )
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"the agent cannot listen at {where}: {error}; set another interface or port "
                "(0: any)"
            ) from error
        self.address = self._listener.address

    def close(self) -> None:
        """Cancel the exchanges under way, end all connections, and join all threads."""
        with self._changed:
            self._closing = True
            hosts = list(self._hosts.values())
            self._changed.notify_all()
        for host in hosts:
            host.cancel("the agent is closing")
        with self._changed:  # no link is closed in here, so no descriptor can be reused
            for link in self._links:
                link.shut()
        self._listener.close()
        for link in [link for kept in self._kept.values() for link in kept]:
            link.close()
        self._kept.clear()

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- to a peer -----------------------------------------------------------------------------

    def connect(self, address: Address, seconds: float = HELLO_SECONDS, new: bool = False) -> Link:
        """A connection for the caller alone: a kept one, unless it must be `new`.

        Give it back with `keep`, or close it with `drop`. Raises PeerError when the peer cannot be
        reached within `seconds`, RefusedError when it refuses the connection.
        """
        with self._changed:
            if self._closing:
                raise ExchangeCancelledError("the agent is closing")
            kept = self._kept.get(address, [])
            while kept and not (new or address in self._doubted):
                link = kept.pop()
                if link.idle():
                    return link
                self._links.pop(link, None)
                link.close()
        link = self._hold(reach(address, seconds))
        try:
            greet(link, PURPOSE, self._secret, {}, min(seconds, HELLO_SECONDS))
        except BaseException:
            self.drop(link)
            raise
        with self._changed:
            self._doubted.discard(address)
        link.seconds = self.limits.stall_seconds
        return link

    def doubt(self, address: Address) -> None:
        """Mark a peer as not reached: a kept connection to it proves nothing any more."""
        with self._changed:
            self._doubted.add(address)

    def doubts(self, address: Address) -> bool:
        """True when the peer is marked, and has not been reached since."""
        return address in self._doubted

    def keep(self, address: Address, link: Link) -> None:
        """Give back a connection between two requests."""
        with self._changed:
            if not self._closing:
                self._kept.setdefault(address, []).append(link)
                return
        self.drop(link)

    def drop(self, link: Link) -> None:
        """Close a connection."""
        with self._changed:
            self._links.pop(link, None)
        link.close()

    def why(
        self, address: Address, host: Host, member: int, seconds: float
    ) -> tuple[list[str], str] | None:
        """Ask a member of our exchange `host` which members it waits for, and why it failed ("": it
        did not fail). None when it does not answer within `seconds`."""
        which = {"tag": host.tag, "series": host.series, "to": member}
        at = {"version": host.id.version, "generation": host.id.generation}
        try:
            link = self.connect(address, seconds, new=True)
            try:
                link.send({"op": "why", **which, **at})
                answer = link.receive(seconds)
                waits = [str(name) for name in answer.get("waits_for", ())]
                return waits, str(answer.get("gave_up", ""))
            finally:
                self.drop(link)
        except PeerError:
            return None

    # --- exchanges here ------------------------------------------------------------------------

    @contextlib.contextmanager
    def hosting(self, host: Host) -> Iterator[None]:
        """Let members join `host` inside `with`. Raises PeerError when it is already in
        progress."""
        key = (host.tag, host.member)
        with self._changed:
            if self._closing:
                raise ExchangeCancelledError("the agent is closing")
            if key in self._hosts:
                raise PeerError(f"{host.id} is being exchanged already, as member {host.member}")
            self._hosts[key] = host
            series = (host.series, host.member)
            self._latest[series] = max(host.id, self._latest.get(series, host.id))
            self._given_up.pop(series, None)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                del self._hosts[key]

    def gave_up(self, host: Host, why: str) -> None:
        """Record why the exchange failed, so that members that join later need not wait for it."""
        with self._changed:
            self._given_up[host.series, host.member] = (host.id, why)
            self._changed.notify_all()

    # --- from a peer ---------------------------------------------------------------------------

    def _receive(self, link: Link, caller: Caller) -> bool:
        """The thread of an admitted connection."""
        link.seconds = self.limits.stall_seconds
        met = caller.secret == self._secret
        with contextlib.suppress(PeerError):  # the exchange concerned has already reported it
            while True:
                self._serve(link, link.receive(None), met)
        return False

    def _serve(self, link: Link, head: dict[str, Any], met: bool) -> None:
        """Answer one request. `met`: the caller is an agent of this run."""
        operation, in_memory = head.get("op"), bool(head.get("in_memory"))
        try:
            if operation == "join":
                record = link.receive_record(head)
                if not met:
                    link.send({"op": "refused", "why": "another run of the job has started here"})
                elif host := self._await_host(link, head):
                    host.attend(link, head, record)
            elif operation == "list":
                link.send({"op": "list"}, self.read_server.list())
            elif operation == "manifest":
                link.send(
                    {"op": "manifest"}, self.read_server.manifest(str(head["stem"]), in_memory)
                )
            elif operation == "fetch":
                where = (int(head["offset"]), int(head["length"]), str(head["copy"]), in_memory)
                link.send({"op": "bytes"}, self.read_server.read(str(head["stem"]), *where))
            elif operation == "why":
                link.send(self._state_of(head))
            else:
                raise PeerError(f"{link.peer} sent the unknown request {operation!r}")
        except (OSError, KeyError, TypeError, ValueError) as error:
            gone = isinstance(error, FileNotFoundError)
            link.send({"error": error_text(error)[:MAX_TEXT], "gone": gone})

    def _state_of(self, head: dict[str, Any]) -> dict[str, Any]:
        member = int(head["to"])
        if host := self._hosts.get((str(head["tag"]), member)):
            return {"waits_for": host.waits_for(), "gave_up": host.why_failed()[:MAX_TEXT]}
        return {"gave_up": self._why_given_up(head) or ""}

    def _why_given_up(self, head: dict[str, Any]) -> str | None:
        """Reason of the exchange in question; None if it did not fail."""
        over, why = self._given_up.get((str(head["series"]), int(head["to"])), (None, ""))
        return why if over == _version_of(head) else None

    def _await_host(self, link: Link, head: dict[str, Any]) -> Host | None:
        """Wait for the exchange in question to start here. None, with an answer sent, when it never
        will."""
        tag, member = str(head["tag"]), int(head["to"])
        asked = _version_of(head)
        deadline = time.monotonic() + self.limits.join_seconds
        with self._changed:
            while (tag, member) not in self._hosts:
                latest = self._latest.get((str(head["series"]), member))
                if latest is not None and latest > asked:
                    link.send({"op": "refused", "why": f"{asked} {LEFT_OUT}: {latest} is next"})
                    return None
                if (why := self._why_given_up(head)) is not None:
                    link.send({"op": "refused", "why": why})
                    return None
                if self._closing or time.monotonic() > deadline or not link.idle():
                    raise PeerError(
                        f"{link.peer} asked for the exchange of {asked}, which did not start here"
                    )
                self._changed.wait(LOOK_SECONDS)
            return self._hosts[tag, member]

    def _hold(self, link: Link) -> Link:
        with self._changed:
            self._links[link] = None
            if self._closing:
                link.shut()
        return link


def _version_of(head: dict[str, Any]) -> VersionId:
    return VersionId(int(head["generation"]), int(head["version"]))
