"""The address of a node's agent, and the settings that it is started with."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierckpt.storage.memory.job_directory import JobDirectory

TAKEN = 3
"""Exit status of an agent that found another one in its place."""


@dataclass(frozen=True)
class AgentSettings:
    """Settings that an agent gets at its start."""

    root: str
    """Parent directory of the job's folder in shared memory."""
    folder: str
    index: int = 0
    """Number of the agent's place. Place 1 is used when the agent in place 0 hangs, and so on."""
    nice: int = 10
    """The agent's absolute niceness, not relative to its starter's."""
    linger_seconds: float = 60.0
    peers: bool = False
    """It will meet the agents of other nodes."""
    module_path: tuple[str, ...] = ()
    """Where the agent finds modules; empty: the same as its starter. See `_children`."""

    def place(self) -> AgentFiles:
        """Files of the agent with these settings."""
        return AgentFiles(JobDirectory(Path(self.root), self.folder), self.index)


@dataclass(frozen=True)
class AgentFiles:
    """Lock and socket of agent number `index` of a job on this node."""

    job: JobDirectory
    index: int

    @property
    def lock(self) -> Path:
        """Lock file, held while the agent runs."""
        return self.job.path / f"agent{self.index}.lock"

    @property
    def address(self) -> Path:
        """Path of the socket at which the agent listens."""
        return self.job.path / f"agent{self.index}.socket"

    @property
    def status_address(self) -> Path:
        """Path of the socket at which the agent answers watchers."""
        return self.job.path / f"agent{self.index}.status"

    def owner(self) -> int | None:
        """Process id of the agent here; also of a killed one."""
        with contextlib.suppress(OSError, ValueError):
            return int(self.lock.read_text())
        return None

    def connect(self) -> socket.socket | None:
        """Connect to the agent that listens here, without waiting; None when there is none."""
        return self._connect(self.address)

    def connect_as_watcher(self) -> socket.socket | None:
        """Connect to ask for the agent's status, as `connect`."""
        return self._connect(self.status_address)

    def _connect(self, address: Path) -> socket.socket | None:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setblocking(False)
        try:
            with self._short(address) as name:
                channel.connect(name)
            if _peer_uid(channel) != os.getuid():
                raise PermissionError("another user listens here")
        except OSError:
            channel.close()
            return None
        return channel

    def listen(self) -> socket.socket:
        """Listen here as the agent; the socket of a dead agent is replaced."""
        return self._listen(self.address)

    def listen_for_watchers(self) -> socket.socket:
        """Listen for requests for the agent's status, as `listen`."""
        return self._listen(self.status_address)

    def _listen(self, address: Path) -> socket.socket:
        address.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._short(address) as name:
            listener.bind(name)
        listener.listen(128)
        return listener

    @contextlib.contextmanager
    def _short(self, address: Path) -> Iterator[str]:
        """A path for a socket below the kernel's limit of 108 bytes."""
        fd = os.open(self.job.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{fd}/{address.name}"
        finally:
            os.close(fd)


def _peer_uid(channel: socket.socket) -> int:
    return _peer(channel)[1]


def _peer(channel: socket.socket) -> tuple[int, int]:
    """Process id (0: in another container) and user id of the other end."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("iII", credentials)
    return pid, uid


__all__ = ["TAKEN", "AgentFiles", "AgentSettings"]
