"""The way to a node's agent: finds the one that is for us, or starts it, and carries messages.

All is done with `lock` held, which is the owner's to take, and nothing waits for the agent: what it
cannot be told yet is kept until it is there. What comes, and what becomes of it, is the owner's.
"""

from __future__ import annotations

import contextlib
import json
import logging
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
from .address import TAKEN, AgentSettings
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

ANSWER_SECONDS = 5.0
"""An agent that does not bid welcome for so long is passed over for another."""
EXIT_SECONDS = 2.0
"""From an agent's last act, to remove its lock, to the end of its process."""
START_SECONDS = 60.0
"""A new agent that cannot be reached for so long is given up; the next commit tries again."""
JOIN_SECONDS = 2.0
"""So long the other ranks of a node leave it to the first one to start the agent."""
AGAIN_SECONDS = 0.5
"""An agent that found another one in its place is started again after this at the earliest."""
GONE_SECONDS = 0.2
"""So often an agent that shuts down is asked whether it is still there."""
MOST_AGENTS = 4
"""So many are passed over, then, after ANSWER_SECONDS, the first is asked again."""
OTHERS = (
    "an earlier start's keys, credentials or codecs, or is another tierckpt's, or a process where "
    'agent is "inline"'
)
OUTDATED = (
    "a later start of this job, with other keys, credentials or codecs, has this node's agent "
    "(parts of one job that share a machine need the same, or a node of their own)"
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
        """The agent that bade welcome is no more. Calls `hang_up`."""

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
        self.settings = settings
        self.lock = threading.Lock()
        self.starts = 0
        """Agents that were started here."""
        self.pid: int | None = None
        """Process id of the agent, once it said welcome."""
        self.welcome = False
        self._greeted: int | None = None
        """Process id of the last agent that said it."""
        self._session, self._owner = session, owner
        self._environment, self._may_start = environment, may_start
        if inline:  # no process's: two agents of a node undo each other's work
            self._environment = f"inline {environment}"
        self._inline = Agent(0.0) if inline else None
        self._unsent: deque[Packet] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._channel: socket.socket | None = None
        self._packets: deque[bytes] = deque()
        """Those that came and were not heeded yet."""
        self._incoming = PacketJoiner()
        self._since = 0.0
        """When the connection, or the start of the agent, was begun."""
        self._start_after = self._ask_after = 0.0
        self._began = time.monotonic()
        """Tells agents the later of two runs."""
        self._first = True
        """This is the node's first rank."""
        self._needed = False
        """Where there is no agent, one is to be started."""
        self._leaving: tuple[int | None, float] = (None, 0.0)
        """Process id of the agent that shuts down for one of ours, and since when."""
        self._inherits = False
        """From one that shut down, what only an agent can keep for those who come after us."""
        self._outdated = False
        """A later run has an agent here: there is none for us any more."""
        self._passed: set[int] = set()
        """Numbers of agents that are stuck, or not for us."""
        self._refused = False
        """All were passed over, which was said, and none was had since."""
        self._reaching = self._closing = False
        self._reacher: threading.Thread | None = None
        self._unproved = False
        """The agent that was started last was never heard of."""
        # A forked child (a DataLoader's worker) would keep the socket open when we are killed.
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(mine()))

    def find(self, first: bool) -> None:
        """Connect to the agent, if there is one. `first`: see `AgentClient.start`."""
        self._first = first
        self._reach()

    def start(self, first: bool) -> None:
        """See `AgentClient.start`."""
        self._first, self._needed = first, True
        self._leave_start()
        self._receive()  # the one that was found may be gone
        self._reach()

    def ready(self) -> None:
        """Hear what came, and do what can be done at once to be connected. Raises OSError, behind
        `Owner.gave_up`, when no agent can be started."""
        self._need()
        self._receive()
        self._reach_or_give_up()

    def look(self) -> None:
        """Hear what came, and go on with what could not be said yet."""
        self._receive()
        if self._unsent:
            with contextlib.suppress(OSError):
                self._reach_or_give_up()
                self._flush()

    def send(self, message: TrainerMessage, fds: list[int] | None = None) -> None:
        """Say it, or keep it until there is somebody to say it to."""
        self._need()
        self._unsent.extend(_packed(message, fds))
        self._flush()

    def hang_up(self) -> None:
        """Forget what could not be said yet, and whom it was for."""
        self._unsent.clear()
        if self._channel is not None:
            self._drop()

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
        self._drop()
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
            if self.settings.place().owner() == process.pid and self._connect():
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

    def _need(self) -> None:
        """From now on one is started where there is none."""
        if not self._needed:
            self._needed = True
            self._leave_start()

    def _settled(self) -> bool:
        """Nobody is to be reached, or it is."""
        coming = self._channel is not None or time.monotonic() < self._ask_after
        return self.welcome or not (self._needed or coming)

    @property
    def reaching(self) -> bool:
        """True while an agent is, or may be, there that has not bidden welcome yet."""
        return self._reaching and not self.welcome

    def _has_to_say(self) -> bool:
        return bool(self._unsent) or self._starting() or self._inherits

    def _leave_start(self) -> None:
        """To the node's first rank, for a while; for as long as it may take, where an agent of ours
        would have other keys. What is handed over waits meanwhile."""
        seconds = 0.0 if self._first else JOIN_SECONDS
        self._start_after = time.monotonic() + (seconds if self._may_start else START_SECONDS)

    def _reach_now(self) -> None:
        if self._outdated:
            raise ConnectionRefusedError(OUTDATED)
        if self._channel is not None:
            if self.welcome or time.monotonic() - self._since < ANSWER_SECONDS:
                return
            self._pass_over("does not answer", logging.ERROR)
        connected = time.monotonic() < self._ask_after or self._connect()
        if not connected and self._inline is None and self._needed:
            self._start_process()

    def _connect(self) -> bool:
        """Connect and say hello; messages follow when the agent has bidden welcome."""
        self._channel = self._call()
        if self._channel is None and self._inline is not None:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._channel.setblocking(False)
            self._thread = self._inline.attend(theirs)
        if self._channel is None:
            return False
        self._since, self._incoming = time.monotonic(), PacketJoiner()
        self._packets.clear()
        hello = Hello(PROTOCOL, self._session, self._environment, self._began)
        try:
            protocol.send(self._channel, hello)
        except OSError:  # it is just ending
            self._drop()
        return self._channel is not None

    def _call(self) -> socket.socket | None:
        """A connection to the first agent that is there: other ranks, or an earlier run, may have
        passed over one that has ended since. While we start one, to that."""
        numbers = [self.settings.index] if self._starting() else self._places()
        for number in numbers:
            settings = replace(self.settings, index=number)
            if (channel := settings.place().connect()) is not None:
                self.settings = settings
                return channel
        return None

    def _places(self) -> list[int]:
        """Numbers of agents that were not passed over."""
        return [number for number in range(MOST_AGENTS) if number not in self._passed]

    def _starting(self) -> bool:
        return self._channel is None and self._process is not None and self._process.poll() is None

    def _start_process(self) -> None:
        """Start an agent, unless one is just starting."""
        now = time.monotonic()
        if self._starting():
            if now - self._since > START_SECONDS:
                self._process = None
                raise TimeoutError(f"a new agent was not there after {START_SECONDS:.0f} s")
            return
        if not self._may_start and now >= self._start_after:
            raise TimeoutError(
                f"the node's first rank, which is to start it, has not in {START_SECONDS:.0f} s"
            )
        status = self._process.returncode if self._process is not None else 0
        if self._unproved and status not in (0, TAKEN):
            self._process = None
            raise ChildProcessError(f"a new agent ended with exit status {status}")
        if now < self._start_after:
            return
        nice = min(os.getpriority(os.PRIO_PROCESS, 0) + self.settings.nice, 19)
        settings = replace(self.settings, nice=nice)
        self._process = subprocess.Popen(
            child_command(
                "tierckpt.agent.process",
                json.dumps(asdict(replace(settings, module_path=()))),
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
        self._since, self._start_after = now, now + AGAIN_SECONDS
        self._unproved = True
        self.starts += 1

    def _pass_over(self, why: str, severity: int) -> None:
        """The agent here is stuck, or not for us. It was told nothing yet."""
        if self._channel is not None:
            self._drop()
        number = self.settings.index
        self._passed.add(number)
        full = not self._places()
        if full:
            self._passed.clear()
            self._ask_after = time.monotonic() + ANSWER_SECONDS
        self.settings = replace(self.settings, index=self._places()[0])
        self._process = None
        self._leave_start()
        if not self._refused:
            then = "and no other place is free" if full else "another one takes its place"
            text = f"agent {number} of this node {why}; {then}"
            self._complain(text, logging.ERROR if full else severity)
        if full:
            self._refused = True
            self._owner.gave_up(
                f"none of this node's {MOST_AGENTS} agents is for us, or answers; they are asked "
                "again"
            )

    def _complain(self, text: str, severity: int) -> None:
        self._owner.heard(Problem(text, severity=severity))

    def _wait_until_gone(self, agent: ShuttingDown) -> None:
        """The agent here shuts down: its place is ours as soon as it has ended."""
        self._drop()
        now = time.monotonic()
        if agent.pid != self._leaving[0]:
            self._leaving = agent.pid, now
            self._owner.shutting_down(agent)
            if agent.where is not None:  # it closes the place where other nodes, and we, find that
                self._inherits = True
                self._need()
        if now - self._leaving[1] > ANSWER_SECONDS:
            self._pass_over("does not end", logging.ERROR)
            return
        self._ask_after = now + GONE_SECONDS
        self._leave_start()

    def _end_outdated(self) -> None:
        self._outdated, self._inherits = True, False
        self._complain(OUTDATED, logging.ERROR)
        self._owner.gave_up(OUTDATED)

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
            if self.welcome:
                self._owner.lost("the agent ended unexpectedly")
            else:  # it was just ending, or is of another version of tierckpt: see `_reach`
                self._drop()

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
            if self.welcome:
                self._owner.lost(f"the agent is not understood ({error})")
            else:
                self._pass_over(f"is not understood ({error})", logging.ERROR)
            return
        match message:
            case Welcome():
                self._greet(message)
            case ShuttingDown():
                self._wait_until_gone(message)
            case Outdated():
                self._end_outdated()
            case Unwelcome():
                self._pass_over(f"has {OTHERS}", logging.INFO)
            case _:
                self._owner.heard(message)

    def _greet(self, message: Welcome) -> None:
        self.welcome, self.pid, self._unproved = True, message.pid, False
        self._refused = self._inherits = False
        first = [packet for each in self._owner.greeted(message) for packet in _packed(each)]
        if self.pid != self._greeted:
            self._unsent.extendleft(reversed(first))
            self._greeted = self.pid
        self._flush()

    def _drop(self) -> None:
        assert self._channel is not None
        self._channel.close()
        self._channel, self.welcome, self.pid = None, False, None
        # Its process may be seen to live for a moment yet: that is no start that takes long.
        self._since = time.monotonic()
        if not self._may_start:
            self._leave_start()


def _packed(message: TrainerMessage, fds: list[int] | None = None) -> list[Packet]:
    """The descriptors go with the first packet."""
    first, *more = protocol.packets_of(message)
    return [(first, fds or []), *((packet, []) for packet in more)]


def _close_in_child(line: AgentConnection | None) -> None:
    if line is not None and line._channel is not None:
        line._channel.close()
        line._channel = None
