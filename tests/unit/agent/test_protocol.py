"""Messages between trainers and their agent are whole and typed, however long they are."""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.facts import facts_of
from tierckpt.agent import (
    PROTOCOL,
    AskProgress,
    Bye,
    Commit,
    CommitFailed,
    Flush,
    FlushOrder,
    Hello,
    ListenSettings,
    Message,
    PersistentSettings,
    Problem,
    Retire,
    SessionSettings,
    encode_message,
    receive_message,
    send_message,
    version_of,
)
from tierckpt.agent.protocol import PACKET_BYTES, PacketJoiner, decode, packets_of
from tierckpt.format import ShardKey, VersionId

IDS = st.builds(VersionId, st.integers(0, 99), st.integers(0, 10**9))
KEYS = st.builds(ShardKey, IDS, st.integers(0, 99), st.integers(100, 10**5))
st.register_type_strategy(ShardKey, KEYS)
st.register_type_strategy(VersionId, IDS)
st.register_type_strategy(float, st.floats(allow_nan=False))
MESSAGES = st.one_of(*(st.builds(kind) for kind in get_args(Message)))
PERSISTENT = PersistentSettings("/far", every_steps="auto", storage_options='{"key": "hidden"}')
SESSION = SessionSettings("/disk", 0, 2, "2", PERSISTENT)

# --- bytes ---------------------------------------------------------------------------------------


@given(MESSAGES)
def test_every_message_keeps_all_types_through_encoding(message: Message) -> None:
    again = decode(encode_message(message))
    assert again == message
    assert repr(again) == repr(message), "no list for a tuple, no int for a float"


@given(MESSAGES, st.data())
def test_a_message_that_lacks_a_field_is_refused_by_name(message: Message, data: Any) -> None:
    values = json.loads(encode_message(message))
    gone = data.draw(st.sampled_from(sorted(values)))
    del values[gone]
    data_without = json.dumps(values).encode()
    needed = type(message).__struct_fields__[: -len(type(message).__struct_defaults__) or None]
    if gone == "op" or (gone in needed and not isinstance(message, Hello)):
        with pytest.raises(ValueError, match="unknown message None" if gone == "op" else gone):
            decode(data_without)
    else:  # it has a default, or is another protocol's greeting
        assert type(decode(data_without)) is type(message)


VALID = json.loads(encode_message(Commit(ShardKey(VersionId(1, 7), 0, 1), None)))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"{", "Expecting property name"),
        (b"[]", "a message is a JSON object"),
        (b"\xff", "decode"),
        (b"nothing", "Expecting value"),
        ({}, "unknown message None"),
        ({"op": "no_such"}, "unknown message 'no_such'"),
        ({"op": ["commit"]}, "unknown message"),
        ({"op": "commit"}, "message 'commit': Object missing required field `key`"),
        ({**VALID, "more": 1}, "message 'commit': Object contains unknown field `more`"),
        ({**VALID, "key": "v7"}, r"message 'commit': Expected `object`, got `str` .*\$.key"),
        ({**VALID, "segment": 3}, r"'commit': Expected `str \| null`, got `int` .*\$.segment"),
        ({"op": "bye", "abandoned": 1}, r"'bye': Expected `bool`, got `int` .*\$.abandoned"),
        ({"op": "protect", "id": [1], "lost": None}, r"'protect': Expected `array` of length 2"),
        ({"op": "protect", "id": [1, True]}, r"'protect': Expected `int`, got `bool` .*\$.id"),
        ({"op": "flush", "order": []}, r"'flush': Expected `object`, got `array` .*\$.order"),
        ({"op": "flush", "order": {}}, r"'flush': .* missing required field .*\$.order"),
    ],
)
def test_an_invalid_message_is_refused_with_the_reason(data: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode(data if isinstance(data, bytes) else json.dumps(data).encode())


def test_an_error_shows_no_value_that_may_be_secret() -> None:
    values = json.loads(encode_message(Hello(PROTOCOL, SESSION)))
    retire = {"op": "retire", "safe": "a secret", "lineage": []}
    with pytest.raises(ValueError, match=r"Expected `array \| null`, got `str` .*safe") as error:
        decode(json.dumps(retire).encode())
    assert "a secret" not in str(error.value)
    assert "/far" not in repr(SESSION), "its options may be secret"
    assert "hidden" not in repr(PERSISTENT)
    assert "the key" not in repr(ListenSettings("the key", "lo", 0, "node1"))
    assert values["session"]["persistent"]["path"] == "/far"


@pytest.mark.parametrize(
    ("hello", "understood"),
    [
        ({}, Hello(None, None)),
        ({"protocol": 4, "desk": {}, "surroundings": "x", "began": 1.0}, Hello(4, None)),
        ({"protocol": "6", "session": {"shard": 0}}, Hello(None, None)),
        ({"protocol": 6, "began_seconds": 2, "environment": "x"}, Hello(6, None, "x", 2.0)),
        ({"protocol": 6, "environment": None, "more": 1}, Hello(6, None)),
    ],
)
def test_a_greeting_of_another_protocol_is_understood_as_far_as_possible(
    hello: dict[str, Any], understood: Hello
) -> None:
    assert decode(json.dumps({"op": "hello", **hello}).encode()) == understood


def test_the_version_that_a_message_is_about() -> None:
    id_ = VersionId(1, 7)
    order = FlushOrder("/d", (0,), facts_of(id_), 1, "here")
    for message in (Commit(ShardKey(id_, 0, 1), None), Flush(order), CommitFailed(id_, "")):
        assert version_of(message) == id_
    for other in (AskProgress(), Bye(), Problem(""), Retire(id_, ())):
        assert version_of(other) is None


# --- packets -------------------------------------------------------------------------------------


@given(st.lists(st.text('+.{}"é', max_size=3 * PACKET_BYTES // 2), max_size=6))
def test_a_message_in_pieces_is_joined_again(texts: list[str]) -> None:
    joiner, heard = PacketJoiner(), []
    for text in texts:
        parts = packets_of(Problem(text))
        assert all(len(part) <= PACKET_BYTES for part in parts)
        said = [decode(data) for part in parts if (data := joiner.add(part)) is not None]
        assert said == [Problem(text)], "with its last packet, not before"
        heard += said
    assert heard == [Problem(text) for text in texts]


@pytest.mark.parametrize("garbage", [b"{", b"[]", b"\xff", b".", b".}", b"nothing"])
def test_garbage_costs_itself_and_no_descriptor(garbage: bytes) -> None:
    """The next message is received normally."""
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, ours:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(theirs, [garbage], [ours.fileno()])
        with pytest.raises(ValueError, match=r"object|Expecting|decode"):
            receive_message(ours)
        assert len(os.listdir("/proc/self/fd")) == before
        send_message(theirs, Bye())
        assert receive_message(ours) == (Bye(), [])


@pytest.mark.parametrize("nbytes", [10, 10 * PACKET_BYTES])
def test_descriptors_come_with_their_message(nbytes: int) -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, ours:
        message = Problem("x" * nbytes)
        first, *more = packets_of(message)
        socket.send_fds(theirs, [first], [ours.fileno()])
        for packet in more:
            theirs.send(packet)
        heard, (descriptor,) = receive_message(ours)
        os.close(descriptor)
        assert heard == message
        theirs.shutdown(socket.SHUT_WR)
        assert receive_message(ours) == (None, [])


def test_the_smallest_buffer_has_room_for_a_packet() -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    message, heard = Problem("x" * (1 << 20)), list[Any]()
    with theirs, ours:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        listener = threading.Thread(target=lambda: heard.append(receive_message(ours)))
        listener.start()
        send_message(theirs, message)
        listener.join()
    assert heard == [(message, [])]
