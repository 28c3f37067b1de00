"""The training side of the agent: hands it sealed slots and orders, hears how it went.

`commit` may be called by the copier thread, everything else by the training thread. Nothing here
waits for the agent but `wait` and `close`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable

from tierckpt._text import some
from tierckpt.core.levels import PEER, PERSISTENT, Level
from tierckpt.core.stall_timeout import StallTimeout
from tierckpt.format.ids import Lineage, ShardKey, VersionId
from tierckpt.storage.memory.slots import Slot

from .address import AgentSettings
from .connection import OTHERS, AgentConnection
from .protocol import (
    AgentMessage,
    AskProgress,
    Commit,
    CommitFailed,
    Committed,
    Flush,
    Flushed,
    FlushFailed,
    FlushOrder,
    Inherit,
    Introduce,
    KnownNodes,
    Listen,
    ListenFailed,
    Listening,
    ListenSettings,
    PartySettings,
    Problem,
    Progress,
    Protect,
    Protected,
    ProtectFailed,
    Retire,
    SessionSettings,
    ShuttingDown,
    TrainerMessage,
    Welcome,
    version_of,
)

LOOK_SECONDS = 5.0
"""So often the agent is asked whether its flushes get on, while somebody waits for them."""


class AgentClient:
    """One rank's connection to its node's agent; a dead agent is replaced by the next commit."""

    def __init__(
        self,
        settings: AgentSettings,
        session: SessionSettings,
        inline: bool = False,
        environment: str = "",
        may_start: bool = True,
    ) -> None:
        """`inline`: the agent is a thread of this process (for debugging, and where processes
        may not be started); it dies with it. `environment`: the same for all ranks of the node,
        see `environment.fingerprint`; an agent of others shuts down. `may_start`: they are this
        process's, too, from which an agent that it starts would have them."""
        self.session = session
        self._line = AgentConnection(settings, session, self, inline, environment, may_start)
        self._lock = self._line.lock
        self._pending: dict[VersionId, tuple[ShardKey, Slot]] = {}
        self._tried_again: set[VersionId] = set()
        """Commits that one agent did not survive. Should the next one not either, it is their
        fault."""
        self._flushing: dict[VersionId, FlushOrder] = {}
        self._protecting: set[VersionId] = set()
        self._introduction: tuple[Listen, Introduce] | None = None
        """For an agent that is new: the agents of other nodes."""
        self._heritage: Inherit | None = None
        """The same, before this run's agents have met: those that an agent knew that shut down."""
        self._known_nodes: KnownNodes | None = None
        """The nodes that the agent knew before it was introduced."""
        self._heard: list[AgentMessage] = []
        self._asked = False
        """Whether flushes get on, and there is no answer yet."""
        self._quiet: list[tuple[float, float]] = []
        """The answers in seconds, and when they came (monotonic)."""

    @property
    def settings(self) -> AgentSettings:
        """Of the agent that is for us, as far as it is known."""
        return self._line.settings

    @property
    def pid(self) -> int | None:
        """Process id of the agent, once it said welcome."""
        return self._line.pid

    @property
    def starts(self) -> int:
        """Agents that this client started."""
        return self._line.starts

    def find(self, first: bool = True) -> None:
        """Connect to the agent, if there is one: that of a run before, or of another rank. One is
        started when something is said to it, at the latest. `first`: see `start`."""
        with self._lock:
            self._line.find(first)

    def start(self, first: bool = True) -> None:
        """Connect to the agent, or start it; OSError when it cannot be started.

        `first`: this is the node's first rank; the others leave the start to it for a while.
        """
        with self._lock:
            self._line.start(first)

    def commit(self, key: ShardKey, slot: Slot) -> str:
        """Hand over a sealed slot; returns "" or why that was not possible. Never blocks."""
        with self._lock:
            try:
                self._line.ready()
            except OSError as error:
                return f"{type(error).__name__}: {error}"
            self._tried_again.discard(key.id)
            self._hand_over(key, slot)
            return ""

    def _hand_over(self, key: ShardKey, slot: Slot) -> None:
        self._pending[key.id] = key, slot
        segment = str(slot.path) if slot.path else None
        self._line.send(Commit(key, segment), [] if slot.path else [slot.fd])

    def retire(
        self,
        safe: VersionId | None,
        lineage: Lineage,
        keep: Iterable[VersionId] = (),
        void: Iterable[VersionId] = (),
    ) -> None:
        """Tell the agent what is safe, so that retention can go on; versions in `keep` stay
        whatever the policy says, and `void` ones count for nothing. Never blocks."""
        message = Retire(safe, lineage, tuple(keep), tuple(void))
        with self._lock:
            if self._line.welcome:
                self._line.send(message)

    def flush(self, order: FlushOrder) -> None:
        """Have a version flushed that is complete on all local levels. Never blocks.

        One call for the whole node. An agent that dies meanwhile leaves it to its successor.
        """
        with self._lock:
            self._flushing[order.id] = order
            self._line.send(Flush(order))

    def protect(self, version: VersionId, lost: Collection[int] | None = None) -> None:
        """Have a version protected by the agents of other nodes. One call for the whole node.

        `lost`: the shards beside which parity is missing, where only that is to be made.
        """
        with self._lock:
            self._protecting.add(version)
            self._line.send(Protect(version, None if lost is None else tuple(sorted(lost))))

    def introduce(
        self, where: ListenSettings, parties: Iterable[PartySettings], known_nodes: KnownNodes
    ) -> None:
        """Introduce other nodes' agents to the agent, which listens at `where`, and to its
        successor, which listens at the same port: no other node has to know. Never blocks."""
        with self._lock:
            introduction = Introduce(tuple(parties), known_nodes)
            self._introduction = Listen(where), introduction
            self._line.send(introduction)

    def known_nodes(self, timeout_seconds: float) -> KnownNodes | None:
        """Other nodes' agents: as introduced here, or else as an agent knows them that was there
        before and says welcome in time. None where none are known."""
        if self._introduction is not None:
            return self._introduction[1].known_nodes
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            with self._lock:
                self._line.look()
                if self._known_nodes or self.starts or not self._line.reaching:
                    break
            time.sleep(0.002)
        return self._known_nodes

    def listen(self, where: ListenSettings, timeout_seconds: float) -> Listening | ListenFailed:
        """Have the agent listen for other nodes' agents, and wait for the answer; other messages
        are kept for `poll`.

        Raises TimeoutError. For attach and restart, not for steps.
        """
        with self._lock:
            self._line.send(Listen(where))
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            with self._lock:
                self._line.look()
                for heard in self._heard:
                    if isinstance(heard, Listening | ListenFailed):
                        self._heard.remove(heard)
                        return heard
            time.sleep(0.002)
        raise TimeoutError(f"the agent did not answer within {timeout_seconds:.0f} s")

    def under_way(self) -> dict[Level, list[VersionId]]:
        """Versions that the agent has yet to bring to a level beyond this node, or to give up; by
        level, where there are any."""
        known = {PEER: self._protecting, PERSISTENT: self._flushing}
        return {level: sorted(versions) for level, versions in known.items() if versions}

    def behind(self) -> list[Level]:
        """Levels beyond this node that something is under way to."""
        return list(self.under_way())

    def busy(self) -> int:
        """How many commits are under way."""
        return len(self._pending)

    def committing(self) -> list[VersionId]:
        """Versions that the agent has yet to commit, or to give up."""
        return sorted(self._pending)

    def concerns(self, id_: VersionId) -> bool:
        """Whether something of a version is under way, or was answered and not polled yet."""
        with self._lock:
            known = (*self._pending, *self._protecting, *self._flushing)
            return id_ in (*known, *map(version_of, self._heard))

    def pinned(self) -> set[str]:
        """Names of the slots that the agent reads."""
        with self._lock:
            return {slot.name for _, slot in self._pending.values()}

    def poll(self) -> list[AgentMessage]:
        """The agent's messages since the last call. Never blocks."""
        with self._lock:
            self._line.look()
            heard, self._heard = self._heard, []
            return heard

    def wait(
        self, timeout_seconds: float | None, poll_seconds: float = 0.002, everything: bool = False
    ) -> bool:
        """Wait until no commit is under way; False on time-out. Messages are kept for `poll`.

        `everything`: nor any flush, nor an exchange with other nodes.
        """
        begin = time.monotonic()
        while self._pending or (everything and self.behind()):
            with self._lock:
                self._line.look()
            if timeout_seconds is not None and time.monotonic() - begin > timeout_seconds:
                break
            time.sleep(poll_seconds)
        return not self._pending and not (everything and self.behind())

    def outlast(
        self,
        quiet_seconds: float,
        seconds_left: Callable[[], float] = lambda: math.inf,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> bool:
        """`wait` for everything; also False when flushes, or the agent, hang: what is under way has
        not got on for `quiet_seconds`. A flush that is slow is waited for, while there are
        `seconds_left`. `meanwhile` is called every few seconds, and may `poll`."""
        patience = StallTimeout(quiet_seconds, time.monotonic())
        pause = min(LOOK_SECONDS, quiet_seconds / 2)
        while not self.wait(min(pause, seconds_left()), everything=True):
            meanwhile()
            now = time.monotonic()
            with self._lock:
                while self._quiet:
                    patience.heard(*self._quiet.pop(0))
                if seconds_left() <= 0 or patience.is_over(now):
                    return False
                if not self._asked:
                    self._asked = True
                    self._line.send(AskProgress())
        return True

    def close(self, timeout_seconds: float = 10.0, abandoned: bool = False) -> None:
        """Say goodbye and let the agent finish; it is left alone if that takes longer.

        `abandoned`: the job may come back, perhaps without this node. An agent that has met those
        of other nodes lingers then, as for a trainer that was killed."""
        self._line.close(timeout_seconds, abandoned)

    # --- called by the line, with the lock held ------------------------------------------------

    def greeted(self, welcome: Welcome) -> Iterable[TrainerMessage]:
        """See `connection.Owner`."""
        self._known_nodes = welcome.known_nodes or self._known_nodes
        return self._introduction or ([self._heritage] if self._heritage is not None else [])

    def shutting_down(self, agent: ShuttingDown) -> None:
        """See `connection.Owner`. One rank of the node reports the flushes that are given up."""
        self._known_nodes = agent.known_nodes or self._known_nodes
        if agent.where is not None:
            self._heritage = Inherit(agent.where, self._known_nodes)
        text = f"agent {self.settings.index} of this node has {OTHERS}; it shuts down for ours"
        given_up = agent.given_up if self.session.speaks else ()
        if given_up:
            versions = some([f"v{version}" for version in given_up], 8)
            text += f", and gives up what it still had to flush: {versions}"
        severity = logging.WARNING if given_up else logging.INFO
        self._heard.append(Problem(text, "persistent" if given_up else "local", severity))

    def heard(self, message: AgentMessage) -> None:
        """See `connection.Owner`: what is answered is under way no more."""
        match message:
            case Progress(quiet_seconds=seconds):
                self._asked = False
                self._quiet.append((seconds, time.monotonic()))
                return
            case Committed(id=id_) | CommitFailed(id=id_):
                self._pending.pop(id_, None)
                self._tried_again.discard(id_)
            case Protected(id=id_) | ProtectFailed(id=id_):
                self._protecting.discard(id_)
            case Flushed(id=id_) | FlushFailed(id=id_):
                self._flushing.pop(id_, None)
        self._heard.append(message)

    def lost(self, reason: str) -> None:
        """See `connection.Owner`. A successor commits what the agent had, and does its flushes."""
        again = {i: what for i, what in self._pending.items() if i not in self._tried_again}
        for id_ in again:
            del self._pending[id_]
        then = "another one commits what it had" if again else "the next commit starts one"
        self._heard.append(Problem(f"{reason}; {then}"))
        self._bury(reason)
        for key, slot in again.values():
            self._tried_again.add(key.id)
            self._hand_over(key, slot)

    def _bury(self, reason: str) -> None:
        """What was handed over, or was to be, is not committed; a successor does the flushes."""
        self._heard += [CommitFailed(id_, reason) for id_ in self._pending]
        self._heard += [ProtectFailed(id_, reason) for id_ in self._protecting]
        self._tried_again.difference_update(self._pending)
        self._pending.clear()
        self._protecting.clear()
        self._asked = False
        self._line.hang_up()
        for order in self._flushing.values():
            self._line.send(Flush(order))

    def gave_up(self, reason: str) -> None:
        """See `connection.Owner`: nothing waits for a successor."""
        self._heard += [FlushFailed(id_, reason) for id_ in self._flushing]
        self._flushing.clear()
        self._bury(reason)
