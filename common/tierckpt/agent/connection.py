"""The connection to a node's agent: finds or starts the right agent, and carries messages.

`connection_states` decides; this module carries out its actions and reports the results to it as
events. Everything runs with `lock` held, which the owner takes, and nothing waits for the agent:
messages are queued until it is there. The owner receives the agent's messages and all results.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Protocol

from tierckpt._children import child_command, child_environment

from . import environment as environment
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
    NobodyListens,
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
    Bye,
    Finished,
    Hello,
    Outdated,
    PacketJoiner,
    Problem,
    SessionSettings,
    ShuttingDown,
    TrainerMessage,
    Unwelcome,
    Welcome,
)
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
        self.inline = Agent(0.0) if inline else None
        """The agent, if it is a part of this process."""
        self._at = Standing(index=settings.index, may_start=may_start, inline=inline)
        self._began = time.monotonic()
        """Shows agents which of two runs is the later one."""
        """A new agent has its low priority from the beginning."""
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
            # An agent that is just starting would wait for a trainer.
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
                    self._on(NobodyListens())
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
            protocol.send(channel, Hello(PROTOCOL, self._session, self._environment, self._began))
        except OSError:  # it is ending
            self._on(Ended())

    def _start_process(self) -> None:
        settings = self.settings
        nice = min(os.getpriority(os.PRIO_PROCESS, 0) + settings.nice, 19)
        self._process = subprocess.Popen(
            child_command(
                "tierckpt.agent.process",
                json.dumps(asdict(replace(settings, nice=nice, module_path=()))),
                str(os.getpid()),
                path=settings.module_path,
            ),
            env={**child_environment(), environment.VARIABLE: self._environment},
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
