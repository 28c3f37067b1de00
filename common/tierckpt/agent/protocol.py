"""The protocol between trainers and their node's agent: typed messages, as JSON, in whole packets.

Each message is a frozen record, and so are the values that messages carry. A trainer sends
`Hello` first, and the agent answers with `Welcome`, or with `ShuttingDown`, `Outdated` or
`Unwelcome`, after which it closes the connection. Orders and answers follow in both directions. A
trainer sends `Bye` last, and the agent `Finished`, when its work for this trainer is done. End of
file from a trainer without a `Bye` means that it was killed. `AgentStatus` is for processes
outside the job.

Encoding: a message is a JSON object with the types of the record's fields. `op` names the message.
A VersionId is written as [generation, version], a tuple as a list. Anything but a message raises
ValueError that names the field, so no other module has to check it.

Packets: the socket keeps packets whole. It accepts no packet longer than its buffer, and truncates
a packet longer than one read. A message about many ranks may be longer. So a long message is sent
as several packets, each of which starts with a byte that marks it as the last or not. A message in
one packet starts with a brace.

Neither torch nor numpy is imported here, as both sides and the agent's start use it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
from collections.abc import Iterable
from typing import Any, ClassVar, get_args, get_type_hints

from msgspec import Struct, ValidationError, convert, to_builtins

from tierckpt._text import repr_without
from tierckpt.config import PersistentConfig
from tierckpt.core.levels import LOCAL, PEER, PERSISTENT, Level
from tierckpt.format.ids import Lineage, ShardKey, VersionId, VersionName
from tierckpt.format.manifest import digest
from tierckpt.format.records import VersionFacts

__all__ = [
    "PACKET_BYTES",
    "PROTOCOL",
    "AgentAddress",
    "AgentMessage",
    "AgentStatus",
    "AskProgress",
    "Bye",
    "Cleaned",
    "Commit",
    "CommitFailed",
    "Committed",
    "Finished",
    "Flush",
    "FlushFailed",
    "FlushOrder",
    "Flushed",
    "Forward",
    "Hello",
    "Inherit",
    "Introduce",
    "KnownNodes",
    "LevelStatus",
    "Listen",
    "ListenFailed",
    "ListenSettings",
    "Listening",
    "Mark",
    "Message",
    "NotStored",
    "Outdated",
    "PacketJoiner",
    "PartySettings",
    "PersistentSettings",
    "Problem",
    "Progress",
    "Protect",
    "ProtectFailed",
    "Protected",
    "Retire",
    "ServedPlaces",
    "SessionSettings",
    "ShuttingDown",
    "StageFailed",
    "Staged",
    "Stored",
    "TaskStatus",
    "TrainerMessage",
    "Unwelcome",
    "Welcome",
    "decode",
    "encode",
    "failed",
    "packets_of",
    "receive",
    "send",
    "split_packets",
    "version_of",
]


PART_BYTES = 4000
"""Bytes of a message in one packet; the smallest buffer that Linux gives a socket can take it."""
PACKET_BYTES = 1 + PART_BYTES
_MORE, _LAST = b"+", b"."


def split_packets(data: bytes) -> list[bytes]:
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


class _Record(Struct, frozen=True, forbid_unknown_fields=True):
    """A message, or a value that messages carry."""


class TaskStatus(_Record, frozen=True):
    """A version on its way to a level."""

    level: str
    id: VersionId
    began_seconds: float
    """Unix time."""
    shard: int | None = None
    """None: all shards of the node."""
    done_bytes: int = 0
    total_bytes: int = 0
    """Upper bound; 0 while it is unknown."""


class LevelStatus(_Record, frozen=True):
    """The results of an agent's work for one level, since the agent started."""

    level: str
    stored: int = 0
    """Number of results: one for each shard on local, one for each version on other levels."""
    failed: int = 0
    superseded: int = 0
    """Number of versions that were given up for newer ones."""
    stored_bytes: int = 0
    waiting: int = 0
    """Number of versions that wait for their turn."""
    newest: VersionId | None = None
    """The newest version of which this node's part was stored."""
    newest_at_seconds: float = 0.0
    """Unix time when it was stored."""
    last_bytes: int = 0
    """Bytes of the last result."""
    last_seconds: float = 0.0
    """Seconds that the last result took."""
    last_failure: str = ""
    """Version and reason of the last failure."""


class AgentStatus(_Record, frozen=True):
    """What an agent does, and has done since its start."""

    pid: int
    host: str
    began_seconds: float
    """Unix time."""
    trainers: tuple[int, ...]
    """Ranks that are connected."""
    awaited: tuple[int, ...]
    """Ranks that were killed and may come back."""
    shutting_down: bool
    quiet_seconds: float
    """Time since the flush under way last proceeded; 0.0: none is under way."""
    tasks: tuple[TaskStatus, ...]
    levels: tuple[LevelStatus, ...]
    local_quiet_seconds: float = 0.0
    """Time since the slowest order for the local level last proceeded; 0.0: none is under way."""


Mark = tuple[int, str]
"""A generation and a digest: they distinguish lists of nodes, and order them by age."""


class PersistentSettings(PersistentConfig, frozen=True, forbid_unknown_fields=True):
    """The persistent level's settings, and which of the job's nodes this one is."""

    node: int = 0


class SessionSettings(_Record, frozen=True):
    """One trainer: its shard, its local level and the rules for its shards there."""

    directory: str
    """The directory of the local level."""
    shard: int
    shards: int
    keep: str = "2"
    """Which versions stay on the local level; see `config.RetentionPolicy`."""
    persistent: PersistentSettings | None = None
    """The persistent level, if there is one; its settings may hold secrets."""
    codecs: str = ""
    """The codecs of the local level; see `codecs.codec`."""
    ranks: tuple[int, ...] = ()
    """The job's ranks on this node; the first one's session handles shards without a session."""
    stages: tuple[str, ...] = ()
    """The stages of the setting, each with its argument."""
    trace_dir: str = ""
    """Where the agent records the cores in use (see `UsageSampler`); empty: nowhere."""

    def __repr__(self) -> str:
        return repr_without(self, "persistent")

    @property
    def first(self) -> bool:
        """Whether the trainer is the node's first rank."""
        return self.ranks[:1] == (self.shard,)

    @property
    def speaks(self) -> bool:
        """Whether the trainer speaks for the node: it is `first`, or its ranks are not known."""
        return self.first or not self.ranks


class FlushOrder(_Record, frozen=True):
    """One version complete on the local level of all ranks. Alike on all nodes, except
    `directory`, `here` and `node`."""

    directory: str
    """The directory of the local level."""
    here: tuple[int, ...]
    """Shards that this node's local level has."""
    facts: VersionFacts
    largest_bytes: int
    """Length of the version's longest shard."""
    node: str
    """The node of the job's memory level: on one node, only one run of the job can be alive."""

    @property
    def id(self) -> VersionId:
        """The version."""
        return self.facts.id

    @property
    def name(self) -> VersionName:
        """The version's name on the persistent level."""
        return self.facts.name

    @property
    def keys(self) -> list[ShardKey]:
        """The node's shards."""
        return [self.facts.key(shard) for shard in self.here]


class ServedPlaces(_Record, frozen=True):
    """The places that an agent serves to other nodes: the local level's `directory`, and the job's
    memory, the folder `job` in `root`."""

    root: str
    job: str
    directory: str


class ListenSettings(_Record, frozen=True):
    """The address where an agent listens for other nodes' agents; see `Protector.open`."""

    secret: str
    """The run's secret, which its agents prove to know."""
    interface: str
    port: int
    """0: any port."""
    towards: str
    """The name of another node; the route to it selects the interface."""
    serves: ServedPlaces | None = None

    def __repr__(self) -> str:
        return repr_without(self, "secret")


class PartySettings(_Record, frozen=True):
    """One shard of this node, its group, and the addresses of the other members' agents."""

    shard: int
    ranks: tuple[int, ...]
    n: int
    k: int
    m: int
    hosts: tuple[str, ...]
    ports: tuple[int, ...]


class AgentAddress(_Record, frozen=True):
    """The address where a node's agent listens for other nodes' agents."""

    host: str
    """The node's name, as `_process.host_id` makes it."""
    address: str
    port: int
    secret: str
    """The secret of the run in which the agent last met others."""

    @property
    def node(self) -> str:
        """The node's name for people."""
        return self.host.partition("/")[0]

    @property
    def where(self) -> str:
        """The name of the place in messages."""
        return f"agent of node {self.node}, {self.address} port {self.port}"


class KnownNodes(_Record, frozen=True):
    """The agents of one run of the job, and those of earlier runs that it had to ask."""

    generation: int
    """The run's generation."""
    agents: tuple[AgentAddress, ...]

    def without(self, hosts: Iterable[str]) -> KnownNodes:
        """Return the agents of nodes other than `hosts`."""
        here = set(hosts)
        former_nodes = tuple(each for each in self.agents if each.host not in here)
        return KnownNodes(self.generation, former_nodes)

    @property
    def mark(self) -> Mark:
        """A mark, equal for equal lists."""
        return self.generation, digest(repr(self.agents).encode()).hex()


PROTOCOL = 12
"""Both sides must have the same. `Hello` and `Unwelcome` are read whatever the protocol is."""

# --- from a trainer ------------------------------------------------------------------------------


class Hello(_Record, frozen=True):
    """A trainer introduces itself. Fields that another protocol's trainer sends in an unknown way
    are None, or empty."""

    protocol: int | None
    session: SessionSettings | None
    environment: str = ""
    """The fingerprint of the job's environment on this node, see `address`."""
    began_seconds: float | None = None
    """Start time of the trainer (monotonic), which orders two runs."""


class Commit(_Record, frozen=True):
    """Commit a sealed slot to the local level. Answered by `Committed` or `CommitFailed`."""

    key: ShardKey
    segment: str | None
    """The slot's path; None: its descriptor comes with the message."""


class Retire(_Record, frozen=True):
    """Apply retention: `keep` versions always stay, `void` ones do not count."""

    safe: VersionId | None
    """The newest version complete on the local level of all ranks."""
    lineage: Lineage
    keep: tuple[VersionId, ...] = ()
    void: tuple[VersionId, ...] = ()


class Flush(_Record, frozen=True):
    """Flush a version to the persistent level. Answered by `Flushed` or `FlushFailed`."""

    order: FlushOrder


class Listen(_Record, frozen=True):
    """Listen for other nodes' agents. Answered by `Listening` or `ListenFailed`."""

    where: ListenSettings


class Introduce(_Record, frozen=True):
    """The parties that protect this node's shards from now on, and the agents of all nodes."""

    parties: tuple[PartySettings, ...]
    known_nodes: KnownNodes | None


class Inherit(_Record, frozen=True):
    """Listen on the address of an agent that shut down for this one, and remember the agents that
    it knew. No answer: the run's own `Listen` follows."""

    where: ListenSettings
    known_nodes: KnownNodes | None


class Protect(_Record, frozen=True):
    """Protect a version with other nodes' agents. Answered by `Protected` or `ProtectFailed`."""

    id: VersionId
    lost: tuple[int, ...] | None = None
    """Shards beside which parity is missing, if only that has to be made."""


class Forward(_Record, frozen=True):
    """Bring a version to a stage of the setting. Answered by `Staged` or `StageFailed`."""

    id: VersionId
    stage: str


class AskProgress(_Record, frozen=True):
    """Ask whether flushes proceed. Answered by `Progress`."""


class Bye(_Record, frozen=True):
    """The trainer ends as planned. Answered by `Finished`."""

    abandoned: bool = False
    """The job may restart, perhaps without this node."""


TrainerMessage = (
    Hello
    | Commit
    | Retire
    | Flush
    | Listen
    | Introduce
    | Inherit
    | Protect
    | Forward
    | AskProgress
    | Bye
)

# --- from an agent -------------------------------------------------------------------------------


class Welcome(_Record, frozen=True):
    """The agent serves this trainer."""

    pid: int
    known_nodes: KnownNodes | None = None
    """Other nodes' agents that this one knows; for the node's first rank."""


class ShuttingDown(_Record, frozen=True):
    """The agent has another environment or protocol, and shuts down for a successor."""

    pid: int
    known_nodes: KnownNodes | None = None
    where: ListenSettings | None = None
    """The address on which those agents find this one; for `Inherit`."""
    given_up: tuple[int, ...] = ()
    """Versions with a cancelled flush."""


class Outdated(_Record, frozen=True):
    """A later run of the job uses this node's agent; this trainer has none any more."""


class Unwelcome(_Record, frozen=True):
    """The agent does not serve this trainer, and does not shut down either."""


class Stored(_Record, frozen=True):
    """This node's part of a version is on a level."""

    level: ClassVar[Level]
    id: VersionId
    nbytes: int
    write_seconds: float

    @property
    def times_seconds(self) -> dict[str, float]:
        """Seconds that the parts of the work took."""
        return {"write": self.write_seconds}


class NotStored(_Record, frozen=True):
    """This node's part of a version is not on a level."""

    level: ClassVar[Level]
    id: VersionId
    error: str
    superseded: bool = False
    """A newer version is stored instead."""


class Committed(Stored, frozen=True):
    """A shard is durable on the local level."""

    level = LOCAL
    commit_seconds: float
    direct: bool
    """True when the page cache was bypassed."""

    @property
    def times_seconds(self) -> dict[str, float]:
        """See `Stored`."""
        return {"write": self.write_seconds, "commit": self.commit_seconds}


class CommitFailed(NotStored, frozen=True):
    """A shard is not on the local level."""

    level = LOCAL


class Protected(Stored, frozen=True):
    """Other nodes can rebuild this node's shards of a version."""

    level = PEER


class ProtectFailed(NotStored, frozen=True):
    """Other nodes cannot rebuild all of this node's shards of a version."""

    level = PEER


class Flushed(Stored, frozen=True):
    """This node's part of a version is on the persistent level."""

    level = PERSISTENT
    complete: bool
    """All nodes' parts are on that level."""


class FlushFailed(NotStored, frozen=True):
    """This node's part of a version is not on the persistent level."""

    level = PERSISTENT


class _OfStage(_Record, frozen=True):
    """The result of a stage of the setting, for this node's part of a version."""

    id: VersionId
    stage: str

    @property
    def level(self) -> str:
        """The stage, as a level."""
        return self.stage.partition(" ")[0]


class Staged(_OfStage, frozen=True):
    """The stage is done with it."""

    nbytes: int
    write_seconds: float

    @property
    def times_seconds(self) -> dict[str, float]:
        """See `Stored`."""
        return {"write": self.write_seconds}


class StageFailed(_OfStage, frozen=True):
    """The stage did not do its work."""

    error: str
    superseded: bool = False


class Listening(_Record, frozen=True):
    """The agent listens for other nodes' agents."""

    host: str
    port: int


class ListenFailed(_Record, frozen=True):
    """The agent cannot listen for other nodes' agents."""

    error: str


class Cleaned(_Record, frozen=True):
    """Files that a killed writer left half-written were removed."""

    names: tuple[str, ...]


class Problem(_Record, frozen=True):
    """A problem that users must know of, but that decides about no version."""

    error: str
    level: str = "local"
    severity: int = logging.ERROR


class Progress(_Record, frozen=True):
    """The progress of flushes."""

    quiet_seconds: float
    """Time since the flush under way last proceeded; 0.0: none is under way."""
    flush: TaskStatus | None = None
    """The flush under way."""


class Finished(_Record, frozen=True):
    """All work for the trainer that said `Bye` is done."""

    last: bool
    """The agent also ends now."""


AgentMessage = (
    Welcome
    | ShuttingDown
    | Outdated
    | Unwelcome
    | Committed
    | CommitFailed
    | Protected
    | ProtectFailed
    | Flushed
    | FlushFailed
    | Staged
    | StageFailed
    | Listening
    | ListenFailed
    | Cleaned
    | Problem
    | Progress
    | Finished
    | AgentStatus
)
Message = TrainerMessage | AgentMessage


def version_of(message: Message) -> VersionId | None:
    """Return the version that a message is about; None if there is none."""
    match message:
        case Commit(key=key):
            return key.id
        case Flush(order=order):
            return order.id
        case Protect(id=id_) | Forward(id=id_) | Stored(id=id_) | NotStored(id=id_):
            return id_
        case Staged(id=id_) | StageFailed(id=id_):
            return id_
        case _:
            return None


def failed(message: Message, error: str) -> AgentMessage:
    """Return the answer to an order that failed, or that nobody will carry out."""
    match message:
        case Commit(key=key):
            return CommitFailed(key.id, error)
        case Flush(order=order):
            return FlushFailed(order.id, error)
        case Protect(id=id_):
            return ProtectFailed(id_, error)
        case Forward(id=id_, stage=stage):
            return StageFailed(id_, stage, error)
        case Listen():
            return ListenFailed(error)
        case _:
            return Problem(error)


_KINDS: dict[str, Any] = {
    re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in get_args(Message)
}
"""Kinds of messages by `op`: `commit_failed` for CommitFailed."""
_OPS = {kind: op for op, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    """Return the message as JSON, with its `op`."""
    return json.dumps({"op": _OPS[type(message)], **to_builtins(message)}).encode()


def decode(data: bytes) -> Message:
    """Read a message that `encode` made. Raises ValueError with the reason for anything else: no
    JSON object, an unknown `op`, a field missing, unknown, or of the wrong type.

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
        message: Message = convert(values, kind)
    except ValidationError as error:
        raise ValueError(f"message {op!r}: {error}") from None
    return message


def _hello(values: dict[str, Any]) -> Hello:
    found: dict[str, Any] = {"protocol": None, "session": None}
    for name, kind in get_type_hints(Hello).items():
        with contextlib.suppress(ValidationError, KeyError):
            found[name] = convert(values[name], kind)
    return Hello(**found)


# --- over a socket -------------------------------------------------------------------------------


def packets_of(message: Message) -> list[bytes]:
    """Return the packets to send, in this order and without other messages' packets in between."""
    return split_packets(encode(message))


def send(channel: socket.socket, message: Message) -> None:
    """Send a message over a blocking channel; one thread at a time. Raises OSError."""
    for packet in packets_of(message):
        channel.send(packet)


def receive(channel: socket.socket) -> tuple[Message | None, list[int]]:
    """Wait for a message and the descriptors that come with it; None when the other end is closed.

    The channel must be blocking. Raises OSError, and ValueError for an invalid message, after which
    the next call continues. Where it raises, it leaves no descriptor open.
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
