"""Everything that a trainer hands over is answered exactly once, in any history of agents."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from msgspec.structs import replace

from tests.support.facts import facts_of
from tierckpt.agent import (
    PROTOCOL,
    AgentClient,
    AgentConnection,
    AgentFiles,
    AgentMessage,
    AgentSettings,
    Commit,
    CommitFailed,
    Committed,
    Flush,
    Flushed,
    FlushFailed,
    FlushOrder,
    Hello,
    Message,
    Outdated,
    Problem,
    Protect,
    Protected,
    ProtectFailed,
    SessionSettings,
    ShuttingDown,
    Unwelcome,
    Welcome,
    receive_message,
    send_message,
    version_of,
)
from tierckpt.format import ShardKey, VersionId

ENDS = ["says nothing more", "says nonsense", "closes", "closes in mid message"]


class PassedSlot:
    """A sealed slot, with the parts that the client uses."""

    path, name = None, "passed"

    def __init__(self, fd: int) -> None:
        self.fd = fd


class Agents:
    """An agent always listens; the test chooses its answers."""

    def __init__(self) -> None:
        self.channel: socket.socket | None = None
        self.pid = 0
        self.orders: list[Message] = []
        self.greeted = False

    def connect(self) -> socket.socket:
        assert self.channel is None or not self.open(), "there is one connection"
        self.close()
        ours, self.channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.greeted, self.orders, self.pid = False, [], self.pid + 1
        return ours

    def open(self) -> bool:
        """True if the trainer's end is open."""
        assert self.channel is not None
        with contextlib.suppress(OSError):
            self.read()
            return True
        return False

    def read(self) -> None:
        """All messages. Raises OSError when the other end is closed."""
        assert self.channel is not None
        while True:
            self.channel.setblocking(False)
            try:
                said, fds = receive_message(self.channel)
            except BlockingIOError:
                return
            finally:
                self.channel.setblocking(True)
            for fd in fds:
                os.close(fd)
            if said is None:
                raise ConnectionError("closed")
            if isinstance(said, Hello):
                assert said.protocol == PROTOCOL
            else:
                assert self.greeted, "nothing is said to an agent before its welcome"
                self.orders.append(said)

    def say(self, message: AgentMessage) -> None:
        assert self.channel is not None
        with contextlib.suppress(OSError):
            self.read()
            send_message(self.channel, message)
            self.greeted = self.greeted or isinstance(message, Welcome)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


def answer_to(order: Message, fails: bool) -> AgentMessage:
    match order:
        case Commit(key=key):
            done = Committed(key.id, 1, 0.0, 0.0, direct=False)
            return CommitFailed(key.id, "x") if fails else done
        case Flush(order=flush):
            return FlushFailed(flush.id, "x") if fails else Flushed(flush.id, 1, 0.0, True)
        case Protect(id=id_):
            return ProtectFailed(id_, "x") if fails else Protected(id_, 1, 0.0)
    raise AssertionError(order)


class HandingOver(RuleBasedStateMachine):
    """A client on one thread, and agents that behave in any way."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.agents = Agents()
        self.patch.setattr(AgentFiles, "connect", lambda place: self.agents.connect())
        self.patch.setattr(AgentConnection, "_reach", AgentConnection._reach_now)
        session = SessionSettings("/nowhere", 0, 1, "1")
        self.client = AgentClient(AgentSettings("/nowhere", "job"), session)
        self.fd = os.open(os.devnull, os.O_RDONLY)
        self.version = 0
        self.handed_over = Counter[tuple[str, VersionId]]()
        self.answered = Counter[tuple[str, VersionId]]()

    # --- the trainer -------------------------------------------------------------------------

    def id(self, what: str) -> VersionId:
        self.version += 1
        self.handed_over[what, VersionId(1, self.version)] += 1
        return VersionId(1, self.version)

    @rule()
    def commit(self) -> None:
        id_, slot = self.id("commit"), PassedSlot(self.fd)
        if self.client.commit(ShardKey(id_, 0, 1), slot):  # type: ignore[arg-type]
            self.answered["commit", id_] += 1

    @rule()
    def flush(self) -> None:
        id_ = self.id("flush")
        self.client.flush(FlushOrder("/nowhere", (0,), facts_of(id_), 1, "here"))

    @rule()
    def protect(self) -> None:
        self.client.protect(self.id("protect"))

    @rule()
    def poll(self) -> None:
        for message in self.client.poll():
            match message:
                case Committed(id=id_) | CommitFailed(id=id_):
                    self.answered["commit", id_] += 1
                case Flushed(id=id_) | FlushFailed(id=id_):
                    self.answered["flush", id_] += 1
                case Protected(id=id_) | ProtectFailed(id=id_):
                    self.answered["protect", id_] += 1
                case _:
                    assert isinstance(message, Problem)
                    assert version_of(message) is None

    # --- agents --------------------------------------------------------------------------------

    @precondition(lambda self: self.agents.channel is not None and not self.agents.greeted)
    @rule()
    def welcome(self) -> None:
        self.agents.say(Welcome(self.agents.pid))

    @precondition(lambda self: self.agents.channel is not None and not self.agents.greeted)
    @rule(passes_over=st.booleans())
    def refuse(self, passes_over: bool) -> None:
        self.agents.say(Unwelcome() if passes_over else ShuttingDown(self.agents.pid))

    @precondition(lambda self: self.agents.channel is not None)
    @rule(rarely=st.integers(0, 5))
    def outdated(self, rarely: int) -> None:
        if not rarely:
            self.agents.say(Outdated())

    @precondition(lambda self: self.agents.channel is not None and self.agents.greeted)
    @rule(fails=st.booleans(), which=st.integers(0, 5))
    def answer(self, fails: bool, which: int) -> None:
        with contextlib.suppress(OSError):
            self.agents.read()
        if self.agents.orders:
            order = self.agents.orders.pop(which % len(self.agents.orders))
            self.agents.say(answer_to(order, fails))

    @precondition(lambda self: self.agents.channel is not None)
    @rule(how=st.sampled_from(ENDS))
    def end(self, how: str) -> None:
        channel = self.agents.channel
        assert channel is not None
        with contextlib.suppress(OSError):
            if how == "says nonsense":
                channel.send(b'{"op": "nonsense"}')
            elif how == "closes in mid message":
                channel.send(b'+{"op"')
        if how.startswith("closes"):
            self.agents.close()

    def teardown(self) -> None:
        """The last agent answers everything; nothing is in progress then."""
        try:
            for _ in range(100):
                self.poll()
                if not (self.client.committing() or self.client.under_way()):
                    break
                # No wait for a predecessor's end, or between two rounds over all places.
                self.client._connection._at = replace(self.client._connection._at, ask_after=0.0)
                self.client._connection._reach_now()
                if not self.agents.greeted:
                    self.welcome()
                self.poll()
                with contextlib.suppress(OSError):
                    self.agents.read()
                for order in self.agents.orders:
                    self.agents.say(answer_to(order, fails=False))
                self.agents.orders.clear()
            assert self.answered == self.handed_over
        finally:
            self.patch.undo()
            self.client._connection.hang_up()
            self.agents.close()
            os.close(self.fd)


HandingOver.TestCase.settings = hypothesis_settings(max_examples=50, stateful_step_count=40)
TestHandingOver = HandingOver.TestCase
