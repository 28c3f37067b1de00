"""Frames on one connection between two agents, and the handshake at the start of a connection.

A frame is the length of a JSON object (4 bytes, big endian), the object, and as many raw bytes as
its member `nbytes` says; none without that member. Raw bytes go from and to the caller's own
memory: this module holds only the head of a frame.

The handshake is a challenge and response by HMAC-SHA256 over a secret that all agents of one run
of the job share (Krawczyk, Bellare and Canetti, 1997): each side proves that it knows the secret,
on a nonce that the other side chose, before anything else is read. It keeps out port scanners and
agents of other jobs. It does not encrypt, and does not protect from changes of packets in transit;
neither do the job's own collectives.

    listener -> {"tierckpt": "peer", "protocol": 1, "nonce": ...}
    caller   -> {"protocol": 1, "nonce": ..., "proof": ...}
    listener -> {"proof": ...}  or  {"error": ...}

The address where an agent listens for its peers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tierckpt._process import boot_id
from tierckpt.errors import ConfigError, PeerError, RefusedError
from tierckpt.format.ids import Name

_SIOCGIFADDR = 0x8915
_NOT_IN_USE = 0x68
"""Flags of an IPv6 address: tentative, deprecated, or a duplicate of another machine's."""
_SOME_PORT = 9
"""Port of a datagram socket that sends nothing; any port would do."""


class Address(Name, frozen=True):
    """Host (a name or a numeric address, IPv4 or IPv6) and TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True when only this machine can reach the address. The host must be numeric."""
        return ipaddress.ip_address(self.host).is_loopback


def own_network() -> str:
    """Name of the network namespace of this process. A loopback address reaches the processes of
    the same namespace and no others: each container on a machine has its own loopback."""
    try:
        place = os.readlink("/proc/self/ns/net")
    except OSError:
        place = socket.gethostname()
    return f"{boot_id() or socket.gethostname()}/{place}"


def own_host(interface: str = "", towards: str = "localhost") -> str:
    """Numeric address for the agent to listen at.

    `interface` is the user's setting: the name of a network interface (its IPv4 address is taken,
    or else its global IPv6 address), or an address or host name of this machine. Empty: the address
    from which this machine reaches the host `towards`, where the job's ranks meet. Nothing is sent.

    Raises ConfigError when there is no such interface, no route to that host, or when other nodes
    could not use the address.
    """
    names = [name for _, name in socket.if_nameindex()]
    if interface in names:
        return address_of(interface)
    advice = f"set peer_interface to one of {', '.join(names)}, or an address"
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            interface or towards, _SOME_PORT, type=socket.SOCK_DGRAM
        )[0]
    except OSError as error:
        subject = (
            f"peer_interface={interface!r} is no interface and" if interface else f"{towards!r} is"
        )
        raise ConfigError(f"{subject} no known host: {error}; {advice}") from error
    if interface:
        _refuse_unusable(str(where[0]), advice)
    with socket.socket(family, kind, protocol) as probe:
        try:
            if interface:
                probe.bind((*where[:1], 0, *where[2:]))
            else:
                probe.connect(where)
        except OSError as error:
            subject = f"{interface!r} is no address of this machine" if interface else towards
            raise ConfigError(
                f"cannot find an address for the agents to meet at: {subject}: {error}; {advice}"
            ) from error
        found = str(probe.getsockname()[0])
    _refuse_unusable(found, advice)
    return found


def _refuse_unusable(host: str, advice: str) -> None:
    """Raise ConfigError for an address at which other machines could not find this one."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        raise ConfigError(
            f"{host} stands for all addresses; other nodes need a single one; {advice}"
        )
    if address.version == 6 and address.is_link_local:
        raise ConfigError(
            f"{host} is a link-local address, which means nothing to other machines; {advice}"
        )


def address_of(interface: str) -> str:
    """The interface's IPv4 address, or else its global IPv6 address. Raises ConfigError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError as error:
            if found := _global_ipv6(interface):
                return found
            raise ConfigError(
                f"peer_interface={interface!r} has neither an IPv4 nor a global IPv6 address "
                f"({error}); set another one, or an address"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _global_ipv6(interface: str) -> str:
    """The interface's first usable global IPv6 address; empty without one."""
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, _, _, scope, flags, name = line.split()
            if name == interface and scope == "00" and not int(flags, 16) & _NOT_IN_USE:
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return ""


PROTOCOL = 1
HELLO_SECONDS = 10.0
"""Limit of each step of a handshake."""
MAX_HEAD_BYTES = 4096
"""Limit of a JSON object."""
MAX_TEXT = 800
"""Characters of an error text that fit into a JSON object, whichever they are."""
MAX_RECORD_BYTES = 64 << 20
"""Limit of a manifest that a peer sends: about the length for a shard of 3 TB."""
WAKE_BYTES = 256 << 10
"""Wake a waiting receiver only when this number of raw bytes is there, or all that remain.
Otherwise the kernel wakes it for every few packets. On a slow link that costs more CPU than the
rest of an exchange, and the training needs the CPU."""
LOOK_SECONDS = 1.0
"""Interval at which a waiting receiver checks its progress: on a link this slow, a few bytes are
progress as well."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))
"""An idle connection to a node that vanished ends after two minutes."""


def no_excuse(silent_seconds: float) -> bool:
    """The default `excuse` of a link: never any."""
    return False


class Link:
    """A connected socket. One thread sends, one receives; both may be the same thread.

    A wait of `seconds` without a single byte of progress (None: no limit) raises a PeerError that
    names `peer`; so does a broken connection. Close the link then: it may be inside a frame.
    """

    def __init__(self, sock: socket.socket, peer: str, seconds: float | None) -> None:
        """Takes over `sock`; `peer` is the other side's name in errors."""
        self.peer = peer
        self.seconds = seconds
        self.excuse: Callable[[float], bool] = no_excuse
        """Called with the peer's silent seconds each time it has taken nothing for `seconds`; True
        gives it `seconds` more."""
        self._socket = sock
        self._low_water = 1
        self._closing = threading.Lock()
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # the other side may have closed already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def shut(self) -> None:
        """End the connection and wake all threads that wait on it. From any thread."""
        # The lock: after a concurrent close, the descriptor number could be another file's.
        with self._closing, contextlib.suppress(OSError):  # not connected any more, or closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Call `shut`, and release the descriptor: only when no other thread uses the link."""
        self.shut()
        with self._closing:
            self._socket.close()

    # --- sending -------------------------------------------------------------------------------

    def send(self, head: dict[str, Any], payload: memoryview | bytes = b"") -> None:
        """Send a frame. Blocks while the peer does not read, so nothing is queued in memory."""
        parts = [memoryview(_head(head, len(payload))), memoryview(payload)]
        with self._named():
            while parts:
                try:
                    sent = self._socket.sendmsg(parts)
                except BlockingIOError:
                    self._ready(select.POLLOUT, self.seconds, "took nothing", self.excuse)
                    continue
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if parts:
                    parts[0] = parts[0][sent:]

    def send_now(self, head: dict[str, Any]) -> None:
        """Send a frame only if possible at once, as a last message before `close`."""
        with contextlib.suppress(OSError):
            self._socket.send(_head(head, 0))

    # --- receiving -----------------------------------------------------------------------------

    def receive(self, wait_seconds: float | None) -> dict[str, Any]:
        """Head of the next frame; waits at most `wait_seconds` for it (None: no limit).

        Raises PeerError also for bytes that are no valid frame.
        """
        length = bytearray(4)
        self._fill(memoryview(length), wait_seconds)
        nbytes = int.from_bytes(length, "big")
        if not 0 < nbytes <= MAX_HEAD_BYTES:
            raise PeerError(f"{self.peer} sent an invalid frame: {bytes(length)!r}")
        text = bytearray(nbytes)
        self._fill(memoryview(text), self.seconds)
        try:
            head = json.loads(text)
            if type(head) is not dict or type(head.get("nbytes", 0)) is not int:
                raise ValueError("it is not an object with a length")
        except (ValueError, RecursionError) as error:
            raise PeerError(f"{self.peer} sent an invalid frame: {error}") from error
        return head

    def receive_into(self, view: memoryview, progress: Callable[[], None] = lambda: None) -> None:
        """Fill `view` with raw bytes of the frame; `progress` is called after every piece."""
        self._fill(view, self.seconds, progress)

    def receive_record(self, head: dict[str, Any]) -> bytes:
        """Raw bytes of a frame that carries a manifest or another record."""
        nbytes = head.get("nbytes", 0)
        if not 0 <= nbytes <= MAX_RECORD_BYTES:
            raise PeerError(f"{self.peer} sent a record of {nbytes} bytes, beyond the limit")
        record = bytearray(nbytes)
        self._fill(memoryview(record), self.seconds)
        return bytes(record)

    def idle(self) -> bool:
        """True when the connection is open and the other side has sent nothing. Never blocks."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _fill(
        self,
        view: memoryview,
        seconds: float | None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        silent_seconds = 0.0
        with self._named():
            while len(view):
                try:
                    count = self._socket.recv_into(view)
                except BlockingIOError:
                    silent_seconds = self._await_bytes(len(view), seconds, silent_seconds)
                    continue
                if not count:
                    raise ConnectionResetError("the other side closed it")
                view, silent_seconds = view[count:], 0.0
                progress()

    def _await_bytes(self, nbytes: int, seconds: float | None, silent_seconds: float) -> float:
        """Wait for some of `nbytes`, after `silent_seconds` without any; returns the new length of
        the silence in seconds."""
        if nbytes <= MAX_HEAD_BYTES:
            self._wake_at(1)
            self._ready(select.POLLIN, seconds, "sent nothing")
            return 0.0
        if seconds is not None and silent_seconds >= seconds:
            raise PeerError(f"{self.peer} sent nothing for {silent_seconds:.3g} s")
        self._wake_at(min(nbytes, WAKE_BYTES))
        look = LOOK_SECONDS if seconds is None else min(LOOK_SECONDS, seconds - silent_seconds)
        return 0.0 if self._poll(select.POLLIN, look) else silent_seconds + look

    def _wake_at(self, nbytes: int) -> None:
        """Make `poll` report the socket readable only from `nbytes` on, if the system can."""
        if nbytes != self._low_water:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
                self._low_water = nbytes

    def _ready(
        self,
        event: int,
        seconds: float | None,
        silence: str,
        excuse: Callable[[float], bool] = no_excuse,
    ) -> None:
        """Wait for an event. Raises PeerError after `seconds` and all extensions by `excuse`."""
        silent_seconds = 0.0
        while not self._poll(event, seconds):
            silent_seconds += seconds or 0.0
            if not excuse(silent_seconds):
                raise PeerError(f"{self.peer} {silence} for {silent_seconds:.3g} s")

    def _poll(self, event: int, seconds: float | None) -> bool:
        """True if the event came within `seconds` (None: no limit)."""
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(None if seconds is None else 1000 * max(seconds, 0)))

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: another thread closed the socket
            raise PeerError(f"{self.peer}: the connection broke: {error}") from error


def _head(head: dict[str, Any], nbytes: int) -> bytes:
    whole = {**head, "nbytes": nbytes} if nbytes else head
    text = json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
    return len(text).to_bytes(4, "big") + text


# --- handshake -----------------------------------------------------------------------------------


def reach(address: Address, seconds: float) -> Link:
    """A connection before its handshake. Raises PeerError when there is none in time."""
    try:
        sock = socket.create_connection((address.host, address.port), max(seconds, 0.01))
    except OSError as error:
        raise PeerError(f"{address} cannot be reached: {error}") from error
    return Link(sock, str(address), min(seconds, HELLO_SECONDS))


def greet(link: Link, secret: bytes, seconds: float = HELLO_SECONDS) -> None:
    """The caller's side of the handshake; each step of the listener may take `seconds`.

    Raises RefusedError when the listener belongs to another run, or speaks another protocol.
    """
    hello = link.receive(seconds)
    if hello.get("tierckpt") != "peer":
        raise RefusedError(f"{link.peer} is no agent: it says {hello}")
    if hello.get("protocol") != PROTOCOL:
        raise RefusedError(
            f"{link.peer} speaks protocol {hello.get('protocol')}, this agent {PROTOCOL}; "
            "install the same tierckpt on all nodes"
        )
    theirs, ours = str(hello.get("nonce")), secrets.token_hex(16)
    proof = _proof(secret, "caller", theirs, ours)
    link.send({"protocol": PROTOCOL, "nonce": ours, "proof": proof})
    answer = link.receive(seconds)
    if "error" in answer:
        raise RefusedError(f"{link.peer} refused us: {answer['error']}")
    if not _same(answer.get("proof"), _proof(secret, "listener", theirs, ours)):
        raise RefusedError(f"{link.peer} does not know the secret of this run of the job")


def admit(link: Link, *secrets_of_runs: bytes) -> bytes:
    """The listener's side of the handshake; returns the secret that the caller knows.

    Raises PeerError when the caller knows none. The caller receives the reason, and nothing else is
    read from it.
    """
    ours = secrets.token_hex(16)
    link.send({"tierckpt": "peer", "protocol": PROTOCOL, "nonce": ours})
    hello = link.receive(HELLO_SECONDS)
    if hello.get("protocol") != PROTOCOL:
        why = f"this agent speaks protocol {PROTOCOL}; install the same tierckpt on all nodes"
    else:
        theirs = str(hello.get("nonce"))
        for secret in secrets_of_runs:
            if _same(hello.get("proof"), _proof(secret, "caller", ours, theirs)):
                link.send({"proof": _proof(secret, "listener", ours, theirs)})
                return secret
        why = "it is an agent of another job, or of another run of this one"
    link.send_now({"error": why})
    raise RefusedError(f"{link.peer} was refused: {why}")


def _proof(secret: bytes, role: str, listener_nonce: str, caller_nonce: str) -> str:
    text = f"tierckpt peer {PROTOCOL} {role} {listener_nonce} {caller_nonce}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _same(said: object, proof: str) -> bool:
    return isinstance(said, str) and said.isascii() and hmac.compare_digest(said, proof)
