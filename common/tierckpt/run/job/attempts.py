"""The environment of one attempt: a rendezvous that no process of an earlier attempt has used.

torch's `env://` meets at MASTER_ADDR:MASTER_PORT, or in the store of torchrun's agent, where the
keys of dead processes stay (torch issues 135712, 167288). Horovod's Gloo meets at the launcher's
HTTP server, where they stay, too. So each attempt after the first gets servers of its own, on rank
0's machine: torch's store, announced as that of an agent, and Horovod's server.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping
from typing import Any

from tierckpt._milestones import ATTEMPT_VARIABLE
from tierckpt.run import process
from tierckpt.run.signals import FORWARDED

from .launcher import HOROVODRUN, Place

_COUNT, _AGENT_STORE = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_ADDR, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"


Slots = Mapping[int, Mapping[str, str]]
"""The variables of all ranks' places (`launcher.slot_of`), by rank."""


class Rendezvous:
    """Makes the meeting place of each attempt, in rank 0's shim: servers in a process of its own,
    which lasts as long as the attempt.

    torch's clients wait for 0.3 s after a refused connection, so the server is there before the
    scripts, and before the failure."""

    def __init__(self, place: Place, handlers: process.Handlers) -> None:
        self._place, self._handlers = place, handlers
        self._current: _Servers | None = None
        self._next: _Servers | None = None

    def prepare(self, slots: Slots) -> None:
        """Start the servers of the next attempt."""
        if self._next is None:
            self._next = _Servers(self._place, self._handlers, slots)

    def renew(self, slots: Slots) -> dict[str, str]:
        """End the servers of the last attempt; return variables for the next one's environment."""
        self.prepare(slots)
        former, self._current, self._next = self._current, self._next, None
        if former is not None:
            former.close()
        assert self._current is not None
        return self._current.environment()

    @property
    def helpers(self) -> list[int]:
        """Ids of the processes."""
        return [each.pid for each in (self._current, self._next) if each is not None]

    def forget(self) -> None:
        """In a forked process: close descriptors; the servers stay."""
        for each in (self._current, self._next):
            if each is not None:
                each.forget()

    def close(self) -> None:
        """End all servers."""
        for each in (self._current, self._next):
            if each is not None:
                each.close()
        self._current = self._next = None


class _Servers:
    """The servers of one attempt, and their process."""

    def __init__(self, place: Place, handlers: process.Handlers, slots: Slots) -> None:
        reading, writing = os.pipe()
        self._answer: int | None = reading
        self.pid = process.fork_helper(handlers, lambda: _serve(place, slots, writing))
        os.close(writing)

    def environment(self) -> dict[str, str]:
        """Variables that name the servers; empty if none could be started."""
        assert self._answer is not None
        with os.fdopen(self._answer, "rb") as answer:
            self._answer = None
            found: dict[str, str] = json.loads(answer.read() or b"{}")
            return found

    def forget(self) -> None:
        """Close the descriptor."""
        if self._answer is not None:
            os.close(self._answer)
            self._answer = None

    def close(self) -> None:
        """End the process."""
        self.forget()
        process.kill_one(self.pid)


def _serve(place: Place, slots: Slots, writing: int) -> None:
    """Start the servers, write their variables, and stay."""
    for number in FORWARDED:  # a script may need them until its end
        signal.signal(number, signal.SIG_IGN)
    found, kept = {}, list[Any]()
    if "MASTER_PORT" in os.environ:
        import torch.distributed as dist

        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        kept.append(store)
        found["MASTER_PORT"] = str(store.port)
    if place.launcher == HOROVODRUN and _PORT in os.environ:
        found[_ADDR] = address_towards(os.environ[_ADDR], int(os.environ[_PORT]))
        found[_PORT] = str(_serve_horovod(slots, kept))
    os.write(writing, json.dumps(found).encode())
    os.close(writing)
    while True:
        signal.pause()


def address_towards(host: str, port: int) -> str:
    """This machine's address in the network of a host. Sends nothing."""
    info = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
        probe.connect(info[4])
        return str(probe.getsockname()[0])


def _serve_horovod(slots: Slots, kept: list[Any]) -> int:
    """Start Horovod's own server; returns its port."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    names = ("RANK", "LOCAL_RANK", "CROSS_RANK", "SIZE", "LOCAL_SIZE", "CROSS_SIZE")
    server = RendezvousServer()
    port = int(server.start())
    server.init(
        [
            SlotInfo(slot["HOROVOD_HOSTNAME"], *(int(slot[f"HOROVOD_{name}"]) for name in names))
            for _, slot in sorted(slots.items())
        ]
    )
    kept.append(server)
    return port


def needs_own(environment: Mapping[str, str] = os.environ) -> bool:
    """True if the launcher itself has restarted its processes, and they share a store."""
    return environment.get(_AGENT_STORE) == "True" and environment.get(_COUNT, "0") != "0"


def enter(attempt: int, changes: Mapping[str, str], environment: Any = os.environ) -> None:
    """In the script's process: set its environment."""
    environment[ATTEMPT_VARIABLE] = str(attempt)
    environment.update(changes)
    if "MASTER_PORT" in changes:
        environment[_AGENT_STORE] = "True"
    if attempt == 1:
        return
    environment[_COUNT] = str(int(environment.get(_COUNT, "0")) + attempt - 1)
    if error_file := environment.get(_ERROR_FILE):  # the error of the last attempt
        with contextlib.suppress(OSError):
            os.unlink(error_file)


__all__ = ["Rendezvous", "address_towards", "enter", "needs_own"]
