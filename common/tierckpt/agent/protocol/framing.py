"""Packets between trainers and their agent, over a socket that keeps packets whole.

A socket accepts no packet longer than its buffer, and truncates a packet longer than one read. A
message about many ranks may be longer. So a long message is sent as several packets, each of which
starts with a byte that marks it as the last or not. A message in one packet starts with a brace.
"""

from __future__ import annotations

PART_BYTES = 4000
"""Bytes of a message in one packet; the smallest buffer that Linux gives a socket can take it."""
PACKET_BYTES = 1 + PART_BYTES
_MORE, _LAST = b"+", b"."


def split(data: bytes) -> list[bytes]:
    """Return the packets of a message, to be sent in this order and without others in between."""
    if len(data) <= PART_BYTES:
        return [data]
    parts = [data[low : low + PART_BYTES] for low in range(0, len(data), PART_BYTES)]
    return [*(_MORE + part for part in parts[:-1]), _LAST + parts[-1]]


class PacketJoiner:
    """Joins the packets of one connection, in their order, to messages. One thread."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, packet: bytes) -> bytes | None:
        """Return the message that `packet` completes; None when more packets must follow."""
        kind, part = packet[:1], packet[1:]
        if kind == _MORE:
            self._parts.append(part)
            return None
        data = b"".join([*self._parts, part]) if kind == _LAST else packet
        self._parts = []
        return data


__all__ = ["PACKET_BYTES", "PacketJoiner", "split"]
