"""The trainer's side of the agent: sends it sealed slots and orders, and receives the results.

The copier thread may call `commit`, the training thread everything else. Only `known_nodes`,
`listen`, `wait`, `outlast` and `close` wait for the agent.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable

from tierckpt._text import in_words, some
from tierckpt.core.levels import LOCAL, PEER, PERSISTENT, Level
from tierckpt.core.stall_timeout import StallTimeout
from tierckpt.format.ids import Lineage, ShardKey, VersionId
from tierckpt.storage.memory.slots import Slot

from .address import AgentSettings
from .connection import FOREIGN, AgentConnection
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
    TaskStatus,
    TrainerMessage,
    Welcome,
    version_of,
)
from .stall_watch import AGENT, StallWatch

IDLE_SECONDS = 0.05
"""An agent with no orders sends only news of itself."""
SHOW_SECONDS = 0.5
"""Interval of looks at the progress of a wait."""
STALLED_SECONDS = 1.0
"""Time for the goodbye of an agent that hangs."""
LOOK_SECONDS = 5.0
"""Interval of requests for the progress of flushes, while the trainer waits for them."""


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
        """`inline`: the agent is a thread of this process and ends with it (for debugging, and for
        systems that allow no processes). `environment`: equal on all ranks of the node, see
        `environment_fingerprint`; an agent with another one shuts down. `may_start`: this process
        has that environment itself, so an agent that it starts gets the right one."""
        self.session = session
        self._connection = AgentConnection(settings, session, self, inline, environment, may_start)
        self._lock = self._connection.lock
        self._pending: dict[VersionId, tuple[ShardKey, Slot]] = {}
        self._retried: set[VersionId] = set()
        """Commits that were handed over again after an agent ended. If the next agent ends as well,
        they are the likely cause, and fail."""
        self._flushing: dict[VersionId, FlushOrder] = {}
        self._protecting: set[VersionId] = set()
        self._introduction: tuple[Listen, Introduce] | None = None
        """Messages for a new agent: the agents of other nodes."""
        self._inherit: Inherit | None = None
        """State of an agent that shut down, for a new agent until this run's agents have met."""
        self._known_nodes: KnownNodes | None = None
        """Nodes that the agent knew before it was introduced to this run's."""
        self._received: list[AgentMessage] = []
        self.stall_watch = StallWatch(session)
        self._polled_seconds = -IDLE_SECONDS
        """Time of the last look for messages by `poll` (monotonic)."""
        self._progress_asked = False
        """True while a request for the progress of flushes is not answered."""
        self._quiet_replies: list[tuple[float, float]] = []
        """Replies (seconds without progress), each with its arrival (monotonic)."""
        self.flush_under_way: TaskStatus | None = None
        """The flush in the last answer to `ask_progress`."""

    @property
    def settings(self) -> AgentSettings:
        """Settings of our agent, as far as they are known."""
        return self._connection.settings

    @property
    def pid(self) -> int | None:
        """Process id of the agent, once it said welcome."""
        return self._connection.pid

    @property
    def starts(self) -> int:
        """Number of agents that this client started."""
        return self._connection.starts

    def find(self, first: bool = True) -> None:
        """Connect to the agent of an earlier run or of another rank, if there is one. If not, the
        first message starts one. `first`: see `start`."""
        with self._lock:
            self._connection.find(first)

    def start(self, first: bool = True) -> None:
        """Connect to the agent, or start one. Raises OSError when it cannot be started.

        `first`: this is the node's first rank; the other ranks wait a while for it to start one.
        """
        with self._lock:
            self._connection.start(first)

    def commit(self, key: ShardKey, slot: Slot) -> str:
        """Hand over a sealed slot; returns "", or the reason of a failure. Never blocks."""
        with self._lock:
            try:
                self._connection.ready()
            except OSError as error:
                return in_words(error)
            self._retried.discard(key.id)
            self._hand_over(key, slot)
            return ""

    def _hand_over(self, key: ShardKey, slot: Slot) -> None:
        self._pending[key.id] = key, slot
        segment = str(slot.path) if slot.path else None
        self._connection.send(Commit(key, segment), [] if slot.path else [slot.fd])

    def retire(
        self,
        safe: VersionId | None,
        lineage: Lineage,
        keep: Iterable[VersionId] = (),
        void: Iterable[VersionId] = (),
    ) -> None:
        """Send the agent the newest safe version, so that it can apply retention. Versions in
        `keep` stay whatever the policy says, and `void` ones count for nothing. Never blocks."""
        message = Retire(safe, lineage, tuple(keep), tuple(void))
        with self._lock:
            if self._connection.welcome:
                self._connection.send(message)

    def flush(self, order: FlushOrder) -> None:
        """Order the flush of a version complete on all local levels. Never blocks.

        One call for the whole node. If the agent dies before the end, its successor does it.
        """
        with self._lock:
            self._flushing[order.id] = order
            self._connection.send(Flush(order))

    def protect(self, version: VersionId, lost: Collection[int] | None = None) -> None:
        """Order parity for a version from the agents of all nodes. One call for the whole node.

        `lost`: shards without parity, if only their parity is to be made.
        """
        with self._lock:
            self._protecting.add(version)
            self._connection.send(Protect(version, None if lost is None else tuple(sorted(lost))))

    def introduce(
        self, where: ListenSettings, parties: Iterable[PartySettings], known_nodes: KnownNodes
    ) -> None:
        """Introduce other nodes' agents to our agent, which listens at `where`. A successor of our
        agent listens at the same port, so other nodes need no notice. Never blocks."""
        with self._lock:
            introduction = Introduce(tuple(parties), known_nodes)
            self._introduction = Listen(where), introduction
            self._connection.send(introduction)

    def known_nodes(self, timeout_seconds: float) -> KnownNodes | None:
        """Other nodes' agents: as introduced here, or as an agent of an earlier run knows them that
        says welcome in time. None when none are known."""
        if self._introduction is not None:
            return self._introduction[1].known_nodes
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            with self._lock:
                self._connection.look()
                if self._known_nodes or self.starts or not self._connection.reaching:
                    break
            time.sleep(0.002)
        return self._known_nodes

    def listen(self, where: ListenSettings, timeout_seconds: float) -> Listening | ListenFailed:
        """Make the agent listen for other nodes' agents, and wait for its answer; other messages
        are kept for `poll`.

        Raises TimeoutError. For attach and restart, not for steps.
        """
        with self._lock:
            self._connection.send(Listen(where))
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            with self._lock:
                self._connection.look()
                for message in self._received:
                    if isinstance(message, Listening | ListenFailed):
                        self._received.remove(message)
                        return message
            time.sleep(0.002)
        raise TimeoutError(f"the agent did not answer within {timeout_seconds:.0f} s")

    def under_way(self) -> dict[Level, list[VersionId]]:
        """Versions that the agent has yet to bring to a level beyond this node, or to give up; by
        level, where there are any."""
        known = {PEER: self._protecting, PERSISTENT: self._flushing}
        return {level: sorted(versions) for level, versions in known.items() if versions}

    def behind(self) -> list[Level]:
        """Levels beyond this node with a version on its way there."""
        return list(self.under_way())

    def busy(self) -> int:
        """Number of commits in progress."""
        return len(self._pending)

    def committing(self) -> list[VersionId]:
        """Versions that the agent has neither committed nor given up."""
        return sorted(self._pending)

    def concerns(self, id_: VersionId) -> bool:
        """True if an order for the version is in progress, or its answer was not polled yet."""
        with self._lock:
            known = (*self._pending, *self._protecting, *self._flushing)
            return id_ in (*known, *map(version_of, self._received))

    def pinned(self) -> set[str]:
        """Names of the slots that the agent reads."""
        if not self._pending:
            return set()
        with self._lock:
            return {slot.name for _, slot in self._pending.values()}

    def poll(self, awaited: bool = False) -> list[AgentMessage]:
        """The agent's messages since the last call, and what is known to hang. Never blocks.
        Without an order in progress it asks the system for messages only every IDLE_SECONDS.

        `awaited`: other ranks of the job wait for their agents, perhaps for this one."""
        now = time.monotonic()
        with self._lock:
            idle = not (self._pending or self._protecting or self._flushing)
            if not (idle and now - self._polled_seconds < IDLE_SECONDS):
                self._polled_seconds = now
                self._connection.look()
            if (awaited or not idle or self.stall_watch.since) and now >= self.stall_watch.due:
                self._look_for_stalls(awaited or not idle)
            received, self._received = self._received, []
            return received

    def _look_for_stalls(self, at_work: bool) -> None:
        """With the lock held."""
        connection = self._connection
        if at_work and not connection.welcome:  # it starts, or is replaced
            return
        place = connection.settings.place()
        self._received += self.stall_watch.look(at_work, place, self.pid, connection.inline)

    def problems(self) -> list[Problem]:
        """The messages for the user among those that are kept for `poll`, during a wait."""
        with self._lock:
            found = [each for each in self._received if isinstance(each, Problem)]
            self._received = [each for each in self._received if not isinstance(each, Problem)]
        return found

    @property
    def stalled(self) -> bool:
        """Whether the agent, or the disk that it writes to, is known to hang."""
        return not {AGENT, LOCAL}.isdisjoint(self.stall_watch.stalls)

    def ask_progress(self) -> None:
        """Ask for the progress of flushes, unless an answer is still to come. Never blocks."""
        with self._lock:
            if not self._progress_asked:
                self._progress_asked = True
                self._connection.send(AskProgress())

    def wait(
        self,
        timeout_seconds: float | None,
        poll_seconds: float = 0.002,
        everything: bool = False,
        on_look: Callable[[], None] | None = None,
        hopeless: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait until no commit is in progress; False on time-out, or when nothing moves and
        `hopeless()`. Messages are kept for `poll`.

        `everything`: also wait for flushes, and for exchanges with other nodes. `on_look` is called
        twice a second during the wait.
        """
        begin = looked = time.monotonic()
        while self._pending or (everything and self.behind()):
            now = time.monotonic()
            with self._lock:
                self._connection.look()
                self._look_for_stalls(True)
            if timeout_seconds is not None and now - begin > timeout_seconds:
                break
            if self.stalled and hopeless():
                break
            if on_look is not None and now - looked > SHOW_SECONDS:
                looked = now
                on_look()
            time.sleep(poll_seconds)
        return not self._pending and not (everything and self.behind())

    def outlast(
        self,
        quiet_seconds: float,
        seconds_left: Callable[[], float] = lambda: math.inf,
        on_pause: Callable[[], None] = lambda: None,
        on_look: Callable[[], None] | None = None,
    ) -> bool:
        """Call `wait` for everything, as long as there is progress. False when flushes or the agent
        made none for `quiet_seconds`, or when no `seconds_left` remain. `on_pause` is called every
        few seconds, and may `poll`. `on_look`: see `wait`."""
        timeout = StallTimeout(quiet_seconds, time.monotonic())
        pause = min(LOOK_SECONDS, quiet_seconds / 2)
        while not self.wait(min(pause, seconds_left()), everything=True, on_look=on_look):
            on_pause()
            now = time.monotonic()
            with self._lock:
                while self._quiet_replies:
                    timeout.heard(*self._quiet_replies.pop(0))
            if seconds_left() <= 0 or timeout.is_over(now):
                return False
            self.ask_progress()
        return True

    def close(self, timeout_seconds: float = 10.0, abandoned: bool = False) -> None:
        """Say goodbye and let the agent finish; after `timeout_seconds` it finishes alone.

        `abandoned`: the job may come back, perhaps without this node. An agent that has met agents
        of other nodes then lingers, as for a trainer that was killed.
        """
        self.stall_watch.end()
        self._connection.close(STALLED_SECONDS if self.stalled else timeout_seconds, abandoned)

    # --- called by the connection, with the lock held ------------------------------------------

    def greeted(self, welcome: Welcome) -> Iterable[TrainerMessage]:
        """Messages for a new agent, see `connection.Owner`."""
        self._known_nodes = welcome.known_nodes or self._known_nodes
        return self._introduction or ([self._inherit] if self._inherit is not None else [])

    def shutting_down(self, agent: ShuttingDown) -> None:
        """Report the shutdown, see `connection.Owner`. One rank of the node reports its flushes."""
        self._known_nodes = agent.known_nodes or self._known_nodes
        if agent.where is not None:
            self._inherit = Inherit(agent.where, self._known_nodes)
        text = f"agent {self.settings.index} of this node {FOREIGN}; it shuts down for ours"
        given_up = agent.given_up if self.session.speaks else ()
        if given_up:
            versions = some([f"v{version}" for version in given_up], 8)
            text += f", and gives up these flushes: {versions}"
        severity = logging.WARNING if given_up else logging.INFO
        self._received.append(Problem(text, "persistent" if given_up else "local", severity))

    def received(self, message: AgentMessage) -> None:
        """Keep a message, see `connection.Owner`; an answered order is in progress no more."""
        match message:
            case Progress(quiet_seconds=seconds, flush=flush):
                self._progress_asked, self.flush_under_way = False, flush
                self._quiet_replies.append((seconds, time.monotonic()))
                return
            case Committed(id=id_) | CommitFailed(id=id_):
                self._pending.pop(id_, None)
                self._retried.discard(id_)
            case Protected(id=id_) | ProtectFailed(id=id_):
                self._protecting.discard(id_)
            case Flushed(id=id_) | FlushFailed(id=id_):
                self._flushing.pop(id_, None)
        self._received.append(message)

    def lost(self, reason: str) -> None:
        """Report the loss, see `connection.Owner`. A successor gets the same orders."""
        again = {i: each for i, each in self._pending.items() if i not in self._retried}
        for id_ in again:
            del self._pending[id_]
        then = (
            "a new one commits the shards that it still had"
            if again
            else "the next commit starts a new one"
        )
        self._received.append(Problem(f"{reason}; {then}"))
        self._fail_orders(reason)
        for key, slot in again.values():
            self._retried.add(key.id)
            self._hand_over(key, slot)

    def _fail_orders(self, reason: str) -> None:
        """Fail all commits and exchanges in progress; a successor does the flushes."""
        self._received += [CommitFailed(id_, reason) for id_ in self._pending]
        self._received += [ProtectFailed(id_, reason) for id_ in self._protecting]
        self._retried.difference_update(self._pending)
        self._pending.clear()
        self._protecting.clear()
        self._progress_asked = False
        self._connection.hang_up()
        for order in self._flushing.values():
            self._connection.send(Flush(order))

    def gave_up(self, reason: str) -> None:
        """Fail all orders, see `connection.Owner`: nothing waits for a successor."""
        self._received += [FlushFailed(id_, reason) for id_ in self._flushing]
        self._flushing.clear()
        self._fail_orders(reason)
