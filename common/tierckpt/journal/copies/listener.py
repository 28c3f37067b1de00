"""Listener: the port at which a rank waits for the connection of its ward.

Callers are admitted side by side, each on a thread of its own: a stranger that connects and says
nothing must not keep the ward waiting.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from tierckpt.errors import PeerError
from tierckpt.peer.address import Address
from tierckpt.peer.wire import HELLO_SECONDS, Link, admit

LOOK_SECONDS = 0.2
MOST_UNVERIFIED = 32
"""Limit of callers that have not proved yet that they know the secret; more are turned away."""


class WardListener:
    """Owns a port, and a thread that accepts callers. Any thread may call any method."""

    def __init__(self, host: str, ward: int, secret: Callable[[], bytes]) -> None:
        """Listen at `host` for the rank `ward`, which knows the `secret`. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.address = Address(host, self._listener.getsockname()[1])
        self._ward, self._secret = ward, secret
        self._changed = threading.Condition()
        self._callers: dict[threading.Thread, Link] = {}
        """Callers that are being admitted."""
        self._newest: Link | None = None
        """The ward's newest connection, if nobody has taken it yet."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tierckpt-ward", daemon=True)
        self._thread.start()

    def take(self, deadline: float) -> Link:
        """Return the ward's newest connection, which is the caller's then; waits for one. Raises
        PeerError after the `deadline`, or when the listener is closed."""
        with self._changed:
            while self._newest is None and not self._closed:
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
            link, self._newest = self._newest, None
        if link is None:
            raise PeerError(f"rank {self._ward} did not connect in time")
        return link

    def close(self) -> None:
        """Listen no more, wake a `take`, and end all threads. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._changed:
            callers = dict(self._callers)
            for link in callers.values():
                link.shut()
        for thread in callers:
            thread.join()
        self._offer(None)

    def _run(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(LOOK_SECONDS)  # out of descriptors: it may pass
                continue
            link = Link(sock, f"rank {self._ward}", HELLO_SECONDS)
            thread = threading.Thread(target=self._meet, args=(link,), daemon=True)
            with self._changed:
                admitted = len(self._callers) < MOST_UNVERIFIED
                if admitted:
                    self._callers[thread] = link
            try:
                if admitted:
                    thread.start()
            except RuntimeError:  # out of threads: it may pass
                admitted = False
                self._forget(thread)
            if not admitted:
                link.close()

    def _meet(self, link: Link) -> None:
        """The thread of a caller."""
        known = False
        with contextlib.suppress(PeerError):
            admit(link, self._secret())
            hello = link.receive(HELLO_SECONDS)
            known = (hello.get("op"), hello.get("rank")) == ("journal", self._ward)
        self._forget(threading.current_thread())
        if known:
            self._offer(link)
        else:
            link.close()

    def _forget(self, thread: threading.Thread) -> None:
        with self._changed:
            self._callers.pop(thread, None)

    def _offer(self, link: Link | None) -> None:
        """Put this connection in the place of one that nobody has taken."""
        with self._changed:
            if self._closed and link is not None:
                link.close()
                return
            link, self._newest = self._newest, link
            self._changed.notify_all()
        if link is not None:
            link.close()


__all__ = ["WardListener"]
