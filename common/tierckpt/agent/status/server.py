"""Answers to watchers, in the agent's process."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

from tierckpt.agent import protocol
from tierckpt.agent.address import _peer_uid
from tierckpt.agent.protocol import AgentStatus

SEND_SECONDS = 1.0
"""A watcher that does not read its answer within this time is hung up on."""


class StatusServer:
    """Sends the agent's status to each connection, and closes it. In a thread of its own, which
    sleeps while no one asks. Owns `listener`."""

    def __init__(self, listener: socket.socket, status: Callable[[], AgentStatus]) -> None:
        """Begin to answer. `status` is called in the other thread. Raises RuntimeError if no thread
        can be started."""
        self._listener, self._status = listener, status
        thread = threading.Thread(target=self._serve, name="tierckpt-status", daemon=True)
        thread.start()

    def close(self) -> None:
        """Stop answering. Does not wait."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread up
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                channel, _ = self._listener.accept()
            except OSError:
                return
            with channel, contextlib.suppress(Exception):  # any failure costs this answer only
                channel.settimeout(SEND_SECONDS)
                if _peer_uid(channel) == os.getuid():
                    protocol.send(channel, self._status())


__all__ = ["StatusServer"]
