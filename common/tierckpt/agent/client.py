"""The trainer's side of the agent: finds or starts it, sends sealed slots and orders, receives
results.

The copier thread may call `commit`, the training thread everything else. Only `known_nodes`,
`listen`, `wait`, `outlast` and `close` of `AgentClient` wait for the agent.

`AgentConnection` finds or starts the right agent, and carries messages. `connection_states`
decides; `AgentConnection` carries out its actions and reports the results to it as events.
Everything in it runs with `lock` held, which the owner takes, and nothing waits for the agent:
messages are queued until it is there. The owner receives the agent's messages and all results.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from tierckpt._children import child_command, child_environment
from tierckpt._text import error_text, some
from tierckpt.core.decisions import StallTimeout
from tierckpt.core.levels import LOCAL, PEER, PERSISTENT, RANK
from tierckpt.format.ids import Lineage, ShardKey, VersionId
from tierckpt.storage.slots import Slot

from . import address as environment
from . import protocol
from .address import AgentSettings
from .connection_states import (
    AcceptWelcome,
    Action,
    Close,
    Connect,
    Connected,
    DeclaredOutdated,
    Ended,
    Event,
    Fail,
    GiveUp,
    HangUp,
    Needed,
    NoListener,
    NotUnderstood,
    PredecessorEnds,
    ProcessEnded,
    ProcessStarted,
    Report,
    ReportLost,
    ReportShutdown,
    Standing,
    StartProcess,
    State,
    Tick,
    Unwelcomed,
    Welcomed,
    next_state,
)
from .protocol import (
    PROTOCOL,
    AgentMessage,
    AskProgress,
    Bye,
    Commit,
    Finished,
    Flush,
    FlushOrder,
    Forward,
    Hello,
    Inherit,
    Introduce,
    KnownNodes,
    Listen,
    ListenFailed,
    Listening,
    ListenSettings,
    NotStored,
    Outdated,
    PacketJoiner,
    PartySettings,
    Problem,
    Progress,
    Protect,
    Retire,
    SessionSettings,
    ShuttingDown,
    Staged,
    StageFailed,
    Stored,
    TaskStatus,
    TrainerMessage,
    Unwelcome,
    Welcome,
    failed,
    version_of,
)
from .status import AGENT, StallWatch

if TYPE_CHECKING:
    from .server import Agent

EXIT_SECONDS = 2.0
"""Time for a process to end, after its agent has removed its lock as the last step."""
FOREIGN = (
    "belongs to an earlier start of this job with other keys, credentials or codecs, or to another "
    'tierckpt, or to a process where agent is "inline"'
)

Packet = tuple[bytes, list[int]]
"""A message or a part of one, and the descriptors that go with it."""


class Owner(Protocol):
    """The user of a connection. Its methods are called with the lock held."""

    def greeted(self, welcome: Welcome) -> Iterable[TrainerMessage]:
        """An agent said welcome; returns the messages that a new agent gets before all others."""

    def shutting_down(self, agent: ShuttingDown) -> None:
        """The agent of another run shuts down; called once for each agent."""

    def received(self, message: AgentMessage) -> None:
        """Any other message arrived."""

    def lost(self, reason: str) -> None:
        """The agent that had said welcome has ended. Calls `hang_up`."""

    def gave_up(self, reason: str) -> None:
        """No agent is available until one is requested again. Calls `hang_up`."""


class AgentConnection:
    """One rank's connection to its node's agent."""

    def __init__(
        self,
        settings: AgentSettings,
        session: SessionSettings,
        owner: Owner,
        inline: bool,
        environment: str,
        may_start: bool,
    ) -> None:
        """Parameters as of `AgentClient`."""
        self.lock = threading.Lock()
        self.starts = 0
        """Number of agents that were started here."""
        self._settings = settings
        self._session, self._owner = session, owner
        self._environment = environment
        if inline:  # shared with no process: two agents of a node undo each other's work
            self._environment = f"inline {environment}"
        self.inline = _agent_of_this_process() if inline else None
        """The agent, if it is a part of this process."""
        self._at = Standing(index=settings.index, may_start=may_start, inline=inline)
        self._started = time.monotonic()
        """Shows agents which of two runs is the later one."""
        """A new agent has its low priority from the start."""
        self._unsent: deque[Packet] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        """The agent that was started last and is followed, see `Standing.follows`."""
        self._thread: threading.Thread | None = None
        self._channel: socket.socket | None = None
        """Open only in the states GREETING and CONNECTED."""
        self._packets: deque[bytes] = deque()
        """Packets that were received and not handled yet."""
        self._incoming = PacketJoiner()
        self._handling: AgentMessage = Unwelcome()
        """The message in progress, for the actions that result from it."""
        self._reaching = self._closing = False
        self._reacher: threading.Thread | None = None
        # A forked child (a DataLoader's worker) would keep the socket open after we are killed.
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(mine()))

    @property
    def settings(self) -> AgentSettings:
        """Settings of our agent, as far as they are known."""
        return replace(self._settings, index=self._at.index)

    @property
    def pid(self) -> int | None:
        """Process id of the agent, once it said welcome."""
        return self._at.pid

    @property
    def welcome(self) -> bool:
        """True when the agent has said welcome and has not ended since, as far as known."""
        return self._at.state is State.CONNECTED

    @property
    def reaching(self) -> bool:
        """True while there is, or may be, an agent that has not said welcome yet."""
        return self._reaching and not self.welcome

    def find(self, first: bool) -> None:
        """Connect to the agent, if there is one. `first`: see `AgentClient.start`."""
        self._at = replace(self._at, first=first)
        self._reach()

    def start(self, first: bool) -> None:
        """Connect to the agent or start one, see `AgentClient.start`."""
        self._at = replace(self._at, first=first)
        self._on(Needed(again=True))
        self._receive()  # the agent that was found may have ended
        self._reach()

    def ready(self) -> None:
        """Handle received messages, and take all steps towards a connection that need no wait.
        Raises OSError, after `Owner.gave_up`, when no agent can be started."""
        self._on(Needed())
        self._receive()
        self._reach_or_give_up()

    def look(self) -> None:
        """Handle received messages, and continue to send the queued ones."""
        self._receive()
        if self._unsent:
            with contextlib.suppress(OSError):
                self._reach_or_give_up()
                self._flush()

    def send(self, message: TrainerMessage, fds: list[int] | None = None) -> None:
        """Send a message, or queue it until there is an agent."""
        self._on(Needed())
        self._unsent.extend(_packed(message, fds))
        self._flush()

    def hang_up(self) -> None:
        """Drop the queued messages, and the agent that they were for."""
        self._unsent.clear()
        self._on(HangUp())

    def close(self, timeout_seconds: float, abandoned: bool) -> None:
        """Say goodbye and let the agent finish, see `AgentClient.close`. Takes the lock itself."""
        deadline = time.monotonic() + timeout_seconds
        with self.lock:
            self._closing = True
            # An agent just starting would wait for a trainer.
            while self._has_to_say() and time.monotonic() < deadline:
                self._receive()
                with contextlib.suppress(OSError):
                    self._reach_now()
                time.sleep(0.005)
            served_by = self.pid
            if self._channel is not None and self._say_goodbye(deadline, abandoned):
                # We are its last trainer: wait, so that nothing is left when we return.
                while self.settings.place().lock.exists() and time.monotonic() < deadline:
                    time.sleep(0.005)
                if self._process is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(EXIT_SECONDS)
            self._call_off(served_by, deadline)
        for thread in (self._reacher, self._thread):
            if thread is not None:
                thread.join(timeout_seconds)
        if self.inline is not None:
            self.inline.close()
        if self._process is not None:
            # It ends soon, or serves other ranks; Popen would warn about a running child.
            self._process.returncode = self._process.poll() or 0

    # --- finding an agent ----------------------------------------------------------------------

    def _say_goodbye(self, deadline_seconds: float, abandoned: bool = False) -> bool:
        """Wait until the agent has finished our work; True when it ends because it has no other."""
        assert self._channel is not None
        last = False
        with contextlib.suppress(OSError, ValueError):
            self._channel.settimeout(max(deadline_seconds - time.monotonic(), 0.01))
            protocol.send(self._channel, Bye(abandoned))
            while packet := self._channel.recv(protocol.PACKET_BYTES):
                if (data := self._incoming.add(packet)) is not None:
                    message = protocol.decode(data)
                    last = isinstance(message, Finished) and message.last
        self._on(HangUp())
        return last and self.inline is None

    def _call_off(self, served_by: int | None, deadline_seconds: float) -> None:
        """End an agent that was started in addition to the one that served us: it would take the
        other's place later, and wait for a trainer. A signal ends it before it looks for a place.
        After that it finds no place, or takes one and receives our goodbye."""
        process = self._process
        if process is None or process.pid == served_by or process.poll() is not None:
            return
        process.terminate()
        while process.poll() is None and time.monotonic() < deadline_seconds:
            if self.settings.place().owner() == process.pid:
                self._connect((self._at.index,))
                if self._channel is not None:
                    self._say_goodbye(deadline_seconds)
                    return
            time.sleep(0.005)

    def _reach_or_give_up(self) -> None:
        try:
            self._reach()
        except OSError as error:
            self._owner.gave_up(f"the agent cannot be started ({error})")
            raise

    def _reach(self) -> None:
        """Take all steps towards a connection that need no wait, and leave the rest to a thread.

        The next boundary may be far away, and sealed shards should not wait for it. Raises OSError
        when no agent, or no thread, can be started.
        """
        self._reach_now()
        if not self._settled() and not self._reaching:
            reacher = threading.Thread(
                target=self._reach_soon, name="tierckpt-agent-reach", daemon=True
            )
            self._reaching = True
            try:
                reacher.start()
            except RuntimeError as error:  # the limit of the system or container on threads
                self._reaching = False
                raise OSError(str(error)) from error
            self._reacher = reacher

    def _reach_soon(self) -> None:
        """Run in a thread until the agent has said welcome and has the queued messages, or until
        there is none and none is needed."""
        while True:
            with self.lock:
                try:
                    self._receive()
                    if not self.welcome and not self._closing:
                        self._reach_now()
                except OSError as error:
                    self._owner.gave_up(f"the agent cannot be started ({error})")
                    self._reaching = False
                    return
                if self._settled() or self._closing:
                    self._reaching = False
                    return
            time.sleep(0.005)

    def _settled(self) -> bool:
        return self._at.settled(time.monotonic())

    def _has_to_say(self) -> bool:
        return bool(self._unsent) or self._at.starting or self._at.inherits

    def _reach_now(self) -> None:
        process = self._process
        if self._at.follows and process is not None and (status := process.poll()) is not None:
            self._on(ProcessEnded(status))
        self._on(Tick())

    # --- decisions and actions -----------------------------------------------------------------

    def _on(self, event: Event) -> None:
        """Carry out the actions for an event. Raises OSError when no agent is available."""
        followed = self._at.follows
        self._at, actions = next_state(self._at, event, time.monotonic())
        if followed and not self._at.follows:
            self._process = None
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Connect(numbers=numbers):
                if not self._connect(numbers):
                    self._on(NoListener())
            case StartProcess():
                self._start_process()
            case Close():
                assert self._channel is not None
                self._channel.close()
                self._channel = None
            case Fail(error=error):
                raise error
            case Report(text=text, severity=severity):
                self._owner.received(Problem(text, severity=severity))
            case ReportLost(reason=reason):
                self._owner.lost(reason)
            case GiveUp(reason=reason):
                self._owner.gave_up(reason)
            case ReportShutdown():
                assert isinstance(self._handling, ShuttingDown)
                self._owner.shutting_down(self._handling)
            case AcceptWelcome(introduce=introduce):
                assert isinstance(self._handling, Welcome)
                first = [
                    part for each in self._owner.greeted(self._handling) for part in _packed(each)
                ]
                self._unsent.extendleft(reversed(first) if introduce else ())
                self._flush()

    def _connect(self, numbers: Iterable[int]) -> bool:
        """Connect and greet; messages follow when the agent has said welcome. False when no agent
        listens at these places."""
        for index in numbers:
            place = replace(self._settings, index=index).place()
            if (channel := place.connect()) is not None:
                self._greet(channel, index)
                return True
        if self.inline is not None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self._thread = self.inline.attend(theirs)
            self._greet(ours, self._at.index)
            return True
        return False

    def _greet(self, channel: socket.socket, index: int) -> None:
        self._channel, self._incoming = channel, PacketJoiner()
        self._packets.clear()
        self._on(Connected(index))
        try:
            protocol.send(channel, Hello(PROTOCOL, self._session, self._environment, self._started))
        except OSError:  # it is ending
            self._on(Ended())

    def _start_process(self) -> None:
        settings = self.settings
        self._process = subprocess.Popen(
            child_command(
                "tierckpt.agent.process",
                json.dumps(to_builtins(replace(settings, module_path=()))),
                str(os.getpid()),
                path=settings.module_path,
            ),
            env={**child_environment(), environment.ENVIRONMENT_VARIABLE: self._environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        self._on(ProcessStarted())
        self.starts += 1

    # --- messages ------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Send queued messages, as far as the agent takes them."""
        while self.welcome and self._unsent:
            assert self._channel is not None
            data, fds = self._unsent[0]
            try:
                socket.send_fds(self._channel, [data], fds)
            except (BlockingIOError, InterruptedError, ConnectionError):
                return  # the buffer is full, or the agent has ended, which `_receive` notices
            except OSError as error:  # all later messages would fail as well
                why = f"messages cannot be sent to the agent ({error})"
                self._owner.received(Problem(why))
                self._owner.gave_up(why)
                return
            self._unsent.popleft()

    def _receive(self) -> None:
        while self._channel is not None:
            ended = self._take_packets(self._channel)
            while self._packets and self._channel is not None:
                if (data := self._incoming.add(self._packets[0])) is not None:
                    self._handle(data)
                self._packets.popleft()  # last: twice is better than lost by an interrupt
            if not ended or self._channel is None:
                return
            self._on(Ended())

    def _take_packets(self, channel: socket.socket) -> bool:
        """Read all packets that have arrived; True when no more will. One call with its loop in C:
        an interrupt between two calls would lose the packet that the first one returned."""
        try:
            self._packets.extend(iter(partial(channel.recv, protocol.PACKET_BYTES), b""))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            pass
        return True

    def _handle(self, data: bytes) -> None:
        try:
            message = protocol.decode(data)
            if not isinstance(message, AgentMessage):
                raise ValueError(f"{type(message).__name__} is a trainer's message")
        except ValueError as error:
            self._on(NotUnderstood(f"is not understood ({error})"))
            return
        self._handling = message
        match message:
            case Welcome(pid=pid):
                self._on(Welcomed(pid))
            case ShuttingDown(pid=pid, where=where):
                self._on(PredecessorEnds(pid, inherits=where is not None))
            case Outdated():
                self._on(DeclaredOutdated())
            case Unwelcome():
                self._on(Unwelcomed(FOREIGN))
            case _:
                self._owner.received(message)


def _packed(message: TrainerMessage, fds: list[int] | None = None) -> list[Packet]:
    """Packets of a message; its descriptors go with the first one."""
    first, *more = protocol.packets_of(message)
    return [(first, fds or []), *((packet, []) for packet in more)]


def _close_in_child(connection: AgentConnection | None) -> None:
    if connection is not None and connection._channel is not None:
        connection._channel.close()
        connection._channel = None


IDLE_SECONDS = 0.05
"""An agent with no orders sends only news of itself."""
SHOW_SECONDS = 0.5
"""Interval of looks at the progress of a wait."""
STALLED_SECONDS = 1.0
"""Time for the goodbye of an agent that hangs."""
LOOK_SECONDS = 5.0
"""Interval of requests for the progress of flushes, while the trainer waits for them."""


class _Ordered(Struct, eq=False):
    """An order in progress."""

    message: TrainerMessage
    slot: Slot | None = None
    """The slot that a commit reads."""

    @property
    def id(self) -> VersionId:
        """The version."""
        found = version_of(self.message)
        assert found is not None
        return found


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
        self._orders: dict[tuple[str, VersionId], _Ordered] = {}
        """Orders in progress, by level or stage, and version."""
        self._retried: set[VersionId] = set()
        """Commits that were handed over again after an agent ended. If the next agent ends as well,
        they are the likely cause, and fail."""
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
                return error_text(error)
            self._retried.discard(key.id)
            self._hand_over(key, slot)
            return ""

    def _hand_over(self, key: ShardKey, slot: Slot) -> None:
        message = Commit(key, str(slot.path) if slot.path else None)
        self._orders[LOCAL, key.id] = _Ordered(message, slot)
        try:
            self._connection.send(message, [] if slot.path else [slot.fd])
        except KeyboardInterrupt:  # perhaps nothing was sent, so no answer comes
            self._orders.pop((LOCAL, key.id), None)
            raise

    def _order(self, where: str, id_: VersionId, message: TrainerMessage) -> None:
        """With the lock held."""
        self._orders[where, id_] = _Ordered(message)
        self._connection.send(message)

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
            self._order(PERSISTENT, order.id, Flush(order))

    def protect(self, version: VersionId, lost: Collection[int] | None = None) -> None:
        """Order parity for a version from the agents of all nodes. One call for the whole node.

        `lost`: shards without parity, if only their parity is to be made.
        """
        with self._lock:
            message = Protect(version, None if lost is None else tuple(sorted(lost)))
            self._order(PEER, version, message)

    def forward(self, version: VersionId) -> None:
        """Order all stages of the setting to take in a version complete on all local levels. One
        call for the whole node."""
        with self._lock:
            for stage in self.session.stages:
                self._order(stage, version, Forward(version, stage))

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

    def under_way(self) -> dict[str, list[VersionId]]:
        """Versions that the agent has yet to bring to a stage after the local level, or to give up;
        by level or stage, where there are any."""
        found: dict[str, list[VersionId]] = {}
        for where, id_ in sorted([*self._orders], key=lambda at: (RANK.get(at[0], len(RANK)), at)):
            if where != LOCAL:
                found.setdefault(where, []).append(id_)
        return found

    def behind(self) -> list[str]:
        """Levels and stages after the local level with a version on its way there."""
        return list(self.under_way())

    def busy(self) -> int:
        """Number of commits in progress."""
        return len(self.committing())

    def committing(self) -> list[VersionId]:
        """Versions that the agent has neither committed nor given up."""
        return sorted(id_ for where, id_ in [*self._orders] if where == LOCAL)

    def concerns(self, id_: VersionId) -> bool:
        """True if an order for the version is in progress, or its answer was not polled yet."""
        with self._lock:
            known = (id_ for _, id_ in self._orders)
            return id_ in (*known, *map(version_of, self._received))

    def pinned(self) -> set[str]:
        """Names of the slots that the agent reads."""
        if not self._orders:
            return set()
        with self._lock:
            return {each.slot.name for each in self._orders.values() if each.slot is not None}

    def poll(self, awaited: bool = False) -> list[AgentMessage]:
        """The agent's messages since the last call, and what is known to hang. Never blocks.
        Without an order in progress it asks the system for messages only every IDLE_SECONDS.

        `awaited`: other ranks of the job wait for their agents, perhaps for this one."""
        now = time.monotonic()
        with self._lock:
            idle = not self._orders
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
        start = looked = time.monotonic()
        while self._orders if everything else self.busy():
            now = time.monotonic()
            with self._lock:
                self._connection.look()
                self._look_for_stalls(True)
            if timeout_seconds is not None and now - start > timeout_seconds:
                break
            if self.stalled and hopeless():
                break
            if on_look is not None and now - looked > SHOW_SECONDS:
                looked = now
                on_look()
            time.sleep(poll_seconds)
        return not (self._orders if everything else self.busy())

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
                    timeout.record_quiet(*self._quiet_replies.pop(0))
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
        """Messages for a new agent, see `Owner`."""
        self._known_nodes = welcome.known_nodes or self._known_nodes
        return self._introduction or ([self._inherit] if self._inherit is not None else [])

    def shutting_down(self, agent: ShuttingDown) -> None:
        """Report the shutdown, see `Owner`. One rank of the node reports its flushes."""
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
        """Keep a message, see `Owner`; an answered order is in progress no more."""
        match message:
            case Progress(quiet_seconds=seconds, flush=flush):
                self._progress_asked, self.flush_under_way = False, flush
                self._quiet_replies.append((seconds, time.monotonic()))
                return
            case Stored(id=id_) | NotStored(id=id_):
                self._orders.pop((message.level, id_), None)
                if message.level == LOCAL:
                    self._retried.discard(id_)
            case Staged(id=id_, stage=stage) | StageFailed(id=id_, stage=stage):
                self._orders.pop((stage, id_), None)
        self._received.append(message)

    def lost(self, reason: str) -> None:
        """Report the loss, see `Owner`. A successor gets the same commits, unless they were handed
        over again before, and the same flushes."""
        commits = [each for each in self._orders.values() if isinstance(each.message, Commit)]
        again = [each for each in commits if each.id not in self._retried]
        flushes = [each for each in self._orders.values() if isinstance(each.message, Flush)]
        then = (
            "a new one commits the shards that it still had"
            if again
            else "the next commit starts a new one"
        )
        self._received.append(Problem(f"{reason}; {then}"))
        self._fail_orders(reason, but=[*again, *flushes])
        for each in flushes:
            self._order(PERSISTENT, each.id, each.message)
        for each in again:
            assert isinstance(each.message, Commit)
            assert each.slot is not None
            self._retried.add(each.id)
            self._hand_over(each.message.key, each.slot)

    def _fail_orders(self, reason: str, but: Sequence[_Ordered] = ()) -> None:
        """Answer all orders in progress with a failure, and forget them; those of `but` without."""
        for each in self._orders.values():
            if each not in but:
                self._retried.discard(each.id)
                self._received.append(failed(each.message, reason))
        self._orders.clear()
        self._progress_asked = False
        self._connection.hang_up()

    def gave_up(self, reason: str) -> None:
        """Fail all orders, see `Owner`: nothing waits for a successor."""
        self._fail_orders(reason)


def _agent_of_this_process() -> Agent:
    from .server import Agent

    return Agent(0.0)
