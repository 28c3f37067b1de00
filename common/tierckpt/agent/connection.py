"""The way to a node's agent: finds the one that is for us, or starts it, and carries messages.

`connection_states` decides what is done; here it is done, and what became of it reported there.
All is done with `lock` held, which is the owner's to take, and nothing waits for the agent: what it
cannot be told yet is kept until it is there. What comes, and what becomes of it, is the owner's.
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
from .priority import lower_priority
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
"""From an agent's last act, to remove its lock, to the end of its process."""
OTHERS = (
    "an earlier start's keys, credentials or codecs, or is another tierckpt's, or a process where "
    'agent is "inline"'
)

Packet = tuple[bytes, list[int]]
"""A message or a part of one, and the descriptors that go with it."""


class Owner(Protocol):
    """Who speaks with the agent. Called with the lock held."""

    def greeted(self, welcome: Welcome) -> Iterable[TrainerMessage]:
        """An agent says welcome; returns what a new one is to have before all other messages."""

    def shutting_down(self, agent: ShuttingDown) -> None:
        """An agent that is not for us ends, and says so for the first time."""

    def heard(self, message: AgentMessage) -> None:
        """Any other message."""

    def lost(self, reason: str) -> None:
        """The agent that said welcome is no more. Calls `hang_up`."""

    def gave_up(self, reason: str) -> None:
        """No agent can be had before somebody asks for one again. Calls `hang_up`."""


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
        """See `AgentClient`."""
        self.lock = threading.Lock()
        self.starts = 0
        """Agents that were started here."""
        self._settings = settings
        self._session, self._owner = session, owner
        self._environment = environment
        if inline:  # no process's: two agents of a node undo each other's work
            self._environment = f"inline {environment}"
        self._inline = Agent(0.0) if inline else None
        self._at = Standing(index=settings.index, may_start=may_start, inline=inline)
        self._began = time.monotonic()
        """Tells agents the later of two runs."""
        self._unsent: deque[Packet] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        """The agent that was started last and is followed, see `Standing.follows`."""
        self._thread: threading.Thread | None = None
        self._channel: socket.socket | None = None
        """Open in the states GREETING and CONNECTED alone."""
        self._packets: deque[bytes] = deque()
        """Those that came and were not heeded yet."""
        self._incoming = PacketJoiner()
        self._said: AgentMessage = Unwelcome()
        """The message that is being heeded, for the actions that it leads to."""
        self._reaching = self._closing = False
        self._reacher: threading.Thread | None = None
        # A forked child (a DataLoader's worker) would keep the socket open when we are killed.
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(mine()))

    @property
    def settings(self) -> AgentSettings:
        """The settings of the agent that is for us, as far as it is known."""
        return replace(self._settings, index=self._at.index)

    @property
    def pid(self) -> int | None:
        """Process id of the agent, once it said welcome."""
        return self._at.pid

    @property
    def welcome(self) -> bool:
        """Whether the agent said welcome, and was not seen to end since."""
        return self._at.state is State.CONNECTED

    @property
    def reaching(self) -> bool:
        """True while an agent is, or may be, there that has not said welcome yet."""
        return self._reaching and not self.welcome

    def find(self, first: bool) -> None:
        """Connect to the agent, if there is one. `first`: see `AgentClient.start`."""
        self._at = replace(self._at, first=first)
        self._reach()

    def start(self, first: bool) -> None:
        """See `AgentClient.start`."""
        self._at = replace(self._at, first=first)
        self._on(Needed(again=True))
        self._receive()  # the one that was found may be gone
        self._reach()

    def ready(self) -> None:
        """Take in what came, and do what can be done at once to be connected. Raises OSError, after
        `Owner.gave_up`, when no agent can be started."""
        self._on(Needed())
        self._receive()
        self._reach_or_give_up()

    def look(self) -> None:
        """Take in what came, and go on with what could not be sent yet."""
        self._receive()
        if self._unsent:
            with contextlib.suppress(OSError):
                self._reach_or_give_up()
                self._flush()

    def send(self, message: TrainerMessage, fds: list[int] | None = None) -> None:
        """Send a message, or keep it until there is an agent to send it to."""
        self._on(Needed())
        self._unsent.extend(_packed(message, fds))
        self._flush()

    def hang_up(self) -> None:
        """Forget what could not be sent yet, and the agent that it was for."""
        self._unsent.clear()
        self._on(HangUp())

    def close(self, timeout_seconds: float, abandoned: bool) -> None:
        """See `AgentClient`. Takes the lock itself."""
        deadline = time.monotonic() + timeout_seconds
        with self.lock:
            self._closing = True
            # One that is just starting would wait for somebody to speak to.
            while self._has_to_say() and time.monotonic() < deadline:
                self._receive()
                with contextlib.suppress(OSError):
                    self._reach_now()
                time.sleep(0.005)
            served_by = self.pid
            if self._channel is not None and self._say_goodbye(deadline, abandoned):
                # The last of its trainers leaves: wait, so that nothing is left when we return.
                while self.settings.place().lock.exists() and time.monotonic() < deadline:
                    time.sleep(0.005)
                if self._process is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(EXIT_SECONDS)
            self._call_off(served_by, deadline)
        for thread in (self._reacher, self._thread):
            if thread is not None:
                thread.join(timeout_seconds)
        if self._inline is not None:
            self._inline.close()
        if self._process is not None:
            # It ends soon, or serves others on; Popen would warn about a child that still runs.
            self._process.returncode = self._process.poll() or 0

    # --- finding one, and being found ----------------------------------------------------------

    def _say_goodbye(self, deadline_seconds: float, abandoned: bool = False) -> bool:
        """Wait until the agent has finished our work; True when it ends, having no other."""
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
        return last and self._inline is None

    def _call_off(self, served_by: int | None, deadline_seconds: float) -> None:
        """Of an agent that was started beside the one that served us: once that has gone, it would
        take its place, and wait for somebody to speak to. It ends at a signal until it looks for a
        place; then it finds none, or has it and is told."""
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
        """Do what can be done at once to be connected, and leave the rest to a thread.

        The next boundary may be far off, and what was sealed shall not wait for it. Raises OSError
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
            except RuntimeError as error:  # as many as the system, or the container, allows
                self._reaching = False
                raise OSError(str(error)) from error
            self._reacher = reacher

    def _reach_soon(self) -> None:
        """The thread: until the agent has bidden welcome, and has been told what waited; or until
        there is none, and none needed."""
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

    # --- what is decided, and done -------------------------------------------------------------

    def _on(self, event: Event) -> None:
        """Something happened: do what follows from it. Raises OSError where no agent can be had."""
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
                self._owner.heard(Problem(text, severity=severity))
            case ReportLost(reason=reason):
                self._owner.lost(reason)
            case GiveUp(reason=reason):
                self._owner.gave_up(reason)
            case ReportShutdown():
                assert isinstance(self._said, ShuttingDown)
                self._owner.shutting_down(self._said)
            case AcceptWelcome(introduce=introduce):
                assert isinstance(self._said, Welcome)
                first = [part for each in self._owner.greeted(self._said) for part in _packed(each)]
                self._unsent.extendleft(reversed(first) if introduce else ())
                self._flush()

    def _connect(self, numbers: Iterable[int]) -> bool:
        """Connect and say hello; messages follow when the agent has said welcome. False when no
        agent listens at these places."""
        for index in numbers:
            place = replace(self._settings, index=index).place()
            if (channel := place.connect()) is not None:
                self._greet(channel, index)
                return True
        if self._inline is not None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self._thread = self._inline.attend(theirs)
            self._greet(ours, self._at.index)
            return True
        return False

    def _greet(self, channel: socket.socket, index: int) -> None:
        self._channel, self._incoming = channel, PacketJoiner()
        self._packets.clear()
        self._on(Connected(index))
        try:
            protocol.send(channel, Hello(PROTOCOL, self._session, self._environment, self._began))
        except OSError:  # it is just ending
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
        # At once: its start is some 0.1 s of work, beside a restore that wants the cores.
        lower_priority(nice, self._process.pid)
        self._on(ProcessStarted())
        self.starts += 1

    # --- messages ------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Send what waits, as far as the agent takes it."""
        while self.welcome and self._unsent:
            assert self._channel is not None
            data, fds = self._unsent[0]
            try:
                socket.send_fds(self._channel, [data], fds)
            except (BlockingIOError, InterruptedError, ConnectionError):
                return  # the buffer is full, or it is gone: that will be heard
            except OSError as error:  # and so will all that come after it
                why = f"the agent cannot be told what to do ({error})"
                self._owner.heard(Problem(why))
                self._owner.gave_up(why)
                return
            self._unsent.popleft()

    def _receive(self) -> None:
        while self._channel is not None:
            ended = self._take_packets(self._channel)
            while self._packets and self._channel is not None:
                if (data := self._incoming.add(self._packets[0])) is not None:
                    self._hear(data)
                self._packets.popleft()  # rather heard twice than lost to an interrupt
            if not ended or self._channel is None:
                return
            self._on(Ended())

    def _take_packets(self, channel: socket.socket) -> bool:
        """What came; True when nothing will any more. In one call, whose loop is in C: between two
        an interrupt could come, and have the packet that one returned."""
        try:
            self._packets.extend(iter(partial(channel.recv, protocol.PACKET_BYTES), b""))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            pass
        return True

    def _hear(self, data: bytes) -> None:
        try:
            message = protocol.decode(data)
            if not isinstance(message, AgentMessage):
                raise ValueError(f"{type(message).__name__} is a trainer's message")
        except ValueError as error:
            self._on(NotUnderstood(f"is not understood ({error})"))
            return
        self._said = message
        match message:
            case Welcome(pid=pid):
                self._on(Welcomed(pid))
            case ShuttingDown(pid=pid, where=where):
                self._on(PredecessorEnds(pid, inherits=where is not None))
            case Outdated():
                self._on(DeclaredOutdated())
            case Unwelcome():
                self._on(Unwelcomed(f"has {OTHERS}"))
            case _:
                self._owner.heard(message)


def _packed(message: TrainerMessage, fds: list[int] | None = None) -> list[Packet]:
    """The descriptors go with the first packet."""
    first, *more = protocol.packets_of(message)
    return [(first, fds or []), *((packet, []) for packet in more)]


def _close_in_child(line: AgentConnection | None) -> None:
    if line is not None and line._channel is not None:
        line._channel.close()
        line._channel = None
