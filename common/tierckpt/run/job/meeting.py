"""The meeting of a job's shims: how the other ranks find rank 0's.

Rank 0's shim listens. Its address is in the launcher's own store (torchrun's agent, horovodrun's
rendezvous server); or it listens at MASTER_ADDR:MASTER_PORT, before rank 0's script does; or, on
one machine, at a socket with the launch's name; or at `--rendezvous`. A process of its own asks the
store and connects, so that the shim keeps neither.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import http.client
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tierckpt.run import process
from tierckpt.run.options import Options

from .attempts import address_towards
from .channel import Message
from .launcher import HOROVODRUN, Place, node_of, slot_of

Result = TypeVar("Result")
PATIENCE_SECONDS = 300.0
"""As torch's stores wait for all ranks."""
NAP_SECONDS = 0.05
STORE, KV, PORT, NAME = "store", "kv", "port", "name"
NOWHERE = (
    "the shims of this job cannot find each other, so failures are left to the launcher. Give "
    "tierckpt run --rendezvous HOST:PORT, with rank 0's host and a free port, or set MASTER_ADDR "
    "and MASTER_PORT"
)


@dataclass(frozen=True)
class Meeting:
    """The way to meet, and the address that it uses; see the module's docstring."""

    kind: str
    host: str = ""
    port: int = 0
    key: str = ""
    """The name of the socket, or of the entry in the store."""
    is_lasting: bool = False
    """Rank 0's shim listens there as long as the job runs: spares may come at any time."""


def meeting_of(place: Place, rendezvous: str) -> Meeting | None:
    """The way for this launch; None if there is none."""
    get = os.environ.get
    if rendezvous:
        host, _, port = rendezvous.rpartition(":")
        return Meeting(PORT, host.strip("[]"), int(port), is_lasting=True)
    host, port = get("MASTER_ADDR", ""), get("MASTER_PORT", "0")
    if get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Meeting(STORE, host, int(port), f"tierckpt/run/{_start(place)}")
    if place.launcher == HOROVODRUN and get("HOROVOD_GLOO_RENDEZVOUS_PORT"):
        server = get("HOROVOD_GLOO_RENDEZVOUS_ADDR", ""), get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
        return Meeting(KV, server[0], int(server[1]), "shims")
    if host and port.isdigit() and int(port):
        return Meeting(PORT, host, int(port), place.job)
    if place.is_one_node and place.job:
        text = f"{os.getuid()} {place.job}"
        return Meeting(NAME, key=f"\0tierckpt-run-{hashlib.sha256(text.encode()).hexdigest()}")
    return None


def _start(place: Place) -> str:
    """The number of the launcher's own restarts: they share a store."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


class Listener:
    """Rank 0's end: accepts connections until all ranks are there."""

    def __init__(self, meeting: Meeting, size: int) -> None:
        """Listen. Raises OSError if the address is taken."""
        self._meeting, self.is_lasting = meeting, meeting.is_lasting
        published = meeting.kind in (STORE, KV)
        self.secret = (
            secrets.token_hex(16) if published else meeting.key if not _named(meeting) else ""
        )
        if _named(meeting):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.bind(meeting.key)
        else:
            dual = socket.has_dualstack_ipv6()
            self.socket = socket.create_server(
                ("", 0 if published else meeting.port),
                family=socket.AF_INET6 if dual else socket.AF_INET,
                dualstack_ipv6=dual,
            )
        self.socket.listen(min(size, 4096))
        self.socket.setblocking(False)

    def publish(self, handlers: process.Handlers) -> int | None:
        """Write the address to the launcher's store, in a process of its own; returns its id."""
        meeting = self._meeting
        if meeting.kind not in (STORE, KV):
            return None
        port = self.socket.getsockname()[1]
        host = (
            meeting.host if meeting.kind == STORE else address_towards(meeting.host, meeting.port)
        )
        entry = json.dumps([host, port, self.secret])
        return process.fork_helper(handlers, lambda: _publish(meeting, entry))

    def accept(self) -> socket.socket | None:
        """A new connection, of this user if that is known; else None."""
        try:
            stream, _ = self.socket.accept()
        except OSError:
            return None
        if _named(self._meeting) and _user_of(stream) != os.getuid():
            stream.close()
            return None
        return stream

    def close(self) -> None:
        """Free the address."""
        self.socket.close()


def _named(meeting: Meeting) -> bool:
    return meeting.kind == NAME


def _user_of(stream: socket.socket) -> int:
    credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], "little")


def _publish(meeting: Meeting, entry: str) -> None:
    if meeting.kind == STORE:
        _store(meeting).set(meeting.key, entry)
        return
    connection = http.client.HTTPConnection(meeting.host, meeting.port, timeout=PATIENCE_SECONDS)
    connection.request("PUT", f"/tierckpt/{meeting.key}", body=entry.encode())
    connection.getresponse().read()


def _store(meeting: Meeting) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        meeting.host,
        meeting.port,
        is_master=False,
        timeout=datetime.timedelta(seconds=PATIENCE_SECONDS),
    )


# --- the other ranks ------------------------------------------------------------------------------


def hello_of(place: Place, options: Options) -> Message:
    """The first message of this process to rank 0's shim."""
    return {
        "rank": place.rank,
        "size": place.size,
        "slot": slot_of(os.environ),
        "node": node_of(os.environ),
        "program": [options.program, *options.arguments],
        "standby": options.standby,
    }


def connect(
    meeting: Meeting, hello: Message, handlers: process.Handlers
) -> tuple[int, socket.socket]:
    """Connect to rank 0's shim, in a process of its own; returns its id, and a socket for
    `received`."""
    ours, theirs = socket.socketpair()

    def work() -> None:
        ours.close()
        stream, secret = _dial(meeting)
        stream.sendall(json.dumps({**hello, "secret": secret}).encode() + b"\n")
        socket.send_fds(theirs, [b"x"], [stream.fileno()])

    pid = process.fork_helper(handlers, work)
    theirs.close()
    return pid, ours


def received(answer: socket.socket) -> socket.socket | None:
    """The connected socket; None if the connection failed."""
    with answer:
        _, descriptors, _, _ = socket.recv_fds(answer, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _dial(meeting: Meeting) -> tuple[socket.socket, str]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    if meeting.kind == NAME:
        return _until(deadline, lambda: _dial_name(meeting.key)), ""
    host, port, secret = meeting.host, meeting.port, meeting.key
    if meeting.kind == STORE:
        host, port, secret = json.loads(_store(meeting).get(meeting.key))
    elif meeting.kind == KV:
        host, port, secret = _until(deadline, lambda: _read_kv(meeting))
    return _until(deadline, lambda: socket.create_connection((host, port), 10.0)), secret


def _until(deadline: float, attempt: Callable[[], Result]) -> Result:
    while True:
        try:
            return attempt()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(NAP_SECONDS)


def _dial_name(name: str) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.connect(name)
    except OSError:
        stream.close()
        raise
    return stream


def _read_kv(meeting: Meeting) -> tuple[str, int, str]:
    connection = http.client.HTTPConnection(meeting.host, meeting.port, timeout=10.0)
    with contextlib.closing(connection):
        connection.request("GET", f"/tierckpt/{meeting.key}")
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise FileNotFoundError(meeting.key)
        host, port, secret = json.loads(body)
        return host, port, secret


__all__ = ["NOWHERE", "Listener", "Meeting", "connect", "hello_of", "meeting_of", "received"]
