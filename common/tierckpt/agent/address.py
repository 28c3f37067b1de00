"""The address of a node's agent, the settings that it is started with, and its environment.

An agent's work depends on its settings, and on the environment of the process that started it:
variables of the trainers, and the folders in which they find modules. Clients of stores keep the
environment that they started with. So a restarted job compares its environment with that of an
agent of an earlier run. When keys or credentials differ, that agent shuts down and the job starts
its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from tierckpt._children import module_path, without_packages_own
from tierckpt.storage.job_directory import JobDirectory

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "TAKEN",
    "AgentFiles",
    "AgentSettings",
    "environment_fingerprint",
    "relevant_environment",
]


TAKEN = 3
"""Exit status of an agent that found another one in its place."""


class AgentSettings(Struct, frozen=True):
    """Settings that an agent gets at its start."""

    root: str
    """Parent directory of the job's folder in shared memory."""
    folder: str
    index: int = 0
    """Number of the agent's place. Place 1 is used when the agent in place 0 hangs, and so on."""
    linger_seconds: float = 60.0
    peers: bool = False
    """It will meet the agents of other nodes."""
    module_path: tuple[str, ...] = ()
    """Where the agent finds modules; empty: the same as its starter. See `_children`."""

    def place(self) -> AgentFiles:
        """Files of the agent with these settings."""
        return AgentFiles(JobDirectory(Path(self.root), self.folder), self.index)


class AgentFiles(Struct, frozen=True):
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


ENVIRONMENT_VARIABLE = "TIERCKPT_AGENT_FINGERPRINT"
"""Gives an agent its fingerprint through its environment, which only its user can read."""
ENVIRONMENT_PREFIXES = (
    "TIERCKPT_ENCRYPTION_",
    *("AWS_", "BOTO_", "S3_", "AZURE_", "GOOGLE_", "GCLOUD_", "GCS_", "CLOUDSDK_", "OSS_", "OCI_"),
    *("STORAGE_EMULATOR_", "HADOOP_", "KRB5", "HF_", "FSSPEC_", "SSL_CERT_"),
)
"""Prefixes of variables that keys, stores and their clients read. Settings come with a session."""
ENVIRONMENT_NAMES = frozenset(
    (
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HOME", "XDG_CONFIG_HOME"),
    )
)
"""More variables, in upper or lower case."""


def environment_fingerprint() -> str:
    """Fingerprint of this process: equal where agents would work alike. It reveals no value."""
    path = without_packages_own(module_path())
    parts = [sys.executable, path, sorted(relevant_environment(os.environ).items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def relevant_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that count; all others (ranks, ports) may differ from launch to launch."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIXES) or name.upper() in ENVIRONMENT_NAMES
    }
