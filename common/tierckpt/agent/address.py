"""Address: where the agent of a node listens, and what it is started with."""

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
"""Exit status of an agent that found another one at its place."""


@dataclass(frozen=True)
class AgentSettings:
    """What an agent is told at its start."""

    root: str
    """Of the job's folder in shared memory."""
    folder: str
    index: int = 0
    """Number 1 is started when number 0 is there and does not answer, and so on."""
    nice: int = 10
    """Its own, not beside its starter's."""
    linger_seconds: float = 60.0
    module_path: tuple[str, ...] = ()
    """Where it finds modules; empty: where its starter does, then. See `_children`."""

    def place(self) -> AgentFiles:
        """Where it is found."""
        return AgentFiles(JobDirectory(Path(self.root), self.folder), self.index)


@dataclass(frozen=True)
class AgentFiles:
    """Where the agent number `index` of a job on this node is found."""

    job: JobDirectory
    index: int

    @property
    def lock(self) -> Path:
        """Held by the living agent."""
        return self.job.path / f"agent{self.index}.lock"

    @property
    def address(self) -> Path:
        """Of the socket that it listens at."""
        return self.job.path / f"agent{self.index}.socket"

    def owner(self) -> int | None:
        """Process id of the agent that is here, or was until it was killed."""
        with contextlib.suppress(OSError, ValueError):
            return int(self.lock.read_text())
        return None

    def connect(self) -> socket.socket | None:
        """A connection to the agent that listens here, at once; None when there is none."""
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setblocking(False)
        try:
            with self._short() as name:
                channel.connect(name)
            if _peer_uid(channel) != os.getuid():
                raise PermissionError("another user listens here")
        except OSError:
            channel.close()
            return None
        return channel

    def listen(self) -> socket.socket:
        """Become the listener; what a dead one left is replaced."""
        self.address.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._short() as name:
            listener.bind(name)
        listener.listen(128)
        return listener

    @contextlib.contextmanager
    def _short(self) -> Iterator[str]:
        """The socket's path in less than the 108 bytes that the kernel takes."""
        fd = os.open(self.job.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{fd}/{self.address.name}"
        finally:
            os.close(fd)


def _peer_uid(channel: socket.socket) -> int:
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("iII", credentials)[1])


__all__ = ["TAKEN", "AgentFiles", "AgentSettings"]
