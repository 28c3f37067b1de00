"""The status of the agent: its work is counted, shown to watchers, and looked at by its trainers.

`Activity` counts the agent's work: results by level, and the work under way. `StatusServer`
answers watchers in the agent's process, on a thread of its own. `find_agents` asks the agents of
this machine, for processes outside the job: `tierckpt watch`. A watcher has a socket of its own:
the agent would take another connection for a trainer's, and wait for it. No trainer takes part,
and without a watcher the cost is a few counters.

`StallWatch` is a trainer's look at its node's agent while orders are in progress: which place
hangs, since when. The agent's status thread answers also while its other threads sit in a dead
disk. So an agent that does not answer at all is stopped, and one that answers names the level
without progress. A `StallWatch` never waits: it sends a question at one boundary, and reads its
answer at a later one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from tierckpt._text import is_url
from tierckpt.agent.address import _peer_uid
from tierckpt.agent.connection_states import MAX_AGENTS
from tierckpt.agent.protocol import (
    AgentMessage,
    LevelStatus,
    NotStored,
    Staged,
    StageFailed,
    Stored,
    TaskStatus,
)
from tierckpt.core.levels import LOCAL, PERSISTENT, RANK
from tierckpt.format.ids import VersionId
from tierckpt.storage import file_lock
from tierckpt.storage.job_directory import JobDirectory

from . import protocol
from .address import AgentFiles
from .protocol import PACKET_BYTES, AgentStatus, PacketJoiner, Problem, SessionSettings

if TYPE_CHECKING:
    from .server import Agent

__all__ = [
    "AGENT",
    "GONE",
    "RUNS",
    "SILENT",
    "Activity",
    "FoundAgent",
    "StallWatch",
    "StatusServer",
    "Task",
    "find_agents",
]


Member = TypeVar("Member")


class Task:
    """A version on its way to a level. One thread works on it and changes it; any may read it."""

    def __init__(self, level: str, id_: VersionId, shard: int | None = None) -> None:
        self._level, self._id, self._shard = level, id_, shard
        self._began_seconds = time.time()
        self._done_bytes = self._total_bytes = 0

    def restart(self, total_bytes: int) -> None:
        """Start an attempt, with an upper bound of its bytes."""
        self._done_bytes, self._total_bytes = 0, total_bytes

    def advance(self, nbytes: int) -> None:
        """Count bytes as done."""
        self._done_bytes += nbytes

    def status(self) -> TaskStatus:
        """The task now."""
        done = min(self._done_bytes, self._total_bytes)
        return TaskStatus(
            self._level, self._id, self._began_seconds, self._shard, done, self._total_bytes
        )


class _Order:
    """An order for the local level, in one thread; any may look at it."""

    def __init__(self) -> None:
        self._thread = threading.get_native_id()
        self._sign, self._moved_at = "", time.monotonic()

    def quiet_seconds(self) -> float:
        """Time since the first look that saw no progress of its thread."""
        sign, now = _work_of(self._thread), time.monotonic()
        if sign != self._sign:
            self._sign, self._moved_at = sign, now
        return now - self._moved_at


class Activity:
    """The commits under way, and the results of all work by level. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._levels: dict[str, LevelStatus] = {}
        self._commits: list[Task] = []
        self._orders: list[_Order] = []

    def order(self) -> AbstractContextManager[None]:
        """An order for the local level, while this thread carries it out."""
        return self._while_in(self._orders, _Order())

    def local_quiet_seconds(self) -> float:
        """Time since the slowest of them last proceeded."""
        with self._lock:
            return max((order.quiet_seconds() for order in self._orders), default=0.0)

    def commit(self, id_: VersionId, shard: int, nbytes: int) -> AbstractContextManager[None]:
        """A commit to the local level, while it is under way."""
        task = Task(LOCAL, id_, shard)
        task.restart(nbytes)
        return self._while_in(self._commits, task)

    @contextlib.contextmanager
    def _while_in(self, members: list[Member], member: Member) -> Iterator[None]:
        with self._lock:
            members.append(member)
        try:
            yield
        finally:
            with self._lock:
                members.remove(member)

    def record(self, message: AgentMessage) -> None:
        """Count a result; any other message changes nothing."""
        if not isinstance(message, Stored | NotStored | Staged | StageFailed):
            return
        with self._lock:
            before = self._levels.get(message.level, LevelStatus(message.level))
            match message:
                case Stored() | Staged():
                    self._levels[message.level] = _stored(before, message)
                case NotStored() | StageFailed():
                    self._levels[message.level] = _not_stored(before, message)

    def commits(self) -> list[TaskStatus]:
        """The commits under way, the oldest first."""
        with self._lock:
            return sorted((t.status() for t in self._commits), key=lambda t: t.began_seconds)

    def levels(self, waiting: dict[str, int]) -> list[LevelStatus]:
        """The results by level. `waiting`: number of versions that wait, by level."""
        with self._lock:
            found = dict(self._levels)
        for level, count in waiting.items():
            found[level] = replace(found.get(level, LevelStatus(level)), waiting=count)
        return sorted(found.values(), key=lambda each: RANK.get(each.level, len(RANK)))


def _work_of(thread: int) -> str:
    """The bytes that a thread has read and written, and its time in Python and in codecs. The
    kernel counts bytes as it gives them to the device, so also within one long call. Its own time
    does not count: a thread that waits for a dead disk may wake up again and again."""
    folder = f"/proc/self/task/{thread}"
    try:
        with open(f"{folder}/io") as counters, open(f"{folder}/stat") as stat:
            return counters.read() + stat.read().rpartition(")")[2].split()[11]
    except (OSError, IndexError):  # it has just ended, or the kernel does not count
        return ""


def _stored(before: LevelStatus, message: Stored | Staged) -> LevelStatus:
    newest, at_seconds = before.newest, before.newest_at_seconds
    if newest is None or message.id > newest:
        newest, at_seconds = message.id, time.time()
    return replace(
        before,
        stored=before.stored + 1,
        stored_bytes=before.stored_bytes + message.nbytes,
        newest=newest,
        newest_at_seconds=at_seconds,
        last_bytes=message.nbytes,
        last_seconds=sum(message.times_seconds.values()),
    )


def _not_stored(before: LevelStatus, message: NotStored | StageFailed) -> LevelStatus:
    if message.superseded:
        return replace(before, superseded=before.superseded + 1)
    text = f"{message.id}: {message.error}"
    return replace(before, failed=before.failed + 1, last_failure=text)


SEND_SECONDS = 1.0
"""A watcher that does not read its answer within this time is hung up on."""


class StatusServer:
    """Sends the agent's status to each connection, and closes it. In a thread of its own, which
    sleeps while no one asks. Owns `listener`."""

    def __init__(self, listener: socket.socket, status: Callable[[], AgentStatus]) -> None:
        """Start to answer. `status` is called in the other thread. Raises RuntimeError if no thread
        can be started."""
        self._listener, self._status = listener, status
        thread = threading.Thread(target=self._serve, name="tierckpt-status", daemon=True)
        thread.start()

    def close(self) -> None:
        """Stop answering. Does not wait."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread up
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                channel, _ = self._listener.accept()
            except OSError:
                return
            with channel, contextlib.suppress(Exception):  # any failure costs this answer only
                channel.settimeout(SEND_SECONDS)
                if _peer_uid(channel) == os.getuid():
                    protocol.send(channel, self._status())


ANSWER_SECONDS = 1.0
RUNS, SILENT, GONE = "runs", "silent", "gone"


class FoundAgent(Struct, frozen=True):
    """An agent that left its lock file in a job's folder."""

    index: int
    pid: int | None
    state: str
    """`runs`: it has answered. `silent`: its process lives and does not answer. `gone`: its process
    was killed; an agent that ends by itself removes its files."""
    status: AgentStatus | None = None
    why: str = ""
    """The reason of the silence."""


def find_agents(job: JobDirectory) -> list[FoundAgent]:
    """All agents of a job on this machine. Waits ANSWER_SECONDS for each that does not answer."""
    places = (AgentFiles(job, index) for index in range(MAX_AGENTS))
    return [agent for agent in map(_look, places) if agent is not None]


def _look(place: AgentFiles) -> FoundAgent | None:
    status, why = None, ""
    try:
        status = _ask(place)
    except (OSError, ValueError) as error:
        why = str(error) or type(error).__name__
    if status is not None:
        return FoundAgent(place.index, status.pid, RUNS, status)
    if (held := _is_held(place.lock)) is None:
        return None
    state = SILENT if held else GONE
    return FoundAgent(place.index, place.owner(), state, None, why if held else "")


def _ask(place: AgentFiles) -> AgentStatus | None:
    """The agent's answer; None without an agent. Raises OSError or ValueError if it does not
    answer, or not in this release's way."""
    channel = place.connect_as_watcher()
    if channel is None:
        return None
    with channel:
        channel.settimeout(ANSWER_SECONDS)
        message, descriptors = protocol.receive(channel)
    for descriptor in descriptors:
        os.close(descriptor)
    return message if isinstance(message, AgentStatus) else None


def _is_held(lock: Path) -> bool | None:
    """Whether a process has the lock; None if the file does not exist or cannot be opened. Takes no
    lock: an agent that starts now must find it free."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return file_lock.held(fd)
    finally:
        os.close(fd)


LOOK_SECONDS = 0.2
"""Interval of looks."""
ASK_SECONDS = 1.0
"""Interval of questions, and the age of an order before the first one."""
STALL_SECONDS = 7.0
"""A place without progress for this time, or an agent without an answer, is reported."""
STALL_SECONDS_OF_STORE = 30.0
"""The same for an object store: its client sends large parts, and reports only whole ones."""
BUSY_SECONDS = 60.0
"""The same for an agent that waits for a core: the machine is busy."""
PACKETS_SECONDS = 1.0
AGENT = "agent"


class StallWatch:
    """What hangs, as far as is known. Training thread."""

    def __init__(self, session: SessionSettings) -> None:
        self._question: socket.socket | None = None
        self._session = session
        self.outlook: Callable[[], str] = str
        """What the memory level does while the local one hangs, as text."""
        self.stalls: dict[str, float] = {}
        """Levels that hang, or AGENT, and since when (monotonic)."""
        self.since = 0.0
        """The time of the first look at the orders in progress (monotonic); 0: there are none, and
        nothing hangs."""
        self.due = 0.0
        """The time of the next look (monotonic)."""
        self._asked_seconds = 0.0

    def look(
        self, at_work: bool, place: AgentFiles, pid: int | None, inline: Agent | None
    ) -> list[Problem]:
        """Ask, or read the answer; returns what has changed, as text. Waits for nothing.

        `at_work`: some order is in progress. The agent is at `place`, with this process id, or is a
        part of this process."""
        now = time.monotonic()
        if self.due == math.inf:
            return []
        self.due = now + LOOK_SECONDS
        if not (at_work or self.stalls):
            self.since = 0.0
            self.close()
            return []
        self.since = self.since or now
        if now - max(self.since, self._asked_seconds) < ASK_SECONDS:
            return []
        if inline is not None:
            self._asked_seconds = now
            return self._answered(inline.status(), now)
        if self._question is None:  # None again: no agent listens, it starts or ends
            self._asked_seconds, self._question = now, place.connect_as_watcher()
            return []
        with contextlib.suppress(BlockingIOError, InterruptedError):
            answer = _answer(self._question)
            self.close()
            self._asked_seconds = now - ASK_SECONDS
            if answer is not None:
                return self._answered(answer, now)
            self.stalls.pop(AGENT, None)  # it has ended, which is reported
            return []
        busy = pid is not None and _waits_for_core(pid)
        if now - self._asked_seconds < (BUSY_SECONDS if busy else STALL_SECONDS):
            return []
        return self._stalls(AGENT, self._asked_seconds, f"process {pid}")

    def end(self) -> None:
        """Look no more."""
        self.due = math.inf
        self.close()

    def __del__(self) -> None:
        self.close()  # a dropped job says no goodbye

    def close(self) -> None:
        """Forget the question."""
        if self._question is not None:
            self._question.close()
            self._question = None

    def _answered(self, status: AgentStatus, now: float) -> list[Problem]:
        changes = self._continues(AGENT, now)
        task = {task.level: str(task.id) for task in status.tasks}
        found = {LOCAL: (status.local_quiet_seconds, task.get(LOCAL, ""))}
        if self._session.persistent is not None:
            found[PERSISTENT] = status.quiet_seconds, task.get(PERSISTENT, "")
        for level, (quiet, version) in found.items():
            far = level == PERSISTENT and is_url(self._place(level))
            if quiet >= (STALL_SECONDS_OF_STORE if far else STALL_SECONDS):
                changes += self._stalls(level, now - quiet, version)
            else:
                changes += self._continues(level, now)
        return changes

    def _stalls(self, what: str, since: float, which: str) -> list[Problem]:
        if what in self.stalls:
            return []
        self.stalls[what] = since
        at = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - since)))
        if what == AGENT:
            text = (
                f"the agent of this node ({which}) has not answered since {at}: nothing reaches "
                f"{self._session.directory} or a level after it until it does{self._memory()}"
            )
            return [self._said(LOCAL, text, logging.ERROR)]
        work = f"nothing of {which} has been written" if which else "it has not answered"
        text = f"{self._place(what)} hangs: {work} since {at}"
        text += self._memory() if what == LOCAL else "; versions on other levels continue"
        return [self._said(what, text, logging.ERROR)]

    def _continues(self, what: str, now: float) -> list[Problem]:
        since = self.stalls.pop(what, None)
        if since is None:
            return []
        who = "the agent of this node" if what == AGENT else self._place(what)
        text = f"{who} answers again, after {now - since:.0f} s"
        return [self._said(LOCAL if what == AGENT else what, text, logging.WARNING)]

    def _memory(self) -> str:
        return f"; {text}" if (text := self.outlook()) else ""

    def _place(self, level: str) -> str:
        persistent = self._session.persistent
        return persistent.path if level == PERSISTENT and persistent else self._session.directory

    def _said(self, level: str, text: str, severity: int) -> Problem:
        """One rank speaks for its node."""
        return Problem(text, level, severity if self._session.speaks else logging.DEBUG)


def _answer(question: socket.socket) -> AgentStatus | None:
    """The answer, once it is there; None if the agent has ended or does not answer in this
    release's way. Raises BlockingIOError while it is not there."""
    question.setblocking(False)
    joiner = PacketJoiner()
    try:
        packet = question.recv(PACKET_BYTES)
        question.settimeout(PACKETS_SECONDS)  # the rest of a long answer is on its way
        while packet:
            if (data := joiner.add(packet)) is not None:
                message = protocol.decode(data)
                return message if isinstance(message, AgentStatus) else None
            packet = question.recv(PACKET_BYTES)
    except (BlockingIOError, InterruptedError):
        raise
    except (OSError, ValueError):
        pass
    return None


def _waits_for_core(pid: int) -> bool:
    """Whether some thread of the process could run, if a core were free."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if stat.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False
