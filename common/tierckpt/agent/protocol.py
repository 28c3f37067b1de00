"""Messages between trainers and their agent: JSON objects, over a socket that keeps packets whole.

A socket takes no packet that is longer than its buffer, and cuts one that is longer than what is
read at once; what is said of many ranks may be. So a long message goes as several packets, each of
which begins with a byte that says whether it is the last.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

PART_BYTES = 4000
"""Of a message in one packet: what the smallest buffer that Linux gives a socket has room for."""
PACKET_BYTES = 1 + PART_BYTES
_MORE, _LAST = b"+", b"."
"""A whole message begins with a brace."""


def packets_of(message: Mapping[str, Any]) -> list[bytes]:
    """What to send, in this order, with no other message's packets between."""
    data = json.dumps(message).encode()
    if len(data) <= PART_BYTES:
        return [data]
    parts = [data[low : low + PART_BYTES] for low in range(0, len(data), PART_BYTES)]
    return [*(_MORE + part for part in parts[:-1]), _LAST + parts[-1]]


class Joiner:
    """Makes messages of the packets of one connection, as they come. One thread."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, packet: bytes) -> dict[str, Any] | None:
        """The message that `packet` completes, if it does. Raises ValueError for what is none."""
        kind, part = packet[:1], packet[1:]
        if kind == _MORE:
            self._parts.append(part)
            return None
        data = b"".join([*self._parts, part]) if kind == _LAST else packet
        self._parts = []
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError("a message is an object")
        return message


def send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    """Over a channel that blocks; one thread at a time. Raises OSError."""
    for packet in packets_of(message):
        channel.send(packet)


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Wait for a message, and the descriptors that come with it; None when the other end is closed.

    Over a channel that blocks. Raises OSError, and ValueError for what is no message.
    """
    joiner, descriptors = Joiner(), list[int]()
    while True:
        try:
            packet, passed, _, _ = socket.recv_fds(channel, PACKET_BYTES, 1)
        except ConnectionResetError:  # it was closed with answers unread, and that is said once,
            continue  # before what was sent over it
        descriptors += passed
        if not packet:
            return None, descriptors
        message = joiner.add(packet)
        if message is not None:
            return message, descriptors


__all__ = ["PACKET_BYTES", "Joiner", "packets_of", "receive", "send"]
