"""Messages between the shims of a job: JSON lines over a stream socket."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

MOST_BYTES = 1 << 20
KEEPALIVE = (
    *((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 5)),
    (socket.TCP_USER_TIMEOUT, 15_000),
)
"""A peer that is gone without a word is noticed after 15 s, as by torchrun."""
Message = dict[str, Any]


class Connection:
    """One end; owns the socket. Nothing blocks and nothing raises: a broken connection is
    closed."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream, self._buffer = stream, b""
        self.peer = "this machine"
        """The host at the other end."""
        if stream.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # gone already
                self.peer = str(stream.getpeername()[0]).removeprefix("::ffff:")
        self.is_open = True
        stream.setblocking(False)
        if stream.family != socket.AF_UNIX:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE:
                stream.setsockopt(socket.IPPROTO_TCP, name, value)

    def fileno(self) -> int:
        """The descriptor; -1 once closed."""
        return self._stream.fileno()

    def send(self, message: Message) -> None:
        """Send a message, small enough for the socket's buffer."""
        data = json.dumps(message).encode() + b"\n"
        try:
            whole = self._stream.send(data) == len(data)
        except OSError:
            whole = False
        if not whole:  # the reader finds the end
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[Message]:
        """The messages that have arrived. At the end of the stream the connection is closed."""
        try:
            while len(self._buffer) < MOST_BYTES:
                more = self._stream.recv(65536)
                if not more:
                    self.close()
                    break
                self._buffer += more
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        *lines, self._buffer = self._buffer.split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:  # a stranger
            found = [None]
        if len(self._buffer) >= MOST_BYTES or not all(isinstance(each, dict) for each in found):
            self.close()
            return []
        return found

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        with contextlib.suppress(OSError):
            self._stream.close()


__all__ = ["Connection", "Message"]
