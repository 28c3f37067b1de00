"""Requests for the status of agents on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tierckpt.agent import protocol
from tierckpt.agent.address import AgentFiles
from tierckpt.agent.connection_states import MOST_AGENTS
from tierckpt.agent.protocol import AgentStatus
from tierckpt.storage.files import file_lock
from tierckpt.storage.memory.job_directory import JobDirectory

ANSWER_SECONDS = 1.0
RUNS, SILENT, GONE = "runs", "silent", "gone"


@dataclass(frozen=True)
class FoundAgent:
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
    places = (AgentFiles(job, index) for index in range(MOST_AGENTS))
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


__all__ = ["GONE", "RUNS", "SILENT", "FoundAgent", "find_agents"]
