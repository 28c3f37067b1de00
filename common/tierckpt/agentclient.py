"""The training side of the agent: finds or starts it, hands it sealed slots, hears how it went.

`commit` may be called by the copier thread, everything else by the training thread. Nothing here
waits for the agent but `wait` and `close`: what it cannot be told yet is kept until it is there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from . import packets, surroundings
from .agent import PROTOCOL, TAKEN, Agent, AgentSettings
from .children import child_environment
from .desk import DeskSettings
from .flusher import FlushOrder
from .naming import Lineage, ShardKey, VersionId
from .patience import Patience
from .slots import Slot

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
LOOK_SECONDS = 5.0
"""So often the agent is asked whether its flushes get on, while somebody waits for them."""
MOST_AGENTS = 4
"""So many are passed over, then, after ANSWER_SECONDS, the first is asked again."""

Packet = tuple[bytes, list[int]]
"""A message or a part of one, and the descriptors that go with it."""


class AgentClient:
    """One rank's connection to its node's agent; a dead agent is replaced by the next commit."""

    def __init__(
        self,
        settings: AgentSettings,
        desk: DeskSettings,
        inline: bool = False,
        surroundings: str = "",
    ) -> None:
        """`inline`: the agent is a thread of this process (for debugging, and where processes
        may not be started); it dies with it. `surroundings`: the same for all ranks of the node,
        see `surroundings.fingerprint`; an agent of others is left alone."""
        self.settings = settings
        self.desk = desk
        self._surroundings = surroundings
        self.starts = 0
        """Agents that this client started."""
        self.pid: int | None = None
        """Process id of the agent, once it said welcome."""
        self._inline = Agent(0.0) if inline else None
        self._lock = threading.Lock()
        self._pending: dict[VersionId, tuple[ShardKey, Slot]] = {}
        self._tried_again: set[VersionId] = set()
        """Commits that one agent did not survive. Should the next one not either, it is their
        fault."""
        self._flushing: dict[VersionId, FlushOrder] = {}
        self._protecting: set[VersionId] = set()
        self._introduction: list[dict[str, Any]] = []
        self._roster: dict[str, Any] = {}
        """What the agent knew before it was told."""
        self._introduced: int | None = None
        """Process id of the agent that was told."""
        self._unsent: deque[Packet] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._channel: socket.socket | None = None
        self._packets: deque[bytes] = deque()
        """Those that came and were not heeded yet."""
        self._incoming = packets.Joiner()
        self._welcome = False
        self._since = 0.0
        """When the connection, or the start of the agent, was begun."""
        self._start_after = self._ask_after = 0.0
        self._passed: set[int] = set()
        """Numbers of agents that are stuck, or not for us."""
        self._reaching = self._closing = False
        self._reacher: threading.Thread | None = None
        self._unproved = False
        """The agent that was started last was never heard of."""
        self._heard: list[dict[str, Any]] = []
        self._asked = False
        """Whether flushes get on, and there is no answer yet."""
        self._quiet: list[tuple[float, float]] = []
        """The answers in seconds, and when they came (monotonic)."""
        # A forked child (a DataLoader's worker) would keep the socket open when we are killed.
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(mine()))

    def start(self, first: bool = True) -> None:
        """Connect to the agent, or start it; OSError when it cannot be started.

        `first`: this is the node's first rank; the others leave the start to it for a while.
        """
        with self._lock:
            self._start_after = 0.0 if first else time.monotonic() + JOIN_SECONDS
            self._reach()

    def commit(self, key: ShardKey, slot: Slot) -> str:
        """Hand over a sealed slot; returns "" or why that was not possible. Never blocks."""
        with self._lock:
            try:
                self._receive()
                self._reach()
            except OSError as error:
                self._give_up(f"the agent cannot be started ({error})")
                return f"{type(error).__name__}: {error}"
            self._tried_again.discard(key.id)
            self._hand_over(key, slot)
            return ""

    def _hand_over(self, key: ShardKey, slot: Slot) -> None:
        self._pending[key.id] = key, slot
        segment = str(slot.path) if slot.path else None
        message = {"op": "commit", "stem": key.stem, "segment": segment}
        self._send(message, [] if slot.path else [slot.fd])

    def retire(
        self,
        safe: VersionId | None,
        lineage: Lineage,
        keep: Iterable[VersionId] = (),
        void: Iterable[VersionId] = (),
    ) -> None:
        """Tell the agent what is safe, so that retention can go on; versions in `keep` stay
        whatever the policy says, and `void` ones count for nothing. Never blocks."""
        message = {
            "op": "retire",
            "safe": None if safe is None else [safe.generation, safe.version],
            "lineage": lineage,
            "keep": [[id_.generation, id_.version] for id_ in keep],
            "void": [[id_.generation, id_.version] for id_ in void],
        }
        with self._lock:
            if self._welcome:
                self._send(message)

    def flush(self, order: FlushOrder) -> None:
        """Have a version flushed that is complete on all local levels. Never blocks.

        One call for the whole node. An agent that dies meanwhile leaves it to its successor.
        """
        with self._lock:
            self._flushing[order.name.id] = order
            self._send({"op": "flush", "order": order.as_message()})

    def protect(self, version: VersionId, lost: Collection[int] | None = None) -> None:
        """Have a version protected by the agents of other nodes. One call for the whole node.

        `lost`: the shards beside which parity is missing, where only that is to be made.
        """
        with self._lock:
            self._protecting.add(version)
            self._send(
                {
                    "op": "protect",
                    "version": version.version,
                    "generation": version.generation,
                    "lost": None if lost is None else sorted(lost),
                }
            )

    def introduce(
        self, where: dict[str, Any], parties: list[dict[str, Any]], roster: dict[str, Any]
    ) -> None:
        """Tell the agent, which listens at `where`, who the others are; its successor, too.

        That listens at the same port, so nobody else has to be told. Never blocks.
        """
        with self._lock:
            know = {"op": "know", "parties": parties, "roster": roster}
            self._introduction = [{"op": "meet", "where": where}, know]
            self._introduced = self.pid
            self._send(know)

    def roster(self, timeout_seconds: float) -> dict[str, Any]:
        """What was said of other nodes' agents: by us; or before us, if the agent was there before
        us and bids welcome in time. Empty where nothing was."""
        if self._introduction:
            said: dict[str, Any] = self._introduction[-1]["roster"]
            return said
        deadline = time.monotonic() + timeout_seconds
        while not (self._welcome or self.starts) and time.monotonic() < deadline:
            with self._lock:
                self._look()
            time.sleep(0.002)
        return self._roster

    def ask(self, op: str, answer: str, timeout_seconds: float, **values: Any) -> dict[str, Any]:
        """Say something and wait for the answer; other messages are kept for `poll`.

        Raises TimeoutError. For attach and restart, not for steps.
        """
        with self._lock:
            self._send({"op": op, **values})
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            with self._lock:
                self._look()
                for message in self._heard:
                    if message["op"] == answer:
                        self._heard.remove(message)
                        return message
            time.sleep(0.002)
        raise TimeoutError(f"the agent did not answer within {timeout_seconds:.0f} s")

    def under_way(self) -> dict[str, list[VersionId]]:
        """Versions that the agent has yet to bring to a level beyond this node, or to give up; by
        level, where there are any."""
        known = {"peer": self._protecting, "persistent": self._flushing}
        return {level: sorted(versions) for level, versions in known.items() if versions}

    def behind(self) -> list[str]:
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
            about = (m for m in self._heard if "version" in m)
            return id_ in known or any(
                id_ == VersionId(m["generation"], m["version"]) for m in about
            )

    def pinned(self) -> set[str]:
        """Names of the slots that the agent reads."""
        with self._lock:
            return {slot.name for _, slot in self._pending.values()}

    def poll(self) -> list[dict[str, Any]]:
        """What the agent said since the last call. Never blocks."""
        with self._lock:
            self._look()
            heard, self._heard = self._heard, []
            return heard

    def _look(self) -> None:
        """With the lock held: hear, and go on with what could not be said yet."""
        self._receive()
        if self._unsent:
            try:
                self._reach()
                self._flush()
            except OSError as error:
                self._give_up(f"the agent cannot be started ({error})")

    def wait(
        self, timeout_seconds: float | None, poll_seconds: float = 0.002, everything: bool = False
    ) -> bool:
        """Wait until no commit is under way; False on time-out. Messages are kept for `poll`.

        `everything`: nor any flush, nor an exchange with other nodes.
        """
        begin = time.monotonic()
        while self._pending or (everything and self.behind()):
            with self._lock:
                self._look()
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
        patience = Patience(quiet_seconds, time.monotonic())
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
                    self._send({"op": "ask"})
        return True

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Say goodbye and let the agent finish; it is left alone if that takes longer."""
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            self._closing = True
            # One that is just starting would wait for somebody to speak to.
            while (self._unsent or self._starting()) and time.monotonic() < deadline:
                self._receive()
                with contextlib.suppress(OSError):
                    self._reach_now()
                time.sleep(0.005)
            served_by = self.pid
            if self._channel is not None and self._say_goodbye(deadline):
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

    # --- with the lock held --------------------------------------------------------------------

    def _say_goodbye(self, deadline_seconds: float) -> bool:
        """Wait until the agent has finished our work; True when it ends, having no other."""
        assert self._channel is not None
        last = False
        with contextlib.suppress(OSError):
            self._channel.settimeout(max(deadline_seconds - time.monotonic(), 0.01))
            self._channel.send(b'{"op": "bye"}')
            while packet := self._channel.recv(packets.PACKET_BYTES):
                if message := self._incoming.add(packet):
                    last = bool(message.get("last"))
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

    def _reach(self) -> None:
        """Do what can be done at once to be connected, and leave the rest to a thread.

        The next boundary may be far off, and what was sealed shall not wait for it. Raises OSError
        when no agent, or no thread, can be started.
        """
        self._reach_now()
        if not self._welcome and not self._reaching:
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
        """The thread: until the agent has bidden welcome, and has been told what waited."""
        while True:
            with self._lock:
                try:
                    self._receive()
                    if not self._welcome and not self._closing:
                        self._reach_now()
                except OSError as error:
                    self._give_up(f"the agent cannot be started ({error})")
                    self._reaching = False
                    return
                if self._welcome or self._closing:
                    self._reaching = False
                    return
            time.sleep(0.005)

    def _reach_now(self) -> None:
        if self._channel is not None:
            if self._welcome or time.monotonic() - self._since < ANSWER_SECONDS:
                return
            self._pass_over("does not answer", logging.ERROR)
        if time.monotonic() >= self._ask_after and not self._connect():
            self._start_process()

    def _connect(self) -> bool:
        """Connect and say hello; messages follow when the agent has bidden welcome."""
        if self._inline is not None:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._channel.setblocking(False)
            self._thread = self._inline.attend(theirs)
        else:
            self._channel = self._call()
        if self._channel is None:
            return False
        self._since, self._incoming = time.monotonic(), packets.Joiner()
        self._packets.clear()
        hello = {"op": "hello", "protocol": PROTOCOL, "desk": asdict(self.desk)}
        try:
            packets.send(self._channel, {**hello, "surroundings": self._surroundings})
        except OSError:  # it is just ending
            self._drop()
        return self._channel is not None

    def _call(self) -> socket.socket | None:
        """A connection to the first agent that is there: other ranks, or an earlier life, may have
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
        status = self._process.returncode if self._process is not None else 0
        if self._unproved and status not in (0, TAKEN):
            self._process = None
            raise ChildProcessError(f"a new agent ended with exit status {status}")
        if now < self._start_after:
            return
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tierckpt.agent",
                json.dumps(asdict(self.settings)),
                str(os.getpid()),
            ],
            env={**child_environment(), surroundings.VARIABLE: self._surroundings},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        self._since, self._start_after = now, now + AGAIN_SECONDS
        self._unproved = True
        self.starts += 1

    def _pass_over(self, why: str, severity: int) -> None:
        """The agent here is stuck, or not for us. It was told nothing yet."""
        self._drop()
        number = self.settings.index
        self._passed.add(number)
        if not self._places():
            self._passed.clear()
            self._ask_after = time.monotonic() + ANSWER_SECONDS
        self.settings = replace(self.settings, index=self._places()[0])
        self._process = None
        text = f"agent {number} of this node {why}; another one is started"
        self._heard.append({"op": "problem", "error": text, "severity": severity})

    def _send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        self._unsent.extend(_packed(message, fds))
        self._flush()

    def _flush(self) -> None:
        """Send what waits, as far as the agent takes it."""
        while self._welcome and self._unsent:
            assert self._channel is not None
            data, fds = self._unsent[0]
            try:
                socket.send_fds(self._channel, [data], fds)
            except (BlockingIOError, InterruptedError, ConnectionError):
                return  # the buffer is full, or it is gone: that will be heard
            except OSError as error:  # and so will all that come after it
                why = f"the agent cannot be told what to do ({error})"
                self._heard.append({"op": "problem", "error": why})
                self._give_up(why)
                return
            self._unsent.popleft()

    def _receive(self) -> None:
        while self._channel is not None:
            ended = self._take_packets(self._channel)
            while self._packets and self._channel is not None:
                if (message := self._incoming.add(self._packets[0])) is not None:
                    self._hear(message)
                self._packets.popleft()  # rather heard twice than lost to an interrupt
            if not ended or self._channel is None:
                return
            if self._welcome:
                self._lose("the agent ended unexpectedly")
            else:  # it was just ending, or is of another version of tierckpt: see `_reach`
                self._drop()

    def _take_packets(self, channel: socket.socket) -> bool:
        """What came; True when nothing will any more. In one call, whose loop is in C: between two
        an interrupt could come, and have the packet that one returned."""
        try:
            self._packets.extend(iter(partial(channel.recv, packets.PACKET_BYTES), b""))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            pass
        return True

    def _hear(self, message: dict[str, Any]) -> None:
        if message["op"] == "welcome":
            self._welcome, self.pid, self._unproved = True, message["pid"], False
            self._roster = message["roster"]
            if self.pid != self._introduced:
                first = [packet for each in self._introduction for packet in _packed(each)]
                self._unsent.extendleft(reversed(first))
                self._introduced = self.pid
            self._flush()
            return
        if message["op"] == "unwelcome":
            why = "has an earlier start's keys, credentials or modules, or is another tierckpt's"
            self._pass_over(why, logging.INFO)
            return
        if message["op"] == "quiet":
            self._asked = False
            self._quiet.append((message["seconds"], time.monotonic()))
            return
        if message["op"] in ("committed", "failed"):
            id_ = VersionId(message["generation"], message["version"])
            self._pending.pop(id_, None)
            self._tried_again.discard(id_)
        if message["op"] in ("protected", "protect_failed"):
            self._protecting.discard(VersionId(message["generation"], message["version"]))
        if message["op"] in ("flushed", "flush_failed"):
            self._flushing.pop(VersionId(message["generation"], message["version"]), None)
        self._heard.append(message)

    def _drop(self) -> None:
        assert self._channel is not None
        self._channel.close()
        self._channel, self._welcome, self.pid = None, False, None
        # Its process may be seen to live for a moment yet: that is no start that takes long.
        self._since = time.monotonic()

    def _lose(self, reason: str) -> None:
        """The agent is no more. A successor commits what it had, and does its flushes."""
        again = {i: what for i, what in self._pending.items() if i not in self._tried_again}
        for id_ in again:
            del self._pending[id_]
        then = "another one commits what it had" if again else "the next commit starts one"
        self._heard.append({"op": "problem", "error": f"{reason}; {then}"})
        self._bury(reason)
        for key, slot in again.values():
            self._tried_again.add(key.id)
            self._hand_over(key, slot)

    def _bury(self, reason: str) -> None:
        """What was handed over, or was to be, is not committed; a successor does the flushes."""
        self._report_lost("failed", self._pending, reason)
        self._report_lost("protect_failed", self._protecting, reason)
        self._tried_again.difference_update(self._pending)
        self._pending.clear()
        self._protecting.clear()
        self._unsent.clear()
        self._asked = False
        if self._channel is not None:
            self._drop()
        for order in self._flushing.values():
            self._send({"op": "flush", "order": order.as_message()})

    def _give_up(self, reason: str) -> None:
        """There will be no successor before the next commit, so nobody shall wait for one."""
        self._report_lost("flush_failed", self._flushing, reason)
        self._flushing.clear()
        self._bury(reason)
        self._unsent.clear()

    def _report_lost(self, op: str, versions: Iterable[VersionId], reason: str) -> None:
        for id_ in versions:
            lost = {"op": op, "error": reason, "version": id_.version}
            self._heard.append({**lost, "generation": id_.generation})


def _packed(message: dict[str, Any], fds: list[int] | None = None) -> list[Packet]:
    """The descriptors go with the first packet."""
    first, *more = packets.packets_of(message)
    return [(first, fds or []), *((packet, []) for packet in more)]


def _close_in_child(client: AgentClient | None) -> None:
    if client is not None and client._channel is not None:
        client._channel.close()
        client._channel = None
