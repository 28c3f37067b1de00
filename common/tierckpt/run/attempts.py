"""The environment of one attempt: a rendezvous that no process of an earlier attempt has used.

torch's `env://` meets at MASTER_ADDR:MASTER_PORT, or in the store of torchrun's agent, where the
keys of dead processes stay (torch issues 135712, 167288). Horovod's Gloo meets at the launcher's
HTTP server, where they stay, too. So each attempt after the first gets a port or a server of its
own, on rank 0's machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from typing import Any

from . import process
from .launcher import HOROVODRUN, Place

ATTEMPT = "TIERCKPT_ATTEMPT"
"""Set in a script's environment: the number of the attempt, from 1."""
_COUNT, _AGENT_STORE = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_ADDR, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"


class Rendezvous:
    """Makes the meeting place of each attempt, in rank 0's shim."""

    def __init__(self, place: Place, handlers: process.Handlers) -> None:
        self._place, self._handlers = place, handlers
        self._reserved: socket.socket | None = None
        self.helper: int | None = None
        """Process id of the current attempt's server; it is a child of this process."""

    def renew(self, slots: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
        """Variables for the next attempt's environment. `slots`: Horovod's variables by rank."""
        self.close()
        found = {}
        if "MASTER_PORT" in os.environ:
            self._reserved = reserve()
            found["MASTER_PORT"] = str(self._reserved.getsockname()[1])
        if self._place.launcher == HOROVODRUN and _PORT in os.environ:
            found[_ADDR] = address_towards(os.environ[_ADDR], int(os.environ[_PORT]))
            found[_PORT] = str(self._serve(slots))
        return found

    def _serve(self, slots: Mapping[int, Mapping[str, str]]) -> int:
        """Start a server of Horovod's in a process of its own; returns the port."""
        reading, writing = os.pipe()
        self.helper = process.fork_helper(self._handlers, lambda: _serve_horovod(slots, writing))
        os.close(writing)
        with os.fdopen(reading, "rb") as answer:
            return int(answer.read(16))

    def close(self) -> None:
        """End what `renew` has made."""
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        pid, self.helper = self.helper, None
        if pid is not None:
            process.kill_one(pid)


def reserve() -> socket.socket:
    """Bind a free port. The script's store can bind it, too, as neither listens before; no other
    program is given it."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    reserved = socket.socket(family)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.bind(("", 0))
    return reserved


def address_towards(host: str, port: int) -> str:
    """This machine's address in the network of a host. Sends nothing."""
    info = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
        probe.connect(info[4])
        return str(probe.getsockname()[0])


def _serve_horovod(slots: Mapping[int, Mapping[str, str]], writing: int) -> None:
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    names = ("RANK", "LOCAL_RANK", "CROSS_RANK", "SIZE", "LOCAL_SIZE", "CROSS_SIZE")
    plan = [
        SlotInfo(slot["HOROVOD_HOSTNAME"], *(int(slot[f"HOROVOD_{name}"]) for name in names))
        for _, slot in sorted(slots.items())
    ]
    server = RendezvousServer()
    port = server.start()
    server.init(plan)
    os.write(writing, str(port).encode())
    os.close(writing)
    while True:
        signal.pause()


def slot_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank's place that `Rendezvous.renew` needs."""
    return {n: v for n, v in environment.items() if n.startswith("HOROVOD_") and "_GLOO" not in n}


def enter(attempt: int, changes: Mapping[str, str], environment: Any = os.environ) -> None:
    """In the script's process: set its environment."""
    environment[ATTEMPT] = str(attempt)
    if attempt == 1:
        return
    environment.update(changes)
    if _COUNT in environment:
        environment[_COUNT] = str(int(environment[_COUNT]) + attempt - 1)
    if "MASTER_PORT" in changes and _AGENT_STORE in environment:
        environment[_AGENT_STORE] = "False"
    if error_file := environment.get(_ERROR_FILE):  # the error of the last attempt
        with contextlib.suppress(OSError):
            os.unlink(error_file)


__all__ = ["ATTEMPT", "Rendezvous", "address_towards", "enter", "reserve", "slot_of"]
