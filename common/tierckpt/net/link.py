"""Frames on one connection.

A frame is the length of a JSON object (4 bytes, big endian), the object, and as many raw bytes as
its member `nbytes` says; none without that member. Raw bytes go from and to the caller's own
memory: this module holds only the head of a frame.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tierckpt.errors import PeerError

from .addresses import Address
from .limits import HELLO_SECONDS, LOOK_SECONDS, MAX_HEAD_BYTES, MAX_RECORD_BYTES, PEERS, tend

__all__ = ["Head", "Link", "no_excuse", "reach"]


Head = dict[str, Any]
SMALL_BYTES = 4096
"""A receiver that waits for no more than that is woken by each packet."""
WAKE_BYTES = 256 << 10
"""Wake a waiting receiver only when this number of raw bytes is there, or all that remain.
Otherwise the kernel wakes it for every few packets. On a slow link that costs more CPU than the
rest of an exchange, and the training needs the CPU."""


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
        self.deadline: float | None = None
        """Time (monotonic) after which nothing is waited for, whatever has come."""
        self._socket = sock
        self._low_water = 1
        self._closing = threading.Lock()
        sock.setblocking(False)
        tend(sock, PEERS)

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

    def released(self) -> socket.socket:
        """The socket, for a user with frames of its own. The link has none any more: its listener,
        which may close at the same time, does not end the connection."""
        with self._closing:
            return socket.socket(fileno=self._socket.detach())

    # --- sending -------------------------------------------------------------------------------

    def send(self, head: Head, payload: memoryview | bytes = b"") -> None:
        """Send a frame. Blocks while the peer does not read, so nothing is queued in memory."""
        parts = [memoryview(_pack(head, len(payload))), memoryview(payload)]
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

    def send_now(self, head: Head) -> None:
        """Send a frame only if possible at once, as a last message before `close`."""
        with contextlib.suppress(OSError):
            self._socket.send(_pack(head))

    # --- receiving -----------------------------------------------------------------------------

    def receive(self, wait_seconds: float | None) -> Head:
        """Head of the next frame; waits at most `wait_seconds` for it (None: no limit).

        Raises PeerError also for bytes that are no valid frame.
        """
        length = bytearray(4)
        self._fill(memoryview(length), wait_seconds)
        try:
            text = bytearray(_length_of(length))
            self._fill(memoryview(text), self.seconds)
            return _parsed(text)
        except ValueError as error:
            raise PeerError(f"{self.peer} sent an invalid frame: {error}") from error

    def receive_into(self, view: memoryview, progress: Callable[[], None] = lambda: None) -> None:
        """Fill `view` with raw bytes of the frame; `progress` is called after every piece."""
        self._fill(view, self.seconds, progress)

    def receive_record(self, head: Head) -> bytes:
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
                    if self.deadline is not None and time.monotonic() >= self.deadline:
                        raise PeerError(f"{self.peer} took too long") from None
                    silent_seconds = self._await_bytes(len(view), seconds, silent_seconds)
                    continue
                if not count:
                    raise ConnectionResetError("the other side closed it")
                view, silent_seconds = view[count:], 0.0
                progress()

    def _await_bytes(self, nbytes: int, seconds: float | None, silent_seconds: float) -> float:
        """Wait for some of `nbytes`, after `silent_seconds` without any; returns the new length of
        the silence in seconds."""
        if nbytes <= SMALL_BYTES:
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
        if self.deadline is not None:
            left = self.deadline - time.monotonic()
            seconds = left if seconds is None else min(seconds, left)
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(None if seconds is None else 1000 * max(seconds, 0)))

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: another thread closed the socket
            raise PeerError(f"{self.peer}: the connection broke: {error}") from error


def _pack(head: Head, nbytes: int = 0) -> bytes:
    """A frame, up to its raw bytes."""
    whole = {**head, "nbytes": nbytes} if nbytes else head
    text = json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
    return len(text).to_bytes(4, "big") + text


def _length_of(prefix: bytes | bytearray) -> int:
    """Bytes of the object that follows. Raises ValueError."""
    nbytes = int.from_bytes(prefix, "big")
    if not 0 < nbytes <= MAX_HEAD_BYTES:
        raise ValueError(repr(bytes(prefix)))
    return nbytes


def _parsed(text: bytes | bytearray) -> Head:
    """The object. Raises ValueError."""
    try:
        head = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if type(head) is not dict or type(head.get("nbytes", 0)) is not int:
        raise ValueError("it is not an object with a length")
    return head


def reach(address: Address, seconds: float) -> Link:
    """A connection before its handshake. Raises PeerError when there is none in time."""
    try:
        sock = socket.create_connection((address.host, address.port), max(seconds, 0.01))
    except OSError as error:
        raise PeerError(f"{address} cannot be reached: {error}") from error
    return Link(sock, str(address), min(seconds, HELLO_SECONDS))
