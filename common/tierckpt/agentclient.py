"""The training side of the agent: starts it, hands it sealed slots, hears how it went.

`commit` may be called by the copier thread, everything else by the training thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .agent import MESSAGE_BYTES, AgentSettings
from .naming import Lineage, ShardKey, VersionId
from .slots import Slot


class AgentClient:
    """One rank's connection to its agent; a dead agent is started again by the next commit."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.starts = 0
        self._lock = threading.Lock()
        self._pending: dict[VersionId, Slot] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._heard: list[dict[str, Any]] = []
        # A forked child (a DataLoader's worker) would keep the socket open when we are killed.
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(mine()))

    def start(self) -> None:
        """Start the process; OSError when that is not possible."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        source_root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join([source_root, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "tierckpt.agent",
                        json.dumps(asdict(self.settings)),
                        str(theirs.fileno()),
                    ],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    cwd="/",
                )
        except OSError:
            ours.close()
            raise
        ours.setblocking(False)
        self._channel = ours
        self.starts += 1

    @property
    def pid(self) -> int | None:
        """Process id of the agent, for tests and diagnosis."""
        return self._process.pid if self._process else None

    def commit(self, key: ShardKey, slot: Slot) -> str:
        """Hand over a sealed slot; returns "" or why that was not possible. Never blocks."""
        message = {
            "op": "commit",
            "stem": key.stem,
            "segment": str(slot.path) if slot.path else None,
        }
        with self._lock:
            try:
                if self._channel is None or self._dead():
                    self._mourn()
                    self.start()
                assert self._channel is not None
                fds = [] if slot.path else [slot.fd]
                socket.send_fds(self._channel, [json.dumps(message).encode()], fds)
            except OSError as error:
                self._bury(f"the agent cannot be reached ({error})")
                return f"{type(error).__name__}: {error}"
            self._pending[key.id] = slot
            return ""

    def retire(self, safe: VersionId, lineage: Lineage) -> None:
        """Tell the agent what is safe, so that retention can go on. Never blocks."""
        message = {"op": "retire", "safe": [safe.generation, safe.version], "lineage": lineage}
        with self._lock, contextlib.suppress(OSError):
            if self._channel is not None:
                self._channel.send(json.dumps(message).encode())

    def busy(self) -> int:
        """How many commits are under way."""
        return len(self._pending)

    def pinned(self) -> set[str]:
        """Names of the slots that the agent reads."""
        with self._lock:
            return {slot.name for slot in self._pending.values()}

    def poll(self) -> list[dict[str, Any]]:
        """What the agent said since the last call. Never blocks."""
        with self._lock:
            self._receive()
            if self._dead():
                self._mourn()
            heard, self._heard = self._heard, []
            return heard

    def wait(self, timeout_seconds: float | None, poll_seconds: float = 0.002) -> bool:
        """Wait until nothing is under way; False on time-out. Messages are kept for `poll`."""
        begin = time.monotonic()
        kept: list[dict[str, Any]] = []
        while self._pending:
            kept += self.poll()
            if timeout_seconds is not None and time.monotonic() - begin > timeout_seconds:
                break
            time.sleep(poll_seconds)
        with self._lock:
            self._heard = kept + self._heard
        return not self._pending

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Let the agent finish and end; it is left alone when it takes longer than that."""
        with self._lock:
            if self._channel is not None:
                with contextlib.suppress(OSError):
                    self._channel.shutdown(socket.SHUT_WR)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_seconds)
            # Popen would warn about a child that still runs; this one may, on its own.
            self._process.returncode = self._process.returncode or 0
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            self._channel = None

    # --- with the lock held --------------------------------------------------------------------

    def _dead(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _mourn(self) -> None:
        """Hear a dead agent's last words; its end is news even when it had nothing to do."""
        if self._channel is None:
            return  # there was none, or it is buried already
        self._receive()
        code = self._process.returncode if self._process else None
        reason = f"the agent ended unexpectedly (exit status {code})"
        if not self._pending:
            self._heard.append({"op": "problem", "error": f"{reason}; the next commit starts one"})
        self._bury(reason)

    def _receive(self) -> None:
        while self._channel is not None:
            try:
                data = self._channel.recv(MESSAGE_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                return
            if not data:
                return
            message = json.loads(data)
            if message["op"] in ("committed", "failed"):
                id_ = VersionId(message["generation"], message["version"])
                self._pending.pop(id_, None)
            self._heard.append(message)

    def _bury(self, reason: str) -> None:
        """The agent is no more: what it had is not committed."""
        for id_ in self._pending:
            self._heard.append(
                {
                    "op": "failed",
                    "error": reason,
                    "version": id_.version,
                    "generation": id_.generation,
                }
            )
        self._pending.clear()
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _close_in_child(client: AgentClient | None) -> None:
    if client is not None and client._channel is not None:
        client._channel.close()
        client._channel = None
