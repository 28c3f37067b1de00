"""Messages to bytes and back: JSON objects whose types are those of the dataclasses' fields.

`op` names the message. A VersionId is written as [generation, version], a ShardKey as its stem, a
tuple as a list. Anything that is not exactly a message raises ValueError that names the field, so
no other module has to check it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tierckpt.format.ids import ShardKey, VersionId

from .framing import PACKET_BYTES, PacketJoiner, split
from .messages import Hello, Message

Reader = Callable[[Any], Any]


def _op_of(kind: type[Any]) -> str:
    """Return a message's `op`: `commit_failed` for CommitFailed."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


_KINDS: dict[str, Any] = {_op_of(kind): kind for kind in get_args(Message)}


# --- to bytes ------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """Return the message as JSON, with its `op`."""
    return json.dumps({"op": _op_of(type(message)), **_plain(message)}).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, VersionId):
        return [value.generation, value.version]
    if isinstance(value, ShardKey):
        return value.stem
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


# --- from bytes ----------------------------------------------------------------------------------


def decode(data: bytes) -> Message:
    """Read a message that `encode` made. Raises ValueError with the reason for anything else: no
    JSON object, an unknown `op`, a field that is missing, unknown, or of the wrong type.

    A `Hello` is read whatever its protocol is: unknown fields are left out.
    """
    values = json.loads(data)
    if not isinstance(values, dict):
        raise ValueError("a message is a JSON object")
    op = values.pop("op", None)
    kind = _KINDS.get(op) if isinstance(op, str) else None
    if kind is None:
        raise ValueError(f"unknown message {op!r}")
    if kind is Hello:
        return _hello(values)
    try:
        message: Message = _reader(kind)(values)
    except ValueError as error:
        raise ValueError(f"message {op!r}: {error}") from None
    return message


def _hello(values: dict[str, Any]) -> Hello:
    found: dict[str, Any] = {"protocol": None, "session": None}
    for name, kind in get_type_hints(Hello).items():
        with contextlib.suppress(ValueError, KeyError):
            found[name] = _reader(kind)(values[name])
    return Hello(**found)


@functools.cache
def _reader(kind: Any) -> Reader:
    """Return the function that makes a value of type `kind` of its JSON, or raises ValueError."""
    if kind is VersionId:
        return _version_id
    if kind is ShardKey:
        return _shard_key
    if is_dataclass(kind):
        return _record_reader(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union_reader(kind, arguments)
    if origin is Literal:
        return _check(lambda value: value in arguments, f"one of {arguments}")
    if origin is tuple:
        return _tuple_reader(arguments)
    if kind is types.NoneType:
        return _check(lambda value: value is None, "null")
    if kind is float:
        number = _check(lambda value: type(value) in (int, float), "a number")
        return lambda value: float(number(value))
    if kind in (int, str, bool):
        return _check(lambda value: type(value) is kind, f"of type {kind.__name__}")
    raise TypeError(f"a message cannot have a field of type {kind}")


def _check(fits: Callable[[Any], bool], what: str) -> Reader:
    def read(value: Any) -> Any:
        if not fits(value):
            raise ValueError(f"{_shown(value)} is not {what}")
        return value

    return read


def _shown(value: Any) -> str:
    """Describe a value without showing it: it may be long, or secret."""
    return f"a value of type {type(value).__name__}"


def _version_id(value: Any) -> VersionId:
    generation, version = _reader(tuple[int, int])(value)
    return VersionId(generation, version)


def _shard_key(value: Any) -> ShardKey:
    key = ShardKey.parse(value) if isinstance(value, str) else None
    if key is None:
        raise ValueError(f"{_shown(value)} is not a shard's name")
    return key


def _tuple_reader(arguments: tuple[Any, ...]) -> Reader:
    if arguments[-1] is Ellipsis:
        each = _reader(arguments[0])
        return lambda value: tuple(map(each, _list(value)))
    readers = [_reader(argument) for argument in arguments]

    def read(value: Any) -> Any:
        if len(_list(value)) != len(readers):
            raise ValueError(f"a list of {len(value)} is not one of {len(readers)}")
        return tuple(reader(item) for reader, item in zip(readers, value, strict=True))

    return read


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{_shown(value)} is not a list")
    return value


def _union_reader(kind: Any, arguments: tuple[Any, ...]) -> Reader:
    if types.NoneType in arguments and len(arguments) == 2:
        reader = _reader(next(each for each in arguments if each is not types.NoneType))
        return lambda value: None if value is None else reader(value)
    readers = [_reader(argument) for argument in arguments]

    def read(value: Any) -> Any:
        for reader in readers:
            with contextlib.suppress(ValueError):
                return reader(value)
        raise ValueError(f"{_shown(value)} is not {kind}")

    return read


def _record_reader(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    readers = {each.name: _reader(hints[each.name]) for each in fields(kind)}
    needed = {each.name for each in fields(kind) if each.default is MISSING}

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{_shown(value)} is not an object")
        if not needed <= value.keys() <= readers.keys():
            lacks, more = sorted(needed - value.keys()), sorted(value.keys() - readers.keys())
            raise ValueError(f"{kind.__name__} lacks {lacks}, and has {more} that it should not")
        found = {}
        for name, item in value.items():
            try:
                found[name] = readers[name](item)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return kind(**found)

    return read


# --- over a socket -------------------------------------------------------------------------------


def packets_of(message: Message) -> list[bytes]:
    """Return the packets to send, in this order and without other messages' packets in between."""
    return split(encode(message))


def send(channel: socket.socket, message: Message) -> None:
    """Send a message over a blocking channel; one thread at a time. Raises OSError."""
    for packet in packets_of(message):
        channel.send(packet)


def receive(channel: socket.socket) -> tuple[Message | None, list[int]]:
    """Wait for a message and the descriptors that come with it; None when the other end is closed.

    The channel must be blocking. Raises OSError, and ValueError for an invalid message, after which
    the next call goes on. Where it raises, it leaves no descriptor open.
    """
    joiner, descriptors = PacketJoiner(), list[int]()
    try:
        while True:
            try:
                packet, passed, _, _ = socket.recv_fds(channel, PACKET_BYTES, 1)
            except ConnectionResetError:  # closed with answers unread: the kernel reports that
                continue  # once, before what was sent
            descriptors += passed
            if not packet:
                return None, descriptors
            data = joiner.add(packet)
            if data is not None:
                return decode(data), descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


__all__ = ["decode", "encode", "packets_of", "receive", "send"]
