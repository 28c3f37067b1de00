"""Messages between trainers and their agent are whole, however long they are."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.agent import protocol
from tierckpt.agent.protocol import PACKET_BYTES, Joiner, packets_of


@given(st.lists(st.text('+.{}"é', max_size=3 * PACKET_BYTES // 2), max_size=6))
def test_what_is_taken_apart_is_joined_again(texts: list[str]) -> None:
    joiner, heard = Joiner(), []
    for text in texts:
        parts = packets_of({"op": text})
        assert all(len(part) <= PACKET_BYTES for part in parts)
        said = [message for part in parts if (message := joiner.add(part)) is not None]
        assert said == [{"op": text}], "with its last packet, not before"
        heard += said
    assert [message["op"] for message in heard] == texts


@pytest.mark.parametrize("garbage", [b"{", b"[]", b"\xff", b".", b".}", b"nothing"])
def test_garbage_is_told(garbage: bytes) -> None:
    with pytest.raises(ValueError, match=r"object|Expecting|decode"):
        Joiner().add(garbage)


@pytest.mark.parametrize("nbytes", [10, 10 * PACKET_BYTES])
def test_descriptors_come_with_their_message(nbytes: int) -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, ours:
        message = {"op": "x" * nbytes}
        first, *more = packets_of(message)
        socket.send_fds(theirs, [first], [ours.fileno()])
        for packet in more:
            theirs.send(packet)
        heard, (descriptor,) = protocol.receive(ours)
        os.close(descriptor)
        assert heard == message
        theirs.shutdown(socket.SHUT_WR)
        assert protocol.receive(ours) == (None, [])


def test_the_smallest_buffer_has_room_for_a_packet() -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    message, heard = {"op": "x" * (1 << 20)}, list[Any]()
    with theirs, ours:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        listener = threading.Thread(target=lambda: heard.append(protocol.receive(ours)))
        listener.start()
        protocol.send(theirs, message)
        listener.join()
    assert heard == [(message, [])]
