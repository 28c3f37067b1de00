"""Packets between trainers and their agent, over a socket that keeps packets whole.

A socket takes no packet that is longer than its buffer, and cuts one that is longer than what is
read at once; a message about many ranks may be longer. So a long message goes as several packets,
each of which begins with a byte that says whether it is the last. A message in one packet begins
with a brace.
"""

from __future__ import annotations

PART_BYTES = 4000
"""The part of a message in one packet: the smallest buffer that Linux gives a socket takes it."""
PACKET_BYTES = 1 + PART_BYTES
_MORE, _LAST = b"+", b"."


def split(data: bytes) -> list[bytes]:
    """The packets of a message, to be sent in this order, with no other packet between them."""
    if len(data) <= PART_BYTES:
        return [data]
    parts = [data[low : low + PART_BYTES] for low in range(0, len(data), PART_BYTES)]
    return [*(_MORE + part for part in parts[:-1]), _LAST + parts[-1]]


class PacketJoiner:
    """Makes messages of the packets of one connection, in their order. One thread."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, packet: bytes) -> bytes | None:
        """The message that `packet` completes; None when more packets must follow."""
        kind, part = packet[:1], packet[1:]
        if kind == _MORE:
            self._parts.append(part)
            return None
        data = b"".join([*self._parts, part]) if kind == _LAST else packet
        self._parts = []
        return data


__all__ = ["PACKET_BYTES", "PacketJoiner", "split"]
