"""The way of a shim to rank 0's: found and dialled in a process of its own, then one connection."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from tierckpt.run import process

from . import meeting
from .channel import Connection, Message


class Link:
    """One rank's or spare's end. Main thread; the selector holds its sockets."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        handlers: process.Handlers,
        obey: Callable[[Message], None],
        ended: Callable[[bool], None],
    ) -> None:
        """`obey` takes the messages of rank 0's shim; `ended` is called at the end of the
        connection with True, and with False if none could be made."""
        self._selector, self._handlers = selector, handlers
        self._obey, self._ended = obey, ended
        self._connection: Connection | None = None
        self.helper: int | None = None
        """The process that dials."""

    @property
    def is_open(self) -> bool:
        """True if there is a connection."""
        return self._connection is not None

    def dial(self, where: meeting.Meeting, hello: Message) -> None:
        """Connect, in the background."""
        self.helper, answer = meeting.connect(where, hello, self._handlers)
        self._selector.register(answer, selectors.EVENT_READ, lambda: self._dialled(answer))

    def _dialled(self, answer: socket.socket) -> None:
        self._selector.unregister(answer)
        stream = meeting.received(answer)
        self.end_helper()
        if stream is None:
            self._ended(False)
            return
        self._connection = Connection(stream)
        self._selector.register(self._connection, selectors.EVENT_READ, self._receive)

    def end_helper(self) -> None:
        """End the process that dials, if there is one."""
        pid, self.helper = self.helper, None
        if pid is not None:
            process.kill_one(pid)

    def _receive(self) -> None:
        connection = self._connection
        assert connection is not None
        descriptor = connection.fileno()
        for message in connection.receive():
            self._obey(message)
        if not connection.is_open:
            self._selector.unregister(descriptor)
            self._connection = None
            self._ended(True)

    def send(self, message: Message) -> None:
        """Send a message, if there is a connection."""
        if self._connection is not None:
            self._connection.send(message)


__all__ = ["Link"]
