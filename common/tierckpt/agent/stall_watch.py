"""A trainer's look at its node's agent while orders are in progress: which place hangs, since when.

The agent's status thread answers also while its other threads sit in a dead disk. So an agent that
does not answer at all is stopped, and one that answers names the level without progress. Nothing
here waits: a question is sent at one boundary, and its answer is read at a later one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt._text import is_url
from tierckpt.core.levels import LOCAL, PERSISTENT

from . import protocol
from .address import AgentFiles
from .protocol import PACKET_BYTES, AgentStatus, PacketJoiner, Problem, SessionSettings

if TYPE_CHECKING:
    from .server import Agent

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
        """What the memory level does while the local one hangs, in words."""
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
        """Ask, or read the answer; returns what has changed, in words. Waits for nothing.

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
            return self._heard(inline.status(), now)
        if self._question is None:  # None again: no agent listens, it starts or ends
            self._asked_seconds, self._question = now, place.connect_as_watcher()
            return []
        with contextlib.suppress(BlockingIOError, InterruptedError):
            answer = _answer(self._question)
            self.close()
            self._asked_seconds = now - ASK_SECONDS
            if answer is not None:
                return self._heard(answer, now)
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
        self.close()  # a job that is dropped says no goodbye

    def close(self) -> None:
        """Forget the question."""
        if self._question is not None:
            self._question.close()
            self._question = None

    def _heard(self, status: AgentStatus, now: float) -> list[Problem]:
        changes = self._goes_on(AGENT, now)
        task = {task.level: str(task.id) for task in status.tasks}
        found = {LOCAL: (status.local_quiet_seconds, task.get(LOCAL, ""))}
        if self._session.persistent is not None:
            found[PERSISTENT] = status.quiet_seconds, task.get(PERSISTENT, "")
        for level, (quiet, version) in found.items():
            far = level == PERSISTENT and is_url(self._place(level))
            if quiet >= (STALL_SECONDS_OF_STORE if far else STALL_SECONDS):
                changes += self._stalls(level, now - quiet, version)
            else:
                changes += self._goes_on(level, now)
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
        text += self._memory() if what == LOCAL else "; versions on other levels go on"
        return [self._said(what, text, logging.ERROR)]

    def _goes_on(self, what: str, now: float) -> list[Problem]:
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


__all__ = ["AGENT", "StallWatch"]
