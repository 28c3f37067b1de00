"""The messages between a trainer and its node's agent, each a frozen dataclass.

A trainer sends `Hello` first, and the agent answers with `Welcome`, or with `ShuttingDown`,
`Outdated` or `Unwelcome`, after which it closes the connection. Orders and answers follow in both
directions. A trainer sends `Bye` last, and the agent `Finished`, when its work for this trainer is
done. End of file from a trainer without a `Bye` means that it was killed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from tierckpt.core.levels import LOCAL, PEER, PERSISTENT, Level
from tierckpt.format.ids import Lineage, ShardKey, VersionId

from .settings import (
    FlushOrder,
    KnownNodes,
    ListenSettings,
    PartySettings,
    SessionSettings,
)
from .status import AgentStatus, TaskStatus

PROTOCOL = 9
"""Both sides must have the same. `Hello` and `Unwelcome` are read whatever the protocol is."""

# --- from a trainer ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """A trainer introduces itself. Fields that another protocol's trainer sends in an unknown way
    are None, or empty."""

    protocol: int | None
    session: SessionSettings | None
    environment: str = ""
    """The fingerprint of the job's environment on this node, see `environment`."""
    began_seconds: float | None = None
    """Start time of the trainer (monotonic), which orders two runs."""


@dataclass(frozen=True)
class Commit:
    """Commit a sealed slot to the local level. Answered by `Committed` or `CommitFailed`."""

    key: ShardKey
    segment: str | None
    """The slot's path; None: its descriptor comes with the message."""


@dataclass(frozen=True)
class Retire:
    """Apply retention: `keep` versions always stay, `void` ones do not count."""

    safe: VersionId | None
    """The newest version that is complete on the local level of all ranks."""
    lineage: Lineage
    keep: tuple[VersionId, ...] = ()
    void: tuple[VersionId, ...] = ()


@dataclass(frozen=True)
class Flush:
    """Flush a version to the persistent level. Answered by `Flushed` or `FlushFailed`."""

    order: FlushOrder


@dataclass(frozen=True)
class Listen:
    """Listen for other nodes' agents. Answered by `Listening` or `ListenFailed`."""

    where: ListenSettings


@dataclass(frozen=True)
class Introduce:
    """The parties that protect this node's shards from now on, and the agents of all nodes."""

    parties: tuple[PartySettings, ...]
    known_nodes: KnownNodes | None


@dataclass(frozen=True)
class Inherit:
    """Listen on the address of an agent that shut down for this one, and remember the agents that
    it knew. No answer: the run's own `Listen` follows."""

    where: ListenSettings
    known_nodes: KnownNodes | None


@dataclass(frozen=True)
class Protect:
    """Protect a version with other nodes' agents. Answered by `Protected` or `ProtectFailed`."""

    id: VersionId
    lost: tuple[int, ...] | None = None
    """Shards beside which parity is missing, if only that has to be made."""


@dataclass(frozen=True)
class AskProgress:
    """Ask whether flushes proceed. Answered by `Progress`."""


@dataclass(frozen=True)
class Bye:
    """The trainer ends as planned. Answered by `Finished`."""

    abandoned: bool = False
    """The job may restart, perhaps without this node."""


TrainerMessage = (
    Hello | Commit | Retire | Flush | Listen | Introduce | Inherit | Protect | AskProgress | Bye
)

# --- from an agent -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """The agent serves this trainer."""

    pid: int
    known_nodes: KnownNodes | None = None
    """Other nodes' agents that this one knows; for the node's first rank."""


@dataclass(frozen=True)
class ShuttingDown:
    """The agent has another environment or protocol, and shuts down for a successor."""

    pid: int
    known_nodes: KnownNodes | None = None
    where: ListenSettings | None = None
    """The address on which those agents find this one; for `Inherit`."""
    given_up: tuple[int, ...] = ()
    """Versions whose flush is cancelled."""


@dataclass(frozen=True)
class Outdated:
    """A later run of the job uses this node's agent; this trainer has none any more."""


@dataclass(frozen=True)
class Unwelcome:
    """The agent does not serve this trainer, and does not shut down either."""


@dataclass(frozen=True)
class Stored:
    """This node's part of a version is on a level."""

    level: ClassVar[Level]
    id: VersionId
    nbytes: int
    write_seconds: float

    @property
    def times_seconds(self) -> dict[str, float]:
        """Seconds that the parts of the work took."""
        return {"write": self.write_seconds}


@dataclass(frozen=True)
class NotStored:
    """This node's part of a version is not on a level."""

    level: ClassVar[Level]
    id: VersionId
    error: str
    superseded: bool = False
    """A newer version is stored instead."""


@dataclass(frozen=True)
class Committed(Stored):
    """A shard is durable on the local level."""

    level = LOCAL
    commit_seconds: float
    direct: bool
    """True when the page cache was bypassed."""

    @property
    def times_seconds(self) -> dict[str, float]:
        """See `Stored`."""
        return {"write": self.write_seconds, "commit": self.commit_seconds}


@dataclass(frozen=True)
class CommitFailed(NotStored):
    """A shard is not on the local level."""

    level = LOCAL


@dataclass(frozen=True)
class Protected(Stored):
    """Other nodes can rebuild this node's shards of a version."""

    level = PEER


@dataclass(frozen=True)
class ProtectFailed(NotStored):
    """Other nodes cannot rebuild all of this node's shards of a version."""

    level = PEER


@dataclass(frozen=True)
class Flushed(Stored):
    """This node's part of a version is on the persistent level."""

    level = PERSISTENT
    complete: bool
    """All nodes' parts are on that level."""


@dataclass(frozen=True)
class FlushFailed(NotStored):
    """This node's part of a version is not on the persistent level."""

    level = PERSISTENT


@dataclass(frozen=True)
class Listening:
    """The agent listens for other nodes' agents."""

    host: str
    port: int


@dataclass(frozen=True)
class ListenFailed:
    """The agent cannot listen for other nodes' agents."""

    error: str


@dataclass(frozen=True)
class Cleaned:
    """Files that a killed writer left half-written were removed."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """A problem that users must know of, but that decides about no version."""

    error: str
    level: str = "local"
    severity: int = logging.ERROR


@dataclass(frozen=True)
class Progress:
    """The progress of flushes."""

    quiet_seconds: float
    """Time since the flush under way last proceeded; 0.0: none is under way."""
    flush: TaskStatus | None = None
    """The flush under way."""


@dataclass(frozen=True)
class Finished:
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
        case Protect(id=id_) | Stored(id=id_) | NotStored(id=id_):
            return id_
        case _:
            return None
